"""Instance, group and batch norm in any layout: sums over chunks of points, a small launch that merges them, a last pass.

Forward reads x twice, backward x and dy; where the second pass finds them in the cache, that costs little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cunorm.plan.constants import compute_itemsize, dtype_constants, vector_constants
from cunorm.plan.launches import Builder, Constants, Device, Plan, Value
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, ChannelProblem, ChannelTensor, Vector

__all__ = ["plan_backward", "plan_forward"]

# channel_statistics relies on it: what cancels in a chunk's squared deviation is bounded by its number of tiles.
_TILES_PER_CHUNK = 64
# A chunk has this many at least where there are as many, since each leaves partial sums.
_LEAST_TILES = 2
# A run of memory of fewer bytes than this is a warp's; several channels then share a block.
_SHORT_RUN_BYTES = 512
# Threads of channel_merge and channel_gradient_merge.
_MERGE_THREADS = 128


@dataclass(frozen=True)
class _Layout:
    """How samples, channels and points lie over blocks and threads (see kernels/channel_tile.cuh)."""

    width: int
    along_channels: bool
    channel_lanes: int
    threads: int
    unroll: int
    min_blocks: int
    splits: int = 1
    tiles_per_split: int = 1

    @property
    def channel_vector(self) -> int:
        return self.width if self.along_channels else 1

    @property
    def tile_points(self) -> int:
        return self.threads // self.channel_lanes * (1 if self.along_channels else self.width) * self.unroll

    @property
    def points_per_split(self) -> int:
        return self.tiles_per_split * self.tile_points

    @property
    def block(self) -> tuple[int, int]:
        if self.along_channels:
            return self.threads, 1
        return self.threads // self.channel_lanes, self.channel_lanes

    def grid(self, problem: ChannelProblem) -> int:
        return problem.samples * self.splits * -(-problem.channels // (self.channel_lanes * self.channel_vector))

    def constants(self, problem: ChannelProblem) -> Constants:
        own: Constants = {
            "THREADS": self.threads,
            "MIN_BLOCKS": self.min_blocks,
            "VECTOR": self.width,
            "ALONG_CHANNELS": int(self.along_channels),
            "CHANNEL_LANES": self.channel_lanes,
            "UNROLL": self.unroll,
            "POINT_DIMS": len(problem.point_sizes),
        }
        return dtype_constants(problem) | own

    def arguments(self, problem: ChannelProblem, **tensors: ChannelTensor | None) -> dict[str, Value]:
        """Sizes, and the strides of each tensor."""
        arguments: dict[str, Value] = {
            "channels": problem.channels,
            "channels_per_set": problem.channels_per_set,
            "points": problem.points,
            "splits": self.splits,
            "points_per_split": self.points_per_split,
            "point_sizes": problem.point_sizes,
        }
        for name, tensor in tensors.items():
            assert tensor is not None
            arguments[f"{name}_sample_stride"] = tensor.sample_stride
            arguments[f"{name}_channel_stride"] = tensor.channel_stride
            arguments[f"{name}_point_strides"] = tensor.point_strides
        return arguments


def _width(problem: ChannelProblem, along_channels: bool) -> int:
    """Elements that a thread moves at once, if they lie along the channels or along the points."""
    itemsize = DTYPES[problem.x.dtype].itemsize
    strides: list[int] = []
    for tensor in problem.tensors:
        along = tensor.channel_stride if along_channels else tensor.point_strides[-1]
        others = tensor.point_strides if along_channels else (tensor.channel_stride, *tensor.point_strides[:-1])
        size = problem.channels if along_channels else problem.point_sizes[-1]
        if along != 1 and size > 1:
            return 1
        strides += (tensor.sample_stride, *others, size)
    elements = math.gcd(16 // itemsize, *strides)
    return max(1, min([elements] + [tensor.alignment // itemsize for tensor in problem.tensors]))


@dataclass(frozen=True)
class _Pass:
    """How a pass over memory is cut up."""

    threads: int  # of a block
    unroll: int  # vectors of a tensor that a thread has on their way
    min_blocks: int  # for so many on a multiprocessor the compiler is to leave registers
    waves: int  # chunks are such that there are about so many blocks for each that runs at a time


_STATISTICS = _Pass(256, 4, 4, 2)
_FORWARD = _Pass(256, 4, 4, 2)
_GRADIENT_SUMS = _Pass(256, 2, 3, 2)
_BACKWARD = _Pass(256, 2, 3, 2)


def _layout(problem: ChannelProblem, device: Device, of: _Pass) -> _Layout:
    itemsize = DTYPES[problem.x.dtype].itemsize
    by_points, by_channels = _width(problem, False), _width(problem, True)
    x = problem.x
    across = x.channel_stride == 1 and (x.point_strides[-1] != 1 or problem.points == 1)
    along_channels = by_channels > by_points or (by_channels == by_points and across)
    if along_channels:
        width = by_channels
        vectors = -(-problem.channels // width)
        # The fewer lanes are idle the better; then the more channels lie side by side.
        lanes = min((32, 16, 8, 4, 2, 1), key=lambda lanes: (-(-vectors // lanes) * lanes * max(1, 4 // lanes), -lanes))
    else:
        width = by_points
        run = problem.point_sizes[-1] * itemsize
        point_lanes = min(of.threads, 1 << max(0, -(-problem.points // (width * of.unroll)) - 1).bit_length())
        if run < _SHORT_RUN_BYTES:
            point_lanes = min(point_lanes, 32)
        lanes = of.threads // point_lanes
        while lanes > 1 and lanes >= 2 * problem.channels:
            lanes //= 2
    min_blocks = 1 if itemsize == 8 else of.min_blocks
    layout = _Layout(width, along_channels, lanes, of.threads, of.unroll, min_blocks)
    tiles = max(1, -(-problem.points // layout.tile_points))
    blocks = tiles * layout.grid(problem)
    wanted = of.waves * device.multiprocessors * min(1024, device.threads_per_multiprocessor) // of.threads
    tiles_per_split = max(1, min(_TILES_PER_CHUNK, max(_LEAST_TILES, blocks // wanted)))
    splits = -(-tiles // tiles_per_split)
    return replace(layout, splits=splits, tiles_per_split=-(-tiles // splits))


def _affine_constants(
    weight: Vector | None, bias: Vector | None, activation: str | None, layout: _Layout
) -> Constants:
    constants: Constants = {"CENTERED": 1, "WEIGHT_OFFSET": 0, "ACTIVATION": activation or "none"}
    width = layout.channel_vector
    return constants | vector_constants("WEIGHT", weight, width) | vector_constants("BIAS", bias, width)


def _running_types(problem: ChannelForward) -> Constants:
    running = problem.running
    return {
        "RUNNING_MEAN_TYPE": DTYPES[running.mean.dtype].cuda if running else "float",
        "RUNNING_VARIANCE_TYPE": DTYPES[running.variance.dtype].cuda if running else "float",
    }


def _merge_block(parts: int) -> tuple[int, int]:
    """How many threads add up so many parts, and how many do so in a block."""
    lanes = 1 if parts <= 4 else 32
    return lanes, _MERGE_THREADS // lanes


def plan_forward(problem: ChannelForward, device: Device) -> Plan:
    builder = Builder()
    if problem.samples * problem.channels == 0:
        return builder.finished("empty")
    given = problem.running is not None and problem.running.given
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
            "channel_forward",
            layout.constants(problem)
            | _affine_constants(problem.weight, problem.bias, problem.activation, layout)
            | {"GIVEN": int(given)}
            | _running_types(problem),
            layout.grid(problem),
            layout.block,
            {
                **{name: name for name in ("x", "weight", "bias", "y")},
                **dict.fromkeys(("running_mean", "running_var"), 0),
                **({name: name for name in ("running_mean", "running_var")} if given else {}),
                **statistics,
                **layout.arguments(problem, x=problem.x, y=problem.y),
                "eps": problem.eps,
            },
        )
    return builder.finished("channel")


def _plan_statistics(
    problem: ChannelForward, device: Device, statistics: dict[str, Value], builder: Builder
) -> None:
    """The launches that leave the statistics of every set, and update running ones."""
    layout = _layout(problem, device, _STATISTICS)
    splits = layout.splits if problem.points > 0 else 0
    wants_variance = problem.y is None
    # A set that is one chunk has its statistics at once; one without points what merging nothing gives.
    one_chunk = splits * problem.channels_per_set == 1 and problem.running is None and not wants_variance
    chunks: dict[str, Value] = {"chunk_means": 0, "chunk_deviations": 0}
    if not one_chunk:
        chunks = {name: builder.reserve(name, problem.samples * splits * problem.channels, 8) for name in chunks}
    if splits > 0:
        builder.launch(
            "channel_statistics",
            layout.constants(problem) | {"ONE_CHUNK": int(one_chunk)},
            layout.grid(problem),
            layout.block,
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
    running = problem.running
    lanes, sets = _merge_block(splits * problem.channels_per_set)
    builder.launch(
        "channel_merge",
        dtype_constants(problem)
        | {
            "SET_LANES": lanes,
            "SETS_PER_BLOCK": sets,
            "WANTS_VARIANCE": int(wants_variance),
            "UPDATES_RUNNING": int(running is not None),
            "UNBIASED": int(running is not None and running.unbiased),
        }
        | _running_types(problem),
        -(-problem.sets // sets),
        (lanes, sets),
        {
            **chunks,
            **statistics,
            "running_mean": "running_mean" if running else 0,
            "running_var": "running_var" if running else 0,
            "sets": problem.sets,
            "channels": problem.channels,
            "channels_per_set": problem.channels_per_set,
            "points": problem.points,
            "splits": splits,
            "points_per_split": layout.points_per_split,
            "eps": problem.eps,
            "kept": running.kept if running else 0.0,
            "taken": running.taken if running else 0.0,
        },
    )


def plan_backward(problem: ChannelBackward, device: Device) -> Plan:
    builder = Builder()
    wants_sums = problem.dweight is not None or problem.dbias is not None
    if problem.channels == 0 or (problem.dx is None and not wants_sums):
        return builder.finished("empty")
    layout = _layout(problem, device, _GRADIENT_SUMS)
    affine = _affine_constants(problem.weight, problem.bias, problem.activation, layout)
    splits = layout.splits if problem.points * problem.samples > 0 else 0
    inputs: dict[str, Value] = {name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd")}
    wants_means = problem.dx is not None and not problem.given and splits > 0
    means: Value = 0
    if wants_means:
        means = builder.reserve("means", 2 * problem.sets, compute_itemsize(problem))
    if wants_means or wants_sums:
        count = problem.samples * splits * 2 * problem.channels
        sums = builder.reserve("sums", count, compute_itemsize(problem))
        if splits > 0:
            builder.launch(
                "channel_gradient_sums",
                layout.constants(problem) | affine,
                layout.grid(problem),
                layout.block,
                {**inputs, "sums": sums, **layout.arguments(problem, dy=problem.dy, x=problem.x)},
            )
        wanted_channels, sets = problem.channels * wants_sums, problem.sets * wants_means
        lanes, items = _merge_block(
            splits * max(problem.samples * wants_sums, problem.channels_per_set * wants_means)
        )
        dtypes = {"dweight": problem.dweight, "dbias": problem.dbias}
        builder.launch(
            "channel_gradient_merge",
            dtype_constants(problem)
            | {"ITEM_LANES": lanes, "ITEMS_PER_BLOCK": items}
            | {name: affine[name] for name in ("HAS_WEIGHT", "WEIGHT_TYPE")}
            | {f"WANTS_{name.upper()}": int(dtype is not None) for name, dtype in dtypes.items()}
            | {f"{name.upper()}_TYPE": DTYPES[dtype or "float32"].cuda for name, dtype in dtypes.items()},
            -(-(wanted_channels + sets) // items),
            (lanes, items),
            {
                "sums": sums,
                "weight": "weight",
                "means": means,
                **{name: name if dtype is not None else 0 for name, dtype in dtypes.items()},
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
            "channel_backward",
            layout.constants(problem) | affine | {"GIVEN": int(problem.given)},
            layout.grid(problem),
            layout.block,
            {
                **inputs,
                "means": means,
                "dx": "dx",
                "sets": problem.sets,
                **layout.arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx),
            },
        )
    return builder.finished("channel")
