"""What the tests of the JAX adapter share: the ops, each with what it is given, and what a traced function calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from cases import data
from jax.extend.core import jaxprs_in_params

import cunorm

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Operation:
    """A function of x and vectors, and the shape of x; vectors go along its axes ``columns``."""

    name: str
    function: Callable[..., Any]
    shape: tuple[int, ...]
    columns: tuple[int, ...]
    vectors: int = 2

    def arrays(self, dtype: str = "float32", batch: tuple[int | None, ...] = ()) -> list[Any]:
        """Of x and the vectors; each with a batch axis of this size in front, if there is one."""
        shapes = [self.shape, *[tuple(self.shape[axis] for axis in self.columns)] * self.vectors]
        sizes = batch or (None,) * len(shapes)
        return [
            data(seed, shape if size is None else (size, *shape), dtype, outliers=False)
            for seed, (shape, size) in enumerate(zip(shapes, sizes))
        ]


def _gelu(x: Any, bias: Any) -> Any:
    return cunorm.gelu(x, bias=bias)


def _residual(x: Any, weight: Any, bias: Any) -> Any:
    y, residual_out = cunorm.rms_norm(x, weight, bias, residual=x * 0.5, activation="silu", weight_offset=1.0)
    return y + residual_out


def _middle(x: Any, weight: Any, bias: Any) -> Any:
    return cunorm.layer_norm(x, weight, bias, axis=(0, -1))


def _instance(x: Any, weight: Any, bias: Any) -> Any:
    return cunorm.instance_norm(x, weight, bias, activation="relu")


def _group(x: Any, weight: Any, bias: Any) -> Any:
    return cunorm.group_norm(x, 2, weight, bias, data_format="N...C")


def _batch(x: Any, weight: Any, bias: Any) -> Any:
    return cunorm.batch_norm(x, weight, bias, training=True, activation="gelu")


def _batch_last(x: Any, weight: Any, bias: Any) -> Any:
    return cunorm.batch_norm(x, weight, bias, training=True, data_format="NWC")


OPERATIONS = [
    Operation("layer_norm", cunorm.layer_norm, (6, 8), (1,)),
    Operation("layer_norm over axes 0 and 2", _middle, (4, 3, 6), (0, 2)),
    Operation("rms_norm with residual", _residual, (6, 8), (1,)),
    Operation("gelu", _gelu, (3, 4, 8), (2,), 1),
    Operation("instance_norm", _instance, (3, 4, 7), (1,)),
    Operation("group_norm", _group, (3, 5, 4), (2,)),
    Operation("batch_norm", _batch, (6, 4, 5), (1,)),
    Operation("batch_norm of channels last", _batch_last, (6, 5, 4), (2,)),
]


def to_jax(array: Any, device: str) -> Any:
    try:
        return None if array is None else jax.device_put(array, jax.devices(device)[0])
    except RuntimeError as error:
        pytest.skip(f"needs an NVIDIA GPU that JAX sees: {error}")


def equations_in(jaxpr: Any) -> list[Any]:
    """All that a traced function does, in order."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            found += equations_in(inner)
    return found


def calls_in(function: Any, *arguments: Any) -> list[Any]:
    """The calls that a function makes of its arguments, in order."""
    equations = equations_in(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert not {"scan", "while"} & {equation.primitive.name for equation in equations}, "calls are made in a loop"
    return [equation.params["call"] for equation in equations if equation.primitive.name == "cunorm"]


def assert_all_close(results: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Pytrees of arrays are equal but for rounding."""
    ours, theirs = jax.tree.leaves(results), jax.tree.leaves(expected)
    assert len(ours) == len(theirs) > 0
    for result, value in zip(ours, theirs):
        assert result.shape == value.shape and result.dtype == value.dtype
        scale = 1 + np.abs(np.asarray(value, np.float64)).max(initial=0)
        np.testing.assert_allclose(
            np.asarray(result, np.float64), np.asarray(value, np.float64), rtol=tolerance, atol=tolerance * scale
        )
