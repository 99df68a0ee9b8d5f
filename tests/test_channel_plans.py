"""Which way a norm of channels goes, and how its numbers lie: what was measured to be faster comes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from channel_plan_rules import tile_channels
from plan_cases import DEVICES, plain_channel_norm

from cunorm.plan import Device, channel_slab, plan
from cunorm.plan.channel_tiles import Direction, along_planes

# Its memory is not as fast as that of an H200, which Device() is.
H100 = dataclasses.replace(Device(), memory_rate=21.8e3)


def _strategies(*arguments: Any, **options: Any) -> list[str]:
    return [plan(problem, Device()).strategy for problem in plain_channel_norm(*arguments, **options)]


@pytest.mark.parametrize(
    ("shape", "dtype", "arch", "strategy"),
    [
        ((8, 256, 32**3), "float32", "sm_90", "channel_slab"),
        ((4, 64, 192**2), "bfloat16", "sm_90", "channel_slab"),
        ((1, 3, 256**2), "float16", "sm_90", "channel_slab"),
        ((32, 128, 64**2), "float32", "sm_90", "row_block"),  # 16 KB
        ((1, 64, 128**2), "float32", "sm_90", "row_cluster, row_block"),  # of 64 KB not one for each multiprocessor
        ((2, 16, 96**3), "float16", "sm_90", "row_pipeline"),
        ((8, 32, 32**3), "float64", "sm_90", "row_cluster"),
        ((4, 64, 192**2), "float16", "sm_89", "row_block, row_pipeline"),
    ],
)
def test_channels_of_some_size_are_slabs(shape: tuple[int, int, int], dtype: str, arch: str, strategy: str) -> None:
    forward, backward = (plan(problem, DEVICES[arch]).strategy for problem in plain_channel_norm(shape, dtype))
    assert ", ".join(dict.fromkeys((forward, backward))) == strategy


def test_small_tensors_have_short_vectors_along_the_channels() -> None:
    """Where there are few numbers, more threads have some; elsewhere vectors are as long as they can be."""

    def vectors(shape: tuple[int, int, int], channels_per_set: int | None) -> set[int]:
        problems = plain_channel_norm(shape, "float16", channels_per_set, last=True)
        every = [dict(item.constants) for problem in problems for item in plan(problem, Device()).launches]
        return {int(constants["VECTOR"]) for constants in every if "ALONG_CHANNELS" in constants}

    assert vectors((1, 8, 16), 1) == {2}
    for shape, channels_per_set in (((4, 64, 196), 1), ((4, 64, 196), None), ((2, 640, 64), 20)):
        assert vectors(shape, channels_per_set) <= {2, 4}
    for shape in ((8, 320, 4096), (8, 512, 1024)):
        assert vectors(shape, shape[1] // 32) == {8}


def test_slabs_where_rows_of_clusters_are_slower() -> None:
    assert _strategies((8, 32, 64**3), "float16") == ["channel_slab", "channel_slab"]
    assert _strategies((4, 256, 32**3), activation="silu") == _strategies((4, 256, 32**3)) == ["channel_slab"] * 2
    for shape in ((1, 512, 128**2), (4, 512, 128**2), (1, 256, 256**2), (8, 128, 256**2)):
        for activation in (None, "silu"):
            for problem in plain_channel_norm(shape, "float16", shape[1] // 32, activation=activation):
                assert plan(problem, H100).strategy == "channel_slab"
    for problem in plain_channel_norm((4, 512, 64**2), "float16", 16):
        assert plan(problem, H100).strategy == "row_cluster", "short ones are faster as rows"


@pytest.mark.parametrize(
    ("shape", "dtype", "together", "activation", "expected"),
    [
        ((8, 32, 64**3), "float32", 1, None, ["channel_slab", "row_pipeline"]),
        ((8, 32, 64**3), "float16", 1, "silu", ["channel_slab", "row_cluster"]),
        ((8, 128, 256**2), "float16", 4, None, ["channel_slab", "channel_slab"]),
        ((8, 128, 256**2), "float16", 4, "silu", ["channel_slab", "row_cluster"]),
        ((2, 256, 256**2), "float32", 8, None, ["row_pipeline", "row_pipeline"]),
        ((8, 512, 64**2), "float32", 16, "silu", ["channel_slab", "row_cluster"]),
        ((1, 3, 512**2), "float32", 1, None, ["channel_slab", "channel_slab"]),
    ],
)
def test_rows_outrun_some_slabs_where_memory_is_fast(
    shape: tuple[int, int, int], dtype: str, together: int, activation: str | None, expected: list[str]
) -> None:
    problems = plain_channel_norm(shape, dtype, together, activation=activation)
    assert [plan(problem, Device()).strategy for problem in problems] == expected
    if "row_cluster" in expected:
        assert [plan(problem, H100).strategy for problem in problems] != expected


@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "expected"),
    [
        # Threads have as many vectors in every row, or not; all run at once; there are many or few groups.
        ((8, 640, 64**2), "float16", None, ["row_cluster", "channel_slab"]),
        ((8, 640, 64**2), "float16", "silu", ["row_cluster", "row_cluster"]),
        ((8, 320, 72**2), "float16", "silu", ["channel_slab", "row_cluster"]),
        ((8, 320, 104**2), "float16", "silu", ["channel_slab", "channel_slab"]),
        ((4, 512, 128**2), "float16", "silu", ["channel_slab", "row_cluster"]),
        ((1, 512, 128**2), "float16", "silu", ["channel_slab", "channel_slab"]),
        ((1, 640, 64**2), "float16", None, ["row_cluster", "row_cluster"]),
        ((4, 960, 64**2), "float16", None, ["row_cluster", "channel_slab"]),
        ((4, 1920, 32**2), "float16", "silu", ["row_cluster", "row_cluster"]),
        ((8, 256, 64**2), "float32", None, ["channel_slab", "channel_slab"]),
        ((2, 512, 64**2), "float32", None, ["channel_slab", "channel_slab"]),
        ((4, 1280, 32**2), "float32", None, ["row_cluster", "row_cluster"]),
        ((4, 1280, 32**2), "float32", "silu", ["row_cluster", "channel_slab"]),
        ((4, 960, 64**2), "float32", None, ["row_cluster", "row_cluster"]),
        ((4, 512, 128**2), "float32", "silu", ["row_pipeline", "row_pipeline"]),
    ],
)
def test_groups_that_are_slabs_where_memory_is_fast(
    shape: tuple[int, int, int], dtype: str, activation: str | None, expected: list[str]
) -> None:
    assert _strategies(shape, dtype, shape[1] // 32, activation=activation) == expected


@pytest.mark.parametrize("channels_per_set", [1, 3, 4, 5, 6, 10, 14, 15, 17, 20, 25, 30, 32, 34, 40, 45, 52, 60, 64])
def test_slabs_along_the_points_of_sets_of_many_numbers_of_channels(channels_per_set: int) -> None:
    """A channel's threads are whole warps, or a power of two, so that shuffles can sum it: some sets have no slabs."""
    for problem in plain_channel_norm((4, 32 * channels_per_set, 64**2), "float16", channels_per_set):
        every = [slab.tiles for slab in channel_slab.candidates(problem, Device())]
        assert bool(every) == (channels_per_set not in (17, 25, 34, 45, 64))
        for tiles in every:
            assert tiles.channel_lanes % channels_per_set == 0 and tiles.holders == tiles.threads
            assert tiles.threads % 32 == 0 and tiles.threads <= 512
            assert tiles.point_lanes % 32 == 0 or 32 % tiles.point_lanes == 0
    _, backward = plain_channel_norm((8, 320, 128**2), "float16", 10, activation="silu")
    assert dict(plan(backward, Device()).launches[0].constants)["CHANNEL_LANES"] == 10


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set", "activation", "expected"),
    [
        # Channels of a tile, groups of blocks, slabs in shared memory; forward and backward.
        ((8, 512, 64**2), "float16", 16, None, (None, None)),
        ((8, 512, 64**2), "float16", 16, "silu", (None, (64, 8, 3))),
        ((8, 320, 64**2), "float16", 10, None, ((320, 2, 4), None)),
        ((8, 320, 64**2), "float16", 10, "silu", ((320, 2, 4), (160, 2, 4))),
        ((8, 320, 64**2), "float32", 10, None, ((320, 1, 5), None)),
        ((4, 640, 128**2), "float16", 20, "silu", ((160, 1, 5), (80, 1, 5))),
        ((8, 128, 256**2), "float16", 4, None, ((64, 1, 3), None)),
        ((8, 128, 256**2), "float16", 4, "silu", ((64, 1, 3), (32, 1, 3))),
        ((4, 256, 32**3), "float32", 1, None, ((32, 1, 6), None)),
        ((8, 256, 32**3), "float16", 1, None, ((64, 1, 6), None)),
    ],
)
def test_slabs_in_a_pipeline_lie_as_was_timed(
    shape: tuple[int, int, int],
    dtype: str,
    channels_per_set: int,
    activation: str | None,
    expected: tuple[tuple[int, int, int] | None, ...],
) -> None:
    found: list[tuple[Any, ...] | None] = []
    for problem in plain_channel_norm(shape, dtype, channels_per_set, last=True, activation=activation):
        chosen = plan(problem, Device())
        if chosen.strategy != "channel_pipeline":
            found.append(None)
            continue
        item = chosen.launches[0]
        constants, arguments = dict(item.constants), dict(item.arguments)
        groups = item.grid // int(arguments["blocks_per_slab"])
        found.append((tile_channels(constants), groups, constants["AHEAD"]))
    assert tuple(found) == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set", "expected"),
    [
        # Channel lanes, threads and blocks of slabs, of which several waves run.
        ((8, 512, 64**2), "float16", 16, ((8, 128, 16), (4, 128, 16))),
        ((2, 512, 64**2), "float32", 16, (None, (8, 256, 16))),
        ((8, 320, 64**2), "float32", 10, (None, (10, 320, 16))),
        ((64, 1024, 196), "float32", None, ((8, 256, 16), None)),
    ],
)
def test_slabs_in_waves_have_whole_lines_where_memory_is_fast(
    shape: tuple[int, int, int],
    dtype: str,
    channels_per_set: int | None,
    expected: tuple[tuple[int, int, int] | None, tuple[int, int, int] | None],
) -> None:
    """As was timed, the channels last; on an H100 they lie otherwise. None for what is not asked."""
    for problem, way in zip(plain_channel_norm(shape, dtype, channels_per_set, last=True), expected, strict=True):
        if way is None:
            continue
        found = []
        for device in (Device(), H100):
            launch = plan(problem, device).launches[0]
            lanes = dict(launch.constants)["CHANNEL_LANES"] if launch.kernel.startswith("channel_slab") else None
            found.append((lanes, launch.block[0], launch.cluster))
        assert found[0] == way != found[1]


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set"),
    [((2, 512, 64**2), "float16", 16), ((8, 1280, 16**2), "float16", 40), ((64, 2048, 49), "float32", None)],
)
def test_few_numbers_are_not_worth_a_pipeline(
    shape: tuple[int, int, int], dtype: str, channels_per_set: int | None
) -> None:
    assert _strategies(shape, dtype, channels_per_set, last=True)[0] == "channel_slab"


