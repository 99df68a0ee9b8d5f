"""How the commands print: colour and rules on a terminal, plain aligned text where the output is piped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cunorm.text import byte_count, duration, rate, table_lines

__all__ = ["byte_count", "console", "duration", "line", "progress", "rate", "table"]


@functools.cache
def console() -> Console:
    return Console(highlight=False)


def line(text: str = "", style: str = "") -> None:
    """Print one line; it is broken at the width of a terminal, and never where the output is piped."""
    if console().is_terminal:
        console().print(Text(text, style=style))
    else:
        print(text, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table; the columns named in ``numbers`` are aligned to the right."""
    if not console().is_terminal:
        for text in table_lines(columns, rows, numbers):
            line(text)
        return
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        result.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    console().print(result)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """On a terminal, a progress bar: gives the function that shows what is done, how much, and of how much.

    Gives None where the output is piped.
    """
    if not console().is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)
