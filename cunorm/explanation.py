"""`cunorm.explain`: the plan of a call as an object, which a notebook draws and a terminal prints."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cunorm import adapters, gpus, launch, ops
from cunorm.channel_norm import ChannelNorm
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
# What not every op takes.
_TAKEN_BY = {
    "axis": _ROW_NORMS,
    "residual": _ROW_NORMS,
    "num_groups": ("group_norm",),
    "data_format": _CHANNEL_NORMS,
    "training": ("batch_norm",),
    "running": ("batch_norm",),
    "approximate": ("gelu",),
    **dict.fromkeys(("weight", "activation", "return_stats"), OPS[:-1]),
}
# The operands of x's size, those that kernels read first; kernels name their fields after them, too.
_READ, _WRITTEN = ("x", "residual", "dy", "dresidual_out"), ("y", "residual_out", "dx")
_SAMPLES = 20
_BLOCK = 2**22 - 3  # bytes that are drawn, and then repeated


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
    here: bool
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
        return _area(self.problem, self.plan)[0]

    @property
    def area(self) -> tuple[int, int]:
        return _area(self.problem, self.plan)[1]

    @property
    def seen_as(self) -> str:
        problem, text = self.problem, f"{self.area[0]} {self.area_of[0]} of {self.area[1]} {self.area_of[1]}"
        if isinstance(problem, ChannelForward | ChannelBackward):
            text += f"; {problem.samples} samples of {problem.channels} channels of {problem.points} points"
            text += f", {problem.channels_per_set} channels a mean"
        return text

    @property
    def lives_in(self) -> str:
        """Where a row lies between the pass that sums it and the pass that finishes it."""
        main = next((item for item in self.launches if item.share), None)
        if main is None:
            return "nowhere: there is nothing to compute"
        together = f"of the {main.blocks_per_row} blocks"
        if self.strategy == "row_block":
            return f"in the registers of {main.threads_per_row} threads"
        if self.strategy == "row_cluster":
            return f"in the registers {together} of a cluster"
        if self.strategy == "row_grid":
            held = " and the registers" * (main.constants["HELD"] != 0)
            rest = "; what does not fit is read again" * (main.constants["STREAMED"] != 0)
            return f"in the shared memory{held} {together} that share it{rest}"
        if self.strategy == "channel_slab":
            return f"in the shared memory {f'{together} of a cluster' if main.cluster > 1 else 'of a block'}"
        if self.strategy == "channel_grid":
            return f"in the shared memory {together} that share it"
        if len([item for item in self.launches if item.share]) < 2:
            return "nowhere: no number is needed twice"
        return "nowhere on chip: it is read again, from L2 where it is still there"

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move."""
        return self.problem.bytes_moved

    @property
    def moves(self) -> str:
        *reads, last = _present(self.problem, _READ)
        writes = " and ".join(_present(self.problem, _WRITTEN))
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
        from cunorm.figure import draw

        return draw(self, "white")

    def _repr_html_(self) -> str:
        from cunorm.figure import as_html

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
    backward : bool
        The gradient instead. dy is taken to lie in memory as y does.
    axis, num_groups, data_format, activation, approximate, training, return_stats
        As the op takes them.
    weight, bias, residual : tensor, bool or str, optional
        A tensor; or whether there is one, or its dtype, if that is not x's. By default norms have both weight and bias,
        but RMS norm only a weight, and gelu none.
    running : bool or str, optional
        Whether a batch norm has running statistics, and their dtype; by default it has, of the weight's dtype.
    output_mask : tuple of three bools, optional
        Backward: which of dx, dweight, dbias are computed; by default those of what there is.
    arch : str, optional
        Plan for another GPU, such as "sm_80". By default it is x's, else this machine's, and without one an H200.
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
    for name, ops_with in _TAKEN_BY.items():
        default = (explain.__kwdefaults__ or {})[name]
        if op not in ops_with and not (isinstance(given[name], type(default)) and given[name] == default):
            raise ValueError(f"{name} is {given[name]!r}; it is for {', '.join(ops_with)}, not for {op}")
    view, place = _seen(x, "x")
    the_op: Op
    if op in _ROW_NORMS:
        the_op = ops.RowNorm.of(axis, 1e-5 if op == "layer_norm" else 1e-6, activation, op == "layer_norm")
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
    except ValueError:  # strides that no call takes
        raise
    except Exception:  # it has no memory: a tracer, a tensor on PyTorch's meta device, an object that speaks of one
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            raise
        if None in tensor.shape:
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
    launches, compiler = _launches(chosen, problem, target.device)
    explanation = Explanation(
        op=op,
        shape=call.x.shape,
        dtype=call.x.dtype,
        problem=problem,
        title=target.title,
        device=target.device,
        here=target.place is not None,
        plan=chosen,
        chosen=_chosen_by(tuned, problem, target.device),
        copy_rate=target.rate,
        copy_rate_is=target.rate_is,
        launches=launches,
        compiler=compiler,
    )
    if measure is False or (measure is None and (place is None or place != target.place)):
        return explanation
    if target.place is None:
        raise RuntimeError(f"measure is True, but {target.title} is not a GPU of this machine")
    x_pointer = 0 if place is None else call.x.pointer
    try:
        seconds, copy_seconds = _measure(call, target.place, x_pointer, problem.bytes_moved)
    except (MemoryError, RuntimeError) as error:
        if measure:
            raise RuntimeError(f"the call cannot be timed: {error}") from error
        return dataclasses.replace(explanation, failure=str(error))
    finally:
        launch.cupy().get_default_memory_pool().free_all_blocks()  # which other libraries may need
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


