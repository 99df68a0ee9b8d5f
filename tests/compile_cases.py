"""What test_compile.py compiles: of every kernel that a plan asks for.

All that could be compiled is too much: hundreds of geometries times types of weights, activations and architectures, of
which one takes from a tenth of a second to two. Listed is:

1. Each way in which a plan lays out rows, at sizes on both sides of where it changes its mind, for every dtype, forward
   and backward. The newest architectures get all of these: the plan gives clusters to them alone, and ptxas is least
   alike there. The others, for which it compiles alike, share them.
2. What takes more registers (a residual, RMS norm, each activation, wider weights, tensors that are not aligned) at the
   sizes where there are fewest to spare, dealt out to the architectures, each to two; and each combination that has
   spilled on its architecture.
3. Rows of instance norm and group norm, of one channel each and of several, short and long, in blocks and clusters:
   sm_90 gets all of these, under some activations by turns; the others share them.
4. Rows that come in bulk, and those that blocks share so, with each activation and residual and weights of every type
   by turns.
5. row_split_* along rows and across, of one dimension and more, row_grid_forward in each way to lay out its rows,
   row_held_* with long rows and short, row_pipeline_* with few rows on their way and many, short parts of them and
   long, channel_pipeline_* with sets of every kind, pointwise_*, channel_* along points and along channels,
   split_merge, row_weight_gradients, zeros and column_sums.
6. Norms without weights and sums, and rows of one channel that come as a run: on one architecture of each kind.

The kernels are not listed here but asked of ``plan``. Of these some thousands those are compiled that together have
each value of each constant, where architectures that are alike, and the two dtypes of sixteen bits, share the work (see
`launches_of`); with ``CUNORM_EVERY_KERNEL=1`` all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plan_cases import (
    GPUS,
    Problem,
    plain_backward,
    plain_channel_backward,
    plain_channel_forward,
    plain_channel_norm,
    plan_batch,
    plan_of,
    plan_rows,
)

from cunorm.plan import Device, Launch, channel_pipeline, plan, row_held, row_stream_geometry
from cunorm.plan.channel_cost import cost
from cunorm.plan.rows import plan_with as plan_with_way
from cunorm.plan.rows_of_channels import as_rows
from cunorm.problem import (
    ACTIVATIONS,
    DTYPES,
    AnyProblem,
    BackwardProblem,
    ChannelForward,
    ChannelProblem,
    ForwardProblem,
    Matrix,
    Norm,
    PointwiseBackward,
    PointwiseForward,
    RunningStatistics,
    Vector,
)
from cunorm.resources import Resources

ARCHS = list(GPUS)
ALIKE = ["sm_75", "sm_80", "sm_86", "sm_89"]
NEWEST = ["sm_100", "sm_120"]
# Whether all that is listed here is compiled, 10,800 kernels of half a second each: before a release, and after a
# change of what kernels share.
EVERY_KERNEL = os.environ.get("CUNORM_EVERY_KERNEL") == "1"
# Constants of which each combination of values is compiled for sm_90.
PAIRS = [
    ("VECTORS", "ACTIVATION"), ("VECTORS", "STAGE"), ("VECTORS", "WEIGHTS"), ("STAGE", "WEIGHTS"), ("STAGE", "PEELED"),
    ("STAGE", "ACTIVATION"), ("VECTORS", "HAS_RESIDUAL"), ("VECTORS", "HAS_DRESIDUAL"),
]  # fmt: skip
ASYNCHRONOUS = ("row_grid", "row_pipeline", "channel_pipeline", "channel_grid")
SIXTEEN_BITS = ("float16", "bfloat16")
SIXTEEN_BIT_TYPES = {DTYPES[dtype].cuda for dtype in SIXTEEN_BITS}
Constants = tuple[tuple[str, int | str], ...]  # as launches have them

LAYER_NORM = Norm()

STATIC_SHARED_BYTES = 48 * 1024
REGISTERS_PER_MULTIPROCESSOR = 65536


def complaint(item: Launch, taken: Resources, device: Device, known_spill: int = 0) -> str | None:
    """What is wrong with what a kernel takes; None if nothing is."""
    threads = item.block[0] * item.block[1]
    constants = dict(item.constants)
    blocks = int(constants.get("MIN_BLOCKS", constants.get("BLOCKS_PER_MULTIPROCESSOR", 1)))
    if taken.spill_bytes > known_spill or taken.stack_bytes > known_spill:
        return f"{taken.spill_bytes} bytes spilled, {taken.stack_bytes} bytes of stack"
    if taken.shared_bytes > STATIC_SHARED_BYTES:
        return f"{taken.shared_bytes} bytes of static shared memory"
    if taken.shared_bytes + item.shared_bytes > device.shared_bytes:
        return f"{taken.shared_bytes} + {item.shared_bytes} bytes of shared memory"
    # Registers are given out in eights, to a warp at a time.
    registers = -(-taken.registers // 8) * 8 * threads
    if registers * blocks > REGISTERS_PER_MULTIPROCESSOR:
        return f"{taken.registers} registers for each of {blocks} x {threads} threads"
    if item.cooperative:
        room = min(
            device.blocks_with(taken.shared_bytes + item.shared_bytes),
            REGISTERS_PER_MULTIPROCESSOR // registers,
            device.threads_per_multiprocessor // threads,
        )
        if item.grid > room * device.multiprocessors:
            return f"{item.grid} blocks wait for each other, of which {room} fit on each of {device.multiprocessors}"
    return None


@dataclass(frozen=True)
class Case:
    """A norm of contiguous rows, and its gradients."""

    dtype: str
    columns: int
    rows: int = 4096
    norm: Norm = LAYER_NORM
    residual: bool = False
    weight: str | None = "x's"
    offset: int = 0
    late: int = 0  # elements that what is read alone begins late
    backward: bool = True

    def problems(self) -> list[Problem]:
        x = Matrix(self.dtype, (self.columns,), (1,), self.offset)
        read = dataclasses.replace(x, offset=self.late * DTYPES[self.dtype].itemsize) if self.late else x
        added, sum_added = (read, x) if self.residual else (None, None)
        weight = self.dtype if self.weight == "x's" else self.weight
        vector, sums = None if weight is None else Vector(weight), weight or self.dtype
        bias = vector if self.norm.activation is not None else None
        shape = (self.rows,), (self.columns,)
        forward = ForwardProblem(*shape, read, added, x, sum_added, vector, vector, True, 1e-5, self.norm)
        backward = BackwardProblem(*shape, read, read, added, x, vector, bias, sums, sums, self.norm)
        return [forward, backward] if self.backward else [forward]


SIZES = {
    "float16": [1, 64, 120, 1024, 3584, 4097, 16_384, 36_898, 65_536],
    "bfloat16": [3, 10, 64, 256, 257, 1000, 1024, 2048, 4096, 4097, 5120, 8192, 10_240, 11_000, 12_288, 16_384, 16_385,
                 20_000,
                 32_768, 36_000, 50_257, 60_000, 65_536, 100_000, 262_144],
    "float32": [1, 10, 100, 257, 1000, 1024, 4096, 4097, 5120, 10_000, 12_288, 17_000, 20_000, 50_257, 65_536, 100_000,
                131_072, 295_121, 298_112],
    "float64": [7, 100, 257, 1024, 1025, 2048, 4096, 4097, 5120, 8192, 20_001, 65_536, 147_565, 262_144],
}  # fmt: skip
PLAIN = [Case(dtype, columns) for dtype, sizes in SIZES.items() for columns in sizes]

# Short rows are laid otherwise where there are many.
SHORT = [("float16", 20), ("float16", 25), ("float16", 30), ("float16", 101), ("bfloat16", 100), ("float32", 25),
         ("float32", 63), ("float64", 17)]  # fmt: skip

# What takes more registers than PLAIN, at sizes with few to spare.
OPTIONS: list[dict[str, object]] = [
    {"norm": Norm(False), "residual": True},
    {"norm": Norm(True, 0.0, "gelu"), "residual": True},
    {"norm": Norm(False, 1.0, "silu")},
    {"norm": Norm(True, 0.0, "gelu_tanh")},
    {"norm": Norm(False, 0.0, "relu"), "residual": True},
    {"residual": True, "weight": "float32"},
    {"weight": "float64"},
    {"weight": None, "residual": True},
    {"offset": "itemsize", "residual": True},
    {"offset": "itemsize"},
]
HEAVY = [("bfloat16", 256), ("bfloat16", 4096), ("bfloat16", 4097), ("bfloat16", 16_384), ("bfloat16", 65_536),
         ("float32", 10), ("float32", 4097), ("float32", 10_000), ("float32", 50_257),
         ("float64", 1025), ("float64", 5120)]  # fmt: skip
# What has spilled.
SPILLED = {
    "sm_90": [
        Case("bfloat16", 256, rows=65_536, norm=Norm(False, 0.0, "silu")),
        Case("bfloat16", 26_352, norm=Norm(False), residual=True),
        Case("float64", 10, rows=1 << 20, norm=Norm(True, 0.0, "gelu")),
    ],
    "sm_100": [
        Case("float64", 5120),
        Case("bfloat16", 4097, norm=Norm(False), residual=True),
        Case("float16", 41, rows=1 << 20, residual=True),
    ],
    "sm_120": [
        Case("float64", 5120),
        Case("bfloat16", 4097, norm=Norm(False), residual=True),
        Case("bfloat16", 16_384, norm=Norm(True, 0.0, "gelu"), residual=True),
    ],
}

# Bytes that ptxas spills all the same, for sm_90, by kernel, dtype, columns and WEIGHTS_OF: of sixteen-bit rows in the
# geometry that was measured to be best, of doubles where it spills nothing with a vector more, of a batch norm under
# silu, two blocks of which share a multiprocessor that would else have one, and of groups that have weights in double,
# in the warp that collects what as many blocks tell.
KNOWN_SPILLS = {
    ("row_block_backward", "float16", 16_384, "columns"): 16,
    ("row_block_backward", "bfloat16", 12_288, "columns"): 64,
    ("row_block_backward", "float64", 20_001, "columns"): 24,
    ("row_block_forward", "float16", 16_384, "part"): 12,
    ("row_pipeline_backward", "float32", 2**20, "part"): 64,
}


def with_options() -> list[Case]:
    cases = []
    for dtype, columns in HEAVY:
        for options in OPTIONS:
            changes = options | {"offset": DTYPES[dtype].itemsize} if "offset" in options else options
            cases.append(dataclasses.replace(Case(dtype, columns), **changes))  # type: ignore[arg-type]
    whole = [(dtype, columns) for dtype, columns in HEAVY if columns * DTYPES[dtype].itemsize % 16 == 0]
    return cases + [Case(*case, residual=residual, late=1) for case in whole for residual in (False, True)]


def cases(arch: str) -> list[Case]:
    """What an architecture compiles of rows in one piece."""
    place = ARCHS.index(arch)
    few = {"bfloat16": (256, 257, 4096, 8192), "float16": (16_384, 32_768), "float32": (257, 768, 4096, 400_001)}
    few_rows = [Case(dtype, columns, rows=4) for dtype, sizes in few.items() for columns in sizes]
    few_rows += [Case("bfloat16", 1024, rows=512), Case("float32", 1024, rows=512)]
    few_rows += [Case("float16", 32_768, rows=4, norm=Norm(True, 0.0, "gelu_tanh"))]
    # Weights early or through shared memory: one to eight vectors of a thread, in all sorts of blocks.
    staged = [("bfloat16", size) for size in (1024, 3000, 5120, 7168, 8192, 12_288)]
    staged += [("float16", 1024), ("float16", 8192), ("float32", 1024), ("float32", 3584), ("float32", 4096)]
    norms = (LAYER_NORM, Norm(False), Norm(True, 0.0, "silu"))
    few_rows += [Case(*case, rows=1500, norm=norm, backward=False) for case in staged for norm in norms]
    few_rows += [Case("bfloat16", 256, rows=512, norm=Norm(False)), Case("bfloat16", 768, rows=8192)]
    odd = [("bfloat16", 1023), ("bfloat16", 4097), ("float32", 1023)]
    few_rows += [Case(*case, rows=8, norm=norm, backward=False) for case in odd for norm in norms]
    odd = [("bfloat16", 145), ("bfloat16", 257), ("bfloat16", 1023), ("float32", 257)]
    few_rows += [Case(*case, rows=1024, norm=norm, backward=False) for case in odd for norm in norms]
    few_rows += [Case(dtype, columns, rows=1 << 20) for dtype, columns in SHORT]
    # Where memory is fast: see row_half, row_plain, row_shifted, row_turns and row_wide in cunorm/plan.
    lengths = [(16, 1 << 19), (64, 1 << 17), (88, 65_536), (129, 65_536), (180, 65_536), (388, 32_768), (769, 16_384)]
    lengths += [(900, 16_384), (1537, 16_384), (2500, 8192), (3073, 4096), (5121, 4096), (384, 16_384), (768, 8192)]
    lengths += [(1536, 4096), (3072, 8192), (6144, 4096), (12_288, 2048)]
    few_rows += [Case("bfloat16", *case, norm=norm) for case in lengths for norm in (LAYER_NORM, Norm(False))]
    few_rows += [Case("float16", *case, residual=True) for case in lengths]
    # Those that begin in the middle of a sector, and those of row_clusters.
    halves = [("bfloat16", 3000), ("float16", 20_008), ("bfloat16", 50_264), ("float32", 500), ("float32", 15_876)]
    few_rows += [Case(*case, residual=residual) for case in halves for residual in (False, True)]
    hidden = [(7168, 512), (12_288, 200), (14_336, 512), (16_384, 264), (26_624, 1260), (17_408, 2000), (22_528, 1400)]
    few_rows += [Case("bfloat16", *case, residual=residual) for case in hidden for residual in (False, True)]
    few_rows += [Case("bfloat16", *case, norm=Norm(False)) for case in ((8192, 512), (12_288, 400), (36_864, 900))]
    few_rows += [Case("float32", 16_384, rows=264, backward=False), Case("bfloat16", 12_288, rows=1)]
    few_rows += [Case("bfloat16", *case, late=1) for case in ((3072, 4096), (4096, 4096), (8192, 2048), (10_240, 2048))]
    few_rows += [Case("bfloat16", size, rows=2048, norm=Norm(False), weight="float32") for size in (16_384, 24_576)]
    mine = [*PLAIN, *few_rows] if arch not in ALIKE else PLAIN[place :: len(ALIKE)]
    for number, case in enumerate(with_options()):
        if place in (number % len(ARCHS), (3 * number + 4) % len(ARCHS)):
            mine.append(case)
    return list(dict.fromkeys([*mine, *SPILLED.get(arch, [])]))


# Columns of rows that come in bulk, by bytes of a number: by a thread each, by parts of a warp and by several warps.
# Backward, those of one or two warps are as many numbers of a thread as those of parts.
IN_BULK = {
    2: [9, 14, 25, 34, 65, 100, 129, 190, 257, 385, 513, 639, 641, 770, 1025, 1284, 1663, 2049, 3323, 4097, 6145, 6655],
    4: [5, 9, 15, 33, 34, 65, 129, 190, 257, 385, 514, 639, 641, 1023, 1663, 2049, 3327],
}
IN_BULK_BACKWARD = (9, 33, 34, 65, 100, 129, 257, 385, 639, 641, 2049)


def bulk_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Each of IN_BULK under each activation, with and without a residual, sometimes with other weights."""
    columns = IN_BULK.get(DTYPES[dtype].itemsize, [])
    weights = itertools.cycle((dtype, "float32", None, "float16", "float64", "bfloat16", dtype))
    norms = [Norm(centered, 0.0, name) for centered, name in itertools.product((True, False), (None, *ACTIVATIONS))]
    for size, norm, residual in itertools.product(columns, norms, (False, True)):
        case = Case(dtype, size, 1 << 20, norm, residual, next(weights), backward=size in IN_BULK_BACKWARD)
        yield from (item for item in launches(case.problems(), arch) if item.kernel.startswith("row_bulk"))


