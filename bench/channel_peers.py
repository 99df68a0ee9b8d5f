"""How a row of instance, group or batch norm is computed, with the functions of each library.

A batch norm's forward updates running statistics, which are results too: of the first call, which is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import cunorm
from cunorm.bench.channel_inputs import MOMENTUM, ChannelInputs
from cunorm.bench.inputs import EPS, RUNNING
from cunorm.bench.suites import Row
from cunorm.bench.work import GRADIENTS, SIXTEEN_BIT_SUMS, Work, gradient, with_autograd

__all__ = ["cunorm_work", "liger_work", "torch_work"]

_LAYOUT = "NC..."  # of all shapes; how tensors lie in memory is seen from their strides

# What goes from a norm to its activation, and back, is rounded to sixteen bits where these are two functions.
_ROUNDED_BETWEEN = 2.0


def _work(row: Row, inputs: ChannelInputs, norm: Callable[..., Any]) -> Work:
    """Of a function of x, weight, bias and, for a batch norm, the running mean and variance."""
    running = inputs.running()
    if row.direction == "both":
        return with_autograd(row, inputs, lambda *tensors: norm(*tensors, *running))
    if row.direction == "backward":
        return gradient(row, inputs, lambda *tensors: norm(*tensors, *running))
    tensors = inputs.x, inputs.weight, inputs.bias, *running
    return Work(lambda: (norm(*tensors), *running), ("y", *(RUNNING if running else ())))


def cunorm_work(row: Row, inputs: ChannelInputs) -> Work:
    norm, backward = getattr(cunorm, row.op), getattr(cunorm, f"{row.op}_backward")
    groups = [row.groups] if row.groups else []
    options: dict[str, Any] = {"data_format": _LAYOUT, "activation": row.activation or None}
    if row.op == "batch_norm":
        options["training"] = True
    if row.direction == "backward":
        tensors = inputs.weight, inputs.mean, inputs.rstd
        if row.activation:
            options["bias"] = inputs.bias
        return Work(functools.partial(backward, inputs.dy, inputs.x, *groups, *tensors, **options), GRADIENTS)

    options["eps"] = EPS
    if row.op == "batch_norm":
        options["momentum"] = MOMENTUM

    def call(x: Any, weight: Any, bias: Any, *running: Any) -> Any:
        return norm(x, *groups, weight, bias, **dict(zip(RUNNING, running)), **options)

    return _work(row, inputs, call)


def torch_work(row: Row, inputs: ChannelInputs, compiled: bool = False) -> Work:
    """PyTorch's own functions, eager or compiled. A note says where cuDNN computes a batch norm."""
    norm = _torch_norm(row)
    if compiled:
        compiled_norm: Callable[..., Any] = torch.compile(norm, dynamic=False)
        return _work(row, inputs, compiled_norm)
    note = "cuDNN" if _is_for_cudnn(row, inputs) else ""
    return replace(_work(row, inputs, norm), note=note, slack=_ROUNDED_BETWEEN if row.activation else 1.0)


def _torch_norm(row: Row) -> Callable[..., torch.Tensor]:
    groups = row.groups

    def instance_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)

    def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, groups, weight, bias, EPS)

    def group_norm_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.silu(group_norm(x, weight, bias))

    def batch_norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> torch.Tensor:
        return F.batch_norm(x, mean, variance, weight, bias, True, MOMENTUM, EPS)

    functions: dict[str, Callable[..., torch.Tensor]] = {
        "instance_norm": instance_norm,
        "group_norm": group_norm_silu if row.activation else group_norm,
        "batch_norm": batch_norm,
    }
    return functions[row.op]


def _is_for_cudnn(row: Row, inputs: ChannelInputs) -> bool:
    """Whether PyTorch, as it is set (`torch.backends.cudnn`), has cuDNN compute this batch norm."""
    if row.op != "batch_norm":
        return False
    pytorch: Any = torch._C
    tensors = inputs.x, inputs.weight, inputs.bias, *inputs.running()
    return bool(pytorch._select_batch_norm_backend(*tensors, True, EPS) == pytorch._BatchNormBackend.Cudnn)


def liger_work(row: Row, inputs: ChannelInputs, function: Any) -> Work | None:
    """Liger's group norm, an autograd function of (N, C, positions). It adds up the weights' gradients in x's dtype."""
    if row.op != "group_norm" or row.activation:
        return None
    if row.layout != "NC...":
        raise ValueError("not tried: it wants the channels before the positions in memory")

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = function.apply(x.flatten(2), weight, bias, row.shape[1], row.groups, EPS)
        return y.view(row.shape)

    return replace(_work(row, inputs, norm), sum_slack=SIXTEEN_BIT_SUMS)
