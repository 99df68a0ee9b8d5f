"""Instance norm and group norm of contiguous tensors by the kernels of rows: on the emulator, and what is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import (
    EPS,
    NORM_TOLERANCE,
    OLD_DEVICE,
    SMALL_DEVICE,
    Array,
    assert_rounded_once,
    assert_sums,
    data,
    float64,
    poisoned,
    relative_error,
    view_of,
)

from cunorm import activations, reference
from cunorm.plan import Device, Plan
from cunorm.plan.rows_of_channels import plan_rows
from cunorm.problem import ChannelBackward, ChannelForward

pytest.importorskip("cunorm.emulator")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of x, samples by channels by points, over ``together`` consecutive channels and all points."""

    x: Array
    together: int
    weight: Array | None
    bias: Array | None
    activation: str | None = None

    @property
    def statistics_shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1] // self.together

    def rows(self, array: Array) -> Array:
        return array.reshape(*self.statistics_shape, -1)

    def by_channel(self, vector: Array | None, absent: float) -> Any:
        """A weight or bias that x can be multiplied with."""
        return absent if vector is None else float64(vector)[:, None]

    def expected(self) -> tuple[Array, Array, Array, Array, Array]:
        """y, mean, rstd; what the activation is taken of; and xhat."""
        xhat, _, mean, rstd = reference.row_norm(self.rows(float64(self.x)), axis=(2,), eps=EPS)
        xhat = xhat.reshape(self.x.shape)
        z = xhat * self.by_channel(self.weight, 1) + self.by_channel(self.bias, 0)
        y = z if self.activation is None else activations.FUNCTIONS[self.activation].value(z)
        return y, mean, rstd, z, xhat

    def expected_gradients(self, dy: Array) -> tuple[Array, Array, Array]:
        """dx; and, for each number, what it has of dweight and dbias."""
        _, mean, rstd, z, xhat = self.expected()
        dz = float64(dy)
        if self.activation is not None:
            dz = dz * activations.FUNCTIONS[self.activation].derivative(z)
        g = dz * self.by_channel(self.weight, 1)
        x = self.rows(float64(self.x))
        dx, _, _ = reference.row_norm_backward(self.rows(g), x, None, mean, rstd, axis=(2,))
        assert dx is not None
        return dx.reshape(z.shape), dz * xhat, dz


def norm_of(
    samples: int,
    channels: int,
    together: int,
    points: int,
    dtype: str,
    activation: str | None = None,
    weight: str | None = "x's",
    bias: str | None = "x's",
    **options: Any,
) -> Norm:
    x = data(0, (samples, channels, points), dtype, **options)
    vectors = [
        None if kind is None else data(seed, (channels,), dtype if kind == "x's" else kind, shift, outliers=False)
        for seed, kind, shift in ((1, weight, 1.0), (2, bias, 0.3))
    ]
    return Norm(x, together, *vectors, activation)


def forward_problem(norm: Norm, y: Array, stats: bool = True) -> ChannelForward:
    return ChannelForward.of(
        view_of(norm.x), view_of(norm.weight), view_of(norm.bias), view_of(y), channel_axis=1,  # type: ignore[arg-type]
        channels_per_set=norm.together, over_samples=False, eps=EPS, stats=stats, activation=norm.activation,
    )  # fmt: skip


def run(chosen: Plan | None, operands: dict[str, Array | None], seed: int = 0) -> None:
    from cunorm.emulator import plans

    assert chosen is not None
    plans.run_plan(chosen, operands, seed)


def forward(norm: Norm, device: Device = SMALL_DEVICE, seed: int = 0, y: Array | None = None) -> tuple[Array, ...]:
    """y, mean and rstd."""
    dtype = norm.x.dtype.name
    y = poisoned(norm.x.shape, dtype) if y is None else y
    sums = "float64" if dtype == "float64" else "float32"
    mean, rstd = poisoned(norm.statistics_shape, sums), poisoned(norm.statistics_shape, sums)
    chosen = plan_rows(forward_problem(norm, y), device)
    operands = {"x": norm.x, "weight": norm.weight, "bias": norm.bias, "residual": None, "residual_out": None}
    run(chosen, operands | {"y": y, "mean": mean, "rstd": rstd}, seed)
    return y, mean, rstd


