"""``python -m cunorm explain``: the plan for a problem, without running it."""

from __future__ import annotations

import math
from typing import Any

from cunorm import launch
from cunorm.cli import UsageError, output
from cunorm.cli.gpus import KNOWN_GPUS, cuda_devices, measured_copy_rate
from cunorm.plan import Device, Launch, Plan, plan
from cunorm.problem import BackwardProblem, ForwardProblem, Norm, View, contiguous_strides
from cunorm.resources import compile_resources

__all__ = ["run"]


def run(
    op: str,
    shape: tuple[int, ...],
    dtype: str,
    axis: list[int],
    backward: bool,
    arch: str | None,
    activation: str | None,
    residual: bool,
) -> None:
    """Print the plan for C-contiguous tensors, with a weight of the same dtype, and a bias if it is a layer norm."""
    name, device, rate, rate_is = _target(arch)
    norm = Norm(op == "layer_norm", activation=activation)
    problem = _problem(norm, shape, dtype, _axes(axis, len(shape)), backward, residual)
    try:
        chosen = plan(problem, device)
    except ValueError as error:
        raise UsageError(f"--shape: {error}") from error

    op_name = f"{op}_backward" if backward else op
    output.line(f"{op_name} of {'x'.join(map(str, shape))} {dtype} on {name}", "bold")
    output.table(
        ("what", "value"),
        [
            ("seen as", f"{problem.rows} rows of {problem.columns} columns"),
            ("strategy", chosen.strategy),
            ("scratch memory", output.byte_count(chosen.workspace_bytes)),
            ("bytes that must move", f"{output.byte_count(problem.bytes_moved)} ({_moves(problem)})"),
            ("floor", f"{output.duration(problem.bytes_moved / rate)} at {output.rate(rate)}, {rate_is}"),
        ],
    )
    output.line()
    _print_launches(chosen, device)


def _target(arch: str | None) -> tuple[str, Device, float, str]:
    names, _ = cuda_devices()
    if names:
        device = launch.device(0)
        if arch in (None, device.arch):
            return f"{names[0]} ({device.arch})", device, measured_copy_rate(), "a copy's rate, just measured"
    gpu = KNOWN_GPUS.get(arch or "sm_90")
    if gpu is None:
        known = ", ".join(KNOWN_GPUS)
        raise UsageError(f"--arch {arch} is not known; it must be one of {known}, or that of this machine's GPU")
    where = "" if arch else ", for want of a CUDA device here"
    return f"{gpu.name} ({gpu.device.arch}){where}", gpu.device, gpu.rate, gpu.rate_is


def _axes(axis: list[int], dimensions: int) -> tuple[int, ...]:
    for item in axis:
        if not -dimensions <= item < dimensions:
            raise UsageError(f"--axis {item} is out of range for a shape of {dimensions} dimensions")
    axes = sorted(item % dimensions for item in axis)
    if len(set(axes)) < len(axes):
        raise UsageError(f"--axis {' '.join(map(str, axis))} names an axis twice")
    return tuple(axes)


def _problem(
    norm: Norm, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...], backward: bool, residual: bool
) -> ForwardProblem | BackwardProblem:
    x = View(0, shape, contiguous_strides(shape), dtype, ("cuda", 0))
    columns_shape = tuple(shape[i] for i in axes)
    weight = View(0, columns_shape, contiguous_strides(columns_shape), dtype, ("cuda", 0))
    bias = weight if norm.centered else None
    added = x if residual else None
    if backward:
        dbias = dtype if bias else None
        options: dict[str, Any] = {"axis": axes, "norm": norm, "bias": bias, "dresidual_out": added}
        return BackwardProblem.of(x, x, weight, x, dweight=dtype, dbias=dbias, **options)
    options = {"axis": axes, "norm": norm, "residual": added, "residual_out": added}
    return ForwardProblem.of(x, weight, bias, x, eps=1e-5, stats=False, **options)


def _moves(problem: ForwardProblem | BackwardProblem) -> str:
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
