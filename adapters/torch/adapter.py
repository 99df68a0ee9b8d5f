"""PyTorch tensors: differentiable, on PyTorch's current stream, in memory from PyTorch's allocator.

CUDA tensors go to the kernels, CPU tensors to ``cunorm.reference``, in both cases over PyTorch's own memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cunorm import execute, op_names
from cunorm.adapters.torch import host, library
from cunorm.checks import no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import BACKWARD_NAMES, FORWARD_NAMES, Gradients, Op, Output, Results
from cunorm.problem import View
from cunorm.text import kind_of

__all__ = ["ADAPTER", "not_strided"]

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.uint8: "uint8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
# Every call comes to these.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = library.is_tracing
_number_of_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # which PyTorch for CPUs has not
# Not None while torch.compile looks at each function that is called.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_compiles_frames: Any = getattr(_eval_frame, "get_eval_frame_callback", lambda: None)
# What the code that torch.compile makes allocates with, in half the time of torch.empty_like, and what tells the inputs
# of its graphs apart, in a tenth of the time that Python would take. Both are private to PyTorch, and may go.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cpu: Any = getattr(_guards, "_empty_strided_cpu", None)
_empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)
# The hooks that tensors saved from now on go to, None without; before PyTorch 2.8 nobody can ask.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)


def _empty(output: Output, device: torch.device) -> torch.Tensor:
    dtype = _DTYPES[output.dtype]
    if output.permutation is not None:
        return torch.empty_permuted(output.shape, output.permutation, dtype=dtype, device=device)
    return torch.empty(output.shape, dtype=dtype, device=device)


def _allocation(output: Output) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of what `_empty` makes."""
    return output.shape, _empty(output, torch.device("meta")).stride(), _DTYPES[output.dtype]


class _StandsForAnother(Exception):
    """A tensor that is not just memory: of a subclass, of a transformation of functions, or on the meta device.

    Or not quite that memory: the gradients that PyTorch gives may be views of the negated numbers, or zeros that have
    no memory. Its dispatcher makes tensors of them all.
    """


def _requires_grad(*tensors: Any) -> bool:
    # Every call comes here: a generator, or getattr with a default, would take longer.
    for tensor in tensors:
        if tensor is not None:
            try:
                if tensor.requires_grad:
                    return True
            except AttributeError:  # no tensor: `view` says so
                pass
    return False


def _has_storage(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True  # elsewhere: `view` refuses it
    try:
        tensor.data_ptr()
    except RuntimeError:  # a tensor of vmap, say, or one that outlived its transformation
        return False
    return True


class _Kind:
    """Tensors that are alike in shapes, strides, dtypes, devices, and in what PyTorch's dispatcher does with them.

    It is compared by identity. ``includes`` says no where a tensor is given twice. ``is_recorded`` says whether
    autograd records what is computed of them.
    """

    __slots__ = ("includes", "is_recorded")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.includes: Callable[..., bool]
        if _TensorGuards is None:
            traits = _traits(*tensors)
            self.includes = lambda *others: _traits(*others) == traits
        else:
            self.includes = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.is_recorded = _is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _traits(*tensors: torch.Tensor) -> list[Any]:
    """What `_Kind` says of tensors, without PyTorch's guards."""
    traits: list[Any] = [len({id(tensor) for tensor in tensors})]
    for tensor in tensors:
        traits += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout, type(tensor))
        traits += (tensor.is_neg(), tensor.is_conj(), tensor.is_inference(), tensor.requires_grad)
    return traits


# The kinds that there were, the latest first, by a key that tells most of them apart.
_kinds: dict[Any, tuple[_Kind, ...]] = {}
_MOST_KEYS, _MOST_KINDS = 4096, 32


def _kind_of(key: Any, tensors: Sequence[torch.Tensor]) -> _Kind:
    kinds = _kinds.get(key, ())
    for kind in kinds:
        if kind.includes(*tensors):
            return kind
    once = list({id(tensor): tensor for tensor in tensors}.values())
    if len(once) < len(tensors):
        numbers = [id(tensor) for tensor in once]
        return _kind_of((key, *[numbers.index(id(tensor)) for tensor in tensors]), once)
    if len(_kinds) >= _MOST_KEYS:
        _kinds.clear()
    kind = _Kind(tensors)
    _kinds[key] = (kind, *kinds[: _MOST_KINDS - 1])
    return kind


