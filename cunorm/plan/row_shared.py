"""Rows that the blocks of a cluster share.

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from cunorm.plan import row_grid
from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early, fits_registers, resident
from cunorm.plan.row_memory import can_be_shared, columns_per_block, margin_of
from cunorm.plan.row_spread import MOST_THREADS
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["shared_row"]

# What a row may have to read, forward, where the blocks of a cluster share it.
_MOST_READ_BYTES = 1 << 20


def shared_row(problem: Problem, device: Device, width: int, peeled: bool = False) -> RowBlock | None:
    """A row for the blocks of a cluster, as few as can hold it with its weights; or one block, where that can."""
    if device.capability < 80 or _is_slow_in_clusters(problem, width):
        return None
    for way in _shared_ways(problem, device, width, peeled):
        if way.weights == "late" and isinstance(problem, ForwardProblem) and row_grid.applies(problem, device):
            break
        for blocks in (1, 2, 4, 8, 16):
            if not device.groups(blocks) or blocks > way.blocks_per_row:
                break
            if not can_be_shared(problem, blocks, width):
                continue
            columns = columns_per_block(problem, blocks, width)
            if peeled:
                columns = min(columns, problem.columns) - 2 * margin_of(problem, width, way.weights)
            geometry = replace(way, vectors=-(-(columns // width) // way.threads), blocks_per_row=blocks)
            if (
                geometry.vectors <= way.vectors  # of which as many threads as the way has must have the registers
                and fits_registers(problem, device, width, geometry.vectors, way.threads, peeled, way.stage == "direct")
                and (way.weights != "early" or fits_early(geometry, problem, device))
                and fits(geometry, problem, device)
                and resident(geometry, problem, device) >= way.blocks_per_multiprocessor
            ):
                return geometry
    return None


def _is_slow_in_clusters(problem: Problem, width: int) -> bool:
    """Forward, whether a row has so much to read that it takes clusters of 16 blocks, slower than to read it twice.

    256 rows of 524,288 float16 numbers take 1.50 by clusters and 1.70 read twice, 200 of 655,360 1.99 and 1.72, 128 of
    1,048,576 2.22 and 1.75 (of float32 1.30 and 1.69, 1.85 and 1.72, 1.98 and 1.70). With a residual 200 of 524,288
    take 1.59 and 1.44. Rows of shorter vectors, without weights or with weights by channel were not measured so.
    """
    has_weights = problem.channels is None and not (problem.weight is None and problem.bias is None)
    if not isinstance(problem, ForwardProblem) or not has_weights:
        return False
    itemsize = problem.itemsize
    read = problem.columns * itemsize * len(problem.matrices_read)
    return width * itemsize == 16 and read > _MOST_READ_BYTES


def _shared_ways(problem: Problem, device: Device, width: int, peeled: bool) -> Iterator[RowBlock]:
    """The ways to share a row, best first, with the most vectors and blocks of each."""
    # 50257 columns of float32, peeled, take 1.13 with 256 threads a block (backward 1.19, with 512 1.40).
    threads = 256 if peeled and width == 4 else MOST_THREADS
    way = RowBlock(width, 16, threads, 1, 16, "ahead", peeled, "staged", 1)
    if isinstance(problem, BackwardProblem):
        yield from (_peeled_ways_backward if peeled else _ways_backward)(problem, device, way)
    elif peeled:
        yield from _peeled_ways_forward(problem, device, way)
    else:
        yield from _ways_forward(problem, way)
    yield way
    if threads < MOST_THREADS:
        yield replace(way, threads_per_row=MOST_THREADS)
    yield replace(way, threads_per_row=MOST_THREADS, weights="late")


def _ways_forward(problem: ForwardProblem, way: RowBlock) -> Iterator[RowBlock]:
    if problem.residual is not None:
        # 65,536 columns of bfloat16 with a residual take 1.02 in four blocks, RMS norm in two 1.04.
        yield replace(way, vectors=6, blocks_per_row=8)
    elif way.width == 8:
        if len(problem.parameters) == 2:
            yield from _long_ways_forward(problem, way)
        # 40,960 columns of bfloat16 take 1.04, with 512 threads a block 1.06; but 49,152 1.04 and 1.03.
        yield replace(way, vectors=10, threads_per_row=256, blocks_per_row=2)


def _long_ways_forward(problem: ForwardProblem, way: RowBlock) -> Iterator[RowBlock]:
    """Of sixteen-bit numbers, from 57,344 columns on, by several blocks a multiprocessor.

    65,536 and 73,728 columns of layer norm take 1.05 and 1.05 so, by pairs of 512 threads 1.07 and 1.06; 80,000,
    98,304, 163,840 and 196,608 1.04, 1.05, 1.10 and 1.09, by four and eight of 512 1.14, 1.10, 1.29 and 1.19. Under
    silu 65,536 take 1.18, by pairs of 512 threads 1.16, but 80,000 and 131,072 1.25 and 1.23, by four of 512 1.39 and
    1.27.
    """
    activated, vectors_per_row = problem.norm.activation is not None, problem.columns // way.width
    if vectors_per_row < (8193 if activated else 7168):
        return
    small = replace(way, vectors=12, threads_per_row=128, blocks_per_row=8)
    if not activated:
        yield replace(small, blocks_per_multiprocessor=4)
    yield replace(small, blocks_per_multiprocessor=3)
    yield replace(small, vectors=8 if activated else 7, threads_per_row=256, blocks_per_multiprocessor=2)
    yield replace(way, vectors=8, blocks_per_row=4)
    yield replace(small, threads_per_row=256, rows_ahead=2)


def _ways_backward(problem: BackwardProblem, device: Device, way: RowBlock) -> Iterator[RowBlock]:
    if device.capability != 90:
        return
    if way.width == 8:
        yield from _sixteen_bit_ways_backward(problem, device, way)
    if problem.weight is not None and way.width >= 4:
        yield from _long_ways_backward(problem, way)
        # 100,000 columns of float32 take 1.14, staged 1.17; 65536 of bfloat16 1.07 with two rows ahead, 1.26 with
        # one, and 1.14 staged by four blocks of 512 threads.
        early = replace(way, weights="early")
        if way.width == 4:
            yield from _float_ways_backward(problem, early)
        else:
            for rows in _rows_ahead(problem):
                yield replace(early, threads_per_row=256, blocks_per_row=8, rows_ahead=rows)


def _rows_ahead(problem: BackwardProblem) -> tuple[int, ...]:
    """32,768 columns of bfloat16 take 1.07 with two rows ahead, 1.19 with one; with a residual 1.06 and 1.04."""
    return (2, 1) if problem.dresidual_out is None else (1,)


def _sixteen_bit_ways_backward(problem: BackwardProblem, device: Device, way: RowBlock) -> Iterator[RowBlock]:
    """32768 columns of bfloat16 take 1.07 with two blocks of 128 threads a multiprocessor, 1.10 with one of 512.

    Weights come early where there are registers: 15,872 columns, of which not all threads have as many, take 1.05 so,
    staged 1.19 (but 16,384 1.09 and 1.06). 7 vectors would spill so, 8 in any case; 12,800 columns take 1.19 with 7,
    and by four blocks 1.32.

    On an H100 17,000, 20,480 and 24,576 columns take 1.12, 1.04 and 1.06 by eight blocks, by four, of 5 or 6 vectors,
    1.27, 1.09 and 1.11, but 16,640 1.13 and 1.09; with a residual 1.11, 1.02 and 1.05, with one row ahead 1.18, 1.06
    and 1.07. Under silu 22,016 take 1.37 and 2.16, but 20,480 1.44 and 1.31.
    """
    crowd = replace(way, vectors=7, threads_per_row=128, blocks_per_row=8, blocks_per_multiprocessor=2)
    pair, early = replace(crowd, blocks_per_row=2), replace(crowd, vectors=6, weights="early")
    many = problem.columns // way.width >= 2112 and problem.norm.activation is None and problem.channels is None
    few = early if problem.channels is not None else replace(early, vectors=4 if many else 5)
    eighth = -(-problem.columns // way.width // 8)
    if many and device.has_fast_memory and eighth <= 4 * 128 and 0 < eighth % 128 < 119:
        # Many threads would have a vector less than others: 20,000, 26,624 and 30,000 columns take 1.36, 1.10 and 1.20
        # by eight blocks, by pairs 1.09, 1.07 and 1.09; but on an H100 1.12, 1.10 and 1.15, by pairs 1.13, 1.16, 1.21.
        yield replace(way, vectors=5, threads_per_row=256, blocks_per_row=2)
        yield replace(way, vectors=7, threads_per_row=256, blocks_per_row=2, weights="early")
        yield replace(way, vectors=4, blocks_per_row=2)
    if problem.dresidual_out is None:
        ways = (pair, few, early, replace(early, vectors=7), crowd)
        for each, rows in itertools.product(ways, _rows_ahead(problem)):
            yield replace(each, rows_ahead=rows)
    else:
        yield pair
        if many:
            yield replace(few, vectors=3, rows_ahead=2)
        yield from (early, crowd)


def _float_ways_backward(problem: BackwardProblem, early: RowBlock) -> Iterator[RowBlock]:
    """On an H100 10,000 columns of float32 take 1.06 by pairs of blocks of 256 threads, of 512 1.07.

    12,000 take 1.06 by four blocks, by pairs 1.07, 16,384 1.07 and 1.07, 13,000 1.12 and 1.10; 19,000, 22,000 and
    30,000 by eight 1.03, 1.04 and 1.04, by fewer, of 512 threads, 1.10, 1.12 and 1.13. With a residual 16,384 take 1.05
    by four, by pairs 1.03; under silu 19,000 1.28 by eight, by four of 512 1.06, and 16,384 1.04 by four of 256, on an
    H200, by four of 512 1.20.
    """
    if problem.dresidual_out is None:
        yield replace(early, vectors=5, threads_per_row=256, blocks_per_row=2)
        blocks = 8 if problem.norm.activation is None else 16
        yield replace(early, vectors=4, threads_per_row=256, blocks_per_row=blocks, rows_ahead=2)
    yield early


def _long_ways_backward(problem: BackwardProblem, way: RowBlock) -> Iterator[RowBlock]:
    """Two rows ahead by more blocks of fewer threads.

    196,608 and 262,144 columns of bfloat16 take 1.13 and 1.14 so, one ahead by 512 threads 1.30 and 1.18; with a
    residual 131,072 1.05 and 1.14, 196,608 by 512 threads 1.06, by 256 1.12; under silu 100,000 and 196,608 1.87 and
    1.82, with weights that come early 2.42 and 2.60 (on an H100 196,608 1.24, one ahead by 512 threads 1.34; but
    262,144 1.41 and 1.26). float32: 20,000 and 40,000 columns 1.04 and 1.02, by 256 and 512
    threads 1.12 and 1.07; 65,536, 80,000 and 131,072 1.05, 1.05 and 1.05, one ahead 1.07, 1.08 and 1.07.
    """
    vectors_per_row, residual = problem.columns // way.width, problem.dresidual_out is not None
    activated = problem.norm.activation is not None
    deep, staged = (replace(way, weights=weights, rows_ahead=2) for weights in ("early", "staged"))
    if way.width == 8 and activated and not residual and vectors_per_row > 8192:
        for blocks in (8, 16):
            yield replace(staged, vectors=7, threads_per_row=256, blocks_per_row=blocks)
    elif way.width == 8 and not activated and vectors_per_row > 16384 - residual:
        yield replace(deep, vectors=5 if residual else 6, threads_per_row=256)
        yield replace(staged, vectors=4) if residual else replace(staged, vectors=8, threads_per_row=256)
    if way.width == 4 and vectors_per_row > 4096 and not residual and not activated:
        for blocks in (4, 8):
            yield replace(deep, vectors=10, threads_per_row=128, blocks_per_row=blocks)
        for blocks in (8, 16):
            yield replace(deep, vectors=4, blocks_per_row=blocks)


def _peeled_ways_backward(problem: BackwardProblem, device: Device, way: RowBlock) -> Iterator[RowBlock]:
    if way.width == 4:
        # 20,001, 25,001 and 50,257 columns of float32 take 1.13, 1.12 and 1.23 with two rows ahead and weights that
        # come early, with one row and staged 1.19, 1.22 and 1.27; but 15,873 1.27, by pairs of blocks 1.14.
        yield replace(way, vectors=8, blocks_per_row=2)
        yield replace(way, vectors=7, weights="early", rows_ahead=2)
        yield replace(way, vectors=10)
    elif way.width == 8 and device.capability == 90:
        yield from _peeled_sixteen_bit_ways_backward(problem, way)


def _peeled_sixteen_bit_ways_backward(problem: BackwardProblem, way: RowBlock) -> Iterator[RowBlock]:
    """By three blocks of 128 threads a multiprocessor.

    15,873, 18,001 and 20,001 columns of bfloat16 take 1.18, 1.21 and 1.18 by four blocks so, by pairs of 256 1.43, 1.34
    and 1.31 (on an H100 15,873 and 20,001 1.19 and 1.21, and 1.16 and 1.15); 30,001 and 35,001 by eight 1.26 and 1.28,
    by two a multiprocessor 1.47 and 1.44; 65,537 by eight of 512 threads 1.47, of 256 1.65. (By sixteen they take 1.32;
    but synccheck 2025.3.1 ends with an illegal address where clusters of sixteen share multiprocessors, of which
    nothing else is seen.) With a residual 15,873 take 1.42 with weights that come early, staged 1.17.

    On an H100 32,769 columns and more come two rows ahead, where there is room for them: 1.12, with one ahead 1.20; by
    256 threads 131,073 take 1.28 so, with one ahead 1.35.
    """

    def of(
        vectors: int, threads: int, blocks: int, share: int, weights: str = "staged", rows_ahead: int = 1
    ) -> RowBlock:
        own = replace(way, vectors=vectors, threads_per_row=threads, blocks_per_row=blocks)
        return replace(own, blocks_per_multiprocessor=share, weights=weights, rows_ahead=rows_ahead)

    yield of(3, 256, 2, 2)
    if problem.dresidual_out is None:
        yield of(4, 128, 4, 3, weights="early")
    yield of(5, 128, 4, 3)
    yield of(6, 256, 2, 1)
    if problem.norm.activation is None:
        yield of(5, 128, 8, 3, rows_ahead=2)
        yield of(5, 128, 8, 3)
    yield of(7, 128, 4, 2)
    yield of(5, 128, 8, 2, rows_ahead=2)
    yield of(7, 128, 8, 2)
    yield of(2, 512, 8, 1, weights="early")
    yield of(7, 256, 16, 1, rows_ahead=2)
    yield of(7, 256, 16, 1)


def _peeled_ways_forward(problem: ForwardProblem, device: Device, way: RowBlock) -> Iterator[RowBlock]:
    """The numbers are of layer norm.

    30,001 and 40,001 columns of bfloat16 take 1.12 and 1.15 by two and three blocks a multiprocessor of 256 threads, by
    one of 512 1.33 and 1.26; 25,001 and 33,001 of float32 1.14 and 1.15 by eight blocks of 128, three a multiprocessor,
    by two of 256 1.17 and 1.24 (but RMS norm of 30,001 1.20 and 1.15); 50,257 by four of 512 1.13, by eight of 256
    1.16. On an H100 25,001 columns of bfloat16 take 1.06 by pairs of blocks of 256 threads, by one block of 512 1.09.
    """
    if device.capability != 90 or problem.norm.activation is not None:
        return
    several = replace(way, vectors=7, threads_per_row=256, blocks_per_row=8, blocks_per_multiprocessor=2)
    if way.width == 4:
        yield replace(way, vectors=10, blocks_per_row=2)
        if problem.norm.centered:
            yield replace(several, vectors=10, threads_per_row=128, blocks_per_multiprocessor=3)
            yield replace(way, vectors=7, threads_per_row=MOST_THREADS, blocks_per_row=4)
        yield several
    elif problem.residual is None:
        yield replace(several, vectors=8, blocks_per_row=2)
        yield replace(several, vectors=5, blocks_per_row=4, blocks_per_multiprocessor=3)
        yield replace(way, vectors=5, blocks_per_row=2)
