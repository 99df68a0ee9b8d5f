"""Which rows all blocks of a device share, and how; test_long_rows.py computes with them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from plan_cases import GPUS, plain_forward

from cunorm.plan import Device, plan, row_grid
from cunorm.problem import DTYPES, Matrix, Vector

H200, A100, RTX = GPUS["sm_90"], GPUS["sm_80"], GPUS["sm_89"]
SHAPES = [
    (10, 3_500_000), (4, 10_000_001), (4, 2_000_001), (1, 3_000_000), (1000, 2_700_000), (7, 5_000_003),
    (7, 2_700_000), (5, 1_700_000),
]  # fmt: skip


@pytest.mark.parametrize("device", [H200, A100, RTX], ids=lambda device: device.arch)
def test_geometries_fit_the_device_and_cover_the_row(device: Device) -> None:
    found = 0
    for shape, dtype, residual in itertools.product(SHAPES, DTYPES, (False, True)):
        problem = plain_forward(*shape, dtype, residual=residual)
        if shape[1] % 2:  # with weights row_split reads them twice
            problem = replace(problem, weight=None, bias=None)
        geometry = row_grid.forward_geometry(problem, device)
        if geometry is None:
            continue
        found += 1
        assert geometry.groups * geometry.blocks_per_row <= device.multiprocessors
        assert geometry.groups <= problem.rows
        # A kilobyte of the kernel's own.
        assert geometry.shared_bytes(problem) + 1024 <= device.shared_bytes
        part = geometry.columns_per_block(problem)
        assert part % geometry.width == 0
        assert (geometry.blocks_per_row - 1) * part < problem.columns <= geometry.blocks_per_row * part
        assert 1 <= geometry.resident * geometry.rows_ahead <= 32
        assert geometry.resident + geometry.held <= geometry.vectors(problem)
        assert geometry.rows_ahead == 1 or geometry.resident == geometry.vectors(problem)
        assert geometry.threads <= device.threads_per_multiprocessor
    assert found > 15


def test_it_applies_to_long_contiguous_rows_since_sm_80() -> None:
    assert row_grid.applies(plain_forward(4, 3_500_000), H200)
    assert row_grid.applies(plain_forward(4, 4_000_000), A100)
    assert not row_grid.applies(plain_forward(4, 3_500_000), GPUS["sm_75"])
    assert not row_grid.applies(plain_forward(10, 1_000_000), H200)
    assert not row_grid.applies(plain_forward(1, 100_000_000), H200)
    apart = replace(plain_forward(4, 4_000_001), y=Matrix("float32", (4_000_004,), (1,)), weight=None, bias=None)
    assert row_grid.applies(replace(apart, y=apart.x), A100)
    assert not row_grid.applies(apart, H200)
    double = replace(plain_forward(4, 4_000_000), weight=Vector("float64"))
    assert not row_grid.applies(double, H200)
    across = replace(plain_forward(4, 4_000_000), x=Matrix("float32", (1,), (4,)))
    assert not row_grid.applies(across, H200)


def test_rows_whose_weights_the_cache_does_not_hold_are_left_to_row_split() -> None:
    problem = plain_forward(10, 10_000_000)
    assert not row_grid.applies(problem, H200)
    assert row_grid.applies(replace(problem, weight=None, bias=None), H200)
    assert row_grid.applies(plain_forward(1, 10_000_000), H200)


def test_odd_rows_with_weights_are_left_to_row_split() -> None:
    for rows, columns in ((10, 10_000_001), (1, 3_000_001), (4, 2_000_001)):
        problem = plain_forward(rows, columns)
        assert not row_grid.applies(problem, H200)
        assert row_grid.applies(replace(problem, weight=None, bias=None), H200)


def test_more_rows_whose_weights_are_read_at_every_row_are_left_to_row_split() -> None:
    assert row_grid.applies(plain_forward(7, 3_500_000), H200)
    assert not row_grid.applies(plain_forward(8, 3_500_000), H200)
    assert row_grid.applies(replace(plain_forward(8, 3_500_000), weight=None, bias=None), H200)


def test_rows_of_forty_megabytes_are_read_once() -> None:
    problem = plain_forward(1, 10_000_000)
    geometry = row_grid.forward_geometry(problem, H200)
    assert geometry is not None
    assert geometry.resident + geometry.held == geometry.vectors(problem)


def test_the_launch_is_cooperative_and_clears_its_words() -> None:
    chosen = plan(plain_forward(7, 2_000_000, "float64"), H200)
    (main,) = chosen.launches
    assert (main.kernel, main.cooperative) == ("row_grid_forward", True)
    (words,) = chosen.scratch
    # Two turns' three numbers a block, in words of half a number and half a tag.
    assert words.bytes == 2 * main.grid * 3 * 2 * 8
    assert dict(main.arguments)["word_pairs"] == words.bytes // 16
