"""How many blocks of a kernel share a multiprocessor, and what it is that keeps more away."""

from __future__ import annotations

from typing import NamedTuple

from cunorm.plan.device import REGISTERS, Device

__all__ = ["Occupancy", "occupancy"]

# From the CUDA C++ Programming Guide's table of compute capabilities.
_BLOCKS = {75: 16, 80: 32, 86: 16, 87: 16, 90: 32, 100: 32, 103: 32}
_OTHER_BLOCKS = 24
# Registers are given to warps in such pieces, and warps in fours, one for each part of a multiprocessor.
_REGISTER_PIECE = 256


class Occupancy(NamedTuple):
    """``blocks`` of a multiprocessor, the share of its ``threads`` that they are, and what there is no more of."""

    blocks: int
    threads: float
    limit: str


def occupancy(device: Device, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """For blocks of so many threads, with so many registers each, and static and dynamic shared memory of a block."""
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // _REGISTER_PIECE) * _REGISTER_PIECE
    limits = {
        "threads": device.threads_per_multiprocessor // 32 // warps,
        "registers": REGISTERS // per_warp // 4 * 4 // warps,
        "shared memory": device.blocks_with(shared_bytes),
        "blocks": _BLOCKS.get(device.capability, _OTHER_BLOCKS),
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * warps * 32 / device.threads_per_multiprocessor, limit)
