"""What is measured: suites of rows, each named for what it reproduces. Plain tables; nothing here needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

__all__ = ["DIRECTIONS", "GELUS", "ODD_NEIGHBOURS", "SHAPES", "SUITES", "Row", "suite"]

# The sweep of rows of which neither the rows nor the columns are the same or grow: a plot shows one after the other.
SHAPES = "shapes"

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

# How many numbers must be read and written for each element of x: without and with a residual.
_MOVED = {
    "forward": (2, 4),  # x, y; and residual, residual_out
    "forward_stats": (2, 4),
    "recorded": (2, 4),
    "backward": (3, 4),  # dy, x, dx; and dresidual_out
    "both": (5, 8),
}
DIRECTIONS = tuple(_MOVED)


@dataclass(frozen=True)
class Row:
    """One problem: the norm of the last axis of a tensor, or a gelu of it, in one direction.

    The gelus are gelu and gelu_tanh, and with a bias bias_gelu and bias_gelu_tanh.
    ``direction`` is forward, forward_stats (mean and rstd are results too), backward (all gradients that the problem
    has), both (the one after the other) or recorded (forward, with automatic differentiation recording). ``offset`` is
    how many elements x and dy lie behind an aligned address. ``clock`` is device (time on the GPU) or host (time that a
    call takes of the CPU). Rows of a suite with the same ``sweep`` make one line of a plot.
    """

    suite: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    residual: bool = False
    offset: int = 0
    clock: str = "device"
    framework: str = "torch"
    sweep: str = ""

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def approximate(self) -> str:
        """That of a gelu; nothing for a norm."""
        return {"gelu": "none", "gelu_tanh": "tanh"}.get(self.op.removeprefix("bias_"), "")

    @property
    def is_biased_gelu(self) -> bool:
        return self.op.startswith("bias_")

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def moved_bytes(self) -> int:
        """The bytes that must move: what has the size of x. Weights, statistics and partial sums are not counted."""
        return _MOVED[self.direction][self.residual] * math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def variant(self) -> str:
        """What sets the row apart from others of its op, shape, dtype and direction."""
        parts = ["residual"] * self.residual + ["unaligned"] * bool(self.offset)
        parts += [f"{self.clock} {self.framework}"] * (self.clock == "host")
        return ", ".join(parts)

    @property
    def label(self) -> str:
        return f"{self.op} {self.size} {self.dtype} {self.direction}" + (f" ({self.variant})" if self.variant else "")

    def matches(self, words: str) -> bool:
        """Whether all of these words are in the label, and none of those that begin with an exclamation mark."""
        return all((word.lstrip("!") in self.label) != word.startswith("!") for word in words.split())

    @property
    def inputs_key(self) -> tuple[object, ...]:
        """Rows with the same key can be measured on the same tensors."""
        return self.op, self.shape, self.dtype, self.offset


def _rows(
    name: str,
    shapes: Iterable[tuple[int, ...]],
    dtypes: Iterable[str],
    directions: Iterable[str],
    ops: Iterable[str] = ("layer_norm",),
    sweep: str | Callable[[tuple[int, ...]], str] = "",
    residual: bool = False,
    offset: int = 0,
) -> Iterator[Row]:
    """Every combination; shapes outermost and directions innermost, so that neighbours share their tensors."""
    for shape in shapes:
        for dtype in dtypes:
            for op in ops:
                for direction in directions:
                    of = sweep if isinstance(sweep, str) else sweep(shape)
                    yield Row(name, op, shape, dtype, direction, residual, offset, sweep=of)


_NORMS = ("layer_norm", "rms_norm")


def _triton_tutorial() -> Iterator[Row]:
    """The layer-norm tutorial of Triton: 4096 rows in float16."""
    shapes = [(4096, columns) for columns in range(1024, 15872 + 1, 512)]
    return _rows("triton-tutorial", shapes, ["float16"], ["forward", "backward"])


_NV_NORMS = (
    (10_000_000, 10),
    (1_000_000, 100),
    (100_000, 1000),
    (10_000, 10_000),
    (1000, 100_000),
    (4, 400_001),
    (100, 1_000_000),
    (10, 10_000_000),
    (4, 10_000_001),
)


def _nv_norms() -> Iterator[Row]:
    """The layer-norm rows of NVIDIA's nv_norms for TensorFlow."""
    return _rows("nv-norms", _NV_NORMS, ["float16", "float32"], ["forward", "backward", "both"], sweep=SHAPES)


def _fast_layernorm_tf() -> Iterator[Row]:
    """The measurements of fast-layernorm-tf: rows of every length, every number of rows, and one transformer's."""
    sizes = [2**exponent for exponent in range(6, 21)]
    dtypes, directions = ["float32", "float16"], ["forward", "backward"]
    yield from _rows("fast-layernorm-tf", [(128, size) for size in sizes], dtypes, directions, sweep="128 rows")
    yield from _rows("fast-layernorm-tf", [(size, 128) for size in sizes], dtypes, directions, sweep="128 columns")
    yield from _rows("fast-layernorm-tf", [(16, 1024, 256)], dtypes, directions, sweep="16x1024x256")


