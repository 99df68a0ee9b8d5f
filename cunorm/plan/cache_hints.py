"""What plans ask of L2 (see kernels/cache_hints.cuh)."""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.problem import PointwiseProblem, Problem

__all__ = ["is_kept_in_l2"]

# Of x, at least, for each thread that the device can hold: 32 MB on an H200, with what is written as much again more
# than its L2 holds. 8 MB take as long with the hint as without, and what comes next finds less of y.
_LEAST_BYTES = 120


def is_kept_in_l2(problem: Problem | PointwiseProblem, device: Device) -> bool:
    """Whether L2 is asked to keep what is read, which makes the writing quicker: where that was timed."""
    nbytes, threads = problem.rows * problem.columns * problem.itemsize, device.threads_per_multiprocessor
    timed = device.capability == 90 and device.has_fast_memory
    return timed and nbytes >= _LEAST_BYTES * threads * device.multiprocessors
