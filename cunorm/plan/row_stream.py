"""Long rows that several blocks share, each a run of memory that comes and leaves in bulk; none waits for another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, dtype_constants
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import LINE_BYTES, columns_in_lines
from cunorm.plan.zeros import reserve_parcels
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["OTHER_THREADS", "RowStream"]

# Threads of a block that neither sum nor finish: three warps.
OTHER_THREADS = 96
# What a kernel declares of shared memory itself.
_STATIC_SHARED_BYTES = 4096


@dataclass(frozen=True)
class RowStream:
    """How rows lie over blocks that all run at the same time (see kernels/row_stream.cuh)."""

    width: int  # elements of a vector: 16 bytes
    resident: int  # vectors of a thread, of each row
    blocks_per_row: int
    groups: int  # of blocks_per_row blocks, which take turns over the rows
    rows_ahead: int  # that lie in shared memory, or are on their way to it
    lag: int  # turns after which a row is finished
    threads: int  # of a block that sum and finish

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block of a row takes, in whole lines; the last may have fewer, but has some."""
        return columns_in_lines(problem.columns, self.blocks_per_row, problem)

    def vectors(self, problem: Problem) -> int:
        """Vectors of a thread: of those that a part may need, however far behind a line it begins."""
        line = LINE_BYTES // problem.itemsize
        return -(-(self.columns_per_block(problem) + line) // (self.width * self.threads))

    @property
    def parts_per_lane(self) -> int:
        """Blocks of a row for each lane of the warp that collects what they tell."""
        return -(-self.blocks_per_row // 32)

    @property
    def under_way(self) -> int:
        """Rows on their way while one is summed."""
        return self.rows_ahead - self.lag

    def turns(self, problem: Problem) -> int:
        """How many rows a group has, at most."""
        return -(-problem.rows // self.groups)

    def unit(self, problem: Problem) -> int:
        """Columns that a thread takes at once where something is kept of them (see kernels/part_columns.cuh).

        All rows of a group begin equally far behind a multiple of so many numbers.
        """
        if self.turns(problem) == 1:
            return self.width
        return math.gcd(self.width, self.groups * problem.x.row_strides[0])

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory. Forward, the residual of a row is needed until it is summed only."""
        part = self.threads * self.resident * 16
        if isinstance(problem, ForwardProblem):
            return part * (self.rows_ahead + (self.under_way if problem.residual is not None else 0))
        return part * self.rows_ahead * len(problem.matrices_read)

    def fits(self, problem: Problem, device: Device) -> bool:
        """Whether a multiprocessor has the threads, and shared memory for as many rows."""
        threads = self.threads + OTHER_THREADS
        room = self.shared_bytes(problem) + _STATIC_SHARED_BYTES <= device.shared_bytes
        return room and threads <= min(1024, device.threads_per_multiprocessor)

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ForwardProblem):
            _plan_forward(problem, self, builder)
        else:
            _plan_backward(problem, self, builder)
        return "row_stream"


def _constants(problem: Problem, way: RowStream) -> Constants:
    own: Constants = {
        "UNIT": way.unit(problem),
        "VECTOR": way.width,
        "RESIDENT": way.resident,
        "AHEAD": way.rows_ahead,
        "LAG": way.lag,
        "THREADS": way.threads,
        "PARTS_PER_LANE": way.parts_per_lane,
    }
    return dtype_constants(problem) | own | affine_constants(problem, way.width)


def _shares(problem: Problem, way: RowStream, numbers: int, builder: Builder) -> dict[str, Value]:
    """What kernels are told of how blocks share rows, who tell each other so many numbers."""
    return {
        **reserve_parcels(builder, 2 * way.lag + 2, way.groups, way.parts_per_lane, numbers),
        "rows": problem.rows,
        "columns": problem.columns,
        "columns_per_block": way.columns_per_block(problem),
        "blocks_per_row": way.blocks_per_row,
        "stride": problem.x.row_strides[0],
    }


def _plan_forward(problem: ForwardProblem, way: RowStream, builder: Builder) -> None:
    builder.launch(
        "row_stream_forward",
        _constants(problem, way) | {"HAS_RESIDUAL": int(problem.residual is not None)},
        way.groups * way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
            **_shares(problem, way, 3, builder),
            "eps": problem.eps,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )


def _plan_backward(problem: BackwardProblem, way: RowStream, builder: Builder) -> None:
    shares = _shares(problem, way, 2, builder)
    targets, target_constants = column_sum_targets(builder, problem, way.groups)
    builder.launch(
        "row_stream_backward",
        _constants(problem, way) | {"HAS_DRESIDUAL": int(problem.dresidual_out is not None)} | target_constants,
        way.groups * way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "dy", "dresidual_out", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **shares,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )
    launch_column_sums(builder, problem, targets, way.groups)
