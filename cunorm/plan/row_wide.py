"""Rows of sixteen-bit numbers with wider weights, forward: float32 ones, as in mixed precision.

Weight and bias of a row are four times its bytes then, and come to each block through the cache. Where rows are long,
or no more than a few for each thread, blocks had better take turns over them and keep their weights in registers, while
the next row is on its way: 24 MB of 4096 bfloat16 numbers take 1.02 so, else 1.25.

The numbers are of an H200, as the time over that of a copy of the same bytes, of layer norm with float32 weight and
bias where nothing else is said. Where memory is slower none was timed, and rows lie as they did (see row_geometry.py).
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import crowded, fits, that_fits
from cunorm.plan.row_memory import are_shifted
from cunorm.plan.row_spread import threads_for
from cunorm.plan.row_weights import are_wide
from cunorm.problem import DTYPES, ForwardProblem

__all__ = ["wide_row"]

# Columns, at least and at most, of what was timed.
_LEAST, _MOST = 256, 32_768
# Columns, at least, of RMS norm, and of layer norm with a residual: shorter ones have enough else to wait for.
_LEAST_OF_OTHERS = 5120
# Columns from which on RMS norm is better off so with any number of rows, by more threads of up to so many vectors.
_LONG_OF_RMS, _MOST_OF_RMS, _THREADS_OF_RMS = 16_384, 6, 512
# Columns from which on many rows of layer norm had better have half the vectors of twice the threads.
_LONG_OF_MANY = 8192
# By the vectors of a thread, how many threads of a multiprocessor have room for them and their weights in registers.
_THREADS = {3: 512, 4: 512, 5: 384, 6: 384, 7: 256, 8: 256}
# Vectors of a row up to which a thread has no more than four, and from which on two blocks share it.
_FOUR_UP_TO, _SHARED_FROM = 64, 1025
# Turns: more than the first are worth a second row ahead; from the second on rows are claimed (see row_block.py).
_FEW_TURNS, _CLAIMED_TURNS = 2, 8
# Columns, at most, and turns from which on such rows are as well off without.
_MANY_TURNS = ((1536, 8), (5119, 16))
# Threads of a block of short rows.
_SHORT_THREADS = 128


def wide_row(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """How rows of vectors of `width` lie over threads where their weights are wider; None where others know better."""
    timed = problem.itemsize == 2 and are_wide(problem) and device.has_fast_memory and device.capability == 90
    timed = timed and all(DTYPES[item.dtype].itemsize <= 4 for item in problem.parameters)
    # Under an activation 8 to 40 bytes would spill.
    plain = problem.channels is None and problem.norm.activation is None and not are_shifted(problem)
    if not timed or not plain:
        return None
    if width == 4:
        return _short_row(problem, device, width)
    return _long_row(problem, device, width) if width == 8 and problem.columns <= _MOST else None


def _long_row(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of whole vectors: 132 problems of 256 to 32,768 columns and 4 to 134 MB take 0.88 of their time.

    8, 24 and 134 MB of 4096 columns take 1.03, 1.02 and 1.05, else 1.21, 1.25 and 1.06; of 8192 1.05, 1.04 and 1.04,
    else 1.25, 1.29 and 1.13; 24 and 134 MB of 1000 0.96 and 1.00, else 1.24 and 1.14, of 32,768 1.10 and 1.10, else
    1.63 and 1.29. RMS norm has half the weights: 24 MB of 8192 take 1.00, else 1.24, but 134 MB 1.05, else 1.03, and of
    fewer columns 1.00 to 1.07 of their time. Of 16,384 and more it takes 0.94 of its time by twice the threads: 59
    norms of 12 to 256 MB 0.73 to 1.02. Some of these had seven vectors of each thread, which would spill 16 to 24
    bytes: 32 to 128 MB of 28,672 take 0.82 to 0.98 by half of them, by seven 0.75 to 0.97. With a residual 24 MB of
    8192 take 1.07, else 1.13, of 32,768 1.08, else 1.41, but 8 MB of 4096 1.05, else 1.02.
    """
    both, alone = len(problem.parameters) == 2, problem.residual is None
    long_of_rms = alone and not both and problem.columns >= _LONG_OF_RMS
    least = _LEAST if both and alone else _LEAST_OF_OTHERS
    if problem.columns < least or not (both or alone):
        return None
    vectors_per_row = problem.columns // width
    blocks = 2 if vectors_per_row >= _SHARED_FROM else 1
    of_block = -(-vectors_per_row // blocks)
    most = 4 if vectors_per_row <= _FOUR_UP_TO else _MOST_OF_RMS if long_of_rms else max(_THREADS)
    threads = threads_for(of_block, most)
    vectors = -(-of_block // threads)
    if vectors == 6 and blocks == 1:
        threads, vectors = 2 * threads, 3
    rows = max(1, 64 // threads)
    share = max(1, (_THREADS_OF_RMS if long_of_rms else _THREADS[vectors]) // (threads * rows))
    if not device.groups(blocks):
        return None
    turns = problem.rows / (rows * share * device.groups(blocks))
    if turns <= 1 or problem.rows <= 2 * device.multiprocessors:
        return None
    if turns > _CLAIMED_TURNS and not ((both and alone) or long_of_rms):
        return None
    if turns > _CLAIMED_TURNS and vectors == 8 and problem.columns >= _LONG_OF_MANY:
        threads, vectors = 2 * threads, 4
    if any(problem.columns <= columns and turns > many for columns, many in _MANY_TURNS):
        return _of_many(problem, device, width)
    ahead = 2 if _FEW_TURNS < turns < _CLAIMED_TURNS else 1
    geometry = RowBlock(width, vectors, threads, rows, blocks, "ahead", False, "early", share, rows_ahead=ahead)
    return that_fits(geometry, problem, device)


def _of_many(problem: ForwardProblem, device: Device, width: int) -> RowBlock:
    """Short rows of which there are many: read directly, and the cache keeps their weights.

    134 MB of 384, 768, 1024 and 1536 columns take 0.99, 0.99, 0.99 and 1.01 so, in turns 1.02, 1.02, 1.01 and 1.02;
    48 MB of 1536 0.99 and 1.16.
    """
    vectors_per_row = problem.columns // width
    threads = threads_for(vectors_per_row, 5)
    geometry = RowBlock(width, -(-vectors_per_row // threads), threads, max(1, 64 // threads))
    return crowded(geometry, problem, device)


def _short_row(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Short rows of vectors of 8 bytes.

    134 MB of 52, 84, 100 and 116 columns take 1.15, 1.13, 1.10 and 1.11 so, else 1.31, 1.36, 1.36 and 1.15; RMS norm
    1.00 to 1.05 of its time.
    """
    vectors_per_row = problem.columns // width
    if not 13 <= vectors_per_row <= 31 or problem.residual is not None or len(problem.parameters) < 2:
        return None
    threads, weights, share = (4, "early", 6) if vectors_per_row <= 16 else (8, "staged", 8)
    vectors, rows = -(-vectors_per_row // threads), _SHORT_THREADS // threads
    share = min(share, device.threads_per_multiprocessor // _SHORT_THREADS)
    geometry = RowBlock(width, vectors, threads, rows, 1, "ahead", False, weights, share)
    many = problem.rows >= rows * share * device.multiprocessors
    return geometry if many and fits(geometry, problem, device) else None
