"""Whether rows are better shared by all blocks, in bulk, than held by clusters, or read twice.

The numbers are of an H200: the time over that of what else there is, of 1400 norms.
"""

from __future__ import annotations

from cunorm.plan.device import Device
from cunorm.plan.row_pipeline import are_peeled, keeps_nothing
from cunorm.problem import ForwardProblem, Problem

__all__ = ["is_better"]

_Limits = tuple[tuple[int, int], ...]  # rows, and bytes of each
_KB, _MB = 1 << 10, 1 << 20
_LEAST_MANY = 8
_MULTIPROCESSORS = 132

# Rows that begin anywhere are from as many rows, of as many bytes, on, by the bytes of a number; and many of them from
# as many bytes on, and as many in all. Forward, 64 and more rows of 50,257 to 1,000,001 columns take 0.44 to 0.98 of
# the time, up to 2 GB of them 0.44 to 0.96, under silu and gelu 0.37 to 1.05; 8 rows of 16 bits of 131,073 1.00, of
# 180,001 0.97, of 400,001 0.90, but 4 of 1,600,001 1.25; of float32 2 to 8 rows of 131,073 0.92 to 1.00. Shorter
# ones, of 16 bits: 20,001 0.94 to 1.08, 25,001 0.90 to 1.00, 42,001 0.85 to 0.92; of float32 9001 0.98 to 1.10, 15,873
# 0.88 to 1.05, 20,001 0.92 to 0.96, 25,001 0.89 to 0.97.
_FORWARD: dict[int, _Limits] = {
    2: ((16, 96 * _KB), (8, 350 * _KB)),
    4: ((64, 133 * _KB), (16, 260 * _KB), (1, 500 * _KB)),
}
_MANY_FORWARD, _MANY_IN_ALL_FORWARD = {2: 48 * _KB, 4: 70 * _KB}, {2: 7 * _MB, 4: 24 * _MB}
# RMS norm leaves more time to clusters that are all there at once: of float32 64 rows of 20,001 to 50,257 take 1.00 to
# 1.17, of 70,001 0.93, 8 of 70,001 1.19, of 131,073 1.02, 4 of 400,001 0.79; of 16 bits many of 20,001 1.09, of 35,001
# 0.96.
_FORWARD_OF_RMS: dict[int, _Limits] = {2: _FORWARD[2], 4: ((64, 260 * _KB), (8, 500 * _KB), (4, 1500 * _KB))}
_MANY_FORWARD_OF_RMS, _MANY_IN_ALL_FORWARD_OF_RMS = {2: 64 * _KB, 4: 70 * _KB}, 24 * _MB
# Of 16 bits and fewer bytes a row than that, no more than so many in all: 25,001 to 50,257 columns take 0.99 to 1.03 of
# the time where there are more.
_SHORT_FORWARD, _MOST_IN_ALL_OF_SHORT_FORWARD = 130 * _KB, 300 * _MB
# Backward, 8 and more rows of 50,257 to 1,000,001 columns take 0.36 to 0.99, but of 16 bits under gelu 70,001 1.09 and
# 1.22; 4 of 131,073 1.01 and 1.10, of 400,001 0.84 and 0.93; 2 of 400,001 0.88 and 1.02. Shorter ones: of 16 bits
# 20,001 0.92 to 0.99, 25,001 to 42,001 0.73 to 1.05, under silu 0.78 to 0.98, under gelu 20,001 1.30 and 1.38; of
# float32 9001 to 42,001 0.75 to 1.00, under silu and gelu 0.59 to 1.01.
_BACKWARD: dict[int, _Limits] = {
    2: ((8, 96 * _KB), (4, 700 * _KB), (1, 1200 * _KB)),
    4: ((16, 140 * _KB), (8, 190 * _KB), (1, 1500 * _KB)),
}
_MANY_BACKWARD, _MANY_IN_ALL_BACKWARD = {2: 38 * _KB, 4: 34 * _KB}, {2: 7 * _MB, 4: 5 * _MB}
# Under the exact gelu, rows of 16 bits are from as many bytes on.
_FORWARD_OF_GELU, _BACKWARD_OF_GELU = 96 * _KB, 250 * _KB
# Rows of whole vectors are only backward: of 16 bits these, 100,000 columns 0.78 to 0.94, 131,072 0.58 to 1.01, but
# 65,536 0.97 to 1.08 and 1,000,000 0.98 to 1.14; longer ones of so many bytes in all, 200,000 and 262,144 columns 0.87
# to 0.99, more of them 1.01 to 1.04; nor more shorter ones, of which clusters take a copy's time. Layer norm of float32
# these, 65,536 to 655,360 columns 0.79 to 1.03, but 1,000,000, of which fewer rows have room, 1.09 to 1.28. RMS norm of
# float32 takes 0.91 to 1.10.
_WHOLE_VECTORS: dict[int, _Limits] = {2: ((16, 190 * _KB), (4, 390 * _KB)), 4: ((4, 255 * _KB),)}
_MOST_OF_WHOLE_VECTORS, _LONG_WHOLE_VECTORS = {2: 1 * _MB, 4: 2700 * _KB}, 384 * _KB
_MOST_IN_ALL_OF_SHORT, _MOST_IN_ALL_OF_LONG = 1000 * _MB, 160 * _MB
# Where memory is slower nothing of this was timed: there rows are that few clusters or none hold, forward and backward,
# but for a few rows, which may come from the cache the second time.
_BY_SLOWER_MEMORY, _LEAST_ROWS_BY_SLOWER_MEMORY = (1 * _MB, 450 * _KB), 16


