"""Channel norms of slabs that fit on chip: some channels of a sample, with all their points. All is moved once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cunorm.plan.channel_tiles import (
    Tiles,
    affine_constants,
    direction,
    pass_arguments,
    running_arguments,
    running_constants,
)
from cunorm.plan.column_sums import launch_sum
from cunorm.plan.constants import compute_itemsize
from cunorm.plan.launches import Builder, Constants, Device, Value
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, ChannelProblem

__all__ = ["Slab", "backward_geometry", "candidates", "forward_geometry", "plan_backward", "plan_forward"]

# Vectors of a thread.
_MOST_VECTORS = 64
# What the runtime keeps of shared memory for each block.
_RESERVED_BYTES = 1024
# Static shared memory that a kernel may have.
_MOST_STATIC_BYTES = 48 * 1024


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
        read = 1 if isinstance(problem, ChannelForward) else 2
        return read * self.vectors * self.tiles.threads * self.tiles.width * DTYPES[problem.x.dtype].itemsize

    def static_bytes(self, problem: ChannelProblem) -> int:
        """What the kernel declares of shared memory itself."""
        forward = isinstance(problem, ChannelForward)
        tiles = self.tiles
        lanes = tiles.channel_lanes
        rows = tiles.threads // 32 if 32 % lanes == 0 else tiles.point_lanes
        while rows > 40:
            rows = (rows + 1) // 2
        scratch = lanes * (rows if tiles.along_channels else -(-tiles.point_lanes // 32))
        exchanged = self.blocks_per_slab if self.blocks_per_slab > 1 else 1
        per_channel = (exchanged + 1) * 3 + 3 if forward else (exchanged + 2) * 2 + 2
        per_channel += 4 if forward else 0  # where running statistics are updated, in double
        return (2 * tiles.channel_vector * scratch + per_channel * tiles.channels) * compute_itemsize(problem) + 64

    def constants(self, problem: ChannelProblem) -> Constants:
        # How many threads merge what a set has, a number of each channel: of every block, forward.
        parts = problem.channels_per_set * (self.blocks_per_slab if isinstance(problem, ChannelForward) else 1)
        own: Constants = {
            "UNROLL": 1,
            "VECTORS": self.vectors,
            "BLOCKS_PER_ROW": self.blocks_per_slab,
            "CHANNELS_PER_SET": problem.channels_per_set,
            "SET_LANES": min(32, 1 << max(1, parts // 2).bit_length() - 1),
        }
        return self.tiles.constants(problem) | own

    def resident(self, problem: ChannelProblem, device: Device) -> int:
        """How many blocks share a multiprocessor."""
        shared = self.shared_bytes(problem) + self.static_bytes(problem) + _RESERVED_BYTES
        threads = self.tiles.threads
        most = min((device.shared_bytes + _RESERVED_BYTES) // shared, device.threads_per_multiprocessor // threads)
        return min(most, 65536 // (threads * 64))


def candidates(problem: ChannelProblem, device: Device) -> Iterator[Slab]:
    """Every way to lay the slabs of a problem over blocks."""
    along_channels, width = direction(problem)
    if problem.points == 0 or problem.samples * problem.channels == 0:
        return
    vectors_of_channels = -(-problem.channels // width)
    period = problem.channels_per_set
    for threads in (128, 256, 384, 512):
        if along_channels:
            step = math.lcm(period, width) // width
            all_lanes = [lanes for lanes in range(step, vectors_of_channels, step)] + [vectors_of_channels]
            all_lanes = [lanes for lanes in all_lanes if lanes <= threads // 4 and lanes * width <= 256]
        else:
            if threads & threads - 1:
                continue  # sums along the points want a power of two
            all_lanes = [1 << i for i in range(6) if (1 << i) % period == 0 and (1 << i) < 2 * problem.channels]
        for lanes in all_lanes:
            # Whole warps; a power of two along the points.
            unit = 32 // math.gcd(32, lanes)
            point_lanes = threads // lanes // unit * unit if along_channels else threads // lanes
            if point_lanes < 1:
                continue
            tiles = Tiles(width, along_channels, lanes, lanes * point_lanes, 1)
            for blocks in (1, 2, 4, 8, 16):
                if not device.groups(blocks):
                    break
                point_vectors = -(-problem.points // tiles.point_vector)
                per_block = -(-point_vectors // blocks)
                vectors = -(-per_block // point_lanes)
                if vectors > _MOST_VECTORS or -(-point_vectors // per_block) < blocks:
                    continue
                slab = Slab(tiles, blocks, per_block * tiles.point_vector, vectors)
                total = slab.shared_bytes(problem) + slab.static_bytes(problem)
                if total <= device.shared_bytes and slab.static_bytes(problem) <= _MOST_STATIC_BYTES:
                    yield slab


# The model that a slab is chosen by: bytes a microsecond of the whole device, and microseconds that a slab takes
# besides.
_BYTES_PER_MICROSECOND = 4.2e6
_LATENCY = 3.0
_LATENCY_OF_CLUSTER = 1.0


def _cost(slab: Slab, problem: ChannelProblem, device: Device) -> float:
    """The microseconds that a slab is expected to take."""
    itemsize = DTYPES[problem.x.dtype].itemsize
    resident = max(1, slab.resident(problem, device))
    at_once = device.groups(slab.blocks_per_slab) * slab.blocks_per_slab * resident
    grid = slab.grid(problem)
    waves = -(-grid // at_once)
    run = slab.tiles.channels * itemsize if slab.tiles.along_channels else 128
    waste = 1.0 if run >= 128 else 1.05 if run >= 64 else 1.3
    full = problem.bytes_moved / _BYTES_PER_MICROSECOND * waste
    # A multiprocessor moves no more than so much by itself.
    share = max(1.0, waves * at_once / grid) if waves > 1 else max(1.0, device.multiprocessors * 0.6 / grid)
    idle = _LATENCY + _LATENCY_OF_CLUSTER * (slab.blocks_per_slab > 1)
    return full * share + idle * (1 + (waves - 1) / resident)


def _geometry(problem: ChannelProblem, device: Device) -> Slab | None:
    best = min(candidates(problem, device), key=lambda slab: _cost(slab, problem, device), default=None)
    return best


def forward_geometry(problem: ChannelForward, device: Device) -> Slab | None:
    """The slabs of a problem; None where they do not fit on chip, or there is nothing to compute of them."""
    if problem.y is None or (problem.running is not None and problem.running.given):
        return None
    return _geometry(problem, device)


def backward_geometry(problem: ChannelBackward, device: Device) -> Slab | None:
    return None if problem.given else _geometry(problem, device)


def plan_forward(problem: ChannelForward, slab: Slab, builder: Builder) -> str:
    assert problem.y is not None
    builder.launch(
        "channel_slab_forward",
        slab.constants(problem) | affine_constants(problem, slab.tiles) | running_constants(problem),
        slab.grid(problem),
        slab.tiles.block,
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **running_arguments(problem),
            "points_per_block": slab.points_per_block,
            **pass_arguments(problem, x=problem.x, y=problem.y),
            "eps": problem.eps,
        },
        slab.shared_bytes(problem),
        slab.blocks_per_slab,
    )
    return "channel_slab"


def plan_backward(problem: ChannelBackward, slab: Slab, builder: Builder) -> str:
    dtypes = {"dweight": problem.dweight, "dbias": problem.dbias}
    compute = DTYPES[problem.x.dtype].compute
    targets: dict[str, Value] = {}
    constants: Constants = {"WANTS_DX": int(problem.dx is not None)}
    sums = []
    for name, dtype in dtypes.items():
        targets[name], stored = (name if dtype else 0), dtype or compute
        if dtype is not None and problem.samples > 1:
            count = problem.samples * problem.channels
            targets[name], stored = builder.reserve(f"{name}_sums", count, compute_itemsize(problem)), compute
            sums.append((targets[name], name, dtype))
        constants |= {f"WANTS_{name.upper()}": int(dtype is not None), f"{name.upper()}_TYPE": DTYPES[stored].cuda}
    builder.launch(
        "channel_slab_backward",
        slab.constants(problem) | affine_constants(problem, slab.tiles) | constants,
        slab.grid(problem),
        slab.tiles.block,
        {
            **{name: name for name in ("dy", "x", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            "points_per_block": slab.points_per_block,
            **pass_arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx or problem.x),
        },
        slab.shared_bytes(problem),
        slab.blocks_per_slab,
    )
    if sums:
        launch_sum(builder, problem, sums, problem.samples, problem.channels)
    return "channel_slab"
