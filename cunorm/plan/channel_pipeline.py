"""Channel norms of many slabs along the channels that blocks share: all run together, and none waits for another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.channel_tiles import (
    Tiles,
    affine_constants,
    direction,
    running_arguments,
    running_constants,
    tile_lanes,
)
from cunorm.plan.column_sums import launch_sum
from cunorm.plan.constants import compute_itemsize
from cunorm.plan.launches import Builder, Constants, Device, Value
from cunorm.problem import DTYPES, ChannelForward, ChannelProblem

__all__ = ["ChannelPipeline", "candidates", "is_possible", "plan_forward"]

# The numbers are of an H200, as the time over that of a copy of the same bytes.

# A block's part of a slab. 8 x 512 x 64^2 float16 numbers in 32 groups take 1.36 in parts of 32 KB and 1.39 in such of
# 64; 8 x 320 x 64^2 1.48 in parts of 40 KB and over 1.59 in such of 20: for what blocks tell each other takes 6 to 9
# microseconds, however short the parts.
_LEAST_PART_BYTES = 30 << 10
# Parts that lie in shared memory. All but one may wait for what blocks tell each other: 8 x 256 x 32^3 float32 numbers
# take as long where four of six do as where five do, and 1.5 where three do.
_LEAST_AHEAD, _MOST_AHEAD = 3, 6
# Fewer were not measured but for 2, of 2 x 512 x 64^2 float16 numbers in 32 groups: 1.73, as slabs of clusters 1.59.
_LEAST_TURNS = 4
# Of these the one whose lanes have less left over. With weights of float64, of which a thread keeps up to 16, ptxas
# would spill registers of 512.
_THREADS, _THREADS_OF_DOUBLES = (512, 384), (384,)
# The loops over a thread's slots are unrolled.
_MOST_RESIDENT = 12
# Warps that tell, with SET_LANES lanes for each set.
_TELLING_WARPS = 2
# What a kernel declares of shared memory beside what is counted here.
_OTHER_STATIC_BYTES = 256


@dataclass(frozen=True)
class ChannelPipeline:
    """How slabs lie over blocks that all run at the same time (see kernels/channel_pipeline.cuh)."""

    tiles: Tiles
    resident: int  # vectors of a thread, of each slab
    blocks_per_slab: int
    groups: int  # of blocks_per_slab blocks, which take turns over the slabs
    points_per_block: int
    ahead: int  # slabs that lie in shared memory, or are on their way to it
    lag: int  # turns after which a slab is finished

    @property
    def block_threads(self) -> int:
        """Those that have slots, and the warps that tell, read and own."""
        return self.tiles.threads + 32 * (_TELLING_WARPS + 2)

    @property
    def parts_per_lane(self) -> int:
        """Blocks of a slab for each lane of the warp that merges them."""
        return -(-self.blocks_per_slab // 32)

    @property
    def part_bytes(self) -> int:
        """Slots for a block's part of a slab."""
        return self.resident * self.tiles.threads * 16

    @property
    def sum_rows(self) -> int:
        """How many threads, or warps where these have channels more than once, have sums of the same channels."""
        return self.tiles.threads // 32 if self.tiles.channel_lanes < 32 else self.tiles.point_lanes

    def turns(self, problem: ChannelProblem) -> int:
        return -(-self.tiles.count(problem) // self.groups)

    def sets(self, problem: ChannelProblem) -> int:
        """Sets of a slab."""
        return self.tiles.channels // problem.channels_per_set

    def set_lanes(self, problem: ChannelProblem) -> int:
        """A power of two of lanes, for as many sets as a slab has."""
        return min(32, 1 << (32 * _TELLING_WARPS // self.sets(problem)).bit_length() - 1)

    def words(self, problem: ChannelProblem) -> int:
        """Words of 8 bytes for the turns that are kept: three numbers a set of each block, and of its owner.

        There are places for as many blocks as lanes can collect.
        """
        numbers = 3 * compute_itemsize(problem) // 4
        return self.groups * (self.lag + 1) * self.sets(problem) * numbers * (32 * self.parts_per_lane + 1)

    def shared_bytes(self, problem: ChannelProblem) -> int:
        """Dynamic shared memory: slots, and for two turns three numbers of what vectors have of each set."""
        unit = math.gcd(self.tiles.width, problem.channels_per_set)
        sums = 2 * 3 * self.sum_rows * self.tiles.channels // unit
        return self.ahead * self.part_bytes + sums * compute_itemsize(problem)

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory: the statistics of two turns, and what rows of sums are of."""
        numbers = 2 * 3 * self.sets(problem) + 2 * self.sum_rows * self.tiles.channel_lanes
        return numbers * compute_itemsize(problem) + _OTHER_STATIC_BYTES

    def constants(self, problem: ChannelProblem) -> Constants:
        own: Constants = {
            "UNROLL": 1,
            "RESIDENT": self.resident,
            "AHEAD": self.ahead,
            "LAG": self.lag,
            "TELLING_WARPS": _TELLING_WARPS,
            "SET_LANES": self.set_lanes(problem),
            "PARTS_PER_LANE": self.parts_per_lane,
            "TILES": problem.channels // self.tiles.channels,
            "CHANNELS_PER_SET": problem.channels_per_set,
        }
        return self.tiles.constants(problem) | own


def is_possible(problem: ChannelProblem, device: Device) -> bool:
    """Whether the kernel is for a problem.

    It needs cp.async and mbarriers (sm_80), channels that are contiguous and vectors of 16 bytes of them, and points
    that are a single dimension. Of float64 ptxas would spill.
    """
    way, itemsize = direction(problem), DTYPES[problem.x.dtype].itemsize
    whole = way.along_channels and way.width * itemsize == 16 and len(problem.point_sizes) == 1
    some = problem.samples * problem.channels * problem.points > 0
    return isinstance(problem, ChannelForward) and device.capability >= 80 and itemsize < 8 and whole and some


def candidates(problem: ChannelProblem, device: Device) -> Iterator[ChannelPipeline]:
    """The ways to share the slabs of a problem. Every set of a slab has an owner among its blocks."""
    if not is_possible(problem, device):
        return
    way = direction(problem)
    doubles = any(vector is not None and vector.dtype == "float64" for vector in (problem.weight, problem.bias))
    every = (tile_lanes(problem, way, most) for most in (_THREADS_OF_DOUBLES if doubles else _THREADS))
    for lanes, threads in dict.fromkeys(itertools.chain(*every)):
        tiles = Tiles(way, lanes, threads, 1)
        sets, slabs = tiles.channels // problem.channels_per_set, tiles.count(problem)
        if problem.channels % tiles.channels or sets > 32 * _TELLING_WARPS:
            continue
        for groups in range(min(slabs // _LEAST_TURNS, device.multiprocessors // max(2, sets)), 0, -1):
            if -(-slabs // -(-slabs // groups)) < groups:
                continue  # as many turns as with fewer groups
            per_block = -(-problem.points // (device.multiprocessors // groups))
            blocks, resident = -(-problem.points // per_block), -(-per_block // tiles.point_lanes)
            pipeline = ChannelPipeline(tiles, resident, blocks, groups, per_block, 0, 0)
            part_bytes = pipeline.part_bytes
            if blocks < max(2, sets) or resident > _MOST_RESIDENT or part_bytes < _LEAST_PART_BYTES:
                continue
            taken = pipeline.static_bytes(problem) + pipeline.shared_bytes(problem)
            ahead = min((device.shared_bytes - taken) // part_bytes, _MOST_AHEAD)
            if ahead >= _LEAST_AHEAD:
                yield replace(pipeline, ahead=ahead, lag=ahead - 1)


def plan_forward(problem: ChannelForward, way: ChannelPipeline, builder: Builder) -> str:
    assert problem.y is not None
    # Words between blocks must be zeros: the sums of no rows.
    count = way.words(problem) * 8 // compute_itemsize(problem)
    words = builder.reserve("exchange", count, compute_itemsize(problem))
    launch_sum(builder, problem, [(0, words, DTYPES[problem.x.dtype].compute)], 0, count)
    strides: dict[str, Value] = {}
    for name, tensor in (("x", problem.x), ("y", problem.y)):
        strides |= {f"{name}_sample_stride": tensor.sample_stride, f"{name}_point_stride": tensor.point_strides[0]}
    builder.launch(
        "channel_pipeline_forward",
        way.constants(problem) | affine_constants(problem, way.tiles) | running_constants(problem),
        way.groups * way.blocks_per_slab,
        (way.block_threads, 1),
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem),
            "words": words,
            "slabs": way.tiles.count(problem),
            "channels": problem.channels,
            "points": problem.points,
            "blocks_per_slab": way.blocks_per_slab,
            "points_per_block": way.points_per_block,
            **strides,
            "eps": problem.eps,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )
    return "channel_pipeline"
