"""Wrong use is answered before anything runs, by a message that names the argument, what it was and what it must be.

On NumPy arrays and PyTorch CPU tensors; what is special to a framework is in its own test file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from error_cases import MAKERS, Make, as_numpy_array, as_torch_tensor, assert_refused, forbid_computing, values

import cunorm
from cunorm import adapters, cuda, execute, gpus, resources
from cunorm.problem import View
from cunorm.text import kind_of

SHAPE = (4, 6, 8)
NAN = float("nan")


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever would compute something fails the test."""
    forbid_computing(monkeypatch)
    yield


def refused(error: type[Exception], message: str, *arguments: Any, **options: Any) -> None:
    """``layer_norm`` raises ``error``, exactly, with the whole of ``message`` in its text, and changes no argument."""
    assert_refused(cunorm.layer_norm, error, message, arguments, options)


def test_nothing_runs_is_seen(make: Make) -> None:
    """The fixture above must notice a call that is not refused."""
    with pytest.raises(pytest.fail.Exception, match="something was computed"):
        cunorm.layer_norm(make(values(2, 3)))


# ---- axis and eps.


@pytest.mark.parametrize("axis", [3, -4, (0, 3), [-4], 10**9])
def test_axis_out_of_range(make: Make, axis: Any) -> None:
    item = axis if isinstance(axis, int) else axis[-1]
    message = f"axis {item} is out of range for x with 3 dimensions (shape (4, 6, 8))"
    refused(ValueError, message, make(values(*SHAPE)), axis=axis)


@pytest.mark.parametrize("axis", [(0, 0), (1, -2), [2, 0, -1]])
def test_axis_twice(make: Make, axis: Any) -> None:
    message = f"axis must name at least one axis and none twice; got {tuple(axis)} for x of shape (4, 6, 8)"
    refused(ValueError, message, make(values(*SHAPE)), axis=axis)


@pytest.mark.parametrize("axis", [(), []])
def test_no_axis(make: Make, axis: Any) -> None:
    message = "axis must name at least one axis and none twice; got () for x of shape (4, 6, 8)"
    refused(ValueError, message, make(values(*SHAPE)), axis=axis)


@pytest.mark.parametrize(
    "axis", [1.5, "1", None, True, {1}, (0, 1.0), (0, True), ["1"], [[0]], (None,), np.array([[0, 1]]), np.ones(2)]
)
def test_axis_of_another_type(make: Make, axis: Any) -> None:
    message = f"axis must be an int or a sequence of ints; got {axis!r}"
    refused(TypeError, message, make(values(*SHAPE)), axis=axis)
    x, mean = make(values(*SHAPE)), make(values(4, 6))
    assert_refused(cunorm.layer_norm_backward, TypeError, message, (x, x, None, mean, mean), {"axis": axis})


def test_x_without_dimensions(make: Make) -> None:
    message = "axis -1 is out of range for x with 0 dimensions (shape ())"
    refused(ValueError, message, make(np.float32(1.0)))


@pytest.mark.parametrize("eps", [-1e-5, -1, NAN, float("inf"), -float("inf"), np.float32("nan")])
def test_eps_out_of_range(make: Make, eps: Any) -> None:
    refused(ValueError, f"eps must be finite and not negative; got {float(eps)}", make(values(*SHAPE)), eps=eps)


@pytest.mark.parametrize(
    ("huge", "value"),
    [(10**400, "inf"), (-(10**400), "-inf"), (Fraction(10**400), "inf")],
    ids=["int", "negative", "fraction"],
)
def test_numbers_that_no_float_is_as_large_as(make: Make, huge: Any, value: str) -> None:
    x = make(values(*SHAPE))
    refused(ValueError, f"eps must be finite and not negative; got {value}", x, eps=huge)
    message = f"weight_offset must be finite; got {value}"
    assert_refused(cunorm.rms_norm, ValueError, message, (x, make(np.ones(8))), {"weight_offset": huge})
    message = f"momentum is {value}; it must be from 0 to 1"
    assert_refused(cunorm.batch_norm, ValueError, message, (x,), {"training": True, "momentum": huge})


