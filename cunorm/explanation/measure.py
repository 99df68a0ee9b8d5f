"""The time of a call, and that of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from cunorm import cuda, gpus
from cunorm.explanation.call import Call
from cunorm.problem import DTYPES, View

__all__ = ["measured"]

_SAMPLES = 20
_BLOCK = 2**22 - 3  # bytes that are drawn, and then repeated


def measured(call: Call, index: int, x_pointer: int, moved_bytes: int) -> tuple[float, float]:
    """The times of a call and of a copy of the bytes that must move: medians, with a cold L2 cache.

    x is the user's where it has an address, and where the call reads it: backward with a residual reads their sum. All
    else is drawn at random.
    """
    cupy = cuda.cupy()
    with cupy.cuda.Device(index) as device:
        prepared, views = call.prepared(("cuda", index))
        device.synchronize()  # x may be on its way, on another stream
        memory = [None if view is None else _memory(cupy, view) for view in views]
        pointers = [0 if item is None else item[1] for item in memory]
        if x_pointer and not (call.backward and call.residual):
            pointers[2 if call.backward else 0] = x_pointer
        workspace = cupy.empty(prepared.workspace_bytes, "uint8")
        source = cupy.zeros(moved_bytes // 2, "uint8")
        target = cupy.empty_like(source)
        flushing = gpus.flushing_memory(index)
        stream = cupy.cuda.get_current_stream()

        def median(work: Callable[[], Any]) -> float:
            times = gpus.cold_seconds(work, _SAMPLES, flushing)
            return statistics.median(times[_SAMPLES // 4 :])  # the first warm up

        seconds = median(lambda: prepared.run(pointers, workspace.data.ptr, stream.ptr))
        return seconds, median(lambda: cupy.copyto(target, source))


def _memory(cupy: Any, view: View) -> tuple[Any, int]:
    """Memory for a view, of bytes below 64, which are numbers from 0 to 2 in every dtype; and the view's address."""
    import numpy as np

    itemsize = DTYPES[view.dtype].itemsize
    reach = [(size - 1) * stride * itemsize for size, stride in zip(view.shape, view.strides) if size]
    lowest, count = sum(step for step in reach if step < 0), sum(map(abs, reach)) + itemsize + 16
    block = cupy.asarray(np.random.default_rng(0).integers(0, 64, min(count, _BLOCK), "uint8"))
    memory = cupy.empty(count, "uint8")
    for start in range(0, count, _BLOCK):
        memory[start : start + _BLOCK] = block[: count - start]
    # As far from a multiple of 16 bytes as the view is.
    return memory, memory.data.ptr - lowest + (view.pointer + lowest - memory.data.ptr) % 16
