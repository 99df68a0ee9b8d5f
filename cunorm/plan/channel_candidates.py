"""Every way to compute a channel norm that is worth a try, for whoever measures: `cunorm.tune` does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from cunorm.plan import channel_grid, channel_pipeline, channel_slab, rows_of_channels
from cunorm.plan.channel import Way, is_empty, moves_once
from cunorm.plan.channel_cost import cost
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.plan.device import Device
from cunorm.problem import ChannelProblem

__all__ = ["candidates"]


def candidates(problem: ChannelProblem, device: Device) -> Iterator[Way]:
    """All families by turns, each with what is expected to be fastest first; of rows, which have no costs, any."""
    if is_empty(problem) or not moves_once(problem):
        return
    held: list[Iterable[Slab | Grid | ChannelPipeline]] = [
        channel_slab.candidates(problem, device),
        (grid for grid in channel_grid.candidates(problem, device) if grid.is_worth_its_words(problem)),
        channel_pipeline.candidates(problem, device),
    ]
    by_cost = [sorted(family, key=lambda way: cost(way, problem, device)) for family in held]
    rows = list(rows_of_channels.candidates(problem, device))
    # Neighbours are alike: where the time is too short for all, some of every kind.
    random.Random(0).shuffle(rows)
    families: list[Sequence[Way]] = [[Split()], *by_cost, rows]
    for turn in itertools.zip_longest(*families):
        yield from (way for way in turn if way is not None)
