"""Rows of sixteen-bit numbers under an activation, backward.

Its derivative is most of the work, and is needed twice. A thread keeps it from one pass for the next where it has few
vectors and all the registers that it can have, so that one instruction follows the other without a branch between
(SKIPS in kernels/row_block_backward.cu). Hence 256 threads a multiprocessor, weights in registers, and two rows ahead.
"""

from __future__ import annotations

from cunorm.plan.constants import can_be_shared, columns_per_block
from cunorm.plan.launches import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early
from cunorm.problem import DTYPES, BackwardProblem

__all__ = ["activated_row_backward"]

# Blocks of a row, threads of a block, and the most vectors of a thread: the first that hold a row.
_WAYS = ((1, 128, 5), (1, 256, 4), (2, 128, 5), (4, 128, 5), (8, 128, 5), (8, 256, 5), (16, 256, 5))


def activated_row_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None where another is better, or was not measured.

    On an H200, as the time over that of a copy of the same bytes: under silu 2048, 3072 and 5120 columns of bfloat16
    take 1.04, 1.04 and 1.06 so, with weights that are staged 1.24, 1.27 and 1.18; 10,000 and 12,288 1.16 and 1.10, by
    one block of 512 threads 1.47 and 1.36; 80,000 and 131,072 1.50 and 1.40, staged 1.65 and 1.73. Under the exact gelu
    4096 and 8192 take 1.13 and 1.19, by twice as many threads of half as many vectors 1.29 and 1.30. By three blocks a
    multiprocessor 12,288, 3 vectors of a thread, take 1.10, by two 1.16; but 3072 1.14 and 1.04. RMS norm, relu and
    gelu_tanh go likewise, and were not timed.
    """
    vectors_per_row = problem.columns // width
    measured = device.capability == 90 and DTYPES[problem.x.dtype].itemsize == 2 and problem.norm.activation is not None
    measured = measured and problem.weight is not None and problem.channels is None and problem.dresidual_out is None
    if not measured or vectors_per_row <= 192:
        return None
    for blocks, threads, most in _WAYS:
        if not device.groups(blocks) or not can_be_shared(problem, blocks, width):
            continue
        columns = columns_per_block(problem, blocks, width) if blocks > 1 else problem.columns
        vectors = -(-(columns // width) // threads)
        if vectors > most:
            continue
        share = 256 // threads + (threads == 128 and vectors < (3 if blocks == 1 else 4))
        geometry = RowBlock(width, vectors, threads, 1, blocks, "ahead", False, "early", share, 2)
        if fits_early(geometry, problem, device) and fits(geometry, problem, device):
            few = problem.rows <= 3 * share * device.groups(blocks)
            return None if few else geometry
    return None