@pytest.mark.parametrize("given", ["no", 1, None, np.ones(1, bool), torch.tensor(True)])
def test_return_stats_of_another_type(make: Make, given: Any) -> None:
    message = f"return_stats is {kind_of(given)}; it must be a bool"
    for function in (cunorm.layer_norm, cunorm.rms_norm, cunorm.instance_norm):
        assert_refused(function, TypeError, message, (make(values(*SHAPE)),), {"return_stats": given})


@pytest.mark.parametrize("eps", ["1e-5", None, True, 1j, b"1", [1e-5], np.array([1e-5]), torch.tensor(1e-5)])
def test_eps_of_another_type(make: Make, eps: Any) -> None:
    message = f"eps is {kind_of(eps)}; it must be a number, finite and not negative"
    refused(TypeError, message, make(values(*SHAPE)), eps=eps)


# ---- activation and weight_offset.

FORWARD = [cunorm.layer_norm, cunorm.rms_norm]


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("activation", ["ReLU", "tanh", "", "gelu "])
def test_activation_that_is_not_known(make: Make, function: Any, activation: str) -> None:
    message = f"activation is {activation!r}; it must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh'"
    assert_refused(function, ValueError, message, (make(values(*SHAPE)),), {"activation": activation})
    _, arguments = _gradient_arguments(make)
    gradient_refused(ValueError, message, arguments, activation=activation)
    del arguments["mean"]
    assert_refused(cunorm.rms_norm_backward, ValueError, message, (), arguments | {"activation": activation})


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("activation", [1, True, b"relu", ["relu"], torch.nn.functional.relu])
def test_activation_of_another_type(make: Make, function: Any, activation: Any) -> None:
    message = f"activation is {kind_of(activation)}; it must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh'"
    assert_refused(function, TypeError, message, (make(values(*SHAPE)),), {"activation": activation})


@pytest.mark.parametrize("weight_offset", [NAN, float("inf"), np.float32("-inf")])
def test_weight_offset_out_of_range(make: Make, weight_offset: Any) -> None:
    message = f"weight_offset must be finite; got {float(weight_offset)}"
    arguments = (make(values(*SHAPE)), make(np.ones(8)))
    assert_refused(cunorm.rms_norm, ValueError, message, arguments, {"weight_offset": weight_offset})


@pytest.mark.parametrize("weight_offset", ["1", None, 1j, [1.0], np.array([1.0])])
def test_weight_offset_of_another_type(make: Make, weight_offset: Any) -> None:
    message = f"weight_offset is {kind_of(weight_offset)}; it must be a finite number"
    arguments = (make(values(*SHAPE)), make(np.ones(8)))
    assert_refused(cunorm.rms_norm, TypeError, message, arguments, {"weight_offset": weight_offset})


def test_weight_offset_without_a_weight(make: Make) -> None:
    message = "weight_offset is 1.0 and weight is None; without a weight it must be 0"
    x, rstd = make(values(*SHAPE)), make(np.ones((4, 6)))
    assert_refused(cunorm.rms_norm, ValueError, message, (x,), {"weight_offset": 1})
    assert_refused(cunorm.rms_norm_backward, ValueError, message, (x, x, None, rstd), {"weight_offset": 1.0})


# ---- Types and dtypes.


@pytest.mark.parametrize("x", [[1.0, 2.0], None, 1.0, "x", object(), (np.ones(3),)], ids=lambda x: type(x).__name__)
def test_x_that_is_no_tensor(x: Any) -> None:
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    message = f"x is a {kind}; it must be a NumPy, CuPy, PyTorch, JAX or TensorFlow tensor, or have __dlpack__"
    refused(TypeError, message, x)
    mean = np.ones(2, np.float32)
    assert_refused(cunorm.layer_norm_backward, TypeError, message, (mean, x, None, mean, mean), {})


WRONG_DTYPES = ["int32", "int64", "uint8", "bool", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", WRONG_DTYPES)
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_dtypes(make: Make, name: str, dtype: str) -> None:
    message = f"{name} has dtype {dtype}; it must be one of float16, bfloat16, float32, float64"
    wrong = make(np.ones(SHAPE if name == "x" else SHAPE[-1:]), dtype)
    refused(TypeError, message, **({"x": make(values(*SHAPE))} | {name: wrong}))


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.array(["a", "b"]), "str32"),
        (np.array([b"a"]), "bytes8"),
        (np.array([1.0, None], object), "object"),
        (np.ones(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.ones(3, np.longdouble), np.dtype(np.longdouble).name),
        (np.zeros(3, "datetime64[s]"), "datetime64[s]"),
    ],
    ids=lambda x: str(x.dtype) if isinstance(x, np.ndarray) else "",
)
def test_dtypes_that_only_numpy_has(x: Any, dtype: str) -> None:
    refused(TypeError, f"x has dtype {dtype}; it must be one of float16, bfloat16, float32, float64", x)


