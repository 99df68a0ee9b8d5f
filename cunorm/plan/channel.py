"""Instance, group and batch norm: which family of kernels computes them."""

from __future__ import annotations

from cunorm.plan import channel_grid, channel_slab, channel_split, rows_of_channels
from cunorm.plan.channel_cost import grid_cost, slab_cost, split_cost
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_slab import Slab
from cunorm.plan.launches import Builder, Device, Plan
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["plan_backward", "plan_forward"]


def plan_forward(problem: ChannelForward, device: Device) -> Plan:
    builder = Builder()
    if problem.samples * problem.channels == 0:
        return builder.finished("empty")
    # Given statistics leave nothing to be held on chip; nor is anything finished where they are all that is wanted.
    once = problem.y is not None and not (problem.running and problem.running.given)
    geometry: Slab | Grid | None = None
    if once:
        plan = rows_of_channels.plan_rows(problem, device)
        if plan is not None:
            return plan
        geometry = _on_chip(problem, device)
    if isinstance(geometry, Slab):
        return builder.finished(channel_slab.plan_forward(problem, geometry, builder))
    if isinstance(geometry, Grid):
        return builder.finished(channel_grid.plan_forward(problem, geometry, builder))
    return builder.finished(channel_split.plan_forward(problem, device, builder))


def plan_backward(problem: ChannelBackward, device: Device) -> Plan:
    builder = Builder()
    if problem.channels == 0 or (problem.dx is None and problem.dweight is None and problem.dbias is None):
        return builder.finished("empty")
    geometry: Slab | Grid | None = None
    if problem.dx is not None and not problem.given:
        plan = rows_of_channels.plan_rows(problem, device)
        if plan is not None:
            return plan
        geometry = _on_chip(problem, device)
    if isinstance(geometry, Slab):
        return builder.finished(channel_slab.plan_backward(problem, geometry, builder))
    if isinstance(geometry, Grid):
        return builder.finished(channel_grid.plan_backward(problem, geometry, builder))
    return builder.finished(channel_split.plan_backward(problem, device, builder))


def _on_chip(problem: ChannelProblem, device: Device) -> Slab | Grid | None:
    """The best way to hold slabs on chip; None where two passes over memory are expected to take less time."""
    best: Slab | Grid | None = None
    least = split_cost(problem, device)
    for slab in channel_slab.candidates(problem, device):
        cost = slab_cost(slab, problem, device)
        if cost < least:
            best, least = slab, cost
    for grid in channel_grid.candidates(problem, device):
        cost = grid_cost(grid, problem, device)
        if cost < least:
            best, least = grid, cost
    return best
