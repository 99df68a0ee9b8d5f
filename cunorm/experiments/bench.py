"""How long calls take with a kernel's text: the shipped one, an edited one, and a copy of the same bytes, in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cunorm import cuda
from cunorm.experiments.examples import Chosen, Example, outputs_of
from cunorm.experiments.tables import Table
from cunorm.tuning.gpu import Gpu

__all__ = ["BenchReport", "time_texts"]

_COLUMNS = (*Example.COLUMNS, "text", "microseconds", "GB/s", "r", "error", "verdict")
_ROUNDS, _SAMPLES, _WARM = 5, 9, 45
# Relative error of the edited text's results beside the shipped one's: sums in another order, and the rounding of that.
_TOLERANCE = {"float16": 1e-3, "bfloat16": 3e-3, "float32": 1e-5, "float64": 1e-12}
# Okabe and Ito's colours, which people who see colours differently can tell apart; the marker says it again.
_STYLES = {"edited": ("#D55E00", "o", "-"), "shipped": ("#0072B2", "s", "-"), "copy": ("#000000", "_", "--")}


class BenchReport(Table):
    """What `Experiment.bench` found: for each call a row for each text, and one for a copy of the same bytes.

    ``r`` is the time over that of the copy, ``error`` the relative error beside the shipped text's results. A text
    whose results are wrong is not timed.
    """

    def __init__(self, kernel: str, gpu: str, rows: Sequence[tuple[Any, ...]], notes: Sequence[str]) -> None:
        bad = [place for place, row in enumerate(rows) if row[-1] == "wrong"]
        super().__init__(f"{kernel} on {gpu}: medians, with a cold L2 cache", _COLUMNS, rows, notes, bad)

    def plot(self) -> Any:
        """GB/s and r over the shapes, with a copy as the ceiling: a matplotlib Figure. Needs matplotlib."""
        try:
            from cunorm.bench.plots import Shown
        except ImportError as error:
            raise RuntimeError(".plot() needs matplotlib, which is not installed: pip install matplotlib") from error
        shapes = list(dict.fromkeys(row[1] for row in self.rows))
        figure = Shown(figsize=(6.4, 5.2), layout="constrained")
        rate, ratio = figure.subplots(2, 1, sharex=True)
        for text, (color, marker, line) in _STYLES.items():
            for axis, column, label in ((rate, "GB/s", text), (ratio, "r", None)):
                place = _COLUMNS.index(column)
                points = {row[1]: row[place] for row in self.rows if row[3] == text}
                values = [math.nan if points.get(shape) is None else points[shape] for shape in shapes]
                style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": line}
                axis.plot(range(len(shapes)), values, label=label, **style)
        rate.set_title(self.headline, fontsize=10)
        rate.set_ylabel("GB/s (bytes that must move)")
        rate.set_ylim(bottom=0)
        rate.legend(fontsize=8, frameon=False)
        ratio.set_ylabel("r: time / time of a copy")
        ratio.set_xlabel("shape of x")
        ratio.set_xticks(range(len(shapes)), [shape.replace("x", "×") for shape in shapes], rotation=30, ha="right")
        for axis in (rate, ratio):
            axis.grid(True, color="#DDDDDD", linewidth=0.6)
        return figure


def time_texts(kernel: str, text: str, chosen: Sequence[Chosen], index: int, notes: Sequence[str]) -> BenchReport:
    """Time each call as a whole on a CUDA device, with the shipped text and with this one."""
    rows: list[tuple[Any, ...]] = []
    for item in chosen:
        gpu = Gpu(_tensors(item), outputs_of(item.example), index)
        try:
            rows += _timed(gpu, kernel, text, item)
        except MemoryError as error:
            raise RuntimeError(f"the tensors of {item.example} do not fit in the GPU's free memory: {error}") from error
        finally:
            gpu.release()
    return BenchReport(kernel, cuda.gpu_name(index), rows, notes)


def _tensors(chosen: Chosen) -> dict[str, tuple[int, str] | None]:
    """How many numbers every operand has, and of which dtype."""
    given = chosen.example.draw(blank=True)
    described = chosen.example.described(given)
    tensors: dict[str, tuple[int, str] | None] = dict.fromkeys(described.operands)
    tensors |= {name: (array.size, array.dtype.name) for name, array in given.items() if array is not None}
    for name, output in zip(outputs_of(chosen.example), described.outputs):
        if output is not None:
            tensors[name] = math.prod(output.shape), output.dtype
    return tensors


def _timed(gpu: Gpu, kernel: str, text: str, chosen: Chosen) -> list[tuple[Any, ...]]:
    example, moved = chosen.example, chosen.example.described(chosen.example.draw(blank=True)).problem.bytes_moved
    gpu.load("shipped", chosen.plan, {})
    gpu.load("edited", chosen.plan, {kernel: text})
    gpu.load_copy("copy", moved // 2)
    gpu.error("shipped")
    error = gpu.error("edited")
    right = error <= _TOLERANCE[example.dtype]  # false for a NaN too
    timed = ["shipped", "edited", "copy"] if right else ["shipped", "copy"]
    gpu.samples("shipped", _WARM)  # clocks rise in the first moments
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(_ROUNDS):
        for name, taken in samples.items():
            taken += gpu.samples(name, _SAMPLES)
    seconds = {name: float(np.median(taken)) for name, taken in samples.items()}
    rows: list[tuple[Any, ...]] = []
    for name in ("shipped", "edited", "copy"):
        shown = *example.cells, name
        if name in seconds:
            numbers = seconds[name] * 1e6, moved / seconds[name] * 1e-9, seconds[name] / seconds["copy"]
            rows.append((*shown, *numbers, error if name == "edited" else None, ""))
        else:
            rows.append((*shown, None, None, None, error, "wrong"))
    return rows
