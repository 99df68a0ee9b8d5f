"""Data, tolerances, runners and the comparison with float64 that the tests of the norms share.

A Case is a norm of given NumPy arrays, a Backward its gradients. A runner computes them by one of the ways the package
has: the CPU path, the kernels on the emulator, the kernels on a GPU. Every output is filled with NaNs before it is
computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import cunorm
from cunorm import on_cpu, reference
from cunorm.plan import Device, Plan, plan
from cunorm.plan.device import NO_UNEVEN_CLUSTERS
from cunorm.problem import ACTIVATIONS, BackwardProblem, ForwardProblem, Norm, View
from cunorm.reference import activations

Array = np.ndarray[Any, Any]

# Largest relative error in the norm, ||result - float64 result|| / scale. A result in sixteen bits is rounded once: at
# most half a unit in the last place of each number. float32 leaves room for a few roundings on the way.
NORM_TOLERANCE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 4e-7, "float64": 1e-14}
LAYER_NORM, RMS_NORM = Norm(), Norm(centered=False)
# Both norms, and each activation with one of them or with both.
NORMS = [LAYER_NORM, RMS_NORM, Norm(False, weight_offset=1.0)]
ACTIVATED_NORMS = [Norm(centered, 0.0, activation) for centered in (True, False) for activation in ACTIVATIONS]
ACTIVATED_NORMS.append(Norm(False, 1.0, "silu"))
EPS = 1e-5
ALL_GRADIENTS = (True, True, True)
# From one column to rows that a block holds: part of a warp, a warp, several warps, the edges between, odd and even.
# Some have so many rows that blocks take several turns.
SIZES = [
    (1, 1), (70, 1), (5, 2), (1100, 7), (9, 7), (33, 8), (3, 16), (17, 31), (300, 32), (9, 33), (5, 64), (9, 100),
    (40, 257), (5, 768), (3, 1000), (3, 1024), (2, 2048), (3, 3000), (2, 4096), (2, 4097), (3, 5120), (1, 8192),
    (2, 8200),
    (35, 1024),
    (7, 4096),
]  # fmt: skip
# Rows that several blocks hold, or none, on SMALL_DEVICE.
LONG_SIZES = [(1, 16384), (2, 16411), (3, 20004), (2, 20000), (1, 65536), (1, 50001)]
AXES = [
    ((6, 40), (0,)),
    ((40, 6), (0,)),
    ((300, 70), (0,)),
    ((6, 5, 4), (0,)),
    ((6, 50, 40), (1,)),
    ((3, 6, 1, 5), (1,)),
    ((6, 5, 4), (0, 1)),
    ((6, 5, 4), (0, 2)),
    ((3, 4, 32), (-1, -2)),
    ((6, 5, 4), (2, 0, 1)),
    ((3, 4, 5, 16), (1, 3)),
    ((3, 4, 5, 6), (0, 2)),
    ((2, 3, 2, 3, 2, 3), (1, 3, 5)),
    ((7,), (0,)),
    ((1, 1, 1), (1,)),
]
# A GPU small enough that the emulator has little to do, and that blocks take several rows each.
OLD_DEVICE = Device("sm_75", multiprocessors=2, threads_per_multiprocessor=512)
SMALL_DEVICE = Device("sm_90", 2, 512, clusters=(1, 1, 0, 0), uneven_clusters=NO_UNEVEN_CLUSTERS)


def dtype_of(name: str) -> np.dtype[Any]:
    return on_cpu.numpy_dtype(name)


def data(seed: int, shape: tuple[int, ...], dtype: str = "float32", shift: float = 0.3, outliers: bool = True) -> Array:
    """Normal numbers about ``shift``; every 13th number fifty times as large where ``outliers``."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if outliers:
        values.reshape(-1)[7::13] *= 50
    return (values + shift).astype(dtype_of(dtype))


