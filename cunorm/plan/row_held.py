"""Rows too long for a pipeline, which all blocks share: one lies in registers while the next ones come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, channel_numbers, dtype_constants, row_strides
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import (
    are_rows,
    are_whole_lines,
    columns_of_part,
    has_several_channels,
    vector_width,
)
from cunorm.plan.row_pipeline import OTHER_THREADS, channels_per_row, keeps_nothing, less_channels
from cunorm.plan.zeros import reserve_parcels
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["RowHeld", "geometry"]

# What a kernel declares of shared memory itself.
_STATIC_SHARED_BYTES = 2048
# Turns whose parcels are kept, as kernels/row_held.cuh has them.
_EXCHANGES = 2

# The numbers are of an H200, as the time over that of a copy of the same bytes, of 16 to 64 rows.

# Threads of a block, and vectors of each in registers, in all tensors that are read: with more, ptxas spills. Heavy is
# what is computed long with: 112^3 float32 numbers take 1.23 backward with 320 threads, 1.30 with 448; under silu 160^3
# bfloat16 numbers 1.74 and 1.52; forward 192^3 1.16 and 1.15, under silu 1.58 and 1.23.
_LIGHT = ((320, 26),)
_HEAVY_FORWARD, _HEAVY_BACKWARD = ((448, 18), (320, 26)), ((448, 18), (320, 24))
# Microseconds of a copy of a row, at least: what blocks wait for each other counts less the longer a row takes. 108^3
# float32 numbers, 3.6, take 1.25 backward and 1.43 otherwise, 128^3, 6.1, 1.10 and 1.37; 136^3 forward, 4.9, 1.22 and
# 1.40. Shorter ones, which are as long only where blocks have less room, were not timed.
_LEAST_MICROSECONDS = 3.5


@dataclass(frozen=True)
class RowHeld:
    """How rows lie over blocks that all run at the same time (see kernels/row_held.cuh)."""

    width: int  # elements of a vector: 16 bytes
    resident: int  # vectors of a thread, of each row
    blocks_per_row: int  # all there are
    ring: int  # pieces that lie in shared memory, or are on their way to it
    threads: int  # of a block that sum and finish

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block takes; the last may have fewer.

        Where weights are by channel, as many blocks share each channel, and it is the last of these.
        """
        channels = channels_per_row(problem)
        columns, blocks = problem.columns // channels, self.blocks_per_row // channels
        return columns_of_part(problem, columns, blocks, self.width, are_whole_lines(problem, columns))

    def vectors(self, problem: Problem) -> int:
        """Vectors of a thread in its part of a row."""
        return -(-self.columns_per_block(problem) // (self.width * self.threads))

    @property
    def parts_per_lane(self) -> int:
        """Blocks for each lane of the warp that merges what they tell."""
        return -(-self.blocks_per_row // 32)

    def pieces_that_fit(self, problem: Problem, device: Device) -> int:
        """Of how many pieces shared memory has room."""
        return (device.shared_bytes - _STATIC_SHARED_BYTES) // self._piece_bytes(problem)

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory."""
        return self.ring * self._piece_bytes(problem)

    def _piece_bytes(self, problem: Problem) -> int:
        return self.threads * len(problem.matrices_read) * 16

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        problem = less_channels(problem)
        if isinstance(problem, ForwardProblem):
            _plan_forward(problem, self, builder)
        else:
            _plan_backward(problem, self, builder)
        return "row_held"


def _constants(problem: Problem, way: RowHeld) -> Constants:
    own: Constants = {
        "PEELED": 0,
        "VECTOR": way.width,
        "RESIDENT": way.resident,
        "RING": way.ring,
        "THREADS": way.threads,
        "PARTS_PER_LANE": way.parts_per_lane,
        "WEIGHTS_OF": "columns" if problem.channels is None else "part",
        "SEVERAL_CHANNELS": int(has_several_channels(problem)),
        "CHANNEL_NUMBERS": len(channel_numbers(problem)),
    }
    return dtype_constants(problem) | own | affine_constants(problem, way.width)


def _shares(problem: Problem, way: RowHeld, numbers: int, builder: Builder) -> dict[str, Value]:
    """What kernels are told of how blocks share rows, who tell each other so many numbers."""
    return {
        **reserve_parcels(builder, _EXCHANGES, 1, way.parts_per_lane, numbers),
        "rows": problem.rows,
        "columns": problem.columns,
        "columns_per_block": way.columns_per_block(problem),
        "blocks_per_row": way.blocks_per_row,
        "channels": channel_numbers(problem),
    }


def _plan_forward(problem: ForwardProblem, way: RowHeld, builder: Builder) -> None:
    builder.launch(
        "row_held_forward",
        _constants(problem, way),
        way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "weight", "bias", "y", "mean", "rstd")},
            **_shares(problem, way, 3, builder),
            **row_strides(x=problem.x, y=problem.y),
            "eps": problem.eps,
        },
        way.shared_bytes(problem),
        cooperative=True,
    )


def _plan_backward(problem: BackwardProblem, way: RowHeld, builder: Builder) -> None:
    shares = _shares(problem, way, 2, builder)
    samples = 1 if problem.channels is None else problem.rows // problem.channels.rows_per_sample
    targets, target_constants = column_sum_targets(builder, problem, samples)
    builder.launch(
        "row_held_backward",
        _constants(problem, way) | target_constants,
        way.blocks_per_row,
        (way.threads + OTHER_THREADS, 1),
        {
            **{name: name for name in ("x", "dy", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **shares,
            **row_strides(x=problem.x, dy=problem.dy, dx=problem.dx),
        },
        way.shared_bytes(problem),
        cooperative=True,
    )
    launch_column_sums(builder, problem, targets, samples)


def geometry(problem: Problem, device: Device) -> RowHeld | None:
    """How rows lie over blocks; None where the kernels are not for them, or two passes are better.

    To be asked where no pipeline has room for rows: that is faster. Backward 128^3 bfloat16 numbers take 1.09 so, held
    1.28.

    They need cp.async.bulk, and rows that are contiguous and whole vectors of 16 bytes; and there is nothing to keep of
    every column. GPUs other than Hopper have caches that hold what is read again, or not as much shared memory. On an
    H100, where a row takes longer to come and what blocks wait for counts less, none of this was timed.
    """
    problem = less_channels(problem)
    if device.capability != 90 or problem.itemsize > 4 or problem.rows < 2 or not keeps_nothing(problem):
        return None
    if not are_rows(problem) or vector_width(problem) * problem.itemsize < 16:
        return None
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return None
    moved = problem.columns * problem.itemsize * len(problem.matrices)
    if moved < _LEAST_MICROSECONDS * device.memory_rate * device.multiprocessors:
        return None
    ways = (_geometry(problem, device, *layout) for layout in _layouts(problem))
    return next(filter(None, ways), None)


def _layouts(problem: Problem) -> tuple[tuple[int, int], ...]:
    activation = problem.norm.activation
    if activation in (None, "relu"):
        return _LIGHT
    if isinstance(problem, ForwardProblem):
        return _HEAVY_FORWARD
    # Under gelu sixteen-bit numbers take 2.1 backward in any way.
    return () if activation in ("gelu", "gelu_tanh") and problem.itemsize == 2 else _HEAVY_BACKWARD


def _geometry(problem: Problem, device: Device, threads: int, most_vectors: int) -> RowHeld | None:
    """So many threads a block; None where they hold no row."""
    channels = channels_per_row(problem)
    each = device.multiprocessors // channels
    if each == 0:
        return None
    way = RowHeld(16 // problem.itemsize, 1, channels * each, 1, threads)
    used = -(-problem.columns // (channels * way.columns_per_block(problem)))
    way = replace(way, blocks_per_row=channels * used)
    way = replace(way, resident=way.vectors(problem), ring=way.pieces_that_fit(problem, device))
    if way.resident * len(problem.matrices_read) > most_vectors:
        return None
    return way if way.resident < way.ring else None
