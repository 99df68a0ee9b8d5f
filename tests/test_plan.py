"""Plans as the pure function they are: every problem has one, within the limits of every device, and it is complete.

Problems are drawn without memory behind them, so sizes go up to what no machine holds. What a launch computes is not
looked at here (the emulator does that), only that its numbers fit together: every row and column is taken once, every
access is aligned, every buffer is large enough.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from cunorm import kernels, launch
from cunorm.plan import Device, Launch, Plan, plan
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Vector

Problem = ForwardProblem | BackwardProblem

DEVICES = {
    "sm_75": Device("sm_75", 40, 1024),
    "sm_80": Device("sm_80", 108, 2048),
    "sm_86": Device("sm_86", 84, 1536),
    "sm_89": Device("sm_89", 128, 1536),
    "sm_90": Device("sm_90", 132, 2048),
    "sm_100": Device("sm_100", 148, 2048),
    "sm_120": Device("sm_120", 170, 1536),
    "small": Device("sm_90", 2, 512),
    "smallest": Device("sm_75", 1, 1024),
}
OPERANDS = {
    ForwardProblem: {"x", "weight", "bias", "y", "mean", "rstd"},
    BackwardProblem: {"dy", "x", "weight", "mean", "rstd", "dx", "dweight", "dbias"},
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
    """Row sizes, column sizes, and the row and column strides of three tensors."""
    kind = draw(st.sampled_from(["plain", "row-strided", "one row", "column-strided", "first axis", "many dimensions"]))
    event(kind)
    rows, columns = (1 if kind == "one row" else draw(ROWS)), draw(COLUMNS)
    if draw(st.integers(0, 30)) == 0:
        rows = 0
    if draw(st.integers(0, 30)) == 0:
        columns = 0
    plain = (((columns,) if rows != 1 else (0,)), (1,) if columns != 1 else (0,))
    if kind in ("plain", "one row"):
        return (rows,), (columns,), [plain] * 3
    if kind == "first axis":
        return (rows,), (columns,), [((1,), (rows,))] * 3
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
        return row_sizes, column_sizes, [(strides(row_sizes), strides(column_sizes)) for _ in range(3)]
    step = draw(st.sampled_from([-1, 0, 2, 3])) if kind == "column-strided" else 1
    spread = [((columns * abs(step) + draw(st.sampled_from([0, 1, 2, 4, 8])),), (step,)), plain, plain]
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

    matrices = [Matrix(dtype, rows, columns, alignment(itemsize)) for rows, columns in strides]

    def vector() -> Vector | None:
        name = draw(st.sampled_from([None, dtype, *DTYPES]))
        return name and Vector(name, alignment(DTYPES[name].itemsize))

    weight = vector()
    if draw(st.booleans()):
        stats = draw(st.booleans())
        return ForwardProblem(row_sizes, column_sizes, matrices[0], matrices[1], weight, vector(), stats, 1e-5)
    wanted = st.sampled_from([None, dtype, "float32", "float64"])
    dx = draw(st.sampled_from([None, matrices[2], matrices[2]]))
    return BackwardProblem(row_sizes, column_sizes, matrices[0], matrices[1], dx, weight, draw(wanted), draw(wanted))


devices = st.sampled_from(list(DEVICES.values()))
many = settings(max_examples=400, deadline=None)


# ---- What every plan keeps.


@many
@given(problems(), devices)
def test_launches_are_within_the_limits_of_cuda(problem: Problem, device: Device) -> None:
    for item in plan(problem, device).launches:
        assert 1 <= item.grid <= 2**31 - 1
        threads = item.block[0] * item.block[1]
        assert threads % 32 == 0 and 32 <= threads <= 1024


@many
@given(problems(), devices)
def test_launches_give_every_field_of_their_kernel(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
    buffers = OPERANDS[type(problem)] | {scratch.name for scratch in chosen.scratch}
    for item in chosen.launches:
        fields = kernels.argument_fields(item.kernel)
        assert sorted(name for name, _, _ in fields) == sorted(name for name, _ in item.arguments)
        for code, value in launch.argument_values(item):
            if code == "P":
                assert value is None or value in buffers
            else:
                assert isinstance(value, float if code == "d" else int) and -(2**63) <= value < 2**63


def test_every_constant_is_used_by_its_kernel() -> None:
    """A constant that a kernel does not read would compile the same text again and again."""
    for problem in _covering_problems():
        for item in plan(problem, DEVICES["sm_90"]).launches:
            text = kernels.kernel_source(item.kernel, {})
            unused = [name for name, _ in item.constants if name not in text]
            assert not unused, (item.kernel, unused)


@many
@given(problems(), devices)
def test_scratch_memory(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
    assert len({scratch.name for scratch in chosen.scratch}) == len(chosen.scratch)
    end = 0
    for scratch in sorted(chosen.scratch, key=lambda scratch: (scratch.offset, scratch.bytes)):
        assert scratch.offset % 256 == 0 and scratch.offset >= end
        end = scratch.offset + scratch.bytes
    assert end <= chosen.workspace_bytes < end + 256 * (len(chosen.scratch) + 1)


# Bytes that each kernel takes of each buffer between kernels, from its arguments, its grid and the size of a sum.
_SIZES: dict[str, Callable[[dict[str, Any], int, int], int]] = {
    "partials": lambda a, grid, size: a["rows"] * a["columns"] * size,
    "column sums": lambda a, grid, size: a["columns"] * size,
    "a row a block": lambda a, grid, size: grid * a["columns"] * size,
    "a row a group": lambda a, grid, size: grid // a["tiles"] * a["columns"] * size,
    "a double a chunk": lambda a, grid, size: a["rows"] * a["splits"] * 8,
    "two a chunk": lambda a, grid, size: 2 * a["rows"] * a["splits"] * size,
    "two a row": lambda a, grid, size: 2 * a["rows"] * size,
    "one a row": lambda a, grid, size: a["rows"] * size,
}
_SCRATCH = {
    "column_sums": {"partials": "partials", "sums": "column sums"},
    "row_block_backward": dict.fromkeys(["dweight", "dbias"], "a row a block"),
    "row_split_statistics": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk"),
    "row_split_merge": dict.fromkeys(["chunk_means", "chunk_deviations"], "a double a chunk")
    | dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "row_split_forward": dict.fromkeys(["mean", "mean_remainder", "rstd"], "one a row"),
    "row_split_gradient_sums": {"sums": "two a chunk"},
    "row_split_backward": dict.fromkeys(["dweight", "dbias"], "a row a group") | {"sums": "two a row"},
}


@many
@given(problems(), devices)
def test_scratch_buffers_hold_what_the_kernels_put_there(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
    sizes = {scratch.name: scratch.bytes for scratch in chosen.scratch}
    itemsize = DTYPES[DTYPES[problem.x.dtype].compute].itemsize
    for item in chosen.launches:
        arguments = dict(item.arguments)
        for name, value in item.arguments:
            if isinstance(value, str) and value in sizes and arguments.get("splits") != 0:
                assert _SIZES[_SCRATCH[item.kernel][name]](arguments, item.grid, itemsize) == sizes[value]


@many
@given(problems(), devices)
def test_scratch_is_written_before_it_is_read(problem: Problem, device: Device) -> None:
    chosen = plan(problem, device)
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
    return [(name, kind) for kind, name in re.findall(r"^  ([\w ]+\*) (\w+);", kernels.kernel_source(kernel, {}), re.M)]


def _workspace_limit(problem: Problem, device: Device) -> int:
    """Scratch memory is a third of what must move at most, beside what is small.

    That is a quarter of a megabyte a multiprocessor (partial sums of a tile a block), one row of partial sums, and
    where rows are not contiguous what is known of each row: five numbers of 8 bytes.
    """
    return problem.bytes_moved // 3 + device.multiprocessors * 2**18 + 16 * problem.columns + 40 * problem.rows + 2048


@many
@given(problems(), devices)
def test_the_workspace_is_modest(problem: Problem, device: Device) -> None:
    assert plan(problem, device).workspace_bytes <= _workspace_limit(problem, device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(8192, 1024), (16384, 4096), (4096, 8192), (65536, 256), (1024, 65536)], ids=str)
def test_the_workspace_of_a_usual_training_step(shape: tuple[int, int], dtype: str) -> None:
    for problem in (plain_forward(*shape, dtype), plain_backward(*shape, dtype)):
        assert plan(problem, DEVICES["sm_90"]).workspace_bytes <= problem.bytes_moved // 4


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


@many
@given(problems(), devices, st.data())
def test_every_access_is_aligned_and_contiguous(problem: Problem, device: Device, data: st.DataObject) -> None:
    assume(problem.rows and problem.columns)
    itemsize = DTYPES[problem.x.dtype].itemsize
    for item in plan(problem, device).launches:
        constants = dict(item.constants)
        width = constants.get("VECTOR", 1)
        assert isinstance(width, int) and width * itemsize <= 16 and problem.columns % width == 0
        vectors = problem.columns // width
        places = st.tuples(st.integers(0, problem.rows - 1), st.integers(0, vectors - 1))
        for row, vector in [*data.draw(st.lists(places, max_size=4)), (problem.rows - 1, vectors - 1), (0, 0)]:
            for matrix in problem.matrices:
                first = _address(matrix, problem, row, vector * width)
                assert first % (width * itemsize) == 0
                lanes = [_address(matrix, problem, row, vector * width + lane) for lane in range(width)]
                assert lanes == [first + lane * itemsize for lane in range(width)]
            for name, operand in (("WEIGHT", problem.weight), ("BIAS", getattr(problem, "bias", None))):
                if f"{name}_ACCESS" in constants:
                    _assert_vector_access(constants, name, operand, vector * width, width)


def _assert_vector_access(
    constants: dict[str, Any], name: str, operand: Vector | None, column: int, width: int
) -> None:
    assert constants[f"HAS_{name}"] == (operand is not None)
    if operand is None:
        return
    access, itemsize = constants[f"{name}_ACCESS"], DTYPES[operand.dtype].itemsize
    assert constants[f"{name}_TYPE"] == DTYPES[operand.dtype].cuda
    assert access in (2, 4, 8, 16) and access % itemsize == 0
    step = min(access // itemsize, width)  # as load_widened takes them
    assert width % step == 0
    for first in range(column, column + width, step):
        assert (operand.alignment + first * itemsize) % (step * itemsize) == 0


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("columns", [1024, 65536, 1_000_000])
@pytest.mark.parametrize("rows", [1, 2, 4096])
def test_aligned_tensors_move_16_bytes_at_a_time(rows: int, columns: int, dtype: str) -> None:
    for problem in (plain_forward(rows, columns, dtype), plain_backward(rows, columns, dtype)):
        for item in plan(problem, DEVICES["sm_90"]).launches:
            width = dict(item.constants).get("VECTOR")
            assert width is None or width * DTYPES[dtype].itemsize == 16


# ---- Every row and every column is taken, once.


@many
@given(problems(), devices)
def test_rows_and_columns_are_covered(problem: Problem, device: Device) -> None:
    rows, columns = problem.rows, problem.columns
    for item in plan(problem, device).launches:
        arguments: dict[str, Any] = dict(item.arguments)
        _COVERS[item.kernel](item, dict(item.constants), arguments, device)
        if item.kernel not in ("column_sums",):
            assert (arguments["rows"], arguments["columns"]) == (rows, columns)


def _covers_row_block(item: Launch, constants: dict[str, Any], arguments: dict[str, Any], device: Device) -> None:
    threads, width = constants["THREADS_PER_ROW"], constants["VECTOR"]
    assert item.block == (threads, constants["ROWS_PER_BLOCK"])
    # Part of a warp shares by shuffles of powers of two.
    assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16)
    capacity = threads * constants["VECTORS"] * width
    assert arguments["columns"] <= capacity <= max(2 * arguments["columns"], 32 * width)
    assert arguments["columns"] > capacity - threads * width, "the last vector of every thread has nothing to do"
    groups = -(-arguments["rows"] // constants["ROWS_PER_BLOCK"])
    if item.kernel == "row_block_forward":
        assert item.grid == groups
    else:  # persistent: a block goes on where another would be
        together = device.multiprocessors * max(1, device.threads_per_multiprocessor // math.prod(item.block))
        assert 1 <= item.grid <= min(groups, together)


def _covers_row_split(item: Launch, constants: dict[str, Any], arguments: dict[str, Any], device: Device) -> None:
    lanes, tile = constants["ROW_LANES"], _tile(item, constants)
    chunk, splits = arguments["columns_per_split"], arguments["splits"]
    assert chunk % tile == 0 and 1 <= chunk // tile <= TILES_PER_CHUNK
    assert splits * chunk >= arguments["columns"] > (splits - 1) * chunk
    assert item.grid == splits * -(-arguments["rows"] // lanes)


def _covers_row_split_backward(
    item: Launch, constants: dict[str, Any], arguments: dict[str, Any], device: Device
) -> None:
    lanes, tile, tiles = constants["ROW_LANES"], _tile(item, constants), arguments["tiles"]
    assert tiles * tile >= arguments["columns"] > (tiles - 1) * tile
    assert arguments["rows_per_group"] % lanes == 0 and item.grid % tiles == 0
    groups = item.grid // tiles
    assert groups * arguments["rows_per_group"] >= arguments["rows"] > (groups - 1) * arguments["rows_per_group"]


def _tile(item: Launch, constants: dict[str, Any]) -> int:
    """Columns of a tile, as kernels/tile.cuh has them."""
    threads, lanes = constants["THREADS"], constants["ROW_LANES"]
    assert item.block == (threads, 1) and threads % 32 == 0
    assert lanes in (1, 2, 4, 8, 16, 32)
    return int(threads // lanes * constants["VECTOR"] * constants["UNROLL"])


def _covers_merge(item: Launch, constants: dict[str, Any], arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (32, constants["ROWS_PER_BLOCK"])
    assert item.grid == -(-arguments["rows"] // constants["ROWS_PER_BLOCK"])
    chunk, splits = arguments["columns_per_split"], arguments["splits"]
    assert splits * chunk >= arguments["columns"]
    assert splits == 0 or arguments["columns"] > (splits - 1) * chunk


def _covers_column_sums(item: Launch, constants: dict[str, Any], arguments: dict[str, Any], device: Device) -> None:
    assert item.block == (constants["COLUMN_THREADS"], constants["ROW_THREADS"])
    assert item.grid == -(-arguments["columns"] // constants["COLUMN_THREADS"])


_COVERS = {
    "row_block_forward": _covers_row_block,
    "row_block_backward": _covers_row_block,
    "row_split_statistics": _covers_row_split,
    "row_split_forward": _covers_row_split,
    "row_split_gradient_sums": _covers_row_split,
    "row_split_backward": _covers_row_split_backward,
    "row_split_merge": _covers_merge,
    "column_sums": _covers_column_sums,
}


@many
@given(problems(), devices)
def test_every_result_is_written(problem: Problem, device: Device) -> None:
    """Each output that is wanted and not empty is an argument of some launch, and no other output is."""
    chosen = plan(problem, device)
    named = {str(value) for item in chosen.launches for _, value in item.arguments if isinstance(value, str)}
    named -= {scratch.name for scratch in chosen.scratch}
    if isinstance(problem, ForwardProblem):
        wanted = {"y"} if problem.rows and problem.columns else set()
        wanted |= {"mean", "rstd"} if problem.stats and problem.rows else set()
        assert named >= wanted
        return
    wanted = {"dx"} if problem.dx is not None and problem.rows and problem.columns else set()
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        if dtype is not None and problem.columns:
            wanted.add(name)
            writers = [(item, field) for item in chosen.launches for field, value in item.arguments if value == name]
            ((item, field),) = writers
            assert field in ("sums", name) and item.kernel == ("column_sums" if field == "sums" else item.kernel)
            kind = dict(item.constants)["SUM_TYPE" if field == "sums" else f"{name.upper()}_TYPE"]
            assert kind == DTYPES[dtype].cuda
    assert named >= wanted
    assert not (named & {"dweight", "dbias"}) - wanted


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


@settings(max_examples=300, deadline=None)
@given(ROWS, ROWS, st.integers(2, 100_000), st.sampled_from(list(DTYPES)), devices)
def test_no_batch_size_compiles_a_kernel_of_its_own(
    rows: int, other_rows: int, columns: int, dtype: str, device: Device
) -> None:
    """But for column sums, which are cheap to compile (of few partial rows or many, of gradients or of chunks), and but
    for so few rows that one block writes the sums of all, in their own dtype."""

    def costly(problem: Problem) -> set[tuple[str, Any]]:
        types_of_sums = ("DWEIGHT_TYPE", "DBIAS_TYPE")
        return {
            (kernel, tuple(item for item in constants if item[0] not in types_of_sums))
            for kernel, constants in kernels_of(plan(problem, device))
            if kernel != "column_sums"
        }

    for make in (plain_forward, plain_backward):
        assert costly(make(rows, columns, dtype)) == costly(make(other_rows, columns, dtype))


def test_eps_compiles_nothing() -> None:
    some, others = (
        kernels_of(*(plan(plain_forward(64, columns, eps=eps), DEVICES["sm_90"]) for columns in (64, 10**6)))
        for eps in (0.0, 1.0)
    )
    assert some == others and len(some) == 1 + 3


MODEL_SIZES = [
    64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120, 8192,
]  # fmt: skip


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_model_of_many_sizes_compiles_few_kernels(dtype: str) -> None:
    """Twenty sizes of layer norm, and four batch sizes of each: about a kernel a size and direction.

    Backward a second one where a single block has all the rows, since it writes dweight and dbias itself.
    """
    rows = (1, 7, 4096, 65536)
    sm_90 = DEVICES["sm_90"]
    forward = kernels_of(*(plan(plain_forward(n, columns, dtype), sm_90) for n in rows for columns in MODEL_SIZES))
    backward = kernels_of(*(plan(plain_backward(n, columns, dtype), sm_90) for n in rows for columns in MODEL_SIZES))
    assert len(forward) <= len(MODEL_SIZES) + 4
    assert len(backward) <= 2 * len(MODEL_SIZES) + 4
    training = (plan(plain_backward(n, columns, dtype), sm_90) for n in rows[2:] for columns in MODEL_SIZES)
    assert len(kernels_of(*training)) <= len(MODEL_SIZES) + 4


# ---- Which strategy for which size.


def plain_forward(rows: int, columns: int, dtype: str = "float32", eps: float = 1e-5) -> ForwardProblem:
    x, vector = Matrix(dtype, (columns if rows > 1 else 0,), (1,)), Vector(dtype)
    return ForwardProblem((rows,), (columns,), x, x, vector, vector, True, eps)


def plain_backward(rows: int, columns: int, dtype: str = "float32") -> BackwardProblem:
    x = Matrix(dtype, (columns if rows > 1 else 0,), (1,))
    return BackwardProblem((rows,), (columns,), x, x, x, Vector(dtype), dtype, dtype)


def _covering_problems() -> list[Problem]:
    first_axis = Matrix("float32", (1,), (512,))
    problems: list[Problem] = [
        ForwardProblem((512,), (64,), first_axis, first_axis, None, None, False, 0.0),
        BackwardProblem((512,), (64,), first_axis, first_axis, first_axis, None, "float32", None),
    ]
    for columns in (1, 64, 768, 10_000_000):
        problems += [plain_forward(16, columns), plain_backward(16, columns)]
    return problems


STRATEGIES = [
    # dtype, columns, forward, backward
    ("bfloat16", 1, "row_block", "row_block"),
    ("bfloat16", 64, "row_block", "row_block"),
    ("bfloat16", 1024, "row_block", "row_block"),
    ("bfloat16", 8192, "row_block", "row_block"),
    ("bfloat16", 100_000, "row_split", "row_split"),
    ("bfloat16", 10_000_000, "row_split", "row_split"),
    ("float32", 64, "row_block", "row_block"),
    ("float32", 4096, "row_block", "row_block"),
    ("float32", 16384, "row_block", "row_split"),
    ("float32", 50_000, "row_split", "row_split"),
    ("float64", 1024, "row_block", "row_block"),
    ("float64", 4096, "row_block", "row_block"),
    ("float64", 20_000, "row_split", "row_split"),
]


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize(("dtype", "columns", "forward", "backward"), STRATEGIES)
def test_strategies(rows: int, dtype: str, columns: int, forward: str, backward: str) -> None:
    for device in DEVICES.values():
        assert plan(plain_forward(rows, columns, dtype), device).strategy == forward
        assert plan(plain_backward(rows, columns, dtype), device).strategy == backward


@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_long_sixteen_bit_rows_backward(device: Device) -> None:
    """They stay in registers, and the next row is fetched ahead, where the compiler has the registers for it."""
    early, copies = device.capability < 100, device.capability >= 80
    chosen = plan(plain_backward(4096, 16384, "bfloat16"), device)
    assert chosen.strategy == ("row_block" if early else "row_split")
    for columns, long in ((768, False), (4096, True)):
        (item,) = (x for x in plan(plain_backward(4096, columns, "float16"), device).launches
                   if x.kernel == "row_block_backward")  # fmt: skip
        staged = long and early and copies
        assert dict(item.constants)["STAGED"] == staged
        assert item.shared_bytes == (2 * 2 * item.block[0] * item.block[1] * 4 * 8 if staged else 0)


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
        problem = ForwardProblem((64,), (768,), x, y, None, None, True, 1e-5)
        assert plan(problem, DEVICES["sm_90"]).strategy == strategy


def test_neighbouring_threads_take_neighbouring_numbers() -> None:
    """Along rows where columns are contiguous, across them where rows are: either way whole 32-byte sectors."""

    def row_lanes(problem: Problem) -> set[Any]:
        return {lanes for item in plan(problem, DEVICES["sm_90"]).launches
                if (lanes := dict(item.constants).get("ROW_LANES")) is not None}  # fmt: skip

    first_axis = Matrix("float32", (1,), (512,))
    assert row_lanes(ForwardProblem((512,), (64,), first_axis, first_axis, None, None, True, 0.0)) == {32}
    assert row_lanes(BackwardProblem((512,), (64,), first_axis, first_axis, None, None, None, "float32")) == {32}
    assert row_lanes(plain_forward(64, 1_000_000)) == row_lanes(plain_backward(64, 1_000_000)) == {1}


def test_what_is_empty_launches_nothing_but_zeros() -> None:
    for make in (plain_forward, plain_backward):
        nothing = plan(make(0, 0), DEVICES["sm_90"])
        assert nothing.launches == () and nothing.workspace_bytes == 0
    for columns in (8, 1_000_000):
        assert plan(plain_forward(0, columns), DEVICES["sm_90"]).launches == ()
        sums = plan(plain_backward(0, columns), DEVICES["sm_90"]).launches
        assert [(item.kernel, dict(item.arguments)["rows"]) for item in sums] == [("column_sums", 0)] * 2
    # The statistics of rows without columns are NaN, which somebody must write.
    assert [item.kernel for item in plan(plain_forward(5, 0), DEVICES["sm_90"]).launches] == ["row_split_merge"]
    assert plan(plain_backward(5, 0), DEVICES["sm_90"]).launches == ()
