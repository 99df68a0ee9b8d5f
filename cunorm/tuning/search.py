"""How the fastest plan for a problem is searched for, whatever it is that measures.

A search takes every geometry that can compute the problem: compiles them side by side, runs each and compares its
results with those of the built-in choice, takes a short time of each, and then longer ones of the best few, which take
turns with the built-in choice. The time that this may take is given, and shared out between those steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cunorm.plan import Device, Plan, Way, candidates, plan_with
from cunorm.problem import BackwardProblem, ChannelForward, ChannelProblem, ForwardProblem, Problem

__all__ = ["Broken", "Found", "Machine", "Report", "find_fastest"]

Report = Callable[[str, int, int], None]  # of a step: its name, how much is done, of how much

# A geometry must be at least so much faster than the built-in choice: less is lost in the noise of two measurements.
_WORTH_IT = 1.02
# The shares of the time after which no plan is compiled, and no further one tried.
_COMPILED_AFTER, _TRIED_AFTER = 0.5, 0.85
_SHORT, _LONG, _ROUNDS, _FINALISTS = 5, 9, 5, 5
# Relative errors between two right results: sums in another order, and what that does to the rounding of a few.
_TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-3, "float32": 1e-4, "float64": 1e-10}


class Machine(Protocol):
    """Where the plans of one problem are compiled, compared and timed."""

    gpu: str
    device: Device

    def compile(self, plans: Sequence[Plan], until: float, report: Report) -> list[Plan]:
        """Compile the plans, as many as there is time for (by ``time.monotonic``). Returns those that can run."""

    def error(self, plan: Plan) -> float:
        """Run a plan; the relative error of its results against those of the first plan that was run.

        Raises a RuntimeError for a plan that does not run.
        """

    def samples(self, plan: Plan, count: int) -> list[float]:
        """Times of a plan in seconds, with a cold cache."""

    def release(self) -> None:
        """Give back the memory, which other libraries may need."""


@dataclass(frozen=True)
class Found:
    """What a search found: `cunorm.tuning.TuneResult` says what each is."""

    geometry: Way | None
    seconds: float
    built_in_seconds: float
    tried: int
    rejected: int
    candidates: int


def find_fastest(
    problem: Problem | ChannelProblem, machine: Machine, max_seconds: float, report: Report | None = None
) -> Found:
    """Find the geometry whose plan is fastest, or None where nothing is `_WORTH_IT`."""
    say = report or (lambda step, done, total: None)
    begin = time.monotonic()
    built_in = plan_with(problem, machine.device, None)
    # Different geometries may come down to the same launches, where rows are few.
    geometries: dict[Plan, Way | None] = {built_in: None}
    for geometry in candidates(problem, machine.device):
        geometries.setdefault(plan_with(problem, machine.device, geometry), geometry)
    others = [plan for plan in geometries if plan != built_in]
    if isinstance(problem, (ForwardProblem, BackwardProblem)):
        # Neighbours are alike: where the time is too short for all, some of every kind.
        random.Random(0).shuffle(others)

    ready = machine.compile([built_in, *others], begin + _COMPILED_AFTER * max_seconds, say)
    if built_in not in ready:
        raise RuntimeError("the built-in plan does not compile or run on this GPU, so there is nothing to compare with")
    rejected, tolerance = 0, max(_TOLERANCE[dtype] for dtype in _result_dtypes(problem))
    machine.error(built_in)
    # Clocks rise in the first moments.
    machine.samples(built_in, _SHORT * _LONG)
    times = {built_in: _median(machine.samples(built_in, _SHORT))}
    for done, plan in enumerate(ready):
        say("trying", done, len(ready))
        if time.monotonic() - begin > _TRIED_AFTER * max_seconds:
            break
        if plan == built_in:
            continue
        try:
            # Not "greater than": an error may be NaN.
            if not machine.error(plan) <= tolerance:
                rejected += 1
                continue
            times[plan] = _median(machine.samples(plan, _SHORT))
        except Broken:
            raise
        except RuntimeError:
            rejected += 1

    finalists = sorted((plan for plan in times if plan != built_in), key=times.__getitem__)[:_FINALISTS]
    samples: dict[Plan, list[float]] = {plan: [] for plan in (built_in, *finalists)}
    for turn in range(_ROUNDS):
        say("comparing", turn, _ROUNDS)
        if turn and time.monotonic() - begin > max_seconds:
            break
        for plan, taken in samples.items():
            taken += machine.samples(plan, _LONG)
    medians = {plan: _median(taken) for plan, taken in samples.items()}
    best = min(medians, key=medians.__getitem__)
    if medians[built_in] < _WORTH_IT * medians[best]:
        best = built_in
    return Found(geometries[best], medians[best], medians[built_in], len(times), rejected, len(geometries))


def _result_dtypes(problem: Problem | ChannelProblem) -> list[str]:
    more = [] if isinstance(problem, (ForwardProblem, ChannelForward)) else [problem.dweight, problem.dbias]
    return [problem.x.dtype, *(dtype for dtype in more if dtype)]


def _median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


class Broken(RuntimeError):
    """An error after which the process cannot use the device."""
