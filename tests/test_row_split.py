"""Rows in chunks, on the emulator: by two launches where there are few chunks, by more where there are many; rows that
begin anywhere, and such that lie otherwise in each tensor; against float64.

What reaches these kernels by itself is long, so a device of few multiprocessors stands for one of many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import LAYER_NORM, RMS_NORM, SMALL_DEVICE, Case, EmulatorRunner, check, columns_shape, data, dtype_of
from emulator_cases import NEEDS_COMPILER

from cunorm.plan import Device, Plan, row_split
from cunorm.plan.launches import Builder
from cunorm.problem import Norm

pytestmark = NEEDS_COMPILER

MANY = Device("sm_90", multiprocessors=24, threads_per_multiprocessor=2048)


def by_chunks(problem: Any, device: Device) -> Plan:
    builder = Builder()
    return builder.finished(row_split.plan(problem, device, builder))


FEW, OTHERS = EmulatorRunner(MANY, by_chunks), EmulatorRunner(SMALL_DEVICE, by_chunks)
SILU, GELU = Norm(activation="silu"), Norm(False, 1.0, "gelu")


def launched(runner: EmulatorRunner, case: Case) -> list[list[tuple[str, dict[str, Any]]]]:
    """The kernels, with their constants, of both directions."""
    plans: list[Plan] = []

    def choose(problem: Any, device: Device) -> Plan:
        plans.append(by_chunks(problem, device))
        return plans[-1]

    own = replace(runner, choose=choose)
    results = own.forward(case)
    own.backward(case.backward(results, data(17, case.x.shape, case.x.dtype.name)))
    return [[(item.kernel, dict(item.constants)) for item in plan.launches] for plan in plans]


def case_of(shape: tuple[int, ...], dtype: str, norm: Norm = LAYER_NORM, **changes: Any) -> Case:
    weight_dtype = changes.pop("weight_dtype", dtype)
    weight, bias = (data(seed, columns_shape(shape, (-1,)), weight_dtype, shift=1.0) for seed in (1, 2))
    residual = data(5, shape, dtype) if changes.pop("residual", False) else None
    return Case(data(0, shape, dtype), weight, bias, residual=residual, norm=norm, **changes)


# Rows of whole vectors, and such that begin anywhere; of one chunk, of several tiles to a chunk, and with a last chunk
# of a few numbers, which are all edges.
SIZES = [(3, 8192), (1, 5000), (4, 6001), (2, 20_483), (2, 4101), (5, 1037)]


@pytest.mark.parametrize("runner", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_values_and_gradients(shape: tuple[int, int], dtype: str, runner: EmulatorRunner) -> None:
    check(runner, case_of(shape, dtype))


@pytest.mark.parametrize("runner", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.parametrize(
    ("shape", "dtype", "norm", "changes"),
    [
        ((3, 4099), "float16", RMS_NORM, {}),
        ((3, 4099), "bfloat16", SILU, {"weight_dtype": "float32"}),
        ((3, 4096), "float32", GELU, {"residual": True}),
        ((2, 4099), "float16", SILU, {"residual": True}),
        ((2, 4099), "float32", LAYER_NORM, {"weight_dtype": "float16"}),
        ((40, 4096), "float16", LAYER_NORM, {}),
        ((40, 1023), "float32", RMS_NORM, {}),
    ],
    ids=str,
)
def test_options(shape: tuple[int, int], dtype: str, norm: Norm, changes: Any, runner: EmulatorRunner) -> None:
    case = case_of(shape, dtype, norm, **changes)
    dresidual_out = data(6, shape, dtype) if changes.get("residual") else None
    check(runner, case, dresidual_out=dresidual_out)


def test_rows_that_lie_otherwise_in_each_tensor_are_read_number_by_number() -> None:
    x = np.empty(3 * 4099 + 1, np.float32)[1:].reshape(3, 4099)
    x[...] = data(0, x.shape)
    case = replace(case_of((3, 4099), "float32"), x=x)
    check(FEW, case)
    for launches in launched(FEW, case):
        assert not any(constants.get("PEELED") for _, constants in launches)


def test_few_chunks_are_merged_by_the_launch_that_needs_them() -> None:
    forward, backward = launched(FEW, case_of((3, 8191), "float16"))
    assert [kernel for kernel, _ in forward] == ["row_split_statistics", "row_split_forward"]
    assert [kernel for kernel, _ in backward] == ["row_split_gradient_sums", "row_split_backward"]
    assert forward[1][1]["MERGES"] and backward[1][1]["MERGED_ROWS"] == 8
    assert [constants["PEELED"] for _, constants in forward + backward] == [1, 1, 1, 0]
    forward, backward = launched(OTHERS, case_of((4, 40_003), "float16"))
    assert [kernel for kernel, _ in forward] == ["row_split_statistics", "split_merge", "row_split_forward"]
    assert [kernel for kernel, _ in backward] == ["row_split_gradient_sums", "column_sums", "row_split_backward"]


@pytest.mark.parametrize("runner", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.parametrize("shape", [(4, 6000), (4, 6001)], ids=str)
def test_without_statistics_and_over_x(shape: tuple[int, int], runner: EmulatorRunner) -> None:
    """y is the same if mean and rstd are not asked for, or if it is written where x was."""
    case = case_of(shape, "float16")
    expected = runner.forward(case).y.tobytes()
    assert runner.forward(case, stats=False).y.tobytes() == expected
    x = case.x.copy()
    assert runner.forward(replace(case, x=x), out=x).y.tobytes() == expected


@pytest.mark.parametrize("runner", [FEW, OTHERS], ids=["few", "others"])
@pytest.mark.parametrize("shape", [(2, 20_480), (2, 20_483)], ids=str)
def test_rows_far_from_zero(shape: tuple[int, int], runner: EmulatorRunner) -> None:
    """A mean of ten thousand deviations, and a beginning that says nothing of the rest."""
    for x in (data(0, shape, shift=1e4, outliers=False), data(0, shape, outliers=False)):
        if abs(x.mean()) < 1:
            x[:, :8] += 1e5
        case = Case(x)
        results, expected = runner.forward(case), case.expected()
        difference = np.abs(results.y - expected.y).max() / np.abs(expected.y).max()
        assert difference < 2e-6
        assert dtype_of("float32") == results.y.dtype


@pytest.mark.parametrize("runner", [FEW, OTHERS], ids=["few", "others"])
def test_the_order_of_the_threads_does_not_show(runner: EmulatorRunner) -> None:
    case = case_of((3, 8191), "bfloat16")
    dy = data(17, case.x.shape, "bfloat16")
    found = []
    for seed in (0, 1):
        own = replace(runner, seed=seed)
        results = own.forward(case)
        arrays = (results.y, results.mean, results.rstd, *own.backward(case.backward(results, dy)))
        found.append([array.tobytes() for array in arrays])
    assert found[0] == found[1]
