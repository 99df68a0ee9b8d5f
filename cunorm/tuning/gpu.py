"""The current GPU as a `Machine` of the search: a problem's tensors in its memory, and CuPy's clock."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cunorm import execute, launch, ops
from cunorm.plan import Plan
from cunorm.problem import DTYPES, ForwardProblem, Problem, Vector
from cunorm.tuning.search import Broken, Machine, Report

__all__ = ["current_gpu"]

_OUTPUTS = ("y", "residual_out", "dx", "dweight", "dbias")
_BLOCK = 2**22 - 3  # numbers that are drawn, and then repeated; a prime, so that rows differ
_CHUNK = 2**24  # numbers that are compared at once
_LEAST_FLUSHED_BYTES = 256 * 2**20


def current_gpu(problem: Problem) -> Machine:
    """The current CUDA device, with tensors for a problem."""
    cupy = launch.cupy()
    try:
        index = int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"tuning needs an NVIDIA GPU: {error}") from error
    return _Gpu(problem, index)


class _Gpu:
    """A CUDA device, and tensors for a problem in its memory."""

    def __init__(self, problem: Problem, index: int) -> None:
        self._cupy = launch.cupy()
        self._index = index
        self.gpu, self.device = launch.gpu_name(index), launch.device(index)
        self._dtypes = _operand_dtypes(problem)
        self._names = tuple(self._dtypes)
        self._arrays: dict[str, Any] = {}
        self._fill(problem)
        self._pointers = [self._arrays[name].data.ptr if name in self._arrays else 0 for name in self._names]
        self._expected: dict[str, Any] = {}
        self._calls: dict[Plan, launch.Call] = {}
        self._workspace: Any = self._cupy.empty(0, "uint8")
        cache_bytes = self._cupy.cuda.Device(index).attributes.get("L2CacheSize", 0)
        self._flushed: Any = self._cupy.empty(max(2 * cache_bytes, _LEAST_FLUSHED_BYTES), "uint8")

    def _fill(self, problem: Problem) -> None:
        elements = problem.rows * problem.columns
        counts = {"weight": problem.columns, "bias": problem.columns, "mean": problem.rows, "rstd": problem.rows}
        counts |= {"dweight": problem.columns, "dbias": problem.columns}
        rng = np.random.default_rng(0)
        for name, dtype in self._dtypes.items():
            if dtype is None:
                continue
            count = counts.get(name, elements)
            array = self._arrays[name] = self._cupy.empty(count, _stored_as(dtype))
            if name in _OUTPUTS:
                continue
            # A weight or rstd about 1, anything else about 0.3 (so that the mean is not nothing).
            drawn: Any = rng.standard_normal(min(count, _BLOCK), "float32")
            drawn = 1 + drawn / 8 if name in ("weight", "rstd") else 0.3 + drawn
            values = drawn.astype(execute.numpy_dtype(dtype)).view(_stored_as(dtype))
            block = self._cupy.asarray(values)
            for start in range(0, count, _BLOCK):
                array[start : start + _BLOCK] = block[: count - start]

    def compile(self, plans: Sequence[Plan], until: float, report: Report) -> list[Plan]:
        from concurrent.futures import ThreadPoolExecutor

        def kernels(plan: Plan) -> list[Any]:
            return [(*item.function_key, self._index) for item in plan.launches]

        needed = kernels(plans[0])

        def compiled(kernel: Any) -> bool:
            if kernel not in needed and time.monotonic() > until:
                return False
            try:
                launch.compiled_function(*kernel)
            except RuntimeError:  # it does not compile, or asks for more than there is
                return False
            return True

        # Many plans share a kernel. The compiler lets other threads run meanwhile.
        distinct = list(dict.fromkeys(kernel for plan in plans for kernel in kernels(plan)))
        ready = set()
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for done, (kernel, fine) in enumerate(zip(distinct, pool.map(compiled, distinct))):
                report("compiling", done, len(distinct))
                if fine:
                    ready.add(kernel)
        for plan in plans:
            if ready.issuperset(kernels(plan)):
                self._calls[plan] = launch.Call(plan, self._names, self._index)
        return list(self._calls)

    def _run(self, plan: Plan) -> None:
        self._calls[plan](self._pointers, self._workspace.data.ptr, self._cupy.cuda.get_current_stream().ptr)

    def error(self, plan: Plan) -> float:
        if plan.workspace_bytes > self._workspace.nbytes:
            self._workspace = self._cupy.empty(plan.workspace_bytes, "uint8")
        outputs = {name: self._arrays[name] for name in _OUTPUTS if name in self._arrays}
        for array in outputs.values():
            array.data.memset_async(0xFF, array.nbytes)  # NaNs
        try:
            self._run(plan)
            self._cupy.cuda.get_current_stream().synchronize()
        except RuntimeError as error:
            self._still_works(error)
            raise
        if not self._expected:
            self._expected = {name: array.copy() for name, array in outputs.items()}
            return 0.0
        # NumPy's, which lets no NaN pass.
        return float(np.max([self._relative_error(name, array) for name, array in outputs.items()]))

    def _still_works(self, error: RuntimeError) -> None:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except RuntimeError:
            raise Broken(
                f"a kernel failed in a way that leaves the GPU unusable in this process ({error}); nothing was stored"
            ) from error

    def _relative_error(self, name: str, array: Any) -> float:
        dtype, expected = self._dtypes[name], self._expected[name]
        assert dtype is not None
        difference = size = 0.0
        for start in range(0, array.size, _CHUNK):
            result = self._as_float(array[start : start + _CHUNK], dtype)
            exact = self._as_float(expected[start : start + _CHUNK], dtype)
            size += float((exact * exact).sum(dtype="float64"))
            result -= exact
            difference += float((result * result).sum(dtype="float64"))
        return math.sqrt(difference / size) if size else math.sqrt(difference)

    def _as_float(self, stored: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            return (stored.astype("uint32") << 16).view("float32")
        return stored.astype("float64" if dtype == "float64" else "float32")

    def samples(self, plan: Plan, count: int) -> list[float]:
        cuda = self._cupy.cuda
        pairs = [(cuda.Event(), cuda.Event()) for _ in range(count)]
        try:
            for begin, end in pairs:
                # Overwrites L2; and while that takes its time, the launch is queued, so that no host time is measured.
                self._flushed.data.memset_async(0, self._flushed.nbytes)
                begin.record()
                self._run(plan)
                end.record()
            cuda.get_current_stream().synchronize()
        except RuntimeError as error:
            self._still_works(error)
            raise
        return [cuda.get_elapsed_time(begin, end) * 1e-3 for begin, end in pairs]

    def release(self) -> None:
        self._arrays.clear()
        self._expected.clear()
        self._workspace = self._flushed = None
        self._cupy.get_default_memory_pool().free_all_blocks()


def _operand_dtypes(problem: Problem) -> dict[str, str | None]:
    """The dtype of every operand; None for those that this problem has not."""
    x, compute = problem.x.dtype, DTYPES[problem.x.dtype].compute

    def of(vector: Vector | None) -> str | None:
        return None if vector is None else vector.dtype

    vectors = (of(problem.weight), of(problem.bias))
    if isinstance(problem, ForwardProblem):
        added = x if problem.residual else None
        return dict(zip(ops.FORWARD_OPERANDS, (x, added, *vectors, x, added, None, None)))
    added, dx = x if problem.dresidual_out else None, x if problem.dx else None
    mean = compute if problem.norm.centered else None
    dtypes = (x, added, x, *vectors, mean, compute, dx, problem.dweight, problem.dbias)
    return dict(zip(ops.BACKWARD_OPERANDS, dtypes))


def _stored_as(dtype: str) -> str:
    """What CuPy knows a dtype as: a bfloat16 goes as its bits, which no version of CuPy has to understand."""
    return "uint16" if dtype == "bfloat16" else dtype
