"""Channel norms of slabs that several multiprocessors hold together: all blocks run at the same time and share them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cunorm.plan.channel_tiles import (
    Tiles,
    affine_constants,
    along_planes,
    direction,
    pass_arguments,
    running_arguments,
    running_constants,
    static_bytes,
    tile_lanes,
)
from cunorm.plan.column_sums import launch_sum
from cunorm.plan.constants import compute_itemsize
from cunorm.plan.launches import Builder, Constants, Device, Value
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["Grid", "candidates", "plan_backward", "plan_forward"]

_THREADS = 512
_MOST_SLOTS = 64
# What the runtime keeps of shared memory for each block.
_RESERVED_BYTES = 1024
_MOST_STATIC_BYTES = 48 * 1024


@dataclass(frozen=True)
class Grid:
    """How slabs lie over blocks (see kernels/channel_grid.cuh)."""

    tiles: Tiles
    groups: int  # of blocks_per_slab blocks, which take turns over the slabs
    blocks_per_slab: int
    points_per_block: int
    vectors: int  # of a thread, of a slab
    slots: int  # for them and for those of the next slab

    def turns(self, problem: ChannelProblem) -> int:
        return -(-self.tiles.count(problem) // self.groups)

    def numbers(self, problem: ChannelProblem) -> int:
        """Numbers that a block has for each set of channels."""
        return 3 if isinstance(problem, ChannelForward) else 2

    def words(self, problem: ChannelProblem) -> int:
        """Words of 8 bytes for two turns of every block, and the answers to every group."""
        per_block = self.numbers(problem) * self.sets(problem) * compute_itemsize(problem) // 4
        return 2 * (self.groups * self.blocks_per_slab + self.groups) * per_block

    def sets(self, problem: ChannelProblem) -> int:
        """Sets of a slab."""
        return self.tiles.channels // problem.channels_per_set

    def collected_bytes(self, problem: ChannelProblem) -> int:
        """What the owner of some sets collects of all blocks."""
        owned = -(-self.sets(problem) // self.blocks_per_slab)
        return owned * self.blocks_per_slab * self.numbers(problem) * compute_itemsize(problem)

    def shared_bytes(self, problem: ChannelProblem) -> int:
        """Dynamic shared memory: slots, and what is collected."""
        read = 1 if isinstance(problem, ChannelForward) else 2
        slots = read * self.slots * self.tiles.holders * self.tiles.width * DTYPES[problem.x.dtype].itemsize
        return slots + self.collected_bytes(problem)

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory itself."""
        numbers = self.numbers(problem)
        of_sets = (2 * numbers) * self.sets(problem)
        return static_bytes(problem, self.tiles, numbers * self.tiles.channels + of_sets)

    def constants(self, problem: ChannelProblem) -> Constants:
        parts = max(self.blocks_per_slab, problem.channels_per_set)
        own: Constants = {
            "UNROLL": 1,
            "VECTORS": self.vectors,
            "SLOTS": self.slots,
            "CHANNELS_PER_SET": problem.channels_per_set,
            "SET_LANES": min(32, 1 << max(1, parts // 2).bit_length() - 1),
        }
        return self.tiles.constants(problem) | own

    def arguments(self, problem: ChannelProblem, words: Value) -> dict[str, Value]:
        return {
            "words": words,
            "slabs": self.tiles.count(problem),
            "blocks_per_slab": self.blocks_per_slab,
            "points_per_block": self.points_per_block,
        }


def _tiles(problem: ChannelProblem) -> Iterator[Tiles]:
    """Those of one block for each multiprocessor, and of two."""
    ways = [direction(problem)]
    planes = along_planes(problem)
    # Under an activation ptxas would spill registers of eight numbers along planes.
    if planes is not None and (planes.width < 8 or problem.activation is None):
        ways.append(planes)
    for way, resident in itertools.product(ways, (1, 2)):
        for lanes, threads in tile_lanes(problem, way, _THREADS // resident):
            yield Tiles(way, lanes, threads, resident)


def candidates(problem: ChannelProblem, device: Device) -> Iterator[Grid]:
    """Every way to share the slabs of a problem between the multiprocessors."""
    if problem.points == 0 or problem.samples * problem.channels == 0 or device.capability < 80:
        return
    read = 1 if isinstance(problem, ChannelForward) else 2
    # In double ptxas would spill registers: backward for the derivative of an activation, forward where a whole block
    # sums one channel over points of several dimensions.
    double = problem.x.dtype == "float64"
    if double and read == 2 and problem.activation is not None:
        return
    for tiles in _tiles(problem):
        if double and read == 1 and tiles.channel_lanes == 1 and len(problem.point_sizes) > 1:
            continue
        resident = tiles.min_blocks
        multiprocessors = device.multiprocessors * resident
        shared_bytes = (device.shared_bytes + _RESERVED_BYTES) // resident - _RESERVED_BYTES
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
            grid = Grid(tiles, groups, blocks, per_block * tiles.point_vector, vectors, vectors)
            slot_bytes = read * tiles.holders * tiles.width * DTYPES[problem.x.dtype].itemsize
            free = shared_bytes - grid.static_bytes(problem) - grid.collected_bytes(problem)
            slots = min(free // slot_bytes, _MOST_SLOTS, 2 * vectors if turns > 1 else vectors)
            if slots < vectors or grid.static_bytes(problem) > _MOST_STATIC_BYTES:
                continue
            yield Grid(tiles, groups, blocks, per_block * tiles.point_vector, vectors, slots)


def _launch_words(problem: ChannelProblem, grid: Grid, builder: Builder) -> str:
    """Words between blocks, which must be zeros: the sums of no rows."""
    count = grid.words(problem) * 8 // compute_itemsize(problem)
    words = builder.reserve("exchange", count, compute_itemsize(problem))
    launch_sum(builder, problem, [(0, words, DTYPES[problem.x.dtype].compute)], 0, count)
    return words


def plan_forward(problem: ChannelForward, grid: Grid, builder: Builder) -> str:
    assert problem.y is not None
    words = _launch_words(problem, grid, builder)
    builder.launch(
        "channel_grid_forward",
        grid.constants(problem) | affine_constants(problem, grid.tiles) | running_constants(problem),
        grid.groups * grid.blocks_per_slab,
        grid.tiles.block,
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem),
            **grid.arguments(problem, words),
            **pass_arguments(problem, x=problem.x, y=problem.y),
            "eps": problem.eps,
        },
        grid.shared_bytes(problem),
        cooperative=True,
    )
    return "channel_grid"


def plan_backward(problem: ChannelBackward, grid: Grid, builder: Builder) -> str:
    assert problem.dx is not None
    words = _launch_words(problem, grid, builder)
    rows = problem.samples * grid.blocks_per_slab
    targets: dict[str, Value] = {}
    constants: Constants = {}
    sums = []
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        constants[f"WANTS_{name.upper()}"] = int(dtype is not None)
        targets[name] = 0
        if dtype is not None:
            partials = builder.reserve(f"{name}_sums", rows * problem.channels, compute_itemsize(problem))
            targets[name] = partials
            sums.append((partials, name, dtype))
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
        },
        grid.shared_bytes(problem),
        cooperative=True,
    )
    if sums:
        launch_sum(builder, problem, sums, rows, problem.channels)
    return "channel_grid"
