"""What layer norm computes, on every path: the CPU, the emulator, a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    ALL_GRADIENTS,
    AXES,
    EPS,
    LONG_SIZES,
    NORM_TOLERANCE,
    OLD_DEVICE,
    RUNNERS,
    SIZES,
    SMALL_DEVICE,
    Case,
    EmulatorRunner,
    assert_any_order_gives_the_same,
    check,
    columns_shape,
    data,
    dtype_of,
    float64,
    kinds_of,
    relative_error,
    views,
)

import cunorm
from cunorm import reference
from cunorm.plan import Device, Plan, RowBlock, plan, plan_with, row_candidates

# Each size with two dtypes or three: float16 lies as bfloat16 does.
SIZES_AND_DTYPES = [(shape, dtype) for shape in SIZES for dtype in ("bfloat16", "float32")]
SIZES_AND_DTYPES += [(shape, "float16") for shape in SIZES[::4]] + [(shape, "float64") for shape in SIZES[1::2]]
SIZES_AND_DTYPES += [((200, 256), "bfloat16")]  # short rows: backward fetched ahead, several times by each block
SIZES_AND_DTYPES += [((40, 1025), "float64")]  # odd rows: likewise, forward too
SIZES_AND_DTYPES += [((1100, 9), "float32")]  # tiny rows
LONG_SIZES_AND_DTYPES = [(shape, ("bfloat16", "float32")[i % 2]) for i, shape in enumerate(LONG_SIZES)]
LONG_SIZES_AND_DTYPES += [((2, 17000), "float64"), ((17, 40_001), "float32")]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype"), SIZES_AND_DTYPES, ids=str)
def test_rows_of_every_size(runner: Any, shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(runner, Case(data(0, shape, dtype), weight, bias))


# Where memory is slower than an H200's, on which odd rows come in bulk.
SLOW_DEVICE = replace(SMALL_DEVICE, memory_rate=22e3)
SLOW_SIZES = [((1100, 9), "float32"), ((1100, 25), "bfloat16"), ((40, 257), "bfloat16"), ((9, 1003), "bfloat16")]


@pytest.mark.parametrize(("shape", "dtype"), SLOW_SIZES, ids=str)
def test_odd_rows_where_memory_is_slower(shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(EmulatorRunner(SLOW_DEVICE), Case(data(0, shape, dtype), weight, bias))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype"), LONG_SIZES_AND_DTYPES, ids=str)
def test_rows_that_no_block_holds(runner: Any, shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(runner, Case(data(0, shape, dtype), weight, bias))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [96, 20000])
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
def test_weight_and_bias_are_optional(runner: Any, columns: int, weight: bool, bias: bool) -> None:
    x, given_weight = data(0, (3, columns), "float16"), data(1, (columns,), "float16", shift=1.0)
    given_bias = data(2, (columns,), "float16")
    check(runner, Case(x, given_weight if weight else None, given_bias if bias else None))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "weight", "bias"),
    [
        ((3, 96), (-1,), "bfloat16", "float32", "float32"),
        ((3, 96), (-1,), "float32", "float16", "float64"),
        ((3, 96), (-1,), "float64", "bfloat16", "float16"),
        ((3, 9000), (-1,), "float16", "float32", "bfloat16"),
        ((3, 9000), (-1,), "float16", "float64", "float64"),
        ((3, 9000), (-1,), "float64", "float32", "float64"),
        ((3, 1025), (-1,), "bfloat16", "float32", "float64"),
        ((200, 20), (0,), "float32", "bfloat16", "float64"),
        ((200, 20), (0,), "bfloat16", "float64", "float32"),
    ],
    ids=str,
)
def test_weight_and_bias_of_other_dtypes(
    runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str, weight: str, bias: str
) -> None:
    columns = columns_shape(shape, axis)
    vectors = data(1, columns, weight, shift=1.0, outliers=False), data(2, columns, bias, outliers=False)
    check(runner, Case(data(0, shape, dtype), *vectors, axis))


@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_that_shared_memory_does_not_hold(runner: Any) -> None:
    weight, bias = (data(seed, (60000,), "float64", shift=1.0, outliers=False) for seed in (1, 2))
    check(runner, Case(data(0, (1, 60000)), weight, bias))


@pytest.mark.parametrize("runner", RUNNERS)
def test_long_rows_of_every_second_column(runner: Any) -> None:
    """No block takes them whole, since their columns lie apart."""
    check(runner, Case(data(0, (2, 36000))[:, ::2], data(1, (18000,), shift=1.0)))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), [(*AXES[i], ("bfloat16", "float32")[i % 2]) for i in range(len(AXES))], ids=str
)
def test_any_axes(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    columns = columns_shape(shape, axis)
    weight, bias = data(1, columns, dtype, shift=1.0), data(2, columns, dtype)
    check(runner, Case(data(0, shape, dtype), weight, bias, axis))


@pytest.mark.parametrize("axis", [np.array([1, 2]), np.array([-1, -2], "int8"), [np.int64(1), 2]], ids=str)
def test_axes_and_masks_of_numpy(axis: Any) -> None:
    x = data(0, (4, 6, 8))
    y, mean, rstd = cunorm.layer_norm(x, axis=axis, return_stats=True)
    assert np.array_equal(y, cunorm.layer_norm(x, axis=(1, 2)))
    mask = np.array([True, False, False])
    dx, dweight, dbias = cunorm.layer_norm_backward(x, x, None, mean, rstd, axis=axis, output_mask=mask)
    assert dx.shape == x.shape and dweight is None and dbias is None


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(views("float32")))
def test_views_are_not_copied(runner: Any, name: str, dtype: str) -> None:
    x, dy = views(dtype)[name]
    columns = x.shape[1:]
    weight = data(1, (columns[0] + 1,), dtype, shift=1.0)[1:]  # at an odd offset too
    bias = data(2, (columns[0] + 3,), dtype)[3:]
    check(runner, Case(x, weight, bias), dy)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "mask", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
@pytest.mark.parametrize(("shape", "axis"), [((5, 200), (-1,)), ((2, 20001), (-1,)), ((300, 20), (0,))], ids=str)
def test_only_the_gradients_asked_for(runner: Any, shape: Any, axis: Any, mask: tuple[bool, bool, bool]) -> None:
    case, dy = Case(data(0, shape), data(2, columns_shape(shape, axis)), axis=axis), data(1, shape)
    results = runner.forward(case)
    every, some = (runner.backward(case.backward(results, dy, wanted)) for wanted in (ALL_GRADIENTS, mask))
    for wanted, one, other in zip(mask, some, every):
        assert (one is not None) == wanted
        assert one is None or relative_error(one, float64(other)) <= 1e-7


# Whole vectors and rows that begin anywhere, read directly; a residual, and short rows of few bytes at a time.
KEEP_NOTHING = [((50, 256), "bfloat16", False), ((9, 1025), "float32", False), ((20, 96), "float32", True)]
KEEP_NOTHING += [((900, 36), "bfloat16", False)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype", "residual"), KEEP_NOTHING, ids=str)
def test_rows_that_keep_nothing(runner: Any, shape: tuple[int, int], dtype: str, residual: bool) -> None:
    """Without a weight and a bias, whose gradients nobody asks for."""
    case, dy = Case(data(0, shape, dtype), residual=data(3, shape, dtype) if residual else None), data(1, shape, dtype)
    dresidual_out = data(4, shape, dtype) if residual else None
    backward = case.backward(runner.forward(case), dy, (True, False, False), dresidual_out)
    dx, dweight, dbias = runner.backward(backward)
    assert dweight is None and dbias is None
    expected, _, _ = case.expected_gradients(dy, dresidual_out)
    size = np.abs(float64(dy)) * case.expected().rstd[:, None]
    if dresidual_out is not None:
        size = size + np.abs(float64(dresidual_out))
    assert relative_error(dx, expected, size) <= NORM_TOLERANCE[dtype]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((5, 200), (-1,)), ((2, 20000), (-1,)), ((300, 20), (0,))], ids=str)
def test_without_statistics_y_is_the_same(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    weight = data(1, columns_shape(shape, axis))
    case = Case(data(0, shape), weight, weight, axis)
    assert runner.forward(case, stats=False).y.tobytes() == runner.forward(case).y.tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [64, 1000, 4097, 40000])
def test_rows_far_from_zero(runner: Any, columns: int) -> None:
    """|mean| / std = 10,000 in float32: the mean's own rounding would show at 3e-4."""
    case = Case(data(0, (4, columns), shift=1e4, outliers=False))
    results, expected = runner.forward(case), case.expected()
    assert relative_error(results.y, expected.y) < 1e-6
    assert relative_error(results.rstd, expected.rstd) < 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [1024, 40000])
