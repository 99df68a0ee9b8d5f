"""Rows of whole vectors that begin elsewhere than at a multiple of 16 bytes, but not so their results; and weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from cases import (
    LAYER_NORM,
    RUNNERS,
    SMALL_DEVICE,
    Array,
    Case,
    EmulatorRunner,
    Norm,
    assert_any_order_gives_the_same,
    assert_forward,
    check,
    data,
    relative_error,
)
from emulator_cases import NEEDS_COMPILER
from plan_cases import GPUS, plain_backward, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, RowBlock, plan, plan_with
from cunorm.plan.row_memory import are_shifted
from cunorm.problem import Matrix

Offsets = tuple[int, int, int]  # of x, dy, and the residual or its gradient


def behind(offset: int, seed: int, shape: tuple[int, int], dtype: str) -> Array:
    """Data that begins so many elements behind a multiple of 16 bytes, and ends where its memory does."""
    memory = data(seed, (offset + math.prod(shape),), dtype)
    assert memory.ctypes.data % 16 == 0
    return memory[offset:].reshape(shape)


def tensors(
    shape: tuple[int, int], dtype: str, offsets: Offsets, norm: Norm = LAYER_NORM, residual: bool = False
) -> tuple[Case, Array, Array | None]:
    """x with its weight and bias, dy, and the gradient of the residual's sum."""
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    x, dy, added = (behind(offset, seed, shape, dtype) for seed, offset in enumerate(offsets, 3))
    return Case(x, weight, bias, residual=added if residual else None, norm=norm), dy, added if residual else None


class Shifted:
    """What plans problems, all of which must be shifted, by a geometry or as is built in; and how their rows come."""

    def __init__(self, geometry: RowBlock | None = None) -> None:
        self.geometry = geometry
        self.stages: list[str] = []

    def __call__(self, problem: Any, device: Device) -> Plan:
        chosen = plan_with(problem, device, self.geometry)
        for rule in RULES:
            rule(problem, device, chosen)
        constants = [dict(item.constants) for item in chosen.launches if item.kernel.startswith("row_block")]
        assert constants[0]["SHIFTED"] and constants[0]["VECTOR"] > 1
        self.stages.append(str(constants[0]["STAGE"]))
        return chosen


