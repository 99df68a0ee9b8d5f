"""The JAX primitive that every call is, and its gradients.

A forward call is differentiated as a custom_vjp whose gradients are a backward call. It is the primitive and not the
custom_vjp that `vmap` meets first, so that `grad` of `vmap` is one backward call, which sums over all examples itself.
`cunorm.adapters.jax.batching` and `cunorm.adapters.jax.partition` add how it is batched and lowered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from cunorm.adapters.jax.axes import axes_of
from cunorm.adapters.jax.call import Call
from cunorm.on_cpu import numpy_dtype
from cunorm.prepared import Gradients, Op, Results

__all__ = ["bind", "gradients", "primitive", "results"]

_sharding: Any = jax.sharding  # much of it has no types
primitive: Any = Primitive("cunorm")
primitive.multiple_results = True


def results(op: Op, arrays: Sequence[Any], stats: bool) -> Results:
    """y, residual_out, mean, rstd of x, residual, weight, bias and running statistics; None for what there is not."""
    call = Call.of(op, "forward", arrays, stats=stats)
    y, residual_out, mean, rstd = call.placed(bind(call, [array for array in arrays if array is not None]))
    return y, residual_out, mean, rstd


def gradients(op: Op, arrays: Sequence[Any], mask: tuple[bool, bool, bool], bias_dtype: str | None) -> Gradients:
    """dx, dweight, dbias of dy, dresidual_out, x, weight, bias, mean, rstd; None for what there is not."""
    call = Call.of(op, "backward", arrays, output_mask=mask, bias_dtype=bias_dtype)
    dx, dweight, dbias = call.placed(bind(call, [array for array in arrays if array is not None]))
    return dx, dweight, dbias


def bind(call: Call, given: Sequence[Any]) -> list[Any]:
    """The results that there are, of the operands that there are."""
    if not any(call.results):
        return []
    computed: list[Any] = primitive.bind(*alike(given), call=call)
    return computed


def alike(given: Sequence[Any]) -> list[Any]:
    """Inside shard_map, arrays (or None) that vary over the same axes of the mesh: all the axes that any varies over.

    So the gradient of one that did not vary, a weight say, is summed over these axes, by JAX.
    """
    every = frozenset[str]().union(*map(_varying, given))

    def cast(array: Any) -> Any:
        missing = tuple(sorted(every - _varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing and array is not None else array

    return list(map(cast, given))


def _varying(array: Any) -> frozenset[str]:
    """The axes that an array varies over, by its type."""
    return frozenset() if array is None else jax.typeof(array).manual_axis_type.varying


def _run_at_once(*given: Any, call: Call) -> Any:
    with jax.disable_jit(False):
        return _compiled(call)(*given)


primitive.def_impl(_run_at_once)


@functools.lru_cache(maxsize=4096)
def _compiled(call: Call) -> Any:
    return jax.jit(functools.partial(primitive.bind, call=call))


def _types(*given: Any, call: Call) -> list[Any]:
    """Those of the results: on a mesh with explicit axes split as x is."""
    x, (_, roles) = call.x_of(given), call.roles
    axes = axes_of(call.op, x.shape)
    for axis in sorted(axes.whole):
        if x.sharding.spec[axis] is not None:
            raise ValueError(
                f"x is sharded along axis {axis} (as {x.sharding.spec}), which is normalized over; it must not be: see "
                "jax.sharding.reshard"
            )
    types = []
    for output, role in zip(call.outputs(given), roles):
        sharding = _sharding.NamedSharding(x.sharding.mesh, _sharding.PartitionSpec(*axes.split(role, x.sharding.spec)))
        dtype = numpy_dtype(output.dtype)
        types.append(x.update(shape=output.shape, dtype=dtype, weak_type=False, sharding=sharding))
    return types


primitive.def_abstract_eval(_types)


# ---- Gradients.

_NO_SECOND = "the gradients of cunorm cannot be differentiated: there are no second derivatives"


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    if call.direction == "backward":
        raise ValueError(_NO_SECOND)
    perturbed = [not isinstance(tangent, ad.Zero) for tangent in tangents]

    def function(*inputs: Any) -> list[Any]:
        rest = iter(inputs)
        given = [next(rest) if item else primal for item, primal in zip(perturbed, primals)]
        return [result for result in _differentiable(call, call.operands(given)) if result is not None]

    of_perturbed = list(itertools.compress(primals, perturbed)), list(itertools.compress(tangents, perturbed))
    computed, changes = jax.jvp(function, *of_perturbed)
    return computed, changes


ad.primitive_jvps[primitive] = _jvp


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """That something is differentiated, and how it is split on a mesh with explicit axes, as its gradient must be.

    Residuals can say so, since it is part of their structure.
    """

    sharding: Any

    def split(self, gradient: Any) -> Any:
        """The gradient, or None for zero, split so; as it is where that is of something on no mesh."""
        if gradient is None or self.sharding.mesh.empty or jax.typeof(gradient).sharding.spec == self.sharding.spec:
            return gradient
        return _sharding.reshard(gradient, self.sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: Call, arrays: list[Any]) -> Results:
    return results(call.op, arrays, **dict(call.options))


def _forward_rule(call: Call, primals: list[Any]) -> tuple[Results, Any]:
    arrays = [None if primal is None else primal.value for primal in primals]
    y, residual_out, mean, rstd = results(call.op, arrays, True)
    wanted = [
        _Wanted(jax.typeof(primal.value).sharding) if primal is not None and primal.perturbed else None
        for primal in primals[:4]
    ]
    x, residual, weight, bias, *running = arrays
    kept = x if residual is None else residual_out, weight, bias, mean, rstd, wanted, [None for _ in running]
    stats = dict(call.options)["stats"]
    return (y, residual_out, mean if stats else None, rstd if stats else None), kept


def _backward_rule(call: Call, residuals: Any, cotangents: Results) -> tuple[list[Any]]:
    x, weight, bias, mean, rstd, wanted, running = residuals
    dy, dresidual_out, *of_statistics = (None if isinstance(item, SymbolicZero) else item for item in cotangents)
    wants_x, wants_residual, wants_weight, wants_bias = (item is not None for item in wanted)
    # Callers are given the statistics as constants. Who asks for their gradients differentiates that of a weight, which
    # jax.numpy computed with them. Running statistics have none.
    if (wants_x or wants_residual) and any(item is not None for item in of_statistics):
        raise ValueError(_NO_SECOND)
    if dy is None:  # y was not used
        dx, dweight, dbias = dresidual_out, None, None
    else:
        mask = (wants_x or wants_residual, wants_weight, wants_bias)
        arrays = (dy, dresidual_out, x, weight, bias if call.op.keeps_bias else None, mean, rstd)
        dx, dweight, dbias = gradients(call.op, arrays, mask, None if bias is None else bias.dtype.name)
    computed = zip(wanted, (dx, dx, dweight, dbias))
    return ([*(item and item.split(gradient) for item, gradient in computed), *running],)


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
