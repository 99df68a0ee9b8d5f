"""Rows that are not whole pieces of 16 bytes, backward, and come and leave as runs of memory, by bulk copies.

The numbers are of an H200, as the time over that of a copy of the same bytes, of 134 MB of x where nothing else is
said. Where memory is slower it was not timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants
from cunorm.plan.row_bulk import affine_words, threads_per_row
from cunorm.plan.row_memory import LINE_BYTES, compute_itemsize, vector_width
from cunorm.plan.row_runs import RowRuns, are_runs
from cunorm.problem import DTYPES, BackwardProblem, Problem

__all__ = ["RowBulkBackward", "geometry", "is_possible", "least_rows", "with_room"]

_BLOCK_THREADS = 256
_MOST_NUMBERS = 26  # of a row that a thread has
# With two runs in shared memory 131,072 x 1025 take 1.105, with three 1.085.
_STAGES = 3
# Of a block, at least: with fewer, its runs had better be shorter, and blocks more.
_TURNS = 4
_SHORT_BYTES = 256
_MOST_COLUMNS = {2: 2100, 4: 1100}  # by itemsize, up to little more than what was timed


@dataclass(frozen=True)
class RowBulkBackward(RowRuns):
    """How rows lie over threads and blocks that take turns (see kernels/row_bulk_backward.cu).

    Attributes
    ----------
    stages : int
        Runs that a block has in shared memory.
    min_blocks : int
        Blocks that share a multiprocessor: no more are launched than run at once.
    """

    stages: int
    min_blocks: int = 1

    def shared_bytes(self, problem: BackwardProblem) -> int:
        """Dynamic shared memory: the runs; at last, sums of columns."""
        sums = self.rows_at_once // 2 * problem.columns * compute_itemsize(problem)
        return max(self.stages * self.room_of_runs(problem), sums)

    def declared_bytes(self, problem: BackwardProblem) -> int:
        """The shared memory that the kernel declares, at most."""
        warps = -(-self.threads_per_row // 32) * self.rows_at_once
        numbers = 2 * 2 * warps + 2 * 2 * self.rows_per_block
        return numbers * compute_itemsize(problem) + 8 * self.stages + LINE_BYTES

    def blocks_with_memory(self, problem: BackwardProblem, device: Device) -> int:
        """How many blocks a multiprocessor has the shared memory for."""
        taken = self.shared_bytes(problem) + self.declared_bytes(problem)
        return device.blocks_with(taken) if taken <= device.shared_bytes else 0

    def blocks(self, problem: BackwardProblem, device: Device) -> int:
        """How many blocks are launched."""
        return min(-(-problem.rows // self.rows_per_block), self.min_blocks * device.multiprocessors)

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        assert isinstance(problem, BackwardProblem)
        blocks = self.blocks(problem, device)
        targets, target_constants = column_sum_targets(builder, problem, blocks)
        own: Constants = {
            "STAGES": self.stages,
            "MIN_BLOCKS": self.min_blocks,
            "WANTS_DX": int(problem.dx is not None),
            "HAS_DRESIDUAL": int(problem.dresidual_out is not None),
        }
        builder.launch(
            "row_bulk_backward",
            self.constants(problem) | own | target_constants,
            blocks,
            (self.threads_per_row, self.rows_at_once),
            {
                **{name: name for name in ("x", "dy", "dresidual_out", "weight", "bias", "mean", "rstd", "dx")},
                **targets,
                "rows": problem.rows,
                "columns": problem.columns,
            },
            self.shared_bytes(problem),
        )
        launch_column_sums(builder, problem, targets, blocks)
        return "row_bulk"


def is_possible(problem: Problem, device: Device) -> bool:
    """Whether the kernel can compute a problem: rows behind each other, the first of which begin where 16 bytes do."""
    possible = isinstance(problem, BackwardProblem) and are_runs(problem, device)
    return possible and all(matrix.offset == 0 for matrix in problem.matrices)


def geometry(problem: BackwardProblem, device: Device) -> RowBulkBackward | None:
    """The built-in choice; None where rows had better go another way.

    | columns | plain | else | silu | else | residual | else |
    |---|---|---|---|---|---|---|
    | 25 | 1.12 | 1.58 | – | – | – | – |
    | 129 | 1.11 | 1.28 | – | – | – | – |
    | 257 | 1.09 | 1.16 | 1.14 | 1.48 | 1.07 | 1.16 |
    | 513 | 1.08 | 1.14 | – | – | – | – |
    | 1025 | 1.09 | 1.15 | 1.15 | 1.33 | 1.06 | 1.14 |
    | 2049 | 1.08 | 1.14 | – | – | – | – |

    That is bfloat16; under gelu 257 columns take 1.38, otherwise 1.80. float32: 33, 129, 257 and 1025 take 1.08, 1.07,
    1.06 and 1.06, otherwise 1.14, 1.17, 1.13 and 1.10. Fewer rows: 32,768 x 257 take 1.42, otherwise 1.59.
    """
    width = vector_width(problem)
    if not device.has_fast_memory or not is_possible(problem, device) or not _is_better(problem, device, width):
        return None
    light = problem.norm.activation is None and problem.dresidual_out is None
    threads = threads_per_row(problem, width, light)
    vectors = -(-(problem.columns // width) // threads)
    if vectors * width > _MOST_NUMBERS:
        return None
    at_once = _BLOCK_THREADS // threads
    found = RowBulkBackward(width, vectors, threads, at_once, _BLOCK_THREADS, _STAGES, 1 if light else 2)
    most = found.blocks_with_registers(_registers(found, problem, device), device)
    # As many blocks of the longest runs as there is room for, if these are short; else shorter runs.
    share = max(found.min_blocks, found.blocks_with_memory(problem, device))
    found = replace(found, min_blocks=min(share, most))
    least = max(least_rows(problem), at_once)
    while found.rows_per_block > least and not _has_room_and_turns(found, problem, device):
        fits = found.blocks_with_memory(problem, device) >= found.min_blocks
        share = min(2 * found.min_blocks, most) if fits else found.min_blocks
        found = replace(found, rows_per_block=found.rows_per_block // 2, min_blocks=share)
    share = min(found.min_blocks, found.blocks_with_memory(problem, device))
    if share == 0:
        return None
    found = replace(found, min_blocks=share)
    if not light and share == 1 and most >= 2 and found.rows_per_block >= 2 * at_once:
        # 1025 columns with a residual take 1.06 so, else 1.15.
        larger = replace(found, rows_at_once=2 * at_once)
        return larger if larger.blocks_with_memory(problem, device) > 0 else found
    return found


def _is_better(problem: BackwardProblem, device: Device, width: int) -> bool:
    """Whether rows take no longer so.

    Few do, if little is computed: 300 rows of 257 and 2049 columns take 1.91 and 1.45, otherwise 1.89 and 1.24; 1024
    rows 1.77 and 1.36, otherwise 1.92 and 1.83. So do vectors of 8 bytes, but of short rows: 60 and 100 columns of
    bfloat16 take 1.12 and 1.10, otherwise 1.16 and 1.18; 260 1.11 and 1.08, 2052 1.09 and 1.06, 1028 under silu 1.50
    and 1.33. Runs of shorter rows are too short: 20 columns take 1.36, otherwise 1.16, 9 of float32 1.41 and 1.19.
    """
    itemsize, columns = problem.itemsize, problem.columns
    least = 2 if problem.norm.activation is not None else 4
    if problem.rows <= least * device.multiprocessors or width * itemsize >= 16:
        return False
    if problem.dx is None or not problem.sums or any(DTYPES[item.dtype].itemsize > 4 for item in problem.parameters):
        return False  # which were not timed
    if columns > _MOST_COLUMNS[itemsize]:
        return False  # which were not timed
    if itemsize == 2 and width == 4:
        return 32 < columns < _SHORT_BYTES // itemsize
    return columns // width > (8 if itemsize * width == 2 else 16)


def _has_room_and_turns(geometry: RowBulkBackward, problem: BackwardProblem, device: Device) -> bool:
    room = geometry.blocks_with_memory(problem, device) >= geometry.min_blocks
    return room and problem.rows >= _TURNS * geometry.rows_per_block * geometry.blocks(problem, device)


def with_room(geometry: RowBulkBackward, problem: BackwardProblem, device: Device) -> RowBulkBackward:
    """For as many blocks a multiprocessor as have the registers and the shared memory."""
    most = geometry.blocks_with_registers(_registers(geometry, problem, device), device)
    return replace(geometry, min_blocks=min(most, geometry.blocks_with_memory(problem, device)))


def _registers(geometry: RowBulkBackward, problem: BackwardProblem, device: Device) -> int:
    """What a thread needs, so that nothing spills: x, dy and two sums of each number, its weight, and others."""
    registers = geometry.vectors * (4 * geometry.width + affine_words(problem, geometry.width)) + 30
    registers += 8 * (problem.norm.activation is not None) + 16 * (device.capability != 90)
    return min(255, -(-registers // 8) * 8)


def least_rows(problem: BackwardProblem) -> int:
    """Of how many rows a run has to be a multiple, so that each begins where 16 bytes do."""
    piece = 16 // problem.itemsize
    return piece // math.gcd(piece, problem.columns)
