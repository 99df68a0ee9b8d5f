"""``python -m cunorm bench``."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_cases import ROOT, ROW, FakeMachine, synthetic

from cunorm import cli
from cunorm.bench.results import load
from cunorm.bench.suites import MODEL_SUITES, SUITES


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.run(["bench", *arguments])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.gpus.cuda_devices", lambda: ([], "none for this test"))


def test_without_a_gpu(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = bench(capsys, "small")
    assert code != 0
    assert not out
    assert "needs an NVIDIA GPU: none for this test" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("speed",), "no suite 'speed'"),
        (("small", "--max-seconds", "-1"), "--max-seconds -1.0 must be positive"),
        (("small", "--only", "no such row"), "no row of small"),
        (("small", "--part", "4/3"), "no part"),
        (("small", "--json", "/no/such/folder/x.json"), "does not exist"),
        (("small", "--from", "x.json"), "--from shows saved results, so it goes without a suite"),
        (("--from", "x.json", "--providers", "torch"), "goes without --providers"),
        (("--from", "x.json", "--part", "2/3"), "goes without --part"),
        (("--from", "x.json", "--warm"), "goes without --warm"),
        (("--from", "x.json", "--max-seconds", "9"), "goes without --max-seconds"),
        (("small", "--warm", "--json", "x.json"), "--warm times nothing, so it goes without --json"),
        (("small", "--warm", "--plots", "x"), "--warm times nothing, so it goes without"),
        (("--from", "/no/such/x.json"), "/no/such/x.json"),
        (("--json", "x.json"), "name a suite for --json"),
        (("--plots", "x"), "name a suite for --plots"),
        (("--only", "layer_norm"), "name a suite for --only"),
        (("--part", "2/3"), "name a suite for --part"),
        (("--warm",), "name a suite for --warm"),
        (("--providers", "torch"), "name a suite for --providers"),
        (("--max-seconds", "9"), "name a suite for --max-seconds"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: tuple[str, ...], message: str, no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = bench(capsys, *arguments)
    assert code == 2
    assert message in err
    if message == "no suite 'speed'":
        assert all(name in err for name in SUITES)


def test_the_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = bench(capsys)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[1:])
    assert set(lines) == SUITES.keys() | MODEL_SUITES.keys() and all(text.endswith(".") for text in lines.values())


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cunorm.cli.bench._machine", FakeMachine)
    monkeypatch.setitem(SUITES, "tiny", lambda: iter([ROW, dataclasses.replace(ROW, direction="backward")]))
    path = tmp_path / "tiny.json"
    code, out, _ = bench(capsys, "tiny", "--json", str(path), "--providers", "cunorm,torch")
    assert code == 0
    assert re.search(r"layer_norm 5x33 float32 \| forward \| 10 µs \| [\d.]+ \| 0 \| torch 10 µs", out)
    assert len(load(path).measurements) == 4
    code, _, err = bench(capsys, "tiny", "--providers", "cunorm,nobody")
    assert code == 2
    assert "'nobody' is none of cunorm" in err
    code, out, _ = bench(capsys, "tiny", "--max-seconds", "1e-9")
    assert code == 0
    assert "2 rows are missing: layer_norm 5x33 float32 forward; " in out


def test_saved_results_are_shown_without_pytorch(tmp_path: Path) -> None:
    results = dataclasses.replace(synthetic(), measurements=synthetic().measurements[:8])
    results.save(tmp_path / "results.json")
    code = (
        "import sys; sys.modules['torch'] = None; from cunorm import cli; "
        f"sys.exit(cli.run(['bench', '--from', {str(tmp_path / 'results.json')!r}, '--only', 'forward']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "layer_norm 524288x256 bfloat16" in done.stdout
    assert "absent: liger (not installed)" in done.stdout
    # Nor is a terminal of ASCII in the way.
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d \?s\b", done.stdout)


def test_plots_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cunorm.cli.bench._machine", lambda: pytest.fail("measured"))
    (tmp_path / "file").touch()
    code, out, err = bench(capsys, "small", "--plots", str(tmp_path / "file"))
    assert (code, out) == (2, "") and "file: [Errno 17] File exists" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "cunorm.bench.plots", raising=False)
    code, out, err = bench(capsys, "small", "--plots", str(tmp_path / "folder"))
    assert (code, out) == (2, "") and "--plots needs matplotlib, the extra bench: " in err
    assert not (tmp_path / "folder").exists()


def test_rows_that_are_not_asked_for_are_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "results.json"
    synthetic().save(source)
    before = source.read_bytes()
    code, out, err = bench(capsys, "--from", str(source), "--only", "forward", "--json", str(source))
    assert (code, out) == (2, "") and "results.json: it is a file of --from, whose other rows would be lost" in err
    assert source.read_bytes() == before
    assert bench(capsys, "--from", str(source), "--json", str(source))[0] == 0
    assert load(source).measurements == synthetic().measurements


def test_results_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "results.json"
    synthetic().save(source)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("folder", "it is a folder"), ("pipe", "it is no regular file"), ("x" * 300, "too long")):
        code, out, err = bench(capsys, "--from", str(source), "--json", str(tmp_path / name))
        assert (code, out) == (2, "")
        assert message in err

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    code, _, err = bench(capsys, "--from", str(source), "--json", str(tmp_path / "other.json"))
    assert (code, "other.json: " in err, "No space left" in err) == (2, True, True)
    monkeypatch.setattr("cunorm.cli.bench._machine", FakeMachine)
    monkeypatch.setitem(SUITES, "tiny", lambda: iter([ROW]))
    code, _, err = bench(capsys, "tiny", "--json", str(tmp_path / "other.json"), "--providers", "cunorm")
    assert (code, "No space left" in err) == (2, True)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "folder", "pipe"}
