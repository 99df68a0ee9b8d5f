"""Markdown tables of results, written between markers into a text such as the README: generated, so never mistyped.

    python bench/tools/report.py README.md RESULTS.json [RESULTS.json ...]

replaces what stands between ``<!-- bench: KIND SUITE [WORDS] -->`` and ``<!-- bench end -->`` by the table of that kind
for the rows of the suite, of these the ones that match the words (`cunorm.bench.suites.Row.matches`). Kinds: ``table``
(r beside that of the best peer), ``ours`` (cunorm alone), ``odd`` (rows of odd length beside their aligned neighbours),
``host`` (host times), ``models`` (training steps of models without and with cunorm), ``providers`` (r of every
provider) and ``nv_norms`` (milliseconds beside those that nv_norms has published, of other GPUs).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cunorm.bench.published import NV_NORMS_GPUS, nv_norms_milliseconds
from cunorm.bench.results import COMPILED, OURS, Measurement, Results, best_peer, by_row, load, merge, of
from cunorm.bench.suites import DIRECTIONS, LONG_ODD_NEIGHBOURS, ODD_NEIGHBOURS, STEPS, Row, readable

__all__ = ["KINDS", "fill", "not_first", "table"]

_HEADINGS = {
    "forward": "forward",
    "forward_stats": "with statistics",
    "backward": "backward",
    "both": "both",
    "recorded": "recorded",
}
_MARKED = re.compile(r"(<!-- bench: (\S+) (\S+)( [^\n]*?)? -->\n).*?(<!-- bench end -->)", re.DOTALL)


def fill(text: str, results: Results) -> str:
    """``text`` with the tables between its markers; ValueError for a marker that asks for what there is not."""

    def replacement(match: re.Match[str]) -> str:
        begin, kind, suite, text, end = match.groups()
        only = text or ""
        if kind not in KINDS:
            raise ValueError(f"{begin.strip()}: there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
        chosen = [entry for entry in results.measurements if entry.suite == suite and entry.row.matches(only)]
        if not chosen:
            raise ValueError(f"{begin.strip()}: the results have no such rows")
        return f"{begin}{KINDS[kind](chosen)}\n{end}"

    return _MARKED.sub(replacement, text)


def not_first(measurements: Sequence[Measurement]) -> list[str]:
    """The rows where a peer is faster, worst first, as text."""
    found = []
    for row, measured in by_row(measurements).items():
        ours, peer = of(OURS, measured), best_peer(measured)
        if ours and peer and ours.seconds and peer.seconds and peer.seconds < ours.seconds:
            share = peer.seconds / ours.seconds
            found.append((share, f"{row.label}: {peer.provider} takes {share:.2f} of cunorm's time"))
    return [text for _, text in sorted(found)]


def table(measurements: Sequence[Measurement]) -> str:
    """A line a problem; for each direction cunorm's r, and the best peer's with its name."""

    def cells(measured: Sequence[Measurement]) -> list[str]:
        ours, peer = of(OURS, measured), best_peer(measured)
        return [_r(ours), f"{_r(peer)} {peer.provider}" if peer else "–"]

    return _problems(measurements, ("r", "best peer"), cells)


def ours(measurements: Sequence[Measurement]) -> str:
    """A line a problem; for each direction cunorm's time, r and GB/s."""

    def cells(measured: Sequence[Measurement]) -> list[str]:
        entry = of(OURS, measured)
        return [_us(entry), _r(entry), f"{entry.rate * 1e-9:,.0f}" if entry and entry.rate else "–"]

    return _problems(measurements, ("µs", "r", "GB/s"), cells)


def providers(measurements: Sequence[Measurement]) -> str:
    """A line a problem and direction; a column a provider: its r."""
    names = list(dict.fromkeys(entry.provider for entry in measurements))
    lines = [
        [_problem(row, measurements), _HEADINGS[row.direction], *(_r(of(name, measured)) for name in names)]
        for row, measured in by_row(measurements).items()
    ]
    return _markdown([_sizes(measurements), "", *names], lines)


def odd(measurements: Sequence[Measurement]) -> str:
    """cunorm's time an element for odd rows and unaligned views, over that of the aligned neighbour."""
    entries = {entry.row: entry for entry in measurements if entry.provider == OURS and entry.seconds}
    plain = {(row.shape, row.dtype, row.direction): entry for row, entry in entries.items() if not row.offset}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    neighbours = ODD_NEIGHBOURS | LONG_ODD_NEIGHBOURS
    for row, entry in entries.items():
        columns = row.columns if row.offset else neighbours.get(row.columns)
        if columns is None:
            continue
        neighbour = plain.get(((*row.shape[:-1], columns), row.dtype, row.direction))
        against = f"{row.columns:,}, unaligned" if row.offset else f"{row.columns:,} beside {columns:,}"
        ratio = "–"
        if neighbour and neighbour.rate and entry.rate:
            ratio = f"{neighbour.rate / entry.rate:.2f}"
        lines.setdefault((against, row.dtype), {})[row.direction] = ratio
    directions = _directions(measurements)
    body = [[*key, *(found.get(name, "–") for name in directions)] for key, found in lines.items()]
    return _markdown(["columns", "dtype", *(_HEADINGS[name] for name in directions)], body)


