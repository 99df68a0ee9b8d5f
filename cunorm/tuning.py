"""Finds the fastest plan for a problem by measuring, on the GPU that is there, and keeps it in `cunorm.tuning_file`.

A search takes every geometry that can compute the problem: compiles them side by side, runs each and compares its
results with those of the built-in choice, takes a short time of each, and then longer ones of the best few, which take
turns with the built-in choice. The time that this may take is given, and shared out between those steps.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cunorm import execute, launch, ops
from cunorm.checks import check_activation, check_axis, check_mask, check_x
from cunorm.plan import Device, Plan, RowBlock, plan_with, row_geometry
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Norm, Vector, View, contiguous_strides
from cunorm.tuning_file import Entry, TuningFile, default_path, forget, gpu_name, key_of

__all__ = ["Found", "Machine", "TuneResult", "checked_problems", "contiguous_problem", "search", "tune", "tune_problem"]

Problem = ForwardProblem | BackwardProblem
Report = Callable[[str, int, int], None]  # of a step: its name, how much is done, of how much

OPS = ("layer_norm", "rms_norm")
DIRECTIONS = ("forward", "backward", "both")
# A geometry must be at least so much faster than the built-in choice: less is lost in the noise of two measurements.
_WORTH_IT = 1.02
# The shares of the time after which no plan is compiled, and no further one tried.
_COMPILED_AFTER, _TRIED_AFTER = 0.5, 0.85
_SHORT, _LONG, _ROUNDS, _FINALISTS = 5, 9, 5, 5
# Relative errors between two right results: sums in another order, and what that does to the rounding of a few.
_TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-3, "float32": 1e-4, "float64": 1e-10}


@dataclass(frozen=True)
class TuneResult:
    """What `tune` found for one direction.

    Attributes
    ----------
    op, direction, shape, dtype, gpu
        The problem, and where it was timed.
    geometry : RowBlock or None
        How rows lie over threads in the plan that is best; None where that is the built-in choice.
    seconds, built_in_seconds : float
        Median times on the GPU, with a cold L2 cache, of the best plan and of the built-in one.
    tried, rejected, candidates : int
        How many plans were timed; how many were not, since they failed or gave other results; how many there are. The
        rest did not compile in the time there was.
    """

    op: str
    direction: str
    shape: tuple[int, ...]
    dtype: str
    gpu: str
    geometry: RowBlock | None
    seconds: float
    built_in_seconds: float
    tried: int
    rejected: int
    candidates: int


def tune(
    op: str,
    shape: Sequence[int],
    dtype: str = "float16",
    *,
    direction: str = "forward",
    axis: int | Sequence[int] = -1,
    weight: str | bool = True,
    bias: str | bool | None = None,
    activation: str | None = None,
    residual: bool = False,
    output_mask: tuple[bool, bool, bool] | None = None,
    max_seconds: float = 30.0,
    file: str | os.PathLike[str] | None = None,
) -> list[TuneResult]:
    """Time the plans that can compute a problem on the current CUDA device, and use the fastest from now on.

    It is stored for this GPU model, and for all problems of the same kind and about the same size: the same op,
    direction, dtypes, activation and results, with or without a residual, rows and columns up to the same powers of
    two, and columns that divide by as many (so that odd numbers of columns are tuned apart). Other processes find it
    when they start. JAX functions that are compiled already keep the plan that they were compiled with.

    Parameters
    ----------
    op : {"layer_norm", "rms_norm"}
        Which norm.
    shape : sequence of int
        The shape of x, which is C-contiguous.
    dtype : str
        The dtype of x: float16, bfloat16, float32 or float64.
    direction : {"forward", "backward", "both"}
        The norm, its gradient, or the one and then the other.
    axis : int or sequence of int
        The normalized axes.
    weight, bias : bool or str
        Whether there is one; or its dtype, if that is not x's. By default layer norm has both, RMS norm only a weight.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        As `layer_norm` takes it.
    residual : bool
        Whether there is a residual, and backward the gradient of residual_out.
    output_mask : tuple of three bools, optional
        Backward: which of dx, dweight, dbias are computed. By default dx, and the gradients of the weight and bias that
        there are.
    max_seconds : float
        About how long this may take, compilation included.
    file : path, optional
        Store there instead of in the file that cunorm reads.

    Returns
    -------
    results : list of TuneResult
        One for each direction.

    Raises
    ------
    ValueError, TypeError
        For an op, shape, dtype, direction or the like that there is not.
    RuntimeError
        Without a GPU that can be used, without memory for tensors of that shape, or if the file cannot be written.

    Examples
    --------
    >>> (result,) = cunorm.tune("layer_norm", (4096, 8192), "bfloat16")  # doctest: +SKIP
    >>> result.built_in_seconds / result.seconds, result.geometry  # doctest: +SKIP
    (1.07..., RowBlock(width=8, vectors=4, threads_per_row=256, ...))
    """
    problems = checked_problems(op, shape, dtype, direction, axis, weight, bias, activation, residual, output_mask)
    if isinstance(max_seconds, bool) or not isinstance(max_seconds, numbers.Real) or not max_seconds > 0:
        raise ValueError(f"max_seconds must be a positive number; got {max_seconds!r}")
    path = None if file is None else Path(file)
    shape = tuple(map(operator.index, shape))
    end = time.monotonic() + float(max_seconds)
    results = []
    for place, problem in enumerate(problems):
        share = max(0.0, end - time.monotonic()) / (len(problems) - place)
        results.append(tune_problem(problem, shape, share, path))
    return results


def checked_problems(
    op: Any,
    shape: Any,
    dtype: Any,
    direction: Any = "forward",
    axis: Any = -1,
    weight: Any = True,
    bias: Any = None,
    activation: Any = None,
    residual: Any = False,
    output_mask: Any = None,
) -> list[Problem]:
    """The problems that the arguments of `tune` mean, one for each direction."""
    for name, value, known in (("op", op, OPS), ("direction", direction, DIRECTIONS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"shape must be a sequence of ints; got {shape!r}") from None
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape is {sizes}; it must have a dimension, and none may be empty")
    centered = op == "layer_norm"
    dtypes = {
        "dtype": _dtype("dtype", dtype, None),
        "weight": _dtype("weight", weight, dtype),
        "bias": _dtype("bias", centered if bias is None else bias, dtype),
    }
    if not isinstance(dtypes["dtype"], str):
        raise TypeError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    view = View(0, sizes, contiguous_strides(sizes), dtypes["dtype"], ("cuda", 0))
    axes, _, _ = check_x(view, check_axis(axis))
    given = dtypes["weight"] is not None, dtypes["bias"] is not None
    mask = (True, *given) if output_mask is None else check_mask(output_mask)
    if not any(mask):
        raise ValueError("output_mask asks for nothing")
    norm = Norm(centered, activation=check_activation(activation))
    wanted = (False, True) if direction == "both" else (direction == "backward",)
    return [
        contiguous_problem(
            norm, sizes, axes, dtypes["dtype"], dtypes["weight"], dtypes["bias"], bool(residual), mask if back else None
        )
        for back in wanted
    ]


def _dtype(name: str, value: Any, of_x: Any) -> str | None:
    """The name of a dtype: True is for x's, False for none."""
    if isinstance(value, bool) and of_x is not None:
        return of_x if value else None
    if not isinstance(value, str) or value not in DTYPES:
        also = "" if of_x is None else ", or a bool"
        raise TypeError(f"{name} is {value!r}; it must be one of {', '.join(DTYPES)}{also}")
    return value


