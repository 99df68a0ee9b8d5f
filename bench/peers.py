"""The libraries that a suite compares: how each is called for a row. Each is optional.

Calls are those of the library's own documentation or autograd functions, by their fastest way in: no checks or copies
are timed that a user could leave out. Backward starts from the statistics that forward has saved.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

import cunorm
from cunorm.bench.channel_inputs import ChannelInputs
from cunorm.bench.channel_peers import cunorm_work, liger_work, torch_work
from cunorm.bench.inputs import EPS, Inputs, Tensors
from cunorm.bench.results import COMPILED, OURS
from cunorm.bench.suites import Row
from cunorm.bench.work import GRADIENTS, SIXTEEN_BIT_SUMS, Work, by_host_code, gradient, leaves, with_autograd

__all__ = ["PROVIDERS", "Provider", "Work", "find"]

# Quack unrolls a thread's share of a row, and its table of launches, which bounds that share, ends here.
_QUACK_COLUMNS = 262144
_FORWARD = ("forward", "forward_stats")
_GELU_GRADIENTS = ("dx", "dbias")


class Provider:
    """A library. Made only where it is installed: the import is in ``__init__``."""

    name: ClassVar[str]
    distribution: ClassVar[str]

    def __init__(self, device: str, cache_bytes: int) -> None:
        self.device, self.cache_bytes = device, cache_bytes

    @property
    def version(self) -> str:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:  # on the path, but not installed
            return "unknown"

    def work(self, row: Row, inputs: Tensors) -> Work | None:
        """How to compute a row; None where the library has no such function."""
        if isinstance(inputs, ChannelInputs):
            return self.channel_norm(row, inputs)
        assert isinstance(inputs, Inputs)
        return self.gelu(row, inputs) if row.approximate else self.norm(row, inputs)

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        raise NotImplementedError

    def gelu(self, row: Row, inputs: Inputs) -> Work | None:
        return None

    def channel_norm(self, row: Row, inputs: ChannelInputs) -> Work | None:
        return None


class _Cunorm(Provider):
    name = OURS
    distribution = "cunorm"
    _native: Mapping[str, Any] = {}  # the compiled code that makes a framework's calls where the host is timed

    @property
    def version(self) -> str:
        return cunorm.__version__

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        layer = row.op == "layer_norm"
        norm, gradient = getattr(cunorm, row.op), getattr(cunorm, f"{row.op}_backward")
        x = inputs.x.view(row.shape)
        vectors = [inputs.weight] if inputs.bias is None else [inputs.weight, inputs.bias]
        statistics = [inputs.rstd.view(row.shape[:-1])]
        if layer:
            statistics.insert(0, inputs.mean.view(row.shape[:-1]))
        statistics_names = ("mean", "rstd") if layer else ("rstd",)
        options: dict[str, Any] = {}

        if row.direction == "backward":
            if row.residual:
                options["dresidual_out"] = inputs.dresidual_out.view(row.shape)
            dy = inputs.dy.view(row.shape)
            call = functools.partial(gradient, dy, x, inputs.weight, *statistics, **options)
            return Work(call, GRADIENTS)
        if row.residual:
            options["residual"] = inputs.residual.view(row.shape)
        if row.direction in ("recorded", "both"):
            return with_autograd(row, inputs, functools.partial(norm, eps=EPS))
        stats = row.direction == "forward_stats"
        if stats:
            options["return_stats"] = True
        names = ("y", *(("residual_out",) if row.residual else ()), *(statistics_names if stats else ()))
        if row.framework == "cupy":
            import cupy

            x, *vectors = (cupy.from_dlpack(tensor) for tensor in (x, *vectors))
        return Work(functools.partial(norm, x, *vectors, eps=EPS, **options), names)

    def gelu(self, row: Row, inputs: Inputs) -> Work | None:
        x = inputs.x.view(row.shape)
        options: dict[str, Any] = {"approximate": inputs.approximate, "bias": inputs.bias}
        if row.direction == "forward":
            return Work(functools.partial(cunorm.gelu, x, **options), ("y",))
        return Work(functools.partial(cunorm.gelu_backward, inputs.dy.view(row.shape), x, **options), _GELU_GRADIENTS)

    def channel_norm(self, row: Row, inputs: ChannelInputs) -> Work | None:
        return cunorm_work(row, inputs)

    def work(self, row: Row, inputs: Tensors) -> Work | None:
        work = super().work(row, inputs)
        if work is None or row.clock != "host":
            return work
        return dataclasses.replace(work, call=by_host_code(row.framework, self._native.get(row.framework), work.call))


class _CunormCompiled(_Cunorm):
    """What calls cost the host where they are compiled; the device's time is the same."""

    name = COMPILED

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        frameworks = ["torch"] + ["cupy"] * (importlib.util.find_spec("cupy") is not None)
        modules = {name: importlib.import_module(f"cunorm.adapters.{name}.host") for name in frameworks}
        self._native = {name: module.native for name, module in modules.items() if module.native is not None}
        if not self._native:
            raise RuntimeError("no calls are compiled: python -m cunorm build-torch, or build-cupy")

    def work(self, row: Row, inputs: Tensors) -> Work | None:
        return super().work(row, inputs) if row.clock == "host" and row.framework in self._native else None


