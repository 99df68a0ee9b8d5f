"""Data, runners and the comparison with float64 that the tests of instance, group and batch norm share.

As in `cases`, whose tolerances hold here too: a Case is a norm of given NumPy arrays, a Backward its gradients, and a
runner computes them by one of the ways the package has. Every output is filled with NaNs before it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cases
import numpy as np
from cases import (
    ALL_GRADIENTS,
    EPS,
    NORM_TOLERANCE,
    SMALL_DEVICE,
    Array,
    assert_rounded_once,
    assert_sums,
    data,
    dtype_of,
    float64,
    poisoned,
    relative_error,
    view_of,
)

import cunorm
from cunorm import reference
from cunorm.checks import memory_order
from cunorm.plan import Device, Plan, plan
from cunorm.prepared import Output
from cunorm.problem import ChannelBackward, ChannelForward, RunningStatistics
from cunorm.reference import activations

NAMES = ("instance_norm", "group_norm", "batch_norm")
# How x lies in memory: as its shape says, with its channels on the other side of the spatial axes, or with gaps.
LAYOUTS = ("contiguous", "other order", "strided")


class Running(NamedTuple):
    """Running statistics, and how they are updated."""

    mean: Array
    var: Array
    momentum: float = 0.1
    convention: str = "torch"

    @property
    def shares(self) -> dict[str, float]:
        old, new = (1 - self.momentum, self.momentum)
        return {"kept": old, "taken": new} if self.convention == "torch" else {"kept": new, "taken": old}


class Results(NamedTuple):
    """What a norm leaves; running statistics where there were some."""

    y: Array
    mean: Any
    rstd: Any
    running_mean: Any = None
    running_var: Any = None


@dataclass(frozen=True)
class Expected:
    """Float64 results from the very numbers that were given; ``z`` is what the activation is taken of."""

    y: Array
    mean: Array
    rstd: Array
    z: Array
    running_mean: Any
    running_var: Any


@dataclass(frozen=True, eq=False)
class Case:
    """One norm of given tensors. ``running`` are the statistics, or updated, by ``training``."""

    name: str
    x: Array
    weight: Array | None = None
    bias: Array | None = None
    data_format: str = "NC..."
    num_groups: int | None = None
    activation: str | None = None
    running: Running | None = None
    training: bool = True
    eps: float = EPS

    @property
    def tensors(self) -> dict[str, Array | None]:
        return {"x": self.x, "weight": self.weight, "bias": self.bias}

    @property
    def channel_axis(self) -> int:
        return self.x.ndim - 1 if self.data_format.endswith("C") else 1

    @property
    def channels(self) -> int:
        return int(self.x.shape[self.channel_axis])

    @property
    def channels_per_set(self) -> int:
        return 1 if self.num_groups is None else self.channels // self.num_groups

    @property
    def over_samples(self) -> bool:
        return self.name == "batch_norm"

    @property
    def values_per_channel(self) -> int:
        return self.x.size // self.channels

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        if self.over_samples:
            return (self.channels,)
        return (self.x.shape[0], self.channels // self.channels_per_set)

    @property
    def statistic_dtype(self) -> str:
        return "float64" if self.x.dtype == np.float64 else "float32"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that forward and backward have in common."""
        options: dict[str, Any] = {"data_format": self.data_format, "activation": self.activation}
        if self.name == "group_norm":
            options["num_groups"] = self.num_groups
        if self.name == "batch_norm":
            options["training"] = self.training
        return options

    def seen(self, array: Array) -> Array:
        """An array of x's shape as samples by channels by points."""
        if self.over_samples:
            return np.moveaxis(array, self.channel_axis, 0)[None]
        return np.moveaxis(array, self.channel_axis, 1)

    def like_x(self, array: Array) -> Array:
        """An array as `seen` gave it, with x's axes again."""
        if self.over_samples:
            return np.moveaxis(array[0], 0, self.channel_axis)
        return np.moveaxis(array, 1, self.channel_axis)

    def by_set(self, statistic: Array) -> Array:
        return statistic[None] if self.over_samples else statistic

    def beside_x(self, statistic: Array) -> Array:
        """A statistic as an array that broadcasts with x."""
        wide = np.repeat(self.by_set(statistic), self.channels_per_set, axis=1)
        return self.like_x(wide.reshape(*wide.shape, *(1,) * (self.seen(self.x).ndim - 2)))

    def empty_result(self) -> Array:
        """NaNs that lie in memory as y must."""
        view = view_of(self.x)
        assert view is not None
        output = Output(self.x.shape, self.x.dtype.name, memory_order(view, self.channel_axis))
        return poisoned(output.shape_in_memory, output.dtype).transpose(output.places)

    def expected(self) -> Expected:
        x = self.seen(float64(self.x))
        mean, var = reference.channel_statistics(x, channels_per_set=self.channels_per_set)
        running_mean = running_var = None
        if self.running is not None:
            running_mean, running_var = (float64(self.running.mean).copy(), float64(self.running.var).copy())
            if self.training:
                count = self.values_per_channel
                factor = count / (count - 1) if self.running.convention == "torch" else 1.0
                reference.update_running(running_mean, mean[0], **self.running.shares)
                reference.update_running(running_var, var[0] * factor, **self.running.shares)
            else:
                mean, var = running_mean[None], running_var[None]
        seen_z, mean, rstd = reference.channel_norm(
            x,
            float64(self.weight),
            float64(self.bias),
            channels_per_set=self.channels_per_set,
            eps=self.eps,
            given=(mean, var),
        )
        z = self.like_x(seen_z)
        y = z if self.activation is None else activations.FUNCTIONS[self.activation].value(z)
        mean, rstd = (statistic.reshape(self.statistic_shape) for statistic in (mean, rstd))
        return Expected(y, mean, rstd, z, running_mean, running_var)

    def expected_gradients(self, dy: Array) -> tuple[Any, Any, Any]:
        """Those of x, weight and bias in float64, from the exact statistics."""
        expected = self.expected()
        dx, dweight, dbias = reference.channel_norm_backward(
            self.seen(float64(dy)),
            self.seen(float64(self.x)),
            float64(self.weight),
            self.by_set(expected.mean),
            self.by_set(expected.rstd),
            channels_per_set=self.channels_per_set,
            activation=self.activation,
            bias=float64(self.bias),
            given=not self.training,
        )
        assert dx is not None
        return self.like_x(dx), dweight, dbias

    def backward(self, results: Results, dy: Array, mask: tuple[bool, bool, bool] = ALL_GRADIENTS) -> Backward:
        """The gradients of this, from what the forward left. They take the bias where there is an activation."""
        return Backward(self, dy, results.mean, results.rstd, mask)


