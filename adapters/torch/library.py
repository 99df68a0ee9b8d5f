"""cunorm's ops in PyTorch's own list of operators, ``torch.ops.cunorm``.

That is how torch.compile, torch.export, FakeTensor, torch.func and whatever else does not run a call at once see them:
by a schema, with the shapes of the results, the gradients, and what vmap makes of them. An eager call of ordinary
tensors does not come this way, since PyTorch's dispatcher would take as long as the rest of the call.

For every op there is a second one for its gradients. Both give a list of just the tensors that there are, and neither
modifies anything: running statistics come back as results, and `apply` copies them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch import autograd_function
from torch._prims_common import make_contiguous_strides_for
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cunorm import execute, op_names
from cunorm.adapters.torch import batching
from cunorm.channel_norm import ChannelNorm
from cunorm.checks import no_tensor
from cunorm.execute import Adapter
from cunorm.pointwise import Pointwise
from cunorm.prepared import BACKWARD_NAMES, FORWARD_NAMES, Gradients, Op, Output, Results
from cunorm.problem import View, contiguous_strides
from cunorm.row_norm import RowNorm

__all__ = ["apply", "backward", "is_tracing", "register"]

is_tracing: Any = getattr(torch._C, "_is_tracing", lambda: False)  # by torch.jit
_FORWARD = tuple(name for name in FORWARD_NAMES if name != "out")


class _Family(NamedTuple):
    """The ops of one name: which tensors they take and give beside x and y, and what tells them apart."""

    operands: tuple[str, ...]
    statistics: tuple[str, ...]
    schema: str
    op: Callable[..., Any]
    attributes: Callable[[Any], tuple[Any, ...]]

    @property
    def forward(self) -> tuple[str, ...]:
        return tuple(name for name in _FORWARD if name in ("x", *self.operands))

    @property
    def backward(self) -> tuple[str, ...]:
        others = ("dresidual_out",) if "residual" in self.operands else ()
        return tuple(name for name in BACKWARD_NAMES if name in ("dy", "x", *self.operands, *self.statistics, *others))


def _channel_attributes(op: ChannelNorm) -> tuple[Any, ...]:
    return op.data_format, op.eps, op.activation


_BOTH = ("mean", "rstd")
_FAMILIES = {
    "layer_norm": _Family(
        ("residual", "weight", "bias"),
        _BOTH,
        "int[] axis, float eps, str? activation",
        RowNorm.of,
        lambda op: (op.axis, op.eps, op.norm.activation),
    ),
    "rms_norm": _Family(
        ("residual", "weight", "bias"),
        ("rstd",),
        "int[] axis, float eps, str? activation, float weight_offset",
        lambda axis, eps, activation, offset: RowNorm.of(axis, eps, activation, False, offset),
        lambda op: (op.axis, op.eps, op.norm.activation, op.norm.weight_offset),
    ),
    "instance_norm": _Family(
        ("weight", "bias"),
        _BOTH,
        "str data_format, float eps, str? activation",
        functools.partial(ChannelNorm.of, "instance_norm"),
        _channel_attributes,
    ),
    "group_norm": _Family(
        ("weight", "bias"),
        _BOTH,
        "str data_format, float eps, str? activation, int num_groups",
        functools.partial(ChannelNorm.of, "group_norm"),
        lambda op: (*_channel_attributes(op), op.num_groups),
    ),
    "batch_norm": _Family(
        ("weight", "bias", "running_mean", "running_var"),
        _BOTH,
        "str data_format, float eps, str? activation, bool training, float momentum, str convention",
        lambda data_format, eps, activation, *rest: ChannelNorm.of(
            "batch_norm", data_format, eps, activation, None, *rest
        ),
        lambda op: (
            *_channel_attributes(op),
            op.training,
            op.taken if op.unbiased else op.kept,
            "torch" if op.unbiased else "keras",
        ),
    ),
    "batch_norm_stats": _Family(
        (),
        _BOTH,
        "str data_format",
        functools.partial(ChannelNorm.of, "batch_norm_stats"),
        lambda op: (op.data_format,),
    ),
    "gelu": _Family(
        ("bias",),
        (),
        "str approximate",
        Pointwise.of,
        lambda op: ("tanh" if op.activation == "gelu_tanh" else "none",),
    ),
}


# ---- What Python code calls, torch.compile among it while it traces.


def apply(
    op: Op, x: Any, residual: Any, weight: Any, bias: Any, out: Any, stats: bool, running: tuple[Any, ...]
) -> Results:
    """`Adapter.apply` by PyTorch's dispatcher."""
    if out is not None:
        raise ValueError(
            "out cannot be given inside torch.export, torch.func and forward-mode differentiation, nor for tensors of "
            "a subclass, negated in memory (see resolve_neg) or without memory of their own; leave it out"
        )
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    # The torch.compile of PyTorch 2.5 does not know |= of pairs.
    given.update(zip(("running_mean", "running_var"), running or (None, None)))
    for item, tensor in given.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise no_tensor(item, tensor, "PyTorch", "a PyTorch tensor")
        if tensor is not None and tensor.is_nested:
            raise TypeError(f"{item} is nested; it must be a torch.strided tensor")
    differentiated = (x, residual, weight, bias)
    recorded = torch.is_grad_enabled() and any([item is not None and item.requires_grad for item in differentiated])
    # A trace of torch.jit's is recorded once more without gradients, to be compared, and may be run with them.
    traced = not torch.compiler.is_dynamo_compiling() and is_tracing()
    found = _results(op, given, stats or recorded or traced)
    # Constants, also where vmap composes the op of PyTorch's own, which autograd could follow.
    if "running_var" in found:
        for tensor, place in zip(running, ("running_mean", "running_var")):
            tensor.copy_(found[place].detach())
    mean, rstd = [found[item].detach() if stats and item in found else None for item in _BOTH]
    return found.get("y"), found.get("residual_out"), mean, rstd


