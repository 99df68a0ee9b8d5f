"""What instance norm and group norm of contiguous tensors compute by the kernels of rows, on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import (
    EPS,
    NORM_TOLERANCE,
    OLD_DEVICE,
    SMALL_DEVICE,
    Array,
    assert_rounded_once,
    assert_sums,
    data,
    float64,
    poisoned,
    relative_error,
    view_of,
)
from plan_cases import (
    plan_rows,
)

from cunorm import reference
from cunorm.plan import Plan, RowBlock, rows_of_channels
from cunorm.plan.row_grid import RowGrid
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.rows import RowWay
from cunorm.problem import (
    ACTIVATIONS,
    DTYPES,
    ChannelBackward,
    ChannelForward,
    ChannelProblem,
)
from cunorm.reference import activations

Choice = Callable[[ChannelProblem], Plan | None]
ALL = (True, True, True)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of x, samples by channels by points, over ``together`` consecutive channels and all points."""

    x: Array
    together: int
    weight: Array | None
    bias: Array | None
    activation: str | None = None

    @property
    def statistics_shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1] // self.together

    def rows(self, array: Array) -> Array:
        return array.reshape(*self.statistics_shape, -1)

    def by_channel(self, vector: Array | None, absent: float) -> Any:
        """A weight or bias that x can be multiplied with."""
        return absent if vector is None else float64(vector)[:, None]

    def expected(self) -> tuple[Array, Array, Array, Array, Array]:
        """y, mean, rstd; what the activation is taken of; and xhat."""
        xhat, _, mean, rstd = reference.row_norm(self.rows(float64(self.x)), axis=(2,), eps=EPS)
        xhat = xhat.reshape(self.x.shape)
        z = xhat * self.by_channel(self.weight, 1) + self.by_channel(self.bias, 0)
        y = z if self.activation is None else activations.FUNCTIONS[self.activation].value(z)
        return y, mean, rstd, z, xhat

    def expected_gradients(self, dy: Array) -> tuple[Array, Array, Array]:
        """dx; and, for each number, what it has of dweight and dbias."""
        _, mean, rstd, z, xhat = self.expected()
        dz = float64(dy)
        if self.activation is not None:
            dz = dz * activations.FUNCTIONS[self.activation].derivative(z)
        g = dz * self.by_channel(self.weight, 1)
        x = self.rows(float64(self.x))
        dx, _, _ = reference.row_norm_backward(self.rows(g), x, None, mean, rstd, axis=(2,))
        assert dx is not None
        return dx.reshape(z.shape), dz * xhat, dz


def norm_of(
    samples: int,
    channels: int,
    together: int,
    points: int,
    dtype: str,
    activation: str | None = None,
    weight: str | None = "x's",
    bias: str | None = "x's",
    **options: Any,
) -> Norm:
    x = data(0, (samples, channels, points), dtype, **options)
    vectors = [
        None if kind is None else data(seed, (channels,), dtype if kind == "x's" else kind, shift, outliers=False)
        for seed, kind, shift in ((1, weight, 1.0), (2, bias, 0.3))
    ]
    return Norm(x, together, *vectors, activation)


def forward_problem(norm: Norm, y: Array) -> ChannelForward:
    return ChannelForward.of(
        view_of(norm.x), view_of(norm.weight), view_of(norm.bias), view_of(y), channel_axis=1,  # type: ignore[arg-type]
        channels_per_set=norm.together, over_samples=False, eps=EPS, stats=True, activation=norm.activation,
    )  # fmt: skip


def backward_problem(norm: Norm, dy: Array, mask: tuple[bool, bool, bool] = ALL) -> ChannelBackward:
    kinds = [
        (norm.x if vector is None else vector).dtype.name if wanted else None
        for vector, wanted in zip((norm.weight, norm.bias), mask[1:])
    ]
    return ChannelBackward.of(
        view_of(dy), view_of(norm.x), view_of(norm.weight), view_of(norm.bias),  # type: ignore[arg-type]
        view_of(dy) if mask[0] else None, channel_axis=1, channels_per_set=norm.together, over_samples=False,
        dweight=kinds[0], dbias=kinds[1], activation=norm.activation,
    )  # fmt: skip