def views(dtype: str) -> dict[str, tuple[Any, Any]]:
    """x and dy of the same shape, lying in memory in every way but the plain one."""
    wide, long = data(3, (8, 1030), dtype), data(4, (8 * 1030 + 9,), dtype)
    return {
        "row-strided": (wide[:, :1024], wide[:, 3:1027]),
        "every second row": (wide[::2, :512], wide[1::2, 512:1024]),
        "odd offset": (long[1 : 1 + 36 * 130].reshape(36, 130), long[3 : 3 + 36 * 130].reshape(36, 130)),
        "offset of eight bytes": (long[4 : 4 + 8 * 512].reshape(8, 512), long[8 : 8 + 8 * 512].reshape(8, 512)),
        "transposed": (wide.T, wide.T),
        "backwards": (wide[::-1, ::-1], wide[:, ::-1]),
        "every third column": (wide[:, ::3], wide[:, 2::3][:, :343].repeat(2, 1)[:, :344]),
        "broadcast rows": (np.broadcast_to(wide[0], (5, 1030)), wide[:5]),
        "broadcast columns": (np.broadcast_to(wide[:, :1], (8, 6)), wide[:, :6]),
    }


def poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    return np.full(shape, np.nan, dtype_of(dtype))


def sorted_axis(dimensions: int, axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(i % dimensions for i in axis))


def columns_shape(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[i] for i in sorted_axis(len(shape), axis))


def kept_shape(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for i, size in enumerate(shape) if i not in {j % len(shape) for j in axis})


def relative_error(result: Array, expected: Array, scale: Array | None = None) -> float:
    """||result - expected|| / ||scale||, with NaN where anything is NaN."""
    difference = np.linalg.norm((result.astype(np.float64) - expected).reshape(-1))
    size = np.linalg.norm((expected if scale is None else scale).reshape(-1))
    return float(difference / size) if size > 0 else float(difference)


def half_unit(values: Array, dtype: str) -> Array:
    """Half a unit in the last place of ``dtype`` at each of the float64 ``values``."""
    digits, smallest = {"float16": (11, -14), "bfloat16": (8, -126)}[dtype]
    exponent = np.maximum(np.frexp(values)[1] - 1, smallest)
    return np.ldexp(0.5, exponent - digits + 1)


FAR = ["shifted", "rising", "a far beginning", "a far end", "parts apart"]