def _results(op: Op, given: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """What the operator of an op gives, by name."""
    has_residual, has_running = given.get("residual") is not None, given.get("running_mean") is not None
    name, operands, attributes, names = _forward_call(op.name_in_ops, has_residual, has_running, keeps)
    results = getattr(torch.ops.cunorm, name)(*[given.get(item) for item in operands], *attributes, keeps)
    return dict(zip(names, results))


def backward(op: Op, output_mask: tuple[bool, bool, bool], bias_dtype: str | None, *tensors: Any) -> Gradients:
    """`Adapter.backward` by PyTorch's dispatcher, of its tensors in that order."""
    name, operands, attributes = _backward_call(op.name_in_ops)
    given = dict(zip(BACKWARD_NAMES, tensors))
    gradients = getattr(torch.ops.cunorm, name)(
        *[given[item] for item in operands], *attributes, output_mask, bias_dtype
    )
    rest = iter(gradients)
    dx, dweight, dbias = [next(rest) if wanted else None for wanted in output_mask]
    return dx, dweight, dbias


def _family_of(op: Any) -> str:
    if isinstance(op, RowNorm):
        return "layer_norm" if op.norm.centered else "rms_norm"
    return op.name if isinstance(op, ChannelNorm) else "gelu"


def _forward_call(name_in_ops: str, has_residual: bool, has_running: bool, stats: bool) -> tuple[Any, ...]:
    """The operator of an op, what it takes, and what its results are."""
    op = getattr(op_names.OPS, name_in_ops)
    name = _family_of(op)
    family = _FAMILIES[name]
    return name, family.forward, family.attributes(op), _result_names(name, op, has_residual, has_running, stats)


def _backward_call(name_in_ops: str) -> tuple[Any, ...]:
    op = getattr(op_names.OPS, name_in_ops)
    name = _family_of(op)
    return f"{name}_backward", _FAMILIES[name].backward, _FAMILIES[name].attributes(op)


def _result_names(name: str, op: Op, has_residual: bool, has_running: bool, stats: bool) -> tuple[str, ...]:
    y = () if name == "batch_norm_stats" else ("y",)
    residual_out = ("residual_out",) if has_residual else ()
    statistics = _FAMILIES[name].statistics if stats else ()
    return y + residual_out + statistics + (_FORWARD[4:] if has_running and op.updates_running else ())


# torch.compile calls these while it traces, and takes the results for constants. Of the arguments it must know the
# values, as it does of names and not, before PyTorch 2.13, of ops.
for _function in (_forward_call, _backward_call):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


# ---- What the dispatcher calls.


# The registrations end with this object.
_LIBRARY: Any = torch.library.Library("cunorm", "DEF")  # type: ignore[no-untyped-call]
# Else torch.compile may hand over tensors whose strides are not those that the results were foretold of.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


_unpack_dual: Any = forward_ad.unpack_dual
_single_level: Any = autograd_function.enable_single_level_autograd_function  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _op(name: str, attributes: tuple[Any, ...]) -> Op:
    op: Op = _FAMILIES[name].op(*attributes)
    return op


class _Call(NamedTuple):
    """The arguments of an operator."""

    op: Any
    tensors: dict[str, Any]
    attributes: tuple[Any, ...]
    options: tuple[Any, ...]

    def take(self, names: Sequence[str], see: Callable[[Any, str], Any]) -> Any:
        """What ``see`` makes of the tensors of these names, None for those that there are not."""
        given = self.tensors.get
        return [None if given(name) is None else see(given(name), name) for name in names]


class _Operator(abc.ABC):
    """One operator, by what the dispatcher asks of it: each method is registered for a key of its own."""

    def __init__(self, adapter: Adapter, family: str, name: str, operands: tuple[str, ...], options: str) -> None:
        self.adapter, self.family, self.operands = adapter, family, operands
        self._options = options.count(",") + 1
        tensors = [f"Tensor{'' if item in ('x', 'dy') else '?'} {item}" for item in operands]
        _LIBRARY.define(f"{name}({', '.join(tensors)}, {_FAMILIES[family].schema}, {options}) -> Tensor[]", tags=_TAGS)
        self.overload = getattr(torch.ops.cunorm, name).default
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, self._run, key)
        _LIBRARY.impl(name, self._record, "Autograd", with_keyset=True)
        torch.library.register_fake(f"cunorm::{name}", self._foresee, lib=_LIBRARY)
        torch.library.register_vmap(f"cunorm::{name}", self._map, lib=_LIBRARY)

    def call_of(self, arguments: Sequence[Any]) -> _Call:
        count, options = len(self.operands), len(arguments) - self._options
        attributes = tuple([tuple(item) if isinstance(item, list) else item for item in arguments[count:options]])
        tensors = dict(zip(self.operands, arguments))
        return _Call(_op(self.family, attributes), tensors, attributes, tuple(arguments[options:]))

    def _run(self, *arguments: Any) -> list[Any]:
        return [item for item in self.run(self.call_of(arguments)) if item is not None]

    def _foresee(self, *arguments: Any) -> list[Any]:
        call = self.call_of(arguments)
        outputs = self.foresee(call, functools.partial(_foreseen, self.adapter, call.tensors["x"]))
        x = call.tensors["x"]
        return [self.adapter.empty(output, x) for output in outputs if output is not None]

    def _record(self, keyset: Any, *arguments: Any) -> list[Any]:
        tensors = [item for item in arguments[: len(self.operands)] if item is not None]
        if forward_ad._current_level >= 0 and any(_unpack_dual(item).tangent is not None for item in tensors):
            raise RuntimeError(f"{self.overload} has no derivative in forward mode AD (torch.func.jvp)")
        if not (torch.is_grad_enabled() and any(item.requires_grad for item in tensors)):
            return self.below_autograd(keyset, arguments)
        # A transformation of functions has the dispatcher come here once for each of its levels.
        with _single_level():
            return list(_node(self, keyset, *arguments))

    def below_autograd(self, keyset: Any, arguments: Sequence[Any]) -> list[Any]:
        with torch._C._AutoDispatchBelowAutograd():
            results: list[Any] = self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
            return results

    def _map(self, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[Any], list[int | None]]:
        call = self.call_of(arguments)
        places: dict[str, int] = {name: place for name, place in zip(self.operands, in_dims) if place is not None}

        def see(tensor: Any, name: str) -> View:
            # Strides that vmap gives, at this level or another, are none that a call could do anything about.
            view = _foreseen(self.adapter, call.tensors["x"], tensor, name)
            shape = tuple(size for axis, size in enumerate(view.shape) if axis != places.get(name))
            return view._replace(shape=shape, strides=contiguous_strides(shape))

        self.foresee(call, see)  # raises what one of the calls would
        return self.map(call, places, info)

    @abc.abstractmethod
    def run(self, call: _Call) -> Sequence[Any]:
        """The results."""

    @abc.abstractmethod
    def foresee(self, call: _Call, see: Callable[[Any, str], View]) -> Sequence[Output | None]:
        """What the results will be, of views that have no address. Raises what `run` would of wrong arguments."""

    @abc.abstractmethod
    def keep(self, ctx: Any, call: _Call, results: Sequence[Any]) -> None:
        """Keep what `differentiate` needs."""

    @abc.abstractmethod
    def differentiate(self, ctx: Any, gradients: Sequence[Any]) -> dict[str, Any]:
        """The gradients of the operands that have one."""

    @abc.abstractmethod
    def map(self, call: _Call, places: dict[str, int], info: Any) -> tuple[list[Any], list[int | None]]:
        """The results of all calls that tensors with one more axis stand for, and where that axis is in them.

        ``places`` says where it is in the tensors.
        """


