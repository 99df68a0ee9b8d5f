"""`cunorm.explain`: the plan of a call as an object, which a notebook draws and a terminal prints."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cunorm import adapters, gpus, launch, ops
from cunorm.channels import ChannelNorm
from cunorm.checks import check_channels, check_mask, check_running, check_x
from cunorm.execute import NOWHERE, Described, Op, Prepared
from cunorm.occupancy import occupancy
from cunorm.plan import Device, Launch, Plan, fitted, plan
from cunorm.pointwise import Pointwise
from cunorm.problem import DTYPES, AnyProblem, ChannelBackward, ChannelForward, View, contiguous_strides
from cunorm.resources import compile_resources
from cunorm.text import byte_count, duration, rate, table_lines
from cunorm.tuning_file import Entry

__all__ = ["OPS", "Explanation", "LaunchExplanation", "explain"]

_ROW_NORMS = ("layer_norm", "rms_norm")
_CHANNEL_NORMS = ("instance_norm", "group_norm", "batch_norm")
OPS = (*_ROW_NORMS, *_CHANNEL_NORMS, "gelu")
# What not every op has: its default, and the ops that have it.
_OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "axis": (-1, _ROW_NORMS),
    "residual": (False, _ROW_NORMS),
    "weight_offset": (0.0, ("rms_norm",)),
    "num_groups": (None, ("group_norm",)),
    "data_format": ("NC...", _CHANNEL_NORMS),
    "training": (True, ("batch_norm",)),
    "running": (None, ("batch_norm",)),
    "weight": (None, OPS[:-1]),
    "activation": (None, OPS[:-1]),
    "return_stats": (False, OPS[:-1]),
    "approximate": ("none", ("gelu",)),
}
# The operands of x's size, those that kernels read first; kernels name their fields after them, too.
_READ, _WRITTEN = ("x", "residual", "dy", "dresidual_out"), ("y", "residual_out", "dx")
_SAMPLES = 20
_LEAST_FLUSHED_BYTES = 256 * 2**20
_BLOCK = 2**22 - 3  # bytes that are drawn, and then repeated


@dataclass(frozen=True, kw_only=True)
class LaunchExplanation:
    """One kernel of a plan.

    Attributes
    ----------
    kernel, constants
        Which text, and what it was compiled for.
    grid, block, cluster, cooperative
        How many blocks; how many threads, in x and y; how many consecutive blocks run together, and whether all do.
    share : (int, int) or None
        What a block works on at a time: rows by columns, or channels by points. None for kernels that add up what
        others have left.
    blocks_per_row, block_stride, turns : int
        How many blocks a row (channel) is cut over, and how far they are apart; and how often a block takes a share.
    threads_per_row, thread_stride : int
        How many threads of a block share a row (channels that lie in one vector), and how far they are apart.
    vectors, vector_bytes : int
        How many vectors of each tensor a thread holds, or has on their way at a time; and the bytes of one.
    bytes_read, bytes_written, bytes_through_shared : int
        Of tensors of x's size.
    dynamic_shared_bytes, static_shared_bytes, registers, spill_bytes : int
        Shared memory of a block; 32-bit registers and spills of a thread. None where there is no NVRTC to ask, but for
        the first.
    blocks_per_multiprocessor, limited_by, occupancy
        How many blocks share a multiprocessor, what there is no more of for another, and which share of the threads
        that a multiprocessor can have they are; None where registers are unknown.
    blocks_at_once : int or None
        How many blocks run at the same time.
    """

    kernel: str
    constants: dict[str, int | str]
    grid: int
    block: tuple[int, int]
    cluster: int
    cooperative: bool
    share: tuple[int, int] | None
    blocks_per_row: int
    block_stride: int
    turns: int
    threads_per_row: int
    thread_stride: int
    vectors: int
    vector_bytes: int
    bytes_read: int
    bytes_written: int
    bytes_through_shared: int
    dynamic_shared_bytes: int
    static_shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    blocks_per_multiprocessor: int | None = None
    limited_by: str = ""
    occupancy: float | None = None
    blocks_at_once: int | None = None

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // 32)

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of a block."""
        return None if self.static_shared_bytes is None else self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def waves(self) -> float | None:
        """How many times as many blocks there are as run at the same time."""
        return self.grid / self.blocks_at_once if self.blocks_at_once else None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The plan of a call. It prints as a table, and shows itself in a notebook as a diagram.

    Attributes
    ----------
    op, shape, dtype, problem
        What is computed; ``op`` ends with ``_backward`` for a gradient. ``problem`` is its canonical form.
    title, device, here
        The GPU that it is planned for, and whether that is one of this machine.
    seen_as, area, area_of
        What kernels see: in words; as (rows, columns), or (channels of all samples, points); and which of the two.
    plan, strategy, chosen
        The launches as they are executed; their strategy; and whose choice that was.
    lives_in : str
        Where a row lies between the pass that sums it and the pass that finishes it.
    bytes_moved, moves : int, str
        The bytes that must move, and what they are.
    copy_rate, copy_rate_is : float or None, str
        Bytes a second, read and written, of a plain copy; and where that number is from.
    seconds, copy_seconds : float or None
        Median times with a cold L2 cache: of the call, and of a copy of the bytes that must move. None where nothing
        was measured; if it should have been, ``failure`` is why not.
    compiler : str
        Why registers are unknown, where they are.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    problem: AnyProblem
    title: str
    device: Device
    here: bool
    seen_as: str
    area: tuple[int, int]
    area_of: tuple[str, str]
    plan: Plan
    chosen: str
    lives_in: str
    bytes_moved: int
    moves: str
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
        return max(0, sum(item.bytes_read + item.bytes_written for item in self.launches) - self.bytes_moved)

    @property
    def bytes_through_shared(self) -> int:
        return sum(item.bytes_through_shared for item in self.launches)

    @property
    def main(self) -> LaunchExplanation | None:
        """The launch that moves the most, the last of them; None for a plan that launches nothing."""
        return max(reversed(self.launches), key=lambda item: item.bytes_read + item.bytes_written, default=None)

    def svg(self) -> str:
        """The diagram as an SVG file's text, black on white."""
        from cunorm.figure import draw

        return draw(self, "white")

    def _repr_html_(self) -> str:
        from cunorm.figure import as_html

        return as_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __repr__(self) -> str:
        size, floor = "x".join(map(str, self.shape)), self.floor_seconds
        times = f", floor {duration(floor)}" if floor else ""
        return f"<{self.op} of {size} {self.dtype} on {self.title}: {self.strategy}{times}>"

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

    def _floor(self) -> str:
        if self.floor_seconds is None or self.copy_rate is None:
            return f"unknown: {self.copy_rate_is}"
        return f"{duration(self.floor_seconds)} at {rate(self.copy_rate)}, {self.copy_rate_is}"

    def _measured(self) -> str:
        if self.seconds is None or self.copy_seconds is None:
            return f"no: {self.failure}"
        speed = rate(self.bytes_moved / self.seconds)
        return f"{duration(self.seconds)}, {speed}; a copy takes {duration(self.copy_seconds)}: r = {self.r:.3f}"