# ---- How they are computed.


@functools.cache
def planned(problem: ChannelProblem, old: bool = False) -> Plan | None:
    """The plan for a small device."""
    return plan_rows(problem, OLD_DEVICE if old else SMALL_DEVICE)


def planned_for_ampere(problem: ChannelProblem) -> Plan | None:
    """The plan for as small a device, where rows of one channel lie as others do."""
    return plan_rows(problem, replace(SMALL_DEVICE, arch="sm_80", clusters=(0, 0, 0, 0)))


def laid_out(geometry: RowWay) -> Choice:
    """Plans with a geometry: what is cut into parts for many blocks, small enough for few threads."""

    def choose(problem: ChannelProblem) -> Plan:
        return rows_of_channels.plan_with(problem, SMALL_DEVICE, geometry)

    return choose


def run(chosen: Plan | None, operands: dict[str, Array | None], seed: int) -> None:
    from cunorm.emulator import plans

    assert chosen is not None
    plans.run_plan(chosen, operands, seed)


def forward(norm: Norm, choose: Choice = planned, seed: int = 0, y: Array | None = None) -> tuple[Array, ...]:
    """y, mean and rstd."""
    dtype = norm.x.dtype.name
    y = poisoned(norm.x.shape, dtype) if y is None else y
    sums = "float64" if dtype == "float64" else "float32"
    mean, rstd = poisoned(norm.statistics_shape, sums), poisoned(norm.statistics_shape, sums)
    operands = {"x": norm.x, "weight": norm.weight, "bias": norm.bias, "residual": None, "residual_out": None}
    run(choose(forward_problem(norm, y)), operands | {"y": y, "mean": mean, "rstd": rstd}, seed)
    return y, mean, rstd


def backward(
    norm: Norm, dy: Array, choose: Choice = planned, mask: tuple[bool, bool, bool] = ALL, seed: int = 0
) -> tuple[Array | None, ...]:
    """dx, dweight and dbias, or None, from the exact statistics as they are rounded."""
    problem = backward_problem(norm, dy, mask)
    sums = np.float64 if norm.x.dtype == np.float64 else np.float32
    _, mean, rstd, _, _ = norm.expected()
    dx = poisoned(norm.x.shape, norm.x.dtype.name) if mask[0] else None
    dweight, dbias = (
        None if kind is None else poisoned(norm.x.shape[1:2], kind) for kind in (problem.dweight, problem.dbias)
    )
    operands = {"dy": dy, "x": norm.x, "weight": norm.weight, "bias": norm.bias if norm.activation else None}
    operands |= {"mean": mean.astype(sums), "rstd": rstd.astype(sums), "dresidual_out": None}
    run(choose(problem), operands | {"dx": dx, "dweight": dweight, "dbias": dbias}, seed)
    return dx, dweight, dbias


def check_forward(norm: Norm, choose: Choice = planned) -> None:
    before, dtype = norm.x.copy(), norm.x.dtype.name
    y, mean, rstd = forward(norm, choose)
    assert norm.x.tobytes() == before.tobytes(), "x was modified"
    expected_y, expected_mean, expected_rstd, z, _ = norm.expected()
    if dtype in ("float16", "bfloat16"):
        assert_rounded_once(y, expected_y, dtype, z)
    else:
        size = np.abs(z) + (0 if norm.bias is None else np.abs(float64(norm.bias)).max())
        tolerance = {"float32": 1.5e-7, "float64": 1e-15}[dtype] * (1 if norm.activation is None else 2)
        assert relative_error(y, expected_y, size) <= tolerance
    tolerance = 1e-14 if dtype == "float64" else 3e-7
    assert np.all(np.abs(mean - expected_mean) <= tolerance * (np.abs(expected_mean) + 1 / expected_rstd))
    assert np.all(np.abs(rstd - expected_rstd) <= tolerance * expected_rstd)


