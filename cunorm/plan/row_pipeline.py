"""Long rows that several blocks share: all blocks of the device run together, and none waits for another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cunorm.plan.cache_hints import is_kept_in_pipeline
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, channel_numbers, dtype_constants, row_strides
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import (
    LINE_BYTES,
    are_whole_lines,
    columns_in_lines,
    columns_of_part,
    columns_per_block,
    compute_itemsize,
    has_several_channels,
    vector_width,
)
from cunorm.plan.running import running_arguments, running_constants
from cunorm.plan.zeros import reserve_parcels
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = [
    "OTHER_THREADS",
    "RowPipeline",
    "are_groups",
    "are_peeled",
    "channels_per_row",
    "keeps_nothing",
    "kept_bytes_of_column",
    "less_channels",
]

# Vectors of a run that begins anywhere, from which on most warps have none that is cut, and need not mask its numbers.
# Channels of 99^3 and 1001^2 take 0.93 to 0.99 of the time so, batch norm of 255^2 0.97 to 0.99, but of 65^2 and 129^2
# 0.99 to 1.01.
_LEAST_OF_LONG_RUNS = 4096
# Threads of a block that have no slots: two warps.
OTHER_THREADS = 64
# What a kernel declares of shared memory itself.
_STATIC_SHARED_BYTES = 1024


@dataclass(frozen=True)
class RowPipeline:
    """How rows lie over blocks that all run at the same time (see kernels/row_pipeline_forward.cu)."""

    width: int  # elements of a vector: 16 bytes
    resident: int  # vectors of a thread, of each row
    blocks_per_row: int
    groups: int  # of blocks_per_row blocks, which take turns over the rows
    rows_ahead: int  # that lie in shared memory, or are on their way to it
    lag: int  # turns after which a row is finished
    threads: int  # of a block, beside two warps for the statistics
    blocks_per_multiprocessor: int = 1
    peeled: bool = False  # runs begin anywhere

    def has_long_runs(self, problem: Problem) -> bool:
        """Whether runs begin anywhere, but most warps have none of the vectors that are cut."""
        return self.peeled and problem.column_sizes[-1] >= _LEAST_OF_LONG_RUNS * self.width

    def segment_room(self, problem: Problem) -> int:
        """Columns of the vectors that a run of memory may need, however it begins."""
        columns = problem.column_sizes[-1]
        if not self.peeled:
            return columns
        # Where a long run begins in a line, it lies so in shared memory too.
        aligned = LINE_BYTES // problem.itemsize if self.has_long_runs(problem) else self.width
        return (columns + 2 * aligned - 2) // aligned * aligned

    def room(self, problem: Problem) -> int:
        """The same of a row: what its blocks have parts of."""
        return problem.columns // problem.column_sizes[-1] * self.segment_room(problem)

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block of a row takes, of those there is room for; the last may have fewer.

        Where weights are by channel, as many blocks share each channel, and it is the last of these.
        """
        if problem.channels is None and not self.peeled:
            return columns_per_block(problem, self.blocks_per_row, self.width)
        channels = channels_per_row(problem)
        columns, blocks = self.room(problem) // channels, self.blocks_per_row // channels
        if self.has_long_runs(problem):
            return columns_in_lines(columns, blocks, problem)
        lines = not self.peeled and len(problem.column_sizes) == 1 and are_whole_lines(problem, columns)
        return columns_of_part(problem, columns, blocks, self.width, lines)

    def vectors(self, problem: Problem) -> int:
        """Vectors of a thread in its part of a row."""
        return -(-self.columns_per_block(problem) // (self.width * self.threads))

    @property
    def parts_per_lane(self) -> int:
        """Blocks of a row for each lane of the warp that merges them."""
        return -(-self.blocks_per_row // 32)

    def turns(self, problem: Problem) -> int:
        """How many rows a group has, at most."""
        return -(-problem.rows // self.groups)

    def row_bytes(self, problem: Problem) -> int:
        """Shared memory for a block's part of a row, in all matrices that are read."""
        return self.threads * self.resident * len(problem.matrices_read) * 16

    def rows_that_fit(self, problem: Problem, device: Device) -> int:
        """Of how many rows shared memory holds a block's part."""
        room = device.shared_bytes_of(self.blocks_per_multiprocessor) - _STATIC_SHARED_BYTES
        return room // self.row_bytes(problem)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory."""
        return self.rows_ahead * self.row_bytes(problem)

    def constants(self, problem: Problem) -> Constants:
        added: Constants
        if isinstance(problem, ForwardProblem):
            added = running_constants(problem.running)
            added["HAS_RESIDUAL"] = int(problem.residual is not None)
        else:
            added = {"HAS_DRESIDUAL": int(problem.dresidual_out is not None)}
        return {
            **added,
            "SEGMENTED": int(self.peeled or len(problem.column_sizes) > 1),
            "PEELED": int(self.peeled),
            "LONG_RUNS": int(self.has_long_runs(problem)),
            "VECTOR": self.width,
            "RESIDENT": self.resident,
            "AHEAD": self.rows_ahead,
            "LAG": self.lag,
            "THREADS": self.threads,
            "BLOCKS_PER_MULTIPROCESSOR": self.blocks_per_multiprocessor,
            "PARTS_PER_LANE": self.parts_per_lane,
            "WEIGHTS_OF": "columns" if problem.channels is None else "part",
            "SEVERAL_CHANNELS": int(has_several_channels(problem)),
            "CHANNEL_NUMBERS": len(channel_numbers(problem)),
        }

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        problem = less_channels(problem)
        if isinstance(problem, ForwardProblem):
            _plan_forward(problem, self, device, builder)
        else:
            _plan_backward(problem, self, builder)
        return "row_pipeline"


# ---- What there is to keep, and where rows begin.


def less_channels(problem: Problem) -> Problem:
    """The problem without channels of which nothing is: kernels need not know of them, and parts may cut them."""
    return replace(problem, channels=None) if problem.is_bare else problem


def are_groups(problem: Problem) -> bool:
    """Whether rows have several channels, of which something is: without that they are like rows of one."""
    return has_several_channels(problem) and not problem.is_bare


def channels_per_row(problem: Problem) -> int:
    return problem.channels.channels_per_row if problem.channels is not None else 1


def are_peeled(problem: Problem) -> bool:
    """Whether rows, or their segments, or channels, do not all begin at multiples of 16 bytes."""
    width = vector_width(problem)
    if problem.channels is not None and are_groups(problem):
        width = math.gcd(width, problem.channels.positions)
    return width * problem.itemsize < 16


def keeps_nothing(problem: Problem) -> bool:
    """Whether blocks have nothing to keep of every column, and read nothing besides."""
    plain = 2 if isinstance(problem, ForwardProblem) else 3
    return kept_bytes_of_column(problem) == 0 and len(problem.matrices) == plain


def kept_bytes_of_column(problem: Problem) -> int:
    """Those of what blocks keep of every column, where that is in registers: weights as in memory, and sums."""
    if problem.channels is not None:
        return 0
    kept = sum(DTYPES[item.dtype].itemsize for item in problem.parameters)
    if isinstance(problem, BackwardProblem):
        kept += compute_itemsize(problem) * len(problem.sums)
    return kept


# ---- Launches.


def _segments(problem: Problem, way: RowPipeline) -> dict[str, Value]:
    """Columns of each, those there is room for, and from one to the next; zeros where rows are contiguous."""
    several = len(problem.column_sizes) > 1
    if not (several or way.peeled):
        return {"segment_columns": 0, "segment_room": 0, "segment_stride": 0}
    apart = problem.x.column_strides[0] if several else 0
    columns, room = problem.column_sizes[-1], way.segment_room(problem)
    return {"segment_columns": columns, "segment_room": room, "segment_stride": apart}


def _launch_words(problem: Problem, way: RowPipeline, numbers: int, builder: Builder) -> dict[str, Value]:
    """Words that blocks tell each other so many numbers with; and what else the kernels are told of how they share."""
    return {
        **reserve_parcels(builder, 2 * way.lag, way.groups, way.parts_per_lane, numbers),
        "rows": problem.rows,
        "columns": problem.columns,
        "room": way.room(problem),
        "columns_per_block": way.columns_per_block(problem),
        "blocks_per_row": way.blocks_per_row,
        "channels": channel_numbers(problem),
        **_segments(problem, way),
    }


def _plan_forward(problem: ForwardProblem, way: RowPipeline, device: Device, builder: Builder) -> None:
    shared = _launch_words(problem, way, 4 if way.peeled else 3, builder)
    builder.launch(
        "row_pipeline_forward",
        dtype_constants(problem)
        | way.constants(problem)
        | {"KEPT_IN_L2": int(is_kept_in_pipeline(problem, device, peeled=way.peeled))}
        | affine_constants(problem, way.width),
        way.groups * way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
            **shared,
            **row_strides(x=problem.x, residual=problem.residual, y=problem.y, residual_out=problem.residual_out),
            **running_arguments(problem.running, problem.columns),
            "eps": problem.eps,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )


def _plan_backward(problem: BackwardProblem, way: RowPipeline, builder: Builder) -> None:
    shared = _launch_words(problem, way, 2, builder)
    channels = problem.channels
    partials = way.groups if channels is None else problem.rows // channels.rows_per_sample
    targets, target_constants = column_sum_targets(builder, problem, partials)
    builder.launch(
        "row_pipeline_backward",
        dtype_constants(problem) | way.constants(problem) | affine_constants(problem, way.width) | target_constants,
        way.groups * way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "dy", "dresidual_out", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **shared,
            **row_strides(x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out, dx=problem.dx),
        },
        way.shared_bytes(problem),
        cooperative=True,
    )
    launch_column_sums(builder, problem, targets, partials)
