"""Rows ahead, some of which begin in the middle of a sector of 32 bytes: so they do in shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import (
    RUNNERS,
    SMALL_DEVICE,
    Array,
    Case,
    EmulatorRunner,
    Norm,
    assert_any_order_gives_the_same,
    check,
    data,
)
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_backward, plain_forward
from plan_rules import RULES

from cunorm.emulator import plans
from cunorm.plan import Device, Plan, RowBlock, plan, plan_with
from cunorm.problem import BackwardProblem, Matrix, Vector

# By three blocks, one row each, those that come to a slot begin in turns behind an even multiple and an odd one.
THREE = replace(SMALL_DEVICE, multiprocessors=3)
# More turns than slots; threads that share a warp, that share a block, and that share a row with another block.
WARP = RowBlock(8, 2, 16, 4, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=2)
BLOCK = RowBlock(8, 2, 64, 1, 1, "ahead", weights="early", blocks_per_multiprocessor=1, rows_ahead=3)
FLOAT32 = RowBlock(4, 3, 32, 2, 1, "ahead", weights="late", blocks_per_multiprocessor=1, rows_ahead=1)
LAYOUTS: dict[str, tuple[tuple[int, int], str, RowBlock]] = {
    "rows of part of a warp": ((2 * 8 * 9 + 21, 248), "float16", WARP),
    "an odd number of rows ahead": ((40, 1000), "bfloat16", BLOCK),
    "two rows a block": ((70, 380), "float32", FLOAT32),
    "rows of two blocks": ((40, 2008), "bfloat16", replace(BLOCK, blocks_per_row=2, rows_ahead=1, weights="staged")),
    "one row ahead": ((40, 1000), "float16", replace(BLOCK, rows_ahead=1)),
    "parts that begin so": ((40, 2000), "float16", replace(BLOCK, blocks_per_row=2, rows_ahead=2)),
}


def backward_of(rows: int, columns: int, dtype: str, residual: bool) -> BackwardProblem:
    problem = plain_backward(rows, columns, dtype)
    return replace(problem, dresidual_out=problem.x) if residual else problem


class Staggered:
    """What plans problems by a geometry, and sees that all their rows are staggered."""

    def __init__(self, geometry: RowBlock) -> None:
        self.geometry = geometry

    def __call__(self, problem: Any, device: Device) -> Plan:
        chosen = plan_with(problem, device, self.geometry)
        for rule in RULES:
            rule(problem, device, chosen)
        constants = [dict(item.constants) for item in chosen.launches if item.kernel.startswith("row_block")]
        assert [of_kernel["STAGGERED"] for of_kernel in constants] == [1]
        return chosen


def late_by_half(seed: int, shape: tuple[int, int], dtype: str) -> Array:
    """Data of which the first row begins at an odd multiple of 16 bytes."""
    pieces = 16 // data(0, (1,), dtype).itemsize
    memory = data(seed, (3 * pieces + shape[0] * shape[1],), dtype)
    begin = pieces * (1 + (memory.ctypes.data // 16) % 2)
    return memory[begin : begin + shape[0] * shape[1]].reshape(shape)


@NEEDS_COMPILER
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts(kind: str, residual: bool) -> None:
    shape, dtype, geometry = LAYOUTS[kind]
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    x, dy, added = late_by_half(3, shape, dtype), data(4, shape, dtype), late_by_half(5, shape, dtype)
    case = Case(x, weight, bias, residual=added if residual else None)
    check(EmulatorRunner(THREE, Staggered(geometry)), case, dy, added if residual else None)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((600, 1000), "float16"), ((900, 500), "float32"), ((150, 20_008), "bfloat16")], ids=str
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_built_in(runner: Any, residual: bool, shape: tuple[int, int], dtype: str) -> None:
    x, dy, added = (late_by_half(seed, shape, dtype) for seed in (3, 4, 5))
    more = added if residual else None
    check(runner, Case(x, data(1, shape[1:], dtype), data(2, shape[1:], dtype), residual=more), dy, more)
    backward = plan(backward_of(*shape, dtype, residual=residual), SMALL_DEVICE).launches[0]
    assert dict(backward.constants)["STAGGERED"]


@NEEDS_COMPILER
def test_padded_rows_that_begin_otherwise_in_each_tensor() -> None:
    dy = data(4, (40, 1008), "bfloat16")[:, :1000]
    case = Case(data(3, (40, 1000), "bfloat16"), data(1, (1000,), "bfloat16"), norm=Norm(centered=False))
    check(EmulatorRunner(THREE, Staggered(BLOCK)), case, dy)


@NEEDS_COMPILER
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_order_of_threads_does_not_matter(kind: str, residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy goes to where another thread may still read."""
    shape, dtype, geometry = LAYOUTS[kind]
    choose = Staggered(geometry)

    def run(self: EmulatorRunner, problem: Any, operands: dict[str, Array | None]) -> None:
        plans.run_plan(choose(problem, THREE), operands, seed=self.seed)

    monkeypatch.setattr(EmulatorRunner, "run", run)
    added = data(5, shape, dtype) if residual else None
    case = Case(data(3, shape, dtype), data(1, shape[1:], dtype), data(2, shape[1:], dtype), residual=added)
    assert_any_order_gives_the_same(case, data(4, shape, dtype), added)


