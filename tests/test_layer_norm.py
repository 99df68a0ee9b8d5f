"""What layer norm computes, on every path: the CPU, the emulator, a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import (
    AXES,
    EPS,
    LONG_SIZES,
    OLD_DEVICE,
    RUNNERS,
    SIZES,
    EmulatorRunner,
    Expected,
    check,
    columns_shape,
    data,
    dtype_of,
    float64,
    kinds_of,
    relative_error,
    views,
)

from cunorm import reference
from cunorm.plan import Device, Plan, plan_with, row_geometry

# Each size with two dtypes or three: float16 lies as bfloat16 does.
SIZES_AND_DTYPES = [(shape, dtype) for shape in SIZES for dtype in ("bfloat16", "float32")]
SIZES_AND_DTYPES += [(shape, "float16") for shape in SIZES[::4]] + [(shape, "float64") for shape in SIZES[1::2]]
LONG_SIZES_AND_DTYPES = [(shape, ("bfloat16", "float32")[i % 2]) for i, shape in enumerate(LONG_SIZES)]
LONG_SIZES_AND_DTYPES += [((2, 17000), "float64")]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype"), SIZES_AND_DTYPES, ids=str)
def test_rows_of_every_size(runner: Any, shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(runner, data(0, shape, dtype), weight, bias)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype"), LONG_SIZES_AND_DTYPES, ids=str)
def test_rows_that_no_block_holds(runner: Any, shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(runner, data(0, shape, dtype), weight, bias)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [96, 20000])
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
def test_weight_and_bias_are_optional(runner: Any, columns: int, weight: bool, bias: bool) -> None:
    check(
        runner,
        data(0, (3, columns), "float16"),
        data(1, (columns,), "float16", shift=1.0) if weight else None,
        data(2, (columns,), "float16") if bias else None,
    )


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
    check(runner, data(0, shape, dtype), *vectors, axis)


@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_that_shared_memory_does_not_hold(runner: Any) -> None:
    weight, bias = (data(seed, (60000,), "float64", shift=1.0, outliers=False) for seed in (1, 2))
    check(runner, data(0, (1, 60000)), weight, bias)


@pytest.mark.parametrize("runner", RUNNERS)
def test_long_rows_of_every_second_column(runner: Any) -> None:
    """No block takes them whole, since their columns lie apart."""
    check(runner, data(0, (2, 36000))[:, ::2], data(1, (18000,), shift=1.0), None)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), [(*AXES[i], ("bfloat16", "float32")[i % 2]) for i in range(len(AXES))], ids=str
)
def test_any_axes(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    columns = columns_shape(shape, axis)
    check(runner, data(0, shape, dtype), data(1, columns, dtype, shift=1.0), data(2, columns, dtype), axis)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(views("float32")))
def test_views_are_not_copied(runner: Any, name: str, dtype: str) -> None:
    x, dy = views(dtype)[name]
    columns = x.shape[1:]
    weight = data(1, (columns[0] + 1,), dtype, shift=1.0)[1:]  # at an odd offset too
    bias = data(2, (columns[0] + 3,), dtype)[3:]
    check(runner, x, weight, bias, dy=dy)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "mask", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
@pytest.mark.parametrize(("shape", "axis"), [((5, 200), (-1,)), ((2, 20001), (-1,)), ((300, 20), (0,))], ids=str)
def test_only_the_gradients_asked_for(runner: Any, shape: Any, axis: Any, mask: tuple[bool, bool, bool]) -> None:
    x, dy, weight = data(0, shape), data(1, shape), data(2, columns_shape(shape, axis))
    _, _, mean, rstd = runner.forward(x, weight, None, axis, EPS)
    every = runner.backward(dy, x, weight, mean, rstd, axis, (True, True, True))
    some = runner.backward(dy, x, weight, mean, rstd, axis, mask)
    for wanted, one, other in zip(mask, some, every):
        assert (one is not None) == wanted
        assert one is None or relative_error(one, float64(other)) <= 1e-7


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((5, 200), (-1,)), ((2, 20000), (-1,)), ((300, 20), (0,))], ids=str)
def test_without_statistics_y_is_the_same(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    y, _, _, _ = runner.forward(x, weight, weight, axis, EPS)
    assert runner.without_stats(x, weight, weight, axis, EPS).tobytes() == y.tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [64, 1000, 4097, 40000])
def test_rows_far_from_zero(runner: Any, columns: int) -> None:
    """|mean| / std = 10,000 in float32: the mean's own rounding would show at 3e-4."""
    x = data(0, (4, columns), shift=1e4, outliers=False)
    expected = Expected.of(x, None, None, (-1,), EPS)
    y, _, _, rstd = runner.forward(x, None, None, (-1,), EPS)
    assert relative_error(y, expected.y) < 1e-6
    assert relative_error(rstd, expected.rstd) < 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [1024, 40000])
