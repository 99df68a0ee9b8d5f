"""Numbers and tables as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["byte_count", "counted", "duration", "kind_of", "rate", "table_lines"]


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> Iterator[str]:
    """The lines of a table; the columns named in ``numbers`` are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    for row in (columns, *rows):
        cells = zip(columns, row, widths)
        padded = [cell.rjust(width) if column in numbers else cell.ljust(width) for column, cell, width in cells]
        yield "  ".join(padded).rstrip()


def byte_count(count: float) -> str:
    """A number of bytes in decimal units, as bandwidths have them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def rate(bytes_per_second: float) -> str:
    return f"{byte_count(bytes_per_second)}/s"


def kind_of(value: object) -> str:
    """The name of its type with an article, as messages have it: "an int", "a list", "an ndarray"."""
    name = type(value).__name__  # of which torch.compile traces slices, but no startswith
    return f"{'an' if name[0].lower() in 'aeio' or name[:2] == 'nd' else 'a'} {name}"


def counted(count: int, word: str) -> str:
    """So many of something, whose name is given in the plural."""
    return f"{count} {word.removesuffix('s') if count == 1 else word}"


def duration(seconds: float) -> str:
    if 0 < seconds < 1e-9:
        return "less than 0.001 µs"
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} µs"
