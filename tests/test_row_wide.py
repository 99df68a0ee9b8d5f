"""Rows of sixteen-bit numbers with float32 weights: in turns that keep their weights, and read directly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, SMALL_DEVICE, Case, EmulatorRunner, Norm, assert_forward, data
from compile_cases import complaint
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, Problem, plain_backward, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, plan
from cunorm.problem import ForwardProblem, Matrix, Vector
from cunorm.resources import compile_resources

H200 = GPUS["sm_90"]


def wide(rows: int, columns: int, norm: Norm = LAYER_NORM, residual: bool = False) -> ForwardProblem:
    problem, weight = plain_forward(rows, columns, "bfloat16", residual=residual), Vector("float32")
    return replace(problem, norm=norm, weight=weight, bias=weight if norm.centered else None)


def constants_of(chosen: Plan) -> dict[str, Any]:
    (item,) = [item for item in chosen.launches if item.kernel != "zeros"]
    return dict(item.constants)


def takes_turns(chosen: Plan) -> bool:
    """Whether weights are in registers, for all turns, while the next row is on its way."""
    constants = constants_of(chosen)
    return (constants["STAGE"], constants["WEIGHTS"], constants["TAKES_TURNS"]) == ("ahead", "early", 1)


def checked_plan(problem: Any, device: Device) -> Plan:
    chosen = plan(problem, device)
    for rule in RULES:
        rule(problem, device, chosen)
    return chosen


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "columns", "norm", "residual", "way"),
    [
        (200, 256, LAYER_NORM, False, (1, 8, 4)),
        (50, 768, LAYER_NORM, False, (1, 32, 3)),
        (60, 1000, LAYER_NORM, False, (1, 16, 8)),
        (13, 2560, LAYER_NORM, False, (1, 64, 5)),
        (9, 4096, LAYER_NORM, False, (1, 64, 8)),
        (7, 5120, RMS_NORM, False, (1, 128, 5)),
        (9, 6144, LAYER_NORM, True, (1, 256, 3)),
        (5, 10_240, LAYER_NORM, False, (2, 128, 5)),
    ],
    ids=str,
)
def test_rows_in_turns(rows: int, columns: int, norm: Norm, residual: bool, way: tuple[int, int, int]) -> None:
    found = []

    def choose(problem: Any, device: Device) -> Plan:
        chosen = checked_plan(problem, device)
        constants = constants_of(chosen)
        assert takes_turns(chosen)
        found.append(tuple(constants[name] for name in ("BLOCKS_PER_ROW", "THREADS_PER_ROW", "VECTORS")))
        return chosen

    shape = (rows, columns)
    weight, bias = data(1, shape[1:], "float32", shift=1.0), data(2, shape[1:], "float32")
    added = data(3, shape, "bfloat16") if residual else None
    case = Case(data(0, shape, "bfloat16"), weight, bias if norm.centered else None, residual=added, norm=norm)
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, choose).forward(case))
    assert found == [way]


@NEEDS_COMPILER
@pytest.mark.parametrize("columns", [52, 68, 100])
def test_short_rows_of_short_vectors(columns: int) -> None:
    """With space between them, for else they would come in bulk."""

    def choose(problem: Any, device: Device) -> Plan:
        chosen = checked_plan(problem, device)
        constants = constants_of(chosen)
        assert (constants["VECTOR"], constants["STAGE"], constants["TAKES_TURNS"]) == (4, "ahead", 1)
        return chosen

    x = data(0, (1000, columns + 8), "float16")[:, :columns]
    case = Case(x, data(1, (columns,), "float32"), data(2, (columns,), "float32"))
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, choose).forward(case))


def test_who_takes_turns() -> None:
    for rows, columns, expected in (
        (3000, 4096, True), (16_000, 4096, False), (16_000, 8192, True), (12_000, 1024, True), (65_000, 1024, False),
        (300, 32_768, True), (600, 4096, True), (400, 4096, False), (900, 40_960, False), (9000, 248, False),
    ):  # fmt: skip
        assert takes_turns(plan(wide(rows, columns), H200)) == expected, (rows, columns)
    for problem in (
        plain_forward(3000, 4096, "bfloat16"),
        wide(3000, 4096, RMS_NORM),
        wide(3000, 4096, residual=True),
        wide(3000, 8192, RMS_NORM, residual=True),
        wide(3000, 8192, Norm(activation="silu")),
        replace(wide(3000, 8192), x=Matrix("bfloat16", (8192,), (1,), 2)),
    ):
        assert not takes_turns(plan(problem, H200)), problem
    assert not takes_turns(plan(wide(3000, 8192), replace(H200, memory_rate=20e3)))  # where nothing was timed


def test_many_short_rows_are_read_directly() -> None:
    constants = constants_of(plan(wide(65_000, 1000), H200))
    found = [constants[name] for name in ("STAGE", "WEIGHTS", "TAKES_TURNS", "VECTORS", "THREADS_PER_ROW")]
    assert found == ["direct", "late", 0, 4, 32]


@pytest.mark.parametrize("wide_weights", [False, True])
def test_short_rows_ahead_backward(wide_weights: bool) -> None:
    """Two rows ahead, by 2 vectors of a thread or 3, and directly those of which it was measured to be better."""
    for columns, expected in ((72, (3,)), (88, (3,)), (104, (2,)), (128, (2,)), (144, (3,)), (184, (3,)), (200, ())):
        problem = plain_backward(200_000, columns, "bfloat16")
        if wide_weights:
            problem = replace(problem, weight=Vector("float32"), dweight="float32", dbias="float32")
        elif columns in (72, 88, 184):
            expected = ()
        constants = dict(checked_plan(problem, H200).launches[0].constants)
        two_ahead = (constants["STAGE"], constants["ROWS_AHEAD"], constants["WEIGHTS"]) == ("ahead", 2, "early")
        if columns <= 192:
            assert two_ahead == bool(expected), columns
            assert not expected or constants["VECTORS"] == expected[0]


def of_every_kind() -> Iterator[Problem]:
    for columns in (256, 320, 384, 512, 640, 768, 1000, 1024, 2560, 4000, 5120, 7000, 8192, 10_240, 12_288, 16_384):
        for nbytes in (8_000_000, 24_000_000, 134_000_000):
            yield wide(nbytes // 2 // columns, columns)
    for columns in (5120, 6144, 16_384, 32_768):
        yield wide(12_000_000 // columns, columns, RMS_NORM)
        yield wide(12_000_000 // columns, columns, residual=True)
    for columns in (52, 60, 68, 100, 124):
        yield wide(1_000_000, columns)
    doubles = {"weight": Vector("float64"), "bias": Vector("float64")}
    for columns in (60, 100, 256, 1000, 1024, 4096, 8192):
        for nbytes in (24_000_000, 134_000_000):
            yield replace(wide(nbytes // 2 // columns, columns), **doubles)
    for columns, dtype in itertools.product(range(72, 200, 8), ("float16", "float32", "float64")):
        plain = plain_backward(300_000, columns, "float16")
        yield replace(plain, weight=Vector(dtype), dweight=dtype, dbias=dtype)


def test_nothing_spills() -> None:
    pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")
    kernels = {}
    for problem in of_every_kind():
        for item in plan(problem, H200).launches:
            kernels[item.kernel, item.constants] = item
    found = {
        (kernel, constants): complaint(item, compile_resources(kernel, dict(constants), H200.arch), H200)
        for (kernel, constants), item in kernels.items()
    }
    assert not [what for what in found.items() if what[1] is not None]
    assert len(kernels) > 40
