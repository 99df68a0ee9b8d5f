"""Rows of sixteen-bit numbers under an activation.

Backward, its derivative is most of the work, and is needed twice. A thread keeps it, or dz, from one pass for the next
where it has few vectors and many registers (SKIPS and KEPT in kernels/row_kept.cuh). Hence 256 or 384 threads a
multiprocessor, weights in registers, and two rows ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, crowded, fits, fits_early, that_fits
from cunorm.plan.row_memory import are_shifted, can_be_shared, columns_per_block, margin_of
from cunorm.plan.row_spread import threads_for, three_ahead, vectors_for_all_threads
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["activated_peeled_backward", "activated_row_backward", "activated_row_forward"]


class _Way(NamedTuple):
    blocks_per_row: int
    threads_per_row: int
    rows_per_block: int
    blocks_per_multiprocessor: int
    most_vectors: int  # of a thread


# Of rows of whole vectors, of those with a residual, and of rows that begin anywhere: the first that holds a row.
_WAYS = (
    _Way(1, 128, 1, 3, 2),
    _Way(1, 128, 1, 2, 5),
    _Way(1, 256, 1, 1, 4),
    _Way(2, 128, 1, 3, 3),
    _Way(2, 128, 1, 2, 5),
    _Way(4, 128, 1, 3, 3),
    _Way(4, 128, 1, 2, 5),
    _Way(8, 128, 1, 3, 3),
    _Way(8, 128, 1, 2, 5),
    _Way(8, 256, 1, 1, 5),
    _Way(16, 256, 1, 1, 5),
)
_WAYS_WITH_RESIDUAL = (
    _Way(1, 256, 1, 1, 3),
    _Way(2, 256, 1, 1, 3),
    _Way(4, 256, 1, 1, 3),
    _Way(8, 256, 1, 1, 4),
    _Way(16, 256, 1, 1, 4),
)
_WAYS_OF_PEELED = (
    _Way(1, 32, 8, 2, 1),
    _Way(1, 32, 4, 3, 2),
    _Way(1, 64, 2, 3, 2),
    _Way(1, 64, 2, 2, 4),
    _Way(1, 128, 1, 2, 4),
    _Way(2, 128, 1, 2, 4),
    _Way(2, 256, 1, 1, 4),
    _Way(8, 256, 1, 1, 4),
)
# Forward, vectors of rows; threads of a row, at most; and what those may have room for beside it, as a share.
_FORWARD, _MOST_LANES, _MOST_IDLE = range(40, 1025), 128, 0.1
# Vectors for each thread of the GPU: at least; and at most under the exact gelu.
_FEW, _MANY_OF_GELU = 1.5, 8
# Vectors of rows under the exact gelu, backward, for which five of a thread are best, and threads of such a row.
_FIVE = ((range(65, 81), 16), (range(137, 161), 32))
# Vectors of rows of which a block has several, and of others without a residual and with one.
_SHORT, _LONG, _LONG_WITH_RESIDUAL = range(4, 32), range(193, 1 << 20), range(385, 1 << 20)


def activated_row_forward(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry of rows that 3, 5, 6 or 7 vectors of each thread hold; None where another is better.

    Their weights come through shared memory. On an H200 7 and 24 MB of RMS norm under silu take 0.83 to 0.92 and 0.86
    to 0.95 of the time so, 96 MB 0.94 to 0.98. Under the exact gelu 8 and 24 MB of 384, 896 and 3072 columns take 0.88
    and 0.94, 0.89 and 0.79, 0.91 and 0.93; but 96 MB with 3 vectors 1.06 to 1.14, and all with 5 0.95 to 1.1.
    """
    vectors_per_row = problem.columns // width
    timed = _are_timed(problem, device) and device.has_fast_memory and problem.residual is None
    if not timed or vectors_per_row not in _FORWARD or are_shifted(problem):
        return None
    for_all = vectors_for_all_threads(problem, device, vectors_per_row)
    # As few vectors beyond the row as can be; of equals the most threads.
    lanes = [(threads, -(-vectors_per_row // threads)) for threads in (8, 16, 32, 64, _MOST_LANES)]
    lanes = [(threads, vectors) for threads, vectors in lanes if 3 <= vectors <= 8]
    threads, vectors = min(lanes, key=lambda lane: (lane[0] * lane[1], lane[1]))
    idle = threads * vectors / vectors_per_row - 1
    if for_all < _FEW or idle > _MOST_IDLE or vectors in (4, 8):
        return None
    if problem.norm.centered and vectors >= 6 and threads == _MOST_LANES and problem.norm.activation != "gelu":
        return None  # 2535 rows of 7168 under relu take 1.11 of the time, 3921 of 6144 1.21
    geometry = RowBlock(width, vectors, threads, _MOST_LANES // threads, weights="staged")
    if problem.norm.activation != "gelu":
        # With 64 registers 6 and 7 vectors of which some are beyond the row would spill.
        geometry = crowded(geometry, problem, device)
        if vectors >= 6 and idle > 0:
            geometry = replace(geometry, min_blocks=blocks_with(geometry, 80))
        return that_fits(geometry, problem, device)
    if vectors >= 6:
        return that_fits(replace(geometry, stage="ahead", blocks_per_multiprocessor=4), problem, device)
    return that_fits(geometry, problem, device) if vectors == 3 and for_all <= _MANY_OF_GELU else None


def activated_row_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None where another is better, or was not measured.

    Under relu and gelu_tanh, which were not timed, rows lie as under silu.
    """
    vectors_per_row = problem.columns // width
    if not _are_timed(problem, device):
        return None
    if vectors_per_row in _SHORT:
        return _short(problem, device, width)
    if vectors_per_row in (_LONG if problem.dresidual_out is None else _LONG_WITH_RESIDUAL):
        return _long(problem, device, width)
    return _of_gelu(problem, device, width)


def _short(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Three blocks of 128 threads a multiprocessor.

    On an H100, as the time over that of a copy of the same bytes, read directly, or ahead by four blocks, in brackets:
    28, 64, 100 and 168 columns of bfloat16 take 1.17 (1.20), 1.12 (1.26), 1.10 (1.25) and 1.13 (1.19) under silu, 1.17
    (1.58), 1.13 (1.16), 1.25 (1.72) and 1.22 (1.56) under the exact gelu, 64 with a residual 1.07 (1.19). By twice as
    many threads 28 and 100 take 1.23 and 1.26; under the exact gelu 20, 36 and 168, a part of which then idles, 1.33
    (by fewer 1.17), 1.40 (1.15) and 1.37 (1.22).
    """
    vectors_per_row, alone = problem.columns // width, problem.dresidual_out is None
    most = 1 if vectors_per_row <= 8 else 3 if problem.norm.activation == "gelu" and alone else 2
    if width < 8:
        most = 5 if alone else 4
    threads = threads_for(vectors_per_row, most)
    geometry = three_ahead(width, vectors_per_row, threads)
    few = problem.rows <= 9 * geometry.rows_per_block * device.multiprocessors
    return geometry if not few and _have_room(geometry, problem, device) else None


def _of_gelu(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """Rows of some hundred columns under the exact gelu.

    On an H200 7, 23 and 95 MB of layer norm of 640 columns take 0.91, 0.82 and 0.72 of the time so, of 1280 0.96, 0.88
    and 0.79; of RMS norm 0.82 to 0.95. With vectors to spare layer norm takes 0.85 to 1.06, RMS norm longer.
    """
    vectors_per_row = problem.columns // width
    threads = next((threads for vectors, threads in _FIVE if vectors_per_row in vectors), None)
    plain = problem.norm.activation == "gelu" and problem.dresidual_out is None and device.has_fast_memory
    if not plain or threads is None or vectors_for_all_threads(problem, device, vectors_per_row) < _FEW:
        return None
    if not problem.norm.centered and vectors_per_row < 5 * threads:
        return None
    geometry = RowBlock(width, 5, threads, 128 // threads, stage="ahead", weights="staged", blocks_per_multiprocessor=2)
    return that_fits(geometry, problem, device)


def _long(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """A block for each row, or a cluster.

    On an H200: under silu 2048 and 5120 columns of bfloat16 take 1.04 and 1.06 so, with weights that are staged 1.24
    and 1.18; 12,288 1.10, by one block of 512 threads 1.36; 131,072 1.40, staged 1.73. Under the exact gelu 4096 take
    1.13, by twice as many threads of half as many vectors 1.29. By three blocks a multiprocessor 12,288, 3 vectors of a
    thread, take 1.10, by two 1.16; but 3072 1.14 and 1.04.

    With a residual, on an H100: 8192, 24,576 and 98,304 columns take 1.06, 1.07 and 1.10 under silu, with weights that
    are staged 1.60, 1.13 and 1.15; 4096 and 16,384 1.07 and 1.06 under the exact gelu, staged 1.16 and 1.09. But
    clusters of 256 threads that have 2 vectors each are too few on an H200: 16,384 take 1.29 under silu, staged 1.17
    (on an H100 1.07 and 1.07).
    """
    if problem.dresidual_out is None:
        return _first_of(_WAYS, problem, device, width)
    geometry = _first_of(_WAYS_WITH_RESIDUAL, problem, device, width)
    idle = geometry is not None and geometry.vectors == 2 and geometry.blocks_per_row > 2
    return None if idle else geometry


def activated_peeled_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same of rows that begin anywhere and whose edges are peeled off, which lie alike.

    Their vectors have branches, so dz is kept. On an H100, beside the layouts of other norms in brackets, with which
    next to none is: 513, 2049 and 15,873 columns of bfloat16 take 1.13 (1.22), 1.12 (1.30) and 1.20 (1.23) under silu,
    1.16 (1.56), 1.14 (1.62) and 1.34 (1.36) under the exact gelu; 50,257 1.54 and 1.69 (1.94 and 2.13), but 20,001 by
    four blocks 1.46 and 1.66 (1.26 and 1.39).
    """
    if not _are_timed(problem, device) or 2048 < problem.columns // width <= 4096:
        return None
    return _first_of(_WAYS_OF_PEELED, problem, device, width, peeled=True)


def _first_of(
    ways: Iterable[_Way], problem: BackwardProblem, device: Device, width: int, peeled: bool = False
) -> RowBlock | None:
    """The first of these that holds a row and has room; None where rows are few, or none does."""
    edges = 2 * margin_of(problem, width, "early") if peeled else 0
    for way in ways:
        blocks, share = way.blocks_per_row, way.blocks_per_multiprocessor
        if not device.groups(blocks) or not can_be_shared(problem, blocks, width):
            continue
        columns = columns_per_block(problem, blocks, width) if blocks > 1 else problem.columns
        geometry = RowBlock(
            width,
            -(-((columns - edges) // width) // way.threads_per_row),
            way.threads_per_row,
            way.rows_per_block,
            blocks,
            stage="ahead",
            peeled=peeled,
            weights="early",
            blocks_per_multiprocessor=share,
            # Of peeled rows only 256 threads of pairs of blocks were faster with a second one ahead.
            rows_ahead=1 if peeled and (blocks > 2 or share > 1) else 2,
        )
        if geometry.vectors <= way.most_vectors and _have_room(geometry, problem, device):
            few = problem.rows <= 3 * way.rows_per_block * share * device.groups(blocks)
            return None if few else geometry
    return None


def _are_timed(problem: Problem, device: Device) -> bool:
    sixteen_bit, activated = problem.itemsize == 2, problem.norm.activation is not None
    rows = problem.weight is not None and problem.channels is None
    return device.capability == 90 and sixteen_bit and activated and rows


def _have_room(geometry: RowBlock, problem: BackwardProblem, device: Device) -> bool:
    return fits_early(geometry, problem, device) and fits(geometry, problem, device)
