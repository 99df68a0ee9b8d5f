"""Rows of less than 256 bytes: each way to lay them out on the emulator, and which of them a plan takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import OLD_DEVICE, SMALL_DEVICE, Case, EmulatorRunner, Norm, check, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import plain_backward, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, plan
from cunorm.problem import Matrix, Problem, Vector

H200 = Device()
MANY = 2000  # rows that fill SMALL_DEVICE
SLOW_DEVICE = replace(SMALL_DEVICE, memory_rate=22e3)  # whose memory is as slow as an H100's


def way_of(chosen: Plan) -> str:
    """How the rows of a plan come, and the threads and vectors of each."""
    constants = dict(chosen.launches[0].constants)
    if chosen.strategy == "row_bulk":
        return f"bulk {constants['THREADS_PER_ROW']}x{constants['VECTORS']}"
    peeled = " peeled" if constants["PEELED"] else ""
    return f"{constants['STAGE']}{peeled} {constants['THREADS_PER_ROW']}x{constants['VECTORS']}"


def check_ways(
    device: Device, rows: int, columns: int, dtype: str, norm: Norm, residual: bool, expected: tuple[str, str]
) -> None:
    ways: list[str] = []

    def choose(problem: Any, device: Device) -> Plan:
        chosen = plan(problem, device)
        for rule in RULES:
            rule(problem, device, chosen)
        ways.append(way_of(chosen))
        return chosen

    shape = rows, columns
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    added = data(3, shape, dtype) if residual else None
    check(EmulatorRunner(device, choose), Case(data(0, shape, dtype), weight, bias, residual=added, norm=norm))
    assert tuple(ways) == expected


# Columns and dtype, and the ways forward and backward.
WAYS = [
    (3, "float16", ("direct 1x3", "direct 1x3")),
    (10, "bfloat16", ("direct 1x5", "direct 1x5")),
    (20, "float16", ("direct 1x5", "direct 1x5")),
    (22, "bfloat16", ("direct 2x6", "direct 2x6")),
    (25, "float16", ("run 1x25", "run 2x13")),
    (30, "float16", ("direct 4x4", "direct 2x8")),
    (36, "bfloat16", ("direct 2x5", "ahead 2x5")),
    (41, "float16", ("run 2x21", "ahead peeled 4x2")),
    (60, "float16", ("direct 4x4", "ahead 4x4")),
    (101, "bfloat16", ("direct peeled 4x3", "ahead peeled 8x2")),
    (108, "float16", ("direct 8x4", "ahead 8x4")),
    (5, "float32", ("direct 1x5", "direct 1x5")),
    (9, "float32", ("run 1x9", "run 1x9")),
    (18, "float32", ("direct 4x3", "direct 4x3")),
    (29, "float32", ("direct 4x8", "direct 4x8")),
    (63, "float32", ("direct 8x8", "direct 8x8")),
    (17, "float64", ("direct 4x5", "ahead 8x3")),
]


# Those that are others where memory is fast.
FAST_WAYS = [
    (10, "float32", ("bulk 1x5", "ahead 1x5")),
    (17, "float32", ("bulk 2x9", "bulk 2x9")),
    (20, "float32", ("direct 4x2", "direct 4x2")),
]


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "dtype", "ways"), WAYS, ids=str)
def test_many_rows(columns: int, dtype: str, ways: tuple[str, str]) -> None:
    check_ways(SLOW_DEVICE, MANY, columns, dtype, Norm(), False, ways)


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "dtype", "ways"), FAST_WAYS, ids=str)
def test_many_rows_of_fast_memory(columns: int, dtype: str, ways: tuple[str, str]) -> None:
    check_ways(SMALL_DEVICE, MANY, columns, dtype, Norm(), False, ways)


@pytest.mark.parametrize(("centered", "forward"), [(True, "direct 4x7"), (False, "direct peeled 4x3")])
def test_rows_without_a_bias_are_peeled_sooner(centered: bool, forward: str) -> None:
    """As 3 vectors of 16 bytes of four threads, not 7 of 8: where there is space between them."""
    apart, plain = Matrix("float16", (108,), (1,)), plain_forward(MANY, 100, "float16")
    problem = replace(plain, x=apart, y=apart, norm=Norm(centered), bias=plain.bias if centered else None)
    chosen = plan(problem, SMALL_DEVICE)
    for rule in RULES:
        rule(problem, SMALL_DEVICE, chosen)
    assert way_of(chosen) == forward


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "ways"), [(20, ("direct 1x5", "ahead 2x3")), (14, ("direct 1x7", "ahead 2x4"))])
def test_an_activation_has_fewer_threads_a_row(columns: int, ways: tuple[str, str]) -> None:
    check_ways(SLOW_DEVICE, MANY, columns, "bfloat16", Norm(activation="silu"), False, ways)


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "ways"), [(18, ("run 1x9", "direct 1x9")), (20, ("run 1x5", "direct 1x5"))])
def test_what_leaves_sooner_leaves_in_whole_sectors(columns: int, ways: tuple[str, str]) -> None:
    check_ways(SLOW_DEVICE, MANY, columns, "float16", Norm(centered=False), True, ways)


@NEEDS_COMPILER
@pytest.mark.parametrize("columns", [10, 101])
def test_few_rows_have_more_threads(columns: int) -> None:
    ways = {10: ("direct 8x1", "direct 8x1"), 101: ("direct 32x4", "direct 32x4")}[columns]
    check_ways(SMALL_DEVICE, 4, columns, "float16", Norm(), False, ways)


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "ways"), [(25, ("run 1x25", "run 2x13")), (101, ("direct 16x7", "direct 16x7"))])
def test_older_gpus(columns: int, ways: tuple[str, str]) -> None:
    check_ways(OLD_DEVICE, MANY, columns, "float16", Norm(), False, ways)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_every_short_row_has_a_plan(dtype: str, activation: str | None) -> None:
    """With wide weights too, of all sizes that are not whole vectors, on every kind of GPU."""
    for columns in range(1, 64):
        for rows in (1, 1000, 1_000_000):
            for plain in (plain_forward(rows, columns, dtype), plain_backward(rows, columns, dtype)):
                problem: Problem = replace(plain, norm=Norm(activation=activation), weight=Vector("float32"))
                for device in (H200, Device("sm_75", threads_per_multiprocessor=1024), Device("sm_120")):
                    chosen = plan(problem, device)
                    assert chosen.launches[0].kernel.startswith(("row_block", "row_bulk"))
                    for rule in RULES:
                        rule(problem, device, chosen)


@pytest.mark.parametrize(
    ("problem", "device"),
    [(plain_backward(2048, 2, "float64"), SMALL_DEVICE), (plain_backward(1, 16_383, "float16"), OLD_DEVICE)],
    ids=["few threads at once", "little shared memory"],
)
def test_small_gpus(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
    for rule in RULES:
        rule(problem, device, chosen)
