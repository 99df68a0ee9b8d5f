"""Rows that do not all begin and end at multiples of 16 bytes.

The numbers are of an H200, as the time over that of a copy of the same bytes, where nothing else is said.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_activated import activated_peeled_backward
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits, fits_early, fits_registers, resident, with_registers
from cunorm.plan.row_half import row_of_half_vectors
from cunorm.plan.row_memory import has_several_channels, lie_alike
from cunorm.plan.row_peeled import peeled_directly
from cunorm.plan.row_plain import plain_half_backward, plain_peeled_backward
from cunorm.plan.row_shared import shared_row
from cunorm.plan.row_short import SHORT_BYTES, short_row
from cunorm.plan.row_spread import MOST_THREADS, of_few, rows_per_block, spread, vectors_for_all_threads
from cunorm.plan.row_weights import backward_weights
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["narrow"]


def narrow(problem: Problem, device: Device, width: int) -> RowBlock | None:
    """Rows that do not all begin and end at multiples of 16 bytes."""
    itemsize = problem.itemsize
    piece = 16 // itemsize
    forward = isinstance(problem, ForwardProblem)
    if isinstance(problem, ForwardProblem):
        better = row_of_half_vectors(problem, device, width)
    else:
        better = plain_half_backward(problem, device, width)
    if better is not None:
        return better
    if problem.columns * itemsize < SHORT_BYTES:
        return short_row(problem, device, width)
    # What does not lie alike is better read number by number: 4096 columns of float32 that begin 4 bytes late take 1.09
    # so, peeled 1.38.
    may_peel = forward or not has_several_channels(problem)
    if may_peel and lie_alike(problem) and device.capability >= 80:
        return _peeled_alike(problem, device, piece)
    vectors_per_row = problem.columns // width
    # 257 columns of float32: 32 threads of 9 take 1.15, 16 of 17 1.58; 1023: 128 of 8 1.11, 64 of 16 1.18.
    wanted = 6 if forward and 128 <= vectors_per_row <= 1024 else 8.5
    threads, vectors = spread(vectors_per_row, of_few(problem, device, vectors_per_row, wanted))
    if not fits_registers(problem, device, width, vectors, max(threads, 256)):
        return _peeled_otherwise(problem, device, piece) if may_peel else None
    rows = max(1, 64 // threads) if forward else rows_per_block(problem, device, 256 // threads, threads)
    geometry = RowBlock(width, vectors, threads, rows)
    if forward:
        early = replace(geometry, weights="early")  # 257 columns of bfloat16: 1.65, late 1.76
        return early if threads == 32 and fits_early(early, problem, device) else geometry
    most = max(1, device.threads_per_multiprocessor // geometry.threads)
    return replace(geometry, blocks_per_multiprocessor=min(2, most))


def _peeled_alike(problem: Problem, device: Device, width: int) -> RowBlock | None:
    """Rows that lie alike in all tensors, whose edges are peeled off. Most come ahead, their weights at hand."""
    forward = isinstance(problem, ForwardProblem)
    if isinstance(problem, ForwardProblem):
        geometry = peeled_directly(problem, device, width)
    else:
        geometry = activated_peeled_backward(problem, device, width) or plain_peeled_backward(problem, device, width)
    if geometry is not None:
        return geometry
    vectors_per_row = problem.columns // width
    few = vectors_for_all_threads(problem, device, vectors_per_row) < 12
    threads, vectors = _spread_peeled(problem, device, width, direct=False)
    if vectors > (16 if forward else 12) or not fits_registers(problem, device, width, vectors, threads, True, False):
        return shared_row(problem, device, width, peeled=True)
    light = device.has_fast_memory and problem.norm.activation is None
    many = vectors > (4 if light else 6) and vectors_per_row > 1024
    if not forward and width == 8 and many and device.capability == 90:
        # 12,001 columns of bfloat16 take 1.16 by pairs of blocks, by one 1.23 (under silu 10,001 2.13 and 1.81). On an
        # H100 14,001 take 1.14 and 1.17, 15,873 1.08 and 1.19.
        shared = shared_row(problem, device, width, peeled=True)
        if shared is not None:
            return shared
    rows, most = _crowd_of_peeled(vectors, threads, forward)
    if not forward and vectors > 1 and rows > 2 and not few:
        rows //= 2  # 1025 columns of bfloat16 take 1.12 so, with a residual 1.13, by twice the rows 1.13 and 1.17
    rows = rows_per_block(problem, device, rows, threads) if vectors_per_row <= 256 else 1
    geometry = RowBlock(width, vectors, threads, rows, 1, "ahead", True, "staged")
    if isinstance(problem, BackwardProblem):
        geometry = replace(geometry, weights=backward_weights(geometry, problem, device))
    in_turns = replace(geometry, blocks_per_multiprocessor=1)  # what is staged depends on it
    share = max(1, min(most // geometry.threads, resident(in_turns, problem, device)))
    if not fits(geometry, problem, device):
        shared = shared_row(problem, device, width, peeled=True)
        return shared or _read_directly(problem, device, width, threads, vectors)
    geometry = replace(geometry, blocks_per_multiprocessor=share)
    if not forward and device.capability != 90:  # for which the shares were measured, and next to nothing spills
        geometry = with_registers(geometry, problem, device)
        if geometry.weights == "early" and not fits_early(geometry, problem, device):
            geometry = replace(geometry, weights="staged")
    early = replace(geometry, weights="early")
    # 4097 columns of bfloat16 take 1.13 so, staged 1.13, with a residual 1.10 and 1.13, RMS norm 1.11 and 1.12.
    better = not forward and width == 8 and (threads, vectors) == (128, 4) and problem.parameters
    return early if better and fits_early(early, problem, device) else geometry


def _peeled_otherwise(problem: Problem, device: Device, width: int) -> RowBlock | None:
    """Rows that do not lie alike, or on older GPUs: their edges are peeled off, and they are read directly."""
    threads, vectors = _spread_peeled(problem, device, width, direct=True)
    if vectors > 12 or not fits_registers(problem, device, width, vectors, threads, True, True):
        return None
    return _read_directly(problem, device, width, threads, vectors)


def _read_directly(problem: Problem, device: Device, width: int, threads: int, vectors: int) -> RowBlock | None:
    geometry = RowBlock(width, vectors, threads, max(1, 128 // threads), 1, "direct", True)
    if not fits(geometry, problem, device):
        return None
    return geometry if isinstance(problem, ForwardProblem) else _persistent(geometry, problem, device)


def _persistent(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock:
    """With as many blocks as fit, up to 1024 threads a multiprocessor."""
    most = max(1, 1024 // geometry.threads)
    return replace(geometry, blocks_per_multiprocessor=min(most, resident(geometry, problem, device)))


def _crowd_of_peeled(vectors: int, threads: int, forward: bool) -> tuple[int, int]:
    """Rows of a block where they are short, and threads of a multiprocessor.

    bfloat16 forward, of what is not read directly: 4097 columns (8 vectors a thread) take 1.17 with 256 threads a
    multiprocessor, with 384 1.20. Backward: 257 take 1.57 with 768, with 512 and two rows ahead 1.72.
    """
    if forward:
        most = 768 if vectors <= 2 else 512 if vectors <= 4 else 384 if vectors <= 7 else 256
        return (256 if vectors <= 2 else 64) // threads, most
    return 256 // threads, 768 if vectors == 1 else 512


def _spread_peeled(problem: Problem, device: Device, width: int, direct: bool) -> tuple[int, int]:
    """Threads, a warp at least, and vectors of each; more threads where registers would not do.

    bfloat16 forward: 1023 columns take 1.47 with 32 threads of 4, 15,873 1.31 with 128 of 16 and 2.01 with 256 of 8.
    Backward: 1023 columns take 1.28 with 64 threads of 2, 4097 1.15 with 128 of 4 and 1.27 with 64 of 8, 4095 not by 64
    of 8, 15,873 1.17 with 256 of 8; 8191 1.13 with 128 of 8, with 256 of 4, of which one block has room, 1.33, but 2048
    rows of them 1.53 and 1.43. float32: 10,001 columns take 1.06 with 512 threads of 5, with 256 of 10 1.08, and
    backward 4097 1.09 with 512 of 2, with 256 of 4 1.11.
    """
    forward, vectors_per_row = isinstance(problem, ForwardProblem), problem.columns // width
    few = vectors_for_all_threads(problem, device, vectors_per_row) < 12
    # How many vectors a thread has at least, of rows of up to so many.
    brackets: list[tuple[float, float]] = [(256, 1.9), (math.inf, 5.0)]
    if forward and width == 4 and not direct:
        brackets = [(2048, 7.5), (math.inf, 4.5)]
    elif not forward and width == 4:
        brackets = [(math.inf, 1.9)]
    elif not forward:
        brackets = [(256, 1.9), (384, 4.0), (511, 3.0), (704, 4.0), (1024 if few else 768, 2.4), (math.inf, 5.0)]
    wanted = next(least for most, least in brackets if vectors_per_row <= most)
    threads, _ = spread(vectors_per_row, of_few(problem, device, vectors_per_row, wanted) if forward else wanted)
    if forward and width == 8:
        threads = min(threads, 128)
    threads = max(32, threads)
    vectors = -(-vectors_per_row // threads)
    while threads < MOST_THREADS and not fits_registers(problem, device, width, vectors, threads, True, direct):
        threads *= 2
        vectors = -(-vectors_per_row // threads)
    return threads, vectors
