"""What a run measured, as plain data: a list of measurements that pandas takes, and its JSON file."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cunorm.bench.suites import Row
from cunorm.text import duration, table_lines

__all__ = [
    "COMPILED",
    "OURS",
    "TABLE_COLUMNS",
    "TABLE_NUMBERS",
    "Measurement",
    "Results",
    "best_peer",
    "by_row",
    "first_line",
    "load",
    "merge",
    "of",
    "table_cells",
]

OURS = "cunorm"
# The same where its calls are compiled (`build` of a framework's adapter): another time of the host.
COMPILED = "cunorm-compiled"
TABLE_COLUMNS = ("problem", "direction", "cunorm", "r", "GB/s", "best peer", "its r", "it takes")
TABLE_NUMBERS = ("cunorm", "r", "GB/s", "its r", "it takes")


@dataclass(frozen=True)
class Measurement:
    """A row measured with a provider. ``Results.frame`` has a line for each.

    ``seconds`` is None where there is no time to show: the results were wrong, or the provider failed; ``note`` says
    which. ``copy_seconds`` is the time in which a copy moves ``moved_bytes``, None for times of the host. ``error`` is
    the largest of the results' relative errors.
    """

    suite: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    residual: bool
    offset: int
    clock: str
    framework: str
    sweep: str
    layout: str
    groups: int
    activation: str
    weights: str
    provider: str
    moved_bytes: int
    copy_seconds: float | None
    seconds: float | None = None
    error: float | None = None
    note: str = ""

    @staticmethod
    def of(row: Row, provider: str, copy_seconds: float | None) -> Measurement:
        return Measurement(
            **dataclasses.asdict(row), provider=provider, moved_bytes=row.moved_bytes, copy_seconds=copy_seconds
        )

    @property
    def row(self) -> Row:
        return Row(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Row)})

    @property
    def r(self) -> float | None:
        """Time over the time of a copy of the bytes that must move."""
        return self.seconds / self.copy_seconds if self.seconds and self.copy_seconds else None

    @property
    def rate(self) -> float | None:
        """Bytes that must move, a second."""
        return self.moved_bytes / self.seconds if self.seconds and self.clock == "device" else None


@dataclass(repr=False)
class Results:
    """A run: where, when, with what, and what came out. ``absent`` says why a provider could not be used.

    ``date`` is when it began; of runs of several days, when the first and the last did, with " to " between them.

    ``print`` shows a table, as a notebook does; ``frame`` is for pandas, ``plot`` draws.
    """

    date: str
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def frame(self) -> Any:
        """A pandas DataFrame with a line for each measurement. Without pandas a RuntimeError.

        Its columns are the fields of `Measurement`, ``rows`` and ``columns`` (of x, seen as a matrix), ``GB/s`` and
        ``copy GB/s`` (of the bytes that must move), and ``r``.
        """
        try:
            import pandas
        except ImportError as error:
            raise RuntimeError(f"a frame needs pandas: pip install pandas ({error})") from error
        lines = []
        for entry in self.measurements:
            copy_rate = entry.moved_bytes / entry.copy_seconds * 1e-9 if entry.copy_seconds else None
            rate = None if entry.rate is None else entry.rate * 1e-9
            sizes = {"rows": math.prod(entry.shape[:-1]), "columns": entry.shape[-1]}
            lines.append(dataclasses.asdict(entry) | sizes | {"GB/s": rate, "copy GB/s": copy_rate, "r": entry.r})
        return pandas.DataFrame(lines)

    def plot(self, only: str = "") -> Any:
        """A matplotlib Figure: GB/s and r over the size, a line a provider, the rate of a copy as the ceiling.

        Ops, dtypes and layouts stand below each other. ``only`` picks rows with all of these words in their name;
        ``!word`` is for without. Without matplotlib a RuntimeError, where no size changes a ValueError.
        """
        try:
            from cunorm.bench.plots import figure
        except ImportError as error:
            raise RuntimeError(f"a plot needs matplotlib: pip install matplotlib ({error})") from error
        return figure(self, only)

    def table_rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, under TABLE_COLUMNS."""
        return [cells for row, measured in by_row(self.measurements).items() for cells in table_cells(row, measured)]

    def __repr__(self) -> str:
        suites = ", ".join(dict.fromkeys(entry.suite for entry in self.measurements)) or "nothing"
        device = self.machine.get("device", "unknown device")
        days = " to ".join(dict.fromkeys(date[:10] for date in self.date.split(" to ")))
        return f"<{len(self.measurements)} measurements of {suites} on {device}, {days}>"

    def __str__(self) -> str:
        lines = [repr(self)[1:-1], *table_lines(TABLE_COLUMNS, self.table_rows(), TABLE_NUMBERS)]
        return "\n".join([*lines, *(f"absent: {name} ({reason})" for name, reason in self.absent.items())])

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = "".join(line("td", cells) for cells in self.table_rows())
        caption = html.escape(repr(self)[1:-1])
        return f"<table><caption>{caption}</caption>{line('th', TABLE_COLUMNS)}{rows}</table>"

    def save(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        new = path.with_name(f"{path.name}.new")
        head = dataclasses.asdict(dataclasses.replace(self, measurements=[]))
        del head["measurements"]
        # A line a row: it keeps the file short, and a change to it readable.
        rows: dict[tuple[Row, float | None], dict[str, Any]] = {}
        for entry in self.measurements:
            found = {"seconds": entry.seconds, "error": entry.error, "note": entry.note}
            rows.setdefault((entry.row, entry.copy_seconds), {})[entry.provider] = found
        lines = [
            json.dumps(dataclasses.asdict(row) | {"copy_seconds": seconds, "providers": found})
            for (row, seconds), found in rows.items()
        ]
        text = json.dumps(head, indent=1).removesuffix("\n}")
        try:
            new.write_text(f'{text},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def load(path: str | Path) -> Results:
    """Read what `Results.save` or ``python -m cunorm bench --json`` wrote.

    In a checkout ``h200/quack`` and the like are the committed results, those of ``bench/results``. What cannot be read
    is an OSError, a ValueError where it is no such file.

    Examples
    --------
    >>> from cunorm import bench
    >>> results = bench.load("h200/quack")  # doctest: +SKIP
    >>> results.plot("rms_norm !residual")  # doctest: +SKIP
    """
    path, committed = Path(path), Path(__file__).with_name("results") / f"{path}.json"
    if not path.exists() and committed.exists():
        path = committed
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        measurements = []
        rows = data.pop("rows")
        if not isinstance(rows, list):
            raise TypeError("rows is no list")
        for line in rows:
            providers, copy_seconds = line.pop("providers"), line.pop("copy_seconds")
            row = Row(**line | {"shape": tuple(line["shape"])})
            if not row.shape:
                raise TypeError("shape is empty")
            for name, found in providers.items():
                measurements.append(dataclasses.replace(Measurement.of(row, name, copy_seconds), **found))
                _check_types(measurements[-1])
        results = Results(**data, measurements=measurements)
        _check_types(results)
        return results
    except KeyError as error:
        raise ValueError(f"{path} has no results of a benchmark: there is no {error}") from error
    except (AttributeError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} has no results of a benchmark: {error}") from error


_MEASUREMENT_TYPES, _RESULTS_TYPES = typing.get_type_hints(Measurement), typing.get_type_hints(Results)


def _check_types(entry: Measurement | Results) -> None:
    """TypeError for a field of another type than its annotation says."""
    for name, kind in _MEASUREMENT_TYPES.items() if isinstance(entry, Measurement) else _RESULTS_TYPES.items():
        value = getattr(entry, name)
        if not _is_of(value, kind):
            raise TypeError(f"{name} is {value!r}")


def _is_of(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(_is_of(value, one) for one in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(item, arguments[1]) for item in value.values())
    if origin is not None:  # a list or a tuple of one type
        return isinstance(value, origin) and all(_is_of(item, arguments[0]) for item in value)
    return isinstance(value, int | float if kind is float else kind)


def merge(runs: Sequence[Results]) -> Results:
    """The parts of a run as one. Where a row was measured more than once by a provider, the last one stands.

    A ValueError where they are not of one kind of device, whose times would stand beside each other.
    """
    first = runs[0]
    devices = list(dict.fromkeys(results.machine.get("device", "unknown") for results in runs))
    if len(devices) > 1:
        raise ValueError(f"the results are of different devices: {', '.join(devices)}")
    merged: dict[tuple[Row, str], Measurement] = {}
    for results in runs:
        for entry in results.measurements:
            merged[entry.row, entry.provider] = entry
    versions = {name: version for results in runs for name, version in results.versions.items()}
    absent = {name: why for results in runs for name, why in results.absent.items() if name not in versions}
    measured = {entry.row.label for entry in merged.values()}
    missing = [label for results in runs for label in results.missing if label not in measured]
    stopped = "; ".join(dict.fromkeys(results.stopped for results in runs if results.stopped)) if missing else ""
    seconds = sum(results.seconds for results in runs)
    dates = sorted(date for results in runs for date in results.date.split(" to "))
    date = dates[0] if dates[0][:10] == dates[-1][:10] else f"{dates[0]} to {dates[-1]}"
    return Results(date, first.machine, versions, absent, stopped, missing, seconds, list(merged.values()))


def by_row(measurements: Iterable[Measurement]) -> dict[Row, list[Measurement]]:
    """The measurements of each row, in the order of the rows."""
    rows: dict[Row, list[Measurement]] = {}
    for entry in measurements:
        rows.setdefault(entry.row, []).append(entry)
    return rows


def of(provider: str, measurements: Iterable[Measurement]) -> Measurement | None:
    """The measurement of a provider."""
    return next((entry for entry in measurements if entry.provider == provider), None)


def best_peer(measurements: Iterable[Measurement]) -> Measurement | None:
    """The fastest of the others that is right."""
    peers = [entry for entry in measurements if entry.provider not in (OURS, COMPILED) and entry.seconds]
    return min(peers, key=lambda entry: entry.seconds or 0.0, default=None)


def table_cells(row: Row, measured: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """The lines of the table for all measurements of a row: two where PyTorch's calls were compiled too."""
    compiled = of(COMPILED, measured)
    lines = [_cells(row, of(OURS, measured), best_peer(measured))] if of(OURS, measured) or not compiled else []
    return lines + ([_cells(row, compiled, best_peer(measured), "calls compiled")] if compiled else [])


def _cells(row: Row, ours: Measurement | None, peer: Measurement | None, way: str = "") -> tuple[str, ...]:
    variant = ", ".join(part for part in (row.variant, way) if part)
    problem = f"{row.op} {row.size} {row.dtype}" + (f" ({variant})" if variant else "")
    time_ours, time_peer = (entry.seconds if entry else None for entry in (ours, peer))
    return (
        problem,
        row.direction,
        duration(time_ours) if time_ours else "-",
        _number(ours.r if ours else None, "{:.3f}"),
        _number(ours.rate if ours else None, "{:.0f}", 1e-9),
        f"{peer.provider} {duration(time_peer)}" if peer and time_peer else "-",
        _number(peer.r if peer else None, "{:.3f}"),
        f"{time_peer / time_ours:.2f}x" if time_ours and time_peer else "-",
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def first_line(error: Exception) -> str:
    """What a note says of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
