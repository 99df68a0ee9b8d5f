"""Layer norm, RMS norm, and what comes to the same: norms whose statistics are those of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.problem.base import Gradients, ProblemOfX, RunningStatistics
from cunorm.problem.tensors import Matrix, Vector, View, matrices_of, present, vector_of

__all__ = ["BackwardProblem", "Channels", "ForwardProblem", "Norm", "RowProblem"]


@dataclass(frozen=True)
class Norm:
    """What is done to each row, whatever its size: the attributes of an op that change what a kernel computes.

    With xhat = (x - mean) * rstd (x * rstd where not ``centered``: RMS norm, whose rstd is that of the mean square),
    y = activation(xhat * (weight_offset + weight) + bias). ``activation`` is one of ACTIVATIONS, or None.
    """

    centered: bool = True
    weight_offset: float = 0.0
    activation: str | None = None


@dataclass(frozen=True)
class Channels:
    """Where weights and biases are one number a channel, not a column: which channels a row has.

    Row r has ``channels_per_row`` channels of ``positions`` columns each, the first being
    ``r % rows_per_sample * channels_per_row``.
    """

    rows_per_sample: int
    channels_per_row: int
    positions: int


@dataclass(frozen=True)
class RowProblem(ProblemOfX):
    row_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.row_sizes)

    @property
    def columns(self) -> int:
        return math.prod(self.column_sizes)

    @property
    def matrices_read(self) -> tuple[Matrix, ...]:
        raise NotImplementedError

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        raise NotImplementedError

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.matrices_read + self.matrices_written

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move: every matrix is read once, or written once."""
        return len(self.matrices) * self.rows * self.columns * self.itemsize


class _RowNormProblem(RowProblem):
    weight: Vector | None
    bias: Vector | None
    channels: Channels | None

    @property
    def parameters(self) -> tuple[Vector, ...]:
        """The weight and the bias, if they are there."""
        return present(self.weight, self.bias)

    @property
    def is_bare(self) -> bool:
        """Whether there is nothing by column or by channel: no weight, no bias and (see `BackwardProblem`) no sums."""
        return not self.parameters

    @property
    def is_by_channel(self) -> bool:
        """Whether kernels have to know of which channel a number is.

        Where a row has several, or where its one has a weight, a bias or sums. Several count even without these: else 8
        x 320 x 64^2 float16 numbers in 32 groups under silu would spill.
        """
        return self.channels is not None and (self.channels.channels_per_row > 1 or not self.is_bare)


@dataclass(frozen=True)
class ForwardProblem(_RowNormProblem):
    """y = norm(x) for every row, with the statistics stored if ``stats``.

    With ``residual``, what is normalized is residual_out = x + residual, rounded to x's dtype. Rows that are the
    channels of a batch norm may update ``running`` statistics, one of each a row.
    """

    x: Matrix
    residual: Matrix | None
    y: Matrix
    residual_out: Matrix | None
    weight: Vector | None
    bias: Vector | None
    stats: bool
    eps: float
    norm: Norm = Norm()
    channels: Channels | None = None
    running: RunningStatistics | None = None

    @property
    def matrices_read(self) -> tuple[Matrix, ...]:
        return present(self.x, self.residual)

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return present(self.y, self.residual_out)

    @staticmethod
    def of(
        x: View,
        weight: View | None,
        bias: View | None,
        y: View,
        *,
        axis: tuple[int, ...],
        eps: float,
        stats: bool,
        norm: Norm = Norm(),
        residual: View | None = None,
        residual_out: View | None = None,
    ) -> ForwardProblem:
        rows, columns, (of_x, of_residual, of_y, of_sum) = matrices_of((x, residual, y, residual_out), axis)
        vectors = vector_of(weight), vector_of(bias)
        return ForwardProblem(rows, columns, of_x, of_residual, of_y, of_sum, *vectors, stats, eps, norm)


@dataclass(frozen=True)
class BackwardProblem(_RowNormProblem, Gradients):
    """The gradients of ForwardProblem: those of x (if dx), weight and bias (dtypes; None where not wanted).

    ``x`` is what was normalized: residual_out, where there was a residual. dx is the gradient of x and of the residual
    alike; ``dresidual_out``, the gradient of residual_out, is added to it. ``bias`` counts only under an activation.
    """

    x: Matrix
    dy: Matrix
    dresidual_out: Matrix | None
    dx: Matrix | None
    weight: Vector | None
    bias: Vector | None
    dweight: str | None
    dbias: str | None
    norm: Norm = Norm()
    channels: Channels | None = None

    @property
    def is_bare(self) -> bool:
        return not self.parameters and not self.sums

    @property
    def matrices_read(self) -> tuple[Matrix, ...]:
        return present(self.x, self.dy, self.dresidual_out)

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return present(self.dx)

    @staticmethod
    def of(
        dy: View,
        x: View,
        weight: View | None,
        dx: View | None,
        *,
        axis: tuple[int, ...],
        dweight: str | None,
        dbias: str | None,
        norm: Norm = Norm(),
        bias: View | None = None,
        dresidual_out: View | None = None,
    ) -> BackwardProblem:
        if dx is None:
            dresidual_out = None  # which is all that it goes into
        if norm.activation is None:
            bias = None
        rows, columns, (of_x, of_dy, of_sum, of_dx) = matrices_of((x, dy, dresidual_out, dx), axis)
        vectors = vector_of(weight), vector_of(bias)
        return BackwardProblem(rows, columns, of_x, of_dy, of_sum, of_dx, *vectors, dweight, dbias, norm)
