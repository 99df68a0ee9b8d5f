"""Rows that all blocks of a device share, on the emulator: a few small blocks, and so few slots that rows need them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    ACTIVATED_NORMS,
    EPS,
    FAR,
    LAYER_NORM,
    RMS_NORM,
    Array,
    Case,
    EmulatorRunner,
    Results,
    assert_forward,
    data,
    far_data,
)
from plan_cases import GPUS, plain_forward

from cunorm.plan import Device, Plan, plan, row_grid
from cunorm.plan.launches import Builder
from cunorm.plan.row_grid import RowGrid
from cunorm.problem import DTYPES, ForwardProblem, Matrix, Norm, Vector

DEVICE = Device("sm_90", multiprocessors=4, threads_per_multiprocessor=128)
# Two threads' warps a block, four blocks: a vector a thread is a row of 256 vectors.
SMALL = RowGrid(4, resident=3, blocks_per_row=4, groups=1, threads=64)


def grid_plan(problem: ForwardProblem, device: Device, geometry: RowGrid) -> Plan:
    builder = Builder()
    return builder.finished(row_grid.plan_forward(problem, geometry, builder))


def run(case: Case, geometry: RowGrid, stats: bool = True, out: Array | None = None, seed: int = 0) -> Results:
    """What the kernel leaves, in ``out`` if that is given."""
    choose = functools.partial(grid_plan, geometry=geometry)
    return EmulatorRunner(DEVICE, choose, seed).forward(case, stats, out)


def check(case: Case, geometry: RowGrid) -> None:
    """Against float64, with the tolerances of every other kernel; its statistics are a little better."""
    before = case.x.copy()
    assert_forward(case, run(case, geometry), float32_statistics=2e-7)
    assert case.x.tobytes() == before.tobytes(), "x was modified"


def affine(columns: int, dtype: str, weight: str | None = None) -> tuple[Array, Array]:
    return data(1, (columns,), weight or dtype, shift=1.0), data(2, (columns,), weight or dtype)


def geometry_for(dtype: str, columns: int, **changes: Any) -> RowGrid:
    """SMALL with vectors of 16 bytes; peeled, where the columns are no multiple of them."""
    width = 16 // DTYPES[dtype].itemsize
    return replace(SMALL, width=width, peeled=columns % width > 0, **changes)


# How the vectors of a row, 256 for each that a thread has, lie over slots, registers and the rest.
LAYOUTS = {
    "resident": {},
    "one slot": {"resident": 1},
    "two rows ahead": {"rows_ahead": 2},
    "three rows ahead, two groups": {"rows_ahead": 3, "groups": 2, "blocks_per_row": 2, "resident": 6},
    "four groups of one block": {"groups": 4, "blocks_per_row": 1, "resident": 11},
    "five groups of three blocks": {"groups": 5, "blocks_per_row": 3, "resident": 4},
    "registers": {"resident": 1, "held": 2},
    "registers and the rest": {"resident": 1, "held": 1},
    "prefetched": {"resident": 2, "held": 1, "prefetched": 2},
    "pivot of a part": {"blocks_per_row": 2, "resident": 6},
}


# Each layout with one dtype, the next with another; and one with all.
LAYOUTS_AND_DTYPES = [(layout, list(DTYPES)[i % 4]) for i, layout in enumerate(LAYOUTS)]
LAYOUTS_AND_DTYPES += [("registers and the rest", dtype) for dtype in ("bfloat16", "float32", "float64")]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_AND_DTYPES)
def test_layouts(layout: str, dtype: str) -> None:
    """Five rows of 2.6 vectors a thread: the last block has less, and the rows are several turns."""
    columns = 16 // DTYPES[dtype].itemsize * 663
    case = Case(data(0, (5, columns), dtype), *affine(columns, dtype))
    check(case, geometry_for(dtype, columns, **LAYOUTS[layout]))


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_AND_DTYPES)
def test_rows_that_begin_anywhere(layout: str, dtype: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + 1
    case = Case(data(0, (5, columns), dtype), *affine(columns, dtype))
    check(case, geometry_for(dtype, columns, **LAYOUTS[layout]))


@pytest.mark.parametrize("columns", [81, 83, 87, 769, 770, 1023, 1025, 3071, 3073])
def test_last_blocks_of_every_length(columns: int) -> None:
    """Down to one whose part has no vector, only edges."""
    check(Case(data(0, (3, columns)), *affine(columns, "float32")), geometry_for("float32", columns))


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS[:3]], ids=str)
@pytest.mark.parametrize("columns", [2652, 2653])
def test_norms(norm: Norm, columns: int) -> None:
    case = Case(data(0, (3, columns)), *affine(columns, "float32"), norm=norm)
    check(case, geometry_for("float32", columns, resident=1, held=1))


@pytest.mark.parametrize(("layout", "dtype"), [
    ("resident", "bfloat16"), ("one slot", "float32"), ("two rows ahead", "float16"),
    ("five groups of three blocks", "float64"),
])  # fmt: skip
@pytest.mark.parametrize(("odd", "norm"), [(0, LAYER_NORM), (1, LAYER_NORM), (1, RMS_NORM)], ids=str)
def test_residual(norm: Norm, odd: int, layout: str, dtype: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    x, residual = data(0, (5, columns), dtype), data(5, (5, columns), dtype, shift=-2.0)
    case = Case(x, *affine(columns, dtype), norm=norm, residual=residual)
    check(case, geometry_for(dtype, columns, **LAYOUTS[layout]))


@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("columns", [2652, 2653])
def test_weight_and_bias_are_each_optional(columns: int, weight: bool, bias: bool) -> None:
    given = affine(columns, "float32")
    case = Case(data(0, (3, columns)), given[0] if weight else None, given[1] if bias else None)
    check(case, geometry_for("float32", columns, resident=2))


@pytest.mark.parametrize(("dtype", "weight"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64")])
@pytest.mark.parametrize("odd", [0, 3])
def test_weight_of_another_dtype(odd: int, dtype: str, weight: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    check(Case(data(0, (2, columns), dtype), *affine(columns, dtype, weight)), geometry_for(dtype, columns))


@pytest.mark.parametrize("layout", ["resident", "registers and the rest", "pivot of a part"])
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero_or_from_the_pivot(kind: str, layout: str) -> None:
    """The pivot is the mean of a block's first vectors: data that lie far from it, and far from zero."""
    columns = 2652
    case = Case(far_data(kind, (3, columns)), *affine(columns, "float32"))
    check(case, geometry_for("float32", columns, **LAYOUTS[layout]))


