"""GELU on every path: the CPU, the emulator, a GPU. With its approximation, its bias, and its gradients."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    NORM_TOLERANCE,
    Array,
    CupyRunner,
    EmulatorRunner,
    assert_rounded_once,
    data,
    dtype_of,
    float64,
    half_unit,
    poisoned,
    relative_error,
    view_of,
    views,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import DEVICES as PLAN_DEVICES
from plan_cases import GPUS, MOST_BYTES, many

import cunorm
from cunorm import kernels, reference
from cunorm.plan import Plan, plan
from cunorm.problem import DTYPES as DTYPE_INFO
from cunorm.problem import PointwiseBackward, PointwiseForward, View, contiguous_strides
from cunorm.reference import activations

DTYPES = ["float16", "bfloat16", "float32", "float64"]
ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}
APPROXIMATIONS = list(ACTIVATIONS)

# The relative error of float32 arithmetic: of gelu itself, and more where the exponent of a tail is rounded: with z^2
# in the exact function, whose exponent is z^2 / 2, unless all 24 bits of the result are kept; with 2u in the
# approximation. Room for the instructions of a GPU, which are less exact than a CPU's, is in it.
ERROR = 7e-7


def stated_error(z: Array, approximate: str, dtype: str) -> Array:
    """The largest relative error of gelu, as the README has it, for float64 ``z``."""
    if approximate == "tanh":
        return np.asarray(ERROR + 2e-7 * np.abs(1.5957691 * z * (1 + 0.044715 * z * z)))
    return np.asarray(ERROR + (0 if dtype == "float32" else 6e-8) * z * z)


# ---- Cases, and those who compute them.


@dataclass(frozen=True, eq=False)
class Case:
    """One gelu of given arrays."""

    x: Array
    bias: Array | None = None
    approximate: str = "none"

    @property
    def activation(self) -> str:
        return ACTIVATIONS[self.approximate]

    @property
    def z(self) -> Array:
        """What gelu is taken of, in float64."""
        return np.asarray(float64(self.x) + (0 if self.bias is None else float64(self.bias)))

    def expected(self) -> Array:
        return activations.FUNCTIONS[self.activation].value(self.z)

    def expected_gradients(self, dy: Array) -> tuple[Array, Array]:
        dx = float64(dy) * activations.FUNCTIONS[self.activation].derivative(self.z)
        return dx, dx.reshape(-1, *dx.shape[-1:]).sum(0)


class NumpyPath:
    """The CPU path, through the public functions."""

    def forward(self, case: Case) -> Array:
        out = poisoned(case.x.shape, case.x.dtype.name)
        result: Array = cunorm.gelu(case.x, approximate=case.approximate, bias=case.bias, out=out)
        return result

    def backward(self, case: Case, dy: Array, mask: tuple[bool, bool] = (True, True)) -> tuple[Any, ...]:
        options: dict[str, Any] = {"approximate": case.approximate, "bias": case.bias, "output_mask": mask}
        results = cunorm.gelu_backward(dy, case.x, **options)
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class EmulatorPath:
    """The kernels' text on the CPU, with sanitizers, into poisoned memory."""

    seed: int = 0

    def forward(self, case: Case) -> Array:
        y = poisoned(case.x.shape, case.x.dtype.name)
        problem = PointwiseForward.of(view_(case.x), view_of(case.bias), view_(y), activation=case.activation)
        EmulatorRunner(seed=self.seed).run(problem, {"x": case.x, "bias": case.bias, "y": y})
        return y

    def backward(self, case: Case, dy: Array, mask: tuple[bool, bool] = (True, True)) -> tuple[Any, ...]:
        dx = poisoned(case.x.shape, case.x.dtype.name) if mask[0] else None
        dbias = None if case.bias is None or not mask[1] else poisoned(case.bias.shape, case.bias.dtype.name)
        problem = PointwiseBackward.of(
            view_(dy),
            view_(case.x),
            view_of(case.bias),
            view_of(dx),
            dbias=None if dbias is None else dbias.dtype.name,
            activation=case.activation,
        )
        operands = {"dy": dy, "x": case.x, "bias": case.bias, "dx": dx, "dbias": dbias}
        EmulatorRunner(seed=self.seed).run(problem, operands)
        return (dx,) if case.bias is None else (dx, dbias)