def not_strided(name: str, tensor: torch.Tensor) -> TypeError:
    """What to raise for a tensor that is nested, or of another layout."""
    layout = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
    return TypeError(f"{name} {layout}; it must be a torch.strided tensor")


class TorchAdapter(Adapter):
    def layout(self, tensor: Any, name: str) -> View:
        """The tensor as memory, but for the address."""
        if not isinstance(tensor, torch.Tensor):
            raise no_tensor(name, tensor, "PyTorch", "a PyTorch tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise not_strided(name, tensor)
        dtype = _NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
        place = ("cuda", tensor.device.index) if tensor.device.type == "cuda" else ("cpu", 0)
        return View(0, tuple(tensor.shape), tensor.stride(), dtype, place)

    def view(self, tensor: Any, name: str) -> View:
        view = self.layout(tensor, name)
        if tensor.device.type not in ("cuda", "cpu"):
            raise RuntimeError(f"{name} is on device {tensor.device}; it must be on a CUDA device or the CPU")
        if tensor.is_neg() or tensor._is_zerotensor():
            raise _StandsForAnother
        if not tensor.data_ptr() and tensor.numel():
            raise RuntimeError(f"{name} is {kind_of(tensor)} without memory of its own")
        return view._replace(pointer=tensor.data_ptr())

    def describe(self, tensors: Sequence[Any], names: Sequence[str]) -> tuple[Any, list[int]]:
        given, pointers, places = [], [], 0
        for tensor in tensors:
            places <<= 5
            if tensor is None:
                pointers.append(0)
                continue
            if type(tensor) not in _ORDINARY:
                return self._describe_others(tensors, names)
            try:
                pointer = tensor.data_ptr()
            except RuntimeError:
                return self._describe_others(tensors, names)
            # PyTorch's guards would end the process over a nested tensor.
            if tensor.is_nested or (not pointer and (tensor.numel() or tensor.is_meta)):
                return self._describe_others(tensors, names)
            given.append(tensor)
            pointers.append(pointer)
            places |= pointer & 15 | 16
        return _kind_of((places, given[0].shape, _is_grad_enabled()), given), pointers

    def _describe_others(self, tensors: Sequence[Any], names: Sequence[str]) -> tuple[Any, list[int]]:
        """Says what is wrong with tensors that are not just memory, or raises `_StandsForAnother`."""
        x = tensors[names.index("x")]
        if isinstance(x, torch.Tensor) and x.is_meta:
            raise _StandsForAnother
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (type(tensor) not in _ORDINARY or not _has_storage(tensor)):
                raise _StandsForAnother
        return super().describe(tensors, names)

    def empty(self, output: Output, like: torch.Tensor) -> torch.Tensor:
        return _empty(output, like.device)

    def allocator(self, output: Output, like: torch.Tensor) -> Callable[[Any], Any]:
        shape, strides, dtype = _allocation(output)
        if _empty_strided_cpu is None or _empty_strided_cuda is None:
            return lambda tensor: _empty(output, tensor.device)
        if like.device.type == "cpu":
            return lambda tensor: _empty_strided_cpu(shape, strides, dtype)
        index = like.device.index

        def allocate(tensor: torch.Tensor) -> Any:
            if _current_device() == index:
                return _empty_strided_cuda(shape, strides, dtype)
            return _empty(output, tensor.device)

        return allocate

    # Every call comes here: a method of ours would take as long again.
    pointer = staticmethod(torch.Tensor.data_ptr)  # type: ignore[assignment]

    def stream(self, device: tuple[str, int]) -> int:
        # The raw handle costs a fortieth of torch.cuda.current_stream(), which makes a Python object of it.
        return int(torch._C._cuda_getCurrentRawStream(device[1])) if device[0] == "cuda" else 0

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
        if running and _is_grad_enabled() and _requires_grad(*running):
            name = "running_mean" if _requires_grad(running[0]) else "running_var"
            must = f"running statistics are constants to differentiation: give {name}.detach()"
            raise ValueError(f"{name} requires a gradient; {must}")
        tensors = (x, residual, weight, bias, out, *running)
        # The results, if compiled code knows such calls; None if it may be taught them, False if not.
        native, known = host.native, False
        if native is not None and not _is_compiling() and forward_ad._current_level < 0:
            known = native.forward(op, op.keeps_bias, stats, *tensors)
            if known:
                return known  # type: ignore[no-any-return]
        traced = _is_compiling() or _is_tracing() or _number_of_modes()
        if out is not None and (_is_compiling() or _compiles_frames() is not None):
            return _outside_of_graphs(op, x, residual, weight, bias, out, stats, running)  # type: ignore[no-any-return]
        if traced or _is_transformed() or forward_ad._current_level >= 0:
            return library.apply(op, x, residual, weight, bias, out, stats, running)
        try:
            described = self.describe(tensors, FORWARD_NAMES)
            if described[0].is_recorded:
                results = _record(op, x, residual, weight, bias, out, stats, running, described)
                if known is None:
                    self._teach_forward(op, stats, True, tensors, described[0])
                return results
            results = execute.forward(self, op, x, residual, weight, bias, out, stats, running, described)
            if known is None:
                self._teach_forward(op, stats, False, tensors, described[0])
        except _StandsForAnother:
            results = None
        if results is None:
            return library.apply(op, x, residual, weight, bias, out, stats, running)
        if out is not None:
            _written(out)
        if running and op.updates_running:
            _written(*running)
        return results

    def _teach_forward(self, op: Op, stats: bool, recorded: bool, tensors: Sequence[Any], kind: _Kind) -> None:
        find = functools.partial(execute.known_forward, self, op, stats or recorded, kind)
        kept = host.Statistics.NONE
        if stats or recorded:
            kept = host.Statistics.APART if _keeps_apart(stats) else host.Statistics.PAIRED
        host.teach_forward(op, kept, tensors, find, _allocation)

    def _teach_backward(
        self,
        op: Op,
        output_mask: tuple[bool, bool, bool],
        bias_dtype: str | None,
        paired: bool,
        tensors: Sequence[Any],
    ) -> None:
        kind, _ = self.describe(tensors, BACKWARD_NAMES)
        find = functools.partial(execute.known_backward, self, op, output_mask, bias_dtype, paired, kind)
        dtype = None if bias_dtype is None else _DTYPES[bias_dtype]
        host.teach_backward(op, output_mask, dtype, paired, tensors, find, _allocation)

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
        paired: bool = False,
    ) -> Gradients:
        if not (_is_compiling() or _number_of_modes() or _is_transformed() or forward_ad._current_level >= 0):
            tensors = (dy, dresidual_out, x, weight, bias, mean, rstd)
            native, known = host.native, False
            if native is not None:
                dtype = None if bias_dtype is None else _DTYPES[bias_dtype]
                known = native.backward(op, output_mask, dtype, paired, *tensors)
                if known:
                    return known  # type: ignore[no-any-return]
            # Only the dispatcher can say, later on, that there are no second derivatives.
            if not (_is_grad_enabled() and _requires_grad(*tensors)):
                try:
                    gradients = execute.backward(self, op, *tensors, output_mask, bias_dtype, paired)
                except _StandsForAnother:
                    pass
                else:
                    if known is None:
                        self._teach_backward(op, output_mask, bias_dtype, paired, tensors)
                    return gradients
        if paired:
            mean, rstd = mean.unbind()
        return library.backward(op, output_mask, bias_dtype, dy, dresidual_out, x, weight, bias, mean, rstd)