def _cells(item: LaunchExplanation) -> tuple[str, ...]:
    shared = "unknown" if item.shared_bytes is None else byte_count(item.shared_bytes)
    spills = "unknown" if item.spill_bytes is None else byte_count(item.spill_bytes)
    return (
        item.kernel,
        str(item.grid),
        f"{item.block[0]}x{item.block[1]} = {item.threads}",
        str(item.registers or "unknown"),
        spills,
        shared,
        str(item.blocks_at_once or "unknown"),
        f"{item.vectors} of {item.vector_bytes} bytes" if item.share else "-",
    )


def explain(
    x: Any,
    op: str = "layer_norm",
    *,
    backward: bool = False,
    axis: int | Sequence[int] = -1,
    num_groups: int | None = None,
    data_format: str = "NC...",
    weight: Any = None,
    bias: Any = None,
    weight_offset: float = 0.0,
    activation: str | None = None,
    approximate: str = "none",
    residual: Any = False,
    training: bool = True,
    running: bool | str | None = None,
    return_stats: bool = False,
    output_mask: tuple[bool, bool, bool] | None = None,
    arch: str | None = None,
    measure: bool | None = None,
) -> Explanation:
    """How a call would be computed: the kernels, what each block and thread has, and the time that it cannot beat.

    The plan is the one that a call with these tensors is executed with: for their strides and alignment, with what
    `tune` has found. Nothing is copied; without ``measure`` nothing is run.

    Parameters
    ----------
    x : tensor
        Of any framework; or anything with a shape and a dtype, which stands for a C-contiguous tensor.
    op : {"layer_norm", "rms_norm", "instance_norm", "group_norm", "batch_norm", "gelu"}
        What is computed.
    backward : bool
        The gradient instead. dy is taken to lie in memory as y does.
    axis, num_groups, data_format, weight_offset, activation, approximate, training, return_stats
        As the op takes them.
    weight, bias : tensor, bool or str, optional
        A tensor; whether there is one, of x's dtype; or its dtype. By default there are those that the op has mostly:
        both for norms, for RMS norm only a weight, and none for gelu.
    residual : tensor or bool
        Likewise. Backward it is the gradient of residual_out that is added.
    running : bool or str, optional
        Whether a batch norm has running statistics, and their dtype; by default it has, of the weight's dtype.
    output_mask : tuple of three bools, optional
        Backward: which of dx, dweight, dbias are computed; by default those of what there is.
    arch : str, optional
        Plan for another GPU, such as "sm_80". By default for x's, else for this machine's, and without one for an H200.
    measure : bool, optional
        Time the call, and a copy. By default where x is on a GPU and the plan is for that.

    Returns
    -------
    explanation : Explanation
        Its attributes have all the numbers; ``print`` shows them, a notebook draws them, and ``svg()`` is the drawing.

    Raises
    ------
    ValueError
        For an op, arch, shape, axis or option that there is not, and options of another op.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        With ``measure=True`` where there is no GPU, or no room on it.

    Examples
    --------
    >>> import numpy as np
    >>> explanation = cunorm.explain(np.zeros((4096, 8192), np.float16), arch="sm_90")
    >>> explanation.strategy, explanation.bytes_moved, explanation.launches[0].kernel
    ('row_block', 134217728, 'row_block_forward')
    >>> cunorm.explain(np.zeros((2, 64, 32, 32), np.float16), "group_norm", num_groups=8, arch="sm_90").area
    (16, 8192)
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPS)}")
    given = locals()
    for name, (default, have) in _OPTIONS.items():
        value = given[name]
        if op not in have and not (isinstance(value, type(default)) and value == default):
            raise ValueError(f"{name} is {value!r}; it is for {', '.join(have)}, not for {op}")
    view, place = _seen(x, "x")
    the_op: Op
    if op in _ROW_NORMS:
        the_op = ops.RowNorm.of(axis, 1e-5, activation, op == "layer_norm", weight_offset)
        _, vector_shape, _ = check_x(view, the_op.axis)
    elif op == "gelu":
        the_op = Pointwise.of(approximate)
        vector_shape = view.shape[-1:]
    else:
        the_op = ChannelNorm.of(op, data_format, 1e-5, activation, num_groups, training)
        vector_shape = (view.shape[check_channels(view, the_op.data_format)],)
    weight_view = _operand(weight, "weight", op != "gelu", vector_shape, view.dtype)
    bias_view = _operand(bias, "bias", op not in ("rms_norm", "gelu"), vector_shape, view.dtype)
    residual_view = _operand(residual, "residual", False, view.shape, view.dtype)
    statistics_dtype = weight_view.dtype if weight_view else DTYPES[view.dtype].compute if view.dtype in DTYPES else ""
    running_view = _operand(running, "running", op == "batch_norm", vector_shape, statistics_dtype)
    if op == "batch_norm":
        check_running(running_view, running_view, training)
    call = _Call(
        the_op,
        backward,
        view,
        residual_view,
        weight_view,
        bias_view,
        (running_view, running_view) if running_view else (),
        return_stats,
        (True, weight_view is not None, bias_view is not None) if output_mask is None else check_mask(output_mask),
    )
    return _explained(call, f"{op}_backward" if backward else op, _target(arch, place), place, measure)


class _Call(NamedTuple):
    """A call of tensors that are nowhere."""

    op: Op
    backward: bool
    x: View
    residual: View | None
    weight: View | None
    bias: View | None
    running: tuple[View, ...]
    stats: bool
    output_mask: tuple[bool, bool, bool]

    def prepared(self, device: tuple[str, int] = NOWHERE) -> tuple[Prepared, list[View | None]]:
        """The call as it would be prepared on a device, and the operands that it is run with, in order."""

        def there(view: View | None) -> Any:
            return None if view is None else view._replace(device=device)

        x, residual, weight, bias = map(there, self[2:6])
        running = tuple(map(there, self.running))
        forward = self.op.prepare_forward(x, residual, weight, bias, None, self.stats or self.backward, running)
        y, residual_out, mean, rstd = ops.views_of(forward.outputs, device)
        if not self.backward:
            return forward, [x, residual, weight, bias, y, *running, residual_out, mean, rstd]
        dy, x = there(y), residual_out or x
        prepared = self.op.prepare_backward(dy, residual_out, x, weight, bias, mean, rstd, self.output_mask, None)
        inputs = [dy, residual_out, x, weight, bias, mean, rstd]
        return prepared, [*inputs, *ops.views_of(prepared.outputs, device)]


def _seen(tensor: Any, name: str) -> tuple[View, int | None]:
    """A tensor as memory nowhere, but with its own address; and the CUDA device that it really is on."""
    try:
        view = adapters.adapter_of(tensor).view(tensor, name)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        # What has no memory: a tracer, a tensor on PyTorch's meta device, or an object that says what one would be.
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            raise
        if any(size is None for size in tensor.shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every size must be known") from None
        shape = tuple(map(int, tensor.shape))
        strides = tuple(tensor.stride()) if hasattr(tensor, "stride") else contiguous_strides(shape)
        dtype = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
        return View(0, shape, strides, dtype, NOWHERE), None
    return view._replace(device=NOWHERE), view.device[1] if view.device[0] == "cuda" else None


def _operand(value: Any, name: str, usual: bool, shape: tuple[int, ...], dtype: str) -> View | None:
    """What a user says of a weight, bias or the like: whether there is one, its dtype, or the tensor itself."""
    value = usual if value is None else value
    if isinstance(value, bool | str):
        found = dtype if value is True else value
        return View(0, shape, contiguous_strides(shape), found, NOWHERE) if found else None
    return _seen(value, name)[0]


# ---- The GPU.


class _Target(NamedTuple):
    """A GPU, what plans need of it, its copy rate (None if unknown) and where that is from; its index if it is here."""

    title: str
    device: Device
    rate: float | None
    rate_is: str
    place: int | None


def _target(arch: str | None, place: int | None) -> _Target:
    local, reason = gpus.local_gpu(place or 0)
    if local and arch in (None, local.device.arch):
        return _here(local, place or 0)
    gpu = gpus.KNOWN_GPUS.get(arch or "sm_90")
    if gpu is None:
        known = ", ".join(gpus.KNOWN_GPUS)
        raise ValueError(f"arch is {arch!r}; it must be one of {known}, or that of this machine's GPU")
    where = "" if arch else f", for want of a GPU here: {reason}"
    return _Target(f"{gpu.name} ({gpu.device.arch}){where}", gpu.device, gpu.rate, gpu.rate_is, None)


def _here(local: gpus.LocalGpu, index: int) -> _Target:
    title, device = f"{local.name} ({local.device.arch})", local.device
    try:
        return _Target(title, device, gpus.measured_copy_rate(index), "a copy's rate, just measured", index)
    except (MemoryError, RuntimeError) as error:
        failure = f"no copy can be timed here ({error})"
    known = gpus.KNOWN_GPUS.get(device.arch)
    if known is None:
        return _Target(title, device, None, failure, index)
    return _Target(title, device, known.rate, f"{known.rate_is} of {known.name}, since {failure}", index)


# ---- What is said of a plan.


def _explained(call: _Call, op: str, target: _Target, place: int | None, measure: bool | None) -> Explanation:
    described, _ = call.prepared()
    assert isinstance(described, Described)
    problem = described.problem
    if target.place is None:
        chosen, tuned = plan(problem, target.device), None
    else:
        chosen, tuned = ops.chosen_plan(problem, target.place)
    area_of = "rows", "columns"
    if isinstance(problem, ChannelForward | ChannelBackward):
        seen_as = f"{problem.samples} samples of {problem.channels} channels of {problem.points} points"
        if problem.channels_per_set > 1:
            seen_as += f", {problem.channels_per_set} channels a group"
        if chosen.strategy.startswith("row_"):
            area = problem.sets, problem.channels_per_set * problem.points
            seen_as += f": {area[0]} rows of {area[1]} columns"
        else:
            area, area_of = (problem.samples * problem.channels, problem.points), ("channels", "points")
    else:
        area = problem.rows, problem.columns
        seen_as = f"{area[0]} rows of {area[1]} columns"
    launches, compiler = _launches(chosen, problem, target.device, area)
    explanation = Explanation(
        op=op,
        shape=call.x.shape,
        dtype=call.x.dtype,
        problem=problem,
        title=target.title,
        device=target.device,
        here=target.place is not None,
        seen_as=seen_as,
        area=area,
        area_of=area_of,
        plan=chosen,
        chosen=_chosen_by(tuned, problem, target.device),
        lives_in=_lives_in(chosen, launches),
        bytes_moved=problem.bytes_moved,
        moves=_moves(problem),
        copy_rate=target.rate,
        copy_rate_is=target.rate_is,
        launches=launches,
        compiler=compiler,
    )
    if measure is False or (measure is None and (place is None or place != target.place)):
        return explanation
    if target.place is None:
        raise RuntimeError(f"measure is True, but {target.title} is not a GPU of this machine")
    try:
        seconds, copy_seconds = _measure(call, target.place, call.x.pointer if place is not None else 0, problem)
    except (MemoryError, RuntimeError) as error:
        if measure:
            raise RuntimeError(f"the call cannot be timed: {error}") from error
        return dataclasses.replace(explanation, failure=str(error))
    return dataclasses.replace(explanation, seconds=seconds, copy_seconds=copy_seconds)


def _chosen_by(tuned: Entry | None, problem: Any, device: Device) -> str:
    if tuned is None:
        return "built in"
    where = f"measured here on {'x'.join(map(str, tuned.shape))}"
    if tuned.geometry is None:
        return f"built in, the best of {tuned.tried} {where}"
    if fitted(problem, device, tuned.geometry) is None:
        return f"built in, since what is best of {tuned.tried} {where} does not do for this"
    return f"tuned: the best of {tuned.tried} {where}, {tuned.built_in_seconds / tuned.seconds:.2f}x the built-in speed"


def _present(problem: AnyProblem, names: tuple[str, ...]) -> list[str]:
    """The operands of x's size that a problem has."""
    return [name for name in names if getattr(problem, name, None) is not None]


