"""Rows that fit in the registers of a block, or of the blocks of a cluster: every number is moved once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.plan.cache_hints import is_kept_ahead, is_kept_read_once
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.constants import (
    affine_constants,
    channel_numbers,
    dtype_constants,
    row_strides,
    segment_numbers,
    shift_constants,
)
from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.launches import Builder, Constants, Value
from cunorm.plan.row_memory import (
    are_shifted,
    columns_per_block,
    compute_itemsize,
    lie_alike,
    margin_of,
    vector_shift,
    weights_of,
)
from cunorm.plan.running import running_numbers, running_pointers, running_types
from cunorm.plan.zeros import reserve_counters
from cunorm.problem import DTYPES, BackwardProblem, Channels, ForwardProblem, Problem

__all__ = ["RowBlock"]

# Rows for each group of blocks that takes turns, from which on they are claimed. 528 rows of 65,536 bfloat16 numbers, 8
# for each cluster, take 1.12 either way, the clearing of the counter included; 1024 1.11, with fixed shares 1.19.
_LEAST_CLAIMED = 8
# Rows that are claimed, which 32 bits count.
_MOST_CLAIMED = 1 << 31
# Vectors of a thread, at most, of rows of channels of which a block is compiled for one group.
_MOST_IN_ONE_TURN = 4
# Of a row of one channel, at most, that has no branches around vectors forward.
_MOST_SHORT_BYTES = 2048
# Of all blocks of a multiprocessor, where a thread has most of its registers.
_FEW_THREADS = 512
# As kernels/copy_async.cuh has it.
_COPY_ALIGNMENT = 128
# Bytes that memory gives at a time, as kernels/row_stage.cuh has it.
_SECTOR = 32
# Threads of a row that is staggered, at least; and vectors of a multiprocessor, at most, where much else is kept.
_LEAST_STAGGERED_THREADS, _MOST_STAGGERED_VECTORS = 16, 1280


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
    weights: str = "late"  # or "early" or "staged" (see kernels/row_affine.cuh)
    blocks_per_multiprocessor: int = 0  # that take turns over the rows; 0: a block for every group of rows
    rows_ahead: int = 1  # of each row of a block, that are on their way where the stage is ahead
    min_blocks: int = 1  # for so many on a multiprocessor, at least, the compiler is to leave registers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_per_row * self.rows_per_block

    @property
    def capacity(self) -> int:
        """Columns that the threads of a row can hold."""
        return self.blocks_per_row * self.threads_per_row * self.vectors * self.width

    def staged_elements(self, problem: Problem) -> int:
        """Of a weight or bias that is staged: those of a row, or of each row of a block; see kernels/row_affine.cuh."""
        forward = isinstance(problem, ForwardProblem)
        anywhere = self.peeled or any(self.weight_shifts(problem))
        as_in_memory = isinstance(problem, ForwardProblem) and anywhere and not self.takes_turns(problem)
        shared = as_in_memory or (forward and not self.peeled)
        vectors = self.threads_per_row * self.vectors * (1 if shared else self.rows_per_block)
        return -(-vectors // 8) * 8 * self.width + 32 * as_in_memory

    def weight_shifts(self, problem: Problem) -> tuple[int, int]:
        """How many elements weight and bias begin behind a multiple of 16 bytes, where that is known to the kernel.

        It is of no use backward, or where they are staged for many turns: they are read once then. Where rows are
        peeled, a thread's weights begin anywhere; and those of a run are read by no more than a vector of it is. 4096
        columns of bfloat16 with float32 weights and biases that begin 4 bytes late take 1.02 so, number by number 1.74
        (sixteen-bit ones 1.00 and 1.19 on an H100).
        """
        if not isinstance(problem, ForwardProblem) or problem.channels is not None:
            return 0, 0
        if self.peeled or self.stage == "run" or (self.weights == "staged" and self.takes_turns(problem)):
            return 0, 0
        return vector_shift(problem.weight, self.width), vector_shift(problem.bias, self.width)

    def shared_bytes(self, problem: Problem, staggered: bool = False) -> int:
        """Dynamic shared memory: for the tensors that come through it, and those that leave; then for weights."""
        elements = self.threads * self.vectors * self.width
        through = {"direct": (), "ahead": problem.matrices_read, "run": problem.matrices}[self.stage]
        slot_bytes = elements * problem.itemsize + (32 if self.stage == "run" else 0)
        slot_bytes += self.rows_per_block * _COPY_ALIGNMENT * are_shifted(problem)
        slot_bytes += self.threads // min(32, self.threads_per_row) * self.vectors * _SECTOR * staggered
        total = len(through) * slot_bytes * (self.rows_ahead if self.stage == "ahead" else 1)
        if self.weights == "staged" and problem.channels is None:
            staged = self.staged_elements(problem)
            total += sum(staged * DTYPES[item.dtype].itemsize for item in problem.parameters)
        elif self.weights == "staged":
            total += 2 * self.threads * len(problem.parameters) * compute_itemsize(problem)
        if isinstance(problem, BackwardProblem) and problem.channels is not None:
            total += 4 * self.channel_sums(problem) * compute_itemsize(problem)
        elif isinstance(problem, BackwardProblem):
            # At the end, the sums of half the rows, when they are added up; or of a peeled row, to be put in order.
            rows = max(int(self.peeled), self.rows_per_block // 2)
            columns = (self.columns_per_block(problem) // self.width + 1) * self.width
            total = max(total, rows * columns * compute_itemsize(problem))
        return total

    def bytes_of_sums(self, problem: Problem) -> int:
        """Shared memory that the kernel declares: up to two sums of each warp of a row, in two places."""
        return 2 * 2 * -(-self.threads_per_row // 32) * self.rows_per_block * compute_itemsize(problem)

    def columns_per_block(self, problem: Problem) -> int:
        """How many columns each block of a row takes; the last may have fewer."""
        return columns_per_block(problem, self.blocks_per_row, self.width)

    def whole_vectors(self, problem: Problem) -> int:
        """How many vectors of each thread the kernel need not ask for: they are there in every row and part of it.

        100,000 columns of float16 take 1.11 so, with a branch for each vector 1.23 (backward 1.17 and 1.28), 50,257
        1.19 and 1.22 (1.30 with 3 of 7, 1.40 with none); under silu 1000 1.04 and 1.08. Where clusters have weights and
        biases at hand, one branch does no harm: 98,304 columns take 1.10 with it, 1.16 without, 262,144 1.05 and 1.09.
        """
        if self.capacity == problem.columns and not self.peeled and not self._has_weights_at_hand(problem):
            return self.vectors
        if self._wants_branches(problem):
            return 0
        least = problem.columns - (self.blocks_per_row - 1) * self.columns_per_block(problem)
        if self.peeled:
            least -= 2 * margin_of(problem, self.width, self.weights) + self.width - 1
        most = self.vectors - int(self._has_weights_at_hand(problem))
        if self.peeled and isinstance(problem, BackwardProblem):
            most = int(problem.dresidual_out is None)  # with more 8 to 136 bytes would spill
        return min(most, max(0, least) // self.width // self.threads_per_row)

    def _has_weights_at_hand(self, problem: Problem) -> bool:
        """Whether it is a cluster that has weights and biases by column at hand, forward."""
        forward = isinstance(problem, ForwardProblem) and self.blocks_per_row > 1 and problem.channels is None
        return forward and len(problem.parameters) == 2 and self.stage == "ahead"

    def _wants_branches(self, problem: Problem) -> bool:
        """Whether ptxas had better have a branch for each vector, which keeps it from loading too many at once.

        Read directly, peeled rows of 4097 columns take 1.06 so, else 1.22; RMS norm of 5120 1.02 and 1.08, but 4000 of
        layer norm 1.02 and 0.99. Backward 65,537 take 1.32 so, else 1.50, but 50,257, of which a thread has 7 vectors,
        1.40 and 1.30. Under an activation 8191 take 1.53 so, else 1.39. Peeled rows of float32 are better off so:
        50,257 columns take 1.16 backward, else 1.22. Rows of several channels were not measured.
        """
        if problem.channels is not None and (problem.is_by_channel or isinstance(problem, BackwardProblem)):
            return not self._is_short_of_one_channel(problem.channels, problem)
        if self.peeled and self.width < 8:
            return True
        activated = problem.norm.activation is not None
        if isinstance(problem, BackwardProblem):
            return self.peeled and (self.vectors < 6 or (self.blocks_per_row == 1 and not activated))
        if activated:
            return False
        like_x = [item for item in problem.parameters if item.dtype == problem.x.dtype]
        return self.stage == "direct" and (self.peeled or problem.residual is not None or len(like_x) < 2)

    def _is_short_of_one_channel(self, channels: Channels, problem: Problem) -> bool:
        """Whether branches cost more than they are good for, in a row that is short, of a channel.

        On an H200 256 x 1024 x 7^2 float16 numbers take 0.49 without as a run (see row_short.py), 64 x 4096 x 6^2 under
        silu 0.76, 256 x 256 x 14^2 0.92, 64 x 256 x 28^2 0.98; but 64 x 64 x 56^2 1.08. Backward 128 x 2048 x 5^2
        float32 numbers under silu 0.80, but 256 x 512 x 7^2 of float16 1.04.
        """
        if channels.channels_per_row > 1 or self.peeled or problem.itemsize == 8:
            return False
        if isinstance(problem, BackwardProblem):
            return self.width == 1 and (problem.itemsize == 4 or self.stage == "run")
        return problem.columns * problem.itemsize <= _MOST_SHORT_BYTES

    def weights_of(self, problem: Problem) -> str:
        return weights_of(problem, self.columns_per_block(problem), self.width, self.peeled)

    def stages_channels(self, problem: Problem) -> bool:
        """Whether weights by channel can be staged: the threads of a row load one each, and wait for each other."""
        assert problem.channels is not None
        if not problem.parameters or self.weights_of(problem) == "part" or self.threads_per_row <= 32:
            return False
        return (self.columns_per_block(problem) - 1) // problem.channels.positions + 2 <= self.threads_per_row

    def channel_constants(self, problem: BackwardProblem) -> Constants:
        """Which threads, and which vectors of each, lie in one channel; and how many threads add up its entries."""
        segment = steps = lanes = 1
        kind = self.weights_of(problem)
        if problem.channels is not None and kind in ("vector", "crossing"):
            vectors = problem.channels.positions // self.width
            if kind == "vector":
                segment = math.gcd(32, self.threads_per_row, vectors)
                if vectors % self.threads_per_row == 0:
                    steps = math.gcd(self.vectors, vectors // self.threads_per_row)
            lanes = 1 << min(32, self.threads_per_row, vectors // (segment * steps)).bit_length() - 1
        return {"SEGMENT": segment, "STEPS": steps, "LANES": lanes}

    def channel_sums(self, problem: BackwardProblem) -> int:
        """How many pairs of sums the threads leave in shared memory for each group of rows."""
        kind, channels = self.weights_of(problem), problem.channels
        if kind not in ("vector", "crossing") or channels is None or not problem.sums:
            return 0
        constants = self.channel_constants(problem)
        entries = self.threads * self.vectors // (int(constants["SEGMENT"]) * int(constants["STEPS"]))
        of_channels = self.rows_per_block * self.columns_per_block(problem) // channels.positions
        return entries + (of_channels if kind == "crossing" else 0)

    def compiled_for(self, problem: Problem) -> int:
        """For how many blocks on a multiprocessor the compiler is to leave registers."""
        if self.stage != "ahead" or problem.itemsize == 8:  # doubles would spill
            return self.min_blocks
        # A block that comes ahead in a second wave would take as long as all.
        return max(self.min_blocks, self.blocks_per_multiprocessor)

    def takes_turns(self, problem: ForwardProblem) -> bool:
        """Whether a block is compiled for several groups of rows, forward.

        It is so for a single one too where ptxas does better: without the loop 8 vectors of one channel spill 24 to 48
        bytes, and each number of a row that is read number by number has a branch around it, unless the row is full.
        Read so, 32,768 rows of 4095 float32 numbers take 1.87 then, with it 1.08. Where a thread has few vectors of a
        channel, there is nothing to keep for the next row: on an H100 such norms take 0.94 to 1.01 of the time without.
        """
        if self.blocks_per_multiprocessor > 0:
            return True
        if problem.channels is not None and not problem.is_bare:
            return self.vectors > _MOST_IN_ONE_TURN
        narrow = self.width * problem.itemsize < 16
        return narrow and self.capacity != problem.columns and self.weights == "late"

    def has_one_turn(self, problem: BackwardProblem, device: Device) -> bool:
        """Whether each block is compiled for one group of rows, backward, where it has no more.

        On an H100 tiny norms of channels take 0.96 to 0.99 of the time so, layer norm of one row 0.89 to 0.98. But
        channels of 7 vectors a thread take 1.07 to 1.10, rows that clusters share 1.03 to 1.07, and layer norm of 512
        rows of 256 and 1024 numbers 1.01 to 1.04; that of fewer, 0.99 to 1.03, is not worth a kernel of its own.
        """
        groups = self.groups(problem, device)
        if self.stage != "direct" or self.blocks_per_row > 1 or groups * self.rows_per_block < problem.rows:
            return False
        if problem.channels is not None or problem.is_bare:
            return self.vectors <= _MOST_IN_ONE_TURN
        return groups == 1

    def claims_rows(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether those who take turns get each row from a counter (see kernels/row_block_forward.cu).

        Then they need not wait for the slowest multiprocessors: 8192 rows of 65,536 bfloat16 numbers, shared by
        clusters of two blocks, take 1.04, in fixed shares 1.11; 4096 of 131,072 1.02 and 1.09; 65,536 of 4097, a block
        each, 1.10 and 1.14. But 8192 of 50,257 float32 numbers in clusters 1.20 and 1.14. With 64 registers a thread
        some would spill, and so would 16 vectors of a thread under the exact gelu.
        """
        possible = self.rows_per_block == 1 and self.threads_per_row > 32 and self.stage != "run"
        possible = possible and (self.stage == "direct" or self.rows_ahead == 1)
        possible = possible and not (self.peeled and self.blocks_per_row > 1 and self.width < 8)
        possible = possible and REGISTERS // self.threads >= 80 * self.compiled_for(problem)
        possible = possible and (problem.norm.activation is None or self.vectors <= 8)
        # Before sm_90 launches do not overlap, and nothing was measured.
        if not self.blocks_per_multiprocessor or not possible or device.capability < 90:
            return False
        return _LEAST_CLAIMED * self.groups(problem, device) <= problem.rows <= _MOST_CLAIMED

    def is_kept(self, problem: Problem, device: Device) -> bool:
        """Whether L2 is asked to keep what is read.

        Read directly, rows of channels had better not: 18 group and instance norms take 0.96 to 1.02 so, in the mean
        1.00. Nor had a block that has a multiprocessor for itself and adds a residual: layer norm of 32,768 bfloat16
        columns takes 1.05 so, without 1.04; but RMS norm of 65,536 without a residual 1.00, else 1.05.
        """
        if self.stage == "ahead":
            return is_kept_ahead(problem, device, peeled=self.peeled, blocks_per_row=self.blocks_per_row)
        if self.stage == "run" or problem.channels is not None or isinstance(problem, BackwardProblem):
            return False
        adds_alone = problem.residual is not None and self.min_blocks * self.threads <= _FEW_THREADS
        return not adds_alone and is_kept_read_once(problem, device)

    def constants(self, problem: Problem) -> Constants:
        return {
            "VECTOR": self.width,
            "VECTORS": self.vectors,
            "THREADS_PER_ROW": self.threads_per_row,
            "ROWS_PER_BLOCK": self.rows_per_block,
            "BLOCKS_PER_ROW": self.blocks_per_row,
            "MIN_BLOCKS": self.compiled_for(problem),
            "STAGE": self.stage,
            "ROWS_AHEAD": self.rows_ahead if self.stage == "ahead" else 1,
            "PEELED": int(self.peeled),
            "ALIKE": int(not self.peeled or lie_alike(problem)),
            "MARGIN": margin_of(problem, self.width, self.weights) if self.peeled else 0,
            "WEIGHTS": self.weights,
            **dict(zip(("WEIGHT_SHIFT", "BIAS_SHIFT"), self.weight_shifts(problem))),
            "WEIGHTS_OF": self.weights_of(problem),
            "CHANNEL_NUMBERS": len(channel_numbers(problem)),
            "SEGMENT_NUMBERS": len(segment_numbers(problem)),
            "WHOLE_VECTORS": self.whole_vectors(problem),
        }

    def is_staggered(self, problem: Problem, device: Device) -> bool:
        """Whether rows ahead lie in a sector of shared memory as they do in memory (see kernels/row_stage.cuh).

        Of use where some begin in the middle of one. Backward 1000, 3000, 12,296 and 20,008 columns of bfloat16 take
        1.05, 1.04, 1.14 and 1.08 so, else 1.12, 1.14, 1.31 and 1.24, with a residual 1.08, 1.06, 1.10 and 1.10, else
        1.13, 1.18, 1.22 and 1.29; of float32 500 and 15,876 1.08 and 1.10, else 1.15 and 1.23. Forward 25,004 of
        float32 take 1.03, else 1.05. But rows of 8 threads, 104 columns, take 1.18 and 1.15; under silu 520 1.56 and
        1.51, and 16,392, of whose five vectors of a thread every row has only three, 1.71 and 1.62; with a residual
        100,008, where 88 bytes spill, 1.37 and 1.16. Of channels, instance norm of 90^2 and 70^2 float32 numbers takes
        0.94 and 1.10 of its time. What was not timed would spill 32 to 144 bytes in part: no weights, wider ones,
        doubles, an activation beside a residual. Tensors all of whose rows begin in the middle of a sector are not
        told from others.
        """
        timed = device.capability == 90 and device.has_fast_memory and problem.itemsize <= 4
        timed = timed and problem.channels is None and len(problem.column_sizes) == 1 and not are_shifted(problem)
        timed = timed and {item.dtype for item in problem.parameters} == {problem.x.dtype}
        if not timed or self.stage != "ahead" or self.peeled or self.width * problem.itemsize < 16:
            return False
        begin = [matrix.row_strides[0] for matrix in problem.matrices_read if problem.rows > 1]
        begin.append(self.columns_per_block(problem) if self.blocks_per_row > 1 else 0)
        if self.threads_per_row < _LEAST_STAGGERED_THREADS or all(at * problem.itemsize % _SECTOR == 0 for at in begin):
            return False
        added = problem.residual if isinstance(problem, ForwardProblem) else problem.dresidual_out
        if problem.norm.activation is not None:
            uneven = self.whole_vectors(problem) < self.vectors - 1
            if added is not None or uneven or self.threads_per_row <= 32:
                return False
        held = self.vectors * self.threads * self.compiled_for(problem)
        if added is not None and self.weights == "early" and held > _MOST_STAGGERED_VECTORS:
            return False
        return self._blocks_with_room(problem, device, True) == max(1, self._blocks_with_room(problem, device))

    def period(self, problem: Problem) -> int:
        """How many rows lie between two that a thread may have after each other: they begin alike in 16 bytes."""
        if not self.peeled:
            return 1
        return math.lcm(*(self.width // math.gcd(self.width, matrix.row_strides[0]) for matrix in problem.matrices))

    def _groups_in_turns(self, problem: Problem, device: Device) -> int:
        """How many groups take turns, at most; 0 where none do.

        That is as many as run at once: the rest would begin when these have ended, and take as long as they.
        """
        blocks = max(min(1, self.blocks_per_multiprocessor), self._blocks_with_room(problem, device))
        return device.groups(self.blocks_per_row, blocks)

    def _blocks_with_room(self, problem: Problem, device: Device, staggered: bool = False) -> int:
        """How many blocks of a multiprocessor take turns, at most; 0 also where the shared memory is too small."""
        exchanged = 2 * 4 * self.blocks_per_row * compute_itemsize(problem) + 32
        room = device.blocks_with(self.shared_bytes(problem, staggered) + self.bytes_of_sums(problem) + exchanged)
        return min(self.blocks_per_multiprocessor, room, device.threads_per_multiprocessor // self.threads)

    def groups(self, problem: Problem, device: Device) -> int:
        """How many groups of ``blocks_per_row`` blocks are launched."""
        all_rows = -(-problem.rows // self.rows_per_block)
        most = self._groups_in_turns(problem, device)
        if not most or all_rows <= most:
            return all_rows
        by_channel = isinstance(problem, BackwardProblem) and problem.channels is not None
        if not self.peeled or by_channel or self.classes(problem, device) > 1:
            return most  # what is summed by channel is not kept from row to row
        # All rows of a thread begin equally far from a multiple of 16 bytes: a step over rows is whole vectors.
        step = math.lcm(self.rows_per_block, self.period(problem)) // self.rows_per_block
        return min(all_rows, max(1, most // step) * step)

    def classes(self, problem: Problem, device: Device) -> int:
        """In how many ways rows begin, where each group has an equal part of them (see kernels/row_share.cuh).

        It is so where groups that take turns would leave many places for clusters empty, or have no place. On an H100
        4096 rows of 131,073 bfloat16 numbers take 1.31 so, in turns 2.13; 8192 of 65,537 1.20 and 2.10; 16,384 of
        35,001 1.18 and 1.31; 8192 of 50,257 1.11 and 1.17; 2048 of 131,073 of float32 1.12 and 1.38. But few rows have
        few turns, and each share begins and ends for itself: 1024 of 50,257 take 1.34 and 1.29. And 13 vectors of
        float32 would spill.
        """
        period, most = self.period(problem), self._groups_in_turns(problem, device)
        possible = isinstance(problem, BackwardProblem) and problem.channels is None and self.blocks_per_row > 1
        if not possible or self.vectors > 12 or problem.rows <= max(most, period):
            return 1
        empty = most % period if most >= period else most
        many = most / 10 if problem.rows >= 64 * most else most / 4
        return period if empty > many else 1

    def partial_sums(self, problem: BackwardProblem, device: Device) -> int:
        """How many rows of sums for dweight and dbias they leave."""
        channels = problem.channels
        if channels is None:
            return self.groups(problem, device) + self.classes(problem, device) - 1
        parts = max(1, self.blocks_per_row // channels.channels_per_row)
        return problem.rows // channels.rows_per_sample * parts

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        if isinstance(problem, ForwardProblem):
            _plan_forward(problem, self, device, builder)
        else:
            _plan_backward(problem, self, device, builder)
        return "row_block" if self.blocks_per_row == 1 else "row_cluster"


def _plan_forward(problem: ForwardProblem, geometry: RowBlock, device: Device, builder: Builder) -> None:
    counters = geometry.period(problem) if geometry.claims_rows(problem, device) else 0
    staggered = geometry.is_staggered(problem, device)
    claimed: Value = reserve_counters(builder, counters) if counters else 0
    running = running_numbers(problem.running, problem.columns)
    builder.launch(
        "row_block_forward",
        dtype_constants(problem)
        | geometry.constants(problem)
        | shift_constants(problem, x=problem.x, residual=problem.residual)
        | {"HAS_RESIDUAL": int(problem.residual is not None), "KEPT_IN_L2": int(geometry.is_kept(problem, device))}
        | {"TAKES_TURNS": int(geometry.takes_turns(problem)), "CLAIMS": counters, "STAGGERED": int(staggered)}
        | {"RUNNING_NUMBERS": len(running)}
        | running_types(problem.running)
        | affine_constants(problem, geometry.width),
        geometry.groups(problem, device) * geometry.blocks_per_row,
        (geometry.threads_per_row, geometry.rows_per_block),
        {
            **{name: name for name in ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")},
            "claimed": claimed,
            **running_pointers(problem.running),
            **_sizes(problem, geometry),
            **row_strides(x=problem.x, residual=problem.residual, y=problem.y, residual_out=problem.residual_out),
            "eps": problem.eps,
            "channels": channel_numbers(problem),
            "segments": segment_numbers(problem),
            "running": running,
        },
        geometry.shared_bytes(problem, staggered),
        geometry.blocks_per_row,
    )


def _plan_backward(problem: BackwardProblem, geometry: RowBlock, device: Device, builder: Builder) -> None:
    groups, partials = geometry.groups(problem, device), geometry.partial_sums(problem, device)
    staggered = geometry.is_staggered(problem, device)
    targets, target_constants = column_sum_targets(builder, problem, partials)
    builder.launch(
        "row_block_backward",
        dtype_constants(problem)
        | geometry.constants(problem)
        | shift_constants(problem, x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out)
        | {"WANTS_DX": int(problem.dx is not None), "HAS_DRESIDUAL": int(problem.dresidual_out is not None)}
        | {"KEPT_IN_L2": int(geometry.is_kept(problem, device)), "STAGGERED": int(staggered)}
        | {"TAKES_TURNS": int(not geometry.has_one_turn(problem, device)), "CLASSES": geometry.classes(problem, device)}
        | affine_constants(problem, geometry.width)
        | geometry.channel_constants(problem)
        | target_constants,
        groups * geometry.blocks_per_row,
        (geometry.threads_per_row, geometry.rows_per_block),
        {
            **{name: name for name in ("x", "dy", "dresidual_out", "weight", "bias", "mean", "rstd", "dx")},
            **targets,
            **_sizes(problem, geometry),
            **row_strides(x=problem.x, dy=problem.dy, dresidual_out=problem.dresidual_out, dx=problem.dx),
            "channels": channel_numbers(problem),
            "segments": segment_numbers(problem),
        },
        geometry.shared_bytes(problem, staggered),
        geometry.blocks_per_row,
    )
    launch_column_sums(builder, problem, targets, partials)


def _sizes(problem: Problem, geometry: RowBlock) -> dict[str, Value]:
    return {
        "rows": problem.rows,
        "columns": problem.columns,
        "columns_per_block": geometry.columns_per_block(problem),
    }