def test_another_byte_order() -> None:
    refused(TypeError, "x has dtype >f4, which is not in this machine's byte order", values(2, 3).astype(">f4"))


def test_strides_that_are_no_whole_elements() -> None:
    pairs = np.zeros(4, [("flag", np.int8), ("number", np.float32)])
    message = "x has strides (5,) that are no multiples of its element size, 4 bytes"
    refused(ValueError, message, pairs["number"])


def test_dtypes_that_only_pytorch_has() -> None:
    message = "x has dtype float8_e4m3fn; it must be one of float16, bfloat16, float32, float64"
    refused(TypeError, message, torch.ones(4).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("name", ["weight", "bias", "out"])
def test_tensors_of_another_framework(name: str) -> None:
    shape = SHAPE if name == "out" else SHAPE[-1:]
    numpy_x, torch_x = as_numpy_array(values(*SHAPE)), as_torch_tensor(values(*SHAPE))
    message = f"{name} is a Tensor; beside a NumPy x it must be a NumPy array"
    refused(TypeError, message, numpy_x, **{name: as_torch_tensor(values(*shape))})
    message = f"{name} is an ndarray; beside a PyTorch x it must be a PyTorch tensor"
    refused(TypeError, message, torch_x, **{name: as_numpy_array(values(*shape))})
    message = f"{name} is a list; beside a NumPy x it must be a NumPy array"
    refused(TypeError, message, numpy_x, **{name: [1.0] * 8})


def test_a_scalar_of_numpy_is_no_array() -> None:
    refused(TypeError, "x is a NumPy scalar, a float32; it must be a NumPy array", np.float32(3))


@pytest.mark.parametrize("given", [torch.Size([2]), torch.float32, torch.nn.ReLU(), torch.ones(2, 2).max(0)], ids=str)
def test_what_is_of_pytorch_and_no_tensor(given: Any) -> None:
    refused(TypeError, f"x is a {type(given).__name__}; it must be a PyTorch tensor", given)


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("sizes", [(8,), [6, 8], (np.int64(8),)], ids=str)
def test_the_normalized_shape_of_pytorch(function: Any, sizes: Any) -> None:
    message = "it must be a NumPy array; layer_norm and rms_norm have no normalized_shape: see their axis"
    assert_refused(function, TypeError, message, (as_numpy_array(values(*SHAPE)), sizes), {})


@pytest.mark.parametrize(("name", "given"), [("weight", ()), ("weight", [1.0] * 8), ("bias", (8,))], ids=str)
def test_what_is_no_normalized_shape(name: str, given: Any) -> None:
    with pytest.raises(TypeError, match=r"it must be a NumPy array$"):
        cunorm.layer_norm(as_numpy_array(values(*SHAPE)), **{name: given})


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias", "out"])
def test_masked_arrays(name: str) -> None:
    arguments = {"x": as_numpy_array(values(*SHAPE))}
    masked = np.ma.masked_array(np.ones(SHAPE[-1:] if name in ("weight", "bias") else SHAPE, np.float32), mask=False)
    message = f"{name} is a MaskedArray, whose mask would be ignored; it must be an array without one, such as "
    refused(TypeError, f"{message}{name}.data or {name}.filled(0)", **arguments | {name: masked})


@pytest.mark.parametrize("name", ["dy", "x", "mean"])
def test_masked_arrays_for_gradients(name: str) -> None:
    _, arguments = _gradient_arguments(as_numpy_array)
    message = f"{name} is a MaskedArray, whose mask would be ignored; it must be an array without one"
    gradient_refused(TypeError, message, arguments | {name: np.ma.masked_array(arguments[name])})


@pytest.mark.parametrize("name", ["dy", "x", "mean", "rstd"])
def test_gradients_need_every_tensor(make: Make, name: str) -> None:
    _, arguments = _gradient_arguments(make)
    message = {
        "x": "x is a builtins.NoneType; it must be",
        "mean": "mean is None; it must be the mean that layer_norm returned",
        "rstd": "rstd is None; it must be the rstd that ",
    }.get(name, f"{name} is a NoneType; beside a ")
    gradient_refused(TypeError, message, arguments | {name: None})
    if name != "mean":
        del arguments["mean"]
        assert_refused(cunorm.rms_norm_backward, TypeError, message, (), arguments | {name: None})


@pytest.mark.parametrize("name", ["residual", "weight"])
def test_tensors_of_another_framework_for_rms_norm(name: str) -> None:
    other = as_torch_tensor(values(*(SHAPE if name == "residual" else SHAPE[-1:])))
    message = f"{name} is a Tensor; beside a NumPy x it must be a NumPy array"
    assert_refused(cunorm.rms_norm, TypeError, message, (as_numpy_array(values(*SHAPE)),), {name: other})


# ---- Shapes and strides.


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("shape", [(4, 6, 7), (8,), (1, 6, 8), (192,), (1, 4, 6, 8), ()])
def test_shape_of_residual(make: Make, function: Any, shape: Any) -> None:
    message = f"residual has shape {shape}; for x of shape (4, 6, 8) it must be (4, 6, 8)"
    assert_refused(function, ValueError, message, (make(values(*SHAPE)),), {"residual": make(np.ones(shape))})


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_dtype_of_residual(make: Make, function: Any, dtype: str) -> None:
    message = f"residual has dtype {dtype}; for x of dtype float32 it must be float32"
    assert_refused(function, TypeError, message, (make(values(*SHAPE)),), {"residual": make(np.ones(SHAPE), dtype)})


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (-1, (7,), (8,)),
        (-1, (1,), (8,)),
        (-1, (), (8,)),
        (-1, (1, 8), (8,)),
        (-1, (4, 6, 8), (8,)),
        (1, (8,), (6,)),
        ((1, 2), (8,), (6, 8)),
        ((1, 2), (8, 6), (6, 8)),
        ((1, 2), (48,), (6, 8)),
        ((2, 0), (8, 4), (4, 8)),
    ],
)
def test_shapes_of_weight_and_bias(make: Make, name: str, axis: Any, shape: Any, expected: Any) -> None:
    message = f"{name} has shape {shape}; for x of shape (4, 6, 8) it must be {expected}"
    refused(ValueError, message, make(values(*SHAPE)), axis=axis, **{name: make(np.ones(shape))})


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weight_and_bias_must_be_contiguous(make: Make, name: str) -> None:
    x = make(values(*SHAPE))
    message = f"{name} has strides (2,) (in elements) for shape (8,); it must be C-contiguous"
    refused(ValueError, message, x, **{name: make(np.ones(16))[::2]})
    message = f"{name} has strides (1, 6) (in elements) for shape (6, 8); it must be C-contiguous"
    refused(ValueError, message, x, axis=(1, 2), **{name: make(np.ones((8, 6))).T})
    message = f"{name} has strides (0,) (in elements) for shape (8,); it must be C-contiguous"
    broadcast = make(np.ones(1)).expand(8) if make is as_torch_tensor else np.broadcast_to(make(np.ones(1)), (8,))
    refused(ValueError, message, x, **{name: broadcast})


