"""Rows that are laid by their length where memory is fast: each way, on the emulator, and what is laid otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, SMALL_DEVICE, Array, Case, EmulatorRunner, Norm, assert_forward, check, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_backward, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, plan_with
from cunorm.plan.row_activated import activated_row_forward
from cunorm.plan.row_clusters import clusters_backward, clusters_forward
from cunorm.plan.row_geometry import backward_geometry, forward_geometry
from cunorm.plan.row_half import row_of_half_vectors
from cunorm.plan.row_plain import (
    plain_float32_backward,
    plain_half_backward,
    plain_peeled_backward,
    plain_row_backward,
)
from cunorm.plan.row_shifted import shifted_row_backward
from cunorm.plan.row_turns import row_in_turns
from cunorm.problem import BackwardProblem, ForwardProblem, Matrix, Problem, Vector

H200 = GPUS["sm_90"]
# With clusters of eight blocks too.
DEVICE = replace(SMALL_DEVICE, clusters=(1, 1, 1, 0))
SILU, RMS_SILU, GELU = Norm(activation="silu"), Norm(centered=False, activation="silu"), Norm(activation="gelu")
Way = tuple[object, ...]


def way_of(problem: Problem, device: Device) -> Way:
    """The width, threads of a row and vectors of each, rows and blocks, how rows come, and when weights do."""
    find: Any = forward_geometry if isinstance(problem, ForwardProblem) else backward_geometry
    found = find(problem, device)
    threads = found.threads_per_row, found.vectors, found.rows_per_block, found.blocks_per_row
    return (found.width, *threads, found.stage, found.weights)


class Choose:
    """Plans for blocks that hold rows, whatever else is faster, and remembers how these lie."""

    def __init__(self) -> None:
        self.found: list[Way] = []

    def __call__(self, problem: Any, device: Device) -> Plan:
        find: Any = forward_geometry if isinstance(problem, ForwardProblem) else backward_geometry
        chosen = plan_with(problem, device, find(problem, device))
        for rule in RULES:
            rule(problem, device, chosen)
        self.found.append(way_of(problem, device))
        return chosen


def case_of(
    rows: int, columns: int, norm: Norm, residual: bool = False, weights: str = "bfloat16", dtype: str = "bfloat16"
) -> Case:
    shape = (rows, columns)
    weight, bias = data(1, shape[1:], weights, shift=1.0), data(2, shape[1:], weights)
    added = data(3, shape, dtype) if residual else None
    x = data(0, shape, dtype)
    return Case(x, weight, bias if norm.centered else None, residual=added, norm=norm)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "residual", "weights", "way"),
    [
        # row_turns
        (90, 192, LAYER_NORM, False, "bfloat16", (8, 8, 3, 8, 1, "ahead", "staged")),
        (100, 192, RMS_NORM, False, "float32", (8, 8, 3, 8, 1, "ahead", "staged")),
        (190, 128, RMS_NORM, False, "bfloat16", (8, 4, 4, 16, 1, "ahead", "staged")),
        (50, 200, LAYER_NORM, True, "bfloat16", (8, 8, 4, 8, 1, "ahead", "early")),
        (45, 512, RMS_NORM, True, "bfloat16", (8, 16, 4, 4, 1, "ahead", "early")),
        (20, 768, LAYER_NORM, True, "bfloat16", (8, 32, 3, 2, 1, "ahead", "early")),
        # row_clusters
        (7, 7200, LAYER_NORM, False, "bfloat16", (8, 128, 4, 1, 2, "ahead", "staged")),
        (3, 12_280, RMS_NORM, False, "bfloat16", (8, 128, 3, 1, 4, "ahead", "staged")),
        (5, 12_280, RMS_NORM, False, "bfloat16", (8, 128, 6, 1, 2, "ahead", "staged")),
        (5, 8200, LAYER_NORM, True, "bfloat16", (8, 128, 5, 1, 2, "ahead", "staged")),
        (9, 4104, RMS_NORM, True, "bfloat16", (8, 128, 5, 1, 1, "direct", "staged")),
        (9, 8200, SILU, False, "bfloat16", (8, 128, 5, 1, 2, "ahead", "staged")),
        (17, 24_800, LAYER_NORM, False, "bfloat16", (8, 256, 4, 1, 4, "ahead", "staged")),
        (13, 24_800, LAYER_NORM, True, "bfloat16", (8, 512, 4, 1, 2, "ahead", "staged")),
        (3, 33_000, RMS_NORM, False, "bfloat16", (8, 128, 5, 1, 8, "ahead", "staged")),
        # row_half
        (160, 132, LAYER_NORM, False, "bfloat16", (4, 8, 5, 16, 1, "direct", "early")),
        (80, 260, LAYER_NORM, False, "bfloat16", (4, 16, 5, 8, 1, "direct", "staged")),
        (20, 1100, LAYER_NORM, False, "bfloat16", (4, 32, 9, 4, 1, "direct", "staged")),
        (60, 300, RMS_NORM, False, "bfloat16", (4, 16, 5, 8, 1, "direct", "staged")),
        (17, 1100, RMS_NORM, False, "bfloat16", (4, 64, 5, 4, 1, "direct", "early")),
        (160, 132, RMS_NORM, True, "bfloat16", (4, 16, 3, 8, 1, "direct", "early")),
        (40, 500, LAYER_NORM, True, "bfloat16", (4, 32, 4, 4, 1, "direct", "staged")),
    ],
    ids=str,
)
def test_each_way_forward(
    rows: int, columns: int, norm: Norm, residual: bool, weights: str, way: tuple[object, ...]
) -> None:
    choose, case = Choose(), case_of(rows, columns, norm, residual, weights)
    assert_forward(case, EmulatorRunner(DEVICE, choose).forward(case))
    assert choose.found == [way]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "residual", "way"),
    [
        # row_plain: rows of whole vectors
        (520, 16, LAYER_NORM, False, (8, 2, 1, 128, 1, "ahead", "early")),
        (260, 32, RMS_NORM, False, (8, 4, 1, 64, 1, "ahead", "early")),
        (210, 40, LAYER_NORM, True, (8, 8, 1, 32, 1, "ahead", "early")),
        (95, 88, LAYER_NORM, False, (8, 16, 1, 16, 1, "ahead", "early")),
        (40, 256, RMS_NORM, False, (8, 32, 1, 8, 1, "ahead", "early")),
        (40, 360, RMS_NORM, False, (8, 16, 3, 8, 1, "ahead", "early")),
        (20, 600, LAYER_NORM, False, (8, 32, 3, 4, 1, "ahead", "early")),
        (9, 2600, LAYER_NORM, True, (8, 128, 3, 1, 1, "ahead", "staged")),
        (17, 4200, RMS_NORM, False, (8, 256, 3, 1, 1, "ahead", "early")),
        (34, 12_280, LAYER_NORM, False, (8, 256, 3, 1, 2, "ahead", "early")),
        # row_clusters
        (11, 5200, LAYER_NORM, False, (8, 128, 2, 1, 4, "ahead", "early")),
        (10, 8192, RMS_NORM, False, (8, 128, 2, 1, 4, "ahead", "early")),
        (13, 7400, LAYER_NORM, True, (8, 128, 2, 1, 4, "ahead", "early")),
        (1, 6160, LAYER_NORM, False, (8, 128, 2, 1, 4, "direct", "early")),
        (33, 12_400, LAYER_NORM, False, (8, 256, 4, 1, 2, "ahead", "early")),
        (25, 17_000, RMS_NORM, False, (8, 128, 5, 1, 4, "ahead", "early")),
        (11, 22_000, LAYER_NORM, False, (8, 128, 3, 1, 8, "ahead", "early")),
        # of 8 bytes
        (70, 132, LAYER_NORM, False, (4, 8, 5, 16, 1, "ahead", "early")),
        (9, 1028, RMS_NORM, True, (4, 64, 5, 2, 1, "ahead", "early")),
        # that begin anywhere
        (70, 133, LAYER_NORM, False, (8, 16, 1, 16, 1, "ahead", "staged")),
        (230, 257, RMS_NORM, False, (8, 16, 2, 16, 1, "ahead", "staged")),
        (150, 391, LAYER_NORM, True, (8, 16, 3, 8, 1, "ahead", "staged")),
        (20, 771, LAYER_NORM, False, (8, 32, 3, 4, 1, "ahead", "staged")),
        (20, 1537, RMS_NORM, False, (8, 64, 3, 2, 1, "ahead", "early")),
        (9, 3073, LAYER_NORM, False, (8, 128, 3, 1, 1, "ahead", "early")),
        (9, 4097, LAYER_NORM, True, (8, 256, 2, 1, 1, "ahead", "early")),
        (9, 5121, RMS_NORM, False, (8, 256, 3, 1, 1, "ahead", "staged")),
    ],
    ids=str,
)
def test_each_way_backward(rows: int, columns: int, norm: Norm, residual: bool, way: Way) -> None:
    choose, case = Choose(), case_of(rows, columns, norm, residual)
    dy = data(4, (rows, columns), "bfloat16", outliers=False)
    check(EmulatorRunner(DEVICE, choose), case, dy, data(5, dy.shape, "bfloat16") if residual else None)
    assert choose.found[-1] == way


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "way"),
    [
        (40, 384, SILU, (8, 16, 3, 8, 1, "direct", "staged")),
        (20, 640, RMS_SILU, (8, 16, 5, 8, 1, "direct", "staged")),
        (16, 832, SILU, (8, 16, 7, 8, 1, "direct", "staged")),  # the last vectors of some threads are not there
        (5, 3072, GELU, (8, 128, 3, 1, 1, "direct", "staged")),
        (16, 896, GELU, (8, 16, 7, 8, 1, "ahead", "staged")),
        (3, 6144, RMS_SILU, (8, 128, 6, 1, 1, "direct", "staged")),
    ],
    ids=str,
)
def test_each_way_under_an_activation(rows: int, columns: int, norm: Norm, way: Way) -> None:
    choose, case = Choose(), case_of(rows, columns, norm)
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, choose).forward(case))
    assert choose.found == [way]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "norm", "way"),
    [
        (21, 640, "bfloat16", GELU, (8, 16, 5, 8, 1, "ahead", "staged")),
        (13, 1160, "bfloat16", GELU, (8, 32, 5, 4, 1, "ahead", "staged")),
        (70, 100, "float32", LAYER_NORM, (4, 32, 1, 8, 1, "ahead", "staged")),
        (13, 640, "float32", RMS_NORM, (4, 64, 3, 4, 1, "ahead", "staged")),
        (9, 1000, "float32", LAYER_NORM, (4, 128, 2, 2, 1, "ahead", "staged")),
        (5, 4100, "float32", RMS_NORM, (4, 128, 3, 1, 4, "ahead", "staged")),
    ],
    ids=str,
)
def test_each_way_backward_of_some_hundred_columns(rows: int, columns: int, dtype: str, norm: Norm, way: Way) -> None:
    choose, case = Choose(), case_of(rows, columns, norm, weights=dtype, dtype=dtype)
    device = replace(SMALL_DEVICE, clusters=(1, 1, 0, 0))
    check(EmulatorRunner(device, choose), case, data(4, (rows, columns), dtype, outliers=False))
    assert choose.found[-1] == way


def late(seed: int, rows: int, columns: int) -> Array:
    """Numbers that begin 6 bytes behind a multiple of 16."""
    return data(seed, (rows * columns + 3,), "bfloat16")[3:].reshape(rows, columns)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("columns", "norm", "residual", "way"),
    [
        (3080, LAYER_NORM, True, (8, 128, 4, 1, 1, "ahead", "staged")),
        (4096, RMS_NORM, False, (8, 256, 2, 1, 1, "ahead", "staged")),
        (5640, LAYER_NORM, False, (8, 256, 3, 1, 1, "ahead", "early")),
    ],
    ids=str,
)
def test_each_way_of_rows_that_are_shifted(columns: int, norm: Norm, residual: bool, way: Way) -> None:
    choose, rows = Choose(), 7
    case = replace(case_of(rows, columns, norm), x=late(0, rows, columns))
    case = replace(case, residual=late(3, rows, columns) if residual else None)
    dresidual_out = late(5, rows, columns) if residual else None
    check(EmulatorRunner(SMALL_DEVICE, choose), case, late(4, rows, columns), dresidual_out)
    assert choose.found[-1] == way


BACKWARD = (plain_half_backward, plain_peeled_backward, plain_row_backward, shifted_row_backward)
FORWARD = (row_of_half_vectors, row_in_turns)


def found_any(problem: Problem, device: Device, width: int) -> bool:
    families: Any = FORWARD if isinstance(problem, ForwardProblem) else BACKWARD
    return any(family(problem, device, width) is not None for family in families)


@pytest.mark.parametrize("columns", [300, 384])
def test_others_lie_otherwise_forward(columns: int) -> None:
    width, problem = 8 if columns % 8 == 0 else 4, plain_forward(16_384, columns, "bfloat16")
    assert found_any(problem, H200, width)
    others: list[tuple[ForwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, norm=SILU), H200),
        (replace(problem, weight=Vector("float32")), H200),
        (plain_forward(16_384, columns, "float32"), H200),
        (plain_forward(64, columns, "bfloat16"), H200),
        (plain_forward(1 << 20, columns, "bfloat16") if width == 8 else replace(problem, weight=None, bias=None), H200),
    ]
    for other, device in others:
        assert not found_any(other, device, width)


@pytest.mark.parametrize(("columns", "width"), [(64, 8), (300, 4), (384, 8), (769, 1), (4096, 8)])
def test_others_lie_otherwise_backward(columns: int, width: int) -> None:
    problem = plain_backward(65_536, columns, "bfloat16")
    if columns == 4096:
        x = Matrix("bfloat16", (columns,), (1,), 2)
        problem = replace(problem, x=x, dy=x)
    assert found_any(problem, H200, width if width > 1 else 8)
    others: list[tuple[BackwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, norm=SILU, bias=problem.weight), H200),
        (replace(plain_backward(65_536, columns, "float32"), norm=problem.norm), H200),
        (replace(problem, row_sizes=(64,)), H200),
        (replace(problem, row_sizes=(270,)) if columns < 4096 else replace(problem, row_sizes=(130,)), H200),
    ]
    for other, device in others:
        assert not found_any(other, device, width if width > 1 else 8)


@pytest.mark.parametrize("columns", [384, 896])
def test_others_lie_otherwise_under_an_activation(columns: int) -> None:
    problem = replace(plain_forward(12_288, columns, "bfloat16"), norm=SILU)
    assert activated_row_forward(problem, H200, 8) is not None
    others: list[tuple[ForwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, norm=Norm()), H200),
        (replace(problem, row_sizes=(256,)), H200),
        (replace(problem, column_sizes=(1024,), x=plain_forward(1, 1024, "bfloat16").x), H200),
        (replace(problem, residual=problem.x, residual_out=problem.x), H200),
        (replace(problem, weight=None, bias=None), H200),
    ]
    for other, device in others:
        assert activated_row_forward(other, device, 8) is None
    # Of many rows under the exact gelu the arithmetic is the limit, but where others take long.
    many = replace(problem, norm=GELU, row_sizes=(131_072,))
    assert (activated_row_forward(many, H200, 8) is None) == (columns == 384)


@pytest.mark.parametrize(("rows", "columns"), [(264, 12_288), (1260, 26_624), (5000, 26_624)])
def test_others_are_shared_otherwise_forward(rows: int, columns: int) -> None:
    problem = plain_forward(rows, columns, "bfloat16")
    assert clusters_forward(problem, H200, 8) is not None
    others: list[tuple[ForwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, weight=Vector("float32")), H200),
        (replace(problem, weight=None, bias=None), H200),
        (replace(problem, norm=GELU), H200),
        (replace(problem, row_sizes=(100,)), H200),
        (plain_forward(100_000, 8192, "bfloat16"), H200),
        (replace(problem, x=replace(problem.x, offset=2)), H200),
    ]
    for other, device in others:
        assert clusters_forward(other, device, 8) is None


@pytest.mark.parametrize(("rows", "columns"), [(1024, 8192), (1260, 26_624), (10_000, 13_312), (1, 12_288)])
def test_others_are_shared_otherwise_backward(rows: int, columns: int) -> None:
    problem = plain_backward(rows, columns, "bfloat16")
    assert clusters_backward(problem, H200, 8) is not None
    others: list[tuple[BackwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, weight=Vector("float32")), H200),
        (replace(problem, dweight=None, dbias=None), H200),
        (replace(problem, dx=None), H200),
        (replace(problem, norm=SILU, bias=problem.weight), H200),
        (replace(problem, row_sizes=(100,)), H200),
        (plain_backward(100_000, 8192, "bfloat16"), H200),
    ]
    for other, device in others:
        assert clusters_backward(other, device, 8) is None


def test_others_lie_otherwise_backward_in_float32() -> None:
    problem = plain_backward(8192, 1024, "float32")
    assert plain_float32_backward(problem, H200, 4) is not None
    others: list[tuple[BackwardProblem, Device]] = [
        (problem, replace(H200, memory_rate=20e3)),
        (problem, replace(H200, arch="sm_100")),
        (replace(problem, norm=SILU, bias=problem.weight), H200),
        (replace(problem, row_sizes=(1024,)), H200),
        (replace(problem, row_sizes=(65_536,)), H200),
        (replace(problem, dresidual_out=problem.x), H200),
        (replace(problem, weight=None), H200),
        (plain_backward(8192, 1536, "float32"), H200),
    ]
    for other, device in others:
        assert plain_float32_backward(other, device, 4) is None


@pytest.mark.parametrize("rows", [300, 3000, 30_000, 300_000])
def test_threads_hold_their_rows(rows: int) -> None:
    """Whatever their length, and by blocks of no more than 512."""
    for columns in [*range(16, 2100), *range(2100, 13_000, 37)]:
        for problem in (plain_forward(rows, columns, "bfloat16"), plain_backward(rows, columns, "bfloat16")):
            find: Any = forward_geometry if isinstance(problem, ForwardProblem) else backward_geometry
            geometry = find(problem, H200)
            if geometry is None or geometry.blocks_per_row > 1:
                continue
            assert geometry.capacity >= columns // geometry.width * geometry.width
            assert geometry.threads <= 512
