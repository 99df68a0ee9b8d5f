"""Calls of the package whose right results are known: the problems that an experiment is checked on.

An `Example` is a call of an op with drawn tensors. It takes the way of every call, from checked views to a problem; the
definition in NumPy says in float64 what is right.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from cunorm.channel_norm import CHANNEL_NORMS, ChannelNorm
from cunorm.emulator.plans import owner_of
from cunorm.on_cpu import numpy_dtype
from cunorm.plan import (
    Device,
    Launch,
    Plan,
    Way,
    channel,
    channel_grid,
    channel_pipeline,
    plan,
    row_bulk,
    row_bulk_backward,
    row_split,
    rows,
)
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_split import Split
from cunorm.plan.channel_tiles import Tiles, direction, tile_lanes
from cunorm.plan.device import NO_UNEVEN_CLUSTERS
from cunorm.plan.launches import Builder
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.row_grid import RowGrid
from cunorm.plan.row_held import RowHeld
from cunorm.plan.row_memory import are_rows, has_several_channels, lie_alike, vector_width
from cunorm.plan.row_pipeline import RowPipeline, keeps_nothing
from cunorm.plan.row_stream import RowStream
from cunorm.plan.rows import RowWay
from cunorm.plan.rows_of_channels import as_rows
from cunorm.pointwise import Pointwise
from cunorm.prepared import (
    BACKWARD_NAMES,
    BACKWARD_RESULTS,
    FORWARD_NAMES,
    FORWARD_RESULTS,
    NOWHERE,
    Described,
    Op,
    Output,
    Prepared,
)
from cunorm.problem import (
    DTYPES,
    AnyProblem,
    BackwardProblem,
    ChannelBackward,
    ChannelForward,
    ChannelProblem,
    ForwardProblem,
    Problem,
    View,
)
from cunorm.row_norm import RowNorm

__all__ = [
    "Array",
    "Chosen",
    "Example",
    "Tensors",
    "launching",
    "of_kernel",
    "of_shapes",
    "outputs_of",
    "typical",
]

Array = np.ndarray[Any, Any]

# A GPU so small that the emulator has little to do, and that blocks take several rows each.
SMALL_DEVICE = Device("sm_90", 2, 512, clusters=(1, 1, 0, 0), uneven_clusters=NO_UNEVEN_CLUSTERS)
_GRID_DEVICE = Device("sm_90", multiprocessors=6, threads_per_multiprocessor=2048)
_EPS = 0.01  # large enough that a kernel without it is wrong
_CPU = ("cpu", 0)
# Largest difference from float64, in roundings of what is computed with, of the numbers that a result is made of.
_ROUNDINGS = 24.0


class Tensors(NamedTuple):
    """The arrays of one call by the names of its operands, None for those that it has not; and those that it writes."""

    operands: dict[str, Array | None]
    results: dict[str, Array]


@dataclass(frozen=True)
class Example:
    """A call of an op, of tensors that are drawn.

    ``layout`` is how x, dy and the residual lie in memory: "plain", at an "odd" offset, or with "gaps" between rows.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    backward: bool = False
    weight: str | None = "same"
    bias: str | None = "same"
    activation: str | None = None
    residual: bool = False
    stats: bool = True
    layout: str = "plain"
    axis: int = -1
    data_format: str = "NC..."
    num_groups: int | None = None
    running: bool = False

    COLUMNS = ("call", "shape", "dtype")

    @property
    def cells(self) -> tuple[str, str, str]:
        """What tables say of it."""
        call = f"{self.op}_backward" if self.backward else self.op
        return call, "x".join(map(str, self.shape)), self.dtype

    @property
    def flags(self) -> str:
        """What else is asked for, other than by default."""
        others = [item for item in fields(self) if item.name not in ("op", "shape", "dtype", "backward")]
        given = [(item.name, getattr(self, item.name), item.default) for item in others]
        return ", ".join(f"{name}={value}" for name, value, default in given if value != default)

    def __str__(self) -> str:
        return " ".join(self.cells)

    @property
    def without_statistics(self) -> Example:
        return replace(self, stats=False, running=False)

    @property
    def _op(self) -> Op:
        if self.op == "gelu":
            return Pointwise.of("tanh" if self.activation == "gelu_tanh" else "none")
        if self.op in ("layer_norm", "rms_norm"):
            return RowNorm.of(self.axis, _EPS, self.activation, self.op == "layer_norm")
        return ChannelNorm.of(self.op, self.data_format, _EPS, self.activation, self.num_groups)

    @property
    def _vector_length(self) -> int:
        if self.op in ("layer_norm", "rms_norm", "gelu"):
            return self.shape[self.axis]
        return self.shape[-1 if self.data_format.endswith("C") else 1]

    def draw(self, blank: bool = False) -> dict[str, Array | None]:
        """The tensors that the call is given, by their names, not to be written; ``blank`` ones have no numbers."""
        tensors = self._drawn(blank)
        for array in tensors.values():
            if array is not None:
                owner_of(array).flags.writeable = False
        return tensors

    def _drawn(self, blank: bool) -> dict[str, Array | None]:
        drawn, length = _blank if blank else _drawn, self._vector_length

        def vector(seed: int, kind: str | None, about: float) -> Array | None:
            return None if kind is None else drawn(seed, (length,), self.dtype if kind == "same" else kind, about, 0.25)

        def matrix(seed: int, about: float) -> Array:
            if self.layout == "odd":
                return drawn(seed, (math.prod(self.shape) + 1,), self.dtype, about)[1:].reshape(self.shape)
            if self.layout == "gaps":
                return drawn(seed, (*self.shape[:-1], self.shape[-1] + 3), self.dtype, about)[..., :-3]
            return drawn(seed, self.shape, self.dtype, about)

        x = matrix(1, 0.3)
        tensors: dict[str, Array | None] = {"x": x, "weight": vector(2, self.weight, 1.0)}
        tensors["bias"] = vector(3, self.bias, 0.2)
        if self.running and not self.backward:
            tensors["running_mean"] = drawn(6, (length,), "float32", 0.0)
            tensors["running_var"] = drawn(7, (length,), "float32", 3.0, 0.1)
        if not self.backward:
            return tensors | {"residual": matrix(4, 0.0) if self.residual else None}
        tensors |= {"dy": matrix(4, 0.1), "dresidual_out": matrix(5, 0.0) if self.residual else None}
        if self.op == "gelu":
            return tensors
        # The statistics as the forward pass leaves them, rounded.
        forward = replace(self, backward=False, residual=False, running=False, stats=True, activation=None)
        described = forward.described({"x": x})
        exact = {} if blank else forward._in_float64({"x": x})
        for name, output in zip(FORWARD_RESULTS, described.outputs):
            if name in ("mean", "rstd") and output is not None:
                empty = _empty(output, output.dtype)
                tensors[name] = empty if blank else exact[name].astype(empty.dtype)
        return tensors

    def described(self, tensors: Mapping[str, Array | None]) -> Described:
        """The problem of the call, with what it returns."""
        described = self._prepared(tensors, NOWHERE)
        assert isinstance(described, Described)
        return described

    def _prepared(self, tensors: Mapping[str, Array | None], device: tuple[str, int]) -> Prepared:
        views: dict[str, Any] = {
            name: None if array is None else _view_of(array, device) for name, array in tensors.items()
        }
        if self.backward:
            given: dict[str, Any] = {name: views.get(name) for name in BACKWARD_NAMES}
            mask = (True, self.op != "gelu", self.bias is not None)  # of what there is
            return self._op.prepare_backward(**given, output_mask=mask, bias_dtype=None)
        given = {name: views.get(name) for name in FORWARD_NAMES[:4]}
        running = (views["running_mean"], views["running_var"]) if self.running else ()
        return self._op.prepare_forward(**given, out=None, stats=self.stats and self.op != "gelu", running=running)

    def tensors(self, given: Mapping[str, Array | None]) -> Tensors:
        """Fresh arrays of a call: those given, and NaNs for its results."""
        described = self.described(given)
        named = zip(outputs_of(self), described.outputs)
        results = {name: _empty(output, output.dtype) for name, output in named if output is not None}
        for name in ("running_mean", "running_var"):
            if (array := given.get(name)) is not None:
                results[name] = array.copy()
        operands = {name: results.get(name, given.get(name)) for name in described.operands}
        return Tensors(operands, results)

    def expected(self, given: Mapping[str, Array | None]) -> dict[str, Array]:
        """The results in float64, by their names."""
        residual = None if self.backward else given.get("residual")
        if residual is None:
            return self._in_float64(given)
        compute, x = numpy_dtype(DTYPES[self.dtype].compute), given["x"]
        assert x is not None
        total = (x.astype(compute) + residual.astype(compute)).astype(x.dtype)  # it is rounded before it is normalized
        summed = replace(self, residual=False)._in_float64({**given, "x": total, "residual": None})
        return summed | {"residual_out": total.astype(np.float64)}

    def _in_float64(self, given: Mapping[str, Array | None]) -> dict[str, Array]:
        wide = {name: None if array is None else array.astype(np.float64) for name, array in given.items()}
        prepared = self._prepared(wide, _CPU)
        named = zip(outputs_of(self), prepared.outputs)
        results = {name: _empty(item, "float64") for name, item in named if item is not None}
        results |= {name: array for name, array in wide.items() if name.startswith("running_") and array is not None}
        operands = self.described(given).operands
        arrays = [results.get(name, wide.get(name)) for name in operands]
        prepared.run([0 if array is None else _address(array) for array in arrays], 0, 0)
        return results

    def limits(self, name: str, given: Mapping[str, Array | None], expected: Array, dtype: str) -> Array:
        """How far a result may be from ``expected``, number by number: rounded once, from what was summed."""
        if name == "residual_out":
            return np.zeros(())  # it has to be exact
        size = float(np.abs(expected).max(initial=0))
        dy, x, rstd, weight = (_largest(given.get(key)) for key in ("dy", "x", "rstd", "weight"))
        if name in ("dweight", "dbias"):
            total = given["dy"]
            assert total is not None
            size = max(size, float(np.abs(total.astype(np.float64)).sum()) / max(1, expected.size))
        elif name == "dx":
            size = max(size, dy * (weight or 1.0) * (rstd or 1.0))
        elif name == "mean":
            size = x
        compute = np.finfo(DTYPES[self.dtype].compute)
        rounding = np.abs(expected) * 2.0 ** -_BITS[dtype]
        if dtype == "float16":
            rounding = np.maximum(rounding, 2.0**-25)  # subnormals
        return rounding + _ROUNDINGS * float(compute.eps) / 2 * size


