"""Rows that come and leave as runs of memory by bulk copies, on the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    ACTIVATED_NORMS,
    FAR,
    LAYER_NORM,
    RMS_NORM,
    Array,
    Case,
    EmulatorRunner,
    Results,
    assert_forward,
    data,
    far_data,
    poisoned,
)
from emulator_cases import NEEDS_COMPILER
from test_long_rows import affine

from cunorm.plan import Device, Plan, rows
from cunorm.plan.row_bulk import RowBulk
from cunorm.problem import ForwardProblem, Norm

pytestmark = NEEDS_COMPILER
DEVICE = Device("sm_90", multiprocessors=4, threads_per_multiprocessor=512)
WARP = RowBulk(1, 5, 32, 2, 8, 1)  # up to 160 columns
LAYOUTS = {
    "a warp each": (WARP, 129),
    "a warp each, no vector more": (replace(WARP, vectors=4), 127),
    "a thread each": (RowBulk(1, 9, 1, 32, 32, 1), 9),
    "several a warp": (RowBulk(1, 9, 8, 8, 16, 2), 67),
    "two warps each": (RowBulk(1, 3, 64, 2, 8, 1), 131),
    "pairs": (RowBulk(2, 3, 32, 2, 4, 1), 130),
    "fours": (RowBulk(4, 2, 16, 4, 8, 1), 100),
    "whole pieces": (RowBulk(8, 2, 8, 4, 4, 1), 120),
    "all rows at once": (replace(WARP, rows_at_once=8), 133),
}


def run(case: Case, geometry: RowBulk, stats: bool = True, out: Array | None = None, seed: int = 0) -> Results:
    def choose(problem: ForwardProblem, device: Device) -> Plan:
        return rows.plan_with(problem, device, geometry)

    return EmulatorRunner(DEVICE, choose, seed).forward(case, stats, out)


def check(case: Case, geometry: RowBulk) -> None:
    before = case.x.copy()
    assert_forward(case, run(case, geometry))
    assert case.x.tobytes() == before.tobytes(), "x was modified"


@pytest.mark.parametrize("rows", [1, 8, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, rows: int) -> None:
    """Of 37 rows, the last run has fewer, and ends within 16 bytes."""
    geometry, columns = LAYOUTS[layout]
    check(Case(data(0, (rows, columns), "bfloat16"), *affine(columns, "bfloat16")), geometry)


@pytest.mark.parametrize("dtype, weight", [("float16", None), ("float32", None), ("bfloat16", "float32")])
def test_dtypes(dtype: str, weight: str | None) -> None:
    check(Case(data(0, (21, 129), dtype), *affine(129, dtype, weight)), WARP)


def test_weight_and_bias_of_different_types() -> None:
    weight, bias = data(1, (129,), "float16", shift=1.0), data(2, (129,), "bfloat16")
    check(Case(data(0, (13, 129), "bfloat16"), weight, bias), WARP)


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS], ids=str)
@pytest.mark.parametrize("layout", ["a warp each", "two warps each", "pairs"])
def test_norms(layout: str, norm: Norm) -> None:
    geometry, columns = LAYOUTS[layout]
    weight, bias = affine(columns, "bfloat16")
    check(Case(data(0, (13, columns), "bfloat16"), weight, bias, norm=norm), geometry)


@pytest.mark.parametrize("names", ["", "weight", "bias"])
def test_without_weight_or_bias(names: str) -> None:
    weight, bias = affine(129, "bfloat16")
    norm = replace(LAYER_NORM, weight_offset=0.0)
    case = Case(data(0, (13, 129), "bfloat16"), weight if names == "weight" else None, None, norm=norm)
    check(replace(case, bias=bias if names == "bias" else None), WARP)


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM, Norm(True, 0.0, "silu")], ids=str)
@pytest.mark.parametrize("layout", ["a warp each", "two warps each", "fours"])
def test_residual(layout: str, norm: Norm) -> None:
    geometry, columns = LAYOUTS[layout]
    residual = data(3, (21, columns), "float16")
    check(Case(data(0, (21, columns), "float16"), *affine(columns, "float16"), residual=residual, norm=norm), geometry)


@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero(kind: str) -> None:
    check(Case(far_data(kind, (9, 129)), *affine(129, "float32")), WARP)


def test_in_place_and_without_statistics() -> None:
    case = Case(data(0, (21, 129), "bfloat16"), *affine(129, "bfloat16"))
    wanted = run(case, WARP)
    found = run(case, WARP, stats=False)
    assert found.y.tobytes() == wanted.y.tobytes()
    x = case.x.copy()
    in_place = run(replace(case, x=x), WARP, out=x)
    assert in_place.y.tobytes() == wanted.y.tobytes()


@pytest.mark.parametrize("late", [1, 3, 7])
def test_rows_that_all_begin_late(late: int) -> None:
    case = Case(data(0, (21 * 129 + late,), "bfloat16")[late:].reshape(21, 129), *affine(129, "bfloat16"))
    y = poisoned((21 * 129 + late,), "bfloat16")
    results = run(case, WARP, out=y[late:].reshape(21, 129))
    assert_forward(case, results)
    assert np.isnan(y[:late].astype("float32")).all(), "what lies before the rows was written"


def test_a_run_without_a_whole_piece() -> None:
    """The last of three runs is a row of nine numbers, seven of which lie before a multiple of 16 bytes."""
    case = Case(data(0, (65 * 9 + 1,), "bfloat16")[1:].reshape(65, 9), *affine(9, "bfloat16"))
    geometry, _ = LAYOUTS["a thread each"]
    assert_forward(case, run(case, geometry, out=poisoned((65 * 9 + 1,), "bfloat16")[1:].reshape(65, 9)))


@pytest.mark.parametrize("layout", ["a warp each", "several a warp", "two warps each"])
def test_the_order_of_threads_does_not_matter(layout: str) -> None:
    geometry, columns = LAYOUTS[layout]
    case = Case(
        data(0, (21, columns), "bfloat16"), *affine(columns, "bfloat16"), residual=data(3, (21, columns), "bfloat16")
    )
    first = run(case, geometry)
    for seed in range(1, 4):
        again = run(case, geometry, seed=seed)
        assert all(x is y is None or np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(first, again))