def _backward_of_kind_unknown(*arguments: Any, **options: Any) -> Gradients:
    """`TorchAdapter.backward`, for the compiled code, which knows dtypes as PyTorch has them."""
    options["bias_dtype"] = _NAMES.get(options["bias_dtype"])  # None for None
    mean, rstd = arguments[-2:]
    return ADAPTER.backward(*arguments[:-2], *map(_saved, (mean, rstd)), **options)


def _saved(statistic: Any) -> Any:
    """A statistic that was saved, contiguous: a hook may have put it elsewhere."""
    return statistic if statistic is None or statistic.is_contiguous() else statistic.contiguous()


def _keeps_apart(stats: bool) -> bool:
    """Whether a node saves mean and rstd as two tensors: where they are results, and where hooks look at them.

    That is what the dispatcher's node saves. ``torch.utils.checkpoint`` counts what is saved, and a mode may be active
    in but one of forward and recomputation.
    """
    return stats or _top_hooks(True) is not None


ADAPTER = TorchAdapter()
library.register(ADAPTER)
host.load(_backward_of_kind_unknown)


def _apply(*arguments: Any) -> Results:
    return ADAPTER.apply(*arguments)


# Of what it breaks a graph for, torch.compile would else compile the functions that are called.
_NO_OUT = "out cannot be given inside torch.compile(fullgraph=True), since PyTorch's compiler plans the memory"
try:
    _outside_of_graphs: Any = torch.compiler.disable(_apply, reason=_NO_OUT)  # type: ignore[no-untyped-call]
