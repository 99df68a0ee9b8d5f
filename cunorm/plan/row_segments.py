"""Rows of a batch norm that the threads of a block hold: a channel of all samples, in a segment for each.

The numbers are of an H100, as the time over that of slabs of channels, which hold the same: these have more to find out
of where their numbers lie, and more instructions, which count where there is little to move. 44 problems take 0.92 on
average.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd
from cunorm.plan.row_memory import are_rows, are_segmented, vector_width
from cunorm.plan.row_spread import threads_for
from cunorm.problem import GELUS, BackwardProblem, ForwardProblem, Problem

__all__ = ["geometry"]

# Threads: of a block, at least; of a row, of a vector each, at most; and of longer rows.
_LEAST_THREADS, _SOME_THREADS, _MOST_THREADS = 64, 256, 512
# Vectors of a thread, at most; and of a row that a warp has, or less of it.
_MOST_VECTORS, _OF_A_WARP = 8, 64
# So many rows for each multiprocessor are many.
_MANY = 3
# With fewer rows, clusters leave fewer multiprocessors idle, if rows have more vectors than these.
_LEAST_ROWS_OF_LONG, _LONG = 44, 2048
# Forward of more bytes, slabs take no longer than a copy. Vectors of less than 16 bytes take them much longer.
_MOST_BYTES = 12 << 20
# Of vectors of 8 bytes, forward; and of fewer bytes, or backward. Backward many rows have fewer.
_MOST_HALF, _MOST_NARROW, _MOST_OF_MANY = 3584, 1792, 1024


def geometry(problem: Problem, device: Device) -> RowBlock | None:
    """How they lie over threads; None where they are better held otherwise."""
    if not (are_rows(problem) or are_segmented(problem)):
        return None
    width, forward = vector_width(problem), isinstance(problem, ForwardProblem)
    vectors, narrow = problem.columns // width, width * problem.itemsize < 16
    per_multiprocessor = -(-problem.rows // device.multiprocessors)
    threads = _threads(vectors, per_multiprocessor)
    if threads > _MOST_THREADS or _are_better_slabs(problem, device, vectors, width * problem.itemsize):
        return None
    found = RowBlock(width, -(-vectors // threads), threads, max(1, _LEAST_THREADS // threads))
    heavy = _is_heavy(found, problem, device)
    if heavy and (threads == _MOST_THREADS or _is_too_heavy(found, problem, device)):
        return None
    if not forward and threads == _MOST_THREADS and per_multiprocessor > 1 and not narrow and device.capability >= 80:
        found = replace(found, stage="ahead", blocks_per_multiprocessor=1)
    else:
        # Fewer registers are worth it where numbers come one by one, or else a multiprocessor would have one block.
        most = 256 if heavy else 1024 if forward and (narrow or threads == _MOST_THREADS) else 512
        found = replace(found, min_blocks=min(most // found.threads, per_multiprocessor))
    while not fits_crowd(found, problem, device, found.min_blocks):
        if found.min_blocks == 1:
            return None
        found = replace(found, min_blocks=found.min_blocks // 2)
    return found if fits(found, problem, device) else None


def _threads(vectors: int, rows_per_multiprocessor: int) -> int:
    """Threads for a row of so many vectors.

    Those of a warp need not meet: 8 rows of 16 float16 numbers take 0.83 by 2 threads each, by 64 0.95. Of longer rows
    each has one vector, and up to 8 where there would be too many threads. Of many rows a multiprocessor has several at
    once, if they have fewer threads: 1024 of 784 numbers that come one by one 0.77 by 128 threads of 7, by 256 of 4
    0.87.
    """
    each_one, least = threads_for(vectors, 1), threads_for(vectors, _MOST_VECTORS)
    if vectors <= _OF_A_WARP:
        return min(32, each_one)
    return least if rows_per_multiprocessor > _MANY else max(least, min(_SOME_THREADS, each_one))


def _are_better_slabs(problem: Problem, device: Device, vectors: int, vector_bytes: int) -> bool:
    """Whether rows of so many vectors take less time as slabs.

    Backward 1024 rows of 1568 numbers that come one by one take 1.07 of it, 256 of 3136 vectors of 8 bytes 1.05.
    Forward 512 rows of 8192 float32 numbers take 1.08, as slabs 0.95 of a copy's time; 256 of 2.25 MB in all 0.96. 32
    rows of 4096 vectors of 16 bytes 1.09.
    """
    forward = isinstance(problem, ForwardProblem)
    if problem.rows < _LEAST_ROWS_OF_LONG and vectors > _LONG:
        return True
    if vector_bytes == 16:
        return forward and problem.rows * problem.columns * problem.itemsize > _MOST_BYTES
    if not forward and problem.rows > _MANY * device.multiprocessors:
        return vectors > _MOST_OF_MANY
    return vectors > (_MOST_HALF if forward and vector_bytes == 8 else _MOST_NARROW)


def _is_heavy(found: RowBlock, problem: Problem, device: Device) -> bool:
    """Whether 128 registers are not enough for whole vectors: 8 to 260 bytes would spill."""
    if found.width * problem.itemsize < 16:
        return False
    hopper, activation = device.capability == 90, problem.norm.activation
    forward, full = isinstance(problem, ForwardProblem), found.vectors == _MOST_VECTORS
    if problem.itemsize > 2:
        return full and not (hopper or forward or activation is None)
    if forward:
        return full and (not hopper or activation in GELUS)
    return found.vectors >= _MOST_VECTORS - (0 if activation is None else 1 if hopper else 2)


def _is_too_heavy(found: RowBlock, problem: Problem, device: Device) -> bool:
    """Whether 255 are not, either: 352 bytes would spill under the exact gelu."""
    activated = isinstance(problem, BackwardProblem) and problem.norm.activation is not None
    return activated and found.vectors == _MOST_VECTORS and problem.itemsize == 2 and device.capability != 90