# Columns of rows that blocks share in bulk, by bytes of a number: by many groups of blocks, and by one.
STREAMED = {
    2: [20_001, 50_257, 100_001, 131_073, 262_145, 655_361, 1_600_001, 131_072],
    4: [9001, 35_001, 100_001, 131_073, 400_001, 1_000_001, 131_072],
}


def stream_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Each of STREAMED under each activation, with and without a residual, few rows and many, with other weights."""
    columns = STREAMED.get(DTYPES[dtype].itemsize, [])
    weights = itertools.cycle((dtype, "float32", None, "float16", "float64", "bfloat16", dtype))
    norms = [Norm(centered, 0.0, name) for centered, name in itertools.product((True, False), (None, *ACTIVATIONS))]
    for size, norm, residual, rows in itertools.product(columns, norms, (False, True), (16, 1000)):
        for problem in Case(dtype, size, rows, norm, residual, next(weights)).problems():
            way = row_stream_geometry.geometry(problem, GPUS[arch])
            yield from () if way is None else plan_with_way(problem, GPUS[arch], way).launches[:1]


def split_problems(dtype: str) -> Iterator[Problem]:
    """Rows that no block holds and rows that are not contiguous: along and across rows, one dimension and many."""
    itemsize = DTYPES[dtype].itemsize
    long, width = (100_000_000,), 16 // itemsize
    layouts = [
        ((8,), long, Matrix(dtype, long, (1,)), Norm(True, 0.0, "gelu")),
        ((8,), (100_000_001,), Matrix(dtype, (100_000_001,), (1,)), Norm(False)),
        ((8, 4, 2), (2, 4, 8 * width), Matrix(dtype, (64, 4096, 2**18), (32, 1024, 1)), Norm()),
        ((4096,), (512,), Matrix(dtype, (1,), (4096,)), Norm(False, 1.0, "silu")),
        ((2, 2, 32), (4, 4, 8), Matrix(dtype, (4096, 2048, 1), (2**20, 2**18, 32)), Norm()),
        # Few chunks, which the last launch merges.
        ((4,), (400_001,), Matrix(dtype, (400_001,), (1,)), Norm()),
        ((2,), (262_144 * width // 4,), Matrix(dtype, (262_144 * width // 4,), (1,)), Norm(False)),
    ]
    for number, (row_sizes, column_sizes, x, norm) in enumerate(layouts):
        added = x if number % 2 == 0 and number < 5 else None
        vector = Vector((dtype, "float32", "float64")[number % 3])
        bias = vector if norm.activation is not None else None
        yield ForwardProblem(row_sizes, column_sizes, x, added, x, added, vector, vector, True, 1e-5, norm)
        yield BackwardProblem(row_sizes, column_sizes, x, x, added, x, vector, bias, dtype, vector.dtype, norm)


def grid_problems(dtype: str) -> Iterator[Problem]:
    """Rows for all blocks: several ahead in shared memory, one in part in registers, one that is not all on chip."""
    weights = (dtype, "float32", dtype if dtype == "float64" else "float16")
    norms = (Norm(), Norm(True, 0.0, "gelu"), Norm(False, 1.0, "silu"), Norm(False))
    options = itertools.cycle(itertools.product(weights, norms))
    for row_bytes, odd, residual in itertools.product((1.5e6, 8e6, 16e6, 40e6), (0, 1), (False, True)):
        columns = int(row_bytes) // DTYPES[dtype].itemsize // 64 * 64 + odd
        (weight, norm), x = next(options), Matrix(dtype, (columns,), (1,))
        added = x if residual else None
        # Of long rows that begin anywhere those without weights.
        vector = None if odd and row_bytes > 2e6 else Vector(weight)
        yield ForwardProblem((5,), (columns,), x, added, x, added, vector, vector, True, 1e-5, norm)


def pipeline_problems(dtype: str) -> Iterator[Problem]:
    """Rows in a pipeline, of one vector a thread and of many, some turns later, with all that takes registers."""
    weights = (dtype, None, "float32", "float16", "float64")
    norms = (Norm(), Norm(True, 0.0, "gelu"), Norm(False, 0.0, "silu"), Norm(False), Norm(True, 0.0, "gelu_tanh"))
    options = itertools.cycle(itertools.product(weights, norms))
    for odd, rows, row_bytes, residual in itertools.product(
        (0, 1), (8, 1000), (0.6e6, 1.1e6, 1.6e6, 2.2e6, 3e6, 4.2e6), (False, True)
    ):
        columns = int(row_bytes) // DTYPES[dtype].itemsize // 64 * 64 + odd
        (weight, norm), x = next(options), Matrix(dtype, (columns,), (1,))
        added, vector, sums = x if residual else None, weight and Vector(weight), weight or dtype
        bias = vector if norm.activation is not None else None
        yield ForwardProblem((rows,), (columns,), x, added, x, added, vector, vector, True, 1e-5, norm)
        yield BackwardProblem((rows,), (columns,), x, x, added, x, vector, bias, sums, sums, norm)
    # The longest are held.
    for points, activation in itertools.product(
        (1_200_000, 2**21, 700_001, 1_100_001, 2**22, 2**23), (None, "silu", "gelu")
    ):
        for make in (plain_channel_forward, plain_channel_backward):
            problem = as_rows(make(8, 8, 1, points, dtype, activation))
            assert problem is not None
            yield problem
    # Groups: as many blocks for each channel.
    shapes = itertools.cycle(((1, 512, 16, 256**2), (1, 256, 8, 512**2), (2, 640, 20, 128**2), (2, 32, 4, 96**3)))
    for activation, weight in itertools.product((None, *ACTIVATIONS), (dtype, "float32", "float64")):
        for make, shape in itertools.product((plain_channel_forward, plain_channel_backward), (next(shapes),)):
            problem = as_rows(make(*shape, dtype, activation))
            assert problem is not None
            bias = Vector(weight) if problem.bias is not None else None
            yield dataclasses.replace(problem, weight=Vector(weight), bias=bias)


def held_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Rows of which registers hold one: of the longest that they hold, and the shortest, with all that takes them."""
    numbers = 2**20 * 4 // DTYPES[dtype].itemsize
    weights = itertools.cycle((dtype, "float32", None, "float16", "float64"))
    makes = plain_channel_forward, plain_channel_backward
    sizes = itertools.product(range(6, 36), ((4, 1), (2, 2), (1, 11)), (None, *ACTIVATIONS), makes)
    for number, (eighths, (channels, together), activation, make) in enumerate(sizes):
        problem = as_rows(
            make(4, channels * together, together, eighths * numbers // 8 // together // 8 * 8, dtype, activation)
        )
        assert problem is not None
        vector = Vector(next(weights) or dtype)
        problem = dataclasses.replace(problem, weight=vector, bias=problem.bias and vector)
        if number % 3 == 0:
            bare = {"weight": None, "bias": None}
            bare |= {"dweight": None, "dbias": None} if isinstance(problem, BackwardProblem) else {}
            problem = dataclasses.replace(problem, **bare)
        way = row_held.geometry(problem, GPUS[arch])
        yield from () if way is None else plan_with_way(problem, GPUS[arch], way).launches


def batch_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Batch norms by the pipeline of rows: long parts of rows and short, and all that takes registers.

    Architectures that are alike share them, and so do the dtypes for sm_90.
    """
    shapes = [(64, 256, 56**2), (32, 64, 112**2), (64, 64, 112**2), (256, 64, 32**2), (64, 1024, 14**2), (8, 16, 2**16)]
    # Whose segments begin anywhere, and of some of which a block has whole rows.
    shapes += [(16, 64, 257**2), (32, 64, 147**2), (16, 256, 33**2), (16, 2048, 33**2), (128, 192, 289), (4, 8, 501**2)]
    kinds = itertools.cycle((dtype, "float32", None, "float16", "float64"))
    share = 3 if arch in ALIKE else 2 if arch == "sm_90" else 1
    place = list(DTYPES).index(dtype) if arch == "sm_90" else ARCHS.index(arch)
    for number, (shape, activation) in enumerate(itertools.product(shapes, (None, *ACTIVATIONS))):
        kind = next(kinds)
        if number % share != place % share:
            continue
        for plain in plain_channel_norm(shape, dtype, None, activation=activation):
            vector = kind and Vector(kind)
            problem = dataclasses.replace(plain, weight=vector, bias=vector)
            if isinstance(problem, ChannelForward) and kind:
                running = RunningStatistics(Vector(kind), Vector(kind), False, 0.9, 0.1)
                problem = dataclasses.replace(problem, running=running)
            batch = plan_batch(problem, GPUS[arch])
            yield from () if batch is None else batch.launches


# Of a batch norm that blocks hold: samples, channels and points.
SEGMENTS = [
    (2, 32, 216), (4, 64, 196), (16, 128, 49), (32, 512, 49), (32, 256, 49), (8, 64, 3136), (128, 256, 64),
    (64, 256, 256), (64, 512, 196), (3, 7, 35), (16, 1024, 256), (16, 64, 1024), (8, 512, 196), (4, 1024, 64),
]  # fmt: skip


def some_activations(number: int, dtype: str) -> tuple[str | None, str | None]:
    """Two of five, of which three dtypes together have all."""
    every = (None, *ACTIVATIONS)
    first = number + 2 * list(DTYPES).index(dtype)
    return every[first % 5], every[(first + 1) % 5]


def segment_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Each of SEGMENTS, for sm_90 under two activations, else under one; architectures that are alike share them."""
    place, share = ARCHS.index(arch), len(ALIKE) if arch in ALIKE else 1
    kinds = itertools.cycle((dtype, "float32", "float64", "float16"))
    for number, shape in enumerate(SEGMENTS):
        for activation in some_activations(number + place, dtype)[: 2 if arch == "sm_90" else 1]:
            vector = Vector(next(kinds))
            for plain in plain_channel_norm(shape, dtype, None, activation=activation):
                problem = dataclasses.replace(plain, weight=vector, bias=vector)
                if isinstance(problem, ChannelForward):
                    running = RunningStatistics(vector, vector, False, 0.9, 0.1)
                    problem = dataclasses.replace(problem, running=running)
                chosen = plan_rows(problem, GPUS[arch]) if number % share == place % share else None
                yield from () if chosen is None else chosen.launches


# Samples, channels, how many of them a row has, and points of each.
CHANNELS = [
    (64, 32, 1, 49), (8, 64, 1, 1000), (8, 64, 1, 4097), (8, 64, 1, 24_000), (8, 64, 1, 32_768), (8, 64, 1, 40_001),
    (8, 64, 1, 262_144), (4, 2, 1, 1_000_000), (4, 2, 1, 1_000_001),
    (64, 32, 4, 2), (16, 256, 8, 49), (16, 256, 8, 196), (8, 64, 4, 64), (8, 1280, 40, 256), (8, 288, 9, 4096),
    (8, 320, 10, 4096), (8, 512, 16, 4096), (2, 64, 2, 19_683), (2, 128, 4, 65_536),
    (2, 640, 20, 4096), (2, 960, 30, 4096), (1, 512, 16, 16_384),
    (16, 64, 1, 2025), (16, 64, 1, 5625), (16, 64, 1, 7225), (16, 64, 1, 11_025), (16, 64, 1, 16_641),
    (16, 64, 1, 22_801), (16, 64, 1, 28_561), (16, 64, 1, 44_521), (16, 64, 1, 66_049), (16, 64, 1, 116_281),
    (16, 256, 8, 3969), (16, 256, 8, 4225), (16, 256, 8, 5625),
    (64, 2048, 64, 49), (64, 1024, 32, 196), (16, 1024, 32, 81), (16, 512, 16, 1089), (32, 512, 16, 256),
    (64, 512, 16, 64), (64, 64, 8, 6), (64, 64, 16, 3),
    (1, 8, 1, 16), (4, 64, 1, 196), (16, 128, 1, 49), (2, 32, 1, 216),
]  # fmt: skip


def channel_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Each of CHANNELS for sm_90; every second for each other new architecture, every fourth for each that is alike."""
    place = ARCHS.index(arch)
    share = len(ALIKE) if arch in ALIKE else 1 if arch == "sm_90" else 2
    for number in range(place % share, len(CHANNELS), share):
        # With a dtype an activation, with the next none; for sm_90 two of rows that begin anywhere, but of doubles.
        activation = ("gelu", "silu", "gelu_tanh")[number % 3] if (number + list(DTYPES).index(dtype)) % 2 else None
        two = arch == "sm_90" and CHANNELS[number][3] % 2 > 0 and dtype != "float64"
        activations = some_activations(number, dtype) if two else (activation,)
        for plain, some in itertools.product((plain_channel_forward, plain_channel_backward), activations):
            chosen = plan_rows(plain(*CHANNELS[number], dtype, some), GPUS[arch])
            yield from () if chosen is None else chosen.launches


def cheapest_pipeline(problem: ChannelProblem, device: Device) -> channel_pipeline.ChannelPipeline | None:
    every = channel_pipeline.candidates(problem, device)
    return min(every, key=lambda way: cost(way, problem, device), default=None)


def slab_pipeline_launches(dtype: str, arch: str) -> Iterator[Launch]:
    """Slabs of whole samples and of tiles, with sets of a channel and of many, and all that takes registers.

    Architectures that are alike share them.
    """
    shapes = [((8, 320, 4096), 10), ((8, 512, 4096), 16), ((8, 128, 256**2), 4), ((4, 256, 32**3), 1)]
    shapes += [((64, 64, 4096), 1), ((8, 96, 112**2), 3), ((1, 1024, 56**2), 1)]
    weights = itertools.cycle((dtype, "float32", None, "float16", "float64"))
    place, share = ARCHS.index(arch), 3 if arch in ALIKE else 1
    for number, ((shape, channels_per_set), activation) in enumerate(
        itertools.product(shapes, (None, "silu", "gelu", "gelu_tanh"))
    ):
        weight = next(weights)
        if number % share != place % share:
            continue
        for plain in plain_channel_norm(shape, dtype, channels_per_set, last=True, activation=activation):
            vector = weight and Vector(weight)
            problem = dataclasses.replace(plain, weight=vector, bias=vector)
            if (way := cheapest_pipeline(problem, GPUS[arch])) is not None:
                yield from plan_of(way, problem).launches


def sums_problems(dtype: str) -> Iterator[Problem]:
    """Gradients of every type, of two vectors and of one, of few rows, and those that a single block finishes."""
    x = Matrix(dtype, (1024,), (1,))
    for kind in DTYPES:
        yield BackwardProblem((4096,), (1024,), x, x, None, x, None, None, kind, dtype)
    yield BackwardProblem((4096,), (1024,), x, x, None, None, None, None, dtype, None)
    yield BackwardProblem((1,), (1024,), x, x, None, x, Vector("float64"), None, None, "float16")
    few = [(60, 1024, Norm(True, 0.0, "gelu")), (200, 1023, Norm(False)), (200, 4096, Norm()), (200, 12, Norm())]
    for rows, columns, norm in few:
        x, bias = Matrix(dtype, (columns,), (1,)), Vector(dtype) if norm.activation is not None else None
        yield BackwardProblem((rows,), (columns,), x, x, None, x, Vector("float32"), bias, dtype, "float32", norm)


def pointwise_problems(dtype: str) -> Iterator[AnyProblem]:
    """One run of memory, with and without 16-byte vectors; a bias along rows of every length; strides."""
    itemsize = DTYPES[dtype].itemsize
    run, unaligned = Matrix(dtype, (0,), (1,)), Matrix(dtype, (0,), (1,), itemsize)
    layouts: list[tuple[tuple[int, ...], int, Matrix, str | None]] = [
        ((1,), 100_000, run, None),
        ((1,), 100_000, unaligned, None),
        ((64, 8, 3), 50, Matrix(dtype, (4096, 512, 64), (1,)), None),
        ((64,), 5000, Matrix(dtype, (1,), (64,)), None),
        ((4096,), 16_384, Matrix(dtype, (16_384,), (1,)), dtype),
        ((4096,), 4097, Matrix(dtype, (4097,), (1,)), "float32"),
        ((4096,), 64, Matrix(dtype, (64,), (1,)), "float64"),
        ((2, 40), 3, Matrix(dtype, (4096, 3), (1,)), "bfloat16"),
    ]
    for activation, (rows, columns, x, bias) in itertools.product(("gelu", "gelu_tanh"), layouts):
        vector = None if bias is None else Vector(bias)
        yield PointwiseForward(rows, (columns,), x, x, vector, activation)
        yield PointwiseBackward(rows, (columns,), x, x, x, vector, bias, activation)
        if bias is not None:
            yield PointwiseBackward(rows, (columns,), x, x, None, vector, bias, activation)
            yield PointwiseBackward(rows, (columns,), x, x, x, vector, None, activation)


# Samples by channels by points, channels a set (None: a batch norm), whether the channels are last, the activation.
CHANNEL_NORMS: list[tuple[tuple[int, int, int], int | None, bool, str | None]] = [
    ((2, 64, 128**3), 1, False, None),
    ((4, 32, 128**3), 1, True, "gelu"),
    ((2, 32, 216), 1, False, "gelu"),
    ((2, 32, 216), 1, True, None),
    # Small enough for short vectors.
    ((1, 8, 16), 1, True, "gelu"),
    ((4, 64, 196), None, True, "gelu"),
    ((16, 128, 49), None, True, None),
    ((2, 640, 64), 20, True, "silu"),
    ((4, 320, 196), 10, True, "gelu_tanh"),
    ((8, 320, 64 * 64), 10, False, "silu"),
    ((2, 320, 48 * 48), 10, False, None),
    ((8, 320, 80 * 80), 10, False, "gelu"),
    ((8, 960, 48 * 48), 30, False, "silu"),
    ((8, 1920, 32 * 32), 60, False, "silu"),
    ((8, 320, 128 * 128), 10, True, "silu"),
    ((8, 128, 256 * 256), 4, True, None),
    ((2, 512, 64 * 64), 16, False, None),
    # Lanes that are no power of two.
    ((8, 320, 128 * 128), 10, False, "silu"),
    ((8, 192, 112 * 112), 6, False, "gelu"),
    ((2, 960, 64 * 64), 30, False, None),
    ((64, 256, 56 * 56), None, False, None),
    ((64, 256, 56 * 56), None, True, "silu"),
    ((64, 2048, 49), None, True, None),
    ((64, 2048, 49), None, False, "silu"),
    ((700, 24, 169), None, False, None),
    # Runs of memory that begin anywhere: whole chunks of one, several to a chunk, and such that chunks cut.
    ((16, 64, 257**2), 1, False, None),
    ((16, 64, 257**2), 2, False, None),
    ((16, 256, 65**2), None, False, "gelu"),
    ((16, 512, 33**2), None, False, None),
    ((16, 512, 33**2), 16, False, "silu"),
    # So many points that no grid takes them: a thread would have too many of a slab.
    ((1, 8, 512**3), 1, True, None),
]


def bare_problems(dtype: str) -> Iterator[AnyProblem]:
    """Norms without weights and sums; and instance norm of many short rows, which come as a run."""
    none: dict[str, Any] = {"weight": None, "bias": None}
    no_sums: dict[str, Any] = none | {"dweight": None, "dbias": None}
    for columns in (256, 1025):
        yield dataclasses.replace(plain_backward(4096, columns, dtype), **no_sums)
    for shape, channels_per_set in (((64, 256, 28**2), 1), ((8, 320, 64**2), 10)):
        forward, backward = plain_channel_norm(shape, dtype, channels_per_set, activation="silu")
        yield dataclasses.replace(forward, **none)
        yield dataclasses.replace(backward, **no_sums)
    yield from plain_channel_norm((256, 512, 49), dtype, 1)


def channel_problems(dtype: str) -> Iterator[ChannelProblem]:
    """Instance, group and batch norms as models have them: on chip and not, in both layouts."""
    for shape, channels_per_set, last, activation in CHANNEL_NORMS:
        yield from plain_channel_norm(shape, dtype, channels_per_set, last=last, activation=activation)


def launches(problems: Iterable[AnyProblem], arch: str) -> Iterator[Launch]:
    for problem in problems:
        yield from plan.__wrapped__(problem, GPUS[arch]).launches


@functools.cache
def launches_for(arch: str, dtype: str) -> dict[str, dict[Constants, Launch]]:
    """The launches of all kernels, by kernel, with each set of constants once."""
    rows = [problem for case in cases(arch) if case.dtype == dtype for problem in case.problems()]
    others = (split_problems, grid_problems, sums_problems, pointwise_problems, channel_problems)
    bare = bare_problems(dtype) if arch in ("sm_80", "sm_90", "sm_100") else ()
    every = itertools.chain(
        launches(bare, arch),
        launches([*rows, *(problem for problems in others for problem in problems(dtype))], arch),
        bulk_launches(dtype, arch),
        stream_launches(dtype, arch),
        held_launches(dtype, arch),
        channel_launches(dtype, arch),
        segment_launches(dtype, arch),
    )
    # Their other launches are like those of other problems.
    pipelines = itertools.chain(
        launches(pipeline_problems(dtype), arch), slab_pipeline_launches(dtype, arch), batch_launches(dtype, arch)
    )
    found: dict[str, dict[Constants, Launch]] = {}
    for item in itertools.chain(every, (item for item in pipelines if "pipeline" in item.kernel)):
        found.setdefault(item.kernel, {})[item.constants] = item
    return found


def launches_of(arch: str, dtype: str, kernel: str) -> list[Launch]:
    """Those to compile: a share of what covers the rest (see `_shares`), or with EVERY_KERNEL all that are listed."""
    every = list(launches_for(arch, dtype).get(kernel, {}).values())
    if EVERY_KERNEL:
        return every
    archs = next(archs for archs in (ALIKE, NEWEST, [arch]) if arch in archs)
    dtypes = SIXTEEN_BITS if dtype in SIXTEEN_BITS else (dtype,)
    mine = _shares(tuple(archs), dtypes, kernel).get((arch, dtype), [])
    return mine or every[:1]


@functools.cache
def _shares(archs: tuple[str, ...], dtypes: tuple[str, ...], kernel: str) -> dict[tuple[str, str], list[Launch]]:
    """The launches that cover those of architectures and dtypes that are alike, dealt out to these: by turns.

    Covered is each value of each constant, for sm_90 each pair of PAIRS, each way to lay out rows, and all that goes
    with rows in bulk; and whatever has spilled. Of those that cover most comes first what the launches before do not.
    """
    holders: dict[Constants, dict[tuple[str, str], Launch]] = {}
    spilled = set()
    for arch, dtype in itertools.product(archs, dtypes):
        for item in launches_for(arch, dtype).get(kernel, {}).values():
            holders.setdefault(item.constants, {})[arch, dtype] = item
        rows = [problem for case in SPILLED.get(arch, []) if case.dtype == dtype for problem in case.problems()]
        spilled |= {item.constants for item in launches(rows, arch) if item.kernel == kernel}
    shares: dict[tuple[str, str], list[Launch]] = {}
    for place, constants in enumerate(_covering(holders, spilled, in_pairs=archs == ("sm_90",))):
        takers = list(holders[constants])
        taker = takers[place % len(takers)]
        shares.setdefault(taker, []).append(holders[constants][taker])
    return shares


def _covering(every: Iterable[Constants], required: set[Constants], in_pairs: bool) -> list[Constants]:
    """Few of these that have all that any of them has, and those that are required."""
    has = {constants: features(dict(constants), in_pairs) for constants in every}
    chosen = [constants for constants in has if constants in required]
    left = set().union(*has.values()).difference(*(has[constants] for constants in chosen))
    while left:
        best = max(has, key=lambda constants: len(has[constants] & left))
        chosen.append(best)
        left -= has[best]
    return chosen


def features(constants: dict[str, Any], in_pairs: bool) -> set[tuple[object, ...]]:
    """What a kernel's constants are covered by: their values, its way to lay out rows, and pairs of PAIRS.

    For rows in bulk it is also all that is computed with them: they have few registers to spare.
    """
    known = {name: "sixteen bits" if value in SIXTEEN_BIT_TYPES else value for name, value in constants.items()}
    found: set[tuple[object, ...]] = set(known.items())
    if "WHOLE_VECTORS" in known:
        is_whole = known["WHOLE_VECTORS"] == known["VECTORS"]
        found.add((*(known[name] for name in ("STAGE", "PEELED", "WEIGHTS")), is_whole, known["BLOCKS_PER_ROW"] > 1))
    if "ROWS_AT_ONCE" in known:
        has_more = known.get("HAS_RESIDUAL", known.get("HAS_DRESIDUAL"))
        found.add((*(known[name] for name in ("X_TYPE", "ACTIVATION", "WEIGHT_TYPE")), has_more))
    if in_pairs:
        pairs = (pair for pair in PAIRS if known.keys() >= set(pair))
        found |= {(first, known[first], second, known[second]) for first, second in pairs}
    return found
