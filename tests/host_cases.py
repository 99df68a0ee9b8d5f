"""Compiled calls (adapters/*/host.cpp) without a GPU: for CPU tensors, by a driver of our own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cunorm import cuda, execute, launch, on_cpu
from cunorm.prepared import Prepared

_CONTEXT = 77
_LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_GetContext = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_PushContext = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Driver:
    """What stands in for the driver: its functions are numbers, for what computes results from pointers.

    ``functions`` are these, each with the number of its pointers. ``launches`` counts what compiled code launched,
    and ``configs`` are those of the launches.
    ``status`` is what a launch answers, 0 for success; ``context`` is the current one.
    """

    def __init__(self) -> None:
        self.launches, self.status, self.context = 0, 0, _CONTEXT
        self.status_of_push, self.pushed = 0, list[int]()
        self.configs: list[tuple[Any, ...]] = []
        self.functions: list[tuple[int, Callable[[Sequence[int]], None]]] = []
        self._kept: dict[str, Any] = {
            "cuLaunchKernelEx": _LaunchKernel(self._launch),
            "cuCtxGetCurrent": _GetContext(self._get_context),
            "cuCtxPushCurrent_v2": _PushContext(self._push_context),
            "cuCtxPopCurrent_v2": _GetContext(self._pop_context),
        }

    def addresses(self, *names: str) -> list[int]:
        """As `cunorm.cuda.driver_addresses`."""
        return [ctypes.cast(self._kept[name], ctypes.c_void_p).value or 0 for name in names]

    def add(self, count: int, function: Callable[[Sequence[int]], None]) -> int:
        self.functions.append((count, function))
        return len(self.functions)  # 0 would be null

    def _launch(self, config: int, number: int, parameters: Any, extra: Any) -> int:
        if self.status:
            return self.status
        given = _Config.from_address(config)
        words = (ctypes.c_uint * (18 * given.count)).from_address(given.attributes) if given.count else []
        attributes = [(words[18 * i], words[18 * i + 2]) for i in range(given.count)]
        self.configs.append((tuple(given.grid), tuple(given.block), given.shared_bytes, given.stream, attributes))
        count, function = self.functions[number - 1]
        function(list((ctypes.c_uint64 * count).from_address(parameters[0])))
        self.launches += 1
        return 0

    def _get_context(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def _push_context(self, context: int) -> int:
        self.pushed.append(context)
        return self.status_of_push

    def _pop_context(self, context: Any) -> int:
        context[0] = self.pushed.pop()
        return 0


class CallOnCpu(launch.Call):
    """A call that runs ``run`` of its pointers, which compiled code takes for one of kernels."""

    def __init__(self, run: Callable[[Sequence[int]], None], steps: Sequence[launch.Step]) -> None:
        self._run, self.steps = run, list(steps)
        self.scratch_offsets, self.context = [], _CONTEXT

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        self._run(pointers)


def step(number: int, places: Sequence[int]) -> launch.Step:
    """A launch of a driver's function, of a call's pointers at these places."""
    return launch.Step("on_cpu", number, 1, (32, 1), 0, (), bytes(8 * len(places)), tuple(places))


def launch_by(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled code compute what is on the CPU as if it was on a GPU, by this driver."""
    prepare = on_cpu.prepare_on_cpu

    def prepare_on_cpu(function: Any, views: Sequence[Any], outputs: Any) -> Prepared:
        prepared = prepare(function, views, outputs)

        def run(pointers: Sequence[int]) -> None:
            prepared.run(pointers, 0, 0)

        call = CallOnCpu(run, [step(driver.add(len(views), run), range(len(views)))])
        return Prepared(outputs, ("cpu", 0), 0, call)

    monkeypatch.setattr(on_cpu, "prepare_on_cpu", prepare_on_cpu)
    monkeypatch.setattr(cuda, "driver_addresses", driver.addresses)


@contextmanager
def compiled_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """PyTorch's calls are compiled meanwhile; those of CPU tensors are launched by the driver that this gives."""
    from cunorm.adapters.torch import host  # here, since TensorFlow's tests need no PyTorch

    driver = Driver()
    execute.forget_prepared()
    monkeypatch.setenv("CUNORM_COMPILED_CALLS", "1")
    host.build()
    if device == "cpu":
        launch_by(driver, monkeypatch)
    monkeypatch.setattr(host, "_has_begun", False)
    yield driver
    monkeypatch.undo()
    execute.forget_prepared()
    host.native = None
