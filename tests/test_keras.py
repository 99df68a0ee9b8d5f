"""The Keras layers: keras_cases.py, in a process for each backend, which Keras takes when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
BACKENDS = ["tensorflow", "jax", "torch"]
CASES = ("-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / "keras_cases.py"))


def run(*arguments: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_on_the_cpu(backend: str) -> None:
    printed = run(*CASES, "-m", "not gpu", KERAS_BACKEND=backend, CUDA_VISIBLE_DEVICES="")
    passed = re.search(r"(\d+) passed", printed)
    assert passed and int(passed[1]) > 70 and "skipped" not in printed


def test_inference_on_the_numpy_backend() -> None:
    printed = run(*CASES, "-k", "test_values", KERAS_BACKEND="numpy")
    assert re.search(r"\d\d passed", printed) and "failed" not in printed


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_on_a_gpu(backend: str) -> None:
    printed = run(*CASES, KERAS_BACKEND=backend)
    if "skipped" in printed:
        pytest.skip(f"needs an NVIDIA GPU that Keras's {backend} backend sees")


def test_keras_is_imported_for_its_layers_alone() -> None:
    """And its backend is the user's."""
    code = (
        "import sys, numpy, cunorm; cunorm.layer_norm(numpy.ones((2, 8))); assert 'keras' not in sys.modules; "
        "import cunorm.adapters.keras, keras; print(keras.backend.backend())"
    )
    for backend in ("jax", "torch"):
        assert run("-c", code, KERAS_BACKEND=backend).split() == [backend]
