"""`cunorm.explain`: the plan of a call as an object, which a notebook draws and a terminal prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from cunorm import cuda, gpus
from cunorm.channel_norm import CHANNEL_NORMS, ChannelNorm
from cunorm.checks import check_channels, check_mask, check_running, check_x
from cunorm.explanation.call import Call, operand, seen
from cunorm.explanation.launches import LaunchExplanation, explained_launches
from cunorm.explanation.measure import measured
from cunorm.explanation.result import Explanation
from cunorm.plan import Device, fitted, plan
from cunorm.pointwise import Pointwise
from cunorm.prepare import chosen_plan
from cunorm.prepared import Op
from cunorm.problem import DTYPES
from cunorm.row_norm import RowNorm
from cunorm.tuning_file import Entry

__all__ = ["OPS", "Explanation", "LaunchExplanation", "explain"]

_ROW_NORMS = ("layer_norm", "rms_norm")
OPS = (*_ROW_NORMS, *CHANNEL_NORMS, "gelu")
# What not every op takes.
TAKEN_BY = {
    "axis": _ROW_NORMS,
    "residual": _ROW_NORMS,
    "num_groups": ("group_norm",),
    "data_format": CHANNEL_NORMS,
    "training": ("batch_norm",),
    "running": ("batch_norm",),
    "approximate": ("gelu",),
    **dict.fromkeys(("weight", "activation", "return_stats"), OPS[:-1]),
}


def explain(
    x: Any,
    op: str = "layer_norm",
    *,
    backward: bool = False,
    axis: int | Sequence[int] = -1,
    num_groups: int | None = None,
    data_format: str = "NC...",
    weight: Any = None,
    bias: Any = None,
    activation: str | None = None,
    approximate: str = "none",
    residual: Any = False,
    training: bool = True,
    running: bool | str | None = None,
    return_stats: bool = False,
    output_mask: tuple[bool, bool, bool] | None = None,
    arch: str | None = None,
    measure: bool | None = None,
) -> Explanation:
    """How a call would be computed: the kernels, what each block and thread has, and the time that it cannot beat.

    The plan is the one that a call with these tensors is executed with: for their strides and alignment, with what
    `tune` has found. Nothing is copied; without ``measure`` nothing is run.

    Parameters
    ----------
    x : tensor
        Of any framework; or anything with a shape and a dtype, which stands for a C-contiguous tensor.
    op : {"layer_norm", "rms_norm", "instance_norm", "group_norm", "batch_norm", "gelu"}
    backward : bool
        The gradient instead. dy is taken to lie in memory as y does.
    axis, num_groups, data_format, activation, approximate, training, return_stats
        As the op takes them.
    weight, bias, residual : tensor, bool or str, optional
        A tensor; or whether there is one, or its dtype, if that is not x's. By default norms have both weight and bias,
        but RMS norm only a weight, and gelu none.
    running : bool or str, optional
        Whether a batch norm has running statistics, and their dtype; by default it has, of the weight's dtype.
    output_mask : tuple of three bools, optional
        Backward: which of dx, dweight, dbias are computed; by default those of what there is.
    arch : str, optional
        Plan for another GPU, such as "sm_80". By default it is x's, else this machine's, and without one an H200.
    measure : bool, optional
        Time the call, and a copy. By default where x is on a GPU and the plan is for that.

    Returns
    -------
    explanation : Explanation
        Its attributes have all the numbers; ``print`` shows them, a notebook draws them, and ``svg()`` is the drawing.

    Raises
    ------
    ValueError
        For an op, arch, shape, axis or option that there is not, and options of another op.
    TypeError
        For dtypes and tensor types that are not supported, and for a group norm without num_groups.
    RuntimeError
        With ``measure=True`` where there is no GPU, or no room on it.

    Examples
    --------
    >>> import numpy as np
    >>> explanation = cunorm.explain(np.zeros((4096, 8192), np.float16), arch="sm_90")
    >>> explanation.strategy, explanation.bytes_moved, explanation.launches[0].kernel
    ('row_block', 134217728, 'row_block_forward')
    >>> cunorm.explain(np.zeros((2, 64, 32, 32), np.float16), "group_norm", num_groups=8, arch="sm_90").area
    (16, 8192)
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPS)}")
    given = locals()
    for name, ops_with in TAKEN_BY.items():
        default = (explain.__kwdefaults__ or {})[name]
        if op not in ops_with and not (isinstance(given[name], type(default)) and given[name] == default):
            raise ValueError(f"{name} is {given[name]!r}; it is for {', '.join(ops_with)}, not for {op}")
    if op == "group_norm" and num_groups is None:
        raise TypeError("group_norm needs num_groups")
    view, place = seen(x, "x")
    if measure:
        gpus.check_usable("measure=True", place or 0)
    the_op: Op
    if op in _ROW_NORMS:
        the_op = RowNorm.of(axis, 1e-5 if op == "layer_norm" else 1e-6, activation, op == "layer_norm")
        _, vector_shape, _ = check_x(view, the_op.axis)
    elif op == "gelu":
        the_op = Pointwise.of(approximate)
        vector_shape = view.shape[-1:]
    else:
        the_op = ChannelNorm.of(op, data_format, 1e-5, activation, num_groups, training)
        vector_shape = (view.shape[check_channels(view, the_op.data_format)],)
    weight_view = operand(weight, "weight", op != "gelu", vector_shape, view.dtype)
    bias_view = operand(bias, "bias", op not in ("rms_norm", "gelu"), vector_shape, view.dtype)
    residual_view = operand(residual, "residual", False, view.shape, view.dtype)
    statistics_dtype = weight_view.dtype if weight_view else DTYPES[view.dtype].compute if view.dtype in DTYPES else ""
    running_view = operand(running, "running", op == "batch_norm", vector_shape, statistics_dtype)
    if op == "batch_norm":
        check_running(running_view, running_view, training)
    call = Call(
        the_op,
        backward,
        view,
        residual_view,
        weight_view,
        bias_view,
        (running_view, running_view) if running_view else (),
        return_stats,
        (True, weight_view is not None, bias_view is not None) if output_mask is None else check_mask(output_mask),
    )
    return _explained(call, f"{op}_backward" if backward else op, _target(arch, place), place, measure)


