"""Rows that blocks share in a pipeline, on the emulator: a few small blocks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
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
from plan_cases import GPUS, plain_backward, plain_channel_backward, plain_channel_forward, plain_forward

from cunorm.plan import Device, Plan, plan, row_pipeline
from cunorm.plan.launches import Builder
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Norm, Problem, Vector

DEVICE = Device("sm_90", multiprocessors=4, threads_per_multiprocessor=128)
# Two threads' warps a block, four blocks: a vector a thread is a row of 256 vectors.
SMALL = RowPipeline(4, resident=3, blocks_per_row=4, groups=1, rows_ahead=2, lag=1, threads=64)


def pipeline_plan(problem: ForwardProblem, device: Device, geometry: RowPipeline) -> Plan:
    builder = Builder()
    return builder.finished(row_pipeline.plan_forward(problem, geometry, builder))


def run(case: Case, geometry: RowPipeline, stats: bool = True, out: Array | None = None, seed: int = 0) -> Results:
    """What the kernel leaves, in ``out`` if that is given."""
    choose = functools.partial(pipeline_plan, geometry=geometry)
    return EmulatorRunner(DEVICE, choose, seed).forward(case, stats, out)


def check(case: Case, geometry: RowPipeline) -> None:
    """Against float64, with the tolerances of every other kernel; its statistics are a little better."""
    before = case.x.copy()
    assert_forward(case, run(case, geometry), float32_statistics=2e-7)
    assert case.x.tobytes() == before.tobytes(), "x was modified"


def affine(columns: int, dtype: str, weight: str | None = None) -> tuple[Array, Array]:
    return data(1, (columns,), weight or dtype, shift=1.0), data(2, (columns,), weight or dtype)


def geometry_for(dtype: str, columns: int, **changes: Any) -> RowPipeline:
    """SMALL with vectors of 16 bytes, which the columns must divide by."""
    return replace(SMALL, width=16 // DTYPES[dtype].itemsize, **changes)


# How the vectors of a row lie over blocks, and how many rows are on their way or wait.
LAYOUTS: dict[str, dict[str, Any]] = {
    "a turn later": {},
    "two turns later": {"rows_ahead": 4, "lag": 2},
    "four turns later": {"rows_ahead": 6, "lag": 4},
    "two groups": {"groups": 2, "blocks_per_row": 2, "resident": 6, "rows_ahead": 3},
    "five groups of three blocks": {"groups": 5, "blocks_per_row": 3, "resident": 4},
    "four groups of one block": {"groups": 4, "blocks_per_row": 1, "resident": 11},
    "more blocks than a warp has lanes": {"blocks_per_row": 37, "resident": 1, "rows_ahead": 3},
    "more turns of delay than rows": {"rows_ahead": 7, "lag": 6},
}


# Each layout with one dtype, the next with another; and one with all.
LAYOUTS_AND_DTYPES = [(layout, list(DTYPES)[i % 4]) for i, layout in enumerate(LAYOUTS)]
LAYOUTS_AND_DTYPES += [("two turns later", dtype) for dtype in ("bfloat16", "float32", "float64")]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_AND_DTYPES)
def test_layouts(layout: str, dtype: str) -> None:
    """Five rows of 2.6 vectors a thread: the last block has less, and the rows are several turns."""
    columns = 16 // DTYPES[dtype].itemsize * 663
    case = Case(data(0, (5, columns), dtype), *affine(columns, dtype))
    check(case, geometry_for(dtype, columns, **LAYOUTS[layout]))


@pytest.mark.parametrize("columns", [84, 768, 772, 1020, 1028, 3068, 3072])
def test_last_blocks_of_every_length(columns: int) -> None:
    """Down to one whose part is three vectors, so that most warps have none."""
    check(Case(data(0, (3, columns)), *affine(columns, "float32")), geometry_for("float32", columns))


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS[:3]], ids=str)
@pytest.mark.parametrize("columns", [2652, 2648])
def test_norms(norm: Norm, columns: int) -> None:
    case = Case(data(0, (3, columns)), *affine(columns, "float32"), norm=norm)
    check(case, geometry_for("float32", columns))


@pytest.mark.parametrize(("layout", "dtype"), [
    ("a turn later", "bfloat16"), ("two turns later", "float32"), ("two groups", "float16"),
    ("five groups of three blocks", "float64"),
])  # fmt: skip
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_residual(norm: Norm, layout: str, dtype: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663
    x, residual = data(0, (5, columns), dtype), data(5, (5, columns), dtype, shift=-2.0)
    case = Case(x, *affine(columns, dtype), norm=norm, residual=residual)
    check(case, geometry_for(dtype, columns, **LAYOUTS[layout]))


@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("columns", [2652, 2648])
def test_weight_and_bias_are_each_optional(columns: int, weight: bool, bias: bool) -> None:
    given = affine(columns, "float32")
    case = Case(data(0, (3, columns)), given[0] if weight else None, given[1] if bias else None)
    check(case, geometry_for("float32", columns))


@pytest.mark.parametrize(("dtype", "weight"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64")])
def test_weight_of_another_dtype(dtype: str, weight: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663
    check(Case(data(0, (2, columns), dtype), *affine(columns, dtype, weight)), geometry_for(dtype, columns))


@pytest.mark.parametrize("layout", ["a turn later", "two groups"])
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero_or_from_the_pivot(kind: str, layout: str) -> None:
    """The pivot is the mean of a warp's first vectors: data that lie far from it, and far from zero."""
    columns = 2652
    case = Case(far_data(kind, (3, columns)), *affine(columns, "float32"))
    check(case, geometry_for("float32", columns, **LAYOUTS[layout]))


