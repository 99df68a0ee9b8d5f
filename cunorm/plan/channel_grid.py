"""Channel norms of slabs that several multiprocessors hold together: all blocks run at the same time and share them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.channel_tiles import (
    Tiles,
    affine_constants,
    along_planes,
    direction,
    pass_arguments,
    set_lanes,
    static_bytes,
    tile_lanes,
)
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.device import MOST_STATIC_BYTES, Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import compute_itemsize
from cunorm.plan.running import running_arguments, running_constants
from cunorm.plan.zeros import reserve_words
from cunorm.problem import GELUS, ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["Grid", "candidates"]

_THREADS = 512
_MOST_SLOTS = 64
# Slots that pass vectors through where they cannot all be held, by the number of tensors that are read.
_STREAMED = {1: 8, 2: 4}
# Vectors that a thread of 512 then has in registers, if it is to: for no more is there room.
_RESIDENT = {1: 8, 2: 4}
# channel_slab_statistics.cuh relies on it: what cancels in a squared deviation is bounded by that. The pivot is of
# vectors that are held.
_VECTORS_PER_PIVOT = 64


@dataclass(frozen=True)
class Grid:
    """How slabs lie over blocks (see kernels/channel_grid.cuh)."""

    tiles: Tiles
    groups: int  # of blocks_per_slab blocks, which take turns over the slabs
    blocks_per_slab: int
    points_per_block: int
    vectors: int  # of a thread, of a slab
    resident: int  # of them, in registers
    slots: int  # for the others and for those of the next slab
    held: int  # slots whose vectors stay; the others too, where there are no more vectors than slots

    def turns(self, problem: ChannelProblem) -> int:
        return -(-self.tiles.count(problem) // self.groups)

    @property
    def in_slots(self) -> int:
        return self.vectors - self.resident

    @property
    def rereads(self) -> int:
        """Vectors that come again to be finished."""
        return max(0, self.in_slots - self.slots)

    @property
    def pivot(self) -> int:
        """Vectors that give the pivot, forward: few, so that it is there before the others are."""
        return -(-self.vectors // _VECTORS_PER_PIVOT)

    def numbers(self, problem: ChannelProblem) -> int:
        """Numbers that a block has for each set of channels."""
        return 3 if isinstance(problem, ChannelForward) else 2

    def words(self, problem: ChannelProblem) -> int:
        """Words of 8 bytes for two turns of every block, and the answers to every group."""
        per_block = self.numbers(problem) * self.sets(problem) * compute_itemsize(problem) // 4
        return 2 * (self.groups * self.blocks_per_slab + self.groups) * per_block

    def is_worth_its_words(self, problem: ChannelProblem) -> bool:
        """Whether the words between its blocks are few beside the numbers."""
        return 8 * self.words(problem) <= problem.bytes_moved // 3

    def sets(self, problem: ChannelProblem) -> int:
        """Sets of a slab."""
        return self.tiles.channels // problem.channels_per_set

    def collected_bytes(self, problem: ChannelProblem) -> int:
        """What the owner of some sets collects of all blocks."""
        owned = -(-self.sets(problem) // self.blocks_per_slab)
        return owned * self.blocks_per_slab * self.numbers(problem) * compute_itemsize(problem)

    def shared_bytes(self, problem: ChannelProblem) -> int:
        """Dynamic shared memory: slots, and what is collected."""
        return self.slots * self.tiles.slot_bytes(problem) + self.collected_bytes(problem)

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory itself."""
        numbers, channels = self.numbers(problem), self.tiles.channels
        of_units = numbers * (channels // self.tiles.summed(problem))
        of_channels = (2 if isinstance(problem, ChannelForward) else 4) * channels
        return static_bytes(problem, self.tiles, of_units + of_channels + 2 * numbers * self.sets(problem))

    def constants(self, problem: ChannelProblem) -> Constants:
        parts = max(self.blocks_per_slab, problem.channels_per_set // self.tiles.summed(problem))
        own: Constants = {
            "RESIDENT": self.resident,
            "SLOTS": self.slots,
            "HELD": self.held,
            "IN_FLIGHT": self.slots,
            "CHANNELS_PER_SET": problem.channels_per_set,
            "SET_LANES": set_lanes(parts),
        }
        return self.tiles.constants(problem) | own

    def arguments(self, problem: ChannelProblem, words: dict[str, Value]) -> dict[str, Value]:
        return {
            **words,
            "slabs": self.tiles.count(problem),
            "blocks_per_slab": self.blocks_per_slab,
            "points_per_block": self.points_per_block,
            "vectors": self.in_slots,
        }

    def plan(self, problem: ChannelProblem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ChannelForward):
            _plan_forward(problem, self, builder)
        else:
            _plan_backward(problem, self, builder)
        return "channel_grid"


def _tiles(problem: ChannelProblem) -> Iterator[Tiles]:
    """Those of one block for each multiprocessor, and of two."""
    ways = [direction(problem)]
    planes = along_planes(problem)
    # Under an activation ptxas would spill registers of eight numbers along planes.
    if planes is not None and (planes.width < 8 or problem.activation is None):
        ways.append(planes)
    for way, share in itertools.product(ways, (1, 2)):
        for lanes, threads in tile_lanes(problem, way, _THREADS // share):
            yield Tiles(way, lanes, threads, share)


def candidates(problem: ChannelProblem, device: Device) -> Iterator[Grid]:
    """Every way to share the slabs of a problem between the multiprocessors."""
    if problem.points == 0 or problem.samples * problem.channels == 0 or device.capability < 80:
        return
    for tiles in _tiles(problem):
        if _would_spill(problem, tiles):
            continue
        share = tiles.min_blocks
        multiprocessors = device.multiprocessors * share
        shared_bytes = device.shared_bytes_of(share)
        point_vectors = -(-problem.points // tiles.point_vector)
        slabs = tiles.count(problem)
        for groups in range(min(slabs, multiprocessors // 2), 0, -1):
            turns = -(-slabs // groups)
            blocks = min(multiprocessors // groups, point_vectors)
            # As many turns as with fewer groups would leave blocks idle; a block alone shares nothing.
            if -(-slabs // turns) < groups or blocks < 2:
                continue
            per_block = -(-point_vectors // blocks)
            blocks = -(-point_vectors // per_block)
            vectors = -(-per_block // tiles.point_lanes)
            grid = Grid(tiles, groups, blocks, per_block * tiles.point_vector, vectors, 0, vectors, vectors)
            free = shared_bytes - grid.static_bytes(problem) - grid.collected_bytes(problem)
            room = min(free // tiles.slot_bytes(problem), _MOST_SLOTS)
            if grid.static_bytes(problem) > MOST_STATIC_BYTES:
                continue
            if room >= vectors:
                slots = min(room, 2 * vectors if turns > 1 else vectors)
                yield replace(grid, slots=slots, held=slots)
                continue
            yield from _larger_than_its_slots(grid, problem, room)


def _would_spill(problem: ChannelProblem, tiles: Tiles) -> bool:
    """Whether ptxas would spill registers.

    It would in double backward for the derivative of an activation, and forward along points of several dimensions; of
    sixteen bits backward for the derivative of a gelu, along channels.
    """
    double = problem.x.dtype == "float64"
    if isinstance(problem, ChannelForward):
        return double and not tiles.along_channels and len(problem.point_sizes) > 1
    if double:
        return problem.activation is not None
    return problem.activation in GELUS and tiles.along_channels and tiles.width == 8


def _larger_than_its_slots(grid: Grid, problem: ChannelProblem, room: int) -> Iterator[Grid]:
    """With so many slots, fewer than vectors: as it is, and with some in registers."""
    read = problem.tensors_read
    if grid.tiles.width * problem.itemsize < 16:
        return  # shorter vectors were not measured so
    for resident in (0, _RESIDENT[read]) if _has_registers(grid.tiles, problem) else (0,):
        with_registers = replace(grid, resident=resident)
        in_slots, held = with_registers.in_slots, room - _STREAMED[read]
        if room >= in_slots > 0:
            slots = min(room, 2 * in_slots if grid.turns(problem) > 1 else in_slots)
            yield replace(with_registers, slots=slots, held=slots)
        elif room < in_slots and 2 * held >= room and grid.vectors <= _VECTORS_PER_PIVOT * held:
            yield replace(with_registers, slots=room, held=held)


def _has_registers(tiles: Tiles, problem: ChannelProblem) -> bool:
    """Whether a thread has some to spare for vectors: elsewhere ptxas would spill, or it was not measured.

    Of sixteen bits forward, 4 x 64 x 64^3 numbers took 0.94 of the time with them on an H200, but 8 x 128 x 64^3 1.05,
    8 x 32 x 64^3 1.10, and batch norm of 64 x 256 x 56^2 1.06.
    """
    in_lanes = tiles.along_channels and tiles.direction.plane == 1 and tiles.channel_lanes in (4, 8, 16)
    plain = len(problem.point_sizes) == 1 and problem.channels_per_set == 1 and problem.activation is None
    return in_lanes and plain and tiles.min_blocks == 1 and problem.itemsize == 4


def _plan_forward(problem: ChannelForward, grid: Grid, builder: Builder) -> None:
    assert problem.y is not None
    words = reserve_words(builder, grid.words(problem))
    builder.launch(
        "channel_grid_forward",
        grid.constants(problem) | affine_constants(problem, grid.tiles) | running_constants(problem.running),
        grid.groups * grid.blocks_per_slab,
        grid.tiles.block,
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem.running, problem.values_per_set),
            **grid.arguments(problem, words),
            "pivot": grid.pivot,
            **pass_arguments(problem, x=problem.x, y=problem.y),
            "set_share": 1 / problem.values_per_set,
            "eps": problem.eps,
        },
        grid.shared_bytes(problem),
        cooperative=True,
    )


def _plan_backward(problem: ChannelBackward, grid: Grid, builder: Builder) -> None:
    assert problem.dx is not None
    words = reserve_words(builder, grid.words(problem))
    rows = problem.samples * (1 if problem.channels_per_set == 1 else grid.blocks_per_slab)
    targets, constants = column_sum_targets(builder, problem, rows)
    builder.launch(
        "channel_grid_backward",
        grid.constants(problem) | affine_constants(problem, grid.tiles) | constants,
        grid.groups * grid.blocks_per_slab,
        grid.tiles.block,
        {
            **{name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **grid.arguments(problem, words),
            **pass_arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx),
            "set_share": 1 / problem.values_per_set,
        },
        grid.shared_bytes(problem),
        cooperative=True,
    )
    launch_column_sums(builder, problem, targets, rows)
