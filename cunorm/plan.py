"""How a problem is computed: which kernels, with which constants, grid and block. Pure; needs no GPU.

``plan(problem, device)`` picks a strategy and writes down its launches. Operands and scratch buffers are named; a
``Launch`` gives every field of its kernel's ``struct Arguments`` either a number or the name of a buffer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Vector

__all__ = ["Device", "Launch", "Plan", "Scratch", "plan"]

Value = int | float | str | tuple[int, ...]


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    arch: str = "sm_90"
    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048

    @property
    def capability(self) -> int:
        """The compute capability as the architecture has it: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def asynchronous_shared_bytes(self) -> int:
        """The most shared memory of a block, where copies into it can be asynchronous (from sm_80 on); 0 elsewhere."""
        # From the CUDA C++ Programming Guide's table of compute capabilities; 99 KB is the least of them.
        return {75: 0, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(self.capability, 99) * 1024


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    constants: tuple[tuple[str, int | str], ...]
    grid: int
    block: tuple[int, int]
    shared_bytes: int  # dynamic
    arguments: tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Scratch:
    """A named part of the workspace."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A sequence of launches, and the scratch memory between them, in one workspace."""

    strategy: str
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    workspace_bytes: int = 0


@functools.lru_cache(maxsize=4096)
def plan(problem: ForwardProblem | BackwardProblem, device: Device) -> Plan:
    """The plan for a problem on a device."""
    builder = _Builder()
    if isinstance(problem, ForwardProblem):
        strategy = _plan_forward(problem, device, builder)
    else:
        strategy = _plan_backward(problem, device, builder)
    return Plan(strategy, tuple(builder.launches), tuple(builder.scratch), builder.workspace_bytes)


_MOST_BLOCKS = 2**31 - 1


@dataclass
class _Builder:
    launches: list[Launch] = field(default_factory=list)
    scratch: list[Scratch] = field(default_factory=list)
    workspace_bytes: int = 0

    def reserve(self, name: str, count: int, itemsize: int) -> str:
        """Reserve scratch memory and return its name. Offsets are multiples of 256 bytes."""
        self.scratch.append(Scratch(name, self.workspace_bytes, count * itemsize))
        self.workspace_bytes += -(-count * itemsize // 256) * 256
        return name

    def launch(
        self,
        kernel: str,
        constants: dict[str, int | str],
        grid: int,
        block: tuple[int, int],
        shared_bytes: Value = 0,
        **arguments: Value,
    ) -> None:
        assert isinstance(shared_bytes, int)
        if grid > _MOST_BLOCKS:
            raise ValueError(f"x has too many rows: {kernel} would need {grid} blocks, a launch has {_MOST_BLOCKS}")
        if grid > 0:
            self.launches.append(
                Launch(kernel, tuple(constants.items()), grid, block, shared_bytes, tuple(arguments.items()))
            )


# ---- What the plans below share.


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _power_of_two_near(n: int) -> int:
    """The power of two from two thirds of n, exclusive, to four thirds."""
    return 1 << max(1, n * 4 // 3).bit_length() - 1


def _vector_width(problem: ForwardProblem | BackwardProblem) -> int:
    """Elements a thread moves at once: as many, up to 16 bytes, as columns, pointers and every stride divide by."""
    itemsize = DTYPES[problem.x.dtype].itemsize
    matrices = problem.matrices
    if any(matrix.column_strides[-1] != 1 and problem.column_sizes[-1] > 1 for matrix in matrices):
        return 1
    strides = [stride for m in matrices for stride in m.row_strides + m.column_strides[:-1]]
    elements = math.gcd(16 // itemsize, problem.column_sizes[-1], *strides)
    return max(1, min([elements] + [matrix.alignment // itemsize for matrix in matrices]))


def _dtype_constants(problem: ForwardProblem | BackwardProblem) -> dict[str, int | str]:
    dtype = DTYPES[problem.x.dtype]
    return {"X_TYPE": dtype.cuda, "COMPUTE_TYPE": DTYPES[dtype.compute].cuda}


def _vector_constants(name: str, vector: Vector | None, width: int) -> dict[str, int | str]:
    """Constants for the weight or bias: its type, and the bytes of one access to ``width`` of its elements."""
    if vector is None:
        return {f"HAS_{name}": 0, f"{name}_TYPE": "float", f"{name}_ACCESS": 4}
    dtype = DTYPES[vector.dtype]
    access = max(dtype.itemsize, min(16, width * dtype.itemsize, vector.alignment))
    return {f"HAS_{name}": 1, f"{name}_TYPE": dtype.cuda, f"{name}_ACCESS": access}


def _compute_itemsize(problem: ForwardProblem | BackwardProblem) -> int:
    return DTYPES[DTYPES[problem.x.dtype].compute].itemsize


_COLUMN_SUM_THREADS = 512


def _launch_sum(
    builder: _Builder, problem: BackwardProblem, partials: Value, sums: Value, dtype: str, rows: int, columns: int
) -> None:
    # Few partial rows leave nothing to share between threads.
    row_threads = 1 if rows <= 8 else 16
    constants = {
        "COMPUTE_TYPE": _dtype_constants(problem)["COMPUTE_TYPE"],
        "SUM_TYPE": DTYPES[dtype].cuda,
        "COLUMN_THREADS": _COLUMN_SUM_THREADS // row_threads,
        "ROW_THREADS": row_threads,
    }
    builder.launch(
        "column_sums",
        constants,
        -(-columns * row_threads // _COLUMN_SUM_THREADS),
        (_COLUMN_SUM_THREADS // row_threads, row_threads),
        partials=partials,
        sums=sums,
        rows=rows,
        columns=columns,
    )


def _column_sum_targets(
    builder: _Builder, problem: BackwardProblem, count: int
) -> tuple[dict[str, Value], dict[str, int | str]]:
    """Where a kernel writes ``count`` rows of sums for dweight and dbias: arguments, and constants for their types.

    More than one row, or none, is scratch that `_launch_column_sums` will add up; one row is the result itself.
    """
    arguments: dict[str, Value] = {}
    constants: dict[str, int | str] = {}
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        arguments[name], sum_dtype = 0, DTYPES[problem.x.dtype].compute
        if dtype is not None and count == 1:
            arguments[name], sum_dtype = name, dtype
        elif dtype is not None:
            arguments[name] = builder.reserve(f"{name}_sums", count * problem.columns, _compute_itemsize(problem))
        constants |= {f"WANTS_{name.upper()}": int(dtype is not None), f"{name.upper()}_TYPE": DTYPES[sum_dtype].cuda}
    return arguments, constants


def _launch_column_sums(builder: _Builder, problem: BackwardProblem, targets: dict[str, Value], count: int) -> None:
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        if dtype is not None and count != 1:
            _launch_sum(builder, problem, targets[name], name, dtype, count, problem.columns)


# ---- Rows that fit in a block's registers.


@dataclass(frozen=True)
class _RowBlock:
    """How a block holds its rows: THREADS_PER_ROW threads of VECTORS vectors each, ROWS_PER_BLOCK times."""

    width: int
    vectors: int
    threads_per_row: int
    rows_per_block: int

    @property
    def constants(self) -> dict[str, int | str]:
        return {
            "VECTOR": self.width,
            "VECTORS": self.vectors,
            "THREADS_PER_ROW": self.threads_per_row,
            "ROWS_PER_BLOCK": self.rows_per_block,
        }

    @property
    def block(self) -> tuple[int, int]:
        return (self.threads_per_row, self.rows_per_block)


@dataclass(frozen=True)
class _RowBlockTuning:
    """Knobs of ``_row_block``, in 4-byte registers that a thread's part of a row takes.

    A row is spread over threads so that each has about ``aim`` registers of it, while ``most_threads`` suffice; then
    over more registers a thread, then over more threads. ``limits`` are (threads, registers): the most for rows shared
    by up to that many threads. A block of 1024 threads has 64 registers a thread, one of 512 has 128, and the rest is
    for addresses, weights and sums. Compiling every plan for every architecture shows that nothing spills.
    """

    aim: int
    most_threads: int
    block_threads: int
    limits: tuple[tuple[int, int], ...]


# Measured on an H200 by time over the time of a copy of the same bytes, 32768 rows or 100 MB and more.
# Forward: at 4096 columns of bfloat16, 128 threads of 4 vectors take 1.04, 256 of 2 vectors 1.26; at 8192, 128 of 8
# beat 256 of 4 by 4 %, and blocks of more than one such row lose 10 %. At 257 columns (no vectors) 32 threads of 9
# numbers take 1.67, 128 of 3 2.98.
_FORWARD_TUNING = _RowBlockTuning(16, 128, 64, ((256, 36), (512, 32), (1024, 20)))
# Backward: at 1000 columns of float32, 64 threads of 4 vectors take 1.05, 128 of 2 vectors 1.24. Sixteen-bit data has
# twice the sums a vector: two vectors a thread are best up to 512 columns; from 1024 on four, in blocks of 512 threads
# (at 4096 columns 1.31 where two vectors take 1.52).
_BACKWARD_TUNING = _RowBlockTuning(64, 256, 256, ((256, 80), (512, 100)))
_LONG_ROW_BACKWARD_TUNING = _RowBlockTuning(100, 512, 512, ((512, 108),))
# What row_block_backward declares itself, at most.
_STATIC_SHARED_BYTES = 18 * 1024
# Persistent blocks for 512 threads a multiprocessor: 6 % faster at 4096 columns than for 1024, which leave more partial
# sums.
_PERSISTENT_THREADS = 512


def _row_registers(problem: ForwardProblem | BackwardProblem, width: int) -> tuple[int, int]:
    """4-byte registers for one vector of a row: what was loaded and, backward, its two column sums; and once a thread.

    A vector of less than 16 bytes counts more: there are many of them, and each has its own bounds to check. So does
    one of sixteen-bit numbers, which are unpacked. Once a thread counts the weight, and that intermediate results in
    double take twice as much.
    """
    loaded_bytes = width * DTYPES[problem.x.dtype].itemsize
    loaded, narrow = max(1, loaded_bytes // 4), loaded_bytes < 16
    if isinstance(problem, ForwardProblem):
        return loaded + narrow, 0
    weight_bytes = 0 if problem.weight is None else width * DTYPES[problem.weight.dtype].itemsize
    sums = 2 * width * _compute_itemsize(problem) // 4
    unpacked = DTYPES[problem.x.dtype].itemsize == 2 and not narrow
    return 2 * loaded + sums + 4 * narrow + unpacked, weight_bytes // 4 + 8 * (problem.x.dtype == "float64")


def _row_block(problem: ForwardProblem | BackwardProblem, tuning: _RowBlockTuning) -> _RowBlock | None:
    """Spread the rows over threads; None where a row is too long or not contiguous."""
    if len(problem.row_sizes) > 1 or len(problem.column_sizes) > 1:
        return None
    if problem.columns > 1 and any(matrix.column_strides[0] != 1 for matrix in problem.matrices):
        return None
    width = _vector_width(problem)
    vectors_per_row = problem.columns // width
    registers, more_registers = _row_registers(problem, width)
    threads = min(tuning.most_threads, _power_of_two_near(vectors_per_row * registers // tuning.aim))
    # Two neighbouring threads a row at least: at 10 columns of bfloat16 one takes 2.98 of a copy's time, two 2.05.
    threads = max(threads, min(2, vectors_per_row))
    for most_threads, limit in tuning.limits:
        while threads <= most_threads:
            vectors = -(-vectors_per_row // threads)
            if vectors * registers + more_registers <= limit:
                return _RowBlock(width, vectors, threads, max(1, tuning.block_threads // threads))
            threads *= 2
    return None


def _plan_row_block_forward(problem: ForwardProblem, rows: _RowBlock, builder: _Builder) -> str:
    constants = (
        _dtype_constants(problem)
        | rows.constants
        | _vector_constants("WEIGHT", problem.weight, rows.width)
        | _vector_constants("BIAS", problem.bias, rows.width)
    )
    builder.launch(
        "row_block_forward",
        constants,
        -(-problem.rows // rows.rows_per_block),
        rows.block,
        x="x",
        weight="weight",
        bias="bias",
        y="y",
        mean="mean",
        rstd="rstd",
        rows=problem.rows,
        columns=problem.columns,
        x_stride=problem.x.row_strides[0],
        y_stride=problem.y.row_strides[0],
        eps=problem.eps,
    )
    return "row_block"


def _is_long_sixteen_bit(problem: BackwardProblem, device: Device) -> bool:
    """Whether ``_LONG_ROW_BACKWARD_TUNING`` is for this problem. From sm_100 on the compiler would spill."""
    sixteen_bits = DTYPES[problem.x.dtype].itemsize == 2 and _vector_width(problem) == 8
    return sixteen_bits and problem.columns >= 1024 and device.capability < 100


def _stage_bytes(problem: BackwardProblem, device: Device, rows: _RowBlock) -> int:
    """Shared memory for the next row of x and dy, or 0 where a block does without.

    It pays for sixteen-bit data in long rows, whose arithmetic takes long enough for memory to fall idle: at 4096
    columns of bfloat16 1.16 of a copy's time with it and 1.31 without, at 8192 1.13 and 1.27 (H200, 32768 rows). For
    float32 at 10,000 columns it is 1.17 with it and 1.11 without.
    """
    if not _is_long_sixteen_bit(problem, device):
        return 0
    stage_bytes = 2 * rows.threads_per_row * rows.rows_per_block * rows.vectors * 16
    return stage_bytes if stage_bytes + _STATIC_SHARED_BYTES <= device.asynchronous_shared_bytes else 0


def _plan_row_block_backward(problem: BackwardProblem, device: Device, rows: _RowBlock, builder: _Builder) -> str:
    threads = rows.threads_per_row * rows.rows_per_block
    row_groups = -(-problem.rows // rows.rows_per_block)
    blocks = min(row_groups, device.multiprocessors * max(1, _PERSISTENT_THREADS // threads))
    targets, target_constants = _column_sum_targets(builder, problem, blocks)
    stage_bytes = _stage_bytes(problem, device, rows)
    constants = (
        _dtype_constants(problem)
        | rows.constants
        | {"STAGED": int(stage_bytes > 0)}
        | _vector_constants("WEIGHT", problem.weight, rows.width)
        | {"WANTS_DX": int(problem.dx is not None)}
        | target_constants
    )
    builder.launch(
        "row_block_backward",
        constants,
        blocks,
        rows.block,
        x="x",
        dy="dy",
        weight="weight",
        mean="mean",
        rstd="rstd",
        dx="dx",
        rows=problem.rows,
        columns=problem.columns,
        x_stride=problem.x.row_strides[0],
        dy_stride=problem.dy.row_strides[0],
        dx_stride=problem.dx.row_strides[0] if problem.dx else 0,
        shared_bytes=stage_bytes,
        **targets,
    )
    _launch_column_sums(builder, problem, targets, blocks)
    return "row_block"


# ---- Rows that no block can hold, and rows that are not contiguous.

# 128 threads of two vectors: backward of 32768 x 16384 bfloat16 takes 1.88 of a copy's time on an H200, 256 threads
# 2.77.
_SPLIT_THREADS = 128
# row_split_statistics relies on it: what cancels in a chunk's squared deviation is bounded by its number of tiles.
_TILES_PER_CHUNK = 64


@dataclass(frozen=True)
class _RowSplit:
    """How row_split_* cut a problem: ROW_LANES rows by a tile of columns a block (see kernels/tile.cuh)."""

    width: int
    row_lanes: int
    unroll: int

    @property
    def tile_columns(self) -> int:
        return _SPLIT_THREADS // self.row_lanes * self.width * self.unroll

    @property
    def constants(self) -> dict[str, int | str]:
        return {"THREADS": _SPLIT_THREADS, "VECTOR": self.width, "ROW_LANES": self.row_lanes, "UNROLL": self.unroll}


def _row_split(problem: ForwardProblem | BackwardProblem) -> _RowSplit:
    width = _vector_width(problem)
    across_rows = problem.x.row_strides[-1] == 1 and problem.row_sizes[-1] > 1 and problem.x.column_strides[-1] != 1
    if problem.columns == 1:
        across_rows = True
    row_lanes = min(32, _power_of_two_at_least(problem.row_sizes[-1])) if across_rows else 1
    return _RowSplit(width, row_lanes, unroll=2 if width * DTYPES[problem.x.dtype].itemsize == 16 else 4)


def _split_geometry(problem: ForwardProblem | BackwardProblem, **matrices: Matrix) -> dict[str, Value]:
    arguments: dict[str, Value] = {"row_sizes": problem.row_sizes, "column_sizes": problem.column_sizes}
    for name, matrix in matrices.items():
        arguments |= {f"{name}_row_strides": matrix.row_strides, f"{name}_column_strides": matrix.column_strides}
    return arguments


def _split_constants(problem: ForwardProblem | BackwardProblem, split: _RowSplit) -> dict[str, int | str]:
    dims: dict[str, int | str] = {"ROW_DIMS": len(problem.row_sizes), "COLUMN_DIMS": len(problem.column_sizes)}
    return _dtype_constants(problem) | split.constants | dims


def _chunks(problem: ForwardProblem | BackwardProblem, device: Device, split: _RowSplit) -> dict[str, Value]:
    """How many chunks of columns: enough to fill the device four times over, none of more than 64 tiles."""
    tiles = max(1, -(-problem.columns // split.tile_columns))
    row_blocks = max(1, -(-problem.rows // split.row_lanes))
    wanted = 4 * device.multiprocessors * device.threads_per_multiprocessor // _SPLIT_THREADS
    tiles_per_chunk = max(1, min(_TILES_PER_CHUNK, tiles * row_blocks // wanted))
    return {"splits": -(-tiles // tiles_per_chunk), "columns_per_split": tiles_per_chunk * split.tile_columns}


def _plan_row_split_forward(problem: ForwardProblem, device: Device, builder: _Builder) -> str:
    split = _row_split(problem)
    chunks = _chunks(problem, device, split)
    splits = chunks["splits"]
    assert isinstance(splits, int)
    grid = splits * -(-problem.rows // split.row_lanes)
    sizes: dict[str, Value] = {"rows": problem.rows, "columns": problem.columns}
    constants = _split_constants(problem, split)
    compute_itemsize = _compute_itemsize(problem)

    means = builder.reserve("chunk_means", problem.rows * splits, 8)
    deviations = builder.reserve("chunk_deviations", problem.rows * splits, 8)
    statistics: dict[str, Value] = {"mean": "mean", "rstd": "rstd"}
    if not problem.stats:
        statistics = {name: builder.reserve(f"row_{name}", problem.rows, compute_itemsize) for name in statistics}
    statistics["mean_remainder"] = builder.reserve("mean_remainder", problem.rows, compute_itemsize)

    block = (_SPLIT_THREADS, 1)
    if problem.columns > 0:
        builder.launch(
            "row_split_statistics",
            constants,
            grid,
            block,
            x="x",
            chunk_means=means,
            chunk_deviations=deviations,
            **sizes,
            **chunks,
            **_split_geometry(problem, x=problem.x),
        )
    builder.launch(
        "row_split_merge",
        _dtype_constants(problem) | {"ROWS_PER_BLOCK": 4},
        -(-problem.rows // 4),
        (32, 4),
        chunk_means=means,
        chunk_deviations=deviations,
        **statistics,
        **sizes,
        **(chunks if problem.columns > 0 else {"splits": 0, "columns_per_split": 0}),
        eps=problem.eps,
    )
    if problem.columns > 0:
        builder.launch(
            "row_split_forward",
            constants
            | _vector_constants("WEIGHT", problem.weight, split.width)
            | _vector_constants("BIAS", problem.bias, split.width),
            grid,
            block,
            x="x",
            weight="weight",
            bias="bias",
            y="y",
            **statistics,
            **sizes,
            **chunks,
            **_split_geometry(problem, x=problem.x, y=problem.y),
        )
    return "row_split"


def _plan_row_split_backward(problem: BackwardProblem, device: Device, builder: _Builder) -> str:
    split = _row_split(problem)
    chunks = _chunks(problem, device, split)
    splits = chunks["splits"]
    assert isinstance(splits, int)
    row_blocks = -(-problem.rows // split.row_lanes)
    sizes: dict[str, Value] = {"rows": problem.rows, "columns": problem.columns}
    inputs: dict[str, Value] = {"x": "x", "dy": "dy", "weight": "weight", "mean": "mean", "rstd": "rstd"}
    constants = _split_constants(problem, split) | _vector_constants("WEIGHT", problem.weight, split.width)
    compute_itemsize = _compute_itemsize(problem)
    block = (_SPLIT_THREADS, 1)

    sums: Value = 0
    if problem.dx is not None:
        sums = builder.reserve("sums", 2 * problem.rows, compute_itemsize)
        chunk_sums = builder.reserve("chunk_sums", splits * 2 * problem.rows, compute_itemsize) if splits > 1 else sums
        builder.launch(
            "row_split_gradient_sums",
            constants,
            splits * row_blocks,
            block,
            **inputs,
            sums=chunk_sums,
            **sizes,
            **chunks,
            **_split_geometry(problem, x=problem.x, dy=problem.dy),
        )
        if splits > 1:
            compute = DTYPES[problem.x.dtype].compute
            _launch_sum(builder, problem, chunk_sums, sums, compute, splits, 2 * problem.rows)

    tiles = -(-problem.columns // split.tile_columns)
    # Enough groups of rows to fill the device four times over, but a group not shorter than 8 steps: each costs a row
    # of partial sums.
    wanted = 4 * device.multiprocessors * device.threads_per_multiprocessor // _SPLIT_THREADS
    groups = max(1, min(wanted // max(1, tiles), row_blocks // 8))
    rows_per_group = -(-row_blocks // groups) * split.row_lanes
    groups = -(-problem.rows // rows_per_group)
    targets, target_constants = _column_sum_targets(builder, problem, groups)
    builder.launch(
        "row_split_backward",
        constants | {"WANTS_DX": int(problem.dx is not None)} | target_constants,
        tiles * groups,
        block,
        **inputs,
        sums=sums,
        dx="dx",
        **targets,
        **sizes,
        tiles=tiles,
        rows_per_group=rows_per_group,
        **_split_geometry(problem, x=problem.x, dy=problem.dy, dx=problem.dx or problem.x),
    )
    _launch_column_sums(builder, problem, targets, groups)
    return "row_split"


# ---- The choice.


def _plan_forward(problem: ForwardProblem, device: Device, builder: _Builder) -> str:
    rows = _row_block(problem, _FORWARD_TUNING) if problem.columns > 0 else None
    if rows is not None:
        return _plan_row_block_forward(problem, rows, builder)
    return _plan_row_split_forward(problem, device, builder)


def _plan_backward(problem: BackwardProblem, device: Device, builder: _Builder) -> str:
    if problem.dx is None and problem.dweight is None and problem.dbias is None:
        return "empty"
    if problem.rows == 0 or problem.columns == 0:
        targets, _ = _column_sum_targets(builder, problem, 0)
        _launch_column_sums(builder, problem, targets, 0)
        return "empty"
    long_rows = _is_long_sixteen_bit(problem, device)
    rows = _row_block(problem, _LONG_ROW_BACKWARD_TUNING if long_rows else _BACKWARD_TUNING)
    if rows is not None:
        return _plan_row_block_backward(problem, device, rows, builder)
    return _plan_row_split_backward(problem, device, builder)
