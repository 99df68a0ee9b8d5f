"""Rows of one channel each, those of instance norm, that blocks read directly, each its own rows.

A channel has one weight, and what is summed leaves with each row: so there is nothing that a block could keep from one
row to the next, and many small blocks wait for memory at different times. The numbers are of an H100, as the time over
that of rows which lie like others.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd
from cunorm.plan.row_memory import lie_alike, vector_width
from cunorm.plan.row_spread import leave_threads_idle, threads_for
from cunorm.problem import ForwardProblem, Problem

__all__ = ["geometry"]

_WARP, _BLOCK_THREADS = 32, 128
# Vectors of a thread, of few short rows; of other rows, of up to so many vectors; and of longer ones.
_MOST_OF_FEW = 2
_SOME_VECTORS, _MOST_SHORT = 2, 512
_MORE_VECTORS, _MOST_LONG = 4, 1024
# Threads of a multiprocessor that have registers for some, and for more.
_CROWD, _CROWD_OF_LONG = 1024, 512
# Numbers of a row that is short forward, at most, by the bytes of each.
_MOST_SHORT_NUMBERS = {2: 128, 4: 256}
# Numbers that come one by one: of a row, at most, and of a thread.
_MOST_NUMBERS, _NUMBERS, _SIXTEEN_BIT_BACKWARD = 64, 4, 8


def geometry(problem: Problem, device: Device) -> RowBlock | None:
    """How they lie over threads; None for others."""
    if problem.channels is None or problem.channels.channels_per_row > 1 or problem.columns == 0:
        return None
    width = vector_width(problem)
    vectors = problem.columns // width
    if vectors <= _MOST_OF_FEW * _WARP and leave_threads_idle(problem, device, vectors):
        found: RowBlock | None = _few_short(problem, width, vectors)
    elif problem.itemsize == 8 or device.capability != 90:
        return None  # as others do, where this was not timed
    elif width == 1 and problem.columns <= _MOST_NUMBERS:
        found = _numbers(problem)
    else:
        found = (_forward if isinstance(problem, ForwardProblem) else _backward)(problem, width)
    while found is not None and found.min_blocks > 1 and not fits_crowd(found, problem, device, found.min_blocks):
        found = replace(found, min_blocks=found.min_blocks - 1)
    return found if found is not None and fits(found, problem, device) else None


def _few_short(problem: Problem, width: int, vectors: int) -> RowBlock:
    """Few short rows, by a warp or less.

    What a norm so small takes is no time to move numbers, but the launch, one way to the memory and back, and
    instructions one after the other: threads with fewer numbers have fewer, and a warp has no others to wait for.
    Instance norms, of which each thread of the device would have half a vector or less, take 0.96 on average, 0.90 to
    1.01: 4 x 64 x 14^2 float16 numbers 0.94 forward and backward, under gelu 0.91 and 0.93; 16 x 128 x 7^2 float32
    numbers 0.90 and 0.98; 32 x 64 x 14^2 float16 numbers 0.94 and 0.94.
    """
    threads = min(_WARP, threads_for(vectors, 1))
    rows = _BLOCK_THREADS // threads
    while rows * threads > _WARP and rows >= 2 * problem.rows:
        rows //= 2
    return RowBlock(width, -(-vectors // threads), threads, rows)


def _backward(problem: Problem, width: int) -> RowBlock | None:
    """Two vectors of a thread, of longer rows up to four; None for rows longer than that.

    Fetched ahead by blocks that take turns they took longer: 90 instance norms of 0.8 to 50 MB take 0.91 on average,
    0.77 to 1.03, 64 x 256 x 28^2 float16 numbers 0.87, under silu 0.91; 32 x 128 x 64^2 0.97 and 0.89; 256 x 256 x 14^2
    float32 numbers 0.93 and 0.84. So do those that begin anywhere: 64 x 256 x 17^2 float16 numbers 0.83 and 0.90.
    """
    peeled = width * problem.itemsize < 8
    if peeled and not _have_pieces(problem):
        return None
    width = 16 // problem.itemsize if peeled else width
    vectors = problem.columns // width
    if vectors > (_MOST_SHORT if peeled else _MOST_LONG):
        return None
    short = vectors <= _MOST_SHORT
    each = _SOME_VECTORS if short else _MORE_VECTORS
    return _spread(width, vectors, threads_for(vectors, each), _CROWD if short else _CROWD_OF_LONG, peeled)


def _forward(problem: Problem, width: int) -> RowBlock | None:
    """Rows that begin anywhere, up to four vectors of a thread, and two of short ones; None for others.

    With more than four a kernel is compiled for turns: 16 x 128 x 31^2 float16 numbers take 0.83 of that, 16 x 256 x
    21^2 0.92, of float32 0.89; 64 x 256 x 9^2 of float16 0.89, under silu 0.87. But short ones of float32 1.00 to 1.03.
    """
    if width * problem.itemsize >= 8 or not _have_pieces(problem):
        return None
    width, short = 16 // problem.itemsize, problem.columns <= _MOST_SHORT_NUMBERS[problem.itemsize]
    vectors = problem.columns // width
    if vectors > _MOST_SHORT or (short and problem.itemsize > 2):
        return None
    return _spread(width, vectors, threads_for(vectors, _SOME_VECTORS if short else _MORE_VECTORS), _CROWD, True)


def _have_pieces(problem: Problem) -> bool:
    """Whether rows have whole pieces of 16 bytes, the same in all tensors, and not too few."""
    return problem.columns > _MOST_NUMBERS and lie_alike(problem)


def _numbers(problem: Problem) -> RowBlock:
    """Short rows of numbers that come one by one.

    With 8 of a thread the kernel is compiled for turns, and takes one. 64 x 256 x 7^2 numbers of
    float16 take 0.93 forward and 0.92 backward, of float32 0.98 and 0.92; 256 x 512 x 7^2 of float16 under silu 0.81
    and 0.90.
    """
    forward = isinstance(problem, ForwardProblem)
    each = _SIXTEEN_BIT_BACKWARD if problem.itemsize == 2 and not forward else _NUMBERS
    threads = threads_for(problem.columns, each)
    return _spread(1, problem.columns, threads, _CROWD if forward else _CROWD_OF_LONG, False)


def _spread(width: int, vectors: int, threads: int, crowd: int, peeled: bool) -> RowBlock:
    """Several rows a block, if they are short, and registers for a ``crowd`` of threads on a multiprocessor."""
    rows = max(1, _BLOCK_THREADS // threads)
    each = -(-vectors // threads)
    return RowBlock(width, each, threads, rows, peeled=peeled, min_blocks=max(1, crowd // (rows * threads)))
