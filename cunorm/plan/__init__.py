"""How a problem is computed: which kernels, with which constants, grid and block. Pure; needs no GPU.

``plan(problem, device)`` picks a strategy and writes down its launches. Operands and scratch buffers are named; a
``Launch`` gives every field of its kernel's ``struct Arguments`` either a number or the name of a buffer. Each family
of kernels has its file here, which knows how they are launched and for what they are best.
"""

from __future__ import annotations

import functools

from cunorm.plan import row_block, row_split
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.launches import Builder, Device, Launch, Plan, Scratch
from cunorm.problem import BackwardProblem, ForwardProblem

__all__ = ["Device", "Launch", "Plan", "Scratch", "plan"]


@functools.lru_cache(maxsize=4096)
def plan(problem: ForwardProblem | BackwardProblem, device: Device) -> Plan:
    """The plan for a problem on a device."""
    builder = Builder()
    if isinstance(problem, ForwardProblem):
        strategy = _plan_forward(problem, device, builder)
    else:
        strategy = _plan_backward(problem, device, builder)
    return builder.finished(strategy)


def _plan_forward(problem: ForwardProblem, device: Device, builder: Builder) -> str:
    geometry = row_block.forward_geometry(problem, device)
    if geometry is not None:
        return row_block.plan_forward(problem, geometry, device, builder)
    return row_split.plan_forward(problem, device, builder)


def _plan_backward(problem: BackwardProblem, device: Device, builder: Builder) -> str:
    if problem.dx is None and problem.dweight is None and problem.dbias is None:
        return "empty"
    if problem.rows == 0 or problem.columns == 0:
        targets, _ = column_sum_targets(builder, problem, 0)
        launch_column_sums(builder, problem, targets, 0)
        return "empty"
    geometry = row_block.backward_geometry(problem, device)
    if geometry is not None:
        return row_block.plan_backward(problem, geometry, device, builder)
    return row_split.plan_backward(problem, device, builder)
