"""Checks of a call's arguments. Every message names the argument, what it was and what it must be."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cunorm.execute import Output
from cunorm.problem import ACTIVATIONS, DTYPES, View, contiguous_strides

__all__ = [
    "check_activation",
    "check_approximate",
    "check_axis",
    "check_dtype",
    "check_eps",
    "check_like",
    "check_mask",
    "check_pointwise",
    "check_pointwise_mask",
    "check_vector",
    "check_weight_offset",
    "check_x",
]


def check_mask(output_mask: Any) -> tuple[bool, bool, bool]:
    """The output_mask of a user's call."""
    dx, dweight, dbias = _check_bools(output_mask, 3, "three bools, for dx, dweight and dbias")
    return dx, dweight, dbias


def check_pointwise_mask(output_mask: Any, has_bias: bool) -> tuple[bool, bool, bool]:
    """The output_mask of a user's call of an op without a weight: likewise for dx, dweight and dbias."""
    dx, dbias = _check_bools(output_mask, 2, "two bools, for dx and dbias")
    return dx, False, dbias and has_bias


def _check_bools(output_mask: Any, count: int, what: str) -> tuple[bool, ...]:
    message = f"output_mask must be {what}; got {output_mask!r}"
    if not isinstance(output_mask, Sequence) or not all(isinstance(item, (bool, np.bool_)) for item in output_mask):
        raise TypeError(message)
    if len(output_mask) != count:
        raise ValueError(message)
    return tuple(map(bool, output_mask))


def check_eps(eps: Any) -> float:
    """The eps of a user's call."""
    # Most are floats, which this is quick to tell.
    if type(eps) is not float and not isinstance(eps, numbers.Real):
        raise TypeError(f"eps is a {type(eps).__qualname__}; it must be a number, finite and not negative")
    value = float(eps)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"eps must be finite and not negative; got {value}")
    return value


def check_weight_offset(weight_offset: Any) -> float:
    """The weight_offset of a user's call."""
    if not isinstance(weight_offset, numbers.Real):
        raise TypeError(f"weight_offset is a {type(weight_offset).__qualname__}; it must be a finite number")
    value = float(weight_offset)
    if not math.isfinite(value):
        raise ValueError(f"weight_offset must be finite; got {value}")
    return value


def check_activation(activation: Any) -> str | None:
    """The activation of a user's call."""
    if activation is None:
        return None
    must = f"it must be None or one of {', '.join(map(repr, ACTIVATIONS))}"
    if not isinstance(activation, str):
        raise TypeError(f"activation is a {type(activation).__qualname__}; {must}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; {must}")
    return str(activation)


def check_approximate(approximate: Any) -> str:
    """The activation that the approximate of a user's call means."""
    must = "it must be 'none' or 'tanh'"
    if not isinstance(approximate, str):
        raise TypeError(f"approximate is a {type(approximate).__qualname__}; {must}")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; {must}")
    return "gelu" if approximate == "none" else "gelu_tanh"


def check_axis(axis: Any) -> tuple[int, ...]:
    """The axes of a user's call as a tuple, still negative where they were: the dimensions are not known yet."""
    try:
        return tuple(map(operator.index, axis)) if isinstance(axis, Sequence) else (operator.index(axis),)
    except TypeError:
        raise TypeError(f"axis must be an int or a sequence of ints; got {axis!r}") from None


def check_x(x: View, axis: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Output]:
    """Check x and axis. Returns the axes, not negative and sorted; the shape over them; and what mean and rstd are."""
    check_dtype(x, "x")
    dimensions = len(x.shape)
    normalized = []
    for item in axis:
        if not -dimensions <= item < dimensions:
            raise ValueError(f"axis {item} is out of range for x with {dimensions} dimensions (shape {x.shape})")
        normalized.append(item % dimensions)
    if not normalized or len(set(normalized)) < len(normalized):
        raise ValueError(f"axis must name at least one axis and none twice; got {axis} for x of shape {x.shape}")
    normalized.sort()
    kept_shape = tuple(size for i, size in enumerate(x.shape) if i not in normalized)
    stats = Output(kept_shape, DTYPES[x.dtype].compute)
    return tuple(normalized), tuple(x.shape[i] for i in normalized), stats


def check_dtype(view: View, name: str) -> None:
    if view.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {view.dtype}; it must be one of {', '.join(DTYPES)}")
    itemsize = DTYPES[view.dtype].itemsize
    if view.device[0] == "cuda" and view.pointer % itemsize:
        raise ValueError(f"{name} lies at an address that is no multiple of its element size, {itemsize} bytes")


def check_vector(view: View | None, name: str, shape: tuple[int, ...], x: View, offset: float = 0.0) -> None:
    """Check a weight or bias: the shape of the normalized axes, any dtype, x's device. None is fine without offset."""
    if view is None:
        if offset:
            raise ValueError(f"{name}_offset is {offset} and {name} is None; without a {name} it must be 0")
        return
    check_dtype(view, name)
    check_like(view, name, shape, view.dtype, x, contiguous=True)


def check_pointwise(x: View, bias: View | None) -> None:
    """Check x, and a bias along its last axis."""
    check_dtype(x, "x")
    if bias is not None and not x.shape:
        must = "it goes along x's last axis, so for x of shape () it must be None"
        raise ValueError(f"bias has shape {bias.shape}; {must}")
    check_vector(bias, "bias", x.shape[-1:], x)


def check_like(view: View, name: str, shape: tuple[int, ...], dtype: str, x: View, *, contiguous: bool = False) -> None:
    """Check a tensor that must have this shape and dtype, on x's device."""
    if view.shape != shape:
        raise ValueError(f"{name} has shape {view.shape}; for x of shape {x.shape} it must be {shape}")
    if view.dtype != dtype:
        raise TypeError(f"{name} has dtype {view.dtype}; for x of dtype {x.dtype} it must be {dtype}")
    if view.device != x.device:
        raise RuntimeError(f"{name} is on {_device_name(view)} and x on {_device_name(x)}; they must be on one device")
    check_dtype(view, name)
    if contiguous and not _is_contiguous(view):
        raise ValueError(f"{name} has strides {view.strides} (in elements) for shape {shape}; it must be C-contiguous")


def _device_name(view: View) -> str:
    return "the CPU" if view.device[0] == "cpu" else f"CUDA device {view.device[1]}"


def _is_contiguous(view: View) -> bool:
    expected = contiguous_strides(view.shape)
    return 0 in view.shape or all(
        size == 1 or ours == theirs for size, ours, theirs in zip(view.shape, view.strides, expected)
    )
