"""GELU, with a bias that is added before."""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.problem.rows import RowProblem
from cunorm.problem.tensors import Matrix, Vector, View, pointwise_matrices, present, vector_of

__all__ = ["PointwiseBackward", "PointwiseForward"]


@dataclass(frozen=True)
class PointwiseForward(RowProblem):
    """y = activation(x + bias), number by number. The columns are the last axis, one number of the bias each.

    Without a bias rows and columns mean nothing, and the columns are as much as is one run of memory in x and y.
    """

    x: Matrix
    y: Matrix
    bias: Vector | None
    activation: str

    @property
    def matrices_read(self) -> tuple[Matrix, ...]:
        return (self.x,)

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return (self.y,)

    @staticmethod
    def of(x: View, bias: View | None, y: View, *, activation: str) -> PointwiseForward:
        rows, columns, (of_x, of_y) = pointwise_matrices((x, y), bias)
        return PointwiseForward(rows, columns, of_x, of_y, vector_of(bias), activation)


@dataclass(frozen=True)
class PointwiseBackward(RowProblem):
    """The gradients of PointwiseForward: that of x (if dx), and that of the bias (its dtype; None if not wanted)."""

    dy: Matrix
    x: Matrix
    dx: Matrix | None
    bias: Vector | None
    dbias: str | None
    activation: str

    @property
    def matrices_read(self) -> tuple[Matrix, ...]:
        return self.dy, self.x

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return present(self.dx)

    @staticmethod
    def of(
        dy: View, x: View, bias: View | None, dx: View | None, *, dbias: str | None, activation: str
    ) -> PointwiseBackward:
        rows, columns, (of_dy, of_x, of_dx) = pointwise_matrices((dy, x, dx), bias)
        return PointwiseBackward(rows, columns, of_dy, of_x, of_dx, vector_of(bias), dbias, activation)
