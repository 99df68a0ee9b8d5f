"""What rows that come and leave as runs of memory, by bulk copies, have in common forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.plan.constants import affine_constants, dtype_constants
from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.launches import Constants
from cunorm.plan.row_memory import LINE_BYTES, are_dense
from cunorm.problem import Problem

__all__ = ["RowRuns", "are_runs"]


@dataclass(frozen=True)
class RowRuns:
    """How rows lie over threads, and runs of them over blocks (see kernels/row_bulk.cuh).

    Attributes
    ----------
    width : int
        Numbers that a thread takes at once from shared memory.
    vectors : int
        How many times ``width`` of them it has of a row, at most.
    threads_per_row : int
        Threads that share a row.
    rows_at_once, rows_per_block : int
        Rows that a block works on at the same time, and rows of a run.
    """

    width: int
    vectors: int
    threads_per_row: int
    rows_at_once: int
    rows_per_block: int

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_at_once

    def room_of_runs(self, problem: Problem) -> int:
        """Bytes of shared memory for a run of each tensor: whole lines, and one more to begin anywhere in the first."""
        lines = -(-self.rows_per_block * problem.columns * problem.itemsize // LINE_BYTES) + 1
        return lines * LINE_BYTES * len(problem.matrices_read)

    def blocks_with_registers(self, registers: int, device: Device) -> int:
        """How many blocks a multiprocessor has the threads for, and so many registers for each of these."""
        return min(REGISTERS // registers, device.threads_per_multiprocessor) // self.threads

    def constants(self, problem: Problem) -> Constants:
        own: Constants = {
            "VECTOR": self.width,
            "VECTORS": self.vectors,
            "THREADS_PER_ROW": self.threads_per_row,
            "ROWS_AT_ONCE": self.rows_at_once,
            "ROWS_PER_BLOCK": self.rows_per_block,
        }
        return dtype_constants(problem) | own | affine_constants(problem, self.width)


def are_runs(problem: Problem, device: Device) -> bool:
    """Whether there are bulk copies, and the rows of each tensor lie behind each other."""
    possible = device.capability >= 90 and problem.itemsize <= 4 and problem.channels is None
    return possible and problem.rows > 0 and problem.columns > 0 and are_dense(problem)
