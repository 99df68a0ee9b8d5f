"""An activation of every number: one launch, and one more that adds up the sums for dbias."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan.cache_hints import is_kept_read_once
from cunorm.plan.column_sums import launch_sum
from cunorm.plan.constants import dtype_constants, vector_constants
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Plan, Value
from cunorm.plan.row_memory import compute_itemsize, vector_width
from cunorm.problem import DTYPES, Matrix, PointwiseBackward, PointwiseForward, PointwiseProblem

__all__ = ["plan"]

# 8192 x 16384 bfloat16 numbers forward take 1.03 of a copy's time on an H200, with 256 threads 1.06; backward 0.98 and
# 1.09.
_THREADS = 128
# Steps that a thread may take at once where vectors are short.
_MOST_STEPS = 8
# With a bias, which a block reads once, it takes this many turns, if there are blocks enough to fill the device as
# often.
_TURNS_WITH_BIAS = 16


@dataclass(frozen=True)
class _Layout:
    """How a problem lies over threads (see kernels/pointwise.cuh). Rows, columns and rest are those of the kernel."""

    run: bool
    width: int
    column_lanes: int
    row_lanes: int
    steps: int
    rows: int
    columns: int
    rest: int

    @property
    def tiles(self) -> int:
        return -(-self.columns // (self.column_lanes * self.width))

    @property
    def turns(self) -> int:
        """How often a block would take one to go down all of its rows."""
        return -(-(self.rows + (self.rest > 0)) // (self.row_lanes * self.steps))

    @property
    def block(self) -> tuple[int, int]:
        return self.column_lanes, self.row_lanes

    def constants(self, problem: PointwiseProblem, device: Device) -> Constants:
        own: Constants = {
            "THREADS": self.column_lanes * self.row_lanes,
            "VECTOR": self.width,
            "ROW_LANES": self.row_lanes,
            "STEPS": self.steps,
            "RUN": int(self.run),
            "MIN_BLOCKS": _min_blocks(problem, self.width),
            "ROW_DIMS": len(problem.row_sizes),
            "ACTIVATION": problem.activation,
            "KEPT_IN_L2": int(is_kept_read_once(problem, device)),
        }
        return dtype_constants(problem) | own | vector_constants("BIAS", problem.bias, self.width)

    def arguments(self, problem: PointwiseProblem, **matrices: Matrix | None) -> dict[str, Value]:
        """Sizes, and the strides of each matrix; zeros for one that is not there."""
        sizes = (self.rows,) if self.run else problem.row_sizes
        arguments: dict[str, Value] = {
            "rows": self.rows,
            "columns": self.columns,
            "rest": self.rest,
            "tiles": self.tiles,
            "row_sizes": sizes,
        }
        for name, matrix in matrices.items():
            strides, column_stride = (0,) * len(sizes), 0
            if matrix is not None:
                strides = (self.columns,) if self.run else matrix.row_strides
                column_stride = matrix.column_strides[0]
            arguments[f"{name}_row_strides"] = strides
            arguments[f"{name}_column_stride"] = column_stride
        return arguments


def _layout(problem: PointwiseProblem, device: Device) -> _Layout:
    layout = _full_layout(problem)
    # Where there are few blocks, as many as there are multiprocessors do more than vectors in flight.
    while layout.steps > 1 and layout.tiles * layout.turns < 2 * device.multiprocessors:
        layout = replace(layout, steps=layout.steps // 2)
    return layout


def _full_layout(problem: PointwiseProblem) -> _Layout:
    itemsize = problem.itemsize
    if _is_run(problem):
        # Only addresses matter: what is left over at the end is finished number by number.
        width = min(matrix.alignment for matrix in problem.matrices) // itemsize
        columns = _THREADS * width
        rows, rest = divmod(problem.columns, columns)
        return _Layout(True, width, _THREADS, 1, _steps(problem, width), rows, columns, rest)
    width = vector_width(problem)
    vectors = -(-problem.columns // width)
    tiles = -(-vectors // _THREADS)
    # Few columns: a power of two of threads and several rows. Many: whole warps, as few as leave no tile over.
    column_lanes = 1 << (vectors - 1).bit_length() if vectors <= 32 else -(-vectors // tiles // 32) * 32
    row_lanes = _THREADS // column_lanes
    return _Layout(False, width, column_lanes, row_lanes, _steps(problem, width), problem.rows, problem.columns, 0)


def _is_run(problem: PointwiseProblem) -> bool:
    """Whether all tensors are one run of memory each, with nothing that goes by columns."""
    return (
        problem.bias is None
        and problem.row_sizes == (1,)
        and all(matrix.column_strides[0] == 1 or problem.columns == 1 for matrix in problem.matrices)
    )


def _steps(problem: PointwiseProblem, width: int) -> int:
    """Steps of a thread: 64 bytes in flight."""
    tensors = 1 if isinstance(problem, PointwiseForward) else 2  # that are read
    return min(_MOST_STEPS, 64 // (tensors * width * problem.itemsize))


def plan(problem: PointwiseProblem, device: Device) -> Plan:
    """The one plan there is for the problem."""
    builder = Builder()
    if isinstance(problem, PointwiseForward):
        return builder.finished(_plan_forward(problem, device, builder))
    return builder.finished(_plan_backward(problem, device, builder))


def _plan_forward(problem: PointwiseForward, device: Device, builder: Builder) -> str:
    if problem.rows * problem.columns == 0:
        return "empty"
    layout = _layout(problem, device)
    groups = layout.turns
    if problem.bias is not None:
        filling = _blocks_at_once(problem, device, layout.width) * _TURNS_WITH_BIAS
        groups = -(-groups // max(1, min(_TURNS_WITH_BIAS, layout.tiles * groups // filling)))
    builder.launch(
        "pointwise_forward",
        layout.constants(problem, device),
        layout.tiles * groups,
        layout.block,
        {
            **{name: name for name in ("x", "bias", "y")},
            "groups": groups,
            **layout.arguments(problem, x=problem.x, y=problem.y),
        },
    )
    return "pointwise"


def _plan_backward(problem: PointwiseBackward, device: Device, builder: Builder) -> str:
    if problem.dx is None and problem.dbias is None:
        return "empty"
    if problem.rows * problem.columns == 0:
        if problem.dbias is not None:
            nothing = builder.reserve("dbias_sums", 0, compute_itemsize(problem))
            launch_sum(builder, problem, [(nothing, "dbias", problem.dbias)], 0, problem.columns)
        return "empty"
    layout = _layout(problem, device)
    groups = layout.turns
    dbias: Value = 0
    dbias_dtype = DTYPES[problem.x.dtype].compute
    if problem.dbias is not None:
        groups = max(1, min(groups, _blocks_at_once(problem, device, layout.width) // layout.tiles))
        if groups == 1:
            dbias, dbias_dtype = "dbias", problem.dbias
        else:
            dbias = builder.reserve("dbias_sums", groups * problem.columns, compute_itemsize(problem))
    gradients: Constants = {
        "WANTS_DX": int(problem.dx is not None),
        "WANTS_DBIAS": int(problem.dbias is not None),
        "DBIAS_TYPE": DTYPES[dbias_dtype].cuda,
    }
    builder.launch(
        "pointwise_backward",
        layout.constants(problem, device) | gradients,
        layout.tiles * groups,
        layout.block,
        {
            **{name: name for name in ("dy", "x", "bias", "dx")},
            "dbias": dbias,
            "groups": groups,
            **layout.arguments(problem, dy=problem.dy, x=problem.x, dx=problem.dx),
        },
    )
    if problem.dbias is not None and groups > 1:
        launch_sum(builder, problem, [(dbias, "dbias", problem.dbias)], groups, problem.columns)
    return "pointwise"


def _min_blocks(problem: PointwiseProblem, width: int) -> int:
    """How many blocks are to share a multiprocessor, which bounds their registers: as many as spill none."""
    itemsize = problem.itemsize
    if itemsize == 8 or len(problem.row_sizes) > 1:
        return 4
    if problem.bias is None and width * itemsize == 16:
        return 8
    return 7 if isinstance(problem, PointwiseForward) else 6


def _blocks_at_once(problem: PointwiseProblem, device: Device, width: int) -> int:
    """How many blocks of a launch run at the same time."""
    return device.multiprocessors * min(_min_blocks(problem, width), device.threads_per_multiprocessor // _THREADS)
