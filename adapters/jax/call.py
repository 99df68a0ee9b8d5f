"""What a traced call says to the one that runs, as one XLA custom call over XLA's own buffers.

jax-tvm-ffi calls `_run` whenever XLA runs the custom call, with views of its buffers and its stream. All else is known
when it is lowered: shapes, the plan on each GPU that it may run on, and with it the size of the workspace, which is one
more result of the custom call. So nothing is allocated or compiled when it runs, and XLA may capture the launches into
a CUDA graph. What is compiled keeps the plans that it was lowered with; tuning serves what is lowered later.

No result lies in an operand's memory, donated or not: XLA would copy each x that is used again, as gradients use it.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cunorm import execute, on_cpu
from cunorm.adapters.jax.axes import BACKWARD_ROLES, FORWARD_ROLES, view_of
from cunorm.prepared import Op, Output, Prepared, placed

__all__ = ["Call", "Inputs", "custom_call"]

_TARGET = "cunorm"
_CPU = ("cpu", 0)
# In place of a size that is a symbol goes a multiple of this, which has many divisors.
_STAND_IN = 55_440
_DLPACK_CPU = 1

_shape_dtype: Any = jax.ShapeDtypeStruct
_live_arrays: Any = jax.live_arrays

Inputs = tuple[tuple[tuple[int, ...], str] | None, ...]


@dataclass(frozen=True)
class Call:
    """An op's forward or backward call, less the shapes and dtypes: what is static of it in a traced function.

    ``given`` and ``results`` say which operands and which results there are; ``options`` are those of prepare_forward
    or prepare_backward.
    """

    op: Op
    direction: str
    given: tuple[bool, ...]
    results: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(op: Op, direction: str, arrays: Sequence[Any], **options: Any) -> Call:
        """The call of these arrays, None for those that there are not. Checks them."""
        given = tuple(array is not None for array in arrays)
        call = Call(op, direction, given, (), tuple(options.items()))
        return dataclasses.replace(call, results=tuple(output is not None for output in call._outputs(arrays)))

    @property
    def roles(self) -> tuple[list[str], list[str]]:
        """What the operands and the results are that there are: "x", "vector" or "statistic"."""
        operands, results = FORWARD_ROLES if self.direction == "forward" else BACKWARD_ROLES
        return list(itertools.compress(operands, self.given)), list(itertools.compress(results, self.results))

    @property
    def mask(self) -> tuple[bool, bool, bool]:
        """Which of its results, by example, a forward or backward call has: one like x, and two sums over rows."""
        return (True, False, False) if self.direction == "forward" else dict(self.options)["output_mask"]

    def masked(self, *mask: bool) -> Call:
        """The call for some of its results alone."""
        if self.direction == "forward":
            return self
        results = tuple(there and wanted for there, wanted in zip(self.results, mask))
        options = tuple((dict(self.options) | {"output_mask": mask}).items())
        return dataclasses.replace(self, results=results, options=options)

    def operands(self, given: Sequence[Any]) -> list[Any]:
        """The operands that there are in their places, with None for those that there are not."""
        return placed(given, self.given)

    def x_of(self, given: Sequence[Any]) -> Any:
        """x, or what belongs to it, among the operands that there are."""
        return given[0 if self.direction == "forward" else sum(self.given[:2])]

    def placed(self, results: Sequence[Any]) -> list[Any]:
        """The results likewise."""
        return placed(results, self.results)

    def outputs(self, given: Sequence[Any]) -> list[Output]:
        """What the results that there are look like, of operands, or types of operands."""
        return [output for output in self._outputs(self.operands(given)) if output is not None]

    def _outputs(self, arrays: Sequence[Any]) -> Sequence[Output | None]:
        """Of all results. Where sizes are symbols, as `jax.eval_shape` may ask, so are those of the results."""
        sizes = [size for array in arrays if array is not None for size in array.shape]
        symbols = dict.fromkeys(size for size in sizes if not isinstance(size, int))
        return self._symbolic_outputs(arrays, symbols) if symbols else self.prepare(_inputs_of(arrays), _CPU).outputs

    def _symbolic_outputs(self, arrays: Sequence[Any], symbols: Iterable[Any]) -> list[Output | None]:
        """Which sizes of results are those of operands shows by numbers that no tensor has, and groups divide."""
        numbers = {symbol: _STAND_IN * (i + 10_007) for i, symbol in enumerate(symbols)}
        sizes = {number: symbol for symbol, number in numbers.items()}
        stand_ins = [
            None if array is None else _shape_dtype(tuple(numbers.get(size, size) for size in array.shape), array.dtype)
            for array in arrays
        ]
        try:
            outputs = self.prepare(_inputs_of(stand_ins), _CPU).outputs
        except (TypeError, ValueError) as error:
            said = re.sub(r"\d+", lambda match: str(sizes.get(int(match[0]), match[0])), str(error))
            raise type(error)(said) from None
        return [
            output and dataclasses.replace(output, shape=tuple(sizes.get(size, size) for size in output.shape))
            for output in outputs
        ]

    def prepare(self, inputs: Inputs, device: tuple[str, int], alignments: Sequence[int] = ()) -> Prepared:
        """Ready to run on a device, for inputs that there are at addresses of these remainders modulo 16."""
        rest = iter(alignments)
        views = [given and view_of(*given, device, next(rest, 0)) for given in inputs]
        prepare: Any = self.op.prepare_backward
        if self.direction == "forward":
            running: Any = tuple(views[4:])
            prepare, views = functools.partial(self.op.prepare_forward, out=None, running=running), views[:4]
        return prepare(*views, **dict(self.options))  # type: ignore[no-any-return]

    @functools.cached_property
    def places(self) -> tuple[int | None, ...]:
        """Of each operand in the order that `Prepared.run` takes, which of the custom call's operands it is, if any."""
        there = [*self.given, *self.results]
        places = placed(range(sum(there)), there)
        if self.direction == "forward":  # the result stands before the running statistics
            places.insert(4, places.pop(len(self.given)))
        return tuple(places)


