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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm import cuda, launch, resources
from cunorm.compile_error import CompileError, excerpt
from cunorm.emulator.plans import owner_of
from cunorm.experiments.examples import Array, Chosen, Example, Tensors
from cunorm.experiments.tables import Table

__all__ = ["CheckReport", "check_on_emulator", "check_on_gpu"]

Given = Mapping[str, Array | None]
Texts = Mapping[str, str]
Element = tuple[str, tuple[int, ...]]  # the name of a result, and an index

_COLUMNS = (*Example.COLUMNS, "flags", "strategy", "seconds", "result", "largest error", "limit", "verdict")
_PLACE = re.compile(r"(kernels/[\w.]+):(\d+)")
# In how many orders of its threads a call with a wrong result runs, to see whether it depends on that.
_SEEDS_OF_WRONG = 8
# Seconds that a launch may take on the emulator; those of the table take one or two.
_TIMEOUT = 30.0
# Who wrote an element of a call on a GPU is looked for on the emulator, if that does not take too long.
_MOST_EMULATED = 1 << 20


class CheckReport(Table):
    """What `Experiment.check` found: a row for each call; in a condition it is false if any is wrong.

    A verdict is "right", "wrong", "race" where the result depends on the order of the threads, or "error" where the
    kernel did what it must not do.
    """

    def __init__(self, kernel: str, where: str, outcomes: Sequence[_Outcome], notes: Sequence[str]) -> None:
        bad = [place for place, outcome in enumerate(outcomes) if outcome.verdict != "right"]
        headline = f"{kernel}: {len(outcomes) - len(bad)} of {len(outcomes)} calls right, on {where}"
        details = [f"{item.chosen.example}: {item.finding}" for item in outcomes if item.finding]
        super().__init__(headline, _COLUMNS, [item.row for item in outcomes], [*notes, *details], bad)


@dataclass
class _Outcome:
    """What came of one call."""

    chosen: Chosen
    verdict: str = "right"
    finding: str = ""
    seconds: float = 0.0
    largest: tuple[str, float | None, float | None] = ("", None, None)  # the result, its error and its limit

    @property
    def row(self) -> tuple[Any, ...]:
        example, plan = self.chosen
        return (*example.cells, example.flags, plan.strategy, self.seconds, *self.largest, self.verdict)


def _judged(
    chosen: Chosen,
    turns: int,
    run: Callable[[Tensors, int], None],
    writer: Callable[[Element, int], str],
) -> _Outcome:
    """Run a call in ``turns`` and look at its results, until something is wrong with them."""
    outcome, given = _Outcome(chosen), chosen.example.draw()
    expected = chosen.example.expected(given)
    first: Tensors | None = None
    for turn in range(turns):
        tensors = chosen.example.tensors(given)
        run(tensors, turn)
        first = first or tensors
        if wrong := _compare(given, expected, tensors, outcome):
            name, index = wrong
            found, right = tensors.results[name][index], expected[name][index]
            outcome.verdict = "wrong"
            outcome.finding = f"{_named(wrong)} is {found:.9g}, must be {right:.9g}; {writer(wrong, turn)}"
            break
        if differs := _difference(first, tensors):
            outcome.verdict = "race"
            outcome.finding = f"{_named(differs)} differs between two orders of the threads; {writer(differs, turn)}"
            break
    return outcome


def _compare(given: Given, expected: Mapping[str, Array], tensors: Tensors, outcome: _Outcome) -> Element | None:
    """Put the largest error into the outcome; the first wrong element, if any."""
    first, worst = None, -1.0
    for name, result in tensors.results.items():
        if not result.size:
            continue
        exact = expected[name]
        error = np.abs(result.astype(np.float64) - exact)
        limit = np.broadcast_to(outcome.chosen.example.limits(name, given, exact, result.dtype.name), error.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(error == 0, 0.0, error / limit)
        share[np.isnan(share)] = math.inf
        place = _index_of(share == share.max())
        if share[place] > worst:
            worst = float(share[place])
            outcome.largest = name, float(error[place]), float(limit[place])
        if first is None and worst > 1:
            first = name, _index_of(share > 1)
    return first


def _difference(first: Tensors, second: Tensors) -> Element | None:
    """The first element whose bits differ."""
    for name, array in first.results.items():
        bits, others = (np.ascontiguousarray(item).view(f"u{item.itemsize}") for item in (array, second.results[name]))
        if (bits != others).any():
            return name, _index_of(bits != others)
    return None


def _index_of(where: Array) -> tuple[int, ...]:
    """The index of the first element that is true."""
    return tuple(int(i) for i in np.unravel_index(int(where.argmax()), where.shape))


def _named(element: Element) -> str:
    return f"{element[0]}[{', '.join(map(str, element[1]))}]"


# ---- On the emulator.


def check_on_emulator(
    kernel: str, text: str, chosen: Sequence[Chosen], seeds: int, notes: Sequence[str]
) -> CheckReport:
    """Run the calls on the emulator, each in as many orders of its threads as there are ``seeds``."""
    with ThreadPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_emulated, kernel, text, item, seeds) for item in chosen]
        try:
            outcomes = [future.result() for future in futures]
        except BaseException:  # the others would not compile either, or nobody waits for them
            for future in futures:
                future.cancel()
            raise
    return CheckReport(kernel, "the emulator", outcomes, notes)