def test_a_constant_row_is_its_own_mean() -> None:
    x = np.full((2, 2652), 3.7, np.float32)
    results = run(Case(x), geometry_for("float32", 2652))
    assert np.abs(results.y).max() < 1e-4
    np.testing.assert_allclose(results.rstd, EPS**-0.5, rtol=1e-5)


@pytest.mark.parametrize("columns", [2652, 2648])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, columns: int) -> None:
    x = data(0, (4, columns))
    x[1, 5] = bad
    results = run(Case(x), geometry_for("float32", columns, rows_ahead=3))
    assert np.isnan(results.y[1]).any() and not np.isfinite(results.mean[1])
    others = [0, 2, 3]
    assert np.isfinite(results.y[others]).all() and np.isfinite(results.mean[others]).all()


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_without_statistics(norm: Norm) -> None:
    case, layout = Case(data(0, (3, 2652)), *affine(2652, "float32"), norm=norm), geometry_for("float32", 2652)
    assert run(case, layout, stats=False).y.tobytes() == run(case, layout).y.tobytes()


@pytest.mark.parametrize("layout", ["a turn later", "two turns later"])
@pytest.mark.parametrize("columns", [2652, 2648])
def test_result_in_place_of_x(columns: int, layout: str) -> None:
    case = Case(data(0, (5, columns)), *affine(columns, "float32"))
    geometry = geometry_for("float32", columns, **LAYOUTS[layout])
    expected = run(case, geometry).y
    assert run(case, geometry, out=case.x).y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", ["two turns later", "five groups of three blocks"])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(layout: str) -> None:
    case = Case(data(0, (5, 2648), shift=100.0), *affine(2648, "float32"))
    geometry = geometry_for("float32", 2648, **LAYOUTS[layout])
    results = [run(case, geometry, seed=seed) for seed in range(4)]
    for result in results[1:]:
        assert result.y.tobytes() == results[0].y.tobytes()
        assert result.rstd.tobytes() == results[0].rstd.tobytes()


def test_strided_rows() -> None:
    wide = data(3, (5, 2700))
    case = Case(wide[:, 4:2656], *affine(2652, "float32"))
    check(case, geometry_for("float32", 2652, rows_ahead=3))


# ---- The plan.

H200, A100, RTX, RTX_6000 = (GPUS[arch] for arch in ("sm_90", "sm_80", "sm_89", "sm_120"))
SHAPES = [
    (4, 1_000_000), (37, 400_000), (300, 200_000), (64, 1_600_000), (100, 700_000), (1000, 300_000), (2000, 131_072),
    (13, 2_000_000),
]  # fmt: skip


