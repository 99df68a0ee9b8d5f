"""What each launch of a plan does: the part of a tensor that a block works on, the bytes, the registers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from cunorm.occupancy import occupancy
from cunorm.plan import Device, Launch, Plan
from cunorm.problem import AnyProblem, ChannelBackward, ChannelForward
from cunorm.resources import compile_resources

__all__ = ["READ", "WRITTEN", "LaunchExplanation", "area_seen", "explained_launches", "present_operands"]

# The operands of x's size, those that kernels read first; kernels name their fields after them, too.
READ, WRITTEN = ("x", "residual", "dy", "dresidual_out"), ("y", "residual_out", "dx")


@dataclass(frozen=True, kw_only=True)
class LaunchExplanation:
    """One kernel of a plan, as `Explanation` has it. Of a channel norm, a row is a channel, and its columns are points.

    ``share`` is what a block works on at a time, rows by columns (None in kernels that add up what others have left);
    it takes ``turns``. ``blocks_per_row`` blocks, each ``block_stride`` further, share a row; so do ``threads_per_row``
    threads of a block, ``thread_stride`` apart, each of which holds, or has on the way, ``vectors`` of each tensor.
    Bytes are those of tensors of x's size. Registers, and what follows from them, are None where there is no compiler
    to ask. ``limited_by`` is what there is no more of for another block of the ``blocks_per_multiprocessor``, which
    have the share ``occupancy`` of all threads that there can be.
    """

    kernel: str
    constants: dict[str, int | str]
    grid: int
    block: tuple[int, int]
    cluster: int
    cooperative: bool
    bytes_read: int
    bytes_written: int
    bytes_through_shared: int
    dynamic_shared_bytes: int
    share: tuple[int, int] | None = None
    blocks_per_row: int = 0
    block_stride: int = 0
    turns: int = 0
    threads_per_row: int = 0
    thread_stride: int = 0
    vectors: int = 0
    vector_bytes: int = 0
    static_shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    blocks_per_multiprocessor: int | None = None
    occupancy: float | None = None
    limited_by: str = ""
    blocks_at_once: int | None = None

    @property
    def threads(self) -> int:
        return math.prod(self.block)

    @property
    def warps(self) -> int:
        return -(-self.threads // 32)

    @property
    def shared_bytes(self) -> int | None:
        return None if self.static_shared_bytes is None else self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def waves(self) -> float | None:
        """How many times as many blocks there are as run at the same time."""
        return self.grid / self.blocks_at_once if self.blocks_at_once else None


def present_operands(problem: AnyProblem, names: tuple[str, ...]) -> list[str]:
    """The operands of x's size that a problem has."""
    return [name for name in names if getattr(problem, name, None) is not None]


def area_seen(problem: AnyProblem, chosen: Plan) -> tuple[tuple[str, str], tuple[int, int]]:
    if not isinstance(problem, ChannelForward | ChannelBackward):
        return ("rows", "columns"), (problem.rows, problem.columns)
    if chosen.strategy.startswith("row_"):
        return ("rows", "columns"), (problem.sets, problem.channels_per_set * problem.points)
    return ("channels", "points"), (problem.samples * problem.channels, problem.points)


def explained_launches(chosen: Plan, problem: AnyProblem, device: Device) -> tuple[tuple[LaunchExplanation, ...], str]:
    """The launches of a plan; and why registers are unknown, where they are."""
    _, area = area_seen(problem, chosen)
    itemsize = problem.itemsize
    all_bytes = math.prod(area) * itemsize
    present = present_operands(problem, (*READ, *WRITTEN))
    found, failure = [], ""
    for item in chosen.launches:
        fields = [(role, name) for role, name in item.arguments if name in present]
        written = sum(role in WRITTEN for role, _ in fields) * all_bytes
        read = len(fields) * all_bytes - written
        layout = _layout(item, area, itemsize)
        constants = dict(item.constants)
        through = 0
        if item.kernel.startswith("channel_grid"):
            vectors, resident = layout["vectors"], int(constants["RESIDENT"])
            again = read * max(0, vectors - resident - int(constants["SLOTS"])) // vectors
            through = read - read * resident // vectors + again
            read += again
        elif item.kernel.startswith("channel_slab") or "pipeline" in item.kernel or constants.get("STAGE") == "ahead":
            through = read
        elif constants.get("STAGE") == "run" or item.kernel.startswith("row_bulk"):
            through = read + written
        elif item.kernel == "row_grid_forward":
            resident, held = int(constants["RESIDENT"]), int(constants["HELD"])
            vectors = layout["vectors"]
            through = read * min(resident, vectors) // vectors
            # Of x, or of the sum that a residual makes of it.
            read += all_bytes * max(0, vectors - resident - held) // vectors
        explained = LaunchExplanation(
            kernel=item.kernel,
            constants=constants,
            grid=item.grid,
            block=item.block,
            cluster=item.cluster,
            cooperative=item.cooperative,
            bytes_read=read,
            bytes_written=written,
            bytes_through_shared=through,
            dynamic_shared_bytes=item.shared_bytes,
            **layout,
        )
        try:
            found.append(_with_resources(explained, device))
        except RuntimeError as error:
            failure = str(error)
            found.append(explained)
    return tuple(found), failure


