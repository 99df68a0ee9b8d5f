"""A call as a user speaks of it: tensors that need not be there, or a dtype for one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cunorm import adapters
from cunorm.prepare import views_of
from cunorm.prepared import NOWHERE, Described, Op, Prepared
from cunorm.problem import AnyProblem, View, contiguous_strides
from cunorm.text import kind_of

__all__ = ["Call", "operand", "seen"]


class Call(NamedTuple):
    """A call of tensors that are nowhere."""

    op: Op
    backward: bool
    x: View
    residual: View | None
    weight: View | None
    bias: View | None
    running: tuple[View, ...]
    stats: bool
    output_mask: tuple[bool, bool, bool]

    def prepared(self, device: tuple[str, int] = NOWHERE) -> tuple[Prepared, list[View | None]]:
        """The call as it would be prepared on a device, and the operands that it is run with, in order."""

        def there(view: View | None) -> Any:
            return None if view is None else view._replace(device=device)

        x, residual, weight, bias = map(there, self[2:6])
        running = tuple(map(there, self.running))
        forward = self.op.prepare_forward(x, residual, weight, bias, None, self.stats or self.backward, running)
        y, residual_out, mean, rstd = views_of(forward.outputs, device)
        if not self.backward:
            return forward, [x, residual, weight, bias, y, *running, residual_out, mean, rstd]
        dy, x = there(y), residual_out or x
        prepared = self.op.prepare_backward(dy, residual_out, x, weight, bias, mean, rstd, self.output_mask, None)
        inputs = [dy, residual_out, x, weight, bias, mean, rstd]
        return prepared, [*inputs, *views_of(prepared.outputs, device)]

    @property
    def problem(self) -> AnyProblem:
        described, _ = self.prepared()
        assert isinstance(described, Described)
        return described.problem


def seen(tensor: Any, name: str) -> tuple[View, int | None]:
    """A tensor as memory nowhere, but with its own address; and the CUDA device that it really is on."""
    try:
        view = adapters.adapter_of(tensor).view(tensor, name)
    except ValueError:  # strides that no call takes
        raise
    except Exception:  # it has no memory: a tracer, a tensor on PyTorch's meta device, an object that speaks of one
        sizes = getattr(tensor, "shape", None)
        if name != "x" and not isinstance(sizes, Iterable):
            what = f"{name} is {kind_of(tensor)}; it must be a tensor, a bool or the name of a dtype"
            raise TypeError(what) from None
        if isinstance(tensor, np.ndarray) or not isinstance(sizes, Iterable) or not hasattr(tensor, "dtype"):
            raise
        shape = tuple(-1 if size is None else int(size) for size in sizes)
        if min(shape, default=0) < 0:
            raise ValueError(f"{name} has shape {tuple(sizes)}; every size must be known") from None
        strides = tuple(tensor.stride()) if hasattr(tensor, "stride") else contiguous_strides(shape)
        dtype = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
        return View(0, shape, strides, dtype, NOWHERE), None
    return view._replace(device=NOWHERE), view.device[1] if view.device[0] == "cuda" else None


def operand(value: Any, name: str, usual: bool, shape: tuple[int, ...], dtype: str) -> View | None:
    """What a user says of a weight, bias or the like: whether there is one, its dtype, or the tensor itself."""
    value = usual if value is None else value
    if isinstance(value, bool | str):
        found = dtype if value is True else value
        return View(0, shape, contiguous_strides(shape), found, NOWHERE) if found else None
    return seen(value, name)[0]
