"""Numbers, tables and types as plain text."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.text import kind_of


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "an int"), ([], "a list"), (np.zeros(1), "an ndarray"), (None, "a NoneType"), (ArithmeticError(), "an Arit")],
)
def test_kinds_have_their_article(value: object, kind: str) -> None:
    assert kind_of(value).startswith(kind)
