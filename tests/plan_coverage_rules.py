"""Every row and every column is taken, once, and every number has its channel's weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from plan_cases import Constants, Problem, some

from cunorm.plan import Device, Launch, Plan
from cunorm.problem import BackwardProblem

TILES_PER_CHUNK = 64  # kernels/row_split_statistics.cu relies on it


def rows_and_columns_are_covered(problem: Problem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        arguments: dict[str, Any] = dict(item.arguments)
        _COVERS[item.kernel](item, dict(item.constants), arguments, device)
        if item.kernel == "split_merge":  # a row is a sample of one channel
            assert (arguments["channels"], arguments["channels_per_set"]) == (1, 1)
            assert (arguments["sets"], arguments["points"]) == (problem.rows, problem.columns)
        elif item.kernel not in ("column_sums", "zeros"):
            assert (arguments["rows"], arguments["columns"]) == (problem.rows, problem.columns)


def _covers_row_block(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, rows, width = constants["THREADS_PER_ROW"], constants["ROWS_PER_BLOCK"], constants["VECTOR"]
    assert item.block == (threads, rows) and item.cluster == constants["BLOCKS_PER_ROW"]
    # Part of a warp shares by shuffles of powers of two; sums of several rows are added up by halves.
    assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16)
    assert rows & (rows - 1) == 0
    if item.cluster > 1:
        assert rows == 1 and threads >= item.cluster, "a thread tells each of the other blocks"
    first, columns, per_block = 0, arguments["columns"], arguments["columns_per_block"]
    assert min(per_block, columns) > (constants["VECTORS"] - 1) * threads * width, "a thread's last vector has no use"
    for _ in range(item.cluster):
        part = min(per_block, columns - first)
        assert part > 0, "a block of a row has nothing to do"
        _assert_a_part_is_covered(part, constants)
        first += part
    assert first == columns
    # Groups of rows: one each, or where blocks are persistent as many groups as run together. Peeled rows need a step
    # of whole vectors, for which there may have to be a few more.
    groups, all_groups = item.grid // item.cluster, -(-arguments["rows"] // rows)
    # Those whose sums leave with each row, or that have none, need not share their blocks.
    keeps_sums = not arguments["channels"] and (arguments.get("dweight", 0) or arguments.get("dbias", 0))
    if keeps_sums or groups != all_groups:
        together = device.groups(item.cluster) * max(1, device.threads_per_multiprocessor // (threads * rows))
        assert 1 <= groups <= min(all_groups, max(together, width if constants["PEELED"] else 1))
    if constants.get("CLAIMS"):
        # The first two rows of a group are fixed. 32 bits count the others, and those asked for in vain at the end.
        assert rows == 1 and 2 * groups < arguments["rows"] <= 2**31
        assert groups % constants["CLAIMS"] == 0


def _assert_a_part_is_covered(columns: int, constants: Constants) -> None:
    """Each of the columns of a block's part of a row is in exactly one thread, as kernels/row_stage.cuh lays them."""
    threads, width, peeled = constants["THREADS_PER_ROW"], constants["VECTOR"], constants["PEELED"]
    held = threads * constants["VECTORS"]
    margin = constants["MARGIN"]
    assert margin in (0, width) and (constants["ALIKE"] or margin == width or not peeled)
    # How far the row begins behind a multiple of 16 bytes.
    for shift in (0, 1, width - 1) if peeled else (0,):
        head = margin + (width - shift) % width if peeled else 0
        vectors = max(0, columns - head - margin) // width if peeled else columns // width
        index = np.arange(held)
        assert vectors >= constants["WHOLE_VECTORS"] * threads
        index = index[index < vectors]
        edges = np.arange(columns - vectors * width if peeled else 0)
        assert edges.size <= -(-2 * (margin + width - 1) // threads) * threads or not peeled
        edges = np.where(edges < head, edges, edges + vectors * width)
        taken = np.concatenate([(head + index[:, None] * width + np.arange(width)).reshape(-1), edges])
        assert np.array_equal(np.sort(taken), np.arange(columns))
        if margin and vectors:
            # What lies in another way is read from the piece that a vector begins in to the one after it.
            last = head + (vectors - 1) * width
            assert head - (width - 1) >= 0 and last + 2 * width <= columns


def _covers_row_bulk(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, width, vectors = constants["THREADS_PER_ROW"], constants["VECTOR"], constants["VECTORS"]
    at_once, rows, columns = constants["ROWS_AT_ONCE"], constants["ROWS_PER_BLOCK"], arguments["columns"]
    assert item.block == (threads, at_once) and item.cluster == 1 and not item.cooperative
    assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16), "part of a warp shares by shuffles of powers of two"
    # Each row of a run has its turn, and the last run what is left. Backward, blocks take turns over them.
    assert rows % at_once == 0 and rows <= threads * at_once, "a row's statistics have a thread"
    runs = -(-arguments["rows"] // rows)
    assert item.grid == (runs if item.kernel == "row_bulk_forward" else min(runs, item.grid)) > 0
    # Every column is in one vector of one thread, and all but its last vector are there unasked.
    assert columns % width == 0 and columns // width >= (vectors - 1) * threads
    index = np.arange(vectors)[:, None] * threads + np.arange(threads)
    index[-1, index[-1] * width >= columns] = -1
    taken = (index[index >= 0][:, None] * width + np.arange(width)).reshape(-1)
    assert np.array_equal(np.sort(taken), np.arange(columns))
    assert rows * columns < 2**31, "a place in a run has 32 bits"


def _covers_row_grid(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, width, peeled = constants["THREADS"], constants["VECTOR"], constants["PEELED"]
    blocks, per_block = arguments["blocks_per_row"], arguments["columns_per_block"]
    assert item.cooperative and item.block == (threads, 1) and item.grid % blocks == 0
    assert item.grid // blocks <= arguments["rows"], "a group of blocks has nothing to do"
    assert per_block % width == 0 and (blocks - 1) * per_block < arguments["columns"] <= blocks * per_block
    assert threads >= 4 * width, "an edge has a thread"
    vectors = max(1, -(-(per_block - 2 * width * peeled) // (width * threads)))
    resident, held = constants["RESIDENT"], constants["HELD"]
    assert resident >= 1 and resident + held <= vectors
    assert constants["STREAMED"] == (resident + held < vectors)
    assert constants["ROWS_AHEAD"] == 1 or resident == vectors
    assert constants["PREFETCHED"] <= min(resident, threads)


def _covers_row_pipeline(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, width = constants["THREADS"], constants["VECTOR"]
    blocks, per_block = arguments["blocks_per_row"], arguments["columns_per_block"]
    assert item.cooperative and item.block == (threads + 64, 1) and threads % 32 == 0 and item.grid % blocks == 0
    assert item.grid // blocks <= arguments["rows"], "a group of blocks has nothing to do"
    # As many blocks have parts of each channel.
    channels = arguments["channels"][1] if constants["SEVERAL_CHANNELS"] else 1
    of_channel, room = blocks // channels, arguments["room"] // channels
    assert channels == 1 or (blocks % channels == 0 and room % width == 0)
    assert per_block % width == 0 and (of_channel - 1) * per_block < room <= of_channel * per_block
    assert constants["RESIDENT"] == -(-per_block // (width * threads)), "slots are not those that a part needs"
    assert 1 <= constants["LAG"] < constants["AHEAD"], "what is summed lies where another row is finished"
    assert threads <= 1024, "a lane for each warp merges what the warps have"
    assert constants["PARTS_PER_LANE"] == -(-blocks // 32), "a warp merges what the blocks have"
    segment, stride, room = (arguments[f"segment_{name}"] for name in ("columns", "stride", "room"))
    assert constants["SEGMENTED"] == (segment > 0) and (segment > 0 or stride == room == 0)
    assert not (segment and channels > 1)
    if not segment:
        assert arguments["room"] == arguments["columns"] and not constants["PEELED"]
    else:
        assert arguments["columns"] % segment == 0
        assert arguments["room"] == arguments["columns"] // segment * room
        # The vectors of a segment that begins anywhere: with none of its numbers to spare, and with the most before it.
        aligned = 8 * width if constants["LONG_RUNS"] else width
        cut = (segment + aligned - 1 + aligned - 1) // aligned if constants["PEELED"] else segment // width
        assert room == cut * aligned and (constants["PEELED"] or segment % width == stride % width == 0)
        assert not constants["LONG_RUNS"] or per_block % aligned == 0, "a line lies otherwise than in memory"
        kept = [constants.get(name) for name in ("HAS_WEIGHT", "HAS_BIAS", "WANTS_DWEIGHT", "WANTS_DBIAS")]
        assert constants["WEIGHTS_OF"] == "part" or not any(kept), "what is kept of a column is lost"
        assert arguments["columns"] // segment * stride < 2**31, "a place in a row has 32 bits"


def _covers_row_held(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, width = constants["THREADS"], constants["VECTOR"]
    blocks, per_block, columns = (arguments[name] for name in ("blocks_per_row", "columns_per_block", "columns"))
    assert item.cooperative and item.block == (threads + 64, 1) and threads % 32 == 0 and item.grid == blocks
    # As many blocks have parts of each channel.
    channels = arguments["channels"][1] if constants["SEVERAL_CHANNELS"] else 1
    of_channel, positions = blocks // channels, columns // channels
    assert blocks % channels == columns % channels == 0 and positions % width == 0
    assert per_block % width == 0 and (of_channel - 1) * per_block < positions <= of_channel * per_block
    assert constants["RESIDENT"] == -(-per_block // (width * threads)), "a row is not held"
    assert constants["RING"] > constants["RESIDENT"], "nothing comes while a row waits"
    assert constants["PARTS_PER_LANE"] == -(-blocks // 32), "a warp merges what the blocks have"
    assert arguments["rows"] >= 2, "there is nothing to wait for while a row comes"


def _covers_row_stream(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    threads, width, unit = constants["THREADS"], constants["VECTOR"], constants["UNIT"]
    blocks, per_block = arguments["blocks_per_row"], arguments["columns_per_block"]
    assert item.cooperative and item.block == (threads + 96, 1) and threads % 32 == 0 and item.grid % blocks == 0
    groups, line = item.grid // blocks, 8 * width
    assert groups <= arguments["rows"], "a group of blocks has nothing to do"
    # Each of a row's blocks has so many of its columns, whole lines, and the last one what is left.
    assert per_block % line == 0 and (blocks - 1) * per_block < arguments["columns"] <= blocks * per_block
    room = -(-(per_block + line) // (width * threads))
    assert constants["RESIDENT"] == room, "a stage is not what a part needs that begins anywhere in a line"
    assert 1 <= constants["LAG"] < constants["AHEAD"], "nothing comes while a row waits"
    alike = arguments["rows"] <= groups or groups * arguments["stride"] % unit == 0
    assert width % unit == 0 and alike, "a thread has other columns from row to row"
    assert threads <= 1024, "a lane for each warp merges what the warps have"
    assert constants["PARTS_PER_LANE"] == -(-blocks // 32), "a warp merges what the blocks have"
    assert arguments["columns"] < 2**31, "a place in a row has 32 bits"


def _covers_row_split(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    lanes, tile = constants["ROW_LANES"], _tile(item, constants)
    chunk, splits = arguments["columns_per_split"], arguments["splits"]
    assert chunk % tile == 0 and 1 <= chunk // tile <= TILES_PER_CHUNK
    assert splits * chunk >= arguments["columns"] > (splits - 1) * chunk
    assert item.grid == splits * -(-arguments["rows"] // lanes)
    assert lanes == 1 or not (constants["PEELED"] or constants.get("MERGES")), "all threads of a block have one row"


def _covers_row_split_backward(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    lanes, tile, tiles = constants["ROW_LANES"], _tile(item, constants), arguments["tiles"]
    assert tiles * tile >= arguments["columns"] > (tiles - 1) * tile
    assert arguments["rows_per_group"] % lanes == 0 and item.grid % tiles == 0
    groups, merged = item.grid // tiles, constants["MERGED_ROWS"]
    assert arguments["splits"] == 1 or (lanes == 1 and arguments["rows_per_group"] <= merged)
    assert groups * arguments["rows_per_group"] >= arguments["rows"] > (groups - 1) * arguments["rows_per_group"]


def _tile(item: Launch, constants: Constants) -> int:
    """Columns of a tile, as kernels/row_tile.cuh has them."""
    threads, lanes = constants["THREADS"], constants["ROW_LANES"]
    assert item.block == (threads, 1) and threads % 32 == 0
    assert lanes in (1, 2, 4, 8, 16, 32)
    return int(threads // lanes * constants["VECTOR"] * constants["UNROLL"])


def _covers_merge(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    lanes, sets = constants["SET_LANES"], constants["SETS_PER_BLOCK"]
    assert item.block == (lanes, sets) and lanes * sets % 32 == 0
    # Part of a warp, by shuffles, or all of a block, by its shared memory.
    assert lanes in (1, 2, 4, 8, 16, 32) or (lanes % 32 == 0 and sets == 1)
    assert item.grid == -(-arguments["sets"] // sets)
    chunk, splits = arguments["points_per_split"], arguments["splits"]
    assert splits * chunk >= arguments["points"]
    assert splits == 0 or arguments["points"] > (splits - 1) * chunk


def _covers_column_sums(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (constants["COLUMN_THREADS"], constants["ROW_THREADS"])
    assert constants["AT_ONCE"] in (2, 4, 8, 10, 14)
    assert arguments["second_columns"] in (0, arguments["columns"])
    columns = arguments["columns"] + arguments["second_columns"]
    assert item.grid == -(-columns // constants["COLUMN_THREADS"])


def _covers_zeros(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (constants["THREADS"], 1)
    assert 0 < item.grid <= -(-arguments["count"] // constants["THREADS"]), "no block is without a store"


def _covers_weight_gradients(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    columns, rows = constants["COLUMN_LANES"], constants["ROW_LANES"]
    assert item.block == (columns, rows) and columns * rows % 32 == 0
    assert columns in (1, 2, 4, 8, 16, 32), "the lanes of a warp are added by shuffles"
    assert item.grid == -(-arguments["columns"] // (columns * constants["VECTOR"]))


_COVERS = {
    "row_block_forward": _covers_row_block,
    "row_block_backward": _covers_row_block,
    "row_bulk_forward": _covers_row_bulk,
    "row_bulk_backward": _covers_row_bulk,
    "row_grid_forward": _covers_row_grid,
    "row_held_forward": _covers_row_held,
    "row_held_backward": _covers_row_held,
    "row_stream_forward": _covers_row_stream,
    "row_stream_backward": _covers_row_stream,
    "row_pipeline_forward": _covers_row_pipeline,
    "row_pipeline_backward": _covers_row_pipeline,
    "row_split_statistics": _covers_row_split,
    "row_split_forward": _covers_row_split,
    "row_split_gradient_sums": _covers_row_split,
    "row_split_backward": _covers_row_split_backward,
    "split_merge": _covers_merge,
    "row_weight_gradients": _covers_weight_gradients,
    "column_sums": _covers_column_sums,
    "zeros": _covers_zeros,
}


# ---- Every number has its channel's weight.


def weights_are_those_of_the_channels(problem: Problem, device: Device, chosen: Plan) -> None:
    """As kernels/row_channels.cuh and row_channel_sums.cuh count them."""
    for item in chosen.launches:
        constants, arguments = dict(item.constants), dict(item.arguments)
        unaware = problem.is_bare and not arguments.get("channels")
        if problem.channels is None or unaware or "WEIGHTS_OF" not in constants:
            assert constants.get("WEIGHTS_OF", "columns") == "columns"
            assert item.kernel == "split_merge" or not arguments.get("channels")  # whose are sets
            continue
        width: Any = constants["VECTOR"]
        per_block: Any = arguments["columns_per_block"]
        rows_per_sample, channels_per_row, positions, by_rows, by_positions = _integers(arguments["channels"])
        assert (rows_per_sample, channels_per_row, positions) == (*_sizes_of(problem),)
        assert channels_per_row * positions == problem.columns < 2**31 and problem.rows < 2**31
        assert constants["CHANNEL_NUMBERS"] == 5
        _assert_divides(by_rows, rows_per_sample, problem.rows)
        _assert_divides(by_positions, positions, problem.columns)
        if constants["WEIGHTS_OF"] == "part":
            several = channels_per_row > 1 and not item.kernel.startswith(("row_held", "row_pipeline"))
            assert not several or positions % per_block == 0
        elif constants["WEIGHTS_OF"] == "vector":
            assert positions % width == 0 and per_block % width == 0 and not constants.get("PEELED")
        elif constants["WEIGHTS_OF"] == "crossing":
            assert width <= positions, "a vector has numbers of more than two channels"
            if isinstance(problem, BackwardProblem):
                # No other block has any of their numbers.
                assert not constants["PEELED"] and per_block % width == 0 == per_block % positions
                assert constants["SEGMENT"] == constants["STEPS"] == 1
                assert constants["THREADS_PER_ROW"] % constants["LANES"] == 0 == 32 % constants["LANES"]
        else:
            assert constants["WEIGHTS_OF"] == "numbers" and not isinstance(problem, BackwardProblem)
        if isinstance(problem, BackwardProblem) and constants["WEIGHTS_OF"] == "vector":
            assert per_block % positions == 0
            _assert_entries_lie_in_channels(constants, positions)


def _assert_divides(reciprocal: int, divisor: int, most: int) -> None:
    """As kernels/reciprocal.cuh divides numbers up to ``most``."""
    factor, shift = reciprocal % 2**32, reciprocal >> 32
    for quotient in some(most // divisor + 1):
        for number in (quotient * divisor - 1, quotient * divisor, quotient * divisor + 1):
            if 0 <= number <= most:
                assert number * factor >> shift == number // divisor and number * factor < 2**64


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(values)


def _sizes_of(problem: Problem) -> tuple[int, int, int]:
    assert problem.channels is not None
    return problem.channels.rows_per_sample, problem.channels.channels_per_row, problem.channels.positions


def _assert_entries_lie_in_channels(constants: Constants, positions: int) -> None:
    """What SEGMENT threads have of STEPS vectors lies in one channel, and a channel's entries lie side by side."""
    threads, width = constants["THREADS_PER_ROW"], constants["VECTOR"]
    segment, steps, lanes = constants["SEGMENT"], constants["STEPS"], constants["LANES"]
    assert threads % segment == 0 and min(32, threads) % segment == 0 and constants["VECTORS"] % steps == 0
    assert lanes & (lanes - 1) == 0 and lanes <= min(32, threads)
    step, thread = np.divmod(np.arange(threads * constants["VECTORS"]), threads)
    entry = step // steps * (threads // segment) + thread // segment
    channel = np.arange(entry.size) * width // positions
    assert positions % (segment * steps * width) == 0
    assert np.array_equal(entry // (positions // (segment * steps * width)), channel)
    assert lanes <= positions // (segment * steps * width)
