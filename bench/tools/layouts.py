"""Which rows had better lie otherwise over threads and blocks than is built in: `cunorm.tune` for a grid of problems.

    python bench/tools/layouts.py measure FILE.json --op rms_norm --rows 200,512,1024 --columns 5120,8192
    python bench/tools/layouts.py show FILE.json

``measure`` times every layout that `cunorm.tune` tries, of up to so many vectors of a thread, beside the built-in one,
on the GPU here; ``show`` prints where another is faster, the most first. Rules of ``cunorm/plan/row_*.py`` were found
so: 10,000 layouts take some minutes, most of which is compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from cunorm import compiling, cuda
from cunorm.plan import Device, Plan, RowBlock, plan_with
from cunorm.plan.row_candidates import in_blocks
from cunorm.problem import Problem
from cunorm.tuning import DIRECTIONS, checked_problems
from cunorm.tuning.gpu import current_gpu

__all__ = ["compile_in_processes", "faster", "layouts_of", "measure", "problems"]

# Of a layout first, and then of the best and of the built-in one.
_FEW_SAMPLES, _MORE_SAMPLES, _BEST = 5, 21, 4


def problems(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The arguments of `cunorm.tune` for each: of every number of columns, and of rows."""
    for columns, rows in itertools.product(arguments.columns, arguments.rows):
        options = {"op": arguments.op, "shape": (rows, columns), "dtype": arguments.dtype}
        more = {"direction": arguments.direction, "activation": arguments.activation, "residual": arguments.residual}
        yield options | more


def _problem(options: dict[str, Any]) -> Problem:
    (problem,) = checked_problems(**options)
    return problem  # type: ignore[return-value]


def layouts_of(problem: Problem, device: Device, most_vectors: int) -> dict[Plan, RowBlock | None]:
    """Plans and their layouts: first the built-in choice, which is None."""
    found: dict[Plan, RowBlock | None] = {plan_with(problem, device, None): None}
    for layout in in_blocks(problem, device):
        if layout.vectors <= most_vectors:
            found.setdefault(plan_with(problem, device, layout), layout)
    return found


def _compile(functions: Sequence[Any]) -> None:
    for function in functions:
        try:
            compiling.compiled_function(*function)
        except RuntimeError:  # it asks for more than there is, as `measure` will find too
            continue


def compile_in_processes(plans: Sequence[Plan]) -> None:
    """Have all of their kernels in CuPy's cache on disk, by as many processes as there are cores."""
    functions = list(dict.fromkeys((*item.function_key, 0) for plan in plans for item in plan.launches))
    count = os.cpu_count() or 1
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_compile, functions[i::count]) for i in range(count)]:
            done.result()


def measure(path: Path, every: Sequence[dict[str, Any]], device: Device, most_vectors: int) -> None:
    """Time the layouts of each problem, with a cold L2 cache, and write microseconds."""
    content: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    layouts_of_all = [layouts_of(_problem(options), device, most_vectors) for options in every]
    compile_in_processes([plan for layouts in layouts_of_all for plan in layouts])
    for options, layouts in track(list(zip(every, layouts_of_all)), console=Console(stderr=True)):
        problem = _problem(options)
        machine: Any = current_gpu(problem)
        try:
            built_in, *others = machine.compile(list(layouts), math.inf, lambda *_: None)
            machine.load_copy("copy", problem.bytes_moved // 2)
            times = {plan: _microseconds(machine, plan, _FEW_SAMPLES) for plan in (built_in, *others)}
            for plan in {built_in, *sorted(others, key=lambda plan: times[plan])[:_BEST]}:
                times[plan] = _microseconds(machine, plan, _MORE_SAMPLES)
            ways = [[dataclasses.asdict(way), times[plan]] for plan in others if (way := layouts[plan]) is not None]
            copy = _microseconds(machine, "copy", _MORE_SAMPLES)
            found.append(options | {"copy": copy, "built_in": times[built_in], "layouts": ways})
            content = {"gpu": machine.gpu}
        finally:
            machine.release()
    content |= {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "problems": found}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def _microseconds(machine: Any, what: Plan | str, count: int) -> float:
    return round(float(np.median(machine.samples(what, count))) * 1e6, 2)


def faster(path: Path) -> list[tuple[float, str]]:
    """For each problem the time of the best layout over that of the built-in one, and what it is; the least first."""
    lines = []
    for entry in json.loads(path.read_text("utf-8"))["problems"]:
        copy, built_in = entry.pop("copy"), entry.pop("built_in")
        layout, best = min(entry.pop("layouts"), key=lambda item: item[1], default=({}, math.inf))
        what = " ".join(str(value) for value in entry.values() if value)
        lies = ", ".join(f"{name}={value}" for name, value in layout.items())
        lines.append((best / built_in, f"{what}: r {built_in / copy:.2f}, {best / copy:.2f} by {lies}"))
    return sorted(lines)


def _counts(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("what", choices=("measure", "show"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--op", choices=("layer_norm", "rms_norm"), default="layer_norm")
    parser.add_argument("--rows", type=_counts, default=[200, 512, 1024], metavar="N,N...")
    parser.add_argument("--columns", type=_counts, default=[5120, 8192, 16384], metavar="N,N...")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--direction", choices=DIRECTIONS[:2], default="forward")
    parser.add_argument("--activation")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--most-vectors", type=int, default=8, help="of a thread (default 8)")
    given = parser.parse_args(arguments)
    if given.what == "measure":
        measure(given.file, list(problems(given)), cuda.device(0), given.most_vectors)
    for share, line in faster(given.file):
        print(f"{share:.2f} {line}")


if __name__ == "__main__":
    main()
