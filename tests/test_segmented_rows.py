"""Rows in segments, by the kernels in which blocks share rows in a pipeline, and by those that hold them in blocks or
clusters: batch norm of channels that lie before their points, and layer norm over axes that lie apart, on the emulator;
and what is planned."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import plan_rules
import pytest
from cases import FAR, LAYER_NORM, RMS_NORM, data, far_data, view_of
from channel_cases import Case, EmulatorRunner, Shape, assert_forward, assert_gradients
from emulator_cases import NEEDS_COMPILER
from plan_cases import (
    GPUS,
    plain_channel_backward,
    plain_channel_forward,
    plain_channel_norm,
    plan_batch,
    plan_rows,
)

from cunorm.plan import Device, Plan, RowBlock, plan, row_candidates
from cunorm.plan.row_memory import lie_alike, vector_width
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.rows_of_channels import as_rows, plan_with
from cunorm.problem import (
    DTYPES,
    ChannelForward,
    ChannelProblem,
    ForwardProblem,
    Norm,
    RunningStatistics,
    Vector,
)


def in_a_pipeline(problem: ChannelProblem, device: Device, **changes: Any) -> Plan:
    """The plan for a few blocks of 64 threads."""
    rows = as_rows(problem)
    assert rows is not None
    peeled = vector_width(rows) * rows.itemsize < 16 and lie_alike(rows)
    width = 16 // rows.itemsize if peeled else vector_width(rows)
    way = replace(RowPipeline(width, 1, 4, 1, rows_ahead=2, lag=1, threads=64, peeled=peeled), **changes)
    way = replace(way, resident=way.vectors(rows))
    return plan_with(problem, device, way)


def in_blocks(problem: ChannelProblem, device: Device, **changes: Any) -> Plan:
    """The plan for blocks of 64 threads, a row each."""
    rows = as_rows(problem)
    assert rows is not None
    way = replace(RowBlock(vector_width(rows), 1, 64), **changes)
    vectors = -(-way.columns_per_block(rows) // (way.width * way.threads_per_row))
    return plan_with(problem, device, replace(way, vectors=vectors))


def runner(seed: int = 0, held: Any = in_a_pipeline, **changes: Any) -> EmulatorRunner:
    return EmulatorRunner(choose=lambda problem, device: held(problem, device, **changes), seed=seed)


def check(case: Case, held: Any = in_a_pipeline, **changes: Any) -> None:
    before, dy = case.x.copy(), case.empty_result()  # which lies as y does
    dy[...] = data(17, case.x.shape, case.x.dtype.name, shift=0.1)
    results = runner(held=held, **changes).forward(case)
    assert_forward(case, results)
    assert_gradients(case, runner(held=held, **changes).backward(case.backward(results, dy)), dy)
    assert case.x.tobytes() == before.tobytes(), "x was modified"


# A shape, what else is asked for, and how its rows lie: blocks that have several samples each, whole ones and not, or a
# part of one; segments of a vector, and such that no power of two divides; several groups, several turns later.
ASKED: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "several segments a block": (Shape("batch_norm", (24, 5, 16, 8), "NCHW"), {"running_dtype": "float32"}, {}),
    "several blocks a segment": (
        Shape("batch_norm", (2, 3, 40, 40), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "activation": "relu"},
        {"groups": 2, "rows_ahead": 4, "lag": 2},
    ),
    "segments that end within blocks": (
        Shape("batch_norm", (7, 6, 4, 31), "NCHW"),
        {"dtype": "bfloat16", "running_dtype": "bfloat16", "update": {"convention": "keras"}},
        {"blocks_per_row": 3},
    ),
    "a vector a segment": (
        Shape("batch_norm", (130, 3, 4), "NCW"),
        {"parameter_dtype": "float64", "running_dtype": "float64"},
        {"rows_ahead": 6, "lag": 4},
    ),
    "eleven vectors a thread": (
        Shape("batch_norm", (9, 4, 12, 77), "NCHW"),
        {"dtype": "float32", "activation": "silu", "affine": "weight"},
        {"blocks_per_row": 3, "groups": 3},
    ),
    "without running statistics": (
        Shape("batch_norm", (5, 9, 8, 8), "NCHW"),
        {"dtype": "float16", "affine": "bias", "activation": "gelu"},
        {"blocks_per_row": 2, "lag": 2, "rows_ahead": 3},
    ),
    "one sample, which is one run": (Shape("batch_norm", (1, 5, 32, 32), "NCHW"), {"running_dtype": "float32"}, {}),
    "channels of a batch that lies otherwise": (
        Shape("batch_norm", (24, 16, 8, 5), "NHWC", None, "other order"),
        {"running_dtype": "float32"},
        {},
    ),
}


# And such whose segments begin anywhere, so that their first and last vectors are cut: of each number of vectors, in
# parts that end within segments, and of so few numbers that some of their vectors have none at all.
PEELED: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "several segments a block": (
        Shape("batch_norm", (16, 7, 7, 7), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32"},
        {},
    ),
    "several blocks a segment": (
        Shape("batch_norm", (2, 3, 41, 41), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32", "activation": "relu"},
        {"groups": 2, "rows_ahead": 4, "lag": 2},
    ),
    "segments that end within blocks": (
        Shape("batch_norm", (7, 6, 4, 33), "NCHW"),
        {"dtype": "bfloat16", "running_dtype": "bfloat16", "update": {"convention": "keras"}},
        {"blocks_per_row": 3},
    ),
    "halves of 16 bytes": (
        Shape("batch_norm", (6, 5, 6, 7), "NCHW"),
        {"dtype": "float32", "activation": "gelu_tanh", "running_dtype": "float64"},
        {"blocks_per_row": 2},
    ),
    "vectors that are never cut": (
        Shape("batch_norm", (2, 2, 129, 129), "NCHW"),
        {"dtype": "float32", "activation": "relu", "running_dtype": "float32"},
        {"blocks_per_row": 11},
    ),
    "eleven vectors a thread": (
        Shape("batch_norm", (9, 4, 13, 77), "NCHW"),
        {"dtype": "float32", "activation": "silu", "affine": "weight"},
        {"blocks_per_row": 3, "groups": 3},
    ),
    "two numbers a segment": (Shape("batch_norm", (150, 3, 2), "NCW"), {"dtype": "float16"}, {"blocks_per_row": 3}),
    "three numbers a segment": (
        Shape("batch_norm", (150, 5, 3), "NCW"),
        {"running_dtype": "float32"},
        {"rows_ahead": 6, "lag": 4},
    ),
    "without weight and bias": (
        Shape("batch_norm", (5, 9, 9, 9), "NCHW"),
        {"dtype": "float16", "affine": "none", "activation": "gelu"},
        {"blocks_per_row": 2, "lag": 2, "rows_ahead": 3},
    ),
    "one sample, which is one run": (Shape("batch_norm", (1, 5, 31, 33), "NCHW"), {"running_dtype": "float32"}, {}),
    "runs of instance norm": (
        Shape("instance_norm", (2, 3, 41, 41), "NCHW"),
        {"dtype": "float16", "activation": "silu"},
        {"groups": 2, "rows_ahead": 4, "lag": 2},
    ),
    "channels of a batch that lies otherwise": (
        Shape("batch_norm", (24, 17, 9, 5), "NHWC", None, "other order"),
        {"running_dtype": "float32"},
        {},
    ),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("asked", ASKED)
def test_batch_norm(asked: str) -> None:
    shape, options, changes = ASKED[asked]
    check(shape.case(**options), **changes)


@NEEDS_COMPILER
@pytest.mark.parametrize("asked", PEELED)
def test_segments_that_begin_anywhere(asked: str) -> None:
    shape, options, changes = PEELED[asked]
    check(shape.case(**options), **changes)


# More shapes for blocks, whose vectors may be short; and how rows lie.
ODD: dict[str, tuple[Shape, dict[str, Any]]] = {
    "numbers one by one": (
        Shape("batch_norm", (16, 7, 7, 7), "NCHW"),
        {"dtype": "float16", "running_dtype": "float32"},
    ),
    "vectors of half the bytes": (
        Shape("batch_norm", (6, 5, 6, 7), "NCHW"),
        {"dtype": "float32", "activation": "gelu_tanh", "running_dtype": "float64"},
    ),
    "doubles": (Shape("batch_norm", (6, 4, 6, 7), "NCHW"), {"dtype": "float64", "running_dtype": "float32"}),
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "a row a block": {},
    "four rows a block": {"threads_per_row": 16, "rows_per_block": 4},
    "rows ahead, in turns": {"stage": "ahead", "blocks_per_multiprocessor": 1},
    "a cluster": {"blocks_per_row": 2},
}


@NEEDS_COMPILER
@pytest.mark.parametrize("lie", IN_BLOCKS)
@pytest.mark.parametrize("asked", [*ASKED, *ODD])
def test_batch_norm_in_blocks(asked: str, lie: str) -> None:
    shape, options = ASKED[asked][:2] if asked in ASKED else ODD[asked]
    check(shape.case(**options), in_blocks, **IN_BLOCKS[lie])


@NEEDS_COMPILER
@pytest.mark.parametrize("held", [in_a_pipeline, in_blocks])
def test_without_weight_and_bias(held: Any) -> None:
    check(Shape("batch_norm", (24, 5, 16, 8), "NCHW").case(affine="none", running_dtype="float32"), held)


@NEEDS_COMPILER
def test_without_statistics() -> None:
    shape, options, changes = ASKED["several blocks a segment"]
    case = shape.case(**options)
    results = runner(**changes).forward(case, stats=False)
    assert results.mean is None and results.rstd is None
    expected = runner(**changes).forward(case)
    for name in ("y", "running_mean", "running_var"):
        assert getattr(results, name).tobytes() == getattr(expected, name).tobytes()


# Rows of layer norm can lie so too, but their weights are one a column.
EIGHT = Device("sm_90", multiprocessors=8, threads_per_multiprocessor=1024)


@NEEDS_COMPILER
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
@pytest.mark.parametrize("weighted", [False, True])
def test_layer_norm_over_axes_that_lie_apart(weighted: bool, norm: Norm) -> None:
    x, vectors = data(0, (64, 8, 128)), [data(seed, (64, 128)) if weighted else None for seed in (1, 2)]
    case, runner = cases.Case(x, *vectors, axis=(0, 2), norm=norm), cases.EmulatorRunner(EIGHT)
    results = runner.forward(case)
    cases.assert_forward(case, results)
    dy = data(3, x.shape)
    cases.assert_gradients(case, runner.backward(case.backward(results, dy)), dy)
    problem = ForwardProblem.of(
        *(None if array is None else cases.view_of(array) for array in (x, *vectors, x)),  # type: ignore[arg-type]
        axis=(0, 2), eps=1e-5, stats=True, norm=norm,
    )  # fmt: skip
    assert (plan(problem, EIGHT).strategy == "row_pipeline") == (not weighted)


@NEEDS_COMPILER
@pytest.mark.parametrize("points", [64, 63])
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero_or_from_the_pivot(kind: str, points: int) -> None:
    rows = far_data(kind, (3, 24 * points))
    x = np.ascontiguousarray(np.moveaxis(rows.reshape(3, 24, points), 0, 1))
    case = Case("batch_norm", x)
    assert_forward(case, runner(blocks_per_row=5).forward(case))


@NEEDS_COMPILER
@pytest.mark.parametrize("cases", [ASKED, PEELED], ids=["aligned", "anywhere"])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(cases: dict[str, Any]) -> None:
    shape, options, changes = cases["segments that end within blocks"]
    case = shape.case(**options)
    first, *others = (runner(seed, **changes).forward(case) for seed in range(3))
    for other in others:
        assert [array.tobytes() for array in first] == [array.tobytes() for array in other]


# ---- The plan.

H200 = GPUS["sm_90"]
RESNET = [(64, 256, 56**2), (32, 64, 112**2), (64, 512, 28**2), (256, 64, 1024)]


def batch_norm(shape: tuple[int, int, int], dtype: str = "float32", **options: Any) -> list[ChannelProblem]:
    """Of samples, channels and points: forward, and backward."""
    return plain_channel_norm(shape, dtype, None, **options)


def test_rows_of_a_batch_norm() -> None:
    for problem in batch_norm((64, 256, 3136)):
        rows = as_rows(problem)
        assert rows is not None and rows.channels is not None
        assert (rows.row_sizes, rows.column_sizes) == ((256,), (64, 3136))
        assert {(m.row_strides, m.column_strides) for m in rows.matrices} == {((3136,), (256 * 3136, 1))}
        assert (rows.channels.rows_per_sample, rows.channels.channels_per_row, rows.channels.positions) == (
            256,
            1,
            200_704,
        )
        if isinstance(problem, ChannelForward):
            assert isinstance(rows, ForwardProblem) and rows.running == problem.running is not None
        assert plan_rows(problem, H200) is None, "other kernels of rows cannot"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", RESNET, ids=str)
def test_the_layers_of_a_resnet_take_the_pipeline(shape: tuple[int, int, int], dtype: str) -> None:
    for activation in (None, "relu"):
        for problem in batch_norm(shape, dtype, activation=activation):
            chosen = plan(problem, H200)
            assert chosen.strategy == "row_pipeline"
            assert len(chosen.launches) == 1


# Of an Inception, an EfficientNet and a DeepLab, and volumes.
ANYWHERE = [(32, 64, 147**2), (32, 288, 35**2), (16, 64, 257**2), (16, 256, 33**2), (2, 32, 65**3)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", ANYWHERE, ids=str)
def test_rows_that_begin_anywhere_take_it_where_all_begin_alike(shape: tuple[int, int, int], dtype: str) -> None:
    for activation in (None, "relu"):
        for problem in batch_norm(shape, dtype, activation=activation):
            assert plan(problem, H200).strategy == "row_pipeline"
            assert plan_batch(replace(problem, x=replace(problem.x, offset=DTYPES[dtype].itemsize)), H200) is None
    for problem in batch_norm(shape, "float64"):
        assert plan_batch(problem, H200) is None


@pytest.mark.parametrize(
    ("rows", "row_bytes", "dtype", "planned"),
    [
        (64, 300 << 10, "float16", ["row_cluster", "row_cluster"]),
        (64, 400 << 10, "float16", ["row_pipeline", "row_pipeline"]),
        (64, 400 << 10, "float32", ["row_cluster", "row_pipeline"]),
        (64, 600 << 10, "float32", ["row_pipeline", "row_pipeline"]),
        (16, 700 << 10, "float16", ["row_cluster", "row_pipeline"]),  # backward they would take 16 blocks each
        (16, 1400 << 10, "float32", ["row_pipeline", "row_pipeline"]),
    ],
)
def test_long_rows_of_one_run_that_begin_anywhere(rows: int, row_bytes: int, dtype: str, planned: list[str]) -> None:
    points = row_bytes // DTYPES[dtype].itemsize | 1
    makers = plain_channel_forward, plain_channel_backward
    assert [plan(make(2, rows // 2, 1, points, dtype), H200).strategy for make in makers] == planned


TINY = [(2, 32, 216), (1, 8, 16), (4, 64, 196), (16, 128, 49), (3, 7, 35)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", TINY, ids=str)
def test_blocks_hold_tiny_ones(shape: tuple[int, int, int], dtype: str) -> None:
    for device, activation in itertools.product(GPUS.values(), (None, "relu", "silu")):
        for problem in batch_norm(shape, dtype, activation=activation):
            chosen = plan(problem, device)
            assert chosen.strategy == "row_block" and len(chosen.launches) == 1


def test_which_are_not_held_by_blocks() -> None:
    for shape, dtype, planned in [
        ((64, 2048, 49), "float16", [False, False]),  # so many numbers one by one
        ((32, 1024, 49), "float16", [True, False]),
        ((32, 32, 1024), "float16", [False, False]),  # so few channels
        ((8, 64, 3136), "float16", [True, True]),
        ((8, 64, 3136), "float64", [False, False]),  # longer than a block holds
        ((64, 512, 196), "float32", [False, True]),  # forward, as fast as a copy in slabs
    ]:
        assert [plan_rows(problem, H200) is not None for problem in batch_norm(shape, dtype)] == planned, shape
    forward, backward = batch_norm((4, 64, 196))
    apart = replace(forward.x, point_strides=(64 * 196 + 4, 1))
    assert plan_rows(replace(forward, x=apart), H200) is None, "x and y lie in different ways"
    assert plan_rows(replace(backward, x=apart), H200) is None


def test_what_takes_another_way() -> None:
    for problem in batch_norm((64, 128, 784), "float16"):
        assert plan(problem, H200).strategy == "channel_slab", "small ones are faster so"
    for shape, dtype, last in [
        ((64, 256, 3136), "float64", False),
        ((64, 256, 3136), "float32", True),
        ((64, 8, 2**23), "float32", False),  # longer rows than shared memory holds, and more than 2^31 numbers of all
    ]:
        for problem in batch_norm(shape, dtype, last=last):
            assert not plan(problem, H200).strategy.startswith("row_")
    forward, _ = batch_norm((64, 256, 3136))
    assert isinstance(forward, ChannelForward) and plan_batch(forward, H200) is not None
    assert plan_batch(forward, GPUS["sm_75"]) is None
    apart = replace(forward.x, point_strides=(256 * 3136 + 4, 1))
    assert plan_batch(replace(forward, x=apart), H200) is None, "x and y lie in different ways"
    assert plan_batch(replace(forward, x=apart, y=apart), H200) is not None
    vector = Vector("float32")
    assert plan_batch(replace(forward, running=RunningStatistics(vector, vector, True)), H200) is None


def test_one_sample_is_a_run_and_moves_running_statistics() -> None:
    forward, backward = batch_norm((1, 256, 100_000), "float16")
    as_run = replace(forward, point_sizes=(100_000,), x=replace(forward.x, point_strides=(1,)))
    assert isinstance(as_run, ChannelForward)
    as_run = replace(as_run, y=as_run.x)
    for problem in (forward, as_run):
        assert plan_rows(problem, H200) is None
        batch = plan_batch(problem, H200)
        assert batch is not None and batch.strategy == "row_pipeline"
    assert plan_batch(replace(as_run, running=None), H200) is None, "rows like those of instance norm"
    assert plan_batch(backward, H200) is not None


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_they_keep_the_rules_of_rows(device: str) -> None:
    planned = {"row_pipeline": 0, "row_block": 0}
    shapes = [*RESNET, *ANYWHERE, *TINY]
    shapes += [(2, 8, 2**18), (3, 5, 400_000), (130, 33, 8 * 131), (7, 600, 50_000), (64, 512, 196), (256, 256, 13**2)]
    for shape, dtype in itertools.product(shapes, ("float16", "float32")):
        for problem in batch_norm(shape, dtype):
            rows = as_rows(problem)
            for chosen in (plan_rows(problem, GPUS[device]), plan_batch(problem, GPUS[device])):
                if chosen is not None:
                    planned[chosen.strategy] += 1
                    for rule in plan_rules.RULES:
                        rule(rows, GPUS[device], chosen)
    assert min(planned.values()) > 16


def test_one_channel_of_several_is_no_run_of_memory() -> None:
    """A batch norm of it is a single row, whose pieces lie apart: what tuning tries must not take it for one run."""
    x = view_of(data(1, (4, 4, 16), "float16")[:, :1])
    assert x is not None
    options: dict[str, Any] = {
        "channel_axis": 1,
        "channels_per_set": 1,
        "over_samples": True,
        "eps": 1e-5,
        "stats": True,
    }
    rows = as_rows(ChannelForward.of(x, None, None, x, **options))
    assert rows is not None and rows.row_sizes == (1,) and rows.column_sizes == (4, 16)
    assert {geometry.stage for geometry in row_candidates.candidates(rows, Device())} == {"direct", "ahead"}
