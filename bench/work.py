"""What is timed for a row, and what PyTorch's automatic differentiation makes of a function of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cunorm.bench.inputs import Tensors
from cunorm.bench.suites import Row

__all__ = ["GRADIENTS", "SIXTEEN_BIT_SUMS", "Work", "by_host_code", "gradient", "leaves", "with_autograd"]

GRADIENTS = ("dx", "dweight", "dbias")

# For a library that keeps the sums of dweight and dbias in sixteen bits.
SIXTEEN_BIT_SUMS = 16.0

_from_dlpack: Any = torch.utils.dlpack.from_dlpack


@dataclass(frozen=True)
class Work:
    """What is timed: ``call`` returns a tensor or a tuple, which are named in ``names``; None is for what is no result.

    With ``wait``, which returns when a result is complete, it is not on PyTorch's stream: the host's clock times it.
    Errors may be ``slack`` times the usual limit, those of dweight and dbias ``sum_slack`` times that.
    """

    call: Callable[[], Any]
    names: Sequence[str | None]
    note: str = ""
    wait: Callable[[Any], Any] | None = None
    slack: float = 1.0
    sum_slack: float = 1.0

    def results(self) -> dict[str, torch.Tensor]:
        found = self.call()
        if self.wait:
            self.wait(found)
        tensors = found if isinstance(found, (tuple, list)) else (found,)
        named = {name: tensor for name, tensor in zip(self.names, tensors) if name and tensor is not None}
        return {
            name: tensor.detach() if isinstance(tensor, torch.Tensor) else _from_dlpack(tensor)
            for name, tensor in named.items()
        }


def by_host_code(framework: str, native: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` with a framework's calls made by this compiled code, or by Python where it is None."""
    host: Any = importlib.import_module(f"cunorm.adapters.{framework}.host")

    def run() -> Any:
        before, host.native = host.native, native
        try:
            return call()
        finally:
            host.native = before

    return run


def leaves(row: Row, inputs: Tensors) -> list[torch.Tensor]:
    """x, weight and, where there is one, bias: what gradients are for."""
    tensors = [inputs.x.view(row.shape), inputs.weight] + ([] if inputs.bias is None else [inputs.bias])
    return [tensor.detach().requires_grad_() for tensor in tensors]


def with_autograd(row: Row, inputs: Tensors, norm: Callable[..., Any]) -> Work:
    """Forward with gradients recorded, and then backward where the row is for both."""
    given, dy = leaves(row, inputs), inputs.dy.view(row.shape)
    if row.direction == "recorded":
        return Work(functools.partial(norm, *given), ("y",))

    def both() -> Any:
        y = norm(*given)
        return y, *torch.autograd.grad(y, given, dy)

    return Work(both, ("y", *GRADIENTS))


def gradient(row: Row, inputs: Tensors, norm: Callable[..., Any]) -> Work:
    """Backward alone, again and again through what forward has recorded once."""
    given, dy = leaves(row, inputs), inputs.dy.view(row.shape)
    y = norm(*given)
    return Work(functools.partial(torch.autograd.grad, y, given, dy, retain_graph=True), GRADIENTS)
