"""``python -m cunorm info``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_cases import ROOT, GpusHere, run, table_row

import cunorm
from cunorm import cuda
from cunorm.tuning_file import Entry, TuningFile


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    text = run(capsys, "info")
    assert table_row(text, "Python")[1].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert table_row(text, "numpy")[1] == np.__version__
    assert str(tmp_path / "cache") in table_row(text, "kernel cache")[1]
    assert table_row(text, "extra torch")[1].startswith("torch 2.")
    extras = ("cuda12x", "cuda13x", "jax", "tensorflow", "keras", "bench", "notebook", "test")
    for name in ("CuPy", "CUDA device", "g++", *(f"extra {extra}" for extra in extras)):
        assert name in text


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "not installed"),
        (ImportError("libcudart.so.12: cannot open"), "does not load: libcudart.so.12: cannot open"),
    ],
)
def test_info_without_cupy(
    error: ImportError, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise RuntimeError("a tensor on a CUDA device needs CuPy") from error

    monkeypatch.setattr(cuda, "cupy", absent)
    assert table_row(run(capsys, "info"), "CuPy ") == ["CuPy", found]


def test_info_on_folders_that_cannot_be_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr(Path, "is_dir", denied)
    monkeypatch.setattr(Path, "glob", denied)
    text = run(capsys, "info")
    assert table_row(text, "kernel cache")[1].endswith("(Permission denied)")
    assert "cannot be read and is ignored (Permission denied)" in table_row(text, "tuned plans")[1]
    assert table_row(text, "compiled calls of CuPy")[1].startswith("not built")


def test_info_counts_tuned_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    path = tmp_path / "tuning.json"
    assert table_row(run(capsys, "info"), "tuned plans")[1] == f"{path}: none"
    entry = Entry(None, (4, 8), 1e-6, 1e-6, 3, cunorm.__version__)
    TuningFile(path).store("NVIDIA H200", {"one": entry, "another": entry})
    assert table_row(run(capsys, "info"), "tuned plans")[1] == f"{path}: 2 for NVIDIA H200"
    TuningFile(path).store("NVIDIA H200", {"another": Entry(None, (4, 8), 1e-6, 1e-6, 3, "0.0.9")})
    found = table_row(run(capsys, "info"), "tuned plans")[1]
    assert found == f"{path}: 1 for NVIDIA H200; 1 of other versions, not used"


def test_info_imports_no_framework() -> None:
    code = (
        "import sys; from cunorm import cli; cli.run(['info']); "
        "print({'torch', 'jax', 'tensorflow', 'tvm_ffi'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_info_on_gpus_that_cannot_be_used(capsys: pytest.CaptureFixture[str], gpus_here: GpusHere) -> None:
    cupy = gpus_here((7, 0), (8, 0), (8, 6))
    busy = cupy.cuda.Device
    cupy.cuda.Device = lambda index: SimpleNamespace(mem_info=(0, 48e9), attributes={}) if index == 2 else busy(index)
    text = run(capsys, "info")
    assert table_row(text, "CUDA device 0")[1].startswith("GPU 7.0, CUDA device 0 has compute capability 7.0")
    assert table_row(text, "CUDA device 1")[1] == "GPU 8.0, cudaErrorDevicesUnavailable"
    assert table_row(text, "CUDA device 2")[1] == "GPU 8.6, sm_86, 108 multiprocessors, 48 GB"
