"""Whether long rows are better shared by all blocks, in a pipeline, than left to clusters that hold them."""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_pipeline import are_groups, are_peeled, keeps_nothing
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["is_faster_than_clusters", "is_short_group"]

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
# of the time, of 16-bit numbers 6 to 16 of 100 KB 0.71 to 0.99; but 1024 of 200 KB 1.04.
_LEAST_BYTES_BACKWARD_PEELED, _LEAST_BYTES_OF_MANY_PEELED, _LEAST_MANY_PEELED = 190 << 10, 256 << 10, 512
_MOST_ROWS_OF_FEW_PEELED = 16
# And forward these, by the bytes of each and of all: 64 rows of 300 KB of 16-bit numbers take 0.82 of the time, but 200
# of 280 KB 1.11; of float32 12 to 200 of 540 KB take 0.55 to 0.97, but 8 1.06, and 64 and 32 of 420 KB 0.98 and 1.05. 8
# of 1 MB take 0.92.
_LEAST_FORWARD_PEELED, _LEAST_FORWARD_PEELED_LONG = (288 << 10, 16 << 20), (700 << 10, 6 << 20)
_LEAST_FORWARD_PEELED_WIDE = (512 << 10, 6 << 20)
# Where memory is fast, shorter ones do too, if there are so many bytes of them for each multiprocessor. Backward,
# float32: 12,001, 15,873, 20,001 and 50,257 columns take 1.07, 1.10, 1.06 and 1.07, by clusters 1.11, 1.13, 1.11 and
# 1.21; by RMS norm 20,001 1.03 and 1.23; under silu 50,257 1.39 and 1.99, but 20,001 1.68 and 1.69, under gelu 1.74 and
# 1.51. 16-bit: 70,001 and 100,001 1.35 and 1.24, by clusters 1.48 and 1.49, but 50,257 1.40 and 1.33; with a residual
# 100,001 1.52 and 1.38.
_LEAST_OF_ALL_BACKWARD = 380 << 10
_LEAST_WIDE_BACKWARD, _LEAST_WIDE_ACTIVATED_BACKWARD, _LEAST_NARROW_BACKWARD = 44 << 10, 128 << 10, 128 << 10
# Forward, float32: 20,001, 35,001 and 50,257 columns take 1.10, 1.10 and 1.09, by clusters 1.13, 1.15 and 1.13, but
# 15,873 1.11 and 1.09; 64 rows of 50,257 1.22 and 1.28, but 16 1.32 and 1.21; by RMS norm 50,257 1.09 and 1.12, but
# 20,001 1.12 and 1.07. 16-bit: 100,001 and 131,073 1.34 and 1.33, by clusters 1.47 and 1.41, but 70,001 1.29 and 1.13;
# 200 rows of 131,073 1.47 and 1.51, but 64 1.58 and 1.51; by RMS norm 100,001 1.15 and 1.14, 262,145 1.13 and 1.52.
_LEAST_WIDE_FORWARD, _LEAST_WIDE_OF_RMS_FORWARD = 78 << 10, 190 << 10
_LEAST_NARROW_FORWARD, _LEAST_NARROW_OF_RMS_FORWARD = 190 << 10, 256 << 10
_LEAST_WIDE_OF_ALL_FORWARD, _LEAST_NARROW_OF_ALL_FORWARD = 95 << 10, 380 << 10
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
# Where weights are by channel, fewer rows than these are left to clusters too. Not measured since blocks clear their
# own words.
_LEAST_ROWS_BY_CHANNEL = 32


def is_faster_than_clusters(problem: Problem, device: Device, clusters: RowBlock) -> bool:
    """Whether rows are better not left to clusters, where a pipeline is possible."""
    row_bytes, forward = problem.columns * problem.itemsize, isinstance(problem, ForwardProblem)
    if are_peeled(problem):
        if not keeps_nothing(problem):
            return _is_faster_if_peeled(problem) or _is_faster_if_peeled_and_many(problem, device)
        most = _MOST_BYTES_OF_WIDE if forward and problem.itemsize > 2 else _MOST_BYTES_OF_PEELED
        return clusters.blocks_per_row == 16 or (row_bytes > most and problem.rows * row_bytes >= _LEAST_BYTES_IN_ALL)
    as_long_will_do = not forward and device.has_fast_memory
    if problem.channels is None:
        if row_bytes > _MOST_BYTES_OF_CLUSTERS or (as_long_will_do and row_bytes == _MOST_BYTES_OF_CLUSTERS):
            return not forward or problem.rows > device.groups(clusters.blocks_per_row)
        return not forward and _is_faster_backward(problem, clusters)
    few = problem.rows < _LEAST_ROWS_BY_CHANNEL
    if are_groups(problem):
        least = _LEAST_BYTES_OF_FEW_GROUPS if few else 0
        return row_bytes >= least and not is_short_group(problem, device)
    return not few and (row_bytes > _MOST_BYTES_BY_CHANNEL or (as_long_will_do and row_bytes == _MOST_BYTES_BY_CHANNEL))


def _is_faster_backward(problem: Problem, clusters: RowBlock) -> bool:
    """The same of rows of whole vectors that clusters hold well, backward."""
    row_bytes = problem.columns * problem.itemsize
    is_long = row_bytes >= _LEAST_BYTES_BACKWARD
    if problem.itemsize > 2:
        return is_long and problem.rows <= 2
    is_long = is_long or (row_bytes >= _LEAST_BYTES_OF_FEW_BACKWARD and problem.rows <= _MOST_ROWS_OF_FEW_BACKWARD)
    return is_long and (problem.rows <= 2 or clusters.vectors > _MOST_VECTORS)


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


def _is_faster_if_peeled_and_many(problem: Problem, device: Device) -> bool:
    """The same where memory is fast and there are many bytes in all."""
    if not device.has_fast_memory:
        return False
    wide, activated = problem.itemsize > 2, problem.norm.activation is not None
    row_bytes = problem.columns * problem.itemsize
    if isinstance(problem, BackwardProblem):
        if not wide and problem.dresidual_out is not None:
            return False
        least = _LEAST_WIDE_ACTIVATED_BACKWARD if activated else _LEAST_WIDE_BACKWARD
        least = least if wide else _LEAST_NARROW_BACKWARD
        in_all = _LEAST_OF_ALL_BACKWARD
    elif wide:
        least = _LEAST_WIDE_FORWARD if problem.norm.centered else _LEAST_WIDE_OF_RMS_FORWARD
        in_all = _LEAST_WIDE_OF_ALL_FORWARD
    else:
        least = _LEAST_NARROW_FORWARD if problem.norm.centered else _LEAST_NARROW_OF_RMS_FORWARD
        in_all = _LEAST_NARROW_OF_ALL_FORWARD
    return row_bytes >= least and problem.rows * row_bytes >= in_all * device.multiprocessors


def is_short_group(problem: Problem, device: Device) -> bool:
    """Whether rows are groups of channels that slabs, or clusters, may be faster for."""
    if not are_groups(problem):
        return False
    least = _LEAST_BYTES_OF_GROUPS
    if isinstance(problem, BackwardProblem):
        least = _LEAST_BYTES_OF_GROUPS_BACKWARD[problem.norm.activation is not None]
    if not device.has_fast_memory:
        least = _LEAST_BYTES_OF_GROUPS_BY_SLOWER_MEMORY
    return problem.columns * problem.itemsize < least
