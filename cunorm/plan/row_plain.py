"""Rows without an activation, backward: those that are best laid by their length alone.

Where all threads of a row have one vector, or three, fewer lanes are idle than with two or four of which the last lies
beyond the row; and 256 or 384 threads a multiprocessor leave fewer partial sums than 512.

The numbers are of an H200, as the time over that of a copy of the same bytes. Where memory is slower none was timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import that_fits
from cunorm.plan.row_memory import are_shifted, can_be_shared
from cunorm.plan.row_spread import threads_for, vectors_for_all_threads
from cunorm.problem import BackwardProblem

__all__ = ["plain_float32_backward", "plain_half_backward", "plain_peeled_backward", "plain_row_backward"]


class _Way(NamedTuple):
    vectors_per_row: range
    blocks_per_row: int
    threads_per_row: int
    block_threads: int
    blocks_per_multiprocessor: int
    weights: str
    least: float = 1  # vectors for each thread of the GPU, from where on it is better, and up to where
    most: float = math.inf


# 12 MB of 16, 32, 40, 56, 64 and 88 columns take 1.55, 1.46, 1.43, 1.38, 1.42 and 1.36, else 1.84, 1.59, 1.79, 1.65,
# 1.56 and 1.77; 64 MB of 16, 32 and 64 1.29, 1.20 and 1.18, else 1.44, 1.25 and 1.25. 24 and 96 MB of 384 take 1.25 and
# 1.11, else 1.31 and 1.13; of 768 1.21 and 1.11, else 1.27 and 1.14; of 3072 1.33 and 1.10, else 1.36 and 1.14; of 6144
# 1.36 and 1.11, else 1.41 and 1.15; of 12,288 1.45 and 1.11, else 1.58 and 1.17. RMS norm of 256 takes 0.94 to 0.99 of
# its time by a vector a thread, as layer norm does.
_WAYS = (
    _Way(range(2, 3), 1, 2, 256, 3, "early"),
    _Way(range(4, 5), 1, 4, 256, 3, "early"),
    _Way(range(5, 8), 1, 8, 256, 3, "early", most=5),
    _Way(range(8, 9), 1, 8, 256, 3, "early"),
    _Way(range(9, 13), 1, 16, 256, 3, "early", most=5),
    _Way(range(32, 33), 1, 32, 256, 2, "early"),
    _Way(range(33, 49), 1, 16, 128, 2, "early"),
    _Way(range(65, 97), 1, 32, 128, 2, "early"),
    _Way(range(257, 385), 1, 128, 128, 2, "staged"),
    _Way(range(513, 769), 1, 256, 256, 1, "early"),
    _Way(range(1280, 1537), 2, 256, 256, 1, "early"),
)
# 130 MB of 129 columns take 1.28 so, by a warp each 2.38; of 257, 385, 769 and 1537 1.15, 1.14, 1.13 and 1.11, else
# 1.29, 1.30, 1.33 and 1.28; of 3073, 4097 and 5121 1.13, 1.15 and 1.14, else 1.49, 1.16 and 1.18. 8 MB of 3073, 4097
# and 5121 take 1.50, 1.53 and 1.57, else 2.12, 1.91 and 1.77.
_WAYS_OF_PEELED = (
    _Way(range(8, 17), 1, 16, 256, 3, "staged"),
    _Way(range(17, 33), 1, 16, 256, 2, "staged", 7),
    _Way(range(33, 49), 1, 16, 128, 3, "staged", 7),
    _Way(range(65, 97), 1, 32, 128, 3, "staged"),
    _Way(range(136, 193), 1, 64, 128, 3, "early"),
    _Way(range(293, 385), 1, 128, 128, 3, "early"),
    _Way(range(497, 513), 1, 256, 256, 2, "early"),
    _Way(range(513, 705), 1, 256, 256, 2, "staged"),
)
# Columns, at least and at most, of rows of whole vectors of 8 bytes.
_HALF = range(128, 3073)
# Of float32 numbers: vectors of a row, and from where on four blocks share it; and vectors for each thread of the GPU.
_FLOAT32, _SHARED_BY_FOUR = range(16, 2560), 1024
_LEAST_OF_FLOAT32, _MOST_OF_FLOAT32 = 1.5, 8
# Rows for each block, at least, of layer norm: fewer had better have more threads.
_LEAST_ROWS = 8


def plain_row_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry of rows of whole vectors; None where another is better, or was not measured."""
    if not _applies(problem, device) or are_shifted(problem):
        return None
    geometry = _laid(problem, device, width, _WAYS)
    if geometry is None:
        return None
    groups = device.groups(geometry.blocks_per_row) * geometry.rows_per_block
    if problem.norm.centered and geometry.threads_per_row >= 256 and problem.rows < _LEAST_ROWS * groups:
        return None
    return _fitted(replace(geometry, rows_ahead=2), problem, device)


