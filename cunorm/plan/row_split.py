"""Rows that no block can hold, and rows that are not contiguous: cut into chunks of columns, in several launches."""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums, launch_sum
from cunorm.plan.constants import affine_constants, compute_itemsize, dtype_constants, vector_width
from cunorm.plan.launches import Builder, Constants, Device, Value
from cunorm.plan.split_merge import launch_merge
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix, Problem

__all__ = ["plan_backward", "plan_forward"]

# row_split_statistics relies on it: what cancels in a chunk's squared deviation is bounded by its number of tiles.
_TILES_PER_CHUNK = 64
# Backward, blocks a multiprocessor that read 16 bytes at a time: they run at once, and have enough under way. Each
# group of rows costs a row of partial sums: 256 rows of 524,288 float16 numbers take 1.82 of a copy's time on an H200,
# with twice as many blocks 1.84, with 16 times as many 2.51; 64 of 1,048,576 float32 numbers 1.77, 1.88 with four times
# as many, 1.94 with 16 times.
_GROUPED_BLOCKS = 4


@dataclass(frozen=True)
class _RowSplit:
    """How row_split_* cut a problem: ROW_LANES rows by a tile of columns a block (see kernels/row_tile.cuh)."""

    width: int
    row_lanes: int
    unroll: int
    threads: int

    @property
    def tile_columns(self) -> int:
        return self.threads // self.row_lanes * self.width * self.unroll

    @property
    def constants(self) -> Constants:
        return {"THREADS": self.threads, "VECTOR": self.width, "ROW_LANES": self.row_lanes, "UNROLL": self.unroll}


def _row_split(problem: Problem) -> _RowSplit:
    width = vector_width(problem)
    across_rows = problem.x.row_strides[-1] == 1 and problem.row_sizes[-1] > 1 and problem.x.column_strides[-1] != 1
    if problem.columns == 1:
        across_rows = True
    row_lanes = min(32, 1 << max(0, problem.row_sizes[-1] - 1).bit_length()) if across_rows else 1
    # Backward of 32768 x 16384 bfloat16 takes 1.88 of a copy's time on an H200 with 128 threads of two vectors, with
    # 256 2.77; of 4 x 10,000,001 float32, number by number, 2.46 and 2.29.
    threads = 256 if width == 1 and row_lanes == 1 else 128
    unroll = 2 if width * problem.itemsize == 16 else 4
    return _RowSplit(width, row_lanes, unroll, threads)


def _geometry(problem: Problem, **matrices: Matrix | None) -> dict[str, Value]:
    """Sizes, and the strides of each matrix; zeros for one that is not there."""
    arguments: dict[str, Value] = {"row_sizes": problem.row_sizes, "column_sizes": problem.column_sizes}
    for name, matrix in matrices.items():
        arguments[f"{name}_row_strides"] = matrix.row_strides if matrix else (0,) * len(problem.row_sizes)
        arguments[f"{name}_column_strides"] = matrix.column_strides if matrix else (0,) * len(problem.column_sizes)
    return arguments


def _split_constants(problem: Problem, split: _RowSplit) -> Constants:
    dims: Constants = {"ROW_DIMS": len(problem.row_sizes), "COLUMN_DIMS": len(problem.column_sizes)}
    return dtype_constants(problem) | split.constants | dims | affine_constants(problem, split.width)