def outputs_of(example: Example) -> tuple[str, ...]:
    """The names of what a call returns, in order."""
    return BACKWARD_RESULTS if example.backward else FORWARD_RESULTS


# Of each dtype: a rounding changes a number by at most two to minus that of it.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def _drawn(seed: int, shape: tuple[int, ...], dtype: str, about: float, spread: float = 1.0) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (about + spread * values).astype(numpy_dtype(dtype))


def _blank(seed: int, shape: tuple[int, ...], dtype: str, about: float, spread: float = 1.0) -> Array:
    return np.empty(shape, numpy_dtype(dtype))


def _largest(array: Array | None) -> float:
    return 0.0 if array is None else float(np.abs(array.astype(np.float64)).max(initial=0))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _view_of(array: Array, device: tuple[str, int]) -> View:
    strides = tuple(step // array.itemsize for step in array.strides)
    return View(_address(array), array.shape, strides, array.dtype.name, device)


def _empty(output: Output, dtype: str) -> Array:
    return np.full(output.shape_in_memory, np.nan, numpy_dtype(dtype)).transpose(output.places)


# ---- The table: shapes by the families of kernels, and what is asked for in turn.

_ROWS = [(33, 8), (9, 100), (5, 257), (3, 1000), (40, 768), (2, 4097), (2, 8200), (1, 16384), (3, 20004)]
_GPU_ROWS = [(4096, 1024), (2048, 4096), (513, 8191), (64, 65536), (16, 140_001), (20_000, 256), (2, 2_000_000)]
_GPU_ROWS += [(12, 600_000), (6, 1_200_000), (20, 700_000), (5, 1_000_001)]
_GPU_ROWS += [(8448, 4097), (2112, 16_385), (4224, 8193)]  # of which some are claimed
_GPU_ROWS += [(20_000, 129), (6000, 257), (3000, 65)]  # in bulk
_GPU_ROWS += [(800, 25_001), (200, 70_001), (100, 131_073)]  # that stream
_CHANNELS = [
    ("instance_norm", (2, 3, 7, 7), "NC...", None),
    ("instance_norm", (2, 7, 7, 40), "N...C", None),
    ("group_norm", (2, 40, 7, 7), "NC...", 4),
    ("group_norm", (3, 9, 9, 40), "N...C", 4),
    ("group_norm", (3, 64, 16, 16), "NC...", 8),
    ("batch_norm", (6, 5, 8, 8), "NC...", None),
    ("batch_norm", (6, 7, 7, 3), "N...C", None),
    ("batch_norm", (40, 130, 3), "NC...", None),
    ("instance_norm", (2, 2, 20_000), "NC...", None),
    ("batch_norm", (8, 900, 24), "N...C", None),
    ("group_norm", (5, 60, 64), "N...C", 8),
    ("instance_norm", (3, 50, 32), "N...C", None),
    ("instance_norm", (3, 2, 1504), "NC...", None),
    ("instance_norm", (5, 1, 2656), "NC...", None),
    ("instance_norm", (2, 3, 1328), "NC...", None),
]
_GPU_CHANNELS = [
    ("instance_norm", (2, 64, 128, 128), "NC...", None),
    ("instance_norm", (2, 128, 128, 64), "N...C", None),
    ("group_norm", (8, 64, 64, 320), "N...C", 32),
    ("group_norm", (2, 320, 64, 64), "NC...", 32),
    ("batch_norm", (32, 64, 56, 56), "NC...", None),
    ("batch_norm", (32, 56, 56, 64), "N...C", None),
    ("group_norm", (4, 128, 128, 320), "N...C", 32),
    ("instance_norm", (2, 2, 1_500_001), "NC...", None),
    ("instance_norm", (2, 3, 1_000_000), "NC...", None),
    ("instance_norm", (1, 1_000_003, 3), "N...C", None),
    ("group_norm", (8, 64, 64, 640), "N...C", 32),
    ("group_norm", (16, 64, 64, 320), "N...C", 32),
    ("batch_norm", (8, 300, 300, 9), "N...C", None),
    ("batch_norm", (4, 16, 301, 301), "NC...", None),
    ("batch_norm", (2, 8, 601, 601), "NC...", None),
    ("group_norm", (8, 96, 96, 96), "N...C", 32),
    ("instance_norm", (1, 2, 128, 128, 128), "NC...", None),  # channels of which registers hold one
    ("instance_norm", (1, 2, 160, 160, 160), "NC...", None),
    ("instance_norm", (1, 3, 160, 160, 160), "NC...", None),
    ("instance_norm", (1, 2, 200, 200, 200), "NC...", None),
]
# What is asked for, in turn: every dtype, activation and layout, with and without weights.
_ASKED: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "residual": True},
    {"dtype": "float16", "layout": "odd", "activation": "silu"},
    {"bias": None, "layout": "gaps", "activation": "gelu"},
    {"dtype": "bfloat16", "weight": None, "bias": None, "stats": False},
    {"dtype": "float16", "weight": "float32", "bias": "float32", "activation": "relu", "residual": True},
    {"dtype": "float64", "activation": "gelu_tanh"},
]


