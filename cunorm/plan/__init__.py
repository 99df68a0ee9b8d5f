"""How a problem is computed: which kernels, with which constants, grid and block. Pure; needs no GPU.

``plan(problem, device)`` picks a strategy and writes down its launches. Operands and scratch buffers are named; a
``Launch`` gives every field of its kernel's ``struct Arguments`` either a number or the name of a buffer. Each family
of kernels has its file here, which knows how they are launched and for what they are best. A ``geometry`` that somebody
has measured takes the place of the built-in choice wherever it fits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cunorm.plan import channel, channel_candidates, pointwise, row_candidates, rows
from cunorm.plan.channel import Way
from cunorm.plan.device import Device
from cunorm.plan.launches import Launch, Plan, Scratch
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.running import with_numbers_of
from cunorm.problem import (
    AnyProblem,
    ChannelBackward,
    ChannelForward,
    ChannelProblem,
    PointwiseBackward,
    PointwiseForward,
    Problem,
)

__all__ = ["Device", "Launch", "Plan", "RowBlock", "Scratch", "Way", "candidates", "fitted", "plan", "plan_with"]


@functools.lru_cache(maxsize=4096)
def plan(problem: AnyProblem, device: Device, geometry: Way | None = None) -> Plan:
    """The plan for a problem on a device: with the geometry, where one is given that can be `fitted` to the problem.

    Pointwise problems have one plan only. The momentum of running statistics, which may be another at every step of a
    training, is no reason to plan anew.
    """
    if isinstance(problem, (PointwiseForward, PointwiseBackward)):
        return pointwise.plan(problem, device)
    if isinstance(problem, ChannelForward) and problem.running is not None and not problem.given:
        running = problem.running
        if running.kept or running.taken:
            planned = plan(replace(problem, running=replace(running, kept=0.0, taken=0.0)), device, geometry)
            return with_numbers_of(running, problem.values_per_set, planned)
    return plan_with(problem, device, None if geometry is None else fitted(problem, device, geometry))


def candidates(problem: Problem | ChannelProblem, device: Device) -> Iterator[Way]:
    """Every geometry that is worth a try for a problem, for whoever measures."""
    if isinstance(problem, (ChannelForward, ChannelBackward)):
        return channel_candidates.candidates(problem, device)
    return row_candidates.candidates(problem, device)


def fitted(problem: Problem | ChannelProblem, device: Device, geometry: Way) -> Way | None:
    """A geometry that was found for another problem, for this one; None where it cannot compute it.

    What may change, for rows, is how many vectors a thread has; and of the blocks that share a multiprocessor there may
    be fewer, or where rows come in bulk as many as there is room for.
    """
    if isinstance(problem, (ChannelForward, ChannelBackward)):
        return geometry if geometry in channel_candidates.candidates(problem, device) else None
    if isinstance(geometry, RowBulk | RowBulkBackward):
        alike = (way for way in row_candidates.in_bulk(problem, device) if _layout(way) == _layout(geometry))
        return next(alike, None)
    if not isinstance(geometry, RowBlock):
        return None
    share = geometry.blocks_per_multiprocessor
    fits = [
        candidate
        for candidate in _in_blocks(problem, device)
        if candidate.blocks_per_multiprocessor <= share
        and (candidate.blocks_per_multiprocessor > 0) == (share > 0)
        and candidate.stage == geometry.stage  # most differ in it, and to tell is quick
        and replace(candidate, vectors=geometry.vectors, blocks_per_multiprocessor=share) == geometry
    ]
    return max(fits, key=lambda candidate: candidate.blocks_per_multiprocessor, default=None)


def _layout(geometry: RowBulk | RowBulkBackward) -> tuple[Any, ...]:
    """What does not follow from the problem."""
    follows = ("vectors", "min_blocks")
    return type(geometry), *(value for name, value in vars(geometry).items() if name not in follows)


@functools.lru_cache(maxsize=8)
def _in_blocks(problem: Problem, device: Device) -> tuple[RowBlock, ...]:
    """Kept: listing them takes tens of milliseconds, and a plan, its explanation and its tuning ask for the same."""
    return tuple(row_candidates.in_blocks(problem, device))


def plan_with(problem: Problem | ChannelProblem, device: Device, geometry: Way | None) -> Plan:
    """The plan with a geometry that is one of the `candidates`; None is for the built-in choice."""
    if isinstance(problem, (ChannelForward, ChannelBackward)):
        return channel.plan_with(problem, device, geometry)
    assert geometry is None or isinstance(geometry, RowBlock | RowBulk | RowBulkBackward)
    return rows.plan_with(problem, device, geometry)
