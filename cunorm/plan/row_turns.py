"""Rows of sixteen-bit numbers that are a few vectors for each thread of the GPU, forward: they are fetched ahead.

Such rows, up to 20 MB of them, are a wave of blocks or two where each block has rows of its own. By blocks that take
turns, two rows ahead, the memory is kept busy throughout.

The numbers are of an H200, as the time over that of a block for every group of rows. Where memory is slower none was
timed.
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import that_fits
from cunorm.plan.row_memory import are_shifted
from cunorm.plan.row_spread import threads_for, vectors_for_all_threads
from cunorm.plan.row_weights import are_wide
from cunorm.problem import ForwardProblem

__all__ = ["row_in_turns"]

# Columns, at least and at most; at most of RMS norm without a residual, and where some threads have fewer vectors.
_LEAST, _MOST, _MOST_OF_RMS, _MOST_IN_PART = 128, 3072, 768, 1024
# Columns up to which RMS norm is better off so with four vectors of each thread.
_SHORT = 256
# Vectors for each thread of the GPU: where there is more than one turn, where there are some, and where there are many.
_SECOND_TURN, _SOME_TURNS, _MANY_TURNS = 1.5, 2.5, 5
_BLOCK_THREADS = 64


def row_in_turns(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None for rows that take longer so, and where it was not timed."""
    timed = problem.itemsize == 2 and width == 8 and device.capability == 90 and device.has_fast_memory
    plain = problem.channels is None and problem.norm.activation is None and not are_shifted(problem)
    if not timed or not plain or not _LEAST <= problem.columns <= _MOST or problem.rows <= 2 * device.multiprocessors:
        return None
    for_all = vectors_for_all_threads(problem, device, problem.columns // width)
    if for_all > _MANY_TURNS:
        return None
    if problem.residual is not None:
        return _with_residual(problem, device, width, for_all)
    return _alone(problem, device, width, for_all)


def _alone(problem: ForwardProblem, device: Device, width: int, for_all: float) -> RowBlock | None:
    """Rows of three vectors of each thread, and short ones of RMS norm; by 1024 threads of a multiprocessor.

    8 and 16 MB of 192, 384, 768, 1536 and 3072 bfloat16 numbers take 0.95 to 0.99 and 0.95 to 1.00 so; without weights
    0.95 to 1.01 and 0.94 to 1.00; RMS norm of 192, 384 and 768 0.97 to 1.01 and 0.81 to 0.97, of 128 and 256 16 MB
    0.87 and 0.95. RMS norm of more columns takes 1.00 to 1.02, and 320 or 640, of which not all threads have three
    vectors, 1.02 to 1.08.
    """
    geometry = _laid(problem, width, "staged", min(1024, device.threads_per_multiprocessor))
    rms = not problem.norm.centered
    if geometry.capacity != problem.columns or (rms and problem.columns > _MOST_OF_RMS):
        return None
    if are_wide(problem) and not rms:
        return None  # see row_wide.py
    few = geometry.vectors == 3 and for_all > _SECOND_TURN
    short = rms and problem.columns <= _SHORT and for_all > _SOME_TURNS
    return that_fits(geometry, problem, device) if few or short else None


def _with_residual(problem: ForwardProblem, device: Device, width: int, for_all: float) -> RowBlock | None:
    """With a residual, of which twice as much is on its way; by 512 threads of a multiprocessor.

    2 to 20 MB of up to 1024 columns, or of 1536 and 3072, take 0.95 on average of 58 norms, 0.85 to 1.07. Where threads
    have not all of their vectors, longer rows take 0.94 to 1.07, on average 0.99. Of powers of two a thread has four
    vectors: 16 MB take 0.95 to 0.99, but 8 MB 1.01.
    """
    geometry = _laid(problem, width, "early", min(512, device.threads_per_multiprocessor))
    full = geometry.capacity == problem.columns
    if are_wide(problem) or (full and geometry.vectors == 4 and for_all <= _SOME_TURNS):
        return None
    if not full and problem.columns > _MOST_IN_PART:
        return None
    return that_fits(geometry, problem, device)


def _laid(problem: ForwardProblem, width: int, weights: str, all_threads: int) -> RowBlock:
    """Blocks of two warps, or of as many threads as a row has, with up to four vectors of each."""
    vectors_per_row = problem.columns // width
    threads = threads_for(vectors_per_row, 4)
    rows = max(1, _BLOCK_THREADS // threads)
    weights = weights if problem.parameters else "late"
    share, vectors = all_threads // (threads * rows), -(-vectors_per_row // threads)
    return RowBlock(width, vectors, threads, rows, 1, "ahead", False, weights, share, rows_ahead=2)