@dataclass(frozen=True, eq=False)
class Backward:
    """The gradients of one norm; ``mask`` says which of dx, dweight and dbias are wanted."""

    case: Case
    dy: Array
    mean: Array
    rstd: Array
    mask: tuple[bool, bool, bool]

    @property
    def tensors(self) -> dict[str, Array | None]:
        bias = self.case.bias if self.case.activation else None
        statistics = {"mean": self.mean, "rstd": self.rstd}
        return {"dy": self.dy, "x": self.case.x, "weight": self.case.weight, "bias": bias} | statistics

    @property
    def parameter_dtypes(self) -> tuple[str | None, str | None]:
        """Those of dweight and dbias, None where not wanted."""
        given = self.tensors
        weight = self.case.x if given["weight"] is None else given["weight"]
        bias = weight if given["bias"] is None else given["bias"]
        return weight.dtype.name if self.mask[1] else None, bias.dtype.name if self.mask[2] else None


class NumpyRunner:
    """The CPU path, through the public functions."""

    def forward(self, case: Case, stats: bool = True) -> Results:
        options = case.options | {"eps": case.eps, "return_stats": stats, "out": case.empty_result()}
        running: list[Array] = []
        if case.running is not None:
            running = [case.running.mean.copy(), case.running.var.copy()]
            options |= {"running_mean": running[0], "running_var": running[1]}
            options |= {"momentum": case.running.momentum, "convention": case.running.convention}
        returned = getattr(cunorm, case.name)(**case.tensors, **options)
        y, mean, rstd = returned if stats else (returned, None, None)
        return Results(y, mean, rstd, *running)

    def backward(self, case: Backward) -> tuple[Any, ...]:
        function = getattr(cunorm, f"{case.case.name}_backward")
        gradients: tuple[Any, ...] = function(**case.tensors, **case.case.options, output_mask=case.mask)
        return gradients