def is_better(problem: Problem, device: Device) -> bool:
    """Whether rows are, if blocks can share them so."""
    itemsize, forward = problem.itemsize, isinstance(problem, ForwardProblem)
    if itemsize > 4 or keeps_nothing(problem):
        return False
    if not device.has_fast_memory:
        least = _BY_SLOWER_MEMORY[0 if forward else 1]
        return are_peeled(problem) and _are_so_many(problem, ((_LEAST_ROWS_BY_SLOWER_MEMORY, least),))
    if not are_peeled(problem):
        if forward or (itemsize == 4 and not problem.norm.centered):
            return False
        return problem.norm.activation is None and _are_better_whole_vectors(problem, device)
    if itemsize == 2 and problem.norm.activation == "gelu":
        least = _FORWARD_OF_GELU if forward else _BACKWARD_OF_GELU
        if problem.columns * itemsize < least:
            return False
    short = forward and itemsize == 2 and problem.columns * itemsize < _SHORT_FORWARD
    if short and _bytes_in_all(problem, device) > _MOST_IN_ALL_OF_SHORT_FORWARD:
        return False
    if not forward:
        few, each, in_all = _BACKWARD[itemsize], _MANY_BACKWARD[itemsize], _MANY_IN_ALL_BACKWARD[itemsize]
    elif problem.norm.centered:
        few, each, in_all = _FORWARD[itemsize], _MANY_FORWARD[itemsize], _MANY_IN_ALL_FORWARD[itemsize]
    else:
        few, each, in_all = _FORWARD_OF_RMS[itemsize], _MANY_FORWARD_OF_RMS[itemsize], _MANY_IN_ALL_FORWARD_OF_RMS
    return _are_so_many(problem, few) or _are_many(problem, device, each, in_all)


def _are_better_whole_vectors(problem: Problem, device: Device) -> bool:
    row_bytes, itemsize = problem.columns * problem.itemsize, problem.itemsize
    most_in_all = _MOST_IN_ALL_OF_LONG if row_bytes >= _LONG_WHOLE_VECTORS else _MOST_IN_ALL_OF_SHORT
    if itemsize == 2 and _bytes_in_all(problem, device) > most_in_all:
        return False
    return row_bytes <= _MOST_OF_WHOLE_VECTORS[itemsize] and _are_so_many(problem, _WHOLE_VECTORS[itemsize])


def _are_so_many(problem: Problem, limits: _Limits) -> bool:
    """Whether there are as many rows, of as many bytes each, as one of the limits says."""
    row_bytes = problem.columns * problem.itemsize
    return any(problem.rows >= rows and row_bytes >= each for rows, each in limits)


def _are_many(problem: Problem, device: Device, each: int, in_all: int) -> bool:
    row_bytes = problem.columns * problem.itemsize
    return row_bytes >= each and problem.rows >= _LEAST_MANY and _bytes_in_all(problem, device) >= in_all


def _bytes_in_all(problem: Problem, device: Device) -> float:
    """Those of a tensor, for as many multiprocessors as an H200 has."""
    return problem.rows * problem.columns * problem.itemsize * _MULTIPROCESSORS / device.multiprocessors
