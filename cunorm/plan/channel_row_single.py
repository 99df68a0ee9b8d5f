"""Few short rows of one channel each, those of small instance norms: by a warp or less.

What a norm so small takes is no time to move numbers, but the launch, one way to the memory and back, and instructions
one after the other: threads with fewer numbers have fewer, and a warp has no others to wait for.
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits
from cunorm.plan.row_memory import vector_width
from cunorm.plan.row_spread import leave_threads_idle, threads_for
from cunorm.problem import Problem

__all__ = ["few_short"]

_WARP, _BLOCK_THREADS = 32, 128
_MOST_VECTORS = 2  # of a thread


def few_short(problem: Problem, device: Device) -> RowBlock | None:
    """How they lie over threads; None for others.

    On an H100 instance norms, of which each thread of the device would have half a vector or less, take 0.96 of the
    time of other rows on average, 0.90 to 1.01: 4 x 64 x 14^2 float16 numbers 0.94 forward and backward, under gelu
    0.91 and 0.93; 16 x 128 x 7^2 float32 numbers 0.90 and 0.98; 32 x 64 x 14^2 float16 numbers 0.94 and 0.94.
    """
    if problem.channels is None or problem.channels.channels_per_row > 1 or problem.columns == 0:
        return None
    width = vector_width(problem)
    vectors = problem.columns // width
    if vectors > _MOST_VECTORS * _WARP or not leave_threads_idle(problem, device, vectors):
        return None
    threads = min(_WARP, threads_for(vectors, 1))
    rows = _BLOCK_THREADS // threads
    while rows * threads > _WARP and rows >= 2 * problem.rows:
        rows //= 2
    found = RowBlock(width, -(-vectors // threads), threads, rows)
    return found if fits(found, problem, device) else None
