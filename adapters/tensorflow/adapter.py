"""TensorFlow tensors: eager and inside ``tf.function``, differentiable, over TensorFlow's own memory.

A call is TensorFlow's op "Cunorm" where `cunorm.adapters.tensorflow.host` has built that. Elsewhere Python computes.
Since it is given no handle of TensorFlow's stream, a call waits twice on a GPU then: exporting a tensor through DLPack
waits until that stream is idle, and the result is complete before TensorFlow sees it. The kernels run in between, on
CuPy's current stream. What that costs is the time in which the host would have run ahead. Results are allocated by
TensorFlow: by default it owns nearly all of the GPU's memory, and what it imports has to be aligned as it aligns its
own, or the process is aborted. Inside ``tf.function`` such a call is one ``tf.py_function``, which costs some hundred
microseconds, and cannot be stored in a SavedModel.

Neither can be compiled by XLA (``jit_compile=True``). Whether gradients are recorded cannot be asked, so the statistics
are always computed. Gradients are first derivatives.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cunorm import cuda
from cunorm.adapters.capsules import tensor_address
from cunorm.adapters.tensorflow import host
from cunorm.adapters.tensorflow.work import Backward, Forward, Work, from_text, gather, scatter, to_text
from cunorm.checks import no_tensor
from cunorm.execute import Adapter
from cunorm.prepared import Gradients, Op, Output, Results, placed
from cunorm.problem import DTYPES, View, contiguous_strides

__all__ = ["ADAPTER", "device_of"]

_DLPACK_CPU = 1
_INT32_MAX = 2**31 - 1
_NO_SECOND = "cunorm has no second derivatives and no forward mode (ForwardAccumulator)"


class _DlTensor(ctypes.Structure):
    """How DLPack's DLManagedTensor begins. The rest, TensorFlow says itself: its tensors are C-contiguous."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32))


# TensorFlow numbers the devices that tf.config made visible, CUDA all of them: which is which never changes, and asking
# about a pointer takes as long as exporting it.
_cuda_devices: dict[int, int] = {}


