"""What the demo needs of each library: its tensors, its clock, and the formula written in its plain operations.

A library is a class, found by name in ``LIBRARIES``, that imports its framework when it is made. An op is a function
from a tuple of tensors, (x, weight, bias, dy, mean, rstd), to a tuple of tensors.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import cunorm
from cunorm import cuda, gpus

__all__ = ["EPS", "LIBRARIES", "Library", "Op"]

EPS = 1e-5
Tensors = tuple[Any, ...]
Op = Callable[[Tensors], Tensors]


class Library:
    """A library whose arrays have NumPy's methods, on the CPU, with wall-clock time."""

    title: ClassVar[str] = "NumPy"
    on_gpu: bool = False
    # Whether the gradient comes from the library's own differentiation; else from layer_norm_backward.
    differentiates: ClassVar[bool] = False

    def __init__(self) -> None:
        self.arrays: Any = np
        self.version: str = np.__version__

    # ---- Tensors.

    def tensor(self, values: NDArray[Any]) -> Any:
        """A tensor of the library, on the device that the demo runs on, from a NumPy array of any of the dtypes."""
        return values

    def numpy(self, tensor: Any) -> NDArray[np.float64]:
        """A NumPy array of float64."""
        return np.asarray(tensor).astype(np.float64)

    # ---- Ops.

    def fused(self) -> tuple[Op, Op]:
        """cunorm: the forward op, and the gradient."""

        def forward(tensors: Tensors) -> Tensors:
            x, weight, bias, *_ = tensors
            return (cunorm.layer_norm(x, weight, bias, eps=EPS),)

        def backward(tensors: Tensors) -> Tensors:
            x, weight, _, dy, mean, rstd = tensors
            return cunorm.layer_norm_backward(dy, x, weight, mean, rstd)

        return forward, backward

    def unfused(self) -> tuple[Op, Op]:
        """The same in plain operations."""

        def forward(tensors: Tensors) -> Tensors:
            x, weight, bias, *_ = tensors
            return (self.formula(x, weight, bias),)

        def backward(tensors: Tensors) -> Tensors:
            x, weight, _, dy, mean, rstd = tensors
            compute = mean.dtype
            rstd = rstd[:, None]
            dy = dy.astype(compute)
            xhat = (x.astype(compute) - mean[:, None]) * rstd
            g = dy * weight
            dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
            dweight, dbias = (dy * xhat).sum(0), dy.sum(0)
            return dx.astype(x.dtype), dweight.astype(weight.dtype), dbias.astype(weight.dtype)

        return forward, backward

    def formula(self, x: Any, weight: Any, bias: Any) -> Any:
        """Layer norm over the last axis, in float32 or better, as one writes it down."""
        x_compute = x.astype("float64" if x.dtype == "float64" else "float32")
        difference = x_compute - x_compute.mean(-1, keepdims=True)
        variance = (difference * difference).mean(-1, keepdims=True)
        y = difference / self.arrays.sqrt(variance + EPS)
        if weight is not None:
            y = y * weight + bias
        return y.astype(x.dtype)

    # ---- Time.

    def wait(self, results: Any) -> None:
        """Return when the results are complete."""

    def elapsed(self, work: Callable[[], Any]) -> float:
        """Seconds that some work takes, to its end on the device."""
        start = time.perf_counter()
        results = work()
        self.wait(results)
        return time.perf_counter() - start

    def seconds(self, op: Op, inputs: Sequence[Tensors], limit: float) -> float:
        """The median time of a call. Calls take the inputs in turn, and keep the results while a sample lasts.

        On a GPU, inputs and results together should be larger than its cache, or the time is that of the cache.
        """

        def sample() -> Any:
            return [op(tensors) for tensors in inputs]

        begin = time.perf_counter()
        while True:  # clocks rise, caches and allocators fill
            self.elapsed(sample)
            if time.perf_counter() - begin > limit / 4:
                break
        samples: list[float] = []
        begin = time.perf_counter()
        while len(samples) < 3 or (len(samples) < 25 and time.perf_counter() - begin < limit):
            samples.append(self.elapsed(sample) / len(inputs))
        return statistics.median(samples)


class _CuPy(Library):
    title = "CuPy"
    on_gpu = True

    def __init__(self) -> None:
        cupy = cuda.cupy()
        gpus.current_index("CuPy")
        self.arrays, self.version = cupy, cupy.__version__

    def tensor(self, values: NDArray[Any]) -> Any:
        return self.arrays.asarray(values)

    def numpy(self, tensor: Any) -> NDArray[np.float64]:
        return super().numpy(tensor.get())

    def elapsed(self, work: Callable[[], Any]) -> float:
        cuda = self.arrays.cuda
        start, stop = cuda.Event(), cuda.Event()
        start.record()
        results = work()
        stop.record()
        stop.synchronize()
        del results
        return float(cuda.get_elapsed_time(start, stop)) * 1e-3


