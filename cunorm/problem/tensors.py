"""How tensors lie in memory: as a framework's axes have it, and as kernels see it, merged where that is one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "DTYPES",
    "ChannelTensor",
    "Dtype",
    "Matrix",
    "Vector",
    "View",
    "channel_tensors",
    "contiguous_strides",
    "matrices_of",
    "pointwise_matrices",
    "present",
    "vector_of",
]


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

    ``offset`` is how many bytes the data pointer lies behind a multiple of 16.
    """

    dtype: str
    row_strides: tuple[int, ...]
    column_strides: tuple[int, ...]
    offset: int = 0

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 16, that divides the data pointer."""
        return _alignment(self.offset)


@dataclass(frozen=True)
class Vector:
    """A contiguous weight, bias or running statistic: one number a column, or a channel.

    ``offset`` and ``alignment`` are as a Matrix has them.
    """

    dtype: str
    offset: int = 0

    @property
    def alignment(self) -> int:
        return _alignment(self.offset)

    @staticmethod
    def of(view: View) -> Vector:
        return Vector(view.dtype, view.pointer % 16)


@dataclass(frozen=True)
class ChannelTensor:
    """How a tensor lies in memory, seen as samples by channels by points: strides in elements.

    The points are what a channel's statistics are taken over: the spatial dimensions, merged where they can be; over a
    whole batch also the samples, of which there is one then.
    """

    dtype: str
    sample_stride: int
    channel_stride: int
    point_strides: tuple[int, ...]
    offset: int = 0  # as a Matrix has it

    @property
    def alignment(self) -> int:
        return _alignment(self.offset)


_T = TypeVar("_T")


def present(*items: _T | None) -> tuple[_T, ...]:
    return tuple(item for item in items if item is not None)


def _placed(items: Iterable[Any], views: Sequence[View | None]) -> list[Any]:
    """The items, one for each view that is there, in the places of these; None for None."""
    rest = iter(items)
    return [None if view is None else next(rest) for view in views]


def _alignment(offset: int) -> int:
    return min(16, offset & -offset) if offset else 16


def vector_of(view: View | None) -> Vector | None:
    return None if view is None else Vector.of(view)


def matrices_of(views: tuple[View | None, ...], axis: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """The sizes of rows and of columns, and a Matrix for each view (None for None)."""
    given = present(*views)
    shape, strides = given[0].shape, [view.strides for view in given]
    kept = [i for i in range(len(shape)) if i not in axis]
    row_sizes, row_strides = _merge(shape, strides, kept)
    column_sizes, column_strides = _merge(shape, strides, axis)
    matrices = [
        Matrix(view.dtype, row_strides[i], column_strides[i], view.pointer % 16) for i, view in enumerate(given)
    ]
    return row_sizes, column_sizes, _placed(matrices, views)


def pointwise_matrices(
    views: tuple[View | None, ...], bias: View | None
) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """As `matrices_of`, with the last axis for columns, or without a bias the last of all axes merged."""
    given = present(*views)
    dimensions = len(given[0].shape)
    if bias is not None:
        return matrices_of(views, (dimensions - 1,))
    sizes, strides = _merge(given[0].shape, [view.strides for view in given], range(dimensions))
    matrices = [
        Matrix(view.dtype, of_view[:-1] or (0,), of_view[-1:], view.pointer % 16)
        for view, of_view in zip(given, strides)
    ]
    return sizes[:-1] or (1,), sizes[-1:], _placed(matrices, views)


def channel_tensors(
    views: tuple[View | None, ...], channel_axis: int, over_samples: bool
) -> tuple[tuple[int, int, tuple[int, ...]], list[Any]]:
    """Samples, channels and point sizes; and a ChannelTensor for each view (None for None)."""
    given = present(*views)
    shape = given[0].shape
    spatial = [i for i in range(1, len(shape)) if i != channel_axis]
    dims = [0, *spatial] if over_samples else spatial
    point_sizes, point_strides = _merge(shape, [view.strides for view in given], dims)
    samples = 1 if over_samples else shape[0]
    tensors = [
        ChannelTensor(
            view.dtype,
            view.strides[0] if samples > 1 else 0,
            view.strides[channel_axis] if shape[channel_axis] > 1 else 0,
            strides,
            view.pointer % 16,
        )
        for view, strides in zip(given, point_strides)
    ]
    sizes = samples, shape[channel_axis], point_sizes
    return sizes, _placed(tensors, views)


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