def _memory(tensor: Any) -> tuple[int, tuple[str, int]]:
    """The address and device of an eager tensor, when TensorFlow's stream has finished everything before."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    exported = _DlTensor.from_address(tensor_address(capsule))
    pointer, index = exported.data or 0, exported.device_index
    if exported.device_type == _DLPACK_CPU:
        return pointer, ("cpu", 0)
    if pointer and index not in _cuda_devices:
        _cuda_devices[index] = int(cuda.cupy().cuda.runtime.pointerGetAttributes(pointer).device)
    return pointer, ("cuda", _cuda_devices.get(index, index))


@functools.lru_cache(maxsize=4096)
def _host_shape(shape: tuple[int, ...]) -> Any:
    """A shape as tf.raw_ops.Empty takes it. Making one takes as long as the allocation."""
    with tf.device("CPU:0"):
        return tf.constant(shape, tf.int32)


def _empty(output: Output, device: str) -> Any:
    dtype = tf.as_dtype(output.dtype)
    if max(output.shape, default=0) > _INT32_MAX:  # which tf.raw_ops.Empty cannot be told
        with tf.device(device):
            return tf.zeros(output.shape, dtype)
    shape = _host_shape(output.shape)
    with tf.device(device):
        return tf.raw_ops.Empty(shape=shape, dtype=dtype)


class TensorFlowAdapter(Adapter):
    """The adapter; and, made anew, one call: it holds what it allocated until the kernels are done.

    TensorFlow's allocator knows only TensorFlow's stream. What goes back to it, the workspace say, may be in use again
    at once, while kernels on CuPy's stream are still writing there.
    """

    def __init__(self) -> None:
        self._allocated: list[Any] = []
        self._stream: tuple[int, int] | None = None  # what kernels were launched on: the device, and the handle

    def view(self, tensor: Any, name: str) -> View:
        shape, dtype = tuple(tensor.shape), tensor.dtype.name
        # What DLPack may not be able to express, the checks of the op refuse by its dtype.
        pointer, device = _memory(tensor) if dtype in DTYPES else (0, ("cpu", 0))
        return View(pointer, shape, contiguous_strides(shape), dtype, device)

    def empty(self, output: Output, like: Any) -> Any:
        self._allocated.append(_empty(output, like.backing_device))
        return self._allocated[-1]

    def pointer(self, tensor: Any) -> int:
        # Waits once more: the allocator may have given memory that TensorFlow's stream was still using.
        return _memory(tensor)[0]

    def stream(self, device: tuple[str, int]) -> int:
        if device[0] == "cpu":
            return 0
        self._stream = device[1], int(cuda.cupy().cuda.get_current_stream(device[1]).ptr)
        return self._stream[1]

    def wait(self) -> None:
        """Until the kernels are done, if any were launched."""
        if self._stream is not None:
            device, handle = self._stream
            with cuda.cupy().cuda.Device(device):  # the handle of a default stream means that of the current device
                cuda.cupy().cuda.runtime.streamSynchronize(handle)

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
        if out is not None:
            raise TypeError("out cannot be given for TensorFlow tensors: they are immutable")
        if running and op.updates_running:
            raise TypeError(
                "running_mean and running_var cannot be updated in place for TensorFlow tensors: they are immutable; "
                "leave them out, and update them with the mean and variance (max(1 / rstd**2 - eps, 0)) of "
                "return_stats=True"
            )
        running_mean, running_var = running or (None, None)
        statistics = {"running_mean": running_mean, "running_var": running_var}
        tensors = _tensors(x=x, residual=residual, weight=weight, bias=bias, **statistics)
        with device_of(tensors[0]):
            y, residual_out, mean, rstd = _recorded(Forward(op), tensors)
            if not stats:
                return y, residual_out, None, None
            return y, residual_out, None if mean is None else tf.stop_gradient(mean), tf.stop_gradient(rstd)

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
        arguments = {"dresidual_out": dresidual_out, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd}
        x, dy, dresidual_out, *others = _tensors(x=x, dy=dy, **arguments)
        with device_of(x):
            return _backward(Backward(op, output_mask, bias_dtype), (dy, dresidual_out, x, *others))


ADAPTER: Adapter = TensorFlowAdapter()


def device_of(x: Any) -> Any:
    """A context in which results stay on the device that x is on, where TensorFlow would copy them to its default one.

    That is so for what it computes at once; in a graph it places everything itself.
    """
    device = getattr(x, "backing_device", None) if tf.executing_eagerly() else None
    return contextlib.nullcontext() if device is None else tf.device(device)


def _tensors(**arguments: Any) -> list[Any]:
    """The arguments as tensors; variables are read, so that the tape knows."""
    tensors = []
    for name, value in arguments.items():
        if value is not None and not isinstance(value, tf.Tensor):
            if not isinstance(value, tf.Variable) and not hasattr(value, "__tf_tensor__"):
                raise no_tensor(name, value, "TensorFlow", "a dense TensorFlow tensor")
            value = tf.convert_to_tensor(value)
        tensors.append(value)
    return tensors


def _recorded(work: Work, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of `_call`, whose gradients TensorFlow knows: those of its op are registered."""
    # An eager op would copy what is on another device than the rest. Python says that this is wrong, or computes, where
    # both are parts of the CPU.
    on_one = not tf.executing_eagerly() or len({tensor.backing_device for tensor in gather(inputs)}) == 1
    if host.native is not None and on_one:
        return _call(work, inputs, by_op=True)
    given = gather(inputs)
    computed: list[Any] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: Any) -> Any:
        tensors = scatter(given, inputs)
        results = computed[:] = _call(work, tensors, by_op=False)

        def gradient(*cotangents: Any) -> Any:
            gradients = _gradients(work, tensors, results, scatter(cotangents, results))
            return [value for value, tensor in zip(gradients, tensors) if tensor is not None]

        return gather(results), gradient

    results = call(*given)
    if not tf.executing_eagerly():
        _register(results[0].op, to_text(work, inputs, computed), given, gather(computed))
    return scatter(results, computed)


