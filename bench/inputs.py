"""The tensors of a row, and the exact results that every provider's are compared with."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cunorm.bench.suites import Row

__all__ = ["CHUNK_ELEMENTS", "EPS", "RUNNING", "SUMS", "Comparison", "Exact", "Inputs", "Tensors", "sampled"]

EPS = 1e-5

_gelu_backward: Any = torch.ops.aten.gelu_backward

# Elements that are worked on in float64 at a time; some ten temporaries of 8 bytes each.
CHUNK_ELEMENTS = 2**25
_SAMPLES = 8

# The largest error that counts as right. A sixteen-bit result may be rounded twice, so the limit is twice the error of
# one rounding; float32 sums over ten million rows come out with some 1e-6 in any reasonable order.
_LIMITS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
_SUM_LIMITS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-4}
SUMS = ("dweight", "dbias")
RUNNING = ("running_mean", "running_var")


class Tensors:
    """x and what goes with it, made when first asked for."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, row: Row, device: str) -> None:
        self.op, self.device = row.op, device
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        torch.manual_seed(0)

    def _random(self) -> torch.Tensor:
        """Standard normal numbers in the shape and the layout of x."""
        raise NotImplementedError

    @functools.cached_property
    def dy(self) -> torch.Tensor:
        return self._random()

    def poison(self) -> None:
        """Fill memory with NaN that the allocator will hand out as outputs, so that what is not written is found."""
        tensors = [torch.full_like(self.x, torch.nan, memory_format=torch.contiguous_format) for _ in range(2)]
        tensors += [torch.full_like(self.weight, torch.nan) for _ in range(2)]
        del tensors