def far_data(kind: str, shape: tuple[int, int]) -> Array:
    """float32 rows that lie far from zero, or parts of which lie far from each other."""
    x, columns = data(0, shape, outliers=False).astype(np.float64), shape[1]
    if kind == "shifted":
        x += 1e4
    if kind == "rising":
        x += np.linspace(0, 1e5, columns)
    if kind == "a far beginning":
        x[:, :200] += 1e6
    if kind == "a far end":
        x[:, -200:] -= 1e6
    if kind == "parts apart":
        x += 1e3 * (np.arange(columns) // 97 % 5)
    return x.astype(np.float32)


def assert_rounded_once(result: Array, expected: Array, dtype: str, size: Array | None = None) -> None:
    """A sixteen-bit result is the float64 one rounded, but for ties that float32 arithmetic decides the other way.

    ``size`` is that of the numbers which the arithmetic was done with, if not that of the results.
    """
    size = np.abs(expected if size is None else size)
    slack = 1e-6 * np.maximum(size, np.sqrt(np.mean(size**2)))
    error = np.abs(result.astype(np.float64) - expected)
    assert np.all(error <= half_unit(expected, dtype) + slack), float(np.nanmax(error)) or "NaN"


def assert_sums(result: Array, expected: Array, terms: Array, axis: tuple[int, ...], dtype: str) -> None:
    """Sums of ``terms`` over the kept axes are right: they may cancel, and are rounded to result's dtype at the end."""
    kept = tuple(i for i in range(terms.ndim) if i not in axis)
    size = np.linalg.norm(np.abs(terms).sum(axis=kept).reshape(-1))
    rounding = NORM_TOLERANCE[result.dtype.name] * np.linalg.norm(expected.reshape(-1))
    arithmetic = NORM_TOLERANCE["float64" if dtype == "float64" else "float32"] * size
    assert relative_error(result, expected, np.ones(1)) <= rounding + arithmetic


def float64(array: Any) -> Any:
    return None if array is None else array.astype(np.float64)


@dataclass(frozen=True)
class Expected:
    """Float64 results from the very numbers that were given; ``z`` is what the activation is taken of."""

    y: Array
    mean: Array | None
    rstd: Array
    z: Array


class Results(NamedTuple):
    """What a norm leaves: no residual_out without a residual, no mean of RMS norm, and statistics if asked for."""

    y: Array
    residual_out: Any
    mean: Any
    rstd: Any


@dataclass(frozen=True, eq=False)
class Case:
    """One norm of given tensors."""

    x: Array
    weight: Array | None = None
    bias: Array | None = None
    axis: tuple[int, ...] = (-1,)
    norm: Norm = LAYER_NORM
    residual: Array | None = None
    eps: float = EPS

    @property
    def tensors(self) -> dict[str, Array | None]:
        return {"x": self.x, "weight": self.weight, "bias": self.bias, "residual": self.residual}

    @property
    def sorted_axis(self) -> tuple[int, ...]:
        return sorted_axis(self.x.ndim, self.axis)

    @property
    def normalized(self) -> Array:
        """What is normalized: x + residual, rounded to their dtype."""
        if self.residual is None:
            return self.x
        compute = np.float64 if self.x.dtype == np.float64 else np.float32
        return (self.x.astype(compute) + self.residual.astype(compute)).astype(self.x.dtype)

    def expected(self) -> Expected:
        plain = Norm(self.norm.centered, self.norm.weight_offset)
        given = float64(self.normalized), float64(self.weight), float64(self.bias)
        z, _, mean, rstd = reference.row_norm(*given, axis=self.sorted_axis, eps=self.eps, norm=plain)
        y = z if self.norm.activation is None else activations.FUNCTIONS[self.norm.activation].value(z)
        return Expected(y, mean, rstd, z)

    def expected_gradients(self, dy: Array, dresidual_out: Array | None = None) -> tuple[Any, Any, Any]:
        """Those of x, weight and bias in float64, from the exact statistics."""
        expected = self.expected()
        return reference.row_norm_backward(
            float64(dy),
            float64(self.normalized),
            float64(self.weight),
            expected.mean,
            expected.rstd,
            axis=self.sorted_axis,
            norm=self.norm,
            bias=float64(self.bias),
            dresidual_out=float64(dresidual_out),
        )

    def backward(
        self,
        results: Results,
        dy: Array,
        mask: tuple[bool, ...] = ALL_GRADIENTS,
        dresidual_out: Array | None = None,
    ) -> Backward:
        """The gradients of this, from what the forward left. They take the bias where there is an activation."""
        x = self.x if self.residual is None else results.residual_out
        bias = self.bias if self.norm.activation else None
        arrays = dy, x, self.weight, bias, results.mean, results.rstd, dresidual_out
        return Backward(*arrays, self.axis, self.norm, mask)


@dataclass(frozen=True, eq=False)
class Backward:
    """The gradients of one norm; ``mask`` says which of dx, dweight and dbias are wanted."""

    dy: Array
    x: Array
    weight: Array | None
    bias: Array | None
    mean: Array | None
    rstd: Array
    dresidual_out: Array | None
    axis: tuple[int, ...]
    norm: Norm
    mask: tuple[bool, ...]

    @property
    def tensors(self) -> dict[str, Array | None]:
        names = ("dy", "x", "weight", "bias", "mean", "rstd", "dresidual_out")
        return {name: getattr(self, name) for name in names}


def kinds_of(chosen: Plan) -> set[str]:
    """The ways in which a plan's rows are laid out and come from memory, as tests of plans and of emulation name them.

    "... again" is one whose blocks take another turn, so that what they left behind of the first counts.
    """
    kinds = {chosen.strategy} if chosen.strategy == "row_split" else set()
    for item in chosen.launches:
        if item.kernel not in ("row_block_forward", "row_block_backward"):
            kinds |= {item.kernel} & {"row_weight_gradients"}
            continue
        constants, arguments = dict(item.constants), dict(item.arguments)
        kind = f"{'cluster' if item.cluster > 1 else constants['STAGE']}{' peeled' if constants['PEELED'] else ''}"
        rows, turn = arguments["rows"], item.grid // item.cluster * item.block[1]
        kinds.add(f"{item.kernel}: {kind}")
        if isinstance(rows, int) and rows > turn:
            kinds.add(f"{item.kernel}: {kind} again")
        if item.cluster > 1 and constants["WEIGHTS"] != "staged":
            kinds.add(f"{item.kernel}: {kind} with weights from memory")
        elif constants["WEIGHTS"] == "staged":
            kinds.add(f"{item.kernel}: {kind} with weights staged")
    return kinds


def public_forward(norm: Norm) -> Any:
    """The public function that computes ``norm``."""
    if norm.centered:
        return functools.partial(cunorm.layer_norm, activation=norm.activation)
    return functools.partial(cunorm.rms_norm, activation=norm.activation, weight_offset=norm.weight_offset)


def public_backward(norm: Norm) -> Any:
    """The public function of its gradients, with a mean, which that of RMS norm does not take."""
    if norm.centered:
        return functools.partial(cunorm.layer_norm_backward, activation=norm.activation)

    def rms_norm_backward(*, mean: None, **arguments: Any) -> Any:
        return cunorm.rms_norm_backward(**arguments, activation=norm.activation, weight_offset=norm.weight_offset)

    return rms_norm_backward


def named(returned: Any, case: Case, stats: bool) -> Results:
    """What a public function returned, which is a tuple only if there is more than y."""
    rest = iter(returned if isinstance(returned, tuple) else (returned,))
    y = next(rest)
    residual_out = None if case.residual is None else next(rest)
    mean = next(rest) if stats and case.norm.centered else None
    return Results(y, residual_out, mean, next(rest) if stats else None)


def view_of(array: Array | None) -> View | None:
    """A NumPy array as if it lay on a CUDA device, for planning."""
    if array is None:
        return None
    strides = tuple(step // array.itemsize for step in array.strides)
    return View(array.__array_interface__["data"][0], array.shape, strides, array.dtype.name, ("cuda", 0))


class NumpyRunner:
    """The CPU path, through the public functions."""

    def forward(self, case: Case, stats: bool = True) -> Results:
        out = poisoned(case.x.shape, case.x.dtype.name)
        options = {"axis": case.axis, "eps": case.eps, "return_stats": stats, "out": out}
        return named(public_forward(case.norm)(**case.tensors, **options), case, stats)

    def backward(self, case: Backward) -> tuple[Any, ...]:
        gradients: tuple[Any, ...] = public_backward(case.norm)(**case.tensors, axis=case.axis, output_mask=case.mask)
        return gradients


@dataclass(frozen=True)
class EmulatorRunner:
    """The kernels' text on the CPU, with sanitizers, by the plans that a GPU would get."""

    device: Device = SMALL_DEVICE
    choose: Callable[[Any, Device], Plan] = plan
    seed: int = 0  # of the order in which threads run

    def forward(self, case: Case, stats: bool = True, out: Array | None = None) -> Results:
        shape, dtype = case.x.shape, case.x.dtype.name
        y = poisoned(shape, dtype) if out is None else out
        residual_out = None if case.residual is None else poisoned(shape, dtype)
        stats_dtype = "float64" if dtype == "float64" else "float32"
        rstd = poisoned(kept_shape(shape, case.axis), stats_dtype) if stats else None
        mean = poisoned(kept_shape(shape, case.axis), stats_dtype) if stats and case.norm.centered else None
        results = Results(y, residual_out, mean, rstd)
        views: Any = {name: view_of(array) for name, array in case.tensors.items()}
        views |= {"y": view_of(y), "residual_out": view_of(residual_out)}
        problem = ForwardProblem.of(**views, axis=case.sorted_axis, eps=case.eps, stats=stats, norm=case.norm)
        self.run(problem, case.tensors | results._asdict())
        return results

    def backward(self, case: Backward) -> tuple[Any, ...]:
        shape = columns_shape(case.x.shape, case.axis)
        dtype = (case.x if case.weight is None else case.weight).dtype.name
        bias_dtype = dtype if case.bias is None else case.bias.dtype.name
        dx = poisoned(case.x.shape, case.x.dtype.name) if case.mask[0] else None
        dweight = poisoned(shape, dtype) if case.mask[1] else None
        dbias = poisoned(shape, bias_dtype) if case.mask[2] else None
        views: Any = {name: view_of(getattr(case, name)) for name in ("dy", "x", "weight", "bias", "dresidual_out")}
        problem = BackwardProblem.of(
            **views,
            dx=view_of(dx),
            axis=sorted_axis(case.x.ndim, case.axis),
            dweight=dtype if case.mask[1] else None,
            dbias=bias_dtype if case.mask[2] else None,
            norm=case.norm,
        )
        self.run(problem, case.tensors | {"dx": dx, "dweight": dweight, "dbias": dbias})
        return dx, dweight, dbias

    def run(self, problem: Any, operands: dict[str, Array | None]) -> None:
        from cunorm.emulator import plans

        plans.run_plan(self.choose(problem, self.device), operands, seed=self.seed)


class CupyRunner:
    """The kernels on a GPU, through the public functions, in memory that is filled with NaNs when it is allocated."""

    def __init__(self, pool: bool = True) -> None:
        self.pool = pool  # False: CuPy's current allocator, not filled, so that initcheck sees what nobody wrote

    def forward(self, case: Case, stats: bool = True) -> Results:
        options = {"axis": case.axis, "eps": case.eps, "return_stats": stats}
        return named(self.run(public_forward(case.norm), case.tensors, **options), case, stats)

    def backward(self, case: Backward) -> tuple[Any, ...]:
        return self.run(public_backward(case.norm), case.tensors, axis=case.axis, output_mask=case.mask)

    def run(self, function: Any, tensors: dict[str, Array | None], **options: Any) -> tuple[Any, ...]:
        import cupy

        on_gpu = {name: self._to_gpu(array) for name, array in tensors.items()}

        def poisoned_memory(size: int) -> Any:
            memory = cupy.get_default_memory_pool().malloc(size)
            memory.memset_async(0xFF, size)
            return memory

        allocator = poisoned_memory if self.pool else cupy.cuda.get_allocator()
        with cupy.cuda.using_allocator(allocator):
            results = function(**on_gpu, **options)
        for name, array in tensors.items():
            assert array is None or cupy.asnumpy(on_gpu[name]).tobytes() == array.tobytes(), f"{name} was modified"
        results = results if isinstance(results, tuple) else (results,)
        return tuple(None if result is None else cupy.asnumpy(result) for result in results)

    def _to_gpu(self, array: Array | None) -> Any:
        import cupy

        if array is None:
            return None
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        memory = cupy.asarray(owner).data + offset
        return cupy.ndarray(array.shape, array.dtype, memory, strides=array.strides)


RUNNERS = [
    pytest.param(NumpyRunner(), id="numpy"),
    pytest.param(EmulatorRunner(), id="emulator"),
    pytest.param(CupyRunner(), id="cupy", marks=pytest.mark.gpu),
]


def check(runner: Any, case: Case, dy: Array | None = None, dresidual_out: Array | None = None) -> None:
    """Forward and backward of one case against float64. By default ``dy`` is drawn."""
    before: Any = {name: None if array is None else array.copy() for name, array in case.tensors.items()}
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1) if dy is None else dy
    results = runner.forward(case)
    assert_forward(case, results)
    gradients = runner.backward(case.backward(results, dy, dresidual_out=dresidual_out))
    assert_gradients(case, gradients, dy, dresidual_out)
    for name, array in case.tensors.items():
        assert array is None or array.tobytes() == before[name].tobytes(), f"{name} was modified"


def assert_relu_stops_gradients(runner: Any, case: Any) -> None:
    """Where relu is flat, dy is not looked at: what is infinite or NaN there comes into no gradient, as in PyTorch."""
    results, z = runner.forward(case), case.expected().z
    flat = z < -0.01
    assert flat.any() and not flat.all()
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1)
    dy[flat] = 0
    without = runner.backward(case.backward(results, dy))
    dy[flat] = np.resize(np.array([np.inf, -np.inf, np.nan]), int(flat.sum())).astype(dy.dtype)
    for gradient, expected in zip(runner.backward(case.backward(results, dy)), without):
        np.testing.assert_array_equal(gradient, expected)
        assert np.isfinite(float64(gradient)).all()