@pytest.mark.parametrize("shape", [(4, 6, 7), (4, 48), (192,), (1, 4, 6, 8), (), (8, 6, 4)])
def test_shape_of_out(make: Make, shape: Any) -> None:
    message = f"out has shape {shape}; for x of shape (4, 6, 8) it must be (4, 6, 8)"
    refused(ValueError, message, make(values(*SHAPE)), out=make(np.ones(shape)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_dtype_of_out(make: Make, dtype: str) -> None:
    message = f"out has dtype {dtype}; for x of dtype float32 it must be float32"
    refused(TypeError, message, make(values(*SHAPE)), out=make(np.ones(SHAPE), dtype))


def test_out_must_be_contiguous(make: Make) -> None:
    message = "out has strides (48, 1, 6) (in elements) for shape (4, 6, 8); it must be C-contiguous"
    columns_first = make(np.ones((4, 8, 6)))
    out = columns_first.transpose(1, 2) if make is as_torch_tensor else columns_first.transpose(0, 2, 1)
    refused(ValueError, message, make(values(*SHAPE)), out=out)
    message = "out has strides (96, 16, 2) (in elements) for shape (4, 6, 8); it must be C-contiguous"
    refused(ValueError, message, make(values(*SHAPE)), out=make(np.ones((4, 6, 16)))[..., ::2])


def test_out_that_is_read_only() -> None:
    out = np.ones(SHAPE, np.float32)
    out.flags.writeable = False
    refused(ValueError, "out is read-only", as_numpy_array(values(*SHAPE)), out=out)


def test_out_where_gradients_are_recorded() -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    message = "out cannot be given where gradients are recorded; use torch.no_grad() or leave it out"
    with pytest.raises(ValueError) as raised:
        cunorm.layer_norm(x, out=torch.ones(SHAPE))
    assert message in str(raised.value)


# ---- Gradients.


def _gradient_arguments(make: Make) -> tuple[tuple[int, ...], dict[str, Any]]:
    dy, x = make(values(*SHAPE)), make(values(*SHAPE))
    mean, rstd = make(values(4, 6)), make(values(4, 6))
    return SHAPE, {"dy": dy, "x": x, "weight": make(np.ones(8)), "mean": mean, "rstd": rstd}


def gradient_refused(error: type[Exception], message: str, arguments: dict[str, Any], **options: Any) -> None:
    assert_refused(cunorm.layer_norm_backward, error, message, (), arguments | options)


@pytest.mark.parametrize("shape", [(4, 6, 7), (24, 8), (4, 6, 8, 1), (8,)])
def test_shape_of_dy(make: Make, shape: Any) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"dy has shape {shape}; for x of shape (4, 6, 8) it must be (4, 6, 8)"
    gradient_refused(ValueError, message, arguments | {"dy": make(np.ones(shape))})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64"])
def test_dtype_of_dy(make: Make, dtype: str) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"dy has dtype {dtype}; for x of dtype float32 it must be float32"
    gradient_refused(TypeError, message, arguments | {"dy": make(np.ones(SHAPE), dtype)})


def test_gradient_of_the_sum(make: Make) -> None:
    _, arguments = _gradient_arguments(make)
    message = "dresidual_out has shape (8,); for x of shape (4, 6, 8) it must be (4, 6, 8)"
    gradient_refused(ValueError, message, arguments, dresidual_out=make(np.ones(8)))
    message = "dresidual_out has dtype float64; for x of dtype float32 it must be float32"
    gradient_refused(TypeError, message, arguments, dresidual_out=make(np.ones(SHAPE), "float64"))


def test_bias_of_the_gradient(make: Make) -> None:
    _, arguments = _gradient_arguments(make)
    message = "bias has shape (7,); for x of shape (4, 6, 8) it must be (8,)"
    gradient_refused(ValueError, message, arguments, bias=make(np.ones(7)), activation="relu")
    gradient_refused(ValueError, message, arguments, bias=make(np.ones(7)))


@pytest.mark.parametrize("name", ["mean", "rstd"])
@pytest.mark.parametrize("shape", [(4,), (24,), (4, 6, 1), (4, 6, 8), (6, 4), ()])
def test_shapes_of_the_statistics(make: Make, name: str, shape: Any) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"{name} has shape {shape}; for x of shape (4, 6, 8) it must be (4, 6)"
    gradient_refused(ValueError, message, arguments | {name: make(np.ones(shape))})


@pytest.mark.parametrize("name", ["mean", "rstd"])
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "expected"),
    [
        ("float32", "float64", "float32"),
        ("float16", "float16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float64", "float32", "float64"),
        ("float32", "int32", "float32"),
    ],
)
def test_dtypes_of_the_statistics(make: Make, name: str, x_dtype: str, dtype: str, expected: str) -> None:
    x, right, wrong = make(values(*SHAPE), x_dtype), make(np.ones((4, 6)), expected), make(np.ones((4, 6)), dtype)
    arguments = {"dy": x, "x": x, "weight": None, "mean": right, "rstd": right}
    message = f"{name} has dtype {dtype}; for x of dtype {x_dtype} it must be {expected}"
    gradient_refused(TypeError, message, arguments | {name: wrong})


