"""What every plan of an instance, group or batch norm keeps, as plan_rules.py says it of the norms of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plan_alignment_rules import assert_access_to_weights
from plan_cases import Constants, compute_bytes
from plan_rules import (
    every_field_of_the_kernel,
    launches_may_overlap,
    scratch_is_written_before_it_is_read,
    scratch_memory,
)

from cunorm import kernels
from cunorm.plan import Device, Launch, Plan, plan
from cunorm.problem import DTYPES, ChannelForward, ChannelProblem

TILES_PER_CHUNK = 64  # kernels/channel_split_statistics.cu relies on it
VECTORS_PER_PIVOT = 64  # so does kernels/channel_slab_statistics.cuh on this
MOST_STATIC_BYTES = 48 * 1024
RESERVED_BYTES = 1024  # of shared memory, for each block


# ---- Limits.


def _point_lanes(constants: Constants) -> int:
    return int(constants["THREADS"] // constants["CHANNEL_LANES"])


def tile_channels(constants: Constants) -> int:
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
    return int(tile_channels(constants) // constants["CHANNELS_PER_SET"])


def _scratch_numbers(constants: Constants) -> int:
    """SUM_SCRATCH of kernels/channel_tile.cuh."""
    lanes, point_lanes, plane = constants["CHANNEL_LANES"], _point_lanes(constants), constants["PLANE"]
    if plane > 1:
        return int(((constants["VECTOR"] - 2) // plane + 2) * _holders(constants) + tile_channels(constants))
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


def static_shared_bytes(item: Launch, problem: ChannelProblem) -> int:
    """What a kernel declares itself: at least, since a compiler may align it."""
    constants, size = dict(item.constants), compute_bytes(problem)
    if "merge" in item.kernel or item.kernel == "column_sums":
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
        numbers, channels, forward = _numbers(item), tile_channels(kept), item.kernel == "channel_grid_forward"
        summed, staged = (_summed(kept), 2) if forward else (1, 4)
        sums = 2 * scratch // summed + numbers * channels // summed
        return (sums + staged * channels + 2 * numbers * _sets(kept)) * size
    if not item.kernel.startswith("channel_slab"):
        sums = {"channel_split_statistics": 3, "channel_split_gradient_sums": 2}.get(item.kernel, 0)
        return sums * scratch * size
    channels, sets, blocks = tile_channels(kept), _sets(kept), item.cluster
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
        static = static_shared_bytes(item, problem)
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


def planning_twice_gives_the_same(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    assert plan.__wrapped__(problem, device) == plan(problem, device)


# ---- Every element is taken, once.


def points_and_channels_are_covered(problem: ChannelProblem, device: Device, chosen: Plan) -> None:
    parts = problem.samples  # that have sums of their own
    for item in chosen.launches:
        arguments: dict[str, Any] = dict(item.arguments)
        constants: Constants = dict(item.constants)
        if item.kernel == "column_sums":
            assert (arguments["rows"], arguments["columns"]) == (parts, problem.channels)
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
    return problem.samples * -(-problem.channels // tile_channels(constants))


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
    assert problem.channels == constants["TILES"] * tile_channels(constants), "a tile has channels that are not there"
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
    sums = 2 * _numbers(item) * _sum_rows(constants) * tile_channels(constants) // unit * compute_bytes(problem)
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
    assert tile_channels(constants) % problem.channels_per_set == 0, "a set lies in two slabs"
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
                assert problem.channels * plane % width == tile_channels(constants) * plane % width == 0
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
    """Words for the turns that are kept, of every block and of the answers to every group, which are cleared."""
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    constants, arguments, size = dict(item.constants), dict(item.arguments), compute_bytes(problem)
    blocks: Any = arguments["blocks_per_slab"]
    turns, places, numbers = 2, item.grid, _numbers(item) * size // 4
    if item.kernel.startswith("channel_pipeline"):
        lag, per_lane = (int(constants[name]) for name in ("LAG", "PARTS_PER_LANE"))
        turns, places, numbers = lag + 1, item.grid // blocks * 32 * per_lane, 2  # words of a parcel
    words = turns * (places + item.grid // blocks) * numbers * _sets(constants)
    assert sizes[str(arguments["words"])] == -(-words // 2) * 16
    assert arguments["word_pairs"] == -(-words // 2) and item.cooperative and chosen.launches[0] is item
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


RULES: list[Callable[[Any, Device, Plan], None]] = [
    within_the_limits_of_cuda,
    planning_twice_gives_the_same,
    every_field_of_the_kernel,
    points_and_channels_are_covered,
    every_access_is_aligned_and_contiguous,
    scratch_memory,
    scratch_is_written_before_it_is_read,
    scratch_buffers_hold_what_the_kernels_put_there,
    the_workspace_is_modest,
    every_result_is_written,
    launches_may_overlap,
]
