"""Tuning of the norms of channels: every way is right, what is found is kept for the shape, and calls use it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import channel_cases
import pytest
from channel_cases import Shape
from emulator_cases import NEEDS_COMPILER
from tuning_cases import DEVICE, GPU, FakeMachine, entry_of

import cunorm
from cunorm.channel_norm import ChannelNorm
from cunorm.plan import Device, Plan, RowBlock, candidates, fitted, plan, plan_with
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.problem import ChannelBackward, ChannelForward, ChannelProblem, View, contiguous_strides
from cunorm.tuning import checked_problems
from cunorm.tuning_file import TuningFile, key_of

SHAPE = (8, 64, 64, 320)
GROUPS: dict[str, Any] = {"op": "group_norm", "num_groups": 32, "data_format": "N...C"}


def problem_of(*shape: int, dtype: str = "float16", **options: Any) -> ChannelProblem:
    (problem,) = checked_problems(shape=shape, dtype=dtype, **(GROUPS | options))
    assert isinstance(problem, (ChannelForward, ChannelBackward))
    return problem


def other_ways(problem: ChannelProblem) -> list[Any]:
    built_in = plan(problem, DEVICE)
    return [way for way in candidates(problem, DEVICE) if plan_with(problem, DEVICE, way) != built_in]


# ---- The ways.

KINDS: list[Shape] = [
    Shape("instance_norm", (9, 5, 7, 7), "NCHW"),
    Shape("instance_norm", (3, 5, 1040), "NCW"),
    Shape("instance_norm", (3, 5, 1041), "NCW"),
    Shape("group_norm", (2, 8, 6, 6), "NCHW", 2),
    Shape("group_norm", (2, 12, 512), "NCW", 2),
    Shape("group_norm", (3, 6, 6, 16), "NHWC", 4),
    Shape("batch_norm", (3, 6, 6, 16), "NHWC"),
    Shape("batch_norm", (8, 4, 8, 8), "NCHW"),
]
SMALL = Device("sm_90", multiprocessors=4, threads_per_multiprocessor=1024, clusters=(2, 1, 0, 0))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_every_kind_of_way_is_right(shape: Shape, dtype: str) -> None:
    """Of every family, layout and way to come a way that is drawn."""
    seen: set[Any] = set()

    def kind(way: Any) -> Any:
        if isinstance(way, RowBlock):
            return way.stage, way.peeled, way.weights, way.blocks_per_row > 1, way.blocks_per_multiprocessor > 0
        tiles = None if isinstance(way, Split) else way.tiles.direction.along_channels
        return type(way), tiles

    def choose(problem: Any, device: Device) -> Plan:
        every = sorted(candidates(problem, device), key=lambda way: random.Random(repr(way)).random())
        way = next((way for way in every if (type(problem), kind(way)) not in seen), None)
        assert every
        if way is not None:
            seen.add((type(problem), kind(way)))
        return plan_with(problem, device, way)

    case = shape.case(dtype, activation="silu")
    before = -1
    while len(seen) > before:
        before = len(seen)
        channel_cases.check(channel_cases.EmulatorRunner(SMALL, choose), case)
    assert len(seen) >= 4


def test_the_most_promising_of_every_family_come_first() -> None:
    last, second = problem_of(*SHAPE), problem_of(8, 320, 64, 64, data_format="NC...")
    first = [type(way) for way in itertools.islice(candidates(last, DEVICE), 4)]
    assert first == [Split, Slab, Grid, ChannelPipeline]
    assert RowBlock in map(type, itertools.islice(candidates(second, DEVICE), 8))
    ways = list(candidates(last, DEVICE))
    assert len({*ways}) == len(ways) > 50


def test_what_cannot_be_held_is_not_tuned() -> None:
    assert not list(candidates(problem_of(*SHAPE, direction="backward", output_mask=(False, True, True)), DEVICE))
    way = Split()
    forward = problem_of(*SHAPE)
    assert isinstance(forward, ChannelForward)
    assert fitted(dataclasses.replace(forward, y=None), DEVICE, way) is None


# ---- What is kept.


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("data_format", ["NC...", "N...C"])
def test_what_is_stored_comes_back(cache_folder: Path, direction: str, data_format: str) -> None:
    shape = SHAPE if data_format == "N...C" else (8, 320, 64, 64)
    problem, file = (
        problem_of(*shape, data_format=data_format, direction=direction),
        TuningFile(cache_folder / "t.json"),
    )
    ways = {type(way): way for way in candidates(problem, DEVICE)}
    file.store(GPU, {kind.__name__: entry_of(way, *shape) for kind, way in ways.items()})
    assert {name: entry.geometry for name, entry in file.read()[GPU].items()} == {
        kind.__name__: way for kind, way in ways.items()
    }
    assert len(ways) >= (4 if data_format == "N...C" else 2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda way: way.pop("groups"),
        lambda way: way.update(groups="two"),
        lambda way: way.update(tiles=None),
        lambda way: way["tiles"].update(threads=-1),
        lambda way: way["tiles"].update(direction=[1, 8, 1]),
        lambda way: way["tiles"].update(direction=[True, 8]),
    ],
)
def test_a_way_that_makes_no_sense(cache_folder: Path, spoil: Callable[[Any], None]) -> None:
    file = TuningFile(cache_folder / "tuning.json")
    way = next(way for way in candidates(problem_of(*SHAPE), DEVICE) if isinstance(way, Grid))
    file.store(GPU, {"good": entry_of(way), "bad": entry_of(way)})
    content = json.loads(file.path.read_text())
    spoil(content["gpus"][GPU]["bad"]["geometry"])
    file.path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="1 of its entries are ignored, since they make no sense here"):
        assert file.read() == {GPU: {"good": entry_of(way)}}


def test_keys() -> None:
    def key(*shape: int, **options: Any) -> str:
        return key_of(problem_of(*(shape or SHAPE), **options))

    apart = [
        key(),
        key(7, 64, 64, 320),
        key(8, 64, 32, 320),
        key(8, 64, 64, 640),
        key(num_groups=16),
        key(op="instance_norm", num_groups=None),
        key(op="batch_norm", num_groups=None),
        key(8, 320, 64, 64, data_format="NC..."),
        key(activation="silu"),
        key(weight=False),
        key(bias="float32"),
        key(dtype="bfloat16"),
        key(direction="backward"),
        key(direction="backward", output_mask=(True, True, False)),
    ]
    assert len({*apart}) == len(apart)
    assert key() == key(8, 64, 64, 320, data_format="NHWC")
    forward = problem_of(*SHAPE)
    assert isinstance(forward, ChannelForward)
    assert key_of(dataclasses.replace(forward, stats=True, eps=0.5)) == key()


# ---- cunorm.tune, and the calls.


def prepare(op: str, shape: tuple[int, ...], strides: tuple[int, ...], data_format: str, groups: int | None) -> Any:
    """Prepare a forward call with weight and bias, as an adapter does for tensors on a GPU."""
    place, channels = ("cuda", 0), shape[1 if data_format == "NC..." else -1]
    x, vector = View(0, shape, strides, "float16", place), View(0, (channels,), (1,), "float16", place)
    return ChannelNorm.of(op, data_format, 1e-5, None, groups).prepare_forward(x, None, vector, vector, None, False)


def test_tune_stores_the_winner_and_the_next_call_uses_it(
    cache_folder: Path, fake_gpu: list[Plan], fake_machine: FakeMachine
) -> None:
    problem = problem_of(*SHAPE)
    best = other_ways(problem)[7]
    fastest = plan_with(problem, DEVICE, best)
    fake_machine.seconds = lambda chosen: 1e-5 / 1.25 if chosen == fastest else 1e-5
    (result,) = cunorm.tune(shape=SHAPE, dtype="float16", **GROUPS)
    assert (result.op, result.direction, result.shape, result.geometry) == ("group_norm", "forward", SHAPE, best)
    assert result.built_in_seconds / result.seconds == pytest.approx(1.25)

    # PyTorch's channels_last is the same.
    n, h, w, c = SHAPE
    prepare("group_norm", SHAPE, contiguous_strides(SHAPE), "N...C", 32)
    prepare("group_norm", (n, c, h, w), (h * w * c, 1, w * c, c), "NC...", 32)
    prepare("group_norm", (n, c, h, w), contiguous_strides((n, c, h, w)), "NC...", 32)
    assert fake_gpu[:2] == [fastest, fastest]
    assert fake_gpu[2] not in (fastest, plan(problem, DEVICE))


def test_a_tuned_problem_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch, fake_gpu: list[Plan]) -> None:
    looked_up: list[Any] = []
    monkeypatch.setattr("cunorm.prepare.entry_for", lambda problem, index: looked_up.append(problem))
    place, shape = ("cuda", 0), (4, 16, 10, 10)
    x = View(0, shape, contiguous_strides(shape), "float16", place)
    vector, moving = (View(0, (16,), (1,), dtype, place) for dtype in ("float16", "float32"))
    for name, sets in (("batch_norm", (16,)), ("instance_norm", (4, 16)), ("group_norm", (4, 4))):
        op = ChannelNorm.of(name, "NC...", 1e-5, None, 4 if name == "group_norm" else None)
        statistic = View(0, sets, contiguous_strides(sets), "float32", place)
        op.prepare_forward(x, None, vector, vector, None, True, (moving, moving) if name == "batch_norm" else ())
        op.prepare_backward(x, None, x, vector, None, statistic, statistic, (True, True, True), "float16")
    options = [{"op": "batch_norm"}, {"op": "instance_norm"}, {"op": "group_norm", "num_groups": 4}]
    tuned = [
        problem
        for each in options
        for problem in checked_problems(shape=shape, dtype="float16", direction="both", **each)
    ]
    assert [key_of(problem) for problem in looked_up] == [key_of(problem) for problem in tuned]


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("op is 'gelu', for which there is one plan", {"op": "gelu"}),
        ("num_groups", {"num_groups": 7}),
        ("num_groups", {"num_groups": None}),
        ("only group_norm has groups", {"op": "instance_norm"}),
        ("data_format", {"data_format": "CN"}),
        ("op is 'group_norm', which has no residual", {"residual": True}),
        ("op is 'group_norm', which has no axis", {"axis": 1}),
        ("activation is 'tanh'", {"activation": "tanh"}),
        ("shape", {"shape": (320,)}),
    ],
)
def test_arguments_that_make_no_sense(fake_machine: FakeMachine, message: str, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cunorm.tune(**({"shape": SHAPE, "dtype": "float16"} | GROUPS | options))


@pytest.mark.gpu
@pytest.mark.parametrize("data_format", ["NC...", "N...C"])
@pytest.mark.parametrize("op", ["instance_norm", "group_norm", "batch_norm"])
def test_ways_are_right_on_this_gpu(cache_folder: Path, op: str, data_format: str) -> None:
    shape = (4, 64, 32, 32) if data_format == "NC..." else (4, 32, 32, 64)
    groups = 8 if op == "group_norm" else None
    for result in cunorm.tune(
        op, shape, "float16", direction="both", num_groups=groups, data_format=data_format, max_seconds=60
    ):
        assert result.rejected == 0
        assert 10 < result.tried <= result.candidates
