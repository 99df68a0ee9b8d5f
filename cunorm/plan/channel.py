"""Instance, group and batch norm: which family of kernels computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from cunorm.plan import channel_grid, channel_pipeline, channel_slab, rows_of_channels
from cunorm.plan.channel_cost import cost
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.plan.channel_tiles import direction
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Plan
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.row_grid import RowGrid
from cunorm.plan.rows import RowWay
from cunorm.problem import ChannelForward, ChannelProblem

__all__ = ["Way", "is_empty", "moves_once", "plan_with"]

_OfChannels = Slab | Grid | ChannelPipeline | Split
Way = _OfChannels | RowBlock | RowBulk | RowBulkBackward
_Way = TypeVar("_Way", Slab, Grid, ChannelPipeline)
_SMALL_SET_BYTES = 12 << 10
# Of a channel or group that is better held as a slab: see _is_better_as_slab.
_LEAST_BYTES, _LEAST_BYTES_OF_FEW, _LEAST_BYTES_OF_GROUPS = 32 << 10, 96 << 10, 256 << 10
# Of one that rows hold faster where memory is as fast as an H200's: see _outrun_slabs.
_LEAST_BYTES_OF_FASTER_ROWS, _LEAST_BYTES_OF_FASTER_CHANNELS = 1 << 20, 512 << 10
_LEAST_FASTER_ROWS = 32  # fewer were not timed
# Groups of a multiple of so many channels make slabs of 480 threads a block.
_AWKWARD_CHANNELS = 15
_KB = 1 << 10
_LINE_BYTES = 128
# Slabs of shorter vectors are not better than rows that begin anywhere, whose vectors are whole: instance norm of 16 x
# 64 x 257^2 float16 numbers takes 3.44 of a copy's time on an H100 by such, by rows 1.07; 2 x 64 x 45 x 54 x 45, by 4
# bytes at a time, 1.35 and 1.17; but 2 x 32 x 91 x 109 x 92, by 8 bytes, 1.37 and 1.45.
_LEAST_VECTOR_BYTES_OF_SLABS = 8


def is_empty(problem: ChannelProblem) -> bool:
    """Whether there is nothing to compute."""
    if isinstance(problem, ChannelForward):
        return problem.samples * problem.channels == 0
    return problem.channels == 0 or problem.wants_nothing


def moves_once(problem: ChannelProblem) -> bool:
    """Whether it helps to hold numbers on chip.

    Given statistics leave nothing to be held; nor is anything finished where they are all that is wanted.
    """
    if isinstance(problem, ChannelForward):
        return problem.y is not None and not problem.given
    return problem.dx is not None and not problem.given


def plan_with(problem: ChannelProblem, device: Device, way: Way | None) -> Plan:
    """The plan with a way that is one of `channel_candidates.candidates`; None is for the built-in choice."""
    builder = Builder()
    if is_empty(problem):
        return builder.finished("empty")
    chosen = way or (_on_chip(problem, device) if moves_once(problem) else Split())
    if isinstance(chosen, RowWay):
        return rows_of_channels.plan_with(problem, device, chosen)
    return builder.finished(chosen.plan(problem, device, builder))


def _on_chip(problem: ChannelProblem, device: Device) -> _OfChannels | RowWay:
    """The best way to move every number once: rows, or slabs; two passes where these take less time.

    Rows are best where they are possible, but where slabs are (_most_blocks_of_better_slabs), those whose blocks all
    wait for each other (row_grid), and such that take clusters of 16 blocks, which leave many idle, unless slabs take
    longer still (_outrun_slabs): 2,097,152 numbers of float32 took 1.28 of a copy's time by row_grid on an H200, and
    take 1.17 by row_pipeline.
    """
    rows = rows_of_channels.way_of(problem, device)
    most_blocks = None if rows is None else _most_blocks_of_better_slabs(rows, problem, device)
    slab = None if most_blocks == 0 else _least(channel_slab.candidates(problem, device), problem, device)
    if slab is not None and most_blocks is not None and _is_better_slab(slab, most_blocks, problem):
        return slab
    leave_idle = rows is not None and _leaves_many_idle(rows) and not _outrun_slabs(rows, problem, device)
    if rows is not None and not isinstance(rows, RowGrid) and not leave_idle:
        return rows
    grid = _least(channel_grid.candidates(problem, device), problem, device)
    if grid is not None and not grid.is_worth_its_words(problem):
        grid = None
    pipeline = _least(channel_pipeline.candidates(problem, device), problem, device)
    # Rows that come this far, by row_grid or clusters of 16 blocks, have no cost of their own: theirs is two passes'.
    ways: list[tuple[float, _OfChannels | RowWay]] = [(cost(Split(), problem, device), rows or Split())]
    row_pipeline = rows_of_channels.pipeline(problem, device)
    if row_pipeline is not None:
        ways.append(row_pipeline)
    held = (pipeline, grid, slab if rows is None else None)
    ways += [(cost(way, problem, device), way) for way in held if way is not None]
    _, best = min(ways, key=lambda way: way[0])
    return best


def _is_better_as_slab(rows: RowWay, problem: ChannelProblem, device: Device) -> bool:
    """Whether rows take longer than slabs of whole vectors do: long ones that blocks share, and those of one channel.

    Slabs have more, smaller blocks, which wait while others work. On an H100 nearly all groups and channels of 256 KB
    and more take less, forward and backward, with and without silu: group norm of 4 x 512 x 128^2 float16 numbers 0.82
    to 0.96 of the time, of 1 x 256 x 256^2 0.81 to 0.91; but under silu 2 x 256 x 128^2 1.04 and 1.05, and backward 8 x
    128 x 256^2 1.03 to 1.05. Groups of 64 and 128 KB, 16 x 256 x 64^2 to 1 x 512 x 64^2, take 0.95 to 1.12, and long
    channels that a pipeline holds longer: 2 x 16 x 96^3 float16 numbers 1.09 and 1.11.

    Channels of 32 KB and more, of which every multiprocessor has one, take less too, whoever holds them else: 58
    instance norms 0.92 on average, 8 x 256 x 32^3 float32 numbers 0.97 and 0.96, 32 x 32 x 256^2 float16 numbers 0.85
    and 0.93, 4 x 64 x 192^2 0.77 and 0.96, under silu 0.81 and 0.87; but 8 x 32 x 144^2 of float32 0.83 and 1.04, and
    under the exact gelu some 1.03 backward. 64 or 128 channels of 64 KB take 0.90 to 1.06, of 128 KB 0.60 to 0.96.
    """
    if not _is_of_whole_vectors(problem):
        return False
    nbytes = problem.bytes_per_set
    if problem.channels_per_set == 1 and device.capability >= 90 and nbytes < _LEAST_BYTES_OF_GROUPS:
        return nbytes >= (_LEAST_BYTES if problem.sets > device.multiprocessors else _LEAST_BYTES_OF_FEW)
    if isinstance(rows, RowBlock) and _is_group_of_fast_memory(problem, device):
        return _is_better_group_as_slab(rows, problem, device)
    if problem.channels_per_set & (problem.channels_per_set - 1):
        return False  # no power of two: where memory is slower, and of few groups, these were not timed
    shared = isinstance(rows, RowGrid) or (isinstance(rows, RowBlock) and rows.blocks_per_row > 1)
    return shared and nbytes >= _LEAST_BYTES_OF_GROUPS and not _outrun_slabs(rows, problem, device)


def _is_of_whole_vectors(problem: ChannelProblem) -> bool:
    """Whether slabs along the points have vectors of 16 bytes, but of doubles, which were not timed."""
    return direction(problem).is_whole_along_points(problem) and problem.itemsize <= 4


def _is_group_of_fast_memory(problem: ChannelProblem, device: Device) -> bool:
    """Whether it is of such groups, and so many, as were timed with memory as fast as an H200's."""
    many = problem.channels_per_set > 1 and problem.sets >= _LEAST_FASTER_ROWS
    return device.has_fast_memory and many and _is_of_whole_vectors(problem)


