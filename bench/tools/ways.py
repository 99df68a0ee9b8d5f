"""How long the ways to compute norms of channels take, to which `cunorm.plan.channel_cost` was fitted.

    python bench/tools/ways.py measure FILE.json
    python bench/tools/ways.py regret FILE.json

``measure`` times the most promising ways of every family for problems of models, on the GPU here. ``regret`` says how
much longer the way takes that the costs put first than the best: after a change of the costs, or on another GPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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

__all__ = ["PROBLEMS", "measure", "regrets"]

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


def _chosen(problem: ChannelProblem, device: Device, most: int) -> dict[Plan, Way]:
    """The most promising ways of each family that has a cost, by their plans."""
    counts = dict.fromkeys((Slab, Grid, ChannelPipeline, Split), 0)
    chosen: dict[Plan, Way] = {}
    for way in candidates(problem, device):
        if type(way) in counts and counts[type(way)] < most:
            counts[type(way)] += 1
            chosen.setdefault(plan_with(problem, device, way), way)
    return chosen


def measure(path: Path, problems: Sequence[dict[str, Any]] = PROBLEMS, most: int = 8) -> None:
    """Time up to so many ways of each family for every problem, with a cold cache, and write the times."""
    found: list[dict[str, Any]] = []
    for number, options in enumerate(problems):
        problem = _problem(options)
        machine: Any = current_gpu(problem)
        try:
            chosen = _chosen(problem, machine.device, most)
            machine.compile(list(chosen), math.inf, lambda *_: None)
            machine.load_copy("copy", problem.bytes_moved // 2)
            machine.samples("copy", 45)
            times = {plan: _microseconds(machine, plan) for plan in chosen}
            ways = [[dataclasses.asdict(way), type(way).__name__, times[plan]] for plan, way in chosen.items()]
            found.append(options | {"copy": _microseconds(machine, "copy"), "ways": ways})
        finally:
            machine.release()
        print(f"{number + 1} of {len(problems)}", file=sys.stderr)
    today = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {"gpu": machine.gpu, "memory_rate": machine.device.memory_rate, "date": today, "problems": found}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def _microseconds(machine: Any, what: Plan | str) -> float:
    return round(float(np.median(machine.samples(what, 21))) * 1e6, 2)


def regrets(path: Path) -> list[tuple[dict[str, Any], float]]:
    """For each problem, the time of the way that the costs put first over that of the best."""
    content = json.loads(path.read_text("utf-8"))
    device = Device(memory_rate=content["memory_rate"])
    found = []
    for entry in content["problems"]:
        options = {name: value for name, value in entry.items() if name not in ("copy", "ways")}
        problem = _problem(options)
        ways: list[tuple[Any, float]] = [(parsed_geometry(way), seconds) for way, _, seconds in entry["ways"]]
        _, first = min(ways, key=lambda item: cost(item[0], problem, device))
        found.append((options, first / min(seconds for _, seconds in ways)))
    return found


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2 or arguments[0] not in ("measure", "regret"):
        sys.exit(__doc__)
    path = Path(arguments[1])
    if arguments[0] == "measure":
        begin = time.monotonic()
        measure(path)
        print(f"written: {path}, in {time.monotonic() - begin:.0f} s")
        return
    every = regrets(path)
    for options, regret in sorted(every, key=lambda item: -item[1]):
        print(f"{regret:.2f}", " ".join(str(value) for value in options.values() if value))
    print(f"{sum(regret for _, regret in every) / len(every):.3f} on average of {len(every)}")


if __name__ == "__main__":
    main(sys.argv[1:])
