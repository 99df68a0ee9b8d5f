"""Rows that are not whole pieces of 16 bytes, backward, and come and leave as runs of memory, by bulk copies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, dtype_constants
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants
from cunorm.plan.row_memory import are_rows, compute_itemsize
from cunorm.problem import BackwardProblem, Problem

__all__ = ["RowBulkBackward", "is_possible"]

_LINE_BYTES = 128


@dataclass(frozen=True)
class RowBulkBackward:
    """How rows lie over threads and blocks that take turns (see kernels/row_bulk_backward.cu).

    Attributes
    ----------
    width, vectors, threads_per_row, rows_at_once, rows_per_block : int
        As `cunorm.plan.row_bulk.RowBulk` has them.
    stages : int
        Runs that a block has in shared memory.
    blocks_per_multiprocessor : int
        Blocks that share a multiprocessor, all of which run at once.
    """

    width: int
    vectors: int
    threads_per_row: int
    rows_at_once: int
    rows_per_block: int
    stages: int
    blocks_per_multiprocessor: int

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_at_once

    def run_bytes(self, problem: BackwardProblem) -> int:
        """Bytes of the rows of a turn in one tensor."""
        return self.rows_per_block * problem.columns * problem.itemsize

    def shared_bytes(self, problem: BackwardProblem) -> int:
        """Dynamic shared memory: whole lines for each run, which begins anywhere in one; at the end, sums of columns."""
        runs = (-(-self.run_bytes(problem) // _LINE_BYTES) + 1) * _LINE_BYTES * self.stages * len(problem.matrices_read)
        return max(runs, self.rows_at_once // 2 * problem.columns * compute_itemsize(problem))

    def declared_bytes(self, problem: BackwardProblem) -> int:
        """The shared memory that the kernel declares, at most."""
        warps = -(-self.threads_per_row // 32) * self.rows_at_once
        return (2 * 2 * warps + 2 * 2 * self.rows_per_block) * compute_itemsize(problem) + 8 * self.stages + 16

    def blocks_with_memory(self, problem: BackwardProblem, device: Device) -> int:
        """How many blocks a multiprocessor has the shared memory for."""
        taken = self.shared_bytes(problem) + self.declared_bytes(problem)
        return device.blocks_with(taken) if taken <= device.shared_bytes else 0

    def blocks(self, problem: BackwardProblem, device: Device) -> int:
        """How many blocks are launched."""
        return min(-(-problem.rows // self.rows_per_block), self.blocks_per_multiprocessor * device.multiprocessors)

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        assert isinstance(problem, BackwardProblem)
        blocks = self.blocks(problem, device)
        targets, target_constants = column_sum_targets(builder, problem, blocks)
        own: Constants = {
            "VECTOR": self.width,
            "VECTORS": self.vectors,
            "THREADS_PER_ROW": self.threads_per_row,
            "ROWS_AT_ONCE": self.rows_at_once,
            "ROWS_PER_BLOCK": self.rows_per_block,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.blocks_per_multiprocessor,
            "WANTS_DX": int(problem.dx is not None),
            "HAS_DRESIDUAL": int(problem.dresidual_out is not None),
        }
        builder.launch(
            "row_bulk_backward",
            dtype_constants(problem) | own | affine_constants(problem, self.width) | target_constants,
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
    if not isinstance(problem, BackwardProblem) or device.capability < 90 or problem.itemsize > 4:
        return False
    if problem.channels is not None or not are_rows(problem) or problem.rows == 0 or problem.columns == 0:
        return False
    dense = problem.rows == 1 or all(matrix.row_strides[0] == problem.columns for matrix in problem.matrices)
    return dense and all(matrix.offset == 0 for matrix in problem.matrices)


def least_rows(problem: BackwardProblem) -> int:
    """Of how many rows a run has to be a multiple, so that each begins where 16 bytes do."""
    piece = 16 // problem.itemsize
    return piece // math.gcd(piece, problem.columns)