def _of_rows(shape: tuple[int, ...], asked: Iterator[dict[str, Any]], axis: int = -1) -> Iterator[Example]:
    for backward, op in itertools.product((False, True), ("layer_norm", "rms_norm")):
        yield Example(op, shape, backward=backward, axis=axis, **next(asked))
    if axis == -1:
        for backward, (activation, bias) in itertools.product((False, True), (("gelu", None), ("gelu_tanh", "same"))):
            options = next(asked) | {"activation": activation, "bias": bias, "weight": None, "residual": False}
            yield Example("gelu", shape, backward=backward, **options)


def _of_channels(
    op: str, shape: tuple[int, ...], data_format: str, groups: int | None, asked: Iterator[dict[str, Any]]
) -> Iterator[Example]:
    for backward in (False, False, True, True):
        options = next(asked) | {"residual": False}
        running = op == "batch_norm" and not backward
        yield Example(
            op, shape, backward=backward, data_format=data_format, num_groups=groups, running=running, **options
        )


def _table(
    rows: Sequence[tuple[int, ...]], channels: Sequence[tuple[Any, ...]], every: Sequence[dict[str, Any]]
) -> list[Example]:
    asked = itertools.cycle(every)
    examples = [example for shape in rows for example in _of_rows(shape, asked)]
    examples += [example for shape in ((300, 70), (6, 50, 40)) for example in _of_rows(shape, asked, axis=0)]
    return examples + [
        example
        for op, shape, data_format, groups in channels
        for example in _of_channels(op, shape, data_format, groups, asked)
    ]


