"""What is computed, in canonical form. Axes end here: from here on a tensor is a matrix of rows by columns.

The kept dimensions of a tensor are its rows, the normalized ones its columns, each in C order, so that row r is the
r-th element of the mean and column c the c-th of the weight. Dimensions that lie behind each other in memory in every
tensor of the call are merged; most problems come down to one row and one column dimension. Nothing is ever transposed
or copied: what cannot be merged is left as several sizes and strides, and the plan picks a kernel that can follow them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "GELUS",
    "AnyProblem",
    "BackwardProblem",
    "ChannelBackward",
    "ChannelForward",
    "ChannelProblem",
    "ChannelTensor",
    "Channels",
    "Dtype",
    "ForwardProblem",
    "Matrix",
    "Norm",
    "PointwiseBackward",
    "PointwiseForward",
    "PointwiseProblem",
    "Problem",
    "RunningStatistics",
    "Vector",
    "View",
    "contiguous_strides",
]

# gelu is the exact one, x * Phi(x); gelu_tanh its approximation.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
GELUS = ("gelu", "gelu_tanh")


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
    """A contiguous weight or bias: one number a column. ``offset`` and ``alignment`` are as a Matrix has them."""

    dtype: str
    offset: int = 0

    @property
    def alignment(self) -> int:
        return _alignment(self.offset)


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


class _Problem:
    x: Matrix | ChannelTensor  # a subclass's field, as are those below

    @property
    def itemsize(self) -> int:
        """The bytes of a number of x, and of every tensor that is like it."""
        return DTYPES[self.x.dtype].itemsize


class _Gradients:
    """What is wanted of dx, dweight and dbias; of the sums a dtype."""

    dx: Matrix | ChannelTensor | None
    dweight: str | None
    dbias: str | None

    @property
    def sums(self) -> dict[str, str]:
        """dweight and dbias, those that are wanted, with their dtypes."""
        return {name: dtype for name, dtype in (("dweight", self.dweight), ("dbias", self.dbias)) if dtype is not None}

    @property
    def wants_nothing(self) -> bool:
        return self.dx is None and not self.sums


@dataclass(frozen=True)
class _RowProblem(_Problem):
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


class _RowNormProblem(_RowProblem):
    weight: Vector | None
    bias: Vector | None
    channels: Channels | None

    @property
    def parameters(self) -> tuple[Vector, ...]:
        """The weight and the bias, if they are there."""
        return _present(self.weight, self.bias)

    @property
    def is_bare(self) -> bool:
        """Whether nothing is by column or by channel: no weight and no bias, and no sums are wanted."""
        return not self.parameters

    @property
    def is_by_channel(self) -> bool:
        """Whether kernels are to know of channels: of several to a row, or of what one has.

        Several may be bare: but without them 8 x 320 x 64^2 float16 numbers in 32 groups under silu would spill.
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
        return _present(self.x, self.residual)

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return _present(self.y, self.residual_out)

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
        rows, columns, (of_x, of_residual, of_y, of_sum) = _matrices((x, residual, y, residual_out), axis)
        vectors = _vector(weight), _vector(bias)
        return ForwardProblem(rows, columns, of_x, of_residual, of_y, of_sum, *vectors, stats, eps, norm)


@dataclass(frozen=True)
class BackwardProblem(_RowNormProblem, _Gradients):
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
        return _present(self.x, self.dy, self.dresidual_out)

    @property
    def matrices_written(self) -> tuple[Matrix, ...]:
        return _present(self.dx)

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
        rows, columns, (of_x, of_dy, of_sum, of_dx) = _matrices((x, dy, dresidual_out, dx), axis)
        vectors = _vector(weight), _vector(bias)
        return BackwardProblem(rows, columns, of_x, of_dy, of_sum, of_dx, *vectors, dweight, dbias, norm)


Problem = ForwardProblem | BackwardProblem


@dataclass(frozen=True)
class PointwiseForward(_RowProblem):
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
        rows, columns, (of_x, of_y) = _pointwise_matrices((x, y), bias)
        return PointwiseForward(rows, columns, of_x, of_y, _vector(bias), activation)


@dataclass(frozen=True)
class PointwiseBackward(_RowProblem):
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
        return _present(self.dx)

    @staticmethod
    def of(
        dy: View, x: View, bias: View | None, dx: View | None, *, dbias: str | None, activation: str
    ) -> PointwiseBackward:
        rows, columns, (of_dy, of_x, of_dx) = _pointwise_matrices((dy, x, dx), bias)
        return PointwiseBackward(rows, columns, of_dy, of_x, of_dx, _vector(bias), dbias, activation)


PointwiseProblem = PointwiseForward | PointwiseBackward


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


