"""What every plan of rows keeps: the limits of every device, and that its numbers fit together. RULES are all of it.

What a launch computes is not looked at here (the emulator does that), only that every row and column is taken once,
every access is aligned, every buffer is large enough.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from plan_cases import (
    Problem,
)

from cunorm import kernels, launch
from cunorm.plan import Device, Launch, Plan
from cunorm.problem import (
    DTYPES,
    AnyProblem,
    BackwardProblem,
    ChannelBackward,
    ChannelForward,
    ForwardProblem,
    Matrix,
    Vector,
)

RUNNING = "running_mean", "running_var"
OPERANDS = {
    ForwardProblem: {"x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd", *RUNNING},
    BackwardProblem: {"dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias"},
    ChannelForward: {"x", "weight", "bias", "y", "mean", "rstd", *RUNNING},
    ChannelBackward: {"dy", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias"},
}
TILES_PER_CHUNK = 64  # kernels/row_split_statistics.cu relies on it
Constants = dict[str, Any]


# ---- Limits, arguments and scratch memory.


def compute_bytes(problem: AnyProblem) -> int:
    """The bytes of a number that sums are kept in."""
    return DTYPES[DTYPES[problem.x.dtype].compute].itemsize


def within_the_limits_of_cuda(problem: Problem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        assert 1 <= item.grid <= 2**31 - 1
        threads = item.block[0] * item.block[1]
        assert threads % 32 == 0 and 32 <= threads <= 1024
        assert item.shared_bytes >= 0
        shared_bytes = item.shared_bytes + _static_shared_bytes(item, problem)
        assert shared_bytes <= device.shared_bytes
        # From 16 blocks on a cluster needs a kernel's consent, which the driver's side gives; more there are not.
        assert item.cluster in (1, 2, 4, 8, 16) and item.grid % item.cluster == 0
        assert device.groups(item.cluster) > 0, "the device cannot run such a cluster"
        assert item.cluster == 1 or device.capability >= 90
        if item.cooperative:
            # One block a multiprocessor, which has room for any; or as many as the kernel's text says, if they fit.
            share: Any = dict(item.constants).get("BLOCKS_PER_MULTIPROCESSOR", 1)
            assert item.grid <= device.multiprocessors * share
            assert threads * share <= device.threads_per_multiprocessor
            # Of the shared memory of a multiprocessor, a kilobyte is kept for each block.
            assert (shared_bytes + 1024) * share <= device.shared_bytes + 1024


def _static_shared_bytes(item: Launch, problem: Problem) -> int:
    """What a kernel that also has dynamic shared memory declares itself."""
    constants: Constants = dict(item.constants)
    size = compute_bytes(problem)
    if item.kernel == "row_grid_forward":
        return 2 * 2 * constants["THREADS"] // 32 * size
    if item.kernel.startswith("row_pipeline"):
        # Of two turns: what each warp has of the row, and what all need to sum and to finish it.
        of_warp, of_row = (3 + constants["PEELED"], 5) if item.kernel.endswith("forward") else (2, 4 + 6)
        return int(2 * (of_warp * constants["THREADS"] // 32 + of_row) * size)
    if not item.kernel.startswith("row_block"):
        assert item.shared_bytes == 0
        return 0
    scratch = 2 * 2 * -(-constants["THREADS_PER_ROW"] // 32) * constants["ROWS_PER_BLOCK"] * size
    claims = constants.get("CLAIMS", 0) > 0  # what is claimed is told beside the statistics, or in a block by itself
    exchange = 2 * item.cluster * (4 if claims and item.cluster > 1 else 3) * size + 2 * 8
    return int(scratch + exchange + 2 * size * claims)


def every_field_of_the_kernel(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    buffers = OPERANDS[type(problem)] | {scratch.name for scratch in chosen.scratch}
    for item in chosen.launches:
        fields = kernels.argument_fields(item.kernel)
        assert sorted(name for name, _, _ in fields) == sorted(name for name, _ in item.arguments)
        for code, value in launch.argument_values(item):
            if code == "P":
                assert value is None or value in buffers
            else:
                assert isinstance(value, float if code == "d" else int) and -(2**63) <= value < 2**63


def scratch_memory(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    assert len({scratch.name for scratch in chosen.scratch}) == len(chosen.scratch)
    end = 0
    for scratch in sorted(chosen.scratch, key=lambda scratch: (scratch.offset, scratch.bytes)):
        assert scratch.offset % 256 == 0 and scratch.offset >= end
        end = scratch.offset + scratch.bytes
    assert end <= chosen.workspace_bytes < end + 256 * (len(chosen.scratch) + 1)


# Bytes that each kernel takes of each buffer between kernels, from its arguments and its constants, how many groups of
# blocks there are, and the size of a sum.
_SIZES: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "partials": lambda a, groups, size: a["rows"] * a["columns"] * size,
    "second partials": lambda a, groups, size: a["rows"] * a["second_columns"] * size,
    "column sums": lambda a, groups, size: a["columns"] * size,
    "so many times 16 bytes": lambda a, groups, size: a["count"] * 16,
    "four bytes for each way that rows begin, in pieces of 16": lambda a, groups, size: -(-a["CLAIMS"] // 4) * 16,
    "a row a share": lambda a, groups, size: (
        (_channel_sums(a) if a["channels"] else (groups + a["CLASSES"] - 1) * a["columns"]) * size
    ),
    "a row a group that shares rows": lambda a, groups, size: (
        (_channel_sums(a) if a["channels"] else groups // a["blocks_per_row"] * a["columns"]) * size
    ),
    "a row a group of rows": lambda a, groups, size: groups // a["tiles"] * a["columns"] * size,
    "a double a chunk": lambda a, groups, size: a["rows"] * a["splits"] * 8,
    "a double a chunk of a set": lambda a, groups, size: a["sets"] * a["splits"] * 8,
    "one a set": lambda a, groups, size: a["sets"] * size,
    "two a chunk": lambda a, groups, size: 2 * a["rows"] * a["splits"] * size,
    "one a row": lambda a, groups, size: a["rows"] * size,
    "three a block, with a tag beside each word, for two turns": lambda a, groups, size: 2 * groups * 3 * 2 * size,
    "three a block, with a tag beside each word, for turns that are kept; or four": lambda a, groups, size: (
        _words_of_turns(a, groups) * (3 + a["PEELED"]) * 2 * size
    ),
    "two a block, with a tag beside each word, for the turns that are kept": lambda a, groups, size: (
        _words_of_turns(a, groups) * 2 * 2 * size
    ),
}
_SCRATCH = {
    "column_sums": {"partials": "partials", "second_partials": "second partials", "sums": "column sums"},
    "zeros": {"target": "so many times 16 bytes"},
    "row_block_forward": {"claimed": "four bytes for each way that rows begin, in pieces of 16"},
    "row_block_backward": dict.fromkeys(["dweight", "dbias"], "a row a share"),
    "row_grid_forward": {"words": "three a block, with a tag beside each word, for two turns"},
    "row_pipeline_forward": {"words": "three a block, with a tag beside each word, for turns that are kept; or four"},
    "row_pipeline_backward": dict.fromkeys(["dweight", "dbias"], "a row a group that shares rows")
    | {"words": "two a block, with a tag beside each word, for the turns that are kept"},
    "row_split_statistics": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "split_merge": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk of a set")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a set"),
    "row_split_forward": dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row")
    | dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk"),
    "row_split_gradient_sums": {"sums": "two a chunk"},
    "row_split_backward": dict.fromkeys(["dweight", "dbias"], "a row a group of rows") | {"sums": "two a chunk"},
}


def _channel_sums(given: dict[str, Any]) -> int:
    """Sums over channels, or over parts of one where a block has no whole one: of each row, each.

    Blocks in a pipeline add up such parts themselves.
    """
    _, channels_per_row, positions, _, _ = given["channels"]
    parts = 1 if "LAG" in given else -(-positions // min(positions, given["columns_per_block"]))
    return int(given["rows"]) * channels_per_row * parts


def _words_of_turns(given: dict[str, Any], blocks: int) -> int:
    """Of each turn that is kept, one for every block that could share the rows of a group."""
    return int(2 * given["LAG"] * blocks // given["blocks_per_row"] * 32 * given["PARTS_PER_LANE"])


def scratch_buffers_hold_what_the_kernels_put_there(problem: Problem, device: Device, chosen: Plan) -> None:
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    itemsize = compute_bytes(problem)
    for item in chosen.launches:
        given: dict[str, Any] = {**dict(item.arguments), **dict(item.constants)}
        for name, value in item.arguments:
            if isinstance(value, str) and value in sizes and given.get("splits") != 0:
                size = _SIZES[_SCRATCH[item.kernel][name]](given, item.grid // item.cluster, itemsize)
                assert size == sizes[value], (item.kernel, name)


def scratch_is_written_before_it_is_read(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    names = {scratch.name for scratch in chosen.scratch}
    written: set[str] = set()
    for item in chosen.launches:
        arguments = dict(item.arguments)
        read = _constant_fields(item.kernel)
        if arguments.get("rows") == 0 or arguments.get("splits") == 0:  # of nothing, nothing is read
            read = set()
        assert not {arguments[field] for field in read} & names - written, item.kernel
        written |= {str(arguments[field]) for field, _ in _declarations(item.kernel) if field not in read}


@functools.cache
def _declarations(kernel: str) -> list[tuple[str, str]]:
    """The pointers of the ``struct Arguments`` in a kernel's shipped text: name and type."""
    match = re.search(r"struct Arguments \{.*?\n\};", kernels.kernel_text(kernel, {}), re.DOTALL)
    assert match is not None
    return [(name, kind) for kind, name in re.findall(r"^  ([\w ]+\*) (\w+);", match[0], re.M)]