def plain_half_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same of rows of whole vectors of 8 bytes, which are fetched ahead as they are.

    12 and 64 MB of layer norm of 388, 620, 900, 1500 and 2500 columns take 0.84 and 0.93, 0.82 and 0.92, 0.83 and 0.95,
    0.86 and 0.94, 0.85 and 0.88 of the time of peeled rows; of RMS norm 0.87 to 0.90 and 0.90 to 0.99.
    """
    if width != 4 or problem.columns not in _HALF or not _applies(problem, device) or are_shifted(problem):
        return None
    vectors_per_row = problem.columns // width
    if vectors_for_all_threads(problem, device, vectors_per_row) < 2:
        return None
    threads = threads_for(vectors_per_row, 6)
    vectors, weights = -(-vectors_per_row // threads), "early" if problem.parameters else "late"
    geometry = RowBlock(width, vectors, threads, 128 // threads, 1, "ahead", False, weights, 3, rows_ahead=2)
    return _fitted(geometry, problem, device)


def plain_float32_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same of float32 numbers, two rows ahead by blocks of 256 threads.

    100 norms of random columns and 6 to 32 MB take 0.96 of the time so on average, 0.84 to 1.07. 3 MB take 1.1 to 1.4
    from 768 columns on, 96 MB as long; and 24 MB of 12,288 1.04.
    """
    vectors_per_row = problem.columns // width
    timed = _are_timed(problem, device) and problem.x.dtype == "float32" and width == 4
    if not timed or problem.weight is None or problem.dresidual_out is not None or are_shifted(problem):
        return None
    many = vectors_for_all_threads(problem, device, vectors_per_row)
    if not _LEAST_OF_FLOAT32 <= many <= _MOST_OF_FLOAT32 or vectors_per_row not in _FLOAT32:
        return None
    blocks = 4 if vectors_per_row >= _SHARED_BY_FOUR else 1
    if blocks > 1 and not (device.groups(blocks) and can_be_shared(problem, blocks, width)):
        return None
    of_block = -(-vectors_per_row // blocks)
    # As few vectors beyond the part as can be; of equals the most threads.
    lanes = [(threads_for(of_block, most), most) for most in ((1, 2, 3) if of_block <= 128 else (2, 3))]
    threads, vectors = min(lanes, key=lambda lane: (lane[0] * lane[1], lane[1]))
    if blocks == 1 and threads >= 128 and threads * vectors == vectors_per_row and vectors == 3:
        return None  # 1536 and 3072 columns take 1.03 to 1.08 of the time
    rows = max(1, 256 // threads) if blocks == 1 else 1
    geometry = RowBlock(width, vectors, threads, rows, blocks, "ahead", False, "staged", 512 // (threads * rows), 2)
    return that_fits(geometry, problem, device)


def plain_peeled_backward(problem: BackwardProblem, device: Device, width: int) -> RowBlock | None:
    """The same of rows that begin anywhere."""
    geometry = _laid(problem, device, width, _WAYS_OF_PEELED) if _applies(problem, device) else None
    return None if geometry is None else _fitted(replace(geometry, peeled=True), problem, device)


def _applies(problem: BackwardProblem, device: Device) -> bool:
    return problem.itemsize == 2 and _are_timed(problem, device)


def _are_timed(problem: BackwardProblem, device: Device) -> bool:
    plain = problem.channels is None and problem.norm.activation is None
    many = problem.rows > 2 * device.multiprocessors
    return device.capability == 90 and device.has_fast_memory and plain and many


def _laid(problem: BackwardProblem, device: Device, width: int, ways: Iterable[_Way]) -> RowBlock | None:
    vectors_per_row = problem.columns // width
    for_all = vectors_for_all_threads(problem, device, vectors_per_row)
    for way in ways:
        if vectors_per_row not in way.vectors_per_row or not way.least <= for_all <= way.most:
            continue
        threads, blocks, share = way.threads_per_row, way.blocks_per_row, way.blocks_per_multiprocessor
        vectors, rows = -(-vectors_per_row // (threads * blocks)), way.block_threads // threads
        weights = way.weights if problem.parameters else "late"
        return RowBlock(width, vectors, threads, rows, blocks, "ahead", False, weights, share)
    return None


def _fitted(geometry: RowBlock, problem: BackwardProblem, device: Device) -> RowBlock | None:
    if geometry.blocks_per_row > 1 and not device.groups(geometry.blocks_per_row):
        return None
    share = min(geometry.blocks_per_multiprocessor, device.threads_per_multiprocessor // geometry.threads)
    geometry = replace(geometry, blocks_per_multiprocessor=share)
    return that_fits(geometry, problem, device)
