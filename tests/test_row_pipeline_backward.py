"""Gradients of rows that blocks share in a pipeline, on the emulator: a few small blocks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases import (
    ACTIVATED_NORMS,
    ALL_GRADIENTS,
    LAYER_NORM,
    RMS_NORM,
    Array,
    Case,
    EmulatorRunner,
    NumpyRunner,
    assert_gradients,
    data,
)
from test_long_rows import DEVICE, PIPELINE, STREAM, Family, affine, each
from test_long_rows import check as check_forward

from cunorm.plan import Device, Plan, rows
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.row_stream import RowStream
from cunorm.problem import DTYPES, BackwardProblem, Norm

FAMILIES = {"pipeline": PIPELINE, "stream": STREAM}
both = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
Way = RowPipeline | RowStream


def pipeline_plan(problem: BackwardProblem, device: Device, geometry: Way) -> Plan:
    return rows.plan_with(problem, device, geometry)


def run(
    case: Case,
    geometry: Way,
    dy: Array,
    mask: tuple[bool, ...] = ALL_GRADIENTS,
    dresidual_out: Array | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """dx, dweight and dbias, from the statistics of the reference."""
    runner = EmulatorRunner(DEVICE, functools.partial(pipeline_plan, geometry=geometry), seed)
    return runner.backward(case.backward(NumpyRunner().forward(case), dy, mask, dresidual_out))


def check(case: Case, geometry: Way, dresidual_out: Array | None = None) -> None:
    """Against float64, with the tolerances of every other kernel."""
    dy = data(7, case.x.shape, case.x.dtype.name)
    before = case.x.copy(), dy.copy()
    assert_gradients(case, run(case, geometry, dy, dresidual_out=dresidual_out), dy, dresidual_out)
    assert (case.x.tobytes(), dy.tobytes()) == tuple(array.tobytes() for array in before), "an input was modified"


@each(
    "layout, dtype, odd",
    lambda family: [(*item, odd) for item in family.layouts_and_dtypes for odd in family.odd],
    FAMILIES,
)
def test_layouts(family: Family, layout: str, dtype: str, odd: int) -> None:
    """Five rows of 2.6 vectors a thread: the last block has less, and the rows are several turns."""
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    check(
        Case(data(0, (5, columns), dtype), *affine(columns, dtype)),
        family.geometry(dtype, columns, **family.layouts[layout]),
    )


@each("columns", lambda family: family.last_blocks, FAMILIES)
def test_last_blocks_of_every_length(family: Family, columns: int) -> None:
    check(Case(data(0, (3, columns)), *affine(columns, "float32")), family.geometry("float32", columns))


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS[:3]], ids=str)
@pytest.mark.parametrize(
    ("family", "dtype", "columns"),
    [
        (PIPELINE, "float16", 2648), (PIPELINE, "float32", 2648), (STREAM, "bfloat16", 2651), (STREAM, "float32", 2649),
        (STREAM, "float16", 2648),
    ],
)  # fmt: skip
def test_norms(norm: Norm, family: Family, dtype: str, columns: int) -> None:
    case = Case(data(0, (3, columns), dtype), *affine(columns, dtype), norm=norm)
    check(case, family.geometry(dtype, columns, **family.layouts["two groups"]))


@each(
    "layout, dtype, odd",
    lambda family: [(*item, odd) for item in family.with_residual.items() for odd in family.odd],
    FAMILIES,
)
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_gradient_of_the_sum_with_a_residual(norm: Norm, family: Family, odd: int, layout: str, dtype: str) -> None:
    shape = 5, 16 // DTYPES[dtype].itemsize * 663 + odd
    x, residual = data(0, shape, dtype), data(5, shape, dtype, shift=-2.0)
    case = Case(x, *affine(shape[1], dtype), norm=norm, residual=residual)
    check(case, family.geometry(dtype, shape[1], **family.layouts[layout]), data(8, shape, dtype))


@pytest.mark.parametrize(
    ("family", "layout", "columns"),
    [(PIPELINE, "a turn later", 2652), (PIPELINE, "two groups", 2652), (STREAM, "two groups", 2653)],
)
@pytest.mark.parametrize("mask", [(True, False, False), (True, True, False), (True, False, True)])
def test_only_what_is_wanted(mask: tuple[bool, ...], family: Family, layout: str, columns: int) -> None:
    case, dy = Case(data(0, (5, columns)), *affine(columns, "float32")), data(7, (5, columns))
    geometry = family.geometry("float32", columns, **family.layouts[layout])
    every, some = (run(case, geometry, dy, wanted) for wanted in (ALL_GRADIENTS, mask))
    for wanted, one, other in zip(mask, every, some):
        assert other is None if not wanted else other.tobytes() == one.tobytes()


@each("odd", lambda family: family.odd, FAMILIES)
@pytest.mark.parametrize(("dtype", "weight"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64")])
def test_weight_of_another_dtype(dtype: str, weight: str, family: Family, odd: int) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    check(Case(data(0, (2, columns), dtype), *affine(columns, dtype, weight)), family.geometry(dtype, columns))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("weight", "bias"), [(None, None), ("float16", None), (None, "float32"), ("float16", "float32")]
)
def test_what_is_kept_of_columns_of_any_kind(weight: str | None, bias: str | None, residual: bool) -> None:
    """Of rows that begin anywhere: weights and biases, or none."""
    shape = 3, 2653
    x, added = data(0, shape, "float16"), data(5, shape, "float16") if residual else None
    vectors = [dtype and data(seed, shape[1:], dtype, shift=1.0) for seed, dtype in ((1, weight), (2, bias))]
    case = Case(x, *vectors, norm=Norm(activation="silu" if bias else None), residual=added)
    geometry = STREAM.geometry("float16", 2653)
    check_forward(case, geometry)
    check(case, geometry, data(8, shape, "float16") if residual else None)


@both
def test_without_a_weight(family: Family) -> None:
    case, dy = Case(data(0, (3, 2652))), data(7, (3, 2652))
    gradients = run(case, family.geometry("float32", 2652), dy, (True, False, False))
    expected, _, _ = case.expected_gradients(dy)
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "layout", "columns"), [
    (PIPELINE, "two turns later", 2648), (PIPELINE, "more blocks than a warp has lanes", 2648),
    (PIPELINE, "five groups of three blocks", 2648), (STREAM, "two turns later", 2651),
    (STREAM, "more rows under way than rows", 2651),
])  # fmt: skip
def test_any_order_of_threads_and_blocks_gives_the_same_bits(family: Family, layout: str, columns: int) -> None:
    case, dy = Case(data(0, (5, columns), shift=100.0), *affine(columns, "float32")), data(7, (5, columns))
    geometry = family.geometry("float32", columns, **family.layouts[layout])
    first, *others = [run(case, geometry, dy, seed=seed) for seed in range(4)]
    for other in others:
        assert [array.tobytes() for array in other] == [array.tobytes() for array in first]


def test_strided_rows() -> None:
    wide = data(3, (5, 2700))
    check(Case(wide[:, 4:2656], *affine(2652, "float32")), PIPELINE.geometry("float32", 2652, rows_ahead=3))