PLAIN = plain_backward(4096, 4096, "bfloat16")


H200 = GPUS["sm_90"]
SILU = Norm(activation="silu")


@pytest.mark.parametrize(
    ("problem", "staggered"),
    [
        (PLAIN, False),
        (plain_backward(4096, 3000, "bfloat16"), True),
        (plain_backward(4096, 3008, "bfloat16"), False),
        (plain_backward(4096, 3001, "bfloat16"), False),
        (plain_backward(100_000, 104, "bfloat16"), False),
        (plain_backward(4096, 500, "float32"), True),
        (plain_backward(4096, 502, "float64"), False),
        (backward_of(4096, 5000, "float16", residual=True), True),
        (backward_of(4096, 10_008, "float16", residual=True), False),  # it would spill
        (replace(PLAIN, dy=Matrix("bfloat16", (4104,), (1,))), True),
        (replace(PLAIN, dx=Matrix("bfloat16", (4104,), (1,))), False),
        (replace(plain_backward(4096, 3000, "bfloat16"), weight=Vector("float32")), False),
        (replace(plain_backward(4096, 3000, "bfloat16"), weight=None, dweight=None, dbias=None), False),
        (replace(plain_backward(8192, 1000, "bfloat16"), norm=SILU, bias=Vector("bfloat16")), True),
        (replace(plain_backward(8192, 520, "bfloat16"), norm=SILU, bias=Vector("bfloat16")), False),
        (replace(backward_of(8192, 1000, "bfloat16", residual=True), norm=SILU, bias=Vector("bfloat16")), False),
        (plain_backward(4096, 50_264, "bfloat16"), True),
        (plain_forward(4096, 50_264, "bfloat16"), True),
        (plain_forward(4096, 3000, "bfloat16"), False),
    ],
)
def test_which_rows_are_staggered(problem: Any, staggered: bool) -> None:
    def are_staggered(device: Device) -> bool:
        return any(dict(item.constants).get("STAGGERED") for item in plan(problem, device).launches)

    assert are_staggered(H200) == staggered
    assert not are_staggered(GPUS["sm_100"]) and not are_staggered(replace(H200, memory_rate=20e3))


def test_rows_that_fill_the_shared_memory_are_not_staggered() -> None:
    problem = plain_backward(4096, 14_328, "bfloat16")
    geometry = RowBlock(8, 4, 512, 1, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=2)
    for rows_ahead, expected in ((2, 1), (3, 0)):
        chosen = plan_with(problem, H200, replace(geometry, rows_ahead=rows_ahead))
        assert dict(chosen.launches[0].constants)["STAGGERED"] == expected