def test_a_row_that_begins_elsewhere(runner: Any, columns: int) -> None:
    """The first numbers of a row say nothing of the rest, whatever a pivot is taken from."""
    x = data(0, (2, columns), outliers=False)
    x[:, :8] += 1e5
    x[:, 0] -= 3e6
    assert relative_error(runner.forward(Case(x)).y, Case(x).expected().y) < 1e-6


@pytest.mark.parametrize("seed", [0, 2])
def test_the_mean_of_a_far_row_in_chunks_is_rounded_once(seed: int) -> None:
    """Chunks are merged from a pivot: a sum of their means would have been rounded at its own size, and so be off."""

    def choose(problem: Any, device: Device) -> Plan:
        chosen = plan(problem, device)
        assert [item.kernel for item in chosen.launches][:2] == ["row_split_statistics", "split_merge"]
        return chosen

    case = Case(data(seed, (1, 100_000), "float64", shift=100.0, outliers=False))
    results, mean = EmulatorRunner(choose=choose).forward(case), math.fsum(case.x[0]) / case.x.size
    rounding = np.spacing(mean) / 2
    assert results.mean is not None and abs(results.mean.item() - mean) <= rounding
    assert np.abs(results.y - case.expected().z).max() <= 1.2 * rounding


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps(runner: Any, eps: float) -> None:
    check(runner, Case(data(0, (3, 100)), eps=eps))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("scale", [1e-18, 1e17])