def test_a_row_that_begins_elsewhere(runner: Any, columns: int) -> None:
    """The first numbers of a row say nothing of the rest, whatever a pivot is taken from."""
    x = data(0, (2, columns), outliers=False)
    x[:, :8] += 1e5
    x[:, 0] -= 3e6
    expected = Expected.of(x, None, None, (-1,), EPS)
    y, _, _, _ = runner.forward(x, None, None, (-1,), EPS)
    assert relative_error(y, expected.y) < 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps(runner: Any, eps: float) -> None:
    check(runner, data(0, (3, 100)), None, None, eps=eps)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("scale", [1e-18, 1e17])
def test_gradients_of_very_small_and_very_large_numbers(runner: Any, scale: float) -> None:
    """rstd times itself and a gradient would leave the range of float32 where numbers are small; rstd does not."""
    x, dy = (data(seed, (3, 256), outliers=False) for seed in (0, 1))
    x = (x * scale).astype(np.float32)
    _, _, mean, rstd = runner.forward(x, None, None, (-1,), 0.0)
    dx, _, _ = runner.backward((dy * 1e4).astype(np.float32), x, None, mean, rstd, (-1,), (True, False, False))
    expected, _, _ = reference.row_norm_backward(
        float64((dy * 1e4).astype(np.float32)), float64(x), None, float64(mean), float64(rstd), axis=(1,)
    )
    assert relative_error(dx, expected) <= 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [5, 20000])
def test_constant_rows_give_the_bias(runner: Any, columns: int) -> None:
    x = np.full((2, columns), 3.7, np.float32)
    bias = data(1, (columns,))
    y, _, _, rstd = runner.forward(x, None, bias, (-1,), EPS)
    np.testing.assert_allclose(y, np.broadcast_to(bias, y.shape), rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(rstd, EPS**-0.5, rtol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [100, 20000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(runner: Any, columns: int, bad: float) -> None:
    x = data(0, (3, columns))
    x[1, 5] = bad
    y, _, mean, _ = runner.forward(x, None, None, (-1,), EPS)
    assert np.isnan(y[1]).any() and not np.isfinite(mean[1])
    assert np.isfinite(y[[0, 2]]).all() and np.isfinite(mean[[0, 2]]).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 5), (1,)), ((0, 20000), (1,)), ((0, 5, 3), (1,)), ((3, 0), (0,))], ids=str
)
def test_no_rows(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    y, _, mean, rstd = runner.forward(x, weight, weight, axis, EPS)
    assert y.shape == shape and mean.size == rstd.size == 0
    dx, dweight, dbias = runner.backward(x, x, weight, mean, rstd, axis, (True, True, True))
    assert dx.shape == shape
    assert not dweight.any() and not dbias.any() and dweight.shape == weight.shape


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 0), (1,)), ((3, 0, 2), (1,)), ((0, 2, 0), (0, 1))], ids=str)
def test_no_columns(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    y, _, mean, rstd = runner.forward(x, weight, weight, axis, EPS)
    assert y.shape == shape
    assert np.isnan(mean).all() and np.isnan(rstd).all()
    dx, dweight, _ = runner.backward(x, x, weight, mean, rstd, axis, (True, True, True))
    assert dx.shape == shape and dweight.shape == weight.shape and not dweight.any()


OLD_SIZES = [((70, 1003), "bfloat16"), ((2, 4097), "float32"), ((9, 1024), "float16"), ((2, 30_001), "bfloat16")]


@pytest.mark.parametrize(("shape", "dtype"), OLD_SIZES, ids=str)
def test_rows_on_an_older_gpu(shape: tuple[int, int], dtype: str) -> None:
    """Without asynchronous copies or clusters, odd rows are read straight to registers."""
    runner = EmulatorRunner()
    runner.device = OLD_DEVICE
    check(runner, data(0, shape, dtype), data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype))