class _Torch(Library):
    title = "PyTorch"
    differentiates = True

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self.version = torch.__version__
        self.on_gpu = torch.cuda.is_available()
        if not self.on_gpu:
            # Operations this small can take twenty times as long when their threads wait for each other on a busy CPU.
            torch.set_num_threads(1)

    def tensor(self, values: NDArray[Any]) -> Any:
        dtype = getattr(self._torch, values.dtype.name)
        # PyTorch reads no ml_dtypes arrays; a bfloat16 travels as its bits.
        bits = values.view(np.int16) if values.dtype.name == "bfloat16" else values
        tensor = self._torch.from_numpy(np.array(bits)).view(dtype)
        return tensor.cuda() if self.on_gpu else tensor

    def numpy(self, tensor: Any) -> NDArray[np.float64]:
        return np.asarray(tensor.detach().double().cpu())

    def _with_gradient(self, norm: Callable[[Any, Any, Any], Any]) -> tuple[Op, Op]:
        def forward(tensors: Tensors) -> Tensors:
            with self._torch.no_grad():
                return (norm(*tensors[:3]),)

        def gradient(tensors: Tensors) -> Tensors:
            inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
            y = norm(*inputs)
            return y.detach(), *self._torch.autograd.grad(y, inputs, tensors[3])

        return forward, gradient

    def fused(self) -> tuple[Op, Op]:
        return self._with_gradient(lambda x, weight, bias: cunorm.layer_norm(x, weight, bias, eps=EPS))

    def unfused(self) -> tuple[Op, Op]:
        return self._with_gradient(self.formula)

    def formula(self, x: Any, weight: Any, bias: Any) -> Any:
        x_float = x.float()
        difference = x_float - x_float.mean(-1, keepdim=True)
        variance = (difference * difference).mean(-1, keepdim=True)
        return (difference * self._torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype)

    def elapsed(self, work: Callable[[], Any]) -> float:
        if not self.on_gpu:
            return super().elapsed(work)
        cuda = self._torch.cuda
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        results = work()
        stop.record()
        stop.synchronize()
        del results
        return float(start.elapsed_time(stop)) * 1e-3


class _Jax(Library):
    title = "JAX"
    differentiates = True

    def __init__(self) -> None:
        # JAX would take three quarters of the GPU's memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        self._jax: Any = jax
        self.arrays, self.version = jax.numpy, jax.__version__
        self.on_gpu = jax.default_backend() == "gpu"

    def tensor(self, values: NDArray[Any]) -> Any:
        return self.arrays.asarray(values)

    def _with_gradient(self, norm: Callable[[Any, Any, Any], Any]) -> tuple[Op, Op]:
        def gradient(x: Any, weight: Any, bias: Any, dy: Any) -> Tensors:
            y, pull_back = self._jax.vjp(norm, x, weight, bias)
            return y, *pull_back(dy)

        jitted_norm, jitted_gradient = self._jax.jit(norm), self._jax.jit(gradient)
        return lambda tensors: (jitted_norm(*tensors[:3]),), lambda tensors: jitted_gradient(*tensors[:4])

    def fused(self) -> tuple[Op, Op]:
        return self._with_gradient(lambda x, weight, bias: cunorm.layer_norm(x, weight, bias, eps=EPS))

    def unfused(self) -> tuple[Op, Op]:
        return self._with_gradient(self.formula)

    def wait(self, results: Any) -> None:
        self._jax.block_until_ready(results)


class _TensorFlow(Library):
    title = "TensorFlow"
    differentiates = True

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow

        self._tensorflow: Any = tensorflow
        self.version = tensorflow.__version__
        gpus = self._tensorflow.config.list_physical_devices("GPU")
        for gpu in gpus:
            # TensorFlow would take nearly all of the GPU's memory for itself.
            self._tensorflow.config.experimental.set_memory_growth(gpu, True)
        self.on_gpu = bool(gpus)

    def tensor(self, values: NDArray[Any]) -> Any:
        return self._tensorflow.identity(self._tensorflow.constant(values))

    def numpy(self, tensor: Any) -> NDArray[np.float64]:
        return super().numpy(tensor.numpy())

    def _with_gradient(self, norm: Callable[[Any, Any, Any], Any]) -> tuple[Op, Op]:
        def gradient(tensors: Tensors) -> Tensors:
            inputs = list(tensors[:3])
            with self._tensorflow.GradientTape() as tape:
                tape.watch(inputs)
                y = norm(*inputs)
            return y, *tape.gradient(y, inputs, tensors[3])

        return lambda tensors: (norm(*tensors[:3]),), gradient

    def fused(self) -> tuple[Op, Op]:
        return self._with_gradient(lambda x, weight, bias: cunorm.layer_norm(x, weight, bias, eps=EPS))

    def unfused(self) -> tuple[Op, Op]:
        return self._with_gradient(self.formula)

    def formula(self, x: Any, weight: Any, bias: Any) -> Any:
        tf = self._tensorflow
        x_float, weight, bias = (tf.cast(tensor, tf.float32) for tensor in (x, weight, bias))
        difference = x_float - tf.reduce_mean(x_float, -1, keepdims=True)
        variance = tf.reduce_mean(difference * difference, -1, keepdims=True)
        return tf.cast(difference * tf.math.rsqrt(variance + EPS) * weight + bias, x.dtype)

    def wait(self, results: Any) -> None:
        if self.on_gpu:
            self._tensorflow.test.experimental.sync_devices()


LIBRARIES: dict[str, Callable[[], Library]] = {
    "numpy": Library,
    "cupy": _CuPy,
    "torch": _Torch,
    "jax": _Jax,
    "tensorflow": _TensorFlow,
}
