"""How rows of several channels, those of group norm, are best spread over threads and blocks of Hopper.

The numbers are of an H200, as the time over that of a copy of the same bytes, of float16 and 32 groups where nothing
else is said; two of them are without an activation and under silu.
"""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import blocks_with, fits, resident_by_memory
from cunorm.plan.row_memory import can_be_shared, columns_per_block, has_several_channels, row_width
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["ahead", "backward_geometry", "forward_geometry", "sixteen_byte_width", "with_channels"]

# Rows of fewer vectors of 16 bytes are spread as rows of columns are, but for those of `_short_forward` and
# `_short_backward`.
_FEWEST_VECTORS = 1025
_SHORT_FORWARD, _SHORT_BACKWARD = range(129, 1025), range(33, 1025)
# Those of sixteen-bit numbers that go by `_small_blocks_forward` and `_small_blocks_backward`.
_IN_SMALL_BLOCKS = range(769, 10_241)
_MOST_OF_ONE_BLOCK = 3840
_MOST_THREADS = 512
# Of a row that blocks share, none takes more than so many vectors; and forward, where that leaves none idle.
_MOST_SHARED = 4096
_MOST_FORWARD = 2560
_MOST_BLOCKS = 8
# Of few rows under an activation, 15 of each of 512 threads: 16 would spill.
_MOST_ACTIVATED = 7680
# Backward, vectors of a thread: more of sixteen-bit numbers spill, but for those of few rows that are read directly.
_MOST_VECTORS, _MOST_OF_FEW = 8, 10