def contiguous_problem(
    norm: Norm,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    dtype: str,
    weight: str | None,
    bias: str | None,
    residual: bool,
    output_mask: tuple[bool, bool, bool] | None,
) -> Problem:
    """The problem for C-contiguous, aligned tensors: forward, or with an ``output_mask`` backward."""
    x = View(0, shape, contiguous_strides(shape), dtype, ("cuda", 0))
    columns_shape = tuple(shape[i] for i in axes)

    def vector(of: str | None) -> View | None:
        return None if of is None else View(0, columns_shape, contiguous_strides(columns_shape), of, ("cuda", 0))

    added = x if residual else None
    if output_mask is None:
        options: dict[str, Any] = {"axis": axes, "norm": norm, "residual": added, "residual_out": added}
        return ForwardProblem.of(x, vector(weight), vector(bias), x, eps=1e-5, stats=False, **options)
    dx, dweight, dbias = output_mask
    options = {"axis": axes, "norm": norm, "bias": vector(bias), "dresidual_out": added}
    options["dweight"] = (weight or dtype) if dweight else None
    options["dbias"] = (bias or weight or dtype) if dbias else None
    return BackwardProblem.of(x, x, vector(weight), x if dx else None, **options)


def tune_problem(
    problem: Problem, shape: tuple[int, ...], max_seconds: float, path: Path | None = None, report: Report | None = None
) -> TuneResult:
    """`tune` for one problem, that of a tensor of ``shape``."""
    file = _writable(path)
    try:
        machine = _gpu(problem)
        try:
            found = search(problem, machine, max_seconds, report)
        finally:
            machine.release()
    except MemoryError as error:
        tensors = f"x of shape {shape} and dtype {problem.x.dtype}, and the results to compare,"
        raise RuntimeError(f"{tensors} do not fit in the GPU's free memory: {error}") from error
    from cunorm import __version__  # which is there once the package is imported

    entry = Entry(found.geometry, shape, found.seconds, found.built_in_seconds, found.tried, __version__)
    try:
        file.store(machine.gpu, {key_of(problem): entry})
    except OSError as error:
        raise RuntimeError(_not_writable(file.path, error)) from error
    # What was prepared before would go on with the plan that it has.
    forget()
    execute.forget_prepared()
    return TuneResult(
        op="layer_norm" if problem.norm.centered else "rms_norm",
        direction="forward" if isinstance(problem, ForwardProblem) else "backward",
        shape=shape,
        dtype=problem.x.dtype,
        gpu=machine.gpu,
        geometry=found.geometry,
        seconds=found.seconds,
        built_in_seconds=found.built_in_seconds,
        tried=found.tried,
        rejected=found.rejected,
        candidates=found.candidates,
    )


