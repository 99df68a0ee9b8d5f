"""CuPy arrays: the kernels, on CuPy's current stream, in memory from CuPy's current allocator."""

from __future__ import annotations

from typing import Any

import cupy

from cunorm import execute
from cunorm.execute import Adapter, Op, Output
from cunorm.problem import View

__all__ = ["ADAPTER"]

# Scratch memory of calls that were captured into a CUDA graph: the graph writes there at every replay, so it must not
# return to the pool. It stays for the life of the process, since CuPy does not tell when a graph goes.
_captured: list[cupy.ndarray] = []


class CupyAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        if not isinstance(tensor, cupy.ndarray):
            raise TypeError(f"{name} is a {type(tensor).__qualname__}; beside a CuPy x it must be a CuPy array")
        itemsize = tensor.itemsize or 1  # 0 for some dtypes that the checks will refuse
        if any(step % itemsize for step in tensor.strides):
            raise ValueError(
                f"{name} has strides {tensor.strides} that are no multiples of its element size, {itemsize} bytes"
            )
        strides = tuple(step // itemsize for step in tensor.strides)
        return View(tensor.data.ptr, tensor.shape, strides, tensor.dtype.name, ("cuda", tensor.device.id))

    def empty(self, output: Output, like: cupy.ndarray) -> cupy.ndarray:
        with like.device:
            result = cupy.empty(output.shape, execute.numpy_dtype(output.dtype))
        if output.dtype == "uint8" and cupy.cuda.get_current_stream().is_capturing():
            _captured.append(result)
        return result

    def pointer(self, tensor: cupy.ndarray) -> int:
        return int(tensor.data.ptr)

    def stream(self, device: tuple[str, int]) -> int:
        return int(cupy.cuda.get_current_stream(device[1]).ptr)

    def apply(self, op: Op, x: Any, weight: Any, bias: Any, out: Any, stats: bool) -> tuple[Any, Any, Any]:
        return execute.forward(self, op, x, weight, bias, out, stats)


ADAPTER: Adapter = CupyAdapter()
