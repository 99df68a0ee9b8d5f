"""Runs a plan on a GPU: the only file that touches the driver.

A plan's launches are compiled once for a device (CuPy's ``RawModule``: NVRTC, with CuPy's on-disk cache) and become a
``Call``. A call packs pointers into each kernel's argument struct and launches on the stream it is given: nothing is
allocated, copied or waited for.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from cunorm import kernels
from cunorm.plan import Device, Launch, Plan

__all__ = ["COMPILE_OPTIONS", "Call", "argument_values", "cupy", "device"]

COMPILE_OPTIONS = ("-std=c++17",)


@functools.cache
def cupy() -> Any:
    """The cupy module, or a RuntimeError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "a tensor on a CUDA device needs CuPy, which is not installed: "
            'pip install "cunorm[cuda12x]" (or cuda13x, by the CUDA version of the driver)'
        ) from error
    return cupy


@functools.cache
def device(index: int) -> Device:
    """What the plans need to know of CUDA device ``index``."""
    runtime = cupy().cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(f"CUDA device {index} cannot be used: {error}{_driver_hint(runtime)}") from error
    return Device(
        arch=f"sm_{properties['major']}{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        threads_per_multiprocessor=properties["maxThreadsPerMultiProcessor"],
    )


def _driver_hint(runtime: Any) -> str:
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver >= needed // 1000 * 1000:
        return ""
    found = f"supports CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "is missing"
    return f" (the NVIDIA driver {found}; this CuPy needs CUDA {needed // 1000}.0 or later)"


@functools.cache
def _function(kernel: str, constants: tuple[tuple[str, int | str], ...], device_index: int) -> Any:
    with cupy().cuda.Device(device_index):
        module = cupy().RawModule(code=kernels.kernel_source(kernel, dict(constants)), options=COMPILE_OPTIONS)
        return module.get_function(kernel).kernel


def argument_values(launch: Launch) -> list[tuple[str, Any]]:
    """The fields of a launch's ``struct Arguments`` in order, arrays flattened: ("q" or "d", number) or ("P", name).

    A pointer that is null has no name but None.
    """
    given, constants = dict(launch.arguments), dict(launch.constants)
    values: list[tuple[str, Any]] = []
    for name, kind, length in kernels.argument_fields(launch.kernel):
        value = given[name]
        if kind == "pointer":
            values.append(("P", value if isinstance(value, str) else None))
        elif length is None:
            values.append(("d" if kind == "double" else "q", value))
        else:
            assert isinstance(value, tuple) and len(value) == constants[length]
            values += [("q", item) for item in value]
    return values


class Call:
    """A compiled plan. ``operands`` are the names of the buffers whose pointers a call is given, in order."""

    def __init__(self, plan: Plan, operands: Sequence[str], device_index: int) -> None:
        self._device = device_index
        self._runtime = cupy().cuda.runtime
        self._current_context = cupy().cuda.driver.ctxGetCurrent
        self._launch_kernel = cupy().cuda.driver.launchKernel
        self._launches = []
        offsets = {scratch.name: scratch.offset for scratch in plan.scratch}
        for launch in plan.launches:
            values = argument_values(launch)
            codes = "".join("Q" if code == "P" else code for code, _ in values)
            template = [0 if code == "P" else value for code, value in values]
            # Where pointers go: (place in the struct, place among the operands), (place in the struct, scratch offset).
            names = [(place, name) for place, (code, name) in enumerate(values) if code == "P" and name is not None]
            operand_places = [(place, operands.index(name)) for place, name in names if name not in offsets]
            scratch_places = [(place, offsets[name]) for place, name in names if name in offsets]
            function = _function(launch.kernel, launch.constants, device_index)
            dimensions = (launch.grid, 1, 1, *launch.block, 1)
            pack_into = struct.Struct("<" + codes).pack_into
            self._launches.append((function.ptr, dimensions, pack_into, template, operand_places, scratch_places))

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launch on ``stream``, a raw handle. ``workspace`` points at the plan's ``workspace_bytes`` on the device."""
        if self._runtime.getDevice() != self._device:
            with cupy().cuda.Device(self._device):
                return self(pointers, workspace, stream)
        if not self._current_context():  # a thread that has not used the GPU yet
            self._runtime.setDevice(self._device)
        for function, dimensions, pack_into, template, operand_places, scratch_places in self._launches:
            values = template.copy()
            for place, operand in operand_places:
                values[place] = pointers[operand]
            for place, offset in scratch_places:
                values[place] = workspace + offset
            # Made anew each time: the driver copies it during the launch, when another thread may be packing too.
            packed = ctypes.create_string_buffer(8 * len(values))
            pack_into(packed, 0, *values)
            parameters = ctypes.c_void_p(ctypes.addressof(packed))
            self._launch_kernel(function, *dimensions, 0, stream, ctypes.addressof(parameters), 0)
        return None