def _constant_fields(kernel: str) -> set[str]:
    return {field for field, kind in _declarations(kernel) if kind.startswith("const ")}


def the_workspace_is_modest(problem: Problem, device: Device, chosen: Plan) -> None:
    """Scratch memory is a third of what must move at most, beside what is small.

    That is a quarter of a megabyte a multiprocessor (partial sums of what its blocks hold), one row of partial sums,
    and where rows are not contiguous what is known of each row: five numbers of 8 bytes.
    """
    small = device.multiprocessors * 2**18 + 16 * problem.columns + 40 * problem.rows + 2048
    assert chosen.workspace_bytes <= problem.bytes_moved // 3 + small


# ---- Every access is aligned.


def _address(matrix: Matrix, problem: Problem, row: int, column: int) -> int:
    """Bytes from a 16-byte boundary to x[row, column]."""
    offset = 0
    for index, sizes, strides in (
        (row, problem.row_sizes, matrix.row_strides),
        (column, problem.column_sizes, matrix.column_strides),
    ):
        for size, stride in zip(reversed(sizes), reversed(strides)):
            offset += index % size * stride
            index //= size
    return matrix.offset + offset * DTYPES[matrix.dtype].itemsize


def every_access_is_aligned_and_contiguous(problem: Problem, device: Device, chosen: Plan) -> None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    for item in chosen.launches:
        constants: Constants = dict(item.constants)
        if "VECTOR" not in constants:
            continue
        width = constants["VECTOR"]
        assert width * itemsize <= 16
        if constants.get("PEELED"):
            _assert_peeled_vectors_are_aligned(problem, item, constants)
        else:
            _assert_vectors_are_aligned(problem, constants)
        for name, operand in (("WEIGHT", problem.weight), ("BIAS", problem.bias)):
            if f"{name}_ACCESS" in constants:
                assert_access_to_weights(constants, name, operand, width)
        if item.kernel.startswith("row_block"):
            _assert_shared_memory_is_aligned(problem, item, constants)
        if item.kernel.startswith(("row_grid", "row_pipeline")):
            _assert_slots_are_aligned(problem, item, constants)


