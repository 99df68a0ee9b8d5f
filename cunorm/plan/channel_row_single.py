"""Rows of one channel each, those of instance norm, that blocks read directly, each its own rows.

A channel has one weight, and what is summed leaves with each row: so there is nothing that a block could keep from one
row to the next, and many small blocks wait for memory at different times. So it is backward with rows of layer norm
that have no weight and no bias. The numbers are of an H100 where nothing else is said, as the time over that of rows
which lie like others.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd
from cunorm.plan.row_memory import are_shifted, has_several_channels, lie_alike, vector_width
from cunorm.plan.row_spread import leave_threads_idle, threads_for
from cunorm.problem import BackwardProblem, Channels, ForwardProblem, Problem

__all__ = ["geometry"]

_WARP, _BLOCK_THREADS = 32, 128
# Vectors of a thread, of few short rows; of other rows, of up to so many vectors; and of longer ones.
_MOST_OF_FEW = 2
_SOME_VECTORS, _MOST_SHORT = 2, 512
_MORE_VECTORS, _MOST_LONG = 4, 1024
# Rows of so many vectors have three: with two, 4 to 7 of 16 places would be empty.
_BY_THREES = range(9, 13)
# Threads of a multiprocessor that have registers for some, and for more.
_CROWD, _CROWD_OF_LONG = 1024, 512
# Numbers of a row that is short forward, at most, by the bytes of each.
_MOST_SHORT_NUMBERS = {2: 128, 4: 256}
# Numbers that come one by one backward: of a row, at most, by the bytes of each; of a thread; and of one of few.
_MOST_NUMBERS = {2: 64, 4: 96}
_NUMBERS, _NUMBERS_OF_FEW = 8, 4
# Rows of so many sixteen-bit ones come as a run (see row_short.py), but under an activation.
_AS_RUN = range(17, 33)
# Rows of layer norm whose vectors have less than 16 bytes lie as they do with weights, if they are no longer.
_MOST_BYTES_BY_COLUMN = 100


def geometry(problem: Problem, device: Device) -> RowBlock | None:
    """How they lie over threads; None for others."""
    if isinstance(problem, BackwardProblem) and _has_nothing_by_column(problem):
        problem = replace(problem, channels=Channels(1, 1, problem.columns))
    if problem.channels is None or has_several_channels(problem):
        return None
    found = _layout(problem, device)
    while found is not None and found.min_blocks > 1 and not fits_crowd(found, problem, device, found.min_blocks):
        found = replace(found, min_blocks=found.min_blocks - 1)
    return found if found is not None and fits(found, problem, device) else None


def _has_nothing_by_column(problem: BackwardProblem) -> bool:
    """Whether rows of layer norm had better lie as those of a channel.

    On an H200 84 norms of 128 to 4096 columns take 0.95 on average, 0.86 to 1.01: 4096 rows of 768 float32 numbers
    0.86, 131,072 of 256 of bfloat16 0.95. But 50 and 36 columns of bfloat16 1.42 and 1.25, 10 of float32 1.14.
    """
    if problem.channels is not None or not problem.is_bare or problem.dresidual_out is not None:
        return False
    if are_shifted(problem):  # of which a vector is two pieces of 16 bytes, as rows of channels have none
        return False
    short = problem.columns * problem.itemsize <= _MOST_BYTES_BY_COLUMN
    return not (short and vector_width(problem) * problem.itemsize < 16)


def _layout(problem: Problem, device: Device) -> RowBlock | None:
    width = vector_width(problem)
    vectors = problem.columns // width
    if vectors <= _MOST_OF_FEW * _WARP and leave_threads_idle(problem, device, vectors):
        return _few_short(problem, width, vectors)
    if problem.itemsize == 8 or device.capability != 90:
        return None  # as others do, where this was not timed
    if isinstance(problem, ForwardProblem):
        return _forward(problem, width)
    if width == 1 and problem.columns <= _MOST_NUMBERS[problem.itemsize]:
        return _numbers_backward(problem, device)
    return _backward(problem, width)


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
    if vectors <= _MOST_SHORT:
        return _spread(width, vectors, threads_for(vectors, _some(vectors, peeled)), _CROWD, peeled)
    return _spread(width, vectors, threads_for(vectors, _MORE_VECTORS), _CROWD_OF_LONG, peeled)


def _some(vectors: int, peeled: bool) -> int:
    """Vectors of a thread of a row that has so many.

    With three of each 64 x 4096 x 6^2 float16 numbers take 0.92 of the time of two backward on an H200, under silu
    0.85; of float32 1.00 and 0.78.
    """
    return _SOME_VECTORS + (not peeled and vectors in _BY_THREES)


def _forward(problem: ForwardProblem, width: int) -> RowBlock | None:
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
    return problem.columns > _MOST_NUMBERS[2] and lie_alike(problem)


def _numbers_backward(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """Short rows of numbers that come one by one; None where these come as a run.

    With 8 of a thread the kernel is compiled for turns, and takes one. 64 x 256 x 7^2 numbers of float16 take 0.92, of
    float32 0.92, with 8 of each 0.88 on an H200; 256 x 512 x 7^2 of float16 under silu 0.90. There 64 x 1024 x 9^2 of
    float32 take 0.97 of what they do as rows that begin anywhere, under silu 0.90.
    """
    if problem.itemsize == 2 and problem.columns in _AS_RUN and problem.norm.activation is None:
        return None
    threads = threads_for(problem.columns, _NUMBERS)
    if problem.itemsize > 2 and problem.rows * threads < _CROWD_OF_LONG * device.multiprocessors:
        threads = threads_for(problem.columns, _NUMBERS_OF_FEW)
    return _spread(1, problem.columns, threads, _CROWD_OF_LONG, False)


def _spread(width: int, vectors: int, threads: int, crowd: int, peeled: bool) -> RowBlock:
    """Several rows a block, if they are short, and registers for a ``crowd`` of threads on a multiprocessor."""
    rows = max(1, _BLOCK_THREADS // threads)
    each = -(-vectors // threads)
    return RowBlock(width, each, threads, rows, peeled=peeled, min_blocks=max(1, crowd // (rows * threads)))
