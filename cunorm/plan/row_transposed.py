"""Rows that begin anywhere, forward, whose weights lie transposed in shared memory (see kernels/row_affine.cuh).

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, fits
from cunorm.plan.row_memory import lie_alike
from cunorm.plan.row_spread import rows_per_block, vectors_for_all_threads
from cunorm.plan.row_weights import are_wide
from cunorm.problem import DTYPES, GELUS, ForwardProblem

__all__ = ["transposed_row"]

_WIDTH = 8
_LEAST_COLUMNS = 64
# Below so many they have a way of their own if they are whole vectors of 8 bytes, or have a residual.
_LEAST_OF_ALL = 128
# Vectors of a row, up to where 16 threads have seven each, which take turns where rows are neither few nor many.
_LEAST_IN_TURNS, _MOST_SHORT = 16, 112
# Vectors for each thread of the GPU from where on rows are many: of those that were timed 8 are not, and 31 are.
_MANY = 17


def transposed_row(problem: ForwardProblem, device: Device) -> RowBlock | None:
    """Blocks of several rows, each by up to 32 threads, 64 of few rows; None for rows that take longer so.

    No row has to shift weights, and no thread to wait for those of another warp. 134 MB and more of layer norm of
    bfloat16 otherwise (see row_peeled.py) and so:

    | columns | plain | silu | gelu | float32 weights |
    |---|---|---|---|---|
    | 65 | 1.61, 1.49 | 1.83, 1.66 | 2.32, 2.09 | 1.57, 1.53 |
    | 129 | 1.54, 1.23 | 1.79, 1.27 | 2.18, 1.54 | 1.54, 1.25 |
    | 257 | 1.14, 1.09 | 1.35, 1.19 | 1.69, 1.46 | 1.19, 1.09 |
    | 513 | 1.08, 1.05 | 1.13, 1.09 | 1.43, 1.38 | 1.24, 1.07 |
    | 769 | 1.09, 1.05 | 1.32, 1.16 | 1.55, 1.38 | – |
    | 1023 | 1.05, 1.10 | 1.27, 1.15 | 1.59, 1.44 | 1.16, 1.13 |
    | 1281 | 1.14, 1.08 | 1.35, 1.26 | 1.60, 1.50 | 1.25, 1.11 |
    | 1537 | 1.10, 1.09 | 1.30, 1.22 | 1.47, 1.46 | 1.17, 1.13 |
    | 2049 | 1.11, 1.12 | 1.19, 1.17 | 1.37, 1.42 | 1.15, 1.12 |

    With a residual 257 to 1023 columns take 0.99 to 1.07 under an activation, else 1.16 to 1.46. RMS norm has fewer
    weights to shift: 257 columns take 1.02, as they lie in memory 1.00, but under silu 1.04 and 1.22. Few rows gain
    more, 4096 of 257 and 513 columns take 1.18 and 1.17, else 1.44 and 1.38. Between few and many it is best to take
    turns: 32,768 of 257 and 513 take 1.21 and 1.14 so, with a block for every group of rows 1.30 and 1.22, else 1.26
    and 1.20; with float32 weights 16,384 of 769 1.14, 1.35 and 1.25.
    """
    vectors_per_row, activation = problem.columns // _WIDTH, problem.norm.activation
    if not device.has_fast_memory or device.capability < 90:
        return None
    if problem.itemsize != 2 or problem.channels is not None or not problem.parameters:
        return None
    if not lie_alike(problem) or any(DTYPES[item.dtype].itemsize > 4 for item in problem.parameters):
        return None
    short = problem.columns < _LEAST_OF_ALL
    if problem.columns < _LEAST_COLUMNS or (short and (problem.columns % 4 == 0 or problem.residual is not None)):
        return None
    of_all_threads = vectors_for_all_threads(problem, device, vectors_per_row)
    if short and _are_few(vectors_per_row, of_all_threads):
        return None  # which were not timed
    takes_turns = _is_better_in_turns(problem, vectors_per_row, of_all_threads)
    if not takes_turns and not _is_better(problem, vectors_per_row, of_all_threads):
        return None
    wanted = 2 if of_all_threads <= 1 else 4 if of_all_threads < 4 or problem.residual is not None else 8
    if takes_turns:
        wanted = 4 if vectors_per_row <= 64 else 8
    threads = 8 if takes_turns or vectors_per_row > 16 else 4
    while vectors_per_row > wanted * threads and threads < 64:
        threads *= 2
    vectors = -(-vectors_per_row // threads)
    five = vectors == 5 and threads >= 16 and _does_with_64_registers(problem, device)
    long = (five or threads >= (32 if activation in ("silu", *GELUS) else 16)) and not takes_turns
    block_threads = 256 if long else 128
    rows = rows_per_block(problem, device, block_threads // threads, threads)
    geometry = RowBlock(_WIDTH, vectors, threads, rows, 1, "direct", True, "transposed")
    light = vectors <= 6 and activation is None and (long or takes_turns)
    registers = 64 if vectors <= 4 or light or five else 80
    registers += 16 * (device.capability != 90)  # which nothing was timed for, but ptxas needs more
    share = min(blocks_with(geometry, registers), device.threads_per_multiprocessor // geometry.threads)
    geometry = replace(geometry, min_blocks=share, blocks_per_multiprocessor=share if takes_turns else 0)
    return geometry if fits(geometry, problem, device) else None


def _does_with_64_registers(problem: ForwardProblem, device: Device) -> bool:
    """Whether threads of five vectors do with as many, so that there are more of them on a multiprocessor.

    Under silu 134 MB of 641 and 1281 columns take 1.19 and 1.21 so, with 80 1.23 and 1.28. More vectors would spill 8
    to 20 bytes: 769 and 1025 take 1.14 and 1.09 all the same, without 1.17 and 1.13. Others were not timed.
    """
    plain = problem.residual is None and len(problem.parameters) == 2 and not are_wide(problem)
    return plain and problem.norm.activation == "silu" and device.capability == 90


def _are_few(vectors_per_row: int, of_all_threads: float) -> bool:
    return of_all_threads <= (2 if vectors_per_row >= 32 else 1.5)


def _are_many(vectors_per_row: int, of_all_threads: float) -> bool:
    return of_all_threads >= min(_MANY, vectors_per_row / 4)


def _is_better_in_turns(problem: ForwardProblem, vectors_per_row: int, of_all_threads: float) -> bool:
    """Whether blocks had better take turns: of rows between few and many, of layer norm without more to do."""
    if problem.residual is not None or problem.norm.activation is not None or len(problem.parameters) == 1:
        return False
    between = not _are_few(vectors_per_row, of_all_threads) and not _are_many(vectors_per_row, of_all_threads)
    return between and _LEAST_IN_TURNS <= vectors_per_row < _MOST_SHORT


def _is_better(problem: ForwardProblem, vectors_per_row: int, of_all_threads: float) -> bool:
    """Whether a block for every group of rows is better than other ways, with so many vectors for each thread."""
    activation, wide = problem.norm.activation, are_wide(problem)
    if problem.residual is not None:
        return activation is not None and vectors_per_row <= 128
    if len(problem.parameters) == 1:
        return vectors_per_row <= (128 if activation is not None else 64 if wide else 0)
    if activation is not None:
        long = vectors_per_row > 128
        return vectors_per_row <= (256 if activation == "silu" else 192) and not (long and of_all_threads < 0.25)
    if wide and vectors_per_row >= _MOST_SHORT:
        few, many = 0.25 <= of_all_threads <= 2, of_all_threads >= (_MANY if vectors_per_row <= 128 else 10)
        return vectors_per_row <= 256 and (few or many)
    if vectors_per_row < _MOST_SHORT:
        return _are_few(vectors_per_row, of_all_threads) or _are_many(vectors_per_row, of_all_threads)
    if vectors_per_row <= 128:
        return 0.5 < of_all_threads <= 2
    return vectors_per_row <= 224 and (of_all_threads <= 1 or of_all_threads >= _MANY)
