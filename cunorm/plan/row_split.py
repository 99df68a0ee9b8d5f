"""Rows that no block can hold, and rows that are not contiguous: cut into chunks of columns, in several launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums, launch_sum
from cunorm.plan.constants import affine_constants, dtype_constants
from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import are_rows, compute_itemsize, lie_alike, vector_width
from cunorm.plan.split_merge import launch_merge
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Problem

__all__ = ["is_better", "plan"]

# row_split_statistics relies on it: what cancels in a chunk's squared deviation is bounded by its number of tiles.
_TILES_PER_CHUNK = 64
# Backward, blocks a multiprocessor that read 16 bytes at a time: they run at once, and have enough under way. Each
# group of rows costs a row of partial sums: 256 rows of 524,288 float16 numbers take 1.82 of a copy's time on an H200,
# with twice as many blocks 1.84, with 16 times as many 2.51; 64 of 1,048,576 float32 numbers 1.77, 1.88 with four times
# as many, 1.94 with 16 times.
_GROUPED_BLOCKS = 4
# Few rows: threads of a block, vectors of each, and how many chunks a block may merge, or add up.
_FEW_THREADS, _FEW_UNROLL = 256, (4, 2, 1)
_MOST_MERGED_CHUNKS, _MOST_MERGED_NUMBERS = 256, 1 << 12
# Of so many blocks for each multiprocessor, forward and backward: 8 rows of 400,000 float32 numbers, which are six of
# them, take 36 us backward so, and 33 in smaller tiles. And rows of a group, whose number is a constant.
_MOST_MERGING_BLOCKS, _MOST_ADDING_BLOCKS, _MERGED_ROWS = 8, 4, (8, 32)
# Registers of a thread that goes number by number: it can do with so few, before sm_100.
_FEW_REGISTERS = 80
# Shorter rows that begin anywhere are too few vectors to be peeled.
_LEAST_VECTORS_OF_PEELED = 64
# Few rows that begin anywhere had better be read twice than be held by clusters, or by all blocks together; the numbers
# are of an H200, of the time that the better of those takes. Forward, by the bytes of a number: how many there may be,
# and of how many bytes each and all. 1 to 16 of 40 KB to 1 MB of 16-bit numbers take 0.61 to 1.08, 1 to 6 of 200 KB to
# 1 MB of float32 0.83 to 1.14, but RMS norm of 2 of 200 and 560 KB 1.22 and 1.15. Under an activation they take 0.80 to
# 0.95 of the time, with a residual 0.86 to 0.95.
_MOST_ROWS_FORWARD = {2: 16, 4: 6}
_BYTES_FORWARD, _MOST_BYTES_FORWARD = {2: (40 << 10, 4 << 20), 4: (190 << 10, 2 << 20)}, {2: 12 << 20, 4: 6 << 20}
# Backward: at most so many rows, of so many bytes. 1 to 6 of 40 to 700 KB of 16-bit numbers take 0.72 to 1.07, 8 of 300
# to 800 KB 0.87 to 0.99, 1 to 4 of 40 KB to 1 MB of float32 0.69 to 1.03, under an activation 2 0.82 to 0.94.
_BACKWARD = {2: [(6, 40 << 10, 800 << 10), (8, 256 << 10, 800 << 10)], 4: [(4, 40 << 10, 1 << 20)]}


@dataclass(frozen=True)
class _RowSplit:
    """How row_split_* cut a problem: ROW_LANES rows by a tile of columns a block (see kernels/row_tile.cuh)."""

    width: int
    row_lanes: int
    unroll: int
    threads: int
    peeled: bool = False

    @property
    def tile_columns(self) -> int:
        return self.threads // self.row_lanes * self.width * self.unroll

    @property
    def constants(self) -> Constants:
        own: Constants = {"THREADS": self.threads, "VECTOR": self.width, "ROW_LANES": self.row_lanes}
        return own | {"UNROLL": self.unroll, "PEELED": int(self.peeled)}


def _row_split(problem: Problem, peels: bool) -> _RowSplit:
    width, piece = vector_width(problem), 16 // problem.itemsize
    long = problem.columns >= _LEAST_VECTORS_OF_PEELED * piece
    if peels and long and width < piece and are_rows(problem) and lie_alike(problem):
        return _RowSplit(piece, 1, 2, 128, True)
    across_rows = problem.row_sizes[-1] > 1 and _lie_across(problem)
    row_lanes = min(32, 1 << max(0, problem.row_sizes[-1] - 1).bit_length()) if across_rows else 1
    # Backward of 32768 x 16384 bfloat16 takes 1.88 of a copy's time on an H200 with 128 threads of two vectors, with
    # 256 2.77; of 4 x 10,000,001 float32, number by number, 2.46 and 2.29.
    threads = 256 if width == 1 and row_lanes == 1 else 128
    unroll = 2 if width * problem.itemsize == 16 else 4
    return _RowSplit(width, row_lanes, unroll, threads)


def is_better(problem: Problem, device: Device) -> bool:
    """Whether few rows had better be read twice than be held by a cluster, or by all blocks together."""
    itemsize, row_bytes = problem.itemsize, problem.columns * problem.itemsize
    # Others were not timed.
    if device.capability != 90 or itemsize > 4 or problem.channels is not None or not are_rows(problem):
        return False
    # Whole vectors had better not be; and what lies otherwise in each tensor would be read number by number.
    if vector_width(problem) * itemsize == 16 or not lie_alike(problem):
        return False
    if isinstance(problem, ForwardProblem):
        few = problem.rows <= _MOST_ROWS_FORWARD[itemsize] and (itemsize == 2 or problem.norm.centered)
        least, most = _BYTES_FORWARD[itemsize]
        return few and least <= row_bytes <= most and problem.rows * row_bytes <= _MOST_BYTES_FORWARD[itemsize]
    if problem.dx is None or not problem.sums:
        return False
    return any(problem.rows <= few and least <= row_bytes <= most for few, least, most in _BACKWARD[itemsize])


def _lie_across(problem: Problem) -> bool:
    """Whether neighbours in memory are of neighbouring rows."""
    return problem.columns == 1 or (problem.x.row_strides[-1] == 1 and problem.x.column_strides[-1] != 1)


def _for_few(split: _RowSplit, problem: Problem, device: Device, most_blocks: int) -> tuple[_RowSplit, int]:
    """Larger tiles for few rows, each a chunk, and how many of them a row has; 0 where there are too many to merge.

    A tile is as large as leaves every multiprocessor two blocks.
    """
    if split.row_lanes > 1 or split.width * problem.itemsize < 16 or problem.columns == 0:
        return split, 0
    for unroll in _FEW_UNROLL:
        large = replace(split, threads=_FEW_THREADS, unroll=unroll)
        splits = -(-problem.columns // large.tile_columns)
        if problem.rows * splits >= 2 * device.multiprocessors or unroll == 1:
            break
    many = problem.rows * splits > most_blocks * device.multiprocessors
    return large, 0 if many or splits > _MOST_MERGED_CHUNKS else splits


def _geometry(problem: Problem, **matrices: Matrix | None) -> dict[str, Value]:
    """Sizes, and the strides of each matrix; zeros for one that is not there."""
    arguments: dict[str, Value] = {"row_sizes": problem.row_sizes, "column_sizes": problem.column_sizes}
    for name, matrix in matrices.items():
        arguments[f"{name}_row_strides"] = matrix.row_strides if matrix else (0,) * len(problem.row_sizes)
        arguments[f"{name}_column_strides"] = matrix.column_strides if matrix else (0,) * len(problem.column_sizes)
    return arguments


def _tile_constants(problem: Problem, split: _RowSplit) -> Constants:
    dims: Constants = {"ROW_DIMS": len(problem.row_sizes), "COLUMN_DIMS": len(problem.column_sizes)}
    return dtype_constants(problem) | split.constants | dims


def _split_constants(problem: Problem, split: _RowSplit) -> Constants:
    return _tile_constants(problem, split) | affine_constants(problem, split.width)


def _chunks(problem: Problem, device: Device, split: _RowSplit) -> tuple[int, int]:
    """How many chunks of columns, and of how many each: to fill the device four times, but of at most 64 tiles."""
    tiles = max(1, -(-problem.columns // split.tile_columns))
    row_blocks = max(1, -(-problem.rows // split.row_lanes))
    wanted = 4 * device.multiprocessors * device.threads_per_multiprocessor // split.threads
    tiles_per_chunk = max(1, min(_TILES_PER_CHUNK, tiles * row_blocks // wanted))
    return -(-tiles // tiles_per_chunk), tiles_per_chunk * split.tile_columns


def plan(problem: Problem, device: Device, builder: Builder) -> str:
    """Write down the launches; the name of the strategy."""
    if isinstance(problem, ForwardProblem):
        _plan_forward(problem, device, builder)
    else:
        _plan_backward(problem, device, builder)
    return "row_split"


def _plan_forward(problem: ForwardProblem, device: Device, builder: Builder) -> None:
    split = _row_split(problem, peels=True)
    splits, columns_per_split = _chunks(problem, device, split)
    large, few = _for_few(split, problem, device, _MOST_MERGING_BLOCKS)
    merges = few > 1
    if few:
        split, splits, columns_per_split = large, few, large.tile_columns
    grid = splits * -(-problem.rows // split.row_lanes)
    sizes: dict[str, Value] = {"rows": problem.rows, "columns": problem.columns}
    chunks: dict[str, Value] = {"splits": splits, "columns_per_split": columns_per_split}
    constants = _split_constants(problem, split)
    itemsize = compute_itemsize(problem)

    # A row that is one chunk has its statistics at once; a row of no columns has none but what merging nothing gives.
    one_chunk = splits == 1 and problem.columns > 0
    chunk_statistics: dict[str, Value] = {"chunk_means": 0, "chunk_deviations": 0}
    if not one_chunk:
        chunk_statistics = {name: builder.reserve(name, problem.rows * splits, 8) for name in chunk_statistics}
    statistics: dict[str, Value] = {"mean": "mean", "mean_remainder": 0, "rstd": "rstd"}
    if not (problem.stats and problem.norm.centered):
        statistics["mean"] = 0 if merges else builder.reserve("row_mean", problem.rows, itemsize)
    if not problem.stats:
        statistics["rstd"] = 0 if merges else builder.reserve("row_rstd", problem.rows, itemsize)
    if not merges:
        statistics["mean_remainder"] = builder.reserve("mean_remainder", problem.rows, itemsize)

    block = (split.threads, 1)
    if problem.columns > 0:
        builder.launch(
            "row_split_statistics",
            _tile_constants(problem, split)
            | {
                "CENTERED": int(problem.norm.centered),
                "HAS_RESIDUAL": int(problem.residual is not None),
                "ONE_CHUNK": int(one_chunk),
            },
            grid,
            block,
            {
                "x": "x",
                "residual": "residual",
                "residual_out": "residual_out",
                **chunk_statistics,
                **(statistics if one_chunk else dict.fromkeys(statistics, 0)),
                **sizes,
                **chunks,
                **_geometry(problem, x=problem.x, residual=problem.residual, residual_out=problem.residual_out),
                "eps": problem.eps,
            },
        )
    if not (one_chunk or merges):
        merged = splits if problem.columns > 0 else 0
        launch_merge(builder, problem, chunk_statistics, statistics, merged, columns_per_split)
    if problem.columns > 0:
        builder.launch(
            "row_split_forward",
            constants | {"MERGES": int(merges), "X_IS_WRITTEN": int(problem.residual is not None)},
            grid,
            block,
            {
                "x": "x" if problem.residual_out is None else "residual_out",
                "weight": "weight",
                "bias": "bias",
                "y": "y",
                **(chunk_statistics if merges else dict.fromkeys(chunk_statistics, 0)),
                **statistics,
                **sizes,
                **chunks,
                **_geometry(problem, x=problem.residual_out or problem.x, y=problem.y),
                "eps": problem.eps,
            },
        )


def _plan_backward(problem: BackwardProblem, device: Device, builder: Builder) -> None:
    split = _row_split(problem, peels=False)
    row_blocks = -(-problem.rows // split.row_lanes)
    tiles = -(-problem.columns // split.tile_columns)
    # Enough groups of rows to fill the device, four times over where a thread has little under way; but a group not
    # shorter than 8 steps.
    whole = split.row_lanes == 1 and split.width * problem.itemsize == 16
    filling = 4 * device.threads_per_multiprocessor // split.threads
    wanted = device.multiprocessors * (_GROUPED_BLOCKS if whole else filling)
    groups = max(1, min(wanted // max(1, tiles), row_blocks // 8))
    rows_per_group = -(-row_blocks // groups) * split.row_lanes
    groups = -(-problem.rows // rows_per_group)

    sizes: dict[str, Value] = {"rows": problem.rows, "columns": problem.columns}
    inputs: dict[str, Value] = {name: name for name in ("x", "dy", "weight", "bias", "mean", "rstd")}
    sums, splits, merged_rows = _plan_sums(problem, device, rows_per_group, inputs, builder)
    targets, target_constants = column_sum_targets(builder, problem, groups)
    wants: Constants = {
        "WANTS_DX": int(problem.dx is not None),
        "HAS_DRESIDUAL": int(problem.dresidual_out is not None),
        "MERGED_ROWS": merged_rows,
        "MIN_BLOCKS": _blocks_at_once(problem, tiles * groups, split, device) if merged_rows else 1,
    }
    builder.launch(
        "row_split_backward",
        _split_constants(problem, split) | wants | target_constants,
        tiles * groups,
        (split.threads, 1),
        {
            **inputs,
            "dresidual_out": "dresidual_out",
            "sums": sums,
            "dx": "dx",
            **targets,
            **sizes,
            "splits": splits,
            "tiles": tiles,
            "rows_per_group": rows_per_group,
            **_geometry(
                problem, x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out, dx=problem.dx or problem.x
            ),
        },
    )
    launch_column_sums(builder, problem, targets, groups)


def _blocks_at_once(problem: BackwardProblem, blocks: int, split: _RowSplit, device: Device) -> int:
    """For how many on a multiprocessor the compiler is to leave registers: for all of them, if that costs no spills.

    391 blocks for 4 rows of 400,001 float32 numbers would take 88 registers a thread: of an H200's 132 multiprocessors
    each would run two of them, and most then a third.
    """
    each = -(-blocks // device.multiprocessors)
    fit = each * split.threads * _FEW_REGISTERS <= REGISTERS
    return each if fit and split.width == 1 and problem.itemsize <= 4 and device.capability <= 90 else 1


def _plan_sums(
    problem: BackwardProblem, device: Device, rows_per_group: int, inputs: dict[str, Value], builder: Builder
) -> tuple[Value, int, int]:
    """The launches that leave the sums along rows which dx needs; of how many chunks, and for how many rows of a group.

    Those of several chunks are left to row_split_backward, where these are few.
    """
    if problem.dx is None:
        return 0, 1, 0
    split = _row_split(problem, peels=True)
    splits, columns_per_split = _chunks(problem, device, split)
    large, few = _for_few(split, problem, device, _MOST_ADDING_BLOCKS)
    merged_rows = next((rows for rows in _MERGED_ROWS if rows >= rows_per_group), 0)
    merges = few > 1 and merged_rows > 0 and 2 * rows_per_group * few <= _MOST_MERGED_NUMBERS
    if merges:
        split, splits, columns_per_split = large, few, large.tile_columns
    itemsize = compute_itemsize(problem)
    sums = 0 if merges else builder.reserve("sums", 2 * problem.rows, itemsize)
    chunk_sums = builder.reserve("chunk_sums", splits * 2 * problem.rows, itemsize) if splits > 1 else sums
    builder.launch(
        "row_split_gradient_sums",
        _split_constants(problem, split),
        splits * -(-problem.rows // split.row_lanes),
        (split.threads, 1),
        {
            **inputs,
            "sums": chunk_sums,
            "rows": problem.rows,
            "columns": problem.columns,
            "splits": splits,
            "columns_per_split": columns_per_split,
            **_geometry(problem, x=problem.x, dy=problem.dy),
        },
    )
    if merges:
        return chunk_sums, splits, merged_rows
    if splits > 1:
        compute = DTYPES[problem.x.dtype].compute
        launch_sum(builder, problem, [(chunk_sums, sums, compute)], splits, 2 * problem.rows)
    return sums, 1, 0
