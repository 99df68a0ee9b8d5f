"""Eager calls without Python: ``host.cpp`` compiled, loaded, and taught the kinds of calls that Python has met.

PyTorch's own calls are C++, and take a small tensor in less time than Python needs to launch a kernel and to have
autograd record it. So what Python has once found out about a call can be done by compiled code the next time. It is
compiled on the user's machine, if the user wants it and has a compiler, by `build`; later processes find and load it.
Whatever it does not know, it leaves to `cunorm.adapters.torch.adapter`, which computes the same.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from cunorm import cuda, execute, launch
from cunorm.adapters import compiled
from cunorm.execute import Ready
from cunorm.prepared import Op, Output

__all__ = ["CODE", "Statistics", "build", "library", "load", "native", "teach_backward", "teach_forward"]

# What is allocated for an output: shape, strides and dtype.
_See = Callable[[Output], tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]

# The compiled module, where it was built: every call asks it first.
native: Any = None

CODE = compiled.TORCH
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
# What it calls for gradients that it was not taught to compute; and whether it has been told so.
_backward: Any = None
_has_begun = False


class Statistics(IntEnum):
    """Which a call returns or keeps, as ``host.cpp`` has it."""

    NONE = 0
    APART = 1
    PAIRED = 2


def library() -> Path:
    """Where the module is, if it was built: of this text, for this PyTorch and Python."""
    # A version of PyTorch may be built more than once.
    version = f"{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    return CODE.path(version, _abi(), torch.version.git_version)


def _abi() -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"


def build() -> Path:
    """Compile what makes an eager call of PyTorch tensors cheap for the host, and use it from now on.

    It takes half a minute, once for each version of PyTorch, Python and cunorm: later processes find it in cunorm's
    cache folder. Results are the same with it as without, and so are the errors of wrong arguments. It needs a C++
    compiler, ``$CXX`` or ``c++``, and the headers of Python; those of PyTorch come with it. Where
    ``$CUNORM_COMPILED_CALLS`` is 0, it is only compiled, and this process goes on by Python.

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
    >>> cunorm.adapters.torch.build().name  # doctest: +SKIP
    'cunorm_torch_host-2.13.0+cpu-cpython-311-x86_64-linux-gnu-2d1f0c3b5a697887-8a7b6c5d4e3f2011.so'
    """
    target, root = library(), Path(torch.__file__).parent
    folders = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
    flags = [_abi(), *(f"-I{folder}" for folder in folders)]
    CODE.build(target, flags, [f"-L{root / 'lib'}", *_LIBRARIES], _use)
    return target


def load(backward: Callable[..., Any]) -> None:
    """Use what was built, if it was and ``$CUNORM_COMPILED_CALLS`` is not 0.

    ``backward`` computes gradients that it was not taught to compute.
    """
    global _backward
    _backward = backward
    CODE.load(library, _use)


def _use(path: Path) -> None:
    global native
    if native is not None:
        return
    module: Any = CODE.extension(path)
    execute.also_forget(module.forget)
    native = module


def teach_forward(
    op: Op, statistics: Statistics, tensors: Sequence[Any], find: Callable[[], Ready | None], see: _See
) -> None:
    """Let ``native.forward`` know a kind of call: that of ``tensors``, as ``find`` finds it among the prepared ones.

    ``see`` says the shape, strides and dtype of a tensor to allocate.
    """
    begun, ready = native.generation(), find()
    if ready is None:
        return
    outputs, pair_offset = list(ready.prepared.outputs), -1
    if statistics == Statistics.PAIRED and ready.pair is not None:
        outputs[2:], pair_offset = [ready.pair, None], ready.pair_offset
    given = _given(ready, outputs, pair_offset, op.updates_running, see)
    native.teach_forward(op, statistics, tensors, given, begun)


def teach_backward(
    op: Op,
    mask: tuple[bool, bool, bool],
    bias_dtype: torch.dtype | None,
    paired: bool,
    tensors: Sequence[Any],
    find: Callable[[], Ready | None],
    see: _See,
) -> None:
    """The same of ``native.backward``."""
    begun, ready = native.generation(), find()
    if ready is None:
        return
    given = _given(ready, ready.prepared.outputs, ready.pair_offset if paired else -1, False, see)
    native.teach_backward(op, mask, bias_dtype, paired, tensors, given, begun)


def _given(
    ready: Ready, outputs: Sequence[Output | None], pair_offset: int, updates_running: bool, see: _See
) -> tuple[Any, ...] | None:
    """What ``host.cpp`` keeps of a prepared call, in its order; None for one that launches nothing."""
    global _has_begun
    call = ready.prepared.run
    if not isinstance(call, launch.Call):
        return None
    if not _has_begun:  # now there is a driver
        functions = cuda.driver_addresses("cuLaunchKernelEx", "cuCtxGetCurrent")
        native.begin(*functions, getattr(torch._C, "_cuda_getCurrentRawStream", None), _backward)
        _has_begun = True
    allocated = [None if output is None else see(output) for output in outputs]
    workspace = ready.prepared.workspace_bytes, call.scratch_offsets
    return allocated, *workspace, call.steps, call.context, pair_offset, updates_running, call
