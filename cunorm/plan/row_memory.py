"""How the rows of a problem lie in memory: what vectors they have, and where parts of them begin."""

from __future__ import annotations

import math

from cunorm.problem import DTYPES, AnyProblem, BackwardProblem, PointwiseProblem, Problem, Vector

__all__ = [
    "LINE_BYTES",
    "are_dense",
    "are_rows",
    "are_segmented",
    "are_shifted",
    "are_whole_lines",
    "can_be_shared",
    "columns_in_lines",
    "columns_of_part",
    "columns_per_block",
    "compute_itemsize",
    "has_several_channels",
    "lie_alike",
    "margin_of",
    "row_width",
    "vector_shift",
    "vector_width",
    "weights_of",
]

# A line of the cache, and from how many of them on a part of a row is whole lines.
LINE_BYTES = 128
_LEAST_LINES = 64


def vector_width(problem: Problem | PointwiseProblem) -> int:
    """Elements a thread moves at once: as many, up to 16 bytes, as columns, pointers and every stride divide by."""
    width = _width_of_rows(problem)
    if isinstance(problem, BackwardProblem) and problem.channels is not None:
        return math.gcd(width, problem.channels.positions)  # each channel has sums of its own
    return width


def _width_of_rows(problem: Problem | PointwiseProblem) -> int:
    """The same where vectors may reach from one channel into the next."""
    itemsize = problem.itemsize
    matrices = problem.matrices
    if any(matrix.column_strides[-1] != 1 and problem.column_sizes[-1] > 1 for matrix in matrices):
        return 1
    strides = [stride for m in matrices for stride in m.row_strides + m.column_strides[:-1]]
    elements = math.gcd(16 // itemsize, problem.column_sizes[-1], *strides)
    return max(1, min([elements] + [matrix.alignment // itemsize for matrix in matrices]))


def are_rows(problem: Problem) -> bool:
    """Whether every row is contiguous, and the rows are evenly spaced."""
    if len(problem.row_sizes) > 1 or len(problem.column_sizes) > 1:
        return False
    return problem.columns == 1 or all(matrix.column_strides[0] == 1 for matrix in problem.matrices)


def are_dense(problem: Problem) -> bool:
    """Whether the rows of every tensor lie behind each other, with nothing between them."""
    rows, columns = problem.rows, problem.columns
    return are_rows(problem) and all(rows == 1 or matrix.row_strides[0] == columns for matrix in problem.matrices)


def are_segmented(problem: Problem) -> bool:
    """Whether every row is in runs of memory, equally far apart in all rows and tensors."""
    if len(problem.row_sizes) > 1 or len(problem.column_sizes) != 2:
        return False
    strides = {matrix.column_strides for matrix in problem.matrices}
    apart, along = min(strides)
    return len(strides) == 1 and along == 1 and 0 <= apart * problem.column_sizes[0] < 2**31


def are_shifted(problem: Problem) -> bool:
    """Whether rows are a multiple of 16 bytes long and apart, and written at such multiples, but not all read there.

    All rows of a tensor have the same offset from a multiple then.
    """
    if not are_rows(problem) or problem.channels is not None:
        return False
    itemsize = problem.itemsize
    offsets = [matrix.offset for matrix in problem.matrices_read]
    strides = [matrix.row_strides[0] for matrix in problem.matrices]
    whole = math.gcd(problem.columns, *strides) * itemsize % 16 == 0
    ascending = problem.rows == 1 or all(matrix.row_strides[0] > 0 for matrix in problem.matrices_read)
    return whole and ascending and any(offsets) and all(matrix.offset == 0 for matrix in problem.matrices_written)


def row_width(problem: Problem) -> int:
    """Elements of a vector of row_block_* where rows are not peeled; it may be shifted.

    Backward, it may also reach from one channel into the next, if these are no shorter.
    """
    whole, channels = 16 // problem.itemsize, problem.channels
    if are_shifted(problem):
        return whole
    if channels is not None and channels.positions >= whole and _width_of_rows(problem) == whole:
        return whole
    return vector_width(problem)


def has_several_channels(problem: Problem) -> bool:
    """Whether rows have several channels each."""
    return problem.channels is not None and problem.channels.channels_per_row > 1


def vector_shift(vector: Vector | None, width: int) -> int:
    """How many elements a weight or bias begins behind a multiple of 16 bytes, if ``width`` of it are whole pieces."""
    if vector is None or width * DTYPES[vector.dtype].itemsize % 16:
        return 0
    return vector.offset // DTYPES[vector.dtype].itemsize


def lie_alike(problem: Problem) -> bool:
    """Whether each of such rows begins equally far from a multiple of 16 bytes in all tensors."""
    strides = {matrix.row_strides[0] for matrix in problem.matrices}
    return len(strides) == 1 and all(matrix.alignment == 16 for matrix in problem.matrices)


def columns_in_lines(columns: int, blocks: int, problem: Problem) -> int:
    """How many of so many columns each of the blocks takes, in whole lines however short that is."""
    line = LINE_BYTES // problem.itemsize
    return -(-columns // (blocks * line)) * line


def margin_of(problem: Problem, width: int, weights: str) -> int:
    """How many columns of rows that begin anywhere stay beside the vectors at either end, at least; see row_cut.cuh."""
    at_hand = weights == "staged" or problem.channels is not None or not problem.parameters
    return 0 if at_hand and lie_alike(problem) else width


def weights_of(problem: Problem, columns_per_block: int, width: int, peeled: bool) -> str:
    """Whose weight and bias a number has, where each of a row's blocks takes so many columns, ``width`` at once.

    The kinds are those of kernels/row_channels.cuh.
    """
    channels = problem.channels
    if channels is None or not problem.is_by_channel:
        return "columns"
    if channels.channels_per_row == 1 or channels.positions % columns_per_block == 0:
        return "part"
    if channels.positions % width == 0 and not peeled:
        return "vector"
    return "crossing" if channels.positions >= width else "numbers"


def columns_per_block(problem: Problem, blocks: int, width: int) -> int:
    """How many columns each of a row's blocks takes, in whole vectors; the last may have fewer.

    Backward they are whole channels, or all channels are as many of them. Long parts are whole lines of 128 bytes, for
    it is slow to write halves of sectors: on an H200 1000 rows of 100,000 float16 numbers took 1.31 by four blocks of
    3125 vectors each, and 1.23 by such of 3128.
    """
    channels = problem.channels
    if isinstance(problem, BackwardProblem) and channels is not None and channels.channels_per_row > 1:
        if blocks < channels.channels_per_row:
            return -(-channels.channels_per_row // blocks) * channels.positions
        return problem.columns // blocks
    in_lines = blocks > 1 and channels is None and problem.columns % width == 0
    return columns_of_part(problem, problem.columns, blocks, width, in_lines)


def columns_of_part(problem: Problem, columns: int, blocks: int, width: int, in_lines: bool) -> int:
    """How many of so many columns each of the blocks that share them takes: in lines, if that is wanted, or vectors."""
    part, line = -(-columns // blocks), LINE_BYTES // problem.itemsize
    unit = line if in_lines and part >= _LEAST_LINES * line else width
    return -(-part // unit) * unit


def are_whole_lines(problem: Problem, columns: int) -> bool:
    """Whether so many columns are whole lines of memory."""
    return columns * problem.itemsize % LINE_BYTES == 0


def can_be_shared(problem: Problem, blocks: int, width: int) -> bool:
    """Whether there are such `columns_per_block`, and some for each block."""
    columns, channels = columns_per_block(problem, blocks, width), problem.channels
    if isinstance(problem, BackwardProblem) and channels is not None and channels.channels_per_row > 1:
        whole = columns % channels.positions == 0 or (columns > 0 and channels.positions % columns == 0)
        if not whole or columns % width > 0:
            return False
    return (blocks - 1) * columns < problem.columns <= blocks * columns


def compute_itemsize(problem: AnyProblem) -> int:
    """Bytes of the numbers that are summed."""
    return DTYPES[DTYPES[problem.x.dtype].compute].itemsize
