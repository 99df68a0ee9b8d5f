"""What the tests of ``bench/`` share: a clock that says what it is told, a library that does so, and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cunorm.bench import peers
from cunorm.bench import run as runner
from cunorm.bench.inputs import Inputs
from cunorm.bench.results import Measurement, Results
from cunorm.bench.suites import SUITES, Row, suite

ROOT = Path(__file__).parents[1]
ROW = Row("test", "layer_norm", (5, 33), "float32", "forward")


class FakeMachine:
    """The CPU, where everything takes ten microseconds, and a copy a nanosecond a byte."""

    device = "cpu"
    cache_bytes = 0

    def __init__(self) -> None:
        self.calls = 0
        self.failure = ""

    def seconds(self, work: Callable[[], Any]) -> float:
        self.calls += 1
        result = work()
        if isinstance(result, torch.Tensor) and result.dtype == torch.uint8:
            return result.numel() * 1e-9
        return 1e-5

    def pipelined_seconds(self, work: Callable[[], Any], wait: Callable[[Any], None]) -> float:
        wait(work())
        return 2e-5

    def host_seconds(self, works: Sequence[Callable[[], Any]]) -> list[float]:
        for work in works:
            work()
        return [1e-6 * (position + 1) for position in range(len(works))]

    def release(self) -> None:
        pass

    def broken(self) -> str:
        return self.failure


class OtherProvider(peers.Provider):
    """Stands for a library; a test says how it computes."""

    name = "other"
    distribution = "no such distribution"
    answer: Callable[[Row, Inputs], peers.Work | None]

    def work(self, row: Row, inputs: Inputs) -> peers.Work | None:
        return type(self).answer(row, inputs)


def measure(
    *rows: Row, providers: Sequence[str] = ("cunorm",), machine: FakeMachine | None = None, **options: Any
) -> Results:
    return runner.run(rows, providers, machine or FakeMachine(), **options)


@functools.cache
def synthetic() -> Results:
    """Results of all suites, made up: cunorm in 1.1 times a copy's time, but 1.6 where the columns are 4097."""
    factors = {"cunorm": 1.1, "torch": 2.0, "quack": 1.5, "jax.jit": 7.0}
    results = Results("2026-01-02T03:04:05+00:00", {"device": "A GPU"}, {"torch": "1.2"}, {"liger": "not installed"})
    for name in SUITES:
        for row in suite(name):
            copy = row.moved_bytes / 4e12 if row.clock == "device" else None
            for provider, factor in factors.items():
                slow = 1.6 if provider == "cunorm" and row.columns == 4097 else factor
                seconds = None if provider == "quack" and row.columns > 65536 else (copy or 1e-5) * slow
                entry = Measurement.of(row, provider, copy)
                note = "too long" if seconds is None else ""
                results.measurements.append(dataclasses.replace(entry, seconds=seconds, error=1e-4, note=note))
    return results