_ON_EMULATOR = _table(_ROWS, _CHANNELS, _ASKED)
# Of so many numbers one comes so near to zero that relu's derivative may jump.
_ON_GPU = _ON_EMULATOR + _table(_GPU_ROWS, _GPU_CHANNELS, [asked for asked in _ASKED if "relu" not in asked.values()])


def of_shapes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[Example]:
    """The ops on tensors of these shapes: first those of rows, which any shape has."""
    examples = []
    try:
        sizes = [tuple(map(operator.index, shape)) for shape in shapes]
    except TypeError:
        raise TypeError(f"shapes is {shapes!r}; it must be a sequence of shapes, each a sequence of ints") from None
    for shape in sizes:
        if not shape or min(shape) < 0:
            raise ValueError(f"shapes has {shape}; a shape must have a dimension, and none may be negative")
    for shape, dtype in itertools.product(sizes, dtypes):
        examples += list(_of_rows(shape, itertools.repeat({"dtype": dtype})))
        if len(shape) > 2:
            for op, data_format in itertools.product(CHANNEL_NORMS, ("NC...", "N...C")):
                channels = shape[-1 if data_format == "N...C" else 1]
                groups = math.gcd(channels, 32) if op == "group_norm" else None
                examples += list(_of_channels(op, shape, data_format, groups, itertools.repeat({"dtype": dtype})))
    return list(dict.fromkeys(examples))


