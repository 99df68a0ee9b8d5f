"""From checked views to a finished result: the way every framework's tensors take.

An adapter turns tensors into ``View``s, asks the op to prepare them (checks, problem, plan, compiled kernels; done once
for each kind of call and cached), allocates what ``Prepared`` says, and runs it. On a CUDA device that launches kernels
on the stream given; on the CPU it calls ``cunorm.reference`` on the same memory.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from cunorm.prepared import BACKWARD_NAMES, FORWARD_NAMES, Gradients, Op, Output, Prepared, Results
from cunorm.problem import DTYPES, View

__all__ = [
    "Adapter",
    "Ready",
    "also_forget",
    "backward",
    "forget_compiled",
    "forget_prepared",
    "forward",
    "generation",
    "known_backward",
    "known_forward",
    "prepared_once",
]


class Adapter(Protocol):
    """How a framework's tensors meet cunorm; ``ADAPTER`` in each file of ``cunorm.adapters``."""

    def view(self, tensor: Any, name: str) -> View:
        """The tensor as memory. ``name`` is the argument's, for error messages."""

    def describe(self, tensors: Sequence[Any], names: Sequence[str]) -> tuple[Any, list[int]]:
        """What the views of some tensors (or None) are but for their addresses, and the addresses.

        The first is a key for calls that were prepared; it may be anything that tells views and alignments apart, and
        may let pass what `view` refuses, which every key goes through once. This is the time that every call takes.
        """
        views = _views(self, tensors, names)
        kind = tuple(None if view is None else (*view[1:], view.pointer & 15) for view in views)
        return kind, [0 if view is None else view.pointer for view in views]

    def empty(self, output: Output, like: Any) -> Any:
        """A new tensor beside ``like``, as ``output`` says; dtype "uint8" must work too, which the workspace has.

        The workspace is dropped as soon as the kernels are launched. Where the framework's allocator does not go by the
        stream that they run on, the adapter has to hold it longer.
        """

    def allocator(self, output: Output, like: Any) -> Callable[[Any], Any] | None:
        """What makes a tensor as ``empty`` does, given one of the same kind as ``like``, if that can be kept.

        It is asked for once for each kind of call. None lets `empty` be called every time.
        """
        return None

    def pointer(self, tensor: Any) -> int:
        """The data pointer of a tensor that ``empty`` made."""

    def stream(self, device: tuple[str, int]) -> int:
        """The raw handle of the framework's current stream on a CUDA device; 0 on the CPU."""

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
        """y, residual_out, mean, rstd, differentiable where the framework differentiates.

        residual_out is None without a residual; mean and rstd unless ``stats``, and for an op that has none.
        """

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
        """The gradients dx, dweight, dbias; None where ``output_mask`` does not ask for one."""
        return backward(self, op, dy, dresidual_out, x, weight, bias, mean, rstd, output_mask, bias_dtype)


# The op says whether it needs statistics.
_OPTIONAL = ("residual", "weight", "bias", "out", "dresidual_out", "mean", "rstd")


class Ready(NamedTuple):
    """A prepared call, and for each of its outputs and its workspace what allocates it, where that is known.

    A ``pair`` is mean and rstd in one tensor, of which the second begins ``pair_offset`` bytes behind the first.
    """

    prepared: Prepared
    allocators: tuple[Callable[[Any], Any] | None, ...]
    workspace: Output | None
    workspace_allocator: Callable[[Any], Any] | None
    pair_allocator: Callable[[Any], Any] | None
    pair_offset: int
    pair: Output | None

    @staticmethod
    def of(adapter: Adapter, prepared: Prepared, like: Any, mean: View | Output | None) -> Ready:
        def allocator(output: Output | None) -> Callable[[Any], Any] | None:
            return None if output is None else adapter.allocator(output, like)

        workspace = Output((prepared.workspace_bytes,), "uint8") if prepared.workspace_bytes else None
        pair = None if mean is None else Output((2, *mean.shape), mean.dtype)
        offset = 0 if mean is None else math.prod(mean.shape) * DTYPES[mean.dtype].itemsize
        allocators = tuple(map(allocator, prepared.outputs))
        return Ready(prepared, allocators, workspace, allocator(workspace), allocator(pair), offset, pair)