def _writable(path: Path | None) -> TuningFile:
    """The file to store in, before time is spent on what could not be stored."""
    path = path or default_path()
    if path is None:
        raise RuntimeError("there is no home folder to store the result in; set CUNORM_CACHE_DIR, or name a file")
    file = TuningFile(path)
    try:
        file.check_writable()
    except OSError as error:
        raise RuntimeError(_not_writable(path, error)) from error
    return file


def _not_writable(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error}); set CUNORM_CACHE_DIR to another folder, or name another file"


# ---- The search.


class Machine(Protocol):
    """Where the plans of one problem are compiled, compared and timed."""

    gpu: str
    device: Device

    def compile(self, plans: Sequence[Plan], until: float, report: Report) -> list[Plan]:
        """Compile the plans, as many as there is time for (by ``time.monotonic``). Returns those that can run."""

    def error(self, plan: Plan) -> float:
        """Run a plan; the relative error of its results against those of the first plan that was run.

        Raises a RuntimeError for a plan that does not run.
        """

    def samples(self, plan: Plan, count: int) -> list[float]:
        """Times of a plan in seconds, with a cold cache."""

    def release(self) -> None:
        """Give back the memory, which other libraries may need."""


@dataclass(frozen=True)
class Found:
    """What a search found; the names are those of `TuneResult`."""

    geometry: RowBlock | None
    seconds: float
    built_in_seconds: float
    tried: int
    rejected: int
    candidates: int


