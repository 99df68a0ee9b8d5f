"""What RMS norm computes, on every path: the CPU, the emulator, a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import (
    ALL_GRADIENTS,
    AXES,
    EPS,
    LONG_SIZES,
    RMS_NORM,
    RUNNERS,
    SIZES,
    Case,
    assert_any_order_gives_the_same,
    check,
    columns_shape,
    data,
    float64,
    relative_error,
    views,
)

import cunorm
from cunorm import reference
from cunorm.problem import Norm

DTYPES = ["float16", "bfloat16", "float32", "float64"]
# Every second size, each with another dtype; that rows of every size and dtype are read right, layer norm's tests show.
SIZES_AND_DTYPES = [(shape, DTYPES[i % 4]) for i, shape in enumerate(SIZES[::2])]
SIZES_AND_DTYPES += [(shape, DTYPES[i % 3]) for i, shape in enumerate(LONG_SIZES)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "dtype"), SIZES_AND_DTYPES, ids=str)
def test_rows_of_every_size(runner: Any, shape: tuple[int, int], dtype: str) -> None:
    weight, bias = data(1, shape[1:], dtype, shift=1.0), data(2, shape[1:], dtype)
    check(runner, Case(data(0, shape, dtype), weight, bias, norm=RMS_NORM))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [96, 20000])
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
def test_weight_and_bias_are_each_optional(runner: Any, columns: int, weight: bool, bias: bool) -> None:
    x = data(0, (3, columns), "bfloat16")
    given_weight, given_bias = (data(seed, (columns,), "bfloat16", shift=1.0) for seed in (1, 2))
    check(runner, Case(x, given_weight if weight else None, given_bias if bias else None, norm=RMS_NORM))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [96, 9000])
@pytest.mark.parametrize(
    ("dtype", "weight"), [("bfloat16", "float32"), ("float32", "float16"), ("float64", "bfloat16")]
)
def test_weight_of_another_dtype(runner: Any, columns: int, dtype: str, weight: str) -> None:
    vectors = data(1, (columns,), weight, shift=1.0, outliers=False), data(2, (columns,), "float32", outliers=False)
    check(runner, Case(data(0, (3, columns), dtype), *vectors, norm=RMS_NORM))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("dtype", "offset"), [("bfloat16", 1.0), ("float32", -0.5)])
@pytest.mark.parametrize(("shape", "axis"), [((5, 96), (-1,)), ((2, 20000), (-1,)), ((300, 20), (0,))], ids=str)
def test_weight_offset(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str, offset: float) -> None:
    columns = columns_shape(shape, axis)
    weight, bias = data(1, columns, dtype, shift=0.0, outliers=False), data(2, columns, dtype)
    check(runner, Case(data(0, shape, dtype), weight, bias, axis, Norm(False, offset)))


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_offset_of_one_and_a_weight_of_zero_are_no_weight(runner: Any) -> None:
    x, zeros = data(0, (4, 100), "bfloat16"), np.zeros(100, np.float32)
    y = runner.forward(Case(x, zeros, norm=Norm(False, 1.0))).y
    assert y.tobytes() == runner.forward(Case(x, norm=RMS_NORM)).y.tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), AXES[::2], ids=str)
def test_any_axes(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    columns = columns_shape(shape, axis)
    check(runner, Case(data(0, shape), data(1, columns, shift=1.0), data(2, columns), axis, RMS_NORM))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", list(views("float32")))
def test_views_are_not_copied(runner: Any, name: str) -> None:
    x, dy = views("bfloat16")[name]
    weight = data(1, (x.shape[1] + 1,), "bfloat16", shift=1.0)[1:]  # at an odd offset too
    check(runner, Case(x, weight, norm=RMS_NORM), dy)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "mask"),
    [
        ((5, 200), (-1,), (True, False, False)),
        ((2, 20001), (-1,), (True, False, False)),
        ((300, 20), (0,), (False, True, False)),
        ((5, 200), (-1,), (False, False, True)),
        ((2, 20001), (-1,), (False, True, True)),
        ((300, 20), (0,), (True, True, False)),
    ],
    ids=str,
)
def test_only_the_gradients_asked_for(runner: Any, shape: Any, axis: Any, mask: tuple[bool, bool, bool]) -> None:
    case = Case(data(0, shape), data(2, columns_shape(shape, axis)), axis=axis, norm=RMS_NORM)
    results, dy = runner.forward(case), data(1, shape)
    every, some = (runner.backward(case.backward(results, dy, wanted)) for wanted in (ALL_GRADIENTS, mask))
    for wanted, one, other in zip(mask, some, every):
        assert (one is not None) == wanted
        assert one is None or relative_error(one, float64(other)) <= 1e-7


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((5, 200), (-1,)), ((2, 20000), (-1,)), ((300, 20), (0,))], ids=str)
def test_without_statistics_y_is_the_same(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    weight = data(1, columns_shape(shape, axis))
    case = Case(data(0, shape), weight, weight, axis, RMS_NORM)
    assert runner.forward(case, stats=False).y.tobytes() == runner.forward(case).y.tobytes()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps(runner: Any, eps: float) -> None:
    check(runner, Case(data(0, (3, 100)), norm=RMS_NORM, eps=eps))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("scale", [1e-16, 1e17])
def test_very_small_and_very_large_numbers(runner: Any, scale: float) -> None:
    """rstd times itself and a gradient would leave the range of float32 where numbers are small; rstd does not.

    Nor do the squares of such numbers, but at 1e-18 those of the smallest would: GPUs flush subnormals to zero.
    """
    x, dy = (data(seed, (3, 256), outliers=False) for seed in (0, 1))
    x, dy = (x * scale).astype(np.float32), (dy * 1e4).astype(np.float32)
    case = Case(x, norm=RMS_NORM, eps=0.0)
    results = runner.forward(case)
    assert relative_error(results.y, case.expected().y) <= 1e-6
    dx, _, _ = runner.backward(case.backward(results, dy, (True, False, False)))
    exact = float64(dy), float64(x), None, None, float64(results.rstd)
    expected, _, _ = reference.row_norm_backward(*exact, axis=(1,), norm=RMS_NORM)
    assert relative_error(dx, expected) <= 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [5, 20000])
def test_rows_of_zeros_give_the_bias(runner: Any, columns: int) -> None:
    bias = data(1, (columns,))
    y, _, _, rstd = runner.forward(Case(np.zeros((2, columns), np.float32), None, bias, norm=RMS_NORM))
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    np.testing.assert_allclose(rstd, EPS**-0.5, rtol=1e-6)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [100, 20000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(runner: Any, columns: int, bad: float) -> None:
    x = data(0, (3, columns))
    x[1, 5] = bad
    y, _, _, rstd = runner.forward(Case(x, norm=RMS_NORM))
    assert np.isnan(y[1]).any() and not rstd[1] > 0
    assert np.isfinite(y[[0, 2]]).all() and np.isfinite(rstd[[0, 2]]).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 5), (1,)), ((0, 20000), (1,)), ((3, 0), (0,))], ids=str)
def test_no_rows(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    case = Case(x, weight, weight, axis, RMS_NORM)
    results = runner.forward(case)
    assert results.y.shape == shape and results.mean is None and results.rstd.size == 0
    dx, dweight, dbias = runner.backward(case.backward(results, x))
    assert dx.shape == shape
    assert not dweight.any() and not dbias.any() and dweight.shape == weight.shape


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 0), (1,)), ((0, 2, 0), (0, 1))], ids=str)
def test_no_columns(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight = data(0, shape), data(1, columns_shape(shape, axis))
    case = Case(x, weight, weight, axis, RMS_NORM)
    results = runner.forward(case)
    assert results.y.shape == shape and np.isnan(results.rstd).all()
    dx, dweight, _ = runner.backward(case.backward(results, x))
    assert dx.shape == shape and dweight.shape == weight.shape and not dweight.any()


@pytest.mark.parametrize("columns", [3000, 20000])
def test_the_order_of_threads_does_not_matter(columns: int) -> None:
    weight = data(1, (columns,))
    assert_any_order_gives_the_same(Case(data(0, (3, columns)), weight, weight, norm=RMS_NORM), data(2, (3, columns)))


# ---- The public function.


def test_what_is_returned() -> None:
    """y[, residual_out][, rstd]; y alone is not in a tuple."""
    x = data(0, (4, 10))
    y = cunorm.rms_norm(x)
    assert y.shape == (4, 10)
    _, rstd = cunorm.rms_norm(x, return_stats=True)
    assert rstd.shape == (4,) and rstd.dtype == np.float32
    _, residual_out = cunorm.rms_norm(x, residual=x)
    np.testing.assert_array_equal(residual_out, x + x)
    _, residual_out, rstd = cunorm.rms_norm(x, residual=x, return_stats=True)
    assert residual_out.shape == (4, 10) and rstd.shape == (4,)
    assert [gradient is None for gradient in cunorm.rms_norm_backward(x, x, None, rstd)] == [False, False, True]


def test_default_eps() -> None:
    x = np.zeros((1, 4))
    assert cunorm.rms_norm(x, return_stats=True)[1] == pytest.approx(1e3)


def test_a_weight_offset_may_be_an_int() -> None:
    x, weight = data(0, (4, 10)), data(1, (10,))
    expected = cunorm.rms_norm(x, weight + np.float32(1))
    np.testing.assert_array_equal(cunorm.rms_norm(x, weight, weight_offset=1), expected)
    np.testing.assert_array_equal(cunorm.rms_norm(x, weight, weight_offset=np.float32(1)), expected)