def assert_any_order_gives_the_same(case: Case, dy: Array, dresidual_out: Array | None = None) -> None:
    """Bit for bit, on the emulator: a missing barrier would show as a difference between orders of running threads."""
    every = []
    for seed in range(3):
        runner = EmulatorRunner(seed=seed)
        results = runner.forward(case)
        gradients = runner.backward(case.backward(results, dy, dresidual_out=dresidual_out))
        every.append([array.tobytes() for array in (*results, *gradients) if array is not None])
    assert every[0] == every[1] == every[2]


def assert_forward(case: Case, results: Results, float32_statistics: float = 3e-7) -> None:
    """All results are right. ``float32_statistics`` is the largest relative error of statistics in float32.

    By default it leaves room for a single thread that adds up 32 squares, one after the other.
    """
    x, dtype, expected = case.x, case.x.dtype.name, case.expected()
    y, residual_out, mean, rstd = results
    if case.residual is not None:
        assert residual_out is not None and residual_out.dtype == x.dtype
        assert residual_out.tobytes() == case.normalized.tobytes(), "the sum is not rounded once"
    assert y.shape == x.shape and y.dtype == x.dtype
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(y, expected.y, dtype, expected.z)
    else:
        affine_size = np.abs(expected.z) + (0 if case.bias is None else np.abs(float64(case.bias)).max(initial=0))
        tolerance = {"float32": 1.5e-7, "float64": 1e-15}[dtype] * (1 if case.norm.activation is None else 2)
        assert relative_error(y, expected.y, affine_size) <= tolerance
    statistics_tolerance = 1e-14 if dtype == "float64" else float32_statistics
    statistics_dtype = np.float64 if dtype == "float64" else np.float32
    if expected.mean is None:
        assert mean is None
    else:
        assert mean.shape == expected.mean.shape and mean.dtype == statistics_dtype
        size = np.abs(expected.mean) + 1 / expected.rstd
        assert np.all(np.abs(mean - expected.mean) <= statistics_tolerance * size)
    assert rstd.shape == expected.rstd.shape and rstd.dtype == statistics_dtype
    assert np.all(np.abs(rstd - expected.rstd) <= statistics_tolerance * expected.rstd)


