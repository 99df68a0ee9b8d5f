"""Channel norms of slabs, some channels of a sample with all their points, that a block or a cluster can hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cunorm.plan.cache_hints import is_kept_in_slabs
from cunorm.plan.channel_tiles import (
    Direction,
    Tiles,
    affine_constants,
    along_planes,
    direction,
    least_lanes,
    pass_arguments,
    set_lanes,
    static_bytes,
    tile_lanes,
)
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.device import MOST_STATIC_BYTES, REGISTERS, Device
from cunorm.plan.launches import Builder, Constants
from cunorm.plan.running import running_arguments, running_constants
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["Slab", "candidates"]

# Vectors of a thread.
_MOST_VECTORS = 64
# What a multiprocessor asks for ahead of what it sums: what the memory brings it in so many microseconds (48 KB on an
# H100), but of every thread a few vectors. Where it asks for more, threads cannot even ask for the last before the
# memory has brought most of the others, and sum nothing meanwhile. On an H100 group norm backward under silu of 2 x 512
# x 64^2 float16 numbers, channels last, takes 0.89 of the time so, of 1 x 512 x 64^2 0.93, instance norm of 2 x 128 x
# 32^3 0.93 forward and 0.97 backward. Half and twice as much take up to 4 % more. Where there are more blocks than run
# at once these ask by turns as it is: of 8 x 512 x 64^2 with 5 blocks a multiprocessor it would take 1.1.
_MICROSECONDS_IN_FLIGHT = 2.2
_LEAST_IN_FLIGHT = 4
# Registers that a thread is allowed: with so many no kernel spills.
_REGISTERS = 96
# Where x has no more bytes, vectors along the channels may be shorter than they could be: more threads then have a
# part, and each has fewer sums. On an H100 batch norm of 4 x 64 x 14^2 float16 numbers takes 6.0 us by such of 8 bytes,
# by 16 7.1, and backward of 2 x 32 x 6^3 5.6 and 7.3; instance norm of them 5.5 and 6.0, and 6.6 and 7.2. Of 800 KB the
# best of both take as long.
_MOST_BYTES_OF_SHORT = 1 << 20
_LEAST_VECTOR_BYTES = 4


class Waves(NamedTuple):
    """How blocks come to run on a device: as many at a time as it has room for."""

    number: int
    room: int  # blocks that run at the same time
    resident: int  # of them, on a multiprocessor
    busiest: int  # those that there are at a time on the multiprocessor that has the most


@dataclass(frozen=True)
class Slab:
    """How slabs lie over blocks (see kernels/channel_slab.cuh)."""

    tiles: Tiles
    blocks_per_slab: int
    points_per_block: int
    vectors: int  # of a thread

    def grid(self, problem: ChannelProblem) -> int:
        return self.tiles.count(problem) * self.blocks_per_slab

    def shared_bytes(self, problem: ChannelProblem) -> int:
        """Dynamic shared memory: a slot for every vector that is read."""
        return self.vectors * self.tiles.slot_bytes(problem)

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory itself."""
        channels = self.tiles.channels
        if isinstance(problem, ChannelForward):
            # Of units, then of sets, of which the last one is a variance, which running statistics take.
            numbers = (self.blocks_per_slab + 1) * 3 * (channels // self.tiles.summed(problem)) + 4 * channels
        else:
            # Those of blocks, with the weights; then of channels and sets.
            of_blocks = (self.blocks_per_slab + 1) * 2 + 1 if self.blocks_per_slab > 1 else 0
            numbers = (of_blocks + 2 + 2) * channels
        return static_bytes(problem, self.tiles, numbers)

    def waves(self, problem: ChannelProblem, device: Device, registers: int | None = None) -> Waves:
        """Where threads take so many registers; by default where they take as many as they may have."""
        grid, resident = self.grid(problem), max(1, self.resident(problem, device, registers))
        side_by_side = device.groups(self.blocks_per_slab) * self.blocks_per_slab  # each on a multiprocessor
        room = side_by_side * resident
        return Waves(-(-grid // room), room, resident, -(-min(grid, room) // side_by_side))

    def in_flight(self, problem: ChannelProblem, device: Device) -> int:
        """Vectors of a thread that are on their way before it sums the first."""
        waves = self.waves(problem, device)
        if device.capability < 80 or waves.number > 1:
            return self.vectors
        step_bytes = waves.busiest * self.shared_bytes(problem) // self.vectors
        some = round(_MICROSECONDS_IN_FLIGHT * device.memory_rate / step_bytes)
        return min(self.vectors, max(_LEAST_IN_FLIGHT, some))

    def constants(self, problem: ChannelProblem, device: Device) -> Constants:
        # How many threads merge what a set has, a number of each unit or channel: of every block, forward.
        parts = problem.channels_per_set // self.tiles.summed(problem)
        if isinstance(problem, ChannelForward):
            parts *= self.blocks_per_slab
        own: Constants = {
            "VECTORS": self.vectors,
            "SLOTS": self.vectors,
            "HELD": self.vectors,
            "IN_FLIGHT": self.in_flight(problem, device),
            "BLOCKS_PER_ROW": self.blocks_per_slab,
            "CHANNELS_PER_SET": problem.channels_per_set,
            "SET_LANES": set_lanes(parts),
        }
        return self.tiles.constants(problem) | own

    def resident(self, problem: ChannelProblem, device: Device, registers: int | None = None) -> int:
        """How many blocks share a multiprocessor."""
        shared_bytes = self.shared_bytes(problem) + self.static_bytes(problem)
        by_threads = self.tiles.min_blocks
        if registers is not None:
            by_threads = min(device.threads_per_multiprocessor, REGISTERS // registers) // self.tiles.threads
        return min(device.blocks_with(shared_bytes), by_threads)

    def plan(self, problem: ChannelProblem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ChannelForward):
            _plan_forward(problem, self, device, builder)
        else:
            _plan_backward(problem, self, device, builder)
        return "channel_slab"


def candidates(problem: ChannelProblem, device: Device) -> Iterator[Slab]:
    """Every way to lay the slabs of a problem over blocks."""
    if problem.points == 0 or problem.samples * problem.channels == 0:
        return
    for way, lanes, threads in _lanes(problem):
        by_threads = min(device.threads_per_multiprocessor, REGISTERS // _REGISTERS) // threads
        tiles = Tiles(way, lanes, threads, by_threads)
        for blocks in (1, 2, 4, 8, 16):
            if not device.groups(blocks):
                break
            point_vectors = -(-problem.points // tiles.point_vector)
            per_block = -(-point_vectors // blocks)
            vectors = -(-per_block // tiles.point_lanes)
            if vectors > _MOST_VECTORS or -(-point_vectors // per_block) < blocks:
                continue
            slab = Slab(tiles, blocks, per_block * tiles.point_vector, vectors)
            total = slab.shared_bytes(problem) + slab.static_bytes(problem)
            if total <= device.shared_bytes and slab.static_bytes(problem) <= MOST_STATIC_BYTES:
                yield slab


def _lanes(problem: ChannelProblem) -> Iterator[tuple[Direction, int, int]]:
    """How vectors of a tile may lie, its channel lanes, and its threads."""
    longest, planes = direction(problem), along_planes(problem)
    for way, most_threads in itertools.product((longest, planes), (128, 256, 384, 512)):
        if way is not None and (way.along_channels or most_threads & most_threads - 1 == 0):
            yield from ((way, *tile) for tile in tile_lanes(problem, way, most_threads))
    nbytes = problem.samples * problem.channels * problem.points * problem.itemsize
    if not longest.along_channels or nbytes > _MOST_BYTES_OF_SHORT:
        return
    for width, most_threads in itertools.product((longest.width // 2, longest.width // 4), (128, 256)):
        way = Direction(True, width)
        if width * problem.itemsize < _LEAST_VECTOR_BYTES:
            continue
        least = least_lanes(way, problem.channels_per_set)
        for lanes, threads in tile_lanes(problem, way, most_threads):
            times = lanes // least
            if times & times - 1 == 0:  # all would be many to look at
                yield way, lanes, threads


def _plan_forward(problem: ChannelForward, slab: Slab, device: Device, builder: Builder) -> None:
    assert problem.y is not None
    builder.launch(
        "channel_slab_forward",
        slab.constants(problem, device)
        | {"KEPT_IN_L2": int(is_kept_in_slabs(problem, device))}
        | affine_constants(problem, slab.tiles)
        | running_constants(problem.running),
        slab.grid(problem),
        slab.tiles.block,
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem.running, problem.values_per_set),
            "points_per_block": slab.points_per_block,
            **pass_arguments(problem, x=problem.x, y=problem.y),
            "set_share": 1 / problem.values_per_set,
            "eps": problem.eps,
        },
        slab.shared_bytes(problem),
        slab.blocks_per_slab,
    )


def _plan_backward(problem: ChannelBackward, slab: Slab, device: Device, builder: Builder) -> None:
    assert problem.dx is not None
    targets, constants = column_sum_targets(builder, problem, problem.samples)
    builder.launch(
        "channel_slab_backward",
        slab.constants(problem, device) | affine_constants(problem, slab.tiles) | constants,
        slab.grid(problem),
        slab.tiles.block,
        {
            **{name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            "points_per_block": slab.points_per_block,
            **pass_arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx),
            "set_share": 1 / problem.values_per_set,
        },
        slab.shared_bytes(problem),
        slab.blocks_per_slab,
    )
    launch_column_sums(builder, problem, targets, problem.samples)
