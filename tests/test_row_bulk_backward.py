"""Gradients of rows that come and leave as runs of memory by bulk copies, on the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import (
    ACTIVATED_NORMS,
    ALL_GRADIENTS,
    RMS_NORM,
    Array,
    Case,
    EmulatorRunner,
    NumpyRunner,
    assert_gradients,
    data,
)
from emulator_cases import NEEDS_COMPILER
from test_long_rows import affine

from cunorm.plan import Device, Plan, rows
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.problem import BackwardProblem, Norm

pytestmark = NEEDS_COMPILER
DEVICE = Device("sm_90", multiprocessors=2, threads_per_multiprocessor=512)
WARP = RowBulkBackward(1, 5, 32, 2, 8, stages=3, min_blocks=1)  # up to 160 columns
LAYOUTS = {
    "a warp each": (WARP, 129),
    "a warp each, no vector more": (replace(WARP, vectors=4), 127),
    "two stages": (replace(WARP, stages=2), 129),
    "four stages": (replace(WARP, stages=4), 129),
    "a thread each": (RowBulkBackward(1, 9, 1, 32, 32, 2, 2), 9),
    "several a warp": (RowBulkBackward(1, 9, 8, 8, 16, 2, 1), 67),
    "two warps each": (RowBulkBackward(1, 3, 64, 2, 8, 3, 1), 131),
    "a row at once": (RowBulkBackward(1, 5, 32, 1, 8, 3, 1), 133),
    "pairs": (RowBulkBackward(2, 3, 32, 2, 4, 2, 1), 130),
    "fours": (RowBulkBackward(4, 2, 16, 4, 8, 3, 1), 100),
}


def run(
    case: Case,
    geometry: RowBulkBackward,
    dy: Array,
    mask: tuple[bool, ...] = ALL_GRADIENTS,
    dresidual_out: Array | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """dx, dweight and dbias, from the statistics of the reference."""

    def choose(problem: BackwardProblem, device: Device) -> Plan:
        return rows.plan_with(problem, device, geometry)

    runner = EmulatorRunner(DEVICE, choose, seed)
    return runner.backward(case.backward(NumpyRunner().forward(case), dy, mask, dresidual_out))


def check(case: Case, geometry: RowBulkBackward, dresidual_out: Array | None = None) -> None:
    dy = data(7, case.x.shape, case.x.dtype.name)
    before = case.x.copy(), dy.copy()
    assert_gradients(case, run(case, geometry, dy, dresidual_out=dresidual_out), dy, dresidual_out)
    assert (case.x.tobytes(), dy.tobytes()) == tuple(array.tobytes() for array in before), "an input was modified"


@pytest.mark.parametrize("rows", [1, 16, 77])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, rows: int) -> None:
    """A block has no row, one run or several, and the last run fewer rows, which end within 16 bytes."""
    geometry, columns = LAYOUTS[layout]
    check(Case(data(0, (rows, columns), "bfloat16"), *affine(columns, "bfloat16")), geometry)


def test_a_run_without_a_whole_piece() -> None:
    """The last is a row of five numbers."""
    check(Case(data(0, (65, 5), "bfloat16"), *affine(5, "bfloat16")), RowBulkBackward(1, 5, 1, 32, 32, 2, 1))


@pytest.mark.parametrize("dtype, weight", [("float16", None), ("float32", None), ("bfloat16", "float32")])
def test_dtypes(dtype: str, weight: str | None) -> None:
    check(Case(data(0, (45, 129), dtype), *affine(129, dtype, weight)), WARP)


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS], ids=str)
@pytest.mark.parametrize("layout", ["a warp each", "two warps each", "pairs"])
def test_norms(layout: str, norm: Norm) -> None:
    geometry, columns = LAYOUTS[layout]
    weight, bias = affine(columns, "bfloat16")
    check(Case(data(0, (45, columns), "bfloat16"), weight, bias, norm=norm), geometry)


@pytest.mark.parametrize("layout", ["a warp each", "two stages", "fours"])
def test_gradient_of_the_residual(layout: str) -> None:
    geometry, columns = LAYOUTS[layout]
    shape = (45, columns)
    case = Case(data(0, shape, "float16"), *affine(columns, "float16"), residual=data(3, shape, "float16"))
    check(case, geometry, data(8, shape, "float16"))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (True, True, False), (False, False, True)])
def test_some_of_the_gradients(mask: tuple[bool, ...]) -> None:
    case = Case(data(0, (45, 129), "bfloat16"), *affine(129, "bfloat16"))
    dy = data(7, case.x.shape, "bfloat16")
    wanted = run(case, WARP, dy)
    found = run(case, WARP, dy, mask)
    for one, other, asked in zip(found, wanted, mask):
        assert one.tobytes() == other.tobytes() if asked else one is None


@pytest.mark.parametrize("layout", ["a warp each", "two stages", "several a warp", "two warps each"])
def test_the_order_of_threads_does_not_matter(layout: str) -> None:
    geometry, columns = LAYOUTS[layout]
    shape = (77, columns)
    case, dy = Case(data(0, shape, "bfloat16"), *affine(columns, "bfloat16")), data(7, shape, "bfloat16")
    first = run(case, geometry, dy)
    for seed in range(1, 4):
        again = run(case, geometry, dy, seed=seed)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(first, again))
