"""What a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "MOST_STATIC_BYTES",
    "REGISTERS",
    "RESERVED_BYTES",
    "Builder",
    "Constants",
    "Device",
    "Launch",
    "Plan",
    "Scratch",
    "Value",
]

Value = int | float | str | tuple[float, ...]
Constants = dict[str, int | str]

_MOST_BLOCKS = 2**31 - 1
# Of a multiprocessor.
REGISTERS = 65536
# What the runtime keeps of shared memory for each block, from sm_80 on.
RESERVED_BYTES = 1024
# What a kernel may declare of it.
MOST_STATIC_BYTES = 48 * 1024


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    arch: str = "sm_90"
    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    # How many clusters of 2, 4, 8 and 16 blocks, each filling a multiprocessor, run at the same time. They lie within
    # groups of multiprocessors, so some of these stay idle; how many differs even between two chips of a model.
    clusters: tuple[int, int, int, int] = (66, 30, 15, 7)
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

    def blocks_with(self, shared_bytes: int) -> int:
        """How many blocks with so much shared memory, that which kernels declare included, a multiprocessor has."""
        return (self.shared_bytes + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)

    def shared_bytes_of(self, blocks: int) -> int:
        """How much shared memory each of so many blocks of a multiprocessor may have."""
        return (self.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES

    def groups(self, blocks: int) -> int:
        """How many groups of 1, 2, 4, 8 or 16 blocks, each filling a multiprocessor, run at the same time; or 0."""
        if blocks == 1:
            return self.multiprocessors
        return self.clusters[blocks.bit_length() - 2] if self.capability >= 90 else 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``cluster`` consecutive blocks run together; the kernel's text asks for that itself.

    Where it is ``cooperative``, all blocks do, and may wait for each other.
    """

    kernel: str
    constants: tuple[tuple[str, int | str], ...]
    grid: int
    block: tuple[int, int]
    shared_bytes: int  # dynamic
    arguments: tuple[tuple[str, Value], ...]
    cluster: int = 1
    cooperative: bool = False

    @property
    def function_key(self) -> tuple[str, tuple[tuple[str, int | str], ...], int, int]:
        """What its compiled function depends on: launches that agree in this share it."""
        return self.kernel, self.constants, self.shared_bytes, self.cluster


@dataclass(frozen=True)
class Scratch:
    """A named part of the workspace."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A sequence of launches, and the scratch memory between them, in one workspace.

    Launches after the first may begin before the one before them has ended: their kernels wait for it themselves (see
    kernels/dependent_launch.cuh).
    """

    strategy: str
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    workspace_bytes: int = 0


@dataclass
class Builder:
    """Gathers the launches and the scratch memory of a plan."""

    launches: list[Launch] = field(default_factory=list)
    scratch: list[Scratch] = field(default_factory=list)
    workspace_bytes: int = 0

    def reserve(self, name: str, count: int, itemsize: int) -> str:
        """Reserve scratch memory and return its name. Offsets are multiples of 256 bytes."""
        self.scratch.append(Scratch(name, self.workspace_bytes, count * itemsize))
        self.workspace_bytes += -(-count * itemsize // 256) * 256
        return name

    def launch(
        self,
        kernel: str,
        constants: Constants,
        grid: int,
        block: tuple[int, int],
        arguments: dict[str, Value],
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        if grid > _MOST_BLOCKS:
            raise ValueError(f"x is too large: {kernel} would need {grid} blocks, a launch has {_MOST_BLOCKS}")
        if grid > 0:
            sizes = (grid, block, shared_bytes)
            fields = tuple(arguments.items())
            self.launches.append(Launch(kernel, tuple(constants.items()), *sizes, fields, cluster, cooperative))

    def finished(self, strategy: str) -> Plan:
        return Plan(strategy, tuple(self.launches), tuple(self.scratch), self.workspace_bytes)