class Inputs(Tensors):
    """Those of a norm of the last axis or of a gelu: all are two-dimensional here, however many axes x has."""

    def __init__(self, row: Row, device: str) -> None:
        super().__init__(row, device)
        self.rows, self.columns, self.offset = row.rows, row.columns, row.offset
        self.x = self._random()
        uniform, dtype = torch.rand(2, self.columns, device=device), getattr(torch, row.weights or row.dtype)
        self.weight = (uniform[0] + 0.5).to(dtype)
        self.bias = (uniform[1] - 0.5).to(dtype) if self.op == "layer_norm" or row.is_biased_gelu else None
        self.approximate = row.approximate

    def _random(self) -> torch.Tensor:
        memory = torch.randn(self.rows * self.columns + self.offset, device=self.device, dtype=self.dtype)
        return memory[self.offset :].view(self.rows, self.columns)

    @functools.cached_property
    def residual(self) -> torch.Tensor:
        return self._random()

    @functools.cached_property
    def dresidual_out(self) -> torch.Tensor:
        return self._random()

    @functools.cached_property
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """mean (zero for RMS norm) and rstd of every row of x, in float64."""
        parts = [_statistics(self.x[part].double(), self.op) for part in self.parts()]
        mean, rstd = (torch.cat(tensors) for tensors in zip(*parts))
        return mean, rstd

    @functools.cached_property
    def mean(self) -> torch.Tensor:
        return self.statistics[0].float()

    @functools.cached_property
    def rstd(self) -> torch.Tensor:
        return self.statistics[1].float()

    def parts(self) -> Iterator[slice]:
        step = max(1, CHUNK_ELEMENTS // self.columns)
        return (slice(begin, begin + step) for begin in range(0, self.rows, step))


def _statistics(x: torch.Tensor, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    if op == "rms_norm":
        mean = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        return mean, (x.square().mean(1) + EPS).rsqrt()
    mean = x.mean(1)
    return mean, ((x - mean[:, None]).square_().mean(1) + EPS).rsqrt()


def sampled(count: int, device: str) -> torch.Tensor:
    """Some of so many indices: the first, the last and random ones."""
    random = torch.randint(count, (_SAMPLES - 2,), generator=torch.Generator().manual_seed(1)).tolist()
    return torch.tensor(sorted({0, count - 1, *random}), device=device)


class Comparison:
    """How far results are from exact ones."""

    def errors(self, results: Mapping[str, torch.Tensor], residual: bool) -> dict[str, float]:
        """The error of each result: the larger one of ||result - exact|| / ||exact|| and of the same in the maximum
        norm. Infinite where a number of the result is no number or the shape is wrong."""
        return {name: self._error(name, result, residual) for name, result in results.items()}

    @staticmethod
    def limit(name: str, dtype: torch.dtype) -> float:
        """The largest error of a right result."""
        if name in RUNNING:  # float32, whatever x is, and sums of it
            return _SUM_LIMITS[torch.float32]
        return (_SUM_LIMITS if name in SUMS else _LIMITS)[dtype]

    def _pair(self, name: str, result: torch.Tensor, residual: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is compared, in float64: the result, or a part of it, and the exact one. None where it is no result."""
        raise NotImplementedError

    def _error(self, name: str, result: torch.Tensor, residual: bool) -> float:
        pair = self._pair(name, result, residual)
        if pair is None:
            return float("inf")
        found, exact = pair
        if found.shape != exact.shape or not bool(torch.isfinite(found).all()):
            return float("inf")
        difference = found - exact
        if name == "mean":  # of numbers whose deviation is about one: nearly zero, which is no scale to compare with
            return float(difference.abs().max())
        largest = float(difference.abs().max() / exact.abs().max())
        return max(largest, float(difference.norm() / exact.norm()))


class Exact(Comparison):
    """Results in float64 of a norm of the last axis or of a gelu: of some rows, and the sums over all rows."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._sample = sampled(inputs.rows, inputs.device)

    def _pair(self, name: str, result: torch.Tensor, residual: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        inputs = self._inputs
        if name in SUMS:
            return result.reshape(-1).double(), self._sums[SUMS.index(name)]
        if result.numel() % inputs.rows:
            return None
        by_row = result.detach().reshape(inputs.rows, -1)
        if bool(torch.isnan(by_row).any()):
            return None
        return by_row[self._sample].double(), self._of_rows(name, residual).reshape(len(self._sample), -1)

    def _of_rows(self, name: str, residual: bool) -> torch.Tensor:
        inputs = self._inputs
        x = inputs.x[self._sample].double()
        if inputs.approximate:
            z = x if inputs.bias is None else x + inputs.bias.double()
            if name == "y":
                return F.gelu(z, approximate=inputs.approximate)
            assert name == "dx", name
            gradient: torch.Tensor = _gelu_backward(inputs.dy[self._sample].double(), z, approximate=inputs.approximate)
            return gradient
        forward = name in ("y", "residual_out", "mean", "rstd")
        if forward and residual:
            x += inputs.residual[self._sample].double()
        if name == "residual_out":
            return x
        mean, rstd = _statistics(x, inputs.op)
        if name in ("mean", "rstd"):
            return mean if name == "mean" else rstd
        xhat = (x - mean[:, None]) * rstd[:, None]
        weight = inputs.weight.double()
        if name == "y":
            return xhat * weight if inputs.bias is None else xhat * weight + inputs.bias.double()
        assert name == "dx", name
        g = inputs.dy[self._sample].double() * weight
        dx = g - xhat * (g * xhat).mean(1, keepdim=True)
        if inputs.op == "layer_norm":
            dx -= g.mean(1, keepdim=True)
        dx *= rstd[:, None]
        return dx + inputs.dresidual_out[self._sample].double() if residual else dx

    @functools.cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs
        dweight, dbias = (torch.zeros(inputs.columns, dtype=torch.float64, device=inputs.device) for _ in range(2))
        if inputs.approximate:
            assert inputs.bias is not None
            for part in inputs.parts():
                z = inputs.x[part].double() + inputs.bias.double()
                dbias += _gelu_backward(inputs.dy[part].double(), z, approximate=inputs.approximate).sum(0)
            return dweight, dbias
        mean, rstd = inputs.statistics
        for part in inputs.parts():
            dy, xhat = inputs.dy[part].double(), inputs.x[part].double()
            dbias += dy.sum(0)
            xhat -= mean[part, None]
            xhat *= rstd[part, None]
            dweight += xhat.mul_(dy).sum(0)
        return dweight, dbias
