"""Groups that are backward held by clusters whose blocks have as many whole channels each."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from compile_cases import complaint
from plan_cases import plain_channel_norm
from test_rows_of_channels import Choice, check_backward, norm_of

from cunorm.plan import Device, Plan, plan
from cunorm.plan.device import NO_UNEVEN_CLUSTERS, UNEVEN_CLUSTERS, UNEVEN_SHARES
from cunorm.problem import ACTIVATIONS, ChannelProblem
from cunorm.resources import compile_resources

# Its memory is not as fast as that of an H200, which Device() is.
H100 = dataclasses.replace(Device(), memory_rate=21.8e3)
# Blocks of a cluster, their threads, vectors of a thread, and for how many blocks a multiprocessor has registers.
Layout = tuple[int, int, int, int]


def _layout(
    shape: tuple[int, int, int], activation: str | None, device: Device, dtype: str = "float16"
) -> tuple[Layout, str] | None:
    """With whose weight and bias a number has; None where it is no cluster that fetches ahead."""
    _, problem = plain_channel_norm(shape, dtype, shape[1] // 32, activation=activation)
    launch = plan(problem, device).launches[0]
    constants = dict(launch.constants)
    if launch.kernel != "row_block_backward" or constants["STAGE"] != "ahead" or launch.cluster == 1:
        return None
    layout = launch.cluster, launch.block[0], int(constants["VECTORS"]), int(constants["MIN_BLOCKS"])
    return layout, str(constants["WEIGHTS_OF"])


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((8, 96, 64**2), "silu", (3, 128, 4, 5)),
        ((8, 192, 48**2), "gelu", (6, 96, 3, 8)),
        ((8, 224, 40 * 72), "relu", (7, 128, 3, 6)),
        ((8, 256, 56**2), "gelu_tanh", (8, 224, 2, 4)),
        ((2, 320, 64**2), "silu", (10, 128, 4, 4)),  # few rows, and all threads have as many
        ((2, 320, 45 * 80), "silu", (10, 128, 4, 5)),
        ((8, 320, 72**2), "silu", (10, 224, 3, 4)),
        ((8, 320, 80**2), "silu", (10, 160, 5, 3)),
        ((8, 384, 64 * 72), "silu", (12, 192, 3, 4)),
        ((8, 448, 64 * 96), "silu", (14, 192, 4, 3)),
        ((8, 512, 40 * 128), "silu", (16, 128, 5, 4)),
        ((8, 512, 88**2), "silu", (16, 224, 5, 2)),
        ((8, 320, 64 * 128), "silu", (10, 224, 5, 2)),
        # Six vectors: for many rows of nine channels or more, and without an activation.
        ((8, 384, 96**2), "silu", (12, 192, 6, 3)),
        ((2, 384, 96**2), "silu", (12, 256, 5, 2)),
        ((8, 384, 96**2), "gelu", (12, 256, 5, 2)),  # which would spill
        ((8, 192, 96**2), "silu", (6, 256, 5, 2)),
        ((2, 256, 96**2), None, (8, 192, 6, 3)),
        # Eight long channels by two blocks each.
        ((2, 256, 128**2), "gelu", (16, 256, 4, 2)),
        # More rows without an activation; short and long parts; more channels than blocks; two.
        ((4, 320, 48**2), None, (10, 96, 3, 8)),
        ((8, 320, 48**2), None, None),
        ((8, 320, 40**2), "silu", None),
        ((2, 320, 128**2), "silu", None),
        ((2, 256, 128**2), "silu", None),
        ((8, 544, 64**2), "silu", None),
        ((8, 64, 64**2), "silu", None),
    ],
)
def test_blocks_have_a_channel_each(
    shape: tuple[int, int, int], activation: str | None, expected: Layout | None
) -> None:
    found = _layout(shape, activation, Device())
    assert (found is not None and found[1] == "part") == (expected is not None)
    if expected is not None:
        assert found == (expected, "part")
        other = _layout(shape, activation, H100)
        assert other is None or other[1] != "part", "there none was timed"


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((8, 320, 32**2), "silu", (10, 128, 2, 8)),
        ((2, 320, 48**2), "gelu", (10, 192, 3, 4)),
        ((8, 320, 64**2), "silu", (10, 256, 4, 3)),
        ((2, 320, 48**2), None, None),
        ((8, 320, 56**2), "silu", None),
        ((8, 640, 32**2), "silu", None),
    ],
)
def test_blocks_have_a_channel_of_float32_each(
    shape: tuple[int, int, int], activation: str | None, expected: Layout | None
) -> None:
    found = _layout(shape, activation, Device(), "float32")
    assert (found == (expected, "part")) == (expected is not None)


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((8, 576, 48**2), "silu", (9, 96, 6, 5)),
        ((8, 640, 48**2), "gelu_tanh", (10, 96, 6, 5)),
        ((8, 768, 32**2), "silu", (12, 64, 4, 8)),
        ((8, 640, 40**2), "silu", (5, 160, 5, 3)),
        ((8, 768, 64**2), "gelu", (8, 256, 6, 2)),
        ((2, 896, 64**2), "silu", (14, 256, 4, 2)),
        ((8, 1280, 32**2), "silu", (8, 128, 5, 4)),
        ((8, 1536, 32**2), "relu", (12, 128, 4, 4)),
        # Multiples of fifteen channels.
        ((8, 960, 32**2), "silu", (6, 128, 5, 4)),
        ((2, 960, 40**2), "gelu", (6, 256, 4, 2)),  # where 6 of 256 vectors are not there
        ((8, 960, 48**2), "silu", (15, 96, 6, 5)),
        ((8, 960, 64**2), "silu", (15, 256, 4, 2)),
        ((8, 1920, 32**2), "silu", (12, 128, 5, 4)),
        ((8, 1920, 40**2), "silu", (15, 160, 5, 3)),
        ((8, 1920, 48**2), "silu", (15, 192, 6, 2)),
        # Without an activation; two channels a block under the exact gelu, or long ones of many rows; long parts of
        # large clusters, and of other channels than multiples of fifteen; short parts whose last turn is half empty.
        ((2, 768, 32**2), None, None),
        ((8, 640, 48**2), "gelu", None),
        ((8, 896, 64**2), "silu", None),
        ((8, 1152, 64**2), "silu", None),
        ((8, 1536, 48**2), "silu", None),
        ((2, 640, 32**2), "silu", None),
        # Small clusters, and parts that threads have no such vectors for.
        ((8, 512, 24 * 32), "silu", None),
        ((8, 960, 24**2), "silu", None),
        ((8, 1920, 24**2), "silu", None),
    ],
)
def test_blocks_have_several_channels_each(
    shape: tuple[int, int, int], activation: str | None, expected: Layout | None
) -> None:
    found = _layout(shape, activation, Device())
    if expected is None:
        assert found is None or found[0][0] in (2, 4, 8), "as other rows are shared"
        return
    assert found == (expected, "vector")
    other = _layout(shape, activation, H100)
    assert other is None or other[0][0] not in UNEVEN_CLUSTERS, "there none was timed"


def test_devices_that_have_no_such_clusters() -> None:
    without = dataclasses.replace(Device(), uneven_clusters=NO_UNEVEN_CLUSTERS)
    for channels in (320, 384, 640, 960):
        _, problem = plain_channel_norm((8, channels, 48**2), "float16", channels // 32, activation="silu")
        assert plan(problem, Device()).launches[0].cluster in UNEVEN_CLUSTERS
        assert plan(problem, without).launches[0].cluster not in UNEVEN_CLUSTERS


# Samples, channels, how many of them a row has, and points of each, as a device with a place for one cluster has them.
SMALL = Device("sm_90", 16, clusters=(1, 1, 1, 1), uneven_clusters=((1,) * len(UNEVEN_SHARES),) * len(UNEVEN_CLUSTERS))


@pytest.mark.parametrize(
    ("sizes", "dtype", "activation", "blocks"),
    [
        ((2, 6, 3, 1800), "float16", "silu", 3),
        ((2, 5, 5, 2304), "bfloat16", "gelu", 5),
        ((3, 7, 7, 3072), "float16", None, 7),
        ((3, 3, 3, 1024), "float32", "gelu_tanh", 3),
        ((2, 18, 18, 1024), "float16", "relu", 9),
        ((1, 20, 20, 1600), "bfloat16", "silu", 5),
    ],
)
def test_what_they_compute(sizes: tuple[int, int, int, int], dtype: str, activation: str | None, blocks: int) -> None:
    samples, channels, together, points = sizes

    def choose(problem: ChannelProblem) -> Plan:
        chosen = plan(problem, SMALL)
        assert chosen.launches[0].cluster == blocks
        return chosen

    choice: Choice = choose
    check_backward(norm_of(samples, channels, together, points, dtype, activation), choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_layout_spills(dtype: str) -> None:
    """Of those that are chosen for any number of channels, with the activations in turns, and without weights too."""
    pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")
    points = (32**2, 40**2, 45 * 80, 48**2, 56**2, 64**2, 72**2, 64 * 96, 80**2, 88**2, 96**2, 40 * 128)
    ways = itertools.product(points, (10, 12, 18, 20, 24, 40, 60))
    activations = itertools.cycle(sorted(ACTIVATIONS))
    seen = set()
    complaints = []
    for (size, channels), activation in zip(ways, activations):
        _, problem = plain_channel_norm((8, 32 * channels, size), dtype, channels, activation=activation)
        launch = plan(problem, Device()).launches[0]
        layout = launch.block, dict(launch.constants).get("VECTORS"), activation in ("gelu", "silu")
        if launch.cluster not in UNEVEN_CLUSTERS or layout in seen:
            continue
        seen.add(layout)
        for with_weights in (True, False):
            less = {} if with_weights else {"weight": None, "bias": None}
            launch = plan(dataclasses.replace(problem, **less), Device()).launches[0]
            taken = compile_resources(launch.kernel, dict(launch.constants), "sm_90")
            complaints += [(size, channels, activation, found)] if (found := complaint(launch, taken, Device())) else []
    assert len(seen) >= 3 and not complaints
