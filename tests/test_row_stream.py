"""Which rows blocks share in bulk, and how; test_long_rows.py and test_row_pipeline_backward.py compute with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from plan_cases import GPUS, plain_backward, plain_forward

from cunorm.plan import Device, plan, row_stream_geometry
from cunorm.plan.row_stream import RowStream
from cunorm.problem import BackwardProblem, ForwardProblem, Matrix, Norm, Problem, Vector

H200, B200, RTX_6000 = (GPUS[arch] for arch in ("sm_90", "sm_100", "sm_120"))
H100 = replace(H200, memory_rate=21.8e3)
SHAPES = [
    (4, 1_000_001), (37, 400_001), (300, 140_003), (64, 700_005), (13, 2_000_001), (3000, 20_001), (600, 100_002),
    (1000, 131_072), (1, 300_001),
]  # fmt: skip
both = pytest.mark.parametrize("make", [plain_forward, plain_backward], ids=["forward", "backward"])


def problems() -> Iterator[Problem]:
    for shape, dtype in itertools.product(SHAPES, ("bfloat16", "float32")):
        backward = plain_backward(*shape, dtype)
        yield from (plain_forward(*shape, dtype, residual=more) for more in (False, True))
        yield from (backward, replace(backward, dresidual_out=backward.x))


@pytest.mark.parametrize("device", [H200, B200, RTX_6000], ids=lambda device: device.arch)
def test_ways_fit_the_device_and_cover_the_row(device: Device) -> None:
    kinds = set()
    ways = [(problem, way) for problem in problems() for way in row_stream_geometry.ways(problem, device)]
    for problem, way in ways:
        forward = isinstance(problem, ForwardProblem)
        assert way.groups * way.blocks_per_row <= device.multiprocessors and way.groups <= problem.rows
        line, part = 128 // problem.itemsize, way.columns_per_block(problem)
        assert part % line == 0 and (way.blocks_per_row - 1) * part < problem.columns <= way.blocks_per_row * part
        assert way.resident == way.vectors(problem) and way.width * problem.itemsize == 16
        # However far behind a line a part begins, its numbers have room, and another vector would have none.
        assert part + line <= way.threads * way.resident * way.width < part + line + way.threads * way.width
        # What warps tell each other is the kernel's own, and of each block a kilobyte is kept.
        assert way.shared_bytes(problem) + 4096 <= device.shared_bytes
        assert way.threads % 32 == 0 and way.threads + 96 <= min(1024, device.threads_per_multiprocessor)
        assert way.turns(problem) == 1 or way.groups * problem.x.row_strides[0] % way.unit(problem) == 0
        kinds.add((forward, way.lag, way.under_way))
    assert {kind[0] for kind in kinds} == {False, True} and len({kind[1:] for kind in kinds}) >= 3


@both
def test_it_takes_contiguous_rows_that_begin_alike_since_sm_90(make: Callable[..., Problem]) -> None:
    def takes(problem: Problem, device: Device = H200) -> bool:
        return row_stream_geometry.geometry(problem, device) is not None

    plain = make(100, 300_001)
    assert takes(plain) and takes(plain, H100) and takes(make(100, 300_000)) and takes(make(1, 700_001))
    assert not takes(plain, GPUS["sm_80"]) and not takes(plain, GPUS["sm_89"])
    assert not takes(make(100, 8000)) and not takes(make(100, 10_000_001)) and not takes(make(100, 300_001, "float64"))
    apart = Matrix("float32", (300_005,), (1,))
    assert not takes(replace(plain, x=apart)) and not takes(replace(plain, x=Matrix("float32", (300_001,), (1,), 1)))
    every = {name: apart for name in ("x", "y", "dy", "dx") if getattr(plain, name, None) is not None}
    assert takes(replace(plain, **every))
    if isinstance(plain, BackwardProblem):
        assert not takes(replace(plain, dx=None))


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_begin_anywhere_do_if_there_are_some(make: Callable[..., Problem], dtype: str) -> None:
    """Few short ones are better read twice, or held by clusters; where memory is slower, all that clusters hold."""
    number = 2 if dtype == "bfloat16" else 4
    mebi, forward = 2**20 // number, make is plain_forward
    assert [plan(make(rows, mebi // 4 + 1, dtype), H200).strategy for rows in (2, 64)] == ["row_split", "row_stream"]
    assert plan(make(64, 2 * mebi + 1, dtype), H200).strategy == "row_stream"
    assert plan(make(1024, mebi // 8 + 1, dtype), H200).strategy == "row_stream"
    assert plan(make(1024, mebi // 8 + 1, dtype), H100).strategy == "row_cluster"
    short_and_many = plan(make(8192, 40_001, dtype), H200).strategy
    assert (short_and_many == "row_stream") == ((dtype, forward) != ("bfloat16", True))
    assert plan(make(64, 2 * mebi + 1, dtype), H100).strategy == "row_stream"
    least = {2: (48, 38), 4: (70, 34)}[number][0 if forward else 1] * 1024 // number
    ways = [plan(make(2048, columns // 2 * 2 + 1, dtype), H200).strategy for columns in (least, least - 2)]
    assert ways[0] == "row_stream" != ways[1]
    gelu = {"bias": Vector(dtype), "norm": Norm(activation="gelu")}
    activated = replace(make(2048, 40_001, dtype), **gelu)
    assert (plan(activated, H200).strategy == "row_stream") == (dtype == "float32")


@both
@pytest.mark.parametrize("device", [H200, B200, RTX_6000], ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_there_are_no_holes_in_length(make: Callable[..., Problem], device: Device, dtype: str) -> None:
    """What is shorter than some row that streams does, too."""
    number = 2 if dtype == "bfloat16" else 4
    sizes = range(1_000_000, 9_000_000, 50_000)
    takes = [row_stream_geometry.geometry(make(64, n // number // 2 * 2 + 1, dtype), device) is not None for n in sizes]
    assert takes[0] and not takes[-1] and takes == sorted(takes, reverse=True)


def test_rows_of_whole_vectors_do_backward_within_limits() -> None:
    def streams(problem: Problem) -> bool:
        return plan(problem, H200).strategy == "row_stream"

    assert not any(streams(plain_forward(256, columns, "bfloat16")) for columns in (100_000, 131_072, 262_144))
    sizes = (90_000, 100_000, 190_000, 262_144, 600_000)
    assert [streams(plain_backward(256, columns, "bfloat16")) for columns in sizes] == [False, True, True, True, False]
    counts = (2, 4, 300, 400)
    assert [streams(plain_backward(rows, 262_144, "bfloat16")) for rows in counts] == [False, True, True, False]
    assert [streams(plain_backward(256, columns)) for columns in (60_000, 65_536, 655_360, 1_000_000)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not streams(replace(plain_backward(256, 131_072), norm=Norm(centered=False)))


@both
@pytest.mark.parametrize(("columns", "dtype"), [(50_257, "bfloat16"), (131_073, "bfloat16"), (300_001, "float32")])
def test_batches_have_few_kernels(make: Callable[..., Problem], columns: int, dtype: str) -> None:
    counts = (*range(1, 70), *range(70, 3000, 37))
    chosen = [plan(make(rows, columns, dtype), H200) for rows in counts]
    streams = [item.launches[0] for item in chosen if item.strategy == "row_stream"]
    assert len(streams) > 100 and len({(item.kernel, item.constants) for item in streams}) <= 6


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_launch_is_cooperative_and_clears_its_words(dtype: str) -> None:
    for make in (plain_forward, plain_backward):
        chosen = plan(make(1000, 300_001, dtype), H200)
        main, *others = chosen.launches
        assert main.cooperative
        assert main.kernel == f"row_stream_{'forward' if make is plain_forward else 'backward'}"
        # Several groups of blocks leave sums each.
        assert [item.kernel for item in others] == ([] if make is plain_forward else ["column_sums"])
        words, constants, arguments = chosen.scratch[0], dict(main.constants), dict(main.arguments)
        groups, turns = main.grid // int(str(arguments["blocks_per_row"])), 2 * int(constants["LAG"]) + 2
        # Of 16 bytes, for as many blocks as the lanes of a warp collect.
        assert words.bytes == turns * groups * 32 * int(constants["PARTS_PER_LANE"]) * 16
        assert (arguments["words"], arguments["word_pairs"]) == (words.name, words.bytes // 16)


def test_a_residual_is_in_shared_memory_until_it_is_summed() -> None:
    plain, added = plain_forward(100, 200_001), plain_forward(100, 200_001, residual=True)
    way = RowStream(4, resident=4, blocks_per_row=33, groups=4, rows_ahead=6, lag=3, threads=416)
    assert (way.shared_bytes(plain), way.shared_bytes(added)) == (6 * 416 * 64, 9 * 416 * 64)