# The calls of each kind that have been prepared: a call like one before does nothing but allocate and launch. Found
# without the lock, which is for changes: the oldest cannot be looked for while another thread adds one.
_calls: dict[Any, Ready] = {}
_calls_lock = threading.Lock()
_MOST_CALLS = 4096
_forgetters: list[Callable[[], None]] = []
_compiled_forgetters: list[Callable[[], None]] = []
# How often prepared calls were forgotten. What has to go on with the plan that it began with, keeps it by this number.
generation = 0


def also_forget(forget: Callable[[], None], *, compiled: bool = False) -> None:
    """Have ``forget`` called with prepared calls: it empties a cache of what they are made of, or is made of them.

    A cache of ``compiled`` code is emptied only when a kernel's text has changed, not when another plan may be better.
    """
    (_compiled_forgetters if compiled else _forgetters).append(forget)


def forget_compiled() -> None:
    """Let everything be prepared and compiled anew, since a kernel has another text now."""
    forget_prepared()
    for forget in _compiled_forgetters:
        forget()


def forget_prepared() -> None:
    """Let every kind of call be prepared anew when it comes again, since another plan may be better now."""
    global generation
    # First, since compiled code is taught what is found here; what was prepared before goes by the generation.
    with _calls_lock:
        _calls.clear()
        generation += 1
    for forget in _forgetters:
        forget()


def _remember(key: Any, ready: Ready, begun: int) -> None:
    """Keep a call, unless prepared calls were forgotten since the generation in which its preparation had begun."""
    with _calls_lock:
        if begun != generation:
            return
        if len(_calls) >= _MOST_CALLS:
            del _calls[next(iter(_calls))]  # the oldest
        _calls[key] = ready


def known_forward(adapter: Adapter, op: Op, stats: bool, kind: Any) -> Ready | None:
    """What `forward` has prepared of a kind, as `Adapter.describe` has told it, and keeps."""
    return _calls.get((type(adapter), op, stats, kind))


def known_backward(
    adapter: Adapter, op: Op, output_mask: tuple[bool, bool, bool], bias_dtype: str | None, paired: bool, kind: Any
) -> Ready | None:
    """The same of `backward`."""
    return _calls.get((type(adapter), op, output_mask, bias_dtype, paired, kind))


def _views(adapter: Adapter, tensors: Sequence[Any], names: Sequence[str]) -> list[Any]:
    return [
        None if tensor is None and name in _OPTIONAL else adapter.view(tensor, name)
        for tensor, name in zip(tensors, names)
    ]


def _run(adapter: Adapter, ready: Ready, pointers: list[int], like: Any) -> None:
    prepared, _, output, allocate, _, _, _ = ready
    stream = adapter.stream(prepared.device)
    if output is None:
        prepared.run(pointers, 0, stream)
    else:
        workspace = adapter.empty(output, like) if allocate is None else allocate(like)
        prepared.run(pointers, adapter.pointer(workspace), stream)


def forward(
    adapter: Adapter,
    op: Op,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    stats: bool,
    running: tuple[Any, ...],
    described: tuple[Any, list[int]] | None = None,
    paired: bool = False,
) -> Results:
    """Run an op on tensors of one framework, without differentiation: y, residual_out, mean, rstd.

    ``described`` is what `Adapter.describe` has said of the tensors, where it was asked already. If mean and rstd are
    ``paired``, they are one tensor of two rows, in the place of mean: for an adapter that has an `allocator` for it.
    """
    if described is None:
        described = adapter.describe((x, residual, weight, bias, out, *running), FORWARD_NAMES)
    kind, pointers = described
    key = (type(adapter), op, stats, kind)
    ready = _calls.get(key)
    if ready is None:
        begun = generation
        tensors = (x, residual, weight, bias, out, *running)
        x_view, residual_view, weight_view, bias_view, out_view, *views = _views(adapter, tensors, FORWARD_NAMES)
        prepared = op.prepare_forward(x_view, residual_view, weight_view, bias_view, out_view, stats, tuple(views))
        ready = Ready.of(adapter, prepared, x, prepared.outputs[2])
        _remember(key, ready, begun)
    # Written out, since every call of a user comes here.
    prepared, allocators, workspace, _, new_pair, pair_offset, _ = ready
    y, residual_out, mean, rstd = prepared.outputs
    new_y, new_residual_out, new_mean, new_rstd = allocators
    pointer_of = adapter.pointer
    if y is not None:
        out = adapter.empty(y, x) if new_y is None else new_y(x)
        pointers[4] = pointer_of(out)  # the place of the out that was not given
    if residual_out is None:
        pointers.append(0)
    else:
        residual_out = adapter.empty(residual_out, x) if new_residual_out is None else new_residual_out(x)
        pointers.append(pointer_of(residual_out))
    if paired and new_pair is not None:
        mean, rstd = new_pair(x), None
        pointer = pointer_of(mean)
        pointers += (pointer, pointer + pair_offset)
    else:
        if mean is None:
            pointers.append(0)
        else:
            mean = adapter.empty(mean, x) if new_mean is None else new_mean(x)
            pointers.append(pointer_of(mean))
        if rstd is None:
            pointers.append(0)
        else:
            rstd = adapter.empty(rstd, x) if new_rstd is None else new_rstd(x)
            pointers.append(pointer_of(rstd))
    if workspace is None:
        prepared.run(pointers, 0, adapter.stream(prepared.device))
    else:
        _run(adapter, ready, pointers, x)
    return out, residual_out, mean, rstd


