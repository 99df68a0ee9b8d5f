"""Many short rows, forward, that come and leave as runs of memory, a row a thread and a run a block.

As a run rows are read and written in whole pieces of 16 bytes, by way of shared memory, and a row's sums are one
thread's own. Blocks that take turns over runs have a fixed share of them, and wait for the slowest multiprocessor; a
block for each run is as quick as a copy, as long as the last wave of them is a small part of all.

The numbers are of an H200, as the time over that of a copy of the same bytes, of 134 MB of x. Where memory is slower it
was not timed, and rows lie as they did (see row_short.py).
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits
from cunorm.plan.row_memory import are_shifted
from cunorm.plan.row_weights import are_wide
from cunorm.problem import ForwardProblem

__all__ = ["row_a_thread"]

_BLOCK_THREADS = 128
# Waves of blocks, at least. Rows of 10 float32 numbers take 1.10 of their time in turns where they are 1.5 waves, 1.00
# where 5, 0.96 where 16; those of 36 float16 numbers 1.01 of their time by two threads each where 2, 0.94 where 7.
_LEAST_WAVES = 4
# By itemsize, vector and kind: how many vectors a row has, at least and at most. Shorter ones are better read directly,
# longer ones by several threads, which keep what they have in fewer registers.
_VECTORS = {
    (2, 1): {"plain": (7, 45), "light": (7, 45), "residual": (5, 37), "activated": (9, 45), "both": (5, 45)},
    (2, 2): {"plain": (9, 31), "light": (7, 31), "residual": (5, 23), "activated": (9, 25), "both": (5, 21)},
    (2, 4): {"plain": (7, 11), "light": (5, 19), "residual": (5, 11), "activated": (11, 11)},
    (2, 8): {"light": (3, 9), "residual": (3, 3), "activated": (3, 3)},
    (4, 1): {"plain": (7, 31), "light": (5, 31), "residual": (5, 31), "activated": (7, 31), "both": (5, 31)},
    (4, 2): {"plain": (5, 13), "light": (5, 19), "residual": (5, 9), "activated": (5, 19), "both": (5, 11)},
    (4, 4): {"plain": (3, 5), "light": (2, 5), "residual": (2, 5), "activated": (2, 5), "both": (3, 5)},
}


def row_a_thread(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """How rows of vectors of `width` lie over blocks, if they had better come as runs; else None.

    float32: 7, 10, 12, 14, 20 and 31 columns take 1.00, 1.00, 0.99, 0.99, 1.03 and 1.02 so, otherwise 1.12, 1.03, 1.09,
    1.06, 1.09 and 1.34; under silu 10 and 12 1.06 and 1.04, otherwise 1.17 and 1.50. float16: 9, 18, 25, 36 and 42 take
    1.42, 1.12, 1.28, 1.03 and 1.04, otherwise 1.72, 1.27, 1.40, 1.14 and 1.14; 22 with float32 weights 1.08 and 2.74;
    RMS norm of 14 and 62 1.03 and 1.01, otherwise 1.21 and 1.24; with a residual 5, 10, 14 and 24 1.47, 1.06, 1.02 and
    1.00, otherwise 1.69, 1.25, 1.75 and 1.45. Of 422 such none takes more than 1.04 of the time before, all 0.89.
    """
    least, most = _VECTORS.get((problem.itemsize, width), {}).get(_kind(problem), (1, 0))
    vectors = problem.columns // width
    if not least <= vectors <= most or not device.has_fast_memory or problem.channels is not None:
        return None
    # Of whole pieces of 16 bytes, each thread's begins in another bank of shared memory if they are odd.
    if vectors % 2 == 0 and vectors > 2:
        return None
    if are_shifted(problem) or any(matrix.row_strides[0] != problem.columns for matrix in problem.matrices):
        return None
    share = min(_blocks_at_once(problem, device, width), device.threads_per_multiprocessor // _BLOCK_THREADS)
    # Rows of float32 and of a residual take many registers: 29 columns take 1.11 by one thread, by two 1.01.
    threads = 2 if problem.itemsize == 4 and problem.residual is not None and problem.columns > 24 else 1
    rows = _BLOCK_THREADS // threads
    geometry = RowBlock(width, -(-vectors // threads), threads, rows, 1, "run", min_blocks=share)
    many = problem.rows >= _LEAST_WAVES * share * rows * device.multiprocessors
    return geometry if many and fits(geometry, problem, device) else None


def _kind(problem: ForwardProblem) -> str:
    """What is computed for a row; little for a light one, which is of RMS norm or has neither weight nor bias."""
    if problem.norm.activation is not None:
        return "activated" if problem.residual is None else "both"
    if problem.residual is not None:
        return "residual"
    return "plain" if problem.norm.centered and problem.parameters else "light"


def _blocks_at_once(problem: ForwardProblem, device: Device, width: int) -> int:
    """Blocks that share a multiprocessor: as many as leave each the registers for its rows, on sm_90 and sm_100.

    10 columns of float32 take 0.99 by 12 and 1.03 by 8, 20 1.05 and 1.01. 31 of float16 take 1.16 by 8 and 1.39 by 5,
    but 62, pairs of which share a register, 1.22 and 1.10.
    """
    registers = problem.columns // (2 if problem.itemsize == 2 and width > 1 else 1)
    registers += 5 * (problem.residual is not None) + 2 * are_wide(problem) + 3 * (device.capability > 90)
    if registers < (10 if width == 1 else 9) and problem.norm.activation != "gelu":
        return 16
    if registers <= {1: 17, 2: 13}.get(width, 11):
        return 12
    if width == 1:
        return 8 if registers < 38 else 7
    return 8 if registers < 26 else 5
