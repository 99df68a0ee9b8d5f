"""`vmap`: where the batch axis of a call goes, so that it stays one call.

To a row norm or an activation it is another axis of rows. For an instance or group norm it joins the samples. Where the
statistics of a batch norm are by example, or weights or their gradients are, a norm of channels takes it for more
channels, which moves the axis beside them. A row norm has no kernel for the latter: that is left to jax.numpy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from cunorm.adapters.jax.axes import axes_of
from cunorm.adapters.jax.call import Call
from cunorm.adapters.jax.plain import plain_call
from cunorm.adapters.jax.primitive import bind, primitive
from cunorm.channel_norm import ChannelNorm
from cunorm.execute import Op
from cunorm.ops import RowNorm


def _batched(given: Sequence[Any], dims: Sequence[int | None], *, call: Call) -> tuple[list[Any], list[int]]:
    """The results that there are, all with the batch axis first."""
    size = next(array.shape[dim] for array, dim in zip(given, dims) if dim is not None)
    roles, _ = call.roles
    by_example = any(dim is not None for dim, role in zip(dims, roles) if role == "vector")
    if not isinstance(call.op, ChannelNorm):
        results = _plain(call, given, dims) if by_example else _more_rows(call, given, dims, size)
    elif call.op.over_samples or by_example or any(call.mask[1:]):
        results = _more_channels(call, given, dims, size)
    else:
        results = _merged(call, given, dims, size, {"x": 0, "statistic": 0})
    return results, [0] * len(results)


batching.primitive_batchers[primitive] = _batched


def _plain(call: Call, given: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    return list(jax.vmap(functools.partial(plain_call, call), tuple(dims))(*given))


def _more_rows(call: Call, given: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """With one more axis in front, except for the sums over rows, which are by example."""
    results = []
    if call.mask[0]:
        roles, _ = call.roles
        operands = zip(given, dims, roles)
        arrays = [array if role == "vector" else _batch_first(array, dim, size) for array, dim, role in operands]
        results += bind(dataclasses.replace(call.masked(True, False, False), op=_with_more_rows(call.op)), arrays)
    if any(call.mask[1:]):
        results += _plain(call.masked(False, *call.mask[1:]), given, dims)
    return results


def _with_more_rows(op: Op) -> Op:
    if not isinstance(op, RowNorm):
        return op
    axis = [i if i < 0 else i + 1 for i in op.axis]
    return RowNorm.of(axis, op.eps, op.norm.activation, op.norm.centered, op.norm.weight_offset)


def _more_channels(call: Call, given: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    op: Any = call.op
    array, dim = given[0], dims[0]
    channel = axes_of(op, array.shape[: array.ndim - (dim is not None)]).vector[0]
    if op.num_groups is not None:
        groups = op.num_groups * size
        call = dataclasses.replace(call, op=ChannelNorm.of(op.name, op.data_format, op.eps, op.activation, groups))
    return _merged(call, given, dims, size, {"x": channel, "vector": 0, "statistic": 0 if op.over_samples else 1})


def _merged(
    call: Call, given: Sequence[Any], dims: Sequence[int | None], size: int, places: dict[str, int]
) -> list[Any]:
    """With the batch axis merged with the axis in these places; what has none is as it is."""
    roles, result_roles = call.roles

    def merged(array: Any, dim: int | None, place: int | None) -> Any:
        if place is None:
            return array
        array = jnp.moveaxis(_batch_first(array, dim, size), 0, place)
        return array.reshape(*array.shape[:place], size * array.shape[place + 1], *array.shape[place + 2 :])

    def split(array: Any, place: int) -> Any:
        shape = *array.shape[:place], size, array.shape[place] // size, *array.shape[place + 1 :]
        return jnp.moveaxis(array.reshape(shape), place, 0)

    results = bind(call, [merged(array, dim, places.get(role)) for array, dim, role in zip(given, dims, roles)])
    return [split(array, places[role]) for array, role in zip(results, result_roles)]


def _batch_first(array: Any, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(array, (size, *array.shape)) if dim is None else jnp.moveaxis(array, dim, 0)
