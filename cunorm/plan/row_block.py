"""Rows that fit in the registers of a block, or of the blocks of a cluster: one launch, every number moved once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import affine_constants, compute_itemsize, dtype_constants, vector_width
from cunorm.plan.launches import Builder, Constants, Device, Value
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Matrix

__all__ = ["RowBlock", "backward_geometry", "candidates", "forward_geometry", "plan_backward", "plan_forward"]

Problem = ForwardProblem | BackwardProblem

# What the kernels declare of shared memory themselves, at most.
_STATIC_SHARED_BYTES = 3 * 1024


@dataclass(frozen=True)
class RowBlock:
    """How rows lie over threads, and how they come from memory (see kernels/row_stage.cuh)."""

    width: int  # elements of a vector
    vectors: int  # of a thread
    threads_per_row: int
    rows_per_block: int = 1
    blocks_per_row: int = 1
    stage: str = "direct"  # or "ahead", or "run"
    peeled: bool = False
    weights_staged: bool = False
    blocks_per_multiprocessor: int = 0  # that take turns over the rows; 0: a block for every group of rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.rows_per_block

    @property
    def capacity(self) -> int:
        """Columns that the threads of a row can hold."""
        return self.blocks_per_row * self.threads_per_row * self.vectors * self.width

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory: for the tensors that come through it, and those that leave; then for weights."""
        elements = self.threads * self.vectors * self.width
        tensors = 0
        if self.stage != "direct":
            tensors = len(_read(problem)) + (len(_written(problem)) if self.stage == "run" else 0)
        total = tensors * (elements * DTYPES[problem.x.dtype].itemsize + (32 if self.stage == "run" else 0))
        if self.weights_staged:
            total += sum(elements * DTYPES[item.dtype].itemsize for item in (problem.weight, problem.bias) if item)
        if isinstance(problem, BackwardProblem) and self.rows_per_block > 1:
            # The sums of half the rows, when they are added up at the end.
            columns = (problem.columns // self.width + 1) * self.width
            total = max(total, self.rows_per_block // 2 * columns * compute_itemsize(problem))
        return total

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block of a row takes; the last may have fewer."""
        return -(-problem.columns // self.blocks_per_row // self.width) * self.width

    def constants(self, problem: Problem) -> Constants:
        return {
            "VECTOR": self.width,
            "VECTORS": self.vectors,
            "THREADS_PER_ROW": self.threads_per_row,
            "ROWS_PER_BLOCK": self.rows_per_block,
            "BLOCKS_PER_ROW": self.blocks_per_row,
            "STAGE": self.stage,
            "PEELED": int(self.peeled),
            "WEIGHTS_STAGED": int(self.weights_staged),
            "FULL": int(self.capacity == problem.columns and not self.peeled),
        }

    def groups(self, problem: Problem, device: Device) -> int:
        """How many groups of ``blocks_per_row`` blocks are launched."""
        all_rows = -(-problem.rows // self.rows_per_block)
        most = self.blocks_per_multiprocessor * device.groups(self.blocks_per_row)
        if not most or all_rows <= most:
            return all_rows
        if not self.peeled:
            return most
        # All rows of a thread begin equally far from a multiple of 16 bytes: a step over rows is whole vectors.
        periods = (self.width // math.gcd(self.width, matrix.row_strides[0]) for matrix in problem.matrices)
        step = math.lcm(self.rows_per_block, *periods) // self.rows_per_block
        return min(all_rows, max(1, most // step) * step)


def _read(problem: Problem) -> list[Matrix]:
    if isinstance(problem, ForwardProblem):
        matrices = [problem.x, problem.residual]
    else:
        matrices = [problem.x, problem.dy, problem.dresidual_out]
    return [matrix for matrix in matrices if matrix is not None]


def _written(problem: Problem) -> list[Matrix]:
    return problem.matrices[len(_read(problem)) :]


@dataclass(frozen=True)
class _Tuning:
    """Knobs of `_spread`, in 4-byte registers that a thread's part of a row takes.

    A row is spread over threads so that each has about ``aim`` registers of it, while ``most_threads`` suffice; then
    over more registers a thread, then over more threads. ``limits`` are (threads, registers): the most for rows shared
    by so many threads, nearly all that a thread has; past the last, a row is too long for one block. Blocks of short
    rows have at least ``block_threads`` threads. A compile for every architecture shows that nothing spills.
    """

    aim: int
    most_threads: int
    block_threads: int
    limits: tuple[tuple[int, int], ...]


# Measured on an H200 by time over the time of a copy of the same bytes, 32768 rows or 100 MB and more.
# Forward: at 4096 columns of bfloat16, 128 threads of 4 vectors take 1.04, 256 of 2 vectors 1.26; at 8192, 128 of 8
# beat 256 of 4 by 4 %, and blocks of more than one such row lose 10 %.
_FORWARD = _Tuning(16, 128, 64, ((256, 36), (512, 32)))
_LONG_FORWARD = _Tuning(64, 512, 512, ((512, 64),))
_RUN_FORWARD = _Tuning(12, 256, 256, ((256, 24), (512, 40)))
# Backward: at 1000 columns of float32, 64 threads of 4 vectors take 1.05, 128 of 2 vectors 1.24. Sixteen-bit data has
# twice the sums a vector: two vectors a thread are best up to 512 columns; from 1024 on four, in blocks of 512 threads
# (at 4096 columns 1.31 where two vectors take 1.52).
_BACKWARD = _Tuning(64, 256, 256, ((256, 80), (512, 100)))
_LONG_BACKWARD = _Tuning(100, 512, 512, ((512, 108),))
_RUN_BACKWARD = _Tuning(40, 256, 256, ((256, 80), (512, 90)))
# Persistent blocks for 512 threads a multiprocessor: 6 % faster at 4096 columns than for 1024, which leave more partial
# sums.
_PERSISTENT_THREADS = 512


def _registers(problem: Problem, width: int) -> tuple[int, int]:
    """4-byte registers for one vector of a row: what was loaded and, backward, its two column sums; and once a thread.

    A vector of less than 16 bytes counts more: there are many of them, and each has its own bounds to check. So does
    one of sixteen-bit numbers, which are unpacked. Once a thread counts the weight, and that intermediate results in
    double take twice as much.
    """
    loaded_bytes = width * DTYPES[problem.x.dtype].itemsize
    loaded, narrow = max(1, loaded_bytes // 4), loaded_bytes < 16
    if isinstance(problem, ForwardProblem):
        return loaded + narrow, 0
    weight_bytes = 0 if problem.weight is None else width * DTYPES[problem.weight.dtype].itemsize
    sums = 2 * width * compute_itemsize(problem) // 4
    unpacked = DTYPES[problem.x.dtype].itemsize == 2 and not narrow
    more = weight_bytes // 4 + 8 * (problem.x.dtype == "float64") + 24 * (problem.norm.activation is not None)
    return 2 * loaded + sums + 4 * narrow + unpacked, more


def _spread(problem: Problem, columns: int, width: int, tuning: _Tuning) -> tuple[int, int] | None:
    """Spread the columns of a row over threads: (threads, vectors of each), or None where they are too many."""
    vectors_per_row = -(-columns // width)
    registers, more_registers = _registers(problem, width)
    # The power of two from two thirds of the wanted number, exclusive, to four thirds.
    wanted = max(1, vectors_per_row * registers // tuning.aim * 4 // 3)
    threads = min(tuning.most_threads, 1 << wanted.bit_length() - 1)
    for most_threads, limit in tuning.limits:
        while threads <= most_threads:
            vectors = -(-vectors_per_row // threads)
            if vectors * registers + more_registers <= limit:
                return threads, vectors
            threads *= 2
    return None


def _is_row_matrix(problem: Problem) -> bool:
    """Whether every row is contiguous, and the rows are evenly spaced."""
    if len(problem.row_sizes) > 1 or len(problem.column_sizes) > 1:
        return False
    return problem.columns == 1 or all(matrix.column_strides[0] == 1 for matrix in problem.matrices)


def _blocks_per_row(device: Device) -> Iterator[int]:
    return (blocks for blocks in (1, 2, 4, 8, 16) if device.groups(blocks))


def _fits(geometry: RowBlock, problem: Problem, device: Device) -> bool:
    return geometry.shared_bytes(problem) + _STATIC_SHARED_BYTES <= device.shared_bytes


def _runs(problem: Problem, device: Device, width: int, tuning: _Tuning) -> RowBlock | None:
    """Rows of short vectors, which come as runs."""
    if any(matrix.row_strides[0] < 0 for matrix in problem.matrices):
        return None
    dense = problem.rows == 1 or all(matrix.row_strides[0] == problem.columns for matrix in problem.matrices)
    for blocks in _blocks_per_row(device):
        spread = _spread(problem, -(-problem.columns // blocks // width) * width, width, tuning)
        if spread is None:
            continue
        threads, vectors = spread
        if blocks > 1 and threads < 256:
            break
        if not dense and threads < 64:
            return None
        rows = max(1, tuning.block_threads // threads) if dense else 1
        geometry = RowBlock(width, vectors, threads, rows, blocks, "run")
        if _fits(geometry, problem, device):
            return geometry
    return None


def _direct(problem: Problem, width: int, tuning: _Tuning) -> RowBlock | None:
    spread = _spread(problem, problem.columns, width, tuning)
    if spread is None:
        return None
    threads, vectors = spread
    # Two neighbouring threads a row at least: at 10 columns of bfloat16 one takes 2.98 of a copy's time, two 2.05.
    if threads == 1 and vectors > 1:
        threads, vectors = 2, -(-vectors // 2)
    return RowBlock(width, vectors, threads, max(1, tuning.block_threads // threads))


def _long(problem: Problem, device: Device, width: int, tuning: _Tuning) -> RowBlock | None:
    """Rows of full vectors that are fetched ahead, over as few blocks as can hold one."""
    for blocks in _blocks_per_row(device):
        spread = _spread(problem, -(-problem.columns // blocks // width) * width, width, tuning)
        if spread is not None:
            threads, vectors = spread
            geometry = RowBlock(width, vectors, threads, max(1, tuning.block_threads // threads), blocks, "ahead")
            if _fits(geometry, problem, device):
                return geometry
    return None


def forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if problem.columns == 0 or not _is_row_matrix(problem):
        return None
    width = vector_width(problem)
    full = width * DTYPES[problem.x.dtype].itemsize == 16
    if not full:
        geometry = _runs(problem, device, width, _RUN_FORWARD)
        if geometry is not None:
            return replace(geometry, blocks_per_multiprocessor=_resident(geometry, problem, device))
    geometry = _direct(problem, width, _FORWARD)
    if geometry is None and full:
        geometry = _long(problem, device, width, _LONG_FORWARD)
        if geometry is not None:
            return replace(geometry, blocks_per_multiprocessor=1)
    return geometry


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """How the rows of a problem lie over threads; None where they are too long, or not contiguous."""
    if not _is_row_matrix(problem):
        return None
    width = vector_width(problem)
    itemsize = DTYPES[problem.x.dtype].itemsize
    full = width * itemsize == 16
    geometry = None
    if not full:
        geometry = _runs(problem, device, width, _RUN_BACKWARD)
        if geometry is not None:
            return replace(geometry, blocks_per_multiprocessor=_resident(geometry, problem, device))
    # From sm_100 on the compiler would spill.
    elif itemsize == 2 and problem.columns >= 1024 and device.capability < 100:
        geometry = _long(problem, device, width, _LONG_BACKWARD)
    if geometry is None:
        geometry = _direct(problem, width, _BACKWARD)
    if geometry is None and full:
        geometry = _long(problem, device, width, _BACKWARD)
    return geometry and replace(geometry, blocks_per_multiprocessor=max(1, _PERSISTENT_THREADS // geometry.threads))


def _resident(geometry: RowBlock, problem: Problem, device: Device) -> int:
    """How many blocks of runs share a multiprocessor."""
    # The runtime keeps 1 KB of shared memory for itself; the kernels' own arrays are small where rows are runs.
    by_memory = (device.shared_bytes + 1024) // (geometry.shared_bytes(problem) + _STATIC_SHARED_BYTES)
    by_registers = 65536 // (geometry.threads * 64)
    return max(1, min(by_memory, by_registers, device.threads_per_multiprocessor // geometry.threads))


def _ways(problem: Problem) -> Iterator[tuple[int, str, bool]]:
    """The ways in which rows can come: (width, stage, peeled)."""
    itemsize = DTYPES[problem.x.dtype].itemsize
    width, piece = vector_width(problem), 16 // itemsize
    yield width, "direct", False
    if width == piece:
        yield width, "ahead", False
        return
    strides = [matrix.row_strides[0] for matrix in problem.matrices]
    if problem.rows == 1 or all(stride == problem.columns for stride in strides):
        yield width, "run", False
    if problem.columns >= 4 * piece:
        yield piece, "direct", True
        if all(matrix.alignment == 16 for matrix in problem.matrices) and len(set(strides)) == 1:
            yield piece, "ahead", True


def candidates(problem: Problem, device: Device) -> Iterator[RowBlock]:
    """Every geometry that is worth a try for a problem, for whoever measures."""
    if problem.columns == 0 or not _is_row_matrix(problem):
        return
    itemsize = DTYPES[problem.x.dtype].itemsize
    forward = isinstance(problem, ForwardProblem)
    for width, stage, peeled in _ways(problem):
        registers, more_registers = _registers(problem, width)
        for blocks in _blocks_per_row(device):
            columns = -(-problem.columns // blocks) - (2 * width if peeled else 0)
            if blocks > 1 and columns * itemsize < 8192:
                break
            for threads_per_row in (1 << i for i in range(5 if peeled else 0, 11)):
                vectors = -(-columns // (threads_per_row * width))
                if vectors > 40 or (vectors == 1 and threads_per_row * width >= 2 * columns):
                    continue
                for rows in (1 << i for i in range(9)):
                    threads = threads_per_row * rows
                    available = min(255, 65536 // threads // 8 * 8) - 24 if threads <= 1024 else 0
                    if threads < (64 if blocks == 1 else 128) or vectors * registers + more_registers > available:
                        continue
                    if rows > 1 and (blocks > 1 or threads > 512):
                        continue
                    for staged in (False, True) if stage == "ahead" and rows == 1 else (False,):
                        geometry = RowBlock(width, vectors, threads_per_row, rows, blocks, stage, peeled, staged)
                        if not _fits(geometry, problem, device):
                            continue
                        if forward and stage == "direct":
                            yield geometry
                        most = _resident(geometry, problem, device)
                        yield from (
                            replace(geometry, blocks_per_multiprocessor=share)
                            for share in (1, 2, 3, 4, 6, 8, 12, 16)
                            if share <= most
                        )


def plan_forward(problem: ForwardProblem, geometry: RowBlock, device: Device, builder: Builder) -> str:
    builder.launch(
        "row_block_forward",
        dtype_constants(problem)
        | geometry.constants(problem)
        | {"HAS_RESIDUAL": int(problem.residual is not None)}
        | affine_constants(problem, geometry.width),
        geometry.groups(problem, device) * geometry.blocks_per_row,
        (geometry.threads_per_row, geometry.rows_per_block),
        {
            **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
            **_sizes(problem, geometry),
            **_strides(x=problem.x, residual=problem.residual, y=problem.y, residual_out=problem.residual_out),
            "eps": problem.eps,
        },
        geometry.shared_bytes(problem),
        geometry.blocks_per_row,
    )
    return _strategy(geometry)


def plan_backward(problem: BackwardProblem, geometry: RowBlock, device: Device, builder: Builder) -> str:
    groups = geometry.groups(problem, device)
    targets, target_constants = column_sum_targets(builder, problem, groups)
    builder.launch(
        "row_block_backward",
        dtype_constants(problem)
        | geometry.constants(problem)
        | {"WANTS_DX": int(problem.dx is not None), "HAS_DRESIDUAL": int(problem.dresidual_out is not None)}
        | affine_constants(problem, geometry.width)
        | target_constants,
        groups * geometry.blocks_per_row,
        (geometry.threads_per_row, geometry.rows_per_block),
        {
            **{name: name for name in ("x", "dy", "dresidual_out", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **_sizes(problem, geometry),
            **_strides(x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out, dx=problem.dx),
        },
        geometry.shared_bytes(problem),
        geometry.blocks_per_row,
    )
    launch_column_sums(builder, problem, targets, groups)
    return _strategy(geometry)


def _sizes(problem: Problem, geometry: RowBlock) -> dict[str, Value]:
    return {
        "rows": problem.rows,
        "columns": problem.columns,
        "columns_per_block": geometry.columns_per_block(problem),
    }


def _strides(**matrices: Matrix | None) -> dict[str, Value]:
    return {f"{name}_stride": matrix.row_strides[0] if matrix else 0 for name, matrix in matrices.items()}


def _strategy(geometry: RowBlock) -> str:
    return "row_block" if geometry.blocks_per_row == 1 else "row_cluster"
