"""Channel norms in any layout: sums over chunks of points, a small launch that merges them, and a last pass.

Forward reads x twice, backward x and dy; where the second pass finds them in the cache, that costs little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from cunorm.plan.cache_hints import is_kept_read_twice
from cunorm.plan.channel_tiles import (
    Direction,
    Tiles,
    affine_constants,
    along_planes,
    direction,
    least_lanes,
    pass_arguments,
)
from cunorm.plan.constants import compute_constants, gradient_constants
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import compute_itemsize
from cunorm.plan.running import running_pointers, running_types
from cunorm.plan.split_merge import launch_merge, merge_block
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem, ChannelTensor

__all__ = ["Split", "are_peeled", "direction_of_passes"]

# channel_split_statistics relies on it: what cancels in a squared deviation is bounded by the chunk's number of tiles.
_TILES_PER_CHUNK = 64
# A chunk has this many at least where there are as many, since each leaves partial sums.
_LEAST_TILES = 2
# A run of memory of fewer bytes than this is a warp's; several channels then share a block.
_SHORT_RUN_BYTES = 512
# Vectors lie along planes, wherever they can, in place of vectors of fewer bytes than this.
_SHORT_VECTOR_BYTES = 8
# Runs of fewer vectors are not peeled, of a batch, whose chunks have several, and others: too many of their numbers
# would go one by one. Of these a thread has so many at most.
_LEAST_VECTORS_OF_BATCH, _LEAST_VECTORS_OF_PEELED = 36, 4
_MOST_EDGES = 4
# Of short runs by themselves a thread has so few vectors that there are registers for more blocks.
_BLOCKS_OF_FEW = {1: 8, 2: 7, 3: 5}
_FEW_VECTORS = 3
# Lanes that planes take: about so many, but never more than a block has threads.
_PLANE_LANES = 64
_MOST_PLANE_LANES = 512


@dataclass(frozen=True)
class Split:
    """That numbers are read once for the statistics, or the sums, and once to be finished."""

    def plan(self, problem: ChannelProblem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ChannelForward):
            _plan_forward(problem, device, builder)
        else:
            _plan_backward(problem, device, builder)
        return "channel_split"


class _SixteenBit(NamedTuple):
    """What is different in a pass over sixteen-bit numbers of up to eight channels a vector, from sm_90 on."""

    unroll: int
    unroll_relu: int
    unroll_activated: int  # otherwise than by relu
    waves_activated: int


@dataclass(frozen=True)
class _Pass:
    """How a pass over memory is cut up."""

    threads: int  # of a block
    unroll: int  # vectors of a tensor that a thread has on their way
    min_blocks: int  # for so many on a multiprocessor the compiler is to leave registers
    waves: int  # chunks are such that there are about so many blocks for each that runs at a time
    activates: bool = True
    sixteen_bit: _SixteenBit | None = None  # of passes along the channels


# By whether vectors lie along the channels: there each block leaves sums for many channels, so there are as many blocks
# as run at a time. Where none are left, smaller chunks find more of what was read last in the cache: on an H200
# instance norm of 2 x 64 x 128^3 float32 numbers takes 0.97 of the time by 32 waves that it takes by 16, forward, and
# 0.98 backward. But along the channels the work at the beginning of each, for eight numbers, costs more under an
# activation: group norm of 1 x 256 x 512^2 float16 numbers under silu takes 0.94 by 4 waves forward, 0.96 by 2
# backward.
_STATISTICS = {False: _Pass(128, 8, 5, 6, False), True: _Pass(256, 4, 4, 1, False)}
_FORWARD = {False: _Pass(128, 8, 5, 32), True: _Pass(256, 8, 2, 32, sixteen_bit=_SixteenBit(6, 6, 4, 4))}
_GRADIENT_SUMS = {False: _Pass(128, 4, 5, 6), True: _Pass(256, 4, 2, 1, sixteen_bit=_SixteenBit(4, 3, 2, 1))}
_BACKWARD = {False: _Pass(128, 4, 5, 32), True: _Pass(256, 4, 2, 32, sixteen_bit=_SixteenBit(4, 3, 2, 2))}


@dataclass(frozen=True)
class _Layout:
    """A pass over a problem."""

    tiles: Tiles
    unroll: int
    edges: int  # of a thread, at most, where runs are peeled
    splits: int
    points_per_split: int

    @property
    def peeled(self) -> bool:
        return self.edges > 0

    def grid(self, problem: ChannelProblem) -> int:
        return self.tiles.count(problem) * self.splits

    def constants(self, problem: ChannelProblem) -> Constants:
        return self.tiles.constants(problem) | {"UNROLL": self.unroll, "PEELED": int(self.peeled), "EDGES": self.edges}

    def arguments(self, problem: ChannelProblem, **tensors: ChannelTensor) -> dict[str, Value]:
        """Sizes, of places where runs are peeled, and the strides of each tensor."""
        arguments = pass_arguments(problem, **tensors)
        if self.peeled:
            sizes = _places(problem, self.tiles.width)
            arguments |= {"points": math.prod(sizes), "point_sizes": sizes}
        own: dict[str, Value] = {"splits": self.splits, "points_per_split": self.points_per_split}
        return arguments | own | {"run_points": problem.point_sizes[-1] if self.peeled else 0}


def direction_of_passes(problem: ChannelProblem) -> Direction:
    way, planes = direction(problem), along_planes(problem)
    short = way.width * problem.itemsize < _SHORT_VECTOR_BYTES
    if planes is not None and short and least_lanes(planes, 1) <= _MOST_PLANE_LANES:
        return planes
    return Direction(False, 16 // problem.itemsize) if _can_be_peeled(problem, way.width) else way


def are_peeled(problem: ChannelProblem) -> bool:
    """Whether runs are cut into vectors of 16 bytes wherever they begin, where vectors would be shorter else."""
    way = direction_of_passes(problem)
    return not way.along_channels and way.width > direction(problem).width


def _can_be_peeled(problem: ChannelProblem, width: int) -> bool:
    """Whether vectors are longer where they are aligned wherever a run begins (see kernels/channel_split_tile.cuh).

    It must begin equally far from a multiple of 16 bytes in all tensors.
    """
    tensors, piece, run = problem.tensors, 16 // problem.itemsize, problem.point_sizes[-1]
    strides = {(tensor.sample_stride, tensor.channel_stride, tensor.point_strides) for tensor in tensors}
    alike = len(strides) == 1 and all(tensor.offset == 0 for tensor in tensors)
    contiguous = alike and tensors[0].point_strides[-1] == 1
    least = _LEAST_VECTORS_OF_PEELED if len(problem.point_sizes) == 1 else _LEAST_VECTORS_OF_BATCH
    return contiguous and width < piece and least * piece <= run < 2**31 - piece


def _places(problem: ChannelProblem, width: int) -> tuple[int, ...]:
    """The sizes of the points where those of the last dimension are places of the vectors around a run."""
    return *problem.point_sizes[:-1], -(-(problem.point_sizes[-1] + width - 1) // width) * width


def _layout(problem: ChannelProblem, device: Device, passes: dict[bool, _Pass]) -> _Layout:
    way, peeled = direction_of_passes(problem), are_peeled(problem)
    points = math.prod(_places(problem, way.width)) if peeled else problem.points
    of, lanes = _spread(problem, _pass(problem, device, passes[way.along_channels], peeled), way, peeled, points)
    tiles = Tiles(way, lanes, of.threads, 1 if problem.itemsize == 8 else of.min_blocks)
    if not peeled or not points or len(problem.point_sizes) == 1:
        return _cut(problem, device, of, tiles, peeled, points)
    # The last chunk of a few runs may be as good as empty, and its blocks take as long as others to wait for memory.
    unrolls = range(of.unroll, of.unroll // 2, -1)
    found = [_cut(problem, device, replace(of, unroll=unroll), tiles, peeled, points) for unroll in unrolls]
    return min(found, key=lambda each: max(1.1, each.splits * each.points_per_split / points))


def _pass(problem: ChannelProblem, device: Device, of: _Pass, peeled: bool) -> _Pass:
    """The pass with as much as there are registers for: with more, ptxas spills."""
    if problem.itemsize == 2 and of.activates:
        of = _of_sixteen_bit(of, problem.activation, device)
    # Where the vectors and edges of a batch's runs lie takes registers: with fewer, up to 72 bytes would spill.
    return replace(of, min_blocks=min(of.min_blocks, 4)) if peeled and len(problem.point_sizes) > 1 else of


def _of_sixteen_bit(of: _Pass, activation: str | None, device: Device) -> _Pass:
    own = of.sixteen_bit
    if device.capability < 90:
        return replace(of, unroll=of.unroll >> (1 if own is None or activation is None else 2))
    if own is None:
        # For sm_120, with eight vectors and two lanes of channels, 24 bytes would spill with registers for five blocks.
        many = device.capability >= 120 and activation is not None and of.unroll >= 8
        return replace(of, min_blocks=min(of.min_blocks, 4)) if many else of
    if activation is None or activation == "relu":
        return replace(of, unroll=own.unroll if activation is None else own.unroll_relu)
    return replace(of, unroll=own.unroll_activated, waves=own.waves_activated)


def _spread(problem: ChannelProblem, of: _Pass, way: Direction, peeled: bool, points: int) -> tuple[_Pass, int]:
    """How many lanes of channels a tile has; and the pass with as many threads, and vectors of each, as suits these."""
    along_channels, width, plane = way
    if plane > 1:
        step = least_lanes(way, 1)  # a set may go over several tiles
        lanes = min(step * max(1, _PLANE_LANES // step), problem.channels * plane // width)
        threads = -(-lanes * max(1, of.threads // lanes) // 32) * 32
        min_blocks = max(1, min(2, of.min_blocks) * of.threads // threads)
        return replace(of, threads=threads, min_blocks=min_blocks), lanes
    if along_channels:
        vectors = -(-problem.channels // width)
        # The fewer lanes are idle the better; then the more channels lie side by side, up to 128 bytes.
        return of, min((8, 4, 2, 1), key=lambda lanes: (-(-vectors // lanes) * lanes * max(1, 4 // lanes), -lanes))
    if peeled and len(problem.point_sizes) == 1:
        of = _of_one_run(of, points // width)
    point_lanes = min(of.threads, 1 << max(0, -(-points // (width * of.unroll)) - 1).bit_length())
    if problem.point_sizes[-1] * problem.itemsize < _SHORT_RUN_BYTES:
        point_lanes = min(point_lanes, 32)
    lanes = of.threads // point_lanes
    while lanes > 1 and lanes >= 2 * problem.channels:
        lanes //= 2
    return of, lanes


def _cut(problem: ChannelProblem, device: Device, of: _Pass, tiles: Tiles, peeled: bool, points: int) -> _Layout:
    """The points, or places, in chunks of tiles."""
    tile_points = tiles.point_lanes * tiles.point_vector * of.unroll
    count = max(1, -(-points // tile_points))
    wanted = of.waves * device.multiprocessors * min(of.min_blocks, device.threads_per_multiprocessor // of.threads)
    per_split = max(1, min(_TILES_PER_CHUNK, max(_LEAST_TILES, -(-count * tiles.count(problem) // wanted))))
    while peeled and per_split > 1 and _edges(problem, tiles, per_split * tile_points) > _MOST_EDGES:
        per_split -= 1
    splits = -(-count // per_split)
    per_split = -(-count // splits)
    edges = _edges(problem, tiles, per_split * tile_points) if peeled else 0
    return _Layout(tiles, of.unroll, edges, splits, per_split * tile_points)


def _of_one_run(of: _Pass, vectors: int) -> _Pass:
    """The pass over runs of so many vectors, each by itself: the shorter they are, the more blocks wait for memory."""
    unroll = -(-vectors // of.threads)
    if unroll > _FEW_VECTORS:
        return of
    return replace(of, unroll=unroll, min_blocks=_BLOCKS_OF_FEW[unroll])


def _edges(problem: ChannelProblem, tiles: Tiles, places: int) -> int:
    """How many edges a thread has of the runs that so many places reach into, at most."""
    *outer, of_run = _places(problem, tiles.width)
    runs = min(math.prod(outer), (places - 2) // of_run + 2)
    return -(-runs * 2 * tiles.width // tiles.point_lanes)


def _plan_forward(problem: ChannelForward, device: Device, builder: Builder) -> None:
    given = problem.given
    layout = _layout(problem, device, _FORWARD)
    itemsize = compute_itemsize(problem)
    statistics: dict[str, Value] = {"mean": "mean", "mean_remainder": 0, "rstd": "rstd"}
    if not given:
        if not problem.stats:
            statistics["mean"] = builder.reserve("set_mean", problem.sets, itemsize)
            statistics["rstd"] = builder.reserve("set_rstd", problem.sets, itemsize)
        statistics["mean_remainder"] = builder.reserve("mean_remainder", problem.sets, itemsize)
        _plan_statistics(problem, device, statistics, builder)
    elif not problem.stats:
        statistics = dict.fromkeys(statistics, 0)
    if problem.y is not None and (problem.points > 0 or given):
        builder.launch(
            "channel_split_forward",
            layout.constants(problem)
            | affine_constants(problem, layout.tiles)
            | {"GIVEN": int(given)}
            | _kept(problem, device)
            | running_types(problem.running if given else None),
            layout.grid(problem),
            layout.tiles.block,
            {
                **{name: name for name in ("x", "weight", "bias", "y")},
                **running_pointers(problem.running),
                **statistics,
                "channels_per_set": problem.channels_per_set,
                **layout.arguments(problem, x=problem.x, y=problem.y),
                "eps": problem.eps,
            },
        )


def _kept(problem: ChannelForward, device: Device) -> Constants:
    """Whether L2 is asked to keep x, which is read once where y is not wanted, or the statistics are given."""
    is_read_twice = problem.y is not None and not problem.given
    return {"KEPT_IN_L2": int(is_read_twice and is_kept_read_twice(problem, device))}


def _plan_statistics(problem: ChannelForward, device: Device, statistics: dict[str, Value], builder: Builder) -> None:
    """The launches that leave the statistics of every set, and update running ones."""
    layout = _layout(problem, device, _STATISTICS)
    splits = layout.splits if problem.points > 0 else 0
    wants_variance = problem.y is None
    # A set that is one chunk has its statistics at once; one without points what merging nothing gives.
    one_chunk = splits * problem.channels_per_set == 1 and problem.running is None and not wants_variance
    names = ["chunk_means", "chunk_deviations"] + ["chunk_counts"] * layout.peeled
    chunks: dict[str, Value] = {"chunk_means": 0, "chunk_deviations": 0, "chunk_counts": 0}
    if not one_chunk:
        count = problem.samples * splits * problem.channels
        chunks |= {name: builder.reserve(name, count, 8) for name in names}
    if splits > 0:
        builder.launch(
            "channel_split_statistics",
            layout.constants(problem) | {"ONE_CHUNK": int(one_chunk)} | _kept(problem, device),
            layout.grid(problem),
            layout.tiles.block,
            {
                "x": "x",
                **chunks,
                **(statistics if one_chunk else dict.fromkeys(statistics, 0)),
                **layout.arguments(problem, x=problem.x),
                "eps": problem.eps,
            },
        )
    if one_chunk:
        return
    launch_merge(builder, problem, chunks, statistics, splits, layout.points_per_split)


def _plan_backward(problem: ChannelBackward, device: Device, builder: Builder) -> None:
    layout = _layout(problem, device, _GRADIENT_SUMS)
    affine = affine_constants(problem, layout.tiles)
    splits = layout.splits if problem.points * problem.samples > 0 else 0
    inputs: dict[str, Value] = {name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd")}
    wants_sums = len(problem.sums) > 0
    wants_means = problem.dx is not None and not problem.given and splits > 0
    means: Value = 0
    if wants_means:
        means = builder.reserve("means", 2 * problem.sets, compute_itemsize(problem))
    if wants_means or wants_sums:
        count = problem.samples * splits * 2 * problem.channels
        sums = builder.reserve("sums", count, compute_itemsize(problem))
        if splits > 0:
            builder.launch(
                "channel_split_gradient_sums",
                layout.constants(problem) | affine,
                layout.grid(problem),
                layout.tiles.block,
                {
                    **inputs,
                    "sums": sums,
                    "channels_per_set": problem.channels_per_set,
                    **layout.arguments(problem, dy=problem.dy, x=problem.x),
                },
            )
        wanted_channels, sets = problem.channels * wants_sums, problem.sets * wants_means
        lanes, items = merge_block(splits * max(problem.samples * wants_sums, problem.channels_per_set * wants_means))
        builder.launch(
            "channel_split_gradient_merge",
            compute_constants(problem)
            | {"ITEM_LANES": lanes, "ITEMS_PER_BLOCK": items}
            | {name: affine[name] for name in ("HAS_WEIGHT", "WEIGHT_TYPE")}
            | gradient_constants(dweight=problem.dweight, dbias=problem.dbias),
            -(-(wanted_channels + sets) // items),
            (lanes, items),
            {
                "sums": sums,
                "weight": "weight",
                "means": means,
                **{name: name if name in problem.sums else 0 for name in ("dweight", "dbias")},
                "wanted_channels": wanted_channels,
                "sets": sets,
                "channels": problem.channels,
                "channels_per_set": problem.channels_per_set,
                "samples": problem.samples,
                "splits": splits,
                "points": problem.points,
            },
        )
    if problem.dx is not None and splits > 0:
        layout = _layout(problem, device, _BACKWARD)
        builder.launch(
            "channel_split_backward",
            layout.constants(problem) | affine | {"GIVEN": int(problem.given)},
            layout.grid(problem),
            layout.tiles.block,
            {
                **inputs,
                "means": means,
                "dx": "dx",
                "sets": problem.sets,
                "channels_per_set": problem.channels_per_set,
                **layout.arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx),
            },
        )
