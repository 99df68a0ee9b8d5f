"""dweight and dbias of few rows: added up from x and dy themselves, beside the launch that makes dx."""

from __future__ import annotations

from cunorm.plan.constants import affine_constants, dtype_constants, gradient_constants, row_strides
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder
from cunorm.plan.row_memory import vector_width
from cunorm.problem import BackwardProblem

__all__ = ["are_better_apart", "launch"]

# For each multiprocessor: with more rows blocks take too long to go down them; with more bytes x and dy are better not
# read twice, the sooner where there is one sum instead of two. What lies on both sides, on an H200: bfloat16 layer
# norm, 1024 rows of 4096 take 15.5 us so and 17.7 with partial sums, of 8192 29.3 and 27.4; 2048 rows of 1024 13.3 and
# 12.0; RMS norm, 512 rows of 4096 11.4 and 12.1, 1024 16.8 and 15.7. Under the exact gelu, which is then computed three
# times, 256 rows of 4096 take 11.3 and 15.3, 512 18.3 and 17.4.
_MOST_ROWS, _MOST_ACTIVATED_ROWS = 8, 3
_MOST_BYTES, _MOST_BYTES_OF_ONE_SUM = 192 << 10, 120 << 10
_STEPS = 4


def are_better_apart(problem: BackwardProblem, device: Device) -> bool:
    """Whether this is faster than partial sums of every block of rows: where there are few rows.

    On an H200 8 rows of 8192 bfloat16 numbers take 6.3 us so, with partial sums 9.8; 64 of 4096 6.2 and 9.9, 64 of
    32,768 12.2 and 20.0; 512 of 4096 10.9 and 14.0.
    """
    if problem.channels is not None or not problem.sums:
        return False
    row_bytes = problem.columns * problem.itemsize
    if problem.rows > max(row_bytes, device.multiprocessors):
        # Few blocks with long ways: 1024 rows of 128 take 8.6 us, with partial sums 7.3, 512 of 256 6.8 and 7.4.
        return False
    most_rows = _MOST_ROWS if problem.norm.activation is None else _MOST_ACTIVATED_ROWS
    most_bytes = _MOST_BYTES if len(problem.sums) > 1 else _MOST_BYTES_OF_ONE_SUM
    few_rows = problem.rows <= most_rows * device.multiprocessors
    return few_rows and 2 * problem.rows * row_bytes <= most_bytes * device.multiprocessors


def launch(builder: Builder, problem: BackwardProblem, device: Device) -> None:
    width = vector_width(problem)
    column_lanes, row_lanes = _lanes(problem, device, width)
    builder.launch(
        "row_weight_gradients",
        dtype_constants(problem)
        | {"VECTOR": width, "COLUMN_LANES": column_lanes, "ROW_LANES": row_lanes, "STEPS": _STEPS}
        | affine_constants(problem, width)
        | gradient_constants(dweight=problem.dweight, dbias=problem.dbias),
        -(-problem.columns // (column_lanes * width)),
        (column_lanes, row_lanes),
        {
            **{name: name for name in ("x", "dy", "weight", "bias", "mean", "rstd")},
            **{name: name if name in problem.sums else 0 for name in ("dweight", "dbias")},
            "rows": problem.rows,
            "columns": problem.columns,
            **row_strides(x=problem.x, dy=problem.dy),
        },
    )


def _lanes(problem: BackwardProblem, device: Device, width: int) -> tuple[int, int]:
    """Threads of a block along columns and along rows.

    Each row of a block is 64 bytes, or twice as many where a thread else had fewer than STEPS rows: 64 rows of 4096
    bfloat16 numbers take 6.4 us with 4 lanes, with 8 6.2, 256 of them 8.2 and 8.4. Blocks are twice as wide where there
    are more of them than multiprocessors, with as many rows of threads if these have STEPS rows each: 64 rows of 16,384
    take 8.5 us with 16 lanes of 16, with 8 of 32 9.6 and with 16 of 32 9.4, but 512 of 8192 16.3 with 8 of 64, with 4
    of 64 17.0 and with 8 of 32 18.8.
    """
    least, threads = min(32, 64 // (width * problem.itemsize)), 256
    lanes = least if problem.rows * least >= threads * _STEPS else min(32, 2 * least)
    if problem.columns // (lanes * width) > device.multiprocessors and lanes < 32:
        lanes *= 2
        threads *= 2 if problem.rows * lanes >= 2 * threads * _STEPS else 1
    return lanes, threads // lanes
