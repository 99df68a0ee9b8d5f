"""Calls without Python: ``host.cpp``, an op of TensorFlow, compiled, loaded, and told what to launch.

Python is given no handle of TensorFlow's stream, and can only wait for it; an op has one. It is compiled on the user's
machine, if the user wants it and has a compiler, by `build`; later processes find and load it. What it launches is
planned here when it meets a kind of call first. On the CPU it calls ``cunorm.reference`` by way of this file.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from cunorm import cuda, execute, launch
from cunorm.adapters import compiled
from cunorm.adapters.tensorflow import work
from cunorm.prepared import Output, Prepared, placed
from cunorm.problem import View, contiguous_strides

__all__ = ["CODE", "OP", "build", "call", "library", "load", "native"]

CODE = compiled.TENSORFLOW
OP = "Cunorm"  # as TensorFlow calls it
# The op, where it was built: every call goes through it.
native: Any = None

# absl::StatusCode
_INVALID_ARGUMENT, _UNIMPLEMENTED, _INTERNAL = 3, 12, 13


def library() -> Path:
    """Where the op is, if it was built: of this text, for this TensorFlow."""
    flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith("-I")]
    # A version of TensorFlow may be built more than once.
    return CODE.path(tf.__version__, flags, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, platform.machine())


def build() -> Path:
    """Compile cunorm's op of TensorFlow, and use it from now on, so that calls do not wait for the GPU.

    It takes a quarter of a minute, once for each version of TensorFlow and cunorm: later processes find it in cunorm's
    cache folder. Results are the same with it as without. It needs a C++ compiler, ``$CXX`` or ``c++``; the headers of
    TensorFlow come with it. Where ``$CUNORM_COMPILED_CALLS`` is 0, it is only compiled, and this process goes on
    without.

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
    >>> cunorm.adapters.tensorflow.build().name  # doctest: +SKIP
    'cunorm_tensorflow_host-2.21.0-2d1f0c3b5a697887-8a7b6c5d4e3f2011.so'
    """
    target = library()
    CODE.build(target, tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags(), _use)
    return target


def load() -> None:
    """Use what was built, if it was and ``$CUNORM_COMPILED_CALLS`` is not 0."""
    CODE.load(library, _use)


def _use(path: Path) -> None:
    global native, _op, _code
    if _op is None:  # a process has one of a name
        try:
            _op = tf.load_op_library(str(path)).cunorm
        except tf.errors.OpError as error:
            raise ImportError(str(error)) from error
        _code = ctypes.CDLL(str(path))
        _code.cunorm_begin(_prepare, _compute, _release)
        execute.also_forget(_code.cunorm_forget)
        atexit.register(_code.cunorm_end)
    native = _op


def call(task: work.Work, inputs: Sequence[Any], outputs: Sequence[Output | None]) -> Sequence[Any]:
    """The tensors of the ``outputs`` that are not None, eager or in a graph. Inputs are tensors or None."""
    what, dtypes = work.to_text(task, inputs, outputs), [output.dtype for output in work.gather(outputs)]
    _interrupts.clear()  # those of a graph were raised as TensorFlow's errors
    try:
        results: Sequence[Any] = native(given=work.gather(inputs), what=what, result_types=dtypes)
    except tf.errors.AbortedError:
        if _interrupts:
            raise _interrupts.pop() from None
        raise
    return results


# ---- What the op calls. Nothing may be raised there; what is not said to have succeeded has failed.


class _Given(ctypes.Structure):
    """An input, as ``host.cpp`` has it."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    )

    def view(self, device: tuple[str, int]) -> View:
        shape = tuple(self.sizes[: self.rank])
        return View(self.address or 0, shape, contiguous_strides(shape), tf.as_dtype(self.dtype).name, device)


