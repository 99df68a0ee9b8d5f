"""What GPU is here, what is known of others, how fast each can copy, and the clock for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cunorm import cuda
from cunorm.plan import Device

__all__ = [
    "KNOWN_GPUS",
    "KnownGpu",
    "LocalGpu",
    "check_usable",
    "cold_seconds",
    "cuda_devices",
    "current_index",
    "flushing_memory",
    "local_gpu",
    "measured_copy_rate",
]

_LEAST_FLUSHED_BYTES = 256 * 2**20
_COPIED_BYTES = 512 * 2**20


@dataclass(frozen=True)
class KnownGpu:
    """A GPU that stands for its architecture where none is at hand. ``rate`` is in bytes a second, read and written."""

    name: str
    device: Device
    rate: float
    rate_is: str


def _known(name: str, arch: str, multiprocessors: int, threads: int, rate: float, rate_is: str = "") -> KnownGpu:
    copied = rate if rate_is else cuda.COPIED_SHARE * rate
    device = Device(arch, multiprocessors, threads, memory_rate=copied * 1e-6 / multiprocessors)
    return KnownGpu(name, device, rate, rate_is or "the datasheet's memory rate")


KNOWN_GPUS = {
    gpu.device.arch: gpu
    for gpu in (
        _known("T4", "sm_75", 40, 1024, 0.320e12),
        _known("A100 80 GB", "sm_80", 108, 2048, 2.039e12),
        _known("A40", "sm_86", 84, 1536, 0.696e12),
        _known("RTX 4090", "sm_89", 128, 1536, 1.008e12),
        _known("H200", "sm_90", 132, 2048, 4.3e12, "a copy's measured rate"),
        _known("B200", "sm_100", 148, 2048, 8.0e12),
        _known("RTX 5090", "sm_120", 170, 1536, 1.792e12),
    )
}


def cuda_devices() -> tuple[list[str], str]:
    """The names of the CUDA devices here; and, where there is none, why."""
    try:
        runtime = cuda.cupy().cuda.runtime
    except RuntimeError as error:
        return [], f"CuPy {cuda.no_cupy(error)}"
    try:
        names = [cuda.gpu_name(index) for index in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        return [], _why(runtime, error)
    return names, "" if names else "none found"


def _why(runtime: Any, error: Exception) -> str:
    """Why there is no CUDA device, where CuPy raised an error: it takes a missing driver for one that is too old."""
    return str(error) if runtime.driverGetVersion() else "no NVIDIA driver"


def current_index(purpose: str) -> int:
    """The current CUDA device; a RuntimeError that names the purpose, where there is none."""
    runtime = cuda.cupy().cuda.runtime
    try:
        return int(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(f"{purpose} needs an NVIDIA GPU: {_why(runtime, error)}") from error


class LocalGpu(NamedTuple):
    """A GPU that is here and can be used."""

    name: str
    device: Device


def local_gpu(index: int = 0) -> tuple[LocalGpu | None, str]:
    """A GPU here, the first one; and, where it cannot be used, why."""
    names, reason = cuda_devices()
    if not names:
        return None, f"no CUDA device ({reason})"
    try:
        return LocalGpu(names[index], cuda.device(index)), ""
    except Exception as error:  # too old, another process's alone, or a driver that does not go with this CuPy
        return None, f"{names[index]} cannot be used ({error})"


def check_usable(purpose: str, index: int = 0) -> None:
    """A RuntimeError that names the purpose, where a GPU here, the first one, cannot be used."""
    names, reason = cuda_devices()
    gpu, unusable = local_gpu(index)
    if gpu is None:
        raise RuntimeError(f"{purpose} needs an NVIDIA GPU: {unusable if names else reason}")


def flushing_memory(index: int) -> Any:
    """Memory of a CUDA device that does not fit in its L2 cache, for `cold_seconds`."""
    cupy = cuda.cupy()
    cache_bytes = cupy.cuda.Device(index).attributes.get("L2CacheSize", 0)
    return cupy.empty(max(2 * cache_bytes, _LEAST_FLUSHED_BYTES), "uint8")


def cold_seconds(work: Callable[[], Any], count: int, flushing: Any) -> list[float]:
    """The times of so many runs of ``work`` on the current CUDA device and stream, each with a cold L2 cache."""
    of_cupy = cuda.cupy().cuda
    pairs = [(of_cupy.Event(), of_cupy.Event()) for _ in range(count)]
    for begin, end in pairs:
        # Overwrites L2; and while that takes its time, the work is queued, so that no host time is measured.
        flushing.data.memset_async(0, flushing.nbytes)
        begin.record()
        work()
        end.record()
    of_cupy.get_current_stream().synchronize()
    return [float(of_cupy.get_elapsed_time(begin, end)) * 1e-3 for begin, end in pairs]


@functools.cache
def measured_copy_rate(index: int = 0) -> float:
    """Bytes a second, read and written, of a plain copy on a CUDA device: the best of a few.

    Raises a MemoryError or RuntimeError where the GPU has no room or no time for it.
    """
    cupy = cuda.cupy()
    with cupy.cuda.Device(index):
        source = cupy.zeros(_COPIED_BYTES, cupy.uint8)
        target = cupy.empty_like(source)
        best = float("inf")
        for _ in range(8):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            cupy.copyto(target, source)
            stop.record()
            stop.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
        del source, target
        cupy.get_default_memory_pool().free_all_blocks()  # which other libraries may need
    return 2 * _COPIED_BYTES / best
