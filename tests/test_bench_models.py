"""``python -m cunorm bench models``: training steps of whole models, in small and on the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import report
import torch
from torch import nn

from cunorm import cli
from cunorm.adapters.torch import host
from cunorm.bench import models
from cunorm.bench import run as runner
from cunorm.bench.results import Measurement, Results, by_row, load, of
from cunorm.bench.suites import MODEL_SUITES, MODELS, STEPS, Row, suite


class Cpu:
    """Where there is nothing to wait for."""

    device = "cpu"
    cache_bytes = 0

    def release(self) -> None:
        pass

    def broken(self) -> str:
        return ""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(models, "_ROUNDS", 1)
    monkeypatch.setattr(models, "_STEPS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*rows: Row, more: Sequence[str] = (), **options: Any) -> Results:
    return runner.run(rows, ["cunorm", "liger", "torch", *more], Cpu(), **options)  # type: ignore[arg-type]


def test_suites_have_every_model() -> None:
    for name in MODEL_SUITES:
        rows = suite(name)
        assert [(row.op, row.direction) for row in rows] == [(op, step) for op in MODELS for step in STEPS]
        assert {row.shape for row in rows} == {shapes[name == "models-small"] for shapes in MODELS.values()}
        assert all(row.is_model and row.moved_bytes == 0 and row.dtype == "bfloat16" for row in rows)
        parts = [suite(name, part=(index, 7)) for index in range(1, 8)]
        assert [{row.op for row in part} for part in parts] == [{op} for op in MODELS]
    assert [row.op for row in suite("models", "ResNet !compiled")] == ["ResNet-50"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_measured_without_and_with_cunorm(name: str, tmp_path: Path) -> None:
    (row,) = suite("models-small", f"{name} !compiled")
    results = run(row)
    assert not results.missing and not results.stopped and not results.absent
    assert "transformers" in results.versions
    assert [entry.provider for entry in results.measurements] == ["torch", "cunorm"]
    for entry in results.measurements:
        assert entry.seconds and not entry.note, entry
        assert entry.r is None and entry.rate is None
    assert results.measurements[1].error is not None and results.measurements[1].error < 1e-2
    results.save(tmp_path / "models.json")
    assert load(tmp_path / "models.json").measurements == results.measurements


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_sizes_that_they_are_called_by(name: str) -> None:
    millions = {
        "ResNet-50": 25.6,
        "Swin-B": 87.8,
        "ConvNeXt-B": 88.6,
        "ViT-L": 304.3,
        "BERT-large": 335.2,
        "GPT-2 medium": 354.8,
        "Llama-like 1B": 1235.8,
    }
    with torch.device("meta"):
        model = models.build(name, small=False)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions[name], abs=0.06)
    assert model.training


def test_a_compiled_step_is_one_of_the_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch records all that it would compile, and compiles nothing, which takes seconds."""
    compiled: list[nn.Module] = []

    def compile(model: nn.Module) -> Any:
        compiled.append(model)
        return functools.partial(model)

    monkeypatch.setattr(torch, "compile", compile)
    results = run(*suite("models-small", "ViT-L"))
    assert [(entry.direction, entry.provider) for entry in results.measurements] == [
        (step, provider) for step in STEPS for provider in ("torch", "cunorm")
    ]
    assert all(entry.seconds for entry in results.measurements)
    norms = [{type(m).__module__ for m in model.modules() if isinstance(m, nn.LayerNorm)} for model in compiled]
    assert norms == [{"torch.nn.modules.normalization"}, {"cunorm.adapters.torch.replace"}]


def test_warming_times_nothing() -> None:
    results = run(*suite("models-small", "GPT-2 !compiled"), warm=True)
    assert [(entry.seconds, entry.note) for entry in results.measurements] == [(None, "not timed")] * 2


def test_a_wrong_model_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_norms(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.data *= 100

    monkeypatch.setattr(models, "replace_norms", break_norms)
    theirs, ours = run(*suite("models-small", "GPT-2 !compiled")).measurements
    assert theirs.seconds and ours.seconds is None
    assert ours.note.startswith("wrong: the loss is")


def test_without_the_library_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for entry in run(*suite("models-small", "GPT-2 !compiled")).measurements:
        assert entry.seconds is None and entry.note.startswith("ModuleNotFoundError")


def synthetic() -> Results:
    results = Results("2026-01-02T03:04:05+00:00")
    for row in suite("models"):
        for provider, seconds in (("torch", 0.05), ("cunorm", 0.04 if row.direction == "step" else None)):
            entry = Measurement.of(row, provider, None)
            results.measurements.append(Measurement(**vars(entry) | {"seconds": seconds}))
    return results


def test_table() -> None:
    filled = report.fill("<!-- bench: models models -->\n<!-- bench end -->", synthetic())
    assert "| model | input | eager: PyTorch ms | eager: cunorm ms | eager: ratio | torch.compile: PyTorch" in filled
    assert "| ResNet-50 | 128 × 3 × 224² | 50.0 | 40.0 | 0.80 | 50.0 | – | – |" in filled
    assert filled.count("\n") == 3 + len(MODELS)


def test_table_with_compiled_calls() -> None:
    results = synthetic()
    results.measurements = [entry for entry in results.measurements if entry.direction == "step"]
    for row in suite("models", "!compiled"):
        entry = Measurement.of(row, "cunorm-compiled", None)
        results.measurements.append(Measurement(**vars(entry) | {"seconds": 0.03}))
    filled = report.fill("<!-- bench: models models -->\n<!-- bench end -->", results)
    assert "| eager, after build-torch: cunorm ms | eager, after build-torch: ratio |" in filled
    assert "| ResNet-50 | 128 × 3 × 224² | 50.0 | 40.0 | 0.80 | 30.0 | 0.60 |" in filled


def test_eager_steps_with_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "native", Never())
    seen: list[Any] = []
    real = models.step

    def step(*arguments: Any) -> Any:
        run_step = real(*arguments)

        def watched() -> torch.Tensor:
            seen.append(type(host.native))
            return run_step()

        return watched

    monkeypatch.setattr(models, "step", step)
    monkeypatch.setattr(torch, "compile", lambda model: functools.partial(model))
    rows = [*suite("models-small", "ViT-L"), *suite("models-small", "GPT-2 !compiled")]
    results = run(*rows, more=["cunorm-compiled"])
    eager = [("step", "torch"), ("step", "cunorm"), ("step", "cunorm-compiled")]
    found = [(entry.direction, entry.provider) for entry in results.measurements]
    assert found == [*eager, ("compiled step", "torch"), ("compiled step", "cunorm"), *eager]
    assert type(host.native) is Never  # as it was before
    assert all(entry.seconds for entry in results.measurements)
    assert {Never, type(None)} == set(seen)


class Never:
    """Stands for compiled calls that know nothing."""

    def forward(self, *arguments: Any) -> Any:
        return False

    backward = forward


def test_command_shows_saved_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.json"
    synthetic().save(path)
    assert cli.run(["bench", "--from", str(path), "--only", "Swin-B", "--plots", str(tmp_path)]) == 0
    assert "Swin-B" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]  # one size is no line to draw
    assert len(by_row(load(path).measurements)) == len(suite("models"))
    assert of("cunorm", load(path).measurements)