def _area(problem: AnyProblem, chosen: Plan) -> tuple[tuple[str, str], tuple[int, int]]:
    if not isinstance(problem, ChannelForward | ChannelBackward):
        return ("rows", "columns"), (problem.rows, problem.columns)
    if chosen.strategy.startswith("row_"):
        return ("rows", "columns"), (problem.sets, problem.channels_per_set * problem.points)
    return ("channels", "points"), (problem.samples * problem.channels, problem.points)


def _launches(chosen: Plan, problem: AnyProblem, device: Device) -> tuple[tuple[LaunchExplanation, ...], str]:
    """The launches of a plan; and why registers are unknown, where they are."""
    _, area = _area(problem, chosen)
    itemsize = DTYPES[problem.x.dtype].itemsize
    all_bytes = math.prod(area) * itemsize
    present = _present(problem, (*_READ, *_WRITTEN))
    found, failure = [], ""
    for item in chosen.launches:
        fields = [(role, name) for role, name in item.arguments if name in present]
        written = sum(role in _WRITTEN for role, _ in fields) * all_bytes
        read = len(fields) * all_bytes - written
        layout = _layout(item, area, itemsize)
        constants = dict(item.constants)
        through = 0
        if item.kernel.startswith(("channel_slab", "channel_grid")) or constants.get("STAGE") == "ahead":
            through = read
        elif constants.get("STAGE") == "run":
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
    # Of row_block and row_grid, of channel_slab and channel_grid; else tiles.
    columns = given.get("columns_per_block") or given.get("points_per_block")
    if not columns:
        columns = threads_per_row * (plane if along else width) * (1 if "STEPS" in constants else vectors)
    rows = constants.get("ROWS_PER_BLOCK") or lanes * (width if along else 1) // plane * constants.get("STEPS", 1)
    if constants.get("RUN"):
        rows, columns = 1, columns * rows
    if item.kernel == "row_grid_forward":
        vectors = max(1, _times(columns - 2 * width * constants["PEELED"], width * threads))
    share = min(rows, area[0]), min(columns, area[1])
    pieces = [_times(whole, part) for whole, part in zip(area, share)] if 0 not in share else [0, 0]
    counts = [given[name] for name in ("blocks_per_row", "blocks_per_slab", "splits", "tiles") if name in given]
    blocks_per_row = pieces[1] if constants.get("RUN") else counts[0] if counts else item.cluster
    block_stride = 1
    if "splits" in given:  # neighbours have the same part of other rows: of all, or of a sample's channels
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


# ---- Times.


def _measure(call: _Call, index: int, x_pointer: int, moved_bytes: int) -> tuple[float, float]:
    """The times of a call and of a copy of the bytes that must move: medians, with a cold L2 cache.

    x is the user's where it has an address; all else is drawn at random.
    """
    cupy = launch.cupy()
    with cupy.cuda.Device(index) as device:
        prepared, views = call.prepared(("cuda", index))
        device.synchronize()  # x may be on its way, on another stream
        memory = [None if view is None else _memory(cupy, view) for view in views]
        pointers = [0 if item is None else item[1] for item in memory]
        if x_pointer:
            pointers[2 if call.backward and not call.residual else 0] = x_pointer
        workspace = cupy.empty(prepared.workspace_bytes, "uint8")
        source = cupy.zeros(moved_bytes // 2, "uint8")
        target = cupy.empty_like(source)
        flushing = gpus.flushing_memory(index)
        stream = cupy.cuda.get_current_stream()

        def median(work: Callable[[], Any]) -> float:
            times = gpus.cold_seconds(work, _SAMPLES, flushing)
            return statistics.median(times[_SAMPLES // 4 :])  # the first warm up

        seconds = median(lambda: prepared.run(pointers, workspace.data.ptr, stream.ptr))
        return seconds, median(lambda: cupy.copyto(target, source))


def _memory(cupy: Any, view: View) -> tuple[Any, int]:
    """Memory for a view, of bytes below 64, which are numbers from 0 to 2 in every dtype; and the view's address."""
    import numpy as np

    itemsize = DTYPES[view.dtype].itemsize
    reach = [(size - 1) * stride * itemsize for size, stride in zip(view.shape, view.strides) if size]
    lowest, count = sum(step for step in reach if step < 0), sum(map(abs, reach)) + itemsize + 16
    block = cupy.asarray(np.random.default_rng(0).integers(0, 64, min(count, _BLOCK), "uint8"))
    memory = cupy.empty(count, "uint8")
    for start in range(0, count, _BLOCK):
        memory[start : start + _BLOCK] = block[: count - start]
    # As far from a multiple of 16 bytes as the view is.
    return memory, memory.data.ptr - lowest + (view.pointer + lowest - memory.data.ptr) % 16
