"""How long rows lie over the blocks that share them in bulk: of all ways the one that takes least time.

The numbers are of an H200, as the time over that of a copy of the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from cunorm.plan.column_sums import cost_of_column_sums
from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.row_memory import are_rows, lie_alike
from cunorm.plan.row_stream import OTHER_THREADS, RowStream
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["geometry", "ways"]

# Turns after which a row is finished, and rows under way meanwhile; and how much longer turns are expected to take than
# with the first. 512 x 131,073 bfloat16 numbers take 1.11 and 1.10 with three and three, 1.20 and 1.23 with two under
# way, 1.26 and 1.27 with two and two; 1,000,001 float32 columns, of which there is room for no more, 1.34 with two and
# one.
_STAGES = {(3, 3): 1.0, (3, 2): 1.1, (2, 2): 1.3, (2, 1): 1.6}
# How many threads a block has at most, the first with registers enough, by the bytes of a number, forward and backward.
# They are as few as all have as many vectors with. Forward, 131,073 bfloat16 columns take 1.13 with 704 threads of 3
# vectors, 1.15 with 544 of 4, 1.17 with 416 of 5; backward 1.08 with 352 of 3, 1.11 with 544 of 2, 1.12 with 288 of 4.
# 4 x 400,001 float32 numbers take 1.33 backward with 256 of 3, 1.36 with 384 of 2. Under an activation there is more to
# compute: 131,073 float32 columns take 1.17 backward under silu with 512 of 2, 1.26 with 352 of 3; and so it is where
# 16-bit numbers go one by one, of 655,361 columns 1.51 with 640 of 1, 1.60 with 320 of 2.
_MOST_THREADS_FORWARD = {2: (704, 576, 448, 320), 4: (576, 448, 320)}
_MOST_THREADS_BACKWARD = {2: (384, 320, 256), 4: (352, 320, 256)}
_MOST_THREADS_TO_COMPUTE, _MOST_RESIDENT = (704, 544, 384, 320, 256), 8
# For rows that none of these has room for, or registers.
_MOST_THREADS_AT_LAST = tuple(range(704, 223, -32))
# Registers of a thread beside what it keeps of its columns: with fewer, ptxas would spill.
_OTHER_REGISTERS = 42
# Bytes of a row for each multiprocessor, at least.
_LEAST_BYTES = 256
# What a turn takes however short it is, in microseconds, forward and backward, and how many turns count besides, until
# a row has come and until it is finished: fitted to 3000 times of 450 layer norms, with what stages and few bytes at
# once cost. The way that comes out first takes 1.008 of the best on average, and at most 1.13. Of more rows for each
# multiprocessor than that no more are counted.
_LEAST_TURN, _MORE_TURNS, _MOST_ROWS_COUNTED = (1.1, 0.9), 2, 64
# How much longer turns take where a thread takes so many bytes at once.
_FEW_BYTES_AT_ONCE = {2: 1.15, 4: 1.08}
# A batch may have any number of rows, and a kernel is compiled for how they lie. So as many turns or fewer are by a
# power of two of groups: batches of 1 to 3000 rows have 1 to 6 kernels, and take as long.
_TURNS_BY_POWERS = 32


def geometry(problem: Problem, device: Device) -> RowStream | None:
    """How rows lie over blocks; None where the kernels are not for them."""
    if not _is_for(problem, device):
        return None

    def cost(way: RowStream) -> float:
        return _cost(way, problem, device)

    found = min(ways(problem, device), key=cost, default=None)
    return found or min(ways(problem, device, _MOST_THREADS_AT_LAST), key=cost, default=None)


def ways(problem: Problem, device: Device, most_threads: tuple[int, ...] = ()) -> Iterator[RowStream]:
    """The candidates: of each number of groups the one with as many rows ahead as there is room for."""
    if not _is_for(problem, device):
        return
    for groups in range(min(problem.rows, device.multiprocessors // 2), 0, -1):
        if groups & (groups - 1) and problem.rows <= _TURNS_BY_POWERS * groups:
            continue
        way = _laid(groups, device.multiprocessors // groups, problem, device, most_threads)
        if way is not None:
            yield way


def _is_for(problem: Problem, device: Device) -> bool:
    """They need copies in bulk (sm_90), and rows that are contiguous and begin alike in all tensors.

    Of float64 ptxas would spill.
    """
    if device.capability < 90 or problem.itemsize > 4 or problem.channels is not None:
        return False
    if not are_rows(problem) or not lie_alike(problem) or problem.rows == 0:
        return False
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return False
    return problem.columns * problem.itemsize >= _LEAST_BYTES * device.multiprocessors


def _laid(
    groups: int, blocks: int, problem: Problem, device: Device, most_threads: tuple[int, ...]
) -> RowStream | None:
    """How so many groups of up to so many blocks share the rows; None where these have not the room."""
    way = RowStream(16 // problem.itemsize, 1, blocks, groups, 2, 1, 32)
    way = replace(way, blocks_per_row=-(-problem.columns // way.columns_per_block(problem)))
    vectors = 32 * way.vectors(problem)
    for most in most_threads or _most_threads(way, problem):
        resident = -(-vectors // most)
        found = replace(way, threads=-(-vectors // (32 * resident)) * 32)
        found = replace(found, resident=found.vectors(problem))
        if found.resident > _MOST_RESIDENT or not _has_registers(found, problem, device):
            continue
        for lag, under_way in _STAGES:
            ahead = replace(found, rows_ahead=lag + under_way, lag=lag)
            if ahead.fits(problem, device):
                return ahead
    return None


def _most_threads(way: RowStream, problem: Problem) -> tuple[int, ...]:
    if problem.itemsize * way.unit(problem) == 2:
        return _MOST_THREADS_TO_COMPUTE
    if isinstance(problem, ForwardProblem):
        return _MOST_THREADS_FORWARD[problem.itemsize]
    activated = problem.norm.activation is not None
    return _MOST_THREADS_TO_COMPUTE if activated else _MOST_THREADS_BACKWARD[problem.itemsize]


def _has_registers(way: RowStream, problem: Problem, device: Device) -> bool:
    """Whether threads have the registers for what they keep; a quarter of a multiprocessor has whole warps."""
    quarter = -(-(way.threads + OTHER_THREADS) // 128)
    there = REGISTERS // 4 // (32 * quarter) // 8 * 8
    each = [DTYPES[item.dtype].itemsize for item in problem.parameters]
    one_by_one = way.unit(problem) == 1
    if isinstance(problem, ForwardProblem):
        least, sums = -(-4 // way.unit(problem)), 0  # whole registers
        others = _OTHER_REGISTERS + 8 * one_by_one
    else:
        least, sums = 4, len(problem.sums)  # widened
        others = _OTHER_REGISTERS + (8 if device.capability >= 100 else 2) * one_by_one
        if problem.norm.activation is not None:
            others += 16 if problem.dresidual_out is None else 32
    of_column = sum(max(least, itemsize) for itemsize in each) + 4 * sums
    of_vector = -(-of_column * way.width // 4) + 2
    return others + of_vector * way.resident <= there


def _cost(way: RowStream, problem: Problem, device: Device) -> float:
    """The expected time in microseconds, but for what all ways take."""
    bytes_of_turn = way.columns_per_block(problem) * len(problem.matrices) * problem.itemsize
    least = _LEAST_TURN[0 if isinstance(problem, ForwardProblem) else 1]
    turn = math.hypot(least, bytes_of_turn / device.memory_rate)
    turn *= _STAGES[way.lag, way.under_way] * _FEW_BYTES_AT_ONCE.get(problem.itemsize * way.unit(problem), 1.0)
    turns = min(problem.rows, _MOST_ROWS_COUNTED * device.multiprocessors) / way.groups
    return (math.ceil(turns) + _MORE_TURNS) * turn + cost_of_column_sums(problem, way.groups, device)
