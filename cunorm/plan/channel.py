"""Instance, group and batch norm: which family of kernels computes them."""

from __future__ import annotations

from cunorm.plan import channel_slab, channel_split
from cunorm.plan.launches import Builder, Device, Plan
from cunorm.problem import ChannelBackward, ChannelForward

__all__ = ["plan_backward", "plan_forward"]


def plan_forward(problem: ChannelForward, device: Device) -> Plan:
    builder = Builder()
    if problem.samples * problem.channels == 0:
        return builder.finished("empty")
    slab = channel_slab.forward_geometry(problem, device)
    if slab is not None:
        return builder.finished(channel_slab.plan_forward(problem, slab, builder))
    return builder.finished(channel_split.plan_forward(problem, device, builder))


def plan_backward(problem: ChannelBackward, device: Device) -> Plan:
    builder = Builder()
    if problem.channels == 0 or (problem.dx is None and problem.dweight is None and problem.dbias is None):
        return builder.finished("empty")
    slab = channel_slab.backward_geometry(problem, device)
    if slab is not None:
        return builder.finished(channel_slab.plan_backward(problem, slab, builder))
    return builder.finished(channel_split.plan_backward(problem, device, builder))