@dataclass(frozen=True)
class RunningStatistics:
    """The running mean and variance of a batch norm: its statistics, or what it updates with them.

    An update is ``running = kept * running + taken * new``, the new variance ``unbiased`` or not. Where the running
    statistics are ``given``, nothing is updated.
    """

    mean: Vector
    variance: Vector
    given: bool
    kept: float = 0.0
    taken: float = 0.0
    unbiased: bool = True

    @staticmethod
    def of(
        mean: View, variance: View, *, given: bool, kept: float = 0.0, taken: float = 0.0, unbiased: bool = True
    ) -> RunningStatistics:
        of_mean, of_variance = (Vector(view.dtype, view.pointer % 16) for view in (mean, variance))
        return RunningStatistics(of_mean, of_variance, given, kept, taken, unbiased)


@dataclass(frozen=True)
class _ChannelProblem(_Problem):
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
    def tensors(self) -> tuple[ChannelTensor, ...]:
        return _present(self.x, self.y)

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
        sizes, (of_x, of_y) = _channel_tensors((x, y), channel_axis, over_samples)
        vectors = _vector(weight), _vector(bias)
        return ChannelForward(*sizes, channels_per_set, of_x, of_y, *vectors, stats, eps, activation, running)


@dataclass(frozen=True)
class ChannelBackward(_ChannelProblem, _Gradients):
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
        return _present(self.dy, self.x, self.dx)

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
        sizes, (of_dy, of_x, of_dx) = _channel_tensors((dy, x, dx), channel_axis, over_samples)
        vectors = _vector(weight), None if activation is None else _vector(bias)
        return ChannelBackward(
            *sizes, channels_per_set, of_dy, of_x, of_dx, *vectors, dweight, dbias, activation, given
        )


ChannelProblem = ChannelForward | ChannelBackward
AnyProblem = Problem | PointwiseProblem | ChannelProblem


_T = TypeVar("_T")


def _present(*items: _T | None) -> tuple[_T, ...]:
    return tuple(item for item in items if item is not None)


def _placed(items: Iterable[Any], views: Sequence[View | None]) -> list[Any]:
    """The items, one for each view that is there, in the places of these; None for None."""
    rest = iter(items)
    return [None if view is None else next(rest) for view in views]


def _alignment(offset: int) -> int:
    return min(16, offset & -offset) if offset else 16


def _vector(view: View | None) -> Vector | None:
    return None if view is None else Vector(view.dtype, view.pointer % 16)


def _matrices(views: tuple[View | None, ...], axis: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """The sizes of rows and of columns, and a Matrix for each view (None for None)."""
    present = [view for view in views if view is not None]
    shape = present[0].shape
    kept = [i for i in range(len(shape)) if i not in axis]
    row_sizes, row_strides = _merge(shape, [view.strides for view in present], kept)
    column_sizes, column_strides = _merge(shape, [view.strides for view in present], axis)
    matrices = [
        Matrix(view.dtype, row_strides[i], column_strides[i], view.pointer % 16) for i, view in enumerate(present)
    ]
    return row_sizes, column_sizes, _placed(matrices, views)


def _pointwise_matrices(
    views: tuple[View | None, ...], bias: View | None
) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """As `_matrices`, with the last axis for columns, or without a bias the last of all axes merged."""
    present = [view for view in views if view is not None]
    dimensions = len(present[0].shape)
    if bias is not None:
        return _matrices(views, (dimensions - 1,))
    sizes, strides = _merge(present[0].shape, [view.strides for view in present], range(dimensions))
    matrices = [
        Matrix(view.dtype, of_view[:-1] or (0,), of_view[-1:], view.pointer % 16)
        for view, of_view in zip(present, strides)
    ]
    return sizes[:-1] or (1,), sizes[-1:], _placed(matrices, views)


def _channel_tensors(
    views: tuple[View | None, ...], channel_axis: int, over_samples: bool
) -> tuple[tuple[int, int, tuple[int, ...]], list[Any]]:
    """Samples, channels and point sizes; and a ChannelTensor for each view (None for None)."""
    present = [view for view in views if view is not None]
    shape = present[0].shape
    spatial = [i for i in range(1, len(shape)) if i != channel_axis]
    dims = [0, *spatial] if over_samples else spatial
    point_sizes, point_strides = _merge(shape, [view.strides for view in present], dims)
    samples = 1 if over_samples else shape[0]
    tensors = [
        ChannelTensor(
            view.dtype,
            view.strides[0] if samples > 1 else 0,
            view.strides[channel_axis] if shape[channel_axis] > 1 else 0,
            strides,
            view.pointer % 16,
        )
        for view, strides in zip(present, point_strides)
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