def _some(count: int) -> set[int]:
    return {number for number in (0, 1, 2, 3, 5, 7, count // 2, count - 2, count - 1) if 0 <= number < count}


def _assert_vectors_are_aligned(problem: Problem, constants: Constants) -> None:
    itemsize, width = DTYPES[problem.x.dtype].itemsize, constants["VECTOR"]
    assert problem.columns % width == 0
    shifts: dict[str, int] = {}
    if constants.get("SHIFTED"):
        read = ("x", "residual") if isinstance(problem, ForwardProblem) else ("x", "dy", "dresidual_out")
        shifts = {name: constants[f"{name.upper()}_SHIFT"] for name in read if getattr(problem, name)}
        assert width * itemsize == 16 and any(shifts.values())
    for name in ("x", "y", "residual", "residual_out", "dy", "dx", "dresidual_out"):
        matrix = getattr(problem, name, None)
        if matrix is None:
            continue
        shift = shifts.get(name, 0) * itemsize
        for row in _some(problem.rows):
            for vector in _some(problem.columns // width):
                first = _address(matrix, problem, row, vector * width)
                assert first % (width * itemsize) == shift
                if row == 0:  # in every row, its numbers lie as far apart
                    lanes = [_address(matrix, problem, row, vector * width + lane) for lane in range(width)]
                    assert lanes == [first + lane * itemsize for lane in range(width)]


def _aligned_to(problem: Problem) -> Matrix:
    """What the vectors of peeled rows are aligned to: the result, if there is one."""
    if isinstance(problem, ForwardProblem):
        return problem.y
    return problem.dx or problem.x


def _assert_peeled_vectors_are_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    assert constants["VECTOR"] * itemsize == 16
    # Columns are contiguous, and pointers aligned to their numbers: a head reaches a multiple of 16 bytes.
    for matrix in problem.matrices:
        assert matrix.alignment >= itemsize and (matrix.column_strides[-1] == 1 or problem.columns == 1)
    groups, arguments = item.grid // item.cluster, dict(item.arguments)
    shared_row = item.cluster > 1 or item.cooperative or "splits" in arguments
    part = arguments["columns_per_split" if "splits" in arguments else "columns_per_block"]
    assert part * itemsize % 16 == 0 or not shared_row
    for row in _some(problem.rows):
        begins = {_address(matrix, problem, row, 0) % 16 for matrix in problem.matrices}
        if item.cooperative or constants.get("STAGE") != "direct":
            # The bytes that a vector is copied from are aligned in every tensor, not only in the one peeled for.
            assert len(begins) == 1 and all(matrix.alignment == 16 for matrix in problem.matrices)
        step = groups * constants.get("ROWS_PER_BLOCK", problem.rows)
        classes = constants.get("CLASSES", 1)  # more, and groups have rows of one until there are no more of them
        step = constants.get("CLAIMS") or (classes if classes > 1 else step)
        assert len(begins) == 1 or not constants.get("ALIKE")
        by_channel = item.kernel == "row_block_backward" and problem.channels is not None
        if row + step < problem.rows and item.kernel.startswith("row_block") and not by_channel:
            # A thread keeps its columns: in the sums of gradients, and in the weights and edges that it took once.
            aligned = _aligned_to(problem)
            assert _address(aligned, problem, row + step, 0) % 16 == _address(aligned, problem, row, 0) % 16


def assert_access_to_weights(constants: Constants, name: str, operand: Vector | None, width: int) -> None:
    assert constants[f"HAS_{name}"] == (operand is not None)
    if operand is None:
        return
    access, itemsize = constants[f"{name}_ACCESS"], DTYPES[operand.dtype].itemsize
    assert constants[f"{name}_TYPE"] == DTYPES[operand.dtype].cuda
    assert access in (2, 4, 8, 16) and access % itemsize == 0
    step = min(access // itemsize, width)  # as load_widened takes them
    assert width % step == 0
    if not constants.get("PEELED"):  # those of peeled rows come from anywhere
        for first in range(0, 4 * width, step):
            assert (operand.alignment + first * itemsize) % (step * itemsize) == 0
    if shift := constants.get(f"{name}_SHIFT"):  # they are read in whole pieces, with a part of one more
        assert shift * itemsize == operand.offset and width * itemsize % 16 == 0 and not constants["PEELED"]


def _assert_shared_memory_is_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    """Tensors lie behind each other in it, then weight and bias: as kernels/row_stage.cuh and row_affine.cuh say."""
    itemsize, width = DTYPES[problem.x.dtype].itemsize, constants["VECTOR"]
    stage, threads = constants["STAGE"], math.prod(item.block)
    slots = threads * constants["VECTORS"] * width
    needed = 0
    if stage != "direct":
        more = constants["HAS_RESIDUAL"] if item.kernel.endswith("forward") else constants["HAS_DRESIDUAL"]
        tensors = (1 if item.kernel.endswith("forward") else 2) + more
        if stage == "run":
            tensors += 1 + more if item.kernel.endswith("forward") else constants["WANTS_DX"]
            slots += 2 * (16 // itemsize)
        if constants["SHIFTED"]:
            assert stage == "ahead"
            slots += item.block[1] * 128 // itemsize
        # A tensor's slots begin where the first one's do.
        assert slots * itemsize % 16 == 0
        needed = tensors * constants["ROWS_AHEAD"] * slots * itemsize
    assert constants["ROWS_AHEAD"] == 1 or stage == "ahead"
    if stage == "run":
        assert all(matrix.row_strides[0] == problem.columns or problem.rows == 1 for matrix in problem.matrices)
        assert item.cluster == 1 and not constants["PEELED"] and not constants["SHIFTED"]
        assert constants["WEIGHTS"] != "staged"
        # Whole pieces of 16 bytes, from the one that the run begins in to the one that it ends in.
        pieces = -(-(16 // itemsize - 1 + constants["ROWS_PER_BLOCK"] * problem.columns) // (16 // itemsize))
        assert pieces * 16 <= slots * itemsize
    if stage == "ahead":
        # One copy is 4, 8 or 16 bytes.
        assert width * itemsize in (4, 8, 16)
    if constants["WEIGHTS"] == "staged" and problem.channels is not None:
        # Those of two turns, in double where x is; a thread loads one channel's, and warps wait for each other.
        assert needed % 16 == 0 and constants["WEIGHTS_OF"] != "part" and problem.parameters
        assert constants["THREADS_PER_ROW"] > 32 and _channels_of_a_block(problem, item) <= constants["THREADS_PER_ROW"]
        needed += 2 * threads * len(problem.parameters) * compute_bytes(problem)
    elif constants["WEIGHTS"] == "staged":
        # Those of a row, or backward, and where rows begin in different ways, of each.
        forward = item.kernel.endswith("forward")
        anywhere = constants["PEELED"] or constants["WEIGHT_SHIFT"] or constants["BIAS_SHIFT"]
        as_in_memory = bool(forward and anywhere and not constants["TAKES_TURNS"])
        shared = as_in_memory or (forward and not constants["PEELED"])
        staged = constants["VECTORS"] * (constants["THREADS_PER_ROW"] if shared else threads)
        elements = -(-staged // 8) * 8 * width + 32 * as_in_memory
        for operand in (problem.weight, problem.bias):
            if operand is not None:
                assert needed % 16 == 0
                needed += elements * DTYPES[operand.dtype].itemsize
                # As in memory: most of a piece before the row, the row, and the piece behind its last vector.
                piece = 16 // DTYPES[operand.dtype].itemsize
                most = piece - 1 + dict(item.arguments)["columns_per_block"] + piece
                assert most <= elements or not as_in_memory
    if item.kernel.endswith("backward") and problem.channels is not None:
        # For each channel's sums two sets of entries, of two numbers each; and of heads, where vectors reach into it.
        if constants["WEIGHTS_OF"] != "part" and (problem.dweight or problem.dbias):
            needed += 4 * threads * constants["VECTORS"] * compute_bytes(problem) // _lanes_and_steps(constants)
        if constants["WEIGHTS_OF"] == "crossing" and (problem.dweight or problem.dbias):
            heads = constants["ROWS_PER_BLOCK"] * _channels_of_a_block(problem, item)
            needed += 4 * heads * compute_bytes(problem)
    elif item.kernel.endswith("backward"):
        # At the end the sums of half the rows, when they are added up, or of a peeled one, when they are put in order.
        rows = max(constants["PEELED"], constants["ROWS_PER_BLOCK"] // 2)
        sums = rows * width * (dict(item.arguments)["columns_per_block"] // width + 1)
        needed = max(needed, sums * compute_bytes(problem))
    assert needed <= item.shared_bytes <= needed + 64, "shared memory is not what the kernel uses"


def _channels_of_a_block(problem: Problem, item: Launch) -> int:
    """How many channels the block with the most of them has of a row."""
    assert problem.channels is not None
    columns, positions = dict(item.arguments)["columns_per_block"], problem.channels.positions
    firsts = range(0, problem.columns, columns)
    return max((min(first + columns, problem.columns) - 1) // positions - first // positions + 1 for first in firsts)


def _lanes_and_steps(constants: Constants) -> int:
    """How many vectors make one entry of a channel."""
    return int(constants["SEGMENT"] * constants["STEPS"])


def _assert_slots_are_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    """Every vector is copied in 16 bytes, to slots behind each other; then come the numbers of an exchange, if any."""
    assert constants["VECTOR"] * DTYPES[problem.x.dtype].itemsize == 16
    ahead = constants["ROWS_AHEAD"] if item.kernel == "row_grid_forward" else constants["AHEAD"]
    slots = constants["THREADS"] * ahead * constants["RESIDENT"]
    forward, numbers = item.kernel.endswith("forward"), 0
    tensors = 1 + constants["HAS_RESIDUAL"] if forward else 2 + constants["HAS_DRESIDUAL"]
    arguments: dict[str, Any] = dict(item.arguments)
    if item.kernel == "row_grid_forward":
        numbers = 3 * arguments["blocks_per_row"] * compute_bytes(problem)
    else:
        told, several = (arguments["segment_columns"], arguments["segment_stride"]), len(problem.column_sizes) > 1
        segment = problem.column_sizes[-1] if constants["SEGMENTED"] else 0
        for matrix in problem.matrices:
            assert told == (segment, matrix.column_strides[0] if several else 0), "segments lie otherwise"
            assert not constants["PEELED"] or matrix.row_strides == problem.x.row_strides, "rows begin otherwise"
    assert item.shared_bytes == tensors * slots * 16 + numbers


# ---- Every row and every column is taken, once.


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
    assert per_block % width == 0 and (blocks - 1) * per_block < arguments["room"] <= blocks * per_block
    assert constants["RESIDENT"] == -(-per_block // (width * threads)), "slots are not those that a part needs"
    assert 1 <= constants["LAG"] < constants["AHEAD"], "what is summed lies where another row is finished"
    assert threads <= 1024, "a lane for each warp merges what the warps have"
    assert constants["PARTS_PER_LANE"] == -(-blocks // 32), "a warp merges what the blocks have"
    segment, stride, room = (arguments[f"segment_{name}"] for name in ("columns", "stride", "room"))
    assert constants["SEGMENTED"] == (segment > 0) and (segment > 0 or stride == room == 0)
    if not segment:
        assert arguments["room"] == arguments["columns"] and not constants["PEELED"]
    else:
        assert arguments["columns"] % segment == 0
        assert arguments["room"] == arguments["columns"] // segment * room
        # The vectors of a segment that begins anywhere: with none of its numbers to spare, and with the most before it.
        cut = (segment + width - 1 + width - 1) // width if constants["PEELED"] else segment // width
        assert room == cut * width and (constants["PEELED"] or segment % width == stride % width == 0)
        kept = [constants.get(name) for name in ("HAS_WEIGHT", "HAS_BIAS", "WANTS_DWEIGHT", "WANTS_DBIAS")]
        assert constants["WEIGHTS_OF"] == "part" or not any(kept), "a thread does not know its columns"
        assert arguments["columns"] // segment * stride < 2**31, "a place in a row has 32 bits"


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


def covers_zeros(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
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
    "row_grid_forward": _covers_row_grid,
    "row_pipeline_forward": _covers_row_pipeline,
    "row_pipeline_backward": _covers_row_pipeline,
    "row_split_statistics": _covers_row_split,
    "row_split_forward": _covers_row_split,
    "row_split_gradient_sums": _covers_row_split,
    "row_split_backward": _covers_row_split_backward,
    "split_merge": _covers_merge,
    "row_weight_gradients": _covers_weight_gradients,
    "column_sums": _covers_column_sums,
    "zeros": covers_zeros,
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
            assert channels_per_row == 1 or positions % per_block == 0
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
    for quotient in _some(most // divisor + 1):
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


# ---- Every result is written.


def every_result_is_written(problem: Problem, device: Device, chosen: Plan) -> None:
    """Each output that is wanted and not empty is a field of some launch, and its type is right."""
    written = {
        str(value): (item, field)
        for item in chosen.launches
        for field, value in item.arguments
        if isinstance(value, str) and field not in _constant_fields(item.kernel)
    }
    filled = bool(problem.rows and problem.columns)
    if isinstance(problem, ForwardProblem):
        wanted = {"y"} if filled else set()
        wanted |= {"residual_out"} if filled and problem.residual_out is not None else set()
        if problem.stats and problem.rows:
            wanted |= {"rstd", "mean"} if problem.norm.centered else {"rstd"}
        assert written.keys() >= wanted
        return
    wanted = {"dx"} if problem.dx is not None and filled else set()
    kinds = {"sums": "SUM_TYPE", "second_sums": "SECOND_SUM_TYPE"}
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        if dtype is not None and problem.columns:
            wanted.add(name)
            item, field = written[name]
            assert sum(value == name for launched in chosen.launches for _, value in launched.arguments) == 1
            kind = kinds[field] if item.kernel == "column_sums" else f"{field.upper()}_TYPE"
            assert dict(item.constants)[kind] == DTYPES[dtype].cuda
            assert item.kernel == "column_sums" or field == name
    assert written.keys() >= wanted
    assert not (written.keys() & {"dweight", "dbias"}) - wanted


def launches_may_overlap(problem: AnyProblem, device: Device, chosen: Plan) -> None:
    """Each launch may begin before the one before it has ended: it waits itself, or reads what is not there yet.

    That the wait comes first is seen in what the compiler makes of it (test_compile.py).
    """
    for place, item in enumerate(chosen.launches):
        text = kernels.kernel_source(item.kernel, {})
        assert place == 0 or "wait_for_earlier_launches();" in text, f"{item.kernel} does not wait"
        assert item is chosen.launches[-1] or "let_next_launch_begin();" in text, f"nothing overlaps {item.kernel}"


RULES = [
    within_the_limits_of_cuda,
    every_field_of_the_kernel,
    scratch_memory,
    scratch_buffers_hold_what_the_kernels_put_there,
    scratch_is_written_before_it_is_read,
    the_workspace_is_modest,
    every_access_is_aligned_and_contiguous,
    rows_and_columns_are_covered,
    weights_are_those_of_the_channels,
    every_result_is_written,
    launches_may_overlap,
]
