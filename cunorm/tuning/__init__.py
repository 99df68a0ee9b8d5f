"""Finds the fastest plan for a problem by measuring, on the GPU that is there, and keeps it in `cunorm.tuning_file`."""

from __future__ import annotations

import numbers
import operator
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cunorm import __version__, execute, kernels
from cunorm.checks import as_float, check_activation, check_axis, check_mask, check_x
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Norm, Problem, View, contiguous_strides
from cunorm.tuning.gpu import current_gpu
from cunorm.tuning.search import Found, Report, find_fastest
from cunorm.tuning_file import Entry, TuningFile, default_path, forget, key_of

__all__ = ["TuneResult", "checked_problems", "contiguous_problem", "tune", "tune_problem"]

OPS = ("layer_norm", "rms_norm")
# The other ops, and why they cannot be tuned.
_UNTUNED = {
    "gelu": "for which there is one plan: there is nothing to tune",
    **dict.fromkeys(("instance_norm", "group_norm", "batch_norm"), "whose plans are always the built-in choice"),
}
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True, kw_only=True)
class TuneResult(Found):
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
    end = time.monotonic() + as_float(max_seconds)
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
    if isinstance(op, str) and op in _UNTUNED:
        raise ValueError(f"op is {op!r}, {_UNTUNED[op]}; only {' and '.join(OPS)} can be tuned")
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
    axes = check_axis(axis)
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
    """The problem for C-contiguous, aligned tensors: forward, or with an ``output_mask`` backward.

    Raises a ValueError for axes that the shape has not.
    """
    x = View(0, shape, contiguous_strides(shape), dtype, ("cuda", 0))
    axes, columns_shape, _ = check_x(x, axes)

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
    if kernels.replaced:
        names = ", ".join(kernels.replaced)
        raise RuntimeError(f"an experiment with {names} is active: what is measured would be kept for the shipped text")
    file = _writable(path)
    try:
        machine = current_gpu(problem)
        try:
            found = find_fastest(problem, machine, max_seconds, report)
        finally:
            machine.release()
    except MemoryError as error:
        tensors = f"x of shape {shape} and dtype {problem.x.dtype}, and the results to compare,"
        raise RuntimeError(f"{tensors} do not fit in the GPU's free memory: {error}") from error
    entry = Entry(found.geometry, shape, found.seconds, found.built_in_seconds, found.tried, __version__)
    try:
        file.store(machine.gpu, {key_of(problem): entry})
    except OSError as error:
        raise RuntimeError(_not_writable(file.path, error)) from error
    # What was prepared before would go on with the plan that it has.
    forget()
    execute.forget_prepared()
    return TuneResult(
        **vars(found),
        op="layer_norm" if problem.norm.centered else "rms_norm",
        direction="forward" if isinstance(problem, ForwardProblem) else "backward",
        shape=shape,
        dtype=problem.x.dtype,
        gpu=machine.gpu,
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
