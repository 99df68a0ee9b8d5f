"""Every kernel that a plan asks for compiles for every architecture, and nothing of it spills. Needs no GPU.

All that could be compiled is too much: hundreds of geometries (VECTOR, VECTORS, THREADS_PER_ROW) times five types of
weight and of bias, times seven architectures. Covered is:

1. Every geometry of row_block_*, for every dtype, once: they are dealt out to the architectures, with weight and bias
   in turn absent, float32, float64 and sixteen bits, and the gradients wanted in turn.
2. For every architecture the geometries that need most registers: for each dtype, VECTOR and number of registers that a
   thread may have (255 in a block of up to 256 threads, 128 in one of 512, 64 in one of 1024) the most VECTORS, with
   weight and bias absent, both float32 and both float64.
3. row_split_* for every dtype, architecture and VECTOR, one dimension and three, along rows and across, with float64
   weights, and a quarter of that with other weights and gradients in turn.
4. column_sums for every pair of types, and gradients that one block sums up, for every pair.

That is enough because a kernel's need of registers grows with VECTORS, everything else being equal; because a thread
has as many registers on every architecture; and because the compiler treats types of weights alike but for their size.
The geometries are not listed here but asked of ``plan``, at the sizes where they can change; a test compares with every
size up to 100,000.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import pytest

from cunorm import kernels
from cunorm.plan import Device, Launch, plan
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Vector
from cunorm.resources import Resources, compile_resources

pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")

DEVICES = {
    "sm_75": Device("sm_75", 40, 1024),
    "sm_80": Device("sm_80", 108, 2048),
    "sm_86": Device("sm_86", 84, 1536),
    "sm_89": Device("sm_89", 128, 1536),
    "sm_90": Device("sm_90", 132, 2048),
    "sm_100": Device("sm_100", 148, 2048),
    "sm_120": Device("sm_120", 170, 1536),
}
STATIC_SHARED_BYTES = 48 * 1024
REGISTERS_PER_BLOCK = 65536
ROWS = 4096

Constants = tuple[tuple[str, int | str], ...]
Problem = ForwardProblem | BackwardProblem


# ---- Problems, by how their rows lie.


def forward(x: Matrix, row_sizes: tuple[int, ...], column_sizes: tuple[int, ...], weight: str | None) -> ForwardProblem:
    vector = None if weight is None else Vector(weight, x.alignment)
    return ForwardProblem(row_sizes, column_sizes, x, x, vector, vector, True, 1e-5)


def backward(
    x: Matrix,
    row_sizes: tuple[int, ...],
    column_sizes: tuple[int, ...],
    weight: str | None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> BackwardProblem:
    vector, gradient = (None if weight is None else Vector(weight, x.alignment)), weight or x.dtype
    dx, dweight, dbias = wanted
    return BackwardProblem(
        row_sizes, column_sizes, x, x, x if dx else None, vector, gradient if dweight else None,
        gradient if dbias else None,
    )  # fmt: skip


def contiguous(dtype: str, columns: int, alignment: int) -> tuple[Matrix, tuple[int, ...], tuple[int, ...]]:
    return Matrix(dtype, (columns,), (1,), alignment), (ROWS,), (columns,)


def alignments(dtype: str) -> list[int]:
    return [a for a in (2, 4, 8, 16) if a >= DTYPES[dtype].itemsize]


def sizes_where_geometry_changes() -> Iterator[int]:
    """Numbers of vectors a row: all that are small, and around what 256 threads or more hold evenly."""
    yield from range(1, 1100)
    for vectors in range(1280, 32 * 1024, 256):
        yield from (vectors - 1, vectors, vectors + 1)


def contiguous_problems(dtype: str, weight: str | None) -> Iterator[tuple[ForwardProblem, BackwardProblem]]:
    """Contiguous rows, at every width of access: by alignment, which narrows it as an odd size does."""
    for alignment, vectors in itertools.product(alignments(dtype), sizes_where_geometry_changes()):
        x = contiguous(dtype, vectors * alignment // DTYPES[dtype].itemsize, alignment)
        yield forward(*x, weight), backward(*x, weight)


def launches(problems: Iterable[Problem], arch: str) -> Iterator[Launch]:
    for problem in problems:
        yield from plan.__wrapped__(problem, DEVICES[arch]).launches


GEOMETRY = ("VECTOR", "VECTORS", "THREADS_PER_ROW", "ROWS_PER_BLOCK")


def geometry(constants: Constants) -> tuple[int, ...]:
    given = dict(constants)
    return tuple(int(given[name]) for name in GEOMETRY)


@functools.cache
def row_block_geometries(
    dtype: str, kernel: str, arch: str, weight: str | None = "float64"
) -> dict[tuple[int, ...], Constants]:
    """Every geometry of row_block_* for weights of a dtype, with its constants. Backward it depends on the weights."""
    index = 0 if kernel.endswith("forward") else 1
    problems = (pair[index] for pair in contiguous_problems(dtype, weight))
    found = (item.constants for item in launches(problems, arch) if item.kernel == kernel)
    return {geometry(constants): constants for constants in found}


def heaviest(geometries: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Of each VECTOR and number of registers that a thread may have, the geometry with most VECTORS."""
    most: dict[tuple[int, int], tuple[int, ...]] = {}
    for found in sorted(geometries, key=lambda item: item[1]):
        width, _, threads, rows = found
        most[width, max(256, threads * rows)] = found
    return set(most.values())


