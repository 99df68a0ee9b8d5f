"""Results as tables: aligned text, HTML for notebooks, and pandas, which is imported only when it is asked for."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from cunorm.text import table_lines

__all__ = ["Table"]

_BAD = "#C0392B"


class Table:
    """What a method of an experiment found: a headline, a row for each thing, and what there is to say below them.

    ``passed`` says whether all is right: in a condition, the object is as true as that.
    """

    def __init__(
        self,
        headline: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        notes: Sequence[str] = (),
        bad: Sequence[int] = (),
    ) -> None:
        self.headline, self.columns, self.rows, self.notes = headline, tuple(columns), list(rows), list(notes)
        self.passed = not bad
        self._bad = set(bad)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def frame(self) -> Any:
        """The rows as a pandas DataFrame. Needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise RuntimeError(".frame needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self.rows, columns=list(self.columns))

    def __str__(self) -> str:
        cells = [[_shown(value) for value in row] for row in self.rows]
        columns = zip(self.columns, zip(*self.rows))
        numbers = [name for name, values in columns if any(isinstance(value, (int, float)) for value in values)]
        return "\n".join([self.headline, *table_lines(self.columns, cells, numbers), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[Any], style: str = "") -> str:
            inner = "".join(
                f'<{tag} style="text-align:{"right" if isinstance(cell, (int, float)) else "left"}">'
                f"{html.escape(_shown(cell))}</{tag}>"
                for cell in cells
            )
            return f'<tr style="{style}">{inner}</tr>'

        color = "" if self.passed else f"color:{_BAD}"
        parts = [f'<div style="font-weight:bold;{color}">{html.escape(self.headline)}</div>', "<table>"]
        parts.append(row("th", self.columns))
        parts += [row("td", cells, f"color:{_BAD}" if i in self._bad else "") for i, cells in enumerate(self.rows)]
        parts.append("</table>")
        parts += [f'<pre style="{color}">{html.escape(note)}</pre>' for note in self.notes]
        return "\n".join(parts)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
