"""Rows that several blocks share, all of a device or in a pipeline, on the emulator: a few small blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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

from cunorm.plan import Device, Plan, rows
from cunorm.plan.row_grid import RowGrid
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.row_stream import RowStream
from cunorm.problem import DTYPES, ForwardProblem, Norm

DEVICE = Device("sm_90", multiprocessors=4, threads_per_multiprocessor=128)


# What blocks tell each other in a pipeline are floats.
NOT_DOUBLES = tuple(dtype for dtype in DTYPES if dtype != "float64")


@dataclass(frozen=True)
class Family:
    """A family of kernels, and what its tests are of.

    ``small`` has two warps a block, four blocks: a vector a thread is a row of 256 vectors. ``layouts`` are how the
    vectors of a row lie over blocks, slots, registers and the rest, and how many rows are on their way or wait; others
    are names of these. ``columns`` are a row of 663 vectors of float32 and near ones, ``odd`` how many more a row may
    have, ``few`` what makes rows need more than their slots, ``ahead`` what has rows on their way; ``with_residual``
    layouts have dtypes, and each is ``normed`` in these ways, of so many more columns.
    """

    small: Any
    layouts: dict[str, dict[str, Any]]
    in_every_dtype: str
    dtypes: tuple[str, ...]
    columns: tuple[int, ...]
    odd: tuple[int, ...]
    few: dict[str, int]
    ahead: dict[str, int]
    last_blocks: tuple[int, ...]
    with_residual: dict[str, str]
    normed: tuple[tuple[int, Norm], ...]
    far: tuple[str, ...]
    in_place: tuple[str, ...]
    in_any_order: tuple[str, ...]

    def geometry(self, dtype: str, columns: int, **changes: Any) -> Any:
        """The small one with vectors of 16 bytes; peeled, where the columns are no multiple and it does not stream."""
        width = 16 // DTYPES[dtype].itemsize
        geometry = replace(self.small, width=width, **changes)
        if isinstance(geometry, RowStream):
            # Parts are whole lines of the cache, and begin anywhere in one.
            line = 128 // DTYPES[dtype].itemsize
            part = -(-columns // (geometry.blocks_per_row * line)) * line
            resident = -(-(part + line) // (width * geometry.threads))
            return replace(geometry, blocks_per_row=-(-columns // part), resident=resident)
        if columns % width == 0:
            return geometry
        return replace(geometry, peeled=True)

    @property
    def layouts_and_dtypes(self) -> list[tuple[str, str]]:
        """Each layout with one dtype, the next with another; and one with all."""
        found = list(zip(self.layouts, itertools.cycle(self.dtypes)))
        return list(dict.fromkeys([*found, *((self.in_every_dtype, dtype) for dtype in self.dtypes)]))


GRID = Family(
    small=RowGrid(4, resident=3, blocks_per_row=4, groups=1, threads=64),
    layouts={
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
    },
    in_every_dtype="registers and the rest",
    dtypes=tuple(DTYPES),
    columns=(2652, 2653),
    odd=(0, 3),
    few={"resident": 1, "held": 1},
    ahead={"rows_ahead": 2},
    last_blocks=(81, 83, 87, 769, 770, 1023, 1025, 3071, 3073),  # down to one that has no vector, only edges
    with_residual={
        "resident": "bfloat16",
        "one slot": "float32",
        "two rows ahead": "float16",
        "five groups of three blocks": "float64",
    },
    normed=((0, LAYER_NORM), (1, LAYER_NORM), (1, RMS_NORM)),
    far=("resident", "registers and the rest", "pivot of a part"),
    in_place=("resident", "two rows ahead", "registers and the rest", "prefetched"),
    in_any_order=("two rows ahead", "five groups of three blocks", "registers and the rest"),
)
PIPELINE = Family(
    small=RowPipeline(4, resident=3, blocks_per_row=4, groups=1, rows_ahead=2, lag=1, threads=64),
    layouts={
        "a turn later": {},
        "two turns later": {"rows_ahead": 4, "lag": 2},
        "four turns later": {"rows_ahead": 6, "lag": 4},
        "two groups": {"groups": 2, "blocks_per_row": 2, "resident": 6, "rows_ahead": 3},
        "five groups of three blocks": {"groups": 5, "blocks_per_row": 3, "resident": 4},
        "four groups of one block": {"groups": 4, "blocks_per_row": 1, "resident": 11},
        "more blocks than a warp has lanes": {"blocks_per_row": 42, "resident": 1, "rows_ahead": 3},
        "more turns of delay than rows": {"rows_ahead": 7, "lag": 6},
    },
    in_every_dtype="two turns later",
    dtypes=NOT_DOUBLES,
    columns=(2652, 2648),
    odd=(0,),
    few={},
    ahead={"rows_ahead": 3},
    last_blocks=(84, 768, 772, 1020, 1028, 3068, 3072),  # down to one of three vectors, so that most warps have none
    with_residual={
        "a turn later": "bfloat16",
        "two turns later": "float32",
        "two groups": "float16",
        "five groups of three blocks": "bfloat16",
    },
    normed=((0, LAYER_NORM), (0, RMS_NORM)),
    far=("a turn later", "two groups"),
    in_place=("a turn later", "two turns later"),
    in_any_order=("two turns later", "five groups of three blocks"),
)
STREAM = Family(
    small=RowStream(4, resident=1, blocks_per_row=4, groups=1, rows_ahead=2, lag=1, threads=64),
    layouts={
        "a turn later": {},
        "two turns later": {"rows_ahead": 4, "lag": 2},
        "three turns later": {"rows_ahead": 6, "lag": 3},
        "two groups": {"groups": 2, "blocks_per_row": 2, "rows_ahead": 3, "lag": 2},
        "five groups of three blocks": {"groups": 5, "blocks_per_row": 3},
        "four groups of one block": {"groups": 4, "blocks_per_row": 1, "threads": 128},
        "more blocks than a warp has lanes": {"blocks_per_row": 42, "rows_ahead": 4},
        "more turns of delay than rows": {"rows_ahead": 7, "lag": 6},
        "more rows under way than rows": {"rows_ahead": 8},
    },
    in_every_dtype="two turns later",
    dtypes=NOT_DOUBLES,
    columns=(2653, 2652, 2650),
    odd=(0, 3),
    few={},
    ahead={"rows_ahead": 3, "lag": 2},
    last_blocks=(97, 115, 769, 2305, 2941, 3072),  # down to one of one column
    with_residual={
        "a turn later": "bfloat16",
        "two turns later": "float32",
        "two groups": "float16",
        "more rows under way than rows": "float16",
    },
    normed=((0, LAYER_NORM), (1, LAYER_NORM), (1, RMS_NORM)),
    far=("a turn later", "two groups"),
    in_place=("a turn later", "three turns later"),
    in_any_order=("two turns later", "more rows under way than rows"),
)
FAMILIES = {"grid": GRID, "pipeline": PIPELINE, "stream": STREAM}
ANYWHERE = {"grid": GRID, "stream": STREAM}  # that compute rows which begin anywhere


def each(names: str, values: Callable[[Family], Iterable[Any]], families: dict[str, Family] = FAMILIES) -> Any:
    """Families, each with values of its own for the arguments of these names."""
    argvalues = []
    for name, family in families.items():
        for value in values(family):
            several = value if isinstance(value, tuple) else (value,)
            argvalues.append(pytest.param(family, *several, id="-".join([name, *map(str, several)])))
    return pytest.mark.parametrize(f"family, {names}", argvalues)


all_families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def run(case: Case, geometry: Any, stats: bool = True, out: Array | None = None, seed: int = 0) -> Results:
    """What the kernel leaves, in ``out`` if that is given."""

    def choose(problem: ForwardProblem, device: Device) -> Plan:
        return rows.plan_with(problem, device, geometry)

    return EmulatorRunner(DEVICE, choose, seed).forward(case, stats, out)


def check(case: Case, geometry: Any) -> None:
    """Against float64, with the tolerances of every other kernel; its statistics are a little better."""
    before = case.x.copy()
    assert_forward(case, run(case, geometry), float32_statistics=2e-7)
    assert case.x.tobytes() == before.tobytes(), "x was modified"


def affine(columns: int, dtype: str, weight: str | None = None) -> tuple[Array, Array]:
    return data(1, (columns,), weight or dtype, shift=1.0), data(2, (columns,), weight or dtype)


@each("layout, dtype", lambda family: family.layouts_and_dtypes)
def test_layouts(family: Family, layout: str, dtype: str) -> None:
    """Five rows of 2.6 vectors a thread: the last block has less, and the rows are several turns."""
    columns = 16 // DTYPES[dtype].itemsize * 663
    case = Case(data(0, (5, columns), dtype), *affine(columns, dtype))
    check(case, family.geometry(dtype, columns, **family.layouts[layout]))


@each("layout, dtype", lambda family: family.layouts_and_dtypes, ANYWHERE)
def test_rows_that_begin_anywhere(family: Family, layout: str, dtype: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + 1
    case = Case(data(0, (5, columns), dtype), *affine(columns, dtype))
    check(case, family.geometry(dtype, columns, **family.layouts[layout]))


@pytest.mark.parametrize("family", ANYWHERE.values(), ids=ANYWHERE)
def test_numbers_far_from_the_pivot_in_rows_that_begin_anywhere(family: Family) -> None:
    for kind in FAR:
        case = Case(far_data(kind, (3, 2653)), *affine(2653, "float32"))
        check(case, family.geometry("float32", 2653, **family.few))


@each("columns", lambda family: family.last_blocks)
def test_last_blocks_of_every_length(family: Family, columns: int) -> None:
    case = Case(data(0, (3, columns)), *affine(columns, "float32"))
    check(case, family.geometry("float32", columns))


@pytest.mark.parametrize("norm", [RMS_NORM, Norm(False, 1.0, "silu"), *ACTIVATED_NORMS[:3]], ids=str)
@each("columns", lambda family: family.columns)
def test_norms(family: Family, columns: int, norm: Norm) -> None:
    case = Case(data(0, (3, columns)), *affine(columns, "float32"), norm=norm)
    check(case, family.geometry("float32", columns, **family.few))


@each(
    "layout, dtype, odd, norm",
    lambda family: [(*item, *norm) for item, norm in itertools.product(family.with_residual.items(), family.normed)],
)
def test_residual(family: Family, layout: str, dtype: str, odd: int, norm: Norm) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    x, residual = data(0, (5, columns), dtype), data(5, (5, columns), dtype, shift=-2.0)
    case = Case(x, *affine(columns, dtype), norm=norm, residual=residual)
    check(case, family.geometry(dtype, columns, **family.layouts[layout]))


@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
@each("columns", lambda family: family.columns)
def test_weight_and_bias_are_each_optional(family: Family, columns: int, weight: bool, bias: bool) -> None:
    given = affine(columns, "float32")
    case = Case(data(0, (3, columns)), given[0] if weight else None, given[1] if bias else None)
    check(case, family.geometry("float32", columns, **({"resident": 2} if family is GRID else {})))


@pytest.mark.parametrize(("dtype", "weight"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "float64")])
@each("odd", lambda family: family.odd)
def test_weight_of_another_dtype(family: Family, odd: int, dtype: str, weight: str) -> None:
    columns = 16 // DTYPES[dtype].itemsize * 663 + odd
    case = Case(data(0, (2, columns), dtype), *affine(columns, dtype, weight))
    check(case, family.geometry(dtype, columns))


@each("layout", lambda family: family.far)
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_zero_or_from_the_pivot(family: Family, layout: str, kind: str) -> None:
    """The pivot is the mean of a block's or a warp's first vectors: data that lie far from it, and far from zero."""
    case = Case(far_data(kind, (3, 2652)), *affine(2652, "float32"))
    check(case, family.geometry("float32", 2652, **family.layouts[layout]))


@all_families
def test_a_constant_row_is_its_own_mean(family: Family) -> None:
    x = np.full((2, 2652), 3.7, np.float32)
    results = run(Case(x), family.geometry("float32", 2652))
    assert np.abs(results.y).max() < 1e-4
    np.testing.assert_allclose(results.rstd, EPS**-0.5, rtol=1e-5)


@each("columns", lambda family: family.columns)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(family: Family, columns: int, bad: float) -> None:
    x = data(0, (4, columns))
    x[1, 5] = bad
    results = run(Case(x), family.geometry("float32", columns, **family.ahead))
    assert np.isnan(results.y[1]).any() and not np.isfinite(results.mean[1])
    others = [0, 2, 3]
    assert np.isfinite(results.y[others]).all() and np.isfinite(results.mean[others]).all()


@all_families
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["layer", "rms"])
def test_without_statistics(family: Family, norm: Norm) -> None:
    case, geometry = Case(data(0, (3, 2652)), *affine(2652, "float32"), norm=norm), family.geometry("float32", 2652)
    assert run(case, geometry, stats=False).y.tobytes() == run(case, geometry).y.tobytes()


@each("layout, columns", lambda family: itertools.product(family.in_place, family.columns))
def test_result_in_place_of_x(family: Family, layout: str, columns: int) -> None:
    case = Case(data(0, (5, columns)), *affine(columns, "float32"))
    geometry = family.geometry("float32", columns, **family.layouts[layout])
    expected = run(case, geometry).y
    assert run(case, geometry, out=case.x).y.tobytes() == expected.tobytes()


@each("layout", lambda family: family.in_any_order)
def test_any_order_of_threads_and_blocks_gives_the_same_bits(family: Family, layout: str) -> None:
    columns = family.columns[1]
    case = Case(data(0, (5, columns), shift=100.0), *affine(columns, "float32"))
    geometry = family.geometry("float32", columns, **family.layouts[layout])
    results = [run(case, geometry, seed=seed) for seed in range(4)]
    for result in results[1:]:
        assert result.y.tobytes() == results[0].y.tobytes()
        assert result.rstd.tobytes() == results[0].rstd.tobytes()


@pytest.mark.parametrize("layout", ["two turns later", "two groups", "more rows under way than rows"])
@pytest.mark.parametrize(("columns", "backwards"), [(2653, False), (2652, False), (97, False), (2652, True)])
def test_strided_rows_that_stream_in_place(columns: int, backwards: bool, layout: str) -> None:
    """All tensors begin alike: x is its own result, and what lies between its rows stays as it is."""
    wide = data(3, (5, 2700 if backwards else 2701))
    x = wide[::-1, 4 : 4 + columns] if backwards else wide[:, 4 : 4 + columns]
    case, before = Case(x.copy(), *affine(columns, "float32")), wide.copy()
    results = run(replace(case, x=x), STREAM.geometry("float32", columns, **STREAM.layouts[layout]), out=x)
    assert_forward(case, results, float32_statistics=2e-7)
    assert wide[:, :4].tobytes() == before[:, :4].tobytes()
    assert wide[:, 4 + columns :].tobytes() == before[:, 4 + columns :].tobytes()


@pytest.mark.parametrize("family", [GRID, PIPELINE], ids=["grid", "pipeline"])
def test_strided_rows(family: Family) -> None:
    wide = data(3, (5, 2700))
    case = Case(wide[:, 4:2656], *affine(2652, "float32"))
    check(case, family.geometry("float32", 2652, **family.ahead))
