"""Every plan of an instance, group or batch norm keeps the rules of channel_plan_rules.py.

Slabs that a plan may choose are held to the same rules as those it does choose; plans by rows to the rules of rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import plan_rules
import pytest
from channel_plan_rules import (
    MOST_STATIC_BYTES,
    RULES,
    points_and_channels_are_covered,
    static_shared_bytes,
    the_workspace_is_modest,
)
from hypothesis import example, given
from plan_cases import DEVICES, channel_problems, devices, plain_channel_norm, plan_batch, plan_of, plan_rows, very_many

from cunorm.plan import Device, channel_grid, channel_pipeline, channel_slab, plan
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import ChannelForward, ChannelProblem, ChannelTensor, Vector


def _sets_of_many_channels_with_planes_of_two() -> ChannelForward:
    """By passes, whose tiles are not to grow with the sets."""
    samples, channels, planes, plane = 2, 4096, 2048, 2
    x = ChannelTensor("bfloat16", planes * channels * plane, plane, (channels * plane, 1))
    vector = Vector("bfloat16")
    return ChannelForward(samples, channels, (planes, plane), 2048, x, x, vector, vector, True, 1e-5, None)


def _few_numbers_for_all_blocks() -> ChannelForward:
    """Whose grid would have nearly as many words as numbers."""
    x = ChannelTensor("float16", 0, 1, (6,))
    return ChannelForward(1, 3, (1345,), 1, x, x, None, None, False, 1e-5, "relu")


@very_many
@example(problem=_few_numbers_for_all_blocks(), device=Device("sm_80", 108, 2048, (66, 30, 15, 7)))
@example(problem=_sets_of_many_channels_with_planes_of_two(), device=Device())
@given(problem=channel_problems(), device=devices)
def test_every_plan_keeps_the_rules(problem: ChannelProblem, device: Device) -> None:
    """Those of channels; and those of rows, where it is a plan of rows."""
    chosen = plan(problem, device)
    if not chosen.strategy.startswith("row_"):
        for rule in RULES:
            rule(problem, device, chosen)
        return
    rows = as_rows(problem)
    assert rows is not None and chosen == (plan_rows(problem, device) or plan_batch(problem, device))
    for rule_of_rows in plan_rules.RULES:
        rule_of_rows(rows, device, chosen)


SHAPES: list[tuple[tuple[int, int, int], int | None]] = [
    ((2, 32, 216), 1),
    ((4, 3, 49), 1),
    ((4, 40, 64), 10),
    ((8, 320, 256), 10),
    ((2, 512, 64), 16),
    ((64, 2048, 49), None),
    ((3, 6, 35), None),
    # That pipelines take, where the channels are last.
    ((8, 320, 4096), 10),
    ((4, 256, 32**3), 1),
]


def some(geometries: Sequence[Slab | Grid | ChannelPipeline]) -> Sequence[Slab | Grid | ChannelPipeline]:
    """Up to a few tens of them, of every kind: neighbours are alike."""
    return geometries[:: len(geometries) // 30 + 1]


@functools.cache
def every_geometry(problem: ChannelProblem, device: Device) -> tuple[Slab | Grid | ChannelPipeline, ...]:
    grids = [*channel_grid.candidates(problem, device), *channel_pipeline.candidates(problem, device)]
    assert len(grids) == len(set(grids))
    return (*some(list(dict.fromkeys(channel_slab.candidates(problem, device)))), *some(grids))


@pytest.mark.parametrize("device", ["sm_75", "sm_90", "few clusters"])
@pytest.mark.parametrize("last", [False, True], ids=["NC", "N...C"])
@pytest.mark.parametrize(("shape", "channels_per_set"), SHAPES, ids=str)
def test_every_slab_keeps_the_same_rules(
    shape: tuple[int, int, int], channels_per_set: int | None, last: bool, device: str
) -> None:
    for dtype in ("float16", "float32", "float64"):
        for problem in plain_channel_norm(shape, dtype, channels_per_set, last=last, activation="silu"):
            for slab in every_geometry(problem, DEVICES[device]):
                chosen = plan_of(slab, problem)
                for rule in RULES:
                    # Words between blocks are many beside a slab of few numbers, which is left to other kernels.
                    if rule is not the_workspace_is_modest or isinstance(slab, Slab):
                        rule(problem, DEVICES[device], chosen)
                item = next(item for item in chosen.launches if item.kernel.startswith("channel"))
                declared = static_shared_bytes(item, problem)
                assert declared <= slab.static_bytes(problem) <= MOST_STATIC_BYTES


@pytest.mark.parametrize("device", list(DEVICES))
def test_an_empty_batch_of_odd_planes_has_plans(device: str) -> None:
    for dtype, plane in itertools.product(("float16", "float32", "float64"), (33, 57, 149)):
        for problem in plain_channel_norm((0, 32, plane**2), dtype, None):
            points_and_channels_are_covered(problem, DEVICES[device], plan(problem, DEVICES[device]))
