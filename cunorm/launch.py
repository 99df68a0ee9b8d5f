"""Runs a plan on a GPU: compiles its kernels and launches them.

A plan's launches are compiled once for a device (CuPy's ``RawModule``: NVRTC, with CuPy's on-disk cache) and become a
``Call``. A call packs pointers into each kernel's argument struct and launches on the stream it is given: nothing is
allocated, copied or waited for. Where the device can, the launches of a plan overlap (kernels/dependent_launch.cuh).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cunorm import kernels
from cunorm.compile_error import CompileError
from cunorm.plan import Device, Launch, Plan

__all__ = [
    "COMPILE_OPTIONS",
    "COPIED_SHARE",
    "Call",
    "Step",
    "argument_values",
    "compiled_function",
    "cupy",
    "device",
    "driver_addresses",
    "forget_text",
    "gpu_name",
    "no_cupy",
]

_FIRST_CAPABILITY = (7, 5)
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_CLUSTER_WITHOUT_ASKING = 8
# Of the driver's enumerations CUfunction_attribute and CUlaunchAttributeID.
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
# Launches overlap from these on: kernels wait for each other since Hopper, and a driver can capture that into a graph
# since CUDA 12.3.
_FIRST_OVERLAPPING_CAPABILITY, _FIRST_OVERLAPPING_DRIVER = 90, 12030
COMPILE_OPTIONS = ("-std=c++17",)
# What a copy reaches of the rate that the memory's clock and width give: 0.86 of 4.9 TB/s on an H200, 0.89 of 3.35 on
# an H100.
COPIED_SHARE = 0.86
_asking = threading.Lock()
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
    return Device(
        arch=f"sm_{properties['major']}{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        threads_per_multiprocessor=properties["maxThreadsPerMultiProcessor"],
        clusters=_clusters(index) if properties["major"] >= 9 else (0, 0, 0, 0),
        memory_rate=_memory_rate(index) / properties["multiProcessorCount"] or Device.memory_rate,
    )


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


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def _launch_config(
    grid: int, block: tuple[int, int], shared_bytes: int, attributes: Mapping[int, tuple[int, ...]]
) -> _LaunchConfig:
    """A launch on the default stream. Attributes are given by their CUlaunchAttributeID, each as the value's words."""
    given = [_LaunchAttribute(name, 0, value) for name, value in attributes.items()]
    array = (_LaunchAttribute * len(given))(*given)
    return _LaunchConfig((grid, 1, 1), (*block, 1), shared_bytes, None, array, len(array))


@functools.cache
def _driver() -> Any:
    """The driver, for what CuPy does not have of it. A call lets go of the GIL, as CuPy's do.

    A launch waits where the stream's queue is full, and what that waits for may be a host function in Python.
    """
    return ctypes.CDLL("libcuda.so.1")


def driver_addresses(*names: str) -> list[int]:
    """Where functions of the driver are, for who calls them without Python."""
    return [ctypes.cast(getattr(_driver(), name), ctypes.c_void_p).value or 0 for name in names]


def _clusters(index: int) -> tuple[int, int, int, int]:
    """How many clusters of 2, 4, 8 and 16 blocks that fill a multiprocessor each run at once; 0 for what fails."""
    with cupy().cuda.Device(index):
        text = 'extern "C" __global__ void fill() { extern __shared__ char memory[]; memory[threadIdx.x] = 0; }'
        function = cupy().RawModule(code=text).get_function("fill")
        shared_bytes = cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        function.max_dynamic_shared_size_bytes = shared_bytes
        cupy().cuda.driver.funcSetAttribute(function.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        counts = []
        for blocks in (2, 4, 8, 16):
            config = _launch_config(blocks, (128, 1), shared_bytes, {_CLUSTER_DIMENSION: (blocks, 1, 1)})
            count = ctypes.c_int(0)
            pointer = ctypes.c_void_p(function.kernel.ptr)
            failed = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), pointer, ctypes.byref(config))
            counts.append(0 if failed else count.value)
    return counts[0], counts[1], counts[2], counts[3]


def _launches_overlap(index: int) -> bool:
    """Whether a launch on CUDA device ``index`` may begin before the one before it has ended."""
    if device(index).capability < _FIRST_OVERLAPPING_CAPABILITY:
        return False
    return bool(cupy().cuda.runtime.driverGetVersion() >= _FIRST_OVERLAPPING_DRIVER)


def _driver_hint(runtime: Any) -> str:
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver >= needed // 1000 * 1000:
        return ""
    found = f"supports CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "is missing"
    return f" (the NVIDIA driver {found}; this CuPy needs CUDA {needed // 1000}.0 or later)"