def test_long_rows_that_leave_multiprocessors_idle_are_shared() -> None:
    forward, backward = (plan(problem, Device()) for problem in plain_channel_norm((2, 640, 64**2), "float16", 20))
    assert forward.launches[0].cluster == 8 and backward.launches[0].cluster == 2


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((8, 1280, 16**2), None, [(1, 256, "ahead"), (1, 256, "ahead")]),
        ((8, 544, 64**2), "silu", [(4, 256, "ahead"), (4, 512, "ahead")]),
        ((16, 512, 32**2), None, [(1, 256, "ahead"), (1, 512, "ahead")]),
        ((16, 512, 32**2), "silu", [(1, 256, "ahead"), (2, 256, "ahead")]),
        ((4, 640, 32**2), "silu", [(1, 256, "ahead"), (1, 512, "direct")]),
        ((8, 960, 32**2), "silu", [(1, 256, "ahead"), (6, 128, "ahead")]),
        ((4, 1920, 32**2), "silu", [(4, 128, "ahead"), (12, 128, "ahead")]),
        ((2, 640, 32**2), None, [(2, 256, "direct"), (2, 256, "direct")]),
    ],
)
def test_groups_lie_over_blocks_as_was_timed(
    shape: tuple[int, int, int], activation: str | None, expected: list[tuple[int, int, str]]
) -> None:
    """Blocks of a group, their threads, and how its numbers come; its channels' weights come beside them."""
    problems = plain_channel_norm(shape, "float16", shape[1] // 32, activation=activation)
    for problem, way in zip(problems, expected, strict=True):
        launch = plan(problem, Device()).launches[0]
        constants = dict(launch.constants)
        assert (launch.cluster, launch.block[0], constants["STAGE"]) == way
        assert constants["WEIGHTS"] == "staged"


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((2, 640, 64**2), "silu", [(8, 10, "ahead", "staged"), (10, 4, "ahead", "staged")]),
        ((2, 640, 64**2), None, [(8, 10, "ahead", "staged"), (2, 10, "direct", "late")]),
        ((2, 960, 64**2), "silu", [(2, 15, "direct", "staged"), (15, 4, "ahead", "staged")]),
        ((2, 960, 64**2), None, [(8, 8, "ahead", "staged"), None]),
    ],
)
def test_few_long_groups_run_all_at_once_where_they_can(
    shape: tuple[int, int, int], activation: str | None, expected: list[tuple[int, int, str, str] | None]
) -> None:
    """Blocks of a group, vectors of a thread, how these come and how the weights; None for slabs."""
    problems = plain_channel_norm(shape, "float16", shape[1] // 32, activation=activation)
    for problem, way in zip(problems, expected, strict=True):
        launch = plan(problem, Device()).launches[0]
        assert launch.kernel.startswith("channel_slab" if way is None else "row_block")
        if way is None:
            continue
        constants = dict(launch.constants)
        assert (launch.cluster, constants["VECTORS"], constants["STAGE"], constants["WEIGHTS"]) == way


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set", "expected"),
    [
        ((64, 64, 56**2), "float16", None, "channel_grid"),
        ((8, 64, 128**2), "float16", None, "channel_grid"),
        ((64, 144, 56**2), "float16", None, "channel_grid"),
        ((1, 64, 256**2), "float16", 1, "channel_grid"),
        ((2, 512, 128**2), "float16", 16, "channel_pipeline"),
    ],
)
def test_slower_memory_makes_reading_twice_worse(
    shape: tuple[int, int, int], dtype: str, channels_per_set: int | None, expected: str
) -> None:
    """Backward, as was timed on an H100."""
    _, backward = plain_channel_norm(shape, dtype, channels_per_set, last=True)
    assert plan(backward, Device(memory_rate=21.8e3)).strategy == expected


