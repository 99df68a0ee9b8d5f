"""Any other array with ``__dlpack__``: computed where it lies, without a copy, on the CPU or on CuPy's current stream.

The array's own library is asked to make its data ready for that stream. Results are in NumPy's or CuPy's memory and are
handed over by the ``from_dlpack`` of the array's namespace (``x.__array_namespace__()``, the Python array API
standard); where it has none they are NumPy or CuPy arrays. There is no differentiation.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from types import SimpleNamespace
from typing import Any

import tvm_ffi

from cunorm import cuda, execute
from cunorm.adapters.capsules import tensor_address
from cunorm.checks import no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import Gradients, Op, Output, Results
from cunorm.problem import View

__all__ = ["ADAPTER"]

# DLPack's device types and type codes.
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4

# Arguments that are what was returned, or as it was: they may be of the library that the results are in.
_RETURNED = ("dy", "dresidual_out", "mean", "rstd")

# What running kernels read: (event behind them, exported tensors). A producer may reuse memory when its export goes.
_in_use: list[tuple[Any, list[Any]]] = []
_in_use_lock = threading.Lock()
# What kernels read that were captured into a CUDA graph: kept for good, since nobody tells when a graph goes.
_captured: list[list[Any]] = []


class DlpackAdapter(Adapter):
    """The adapter; and, made with x, one call: the exported tensors have to live as long as it runs."""

    def __init__(self, x: Any = None, written: tuple[str, ...] = ()) -> None:
        if x is None:
            return
        self._x = x
        self._written = written
        self._exports: list[Any] = []
        self._pointers: dict[int, int] = {}
        self._views: dict[tuple[int, bool], View] = {}
        namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
        self._from_dlpack = getattr(namespace, "from_dlpack", None)
        self._device = _device(x, "x")
        self._like = None
        if self._device[0] == "cuda":
            # What the CuPy adapter looks at, to allocate beside an array.
            index = self._device[1]
            self._like = SimpleNamespace(device=cuda.cupy().cuda.Device(index), data=SimpleNamespace(device_id=index))
        library = "cupy" if self._device[0] == "cuda" else "numpy"
        # Whose memory the results are in.
        self._memory: Adapter = importlib.import_module(f"cunorm.adapters.{library}").ADAPTER
        self._result_library = library

    def view(self, tensor: Any, name: str) -> View:
        if self is ADAPTER:  # nothing is called: only a look at it
            return DlpackAdapter(tensor).view(tensor, name)
        # Exported once a call, though the first call of a kind looks at its tensors twice.
        key = id(tensor), name in self._written
        if key not in self._views:
            self._views[key] = self._export_view(tensor, name)
        return self._views[key]

    def _export_view(self, tensor: Any, name: str) -> View:
        if not self._belongs(tensor, name):
            raise no_tensor(name, tensor, type(self._x).__qualname__, "an array of the same library")
        device = _device(tensor, name)
        try:
            # Only a versioned export can be of read-only memory: which an input may be, and what is written may not.
            exported = tvm_ffi.from_dlpack(_export(tensor, device, versioned=name not in self._written))
        except BufferError as error:
            raise ValueError(f"{name} cannot be exported through DLPack: {error}") from error
        self._exports.append(exported)
        self._pointers[id(tensor)] = exported.data_ptr()
        return View(exported.data_ptr(), tuple(exported.shape), tuple(exported.strides), str(exported.dtype), device)

    def _belongs(self, tensor: Any, name: str) -> bool:
        if not hasattr(tensor, "__dlpack__"):
            return False
        library = _library(tensor)
        if name in _RETURNED and self._from_dlpack is None and library == self._result_library:
            return True
        return library == _library(self._x) or isinstance(tensor, type(self._x))

    def empty(self, output: Output, like: Any) -> Any:
        return self._memory.empty(output, self._like)

    def pointer(self, tensor: Any) -> int:
        pointer = self._pointers.get(id(tensor))  # that of out
        return self._memory.pointer(tensor) if pointer is None else pointer

    def stream(self, device: tuple[str, int]) -> int:
        return self._memory.stream(device)

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
        updated = bool(running) and op.updates_running
        call = DlpackAdapter(x, ("out", "running_mean", "running_var") if updated else ("out",))
        y, *others = execute.forward(call, op, x, residual, weight, bias, out, stats, running)
        call._keep_while_running(wait=updated or out is not None)
        residual_out, mean, rstd = map(call._own, others)
        return y if out is not None else call._own(y), residual_out, mean, rstd

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
        call = DlpackAdapter(x)
        dx, dweight, dbias = execute.backward(
            call, op, dy, dresidual_out, x, weight, bias, mean, rstd, output_mask, bias_dtype
        )
        call._keep_while_running()
        return call._own(dx), call._own(dweight), call._own(dbias)

    def _own(self, result: Any) -> Any:
        """A result as an array of x's library, if that can import one."""
        if result is None or self._from_dlpack is None:
            return result
        return self._from_dlpack(_Bfloat16(result) if result.dtype.name == "bfloat16" else result)

    def _keep_while_running(self, wait: bool = False) -> None:
        """Hold what the kernels read. ``wait`` for them if they write in place, as x's library will not."""
        if self._device[0] == "cpu":
            return
        cupy = cuda.cupy()
        with cupy.cuda.Device(self._device[1]):
            stream = cupy.cuda.get_current_stream()
            if stream.is_capturing():
                _captured.append(self._exports)
                return
            if wait:
                stream.synchronize()
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        with _in_use_lock:
            _in_use[:] = [item for item in _in_use if not item[0].done]
            _in_use.append((event, self._exports))


ADAPTER: Adapter = DlpackAdapter()


def _library(tensor: Any) -> str:
    return type(tensor).__module__.partition(".")[0]


def _device(tensor: Any, name: str) -> tuple[str, int]:
    kind, index = tensor.__dlpack_device__()
    if kind in (_CPU, _CUDA_HOST):
        return "cpu", 0
    if kind in (_CUDA, _CUDA_MANAGED):
        return "cuda", index
    raise RuntimeError(f"{name} is on a device of DLPack's type {int(kind)}; it must be on a CUDA device or the CPU")


def _export(tensor: Any, device: tuple[str, int], versioned: bool) -> Any:
    """A DLPack capsule, ready on CuPy's current stream."""
    arguments = {}
    if device[0] == "cuda":
        # DLPack calls the legacy default stream 1, CUDA 0.
        arguments["stream"] = cuda.cupy().cuda.get_current_stream(device[1]).ptr or 1
    if versioned:
        try:
            return tensor.__dlpack__(max_version=(1, 0), **arguments)
        except TypeError:
            pass  # a producer that knows the first protocol only
    return tensor.__dlpack__(**arguments)


class _Bfloat16:
    """A bfloat16 array for DLPack. NumPy and CuPy do not export this dtype, so it goes as integers, relabelled."""

    _CODE_OFFSET = 20  # of dtype.code in a DLTensor, behind its data pointer, device and number of dimensions

    def __init__(self, array: Any) -> None:
        self._bits = array.view("uint16")

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        capsule = self._bits.__dlpack__(stream=stream)
        ctypes.c_uint8.from_address(tensor_address(capsule) + self._CODE_OFFSET).value = _BFLOAT
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._bits.__dlpack_device__()
