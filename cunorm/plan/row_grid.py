"""Few rows that are too long for the blocks of a cluster: all blocks of the device run together, and share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan.constants import affine_constants, channel_numbers, dtype_constants, row_strides
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Constants
from cunorm.plan.row_memory import are_rows, columns_per_block, compute_itemsize, lie_alike, vector_width, weights_of
from cunorm.plan.zeros import reserve_words
from cunorm.problem import DTYPES, ForwardProblem, Problem

__all__ = ["RowGrid", "applies", "forward_geometry"]

# Rows of fewer bytes are left to the clusters and to row_split.
_LEAST_ROW_BYTES = 6 << 20
# But shorter ones are not where they are so few that clusters leave most multiprocessors idle: 4 rows of 400,001 take
# 1.7, by clusters 2.2; 4 of 1,000,000 bfloat16 numbers 1.7 and 2.2. Nor are they where weights are by channel, which
# cost no bytes, if clusters do not hold them. Not measured.
_LEAST_BYTES_OF_FEW = 1 << 20
# Weights of more bytes come from memory at every row: of rows of 10,000,000, that take 2.49, by row_split, which reads
# them once, 1.75 (RMS norm 1.83 and 1.68). Those of rows that begin anywhere are read across pieces besides: on an H100
# 1 to 32 rows of 2,000,001 to 10,000,001 numbers take 0.70 to 1.01 of the time by row_split, 4 of 10,000,001 0.77.
_MOST_WEIGHT_BYTES = 32 << 20
# And shorter weights are read at every row too, so that more rows are left to row_split where that moves 16 bytes at a
# time: 4 rows of 8,388,608 float16 numbers take 2.27, by row_split 2.41 (4,194,304 of float32 1.99 and 2.27), 10 of
# 4,194,304 2.71 and 2.04 (2,097,152 of float32 2.30 and 1.94), 32 of them 2.14 and 1.77 (1.80 and 1.72).
_MOST_ROWS_WITH_WEIGHTS = 7
# Threads of a block, of which each multiprocessor has one. With more, none would have registers for vectors of the row.
# Not measured.
_THREADS = 512
# Vectors of a thread in registers, by the size of a number: with more, ptxas spills.
_MOST_HELD = {2: 5, 4: 9, 8: 3}
# Slots of a thread, at most: the loops over them are unrolled.
_MOST_SLOTS = 32
_MOST_ROWS_AHEAD = 4
# Of the next row, where it finds no free slot until this one is finished: 8 KB each, a megabyte over an H200, which
# an exchange is about eight times as long as. Not measured.
_PREFETCHED = 8
# Every number of groups has a kernel of its own to compile, so there are few.
_GROUPS = (1, 2, 4, 8)
# What the kernel declares of shared memory itself, at most.
_STATIC_SHARED_BYTES = 1024
# What an exchange between blocks costs, about, as bytes that a multiprocessor could have moved. Not measured.
_EXCHANGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class RowGrid:
    """How rows lie over blocks that all run at the same time (see kernels/row_grid_forward.cu)."""

    width: int  # elements of a vector: 16 bytes
    resident: int  # vectors of a thread, of each row, in shared memory
    blocks_per_row: int
    groups: int  # of blocks_per_row blocks, which take turns over the rows
    rows_ahead: int = 1  # that lie in shared memory, or are on their way to it
    held: int = 0  # vectors of a thread in registers
    threads: int = _THREADS  # of a block
    peeled: bool = False
    prefetched: int = 0  # vectors of a thread, of the next row, brought into the cache

    def columns_per_block(self, problem: ForwardProblem) -> int:
        """How many columns each block of a row takes; the last may have fewer."""
        return columns_per_block(problem, self.blocks_per_row, self.width)

    def vectors(self, problem: ForwardProblem) -> int:
        """Vectors of a thread in its part of a row, in shared memory or not."""
        columns = self.columns_per_block(problem) - (2 * self.width if self.peeled else 0)
        return max(1, -(-columns // (self.width * self.threads)))

    def shared_bytes(self, problem: ForwardProblem) -> int:
        """Dynamic shared memory: x and residual, and the numbers of an exchange."""
        slots = self.threads * self.rows_ahead * self.resident * len(problem.matrices_read)
        return slots * 16 + 3 * self.blocks_per_row * compute_itemsize(problem)

    def constants(self, problem: ForwardProblem) -> Constants:
        return {
            "VECTOR": self.width,
            "RESIDENT": self.resident,
            "ROWS_AHEAD": self.rows_ahead,
            "HELD": self.held,
            "STREAMED": int(self.vectors(problem) > self.resident + self.held),
            "PREFETCHED": self.prefetched,
            "THREADS": self.threads,
            "PEELED": int(self.peeled),
            "WEIGHTS_OF": weights_of(problem, self.columns_per_block(problem), self.width, self.peeled),
            "CHANNEL_NUMBERS": len(channel_numbers(problem)),
            "HAS_RESIDUAL": int(problem.residual is not None),
        }

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        assert isinstance(problem, ForwardProblem)
        grid = self.groups * self.blocks_per_row
        # Two turns' three numbers; a word has four bytes of one.
        words = reserve_words(builder, 2 * grid * 3 * compute_itemsize(problem) // 4)
        builder.launch(
            "row_grid_forward",
            dtype_constants(problem) | self.constants(problem) | affine_constants(problem, self.width),
            grid,
            (self.threads, 1),
            {
                **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
                **words,
                "rows": problem.rows,
                "columns": problem.columns,
                "columns_per_block": self.columns_per_block(problem),
                "blocks_per_row": self.blocks_per_row,
                **row_strides(x=problem.x, residual=problem.residual, y=problem.y, residual_out=problem.residual_out),
                "eps": problem.eps,
                "channels": channel_numbers(problem),
            },
            self.shared_bytes(problem),
            cooperative=True,
        )
        return "row_grid"


def applies(problem: ForwardProblem, device: Device) -> bool:
    """Whether the kernel can compute a problem, and is meant for it.

    It needs cp.async (sm_80) and rows that are contiguous, and begin equally far from a multiple of 16 bytes in all
    tensors. Shorter rows are faster otherwise; so are rows whose weights the cache does not hold, where row_split moves
    whole vectors. Where not even half of a row fits into the device, little is gained over a kernel that reads
    everything twice. With weights in double for numbers that are not, the compiler runs out of registers.
    """
    itemsize = problem.itemsize
    few = problem.rows <= device.groups(16) or problem.channels is not None
    least_bytes = _LEAST_BYTES_OF_FEW if few else _LEAST_ROW_BYTES
    if device.capability < 80 or problem.rows == 0 or problem.columns * itemsize < least_bytes:
        return False
    if any(DTYPES[item.dtype].itemsize > max(4, itemsize) for item in problem.parameters):
        return False
    whole = vector_width(problem) * itemsize == 16
    if not are_rows(problem) or not (whole or lie_alike(problem)):
        return False
    by_column = len(problem.parameters) > 0 and problem.channels is None
    if by_column and (not whole or problem.rows > _MOST_ROWS_WITH_WEIGHTS):
        return False
    columns = problem.columns if problem.channels is None else problem.channels.channels_per_row
    weight_bytes = sum(columns * DTYPES[item.dtype].itemsize for item in problem.parameters)
    if whole and problem.rows > 1 and weight_bytes > _MOST_WEIGHT_BYTES:
        return False
    vectors_of_a_thread = _slots(problem, device) + _held(problem)
    return problem.columns * itemsize <= 2 * device.multiprocessors * _THREADS * vectors_of_a_thread * 16


def _slots(problem: ForwardProblem, device: Device) -> int:
    """Slots of a thread that a block has shared memory for."""
    free_bytes = device.shared_bytes - _STATIC_SHARED_BYTES - 3 * device.multiprocessors * compute_itemsize(problem)
    return min(_MOST_SLOTS, free_bytes // (16 * _THREADS * len(problem.matrices_read)))


def _held(problem: ForwardProblem) -> int:
    """Vectors that a thread can have in registers."""
    return _MOST_HELD[problem.itemsize] if problem.residual is None else 0


def _geometry(problem: ForwardProblem, device: Device, groups: int) -> RowGrid | None:
    """So many groups of blocks, with as many rows ahead as there is room for."""
    piece = 16 // problem.itemsize
    blocks = device.multiprocessors // groups
    slots = _slots(problem, device)
    if blocks == 0 or slots < 1 or problem.columns < 16 * piece * blocks:
        return None
    geometry = RowGrid(
        piece,
        resident=1,
        blocks_per_row=-(-problem.columns // columns_per_block(problem, blocks, piece)),
        groups=groups,
        peeled=vector_width(problem) < piece,
    )
    vectors = geometry.vectors(problem)
    resident = min(vectors, slots)
    ahead = min(slots // resident, _MOST_ROWS_AHEAD)
    return replace(
        geometry,
        resident=resident,
        rows_ahead=ahead,
        held=min(vectors - resident, _held(problem)),
        prefetched=min(resident, _PREFETCHED) if ahead == 1 and device.capability >= 90 else 0,
    )


def forward_geometry(problem: ForwardProblem, device: Device) -> RowGrid | None:
    """How the rows of a problem are shared by the blocks; None where the kernel is not for it."""
    if not applies(problem, device):
        return None
    found = [_geometry(problem, device, groups) for groups in _GROUPS if groups <= problem.rows]
    return min(filter(None, found), key=lambda geometry: _cost(geometry, problem))


def _cost(geometry: RowGrid, problem: ForwardProblem) -> float:
    """The time that a geometry is expected to take, as the bytes that a multiprocessor could move."""
    part = geometry.columns_per_block(problem) * problem.itemsize * len(problem.matrices)
    vectors = geometry.vectors(problem)
    twice = (vectors - geometry.resident - geometry.held) / vectors / len(problem.matrices)
    # With a row ahead, that one comes in meanwhile.
    exchange = _EXCHANGE_BYTES if geometry.rows_ahead == 1 else _EXCHANGE_BYTES / 2
    return -(-problem.rows // geometry.groups) * (part * (1 + twice) + exchange)
