"""How rows of channels that begin anywhere, as those of odd planes do, are best spread over blocks.

They have no weights by column, and backward no sums by column, so that there is more room than the rows of layer norm
have. The numbers are of instance norm on an H100, as the time over that of a copy of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd, resident_by_memory
from cunorm.plan.row_memory import can_be_shared, columns_per_block, has_several_channels, lie_alike, vector_width
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["backward_geometry", "with_more_blocks"]

# Shorter rows are spread as others are, or as channel_row_single.py has them.
_FEWEST_VECTORS = 1281
# Vectors of a thread, at most, and blocks of a cluster. Where clusters of 16 share multiprocessors, synccheck of
# compute-sanitizer 2025.3.1 ends with an illegal address, of which nothing else is seen.
_MOST_VECTORS, _MOST_BLOCKS = 10, 8
# Threads of a block, and how many blocks a multiprocessor has.
_DIRECTLY = ((128, 4), (256, 2))
_AHEAD = (512, 1)


@dataclass(frozen=True)
class _Spread:
    """How rows of so many vectors are spread."""

    least: int
    most: int
    threads: int  # of a block
    blocks: int  # of a row
    stage: str
    share: int  # blocks of a multiprocessor that take turns; 0, where each row has blocks of its own


# Under an activation, what was fastest or nearly so of 3 to 24 ways. Instance norm of 16 x 64 planes of 75^2, 151^2,
# 181^2 and 257^2 16-bit numbers takes 1.04, 1.11, 1.10 and 1.13 under silu, 1.23, 1.34, 1.25 and 1.29 under gelu; as
# layer norm lies 1.22, 1.29, 1.43 and 1.39, and 1.41, 1.34, 1.73 and 1.83. Of 75^2, 151^2 and 181^2 float32 numbers it
# takes 1.13, 1.16 and 1.21 under both, as layer norm 1.39, 1.52 and 1.92. Shorter rows: see channel_row_single.py.
_LIGHT = (
    _Spread(513, 768, 128, 1, "direct", 0),
    _Spread(769, 1280, 256, 1, "direct", 0),
    _Spread(1281, 1536, 128, 2, "direct", 3),
    _Spread(1537, 3072, 512, 1, "direct", 0),
    _Spread(3073, 5120, 128, 8, "direct", 4),
    _Spread(5121, 6144, 512, 2, "direct", 1),
    _Spread(6145, 10_240, 256, 8, "direct", 2),
    _Spread(10_241, 12_288, 512, 4, "direct", 1),
    _Spread(14_337, 24_576, 512, 8, "direct", 1),
)
_HEAVY = (
    _Spread(513, 1536, 256, 1, "direct", 0),
    _Spread(1537, 2560, 256, 2, "ahead", 2),
    _Spread(2561, 3072, 512, 2, "ahead", 1),
    _Spread(3073, 6144, 128, 8, "direct", 4),
    _Spread(6145, 10_240, 256, 8, "ahead", 2),
    _Spread(10_241, 20_480, 512, 8, "ahead", 1),
)
_WIDE = (
    _Spread(513, 1536, 256, 1, "direct", 0),
    _Spread(4097, 5120, 128, 8, "ahead", 4),
    _Spread(5121, 6144, 128, 8, "direct", 4),
    _Spread(6145, 12_288, 256, 8, "direct", 2),
)
# On other GPUs than Hopper, where nothing was timed, 16-bit numbers of so many vectors would spill 148 to 244 bytes as
# layer norm lies.
_ELSEWHERE = (
    _Spread(250, 768, 128, 1, "direct", 0),
    _Spread(769, 1536, 256, 1, "direct", 0),
)


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """Rows of a channel each, read directly by several small blocks a multiprocessor, if it can; None for others.

    Under an activation they are spread as the tables above say.

    16 x 64 x 257^2 float16 numbers take 1.03 by eight blocks of 128 threads, ahead 1.41; of float32 1.01 by eight of
    256, ahead by sixteen 1.51; 16 x 256 x 129^2 of float16 1.06 by two of 128, ahead 1.19; 2 x 64 x 45 x 55 x 45 1.10
    and 1.27, of float32 1.11 ahead by eight of 512 threads, by sixteen of 256 1.26.
    """
    itemsize = problem.itemsize
    width = 16 // itemsize
    if itemsize == 8 or problem.dx is None:
        return None
    if has_several_channels(problem) or vector_width(problem) == width or not lie_alike(problem):
        return None
    if problem.norm.activation is not None:
        return _activated(problem, device, width)
    if device.capability != 90 or problem.columns // width < _FEWEST_VECTORS:
        return None
    for threads, share in _DIRECTLY:
        geometry = _shared(problem, device, width, threads)
        if geometry is not None:
            # 9 or 10 vectors of each of 128 threads leave registers for three blocks; 3 and 4 take as long.
            return replace(geometry, blocks_per_multiprocessor=share - (threads == 128 and geometry.vectors > 8))
    threads, share = _AHEAD
    geometry = _shared(problem, device, width, threads)
    if geometry is None:
        return None
    geometry = replace(geometry, stage="ahead", blocks_per_multiprocessor=share)
    return geometry if fits_crowd(geometry, problem, device, share) and fits(geometry, problem, device) else None


def _activated(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    way = _spread_of(problem, device, width)
    if way is None or (way.blocks > 1 and not device.groups(way.blocks)):
        return None
    if not can_be_shared(problem, way.blocks, width):
        return None
    vectors = -(-columns_per_block(problem, way.blocks, width) // (width * way.threads))
    geometry = RowBlock(width, vectors, way.threads, 1, way.blocks, way.stage, True)
    # More rows than blocks that could ever run together take turns too.
    most = device.threads_per_multiprocessor // way.threads
    turns = most if not way.share and problem.rows > device.multiprocessors * most else way.share
    geometry = replace(geometry, blocks_per_multiprocessor=turns)
    if way.share and not fits_crowd(geometry, problem, device, way.share):
        return None
    return geometry if fits(geometry, problem, device) else None


def _spread_of(problem: BackwardProblem, device: Device, width: int) -> _Spread | None:
    ways: tuple[_Spread, ...] = _LIGHT if problem.norm.activation in ("relu", "silu") else _HEAVY
    if width == 4:
        ways = _WIDE
    if device.capability != 90:
        ways = _ELSEWHERE if width == 8 else ()
    vectors = -(-problem.columns // width)
    return next((way for way in ways if way.least <= vectors <= way.most), None)


def _shared(problem: Problem, device: Device, width: int, threads: int) -> RowBlock | None:
    """By the least power of two of blocks of so many threads that leaves none too many vectors."""
    blocks = 1
    while blocks * threads * _MOST_VECTORS * width < problem.columns:
        blocks *= 2
    if blocks > _MOST_BLOCKS or not device.groups(blocks) or not can_be_shared(problem, blocks, width):
        return None
    vectors = -(-columns_per_block(problem, blocks, width) // (width * threads))
    return RowBlock(width, vectors, threads, 1, blocks, "direct", True) if vectors <= _MOST_VECTORS else None


def with_more_blocks(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """As many threads of clusters on a multiprocessor as there is room for; the longest rows are read directly.

    Group norm of 16 x 64 x 257^2 float32 numbers takes 1.10 by eight blocks of 512 threads or two of 256, by sixteen of
    256 1.60. But 2 x 32 x 91 x 109 x 91 of float16 1.48 directly, by clusters of 16 blocks of 512 threads that all run
    at once, ahead 1.86.
    """
    if not geometry.peeled or geometry.stage != "ahead" or geometry.blocks_per_row == 1 or device.capability != 90:
        return geometry
    if geometry.blocks_per_row > _MOST_BLOCKS and 2 * geometry.threads <= _AHEAD[0]:
        blocks, threads = geometry.blocks_per_row // 2, 2 * geometry.threads
        vectors = -(-columns_per_block(problem, blocks, geometry.width) // (geometry.width * threads))
        larger = replace(geometry, blocks_per_row=blocks, threads_per_row=threads, vectors=vectors)
        return larger if _have_room(larger, problem, device) else geometry
    if geometry.blocks_per_row > _MOST_BLOCKS:
        directly = problem.itemsize == 2
        return replace(geometry, stage="direct", blocks_per_multiprocessor=0) if directly else geometry
    share = _AHEAD[0] // geometry.threads
    more = replace(geometry, blocks_per_multiprocessor=share)
    return more if share > geometry.blocks_per_multiprocessor and _have_room(more, problem, device) else geometry


def _have_room(geometry: RowBlock, problem: ForwardProblem, device: Device) -> bool:
    share = geometry.blocks_per_multiprocessor
    in_memory = fits(geometry, problem, device) and resident_by_memory(geometry, problem, device) >= share
    return in_memory and fits_crowd(geometry, problem, device, share)