def check_backward(norm: Norm, choose: Choice = planned, dy: Array | None = None) -> None:
    dtype = norm.x.dtype.name
    dy = data(17, norm.x.shape, dtype, shift=0.1) if dy is None else dy
    before = norm.x.copy(), dy.copy()
    dx, dweight, dbias = backward(norm, dy, choose)
    assert dx is not None and dweight is not None and dbias is not None
    assert norm.x.tobytes() == before[0].tobytes() and dy.tobytes() == before[1].tobytes(), "an input was modified"
    assert_dx(norm, dy, dx)
    _, dweight_terms, dbias_terms = norm.expected_gradients(dy)
    _, _, _, _, xhat = norm.expected()
    assert_sums(dbias, dbias_terms.sum(axis=(0, 2)), float64(dy), (1,), dtype)
    sizes = float64(dy) * np.maximum(1, np.abs(xhat))
    assert_sums(dweight, dweight_terms.sum(axis=(0, 2)), sizes, (1,), dtype)


def assert_dx(norm: Norm, dy: Array, dx: Array) -> None:
    expected_dx, _, _ = norm.expected_gradients(dy)
    # It is a difference of terms of this size; with few numbers a row it is much smaller than they are.
    weight_size = 1.0 if norm.weight is None else np.abs(float64(norm.weight)).max()
    _, _, rstd, _, _ = norm.expected()
    size = norm.rows(np.abs(float64(dy)) * weight_size) * rstd[:, :, None]
    assert relative_error(dx, expected_dx, size) <= NORM_TOLERANCE[norm.x.dtype.name]


def check(norm: Norm, choose: Choice = planned) -> None:
    check_forward(norm, choose)
    check_backward(norm, choose)


# ---- Rows of one channel, and of several.

# Samples, channels, how many of them a row has, points of each; and the dtype. Tiny rows and long ones, odd ones, and
# so many that blocks take several turns.
ONE_CHANNEL = [
    (5, 3, 1, 1, "float32"), (130, 3, 1, 9, "float32"), (3, 4, 1, 64, "float16"), (33, 3, 1, 100, "bfloat16"),
    (7, 5, 1, 257, "float32"), (3, 2, 1, 1000, "float64"), (40, 3, 1, 1024, "bfloat16"), (2, 3, 1, 4097, "float16"),
    (1, 4, 1, 8192, "float32"),
]  # fmt: skip
SEVERAL_CHANNELS = [
    (2, 4, 2, 1, "float32"), (2, 4, 4, 3, "float32"), (9, 6, 3, 7, "bfloat16"), (2, 8, 4, 49, "float16"),
    (2, 4, 2, 12, "float32"), (130, 4, 2, 5, "float32"), (3, 16, 8, 16, "bfloat16"), (40, 8, 4, 64, "float32"),
    (3, 40, 20, 32, "float16"), (2, 6, 3, 1000, "float64"), (1, 4, 2, 4096, "float32"), (9, 4, 4, 2048, "bfloat16"),
    (3, 16, 8, 49, "float16"), (40, 8, 4, 9, "float32"), (70, 32, 16, 9, "bfloat16"), (2, 4, 4, 1501, "float32"),
    (2, 4, 2, 33, "float64"), (1, 24, 24, 257, "float16"), (130, 64, 32, 8, "float16"), (50, 8, 8, 13, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("sizes", ONE_CHANNEL + SEVERAL_CHANNELS, ids=str)
def test_rows_of_every_size(sizes: tuple[Any, ...]) -> None:
    check(norm_of(*sizes))


@pytest.mark.parametrize("sizes", ONE_CHANNEL, ids=str)
def test_rows_of_one_channel_like_others(sizes: tuple[Any, ...]) -> None:
    check(norm_of(*sizes), planned_for_ampere)


@pytest.mark.parametrize("sizes", [(1, 6, 6, 5001, "float32"), (2, 2, 2, 5001, "float16")], ids=str)
def test_channels_that_begin_within_vectors_of_long_rows(sizes: tuple[Any, ...]) -> None:
    """Forward they are peeled, and every number finds its weight; backward no block holds them number by number."""
    norm = norm_of(*sizes)
    check_forward(norm)
    assert planned(backward_problem(norm, norm.x)) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(3, 2, 1, 100, "float32"), (3, 6, 3, 40, "bfloat16")], ids=str)
def test_activations(sizes: tuple[Any, ...], activation: str) -> None:
    check(norm_of(*sizes, activation))