def _moves(problem: AnyProblem) -> str:
    *reads, last = _present(problem, _READ)
    writes = " and ".join(_present(problem, _WRITTEN))
    read = f"{', '.join(reads)} and {last} read" if reads else f"{last} read"
    return f"{read}, {writes} written" if writes else read


def _lives_in(chosen: Plan, launches: Sequence[LaunchExplanation]) -> str:
    main = next((item for item in launches if item.share), None)
    if main is None:
        return "nowhere: there is nothing to compute"
    together = f"of the {main.blocks_per_row} blocks"
    if chosen.strategy == "row_block":
        return f"in the registers of {main.threads_per_row} threads"
    if chosen.strategy == "row_cluster":
        return f"in the registers {together} of a cluster"
    if chosen.strategy == "row_grid":
        held = " and the registers" * (main.constants["HELD"] != 0)
        rest = "; what does not fit is read again" * (main.constants["STREAMED"] != 0)
        return f"in the shared memory{held} {together} that share it{rest}"
    if chosen.strategy == "channel_slab":
        return f"in the shared memory {together if main.cluster > 1 else 'of a block'}"
    if chosen.strategy == "channel_grid":
        return f"in the shared memory {together} that share it"
    if len([item for item in launches if item.share]) < 2:
        return "nowhere: no number is needed twice"
    return "nowhere on chip: it is read again, from L2 where it is still there"


