"""Channel norms of many slabs along the channels that blocks share: all run together, and none waits for another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.channel_tiles import (
    Direction,
    Tiles,
    affine_constants,
    direction,
    tile_lanes,
)
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.device import MOST_STATIC_BYTES, Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import compute_itemsize
from cunorm.plan.running import running_arguments, running_constants
from cunorm.plan.zeros import reserve_words
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem, ChannelTensor

__all__ = ["ChannelPipeline", "candidates", "is_possible", "units"]

# The numbers are of an H200, as the time over that of a copy of the same bytes.

# A block's part of a slab, of all tensors. 8 x 512 x 64^2 float16 numbers in 32 groups take 1.36 in parts of 32 KB and
# 1.39 in such of 64; 8 x 320 x 64^2 1.48 in parts of 40 KB and over 1.59 in such of 20: for what blocks tell each other
# takes 6 to 9 microseconds, however short the parts.
_LEAST_PART_BYTES = 30 << 10
# Parts that lie in shared memory. Some wait for what blocks tell each other, the others are on their way: two of five
# and of six, else one. With six, of which four wait or five, 8 x 256 x 32^3 float16 numbers take 1.37 and 1.47,
# 8 x 512 x 64^2 in 32 groups 1.26 and 1.28, under silu 1.43 and 1.48, and 1.48 if three wait. With five, of which two
# wait, three or four, 8 x 320 x 64^2 backward takes 1.87, 1.69 and 1.67, and 8 x 256 x 32^3 1.95, 1.70 and 1.75; with
# four, of which two wait or three, 8 x 320 x 64^2 forward 1.45 and 1.42.
_LEAST_AHEAD, _MOST_AHEAD = 3, 6
# Fewer were not measured but for 2, of 2 x 512 x 64^2 float16 numbers in 32 groups: 1.73, as slabs of clusters 1.59.
_LEAST_TURNS = 4
# Threads that have slots; `cost` chooses. With 512 ptxas would spill registers where a weight or bias is of float64, of
# which a thread keeps up to 16; backward of whole samples, where it keeps the sums of its channels; and backward where
# a vector is of many sets. Where the last two come together, 384 would spill too.
_THREADS, _FEWER_THREADS = (512, 384), (384,)
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
        """Slots for a block's part of a slab, of one tensor."""
        return self.resident * self.tiles.threads * 16

    def turns(self, problem: ChannelProblem) -> int:
        return -(-self.tiles.count(problem) // self.groups)

    def sets(self, problem: ChannelProblem) -> int:
        """Sets of a slab."""
        return self.tiles.channels // problem.channels_per_set

    def set_lanes(self, problem: ChannelProblem) -> int:
        """A power of two of lanes, for as many sets as a slab has."""
        return min(32, 1 << (32 * _TELLING_WARPS // self.sets(problem)).bit_length() - 1)

    def words(self, problem: ChannelProblem) -> int:
        """Words of 8 bytes for the turns that are kept: two for each set, of each block and of its owner.

        There are places for as many blocks as lanes can collect.
        """
        return self.groups * (self.lag + 1) * self.sets(problem) * 2 * (32 * self.parts_per_lane + 1)

    def whole(self, problem: ChannelProblem) -> bool:
        """Whether slabs are whole samples."""
        return self.tiles.channels == problem.channels

    def shared_bytes(self, problem: ChannelProblem) -> int:
        """Dynamic shared memory: slots, and for two turns a set's numbers of what vectors have of it.

        Backward, of each channel, where slabs are not whole samples.
        """
        by_sets = isinstance(problem, ChannelForward) or self.whole(problem)
        of_vector = units(problem, self.tiles.direction) if by_sets else self.tiles.width
        sums = 2 * _numbers(problem) * self.tiles.sum_rows * self.tiles.channel_lanes * of_vector
        return problem.tensors_read * self.ahead * self.part_bytes + sums * compute_itemsize(problem)

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory.

        Forward, the statistics of two turns, and what rows of sums are of. Backward, the means of two turns, the given
        statistics of those that wait, of two and of the next, weights, biases, and sums of the columns.
        """
        if isinstance(problem, ChannelForward):
            numbers = 2 * 3 * self.sets(problem) + 2 * self.tiles.sum_rows * self.tiles.channel_lanes
        else:
            numbers = 2 * self.sets(problem) * (2 + self.lag + 3)
            kept = (problem.weight is not None) + (problem.bias is not None) + (0 if self.whole(problem) else 2)
            numbers += kept * problem.channels
        return numbers * compute_itemsize(problem) + _OTHER_STATIC_BYTES

    def constants(self, problem: ChannelProblem) -> Constants:
        own: Constants = {
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

    def plan(self, problem: ChannelProblem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ChannelForward):
            _plan_forward(problem, self, builder)
        else:
            _plan_backward(problem, self, builder)
        return "channel_pipeline"


def _numbers(problem: ChannelProblem) -> int:
    """What blocks tell each other of a set."""
    return 3 if isinstance(problem, ChannelForward) else 2


def units(problem: ChannelProblem, way: Direction) -> int:
    """Of a vector (see kernels/channel_sets.cuh)."""
    return way.width // math.gcd(way.width, problem.channels_per_set)


def is_possible(problem: ChannelProblem, device: Device) -> bool:
    """Whether the kernels are for a problem.

    They need cp.async and mbarriers (sm_80), channels that are contiguous and vectors of 16 bytes of them, and points
    that are a single dimension, so near to each other that an int holds how far one of a thread's is from its next. Of
    float64 ptxas would spill.
    """
    way, itemsize = direction(problem), problem.itemsize
    whole = way.along_channels and way.width * itemsize == 16 and len(problem.point_sizes) == 1
    near = whole and all(max(_THREADS) * abs(tensor.point_strides[0]) < 2**31 for tensor in problem.tensors)
    some = problem.samples * problem.channels * problem.points > 0
    return device.capability >= 80 and itemsize < 8 and near and some


def candidates(problem: ChannelProblem, device: Device) -> Iterator[ChannelPipeline]:
    """The ways to share the slabs of a problem. Every set of a slab has an owner among its blocks."""
    if not is_possible(problem, device):
        return
    way = direction(problem)
    doubles = any(vector is not None and vector.dtype == "float64" for vector in (problem.weight, problem.bias))
    every = (tile_lanes(problem, way, most) for most in (_FEWER_THREADS if doubles else _THREADS))
    for lanes, threads in dict.fromkeys(itertools.chain(*every)):
        tiles = Tiles(way, lanes, threads, 1)
        sets, slabs = tiles.channels // problem.channels_per_set, tiles.count(problem)
        if problem.channels % tiles.channels or sets > 32 * _TELLING_WARPS:
            continue
        if isinstance(problem, ChannelBackward):
            whole = tiles.channels == problem.channels
            many = units(problem, way) > (4 if device.capability < 100 else 2)
            if (whole and many) or ((whole or many) and threads > max(_FEWER_THREADS)):
                continue
        for groups in range(min(slabs // _LEAST_TURNS, device.multiprocessors // max(2, sets)), 0, -1):
            if -(-slabs // -(-slabs // groups)) < groups:
                continue  # as many turns as with fewer groups
            per_block = -(-problem.points // (device.multiprocessors // groups))
            blocks, resident = -(-problem.points // per_block), -(-per_block // tiles.point_lanes)
            pipeline = ChannelPipeline(tiles, resident, blocks, groups, per_block, 0, _MOST_AHEAD - 2)
            part_bytes = problem.tensors_read * pipeline.part_bytes
            if blocks < max(2, sets) or resident > _MOST_RESIDENT or part_bytes < _LEAST_PART_BYTES:
                continue
            if pipeline.block_threads > device.threads_per_multiprocessor:
                continue
            static = pipeline.static_bytes(problem)
            ahead = min((device.shared_bytes - static - pipeline.shared_bytes(problem)) // part_bytes, _MOST_AHEAD)
            if ahead >= _LEAST_AHEAD and static <= MOST_STATIC_BYTES:
                yield replace(pipeline, ahead=ahead, lag=ahead - (2 if ahead >= 5 else 1))


def _arguments(problem: ChannelProblem, way: ChannelPipeline, **tensors: ChannelTensor) -> dict[str, Value]:
    """Sizes, and the strides of each tensor."""
    arguments: dict[str, Value] = {
        "slabs": way.tiles.count(problem),
        "channels": problem.channels,
        "points": problem.points,
        "blocks_per_slab": way.blocks_per_slab,
        "points_per_block": way.points_per_block,
    }
    for name, tensor in tensors.items():
        arguments |= {f"{name}_sample_stride": tensor.sample_stride, f"{name}_point_stride": tensor.point_strides[0]}
    return arguments


def _plan_forward(problem: ChannelForward, way: ChannelPipeline, builder: Builder) -> None:
    assert problem.y is not None
    words = reserve_words(builder, way.words(problem))
    builder.launch(
        "channel_pipeline_forward",
        way.constants(problem) | affine_constants(problem, way.tiles) | running_constants(problem.running),
        way.groups * way.blocks_per_slab,
        (way.block_threads, 1),
        {
            **words,
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem.running, problem.values_per_set),
            **_arguments(problem, way, x=problem.x, y=problem.y),
            "eps": problem.eps,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )


def _plan_backward(problem: ChannelBackward, way: ChannelPipeline, builder: Builder) -> None:
    assert problem.dx is not None
    words = reserve_words(builder, way.words(problem))
    rows = way.groups * way.blocks_per_slab
    targets, constants = column_sum_targets(builder, problem, rows)
    builder.launch(
        "channel_pipeline_backward",
        way.constants(problem) | affine_constants(problem, way.tiles) | constants,
        rows,
        (way.block_threads, 1),
        {
            **words,
            **{name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **_arguments(problem, way, dy=problem.dy, x=problem.x, dx=problem.dx),
        },
        way.shared_bytes(problem),
        cooperative=True,
    )
    launch_column_sums(builder, problem, targets, rows)