# ---- The same kernels with other weights, other gradients wanted.


def _with_vector(constants: Constants, name: str, dtype: str | None) -> Constants:
    """The constants where a weight or bias of another dtype is given, as the plan would have them if it is aligned."""
    given = dict(constants)
    if f"HAS_{name}" not in given:
        return constants
    access = 4 if dtype is None else min(16, int(given["VECTOR"]) * DTYPES[dtype].itemsize)
    kind = "float" if dtype is None else DTYPES[dtype].cuda
    return tuple(
        (given | {f"HAS_{name}": int(dtype is not None), f"{name}_TYPE": kind, f"{name}_ACCESS": access}).items()
    )


def with_weights(constants: Constants, weight: str | None, bias: str | None) -> Constants:
    return _with_vector(_with_vector(constants, "WEIGHT", weight), "BIAS", bias)


def with_wanted(constants: Constants, wanted: tuple[int, int, int]) -> Constants:
    given = dict(constants)
    if "WANTS_DX" not in given:
        return constants
    return tuple((given | dict(zip(("WANTS_DX", "WANTS_DWEIGHT", "WANTS_DBIAS"), wanted))).items())


WEIGHTS = [(None, None), ("float32", "float32"), ("float64", "float64"), ("bfloat16", None), (None, "float16")]
WANTED = [(1, 1, 1), (1, 1, 1), (1, 0, 0), (0, 1, 1), (1, 1, 0), (0, 0, 1)]


def few_rows(dtype: str, columns: int) -> Iterator[BackwardProblem]:
    """One row, whose sums for dweight and dbias are the results themselves, of every type."""
    for weight in DTYPES:
        yield backward(Matrix(dtype, (0,), (1,)), (1,), (columns,), weight)


def row_block_constants(dtype: str, kernel: str, arch: str) -> set[Constants]:
    geometries = row_block_geometries(dtype, kernel, arch)
    heavy = heaviest(geometries)
    if kernel.endswith("forward"):
        chosen = {with_weights(geometries[item], weight, bias) for item in heavy for weight, bias in WEIGHTS[:3]}
    else:
        by_weight = [
            row_block_geometries(dtype, kernel, arch, weight) for weight in (None, dtype, "float32", "float64")
        ]
        chosen = {found[item] for found in by_weight for item in heaviest(found)}
    chosen.update(item.constants for item in launches(few_rows(dtype, 1000), arch) if item.kernel == kernel)
    place = list(DEVICES).index(arch)
    for number, constants in enumerate(geometries[key] for key in sorted(geometries)):
        if number % len(DEVICES) == place:
            chosen.add(with_wanted(with_weights(constants, *WEIGHTS[number % 5]), WANTED[number % 6]))
    return chosen


def row_split_problems(dtype: str, weight: str | None, directions: tuple[bool, ...]) -> Iterator[Problem]:
    """Rows that no block holds and rows that are not contiguous: along and across rows, one dimension and many."""
    itemsize = DTYPES[dtype].itemsize
    layouts = [contiguous(dtype, 3 * 2**19, alignment) for alignment in alignments(dtype)]
    for alignment in (itemsize, 16):
        width = alignment // itemsize
        layouts.append((Matrix(dtype, (64, 4096, 2**18), (32, 1024, 1), alignment), (8, 4, 2), (2, 4, 8 * width)))
    layouts.append((Matrix(dtype, (1,), (ROWS,), 16), (ROWS,), (512,)))
    layouts.append((Matrix(dtype, (4096, 2048, 1), (2**20, 2**18, 32), 16), (2, 2, 32), (4, 4, 8)))
    layouts.append((Matrix(dtype, (4096, 2), (1,), 16), (5, 7), (1,)))
    for x in layouts:
        if directions[0]:
            yield forward(*x, weight)
        if directions[1]:
            yield backward(*x, weight)


