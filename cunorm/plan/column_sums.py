"""The sums over rows that make dweight and dbias: partial ones in the kernel before, then one launch adds them up."""

from __future__ import annotations

from collections.abc import Sequence

from cunorm.plan.constants import compute_constants
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import compute_itemsize
from cunorm.problem import DTYPES, AnyProblem, BackwardProblem, ChannelBackward

__all__ = ["column_sum_targets", "cost_of_column_sums", "launch_column_sums", "launch_sum"]

_THREADS = 512
# Up to so many partial rows leave nothing to share between threads.
_FEW_ROWS = 8
# Of more columns 16 threads share a sum, else 32. On an H100 backward of 4096 rows of 768 bfloat16 numbers, 1536 sums
# of 396, takes 16.2 us so, by 16 16.9, and 2048 of 4096 28.1 and 28.6; but of 8192 49.3 and 48.7.
_MANY_COLUMNS = 8192
# What it takes to add up the sums of groups of blocks: a launch, and so many times what moving their bytes would take.
# Fitted to 400 times of 130 layer norms of 1 to 200 rows, on an H200.
_LAUNCH, _TIMES_MOVED = 1.0, 3.0
# Partial rows that a thread asks for at once: of few sizes, each of which is a kernel to compile.
_AT_ONCE = (2, 4, 8, 10, 14)


def _gradient_length(problem: BackwardProblem | ChannelBackward) -> int:
    """How many numbers dweight has, and dbias."""
    if isinstance(problem, ChannelBackward):
        return problem.channels
    channels = problem.channels
    return problem.columns if channels is None else channels.rows_per_sample * channels.channels_per_row


def column_sum_targets(
    builder: Builder, problem: BackwardProblem | ChannelBackward, count: int
) -> tuple[dict[str, Value], Constants]:
    """Where a kernel writes ``count`` rows of sums for dweight and dbias: arguments, and constants for their types.

    More than one row, or none, is scratch that `launch_column_sums` will add up; one row is the result itself.
    """
    arguments: dict[str, Value] = {}
    constants: Constants = {}
    for name, dtype in (("dweight", problem.dweight), ("dbias", problem.dbias)):
        arguments[name], sum_dtype = 0, DTYPES[problem.x.dtype].compute
        if dtype is not None and count == 1:
            arguments[name], sum_dtype = name, dtype
        elif dtype is not None:
            arguments[name] = builder.reserve(
                f"{name}_sums", count * _gradient_length(problem), compute_itemsize(problem)
            )
        constants |= {f"WANTS_{name.upper()}": int(dtype is not None), f"{name.upper()}_TYPE": DTYPES[sum_dtype].cuda}
    return arguments, constants


def cost_of_column_sums(problem: AnyProblem, count: int, device: Device) -> float:
    """The expected microseconds until ``count`` rows of sums of columns are one."""
    if not isinstance(problem, BackwardProblem) or not problem.sums or count == 1:
        return 0.0
    sums_bytes = count * problem.columns * len(problem.sums) * compute_itemsize(problem)
    return _LAUNCH + _TIMES_MOVED * sums_bytes / (device.memory_rate * device.multiprocessors)


def launch_column_sums(
    builder: Builder, problem: BackwardProblem | ChannelBackward, targets: dict[str, Value], count: int
) -> None:
    """Add up what a kernel wrote to the ``targets``."""
    matrices = [(targets[name], name, dtype) for name, dtype in problem.sums.items()]
    if matrices and count != 1:
        launch_sum(builder, problem, matrices, count, _gradient_length(problem))


def launch_sum(
    builder: Builder, problem: AnyProblem, matrices: Sequence[tuple[Value, Value, str]], rows: int, columns: int
) -> None:
    """Add up one or two matrices of partial sums: (partial sums, sums, the sums' dtype) for each."""
    first, *second = matrices
    partials, sums, dtype = first
    second_partials, second_sums, second_dtype = second[0] if second else (0, 0, dtype)
    all_columns = columns * len(matrices)
    row_threads = 1 if rows <= _FEW_ROWS else 16 if all_columns > _MANY_COLUMNS else 32
    of_thread = -(-rows // row_threads)
    builder.launch(
        "column_sums",
        compute_constants(problem)
        | {
            "SUM_TYPE": DTYPES[dtype].cuda,
            "SECOND_SUM_TYPE": DTYPES[second_dtype].cuda,
            "COLUMN_THREADS": _THREADS // row_threads,
            "ROW_THREADS": row_threads,
            "AT_ONCE": next((count for count in _AT_ONCE if count >= of_thread), _AT_ONCE[-1]),
        },
        -(-all_columns * row_threads // _THREADS),
        (_THREADS // row_threads, row_threads),
        {
            "partials": partials,
            "second_partials": second_partials,
            "sums": sums,
            "second_sums": second_sums,
            "rows": rows,
            "columns": columns,
            "second_columns": columns if len(matrices) > 1 else 0,
        },
    )