def typical(dtype: str) -> list[Example]:
    """Plain calls of sizes that GPUs are used for."""
    return of_shapes([*_GPU_ROWS, *(shape for _, shape, _, _ in _GPU_CHANNELS)], [dtype])


# ---- Those that launch a kernel.


class Chosen(NamedTuple):
    """An example, and the plan by which it is computed."""

    example: Example
    plan: Plan

    def launches(self, kernel: str) -> list[Launch]:
        return [launch for launch in self.plan.launches if launch.kernel == kernel]


def launching(kernel: str, examples: Sequence[Example], device: Device | None) -> list[Chosen]:
    """The examples whose plan on a device launches a kernel; without one, for the emulator, those that could."""
    found = []
    for example in examples:
        try:
            problem = example.described(example.draw(blank=True)).problem
        except ValueError:  # a batch norm of one value a channel, say: not every op has every shape
            continue
        chosen = Chosen(example, _emulated(problem, kernel) if device is None else plan(problem, device))
        if chosen.launches(kernel):
            found.append(chosen)
    return found


def of_kernel(kernel: str, device: Device | None, most: int) -> list[Chosen]:
    """Up to so many examples of the table that launch a kernel: as various as possible, of small ones first."""
    rest = launching(kernel, _ON_EMULATOR if device is None else _ON_GPU, device)
    rest.sort(key=lambda chosen: math.prod(chosen.example.shape))

    def traits(chosen: Chosen) -> set[Any]:
        example = chosen.example
        constants: set[Any] = {item for launch in chosen.launches(kernel) for item in launch.constants}
        constants.add(("weight", example.weight))
        return constants | {example.op, example.backward, example.layout, chosen.plan.strategy, len(example.shape)}

    picked: list[Chosen] = []
    seen: set[Any] = set()
    while rest and len(picked) < most:
        best = max(rest, key=lambda chosen: len(traits(chosen) - seen))  # the smallest of those that are equal
        picked.append(best)
        seen |= traits(best)
        rest.remove(best)
    return picked


