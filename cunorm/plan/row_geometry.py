"""How rows are best spread over threads and blocks: the built-in choice.

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said. They were
found by timing `row_candidates`; on another GPU ``cunorm.tune`` does that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cunorm.plan import channel_row_geometry, channel_row_peeled, channel_row_single, channel_row_whole
from cunorm.plan.device import Device
from cunorm.plan.row_activated import activated_row_backward, activated_row_forward
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_clusters import clusters_backward, clusters_forward
from cunorm.plan.row_fit import crowded, fits, fits_early, fits_registers, with_registers, with_room
from cunorm.plan.row_memory import are_rows, compute_itemsize, row_width
from cunorm.plan.row_narrow import narrow
from cunorm.plan.row_plain import plain_float32_backward, plain_row_backward
from cunorm.plan.row_shared import shared_row
from cunorm.plan.row_shifted import shifted_row_backward
from cunorm.plan.row_spread import (
    MOST_THREADS,
    more_threads,
    rows_per_block,
    spread,
    threads_for,
    three_ahead,
    vectors_for_all_threads,
)
from cunorm.plan.row_turns import row_in_turns
from cunorm.plan.row_weights import are_wide, backward_weights, with_weights
from cunorm.plan.row_wide import wide_row
from cunorm.problem import GELUS, BackwardProblem, ForwardProblem, Problem

__all__ = ["backward_geometry", "forward_geometry"]

# So few bytes of sums over channels, which column_sums reads again, are no matter.
_FEW_SUM_BYTES = 1 << 20
# Of a block, where clusters of 16 share few rows.
_FEW_THREADS = 256
# Weights by channel take next to no room, and come late.
_NO_WEIGHTS: dict[str, Any] = {"weight": None, "bias": None}


def forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if problem.columns == 0 or not are_rows(problem):
        return None
    if problem.channels is None:
        return _forward_geometry(problem, device)
    single = channel_row_single.geometry(problem, device)
    if single is not None:
        return single
    geometry = channel_row_geometry.forward_geometry(problem, device)
    geometry = geometry or _forward_geometry(replace(problem, **_NO_WEIGHTS), device)
    if geometry is None:
        return None
    geometry = channel_row_geometry.with_channels(geometry, problem, device)
    return channel_row_peeled.with_more_blocks(geometry, problem, device)


def _forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    width, piece = row_width(problem), 16 // problem.itemsize
    of_wide = wide_row(problem, device, width)
    if of_wide is not None:
        return of_wide
    if width < piece:
        return narrow(problem, device, width)
    for better in (row_in_turns, clusters_forward, activated_row_forward):
        geometry = better(problem, device, width)
        if geometry is not None:
            return geometry
    vectors_per_row = problem.columns // width
    if problem.rows <= 2 * device.multiprocessors:
        geometry = _few_rows(problem, device, width)
        if geometry is not None:
            return geometry
    threads, vectors = spread(vectors_per_row, _vectors_wanted(problem, device, vectors_per_row))
    in_part = vectors_per_row % threads > 0  # whether threads have more vectors than a row
    if vectors_per_row < 16 or (vectors_per_row <= 64 and in_part):
        threads = max(threads, threads_for(vectors_per_row, _most_of_short(problem, vectors_per_row)))
    if vectors_per_row >= 16:
        most = _most_of_others(problem, device, vectors_per_row, in_part)
        threads = max(threads, min(MOST_THREADS, threads_for(vectors_per_row, most)))
    vectors = -(-vectors_per_row // threads)
    if threads == MOST_THREADS and vectors > _most_vectors(problem, device):
        return _long_row(problem, device, width) or shared_row(problem, device, width)
    # Two warps are enough for a block, but where a thread has a single vector of sixteen-bit numbers.
    block_threads = 128 if vectors == 1 and piece == 8 else 64
    geometry = RowBlock(width, vectors, threads, max(1, block_threads // threads))
    return with_weights(crowded(geometry, problem, device), problem, device)


def _most_of_short(problem: ForwardProblem, vectors_per_row: int) -> int:
    """Vectors of a thread, at most, where a row has up to 64, for the reason that row_short gives.

    On an H100 40 and 168 columns of float16 take 1.05 and 1.00 with 3, with 5 and 6 1.62 and 1.21; 72 of RMS norm 1.01
    with 2, with 3 1.09; 20 of float32 1.01 with 2, with 3 1.19; 148 1.00 with 3, with 5 1.03.
    Under the exact gelu lanes without a vector cost most: 296 columns of float16 take 1.05 with 5, 1.23 with 3.
    """
    if problem.norm.activation in GELUS and vectors_per_row > 12:
        return 5
    itemsize = problem.itemsize
    if vectors_per_row >= 16:
        return 3 if itemsize == 4 and vectors_per_row <= 48 else 4
    if itemsize > 2:
        return 2 if vectors_per_row > 3 else 3
    light = problem.residual is not None or not problem.norm.centered or not problem.parameters
    in_sectors = vectors_per_row % 2 == 0 or vectors_per_row == 3
    return 2 if light and not in_sectors and problem.norm.activation is None else 3


def _most_of_others(problem: ForwardProblem, device: Device, vectors_per_row: int, in_part: bool) -> float:
    """Vectors of a thread, at most, in longer rows; `in_part`: where not all threads have as many.

    8 that not all have, whose weights come late, are too many: layer norm of 1000 and 4000 columns of float16 takes
    0.99 and 0.99 with 4, with 8 1.05 and 1.03, and 32,768 rows of them 1.02 and 1.02, else 1.22 and 1.06; under silu
    1000 of bfloat16 1.07, else 1.17. But 1416 and 2824 take 1.02 and 1.01 with 6 and 7, with 3 and 4 1.06 and 1.06. Of
    float32 500 and 1000 take 0.99 and 0.99 with 2, with 8 1.04 and 1.03, and 2000 and 4000 1.00 and 1.00 with 4, with 8
    1.03 and 1.03; 8192 1.03 and 1.05.

    Without a bias, or beside a residual, there is less to do for each, and 2 or 3 are best where there are many rows:
    1000, 2000 and 6144 columns of RMS norm of bfloat16 take 0.99, 0.99 and 1.00 so, with 6 and 8 1.03, 1.01 and 1.02;
    16,384 1.03 with 4, with 8 1.05; with a residual 1000, 4000 and 8192 1.02, 1.02 and 1.02, with 4 1.03, 1.03 and
    1.04. But 4096 columns, RMS norm, take 1.05 with 2, 1.02 with 4, and 4096 rows of 2048 0.99 with 2, 0.95 with 8.
    """
    itemsize, activation = problem.itemsize, problem.norm.activation
    many = vectors_for_all_threads(problem, device, vectors_per_row) >= 16
    light = activation is None and (not problem.norm.centered or problem.residual is not None)
    if itemsize == 8 or 1024 < vectors_per_row < 1920 or not (many or (in_part and not light)):
        return math.inf
    if light:
        most_of_few = 1024 if problem.residual is not None else 768 if itemsize == 4 else 384
        return 3 if vectors_per_row <= most_of_few else 4
    if itemsize == 2 and are_wide(problem) and not 128 < vectors_per_row <= 512:
        return math.inf  # 1000 columns with float32 weights: 1.07, with 4 1.18
    if itemsize == 2 or activation in GELUS:
        return 7 if in_part and vectors_per_row <= (1024 if activation is None else 256) else math.inf
    if activation is not None:
        return 4 if vectors_per_row <= 1024 else math.inf
    return 3 if many and vectors_per_row <= (384 if in_part else 128) else 4


def _most_vectors(problem: ForwardProblem, device: Device) -> int:
    """Of a thread, where one block has a row that clusters could share.

    12 are 48 registers: 49,152 columns of RMS norm, whose weights are as many bytes as a row, take 1.02, and as many
    with a residual. The weights and biases of layer norm are twice that, which the cache does not keep: 40,960 columns
    take 1.21 in one block, in two 1.04; 49,152 1.30 and 1.03; 24,576 of float32 1.25 and 1.02. With a residual 40,960
    take 1.05 in one block, in two 1.03. On other GPUs with clusters none of this was measured, nor of float64.
    """
    much = problem.norm.centered and (problem.residual is not None or len(problem.parameters) > 1)
    return 8 if much and device.groups(2) and problem.x.dtype != "float64" else 12


def _long_row(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """One block for a row that fills its registers; None where that is slower than to share it.

    RMS norm of 8192 rows of 65,536 bfloat16 numbers takes 1.02 so, by clusters of two 1.04; of 53,248 1.02, fetched
    ahead 1.08; but of 1024 rows 1.09 and by clusters 1.07, and under silu 1.10 and 1.03. Norms without weights take
    1.02, fetched ahead 1.08.
    """
    light = not problem.parameters or (not problem.norm.centered and len(problem.parameters) == 1)
    light = light and problem.norm.activation is None and problem.residual is None and problem.channels is None
    if not light or device.capability != 90 or problem.rows < 16 * device.multiprocessors:
        return None
    vectors = -(-problem.columns // width // MOST_THREADS)
    weights = "staged" if problem.parameters else "late"
    geometry = RowBlock(width, vectors, MOST_THREADS, weights=weights)
    in_registers = vectors <= 16 and fits_registers(problem, device, width, vectors, MOST_THREADS, direct=True)
    return geometry if in_registers and fits(geometry, problem, device) else None


def _vectors_wanted(problem: ForwardProblem, device: Device, vectors_per_row: int) -> float:
    """The least number of vectors that a thread is to have: 3 to 4.5, fewer where that leaves multiprocessors idle.

    That makes 3 to 8 of them: at 256 columns of bfloat16 8 threads of 4 take 1.02, 16 of 2 1.08; at 2048 64 of 4 1.01
    and 32 of 8 1.03; at 5120 128 of 5 1.01 and 256 of 3 1.15; at 8192 256 of 4 1.02 and 128 of 8 1.04; at 16,384 256 of
    8 1.06 and 512 of 4 1.10, but with a residual 1.05 and 1.03. RMS norm has registers for more, which few rows need:
    2048 of 4096 take 0.97 with 64 of 8, with 128 of 4 1.03, 4096 of 2048 0.91 and 0.95; but 65,536 of 2048 1.03 and
    1.00.

    With 8 all rows run at once, or in two waves, where they would take twice as many with 4: on an H100 8192 and 9500
    rows of 1024 take 0.90 and 0.93 of the time so, of 512 float32 numbers 0.89 and 0.93, but 4600 rows 0.98; layer norm
    of 6300 and 8100 rows of 1024 0.92 and 0.97, of 2000 of 4096 1.08.
    """
    for_all = vectors_for_all_threads(problem, device, vectors_per_row)
    simple = problem.norm.activation is None and problem.residual is None and problem.itemsize <= 4
    waves = 7 if not problem.norm.centered else 4 if 64 <= vectors_per_row <= 128 else 0
    if simple and 2.9 <= for_all <= waves:
        return 8
    plain = not problem.norm.centered and problem.norm.activation is None and problem.itemsize == 2
    wanted = 4.5 if vectors_per_row > 1024 or (plain and vectors_per_row >= 256 and for_all <= 8) else 4
    if vectors_per_row < 32 or problem.residual is not None:
        wanted = 3  # 100 columns of float32: 8 threads of 4
    return max(1.0, min(wanted, 2 * for_all))


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
    ahead = _few_ahead(problem, device, width, vectors_per_block) if blocks == 16 else None
    if ahead is not None:
        return ahead
    threads = min(256 if vectors_per_block <= 1024 else MOST_THREADS, 1 << vectors_per_block.bit_length() - 1)
    vectors = -(-vectors_per_block // threads)
    rows = max(1, 64 // threads)
    geometry = RowBlock(width, vectors, threads, rows, blocks, weights="early")
    in_registers = vectors <= 8 and fits_registers(problem, device, width, vectors, geometry.threads, direct=True)
    full = (geometry.threads, vectors, problem.itemsize) == (MOST_THREADS, 4, 4)
    if full and blocks == 1 and problem.rows > device.multiprocessors:
        return None  # two have no room on a multiprocessor: 200 rows of 8192 float32 numbers take 0.84 to 0.89 staged
    return geometry if in_registers and fits_early(geometry, problem, device) else None


def _few_ahead(problem: ForwardProblem, device: Device, width: int, vectors: int) -> RowBlock | None:
    """Few long rows of sixteen-bit numbers that clusters share, of so many vectors a block; None for others.

    On an H100 1 to 7 rows of 200,000, 262,144 and 400,000 float16 numbers take 0.89 to 0.91, 0.90 to 0.94 and 0.89 to
    0.95 of the time of weights that come early so, RMS norm 0.91 to 0.95, 0.96 to 0.99 and 0.91 to 0.93; of 524,288
    0.93 to 1.03 and 0.96 to 1.0.
    """
    each = -(-vectors // _FEW_THREADS)
    timed = device.capability == 90 and problem.norm.activation is None and problem.residual is None
    if not timed or problem.itemsize != 2 or not 7 <= each <= 16 or not problem.parameters:
        return None
    geometry = RowBlock(width, each, _FEW_THREADS, 1, 16, "ahead", weights="staged", blocks_per_multiprocessor=1)
    return geometry if fits(geometry, problem, device) else None


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if not are_rows(problem):
        return None
    if problem.channels is None:
        return channel_row_single.geometry(problem, device) or _backward_geometry(problem, device)
    # Every row leaves sums of its channels: where those are short, as much as is moved else.
    sum_bytes = len(problem.sums) * problem.rows * problem.channels.channels_per_row * compute_itemsize(problem)
    few_bytes = min(_FEW_SUM_BYTES, device.multiprocessors << 18)
    if sum_bytes > max(few_bytes, problem.bytes_moved // 3):
        return None
    single = channel_row_single.geometry(problem, device)
    if single is not None:
        return single
    geometry = (
        channel_row_whole.geometry(problem, device)
        or channel_row_geometry.backward_geometry(problem, device)
        or channel_row_peeled.backward_geometry(problem, device)
    )
    if geometry is None:
        geometry = _backward_geometry(replace(problem, **_NO_WEIGHTS), device)
        if geometry is not None:
            geometry = with_room(replace(geometry, weights="late"), problem, device)
    if geometry is None or not fits(geometry, problem, device):
        return None
    geometry = channel_row_geometry.with_channels(geometry, problem, device)
    # Under an activation 8 vectors of sixteen-bit numbers would spill 16 to 32 bytes in a block that has whole rows; in
    # a cluster they don't. Slabs take as long: 1.49 for 32,768 float16 numbers of a channel under silu.
    full = geometry.blocks_per_row == 1 and geometry.threads * geometry.vectors >= 8 * MOST_THREADS
    return None if full and geometry.width == 8 and problem.norm.activation is not None else geometry


def _backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """That of rows whose weights are by column.

    A single row has a vector a thread, and a block for itself: 768 and 1024 columns of bfloat16 take 5.1 and 5.1 us on
    an H100, else 5.4 and 5.2; 512 and 1024 of float32 5.1 and 5.2, else 5.6 and 5.5. Longer ones take as long with
    more.
    """
    itemsize = problem.itemsize
    width, piece = row_width(problem), 16 // itemsize
    if width < piece:
        return narrow(problem, device, width)
    others = activated_row_backward, shifted_row_backward, plain_row_backward, plain_float32_backward
    for better in (clusters_backward, *others):
        geometry = better(problem, device, width)
        if geometry is not None:
            return geometry
    vectors_per_row = problem.columns // width
    if problem.rows == 1 and vectors_per_row <= (128 if itemsize == 2 else 256):
        return with_room(RowBlock(width, 1, max(32, threads_for(vectors_per_row, 1))), problem, device)
    short = vectors_per_row <= (64 if itemsize == 2 else 127)
    geometry = (_short_rows_backward if short else _long_rows_backward)(problem, device, width)
    if geometry is None:
        return shared_row(problem, device, width)
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
        geometry = replace(geometry, weights=backward_weights(geometry, problem, device))
    return with_room(geometry, problem, device)


def _short_rows_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Several rows a block; None where registers are too few.

    256 columns of bfloat16 take 1.06 with one vector a thread and two rows ahead, as with two vectors and one row, but
    65,536 rows of them 1.23 and 1.29; RMS norm 1.05 with 4 vectors, 1.08 with one. 512 take 1.07 with 2 vectors, and
    32,768 rows of them 1.22, with 4 and one row ahead 1.33. Of float32 256 and 512 columns take 1.01, read directly
    1.05; but 100 take 1.05 directly, and fetched ahead 1.09.
    """
    vectors_per_row, sixteen_bit = problem.columns // width, problem.itemsize == 2
    many = vectors_for_all_threads(problem, device, vectors_per_row) >= 2
    if many and vectors_per_row <= (24 if sixteen_bit else 31):
        return _short_rows_ahead(problem, device, width) or _shortest_rows_backward(problem, device, width)
    wanted, block_threads, share, stage, ahead = 4.0, 128, 3, "ahead", 1
    if sixteen_bit and vectors_per_row > 32:
        wanted, ahead = 2.0, 2
    elif sixteen_bit and (problem.norm.centered or problem.norm.activation is not None):
        wanted, block_threads, share, ahead = 1.0, 256, 2, 2
    elif vectors_per_row < 32 and not sixteen_bit:
        wanted, block_threads, share, stage = 3.0, 256, 2, "direct"
    for_all = vectors_for_all_threads(problem, device, vectors_per_row)
    wanted = min(wanted, for_all / 2 if sixteen_bit else for_all)
    threads, vectors = more_threads(problem, device, spread(vectors_per_row, wanted), block_threads)
    if not fits_registers(problem, device, width, vectors, max(threads, block_threads)):
        return None
    rows = rows_per_block(problem, device, block_threads // threads, threads)
    share = max(1, share * block_threads // (threads * rows))
    stage = stage if device.capability >= 80 else "direct"
    return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share, rows_ahead=ahead)


def _short_rows_ahead(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of 9 to 24 vectors of sixteen-bit numbers, two ahead; None for others, and where that was not timed.

    On an H200 104, 112, 144 and 160 columns of bfloat16 take 1.18, 1.08, 1.11 and 1.08 so, directly 1.27, 1.23, 1.25
    and 1.18, but 72 1.29 and 1.26; with float32 weights 72, 80, 144 and 160 1.29, 1.16, 1.11 and 1.06, directly 1.49,
    1.43, 1.46 and 1.39.
    """
    vectors_per_row = problem.columns // width
    plain = problem.dresidual_out is None and problem.norm.activation is None and problem.parameters
    timed = plain and problem.itemsize == 2 and device.has_fast_memory and device.capability == 90
    # Of others 88 columns take 1.34 and 1.18, 184 1.16 and 1.13; of RMS norm 88 1.29 and 1.10.
    wide = are_wide(problem) and problem.norm.centered
    if not timed or not (9 if wide else 13) <= vectors_per_row <= 24:
        return None
    if not wide and vectors_per_row > 17 and vectors_per_row % 2 > 0:
        return None
    threads = threads_for(vectors_per_row, 3)
    vectors = -(-vectors_per_row // threads)
    share = 2 if vectors == 3 else 3
    geometry = RowBlock(width, vectors, threads, 128 // threads, 1, "ahead", False, "early", share, rows_ahead=2)
    return geometry if fits_early(geometry, problem, device) and fits(geometry, problem, device) else None


def _shortest_rows_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock:
    """Rows of up to 24 vectors, or of 31 of larger numbers, read directly by 512 threads of a multiprocessor at once.

    On an H100 24, 56, 104 and 168 columns of float16 take 1.21, 1.13, 1.16 and 1.08 so, fetched ahead 1.47, 1.27, 1.14
    and 1.14; 20 and 36 of float32 1.14 and 1.12, with more vectors of each thread 1.37 and 1.31. On an H200 20 and 60
    of float32 take 1.09 and 1.08 by 1024 threads of 2 vectors, by 512 of 3 and 2 1.18 and 1.15. With a residual 64 and
    128 of bfloat16 take 1.07 and 1.06 ahead on an H100, a vector a thread, directly 1.11 and 1.11. On an H200 24
    columns take 1.39 by four threads, one of which has nothing, by one 1.51, and 250,000 rows of them 1.53 and 3.0.
    """
    vectors_per_row = problem.columns // width
    has_residual, sixteen_bit = problem.dresidual_out is not None, problem.itemsize == 2
    if sixteen_bit and has_residual and vectors_per_row in (8, 16) and device.capability == 90:
        ahead = three_ahead(width, vectors_per_row, vectors_per_row)
        if problem.parameters and fits_early(ahead, problem, device):
            return ahead
    light = problem.dresidual_out is None and problem.norm.activation is None and device.has_fast_memory
    light_float32 = light and problem.itemsize == 4
    most = 3 if vectors_per_row <= 24 else 4
    if light_float32 and vectors_per_row <= 16:
        most = 2
    if light and sixteen_bit and vectors_per_row == 3:
        most = 1
    threads = threads_for(vectors_per_row, most)
    threads, vectors = more_threads(problem, device, (threads, -(-vectors_per_row // threads)), 128)
    share = 8 if light_float32 and vectors == 2 else 6 if vectors == 1 else 4
    share = min(share, device.threads_per_multiprocessor // 128)
    geometry = RowBlock(width, vectors, threads, 128 // threads, blocks_per_multiprocessor=share, min_blocks=share)
    early = replace(geometry, weights="early")
    # Under the exact gelu those of doubles would spill.
    light = problem.norm.activation is None or problem.itemsize < 8
    return early if light and problem.parameters and fits_early(early, problem, device) else geometry


def _long_rows_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """A row a block, or several; None where registers are too few, or blocks had better share a row.

    At 5120 columns of bfloat16 128 threads of 5 vectors take 1.05, 256 of 3 1.11; 10,000 of float16 512 of 3 1.08, 256
    of 5 1.20; 1000 64 of 2 1.04, 32 of 4 1.23.
    """
    vectors_per_row, itemsize = problem.columns // width, problem.itemsize
    few, moderate = (problem.rows < turns * device.multiprocessors for turns in (8, 48))
    wanted = 3.0
    if itemsize == 2 and (vectors_per_row <= 512 or few):
        wanted = 2.0
    elif itemsize == 2 and vectors_per_row < 704:
        wanted = 2.2 if moderate else 4.0  # 4096 rows of 5120: 256 threads of 3 43.4 us, 128 of 5 46.0
    threads, vectors = spread(vectors_per_row, wanted)
    if itemsize == 2 and (vectors_per_row <= 512 or vectors_per_row > 1024) and vectors > 3 and threads < MOST_THREADS:
        threads, vectors = 2 * threads, -(-vectors_per_row // (2 * threads))
    threads, vectors = more_threads(problem, device, (threads, vectors), 64)
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
        rows = rows_per_block(problem, device, block_threads // threads, threads)
        while rows > 1 and not fits_registers(problem, device, width, vectors, threads * rows):
            rows //= 2
        share = max(1, all_threads // (threads * rows))
        return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share, rows_ahead=2)
    if itemsize == 2 and problem.dresidual_out is None and device.capability == 90:
        if (threads, vectors) == (256, 4):
            # 8192 columns of bfloat16: 1.07, by 256 threads 1.09; with a residual 256 take 1.02.
            return RowBlock(width, 2, MOST_THREADS, 1, 1, stage, blocks_per_multiprocessor=1, rows_ahead=2)
        if (threads, vectors) == (MOST_THREADS, 3) and device.has_fast_memory and len(problem.sums) > 1:
            # 14,563 and 3640 rows of 9216 columns, layer norm: 1.02 and 1.18, with one row ahead 1.07 and 1.23. With a
            # single sum 8 bytes would spill.
            return RowBlock(width, vectors, threads, 1, 1, stage, blocks_per_multiprocessor=1, rows_ahead=2)
        if (threads, vectors) == (MOST_THREADS, 4) and problem.rows > device.multiprocessors:
            return None  # 16,384 columns of bfloat16: 1.06 by clusters of four blocks, 1.11 by one block
    if itemsize == 4 and threads == MOST_THREADS and vectors > 4 and _may_share(problem, device):
        return None
    # 512 threads a multiprocessor: 6 % faster than 1024, which leave more partial sums. At 5120 columns, 5 vectors of
    # each, 256 take 1.08 and 512 1.13.
    block_threads, all_threads = 64, 512 if vectors <= 4 else 256
    if itemsize == 4 and threads <= 64:
        block_threads, all_threads = 128, 384  # 1000 columns of float32: 1.03, with a row a block 1.10
    if problem.rows < 8 * device.multiprocessors * (all_threads // threads):
        # Fewer blocks of more rows leave fewer partial sums: 4096 rows of 1024 take 17.5 us, with a row a block 19.7.
        block_threads = min(all_threads, 4 * threads)
    rows = rows_per_block(problem, device, block_threads // threads, threads)
    share = max(1, all_threads // (threads * rows))
    return RowBlock(width, vectors, threads, rows, 1, stage, blocks_per_multiprocessor=share)


def _may_share(problem: BackwardProblem, device: Device) -> bool:
    """Whether blocks had better share a row of float32 numbers that one could hold.

    On an H100 9216, 10,000, 10,752 and 12,000 columns take 1.04, 1.07, 1.03 and 1.06 so, by one block 1.06, 1.10, 1.09
    and 1.10; 10,000 of RMS norm 1.06 and 1.09, under silu 1.06 and 1.13, and 2000 rows of them 1.10 and 1.16. But with
    a residual 1.07 and 1.08.
    """
    measured = device.capability == 90 and problem.weight is not None and problem.channels is None
    return measured and problem.dresidual_out is None and problem.rows > device.multiprocessors


def _turns(geometry: RowBlock, problem: Problem, device: Device) -> float:
    """How many groups of rows each block has, of those that share rows."""
    blocks = geometry.blocks_per_multiprocessor * device.multiprocessors
    return -(-problem.rows // geometry.rows_per_block) / blocks


def _are_better_direct(geometry: RowBlock, problem: BackwardProblem, device: Device) -> bool:
    """Whether all blocks had better run at once, each with its own rows: where they keep no sums, and are few.

    512 rows of 1024 bfloat16 numbers take 7.2 us, fetched ahead 7.7; 256 of 4096 8.0 and 8.3, but 512 of 4096 10.9 and
    10.8.
    """
    if problem.sums or problem.channels is not None:
        return False
    few = problem.rows * geometry.threads_per_row <= 512 * device.multiprocessors
    threads = max(128, geometry.threads_per_row)
    return few and fits_registers(problem, device, geometry.width, geometry.vectors, threads, direct=True)
