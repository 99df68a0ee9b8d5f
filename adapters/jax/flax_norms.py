"""What Flax's norm layers compute, by cunorm: axes, dtypes and statistics in Flax's terms. Flax is not imported here.

The result has the dtype that Flax gives it; where that is wider than x's, x is widened first, and where it is narrower,
the result is rounded to it. The variance is always that of the differences from the mean, as with Flax's
``use_fast_variance=False``, whatever a layer says: it is the more accurate one, and costs the kernels nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

import cunorm
from cunorm.adapters.jax.axes import view_of
from cunorm.adapters.jax.synchronized import synchronized_batch_norm
from cunorm.channel_norm import ChannelNorm
from cunorm.checks import check_dtype, no_tensor

__all__ = ["array_of", "batch_norm", "check_axes", "check_layer", "group_norm", "instance_norm", "moved", "row_norm"]

_MUST = "it must be None: cunorm's layers have none, Flax's own have"


def check_layer(layer: Any, mask: Any, axis_name: bool = False) -> None:
    """Refuse what Flax's layer has and cunorm has not. ``axis_name`` says whether that may be given."""
    name = type(layer).__name__
    if mask is not None:
        raise ValueError(f"mask is given to cunorm's {name}; {_MUST}")
    if layer.axis_name is not None and not axis_name:
        raise ValueError(f"axis_name of {name} is {layer.axis_name!r}; {_MUST}")
    if layer.axis_index_groups is not None:
        raise ValueError(f"axis_index_groups of {name} is {layer.axis_index_groups!r}; {_MUST}")
    if not getattr(layer, "force_float32_reductions", True):
        raise ValueError(f"force_float32_reductions of {name} is False; it must be True, as all sums here are float32")


def array_of(x: Any) -> Any:
    """x of a layer's call as a JAX array. One without axes is a ValueError."""
    if x is None:
        raise no_tensor("x", x, "JAX", "an array")
    array = jnp.asarray(x)
    if not array.ndim:
        raise ValueError("x has shape (); it must have an axis of channels")
    return array


def check_axes(x: Any, axes: Any, name: str) -> tuple[int, ...]:
    """The axes that a layer has under this name, not negative and sorted. One that x has not is a ValueError."""
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not all(-x.ndim <= axis < x.ndim for axis in given):
        raise ValueError(f"{name} is {axes} for x of shape {x.shape}; it must name axes that x has")
    return tuple(sorted({axis % x.ndim for axis in given}))


def row_norm(
    function: Any, x: Any, scale: Any, bias: Any, dtype: Any, epsilon: float, reduction_axes: Any, feature_axes: Any
) -> Any:
    """`cunorm.layer_norm` or `cunorm.rms_norm`. Fused with scale and bias where these go along the normalized axes."""
    reduced, features = check_axes(x, reduction_axes, "reduction_axes"), check_axes(x, feature_axes, "feature_axes")
    shape = [x.shape[axis] for axis in features]
    scale, bias = (None if vector is None else vector.reshape(shape) for vector in (scale, bias))
    if reduced == features or (scale is None and bias is None):
        return function(_wide(x, dtype), scale, bias, axis=reduced, eps=epsilon).astype(dtype)
    y = function(_wide(x, jnp.promote_types(dtype, jnp.float32)), axis=reduced, eps=epsilon)
    return _scaled(y, scale, bias, features).astype(dtype)


def group_norm(
    x: Any, scale: Any, bias: Any, dtype: Any, epsilon: float, num_groups: int, reduction_axes: Any = None
) -> Any:
    """`cunorm.group_norm` of channels last, over the last axes; by default over all but the first."""
    every = range(min(1, x.ndim - 1), x.ndim)
    reduced = check_axes(x, every if reduction_axes is None else reduction_axes, "reduction_axes")
    first = x.ndim - len(reduced)
    if reduced != tuple(range(first, x.ndim)):
        raise ValueError(f"reduction_axes is {reduction_axes} for x of shape {x.shape}; it must be the last axes of x")
    samples = _wide(x, dtype).reshape(math.prod(x.shape[:first]), *x.shape[first:])
    y = cunorm.group_norm(samples, num_groups, scale, bias, data_format="N...C", eps=epsilon)
    return y.reshape(x.shape).astype(dtype)


