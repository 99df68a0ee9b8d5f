"""Which rows blocks share in a pipeline, and how; test_long_rows.py computes with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from plan_cases import GPUS, plain_backward, plain_channel_backward, plain_channel_forward, plain_forward

from cunorm.plan import Device, plan, row_pipeline_geometry
from cunorm.plan.row_memory import has_several_channels
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import DTYPES, BackwardProblem, ChannelForward, ForwardProblem, Matrix, Problem, Vector

H200, A100, RTX, RTX_6000 = (GPUS[arch] for arch in ("sm_90", "sm_80", "sm_89", "sm_120"))
H100 = replace(H200, memory_rate=21.8e3)
SHAPES = [
    (4, 1_000_000), (37, 400_000), (300, 200_000), (64, 1_600_000), (100, 700_000), (1000, 300_000), (2000, 131_072),
    (13, 2_000_000),
]  # fmt: skip


def long_problems(device: Device) -> Iterator[tuple[Problem, RowPipeline]]:
    """Those of rows and of channels that are shared, with how they are."""
    for shape, dtype, more in itertools.product(SHAPES, ("float16", "float32"), (False, True)):
        backward = plain_backward(*shape, dtype)
        problems: list[Problem | None] = [
            plain_forward(*shape, dtype, residual=more),
            replace(backward, dresidual_out=backward.x) if more else backward,
        ]
        for make in (plain_channel_forward, plain_channel_backward):
            problems.append(as_rows(make(shape[0], 3, 1, shape[1] // 8 * 8, dtype)))
            problems.append(as_rows(make(shape[0], 6, 3, shape[1] // 48 * 16, dtype)))
        for problem in problems:
            assert problem is not None
            way = row_pipeline_geometry.geometry(problem, device)
            if way is not None:
                yield problem, way


@pytest.mark.parametrize("device", [H200, A100, RTX, RTX_6000], ids=lambda device: device.arch)
def test_geometries_fit_the_device_and_cover_the_row(device: Device) -> None:
    kinds = set()
    for problem, way in long_problems(device):
        by = "columns" if problem.channels is None else problem.channels.channels_per_row
        kinds.add((type(problem), by, way.blocks_per_multiprocessor))
        share, blocks = way.blocks_per_multiprocessor, way.blocks_per_row
        assert way.groups * blocks <= device.multiprocessors * share
        assert way.groups <= problem.rows
        # Of each block a kilobyte is the kernel's own, and another is kept for it.
        assert share * (way.shared_bytes(problem) + 2048) <= device.shared_bytes + 1024
        assert share * (way.threads + 64) <= device.threads_per_multiprocessor
        part = way.columns_per_block(problem)
        several = has_several_channels(problem)
        channels = problem.channels.channels_per_row if problem.channels is not None and several else 1
        of_channel, columns = blocks // channels, problem.columns // channels
        assert blocks == channels * of_channel
        assert part % way.width == 0 and (of_channel - 1) * part < columns <= of_channel * part
        assert way.resident == way.vectors(problem) and way.width * DTYPES[problem.x.dtype].itemsize == 16
        assert 1 <= way.lag < way.rows_ahead
    assert {(type_, by) for type_, by, _ in kinds} == set(
        itertools.product((ForwardProblem, BackwardProblem), ("columns", 1, 3))
    )


@pytest.mark.parametrize("make", [plain_forward, plain_backward], ids=["forward", "backward"])
def test_it_takes_long_contiguous_rows_since_sm_80(make: Callable[..., Problem]) -> None:
    def takes(problem: Problem, device: Device = H200) -> bool:
        return row_pipeline_geometry.geometry(problem, device) is not None

    plain = make(100, 700_000)
    assert takes(plain) and takes(make(100, 300_000, "float16"), A100) and takes(make(100, 100_000), RTX)
    assert not takes(make(100, 300_000, "float16"), GPUS["sm_75"])
    assert takes(make(1, 700_000))
    assert not takes(make(100, 8_000)) and not takes(make(100, 10_000_000))
    assert not takes(make(100, 700_000, "float64"))
    assert not takes(make(100, 400_001))
    assert not takes(replace(plain, x=Matrix("float32", (700_000,), (1,), 4)))
    assert takes(replace(plain, x=Matrix("float32", (700_004,), (1,))))
    assert not takes(replace(plain, x=Matrix("float32", (700_001,), (1,))))
    assert not takes(replace(plain, x=Matrix("float32", (1,), (100,))))


@pytest.mark.parametrize("make", [plain_forward, plain_backward], ids=["forward", "backward"])
def test_few_turns_are_taken_by_a_power_of_two_of_groups(make: Callable[..., Problem]) -> None:
    """Else batches of 1 to 32 rows would have 20 kernels to compile. No more than a quarter of the groups are idle."""
    ways = set()
    for columns, rows in itertools.product((300_000, 500_000, 1_000_000), range(1, 33)):
        way = row_pipeline_geometry.geometry(make(rows, columns), H200)
        assert way is not None
        turns = -(-rows // way.groups)
        ways.add((columns, way.groups, way.lag))
        if turns <= 4:
            assert way.groups & (way.groups - 1) == 0 and rows * 4 >= 3 * turns * way.groups
    assert len(ways) <= 3 * 4


def test_two_rows_are_under_way_and_a_few_wait_for_their_statistics() -> None:
    """A turn more where there are more than a few; where there is no room, rows wait for each other."""
    for device in (H200, A100, RTX):
        for problem, way in long_problems(device):
            waiting = {2} if way.turns(problem) <= 2 else {2, 3}
            assert way.lag in waiting and way.rows_ahead in (way.lag + 2, 3)
    few, many = (row_pipeline_geometry.geometry(plain_forward(rows, 1_000_000), H200) for rows in (4, 6))
    assert few is not None and many is not None and (few.lag, many.lag) == (2, 3)


def test_weights_and_sums_leave_no_room_for_others() -> None:
    forward, backward = plain_forward(100, 1_000_000, "float16"), plain_backward(100, 1_000_000, "float16")
    assert row_pipeline_geometry.geometry(forward, H200) and row_pipeline_geometry.geometry(backward, H200)
    double = Vector("float64")
    assert row_pipeline_geometry.geometry(replace(forward, weight=double, bias=double), H200) is None
    assert row_pipeline_geometry.geometry(replace(backward, weight=double), H200) is None
    assert row_pipeline_geometry.geometry(replace(backward, dx=None), H200) is None
    longer = plain_forward(100, 3_500_000, "float16")
    assert row_pipeline_geometry.geometry(longer, H200) is None
    assert row_pipeline_geometry.geometry(replace(longer, weight=None, bias=None), H200) is not None


def test_clusters_have_rows_that_are_shorter_or_few() -> None:
    """A GPU without clusters has no such choice."""
    for make in (plain_forward, plain_backward):
        assert plan(make(2000, 50_000), H200).strategy == "row_cluster"
        assert plan(make(64, 200_000), H100).strategy == plan(make(64, 800_000), H200).strategy == "row_pipeline"
        assert plan(make(2000, 50_000), A100).strategy == plan(make(8, 100_000), RTX).strategy == "row_pipeline"
    # As many clusters as run at once.
    assert H200.groups(16) == 7
    assert [plan(plain_forward(rows, 200_000), H200).strategy for rows in (7, 8)] == ["row_cluster", "row_pipeline"]
    # Of as many bytes as clusters take best, forward; backward too, where memory is slower.
    forward, backward = plain_forward(512, 131_072), plain_backward(512, 131_072)
    ways = [plan(problem, device).strategy for problem in (forward, backward) for device in (H200, H100)]
    assert ways == ["row_cluster", "row_cluster", "row_stream", "row_cluster"]


@pytest.mark.parametrize(("together", "points"), [(1, 1_200_000), (4, 2**18), (8, 125_001), (8, 125_000)])
def test_channels_begin_with_a_vector(together: int, points: int) -> None:
    for make in (plain_channel_forward, plain_channel_backward):
        problem = as_rows(make(20, 16, together, points, "float16"))
        assert problem is not None
        assert (row_pipeline_geometry.geometry(problem, H200) is not None) == (points % 8 == 0)


def test_parts_of_a_channel_are_whole_lines_where_it_is() -> None:
    for points in (2**18, 125_000):
        problem = as_rows(plain_channel_forward(20, 16, 8, points, "float16"))
        assert problem is not None
        way = row_pipeline_geometry.geometry(problem, H200)
        assert way is not None and way.blocks_per_row % 8 == 0
        assert (way.columns_per_block(problem) % 64 == 0) == (points % 64 == 0)


def test_groups_are_shared_by_all_blocks_where_clusters_take_longer() -> None:
    """Those of 640 KB and more, backward without an activation of 1 MB and more."""
    for make, activation, ways in (
        (plain_channel_forward, None, ["channel_slab", "row_pipeline", "row_pipeline"]),
        (plain_channel_backward, None, ["channel_slab", "channel_slab", "row_pipeline"]),
        (plain_channel_backward, "silu", ["channel_slab", "row_pipeline", "row_pipeline"]),
    ):
        groups = [make(2, 32 * channels, channels, 2**14, "float16", activation) for channels in (10, 20, 32)]
        assert [plan(problem, H200).strategy for problem in groups] == ways
    few = [plain_channel_forward(1, 8 * channels, channels, 2**16, "float16") for channels in (6, 8, 16)]
    assert [plan(problem, H200).strategy for problem in few] == ["row_cluster", "row_pipeline", "row_pipeline"]
    for plain in (plain_channel_forward(2, 320, 10, 64**2, "float16"), plain_channel_backward(2, 320, 10, 64**2)):
        bare = replace(plain, weight=None, bias=None)
        bare = bare if isinstance(bare, ChannelForward) else replace(bare, dweight=None, dbias=None)
        assert plan(bare, H200).strategy == "row_cluster", "nor are short ones without weights"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_launch_is_cooperative_and_clears_its_words(dtype: str) -> None:
    for make in (plain_forward, plain_backward):
        chosen = plan(make(1000, 400_000, dtype), H100)
        main, *others = chosen.launches
        assert main.cooperative
        assert main.kernel == f"row_pipeline_{'forward' if make is plain_forward else 'backward'}"
        # Several groups of blocks leave sums each.
        assert [item.kernel for item in others] == ([] if make is plain_forward else ["column_sums"])
        words, constants, arguments = chosen.scratch[0], dict(main.constants), dict(main.arguments)
        groups, turns = main.grid // int(str(arguments["blocks_per_row"])), 2 * int(constants["LAG"])
        # Of 16 bytes, for as many blocks as the lanes of a warp merge.
        assert words.bytes == turns * groups * 32 * int(constants["PARTS_PER_LANE"]) * 16
        assert (arguments["words"], arguments["word_pairs"]) == (words.name, words.bytes // 16)
