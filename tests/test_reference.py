"""`cunorm.reference` against PyTorch in float64, finite differences, and the promises of its docstrings."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cunorm import reference
from cunorm.problem import ACTIVATIONS, Norm
from cunorm.reference import activations, sums, tiles

torch = pytest.importorskip("torch")

Array = NDArray[Any]
Axis = tuple[int, ...]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
EPS = 1e-5

# Largest ||got - expected|| / ||expected||. float64: a few roundings of elements. float32: the same, of which a sum
# over many terms averages most out. The halves: the one rounding of a float32 result, half a unit in the last place.
TOLERANCE = {DTYPES[0]: 2.0**-11, BFLOAT16: 2.0**-8, DTYPES[2]: 1.5e-7, DTYPES[3]: 1e-14}
# Gradients take a few more roundings, and the sums in them cancel.
GRADIENT_TOLERANCE = {dtype: 4 * t if t < 1e-6 else t for dtype, t in TOLERANCE.items()}

SHAPES_AND_AXES: list[tuple[tuple[int, ...], Axis]] = [
    ((4, 8), (1,)),
    ((4, 8), (0,)),
    ((4, 8), (0, 1)),
    ((4, 8), ()),
    ((7,), (0,)),
    ((5, 1), (1,)),
    ((1, 5), (1,)),
    ((3, 5, 7), (2,)),
    ((3, 5, 7), (1,)),
    ((3, 5, 7), (0,)),
    ((3, 5, 7), (1, 2)),
    ((3, 5, 7), (0, 2)),
    ((3, 5, 7), (0, 1)),
    ((2, 3, 4, 5), (1, 3)),
    ((2, 3, 4, 5), (0, 2)),
    ((2, 3, 4, 5), (1,)),
    ((2, 3, 1, 5, 2), (0, 2, 4)),
    ((1000, 257), (1,)),
    ((257, 1000), (0,)),
    ((3, 200, 31, 33), (1,)),
    ((70000, 3), (1,)),
    ((3, 70000), (0,)),
    ((2, 150000), (1,)),
    ((150000, 2), (0,)),
    ((2, 400, 3, 400), (1, 3)),
]
AFFINE = [(False, False), (True, False), (False, True), (True, True)]
LAYER_NORM, RMS_NORM = Norm(), Norm(centered=False)
NORMS = [Norm(centered, 0.0, activation) for centered in (True, False) for activation in (None, *ACTIVATIONS)]
NORMS += [Norm(False, 1.0), Norm(False, 1.0, "silu"), Norm(True, -0.5, "gelu")]


def error(got: Array, expected: Array) -> float:
    """Relative, by the 2-norm; absolute where nothing but the rounding of zeros is expected."""
    difference = np.linalg.norm((got.astype(np.float64) - expected.astype(np.float64)).ravel())
    norm = np.linalg.norm(expected.astype(np.float64).ravel())
    return float(difference / (norm if norm > 1e-9 else 1.0))


def normal(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def column_shape(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    return tuple(shape[a] for a in axis)


def problem(
    shape: tuple[int, ...], axis: Axis, affine: tuple[bool, bool] = (True, True), dtype: Any = np.float64
) -> tuple[Array, Array, Array | None, Array | None]:
    """dy, x, weight, bias."""
    weight = normal(column_shape(shape, axis), dtype, seed=2) if affine[0] else None
    bias = normal(column_shape(shape, axis), dtype, seed=3) if affine[1] else None
    return normal(shape, dtype, seed=1), normal(shape, dtype), weight, bias


TORCH_ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda z: z,
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
}


def torch_norm(
    dy: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    axis: Axis,
    eps: float = EPS,
    norm: Norm = LAYER_NORM,
    residual: Array | None = None,
    dresidual_out: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """y, dx, dweight, dbias of PyTorch in float64; the gradients as if an absent weight were ones."""
    kept = tuple(a for a in range(x.ndim) if a not in axis)
    inner = column_shape(x.shape, axis)
    w = np.ones(inner) if weight is None else norm.weight_offset + weight.astype(np.float64)
    b = np.zeros(inner) if bias is None else bias
    # One more axis, of length one, leaves the statistics alone, and lets PyTorch take `axis=()`.
    tx, tw, tb = (torch.tensor(a.astype(np.float64)).requires_grad_() for a in (x, w, b))
    total = tx if residual is None else tx + torch.tensor(residual.astype(np.float64))
    rows = total.permute(kept + axis)[..., None]
    if norm.centered:
        z = torch.nn.functional.layer_norm(rows, (*inner, 1), tw[..., None], tb[..., None], eps)
    else:
        z = torch.nn.functional.rms_norm(rows, (*inner, 1), tw[..., None], eps) + tb[..., None]
    y = TORCH_ACTIVATIONS[norm.activation](z)[..., 0].permute(tuple(np.argsort(kept + axis)))
    gradients = [torch.tensor(dy.astype(np.float64))]
    if dresidual_out is not None:
        gradients.append(torch.tensor(dresidual_out.astype(np.float64)))
    torch.autograd.backward((y, total)[: len(gradients)], gradients)
    return y.detach().numpy(), tx.grad.numpy(), tw.grad.numpy(), tb.grad.numpy()


@pytest.mark.parametrize("affine", AFFINE, ids=["plain", "weight", "bias", "weight-bias"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES, ids=str)
def test_agrees_with_torch(shape: tuple[int, ...], axis: Axis, affine: tuple[bool, bool]) -> None:
    dy, x, weight, bias = problem(shape, axis, affine)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    expected_y, *expected_gradients = torch_norm(dy, x, weight, bias, axis)

    np.testing.assert_allclose(mean, x.mean(axis), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var(axis) + EPS), rtol=1e-12)
    assert mean.shape == rstd.shape == tuple(n for a, n in enumerate(shape) if a not in axis)
    assert error(y, expected_y) < 1e-13
    for got, expected in zip(gradients, expected_gradients, strict=True):
        assert got is not None
        assert got.shape == expected.shape
        assert error(got, expected) < 1e-12


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES, ids=str)
def test_norms_agree_with_torch(shape: tuple[int, ...], axis: Axis, norm: Norm) -> None:
    """With a residual, and a gradient of the sum."""
    dy, x, weight, bias = problem(shape, axis)
    residual, dresidual_out = normal(shape, seed=4), normal(shape, seed=5)
    options: Any = {"axis": axis, "norm": norm}
    y, residual_out, mean, rstd = reference.row_norm(x, weight, bias, eps=EPS, residual=residual, **options)
    assert residual_out is not None
    np.testing.assert_array_equal(residual_out, x + residual)
    assert (mean is not None) == norm.centered
    if not norm.centered:
        np.testing.assert_allclose(rstd, 1 / np.sqrt((residual_out**2).mean(axis) + EPS), rtol=1e-13)
    options |= {"bias": bias, "dresidual_out": dresidual_out}
    gradients = reference.row_norm_backward(dy, residual_out, weight, mean, rstd, **options)
    expected_y, *expected_gradients = torch_norm(
        dy, x, weight, bias, axis, norm=norm, residual=residual, dresidual_out=dresidual_out
    )
    assert error(y, expected_y) < 1e-13
    for got, expected in zip(gradients, expected_gradients, strict=True):
        assert got is not None
        assert got.shape == expected.shape
        assert error(got, expected) < 1e-12


@pytest.mark.parametrize("affine", AFFINE, ids=["plain", "weight", "bias", "weight-bias"])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if not norm.weight_offset], ids=str)
def test_norms_agree_with_torch_without_weight_or_bias(norm: Norm, affine: tuple[bool, bool]) -> None:
    dy, x, weight, bias = problem((6, 50), (1,), affine)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=(1,), eps=EPS, norm=norm)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=(1,), norm=norm, bias=bias)
    for got, expected in zip((y, *gradients), torch_norm(dy, x, weight, bias, (1,), norm=norm), strict=True):
        assert got is not None
        assert error(got, expected) < 1e-12


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((3, 5), (1,)), ((3, 4, 2), (0, 2)), ((4, 3), (0,))], ids=str)
def test_gradients_are_central_differences(shape: tuple[int, ...], axis: Axis, norm: Norm) -> None:
    dy, x, weight, bias = problem(shape, axis)
    residual, dresidual_out = normal(shape, seed=4), normal(shape, seed=5)
    assert weight is not None and bias is not None
    forward: Any = {"axis": axis, "eps": EPS, "norm": norm, "residual": residual}
    _, residual_out, mean, rstd = reference.row_norm(x, weight, bias, **forward)
    assert residual_out is not None
    backward: Any = {"axis": axis, "norm": norm, "bias": bias, "dresidual_out": dresidual_out}
    dx, dweight, dbias = reference.row_norm_backward(dy, residual_out, weight, mean, rstd, **backward)

    def loss() -> float:
        y, total, _, _ = reference.row_norm(x, weight, bias, **forward)
        assert total is not None
        return float(np.vdot(dy, y) + np.vdot(dresidual_out, total))

    step = 1e-5
    for argument, gradient in zip([x, residual, weight, bias], [dx, dx, dweight, dbias], strict=True):
        assert gradient is not None
        expected = np.empty_like(argument)
        for i in np.ndindex(argument.shape):
            original = argument[i]
            argument[i] = original + step
            above = loss()
            argument[i] = original - step
            expected[i] = (above - loss()) / (2 * step)
            argument[i] = original
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM, Norm(True, 0.0, "gelu"), Norm(False, 1.0, "silu")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((64, 1000), (1,)), ((1000, 64), (0,)), ((8, 30, 9, 11), (1, 3)), ((300, 17), (1,)), ((2, 300000), (1,))],
    ids=str,
)
def test_dtypes(shape: tuple[int, ...], axis: Axis, dtype: np.dtype[Any], norm: Norm) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=dtype)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS, norm=norm)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis, norm=norm, bias=bias)
    expected_y, *expected_gradients = torch_norm(dy, x, weight, bias, axis, norm=norm)

    assert y.dtype == dtype
    assert rstd.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert mean is None or mean.dtype == rstd.dtype
    assert error(y, expected_y) < TOLERANCE[dtype]
    for got, expected in zip(gradients, expected_gradients, strict=True):
        assert got is not None
        assert got.dtype == dtype
        assert error(got, expected) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_halves_are_one_rounding_of_float32(dtype: np.dtype[Any], norm: Norm) -> None:
    dy, x, weight, bias = problem((50, 300), (1,), dtype=dtype)
    residual, dresidual_out = normal((50, 300), dtype, seed=4), normal((50, 300), dtype, seed=5)
    assert weight is not None and bias is not None
    wide_x, wide_weight, wide_bias, wide_residual = (a.astype(np.float32) for a in (x, weight, bias, residual))
    forward: Any = {"axis": (1,), "eps": EPS, "norm": norm}
    y, residual_out, mean, rstd = reference.row_norm(x, weight, bias, residual=residual, **forward)
    assert residual_out is not None and residual_out.dtype == dtype
    np.testing.assert_array_equal(residual_out, (wide_x + wide_residual).astype(dtype))
    wide_total = residual_out.astype(np.float32)
    wide_y, _, wide_mean, wide_rstd = reference.row_norm(wide_total, wide_weight, wide_bias, **forward)
    np.testing.assert_array_equal(y, wide_y.astype(dtype))
    np.testing.assert_array_equal(mean, wide_mean)
    np.testing.assert_array_equal(rstd, wide_rstd)

    backward: Any = {"axis": (1,), "norm": norm}
    gradients = reference.row_norm_backward(
        dy, residual_out, weight, mean, rstd, bias=bias, dresidual_out=dresidual_out, **backward
    )
    wide_dy, wide_added = (a.astype(np.float32) for a in (dy, dresidual_out))
    wide_gradients = reference.row_norm_backward(
        wide_dy, wide_total, wide_weight, mean, rstd, bias=wide_bias, dresidual_out=wide_added, **backward
    )
    for got, expected in zip(gradients, wide_gradients, strict=True):
        assert got is not None and expected is not None
        np.testing.assert_array_equal(got, expected.astype(dtype))


@pytest.mark.parametrize("shape", [(50, 300), (2, 300000)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_before(shape: tuple[int, ...], dtype: np.dtype[Any], norm: Norm) -> None:
    """Exactly as by hand."""
    _, x, weight, bias = problem(shape, (1,), dtype=dtype)
    residual = normal(shape, dtype, seed=4)
    options: Any = {"axis": (1,), "eps": EPS, "norm": norm}
    y, residual_out, mean, rstd = reference.row_norm(x, weight, bias, residual=residual, **options)
    by_hand = reference.row_norm(x + residual, weight, bias, **options)
    np.testing.assert_array_equal(residual_out, x + residual)
    for got, expected in zip((y, mean, rstd), (by_hand[0], *by_hand[2:]), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("columns", [2, 7, 300, 1000, 4096, 60000, 1000000])
@pytest.mark.parametrize("data", ["ordinary", "shifted", "far shifted", "outlier", "sorted", "jump"])
def test_float32_accuracy(columns: int, data: str) -> None:
    x = normal((max(2, min(64, 2**20 // columns)), columns))
    if data == "shifted":
        x += 1e4
    elif data == "far shifted":
        x += 1e6
    elif data == "outlier":
        x[:, 0] = 1e4
    elif data == "sorted":
        x = np.sort(x, axis=1) + 10
    elif data == "jump":
        x[:, columns // 2 :] += 1e4
    x = x.astype(np.float32)
    expected_y, _, expected_mean, expected_rstd = reference.row_norm(x.astype(np.float64), axis=(1,), eps=EPS)
    y, _, mean, rstd = reference.row_norm(x, axis=(1,), eps=EPS)
    tolerance = 3e-7 if data == "outlier" else TOLERANCE[x.dtype]
    assert error(y, expected_y) < tolerance
    assert error(rstd, expected_rstd) < tolerance
    assert np.all(np.abs(mean - expected_mean) <= 1.2e-7 * (np.abs(expected_mean) + 1 / expected_rstd))


@pytest.mark.parametrize("columns", [2, 7, 300, 1000, 4096, 60000, 1000000])
@pytest.mark.parametrize("data", ["ordinary", "shifted", "outlier"])
def test_float32_accuracy_of_rms_norm(columns: int, data: str) -> None:
    x = normal((max(2, min(64, 2**20 // columns)), columns))
    if data == "shifted":
        x += 1e4
    elif data == "outlier":
        x[:, 0] = 1e4
    x = x.astype(np.float32)
    expected_y, _, _, expected_rstd = reference.row_norm(x.astype(np.float64), axis=(1,), eps=EPS, norm=RMS_NORM)
    y, _, _, rstd = reference.row_norm(x, axis=(1,), eps=EPS, norm=RMS_NORM)
    tolerance = 3e-7 if data == "outlier" else TOLERANCE[x.dtype]
    assert error(y, expected_y) < tolerance
    assert error(rstd, expected_rstd) < tolerance


@pytest.mark.parametrize("columns", [1, 2, 8, 100])
def test_column_sums_of_many_rows(columns: int) -> None:
    rows = 2**21 // columns + 5
    x = normal((rows, columns), np.float32)
    dy = np.abs(normal((rows, columns), np.float32, seed=1))
    _, _, mean, rstd = reference.row_norm(x, axis=(1,), eps=EPS)
    _, dweight, dbias = reference.row_norm_backward(dy, x, None, mean, rstd, axis=(1,))
    xhat = (x.astype(np.float64) - mean[:, None]) * rstd[:, None]
    assert dweight is not None and dbias is not None
    assert error(dbias, dy.sum(0, dtype=np.float64)) < 1e-7
    # A sum that cancels is as accurate as its terms.
    assert np.all(np.abs(dweight - (dy * xhat).sum(0)) <= 2e-7 * np.abs(dy * xhat).sum(0))


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_dtypes(dtype: np.dtype[Any], weight_dtype: np.dtype[Any], bias_dtype: np.dtype[Any]) -> None:
    x, dy = normal((6, 40), dtype), normal((6, 40), dtype, seed=1)
    weight, bias = normal((40,), weight_dtype), normal((40,), bias_dtype, seed=1)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=(1,), eps=EPS)
    dx, dweight, dbias = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=(1,))
    expected_y, expected_dx, expected_dweight, expected_dbias = torch_norm(dy, x, weight, bias, (1,))
    assert dx is not None and dweight is not None and dbias is not None
    assert y.dtype == dx.dtype == dtype
    assert dweight.dtype == dbias.dtype == weight_dtype
    assert error(y, expected_y) < TOLERANCE[dtype]
    assert error(dx, expected_dx) < GRADIENT_TOLERANCE[dtype]
    summed = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    parameter_tolerance = max(GRADIENT_TOLERANCE[weight_dtype], GRADIENT_TOLERANCE[summed])
    assert error(dweight, expected_dweight) < parameter_tolerance
    assert error(dbias, expected_dbias) < parameter_tolerance


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 5), (1,)), ((3, 0, 5), (2,)), ((0, 4), (0,)), ((3, 0), (1,)), ((0, 0), (1,))], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty(shape: tuple[int, ...], axis: Axis, dtype: np.dtype[Any]) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
        dx, dweight, dbias = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    assert dx is not None and dweight is not None and dbias is not None
    assert y.shape == dx.shape == shape
    assert mean.shape == rstd.shape == tuple(n for a, n in enumerate(shape) if a not in axis)
    assert np.isnan(mean).all() and np.isnan(rstd).all()
    assert dweight.shape == dbias.shape == column_shape(shape, axis)
    assert not dweight.any() and not dbias.any()


def test_zero_dimensional() -> None:
    x = np.array(3.0)
    y, _, mean, rstd = reference.row_norm(x, axis=(), eps=1.0)
    dx, dweight, dbias = reference.row_norm_backward(np.array(2.0), x, None, mean, rstd, axis=())
    assert [float(a) for a in (y, mean, rstd, dx, dweight, dbias) if a is not None] == [0.0, 3.0, 1.0, 0.0, 0.0, 2.0]


def unaligned(a: Array) -> Array:
    copy = np.frombuffer(bytearray(a.nbytes + 1), np.uint8)[1:].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "transposed": lambda a: np.asfortranarray(a),
    "every other": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "negative strides": lambda a: np.flip(np.flip(a).copy()),
    "unaligned": unaligned,
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((6, 50), (1,)), ((50, 6), (0,)), ((4, 5, 6), (0, 2))], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout: str, shape: tuple[int, ...], axis: Axis, dtype: np.dtype[Any]) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=dtype)
    assert weight is not None and bias is not None
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    change = LAYOUTS[layout]
    dy2, x2, weight2, bias2, mean2, rstd2 = (change(a) for a in (dy, x, weight, bias, mean, rstd))
    np.testing.assert_array_equal(reference.row_norm(x2, weight2, bias2, axis=axis, eps=EPS)[0], y)
    for got, expected in zip(
        reference.row_norm_backward(dy2, x2, weight2, mean2, rstd2, axis=axis), gradients, strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_broadcast_inputs() -> None:
    x = np.broadcast_to(normal((1, 40), np.float32), (5, 40))
    dy = np.broadcast_to(np.float32(1), (5, 40))
    weight = np.broadcast_to(np.float32(2), (40,))
    y, _, mean, rstd = reference.row_norm(x, weight, axis=(1,), eps=EPS)
    dx, dweight, dbias = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=(1,))
    expected_y, expected_dx, expected_dweight, expected_dbias = torch_norm(dy, x, weight, None, (1,))
    assert dx is not None and dweight is not None and dbias is not None
    assert error(y, expected_y) < TOLERANCE[x.dtype]
    np.testing.assert_allclose(dx, expected_dx, atol=1e-6)
    assert error(dweight, expected_dweight) < GRADIENT_TOLERANCE[x.dtype]
    np.testing.assert_array_equal(dbias, expected_dbias)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other", "negative strides", "unaligned"])
@pytest.mark.parametrize(("shape", "axis"), [((6, 50), (1,)), ((4, 5, 6), (0, 2)), ((2, 150000), (1,))], ids=str)
def test_out_arrays(layout: str, shape: tuple[int, ...], axis: Axis) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=np.float32)
    change = LAYOUTS.get(layout, np.copy)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)

    outs = [change(np.full_like(a, 7)) for a in (y, mean, rstd)]
    got = reference.row_norm(x, weight, bias, axis=axis, eps=EPS, out=outs[0], mean_out=outs[1], rstd_out=outs[2])
    assert got[1] is None
    for a, out, expected in zip((got[0], *got[2:]), outs, (y, mean, rstd), strict=True):
        assert a is out
        np.testing.assert_array_equal(a, expected)

    residual, residual_out = normal(shape, np.float32, seed=4), change(np.full_like(x, 7))
    got = reference.row_norm(x, weight, bias, axis=axis, eps=EPS, residual=change(residual), residual_out=residual_out)
    assert got[1] is residual_out
    np.testing.assert_array_equal(residual_out, x + residual)
    np.testing.assert_array_equal(got[0], reference.row_norm(x + residual, weight, bias, axis=axis, eps=EPS)[0])

    outs = [change(np.full_like(a, 7)) for a in gradients if a is not None]
    got_gradients = reference.row_norm_backward(
        dy, x, weight, mean, rstd, axis=axis, dx_out=outs[0], dweight_out=outs[1], dbias_out=outs[2]
    )
    for b, out, gradient in zip(got_gradients, outs, gradients, strict=True):
        assert b is out
        np.testing.assert_array_equal(b, gradient)


@pytest.mark.parametrize(("shape", "axis"), [((600, 500), (1,)), ((600, 500), (0,)), ((2, 150000), (1,))], ids=str)
def test_in_place(shape: tuple[int, ...], axis: Axis) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=np.float32)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    dx, dweight, _ = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    got_dx, got_dweight, _ = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis, dx_out=dy)
    np.testing.assert_array_equal(got_dx, dx)
    np.testing.assert_array_equal(got_dweight, dweight)
    added = normal(shape, np.float32, seed=4)
    options: Any = {"axis": axis, "dresidual_out": added}
    expected = reference.row_norm_backward(y, x, weight, mean, rstd, **options)[0]
    np.testing.assert_array_equal(
        reference.row_norm_backward(y, x, weight, mean, rstd, dx_out=added, **options)[0], expected
    )
    np.testing.assert_array_equal(reference.row_norm(x.copy(), weight, bias, axis=axis, eps=EPS, out=x)[0], y)
    x, residual = problem(shape, axis, dtype=np.float32)[1], normal(shape, np.float32, seed=4)
    y, total, _, _ = reference.row_norm(x, weight, bias, axis=axis, eps=EPS, residual=residual)
    got = reference.row_norm(x, weight, bias, axis=axis, eps=EPS, residual=residual, out=x)
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], total)


def test_out_dtype_of_parameter_gradients() -> None:
    dy, x, weight, _ = problem((6, 50), (1,), dtype=np.float16)
    _, _, mean, rstd = reference.row_norm(x, weight, axis=(1,), eps=EPS)
    outs = np.empty(50, np.float32), np.empty(50, BFLOAT16)
    _, dweight, dbias = reference.row_norm_backward(
        dy, x, weight, mean, rstd, axis=(1,), dweight_out=outs[0], dbias_out=outs[1]
    )
    assert dweight is outs[0] and dbias is outs[1]
    assert error(dweight, torch_norm(dy, x, weight, None, (1,))[2]) < GRADIENT_TOLERANCE[dweight.dtype]
    assert error(dbias, dy.sum(0, dtype=np.float64)) < TOLERANCE[BFLOAT16]


@pytest.mark.parametrize("mask", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_output_mask(mask: tuple[bool, bool, bool]) -> None:
    dy, x, weight, _ = problem((6, 50), (1,), dtype=np.float32)
    _, _, mean, rstd = reference.row_norm(x, weight, axis=(1,), eps=EPS)
    everything = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=(1,))
    got = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=(1,), output_mask=mask)
    for asked, g, expected in zip(mask, got, everything, strict=True):
        if asked:
            np.testing.assert_array_equal(g, expected)
        else:
            assert g is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((6, 50), (1,)), ((50, 6), (0,)), ((2, 150000), (1,))], ids=str)
def test_inputs_are_not_modified(shape: tuple[int, ...], axis: Axis, dtype: np.dtype[Any]) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=dtype)
    assert weight is not None and bias is not None
    _, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    inputs = [dy, x, weight, bias, mean, rstd]
    before = [a.copy() for a in inputs]
    reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    for a, b in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("shape", "axis"), [((1, 1000000), (1,)), ((3, 10**6), (1,)), ((10**6, 3), (0,))], ids=str)
def test_huge_rows(shape: tuple[int, ...], axis: Axis) -> None:
    dy, x, weight, bias = problem(shape, axis, dtype=np.float32)
    y, _, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=EPS)
    gradients = reference.row_norm_backward(dy, x, weight, mean, rstd, axis=axis)
    expected_y, *expected_gradients = torch_norm(dy, x, weight, bias, axis)
    assert error(y, expected_y) < TOLERANCE[x.dtype]
    for got, expected in zip(gradients, expected_gradients, strict=True):
        assert got is not None
        assert error(got, expected) < GRADIENT_TOLERANCE[x.dtype]


def test_a_row_with_infinity_or_nan_spoils_no_other() -> None:
    x = normal((5, 40), np.float32)
    expected = reference.row_norm(x, axis=(1,), eps=EPS)[0]
    x[1, 3], x[3, 4] = np.inf, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = reference.row_norm(x, axis=(1,), eps=EPS)[0]
    assert np.isnan(y[[1, 3]]).all()
    np.testing.assert_array_equal(y[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e4])
def test_constant_rows_give_the_bias(value: float) -> None:
    x = np.full((3, 1000), value, np.float32)
    bias = normal((1000,), np.float32)
    y, _, mean, rstd = reference.row_norm(x, None, bias, axis=(1,), eps=EPS)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
    np.testing.assert_array_equal(mean, np.full(3, value, np.float32))
    np.testing.assert_allclose(rstd, np.full(3, EPS**-0.5), rtol=1e-6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_shape_axes_and_tile(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=5), label="shape"))
    axis = tuple(a for a in range(len(shape)) if data.draw(st.booleans(), label=f"reduce axis {a}"))
    affine = data.draw(st.sampled_from(AFFINE), label="weight, bias")
    norm = data.draw(st.sampled_from(NORMS), label="norm")
    dy, x, weight, bias = problem(shape, axis, affine)
    residual, added = (normal(shape, seed=seed) if data.draw(st.booleans()) else None for seed in (4, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_TILE", data.draw(st.integers(1, 64), label="tile"))
        patch.setattr(tiles, "_MIN_ROWS_OF_TRANSPOSED_TILE", data.draw(st.integers(1, 8), label="rows of a tile"))
        patch.setattr(sums, "_RUN", data.draw(st.integers(1, 8), label="run"))
        patch.setattr(sums, "_GROUPS", data.draw(st.integers(2, 8), label="groups"))
        y, total, mean, rstd = reference.row_norm(x, weight, bias, axis=axis, eps=0.1, norm=norm, residual=residual)
        total = x if total is None else total
        gradients = reference.row_norm_backward(
            dy, total, weight, mean, rstd, axis=axis, norm=norm, bias=bias, dresidual_out=added
        )
    expected_y, *expected_gradients = torch_norm(
        dy, x, weight, bias, axis, 0.1, norm, residual=residual, dresidual_out=added
    )
    np.testing.assert_allclose(y, expected_y, rtol=1e-12, atol=1e-12)
    for got, expected in zip(gradients, expected_gradients, strict=True):
        assert got is not None
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(st.integers(0, 7), max_size=4).map(tuple), limit=st.integers(1, 50))
def test_blocks_cover_an_index_space_once_in_order(shape: tuple[int, ...], limit: int) -> None:
    flat = np.arange(math.prod(shape)).reshape(shape)
    seen = [0]
    for block in tiles.blocks_of(shape, limit):
        found = flat[tiles.index_of(block)]
        assert found.shape == block.shape
        assert 1 <= found.size == block.size <= limit
        np.testing.assert_array_equal(found.ravel(), np.arange(block.span.start, block.span.stop))
        assert block.span.start == seen[-1]
        seen.append(block.span.stop)
    assert seen[-1] == flat.size


def test_erfc_is_that_of_the_c_library() -> None:
    x = np.concatenate([np.linspace(0, 27, 100_001), np.logspace(-300, 1, 3001), [28.0, 30.0, np.inf]])
    expected = np.array([math.erfc(value) for value in x])
    np.testing.assert_allclose(activations._erfc(x), expected, rtol=1e-15, atol=1e-315)
    assert np.isnan(activations._erfc(np.array([np.nan]))).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_with_torch(name: str) -> None:
    z = np.append(np.linspace(-40, 40, 80_001), np.nan)
    t = torch.tensor(z, requires_grad=True)
    value = TORCH_ACTIVATIONS[name](t)
    value.sum().backward()
    function = activations.FUNCTIONS[name]
    np.testing.assert_allclose(function.value(z), value.detach().numpy(), rtol=1e-15, atol=1e-15)
    np.testing.assert_allclose(function.derivative(z), t.grad.numpy(), rtol=0, atol=1e-14)


def test_imports_only_numpy() -> None:
    """Apart from cunorm's own modules, which import no framework either."""
    code = (
        "import sys, numpy; after = set(sys.modules); import cunorm.reference;"
        "new = {n.split('.')[0] for n in set(sys.modules) - after} - set(sys.stdlib_module_names);"
        "assert new <= {'numpy', 'cunorm'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
