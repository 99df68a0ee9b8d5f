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
# Vectors of a thread: of one whose block is compiled for a single turn, and at most.
_FEW_VECTORS, _MOST_VECTORS = 4, 8
# Up to so many threads for each multiprocessor, forward and backward, rows have few vectors a thread.
_AT_ONCE, _AT_ONCE_BACKWARD = 1280, 2048
_WARP = 32
# So many rows for each multiprocessor are many.
_MANY = 3
# With fewer rows, clusters leave fewer multiprocessors idle, if rows have more vectors than these.
_LEAST_ROWS_OF_LONG, _LONG = 44, 2048
# Forward of more bytes, slabs take no longer than a copy. Vectors of less than 16 bytes take them much longer.
_MOST_BYTES = 12 << 20
# Vectors of a row, at most: forward, of 8 bytes or of up to 2 rows a multiprocessor; of others, and backward; and of
# many rows backward.
_MOST_FORWARD, _MOST_NARROW, _MOST_OF_MANY = 3584, 1792, 1024


def geometry(problem: Problem, device: Device) -> RowBlock | None:
    """How they lie over threads; None where they are better held otherwise."""
    if not (are_rows(problem) or are_segmented(problem)):
        return None
    width, forward = vector_width(problem), isinstance(problem, ForwardProblem)
    vectors, narrow = problem.columns // width, width * problem.itemsize < 16
    per_multiprocessor = -(-problem.rows // device.multiprocessors)
    threads = _threads(problem, vectors, per_multiprocessor)
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


def _threads(problem: Problem, vectors: int, rows_per_multiprocessor: int) -> int:
    """Threads for a row of so many vectors: one vector for each, or two to four where there would be too many threads.

    Blocks with more of a thread take turns, which is slower: 512 rows of 392 to 800 numbers that come one by one or by
    four take 0.92 to 0.97 by threads of up to 4, forward 256 of 12,544 float16 numbers 0.94. But where these do not all
    run at once, fewer with 8 have less to wait for: forward 1024 rows of 784 numbers that come one by one take 1.17 by
    256 threads of 4, backward 0.95; and backward 256 of 6272 float16 numbers 1.12 by 512 threads. Many rows of up to 64
    vectors are better by one warp, or less of it: 1024 of 512 float16 numbers take as long by 64 threads or up to 1.06,
    few 0.97 to 1.00.
    """
    many, forward = rows_per_multiprocessor > _MANY, isinstance(problem, ForwardProblem)
    threads = threads_for(vectors, _FEW_VECTORS)
    light = forward or vector_width(problem) * problem.itemsize < 8
    at_once = _AT_ONCE if forward else _AT_ONCE_BACKWARD
    if threads > (_MOST_THREADS if light else _SOME_THREADS) or threads * rows_per_multiprocessor > at_once:
        threads = threads_for(vectors, _MOST_VECTORS)
    return max(threads, min(_WARP if many else _SOME_THREADS, threads_for(vectors, 1)))


def _are_better_slabs(problem: Problem, device: Device, vectors: int, vector_bytes: int) -> bool:
    """Whether rows of so many vectors take less time as slabs.

    Backward 1024 rows of 1568 numbers that come one by one take 1.08 of it, 512 of float16 0.84, 256 of 3136 vectors of
    8 bytes 1.05. Forward 128 and 256 of 3136 numbers that come one by one take 0.70 to 0.81, 512 rows of 8192 float32
    numbers 1.08, as slabs 0.95 of a copy's time; 256 of 2.25 MB in all 0.96. 32 rows of 4096 vectors of 16 bytes 1.09.
    """
    forward = isinstance(problem, ForwardProblem)
    if problem.rows < _LEAST_ROWS_OF_LONG and vectors > _LONG:
        return True
    if vector_bytes == 16:
        return forward and problem.rows * problem.columns * problem.itemsize > _MOST_BYTES
    many = _MANY + (vector_bytes < 8)
    if not forward and problem.rows > many * device.multiprocessors:
        return vectors > _MOST_OF_MANY
    some = vector_bytes == 8 or problem.rows <= 2 * device.multiprocessors
    return vectors > (_MOST_FORWARD if forward and some else _MOST_NARROW)


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