@pytest.mark.parametrize("name", ["mean", "rstd"])
def test_statistics_must_be_contiguous(make: Make, name: str) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"{name} has strides (1, 4) (in elements) for shape (4, 6); it must be C-contiguous"
    gradient_refused(ValueError, message, arguments | {name: make(np.ones((6, 4))).T})


def test_weight_of_the_gradient(make: Make) -> None:
    _, arguments = _gradient_arguments(make)
    message = "weight has shape (7,); for x of shape (4, 6, 8) it must be (8,)"
    gradient_refused(ValueError, message, arguments | {"weight": make(np.ones(7))})
    message = "weight has dtype int32; it must be one of float16, bfloat16, float32, float64"
    gradient_refused(TypeError, message, arguments | {"weight": make(np.ones(8), "int32")})


@pytest.mark.parametrize("mask", [(), (True,), (True, False), (True, True, True, False), [True, True]])
def test_output_mask_of_another_length(make: Make, mask: Any) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"output_mask must be three bools, for dx, dweight and dbias; got {mask!r}"
    gradient_refused(ValueError, message, arguments, output_mask=mask)


@pytest.mark.parametrize("mask", [None, True, "yes", (1, 1, 1), (True, None, True), ("dx", "dweight", "dbias")])
def test_output_mask_of_another_type(make: Make, mask: Any) -> None:
    _, arguments = _gradient_arguments(make)
    message = f"output_mask must be three bools, for dx, dweight and dbias; got {mask!r}"
    gradient_refused(TypeError, message, arguments, output_mask=mask)