def instance_norm(x: Any, scale: Any, bias: Any, dtype: Any, epsilon: float, feature_axes: Any) -> Any:
    """`cunorm.instance_norm`, of all axes but the first and those of features."""
    features = check_axes(x, feature_axes, "feature_axes")
    if 0 in features:
        raise ValueError(f"feature_axes is {feature_axes} for x of shape {x.shape}; the first axis must be the batch's")
    channels, data_format, restored = _with_channels(_wide(x, dtype), features)
    return restored(cunorm.instance_norm(channels, scale, bias, data_format=data_format, eps=epsilon)).astype(dtype)


def batch_norm(
    x: Any, scale: Any, bias: Any, given: Any, dtype: Any, epsilon: float, axis: Any, axis_name: Any = None
) -> tuple[Any, Any, Any]:
    """`cunorm.batch_norm` of all axes but ``axis``, by ``given`` mean and variance, or by its own. Those, too.

    With ``axis_name`` its own are those of all devices along that axis of a mesh, or of `jax.vmap`.
    """
    features = check_axes(x, axis, "axis")
    channels, data_format, restored = _with_channels(_wide(x, dtype), features)
    shape = [x.shape[feature] for feature in features]
    scale, bias = (None if vector is None else vector.reshape(-1) for vector in (scale, bias))
    if given is not None:
        running = dict(zip(("running_mean", "running_var"), (statistic.reshape(-1) for statistic in given)))
        options: dict[str, Any] = {"data_format": data_format, "eps": epsilon, "training": False}
        return restored(cunorm.batch_norm(channels, scale, bias, **running, **options)).astype(dtype), *given
    if axis_name is None and x.size == math.prod(shape):
        check_dtype(view_of(channels.shape, channels.dtype.name), "x")
        # One value a channel: that is the mean, and what differs from it is zero, but NaN of what is not finite.
        wide = _wide(x, jnp.promote_types(dtype, jnp.float32))
        mean = jax.lax.stop_gradient(x.astype(jnp.promote_types(x.dtype, jnp.float32))).reshape(shape)
        return _scaled(wide - wide, scale, bias, features).astype(dtype), mean, mean - mean
    if axis_name is None:
        options = {"data_format": data_format, "eps": epsilon, "training": True, "return_stats": True}
        y, mean, rstd = cunorm.batch_norm(channels, scale, bias, **options)
        var = jnp.maximum(1 / (rstd * rstd) - epsilon, 0)
    else:
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        op = ChannelNorm.of("batch_norm", data_format, epsilon)
        y, mean, var = synchronized_batch_norm(op, names, channels, scale, bias)
    return restored(y).astype(dtype), mean.reshape(shape), var.reshape(shape)


def moved(layer: Any, x: Any, running: Any, new: Any) -> Any:
    """A running statistic of a layer, moved by the new one of x.

    The new one is taken in Flax's dtype. Its own may be wider, that of the parameters say, and the running one would
    have it from then on.
    """
    dtype = jnp.promote_types(x.dtype if layer.dtype is None else layer.dtype, jnp.float32)
    return layer.momentum * running + (1 - layer.momentum) * new.astype(dtype)


def _wide(x: Any, dtype: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, dtype))


def _scaled(y: Any, scale: Any, bias: Any, features: tuple[int, ...]) -> Any:
    """y with scale and bias along the axes of features, by XLA."""
    shape = [size if axis in features else 1 for axis, size in enumerate(y.shape)]
    y = y if scale is None else y * scale.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _with_channels(x: Any, features: tuple[int, ...]) -> tuple[Any, str, Callable[[Any], Any]]:
    """x with the features for channels, its data format, and what gives a result x's shape again."""
    if features == (1,):
        return x, "NC...", lambda y: y
    last = tuple(range(-len(features), 0))
    moved = jnp.moveaxis(x, features, last)
    first = x.ndim - len(features)
    channels = moved.reshape(*(moved.shape[:first] or (1,)), math.prod(moved.shape[first:]))
    return channels, "N...C", lambda y: jnp.moveaxis(y.reshape(moved.shape), last, features)
