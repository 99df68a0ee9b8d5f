"""Layer norm against a plain copy of the same bytes, and against PyTorch, on this machine's GPU.

    python bench/layer_norm_rows.py [RESULTS.json]

r is time over the time of ``torch.copy_`` moving as many bytes as the norm must (2 per element forward, 3 backward),
all measured in this run, each with a cold L2. Every result is checked against float64 on some rows before its time
counts.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import cupy
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timing import seconds

import cunorm

SHAPES = [(32768, columns) for columns in (256, 512, 1024, 2048, 4096, 8192, 16384)]
SHAPES += [(4096, 4096), (8192, 65536), (10_000_000, 10), (10, 10_000_000), (32768, 4097)]


def copy_seconds(moved_bytes: int) -> float:
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source))


def check(x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, weight: torch.Tensor) -> None:
    rows = slice(0, min(8, len(x)))
    exact = x[rows].double().requires_grad_()
    expected = F.layer_norm(exact, x.shape[1:], weight.double(), weight.double())
    expected.backward(dy[rows].double())
    for result, reference in ((y[rows], expected.detach()), (dx[rows], exact.grad)):
        error = float((result.double() - reference).norm() / reference.norm())
        if not error < 2.0**-8:
            raise SystemExit(f"wrong result for {tuple(x.shape)}: relative error {error:.1e}")


def measure(shape: tuple[int, int]) -> dict[str, Any]:
    x, dy = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.rand(shape[1], device="cuda").to(torch.bfloat16) + 0.5
    y, mean, rstd = cunorm.layer_norm(x, weight, weight, return_stats=True)
    dx, _, _ = cunorm.layer_norm_backward(dy, x, weight, mean, rstd)
    check(x, y, dy, dx, weight)
    del dx
    forward_copy, backward_copy = copy_seconds(2 * x.nbytes), copy_seconds(3 * x.nbytes)
    aten = torch.ops.aten
    times = {
        "forward": seconds(lambda: cunorm.layer_norm(x, weight, weight, out=y)),
        "backward": seconds(lambda: cunorm.layer_norm_backward(dy, x, weight, mean, rstd)),
        "torch forward": seconds(lambda: F.layer_norm(x, shape[1:], weight, weight)),
        "torch backward": seconds(
            lambda: aten.native_layer_norm_backward(
                dy, x, shape[1:], mean[:, None], rstd[:, None], weight, weight, [True, True, True]
            )
        ),
    }
    copies = {name: backward_copy if "backward" in name else forward_copy for name in times}
    return {
        "shape": list(shape),
        "dtype": "bfloat16",
        "copy_us": {"forward": forward_copy * 1e6, "backward": backward_copy * 1e6},
        "us": {name: time * 1e6 for name, time in times.items()},
        "r": {name: time / copies[name] for name, time in times.items()},
    }


def main() -> None:
    results = []
    table = Table("rows x columns", "forward r", "PyTorch r", "backward r", "PyTorch r")
    for shape in SHAPES:
        result = measure(shape)
        results.append(result)
        r = result["r"]
        columns = [f"{r[name]:.2f}" for name in ("forward", "torch forward", "backward", "torch backward")]
        table.add_row(f"{shape[0]} x {shape[1]}", *columns)
    Console(width=100).print(table)
    if len(sys.argv) > 1:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cupy": cupy.__version__, "cunorm": cunorm.__version__},
            "date": datetime.date.today().isoformat(),
            "results": results,
        }
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
