"""What plans need to know of a GPU, and what is alike in all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_STATIC_BYTES", "NO_UNEVEN_CLUSTERS", "REGISTERS", "UNEVEN_CLUSTERS", "UNEVEN_SHARES", "Device"]

REGISTERS = 65536  # of a multiprocessor
UNEVEN_CLUSTERS = (3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)  # sizes of `Device.uneven_clusters`, and the shares
UNEVEN_SHARES = (1, 2, 3, 4, 5, 6, 7, 8)
NO_UNEVEN_CLUSTERS = ((0,) * len(UNEVEN_SHARES),) * len(UNEVEN_CLUSTERS)
MOST_STATIC_BYTES = 48 * 1024  # of shared memory, that a kernel may declare


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    arch: str = "sm_90"
    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    # How many clusters of 2, 4, 8 and 16 blocks, each filling a multiprocessor, run at the same time. They lie within
    # groups of multiprocessors, so some of these stay idle; how many differs even between two chips of a model.
    clusters: tuple[int, int, int, int] = (66, 30, 15, 7)
    # The same of UNEVEN_CLUSTERS, of each where UNEVEN_SHARES of its blocks fill a multiprocessor: such clusters leave
    # fewer idle the smaller their blocks are.
    uneven_clusters: tuple[tuple[int, ...], ...] = (
        (39, 79, 124, 163, 163, 248, 248, 327), (22, 47, 69, 94, 94, 146, 146, 193),
        (17, 39, 62, 79, 79, 124, 124, 163), (15, 32, 47, 69, 69, 101, 101, 139), (9, 23, 37, 51, 51, 74, 74, 102),
        (7, 21, 30, 44, 44, 65, 65, 88), (7, 16, 28, 37, 37, 58, 58, 81), (7, 16, 28, 37, 37, 58, 58, 74),
        (7, 14, 23, 30, 30, 51, 51, 67), (7, 14, 21, 30, 30, 44, 44, 65), (7, 14, 21, 28, 28, 44, 44, 58),
    )  # fmt: skip
    # Bytes that a copy moves in a microsecond for each multiprocessor, those read and those written.
    memory_rate: float = 32e3

    @property
    def capability(self) -> int:
        """The compute capability as the architecture has it: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def has_fast_memory(self) -> bool:
        """Whether each multiprocessor moves more bytes than it can easily work on: an H200's do, an H100's do not."""
        return self.memory_rate > 26e3

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of a block."""
        # From the CUDA C++ Programming Guide's table of compute capabilities; 99 KB is the least since sm_80.
        return {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(self.capability, 99) * 1024

    @property
    def reserved_bytes(self) -> int:
        """The shared memory that the runtime keeps for each block."""
        return 1024 if self.capability >= 80 else 0

    def blocks_with(self, shared_bytes: int) -> int:
        """How many blocks with so much shared memory, that which kernels declare included, a multiprocessor has."""
        return (self.shared_bytes + self.reserved_bytes) // max(1, shared_bytes + self.reserved_bytes)

    def shared_bytes_of(self, blocks: int) -> int:
        """How much shared memory each of so many blocks of a multiprocessor may have."""
        return (self.shared_bytes + self.reserved_bytes) // blocks - self.reserved_bytes

    def groups(self, blocks: int, share: int = 1) -> int:
        """How many groups of so many blocks run at the same time, where a share of blocks fills a multiprocessor; or 0.

        A group is of 1, 2, 4, 8 or 16 blocks, or one of UNEVEN_CLUSTERS.
        """
        if blocks == 1:
            return self.multiprocessors * share
        if self.capability < 90 or share == 0:
            return 0
        if blocks in UNEVEN_CLUSTERS:
            return self.uneven_clusters[UNEVEN_CLUSTERS.index(blocks)][min(share, UNEVEN_SHARES[-1]) - 1]
        return self.clusters[blocks.bit_length() - 2] * share
