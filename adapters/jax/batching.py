"""`vmap`: where the batch axis of a call goes, so that it stays one call.

To a row norm or an activation it is another axis of rows. For an instance or group norm it joins the samples. Where the
statistics of a batch norm are by example, or weights or their gradients are, a norm of channels takes it for more
channels, which moves the axis beside them. A row norm has no kernel for the latter: that is left to jax.numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from cunorm.adapters.jax.axes import axes_of, names_of
from cunorm.adapters.jax.call import Call
from cunorm.adapters.jax.plain import plain_call
from cunorm.adapters.jax.primitive import bind, primitive
from cunorm.channel_norm import ChannelNorm
from cunorm.prepared import Op
from cunorm.row_norm import RowNorm

_jax: Any = jax  # much of it has no types
_batching: Any = batching


def _batched(
    axis: Any, given: Sequence[Any], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int | None]]:
    """The results that there are, all with the batch axis first. JAX says its size, and how a mesh splits it."""
    if all(dim is None for dim in dims):
        results = bind(call, given)
        return results, [None] * len(results)
    roles, _ = call.roles
    by_example = any(dim is not None for dim, role in zip(dims, roles) if role == "vector")
    if axis.size == 0:  # the sums of no examples make one, of zeros, which says what there would be
        one = [array if dim is None else array.sum(dim) for array, dim in zip(given, dims)]
        results = [_batch_first(axis, result, None) for result in bind(call, one)]
    elif not isinstance(call.op, ChannelNorm):
        results = _plain(call, given, dims) if by_example else _more_rows(call, given, dims, axis)
    elif call.op.over_samples or by_example or any(call.mask[1:]):
        results = _more_channels(call, given, dims, axis)
    else:
        results = _merged(call, given, dims, axis, {"x": 0, "statistic": 0})
    return results, [0] * len(results)


# Such a rule, unlike one in primitive_batchers, is told how a mesh with explicit axes splits the batch.
_batching.fancy_primitive_batchers[primitive] = _batched


def _plain(call: Call, given: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    return list(jax.vmap(functools.partial(plain_call, call), tuple(dims))(*given))


def _more_rows(call: Call, given: Sequence[Any], dims: Sequence[int | None], axis: Any) -> list[Any]:
    """With one more axis in front, except for the sums over rows, which are by example."""
    results = []
    if call.mask[0]:
        roles, _ = call.roles
        operands = zip(given, dims, roles)
        arrays = [array if role == "vector" else _batch_first(axis, array, dim) for array, dim, role in operands]
        results += bind(dataclasses.replace(call.masked(True, False, False), op=_with_more_rows(call.op)), arrays)
    if any(call.mask[1:]):
        results += _plain(call.masked(False, *call.mask[1:]), given, dims)
    return results


def _with_more_rows(op: Op) -> Op:
    if not isinstance(op, RowNorm):
        return op
    axis = [i if i < 0 else i + 1 for i in op.axis]
    return RowNorm.of(axis, op.eps, op.norm.activation, op.norm.centered, op.norm.weight_offset)


def _more_channels(call: Call, given: Sequence[Any], dims: Sequence[int | None], axis: Any) -> list[Any]:
    op: Any = call.op
    array, dim = given[0], dims[0]
    channel = axes_of(op, array.shape[: array.ndim - (dim is not None)]).vector[0]
    if op.num_groups is not None:
        groups = op.num_groups * axis.size
        call = dataclasses.replace(call, op=ChannelNorm.of(op.name, op.data_format, op.eps, op.activation, groups))
    return _merged(call, given, dims, axis, {"x": channel, "vector": 0, "statistic": 0 if op.over_samples else 1})


def _merged(
    call: Call, given: Sequence[Any], dims: Sequence[int | None], axis: Any, places: dict[str, int]
) -> list[Any]:
    """With the batch axis merged with the axis in these places; what has none is as it is.

    On a mesh with explicit axes all is split as x is. Of the two axes the one that is split stands in front, so that
    its parts stay where they are; one that must be whole is gathered.
    """
    roles, result_roles = call.roles
    x = jax.typeof(_batch_first(axis, *call.x_of(list(zip(given, dims)))))
    axes, place = axes_of(call.op, x.shape[1:]), places["x"]
    of_batch, *of_x = x.sharding.spec
    behind = of_batch is None and of_x[place] is not None and place not in axes.whole
    pair = [of_x[place], of_batch] if behind else [of_batch, of_x[place]]
    of_merged = list(of_x)
    of_merged[place] = None if place in axes.whole else names_of(*pair) or None

    def reshaped(array: Any, sizes: Sequence[int], split: Sequence[Any]) -> Any:
        return array.reshape(sizes, out_sharding=_jax.NamedSharding(x.sharding.mesh, _jax.P(*split)))

    def merged(array: Any, dim: int | None, role: str) -> Any:
        if role not in places:
            return array
        place = places[role]
        array = jnp.moveaxis(_batch_first(axis, array, dim), 0, place + behind)
        sizes = *array.shape[:place], math.prod(array.shape[place : place + 2]), *array.shape[place + 2 :]
        return reshaped(array, sizes, axes.split(role, of_merged))

    def divided(array: Any, role: str) -> Any:
        place, split, sizes = places[role], axes.split(role, of_merged), list(array.shape)
        split[place : place + 1] = pair
        sizes[place] //= axis.size
        sizes.insert(place + behind, axis.size)
        return jnp.moveaxis(reshaped(array, sizes, split), place + behind, 0)

    results = bind(call, list(map(merged, given, dims, roles)))
    return list(map(divided, results, result_roles))


def _batch_first(axis: Any, array: Any, dim: int | None) -> Any:
    return _batching.bdim_at_front(array, dim, axis.size, axis.explicit_mesh_axis)