def row_split_constants(dtype: str, kernel: str, arch: str) -> set[Constants]:
    place = list(DEVICES).index(arch)
    forward_too = kernel in ("row_split_statistics", "row_split_forward", "row_split_merge")
    directions = (forward_too, not forward_too)
    problems = itertools.chain(row_split_problems(dtype, "float64", directions), few_rows(dtype, 3 * 2**19))
    found = [item.constants for item in launches(problems, arch) if item.kernel == kernel]
    chosen = set(found)
    for number, constants in enumerate(dict.fromkeys(found), start=place):
        if number % 4 == 0:
            chosen.add(with_wanted(with_weights(constants, *WEIGHTS[number // 4 % 5]), WANTED[number // 4 % 6]))
    return chosen


def column_sums_constants(dtype: str, arch: str) -> set[Constants]:
    problems = (backward(*contiguous(dtype, 1024, 16), weight) for weight in DTYPES)
    return {item.constants for item in launches(problems, arch) if item.kernel == "column_sums"}


def constants_of(kernel: str, dtype: str, arch: str) -> set[Constants]:
    if kernel == "column_sums":
        return column_sums_constants(dtype, arch)
    return (row_block_constants if kernel.startswith("row_block") else row_split_constants)(dtype, kernel, arch)


# ---- The tests.


def threads_of(constants: Constants) -> int:
    """Threads a block, in the kernels' own words."""
    given = {name: int(value) for name, value in constants if isinstance(value, int)}
    if "THREADS" in given:
        return given["THREADS"]
    if "COLUMN_THREADS" in given:
        return given["COLUMN_THREADS"] * given["ROW_THREADS"]
    return given.get("THREADS_PER_ROW", 32) * given["ROWS_PER_BLOCK"]


def complaint(kernel: str, constants: Constants, taken: Resources) -> str | None:
    """What is wrong with what a kernel takes; None if nothing is."""
    threads = threads_of(constants)
    if taken.spill_bytes or taken.stack_bytes:
        return f"{taken.spill_bytes} bytes spilled, {taken.stack_bytes} bytes of stack"
    if taken.shared_bytes > STATIC_SHARED_BYTES:
        return f"{taken.shared_bytes} bytes of static shared memory"
    # Registers are given out in eights, to a warp at a time.
    if -(-taken.registers // 8) * 8 * threads > REGISTERS_PER_BLOCK:
        return f"{taken.registers} registers for each of {threads} threads"
    return None


@pytest.mark.parametrize("kernel", kernels.kernel_names())
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("arch", list(DEVICES))
def test_kernels_compile_and_do_not_spill(arch: str, dtype: str, kernel: str) -> None:
    every = sorted(constants_of(kernel, dtype, arch))
    assert every, f"no plan asks for {kernel}"
    complaints = {}
    for constants in every:
        found = complaint(kernel, constants, compile_resources(kernel, dict(constants), arch))
        if found is not None:
            complaints[" ".join(f"{name}={value}" for name, value in constants)] = found
    assert not complaints, "\n".join(f"{kernel} {arch} {what}: {found}" for what, found in complaints.items())


@pytest.mark.parametrize("kernel", ["row_split_statistics", "row_split_backward", "row_split_merge", "column_sums"])
def test_threads_are_as_the_plan_has_them(kernel: str) -> None:
    found = [item for item in launches(row_split_problems("float32", None, (True, True)), "sm_90")
             if item.kernel == kernel]  # fmt: skip
    assert found
    for item in found:
        assert threads_of(item.constants) == item.block[0] * item.block[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_every_geometry_is_known(dtype: str) -> None:
    """No size up to 100,000 has a geometry that the sizes above do not have."""
    for make, kernel in ((forward, "row_block_forward"), (backward, "row_block_backward")):
        problems = (make(*contiguous(dtype, columns, 16), "float64") for columns in range(1, 100_001))
        found = {geometry(item.constants) for item in launches(problems, "sm_90") if item.kernel == kernel}
        assert len(found) > 20
        assert found <= set(row_block_geometries(dtype, kernel, "sm_90"))


@pytest.mark.parametrize(
    "kernel", ["row_block_forward", "row_block_backward", "row_split_forward", "row_split_backward"]
)
def test_other_weights_are_as_the_plan_has_them(kernel: str) -> None:
    """What is compiled with other weights is what the plan asks for with other weights."""
    columns = 512 if kernel.startswith("row_block") else 3 * 2**19
    x = contiguous("float16", columns, 16)
    for weight in (None, *DTYPES):
        problem = forward(*x, weight) if kernel.endswith("forward") else backward(*x, weight)
        (asked,) = {item.constants for item in launches([problem], "sm_90") if item.kernel == kernel}
        base = forward(*x, "float64") if kernel.endswith("forward") else backward(*x, "float64")
        (known,) = {item.constants for item in launches([base], "sm_90") if item.kernel == kernel}
        assert with_weights(known, weight, weight) == asked


def test_gradients_wanted_are_as_the_plan_has_them() -> None:
    for wanted in WANTED:
        x = contiguous("float16", 1024, 16)
        (asked,) = {
            item.constants
            for item in launches([backward(*x, "float64", tuple(map(bool, wanted)))], "sm_90")  # type: ignore[arg-type]
            if item.kernel == "row_block_backward"
        }
        (known,) = {
            item.constants
            for item in launches([backward(*x, "float64")], "sm_90")
            if item.kernel == "row_block_backward"
        }
        assert with_wanted(known, wanted) == asked


def test_a_spill_is_seen() -> None:
    """Far more vectors a thread than any plan asks for: the test above must fail for it."""
    constants = dict(row_block_geometries("float32", "row_block_forward", "sm_80")[4, 5, 1024, 1])
    taken = compile_resources("row_block_forward", constants | {"VECTORS": 16}, "sm_80")
    assert "spilled" in str(complaint("row_block_forward", tuple(constants.items()), taken))
