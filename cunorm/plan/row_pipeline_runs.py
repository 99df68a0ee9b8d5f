"""Long rows that begin anywhere, of each column of which blocks keep something: how a pipeline's blocks share them.

A block's part of them is a run of memory (see kernels/part_columns.cuh). The numbers are of an H200, as the time over
that of a copy of the same bytes.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.row_pipeline import OTHER_THREADS, RowPipeline
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["A_FEW_TURNS", "laid", "turns"]

# How many threads a block has at most, the first with registers enough, forward and backward. They are as few as all
# have as many vectors with. 131,073 columns of bfloat16 take 1.33 with 544 threads of 4 vectors, 1.48 with 352 of 6;
# 50,257 of float32 1.08 and 1.11. Backward 100,001 of bfloat16 take 1.21 with 384 of 3, 1.29 with 576 of 2, 262,145
# 1.20 with 512 of 2, 1.24 with 352 of 3, and 1,000,001 1.51 with 480 of 2, 1.59 with 320 of 3; of float32 100,001 1.02
# to 1.05 with any of these.
_MOST_THREADS, _MOST_RESIDENT = ((576, 448, 320), (512, 384, 320)), 12
# Rows under way: backward one more, since all of a row must have come before it is summed. With a row less 262,145
# float32 columns take 1.24, else 1.07.
_UNDER_WAY = 2, 3
# Turns after which a row is finished. Many rows take 1.02 of the time with one more forward, a few 1.09; but with a
# residual 500,001 float32 columns take 1.06 with one more, else 1.15, and backward, where turns are short, 400,001 take
# 1.20 and 1.42. With two, which leave one to wait for what blocks tell, they take 2.0 to 3.6; 500,001 with a residual,
# of which there is room for no more, 2.58, read twice 1.86.
_LAG, _LONG_LAG, _LEAST_LAG = 3, 4, (2, 3)
# Turns that count besides, until a row has come and until it is finished: 8 rows of 400,001 float32 numbers take 1.23
# by 2 groups, 1.43 by 3, 1.47 by 1 and 1.54 by 4. Of more turns than a few the last is not counted in full, and of more
# rows for each multiprocessor than that no more are counted, or many a batch would have a kernel of its own.
_MORE_TURNS, A_FEW_TURNS, _MOST_ROWS_COUNTED = 2, 8, 64
# How much longer turns take forward with the least lag, and by the bytes of a number with so many vectors a thread
# (512 x 131,073 bfloat16 numbers take 105 us with 5, 98 with 4); and where 16-bit numbers go one by one.
_WITH_LEAST_LAG, _MANY_VECTORS, _WITH_MANY_VECTORS, _ONE_BY_ONE = 1.25, 5, {2: 1.08, 4: 1.05}, 1.08


def laid(groups: int, blocks: int, problem: Problem, device: Device) -> RowPipeline | None:
    """How so many groups of up to so many blocks share the rows; None where these have not the room."""
    direction = 0 if isinstance(problem, ForwardProblem) else 1
    way = RowPipeline(16 // problem.itemsize, 1, blocks, groups, 1, 1, 0, peeled=True)
    way = replace(way, blocks_per_row=-(-problem.columns // way.segment_columns(problem)))
    vectors = way.columns_per_block(problem) // way.width
    for most in _MOST_THREADS[direction]:
        resident = -(-vectors // most)
        threads = -(-vectors // (32 * resident)) * 32
        found = replace(way, threads=threads, resident=-(-vectors // threads))
        lag = min(_wanted_lag(found, problem), found.rows_that_fit(problem, device) - _UNDER_WAY[direction])
        if found.resident <= _MOST_RESIDENT and lag >= _LEAST_LAG[direction] and _has_registers(found, problem, device):
            return replace(found, rows_ahead=lag + _UNDER_WAY[direction], lag=lag)
    return None


def turns(way: RowPipeline, problem: Problem, device: Device) -> float:
    """Turns, those counted more that take longer."""
    longer = _ONE_BY_ONE if problem.itemsize * way.unit(problem) < 4 else 1.0
    if isinstance(problem, ForwardProblem):
        longer *= _WITH_MANY_VECTORS[problem.itemsize] if way.resident >= _MANY_VECTORS else 1.0
        longer *= _WITH_LEAST_LAG if way.lag == _LEAST_LAG[0] else 1.0
    counted: float = way.turns(problem)
    if counted > A_FEW_TURNS:
        counted = min(problem.rows, _MOST_ROWS_COUNTED * device.multiprocessors) / way.groups
    return (counted + _MORE_TURNS) * longer


def _wanted_lag(way: RowPipeline, problem: Problem) -> int:
    if isinstance(problem, ForwardProblem):
        return _LAG if problem.residual is None else _LONG_LAG
    return _LAG if way.turns(problem) <= A_FEW_TURNS else _LONG_LAG


def _has_registers(way: RowPipeline, problem: Problem, device: Device) -> bool:
    """Whether threads have the registers for what they keep; a quarter of a multiprocessor has whole warps."""
    quarter = -(-(way.threads + OTHER_THREADS) // 128)
    there = REGISTERS // 4 // (32 * quarter) // 8 * 8
    each = [DTYPES[item.dtype].itemsize for item in problem.parameters]
    more, sums = 8 * (way.unit(problem) == 1), 0
    if isinstance(problem, BackwardProblem):
        sums, more = len(problem.sums), more // 4 if device.capability < 100 else more
        if problem.norm.activation is not None:
            more += 16 if problem.dresidual_out is None else 32
    least = 4 if isinstance(problem, BackwardProblem) else -(-4 // way.unit(problem))  # widened; or whole registers
    of_vector = -(-(sum(max(least, itemsize) for itemsize in each) + 4 * sums) * way.width // 4) + 2
    return 42 + more + of_vector * way.resident <= there
