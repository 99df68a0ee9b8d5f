"""``python -m cunorm demo``: what it prints of each framework, and of a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import OPS, ROOT, GpusHere, full, refused, run, table_row

from cunorm import cli
from cunorm.cli import demo


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "tensorflow"])
def test_demo_shows_each_framework_right(framework: str, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    pytest.importorskip(framework)
    threads = torch.get_num_threads()
    text = run(capsys, "demo", "--framework", framework)
    torch.set_num_threads(threads)  # the demo, a process of its own as a rule, does not
    assert "no CUDA device (none for this test): the NumPy path" in text
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith("layer_norm") and "x" in line]
    assert len(rows) >= 4
    for op, shape, dtype, _, error, _, gigabytes_per_second, ratio in rows:
        assert op in OPS
        assert re.fullmatch(r"\d+x\d+", shape)
        assert float(error) < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
        assert float(gigabytes_per_second) > 0
        assert float(ratio) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_demo_on_the_gpu(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "demo", "--framework", framework)
    assert "on the GPU" in text
    assert "4096x4096" in text


def test_demo_leaves_out_what_would_not_fit_in_the_time(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert cli.run(["demo"], started=-1e9) == 0
    text = capsys.readouterr().out
    assert "Left out to end within 20 seconds: numpy" in text
    assert "--framework NAME" in text


def test_demo_from_a_shell_is_plain_when_piped() -> None:
    command = [sys.executable, "-m", "cunorm", "demo", "--framework", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "layer_norm_backward" in done.stdout
    assert "\x1b" not in done.stdout
    assert not re.search("[\u2500-\u257f]", done.stdout)  # no rules
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_demo_on_a_file(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))
    assert table_row(text, "layer_norm", "3x5x8")[3] == "NumPy"
    y = np.load(tmp_path / "y.npy")
    assert y.dtype == np.dtype(dtype).newbyteorder("=")
    exact = x.astype("float64")
    exact -= exact.mean(-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.astype("float64"), exact, atol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("axis", [["0"], ["1", "2"], ["0", "2"], ["0", "1", "2"], ["-2"]])
def test_demo_on_a_file_over_other_axes(
    axis: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((3, 5, 8)))
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--axis", *axis)
    assert float(table_row(text, "layer_norm", "3x5x8")[4]) < 1e-14


def test_demo_on_a_file_with_an_infinity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, no_gpu: None
) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, np.inf, 2], [1, 2, 3]], np.float32))
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"))
    assert table_row(text, "layer_norm")[4] == "nan"
    assert not recwarn.list, "NumPy warns of nothing, with lines of ours"


def test_demo_on_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 4)))
    assert "the array is empty" in run(capsys, "demo", "--input", str(tmp_path / "x.npy"))


def test_demo_on_a_gpu_that_is_too_old(capsys: pytest.CaptureFixture[str], gpus_here: GpusHere) -> None:
    gpus_here((7, 0))
    text = run(capsys, "demo", "--framework", "numpy")
    assert "GPU 7.0 cannot be used (CUDA device 0 has compute capability 7.0; it must be 7.5 (Turing) or later)" in text
    assert "layer_norm_backward" in text


def test_demo_on_a_full_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus_here: GpusHere, tmp_path: Path
) -> None:
    gpus_here((8, 0))
    monkeypatch.setattr(demo, "FRAMEWORKS", ("cupy", "numpy"))
    text = run(capsys, "demo")
    assert "GPU 8.0 (sm_80), a plain copy cannot be timed: Out of memory allocating" in text
    assert "cupy is left out, for it cannot be used: MemoryError: Out of memory allocating" in text
    assert "NumPy" in table_row(text, "layer_norm_backward", "512x1024")
    assert "--framework cupy: it cannot be used: MemoryError: Out" in refused(capsys, "demo", "--framework", "cupy")
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    assert "x.npy: Out of memory" in refused(capsys, "demo", "--input", str(tmp_path / "x.npy"))


def test_demo_on_a_file_that_cannot_be_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    monkeypatch.setattr("cunorm.cli.libraries.Library.formula", full)
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))
    assert "it cannot be compared and timed: Out of memory" in text
    assert (np.load(tmp_path / "y.npy") == 0).all()
