"""What every plan of an instance, group or batch norm keeps, as plan_rules.py says it of the norms of rows.

Slabs that a plan may choose are held to the same rules as those it does choose; plans by rows to the rules of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import plan_rules
import pytest
from hypothesis import example, given
from plan_cases import DEVICES, channel_problems, devices, many, plain_channel_norm, plan_batch, plan_of, plan_rows
from plan_rules import (
    Constants,
    assert_access_to_weights,
    compute_bytes,
    covers_zeros,
    every_field_of_the_kernel,
    launches_may_overlap,
    scratch_is_written_before_it_is_read,
    scratch_memory,
)

from cunorm import kernels
from cunorm.plan import Device, Launch, Plan, channel_grid, channel_pipeline, channel_slab, plan
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_tiles import Direction, along_planes
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import DTYPES, ChannelForward, ChannelProblem, ChannelTensor, Vector

TILES_PER_CHUNK = 64  # kernels/channel_split_statistics.cu relies on it
VECTORS_PER_PIVOT = 64  # so does kernels/channel_slab_statistics.cuh on this
MOST_STATIC_BYTES = 48 * 1024
RESERVED_BYTES = 1024  # of shared memory, for each block


# ---- Limits.


def _point_lanes(constants: Constants) -> int:
    return int(constants["THREADS"] // constants["CHANNEL_LANES"])


def _tile_channels(constants: Constants) -> int:
    return int(
        constants["CHANNEL_LANES"] * (constants["VECTOR"] if constants["ALONG_CHANNELS"] else 1) // constants["PLANE"]
    )


def _holders(constants: Constants) -> int:
    """Threads that hold something."""
    return int(_point_lanes(constants) * constants["CHANNEL_LANES"])


def _points_of_vector(constants: Constants) -> int:
    return int(constants["PLANE"] if constants["ALONG_CHANNELS"] else constants["VECTOR"])


def _numbers(item: Launch) -> int:
    """How many a block of channel_grid_* or channel_pipeline_* has for each set, and of the first for each channel."""
    return 3 if item.kernel.endswith("forward") else 2


def _sets(constants: Constants) -> int:
    """Sets of a slab."""
    return int(_tile_channels(constants) // constants["CHANNELS_PER_SET"])


def _scratch_numbers(constants: Constants) -> int:
    """SUM_SCRATCH of kernels/channel_tile.cuh."""
    lanes, point_lanes, plane = constants["CHANNEL_LANES"], _point_lanes(constants), constants["PLANE"]
    if plane > 1:
        return int(((constants["VECTOR"] - 2) // plane + 2) * _holders(constants) + _tile_channels(constants))
    if not constants["ALONG_CHANNELS"]:
        return int(lanes * -(-point_lanes // 32))
    rows = constants["THREADS"] // 32 if lanes < 32 else point_lanes
    return int(lanes * rows * constants["VECTOR"])


def _sum_rows(constants: Constants) -> int:
    """SUM_ROWS of kernels/channel_tile.cuh, along channels."""
    return int(constants["THREADS"] // 32 if constants["CHANNEL_LANES"] < 32 else _point_lanes(constants))


def _summed(constants: Constants) -> int:
    """SUMMED of kernels/channel_slab_statistics.cuh."""
    along_channels = constants["ALONG_CHANNELS"] and constants["PLANE"] == 1
    return math.gcd(constants["VECTOR"], constants["CHANNELS_PER_SET"]) if along_channels else 1


def _static_shared_bytes(item: Launch, problem: ChannelProblem) -> int:
    """What a kernel declares itself: at least, since a compiler may align it."""
    constants, size = dict(item.constants), compute_bytes(problem)
    if "merge" in item.kernel or item.kernel in ("column_sums", "zeros"):
        return 0
    kept: Constants = dict(constants)
    scratch = _scratch_numbers(kept)
    if item.kernel.startswith("channel_pipeline"):
        handovers = 3 * 2 * 8
        if item.kernel.endswith("forward"):
            counts = _sum_rows(kept) * kept["CHANNEL_LANES"]
            return (2 * 3 * _sets(kept) + 2 * counts) * size + handovers
        columns = (kept["HAS_WEIGHT"] + kept["HAS_BIAS"] + (2 if kept["TILES"] > 1 else 0)) * problem.channels
        return int((2 * (2 + kept["LAG"] + 3) * _sets(kept) + columns) * size + handovers)
    if item.kernel.startswith("channel_grid"):
        numbers, channels, forward = _numbers(item), _tile_channels(kept), item.kernel == "channel_grid_forward"
        summed, staged = (_summed(kept), 2) if forward else (1, 4)
        sums = 2 * scratch // summed + numbers * channels // summed
        return (sums + staged * channels + 2 * numbers * _sets(kept)) * size
    if not item.kernel.startswith("channel_slab"):
        sums = {"channel_split_statistics": 3, "channel_split_gradient_sums": 2}.get(item.kernel, 0)
        return sums * scratch * size
    channels, sets, blocks = _tile_channels(kept), _sets(kept), item.cluster
    exchanged = blocks if blocks > 1 else 0
    told = 1 + exchanged if blocks > 1 else 0
    if item.kernel == "channel_slab_forward":
        variances, summed = sets if constants["UPDATES_RUNNING"] else 0, _summed(kept)
        return (2 * scratch // summed + 3 * channels // summed * (1 + exchanged) + 3 * sets + variances) * size
    weights = channels if blocks > 1 else 0
    return (2 * scratch + 2 * channels * (1 + told) + weights + 2 * sets) * size


def within_the_limits_of_cuda(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        threads = item.block[0] * item.block[1]
        assert 1 <= item.grid <= 2**31 - 1
        assert threads % 32 == 0 and 32 <= threads <= min(1024, device.threads_per_multiprocessor)
        static = _static_shared_bytes(item, problem)
        assert static <= MOST_STATIC_BYTES
        assert static + item.shared_bytes <= device.shared_bytes
        assert item.cluster in (1, 2, 4, 8, 16) and item.grid % item.cluster == 0
        assert device.groups(item.cluster) > 0, "the device cannot run such a cluster"
        assert item.cooperative == item.kernel.startswith(("channel_grid", "channel_pipeline"))
        if item.cooperative:
            # All blocks run at the same time: as many on each multiprocessor as the compiler leaves registers for.
            resident = int(dict(item.constants)["MIN_BLOCKS"])
            assert device.capability >= 80, "nothing is copied asynchronously"
            assert item.grid <= device.multiprocessors * resident
            assert resident * threads <= device.threads_per_multiprocessor
            taken = static + item.shared_bytes + RESERVED_BYTES
            assert resident * taken <= device.shared_bytes + RESERVED_BYTES


def _planning_twice_gives_the_same(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    assert plan.__wrapped__(problem, device) == plan(problem, device)


# ---- Every element is taken, once.


def _points_and_channels_are_covered(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    parts = problem.samples  # that have sums of their own
    for item in chosen.launches:
        arguments: dict[str, Any] = dict(item.arguments)
        constants: Constants = dict(item.constants)
        if item.kernel == "column_sums":
            assert (arguments["rows"], arguments["columns"]) == (parts, problem.channels)
            continue
        if item.kernel == "zeros":
            covers_zeros(item, constants, arguments, device)
            continue
        points = _points_or_places(problem, constants, arguments)
        assert (arguments["channels"], arguments["points"]) == (problem.channels, points)
        if item.kernel.startswith("channel_slab"):
            _covers_slab(problem, item, constants, arguments)
        elif item.kernel.startswith("channel_grid"):
            _covers_grid(problem, item, constants, arguments)
            # Where a set has several channels, no block knows the sums of one.
            parts *= arguments["blocks_per_slab"] if problem.channels_per_set > 1 else 1
        elif item.kernel.startswith("channel_pipeline"):
            _covers_pipeline(problem, item, constants, arguments)
            parts = item.grid
        elif item.kernel.endswith("merge"):
            _covers_merge(problem, item, constants, arguments)
        else:
            _covers_pass(problem, item, constants, arguments)


def _assert_lanes(item: Launch, constants: Constants) -> None:
    threads, lanes = constants["THREADS"], constants["CHANNEL_LANES"]
    along = constants["ALONG_CHANNELS"]
    assert threads % 32 == 0
    if constants["PLANE"] == 1:
        assert threads % lanes == 0
    else:
        assert along and constants["POINT_DIMS"] >= 2
        assert threads - 32 < _holders(constants) <= threads, "a whole warp holds nothing"
    others = 32 * (constants["TELLING_WARPS"] + 2) if "pipeline" in item.kernel else 0
    assert item.block == ((threads + others, 1) if along else (threads // lanes, lanes))
    # Sums along the points go by shuffles of a power of two, or by whole warps of one channel.
    assert along or _point_lanes(constants) in (1, 2, 4, 8, 16) or _point_lanes(constants) % 32 == 0


def _tiles(problem: ChannelProblem, constants: Constants) -> int:
    return problem.samples * -(-problem.channels // _tile_channels(constants))


def _points_or_places(problem: ChannelProblem, constants: Constants, arguments: dict[str, Any]) -> int:
    """What a launch counts: points, or where runs are peeled the places of their vectors, wherever one begins."""
    if not constants.get("PEELED"):
        assert not constants.get("EDGES") and not arguments.get("run_points")
        return problem.points
    width, (*outer, run), (*sizes, places) = constants["VECTOR"], problem.point_sizes, arguments["point_sizes"]
    assert sizes == outer and arguments["run_points"] == run
    assert places % width == 0 and run + width - 1 <= places < run + 2 * width - 1
    runs = min(math.prod(outer), -(-(arguments["points_per_split"] - 1) // places) + 1)
    assert constants["EDGES"] * _point_lanes(constants) >= runs * 2 * width, "a number is nobody's"
    return math.prod(outer) * places


def _covers_pass(problem: ChannelProblem, item: Launch, constants: Constants, arguments: dict[str, Any]) -> None:
    _assert_lanes(item, constants)
    tile_points = _point_lanes(constants) * _points_of_vector(constants) * constants["UNROLL"]
    splits, per_split = arguments["splits"], arguments["points_per_split"]
    assert per_split % tile_points == 0
    assert 1 <= per_split // tile_points <= TILES_PER_CHUNK
    points = _points_or_places(problem, constants, arguments)
    assert splits * per_split >= points
    assert splits == 1 or points > (splits - 1) * per_split, "a chunk is empty"
    assert item.grid == _tiles(problem, constants) * splits
    if item.kernel == "channel_split_statistics":
        assert not constants["ONE_CHUNK"] or (splits, problem.channels_per_set) == (1, 1)


def _covers_slab(problem: ChannelProblem, item: Launch, constants: Constants, arguments: dict[str, Any]) -> None:
    blocks = constants["BLOCKS_PER_ROW"]
    assert item.cluster == blocks and item.grid == _tiles(problem, constants) * blocks
    assert constants["HELD"] == constants["SLOTS"] == constants["VECTORS"]
    _assert_parts(problem, item, constants, blocks, arguments["points_per_block"], constants["VECTORS"])
    assert constants["VECTORS"] <= VECTORS_PER_PIVOT, "too much may cancel"
    assert min(4, constants["VECTORS"]) <= constants["IN_FLIGHT"] <= constants["VECTORS"]
    assert item.shared_bytes == _slot_bytes(problem, constants)


def _covers_grid(problem: ChannelProblem, item: Launch, constants: Constants, arguments: dict[str, Any]) -> None:
    slabs, blocks = arguments["slabs"], arguments["blocks_per_slab"]
    assert slabs == _tiles(problem, constants) < 2**32
    groups = item.grid // blocks
    assert item.grid == groups * blocks and blocks >= 2 and 1 <= groups <= slabs, "a group has nothing to do"
    vectors, slots, held = arguments["vectors"], constants["SLOTS"], constants["HELD"]
    assert vectors > 0 and (constants["RESIDENT"] == 0 or vectors + constants["RESIDENT"] > slots)
    if vectors > slots:
        # As many pass through as are taken at a time (FEW of kernels/channel_slab.cuh).
        assert 1 <= held <= slots - 4
    else:
        assert held == slots <= vectors * (2 if slabs > groups else 1)
    if item.kernel == "channel_grid_forward":
        assert 1 <= arguments["pivot"] <= min(held, vectors)
        assert vectors + constants["RESIDENT"] <= VECTORS_PER_PIVOT * arguments["pivot"], "too much may cancel"
    every = vectors + constants["RESIDENT"]
    _assert_parts(problem, item, constants, blocks, arguments["points_per_block"], every)
    # Behind the slots is what the owner of the most sets collects of all blocks.
    collected = -(-_sets(constants) // blocks) * blocks * _numbers(item) * compute_bytes(problem)
    slots = _slot_bytes(problem, constants)
    assert slots % compute_bytes(problem) == 0 and item.shared_bytes == slots + collected


def _covers_pipeline(problem: ChannelProblem, item: Launch, constants: Constants, arguments: dict[str, Any]) -> None:
    slabs, blocks = arguments["slabs"], arguments["blocks_per_slab"]
    assert slabs == _tiles(problem, constants) == problem.samples * constants["TILES"] < 2**32
    assert problem.channels == constants["TILES"] * _tile_channels(constants), "a tile has channels that are not there"
    groups = item.grid // blocks
    assert item.grid == groups * blocks and 1 <= groups <= slabs, "a group has nothing to do"
    assert 1 <= constants["LAG"] < constants["AHEAD"], "what is summed lies where another slab is finished"
    assert _sets(constants) <= blocks <= 32 * constants["PARTS_PER_LANE"], "every set has an owner, and is collected"
    assert _sets(constants) * constants["SET_LANES"] <= 32 * constants["TELLING_WARPS"]
    assert constants["ALONG_CHANNELS"] and constants["PLANE"] == constants["POINT_DIMS"] == 1
    assert constants["VECTOR"] * DTYPES[problem.x.dtype].itemsize == 16
    _assert_parts(problem, item, constants, blocks, arguments["points_per_block"], constants["RESIDENT"])
    # Behind the slots are the sums of two turns: numbers of what a vector has of each set, or of each channel.
    forward = isinstance(problem, ChannelForward)
    slots = (1 if forward else 2) * constants["THREADS"] * constants["AHEAD"] * constants["RESIDENT"] * 16
    by_sets = forward or constants["TILES"] == 1
    unit = math.gcd(constants["VECTOR"], problem.channels_per_set) if by_sets else 1
    sums = 2 * _numbers(item) * _sum_rows(constants) * _tile_channels(constants) // unit * compute_bytes(problem)
    assert slots % 16 == 0 and item.shared_bytes == slots + sums


def _assert_parts(
    problem: ChannelProblem, item: Launch, constants: Constants, blocks: int, per_block: int, vectors: int
) -> None:
    """Each block of a slab has some of its points, which its threads' vectors just hold."""
    _assert_lanes(item, constants)
    step = _point_lanes(constants) * _points_of_vector(constants)
    assert per_block % _points_of_vector(constants) == 0
    assert (blocks - 1) * per_block < problem.points <= blocks * per_block, "a block has nothing to do"
    assert (vectors - 1) * step < per_block <= vectors * step
    assert constants["CHANNELS_PER_SET"] == problem.channels_per_set
    assert _tile_channels(constants) % problem.channels_per_set == 0, "a set lies in two slabs"
    assert constants["SET_LANES"] in (1, 2, 4, 8, 16, 32)