def with_channels(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock:
    """The geometry, with weights by channel in shared memory, where there is room.

    There they are at hand when a row is: 256 rows of 40,960 take 1.51 and 1.91 backward when they come late, 1.33 and
    1.80 staged; of float32 1.56 and 2.24, and 1.28 and 1.83. Forward many rows hide each other's waiting: 1024 of 3136
    float32 numbers take 1.06 late, staged 1.10. But where channels begin within vectors, 1.49 and 1.37.
    """
    late, staged = (replace(geometry, weights=weights) for weights in ("late", "staged"))
    if isinstance(problem, BackwardProblem) and geometry.stage == "direct" and geometry.vectors > _MOST_VECTORS:
        return late
    if isinstance(problem, ForwardProblem):
        hidden = geometry.stage == "direct" and problem.rows > 4 * device.multiprocessors
        # Ahead, so many vectors would spill 8 bytes.
        many = geometry.stage == "ahead" and geometry.vectors >= (8 if device.capability >= 120 else 16)
        if many or (hidden and geometry.weights_of(problem) == "vector"):
            return late
    return staged if geometry.stages_channels(problem) and fits(staged, problem, device) else late


def forward_geometry(problem: ForwardProblem, device: Device) -> RowBlock | None:
    """How rows of several channels lie over threads; None where they are spread as others are.

    Those of sixteen-bit numbers go by `_small_blocks_forward`, where that is faster; the times of float16 rows that
    stand here are older. A block of 512 threads has up to 5 vectors of each; longer rows are shared by blocks of
    256 with up to 10 each, and few rows from 5 vectors on. Where all rows run at once, they are read directly, with
    so few registers that they can: 256 rows of 20,480 take 1.14, with registers for half as many blocks 1.39; 64 of
    65,536 1.26 by four blocks, by two 1.31. More come ahead: 256 rows of 40,960 take 1.10 and 1.26, directly 1.15
    and 1.27, 512 of 16,384 0.99 and 1.15, directly 1.06 and 1.23; 256 of 40,960 float32 numbers 1.05 by four
    blocks, by two of 512 threads 1.14. Few of the longest are shared by as few blocks as can: 32 of 262,144 take
    1.28 by eight of 256 threads on an H100, by four of 512 1.59.
    """
    width = sixteen_byte_width(problem, device)
    vectors_per_row = problem.columns // width if width else 0
    small = _short_forward(problem, device, width, vectors_per_row)
    small = small or _small_blocks_forward(problem, device, width, vectors_per_row)
    if small is not None:
        return small
    if vectors_per_row < _FEWEST_VECTORS:
        return None
    few = problem.rows <= device.groups(2)
    if few and problem.norm.activation is not None:
        return _few_activated(problem, device, width, vectors_per_row)
    blocks = _power_of_two(vectors_per_row, _MOST_FORWARD)
    if few and blocks > _MOST_BLOCKS:
        blocks = _power_of_two(vectors_per_row, _MOST_SHARED)
    if few and blocks == 1 and vectors_per_row > _MOST_SHARED // 2:
        blocks = 2
    if not _can_share(problem, device, blocks, width):
        return None
    if blocks == 1 and problem.rows > 4 * device.multiprocessors:
        return None  # so many hide each other's waiting
    geometry = _spread(problem, width, blocks, _MOST_THREADS if blocks == 1 else 256)
    registers = 64 if geometry.vectors <= _MOST_FORWARD // 256 else 128
    crowd = max(1, min(blocks_with(geometry, registers), device.threads_per_multiprocessor // geometry.threads))
    at_once = device.groups(blocks) * crowd
    if problem.rows <= (at_once if blocks == 1 else at_once * 3 // 5):
        # 9 and 10 vectors would spill with 64 registers.
        return replace(geometry, min_blocks=min(crowd, blocks_with(geometry, 64 if geometry.vectors <= 8 else 80)))
    while crowd > 1 and problem.rows <= device.groups(blocks) * crowd:
        crowd //= 2
    if crowd == 4 and geometry.vectors >= 6 and geometry.capacity != problem.columns:
        # Where threads have not all as many, so many would spill: on an H100 512 rows of 31,752 take 1.32 so, by three
        # 1.22, of 33,800 under silu 1.53 and 1.37, of 45,000 under relu 1.28 and 1.19.
        crowd = 3
    return ahead(geometry, crowd, problem, device)


def _short_forward(problem: ForwardProblem, device: Device, width: int, vectors_per_row: int) -> RowBlock | None:
    """Some hundred or thousand short rows, that come ahead to blocks of 128 threads with up to 8 vectors of each.

    More are read directly: they hide each other's waiting. Under relu, on an H100 and on an H200, as other rows are
    laid in brackets: 2048 rows of 1568 float16 numbers take 1.13 and 1.25 (1.26 and 1.37), of 3136 0.96 and 1.21 (1.12
    and 1.35), of 6272 1.09 and 1.15 (1.09 and 1.20), of 2048 float32 numbers 0.97 and 0.93 (1.03 and 1.05); 512 of 2592
    float16 numbers 1.04 and 1.25 (1.16 and 1.29). But 4096 of 7056 1.12 and 1.19 (1.03 and 1.15), and 256 of 6800 1.21
    and 1.33 (1.19 and 1.32).
    """
    if vectors_per_row not in _SHORT_FORWARD or not 2 < problem.rows / device.multiprocessors <= 16:
        return None
    threads = 64 if vectors_per_row <= 256 else 128
    geometry = replace(_spread(problem, width, 1, threads), rows_per_block=128 // threads)
    return ahead(geometry, 8 if geometry.vectors <= 4 else 4, problem, device)


def _small_blocks_forward(problem: ForwardProblem, device: Device, width: int, vectors_per_row: int) -> RowBlock | None:
    """Rows of sixteen-bit numbers that come ahead, by several blocks a multiprocessor which are at different points.

    On an H100, as other rows are laid in brackets: 256 rows of 10,240 take 1.04 and 1.10 (1.14 and 1.23), of 20,480
    1.03 and 1.08 (1.09 and 1.18), of 30,720 0.97 and 1.02 (1.00 and 1.13), of 65,536 1.00 and 1.08 (1.01 and 1.17), of
    81,920 1.00 and 1.07 (1.03 and 1.19); 128 of 65,536 0.98 and 1.03 (1.12 and 1.24); 32 of 40,960 1.31 and 1.38 (1.41
    and 1.54). But where some threads have a vector less than others 128 rows of 15,360 take 1.23 under silu (1.16), and
    by four blocks 128 of 30,720 1.34 and 1.42 (1.20 and 1.33).
    """
    if width != 8 or vectors_per_row not in _IN_SMALL_BLOCKS:
        return None
    few = problem.rows <= device.groups(2)
    if vectors_per_row <= _MOST_OF_ONE_BLOCK:
        geometry = _spread(problem, width, 1, 256)
        is_whole = geometry.capacity == problem.columns
        if few or problem.rows > 4 * device.multiprocessors or not (is_whole or problem.rows > device.multiprocessors):
            return None
        many = problem.rows > 2 * device.multiprocessors
        crowd = 4 if geometry.vectors <= 4 else 3 if geometry.vectors == 5 else 2 if geometry.vectors < 10 + many else 1
        return ahead(geometry, crowd, problem, device)
    blocks = _power_of_two(vectors_per_row, 1280)
    for shared, crowd in ((blocks, 4), (blocks // 2, 2)):
        geometry = _spread(problem, width, shared, 128)
        is_possible = geometry.vectors <= (10 if few else 15) and _can_share(problem, device, shared, width)
        if is_possible and geometry.capacity == problem.columns:
            return ahead(geometry, crowd, problem, device)
    return None


def _few_activated(problem: ForwardProblem, device: Device, width: int, vectors_per_row: int) -> RowBlock | None:
    """Few rows under an activation: all at once, if they can be, with as many vectors as that takes; else ahead.

    On an H100 64 rows of 122,880 take 1.26 by two blocks of 512 threads, ahead by four 1.51; and 64 of 262,144 1.26
    ahead by eight, two of which are on a multiprocessor, with one 1.32.
    """
    blocks = _power_of_two(vectors_per_row, _MOST_ACTIVATED)
    if blocks == 1 and vectors_per_row > _MOST_SHARED // 2:
        blocks = 2
    if _can_share(problem, device, blocks, width) and problem.rows <= device.groups(blocks):
        geometry = _spread(problem, width, blocks, _MOST_THREADS)
        return replace(geometry, min_blocks=2 if geometry.vectors <= 8 else 1)
    blocks = _power_of_two(vectors_per_row, _MOST_SHARED)
    if not _can_share(problem, device, blocks, width):
        return None
    geometry = _spread(problem, width, blocks, _MOST_THREADS)
    # Two of 8 vectors each would spill, but where all threads have as many.
    crowd = 2 if geometry.vectors < 8 or geometry.capacity == problem.columns else 1
    return ahead(geometry, crowd, problem, device)


def backward_geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """How rows of several channels lie over threads; None where they are spread as others are.

    Those of sixteen-bit numbers go by `_small_blocks_backward`, where that is faster; the times of float16 rows that
    stand here are older. Where all run at once, they are read directly, shared if that leaves multiprocessors idle:
    64 rows of 40,960 take 1.48 and 1.64, fetched ahead 1.56 and 1.81; 64 of 20,480 1.55 and 1.72 by two blocks, by
    one 1.61 and 1.90. Others come ahead, in blocks of 512 threads, but where these would have 8 vectors each, in
    twice as many of 256: 256 rows of 65,536 take 1.22 and 1.56 so, else 1.26 and more. All blocks have as many
    channels: 256 rows of ten channels, 40,960 float32 numbers, take 1.20 and 1.44 by two blocks, by four 1.25 and
    1.77. On an H100 64 rows of 81,920 take 1.32 and 1.42 by two blocks, which all run at once, by four 1.49 and
    1.64; and 64 of thirty channels, 122,880, 1.35 by eight blocks of four channels or two, 1.67 with one block on a
    multiprocessor, 1.78 with two, and by four blocks 1.57 and 2.06.
    """
    width = sixteen_byte_width(problem, device)
    vectors_per_row = problem.columns // width if width else 0
    if vectors_per_row in _SHORT_BACKWARD:
        return _short_backward(problem, device, width, vectors_per_row)
    small = _small_blocks_backward(problem, device, width, vectors_per_row)
    if small is not None:
        return small
    if vectors_per_row < _FEWEST_VECTORS:
        return None
    few, least = problem.rows <= device.groups(2), _power_of_two(vectors_per_row, _MOST_SHARED)
    if 2 * least > _MOST_BLOCKS:
        return None
    blocks = 2 if least == 1 and few and vectors_per_row > _MOST_SHARED // 2 else least
    while blocks > 1 and not _are_alike(problem, device, blocks, width):
        blocks //= 2
    if few and problem.rows > device.groups(blocks) and _are_alike(problem, device, 2, width):
        pair = _spread(problem, width, 2, _MOST_THREADS)
        if pair.vectors <= _MOST_OF_FEW:
            return pair
    threads = 256 if blocks > 1 and vectors_per_row <= 1280 * blocks else _MOST_THREADS
    geometry, crowd = _spread(problem, width, blocks, threads), _MOST_THREADS // threads
    if geometry.vectors <= (_MOST_VECTORS if width == 8 else _MOST_OF_FEW):
        if problem.rows <= device.groups(blocks):
            return geometry
        if width == 8 and blocks > 1 and geometry.vectors == 8 and _are_alike(problem, device, 2 * blocks, width):
            geometry, crowd = _spread(problem, width, 2 * blocks, 256), 2
    elif few and width == 8 and _can_share(problem, device, 2 * least, width):
        geometry, crowd = _spread(problem, width, 2 * least, 256), 1 if problem.norm.activation else 2
    else:
        return None
    return ahead(geometry, crowd, problem, device)


def _short_backward(problem: BackwardProblem, device: Device, width: int, vectors_per_row: int) -> RowBlock | None:
    """Short rows of several channels, by 2 to 4 vectors of a thread, and blocks of 128 threads or a few more.

    They come ahead, to 512 threads a multiprocessor; where all run at once, they are read directly, by more threads
    where these are few. On an H100, as rows of columns are laid in brackets, without an activation and under silu: 2048
    rows of 1568 float16 numbers take 1.48 and 1.61 (1.62 and 1.68), of 2048 1.28 and 1.31, of 3136 1.34 and 1.49 (1.53
    and 1.78), of 3136 float32 numbers 1.25 and 1.47 (1.26 and 1.52); 512 of 2592 1.59 and 1.71, directly 1.52 and 1.59
    (1.65 and 1.71); 64 of 1768 float32 numbers 1.51 and 1.70 by 256 threads directly, by 128 1.64 and 1.86.
    """
    ways = (64, 32), (128, 64), (512, 128), (1024, 256)
    threads = next(threads for most, threads in ways if vectors_per_row <= most)
    rows_at_once = device.multiprocessors * _MOST_THREADS // threads
    if 2 * problem.rows <= rows_at_once and vectors_per_row > 3 * threads:
        threads, rows_at_once = 2 * threads, rows_at_once // 2
    geometry = replace(_spread(problem, width, 1, threads), rows_per_block=128 // threads if threads == 32 else 1)
    if problem.rows <= rows_at_once:
        return with_channels(geometry, problem, device)
    return ahead(geometry, _MOST_THREADS // geometry.threads, problem, device)


def _small_blocks_backward(
    problem: BackwardProblem, device: Device, width: int, vectors_per_row: int
) -> RowBlock | None:
    """The same backward, by two blocks of 256 threads a multiprocessor; those of a row have about as many channels.

    On an H100, as other rows are laid in brackets: 256 rows of 10,240 take 1.23 and 1.47 (1.35 and 1.62), of 30,720 (30
    channels, 8 in three blocks and 6 in one) 1.35 under silu (1.81), of 32,768 1.25 and 1.27 (1.27 and 1.54), of 65,536
    1.16 and 1.18 (1.17 and 1.29); 32 of 65,536 1.51 under silu (1.74). But 256 of 16,384 take 1.25 without it (1.20),
    128 of 32,768 1.35 (1.27); under it 128 of 20,480 1.62 (1.55), 64 of 32,768 1.63 (1.48).
    """
    if width != 8 or vectors_per_row not in _IN_SMALL_BLOCKS:
        return None
    blocks, one, half = _power_of_two(vectors_per_row, 1280), device.multiprocessors, device.groups(2)
    # So many rows without an activation, or fewer, and so many under one are better laid otherwise.
    most = {1: (half, one), 2: (problem.rows, one), 4: (one, half), 8: (half, 0)}[blocks]
    if problem.rows <= most[problem.norm.activation is not None] or not _can_share(problem, device, blocks, width):
        return None
    geometry = _spread(problem, width, blocks, 256)
    is_even = columns_per_block(problem, blocks, width) * blocks <= 1.07 * problem.columns
    return ahead(geometry, 2, problem, device) if is_even else None


def ahead(geometry: RowBlock, crowd: int, problem: Problem, device: Device) -> RowBlock | None:
    """The geometry, in turns, with as many blocks on a multiprocessor; None where these have no room."""
    ahead = with_channels(replace(geometry, stage="ahead", blocks_per_multiprocessor=crowd), problem, device)
    return ahead if resident_by_memory(ahead, problem, device) >= crowd else None


def sixteen_byte_width(problem: Problem, device: Device) -> int:
    """Numbers of a vector of 16 bytes, of rows that this is about; or 0."""
    width, itemsize = row_width(problem), problem.itemsize
    timed = device.capability == 90 and has_several_channels(problem) and itemsize < 8
    return width if timed and width * itemsize == 16 else 0


def _power_of_two(vectors: int, most: int) -> int:
    """The least power of two of blocks, of which none has more than so many of the vectors."""
    return 1 << (-(-vectors // most) - 1).bit_length()


def _spread(problem: Problem, width: int, blocks: int, threads: int) -> RowBlock:
    vectors = columns_per_block(problem, blocks, width) // width
    return RowBlock(width, -(-vectors // threads), threads, blocks_per_row=blocks)


def _can_share(problem: Problem, device: Device, blocks: int, width: int) -> bool:
    """Whether so many blocks can share a row."""
    return blocks <= _MOST_BLOCKS and device.groups(blocks) > 0 and can_be_shared(problem, blocks, width)


def _are_alike(problem: Problem, device: Device, blocks: int, width: int) -> bool:
    """Whether so many blocks can share a row, with as many columns each."""
    if not _can_share(problem, device, blocks, width):
        return False
    return columns_per_block(problem, blocks, width) * blocks == problem.columns
