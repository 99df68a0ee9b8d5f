"""The plan of a call as an object, which a notebook draws and a terminal prints."""

from __future__ import annotations

from dataclasses import dataclass

from cunorm.explanation.launches import READ, WRITTEN, LaunchExplanation, area_seen, present_operands
from cunorm.plan import Device, Plan
from cunorm.problem import AnyProblem, ChannelBackward, ChannelForward
from cunorm.text import byte_count, counted, duration, rate, table_lines

__all__ = ["Explanation"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The plan of a call. It prints as a table, and shows itself in a notebook as a diagram.

    ``area`` is what kernels see, rows by columns or channels by points, as ``area_of`` says; ``launches`` say what each
    of the ``plan`` does. ``seconds`` and ``copy_seconds`` are median times with a cold L2 cache, of the call and of a
    copy of the bytes that must move; where none could be taken, ``failure`` says why, as ``compiler`` does of
    registers. All bytes but the workspace's are those of tensors of x's size; ``copy_rate`` counts what is read and
    what is written.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    problem: AnyProblem
    title: str
    device: Device
    plan: Plan
    chosen: str
    copy_rate: float | None
    copy_rate_is: str
    launches: tuple[LaunchExplanation, ...]
    seconds: float | None = None
    copy_seconds: float | None = None
    failure: str = ""
    compiler: str = ""

    @property
    def strategy(self) -> str:
        return self.plan.strategy

    @property
    def arch(self) -> str:
        return self.device.arch

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_bytes

    @property
    def area_of(self) -> tuple[str, str]:
        return area_seen(self.problem, self.plan)[0]

    @property
    def area(self) -> tuple[int, int]:
        return area_seen(self.problem, self.plan)[1]

    @property
    def seen_as(self) -> str:
        problem, text = self.problem, " of ".join(map(counted, self.area, self.area_of))
        if isinstance(problem, ChannelForward | ChannelBackward):
            sizes = ((problem.samples, "samples"), (problem.channels, "channels"), (problem.points, "points"))
            text += f"; {' of '.join(counted(*size) for size in sizes)}"
            text += f", {counted(problem.channels_per_set, 'channels')} a mean"
        return text

    @property
    def lives_in(self) -> str:
        """Where a row lies between the pass that sums it and the pass that finishes it."""
        main = next((item for item in self.launches if item.share), None)
        if main is None:
            return "nowhere: there is nothing to compute"
        together = f"of the {main.blocks_per_row} blocks"
        if self.strategy in ("row_block", "row_bulk"):
            return f"in the registers of {counted(main.threads_per_row, 'threads')}"
        if self.strategy == "row_cluster":
            return f"in the registers {together} of a cluster"
        if self.strategy in ("row_pipeline", "row_stream"):
            return f"in the shared memory {together} that share it, with the rows after it"
        if self.strategy == "row_held":
            return f"in the registers {together} that share it, while the next ones come to shared memory"
        if self.strategy == "row_grid":
            held = " and the registers" * (main.constants["HELD"] != 0)
            rest = "; what does not fit is read again" * (main.constants["STREAMED"] != 0)
            return f"in the shared memory{held} {together} that share it{rest}"
        if self.strategy == "channel_pipeline":
            return f"in the shared memory {together} that share it, with the slabs after it"
        if self.strategy == "channel_slab":
            return f"in the shared memory {f'{together} of a cluster' if main.cluster > 1 else 'of a block'}"
        if self.strategy == "channel_grid":
            resident, slots = int(main.constants["RESIDENT"]), int(main.constants["SLOTS"])
            registers = " and the registers" * (resident > 0)
            rest = "; what does not fit is read again" * (main.vectors > resident + slots)
            return f"in the shared memory{registers} {together} that share it{rest}"
        if len([item for item in self.launches if item.share]) < 2:
            return "nowhere: no number is needed twice"
        return "nowhere on chip: it is read again, from L2 where it is still there"

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move."""
        return self.problem.bytes_moved

    @property
    def moves(self) -> str:
        *reads, last = present_operands(self.problem, READ)
        writes = " and ".join(present_operands(self.problem, WRITTEN))
        read = f"{', '.join(reads)} and {last} read" if reads else f"{last} read"
        return f"{read}, {writes} written" if writes else read

    @property
    def floor_seconds(self) -> float | None:
        """The time in which a copy moves the bytes that must move."""
        return self.bytes_moved / self.copy_rate if self.copy_rate else None

    @property
    def r(self) -> float | None:
        """The measured time over that of a copy."""
        return self.seconds / self.copy_seconds if self.seconds and self.copy_seconds else None

    @property
    def bytes_read_again(self) -> int:
        """What kernels read beyond the bytes that must move: from L2 where it is still there, else from memory."""
        return sum(item.bytes_read + item.bytes_written for item in self.launches) - self.bytes_moved

    @property
    def bytes_through_shared(self) -> int:
        return sum(item.bytes_through_shared for item in self.launches)

    @property
    def main(self) -> LaunchExplanation | None:
        """The launch that moves the most, the last of them; None for a plan that launches nothing."""
        return max(reversed(self.launches), key=lambda item: item.bytes_read + item.bytes_written, default=None)

    def svg(self) -> str:
        """The diagram as an SVG file's text, black on white."""
        from cunorm.explanation.figure import draw

        return draw(self, "white")

    def _repr_html_(self) -> str:
        from cunorm.explanation.figure import as_html

        return as_html(self)

    def __str__(self) -> str:
        rows = [
            ("seen as", self.seen_as),
            ("strategy", self.strategy),
            ("chosen", self.chosen),
            (f"a {self.area_of[0][:-1]} lives", self.lives_in),
            ("scratch memory", byte_count(self.workspace_bytes)),
            ("bytes that must move", f"{byte_count(self.bytes_moved)} ({self.moves})"),
            ("bytes read again", byte_count(self.bytes_read_again)),
            ("floor", self._floor()),
        ]
        if self.seconds or self.failure:
            rows.append(("measured", self._measured()))
        title = f"{self.op} of {'x'.join(map(str, self.shape))} {self.dtype} on {self.title}"
        lines = [title, *table_lines(("what", "value"), rows), ""]
        columns = ("kernel", "grid", "block", "registers", "spills", "shared memory", "blocks at once", "vectors")
        numbers = ("grid", "registers", "spills", "shared memory", "blocks at once")
        lines += table_lines(columns, [_cells(item) for item in self.launches], numbers)
        if self.compiler:
            lines.append(f"Registers: unknown (needs CuPy's NVRTC): {self.compiler}")
        lines.append("Registers, spills and vectors are per thread, shared memory is per block.")
        lines += ["", "Constants"]
        for item in self.launches:
            lines.append(f"{item.kernel}: " + " ".join(f"{name}={value}" for name, value in item.constants.items()))
        return "\n".join(lines)

    __repr__ = __str__

    def _floor(self) -> str:
        if self.floor_seconds is None or self.copy_rate is None:
            return f"unknown: {self.copy_rate_is}"
        return f"{duration(self.floor_seconds)} at {rate(self.copy_rate)}, {self.copy_rate_is}"

    def _measured(self) -> str:
        if self.seconds is None or self.copy_seconds is None:
            return f"no: {self.failure}"
        return f"{duration(self.seconds)}; a copy takes {duration(self.copy_seconds)}: r = {self.r:.3f}"


def _cells(item: LaunchExplanation) -> tuple[str, ...]:
    return (
        item.kernel,
        str(item.grid),
        f"{item.block[0]}x{item.block[1]} = {item.threads}",
        str(item.registers or "unknown"),
        "unknown" if item.spill_bytes is None else byte_count(item.spill_bytes),
        "unknown" if item.shared_bytes is None else byte_count(item.shared_bytes),
        str(item.blocks_at_once or "unknown"),
        f"{item.vectors} of {item.vector_bytes} bytes" if item.share else "-",
    )
