"""PyTorch's compiled calls (adapters/torch/host.cpp) without a GPU: for CPU tensors, by a driver of our own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cunorm import execute, launch
from cunorm.adapters.torch import host

_CONTEXT = 77
_LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_GetContext = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))


class Driver:
    """What stands in for the driver: its functions are numbers, for what computes results from pointers.

    ``functions`` are these, each with the number of its pointers. ``launches`` counts what compiled code launched.
    ``status`` is what a launch answers, 0 for success; ``context`` is the current one.
    """

    def __init__(self) -> None:
        self.launches, self.status, self.context = 0, 0, _CONTEXT
        self.functions: list[tuple[int, Callable[[Sequence[int]], None]]] = []
        self._kept = _LaunchKernel(self._launch), _GetContext(self._get_context)

    def addresses(self) -> tuple[int, int]:
        launch_kernel, get_context = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._kept)
        return launch_kernel, get_context

    def add(self, count: int, function: Callable[[Sequence[int]], None]) -> int:
        self.functions.append((count, function))
        return len(self.functions)  # 0 would be null

    def _launch(self, config: int, number: int, parameters: Any, extra: Any) -> int:
        if self.status:
            return self.status
        count, function = self.functions[number - 1]
        function(list((ctypes.c_uint64 * count).from_address(parameters[0])))
        self.launches += 1
        return 0

    def _get_context(self, context: Any) -> int:
        context[0] = self.context
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


@contextmanager
def compiled_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """PyTorch's calls are compiled meanwhile; those of CPU tensors are launched by the driver that this gives."""
    driver, prepare = Driver(), execute.prepare_on_cpu

    def prepare_on_cpu(function: Any, views: Sequence[Any], outputs: Any) -> execute.Prepared:
        prepared = prepare(function, views, outputs)

        def run(pointers: Sequence[int]) -> None:
            prepared.run(pointers, 0, 0)

        call = CallOnCpu(run, [step(driver.add(len(views), run), range(len(views)))])
        return execute.Prepared(outputs, ("cpu", 0), 0, call)

    execute.forget_prepared()
    monkeypatch.setenv("CUNORM_COMPILED_CALLS", "1")
    host.build()
    monkeypatch.setattr(execute, "prepare_on_cpu", prepare_on_cpu)
    if device == "cpu":
        monkeypatch.setattr(launch, "driver_addresses", driver.addresses)
    monkeypatch.setattr(host, "_has_begun", False)
    yield driver
    monkeypatch.undo()
    execute.forget_prepared()
    host.native = None
