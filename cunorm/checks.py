"""Checks of a call's arguments. Every message names the argument, what it was and what it must be."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from cunorm.prepared import Output
from cunorm.problem import ACTIVATIONS, DTYPES, View, contiguous_strides
from cunorm.text import kind_of

__all__ = [
    "as_float",
    "check_activation",
    "check_axis",
    "check_bool",
    "check_channels",
    "check_convention",
    "check_data_format",
    "check_dtype",
    "check_eps",
    "check_groups",
    "check_like",
    "check_mask",
    "check_momentum",
    "check_num_groups",
    "check_one_of",
    "check_out",
    "check_pointwise",
    "check_pointwise_mask",
    "check_running",
    "check_vector",
    "check_weight_offset",
    "check_x",
    "element_strides",
    "memory_order",
    "no_tensor",
]

_BOOLS = bool, np.bool_

# Each data format's number of dimensions, None for any from two on, and whether the channels come last.
_DATA_FORMATS: dict[str, tuple[int | None, bool]] = {
    "NC...": (None, False),
    "N...C": (None, True),
    "NCW": (3, False),
    "NWC": (3, True),
    "NCHW": (4, False),
    "NHWC": (4, True),
    "NCDHW": (5, False),
    "NDHWC": (5, True),
}


def no_tensor(name: str, given: Any, framework: str, must: str) -> TypeError:
    """What to raise for an argument that is no tensor of x's framework, by example "JAX": it must be "a JAX array".

    The name is "x" where x itself is none, and a layer's "input".
    """
    beside = "" if name in ("x", "input") else f"beside a {framework} x "
    kind = f"a NumPy scalar, {kind_of(given)}" if isinstance(given, np.generic) else kind_of(given)
    message = f"{name} is {kind}; {beside}it must be {must}{value_of_keras(type(given))}"
    sizes = given if name == "weight" and isinstance(given, (tuple, list)) else ()
    if sizes and all(isinstance(size, numbers.Integral) for size in sizes):
        # In its place torch.nn.functional.layer_norm takes this.
        message += "; layer_norm and rms_norm have no normalized_shape: see their axis"
    return TypeError(message)


def value_of_keras(kind: type) -> str:
    """What to add to a message that refuses an object of a type, if it is a Keras variable's."""
    # torch.compile traces slices of these, but no startswith.
    is_variable = kind.__module__[:6] == "keras." and kind.__name__ == "Variable"
    return ", such as its .value" if is_variable else ""


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
    if not _is_sequence(output_mask) or not all(isinstance(item, _BOOLS) for item in output_mask):
        raise TypeError(message)
    if len(output_mask) != count:
        raise ValueError(message)
    return tuple(map(bool, output_mask))


def as_float(number: Any) -> float:
    """A real number as a float: infinite where no float is as large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _real(name: str, value: Any, must: str) -> float:
    # Most are floats, which this is quick to tell.
    if type(value) is float:
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {kind_of(value)}; it must be {must}")
    return as_float(value)


def check_one_of(name: str, value: Any, known: Collection[str], must: str) -> str:
    """An argument of a user's call that is one of some strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {kind_of(value)}; it must be {must}")
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be {must}")
    return str(value)


def check_eps(eps: Any) -> float:
    """The eps of a user's call."""
    value = _real("eps", eps, "a number, finite and not negative")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"eps must be finite and not negative; got {value}")
    return value


def check_weight_offset(weight_offset: Any) -> float:
    """The weight_offset of a user's call."""
    value = _real("weight_offset", weight_offset, "a finite number")
    if not math.isfinite(value):
        raise ValueError(f"weight_offset must be finite; got {value}")
    return value


def check_activation(activation: Any) -> str | None:
    """The activation of a user's call."""
    if activation is None:
        return None
    return check_one_of("activation", activation, ACTIVATIONS, f"None or one of {', '.join(map(repr, ACTIVATIONS))}")


def check_axis(axis: Any) -> tuple[int, ...]:
    """The axes of a user's call as a tuple, still negative where they were: the dimensions are not known yet."""
    try:
        return tuple(map(_index, axis)) if _is_sequence(axis) else (_index(axis),)
    except TypeError:
        raise TypeError(f"axis must be an int or a sequence of ints; got {axis!r}") from None


def _index(value: Any) -> int:
    """An int, or what stands for one; a bool, which is an int to Python, is an argument in another's place."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _is_sequence(values: Any) -> bool:
    return isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim == 1)


def check_data_format(data_format: Any) -> str:
    """The data_format of a user's call."""
    return check_one_of("data_format", data_format, _DATA_FORMATS, f"one of {', '.join(map(repr, _DATA_FORMATS))}")


