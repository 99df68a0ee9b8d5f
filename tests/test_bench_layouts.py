"""The times of layouts of rows: what is measured can be shown, and where another is faster than the built-in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts
import pytest
from tuning_cases import DEVICE, GPU, FakeMachine

from cunorm.plan import Plan, plan_with
from cunorm.tuning import checked_problems

OPTIONS = {"op": "layer_norm", "shape": (200, 4096), "dtype": "bfloat16", "direction": "forward"}
ARGUMENTS = ["--rows", "200", "--columns", "4096,8192", "--most-vectors", "4"]


class Machine(FakeMachine):
    """On which the built-in layout takes 20 microseconds, all others as many as they come behind it, from 10 on."""

    def __init__(self, problem: Any) -> None:
        super().__init__(self.time)
        self.order = [plan_with(problem, DEVICE, None), *list(layouts.layouts_of(problem, DEVICE, 4))[1:]]

    def time(self, chosen: Plan | str) -> float:
        place = 0 if isinstance(chosen, str) else self.order.index(chosen)
        return 1e-6 * (20 if place == 0 else 9 + place)

    def load_copy(self, name: str, nbytes: int) -> None:
        assert name == "copy" and nbytes in (200 * 4096 * 2, 200 * 8192 * 2)


def test_the_built_in_layout_is_first_and_others_have_few_vectors() -> None:
    (problem,) = checked_problems(**OPTIONS)  # type: ignore[arg-type]
    found = layouts.layouts_of(problem, DEVICE, 4)  # type: ignore[arg-type]
    built_in, *others = found.values()
    assert built_in is None and len(others) > 20
    assert {layout.vectors for layout in others if layout is not None} <= {1, 2, 3, 4}


def test_what_is_measured_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines: list[Machine] = []

    def current_gpu(problem: Any) -> Machine:
        machines.append(Machine(problem))
        return machines[-1]

    compiled: list[int] = []
    monkeypatch.setattr(layouts, "current_gpu", current_gpu)
    monkeypatch.setattr(layouts.cuda, "device", lambda index: DEVICE)
    monkeypatch.setattr(layouts, "compile_in_processes", lambda plans: compiled.append(len(plans)))
    path = tmp_path / "layouts.json"
    layouts.main(["measure", str(path), *ARGUMENTS])
    content = json.loads(path.read_text())
    assert content["gpu"] == GPU and all(machine.released for machine in machines)
    assert [entry["shape"] for entry in content["problems"]] == [[200, 4096], [200, 8192]]
    assert compiled == [sum(len(entry["layouts"]) + 1 for entry in content["problems"])], "at once, for all"
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0.50 layer_norm [200, 4096] bfloat16 forward: r 1.00, 0.50 by width=8, vectors=")
    assert second.startswith("0.50 layer_norm [200, 8192]")
    layouts.main(["show", str(path)])
    assert capsys.readouterr().out.splitlines() == [first, second]


def test_kernels_that_ask_for_too_much_are_left_to_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compiled_function(*key: Any) -> None:
        asked.append(key)
        raise RuntimeError("too much")

    monkeypatch.setattr(layouts.compiling, "compiled_function", compiled_function)
    layouts._compile([("row_block_forward", (), 0, 1, 0), ("row_block_forward", (), 1, 1, 0)])
    assert [key[2:] for key in asked] == [(0, 1, 0), (1, 1, 0)]
