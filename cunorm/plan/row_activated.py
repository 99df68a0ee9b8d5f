"""Rows of sixteen-bit numbers under an activation, backward.

Its derivative is most of the work, and is needed twice. A thread keeps it, or dz, from one pass for the next where it
has few vectors and many registers (SKIPS and KEPT in kernels/row_kept.cuh). Hence 256 or 384 threads a
multiprocessor, weights in registers, and two rows ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early
from cunorm.plan.row_memory import can_be_shared, columns_per_block, margin_of
from cunorm.plan.row_spread import threads_for, three_ahead
from cunorm.problem import BackwardProblem

__all__ = ["activated_peeled_backward", "activated_row_backward"]


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
# Vectors of rows of which a block has several, and of others without a residual and with one.
_SHORT, _LONG, _LONG_WITH_RESIDUAL = range(4, 32), range(193, 1 << 20), range(385, 1 << 20)


def activated_row_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None where another is better, or was not measured.

    Under relu and gelu_tanh, which were not timed, rows lie as under silu.
    """
    vectors_per_row = problem.columns // width
    if not _applies(problem, device):
        return None
    if vectors_per_row in _SHORT:
        return _short(problem, device, width)
    if vectors_per_row in (_LONG if problem.dresidual_out is None else _LONG_WITH_RESIDUAL):
        return _long(problem, device, width)
    return None


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
    if not _applies(problem, device) or 2048 < problem.columns // width <= 4096:
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


def _applies(problem: BackwardProblem, device: Device) -> bool:
    sixteen_bit, activated = problem.itemsize == 2, problem.norm.activation is not None
    rows = problem.weight is not None and problem.channels is None
    return device.capability == 90 and sixteen_bit and activated and rows


def _have_room(geometry: RowBlock, problem: BackwardProblem, device: Device) -> bool:
    return fits_early(geometry, problem, device) and fits(geometry, problem, device)