UNALIKE = (70, 1003)


def _direct_peeled(problem: Any, device: Device) -> Plan:
    """What tuning may choose where rows do not begin alike in all tensors."""
    geometries = row_geometry.candidates(problem, device)
    return plan_with(problem, device, next(item for item in geometries if item.peeled and item.stage == "direct"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_begin_in_different_ways(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatorRunner, "choose", staticmethod(_direct_peeled))
    x, dy = (data(seed, (71 * 1003,), dtype)[seed : seed + 70 * 1003].reshape(UNALIKE) for seed in (1, 3))
    check(EmulatorRunner(), x, data(1, (1003,), dtype, shift=1.0), data(2, (1003,), dtype), dy=dy)


def test_every_kind_of_plan_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes above reach each way that a plan may take, and most of them with blocks that take several rows."""
    kinds: set[str] = set()
    monkeypatch.setattr("cunorm.emulator.plans.run_plan", lambda chosen, *_, **__: kinds.update(kinds_of(chosen)))
    runner, mask = EmulatorRunner(), (True, True, True)

    def add(x: Any, dy: Any, weight_dtype: str) -> None:
        weight = np.ones(x.shape[1:], dtype_of(weight_dtype))
        runner.forward(x, weight, weight, (1,), EPS)
        statistics = np.ones(len(x), np.float64 if x.dtype == np.float64 else np.float32)
        runner.backward(dy, x, weight, statistics, statistics, (1,), mask)

    for shape, dtype in SIZES_AND_DTYPES + LONG_SIZES_AND_DTYPES:
        x = np.ones(shape, dtype_of(dtype))
        add(x, x, dtype)
    for dtype in ("bfloat16", "float32"):
        for x, dy in views(dtype).values():
            add(x, dy, dtype)
    add(np.ones((1, 60000), np.float32), np.ones((1, 60000), np.float32), "float64")
    runner.device = OLD_DEVICE
    for shape, dtype in OLD_SIZES:
        x = np.ones(shape, dtype_of(dtype))
        add(x, x, dtype)
    monkeypatch.setattr(EmulatorRunner, "choose", staticmethod(_direct_peeled))
    x = np.ones(UNALIKE, np.float32)
    add(x, x, "float32")
    every = ["direct", "ahead", "run", "direct peeled", "ahead peeled", "cluster", "cluster peeled"]
    again = ["ahead again", "run again", "ahead peeled again", "cluster again"]
    staged = ["ahead peeled with weights staged", "cluster with weights staged", "cluster peeled with weights staged"]
    for kernel in ("row_block_forward", "row_block_backward"):
        assert kinds >= {f"{kernel}: {kind}" for kind in every + again + staged}
    backward = ["direct again", "direct peeled again", "ahead with weights staged", "cluster peeled again"]
    assert kinds >= {"row_split", "row_block_forward: cluster with weights from memory"}
    assert kinds >= {f"row_block_backward: {kind}" for kind in backward}


@pytest.mark.parametrize("columns", [3000, 20000])
def test_the_order_of_threads_does_not_matter(columns: int) -> None:
    """A missing barrier would show as results that differ between the emulator's orders of running threads."""
    x, weight, dy = data(0, (3, columns)), data(1, (columns,)), data(2, (3, columns))
    results = []
    for seed in range(3):
        runner = EmulatorRunner()
        runner.seed = seed
        y, _, mean, rstd = runner.forward(x, weight, weight, (-1,), EPS)
        results.append((y, mean, rstd, *runner.backward(dy, x, weight, mean, rstd, (-1,), (True, True, True))))
    for other in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results[0], other))