def host(measurements: Sequence[Measurement]) -> str:
    """Microseconds of the host a call, and cunorm's over PyTorch's."""
    calls = {
        "forward": "forward",
        "recorded": "forward, gradients recorded",
        "both": "forward and backward",
    }
    names = {OURS: "cunorm", COMPILED: "compiled"}
    shown = [name for name in names if any(entry.provider == name for entry in measurements)]
    lines = []
    for row, measured in by_row(measurements).items():
        peer = of("torch", measured)
        framework = {"cupy": "CuPy", "torch": "PyTorch"}[row.framework]
        line = [framework, _problem(row, measurements), calls[row.direction], _us(peer)]
        for entry in (of(name, measured) for name in shown):
            line += [_us(entry), _ratio(entry, peer)]
        lines.append(line)
    headings = ["tensors", "rows × columns", "call", "PyTorch's own µs"]
    headings += [text for name in shown for text in (f"{names[name]} µs", "ratio")]
    return _markdown(headings, lines)


def models(measurements: Sequence[Measurement]) -> str:
    """A line a model; for eager and compiled steps milliseconds without and with cunorm, and the ratio."""
    names = {OURS: "", COMPILED: ", after build-torch"}
    of_step = {"step": "eager", "compiled step": "torch.compile"}
    shown = {(entry.direction, entry.provider) for entry in measurements}
    steps = [name for name in STEPS if any(direction == name for direction, _ in shown)]
    wanted = {step: [name for name in names if (step, name) in shown] for step in steps}
    lines: dict[str, list[str]] = {}
    for row, measured in by_row(measurements).items():
        peer = of("torch", measured)
        line = lines.setdefault(row.op, [row.op, readable(row.shape)])
        line.append(_ms(peer))
        for entry in (of(provider, measured) for provider in wanted[row.direction]):
            line += [_ms(entry), _ratio(entry, peer)]
    headings = ["model", "input"]
    for step in steps:
        headings.append(f"{of_step[step]}: PyTorch ms")
        titles = [of_step[step] + names[name] for name in wanted[step]]
        headings += [f"{title}: {text}" for title in titles for text in ("cunorm ms", "ratio")]
    return _markdown(headings, list(lines.values()))


def nv_norms(measurements: Sequence[Measurement]) -> str:
    """Milliseconds of cunorm's forward and backward, and those that nv_norms has published; see `published`."""
    chosen = [entry for entry in measurements if nv_norms_milliseconds(entry.row)]
    lines = []
    for row, measured in by_row(chosen).items():
        entry, theirs = of(OURS, measured), nv_norms_milliseconds(row) or ()
        time = f"{entry.seconds * 1e3:.2f}" if entry and entry.seconds else "–"
        lines.append([_problem(row, chosen), time, *(f"{value:.2f}" for value in theirs)])
    return _markdown([_sizes(measurements), "cunorm ms", *(f"nv_norms ms, {name}" for name in NV_NORMS_GPUS)], lines)


KINDS: dict[str, Callable[[Sequence[Measurement]], str]] = {
    "table": table,
    "ours": ours,
    "odd": odd,
    "host": host,
    "models": models,
    "providers": providers,
    "nv_norms": nv_norms,
}


def _problems(
    measurements: Sequence[Measurement], headings: Sequence[str], cells: Callable[[Sequence[Measurement]], list[str]]
) -> str:
    directions = _directions(measurements)
    lines: dict[str, dict[str, list[str]]] = {}
    for row, measured in by_row(measurements).items():
        lines.setdefault(_problem(row, measurements), {})[row.direction] = cells(measured)
    body = [
        [problem, *(cell for name in directions for cell in found.get(name, ["–"] * len(headings)))]
        for problem, found in lines.items()
    ]
    titles = [f"{_HEADINGS[name]} {heading}" for name in directions for heading in headings]
    return _markdown([_sizes(measurements), *titles], body)


def _sizes(measurements: Sequence[Measurement]) -> str:
    """What the sizes of a shape are."""
    return "samples × channels × positions" if measurements[0].row.is_channel_norm else "rows × columns"


def _problem(row: Row, measurements: Sequence[Measurement]) -> str:
    """The shape, and whatever else is not the same in all of the measurements."""
    text = readable(row.shape)
    variants = {"op": row.op, "dtype": row.dtype, "residual": "residual" * row.residual}
    for name, value in (variants | {"layout": row.layout, "activation": row.activation}).items():
        if len({getattr(entry, name) for entry in measurements}) > 1 and value:
            text += f", {value}"
    return text + (", unaligned" if row.offset else "")


def _directions(measurements: Sequence[Measurement]) -> list[str]:
    return [name for name in DIRECTIONS if any(entry.direction == name for entry in measurements)]


def _r(entry: Measurement | None) -> str:
    return f"{entry.r:.2f}" if entry and entry.r else "–"


def _us(entry: Measurement | None) -> str:
    return f"{entry.seconds * 1e6:,.1f}" if entry and entry.seconds else "–"


def _ms(entry: Measurement | None) -> str:
    return f"{entry.seconds * 1e3:.1f}" if entry and entry.seconds else "–"


def _ratio(entry: Measurement | None, peer: Measurement | None) -> str:
    return f"{entry.seconds / peer.seconds:.2f}" if entry and peer and entry.seconds and peer.seconds else "–"


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *lines))


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 2:
        raise SystemExit("usage: python bench/tools/report.py TEXT.md RESULTS.json [RESULTS.json ...]")
    target, *sources = map(Path, arguments)
    results = merge([load(source) for source in sources])
    target.write_text(fill(target.read_text(), results))
    for text in not_first(results.measurements):
        print(f"not first: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