@dataclass(frozen=True)
class EmulatorRunner:
    """The kernels' text on the CPU, with sanitizers, by the plans that a GPU would get."""

    device: Device = SMALL_DEVICE
    choose: Callable[[Any, Device], Plan] = plan
    seed: int = 0  # of the order in which threads run

    def forward(self, case: Case, stats: bool = True) -> Results:
        y = case.empty_result()
        mean, rstd = (poisoned(case.statistic_shape, case.statistic_dtype) if stats else None for _ in range(2))
        running: list[Array] = []
        of_running = None
        if case.running is not None:
            running = [case.running.mean.copy(), case.running.var.copy()]
            updates: dict[str, Any] = {"given": not case.training}
            if case.training:
                updates |= case.running.shares | {"unbiased": case.running.convention == "torch"}
            views: Any = [view_of(array) for array in running]
            of_running = RunningStatistics.of(*views, **updates)
        given: Any = {name: view_of(array) for name, array in (case.tensors | {"y": y}).items()}
        problem = ChannelForward.of(
            **given,
            channel_axis=case.channel_axis,
            channels_per_set=case.channels_per_set,
            over_samples=case.over_samples,
            eps=case.eps,
            stats=stats,
            activation=case.activation,
            running=of_running,
        )
        operands = case.tensors | {"y": y, "mean": mean, "rstd": rstd}
        self.run(problem, operands | dict(zip(("running_mean", "running_var"), running)))
        return Results(y, mean, rstd, *running)

    def backward(self, case: Backward) -> tuple[Any, ...]:
        norm = case.case
        dweight_dtype, dbias_dtype = case.parameter_dtypes
        dx = norm.empty_result() if case.mask[0] else None
        dweight = None if dweight_dtype is None else poisoned((norm.channels,), dweight_dtype)
        dbias = None if dbias_dtype is None else poisoned((norm.channels,), dbias_dtype)
        named = {"dy": case.dy, "x": norm.x, "weight": norm.weight, "bias": case.tensors["bias"], "dx": dx}
        given: Any = {name: view_of(array) for name, array in named.items()}
        problem = ChannelBackward.of(
            **given,
            channel_axis=norm.channel_axis,
            channels_per_set=norm.channels_per_set,
            over_samples=norm.over_samples,
            dweight=dweight_dtype,
            dbias=dbias_dtype,
            activation=norm.activation,
            given=not norm.training,
        )
        self.run(problem, case.tensors | {"dx": dx, "dweight": dweight, "dbias": dbias})
        return dx, dweight, dbias

    def run(self, problem: Any, operands: dict[str, Array | None]) -> None:
        from cunorm.emulator import plans

        # A plan by rows names what only norms of rows may have.
        absent: dict[str, Array | None] = dict.fromkeys(("residual", "residual_out", "dresidual_out"))
        plans.run_plan(self.choose(problem, self.device), absent | operands, seed=self.seed)


class CupyRunner(cases.CupyRunner):
    """The kernels on a GPU, through the public functions, in memory that is filled with NaNs when it is allocated."""

    def forward(self, case: Any, stats: bool = True) -> Any:
        options = case.options | {"eps": case.eps, "return_stats": stats}
        running: list[Any] = []
        if case.running is not None:
            running = [self._to_gpu(case.running.mean), self._to_gpu(case.running.var)]
            options |= {"running_mean": running[0], "running_var": running[1]}
            options |= {"momentum": case.running.momentum, "convention": case.running.convention}
        y, *statistics = self.run(getattr(cunorm, case.name), case.tensors, **options)
        mean, rstd = statistics if stats else (None, None)
        return Results(y, mean, rstd, *(array.get() for array in running))

    def backward(self, case: Any) -> tuple[Any, ...]:
        function = getattr(cunorm, f"{case.case.name}_backward")
        return self.run(function, case.tensors, **case.case.options, output_mask=case.mask)


