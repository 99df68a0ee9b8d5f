"""The tensors of a row of instance, group or batch norm, and the exact results.

A set is what a mean is taken of: a channel of a sample, a group of one, or a channel of all samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from cunorm.bench.inputs import CHUNK_ELEMENTS, EPS, RUNNING, SUMS, Comparison, Tensors, sampled
from cunorm.bench.suites import Row

__all__ = ["MOMENTUM", "ChannelExact", "ChannelInputs"]

MOMENTUM = 0.1

# What running statistics are before the first step. With PyTorch's own, 0 and 1, a variance of one that nobody has
# updated would be right.
_RUNNING_BEFORE = (0.0, 2.0)

_silu_backward: Any = torch.ops.aten.silu_backward


class ChannelInputs(Tensors):
    """All are (N, C, spatial...), and in the layout of the row. A channel's mean is not that of the others.

    Weights are float32 where PyTorch's automatic mixed precision leaves them so, which is where cuDNN takes them; a
    group norm has no such mixture.
    """

    def __init__(self, row: Row, device: str) -> None:
        super().__init__(row, device)
        self.activation = row.activation
        self._shape, self._layout = row.shape, row.layout
        channels = row.shape[1]
        uniform = torch.rand(3, channels, device=device)
        dtype = self.dtype if row.groups else torch.float32
        self.weight, self.bias = (uniform[0] + 0.5).to(dtype), (uniform[1] - 0.5).to(dtype)
        self.x = self._random()
        self.x += (2 * uniform[2] - 1).to(self.dtype).view(channels, *[1] * (len(row.shape) - 2))
        self.sets = row.groups or channels  # of a sample, or of all samples together
        self.axes = (0, 2, 3) if row.op == "batch_norm" else (2, 3)

    def _random(self) -> torch.Tensor:
        samples, channels, *spatial = self._shape
        shape = (samples, *spatial, channels) if self._layout == "N...C" else self._shape
        memory = torch.randn(shape, device=self.device, dtype=self.dtype)
        return memory.movedim(-1, 1) if self._layout == "N...C" else memory

    def running(self) -> list[torch.Tensor]:
        """A running mean and variance that nobody has updated yet, for a batch norm; nothing for the others."""
        if self.op != "batch_norm":
            return []
        return [torch.full_like(self.weight, value) for value in _RUNNING_BEFORE]

    def by_set(self, tensor: torch.Tensor) -> torch.Tensor:
        """(N, sets, channels of a set, positions), of a tensor like x or of a vector by channel."""
        samples = len(tensor) if tensor.dim() > 1 else 1
        return tensor.reshape(samples, self.sets, self._shape[1] // self.sets, -1)

    def statistics_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """mean and rstd of sets, whose axes they keep."""
        mean = x.mean(self.axes, keepdim=True)
        return mean, ((x - mean).square_().mean(self.axes, keepdim=True) + EPS).rsqrt()

    @functools.cached_property
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all sets, in float64."""
        x = self.by_set(self.x)
        parts = [self.statistics_of(x[:, part].double()) for part in self.parts()]
        mean, rstd = (torch.cat(tensors, dim=1) for tensors in zip(*parts))
        return mean, rstd

    @functools.cached_property
    def mean(self) -> torch.Tensor:
        return self._by_set_of_samples(self.statistics[0])

    @functools.cached_property
    def rstd(self) -> torch.Tensor:
        return self._by_set_of_samples(self.statistics[1])

    def _by_set_of_samples(self, statistic: torch.Tensor) -> torch.Tensor:
        return statistic.reshape(self.sets if self.op == "batch_norm" else (len(self.x), self.sets)).float()

    def parts(self) -> Iterator[slice]:
        step = max(1, CHUNK_ELEMENTS * self.sets // self.x.numel())
        return (slice(begin, begin + step) for begin in range(0, self.sets, step))


class ChannelExact(Comparison):
    """Results in float64: of some sets of every sample, and what there is a number of for each channel."""

    def __init__(self, inputs: ChannelInputs) -> None:
        self._inputs = inputs
        self._sample = sampled(inputs.sets, inputs.device)

    def _pair(self, name: str, result: torch.Tensor, residual: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        if name in SUMS:
            return result.double(), self._sums[SUMS.index(name)]
        if name in RUNNING:
            return result.double(), self._running[RUNNING.index(name)]
        if result.shape != self._inputs.x.shape or bool(torch.isnan(result).any()):
            return None
        return self._inputs.by_set(result)[:, self._sample].double(), self._of_sets(name)

    def _of_sets(self, name: str) -> torch.Tensor:
        inputs, sample = self._inputs, self._sample
        x = inputs.by_set(inputs.x)[:, sample].double()
        mean, rstd = inputs.statistics_of(x)
        xhat = (x - mean).mul_(rstd)
        if name == "y":
            z = self._affine(xhat, sample)
            return F.silu(z) if inputs.activation else z
        assert name == "dx", name
        dz = self._dz(inputs.by_set(inputs.dy)[:, sample].double(), xhat, sample)
        g = dz * inputs.by_set(inputs.weight)[:, sample].double()
        projection = (g * xhat).mean(inputs.axes, keepdim=True)
        return (g - g.mean(inputs.axes, keepdim=True) - xhat * projection) * rstd

    def _affine(self, xhat: torch.Tensor, sets: Any) -> torch.Tensor:
        assert self._inputs.bias is not None
        weight, bias = (self._inputs.by_set(tensor)[:, sets] for tensor in (self._inputs.weight, self._inputs.bias))
        return xhat * weight.double() + bias.double()

    def _dz(self, dy: torch.Tensor, xhat: torch.Tensor, sets: Any) -> torch.Tensor:
        """The gradient of what the activation is applied to."""
        if not self._inputs.activation:
            return dy
        gradient: torch.Tensor = _silu_backward(dy, self._affine(xhat, sets))
        return gradient

    @functools.cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs
        x, dy = inputs.by_set(inputs.x), inputs.by_set(inputs.dy)
        dweight, dbias = [], []
        for part in inputs.parts():
            mean, rstd = (statistic[:, part] for statistic in inputs.statistics)
            xhat = (x[:, part].double() - mean).mul_(rstd)
            dz = self._dz(dy[:, part].double(), xhat, part)
            dbias.append(dz.sum((0, 3)).view(-1))
            dweight.append(xhat.mul_(dz).sum((0, 3)).view(-1))
        return torch.cat(dweight), torch.cat(dbias)

    @functools.cached_property
    def _running(self) -> tuple[torch.Tensor, torch.Tensor]:
        """After one step."""
        mean, rstd = (statistic.view(-1) for statistic in self._inputs.statistics)
        count = math.prod(self._inputs.x.shape) // len(mean)
        unbiased = (rstd**-2 - EPS) * count / (count - 1)
        running_mean, running_var = (
            (1 - MOMENTUM) * before + MOMENTUM * new for before, new in zip(_RUNNING_BEFORE, (mean, unbiased))
        )
        return running_mean, running_var
