"""Plots of results: GB/s and r over the size of a problem, a line a provider, the rate of a copy as the ceiling."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure  # not pyplot, which would look for a screen, and keep figures open
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cunorm.bench.results import OURS, Measurement, Results
from cunorm.bench.suites import DIRECTIONS, SHAPES, TINY_SHAPES, readable

__all__ = ["Shown", "draw", "figure"]

# Okabe and Ito's colours, which people who see colours differently can tell apart; the marker says it again.
_STYLES = {
    OURS: ("#D55E00", "o"),
    "torch": ("#0072B2", "s"),
    "torch.compile": ("#56B4E9", "D"),
    "liger": ("#009E73", "^"),
    "quack": ("#CC79A7", "v"),
    "triton-tutorial": ("#E69F00", "P"),
    "jax.jit": ("#7A7A7A", "X"),
}
_OTHER_STYLE = ("#000000", "*")
_TITLES = {
    "forward": "forward",
    "forward_stats": "forward with statistics",
    "backward": "backward (dx and the weights' gradients)",
    "both": "forward and backward",
}
_LAYOUTS = {"": "", "NC...": "channels first", "N...C": "channels last"}
_LARGEST_R = 6.0  # what takes longer is drawn at the edge


class Shown(Figure):
    """A figure that a notebook shows, also one that has not imported pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, dpi=110)
        return buffer.getvalue()


def figure(results: Results, only: str) -> Figure:
    """All that `draw` would draw of the rows that match ``only``, in one figure."""
    chosen = list(_figures([entry for entry in results.measurements if entry.row.matches(only)]))
    if not chosen:
        raise ValueError(f"there is nothing to draw: no rows that match {only!r} have several sizes")
    sizes = [_size(measurements) for _, _, measurements in chosen]
    height = sum(height for _, height in sizes)
    whole = Shown(figsize=(max(width for width, _ in sizes), height), layout="constrained")
    parts = whole.subfigures(len(chosen), 1, squeeze=False)[:, 0]
    for part, (_, title, measurements) in zip(parts, chosen):
        _fill(part, f"{title}, {results.machine.get('device', 'unknown device')}", measurements)
    return whole


def draw(results: Results, folder: Path) -> list[Path]:
    """A PNG and an SVG for every op, dtype, layout and sweep of each suite: a column a direction. Returns the files."""
    written = []
    for name, title, measurements in _figures(results.measurements):
        drawn = Figure(figsize=_size(measurements), layout="constrained")
        _fill(drawn, f"{title}, {results.machine.get('device', 'unknown device')}", measurements)
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            # Without a date and with fixed ids the same results give the same file.
            metadata = {"Date": None} if suffix == "svg" else {}
            with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
                drawn.savefig(path, dpi=160, metadata=metadata)
            written.append(path)
    return written


def _figures(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str, list[Measurement]]]:
    """Name, title and measurements of each figure; what has one size only is no line and gets none."""
    # Forward with statistics is hardly another line than without, so it does not stand beside it.
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for entry in measurements:
        if entry.clock == "device":
            variant = "residual" if entry.residual else "statistics" if entry.direction == "forward_stats" else ""
            of = entry.dtype, _LAYOUTS[entry.layout], variant or entry.activation, entry.sweep
            groups.setdefault((entry.suite, entry.op, *of), []).append(entry)
    for (suite, op, dtype, layout, variant, sweep), group in groups.items():
        if len({entry.shape for entry in group}) < 2:
            continue
        sweep = "" if sweep == SHAPES else sweep
        parts = [part for part in (suite, op.replace("_", "-"), dtype, layout, variant, sweep) if part]
        rows = {math.prod(entry.shape[:-1]) for entry in group}
        of_rows = f"{rows.pop()} rows" if len(rows) == 1 and not sweep else ""
        words = op, dtype, layout, variant and f"with {variant}", sweep, of_rows
        title = ", ".join(word for word in words if word)
        yield "-".join(dict.fromkeys(parts)).replace(" ", "-"), title, group


def _directions(measurements: Sequence[Measurement]) -> list[str]:
    return [name for name in DIRECTIONS if any(entry.direction == name for entry in measurements)]


def _size(measurements: Sequence[Measurement]) -> tuple[float, float]:
    """Width and height of a figure, in inches."""
    return max(5.5, 4.6 * len(_directions(measurements))), 6.2