def _emulated(kernel: str, text: str, chosen: Chosen, seeds: int) -> _Outcome:
    from cunorm import emulator
    from cunorm.emulator.plans import run_plan

    begin, texts = time.monotonic(), {kernel: text}
    for item in chosen.launches(kernel):
        _compile_as_on_a_gpu(kernel, dict(item.constants), texts)

    def run(tensors: Tensors, seed: int) -> None:
        run_plan(chosen.plan, tensors.operands, seed, texts=texts, timeout=_TIMEOUT)

    try:
        outcome = _judged(chosen, seeds, run, lambda element, seed: _writer(chosen, element, seed, texts))
        if outcome.verdict == "wrong" and _depends_on_order(chosen, run):
            outcome.verdict = "race"
            outcome.finding += "; the result depends on the order of the threads, so a barrier may be missing"
    except emulator.HostCompileError as error:
        constants = dict(chosen.launches(kernel)[0].constants)
        what = f"{kernel} does not compile on the emulator (g++)"
        raise CompileError(what, str(error), text, constants) from error
    except emulator.EmulatorError as error:
        outcome = _Outcome(chosen, "error", _sanitized(str(error), text))
    outcome.seconds = time.monotonic() - begin
    return outcome


def _compile_as_on_a_gpu(kernel: str, constants: Mapping[str, int | str], texts: Texts) -> None:
    """g++ accepts what NVRTC does not, which needs no GPU but CuPy."""
    try:
        cuda.cupy()
    except RuntimeError:
        return
    resources.compile_resources(kernel, constants, "sm_90", texts)


def _depends_on_order(chosen: Chosen, run: Callable[[Tensors, int], None]) -> bool:
    given, every = chosen.example.draw(), []
    for seed in range(_SEEDS_OF_WRONG):
        every.append(chosen.example.tensors(given))
        run(every[-1], seed)
    return any(_difference(every[0], other) for other in every[1:])


def _writer(chosen: Chosen, element: Element, seed: int, texts: Texts) -> str:
    """Who wrote an element, in words."""
    from cunorm.emulator.plans import run_plan

    name, index = element
    tensors = chosen.example.tensors(chosen.example.draw())
    array = tensors.results[name]
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
        outcomes.append(_on_gpu({kernel: text}, item, device_index, turns))
        if outcomes[-1].verdict == "error":
            notes = [*notes, "The calls after that were not run: an error may leave the GPU unusable in this process."]
            break
    return CheckReport(kernel, cuda.gpu_name(device_index), outcomes, notes)


def _on_gpu(texts: Texts, chosen: Chosen, device_index: int, turns: int) -> _Outcome:
    begin = time.monotonic()
    operands = tuple(chosen.example.tensors(chosen.example.draw(blank=True)).operands)
    call = launch.Call(chosen.plan, operands, device_index, texts)

    def run(tensors: Tensors, turn: int) -> None:
        _run_on_gpu(call, chosen.plan.workspace_bytes, tensors, device_index)

    try:
        outcome = _judged(chosen, turns, run, lambda element, turn: _writer_of_gpu(chosen, element, texts))
    except RuntimeError as error:
        outcome = _Outcome(chosen, "error", f"{error}; check(on='emulator') may say more")
    outcome.seconds = time.monotonic() - begin
    return outcome


def _run_on_gpu(call: launch.Call, workspace_bytes: int, tensors: Tensors, device_index: int) -> None:
    """Copy the arrays to the device, run, and copy back what is written."""
    cupy = cuda.cupy()
    with cupy.cuda.Device(device_index):
        memory: dict[str, Any] = {}
        pointers = []
        for name, array in tensors.operands.items():
            if array is None:
                pointers.append(0)
                continue
            owner = owner_of(array)
            memory[name] = cupy.asarray(owner.reshape(-1).view(np.uint8))
            offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            pointers.append(memory[name].data.ptr + offset)
        workspace, stream = cupy.empty(workspace_bytes, "uint8"), cupy.cuda.get_current_stream()
        call(pointers, workspace.data.ptr, stream.ptr)
        stream.synchronize()
        for name, array in tensors.results.items():
            owner_of(array).reshape(-1).view(np.uint8)[:] = memory[name].get()


def _writer_of_gpu(chosen: Chosen, element: Element, texts: Texts) -> str:
    """Who writes an element does not depend on the values, so the emulator can tell."""
    if math.prod(chosen.example.shape) > _MOST_EMULATED:
        return "who wrote it is not looked for in so large a call"
    if shutil.which("g++") is None:
        return "who wrote it is not known, since the emulator that would tell needs g++"
    try:
        return _writer(chosen, element, 0, texts)
    except RuntimeError as error:
        return f"who wrote it is not known, since the emulator says: {str(error).splitlines()[0]}"
