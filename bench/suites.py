"""What is measured: suites of rows, each named for what it reproduces. Plain tables; nothing here needs a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cunorm.channel_norm import CHANNEL_NORMS

__all__ = [
    "DIRECTIONS",
    "DTYPES",
    "GELUS",
    "HIDDEN_SIZES",
    "LAYOUTS",
    "LONG_ODD_NEIGHBOURS",
    "MODELS",
    "MODEL_SUITES",
    "NV_INSTANCE_NORM",
    "NV_NORMS",
    "ODD_NEIGHBOURS",
    "SHAPES",
    "STEPS",
    "SUITES",
    "TINY_SHAPES",
    "Row",
    "readable",
    "suite",
]

# The sweeps of rows of which neither the rows nor the columns are the same or grow: a plot shows one after the other.
SHAPES, TINY_SHAPES = "shapes", "tiny shapes"

LAYOUTS = ("NC...", "N...C")

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
DTYPES = tuple(_ITEM_BYTES)

# How many numbers must be read and written for each element of x: without and with a residual.
_MOVED = {
    "forward": (2, 4),  # x, y; and residual, residual_out
    "forward_stats": (2, 4),
    "recorded": (2, 4),
    "backward": (3, 4),  # dy, x, dx; and dresidual_out
    "both": (5, 8),
}
DIRECTIONS = tuple(_MOVED)
STEPS = ("step", "compiled step")


@dataclass(frozen=True)
class Row:
    """One problem: the norm of the last axis of a tensor, or a gelu of it, or a norm of its channels, in one direction;
    or one of the ``MODELS``, whose shape is that of its input, and whose direction is one of the ``STEPS``.

    The gelus are gelu and gelu_tanh, and with a bias bias_gelu and bias_gelu_tanh. The norms of channels are those of
    CHANNEL_NORMS; their shapes are (N, C, spatial...) in both of the LAYOUTS, of which ``layout`` says how the tensors
    lie in memory, as PyTorch has it: N...C is its channels_last. ``groups`` is for group norm only, and batch norm is
    in training.
    ``direction`` is forward, forward_stats (mean and rstd are results too), backward (all gradients that the problem
    has), both (the one after the other) or recorded (forward, with automatic differentiation recording). ``offset`` is
    how many elements x and dy lie behind an aligned address. ``weights`` is the dtype of weight and bias, where it is
    not x's. ``clock`` is device (time on the GPU), host (time that a call takes of the CPU) or wall (time that passes).
    Rows of a suite with the same ``sweep`` make one line of a plot.
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
    layout: str = ""
    groups: int = 0
    activation: str = ""
    weights: str = ""

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
    def is_channel_norm(self) -> bool:
        return self.op in CHANNEL_NORMS

    @property
    def is_model(self) -> bool:
        return self.op in MODELS

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def moved_bytes(self) -> int:
        """The bytes that must move: what has the size of x. Weights, statistics and partial sums are not counted.

        Of a model nobody counts them.
        """
        if self.is_model:
            return 0
        return _MOVED[self.direction][self.residual] * math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def variant(self) -> str:
        """What sets the row apart from others of its op, shape, dtype and direction."""
        parts = ["residual"] * self.residual + ["unaligned"] * bool(self.offset)
        parts += [f"{self.weights} weights"] * bool(self.weights)
        parts += [f"{self.clock} {self.framework}"] * (self.clock == "host")
        parts += [part for part in (self.layout, self.activation) if part]
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
        return self.op, self.shape, self.dtype, self.offset, self.layout, self.groups, self.activation, self.weights


def readable(shape: tuple[int, ...]) -> str:
    """A shape as people write it, and as short: 4,096 × 256; 2 × 32 × 128³ where the spatial sizes are the same."""
    sizes = [f"{size:,}" for size in shape]
    spatial = shape[2:]
    if len(spatial) > 1 and len(set(spatial)) == 1:
        sizes[2:] = [sizes[2] + {2: "²", 3: "³"}[len(spatial)]]
    return " × ".join(sizes)


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


