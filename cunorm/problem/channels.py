"""Instance, group and batch norm: norms whose statistics are those of channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.problem.base import Gradients, ProblemOfX, RunningStatistics
from cunorm.problem.tensors import ChannelTensor, Vector, View, channel_tensors, present, vector_of

__all__ = ["ChannelBackward", "ChannelForward"]


@dataclass(frozen=True)
class _ChannelProblem(ProblemOfX):
    samples: int
    channels: int
    point_sizes: tuple[int, ...]
    # Consecutive channels that have their statistics in common.
    channels_per_set: int

    @property
    def points(self) -> int:
        return math.prod(self.point_sizes)

    @property
    def values_per_set(self) -> int:
        """How many numbers a mean is of."""
        return self.points * self.channels_per_set

    @property
    def bytes_per_set(self) -> int:
        """Of x."""
        return self.values_per_set * self.itemsize

    @property
    def sets(self) -> int:
        """How many means there are: set s has the channels from s * channels_per_set on, counted over all samples."""
        return self.samples * self.channels // self.channels_per_set

    @property
    def tensors(self) -> tuple[ChannelTensor, ...]:
        raise NotImplementedError

    @property
    def tensors_read(self) -> int:
        """How many: x, and backward dy."""
        return 1 if isinstance(self, ChannelForward) else 2

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move: every tensor is read once, or written once."""
        return len(self.tensors) * self.samples * self.channels * self.points * self.itemsize


@dataclass(frozen=True)
class ChannelForward(_ChannelProblem):
    """y = activation((x - mean) * rstd * weight + bias), with weight and bias by channel; statistics by set.

    Without ``y`` only the statistics are computed, and the variance takes the place of rstd. Statistics are stored if
    ``stats``.
    """

    x: ChannelTensor
    y: ChannelTensor | None
    weight: Vector | None
    bias: Vector | None
    stats: bool
    eps: float
    activation: str | None = None
    running: RunningStatistics | None = None

    @property
    def given(self) -> bool:
        """Whether the statistics are the running ones, so that there are none to compute."""
        return self.running is not None and self.running.given

    @property
    def tensors(self) -> tuple[ChannelTensor, ...]:
        return present(self.x, self.y)

    @staticmethod
    def of(
        x: View,
        weight: View | None,
        bias: View | None,
        y: View | None,
        *,
        channel_axis: int,
        channels_per_set: int,
        over_samples: bool,
        eps: float,
        stats: bool,
        activation: str | None = None,
        running: RunningStatistics | None = None,
    ) -> ChannelForward:
        sizes, (of_x, of_y) = channel_tensors((x, y), channel_axis, over_samples)
        vectors = vector_of(weight), vector_of(bias)
        return ChannelForward(*sizes, channels_per_set, of_x, of_y, *vectors, stats, eps, activation, running)


@dataclass(frozen=True)
class ChannelBackward(_ChannelProblem, Gradients):
    """The gradients of ChannelForward: those of x (if dx), weight and bias (dtypes; None where not wanted).

    ``bias`` counts only under an activation. Where the statistics were ``given``, they are constants.
    """

    dy: ChannelTensor
    x: ChannelTensor
    dx: ChannelTensor | None
    weight: Vector | None
    bias: Vector | None
    dweight: str | None
    dbias: str | None
    activation: str | None = None
    given: bool = False

    @property
    def tensors(self) -> tuple[ChannelTensor, ...]:
        return present(self.dy, self.x, self.dx)

    @staticmethod
    def of(
        dy: View,
        x: View,
        weight: View | None,
        bias: View | None,
        dx: View | None,
        *,
        channel_axis: int,
        channels_per_set: int,
        over_samples: bool,
        dweight: str | None,
        dbias: str | None,
        activation: str | None = None,
        given: bool = False,
    ) -> ChannelBackward:
        sizes, (of_dy, of_x, of_dx) = channel_tensors((dy, x, dx), channel_axis, over_samples)
        vectors = vector_of(weight), None if activation is None else vector_of(bias)
        return ChannelBackward(
            *sizes, channels_per_set, of_dy, of_x, of_dx, *vectors, dweight, dbias, activation, given
        )