def _inputs_of(arrays: Sequence[Any]) -> Inputs:
    for array in arrays:
        if array is not None and not all(isinstance(size, int) for size in array.shape):
            raise ValueError(
                f"an array has shape {tuple(array.shape)}; a call is prepared for sizes that are numbers: export the "
                "function with concrete sizes, once for each shape, with "
                "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call('cunorm')]"
            )
    return tuple(None if array is None else (tuple(array.shape), str(array.dtype)) for array in arrays)


def custom_call(call: Call, *given: Any) -> tuple[Any, ...]:
    """The results that there are, of arrays that one device has."""
    outputs = call.outputs(given)
    results = [_shape_dtype(item.shape, on_cpu.numpy_dtype(item.dtype)) for item in outputs]
    inputs = _inputs_of(call.operands(given))
    name, shapes, generation = _name(call), _digest(inputs), execute.generation
    workspace = _workspace_bytes(name, shapes, generation, inputs)
    if workspace:
        results.append(_shape_dtype((workspace,), jnp.uint8))
    _register()
    computed = jax.ffi.ffi_call(_TARGET, results)(*given, call=name, shapes=shapes, generation=generation)
    return tuple(computed[: len(outputs)])


def _workspace_bytes(name: str, shapes: int, generation: int, inputs: Inputs) -> int:
    """The most that a call needs on any GPU: where it will run is not known yet, and too much is a few unused bytes.

    Every GPU has plans of its own, even beside others of its model, since not as many clusters may fit on it. Preparing
    them here also compiles and loads the kernels, which must not happen while XLA runs.
    """
    most = 0
    for index in _cuda_devices():
        try:
            prepared = _prepare(name, shapes, generation, ("cuda", index), (), inputs)
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
        raise RuntimeError("JAX arrays need jax-tvm-ffi, which is not installed: pip install jax-tvm-ffi") from error
    for platform in ("cpu", "gpu"):
        arguments = ["attrs.call", "attrs.shapes", "attrs.generation", "args", "rets", "ctx.stream"]
        jax_tvm_ffi.register_ffi_target(_TARGET, _run, arguments, platform=platform, allow_cuda_graph=True)
    atexit.register(_wait_for_results)


