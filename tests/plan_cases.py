"""Problems and devices that plans are made for, in tests: drawn of every kind, or plain ones of any size.

They have no memory behind them, so sizes go up to what no machine holds.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume, event, settings
from hypothesis import strategies as st

from cunorm.plan import Device, Plan, channel, rows_of_channels
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.device import NO_UNEVEN_CLUSTERS
from cunorm.problem import (
    ACTIVATIONS,
    DTYPES,
    AnyProblem,
    BackwardProblem,
    ChannelBackward,
    ChannelForward,
    ChannelProblem,
    ChannelTensor,
    ForwardProblem,
    Matrix,
    Norm,
    PointwiseBackward,
    PointwiseForward,
    Problem,
    RunningStatistics,
    Vector,
)

# One of each architecture, as large as they come.
GPUS = {
    "sm_75": Device("sm_75", 40, 1024),
    "sm_80": Device("sm_80", 108, 2048),
    "sm_86": Device("sm_86", 84, 1536),
    "sm_89": Device("sm_89", 128, 1536),
    "sm_90": Device("sm_90", 132, 2048),
    "sm_100": Device("sm_100", 148, 2048),
    "sm_120": Device("sm_120", 170, 1536),
}
DEVICES = GPUS | {
    "H100": Device("sm_90", 132, 2048, memory_rate=21.8e3),
    "slower memory": Device("sm_89", 128, 1536, memory_rate=7e3),
    "few clusters": Device("sm_90", 2, 512, (1, 1, 0, 0), NO_UNEVEN_CLUSTERS),
    "no clusters": Device("sm_90", 2, 512, (0, 0, 0, 0), NO_UNEVEN_CLUSTERS),
    "smallest": Device("sm_75", 1, 1024),
}
MOST_BYTES = 2**38  # of one tensor; the largest GPUs of today hold less


# ---- Plain ones.


def plain_forward(
    rows: int, columns: int, dtype: str = "float32", eps: float = 1e-5, residual: bool = False
) -> ForwardProblem:
    x, vector = Matrix(dtype, (columns if rows > 1 else 0,), (1,)), Vector(dtype)
    added = x if residual else None
    return ForwardProblem((rows,), (columns,), x, added, x, added, vector, vector, True, eps)


def plain_backward(rows: int, columns: int, dtype: str = "float32") -> BackwardProblem:
    x = Matrix(dtype, (columns if rows > 1 else 0,), (1,))
    return BackwardProblem((rows,), (columns,), x, x, None, x, Vector(dtype), None, dtype, dtype)


def plain_gelu(columns: int) -> PointwiseForward:
    x = Matrix("float32", (0,), (1,))
    return PointwiseForward((1,), (columns,), x, x, None, "gelu")


def plain_gelu_backward(columns: int) -> PointwiseBackward:
    x = Matrix("float32", (0,), (1,))
    return PointwiseBackward((1,), (columns,), x, x, x, None, None, "gelu")


def plain_channels(samples: int, channels: int, points: int, dtype: str = "float32", offset: int = 0) -> ChannelTensor:
    """How an NC... tensor lies that is contiguous."""
    sample_stride, channel_stride = channels * points if samples > 1 else 0, points if channels > 1 else 0
    return ChannelTensor(dtype, sample_stride, channel_stride, (1 if points > 1 else 0,), offset)


def plain_channel_forward(
    samples: int, channels: int, together: int, points: int, dtype: str = "float32", activation: str | None = None
) -> ChannelForward:
    x, vector = plain_channels(samples, channels, points, dtype), Vector(dtype)
    return ChannelForward(samples, channels, (points,), together, x, x, vector, vector, True, 1e-5, activation)


def plain_channel_backward(
    samples: int, channels: int, together: int, points: int, dtype: str = "float32", activation: str | None = None
) -> ChannelBackward:
    x, vector = plain_channels(samples, channels, points, dtype), Vector(dtype)
    bias = vector if activation else None
    sizes = samples, channels, (points,), together
    return ChannelBackward(*sizes, x, x, x, vector, bias, dtype, dtype, activation)


def plain_channel_norm(
    shape: tuple[int, int, int],
    dtype: str = "float32",
    channels_per_set: int | None = 1,
    *,
    last: bool = False,
    activation: str | None = None,
) -> list[ChannelProblem]:
    """The norm of samples by channels by points and its gradients, with the channels ``last`` in memory or second.

    Without ``channels_per_set`` it is the batch norm of a training step, which updates running statistics.
    """
    samples, channels, points = shape
    over_samples = channels_per_set is None
    channel_stride, point_stride = (1, channels) if last else (points, 1)
    sample_stride = channels * points
    point_sizes, point_strides = (points,), (point_stride,)
    running = None
    if over_samples:
        vector = Vector("float32")
        running = RunningStatistics(vector, vector, False, 0.9, 0.1)
        if last:
            point_sizes = (samples * points,)
        else:
            point_sizes, point_strides = (samples, points), (sample_stride, point_stride)
        samples, sample_stride = 1, 0
    x = ChannelTensor(dtype, sample_stride, channel_stride, point_strides)
    sizes, weight = (samples, channels, point_sizes, channels_per_set or 1), Vector(dtype)
    bias = None if activation is None else weight
    return [
        ChannelForward(*sizes, x, x, weight, weight, True, 1e-5, activation, running),
        ChannelBackward(*sizes, x, x, x, weight, bias, dtype, dtype, activation),
    ]


def plan_of(geometry: Slab | Grid | ChannelPipeline, problem: ChannelProblem, device: Device = GPUS["sm_90"]) -> Plan:
    """The plan of a channel norm with slabs that lie so, whatever would be chosen."""
    return channel.plan_with(problem, device, geometry)


# ---- Those of every kind.


def _powers_up_to(largest: int) -> st.SearchStrategy[int]:
    """Sizes of every magnitude: powers of two, their neighbours, multiples of them, and anything."""

    def near(exponent: int, odd: int, change: int) -> int:
        return min(largest, max(1, odd * 2**exponent + change))

    bits = largest.bit_length() - 1
    magnitude = st.integers(0, bits).flatmap(lambda bit: st.integers(2**bit, min(largest, 2 ** (bit + 1))))
    return magnitude | st.builds(near, st.integers(0, bits), st.sampled_from([1, 3, 5]), st.sampled_from([0, 0, -1, 1]))


ROWS = _powers_up_to(50_000_000)
COLUMNS = _powers_up_to(10_000_000)
SMALL = st.sampled_from([2, 3, 4, 7, 8, 24, 32, 100])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Row sizes, column sizes, and the row and column strides of four tensors."""
    kind = draw(st.sampled_from(["plain", "row-strided", "one row", "column-strided", "first axis", "many dimensions"]))
    event(kind)
    rows, columns = (1 if kind == "one row" else draw(ROWS)), draw(COLUMNS)
    if draw(st.integers(0, 30)) == 0:
        rows = 0
    if draw(st.integers(0, 30)) == 0:
        columns = 0
    plain = (((columns,) if rows != 1 else (0,)), (1,) if columns != 1 else (0,))
    if kind in ("plain", "one row"):
        return (rows,), (columns,), [plain] * 4
    if kind == "first axis":
        return (rows,), (columns,), [((1,), (rows,))] * 4
    if kind == "many dimensions":
        row_sizes, column_sizes = (tuple(draw(st.lists(SMALL, min_size=1, max_size=3))) for _ in range(2))
        stride = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 1000, 1024, -1, -8])
        even = st.sampled_from([0, 8, 1024, 1024, 1024, 1026, 1025])
        along_rows = draw(st.booleans())  # vectors of contiguous columns, if all else is even

        def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
            last = 1 if along_rows and sizes is column_sizes else draw(even if along_rows else stride)
            return (*(draw(even if along_rows else stride) for _ in sizes[1:]), last)

        if along_rows:
            column_sizes = (*column_sizes[1:], draw(st.sampled_from([8, 24, 64, 64, 100, 7])))
        return row_sizes, column_sizes, [(strides(row_sizes), strides(column_sizes)) for _ in range(4)]
    step = draw(st.sampled_from([-1, 0, 2, 3])) if kind == "column-strided" else 1
    spread = [((columns * abs(step) + draw(st.sampled_from([0, 1, 2, 4, 8])),), (step,)), plain, plain, plain]
    return (rows,), (columns,), draw(st.permutations(spread))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layouts, dtypes, alignments and options of every kind, forward and backward."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    itemsize = DTYPES[dtype].itemsize
    row_sizes, column_sizes, strides = draw(shapes())
    assume(math.prod(row_sizes) * math.prod(column_sizes) * itemsize <= MOST_BYTES)

    def alignment(size: int) -> int:
        return draw(st.sampled_from([a for a in (16, 16, 8, 4, 2) if a >= size]))

    # Tensors that are all aligned, or all unaligned in the same way, are the usual; then those with aligned results.
    offsets = st.integers(0, 15).map(lambda offset: offset // itemsize * itemsize)
    same, written = draw(st.sampled_from([(None, None), (None, 0), (None, 0), (0, 0), (0, 0), (itemsize, itemsize)]))
    matrices = [
        Matrix(dtype, rows, columns, draw(offsets) if fixed is None else fixed)
        for (rows, columns), fixed in zip(strides, (same, same, written, written))
    ]
    activation = draw(st.sampled_from([None, None, *ACTIVATIONS]))
    norm = Norm(draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 1.0])), activation)
    more = draw(st.booleans())

    def vector() -> Vector | None:
        name = draw(st.sampled_from([None, dtype, *DTYPES]))
        return name and Vector(name, alignment(DTYPES[name].itemsize) % 16)

    weight, bias = vector(), vector()
    if draw(st.booleans()):
        x, residual, y, residual_out = matrices
        sums = (residual, residual_out) if more else (None, None)
        stats = draw(st.booleans())
        return ForwardProblem(row_sizes, column_sizes, x, sums[0], y, sums[1], weight, bias, stats, 1e-5, norm)
    wanted = st.sampled_from([None, dtype, "float32", "float64"])
    x, dy, gradient, added = matrices
    dx = draw(st.sampled_from([None, gradient, gradient]))
    dresidual_out = added if more and dx is not None else None
    bias = None if activation is None else bias
    gradients = draw(wanted), draw(wanted)
    return BackwardProblem(row_sizes, column_sizes, x, dy, dresidual_out, dx, weight, bias, *gradients, norm)


