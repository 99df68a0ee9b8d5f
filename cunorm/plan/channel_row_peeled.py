"""How rows of channels that begin anywhere, as those of odd planes do, are best spread over blocks of Hopper.

They have no weights by column, and backward no sums by column, so that there is more room than the rows of layer norm
have. The numbers are of instance norm on an H100, as the time over that of a copy of the same bytes.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.constants import can_be_shared, columns_per_block, lie_alike, vector_width
from cunorm.plan.launches import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd, has_several_channels, resident_by_memory
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["backward_geometry", "with_more_blocks"]

# Shorter rows are spread as others are.
_FEWEST_VECTORS = 1281
# Vectors of a thread, at most, and blocks of a cluster. Where clusters of 16 share multiprocessors, synccheck of
# compute-sanitizer 2025.3.1 ends with an illegal address, of which nothing else is seen.
_MOST_VECTORS, _MOST_BLOCKS = 10, 8
# Threads of a block, and how many blocks a multiprocessor has.
_DIRECTLY = ((128, 4), (256, 2))
_AHEAD = (512, 1)


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """Rows of a channel each, read directly by several small blocks a multiprocessor, if it can; None for others.

    16 x 64 x 257^2 float16 numbers take 1.03 by eight blocks of 128 threads, ahead 1.41; of float32 1.01 by eight of
    256, ahead by sixteen 1.51; 16 x 256 x 129^2 of float16 1.06 by two of 128, ahead 1.19; 2 x 64 x 45 x 55 x 45 1.10
    and 1.27, of float32 1.11 ahead by eight of 512 threads, by sixteen of 256 1.26.
    """
    itemsize = problem.itemsize
    width = 16 // itemsize
    timed = device.capability == 90 and itemsize < 8 and problem.norm.activation is None and problem.dx is not None
    if not timed or has_several_channels(problem) or vector_width(problem) == width or not lie_alike(problem):
        return None
    if problem.columns // width < _FEWEST_VECTORS:
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