@pytest.mark.parametrize(("weight", "bias"), [("float32", None), (None, "float64"), ("float64", "float16")])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 96, "float16"), (3, 6, 3, 32, "float16")], ids=str)
def test_weight_and_bias_are_optional_and_of_any_dtype(
    sizes: tuple[Any, ...], weight: str | None, bias: str | None
) -> None:
    check(norm_of(*sizes, "silu", weight, bias))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 4, 1, 64, "float16"), (33, 3, 1, 100, "bfloat16"), (7, 5, 1, 257, "float32"), (2, 8, 4, 49, "float16")],
    ids=str,
)
def test_without_weights_and_sums(sizes: tuple[Any, ...], activation: str | None) -> None:
    norm, dy = norm_of(*sizes, activation, None, None), data(17, sizes[:2] + sizes[3:4], sizes[4], shift=0.1)
    check_forward(norm)
    dx, _, _ = backward(norm, dy, mask=(True, False, False))
    assert dx is not None
    assert_dx(norm, dy, dx)


@pytest.mark.parametrize("sizes", [(400, 3, 1, 25, "float16"), (400, 3, 1, 17, "float32")], ids=str)
def test_many_short_rows_come_as_a_run(sizes: tuple[Any, ...]) -> None:
    norm = norm_of(*sizes)
    chosen = planned(forward_problem(norm, norm.x))
    assert chosen is not None and dict(chosen.launches[0].constants)["STAGE"] == "run"
    check(norm)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 200), (3, 6, 3, 48), (3, 4, 2, 4)], ids=str)
def test_only_the_gradients_asked_for(sizes: tuple[Any, ...], mask: tuple[bool, bool, bool]) -> None:
    norm, dy = norm_of(*sizes, "float32"), data(1, sizes[:2] + sizes[3:4])
    for wanted, one, other in zip(mask, backward(norm, dy, mask=mask), backward(norm, dy)):
        assert (one is not None) == wanted
        assert one is None or (other is not None and relative_error(one, float64(other)) <= 1e-7)


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1000, "float32"), (2, 8, 4, 100, "float32")], ids=str)
def test_rows_far_from_zero(sizes: tuple[Any, ...]) -> None:
    """|mean| / std = 10,000 in float32: the mean's own rounding would show at 3e-4."""
    norm = norm_of(*sizes, shift=1e4, outliers=False)
    y, _, rstd = forward(norm)
    expected_y, _, expected_rstd, _, _ = norm.expected()
    assert relative_error(y, expected_y) < 1e-6
    assert relative_error(rstd, expected_rstd) < 1e-6


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("offset", [1, 4])
def test_views_are_not_copied(offset: int, together: int) -> None:
    """Tensors that begin elsewhere, each in its own way, and weights and biases too."""
    shape, plain = (3, 3, 200), norm_of(3, 3, together, 200, "float16")
    long, other = data(3, (offset + 1800,), "float16"), data(4, (offset + 1807,), "float16")
    weight, bias = data(1, (4,), "float16", shift=1.0)[1:], data(2, (6,), "float16")[3:]
    norm = replace(plain, x=long[offset:].reshape(shape), weight=weight, bias=bias)
    check_forward(norm)
    check_backward(norm, dy=other[offset + 7 :].reshape(shape))


def test_samples_that_lie_apart() -> None:
    """A row a sample: those are evenly spaced, whatever lies between."""
    norm = replace(norm_of(3, 4, 4, 24, "float32"), x=data(3, (6, 4, 24))[::2])
    check(norm)


@pytest.mark.parametrize("sizes", [(2, 3, 1, 1003, "bfloat16"), (9, 6, 3, 64, "float16")], ids=str)
def test_rows_on_an_older_gpu(sizes: tuple[Any, ...]) -> None:
    check(norm_of(*sizes, "gelu"), functools.partial(planned, old=True))


@pytest.mark.parametrize("together", [1, 2])
def test_y_may_be_written_over_x(together: int) -> None:
    norm = norm_of(3, 4, together, 64, "bfloat16")
    expected, _, _ = forward(norm)
    inplace = replace(norm, x=norm.x.copy())
    y, _, _ = forward(inplace, y=inplace.x)
    assert y.tobytes() == expected.tobytes()


