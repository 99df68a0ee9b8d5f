"""Rows of whole vectors that begin elsewhere than at a multiple of 16 bytes, but not so their results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import OLD_DEVICE, RUNNERS, SMALL_DEVICE, Array, Case, EmulatorRunner, Norm, assert_any_order_gives_the_same
from cases import check, data, view_of
from emulator_cases import NEEDS_COMPILER
from plan_cases import plain_backward, plain_forward
from plan_rules import RULES

from cunorm.plan import Device, Plan, RowBlock, plan, plan_with
from cunorm.plan.constants import are_shifted
from cunorm.problem import DTYPES, ForwardProblem, Matrix


def behind(offset: int, seed: int, shape: tuple[int, int], dtype: str) -> Array:
    """Data that begins so many elements behind a multiple of 16 bytes, and ends where its memory does."""
    memory = data(seed, (offset + math.prod(shape),), dtype)
    assert memory.ctypes.data % 16 == 0
    return memory[offset:].reshape(shape)


def shifted(geometry: RowBlock | None = None) -> tuple[Any, list[str]]:
    """What plans problems so, if they are shifted as they are to be; and the stages of their first launches."""
    stages: list[str] = []

    def choose(problem: Any, device: Device) -> Plan:
        chosen = plan(problem, device) if geometry is None else plan_with(problem, device, geometry)
        for rule in RULES:
            rule(problem, device, chosen)
        constants = dict(chosen.launches[0].constants)
        assert constants["SHIFTED"]
        stages.append(str(constants["STAGE"]))
        return chosen

    return choose, stages


def case_of(shape: tuple[int, int], dtype: str, offsets: tuple[int, int, int], norm: Norm, residual: bool) -> Any:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    x, dy, added = (behind(offset, seed, shape, dtype) for seed, offset in enumerate(offsets, 3))
    return Case(x, weight, bias, residual=added if residual else None, norm=norm), dy, added


SILU = Norm(True, 0.0, "silu")
# Rows and columns, dtype, by how many elements x, dy and a residual or its gradient begin late, and the stages.
BUILT_IN: dict[str, tuple[Any, ...]] = {
    "every place in 16 bytes, 1": ((9, 512), "bfloat16", (1, 2, 3), Norm(), True, ["direct", "ahead"]),
    "every place in 16 bytes, 4": ((9, 512), "float16", (4, 5, 6), Norm(), True, ["direct", "ahead"]),
    "every place in 16 bytes, 7": ((9, 512), "bfloat16", (7, 0, 1), SILU, True, ["direct", "ahead"]),
    "x alone": ((9, 1024), "float16", (5, 0, 0), Norm(False, 1.0), False, ["direct", "ahead"]),
    "dy alone": ((40, 64), "float32", (0, 3, 0), Norm(), False, []),
    "several rows a warp": ((600, 64), "bfloat16", (3, 6, 0), Norm(), False, ["direct", "direct"]),
    "float32": ((33, 260), "float32", (1, 2, 3), Norm(), True, ["direct", "ahead"]),
    "float64": ((5, 514), "float64", (1, 1, 1), Norm(), True, ["direct", "ahead"]),
    "a row of several blocks": ((3, 40_000), "bfloat16", (1, 7, 0), Norm(), False, ["ahead", "ahead"]),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_plans(kind: str) -> None:
    shape, dtype, offsets, norm, residual, expected = BUILT_IN[kind]
    choose, stages = shifted()
    case, dy, added = case_of(shape, dtype, offsets, norm, residual)
    if not expected:  # forward there is nothing to shift
        choose, expected = plan, stages
    check(EmulatorRunner(SMALL_DEVICE, choose), case, dy, added if residual else None)
    assert stages == expected