class CupyPath:
    """The kernels on a GPU, through the public functions, in poisoned memory."""

    def forward(self, case: Case) -> Array:
        tensors = {"x": case.x, "bias": case.bias}
        (y,) = CupyRunner().run(cunorm.gelu, tensors, approximate=case.approximate)
        return np.asarray(y)

    def backward(self, case: Case, dy: Array, mask: tuple[bool, bool] = (True, True)) -> tuple[Any, ...]:
        tensors = {"dy": dy, "x": case.x, "bias": case.bias}
        options: dict[str, Any] = {"approximate": case.approximate, "output_mask": mask}
        return CupyRunner().run(cunorm.gelu_backward, tensors, **options)


def view_(array: Array) -> View:
    view = view_of(array)
    assert view is not None
    return view


PATHS = [
    pytest.param(NumpyPath(), id="numpy"),
    pytest.param(EmulatorPath(), id="emulator"),
    pytest.param(CupyPath(), id="cupy", marks=pytest.mark.gpu),
]
KERNELS = PATHS[1:]


def check(path: Any, case: Case, dy: Array | None = None) -> None:
    """Forward and backward against float64; the inputs stay as they are."""
    dy = data(17, case.x.shape, case.x.dtype.name, shift=0.1) if dy is None else dy
    inputs = [array for array in (case.x, case.bias, dy) if array is not None]
    before = [array.tobytes() for array in inputs]
    y, dx, *sums = (path.forward(case), *path.backward(case, dy))
    assert_close(y, case.expected(), np.abs(case.expected()) + 1e-30, case.x.dtype.name)
    expected_dx, expected_dbias = case.expected_gradients(dy)
    assert_close(dx, expected_dx, np.abs(float64(dy)), case.x.dtype.name)
    assert (case.bias is not None) == bool(sums)
    for dbias in sums:
        assert case.bias is not None and dbias.shape == case.bias.shape and dbias.dtype == case.bias.dtype
        assert_sums(dbias, expected_dbias, float64(dy), case.x.dtype.name)
    assert [array.tobytes() for array in inputs] == before


def assert_close(result: Array, expected: Array, size: Array, dtype: str) -> None:
    assert result.shape == expected.shape and result.dtype == dtype_of(dtype) and result.flags.c_contiguous
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(result, expected, dtype, size)
    else:
        assert relative_error(result, expected, size) <= NORM_TOLERANCE[dtype]


def assert_sums(result: Array, expected: Array, terms: Array, dtype: str) -> None:
    size = np.linalg.norm(np.abs(terms).reshape(-1, terms.shape[-1]).sum(0))
    rounding = NORM_TOLERANCE[result.dtype.name] * np.linalg.norm(expected)
    arithmetic = NORM_TOLERANCE["float64" if dtype == "float64" else "float32"] * size
    assert relative_error(result, expected, np.ones(1)) <= rounding + arithmetic


# ---- Values.

# From one number to several blocks: runs that end within a vector, between vectors, between blocks.
SHAPES: list[tuple[int, ...]] = [
    (1,), (7,), (8,), (257,), (3, 5), (2, 3, 4, 5), (2048,), (2049,), (33, 257), (4, 4096), (9, 2011), (8191,), (1, 1),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("shape", "dtype", "approximate"),
    [(shape, DTYPES[(i + k) % 4], APPROXIMATIONS[(i + k) % 2]) for i, shape in enumerate(SHAPES) for k in (0, 3)],
    ids=str,
)
def test_of_any_shape(path: Any, shape: tuple[int, ...], dtype: str, approximate: str) -> None:
    check(path, Case(data(0, shape, dtype), approximate=approximate))


# Columns that are a vector, part of a warp, warps, more than a block; and rows for one turn of a block and for several.
BIASED: list[tuple[int, ...]] = [
    (5, 1), (600, 3), (203, 1032), (40, 8), (70, 64), (33, 257), (3, 520), (20, 1000), (2, 3, 2048), (5, 4100),
    (40, 2056), (1, 96), (7,),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("shape", "dtype", "approximate"),
    [(shape, DTYPES[(i + k) % 4], APPROXIMATIONS[(i + k) % 2]) for i, shape in enumerate(BIASED) for k in (0, 3)],
    ids=str,
)
def test_with_a_bias(path: Any, shape: tuple[int, ...], dtype: str, approximate: str) -> None:
    check(path, Case(data(0, shape, dtype), data(1, shape[-1:], dtype, outliers=False), approximate))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "bias_dtype"), itertools.permutations(DTYPES, 2))
