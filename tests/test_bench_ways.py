"""The times of the ways to compute norms of channels: what is measured can be read, and the costs agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ways
from tuning_cases import GPU, FakeMachine

from cunorm.plan import plan
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("path", "problems", "mean"),
    [("h100/channel-ways", 92, 1.04), ("h200/channel-ways", 406, 1.02), ("h200/pipeline-ways", 116, 1.02)],
)
def test_the_costs_put_first_what_is_nearly_the_best(path: str, problems: int, mean: float) -> None:
    found = [regret for _, regret in ways.regrets(ROOT / "bench" / "results" / f"{path}.json")]
    assert len(found) == problems
    assert sum(found) / len(found) < mean
    assert max(found) < 1.2


def test_what_is_measured_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Machine(FakeMachine):
        def load_copy(self, name: str, nbytes: int) -> None:
            assert name == "copy" and nbytes > 0

    machines: list[Machine] = []

    def current_gpu(problem: Any) -> Machine:
        built_in = plan(problem, FakeMachine(lambda chosen: 0.0).device)
        machines.append(Machine(lambda chosen: 2e-5 if chosen == built_in else 1e-5))
        return machines[-1]

    monkeypatch.setattr(ways, "current_gpu", current_gpu)
    path = tmp_path / "ways.json"
    ways.measure(path, ways.PROBLEMS[:3], most=2)
    content = json.loads(path.read_text())
    assert content["gpu"] == GPU and all(machine.released for machine in machines)
    assert [len(entry["ways"]) > 3 for entry in content["problems"]] == [True] * 3
    assert {Slab.__name__, Grid.__name__, Split.__name__} <= {way[1] for way in content["problems"][0]["ways"]}
    # What the costs put first is the built-in choice, which takes twice as long here.
    assert [regret for _, regret in ways.regrets(path)] == [2.0] * 3
    # The same problems once more, with ways of one family.
    assert ways.problems_of(path) == json.loads(json.dumps(ways.PROBLEMS[:3]))
    again = tmp_path / "again.json"
    ways.measure(again, ways.problems_of(path), [Grid.__name__], most=1)
    assert [[way[1] for way in entry["ways"]] for entry in json.loads(again.read_text())["problems"]] == [["Grid"]] * 3


def test_a_problem_without_ways_of_a_family_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ways, "current_gpu", lambda problem: FakeMachine(lambda chosen: 1e-5))
    none_there = [options for options in ways.PROBLEMS if options["data_format"] == "NC..."][:2]
    ways._compile(none_there, [ChannelPipeline.__name__], 1)
    ways.measure(tmp_path / "ways.json", none_there, [ChannelPipeline.__name__])


def test_what_there_is_no_time_for_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    ways.measure(path, ways.PROBLEMS[:3], until=0.0)
    assert json.loads(path.read_text())["problems"] == []


def test_regret_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ways.main(["regret", str(ROOT / "bench" / "results" / "h100" / "channel-ways.json")])
    *lines, average = capsys.readouterr().out.splitlines()
    assert len(lines) == 92 and lines[0] >= lines[-1] >= "1.00"
    assert average.endswith("on average of 92")
