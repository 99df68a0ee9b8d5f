"""What torch.vmap makes of the ops: one call for all that a tensor with one more axis stands for.

Where each call has the same weight and bias, the new axis is one more of rows, or of samples, to the same kernels. Else
(calls with weights of their own, gradients of weights, a batch norm's statistics of each call) the op is composed of
PyTorch's own: always right, several times as slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cunorm.channel_norm import ChannelNorm
from cunorm.pointwise import Pointwise
from cunorm.prepared import Op
from cunorm.row_norm import RowNorm

__all__ = ["map_backward", "map_forward"]

Mapped = tuple[list[Any], list[int | None]]

# Where the gelus are 0 or the identity in any dtype.
_FAR = 40
_Activation = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def _gelu(approximate: str) -> _Activation:
    """With its limits at infinity, where PyTorch's is NaN."""

    def value(z: Any) -> Any:
        return torch.where(z >= _FAR, z, F.gelu(z.clamp(-_FAR, _FAR), approximate=approximate))

    def gradient(g: Any, z: Any) -> Any:
        return torch.ops.aten.gelu_backward(g, z.clamp(-_FAR, _FAR), approximate=approximate)

    return value, gradient


# Each activation, and its gradient's product with a vector. These are called under vmap, where torch.func cannot be.
_ACTIVATIONS: dict[str | None, _Activation] = {
    None: (lambda z: z, lambda g, z: g),
    "relu": (F.relu, lambda g, z: g * (z > 0)),
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
}
_OF_X = ("x", "residual", "dy", "dresidual_out")  # those that have x's shape


def map_forward(operator: Callable[..., Any], call: Any, places: dict[str, int], batch_size: int) -> Mapped:
    """The results of an op's operator, and where the mapped axis is in them; ``places`` is where it is in operands."""
    (stats,) = call.options
    if _are_rows(call.op, places):
        return _map_rows(operator, call, places, batch_size)
    return _composed(_forward(call.op, _with_axis(call, places, batch_size), stats))


def map_backward(operator: Callable[..., Any], call: Any, places: dict[str, int], batch_size: int) -> Mapped:
    """The same for the operator of an op's gradients."""
    mask, bias_dtype = call.options
    if _are_rows(call.op, places) and not any(mask[1:]):  # sums over rows, which are those of each call
        return _map_rows(operator, call, places, batch_size)
    return _composed(_backward(call.op, _with_axis(call, places, batch_size), mask, bias_dtype))


def _of_rows(op: Any) -> tuple[str, ...]:
    """Those that may differ from row to row. A statistic is one number a row, or one a channel where it was given."""
    return _OF_X if isinstance(op, ChannelNorm) and op.over_samples else (*_OF_X, "mean", "rstd")


def _are_rows(op: Any, places: dict[str, int]) -> bool:
    over_samples = isinstance(op, ChannelNorm) and op.over_samples and op.training
    return not over_samples and all(name in _of_rows(op) for name in places)


def _map_rows(operator: Callable[..., Any], call: Any, places: dict[str, int], batch_size: int) -> Mapped:
    op, attributes = call.op, call.attributes
    by_sample = isinstance(op, ChannelNorm)
    given_statistics = by_sample and op.over_samples

    def see(name: str, tensor: Any) -> Any:
        if tensor is not None and name in _of_rows(op):
            tensor = _to_front(tensor, places.get(name), batch_size)
            tensor = tensor.flatten(0, 1) if by_sample else tensor
        # Strides of parameters and statistics may come of another level of vmap.
        return tensor if tensor is None or name in _OF_X else tensor.contiguous()

    tensors = {name: see(name, tensor) for name, tensor in call.tensors.items()}
    if isinstance(op, RowNorm):  # whose axes are counted from behind or from the new one on
        attributes = (tuple(axis if axis < 0 else axis + 1 for axis in op.axis), *attributes[1:])
    results = operator(*tensors.values(), *attributes, *call.options)
    if not by_sample:
        return results, [0] * len(results)
    samples = _to_front(call.tensors["x"], places.get("x"), batch_size).shape[1]
    of_calls = [not given_statistics or result.shape == tensors["x"].shape for result in results]
    unfolded = [
        result.unflatten(0, (batch_size, samples)) if of_call else result for result, of_call in zip(results, of_calls)
    ]
    return unfolded, [0 if of_call else None for of_call in of_calls]


