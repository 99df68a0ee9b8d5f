"""What the kernels of every family are told of a problem: compile-time constants, and arguments for its rows."""

from __future__ import annotations

from cunorm.plan.launches import Constants, Value
from cunorm.plan.row_memory import are_shifted
from cunorm.problem import DTYPES, AnyProblem, Matrix, Problem, Vector

__all__ = [
    "affine_constants",
    "channel_numbers",
    "compute_constants",
    "dtype_constants",
    "gradient_constants",
    "row_strides",
    "segment_numbers",
    "shift_constants",
    "vector_constants",
]


def shift_constants(problem: Problem, **matrices: Matrix | None) -> Constants:
    """How many elements the rows of what is read begin behind a multiple of 16 bytes, where they `are_shifted`."""
    shifted, itemsize = are_shifted(problem), problem.itemsize
    shifts: Constants = {
        f"{name.upper()}_SHIFT": matrix.offset // itemsize if shifted and matrix else 0
        for name, matrix in matrices.items()
    }
    return {"SHIFTED": int(shifted)} | shifts


def compute_constants(problem: AnyProblem) -> Constants:
    """What a kernel asks that has no tensor of x's dtype."""
    return {"COMPUTE_TYPE": DTYPES[DTYPES[problem.x.dtype].compute].cuda}


def dtype_constants(problem: AnyProblem) -> Constants:
    return {"X_TYPE": DTYPES[problem.x.dtype].cuda} | compute_constants(problem)


def affine_constants(problem: Problem, width: int) -> Constants:
    """What a kernel is to compute besides the statistics; ``width`` weights or biases are loaded at once."""
    norm = problem.norm
    # An offset without a weight is refused by the checks of the ops.
    offset = f"{norm.weight_offset!r}" if norm.weight_offset else 0
    constants: Constants = {"CENTERED": int(norm.centered), "ACTIVATION": norm.activation or "none"}
    constants["WEIGHT_OFFSET"] = offset
    vectors = vector_constants("WEIGHT", problem.weight, width) | vector_constants("BIAS", problem.bias, width)
    return constants | vectors


def gradient_constants(**sums: str | None) -> Constants:
    """Which of dweight and dbias a kernel is to write, and of which type."""
    constants: Constants = {}
    for name, dtype in sums.items():
        constants[f"WANTS_{name.upper()}"] = int(dtype is not None)
        constants[f"{name.upper()}_TYPE"] = DTYPES[dtype or "float32"].cuda
    return constants


def row_strides(**matrices: Matrix | None) -> dict[str, Value]:
    """The arguments for how far the rows of each matrix lie apart; 0 for one that is not there."""
    return {f"{name}_stride": matrix.row_strides[0] if matrix else 0 for name, matrix in matrices.items()}


def vector_constants(name: str, vector: Vector | None, width: int) -> Constants:
    """Constants for the weight or bias: its type, and the bytes of one access to ``width`` of its elements."""
    if vector is None:
        return {f"HAS_{name}": 0, f"{name}_TYPE": "float", f"{name}_ACCESS": 4}
    dtype = DTYPES[vector.dtype]
    access = max(dtype.itemsize, min(16, width * dtype.itemsize, vector.alignment))
    return {f"HAS_{name}": 1, f"{name}_TYPE": dtype.cuda, f"{name}_ACCESS": access}


def channel_numbers(problem: Problem) -> tuple[int, ...]:
    """What the kernels are told of the channels that a row has; nothing where they need not know.

    Rows are divided by those of a sample, columns by positions (see kernels/row_channels.cuh).
    """
    channels = problem.channels
    if channels is None or not problem.is_by_channel:
        return ()
    divisors = channels.rows_per_sample, channels.positions
    return divisors[0], channels.channels_per_row, divisors[1], *map(_reciprocal, divisors)


def segment_numbers(problem: Problem) -> tuple[int, ...]:
    """What the kernels are told of the segments of rows, if there are any (see kernels/row_segments.cuh)."""
    if len(problem.column_sizes) == 1:
        return ()
    return problem.x.column_strides[0] - problem.column_sizes[1], _reciprocal(problem.column_sizes[1])


def _reciprocal(divisor: int) -> int:
    """A factor, and above its 32 bits a shift: for numbers below 2^31, number // divisor is number * factor >> shift.

    With 2^shift at least 2^31 * divisor, and factor 2^shift / divisor rounded up, the product is too large by less than
    the quotient lacks of the next integer (Granlund, Montgomery 1994, "Division by invariant integers using
    multiplication").
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor) | shift << 32
