"""Rows that blocks or clusters claim one by one: every one is computed, as by those that have fixed shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, Case, EmulatorRunner, Norm, check, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import plain_forward
from test_rows_of_channels import check_forward, forward, norm_of

from cunorm.plan import Device, Plan, RowBlock, plan, plan_with, rows_of_channels
from cunorm.problem import ChannelProblem, ForwardProblem

DEVICE = Device("sm_90", multiprocessors=8, threads_per_multiprocessor=512, clusters=(3, 2, 0, 0))
TWO = RowBlock(4, 1, 64, 1, 2, "ahead", weights="staged", blocks_per_multiprocessor=1)
ROWS = 3 * 8 + 2  # of three clusters, some of which take more than others


def claims(chosen: Plan) -> bool:
    *cleared, item = chosen.launches
    claimed = dict(item.constants)["CLAIMS"] > 0
    assert [launch.kernel for launch in cleared] == ["zeros"] * claimed
    assert dict(item.arguments)["claimed"] == ("counters" if claimed else 0)
    return claimed


def runner(geometry: RowBlock, seed: int = 0, *, claiming: bool = True) -> EmulatorRunner:
    def choose(problem: Any, device: Device) -> Plan:
        chosen = plan_with(problem, device, geometry if isinstance(problem, ForwardProblem) else None)
        assert not isinstance(problem, ForwardProblem) or claims(chosen) == claiming
        return chosen

    return EmulatorRunner(DEVICE, choose, seed)


@NEEDS_COMPILER
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_row_is_computed(dtype: str, blocks: int, norm: Norm) -> None:
    width = {"bfloat16": 8, "float32": 4, "float64": 2}[dtype]
    shape = (ROWS, blocks * 64 * width - width)
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    case = Case(data(0, shape, dtype), weight, bias if norm.centered else None, norm=norm)
    check(runner(replace(TWO, width=width, blocks_per_row=blocks), blocks), case)


@NEEDS_COMPILER
@pytest.mark.parametrize("residual", [False, True])
def test_who_computes_a_row_makes_no_difference(residual: bool) -> None:
    """Whatever the order in which threads run; and beside fixed shares, which two rows ahead have."""
    shape = (ROWS, 512)
    added = data(3, shape) if residual else None
    case = Case(data(0, shape), data(1, shape[1:], shift=1.0), data(2, shape[1:]), residual=added)
    fixed = runner(replace(TWO, rows_ahead=2), claiming=False).forward(case)
    for seed in range(3):
        found = runner(TWO, seed).forward(case)
        assert all(x is y is None or x.tobytes() == y.tobytes() for x, y in zip(found, fixed))


# Of blocks, and of rows that begin in eight ways, for each of which there is a counter.
OTHERS = {
    "a block": ((70, 500), "float32", replace(TWO, vectors=2, blocks_per_row=1)),
    "a block, directly": ((70, 500), "float32", replace(TWO, vectors=2, blocks_per_row=1, stage="direct")),
    "peeled": ((75, 1003), "bfloat16", RowBlock(8, 2, 64, 1, 1, "ahead", True, "staged", 1)),
    "peeled, directly": ((75, 1003), "float16", RowBlock(8, 2, 64, 1, 1, "direct", True, "staged", 1)),
    "peeled, of two blocks": ((139, 1003), "bfloat16", RowBlock(8, 1, 64, 1, 2, "ahead", True, "staged", 1)),
    "every other begins alike": ((70, 1004), "bfloat16", RowBlock(8, 2, 64, 1, 1, "direct", True, "late", 1)),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer_norm", "rms_norm"])
def test_rows_of_a_block_and_rows_that_begin_anywhere(norm: Norm, kind: str) -> None:
    shape, dtype, geometry = OTHERS[kind]
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    case = Case(data(0, shape, dtype), weight, bias if norm.centered else None, norm=norm)
    check(runner(geometry, 1), case)


def of_channels(geometry: RowBlock) -> Callable[[ChannelProblem], Plan]:
    def choose(problem: ChannelProblem) -> Plan:
        chosen = rows_of_channels.plan_with(problem, DEVICE, geometry)
        assert claims(chosen)
        return chosen

    return choose


@NEEDS_COMPILER
def test_channels_of_rows_that_are_claimed() -> None:
    """Their weights are staged for each row; and where they begin within vectors, found for each number."""
    norm = norm_of(17, 16, 4, 64, "float32", activation="silu")
    check_forward(norm, of_channels(replace(TWO, vectors=1, threads_per_row=64, blocks_per_row=1, weights="staged")))
    check_forward(norm, of_channels(replace(TWO, threads_per_row=64, blocks_per_row=2, weights="late")))
    check_forward(norm_of(24, 12, 4, 63, "bfloat16"), of_channels(replace(OTHERS["peeled"][2], weights="late")))


@NEEDS_COMPILER
def test_y_may_be_written_over_x() -> None:
    norm = norm_of(17, 16, 4, 64, "float32", activation="silu")
    choose = of_channels(replace(TWO, blocks_per_row=1))
    expected, *_ = forward(norm, choose)
    x = norm.x.copy()
    y, *_ = forward(replace(norm, x=x), choose, y=x)
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("rows", "claimed"), [(8192, True), (480, True), (479, False)])
def test_rows_are_claimed_where_each_cluster_has_eight_or_more(rows: int, claimed: bool) -> None:
    chosen = plan(plain_forward(rows, 65_536, "bfloat16"), Device())
    assert chosen.strategy == "row_cluster" and claims(chosen) == claimed
