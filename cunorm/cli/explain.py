"""``python -m cunorm explain``: the plan for a problem, without running it."""

from __future__ import annotations

import math
from typing import NamedTuple

from cunorm.cli import UsageError, gpus, output
from cunorm.plan import Device, Launch, Plan, fitted, plan
from cunorm.problem import (
    ForwardProblem,
    Norm,
    PointwiseBackward,
    PointwiseForward,
    PointwiseProblem,
    Problem,
    View,
    contiguous_strides,
)
from cunorm.resources import compile_resources
from cunorm.tuning import contiguous_problem
from cunorm.tuning_file import Entry, entry_for

__all__ = ["run"]


def run(
    op: str,
    shape: tuple[int, ...],
    dtype: str,
    axis: list[int] | None,
    backward: bool,
    arch: str | None,
    activation: str | None,
    residual: bool,
    bias: bool,
) -> None:
    """Print the plan for C-contiguous tensors, of one dtype.

    A norm has a weight, and a layer norm a bias; a gelu has a bias where there is to be one.
    """
    target = _target(arch)
    device = target.device
    problem: Problem | PointwiseProblem
    tuned = None
    if op == "gelu":
        problem = _gelu_problem(shape, dtype, axis, backward, activation, residual, bias)
    else:
        problem = _norm_problem(op, shape, dtype, axis, backward, activation, residual, bias)
        tuned = entry_for(problem, 0) if target.is_here else None
    try:
        chosen = plan(problem, device, tuned.geometry if tuned else None)
    except ValueError as error:
        raise UsageError(f"--shape: {error}") from error

    op_name = f"{op}_backward" if backward else op
    output.line(f"{op_name} of {'x'.join(map(str, shape))} {dtype} on {target.title}", "bold")
    output.table(
        ("what", "value"),
        [
            ("seen as", f"{problem.rows} rows of {problem.columns} columns"),
            ("strategy", chosen.strategy),
            ("chosen", _chosen_by(tuned, problem, device)),
            ("scratch memory", output.byte_count(chosen.workspace_bytes)),
            ("bytes that must move", f"{output.byte_count(problem.bytes_moved)} ({_moves(problem)})"),
            ("floor", _floor(problem, target)),
        ],
    )
    output.line()
    _print_launches(chosen, device)


def _norm_problem(
    op: str,
    shape: tuple[int, ...],
    dtype: str,
    axis: list[int] | None,
    backward: bool,
    activation: str | None,
    residual: bool,
    bias: bool,
) -> Problem:
    if bias:
        raise UsageError("--bias is for gelu: a layer norm has one, an RMS norm has none")
    norm = Norm(op == "layer_norm", activation=activation)
    vectors = dtype, dtype if norm.centered else None
    mask = (True, True, norm.centered) if backward else None
    try:
        return contiguous_problem(norm, shape, tuple(axis or [-1]), dtype, *vectors, residual, mask)
    except ValueError as error:
        raise UsageError(f"--axis: {error}") from error


def _gelu_problem(
    shape: tuple[int, ...],
    dtype: str,
    axis: list[int] | None,
    backward: bool,
    activation: str | None,
    residual: bool,
    bias: bool,
) -> PointwiseProblem:
    if axis or residual:
        raise UsageError("--axis and --residual are for norms, not for gelu")
    if activation not in (None, "gelu", "gelu_tanh"):
        raise UsageError(f"--activation {activation} is not for gelu; it must be gelu or gelu_tanh")
    x = View(0, shape, contiguous_strides(shape), dtype, ("cuda", 0))
    vector = View(0, shape[-1:], (1,), dtype, ("cuda", 0)) if bias else None
    kind = activation or "gelu"
    if backward:
        return PointwiseBackward.of(x, x, vector, x, dbias=dtype if bias else None, activation=kind)
    return PointwiseForward.of(x, vector, x, activation=kind)