def check_num_groups(num_groups: Any) -> int:
    """The num_groups of a user's call."""
    try:
        count = _index(num_groups)
    except TypeError:
        raise TypeError(f"num_groups is {kind_of(num_groups)}; it must be a positive int") from None
    if count < 1:
        raise ValueError(f"num_groups is {count}; it must be positive")
    return count


def check_bool(name: str, value: Any) -> bool:
    """An argument of a user's call that is a bool."""
    if not isinstance(value, _BOOLS):
        raise TypeError(f"{name} is {kind_of(value)}; it must be a bool")
    return bool(value)


def check_momentum(momentum: Any) -> float:
    """The momentum of a user's call."""
    value = _real("momentum", momentum, "a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"momentum is {value}; it must be from 0 to 1")
    return value


def check_convention(convention: Any) -> str:
    """The convention of a user's call, as to what momentum means."""
    return check_one_of("convention", convention, ("torch", "keras"), "'torch' or 'keras'")


def check_running(running_mean: Any, running_var: Any, training: bool) -> tuple[Any, ...]:
    """The running statistics of a user's call: both, or none."""
    if running_mean is None and running_var is None:
        if not training:
            must = "with training=False they must be given"
            raise ValueError(f"running_mean and running_var are None; {must}")
        return ()
    if running_mean is None or running_var is None:
        missing, other = ("running_mean", "running_var") if running_mean is None else ("running_var", "running_mean")
        raise ValueError(f"{missing} is None and {other} is given; they must be given both, or neither")
    return running_mean, running_var


def check_channels(x: View, data_format: str) -> int:
    """Check x for a data format. Returns the axis of its channels."""
    check_dtype(x, "x")
    dimensions = len(x.shape)
    expected, last = _DATA_FORMATS[data_format]
    if dimensions < 2 or expected not in (None, dimensions):
        must = f"for data_format {data_format!r} it must have {expected or '2 or more'}"
        raise ValueError(f"x has {dimensions} dimensions (shape {x.shape}); {must}")
    return dimensions - 1 if last else 1


def check_groups(x: View, channels: int, num_groups: int) -> int:
    """How many channels each group has."""
    if channels % num_groups or not channels:
        must = "the number of channels must be a positive multiple of it"
        raise ValueError(f"num_groups is {num_groups} and x has {channels} channels (shape {x.shape}); {must}")
    return channels // num_groups


def memory_order(x: View, channel_axis: int) -> tuple[int, ...] | None:
    """The order of x's axes in memory, if it is dense there with its channels on the other side of the spatial axes.

    None where it is C-contiguous, or lies in any other way.
    """
    spatial = [i for i in range(1, len(x.shape)) if i != channel_axis]
    order = (0, *spatial, channel_axis) if channel_axis == 1 else (0, channel_axis, *spatial)
    if _is_contiguous(x) or not _has_strides(x, Output(x.shape, x.dtype, order).strides):
        return None
    return order


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


def element_strides(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array in elements, of those in bytes."""
    itemsize = itemsize or 1  # 0 for some dtypes that `check_dtype` will refuse
    if any(step % itemsize for step in strides):
        raise ValueError(f"{name} has strides {strides} that are no multiples of its element size, {itemsize} bytes")
    return tuple(step // itemsize for step in strides)


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


def check_out(out: View, y: Output, x: View) -> None:
    """Check a tensor to write y to: as y would be, also in memory."""
    check_like(out, "out", y.shape, y.dtype, x, contiguous=y.permutation is None)
    if not _has_strides(out, y.strides):
        found = f"out has strides {out.strides} (in elements) for shape {y.shape}"
        raise ValueError(f"{found}; it must lie in memory as x does, with strides {y.strides}")


def _device_name(view: View) -> str:
    return "the CPU" if view.device[0] == "cpu" else f"CUDA device {view.device[1]}"


def _is_contiguous(view: View) -> bool:
    return _has_strides(view, contiguous_strides(view.shape))


def _has_strides(view: View, strides: Sequence[int]) -> bool:
    """Whether an element lies where it would with these strides."""
    # The strides first: nothing can be asked of a size that is not counted yet, as torch.compile has them.
    same = all(ours == theirs or size == 1 for size, ours, theirs in zip(view.shape, view.strides, strides))
    return same or 0 in view.shape