def _to_front(tensor: Any, place: int | None, batch_size: int) -> Any:
    return tensor.expand(batch_size, *tensor.shape) if place is None else tensor.movedim(place, 0)


def _with_axis(call: Any, places: dict[str, int], batch_size: int) -> dict[str, Any]:
    """The operands that there are, all with the mapped axis, which is the first."""
    return {
        name: _to_front(tensor, places.get(name), batch_size)
        for name, tensor in call.tensors.items()
        if tensor is not None
    }


def _composed(results: Sequence[Any]) -> Mapped:
    found = [result for result in results if result is not None]
    return found, [0] * len(found)


# ---- The ops composed of PyTorch's own, for tensors whose first axis is the mapped one. Everything is computed in the
# dtype of statistics and rounded once.


def _see(op: Op, tensor: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """A tensor in that dtype, the axes that statistics are taken over, and the axes of weight and bias.

    Channels come behind the samples, split into groups and the channels of a group.
    """
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if isinstance(op, ChannelNorm):
        wide = wide.movedim(_channel_axis(op), 2)
        groups = op.num_groups or wide.shape[2]
        wide = wide.unflatten(2, (groups, wide.shape[2] // groups))
        samples = (1,) if op.over_samples else ()
        return wide, (*samples, *range(3, wide.ndim)), (2, 3)
    if isinstance(op, RowNorm):
        axes = tuple(sorted(axis % (tensor.ndim - 1) + 1 for axis in op.axis))
        return wide, axes, axes
    return wide, (), tuple(range(1, tensor.ndim)[-1:])


def _unsee(op: Op, values: Any, dtype: torch.dtype) -> Any:
    if isinstance(op, ChannelNorm):
        values = values.flatten(2, 3).movedim(2, _channel_axis(op))
    return values.to(dtype)


def _channel_axis(op: ChannelNorm) -> int:
    return -1 if op.data_format.endswith("C") else 2


def _along(vector: Any, values: Any, axes: Sequence[int]) -> Any:
    """A tensor that has just these axes, and the mapped one, to be broadcast."""
    shape = [size if axis in (0, *axes) else 1 for axis, size in enumerate(values.shape)]
    return vector.to(values.dtype).reshape(shape)


def _others(values: Any, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(1, values.ndim) if axis not in axes)


def _scale(op: Op, weight: Any, values: Any, axes: Sequence[int]) -> Any:
    offset = op.norm.weight_offset if isinstance(op, RowNorm) else 0.0
    return 1.0 if weight is None else offset + _along(weight, values, axes)


def _shift(bias: Any, values: Any, axes: Sequence[int]) -> Any:
    return 0.0 if bias is None else _along(bias, values, axes)


def _activation(op: Any) -> _Activation:
    return _ACTIVATIONS[op.norm.activation if isinstance(op, RowNorm) else op.activation]


def _of(tensors: dict[str, Any], *names: str) -> list[Any]:
    return [tensors.get(name) for name in names]


def _is_centered(op: Op) -> bool:
    return not isinstance(op, RowNorm) or op.norm.centered


def _moments(op: Any, values: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """The mean, None where nothing is centered, the variance, and what is left of the values."""
    if not _is_centered(op):
        return None, values.square().mean(axes, keepdim=True), values
    mean = values.mean(axes, keepdim=True)
    centered = values - mean
    rest = centered.mean(axes, keepdim=True)  # once more, for what the mean of all lost to rounding
    centered = centered - rest
    return mean + rest, centered.square().mean(axes, keepdim=True), centered


def _forward(op: Any, tensors: dict[str, Any], stats: bool) -> Sequence[Any]:
    """y, residual_out, mean, rstd and the running statistics, None for those that there are not."""
    x, residual, weight, bias, running_mean, running_var = _of(
        tensors, "x", "residual", "weight", "bias", "running_mean", "running_var"
    )
    total = x if residual is None else x + residual
    values, axes, weight_axes = _see(op, total)
    mean: Any = None
    variance: Any = None
    rstd: Any = None
    xhat = values
    if isinstance(op, ChannelNorm) and not op.training:
        mean, variance = (_along(running, values, weight_axes) for running in (running_mean, running_var))
        xhat = values - mean
    elif not isinstance(op, Pointwise):
        mean, variance, xhat = _moments(op, values, axes)
    if variance is not None:
        rstd = torch.rsqrt(variance + op.eps)
        xhat = xhat * rstd
    z = xhat * _scale(op, weight, values, weight_axes) + _shift(bias, values, weight_axes)
    is_statistics = isinstance(op, ChannelNorm) and op.statistics_alone
    y = None if is_statistics else _unsee(op, _activation(op)[0](z), x.dtype)
    kept = [values.shape[axis] for axis in (0, *_others(values, axes))]
    found = [mean, variance if is_statistics else rstd] if stats else []
    statistics = [item if item is None else item.reshape(kept) for item in found]
    updated: list[Any] = []
    if running_mean is not None and op.training:
        count = math.prod(values.shape[axis] for axis in axes)
        bessel = count / (count - 1) if op.unbiased else 1.0
        for running, new in ((running_mean, mean), (running_var, variance * bessel)):
            updated.append((op.kept * running + op.taken * new.reshape(kept)).to(running.dtype))
    return [y, None if residual is None else total, *statistics, *updated]


def _backward(op: Any, tensors: dict[str, Any], mask: Sequence[bool], bias_dtype: str | None) -> Sequence[Any]:
    """dx, dweight and dbias, None for those that nobody asked for."""
    dy, added, x, weight, bias, mean, rstd = _of(tensors, "dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd")
    values, axes, weight_axes = _see(op, x)
    gradient, _, _ = _see(op, dy)
    kept, summed = _others(values, axes), _others(values, weight_axes)
    xhat = values
    if isinstance(op, ChannelNorm) and not op.training:
        rstd = _along(rstd, values, kept)
        xhat = (values - _along(mean, values, kept)) * rstd
    elif not isinstance(op, Pointwise):
        # Anew: to a derivative of these gradients, the statistics that are there are constants, and must not be. Which
        # eps they were made with is told by them alone where the gradients are a call of their own.
        _, variance, centered = _moments(op, values, axes)
        eps = _along(rstd, values, kept).square().reciprocal() - variance
        rstd = torch.rsqrt(variance + eps.detach())
        xhat = centered * rstd
    scale = _scale(op, weight, values, weight_axes)
    z = xhat * scale + _shift(bias, values, weight_axes)
    gradient = _activation(op)[1](gradient, z)
    weight_dtype = x.dtype if weight is None else weight.dtype
    own_dtype = weight_dtype if bias is None else bias.dtype
    dtypes = weight_dtype, own_dtype if bias_dtype is None else getattr(torch, bias_dtype)
    shape = [values.shape[axis] for axis in (0, *weight_axes)]
    shape = [shape[0], -1] if isinstance(op, ChannelNorm) else shape
    results: list[Any] = [None, None, None]
    for place, product, dtype in ((1, gradient * xhat, dtypes[0]), (2, gradient, dtypes[1])):
        if mask[place]:
            results[place] = (product.sum(summed) if summed else product).reshape(shape).to(dtype)
    if mask[0]:
        dx = gradient * scale
        if rstd is not None and not (isinstance(op, ChannelNorm) and not op.training):
            along = xhat * (dx * xhat).mean(axes, keepdim=True)
            dx = dx - along - (dx.mean(axes, keepdim=True) if _is_centered(op) else 0.0)
        dx = dx if rstd is None else dx * rstd
        results[0] = _unsee(op, dx, dy.dtype if added is None else dx.dtype)
        if added is not None:
            results[0] = (results[0] + added).to(x.dtype)
    return results
