"""Long rows that clusters of small blocks share, and that come ahead: where that is better than what holds them else.

A block for each row has all its numbers on their way at first, and at the end none: of 200 long rows half of the
multiprocessors have two and the others one. Forward, shared by two, four or eight blocks of 128 threads, six or eight
of which a multiprocessor has, rows are spread evenly, and while some are summed others arrive. Backward, several blocks
that share a row leave fewer partial sums than such that have rows of their own. RMS norm with a residual, of rows that
a small block can hold, keeps a block for each, with its weights beside it.

The numbers are of an H200, as the time over that of a copy of the same bytes. Where memory is slower none was timed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits_crowd, that_fits
from cunorm.plan.row_memory import are_shifted, can_be_shared
from cunorm.plan.row_weights import are_wide
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["clusters_backward", "clusters_forward"]

_THREADS = 128  # of a block, where nothing else is said
# Vectors of a row, at most, of what was timed: forward, of RMS norm alone, and backward of a single row.
_MOST, _MOST_OF_RMS, _MOST_OF_SINGLE = 4096, 7168, 3072


class _Range(NamedTuple):
    """From how many vectors of a row on they are better off so, and up to how many rows for each multiprocessor."""

    least_vectors: int
    most_rows: float


class _Way(NamedTuple):
    """How rows of so many vectors lie, if there are more for each multiprocessor than the least, up to the most."""

    vectors_per_row: range
    blocks_per_row: int
    threads_per_row: int
    blocks_per_multiprocessor: int
    least_rows: float
    most_rows: float = math.inf


# Forward, of layer norm of sixteen-bit numbers. 1260 and 5041 rows of 26,624 columns take 1.04 and 1.06 so, else 1.10
# and 1.23, of 28,672 1.04 and 1.04, else 1.08 and 1.02, of 30,720 1.04 and 1.04, else 1.10 and 1.09; with a residual
# of 26,624 1.06 and 1.03, else 1.21 and 1.09, of 28,672 1.05 and 1.04, else 1.10 and 1.06, of 30,720 1.05 and 1.04,
# else 1.28 and 1.17.
_LONG = _Way(range(3073, 4096), 4, 256, 3, 8)
_LONG_WITH_RESIDUAL = _Way(range(3073, 4096), 2, 512, 1, 6)
# Backward, two rows ahead and with weights that come early. 2520 and 10,082 rows of 13,312 columns take 1.21 and 1.02
# so, else 1.24 and 1.08; 9362 of 14,336 1.03, else 1.09; 1927 and 7710 of 17,408 1.16 and 1.03, else 1.23 and 1.09;
# 1820 and 7281 of 18,432 1.23 and 1.03, else 1.29 and 1.08; 1489 of 22,528 1.15, else 1.22; 1260 of 26,624 1.24, else
# 1.32; 1170 of 28,672 1.22, else 1.35; 1092 and 4369 of 30,720 1.21 and 1.04, else 1.34 and 1.08. But 20,480 columns
# take 1.27 and 1.09 by four blocks of 128 threads, by pairs of 256 1.29 and 1.06. RMS norm, which was not timed, lies
# as layer norm does.
_BACKWARD = (
    _Way(range(1537, 1857), 2, 256, 1, 16),
    _Way(range(2112, 2433), 4, 128, 2, 12),
    _Way(range(2689, 3713), 8, 128, 2, 5, 12),
    _Way(range(3713, 4096), 8, 128, 2, 5),
)


def _are_timed(problem: Problem, device: Device, width: int) -> bool:
    fast = device.capability == 90 and device.has_fast_memory and problem.itemsize <= 4
    plain = problem.channels is None and bool(problem.parameters) and not are_wide(problem)
    return fast and plain and width * problem.itemsize == 16 and not are_shifted(problem)


def _blocks_for(problem: Problem, device: Device, width: int, most: int) -> int:
    """How many blocks leave a thread no more vectors than that: two, four or eight; 0 where those can't share a row."""
    blocks = next((blocks for blocks in (2, 4, 8) if problem.columns // width <= blocks * _THREADS * most), 0)
    return blocks if blocks and device.groups(blocks) and can_be_shared(problem, blocks, width) else 0


def _laid(problem: Problem, device: Device, width: int, way: _Way, weights: str, rows_ahead: int) -> RowBlock | None:
    """The geometry of a way; None for other rows."""
    vectors_per_row, rows = problem.columns // width, problem.rows / device.multiprocessors
    if vectors_per_row not in way.vectors_per_row or not way.least_rows < rows <= way.most_rows:
        return None
    _, blocks, threads, share, *_ = way
    if not device.groups(blocks) or not can_be_shared(problem, blocks, width):
        return None
    vectors = -(-vectors_per_row // (blocks * threads))
    return RowBlock(width, vectors, threads, 1, blocks, "ahead", False, weights, share, rows_ahead)


def clusters_forward(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None for rows that take longer so, and where it was not timed.

    Layer norm of 140, 264, 512 and 1024 rows of 8192 bfloat16 numbers takes 1.28, 1.15, 1.06 and 1.01 so, else 1.28,
    1.17, 1.08 and 1.08; of 12,288 1.26, 1.14, 1.02 and 1.00, else 1.63, 1.38, 1.10 and 1.08; of 16,384 1.19, 1.07, 1.01
    and 0.99, else 1.60, 1.34, 1.17 and 1.13; of 32,768 1.15, 1.06, 1.00 and 1.10, else 1.70, 1.40, 1.24 and 1.15. RMS
    norm of 264 and 512 rows of 16,384 0.99 and 0.99, else 1.20 and 0.96; of 910 of 36,864 1.01, else 1.12. With a
    residual layer norm of 264 and 512 of 12,288 1.03 and 1.06, else 1.22 and 1.10. Under silu 1.23 and 1.18, else 1.47
    and 1.28. Of float32 264 and 512 of 16,384 take 0.97 and 0.95, else 1.22 and 1.16.
    """
    if not _are_timed(problem, device, width) or problem.rows <= device.multiprocessors:
        return None
    plain = problem.itemsize == 2 and problem.norm.activation is None
    if plain and problem.norm.centered:
        way = _LONG if problem.residual is None else _LONG_WITH_RESIDUAL
        geometry = _laid(problem, device, width, way, "staged", 1)
        if geometry is not None:
            return that_fits(geometry, problem, device)
    vectors_per_row, rows = problem.columns // width, problem.rows / device.multiprocessors
    is_rms_alone = plain and problem.residual is None and not problem.norm.centered
    if vectors_per_row > (_MOST_OF_RMS if is_rms_alone else _MOST):
        return None
    if any(vectors_per_row >= known.least_vectors and rows <= known.most_rows for known in _ranges(problem)):
        # Of few rows each had better have more blocks, whose threads have less to do. Seven vectors are for the longest
        # rows of RMS norm, and for a GPU without clusters of eight blocks.
        blocks = _blocks_for(problem, device, width, 5 if rows <= 2 else 6) or _blocks_for(problem, device, width, 7)
        if not blocks:
            return None
        vectors = -(-vectors_per_row // (blocks * _THREADS))
        light = problem.residual is None and problem.norm.activation is None
        share = 8 if vectors <= 3 and light else 6
        geometry = RowBlock(width, vectors, _THREADS, 1, blocks, "ahead", False, "staged", share)
        return that_fits(geometry, problem, device) if fits_crowd(geometry, problem, device, share) else None
    return _by_one_block(problem, device, width)


def _ranges(problem: ForwardProblem) -> tuple[_Range, ...]:
    """Where clusters are better."""
    sixteen_bit, residual, centered = problem.itemsize == 2, problem.residual is not None, problem.norm.centered
    if problem.norm.activation is not None:
        timed = sixteen_bit and not residual and problem.norm.activation in ("relu", "silu")
        return (_Range(1024, 8),) if timed else ()
    if not sixteen_bit:
        return () if residual else (_Range(1280, 8),)
    if residual:
        return (_Range(896 if centered else 1025, 6),)
    return (_Range(896, 16),) if centered else (_Range(1280, 8), _Range(1024, 4))


def _by_one_block(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """RMS norm of up to 1024 vectors with a residual: a block for every row, whose weights come beside it.

    640 rows of 4096, 5120, 7168 and 8192 bfloat16 numbers take 0.99, 0.96, 0.95 and 1.00 so, late 1.02, 1.04, 0.97 and
    1.12; 320 1.04, 1.01, 1.02 and 0.95, late 1.07, 1.07, 1.10 and 1.03; 1536 1.01, 1.00, 1.03 and 1.02, late 1.05,
    1.07, 1.06 and 1.04.
    """
    vectors_per_row = problem.columns // width
    plain = problem.residual is not None and problem.norm.activation is None and not problem.norm.centered
    if not plain or problem.itemsize != 2 or not 512 <= vectors_per_row <= 1024:
        return None
    if problem.rows > 16 * device.multiprocessors:
        return None
    geometry = RowBlock(width, -(-vectors_per_row // _THREADS), _THREADS, weights="staged", min_blocks=4)
    return that_fits(geometry, problem, device)


def clusters_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same backward, of sixteen-bit numbers, where dweight or dbias are wanted."""
    wanted = problem.dx is not None and bool(problem.sums)
    plain = problem.itemsize == 2 and problem.norm.activation is None and wanted
    if not plain or not _are_timed(problem, device, width):
        return None
    if problem.rows == 1:
        return _single_row(problem, device, width)
    of_two = _of_two_vectors(problem, device, width)
    if of_two is not None or problem.dresidual_out is not None:
        return of_two
    ways = (_laid(problem, device, width, way, "early", 2) for way in _BACKWARD)
    geometry = next((geometry for geometry in ways if geometry is not None), None)
    return None if geometry is None else that_fits(geometry, problem, device)


def _of_two_vectors(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of up to 2048 vectors, of which there are not many: two for each thread.

    Layer norm of 1024 and 2048 rows of 5120 bfloat16 numbers takes 1.43 and 1.28 so, else 1.67 and 1.36, of 6144 1.36
    and 1.25, else 1.64 and 1.40, of 8192 1.49 and 1.27, else 1.57 and 1.31; of 512 and 1024 of 12,288 1.52 and 1.33,
    else 1.70 and 1.43. RMS norm of 512 and 2048 of 8192 1.43 and 1.14, else 1.59 and 1.23. With a residual layer norm
    of 1024 and 4096 of 8192 1.39 and 1.14, else 1.50 and 1.25, of 16,384 1.28 and 1.07, else 1.46 and 1.14.
    """
    vectors_per_row, rows = problem.columns // width, problem.rows / device.multiprocessors
    residual, centered = problem.dresidual_out is not None, problem.norm.centered
    blocks = _blocks_for(problem, device, width, 2)
    if vectors_per_row < 640 or not blocks:
        return None
    # How many of the threads' vectors there are. Where some are not, each of them has less to keep others busy with.
    filled = vectors_per_row / (2 * _THREADS * blocks)
    least_filled = 0.85 if residual and not centered else 0.7 if residual or not centered else 0.6
    least_rows = 3 if vectors_per_row >= 1280 else 3.5 if filled == 1 and not centered else 6 if residual else 5
    most_rows = 16 if filled < 0.85 else 32 if residual else 24
    if filled < least_filled or not least_rows <= rows <= most_rows:
        return None
    ahead = 1 if residual else 2
    geometry = RowBlock(width, 2, _THREADS, 1, blocks, "ahead", False, "early", 4, rows_ahead=ahead)
    return that_fits(geometry, problem, device)


def _single_row(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """A single row: one of 6144, 8192, 12,288 and 16,384 takes 4.8, 4.7, 4.9 and 4.9 us so, by one block 5.1, 5.4, 6.5
    and 7.1; RMS norm of 12,288 4.5 and 5.6.
    """
    vectors_per_row = problem.columns // width
    blocks = _blocks_for(problem, device, width, 3)
    if not (768 if problem.norm.centered else 1024) <= vectors_per_row <= _MOST_OF_SINGLE or not blocks:
        return None
    geometry = RowBlock(width, -(-vectors_per_row // (blocks * _THREADS)), _THREADS, 1, blocks, weights="early")
    return that_fits(geometry, problem, device)
