"""When the weights of rows come: late, early, or through shared memory (see kernels/row_affine.cuh).

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, fits_early, resident_by_memory
from cunorm.plan.row_spread import MOST_THREADS, vectors_for_all_threads
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["are_wide", "backward_weights", "with_weights"]


def with_weights(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """The geometry, with its weights in the way that is best, and fewer blocks a multiprocessor where that is better.

    Through shared memory they take no registers, and their way from memory passes beside the row's: 2048 rows of 4096
    bfloat16 numbers take 1.03 so, late 1.17; 8192 of 1024 1.05 and 1.13, 512 of 8192 1.06 and 1.12, 32,768 of 4096 1.03
    and 1.04, 1024 of 4096 float32 numbers 0.98 and 1.14. But 512 of 1024, a vector a thread, 1.06 and 1.03 (RMS norm
    1.00, early 0.98; on an H100 layer norm early 0.95 to 0.97 of late). With a residual, which hides it as well, they
    come late (float16 numbers would spill), but where one block has all registers: 4096 of 32,768 take 1.04 staged,
    late 1.20, by two blocks late 1.05.
    """
    if not problem.parameters or device.capability < 80 or _are_better_late(geometry, problem, device):
        return geometry
    early = replace(geometry, weights="early")
    if geometry.vectors == 1:
        wanted = problem.residual is None or not problem.norm.centered
        return early if wanted and fits_early(early, problem, device) else geometry
    if _are_better_early(geometry, problem, device) and fits_early(early, problem, device):
        return early
    staged = replace(geometry, weights="staged")
    if 5 < geometry.vectors < 8 + problem.norm.centered and geometry.threads_per_row < MOST_THREADS:
        # 21,845 rows of 6144 take 1.02 with 80 registers a thread, with 64 1.17.
        staged = replace(staged, min_blocks=blocks_with(staged, 80))
    room = resident_by_memory(staged, problem, device)
    if are_wide(problem):
        # They come through the cache, again for every block, and must leave it a third of the memory: 1024 rows of 4096
        # bfloat16 numbers with float32 weight and bias take 1.22 staged by five blocks, late 1.15. 4096 rows without a
        # bias take 1.05 by eight blocks of 64 threads, late 1.08.
        room = device.shared_bytes * 5 // 8 // staged.shared_bytes(problem)
        if len(problem.parameters) == 1 and staged.threads < 128 and 2 * room >= staged.min_blocks:
            staged = replace(staged, min_blocks=min(staged.min_blocks, room))
    return staged if staged.min_blocks <= room else geometry


def _are_better_early(geometry: RowBlock, problem: ForwardProblem, device: Device) -> bool:
    """Whether the weights of RMS norm had better come to registers, before the sums: where all rows nearly run at once.

    On an H100 4096 rows of 1024 bfloat16 numbers take 0.91 of the time so, 2000 of 2048 0.95, 780 of 4096 0.94, 2100 of
    1024 float32 numbers 0.95; but 5500 of 1024 and 34,000 as long.
    """
    plain = not problem.norm.centered and problem.norm.activation is None and problem.residual is None
    if not plain or geometry.vectors > 4 or device.capability != 90:
        return False
    return vectors_for_all_threads(problem, device, problem.columns // geometry.width) <= 2.5


def _are_better_late(geometry: RowBlock, problem: ForwardProblem, device: Device) -> bool:
    """Whether weights had better not be staged: where that is slower, or would leave too few registers."""
    centered, activation, vectors = problem.norm.centered, problem.norm.activation, geometry.vectors
    if problem.x.dtype == "float64" or (problem.residual is not None and vectors <= 6):
        return True
    # Where there are many rows, the cache of a multiprocessor keeps weights from one row to the next: 13,107 rows of
    # 10,240 take 1.04 late, staged 1.06, 2048 of them 1.12 and 1.07; 8192 of 8192 float32 numbers 1.03 and 1.04. Under
    # silu 16,384 of 8192 take 1.07 and 1.09, 8192 of 1024 1.22 and 1.08.
    waves = problem.rows / (geometry.rows_per_block * geometry.min_blocks * device.multiprocessors)
    most = 3 if geometry.threads_per_row == MOST_THREADS else 4
    long = centered and geometry.threads_per_row > 128 and vectors > most and problem.residual is None
    if vectors > 1 and waves > 4 and (activation is not None or long):
        return True
    # Of 5632 columns (6 vectors, not of all threads) 4096 rows take 1.21, late 1.13; of 6144 1.03 and 1.08.
    if centered and vectors > 5 and geometry.capacity != problem.columns:
        return True
    # With the registers that `crowded` leaves, more vectors would spill 8 to 32 bytes.
    both = len(problem.parameters) == 2
    if activation is not None or (are_wide(problem) and (both or device.capability != 90)):
        return vectors > (3 if activation == "gelu" else 4)
    return centered and not both and vectors > 5


def are_wide(problem: Problem) -> bool:
    """Whether a weight or bias has larger elements than x."""
    return any(DTYPES[item.dtype].itemsize > problem.itemsize for item in problem.parameters)


def backward_weights(geometry: RowBlock, problem: BackwardProblem, device: Device) -> str:
    """When weights come where rows are fetched ahead: staged, but early where that takes few registers.

    At 12,288 columns of bfloat16 3 vectors of each of 512 threads take 1.08 early and 1.11 staged; 256 columns, 4
    vectors of 8 threads, take 1.15 staged, for RMS norm, which has one sum less, early 1.04.
    """
    if problem.weight is None and problem.bias is None:
        return "late"
    if geometry.rows_per_block > 1 or (geometry.threads_per_row == MOST_THREADS and device.capability == 90):
        early = replace(geometry, weights="early")
        few = geometry.vectors <= (3 if problem.norm.centered else 4)
        # 4096 rows of 4608 (3 vectors of 256 threads, not of all) take 43.7 us early, staged 40.4.
        partial = geometry.vectors > 2 and geometry.capacity != problem.columns
        partial = partial and 128 <= geometry.threads_per_row < MOST_THREADS
        if few and not partial and fits_early(early, problem, device):
            return "early"
    return "staged" if geometry.rows_per_block < 32 else "late"
