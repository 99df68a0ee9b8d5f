"""dweight and dbias of few rows: added up from x and dy themselves, beside the launch that makes dx."""

from __future__ import annotations

from cunorm.plan.constants import affine_constants, dtype_constants, row_strides, vector_width
from cunorm.plan.launches import Builder, Constants, Device
from cunorm.problem import DTYPES, BackwardProblem

__all__ = ["are_better_apart", "launch_weight_gradients"]

# For each multiprocessor: with more rows blocks take too long to go down them; with more bytes x and dy are better not
# read twice. What lies on both sides, on an H200: bfloat16, 1024 rows of 4096 take 15.2 us so and 17.6 with partial
# sums, of 8192 29.3 and 27.4; 2048 rows of 1024 13.3 and 12.0; float32, 512 rows of 1024 7.8 and 9.6, of 8192 27.8 and
# 23.2. Under the exact gelu, which is then computed three times, 512 rows of 4096 take 17.0 and 17.5, 1024 25.8 and
# 24.2.
_MOST_ROWS, _MOST_ACTIVATED_ROWS = 8, 4
_MOST_BYTES = 192 << 10
_STEPS = 4


def are_better_apart(problem: BackwardProblem, device: Device) -> bool:
    """Whether this is faster than partial sums of every block of rows: where there are few rows.

    On an H200 8 rows of 8192 bfloat16 numbers take 6.2 us so, with partial sums 10.0; 64 of 4096 6.2 and 9.9, 64 of
    32,768 11.9 and 20.4; 512 of 4096 10.8 and 13.8.
    """
    if problem.channels is not None or (problem.dweight is None and problem.dbias is None):
        return False
    most_rows = _MOST_ROWS if problem.norm.activation is None else _MOST_ACTIVATED_ROWS
    read = 2 * problem.rows * problem.columns * DTYPES[problem.x.dtype].itemsize
    return problem.rows <= most_rows * device.multiprocessors and read <= _MOST_BYTES * device.multiprocessors


def launch_weight_gradients(builder: Builder, problem: BackwardProblem, device: Device) -> None:
    width = vector_width(problem)
    column_lanes, row_lanes = _lanes(problem, device, width)
    constants: Constants = {}
    for name, dtype in (("DWEIGHT", problem.dweight), ("DBIAS", problem.dbias)):
        constants |= {f"WANTS_{name}": int(dtype is not None), f"{name}_TYPE": DTYPES[dtype or "float32"].cuda}
    builder.launch(
        "row_weight_gradients",
        dtype_constants(problem)
        | {"VECTOR": width, "COLUMN_LANES": column_lanes, "ROW_LANES": row_lanes, "STEPS": _STEPS}
        | affine_constants(problem, width)
        | constants,
        -(-problem.columns // (column_lanes * width)),
        (column_lanes, row_lanes),
        {
            **{name: name for name in ("x", "dy", "weight", "bias", "mean", "rstd")},
            "dweight": "dweight" if problem.dweight else 0,
            "dbias": "dbias" if problem.dbias else 0,
            "rows": problem.rows,
            "columns": problem.columns,
            **row_strides(x=problem.x, dy=problem.dy),
        },
    )


def _lanes(problem: BackwardProblem, device: Device, width: int) -> tuple[int, int]:
    """Threads of a block along columns and along rows.

    Each row of a block is 64 bytes at least, and up to four times as many where a thread else had fewer than STEPS
    rows: 64 rows of 4096 bfloat16 numbers take 6.6 us with 4 lanes, with 16 6.2; 256 of them 8.2, with 8 lanes 8.4.
    """
    least = min(32, 64 // (width * DTYPES[problem.x.dtype].itemsize))
    threads = 256
    wanted = 1 << max(0, threads * _STEPS // problem.rows).bit_length() - 1 if problem.rows < threads * _STEPS else 1
    lanes = max(least, min(wanted, 4 * least, 32))
    if lanes == least < 32 and problem.columns > device.multiprocessors * lanes * width:
        # More than a block a multiprocessor: 512 rows of 8192 take 17.0 us so, with wider blocks 16.3.
        lanes, threads = 2 * lanes, 2 * threads
    return lanes, threads // lanes
