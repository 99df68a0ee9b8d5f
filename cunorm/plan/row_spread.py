"""How many threads a row takes, and how many rows a block."""

from __future__ import annotations

import math

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits_registers
from cunorm.plan.row_memory import row_width
from cunorm.problem import Problem

__all__ = [
    "MOST_THREADS",
    "leave_threads_idle",
    "more_threads",
    "of_few",
    "rows_per_block",
    "spread",
    "threads_for",
    "three_ahead",
    "vectors_for_all_threads",
]

# Threads of a block that holds one long row, or a part of it. A thousand would leave each too few registers.
MOST_THREADS = 512


def spread(vectors_per_row: int, least_vectors: float) -> tuple[int, int]:
    """Threads, as many as leave each ``least_vectors``, and vectors of each."""
    threads = min(MOST_THREADS, 1 << max(1, int(vectors_per_row / max(1, least_vectors))).bit_length() - 1)
    return threads, -(-vectors_per_row // threads)


def threads_for(vectors_per_row: int, most_vectors: float) -> int:
    """As few threads as leave none more than ``most_vectors``."""
    return 1 << (max(1, math.ceil(vectors_per_row / most_vectors)) - 1).bit_length()


def three_ahead(width: int, vectors_per_row: int, threads: int) -> RowBlock:
    """Short rows, two ahead, by three blocks of 128 threads a multiprocessor that have the weights in registers."""
    return RowBlock(
        width,
        -(-vectors_per_row // threads),
        threads,
        128 // threads,
        stage="ahead",
        weights="early",
        blocks_per_multiprocessor=3,
        rows_ahead=2,
        min_blocks=3,
    )


def more_threads(problem: Problem, device: Device, wanted: tuple[int, int], block_threads: int) -> tuple[int, int]:
    """Threads of a row and vectors of each: as `spread` has them, or more threads where registers would not do."""
    width, (threads, vectors) = row_width(problem), wanted
    while threads < MOST_THREADS and not fits_registers(problem, device, width, vectors, max(threads, block_threads)):
        threads *= 2
        vectors = -(-problem.columns // width // threads)
    return threads, vectors


def rows_per_block(problem: Problem, device: Device, wanted: int, threads: int) -> int:
    """Several rows a block only where every multiprocessor has a block; but two warps at least."""
    rows = max(1, 64 // threads, min(wanted, problem.rows // device.multiprocessors))
    return 1 << rows.bit_length() - 1


def of_few(problem: Problem, device: Device, vectors_per_row: int, vectors: float) -> float:
    """So many vectors of a thread, or fewer where rows are few, so that threads wait for as little as can be.

    On an H100 1 to 256 rows of 145, 1023 and 4097 bfloat16 numbers take 0.72 to 0.78, 0.70 to 0.77 and 0.84 to 0.90 of
    the time so, forward, under silu 8 and 256 of 257 to 4097 0.73 to 0.98; of float32 0.88 to 1.00. So do more of which
    each thread of the device has half a vector or less: 63 norms of 300 to 4096 rows of 129 to 2049 numbers take 0.89
    on average, 0.73 to 1.00; with up to one vector 0.93 to 1.13. Backward as many are faster for it as slower, 256 of
    4097 under the exact gelu by a third.
    """
    if problem.rows > 2 * device.multiprocessors and not leave_threads_idle(problem, device, vectors_per_row):
        return vectors
    return min(vectors, max(1.0, 2 * vectors_for_all_threads(problem, device, vectors_per_row)))


def vectors_for_all_threads(problem: Problem, device: Device, vectors_per_row: int) -> float:
    """How many vectors each thread has where all threads that the device can hold have some."""
    return problem.rows * vectors_per_row / (device.multiprocessors * device.threads_per_multiprocessor)


def leave_threads_idle(problem: Problem, device: Device, vectors_per_row: int) -> bool:
    """Whether no more than every second thread that the device can hold would have a vector."""
    return vectors_for_all_threads(problem, device, vectors_per_row) <= 0.5
