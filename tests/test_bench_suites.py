"""The suites of ``bench/``: what they measure."""

from __future__ import annotations

import dataclasses
import math

import pytest
from bench_cases import ROW

from cunorm.bench.suites import (
    DIRECTIONS,
    GELUS,
    HIDDEN_SIZES,
    LAYOUTS,
    LONG_ODD_NEIGHBOURS,
    NV_INSTANCE_NORM,
    ODD_NEIGHBOURS,
    SUITES,
    TINY_SHAPES,
    readable,
    suite,
)
from cunorm.channel_norm import CHANNEL_NORMS


@pytest.mark.parametrize("name", SUITES)
def test_suite_is_sane(name: str) -> None:
    rows = suite(name)
    assert len(rows) == len(set(rows)) > 0
    for row in rows:
        assert row.suite == name
        assert row.op in ("layer_norm", "rms_norm", *GELUS, *CHANNEL_NORMS)
        assert row.dtype in ("float16", "bfloat16", "float32")
        assert row.direction in DIRECTIONS
        assert min(row.shape) > 0
        assert (row.layout in LAYOUTS) == row.is_channel_norm == (row.layout != "")
        assert bool(row.groups) == (row.op == "group_norm")
        assert row.shape[1] % (row.groups or 1) == 0
        # x, dy, dx, a residual and its gradient fit on the GPU that the suites were made for.
        assert 5 * math.prod(row.shape) * 4 < 141e9


def test_suites_reproduce_what_they_name() -> None:
    shapes = {name: {row.shape for row in suite(name)} for name in SUITES}
    assert {columns for _, columns in shapes["triton-tutorial"]} == set(range(1024, 16384, 512))
    assert len(shapes["nv-norms"]) == 9
    assert {"forward", "backward", "both"} == {row.direction for row in suite("nv-norms")}
    assert {(128, 64), (128, 2**20), (2**20, 128), (16, 1024, 256)} <= shapes["fast-layernorm-tf"]
    assert {(32768, 256), (32768, 65536), (16384, 131072), (8192, 262144)} <= shapes["quack"]
    assert len(shapes["small"]) == 20
    assert all(neighbour % 8 == 0 for neighbour in ODD_NEIGHBOURS.values())
    neighbours = ODD_NEIGHBOURS | LONG_ODD_NEIGHBOURS
    assert {shape[1] for shape in shapes["odd"]} == {*neighbours, *neighbours.values()}
    assert all((count, neighbours[size]) in shapes["odd"] for count, size in shapes["odd"] if size in neighbours)
    assert {(32768, size) for size in ODD_NEIGHBOURS} <= shapes["odd"]
    assert {row.offset for row in suite("odd")} == {0, 1}
    large = [row for row in suite("rows") if row.sweep == "268 MB" and not row.residual]
    assert {256, 5120, 12288, 15872, 16384, 50257, 262144} <= {row.columns for row in large}
    assert all(row.moved_bytes > 256e6 for row in large)


def test_suites_of_channel_norms() -> None:
    rows = {op: suite(op.replace("_", "-")) for op in CHANNEL_NORMS}
    for op, of_op in rows.items():
        assert {row.op for row in of_op} == {op}
        assert {row.direction for row in of_op} >= {"forward", "backward"}
        assert any(row.sweep == TINY_SHAPES for row in of_op)
        # The same problems in both layouts.
        of_layouts = [
            [dataclasses.replace(row, layout="") for row in of_op if row.layout == layout] for layout in LAYOUTS
        ]
        assert of_layouts[0] == of_layouts[1] != []
    instance = [row for row in rows["instance_norm"] if row.shape in NV_INSTANCE_NORM]
    assert {row.shape for row in instance} == set(NV_INSTANCE_NORM)
    assert {(2, 64, 128, 128, 128), (8, 256, 32, 32, 32), (2, 32, 6, 6, 6)} <= {row.shape for row in instance}
    assert {row.dtype for row in instance} == {"float16", "float32"}
    group = [row for row in rows["group_norm"] if row.sweep != TINY_SHAPES]
    assert {row.groups for row in group} == {32}
    assert {row.activation for row in group} == {"", "silu"}
    assert {(8, 320, 64, 64), (8, 128, 256, 256)} <= {row.shape for row in group}
    assert {(64, 256, 56, 56), (64, 2048, 7, 7)} <= {row.shape for row in rows["batch_norm"]}


def test_hidden_states_are_long_rows_of_which_there_are_not_many() -> None:
    rows = suite("hidden-states")
    assert {row.rows for row in rows} == {200, 512, 1024} and {row.columns for row in rows} == set(HIDDEN_SIZES)
    assert {(row.op, row.residual) for row in rows} == {
        ("layer_norm", False), ("rms_norm", False), ("rms_norm", True),
    }  # fmt: skip


def test_the_decoder_has_long_groups() -> None:
    rows = suite("decoder")
    assert {(row.op, row.groups, row.shape[0]) for row in rows} == {("group_norm", 32, 1)}
    assert {row.shape[1:] for row in rows} == {(512, 128, 128), (512, 256, 256), (256, 512, 512), (128, 1024, 1024)}
    assert {row.activation for row in rows} == {"", "silu"} and {row.layout for row in rows} == set(LAYOUTS)


def test_only_chooses_layouts_and_activations() -> None:
    chosen = suite("group-norm", "8x320x64x64 N...C silu backward")
    assert [row.label for row in chosen] == ["group_norm 8x320x64x64 float16 backward (N...C, silu)"]
    chosen = suite("group-norm", "8x320x64x64 NC... !silu")
    assert [row.label for row in chosen] == [
        f"group_norm 8x320x64x64 float16 {direction} (NC...)" for direction in ("forward", "backward")
    ]


def test_shapes_are_readable() -> None:
    assert readable((4096, 1024)) == "4,096 × 1,024"
    assert readable((16, 1024, 256)) == "16 × 1,024 × 256"
    assert readable((2, 32, 128, 128, 128)) == "2 × 32 × 128³"
    assert readable((8, 1280, 16, 16)) == "8 × 1,280 × 16²"
    assert readable((8, 1280, 16, 32)) == "8 × 1,280 × 16 × 32"


def test_parts_and_only_choose_rows() -> None:
    everything = suite("rows")
    parts = [suite("rows", part=(index, 3)) for index in (1, 2, 3)]
    assert sorted(map(hash, (row for part in parts for row in part))) == sorted(map(hash, everything))
    shapes = [{(row.shape, row.dtype) for row in part} for part in parts]
    assert not shapes[0] & shapes[1]
    chosen = suite("rows", "rms_norm bfloat16 !residual !backward")
    assert {(row.op, row.dtype, row.residual) for row in chosen} == {("rms_norm", "bfloat16", False)}
    assert {row.direction for row in chosen} == {"forward", "forward_stats"}
    assert suite("rows", "no such row") == []


@pytest.mark.parametrize(
    "direction, residual, numbers",
    [
        ("forward", False, 2),
        ("forward_stats", False, 2),
        ("forward", True, 4),
        ("backward", False, 3),
        ("backward", True, 4),
        ("both", False, 5),
    ],
)
def test_bytes_that_must_move(direction: str, residual: bool, numbers: int) -> None:
    row = dataclasses.replace(ROW, direction=direction, residual=residual)
    assert row.moved_bytes == numbers * 5 * 33 * 4
    assert dataclasses.replace(row, dtype="bfloat16").moved_bytes == numbers * 5 * 33 * 2
