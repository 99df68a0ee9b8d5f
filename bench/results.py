"""What a run measured, as plain data: a list of measurements that pandas takes, and its JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cunorm.bench.suites import Row

__all__ = ["OURS", "Measurement", "Results", "best_peer", "by_row", "first_line", "load", "merge", "of"]

OURS = "cunorm"


@dataclass(frozen=True)
class Measurement:
    """A row measured with a provider. ``pandas.DataFrame(results.measurements)`` makes a table of them.

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


@dataclass
class Results:
    """A run: where, when, with what, and what came out. ``absent`` says why a provider could not be used."""

    date: str
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)

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
        new.write_text(f'{text},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
        new.replace(path)


def load(path: Path) -> Results:
    """Read what `Results.save` wrote. ValueError where it is no such file."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        measurements = []
        for line in data.pop("rows"):
            providers, copy_seconds = line.pop("providers"), line.pop("copy_seconds")
            row = Row(**line | {"shape": tuple(line["shape"])})
            for name, found in providers.items():
                measurements.append(dataclasses.replace(Measurement.of(row, name, copy_seconds), **found))
        return Results(**data, measurements=measurements)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} has no results of a benchmark: {error}") from error


def merge(runs: Sequence[Results]) -> Results:
    """The parts of a run as one. Where a row was measured more than once by a provider, the last one stands."""
    first = runs[0]
    merged: dict[tuple[Row, str], Measurement] = {}
    for results in runs:
        for entry in results.measurements:
            merged.pop((entry.row, entry.provider), None)
            merged[entry.row, entry.provider] = entry
    versions = {name: version for results in runs for name, version in results.versions.items()}
    absent = {name: why for results in runs for name, why in results.absent.items() if name not in versions}
    measured = {entry.row.label for entry in merged.values()}
    missing = [label for results in runs for label in results.missing if label not in measured]
    stopped = "; ".join(dict.fromkeys(results.stopped for results in runs if results.stopped)) if missing else ""
    seconds = sum(results.seconds for results in runs)
    return Results(first.date, first.machine, versions, absent, stopped, missing, seconds, list(merged.values()))


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
    peers = [entry for entry in measurements if entry.provider != OURS and entry.seconds]
    return min(peers, key=lambda entry: entry.seconds or 0.0, default=None)


def first_line(error: Exception) -> str:
    """What a note says of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