@contextlib.contextmanager
def _as_at_the_next_level() -> Iterator[None]:
    """The modes that the next level of nested transformations of functions is to find.

    A Function switches derivatives off in its forward: this level's, which has recorded it, but a level further out has
    not yet.
    """
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class Cunorm(_SingleLevelFunction):
    """The node of any operator in PyTorch's graph of derivatives, which is named for it."""

    @staticmethod
    def forward(ctx: Any, operator: _Operator, keyset: Any, *arguments: Any) -> Any:
        with _as_at_the_next_level():
            results = operator.below_autograd(keyset, arguments)
        ctx.operator, ctx.count = operator, len(arguments) + 2
        ctx.set_materialize_grads(False)
        operator.keep(ctx, operator.call_of(arguments), results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.operator.differentiate(ctx, gradients)
        results = [None, None, *[found.get(name) for name in ctx.operator.operands]]
        return (*results, *[None] * (ctx.count - len(results)))


_node: Any = Cunorm.apply  # type: ignore[attr-defined]


class _Forward(_Operator):
    def names(self, call: _Call) -> tuple[str, ...]:
        given, (stats,) = call.tensors.get, call.options
        has_running = given("running_mean") is not None
        return _result_names(self.family, call.op, given("residual") is not None, has_running, stats)

    def run(self, call: _Call) -> Sequence[Any]:
        x, residual, weight, bias, running_mean, running_var = call.take(_FORWARD, _ordinary)
        running = () if running_mean is None else (running_mean, running_var)
        updated = running = tuple([item.clone() for item in running]) if call.op.updates_running else running
        results = execute.forward(self.adapter, call.op, x, residual, weight, bias, None, call.options[0], running)
        return (*results, *updated) if call.op.updates_running else results

    def foresee(self, call: _Call, see: Callable[[Any, str], View]) -> Sequence[Output | None]:
        *views, running_mean, running_var = call.take(_FORWARD, see)
        running = () if running_mean is None else (running_mean, running_var)
        outputs = call.op.prepare_forward(*views, None, call.options[0], running).outputs
        updated = [Output(view.shape, view.dtype) for view in running] if call.op.updates_running else []
        return (*outputs, *updated)

    def keep(self, ctx: Any, call: _Call, results: Sequence[Any]) -> None:
        given, found = call.tensors.get, dict(zip(self.names(call), results))
        wanted = dict(zip(self.operands, ctx.needs_input_grad[2:]))
        # Where weight and bias alone have gradients, the sum of x and residual is a constant.
        has_gradient = ("y", "residual_out") if wanted["x"] or wanted.get("residual") else ("y",)
        ctx.mark_non_differentiable(*[item for name, item in found.items() if name not in has_gradient])
        bias = given("bias")
        kept = (found.get("residual_out", given("x")), given("weight"), bias if call.op.keeps_bias else None)
        # Where statistics are given but none are results, `differentiate` has to compute these.
        is_given = not call.op.updates_running and "rstd" not in found and given("running_mean") is not None
        running = (given("running_mean"), given("running_var")) if is_given else ()
        ctx.save_for_backward(*kept, found.get("mean"), found.get("rstd"), *running)
        ctx.op, ctx.names = call.op, self.names(call)
        ctx.bias_dtype = None if bias is None else str(bias.dtype).removeprefix("torch.")

    def differentiate(self, ctx: Any, gradients: Sequence[Any]) -> dict[str, Any]:
        incoming, wanted = dict(zip(ctx.names, gradients)), dict(zip(self.operands, ctx.needs_input_grad[2:]))
        wants_x, wants_residual = wanted["x"], wanted.get("residual", False)
        dy, added = incoming.get("y"), incoming.get("residual_out")
        if dy is None:  # y was not used
            dx, dweight, dbias = added, None, None
        else:
            x, weight, bias, mean, rstd, *running = ctx.saved_tensors
            if rstd is None and _FAMILIES[self.family].statistics:  # nobody asked for them
                found = _results(ctx.op, {"x": x, "weight": weight, **dict(zip(_FORWARD[4:], running))}, True)
                mean, rstd = found.get("mean"), found["rstd"]
            mask = (wants_x or wants_residual, wanted.get("weight", False), wanted.get("bias", False))
            dx, dweight, dbias = backward(ctx.op, mask, ctx.bias_dtype, dy, added, x, weight, bias, mean, rstd)
        of_inputs = {"x": dx if wants_x else None, "residual": dx if wants_residual else None}
        return of_inputs | {"weight": dweight, "bias": dbias}

    def map(self, call: _Call, places: dict[str, int], info: Any) -> tuple[list[Any], list[int | None]]:
        return batching.map_forward(self.overload, call, places, info.batch_size)


class _Backward(_Operator):
    def run(self, call: _Call) -> Sequence[Any]:
        mask, bias_dtype = call.options
        dy, added, x, weight, bias, mean, rstd = call.take(BACKWARD_NAMES, _ordinary)
        output_mask = mask[0], mask[1], mask[2]
        return execute.backward(self.adapter, call.op, dy, added, x, weight, bias, mean, rstd, output_mask, bias_dtype)

    def foresee(self, call: _Call, see: Callable[[Any, str], View]) -> Sequence[Output | None]:
        (mask, bias_dtype), views = call.options, call.take(BACKWARD_NAMES, see)
        outputs: Sequence[Output | None] = call.op.prepare_backward(*views, tuple(mask), bias_dtype).outputs
        return outputs

    def keep(self, ctx: Any, call: _Call, results: Sequence[Any]) -> None:
        pass

    def differentiate(self, ctx: Any, gradients: Sequence[Any]) -> dict[str, Any]:
        raise RuntimeError(f"{self.overload} cannot be differentiated: cunorm has no second derivatives")

    def map(self, call: _Call, places: dict[str, int], info: Any) -> tuple[list[Any], list[int | None]]:
        return batching.map_backward(self.overload, call, places, info.batch_size)


def register(adapter: Adapter) -> None:
    """Define all operators, which compute with this adapter."""
    for name, family in _FAMILIES.items():
        _Forward(adapter, name, name, family.forward, "bool return_stats")
        _Backward(adapter, name, f"{name}_backward", family.backward, "bool[3] output_mask, str? bias_dtype")


def _ordinary(tensor: Any, name: str) -> Any:
    """The same memory without a user's subclass, which the dispatcher hands through."""
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def _foreseen(adapter: Any, x: Any, tensor: Any, name: str) -> View:
    """What there is to know of a tensor without memory. Results are foretold as those on the CPU, which are alike."""
    if tensor.device != x.device:
        raise RuntimeError(f"{name} is on {tensor.device} and x on {x.device}; they must be on one device")
    view: View = adapter.layout(tensor, name)._replace(device=("cpu", 0))
    if any(isinstance(size, torch.SymInt) for size in view.shape):
        # PyTorch's strides have max(1, size) where ours have the size: of one that is not counted yet, nobody could say
        # that this is the same.
        theirs = make_contiguous_strides_for(view.shape)
        if all(statically_known_true(stride == other) for stride, other in zip(view.strides, theirs)):
            view = view._replace(strides=contiguous_strides(view.shape))
    return view