def _slot_bytes(problem: ChannelProblem, constants: Constants) -> int:
    tensors = 1 if isinstance(problem, ChannelForward) else 2
    slots = constants["SLOTS"] * _holders(constants) * constants["VECTOR"]
    return int(tensors * slots * DTYPES[problem.x.dtype].itemsize)


def _covers_merge(problem: ChannelProblem, item: Launch, constants: Constants, arguments: dict[str, Any]) -> None:
    forward = item.kernel == "split_merge"
    lanes, items = ("SET_LANES", "SETS_PER_BLOCK") if forward else ("ITEM_LANES", "ITEMS_PER_BLOCK")
    assert item.block == (constants[lanes], constants[items])
    # Part of a warp, by shuffles, or all of a block, by its shared memory.
    assert constants[lanes] in (1, 2, 4, 8, 16, 32) or (constants[lanes] % 32 == 0 and constants[items] == 1)
    count = arguments["sets"] if forward else arguments["sets"] + arguments["wanted_channels"]
    assert (item.grid - 1) * constants[items] < count <= item.grid * constants[items]
    assert arguments["sets"] in (problem.sets, 0)
    splits = arguments["splits"]
    assert (splits > 0) == (problem.points * problem.samples > 0)
    if forward and splits:
        chunk = arguments["points_per_split"]
        assert splits * chunk >= problem.points
        # Of places there are more than points, and each chunk says how many points it has.
        assert problem.points > (splits - 1) * chunk or arguments["chunk_counts"]


