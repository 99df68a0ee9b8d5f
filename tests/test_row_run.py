"""Many short rows that come and leave as runs of memory, a row a thread and a run a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import LAYER_NORM, RMS_NORM, SMALL_DEVICE, Case, EmulatorRunner, Norm, assert_forward, data
from compile_cases import complaint
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_forward
from plan_rules import RULES
from test_row_shifted import behind

from cunorm.plan import Device, Plan, plan, row_run
from cunorm.problem import ForwardProblem, Matrix, Vector
from cunorm.resources import compile_resources

FAST = GPUS["sm_90"]
MANY = 4096 + 77  # rows for SMALL_DEVICE, the last block's not all
SILU, GELU = Norm(activation="silu"), Norm(activation="gelu")


class Ways:
    """Plans problems, all rules of which must hold, and keeps `way_of` each."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int] | None] = []

    def __call__(self, problem: Any, device: Device) -> Plan:
        chosen = plan(problem, device)
        for rule in RULES:
            rule(problem, device, chosen)
        self.found.append(way_of(chosen))
        return chosen


def way_of(chosen: Plan) -> tuple[int, int] | None:
    """The threads and vectors of a row, if it comes as part of a run and its block has one run; else None."""
    item = chosen.launches[0]
    constants, arguments = dict[str, Any](item.constants), dict[str, Any](item.arguments)
    if constants.get("STAGE") != "run" or item.grid * constants["ROWS_PER_BLOCK"] < arguments["rows"]:
        return None
    return constants["THREADS_PER_ROW"], constants["VECTORS"]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("columns", "dtype", "norm", "residual", "way"),
    [
        (7, "float32", LAYER_NORM, False, (1, 7)),
        (10, "float32", SILU, True, (1, 5)),
        (12, "float32", RMS_NORM, False, (1, 3)),
        (31, "float32", LAYER_NORM, True, (2, 16)),
        (9, "float16", GELU, False, (1, 9)),
        (14, "float16", RMS_NORM, True, (1, 7)),
        (24, "bfloat16", SILU, False, (1, 3)),
        (36, "bfloat16", LAYER_NORM, False, (1, 9)),
        (45, "float16", LAYER_NORM, False, (1, 45)),
        (62, "bfloat16", LAYER_NORM, False, (1, 31)),
        (38, "float32", RMS_NORM, False, (1, 19)),
        (76, "float16", RMS_NORM, False, (1, 19)),
        (6, "float32", LAYER_NORM, False, None),  # read directly
        (16, "float32", RMS_NORM, False, None),  # all would begin in the same banks of shared memory
        (52, "float32", LAYER_NORM, False, None),  # too long for a thread
        (5, "float64", LAYER_NORM, False, None),
    ],
    ids=str,
)
def test_many_short_rows(columns: int, dtype: str, norm: Norm, residual: bool, way: tuple[int, int] | None) -> None:
    ways, shape = Ways(), (MANY, columns)
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    added = data(3, shape, dtype) if residual else None
    case = Case(data(0, shape, dtype), weight, bias, residual=added, norm=norm)
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, ways).forward(case))
    assert set(ways.found) == {way}


@NEEDS_COMPILER
@pytest.mark.parametrize(("columns", "way"), [(12, None), (10, (1, 5))], ids=str)
def test_rows_that_begin_elsewhere(columns: int, way: tuple[int, int] | None) -> None:
    """x begins 8 bytes behind a multiple of 16: whole pieces of it are read by kernels of rows, a run by any."""
    ways, shape = Ways(), (MANY, columns)
    case = Case(behind(2, 0, shape, "float32"), data(1, shape[1:], "float32"), None)
    assert_forward(case, EmulatorRunner(SMALL_DEVICE, ways).forward(case))
    assert set(ways.found) == {way}


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({"row_sizes": (300_000,)}, FAST),
        ({"x": Matrix("float32", (12,), (1,))}, FAST),
        ({}, replace(FAST, memory_rate=20e3)),
    ],
    ids=["few waves", "apart in memory", "slower memory"],
)
def test_other_rows_lie_as_they_did(changes: dict[str, Any], device: Device) -> None:
    problem = plain_forward(1_000_000, 10, "float32")
    assert way_of(plan(problem, FAST)) == (1, 5)
    assert way_of(plan(replace(problem, **changes), device)) is None


def _of(
    columns: int, dtype: str, norm: Norm = LAYER_NORM, residual: bool = False, wide: bool = False
) -> ForwardProblem:
    problem = plain_forward(50_000_000 // columns, columns, dtype, residual=residual)
    weight = Vector("float32" if wide else dtype)
    return replace(problem, norm=norm, weight=weight, bias=weight if norm.centered else None)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_nothing_spills(arch: str) -> None:
    """Of rows that did, by more blocks on a multiprocessor."""
    pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")
    device = replace(GPUS[arch], memory_rate=FAST.memory_rate)
    for problem in (
        _of(8, "float32", GELU),
        _of(5, "bfloat16", residual=True),
        _of(14, "float16", RMS_NORM),
        _of(22, "bfloat16"),
        _of(24, "float16", SILU),
        _of(26, "float16", SILU),
        _of(44, "float16", wide=True),
        _of(43, "bfloat16", SILU, residual=True),
        _of(45, "bfloat16"),
        _of(50, "float16"),
    ):
        chosen = plan(problem, device)
        assert way_of(chosen) is not None
        (item,) = chosen.launches
        assert complaint(item, compile_resources(item.kernel, dict(item.constants), arch), device) is None


def test_kinds_are_told_apart() -> None:
    """Every kind of every vector has a least and a most, in order, and longer rows go otherwise."""
    for (itemsize, width), kinds in row_run._VECTORS.items():
        dtype = {2: "float16", 4: "float32"}[itemsize]
        for kind, (least, most) in kinds.items():
            assert 0 < least <= most
            norm = Norm(activation="silu" if kind in ("activated", "both") else None, centered=kind != "light")
            for vectors, expected in ((least, True), (most, True), (most + 2, False)):
                problem = _of(vectors * width, dtype, norm, residual=kind in ("residual", "both"))
                assert (way_of(plan(problem, FAST)) is not None) == (expected and (vectors % 2 == 1 or vectors == 2))
