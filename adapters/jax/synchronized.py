"""Batch norm of a batch that several devices hold: each computes the statistics of its part, and they are merged.

All parts must be of one size, so that mean and variance are ``mean(means)`` and ``mean(variances + (means - mean)^2)``
over the parts (Chan, Golub, LeVeque 1983, The American Statistician 37:242). What is normalized with them is normalized
by the kernels for given statistics; what that leaves out of dx is added by XLA: with the sums over all parts,
``dx = rstd * weight * (dy - dbias / n - xhat * dweight / n)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from cunorm.adapters.jax.axes import axes_of
from cunorm.adapters.jax.primitive import alike, gradients, results
from cunorm.channel_norm import ChannelNorm
from cunorm.prepared import Gradients

__all__ = ["merged_statistics", "synchronized_batch_norm", "synchronized_gradients", "synchronized_results"]

Names = tuple[str, ...]

_lax: Any = jax.lax  # much of it has no types


def merged_statistics(op: ChannelNorm, names: Names, x: Any) -> tuple[Any, Any]:
    """Mean and variance by channel of all that the axes of these names hold."""
    _, _, mean, var = results(ChannelNorm.of("batch_norm_stats", op.data_format), (x, None, None, None), True)
    merged = _lax.pmean(mean, names)
    return merged, _lax.pmean(var + (mean - merged) ** 2, names)


def synchronized_results(
    op: ChannelNorm, names: Names, x: Any, weight: Any, bias: Any
) -> tuple[Any, tuple[Any, Any], tuple[Any, Any]]:
    """y of this part; mean and variance; mean and rstd."""
    mean, var = merged_statistics(op, names, x)
    y, _, _, rstd = results(_given(op), (x, None, weight, bias, mean, var), True)
    return y, (mean, var), (mean, rstd)


def synchronized_gradients(
    op: ChannelNorm,
    names: Names,
    parts: Any,
    arrays: tuple[Any, ...],
    mask: tuple[bool, bool, bool],
    bias_dtype: str | None,
) -> Gradients:
    """dx, dweight, dbias of dy, x, weight, bias, mean, rstd: the sums of this part alone. ``parts`` is their number."""
    dy, x, weight, bias, mean, rstd = arrays
    (channel,) = axes_of(op, x.shape).vector
    wide = jnp.ones(x.shape[channel], rstd.dtype) if weight is None else weight.astype(rstd.dtype)
    dx, dweight, dbias = gradients(
        _given(op), (dy, None, x, wide, bias, mean, rstd), (mask[0], True, True), rstd.dtype.name
    )
    if mask[0]:
        count = math.prod(x.shape) // x.shape[channel] * parts
        of_xhat, of_one = _lax.psum(jnp.stack([dweight, dbias]), names) / count
        other = [axis for axis in range(x.ndim) if axis != channel]
        mean, rstd, wide, of_xhat, of_one = (jnp.expand_dims(v, other) for v in (mean, rstd, wide, of_xhat, of_one))
        xhat = (x.astype(rstd.dtype) - mean) * rstd
        dx = (dx.astype(rstd.dtype) - rstd * wide * (of_one + xhat * of_xhat)).astype(x.dtype)
    weight_dtype = x.dtype if weight is None else weight.dtype
    dweight, dbias = dweight.astype(weight_dtype), dbias.astype(bias_dtype or weight_dtype)
    return dx, dweight if mask[1] else None, dbias if mask[2] else None


def _given(op: ChannelNorm) -> ChannelNorm:
    """The op with given statistics."""
    return ChannelNorm.of("batch_norm", op.data_format, op.eps, op.activation, training=False)


def synchronized_batch_norm(op: ChannelNorm, names: Names, x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    """y of this part, mean and variance; differentiable in x, weight and bias, where mean and variance are constants.

    To be called inside `jax.vmap`, `jax.shard_map` or `jax.pmap` with axes of these names.
    """
    y, mean, var = _differentiable(op, names, *alike((x, weight, bias)))
    return y, mean, var


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(op: ChannelNorm, names: Names, x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    y, statistics, _ = synchronized_results(op, names, x, weight, bias)
    return y, *statistics


def _forward_rule(op: ChannelNorm, names: Names, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    y, statistics, kept = synchronized_results(op, names, x, weight, bias)
    # Here, since gradients under vmap are computed where its axis has no size, though it can be summed over.
    parts = jax.lax.axis_size(names)
    return (y, *statistics), (parts, x, weight, bias, *kept)


def _backward_rule(op: ChannelNorm, names: Names, residuals: Any, cotangents: Any) -> Gradients:
    parts, *arrays = residuals
    _, weight, bias, _, _ = arrays
    mask = (True, weight is not None, bias is not None)
    bias_dtype = None if bias is None else bias.dtype.name
    return synchronized_gradients(op, names, parts, (cotangents[0], *arrays), mask, bias_dtype)


_differentiable.defvjp(_forward_rule, _backward_rule)