# ---- The GPU.


class _Target(NamedTuple):
    """A GPU, what plans need of it, its copy rate (None if unknown) and where that is from; its index if it is here."""

    title: str
    device: Device
    rate: float | None
    rate_is: str
    place: int | None


def _target(arch: str | None, place: int | None) -> _Target:
    local, reason = gpus.local_gpu(place or 0)
    if local and arch in (None, local.device.arch):
        return _here(local, place or 0)
    gpu = gpus.KNOWN_GPUS.get(arch or "sm_90")
    if gpu is None:
        known = ", ".join(gpus.KNOWN_GPUS)
        raise ValueError(f"arch is {arch!r}; it must be one of {known}, or that of this machine's GPU")
    where = "" if arch else f", for want of a GPU here: {reason}"
    return _Target(f"{gpu.name} ({gpu.device.arch}){where}", gpu.device, gpu.rate, gpu.rate_is, None)


def _here(local: gpus.LocalGpu, index: int) -> _Target:
    title, device = f"{local.name} ({local.device.arch})", local.device
    try:
        return _Target(title, device, gpus.measured_copy_rate(index), "a copy's rate, just measured", index)
    except (MemoryError, RuntimeError) as error:
        failure = f"no copy can be timed here ({error})"
    known = gpus.KNOWN_GPUS.get(device.arch)
    if known is None:
        return _Target(title, device, None, failure, index)
    return _Target(title, device, known.rate, f"{known.rate_is} of {known.name}, since {failure}", index)


# ---- What is said of a plan.


def _explained(call: Call, op: str, target: _Target, place: int | None, measure: bool | None) -> Explanation:
    problem = call.problem
    if target.place is None:
        chosen, tuned = plan(problem, target.device), None
    else:
        chosen, tuned = chosen_plan(problem, target.place)
    launches, compiler = explained_launches(chosen, problem, target.device)
    explanation = Explanation(
        op=op,
        shape=call.x.shape,
        dtype=call.x.dtype,
        problem=problem,
        title=target.title,
        device=target.device,
        plan=chosen,
        chosen=_chosen_by(tuned, problem, target.device),
        copy_rate=target.rate,
        copy_rate_is=target.rate_is,
        launches=launches,
        compiler=compiler,
    )
    if measure is False or (measure is None and (place is None or place != target.place)):
        return explanation
    if target.place is None:
        raise RuntimeError(f"the call cannot be timed: {target.title} is not a GPU of this machine")
    x_pointer = 0 if place is None else call.x.pointer
    try:
        seconds, copy_seconds = measured(call, target.place, x_pointer, problem.bytes_moved)
    except (MemoryError, RuntimeError) as error:
        if measure:
            raise RuntimeError(f"the call cannot be timed: {error}") from error
        return dataclasses.replace(explanation, failure=str(error))
    finally:
        cuda.cupy().get_default_memory_pool().free_all_blocks()  # which other libraries may need
    return dataclasses.replace(explanation, seconds=seconds, copy_seconds=copy_seconds)


def _chosen_by(tuned: Entry | None, problem: Any, device: Device) -> str:
    if tuned is None:
        return "built in"
    where = f"measured here on {'x'.join(map(str, tuned.shape))}"
    if tuned.geometry is None:
        return f"built in, the best of {tuned.tried} {where}"
    if fitted(problem, device, tuned.geometry) is None:
        return f"built in, since what is best of {tuned.tried} {where} does not do for this"
    return f"tuned: the best of {tuned.tried} {where}, {tuned.built_in_seconds / tuned.seconds:.2f}x the built-in speed"
