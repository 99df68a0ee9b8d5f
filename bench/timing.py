"""Times of work on a GPU: median over runs, each with a cold L2 cache, by CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy

__all__ = ["seconds"]


def seconds(work: Callable[[], Any], repeats: int = 30, budget: float = 0.15) -> float:
    """The median time of ``work`` on CuPy's current stream, in seconds. L2 is overwritten before each run.

    A first run, not counted, compiles; then at most ``repeats`` runs, fewer where they would take longer than
    ``budget`` seconds, but at least five.
    """
    flush = cupy.empty(256 * 2**20, dtype="uint8")
    begin, end = (cupy.cuda.Event() for _ in range(2))
    times: list[float] = []
    work(), work()
    while len(times) < 5 or (len(times) < repeats and sum(times) < budget):
        flush.fill(1)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return statistics.median(times)