def test_a_constant_row_is_its_own_mean() -> None:
    x = np.full((2, 2652), 3.7, np.float32)
    results = run(Case(x), geometry_for("float32", 2652))
    assert np.abs(results.y).max() < 1e-4
    np.testing.assert_allclose(results.rstd, EPS**-0.5, rtol=1e-5)


@pytest.mark.parametrize("columns", [2652, 2653])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, columns: int) -> None:
    x = data(0, (4, columns))
    x[1, 5] = bad
    results = run(Case(x), geometry_for("float32", columns, rows_ahead=2))
    assert np.isnan(results.y[1]).any() and not np.isfinite(results.mean[1])
    others = [0, 2, 3]
    assert np.isfinite(results.y[others]).all() and np.isfinite(results.mean[others]).all()


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_without_statistics(norm: Norm) -> None:
    case, layout = Case(data(0, (3, 2652)), *affine(2652, "float32"), norm=norm), geometry_for("float32", 2652)
    assert run(case, layout, stats=False).y.tobytes() == run(case, layout).y.tobytes()


@pytest.mark.parametrize("layout", ["resident", "two rows ahead", "registers and the rest", "prefetched"])
@pytest.mark.parametrize("columns", [2652, 2653])
def test_result_in_place_of_x(columns: int, layout: str) -> None:
    case = Case(data(0, (5, columns)), *affine(columns, "float32"))
    geometry = geometry_for("float32", columns, **LAYOUTS[layout])
    expected = run(case, geometry).y
    assert run(case, geometry, out=case.x).y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", ["two rows ahead", "five groups of three blocks", "registers and the rest"])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(layout: str) -> None:
    case = Case(data(0, (5, 2653), shift=100.0), *affine(2653, "float32"))
    geometry = geometry_for("float32", 2653, **LAYOUTS[layout])
    results = [run(case, geometry, seed=seed) for seed in range(4)]
    for result in results[1:]:
        assert result.y.tobytes() == results[0].y.tobytes()
        assert result.rstd.tobytes() == results[0].rstd.tobytes()


def test_strided_rows() -> None:
    wide = data(3, (5, 2700))
    case = Case(wide[:, 4:2656], *affine(2652, "float32"))
    check(case, geometry_for("float32", 2652, rows_ahead=2))