def _chosen_by(tuned: Entry | None, problem: Problem | PointwiseProblem, device: Device) -> str:
    if tuned is None or isinstance(problem, PointwiseForward | PointwiseBackward):
        return "built in"
    where = f"measured here on {'x'.join(map(str, tuned.shape))}"
    if tuned.geometry is None:
        return f"built in, the best of {tuned.tried} {where}"
    if fitted(problem, device, tuned.geometry) is None:
        return f"built in, since what is best of {tuned.tried} {where} does not do for this"
    return f"tuned: the best of {tuned.tried} {where}, {tuned.built_in_seconds / tuned.seconds:.2f}x the built-in speed"


class _Target(NamedTuple):
    """A GPU, what plans need of it, its copy rate (None if unknown) and where that is from, and whether it is here."""

    title: str
    device: Device
    rate: float | None
    rate_is: str
    is_here: bool


def _target(arch: str | None) -> _Target:
    local, reason = gpus.local_gpu()
    if local and arch in (None, local.device.arch):
        return _here(local)
    gpu = gpus.KNOWN_GPUS.get(arch or "sm_90")
    if gpu is None:
        known = ", ".join(gpus.KNOWN_GPUS)
        raise UsageError(f"--arch {arch} is not known; it must be one of {known}, or that of this machine's GPU")
    where = "" if arch else f", for want of a GPU here: {reason}"
    return _Target(f"{gpu.name} ({gpu.device.arch}){where}", gpu.device, gpu.rate, gpu.rate_is, False)


def _here(gpu: gpus.LocalGpu) -> _Target:
    title, device = f"{gpu.name} ({gpu.device.arch})", gpu.device
    try:
        return _Target(title, device, gpus.measured_copy_rate(), "a copy's rate, just measured", True)
    except (MemoryError, RuntimeError) as error:
        failure = f"no copy can be timed here ({error})"
    known = gpus.KNOWN_GPUS.get(device.arch)
    if known is None:
        return _Target(title, device, None, failure, True)
    return _Target(title, device, known.rate, f"{known.rate_is} of {known.name}, since {failure}", True)


def _floor(problem: Problem | PointwiseProblem, target: _Target) -> str:
    if target.rate is None:
        return f"unknown: {target.rate_is}"
    return f"{output.duration(problem.bytes_moved / target.rate)} at {output.rate(target.rate)}, {target.rate_is}"


def _moves(problem: Problem | PointwiseProblem) -> str:
    if isinstance(problem, PointwiseForward):
        return "x read, y written"
    if isinstance(problem, PointwiseBackward):
        return "x and dy read, dx written"
    if isinstance(problem, ForwardProblem):
        return "x and residual read, y and residual_out written" if problem.residual else "x read, y written"
    return "x, dy and dresidual_out read, dx written" if problem.dresidual_out else "x and dy read, dx written"


def _print_launches(chosen: Plan, device: Device) -> None:
    rows = []
    problem_with_compiler = ""
    for item in chosen.launches:
        try:
            resources = compile_resources(item.kernel, dict(item.constants), device.arch)
        except RuntimeError as error:
            problem_with_compiler = str(error)
            registers = spills = shared = "unknown"
        else:
            registers, spills = str(resources.registers), output.byte_count(resources.spill_bytes)
            shared = output.byte_count(resources.shared_bytes + item.shared_bytes)
        rows.append((item.kernel, str(item.grid), _block(item), registers, spills, shared))
    columns = ("kernel", "grid", "block", "registers", "spills", "shared memory")
    output.table(columns, rows, numbers=("grid", "registers", "spills", "shared memory"))
    if problem_with_compiler:
        output.line(f"Registers: unknown (needs CuPy's NVRTC): {problem_with_compiler}")
    output.line("Registers and spills are per thread, shared memory is per block.")
    output.line()
    output.line("Constants", "bold")
    for item in chosen.launches:
        output.line(f"{item.kernel}: " + " ".join(f"{name}={value}" for name, value in item.constants))


def _block(item: Launch) -> str:
    return f"{item.block[0]}x{item.block[1]} = {math.prod(item.block)}"