def _launches(
    chosen: Plan, problem: AnyProblem, device: Device, area: tuple[int, int]
) -> tuple[tuple[LaunchExplanation, ...], str]:
    """The launches of a plan; and why registers are unknown, where they are."""
    elements = math.prod(area)
    itemsize = DTYPES[problem.x.dtype].itemsize
    present = _present(problem, (*_READ, *_WRITTEN))
    found, failure = [], ""
    for item in chosen.launches:
        fields = [(role, name) for role, name in item.arguments if name in present]
        written = len([role for role, _ in fields if role in _WRITTEN]) * elements * itemsize
        read = len([role for role, _ in fields if role not in _WRITTEN]) * elements * itemsize
        layout = _layout(item)
        constants = dict(item.constants)
        through = 0
        if item.kernel.startswith(("channel_slab", "channel_grid")) or constants.get("STAGE") == "ahead":
            through = read
        elif constants.get("STAGE") == "run":
            through = read + written
        elif item.kernel == "row_grid_forward":
            resident, held = int(constants["RESIDENT"]), int(constants["HELD"])
            through = read * min(resident, layout.vectors) // layout.vectors
            # Of x, or of the sum that a residual makes of it.
            read += elements * itemsize * max(0, layout.vectors - resident - held) // layout.vectors
        explained = LaunchExplanation(
            kernel=item.kernel,
            constants=constants,
            grid=item.grid,
            block=item.block,
            cluster=item.cluster,
            cooperative=item.cooperative,
            share=(min(layout.rows, area[0]), min(layout.columns, area[1])) if layout.rows else None,
            blocks_per_row=layout.blocks_per_row,
            block_stride=layout.block_stride,
            turns=layout.turns,
            threads_per_row=layout.threads_per_row,
            thread_stride=layout.thread_stride,
            vectors=layout.vectors,
            vector_bytes=layout.width * itemsize,
            bytes_read=read,
            bytes_written=written,
            bytes_through_shared=through,
            dynamic_shared_bytes=item.shared_bytes,
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
    groups = device.groups(item.cluster) * item.cluster if item.cluster > 1 else device.multiprocessors
    return dataclasses.replace(
        item,
        static_shared_bytes=taken.shared_bytes,
        registers=taken.registers,
        spill_bytes=taken.spill_bytes,
        blocks_per_multiprocessor=blocks,
        limited_by=limit,
        occupancy=threads,
        blocks_at_once=min(item.grid, groups * blocks),
    )


class _Layout(NamedTuple):
    """How a launch lies over its problem, as `LaunchExplanation` has it: a share is rows by columns."""

    rows: int = 0
    columns: int = 0
    blocks_per_row: int = 1
    block_stride: int = 1
    turns: int = 1
    threads_per_row: int = 1
    thread_stride: int = 1
    vectors: int = 0
    width: int = 0  # of a vector, in elements


def _layout(item: Launch) -> _Layout:
    constants: dict[str, Any] = dict(item.constants)
    given: dict[str, Any] = dict(item.arguments)
    if "VECTOR" not in constants:  # it only adds up what others have left
        return _Layout()
    width, threads = constants["VECTOR"], math.prod(item.block)
    if item.kernel.startswith("row_block"):
        rows, blocks = constants["ROWS_PER_BLOCK"], constants["BLOCKS_PER_ROW"]
        return _Layout(
            rows=rows,
            columns=given["columns_per_block"],
            blocks_per_row=blocks,
            turns=_times(_times(given["rows"], rows), item.grid // blocks),
            threads_per_row=constants["THREADS_PER_ROW"],
            vectors=constants["VECTORS"],
            width=width,
        )
    if item.kernel == "row_grid_forward":
        blocks, columns = given["blocks_per_row"], given["columns_per_block"]
        return _Layout(
            rows=1,
            columns=columns,
            blocks_per_row=blocks,
            turns=_times(given["rows"], item.grid // blocks),
            threads_per_row=threads,
            vectors=max(1, _times(columns - 2 * width * constants["PEELED"], width * threads)),
            width=width,
        )
    if item.kernel.startswith("row_split"):
        rows = constants["ROW_LANES"]
        columns = threads // rows * width * constants["UNROLL"]
        grouped = "rows_per_group" in given  # else a block has a chunk of columns
        blocks = given["tiles" if grouped else "splits"]
        turns = _times(given["rows_per_group"], rows) if grouped else _times(given["columns_per_split"], columns)
        return _Layout(
            rows=rows,
            columns=columns,
            blocks_per_row=blocks,
            block_stride=1 if grouped else item.grid // blocks,
            turns=turns,
            threads_per_row=threads // rows,
            thread_stride=rows,
            vectors=constants["UNROLL"],
            width=width,
        )
    if item.kernel.startswith("pointwise"):
        rows, columns = constants["ROW_LANES"] * constants["STEPS"], item.block[0] * width
        return _Layout(
            rows=1 if constants["RUN"] else rows,
            columns=columns * rows if constants["RUN"] else columns,
            blocks_per_row=item.grid if constants["RUN"] else given["tiles"],
            turns=_times(_times(given["rows"] + (given["rest"] > 0), rows), given["groups"]),
            threads_per_row=item.block[0],
            vectors=constants["STEPS"],
            width=width,
        )
    lanes, along = constants["CHANNEL_LANES"], constants["ALONG_CHANNELS"]
    channels = lanes * width if along else lanes
    common = {
        "rows": channels,
        "threads_per_row": threads // lanes,
        "thread_stride": lanes if along else 1,
        "width": width,
    }
    if "VECTORS" in constants:  # of channel_slab and channel_grid
        blocks = given.get("blocks_per_slab", item.cluster)
        return _Layout(
            columns=given["points_per_block"],
            blocks_per_row=blocks,
            turns=_times(given.get("slabs", 1), item.grid // blocks),
            vectors=constants["VECTORS"],
            **common,
        )
    points = threads // lanes * (1 if along else width) * constants["UNROLL"]
    return _Layout(
        columns=points,
        blocks_per_row=given["splits"],
        block_stride=_times(given["channels"], channels),
        turns=_times(given["points_per_split"], points),
        vectors=constants["UNROLL"],
        **common,
    )


def _times(whole: int, part: int) -> int:
    return -(-whole // part)


# ---- Times.


def _measure(call: _Call, index: int, x_pointer: int, problem: AnyProblem) -> tuple[float, float]:
    """The times of a call and of a copy of the bytes that must move: medians, with a cold L2 cache.

    x is the user's where it has an address; all else is drawn.
    """
    cupy = launch.cupy()
    with cupy.cuda.Device(index) as device:
        prepared, views = call.prepared(("cuda", index))
        device.synchronize()  # x may be on its way, on another stream
        kept = [None if view is None else _Memory(cupy, view) for view in views]
        pointers = [0 if memory is None else memory.pointer for memory in kept]
        if x_pointer:
            pointers[2 if call.backward and not call.residual else 0] = x_pointer
        workspace = cupy.empty(prepared.workspace_bytes, "uint8")
        source = cupy.zeros(problem.bytes_moved // 2, "uint8")
        target = cupy.empty_like(source)
        flushed = cupy.empty(max(2 * device.attributes.get("L2CacheSize", 0), _LEAST_FLUSHED_BYTES), "uint8")
        stream = cupy.cuda.get_current_stream()

        def median(work: Callable[[], Any]) -> float:
            pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(_SAMPLES)]
            for begin, end in pairs:
                # Overwrites L2; and while that takes its time, the work is queued, so that no host time is measured.
                flushed.data.memset_async(0, flushed.nbytes)
                begin.record()
                work()
                end.record()
            stream.synchronize()
            # The first ones compile, and wake the clocks.
            times = [float(cupy.cuda.get_elapsed_time(*pair)) for pair in pairs[_SAMPLES // 4 :]]
            return statistics.median(times) * 1e-3

        return (
            median(lambda: prepared.run(pointers, workspace.data.ptr, stream.ptr)),
            median(lambda: cupy.copyto(target, source)),
        )


class _Memory:
    """Memory for a view: bytes below 64, which are numbers from 0 to 2 in every dtype."""

    def __init__(self, cupy: Any, view: View) -> None:
        import numpy as np

        itemsize = DTYPES[view.dtype].itemsize
        reach = [(size - 1) * stride * itemsize for size, stride in zip(view.shape, view.strides) if size]
        lowest = sum(step for step in reach if step < 0)
        count = sum(map(abs, reach)) + itemsize + 16
        block = cupy.asarray(np.random.default_rng(0).integers(0, 64, min(count, _BLOCK), "uint8"))
        self._bytes = cupy.empty(count, "uint8")
        for start in range(0, count, _BLOCK):
            self._bytes[start : start + _BLOCK] = block[: count - start]
        # As far from a multiple of 16 bytes as the view is.
        self.pointer = self._bytes.data.ptr - lowest + (view.pointer + lowest - self._bytes.data.ptr) % 16
