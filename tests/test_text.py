"""Numbers, tables and types as plain text."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.text import byte_count, duration, kind_of


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "an int"), ([], "a list"), (np.zeros(1), "an ndarray"), (None, "a NoneType"), (OSError(), "an OSError")],
)
def test_kinds_have_their_article(value: object, kind: str) -> None:
    assert kind_of(value) == kind


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.00125, "1.25 ms"), (3.1e-5, "31 µs"), (1e-9, "0.001 µs")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (134217728, "134.2 MB"), (4.3e12, "4.3 TB")]
)
def test_byte_counts(count: float, text: str) -> None:
    assert byte_count(count) == text
