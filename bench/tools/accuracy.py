"""Relative errors against float64, ||result - exact|| / ||exact||, with PyTorch's on the same data beside them.

    python bench/tools/accuracy.py [--json RESULTS.json]

On a GPU where PyTorch sees one, else on the CPU. Data: ordinary (standard normal), shifted (mean 10,000 times the
standard deviation) and outliers (every 64th column a hundred times as large); gradients for a random dy, weight and
bias.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cunorm
from cunorm.bench.suites import LAYOUTS, readable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = (256, 4096, 100_000)
CHANNEL_SHAPES = {"instance_norm": (8, 32, 64, 64), "group_norm": (8, 128, 32, 32), "batch_norm": (8, 32, 64, 64)}
GROUPS = 32


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, device=DEVICE)
    if kind == "shifted":
        x += 1e4
    if kind == "outliers":
        x[..., ::64] *= 100
    return x.to(dtype)


def norms(op: str, columns: int) -> tuple[Any, Any]:
    """cunorm's function and PyTorch's, of x, weight and bias."""
    if op == "layer_norm":
        return cunorm.layer_norm, lambda x, *vectors: F.layer_norm(x, (columns,), *vectors)
    if op == "instance_norm":
        return cunorm.instance_norm, lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias)
    if op == "group_norm":
        return (
            lambda x, *vectors: cunorm.group_norm(x, GROUPS, *vectors),
            lambda x, *vectors: F.group_norm(x, GROUPS, *vectors),
        )
    return (
        lambda x, *vectors: cunorm.batch_norm(x, *vectors, training=True),
        lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
    )


def errors(op: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "") -> dict[str, Any]:
    x, dy = make(kind, shape, dtype), make("ordinary", shape, dtype)
    if layout == "N...C":
        x, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy))
    size = shape[1] if layout else shape[-1]
    weight, bias = (torch.randn(size, device=DEVICE).to(dtype) for _ in range(2))

    def run(norm: Any, to: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(to).requires_grad_() for t in (x, weight, bias)]
        y = norm(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(to))]

    ours, theirs = norms(op, size)
    exact = run(theirs, torch.float64)
    result: dict[str, Any] = {"op": op, "data": kind, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    result["layout"] = layout
    for name, norm in (("cunorm", ours), ("torch", theirs)):
        found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(run(norm, dtype), exact)]
        result[name] = dict(zip(("y", "dx", "dweight", "dbias"), found))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of the norms and their gradients, beside PyTorch's.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    target = parser.parse_args().json
    torch.manual_seed(0)
    cases = [("ordinary", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    cases += [("shifted", torch.float32), ("outliers", torch.float32), ("ordinary", torch.float64)]
    shapes = [(max(16, 2**20 // columns), columns) for columns in COLUMNS]
    results = [errors("layer_norm", kind, shape, dtype) for kind, dtype in cases for shape in shapes]
    for op, shape in CHANNEL_SHAPES.items():
        results += [errors(op, kind, shape, dtype, layout) for kind, dtype in cases for layout in LAYOUTS]
    names = ("y", "dx", "dweight", "dbias")
    table = Table("op", "data", "dtype", "shape", *(f"{name}: ours / torch" for name in names))
    for item in results:
        pairs = [f"{item['cunorm'][name]:.1e} / {item['torch'][name]:.1e}" for name in names]
        sizes = f"{readable(tuple(item['shape']))} {item['layout']}".rstrip()
        table.add_row(item["op"], item["data"], item["dtype"], sizes, *pairs)
    Console(width=160).print(table)
    if target is not None:
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        report = {
            "device": device,
            "versions": {"torch": torch.__version__, "cunorm": cunorm.__version__},
            "date": datetime.date.today().isoformat(),
            "results": results,
        }
        target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