# ---- The plan.

H200, A100, RTX = GPUS["sm_90"], GPUS["sm_80"], GPUS["sm_89"]
SHAPES = [
    (10, 3_500_000), (4, 10_000_001), (4, 2_000_001), (1, 3_000_000), (1000, 2_700_000), (7, 5_000_003),
    (7, 2_700_000), (5, 1_700_000),
]  # fmt: skip


@pytest.mark.parametrize("device", [H200, A100, RTX], ids=lambda device: device.arch)
def test_geometries_fit_the_device_and_cover_the_row(device: Device) -> None:
    found = 0
    for shape, dtype, residual in itertools.product(SHAPES, DTYPES, (False, True)):
        problem = plain_forward(*shape, dtype, residual=residual)
        geometry = row_grid.forward_geometry(problem, device)
        if geometry is None:
            continue
        found += 1
        assert geometry.groups * geometry.blocks_per_row <= device.multiprocessors
        assert geometry.groups <= problem.rows
        # A kilobyte of the kernel's own.
        assert geometry.shared_bytes(problem) + 1024 <= device.shared_bytes
        part = geometry.columns_per_block(problem)
        assert part % geometry.width == 0
        assert (geometry.blocks_per_row - 1) * part < problem.columns <= geometry.blocks_per_row * part
        assert 1 <= geometry.resident * geometry.rows_ahead <= 32
        assert geometry.resident + geometry.held <= geometry.vectors(problem)
        assert geometry.rows_ahead == 1 or geometry.resident == geometry.vectors(problem)
        assert geometry.threads <= device.threads_per_multiprocessor
    assert found > 15


def test_it_applies_to_long_contiguous_rows_since_sm_80() -> None:
    assert row_grid.applies(plain_forward(4, 3_500_000), H200)
    assert row_grid.applies(plain_forward(4, 4_000_001), A100)
    assert not row_grid.applies(plain_forward(4, 3_500_000), GPUS["sm_75"])
    assert not row_grid.applies(plain_forward(10, 1_000_000), H200)
    assert not row_grid.applies(plain_forward(1, 100_000_000), H200)
    apart = replace(plain_forward(4, 4_000_001), y=Matrix("float32", (4_000_004,), (1,)))
    assert not row_grid.applies(apart, H200)
    double = replace(plain_forward(4, 4_000_000), weight=Vector("float64"))
    assert not row_grid.applies(double, H200)
    across = replace(plain_forward(4, 4_000_000), x=Matrix("float32", (1,), (4,)))
    assert not row_grid.applies(across, H200)


def test_rows_whose_weights_the_cache_does_not_hold_are_left_to_row_split() -> None:
    problem = plain_forward(10, 10_000_000)
    assert not row_grid.applies(problem, H200)
    assert row_grid.applies(replace(problem, weight=None, bias=None), H200)
    assert row_grid.applies(plain_forward(1, 10_000_000), H200)
    assert row_grid.applies(plain_forward(10, 10_000_001), H200)


def test_more_rows_whose_weights_are_read_at_every_row_are_left_to_row_split() -> None:
    assert row_grid.applies(plain_forward(7, 3_500_000), H200)
    assert not row_grid.applies(plain_forward(8, 3_500_000), H200)
    assert row_grid.applies(replace(plain_forward(8, 3_500_000), weight=None, bias=None), H200)
    assert row_grid.applies(plain_forward(8, 3_500_001), H200)


def test_rows_of_forty_megabytes_are_read_once() -> None:
    problem = plain_forward(1, 10_000_000)
    geometry = row_grid.forward_geometry(problem, H200)
    assert geometry is not None
    assert geometry.resident + geometry.held == geometry.vectors(problem)


def test_words_are_cleared_and_the_launch_is_cooperative() -> None:
    chosen = plan(plain_forward(7, 2_000_000, "float64"), H200)
    clear, main = chosen.launches
    assert (clear.kernel, clear.cooperative) == ("zeros", False)
    assert (main.kernel, main.cooperative) == ("row_grid_forward", True)
    (words,) = chosen.scratch
    # Two turns' three numbers a block, in words of half a number and half a tag.
    assert words.bytes == 2 * main.grid * 3 * 2 * 8
    assert dict(clear.arguments) == {"target": dict(main.arguments)["words"], "count": words.bytes // 16}
