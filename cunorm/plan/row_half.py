"""Rows of sixteen-bit numbers that are whole vectors of 8 bytes, not of 16, forward: those of 132, 300 or 900 columns.

Every second one begins in the middle of 16 bytes. Peeled, each would have to shift its weights, and to go number by
number at its ends; by vectors of 8 bytes there is nothing of that to do, for twice as many loads.

The numbers are of an H200, as the time of rows that are peeled (see row_peeled.py). Where memory is slower none was
timed.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, that_fits
from cunorm.plan.row_memory import are_shifted
from cunorm.plan.row_spread import threads_for, vectors_for_all_threads
from cunorm.plan.row_weights import are_wide
from cunorm.problem import ForwardProblem

__all__ = ["row_of_half_vectors"]

_WIDTH = 4
# Columns, at least and at most, of what was timed; up to where weights come early; from where on threads have the most.
_LEAST, _MOST, _SHORT, _LONG = 128, 6144, 250, 1000
# Vectors of 16 bytes for each thread of the GPU, at least, and at most where there is one weight for each column.
_FEW, _MANY_OF_LIGHT = 2, 8


def row_of_half_vectors(problem: ForwardProblem, device: Device, width: int) -> RowBlock | None:
    """The geometry; None for other rows, and where they take longer so.

    12 and 64 MB of layer norm of 300, 500, 1100 and 2500 columns take 0.77 and 0.89, 0.81 and 0.92, 0.78 and 0.75, 0.84
    and 0.91; with a residual 0.94 and 0.94, 0.83 and 0.85, 0.91 and 0.96, 0.90 and 0.96. RMS norm, and layer norm
    without a bias, has less to shift: 12 MB take 0.84 to 0.99, 64 MB 0.94 to 1.05; without weights all take 0.95 to
    1.07.
    """
    timed = problem.itemsize == 2 and width == _WIDTH and device.capability == 90 and device.has_fast_memory
    plain = problem.channels is None and problem.norm.activation is None and not are_shifted(problem)
    if not timed or not plain or are_wide(problem) or not _LEAST <= problem.columns <= _MOST:
        return None
    vectors_per_row = problem.columns // width
    for_all = vectors_for_all_threads(problem, device, vectors_per_row) / 2
    light = problem.residual is None and len(problem.parameters) < 2
    if for_all < _FEW or (light and for_all > _MANY_OF_LIGHT) or (light and not problem.parameters):
        return None
    most, block_threads, weights = _how(problem, light)
    threads = threads_for(vectors_per_row, most)
    vectors, rows = -(-vectors_per_row // threads), max(1, block_threads // threads)
    geometry = RowBlock(width, vectors, threads, rows, weights=weights if problem.parameters else "late")
    registers = 64 if vectors <= 6 and problem.residual is None else 80
    geometry = replace(geometry, min_blocks=blocks_with(geometry, registers))
    return that_fits(geometry, problem, device)


def _how(problem: ForwardProblem, light: bool) -> tuple[int, int, str]:
    """Vectors of a thread, at most, threads of a block, and when weights come."""
    both = problem.residual is None and not light
    if problem.columns <= _SHORT:
        return 8 if both else 4, 128, "early"
    if both:
        return 8 if problem.columns <= _LONG else 10, 128, "staged"
    return (6, 256, "early") if light and problem.columns > _LONG else (6, 128, "staged")
