"""Calls of a row norm or an activation in jax.numpy: what `vmap` makes of them that no kernel has.

That is a weight or bias of its own for each example, and the gradients of the weight and bias by example. XLA fuses it.
The formulas are those of `cunorm.layer_norm_backward`, in float32 or float64 until the result is rounded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cunorm.adapters.jax.axes import axes_of
from cunorm.adapters.jax.call import Call
from cunorm.problem import DTYPES, Norm
from cunorm.row_norm import RowNorm

__all__ = ["plain_call"]

_sharding: Any = jax.sharding  # much of it has no types

# Where the gelus are 0 or the identity in any dtype.
_FAR = 40


def _with_limits(gelu: Any) -> Any:
    """A gelu that has its limits at infinity, and so has its derivative: jax.nn's are NaN."""
    return lambda z: jnp.where(z >= _FAR, z, gelu(jnp.clip(z, -_FAR, _FAR)))


def _gelu_tanh(z: Any) -> Any:
    """z * (1 + tanh(u)) / 2 as z * sigmoid(2 * u), which keeps its digits in the tail."""
    return z * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * z * (1 + 0.044715 * z * z))


_ACTIVATIONS: dict[str, Any] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": _with_limits(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": _with_limits(_gelu_tanh),
}


def plain_call(call: Call, *given: Any) -> tuple[Any, ...]:
    """The results that there are."""
    given = _split_as_x(call, given)
    results = (_forward if call.direction == "forward" else _backward)(call.op, *call.operands(given))
    outputs = call.outputs(given)
    return tuple(
        result.astype(output.dtype) for result, output in zip(itertools.compress(results, call.results), outputs)
    )


def _split_as_x(call: Call, given: Sequence[Any]) -> tuple[Any, ...]:
    """The operands that there are, on a mesh with explicit axes all split as x is, so that the results are.

    The types that the primitive gives its results, which `jit` may have taken before `vmap`, say so.
    """
    x = jax.typeof(call.x_of(given))
    axes = axes_of(call.op, x.shape)

    def split(array: Any, role: str) -> Any:
        found, spec = jax.typeof(array).sharding, _sharding.PartitionSpec(*axes.split(role, x.sharding.spec))
        if found.mesh.empty or found.spec == spec:
            return array
        return _sharding.reshard(array, _sharding.NamedSharding(found.mesh, spec))

    return tuple(map(split, given, call.roles[0]))


def _forward(op: Any, x: Any, residual: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    columns = axes_of(op, x.shape).vector
    residual_out = x if residual is None else x + residual
    z, mean, rstd = _wide(residual_out), None, None
    if isinstance(op, RowNorm):
        if op.norm.centered:
            mean = 0
            for _ in range(2):  # the second time for what the mean of all lost to rounding
                rest = z.mean(columns)
                mean, z = mean + rest, z - jnp.expand_dims(rest, columns)
        rstd = jax.lax.rsqrt((z * z).mean(columns) + op.eps)
        z = z * jnp.expand_dims(rstd, columns)
    return _finish(op, columns, z, weight, bias), residual_out, mean, rstd


def _backward(op: Any, dy: Any, added: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any) -> tuple[Any, ...]:
    columns = axes_of(op, x.shape).vector
    shape = [x.shape[axis] for axis in columns]
    weight = jnp.ones(shape) if weight is None else weight  # either may be absent and have a gradient all the same
    bias = jnp.zeros(shape) if bias is None else bias
    z = _wide(x)
    if isinstance(op, RowNorm):
        rstd = jnp.expand_dims(rstd, columns)
        z = (z if mean is None else z - jnp.expand_dims(mean, columns)) * rstd
    dx, dweight, dbias = jax.vjp(functools.partial(_finish, op, columns), z, weight, bias)[1](_wide(dy))
    if isinstance(op, RowNorm):
        centre = dx.mean(columns, keepdims=True) if op.norm.centered else 0
        dx = rstd * (dx - centre - z * (dx * z).mean(columns, keepdims=True))
    return dx if added is None else dx + _wide(added), dweight, dbias


def _finish(op: Any, columns: tuple[int, ...], z: Any, weight: Any, bias: Any) -> Any:
    """What is done to the normalized numbers, or to x where nothing is normalized."""
    norm = op.norm if isinstance(op, RowNorm) else Norm(activation=op.activation)
    rows = [axis for axis in range(z.ndim) if axis not in columns]
    if weight is not None:
        z = z * (norm.weight_offset + jnp.expand_dims(weight.astype(z.dtype), rows))
    if bias is not None:
        z = z + jnp.expand_dims(bias.astype(z.dtype), rows)
    return z if norm.activation is None else _ACTIVATIONS[norm.activation](z)


def _wide(array: Any) -> Any:
    return array.astype(DTYPES[str(array.dtype)].compute)
