"""``python -m cunorm bench``: a suite beside the other libraries on this GPU; or plots and tables of saved results."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cunorm import gpus
from cunorm.cli import UsageError, output
from cunorm.cli.options import check_target

if TYPE_CHECKING:  # it imports PyTorch, which drawing does not need
    from cunorm.bench.results import Measurement, Results
    from cunorm.bench.suites import Row

__all__ = ["run"]

_WHOLE = (1, 1)  # a suite as its first part of one


def run(
    suites: Sequence[str],
    *,
    only: str = "",
    providers: Sequence[str] = (),
    part: tuple[int, int] = _WHOLE,
    max_seconds: float = float("inf"),
    warm: bool = False,
    json: Path | None = None,
    plots: Path | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Run suites, or show the results in ``sources``."""
    from cunorm.bench.suites import MODEL_SUITES, SUITES, suite

    measuring = {"--providers": providers, "--part": part != _WHOLE, "--warm": warm}
    measuring["--max-seconds"] = max_seconds < float("inf")
    if not suites and not sources:
        for name, given in (measuring | {"--only": only, "--json": json, "--plots": plots}).items():
            if given:
                raise UsageError(f"name a suite for {name}; without any option they are listed")
        makers = SUITES | MODEL_SUITES
        output.table(("suite", "measures"), [(name, _described(make)) for name, make in makers.items()])
        return
    for name in suites:
        if name not in SUITES | MODEL_SUITES:
            raise UsageError(f"there is no suite {name!r}; the suites are {', '.join(SUITES | MODEL_SUITES)}")
    if not max_seconds > 0:
        raise UsageError(f"--max-seconds {max_seconds} must be positive")
    if sources:
        for name, given in ({"a suite": suites} | measuring).items():
            if given:
                raise UsageError(f"--from shows saved results, so it goes without {name}")
    if warm and (json or plots):
        raise UsageError("--warm times nothing, so it goes without --json and --plots")
    check_target("--json", json)
    if plots is not None:
        _check_plots(plots)
    if sources:
        results = _load(sources)
        results.measurements = [entry for entry in results.measurements if entry.row.matches(only)]
        if only and not results.measurements:
            raise UsageError(f"no row of {', '.join(map(str, sources))} matches {only!r}")
        if json is not None:
            if only and json.exists() and any(map(json.samefile, sources)):
                raise UsageError(f"--json {json}: it is a file of --from, whose other rows would be lost")
            _save(results, json)
        _print_table(results)
    else:
        rows = [row for name in suites for row in suite(name, only, part)]
        if not rows:
            raise UsageError(f"no row of {', '.join(suites)} matches {only!r} or is in this part")
        results = _measure(rows, providers, max_seconds, warm, json)
        if warm:
            output.line(f"{len(rows) - len(results.missing)} of {len(rows)} rows called in {results.seconds:.0f} s")
            return
    _print_notes(results)
    if plots is not None:
        _draw(results, plots)


def _save(results: Results, path: Path) -> None:
    try:
        results.save(path)
    except OSError as error:
        raise UsageError(f"--json {path}: {error}") from error


def _load(sources: Sequence[Path]) -> Results:
    from cunorm.bench.results import load, merge

    try:
        return merge([load(source) for source in sources])
    except (OSError, ValueError) as error:
        raise UsageError(f"--from: {error}") from error


def _check_plots(folder: Path) -> None:
    """Make the folder; UsageError where that or drawing is impossible, which must not show after minutes of a GPU."""
    try:
        importlib.import_module("cunorm.bench.plots")
    except ImportError as error:
        raise UsageError(f"--plots needs matplotlib, the extra bench: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots {folder}: {error}") from error


def _draw(results: Results, folder: Path) -> None:
    from cunorm.bench.plots import draw

    try:
        for path in draw(results, folder):
            output.line(f"written: {path}")
    except OSError as error:
        raise UsageError(f"--plots {folder}: {error}") from error


def _machine() -> Any:
    """The GPU; UsageError where there is none."""
    names, reason = gpus.cuda_devices()
    if not names:
        raise UsageError(f"it needs an NVIDIA GPU: {reason}")
    try:
        from cunorm.bench.timing import Gpu

        return Gpu()
    except RuntimeError as error:
        raise UsageError(f"it cannot run: {error}") from error


def _measure(
    rows: Sequence[Row], providers: Sequence[str], max_seconds: float, warm: bool, json: Path | None
) -> Results:
    begin = time.monotonic()
    machine = _machine()
    from cunorm.bench import run as runner
    from cunorm.bench.peers import PROVIDERS
    from cunorm.bench.results import table_cells

    unknown = [name for name in providers if name not in PROVIDERS]
    if unknown:
        raise UsageError(f"--providers: {unknown[0]!r} is none of {', '.join(PROVIDERS)}")
    on_terminal = output.console().is_terminal
    with output.progress() as show:
        if show is not None:
            show("the first row", 0, len(rows))

        def report(results: Results, row: Row, measured: Sequence[Measurement]) -> None:
            # After every row, so that a run that is killed leaves what it has measured.
            if json is not None:
                _save(results, json)
            if show is not None:
                show(f"done: {row.label}", len(rows) - len(results.missing), len(rows))
            elif not warm:
                for cells in table_cells(row, measured):
                    output.line(" | ".join(cells))

        left = max_seconds - (time.monotonic() - begin)
        names = providers or list(PROVIDERS)
        results = runner.run(rows, names, machine, max_seconds=left, warm=warm, report=report)
    if json is not None:
        _save(results, json)
        output.line(f"written: {json}")
    if on_terminal and not warm:
        _print_table(results)
    return results


def _described(make: Callable[..., object]) -> str:
    """What a suite measures, as its docstring has it."""
    return " ".join((getattr(make, "func", make).__doc__ or "").split())


def _print_table(results: Results) -> None:
    from cunorm.bench.results import TABLE_COLUMNS, TABLE_NUMBERS

    output.line()
    output.table(TABLE_COLUMNS, results.table_rows(), numbers=TABLE_NUMBERS)


def _print_notes(results: Results) -> None:
    """What the table does not say: who is absent, what went wrong, what is missing."""
    from cunorm.bench.results import OURS, best_peer, by_row, of

    output.line()
    output.line(", ".join(f"{name}: {value}" for name, value in results.machine.items()))
    output.line(", ".join(f"{name} {version}" for name, version in results.versions.items()))
    output.line("r: time over that of a copy of the bytes that must move; 'it takes': the peer's time over cunorm's")
    for name, reason in results.absent.items():
        output.line(f"absent: {name} ({reason})")
    failures: dict[tuple[str, str], list[str]] = {}
    for entry in results.measurements:
        if entry.seconds is None:
            failures.setdefault((entry.provider, entry.note), []).append(entry.row.label)
    for (provider, note), labels in failures.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        output.line(f"no time of {provider} for {labels[0]}{more}: {note}")
    slower = []
    for row, measured in by_row(results.measurements).items():
        ours, peer = of(OURS, measured), best_peer(measured)
        if ours and peer and ours.seconds and peer.seconds and peer.seconds < ours.seconds:
            slower.append(f"{row.label}: {peer.provider} takes {peer.seconds / ours.seconds:.2f}x")
    for text in slower:
        output.line(f"not first: {text}")
    if results.missing:
        output.line(f"stopped {results.stopped}" if results.stopped else "not finished")
        output.line(f"{len(results.missing)} rows are missing: {'; '.join(results.missing)}")
