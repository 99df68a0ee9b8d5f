"""What plans ask of L2 (see kernels/cache_hints.cuh): only where that was timed.

The numbers are of an H200, as shares of the time without.
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.problem import ChannelForward, PointwiseProblem, Problem

__all__ = ["is_kept_read_once", "is_kept_read_twice"]

# Of x, at least, for each thread that the device can hold: 32 MB, with what is written more than L2 holds. 8 MB take as
# long with the hint as without, and what comes next finds less of y.
_LEAST_BYTES = 120
# The same of channels that are read twice: 260 MB.
_LEAST_BYTES_OF_CHANNELS = 960


def is_kept_read_once(problem: Problem | PointwiseProblem, device: Device) -> bool:
    """Whether L2 is asked to keep rows that are read once, which makes the writing quicker: 0.97 from 34 to 268 MB."""
    return _are_many(problem.rows * problem.columns * problem.itemsize, _LEAST_BYTES, device)


def is_kept_read_twice(problem: ChannelForward, device: Device) -> bool:
    """Whether it is asked to keep channels that are read twice, forward.

    Instance norm of 2 x 32 x 128^3 float32 and float16 numbers, channels last, takes 0.968 and 0.967 so, of 8 x 64 x
    64^3 float16 numbers 0.970. Backward as long.
    """
    nbytes = problem.samples * problem.channels * problem.points * problem.itemsize
    return _are_many(nbytes, _LEAST_BYTES_OF_CHANNELS, device)


def _are_many(nbytes: int, least: int, device: Device) -> bool:
    timed = device.capability == 90 and device.has_fast_memory
    return timed and nbytes >= least * device.threads_per_multiprocessor * device.multiprocessors
