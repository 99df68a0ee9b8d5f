"""How channel_* lay samples, channels and points over blocks and threads, and what their kernels have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cunorm.plan.constants import dtype_constants, vector_constants
from cunorm.plan.launches import Constants, Value
from cunorm.plan.row_memory import compute_itemsize
from cunorm.problem import ChannelBackward, ChannelProblem, ChannelTensor, Vector

__all__ = [
    "Direction",
    "Tiles",
    "affine_constants",
    "along_planes",
    "direction",
    "least_lanes",
    "pass_arguments",
    "set_lanes",
    "static_bytes",
    "tile_lanes",
]

# Along the points, tiles of so many channel lanes and more were not timed.
_TOO_MANY_LANES = 64


class Direction(NamedTuple):
    """How vectors lie (see kernels/channel_tile.cuh)."""

    along_channels: bool
    width: int  # elements of a vector
    plane: int = 1  # where they lie along planes: points of one

    def is_whole_along_points(self, problem: ChannelProblem) -> bool:
        """Whether they are 16 bytes each of the points of a channel, which are one run of memory."""
        whole = self.width * problem.itemsize == 16
        return not self.along_channels and whole and len(problem.point_sizes) == 1


@dataclass(frozen=True)
class Tiles:
    """Channels by points of a block (see kernels/channel_tile.cuh)."""

    direction: Direction
    channel_lanes: int
    threads: int
    min_blocks: int  # for so many on a multiprocessor the compiler is to leave registers

    @property
    def width(self) -> int:
        return self.direction.width

    @property
    def along_channels(self) -> bool:
        return self.direction.along_channels

    @property
    def channel_vector(self) -> int:
        return self.width if self.along_channels else 1

    @property
    def point_vector(self) -> int:
        return self.direction.plane if self.along_channels else self.width

    @property
    def point_lanes(self) -> int:
        return self.threads // self.channel_lanes

    @property
    def holders(self) -> int:
        """Threads that hold something."""
        return self.point_lanes * self.channel_lanes

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return self.channel_lanes * self.channel_vector // self.direction.plane

    @property
    def block(self) -> tuple[int, int]:
        return (self.threads, 1) if self.along_channels else (self.point_lanes, self.channel_lanes)

    @property
    def sum_rows(self) -> int:
        """How many threads, or warps where these have channels more than once, have sums of the same channels."""
        return self.threads // 32 if self.channel_lanes < 32 else self.point_lanes

    def slot_bytes(self, problem: ChannelProblem) -> int:
        """Of a vector of every thread, and tensor that is read."""
        return problem.tensors_read * self.holders * self.width * problem.itemsize

    def summed(self, problem: ChannelProblem) -> int:
        """Of how many channels slabs and grids take the statistics together (see channel_slab_statistics.cuh)."""
        apart = isinstance(problem, ChannelBackward) or self.direction.plane > 1
        return 1 if apart else math.gcd(self.channel_vector, problem.channels_per_set)

    def count(self, problem: ChannelProblem) -> int:
        """Tiles of channels, of all samples."""
        return problem.samples * -(-problem.channels // self.channels)

    def constants(self, problem: ChannelProblem) -> Constants:
        own: Constants = {
            "THREADS": self.threads,
            "MIN_BLOCKS": self.min_blocks,
            "VECTOR": self.width,
            "ALONG_CHANNELS": int(self.along_channels),
            "CHANNEL_LANES": self.channel_lanes,
            "PLANE": self.direction.plane,
            "POINT_DIMS": len(problem.point_sizes),
        }
        return dtype_constants(problem) | own


def direction(problem: ChannelProblem) -> Direction:
    """Along the channels or the points: the way that has the longer vectors."""
    by_points, by_channels = _width(problem, False), _width(problem, True)
    x = problem.x
    across = x.channel_stride == 1 and (x.point_strides[-1] != 1 or problem.points == 1)
    if by_channels > by_points or (by_channels == by_points and across):
        return Direction(True, by_channels)
    return Direction(False, by_points)


def along_planes(problem: ChannelProblem) -> Direction | None:
    """Along planes, where these lie behind each other in all tensors and vectors are longer so; else None."""
    plane, tensors = problem.point_sizes[-1], problem.tensors
    if len(problem.point_sizes) < 2 or plane == 1:
        return None
    if any(tensor.channel_stride != plane or tensor.point_strides[-1] != 1 for tensor in tensors):
        return None
    strides = [stride for tensor in tensors for stride in (tensor.sample_stride, *tensor.point_strides[:-1])]
    width = _aligned_elements(problem, problem.channels * plane, *strides)
    return Direction(True, width, plane) if width > direction(problem).width else None


def least_lanes(way: Direction, channels: int) -> int:
    """The fewest lanes that hold whole groups of so many channels, where vectors lie along these."""
    return math.lcm(channels * way.plane, way.width) // way.width


def _width(problem: ChannelProblem, along_channels: bool) -> int:
    """Elements that a thread moves at once, if they lie along the channels or along the points."""
    strides: list[int] = []
    for tensor in problem.tensors:
        along = tensor.channel_stride if along_channels else tensor.point_strides[-1]
        others = tensor.point_strides if along_channels else (tensor.channel_stride, *tensor.point_strides[:-1])
        size = problem.channels if along_channels else problem.point_sizes[-1]
        if along != 1 and size > 1:
            return 1
        strides += (tensor.sample_stride, *others, size)
    return _aligned_elements(problem, *strides)


def _aligned_elements(problem: ChannelProblem, *strides: int) -> int:
    """Elements that are moved at once, up to 16 bytes: as many as the pointers and so many strides divide by."""
    itemsize = problem.itemsize
    elements = math.gcd(16 // itemsize, *strides)
    return max(1, min([elements] + [tensor.alignment // itemsize for tensor in problem.tensors]))


def tile_lanes(problem: ChannelProblem, way: Direction, most_threads: int) -> Iterator[tuple[int, int]]:
    """Channel lanes of tiles of whole sets, and how many threads they make: whole warps, up to so many."""
    if not way.along_channels:
        yield from _lanes_along_points(problem, most_threads)
        return
    vectors = -(-problem.channels * way.plane // way.width)
    step = least_lanes(way, problem.channels_per_set)
    for lanes in (*range(step, min(vectors, most_threads + 1), step), vectors):
        # Lanes of planes leave some threads of the last warp idle.
        unit = 32 // math.gcd(32, lanes) if way.plane == 1 else 1
        point_lanes = most_threads // lanes // unit * unit
        if point_lanes > 0:
            yield lanes, -(-lanes * point_lanes // 32) * 32


def _lanes_along_points(problem: ChannelProblem, most_threads: int) -> Iterator[tuple[int, int]]:
    """The same where vectors lie along the points: a channel is summed by whole warps, or a power of two of threads.

    With no more than 512 threads that leaves sets of up to 63 channels whose odd part is 15 at most.
    """
    odd = problem.channels_per_set
    while odd % 2 == 0:
        odd //= 2
    for lanes in (odd << i for i in range(6)):
        too_many = lanes > most_threads or lanes >= min(2 * problem.channels, _TOO_MANY_LANES)
        if lanes % problem.channels_per_set or too_many:
            continue
        point_lanes = most_threads // lanes
        point_lanes = point_lanes // 32 * 32 or 1 << point_lanes.bit_length() - 1
        if lanes * point_lanes % 32 == 0:
            yield lanes, lanes * point_lanes


def set_lanes(parts: int) -> int:
    """How many threads of a warp merge so many parts of a set: a power of two, two parts each at least."""
    return min(32, 1 << max(1, parts // 2).bit_length() - 1)


def static_bytes(problem: ChannelProblem, tiles: Tiles, numbers: int) -> int:
    """Shared memory that a kernel declares: for sums over the points of a tile, and so many numbers."""
    lanes, plane = tiles.channel_lanes, tiles.direction.plane
    sums = tiles.width // tiles.summed(problem)  # of a vector along the channels
    scratch = lanes * (tiles.sum_rows * sums if tiles.along_channels else -(-tiles.point_lanes // 32))
    if plane > 1:
        scratch = ((tiles.width - 2) // plane + 2) * tiles.holders + tiles.channels
    total = (2 * scratch + numbers) * compute_itemsize(problem) + 64
    # What is staged begins behind it, at a multiple of so many bytes (COPY_ALIGNMENT of kernels/copy_async.cuh).
    return -(-total // 128) * 128


def pass_arguments(problem: ChannelProblem, **tensors: ChannelTensor) -> dict[str, Value]:
    """Sizes, and the strides of each tensor."""
    arguments: dict[str, Value] = {
        "channels": problem.channels,
        "points": problem.points,
        "point_sizes": problem.point_sizes,
    }
    for name, tensor in tensors.items():
        arguments[f"{name}_sample_stride"] = tensor.sample_stride
        arguments[f"{name}_channel_stride"] = tensor.channel_stride
        arguments[f"{name}_point_strides"] = tensor.point_strides
    return arguments


def affine_constants(problem: ChannelProblem, tiles: Tiles) -> Constants:
    constants: Constants = {"CENTERED": 1, "WEIGHT_OFFSET": 0, "ACTIVATION": problem.activation or "none"}
    vectors: dict[str, Vector | None] = {"WEIGHT": problem.weight, "BIAS": problem.bias}
    for name, vector in vectors.items():
        constants |= vector_constants(name, vector, tiles.channel_vector if tiles.direction.plane == 1 else 1)
    return constants
