"""Rows of less than 256 bytes, whose vectors are shorter than 16 bytes.

Where one or a few threads have a row, each of their accesses takes a piece of many rows. The cache makes up for that
when they read; but results go to memory as they come, and a sector of 32 bytes goes once for every store that has a
part of it, unless the next store comes at once: 10 columns of float32, RMS norm by one thread a row, write 2.8 times
the sectors and take 1.50, by two threads 1.2 times and 1.00. On the other hand each thread of a row pays for its sums,
and sixteen-bit numbers, or an activation, leave little time for that.

The numbers are of an H100, as the time over that of a copy of the same bytes, of layer norm and 256 MB of x where
nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.constants import lie_alike
from cunorm.plan.launches import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early, fits_registers
from cunorm.plan.row_spread import threads_for, vectors_for_all_threads
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["SHORT_BYTES", "short_row"]

SHORT_BYTES = 256
_BLOCK_THREADS = 128


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

    10 columns of float16 take 1.05 so, with weights that come late 1.41; 100 1.07 by 8 threads of 4 vectors, by 2 of 13
    3.46; 101 1.10 peeled, else 1.34. One thread for a whole row is best where that is short: 20 columns take 0.99, by
    two threads 1.20, by four 1.23, but with a residual 1.44 and by four 1.08. Longer ones, of number by number or of
    pairs, come as a part of a run: 29 and 30 columns take 1.13 and 1.11 so, directly by 8 threads 1.36 and 1.36.

    float32: 10 and 14 columns take 1.00 and 0.99 by two threads, by four 1.07 and 1.01, 10 as a run 1.03 (RMS norm 1.00
    and 1.00, 1.05 and 1.01, 1.03); with a residual 1.01 and 1.02, by four 1.00 and 1.01; under silu 1.05 and 1.10 as a
    run, by four 1.12 and 1.07; 25 and 42 columns 1.08 and 1.03 as a run, by 4 and 8 threads 1.00.

    On an H200 10 columns of float32 take 1.05 as a run, by two threads 1.12 (RMS norm 1.02 and 1.01), with a residual
    1.12, by four 1.06; 17 1.11 as a run, by four 1.18; 7 1.09 by one thread, as a run 1.15. 20 columns of float16, RMS
    norm, take 1.09 to 1.26 as a run, by four threads 1.32. 100 take 1.25 peeled, by eight threads of 4 vectors 1.33 (on
    an H100 1.04 and 1.08).
    """
    itemsize, vectors_per_row = DTYPES[problem.x.dtype].itemsize, problem.columns // width
    activated, vector_bytes = problem.norm.activation is not None, width * itemsize
    fast, residual = device.has_fast_memory, problem.residual is not None
    # Eight threads would have four vectors of 8 bytes each, some of them none; four can have three of 16.
    in_part = width == 4 and vectors_per_row > 24 and problem.columns <= 103 and not activated
    if itemsize == 2 and ((width < 4 and problem.columns >= 64) or in_part) and _can_be_peeled(problem, device):
        return _directly(problem, device, 8, 4, peeled=True)
    if itemsize == 2:
        light = not activated and (residual or not problem.norm.centered or not problem.parameters)
        alone = {1: 7, 2: 5 if light else 9, 4: 7 if activated else 3 if light else 5}[width]
        run, by_four = 29 if width < 4 else 5 if light and fast else 0, 12
    elif vector_bytes == 4:
        alone, run, by_four = (7, 20, 32) if fast and not activated else (5, 32 if activated else 12, 32)
    else:
        alone, run, by_four = 3, 16 if activated else 0 if residual else 5, 20
        as_run = fast and problem.norm.centered and vectors_per_row <= run
        if itemsize == 4 and not activated and not residual and not as_run and alone < vectors_per_row <= 7:
            return _directly(problem, device, width, 2)
    if vectors_per_row <= alone:
        return _directly(problem, device, width, 1)
    # Fewer rows would not make a block for every multiprocessor.
    geometry = None
    if vectors_per_row <= run and problem.rows >= 3 * _BLOCK_THREADS * device.multiprocessors:
        geometry = _as_run(problem, device, width, 1)
    threads = 4 if vectors_per_row <= by_four else max(8, threads_for(vectors_per_row, 8))
    return geometry or _directly(problem, device, width, threads)


