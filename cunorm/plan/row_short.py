"""Rows of less than 256 bytes, whose vectors are shorter than 16 bytes.

Where one or a few threads have a row, each of their accesses takes a piece of many rows. The cache makes up for that
when they read; but results go to memory as they come, and a sector of 32 bytes goes once for every store that has a
part of it, unless the next store comes at once: 10 columns of float32, RMS norm by one thread a row, write 2.8 times
the sectors and take 1.50, by two threads 1.2 times and 1.00. On the other hand each thread of a row pays for its sums,
and sixteen-bit numbers, or an activation, leave little time for that.

Where memory is fast, most rows that are many and lie behind each other go otherwise forward: see row_bulk.py.

The numbers are of an H200, as the time over that of a copy of the same bytes, of layer norm and 256 MB of x where
nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_activated import activated_row_backward
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_crowd, resident_by_memory
from cunorm.plan.row_memory import lie_alike
from cunorm.plan.row_spread import threads_for, vectors_for_all_threads
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["SHORT_BYTES", "short_row"]

SHORT_BYTES = 256
_BLOCK_THREADS = 128
# Backward, by itemsize and width: rows of up to so many vectors have one thread each, plain ones and activated ones.
_MOST_ALONE = {(2, 4): (5, 3), (2, 2): (9, 5), (2, 1): (9, 5), (4, 2): (5, 5), (4, 1): (7, 9), (8, 1): (3, 5)}


def short_row(problem: Problem, device: Device, width: int) -> RowBlock:
    """How rows of vectors of `width` lie over threads."""
    if problem.rows <= 2 * device.multiprocessors:
        return _directly(problem, device, width, _threads_of_few(problem, device, width))
    if isinstance(problem, ForwardProblem):
        return _forward(problem, device, width)
    return _backward(problem, device, width)


def _threads_of_few(problem: Problem, device: Device, width: int) -> int:
    """As many as the device has, up to a warp, where rows do not fill it."""
    vectors_per_row = problem.columns // width
    most = max(1.0, 2 * vectors_for_all_threads(problem, device, vectors_per_row))
    return min(32, threads_for(vectors_per_row, most))


def _forward(problem: ForwardProblem, device: Device, width: int) -> RowBlock:
    """Blocks of 128 threads, whose weights come before their rows.

    Few threads a row have few sums to share. 10, 20, 36, 60 and 100 columns of float16 take 1.02, 1.03, 1.15, 1.08 and
    1.09 by 1, 1, 2, 4 and 4 threads; 36 and 100 by twice as many 1.26 and 1.13; under silu 1.18 and 1.19, by twice as
    many 1.54 and 1.35. But 44 take 1.17 by four, by two 1.25.

    RMS norm, which loads no bias, and rows with a residual are done so soon that their sectors go in parts: as a run 20
    columns take 1.09 and 1.14, directly by one thread 1.34 and 1.88; 36 1.06 and 1.11, directly by four 1.28 and 1.18.
    RMS norm of 100 takes 1.07 peeled. Numbers one by one come as a run as well: 25 columns take 1.43 so, by four
    threads 1.74; but more of them peeled: 101 1.39, directly 1.54.

    float32: 5 columns take 1.01 by one thread, but 7 1.14 as a run, directly 1.55; 10 1.04 as a run, by two threads
    1.12 (RMS norm 1.04 and 1.02), with a residual by two 1.02, by four 1.06; under silu 10, 17 and 25 1.20, 1.16 and
    1.13 as a run.
    """
    vectors_per_row = problem.columns // width
    if _is_better_peeled(problem, device, width):
        return _directly(problem, device, 8, 4, peeled=True)
    family = _sixteen_bit_forward if problem.itemsize == 2 else _wide_forward
    alone, run, threads = family(problem, device, width)
    if vectors_per_row <= alone:
        return _directly(problem, device, width, 1)
    # Fewer rows would not make a block for every multiprocessor.
    geometry = None
    if vectors_per_row <= run and problem.rows >= 3 * _BLOCK_THREADS * device.multiprocessors:
        # More squares would add up to more than 3e-7 of rounding.
        geometry = _as_run(problem, device, width, 1 if vectors_per_row <= 32 else 2)
    return geometry or _directly(problem, device, width, max(threads, threads_for(vectors_per_row, 8)))


def _is_light(problem: ForwardProblem) -> bool:
    """Whether there is so little to do for a row that it leaves in parts of sectors, unless its stores come at once."""
    plain = problem.norm.centered and problem.parameters and problem.residual is None
    return problem.norm.activation is None and not plain


def _is_better_peeled(problem: ForwardProblem, device: Device, width: int) -> bool:
    """Whether rows of sixteen-bit numbers had better go as pieces of 16 bytes: see `_forward`."""
    if problem.itemsize > 2 or not _can_be_peeled(problem, device):
        return False
    if width < 4:
        return problem.columns >= 64
    # 3 of them a thread are 96 columns, and up to 7 are edges.
    few = 96 < problem.columns <= 103
    return width == 4 and few and device.has_fast_memory and _is_light(problem)


def _wide_forward(problem: ForwardProblem, device: Device, width: int) -> tuple[int, int, int]:
    """As `_sixteen_bit_forward` has it, of float32 and float64."""
    itemsize, vectors_per_row = problem.itemsize, problem.columns // width
    activated, fast = problem.norm.activation is not None, device.has_fast_memory
    if width * itemsize == 4:
        return 5, 32 if activated else 20 if fast else 12, 4 if vectors_per_row <= 32 else 8
    run = 16 if activated else 0 if problem.residual is not None else 5
    as_run = fast and problem.norm.centered and vectors_per_row <= run
    if itemsize == 4 and not activated and not as_run and vectors_per_row <= 7:
        return 3, 0, 2
    return 3, run, 4 if vectors_per_row <= 20 else 8


def _sixteen_bit_forward(problem: ForwardProblem, device: Device, width: int) -> tuple[int, int, int]:
    """Up to how many vectors one thread reads a row directly, or rows come as a run; and by how many threads else.

    Numbers one by one, on an H100: 33 and 63 columns of bfloat16 take 1.06 and 1.09 as a run, directly 1.28 and 1.28; 7
    1.30 by two threads, as a run 1.36, by one 2.00, but with a residual 1.10 as a run, by two 1.35.

    Where memory is slower, rows are long or there is an activation behind a residual, more threads make whole sectors
    of what leaves in parts. On an H100 RMS norm of 60 columns takes 0.99 by eight threads, by four 1.16; with a
    residual 36 take 1.03 by four, as a run 1.06; under silu behind that 20 and 100 1.04 and 1.01 by 2 and 8, by half as
    many 1.52 and 1.20; layer norm of 100 0.99 by eight, by four 1.03. Rows of a channel had better have eight anywhere:
    instance norm of 256 x 256 x 10^2 numbers takes 13.4 us so on an H200, by four 14.3, under silu 13.7 and 14.8.
    """
    vectors_per_row, activated = problem.columns // width, problem.norm.activation is not None
    fast, light, residual = device.has_fast_memory, _is_light(problem), problem.residual is not None
    threads = 2 if vectors_per_row <= (10 if width == 4 else 14) else 4 if vectors_per_row <= 28 else 8
    if width == 1:
        # The exact gelu leaves no time for lanes that are idle.
        by_two = vectors_per_row == 7 and not light and not residual and problem.norm.activation != "gelu"
        return 5 if by_two or light or residual else 7, 0 if by_two else 63, threads
    if activated and residual:
        return 3, 0, threads_for(vectors_per_row, 3.5)
    if width == 4 and vectors_per_row > (14 if fast else 5):
        if residual or not problem.norm.centered:
            return 5, 0, threads_for(vectors_per_row, 2.7)
        if vectors_per_row > 20 and (problem.channels is not None or not (fast or activated)):
            return 5, 0, 8
    run = (14 if width == 4 else 29) if light else 0
    return (3 if light else 5) if width == 4 else 7, run, threads


def _backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock:
    """Blocks of 128 threads that take turns.

    A thread that has a whole row reads it directly: 10 and 18 columns of float16 take 1.18 and 1.17 so, by two threads
    1.35 and 1.20; 7 of float32 1.16. What several have comes ahead: 36, 60, 84 and 100 columns of float16 take 1.13,
    1.13, 1.13 and 1.16 by 2, 4, 8 and 8 threads; 44 by four 1.14. But pairs of float16, and float32, whose loads are
    many, had better not: 50 columns of float16 take 1.24 by four threads, ahead 1.30, and 33 and 50 of float32 1.12 and
    1.06, 50 ahead 1.13. (10 of float32 are as good either way by four blocks a multiprocessor, and there is room for
    more: 1.09 ahead, 1.16 directly by five.) Numbers one by one come as a run: 25 columns of float16 take 1.60 by two
    threads, 17 of float32 1.08 by one, by four 1.15.

    Under silu even one thread's row of float16 comes ahead: 10 columns take 1.30 so, directly 1.43; 17 and 25 of
    float32 take 1.37 and 1.28 by four, as a run 1.65 and 1.69.
    """
    itemsize, vectors_per_row = problem.itemsize, problem.columns // width
    activated, vector_bytes = problem.norm.activation is not None, width * itemsize
    kept = activated_row_backward(problem, device, width) if width == 4 else None
    if kept is not None:
        return kept
    alone = _MOST_ALONE[itemsize, width][activated]
    few = vectors_for_all_threads(problem, device, vectors_per_row) < 2
    direct = problem.channels is not None or vector_bytes < 4 or device.capability < 80
    if vectors_per_row <= alone and not few:
        ten_floats = itemsize == 4 and width == 2 and vectors_per_row == 5 and not activated
        ahead = ((itemsize == 2 and activated) or ten_floats) and not direct and problem.dresidual_out is None
        return (_ahead if ahead else _directly)(problem, device, width, 1)
    if itemsize == 2 and width < 4 and vectors_per_row > 32 and _can_be_peeled(problem, device):
        return _ahead(problem, device, 8, 4 if problem.columns < 64 else 8, peeled=True)
    threads = 0 if few or activated else _threads_of_run(vectors_per_row, itemsize, width)
    geometry = _as_run(problem, device, width, threads) if threads else None
    if geometry is not None:
        return geometry
    if few:
        threads = threads_for(vectors_per_row, 2)
    elif itemsize == 8:
        threads = 4 if vectors_per_row <= 12 else max(8, threads_for(vectors_per_row, 8))
    elif not activated and (vector_bytes == 4 or itemsize == 4):
        return _directly(problem, device, width, threads_for(vectors_per_row, 9 if vector_bytes == 4 else 4))
    else:
        most = 8 if vector_bytes < 4 else 7 if vector_bytes == 4 and itemsize == 4 else 4 if activated else 5
        threads = threads_for(vectors_per_row, most)
    if direct or vectors_per_row > (4 if activated and itemsize == 2 else 6) * threads:
        return _directly(problem, device, width, threads)
    return _ahead(problem, device, width, threads)


def _threads_of_run(vectors_per_row: int, itemsize: int, width: int) -> int:
    """How many threads have a row, backward, that comes as a part of a run; 0 where that is slower."""
    if itemsize == 2 and width == 1 and vectors_per_row <= 32:
        return threads_for(vectors_per_row, 13)
    return int(itemsize == 4 and width == 1 and vectors_per_row < 28)


def _can_be_peeled(problem: Problem, device: Device) -> bool:
    return lie_alike(problem) and problem.channels is None and device.capability >= 80


def _laid(problem: Problem, width: int, threads: int, peeled: bool = False) -> RowBlock:
    """Blocks of rows that have so many threads each, with their weights."""
    rows, weights = max(1, _BLOCK_THREADS // threads), "staged" if peeled else "early"
    vectors = -(-(problem.columns // width) // threads)
    return RowBlock(width, vectors, threads, rows, 1, "direct", peeled, weights if problem.parameters else "late")


def _directly(problem: Problem, device: Device, width: int, threads: int, peeled: bool = False) -> RowBlock:
    """Rows that are read directly, by as many blocks at once as have the registers."""
    backward = isinstance(problem, BackwardProblem)
    geometry = _laid(problem, width, threads, peeled)
    for weights, least in ((geometry.weights, 4), ("late", 1)):
        # 7 columns of sixteen-bit numbers take 1.36 by five blocks on an H100, by six 1.56.
        for share in range((5 if width == 1 else 12) if backward else 8, least - 1, -1):
            shared = replace(geometry, weights=weights, min_blocks=share)
            if backward:
                shared = replace(shared, blocks_per_multiprocessor=share)
            if _has_room(shared, problem, device, share):
                return shared
    return _directly(problem, device, width, 2 * threads, peeled)


def _ahead(problem: BackwardProblem, device: Device, width: int, threads: int, peeled: bool = False) -> RowBlock:
    """Rows that come ahead, by four blocks at once: two rows where a thread has less than 32 bytes of each.

    44 columns of float16, 24 bytes of each thread, take 1.14 with two rows ahead and 1.24 with one; 60, 32 bytes, 1.15
    and 1.13.
    """
    geometry = replace(_laid(problem, width, threads, peeled), stage="ahead")
    few = geometry.vectors * width * problem.itemsize < 32
    share = 3 if peeled and device.capability > 90 else 4  # else they spill there
    geometry = replace(geometry, rows_ahead=2 if few and not peeled else 1, blocks_per_multiprocessor=share)
    for weights in (geometry.weights, "staged", "late"):
        geometry = replace(geometry, weights=weights if problem.parameters else "late")
        if _has_room(geometry, problem, device, share):
            return geometry
    return _directly(problem, device, width, threads, peeled)


def _as_run(problem: Problem, device: Device, width: int, threads: int) -> RowBlock | None:
    """Rows that come and leave as a run of memory, by as many blocks at once as have room; or None."""
    if any(matrix.row_strides[0] != problem.columns for matrix in problem.matrices):
        return None
    backward = isinstance(problem, BackwardProblem)
    geometry = replace(_laid(problem, width, threads), stage="run", weights="late")
    if backward:
        geometry = replace(geometry, rows_per_block=geometry.rows_per_block // 2)
    most = 6 if not backward and problem.itemsize == 2 and width > 1 else 8
    for share in range(most, 2, -1):
        geometry = replace(geometry, blocks_per_multiprocessor=share, min_blocks=share)
        if _has_room(geometry, problem, device, share):
            return geometry
    return None


def _has_room(geometry: RowBlock, problem: Problem, device: Device, share: int) -> bool:
    """Whether so many blocks at once have the threads, the registers and the shared memory."""
    if share * geometry.threads > device.threads_per_multiprocessor or not fits(geometry, problem, device):
        return False
    has_memory = resident_by_memory(geometry, problem, device) >= share
    return has_memory and fits_crowd(geometry, problem, device, share)
