"""Rows of sixteen-bit numbers that all begin equally far behind a multiple of 16 bytes, backward.

Each vector is put together of two pieces that lie in shared memory, which takes time and registers. Blocks of aligned
rows have 512 threads on a multiprocessor, in one block of two rows where rows are long; these are better off with
blocks of one row each, 256 threads in all, and two rows ahead.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early
from cunorm.plan.row_memory import are_shifted
from cunorm.plan.row_spread import vectors_for_all_threads
from cunorm.problem import BackwardProblem

__all__ = ["shifted_row_backward"]

# Vectors of a row, from where two blocks of a multiprocessor have one each, and from where one has it; up to where it
# was timed.
_LEAST, _LONG, _MOST = 384, 704, 1536


def shifted_row_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None for other rows, and where it was not timed.

    As the time over that of a copy, on an H200: 256 MB of 3584, 4096, 8192 and 10,240 bfloat16 numbers that begin 2
    bytes late take 1.12, 1.06, 1.05 and 1.05, laid as aligned ones 1.32, 1.21, 1.06 and 1.22; with a residual 7168 and
    8192 1.06 and 1.04, else 1.28 and 1.20; 16 MB of 4096 and 8192 1.60 and 1.67, else 1.63 and 1.80. RMS norm, which
    has a sum less, has registers for more threads: 3584 and 4096 take 1.05 and 1.08, by half as many 1.04 and 1.09,
    else 1.13 and 1.06. With a residual it takes longer so. Of 74 others, of 8 to 256 MB, the time is 0.81 to 1.05 of
    what it was, 0.95 on average.
    """
    vectors_per_row, norm, residual = problem.columns // width, problem.norm, problem.dresidual_out
    timed = problem.itemsize == 2 and device.capability == 90 and device.has_fast_memory
    plain = problem.channels is None and norm.activation is None and (norm.centered or residual is None)
    if not timed or not plain or not are_shifted(problem):
        return None
    few = vectors_for_all_threads(problem, device, vectors_per_row) < 1
    if few or not _LEAST <= vectors_per_row <= _MOST or problem.rows <= device.multiprocessors:
        return None
    if vectors_per_row >= _LONG:
        threads, share, weights = 256, 1, "early"
    else:
        threads, share, weights = 128 if norm.centered else 256, 2, "staged"
    if not problem.parameters:
        weights = "late"
    vectors = -(-vectors_per_row // threads)
    geometry = RowBlock(width, vectors, threads, 1, 1, "ahead", False, weights, share, rows_ahead=2)
    if weights == "early" and not fits_early(geometry, problem, device):
        geometry = replace(geometry, weights="staged")
    return geometry if fits(geometry, problem, device) else None