def long_problems(device: Device) -> Iterator[tuple[Problem, RowPipeline]]:
    """Those of rows and of channels that are shared, with how they are."""
    for shape, dtype, more in itertools.product(SHAPES, ("float16", "float32"), (False, True)):
        backward = plain_backward(*shape, dtype)
        problems: list[Problem | None] = [
            plain_forward(*shape, dtype, residual=more),
            replace(backward, dresidual_out=backward.x) if more else backward,
        ]
        for make in (plain_channel_forward, plain_channel_backward):
            problems.append(as_rows(make(shape[0], 3, 1, shape[1], dtype)))
            problems.append(as_rows(make(shape[0], 6, 3, shape[1] // 48 * 16, dtype)))
        for problem in problems:
            assert problem is not None
            way = row_pipeline.geometry(problem, device)
            if way is not None:
                yield problem, way


@pytest.mark.parametrize("device", [H200, A100, RTX, RTX_6000], ids=lambda device: device.arch)
def test_geometries_fit_the_device_and_cover_the_row(device: Device) -> None:
    kinds = set()
    for problem, way in long_problems(device):
        kinds.add((type(problem), problem.channels is not None, way.blocks_per_multiprocessor))
        share, blocks = way.blocks_per_multiprocessor, way.blocks_per_row
        assert way.groups * blocks <= device.multiprocessors * share
        assert way.groups <= problem.rows
        # Of each block a kilobyte is the kernel's own, and another is kept for it.
        assert share * (way.shared_bytes(problem) + 2048) <= device.shared_bytes + 1024
        assert share * (way.threads + 64) <= device.threads_per_multiprocessor
        part = way.columns_per_block(problem)
        assert part % way.width == 0 and (blocks - 1) * part < problem.columns <= blocks * part
        assert way.resident == way.vectors(problem) and way.width * DTYPES[problem.x.dtype].itemsize == 16
        assert 1 <= way.lag < way.rows_ahead
    assert {(type_, by_channel) for type_, by_channel, _ in kinds} == set(
        itertools.product((ForwardProblem, BackwardProblem), (False, True))
    )


@pytest.mark.parametrize("make", [plain_forward, plain_backward], ids=["forward", "backward"])
def test_it_takes_long_contiguous_rows_since_sm_80(make: Callable[..., Problem]) -> None:
    def takes(problem: Problem, device: Device = H200) -> bool:
        return row_pipeline.geometry(problem, device) is not None

    plain = make(100, 700_000)
    assert takes(plain) and takes(make(100, 300_000, "float16"), A100) and takes(make(100, 100_000), RTX)
    assert not takes(make(100, 300_000, "float16"), GPUS["sm_75"])
    assert not takes(make(1, 700_000)), "there is no next row to be on its way"
    assert not takes(make(100, 8_000)) and not takes(make(100, 10_000_000))
    assert not takes(make(100, 700_000, "float64"))
    # Rows that begin anywhere, and those that are not contiguous.
    assert not takes(make(100, 700_001)) and not takes(replace(plain, x=Matrix("float32", (700_000,), (1,), 4)))
    assert takes(replace(plain, x=Matrix("float32", (700_004,), (1,))))
    assert not takes(replace(plain, x=Matrix("float32", (700_001,), (1,))))
    assert not takes(replace(plain, x=Matrix("float32", (1,), (100,))))


def test_weights_and_sums_leave_no_room_for_others() -> None:
    forward, backward = plain_forward(100, 1_000_000, "float16"), plain_backward(100, 1_000_000, "float16")
    assert row_pipeline.geometry(forward, H200) and row_pipeline.geometry(backward, H200)
    double = Vector("float64")
    assert row_pipeline.geometry(replace(forward, weight=double, bias=double), H200) is None
    assert row_pipeline.geometry(replace(backward, weight=double), H200) is None
    assert row_pipeline.geometry(replace(backward, dx=None), H200) is None
    longer = plain_forward(100, 3_500_000, "float16")
    assert row_pipeline.geometry(longer, H200) is None
    assert row_pipeline.geometry(replace(longer, weight=None, bias=None), H200) is not None


def test_clusters_have_rows_that_are_shorter_or_few() -> None:
    """A GPU without clusters has no such choice."""
    for make in (plain_forward, plain_backward):
        assert plan(make(2000, 50_000), H200).strategy == "row_cluster"
        assert plan(make(64, 200_000), H200).strategy == plan(make(64, 700_000), H200).strategy == "row_pipeline"
        assert plan(make(2000, 50_000), A100).strategy == plan(make(8, 100_000), RTX).strategy == "row_pipeline"
    assert plan(plain_forward(8, 200_000), H200).strategy == "row_cluster"


@pytest.mark.parametrize(("together", "points"), [(1, 1_200_000), (4, 2**18), (8, 125_001)])
def test_rows_of_one_channel(together: int, points: int) -> None:
    for make in (plain_channel_forward, plain_channel_backward):
        problem = as_rows(make(20, 16, together, points, "float16"))
        assert problem is not None
        assert (row_pipeline.geometry(problem, H200) is not None) == (together == 1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_words_are_cleared_and_the_launch_is_cooperative(dtype: str) -> None:
    for make, numbers in ((plain_forward, 3), (plain_backward, 2)):
        chosen = plan(make(1000, 300_000, dtype), H200)
        clear, main, *others = chosen.launches
        assert (clear.kernel, clear.cooperative, main.cooperative) == ("zeros", False, True)
        assert main.kernel == f"row_pipeline_{'forward' if make is plain_forward else 'backward'}"
        # Several groups of blocks leave sums each.
        assert [item.kernel for item in others] == ([] if make is plain_forward else ["column_sums"])
        words, constants, arguments = chosen.scratch[0], dict(main.constants), dict(main.arguments)
        groups, turns = main.grid // int(str(arguments["blocks_per_row"])), 2 * int(constants["LAG"])
        # In words of half a number and half a tag, for as many blocks as the lanes of a warp merge.
        assert words.bytes == turns * groups * 32 * int(constants["PARTS_PER_LANE"]) * numbers * 2 * 4
        assert arguments["words"] == words.name
        assert dict(clear.arguments) == {"target": words.name, "count": words.bytes // 16}
