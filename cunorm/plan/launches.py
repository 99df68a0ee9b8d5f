"""What a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Builder", "Constants", "Launch", "Plan", "Scratch", "Value"]

Value = int | float | str | tuple[float, ...]
Constants = dict[str, int | str]

_MOST_BLOCKS = 2**31 - 1


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