class _Torch(Provider):
    name = "torch"
    distribution = "torch"

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.framework != "torch":
            return None
        weight, bias, columns = inputs.weight, inputs.bias, (row.columns,)
        stats = row.direction == "forward_stats"
        function: Any
        names: tuple[str, ...]
        if row.op == "layer_norm":
            function = torch.native_layer_norm if stats else F.layer_norm
            arguments: tuple[Any, ...] = (columns, weight, bias, EPS)
            names = ("y", "mean", "rstd") if stats else ("y",)
        else:
            function = torch.ops.aten._fused_rms_norm if stats else F.rms_norm
            arguments = (columns, weight, EPS)
            names = ("y", "rstd") if stats else ("y",)

        if row.weights:
            return self._mixed(row, inputs, lambda x, *vectors: function(x, columns, *vectors, EPS))
        if row.direction in ("recorded", "both"):
            return with_autograd(row, inputs, lambda x, *vectors: function(x, columns, *vectors, EPS))
        if row.direction == "backward":
            return self._backward(row, inputs)
        if not row.residual:
            return Work(functools.partial(function, inputs.x, *arguments), names)

        def add_and_norm() -> Any:
            total = inputs.x + inputs.residual
            y = function(total, *arguments)
            return (*y, total) if stats else (y, total)

        return Work(add_and_norm, (*names, "residual_out"))

    @staticmethod
    def _mixed(row: Row, inputs: Inputs, norm: Callable[..., torch.Tensor]) -> Work | None:
        """With weights of another dtype, which its kernels do not take: x is converted, as ``autocast`` does."""

        def converted(x: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
            return norm(x.to(vectors[0].dtype), *vectors).to(x.dtype)

        if row.residual or row.direction not in ("forward", "backward"):
            return None
        note = f"x in {row.weights}"
        if row.direction == "backward":
            return dataclasses.replace(gradient(row, inputs, converted), note=note)
        vectors = [inputs.weight] if inputs.bias is None else [inputs.weight, inputs.bias]
        return Work(functools.partial(converted, inputs.x, *vectors), ("y",), note=note)

    def gelu(self, row: Row, inputs: Inputs) -> Work | None:
        x, bias, options = inputs.x, inputs.bias, {"approximate": inputs.approximate}
        if row.direction == "forward":
            if bias is None:
                return Work(functools.partial(F.gelu, x, **options), ("y",))
            return Work(lambda: F.gelu(x + bias, **options), ("y",))
        z = x if bias is None else x + bias  # which forward has saved
        backward = functools.partial(torch.ops.aten.gelu_backward, inputs.dy, z, **options)
        if bias is None:
            return Work(backward, ("dx",))

        def with_sums() -> Any:
            dx = backward()
            return dx, dx.sum(0)

        return Work(with_sums, _GELU_GRADIENTS)

    def channel_norm(self, row: Row, inputs: ChannelInputs) -> Work | None:
        return torch_work(row, inputs)

    @staticmethod
    def _backward(row: Row, inputs: Inputs) -> Work:
        aten: Any = torch.ops.aten
        dy, x, weight, bias, columns = inputs.dy, inputs.x, inputs.weight, inputs.bias, [row.columns]
        call: Callable[[], Any]
        if row.op == "layer_norm":
            mean, rstd = inputs.mean[:, None], inputs.rstd[:, None]
            mask = [True, True, True]
            call = functools.partial(aten.native_layer_norm_backward, dy, x, columns, mean, rstd, weight, bias, mask)
        elif hasattr(aten, "_fused_rms_norm_backward"):
            rstd = inputs.rstd[:, None]
            call = functools.partial(aten._fused_rms_norm_backward, dy, x, columns, rstd, weight, [True, True])
        else:
            call = gradient(row, inputs, lambda x, weight: F.rms_norm(x, columns, weight, EPS)).call
        if not row.residual:
            return Work(call, GRADIENTS)
        dresidual_out = inputs.dresidual_out

        def norm_and_add() -> Any:
            dx, *rest = call()
            return dx + dresidual_out, *rest

        return Work(norm_and_add, GRADIENTS)


class _TorchCompile(Provider):
    name = "torch.compile"
    distribution = "torch"

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        # Backward is run again and again over one graph, whose buffers it would otherwise take for its own results.
        functorch: Any = importlib.import_module("torch._functorch.config")
        if hasattr(functorch, "donated_buffer"):
            functorch.donated_buffer = False

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.clock == "host" or (row.weights and (row.residual or row.direction not in ("forward", "backward"))):
            return None
        # Every row is compiled for its own shape; too many at a time and PyTorch would quietly stop compiling.
        torch._dynamo.reset()
        columns, stats = (row.columns,), row.direction == "forward_stats"
        layer = row.op == "layer_norm"

        def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            if row.weights:  # fused with the norm, the conversions cost nothing
                wide = x.to(weight.dtype)
                y = F.layer_norm(wide, columns, weight, bias, EPS) if layer else F.rms_norm(wide, columns, weight, EPS)
                return (y.to(x.dtype),)
            if layer and stats:
                return tuple(torch.native_layer_norm(x, columns, weight, bias, EPS))
            if layer:
                return (F.layer_norm(x, columns, weight, bias, EPS),)
            y = F.rms_norm(x, columns, weight, EPS)
            return (y, torch.rsqrt(x.float().square().mean(-1) + EPS)) if stats else (y,)

        def add_and_norm(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, ...]:
            total = x + residual
            return (*norm(total, weight, bias), total)

        compiled: Callable[..., Any] = torch.compile(add_and_norm if row.residual else norm, dynamic=False)
        names: tuple[str, ...] = ("y", *((("mean", "rstd") if layer else ("rstd",)) if stats else ()))
        if row.direction in _FORWARD:
            others = [inputs.residual] if row.residual else []
            call = functools.partial(compiled, inputs.x, *others, inputs.weight, inputs.bias)
            return Work(call, (*names, "residual_out") if row.residual else names)

        given, dy = leaves(row, inputs), inputs.dy.view(row.shape)
        x, weight, *rest = given
        bias = rest[0] if rest else None
        if row.residual:
            # Gradients are those at x, so what is added to it is zero.
            outputs = compiled(x, torch.zeros_like(x), weight, bias)
            gradients: tuple[torch.Tensor, ...] = (dy, inputs.dresidual_out.view(row.shape))
        else:
            gradients = (dy,)
            if row.direction == "both":
                return with_autograd(row, inputs, lambda x, weight, bias=None: compiled(x, weight, bias)[0])
            outputs = compiled(x, weight, bias)
        call = functools.partial(torch.autograd.grad, outputs, given, gradients, retain_graph=True)
        return Work(call, GRADIENTS)

    def gelu(self, row: Row, inputs: Inputs) -> Work | None:
        torch._dynamo.reset()
        approximate = inputs.approximate

        def gelu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return F.gelu(x if bias is None else x + bias, approximate=approximate)

        compiled: Callable[..., Any] = torch.compile(gelu, dynamic=False)
        given = [inputs.x] if inputs.bias is None else [inputs.x, inputs.bias]
        if row.direction == "forward":
            return Work(functools.partial(compiled, *given), ("y",))
        given = [tensor.detach().requires_grad_() for tensor in given]
        y = compiled(*given)
        call = functools.partial(torch.autograd.grad, y, given, inputs.dy, retain_graph=True)
        return Work(call, _GELU_GRADIENTS)

    def channel_norm(self, row: Row, inputs: ChannelInputs) -> Work | None:
        torch._dynamo.reset()
        return torch_work(row, inputs, compiled=True)


class _Liger(Provider):
    name = "liger"
    distribution = "liger-kernel"

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        self._layer: Any = importlib.import_module("liger_kernel.ops.layer_norm")
        self._rms: Any = importlib.import_module("liger_kernel.ops.rms_norm")
        self._add_rms: Any = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
        self._group: Any = importlib.import_module("liger_kernel.ops.group_norm")

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.clock == "host" or (row.op == "layer_norm" and row.residual):
            return None
        if row.op == "layer_norm":
            return self._layer_norm(row, inputs)
        x, weight, dy, rstd = inputs.x, inputs.weight, inputs.dy, inputs.rstd
        casting = "llama"
        if row.residual:
            forward = functools.partial(
                self._add_rms.fused_add_rms_norm_forward, x, inputs.residual, weight, EPS, 0.0, casting
            )
            if row.direction in _FORWARD:
                return Work(forward, ("y", "residual_out", "rstd"))
            _, total, _, *launch, mode = forward()
            del total
            block, warps, stages = launch
            call = functools.partial(
                self._add_rms.fused_add_rms_norm_backward,
                *(dy, inputs.dresidual_out, x, weight, rstd, 0.0, mode, block, warps, stages, False),
            )
            return Work(call, ("dx", None, "dweight"))
        forward = functools.partial(self._rms.rms_norm_forward, x, weight, EPS, 0.0, casting, False)
        if row.direction in _FORWARD:
            return Work(forward, ("y", None, "rstd"))
        if row.direction != "backward":
            return None
        _, _, _, block, warps, mode = forward()
        # By default dx is written over dy. The first call, which is checked, has the right dy.
        call = functools.partial(
            self._rms.rms_norm_backward,
            *(dy.clone(), x, weight, rstd, 0.0, mode, block, warps, True, False),
        )
        return Work(call, ("dx", "dweight"), note="dx over dy")

    def channel_norm(self, row: Row, inputs: ChannelInputs) -> Work | None:
        return liger_work(row, inputs, self._group.LigerGroupNormFunction)

    def _layer_norm(self, row: Row, inputs: Inputs) -> Work | None:
        x, weight, bias, dy = inputs.x, inputs.weight, inputs.bias, inputs.dy
        forward = functools.partial(self._layer.layer_norm_forward, x, weight, bias, EPS)
        if row.direction in _FORWARD:
            return Work(forward, ("y", None, "mean", "rstd"))
        backward = functools.partial(self._layer.layer_norm_backward, dy, x, weight, bias)
        if row.direction == "backward":
            return Work(functools.partial(backward, inputs.mean, inputs.rstd), GRADIENTS)

        def both() -> Any:
            y, _, mean, rstd, *_ = forward()
            return y, *backward(mean, rstd)

        return Work(both, ("y", *GRADIENTS))


class _Quack(Provider):
    name = "quack"
    distribution = "quack-kernels"

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        # The package has a function of the module's name in the module's place.
        self._module: Any = importlib.import_module("quack.rmsnorm")

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.clock == "host":
            return None
        if row.columns > _QUACK_COLUMNS:
            raise ValueError(f"not tried: its table of launches ends at {_QUACK_COLUMNS:,} columns")
        if row.offset:
            raise ValueError("not tried: it wants tensors that are aligned to 16 bytes")
        x, weight, dy = inputs.x, inputs.weight, inputs.dy
        stats = row.direction != "forward"
        if row.op == "rms_norm":
            if row.direction == "backward":
                dresidual_out = inputs.dresidual_out if row.residual else None
                call = functools.partial(self._module.rmsnorm_bwd, x, weight, dy, inputs.rstd, dresidual_out)
                return Work(call, ("dx", "dweight"))
            if row.direction not in _FORWARD:
                return None
            residual = inputs.residual if row.residual else None
            call = functools.partial(self._module.rmsnorm_fwd, x, weight, residual=residual, eps=EPS, store_rstd=stats)
            return Work(call, ("y", "residual_out" if row.residual else None, "rstd" if stats else None))
        if row.residual or inputs.bias is None:
            return None
        if row.direction == "backward":
            call = functools.partial(self._module.layernorm_bwd, x, weight, dy, inputs.rstd, inputs.mean)
            return Work(call, GRADIENTS)
        # Forward takes no other weight than float32.
        vectors = weight.float(), inputs.bias.float()
        forward = functools.partial(
            self._module.layernorm_fwd, x, *vectors, eps=EPS, return_rstd=stats, return_mean=stats
        )
        if row.direction in _FORWARD:
            return Work(forward, ("y", "rstd", "mean") if stats else ("y",), note="float32 weights")

        def both() -> Any:
            y, rstd, mean = forward()
            return y, *self._module.layernorm_bwd(x, weight, dy, rstd, mean)

        return Work(both, ("y", *GRADIENTS), note="float32 weights")


class _TritonTutorial(Provider):
    name = "triton-tutorial"
    distribution = "triton"

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        self._module: Any = importlib.import_module("cunorm.bench.triton_tutorial")

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.clock == "host" or row.op != "layer_norm" or row.residual:
            return None
        forward = functools.partial(self._module.forward, inputs.x, inputs.weight, inputs.bias, EPS)
        if row.direction in _FORWARD:
            return Work(forward, ("y", "mean", "rstd"))
        backward = functools.partial(self._module.backward, inputs.dy, inputs.x, inputs.weight)
        if row.direction == "backward":
            return Work(functools.partial(backward, inputs.mean, inputs.rstd), GRADIENTS, sum_slack=SIXTEEN_BIT_SUMS)

        def both() -> Any:
            y, mean, rstd = forward()
            return y, *backward(mean, rstd)

        return Work(both, ("y", *GRADIENTS), sum_slack=SIXTEEN_BIT_SUMS)


class _Jax(Provider):
    """JAX has a stream of its own, so its time is the host's, over calls that follow each other without waiting.

    It includes what a call costs the host where that is more than the device's time.
    """

    name = "jax.jit"
    distribution = "jax"

    def __init__(self, device: str, cache_bytes: int) -> None:
        super().__init__(device, cache_bytes)
        # JAX would take three quarters of the GPU's memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._jax: Any = importlib.import_module("jax")
        backend = self._jax.default_backend()
        if backend != ("gpu" if device == "cuda" else "cpu"):
            raise ImportError(f"its backend is {backend}")

    def _norm(self, x: Any, weight: Any, bias: Any) -> Any:
        jnp = self._jax.numpy
        wide = x.astype(jnp.float32)
        mean = jnp.zeros((len(x), 1)) if bias is None else wide.mean(-1, keepdims=True)
        difference = wide - mean
        rstd = self._jax.lax.rsqrt(jnp.square(difference).mean(-1, keepdims=True) + EPS)
        y = difference * rstd * weight.astype(jnp.float32)
        if bias is not None:
            y += bias.astype(jnp.float32)
        return y.astype(x.dtype), mean[:, 0], rstd[:, 0]

    def _gradient(self, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, layer: bool) -> Any:
        jnp = self._jax.numpy
        wide_dy, rstd = dy.astype(jnp.float32), rstd[:, None]
        xhat = (x.astype(jnp.float32) - mean[:, None]) * rstd
        g = wide_dy * weight.astype(jnp.float32)
        dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
        if layer:
            dx -= g.mean(-1, keepdims=True)
        dweight, dbias = (wide_dy * xhat).sum(0), wide_dy.sum(0)
        results = (dx * rstd).astype(x.dtype), dweight.astype(weight.dtype), dbias.astype(weight.dtype)
        return results if layer else results[:2]

    def norm(self, row: Row, inputs: Inputs) -> Work | None:
        if row.clock == "host":
            return None
        if row.offset:
            raise ValueError("not tried: its own tensors are always aligned")
        layer = row.op == "layer_norm"
        if inputs.device == "cuda":
            torch.cuda.synchronize()
        # So many copies that none is in the cache when its turn comes again.
        turns = max(1, min(8, -(-2 * self.cache_bytes // inputs.x.nbytes))) if inputs.device == "cuda" else 1

        def tensors(*sources: torch.Tensor | None) -> Any:
            arrays = [None if source is None else self._jax.dlpack.from_dlpack(source) for source in sources]
            copies = [
                [None if array is None else self._jax.numpy.array(array) for array in arrays] for _ in range(turns - 1)
            ]
            self._jax.block_until_ready(copies)
            return itertools.cycle([arrays, *copies])

        function: Callable[..., Any]
        names: tuple[str, ...]
        residual = inputs.residual if row.residual else None
        if row.direction in _FORWARD:
            stats = row.direction == "forward_stats"

            def forward(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
                wide = x if residual is None else x + residual
                y, mean, rstd = self._norm(wide, weight, bias)
                results = (y,) if residual is None else (y, wide)
                return (*results, mean, rstd) if stats else results

            operands = tensors(inputs.x, residual, inputs.weight, inputs.bias)
            names = ("y",) if residual is None else ("y", "residual_out")
            function, names = forward, (*names, "mean", "rstd") if stats else names
        elif row.direction == "backward":

            def backward(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dresidual_out: Any) -> Any:
                dx, *sums = self._gradient(dy, x, weight, mean, rstd, layer)
                return (dx if dresidual_out is None else dx + dresidual_out), *sums

            last = inputs.dresidual_out if row.residual else None
            operands = tensors(inputs.dy, inputs.x, inputs.weight, inputs.mean, inputs.rstd, last)
            function, names = backward, GRADIENTS
        else:

            def both(dy: Any, x: Any, weight: Any, bias: Any) -> Any:
                y, mean, rstd = self._norm(x, weight, bias)
                return y, *self._gradient(dy, x, weight, mean, rstd, layer)

            operands = tensors(inputs.dy, inputs.x, inputs.weight, inputs.bias)
            function, names = both, ("y", *GRADIENTS)
        jitted = self._jax.jit(function)
        return Work(lambda: jitted(*next(operands)), names, "host's clock", self._jax.block_until_ready)


PROVIDERS: dict[str, type[Provider]] = {
    provider.name: provider
    for provider in (_Cunorm, _CunormCompiled, _Torch, _TorchCompile, _Liger, _Quack, _TritonTutorial, _Jax)
}


def find(names: Sequence[str], device: str, cache_bytes: int) -> tuple[list[Provider], dict[str, str]]:
    """The providers of these names; and for those that cannot be used here, why."""
    found, absent = [], {}
    for name in names:
        try:
            found.append(PROVIDERS[name](device, cache_bytes))
        except Exception as error:  # a library that is there and does not load raises whatever it likes
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, absent
