"""Whether a kernel's text computes what it must: on a GPU, or on the emulator where there is none.

Every call of a table that launches the kernel is compared with its definition in float64. Results are poisoned with NaN
before, and each call runs several times: on the emulator with its threads in other orders, on a GPU as it comes.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cunorm import launch, resources
from cunorm.compile_error import CompileError, excerpt
from cunorm.experiments.examples import Chosen, Tensors, owner_of
from cunorm.experiments.tables import Table

__all__ = ["CheckReport", "check_on_emulator", "check_on_gpu"]

Array = np.ndarray[Any, Any]

_COLUMNS = ("call", "shape", "dtype", "flags", "strategy", "seconds", "result", "largest error", "limit", "verdict")
# In how many orders of its threads a call with a wrong result runs, to see whether it depends on that.
_SEEDS_OF_WRONG = 8
_PLACE = re.compile(r"(kernels/[\w.]+):(\d+)")
# Who wrote an element of a call on a GPU is looked for on the emulator, if that does not take too long.
_MOST_EMULATED = 1 << 20


class CheckReport(Table):
    """What `Experiment.check` found: a row for each call; in a condition it is false if any is wrong."""

    def __init__(self, kernel: str, where: str, outcomes: Sequence[_Outcome], notes: Sequence[str]) -> None:
        bad = [place for place, outcome in enumerate(outcomes) if outcome.verdict != "right"]
        right = len(outcomes) - len(bad)
        headline = f"{kernel}: {right} of {len(outcomes)} calls right, on {where}"
        details = [f"{item.example}: {item.finding}" for item in outcomes if item.finding]
        super().__init__(headline, _COLUMNS, [item.row for item in outcomes], [*notes, *details], bad)


@dataclass
class _Outcome:
    """What came of one call."""

    example: Any
    strategy: str
    seconds: float = 0.0
    verdict: str = "right"
    finding: str = ""
    result: str = ""
    error: float = 0.0
    limit: float = 0.0
    leaves: dict[str, Array] = field(default_factory=dict)

    @property
    def row(self) -> tuple[Any, ...]:
        example = self.example
        call = f"{example.op}_backward" if example.backward else example.op
        sizes = "x".join(map(str, example.shape))
        measured = (self.seconds, self.result, self.error, self.limit, self.verdict)
        return (call, sizes, example.dtype, example.flags, self.strategy, *measured)


@dataclass(frozen=True)
class _Wrong:
    """The first element that is not what it must be."""

    name: str
    index: tuple[int, ...]
    value: float
    expected: float

    def __str__(self) -> str:
        return f"{_element(self.name, self.index)} is {self.value:.9g}, must be {self.expected:.9g}"


def _element(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"


def _compare(
    given: Mapping[str, Array | None], expected: Mapping[str, Array], tensors: Tensors, outcome: _Outcome
) -> _Wrong | None:
    """Put the largest error into the outcome; the first wrong element, if any."""
    first, worst = None, -1.0
    for name in tensors.outputs:
        result, exact = tensors.operands[name], expected[name]
        assert result is not None
        error = np.abs(result.astype(np.float64) - exact)
        limit = np.broadcast_to(outcome.example.limits(name, given, exact, result.dtype.name), error.shape)
        if not error.size:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(error == 0, 0.0, error / limit)
        share[np.isnan(share)] = math.inf
        index = np.unravel_index(int(share.argmax()), share.shape)
        if share[index] > worst:
            worst = float(share[index])
            outcome.result, outcome.error, outcome.limit = name, float(error[index]), float(limit[index])
        wrong = share > 1
        if first is None and wrong.any():
            place = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
            first = _Wrong(name, place, float(result[place]), float(exact[place]))
    return first


def _leaves(tensors: Tensors) -> dict[str, Array]:
    return {name: array for name in tensors.outputs if (array := tensors.operands[name]) is not None}


def _difference(first: Mapping[str, Array], second: Mapping[str, Array]) -> tuple[str, tuple[int, ...]] | None:
    """The first element whose bits differ."""
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes():
            bits = f"u{array.itemsize}"
            differ = np.ascontiguousarray(array).view(bits) != np.ascontiguousarray(second[name]).view(bits)
            return name, tuple(map(int, np.unravel_index(int(differ.argmax()), differ.shape)))
    return None


# ---- On the emulator.


def check_on_emulator(
    kernel: str, text: str, chosen: Sequence[Chosen], seeds: int, notes: Sequence[str]
) -> CheckReport:
    """Run the calls on the emulator, each in as many orders of its threads as there are ``seeds``."""
    texts = {kernel: text}
    with ThreadPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_emulated, kernel, texts, item, seeds) for item in chosen]
        try:
            outcomes = [future.result() for future in futures]
        except CompileError:  # the others have the same
            for future in futures:
                future.cancel()
            raise
    return CheckReport(kernel, "the emulator", outcomes, notes)


def _emulated(kernel: str, texts: Mapping[str, str], chosen: Chosen, seeds: int) -> _Outcome:
    from cunorm import emulator
    from cunorm.emulator.plans import run_plan

    begin = time.monotonic()
    outcome = _Outcome(chosen.example, chosen.plan.strategy)
    for item in chosen.launches(kernel):
        _compile_as_on_a_gpu(kernel, dict(item.constants), texts)
    given = chosen.example.draw()
    expected = chosen.example.expected(given)
    try:
        for seed in range(seeds):
            tensors = chosen.example.tensors(given)
            run_plan(chosen.plan, tensors.operands, seed, texts=texts)
            if not seed:
                outcome.leaves = _leaves(tensors)
            if wrong := _compare(given, expected, tensors, outcome):
                outcome.verdict = "wrong"
                outcome.finding = f"{wrong}; {_writer(chosen, given, wrong.name, wrong.index, seed, texts)}"
                break
            if found := _difference(outcome.leaves, _leaves(tensors)):
                outcome.verdict = "race"
                outcome.finding = f"{_element(*found)} differs from one order of the threads to another"
                break
        if outcome.verdict == "wrong" and _depends_on_order(chosen, given, texts):
            outcome.verdict = "race"
            outcome.finding += "; the result depends on the order of the threads, so a barrier may be missing"
    except emulator.CompileError as error:
        constants = dict(chosen.launches(kernel)[0].constants)
        what = f"{kernel} does not compile on the emulator (g++)"
        raise CompileError(what, str(error), texts[kernel], constants) from error
    except emulator.EmulatorError as error:
        outcome.verdict, outcome.finding = "error", _sanitized(str(error), texts[kernel])
    outcome.seconds = time.monotonic() - begin
    return outcome


def _compile_as_on_a_gpu(kernel: str, constants: Mapping[str, int | str], texts: Mapping[str, str]) -> None:
    """g++ accepts what NVRTC does not, which needs no GPU but CuPy."""
    try:
        launch.cupy()
    except RuntimeError:
        return
    resources.compile_resources(kernel, constants, "sm_90", texts)


def _depends_on_order(chosen: Chosen, given: Mapping[str, Array | None], texts: Mapping[str, str]) -> bool:
    from cunorm.emulator.plans import run_plan

    left = []
    for seed in range(_SEEDS_OF_WRONG):
        tensors = chosen.example.tensors(given)
        run_plan(chosen.plan, tensors.operands, seed, texts=texts)
        left.append(_leaves(tensors))
    return any(_difference(left[0], other) for other in left[1:])


def _writer(
    chosen: Chosen,
    given: Mapping[str, Array | None],
    name: str,
    index: tuple[int, ...],
    seed: int,
    texts: Mapping[str, str],
) -> str:
    """Who wrote an element, in words."""
    from cunorm.emulator.plans import run_plan

    tensors = chosen.example.tensors(given)
    array = tensors.operands[name]
    assert array is not None
    offset = sum(place * step for place, step in zip(index, array.strides))
    found = run_plan(chosen.plan, tensors.operands, seed, texts=texts, watch=(name, offset))
    if found is None:
        return "nobody wrote it"
    hint = "; shared memory and scratch hold NaNs where nobody has written yet" if np.isnan(array[index]) else ""
    return f"written by {found[1]} of {found[0]}{hint}"


def _sanitized(report: str, text: str) -> str:
    """An error of the emulator: its first line, and the line of the text that it names."""
    first = report.splitlines()[0]
    place = _PLACE.search(first)
    shown = excerpt(text, place[1], int(place[2])) if place else ""
    return f"{first}\n{shown}".rstrip()


# ---- On a GPU.


def check_on_gpu(
    kernel: str, text: str, chosen: Sequence[Chosen], device_index: int, turns: int, notes: Sequence[str]
) -> CheckReport:
    """Run the calls on a CUDA device, each in so many ``turns``, whose results must be the same bits."""
    outcomes = []
    for item in chosen:
        outcomes.append(_on_gpu(kernel, {kernel: text}, item, device_index, turns))
        if outcomes[-1].verdict == "error":
            notes = [*notes, "the calls after that were not run: an error may leave the GPU unusable in this process"]
            break
    return CheckReport(kernel, launch.gpu_name(device_index), outcomes, notes)


def _on_gpu(kernel: str, texts: Mapping[str, str], chosen: Chosen, device_index: int, turns: int) -> _Outcome:
    begin = time.monotonic()
    outcome = _Outcome(chosen.example, chosen.plan.strategy)
    given = chosen.example.draw()
    expected = chosen.example.expected(given)
    call = launch.Call(chosen.plan, tuple(chosen.example.tensors(given).operands), device_index, texts)
    try:
        for turn in range(turns):
            tensors = chosen.example.tensors(given)
            _run_on_gpu(call, chosen, tensors, device_index)
            if not turn:
                outcome.leaves = _leaves(tensors)
            if wrong := _compare(given, expected, tensors, outcome):
                outcome.verdict = "wrong"
                outcome.finding = f"{wrong}; {_writer_of_gpu(chosen, given, wrong, texts)}"
                break
            if found := _difference(outcome.leaves, _leaves(tensors)):
                outcome.verdict = "race"
                outcome.finding = f"{_element(*found)} differs from one run to another"
                break
    except RuntimeError as error:
        outcome.verdict, outcome.finding = "error", f"{error}; check(on='emulator') may say more"
    outcome.seconds = time.monotonic() - begin
    return outcome


def _run_on_gpu(call: launch.Call, chosen: Chosen, tensors: Tensors, device_index: int) -> None:
    """Copy the arrays to the device, run, and copy back what is written."""
    cupy = launch.cupy()
    with cupy.cuda.Device(device_index):
        memory: dict[str, Any] = {}
        pointers = []
        for name, array in tensors.operands.items():
            if array is None:
                pointers.append(0)
                continue
            owner = owner_of(array)
            memory[name] = cupy.asarray(owner.reshape(-1).view(np.uint8))
            pointers.append(memory[name].data.ptr + _offset(array, owner))
        workspace = cupy.empty(chosen.plan.workspace_bytes, "uint8")
        stream = cupy.cuda.get_current_stream()
        call(pointers, workspace.data.ptr, stream.ptr)
        stream.synchronize()
        for name in tensors.outputs:
            owner = owner_of(tensors.operands[name])
            owner.reshape(-1).view(np.uint8)[:] = memory[name].get()


def _offset(array: Array, owner: Array) -> int:
    return int(array.__array_interface__["data"][0] - owner.__array_interface__["data"][0])


def _writer_of_gpu(chosen: Chosen, given: Mapping[str, Array | None], wrong: _Wrong, texts: Mapping[str, str]) -> str:
    """Who writes an element does not depend on the values, so the emulator can tell."""
    if math.prod(chosen.example.shape) > _MOST_EMULATED:
        return "the call is too large to look for who wrote it"
    if shutil.which("g++") is None:
        return "without g++ there is no emulator that would tell who wrote it"
    try:
        return _writer(chosen, given, wrong.name, wrong.index, 0, texts)
    except RuntimeError as error:
        return f"who wrote it is not known, since the emulator says: {str(error).splitlines()[0]}"
