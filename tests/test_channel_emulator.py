"""The kernels of instance, group and batch norm, on the emulator: every family, in both layouts, against float64.

Small problems look alike to a plan, so each is computed in several ways: as the plan has it for two GPUs, by the passes
of channel_split_*, and by slabs of one block, of clusters, and of blocks that all run at the same time. Sizes are few,
since each set of constants is a program to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    OLD_DEVICE,
    SMALL_DEVICE,
    Array,
    assert_relu_stops_gradients,
    data,
    float64,
    poisoned,
    relative_error,
    view_of,
)
from channel_cases import Case, EmulatorRunner, Shape, assert_forward, check
from emulator_cases import NEEDS_COMPILER
from plan_cases import plan_of

from cunorm.plan import Device, Plan, channel_grid, channel_slab
from cunorm.plan.channel_split import Split
from cunorm.plan.launches import Builder
from cunorm.problem import ChannelForward, ChannelProblem

pytestmark = NEEDS_COMPILER

Choose = Callable[[ChannelProblem, Device], Plan]


def by_passes(problem: ChannelProblem, device: Device) -> Plan:
    builder = Builder()
    return builder.finished(Split().plan(problem, device, builder))


def by_slabs(blocks: int, lanes: int | None, in_flight: int | None = None) -> Choose:
    """The plan with slabs of so many blocks, which have so many lanes of channels, or as many as there can be.

    Of a thread's vectors so many are on their way before it sums the first, or as many as the plan has it.
    """

    def choose(problem: ChannelProblem, device: Device) -> Plan:
        slabs = [slab for slab in channel_slab.candidates(problem, device) if slab.blocks_per_slab == blocks]
        most = lanes or max(slab.tiles.channel_lanes for slab in slabs)
        chosen = plan_of(next(slab for slab in slabs if slab.tiles.channel_lanes == most), problem, device)
        constants = dict(chosen.launches[0].constants)
        assert in_flight is None or constants["IN_FLIGHT"] == in_flight < int(constants["VECTORS"])
        return chosen

    return choose


def by_grids(
    lanes: int, turns: int, blocks: int, ahead: int | None, streamed: tuple[int, int] | None, resident: int
) -> Choose:
    """The plan with slabs of so many lanes of channels, over which so many blocks a multiprocessor take so many turns.

    ``ahead`` are the slots for the next turn; without it there are as many as there can be. ``streamed`` are as few
    slots as that, less than there are vectors, and how many of them hold theirs. So many vectors are ``resident``.
    """

    def choose(problem: ChannelProblem, device: Device) -> Plan:
        grid = next(
            grid
            for grid in channel_grid.candidates(problem, device)
            if (grid.tiles.channel_lanes, grid.turns(problem), grid.tiles.min_blocks) == (lanes, turns, blocks)
        )
        grid = replace(grid, resident=resident)
        in_slots = grid.vectors - resident
        if streamed is not None:
            slots, held = streamed
            assert held < slots < in_slots
            return plan_of(replace(grid, slots=slots, held=held), problem)
        assert ahead is None or in_slots + ahead < grid.slots
        if ahead is not None:
            grid = replace(grid, slots=in_slots + ahead, held=in_slots + ahead)
        return plan_of(grid, problem)

    return choose


OWN, OLD = EmulatorRunner(), EmulatorRunner(OLD_DEVICE)
PASSES, OLD_PASSES = EmulatorRunner(choose=by_passes), EmulatorRunner(OLD_DEVICE, by_passes)


def slabs(blocks: int, lanes: int | None = None) -> EmulatorRunner:
    return EmulatorRunner(SMALL_DEVICE, by_slabs(blocks, lanes))


def slabs_in_flight(blocks: int, lanes: int) -> EmulatorRunner:
    """Slabs that run all at once, on a GPU of so little memory rate that a thread has four vectors on their way."""
    device = Device("sm_90", 64, 512, clusters=(32, 16, 8, 4), memory_rate=4096)
    return EmulatorRunner(device, by_slabs(blocks, lanes, in_flight=4))


def grids(
    lanes: int,
    turns: int,
    blocks: int = 2,
    ahead: int | None = None,
    streamed: tuple[int, int] | None = None,
    resident: int = 0,
) -> EmulatorRunner:
    device = Device("sm_90", multiprocessors=6, threads_per_multiprocessor=2048)
    return EmulatorRunner(device, by_grids(lanes, turns, blocks, ahead, streamed, resident))


# ---- Every norm, by every family of kernels.

# A shape, what else is asked for, and the ways to compute it: the plan's own, and others that it would not choose here.
Asked = tuple[Shape, dict[str, Any], dict[str, EmulatorRunner]]
PLANNED = {"own": OWN, "own on sm_75": OLD}
SPLIT = {"passes": PASSES, "passes on sm_75": OLD_PASSES}

ASKED: list[Asked] = [
    (
        Shape("instance_norm", (2, 3, 7, 7), "NCHW"),
        {},
        {
            **PLANNED,
            **SPLIT,
            "1 block": slabs(1, 2),
            "2 blocks": slabs(2, 4),
            "4 blocks": slabs(4, 1),
            "all blocks": grids(2, 2),
        },
    ),
    (
        Shape("instance_norm", (2, 7, 7, 40), "NHWC"),
        {"dtype": "float16", "activation": "silu"},
        {
            **PLANNED,
            **SPLIT,
            "2 blocks, 3 lanes": slabs(2, 3),
            "4 blocks, 5 lanes": slabs(4, 5),
            "all blocks, 3 lanes": grids(3, 2),
        },
    ),
    # Along the points ten channels a group, which are no power of two, make lanes that are none either.
    (
        Shape("group_norm", (2, 40, 7, 7), "NCHW", 4),
        {"dtype": "float16", "activation": "gelu", "parameter_dtype": "bfloat16"},
        {**SPLIT, "2 blocks": slabs(2, 10), "4 blocks": slabs(4, 20), "all blocks": grids(10, 3)},
    ),
    (
        Shape("group_norm", (2, 7, 7, 40), "NHWC", 4),
        {"dtype": "bfloat16", "activation": "gelu_tanh", "parameter_dtype": "float32"},
        {**PLANNED, **SPLIT, "2 blocks": slabs(2, 5), "4 blocks": slabs(4, 5)},
    ),
    (
        Shape("group_norm", (2, 8, 7, 8), "NCHW", 2),
        {"activation": "relu", "affine": "bias"},
        {**PLANNED, **SPLIT, "2 blocks": slabs(2, 8), "4 blocks": slabs(4, 4), "all blocks": grids(4, 2)},
    ),
    (
        Shape("group_norm", (3, 35, 6), "NWC", 2),
        {"dtype": "float64", "activation": "silu", "affine": "weight", "parameter_dtype": "float32"},
        {**PLANNED, **SPLIT, "2 blocks, 3 lanes": slabs(2, 3)},
    ),
    (
        Shape("batch_norm", (3, 7, 7, 3), "NHWC"),
        {"running_dtype": "float32"},
        {
            **PLANNED,
            **SPLIT,
            "2 blocks, 2 lanes": slabs(2, 2),
            "4 blocks, 3 lanes": slabs(4, 3),
            "all blocks, 2 lanes": grids(2, 2),
            "all blocks, 3 lanes": grids(3, 1),
        },
    ),
    (
        Shape("batch_norm", (3, 5, 8, 8), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "update": {"momentum": 0.99, "convention": "keras"}},
        {**PLANNED, **SPLIT, "2 blocks": slabs(2, 8), "all blocks": grids(1, 3)},
    ),
    (
        Shape("batch_norm", (5, 6, 9), "NCW"),
        {"dtype": "float64", "running_dtype": "float64", "affine": "none"},
        {**PLANNED, **SPLIT, "2 blocks": slabs(2, 2)},
    ),
    (
        Shape("batch_norm", (2, 5, 5, 16), "NHWC"),
        {"dtype": "bfloat16", "running_dtype": "bfloat16", "affine": "none", "activation": "relu"},
        {**PLANNED, **SPLIT, "4 blocks": slabs(4, 2), "all blocks": grids(2, 1, blocks=1)},
    ),
    # Given statistics: there is one way.
    (
        Shape("batch_norm", (3, 5, 8, 8), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "training": False, "activation": "gelu"},
        PLANNED,
    ),
    (Shape("batch_norm", (3, 7, 7, 3), "NHWC"), {"running_dtype": "float64", "training": False}, PLANNED),
    # Many chunks; sets that as many threads merge as there are, and fewer.
    (
        Shape("instance_norm", (2, 5, 3001), "NCW"),
        {"affine": "none"},
        {
            "passes": PASSES,
            "4 blocks": slabs(4, 4),
            "all blocks": grids(4, 2, ahead=3),
            "all blocks, few slots": grids(4, 2, streamed=(5, 1)),
        },
    ),
    (
        Shape("instance_norm", (1, 3001, 5), "NWC"),
        {"affine": "none"},
        {
            "passes": PASSES,
            "4 blocks": slabs(4, 5),
            "all blocks": grids(3, 2, ahead=1),
            "all blocks, registers": grids(3, 2, ahead=0, resident=2),
        },
    ),
    # Slabs of which not all is on its way at once.
    (
        Shape("group_norm", (2, 9, 21, 64), "NHWC", 8),
        {"dtype": "float16", "activation": "silu"},
        {"1 block, 4 in flight": slabs_in_flight(1, 8), "2 blocks, 4 in flight": slabs_in_flight(2, 8)},
    ),
    (
        Shape("instance_norm", (3, 4, 21, 76), "NCHW"),
        {"affine": "weight"},
        {"1 block, 4 in flight": slabs_in_flight(1, 4), "2 blocks, 4 in flight": slabs_in_flight(2, 4)},
    ),
    # Slabs that pass through slots: of points in two dimensions, in one turn and in several.
    (
        Shape("batch_norm", (12, 30, 23, 40), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "activation": "relu"},
        {
            "1 turn, few slots": grids(32, 1, streamed=(6, 2)),
            "2 turns, few slots": grids(16, 2, streamed=(5, 1)),
            "2 turns, few slots and registers": grids(16, 2, streamed=(5, 1), resident=2),
        },
    ),
    (
        Shape("group_norm", (3, 30, 50, 128), "NHWC", 8),
        {"dtype": "bfloat16", "activation": "silu"},
        {
            "1 turn, few slots": grids(16, 1, streamed=(12, 5)),
            "3 turns, few slots": grids(16, 3, streamed=(6, 2)),
            "1 turn, few slots and registers": grids(16, 1, streamed=(9, 3), resident=5),
            "3 turns, registers": grids(16, 3, ahead=0, resident=2),
        },
    ),
    (Shape("group_norm", (1, 520, 9), "NCW", 2), {}, {"passes": PASSES}),
    (Shape("group_norm", (2, 9, 130), "NWC", 2), {}, {"passes": PASSES}),
    # Runs of memory that begin anywhere: of one dimension, behind each other in a batch, and such that chunks cut.
    (Shape("instance_norm", (2, 3, 5, 13), "NCHW"), {"dtype": "float16", "activation": "silu"}, SPLIT),
    (Shape("batch_norm", (6, 3, 149), "NCW"), {"running_dtype": "float32", "activation": "relu"}, SPLIT),
    (
        Shape("batch_norm", (3, 2, 9001), "NCW"),
        {"dtype": "bfloat16", "running_dtype": "bfloat16", "affine": "weight"},
        SPLIT,
    ),
    (Shape("group_norm", (1, 6, 41, 43), "NCHW", 2), {"dtype": "float16", "activation": "gelu"}, SPLIT),
    (Shape("instance_norm", (3, 2, 33), "NCW"), {"dtype": "float64", "affine": "bias"}, SPLIT),
    (
        Shape("batch_norm", (5, 3, 11, 31), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "training": False, "activation": "gelu"},
        PLANNED,
    ),
    (
        Shape("group_norm", (2, 18, 8, 8), "NCHW", 3),
        {"dtype": "bfloat16", "activation": "silu", "affine": "weight"},
        {"1 block": slabs(1, 6), "2 blocks": slabs(2, 12), "all blocks": grids(6, 3)},
    ),
    # Vectors along planes: of two channels, of several, and with a last tile of fewer channels.
    (
        Shape("batch_norm", (11, 12, 5), "NCW"),
        {"running_dtype": "float32"},
        {
            **PLANNED,
            **SPLIT,
            "1 block, 10 lanes": slabs(1, 10),
            "4 blocks, 5 lanes": slabs(4, 5),
            "all blocks, 5 lanes": grids(5, 3),
            "all blocks, 10 lanes": grids(10, 2, ahead=0),
        },
    ),
    (
        Shape("batch_norm", (6, 16, 7, 7), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "activation": "silu"},
        {**PLANNED, **SPLIT, "2 blocks, 49 lanes": slabs(2, 49)},
    ),
    (
        Shape("batch_norm", (9, 24, 3), "NCW"),
        {"dtype": "bfloat16", "affine": "bias"},
        {**SPLIT, "1 block, 6 lanes": slabs(1, 6), "2 blocks, 3 lanes": slabs(2, 3), "all blocks": grids(6, 2)},
    ),
    (
        Shape("batch_norm", (5, 6, 9), "NCW"),
        {"dtype": "float64", "affine": "weight"},
        {"2 blocks, 9 lanes": slabs(2, 9), "all blocks, 27 lanes": grids(27, 1)},
    ),
    (
        Shape("batch_norm", (6, 16, 7, 7), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "training": False, "activation": "gelu"},
        PLANNED,
    ),
]
PLANES = ASKED[-5]


@pytest.mark.parametrize(
    ("shape", "options", "runner"),
    [
        pytest.param(shape, options, runner, id=f"{shape}-{'-'.join(map(str, options.values()))}-{way}")
        for shape, options, ways in ASKED
        for way, runner in ways.items()
    ],
)
def test_values_and_gradients(shape: Shape, options: dict[str, Any], runner: EmulatorRunner) -> None:
    """In two orders of the threads, which must not show."""
    case = shape.case(**options)
    check(runner, case)
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1)
    first, second = (every_result(replace(runner, seed=seed), case, dy) for seed in (0, 1))
    assert first == second


def every_result(runner: EmulatorRunner, case: Case, dy: Array) -> list[bytes | None]:
    results = runner.forward(case)
    arrays = (*results, *runner.backward(case.backward(results, dy)))
    return [None if array is None else array.tobytes() for array in arrays]


@pytest.mark.parametrize("runner", [OWN, PASSES, slabs(2)], ids=["planned", "passes", "2 blocks"])
@pytest.mark.parametrize(
    "shape", [Shape("group_norm", (2, 8, 7, 8), "NCHW", 2), Shape("batch_norm", (3, 7, 7, 3), "NHWC")]
)
def test_relu_stops_gradients(shape: Shape, runner: EmulatorRunner) -> None:
    assert_relu_stops_gradients(runner, shape.case("float16", activation="relu"))


@pytest.mark.parametrize(
    "shape", [Shape("batch_norm", (3, 5, 8, 8), "NCHW"), Shape("batch_norm", (3, 7, 7, 3), "NHWC")]
)
def test_running_statistics_keep_all_their_digits(shape: Shape) -> None:
    """Of more digits than what is computed with: nothing is taken of the batch, so nothing changes."""
    case = shape.case("float32", running_dtype="float64", update={"momentum": 0.0})
    assert case.running is not None
    for runner in (OWN, PASSES):
        results = runner.forward(case)
        np.testing.assert_array_equal(results.running_mean, case.running.mean)
        np.testing.assert_array_equal(results.running_var, case.running.var)


def by_peeled_passes(problem: ChannelProblem, device: Device) -> Plan:
    plan = by_passes(problem, device)
    assert {dict(launch.constants).get("PEELED", 1) for launch in plan.launches} == {1}
    return plan


@pytest.mark.parametrize("length", [length for length in range(8177, 8208) if length % 8])
def test_chunks_of_runs_that_begin_anywhere(length: int) -> None:
    """Of up to a chunk of places and a few more: the last chunk has few points of a channel, or none."""
    shape = Shape("batch_norm", (2, 3, length), "NCW")
    check(EmulatorRunner(choose=by_peeled_passes), shape.case("float16", affine="none", running_dtype="float32"))


# ---- Tensors that lie in memory in another way.


def _instances(shape: tuple[int, ...], data_format: str) -> Shape:
    return Shape("instance_norm", shape, data_format)


def behind_one_element(array: Array) -> Array:
    """The same numbers at an address that no vector is aligned to."""
    view = np.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
    view[...] = array
    return view


def sliced(array: Array, axis: int, step: int = 1) -> Array:
    """The same numbers as a part of a longer axis, from its second element on."""
    shape = list(array.shape)
    shape[axis] = step * shape[axis] + 2
    part = [slice(None)] * array.ndim
    part[axis] = slice(1, 1 + step * array.shape[axis], step)
    view = np.full(shape, 7, array.dtype)[tuple(part)]
    view[...] = array
    return view


def x_in(shape: Shape, change: Callable[[Array], Array]) -> Case:
    case = shape.case("float16")
    return replace(case, x=change(case.x))


LAST, SECOND = _instances((2, 5, 8, 8), "NHWC"), _instances((2, 3, 6, 8), "NCHW")
# Its planes lie behind each other.
BATCH = Shape("batch_norm", (4, 8, 7, 7), "NCHW")
VIEWS: dict[str, tuple[Shape, Callable[[Array], Array]]] = {
    "NHWC behind one element": (LAST, behind_one_element),
    "NHWC every second sample": (LAST, lambda array: sliced(array, 0, 2)),
    "NHWC some columns": (LAST, lambda array: sliced(array, 2)),
    "NHWC some channels": (LAST, lambda array: sliced(array, 3)),
    "NHWC every second channel": (LAST, lambda array: sliced(array, 3, 2)),
    "NCHW behind one element": (SECOND, behind_one_element),
    "NCHW every second sample": (SECOND, lambda array: sliced(array, 0, 2)),
    "NCHW some channels": (SECOND, lambda array: sliced(array, 1)),
    "NCHW every second column": (SECOND, lambda array: sliced(array, 3, 2)),
    "planes behind one element": (BATCH, behind_one_element),
    "planes of every second sample": (BATCH, lambda array: sliced(array, 0, 2)),
    "planes of some channels": (BATCH, lambda array: sliced(array, 1)),
    "planes of some columns": (BATCH, lambda array: sliced(array, 3)),
}
WAYS = {"passes": PASSES, "2 blocks": slabs(2)}


@pytest.mark.parametrize("runner", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("shape", "change"), VIEWS.values(), ids=VIEWS)
def test_views(shape: Shape, change: Callable[[Array], Array], runner: EmulatorRunner) -> None:
    """Of x alone, and of dy with it."""
    case = x_in(shape, change)
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1)
    check(runner, case, dy)
    check(runner, case, change(dy))


@pytest.mark.parametrize("runner", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shape", [LAST, SECOND], ids=str)
def test_dy_lies_in_another_order(shape: Shape, runner: EmulatorRunner) -> None:
    case = shape.case("float16")
    check(runner, case, shape.array(17, "float16", "other order", shift=0.1))
    check(runner, case, np.broadcast_to(np.float16(0.5), case.x.shape).copy())


@pytest.mark.parametrize("runner", WAYS.values(), ids=WAYS)
def test_weights_that_are_not_aligned(runner: EmulatorRunner) -> None:
    case = LAST.case("float16", parameter_dtype="float32")
    assert case.weight is not None and case.bias is not None
    check(runner, replace(case, weight=behind_one_element(case.weight), bias=behind_one_element(case.bias)))


@pytest.mark.parametrize("runner", WAYS.values(), ids=WAYS)
def test_points_of_three_dimensions(runner: EmulatorRunner) -> None:
    """The samples of a batch, and spatial dimensions with gaps: nothing merges."""
    shape = Shape("batch_norm", (3, 2, 4, 4, 5), "NCDHW", layout="strided")
    case = shape.case("float32")
    check(runner, replace(case, x=sliced(case.x, 3)))


def test_y_may_be_x() -> None:
    for runner in ASKED[0][2].values():
        case = ASKED[0][0].case()
        expected = case.expected()
        y = case.x.copy()
        in_place = replace(case, x=y)

        class InPlace(EmulatorRunner):
            def run(self, problem: Any, operands: dict[str, Array | None]) -> None:
                super().run(problem, operands | {"y": operands["x"]})

        InPlace(runner.device, runner.choose).forward(in_place)
        assert relative_error(y, expected.y) <= 3e-7


# ---- What is asked for, and what is not.


MASKS = [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("way", ["own", "passes"])
def test_only_the_gradients_that_are_asked_for(way: str, mask: tuple[bool, bool, bool]) -> None:
    shape, options, ways = ASKED[0]
    runner, case = ways[way], shape.case(**options)
    dy = data(17, case.x.shape, case.x.dtype.name)
    results = runner.forward(case)
    every = runner.backward(case.backward(results, dy))
    for wanted, gradient, one in zip(mask, every, runner.backward(case.backward(results, dy, mask))):
        assert (one is not None) == wanted
        if wanted:
            # Rows lie in another way, and are added up in another order, where less is asked for.
            assert relative_error(one, float64(gradient)) <= (1e-6 if way == "own" else 0)


@pytest.mark.parametrize("asked", [ASKED[0], ASKED[3], ASKED[6], ASKED[10], PLANES], ids=lambda asked: str(asked[0]))
def test_statistics_that_are_not_asked_for(asked: Asked) -> None:
    shape, options, ways = asked
    case = shape.case(**options)
    for runner in ways.values():
        alone, results = runner.forward(case, stats=False), runner.forward(case)
        np.testing.assert_array_equal(alone.y, results.y)
        for one, other in zip(alone[3:], results[3:]):
            assert one is None or one.tobytes() == other.tobytes()


@pytest.mark.parametrize("asked", [ASKED[6], ASKED[9]], ids=lambda asked: str(asked[0]))
def test_statistics_alone(asked: Asked) -> None:
    """As `cunorm.batch_norm_stats` asks for them: the variance where rstd would be."""
    case = asked[0].case(dtype=asked[1].get("dtype", "float32"))
    mean, variance = (poisoned(case.statistic_shape, case.statistic_dtype) for _ in range(2))
    x: Any = view_of(case.x)
    options: Any = {"channel_axis": case.channel_axis, "channels_per_set": 1, "over_samples": True}
    problem = ChannelForward.of(x, None, None, None, **options, eps=0.0, stats=True)
    OWN.run(problem, {"x": case.x, "weight": None, "bias": None, "mean": mean, "rstd": variance})
    expected = case.seen(float64(case.x))[0].reshape(case.channels, -1)
    np.testing.assert_allclose(mean, expected.mean(1), rtol=1e-6, atol=1e-6 * float(expected.std()))
    np.testing.assert_allclose(variance, expected.var(1), rtol=1e-6)


# ---- Numbers and sizes at the edges.


@pytest.mark.parametrize("asked", [ASKED[0], ASKED[6], ASKED[12], ASKED[13], PLANES], ids=lambda asked: str(asked[0]))
def test_a_mean_far_above_the_deviation(asked: Asked) -> None:
    """E[x^2] - E[x]^2 would have no digits left."""
    shape, options, ways = asked
    case = shape.case(**options)
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(case.x.shape) * 0.1 + 1000).astype(np.float32)
    shifted = replace(case, x=x, eps=1e-12)
    for runner in ways.values():
        assert_forward(shifted, runner.forward(shifted))


def test_means_that_differ_from_chunk_to_chunk() -> None:
    """What merging adds to the squared deviations is then most of them."""
    for shape, _, ways in (ASKED[12], ASKED[13]):
        case = shape.case(affine="none")
        along = np.arange(3001, dtype=np.float32) if case.channel_axis == 1 else np.arange(3001)[:, None]
        stepped = replace(case, x=(case.x + 100 * (along // 600)).astype(np.float32))
        for runner in ways.values():
            check(runner, stepped)


EDGES: list[tuple[Shape, str]] = [
    (Shape("instance_norm", (5, 8, 1), "NCW"), "own"),
    (Shape("instance_norm", (5, 8, 1), "NCW"), "passes"),
    (Shape("batch_norm", (9, 8)), "own"),
    (Shape("batch_norm", (9, 8)), "passes"),
    (Shape("batch_norm", (4, 1, 37), "NCW"), "own"),
    (Shape("group_norm", (1, 37, 1), "NWC", 1), "passes"),
]


@pytest.mark.parametrize(("shape", "way"), EDGES, ids=str)
def test_one_position_one_channel_one_sample(shape: Shape, way: str) -> None:
    check({"own": OWN, "passes": PASSES}[way], shape.case())


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 4), (0, 2, 17, 17)], ids=str)
@pytest.mark.parametrize("name", ["instance_norm", "batch_norm"])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    case = Case(name, np.ones(shape, np.float32), data(2, shape[1:2]), None)
    for runner in (OWN, OLD):
        results = runner.forward(case)
        assert results.y.shape == shape and np.isnan(results.mean).all() and np.isnan(results.rstd).all()
        dx, dweight, dbias = runner.backward(case.backward(results, case.x))
        assert dx.shape == shape
        assert not dweight.any() and not dbias.any()


def test_an_empty_batch_in_evaluation() -> None:
    case = Shape("batch_norm", (2, 4, 3), "NCW").case(running_dtype="float32", training=False)
    assert case.running is not None
    results = OWN.forward(replace(case, x=case.x[:0]))
    np.testing.assert_array_equal(results.mean, case.running.mean)
    np.testing.assert_allclose(results.rstd, 1 / np.sqrt(case.running.var + case.eps), rtol=3e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_that_share_a_reciprocal_do_not_share_more(dtype: str) -> None:
    """silu of one of sixteen bits and of its neighbour (kernels/activation.cuh): by given statistics, so nothing else
    makes one number depend on another."""
    case = Shape("batch_norm", (2, 4, 64), "NCW").case(
        dtype, running_dtype="float32", training=False, activation="silu"
    )
    expected = OWN.forward(case).y.astype(np.float64)
    for bad in (np.nan, np.inf, -np.inf, 6e4, -6e4):
        for place in (0, 1):
            x = case.x.copy()
            x[..., place::4] = bad
            y = OWN.forward(replace(case, x=x)).y.astype(np.float64)
            rest = np.ones(x.shape, bool)
            rest[..., place::4] = False
            np.testing.assert_array_equal(y[rest], expected[rest])
            assert np.isnan(y[~rest]).all() == np.isnan(bad)
