"""Rows of sixteen-bit numbers under an activation, backward: each way to lay them out, on the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import SMALL_DEVICE, Case, EmulatorRunner, Norm, check, data
from emulator_cases import NEEDS_COMPILER
from plan_cases import plain_backward
from plan_rules import RULES

from cunorm.plan import Device, Plan, RowBlock, plan_with
from cunorm.plan.row_activated import activated_peeled_backward, activated_row_backward
from cunorm.plan.row_geometry import backward_geometry
from cunorm.problem import BackwardProblem, Vector

DEVICE = replace(SMALL_DEVICE, clusters=(1, 1, 1, 1))
# Rows and columns, whether there is a residual, and the blocks of a row, the threads of each and their vectors.
WAYS = [
    (21, 2048, False, (1, 128, 2)),
    (21, 3080, False, (1, 128, 4)),
    (21, 8000, False, (1, 256, 4)),
    (21, 10_000, False, (2, 128, 5)),
    (21, 16_384, False, (4, 128, 4)),
    (21, 5120, True, (1, 256, 3)),
    (21, 10_752, True, (2, 256, 3)),
    (2500, 20, False, (1, 1, 5)),
    (1500, 36, True, (1, 4, 3)),
    (400, 64, False, (1, 8, 1)),
    (400, 168, True, (1, 16, 2)),
    (120, 257, True, (1, 32, 1)),  # from here on they begin anywhere
    (120, 513, False, (1, 32, 2)),
    (60, 1023, True, (1, 64, 2)),
    (60, 1601, False, (1, 64, 4)),
    (30, 4097, False, (1, 128, 4)),
    (30, 8191, True, (2, 128, 4)),
    (15, 15_873, False, (2, 256, 4)),
]


def activated(rows: int, columns: int, dtype: str = "bfloat16", activation: str | None = "silu") -> BackwardProblem:
    return replace(plain_backward(rows, columns, dtype), norm=Norm(activation=activation), bias=Vector(dtype))


@NEEDS_COMPILER
@pytest.mark.parametrize(("rows", "columns", "residual", "way"), WAYS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gradients(rows: int, columns: int, residual: bool, way: tuple[int, int, int], activation: str) -> None:
    ways = []

    def choose(problem: Any, device: Device) -> Plan:
        # By blocks that hold rows, whatever else is faster.
        backward = isinstance(problem, BackwardProblem)
        chosen = plan_with(problem, device, backward_geometry(problem, device) if backward else None)
        for rule in RULES:
            rule(problem, device, chosen)
        constants = dict(chosen.launches[0].constants)
        if backward:
            ways.append(tuple(constants[name] for name in ("BLOCKS_PER_ROW", "THREADS_PER_ROW", "VECTORS")))
        return chosen

    x, added, sum_gradient = (data(seed, (rows, columns), "bfloat16", outliers=False) for seed in (0, 3, 4))
    weight, bias = data(1, (columns,), "bfloat16", shift=1.0), data(2, (columns,), "bfloat16")
    case = Case(x, weight, bias, norm=Norm(activation=activation), residual=added if residual else None)
    check(EmulatorRunner(DEVICE, choose), case, dresidual_out=sum_gradient if residual else None)
    assert ways == [way]


def test_every_row_has_as_many_threads_as_it_needs() -> None:
    for columns in range(1544, 200_000, 1000):
        geometry = activated_row_backward(activated(100_000, columns), Device(), 8)
        assert isinstance(geometry, RowBlock) or columns > 150_000
        assert geometry is None or geometry.capacity >= columns
        assert geometry is None or geometry.threads * geometry.blocks_per_multiprocessor in (256, 384)


@pytest.mark.parametrize(
    "problem",
    [
        activated(100_000, 4096, activation=None),
        activated(100_000, 4096, "float32"),
        activated(100_000, 1024),
        activated(400, 4096),
        replace(activated(100_000, 4096), weight=None, dweight=None),
        replace(activated(100_000, 2048), dresidual_out=activated(1, 2048).x),
    ],
    ids=["no activation", "larger numbers", "short rows", "few rows", "no weight", "a residual of short rows"],
)
def test_others_are_laid_otherwise(problem: BackwardProblem) -> None:
    assert activated_row_backward(problem, Device(), 16 // (4 if problem.x.dtype == "float32" else 2)) is None


@pytest.mark.parametrize(("columns", "there"), [(5120, True), (16_384, False), (24_576, True)], ids=str)
def test_pairs_of_vectors_do_not_keep_clusters_busy(columns: int, there: bool) -> None:
    """Of four blocks and more, with a residual: they are laid as other norms are."""
    problem = replace(activated(100_000, columns), dresidual_out=activated(1, columns).x)
    assert (activated_row_backward(problem, Device(), 8) is not None) == there


@pytest.mark.parametrize(
    ("columns", "there"), [(15_873, True), (20_001, False), (32_777, True), (70_001, False)], ids=str
)
def test_odd_rows_between_are_laid_otherwise(columns: int, there: bool) -> None:
    assert (activated_peeled_backward(activated(100_000, columns), Device(), 8) is not None) == there
