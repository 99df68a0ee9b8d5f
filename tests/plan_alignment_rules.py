"""Every access is aligned, in memory and in shared memory, and what a vector holds lies behind each other."""

from __future__ import annotations

import math
from typing import Any

from plan_cases import Constants, Problem, compute_bytes, some

from cunorm.plan import Device, Launch, Plan
from cunorm.problem import DTYPES, ForwardProblem, Matrix, Vector


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
        if item.kernel.startswith("row_stream"):
            _assert_parts_lie_as_in_memory(problem, item, constants)
        elif constants.get("PEELED"):
            _assert_peeled_vectors_are_aligned(problem, item, constants)
        else:
            _assert_vectors_are_aligned(problem, constants)
        for name, operand in (("WEIGHT", problem.weight), ("BIAS", problem.bias)):
            if f"{name}_ACCESS" in constants:
                assert_access_to_weights(constants, name, operand, width)
        if item.kernel.startswith("row_block"):
            _assert_shared_memory_is_aligned(problem, item, constants)
        if item.kernel.startswith("row_bulk"):
            _assert_runs_are_aligned(problem, item, constants)
        if item.kernel.startswith("row_held"):
            _assert_pieces_are_aligned(problem, item, constants)
        if item.kernel.startswith(("row_grid", "row_pipeline")):
            _assert_slots_are_aligned(problem, item, constants)


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
        for row in some(problem.rows):
            for vector in some(problem.columns // width):
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
    for row in some(problem.rows):
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
        if constants["STAGGERED"]:
            # The vectors of a warp that are of a row have two pieces more, so that they may begin at one.
            assert stage == "ahead" and not constants["SHIFTED"] and not constants["SEGMENT_NUMBERS"]
            assert width * itemsize == 16
            slots += threads // min(32, constants["THREADS_PER_ROW"]) * constants["VECTORS"] * 2 * width
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


def _assert_runs_are_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    """Runs come and leave in whole pieces of 16 bytes, and lie as in memory: see kernels/row_bulk.cuh."""
    itemsize, width = DTYPES[problem.x.dtype].itemsize, constants["VECTOR"]
    assert all(matrix.row_strides[0] == problem.columns or problem.rows == 1 for matrix in problem.matrices)
    assert len({matrix.offset for matrix in problem.matrices}) == 1, "results take the place of what came"
    # Each row begins as many vectors behind the run's line in shared memory as behind that in memory.
    assert problem.columns % width == 0 and problem.x.offset % (width * itemsize) == 0
    # A thread for each number before the first piece, or behind the last.
    threads = math.prod(item.block)
    assert constants["ROWS_PER_BLOCK"] % constants["ROWS_AT_ONCE"] == 0
    assert threads >= 2 * 16 // itemsize and threads >= constants["ROWS_PER_BLOCK"]
    # Whole lines of 128 bytes, and one more to begin anywhere in the first.
    run_bytes = constants["ROWS_PER_BLOCK"] * problem.columns * itemsize
    runs = len(problem.matrices_read) * (-(-run_bytes // 128) + 1) * 128
    if item.kernel == "row_bulk_forward":
        assert item.shared_bytes == runs
        return
    # Only the last run has numbers that go one by one: for those, threads would wait in every turn.
    assert problem.x.offset == 0 and (run_bytes % 16 == 0 or constants["ROWS_PER_BLOCK"] >= problem.rows)
    sums = constants["ROWS_AT_ONCE"] // 2 * problem.columns * compute_bytes(problem)
    assert item.shared_bytes == max(constants["STAGES"] * runs, sums)


def _assert_parts_lie_as_in_memory(problem: Problem, item: Launch, constants: Constants) -> None:
    """Every part begins as far behind a line in its stage as in memory, the same in all tensors."""
    assert constants["VECTOR"] * DTYPES[problem.x.dtype].itemsize == 16
    arguments: dict[str, Any] = dict(item.arguments)
    for matrix in problem.matrices:
        assert matrix.alignment == 16 and matrix.row_strides == (arguments["stride"],)
    part = constants["THREADS"] * constants["RESIDENT"] * 16
    assert part % 128 == 0, "the next stage begins in the middle of a line"
    if isinstance(problem, ForwardProblem):
        under_way = constants["AHEAD"] - constants["LAG"]
        assert item.shared_bytes == part * (constants["AHEAD"] + under_way * constants["HAS_RESIDUAL"])
        return
    assert item.shared_bytes == part * constants["AHEAD"] * (2 + constants["HAS_DRESIDUAL"])
    # At the end the sums of columns, or of what is before and behind them in the first and the last unit.
    columns = arguments["columns_per_block"] + 2 * constants["UNIT"]
    assert columns * compute_bytes(problem) <= item.shared_bytes


def _assert_pieces_are_aligned(problem: Problem, item: Launch, constants: Constants) -> None:
    """Pieces of every tensor come in bulk, whole vectors from one on, to places behind each other."""
    assert constants["VECTOR"] * DTYPES[problem.x.dtype].itemsize == 16 and not constants["PEELED"]
    assert all(matrix.alignment == 16 for matrix in problem.matrices)
    assert item.shared_bytes == constants["RING"] * len(problem.matrices_read) * constants["THREADS"] * 16


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
            as_it_lies = segment, matrix.column_strides[0] if several else 0
            assert told == as_it_lies, "segments lie otherwise"
            assert not constants["PEELED"] or matrix.row_strides == problem.x.row_strides, "rows begin otherwise"
    assert item.shared_bytes == tensors * slots * 16 + numbers