def _wait_for_results() -> None:
    """A call that still ran in a thread of XLA's when the interpreter ends would ask for its lock, and abort."""
    for array in _live_arrays():
        with contextlib.suppress(Exception):  # of what was computed: nobody asked for it
            array.block_until_ready()


# A function that was compiled before would go on with the kernels that it has.
execute.also_forget(jax.clear_caches, compiled=True)

_calls: dict[str, Call] = {}
# By what `_prepare` was given but the inputs, which a digest stands for. Kept for good, since XLA reserved a workspace
# for them. The generation keeps apart what was lowered before and after tuning.
_prepared: dict[tuple[Any, ...], Prepared] = {}


def _name(call: Call) -> str:
    """The custom call's first attribute: a name for the call, by its content, so that it is the same in every process.

    Seven characters, because jax-tvm-ffi 0.1.3 frees a longer string before the callback reads it, and never frees an
    array; up to seven are stored in place.
    """
    name = base64.urlsafe_b64encode(hashlib.sha256(repr(call).encode()).digest())[:7].decode()
    if _calls.setdefault(name, call) != call:
        raise RuntimeError(f"two calls have the name {name}: {call} and {_calls[name]}")
    return name


def _digest(inputs: Inputs) -> int:
    return int.from_bytes(hashlib.sha256(repr(inputs).encode()).digest()[:8], "little", signed=True)


def _prepare(
    name: str,
    shapes: int,
    generation: int,
    device: tuple[str, int],
    alignments: tuple[int, ...],
    inputs: Inputs,
) -> Prepared:
    """A call on a device. Where no alignments are given, all addresses are multiples of 16, as XLA allocates."""
    prepared = _calls[name].prepare(inputs, device, alignments)
    _prepared[name, shapes, generation, device, alignments] = prepared
    return prepared


def _run(name: str, shapes: int, generation: int, *arguments: Any) -> None:
    """Run a call, given the inputs and outputs that there are, the workspace if any, and the stream."""
    *tensors, stream = arguments
    kind, index = tensors[0].__dlpack_device__()
    given = [tensor.data_ptr() for tensor in tensors]
    device = _CPU if kind == _DLPACK_CPU else ("cuda", index)
    alignments = tuple([pointer & 15 for pointer in given])
    key = (name, shapes, generation, device, alignments if any(alignments) else ())
    prepared = _prepared.get(key) or _prepare(*key, _inputs_of_buffers(name, tensors))
    places = _calls[name].places
    pointers = [0 if place is None else given[place] for place in places]
    workspace = given[-1] if len(given) > sum(place is not None for place in places) else 0
    if prepared.workspace_bytes and (not workspace or tensors[-1].shape[0] < prepared.workspace_bytes):
        raise RuntimeError(
            f"CUDA device {index} needs more workspace for this than was reserved by the process that compiled it, for "
            "its own GPUs and tuned plans; compile it in this process"
        )
    prepared.run(pointers, workspace, stream)


def _inputs_of_buffers(name: str, tensors: Sequence[Any]) -> Inputs:
    """What was not prepared here before: XLA took what it compiled from a cache, or from another process."""
    call = _calls.get(name)
    if call is None:
        raise RuntimeError(
            "this executable was traced by another process, and what it computes is not known in this one; lower the "
            "same function here before running it: jax.jit(function).lower(*arguments)"
        )
    return _inputs_of(call.operands(tensors))
