"""Data, tolerances, runners and the comparison with float64 that the tests of the norms share.

A runner computes a norm and its gradients from NumPy arrays, by one of the ways the package has: the CPU path, the
kernels on the emulator, the kernels on a GPU. Every output is filled with NaNs before it is computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import cunorm
from cunorm import activations, execute, reference
from cunorm.plan import Device, Plan, plan
from cunorm.problem import ACTIVATIONS, BackwardProblem, ForwardProblem, Norm, View

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
# From one column to rows that a block holds: part of a warp, a warp, several warps, the edges between, odd and even.
# Some have so many rows that blocks take several turns.
SIZES = [
    (1, 1), (70, 1), (5, 2), (1100, 3), (9, 7), (33, 8), (3, 16), (17, 31), (300, 32), (9, 33), (5, 64), (9, 100),
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
SMALL_DEVICE = Device("sm_90", multiprocessors=2, threads_per_multiprocessor=512, clusters=(1, 1, 0, 0))


def dtype_of(name: str) -> np.dtype[Any]:
    return execute.numpy_dtype(name)


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


def columns_shape(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[i] for i in sorted(i % len(shape) for i in axis))


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


def float64(array: Array | None) -> Array | None:
    return None if array is None else array.astype(np.float64)


def sum_of(x: Array, residual: Array | None) -> Array:
    """What is normalized: x + residual, rounded to their dtype."""
    if residual is None:
        return x
    compute = np.float64 if x.dtype == np.float64 else np.float32
    return (x.astype(compute) + residual.astype(compute)).astype(x.dtype)


@dataclass(frozen=True)
class Expected:
    """Float64 results from the very numbers that were given; ``z`` is what the activation is taken of."""

    y: Array
    mean: Array | None
    rstd: Array
    z: Array

    @staticmethod
    def of(
        x: Array, weight: Array | None, bias: Array | None, axis: tuple[int, ...], eps: float, norm: Norm = LAYER_NORM
    ) -> Expected:
        axis = tuple(sorted(i % x.ndim for i in axis))
        plain = Norm(norm.centered, norm.weight_offset)
        given = float64(x), float64(weight), float64(bias)
        z, _, mean, rstd = reference.row_norm(*given, axis=axis, eps=eps, norm=plain)
        y = z if norm.activation is None else activations.FUNCTIONS[norm.activation].value(z)
        return Expected(y, mean, rstd, z)


def kinds_of(chosen: Plan) -> set[str]:
    """The ways in which a plan's rows are laid out and come from memory, as tests of plans and of emulation name them.

    "... again" is one whose blocks take another turn, so that what they left behind of the first counts.
    """
    kinds = {chosen.strategy} if chosen.strategy == "row_split" else set()
    for item in chosen.launches:
        if item.kernel not in ("row_block_forward", "row_block_backward"):
            continue
        constants, arguments = dict(item.constants), dict(item.arguments)
        kind = f"{'cluster' if item.cluster > 1 else constants['STAGE']}{' peeled' if constants['PEELED'] else ''}"
        rows, turn = arguments["rows"], item.grid // item.cluster * item.block[1]
        kinds.add(f"{item.kernel}: {kind}")
        if isinstance(rows, int) and rows > turn:
            kinds.add(f"{item.kernel}: {kind} again")
        if item.cluster > 1 and not constants["WEIGHTS_STAGED"]:
            kinds.add(f"{item.kernel}: {kind} with weights from memory")
        elif constants["WEIGHTS_STAGED"]:
            kinds.add(f"{item.kernel}: {kind} with weights staged")
    return kinds


class Results(NamedTuple):
    """What a runner's forward gives: residual_out without a residual, and the mean of RMS norm, are None."""

    y: Array
    residual_out: Array | None
    mean: Array | None
    rstd: Array


def public_forward(norm: Norm) -> Any:
    """The public function that computes ``norm``."""
    if norm.centered:
        return functools.partial(cunorm.layer_norm, activation=norm.activation)
    return functools.partial(cunorm.rms_norm, activation=norm.activation, weight_offset=norm.weight_offset)


