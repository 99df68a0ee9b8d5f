"""Plans as the pure function they are: every problem has one, within the limits of every device, and it is complete.

Problems are drawn without memory behind them, so sizes go up to what no machine holds. What a launch computes is not
looked at here (the emulator does that), only that its numbers fit together: every row and column is taken once, every
access is aligned, every buffer is large enough. What a plan must keep is a list of rules, and every geometry that
tuning may try is held to the same ones.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from cunorm import kernels, launch
from cunorm.plan import Device, Launch, Plan, plan, plan_with, row_geometry
from cunorm.problem import ACTIVATIONS, DTYPES, BackwardProblem, ForwardProblem, Matrix, Norm, Vector

Problem = ForwardProblem | BackwardProblem

DEVICES = {
    "sm_75": Device("sm_75", 40, 1024),
    "sm_80": Device("sm_80", 108, 2048),
    "sm_86": Device("sm_86", 84, 1536),
    "sm_89": Device("sm_89", 128, 1536),
    "sm_90": Device("sm_90", 132, 2048),
    "sm_100": Device("sm_100", 148, 2048),
    "sm_120": Device("sm_120", 170, 1536),
    "few clusters": Device("sm_90", 2, 512, clusters=(1, 1, 0, 0)),
    "no clusters": Device("sm_90", 2, 512, clusters=(0, 0, 0, 0)),
    "smallest": Device("sm_75", 1, 1024),
}
OPERANDS = {
    ForwardProblem: {"x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd"},
    BackwardProblem: {"dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias"},
}
ITEMSIZE = {cuda: itemsize for itemsize, cuda, _ in DTYPES.values()}
MOST_BYTES = 2**38  # of one tensor; the largest GPUs of today hold less
TILES_PER_CHUNK = 64  # kernels/row_split_statistics.cu relies on it


# ---- Problems of every kind.


def _powers_up_to(largest: int) -> st.SearchStrategy[int]:
    """Sizes of every magnitude: powers of two, their neighbours, multiples of them, and anything."""

    def near(exponent: int, odd: int, change: int) -> int:
        return min(largest, max(1, odd * 2**exponent + change))

    bits = largest.bit_length() - 1
    magnitude = st.integers(0, bits).flatmap(lambda bit: st.integers(2**bit, min(largest, 2 ** (bit + 1))))
    return magnitude | st.builds(near, st.integers(0, bits), st.sampled_from([1, 3, 5]), st.sampled_from([0, 0, -1, 1]))


ROWS = _powers_up_to(50_000_000)
COLUMNS = _powers_up_to(10_000_000)
SMALL = st.sampled_from([2, 3, 4, 7, 8, 24, 32, 100])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Row sizes, column sizes, and the row and column strides of four tensors."""
    kind = draw(st.sampled_from(["plain", "row-strided", "one row", "column-strided", "first axis", "many dimensions"]))
    event(kind)
    rows, columns = (1 if kind == "one row" else draw(ROWS)), draw(COLUMNS)
    if draw(st.integers(0, 30)) == 0:
        rows = 0
    if draw(st.integers(0, 30)) == 0:
        columns = 0
    plain = (((columns,) if rows != 1 else (0,)), (1,) if columns != 1 else (0,))
    if kind in ("plain", "one row"):
        return (rows,), (columns,), [plain] * 4
    if kind == "first axis":
        return (rows,), (columns,), [((1,), (rows,))] * 4
    if kind == "many dimensions":
        row_sizes, column_sizes = (tuple(draw(st.lists(SMALL, min_size=1, max_size=3))) for _ in range(2))
        stride = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 1000, 1024, -1, -8])
        even = st.sampled_from([0, 8, 1024, 1024, 1024, 1026, 1025])
        along_rows = draw(st.booleans())  # vectors of contiguous columns, if all else is even

        def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
            last = 1 if along_rows and sizes is column_sizes else draw(even if along_rows else stride)
            return (*(draw(even if along_rows else stride) for _ in sizes[1:]), last)

        if along_rows:
            column_sizes = (*column_sizes[1:], draw(st.sampled_from([8, 24, 64, 64, 100, 7])))
        return row_sizes, column_sizes, [(strides(row_sizes), strides(column_sizes)) for _ in range(4)]
    step = draw(st.sampled_from([-1, 0, 2, 3])) if kind == "column-strided" else 1
    spread = [((columns * abs(step) + draw(st.sampled_from([0, 1, 2, 4, 8])),), (step,)), plain, plain, plain]
    return (rows,), (columns,), draw(st.permutations(spread))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layouts, dtypes, alignments and options of every kind, forward and backward."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    itemsize = DTYPES[dtype].itemsize
    row_sizes, column_sizes, strides = draw(shapes())
    assume(math.prod(row_sizes) * math.prod(column_sizes) * itemsize <= MOST_BYTES)

    def alignment(size: int) -> int:
        return draw(st.sampled_from([a for a in (16, 16, 8, 4, 2) if a >= size]))

    # Tensors that are all aligned, or all in the same way unaligned, are the usual.
    same = draw(st.sampled_from([None, None, 16, 16, itemsize]))
    matrices = [Matrix(dtype, rows, columns, same or alignment(itemsize)) for rows, columns in strides]
    activation = draw(st.sampled_from([None, None, *ACTIVATIONS]))
    norm = Norm(draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 1.0])), activation)
    more = draw(st.booleans())

    def vector() -> Vector | None:
        name = draw(st.sampled_from([None, dtype, *DTYPES]))
        return name and Vector(name, alignment(DTYPES[name].itemsize))

    weight, bias = vector(), vector()
    if draw(st.booleans()):
        x, residual, y, residual_out = matrices
        sums = (residual, residual_out) if more else (None, None)
        stats = draw(st.booleans())
        return ForwardProblem(row_sizes, column_sizes, x, sums[0], y, sums[1], weight, bias, stats, 1e-5, norm)
    wanted = st.sampled_from([None, dtype, "float32", "float64"])
    x, dy, added, gradient = matrices
    dx = draw(st.sampled_from([None, gradient, gradient]))
    dresidual_out = added if more and dx is not None else None
    bias = None if activation is None else bias
    gradients = draw(wanted), draw(wanted)
    return BackwardProblem(row_sizes, column_sizes, x, dy, dresidual_out, dx, weight, bias, *gradients, norm)


