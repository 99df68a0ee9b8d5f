"""How long the ways to compute norms of channels take, to which `cunorm.plan.channel_cost` was fitted.

    python bench/tools/ways.py measure FILE.json
    python bench/tools/ways.py measure FILE.json --problems OTHER.json --family ChannelPipeline --most 30 --seconds 500
    python bench/tools/ways.py regret FILE.json

``measure`` times the most promising ways of every family for problems of models, on the GPU here; or for those of
another such file, of some families alone, as many as can be in a time. ``regret`` says how much longer the way takes
that the costs put first than the best: after a change of the costs, or on another GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from cunorm.plan import Device, Plan, Way, candidates, plan_with
from cunorm.plan.channel_cost import cost
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.problem import ChannelProblem
from cunorm.tuning import checked_problems
from cunorm.tuning.gpu import current_gpu
from cunorm.tuning_file import parsed_geometry

__all__ = ["FAMILIES", "PROBLEMS", "measure", "problems_of", "regrets"]

FAMILIES = [family.__name__ for family in (Slab, Grid, ChannelPipeline, Split)]

# Shapes with the channels second: those of convolutional networks, of diffusion models, of segmentation in three
# dimensions and of style transfer.
_Shapes = list[tuple[int, ...]]
_BATCH: _Shapes = [
    (64, 144, 56, 56), (64, 240, 28, 28), (64, 96, 112, 112), (8, 64, 128, 128), (64, 64, 56, 56), (64, 64, 112, 112),
    (256, 256, 14, 14), (64, 128, 28, 28), (64, 256, 14, 14), (64, 672, 14, 14), (64, 512, 7, 7), (4, 32, 96, 96, 96),
    (64, 1024, 14, 14),
]  # fmt: skip
_BATCH_SECOND: _Shapes = [(64, 512, 7, 7), (64, 1152, 7, 7), (64, 672, 14, 14), (256, 256, 14, 14), (4, 32, 96, 96, 96)]
_INSTANCE: _Shapes = [
    (2, 128, 32, 32, 32), (4, 64, 128, 128), (1, 64, 256, 256), (2, 256, 16, 16, 16), (4, 128, 64, 64),
    (2, 320, 8, 8, 8),
]  # fmt: skip
_GROUP: _Shapes = [
    (2, 320, 64, 64), (2, 640, 64, 64), (2, 640, 32, 32), (2, 1920, 32, 32), (8, 640, 32, 32), (1, 256, 256, 256),
    (1, 512, 64, 64), (2, 1280, 16, 16),
]  # fmt: skip
_GROUP_SECOND: _Shapes = [(1, 256, 256, 256), (1, 512, 256, 256)]


def _problems() -> Iterator[dict[str, Any]]:
    """The arguments of `cunorm.tune` for each."""
    kinds: list[tuple[str, _Shapes, str, str, tuple[str | None, ...]]] = [
        ("batch_norm", _BATCH, "N...C", "float16", (None,)),
        ("batch_norm", _BATCH_SECOND, "NC...", "float16", (None,)),
        ("instance_norm", _INSTANCE, "N...C", "float16", (None,)),
        ("instance_norm", [(4, 64, 128, 128), (4, 32, 256, 256)], "N...C", "float32", (None,)),
        ("group_norm", _GROUP, "N...C", "float16", (None, "silu")),
        ("group_norm", _GROUP_SECOND, "NC...", "float16", (None, "silu")),
    ]
    for op, shapes, data_format, dtype, activations in kinds:
        for sizes in shapes:
            shape = sizes if data_format == "NC..." else (sizes[0], *sizes[2:], sizes[1])
            groups = {"num_groups": 32} if op == "group_norm" else {}
            for activation in activations:
                for direction in ("forward", "backward"):
                    options = {"op": op, "shape": shape, "dtype": dtype, "direction": direction}
                    yield options | {"data_format": data_format, "activation": activation} | groups


PROBLEMS = list(_problems())


def _problem(options: dict[str, Any]) -> ChannelProblem:
    (problem,) = checked_problems(**options)
    return problem  # type: ignore[return-value]


def _chosen(problem: ChannelProblem, device: Device, families: Sequence[str], most: int) -> dict[Plan, Way]:
    """The most promising ways of each of these families, which have costs, by their plans."""
    counts = dict.fromkeys(families, 0)
    chosen: dict[Plan, Way] = {}
    for way in candidates(problem, device):
        family = type(way).__name__
        if counts.get(family, most) < most:
            counts[family] += 1
            chosen.setdefault(plan_with(problem, device, way), way)
    return chosen


def _compile(problems: Sequence[dict[str, Any]], families: Sequence[str], most: int) -> None:
    """Have all of their kernels in CuPy's cache on disk."""
    for options in problems:
        problem = _problem(options)
        machine: Any = current_gpu(problem)
        if chosen := list(_chosen(problem, machine.device, families, most)):
            machine.compile(chosen, math.inf, lambda *_: None)
        machine.release()


