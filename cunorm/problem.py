"""What is computed, in canonical form. Axes end here: from here on a tensor is a matrix of rows by columns.

The kept dimensions of a tensor are its rows, the normalized ones its columns, each in C order, so that row r is the
r-th element of the mean and column c the c-th of the weight. Dimensions that lie behind each other in memory in every
tensor of the call are merged; most problems come down to one row and one column dimension. Nothing is ever transposed
or copied: what cannot be merged is left as several sizes and strides, and the plan picks a kernel that can follow them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DTYPES", "BackwardProblem", "Dtype", "ForwardProblem", "Matrix", "Vector", "View", "contiguous_strides"]


class Dtype(NamedTuple):
    """What is known of a dtype: its size in bytes, its CUDA type, and the dtype of its sums."""

    itemsize: int
    cuda: str
    compute: str


DTYPES = {
    "float16": Dtype(2, "__half", "float32"),
    "bfloat16": Dtype(2, "__nv_bfloat16", "float32"),
    "float32": Dtype(4, "float", "float32"),
    "float64": Dtype(8, "double", "float64"),
}


class View(NamedTuple):
    """A tensor of any framework, as memory. Strides are in elements; the device is ("cuda", index) or ("cpu", 0)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a C-contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


@dataclass(frozen=True)
class Matrix:
    """How a tensor lies in memory, seen as rows by columns: strides in elements, one for each merged dimension.

    ``alignment`` is the largest power of two, up to 16, that divides the data pointer.
    """

    dtype: str
    row_strides: tuple[int, ...]
    column_strides: tuple[int, ...]
    alignment: int = 16


@dataclass(frozen=True)
class Vector:
    """A contiguous weight or bias: one number a column."""

    dtype: str
    alignment: int = 16


@dataclass(frozen=True)
class _RowProblem:
    row_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.row_sizes)

    @property
    def columns(self) -> int:
        return math.prod(self.column_sizes)


@dataclass(frozen=True)
class ForwardProblem(_RowProblem):
    """y = (x - mean) * rstd * weight + bias for every row, with the statistics stored if ``stats``."""

    x: Matrix
    y: Matrix
    weight: Vector | None
    bias: Vector | None
    stats: bool
    eps: float

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.x, self.y)

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move: x read once, y written once."""
        return 2 * self.rows * self.columns * DTYPES[self.x.dtype].itemsize

    @staticmethod
    def of(
        x: View, weight: View | None, bias: View | None, y: View, *, axis: tuple[int, ...], eps: float, stats: bool
    ) -> ForwardProblem:
        rows, columns, (x_matrix, y_matrix) = _matrices((x, y), axis)
        return ForwardProblem(rows, columns, x_matrix, y_matrix, _vector(weight), _vector(bias), stats, eps)


@dataclass(frozen=True)
class BackwardProblem(_RowProblem):
    """The gradients of ForwardProblem: those of x (if dx), weight and bias (dtypes; None where not wanted)."""

    x: Matrix
    dy: Matrix
    dx: Matrix | None
    weight: Vector | None
    dweight: str | None
    dbias: str | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.x, self.dy) if self.dx is None else (self.x, self.dy, self.dx)

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move: x and dy read once, dx written once."""
        return len(self.matrices) * self.rows * self.columns * DTYPES[self.x.dtype].itemsize

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
    ) -> BackwardProblem:
        rows, columns, matrices = _matrices((x, dy) if dx is None else (x, dy, dx), axis)
        dx_matrix = matrices[2] if dx is not None else None
        return BackwardProblem(rows, columns, matrices[0], matrices[1], dx_matrix, _vector(weight), dweight, dbias)


def _alignment(pointer: int) -> int:
    return min(16, pointer & -pointer) if pointer else 16


def _vector(view: View | None) -> Vector | None:
    return None if view is None else Vector(view.dtype, _alignment(view.pointer))


def _matrices(views: tuple[View, ...], axis: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], list[Matrix]]:
    shape = views[0].shape
    kept = [i for i in range(len(shape)) if i not in axis]
    row_sizes, row_strides = _merge(shape, [view.strides for view in views], kept)
    column_sizes, column_strides = _merge(shape, [view.strides for view in views], axis)
    matrices = [
        Matrix(view.dtype, row_strides[i], column_strides[i], _alignment(view.pointer)) for i, view in enumerate(views)
    ]
    return row_sizes, column_sizes, matrices


def _merge(
    shape: Sequence[int], strides: Sequence[Sequence[int]], dims: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbours of ``dims`` that are one run of memory in every tensor.

    Returns the merged sizes, and each tensor's strides.
    """
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim in dims:
        size = shape[dim]
        if size == 1:
            continue
        if sizes and all(ours[-1] == theirs[dim] * size for ours, theirs in zip(merged, strides)):
            sizes[-1] *= size
            for ours, theirs in zip(merged, strides):
                ours[-1] = theirs[dim]
        else:
            sizes.append(size)
            for ours, theirs in zip(merged, strides):
                ours.append(theirs[dim])
    if not sizes:
        # Never walked; a stride that every number divides, so that it narrows no access.
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(ours) for ours in merged]
