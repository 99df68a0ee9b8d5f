"""Rows that begin anywhere, whose weights lie transposed in shared memory: each way to lay them, on the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, SMALL_DEVICE, Case, EmulatorRunner, Norm, assert_forward, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, RowBlock, plan, plan_with
from cunorm.plan.row_transposed import transposed_row
from cunorm.problem import ForwardProblem, Matrix, Vector

H200 = GPUS["sm_90"]
SILU, GELU_RMS = Norm(activation="silu"), Norm(False, 1.0, "gelu")


def way_of(chosen: Plan) -> tuple[int, int, int] | None:
    """Threads of a row, vectors of each and rows of a block, where weights are transposed."""
    constants = dict(chosen.launches[-1].constants)
    names = "THREADS_PER_ROW", "VECTORS", "ROWS_PER_BLOCK"
    return tuple(constants[name] for name in names) if constants["WEIGHTS"] == "transposed" else None  # type: ignore[return-value]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "residual", "weights", "way"),
    [
        (500, 65, LAYER_NORM, False, "bfloat16", (4, 2, 32)),  # the last block has fewer rows
        (500, 90, LAYER_NORM, False, "bfloat16", (4, 3, 32)),
        (40, 129, SILU, False, "bfloat16", (8, 2, 16)),
        (1300, 132, LAYER_NORM, False, "float32", (4, 4, 32)),
        (9, 257, GELU_RMS, False, "bfloat16", (16, 2, 4)),
        (200, 258, LAYER_NORM, False, "float32", (8, 4, 16)),
        (33, 513, SILU, True, "bfloat16", (16, 4, 8)),
        (230, 777, LAYER_NORM, False, "bfloat16", (16, 7, 16)),
        (40, 1023, GELU_RMS, False, "bfloat16", (16, 8, 8)),
        (60, 641, SILU, False, "bfloat16", (16, 5, 16)),
        (12, 1023, SILU, True, "bfloat16", (32, 4, 4)),
        (2, 1537, SILU, False, "float32", (64, 3, 1)),
        (20, 2049, SILU, False, "bfloat16", (32, 8, 8)),
    ],
    ids=str,
)
def test_each_way(rows: int, columns: int, norm: Norm, residual: bool, weights: str, way: tuple[int, int, int]) -> None:
    found = []

    def choose(problem: Any, device: Device) -> Plan:
        chosen = plan(problem, device)
        for rule in RULES:
            rule(problem, device, chosen)
        found.append(way_of(chosen))
        return chosen

    shape = (rows, columns)
    weight, bias = data(1, shape[1:], weights, shift=1.0), data(2, shape[1:], weights)
    added = data(3, shape, "bfloat16") if residual else None
    case = Case(data(0, shape, "bfloat16"), weight, bias if norm.centered else None, residual=added, norm=norm)
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, choose).forward(case))
    assert found == [way]


@NEEDS_COMPILER
@pytest.mark.parametrize("affine", ["both", "weight", "bias"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_rows_that_begin_anywhere(dtype: str, affine: str) -> None:
    """Also where that is not planned: of float32, by turns, and of a bias alone, from where it is not aligned."""
    shape, width = (90, 257), 8 if dtype == "float16" else 4
    vectors = 257 // width // 16
    geometry = RowBlock(width, vectors + 1, 16, 4, 1, "direct", True, "transposed", blocks_per_multiprocessor=1)
    weight, bias = data(1, (258,), dtype)[1:], data(2, (258,), dtype)[1:]
    parameters = (weight if affine != "bias" else None, bias if affine != "weight" else None)
    case = Case(data(0, shape, dtype), *parameters)
    # Of three multiprocessors each comes to rows that begin otherwise than its last.
    for device in (SMALL_DEVICE, replace(SMALL_DEVICE, multiprocessors=3)):
        runner = EmulatorRunner(device, lambda problem, device: plan_with(problem, device, geometry))
        assert_forward(case, runner.forward(case))


@pytest.mark.parametrize(
    ("problem", "device"),
    [
        (plain_forward(100_000, 256, "bfloat16"), H200),
        (plain_forward(100_000, 257, "float32"), H200),
        (replace(plain_forward(100_000, 257, "bfloat16"), norm=RMS_NORM, bias=None), H200),
        (replace(plain_forward(100_000, 257, "bfloat16"), weight=Vector("float64")), H200),
        (replace(plain_forward(100_000, 257, "bfloat16"), weight=None, bias=None), H200),
        (replace(plain_forward(100_000, 257, "bfloat16"), x=Matrix("bfloat16", (258,), (1,))), H200),
        (plain_forward(100_000, 257, "bfloat16", residual=True), H200),
        (plain_forward(100_000, 100, "bfloat16"), H200),  # whole vectors of 8 bytes
        (plain_forward(100_000, 33, "bfloat16"), H200),
        (plain_forward(100_000, 4097, "bfloat16"), H200),
        (plain_forward(32_768, 1023, "bfloat16"), H200),  # neither few nor many
        (plain_forward(100_000, 257, "bfloat16"), replace(H200, memory_rate=20e3)),
    ],
    ids=str,
)
def test_others_are_laid_otherwise(problem: ForwardProblem, device: Device) -> None:
    assert way_of(plan(problem, device)) is None


@pytest.mark.parametrize("columns", [257, 513, 769])
def test_rows_between_few_and_many_take_turns(columns: int) -> None:
    """As the case of 200 rows does on the emulator."""
    for rows, turns in ((1024, 0), (32_768, 1), (1_000_000, 0)):
        chosen = plan(plain_forward(rows, columns, "bfloat16"), H200)
        assert way_of(chosen) is not None
        assert dict(chosen.launches[-1].constants)["TAKES_TURNS"] == turns


def test_every_row_has_as_many_threads_as_it_needs() -> None:
    for rows in (4, 300, 3000, 30_000, 300_000):
        for columns in range(64, 2056):
            problem = replace(plain_forward(rows, columns, "bfloat16"), norm=SILU)
            geometry = transposed_row(problem, H200)
            if geometry is None:
                assert columns * 2 % 16 == 0 or columns < 128 or columns > 1024
                continue
            assert geometry.capacity >= columns // 8 * 8 and geometry.vectors <= 8
            assert geometry.threads_per_row <= 64 and geometry.threads >= 64
