"""JAX arrays: eager, inside ``jax.jit``, differentiable, batched and sharded, as one XLA custom call.

Each call is a primitive (`primitive`), whose gradients are those of reverse mode, once: there is no ``jax.jvp`` and
there are no second derivatives. `batching` says what ``jax.vmap`` makes of it, `partition` what sharded jit does, and
`call` how it runs over XLA's own buffers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from cunorm import execute
from cunorm.adapters.jax import batching, partition  # noqa: F401 (how the primitive is batched and lowered)
from cunorm.adapters.jax.axes import view_of
from cunorm.adapters.jax.primitive import gradients, results
from cunorm.checks import no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import Gradients, Op, Output, Results
from cunorm.problem import View

__all__ = ["ADAPTER"]


class JaxAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        """Shape and dtype. XLA lays arrays out in C order for a custom call, at addresses known only when it runs."""
        return view_of(tensor.shape, tensor.dtype.name)

    def empty(self, output: Output, like: Any) -> Any:
        raise NotImplementedError("XLA allocates the results of a custom call")

    def pointer(self, tensor: Any) -> int:
        raise NotImplementedError("an XLA buffer has an address only while a custom call runs")

    def stream(self, device: tuple[str, int]) -> int:
        raise NotImplementedError("XLA passes its stream to a custom call")

    def apply(
        self,
        op: Op,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        out: Any,
        stats: bool,
        running: tuple[Any, ...] = (),
    ) -> Results:
        if out is not None:
            raise TypeError("out cannot be given for JAX arrays: they are immutable")
        if running and op.updates_running:
            raise TypeError(
                "running_mean and running_var cannot be updated in place for JAX arrays: they are immutable; leave "
                "them out, and update them with the mean and variance (max(1 / rstd**2 - eps, 0)) of return_stats=True"
            )
        arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        arrays |= zip(("running_mean", "running_var"), running)
        computed: Results = _checked(_apply, op, (stats, execute.generation), **arrays)
        return computed

    def backward(
        self,
        op: Op,
        dy: Any,
        dresidual_out: Any,
        x: Any,
        weight: Any,
        bias: Any,
        mean: Any,
        rstd: Any,
        output_mask: tuple[bool, bool, bool],
        bias_dtype: str | None,
    ) -> Gradients:
        arrays = {"x": x, "dy": dy, "dresidual_out": dresidual_out, "weight": weight, "bias": bias}
        options = (output_mask, bias_dtype, execute.generation)
        computed: Gradients = _checked(_backward, op, options, **arrays, mean=mean, rstd=rstd)
        return computed


ADAPTER: Adapter = JaxAdapter()


def _checked(function: Any, op: Op, static: Any, **arrays: Any) -> Any:
    """``function(op, static, **arrays)``, with errors that speak of the arguments.

    What stands for an array, as Flax's variables do, is taken for it.
    """
    for name, array in arrays.items():
        if array is not None and not isinstance(array, jax.Array):
            if not hasattr(array, "__jax_array__"):
                raise no_tensor(name, array, "JAX", "a JAX array")
            arrays[name] = array.__jax_array__()
    try:
        return function(op, static, **arrays)
    except ValueError:
        # JAX's own message about devices counts its arguments. Looked into only here: it costs more than the call.
        # Arrays that are not committed to theirs go where the others are.
        committed = {
            name: array.devices()
            for name, array in arrays.items()
            if array is not None and not isinstance(array, jax.core.Tracer) and array.committed
        }
        first, expected = next(iter(committed.items()), ("", set()))
        for name, devices in committed.items():
            if devices != expected:
                raise RuntimeError(
                    f"{name} is on {_names(devices)} and {first} on {_names(expected)}; they must be on one device"
                ) from None
        raise


def _names(devices: set[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))


# ---- What is traced. The op and its options are static: they and the shapes and dtypes make one compiled call. One of
# the options is the generation of plans, with which all is traced again.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    op: Op,
    options: tuple[Any, ...],
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    running_mean: Any = None,
    running_var: Any = None,
) -> Results:
    running = () if running_mean is None else (running_mean, running_var)
    y, residual_out, mean, rstd = results(op, (x, residual, weight, bias, *running), options[0])
    # To the primitive they are constants as they are; not to what jax.numpy computes in its place.
    mean, rstd = jax.lax.stop_gradient((mean, rstd))
    return y, residual_out, mean, rstd


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    op: Op,
    options: tuple[Any, ...],
    dy: Any,
    dresidual_out: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
) -> Gradients:
    return gradients(op, (dy, dresidual_out, x, weight, bias, mean, rstd), options[0], options[1])