def test_groups_that_are_slabs_backward_under_an_activation() -> None:
    assert _strategies((32, 128, 7**2), "float16", 4, activation="silu") == ["row_block", "channel_slab"]
    assert _strategies((32, 512, 7**2), "float16", 16, activation="silu") == ["row_block", "row_block"]
    assert _strategies((16, 256, 65**2), "float32", 8, activation="silu") == ["row_cluster", "channel_slab"]
    assert _strategies((16, 256, 65**2), "float32", 8) == ["row_cluster", "row_cluster"]
    # Where there are no weights, there is none that has no room.
    for shape, dtype in (((16, 256, 65**2), "float32"), ((16, 512, 33**2), "float16")):
        _, backward = plain_channel_norm(shape, dtype, shape[1] // 32, activation="silu")
        assert plan(dataclasses.replace(backward, weight=None, bias=None), Device()).strategy == "row_cluster"
    assert _strategies((16, 512, 32**2), "float16", 16, activation="silu") == ["row_block", "row_cluster"]


@pytest.mark.parametrize(("shape", "arch"), [((2, 128, 512**2), "sm_90"), ((8, 320, 64**2), "sm_80")])
def test_groups_without_weights_in_a_pipeline(shape: tuple[int, int, int], arch: str) -> None:
    """Which is as good for groups as for one channel; what slabs are better than is asked of blocks and clusters."""
    _, backward = plain_channel_norm(shape, "float16", shape[1] // 32, activation="silu")
    plain = dataclasses.replace(backward, weight=None, bias=None, dweight=None, dbias=None)
    assert plan(plain, DEVICES[arch]).strategy == "row_pipeline"


def test_lanes_fit_into_a_warp_where_there_is_a_choice() -> None:
    for problem in plain_channel_norm((2, 32, 6**3), "float16", last=True):
        (launch,) = (item for item in plan(problem, Device()).launches if item.kernel.startswith("channel_slab"))
        assert 32 % int(dict(launch.constants)["CHANNEL_LANES"]) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "plane", "width"),
    [
        ((64, 2048, 49), "float16", 49, 8),
        ((64, 2048, 49), "float32", 49, 4),
        ((64, 60, 49), "float16", 49, 4),  # a sample is an even number of 8 bytes
        ((64, 2047, 49), "float16", None, 1),
        ((64, 256, 64), "float16", None, 8),
    ],
)
def test_vectors_along_planes(shape: tuple[int, int, int], dtype: str, plane: int | None, width: int) -> None:
    for problem in plain_channel_norm(shape, dtype, None):
        way = along_planes(problem)
        assert way == (None if plane is None else Direction(True, width, plane))
        longest = max(slab.tiles.width for slab in channel_slab.candidates(problem, Device()))
        assert longest == width