def search(problem: Problem, machine: Machine, max_seconds: float, report: Report | None = None) -> Found:
    """Find the geometry whose plan is fastest, or None where nothing is `_WORTH_IT`."""
    say = report or (lambda step, done, total: None)
    begin = time.monotonic()
    built_in = plan_with(problem, machine.device, None)
    # Different geometries may come down to the same launches, where rows are few.
    geometries: dict[Plan, RowBlock | None] = {built_in: None}
    for geometry in row_geometry.candidates(problem, machine.device):
        geometries.setdefault(plan_with(problem, machine.device, geometry), geometry)
    others = [plan for plan in geometries if plan != built_in]
    # Neighbours are alike: where the time is too short for all, some of every kind.
    random.Random(0).shuffle(others)

    ready = machine.compile([built_in, *others], begin + _COMPILED_AFTER * max_seconds, say)
    if built_in not in ready:
        raise RuntimeError("the built-in plan does not compile or run on this GPU, so there is nothing to compare with")
    rejected, tolerance = 0, max(_TOLERANCE[dtype] for dtype in _result_dtypes(problem))
    machine.error(built_in)
    # Clocks rise in the first moments.
    machine.samples(built_in, _SHORT * _LONG)
    times = {built_in: _median(machine.samples(built_in, _SHORT))}
    for done, plan in enumerate(ready):
        say("trying", done, len(ready))
        if time.monotonic() - begin > _TRIED_AFTER * max_seconds:
            break
        if plan == built_in:
            continue
        try:
            # Not "greater than": an error may be NaN.
            if not machine.error(plan) <= tolerance:
                rejected += 1
                continue
            times[plan] = _median(machine.samples(plan, _SHORT))
        except _Broken:
            raise
        except RuntimeError:
            rejected += 1

    finalists = sorted((plan for plan in times if plan != built_in), key=times.__getitem__)[:_FINALISTS]
    samples: dict[Plan, list[float]] = {plan: [] for plan in (built_in, *finalists)}
    for turn in range(_ROUNDS):
        say("comparing", turn, _ROUNDS)
        if turn and time.monotonic() - begin > max_seconds:
            break
        for plan, taken in samples.items():
            taken += machine.samples(plan, _LONG)
    medians = {plan: _median(taken) for plan, taken in samples.items()}
    best = min(medians, key=medians.__getitem__)
    if medians[built_in] < _WORTH_IT * medians[best]:
        best = built_in
    return Found(geometries[best], medians[best], medians[built_in], len(times), rejected, len(geometries))


def _result_dtypes(problem: Problem) -> list[str]:
    more = [] if isinstance(problem, ForwardProblem) else [problem.dweight, problem.dbias]
    return [problem.x.dtype, *(dtype for dtype in more if dtype)]


def _median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


class _Broken(RuntimeError):
    """An error after which the process cannot use the device."""


# ---- The GPU.

_OUTPUTS = ("y", "residual_out", "dx", "dweight", "dbias")
_BLOCK = 2**22 - 3  # numbers that are drawn, and then repeated; a prime, so that rows differ
_CHUNK = 2**24  # numbers that are compared at once
_LEAST_FLUSHED_BYTES = 256 * 2**20


def _gpu(problem: Problem) -> Machine:
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
        self.gpu, self.device = gpu_name(index), launch.device(index)
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
            launches = plan.launches
            return [(item.kernel, item.constants, item.shared_bytes, item.cluster, self._index) for item in launches]

        needed = kernels(plans[0])

        def compiled(kernel: Any) -> bool:
            if kernel not in needed and time.monotonic() > until:
                return False
            try:
                launch._function(*kernel)
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
            raise _Broken(
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
        return dict(zip(ops._FORWARD_OPERANDS, (x, added, *vectors, x, added, None, None)))
    added, dx = x if problem.dresidual_out else None, x if problem.dx else None
    mean = compute if problem.norm.centered else None
    dtypes = (x, added, x, *vectors, mean, compute, dx, problem.dweight, problem.dbias)
    return dict(zip(ops._BACKWARD_OPERANDS, dtypes))


def _stored_as(dtype: str) -> str:
    """What CuPy knows a dtype as: a bfloat16 goes as its bits, which no version of CuPy has to understand."""
    return "uint16" if dtype == "bfloat16" else dtype