def _fill(figure: Any, title: str, measurements: Sequence[Measurement]) -> None:
    """Draw into a figure, or a part of one."""
    directions = _directions(measurements)
    axes = figure.subplots(2, len(directions), sharex="col", squeeze=False)
    axis_of = _SizeAxis(measurements)
    providers = [name for name in _STYLES if any(entry.provider == name for entry in measurements)]
    providers += sorted({entry.provider for entry in measurements} - set(providers))
    for column, direction in enumerate(directions):
        of_direction = [entry for entry in measurements if entry.direction == direction]
        rate, ratio = axes[0][column], axes[1][column]
        copies = {
            axis_of(entry): entry.moved_bytes / entry.copy_seconds for entry in of_direction if entry.copy_seconds
        }
        rate.plot(*_line(copies, 1e-9), color="black", linestyle="--", linewidth=1.2, label="copy of the same bytes")
        ratio.axhline(1.0, color="black", linestyle="--", linewidth=1.2)
        for provider in reversed(providers):  # the first one last, over the others
            color, marker = _STYLES.get(provider, _OTHER_STYLE)
            entries = [entry for entry in of_direction if entry.provider == provider]
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.3}
            if provider == OURS:
                style |= {"markersize": 6, "linewidth": 2.4}
            hosts = any(entry.note == "host's clock" for entry in entries)
            rates = {axis_of(entry): entry.rate for entry in entries if entry.rate}
            ratios = {axis_of(entry): min(entry.r, _LARGEST_R) for entry in entries if entry.r}
            rate.plot(*_line(rates, 1e-9), label=provider + (" (by the host's clock)" if hosts else ""), **style)
            ratio.plot(*_line(ratios), **style)
        rate.set_title(_TITLES.get(direction, direction), fontsize=10)
        rate.set_ylabel("GB/s (bytes that must move)")
        rate.set_ylim(bottom=0)
        ratio.set_ylabel("r: time / time of a copy")
        ratio.set_yscale("log")
        ratio.set_ylim(0.85, _LARGEST_R * 1.03)
        ratio.yaxis.set_major_locator(FixedLocator([1, 1.25, 1.5, 2, 3, 4, _LARGEST_R]))
        ratio.yaxis.set_major_formatter(FuncFormatter(_ratio_label))
        ratio.yaxis.set_minor_locator(NullLocator())
        axis_of.scale(ratio)
        for axis in (rate, ratio):
            axis.grid(True, color="#DDDDDD", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.tick_params(labelsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)


def _line(values: dict[int, float], factor: float = 1.0) -> tuple[list[int], list[float]]:
    sizes = sorted(values)
    return sizes, [values[size] * factor for size in sizes]


class _SizeAxis:
    """The horizontal axis: the columns, or the rows where the columns are all the same, or one shape after another."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._shapes = list(dict.fromkeys(entry.shape for entry in measurements))
        self._in_turn = measurements[0].sweep in (SHAPES, TINY_SHAPES)
        self._of_channels = measurements[0].row.is_channel_norm
        self._by_columns = len({shape[-1] for shape in self._shapes}) > 1
        self._sizes = sorted({self(entry) for entry in measurements})

    def __call__(self, entry: Measurement) -> int:
        """Where a measurement stands."""
        if self._in_turn:
            return self._shapes.index(entry.shape)
        return entry.shape[-1] if self._by_columns else math.prod(entry.shape[:-1])

    def scale(self, axis: Any) -> None:
        """Logarithmic where sizes are far apart; ticks at sizes that occur, as many as there is room for."""
        in_turn = "samples × channels × positions" if self._of_channels else "rows × columns"
        axis.set_xlabel(in_turn if self._in_turn else "columns" if self._by_columns else "rows")
        sizes = self._sizes
        ticks, labels = sizes, [readable(shape) for shape in self._shapes]
        if not self._in_turn:
            logarithmic = sizes[-1] >= 16 * sizes[0]
            if logarithmic:
                axis.set_xscale("log", base=2)
            position = math.log2 if logarithmic else float
            room = (position(sizes[-1]) - position(sizes[0])) / 11
            ticks = sizes[:1]
            for size in sizes[1:]:
                if position(size) - position(ticks[-1]) >= room * 0.999:
                    ticks.append(size)
            powers = all(size & (size - 1) == 0 for size in ticks)
            labels = [_binary(size) if powers else f"{size:,}" for size in ticks]
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticks(ticks, labels, rotation=40, ha="right", rotation_mode="anchor")


def _binary(size: int) -> str:
    """A power of two as people write it: 512, 4Ki, 1Mi."""
    for unit, name in ((2**20, "Mi"), (2**10, "Ki")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)


def _ratio_label(value: float, _: object) -> str:
    return f"{value:g}" + ("+" if value == _LARGEST_R else "")