def public_backward(norm: Norm) -> Any:
    """The public function of its gradients, of dy, x, weight, bias, mean, rstd, dresidual_out."""

    def backward(dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, dres: Any, **options: Any) -> Any:
        options |= {"bias": bias, "dresidual_out": dres, "activation": norm.activation}
        if norm.centered:
            return cunorm.layer_norm_backward(dy, x, weight, mean, rstd, **options)
        return cunorm.rms_norm_backward(dy, x, weight, rstd, weight_offset=norm.weight_offset, **options)

    return backward


def named(results: tuple[Any, ...], norm: Norm, residual: Any) -> Results:
    """What a public function returned with its statistics."""
    rest = iter(results)
    y, residual_out = next(rest), None if residual is None else next(rest)
    return Results(y, residual_out, next(rest) if norm.centered else None, next(rest))


def view_of(array: Array | None) -> View | None:
    """A NumPy array as if it lay on a CUDA device, for planning."""
    if array is None:
        return None
    strides = tuple(step // array.itemsize for step in array.strides)
    return View(array.__array_interface__["data"][0], array.shape, strides, array.dtype.name, ("cuda", 0))


class NumpyRunner:
    """The CPU path, through the public functions."""

    def forward(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Results:
        out = poisoned(x.shape, x.dtype.name)
        options = {"axis": axis, "eps": eps, "residual": residual, "return_stats": True, "out": out}
        return named(public_forward(norm)(x, weight, bias, **options), norm, residual)

    def without_stats(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Array:
        options = {"axis": axis, "eps": eps, "residual": residual, "out": poisoned(x.shape, x.dtype.name)}
        result = public_forward(norm)(x, weight, bias, **options)
        y: Array = result if residual is None else result[0]
        return y

    def backward(
        self,
        dy: Array,
        x: Array,
        weight: Any,
        mean: Any,
        rstd: Array,
        axis: tuple[int, ...],
        mask: Any,
        norm: Norm = LAYER_NORM,
        bias: Any = None,
        dresidual_out: Any = None,
    ) -> tuple[Any, ...]:
        arrays = (dy, x, weight, bias, mean, rstd, dresidual_out)
        gradients: tuple[Any, ...] = public_backward(norm)(*arrays, axis=axis, output_mask=mask)
        return gradients


class EmulatorRunner:
    """The kernels' text on the CPU, with sanitizers, by the plans that a GPU would get."""

    seed = 0
    device = SMALL_DEVICE
    choose = staticmethod(plan)

    def forward(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Results:
        return self._forward(x, weight, bias, axis, eps, norm, residual, stats=True)

    def without_stats(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Array:
        return self._forward(x, weight, bias, axis, eps, norm, residual, stats=False).y

    def _forward(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm,
        residual: Any,
        stats: bool,
    ) -> Results:
        from cunorm.emulator.plans import run_plan

        axis = tuple(sorted(i % x.ndim for i in axis))
        y = poisoned(x.shape, x.dtype.name)
        residual_out = None if residual is None else poisoned(x.shape, x.dtype.name)
        stats_dtype = "float64" if x.dtype == np.float64 else "float32"
        rstd = poisoned(kept_shape(x.shape, axis), stats_dtype)
        mean = rstd.copy() if norm.centered else None
        problem = ForwardProblem.of(
            view_of(x),
            view_of(weight),
            view_of(bias),
            view_of(y),
            axis=axis,
            eps=eps,
            stats=stats,
            norm=norm,
            residual=view_of(residual),
            residual_out=view_of(residual_out),
        )
        operands = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        operands |= {"y": y, "residual_out": residual_out}
        operands |= {"mean": mean, "rstd": rstd} if stats else {"mean": None, "rstd": None}
        run_plan(self.choose(problem, self.device), operands, seed=self.seed)
        return Results(y, residual_out, mean, rstd)

    def backward(
        self,
        dy: Array,
        x: Array,
        weight: Any,
        mean: Any,
        rstd: Array,
        axis: tuple[int, ...],
        mask: Any,
        norm: Norm = LAYER_NORM,
        bias: Any = None,
        dresidual_out: Any = None,
    ) -> tuple[Any, ...]:
        from cunorm.emulator.plans import run_plan

        axis = tuple(sorted(i % x.ndim for i in axis))
        dtype = (x if weight is None else weight).dtype.name
        bias_dtype = dtype if bias is None else bias.dtype.name
        shape = columns_shape(x.shape, axis)
        dx = poisoned(x.shape, x.dtype.name) if mask[0] else None
        dweight = poisoned(shape, dtype) if mask[1] else None
        dbias = poisoned(shape, bias_dtype) if mask[2] else None
        problem = BackwardProblem.of(
            view_of(dy),
            view_of(x),
            view_of(weight),
            view_of(dx),
            axis=axis,
            dweight=dtype if mask[1] else None,
            dbias=bias_dtype if mask[2] else None,
            norm=norm,
            bias=view_of(bias),
            dresidual_out=view_of(dresidual_out),
        )
        operands = {"dy": dy, "dresidual_out": dresidual_out, "x": x, "weight": weight, "bias": bias}
        operands |= {"mean": mean, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}
        run_plan(self.choose(problem, self.device), operands, seed=self.seed)
        return dx, dweight, dbias


class CupyRunner:
    """The kernels on a GPU, through the public functions, in memory that is filled with NaNs when it is allocated."""

    def __init__(self, pool: bool = True) -> None:
        self.pool = pool  # False: CuPy's current allocator, not filled, so that initcheck sees what nobody wrote

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

    def _run(self, function: Any, arrays: list[Array | None], **options: Any) -> tuple[Any, ...]:
        import cupy

        on_gpu = [self._to_gpu(array) for array in arrays]

        def poisoned_memory(size: int) -> Any:
            memory = cupy.get_default_memory_pool().malloc(size)
            memory.memset_async(0xFF, size)
            return memory

        allocator = poisoned_memory if self.pool else cupy.cuda.get_allocator()
        with cupy.cuda.using_allocator(allocator):
            results = function(*on_gpu, **options)
        for array, copy in zip(arrays, on_gpu):
            assert array is None or cupy.asnumpy(copy).tobytes() == array.tobytes(), "an input was modified"
        results = results if isinstance(results, tuple) else (results,)
        return tuple(None if result is None else cupy.asnumpy(result) for result in results)

    def forward(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Results:
        results = self._forward(x, weight, bias, residual, norm, axis=axis, eps=eps, return_stats=True)
        return named(results, norm, residual)

    def without_stats(
        self,
        x: Array,
        weight: Any,
        bias: Any,
        axis: tuple[int, ...],
        eps: float,
        norm: Norm = LAYER_NORM,
        residual: Any = None,
    ) -> Array:
        y: Array = self._forward(x, weight, bias, residual, norm, axis=axis, eps=eps)[0]
        return y

    def _forward(self, x: Array, weight: Any, bias: Any, residual: Any, norm: Norm, **options: Any) -> tuple[Any, ...]:
        def function(x: Any, weight: Any, bias: Any, residual: Any, **options: Any) -> Any:
            return public_forward(norm)(x, weight, bias, residual=residual, **options)

        return self._run(function, [x, weight, bias, residual], **options)

    def backward(
        self,
        dy: Array,
        x: Array,
        weight: Any,
        mean: Any,
        rstd: Array,
        axis: tuple[int, ...],
        mask: Any,
        norm: Norm = LAYER_NORM,
        bias: Any = None,
        dresidual_out: Any = None,
    ) -> tuple[Any, ...]:
        arrays = [dy, x, weight, bias, mean, rstd, dresidual_out]
        return self._run(public_backward(norm), arrays, axis=axis, output_mask=mask)


RUNNERS = [
    pytest.param(NumpyRunner(), id="numpy"),
    pytest.param(EmulatorRunner(), id="emulator"),
    pytest.param(CupyRunner(), id="cupy", marks=pytest.mark.gpu),
]


def check(
    runner: Any,
    x: Array,
    weight: Any,
    bias: Any,
    axis: tuple[int, ...] = (-1,),
    dy: Any = None,
    eps: float = EPS,
    norm: Norm = LAYER_NORM,
    residual: Any = None,
    dresidual_out: Any = None,
) -> None:
    """Forward and backward of one problem against float64."""
    dtype = x.dtype.name
    arrays = (x, residual, weight, bias)
    before = [None if a is None else a.copy() for a in arrays]
    normalized = sum_of(x, residual)
    expected = Expected.of(normalized, weight, bias, axis, eps, norm)
    y, residual_out, mean, rstd = runner.forward(x, weight, bias, axis, eps, norm, residual)

    if residual is not None:
        assert residual_out is not None and residual_out.dtype == x.dtype
        assert residual_out.tobytes() == normalized.tobytes(), "the sum is not rounded once"
    assert y.shape == x.shape and y.dtype == x.dtype
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(y, expected.y, dtype, expected.z)
    else:
        affine_size = np.abs(expected.z) + (0 if bias is None else np.abs(float64(bias)).max(initial=0))
        tolerance = {"float32": 1.5e-7, "float64": 1e-15}[dtype] * (1 if norm.activation is None else 2)
        assert relative_error(y, expected.y, affine_size) <= tolerance
    # A single thread may add up as many as 32 squares, one after the other.
    statistics_tolerance = 3e-7 if dtype != "float64" else 1e-14
    statistics_dtype = np.float64 if dtype == "float64" else np.float32
    if expected.mean is None:
        assert mean is None
    else:
        assert mean.shape == expected.mean.shape and mean.dtype == statistics_dtype
        size = np.abs(expected.mean) + 1 / expected.rstd
        assert np.all(np.abs(mean - expected.mean) <= statistics_tolerance * size)
    assert rstd.shape == expected.rstd.shape and rstd.dtype == statistics_dtype
    assert np.all(np.abs(rstd - expected.rstd) <= statistics_tolerance * expected.rstd)

    dy = data(17, x.shape, dtype, shift=0.1) if dy is None else dy
    mask = (True, True, True)
    dx, dweight, dbias = runner.backward(
        dy, normalized, weight, mean, rstd, axis, mask, norm, bias if norm.activation else None, dresidual_out
    )
    sorted_axis = tuple(sorted(i % x.ndim for i in axis))
    exact: Any = [float64(array) for array in (dy, normalized, weight)]
    expected_dx, expected_dweight, expected_dbias = reference.row_norm_backward(
        *exact,
        expected.mean,
        expected.rstd,
        axis=sorted_axis,
        norm=norm,
        bias=float64(bias),
        dresidual_out=float64(dresidual_out),
    )
    # dx is a difference of terms of this size; with few columns it is much smaller than they are.
    weight_size = 1.0 if weight is None else np.abs(norm.weight_offset + float64(weight)).max(initial=0)
    wide_rstd = np.expand_dims(expected.rstd, sorted_axis)
    terms = np.abs(exact[0]) * weight_size * wide_rstd
    if dresidual_out is not None:
        terms = terms + np.abs(float64(dresidual_out))
    assert dx.shape == x.shape and dx.dtype == x.dtype
    assert relative_error(dx, expected_dx, terms) <= NORM_TOLERANCE[dtype]
    assert dweight.shape == dbias.shape == columns_shape(x.shape, axis)
    assert dweight.dtype == (x if weight is None else weight).dtype
    assert dbias.dtype == (bias.dtype if norm.activation and bias is not None else dweight.dtype)
    mean_of_rows = 0 if expected.mean is None else np.expand_dims(expected.mean, sorted_axis)
    xhat = (exact[1] - mean_of_rows) * wide_rstd
    assert_sums(dbias, expected_dbias, exact[0], sorted_axis, dtype)
    assert_sums(dweight, expected_dweight, exact[0] * np.maximum(1, np.abs(xhat)), sorted_axis, dtype)

    for array, copy in zip(arrays, before):
        assert array is None or array.tobytes() == copy.tobytes(), "an input was modified"
