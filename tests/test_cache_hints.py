"""What plans ask of L2: to keep what is read, of tensors that are more than it holds, where that was timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_cases import GPUS, plain_backward, plain_channel_norm, plain_forward

from cunorm.plan import Device, plan
from cunorm.problem import Matrix, Norm, PointwiseBackward, PointwiseForward

H200 = GPUS["sm_90"]
OTHERS = {"slower memory": replace(H200, memory_rate=20e3), **{arch: GPUS[arch] for arch in ("sm_80", "sm_100")}}


def kept(problem: Any, device: Device = H200) -> dict[str, int]:
    """By kernel, whether L2 is asked to keep what it reads, where it can ask."""
    found = {item.kernel: dict[str, Any](item.constants).get("KEPT_IN_L2") for item in plan(problem, device).launches}
    return {kernel: value for kernel, value in found.items() if value is not None}


def gelu(numbers: int) -> tuple[PointwiseForward, PointwiseBackward]:
    x = Matrix("bfloat16", (0,), (1,))
    forward = PointwiseForward((1,), (numbers,), x, x, None, "gelu")
    return forward, PointwiseBackward((1,), (numbers,), x, x, x, None, None, "gelu")


@pytest.mark.parametrize(
    ("columns", "dtype"), [(64, "float16"), (1024, "bfloat16"), (12_289, "bfloat16"), (100, "float32")]
)
def test_rows_that_are_more_than_l2_holds(columns: int, dtype: str) -> None:
    itemsize = 4 if dtype == "float32" else 2
    few, many = (nbytes // (columns * itemsize) for nbytes in (20_000_000, 40_000_000))
    for changes in ({}, {"norm": Norm(False), "bias": None}, {"norm": Norm(activation="relu")}):
        for rows, expected in ((few, 0), (many, 1)):
            item = plan(replace(plain_forward(rows, columns, dtype), **changes), H200).launches[-1]
            constants = dict[str, Any](item.constants)
            assert constants["KEPT_IN_L2"] == (expected if constants["STAGE"] == "direct" else 0)
    assert set(kept(plain_forward(many, columns, dtype)).values()) == {1}


def test_rows_that_clusters_share_ask_for_nothing() -> None:
    for problem in (plain_forward(10_000, 100_000, "bfloat16"), plain_backward(10_000, 65_536, "bfloat16")):
        stages = [dict(item.constants).get("STAGE") for item in plan(problem, H200).launches]
        assert "ahead" in stages
        assert set(kept(problem).values()) == {0}


@pytest.mark.parametrize("columns", [512, 4096, 8192])
def test_rows_that_come_ahead_backward(columns: int) -> None:
    few, many = (plain_backward(nbytes // (2 * columns), columns, "float16") for nbytes in (20_000_000, 60_000_000))
    activated = replace(many, norm=Norm(activation="silu"), bias=many.weight)
    late = replace(many, x=replace(many.x, offset=1))
    for problem, expected in ((few, 0), (many, 1), (activated, 0), (replace(many, dresidual_out=many.x), 0), (late, 0)):
        assert kept(problem) == {"row_block_backward": expected}


def test_short_and_odd_rows_ask_for_nothing_backward() -> None:
    for columns in (256, 1023, 4097):
        assert set(kept(plain_backward(200_000_000 // columns, columns, "float16")).values()) <= {0}


def test_groups_that_come_ahead() -> None:
    forward, backward = plain_channel_norm((32, 256, 64**2), "float16", 8)
    assert kept(forward) == {"row_block_forward": 1}
    assert kept(replace(forward, activation="silu")) == {"row_block_forward": 0}
    assert kept(replace(backward, bias=backward.weight, activation="silu")) == {"row_block_backward": 0}


@pytest.mark.parametrize(
    ("sizes", "dtype", "kernel", "expected"),
    [
        ((2, 32, 128**3), "float32", "row_pipeline_forward", 1),
        ((2, 32, 128**3), "float16", "row_pipeline_forward", 1),
        ((4, 1, 128**3 - 1), "float32", "row_pipeline_forward", 0),
        ((8, 64, 64**3), "float32", "channel_slab_forward", 1),
        ((8, 64, 64**3), "float16", "channel_slab_forward", 0),
    ],
)
def test_channels_that_are_read_once(sizes: tuple[int, int, int], dtype: str, kernel: str, expected: int) -> None:
    forward, _ = plain_channel_norm(sizes, dtype, 1)
    assert kept(forward) == {kernel: expected}


def test_a_block_that_adds_a_residual_alone_asks_for_nothing() -> None:
    for columns, residual, expected in ((32_768, True, 0), (32_768, False, 1), (16_384, True, 1)):
        problem = plain_forward(8192, columns, "bfloat16", residual=residual)
        assert kept(problem) == {"row_block_forward": expected}, columns


def test_activations() -> None:
    for numbers, expected in ((10_000_000, 0), (20_000_000, 1)):
        forward, backward = gelu(numbers)
        assert kept(forward) == {"pointwise_forward": expected}
        assert kept(backward) == {"pointwise_backward": expected}


def test_channels_that_are_read_twice() -> None:
    for points, expected in ((64**3, 0), (128**3, 1)):
        forward, _ = plain_channel_norm((2, 32, points), "float16", 1, last=True)
        found = kept(forward)
        assert set(found.values()) <= {expected}
        assert not expected or found.keys() == {"channel_split_statistics", "channel_split_forward"}


@pytest.mark.parametrize("device", OTHERS.values(), ids=OTHERS)
def test_other_devices_are_asked_for_nothing(device: Device) -> None:
    for problem in (
        plain_forward(100_000, 1024, "bfloat16"),
        plain_backward(100_000, 1024, "bfloat16"),
        *gelu(100_000_000),
        *(plain_channel_norm((2, 32, 128**3), "float32", 1, last=last)[0] for last in (True, False)),
    ):
        assert set(kept(problem, device).values()) <= {0}