# ---- Devices.


def test_a_device_that_is_neither() -> None:
    x = torch.ones(SHAPE)
    meta = {name: torch.ones(shape, device="meta") for name, shape in (("weight", (8,)), ("out", SHAPE))}
    for name, tensor in meta.items():
        message = f"{name} is on device meta; it must be on a CUDA device or the CPU"
        refused(RuntimeError, message, x, **{name: tensor})


def _elsewhere(
    monkeypatch: pytest.MonkeyPatch, make: Make, places: dict[str, tuple[str, int]], pointer: int = 0
) -> None:
    """Let the adapter say that the arguments named in ``places`` are on those devices."""
    adapter = adapters.adapter_of(make(values(2)))
    view = adapter.view

    def faked(tensor: Any, name: str) -> View:
        seen = view(tensor, name)
        return seen._replace(device=places[name], pointer=4096 + pointer) if name in places else seen

    monkeypatch.setattr(adapter, "view", faked)
    monkeypatch.setattr(execute, "_calls", {})  # a kind of call that was prepared is not looked at again


@pytest.mark.parametrize("name", ["residual", "weight", "bias", "out"])
def test_tensors_on_different_devices(monkeypatch: pytest.MonkeyPatch, make: Make, name: str) -> None:
    x, other = make(values(*SHAPE)), make(np.ones(SHAPE if name in ("residual", "out") else 8))
    _elsewhere(monkeypatch, make, {"x": ("cuda", 1)})
    message = f"{name} is on the CPU and x on CUDA device 1; they must be on one device"
    refused(RuntimeError, message, x, **{name: other})
    _elsewhere(monkeypatch, make, {"x": ("cuda", 1), name: ("cuda", 0)})
    message = f"{name} is on CUDA device 0 and x on CUDA device 1; they must be on one device"
    refused(RuntimeError, message, x, **{name: other})


@pytest.mark.parametrize("name", ["dy", "dresidual_out", "weight", "bias", "mean", "rstd"])
def test_gradients_on_different_devices(monkeypatch: pytest.MonkeyPatch, make: Make, name: str) -> None:
    _, arguments = _gradient_arguments(make)
    arguments |= {"dresidual_out": make(values(*SHAPE)), "bias": make(np.ones(8))}
    _elsewhere(monkeypatch, make, {name: ("cuda", 2)})
    message = f"{name} is on CUDA device 2 and x on the CPU; they must be on one device"
    gradient_refused(RuntimeError, message, arguments)


