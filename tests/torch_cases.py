"""Calls of every op, and what else the tests of torch.compile, torch.export, torch.func and torch.library share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cunorm
import cunorm.adapters.torch

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
ROOT = Path(__file__).parents[1]
Tensors = dict[str, torch.Tensor]


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Case:
    """A public function with options, and tensors for it: x first, then those that may have a gradient."""

    def __init__(self, function: Any, tensors: Tensors, constants: Tensors | None = None, **options: Any) -> None:
        self.function, self.tensors, self.constants, self.options = function, tensors, constants or {}, options

    def __call__(self, *tensors: torch.Tensor, **more: torch.Tensor) -> Any:
        """The function of all or some of the tensors, the others as they are here."""
        given = {**self.constants, **self.tensors, **dict(zip(self.tensors, tensors)), **more}
        return self.function(**given, **self.options)

    def fresh(self, device: str = "cpu", grad: bool = False) -> list[torch.Tensor]:
        return [tensor.to(device, copy=True).detach().requires_grad_(grad) for tensor in self.tensors.values()]


ROW = {"x": data(3, 4, 8), "weight": data(8, seed=1), "bias": data(8, seed=2)}
IMAGE = {"x": data(2, 4, 3, 5), "weight": data(4, seed=1), "bias": data(4, seed=2)}
LAST = IMAGE | {"x": IMAGE["x"].to(memory_format=torch.channels_last)}
RUNNING = {"running_mean": data(4, seed=3), "running_var": data(4, seed=4).square() + 0.5}
MIXED = {"x": data(3, 8, dtype=torch.bfloat16), "weight": data(8, seed=1).float(), "bias": data(8, seed=2).half()}
CASES = {
    "layer_norm": Case(cunorm.layer_norm, ROW),
    "layer_norm, all": Case(
        cunorm.layer_norm,
        {"x": data(3, 4, 8), "residual": data(3, 4, 8, seed=3), "weight": data(3, 8), "bias": data(3, 8, seed=2)},
        axis=(0, -1),
        activation="gelu",
        return_stats=True,
    ),
    "layer_norm, mixed": Case(cunorm.layer_norm, MIXED, activation="silu"),
    "rms_norm": Case(cunorm.rms_norm, {"x": ROW["x"], "weight": ROW["weight"]}, weight_offset=1.0, return_stats=True),
    "rms_norm, residual": Case(cunorm.rms_norm, {"x": ROW["x"], "residual": data(3, 4, 8, seed=3)}),
    "instance_norm": Case(cunorm.instance_norm, IMAGE, activation="relu"),
    "instance_norm, last": Case(cunorm.instance_norm, LAST, data_format="NCHW", return_stats=True),
    "group_norm": Case(cunorm.group_norm, LAST, num_groups=2, activation="silu"),
    "group_norm, NWC": Case(cunorm.group_norm, {"x": data(2, 3, 4)}, num_groups=2, data_format="NWC"),
    "batch_norm": Case(cunorm.batch_norm, IMAGE, training=True, return_stats=True),
    "batch_norm, evaluation": Case(cunorm.batch_norm, LAST, RUNNING, training=False, activation="gelu_tanh"),
    "gelu": Case(cunorm.gelu, {"x": ROW["x"]}),
    "gelu, bias": Case(cunorm.gelu, {"x": ROW["x"], "bias": ROW["bias"]}, approximate="tanh"),
}
STATISTICS = Case(cunorm.batch_norm_stats, {"x": LAST["x"]})
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def tuple_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def objective(result: Any) -> torch.Tensor:
    """A number whose gradients differ from place to place."""
    return sum((item.double().square().sum() for item in tuple_of(result) if item.requires_grad), torch.zeros(()))


def gradients(function: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(objective(function(*tensors)), tensors)


def assert_same(results: Any, expected: Any) -> None:
    """Bit by bit, and alike in memory."""
    for result, tensor in zip(tuple_of(results), tuple_of(expected), strict=True):
        assert result.dtype == tensor.dtype and result.stride() == tensor.stride()
        assert torch.equal(result, tensor)


def run(code: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(data(8).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, total = cunorm.rms_norm(x, self.weight, residual=x.sin(), activation="silu")
        return cunorm.gelu(y + total, approximate="tanh")  # type: ignore[no-any-return]


class Norm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = cunorm.layer_norm(x, self.weight, self.bias, activation="silu")
        return y


def graphs_of(model: torch.nn.Module, **options: Any) -> tuple[Any, list[set[str]]]:
    """A compiled model, and for each graph of it what it calls; nothing is compiled, which takes seconds."""
    torch.compiler.reset()
    graphs: list[set[str]] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in module.graph.nodes})
        return module

    return torch.compile(model, backend=backend, **options), graphs
