"""JAX arrays: eager, inside ``jax.jit``, and differentiable, as one XLA custom call over XLA's own buffers.

jax-tvm-ffi calls ``_run_call`` whenever XLA runs the custom call, with views of its buffers and its stream. All else is
known when the call is traced: checks, shapes, the plan on each GPU that it may run on, and with it the size of the
workspace, which is one more result of the custom call. So nothing is allocated or compiled when it runs, and XLA may
capture the launches into a CUDA graph. What is compiled keeps the plans that it was traced with; tuning serves what is
traced later.

Gradients are those of reverse mode, once: no ``jax.jvp``, no second derivatives. ``jax.vmap`` works and runs one call
after the other.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cunorm import execute
from cunorm.execute import Adapter, Gradients, Op, Output, Prepared, Results
from cunorm.problem import View, contiguous_strides

__all__ = ["ADAPTER"]

_TARGET = "cunorm"
_DLPACK_CPU = 1
_ALIGNED: tuple[int, ...] = ()  # the remainders of addresses modulo 16 where all are 0: as XLA allocates

_shape_dtype: Any = jax.ShapeDtypeStruct


class JaxAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        """Shape and dtype. XLA lays arrays out in C order for a custom call, at addresses known only when it runs."""
        return View(0, tensor.shape, contiguous_strides(tensor.shape), tensor.dtype.name, ("cpu", 0))

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
                "them out, and update them with the mean and variance (1 / rstd**2 - eps) of return_stats=True"
            )
        arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        arrays |= zip(("running_mean", "running_var"), running)
        results: Results = _checked(_apply, op, (stats, execute.generation), **arrays)
        return results

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
        gradients: Gradients = _checked(_backward, op, options, **arrays, mean=mean, rstd=rstd)
        return gradients


ADAPTER: Adapter = JaxAdapter()


def _checked(function: Any, op: Op, static: Any, **arrays: Any) -> Any:
    """``function(op, static, **arrays)``, with errors that speak of the arguments."""
    for name, array in arrays.items():
        if array is not None and not isinstance(array, jax.Array):
            raise TypeError(f"{name} is a {type(array).__qualname__}; beside a JAX x it must be a JAX array")
    try:
        return function(op, static, **arrays)
    except ValueError:
        # JAX's own message about devices counts its arguments. Looked into only here: it costs more than the call.
        concrete = {
            name: array.devices()
            for name, array in arrays.items()
            if array is not None and not isinstance(array, jax.core.Tracer)
        }
        for name, devices in concrete.items():
            if devices != concrete.get("x", devices):
                raise RuntimeError(
                    f"{name} is on {_names(devices)} and x on {_names(concrete['x'])}; they must be on one device"
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
    return _differentiable(op, options[0], x, residual, weight, bias, running)


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
    arrays = (dy, dresidual_out, x, weight, bias, mean, rstd)
    return _gradients(op, arrays, options[0], options[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    op: Op, stats: bool, x: Any, residual: Any, weight: Any, bias: Any, running: tuple[Any, ...]
) -> Results:
    return _results(op, (x, residual, weight, bias, *running), stats)


def _forward_rule(op: Op, stats: bool, *arguments: Any) -> tuple[Results, Any]:
    *primals, running = arguments
    x, residual, weight, bias = (None if primal is None else primal.value for primal in primals)
    y, residual_out, mean, rstd = _results(op, (x, residual, weight, bias, *(item.value for item in running)), True)
    # What is not differentiated becomes None, which residuals can say, since it is part of their structure.
    wanted = tuple(() if primal is not None and primal.perturbed else None for primal in primals)
    kept = (x if residual is None else residual_out, weight, bias, mean, rstd, wanted)
    return (y, residual_out, mean if stats else None, rstd if stats else None), kept


def _backward_rule(op: Op, stats: bool, residuals: Any, cotangents: Results) -> tuple[Any, ...]:
    # The statistics are constants to differentiation, so their cotangents do not count, and running ones have none.
    x, weight, bias, mean, rstd, wanted = residuals
    dy, dresidual_out = (None if isinstance(item, SymbolicZero) else item for item in cotangents[:2])
    wants_x, wants_residual, wants_weight, wants_bias = (item is not None for item in wanted)
    if dy is None:  # y was not used
        dx, dweight, dbias = dresidual_out, None, None
    else:
        mask = (wants_x or wants_residual, wants_weight, wants_bias)
        arrays = (dy, dresidual_out, x, weight, bias if op.keeps_bias else None, mean, rstd)
        dx, dweight, dbias = _gradients(op, arrays, mask, None if bias is None else bias.dtype.name)
    return dx if wants_x else None, dx if wants_residual else None, dweight, dbias, None


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _results(op: Op, arrays: Sequence[Any], stats: bool) -> Results:
    y, residual_out, mean, rstd = _custom_call(op, "forward", arrays, stats=stats)
    return y, residual_out, mean, rstd


def _gradients(op: Op, arrays: Sequence[Any], mask: tuple[bool, bool, bool], bias_dtype: str | None) -> Gradients:
    dx, dweight, dbias = _custom_call(op, "backward", arrays, output_mask=mask, bias_dtype=bias_dtype)
    return dx, dweight, dbias


def _custom_call(op: Op, direction: str, arrays: Sequence[Any], **options: Any) -> list[Any]:
    """What the op's prepare_forward or prepare_backward has for outputs; None for those that it does not have."""
    views = [None if array is None else ADAPTER.view(array, "") for array in arrays]
    call = _Call(op, direction, tuple(options.items()), tuple(view and (view.shape, view.dtype) for view in views))
    outputs = call.prepare(("cpu", 0)).outputs
    results = [
        _shape_dtype(output.shape, execute.numpy_dtype(output.dtype)) for output in outputs if output is not None
    ]
    if not results:
        return [None] * len(outputs)
    key, generation = _key(call), execute.generation
    workspace = _workspace_bytes(key, generation)
    if workspace:
        results.append(_shape_dtype((workspace,), jnp.uint8))
    _register()
    given = [array for array in arrays if array is not None]
    custom_call = jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential")
    computed = iter(custom_call(*given, call=key, generation=generation))
    return [None if output is None else next(computed) for output in outputs]


