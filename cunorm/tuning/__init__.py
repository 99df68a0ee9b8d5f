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
from cunorm.channel_norm import CHANNEL_NORMS, ChannelNorm
from cunorm.checks import as_float, check_activation, check_axis, check_channels, check_mask, check_x
from cunorm.explanation.call import Call
from cunorm.prepared import NOWHERE, Op
from cunorm.problem import (
    DTYPES,
    AnyProblem,
    ChannelForward,
    ChannelProblem,
    ForwardProblem,
    Norm,
    Problem,
    View,
    contiguous_strides,
)
from cunorm.row_norm import RowNorm
from cunorm.tuning.gpu import current_gpu
from cunorm.tuning.search import Found, Report, find_fastest
from cunorm.tuning_file import Entry, TuningFile, default_path, forget, key_of

__all__ = ["TuneResult", "checked_problems", "contiguous_problem", "tune", "tune_problem"]

OPS = ("layer_norm", "rms_norm", *CHANNEL_NORMS)
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True, kw_only=True)
class TuneResult(Found):
    """What `tune` found for one direction.

    Attributes
    ----------
    op, direction, shape, dtype, gpu
        The problem, and where it was timed.
    geometry : RowBlock, RowBulk, RowBulkBackward, Slab, Grid, ChannelPipeline, Split or None
        How numbers lie over threads in the plan that is best; None where that is the built-in choice.
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
    num_groups: int | None = None,
    data_format: str = "NC...",
    output_mask: tuple[bool, bool, bool] | None = None,
    max_seconds: float = 30.0,
    file: str | os.PathLike[str] | None = None,
) -> list[TuneResult]:
    """Time the plans that can compute a problem on the current CUDA device, and use the fastest from now on.

    It is stored for this GPU model, and for all problems of the same kind and about the same size: the same op,
    direction, dtypes, activation and results, with or without a residual, rows and columns up to the same powers of
    two, and columns that divide by as many (so that odd numbers of columns are tuned apart). What is found for a norm
    of channels is for the same shape alone, channels second or last. Other processes find it when they start. JAX
    functions that are compiled already keep the plan that they were compiled with.

    Parameters
    ----------
    op : {"layer_norm", "rms_norm", "instance_norm", "group_norm", "batch_norm"}
        Which norm; batch norm in training, with running statistics.
    shape : sequence of int
        The shape of x, which is C-contiguous.
    dtype : str
        The dtype of x: float16, bfloat16, float32 or float64.
    direction : {"forward", "backward", "both"}
        The norm, its gradient, or the one and then the other.
    axis : int or sequence of int
        The normalized axes of layer norm and RMS norm.
    weight, bias : bool or str
        Whether there is one; or its dtype, if that is not x's. By default there are both, but RMS norm has no bias.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        As `layer_norm` takes it.
    residual : bool
        Whether there is a residual, and backward the gradient of residual_out: for layer norm and RMS norm.
    num_groups : int, optional
        Of group norm.
    data_format : str
        As `group_norm` takes it: "NC..." for channels second, as in PyTorch, "N...C" for channels last, and so for
        PyTorch's channels_last too.
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
    options = num_groups, data_format, output_mask
    problems = checked_problems(op, shape, dtype, direction, axis, weight, bias, activation, residual, *options)
    if isinstance(max_seconds, bool) or not isinstance(max_seconds, numbers.Real) or not max_seconds > 0:
        raise ValueError(f"max_seconds must be a positive number; got {max_seconds!r}")
    path = None if file is None else Path(file)
    shape = tuple(map(operator.index, shape))
    end = time.monotonic() + as_float(max_seconds)
    results = []
    for place, problem in enumerate(problems):
        share = max(0.0, end - time.monotonic()) / (len(problems) - place)
        results.append(tune_problem(op, problem, shape, share, path))
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
    num_groups: Any = None,
    data_format: Any = "NC...",
    output_mask: Any = None,
) -> list[Problem | ChannelProblem]:
    """The problems that the arguments of `tune` mean, one for each direction."""
    if op == "gelu":
        raise ValueError("op is 'gelu', for which there is one plan: there is nothing to tune")
    for name, value, known in (("op", op, OPS), ("direction", direction, DIRECTIONS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"shape must be a sequence of ints; got {shape!r}") from None
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape is {sizes}; it must have a dimension, and none may be empty")
    dtypes = {
        "dtype": _dtype("dtype", dtype, None),
        "weight": _dtype("weight", weight, dtype),
        "bias": _dtype("bias", op != "rms_norm" if bias is None else bias, dtype),
    }
    assert dtypes["dtype"] is not None  # of None as of what is no dtype there was an error
    given = dtypes["weight"] is not None, dtypes["bias"] is not None
    mask = (True, *given) if output_mask is None else check_mask(output_mask)
    if not any(mask):
        raise ValueError("output_mask asks for nothing")
    if num_groups is not None and op != "group_norm":
        raise ValueError(f"num_groups is {num_groups!r}, and op is {op!r}; only group_norm has groups")
    masks = [None] * (direction != "backward") + [mask] * (direction != "forward")
    of_tensors = dtypes["dtype"], dtypes["weight"], dtypes["bias"]
    if op not in CHANNEL_NORMS:
        norm, axes = Norm(op == "layer_norm", activation=check_activation(activation)), check_axis(axis)
        return [contiguous_problem(norm, sizes, axes, *of_tensors, bool(residual), mask) for mask in masks]
    if residual or axis != -1:
        raise ValueError(f"op is {op!r}, which has no {'residual' if residual else 'axis'}")
    channel_norm = ChannelNorm.of(op, data_format, 1e-5, activation, num_groups)
    return [_contiguous_channel_problem(channel_norm, sizes, *of_tensors, mask) for mask in masks]


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
    op, x = RowNorm.of(axes, 1e-5, norm.activation, norm.centered, norm.weight_offset), _contiguous(shape, dtype)
    _, columns_shape, _ = check_x(x, op.axis)
    return _problem(op, x, x if residual else None, columns_shape, weight, bias, (), output_mask)  # type: ignore[return-value]


def _contiguous_channel_problem(
    op: ChannelNorm,
    shape: tuple[int, ...],
    dtype: str,
    weight: str | None,
    bias: str | None,
    output_mask: tuple[bool, bool, bool] | None,
) -> ChannelProblem:
    """The same for a norm of channels. Raises a ValueError for groups that the shape has not, or the like."""
    x = _contiguous(shape, dtype)
    channels = (shape[check_channels(x, op.data_format)],)
    moving = _contiguous(channels, "float32" if dtype != "float64" else dtype)
    running = (moving, moving) if op.name == "batch_norm" else ()
    return _problem(op, x, None, channels, weight, bias, running, output_mask)  # type: ignore[return-value]


def _problem(
    op: Op,
    x: View,
    residual: View | None,
    vector_shape: tuple[int, ...],
    weight: str | None,
    bias: str | None,
    running: tuple[View, ...],
    output_mask: tuple[bool, bool, bool] | None,
) -> AnyProblem:
    of_weight, of_bias = (None if of is None else _contiguous(vector_shape, of) for of in (weight, bias))
    mask = output_mask or (True, True, True)
    return Call(op, output_mask is not None, x, residual, of_weight, of_bias, running, False, mask).problem


def _contiguous(shape: tuple[int, ...], dtype: str) -> View:
    return View(0, shape, contiguous_strides(shape), dtype, NOWHERE)


def tune_problem(
    op: str,
    problem: Problem | ChannelProblem,
    shape: tuple[int, ...],
    max_seconds: float,
    path: Path | None = None,
    report: Report | None = None,
) -> TuneResult:
    """`tune` for one problem, that of an op of a tensor of ``shape``."""
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
        op=op,
        direction="forward" if isinstance(problem, (ForwardProblem, ChannelForward)) else "backward",
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