# ---- Rows that several blocks share.

# By how their channels lie over two or four blocks of 64 threads with vectors of 16 bytes.
SHARED = {
    "one channel": ((3, 2, 1, 1600, "float32"), RowBlock(4, 2, 64, 1, 4)),
    "one channel, odd": ((3, 2, 1, 1603, "float32"), RowBlock(4, 2, 64, 1, 4, "ahead", True, "late", 1)),
    # In turns over rows that begin in different ways, which backward no thread keeps anything of.
    "one channel, odd, directly": ((5, 2, 1, 1603, "float16"), RowBlock(8, 1, 64, 1, 4, "direct", True, "late", 1)),
    "one channel of one sample": ((1, 2, 1, 1600, "bfloat16"), RowBlock(8, 2, 64, 1, 2)),
    "a block a channel": ((3, 4, 2, 400, "float32"), RowBlock(4, 2, 64, 1, 2, "ahead", False, "late", 1)),
    "two blocks a channel": ((3, 4, 2, 800, "float32"), RowBlock(4, 2, 64, 1, 4)),
    "two channels a block": ((5, 4, 4, 256, "float32"), RowBlock(4, 2, 64, 1, 2, "ahead", False, "late", 1)),
    "fewer in the last block": ((3, 5, 5, 160, "bfloat16"), RowBlock(8, 1, 64, 1, 2)),
    "several channels a block, within vectors": ((3, 8, 8, 50, "float32"), RowBlock(4, 1, 64, 1, 2, "ahead")),
    "within vectors, fewer in the last block": ((3, 14, 14, 50, "float32"), RowBlock(4, 1, 64, 1, 4)),
}


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kind", SHARED)
def test_rows_that_blocks_share(kind: str, activation: str | None) -> None:
    sizes, geometry = SHARED[kind]
    check(norm_of(*sizes, activation), laid_out(geometry))


# ---- Weights of several channels that are staged.

STAGED = {
    "directly": ((5, 8, 4, 200, "float32"), RowBlock(4, 4, 64, weights="staged")),
    "ahead": (
        (9, 12, 4, 96, "float16"),
        RowBlock(8, 1, 64, 1, 1, "ahead", weights="staged", blocks_per_multiprocessor=1),
    ),
    "two rows a block": (
        (9, 8, 4, 128, "bfloat16"),
        RowBlock(8, 1, 64, 2, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=2),
    ),
    "shared": (
        (5, 8, 4, 128, "float32"),
        RowBlock(4, 1, 64, 1, 2, "ahead", weights="staged", blocks_per_multiprocessor=1),
    ),
    "double": ((3, 6, 3, 64, "float64"), RowBlock(2, 2, 64, weights="staged")),
    "within vectors": ((3, 8, 4, 49, "float32"), RowBlock(4, 1, 64, weights="staged")),
    "within vectors, ahead": (
        (9, 24, 8, 33, "float16"),
        RowBlock(8, 1, 64, 2, 1, "ahead", weights="staged", blocks_per_multiprocessor=1, rows_ahead=2),
    ),
}
# Whose channels begin within a block's part, or within a vector.
STAGED_FORWARD = {
    "shared within a channel": ((3, 6, 3, 160, "float32"), RowBlock(4, 1, 64, 1, 2, weights="staged")),
    "peeled": ((3, 6, 3, 101, "float16"), RowBlock(8, 1, 64, 1, 1, "ahead", True, "staged", 1)),
}


@pytest.mark.parametrize(("weight", "bias"), [("x's", "x's"), ("float32", None), (None, "x's")])
@pytest.mark.parametrize("kind", [*STAGED, *STAGED_FORWARD])
def test_weights_that_are_staged(kind: str, weight: str | None, bias: str | None) -> None:
    sizes, geometry = (STAGED | STAGED_FORWARD)[kind]
    norm = norm_of(*sizes, "silu", weight, bias)
    check_forward(norm, laid_out(geometry))
    if kind in STAGED:
        check_backward(norm, laid_out(geometry))