def _workspace_bytes(key: str, generation: int) -> int:
    """The most that a call needs on any GPU: where it will run is not known yet, and too much is a few unused bytes.

    Every GPU has plans of its own, even beside others of its model, since not as many clusters may fit on it. Preparing
    them here also compiles and loads the kernels, which must not happen while XLA runs.
    """
    most = 0
    for index in _cuda_devices():
        try:
            prepared, _ = _prepare(key, generation, ("cuda", index), _ALIGNED)
        except RuntimeError:  # this GPU cannot be used, for want of CuPy say: whatever runs there says so
            continue
        most = max(most, prepared.workspace_bytes)
    return most


@functools.cache
def _cuda_devices() -> tuple[int, ...]:
    """The CUDA devices that JAX computes on in this process."""
    try:
        return tuple(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
    except RuntimeError:
        return ()


@functools.cache
def _register() -> None:
    try:
        import jax_tvm_ffi
    except ImportError as error:
        raise RuntimeError('JAX arrays need jax-tvm-ffi, which is not installed: pip install "cunorm[jax]"') from error
    for platform in ("cpu", "gpu"):
        arguments = ["attrs.call", "attrs.generation", "args", "rets", "ctx.stream"]
        jax_tvm_ffi.register_ffi_target(_TARGET, _run_call, arguments, platform=platform, allow_cuda_graph=True)


# ---- What runs.


@dataclass(frozen=True)
class _Call:
    """What the traced side says to the running side. Inputs are shapes and dtypes."""

    op: Op
    direction: str
    options: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[tuple[int, ...], str] | None, ...]

    def prepare(self, device: tuple[str, int], alignments: Sequence[int] = (0,) * 8) -> Prepared:
        """Ready to run on a device, for inputs at addresses of these remainders modulo 16."""
        views = [
            given and View(alignment, given[0], contiguous_strides(given[0]), given[1], device)
            for given, alignment in zip(self.inputs, alignments)
        ]
        prepare: Any = self.op.prepare_backward
        if self.direction == "forward":
            running: Any = tuple(views[4:])
            prepare, views = functools.partial(self.op.prepare_forward, out=None, running=running), views[:4]
        return prepare(*views, **dict(self.options))  # type: ignore[no-any-return]

    def places(self, prepared: Prepared) -> tuple[int | None, ...]:
        """Of each operand in the order that ``prepared`` takes, which of the custom call's operands it is, if any."""
        numbers = iter(range(len(self.inputs) + len(prepared.outputs)))
        places = [None if item is None else next(numbers) for item in (*self.inputs, *prepared.outputs)]
        if self.direction == "forward":  # the result stands before the running statistics
            places.insert(4, places.pop(len(self.inputs)))
        return tuple(places)


_calls: dict[str, _Call] = {}


def _key(call: _Call) -> str:
    """The custom call's first attribute: a name for the call, by its content, so that it is the same in every process.

    Seven characters, because jax-tvm-ffi 0.1.3 frees a longer string before the callback reads it, and never frees an
    array; up to seven are stored in place.
    """
    key = base64.urlsafe_b64encode(hashlib.sha256(repr(call).encode()).digest())[:7].decode()
    if _calls.setdefault(key, call) != call:
        raise RuntimeError(f"two calls have the name {key}: {call} and {_calls[key]}")
    return key


def _run_call(key: str, generation: int, *arguments: Any) -> None:
    """Run a traced call, given the inputs and outputs that there are, the workspace if any, and the stream."""
    *tensors, stream = arguments
    kind, index = tensors[0].__dlpack_device__()
    given = [tensor.data_ptr() for tensor in tensors]
    device = ("cpu", 0) if kind == _DLPACK_CPU else ("cuda", index)
    alignments = tuple([pointer & 15 for pointer in given])
    prepared, places = _prepare(key, generation, device, alignments if any(alignments) else _ALIGNED)
    pointers = [0 if place is None else given[place] for place in places]
    workspace = given[-1] if len(given) > sum(place is not None for place in places) else 0
    if prepared.workspace_bytes and (not workspace or tensors[-1].shape[0] < prepared.workspace_bytes):
        raise RuntimeError(
            f"CUDA device {index} needs more workspace for this than was reserved by the process that compiled it, for "
            "its own GPUs and tuned plans; compile it in this process"
        )
    prepared.run(pointers, workspace, stream)


@functools.cache
def _prepare(
    key: str, generation: int, device: tuple[str, int], given_alignments: tuple[int, ...]
) -> tuple[Prepared, tuple[int | None, ...]]:
    """A call on a device, and where its operands are. Kept for good, since the workspace was reserved for it.

    ``generation`` is of when it was traced, which keeps apart what was traced before and after tuning.
    """
    call = _calls.get(key)
    if call is None:
        raise RuntimeError(
            "this executable was traced by another process, and what it computes is not known in this one; trace the "
            "same function here before running it: jax.eval_shape(function, *arguments)"
        )
    rest = iter(given_alignments)
    alignments = [0 if given is None else next(rest, 0) for given in call.inputs]
    prepared = call.prepare(device, alignments)
    return prepared, call.places(prepared)
