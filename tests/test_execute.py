"""Prepared calls: how they are remembered and forgotten."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cunorm import execute
from cunorm.prepared import Prepared

PREPARED = Prepared((), ("cpu", 0), 0, lambda pointers, workspace, stream: None)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_threads_remember_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[Any, Prepared] = {}
    monkeypatch.setattr(execute, "_calls", calls)
    monkeypatch.setattr(execute, "_MOST_CALLS", 8)

    def remember(thread: int) -> None:
        for i in range(20_000):
            execute._remember((thread, i), PREPARED, execute.generation)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(remember, range(4)))
    assert len(calls) == 8


def test_forgetting_empties_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared calls before what compiled code keeps of them, which is taught from there."""
    emptied: list[str] = []

    class Calls(dict[Any, Prepared]):
        def clear(self) -> None:
            emptied.append("calls")

    monkeypatch.setattr(execute, "_calls", Calls())
    monkeypatch.setattr(execute, "_forgetters", [])
    execute.also_forget(lambda: emptied.append("the others"))
    generation = execute.generation
    execute.forget_prepared()
    assert emptied == ["calls", "the others"] and execute.generation == generation + 1