def _quack() -> Iterator[Row]:
    """The shapes of Quack's benchmark: 32768 rows, fewer where the tensors would not fit."""
    shapes = [(32768, 2**exponent) for exponent in range(8, 17)] + [(16384, 131072), (8192, 262144)]
    directions = ["forward", "forward_stats", "backward"]
    for shape in shapes:
        yield from _rows("quack", [shape], ["bfloat16"], directions, _NORMS)
        yield from _rows("quack", [shape], ["bfloat16"], ["forward", "backward"], _NORMS, residual=True)


def _small() -> Iterator[Row]:
    """Problems that take microseconds, where launching and waiting count."""
    shapes = [(rows, columns) for rows in (1, 8, 64, 512, 4096) for columns in (256, 1024, 4096, 8192)]
    of = "{} rows".format
    return _rows("small", shapes, ["bfloat16"], ["forward", "backward"], _NORMS, lambda shape: of(shape[0]))


# A number of columns that no vector divides -> the nearest that 16-byte vectors divide.
ODD_NEIGHBOURS = {
    257: 256,
    1023: 1024,
    1025: 1024,
    4095: 4096,
    4097: 4096,
    5121: 5120,
    15873: 15872,
    50257: 50256,
}


def _odd() -> Iterator[Row]:
    """Odd numbers of columns beside their aligned neighbours, and rows that begin at an odd address."""
    dtypes, directions = ["bfloat16", "float32"], ["forward", "backward"]
    columns = sorted({*ODD_NEIGHBOURS, *ODD_NEIGHBOURS.values()})
    yield from _rows("odd", [(32768, size) for size in columns], dtypes, directions)
    yield from _rows("odd", [(32768, 4096)], dtypes, directions, sweep="unaligned", offset=1)


def _acceptance() -> Iterator[Row]:
    """What cunorm promises: sixteen-bit rows of every length in tensors of 268 MB, smaller ones, float32, residual."""
    large = [256, 512, 1024, 2048, 4096, 5120, 8192, 12288, 15872, 16384, 32768, 50257, 65536, 131072, 262144]
    directions = ["forward", "forward_stats", "backward"]
    shapes = [(2**27 // columns, columns) for columns in large]
    yield from _rows("rows", shapes, ["bfloat16"], directions, _NORMS, "268 MB")
    shapes = [(4096, columns) for columns in (256, 1024, 4096, 8192)]
    yield from _rows("rows", shapes, ["bfloat16"], directions, _NORMS, "4096 rows")
    yield from _rows("rows", _NV_NORMS, ["float32"], ["forward", "backward"], _NORMS, SHAPES)
    shapes = [(2**27 // columns, columns) for columns in (1024, 4096, 8192, 16384, 65536)]
    yield from _rows("rows", shapes, ["bfloat16"], ["forward", "backward"], _NORMS, "268 MB", residual=True)


GELUS = ("gelu", "gelu_tanh", "bias_gelu", "bias_gelu_tanh")


def _gelu() -> Iterator[Row]:
    """GELU and its approximation, without and with a bias: the hidden layers of transformers, and a small one."""
    directions = ["forward", "backward"]
    shapes = [(8192, 2**exponent) for exponent in range(10, 15)]
    yield from _rows("gelu", shapes, ["bfloat16"], directions, GELUS)
    yield from _rows("gelu", [(8192, 4096), (8192, 16384)], ["float16"], directions, GELUS)
    yield from _rows("gelu", [(64, 4096)], ["bfloat16"], directions, GELUS, sweep="64 rows")


def _host() -> Iterator[Row]:
    """What a call costs the CPU, on tensors so small that the GPU keeps up."""
    for shape in ((8, 1024), (64, 1024)):
        row = Row("host", "layer_norm", shape, "float32", "forward", clock="host")
        yield replace(row, framework="cupy")
        yield row
        yield replace(row, direction="recorded")
        yield replace(row, direction="both")


SUITES: dict[str, Callable[[], Iterator[Row]]] = {
    "rows": _acceptance,
    "triton-tutorial": _triton_tutorial,
    "nv-norms": _nv_norms,
    "fast-layernorm-tf": _fast_layernorm_tf,
    "quack": _quack,
    "small": _small,
    "odd": _odd,
    "gelu": _gelu,
    "host": _host,
}


def suite(name: str, only: str = "", part: tuple[int, int] = (1, 1)) -> list[Row]:
    """The rows of a suite that match ``only``; of these the i-th of n parts, which are of whole shapes."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in SUITES[name]():
        if row.matches(only):
            groups.setdefault((row.shape, row.dtype), []).append(row)
    index, count = part
    return [row for group in list(groups.values())[index - 1 :: count] for row in group]