def _chunks(problem: Problem, device: Device, split: _RowSplit) -> tuple[int, int]:
    """How many chunks of columns, and of how many each: to fill the device four times, but of at most 64 tiles."""
    tiles = max(1, -(-problem.columns // split.tile_columns))
    row_blocks = max(1, -(-problem.rows // split.row_lanes))
    wanted = 4 * device.multiprocessors * device.threads_per_multiprocessor // split.threads
    tiles_per_chunk = max(1, min(_TILES_PER_CHUNK, tiles * row_blocks // wanted))
    return -(-tiles // tiles_per_chunk), tiles_per_chunk * split.tile_columns


def plan_forward(problem: ForwardProblem, device: Device, builder: Builder) -> str:
    split = _row_split(problem)
    splits, columns_per_split = _chunks(problem, device, split)
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
    statistics: dict[str, Value] = {"mean": "mean", "rstd": "rstd"}
    if not problem.stats:
        statistics["rstd"] = builder.reserve("row_rstd", problem.rows, itemsize)
    if not (problem.stats and problem.norm.centered):
        statistics["mean"] = builder.reserve("row_mean", problem.rows, itemsize)
    statistics["mean_remainder"] = builder.reserve("mean_remainder", problem.rows, itemsize)

    block = (split.threads, 1)
    if problem.columns > 0:
        builder.launch(
            "row_split_statistics",
            constants | {"HAS_RESIDUAL": int(problem.residual is not None), "ONE_CHUNK": int(one_chunk)},
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
    if not one_chunk:
        merged = splits if problem.columns > 0 else 0
        launch_merge(builder, problem, chunk_statistics, statistics, merged, columns_per_split)
    if problem.columns > 0:
        builder.launch(
            "row_split_forward",
            constants,
            grid,
            block,
            {
                "x": "x" if problem.residual_out is None else "residual_out",
                "weight": "weight",
                "bias": "bias",
                "y": "y",
                **statistics,
                **sizes,
                **chunks,
                **_geometry(problem, x=problem.residual_out or problem.x, y=problem.y),
            },
        )
    return "row_split"


def plan_backward(problem: BackwardProblem, device: Device, builder: Builder) -> str:
    split = _row_split(problem)
    splits, columns_per_split = _chunks(problem, device, split)
    row_blocks = -(-problem.rows // split.row_lanes)
    sizes: dict[str, Value] = {"rows": problem.rows, "columns": problem.columns}
    inputs: dict[str, Value] = {name: name for name in ("x", "dy", "weight", "bias", "mean", "rstd")}
    constants = _split_constants(problem, split)
    itemsize = compute_itemsize(problem)
    block = (split.threads, 1)

    sums: Value = 0
    if problem.dx is not None:
        sums = builder.reserve("sums", 2 * problem.rows, itemsize)
        chunk_sums = builder.reserve("chunk_sums", splits * 2 * problem.rows, itemsize) if splits > 1 else sums
        builder.launch(
            "row_split_gradient_sums",
            constants,
            splits * row_blocks,
            block,
            {
                **inputs,
                "sums": chunk_sums,
                **sizes,
                "splits": splits,
                "columns_per_split": columns_per_split,
                **_geometry(problem, x=problem.x, dy=problem.dy),
            },
        )
        if splits > 1:
            compute = DTYPES[problem.x.dtype].compute
            launch_sum(builder, problem, [(chunk_sums, sums, compute)], splits, 2 * problem.rows)

    tiles = -(-problem.columns // split.tile_columns)
    # Enough groups of rows to fill the device, four times over where a thread has little under way; but a group not
    # shorter than 8 steps.
    whole = split.row_lanes == 1 and split.width * problem.itemsize == 16
    filling = 4 * device.threads_per_multiprocessor // split.threads
    wanted = device.multiprocessors * (_GROUPED_BLOCKS if whole else filling)
    groups = max(1, min(wanted // max(1, tiles), row_blocks // 8))
    rows_per_group = -(-row_blocks // groups) * split.row_lanes
    groups = -(-problem.rows // rows_per_group)
    targets, target_constants = column_sum_targets(builder, problem, groups)
    wants: Constants = {
        "WANTS_DX": int(problem.dx is not None),
        "HAS_DRESIDUAL": int(problem.dresidual_out is not None),
    }
    builder.launch(
        "row_split_backward",
        constants | wants | target_constants,
        tiles * groups,
        block,
        {
            **inputs,
            "dresidual_out": "dresidual_out",
            "sums": sums,
            "dx": "dx",
            **targets,
            **sizes,
            "tiles": tiles,
            "rows_per_group": rows_per_group,
            **_geometry(
                problem, x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out, dx=problem.dx or problem.x
            ),
        },
    )
    launch_column_sums(builder, problem, targets, groups)
    return "row_split"
