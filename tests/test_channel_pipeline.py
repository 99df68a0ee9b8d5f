"""Slabs that blocks share in a pipeline, on the emulator: a few small blocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from cases import FAR, Array, data, far_data
from channel_cases import Case, EmulatorRunner, Results, Shape, assert_forward, assert_gradients
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_channel_norm, plan_of

from cunorm.plan import Device, Plan, channel_pipeline
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_tiles import Tiles, direction
from cunorm.problem import ChannelProblem

pytestmark = NEEDS_COMPILER


def in_a_pipeline(
    problem: ChannelProblem,
    device: Device,
    *,
    lanes: int,
    blocks: int,
    groups: int = 1,
    ahead: int = 3,
    lag: int = 2,
    threads: int = 64,
) -> Plan:
    """The plan with slabs of so many lanes of channels, each for so many blocks of so many threads."""
    tiles = Tiles(direction(problem), lanes, threads, 1)
    per_block = -(-problem.points // blocks)
    resident = -(-per_block // tiles.point_lanes)
    blocks_per_slab = -(-problem.points // per_block)
    return plan_of(ChannelPipeline(tiles, resident, blocks_per_slab, groups, per_block, ahead, lag), problem)


def run(case: Case, stats: bool = True, seed: int = 0, **options: Any) -> Results:
    choose = functools.partial(in_a_pipeline, **options)
    return EmulatorRunner(choose=choose, seed=seed).forward(case, stats)


def check(case: Case, **options: Any) -> None:
    before = case.x.copy()
    assert_forward(case, run(case, **options))
    assert case.x.tobytes() == before.tobytes(), "x was modified"


# A shape, what else is asked for, and how its slabs lie: a turn or several later; in groups whose blocks have different
# numbers of slabs; with sums of a warp first, and such that are not; sets of a channel, of part of a vector, of vectors
# and a half, and of several vectors; the last block of a slab short; more blocks than a warp has lanes.
ASKED: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "a channel a set": (Shape("instance_norm", (5, 9, 9, 8), "NHWC"), {}, {"lanes": 2, "blocks": 8}),
    "several turns later": (
        Shape("instance_norm", (3, 9, 9, 16), "NHWC"),
        {},
        {"lanes": 2, "blocks": 9, "groups": 4, "ahead": 7, "lag": 6},
    ),
    "a turn later": (Shape("instance_norm", (3, 9, 27, 8), "NHWC"), {}, {"lanes": 2, "blocks": 9, "lag": 1}),
    "as many sets as blocks": (
        Shape("instance_norm", (3, 9, 18, 64), "NHWC"),
        {"dtype": "float16", "activation": "silu"},
        {"lanes": 4, "blocks": 41},
    ),
    "lanes that do not divide a warp": (
        Shape("group_norm", (6, 7, 9, 40), "NHWC", 8),
        {"dtype": "bfloat16", "activation": "gelu"},
        {"lanes": 5, "blocks": 9, "threads": 160},
    ),
    "a set of two vectors and a half": (
        Shape("group_norm", (5, 7, 9, 80), "NHWC", 4),
        {"dtype": "float16", "affine": "weight"},
        {"lanes": 5, "blocks": 5, "threads": 160, "groups": 2},
    ),
    "no lanes alike in a warp": (
        Shape("group_norm", (3, 7, 9, 256), "NHWC", 4),
        {"dtype": "float16", "parameter_dtype": "float32"},
        {"lanes": 32, "blocks": 5},
    ),
    "more lanes than a warp": (
        Shape("group_norm", (3, 7, 9, 256), "NHWC", 4),
        {"affine": "bias"},
        {"lanes": 64, "blocks": 7, "threads": 128},
    ),
    "lanes that see to no set": (
        Shape("group_norm", (2, 7, 9, 72), "NHWC", 6),
        {"activation": "silu"},
        {"lanes": 9, "blocks": 4, "threads": 288},
    ),
    "half a vector a set": (
        Shape("group_norm", (4, 27, 9, 64), "NHWC", 16),
        {"dtype": "float16", "activation": "relu", "affine": "none"},
        {"lanes": 8, "blocks": 20, "ahead": 5, "lag": 4},
    ),
    "a batch": (
        Shape("batch_norm", (3, 7, 9, 32), "NHWC"),
        {"running_dtype": "float32", "update": {"convention": "keras"}},
        {"lanes": 2, "blocks": 37},
    ),
    "three dimensions of points": (
        Shape("instance_norm", (4, 4, 5, 6, 32), "NDHWC"),
        {"parameter_dtype": "float16"},
        {"lanes": 4, "blocks": 20, "groups": 3},
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_forward(asked: str) -> None:
    shape, options, way = ASKED[asked]
    check(shape.case(**options), **way)


def test_without_statistics() -> None:
    shape, options, way = ASKED["a channel a set"]
    case = shape.case(**options)
    results = run(case, stats=False, **way)
    assert results.mean is None and results.rstd is None
    assert results.y.tobytes() == run(case, **way).y.tobytes()


@pytest.mark.parametrize("asked", ["several turns later", "lanes that do not divide a warp"])
def test_the_order_in_which_threads_run_changes_nothing(asked: str) -> None:
    shape, options, way = ASKED[asked]
    first, *others = (run(shape.case(**options), seed=seed, **way) for seed in range(4))
    for other in others:
        assert [array.tobytes() for array in first[:3]] == [array.tobytes() for array in other[:3]]


def _channels_last(rows: Array, channels: int) -> Array:
    """Rows of numbers as channels of two samples."""
    return np.ascontiguousarray(np.moveaxis(rows.reshape(2, channels, -1), 1, 2))


def test_means_where_the_first_numbers_lie_far_from_all_others() -> None:
    """The first block's first pivot is of these alone."""
    x = data(0, (4, 63, 256))
    x[:, 0].reshape(4, 4, 64)[..., :4] += 150
    case = Case("group_norm", x, data(1, (256,), shift=1.0), data(2, (256,)), data_format="NWC", num_groups=4)
    check(case, lanes=64, blocks=7, threads=128)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero_or_from_the_pivot(kind: str, groups: int | None) -> None:
    """The pivot is from a thread's first vector, or those of a warp: data that lie far from it, and far from zero."""
    x = _channels_last(far_data(kind, (16, 1200)), 8)
    weight, bias = data(1, (8,), shift=1.0), data(2, (8,))
    name = "instance_norm" if groups is None else "group_norm"
    case = Case(name, x, weight, bias, data_format="NWC", num_groups=groups)
    check(case, lanes=2, blocks=8)


