"""Data, tolerances and runners that the tests of an op share.

A runner computes layer norm and its gradients from NumPy arrays, by one of the ways the package has: the CPU path, the
kernels on the emulator, the kernels on a GPU. Every output is filled with NaNs before it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cunorm
from cunorm import execute, reference
from cunorm.plan import Device, plan
from cunorm.problem import BackwardProblem, ForwardProblem, View

Array = np.ndarray[Any, Any]

# Largest relative error in the norm, ||result - float64 result|| / scale. A result in sixteen bits is rounded once: at
# most half a unit in the last place of each number. float32 leaves room for a few roundings on the way.
NORM_TOLERANCE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 4e-7, "float64": 1e-14}
# A GPU small enough that the emulator has little to do, and that blocks take several rows each.
SMALL_DEVICE = Device("sm_90", multiprocessors=2, threads_per_multiprocessor=512)


def dtype_of(name: str) -> np.dtype[Any]:
    return execute.numpy_dtype(name)


def data(seed: int, shape: tuple[int, ...], dtype: str = "float32", shift: float = 0.3, outliers: bool = True) -> Array:
    """Normal numbers about ``shift``; every 13th number fifty times as large where ``outliers``."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if outliers:
        values.reshape(-1)[7::13] *= 50
    return (values + shift).astype(dtype_of(dtype))


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


def assert_rounded_once(result: Array, expected: Array, dtype: str) -> None:
    """A sixteen-bit result is the float64 one rounded, but for ties that float32 arithmetic decides the other way."""
    slack = 1e-6 * np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2)))
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


@dataclass(frozen=True)
class Expected:
    """Float64 results from the very numbers that were given."""

    y: Array
    mean: Array
    rstd: Array

    @staticmethod
    def of(x: Array, weight: Array | None, bias: Array | None, axis: tuple[int, ...], eps: float) -> Expected:
        axis = tuple(sorted(i % x.ndim for i in axis))
        return Expected(*reference.layer_norm(float64(x), float64(weight), float64(bias), axis=axis, eps=eps))


def view_of(array: Array | None) -> View | None:
    """A NumPy array as if it lay on a CUDA device, for planning."""
    if array is None:
        return None
    strides = tuple(step // array.itemsize for step in array.strides)
    return View(array.__array_interface__["data"][0], array.shape, strides, array.dtype.name, ("cuda", 0))


class NumpyRunner:
    """The CPU path, through the public functions."""

    def forward(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> tuple[Array, ...]:
        out = poisoned(x.shape, x.dtype.name)
        return cunorm.layer_norm(x, weight, bias, axis=axis, eps=eps, return_stats=True, out=out)

    def without_stats(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> Array:
        result: Array = cunorm.layer_norm(x, weight, bias, axis=axis, eps=eps, out=poisoned(x.shape, x.dtype.name))
        return result

    def backward(
        self, dy: Array, x: Array, weight: Any, mean: Array, rstd: Array, axis: tuple[int, ...], mask: Any
    ) -> tuple[Any, ...]:
        return cunorm.layer_norm_backward(dy, x, weight, mean, rstd, axis=axis, output_mask=mask)


class EmulatorRunner:
    """The kernels' text on the CPU, with sanitizers, by the plans that a GPU would get."""

    seed = 0

    def forward(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> tuple[Array, ...]:
        return self._forward(x, weight, bias, axis, eps, stats=True)

    def without_stats(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> Array:
        return self._forward(x, weight, bias, axis, eps, stats=False)[0]

    def _forward(
        self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float, stats: bool
    ) -> tuple[Array, ...]:
        from cunorm.emulator.plans import run_plan

        axis = tuple(sorted(i % x.ndim for i in axis))
        y = poisoned(x.shape, x.dtype.name)
        stats_dtype = "float64" if x.dtype == np.float64 else "float32"
        mean, rstd = (poisoned(kept_shape(x.shape, axis), stats_dtype) for _ in range(2))
        problem = ForwardProblem.of(
            view_of(x), view_of(weight), view_of(bias), view_of(y), axis=axis, eps=eps, stats=stats
        )
        operands: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "y": y, "mean": None, "rstd": None}
        if stats:
            operands |= {"mean": mean, "rstd": rstd}
        run_plan(plan(problem, SMALL_DEVICE), operands, seed=self.seed)
        return y, mean, rstd

    def backward(
        self, dy: Array, x: Array, weight: Any, mean: Array, rstd: Array, axis: tuple[int, ...], mask: Any
    ) -> tuple[Any, ...]:
        from cunorm.emulator.plans import run_plan

        axis = tuple(sorted(i % x.ndim for i in axis))
        dtype = (x if weight is None else weight).dtype.name
        shape = columns_shape(x.shape, axis)
        dx = poisoned(x.shape, x.dtype.name) if mask[0] else None
        dweight, dbias = (poisoned(shape, dtype) if wanted else None for wanted in mask[1:])
        problem = BackwardProblem.of(
            view_of(dy),
            view_of(x),
            view_of(weight),
            view_of(dx),
            axis=axis,
            dweight=dtype if mask[1] else None,
            dbias=dtype if mask[2] else None,
        )
        operands = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
        operands |= {"dx": dx, "dweight": dweight, "dbias": dbias}
        run_plan(plan(problem, SMALL_DEVICE), operands, seed=self.seed)
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

    def forward(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> tuple[Array, ...]:
        return self._run(cunorm.layer_norm, [x, weight, bias], axis=axis, eps=eps, return_stats=True)

    def without_stats(self, x: Array, weight: Any, bias: Any, axis: tuple[int, ...], eps: float) -> Array:
        result: Array = self._run(cunorm.layer_norm, [x, weight, bias], axis=axis, eps=eps)[0]
        return result

    def backward(
        self, dy: Array, x: Array, weight: Any, mean: Array, rstd: Array, axis: tuple[int, ...], mask: Any
    ) -> tuple[Any, ...]:
        arrays = [dy, x, weight, mean, rstd]
        return self._run(cunorm.layer_norm_backward, arrays, axis=axis, output_mask=mask)