def check_forward(norm: Norm, device: Device = SMALL_DEVICE) -> tuple[Array, ...]:
    before, dtype = norm.x.copy(), norm.x.dtype.name
    y, mean, rstd = forward(norm, device)
    assert norm.x.tobytes() == before.tobytes(), "x was modified"
    expected_y, expected_mean, expected_rstd, z, _ = norm.expected()
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(y, expected_y, dtype, z)
    else:
        size = np.abs(z) + (0 if norm.bias is None else np.abs(float64(norm.bias)).max())
        tolerance = {"float32": 1.5e-7, "float64": 1e-15}[dtype] * (1 if norm.activation is None else 2)
        assert relative_error(y, expected_y, size) <= tolerance
    tolerance = 1e-14 if dtype == "float64" else 3e-7
    assert np.all(np.abs(mean - expected_mean) <= tolerance * (np.abs(expected_mean) + 1 / expected_rstd))
    assert np.all(np.abs(rstd - expected_rstd) <= tolerance * expected_rstd)
    return y, mean, rstd


def backward_problem(norm: Norm, dy: Array, mask: tuple[bool, bool, bool] = (True, True, True)) -> ChannelBackward:
    kinds = [
        (norm.x if vector is None else vector).dtype.name if wanted else None
        for vector, wanted in zip((norm.weight, norm.bias), mask[1:])
    ]
    return ChannelBackward.of(
        view_of(dy), view_of(norm.x), view_of(norm.weight), view_of(norm.bias),  # type: ignore[arg-type]
        view_of(dy) if mask[0] else None, channel_axis=1, channels_per_set=norm.together, over_samples=False,
        dweight=kinds[0], dbias=kinds[1], activation=norm.activation,
    )  # fmt: skip


def backward(
    norm: Norm,
    dy: Array,
    statistics: tuple[Array, Array],
    device: Device = SMALL_DEVICE,
    mask: tuple[bool, bool, bool] = (True, True, True),
    seed: int = 0,
) -> tuple[Array | None, ...]:
    """dx, dweight and dbias, or None."""
    problem = backward_problem(norm, dy, mask)
    dx = poisoned(norm.x.shape, norm.x.dtype.name) if mask[0] else None
    dweight, dbias = (
        None if kind is None else poisoned(norm.x.shape[1:2], kind) for kind in (problem.dweight, problem.dbias)
    )
    operands = {"dy": dy, "x": norm.x, "weight": norm.weight, "bias": norm.bias if norm.activation else None}
    operands |= {"mean": statistics[0], "rstd": statistics[1], "dresidual_out": None}
    run(plan_rows(problem, device), operands | {"dx": dx, "dweight": dweight, "dbias": dbias}, seed)
    return dx, dweight, dbias


def check_backward(norm: Norm, device: Device = SMALL_DEVICE) -> None:
    dtype = norm.x.dtype.name
    dy = data(17, norm.x.shape, dtype, shift=0.1)
    before = norm.x.copy(), dy.copy()
    _, mean, rstd, _, _ = norm.expected()
    sums = np.float64 if dtype == "float64" else np.float32
    dx, dweight, dbias = backward(norm, dy, (mean.astype(sums), rstd.astype(sums)), device)
    assert dx is not None and dweight is not None and dbias is not None
    assert norm.x.tobytes() == before[0].tobytes() and dy.tobytes() == before[1].tobytes(), "an input was modified"
    expected_dx, dweight_terms, dbias_terms = norm.expected_gradients(dy)
    # dx is a difference of terms of this size; with few numbers a row it is much smaller than they are.
    weight_size = 1.0 if norm.weight is None else np.abs(float64(norm.weight)).max()
    size = norm.rows(np.abs(float64(dy)) * weight_size) * rstd[:, :, None]
    assert relative_error(dx, expected_dx, size) <= NORM_TOLERANCE[dtype]
    assert_sums(dbias, dbias_terms.sum(axis=(0, 2)), dbias_terms, (1,), dtype)
    assert_sums(dweight, dweight_terms.sum(axis=(0, 2)), dweight_terms, (1,), dtype)