def _is_better_group_as_slab(rows: RowBlock, problem: ChannelProblem, device: Device) -> bool:
    """Whether a group takes longer as a row than as a slab, where memory is fast.

    Fitted to 363 group norms on an H200: what is chosen takes 0.7 % more than the better of both on average. Slabs of
    less than 1 MB take, of float16 forward 0.71 to 1.0 of the time, but where no thread of a row has a vector less than
    others only from 160 KB on; backward 0.70 to 1.03, and under silu 0.70 to 1.11 where some have one less, else only
    of few groups; of float32 forward 0.84 to 1.08, backward 0.87 to 1.08, under silu 0.81 to 0.99. Longer groups go
    through the pipeline (row_pipeline.py). Rows are faster that all run at once and are read directly, 0.74 to 1.05;
    and forward, and backward of float32 without an activation, those beside slabs of 480 threads, 0.77 to 1.06.
    """
    nbytes, forward = problem.bytes_per_set, isinstance(problem, ChannelForward)
    sixteen_bits, activated = problem.itemsize == 2, problem.activation is not None
    awkward = problem.channels_per_set % _AWKWARD_CHANNELS == 0
    if rows.stage == "direct" or (forward and awkward):
        return False
    if rows_of_channels.have_whole_channels(rows, problem, device):
        return False
    whole = rows.capacity == problem.values_per_set
    if sixteen_bits and forward:
        return nbytes > (160 * _KB if whole else 48 * _KB)
    if sixteen_bits and activated:
        if whole:
            return 2 * problem.sets <= device.multiprocessors and nbytes >= 256 * _KB
        return nbytes >= (160 * _KB if awkward else 96 * _KB)
    if sixteen_bits:
        return nbytes >= 48 * _KB
    if activated and not forward:
        return nbytes >= 64 * _KB
    return not awkward and nbytes >= (96 * _KB if problem.sets > device.multiprocessors else 256 * _KB)


