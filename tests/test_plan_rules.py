"""Every plan keeps the rules of plan_rules.py, and so does every geometry that tuning may try."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from plan_cases import (
    DEVICES,
    Problem,
    contiguous_channel_problems,
    devices,
    many,
    plain_backward,
    plain_channel_backward,
    plain_channel_forward,
    plain_forward,
    plan_rows,
    problems,
    very_many,
)
from plan_coverage_rules import rows_and_columns_are_covered
from plan_rules import RULES, launches_may_overlap, within_the_limits_of_cuda

from cunorm import kernels
from cunorm.plan import Device, plan, plan_with, row_candidates, row_fit, row_geometry, rows
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import DTYPES, BackwardProblem, ChannelProblem, ForwardProblem, Matrix, Vector


@very_many
@given(problem=problems(), device=devices)
def test_every_plan_keeps_the_rules(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
    for rule in RULES:
        rule(problem, device, chosen)


@very_many
@given(problem=contiguous_channel_problems(), device=devices)
def test_every_plan_of_channels_as_rows_keeps_the_rules(problem: ChannelProblem, device: Device) -> None:
    chosen, rows = plan_rows(problem, device), as_rows(problem)
    if chosen is not None:
        assert rows is not None
        for rule in RULES:
            rule(rows, device, chosen)


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_odd_rows_with_one_vector_of_sixteen_bits_have_columns(dtype: str, device: str) -> None:
    """What threads keep of such a vector is less than a register for each of their numbers, but is not nothing."""
    for columns, kept in itertools.product((20_001, 66_001, 140_001, 300_001, 500_001), ("weight", "bias")):
        forward, backward = plain_forward(64, columns, dtype), plain_backward(64, columns, dtype)
        vectors: dict[str, Vector | None] = {"weight": None, "bias": None, kept: Vector("bfloat16")}
        only_dx = {"weight": Vector("bfloat16"), "dweight": None, "dbias": None}
        for problem in (dataclasses.replace(forward, **vectors), dataclasses.replace(backward, **only_dx)):
            for rule in RULES:
                rule(problem, DEVICES[device], plan(problem, DEVICES[device]))


def _long_rows(dtype: str) -> Iterator[Problem]:
    """Rows that all blocks of a device share, if it has room for them: few and many, with all that takes such room."""
    weights = itertools.cycle([dtype, None, "float32", "float16", "float64"])
    for count, row_bytes, more in itertools.product((4, 13, 100, 2000), (2**19, 2**20, 3_000_000, 2**23), (0, 1)):
        x, weight = Matrix(dtype, (row_bytes // 128 * 128 // DTYPES[dtype].itemsize,), (1,)), next(weights)
        vector, added, sums = weight and Vector(weight), x if more else None, weight or dtype
        shape = (count,), x.row_strides
        yield ForwardProblem(*shape, x, added, x, added, vector, vector, True, 1e-5)
        yield BackwardProblem(*shape, x, x, added, x, vector, None, sums, None if count == 13 else sums)
    # Of one channel, and of several, which are left to others.
    for sizes in [
        (20, 2, 1, 2**20), (20, 8, 4, 2**18), (40, 8, 8, 125_001), (5, 36, 18, 10_000), (2, 4, 1, 2**22),
        (4, 4, 2, 2**20),
    ]:  # fmt: skip
        for make in (plain_channel_forward, plain_channel_backward):
            problem = as_rows(make(*sizes, dtype))
            assert problem is not None
            yield problem


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_rows_that_all_blocks_share_keep_the_same_rules(device: str) -> None:
    """Drawn problems seldom have rows so long."""
    kinds = set()
    for problem in itertools.chain(*map(_long_rows, DTYPES)):
        way = rows.way_of(problem, DEVICES[device])
        if way is None:
            continue
        chosen = rows.plan_with(problem, DEVICES[device], way)
        for rule in RULES:
            rule(problem, DEVICES[device], chosen)
        for item in chosen.launches:
            kinds.add((item.kernel, dict(item.constants).get("WEIGHTS_OF")))
            kinds |= {
                (item.kernel, name) for name in ("HAS_RESIDUAL", "HAS_DRESIDUAL") if dict(item.constants).get(name)
            }
    assert kinds >= {("row_pipeline_forward", kind) for kind in ("columns", "part", "HAS_RESIDUAL")}
    assert kinds >= {("row_pipeline_backward", kind) for kind in ("columns", "part", "HAS_DRESIDUAL")}
    assert kinds >= {("row_grid_forward", "columns")}
    held = {("row_held_forward", "part"), ("row_held_backward", "part")}
    assert (kinds & held == held) == (device == "sm_90")


def _tuned_problems() -> dict[str, Problem]:
    def lying(dtype: str, rows: int, columns: int, stride: int, offset: int, more: bool = False) -> list[Problem]:
        matrix, vector = Matrix(dtype, (stride,), (1,), offset), Vector(dtype)
        added = matrix if more else None
        return [
            ForwardProblem((rows,), (columns,), matrix, added, matrix, added, vector, vector, True, 1e-5),
            BackwardProblem((rows,), (columns,), matrix, matrix, added, matrix, vector, None, dtype, dtype),
        ]

    return {
        f"{dtype} {rows}x{columns} stride {stride} offset {offset} {type(problem).__name__}": problem
        for dtype, rows, columns, stride, offset, more in [
            ("bfloat16", 4096, 64, 64, 0, False),
            ("bfloat16", 1000, 5120, 5120, 0, True),
            ("float32", 3, 10, 10, 0, False),
            ("float32", 100_000, 7, 7, 4, True),
            ("float16", 64, 4097, 4097, 0, False),
            ("bfloat16", 64, 1023, 1024, 2, True),
            ("float32", 1000, 100_000, 100_000, 0, False),
            ("float16", 33, 50_257, 50_258, 0, True),
            ("float64", 77, 3001, 3001, 0, False),
            ("float64", 500, 12_288, 16_384, 0, True),
        ]
        for problem in lying(dtype, rows, columns, stride, offset, more)
    }


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "few clusters"])
@pytest.mark.parametrize("problem", list(_tuned_problems().values()), ids=list(_tuned_problems()))
def test_what_tuning_tries_keeps_the_same_rules(problem: Problem, device: str) -> None:
    found = list(row_candidates.candidates(problem, DEVICES[device]))
    assert len(found) == len(set(found))
    assert found or device != "sm_90"
    for geometry in found:
        chosen = plan_with(problem, DEVICES[device], geometry)
        assert chosen.strategy in ("row_block", "row_cluster", "row_bulk")
        for rule in RULES:
            rule(problem, DEVICES[device], chosen)


@many
@given(problems(), devices)
def test_the_built_in_choice_fits(problem: Problem, device: Device) -> None:
    if isinstance(problem, ForwardProblem):
        geometry = row_geometry.forward_geometry(problem, device)
    else:
        geometry = row_geometry.backward_geometry(problem, device) if problem.columns else None
    if geometry is not None:
        assert row_fit.fits(geometry, problem, device)


@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_usual_sizes_are_within_the_limits(device: Device) -> None:
    """Where shared memory is scarce: three tensors, and weights of as many bytes or more."""
    for dtype, weight, residual in itertools.product(DTYPES, (None, "float32", "float64"), (False, True)):
        for columns in (10, 256, 1024, 4096, 4097, 5120, 8192, 10_000, 12_288, 16_384, 20_001, 50_257, 65_536, 262_144):
            x = Matrix(dtype, (columns,), (1,))
            added, vector = x if residual else None, weight and Vector(weight)
            shape = (4096,), (columns,)
            for problem in (
                ForwardProblem(*shape, x, added, x, added, vector, vector, True, 1e-5),
                BackwardProblem(*shape, x, x, added, x, vector, None, weight, weight),
            ):
                chosen = plan(problem, device)
                within_the_limits_of_cuda(problem, device, chosen)
                rows_and_columns_are_covered(problem, device, chosen)


def _covering_problems() -> list[Problem]:
    first_axis = Matrix("float32", (1,), (512,))
    problems: list[Problem] = [
        ForwardProblem((512,), (64,), first_axis, None, first_axis, None, None, None, False, 0.0),
        BackwardProblem((512,), (64,), first_axis, first_axis, None, first_axis, None, None, "float32", None),
    ]
    for columns in (1, 10, 64, 768, 4097, 100_000, 1_000_000, 3_000_001, 10_000_000, 100_000_000):
        problems += [plain_forward(16, columns), plain_backward(16, columns)]
    return [*problems, plain_forward(4, 4_000_000), plain_forward(9000, 8193, "float16")]


def test_every_constant_is_used_by_its_kernel() -> None:
    """A constant that a kernel does not read would compile the same text again and again."""
    for problem in _covering_problems():
        for item in plan(problem, DEVICES["sm_90"]).launches:
            text = kernels.kernel_source(item.kernel, {})
            unused = [name for name, _ in item.constants if name not in text]
            assert not unused, (item.kernel, unused)


def test_launches_of_every_kernel_may_overlap() -> None:
    """Drawn problems seldom have rows for all blocks."""
    later = set()
    for problem in _covering_problems():
        chosen = plan(problem, DEVICES["sm_90"])
        launches_may_overlap(problem, DEVICES["sm_90"], chosen)
        later |= {item.kernel for item in chosen.launches[1:]}
    assert later == {
        "column_sums", "row_block_forward", "row_split_forward", "row_split_backward", "row_weight_gradients",
        "split_merge"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(8192, 1024), (16384, 4096), (4096, 8192), (65536, 256), (1024, 65536)], ids=str)
def test_the_workspace_of_a_usual_training_step(shape: tuple[int, int], dtype: str) -> None:
    for problem in (plain_forward(*shape, dtype), plain_backward(*shape, dtype)):
        assert plan(problem, DEVICES["sm_90"]).workspace_bytes <= problem.bytes_moved // 4
