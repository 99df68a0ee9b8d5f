"""Norms of a sum, and under an activation, on every path: the CPU, the emulator, a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    ACTIVATED_NORMS,
    ALL_GRADIENTS,
    AXES,
    LAYER_NORM,
    RMS_NORM,
    RUNNERS,
    Case,
    NumpyRunner,
    assert_any_order_gives_the_same,
    assert_relu_stops_gradients,
    check,
    columns_shape,
    data,
    float64,
    relative_error,
)

import cunorm
from cunorm.problem import ACTIVATIONS, Norm
from cunorm.reference import activations

DTYPES = ["float16", "bfloat16", "float32", "float64"]
PLAIN = [LAYER_NORM, RMS_NORM]
# Part of a warp a row, a block a row, odd and even; several blocks a row; columns that lie apart.
PROBLEMS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((70, 3), (-1,)),
    ((17, 32), (-1,)),
    ((3, 257), (-1,)),
    ((5, 4096), (-1,)),
    ((2, 20000), (-1,)),
    ((1, 50001), (-1,)),
    ((300, 70), (0,)),
    ((3, 4, 5, 16), (1, 3)),
]
# Each problem under both norms, each time with another dtype.
EACH = [(*problem, DTYPES[(i + k) % 4], PLAIN[k]) for i, problem in enumerate(PROBLEMS) for k in (0, 1)]


def tensors(shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    """x, weight, bias, residual, dresidual_out."""
    columns = columns_shape(shape, axis)
    weight, bias = data(1, columns, dtype, shift=1.0, outliers=False), data(2, columns, dtype, outliers=False)
    return data(0, shape, dtype), weight, bias, data(3, shape, dtype), data(4, shape, dtype)


# ---- The residual.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis", "dtype", "norm"), EACH, ids=str)
def test_residual(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str, norm: Norm) -> None:
    x, weight, bias, residual, dresidual_out = tensors(shape, axis, dtype)
    check(runner, Case(x, weight, bias, axis, norm, residual), dresidual_out=dresidual_out)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("norm", [LAYER_NORM, Norm(False, 1.0, "silu")], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((3, 257), (-1,)), ((2, 20000), (-1,)), ((300, 70), (0,))], ids=str)
def test_without_statistics_y_is_the_same(
    runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], norm: Norm
) -> None:
    x, weight, bias, residual, _ = tensors(shape, axis, "bfloat16")
    case = Case(x, weight, bias, axis, norm, residual)
    assert runner.forward(case, stats=False).y.tobytes() == runner.forward(case).y.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [*PLAIN, Norm(False, 1.0, "silu")], ids=str)
@pytest.mark.parametrize(("shape", "axis"), PROBLEMS, ids=str)
def test_it_is_the_norm_of_the_sum(shape: tuple[int, ...], axis: tuple[int, ...], norm: Norm, dtype: str) -> None:
    """Bit for bit on the CPU. A GPU may sum in another order with a residual than without."""
    x, weight, bias, residual, _ = tensors(shape, axis, dtype)
    runner = NumpyRunner()
    ours = runner.forward(Case(x, weight, bias, axis, norm, residual))
    composed = runner.forward(Case(x + residual, weight, bias, axis, norm))
    assert ours.residual_out is not None and ours.residual_out.tobytes() == (x + residual).tobytes()
    for one, other in ((ours.y, composed.y), (ours.mean, composed.mean), (ours.rstd, composed.rstd)):
        assert one is other is None or one.tobytes() == other.tobytes()


def _layouts(dtype: str) -> dict[str, tuple[Any, Any, Any]]:
    """x, residual and dresidual_out of one shape that lie in memory each in its own way."""
    wide, long = data(3, (8, 1030), dtype), data(4, (8 * 1030 + 9,), dtype)
    plain = data(5, (8, 512), dtype)
    return {
        "rows apart": (wide[:, :512], plain, wide[:, 515:1027]),
        "another stride": (plain, wide[:, 4:516], long[4 : 4 + 8 * 512].reshape(8, 512)),
        "odd offset": (plain, long[1 : 1 + 8 * 512].reshape(8, 512), wide[:, 3:515]),
        "transposed": (plain, data(6, (512, 8), dtype).T, data(7, (512, 8), dtype).T),
        "backwards": (plain, wide[::-1, 511::-1], wide[:, :512]),
        "broadcast rows": (plain, np.broadcast_to(wide[0, :512], (8, 512)), np.broadcast_to(wide[1, :512], (8, 512))),
        "x itself": (plain, plain, plain),
    }


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("dtype", "norm"), [("bfloat16", RMS_NORM), ("float32", LAYER_NORM)], ids=str)
@pytest.mark.parametrize("name", list(_layouts("float32")))
def test_residuals_of_any_strides(runner: Any, name: str, dtype: str, norm: Norm) -> None:
    x, residual, dresidual_out = _layouts(dtype)[name]
    weight = data(1, x.shape[1:], dtype, shift=1.0)
    check(runner, Case(x, weight, norm=norm, residual=residual), dresidual_out=dresidual_out)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), AXES[1::2], ids=str)
def test_residual_over_any_axes(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    x, weight, bias, residual, dresidual_out = tensors(shape, axis, "float32")
    check(runner, Case(x, weight, bias, axis, LAYER_NORM, residual), dresidual_out=dresidual_out)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("columns", [64, 12000])
def test_a_sum_that_cancels(runner: Any, columns: int) -> None:
    """What is normalized is the rounded sum: of numbers that nearly cancel, the rest."""
    x = data(0, (3, columns), shift=1e4, outliers=False)
    residual = -x + data(1, (3, columns), outliers=False)
    check(runner, Case(x, residual=residual))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 5), (1,)), ((3, 0), (1,)), ((3, 0), (0,))], ids=str)
@pytest.mark.parametrize("norm", [LAYER_NORM, Norm(False, 0.0, "gelu")], ids=str)
def test_empty(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], norm: Norm) -> None:
    x, weight, bias, residual, dresidual_out = tensors(shape, axis, "float32")
    case = Case(x, weight, bias, axis, norm, residual)
    results = runner.forward(case)
    assert results.y.shape == results.residual_out.shape == shape
    gradients = replace(case.backward(results, x, dresidual_out=dresidual_out), bias=bias)  # whatever the activation
    dx, dweight, dbias = runner.backward(gradients)
    assert dx.shape == shape and not dweight.any() and not dbias.any()


# ---- The gradient of the sum.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("shape", "axis"), PROBLEMS, ids=str)
def test_dresidual_out_is_added_to_dx(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    norm = PLAIN[len(shape) % 2]
    x, weight, _, dy, dresidual_out = tensors(shape, axis, "float32")
    case = Case(x, weight, axis=axis, norm=norm)
    results = runner.forward(case)
    dx, dweight, dbias = runner.backward(case.backward(results, dy))
    with_sum = runner.backward(case.backward(results, dy, dresidual_out=dresidual_out))
    assert relative_error(with_sum[0], float64(dx) + float64(dresidual_out), float64(dx)) <= 5e-7
    assert relative_error(with_sum[1], float64(dweight)) <= 1e-7
    assert relative_error(with_sum[2], float64(dbias)) <= 1e-7
    none, dweight, _ = runner.backward(case.backward(results, dy, (False, True, False), dresidual_out))
    assert none is None and relative_error(dweight, float64(with_sum[1])) <= 1e-7


# ---- The activation.


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("dtype", "norm"), [(DTYPES[(i + k) % 4], norm) for i, norm in enumerate(ACTIVATED_NORMS) for k in (0, 2)], ids=str
)
def test_activation(runner: Any, dtype: str, norm: Norm) -> None:
    x, weight, bias, *_ = tensors((9, 100), (-1,), dtype)
    check(runner, Case(x, weight, bias, norm=norm))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("columns", "dtype", "norm"),
    [(4096, "bfloat16", norm) for norm in ACTIVATED_NORMS]
    + [(20001, "float32", norm) for norm in ACTIVATED_NORMS[::3]],
    ids=str,
)
def test_activation_of_long_rows(runner: Any, columns: int, dtype: str, norm: Norm) -> None:
    x, weight, bias, *_ = tensors((3, columns), (-1,), dtype)
    check(runner, Case(x, weight, bias, norm=norm))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (True, False), (False, True)])
def test_activation_without_weight_or_bias(runner: Any, weight: bool, bias: bool, activation: str) -> None:
    x, given_weight, given_bias, *_ = tensors((3, 96), (-1,), "bfloat16")
    norm = Norm(True, 0.0, activation)
    check(runner, Case(x, given_weight if weight else None, given_bias if bias else None, norm=norm))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_with_weight_and_bias_of_other_dtypes(runner: Any, activation: str) -> None:
    x, weight, bias = data(0, (5, 96), "bfloat16"), data(1, (96,)), data(2, (96,), "float16", outliers=False)
    check(runner, Case(x, weight, bias, norm=Norm(False, 1.0, activation)))


# Each norm over two of these.
TOGETHER: list[Any] = [
    ((300, 70), (0,)),
    ((3, 4, 5, 16), (1, 3)),
    ((2, 9000), (1,)),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "norm"),
    [(*TOGETHER[(i + k) % 3], norm) for i, norm in enumerate(ACTIVATED_NORMS) for k in (0, 1)],
    ids=str,
)
def test_residual_and_activation_together(
    runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], norm: Norm
) -> None:
    x, weight, bias, residual, dresidual_out = tensors(shape, axis, "bfloat16")
    check(runner, Case(x, weight, bias, axis, norm, residual), dresidual_out=dresidual_out)


MASKS = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("mask", "shape", "axis"),
    [(mask, *[((5, 200), (-1,)), ((2, 9001), (-1,)), ((300, 20), (0,))][i % 3]) for i, mask in enumerate(MASKS)],
    ids=str,
)
def test_only_the_gradients_asked_for(
    runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], mask: tuple[bool, ...]
) -> None:
    x, weight, bias, dy, dresidual_out = tensors(shape, axis, "float32")
    norm = ACTIVATED_NORMS[(MASKS.index(mask) + len(axis)) % len(ACTIVATED_NORMS)]
    case = Case(x, weight, bias, axis, norm)
    results = runner.forward(case)
    every, some = (
        runner.backward(case.backward(results, dy, wanted, dresidual_out)) for wanted in (ALL_GRADIENTS, mask)
    )
    for wanted, one, other in zip(mask, some, every):
        assert (one is not None) == wanted
        assert one is None or relative_error(one, float64(other)) <= 1e-7


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_far_from_zero_an_activation_is_a_line(runner: Any, dtype: str, activation: str) -> None:
    """0 on one side, or nearly, the argument on the other, and nothing overflows on the way."""
    x = np.tile(np.array([-1.0, 1.0], dtype=np.float64), (3, 32)).astype(data(0, (1,), dtype).dtype)
    weight = np.full(64, 1e4, x.dtype)
    norm = Norm(False, 0.0, activation)
    case = Case(x, weight, norm=norm, eps=0.0)
    results = runner.forward(case)
    near: Any = {"rtol": 1e-5, "atol": 1e-30}
    # Of sixteen bits two silus share a reciprocal, so that none is less than this (kernels/activation.cuh).
    least = 1e-17 if activation == "silu" and x.dtype.itemsize == 2 else 1e-30
    expected = np.tile([0.0, float(weight[0])], (3, 32))
    np.testing.assert_allclose(results.y.astype(np.float64), expected, rtol=1e-5, atol=least)
    _, dweight, dbias = runner.backward(case.backward(results, x))
    np.testing.assert_allclose(dweight.astype(np.float64), np.tile([0.0, 3.0], 32), **near)
    np.testing.assert_allclose(dbias.astype(np.float64), np.tile([0.0, 3.0], 32), **near)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_number_by_number(runner: Any, activation: str) -> None:
    """Of a single row, dbias is the derivative itself. One less a sigmoid loses digits where that is nearly one."""
    x = np.linspace(-1, 1, 1024, dtype=np.float32)[None]
    weight, bias, dy = np.full(1024, 12, np.float32), np.zeros(1024, np.float32), np.ones_like(x)
    case = Case(x, weight, bias, norm=Norm(False, 0.0, activation))
    _, _, dbias = runner.backward(case.backward(runner.forward(case), dy, (False, False, True)))
    z = case.expected().z[0]
    assert z.max() > 20
    np.testing.assert_allclose(dbias, activations.FUNCTIONS[activation].derivative(z), rtol=0, atol=3e-7)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), [((17, 32), (-1,), "float16"), ((300, 70), (0,), "float64")], ids=str
)
def test_relu_stops_gradients(runner: Any, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    x, weight, bias, _, _ = tensors(shape, axis, dtype)
    assert_relu_stops_gradients(runner, Case(x, weight, bias, axis, Norm(True, 0.0, "relu")))


@pytest.mark.parametrize(("columns", "centered"), [(3000, True), (20000, False)])
def test_the_order_of_threads_does_not_matter(columns: int, centered: bool) -> None:
    x, weight, bias, residual, dresidual_out = tensors((2, columns), (-1,), "float32")
    case = Case(x, weight, bias, norm=Norm(centered, 0.0, "gelu"), residual=residual)
    assert_any_order_gives_the_same(case, x, dresidual_out)


# ---- The public functions.


def test_what_layer_norm_returns() -> None:
    """y[, residual_out][, mean, rstd]; y alone is not in a tuple."""
    x = data(0, (4, 10))
    assert cunorm.layer_norm(x, activation="relu").shape == (4, 10)
    assert [a.shape for a in cunorm.layer_norm(x, return_stats=True)] == [(4, 10), (4,), (4,)]
    assert [a.shape for a in cunorm.layer_norm(x, residual=x)] == [(4, 10), (4, 10)]
    results = cunorm.layer_norm(x, residual=x, return_stats=True)
    assert [a.shape for a in results] == [(4, 10), (4, 10), (4,), (4,)]


def test_the_sum_is_contiguous_whatever_the_inputs() -> None:
    x = data(0, (10, 4)).T
    out = np.empty((4, 10), np.float32)
    y, residual_out = cunorm.layer_norm(x, residual=x[::-1], out=out)
    assert y is out and residual_out.flags.c_contiguous
    np.testing.assert_array_equal(residual_out, x + x[::-1])


def test_y_in_the_place_of_x() -> None:
    x, residual = data(0, (4, 300000)), data(1, (4, 300000))
    y, residual_out = cunorm.rms_norm(x, residual=residual, activation="silu")
    given = x.copy()
    again = cunorm.rms_norm(given, residual=residual, activation="silu", out=given)
    assert again[0] is given
    np.testing.assert_array_equal(given, y)
    np.testing.assert_array_equal(again[1], residual_out)


def test_the_bias_says_the_dtype_of_its_gradient() -> None:
    x, weight, bias = data(0, (4, 10)), data(1, (10,), "bfloat16"), data(2, (10,), "float16")
    _, mean, rstd = cunorm.layer_norm(x, weight, bias, return_stats=True)
    for activation in (None, "relu"):
        gradients = cunorm.layer_norm_backward(x, x, weight, mean, rstd, bias=bias, activation=activation)
        assert [gradient.dtype.name for gradient in gradients] == ["float32", "bfloat16", "float16"]


def test_without_an_activation_the_bias_changes_no_gradient() -> None:
    x, weight, bias = data(0, (4, 10)), data(1, (10,)), data(2, (10,))
    _, rstd = cunorm.rms_norm(x, weight, bias, return_stats=True)
    mask = (True, True, True)
    with_bias = cunorm.rms_norm_backward(x, x, weight, rstd, bias=bias, output_mask=mask)
    for one, other in zip(with_bias, cunorm.rms_norm_backward(x, x, weight, rstd, output_mask=mask)):
        np.testing.assert_array_equal(one, other)


# ---- The activations themselves, in NumPy.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_are_central_differences(name: str, dtype: str) -> None:
    function = activations.FUNCTIONS[name]
    z = np.linspace(-9, 9, 10001) + 1e-4
    difference = (function.value(z + 1e-5) - function.value(z - 1e-5)) / 2e-5
    given = z.astype(dtype)
    result = function.derivative(given)
    assert result.dtype == function.value(given).dtype == given.dtype
    np.testing.assert_allclose(result, difference, rtol=0, atol=1e-6 if dtype == "float32" else 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_large_numbers(name: str, dtype: str) -> None:
    function = activations.FUNCTIONS[name]
    z = np.array([50.0, 1e4, 1e30], dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(function.value(z), z)
        np.testing.assert_array_equal(function.derivative(z), np.ones(3))
        np.testing.assert_allclose(function.value(-z), np.zeros(3), atol=1e-19)
        np.testing.assert_allclose(function.derivative(-z), np.zeros(3), atol=1e-19)
        assert np.isnan(function.value(np.array([np.nan], dtype))).all()
