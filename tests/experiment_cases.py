"""Edits of kernels that the tests of ``cunorm.experiment`` share."""

from __future__ import annotations

from typing import Any

import cunorm
from cunorm import kernels

ROWS, SUMS = "row_block_forward", "column_sums"
PUT = "normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias)"
WRONG = (PUT, PUT.replace("rstd", "3 * rstd"))
SHIPPED = {kernel: kernels.kernel_text(kernel, {}) for kernel in kernels.kernel_names()}


def edited(kernel: str, *changes: tuple[str, str]) -> Any:
    """An experiment with its text changed: each old text for a new one, which must be there once."""
    experiment = cunorm.experiment(kernel)
    text = experiment.source
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    experiment.source = text
    return experiment


def no_cupy() -> Any:
    raise RuntimeError("no CuPy here")
