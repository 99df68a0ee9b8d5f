"""Rows that all blocks share, of which one lies in registers while the next ones come, on the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    LAYER_NORM,
    NORM_TOLERANCE,
    RMS_NORM,
    SMALL_DEVICE,
    Array,
    Case,
    EmulatorRunner,
    NumpyRunner,
    assert_forward,
    data,
    float64,
    relative_error,
)
from test_rows_of_channels import backward, check_backward, check_forward, forward, laid_out, norm_of

from cunorm.plan import rows
from cunorm.plan.row_held import RowHeld
from cunorm.problem import DTYPES, Norm

THREADS = 64

# Samples, channels, how many of them a row has, points and dtype; how many blocks share a row; and how many pieces more
# than one row's lie in the ring. Parts of two to five pieces, the last of which threads may have none of.
HELD: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "one channel": ((3, 2, 1, 2652, "float32"), 4, 1),
    "of sixteen bits": ((5, 2, 1, 4968, "bfloat16"), 4, 2),
    "many ahead": ((4, 3, 1, 2592, "float16"), 4, 9),
    "one row": ((1, 1, 1, 2656, "float32"), 4, 3),
    "two rows, one block": ((2, 1, 1, 2328, "float16"), 1, 1),
    "two channels": ((3, 4, 2, 1324, "float32"), 4, 2),
    "three channels, parts that are not alike": ((5, 6, 3, 1608, "bfloat16"), 9, 2),
    "many blocks": ((2, 36, 18, 304, "float32"), 36, 1),
}


def way_of(kind: str) -> RowHeld:
    (_, _, together, points, dtype), blocks, more = HELD[kind]
    vectors = together * points * DTYPES[dtype].itemsize // 16
    resident = -(-vectors // (blocks * THREADS))
    return RowHeld(16 // DTYPES[dtype].itemsize, resident, blocks, resident + more, THREADS)


@pytest.mark.parametrize(("activation", "weight", "bias"), [
    (None, "x's", "x's"), ("gelu", "float32", "x's"), (None, None, "x's"), ("silu", "x's", None),
])  # fmt: skip
@pytest.mark.parametrize("kind", HELD)
def test_channels(kind: str, activation: str | None, weight: str | None, bias: str | None) -> None:
    sizes, _, _ = HELD[kind]
    norm, choose = norm_of(*sizes, activation, weight, bias), laid_out(way_of(kind))
    check_forward(norm, choose)
    check_backward(norm, choose)


@pytest.mark.parametrize("kind", ["one channel", "two channels", "many blocks"])
def test_small_variances_beside_large_means(kind: str) -> None:
    sizes, _, _ = HELD[kind]
    check_forward(norm_of(*sizes, shift=1000.0, outliers=False), laid_out(way_of(kind)))


@pytest.mark.parametrize("kind", ["many ahead", "of sixteen bits", "two channels"])
def test_the_order_of_threads_does_not_matter(kind: str) -> None:
    sizes, _, _ = HELD[kind]
    norm, dy, choose = norm_of(*sizes, "silu"), data(1, sizes[:2] + sizes[3:4], sizes[4]), laid_out(way_of(kind))
    every = set()
    for seed in range(4):
        results: list[Array | None] = [*forward(norm, choose, seed), *backward(norm, dy, choose, seed=seed)]
        every.add(b"".join(array.tobytes() for array in results if array is not None))
    assert len(every) == 1


@pytest.mark.parametrize("mask", [(True, False, False), (True, True, False), (True, False, True)])
def test_only_what_is_wanted(mask: tuple[bool, bool, bool]) -> None:
    sizes, _, _ = HELD["two channels"]
    norm, dy, choose = norm_of(*sizes), data(1, sizes[:2] + sizes[3:4], sizes[4]), laid_out(way_of("two channels"))
    for wanted, one, other in zip(mask, backward(norm, dy, choose), backward(norm, dy, choose, mask)):
        assert other is None if not wanted else other.tobytes() == one.tobytes()  # type: ignore[union-attr]


# ---- Rows of no channels, without weights.


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM, Norm(True, activation="silu")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_weights(dtype: str, norm: Norm) -> None:
    """Seven rows, with more between one and the next than they have themselves."""
    width = 16 // DTYPES[dtype].itemsize
    way = RowHeld(width, 3, 4, 5, THREADS)
    apart = data(0, (7, width * 800), dtype)
    case = Case(apart[:, : width * 663], None, None, norm=norm)

    def choose(problem: Any, device: Any) -> Any:
        return rows.plan_with(problem, device, way)

    runner = EmulatorRunner(replace(SMALL_DEVICE, multiprocessors=4), choose)
    before = apart.copy()
    results = runner.forward(case)
    assert_forward(case, results)
    dy = data(7, case.x.shape, dtype)
    dx, _, _ = runner.backward(case.backward(NumpyRunner().forward(case), dy, (True, False, False)))
    expected_dx, _, _ = case.expected_gradients(dy)
    terms = np.abs(float64(dy)) * np.expand_dims(case.expected().rstd, case.sorted_axis)
    assert relative_error(dx, expected_dx, terms) <= NORM_TOLERANCE[dtype]
    assert apart.tobytes() == before.tobytes(), "an input was modified"
