"""Every layout of rows that is worth a try, for whoever measures: `cunorm.tune` does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from cunorm.plan import row_bulk, row_bulk_backward
from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.row_fit import blocks_with, crowded, fits, fits_crowd, fits_early, fits_registers, resident
from cunorm.plan.row_memory import (
    are_dense,
    are_rows,
    are_segmented,
    are_shifted,
    can_be_shared,
    columns_per_block,
    lie_alike,
    margin_of,
    row_width,
    vector_width,
)
from cunorm.plan.row_short import SHORT_BYTES
from cunorm.problem import ForwardProblem, Problem

__all__ = ["candidates", "in_blocks", "in_bulk"]

# Numbers of a row that a thread has, at most, where rows come in bulk: the built-in choice has fewer.
_MOST_NUMBERS_IN_BULK = 34


def _ways(problem: Problem) -> Iterator[tuple[int, str, bool]]:
    """The ways in which rows can come: (width, stage, peeled)."""
    itemsize = problem.itemsize
    width, piece = row_width(problem), 16 // itemsize
    yield width, "direct", False
    dense = are_dense(problem)
    if width == piece:
        yield width, "ahead", False
        short = problem.columns * itemsize < SHORT_BYTES
        if dense and short and isinstance(problem, ForwardProblem) and not are_shifted(problem):
            yield width, "run", False
        return
    if width * itemsize >= (4 if _are_short(problem, width) else 8):
        yield width, "ahead", False
    if len(problem.column_sizes) > 1:
        return
    if dense:
        yield width, "run", False
    if problem.columns >= 4 * piece:
        yield piece, "direct", True
        if lie_alike(problem):
            yield piece, "ahead", True


def candidates(problem: Problem, device: Device) -> Iterator[RowBlock | RowBulk | RowBulkBackward]:
    """Every geometry that is worth a try for a problem, for whoever measures."""
    yield from in_blocks(problem, device)
    yield from in_bulk(problem, device)


def in_blocks(problem: Problem, device: Device) -> Iterator[RowBlock]:
    """Those of rows that come to the registers of blocks, or of clusters."""
    if problem.columns == 0 or not (are_rows(problem) or are_segmented(problem)):
        return
    for width, stage, peeled in _ways(problem):
        for geometry in _layouts(problem, device, width, stage, peeled):
            if isinstance(problem, ForwardProblem) and stage == "direct":
                yield geometry
                crowds = [crowded(geometry, problem, device)]
                if geometry.weights == "staged":  # with 80 registers for each thread
                    crowds.append(replace(geometry, min_blocks=blocks_with(geometry, 80)))
                yield from (crowd for crowd in dict.fromkeys(crowds) if crowd != geometry)
            if isinstance(problem, ForwardProblem) and stage == "run":
                for share in (5, 8, 12, 16):
                    if share * geometry.threads <= device.threads_per_multiprocessor:
                        yield replace(geometry, min_blocks=share)
            for rows in (1, 2) if stage == "ahead" else (1,):
                deeper = replace(geometry, rows_ahead=rows)
                most = resident(deeper, problem, device) if fits(deeper, problem, device) else 0
                for share in (1, 2, 3, 4, 6, 8, 12, 16):
                    in_turns = replace(deeper, blocks_per_multiprocessor=share)
                    if share <= most and fits(in_turns, problem, device):
                        yield in_turns
                        if share > 1 and _are_short(problem, width) and fits_crowd(in_turns, problem, device, share):
                            yield replace(in_turns, min_blocks=share)


def in_bulk(problem: Problem, device: Device) -> Iterator[RowBulk | RowBulkBackward]:
    """Those of rows that come as runs by bulk copies, if they are no whole pieces of 16 bytes."""
    width, forward = vector_width(problem), isinstance(problem, ForwardProblem)
    is_possible = row_bulk.is_possible if forward else row_bulk_backward.is_possible
    if width * problem.itemsize >= 16 or not is_possible(problem, device):
        return
    block_threads = (64, 128, 256) if forward else (64, 128, 256, 512)
    for i, threads, turns in itertools.product(range(9), block_threads, (1, 2, 4, 8)):
        threads_per_row = 1 << i
        vectors, at_once = -(-problem.columns // (width * threads_per_row)), threads // threads_per_row
        if vectors * width > _MOST_NUMBERS_IN_BULK or not at_once or turns * at_once > threads:
            continue
        if vectors == 1 and threads_per_row * width >= 2 * problem.columns:
            continue
        way: RowBulk | RowBulkBackward
        if isinstance(problem, ForwardProblem):
            way = RowBulk(width, vectors, threads_per_row, at_once, turns * at_once)
            way = row_bulk.with_room(way, problem, device)
        else:
            if turns * at_once % row_bulk_backward.least_rows(problem) > 0:
                continue
            way = RowBulkBackward(width, vectors, threads_per_row, at_once, turns * at_once, stages=3)
            way = row_bulk_backward.with_room(way, problem, device)
        if way.min_blocks > 0:
            yield way


def _are_short(problem: Problem, width: int) -> bool:
    """Whether rows are short and of narrow vectors: see row_short."""
    itemsize = problem.itemsize
    return problem.columns * itemsize < SHORT_BYTES and width * itemsize < 16


def _weight_ways(problem: Problem, stage: str) -> Iterator[str]:
    """When weights can come."""
    yield "late"
    if stage != "run" and (problem.weight or problem.bias):
        yield from ("early", "staged")


def _layouts(problem: Problem, device: Device, width: int, stage: str, peeled: bool) -> Iterator[RowBlock]:
    """The ways to lay rows, which come so, over threads and blocks that have the registers and shared memory."""
    itemsize, ways = problem.itemsize, list(_weight_ways(problem, stage))
    all_threads = [1 << i for i in range(3 if peeled else 0, 11)]
    all_rows = [1 << i for i in range(9)]
    for blocks, threads_per_row, rows, weights in itertools.product((1, 2, 4, 8, 16), all_threads, all_rows, ways):
        if not can_be_shared(problem, blocks, width):
            continue
        columns = min(columns_per_block(problem, blocks, width), problem.columns)
        inner = columns - (2 * margin_of(problem, width, weights) if peeled else 0)
        vectors, threads = max(1, -(-(inner // width) // threads_per_row)), threads_per_row * rows
        if not device.groups(blocks) or (blocks > 1 and (stage == "run" or columns * itemsize < 8192)):
            continue
        if vectors > 40 or (vectors == 1 and threads_per_row * width >= 2 * columns):
            continue
        if not (64 if blocks == 1 else 128) <= threads <= (1024 if rows == 1 else 512) or (rows > 1 and blocks > 1):
            continue
        if not fits_registers(problem, device, width, vectors, threads, peeled, stage == "direct"):
            continue
        geometry = RowBlock(width, vectors, threads_per_row, rows, blocks, stage, peeled, weights)
        if weights == "early" and not fits_early(geometry, problem, device):
            continue
        if fits(geometry, problem, device):
            yield geometry
