"""What registers and shared memory a layout of rows takes, and how many of its blocks that leaves room for."""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.device import REGISTERS, Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_memory import are_shifted, compute_itemsize, has_several_channels, lie_alike
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, Problem

__all__ = [
    "blocks_with",
    "crowded",
    "fits",
    "fits_crowd",
    "fits_early",
    "fits_registers",
    "resident",
    "resident_by_memory",
    "that_fits",
    "with_registers",
    "with_room",
]

# What the kernels declare of shared memory themselves, mostly at most.
_STATIC_SHARED_BYTES = 3 * 1024
# What addresses and the like take of a thread's registers, by the first compute capability of which that is true: ptxas
# gets by with the least for sm_90.
_OTHER_REGISTERS = ((120, 62), (100, 50), (90, 20), (80, 32), (0, 40))
# What an activation takes besides, forward; and its derivative, beside sums of columns or in double.
_ACTIVATION_REGISTERS = 8
_DERIVATIVE_REGISTERS = 24


def _registers_of_each(threads: int) -> int:
    """How many registers each of so many threads of a multiprocessor can have."""
    return min(255, REGISTERS // threads // 8 * 8)


def _other_registers(device: Device) -> int:
    """What addresses and the like take of a thread's registers."""
    return next(taken for first, taken in _OTHER_REGISTERS if device.capability >= first)


def _registers(problem: Problem, width: int) -> tuple[int, int]:
    """How many 4-byte registers a thread has for each of its vectors, and how many it has once.

    For each vector: what was loaded and, backward, its two column sums. One of less than 16 bytes counts more, since
    there are many, each with its own bounds to check; so does one of sixteen-bit numbers, which are unpacked. Once: the
    weight, intermediate results in double, and what an activation needs.
    """
    loaded_bytes = width * problem.itemsize
    loaded, narrow = max(1, loaded_bytes // 4), loaded_bytes < 16
    if isinstance(problem, ForwardProblem):
        return (loaded + narrow) * (1 if problem.residual is None else 2), 0
    weight_bytes = 0 if problem.weight is None else width * DTYPES[problem.weight.dtype].itemsize
    sums = 2 * width * compute_itemsize(problem) // 4 if problem.channels is None else 0
    unpacked = problem.itemsize == 2 and not narrow
    more = weight_bytes // 4 + 8 * (problem.x.dtype == "float64")
    if problem.norm.activation is not None and (problem.channels is None or problem.x.dtype == "float64"):
        more += _DERIVATIVE_REGISTERS
    return 2 * loaded + sums + 4 * narrow + unpacked, more


def fits_registers(
    problem: Problem, device: Device, width: int, vectors: int, threads: int, peeled: bool = False, direct: bool = False
) -> bool:
    """Whether a block of so many threads has the registers; those of peeled rows take more, above all read directly."""
    registers, more = _registers(problem, width)
    direct = direct or device.capability < 80
    double = problem.x.dtype == "float64"
    other = _other_registers(device)
    if peeled:
        other += 12 + 8 * double + 40 * (direct and not lie_alike(problem))
    other += _of_shifted(problem, device, vectors)
    if isinstance(problem, BackwardProblem) and problem.channels is not None:
        # Without sums of columns, whose count is generous, the rest counts for more.
        several, activated = has_several_channels(problem), problem.norm.activation is not None
        other += 20 + 10 * several + 8 * double * (several + activated) + 24 * (double and activated and peeled)
        # With 8 vectors in clusters of 8 blocks relu and the exact gelu of bfloat16 would spill; relu was seen to with
        # several channels only.
        other += 8 * (problem.norm.activation == "relu")
        other += 18 * (problem.norm.activation == "gelu" and problem.x.dtype == "bfloat16")
    if isinstance(problem, ForwardProblem):
        other += 12 * has_several_channels(problem)
        # 262,144 float16 numbers of a channel, 16 vectors of each of 512 threads, would spill from sm_100 on.
        other += 16 * (problem.channels is not None and device.capability >= 100)
        if problem.residual is not None:
            other += 4
        if problem.norm.activation is not None:
            # More beside a residual, and with several channels of a row for the exact gelu and for bfloat16, which
            # would spill with 16 vectors.
            heavy = problem.norm.activation == "gelu" or problem.x.dtype == "bfloat16"
            more_channels = heavy and has_several_channels(problem)
            other += _ACTIVATION_REGISTERS + 28 * (problem.residual is not None or more_channels)
    elif problem.dresidual_out is not None:
        other += 4 + 20 * double
        # Read directly, all of a thread's are loaded at once.
        if direct:
            other += vectors * width * problem.itemsize // 4 + 32 * peeled
    return vectors * registers + more + other <= _registers_of_each(threads)


def _of_shifted(problem: Problem, device: Device, vectors: int) -> int:
    """What it takes to read rows that are shifted; the rest is generous enough but for sm_90.

    On an H100 16,384 columns of float16 with a residual, backward, take 1.12 where 144 bytes spill, and 1.03 by four
    blocks, where none do. Some kernels spill tens of bytes all the same, most of them of 512 threads a block: rows that
    do not fit a block are read twice, number by number, which takes 2.4 to 4.
    """
    if not are_shifted(problem):
        return 0
    return 12 + 3 * vectors if device.capability == 90 else 8 if problem.x.dtype == "float64" else 4


def fits_early(geometry: RowBlock, problem: Problem, device: Device) -> bool:
    """Whether there are registers for the weights of all vectors too."""
    words = sum(geometry.width * DTYPES[vector.dtype].itemsize for vector in problem.parameters) // 4
    registers, more = _registers(problem, geometry.width)
    other = _other_registers(device)
    if isinstance(problem, ForwardProblem):
        other += _ACTIVATION_REGISTERS * (problem.norm.activation is not None)
    other += 12 * geometry.peeled + _of_shifted(problem, device, geometry.vectors)
    total = geometry.vectors * (registers + words) + more + other
    return total <= _registers_of_each(geometry.threads * geometry.compiled_for(problem))


def fits_crowd(geometry: RowBlock, problem: Problem, device: Device, share: int) -> bool:
    """Whether so many of its blocks have the registers at once, also for weights that come early."""
    if geometry.weights == "early" and not fits_early(replace(geometry, min_blocks=share), problem, device):
        return False
    threads, direct = share * geometry.threads, geometry.stage == "direct"
    return fits_registers(problem, device, geometry.width, geometry.vectors, threads, geometry.peeled, direct)


def that_fits(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock | None:
    """The geometry, if there are the registers for weights that come early, and the shared memory."""
    in_registers = geometry.weights != "early" or fits_early(geometry, problem, device)
    return geometry if in_registers and fits(geometry, problem, device) else None


def fits(geometry: RowBlock, problem: Problem, device: Device) -> bool:
    """Whether a block has the shared memory."""
    # Many rows a block have sums that take more.
    static_bytes = max(_STATIC_SHARED_BYTES, geometry.bytes_of_sums(problem) + 1024)
    return geometry.shared_bytes(problem) + static_bytes <= device.shared_bytes


def with_registers(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock:
    """Without blocks that would leave each other too few registers."""
    vectors = geometry.vectors + geometry.peeled  # edges take as much as another one: else 8 to 600 bytes would spill
    for share in range(geometry.blocks_per_multiprocessor, 0, -1):
        geometry = replace(geometry, blocks_per_multiprocessor=share)
        threads = geometry.threads * geometry.compiled_for(problem)
        if fits_registers(problem, device, geometry.width, vectors, threads, geometry.peeled):
            break
    return geometry


def with_room(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock:
    """Without what shared memory is too small for: the rows ahead but for one, then the weights, then that row."""
    for less in ({"rows_ahead": 1}, {"weights": "late"}, {"stage": "direct"}):
        if not fits(geometry, problem, device):
            geometry = replace(geometry, **less)
    return geometry


def resident(geometry: RowBlock, problem: Problem, device: Device) -> int:
    """How many of its blocks share a multiprocessor, about."""
    registers, more = _registers(problem, geometry.width)
    by_registers = REGISTERS // (geometry.threads * (geometry.vectors * registers + more + 32))
    by_memory = resident_by_memory(geometry, problem, device)
    return max(1, min(by_memory, by_registers, device.threads_per_multiprocessor // geometry.threads))


def resident_by_memory(geometry: RowBlock, problem: Problem, device: Device) -> int:
    """How many of its blocks have the shared memory that they need."""
    return device.blocks_with(geometry.shared_bytes(problem) + _STATIC_SHARED_BYTES)


def crowded(geometry: RowBlock, problem: Problem, device: Device) -> RowBlock:
    """With the registers kept down, so that more blocks of rows that are read directly hide each other's waiting.

    Left alone, ptxas loads so much ahead that at 12,288 columns of bfloat16 two blocks fit, not three: 1.21, not 1.03.
    """
    if problem.itemsize == 8:
        return geometry
    held = geometry.vectors * max(1, geometry.width * problem.itemsize // 4)
    if isinstance(problem, ForwardProblem) and problem.residual is not None:
        # With 64 registers seven vectors would spill; with the exact gelu behind it four fill them.
        held += 16 if problem.norm.activation is not None else 8
        held += 8 * are_shifted(problem)
    if problem.channels is not None and geometry.peeled:
        # Under the exact gelu 8 vectors would spill with 64: 16 x 64 planes of 63^2 float16 numbers take 1.21 so on an
        # H100, 1.04 with 80. On sm_100 11 would with 80.
        least = 32 if problem.norm.activation == "gelu" else 64 if device.capability == 90 else 44
        held += 8 * (held >= least)
    if problem.is_bare and problem.norm.activation is not None:
        held += 8  # 7 vectors under silu would spill 8 bytes with 64 registers
    if any(DTYPES[vector.dtype].itemsize == 8 for vector in problem.parameters):
        # Two vectors of 16 bytes would spill with 80 registers, on sm_90 four of sixteen-bit numbers with 64.
        fewer = problem.itemsize == 2 and held >= 16
        held += 48 if device.capability != 90 else 24 * fewer
    registers = 64 if held <= 32 and device.capability == 90 else 80 if held <= 48 else 112
    return replace(geometry, min_blocks=blocks_with(geometry, registers))


def blocks_with(geometry: RowBlock, registers: int) -> int:
    """How many of its blocks leave each thread so many registers."""
    return max(1, REGISTERS // (geometry.threads * registers))
