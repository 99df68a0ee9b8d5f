"""CuPy arrays: the kernels, on CuPy's current stream, in memory from CuPy's current allocator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import cupy

from cunorm import execute, on_cpu
from cunorm.adapters.cupy import host
from cunorm.checks import element_strides, no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import BACKWARD_NAMES, FORWARD_NAMES, Gradients, Op, Output, Results
from cunorm.problem import DTYPES, View

__all__ = ["ADAPTER"]

# Scratch memory of calls that were captured into a CUDA graph: the graph writes there at every replay, so it must not
# return to the pool. It stays for the life of the process, since CuPy does not tell when a graph goes.
_captured: list[cupy.ndarray] = []


_current_device = cupy.cuda.runtime.getDevice
_DTYPES = {name: on_cpu.numpy_dtype(name) for name in (*DTYPES, "uint8")}


class CupyAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        if not isinstance(tensor, cupy.ndarray):
            raise no_tensor(name, tensor, "CuPy", "a CuPy array")
        strides = element_strides(name, tensor.strides, tensor.itemsize)
        return View(tensor.data.ptr, tensor.shape, strides, tensor.dtype.name, ("cuda", tensor.device.id))

    def describe(self, tensors: Sequence[Any], names: Sequence[str]) -> tuple[tuple[Any, ...], list[int]]:
        kind: list[Any] = []
        pointers = []
        for tensor in tensors:
            if tensor is None:
                kind.append(None)
                pointers.append(0)
                continue
            try:
                memory = tensor.data
                pointer = memory.ptr
                kind += (tensor.shape, tensor.strides, tensor.dtype, memory.device_id, pointer & 15)
            except AttributeError:  # no CuPy array: `view` says so
                return super().describe(tensors, names)
            pointers.append(pointer)
        return tuple(kind), pointers

    def empty(self, output: Output, like: cupy.ndarray) -> cupy.ndarray:
        shape = output.shape if output.permutation is None else output.shape_in_memory
        if _current_device() == like.data.device_id:
            result = cupy.ndarray(shape, _DTYPES[output.dtype])
        else:
            with like.device:
                result = cupy.ndarray(shape, _DTYPES[output.dtype])
        if output.permutation is not None:
            return result.transpose(output.places)
        if output.dtype == "uint8" and cupy.cuda.get_current_stream(like.data.device_id).is_capturing():
            _captured.append(result)
        return result

    def pointer(self, tensor: cupy.ndarray) -> int:
        return int(tensor.data.ptr)

    def stream(self, device: tuple[str, int]) -> int:
        return int(cupy.cuda.get_current_stream(device[1]).ptr)

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
        tensors = (x, residual, weight, bias, out, *running)
        # The results, if compiled code knows such calls; None if it may be taught them, False if not.
        known: Any = False if host.native is None else host.native.forward(op, stats, *tensors)
        if known:
            return cast(Results, known)
        results = execute.forward(self, op, x, residual, weight, bias, out, stats, running)
        if known is None:
            kind, _ = self.describe(tensors, FORWARD_NAMES)
            find = functools.partial(execute.known_forward, self, op, stats, kind)
            host.teach_forward(op, stats, tensors, find)
        return results

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
        tensors = (dy, dresidual_out, x, weight, bias, mean, rstd)
        known: Any = False if host.native is None else host.native.backward(op, output_mask, *tensors)
        if known:
            return cast(Gradients, known)
        gradients = execute.backward(self, op, *tensors, output_mask, bias_dtype)
        if known is None:
            kind, _ = self.describe(tensors, BACKWARD_NAMES)
            find = functools.partial(execute.known_backward, self, op, output_mask, bias_dtype, False, kind)
            host.teach_backward(op, output_mask, tensors, find)
        return gradients


ADAPTER: Adapter = CupyAdapter()
host.load(ADAPTER.empty)