@dataclass(frozen=True)
class Shape:
    """What a case is made of but for its numbers. ``shape`` is in the order of ``data_format``."""

    name: str
    shape: tuple[int, ...]
    data_format: str = "NC..."
    num_groups: int | None = None
    layout: str = "contiguous"

    def __str__(self) -> str:
        groups = "" if self.num_groups is None else f"-{self.num_groups} groups"
        return f"{self.name}-{self.shape}-{self.data_format}{groups}-{self.layout}"

    def array(self, seed: int, dtype: str, layout: str | None = None, **options: Any) -> Array:
        """Numbers that lie in memory as ``layout`` says."""
        layout = layout or self.layout
        if layout == "contiguous":
            return data(seed, self.shape, dtype, **options)
        if layout == "strided":
            return data(seed, (*self.shape[:-1], 2 * self.shape[-1] + 1), dtype, **options)[..., 1::2]
        last = self.data_format.endswith("C")
        source, target = (-1, 1) if last else (1, -1)
        in_memory = np.moveaxis(np.empty(self.shape, np.bool_), source, target).shape
        return np.moveaxis(data(seed, in_memory, dtype, **options), target, source)

    def case(
        self,
        dtype: str = "float32",
        affine: str = "both",
        parameter_dtype: str | None = None,
        running_dtype: str | None = None,
        **options: Any,
    ) -> Case:
        """A case of this shape. With a ``running_dtype`` it has running statistics."""
        x = self.array(1, dtype)
        channels = self.shape[-1 if self.data_format.endswith("C") else 1]
        weight, bias = (data(seed, (channels,), parameter_dtype or dtype, outliers=False) for seed in (2, 3))
        if running_dtype is not None:
            mean = data(4, (channels,), running_dtype, outliers=False)
            var = (0.5 + data(5, (channels,), "float64", outliers=False) ** 2).astype(dtype_of(running_dtype))
            options["running"] = Running(mean, var, **options.pop("update", {}))
        weight_or_none = weight if affine in ("weight", "both") else None
        bias_or_none = bias if affine in ("bias", "both") else None
        groups = {"data_format": self.data_format, "num_groups": self.num_groups}
        return Case(self.name, x, weight_or_none, bias_or_none, **groups, **options)


def _every(shape: tuple[int, ...], data_format: str, layout: str = "contiguous", num_groups: int = 2) -> list[Shape]:
    """The three norms of one shape."""
    groups = {"instance_norm": None, "group_norm": num_groups, "batch_norm": None}
    return [Shape(name, shape, data_format, groups[name], layout) for name in NAMES]


SHAPES: list[Shape] = [
    # Every data format, small, and each with its channels on the other side in memory, and with gaps.
    *_every((3, 6, 5), "NCW"),
    *_every((3, 5, 6), "NWC"),
    *_every((3, 8, 4, 5), "NCHW"),
    *_every((3, 4, 5, 8), "NHWC", num_groups=4),
    *_every((2, 6, 2, 3, 4), "NCDHW"),
    *_every((2, 2, 3, 4, 6), "NDHWC", num_groups=3),
    *_every((3, 8, 4, 5), "NC...", "other order"),
    *_every((3, 4, 5, 8), "N...C", "other order"),
    *_every((3, 6, 5), "NC...", "other order"),
    *_every((3, 8, 4, 6), "NC...", "strided"),
    *_every((3, 4, 5, 8), "N...C", "strided"),
    # No spatial dimensions, spatial dimensions of one position, many of them.
    *_every((9, 8), "NC..."),
    *_every((9, 8), "N...C"),
    *_every((5, 8, 1), "NC..."),
    *_every((5, 1, 1, 8), "NHWC"),
    *_every((2, 4, 2, 1, 3, 2), "NC..."),
    *_every((2, 2, 1, 3, 2, 4), "N...C"),
    # One sample, one channel, an odd number of channels.
    *_every((1, 6, 33), "NCW"),
    *_every((1, 33, 6), "NWC"),
    *_every((4, 1, 37), "NCW", num_groups=1),
    *_every((4, 37, 1), "NWC", num_groups=1),
    *_every((3, 7, 5, 3), "NCHW", num_groups=7),
    *_every((3, 5, 3, 7), "NHWC", num_groups=7),
    *_every((2, 15, 11), "NCW", num_groups=3),
    *_every((2, 11, 15), "NWC", num_groups=3),
    # One group; as many as channels.
    *_every((3, 8, 7, 7), "NCHW", num_groups=1)[1:2],
    *_every((3, 7, 7, 8), "NHWC", num_groups=1)[1:2],
    *_every((3, 8, 7, 7), "NCHW", num_groups=8)[1:2],
    *_every((3, 7, 7, 8), "NHWC", num_groups=8)[1:2],
    # As models have them, in little.
    *_every((2, 32, 16, 16), "NCHW", num_groups=8),
    *_every((2, 16, 16, 32), "NHWC", num_groups=8),
    *_every((2, 32, 16, 16), "NCHW", "other order", num_groups=8),
    *_every((5, 24, 7, 7), "NCHW", num_groups=3),
    *_every((2, 3, 4099), "NCW", num_groups=1),
    *_every((2, 4099, 3), "NWC", num_groups=1),
    *_every((40, 130, 3), "NCW", num_groups=10),
    *_every((40, 3, 130), "NWC", num_groups=10),
]