def _emulated(problem: AnyProblem, kernel: str) -> Plan:
    """The plan for a small device; if it does not launch the kernel, that of the kernel's family.

    Plans take some families for tensors only that are larger than what an emulator should be asked to compute.
    """
    own = plan(problem, SMALL_DEVICE)
    if problem.bytes_moved == 0 or any(launch.kernel == kernel for launch in own.launches):
        return own
    family = kernel.rsplit("_", kernel.count("_") - 1)[0]
    if isinstance(problem, ForwardProblem | BackwardProblem):
        if family == "row_split" or kernel == "split_merge":
            builder = Builder()
            return builder.finished(row_split.plan(problem, SMALL_DEVICE, builder))
        shared: RowWay | None = None
        if family == "row_bulk":
            shared = _in_bulk(problem)
        if family == "row_grid":
            shared = _in_a_grid(problem)
        if kernel == "zeros":
            shared = _claimed(problem)
        if family == "row_pipeline":
            shared = _in_a_pipeline(problem)
        if family == "row_held":
            shared = _held(problem)
        if family == "row_stream":
            shared = _in_a_stream(problem)
        return own if shared is None else rows.plan_with(problem, SMALL_DEVICE, shared)
    if isinstance(problem, ChannelForward | ChannelBackward):
        if family == "row_held":
            of_channels = as_rows(problem)
            held = None if of_channels is None else _held(of_channels)
            return rows.plan_with(of_channels, SMALL_DEVICE, held) if of_channels and held else own
        way: Way | None = None
        if family == "channel_split" or kernel == "split_merge":
            way = Split()
        if family == "channel_grid":
            way = next(channel_grid.candidates(problem, _GRID_DEVICE), None)
        if family == "channel_pipeline":
            way = _slabs_in_a_pipeline(problem)
        return own if way is None else channel.plan_with(problem, SMALL_DEVICE, way)
    return own