@st.composite
def contiguous_channel_problems(draw: st.DrawFn) -> ChannelProblem:
    """Instance norm and group norm of contiguous NC... tensors of every size, dtype and alignment."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    itemsize = DTYPES[dtype].itemsize
    samples, points = draw(_powers_up_to(5000)), draw(_powers_up_to(4_000_000))
    sets, together = draw(_powers_up_to(1000)), draw(st.just(1) | _powers_up_to(100))
    channels = sets * together
    assume(samples * channels * points * itemsize <= MOST_BYTES)

    def alignment(size: int) -> int:
        return draw(st.sampled_from([a for a in (16, 16, 8, 4, 2) if a >= size]))

    same = draw(st.sampled_from([None, 0, 0, itemsize]))
    tensors = [
        plain_channels(samples, channels, points, dtype, alignment(itemsize) % 16 if same is None else same)
        for _ in range(3)
    ]

    def vector() -> Vector | None:
        name = draw(st.sampled_from([None, dtype, dtype, *DTYPES]))
        return name and Vector(name, alignment(DTYPES[name].itemsize) % 16)

    activation, weight, bias = draw(st.sampled_from([None, None, *ACTIVATIONS])), vector(), vector()
    sizes = samples, channels, (points,), together
    if draw(st.booleans()):
        x, y, _ = tensors
        return ChannelForward(*sizes, x, y, weight, bias, draw(st.booleans()), 1e-5, activation)
    dy, x, gradient = tensors
    dx = draw(st.sampled_from([None, gradient, gradient]))
    bias = None if activation is None else bias
    wanted = st.sampled_from([None, dtype, "float32", "float64"])
    return ChannelBackward(*sizes, dy, x, dx, weight, bias, draw(wanted), draw(wanted), activation)


@st.composite
def channel_problems(draw: st.DrawFn) -> ChannelProblem:
    """Instance, group and batch norms of every size, forward and backward, whose tensors lie in any way."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    itemsize = DTYPES[dtype].itemsize
    over_samples = draw(st.booleans())
    channels_per_set = 1 if over_samples else draw(st.sampled_from([1, 1, 2, 3, 4, 8, 10, 16, 40, 65]))
    channels = channels_per_set * draw(_powers_up_to(10_000) | st.sampled_from([1, 3, 32, 64, 320]))
    samples = 1 if over_samples else draw(st.sampled_from([1, 2, 8, 64, 1000]))
    point_sizes = tuple(draw(st.lists(SMALL, min_size=1, max_size=3))) if draw(st.booleans()) else (draw(COLUMNS),)
    if draw(st.integers(0, 30)) == 0:
        point_sizes = (0,)
    if draw(st.integers(0, 30)) == 0 and not over_samples:
        samples = 0
    points = math.prod(point_sizes)
    assume(samples * channels * points * itemsize <= MOST_BYTES)

    def tensor(last: bool) -> ChannelTensor:
        # A gap of as many elements, which vectors of as many go on being aligned behind.
        gap = draw(st.sampled_from([0, 0, 0, 8, 1]))
        step = channels + gap if last else 1
        strides = tuple(step * math.prod(point_sizes[i + 1 :]) for i in range(len(point_sizes)))
        if over_samples and not last and len(point_sizes) > 1:
            # The first dimension are the samples.
            strides = (channels * math.prod(point_sizes[1:]) + gap, *strides[1:])
        if points == 1:
            strides = (0,) * len(point_sizes)
        elif draw(st.integers(0, 10)) == 0:
            strides = tuple(2 * stride for stride in strides)
        sample_stride = channels * points + gap if samples > 1 else 0
        channel_stride = 0 if channels == 1 else 1 if last else points + gap
        if over_samples and not last and len(point_sizes) > 1:
            channel_stride = min(channel_stride, math.prod(point_sizes[1:]))
        offset = draw(st.sampled_from([0, 0, 0, itemsize]))
        return ChannelTensor(dtype, sample_stride, channel_stride, strides, offset)

    def vector() -> Vector | None:
        name = draw(st.sampled_from([None, dtype, dtype, *DTYPES]))
        return name and Vector(name, draw(st.sampled_from([0, DTYPES[name].itemsize])))

    last = draw(st.booleans())
    x, other, third = tensor(last), tensor(draw(st.sampled_from([last, last, not last]))), tensor(last)
    sizes = (samples, channels, point_sizes, channels_per_set)
    activation, weight, bias = draw(st.sampled_from([None, None, *ACTIVATIONS])), vector(), vector()
    if draw(st.booleans()):
        running, stats = None, draw(st.booleans())
        if over_samples and draw(st.booleans()):
            given, mean, variance = draw(st.booleans()), Vector("float32"), Vector(dtype)
            running = RunningStatistics(mean, variance, given, 0.9, 0.1, draw(st.booleans()))
        elif over_samples and draw(st.integers(0, 3)) == 0:
            return ChannelForward(*sizes, x, None, None, None, True, 0.0)
        return ChannelForward(*sizes, x, third, weight, bias, stats, 1e-5, activation, running)
    wanted = st.sampled_from([None, dtype, "float32"])
    dx = draw(st.sampled_from([None, third, third]))
    bias = None if activation is None else bias
    given = over_samples and draw(st.booleans())
    return ChannelBackward(*sizes, other, x, dx, weight, bias, draw(wanted), draw(wanted), activation, given)


devices = st.sampled_from(list(DEVICES.values()))
many = settings(max_examples=400, deadline=None)
very_many = settings(max_examples=1500, deadline=None)


def plan_rows(problem: ChannelProblem, device: Device) -> Plan | None:
    """By the kernels of rows, whatever else is faster; None where they cannot."""
    way = rows_of_channels.way_of(problem, device)
    return None if way is None else rows_of_channels.plan_with(problem, device, way)


def plan_batch(problem: ChannelProblem, device: Device) -> Plan | None:
    """By the pipeline of rows for those of a batch norm; None where they cannot be held so."""
    found = rows_of_channels.pipeline(problem, device)
    return None if found is None else rows_of_channels.plan_with(problem, device, found[1])


# ---- For the rules that plans keep.

Constants = dict[str, Any]


def compute_bytes(problem: AnyProblem) -> int:
    """The bytes of a number that sums are kept in."""
    return DTYPES[DTYPES[problem.x.dtype].compute].itemsize


def some(count: int) -> set[int]:
    """Numbers below this, at both ends and in the middle."""
    return {number for number in (0, 1, 2, 3, 5, 7, count // 2, count - 2, count - 1) if 0 <= number < count}