def check(runner: Any, case: Case, dy: Array | None = None) -> None:
    """Forward and backward of one case against float64. By default ``dy`` is drawn."""
    before: Any = {name: None if array is None else array.copy() for name, array in case.tensors.items()}
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1) if dy is None else dy
    results = runner.forward(case)
    assert_forward(case, results)
    gradients = runner.backward(case.backward(results, dy))
    assert_gradients(case, gradients, dy)
    for name, array in case.tensors.items():
        assert array is None or array.tobytes() == before[name].tobytes(), f"{name} was modified"


def assert_forward(case: Case, results: Results, float32_statistics: float = 3e-7) -> None:
    """All results are right. ``float32_statistics`` is the largest relative error of statistics in float32."""
    x, dtype, expected = case.x, case.x.dtype.name, case.expected()
    y, mean, rstd = results[:3]
    assert y.shape == x.shape and y.dtype == x.dtype
    # What the result is a difference of: with a mean that was given, both terms may be much larger than it is.
    wide_rstd = case.beside_x(expected.rstd)
    weight_size = 1.0 if case.weight is None else np.abs(float64(case.weight)).max(initial=0)
    given_size = np.abs(case.beside_x(expected.mean)) * wide_rstd * weight_size if not case.training else 0
    size = np.abs(expected.z) + given_size
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(y, expected.y, dtype, size)
    else:
        affine_size = size + (0 if case.bias is None else np.abs(float64(case.bias)).max(initial=0))
        tolerance = {"float32": 1.5e-7, "float64": 1e-15}[dtype] * (1 if case.activation is None else 2)
        assert relative_error(y, expected.y, affine_size) <= tolerance
    tolerance = 1e-14 if dtype == "float64" else float32_statistics
    if mean is not None:
        assert mean.shape == rstd.shape == case.statistic_shape
        assert mean.dtype == rstd.dtype == case.statistic_dtype
        assert np.all(np.abs(mean - expected.mean) <= tolerance * (np.abs(expected.mean) + 1 / expected.rstd))
        assert np.all(np.abs(rstd - expected.rstd) <= tolerance * expected.rstd)
    if case.running is not None:
        assert_running(case, results, expected, tolerance)


def assert_running(case: Case, results: Results, expected: Expected, tolerance: float) -> None:
    """Running statistics are updated and rounded once; in evaluation not touched."""
    assert case.running is not None
    if not case.training:
        assert results.running_mean.tobytes() == case.running.mean.tobytes()
        assert results.running_var.tobytes() == case.running.var.tobytes()
        return
    deviation = 1 / expected.rstd
    for result, value, size in (
        (results.running_mean, expected.running_mean, np.abs(expected.mean) + deviation),
        (results.running_var, expected.running_var, deviation**2),
    ):
        dtype = result.dtype.name
        size = size + np.abs(value)
        if dtype in ("float16", "bfloat16"):
            assert_rounded_once(result, value, dtype, size)
        else:
            rounding = {"float32": 2.0**-23, "float64": 0.0}[dtype]
            assert np.all(np.abs(result - value) <= (2 * tolerance + rounding) * size)


def assert_gradients(case: Case, gradients: tuple[Any, ...], dy: Array) -> None:
    """All three are right."""
    x, weight, dtype, expected = case.x, case.weight, case.x.dtype.name, case.expected()
    (dx, dweight, dbias), exact_dy = gradients, float64(dy)
    expected_dx, expected_dweight, expected_dbias = case.expected_gradients(dy)
    # dx is a difference of terms of this size; with few points it is much smaller than they are.
    weight_size = 1.0 if weight is None else np.abs(float64(weight)).max(initial=0)
    wide_mean, wide_rstd = case.beside_x(expected.mean), case.beside_x(expected.rstd)
    assert dx.shape == x.shape and dx.dtype == x.dtype
    assert relative_error(dx, expected_dx, np.abs(exact_dy) * weight_size * wide_rstd) <= NORM_TOLERANCE[dtype]
    assert dweight.shape == dbias.shape == (case.channels,)
    assert dweight.dtype == (x if weight is None else weight).dtype
    assert dbias.dtype == (case.bias.dtype if case.activation and case.bias is not None else dweight.dtype)
    xhat = (float64(x) - wide_mean) * wide_rstd
    axis = (case.channel_axis,)
    assert_sums(dbias, expected_dbias, exact_dy, axis, dtype)
    assert_sums(dweight, expected_dweight, exact_dy * np.maximum(1, np.abs(xhat)), axis, dtype)
