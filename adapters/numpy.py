"""NumPy arrays: on the CPU, through ``cunorm.reference``. bfloat16 is ml_dtypes'."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

from cunorm import execute, on_cpu, op_names
from cunorm.checks import element_strides, no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import Gradients, Op, Output, Results
from cunorm.problem import View
from cunorm.text import kind_of

__all__ = ["ADAPTER"]


class NumpyAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        if type(tensor) is not np.ndarray:
            _check_type(tensor, name)
        strides = element_strides(name, tensor.strides, tensor.itemsize)
        if not tensor.dtype.isnative:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which is not in this machine's byte order")
        return View(tensor.__array_interface__["data"][0], tensor.shape, strides, tensor.dtype.name, ("cpu", 0))

    def empty(self, output: Output, like: Any) -> np.ndarray[Any, Any]:
        dtype = on_cpu.numpy_dtype(output.dtype)
        if output.permutation is None:
            return np.empty(output.shape, dtype)
        return np.empty(output.shape_in_memory, dtype).transpose(output.places)

    def pointer(self, tensor: np.ndarray[Any, Any]) -> int:
        return int(tensor.__array_interface__["data"][0])

    def stream(self, device: tuple[str, int]) -> int:
        return 0

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
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueError("out is read-only")
        if running and op.updates_running:
            for name, tensor in zip(("running_mean", "running_var"), running):
                if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
                    raise ValueError(f"{name} is read-only; in training it is updated in place")
        forward = _outside_of_graphs.forward if _may_be_compiled() else execute.forward
        return forward(self, op, x, residual, weight, bias, out, stats, running)

    def backward(self, *arguments: Any) -> Gradients:
        backward = _outside_of_graphs.backward if _may_be_compiled() else execute.backward
        return backward(self, *arguments)


# forward and backward of `execute`, which torch.compile does not look into but breaks its graph for: it would put
# PyTorch's functions in the place of NumPy's, and has not all of them.
_outside_of_graphs = types.SimpleNamespace()


def _may_be_compiled() -> bool:
    """Whether torch.compile may trace what calls this: it is imported where it is first used. A constant to it."""
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
    if disable is None:
        return False
    if not hasattr(_outside_of_graphs, "forward"):
        op_names.is_compiling = sys.modules["torch"].compiler.is_dynamo_compiling
        _outside_of_graphs.backward = disable(execute.backward)
        _outside_of_graphs.forward = disable(execute.forward)
    return True


setattr(_may_be_compiled, "_dynamo_marked_constant", True)  # noqa: B010
_may_be_compiled()


ADAPTER: Adapter = NumpyAdapter()


def _check_type(tensor: Any, name: str) -> None:
    """Of what may be a subclass's, which is taken for an array."""
    if not isinstance(tensor, np.ndarray):
        raise no_tensor(name, tensor, "NumPy", "a NumPy array")
    if isinstance(tensor, np.ma.MaskedArray):
        must = f"it must be an array without one, such as {name}.data or {name}.filled(0)"
        raise TypeError(f"{name} is {kind_of(tensor)}, whose mask would be ignored; {must}")