NV_NORMS: tuple[tuple[int, ...], ...] = (
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
    return _rows("nv-norms", NV_NORMS, ["float16", "float32"], ["forward", "backward", "both"], sweep=SHAPES)


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


# Of language models: of 13, 671, 70, 175 and 405 billion parameters.
HIDDEN_SIZES = (5120, 7168, 8192, 12288, 16384)


def _hidden_states() -> Iterator[Row]:
    """Those of 200 to 1024 tokens in a large language model: what a prompt has, or a batch of answers."""
    for rows in (200, 512, 1024):
        sweep = f"{rows} tokens"
        for size in HIDDEN_SIZES:
            shapes, directions = [(rows, size)], ["forward", "backward"]
            yield from _rows("hidden-states", shapes, ["bfloat16"], directions, _NORMS, sweep)
            yield from _rows("hidden-states", shapes, ["bfloat16"], directions, ["rms_norm"], sweep, residual=True)


def _mixed_precision() -> Iterator[Row]:
    """Sixteen-bit tensors with float32 weights, as mixed precision has them: of 17 and of 134 MB."""
    columns = (256, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768)
    for numbers, sweep in ((2**23, "17 MB"), (2**26, "134 MB")):
        shapes = [(numbers // size, size) for size in columns]
        for row in _rows("mixed-precision", shapes, ["bfloat16"], ["forward", "backward"], _NORMS, sweep):
            yield replace(row, weights="float32")


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
# The same of long rows, of which fewer are taken.
LONG_ODD_NEIGHBOURS = {131_073: 131_072, 262_145: 262_144, 1_000_001: 1_000_000}


def _odd() -> Iterator[Row]:
    """Odd numbers of columns beside their aligned neighbours, and rows that begin at an odd address."""
    dtypes, directions = ["bfloat16", "float32"], ["forward", "backward"]
    columns = sorted({*ODD_NEIGHBOURS, *ODD_NEIGHBOURS.values()})
    yield from _rows("odd", [(32768, size) for size in columns], dtypes, directions)
    yield from _rows("odd", [(32768, 4096)], dtypes, directions, sweep="unaligned", offset=1)
    shapes = [(2**26 // even, size) for odd, even in LONG_ODD_NEIGHBOURS.items() for size in (even, odd)]
    yield from _rows("odd", shapes, dtypes, directions, sweep="long")


def _acceptance() -> Iterator[Row]:
    """What cunorm promises: sixteen-bit rows of every length in tensors of 268 MB, smaller ones, float32, residual."""
    large = [256, 512, 1024, 2048, 4096, 5120, 8192, 12288, 15872, 16384, 32768, 50257, 65536, 131072, 262144]
    directions = ["forward", "forward_stats", "backward"]
    shapes = [(2**27 // columns, columns) for columns in large]
    yield from _rows("rows", shapes, ["bfloat16"], directions, _NORMS, "268 MB")
    shapes = [(4096, columns) for columns in (256, 1024, 4096, 8192)]
    yield from _rows("rows", shapes, ["bfloat16"], directions, _NORMS, "4096 rows")
    yield from _rows("rows", NV_NORMS, ["float32"], ["forward", "backward"], _NORMS, SHAPES)
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


def _channel_rows(
    name: str,
    shapes: Iterable[tuple[int, ...]],
    dtypes: Iterable[str],
    sweep: str = SHAPES,
    activations: Iterable[str] = ("",),
    op: str = "",
    layouts: Iterable[str] = LAYOUTS,
) -> Iterator[Row]:
    """Every combination, forward and backward, in both layouts unless they are given.

    The norm is the one that the suite is named after, unless it is given too. Group norm has 32 groups, or fewer where
    each would have a channel only.
    """
    op = op or name.replace("-", "_")
    for shape in shapes:
        groups = min(32, shape[1] // 2) if op == "group_norm" else 0
        for dtype in dtypes:
            for layout in layouts:
                for activation in activations:
                    row = Row(name, op, shape, dtype, "", sweep=sweep, layout=layout, groups=groups)
                    for direction in ("forward", "backward"):
                        yield replace(row, activation=activation, direction=direction)


_TINY_NV_NORMS = (2, 32, 6, 6, 6)
NV_INSTANCE_NORM: tuple[tuple[int, ...], ...] = (
    (2, 32, 128, 128, 128),
    (2, 64, 128, 128, 128),
    (4, 32, 128, 128, 128),
    (4, 64, 64, 64, 64),
    (8, 32, 64, 64, 64),
    (8, 64, 64, 64, 64),
    (8, 128, 64, 64, 64),
    (4, 256, 32, 32, 32),
    (8, 256, 32, 32, 32),
    _TINY_NV_NORMS,
)
_DIFFUSION = (
    (8, 320, 64, 64),
    (8, 320, 128, 128),
    (8, 1280, 16, 16),
    (8, 128, 256, 256),
    (2, 512, 64, 64),
    (8, 512, 64, 64),
)
_TINY = (_TINY_NV_NORMS, (1, 8, 4, 4), (4, 64, 14, 14), (16, 128, 7, 7))


def _instance_norm() -> Iterator[Row]:
    """The instance-norm rows of NVIDIA's nv_norms for TensorFlow, whose own times are for forward and backward together
    in float16; and tiny ones."""
    for shapes, sweep in ((NV_INSTANCE_NORM[:-1], SHAPES), (_TINY, TINY_SHAPES)):
        for row in _channel_rows("instance-norm", shapes, ["float32", "float16"], sweep):
            yield row
            if row.direction == "backward" and row.dtype == "float16" and row.shape in NV_INSTANCE_NORM:
                yield replace(row, direction="both")


def _group_norm() -> Iterator[Row]:
    """Group norms of diffusion models, from the UNet's to the decoder's, without and with the SiLU that follows; and
    tiny ones."""
    yield from _channel_rows("group-norm", _DIFFUSION, ["float16"], activations=("", "silu"))
    yield from _channel_rows("group-norm", _TINY, ["float16"], TINY_SHAPES, activations=("", "silu"))


# From the latent image, of 128^2, to that of 1024^2.
DECODER = ((1, 512, 128, 128), (1, 512, 256, 256), (1, 256, 512, 512), (1, 128, 1024, 1024))


def _decoder() -> Iterator[Row]:
    """Group norms of the decoder that ends latent diffusion, without and with the SiLU that follows."""
    yield from _channel_rows("decoder", DECODER, ["float16"], activations=("", "silu"), op="group_norm")


def _batch_norm() -> Iterator[Row]:
    """Batch norms of ResNet-50 in training, early, in the middle and at the end; and tiny ones."""
    shapes = [(64, 256, 56, 56), (32, 64, 112, 112), (64, 2048, 7, 7)]
    yield from _channel_rows("batch-norm", shapes, ["float32", "float16"])
    yield from _channel_rows("batch-norm", _TINY, ["float32", "float16"], TINY_SHAPES)


# Of an odd number of points: planes of DeepLab (images of 513 x 513), Inception and EfficientNet; brains in cubes of 2
# mm, and in twice and four times as large ones; and the middle of diffusion of 832 x 1216.
ODD_PLANES: dict[str, list[tuple[int, ...]]] = {
    "batch_norm": [
        (16, 64, 257, 257), (16, 256, 129, 129), (16, 512, 65, 65), (16, 2048, 33, 33), (32, 288, 35, 35),
        (32, 64, 147, 147), (32, 480, 19, 19),
    ],
    "instance_norm": [(2, 32, 91, 109, 91), (2, 64, 45, 55, 45), (2, 128, 23, 27, 23), (1, 32, 181, 217, 181)],
    "group_norm": [(16, 256, 65, 65), (2, 1280, 13, 19)],
}  # fmt: skip


def _odd_planes() -> Iterator[Row]:
    """Channels second, whose planes or volumes begin anywhere."""
    for op, shapes in ODD_PLANES.items():
        yield from _channel_rows("odd-planes", shapes, ["float16", "float32"], op=op, layouts=LAYOUTS[:1])


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
    "hidden-states": _hidden_states,
    "odd": _odd,
    "mixed-precision": _mixed_precision,
    "gelu": _gelu,
    "instance-norm": _instance_norm,
    "group-norm": _group_norm,
    "decoder": _decoder,
    "batch-norm": _batch_norm,
    "odd-planes": _odd_planes,
    "host": _host,
}


# Model -> the shape of its input, images or tokens, and that of the same model in small.
MODELS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-50": ((128, 3, 224, 224), (4, 3, 32, 32)),
    "Swin-B": ((64, 3, 224, 224), (2, 3, 32, 32)),
    "ConvNeXt-B": ((64, 3, 224, 224), (2, 3, 32, 32)),
    "ViT-L": ((64, 3, 224, 224), (2, 3, 32, 32)),
    "BERT-large": ((32, 512), (2, 16)),
    "GPT-2 medium": ((8, 1024), (2, 16)),
    "Llama-like 1B": ((4, 2048), (2, 16)),
}


def _models(name: str) -> Iterator[Row]:
    """Training steps of whole models; models-small has the same ones in small."""
    for op, shapes in MODELS.items():
        for direction in STEPS:
            yield Row(name, op, shapes[name == "models-small"], "bfloat16", direction, clock="wall")


MODEL_SUITES: dict[str, Callable[[], Iterator[Row]]] = {
    name: functools.partial(_models, name) for name in ("models", "models-small")
}


def suite(name: str, only: str = "", part: tuple[int, int] = (1, 1)) -> list[Row]:
    """The rows of a suite that match ``only``; of these the i-th of n parts, which are of whole shapes, or models."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in (SUITES | MODEL_SUITES)[name]():
        if row.matches(only):
            groups.setdefault((row.op if row.is_model else "", row.shape, row.dtype), []).append(row)
    index, count = part
    return [row for group in list(groups.values())[index - 1 :: count] for row in group]