# By what `compiled_function` was given, less the texts, and by the kernel's own text.
_functions: dict[Any, Any] = {}


def compiled_function(
    kernel: str,
    constants: tuple[tuple[str, int | str], ...],
    shared_bytes: int,
    cluster: int,
    device_index: int,
    texts: Mapping[str, str] | None = None,
) -> Any:
    """A kernel, compiled and loaded on a device. A RuntimeError where it does not compile or asks for too much.

    ``texts`` stand in for shipped ones, as `cunorm.kernels.kernel_text` takes them.
    """
    key = (kernels.kernel_text(kernel, texts), kernel, constants, shared_bytes, cluster, device_index)
    function = _functions.get(key)
    if function is None:
        function = _functions[key] = _compile(*key)
    return function


def forget_text(text: str) -> None:
    """Let go of the functions that were compiled of a text."""
    for key in [key for key in list(_functions) if key[0] == text]:
        _functions.pop(key, None)


def _compile(
    text: str,
    kernel: str,
    constants: tuple[tuple[str, int | str], ...],
    shared_bytes: int,
    cluster: int,
    device_index: int,
) -> Any:
    source = kernels.kernel_source(kernel, dict(constants), {kernel: text})
    try:
        with cupy().cuda.Device(device_index):
            function = cupy().RawModule(code=source, options=COMPILE_OPTIONS).get_function(kernel)
            # One text is one function, whatever shared memory it is launched with: never ask for less than before.
            with _asking:
                unasked = _SHARED_BYTES_WITHOUT_ASKING - function.shared_size_bytes
                if shared_bytes > max(unasked, function.max_dynamic_shared_size_bytes):
                    function.max_dynamic_shared_size_bytes = shared_bytes
            if cluster > _CLUSTER_WITHOUT_ASKING:
                cupy().cuda.driver.funcSetAttribute(function.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            return function.kernel
    except cupy().cuda.compiler.CompileException as error:
        what = f"kernel {kernel} does not compile for CUDA device {device_index}"
        raise CompileError(what, str(error), text, dict(constants)) from error


def argument_values(launch: Launch) -> list[tuple[str, Any]]:
    """The fields of a launch's ``struct Arguments`` in order, arrays flattened: ("q" or "d", number) or ("P", name).

    A pointer that is null has no name but None.
    """
    given, constants = dict(launch.arguments), dict(launch.constants)
    values: list[tuple[str, Any]] = []
    for name, kind, length in kernels.argument_fields(launch.kernel):
        value = given[name]
        if kind == "pointer":
            if length is None or constants[length]:
                values.append(("P", value if isinstance(value, str) else None))
        elif length is None:
            values.append(("d" if kind == "double" else "q", value))
        else:
            assert isinstance(value, tuple) and len(value) == constants[length]
            values += [("d" if kind == "double" else "q", item) for item in value]
    return values


class Step(NamedTuple):
    """A launch of a compiled function, ready but for the pointers of a call.

    ``attributes`` are pairs of a CUlaunchAttributeID and the value's first word. ``arguments`` is the kernel's argument
    struct. It begins with pointers, zeros here; ``places`` says for each which of the call's pointers it is, -1 for one
    that stays null.
    """

    kernel: str
    function: int
    grid: int
    block: tuple[int, int]
    shared_bytes: int
    attributes: tuple[tuple[int, int], ...]
    arguments: bytes
    places: tuple[int, ...]

    @staticmethod
    def of(launch: Launch, function: int, names: Sequence[str], overlapping: bool) -> Step:
        """That of a plan's launch, of a call whose pointers have these names.

        One that is ``overlapping`` may begin before the one before it on the stream has ended.
        """
        values = argument_values(launch)
        pointers = [name for code, name in values if code == "P"]
        numbers = [(code, value) for code, value in values if code != "P"]
        assert all(code == "P" for code, _ in values[: len(pointers)]), "pointers come first"
        tail = struct.pack("<" + "".join(code for code, _ in numbers), *(value for _, value in numbers))
        attributes = {_PROGRAMMATIC_STREAM_SERIALIZATION: overlapping, _COOPERATIVE: launch.cooperative}
        return Step(
            launch.kernel,
            function,
            launch.grid,
            launch.block,
            launch.shared_bytes,
            tuple((name, 1) for name, asked in attributes.items() if asked),
            bytes(8 * len(pointers)) + tail,
            tuple(-1 if name is None else names.index(name) for name in pointers),
        )

    def packer(self) -> tuple[Callable[[Sequence[int]], tuple[int, ...]], Callable[..., None]]:
        """What picks this step's pointers from a call's, and what packs those into a buffer with ``arguments``."""
        given = [place for place in self.places if place >= 0]
        # Of a single place it would be no sequence.
        pick = operator.itemgetter(*given) if len(given) > 1 else operator.itemgetter(slice(given[0], given[0] + 1))
        # Padding is written as zeros, which a null pointer is.
        return pick, struct.Struct("<" + "".join("8x" if place < 0 else "Q" for place in self.places)).pack_into

    def starter(self, parameters: ctypes.c_void_p) -> Callable[[int], None]:
        """What launches on a stream. The parameter points at the argument struct."""
        names = [name for name, _ in self.attributes]
        if _PROGRAMMATIC_STREAM_SERIALIZATION in names:
            return self._extended_starter(parameters)
        address = ctypes.addressof(parameters)
        dimensions = (self.grid, 1, 1, *self.block, 1, self.shared_bytes)
        if _COOPERATIVE in names:
            together = functools.partial(cupy().cuda.driver.launchCooperativeKernel, self.function, *dimensions)
            return lambda stream: together(stream, address)
        alone = functools.partial(cupy().cuda.driver.launchKernel, self.function, *dimensions)
        return lambda stream: alone(stream, address, 0)

    def _extended_starter(self, parameters: ctypes.c_void_p) -> Callable[[int], None]:
        """The same for any attributes, which CuPy has no function for."""
        attributes = {name: (value,) for name, value in self.attributes}
        config = _launch_config(self.grid, self.block, self.shared_bytes, attributes)
        # These are the driver's types already: told its argtypes, ctypes would check that at every call, for 0.2 us.
        pointers = ctypes.byref(config), ctypes.c_void_p(self.function), ctypes.byref(parameters), None
        launch_kernel = functools.partial(_driver().cuLaunchKernelEx, *pointers)

        def start(stream: int) -> None:
            config.stream = stream
            if status := launch_kernel():
                error = cupy().cuda.driver.CUDADriverError(status)
                raise RuntimeError(f"kernel {self.kernel} could not be launched: {error}")

        return start


class Call:
    """A compiled plan. ``operands`` are the names of the buffers whose pointers a call is given, in order.

    ``texts`` stand in for shipped ones; by default they are those that do so when the call is made.
    """

    def __init__(
        self, plan: Plan, operands: Sequence[str], device_index: int, texts: Mapping[str, str] | None = None
    ) -> None:
        # Read once: all of a plan's launches run the texts of one moment.
        texts = kernels.replaced if texts is None else texts
        self._device = device_index
        self._current_context = cupy().cuda.driver.ctxGetCurrent
        self.scratch_offsets = [scratch.offset for scratch in plan.scratch]
        # What a call's pointers are called: its operands, its scratch.
        names = [*operands, *(scratch.name for scratch in plan.scratch)]
        self._functions = [compiled_function(*launch.function_key, device_index, texts) for launch in plan.launches]
        overlap = _launches_overlap(device_index)
        self.steps = [
            Step.of(launch, function.ptr, names, overlap and place > 0)
            for place, (launch, function) in enumerate(zip(plan.launches, self._functions))
        ]
        with cupy().cuda.Device(device_index):
            self.context = self._current_context()  # it is there, since the kernels were loaded into it
        self._of_thread = threading.local()

    def _prepare_thread(self) -> Callable[[Sequence[int], int, int], None]:
        """What launches in this thread, with argument structs of its own.

        The driver copies these during a launch, when other threads may be packing.
        """
        offsets, launches = self.scratch_offsets, []
        for step in self.steps:
            arguments = ctypes.create_string_buffer(step.arguments, len(step.arguments))
            parameters = ctypes.c_void_p(ctypes.addressof(arguments))
            launches.append((*step.packer(), arguments, step.starter(parameters), parameters))

        # Every call comes here: what a closure has is found sooner than attributes.
        def launch_all(pointers: Sequence[int], workspace: int, stream: int) -> None:
            if offsets:
                pointers = (*pointers, *[workspace + offset for offset in offsets])
            for pick, pack_into, arguments, start, _ in launches:
                pack_into(arguments, 0, *pick(pointers))
                start(stream)

        self._of_thread.launch_all = launch_all
        return launch_all

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launch on ``stream``, a raw handle. ``workspace`` points at the plan's ``workspace_bytes`` on the device."""
        try:
            launch_all = self._of_thread.launch_all
        except AttributeError:
            launch_all = self._prepare_thread()
        if self._current_context() == self.context:
            launch_all(pointers, workspace, stream)
            return
        with cupy().cuda.Device(self._device):  # another device is current, or none yet in this thread
            if not self._current_context():
                cupy().cuda.runtime.free(0)  # makes it this thread's
            launch_all(pointers, workspace, stream)
