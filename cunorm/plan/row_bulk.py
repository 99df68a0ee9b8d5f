"""Rows that are not whole pieces of 16 bytes, forward, and come and leave as runs of memory, by bulk copies.

However such rows begin, a run of them comes and goes as fast as a copy does, and a thread has the same columns of all
of its rows. The numbers are of an H200, as the time over that of a copy of the same bytes, of 134 MB of x where nothing
else is said. Where memory is slower it was not timed, and rows go other ways (see row_narrow.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants
from cunorm.plan.row_memory import LINE_BYTES, compute_itemsize, vector_width
from cunorm.plan.row_runs import RowRuns, are_runs
from cunorm.problem import DTYPES, GELUS, ForwardProblem, Problem

__all__ = ["RowBulk", "affine_words", "geometry", "is_possible", "threads_per_row", "with_room"]

_BANKS = 32
_BLOCK_THREADS = 128
_MOST_THREADS_PER_ROW = 256
# Numbers of a row that a thread has, at most, where a warp or less shares one, and where more do. 641 and 769 columns
# take 0.96 and 0.97 by a warp, 1.00 and 0.99 by two.
_MOST_NUMBERS_IN_WARP, _MOST_NUMBERS = 20, 26
_LEAST_EVEN_COLUMNS = 14  # of sixteen bits
_MOST_VECTORS_ALONE = 16  # of a row that one thread has: 17 columns take 1.02 by two, by one 1.07
# Rows that a block has one after the other, where there are enough; half of them where a run is longer than that. 129
# columns take 0.99 with 8, 1.03 with 4, 1.15 with 2; 641 0.98 with 4, 0.96 with 2.
_TURNS, _MORE_TURNS, _MOST_RUN_BYTES = 4, 8, 16 * 1024 + 768


@dataclass(frozen=True)
class RowBulk(RowRuns):
    """How rows lie over threads and blocks, each of which has a run (see kernels/row_bulk_forward.cu).

    Attributes
    ----------
    min_blocks : int
        Blocks that are to share a multiprocessor.
    """

    min_blocks: int = 1

    def declared_bytes(self, problem: ForwardProblem) -> int:
        """The shared memory that the kernel declares, at most."""
        warps = -(-self.threads_per_row // 32) * self.rows_at_once
        return (2 * 2 * warps + 2 * self.rows_per_block) * compute_itemsize(problem) + LINE_BYTES

    def blocks_with_memory(self, problem: ForwardProblem, device: Device) -> int:
        """How many blocks a multiprocessor has the shared memory for."""
        taken = self.room_of_runs(problem) + self.declared_bytes(problem)
        return device.blocks_with(taken) if taken <= device.shared_bytes else 0

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        assert isinstance(problem, ForwardProblem)
        own: Constants = {
            "MIN_BLOCKS": self.min_blocks,
            "HAS_RESIDUAL": int(problem.residual is not None),
            "HAS_STATISTICS": int(problem.stats),
        }
        builder.launch(
            "row_bulk_forward",
            self.constants(problem) | own,
            -(-problem.rows // self.rows_per_block),
            (self.threads_per_row, self.rows_at_once),
            {
                **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
                "rows": problem.rows,
                "columns": problem.columns,
                "eps": problem.eps,
            },
            self.room_of_runs(problem),
        )
        return "row_bulk"


def is_possible(problem: Problem, device: Device) -> bool:
    """Whether the kernel can compute a problem: rows behind each other, that lie alike in all tensors."""
    possible = isinstance(problem, ForwardProblem) and are_runs(problem, device)
    return possible and len({matrix.offset for matrix in problem.matrices}) == 1


def geometry(problem: ForwardProblem, device: Device) -> RowBulk | None:
    """The built-in choice; None where rows had better go another way.

    | columns | plain | else | silu | else |
    |---|---|---|---|---|
    | 25 | 0.97 | 1.27 | – | – |
    | 65 | 1.18 | 1.49 | 1.27 | 1.65 |
    | 129 | 0.99 | 1.22 | 1.05 | 1.27 |
    | 257 | 0.97 | 1.10 | 1.05 | 1.19 |
    | 513 | 0.97 | 1.06 | 0.99 | 1.09 |
    | 1025 | 0.98 | 1.04 | 1.03 | 1.13 |
    | 2049 | 0.99 | 1.06 | 1.04 | 1.17 |
    | 4097 | 1.02 | 1.08 | – | – |
    | 6145 | 1.02 | 1.08 | – | – |

    That is bfloat16. Of 34, 60, 100 and 260 columns, in vectors of 4 and 8 bytes, 0.99, 0.99, 0.98 and 0.98, otherwise
    1.08, 1.07, 1.04 and 1.12. Under gelu 129, 257 and 1025 take 1.47, 1.37 and 1.36, otherwise 1.54, 1.46 and 1.37.
    float32: 33, 129 and 385 take 0.98, 0.99 and 0.97, otherwise 1.04, 1.08 and 0.98; under silu 33, 129 and 1023 0.97,
    0.98 and 0.99, otherwise 1.13, 1.19 and 1.04. Few rows: 300 x 129 take 1.27, otherwise 1.39, 600 x 257 1.19 and
    1.25, 4104 x 1023 1.01 and 1.12, 2048 x 2049 1.33 and 1.45; but 512 x 2049 0.88 and 0.84.
    """
    width = vector_width(problem)
    if not device.has_fast_memory or not is_possible(problem, device) or width * problem.itemsize >= 16:
        return None
    if problem.rows <= 2 * device.multiprocessors or not _is_better(problem):
        return None
    threads = threads_per_row(problem, width, problem.norm.activation not in GELUS)
    vectors = -(-(problem.columns // width) // threads)
    activated = problem.norm.activation is not None
    if vectors * width > _MOST_NUMBERS or (activated and threads > _BLOCK_THREADS):
        return None
    at_once = max(1, _BLOCK_THREADS // threads)
    turns = _MORE_TURNS if threads < (64 if activated else 32) else _TURNS
    found = with_room(RowBulk(width, vectors, threads, at_once, min(turns * at_once, _BLOCK_THREADS)), problem, device)
    while threads <= 64 and found.rows_per_block > at_once and found.room_of_runs(problem) > _MOST_RUN_BYTES:
        found = _of_fewer_rows(found, problem, device)
    wanted = 3 * found.min_blocks * device.multiprocessors // 4
    while found.rows_per_block > at_once and problem.rows < wanted * found.rows_per_block:
        found = _of_fewer_rows(found, problem, device)
    return found if found.min_blocks > 0 else None


def threads_per_row(problem: Problem, width: int, prefers_warps: bool) -> int:
    """As few as leave none more numbers than it should have, and a warp few words of one bank to ask for at once.

    Rows that share a warp begin half a word behind the same bank where they have 65 columns, or 129: by 16 threads each
    129 take 0.99, by 8 1.25; 65 by 16 1.18, by 4 1.47.
    """
    columns, vectors_per_row = problem.columns, problem.columns // width
    most = _MOST_NUMBERS_IN_WARP if columns <= 32 * _MOST_NUMBERS_IN_WARP else _MOST_NUMBERS
    threads = 1 if vectors_per_row <= _MOST_VECTORS_ALONE else 2
    while threads < _MOST_THREADS_PER_ROW and vectors_per_row > most // width * threads:
        threads *= 2
    while threads < 32 and _conflicts(problem, width, threads) > 2 * width:
        threads *= 2
    if prefers_warps and threads == 16 and columns > 256 and _conflicts(problem, width, 16) > 1:
        return 32  # 257 columns take 0.97 so, by 16 0.98; but under gelu 1.48 and 1.37
    return threads


def _is_better(problem: ForwardProblem) -> bool:
    """Whether rows of such a length take no longer so, where there are enough.

    Rows on which little is computed are as fast otherwise from some length on: RMS norm of 1025 columns takes 0.97 and
    0.96, layer norm of 513 of float32 0.98 and 0.97, and with a residual 385 of bfloat16 1.01 and 1.00. 10 of float16
    are a few vectors of 4 bytes, which a thread had better read directly: they take 1.10 and 1.02.
    """
    columns, itemsize = problem.columns, problem.itemsize
    if columns * itemsize < 18 or any(DTYPES[item.dtype].itemsize > 4 for item in problem.parameters):
        return False  # which were not timed
    if itemsize == 2 and columns % 2 == 0 and columns < _LEAST_EVEN_COLUMNS:
        return False
    if problem.norm.activation is not None:
        return True
    if problem.residual is not None:
        return columns <= (320 if itemsize == 2 else 160)
    light = not problem.norm.centered or not problem.parameters
    return (not light or columns <= 640) if itemsize == 2 else columns <= 400


def _conflicts(problem: Problem, width: int, threads: int) -> int:
    """How many words of one bank of shared memory a warp asks for at once, whose rows ``threads`` threads share."""
    words = {
        (lane // threads * problem.columns + lane % threads * width) * problem.itemsize // 4 + word
        for lane in range(32)
        for word in range(max(1, width * problem.itemsize // 4))
    }
    asked = Counter(word % _BANKS for word in words)
    passes = max(1, width * problem.itemsize // 4)  # of vectors of 8 bytes, half a warp at a time
    return -(-max(asked.values()) // passes)


def with_room(geometry: RowBulk, problem: ForwardProblem, device: Device) -> RowBulk:
    """For as many blocks a multiprocessor as have the registers and the shared memory."""
    registers = _registers(geometry, problem) + 16 * (device.capability != 90)  # as ptxas needs more for others
    registers = min(255, max(40, -(-registers // 8) * 8))
    share = geometry.blocks_with_registers(registers, device)
    return replace(geometry, min_blocks=min(share, geometry.blocks_with_memory(problem, device)))


def affine_words(problem: Problem, width: int) -> int:
    """Registers that the weights and biases of a vector take, as they come."""
    types = [DTYPES[item.dtype] for item in problem.parameters]
    if width == 1 and len(types) == 2 and types[0] == types[1] and types[0].itemsize == 2:
        return 1
    return sum(max(1, width * each.itemsize // 4) for each in types)


def _registers(geometry: RowBulk, problem: ForwardProblem) -> int:
    """What a thread needs for sm_90, so that nothing spills."""
    width, dtypes = geometry.width, [problem.x.dtype, *(item.dtype for item in problem.parameters)]
    words = max(1, width * problem.itemsize // 4) + max(width, affine_words(problem, width))
    more = 8 * (problem.norm.activation is not None)
    more += 4 * any(DTYPES[dtype].itemsize > problem.itemsize for dtype in dtypes)
    if width == 1 and "float16" in dtypes:
        # Which are widened once, not for each pass.
        more += max(0, geometry.vectors - 9) + 4 * (geometry.threads_per_row > _BLOCK_THREADS)
    if problem.residual is not None:
        more += 8 * (problem.norm.activation is not None) + 2
    return geometry.vectors * words + 22 + more


def _of_fewer_rows(geometry: RowBulk, problem: ForwardProblem, device: Device) -> RowBulk:
    return with_room(replace(geometry, rows_per_block=geometry.rows_per_block // 2), problem, device)