def test_a_bias_of_another_dtype(path: Any, dtype: str, bias_dtype: str) -> None:
    check(path, Case(data(0, (37, 96), dtype), data(1, (96,), bias_dtype, outliers=False)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(views("float32")))
def test_views(path: Any, name: str, dtype: str, biased: bool) -> None:
    x, dy = views(dtype)[name]
    check(path, Case(x, data(1, x.shape[-1:], dtype, outliers=False) if biased else None), dy)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_views_of_many_dimensions(path: Any, biased: bool) -> None:
    x = data(0, (4, 5, 6, 7), "float16").transpose(2, 0, 3, 1)[::2]
    dy = data(1, (3, 4, 7, 10), "float16")[..., ::2]
    check(path, Case(x, data(2, (5,), outliers=False) if biased else None), dy)


@pytest.mark.parametrize("path", PATHS)
def test_a_bias_at_an_odd_address(path: Any) -> None:
    check(path, Case(data(0, (5, 96), "bfloat16"), data(1, (97,), "float16", outliers=False)[1:]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_empty(path: Any, shape: tuple[int, ...]) -> None:
    x, bias = data(0, shape), data(1, shape[-1:])
    assert path.forward(Case(x)).shape == path.backward(Case(x), x)[0].shape == shape
    dx, dbias = path.backward(Case(x, bias), x)
    assert path.forward(Case(x, bias)).shape == dx.shape == shape
    assert dbias.shape == bias.shape and not dbias.any()


@pytest.mark.parametrize("path", PATHS)
def test_no_dimensions(path: Any) -> None:
    check(path, Case(np.asarray(data(0, ()))), np.asarray(data(1, ())))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(5, 200), (1, 200), (90, 3)], ids=str)
@pytest.mark.parametrize("mask", [(True, False), (False, True), (False, False)], ids=str)
def test_only_the_gradients_asked_for(path: Any, mask: tuple[bool, bool], shape: tuple[int, ...]) -> None:
    case, dy = Case(data(0, shape), data(1, shape[-1:])), data(2, shape)
    for wanted, one, other in zip(mask, path.backward(case, dy, mask), path.backward(case, dy)):
        assert (one is not None) == wanted
        assert one is None or relative_error(one, float64(other)) <= 2e-7
    assert (path.backward(Case(case.x), dy, mask)[0] is not None) == mask[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero(path: Any, dtype: str, approximate: str) -> None:
    """0 on one side, the argument on the other, NaN for NaN; the limits at infinity, and no NaN on the way there."""
    large = float(np.finfo(np.float16).max if dtype == "float16" else 3e38)
    x = np.array([-np.inf, -large, -300, -40, 40, 300, large, np.inf, np.nan, 0.0, -0.0]).astype(dtype_of(dtype))
    case = Case(x, approximate=approximate)
    line = np.where(float64(x) > 0, float64(x), 0)
    line[8] = np.nan
    np.testing.assert_array_equal(float64(path.forward(case)), line)
    (dx,) = path.backward(case, np.ones_like(x))
    slope = np.array([0, 0, 0, 0, 1, 1, 1, 1, np.nan, 0.5, 0.5])
    np.testing.assert_array_equal(float64(dx), slope)


def test_sums_are_the_same_in_any_order_of_threads() -> None:
    case, dy = Case(data(0, (300, 24), "bfloat16"), data(1, (24,), "float16")), data(2, (300, 24), "bfloat16")
    results = [EmulatorPath(seed).backward(case, dy) for seed in range(3)]
    assert len({b"".join(array.tobytes() for array in gradients) for gradients in results}) == 1


# ---- Accuracy.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_float32_is_accurate_to_the_end_of_the_tail(path: Any, approximate: str) -> None:
    """In relation to each result, however small, down to where it is no normal float."""
    end = -12.9 if approximate == "none" else -10.0
    x = np.concatenate([np.linspace(end, 13, 30011), -np.geomspace(1e-7, -end, 10000)]).astype(np.float32)
    case = Case(x, approximate=approximate)
    expected = case.expected()
    error = np.abs(path.forward(case) - expected) / np.maximum(np.abs(expected), 1e-300)
    assert np.all(error <= stated_error(case.z, approximate, "float32")), error.max()
    (dx,) = path.backward(case, np.ones_like(x))
    # Of the two terms, which cancel near -0.75.
    distribution = expected / case.z
    size = distribution + np.abs(case.expected_gradients(np.ones_like(x))[0] - distribution)
    error = np.abs(dx - case.expected_gradients(np.ones_like(x))[0]) / size
    assert np.all(error <= 2 * stated_error(case.z, approximate, "float32")), error.max()


def every_number(dtype: str) -> Array:
    """All that are finite, of a sixteen-bit dtype."""
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype_of(dtype))
    return np.ascontiguousarray(numbers[np.isfinite(numbers.astype(np.float32))])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_sixteen_bit_number_is_correctly_rounded(path: Any, dtype: str, approximate: str) -> None:
    """But where the error of float32 arithmetic decides, so close is a tie; and tiny results, which may be zero."""
    x = every_number(dtype)
    case = Case(x, approximate=approximate)
    expected, y = case.expected(), float64(path.forward(case))
    nearest = expected.astype(dtype_of(dtype)).astype(np.float64)
    off = np.flatnonzero((y != nearest) & (np.abs(expected) >= 2.0**-122))
    distance = half_unit(expected[off], dtype) - np.abs(nearest[off] - expected[off])  # from the tie
    assert np.all(distance <= stated_error(case.z[off], approximate, dtype) * np.abs(expected[off]))
    assert np.all(np.abs(y[off] - expected[off]) <= 1.01 * half_unit(expected[off], dtype))
    assert len(off) <= 30
    tiny = np.abs(expected) < 2.0**-122
    assert np.all(np.abs(y[tiny]) <= 2.0**-121)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_sixteen_bit_derivative_is_correctly_rounded(path: Any, dtype: str, approximate: str) -> None:
    x = every_number(dtype)
    case, one = Case(x, approximate=approximate), np.ones_like(x)
    expected, dx = case.expected_gradients(one)[0], float64(path.backward(case, one)[0])
    normal = np.abs(expected) >= 2.0**-117
    with np.errstate(divide="ignore", invalid="ignore"):
        distribution = np.where(case.z == 0, 0.5, case.expected() / case.z)
    size = distribution + np.abs(expected - distribution)
    slack = 2 * stated_error(np.clip(case.z, -15, 15), approximate, dtype) * size
    error = np.abs(dx - expected)
    assert np.all(error[normal] <= (half_unit(expected, dtype) + slack)[normal])
    assert np.all(np.abs(dx[~normal]) <= 2.0**-116)


def mills_ratio(t: Array) -> Array:
    """Phi(-t) / exp(-t^2 / 2), in float64."""
    return np.asarray(0.5 * activations._erfc(t * np.sqrt(0.5)) * np.exp(0.5 * t * t))


def polynomial_of_the_kernels() -> tuple[float, list[float], Callable[[Array], Array]]:
    """The factor in u, the coefficients from the highest power on, and sum * u, all read from the kernels' text."""
    text = kernels.kernel_source("pointwise_forward", {})
    body = re.search(r"float mills_ratio\(float t\) \{(.*?)\n\}", text, re.DOTALL)
    assert body is not None
    factor = re.search(r"reciprocal\(fmaf\(([\d.]+)f, t, 1\)\)", body[1])
    assert factor is not None
    numbers = re.findall(r"(?:sum = |sum, u, )(-?[\d.]+)f", body[1])
    slope, coefficients = float(np.float32(factor[1])), [float(np.float32(number)) for number in numbers]

    def value(t: Array) -> Array:
        u = 1 / (1 + slope * t)
        return np.asarray(np.polyval(coefficients, u) * u)

    return slope, coefficients, value


def test_the_polynomial_is_as_close_as_it_says() -> None:
    _, coefficients, value = polynomial_of_the_kernels()
    assert len(coefficients) == 9
    t = np.linspace(0, 13.4, 100_001)
    assert np.abs(value(t) / mills_ratio(t) - 1).max() < 5e-8


def test_the_polynomial_is_the_best_one() -> None:
    """Made again: the least largest relative error, by Lawson's algorithm.

    That is least squares, again and again, where each time the weight of a point grows with its error (C. L. Lawson
    1961, Contributions to the theory of linear least maximum approximation). Rounding the coefficients costs the rest.
    """
    slope, coefficients, value = polynomial_of_the_kernels()
    least = 1 / (1 + slope * 13.4)
    points = (least + 1) / 2 + (1 - least) / 2 * np.cos(np.pi * (np.arange(2000) + 0.5) / 2000)
    t = (1 / points - 1) / slope
    basis = np.polynomial.chebyshev.chebvander((2 * points - 1 - least) / (1 - least), len(coefficients) - 1)
    basis *= (points / mills_ratio(t))[:, None]
    weights = np.full(len(points), 1 / len(points))
    best = np.inf
    for _ in range(300):
        root = np.sqrt(weights)
        solution, *_ = np.linalg.lstsq(basis * root[:, None], root, rcond=None)
        error = np.abs(basis @ solution - 1)
        best = min(best, error.max())
        weights = weights * error / (weights * error).sum()
    assert best == pytest.approx(2e-8, rel=0.1)
    assert np.abs(value(t) / mills_ratio(t) - 1).max() < best + 3e-8


# ---- The definition.


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_the_reference_is_pytorchs_in_float64(approximate: str, biased: bool) -> None:
    x, bias, dy = data(0, (3, 4, 50), "float64"), data(1, (50,), "float64"), data(2, (3, 4, 50), "float64")
    leaves = [torch.tensor(array, requires_grad=True) for array in (x, bias)]
    expected = F.gelu(leaves[0] + leaves[1] if biased else leaves[0], approximate=approximate)
    expected.backward(torch.tensor(dy))
    given_bias = bias if biased else None
    activation = ACTIVATIONS[approximate]
    y = reference.pointwise(x, given_bias, activation=activation)
    # PyTorch's tail is a difference of numbers near one.
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-13, atol=1e-14)
    dx, dbias = reference.pointwise_backward(dy, x, given_bias, activation=activation)
    assert leaves[0].grad is not None
    np.testing.assert_allclose(dx, leaves[0].grad.numpy(), rtol=1e-12, atol=1e-12)
    if biased:
        assert leaves[1].grad is not None and dbias is not None
        np.testing.assert_allclose(dbias, leaves[1].grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gradients_equal_finite_differences(approximate: str) -> None:
    x, bias, dy = data(0, (5, 6), "float64", outliers=False), data(1, (6,), "float64"), data(2, (5, 6), "float64")

    def loss(x: Array, bias: Array) -> float:
        return float((cunorm.gelu(x, approximate=approximate, bias=bias) * dy).sum())

    dx, dbias = cunorm.gelu_backward(dy, x, approximate=approximate, bias=bias)
    for arrays, gradient, place in (((x, bias), dx, 0), ((x, bias), dbias, 1)):
        for index in np.ndindex(gradient.shape):
            step = np.zeros_like(arrays[place])
            step[index] = 1e-6
            up, down = (
                loss(*(array + sign * step if i == place else array for i, array in enumerate(arrays)))
                for sign in (1, -1)
            )
            assert gradient[index] == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


def test_large_arrays_on_the_cpu() -> None:
    """More than a tile of the reference, whose columns are then taken in parts."""
    x, bias = data(0, (3, 300_000), outliers=False), data(1, (300_000,), outliers=False)
    check(NumpyPath(), Case(x, bias))
    check(NumpyPath(), Case(x.T, bias[:3]))


def test_in_place() -> None:
    x = data(0, (40, 300))
    expected = cunorm.gelu(x)
    assert cunorm.gelu(x, out=x) is x
    np.testing.assert_array_equal(x, expected)


# ---- Wrong use.


@pytest.mark.parametrize("function", ["gelu", "gelu_backward"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"approximate": "erf"}, ValueError, "approximate is 'erf'; it must be 'none' or 'tanh'"),
        ({"approximate": None}, TypeError, "approximate is a NoneType; it must be 'none' or 'tanh'"),
        ({"approximate": ["none"]}, TypeError, "approximate is a list; it must be 'none' or 'tanh'"),
        ({"x": np.ones((2, 4), "int32")}, TypeError, "x has dtype int32; it must be one of float16, bfloat16, float32"),
        ({"x": [1.0]}, TypeError, "x is a builtins.list; it must be a NumPy, CuPy, PyTorch, JAX or TensorFlow tensor"),
        ({"bias": np.ones(3)}, ValueError, "bias has shape (3,); for x of shape (2, 4) it must be (4,)"),
        ({"bias": np.ones((2, 4))}, ValueError, "bias has shape (2, 4); for x of shape (2, 4) it must be (4,)"),
        ({"bias": np.ones(4, "int64")}, TypeError, "bias has dtype int64; it must be one of float16, bfloat16"),
        ({"bias": np.ones(8)[::2]}, ValueError, "bias has strides (2,) (in elements) for shape (4,); it must be C-con"),
        ({"bias": [1.0] * 4}, TypeError, "bias is a list; beside a NumPy x it must be a NumPy array"),
        (
            {"x": np.ones(()), "bias": np.ones(1)},
            ValueError,
            "bias has shape (1,); it goes along x's last axis, so for x of shape () it must be None",
        ),
    ],
)
def test_arguments_that_are_refused(
    function: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = options.pop("x", np.ones((2, 4), np.float32)) if "x" in (options := dict(options)) else np.ones((2, 4), "f4")
    arguments = (x,) if function == "gelu" else (x, x)
    with pytest.raises(error) as raised:
        getattr(cunorm, function)(*arguments, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.ones((2, 3), "f4"), ValueError, "out has shape (2, 3); for x of shape (2, 4) it must be (2, 4)"),
        (np.ones((2, 4), "f8"), TypeError, "out has dtype float64; for x of dtype float32 it must be float32"),
        (np.ones((4, 2), "f4").T, ValueError, "out has strides (1, 2) (in elements) for shape (2, 4); it must be C-"),
    ],
)
def test_an_out_that_is_refused(out: Array, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        cunorm.gelu(np.ones((2, 4), np.float32), out=out)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("dy", "error", "message"),
    [
        (np.ones((4, 2), "f4"), ValueError, "dy has shape (4, 2); for x of shape (2, 4) it must be (2, 4)"),
        (np.ones((2, 4), "f2"), TypeError, "dy has dtype float16; for x of dtype float32 it must be float32"),
        (None, TypeError, "dy is a NoneType; beside a NumPy x it must be a NumPy array"),
    ],
)
def test_a_dy_that_is_refused(dy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        cunorm.gelu_backward(dy, np.ones((2, 4), np.float32))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("mask", "error"), [((True,), ValueError), ((True, True, True), ValueError), ((1, 1), TypeError), (True, TypeError)]
)
def test_an_output_mask_that_is_refused(mask: Any, error: type[Exception]) -> None:
    x = np.ones((2, 4))
    with pytest.raises(error) as raised:
        cunorm.gelu_backward(x, x, output_mask=mask)
    assert f"output_mask must be two bools, for dx and dbias; got {mask!r}" in str(raised.value)


