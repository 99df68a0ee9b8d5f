"""Calls without Python: ``host.cpp`` compiled, loaded, and taught the kinds of calls that Python has met.

Python needs as long to find what it has prepared, and to launch it, as PyTorch does for all of a small layer norm.
Compiled code does it in half of that. It is compiled on the user's machine, if the user wants it and has a compiler, by
`build`; later processes find and load it. Whatever it does not know, it leaves to `cunorm.execute`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy

from cunorm import cuda, execute, launch
from cunorm.adapters import compiled
from cunorm.execute import Ready
from cunorm.on_cpu import numpy_dtype
from cunorm.prepared import Op, Output

__all__ = ["CODE", "build", "library", "load", "native", "teach_backward", "teach_forward"]

CODE = compiled.CUPY
# The compiled module, where it was built: every call asks it first.
native: Any = None

# What makes a workspace beside an array; and whether the module has been told where the driver is.
_empty: Any = None
_has_driver = False


def library() -> Path:
    """Where the module is, if it was built: of this text, for this Python. It depends on no version of CuPy."""
    return CODE.path(str(sysconfig.get_config_var("SOABI")))


def build() -> Path:
    """Compile what makes a call of CuPy arrays cheap for the host, and use it from now on.

    It takes some seconds, once for each version of Python and cunorm: later processes find it in cunorm's cache folder.
    Results are the same with it as without, and so are the errors of wrong arguments. It needs a C++ compiler, ``$CXX``
    or ``c++``, and the headers of Python. Where ``$CUNORM_COMPILED_CALLS`` is 0, it is only compiled, and this process
    goes on by Python.

    Returns
    -------
    pathlib.Path
        The file that was made, or that was there already.

    Raises
    ------
    RuntimeError
        Where there is no compiler, or it fails: with its log.
    OSError
        Where it cannot be written.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.adapters.cupy.build().name  # doctest: +SKIP
    'cunorm_cupy_host-cpython-312-x86_64-linux-gnu-2d1f0c3b5a697887-8a7b6c5d4e3f2011.so'
    """
    target = library()
    CODE.build(target, [f"-I{sysconfig.get_paths()['include']}"], [], _use)
    return target


def load(empty: Callable[[Output, Any], Any]) -> None:
    """Use what was built, if it was and ``$CUNORM_COMPILED_CALLS`` is not 0.

    ``empty`` makes a workspace beside an array.
    """
    global _empty
    _empty = empty
    CODE.load(library, _use)


def _use(path: Path) -> None:
    global native
    if native is not None:
        return
    module: Any = CODE.extension(path)
    module.begin(cupy.ndarray, cupy.cuda.get_current_stream, _empty)
    execute.also_forget(module.forget)
    native = module


def teach_forward(op: Op, stats: bool, tensors: tuple[Any, ...], find: Callable[[], Ready | None]) -> None:
    """Let ``native.forward`` know a kind of call: that of ``tensors``, as ``find`` finds it among the prepared ones."""
    begun, ready = native.generation(), find()
    if ready is not None:
        native.teach_forward(op, stats, tensors, _given(ready), begun)


def teach_backward(
    op: Op, mask: tuple[bool, bool, bool], tensors: tuple[Any, ...], find: Callable[[], Ready | None]
) -> None:
    """The same of ``native.backward``."""
    begun, ready = native.generation(), find()
    if ready is not None:
        native.teach_backward(op, mask, tensors, _given(ready), begun)


def _given(ready: Ready) -> tuple[Any, ...] | None:
    """What ``host.cpp`` keeps of a prepared call, in its order; None for one that Python is to run.

    Those are what launches nothing, and what has a result whose axes are in another order in memory.
    """
    global _has_driver
    call, outputs = ready.prepared.run, ready.prepared.outputs
    if not isinstance(call, launch.Call) or any(output is not None and output.permutation for output in outputs):
        return None
    if not _has_driver:  # now there is one
        native.use_driver(*cuda.driver_addresses("cuLaunchKernelEx", "cuCtxGetCurrent"))
        _has_driver = True
    allocated = tuple(None if output is None else (output.shape, numpy_dtype(output.dtype)) for output in outputs)
    device = ready.prepared.device[1]
    return allocated, ready.workspace, tuple(call.scratch_offsets), tuple(call.steps), call.context, device, call
