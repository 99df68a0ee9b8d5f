"""Rows that begin anywhere and are read directly, forward: their edges are peeled off, and they all begin alike.

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, crowded, fits, fits_crowd
from cunorm.plan.row_memory import has_several_channels
from cunorm.plan.row_spread import MOST_THREADS, of_few, rows_per_block, spread, vectors_for_all_threads
from cunorm.plan.row_weights import are_wide
from cunorm.problem import GELUS, ForwardProblem

__all__ = ["peeled_directly"]

# Long rows, by the width of vectors and by what else is read: vectors of each of 256 threads, at most, and of each of
# 512, where a row has more. First where memory is slower, then where it is fast.
_MOST_DIRECTLY = {
    (8, "residual"): ((10, 10), (10, 0)),
    (8, "two weights"): ((11, 0), (11, 0)),
    (8, "no more"): ((16, 13), (16, 0)),
    (4, "residual"): ((10, 10), (10, 8)),
    (4, "two weights"): ((12, 8), (0, 0)),
    (4, "no more"): ((16, 13), (16, 0)),
}


def peeled_directly(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None for rows that take longer so."""
    return _short(problem, device, width) or _long(problem, device, width)


def _short(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of up to 16 or 32 KB that are read directly, as other rows are; None for those that take longer so.

    A block for every group of rows lets the multiprocessors, some of which are slower, share them better than blocks
    that take turns in fixed shares: 4096 columns take 1.03 so, in turns 1.11. float32: 129 columns take 1.08, 513 0.99,
    1023 1.01, 4097 1.01, 8191 1.05; in turns 1.12, 1.06, 1.08, 1.08, 1.11. RMS norm of 4097 columns of bfloat16 1.03,
    fetched ahead 1.14. On an H100 257, 1025 and 4097 with a residual take 1.03, 1.01 and 1.02, fetched ahead 1.25, 1.16
    and 1.05.
    """
    vectors_per_row, itemsize, residual = problem.columns // width, problem.itemsize, problem.residual
    measured = device.capability == 90 and problem.norm.activation is None and not are_wide(problem)
    if itemsize == 8 or (residual is not None and not measured):
        return None
    if residual is None and itemsize == 2 and (len(problem.parameters) > 1 or are_wide(problem)):
        return _shifted(problem, device, width)
    wanted = 1.9 if vectors_per_row <= 48 else 3.9 if vectors_per_row <= 512 else 4.5
    geometry = _laid(problem, device, width, of_few(problem, device, vectors_per_row, wanted))
    if vectors_per_row > (1024 if itemsize == 2 else 2048) or (residual is not None and geometry.vectors > 6):
        return None
    return geometry if fits(geometry, problem, device) else None


def _laid(problem: ForwardProblem, device: Device, width: int, wanted: float) -> RowBlock:
    """Blocks of a row or several, each thread with so many vectors or a few more."""
    vectors_per_row = problem.columns // width
    threads, vectors = spread(vectors_per_row, wanted)
    if threads > 128 and vectors_per_row <= 12 * 128:
        threads, vectors = 128, -(-vectors_per_row // 128)  # 5121 columns of float32: 1.03, 256 threads of 5 1.13
    # Two long rows a block share its weights: 4097 columns of float32 take 1.01 so, 1.06 alone.
    rows = rows_per_block(problem, device, 2 if threads >= 128 and vectors > 4 else max(1, 128 // threads), threads)
    weights = "staged" if problem.parameters else "late"
    geometry = crowded(RowBlock(width, vectors, threads, rows, 1, "direct", True, weights), problem, device)
    if problem.residual is not None and problem.itemsize == 2 and vectors > 4:
        # With 64 registers 12 to 150 bytes would spill.
        geometry = replace(geometry, min_blocks=blocks_with(geometry, 80))
    return geometry


def _shifted(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of sixteen-bit numbers with weights and biases, or wide ones, which each reads across two pieces.

    On an H100 257, 1537, 4097 and 8191 columns of bfloat16 take 1.03, 1.00, 1.00 and 1.02, in turns 1.13, 1.09, 1.02
    and 1.05; 1025 with float32 weights 1.02, in turns 1.20; 2049 under silu 1.03 and 1.07, but under gelu 1.22 and
    1.10.

    On an H200, whose memory does not wait for so many instructions, 769 and 1025 take 1.12 and 1.06, in turns 1.14 and
    1.11, but 513, 1537 and 5121 1.22, 1.14 and 1.25, in turns 1.13, 1.10 and 1.05, if there are many: 1024 rows of 4097
    take 1.03 and 1.18. With float32 weights 513 take 1.20, in turns 1.25, but 3001 1.26 and 1.15.
    """
    vectors_per_row, wide, activation = problem.columns // width, are_wide(problem), problem.norm.activation
    would_spill = wide and device.capability >= 100
    first, end = (64, 320) if wide else (65, 192)  # of the vectors a row has where it is better not to take turns
    better_in_turns = device.has_fast_memory and not first <= vectors_per_row < end
    if vectors_per_row >= end:
        better_in_turns = better_in_turns and vectors_for_all_threads(problem, device, vectors_per_row) >= 12
    if activation in GELUS or would_spill or better_in_turns:
        return _shifted_in_turns(problem, device, width)
    threads = 4 if problem.columns < 160 else 8
    most = 7 if vectors_per_row < 112 else 8 if activation is not None or wide or vectors_per_row <= 1024 else 12
    aim = of_few(problem, device, vectors_per_row, most)
    while threads < 128 and vectors_per_row > aim * threads:
        threads *= 2
    vectors = -(-vectors_per_row // threads)
    if vectors > most:
        return None
    block_threads = 256 if threads >= 128 or (threads == 64 and wide) else 128
    rows = rows_per_block(problem, device, block_threads // threads, threads)
    geometry = crowded(RowBlock(width, vectors, threads, rows, 1, "direct", True, "staged"), problem, device)
    if vectors > 6:
        # 1023 columns take 1.12 with 80, with 64 1.15.
        geometry = replace(geometry, min_blocks=blocks_with(geometry, 80))
    elif vectors > 3 and activation is not None and aim < most:
        geometry = replace(geometry, min_blocks=blocks_with(geometry, 128))  # few rows of 4097 under silu would spill
    return geometry if fits(geometry, problem, device) else None


def _shifted_in_turns(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same by blocks that take turns over rows which begin in different ways, each with its own weights."""
    vectors_per_row, wide = problem.columns // width, are_wide(problem)
    if vectors_per_row > 1024:
        return None
    wanted = 3.9 if vectors_per_row <= 512 else 4.5
    if vectors_per_row <= 160:
        wanted = vectors_per_row / 16  # 16 threads: 1025 columns take 1.08 with 8 vectors of each, 32 of 4 1.21
    elif vectors_per_row < 512 and problem.norm.activation not in GELUS:
        wanted = 2.9  # 1537 and 3001 columns take 1.10 and 1.10 with 3, with 6 1.11 and 1.13
    busy = wide or problem.norm.activation in ("relu", "silu")
    if busy and vectors_per_row >= 320 and device.capability == 90:
        return _ahead_in_turns(problem, device, width)
    geometry = _laid(problem, device, width, of_few(problem, device, vectors_per_row, wanted))
    if wide or not 96 <= vectors_per_row <= 160:
        geometry = _in_turns(geometry, problem, device)
    elif geometry.vectors > 6:
        geometry = replace(geometry, min_blocks=blocks_with(geometry, 80))
    return geometry if fits(geometry, problem, device) else None


def _ahead_in_turns(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of which more is to be read, or computed, and that come ahead.

    4097 and 8191 columns of bfloat16 with float32 weights take 1.12 and 1.16 so, read directly 1.20 and 1.24; under
    silu 1.17 and 1.15, directly 1.20 and 1.25.
    """
    vectors_per_row = problem.columns // width
    threads = 128 if vectors_per_row <= (512 if are_wide(problem) else 1024) else 256
    vectors = -(-vectors_per_row // threads)
    geometry = RowBlock(width, vectors, threads, 1, 1, "ahead", True, "staged")
    most = 768 if vectors <= 4 and not are_wide(problem) else 512
    room = device.blocks_with(geometry.shared_bytes(problem) + 1024)
    share = max(1, min(most // threads, room))
    geometry = replace(geometry, blocks_per_multiprocessor=share)
    return geometry if fits_crowd(geometry, problem, device, share) and fits(geometry, problem, device) else None


def _long(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """Longer rows, a block each, read directly; None where that was not faster.

    The numbers are of an H100, but for those below. A block for every row is best where little but the row is read: RMS
    norm of 15,873, 25,001 and 50,257 columns of bfloat16 takes 1.00, 1.00 and 1.02 so, ahead in turns 1.05, 1.08, 1.10;
    layer norm with a residual of 15,873 and 32,769 1.02 and 1.03, else 1.09 and 1.10. Layer norm without takes turns,
    whose weights are the block's own: 15,873 and 22,001 columns take 1.04 and 1.05, ahead 1.06 and 1.08, but 25,001
    1.13 and 1.09; and 1024 rows of 15,873, which no blocks would claim, take 1.07 without turns, ahead 1.24. float32:
    15,873 columns of layer norm take 1.03, ahead 1.05; 25,001 of RMS norm 1.01 and 1.07. Under silu 15,873 of float16
    take 1.06, ahead 1.15, but 20,001 1.12 and 1.04.

    On an H200 one block of 512 threads a multiprocessor does not keep up: RMS norm of 50,257 columns takes 1.22 so, by
    pairs of blocks 1.09; with a residual 15,873 of float32 1.05 and 1.14, without one 1.25, ahead 1.09. By three blocks
    of 256 threads 10,001 and 15,873 columns of layer norm take 1.09 and 1.08. Under silu 15,873 take 1.22, ahead 1.21.
    """
    vectors_per_row, activation = problem.columns // width, problem.norm.activation
    measured = device.capability == 90 and not has_several_channels(problem) and not are_wide(problem)
    measured = measured and problem.rows > 2 * device.multiprocessors and problem.itemsize < 8
    if not measured or vectors_per_row <= 768:
        return None
    many_weights = len(problem.parameters) > 1 and problem.residual is None
    reads = "residual" if problem.residual is not None else "two weights" if many_weights else "no more"
    most, most_shared = _MOST_DIRECTLY[width, reads][device.has_fast_memory]
    if activation is not None:
        most, most_shared = (8, 0) if many_weights and width == 8 and activation in ("relu", "silu") else (0, 0)
    threads = 256 if vectors_per_row <= 256 * most else MOST_THREADS
    vectors = -(-vectors_per_row // threads)
    if vectors > (most if threads == 256 else most_shared):
        return None
    geometry = RowBlock(width, vectors, threads, 1, 1, "direct", True, "staged" if problem.parameters else "late")
    share = 1 if threads == MOST_THREADS else 3 if vectors <= 8 else 2
    takes_turns = many_weights and (width == 8 or threads == MOST_THREADS)
    if takes_turns and problem.rows >= 8 * share * device.multiprocessors:
        geometry = replace(geometry, blocks_per_multiprocessor=share, min_blocks=share)
    in_registers = fits_crowd(geometry, problem, device, geometry.min_blocks)
    return geometry if in_registers and fits(geometry, problem, device) else None


def _in_turns(geometry: RowBlock, problem: ForwardProblem, device: Device) -> RowBlock:
    """The same by blocks that take turns over rows which begin in different ways, each with its own weights."""
    if geometry.threads_per_row > 32:
        # 2049 columns take 1.34 by blocks of one row, by two 1.13; but under the exact gelu 1.46 and 1.62.
        rows = (64 if problem.norm.activation in GELUS else 128) // geometry.threads_per_row
        geometry = replace(geometry, rows_per_block=max(1, rows))
    # What is staged must leave the cache a third of the memory: 8191 columns take 1.13 by four blocks, by six 1.34.
    staged = replace(geometry, blocks_per_multiprocessor=1).shared_bytes(problem)
    room = device.shared_bytes * 5 // 8 // max(1, staged)
    few = geometry.vectors <= (3 if geometry.threads_per_row > 32 else 2)
    threads = min(1024 if few else 768, device.threads_per_multiprocessor)
    share = max(1, min(threads // geometry.threads, room))
    return replace(geometry, blocks_per_multiprocessor=share, min_blocks=share)