_op: Any = None
_code: Any = None  # the library's functions
_numbers = itertools.count()
# What calls run or keep loaded, by the number that the op knows it by; and how a call's pointers follow from the op's.
_prepared: dict[int, tuple[Prepared, list[int | None]]] = {}
_has_driver = False
# What a user has interrupted a call by, until `call` raises it.
_interrupts: list[BaseException] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(_Given))  # type: ignore[untyped-decorator]
def _prepare(ready: int, what: bytes, device: int, count: int, given: Any) -> None:
    try:
        task, is_given, _ = work.from_text(what.decode())
        where = ("cpu", 0) if device < 0 else ("cuda", device)
        views = placed([given[number].view(where) for number in range(count)], is_given)
        _tell(ctypes.c_void_p(ready), task, views, task.prepare(views))
        _code.cunorm_succeed_ready(ctypes.c_void_p(ready))
    except Exception as error:
        _code.cunorm_fail_ready(ctypes.c_void_p(ready), *_status(error))
    except BaseException as interrupt:
        _interrupts.append(interrupt)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64))  # type: ignore[untyped-decorator]
def _compute(failure: int, number: int, pointers: Any) -> None:
    try:
        prepared, places = _prepared[number]
        prepared.run([0 if place is None else pointers[place] for place in places], 0, 0)
        _code.cunorm_succeed(ctypes.c_void_p(failure))
    except Exception as error:
        _code.cunorm_fail(ctypes.c_void_p(failure), *_status(error))
    except BaseException as interrupt:
        _interrupts.append(interrupt)


@ctypes.CFUNCTYPE(None, ctypes.c_int64)  # type: ignore[untyped-decorator]
def _release(number: int) -> None:
    _prepared.pop(number, None)


def _status(error: Exception) -> tuple[int, bytes]:
    code = _INTERNAL
    if isinstance(error, (TypeError, ValueError)):
        code = _INVALID_ARGUMENT
    elif isinstance(error, NotImplementedError):
        code = _UNIMPLEMENTED
    return code, f"{type(error).__name__}: {error}".encode()


def _tell(ready: ctypes.c_void_p, task: work.Work, views: Sequence[View | None], prepared: Prepared) -> None:
    """Let ``host.cpp`` know a prepared call."""
    global _has_driver
    places = itertools.count()
    inputs = [None if view is None else next(places) for view in views]
    outputs = [None if output is None else next(places) for output in prepared.outputs]
    operands = task.operands(inputs, outputs)
    for output in work.gather(prepared.outputs):
        dtype = tf.as_dtype(output.dtype).as_datatype_enum
        _code.cunorm_add_output(ready, dtype, len(output.shape), _int64s(output.shape))
    number = next(_numbers)
    _prepared[number] = prepared, operands
    run = prepared.run
    if not isinstance(run, launch.Call):
        _code.cunorm_run_in_python(ready, ctypes.c_int64(number))
        return
    if not _has_driver:
        _code.cunorm_use_driver(*_driver_functions())
        _has_driver = True
    offsets = run.scratch_offsets
    workspace = ctypes.c_int64(prepared.workspace_bytes), len(offsets), _int64s(offsets)
    _code.cunorm_launch(ready, ctypes.c_int64(number), ctypes.c_void_p(run.context), *workspace)
    operands += [next(places) for _ in offsets]
    for step in run.steps:
        attributes = [word for attribute in step.attributes for word in attribute]
        pointers = [-1 if place < 0 or operands[place] is None else operands[place] for place in step.places]
        _code.cunorm_add_step(
            ready,
            step.kernel.encode(),
            ctypes.c_uint64(step.function),
            step.grid,
            *step.block,
            step.shared_bytes,
            len(step.attributes),
            (ctypes.c_int32 * len(attributes))(*attributes),
            len(step.arguments),
            step.arguments,
            len(pointers),
            (ctypes.c_int32 * len(pointers))(*pointers),
        )


def _driver_functions() -> list[ctypes.c_void_p]:
    names = ("cuLaunchKernelEx", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    return [ctypes.c_void_p(address) for address in cuda.driver_addresses(*names)]


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