def assert_gradients(case: Case, gradients: tuple[Any, ...], dy: Array, dresidual_out: Array | None = None) -> None:
    """All three are right."""
    x, weight, axis, dtype, expected = case.x, case.weight, case.sorted_axis, case.x.dtype.name, case.expected()
    (dx, dweight, dbias), exact_dy = gradients, float64(dy)
    expected_dx, expected_dweight, expected_dbias = case.expected_gradients(dy, dresidual_out)
    # dx is a difference of terms of this size; with few columns it is much smaller than they are.
    weight_size = 1.0 if weight is None else np.abs(case.norm.weight_offset + float64(weight)).max(initial=0)
    wide_rstd = np.expand_dims(expected.rstd, axis)
    terms = np.abs(exact_dy) * weight_size * wide_rstd
    if dresidual_out is not None:
        terms = terms + np.abs(float64(dresidual_out))
    assert dx.shape == x.shape and dx.dtype == x.dtype
    assert relative_error(dx, expected_dx, terms) <= NORM_TOLERANCE[dtype]
    assert dweight.shape == dbias.shape == columns_shape(x.shape, axis)
    assert dweight.dtype == (x if weight is None else weight).dtype
    assert dbias.dtype == (case.bias.dtype if case.norm.activation and case.bias is not None else dweight.dtype)
    mean_of_rows = 0 if expected.mean is None else np.expand_dims(expected.mean, axis)
    xhat = (float64(case.normalized) - mean_of_rows) * wide_rstd
    assert_sums(dbias, expected_dbias, exact_dy, axis, dtype)
    assert_sums(dweight, expected_dweight, exact_dy * np.maximum(1, np.abs(xhat)), axis, dtype)


def gelu_in_float64(x: Array, bias: Array | None, dy: Array, approximate: str) -> tuple[Array, Array, Array | None]:
    """y, dx and dbias of `cunorm.gelu`."""
    given: Any = float64(x), float64(bias)
    activation = {"none": "gelu", "tanh": "gelu_tanh"}[approximate]
    dx, dbias = reference.pointwise_backward(float64(dy), *given, activation=activation)
    assert dx is not None
    return reference.pointwise(*given, activation=activation), dx, dbias
