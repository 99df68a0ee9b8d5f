"""Launches a plan on a GPU.

A plan's kernels are compiled once for a device (see compiling.py), and its launches become a ``Call``. A call packs
pointers into each kernel's argument struct and launches on the stream it is given: nothing is allocated, copied or
waited for. Where the device can, the launches of a plan overlap (kernels/dependent_launch.cuh).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cunorm import compiling, cuda, kernels
from cunorm.plan import Launch, Plan

__all__ = ["Call", "Step", "argument_values"]


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
        attributes = {cuda.PROGRAMMATIC_STREAM_SERIALIZATION: overlapping, cuda.COOPERATIVE: launch.cooperative}
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
        if cuda.PROGRAMMATIC_STREAM_SERIALIZATION in names:
            return self._extended_starter(parameters)
        address = ctypes.addressof(parameters)
        dimensions = (self.grid, 1, 1, *self.block, 1, self.shared_bytes)
        if cuda.COOPERATIVE in names:
            together = functools.partial(cuda.cupy().cuda.driver.launchCooperativeKernel, self.function, *dimensions)
            return lambda stream: together(stream, address)
        alone = functools.partial(cuda.cupy().cuda.driver.launchKernel, self.function, *dimensions)
        return lambda stream: alone(stream, address, 0)

    def _extended_starter(self, parameters: ctypes.c_void_p) -> Callable[[int], None]:
        """The same for any attributes, which CuPy has no function for."""
        attributes = {name: (value,) for name, value in self.attributes}
        config = cuda.launch_config(self.grid, self.block, self.shared_bytes, attributes)
        # These are the driver's types already: told its argtypes, ctypes would check that at every call, for 0.2 us.
        pointers = ctypes.byref(config), ctypes.c_void_p(self.function), ctypes.byref(parameters), None
        launch_kernel = functools.partial(cuda.driver().cuLaunchKernelEx, *pointers)

        def start(stream: int) -> None:
            config.stream = stream
            if status := launch_kernel():
                error = cuda.cupy().cuda.driver.CUDADriverError(status)
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
        self._current_context = cuda.cupy().cuda.driver.ctxGetCurrent
        self.scratch_offsets = [scratch.offset for scratch in plan.scratch]
        # What a call's pointers are called: its operands, its scratch.
        names = [*operands, *(scratch.name for scratch in plan.scratch)]
        self._functions = [
            compiling.compiled_function(*launch.function_key, device_index, texts) for launch in plan.launches
        ]
        overlap = cuda.launches_overlap(device_index)
        self.steps = [
            Step.of(launch, function.ptr, names, overlap and place > 0)
            for place, (launch, function) in enumerate(zip(plan.launches, self._functions))
        ]
        with cuda.cupy().cuda.Device(device_index):
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
        with cuda.cupy().cuda.Device(self._device):  # another device is current, or none yet in this thread
            if not self._current_context():
                cuda.cupy().cuda.runtime.free(0)  # makes it this thread's
            launch_all(pointers, workspace, stream)
