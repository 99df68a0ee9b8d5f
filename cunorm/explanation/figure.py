"""The diagram of an `Explanation`: rows to blocks to warps to threads to vectors, and the memory that they go through.

It is an SVG that needs nothing from outside. Its text has the colour of the text around it, so that it can be read in
light and dark notebooks and in print. Colours are Okabe and Ito's, which people who see colours differently can tell
apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from cunorm.problem import DTYPES
from cunorm.text import byte_count, duration, rate

if TYPE_CHECKING:
    from cunorm.explanation import Explanation, LaunchExplanation

__all__ = ["as_html", "draw"]

_ORANGE, _SKY, _GREEN, _BLUE, _VERMILION = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
_FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""
_WIDTH = 960
_LEFT, _STRIP = 24, 560  # where strips begin, and how long they are
_RIGHT = _LEFT + _STRIP + 40  # where the levels of memory begin
_PANEL = _WIDTH - _RIGHT - 24
_MOST_CELLS = 32
_MOST_STRIPES = 5


def as_html(explanation: Explanation) -> str:
    """What a notebook shows: the diagram, and all numbers behind a click."""
    text = escape(str(explanation))
    return f"{draw(explanation)}<details><summary>All numbers</summary><pre>{text}</pre></details>"


def draw(explanation: Explanation, background: str = "") -> str:
    """The diagram, on a ``background`` or none."""
    canvas = _Canvas()
    size = " × ".join(f"{length:,}" for length in explanation.shape)
    title = f"{explanation.op} of {size} {explanation.dtype}"
    bottom = canvas.lines(_LEFT, 34, f"{title} on {explanation.title.partition(', for want')[0]}", 96, 17, bold=True)
    main = explanation.main
    head = f"strategy {explanation.strategy}, {explanation.chosen}"
    if main and main.share:
        of = f": launch {1 + explanation.launches.index(main)} of {len(explanation.launches)}"
        head += f"; {main.kernel}" + of * (len(explanation.launches) > 1)
    top = canvas.lines(_LEFT, bottom + 4, head, 130) + 14
    bottom = max(_draw_levels(canvas, explanation, top), _draw_memory(canvas, explanation, top))
    if len(explanation.launches) > 1 or (main and not main.share):
        bottom = _draw_launches(canvas, explanation, bottom + 16)
    return canvas.finished(title, bottom + 12, background)


class _Canvas:
    """The elements of an SVG, in the order in which they are drawn."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        """A filled box; without a colour that of the text, faint."""
        paint = f'fill="{fill}" fill-opacity="{opacity:g}"' if fill else 'fill="currentColor" fill-opacity="0.07"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._elements.append(f'<rect {place} {paint} stroke="currentColor" stroke-opacity="0.45"/>')

    def zoom(self, left: float, right: float, y: float, to_left: float, to_right: float, to_y: float) -> None:
        """From a part of something to that part, drawn larger below."""
        points = f"{left:.1f},{y:.1f} {right:.1f},{y:.1f} {to_right:.1f},{to_y:.1f} {to_left:.1f},{to_y:.1f}"
        self._elements.append(f'<polygon points="{points}" fill="{_BLUE}" fill-opacity="0.12"/>')

    def lines(self, x: float, y: float, text: str, width: int, size: float = 13, bold: bool = False) -> float:
        """Text in lines of up to so many characters, the first at ``y``. Returns where a next one would be."""
        weight = ' font-weight="600"' if bold else ""
        for line in textwrap.wrap(text, width):
            place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{weight}'
            self._elements.append(f'<text {place} fill="currentColor">{escape(line)}</text>')
            y += size * 1.35
        return y

    def finished(self, title: str, height: float, background: str) -> str:
        box = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}"'
        paper = f'<rect width="100%" height="100%" fill="{background}"/>' if background else ""
        color = ' color="black"' if background else ""
        style = 'style="max-width:100%;height:auto"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} {style} {_FONT}{color}>'
        return f"{opening}<title>{escape(title)}</title>{paper}{''.join(self._elements)}</svg>"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what if number != 1 else what.removesuffix('s')}"


def _draw_levels(canvas: _Canvas, explanation: Explanation, top: float) -> float:
    main = explanation.main
    if main is None or main.share is None or 0 in explanation.area:
        return canvas.lines(_LEFT, top + 13, "No kernel has rows to work on.", 80)
    (row, column), (rows, columns) = explanation.area_of, explanation.area
    share_rows, share_columns = main.share
    text = f"{_count(rows, row)} of {_count(columns, column)}; a block takes "
    if share_columns == columns:
        text += _count(share_rows, f"whole {row}")
    else:
        text += f"{_count(share_columns, column)} of {_count(share_rows, row)}"
    text += f" at a time, in {main.turns:,} turns" * (main.turns > 1)
    text += f"; {main.blocks_per_row:,} blocks share a {row[:-1]}" * (main.blocks_per_row > 1)
    stripes, pieces = -(-rows // share_rows), main.blocks_per_row
    shown_stripes, shown_pieces = min(stripes, _MOST_STRIPES), min(pieces, _MOST_CELLS)
    each = f", {share_rows:,} {row} each" * (share_rows > 1)
    of = [f"{shown_stripes} of {stripes:,}{each}"] * (stripes > shown_stripes or stripes > 1 < share_rows)
    of += [f"{shown_pieces} of {pieces:,} blocks"] * (shown_pieces < pieces)
    y = canvas.lines(_LEFT, top + 13, text + f" (drawn: {'; '.join(of)})" * bool(of), 80) - 8
    for stripe in range(shown_stripes):
        for piece in range(shown_pieces):
            fill = "" if stripe < shown_stripes - 1 else _SKY if piece else _BLUE
            canvas.box(_LEFT + piece * _STRIP / shown_pieces, y, _STRIP / shown_pieces, 12, fill)
        y += 12
    above = float(_LEFT), _LEFT + _STRIP / shown_pieces, float(y)

    text = _count(main.grid, "blocks")
    if main.cluster > 1:
        text += f" in {_count(main.grid // main.cluster, 'clusters')} of {main.cluster}"
    if main.waves and main.blocks_per_multiprocessor:
        text += f"; {explanation.device.multiprocessors} multiprocessors have room for {main.blocks_per_multiprocessor}"
        text += f" each, limited by {main.limited_by}: "
        text += f"{main.waves:.3g} waves" if main.waves > 1 else "all run at once"
        text += ", and wait for each other" * main.cooperative
    stride = main.block_stride
    peers = [i % stride == 0 and i // stride < main.blocks_per_row for i in range(_MOST_CELLS)]
    above = _draw_strip(canvas, above, text, main.grid, peers, together=main.cluster)
    per_row, lanes, groups = main.threads_per_row, min(32, main.threads), main.threads // main.threads_per_row
    text = f"{_count(main.warps, 'warps')} a block, {_count(main.threads, 'threads')}"
    if groups > 1:
        each = "each" if groups >= share_rows else f"each {-(-share_rows // groups)}"
        text += f": {_count(per_row, 'threads')} for {each} of {_count(share_rows, row)}"
    elif per_row < main.threads:
        text += f", {main.threads - per_row} of them for what the blocks tell each other"
    threads = range(main.threads)
    alike = [i % main.thread_stride == 0 and i // main.thread_stride < per_row for i in threads]
    warps = [any(alike[i : i + 32]) for i in threads[::32]]
    above = _draw_strip(canvas, above, text, main.warps, warps)
    above = _draw_strip(canvas, above, f"{_count(lanes, 'threads')} a warp", lanes, alike)
    elements = main.vector_bytes // DTYPES[explanation.dtype].itemsize
    held = "A thread has on the way" if explanation.lives_in.startswith("nowhere") else "A thread holds"
    text = f"{held} {_count(main.vectors, 'vectors')} of each tensor, of {_count(main.vector_bytes, 'bytes')}: "
    text += f"{elements} {explanation.dtype}"
    text += " of as many channels" * (main.constants.get("ALONG_CHANNELS") == 1)
    _, _, y = _draw_strip(canvas, above, text, main.vectors, [True] * _MOST_CELLS, parts=elements)
    legend = f"Dark blue: drawn larger below. Light blue: of the same {row[:-1]}. Grey: of others."
    return canvas.lines(_LEFT, y + 20, legend, 90, 11)


def _draw_strip(
    canvas: _Canvas,
    above: tuple[float, float, float],
    text: str,
    count: int,
    alike: Sequence[bool],
    together: int = 1,
    parts: int = 1,
) -> tuple[float, float, float]:
    """A row of cells, of which the first is what is drawn larger below; others belong to the same row if ``alike``.

    ``above`` is what this is drawn larger of: left, right, bottom; of the first cell the same is returned. Cells stand
    so many ``together``, and have ``parts``.
    """
    shown = min(count, _MOST_CELLS)
    y = canvas.lines(_LEFT, above[2] + 36, text + f" (drawn: {shown})" * (shown < count), 80) - 8
    gap, gaps = 6 if together > 1 else 2, (shown - 1) // together
    width = (_STRIP - gap * gaps) / max(shown, 4)
    canvas.zoom(*above, _LEFT, _LEFT + shown * width + gaps * gap, y)
    parts = parts if width > 4 * parts else 1
    for cell in range(shown):
        left, fill = _LEFT + cell * width + cell // together * gap, _SKY if alike[cell] else ""
        for part in range(parts):
            canvas.box(left + part * width / parts, y, width / parts, 18, fill if cell else _BLUE)
    return _LEFT, _LEFT + width, y + 18


def _draw_memory(canvas: _Canvas, explanation: Explanation, top: float) -> float:
    main, row = explanation.main, explanation.area_of[0].removesuffix("s")
    lives, again, through = explanation.lives_in, explanation.bytes_read_again, explanation.bytes_through_shared
    shared = registers = ""
    if main and main.shared_bytes is not None:
        shared = f"{byte_count(main.shared_bytes)} a block. "
        spills = f"{byte_count(main.spill_bytes or 0)} spilled" if main.spill_bytes else "none spilled"
        registers = f"{main.registers} of a thread, {spills}. "
    passing = "Tensors are copied into it, and read from there." if through else "Tensors do not go through it."
    found = "Read again: from L2 where it is still there, else from memory." if again else "Nothing is read again."
    levels = [
        ("memory", _VERMILION, explanation.bytes_moved, f"Must move: {explanation.moves}."),
        ("L2 cache", _ORANGE, again, found),
        ("shared memory", _GREEN, through, shared + passing),
        ("registers", _BLUE, None, registers),
    ]
    most = max(1, explanation.bytes_moved, again, through)
    y = top + 13
    for name, color, count, note in levels:
        label = name if count is None else f"{name}: {byte_count(count)}"
        here = f"the {name}" in lives
        y = canvas.lines(_RIGHT, y, "● " * here + label, 60, bold=True)
        if count:
            canvas.box(_RIGHT, y - 8, max(1.0, _PANEL * count / most), 8, color)
            y += 16
        y = canvas.lines(_RIGHT, y, note, 48, 12) + 8
    where = f"Between its sums and its result, a {row} lives {lives}."
    if lives.startswith("nowhere: "):
        where = f"{lives.removeprefix('nowhere: ').capitalize()}."
    y = canvas.lines(_RIGHT, y, "● " * lives.startswith("in") + where, 48, 12) + 14
    return _draw_times(canvas, explanation, y)


def _draw_times(canvas: _Canvas, explanation: Explanation, y: float) -> float:
    floor, seconds, copy = explanation.floor_seconds, explanation.seconds, explanation.copy_seconds
    if floor is None or explanation.copy_rate is None:
        return canvas.lines(_RIGHT, y, f"Floor {explanation.copy_rate_is}.", 48, 12)
    times = [(f"Floor: {duration(floor)}", floor, "")]
    if seconds is not None and copy is not None:
        times.append((f"A copy of as many bytes: {duration(copy)}", copy, ""))
        times.append((f"Measured: {duration(seconds)}, r = {explanation.r:.3f}", seconds, _SKY))
    for label, length, color in times:
        y = canvas.lines(_RIGHT, y, label, 60, bold=True)
        if len(times) > 1:
            canvas.box(_RIGHT, y - 8, _PANEL * length / max(length for _, length, _ in times), 8, color)
            y += 18
    return canvas.lines(_RIGHT, y, f"At {rate(explanation.copy_rate)}, {explanation.copy_rate_is}.", 48, 12)


def _draw_launches(canvas: _Canvas, explanation: Explanation, top: float) -> float:
    bottom = canvas.lines(_LEFT, top, "All launches, one after the other", 80, bold=True)
    gap, count = 24, len(explanation.launches)
    width = min(280.0, (_WIDTH - 2 * _LEFT - gap * (count - 1)) / count)
    for place, item in enumerate(explanation.launches):
        x = _LEFT + place * (width + gap)
        canvas.box(x, bottom - 6, width, 62, _SKY if item == explanation.main else "", 0.35)
        if place:
            canvas.lines(x - gap + 5, bottom + 28, "→", 2, 15)
        canvas.lines(x + 8, bottom + 11, f"{place + 1}  {item.kernel}", 40, 12, bold=True)
        canvas.lines(x + 8, bottom + 29, f"{_count(item.grid, 'blocks')} of {_count(item.threads, 'threads')}", 40, 12)
        canvas.lines(x + 8, bottom + 46, _traffic(item), 40, 12)
    return bottom + 62


def _traffic(item: LaunchExplanation) -> str:
    parts = [(item.bytes_read, "reads"), (item.bytes_written, "writes")]
    return ", ".join(f"{verb} {byte_count(count)}" for count, verb in parts if count) or "nothing of x's size"
