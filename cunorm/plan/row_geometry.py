"""How rows are best spread over threads and blocks: the built-in choice.

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said. They were
found by timing `row_candidates`; on another GPU ``cunorm.tune`` does that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cunorm.plan import channel_row_geometry, row_grid
from cunorm.plan.constants import (
    are_rows,
    can_be_shared,
    columns_per_block,
    compute_itemsize,
    lie_alike,
    margin_of,
    vector_width,
)
from cunorm.plan.launches import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import (
    blocks_with,
    crowded,
    fits,
    fits_early,
    fits_registers,
    has_channels,
    persistent,
    resident,
    resident_by_memory,
    with_registers,
    with_room,
)
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["backward_geometry", "forward_geometry"]

# Threads of a block that holds one long row, or a part of it. A thousand would leave each too few registers.
_MOST_THREADS = 512

# Of a row that is shared by the blocks of a cluster, forward.
_MOST_SHARED_BYTES = 1 << 20
# So few bytes of sums over channels, which column_sums reads again, are no matter.
_FEW_SUM_BYTES = 1 << 20
# Weights by channel take next to no room, and come late.
_NO_WEIGHTS: dict[str, Any] = {"weight": None, "bias": None}


def forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if problem.columns == 0 or not are_rows(problem):
        return None
    if problem.channels is None:
        return _forward_geometry(problem, device)
    geometry = channel_row_geometry.forward_geometry(problem, device)
    geometry = geometry or _forward_geometry(replace(problem, **_NO_WEIGHTS), device)
    return None if geometry is None else channel_row_geometry.with_channels(geometry, problem, device)


def _forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    width, piece = vector_width(problem), 16 // DTYPES[problem.x.dtype].itemsize
    if width < piece:
        return _narrow(problem, device, width)
    vectors_per_row = problem.columns // width
    if problem.rows <= 2 * device.multiprocessors:
        geometry = _few_rows(problem, device, width)
        if geometry is not None:
            return geometry
    threads, vectors = _spread(vectors_per_row, _vectors_wanted(problem, device, vectors_per_row))
    # 12 vectors are 48 registers. Rows of 65536 bfloat16 numbers in one block (16 vectors) take 1.66, in two 1.12; of
    # 32768 with a residual 1.04 and 1.10.
    most = 8 if problem.residual is not None and problem.norm.centered and device.groups(2) else 12
    if vectors > most and threads == _MOST_THREADS:
        return _shared_row(problem, device, width)
    # Two warps are enough for a block, but where a thread has a single vector of sixteen-bit numbers.
    block_threads = 128 if vectors == 1 and piece == 8 else 64
    geometry = RowBlock(width, vectors, threads, max(1, block_threads // threads))
    return _with_weights(crowded(geometry, problem, device), problem, device)


def _with_weights(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """The geometry, with its weights in the way that is best, and fewer blocks a multiprocessor where that is better.

    Through shared memory they take no registers, and their way from memory passes beside the row's: 2048 rows of 4096
    bfloat16 numbers take 1.03 so, late 1.17; 8192 of 1024 1.05 and 1.13, 512 of 8192 1.06 and 1.12, 32,768 of 4096 1.03
    and 1.04, 1024 of 4096 float32 numbers 0.98 and 1.14. But 512 of 1024, a vector a thread, 1.06 and 1.03 (RMS norm
    1.00, early 0.98). With a residual, which hides it as well, they come late (float16 numbers would spill), but where
    one block has all registers: 4096 of 32,768 take 1.04 staged, late 1.20, by two blocks late 1.05.
    """
    if not problem.parameters or device.capability < 80 or _are_better_late(geometry, problem, device):
        return geometry
    if geometry.vectors == 1:
        early = not problem.norm.centered and fits_early(geometry, problem, device)
        return replace(geometry, weights="early") if early else geometry
    staged = replace(geometry, weights="staged")
    if 5 < geometry.vectors < 8 + problem.norm.centered and geometry.threads_per_row < _MOST_THREADS:
        # 21,845 rows of 6144 take 1.02 with 80 registers a thread, with 64 1.17.
        staged = replace(staged, min_blocks=blocks_with(staged, 80))
    room = resident_by_memory(staged, problem, device)
    if _are_wide(problem):
        # They come through the cache, again for every block, and must leave it a third of the memory: 1024 rows of 4096
        # bfloat16 numbers with float32 weight and bias take 1.22 staged by five blocks, late 1.15. 4096 rows without a
        # bias take 1.05 by eight blocks of 64 threads, late 1.08.
        room = device.shared_bytes * 5 // 8 // staged.shared_bytes(problem)
        if len(problem.parameters) == 1 and staged.threads < 128 and 2 * room >= staged.min_blocks:
            staged = replace(staged, min_blocks=min(staged.min_blocks, room))
    return staged if staged.min_blocks <= room else geometry


def _are_better_late(geometry: RowBlock, problem: ForwardProblem, device: Device) -> bool:
    """Whether weights had better not be staged: where that is slower, or would leave too few registers."""
    centered, activation, vectors = problem.norm.centered, problem.norm.activation, geometry.vectors
    if problem.x.dtype == "float64" or (problem.residual is not None and vectors <= 6):
        return True
    # Where there are many rows, the cache of a multiprocessor keeps weights from one row to the next: 13,107 rows of
    # 10,240 take 1.04 late, staged 1.06, 2048 of them 1.12 and 1.07. Under silu 16,384 of 8192 take 1.07 and 1.09, 8192
    # of 1024 1.22 and 1.08.
    waves = problem.rows / (geometry.rows_per_block * geometry.min_blocks * device.multiprocessors)
    long = centered and geometry.threads_per_row > 128 and vectors > 4 and problem.residual is None
    if vectors > 1 and waves > 4 and (activation is not None or long):
        return True
    # Of 5632 columns (6 vectors, not of all threads) 4096 rows take 1.21, late 1.13; of 6144 1.03 and 1.08.
    if centered and vectors > 5 and geometry.capacity != problem.columns:
        return True
    # With the registers that `crowded` leaves, more vectors would spill 8 to 32 bytes.
    both = len(problem.parameters) == 2
    if activation is not None or (_are_wide(problem) and (both or device.capability != 90)):
        return vectors > (3 if activation == "gelu" else 4)
    return centered and not both and vectors > 5


def _are_wide(problem: ForwardProblem) -> bool:
    """Whether a weight or bias has larger elements than x."""
    return any(DTYPES[item.dtype].itemsize > DTYPES[problem.x.dtype].itemsize for item in problem.parameters)


def _few_rows(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """A geometry for rows that do not fill the device; None where no registers would hold their weights.

    The weights come early: 64 rows of 4096 bfloat16 numbers take 5.1 us, with late weights 5.8. Long rows are shared,
    so that more multiprocessors work: 16 of 16,384 take 6.5 us in four blocks each, in one 7.3; 16 of 32,768 in eight
    6.5, in one 9.1; 64 groups of 65,536 float16 numbers in two 1.29, in one 1.44. Of 512 rows neither makes a
    difference.
    """
    vectors_per_row = problem.columns // width
    blocks = min(16, 1 << max(0, (vectors_per_row - 1) // 512).bit_length()) if vectors_per_row > 1024 else 1
    if problem.rows > device.groups(blocks):
        blocks = 2 if blocks > 1 and problem.rows <= device.groups(2) else 1
    vectors_per_block = -(-vectors_per_row // blocks)
    threads = min(256 if vectors_per_block <= 1024 else _MOST_THREADS, 1 << vectors_per_block.bit_length() - 1)
    vectors = -(-vectors_per_block // threads)
    rows = max(1, 64 // threads)
    geometry = RowBlock(width, vectors, threads, rows, blocks, weights="early")
    in_registers = vectors <= 8 and fits_registers(problem, device, width, vectors, geometry.threads, direct=True)
    return geometry if in_registers and fits_early(geometry, problem, device) else None


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if not are_rows(problem):
        return None
    if problem.channels is None:
        return _backward_geometry(problem, device)
    # Every row leaves sums of its channels: where those are short, as much as is moved else.
    sums = (problem.dweight is not None) + (problem.dbias is not None)
    sum_bytes = sums * problem.rows * problem.channels.channels_per_row * compute_itemsize(problem)
    few_bytes = min(_FEW_SUM_BYTES, device.multiprocessors << 18)
    if sum_bytes > max(few_bytes, problem.bytes_moved // 3):
        return None
    geometry = channel_row_geometry.backward_geometry(problem, device)
    if geometry is None:
        geometry = _backward_geometry(replace(problem, **_NO_WEIGHTS), device)
        if geometry is not None:
            geometry = with_room(replace(geometry, weights="late"), problem, device)
    if geometry is None or not fits(geometry, problem, device):
        return None
    geometry = channel_row_geometry.with_channels(geometry, problem, device)
    # Under an activation 8 vectors of sixteen-bit numbers would spill 16 to 32 bytes in a block that has whole rows; in
    # a cluster they don't. Slabs take as long: 1.49 for 32,768 float16 numbers of a channel under silu.
    full = geometry.blocks_per_row == 1 and geometry.threads * geometry.vectors >= 8 * _MOST_THREADS
    return None if full and geometry.width == 8 and problem.norm.activation is not None else geometry


def _backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    width, piece = vector_width(problem), 16 // itemsize
    if width < piece:
        return _narrow(problem, device, width)
    short = problem.columns // width <= (64 if itemsize == 2 else 127)
    geometry = (_short_rows_backward if short else _long_rows_backward)(problem, device, width)
    if geometry is None:
        return _shared_row(problem, device, width)
    if problem.rows <= device.multiprocessors:
        # There is no next row: 64 of 4096 bfloat16 numbers take 10.4 us, fetched ahead 10.9.
        geometry = replace(geometry, stage="direct", rows_ahead=1)
    elif _are_better_direct(geometry, problem, device):
        rows = max(1, 128 // geometry.threads_per_row)
        geometry = RowBlock(width, geometry.vectors, geometry.threads_per_row, rows)
    elif _turns(geometry, problem, device) <= 3:
        # 512 rows of 4096 bfloat16 numbers take 13.9 us, with two rows ahead 14.8; 1024 take as long.
        geometry = replace(geometry, rows_ahead=1)
    if geometry.stage == "ahead":
        if device.capability != 90:  # for which the shares were measured, and next to nothing spills
            geometry = with_registers(geometry, problem, device)
        geometry = replace(geometry, weights=_backward_weights(geometry, problem, device))
    return with_room(geometry, problem, device)


def _short_rows_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Several rows a block; None where registers are too few.

    256 columns of bfloat16 take 1.06 with one vector a thread and two rows ahead, as with two vectors and one row, but
    65,536 rows of them 1.23 and 1.29; RMS norm 1.05 with 4 vectors, 1.08 with one. 512 take 1.07 with 2 vectors, and
    32,768 rows of them 1.22, with 4 and one row ahead 1.33. Of float32 256 and 512 columns take 1.01, read directly
    1.05; but 100 take 1.05 directly, and fetched ahead 1.09.
    """
    vectors_per_row, sixteen_bit = problem.columns // width, DTYPES[problem.x.dtype].itemsize == 2
    wanted, block_threads, share, stage, ahead = 4.0, 128, 3, "ahead", 1
    if sixteen_bit and vectors_per_row > 32:
        wanted, ahead = 2.0, 2
    elif sixteen_bit and problem.norm.centered:
        wanted, block_threads, share, ahead = 1.0, 256, 2, 2
    elif vectors_per_row < 32 and not sixteen_bit:
        wanted, block_threads, share, stage = 3.0, 256, 2, "direct"
    for_all = _vectors_for_all_threads(problem, device, vectors_per_row)
    wanted = min(wanted, for_all / 2 if sixteen_bit else for_all)
    threads, vectors = _more_threads(problem, device, _spread(vectors_per_row, wanted), block_threads)
    if not fits_registers(problem, device, width, vectors, max(threads, block_threads)):
        return None
    rows = _rows_per_block(problem, device, block_threads // threads, threads)
    share = max(1, share * block_threads // (threads * rows))
    stage = stage if device.capability >= 80 else "direct"
    return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share, rows_ahead=ahead)


def _long_rows_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """A row a block, or several; None where registers are too few, or blocks had better share a row.

    At 5120 columns of bfloat16 128 threads of 5 vectors take 1.05, 256 of 3 1.11; 10,000 of float16 512 of 3 1.08, 256
    of 5 1.20; 1000 64 of 2 1.04, 32 of 4 1.23.
    """
    vectors_per_row, itemsize = problem.columns // width, DTYPES[problem.x.dtype].itemsize
    few, moderate = (problem.rows < turns * device.multiprocessors for turns in (8, 48))
    wanted = 3.0
    if itemsize == 2 and (vectors_per_row <= 512 or few):
        wanted = 2.0
    elif itemsize == 2 and vectors_per_row < 704:
        wanted = 2.2 if moderate else 4.0  # 4096 rows of 5120: 256 threads of 3 43.4 us, 128 of 5 46.0
    threads, vectors = _spread(vectors_per_row, wanted)
    if itemsize == 2 and (vectors_per_row <= 512 or vectors_per_row > 1024) and vectors > 3 and threads < _MOST_THREADS:
        threads, vectors = 2 * threads, -(-vectors_per_row // (2 * threads))
    threads, vectors = _more_threads(problem, device, (threads, vectors), 64)
    if not fits_registers(problem, device, width, vectors, max(threads, 64)):
        return None
    stage = "ahead" if device.capability >= 80 else "direct"
    if itemsize == 2 and vectors <= 3 and threads <= 256:
        # With 384 threads a multiprocessor and two rows ahead 131,072 rows of 1024 bfloat16 numbers take 1.04, 4096 of
        # them 1.41; with 512 and one row 1.07 and 1.61. At 4096 columns two rows a block take 1.07 and 1.31.
        block_threads, all_threads = (128, 384) if threads <= 128 else (512, 512)
        if threads == 128 and vectors_per_row == 3 * threads and moderate and problem.norm.centered:
            # 4096 rows of 3072 take 30.8 us so, by three blocks of one row 32.5; but of 2560 27.2 and 27.0.
            block_threads, all_threads = 256, 512
        rows = _rows_per_block(problem, device, block_threads // threads, threads)
        while rows > 1 and not fits_registers(problem, device, width, vectors, threads * rows):
            rows //= 2
        share = max(1, all_threads // (threads * rows))
        return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share, rows_ahead=2)
    if itemsize == 2 and problem.dresidual_out is None and device.capability == 90:
        if (threads, vectors) == (256, 4):
            # 8192 columns of bfloat16: 1.07, by 256 threads 1.09; with a residual 256 take 1.02.
            return RowBlock(width, 2, _MOST_THREADS, 1, 1, stage, blocks_per_multiprocessor=1, rows_ahead=2)
        if (threads, vectors) == (_MOST_THREADS, 4) and problem.rows > device.multiprocessors:
            return None  # 16,384 columns of bfloat16: 1.06 by clusters of four blocks, 1.11 by one block
    # 512 threads a multiprocessor: 6 % faster than 1024, which leave more partial sums. At 5120 columns, 5 vectors of
    # each, 256 take 1.08 and 512 1.13.
    block_threads, all_threads = 64, 512 if vectors <= 4 else 256
    if itemsize == 4 and threads <= 64:
        block_threads, all_threads = 128, 384  # 1000 columns of float32: 1.03, with a row a block 1.10
    if problem.rows < 8 * device.multiprocessors * (all_threads // threads):
        # Fewer blocks of more rows leave fewer partial sums: 4096 rows of 1024 take 17.5 us, with a row a block 19.7.
        block_threads = min(all_threads, 4 * threads)
    rows = _rows_per_block(problem, device, block_threads // threads, threads)
    share = max(1, all_threads // (threads * rows))
    return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share)


def _turns(geometry: RowBlock, problem: Problem, device: Device) -> float:
    """How many groups of rows each block has, of those that share rows."""
    blocks = geometry.blocks_per_multiprocessor * device.multiprocessors
    return -(-problem.rows // geometry.rows_per_block) / blocks


def _are_better_direct(geometry: RowBlock, problem: BackwardProblem, device: Device) -> bool:
    """Whether all blocks had better run at once, each with its own rows: where they keep no sums, and are few.

    512 rows of 1024 bfloat16 numbers take 7.2 us, fetched ahead 7.7; 256 of 4096 8.0 and 8.3, but 512 of 4096 10.9 and
    10.8.
    """
    if problem.dweight is not None or problem.dbias is not None or problem.channels is not None:
        return False
    few = problem.rows * geometry.threads_per_row <= 512 * device.multiprocessors
    threads = max(128, geometry.threads_per_row)
    return few and fits_registers(problem, device, geometry.width, geometry.vectors, threads, direct=True)


def _backward_weights(geometry: RowBlock, problem: BackwardProblem, device: Device) -> str:
    """When weights come where rows are fetched ahead: staged, but early where that takes few registers.

    At 12,288 columns of bfloat16 3 vectors of each of 512 threads take 1.08 early and 1.11 staged; 256 columns, 4
    vectors of 8 threads, take 1.15 staged, for RMS norm, which has one sum less, early 1.04.
    """
    if problem.weight is None and problem.bias is None:
        return "late"
    if geometry.rows_per_block > 1 or (geometry.threads_per_row == _MOST_THREADS and device.capability == 90):
        early = replace(geometry, weights="early")
        few = geometry.vectors <= (3 if problem.norm.centered else 4)
        # 4096 rows of 4608 (3 vectors of 256 threads, not of all) take 43.7 us early, staged 40.4.
        partial = geometry.vectors > 2 and geometry.capacity != problem.columns
        partial = partial and 128 <= geometry.threads_per_row < _MOST_THREADS
        if few and not partial and fits_early(early, problem, device):
            return "early"
    return "staged" if geometry.rows_per_block < 32 else "late"


def _more_threads(problem: Problem, device: Device, spread: tuple[int, int], block_threads: int) -> tuple[int, int]:
    """Threads of a row and vectors of each: as `_spread` has them, or more threads where registers would not do."""
    width, (threads, vectors) = vector_width(problem), spread
    while threads < _MOST_THREADS and not fits_registers(problem, device, width, vectors, max(threads, block_threads)):
        threads *= 2
        vectors = -(-problem.columns // width // threads)
    return threads, vectors


def _rows_per_block(problem: Problem, device: Device, wanted: int, threads: int) -> int:
    """Several rows a block only where every multiprocessor has a block; but two warps at least."""
    rows = max(1, 64 // threads, min(wanted, problem.rows // device.multiprocessors))
    return 1 << rows.bit_length() - 1


def _vectors_wanted(problem: ForwardProblem, device: Device, vectors_per_row: int) -> float:
    """The least number of vectors that a thread is to have: 3 to 4.5, fewer where that leaves multiprocessors idle.

    That makes 3 to 8 of them: at 256 columns of bfloat16 8 threads of 4 take 1.02, 16 of 2 1.08; at 2048 64 of 4 1.01
    and 32 of 8 1.03; at 5120 128 of 5 1.01 and 256 of 3 1.15; at 8192 256 of 4 1.02 and 128 of 8 1.04; at 16,384 256 of
    8 1.06 and 512 of 4 1.10, but with a residual 1.05 and 1.03. RMS norm has registers for more, which few rows need:
    2048 of 4096 take 0.97 with 64 of 8, with 128 of 4 1.03, 4096 of 2048 0.91 and 0.95; but 65,536 of 2048 1.03 and
    1.00.
    """
    for_all = _vectors_for_all_threads(problem, device, vectors_per_row)
    plain = not problem.norm.centered and problem.norm.activation is None and DTYPES[problem.x.dtype].itemsize == 2
    wanted = 4.5 if vectors_per_row > 1024 or (plain and vectors_per_row >= 256 and for_all <= 8) else 4
    if vectors_per_row < 32 or problem.residual is not None:
        wanted = 3  # 100 columns of float32: 8 threads of 4
    return max(1.0, min(wanted, 2 * for_all))


def _vectors_for_all_threads(problem: Problem, device: Device, vectors_per_row: int) -> float:
    """How many vectors each thread has where all threads that the device can hold have some."""
    return problem.rows * vectors_per_row / (device.multiprocessors * device.threads_per_multiprocessor)


def _spread(vectors_per_row: int, least_vectors: float) -> tuple[int, int]:
    """Threads, as many as leave each ``least_vectors``, and vectors of each."""
    threads = min(_MOST_THREADS, 1 << max(1, int(vectors_per_row / max(1, least_vectors))).bit_length() - 1)
    return threads, -(-vectors_per_row // threads)


def _shared_row(problem: Problem, device: Device, width: int, peeled: bool = False) -> RowBlock | None:
    """A row for the blocks of a cluster, as few as can hold it with its weights; or one block, where that can."""
    if _is_faster_read_twice(problem, width):
        return None
    for way in _shared_ways(problem, device, width, peeled):
        if way.weights == "late" and isinstance(problem, ForwardProblem) and row_grid.applies(problem, device):
            break
        for blocks in (1, 2, 4, 8, 16):
            if not device.groups(blocks) or device.capability < 80 or blocks > way.blocks_per_row:
                break
            if not can_be_shared(problem, blocks, width):
                continue
            columns = columns_per_block(problem, blocks, width)
            if peeled:
                columns = min(columns, problem.columns) - 2 * margin_of(problem, width, way.weights)
            geometry = replace(way, vectors=-(-(columns // width) // way.threads), blocks_per_row=blocks)
            if (
                geometry.vectors <= way.vectors
                and fits_registers(problem, device, width, geometry.vectors, way.threads, peeled, way.stage == "direct")
                and (way.weights != "early" or fits_early(geometry, problem, device))
                and fits(geometry, problem, device)
                and resident(geometry, problem, device) >= way.blocks_per_multiprocessor
            ):
                return geometry
    return None


def _is_faster_read_twice(problem: Problem, width: int) -> bool:
    """Forward, whether a row has so much to read that it takes clusters of 16 blocks, which are slow.

    256 rows of 524,288 float16 numbers take 1.50 by clusters and 1.70 read twice, 200 of 655,360 1.99 and 1.72, 128 of
    1,048,576 2.22 and 1.75 (of float32 1.30 and 1.69, 1.85 and 1.72, 1.98 and 1.70). With a residual 200 of 524,288
    take 1.59 and 1.44. Rows of shorter vectors, without weights or with weights by channel were not measured so.
    """
    has_weights = problem.channels is None and not (problem.weight is None and problem.bias is None)
    if not isinstance(problem, ForwardProblem) or not has_weights:
        return False
    itemsize = DTYPES[problem.x.dtype].itemsize
    read = problem.columns * itemsize * len(problem.matrices_read)
    return width * itemsize == 16 and read > _MOST_SHARED_BYTES


def _shared_ways(problem: Problem, device: Device, width: int, peeled: bool) -> Iterator[RowBlock]:
    """The ways to share a row, best first, with the most vectors and blocks of each."""
    # 50257 columns of float32, peeled, take 1.13 with 256 threads a block (backward 1.19, with 512 1.40).
    threads = 256 if peeled and width == 4 else _MOST_THREADS
    way = RowBlock(width, 16, threads, 1, 16, "ahead", peeled, "staged", 1)
    if isinstance(problem, BackwardProblem):
        # 32,768 columns of bfloat16 take 1.07 with two rows ahead, 1.19 with one; with a residual 1.06 and 1.04.
        ahead = (2, 1) if not peeled and problem.dresidual_out is None else (1,)
        if width == 8 and device.capability == 90:
            # 32768 columns of bfloat16 take 1.07 with two blocks of 128 threads a multiprocessor, 1.10 with one of 512,
            # and 50257 (peeled) 1.62 and 1.73 with one of 256. Weights come early where there are registers: 15,872
            # columns, of which not all threads have as many, take 1.05 so, staged 1.19 (but 16,384 1.09 and 1.06). 7
            # vectors would spill so, 8 in any case; 12,800 columns take 1.19 with 7, and by four blocks 1.32.
            crowd = replace(way, vectors=7, threads_per_row=128, blocks_per_row=8, blocks_per_multiprocessor=2)
            pair, early = replace(crowd, blocks_per_row=2), replace(crowd, vectors=6, weights="early")
            for each, rows in itertools.product((crowd,) if peeled else (pair, early, crowd), ahead):
                yield replace(each, rows_ahead=rows)
        if not peeled and problem.weight is not None and width >= 4 and device.capability == 90:
            # 100,000 columns of float32 take 1.14, staged 1.17; 65536 of bfloat16 1.07 with two rows ahead, 1.26 with
            # one, and 1.14 staged by four blocks of 512 threads.
            early = replace(way, weights="early")
            if width == 4:
                yield early
            else:
                for rows in ahead:
                    yield replace(early, threads_per_row=256, blocks_per_row=8, rows_ahead=rows)
    elif problem.residual is not None and problem.norm.centered and not peeled and device.capability < 120:
        # 32768 columns of bfloat16 with a residual take 1.09, fetched ahead 1.13; 65536 1.18 and 1.21.
        yield RowBlock(width, 4, threads, 1, 4, min_blocks=2)
    yield way
    yield replace(way, threads_per_row=_MOST_THREADS)
    yield replace(way, threads_per_row=_MOST_THREADS, weights="late")


def _narrow(problem: Problem, device: Device, width: int) -> RowBlock | None:
    """Rows that do not all begin and end at multiples of 16 bytes."""
    itemsize = DTYPES[problem.x.dtype].itemsize
    piece = 16 // itemsize
    forward = isinstance(problem, ForwardProblem)
    # Shorter rows have too many edges; but 65 columns of float32 take 1.06 peeled, number by number 2.24. What does not
    # lie alike is better read so too: 4096 columns of float32 that begin 4 bytes late take 1.09, peeled 1.38.
    least = 16 * piece
    may_peel = forward or not has_channels(problem)
    if may_peel and problem.columns >= least and lie_alike(problem) and device.capability >= 80:
        return _peeled(problem, device, piece)
    # Tiny rows of 4-byte numbers leave as they came, as a run: 10,000,000 rows of 10 take 1.05, directly 1.40. With two
    # bytes a number the arithmetic is the limit, and the detour costs more than it saves.
    dense = all(matrix.row_strides[0] == problem.columns for matrix in problem.matrices)
    if itemsize >= 4 and problem.columns <= 32 and dense:
        geometry = RowBlock(width, problem.columns // width, 1, 128 if forward else 64, 1, "run")
        in_registers = fits_registers(problem, device, width, geometry.vectors, geometry.threads)
        if in_registers and fits(geometry, problem, device):
            geometry = persistent(geometry, problem, device)
            # As many blocks as are launched must have the registers: one in a second wave takes as long as all.
            return replace(geometry, min_blocks=geometry.blocks_per_multiprocessor)
    vectors_per_row = problem.columns // width
    # 257 columns of float32: 32 threads of 9 take 1.15, 16 of 17 1.58; 1023: 128 of 8 1.11, 64 of 16 1.18.
    wanted = 6 if forward and 128 <= vectors_per_row <= 1024 else 8.5
    if problem.rows <= 2 * device.multiprocessors:
        wanted = min(wanted, max(1.0, 2 * _vectors_for_all_threads(problem, device, vectors_per_row)))
    threads, vectors = _spread(vectors_per_row, wanted)
    if not fits_registers(problem, device, width, vectors, max(threads, 256)):
        return _peeled(problem, device, piece) if may_peel else None
    # Two neighbouring threads a row at least: at 10 columns of bfloat16 one takes 2.98 of a copy's time, two 2.05.
    if threads == 1 and vectors > 1:
        threads, vectors = 2, -(-vectors // 2)
    rows = max(1, 64 // threads) if forward else _rows_per_block(problem, device, 256 // threads, threads)
    geometry = RowBlock(width, vectors, threads, rows)
    if forward:
        early = replace(geometry, weights="early")  # 257 columns of bfloat16: 1.65, late 1.76
        return early if threads == 32 and fits_early(early, problem, device) else geometry
    most = max(1, device.threads_per_multiprocessor // geometry.threads)
    return replace(geometry, blocks_per_multiprocessor=min(2, most))


def _peeled(problem: Problem, device: Device, width: int) -> RowBlock | None:
    """Rows whose edges are peeled off. Those that are not read directly are fetched ahead, their weights at hand."""
    forward, alike = isinstance(problem, ForwardProblem), lie_alike(problem)
    if isinstance(problem, ForwardProblem) and alike and device.capability >= 80:
        geometry = _peeled_directly(problem, device, width)
        if geometry is not None:
            return geometry
    vectors_per_row = problem.columns // width
    direct = not alike or device.capability < 80
    threads, vectors = _spread_peeled(vectors_per_row, width, forward, direct)
    while threads < _MOST_THREADS and not fits_registers(problem, device, width, vectors, threads, True, direct):
        threads *= 2
        vectors = -(-vectors_per_row // threads)
    most_vectors = 16 if forward and not direct else 12
    if vectors > most_vectors or not fits_registers(problem, device, width, vectors, threads, True, direct):
        return _shared_row(problem, device, width, peeled=True) if alike else None
    if not direct:
        rows, most, ahead = _crowd_of_peeled(vectors, threads, forward)
        rows = _rows_per_block(problem, device, rows, threads) if vectors_per_row <= 256 else 1
        geometry = RowBlock(width, vectors, threads, rows, 1, "ahead", True, "staged", rows_ahead=ahead)
        if isinstance(problem, BackwardProblem):
            geometry = replace(geometry, weights=_backward_weights(geometry, problem, device))
        share = max(1, min(most // geometry.threads, resident(geometry, problem, device)))
        if fits(geometry, problem, device):
            return replace(geometry, blocks_per_multiprocessor=share)
        shared = _shared_row(problem, device, width, peeled=True)
        if shared is not None:
            return shared
    geometry = RowBlock(width, vectors, threads, max(1, 128 // threads), 1, "direct", True)
    return geometry if forward else persistent(geometry, problem, device)


def _peeled_directly(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows that are read directly, as other rows are; None for those with a residual, and longer than was measured so.

    A block for every group of rows lets the multiprocessors, some of which are slower, share them better than blocks
    that take turns: 4096 columns take 1.03 so, in turns 1.11. But where rows begin in different ways, each reads its
    weights across two pieces. Sixteen-bit numbers can mostly not afford that twice: layer norm of 4097 columns of
    bfloat16 takes 1.13 in turns and 1.15 without, 1025 of them 1.17 and 1.08; RMS norm of 4097 1.03 without, 1.14
    fetched ahead. float32: 129 columns take 1.08, 513 0.99, 1023 1.01, 4097 1.01, 8191 1.05; in turns 1.12, 1.06, 1.08,
    1.08, 1.11.
    """
    vectors_per_row, itemsize = problem.columns // width, DTYPES[problem.x.dtype].itemsize
    if problem.residual is not None or itemsize == 8 or vectors_per_row > (1024 if itemsize == 2 else 2048):
        return None
    much_to_shift = itemsize == 2 and (len(problem.parameters) > 1 or _are_wide(problem))
    takes_turns = much_to_shift and (_are_wide(problem) or not 96 <= vectors_per_row <= 160)
    wanted = 1.9 if vectors_per_row <= 48 else 3.9 if vectors_per_row <= 512 else 4.5
    if much_to_shift and vectors_per_row <= 160:
        wanted = vectors_per_row / 16  # 16 threads: 1025 columns take 1.08 with 8 vectors of each, 32 of 4 1.21
    threads, vectors = _spread(vectors_per_row, wanted)
    if threads > 128 and vectors_per_row <= 12 * 128:
        threads, vectors = 128, -(-vectors_per_row // 128)  # 5121 columns of float32: 1.03, 256 threads of 5 1.13
    # Two long rows a block share its weights: 4097 columns of float32 take 1.01 so, 1.06 alone.
    rows = 2 if threads >= 128 and vectors > 4 else max(1, 128 // threads)
    weights = "staged" if problem.parameters else "late"
    rows = _rows_per_block(problem, device, rows, threads)
    geometry = crowded(RowBlock(width, vectors, threads, rows, 1, "direct", True, weights), problem, device)
    if takes_turns:
        geometry = _in_turns(geometry, problem, device)
    elif much_to_shift and vectors > 6:
        geometry = replace(geometry, min_blocks=blocks_with(geometry, 80))  # 1023 columns take 1.12 so, with 64 1.15
    return geometry if fits(geometry, problem, device) else None


def _in_turns(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """The same by blocks that take turns over rows which begin in different ways, each with its own weights."""
    if geometry.threads_per_row > 32:
        geometry = replace(geometry, rows_per_block=max(1, 64 // geometry.threads_per_row))
    # What is staged must leave the cache a third of the memory: 8191 columns take 1.13 by four blocks, by six 1.34.
    staged = replace(geometry, blocks_per_multiprocessor=1).shared_bytes(problem)
    room = device.shared_bytes * 5 // 8 // max(1, staged)
    threads = min(1024 if geometry.vectors <= 2 else 768, device.threads_per_multiprocessor)
    share = max(1, min(threads // geometry.threads, room))
    return replace(geometry, blocks_per_multiprocessor=share, min_blocks=share)


def _crowd_of_peeled(vectors: int, threads: int, forward: bool) -> tuple[int, int, int]:
    """Rows of a block where they are short, threads of a multiprocessor, and rows ahead.

    bfloat16 forward, of what is not read directly: 1601 columns (7 vectors a thread) take 1.17 with 384 threads a
    multiprocessor; 4097 (8) 1.17 with 256, with 384 1.20.
    Backward: 257 columns take 1.57 with 768 threads a multiprocessor, with 512 and two rows ahead 1.72.
    """
    if forward:
        most = 768 if vectors <= 2 else 512 if vectors <= 4 else 384 if vectors <= 7 else 256
        return (256 if vectors <= 2 else 64) // threads, most, 1
    return 256 // threads, 768 if vectors == 1 else 512, 1


def _spread_peeled(vectors_per_row: int, width: int, forward: bool, direct: bool) -> tuple[int, int]:
    """Threads, a warp at least, and vectors of each.

    bfloat16 forward: 1023 columns take 1.47 with 32 threads of 4, 15,873 1.31 with 128 of 16 and 2.01 with 256 of 8.
    Backward: 1023 columns take 1.28 with 64 threads of 2, 4097 1.15 with 128 of 4 and 1.27 with 64 of 8, 15,873 1.17
    with 256 of 8. float32 backward: 4097 columns take 1.09 with 512 threads of 2, with 256 of 4 1.11.
    """
    if forward:
        wanted = 1.9 if vectors_per_row <= 256 else 5.0 if direct or width == 8 else 7.5
    elif vectors_per_row <= 256:
        wanted = 1.9
    else:
        wanted = 1.9 if width == 4 else 4.0 if vectors_per_row <= 704 else 2.4 if vectors_per_row <= 1024 else 5.0
    threads, _ = _spread(vectors_per_row, wanted)
    if forward and width == 8:
        threads = min(threads, 128)
    threads = max(32, threads)
    return threads, -(-vectors_per_row // threads)