except TypeError:  # of an older PyTorch, which takes no reason
    _outside_of_graphs = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]
op_names.is_compiling = torch.compiler.is_dynamo_compiling


def _written(*tensors: torch.Tensor) -> None:
    """Tell autograd, which may have saved these tensors. Those of inference mode have no versions to count."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _record(
    op: Op,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    stats: bool,
    running: tuple[Any, ...],
    described: tuple[Any, list[int]],
) -> Results:
    if out is not None:
        raise ValueError("out cannot be given where gradients are recorded; use torch.no_grad() or leave it out")
    results = _apply_recorded(x, residual, weight, bias, (op, stats, running, described))
    if not stats:
        return (results, None, None, None) if residual is None else (*results, None, None)
    y, *others = results
    residual_out = None if residual is None else others.pop(0)
    *mean, rstd = others
    return y, residual_out, mean[0] if mean else None, rstd


class Cunorm(torch.autograd.Function):
    """Any op of ``cunorm.prepared.Op``: y, or a tuple of y[, residual_out][[, mean], rstd]. Nodes are named for it.

    The statistics are kept for the gradient, and are not differentiable where they are results too. Results that a call
    does not have, or that nobody asked for, are left out, since autograd takes time for each.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, bias: Any, call: tuple[Any, ...]) -> Any:
        op, stats, running, described = call
        # What users get is no view of one tensor.
        paired = not _keeps_apart(stats)
        y, residual_out, mean, rstd = execute.forward(
            ADAPTER, op, x, residual, weight, bias, None, True, running, described, paired
        )
        if running and op.updates_running:
            _written(*running)
        ctx.call = op, None if bias is None else _NAMES[bias.dtype]
        kept = x if residual_out is None else residual_out
        ctx.save_for_backward(kept, weight, bias if op.keeps_bias else None, mean, rstd)
        ctx.set_materialize_grads(False)  # there would be zeros for what was not used, mean and rstd always
        statistics = () if not stats else (rstd,) if mean is None else (mean, rstd)
        # Where weight and bias alone have gradients, the sum of x and residual is a constant.
        if residual_out is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(residual_out, *statistics)
        elif statistics:
            ctx.mark_non_differentiable(*statistics)
        if not stats:
            return y if residual_out is None else (y, residual_out)
        return (y, *statistics) if residual_out is None else (y, residual_out, *statistics)

    @staticmethod
    def backward(ctx: Any, dy: Any, dresidual_out: Any = None, *_: Any) -> Any:
        # Without a residual what comes second is the gradient of a statistic: None, like all of theirs.
        needs_x, needs_residual, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if dy is None:  # y was not used
            dx, dweight, dbias = dresidual_out, None, None
        else:
            op, bias_dtype = ctx.call
            x, weight, bias, mean, rstd = ctx.saved_tensors
            mask, paired = (needs_x or needs_residual, needs_weight, needs_bias), mean is not None and rstd is None
            mean, rstd = _saved(mean), _saved(rstd)
            dx, dweight, dbias = ADAPTER.backward(
                op, dy, dresidual_out, x, weight, bias, mean, rstd, mask, bias_dtype, paired
            )
        return dx if needs_x else None, dx if needs_residual else None, dweight, dbias, None


# What `torch.autograd.Function.apply` comes to where no transformation of functions is at work.
_apply_recorded: Any = super(torch.autograd.Function, Cunorm).apply