def test_gradients_of_very_small_and_very_large_numbers(runner: Any, scale: float) -> None:
    """rstd times itself and a gradient would leave the range of float32 where numbers are small; rstd does not."""
    x, dy = (data(seed, (3, 256), outliers=False) for seed in (0, 1))
    case, dy = Case((x * scale).astype(np.float32), eps=0.0), (dy * 1e4).astype(np.float32)
    results = runner.forward(case)
    dx, _, _ = runner.backward(case.backward(results, dy, (True, False, False)))
    statistics = float64(results.mean), float64(results.rstd)
    expected, _, _ = reference.row_norm_backward(float64(dy), float64(case.x), None, *statistics, axis=(1,))
    assert relative_error(dx, expected) <= 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [5, 20000])
def test_constant_rows_give_the_bias(runner: Any, columns: int) -> None:
    bias = data(1, (columns,))
    y, _, _, rstd = runner.forward(Case(np.full((2, columns), 3.7, np.float32), None, bias))
    np.testing.assert_allclose(y, np.broadcast_to(bias, y.shape), rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(rstd, EPS**-0.5, rtol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [5, 1000, 50_001])
def test_rows_of_one_large_number_are_numbers(runner: Any, columns: int) -> None:
    """Squares less the square of a mean are a variance that is less than nothing by rounding, and its root is NaN."""
    x = np.repeat(np.float32([[97_484_584], [198_869_248], [920_745_664], [3e10], [-1e9]]), columns, 1)
    y, _, mean, rstd = runner.forward(Case(x, eps=1e-7))
    np.testing.assert_allclose(mean, x[:, 0], rtol=1e-6)
    assert np.isfinite(y).all() and np.isfinite(rstd).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [100, 20000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(runner: Any, columns: int, bad: float) -> None:
    x = data(0, (3, columns))
    x[1, 5] = bad
    y, _, mean, _ = runner.forward(Case(x))
    assert np.isnan(y[1]).any() and not np.isfinite(mean[1])
    assert np.isfinite(y[[0, 2]]).all() and np.isfinite(mean[[0, 2]]).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 5), (1,)), ((0, 20000), (1,)), ((0, 5, 3), (1,)), ((3, 0), (0,))], ids=str
)
def test_no_rows(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    case = Case(x, weight, weight, axis)
    results = runner.forward(case)
    assert results.y.shape == shape and results.mean.size == results.rstd.size == 0
    dx, dweight, dbias = runner.backward(case.backward(results, x))
    assert dx.shape == shape
    assert not dweight.any() and not dbias.any() and dweight.shape == weight.shape


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 0), (1,)), ((3, 0, 2), (1,)), ((0, 2, 0), (0, 1))], ids=str)
def test_no_columns(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    case = Case(x, weight, weight, axis)
    results = runner.forward(case)
    assert results.y.shape == shape
    assert np.isnan(results.mean).all() and np.isnan(results.rstd).all()
    dx, dweight, _ = runner.backward(case.backward(results, x))
    assert dx.shape == shape and dweight.shape == weight.shape and not dweight.any()


OLD_SIZES = [((70, 1003), "bfloat16"), ((2, 4097), "float32"), ((9, 1024), "float16"), ((2, 30_001), "bfloat16")]


@pytest.mark.parametrize(("shape", "dtype"), OLD_SIZES, ids=str)
def test_rows_on_an_older_gpu(shape: tuple[int, int], dtype: str) -> None:
    """Without asynchronous copies or clusters, odd rows are read straight to registers."""
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(EmulatorRunner(OLD_DEVICE), Case(data(0, shape, dtype), weight, bias))


UNALIKE = (70, 1003)


def _direct_peeled(problem: Any, device: Device) -> Plan:
    """What tuning may choose where rows do not begin alike in all tensors."""
    geometries = row_candidates.candidates(problem, device)
    return plan_with(problem, device, next(item for item in geometries if item.peeled and item.stage == "direct"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_begin_in_different_ways(dtype: str) -> None:
    x, dy = (data(seed, (71 * 1003,), dtype)[seed : seed + 70 * 1003].reshape(UNALIKE) for seed in (1, 3))
    weight, bias = data(1, (1003,), dtype, shift=1.0), data(2, (1003,), dtype)
    check(EmulatorRunner(choose=_direct_peeled), Case(x, weight, bias), dy)


def _chooser(geometry: RowBlock) -> Callable[[Any, Device], Plan]:
    return lambda problem, device: plan_with(problem, device, geometry)


# For rows of 32 float32 numbers. The built-in plans have such rows ahead backward alone; tuning may choose it forward.
AHEAD = RowBlock(4, 2, 4, 16, 1, "ahead", weights="staged", blocks_per_multiprocessor=1)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows_ahead", [1, 2, 3])
def test_rows_that_come_ahead(rows_ahead: int, residual: bool) -> None:
    """In more turns than there are slots, and statistics that come at once: the last of them with fewer rows."""
    choose = _chooser(replace(AHEAD, rows_ahead=rows_ahead))
    shape = (2 * 16 * 9 + 21, 32)
    x, dy, added = (data(seed, shape) for seed in range(3))
    weight, bias = data(3, shape[1:], shift=1.0), data(4, shape[1:])
    check(EmulatorRunner(choose=choose), Case(x, weight, bias, residual=added if residual else None), dy)


STAGED = {
    "several rows a block": ((21, 64), "float32", RowBlock(4, 2, 8, 8, weights="staged")),
    "more rows than vectors": ((70, 32), "bfloat16", RowBlock(8, 1, 4, 16, weights="staged")),
    "turns": ((300, 72), "float16", RowBlock(8, 2, 8, 8, weights="staged", blocks_per_multiprocessor=1)),
    "a long row": ((3, 1000), "bfloat16", RowBlock(8, 2, 64, weights="staged")),
    "peeled": ((9, 1003), "bfloat16", RowBlock(8, 4, 32, 2, peeled=True, weights="staged")),
    "peeled, several rows a warp": ((70, 257), "float16", RowBlock(8, 4, 8, 8, 1, "direct", True, "staged", 1)),
    "peeled, edges of four threads": ((70, 67), "bfloat16", RowBlock(8, 2, 4, 16, 1, "direct", True, "staged", 1)),
    "peeled, a row a block": ((9, 2001), "float16", RowBlock(8, 4, 64, 1, 1, "direct", True, "staged")),
    "peeled, a row of two blocks": ((3, 2001), "float32", RowBlock(4, 4, 64, 1, 2, "direct", True, "staged")),
    "a row of two blocks": ((2, 2048), "float32", RowBlock(4, 2, 128, 1, 2, weights="staged")),
    "few bytes": ((70, 16), "float32", RowBlock(4, 1, 4, 16, weights="staged")),
}


@pytest.mark.parametrize("weight_dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", STAGED)
def test_weights_are_staged_beside_rows_that_are_read_directly(kind: str, weight_dtype: str) -> None:
    shape, dtype, geometry = STAGED[kind]
    weight, bias = data(1, shape[1:], weight_dtype, shift=1.0), data(2, shape[1:], "float32")
    check(EmulatorRunner(choose=_chooser(geometry)), Case(data(0, shape, dtype), weight, bias))


IN_PLACE = {
    "direct": ((5, 768), "float32"),
    "ahead": ((300, 32), "float32"),
    "direct peeled": ((9, 1003), "bfloat16"),
    "ahead peeled": ((3, 9001), "float64"),
    "run": ((1100, 9), "float32"),
    "cluster": ((3, 20_000), "float64"),
    "row_split": ((1, 150_000), "float32"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_y_may_be_written_over_x(kind: str) -> None:
    """Every kernel reads a number before it writes the result there."""
    shape, dtype = IN_PLACE[kind]
    plans: list[Plan] = []

    def choose(problem: Any, device: Device) -> Plan:
        plans.append(plan_with(problem, device, AHEAD) if kind == "ahead" else plan(problem, device))
        return plans[-1]

    runner = EmulatorRunner(SLOW_DEVICE, choose)
    case = Case(data(0, shape, dtype), data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype))
    expected = runner.forward(case).y
    x = case.x.copy()
    assert runner.forward(replace(case, x=x), out=x).y.tobytes() == expected.tobytes()
    assert any(kind in found for found in kinds_of(plans[-1]))


def test_every_kind_of_plan_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes above reach each way that a plan may take, and most of them with blocks that take several rows."""
    kinds: set[str] = set()
    monkeypatch.setattr("cunorm.emulator.plans.run_plan", lambda chosen, *_, **__: kinds.update(kinds_of(chosen)))

    def add(runner: EmulatorRunner, x: Any, dy: Any, weight_dtype: str) -> None:
        weight = np.ones(x.shape[1:], dtype_of(weight_dtype))
        case = Case(x, weight, weight)
        runner.backward(case.backward(runner.forward(case), dy))

    def add_ones(runner: EmulatorRunner, shape: tuple[int, int], dtype: str, weight_dtype: str) -> None:
        x = np.ones(shape, dtype_of(dtype))
        add(runner, x, x, weight_dtype)

    for shape, dtype in SIZES_AND_DTYPES + LONG_SIZES_AND_DTYPES:
        add_ones(EmulatorRunner(), shape, dtype, dtype)
    for dtype in ("bfloat16", "float32"):
        for x, dy in views(dtype).values():
            add(EmulatorRunner(), x, dy, dtype)
    add_ones(EmulatorRunner(), (1, 60000), "float32", "float64")
    add_ones(EmulatorRunner(choose=_chooser(AHEAD)), (600, 32), "float32", "float32")
    for shape, dtype in SLOW_SIZES:
        add_ones(EmulatorRunner(SLOW_DEVICE), shape, dtype, dtype)
    for shape, dtype in OLD_SIZES:
        add_ones(EmulatorRunner(OLD_DEVICE), shape, dtype, dtype)
    add_ones(EmulatorRunner(OLD_DEVICE, _direct_peeled), UNALIKE, "float32", "float32")
    every = ["direct", "ahead", "run", "direct peeled", "ahead peeled", "cluster", "cluster peeled"]
    again = ["ahead again", "run again", "ahead peeled again", "cluster again"]
    staged = ["ahead peeled with weights staged", "cluster with weights staged", "cluster peeled with weights staged"]
    for kernel in ("row_block_forward", "row_block_backward"):
        assert kinds >= {f"{kernel}: {kind}" for kind in every + again + staged}
    backward = ["direct again", "direct peeled again", "ahead with weights staged", "cluster peeled again"]
    assert kinds >= {"row_split", "row_weight_gradients", "row_block_forward: cluster with weights from memory"}
    assert "row_block_forward: direct with weights staged" in kinds
    assert kinds >= {f"row_block_backward: {kind}" for kind in backward}


@pytest.mark.parametrize("columns", [3000, 20000])
def test_the_order_of_threads_does_not_matter(columns: int) -> None:
    weight = data(1, (columns,))
    assert_any_order_gives_the_same(Case(data(0, (3, columns)), weight, weight), data(2, (3, columns)))