def _register(identity: Any, text: str, given: Sequence[Any], computed: Sequence[Any]) -> None:
    """Register the gradient of the op that tf.custom_gradient made, for ``work.to_text``, under a name of its own.

    tf.cond differentiates a copy of the graph, whose gradients must hold no tensor of this one. The op has the results
    and the inputs. tf.saved_model.save traces gradients of no op: they are those of this graph's tensors.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradients(op: Any, *cotangents: Any) -> list[Any]:
        count = len(computed)
        if op is None and isinstance(from_text(text)[0], Backward):
            # Refused when it is computed: what is stored beside it, the first derivatives, is of use.
            with tf.control_dependencies([tf.debugging.Assert(False, [_NO_SECOND])]):
                return [*(None for _ in computed), *map(tf.zeros_like, cotangents[count:])]
        inputs, results = (given, computed) if op is None else (op.inputs[count:], op.outputs[:count])
        return [*(None for _ in results), *_gradients_by_text(text, inputs, results, cotangents[:count])]

    name = f"{host.OP} {text} {identity.get_attr('_gradient_op_type').decode()}"
    tf.RegisterGradient(name)(gradients)
    identity._set_attr("_gradient_op_type", tf.compat.v1.AttrValue(s=name.encode()))


@tf.RegisterGradient(host.OP)  # type: ignore[untyped-decorator]
def _gradients_of_op(op: Any, *cotangents: Any) -> list[Any]:
    return _gradients_by_text(op.get_attr("what").decode(), op.inputs, op.outputs, cotangents)


def _gradients_by_text(
    text: str, given: Sequence[Any], computed: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """As `_gradients`, of those tensors that there are."""
    work, is_given, is_computed = from_text(text)
    inputs, results = placed(given, is_given), placed(computed, is_computed)
    gradients = _gradients(work, inputs, results, placed(cotangents, is_computed))
    return [value for value, tensor in zip(gradients, inputs) if tensor is not None]


def _gradients(work: Work, inputs: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Those of ``inputs``, from those of ``results``."""
    if isinstance(work, Backward):
        raise NotImplementedError(_NO_SECOND)
    x, residual, weight, bias, *running = inputs
    _, residual_out, mean, rstd = results
    kept = (x if residual is None else residual_out, weight, bias if work.op.keeps_bias else None, mean, rstd)
    mask = (True, weight is not None, bias is not None)
    with device_of(x):
        # They can be tf.IndexedSlices, where a result was gathered from; zeros where it was not used. They come from
        # where the results were used, which may be another device.
        dy, dresidual_out = (
            None if item is None else tf.identity(tf.convert_to_tensor(item)) for item in cotangents[:2]
        )
        dx, dweight, dbias = _backward(
            Backward(work.op, mask, None if bias is None else bias.dtype.name), (dy, dresidual_out, *kept)
        )
    return [dx, None if residual is None else dx, dweight, dbias, *(None for _ in running)]


def _backward(work: Backward, inputs: Sequence[Any]) -> Gradients:
    if not any(work.output_mask):
        return None, None, None
    # Recorded too: a tape around the gradient would take it for a constant.
    dx, dweight, dbias = _recorded(work, inputs)
    return dx, dweight, dbias


class _Unknown(int):
    """A dimension that tf.function does not know while it traces: it equals any other, and is divided by any."""

    def __new__(cls) -> _Unknown:
        return super().__new__(cls, 2**42)

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __mod__(self, other: int) -> int:
        return 0

    def __floordiv__(self, other: int) -> _Unknown:
        return _Unknown()

    # Only the hash keeps it apart in the cache of prepared calls; no tensor has a dimension of this size.
    __hash__ = int.__hash__

    def __repr__(self) -> str:
        return "None"


def _static_view(tensor: Any, name: str) -> View:
    if tensor.shape.rank is None:
        raise ValueError(
            f"{name} has an unknown number of dimensions in this tf.function: state its shape with tf.ensure_shape"
        )
    shape = tuple(_Unknown() if size is None else size for size in tensor.shape)
    return View(0, shape, contiguous_strides(shape), tensor.dtype.name, ("cpu", 0))


def _call(work: Work, inputs: Sequence[Any], by_op: bool) -> Sequence[Any]:
    """The results, eager or in a graph: by TensorFlow's op, which was built, or by Python."""
    is_eager = tf.executing_eagerly()
    if is_eager and not by_op:
        return _run(work, inputs)
    outputs: Sequence[Output | None]
    if isinstance(work, Backward) and any(tensor.shape.rank is None for tensor in gather(inputs)):
        outputs = work.results(inputs)  # in a SavedModel, whose shapes are not stored
        shapes: list[Any] = [None for _ in gather(outputs)]
    else:
        views = [None if tensor is None else _static_view(tensor, name) for tensor, name in zip(inputs, work.names)]
        outputs = work.prepare(views).outputs
        shapes = [[None if isinstance(size, _Unknown) else size for size in output.shape] for output in gather(outputs)]
    if by_op:
        results = host.call(work, inputs, outputs)
    else:
        dtypes = [output.dtype for output in gather(outputs)]
        results = tf.py_function(
            lambda *given: gather(_run(work, scatter(given, inputs))), gather(inputs), list(map(tf.as_dtype, dtypes))
        )
    if not is_eager:
        for result, shape in zip(results, shapes):
            result.set_shape(shape)
    return scatter(results, outputs)


def _run(work: Work, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of eager tensors, by Python."""
    adapter = TensorFlowAdapter()
    try:
        return work.run(adapter, inputs)
    finally:
        adapter.wait()


host.load()
