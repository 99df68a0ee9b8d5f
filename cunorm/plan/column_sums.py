"""The sums over rows that make dweight and dbias: partial ones in the kernel before, then one launch adds them up."""

from __future__ import annotations

from collections.abc import Sequence

from cunorm.plan.constants import compute_constants, compute_itemsize
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.problem import DTYPES, AnyProblem, BackwardProblem, ChannelBackward

__all__ = ["column_sum_targets", "launch_column_sums", "launch_sum"]

_THREADS = 512


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
    # Few partial rows leave nothing to share between threads.
    row_threads = 1 if rows <= 8 else 16
    builder.launch(
        "column_sums",
        compute_constants(problem)
        | {
            "SUM_TYPE": DTYPES[dtype].cuda,
            "SECOND_SUM_TYPE": DTYPES[second_dtype].cuda,
            "COLUMN_THREADS": _THREADS // row_threads,
            "ROW_THREADS": row_threads,
        },
        -(-columns * len(matrices) * row_threads // _THREADS),
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
