"""``python -m cunorm tune``: the fastest plan for a problem on this GPU, kept for the calls to come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cunorm import gpus
from cunorm.cli import UsageError, output
from cunorm.cli.options import check_op_options
from cunorm.plan import RowBlock, Way
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.tuning import TuneResult, checked_problems, tune_problem
from cunorm.tuning_file import TuningFile, default_path

__all__ = ["described", "run"]

_COLUMNS = ("problem", "direction", "built in", "best", "faster", "plans timed", "how numbers lie over threads")
_FAMILIES = {Slab: "slabs", Grid: "slabs for all blocks", ChannelPipeline: "slabs in a pipeline"}
_NUMBERS = ("built in", "best", "faster", "plans timed")


def run(
    op: str,
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    *,
    direction: str = "forward",
    affine_dtype: str | None = None,
    activation: str | None = None,
    residual: bool = False,
    num_groups: int | None = None,
    data_format: str = "NC...",
    max_seconds: float = 30.0,
    file: Path | None = None,
    clear: bool = False,
) -> None:
    """Tune for every shape, in ``max_seconds`` together; before that, ``clear`` removes what was found before."""
    if not shapes and not clear:
        raise UsageError("name a shape, such as --shape 4096x8192; or forget what was found with --clear")
    if not max_seconds > 0:
        raise UsageError(f"--max-seconds {max_seconds} must be positive")
    path = file or default_path()
    if path is None:
        raise UsageError("there is no home folder to store the result in; set CUNORM_CACHE_DIR, or use --file")
    if shapes:
        check_op_options(op, residual=residual, num_groups=num_groups, data_format=data_format)
    vector = affine_dtype or True
    options: dict[str, Any] = {"weight": vector, "bias": False if op == "rms_norm" else vector, "residual": residual}
    options |= {"num_groups": num_groups, "data_format": data_format}
    work = []
    for shape in shapes:
        try:
            problems = checked_problems(op, shape, dtype, direction, activation=activation, **options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--shape {'x'.join(map(str, shape))}: {error}") from error
        work += [(op, shape, problem) for problem in problems]
    if work:
        names, reason = gpus.cuda_devices()
        if not names:
            raise UsageError(f"it needs an NVIDIA GPU: {reason}")
    if clear:
        _clear(path)
    if work:
        _tune(work, max_seconds, path)


def _clear(path: Path) -> None:
    try:
        done = TuningFile(path).clear()
    except OSError as error:
        raise UsageError(f"{path} cannot be removed: {error}") from error
    output.line(f"{done}: {path}" if done else f"nothing to remove: there is no {path}")


def _tune(work: Sequence[tuple[str, tuple[int, ...], Any]], max_seconds: float, path: Path) -> None:
    end = time.monotonic() + max_seconds
    on_terminal = output.console().is_terminal
    results = []
    with output.progress() as report:
        for place, (op, shape, problem) in enumerate(work):
            seconds = max(0.0, end - time.monotonic()) / (len(work) - place)
            try:
                result = tune_problem(op, problem, shape, seconds, path, report)
            except RuntimeError as error:
                raise UsageError(f"--shape {'x'.join(map(str, shape))}: {error}") from error
            results.append(_cells(result))
            if not on_terminal:
                output.line(" | ".join(results[-1]))
    if on_terminal:
        output.table(_COLUMNS, results, numbers=_NUMBERS)
    output.line(f"written: {path}" + ("" if path == default_path() else ", which is not the file that cunorm reads"))


def _cells(result: TuneResult) -> tuple[str, ...]:
    faster = result.built_in_seconds / result.seconds - 1
    return (
        f"{result.op} {'x'.join(map(str, result.shape))} {result.dtype}",
        result.direction,
        output.duration(result.built_in_seconds),
        output.duration(result.seconds),
        f"{100 * faster:.0f} %" if result.geometry else "-",
        f"{result.tried} of {result.candidates}",
        "as built in" if result.geometry is None else described(result.geometry),
    )


def described(geometry: Way) -> str:
    """A geometry in words."""
    if isinstance(geometry, Split):
        return "two passes over memory"
    if isinstance(geometry, RowBulk | RowBulkBackward):
        words = [
            f"{geometry.threads_per_row} threads a row, {geometry.vectors} vectors of {geometry.width} each",
            f"runs of {geometry.rows_per_block} rows in bulk, {geometry.rows_at_once} at once",
        ]
        return ", ".join(words)
    if not isinstance(geometry, RowBlock):
        tiles = geometry.tiles
        words = [
            _FAMILIES[type(geometry)],
            f"{geometry.blocks_per_slab} blocks for {tiles.channels} channels",
            f"{tiles.threads} threads a block",
            f"vectors of {tiles.width} along the {'channels' if tiles.along_channels else 'points'}",
        ]
        return ", ".join(words)
    words = [
        f"{geometry.threads_per_row} threads a row and block, {geometry.vectors} vectors of {geometry.width} each",
        f"{geometry.rows_per_block} rows a block" if geometry.rows_per_block > 1 else "",
        f"{geometry.blocks_per_row} blocks a row" if geometry.blocks_per_row > 1 else "",
        geometry.stage if geometry.stage != "direct" else "",
        "peeled" if geometry.peeled else "",
        f"weights {geometry.weights}" if geometry.weights != "late" else "",
        f"{geometry.blocks_per_multiprocessor} a multiprocessor" if geometry.blocks_per_multiprocessor else "",
    ]
    return ", ".join(word for word in words if word)