def test_there_is_nothing_to_tune() -> None:
    with pytest.raises(ValueError, match="op is 'gelu', for which there is one plan: there is nothing to tune"):
        cunorm.tune("gelu", (4096, 4096))


# ---- Plans.


def contiguous(shape: tuple[int, ...], dtype: str, offset: int = 0) -> View:
    itemsize = DTYPE_INFO[dtype].itemsize
    return View(256 + offset * itemsize, shape, contiguous_strides(shape), dtype, ("cuda", 0))


def forward_plan(shape: tuple[int, ...], bias: bool = False, offset: int = 0) -> Plan:
    x = contiguous(shape, "bfloat16", offset)
    vector = contiguous(shape[-1:], "bfloat16") if bias else None
    return plan(PointwiseForward.of(x, vector, x, activation="gelu"), GPUS["sm_90"])


@pytest.mark.parametrize("shape", [(8192, 4097), (8192 * 4097,), (3, 5, 7, 11, 13), (1, 4_000_003)], ids=str)
def test_without_a_bias_only_the_number_of_numbers_counts(shape: tuple[int, ...]) -> None:
    (launch,) = forward_plan(shape).launches
    constants, arguments = dict(launch.constants), dict(launch.arguments)
    assert constants["VECTOR"] == 8 and constants["RUN"] == 1 and constants["ROW_DIMS"] == 1
    assert arguments["rows"] * arguments["columns"] + arguments["rest"] == np.prod(shape)  # type: ignore[operator]
    # Few numbers have few steps, and L2 holds them.
    of_many = dict(forward_plan((8192, 4096)).launches[0].constants)
    assert of_many | {name: constants[name] for name in ("STEPS", "KEPT_IN_L2")} == constants