def test_addresses_that_are_no_whole_elements(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """A GPU cannot read them; a CPU can."""
    _elsewhere(monkeypatch, make, {"x": ("cuda", 0)}, pointer=2)
    message = "x lies at an address that is no multiple of its element size, 4 bytes"
    refused(ValueError, message, make(values(*SHAPE)))


# ---- CuPy and the driver.


@pytest.fixture
def fresh_launch() -> Iterator[None]:
    """What ``launch`` has found out and what was prepared with it, forgotten before and after."""
    kept = (cuda.cupy.cache_clear, cuda.device.cache_clear, execute.forget_prepared)
    for forget in kept:
        forget()
    yield
    for forget in kept:
        forget()


@pytest.mark.usefixtures("fresh_launch")
def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = (
        "a tensor on a CUDA device needs CuPy, which is not installed: "
        'install cunorm with the extra "cuda12x" (or "cuda13x", by the CUDA version of the driver)'
    )
    assert_refused(cuda.cupy, RuntimeError, message, (), {})
    assert_refused(cuda.device, RuntimeError, message, (0,), {})
    _elsewhere(monkeypatch, as_torch_tensor, {"x": ("cuda", 0)})
    refused(RuntimeError, message, torch.ones(SHAPE))


@pytest.mark.usefixtures("fresh_launch")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise PermissionError(13, 'Permission denied', '/home/x/.cupy')", "Permission denied: '/home/x/.cupy'"),
        ("raise ImportError('a page of advice') from OSError('libcudart.so.12: cannot open')", "cannot open"),
    ],
)
def test_a_cupy_that_does_not_load(text: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path(tmp_path, "cupy.py").write_text(text)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    _elsewhere(monkeypatch, as_torch_tensor, {"x": ("cuda", 0)})
    refused(RuntimeError, "a tensor on a CUDA device needs CuPy, which does not load: ", torch.ones(SHAPE))
    refused(RuntimeError, reason, torch.ones(SHAPE))
    resources._compile.cache_clear()
    assert "unknown (needs CuPy's NVRTC)" in str(cunorm.explain(values(*SHAPE)))
    assert gpus.cuda_devices()[1].startswith("CuPy does not load: ")


class CUDARuntimeError(RuntimeError):
    """CuPy's exception of that name, without CuPy."""


def _fake_cupy(monkeypatch: pytest.MonkeyPatch, driver: int, runtime: int, error: str) -> None:
    def get_device_properties(index: int) -> None:
        raise CUDARuntimeError(error)

    fake = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceProperties=get_device_properties,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: runtime,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=fake)))  # type: ignore[misc]


@pytest.mark.usefixtures("fresh_launch")
@pytest.mark.parametrize(
    ("driver", "runtime", "error", "hint"),
    [
        (11040, 12090, "insufficient", " (the NVIDIA driver supports CUDA 11.4; this CuPy needs CUDA 12.0 or later)"),
        (12080, 13000, "insufficient", " (the NVIDIA driver supports CUDA 12.8; this CuPy needs CUDA 13.0 or later)"),
        (0, 12090, "no driver", " (the NVIDIA driver is missing; this CuPy needs CUDA 12.0 or later)"),
        (12020, 12090, "invalid device ordinal", ""),
    ],
)
def test_a_driver_that_does_not_do(
    monkeypatch: pytest.MonkeyPatch, driver: int, runtime: int, error: str, hint: str
) -> None:
    _fake_cupy(monkeypatch, driver, runtime, error)
    with pytest.raises(RuntimeError) as raised:
        cuda.device(3)
    assert str(raised.value) == f"CUDA device 3 cannot be used: {error}{hint}"
    assert isinstance(raised.value.__cause__, CUDARuntimeError)
    _elsewhere(monkeypatch, as_torch_tensor, {"x": ("cuda", 3)})
    refused(RuntimeError, str(raised.value), torch.ones(SHAPE))


@pytest.mark.usefixtures("fresh_launch")
def test_this_machine_without_a_driver() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.driverGetVersion() > 0:
        pytest.skip("needs a machine without an NVIDIA driver")
    message = "(the NVIDIA driver is missing; this CuPy needs CUDA 1"
    assert_refused(cuda.device, RuntimeError, "CUDA device 0 cannot be used: ", (0,), {})
    assert_refused(cuda.device, RuntimeError, message, (0,), {})
