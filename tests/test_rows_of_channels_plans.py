"""Which channel norms are rows, and how these lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import (
    GPUS,
    plain_backward,
    plain_channel_backward,
    plain_channel_forward,
    plain_channel_norm,
    plain_channels,
    plan_rows,
)
from plan_coverage_rules import rows_and_columns_are_covered

from cunorm import tuning_file
from cunorm.plan import plan, rows_of_channels
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import (
    BackwardProblem,
    ChannelTensor,
    ForwardProblem,
    RunningStatistics,
    Vector,
)

H200 = GPUS["sm_90"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("samples", "channels", "together", "points", "strategy"),
    [
        (8, 64, 1, 32**3, "row_block"),
        (64, 32, 1, 32**3, "row_block"),
        (8, 64, 1, 64**3, "row_cluster"),
        (8, 64, 1, 100**3, "row_pipeline"),
        (8, 64, 1, 240**3, "row_grid"),
        (8, 1280, 40, 256, "row_block"),
        (4, 128, 4, 32_768, "row_cluster"),
        (1, 128, 4, 512**2, "row_pipeline"),
    ],
)
def test_usual_rows_are_moved_once(
    samples: int, channels: int, together: int, points: int, strategy: str, dtype: str
) -> None:
    sizes = samples, channels, together, points, dtype
    chosen = plan_rows(plain_channel_forward(*sizes), H200)
    assert chosen is not None and chosen.strategy == strategy
    chosen = plan_rows(plain_channel_backward(*sizes), H200)
    assert (chosen is None) == (strategy == "row_grid"), "no kernel holds such rows backward"


def test_rows_and_their_channels() -> None:
    rows = as_rows(plain_channel_forward(8, 320, 10, 4096, "float16", "silu"))
    assert isinstance(rows, ForwardProblem) and rows.channels is not None
    assert (rows.rows, rows.columns, rows.x.row_strides, rows.norm.activation) == (256, 40_960, (40_960,), "silu")
    assert (rows.channels.rows_per_sample, rows.channels.channels_per_row, rows.channels.positions) == (32, 10, 4096)
    back = as_rows(plain_channel_backward(8, 320, 10, 4096))
    assert isinstance(back, BackwardProblem) and back.channels == rows.channels and back.dx is not None


@pytest.mark.parametrize(
    ("shape", "block"),
    [((4, 64, 196), (32, 4)), ((16, 128, 49), (32, 4)), ((1, 8, 16), (2, 16)), ((1, 1, 16), (2, 16))],
)
def test_few_short_rows_have_a_warp_or_less(shape: tuple[int, int, int], block: tuple[int, int]) -> None:
    """Each takes one turn, for which it is compiled; many rows do not."""
    for problem in plain_channel_norm(shape, "float16"):
        item, *_ = plan(problem, H200).launches
        constants = dict(item.constants)
        assert (item.block, constants["TAKES_TURNS"]) == (block, 0)
    for problem in plain_channel_norm((1024, *shape[1:]), "float16"):
        item, *_ = plan(problem, H200).launches
        assert shape[1] < 64 or (item.block, dict(item.constants)["MIN_BLOCKS"]) != (block, 1)


@pytest.mark.parametrize(("shape", "dtype"), [((64, 256, 28**2), "float16"), ((64, 256, 9**2), "float32")])
def test_without_weights_they_lie_as_with_them(shape: tuple[int, int, int], dtype: str) -> None:
    """As instance norm of torch.nn has none by default."""
    laid = ("STAGE", "VECTOR", "VECTORS", "THREADS_PER_ROW", "ROWS_PER_BLOCK", "PEELED", "TAKES_TURNS")
    _, backward = plain_channel_norm(shape, dtype)
    plain = replace(backward, weight=None, bias=None, dweight=None, dbias=None)
    bare, full = (dict(plan(problem, H200).launches[0].constants) for problem in (plain, backward))
    assert [bare[name] for name in laid] == [full[name] for name in laid]
    assert bare["STAGE"] == "direct"


@pytest.mark.parametrize(
    ("shape", "dtype", "threads"),
    [
        ((4096, 1024), "bfloat16", 64),
        ((131072, 256), "bfloat16", 16),
        ((4096, 768), "float32", 128),
        ((16384, 1025), "float32", 128),
    ],
)
def test_rows_that_keep_nothing_lie_as_those_of_a_channel(shape: tuple[int, int], dtype: str, threads: int) -> None:
    """Layer norm without weight and bias, backward; but not short ones of few bytes at a time."""
    nothing: dict[str, Any] = {"weight": None, "bias": None, "dweight": None, "dbias": None}
    (item,) = plan(replace(plain_backward(*shape, dtype), **nothing), H200).launches
    constants = dict(item.constants)
    assert (constants["STAGE"], constants["THREADS_PER_ROW"], constants["TAKES_TURNS"]) == ("direct", threads, 0)
    (item,) = plan(replace(plain_backward(1 << 20, 36, "bfloat16"), **nothing), H200).launches
    assert dict(item.constants)["STAGE"] == "ahead"
    first, *_ = plan(plain_backward(*shape, dtype), H200).launches
    in_turns = first.kernel == "row_bulk_backward" or dict(first.constants)["STAGE"] == "ahead"
    assert in_turns, "with weights there are sums to keep"


def test_short_rows_of_a_channel_have_no_branches_around_vectors() -> None:
    for shape, dtype, whole in (((256, 1024, 49), "float16", 24), ((64, 64, 56**2), "float16", 0)):
        forward, _ = plain_channel_norm(shape, dtype, activation="silu")
        constants = dict(plan(forward, H200).launches[0].constants)
        assert constants["WHOLE_VECTORS"] == whole


CHANNELS_LAST = ChannelTensor("float32", 64 * 100, 1, (64,))
PADDED = ChannelTensor("float32", 64 * 104, 104, (1,))


@pytest.mark.parametrize("together", [1, 4])
def test_what_lies_otherwise_is_not_rows(together: int) -> None:
    plain = plain_channel_forward(8, 64, together, 100)
    assert as_rows(plain) is not None
    assert as_rows(replace(plain, x=CHANNELS_LAST, y=CHANNELS_LAST)) is None
    assert as_rows(replace(plain, x=CHANNELS_LAST)) is None
    assert (as_rows(replace(plain, x=PADDED)) is None) == (together > 1)
    apart = replace(plain_channels(8, 64, 100), sample_stride=64 * 100 + 4)
    assert as_rows(replace(plain, x=apart)) is None
    one = replace(plain, samples=1, x=apart)
    assert as_rows(one) is not None


def test_what_is_more_than_rows_have_is_not_rows() -> None:
    forward, back = plain_channel_forward(1, 64, 1, 100), plain_channel_backward(1, 64, 1, 100)
    running = RunningStatistics(Vector("float32"), Vector("float32"), given=True)
    assert as_rows(replace(forward, running=running)) is None
    assert as_rows(replace(forward, y=None)) is None
    assert as_rows(replace(back, given=True)) is None
    assert as_rows(replace(back, dx=None, dweight=None, dbias=None)) is None
    for empty in (replace(forward, samples=0), replace(forward, point_sizes=(0,))):
        assert as_rows(empty) is None


def test_sums_of_short_channels_are_not_more_than_what_is_moved() -> None:
    assert plan_rows(plain_channel_backward(4096, 512, 16, 1, "float16"), H200) is None
    assert plan_rows(plain_channel_backward(4096, 512, 16, 16, "float16"), H200) is not None
    assert plan_rows(plain_channel_backward(4, 512, 16, 1, "float16"), H200) is not None


def test_what_tuning_found_for_layer_norm_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = as_rows(plain_channel_forward(8, 64, 1, 1000))
    assert isinstance(rows, ForwardProblem)
    layer_norm = replace(rows, channels=None)
    entry = tuning_file.Entry(None, (512, 1000), 1e-6, 1e-6, 1, "0.1.0")
    monkeypatch.setattr(tuning_file, "_entries", lambda: {"a GPU": {tuning_file.key_of(layer_norm): entry}})
    monkeypatch.setattr(tuning_file.cuda, "gpu_name", lambda index: "a GPU")
    assert tuning_file.entry_for(layer_norm, 0) is entry
    assert tuning_file.entry_for(rows, 0) is None


@pytest.mark.parametrize("of", [plain_channel_forward, plain_channel_backward], ids=["forward", "backward"])
def test_candidates_hold_a_part_of_whole_channels(of: Callable[..., Any]) -> None:
    """Of ten channels four blocks take three each, and the last one: more columns than a quarter of the row."""
    problem, device = of(2, 320, 10, 4096, "float16"), H200
    rows = as_rows(problem)
    found = list(rows_of_channels.candidates(problem, device))
    assert rows is not None and any(geometry.blocks_per_row == 4 for geometry in found)
    for geometry in found:
        rows_and_columns_are_covered(rows, device, rows_of_channels.plan_with(problem, device, geometry))


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "sm_75"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocks_that_wait_for_each_other_all_fit_where_there_are_no_weights(arch: str, dtype: str) -> None:
    """Parts of such rows may cut channels, and are as the launch has them."""
    device, seen = GPUS[arch], 0
    for samples, channels, points in itertools.product((1, 8, 16), (320, 640, 1280), (32**2, 64**2, 80**2, 128**2)):
        forward, backward = plain_channel_norm((samples, channels, points), dtype, channels // 32)
        bare: list[Any] = [replace(forward, weight=None, bias=None)]
        bare.append(replace(backward, weight=None, bias=None, dweight=None, dbias=None))
        for item in (item for problem in bare for item in plan(problem, device).launches if item.cooperative):
            share = dict[str, Any](item.constants).get("BLOCKS_PER_MULTIPROCESSOR", 1)
            assert item.grid <= device.multiprocessors * share, (samples, channels, points)
            seen += item.kernel == "row_pipeline_backward"
    assert seen
