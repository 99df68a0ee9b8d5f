"""CuPy and the CUDA driver: how to reach them, and what they tell of a device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cunorm.plan import Device
from cunorm.plan.device import NO_UNEVEN_CLUSTERS, UNEVEN_CLUSTERS, UNEVEN_SHARES

__all__ = [
    "CLUSTER_DIMENSION",
    "COOPERATIVE",
    "COPIED_SHARE",
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    "PROGRAMMATIC_STREAM_SERIALIZATION",
    "LaunchConfig",
    "cupy",
    "device",
    "driver",
    "driver_addresses",
    "gpu_name",
    "launch_config",
    "launches_overlap",
    "no_cupy",
]

# Of the driver's enumerations CUfunction_attribute and CUlaunchAttributeID.
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6

# What a copy reaches of the rate that the memory's clock and width give: 0.86 of 4.9 TB/s on an H200, 0.89 of 3.35 on
# an H100.
COPIED_SHARE = 0.86

_FIRST_CAPABILITY = (7, 5)
# Launches overlap from these on: kernels wait for each other since Hopper, and a driver can capture that into a graph
# since CUDA 12.3.
_FIRST_OVERLAPPING_CAPABILITY, _FIRST_OVERLAPPING_DRIVER = 90, 12030
_NOT_INSTALLED = "is not installed"


@functools.cache
def cupy() -> Any:
    """The cupy module, or a RuntimeError that says how to get it, or why the one that is there does not load."""
    try:
        import cupy
    except Exception as error:  # one that does not load raises whatever the library or folder that it lacks makes it
        reason = no_cupy(error)
        if reason == _NOT_INSTALLED:
            reason += ': install cunorm with the extra "cuda12x" (or "cuda13x", by the CUDA version of the driver)'
        raise RuntimeError(f"a tensor on a CUDA device needs CuPy, which {reason}") from error
    return cupy


def no_cupy(error: BaseException) -> str:
    """What is wrong with CuPy, by what its import raised: the innermost reason, since CuPy puts a page around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
    return _NOT_INSTALLED if missing else f"does not load: {error}"


@functools.cache
def device(index: int) -> Device:
    """What the plans need to know of CUDA device ``index``."""
    runtime = cupy().cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(f"CUDA device {index} cannot be used: {error}{_driver_hint(runtime)}") from error
    if (properties["major"], properties["minor"]) < _FIRST_CAPABILITY:
        found, first = f"{properties['major']}.{properties['minor']}", "{}.{}".format(*_FIRST_CAPABILITY)
        raise RuntimeError(f"CUDA device {index} has compute capability {found}; it must be {first} (Turing) or later")
    without_clusters = Device(
        arch=f"sm_{properties['major']}{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        threads_per_multiprocessor=properties["maxThreadsPerMultiProcessor"],
        clusters=(0, 0, 0, 0),
        uneven_clusters=NO_UNEVEN_CLUSTERS,
        memory_rate=_memory_rate(index) / properties["multiProcessorCount"] or Device.memory_rate,
    )
    return _with_clusters(without_clusters, index) if properties["major"] >= 9 else without_clusters


def _memory_rate(index: int) -> float:
    """The bytes that a copy moves in a microsecond on CUDA device ``index``; 0 where the driver does not tell."""
    attributes = cupy().cuda.Device(index).attributes
    kilohertz, bits = (attributes.get(name, 0) for name in ("MemoryClockRate", "GlobalMemoryBusWidth"))
    return float(COPIED_SHARE * 2 * kilohertz * 1e-3 * bits / 8)


@functools.cache
def gpu_name(index: int) -> str:
    """The name of CUDA device ``index``, as its driver has it."""
    name = cupy().cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


class _LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute. Its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_config(
    grid: int, block: tuple[int, int], shared_bytes: int, attributes: Mapping[int, tuple[int, ...]]
) -> LaunchConfig:
    """A launch on the default stream. Attributes are given by their CUlaunchAttributeID, each as the value's words."""
    given = [_LaunchAttribute(name, 0, value) for name, value in attributes.items()]
    array = (_LaunchAttribute * len(given))(*given)
    return LaunchConfig((grid, 1, 1), (*block, 1), shared_bytes, None, array, len(array))


@functools.cache
def driver() -> Any:
    """The driver, for what CuPy does not have of it. A call lets go of the GIL, as CuPy's do.

    A launch waits where the stream's queue is full, and what that waits for may be a host function in Python.
    """
    return ctypes.CDLL("libcuda.so.1")


def driver_addresses(*names: str) -> list[int]:
    """Where functions of the driver are, for who calls them without Python."""
    return [ctypes.cast(getattr(driver(), name), ctypes.c_void_p).value or 0 for name in names]


def _with_clusters(device: Device, index: int) -> Device:
    """The device with the numbers of clusters of blocks that run at once; 0 for what fails."""
    with cupy().cuda.Device(index) as current:
        text = 'extern "C" __global__ void fill() { extern __shared__ char memory[]; memory[threadIdx.x] = 0; }'
        function = cupy().RawModule(code=text).get_function("fill")
        most = current.attributes["MaxSharedMemoryPerBlockOptin"]
        function.max_dynamic_shared_size_bytes = most
        cupy().cuda.driver.funcSetAttribute(function.kernel.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

        def count(blocks: int, share: int = 1) -> int:
            shared_bytes = (most + device.reserved_bytes) // share - device.reserved_bytes
            config = launch_config(blocks, (128, 1), shared_bytes, {CLUSTER_DIMENSION: (blocks, 1, 1)})
            found, pointer = ctypes.c_int(0), ctypes.c_void_p(function.kernel.ptr)
            failed = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), pointer, ctypes.byref(config))
            return 0 if failed else found.value

        uneven = (tuple(count(blocks, share) for share in UNEVEN_SHARES) for blocks in UNEVEN_CLUSTERS)
        clusters = count(2), count(4), count(8), count(16)
        return replace(device, clusters=clusters, uneven_clusters=tuple(uneven))


def launches_overlap(index: int) -> bool:
    """Whether a launch on CUDA device ``index`` may begin before the one before it has ended."""
    if device(index).capability < _FIRST_OVERLAPPING_CAPABILITY:
        return False
    return bool(cupy().cuda.runtime.driverGetVersion() >= _FIRST_OVERLAPPING_DRIVER)


def _driver_hint(runtime: Any) -> str:
    version, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if version >= needed // 1000 * 1000:
        return ""
    found = f"supports CUDA {version // 1000}.{version % 1000 // 10}" if version else "is missing"
    return f" (the NVIDIA driver {found}; this CuPy needs CUDA {needed // 1000}.0 or later)"