devices = st.sampled_from(list(DEVICES.values()))
many = settings(max_examples=400, deadline=None)


# ---- What every plan keeps.

Constants = dict[str, Any]


def _within_the_limits_of_cuda(problem: Problem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        assert 1 <= item.grid <= 2**31 - 1
        threads = item.block[0] * item.block[1]
        assert threads % 32 == 0 and 32 <= threads <= 1024
        assert item.shared_bytes >= 0
        assert item.shared_bytes + _static_shared_bytes(item, problem) <= device.shared_bytes
        # From 16 blocks on a cluster needs a kernel's consent, which the driver's side gives; more there are not.
        assert item.cluster in (1, 2, 4, 8, 16) and item.grid % item.cluster == 0
        assert device.groups(item.cluster) > 0, "the device cannot run such a cluster"
        assert item.cluster == 1 or device.capability >= 90
        if item.cooperative:
            blocks = dict(item.constants)["MIN_BLOCKS"]  # that share a multiprocessor
            assert (
                item.grid <= blocks * device.multiprocessors and blocks * threads <= device.threads_per_multiprocessor
            )
            static = _static_shared_bytes(item, problem)
            # The runtime keeps 1 KB for each block.
            assert blocks * (item.shared_bytes + static + 1024) <= device.shared_bytes + 1024


def _static_shared_bytes(item: Launch, problem: Problem) -> int:
    """What a kernel that also has dynamic shared memory declares itself."""
    constants: Constants = dict(item.constants)
    size = DTYPES[DTYPES[problem.x.dtype].compute].itemsize
    if item.kernel == "row_grid_forward":
        return 2 * 2 * constants["THREADS"] // 32 * size
    if not item.kernel.startswith("row_block"):
        assert item.shared_bytes == 0
        return 0
    scratch = 2 * 2 * -(-constants["THREADS_PER_ROW"] // 32) * constants["ROWS_PER_BLOCK"] * size
    exchange = 2 * item.cluster * 3 * size + 2 * 8
    return int(scratch + exchange)


def _every_field_of_the_kernel(problem: Problem, device: Device, chosen: Plan) -> None:
    buffers = OPERANDS[type(problem)] | {scratch.name for scratch in chosen.scratch}
    for item in chosen.launches:
        fields = kernels.argument_fields(item.kernel)
        assert sorted(name for name, _, _ in fields) == sorted(name for name, _ in item.arguments)
        for code, value in launch.argument_values(item):
            if code == "P":
                assert value is None or value in buffers
            else:
                assert isinstance(value, float if code == "d" else int) and -(2**63) <= value < 2**63


def _scratch_memory(problem: Problem, device: Device, chosen: Plan) -> None:
    assert len({scratch.name for scratch in chosen.scratch}) == len(chosen.scratch)
    end = 0
    for scratch in sorted(chosen.scratch, key=lambda scratch: (scratch.offset, scratch.bytes)):
        assert scratch.offset % 256 == 0 and scratch.offset >= end
        end = scratch.offset + scratch.bytes
    assert end <= chosen.workspace_bytes < end + 256 * (len(chosen.scratch) + 1)


# Bytes that each kernel takes of each buffer between kernels, from its arguments, its groups of blocks and the size of
# a sum.
_SIZES: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "partials": lambda a, groups, size: a["rows"] * a["columns"] * size,
    "second partials": lambda a, groups, size: a["rows"] * a["second_columns"] * size,
    "column sums": lambda a, groups, size: a["columns"] * size,
    "a row a group of blocks": lambda a, groups, size: groups * a["columns"] * size,
    "a row a group of rows": lambda a, groups, size: groups // a["tiles"] * a["columns"] * size,
    "a double a chunk": lambda a, groups, size: a["rows"] * a["splits"] * 8,
    "two a chunk": lambda a, groups, size: 2 * a["rows"] * a["splits"] * size,
    "two a row": lambda a, groups, size: 2 * a["rows"] * size,
    "one a row": lambda a, groups, size: a["rows"] * size,
    "three a block, with a tag beside each word, for two turns": lambda a, groups, size: 2 * groups * 3 * 2 * size,
}
_SCRATCH = {
    "column_sums": {"partials": "partials", "second_partials": "second partials", "sums": "column sums"},
    "row_block_backward": dict.fromkeys(["dweight", "dbias"], "a row a group of blocks"),
    "row_grid_forward": {"words": "three a block, with a tag beside each word, for two turns"},
    "row_split_statistics": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk"),
    "row_split_merge": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "row_split_forward": dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "row_split_gradient_sums": {"sums": "two a chunk"},
    "row_split_backward": dict.fromkeys(["dweight", "dbias"], "a row a group of rows") | {"sums": "two a row"},
}


def _scratch_buffers_hold_what_the_kernels_put_there(problem: Problem, device: Device, chosen: Plan) -> None:
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    itemsize = DTYPES[DTYPES[problem.x.dtype].compute].itemsize
    for item in chosen.launches:
        arguments = dict(item.arguments)
        for name, value in item.arguments:
            if isinstance(value, str) and value in sizes and arguments.get("splits") != 0:
                size = _SIZES[_SCRATCH[item.kernel][name]](arguments, item.grid // item.cluster, itemsize)
                assert size == sizes[value], (item.kernel, name)


def _scratch_is_written_before_it_is_read(problem: Problem, device: Device, chosen: Plan) -> None:
    names = {scratch.name for scratch in chosen.scratch}
    written: set[str] = set()
    for item in chosen.launches:
        arguments = dict(item.arguments)
        read = {field for field, text in _declarations(item.kernel) if text.startswith("const ")}
        if arguments["rows"] == 0 or arguments.get("splits") == 0:  # of nothing, nothing is read
            read = set()
        assert not {arguments[field] for field in read} & names - written, item.kernel
        written |= {str(arguments[field]) for field, text in _declarations(item.kernel) if field not in read}


def _declarations(kernel: str) -> list[tuple[str, str]]:
    """The pointers of a kernel's ``struct Arguments``: name and type."""
    match = re.search(r"struct Arguments \{.*?\n\};", kernels.kernel_source(kernel, {}), re.DOTALL)
    assert match is not None
    return [(name, kind) for kind, name in re.findall(r"^  ([\w ]+\*) (\w+);", match[0], re.M)]


def _the_workspace_is_modest(problem: Problem, device: Device, chosen: Plan) -> None:
    """Scratch memory is a third of what must move at most, beside what is small.

    That is a quarter of a megabyte a multiprocessor (partial sums of what its blocks hold), one row of partial sums,
    and where rows are not contiguous what is known of each row: five numbers of 8 bytes.
    """
    small = device.multiprocessors * 2**18 + 16 * problem.columns + 40 * problem.rows + 2048
    assert chosen.workspace_bytes <= problem.bytes_moved // 3 + small


# ---- Every access is aligned.


def _address(matrix: Matrix, problem: Problem, row: int, column: int) -> int:
    """Bytes from a 16-byte boundary to x[row, column], for the least aligned pointer that ``matrix`` allows."""
    offset = 0
    for index, sizes, strides in (
        (row, problem.row_sizes, matrix.row_strides),
        (column, problem.column_sizes, matrix.column_strides),
    ):
        for size, stride in zip(reversed(sizes), reversed(strides)):
            offset += index % size * stride
            index //= size
    return matrix.alignment + offset * DTYPES[matrix.dtype].itemsize


def _every_access_is_aligned_and_contiguous(problem: Problem, device: Device, chosen: Plan) -> None:
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
            _assert_vectors_are_aligned(problem, width)
        for name, operand in (("WEIGHT", problem.weight), ("BIAS", problem.bias)):
            if f"{name}_ACCESS" in constants:
                _assert_access_to_weights(constants, name, operand, width)
        if item.kernel.startswith("row_block"):
            _assert_shared_memory_is_aligned(problem, item, constants)
        if item.kernel == "row_grid_forward":
            # Every vector is copied in 16 bytes, to slots behind each other; then come the numbers of an exchange.
            assert width * itemsize == 16
            slots = constants["THREADS"] * constants["ROWS_AHEAD"] * constants["RESIDENT"]
            compute = DTYPES[DTYPES[problem.x.dtype].compute].itemsize
            numbers = 3 * dict(item.arguments)["blocks_per_row"] * compute
            assert item.shared_bytes == (1 + constants["HAS_RESIDUAL"]) * slots * 16 + numbers


def _some(count: int) -> set[int]:
    return {number for number in (0, 1, 2, 3, 5, 7, count // 2, count - 2, count - 1) if 0 <= number < count}


def _assert_vectors_are_aligned(problem: Problem, width: int) -> None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    assert problem.columns % width == 0
    for matrix in problem.matrices:
        for row in _some(problem.rows):
            for vector in _some(problem.columns // width):
                lanes = [_address(matrix, problem, row, vector * width + lane) for lane in range(width)]
                assert lanes[0] % (width * itemsize) == 0
                assert lanes == [lanes[0] + lane * itemsize for lane in range(width)]


def _aligned_to(problem: Problem) -> Matrix:
    """What the vectors of peeled rows are aligned to: the result, if there is one."""
    if isinstance(problem, ForwardProblem):
        return problem.y
    return problem.dx or problem.x


def _assert_peeled_vectors_are_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    itemsize = DTYPES[problem.x.dtype].itemsize
    assert constants["VECTOR"] * itemsize == 16 and not constants.get("FULL")
    # Columns are contiguous, and pointers aligned to their numbers: a head reaches a multiple of 16 bytes.
    for matrix in problem.matrices:
        assert matrix.alignment >= itemsize and (matrix.column_strides[0] == 1 or problem.columns == 1)
    groups, arguments = item.grid // item.cluster, dict(item.arguments)
    shared_row = item.cluster > 1 or item.cooperative
    assert arguments["columns_per_block"] * itemsize % 16 == 0 or not shared_row
    for row in _some(problem.rows):
        begins = {_address(matrix, problem, row, 0) % 16 for matrix in problem.matrices}
        if item.cooperative or constants["STAGE"] != "direct":
            # The bytes that a vector is copied from are aligned in every tensor, not only in the one peeled for.
            assert len(begins) == 1 and all(matrix.alignment == 16 for matrix in problem.matrices)
        step = groups * constants.get("ROWS_PER_BLOCK", problem.rows)
        if row + step < problem.rows and (item.kernel.endswith("backward") or constants["WEIGHTS_STAGED"]):
            # A thread keeps its columns: in the sums of gradients, and in the weights that it took once.
            aligned = _aligned_to(problem)
            assert _address(aligned, problem, row + step, 0) % 16 == _address(aligned, problem, row, 0) % 16


def _assert_access_to_weights(constants: Constants, name: str, operand: Vector | None, width: int) -> None:
    assert constants[f"HAS_{name}"] == (operand is not None)
    if operand is None:
        return
    access, itemsize = constants[f"{name}_ACCESS"], DTYPES[operand.dtype].itemsize
    assert constants[f"{name}_TYPE"] == DTYPES[operand.dtype].cuda
    assert access in (2, 4, 8, 16) and access % itemsize == 0
    step = min(access // itemsize, width)  # as load_widened takes them
    assert width % step == 0
    if not constants.get("PEELED"):  # those of peeled rows come as load_widened_anywhere takes them
        for first in range(0, 4 * width, step):
            assert (operand.alignment + first * itemsize) % (step * itemsize) == 0


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
        # A tensor's slots begin where the first one's do.
        assert slots * itemsize % 16 == 0
        needed = tensors * slots * itemsize
    if stage == "run":
        assert all(matrix.row_strides[0] == problem.columns or problem.rows == 1 for matrix in problem.matrices)
        assert item.cluster == 1 and not constants["PEELED"] and not constants["WEIGHTS_STAGED"]
        # Whole pieces of 16 bytes, from the one that the run begins in to the one that it ends in.
        pieces = -(-(16 // itemsize - 1 + constants["ROWS_PER_BLOCK"] * problem.columns) // (16 // itemsize))
        assert pieces * 16 <= slots * itemsize
    if stage == "ahead":
        # One copy is 4, 8 or 16 bytes.
        assert width * itemsize in (4, 8, 16)
    if constants["WEIGHTS_STAGED"]:
        for operand in (problem.weight, problem.bias):
            if operand is not None:
                assert needed % 16 == 0
                needed += slots * DTYPES[operand.dtype].itemsize
    if item.kernel.endswith("backward"):
        # At the end the sums of half the rows, when they are added up, or of a peeled one, when they are put in order.
        compute = DTYPES[DTYPES[problem.x.dtype].compute].itemsize
        rows = max(constants["PEELED"], constants["ROWS_PER_BLOCK"] // 2)
        needed = max(needed, rows * width * (dict(item.arguments)["columns_per_block"] // width + 1) * compute)
    assert needed <= item.shared_bytes <= needed + 64, "shared memory is not what the kernel uses"


# ---- Every row and every column is taken, once.


def _rows_and_columns_are_covered(problem: Problem, device: Device, chosen: Plan) -> None:
    for item in chosen.launches:
        arguments: dict[str, Any] = dict(item.arguments)
        _COVERS[item.kernel](item, dict(item.constants), arguments, device)
        if item.kernel != "column_sums":
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
    for _ in range(item.cluster):
        part = min(per_block, columns - first)
        assert part > 0, "a block of a row has nothing to do"
        _assert_a_part_is_covered(part, constants)
        first += part
    assert first == columns
    # Groups of rows: one each, or where blocks are persistent as many groups as run together. Peeled rows need a step
    # of whole vectors, for which there may have to be a few more.
    groups, all_groups = item.grid // item.cluster, -(-arguments["rows"] // rows)
    if item.kernel == "row_block_backward" or groups != all_groups:
        together = device.groups(item.cluster) * max(1, device.threads_per_multiprocessor // (threads * rows))
        assert 1 <= groups <= min(all_groups, max(together, width if constants["PEELED"] else 1))


def _assert_a_part_is_covered(columns: int, constants: Constants) -> None:
    """Each of the columns of a block's part of a row is in exactly one thread, as kernels/row_stage.cuh lays them."""
    threads, width, peeled = constants["THREADS_PER_ROW"], constants["VECTOR"], constants["PEELED"]
    held = threads * constants["VECTORS"]
    piece = width if peeled else 0
    # How far the row begins behind a multiple of 16 bytes.
    for shift in (0, 1, width - 1) if peeled else (0,):
        head = piece + (width - shift) % width if peeled else 0
        vectors = max(0, columns - head - piece) // width if peeled else columns // width
        index = np.arange(held)
        if constants["FULL"]:
            assert vectors == held and not peeled
        index = index[index < vectors]
        edges = np.arange(min(threads, columns - vectors * width) if peeled else 0)
        edges = np.where(edges < head, edges, edges + vectors * width)
        taken = np.concatenate([(head + index[:, None] * width + np.arange(width)).reshape(-1), edges])
        assert np.array_equal(np.sort(taken), np.arange(columns))
        if peeled and vectors:
            # What lies in another way is read from the piece that a vector begins in to the one after it.
            last = head + (vectors - 1) * width
            assert head - (width - 1) >= 0 and last + 2 * width <= columns
        assert peeled or vectors > held - threads, "the last vector of every thread has nothing to do"
    assert columns > held * width - threads * width, "the last vector of every thread has nothing to do"


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


def _covers_row_split(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    lanes, tile = constants["ROW_LANES"], _tile(item, constants)
    chunk, splits = arguments["columns_per_split"], arguments["splits"]
    assert chunk % tile == 0 and 1 <= chunk // tile <= TILES_PER_CHUNK
    assert splits * chunk >= arguments["columns"] > (splits - 1) * chunk
    assert item.grid == splits * -(-arguments["rows"] // lanes)


def _covers_row_split_backward(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    lanes, tile, tiles = constants["ROW_LANES"], _tile(item, constants), arguments["tiles"]
    assert tiles * tile >= arguments["columns"] > (tiles - 1) * tile
    assert arguments["rows_per_group"] % lanes == 0 and item.grid % tiles == 0
    groups = item.grid // tiles
    assert groups * arguments["rows_per_group"] >= arguments["rows"] > (groups - 1) * arguments["rows_per_group"]


def _tile(item: Launch, constants: Constants) -> int:
    """Columns of a tile, as kernels/tile.cuh has them."""
    threads, lanes = constants["THREADS"], constants["ROW_LANES"]
    assert item.block == (threads, 1) and threads % 32 == 0
    assert lanes in (1, 2, 4, 8, 16, 32)
    return int(threads // lanes * constants["VECTOR"] * constants["UNROLL"])


def _covers_merge(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (32, constants["ROWS_PER_BLOCK"])
    assert item.grid == -(-arguments["rows"] // constants["ROWS_PER_BLOCK"])
    chunk, splits = arguments["columns_per_split"], arguments["splits"]
    assert splits * chunk >= arguments["columns"]
    assert splits == 0 or arguments["columns"] > (splits - 1) * chunk


def _covers_column_sums(item: Launch, constants: Constants, arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (constants["COLUMN_THREADS"], constants["ROW_THREADS"])
    assert arguments["second_columns"] in (0, arguments["columns"])
    columns = arguments["columns"] + arguments["second_columns"]
    assert item.grid == -(-columns // constants["COLUMN_THREADS"])


_COVERS = {
    "row_block_forward": _covers_row_block,
    "row_block_backward": _covers_row_block,
    "row_grid_forward": _covers_row_grid,
    "row_split_statistics": _covers_row_split,
    "row_split_forward": _covers_row_split,
    "row_split_gradient_sums": _covers_row_split,
    "row_split_backward": _covers_row_split_backward,
    "row_split_merge": _covers_merge,
    "column_sums": _covers_column_sums,
}


def _every_result_is_written(problem: Problem, device: Device, chosen: Plan) -> None:
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


def _constant_fields(kernel: str) -> set[str]:
    return {field for field, kind in _declarations(kernel) if kind.startswith("const ")}


RULES = [
    _within_the_limits_of_cuda,
    _every_field_of_the_kernel,
    _scratch_memory,
    _scratch_buffers_hold_what_the_kernels_put_there,
    _scratch_is_written_before_it_is_read,
    _the_workspace_is_modest,
    _every_access_is_aligned_and_contiguous,
    _rows_and_columns_are_covered,
    _every_result_is_written,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.strip("_"))
@many
@given(problem=problems(), device=devices)
def test_every_plan_keeps(rule: Callable[[Problem, Device, Plan], None], problem: Problem, device: Device) -> None:
    rule(problem, device, plan(problem, device))


def _tuned_problems() -> dict[str, Problem]:
    def lying(dtype: str, rows: int, columns: int, stride: int, alignment: int, more: bool = False) -> list[Problem]:
        matrix, vector = Matrix(dtype, (stride,), (1,), alignment), Vector(dtype)
        added = matrix if more else None
        return [
            ForwardProblem((rows,), (columns,), matrix, added, matrix, added, vector, vector, True, 1e-5),
            BackwardProblem((rows,), (columns,), matrix, matrix, added, matrix, vector, None, dtype, dtype),
        ]

    return {
        f"{dtype} {rows}x{columns} stride {stride} alignment {alignment} {type(problem).__name__}": problem
        for dtype, rows, columns, stride, alignment, more in [
            ("bfloat16", 4096, 64, 64, 16, False),
            ("bfloat16", 1000, 5120, 5120, 16, True),
            ("float32", 3, 10, 10, 16, False),
            ("float32", 100_000, 7, 7, 4, True),
            ("float16", 64, 4097, 4097, 16, False),
            ("bfloat16", 64, 1023, 1024, 2, True),
            ("float32", 1000, 100_000, 100_000, 16, False),
            ("float16", 33, 50_257, 50_258, 16, True),
            ("float64", 77, 3001, 3001, 16, False),
            ("float64", 500, 12_288, 16_384, 16, True),
        ]
        for problem in lying(dtype, rows, columns, stride, alignment, more)
    }


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "few clusters"])
@pytest.mark.parametrize("problem", list(_tuned_problems().values()), ids=list(_tuned_problems()))
def test_what_tuning_tries_keeps_the_same_rules(problem: Problem, device: str) -> None:
    found = list(row_geometry.candidates(problem, DEVICES[device]))
    assert len(found) == len(set(found))
    assert found or device != "sm_90"
    for geometry in found:
        chosen = plan_with(problem, DEVICES[device], geometry)
        assert chosen.strategy in ("row_block", "row_cluster")
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
        assert row_geometry._fits(geometry, problem, device)


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
                _within_the_limits_of_cuda(problem, device, chosen)
                _rows_and_columns_are_covered(problem, device, chosen)


def test_every_constant_is_used_by_its_kernel() -> None:
    """A constant that a kernel does not read would compile the same text again and again."""
    for problem in _covering_problems():
        for item in plan(problem, DEVICES["sm_90"]).launches:
            text = kernels.kernel_source(item.kernel, {})
            unused = [name for name, _ in item.constants if name not in text]
            assert not unused, (item.kernel, unused)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(8192, 1024), (16384, 4096), (4096, 8192), (65536, 256), (1024, 65536)], ids=str)
def test_the_workspace_of_a_usual_training_step(shape: tuple[int, int], dtype: str) -> None:
    for problem in (plain_forward(*shape, dtype), plain_backward(*shape, dtype)):
        assert plan(problem, DEVICES["sm_90"]).workspace_bytes <= problem.bytes_moved // 4


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("columns", [1024, 4097, 65536, 1_000_000])
@pytest.mark.parametrize("rows", [1, 2, 4096])
def test_tensors_move_16_bytes_at_a_time(rows: int, columns: int, dtype: str) -> None:
    """Odd rows too, but for float32 forward, which is as fast number by number."""
    forward = [plain_forward(rows, columns, dtype)] if columns % 2 == 0 or dtype != "float32" else []
    for problem in (*forward, plain_backward(rows, columns, dtype)):
        for item in plan(problem, DEVICES["sm_90"]).launches:
            width = dict(item.constants).get("VECTOR")
            assert width is None or width * DTYPES[dtype].itemsize == 16


# ---- A plan is a function, and kernels are few.


@many
@given(problems(), devices)
def test_plans_are_deterministic(problem: Problem, device: Device) -> None:
    again = _copy(problem)
    assert again == problem and hash(again) == hash(problem)
    assert plan.__wrapped__(problem, device) == plan.__wrapped__(again, device)
    assert plan(problem, device) is plan(again, device), "a plan is kept"
    hash(plan(problem, device))


def _copy(problem: Problem) -> Problem:
    """An equal problem of which nothing is the same object."""
    fields = {name: eval(repr(getattr(problem, name))) for name in problem.__dataclass_fields__}
    return type(problem)(**fields)


def kernels_of(*plans: Plan) -> set[tuple[str, Any]]:
    return {(item.kernel, item.constants) for chosen in plans for item in chosen.launches}


def _costly(*chosen: Plan) -> set[tuple[str, Any]]:
    """But for column sums, which are cheap to compile (of few partial rows or many, of gradients or of chunks), and but
    for so few rows that one group of blocks writes the sums of all, in their own dtype."""
    types_of_sums = ("DWEIGHT_TYPE", "DBIAS_TYPE")
    return {
        (kernel, tuple(item for item in constants if item[0] not in types_of_sums))
        for kernel, constants in kernels_of(*chosen)
        if kernel != "column_sums"
    }


@settings(max_examples=300, deadline=None)
@given(ROWS, ROWS, st.integers(2, 100_000), st.sampled_from(list(DTYPES)), devices)
def test_no_batch_that_fills_a_gpu_compiles_a_kernel_of_its_own(
    rows: int, other_rows: int, columns: int, dtype: str, device: Device
) -> None:
    for make in (plain_forward, plain_backward):
        # So many rows that each thread of the GPU could have as many vectors as it is ever given for want of threads.
        width = 16 // DTYPES[dtype].itemsize
        enough = device.multiprocessors * (64 + device.threads_per_multiprocessor * 6 * width // columns)
        some, others = (plan(make(count + enough, columns, dtype), device) for count in (rows, other_rows))
        assert _costly(some) == _costly(others)


@pytest.mark.parametrize("columns", [10, 100, 256, 768, 1024, 4096, 4097, 10_240, 16_384, 100_000, 10**6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_batches_compile_few_kernels(columns: int, dtype: str) -> None:
    """Few rows are spread over more threads than many are: by powers of two, so there are few ways."""
    for make in (plain_forward, plain_backward):
        every = _costly(*(plan(make(rows, columns, dtype), DEVICES["sm_90"]) for rows in range(1, 3000)))
        assert len({kernel for kernel, _ in every}) * 4 >= len(every)


def test_eps_compiles_nothing() -> None:
    some, others = (
        kernels_of(*(plan(plain_forward(64, columns, eps=eps), DEVICES["sm_90"]) for columns in (64, 10**7)))
        for eps in (0.0, 1.0)
    )
    # The long rows' words are cleared by a kernel before.
    assert some == others and len(some) == 1 + 2


MODEL_SIZES = [
    64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120, 8192,
]  # fmt: skip


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_model_of_many_sizes_compiles_few_kernels(dtype: str) -> None:
    """Twenty sizes of layer norm, and four batch sizes of each: about a kernel a size and direction for batches that
    fill the GPU, which are all that a training has, and two more for less."""
    rows = (1, 7, 4096, 65536)
    for make in (plain_forward, plain_backward):
        plans = [[plan(make(n, columns, dtype), DEVICES["sm_90"]) for columns in MODEL_SIZES] for n in rows]
        assert len(kernels_of(*itertools.chain(*plans))) <= 3 * len(MODEL_SIZES) + 4
        assert len(kernels_of(*plans[-1])) <= len(MODEL_SIZES) + 2


# ---- Which strategy for which size.


def plain_forward(rows: int, columns: int, dtype: str = "float32", eps: float = 1e-5) -> ForwardProblem:
    x, vector = Matrix(dtype, (columns if rows > 1 else 0,), (1,)), Vector(dtype)
    return ForwardProblem((rows,), (columns,), x, None, x, None, vector, vector, True, eps)


def plain_backward(rows: int, columns: int, dtype: str = "float32") -> BackwardProblem:
    x = Matrix(dtype, (columns if rows > 1 else 0,), (1,))
    return BackwardProblem((rows,), (columns,), x, x, None, x, Vector(dtype), None, dtype, dtype)


def _covering_problems() -> list[Problem]:
    first_axis = Matrix("float32", (1,), (512,))
    problems: list[Problem] = [
        ForwardProblem((512,), (64,), first_axis, None, first_axis, None, None, None, False, 0.0),
        BackwardProblem((512,), (64,), first_axis, first_axis, None, first_axis, None, None, "float32", None),
    ]
    for columns in (1, 10, 64, 768, 4097, 100_000, 10_000_000, 100_000_000):
        problems += [plain_forward(16, columns), plain_backward(16, columns)]
    return problems


# The ways on each GPU that differs: one without asynchronous copies or clusters, one with the most shared memory that
# is not shared among blocks, one with clusters.
WAYS = ("sm_75", "sm_80", "sm_90")
BLOCK, CLUSTER, GRID, SPLIT = "row_block", "row_cluster", "row_grid", "row_split"
STRATEGIES = [
    # dtype, columns, forward, backward
    ("bfloat16", 1, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 64, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 4097, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 8192, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 65_536, (SPLIT, BLOCK, CLUSTER), (SPLIT, SPLIT, CLUSTER)),
    ("bfloat16", 100_001, (SPLIT, SPLIT, CLUSTER), (SPLIT, SPLIT, CLUSTER)),
    ("bfloat16", 10_000_000, (SPLIT, GRID, GRID), (SPLIT, SPLIT, SPLIT)),
    ("float32", 10, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("float32", 4096, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("float32", 20_000, (BLOCK, BLOCK, BLOCK), (SPLIT, SPLIT, CLUSTER)),
    ("float32", 100_000, (SPLIT, SPLIT, CLUSTER), (SPLIT, SPLIT, CLUSTER)),
    ("float32", 2_000_001, (SPLIT, GRID, GRID), (SPLIT, SPLIT, SPLIT)),
    ("float32", 10_000_000, (SPLIT, GRID, GRID), (SPLIT, SPLIT, SPLIT)),
    ("float64", 4096, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("float64", 50_257, (SPLIT, SPLIT, CLUSTER), (SPLIT, SPLIT, CLUSTER)),
    ("float64", 10_000_000, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
]


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize(("dtype", "columns", "forward", "backward"), STRATEGIES)
def test_strategies(rows: int, dtype: str, columns: int, forward: tuple[str, ...], backward: tuple[str, ...]) -> None:
    for name, one, other in zip(WAYS, forward, backward):
        assert plan(plain_forward(rows, columns, dtype), DEVICES[name]).strategy == one
        assert plan(plain_backward(rows, columns, dtype), DEVICES[name]).strategy == other


@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_older_gpus_get_neither_clusters_nor_rows_ahead(device: Device) -> None:
    for columns in (10, 64, 257, 4096, 4097, 16_384, 20_001, 65_536, 100_000, 10**6):
        for dtype in DTYPES:
            for problem in (plain_forward(1000, columns, dtype), plain_backward(1000, columns, dtype)):
                for item in plan(problem, device).launches:
                    assert item.cluster == 1 or device.groups(item.cluster)
                    assert device.capability >= 80 or dict(item.constants).get("STAGE") != "ahead"


@pytest.mark.parametrize(
    ("matrix", "strategy"),
    [
        pytest.param(Matrix("float32", (1000,), (1,)), "row_block", id="rows with space between"),
        pytest.param(Matrix("float32", (-768,), (1,)), "row_block", id="rows last to first"),
        pytest.param(Matrix("float32", (0,), (1,)), "row_block", id="one row many times"),
        pytest.param(Matrix("float32", (768,), (1,), 4), "row_block", id="not aligned"),
        pytest.param(Matrix("float32", (1,), (64,)), "row_split", id="first axis"),
        pytest.param(Matrix("float32", (1536,), (2,)), "row_split", id="every second column"),
        pytest.param(Matrix("float32", (768,), (-1,)), "row_split", id="columns last to first"),
        pytest.param(Matrix("float32", (768,), (0,)), "row_split", id="one column many times"),
    ],
)
def test_strategies_for_views(matrix: Matrix, strategy: str) -> None:
    plain = Matrix("float32", (768,), (1,))
    for x, y in ((matrix, plain), (plain, matrix)):
        problem = ForwardProblem((64,), (768,), x, None, y, None, None, None, True, 1e-5)
        assert plan(problem, DEVICES["sm_90"]).strategy == strategy


def test_neighbouring_threads_take_neighbouring_numbers() -> None:
    """Along rows where columns are contiguous, across them where rows are: either way whole 32-byte sectors."""

    def row_lanes(problem: Problem) -> set[Any]:
        return {lanes for item in plan(problem, DEVICES["sm_90"]).launches
                if (lanes := dict(item.constants).get("ROW_LANES")) is not None}  # fmt: skip

    first_axis = Matrix("float32", (1,), (512,))
    forward = ForwardProblem((512,), (64,), first_axis, None, first_axis, None, None, None, True, 0.0)
    backward = BackwardProblem((512,), (64,), first_axis, first_axis, None, None, None, None, None, "float32")
    assert row_lanes(forward) == row_lanes(backward) == {32}
    assert row_lanes(plain_forward(64, 100_000_000)) == row_lanes(plain_backward(64, 1_000_000)) == {1}


def test_what_is_empty_launches_nothing_but_zeros() -> None:
    for make in (plain_forward, plain_backward):
        nothing = plan(make(0, 0), DEVICES["sm_90"])
        assert nothing.launches == () and nothing.workspace_bytes == 0
    for columns in (8, 1_000_000):
        assert plan(plain_forward(0, columns), DEVICES["sm_90"]).launches == ()
        sums = plan(plain_backward(0, columns), DEVICES["sm_90"]).launches
        assert [(item.kernel, dict(item.arguments)["rows"]) for item in sums] == [("column_sums", 0)]
    # The statistics of rows without columns are NaN, which somebody must write.
    assert [item.kernel for item in plan(plain_forward(5, 0), DEVICES["sm_90"]).launches] == ["row_split_merge"]
    assert plan(plain_backward(5, 0), DEVICES["sm_90"]).launches == ()