@pytest.mark.parametrize(("shape", "offset", "width"), [((64, 4096), 1, 1), ((64, 4096), 4, 4), ((64, 4098), 0, 2)])
def test_with_a_bias_vectors_go_by_rows_and_addresses(shape: tuple[int, ...], offset: int, width: int) -> None:
    (launch,) = forward_plan(shape, bias=True, offset=offset).launches
    assert dict(launch.constants)["VECTOR"] == width


SIZES = st.sampled_from([1, 2, 3, 5, 8, 24, 64, 96, 100, 256, 1000, 1024, 2056, 4097, 16384, 65536, 1_000_003])


@many
@given(st.lists(SIZES, min_size=1, max_size=3), st.sampled_from(DTYPES), st.booleans(), st.sampled_from([0, 1, 4]))
def test_every_number_has_one_place(sizes: list[int], dtype: str, bias: bool, offset: int) -> None:
    """The turns of all blocks are those of all rows, and the tiles of a turn all columns; no block is without work."""
    shape = tuple(sizes)
    assume(np.prod(shape, dtype=object) * 8 <= MOST_BYTES)
    x, vector = contiguous(shape, dtype, offset), contiguous(shape[-1:], dtype) if bias else None
    for device in PLAN_DEVICES.values():
        dbias = dtype if bias else None
        backward = PointwiseBackward.of(x, x, vector, x, dbias=dbias, activation="gelu")
        for problem in (PointwiseForward.of(x, vector, x, activation="gelu"), backward):
            item = plan.__wrapped__(problem, device).launches[0]
            constants, arguments = dict(item.constants), dict(item.arguments)
            rows, columns, rest, tiles, groups = (
                int(arguments[name])  # type: ignore[arg-type]
                for name in ("rows", "columns", "rest", "tiles", "groups")
            )
            assert rows * columns + rest == problem.rows * problem.columns
            assert item.block[0] * item.block[1] == constants["THREADS"] <= 256
            assert item.block[1] == constants["ROW_LANES"]
            tile = item.block[0] * int(constants["VECTOR"])
            assert (tiles - 1) * tile < columns <= tiles * tile and 0 <= rest < columns
            turns = -(-(rows + (rest > 0)) // (item.block[1] * int(constants["STEPS"])))
            assert item.grid == tiles * groups and 1 <= groups <= turns
            if constants["RUN"]:
                assert tiles == 1 and groups == turns


def test_few_numbers_are_for_many_blocks() -> None:
    """64 x 4096 of bfloat16 are 256 times what a block of 128 threads reads at once, for 132 multiprocessors."""
    for bias in (False, True):
        (launch,) = forward_plan((64, 4096), bias=bias).launches
        assert launch.grid == 256 and dict(launch.constants)["STEPS"] == 1


def test_a_tensor_of_more_than_two_to_the_31() -> None:
    (launch,) = forward_plan((70_000, 65_536)).launches
    assert launch.grid * 256 * 8 * 4 >= 70_000 * 65_536 > 2**31
    backward = contiguous((70_000, 65_536), "bfloat16")
    problem = PointwiseBackward.of(
        backward, backward, contiguous((65_536,), "bfloat16"), backward, dbias="float32", activation="gelu"
    )
    chosen = plan(problem, GPUS["sm_90"])
    assert [item.kernel for item in chosen.launches] == ["pointwise_backward", "column_sums"]
    assert chosen.workspace_bytes <= 2**28


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_more_than_two_to_the_31_numbers_on_a_gpu(biased: bool) -> None:
    import cupy

    columns = 4099
    rows = 2**31 // columns + 5
    x = cupy.zeros((rows, columns), "float16")
    x[-1] = x[0] = cupy.linspace(-4, 4, columns)
    bias = cupy.ones(columns, "float16") if biased else None
    y = cunorm.gelu(x, bias=bias)
    expected = cunorm.gelu(x[-1].get(), bias=bias.get() if biased else None)
    for row in (0, rows - 1):
        np.testing.assert_allclose(y[row].get(), expected, rtol=1e-3, atol=1e-6)
