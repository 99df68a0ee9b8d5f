"""Rows that begin in different ways, of which clusters take equal parts backward: each is added to its columns' sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, Case, EmulatorRunner, Norm, check, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import plain_backward
from plan_rules import RULES

from cunorm.plan import Device, Plan, RowBlock, plan, plan_with, row_geometry, rows
from cunorm.problem import BackwardProblem

PAIR = RowBlock(8, 1, 64, 1, 2, "ahead", True, "staged", blocks_per_multiprocessor=1)
COLUMNS = 1003


def runner(groups: int, geometry: RowBlock, *, shares: bool = True) -> EmulatorRunner:
    device = Device("sm_90", multiprocessors=8, threads_per_multiprocessor=512, clusters=(groups, 2, 0, 0))

    def choose(problem: Any, device: Device) -> Plan:
        if not isinstance(problem, BackwardProblem):
            return plan(problem, device)
        chosen = plan_with(problem, device, geometry)
        for rule in RULES:
            rule(problem, device, chosen)
        main, sums = chosen.launches
        classes = dict(main.constants)["CLASSES"]
        assert (classes > 1) == shares and main.grid == 2 * groups
        assert dict(sums.arguments)["rows"] == groups + classes - 1
        return chosen

    return EmulatorRunner(device, choose)


def case_of(rows: int, dtype: str, norm: Norm = LAYER_NORM, residual: bool = False) -> Case:
    shape = rows, COLUMNS
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    added = data(3, shape, dtype) if residual else None
    return Case(data(0, shape, dtype), weight, bias if norm.centered else None, residual=added, norm=norm)


# The ways in which rows begin are 8: fewer groups than these, parts that end within a class and just behind one, and
# hardly a row for each class.
@NEEDS_COMPILER
@pytest.mark.parametrize(("groups", "rows"), [(3, 50), (5, 33), (4, 64), (3, 9), (11, 100)])
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer_norm", "rms_norm"])
def test_every_row_is_in_one_share(norm: Norm, groups: int, rows: int) -> None:
    check(runner(groups, PAIR), case_of(rows, "bfloat16", norm))


@NEEDS_COMPILER
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
def test_rows_are_fetched_ahead_within_a_share(residual: bool, ahead: int) -> None:
    """More of them than a warp has lanes for their statistics, and not a multiple of that before the second share."""
    check(runner(3, replace(PAIR, rows_ahead=ahead)), case_of(8 * 37 + 3, "float16", residual=residual))


@NEEDS_COMPILER
def test_float32_rows_begin_in_four_ways() -> None:
    check(runner(3, replace(PAIR, width=4, vectors=2)), case_of(30, "float32"))


@NEEDS_COMPILER
def test_groups_that_divide_by_the_ways_take_turns() -> None:
    check(runner(8, PAIR, shares=False), case_of(50, "bfloat16"))


H200 = Device()


@pytest.mark.parametrize(
    ("columns", "dtype", "groups", "classes"),
    [(50_257, "bfloat16", 30, 8), (120_001, "bfloat16", 7, 8), (60_001, "float32", 7, 4), (20_001, "bfloat16", 88, 1)],
)
def test_no_multiprocessors_are_idle(columns: int, dtype: str, groups: int, classes: int) -> None:
    """Where groups as many as a multiple of the ways in which rows begin would leave a tenth of them so.

    That is of clusters, where they are not better shared by all blocks.
    """
    problem = plain_backward(8192, columns, dtype)
    item = rows.plan_with(problem, H200, row_geometry.backward_geometry(problem, H200)).launches[0]
    assert item.grid // item.cluster == groups and dict(item.constants)["CLASSES"] == classes


def test_a_row_for_each_class_at_least() -> None:
    few = plan(plain_backward(8, 40_001, "bfloat16"), H200).launches[0]
    assert dict(few.constants)["CLASSES"] == 1