# ---- Which ways there are.


@pytest.mark.parametrize("arch", list(GPUS))
def test_where_it_is_possible(arch: str) -> None:
    device, options = GPUS[arch], {"channels_per_set": 16, "last": True}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for problem in plain_channel_norm((8, 512, 4096), dtype, **options):  # type: ignore[arg-type]
            assert channel_pipeline.is_possible(problem, device) == (arch != "sm_75" and dtype != "float64")
    # Channels second; vectors of 8 bytes; nothing; points that are too far from each other.
    second, *_ = plain_channel_norm((8, 512, 4096), "float16", 16)
    short, *_ = plain_channel_norm((8, 516, 4096), "float16", 129, last=True)
    nothing, *_ = plain_channel_norm((8, 512, 0), "float16", 16, last=True)
    good, *_ = plain_channel_norm((8, 512, 4096), "float16", 16, last=True)
    far = dataclasses.replace(good, x=dataclasses.replace(good.x, point_strides=(2**22,)))
    assert not any(channel_pipeline.is_possible(problem, device) for problem in (second, short, nothing, far))


def test_every_set_has_an_owner_and_lanes_that_tell_of_it() -> None:
    for shape, channels_per_set in (((8, 512, 4096), 16), ((8, 128, 256**2), 4), ((4, 256, 32**3), 1)):
        for dtype in ("float16", "float32"):
            problem, _ = plain_channel_norm(shape, dtype, channels_per_set, last=True)
            ways = list(channel_pipeline.candidates(problem, GPUS["sm_90"]))
            assert ways and len(ways) == len(set(ways))
            for way in ways:
                assert way.sets(problem) <= way.blocks_per_slab
                assert way.sets(problem) * way.set_lanes(problem) <= 64


@pytest.mark.parametrize("asked", ASKED)
def test_backward(asked: str) -> None:
    shape, options, way = ASKED[asked]
    case = shape.case(**options)
    dy = shape.array(7, case.x.dtype.name, outliers=False)
    before = EmulatorRunner().forward(case)
    runner = EmulatorRunner(choose=functools.partial(in_a_pipeline, **way))
    results = runner.backward(case.backward(before, dy))
    assert_gradients(case, results, dy)
