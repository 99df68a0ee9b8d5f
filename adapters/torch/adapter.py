"""PyTorch tensors: differentiable, on PyTorch's current stream, in memory from PyTorch's allocator.

CUDA tensors go to the kernels, CPU tensors to ``cunorm.reference``, in both cases over PyTorch's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cunorm import execute
from cunorm.execute import Adapter, Op, Output, Results
from cunorm.problem import View

__all__ = ["ADAPTER"]

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.uint8: "uint8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_is_grad_enabled = torch.is_grad_enabled


def _requires_grad(*tensors: Any) -> bool:
    # Every call comes here: a generator, or getattr with a default, would take longer.
    for tensor in tensors:
        if tensor is not None:
            try:
                if tensor.requires_grad:
                    return True
            except AttributeError:  # no tensor: `view` says so
                pass
    return False


class TorchAdapter(Adapter):
    def view(self, tensor: Any, name: str) -> View:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__qualname__}; beside a PyTorch x it must be a PyTorch tensor")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}; it must be torch.strided")
        device = tensor.device
        if device.type not in ("cuda", "cpu"):
            raise RuntimeError(f"{name} is on device {device}; it must be on a CUDA device or the CPU")
        if tensor.is_neg():
            raise RuntimeError(f"{name} is a view whose numbers are negated in memory; give {name}.resolve_neg()")
        if not tensor.data_ptr() and tensor.numel():
            raise RuntimeError(f"{name} is a {type(tensor).__qualname__} without memory of its own")
        dtype = _NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
        place = ("cuda", device.index) if device.type == "cuda" else ("cpu", 0)
        return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, place)

    def describe(self, tensors: Sequence[Any], names: Sequence[str]) -> tuple[tuple[Any, ...], list[int]]:
        kind: list[Any] = []
        pointers = []
        for tensor in tensors:
            if tensor is None:
                kind.append(None)
                pointers.append(0)
                continue
            try:
                pointer = tensor.data_ptr()
                if not pointer or tensor.is_neg():
                    return super().describe(tensors, names)
                kind += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, pointer & 15)
            except (AttributeError, RuntimeError):  # no tensor, or one without memory: `view` says what is wrong
                return super().describe(tensors, names)
            pointers.append(pointer)
        return tuple(kind), pointers

    def empty(self, output: Output, like: torch.Tensor) -> torch.Tensor:
        dtype = _DTYPES[output.dtype]
        if type(like) is torch.Tensor and like.shape == output.shape and like.dtype is dtype:  # takes half the time
            if like.is_contiguous():  # and the memory format is time too
                return torch.empty_like(like)
            if output.permutation is None:
                return torch.empty_like(like, memory_format=torch.contiguous_format)
        if output.permutation is not None:
            return torch.empty_permuted(output.shape, output.permutation, dtype=dtype, device=like.device)
        return torch.empty(output.shape, dtype=dtype, device=like.device)

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def stream(self, device: tuple[str, int]) -> int:
        # The raw handle costs a fortieth of torch.cuda.current_stream(), which makes a Python object of it.
        return int(torch._C._cuda_getCurrentRawStream(device[1])) if device[0] == "cuda" else 0

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
        if running and _requires_grad(*running):
            name = "running_mean" if _requires_grad(running[0]) else "running_var"
            must = f"running statistics are constants to differentiation: give {name}.detach()"
            raise ValueError(f"{name} requires a gradient; {must}")
        # Forward-mode differentiation goes to `_Recorded` too, where PyTorch says that there is none.
        if (_is_grad_enabled() and _requires_grad(x, weight, bias, residual, out)) or forward_ad._current_level >= 0:
            if out is not None:
                raise ValueError(
                    "out cannot be given where gradients are recorded; use torch.no_grad() or leave it out"
                )
            recorded = _Recorded.apply(op, x, residual, weight, bias, stats, running)  # type: ignore[no-untyped-call]
            results = iter(recorded)
            y, residual_out = next(results), None if residual is None else next(results)
            if not stats:
                return y, residual_out, None, None
            *mean, rstd = results
            return y, residual_out, mean[0] if mean else None, rstd
        results = execute.forward(self, op, x, residual, weight, bias, out, stats, running)
        if out is not None:
            _written(out)
        if running and op.updates_running:
            _written(*running)
        return results


ADAPTER: Adapter = TorchAdapter()


def _written(*tensors: torch.Tensor) -> None:
    """Tell autograd, which may have saved these tensors. Those of inference mode have no versions to count."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


class _Recorded(torch.autograd.Function):
    """Any op of ``cunorm.execute.Op``: y[, residual_out][[, mean], rstd].

    The statistics are kept for the gradient, and are not differentiable where they are results too. Results that a call
    does not have, or that nobody asked for, are left out, since autograd takes time for each.
    """

    @staticmethod
    def forward(
        ctx: Any, op: Op, x: Any, residual: Any, weight: Any, bias: Any, stats: bool, running: tuple[Any, ...]
    ) -> Any:
        y, residual_out, mean, rstd = execute.forward(ADAPTER, op, x, residual, weight, bias, None, True, running)
        if running and op.updates_running:
            _written(*running)
        ctx.call = op, None if bias is None else _NAMES[bias.dtype], residual_out is not None
        kept = x if residual_out is None else residual_out
        if op.keeps_bias:
            ctx.save_for_backward(kept, weight, mean, rstd, bias)
        else:
            ctx.save_for_backward(kept, weight, mean, rstd)
        ctx.set_materialize_grads(False)  # there would be zeros for what was not used, mean and rstd always
        results = (y,) if residual_out is None else (y, residual_out)
        if not stats:
            return results
        statistics = (rstd,) if mean is None else (mean, rstd)
        ctx.mark_non_differentiable(*statistics)
        return results + statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any, *others: Any) -> Any:
        op, bias_dtype, has_residual = ctx.call
        dresidual_out = others[0] if has_residual else None
        if dy is None:  # y was not used
            return None, dresidual_out, dresidual_out, None, None, None, None
        x, weight, mean, rstd, *kept = ctx.saved_tensors
        bias = kept[0] if kept else None
        _, needs_x, needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        mask = (needs_x or needs_residual, needs_weight, needs_bias)
        dx, dweight, dbias = execute.backward(
            ADAPTER, op, dy, dresidual_out, x, weight, bias, mean, rstd, mask, bias_dtype
        )
        return None, dx if needs_x else None, dx if needs_residual else None, dweight, dbias, None, None