@pytest.mark.parametrize("kind", STAGED)
def test_the_order_of_threads_does_not_matter_to_weights_that_are_staged(kind: str) -> None:
    """Those of one turn would be written over, or read before they are there."""
    sizes, geometry = STAGED[kind]
    norm, dy = norm_of(*sizes, "silu"), data(1, sizes[:2] + sizes[3:4], sizes[4])
    every = set()
    for seed in range(3):
        results = (*forward(norm, laid_out(geometry), seed), *backward(norm, dy, laid_out(geometry), seed=seed))
        every.add(b"".join(array.tobytes() for array in results if array is not None))
    assert len(every) == 1


@pytest.mark.parametrize("geometry", [RowBlock(4, 4, 64), RowBlock(4, 8, 32, 4), RowBlock(4, 16, 16, 4)], ids=str)
@pytest.mark.parametrize("points", [512, 256, 128, 8], ids=lambda points: f"{points} points")
def test_threads_that_share_a_channel(geometry: RowBlock, points: int) -> None:
    """Several vectors of all threads to one channel, or a few threads, or one; in rows that share warps."""
    check_backward(norm_of(5, 2048 // points, 1024 // points, points, "float32"), laid_out(geometry))


@pytest.mark.parametrize("vectors", [4, 8, 12], ids="{} vectors".format)
def test_gradients_of_an_activation_that_are_kept(vectors: int) -> None:
    """In registers: of all vectors, of some, and of none; where channels begin within vectors, of fewer."""
    for points in (vectors * 256, vectors * 256 - 4):
        norm = norm_of(2, 4, 2, points, "float16", "silu")
        check_backward(norm, laid_out(RowBlock(8, vectors, 64)))


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize(
    ("blocks", "together", "points", "vectors"),
    [(8, 8, 512, 1), (8, 8, 1000, 2), (8, 4, 1024, 1), (10, 10, 512, 1), (6, 30, 200, 2), (15, 30, 256, 1)],
)
def test_blocks_of_whole_channels(
    blocks: int, together: int, points: int, vectors: int, activation: str | None
) -> None:
    """Blocks that share a row have a channel each, two have one, or each has several."""
    geometry = RowBlock(8, vectors, 64, 1, blocks, "ahead", blocks_per_multiprocessor=1)
    check_backward(norm_of(3, 2 * together, together, points, "float16", activation), laid_out(geometry))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((3, 2, 1, 2652, "float32"), {}),
        ((3, 2, 1, 2653, "float32"), {"resident": 1, "held": 1}),
        ((3, 4, 2, 1326, "float32"), {"resident": 1, "held": 1}),
        ((2, 12, 12, 221, "float32"), {"rows_ahead": 2}),
        ((2, 10, 5, 1024, "float16"), {}),
        ((2, 4, 4, 664, "float64"), {"resident": 2, "held": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_all_blocks_share(sizes: tuple[Any, ...], changes: dict[str, int]) -> None:
    width = 16 // DTYPES[sizes[4]].itemsize
    geometry = RowGrid(width, 3, blocks_per_row=4, groups=1, threads=64, peeled=sizes[2] * sizes[3] % width > 0)
    check_forward(norm_of(*sizes, "gelu"), laid_out(replace(geometry, **changes)))  # type: ignore[arg-type]


# Samples, channels, how many of them a row has, points and dtype; how many blocks of 64 threads share a row; and what
# else is not as in the smallest pipeline.
PIPELINES: dict[str, tuple[tuple[Any, ...], int, dict[str, Any]]] = {
    "one channel": ((3, 2, 1, 2652, "float32"), 4, {}),
    "one channel, two groups": ((5, 2, 1, 1600, "bfloat16"), 2, {"groups": 2, "rows_ahead": 3}),
    "one channel, four turns later": ((7, 1, 1, 1288, "float16"), 4, {"rows_ahead": 6, "lag": 4}),
    "two turns later": ((3, 4, 1, 2656, "float32"), 4, {"rows_ahead": 4, "lag": 2}),
    "two channels": ((3, 4, 2, 1324, "float32"), 4, {}),
    "three channels, parts that are not alike": ((5, 6, 3, 1000, "bfloat16"), 9, {"rows_ahead": 4, "lag": 2}),
    "four channels, two groups": ((3, 8, 4, 520, "float16"), 4, {"groups": 2, "rows_ahead": 3}),
    "many blocks": ((2, 36, 18, 128, "float32"), 36, {}),
}


@pytest.mark.parametrize(("activation", "weight", "bias"), [
    (None, "x's", "x's"), ("gelu", "float32", "x's"), (None, None, "x's"), ("silu", "x's", None),
])  # fmt: skip
@pytest.mark.parametrize("kind", PIPELINES)
def test_rows_in_a_pipeline(kind: str, activation: str | None, weight: str | None, bias: str | None) -> None:
    sizes, _, _ = PIPELINES[kind]
    norm, choose = norm_of(*sizes, activation, weight, bias), laid_out(pipeline_of(kind))
    check_forward(norm, choose)
    check_backward(norm, choose)


def pipeline_of(kind: str) -> RowPipeline:
    (_, _, together, points, dtype), blocks, changes = PIPELINES[kind]
    width = 16 // DTYPES[dtype].itemsize
    vectors = -(-together * points // width // blocks)
    geometry = RowPipeline(width, -(-vectors // 64), blocks, groups=1, rows_ahead=2, lag=1, threads=64)
    return replace(geometry, **changes)


@pytest.mark.parametrize("kind", ["one channel, four turns later", "one channel, two groups"])
def test_the_order_of_threads_does_not_matter_in_a_pipeline(kind: str) -> None:
    sizes, _, _ = PIPELINES[kind]
    norm, dy, choose = norm_of(*sizes, "silu"), data(1, sizes[:2] + sizes[3:4], sizes[4]), laid_out(pipeline_of(kind))
    every = set()
    for seed in range(3):
        results: list[Array | None] = [*forward(norm, choose, seed), *backward(norm, dy, choose, seed=seed)]
        every.add(b"".join(array.tobytes() for array in results if array is not None))
    assert len(every) == 1


@pytest.mark.parametrize("sizes", [(9, 4, 4, 512, "float32"), (3, 3, 1, 1000, "bfloat16")], ids=str)
def test_the_order_of_threads_does_not_matter(sizes: tuple[Any, ...]) -> None:
    """A missing barrier would show, and entries of a row that are written over while another thread reads them."""
    norm, dy = norm_of(*sizes, "silu"), data(1, sizes[:2] + sizes[3:4], sizes[4])
    every = []
    for seed in range(3):
        results = (*forward(norm, seed=seed), *backward(norm, dy, seed=seed))
        every.append([array.tobytes() for array in results if array is not None])
    assert every[0] == every[1] == every[2]


def test_every_kind_of_plan_is_emulated() -> None:
    """The sizes above reach each way to weights, and to lay out rows, and blocks that take several turns."""
    kinds = set()
    ways = [(sizes, planned) for sizes in ONE_CHANNEL + SEVERAL_CHANNELS]
    for sizes, choose in ways + [(sizes, planned_for_ampere) for sizes in ONE_CHANNEL]:
        norm = norm_of(*sizes)
        for problem in (forward_problem(norm, norm.x), backward_problem(norm, norm.x)):
            chosen = choose(problem)
            assert chosen is not None
            for item in chosen.launches:
                constants = dict(item.constants)
                if "WEIGHTS_OF" in constants:
                    kinds |= {(item.kernel, constants["WEIGHTS_OF"], name) for name in (constants["STAGE"], "any")}
                    kinds |= {"peeled"} if constants["PEELED"] else set()
                if constants.get("STEPS", 1) != 1:
                    kinds |= {"steps"}
            again = chosen.launches[0].grid * chosen.launches[0].block[1] < len(norm.x) * norm.statistics_shape[1]
            kinds |= {(chosen.launches[0].kernel, "again")} if again else set()
    forward, backward = "row_block_forward", "row_block_backward"
    assert kinds >= {(forward, way, "any") for way in ("part", "vector", "crossing", "numbers")}
    assert kinds >= {(backward, way, stage) for way in ("part", "vector") for stage in ("direct", "ahead", "run")}
    assert kinds >= {(backward, "crossing", stage) for stage in ("direct", "ahead")}
    assert kinds >= {(backward, "again"), "peeled", "steps"}
