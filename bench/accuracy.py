"""Relative errors against float64, ||result - exact|| / ||exact||, with PyTorch's on the same data beside them.

    python bench/accuracy.py [RESULTS.json]

On a GPU where PyTorch sees one, else on the CPU. Data: ordinary (standard normal), shifted (mean 10,000 times the
standard deviation) and outliers (every 64th column a hundred times as large); gradients for a random dy, weight and
bias.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cunorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = (256, 4096, 100_000)


def make(kind: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, columns, device=DEVICE)
    if kind == "shifted":
        x += 1e4
    if kind == "outliers":
        x[:, ::64] *= 100
    return x.to(dtype)


def errors(kind: str, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    rows = max(16, 2**20 // columns)
    x, dy = make(kind, rows, columns, dtype), make("ordinary", rows, columns, dtype)
    weight, bias = (torch.randn(columns, device=DEVICE).to(dtype) for _ in range(2))

    def run(norm: Any, to: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(to).requires_grad_() for t in (x, weight, bias)]
        y = norm(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(to))]

    def torch_norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, (columns,), weight, bias)

    exact = run(torch_norm, torch.float64)
    result: dict[str, Any] = {"data": kind, "dtype": str(dtype).removeprefix("torch."), "shape": [rows, columns]}
    for name, norm in (("cunorm", cunorm.layer_norm), ("torch", torch_norm)):
        found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(run(norm, dtype), exact)]
        result[name] = dict(zip(("y", "dx", "dweight", "dbias"), found))
    return result


def main() -> None:
    torch.manual_seed(0)
    cases = [("ordinary", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    cases += [("shifted", torch.float32), ("outliers", torch.float32), ("ordinary", torch.float64)]
    results = [errors(kind, columns, dtype) for kind, dtype in cases for columns in COLUMNS]
    names = ("y", "dx", "dweight", "dbias")
    table = Table("data", "dtype", "columns", *(f"{name}: ours / torch" for name in names))
    for item in results:
        pairs = [f"{item['cunorm'][name]:.1e} / {item['torch'][name]:.1e}" for name in names]
        table.add_row(item["data"], item["dtype"], str(item["shape"][1]), *pairs)
    Console(width=140).print(table)
    if len(sys.argv) > 1:
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        report = {
            "device": device,
            "versions": {"torch": torch.__version__, "cunorm": cunorm.__version__},
            "date": datetime.date.today().isoformat(),
            "results": results,
        }
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
