"""Times of work on a GPU, by CUDA events and with a cold L2 cache; and what calls cost the host."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Gpu", "Machine", "host_seconds"]

Work = Callable[[], Any]


# How often L2 is overwritten before a run, at least. Once does not empty it of what was read with the wish that it
# stay, as kernels made by torch.compile read (evict_last): RMS norm of 512 x 8192 bfloat16 numbers, 16.8 MB in and out,
# seems to take them 7.6 microseconds on an H200 where L2 was overwritten twice, and takes 8.7 where it was six times.
_LEAST_FILLS, _MOST_FILLS = 6, 30


class Machine(Protocol):
    """Where a suite runs: a PyTorch device, and the clocks for it. `Gpu` is the one there is; tests have others."""

    device: str
    cache_bytes: int

    def seconds(self, work: Work) -> float: ...

    def pipelined_seconds(self, work: Work, wait: Callable[[Any], None]) -> float: ...

    def host_seconds(self, works: Sequence[Work]) -> list[float]: ...

    def release(self) -> None: ...

    def broken(self) -> str: ...


class Gpu:
    """The current CUDA device through PyTorch.

    Work is timed on PyTorch's current stream. It is CuPy's too as long as neither was changed: the default stream.
    """

    device = "cuda"

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise RuntimeError(f"PyTorch is not installed, which the timing and the copies need: {error}") from error
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        self._torch: Any = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or 128 * 2**20
        self._buffer = torch.empty(max(2 * self.cache_bytes, 256 * 2**20), dtype=torch.uint8, device="cuda")
        self._fill_seconds = max(statistics.median(self._events(self._buffer.zero_, 1, 10)), 1e-6)

    def seconds(self, work: Work, repeats: int = 100, budget: float = 0.1) -> float:
        """The median time on the device of ``work``, in seconds.

        L2 is overwritten before each run, as often as empties it, and as it takes for the host to have queued the run
        meanwhile: else the time would be the host's where a call costs it more than the device. There are ``repeats``
        runs, fewer where they would take longer than ``budget`` seconds, but at least five; the first runs, not
        counted, compile.
        """
        work()
        self._torch.cuda.synchronize()
        calls = []
        for _ in range(3):
            begin = time.perf_counter()
            work()
            calls.append(time.perf_counter() - begin)
            self._torch.cuda.synchronize()
        fills = 1 + math.ceil(1.5 * min(calls) / self._fill_seconds)
        fills = max(_LEAST_FILLS, min(fills, _MOST_FILLS))
        estimate = min(self._events(work, fills, 2)) + fills * self._fill_seconds
        count = max(5, min(repeats, int(budget / estimate)))
        return statistics.median(self._events(work, fills, count))

    def _events(self, work: Work, fills: int, count: int) -> list[float]:
        event = functools.partial(self._torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in range(count)]
        for begin, end in pairs:
            for _ in range(fills):
                self._buffer.zero_()
            begin.record()
            work()
            end.record()
        self._torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]

    def pipelined_seconds(self, work: Work, wait: Callable[[Any], None]) -> float:
        """The time of a call of ``work``, queued one behind the other, by the host's clock: for other streams."""
        wait(work())
        begin = time.perf_counter()
        wait(work())
        calls = max(3, min(50, int(0.03 / max(time.perf_counter() - begin, 1e-6))))
        samples = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(calls):
                result = work()
            wait(result)
            samples.append((time.perf_counter() - begin) / calls)
        return statistics.median(samples)

    def host_seconds(self, works: Sequence[Work]) -> list[float]:
        return host_seconds(works, self._torch.cuda.synchronize)

    def release(self) -> None:
        """Give back memory that PyTorch keeps, which other libraries may need for the next problem."""
        self._torch.cuda.empty_cache()

    def broken(self) -> str:
        """What is wrong with the device if an error has made it unusable for this process, else nothing."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""


def host_seconds(works: Sequence[Work], wait: Work, batches: int = 21, calls: int = 200) -> list[float]:
    """The median host time of a call of each of ``works``; their batches take turns, so that all see one machine."""
    for work in works:
        for _ in range(calls // 2):
            work()
        wait()
    samples: list[list[float]] = [[] for _ in works]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(batches):
            for work, times in zip(works, samples):
                begin = time.perf_counter()
                for _ in itertools.repeat(None, calls):
                    work()
                times.append((time.perf_counter() - begin) / calls)
                wait()
    finally:
        if collecting:
            gc.enable()
    return [statistics.median(times) for times in samples]
