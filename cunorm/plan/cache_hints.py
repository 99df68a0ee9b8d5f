"""What plans ask of L2 (see kernels/cache_hints.cuh): only where that was timed.

The numbers are of an H200, as shares of the time without.
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_memory import are_shifted, has_several_channels
from cunorm.problem import BackwardProblem, ChannelForward, ForwardProblem, PointwiseProblem, Problem

__all__ = ["is_kept_ahead", "is_kept_in_pipeline", "is_kept_in_slabs", "is_kept_read_once", "is_kept_read_twice"]

# Of x, at least, for each thread that the device can hold: 32 MB, with what is written more than L2 holds. 8 MB take as
# long with the hint as without, and what comes next finds less of y.
_LEAST_BYTES = 120
# The same of channels that are read twice: 260 MB.
_LEAST_BYTES_OF_CHANNELS = 960
# Of a row backward, at least: 131,072 of 256 float16 numbers take 1.00, of 768 1.00, of 512 0.98.
_LEAST_BYTES_OF_ROW = 1024


def is_kept_read_once(problem: Problem | PointwiseProblem, device: Device) -> bool:
    """Whether L2 is asked to keep rows that are read directly: those of 34 to 268 MB take 0.97 so."""
    return _are_many_rows(problem, device)


def is_kept_ahead(problem: Problem, device: Device, *, peeled: bool, blocks_per_row: int) -> bool:
    """Whether it is asked to keep rows that come ahead.

    Forward those of several channels, without an activation: group norm of 32 x 256 x 64^2 and 8 x 512 x 64^2 float16
    numbers takes 0.93 and 0.95 so, ten of them 0.93 to 1.02, in the mean 0.98, under silu 0.96 to 1.02. Clusters whose
    weights are by column 0.98 to 1.05.

    Backward those that a block has in whole: 17 of 0.5 to 12 thousand columns take 0.97 to 1.00, in the mean 0.99.
    Clusters take 0.94 to 1.07, odd rows 1.00 and 1.02, those that begin in the middle of 16 bytes 1.03, rows of
    channels 1.00 to 1.09. Beside a residual and under an activation up to 128 bytes would spill.
    """
    if peeled or are_shifted(problem) or not _are_many_rows(problem, device):
        return False
    if isinstance(problem, BackwardProblem):
        long = problem.columns * problem.itemsize >= _LEAST_BYTES_OF_ROW
        plain = problem.channels is None and problem.dresidual_out is None and problem.norm.activation is None
        return long and plain and blocks_per_row == 1
    return has_several_channels(problem) and problem.norm.activation is None


def is_kept_in_pipeline(problem: ForwardProblem, device: Device, *, peeled: bool) -> bool:
    """Whether it is asked to keep rows that blocks share in a pipeline, forward: of weights by channel, or of none.

    Instance norm of 2 x 32 x 128^3 float32 numbers takes 0.95 so, of 2 x 64 x 128^3 0.96, of float16 1.01; six batch
    norms 0.98 to 1.00. Layer norm of 100 x 1,000,000 float32 and float16 numbers 1.00 and 1.02, and backward everything
    takes 0.99 to 1.06.
    """
    by_channel = problem.channels is not None or problem.is_bare
    return not peeled and by_channel and _are_many_rows(problem, device)


def is_kept_in_slabs(problem: ChannelForward, device: Device) -> bool:
    """Whether it is asked to keep slabs, forward: of float32, and of one channel each.

    Nine instance norms with the channels second take 0.97 to 1.00 so, in the mean 0.98, but float16 ones 0.97 to 1.05.
    Batch norm takes 1.00 to 1.05, group norm of 8 x 128 x 256^2 float16 numbers 1.08; backward 0.98 to 1.02.
    """
    x = problem.x
    alone = problem.channels_per_set == 1 and len(problem.point_sizes) == 1 and x.point_strides[-1] == 1
    return alone and problem.itemsize == 4 and _are_many_channels(problem, _LEAST_BYTES, device)


def is_kept_read_twice(problem: ChannelForward, device: Device) -> bool:
    """Whether it is asked to keep channels that are read twice, forward.

    Instance norm of 2 x 32 x 128^3 float32 and float16 numbers, channels last, takes 0.968 and 0.967 so, of 8 x 64 x
    64^3 float16 numbers 0.970. Backward as long, and so do rows that are read twice.
    """
    return _are_many_channels(problem, _LEAST_BYTES_OF_CHANNELS, device)


def _are_many_rows(problem: Problem | PointwiseProblem, device: Device) -> bool:
    return _are_many(problem.rows * problem.columns * problem.itemsize, _LEAST_BYTES, device)


def _are_many_channels(problem: ChannelForward, least: int, device: Device) -> bool:
    return _are_many(problem.samples * problem.channels * problem.points * problem.itemsize, least, device)


def _are_many(nbytes: int, least: int, device: Device) -> bool:
    timed = device.capability == 90 and device.has_fast_memory
    return timed and nbytes >= least * device.threads_per_multiprocessor * device.multiprocessors