def _backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock:
    """Blocks of 128 threads that take turns.

    float16: a thread that has a whole row reads it directly; 20 columns take 1.14 so, ahead by two threads 1.24. What
    several have comes ahead: 100 columns take 1.11 by 8 threads of 4 vectors, directly 1.23. What is read number by
    number comes as a run, 23 columns by two threads 1.49, directly by eight 1.67; or peeled, 35 columns 1.37, as a run
    1.46. So do numbers of 4 bytes: 19 columns take 1.10 by one thread, ahead by four 1.15. Under an activation lanes
    without a number cost most: 20 and 36 columns take 1.34 and 1.38 by two threads, by one 1.69, by four 1.51.

    On an H200 20 columns of float16 take 1.11 ahead by one thread, directly 1.22; 10 of float32 1.08, as a run 1.22,
    but with a residual 1.20 and 1.16.
    """
    itemsize, vectors_per_row = DTYPES[problem.x.dtype].itemsize, problem.columns // width
    activated, vector_bytes = problem.norm.activation is not None, width * itemsize
    if itemsize == 2:
        alone = (3 if width == 4 else 5) if activated else (5 if width == 4 else 9)
    elif vector_bytes == 4:
        alone = 9 if activated else 5
    else:
        alone = 5 if activated else 3
    few = vectors_for_all_threads(problem, device, vectors_per_row) < 2
    light = not activated and problem.channels is None and not (itemsize == 4 and problem.dresidual_out is not None)
    light = light and device.has_fast_memory and device.capability >= 80
    if light and not few and vector_bytes == 8 and vectors_per_row == 5:
        return _ahead(problem, device, width, 1)
    if vectors_per_row <= alone and not few:
        return _directly(problem, device, width, 1)
    if itemsize == 2 and width < 4 and vectors_per_row > 32 and _can_be_peeled(problem, device):
        return _ahead(problem, device, 8, 4 if problem.columns < 64 else 8, peeled=True)
    threads = 0 if few else _threads_of_run(vectors_per_row, itemsize, width)
    geometry = _as_run(problem, device, width, threads) if threads else None
    if geometry is not None:
        return geometry
    if few:
        threads = threads_for(vectors_per_row, 2)
    elif vectors_per_row <= 12:
        threads = 2 if activated and itemsize == 2 else 4
    else:
        threads = max(8, threads_for(vectors_per_row, 8))
    most = 3 if activated and itemsize == 2 else 6
    if problem.channels is None and vector_bytes >= 4 and vectors_per_row <= most * threads and device.capability >= 80:
        return _ahead(problem, device, width, threads)
    return _directly(problem, device, width, threads)


def _threads_of_run(vectors_per_row: int, itemsize: int, width: int) -> int:
    """How many threads have a row, backward, that comes as a part of a run; 0 where that is slower."""
    if itemsize == 2 and width == 1 and vectors_per_row <= 32:
        return threads_for(vectors_per_row, 13)
    if itemsize == 2 and width == 2 and 12 < vectors_per_row <= 20:
        return 2
    if itemsize == 4 and width == 1 and vectors_per_row <= 40:
        return 1 if vectors_per_row < 28 else 4
    return int(itemsize == 4 and vectors_per_row <= 5)


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
        for share in range(12 if backward else 8, least - 1, -1):
            shared = replace(geometry, weights=weights, min_blocks=share)
            if backward:
                shared = replace(shared, blocks_per_multiprocessor=share)
            if _has_room(shared, problem, device, share):
                return shared
    return _directly(problem, device, width, 2 * threads)


def _ahead(problem: BackwardProblem, device: Device, width: int, threads: int, peeled: bool = False) -> RowBlock:
    """Rows that come ahead, by four blocks at once: two rows where a thread has less than 32 bytes of each.

    On an H200 36 and 84 columns of float16, 24 bytes of each thread, take 1.37 and 1.21 with one row ahead by six
    blocks, so 1.49 and 1.30; 28 and 60, 16 bytes, 1.31 and 1.23 with two by six, by four 1.34 and 1.25.
    """
    geometry = replace(_laid(problem, width, threads, peeled), stage="ahead")
    few = geometry.vectors * width * DTYPES[problem.x.dtype].itemsize < 32
    share = 3 if peeled and device.capability > 90 else 4  # else they spill there
    light = geometry.vectors <= 3 and not peeled and problem.norm.activation is None
    if device.has_fast_memory and few and light:
        crowd = replace(geometry, rows_ahead=2 if geometry.vectors <= 2 else 1, blocks_per_multiprocessor=6)
        if _has_room(crowd, problem, device, 6):
            return crowd
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
    most = 6 if not backward and DTYPES[problem.x.dtype].itemsize == 2 else 8
    for share in range(most, 2, -1):
        geometry = replace(geometry, blocks_per_multiprocessor=share, min_blocks=share)
        if _has_room(geometry, problem, device, share):
            return geometry
    return None


def _has_room(geometry: RowBlock, problem: Problem, device: Device, share: int) -> bool:
    """Whether so many blocks at once have the threads, the registers and the shared memory."""
    threads, direct = share * geometry.threads, geometry.stage == "direct"
    if threads > device.threads_per_multiprocessor or not fits(geometry, problem, device):
        return False
    if geometry.weights == "early" and not fits_early(geometry, problem, device):
        return False
    shared_bytes = share * (geometry.shared_bytes(problem) + 1024)  # which the runtime keeps
    registers = fits_registers(problem, device, geometry.width, geometry.vectors, threads, geometry.peeled, direct)
    return registers and shared_bytes <= device.shared_bytes