BUILT_IN: dict[str, tuple[tuple[int, int], str, Offsets, Norm, bool, list[str]]] = {
    "1, 2 and 3 of 8": ((40, 512), "bfloat16", (1, 2, 3), Norm(), True, ["direct", "ahead"]),
    "4, 5 and 6 of 8": ((40, 512), "float16", (4, 5, 6), Norm(), True, ["direct", "ahead"]),
    "7, 0 and 1 of 8": ((40, 512), "bfloat16", (7, 0, 1), Norm(True, 0.0, "silu"), True, ["direct", "ahead"]),
    "1, 2 and 3 of 4": ((33, 260), "float32", (1, 2, 3), Norm(), True, ["direct", "ahead"]),
    "1 of 2": ((40, 514), "float64", (1, 1, 1), Norm(), True, ["direct", "ahead"]),
    "x alone": ((9, 1024), "float16", (5, 0, 0), Norm(False, 1.0), False, ["direct", "direct"]),
    "several rows a warp": ((600, 64), "bfloat16", (3, 6, 0), Norm(), False, ["direct", "direct"]),
    "a row of several blocks": ((3, 40_000), "bfloat16", (1, 7, 0), Norm(), False, ["ahead", "ahead"]),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", BUILT_IN)
def test_they_go_as_their_aligned_neighbours(kind: str) -> None:
    shape, dtype, offsets, norm, residual, expected = BUILT_IN[kind]
    case, dy, added = tensors(shape, dtype, offsets, norm, residual)
    choose = Shifted()
    check(EmulatorRunner(choose=choose), case, dy, added)
    assert choose.stages == expected


# Threads that read what others of their warp have copied, and others of their block; more turns than slots.
WARP = RowBlock(8, 2, 4, 16, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=2)
BLOCK = RowBlock(8, 2, 64, 1, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=3)
LAYOUTS = {
    "rows of part of a warp": ((2 * 16 * 9 + 21, 64), WARP),
    "rows that threads do not fill": ((100, 56), replace(WARP, rows_ahead=1)),
    "rows of several warps": ((40, 1024), BLOCK),
    "rows of two blocks": ((40, 2000), replace(BLOCK, blocks_per_row=2, rows_ahead=1)),
    "early weights": ((40, 1024), replace(BLOCK, weights="early")),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_that_come_ahead(kind: str, residual: bool) -> None:
    shape, geometry = LAYOUTS[kind]
    case, dy, added = tensors(shape, "bfloat16", (3, 6, 1), residual=residual)
    choose = Shifted(geometry)
    check(EmulatorRunner(choose=choose), case, dy, added)
    assert choose.stages == ["ahead", "ahead"]


@NEEDS_COMPILER
@pytest.mark.parametrize("geometry", [WARP, BLOCK], ids=["a warp", "a block"])
def test_the_order_of_threads_does_not_matter(geometry: RowBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what its neighbour has copied, and copies the next row to where its neighbour has read."""
    monkeypatch.setattr(EmulatorRunner, "run", _run_with(Shifted(geometry)))
    case, dy, added = tensors((100, geometry.capacity), "float16", (7, 1, 2), residual=True)
    assert added is not None
    assert_any_order_gives_the_same(case, dy, added)


def _run_with(choose: Shifted) -> Any:
    def run(self: EmulatorRunner, problem: Any, operands: dict[str, Array | None]) -> None:
        from cunorm.emulator import plans

        plans.run_plan(choose(problem, self.device), operands, seed=self.seed)

    return run


@pytest.mark.parametrize("shape", [(300, 64), (70, 4096), (3, 65_536)], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 4, 7])
@pytest.mark.parametrize("runner", RUNNERS)
def test_views(runner: Any, offset: int, shape: tuple[int, int]) -> None:
    offsets = offset, 8 - offset, 3
    check(runner, *tensors(shape, "float16", offsets, residual=True)[:2])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("columns", "dtype"), [(44, "float32"), (64, "float16"), (1024, "bfloat16"), (6, "float64")])
@pytest.mark.parametrize("runner", RUNNERS)
def test_views_without_weights(runner: Any, columns: int, dtype: str, activation: str | None) -> None:
    """Whose aligned neighbours lie as rows of channels do."""
    for offsets in ((1, 0), (0, 1), (1, 1)):
        x, dy = (behind(offset, seed, (33, columns), dtype) for seed, offset in enumerate(offsets, 3))
        case = Case(x, norm=Norm(activation=activation))
        gradients = runner.backward(case.backward(runner.forward(case), dy, (True, False, False)))
        expected, _, _ = case.expected_gradients(dy)
        assert relative_error(gradients[0], expected) < {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-5)


@NEEDS_COMPILER
def test_bits_are_those_of_aligned_rows() -> None:
    case, dy, _ = tensors((40, 512), "bfloat16", (1, 2, 3))
    aligned = replace(case, x=case.x.copy())
    results = [EmulatorRunner().forward(each) for each in (case, aligned)]
    assert results[0].y.tobytes() == results[1].y.tobytes()
    both = (case, dy), (aligned, dy.copy())
    gradients = [EmulatorRunner().backward(each.backward(results[0], of_y)) for each, of_y in both]
    for shifted, plain in zip(*gradients):
        assert shifted.tobytes() == plain.tobytes()


# Rows and columns; dtypes of x, weight and bias, and by how many elements these two begin late.
WEIGHTS: dict[str, tuple[tuple[int, int], list[str], tuple[int, int], RowBlock]] = {
    "late": ((70, 64), ["float16", "float32", "float16"], (1, 3), RowBlock(8, 1, 8, 16)),
    "early": ((70, 64), ["float16", "float32", "float16"], (1, 3), RowBlock(8, 1, 8, 16, weights="early")),
    "staged": ((21, 64), ["float32", "float32", "float32"], (1, 3), RowBlock(4, 2, 8, 8, weights="staged")),
    "staged, wide": ((70, 64), ["bfloat16", "float64", "float32"], (1, 3), RowBlock(8, 1, 8, 16, weights="staged")),
    "staged, bias alone": ((70, 64), ["bfloat16"] * 3, (0, 5), RowBlock(8, 1, 8, 16, weights="staged")),
    "staged, one narrow": ((70, 64), ["float32"] * 2 + ["float16"], (2, 3), RowBlock(4, 2, 8, 16, weights="staged")),
    "staged, two blocks": ((3, 2048), ["float32"] * 3, (2, 1), RowBlock(4, 2, 128, 1, 2, weights="staged")),
    "staged, in turns": (
        (300, 72), ["float16", "float16", "float32"], (7, 2),
        RowBlock(8, 2, 8, 8, weights="staged", blocks_per_multiprocessor=1),
    ),
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_begin_late(kind: str) -> None:
    shape, (dtype, *dtypes), offsets, geometry = WEIGHTS[kind]
    weight, bias = (behind(late, 1, (1, shape[1]), name)[0] for late, name in zip(offsets, dtypes))
    found: list[Plan] = []

    def choose(problem: Any, device: Device) -> Plan:
        found.append(plan_with(problem, device, geometry))
        for rule in RULES:
            rule(problem, device, found[-1])
        return found[-1]

    case = Case(data(0, shape, dtype), weight, bias)
    assert_forward(case, EmulatorRunner(choose=choose).forward(case))
    constants = dict(found[0].launches[0].constants)
    known = offsets[0], 0 if "narrow" in kind else offsets[1]
    assert (constants["WEIGHT_SHIFT"], constants["BIAS_SHIFT"]) == ((0, 0) if "in turns" in kind else known)


PLAIN = plain_forward(64, 4096, "bfloat16")
LATE = replace(PLAIN.x, offset=2)


@pytest.mark.parametrize(
    ("problem", "shifted"),
    [
        (PLAIN, False),
        (replace(PLAIN, x=LATE), True),
        (replace(PLAIN, x=LATE, y=LATE), False),
        (replace(PLAIN, y=LATE), False),
        (replace(PLAIN, x=Matrix("bfloat16", (4104,), (1,), 14)), True),
        (replace(PLAIN, x=Matrix("bfloat16", (4097,), (1,), 2)), False),
        (replace(PLAIN, x=Matrix("bfloat16", (-4096,), (1,), 2)), False),
        (replace(PLAIN, x=Matrix("bfloat16", (0,), (1,), 2)), False),
        (replace(plain_forward(1, 4096, "bfloat16"), x=Matrix("bfloat16", (0,), (1,), 2)), True),
        (replace(PLAIN, x=Matrix("bfloat16", (4096,), (2,), 2)), False),
        (replace(plain_forward(64, 4097, "bfloat16"), x=replace(LATE, row_strides=(4097,))), False),
        (replace(plain_backward(64, 4096, "bfloat16"), dy=LATE), True),
        (replace(plain_backward(64, 4096, "bfloat16"), dy=LATE, dx=None), True),
    ],
)
def test_which_rows_are_shifted(problem: Any, shifted: bool) -> None:
    assert are_shifted(problem) == shifted
    kernels = [dict(item.constants) for item in plan(problem, SMALL_DEVICE).launches]
    assert any(constants.get("SHIFTED") for constants in kernels) == shifted


@pytest.mark.parametrize("make", [plain_forward, plain_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("late", [2, 4])
def test_few_long_rows_of_views_have_whole_vectors(make: Any, late: int) -> None:
    """They begin alike in all tensors or go by clusters: nothing else would read 16 bytes of them at a time."""
    for rows, columns in ((1, 30_000), (4, 32_768), (2, 65_536)):
        aligned = make(rows, columns, "bfloat16")
        problem = replace(aligned, x=replace(aligned.x, offset=late))
        constants = dict(plan(problem, GPUS["sm_90"]).launches[0].constants)
        assert constants["SHIFTED"] and constants["VECTOR"] == 8
