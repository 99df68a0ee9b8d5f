"""Many rows that several blocks share: all blocks of the device run together, and none waits for another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.cache_hints import is_kept_in_pipeline
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, channel_numbers, dtype_constants, row_strides
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_memory import (
    are_rows,
    are_segmented,
    are_whole_lines,
    columns_of_part,
    columns_per_block,
    compute_itemsize,
    has_several_channels,
    lie_alike,
    vector_width,
)
from cunorm.plan.running import running_arguments, running_constants
from cunorm.plan.zeros import reserve_words
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = ["RowPipeline", "cost", "geometry", "is_faster_than_clusters", "is_short_group"]

# The numbers are of an H200, as the time over that of a copy of the same bytes.

# Rows of more bytes are not left to clusters. 400 rows of 300,000 float32 numbers take 1.10, otherwise 1.72 (backward
# 1.09 and 1.96), 256 of 524,288 float16 1.12 and 1.30 (1.22 and 1.79). But 512 of 262,144 bfloat16 take 1.12 and 1.14,
# by RMS norm 1.10 and 1.08. Where weights are by channel, 256 rows of 262,144 float32 numbers take 1.10 and 1.09.
# Backward, where memory is fast, rows just as long are better off so, too: 512 and 8192 of 262,144 bfloat16 numbers
# take 1.06 and 1.01, otherwise 1.14 and 1.04, 128 of 131,072 float32 1.22 and 1.23; and of a channel, 64 to 256 of
# 262,144 float32 0.96 to 1.02 of the time of clusters, under silu 0.86 to 0.91.
_MOST_BYTES_OF_CLUSTERS = 512 << 10
_MOST_BYTES_BY_CHANNEL = 1 << 20
# But forward as many clusters as run at once are done before a pipeline is under way: 6 rows of 800 KB take 1.12 to
# 1.17 of their time, 8 to 64 0.83 to 0.96.
# Backward, shorter rows of 16-bit numbers are not left to clusters either whose threads have many vectors each: 1 to
# 200 of 390 KB take 0.58 to 0.88 of the time, and where there are few of them, 1 to 32 of 100 to 300 KB, 0.54 to 1.03.
# Of 256 KB, where threads have 4 vectors, 5 to 24 took 1.10 to 1.33, but 1 and 2 0.89 and 0.80. Of float32 1 and 2 of
# 390 KB take 0.92 and 0.87, 4 to 200 0.95 to 1.07.
_LEAST_BYTES_BACKWARD, _LEAST_BYTES_OF_FEW_BACKWARD = 384 << 10, 90 << 10
_MOST_ROWS_OF_FEW_BACKWARD, _MOST_VECTORS = 32, 4
# Those that begin anywhere, where blocks keep something of every column: 8 to 64 of 200 KB and more take 0.39 to 1.00
# of the time, of 16-bit numbers 6 to 16 of 100 KB 0.71 to 0.99; but 1024 of 200 KB 1.04, of float32 32,768 1.06.
_LEAST_BYTES_BACKWARD_PEELED, _LEAST_BYTES_OF_MANY_PEELED, _LEAST_MANY_PEELED = 190 << 10, 256 << 10, 512
_MOST_ROWS_OF_FEW_PEELED = 16
# And forward these, by the bytes of each and of all: 64 rows of 300 KB of 16-bit numbers take 0.82 of the time, but 200
# of 280 KB 1.11; of float32 12 to 200 of 540 KB take 0.55 to 0.97, but 8 1.06, and 64 and 32 of 420 KB 0.98 and 1.05. 8
# of 1 MB take 0.92.
_LEAST_FORWARD_PEELED, _LEAST_FORWARD_PEELED_LONG = (288 << 10, 16 << 20), (700 << 10, 6 << 20)
_LEAST_FORWARD_PEELED_WIDE = (512 << 10, 6 << 20)
# Groups of several channels do from these bytes on, where memory is fast: forward; backward; and backward under an
# activation. 64 of 640 KB of float16 take 1.11, otherwise 1.19, 32 of 960 KB 1.15 and 1.38, of 2 MB 1.12 and 1.56,
# under silu 1.28 and 1.64; but 64 of 576 KB 1.12 and 1.09. Backward 32 of 1 MB take 1.20 and 1.47, of 2 MB 1.16 and
# 1.66, under silu 1.39 and 1.85; but 32 of 768 KB 1.34 and 1.23. On an H100, where slabs of up to 1 MB take 1.07 to
# 1.36 and none of this was timed, longer ones.
_LEAST_BYTES_OF_GROUPS, _LEAST_BYTES_OF_GROUPS_BACKWARD = 600 << 10, {False: 800 << 10, True: 600 << 10}
_LEAST_BYTES_OF_GROUPS_BY_SLOWER_MEMORY = (1 << 20) + 1
# Few groups, from these on: 8 and 16 of 2 MB of float16 take 1.27 and 1.15, otherwise 1.57 and 1.46, 16 of 1 MB 1.28
# and 1.28, backward 1.38 and 1.60.
_LEAST_BYTES_OF_FEW_GROUPS = 1 << 20
# Where they keep nothing, on an H100: 64 rows of 400 KB take 1.16, otherwise 1.26 (of float32 1.14 and 1.03; backward
# 1.26 and 1.36, 1.22 and 1.28), of 520 KB 1.16 and 1.42 (1.08 and 1.15); but 40 of 300 KB 1.27 and 1.12 (backward 1.36
# and 1.34). 16 of 1.4 MB take 1.19 and 1.52, by clusters of 16 blocks; so 8 of 700 KB of float32 backward, 1.31 and
# 1.64.
_MOST_BYTES_OF_PEELED, _MOST_BYTES_OF_WIDE, _LEAST_BYTES_IN_ALL = 384 << 10, 512 << 10, 16 << 20
# Fewer channels than these are left to clusters too. Not measured since blocks clear their own words.
_LEAST_CHANNELS_WITH_CLUSTERS = 32
# Vectors of a row for each multiprocessor, at least. Batch norm of 8 x 64 x 35^2 float16 numbers, which begin anywhere,
# takes 10.9 us with 9, otherwise 17.8 or, in two passes, 12.7.
_LEAST_VECTORS, _LEAST_VECTORS_OF_PEELED = 16, 4
# And of a segment that begins anywhere: where there is less between what others write, batch norm of 256 x 2048 x 7^2
# float32 numbers takes 205 us backward, by slabs 163.
_LEAST_OF_SEGMENT = 16
# Vectors of a run that begins anywhere, from which on most warps have none that is cut, and need not mask its numbers.
# Channels of 99^3 and 1001^2 take 0.93 to 0.99 of the time so, batch norm of 255^2 0.97 to 0.99, but of 65^2 and 129^2
# 0.99 to 1.01.
_LEAST_OF_LONG_RUNS = 4096
# Warps of a block that have no slots.
_OTHER_THREADS = 64
# Forward, where blocks keep something of every column, as many rows are to fit into shared memory: 200 rows of 655,360
# float16 numbers take 1.15 where 7 do and 1.19 where 5 do. Of rows that begin anywhere, whose turns take longer, fewer.
_ENOUGH, _ENOUGH_PEELED = 6, 4
_LEAST_ROWS_AHEAD = 3
# Rows under way. More would only be in the way of the first ones: with 2 in place of 3 or 4, 4 rows of 400,000 float32
# numbers take 0.88 of the time backward, 8 forward 0.85, 4 of 1,000,000 0.90, 12 of 300,000 float16 numbers 0.86 and
# 0.97, hundreds of rows 0.98 to 1.00. With one only rows take 1.2 to 1.4.
_UNDER_WAY = 2
# Turns after which a row is finished; and where there are so few turns, forward and backward. 100 rows of 1,000,000
# float32 numbers take 1.25 of the time with 2, with 4 and 5 1.01 and 1.02, 16 of 400,000 backward 1.19, 1.02 and 1.04.
# But forward 12 and 32 of 300,000 float16 numbers take 0.95 with 2.
_LAG, _LAG_OF_FEW, _FEW_TURNS_FORWARD, _FEW_TURNS_BACKWARD = 3, 2, 5, 2
# A batch may have any number of rows, and every number of groups has a kernel of its own to compile. So where blocks
# keep something of every column, as many turns or fewer are by a power of two of groups, no more than a quarter of
# which are idle, or an eighth where there are 8 of them.
_FEW_TURNS = 4
# The loops over a thread's slots are unrolled.
_MOST_RESIDENT = 12
# What a kernel declares of shared memory itself.
_STATIC_SHARED_BYTES = 1024


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
# Rows that begin anywhere keep what they keep in shared memory: 256 threads of two blocks take 0.97 to 1.09 of the time
# where both have room for as many rows ahead, 384 of one 0.95 to 1.18.
_PEELED = _Block(512, 1, 0)
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
# Backward, where blocks keep something of every column, fitted to 283 times of 93 layer norms of 1 to 200 rows. The way
# that comes out first takes 1.007 of the best on average, and at most 1.10. What a turn takes however short it is, how
# much longer it takes where no more than three rows lie in shared memory, and what it takes to add up the sums of
# groups of blocks: a launch, and to move their bytes, not all of which come from memory.
_LEAST_TURN, _FEW_AHEAD_WITH_COLUMNS, _LAUNCH, _WRITTEN_AND_READ = 1.0, {3: 1.2, 4: 1.08}, 1.0, 3.0


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

    def parts_are_runs(self, problem: Problem) -> bool:
        """Whether a block has the same columns of every row, wherever it begins: it keeps something of each."""
        return self.peeled and not _keeps_nothing(problem)

    def has_long_runs(self, problem: Problem) -> bool:
        """Whether runs begin anywhere, but most warps have none of the vectors that are cut."""
        long = problem.column_sizes[-1] >= _LEAST_OF_LONG_RUNS * self.width
        return self.parts_are_runs(problem) or (self.peeled and long)

    def segment_columns(self, problem: Problem) -> int:
        """Columns of a run of memory; the last may have fewer, if it is a block's part."""
        columns = problem.column_sizes[-1]
        if not self.parts_are_runs(problem):
            return columns
        return -(-columns // (self.blocks_per_row * self.width)) * self.width

    def segment_room(self, problem: Problem) -> int:
        """Columns of the vectors that a run of memory may need, however it begins."""
        columns = self.segment_columns(problem)
        return (columns + 2 * self.width - 2) // self.width * self.width if self.peeled else columns

    def room(self, problem: Problem) -> int:
        """The same of a row: what its blocks have parts of."""
        runs = problem.columns // problem.column_sizes[-1]
        return (self.blocks_per_row if self.parts_are_runs(problem) else runs) * self.segment_room(problem)

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block of a row takes, of those there is room for; the last may have fewer.

        Where weights are by channel, as many blocks share each channel, and it is the last of these.
        """
        if problem.channels is None and not self.peeled:
            return columns_per_block(problem, self.blocks_per_row, self.width)
        channels = _channels_per_row(problem)
        columns, blocks = self.room(problem) // channels, self.blocks_per_row // channels
        in_lines = not self.peeled and len(problem.column_sizes) == 1 and are_whole_lines(problem, columns)
        return columns_of_part(problem, columns, blocks, self.width, in_lines)

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

    def kept_bytes(self, problem: Problem) -> int:
        """Shared memory for what is kept of columns; none where that is in registers."""
        if not self.parts_are_runs(problem):
            return 0
        numbers = len(problem.parameters) * DTYPES[_kept_dtype(problem)].itemsize
        if isinstance(problem, BackwardProblem):
            numbers += len(problem.sums) * compute_itemsize(problem)
        return self.width * (self.resident * self.threads + 1) * numbers

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory."""
        return self.rows_ahead * self.row_bytes(problem) + self.kept_bytes(problem)

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
            "PARTS_ARE_RUNS": int(self.parts_are_runs(problem)),
            "LONG_RUNS": int(self.has_long_runs(problem)),
            "KEPT_TYPE": DTYPES[_kept_dtype(problem)].cuda,
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
        problem = _less_channels(problem)
        if isinstance(problem, ForwardProblem):
            _plan_forward(problem, self, device, builder)
        else:
            _plan_backward(problem, self, builder)
        return "row_pipeline"


def is_faster_than_clusters(problem: Problem, device: Device, clusters: RowBlock) -> bool:
    """Whether rows are better not left to clusters, where a pipeline is possible."""
    row_bytes, forward = problem.columns * problem.itemsize, isinstance(problem, ForwardProblem)
    if _are_peeled(problem):
        if not _keeps_nothing(problem):
            return _is_faster_if_peeled(problem)
        most = _MOST_BYTES_OF_WIDE if forward and problem.itemsize > 2 else _MOST_BYTES_OF_PEELED
        return clusters.blocks_per_row == 16 or (row_bytes > most and problem.rows * row_bytes >= _LEAST_BYTES_IN_ALL)
    as_long_will_do = not forward and device.has_fast_memory
    if problem.channels is None:
        if forward:
            return row_bytes > _MOST_BYTES_OF_CLUSTERS and problem.rows > device.groups(clusters.blocks_per_row)
        if row_bytes > _MOST_BYTES_OF_CLUSTERS or (as_long_will_do and row_bytes == _MOST_BYTES_OF_CLUSTERS):
            return True
        few = problem.rows <= _MOST_ROWS_OF_FEW_BACKWARD and row_bytes >= _LEAST_BYTES_OF_FEW_BACKWARD
        long = row_bytes >= _LEAST_BYTES_BACKWARD
        if problem.rows <= 2 and (few if problem.itemsize == 2 else long):
            return True
        return problem.itemsize == 2 and clusters.vectors > _MOST_VECTORS and (few or long)
    few = problem.rows < _LEAST_CHANNELS_WITH_CLUSTERS
    if _are_groups(problem):
        least = _LEAST_BYTES_OF_FEW_GROUPS if few else 0
        return row_bytes >= least and not is_short_group(problem, device)
    return not few and (row_bytes > _MOST_BYTES_BY_CHANNEL or (as_long_will_do and row_bytes == _MOST_BYTES_BY_CHANNEL))


def _is_faster_if_peeled(problem: Problem) -> bool:
    """The same of rows that begin anywhere, where blocks keep something of every column."""
    row_bytes = problem.columns * problem.itemsize
    if isinstance(problem, ForwardProblem):
        narrow = _LEAST_FORWARD_PEELED, _LEAST_FORWARD_PEELED_LONG
        limits = narrow if problem.itemsize == 2 else (_LEAST_FORWARD_PEELED_WIDE,)
        return any(row_bytes >= each and problem.rows * row_bytes >= in_all for each, in_all in limits)
    if problem.itemsize == 2 and problem.rows <= _MOST_ROWS_OF_FEW_PEELED:
        return row_bytes >= _LEAST_BYTES_OF_FEW_BACKWARD
    many = problem.rows >= _LEAST_MANY_PEELED
    return row_bytes >= (_LEAST_BYTES_OF_MANY_PEELED if many else _LEAST_BYTES_BACKWARD_PEELED)


def is_short_group(problem: Problem, device: Device) -> bool:
    """Whether rows are groups of channels that slabs, or clusters, may be faster for."""
    if not _are_groups(problem):
        return False
    least = _LEAST_BYTES_OF_GROUPS
    if isinstance(problem, BackwardProblem):
        least = _LEAST_BYTES_OF_GROUPS_BACKWARD[problem.norm.activation is not None]
    if not device.has_fast_memory:
        least = _LEAST_BYTES_OF_GROUPS_BY_SLOWER_MEMORY
    return problem.columns * problem.itemsize < least


def geometry(problem: Problem, device: Device) -> RowPipeline | None:
    """How rows lie over blocks; None where the kernels are not for them.

    They need cp.async (sm_80), and rows that are contiguous and of whole vectors of 16 bytes; where threads keep
    nothing of the columns, rows may be in equal segments and begin anywhere. Of float64 ptxas would spill.

    Forward, where blocks keep something of every column, this is the way with the longest parts of those that have
    enough rows ahead, since a turn takes some time however short they are: of 83 norms of 1 to 64 rows it takes no more
    than 1.03 of the best of all ways. Else it is the one that is expected to take the least time.
    """
    problem = _less_channels(problem)
    itemsize = problem.itemsize
    if device.capability < 80 or itemsize > 4 or problem.rows == 0:
        return None
    # One row of 1,048,576 float32 numbers takes 12.1 us so, and 11.0 by row_grid, of 2,097,152 14.7 and 13.4; with
    # weights of columns, of 1,000,000 13.6 and 14.0.
    if problem.rows == 1 and isinstance(problem, ForwardProblem) and _keeps_nothing(problem):
        return None
    if not (are_rows(problem) or (_keeps_nothing(problem) and are_segmented(problem))):
        return None
    peeled = _are_peeled(problem)
    if peeled and not lie_alike(problem):
        return None
    if peeled and problem.column_sizes[-1] * itemsize < 16 * _LEAST_OF_SEGMENT:
        return None
    least = _LEAST_VECTORS_OF_PEELED if peeled and _keeps_nothing(problem) else _LEAST_VECTORS
    if problem.columns * itemsize // 16 < least * device.multiprocessors:
        return None
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return None
    if peeled and _are_groups(problem):
        return None

    ways = _geometries(problem, device)
    if _keeps_nothing(problem) or isinstance(problem, BackwardProblem):
        return min(ways, key=lambda way: cost(way, problem, device), default=None)

    def enough(way: RowPipeline) -> float:
        wanted = min(_ENOUGH_PEELED if peeled else _ENOUGH, way.turns(problem) + 2)
        return min(1.0, _rows_that_fit(way, problem, device) / wanted)

    return max(ways, key=lambda way: (enough(way), way.groups), default=None)


def _less_channels(problem: Problem) -> Problem:
    """The problem without channels of which nothing is: kernels need not know of them, and parts may cut them."""
    return replace(problem, channels=None) if problem.is_bare else problem


def _are_groups(problem: Problem) -> bool:
    """Whether rows have several channels, of which something is: without that they are like rows of one."""
    return has_several_channels(problem) and not problem.is_bare


def _channels_per_row(problem: Problem) -> int:
    return problem.channels.channels_per_row if problem.channels is not None else 1


def _are_peeled(problem: Problem) -> bool:
    """Whether rows, or their segments, or channels, do not all begin at multiples of 16 bytes."""
    width = vector_width(problem)
    if problem.channels is not None and _are_groups(problem):
        width = math.gcd(width, problem.channels.positions)
    return width * problem.itemsize < 16


def _segments(problem: Problem, way: RowPipeline) -> dict[str, Value]:
    """Columns of each, those there is room for, and from one to the next; zeros where rows are contiguous."""
    several = len(problem.column_sizes) > 1
    if not (several or way.peeled):
        return {"segment_columns": 0, "segment_room": 0, "segment_stride": 0}
    columns = way.segment_columns(problem)
    apart = problem.x.column_strides[0] if several else columns if way.parts_are_runs(problem) else 0
    return {"segment_columns": columns, "segment_room": way.segment_room(problem), "segment_stride": apart}


def _geometries(problem: Problem, device: Device) -> Iterator[RowPipeline]:
    width, peeled, channels = 16 // problem.itemsize, _are_peeled(problem), _channels_per_row(problem)
    # Rows that a block has in whole are better left to slabs (forward 16 x 1024 x 32^2 float32 numbers take 53.8 us so
    # on an H100, by slabs 51.2), but where these would go number by number.
    most_groups = device.multiprocessors // (1 if peeled else 2)
    for groups in range(min(problem.rows, most_groups), 0, -1):
        turns = -(-problem.rows // groups)
        if not _keeps_nothing(problem) and turns <= _FEW_TURNS:
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
            if way.parts_are_runs(problem):
                of_channel = -(-problem.columns // way.segment_columns(problem))
            else:
                of_channel = -(-way.room(problem) // (channels * way.columns_per_block(problem)))
            way = replace(way, blocks_per_row=channels * of_channel)
            way = replace(way, resident=way.vectors(problem))
            if way.resident > _MOST_RESIDENT or way.resident * _registers(problem) > block.registers:
                continue
            if (block.threads + _OTHER_THREADS) * block.share > device.threads_per_multiprocessor:
                continue
            fit = _rows_that_fit(way, problem, device)
            few_turns = _FEW_TURNS_FORWARD if isinstance(problem, ForwardProblem) else _FEW_TURNS_BACKWARD
            lag = _LAG_OF_FEW if turns <= few_turns else _LAG
            if fit >= _LEAST_ROWS_AHEAD:
                lag = min(lag, max(_LAG_OF_FEW, fit - _UNDER_WAY))
                yield replace(way, rows_ahead=min(lag + _UNDER_WAY, fit), lag=lag)


def _rows_that_fit(way: RowPipeline, problem: Problem, device: Device) -> int:
    """Of how many rows shared memory holds a block's part."""
    room = device.shared_bytes_of(way.blocks_per_multiprocessor) - _STATIC_SHARED_BYTES - way.kept_bytes(problem)
    return room // way.row_bytes(problem)


def _blocks(problem: Problem, device: Device, multiprocessors: int) -> Iterator[_Block]:
    """Those that may share rows, each row between so many multiprocessors."""
    forward = isinstance(problem, ForwardProblem)
    if _keeps_nothing(problem):
        most = _MOST_BLOCKS if len(problem.column_sizes) == 1 else _MOST_BLOCKS_OF_SEGMENTED
        most = _MOST_BLOCKS_OF_PEELED if _are_peeled(problem) else most
        if _are_groups(problem) and not forward:
            light = problem.norm.activation in (None, "relu")
            most = _MOST_BLOCKS_OF_GROUPS if light else most
            most = most if device.capability >= 90 else min(most, _MOST_BLOCKS_OF_GROUPS_BEFORE_HOPPER)
        for block in _FORWARD_BARE if forward else _BACKWARD_BARE:
            if block.share == 1 or multiprocessors * block.share <= most:
                yield block
    elif _are_peeled(problem):
        yield _PEELED
    else:
        yield _FORWARD if forward else _BACKWARD[problem.itemsize]


def _keeps_nothing(problem: Problem) -> bool:
    """Whether blocks have nothing to keep of every column, and read nothing besides."""
    return _kept_bytes(problem) == 0 and len(problem.matrices) == (2 if isinstance(problem, ForwardProblem) else 3)


def cost(way: RowPipeline, problem: Problem, device: Device) -> float:
    """The expected time in microseconds; where blocks keep something of every column, but for what all ways take."""
    problem = _less_channels(problem)
    forward, part = isinstance(problem, ForwardProblem), way.columns_per_block(problem)
    bytes_of_turn = part * way.blocks_per_multiprocessor * len(problem.matrices) * problem.itemsize
    if not _keeps_nothing(problem):
        turn = math.hypot(_LEAST_TURN, bytes_of_turn / device.memory_rate)
        turn *= _FEW_AHEAD_WITH_COLUMNS.get(_rows_that_fit(way, problem, device), 1.0)
        return way.turns(problem) * turn + _cost_of_sums(way, problem, device)
    turns = way.turns(problem) * (bytes_of_turn / (_FASTER * device.memory_rate) + _TURN)
    segment = way.segment_room(problem)
    if len(problem.column_sizes) > 1 and part % segment and segment % part:
        turns *= _CUT_SEGMENTS
    if way.rows_ahead == _LEAST_ROWS_AHEAD:
        turns *= _FEW_AHEAD[way.blocks_per_multiprocessor]
    if way.peeled:
        turns *= 1 + _CUT_VECTORS[problem.itemsize][0 if forward else 1] * way.width / segment
        turns *= _CROWDED if problem.itemsize == 2 and not forward and way.blocks_per_multiprocessor == 2 else 1
    if _are_groups(problem) and problem.norm.activation is not None:
        turns *= _ACTIVATED[problem.itemsize][0 if forward else 1]
    before = _BEFORE[way.peeled][0 if forward else 1]
    return before + (0.97 if forward else 0.93) * turns


def _cost_of_sums(way: RowPipeline, problem: Problem, device: Device) -> float:
    """The expected microseconds until the sums that groups of blocks have of every column are one."""
    if isinstance(problem, ForwardProblem) or not problem.sums or way.groups == 1:
        return 0.0
    sums_bytes = way.groups * problem.columns * len(problem.sums) * compute_itemsize(problem)
    return _LAUNCH + _WRITTEN_AND_READ * sums_bytes / (device.memory_rate * device.multiprocessors)


def _kept_bytes(problem: Problem) -> int:
    """What blocks keep of every column: weights as in memory, and sums."""
    if problem.channels is not None:
        return 0
    kept = sum(DTYPES[item.dtype].itemsize for item in problem.parameters)
    if isinstance(problem, BackwardProblem):
        kept += compute_itemsize(problem) * len(problem.sums)
    return kept


def _kept_dtype(problem: Problem) -> str:
    """Of weights and biases that lie side by side: their own, if they have the same, and it is not a wider one."""
    dtypes, compute = {item.dtype for item in problem.parameters}, DTYPES[problem.x.dtype].compute
    dtype = dtypes.pop() if len(dtypes) == 1 else compute
    return dtype if DTYPES[dtype].itemsize <= DTYPES[compute].itemsize else compute


def _registers(problem: Problem) -> int:
    """Those in which a thread keeps that of each of its vectors, or of a part of one."""
    return 0 if _are_peeled(problem) else -(-_kept_bytes(problem) * vector_width(problem) // 4)


def _launch_words(problem: Problem, way: RowPipeline, numbers: int, builder: Builder) -> dict[str, Value]:
    """Words that blocks tell each other so many numbers with; and what else the kernels are told of how they share."""
    # For each turn that is kept those of every block; a word has four bytes of a number.
    count = 2 * way.lag * way.groups * 32 * way.parts_per_lane * numbers * compute_itemsize(problem) // 4
    return {
        **reserve_words(builder, count),
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
        (way.threads + _OTHER_THREADS, 1),
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
        (way.threads + _OTHER_THREADS, 1),
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
