"""What holds for all tests: those marked gpu are skipped where there is no GPU, and frameworks stay quiet."""

from __future__ import annotations

import functools
import os

import pytest

# Before any framework is imported. The workers of pytest-xdist share a GPU, so none may take it for itself.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

NO_GPU = "needs an NVIDIA GPU"


@functools.cache
def _has_gpu() -> bool:
    """Whether CuPy sees a CUDA device. CuPy is asked since it is imported in a fraction of PyTorch's time."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # not installed, or no driver, or one that is too old
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
