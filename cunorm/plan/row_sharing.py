"""Whether long rows are better shared by all blocks, in a pipeline, than left to clusters that hold them."""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_pipeline import are_groups, are_peeled
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
# Rows that begin anywhere, of which blocks keep nothing, on an H100: 64 of 400 KB take 1.16, otherwise 1.26 (of
# float32 1.14 and 1.03; backward 1.26 and 1.36, 1.22 and 1.28), of 520 KB 1.16 and 1.42 (1.08 and 1.15); but 40 of
# 300 KB 1.27 and 1.12 (backward 1.36 and 1.34). 16 of 1.4 MB take 1.19 and 1.52, by clusters of 16 blocks; so 8 of
# 700 KB of float32 backward, 1.31 and 1.64.
_MOST_BYTES_OF_PEELED, _MOST_BYTES_OF_WIDE, _LEAST_BYTES_IN_ALL = 384 << 10, 512 << 10, 16 << 20
# Where weights are by channel, fewer rows than these are left to clusters too. Not measured since blocks clear their
# own words.
_LEAST_ROWS_BY_CHANNEL = 32


def is_faster_than_clusters(problem: Problem, device: Device, clusters: RowBlock) -> bool:
    """Whether rows are better not left to clusters, where a pipeline is possible."""
    row_bytes, forward = problem.columns * problem.itemsize, isinstance(problem, ForwardProblem)
    if are_peeled(problem):
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
