"""Kernels, compiled and loaded once for each device: by CuPy's ``RawModule``, which is NVRTC and a cache on disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from cunorm import cuda, kernels
from cunorm.compile_error import CompileError

__all__ = ["COMPILE_OPTIONS", "compiled_function", "forget_text"]

COMPILE_OPTIONS = ("-std=c++17",)
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_CLUSTER_WITHOUT_ASKING = 8
_asking = threading.Lock()

# By what `compiled_function` was given, less the texts, and by the kernel's own text.
_functions: dict[Any, Any] = {}


def compiled_function(
    kernel: str,
    constants: tuple[tuple[str, int | str], ...],
    shared_bytes: int,
    cluster: int,
    device_index: int,
    texts: Mapping[str, str] | None = None,
) -> Any:
    """A kernel, compiled and loaded on a device. A RuntimeError where it does not compile or asks for too much.

    ``texts`` stand in for shipped ones, as `cunorm.kernels.kernel_text` takes them.
    """
    key = (kernels.kernel_text(kernel, texts), kernel, constants, shared_bytes, cluster, device_index)
    function = _functions.get(key)
    if function is None:
        function = _functions[key] = _compile(*key)
    return function


def forget_text(text: str) -> None:
    """Let go of the functions that were compiled of a text."""
    for key in [key for key in list(_functions) if key[0] == text]:
        _functions.pop(key, None)


def _compile(
    text: str,
    kernel: str,
    constants: tuple[tuple[str, int | str], ...],
    shared_bytes: int,
    cluster: int,
    device_index: int,
) -> Any:
    cupy = cuda.cupy()
    source = kernels.kernel_source(kernel, dict(constants), {kernel: text})
    try:
        with cupy.cuda.Device(device_index):
            function = cupy.RawModule(code=source, options=COMPILE_OPTIONS).get_function(kernel)
            # One text is one function, whatever shared memory it is launched with: never ask for less than before.
            with _asking:
                unasked = _SHARED_BYTES_WITHOUT_ASKING - function.shared_size_bytes
                if shared_bytes > max(unasked, function.max_dynamic_shared_size_bytes):
                    function.max_dynamic_shared_size_bytes = shared_bytes
            if cluster > _CLUSTER_WITHOUT_ASKING:
                cupy.cuda.driver.funcSetAttribute(function.kernel.ptr, cuda.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            return function.kernel
    except cupy.cuda.compiler.CompileException as error:
        what = f"kernel {kernel} does not compile for CUDA device {device_index}"
        raise CompileError(what, str(error), text, dict(constants)) from error
