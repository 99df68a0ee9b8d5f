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
from cunorm.problem import BackwardProblem, ForwardProblem

__all__ = ["backward_geometry", "with_more_blocks"]

# Shorter rows are spread as others are.
_FEWEST_VECTORS = 1281
# Vectors of a thread, at most, and threads of a multiprocessor: so many in blocks of 128 threads, or of 256.
_MOST_VECTORS, _THREADS, _ALL_THREADS = 10, (128, 256), 512
_MOST_BLOCKS = 16


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """Rows of a channel each, read directly by several small blocks a multiprocessor; None for others.

    16 x 64 x 257^2 float16 numbers take 1.03 by eight blocks of 128 threads, ahead 1.41; of float32 1.02 by sixteen,
    ahead 1.51; 16 x 256 x 129^2 of float16 1.06 by two, ahead 1.19; 2 x 64 x 45 x 55 x 45 1.09 and 1.27.
    """
    itemsize = problem.itemsize
    width = 16 // itemsize
    timed = device.capability == 90 and itemsize < 8 and problem.norm.activation is None and problem.dx is not None
    if not timed or has_several_channels(problem) or vector_width(problem) == width or not lie_alike(problem):
        return None
    if problem.columns // width < _FEWEST_VECTORS:
        return None
    for threads in _THREADS:
        blocks = 1
        while blocks * threads * _MOST_VECTORS * width < problem.columns:
            blocks *= 2
        if blocks > _MOST_BLOCKS or not device.groups(blocks) or not can_be_shared(problem, blocks, width):
            continue
        vectors = -(-columns_per_block(problem, blocks, width) // (width * threads))
        geometry = RowBlock(width, vectors, threads, 1, blocks, "direct", True)
        # 9 or 10 vectors of each of 128 threads leave registers for three blocks; 3 and 4 take as long.
        crowd = _ALL_THREADS // threads - (threads == 128 and vectors > 8)
        geometry = replace(geometry, blocks_per_multiprocessor=crowd)
        if vectors <= _MOST_VECTORS and fits(geometry, problem, device):
            return geometry
    return None


def with_more_blocks(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """As many small blocks of clusters on a multiprocessor as there is room for; the longest rows are read directly.

    Group norm of 16 x 64 x 257^2 float32 numbers takes 1.10 by two blocks of 256 threads, by one 1.60. But 2 x 32 x 91
    x 109 x 91 of float16 1.48 directly, by clusters of 16 blocks of 512 threads that all run at once, ahead 1.86.
    """
    if not geometry.peeled or geometry.stage != "ahead" or geometry.blocks_per_row == 1 or device.capability != 90:
        return geometry
    share = _ALL_THREADS // geometry.threads
    if share > geometry.blocks_per_multiprocessor:
        more = replace(geometry, blocks_per_multiprocessor=share)
        if resident_by_memory(more, problem, device) >= share and fits_crowd(more, problem, device, share):
            return more
    if share == 1 and geometry.blocks_per_row == _MOST_BLOCKS and problem.itemsize == 2:
        return replace(geometry, stage="direct", blocks_per_multiprocessor=0)
    return geometry