def backward(
    adapter: Adapter,
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
    """The gradients dx, dweight, dbias; None where ``output_mask`` does not ask for one.

    Mean and rstd may be ``paired`` in one tensor, in the place of mean, as `forward` gave them.
    """
    tensors = (dy, dresidual_out, x, weight, bias, mean, rstd)
    kind, pointers = adapter.describe(tensors, BACKWARD_NAMES)
    key = (type(adapter), op, output_mask, bias_dtype, paired, kind)
    ready = _calls.get(key)
    if ready is None:
        begun = generation
        views = _views(adapter, tensors, BACKWARD_NAMES)
        dy_view, added_view, x_view, weight_view, bias_view, mean_view, rstd_view = views
        if paired:
            mean_view = rstd_view = mean_view._replace(shape=mean_view.shape[1:], strides=mean_view.strides[1:])
        prepared = op.prepare_backward(
            dy_view, added_view, x_view, weight_view, bias_view, mean_view, rstd_view, output_mask, bias_dtype
        )
        ready = Ready.of(adapter, prepared, x, mean_view)
        _remember(key, ready, begun)
    if paired:
        pointers[6] = pointers[5] + ready.pair_offset
    # Written out, as in `forward`.
    dx, dweight, dbias = ready.prepared.outputs
    new_dx, new_dweight, new_dbias = ready.allocators
    pointer_of = adapter.pointer
    if dx is None:
        pointers.append(0)
    else:
        dx = adapter.empty(dx, x) if new_dx is None else new_dx(x)
        pointers.append(pointer_of(dx))
    if dweight is None:
        pointers.append(0)
    else:
        dweight = adapter.empty(dweight, x) if new_dweight is None else new_dweight(x)
        pointers.append(pointer_of(dweight))
    if dbias is None:
        pointers.append(0)
    else:
        dbias = adapter.empty(dbias, x) if new_dbias is None else new_dbias(x)
        pointers.append(pointer_of(dbias))
    _run(adapter, ready, pointers, x)
    return dx, dweight, dbias


_Prepare = TypeVar("_Prepare", bound=Callable[..., Prepared])


def prepared_once(prepare: _Prepare) -> _Prepare:
    """An op's ``prepare``, run once for each kind of call, until plans are forgotten: views are given as layouts."""

    # By the generation, so that what was begun before plans were forgotten and is done after that is not found.
    @functools.lru_cache(maxsize=4096)
    def cached(begun: int, *arguments: Any, **options: Any) -> Prepared:
        return prepare(*arguments, **options)

    also_forget(cached.cache_clear)

    @functools.wraps(prepare)
    def find(*arguments: Any, **options: Any) -> Prepared:
        layouts = [*map(_layout_of, arguments)]
        if options:
            options = dict(zip(options, map(_layout_of, options.values())))
        try:
            return cached(generation, *layouts, **options)
        except TypeError:  # a size that is a symbol to torch.compile cannot be hashed, or something is wrong indeed
            return prepare(*layouts, **options)

    return cast(_Prepare, find)


def _layout_of(argument: Any) -> Any:
    """A view less its address, of which only the alignment matters, alone or in a tuple; anything else as it is.

    This is what calls of one kind have in common.
    """
    kind = type(argument)
    if kind is View:
        return argument if argument[0] < 16 else View(argument[0] & 15, *argument[1:])
    return tuple(map(_layout_of, argument)) if kind is tuple else argument
