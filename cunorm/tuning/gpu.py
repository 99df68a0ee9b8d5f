"""A GPU with a call's tensors in its memory, and CuPy's clock: the `Machine` of the search, and what times texts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cunorm import compiling, cuda, gpus, launch, on_cpu
from cunorm.plan import Plan
from cunorm.prepared import BACKWARD_OPERANDS, FORWARD_OPERANDS, RUNNING_OPERANDS
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, ChannelProblem, ForwardProblem, Problem, Vector
from cunorm.tuning.search import Broken, Machine, Report

__all__ = ["Gpu", "current_gpu"]

_OUTPUTS = ("y", "residual_out", "dx", "dweight", "dbias")
_BLOCK = 2**22 - 3  # numbers that are drawn, and then repeated; a prime, so that rows differ
_CHUNK = 2**24  # numbers that are compared at once
_MOST_ROWS = 2**14  # of which the sums of dy, as it is drawn, are finite float16 numbers


def current_gpu(problem: Problem | ChannelProblem) -> Machine:
    """The current CUDA device, with tensors for a problem."""
    return Gpu(_tensors(problem), _OUTPUTS, gpus.current_index("tuning"))


class Gpu:
    """A CUDA device, and tensors for a call in its memory.

    ``tensors`` has the size and dtype of every operand, in order, None for those that the call has not; ``outputs`` are
    the names of those that it writes. What runs on them are plans, or what was given a name by `load`.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, str] | None], outputs: Sequence[str], index: int) -> None:
        self._cupy = cuda.cupy()
        self._index = index
        self.gpu, self.device = cuda.gpu_name(index), cuda.device(index)
        self._tensors = {name: item for name, item in tensors.items() if item is not None}
        self._outputs = [name for name in outputs if name in self._tensors]
        self._names = tuple(tensors)
        self._arrays: dict[str, Any] = {}
        self._fill()
        self._pointers = [self._arrays[name].data.ptr if name in self._arrays else 0 for name in self._names]
        self._expected: dict[str, Any] = {}
        self._calls: dict[Plan | str, Callable[[Sequence[int], int, int], None]] = {}
        self._workspace: Any = self._cupy.empty(0, "uint8")
        self._copied: list[Any] = []
        self._flushing: Any = gpus.flushing_memory(index)

    def _fill(self) -> None:
        rng = np.random.default_rng(0)
        for name, (count, dtype) in self._tensors.items():
            array = self._arrays[name] = self._cupy.empty(count, _stored_as(dtype))
            if name in self._outputs:
                continue
            # A weight or rstd about 1, anything else about 0.3 (so that the mean is not nothing).
            drawn: Any = rng.standard_normal(min(count, _BLOCK), "float32")
            drawn = 1 + drawn / 8 if name in ("weight", "rstd") else 0.3 + drawn
            if name == "dy":
                drawn *= min(1.0, _MOST_ROWS / self._rows_of_sums(count))
            values = drawn.astype(on_cpu.numpy_dtype(dtype)).view(_stored_as(dtype))
            block = self._cupy.asarray(values)
            for start in range(0, count, _BLOCK):
                array[start : start + _BLOCK] = block[: count - start]

    def _rows_of_sums(self, count: int) -> int:
        """How many numbers of so many add up to one of dweight or dbias."""
        sums = [self._tensors[name][0] for name in ("dweight", "dbias") if name in self._tensors]
        return max(1, count // max(1, min(sums, default=count)))

    def compile(self, plans: Sequence[Plan], until: float, report: Report) -> list[Plan]:
        from concurrent.futures import ThreadPoolExecutor

        def kernels(plan: Plan) -> list[Any]:
            return [(*item.function_key, self._index) for item in plan.launches]

        needed = kernels(plans[0])

        def compiled(kernel: Any) -> bool:
            if kernel not in needed and time.monotonic() > until:
                return False
            try:
                compiling.compiled_function(*kernel)
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
                self._reserve(plan)
        return [plan for plan in plans if plan in self._calls]

    def load(self, name: str, plan: Plan, texts: Mapping[str, str]) -> None:
        """Compile a plan with texts that stand in for shipped ones, and give it a name."""
        self._calls[name] = launch.Call(plan, self._names, self._index, texts)
        self._reserve(plan)

    def load_copy(self, name: str, nbytes: int) -> None:
        """Give a copy of so many bytes a name."""
        self._copied = [self._cupy.empty(nbytes, "uint8") for _ in range(2)]
        source, target = (array.data for array in self._copied)
        self._calls[name] = lambda pointers, workspace, stream: target.copy_from_device_async(source, nbytes)

    def _reserve(self, plan: Plan) -> None:
        if plan.workspace_bytes > self._workspace.nbytes:
            self._workspace = self._cupy.empty(plan.workspace_bytes, "uint8")

    def _run(self, plan: Plan | str) -> None:
        self._calls[plan](self._pointers, self._workspace.data.ptr, self._cupy.cuda.get_current_stream().ptr)

    def error(self, plan: Plan | str) -> float:
        outputs = {name: self._arrays[name] for name in self._outputs}
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
        (_, dtype), expected = self._tensors[name], self._expected[name]
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

    def samples(self, plan: Plan | str, count: int) -> list[float]:
        try:
            return gpus.cold_seconds(lambda: self._run(plan), count, self._flushing)
        except RuntimeError as error:
            self._still_works(error)
            raise

    def release(self) -> None:
        self._arrays.clear()
        self._expected.clear()
        self._calls.clear()
        self._copied.clear()
        self._workspace = self._flushing = None
        self._cupy.get_default_memory_pool().free_all_blocks()


def _tensors(problem: Problem | ChannelProblem) -> dict[str, tuple[int, str] | None]:
    """The size and dtype of every operand; None for those that this problem has not."""
    if isinstance(problem, (ChannelForward, ChannelBackward)):
        dtypes, columns, rows = _dtypes_of_channels(problem), problem.channels, problem.sets
        elements = problem.samples * problem.channels * problem.points
    else:
        dtypes, columns, rows = _dtypes(problem), problem.columns, problem.rows
        elements = rows * columns
    counts = {"mean": rows, "rstd": rows}
    counts |= dict.fromkeys(("weight", "bias", "running_mean", "running_var", "dweight", "dbias"), columns)
    return {name: (counts.get(name, elements), dtype) if dtype else None for name, dtype in dtypes.items()}


def _of(vector: Vector | None) -> str | None:
    return None if vector is None else vector.dtype


def _dtypes(problem: Problem) -> dict[str, str | None]:
    x, compute, vectors = problem.x.dtype, DTYPES[problem.x.dtype].compute, (_of(problem.weight), _of(problem.bias))
    if isinstance(problem, ForwardProblem):
        added = x if problem.residual else None
        return dict(zip(FORWARD_OPERANDS, (x, added, *vectors, x, added, None, None)))
    added, dx = x if problem.dresidual_out else None, x if problem.dx else None
    mean = compute if problem.norm.centered else None
    every = (x, added, x, *vectors, mean, compute, dx, problem.dweight, problem.dbias)
    return dict(zip(BACKWARD_OPERANDS, every))


def _dtypes_of_channels(problem: ChannelProblem) -> dict[str, str | None]:
    x, compute, vectors = problem.x.dtype, DTYPES[problem.x.dtype].compute, (_of(problem.weight), _of(problem.bias))
    if isinstance(problem, ChannelBackward):
        dx = x if problem.dx else None
        every = (x, None, x, *vectors, compute, compute, dx, problem.dweight, problem.dbias)
        return dict(zip(BACKWARD_OPERANDS, every))
    y = x if problem.y else None
    if problem.running is None:
        return dict(zip(FORWARD_OPERANDS, (x, None, *vectors, y, None, None, None)))
    running = _of(problem.running.mean), _of(problem.running.variance)
    return dict(zip(RUNNING_OPERANDS, (x, None, *vectors, y, *running, None, None, None)))


def _stored_as(dtype: str) -> str:
    """What CuPy knows a dtype as: a bfloat16 goes as its bits, which no version of CuPy has to understand."""
    return "uint16" if dtype == "bfloat16" else dtype
