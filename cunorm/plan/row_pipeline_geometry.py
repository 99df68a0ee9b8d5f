"""How long rows lie over the blocks that share them in a pipeline: of all ways the one that takes least time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.column_sums import cost_of_column_sums
from cunorm.plan.device import Device
from cunorm.plan.row_memory import are_rows, are_segmented, lie_alike
from cunorm.plan.row_pipeline import (
    OTHER_THREADS,
    RowPipeline,
    are_groups,
    are_peeled,
    channels_per_row,
    keeps_nothing,
    kept_bytes_of_column,
    less_channels,
)
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["cost", "geometry"]

# The numbers are of an H200, as the time over that of a copy of the same bytes.

# Vectors of a row for each multiprocessor, at least. Batch norm of 8 x 64 x 35^2 float16 numbers, which begin anywhere,
# takes 10.9 us with 9, otherwise 17.8 or, in two passes, 12.7.
_LEAST_VECTORS, _LEAST_VECTORS_OF_PEELED = 16, 4
# Where blocks keep nothing, fewer than 4 rows are better off otherwise, unless they are long: 2 and 3 channels of
# 1001^2, 1024^2 and 2048^2 numbers take 0.71 to 0.97 of the time, but one forward 1.10. Shorter ones were not timed.
_LEAST_ROWS, _LEAST_BYTES_OF_FEWER = 4, 2_000_000
# And of a segment that begins anywhere: where there is less between what others write, batch norm of 256 x 2048 x 7^2
# float32 numbers takes 205 us backward, by slabs 163.
_LEAST_OF_SEGMENT = 16
# Forward, where blocks keep something of every column, as many rows are to fit into shared memory: 200 rows of 655,360
# float16 numbers take 1.15 where 7 do and 1.19 where 5 do.
_ENOUGH = 6
_LEAST_ROWS_AHEAD = 3
# Rows under way. More would only be in the way of the first ones: with 2 in place of 3 or 4, 4 rows of 400,000 float32
# numbers take 0.88 of the time backward, 8 forward 0.85, 4 of 1,000,000 0.90, 12 of 300,000 float16 numbers 0.86 and
# 0.97, hundreds of rows 0.98 to 1.00. With one only rows take 1.2 to 1.4.
_UNDER_WAY = 2
# Turns after which a row is finished; and where there are so few turns, forward and backward. 100 rows of 1,000,000
# float32 numbers take 1.25 of the time with 2, with 4 and 5 1.01 and 1.02, 16 of 400,000 backward 1.19, 1.02 and 1.04.
# But forward 12 and 32 of 300,000 float16 numbers take 0.95 with 2.
_LAG, _LAG_OF_FEW, _TURNS_OF_FEW_FORWARD, _TURNS_OF_FEW_BACKWARD = 3, 2, 5, 2
# A batch may have any number of rows, and every number of groups has a kernel of its own to compile. So where blocks
# keep something of every column, as many turns or fewer are by a power of two of groups, no more than a quarter of
# which are idle, or an eighth where there are 8 or more.
_TURNS_BY_POWERS = 4
# The loops over a thread's slots are unrolled.
_MOST_RESIDENT = 12


@dataclass(frozen=True)
class _Block:
    """How many threads a block has slots for, how many blocks share a multiprocessor, and what a thread may keep."""

    threads: int
    share: int
    registers: int  # for weights and the sums of columns: with more, ptxas spills


_FORWARD = _Block(384, 1, 48)
# Backward, 100 rows of 1,000,000 float16 numbers take 1.20 with 256 threads, 1.29 with 384; 400 of 300,000 float32 1.13
# and 1.09.
_BACKWARD = {2: _Block(256, 1, 104), 4: _Block(384, 1, 64)}
# Where they keep nothing, and read nothing besides: those that were best or nearly so of 256 to 512 threads, one or two
# blocks, in 31 problems; of equals the first. Rows of 1,000,000 with a residual would take 1.43 with two, not 1.11.
_FORWARD_BARE = (_Block(384, 1, 0), _Block(256, 2, 0))
_BACKWARD_BARE = (_Block(256, 1, 0), _Block(256, 2, 0))
# Of more blocks to a row than an H200 has with two, ptxas would spill what a lane collects of them; where threads know
# the segments of their vectors, of fewer, and where these begin anywhere.
_MOST_BLOCKS, _MOST_BLOCKS_OF_SEGMENTED, _MOST_BLOCKS_OF_PEELED = 9 * 32, 7 * 32, 6 * 32
# Nor of groups, backward: without an activation turns become too short to merge so many parts (32 groups of 4 MB take
# 1.27 to 1.36 by 256 and 264 blocks, 1.08 to 1.11 by half as many); and with one ptxas would spill, for relu and before
# sm_90.
_MOST_BLOCKS_OF_GROUPS, _MOST_BLOCKS_OF_GROUPS_BEFORE_HOPPER = 7 * 32, 5 * 32

# ---- The time of ways where threads keep nothing, in microseconds, fitted to 764 of 31 instance and batch norms. Those
# that come out first take 1.6 % more than the best on average, backward 1.1 %, and at most 6 %.

# How much faster than a copy they move what a turn needs, and what a turn takes however short it is.
_FASTER, _TURN = 1.03, 0.5
# How much longer they take whose parts are neither whole segments nor in one; and where no more than three rows lie in
# shared memory, by the blocks of a multiprocessor.
_CUT_SEGMENTS, _FEW_AHEAD = 1.05, {1: 1.06, 2: 1.03}
# Of rows that begin anywhere, fitted to 221 times of 56 batch norms on an H100: how much longer turns take, forward and
# backward by the bytes of a number, times one over the vectors of a run; how much backward of 16-bit numbers takes
# where two blocks share a multiprocessor; and what all turns do not take, of such rows and of others.
_CUT_VECTORS, _CROWDED, _BEFORE = {2: (6.0, 5.0), 4: (2.5, 1.0)}, 0.96, {True: (9.5, 11.0), False: (8.0, 10.0)}
# How much longer turns take under an activation, of groups, by the bytes of a number, forward and backward.
_ACTIVATED = {2: (1.1, 1.2), 4: (1.0, 1.1)}
# Backward, where blocks keep something of every column, fitted to 400 times of 130 layer norms of 1 to 200 rows: the
# way that comes out first takes 1.006 of the best on average, and at most 1.07. What a turn takes however short it is,
# and how much longer it takes where few rows fit into shared memory.
_LEAST_TURN, _FEW_AHEAD_WITH_COLUMNS = 1.0, {3: 1.2, 4: 1.08}


def geometry(problem: Problem, device: Device) -> RowPipeline | None:
    """How rows lie over blocks; None where the kernels are not for them.

    Forward, where blocks keep something of every column, this is the way with the longest
    parts of those for whose rows there is enough room, since a turn takes some time however short they are: 130 norms
    of 1 to 200 rows take 1.005 of the best of all ways on average, and at most 1.08. Else it is the one that is
    expected to take the least time.
    """
    problem = less_channels(problem)
    if not _is_for(problem, device):
        return None
    ways = _geometries(problem, device)
    if keeps_nothing(problem) or isinstance(problem, BackwardProblem):
        return min(ways, key=lambda way: cost(way, problem, device), default=None)

    def enough(way: RowPipeline) -> float:
        return min(1.0, way.rows_that_fit(problem, device) / min(_ENOUGH, way.turns(problem) + 2))

    return max(ways, key=lambda way: (enough(way), way.groups), default=None)


def _is_for(problem: Problem, device: Device) -> bool:
    """Whether the kernels are for such rows, and there are as many and as long ones as it takes.

    They need cp.async (sm_80), and rows that are contiguous and whole vectors of 16 bytes; where blocks keep nothing of
    the columns, rows may be in equal segments and begin anywhere, if they do so alike in all tensors. Of float64 ptxas
    would spill.
    """
    itemsize, peeled, bare = problem.itemsize, are_peeled(problem), keeps_nothing(problem)
    if device.capability < 80 or itemsize > 4 or problem.rows < (_least_rows(problem) if bare else 1):
        return False
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return False
    if not (are_rows(problem) or (bare and are_segmented(problem))):
        return False
    if peeled and (not bare or not lie_alike(problem) or are_groups(problem)):
        return False
    if peeled and problem.column_sizes[-1] * itemsize < 16 * _LEAST_OF_SEGMENT:
        return False
    least = _LEAST_VECTORS_OF_PEELED if peeled else _LEAST_VECTORS
    return problem.columns * itemsize // 16 >= least * device.multiprocessors


def _least_rows(problem: Problem) -> int:
    """Of as many rows a pipeline may be better, where blocks keep nothing of the columns."""
    if problem.columns * problem.itemsize < _LEAST_BYTES_OF_FEWER:
        return _LEAST_ROWS
    return 2 if isinstance(problem, ForwardProblem) else 1


def _geometries(problem: Problem, device: Device) -> Iterator[RowPipeline]:
    width, peeled, channels = 16 // problem.itemsize, are_peeled(problem), channels_per_row(problem)
    # Rows that a block has in whole are better left to slabs (forward 16 x 1024 x 32^2 float32 numbers take 53.8 us so
    # on an H100, by slabs 51.2), but where these would go number by number.
    most_groups = device.multiprocessors // (1 if peeled else 2)
    for groups in range(min(problem.rows, most_groups), 0, -1):
        turns = -(-problem.rows // groups)
        if not keeps_nothing(problem) and turns <= _TURNS_BY_POWERS:
            idle = turns * groups - problem.rows
            if groups & (groups - 1) or idle * (4 if groups < 8 else 8) > turns * groups:
                continue
        elif -(-problem.rows // turns) < groups:
            continue  # as many turns as with fewer groups
        together = device.multiprocessors // groups
        for block in _blocks(problem, device, together):
            if together * block.share < channels:
                continue
            way = RowPipeline(width, 1, together * block.share, groups, 1, 1, block.threads, block.share, peeled)
            of_channel = -(-way.room(problem) // (channels * way.columns_per_block(problem)))
            way = replace(way, blocks_per_row=channels * of_channel)
            way = replace(way, resident=way.vectors(problem))
            if way.resident > _MOST_RESIDENT or way.resident * _registers(problem) > block.registers:
                continue
            if (block.threads + OTHER_THREADS) * block.share > device.threads_per_multiprocessor:
                continue
            fit = way.rows_that_fit(problem, device)
            few_turns = _TURNS_OF_FEW_FORWARD if isinstance(problem, ForwardProblem) else _TURNS_OF_FEW_BACKWARD
            lag = _LAG_OF_FEW if turns <= few_turns else _LAG
            if fit >= _LEAST_ROWS_AHEAD:
                lag = min(lag, max(_LAG_OF_FEW, fit - _UNDER_WAY))
                yield replace(way, rows_ahead=min(lag + _UNDER_WAY, fit), lag=lag)


def _blocks(problem: Problem, device: Device, multiprocessors: int) -> Iterator[_Block]:
    """Those that may share rows, each row between so many multiprocessors."""
    forward = isinstance(problem, ForwardProblem)
    if keeps_nothing(problem):
        most = _MOST_BLOCKS if len(problem.column_sizes) == 1 else _MOST_BLOCKS_OF_SEGMENTED
        most = _MOST_BLOCKS_OF_PEELED if are_peeled(problem) else most
        if are_groups(problem) and not forward:
            light = problem.norm.activation in (None, "relu")
            most = _MOST_BLOCKS_OF_GROUPS if light else most
            most = most if device.capability >= 90 else min(most, _MOST_BLOCKS_OF_GROUPS_BEFORE_HOPPER)
        for block in _FORWARD_BARE if forward else _BACKWARD_BARE:
            if block.share == 1 or multiprocessors * block.share <= most:
                yield block
    else:
        yield _FORWARD if forward else _BACKWARD[problem.itemsize]


def _registers(problem: Problem) -> int:
    """Those in which a thread keeps that of each of its vectors, or of a part of one."""
    return -(-kept_bytes_of_column(problem) * (16 // problem.itemsize) // 4)


def cost(way: RowPipeline, problem: Problem, device: Device) -> float:
    """The expected time in microseconds; where blocks keep something of every column, but for what all ways take."""
    problem = less_channels(problem)
    forward, part = isinstance(problem, ForwardProblem), way.columns_per_block(problem)
    bytes_of_turn = part * way.blocks_per_multiprocessor * len(problem.matrices) * problem.itemsize
    if not keeps_nothing(problem):
        turn = math.hypot(_LEAST_TURN, bytes_of_turn / device.memory_rate)
        turns = way.turns(problem) * _FEW_AHEAD_WITH_COLUMNS.get(way.rows_that_fit(problem, device), 1.0)
        return turns * turn + cost_of_column_sums(problem, way.groups, device)
    turns = way.turns(problem) * (bytes_of_turn / (_FASTER * device.memory_rate) + _TURN)
    segment = way.segment_room(problem)
    if len(problem.column_sizes) > 1 and part % segment and segment % part:
        turns *= _CUT_SEGMENTS
    if way.rows_ahead == _LEAST_ROWS_AHEAD:
        turns *= _FEW_AHEAD[way.blocks_per_multiprocessor]
    if way.peeled:
        turns *= 1 + _CUT_VECTORS[problem.itemsize][0 if forward else 1] * way.width / segment
        turns *= _CROWDED if problem.itemsize == 2 and not forward and way.blocks_per_multiprocessor == 2 else 1
    if are_groups(problem) and problem.norm.activation is not None:
        turns *= _ACTIVATED[problem.itemsize][0 if forward else 1]
    before = _BEFORE[way.peeled][0 if forward else 1]
    return before + (0.97 if forward else 0.93) * turns