def _outrun_slabs(rows: RowWay, problem: ChannelProblem, device: Device) -> bool:
    """Whether rows that blocks share take less time than slabs where memory is as fast as an H200's.

    There what slabs wait for is no longer hidden. Backward, channels of 1 MB take 0.78 to 0.91 of the time, of 512 KB
    of 16-bit numbers under silu 0.83 and 0.92. Groups whose vectors are not whole, or that all blocks share, go by what
    was timed of groups when slabs had been chosen otherwise: forward of float32 0.81 to 1.10, backward of 1 MB 0.82 to
    0.96, of 16-bit numbers under an activation 0.75 to 1.07.
    """
    if isinstance(rows, RowBlock) and _is_group_of_fast_memory(problem, device):
        return not _is_better_group_as_slab(rows, problem, device)
    if not device.has_fast_memory or problem.sets < _LEAST_FASTER_ROWS:
        return False
    one, nbytes = problem.channels_per_set == 1, problem.bytes_per_set
    if isinstance(problem, ChannelForward):
        return problem.itemsize == 4 and not one
    if problem.itemsize == 2 and problem.activation is not None:
        return not one or nbytes >= _LEAST_BYTES_OF_FASTER_CHANNELS
    return nbytes >= _LEAST_BYTES_OF_FASTER_ROWS


def _leaves_many_idle(rows: RowWay) -> bool:
    """Whether it takes clusters of 16 blocks; of rows that begin anywhere, read directly, nothing else is faster."""
    return isinstance(rows, RowBlock) and rows.blocks_per_row == 16 and not (rows.peeled and rows.stage == "direct")


def _is_better_slab(slab: Slab, most_blocks: int, problem: ChannelProblem) -> bool:
    """Whether it is better than rows: of so many blocks at most, and of one channel only with long vectors."""
    long = slab.tiles.along_channels or slab.tiles.width * problem.itemsize >= _LEAST_VECTOR_BYTES_OF_SLABS
    return slab.blocks_per_slab <= most_blocks and (problem.channels_per_set > 1 or long)


def _least(candidates: Iterable[_Way], problem: ChannelProblem, device: Device) -> _Way | None:
    return min(candidates, key=lambda way: cost(way, problem, device), default=None)


def _most_blocks_of_better_slabs(rows: RowWay, problem: ChannelProblem, device: Device) -> int:
    """Of how many blocks slabs may be that take less time than the rows; 0 where none do.

    They do in six cases. For what is as long as _is_better_as_slab asks. Forward, for rows of clusters of a channel of
    16-bit numbers: 262,144 take 1.33, as slabs 1.22 of a copy's time, and under silu 1.54 and 1.29. Backward under an
    activation, likewise for a channel: 32,768 float32 numbers take 1.57 under silu, as slabs 1.39. And so for many
    small sets of several channels, where vectors are not whole: on an H100 1024 of 784 float16 numbers took 2.41 by
    such, as slabs 2.15; but 1024 of 6272 1.36 and 1.65, and 2048 of 2048, by whole ones, 1.31 and 1.69; and of float32
    for clusters whose channels begin within vectors and leave no room for their weights: 512 of 33,800 take 1.72 under
    silu, as slabs 1.54. Last, backward, for a channel of 16-bit numbers whose samples are whole lines of memory: batch
    norm of 16 x 1024 x 32^2 takes 1.19 there, as slabs 1.11; but of 32 x 512 x 28^2 1.18 and 1.23.
    """
    if _is_better_as_slab(rows, problem, device):
        return 16
    one, clusters = problem.channels_per_set == 1, isinstance(rows, RowBlock) and rows.blocks_per_row > 1
    if isinstance(problem, ChannelForward):
        return 16 if one and clusters and problem.itemsize == 2 else 0
    if problem.activation is None:
        run = problem.point_sizes[-1] * problem.itemsize
        return 1 if one and problem.itemsize == 2 and len(problem.point_sizes) > 1 and run % _LINE_BYTES == 0 else 0
    if one:
        return 8 if clusters else 0
    if not isinstance(rows, RowBlock):  # a pipeline, which is chosen only where slabs take longer
        return 0
    if clusters and problem.itemsize == 4 and _has_no_room_for_weights(rows, problem):
        return 16  # slabs of sixteen-bit numbers that begin so go one by one
    small = problem.bytes_per_set <= _SMALL_SET_BYTES
    narrow = rows.width * problem.itemsize < 16
    return 1 if small and narrow and problem.sets > 2 * device.multiprocessors else 0


def _has_no_room_for_weights(rows: RowBlock, problem: ChannelProblem) -> bool:
    """Whether channels begin within vectors of rows that come ahead, and weights come late for want of room."""
    as_row_problem = rows_of_channels.as_rows(problem)
    assert as_row_problem is not None
    by_channel = problem.weight is not None or problem.bias is not None
    return by_channel and (rows.weights_of(as_row_problem), rows.weights, rows.stage) == ("crossing", "late", "ahead")
