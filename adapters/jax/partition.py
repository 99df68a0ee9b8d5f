"""Sharded jit: which parts of its operands each device computes with, for GSPMD and Shardy.

What `axes_of` does not call whole may be split. Where x lies split like that, each device normalizes the part that it
has, the dweight and dbias of all parts are summed (an all-reduce), and the statistics of a batch norm in training are
merged. An axis that must be whole, or that is not split evenly, is gathered by XLA before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax.experimental import custom_partitioning
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from cunorm.adapters.jax.axes import axes_of, names_of
from cunorm.adapters.jax.call import Call, custom_call
from cunorm.adapters.jax.primitive import bind, primitive
from cunorm.adapters.jax.synchronized import merged_statistics, synchronized_gradients, synchronized_results
from cunorm.channel_norm import ChannelNorm

_jax: Any = jax  # much of it has no types
_partitioning: Any = custom_partitioning

Split = tuple[Any, ...]  # for each axis of x, the names of the mesh's axes that it is split over; or one name, or None


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, call: Call) -> Any:
    context: Any = ctx.module_context.axis_context
    manual = isinstance(context, mlir.SPMDAxisContext)
    # Inside a shard_map over some of the axes there is no partitioning of the others: XLA gathers what they split.
    in_part = manual and set(context.manual_axes) < set(context.mesh.axis_names)
    if in_part and not _jax.config.jax_use_shardy_partitioner:  # XLA would end the process
        raise RuntimeError(
            "cunorm is called in a shard_map over some axes of the mesh, where GSPMD cannot lay out a custom call; the "
            "partitioner must be Shardy, or axis_names all axes"
        )
    function = functools.partial(custom_call, call) if in_part else _partitioned(call, _jax.config.jax_enable_x64)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


mlir.register_lowering(primitive, _lower)
# There is no public name for what custom_partitioning, which ours is lowered to, asks for in this way.
dispatch.prim_requires_devices_during_lowering.add(primitive)


@functools.lru_cache(maxsize=4096)
def _partitioned(call: Call, x64: bool) -> Any:
    """What is lowered. ``x64`` says whether there are 64-bit types where that is done."""
    function = _partitioning.custom_partitioning(functools.partial(custom_call, call))
    function.def_partition(
        functools.partial(_partition, call, x64),
        infer_sharding_from_operands=functools.partial(_result_shardings, call),
        sharding_rule=functools.partial(_rule, call),
    )
    return function


def _rule(call: Call, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """For Shardy: a factor for each axis of x. An axis that must be whole is one for each array that has it.

    Else a weight that is split would have x split, and gathered, as it is.
    """
    axes = axes_of(call.op, tuple(operands[0].shape))
    whole = []

    def mapping(place: str, role: str) -> Any:
        factors = []
        for i, axis in enumerate(axes.of(role)):
            if axis is None or axis in axes.whole:
                whole.append(f"{place}whole{i}")
                factors.append(whole[-1])
            else:
                factors.append(f"axis{axis}")
        return _partitioning.ArrayMapping(*factors)

    of_operands, of_results = (
        tuple(mapping(f"{kind}{i}", role) for i, role in enumerate(of_roles))
        for kind, of_roles in zip(("operand", "result"), call.roles)
    )
    return SdyShardingRule(of_operands, of_results, need_replication_factors=tuple(whole))


def _split(call: Call, mesh: Any, operands: Sequence[Any]) -> Split:
    """How x may stay split: as the first is that is split at all, of what has its shape. GSPMD may not know yet."""
    alike = [operand for operand, role in zip(operands, call.roles[0]) if role == "x"]
    shape = alike[0].shape
    specs = [operand.sharding.spec for operand in alike if isinstance(operand.sharding, NamedSharding)]
    spec = next((spec for spec in specs if any(spec)), (None,) * len(shape))
    whole = axes_of(call.op, shape).whole

    def may(axis: int, names: Any) -> bool:
        return axis not in whole and shape[axis] % math.prod(mesh.shape[name] for name in names_of(names)) == 0

    return tuple(names if may(axis, names) else None for axis, names in enumerate(spec))


def _shardings(call: Call, mesh: Any, split: Split) -> list[tuple[NamedSharding, ...]]:
    """Those of the operands, and those of the results."""
    axes = axes_of(call.op, (1,) * len(split))

    def sharding(role: str) -> NamedSharding:
        return NamedSharding(mesh, _jax.P(*axes.split(role, split)))

    return [tuple(map(sharding, of_roles)) for of_roles in call.roles]


def _result_shardings(call: Call, mesh: Any, operands: Sequence[Any], results: Any) -> tuple[NamedSharding, ...]:
    return _shardings(call, mesh, _split(call, mesh, operands))[1]


def _partition(call: Call, x64: bool, mesh: Any, operands: Sequence[Any], results: Any) -> tuple[Any, ...]:
    split = _split(call, mesh, operands)
    of_operands, of_results = _shardings(call, mesh, split)
    (_, roles), vector = call.roles, axes_of(call.op, operands[0].shape).vector
    summed = names_of(*(names for axis, names in enumerate(split) if axis not in vector))

    def of_part(*given: Any) -> tuple[Any, ...]:
        if isinstance(call.op, ChannelNorm) and call.op.over_samples and call.op.training and summed:
            with jax.enable_x64(x64):  # XLA asks in a thread of its own, where such a context of another is not known
                computed = _of_part_of_batch(call, summed, given)
        else:
            computed = bind(call, given)
        add = call.direction == "backward" and summed
        return tuple(
            _jax.lax.psum(result, summed) if add and role == "vector" else result
            for result, role in zip(computed, roles)
        )

    return mesh, of_part, of_results, of_operands


def _of_part_of_batch(call: Call, names: tuple[str, ...], given: Sequence[Any]) -> list[Any]:
    """The results that there are of a batch norm in training, where the batch is split over axes of these names."""
    op: Any = call.op
    if call.direction == "backward":
        dy, _, *others = call.operands(given)
        mask, bias_dtype = call.mask, dict(call.options)["bias_dtype"]
        results = synchronized_gradients(op, names, jax.lax.axis_size(names), (dy, *others), mask, bias_dtype)
        return [result for result in results if result is not None]
    x, _, weight, bias = call.operands(given)
    if op.statistics_alone:
        return list(merged_statistics(op, names, x))
    y, _, statistics = synchronized_results(op, names, x, weight, bias)
    return [y, *statistics] if dict(call.options)["stats"] else [y]