# ---- Every access is aligned.


def every_access_is_aligned_and_contiguous(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    if problem.samples * problem.channels * problem.points == 0:  # nothing is walked
        return
    for item in chosen.launches:
        constants: Constants = dict(item.constants)
        if "VECTOR" not in constants:
            continue
        width, along, plane = constants["VECTOR"], constants["ALONG_CHANNELS"], constants["PLANE"]
        assert width in (1, 2, 4, 8) and width * itemsize <= 16
        assert constants["POINT_DIMS"] == len(problem.point_sizes)
        if constants.get("PEELED"):
            strides = {(each.sample_stride, each.channel_stride, each.point_strides) for each in problem.tensors}
            assert len(strides) == 1 and not along and width * itemsize == 16
            assert all(each.alignment == 16 and each.point_strides[-1] == 1 for each in problem.tensors)
            continue
        for tensor in problem.tensors:
            assert tensor.alignment % (width * itemsize) == 0 or width == 1
            last = tensor.point_strides[-1]
            if plane > 1:
                assert (plane, tensor.channel_stride, last) == (problem.point_sizes[-1], plane, 1)
                assert problem.channels * plane % width == _tile_channels(constants) * plane % width == 0
                assert all(stride % width == 0 for stride in (*tensor.point_strides[:-1], tensor.sample_stride))
                continue
            run, stride = (problem.channels, tensor.channel_stride) if along else (problem.point_sizes[-1], last)
            others = (*tensor.point_strides[:-1], last if along else tensor.channel_stride, tensor.sample_stride)
            assert run % width == 0
            assert width == 1 or stride == 1
            assert all(other % width == 0 for other in others)
        if isinstance(problem, ChannelForward) and problem.y is None:
            continue
        for name, operand in (("WEIGHT", problem.weight), ("BIAS", problem.bias)):
            if f"{name}_ACCESS" in constants:
                assert_access_to_weights(constants, name, operand, width if along and plane == 1 else 1)


# ---- Scratch memory, and results.


def scratch_buffers_hold_what_the_kernels_put_there(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    size, sizes = compute_bytes(problem), {scratch.name: scratch.bytes for scratch in chosen.scratch}
    every_channel = problem.samples * problem.channels
    for item in chosen.launches:
        if item.kernel.startswith(("channel_grid", "channel_pipeline")):
            _scratch_of_exchange(problem, item, chosen)
            continue
        splits = dict(item.arguments).get("splits", 0)
        expected = {
            "chunk_means": every_channel * splits * 8,
            "chunk_deviations": every_channel * splits * 8,
            "chunk_counts": every_channel * splits * 8,
            "sums": every_channel * splits * 2 * size,
            "means": 2 * problem.sets * size,
            "dweight": every_channel * size,
            "dbias": every_channel * size,
        } | dict.fromkeys(("mean", "mean_remainder", "rstd"), problem.sets * size)
        for name, value in item.arguments:
            writes = item.kernel in ("channel_split_statistics", "channel_split_gradient_sums", "channel_slab_backward")
            merges = item.kernel in ("split_merge", "channel_split_gradient_merge")
            if value in sizes and (writes or merges):
                assert sizes[str(value)] == expected[name], (item.kernel, name)


def _scratch_of_exchange(problem: ChannelProblem, item: Launch, chosen: Plan) -> None:
    """Words for the turns that are kept, of every block and of the answers to every group, which the launch before
    has cleared."""
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    constants, arguments, size = dict(item.constants), dict(item.arguments), compute_bytes(problem)
    blocks: Any = arguments["blocks_per_slab"]
    turns, places, numbers = 2, item.grid, _numbers(item) * size // 4
    if item.kernel.startswith("channel_pipeline"):
        lag, per_lane = (int(constants[name]) for name in ("LAG", "PARTS_PER_LANE"))
        turns, places, numbers = lag + 1, item.grid // blocks * 32 * per_lane, 2  # words of a parcel
    words = turns * (places + item.grid // blocks) * numbers * _sets(constants)
    assert sizes[str(arguments["words"])] == -(-words // 2) * 16
    clearing, following = chosen.launches[:2]
    assert clearing.kernel == "zeros" and following is item
    assert dict(clearing.arguments) == {"target": arguments["words"], "count": -(-words // 2)}
    for name in ("dweight", "dbias"):
        # Sums of each sample, and where a set has several channels of each block; a single row is the result itself.
        rows = problem.samples * (blocks if problem.channels_per_set > 1 else 1)
        if item.kernel.startswith("channel_pipeline"):
            rows = item.grid
        if rows == 1:
            assert arguments.get(name) in (name, 0, None)
        elif arguments.get(name):
            assert sizes[str(arguments[name])] == rows * problem.channels * size


def the_workspace_is_modest(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    """A third of what must move at most, beside a few numbers of each channel of each sample."""
    small = 80 * problem.samples * problem.channels + 4096
    assert chosen.workspace_bytes <= problem.bytes_moved // 3 + small


def every_result_is_written(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    """Each output that is wanted and not empty is a field of one last launch."""
    written = {
        str(value)
        for item in chosen.launches
        for field, value in item.arguments
        if isinstance(value, str) and f"const X_TYPE* {field};" not in kernels.kernel_source(item.kernel, {})
    }
    filled = problem.samples * problem.channels * problem.points > 0
    wanted: set[str] = set()
    if isinstance(problem, ChannelForward):
        if filled and problem.y is not None:
            wanted.add("y")
        if problem.sets and problem.stats:
            wanted |= {"mean", "rstd"}
        if filled and problem.running is not None and not problem.running.given:
            wanted |= {"running_mean", "running_var"}
        assert written >= wanted
        return
    wanted |= {"dx"} if filled and problem.dx is not None else set()
    parameters = {name for name in ("dweight", "dbias") if getattr(problem, name) is not None}
    assert written >= wanted | parameters
    assert not written & {"dweight", "dbias"} - parameters
    last = {name: item for item in chosen.launches for _, value in item.arguments for name in parameters & {value}}
    for name, item in last.items():
        types = {value for key, value in item.constants if key.endswith("_TYPE")}
        assert DTYPES[getattr(problem, name)].cuda in types


# ---- Who keeps them.

RULES: list[Callable[[Any, Device, Plan], None]] = [
    within_the_limits_of_cuda,
    _planning_twice_gives_the_same,
    every_field_of_the_kernel,
    _points_and_channels_are_covered,
    every_access_is_aligned_and_contiguous,
    scratch_memory,
    scratch_is_written_before_it_is_read,
    scratch_buffers_hold_what_the_kernels_put_there,
    the_workspace_is_modest,
    every_result_is_written,
    launches_may_overlap,
]


def _sets_of_many_channels_with_planes_of_two() -> ChannelForward:
    """By passes, whose tiles are not to grow with the sets."""
    samples, channels, planes, plane = 2, 4096, 2048, 2
    x = ChannelTensor("bfloat16", planes * channels * plane, plane, (channels * plane, 1))
    vector = Vector("bfloat16")
    return ChannelForward(samples, channels, (planes, plane), 2048, x, x, vector, vector, True, 1e-5, None)


def _few_numbers_for_all_blocks() -> ChannelForward:
    """Whose grid would have nearly as many words as numbers."""
    x = ChannelTensor("float16", 0, 1, (6,))
    return ChannelForward(1, 3, (1345,), 1, x, x, None, None, False, 1e-5, "relu")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.strip("_"))
@many
@example(problem=_few_numbers_for_all_blocks(), device=Device("sm_80", 108, 2048, (66, 30, 15, 7)))
@example(problem=_sets_of_many_channels_with_planes_of_two(), device=Device())
@given(problem=channel_problems(), device=devices)
def test_every_plan_keeps(rule: Callable[[Any, Device, Plan], None], problem: ChannelProblem, device: Device) -> None:
    chosen = plan(problem, device)
    if not chosen.strategy.startswith("row_"):
        rule(problem, device, chosen)


@pytest.mark.parametrize("rule", plan_rules.RULES, ids=lambda rule: rule.__name__)
@many
@given(problem=channel_problems(), device=devices)
def test_every_plan_by_rows_keeps_the_rules_of_rows(
    rule: Callable[[Any, Device, Plan], None], problem: ChannelProblem, device: Device
) -> None:
    chosen = plan(problem, device)
    if chosen.strategy.startswith("row_"):
        assert chosen == (plan_rows(problem, device) or plan_batch(problem, device))
        rule(as_rows(problem), device, chosen)


SHAPES: list[tuple[tuple[int, int, int], int | None]] = [
    ((2, 32, 216), 1),
    ((4, 3, 49), 1),
    ((4, 40, 64), 10),
    ((8, 320, 256), 10),
    ((2, 512, 64), 16),
    ((64, 2048, 49), None),
    ((3, 6, 35), None),
    # That pipelines take, where the channels are last.
    ((8, 320, 4096), 10),
    ((4, 256, 32**3), 1),
]


def some(geometries: Sequence[Slab | Grid | ChannelPipeline]) -> Sequence[Slab | Grid | ChannelPipeline]:
    """Up to a few tens of them, of every kind: neighbours are alike."""
    return geometries[:: len(geometries) // 30 + 1]


@functools.cache
def every_geometry(problem: ChannelProblem, device: Device) -> tuple[Slab | Grid | ChannelPipeline, ...]:
    grids = [*channel_grid.candidates(problem, device), *channel_pipeline.candidates(problem, device)]
    assert len(grids) == len(set(grids))
    return (*some(list(dict.fromkeys(channel_slab.candidates(problem, device)))), *some(grids))


@pytest.mark.parametrize("device", ["sm_75", "sm_90", "few clusters"])
@pytest.mark.parametrize("last", [False, True], ids=["NC", "N...C"])
@pytest.mark.parametrize(("shape", "channels_per_set"), SHAPES, ids=str)
def test_every_slab_keeps_the_same_rules(
    shape: tuple[int, int, int], channels_per_set: int | None, last: bool, device: str
) -> None:
    for dtype in ("float16", "float32", "float64"):
        for problem in plain_channel_norm(shape, dtype, channels_per_set, last=last, activation="silu"):
            for slab in every_geometry(problem, DEVICES[device]):
                chosen = plan_of(slab, problem)
                for rule in RULES:
                    # Words between blocks are many beside a slab of few numbers, which is left to other kernels.
                    if rule is not the_workspace_is_modest or isinstance(slab, Slab):
                        rule(problem, DEVICES[device], chosen)
                item = next(item for item in chosen.launches if item.kernel.startswith("channel"))
                declared = _static_shared_bytes(item, problem)
                assert declared <= slab.static_bytes(problem) <= MOST_STATIC_BYTES


@pytest.mark.parametrize("device", list(DEVICES))
def test_an_empty_batch_of_odd_planes_has_plans(device: str) -> None:
    for dtype, plane in itertools.product(("float16", "float32", "float64"), (33, 57, 149)):
        for problem in plain_channel_norm((0, 32, plane**2), dtype, None):
            _points_and_channels_are_covered(problem, DEVICES[device], plan(problem, DEVICES[device]))


# ---- What was measured to be faster comes first.


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
            assert _strategies(shape, "float16", shape[1] // 32, activation=activation) == ["channel_slab"] * 2
    assert _strategies((4, 512, 64**2), "float16", 16) == ["row_cluster"] * 2, "short ones are faster as rows"


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set", "activation", "expected"),
    [
        # Channels of a tile, groups of blocks, slabs in shared memory; forward and backward.
        ((8, 512, 64**2), "float16", 16, None, ((512, 1, 6), (64, 8, 3))),
        ((8, 512, 64**2), "float16", 16, "silu", ((512, 1, 6), (64, 8, 3))),
        ((8, 320, 64**2), "float16", 10, None, ((320, 2, 4), (160, 2, 4))),
        ((8, 320, 64**2), "float16", 10, "silu", ((320, 2, 4), (160, 2, 4))),
        ((8, 320, 64**2), "float32", 10, None, ((320, 1, 5), (160, 1, 4))),
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
        item = chosen.launches[1]
        constants, arguments = dict(item.constants), dict(item.arguments)
        groups = item.grid // int(arguments["blocks_per_slab"])
        found.append((_tile_channels(constants), groups, constants["AHEAD"]))
    assert tuple(found) == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_per_set"),
    [((2, 512, 64**2), "float16", 16), ((8, 1280, 16**2), "float16", 40), ((64, 2048, 49), "float32", None)],
)
def test_few_numbers_are_not_worth_a_pipeline(
    shape: tuple[int, int, int], dtype: str, channels_per_set: int | None
) -> None:
    assert _strategies(shape, dtype, channels_per_set, last=True)[0] == "channel_slab"


def test_long_rows_that_leave_multiprocessors_idle_are_shared() -> None:
    forward, backward = (plan(problem, Device()) for problem in plain_channel_norm((2, 512, 64**2), "float16", 16))
    assert forward.launches[0].cluster == 8 and backward.launches[0].cluster == 2


@pytest.mark.parametrize(
    ("shape", "activation", "expected"),
    [
        ((8, 1280, 16**2), None, [(1, 256, "ahead"), (1, 256, "ahead")]),
        ((8, 320, 64**2), "silu", [(4, 128, "ahead"), (2, 512, "ahead")]),
        ((8, 512, 64**2), "silu", [(8, 128, "ahead"), (8, 256, "ahead")]),
        ((2, 512, 64**2), "silu", [(8, 128, "ahead"), (8, 256, "ahead")]),
        ((16, 512, 32**2), None, [(1, 256, "ahead"), (1, 512, "ahead")]),
        ((16, 512, 32**2), "silu", [(1, 256, "ahead"), (2, 256, "ahead")]),
        ((4, 640, 32**2), "silu", [(1, 256, "ahead"), (1, 512, "direct")]),
        ((8, 960, 32**2), "silu", [(1, 256, "ahead"), (4, 256, "ahead")]),
        ((4, 1920, 32**2), "silu", [(4, 128, "ahead"), (8, 256, "ahead")]),
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
        ((2, 640, 64**2), "silu", [(8, 10, "ahead", "staged"), (2, 10, "direct", "late")]),
        ((2, 640, 64**2), None, [(8, 10, "ahead", "staged"), (2, 10, "direct", "late")]),
        ((2, 960, 64**2), "silu", [(2, 15, "direct", "staged"), (8, 8, "ahead", "staged")]),
        ((2, 960, 64**2), None, [(8, 8, "ahead", "staged"), (8, 8, "ahead", "staged")]),
    ],
)
def test_few_long_groups_run_all_at_once_where_they_can(
    shape: tuple[int, int, int], activation: str | None, expected: list[tuple[int, int, str, str]]
) -> None:
    """Blocks of a group, vectors of a thread, how these come and how the weights."""
    problems = plain_channel_norm(shape, "float16", shape[1] // 32, activation=activation)
    for problem, way in zip(problems, expected, strict=True):
        launch = plan(problem, Device()).launches[0]
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


@pytest.mark.parametrize(("shape", "arch"), [((8, 128, 256**2), "sm_90"), ((8, 320, 64**2), "sm_80")])
def test_groups_without_weights_in_a_pipeline(shape: tuple[int, int, int], arch: str) -> None:
    """They are rows like all others; what slabs are better than is asked of blocks and clusters alone."""
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