def _claimed(problem: Problem) -> RowBlock | None:
    """Blocks of 64 threads that claim whole rows by a counter; None for rows that are too few for that, or others."""
    if not isinstance(problem, ForwardProblem) or not are_rows(problem):
        return None
    width = vector_width(problem)
    way = RowBlock(width, -(-problem.columns // (64 * width)), 64, blocks_per_multiprocessor=1)
    return way if way.vectors <= 8 and way.claims_rows(problem, SMALL_DEVICE) else None


def _in_bulk(problem: Problem) -> RowBulk | RowBulkBackward | None:
    """Blocks of two warps with a row each, some times after each other; None for rows of many vectors, and others."""
    width = vector_width(problem)
    vectors = -(-problem.columns // (32 * width))
    if vectors > 10:
        return None
    if row_bulk.is_possible(problem, SMALL_DEVICE):
        return RowBulk(width, vectors, 32, 2, 4)
    if row_bulk_backward.is_possible(problem, SMALL_DEVICE):
        return RowBulkBackward(width, vectors, 32, 2, 8, stages=3, min_blocks=1)
    return None


def _in_a_grid(problem: Problem) -> RowGrid | None:
    """Four blocks of 64 threads, each of which takes something of a row and has room for it; None for other rows."""
    if not isinstance(problem, ForwardProblem) or not are_rows(problem) or not lie_alike(problem):
        return None
    width = 16 // problem.itemsize
    if not 32 * width < problem.columns <= 1024 * width:
        return None
    return RowGrid(width, 4, 4, 1, threads=64, peeled=problem.columns % width > 0)


def _in_a_pipeline(problem: Problem) -> RowPipeline | None:
    """Four blocks of 64 threads that share rows of some vectors each; None for other rows."""
    width = 16 // problem.itemsize
    peeled = vector_width(problem) < width
    if not are_rows(problem) or not 32 * width < problem.columns <= 2048 * width:
        return None
    if peeled and not (keeps_nothing(problem) and lie_alike(problem)):
        return None
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return None
    geometry = RowPipeline(width, 1, blocks_per_row=4, groups=1, rows_ahead=3, lag=1, threads=64, peeled=peeled)
    return replace(geometry, resident=geometry.vectors(problem))


def _held(problem: Problem) -> RowHeld | None:
    """The same of rows of which registers hold one, without weights; None for other rows."""
    width = 16 // problem.itemsize
    if not are_rows(problem) or vector_width(problem) < width or not keeps_nothing(problem):
        return None
    if problem.itemsize > 4 or has_several_channels(problem) or not 32 * width < problem.columns <= 2048 * width:
        return None
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return None
    way = RowHeld(width, 1, blocks_per_row=4, ring=1, threads=64)
    return replace(way, resident=way.vectors(problem), ring=way.vectors(problem) + 2)


def _in_a_stream(problem: Problem) -> RowStream | None:
    """The same of parts that are runs of memory; None for other rows."""
    width = 16 // problem.itemsize
    if not are_rows(problem) or not lie_alike(problem) or not 32 * width < problem.columns <= 2048 * width:
        return None
    if isinstance(problem, BackwardProblem) and problem.dx is None:
        return None
    way = RowStream(width, 1, blocks_per_row=4, groups=1, rows_ahead=4, lag=2, threads=64)
    way = replace(way, blocks_per_row=-(-problem.columns // way.columns_per_block(problem)))
    return replace(way, resident=way.vectors(problem))


def _slabs_in_a_pipeline(problem: ChannelProblem) -> ChannelPipeline | None:
    """Blocks of 64 threads that share slabs of two lanes of channels, or more; None for other tensors."""
    way = direction(problem)
    if isinstance(problem, ChannelBackward) and (problem.dx is None or problem.given):
        return None
    for lanes, threads in tile_lanes(problem, way, 64) if channel_pipeline.is_possible(problem, SMALL_DEVICE) else ():
        tiles = Tiles(way, lanes, threads, 1)
        sets = tiles.channels // problem.channels_per_set
        per_block = max(1, min(problem.points // max(sets, 4), 12 * tiles.point_lanes))
        blocks, resident = -(-problem.points // per_block), -(-per_block // tiles.point_lanes)
        if problem.channels % tiles.channels == 0 and sets <= min(32, blocks):
            return ChannelPipeline(tiles, resident, blocks, 1, per_block, ahead=3, lag=2)
    return None