def _with_resources(item: LaunchExplanation, device: Device) -> LaunchExplanation:
    taken = compile_resources(item.kernel, item.constants, device.arch)
    shared = taken.shared_bytes + item.dynamic_shared_bytes
    blocks, threads, limit = occupancy(device, item.threads, taken.registers, shared)
    return dataclasses.replace(
        item,
        static_shared_bytes=taken.shared_bytes,
        registers=taken.registers,
        spill_bytes=taken.spill_bytes,
        blocks_per_multiprocessor=blocks,
        limited_by=limit,
        occupancy=threads,
        blocks_at_once=min(item.grid, device.groups(item.cluster, blocks) * item.cluster),
    )


def _layout(item: Launch, area: tuple[int, int], itemsize: int) -> dict[str, Any]:
    """How a launch lies over its problem: that part of a `LaunchExplanation`."""
    constants: dict[str, Any] = dict(item.constants)
    given: dict[str, Any] = dict(item.arguments)
    if "VECTOR" not in constants:  # it only adds up what others have left
        return {}
    width, threads = constants["VECTOR"], math.prod(item.block)
    lanes = constants.get("CHANNEL_LANES") or constants.get("ROW_LANES", 1)  # rows that lie beside each other
    threads_per_row = constants.get("THREADS_PER_ROW") or threads // lanes
    along, plane = constants.get("ALONG_CHANNELS", 0), constants.get("PLANE", 1)
    vectors = constants.get("VECTORS") or constants.get("STEPS") or constants.get("UNROLL", 0)
    # Of row_block, row_grid, row_held, row_pipeline, row_stream and of slabs; else tiles.
    columns = given.get("columns_per_block") or given.get("points_per_block")
    if not columns:
        columns = threads_per_row * (plane if along else width) * (1 if "STEPS" in constants else vectors)
    rows = constants.get("ROWS_PER_BLOCK") or lanes * (width if along else 1) // plane * constants.get("STEPS", 1)
    if constants.get("RUN"):
        rows, columns = 1, columns * rows
    if item.kernel.startswith("channel_grid"):
        vectors = given["vectors"] + constants["RESIDENT"]
    if "pipeline" in item.kernel or item.kernel.startswith(("row_held", "row_stream")):
        # Their other threads have nothing of the row.
        threads_per_row, vectors = constants["THREADS"] // lanes, constants["RESIDENT"]
    if item.kernel == "row_grid_forward":
        vectors = max(1, _times(columns - 2 * width * constants["PEELED"], width * threads))
    share = min(rows, area[0]), min(columns, area[1])
    pieces = [_times(whole, part) for whole, part in zip(area, share)] if 0 not in share else [0, 0]
    counts = [given[name] for name in ("blocks_per_row", "blocks_per_slab", "tiles", "splits") if name in given]
    blocks_per_row = pieces[1] if constants.get("RUN") else counts[0] if counts else item.cluster
    block_stride = 1
    if "splits" in given and "tiles" not in given:
        # Neighbours have the same part of other rows: of all, or of a sample's channels.
        block_stride = _times(given["channels"], rows) if "channels" in given else item.grid // given["splits"]
    return {
        "share": share,
        "blocks_per_row": blocks_per_row,
        "block_stride": block_stride,
        "turns": _times(math.prod(pieces), item.grid),
        "threads_per_row": threads_per_row,
        "thread_stride": lanes if along or item.kernel.startswith("row_split") else 1,
        "vectors": vectors,
        "vector_bytes": width * itemsize,
    }


def _times(whole: int, part: int) -> int:
    return -(-whole // part)