def compile_in_processes(problems: Sequence[dict[str, Any]], families: Sequence[str], most: int) -> None:
    """Compile all that `measure` will time, by as many processes as there are cores: the compiler has locks."""
    count = os.cpu_count() or 1
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_compile, problems[i::count], families, most) for i in range(count)]:
            done.result()


def measure(
    path: Path,
    problems: Sequence[dict[str, Any]] = PROBLEMS,
    families: Sequence[str] = FAMILIES,
    most: int = 8,
    until: float = math.inf,
) -> None:
    """Time up to so many ways of each family for every problem, with a cold cache, and write the times.

    What is not begun ``until`` then, by `time.monotonic`, is left out.
    """
    found: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    for options in track(problems, console=Console(stderr=True)):
        if time.monotonic() > until:
            break
        problem = _problem(options)
        machine: Any = current_gpu(problem)
        try:
            chosen = _chosen(problem, machine.device, families, most)
            if not chosen:
                continue
            machine.compile(list(chosen), math.inf, lambda *_: None)
            machine.load_copy("copy", problem.bytes_moved // 2)
            machine.samples("copy", 45)
            times = {plan: _microseconds(machine, plan) for plan in chosen}
            ways = [[dataclasses.asdict(way), type(way).__name__, times[plan]] for plan, way in chosen.items()]
            found.append(options | {"copy": _microseconds(machine, "copy"), "ways": ways})
            content = {"gpu": machine.gpu, "memory_rate": machine.device.memory_rate}
        finally:
            machine.release()
    today = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content |= {"date": today, "problems": found}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def _microseconds(machine: Any, what: Plan | str) -> float:
    return round(float(np.median(machine.samples(what, 21))) * 1e6, 2)


def problems_of(path: Path) -> list[dict[str, Any]]:
    """The arguments of `cunorm.tune` for the problems of a file."""
    entries = json.loads(path.read_text("utf-8"))["problems"]
    return [{name: value for name, value in entry.items() if name not in ("copy", "ways")} for entry in entries]


def regrets(path: Path) -> list[tuple[dict[str, Any], float]]:
    """For each problem, the time of the way that the costs put first over that of the best."""
    content = json.loads(path.read_text("utf-8"))
    device = Device(memory_rate=content["memory_rate"])
    found = []
    for options, entry in zip(problems_of(path), content["problems"]):
        problem = _problem(options)
        ways: list[tuple[Any, float]] = [(parsed_geometry(way), seconds) for way, _, seconds in entry["ways"]]
        _, first = min(ways, key=lambda item: cost(item[0], problem, device))
        found.append((options, first / min(seconds for _, seconds in ways)))
    return found


def _print_regrets(path: Path) -> None:
    every = regrets(path)
    for options, regret in sorted(every, key=lambda item: -item[1]):
        print(f"{regret:.2f}", " ".join(str(value) for value in options.values() if value))
    print(f"{sum(regret for _, regret in every) / len(every):.3f} on average of {len(every)}")


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("what", choices=("measure", "regret"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--problems", type=Path, metavar="FILE", help="whose problems to time")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="all by default")
    parser.add_argument("--most", type=int, default=8, help="ways of a family, for each problem (default 8)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other problem is begun")
    given = parser.parse_args(arguments)
    if given.what == "regret":
        _print_regrets(given.file)
        return
    begin = time.monotonic()
    problems = PROBLEMS if given.problems is None else problems_of(given.problems)
    families = given.family or FAMILIES
    compile_in_processes(problems, families, given.most)
    measure(given.file, problems, families, given.most, begin + given.seconds)
    print(f"written: {given.file}, in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
