"""A representative set of launches, to run under compute-sanitizer on a machine with a GPU:

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitizer_workload.py
    done

Every kernel, every layout of rows over threads, odd sizes and offsets, with and without residual and activation, each
array in an allocation of its own, so that a step past its end is seen. Not a test by itself: what is checked is checked
by the tool.

Where racecheck reports a race with an mbarrier's start by a thread that starts none, or synccheck ends with
CUDA_ERROR_ILLEGAL_ADDRESS and no report, look at the machine code: version 2025.3.1 does both where ptxas made a loop
(R2UR, BRA.U.ANY) around SYNCS.EXCH, and neither where it made none (see start_mbarriers). Synccheck ends so, too, in
clusters of 16 blocks of which several share a multiprocessor, whatever the kernel's text, and in such of ten it reports
missing waits; not where each block has a multiprocessor, nor of up to eight blocks; the other tools do neither. And
where memcheck reports a read of 16 bytes that ends behind a tensor, look at what is read: it takes a cp.async that
reads fewer, and puts zeros behind them, for one of 16 (instance norm of 2 x 3 x 300,001 float16 numbers backward, of
1 x 3 x 1,500,001 float32 forward). What cp.async.bulk has written initcheck may take for never written.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cupy

sys.path.insert(0, str(Path(__file__).parent))

import channel_cases
from cases import (
    ACTIVATED_NORMS,
    LAYER_NORM,
    RMS_NORM,
    SMALL_DEVICE,
    Array,
    Case,
    CupyRunner,
    EmulatorRunner,
    columns_shape,
    data,
    poisoned,
)
from channel_cases import Shape
from plan_cases import plan_rows
from test_rows_of_channels import Norm, backward_problem, forward_problem, norm_of

import cunorm
from cunorm import cuda, launch
from cunorm.plan import Device, Plan, RowBlock, cache_hints, plan, plan_with, row_stream_geometry
from cunorm.plan.rows import plan_with as plan_with_way
from cunorm.problem import ACTIVATIONS, BackwardProblem, ForwardProblem, Problem

PROBLEMS = [
    ((70, 1), (-1,), "float32"),
    ((70, 3), (-1,), "bfloat16"),
    ((33, 8), (-1,), "float16"),
    ((9, 100), (-1,), "float32"),
    ((5, 257), (-1,), "bfloat16"),
    ((1, 256), (-1,), "bfloat16"),  # a block for itself
    ((301, 1024), (-1,), "bfloat16"),
    ((2500, 1024), (-1,), "bfloat16"),  # several rows for each block
    ((600, 4096), (-1,), "float16"),
    ((7, 4097), (-1,), "float16"),
    ((5, 5120), (-1,), "float32"),
    ((3, 16384), (-1,), "bfloat16"),
    ((2, 20011), (-1,), "float32"),
    ((2, 140000), (-1,), "bfloat16"),
    ((20000, 256), (-1,), "bfloat16"),  # rows of a block share weights that are staged
    ((301, 1025), (-1,), "bfloat16"),  # as they lie in memory
    ((9001, 257), (-1,), "bfloat16"),  # in bulk
    ((300, 129), (-1,), "bfloat16"),
    ((900, 4097), (-1,), "bfloat16"),
    ((200, 65), (-1,), "float32"),  # several edges a thread
    ((300, 1023), (-1,), "float32"),
    ((2, 3_000_000), (-1,), "float32"),  # a row for all blocks
    ((4, 200_001), (-1,), "float32"),  # in chunks that the last launch merges
    ((2, 262_144), (-1,), "bfloat16"),
    ((5, 600_000), (-1,), "float32"),  # rows that all blocks share, in a pipeline
    ((37, 400_000), (-1,), "bfloat16"),  # several groups of blocks
    ((12, 300_001), (-1,), "float32"),  # that begin anywhere
    ((40, 200_003), (-1,), "bfloat16"),
    ((16, 500_003), (-1,), "bfloat16"),
    ((3, 1000), (-1,), "float64"),
    ((2, 17000), (-1,), "float64"),
    ((300, 70), (0,), "float32"),
    ((6, 50, 40), (1,), "bfloat16"),
    ((3, 4, 5, 16), (1, 3), "float32"),
]

# Short rows that come as runs, as a GPU of few multiprocessors and slower memory would get them.
RUNS = [
    ((2001, 9), "float32"),
    ((2003, 17), "float32"),
    ((2003, 25), "float16"),
    ((2001, 41), "bfloat16"),
]
# Rows that come in bulk, as a GPU of few multiprocessors would get them: by a thread, by parts of a warp, by two warps.
IN_BULK = [
    ((3001, 9), "bfloat16"),
    ((901, 65), "float16"),
    ((300, 129), "float32"),
    ((333, 257), "bfloat16"),
    ((177, 770), "float16"),
    ((99, 1023), "bfloat16"),
]
# Rows that blocks share, and that come and leave in bulk, on few multiprocessors: of every number that threads take at
# once, with cut parts of one column, whole vectors, and few rows in shared memory.
STREAMED = [
    ((40, 12_001), "bfloat16"),
    ((21, 20_003), "float16"),
    ((33, 9001), "float32"),
    ((9, 30_002), "float32"),
    ((11, 42_001), "bfloat16"),
    ((9, 60_002), "float32"),
    ((40, 4097), "bfloat16"),
    ((40, 16_384), "float16"),
]
# Rows of which registers hold one while the next come: samples, channels, how many of them a row has, points of each.
HELD = [
    (5, 1, 1, 128**3, "float32"),
    (3, 1, 1, 160**3, "float32"),  # forward
    (4, 1, 1, 160**3, "bfloat16"),
    (2, 22, 11, 96 * 2048, "float32"),  # twelve blocks a channel
]
# Of which L2 is asked to keep what is read, which such are taken to be too much for (see kernels/cache_hints.cuh).
KEPT = [
    ((301, 1024), "bfloat16"),
    ((900, 4096), "float16"),  # ahead backward
    ((70, 4097), "float16"),
    ((99, 100), "float32"),
    ((5, 5120), "float32"),
]
KEPT_CHANNELS = [
    (Shape("instance_norm", (2, 3, 1_200_000), "NCW"), "float32"),  # rows in a pipeline
    (Shape("instance_norm", (2, 3, 64, 64, 64), "NCDHW"), "float32"),  # slabs
    (Shape("group_norm", (8, 512, 64, 64), "NCHW", 32), "float16"),  # rows ahead, by clusters
    (Shape("instance_norm", (1, 2_000_000, 8), "NWC"), "float16"),  # read twice
]
# Rows ahead, some of which begin in the middle of a sector; and long ones that clusters of small blocks share.
STAGGERED = [((100, 1000), "bfloat16"), ((70, 500), "float32"), ((60, 5000), "float16"), ((40, 10_008), "bfloat16")]
SHARED = [
    ((9, 7400), "bfloat16"),
    ((50, 8192), "float16"),
    ((20, 12_280), "bfloat16"),
    ((1, 8192), "bfloat16"),
    ((30, 8200), "float32"),
]
# Rows of sixteen-bit numbers with float32 weights, as a GPU of few multiprocessors would get them.
WIDE = [
    (900, 256),
    (300, 768),
    (200, 1000),
    (70, 4096),
    (50, 5120),
    (40, 10_240),
    (40, 32_768),
    (3000, 52),
    (3000, 112),
]
# Rows of instance norm and group norm: samples, channels, how many of them a row has, points of each.
ROWS_OF_CHANNELS = [
    (70, 3, 1, 5, "float32"),
    (40, 3, 1, 1024, "bfloat16"),
    (9, 5, 1, 4097, "float16"),
    (2, 2, 1, 200_000, "float32"),  # blocks share a channel
    (40, 8, 1, 16_641, "float16"),  # that begins anywhere, several of them a multiprocessor
    (9, 8, 1, 66_049, "float32"),
    (1, 2, 1, 1_500_001, "float32"),  # a row for all blocks
    (2, 2, 1, 1_200_000, "float16"),  # in a pipeline, backward too
    (300, 8, 4, 2, "float32"),
    (200, 64, 8, 49, "float16"),
    (600, 8, 4, 256, "bfloat16"),
    (3, 8, 8, 4096, "float32"),
    (2, 8, 4, 20_000, "float32"),  # a block has one channel
    (16, 512, 16, 1024, "float16"),  # several channels a row, whose weights are staged: by a block, in turns
    (8, 448, 14, 4096, "float16"),  # by clusters, in turns
    (4, 512, 16, 4096, "bfloat16"),
    (8, 960, 30, 900, "float16"),  # backward the last block has fewer channels
    (8, 320, 10, 4096, "float16"),  # backward by ten blocks, six, fifteen, three, twelve, nine, and eight
    (8, 960, 30, 1024, "bfloat16"),
    (2, 960, 30, 2304, "float16"),
    (8, 96, 3, 1800, "bfloat16"),
    (8, 384, 12, 2304, "float16"),
    (8, 576, 18, 1024, "bfloat16"),
    (8, 256, 8, 2304, "float32"),
    (8, 1280, 40, 256, "float16"),  # several blocks a multiprocessor, ahead
    (2, 640, 20, 1024, "bfloat16"),  # by clusters, all at once
]


def launch_plan(chosen: Plan | None, operands: dict[str, Array | None]) -> None:
    if chosen is None:
        return
    arrays = {name: None if array is None else cupy.asarray(array) for name, array in operands.items()}
    pointers = [0 if array is None else array.data.ptr for array in arrays.values()]
    workspace = cupy.empty(chosen.workspace_bytes, "uint8")
    launch.Call(chosen, tuple(arrays), 0)(pointers, workspace.data.ptr, 0)
    cupy.cuda.Device().synchronize()


def run_rows_of_channels(norm: Norm) -> None:
    """Forward and backward, by the kernels of rows where they have them."""
    dtype, sums = norm.x.dtype.name, "float64" if norm.x.dtype == "float64" else "float32"
    y, mean, rstd = poisoned(norm.x.shape, dtype), *(data(i, norm.statistics_shape, sums) for i in (8, 9))
    dweight, dbias = (poisoned(norm.x.shape[1:2], dtype) for _ in range(2))
    given: dict[str, Array | None] = {"x": norm.x, "weight": norm.weight, "bias": norm.bias}
    given |= {"mean": mean, "rstd": rstd, "residual": None, "residual_out": None, "dresidual_out": None}
    launch_plan(plan_rows(forward_problem(norm, y), cuda.device(0)), given | {"y": y})
    gradients = {"dy": norm.x, "dx": y, "dweight": dweight, "dbias": dbias}
    launch_plan(plan_rows(backward_problem(norm, norm.x), cuda.device(0)), given | gradients)


# Rows that are claimed (see kernels/row_block_forward.cu), as a GPU of few multiprocessors would get them.
FEW = Device("sm_90", multiprocessors=8, clusters=(3, 2, 0, 0))
CLAIMED = [
    ((26, 1016), "bfloat16", RowBlock(8, 1, 64, 1, 2, "ahead", weights="staged", blocks_per_multiprocessor=1)),
    ((26, 1024), "float32", RowBlock(4, 1, 64, 1, 4, "ahead", weights="late", blocks_per_multiprocessor=1)),
    ((70, 500), "float32", RowBlock(4, 2, 64, 1, 1, "ahead", weights="staged", blocks_per_multiprocessor=1)),
    ((75, 1003), "bfloat16", RowBlock(8, 2, 64, 1, 1, "ahead", True, "staged", 1)),
    ((75, 1003), "float16", RowBlock(8, 2, 64, 1, 1, "direct", True, "staged", 1)),
    ((139, 1003), "bfloat16", RowBlock(8, 1, 64, 1, 2, "ahead", True, "staged", 1)),
]


class OnGpu(EmulatorRunner):
    """What a GPU of few multiprocessors would get, on this one."""

    def run(self, problem: Any, operands: dict[str, Array | None]) -> None:
        launch_plan(self.choose(problem, self.device), operands)


def run_claimed(shape: tuple[int, int], dtype: str, geometry: RowBlock) -> None:
    """Forward, by a counter that says who takes which row."""

    def choose(problem: ForwardProblem, device: Device) -> Plan:
        chosen = plan_with(problem, device, geometry)
        assert chosen.launches[0].kernel == "zeros", "nothing is claimed"
        return chosen

    weight, bias = (data(seed, shape[1:], dtype) for seed in (2, 3))
    OnGpu(FEW, choose).forward(Case(data(0, shape, dtype), weight, bias, residual=data(1, shape, dtype)))


def run_wide(shape: tuple[int, int]) -> None:
    """Forward in turns that keep their weights, and backward; see row_wide.py."""
    weight, bias = (data(seed, shape[1:], "float32") for seed in (2, 3))
    case, runner = Case(data(0, shape, "bfloat16"), weight, bias), OnGpu(FEW)
    runner.backward(case.backward(runner.forward(case), data(1, shape, "bfloat16")))


def run_few(shape: tuple[int, int], dtype: str) -> None:
    """Forward and backward on few multiprocessors, each norm, with what is added and without."""
    runner, weight, bias = OnGpu(FEW), *(data(seed, shape[1:], dtype) for seed in (2, 3))
    for norm in (LAYER_NORM, RMS_NORM):
        for added in (None, data(1, shape, dtype)):
            case = Case(data(0, shape, dtype), weight, bias if norm.centered else None, norm=norm, residual=added)
            runner.backward(case.backward(runner.forward(case), data(4, shape, dtype), dresidual_out=added))


def run_runs(shape: tuple[int, int], dtype: str) -> None:
    """Forward and backward, with what is added and without."""
    runner, added = OnGpu(replace(SMALL_DEVICE, memory_rate=22e3)), data(1, shape, dtype)
    weight, bias = (data(seed, shape[1:], dtype) for seed in (2, 3))
    for residual in (None, added):
        case = Case(data(0, shape, dtype), weight, bias, residual=residual)
        runner.backward(case.backward(runner.forward(case), added, dresidual_out=residual))


def run_in_bulk(shape: tuple[int, int], dtype: str) -> None:
    """Forward and backward, with a residual and without."""

    def choose(problem: Problem, device: Device) -> Plan:
        chosen = plan(problem, device)
        assert chosen.strategy == "row_bulk"
        return chosen

    runner, (weight, bias) = OnGpu(FEW, choose), (data(seed, shape[1:], dtype) for seed in (2, 3))
    case, dy = Case(data(0, shape, dtype), weight, bias), data(4, shape, dtype)
    runner.backward(case.backward(runner.forward(case), dy))
    case = replace(case, norm=ACTIVATED_NORMS[0], residual=data(1, shape, dtype))
    runner.backward(case.backward(runner.forward(case), dy, dresidual_out=data(5, shape, dtype)))


def run_streamed(shape: tuple[int, int], dtype: str) -> None:
    """Forward and backward, with a residual and without."""

    def choose(problem: Problem, device: Device) -> Plan:
        assert isinstance(problem, ForwardProblem | BackwardProblem)
        way = row_stream_geometry.geometry(problem, device)
        more = problem.norm.activation is not None or len(problem.matrices) > 3
        assert way is not None or more, "the longest have no room for more"
        return plan(problem, device) if way is None else plan_with_way(problem, device, way)

    runner, (weight, bias) = OnGpu(FEW, choose), (data(seed, shape[1:], dtype) for seed in (2, 3))
    dy = data(4, shape, dtype)
    for norm in (LAYER_NORM, RMS_NORM, ACTIVATED_NORMS[0]):
        for added in (None, data(1, shape, dtype)):
            case = Case(data(0, shape, dtype), weight, bias if norm.centered else None, norm=norm, residual=added)
            runner.backward(case.backward(runner.forward(case), dy, dresidual_out=added))


CHANNEL_PROBLEMS = [
    (Shape("instance_norm", (2, 3, 7, 7), "NCHW"), "float32"),
    (Shape("instance_norm", (2, 7, 7, 40), "NHWC"), "float16"),
    (Shape("instance_norm", (3, 8, 129, 129), "NCHW"), "float16"),  # rows that begin anywhere, by small blocks
    (Shape("instance_norm", (2, 6, 181, 181), "NCHW"), "float32"),
    (Shape("group_norm", (2, 64, 63, 63), "NCHW", 8), "float16"),
    (Shape("instance_norm", (2, 5, 60_000), "NCW"), "float16"),
    (Shape("instance_norm", (2, 20_000, 24), "NWC"), "bfloat16"),  # chunks along the channels
    (Shape("instance_norm", (1, 4, 1_500_001), "NCW"), "float32"),  # all blocks share the rows
    (Shape("instance_norm", (2, 2, 1_500_001), "NCW"), "float32"),  # in a pipeline
    (Shape("instance_norm", (1, 1_000_003, 3), "NWC"), "float32"),  # along the channels
    (Shape("group_norm", (4, 100, 100, 128), "NHWC", 8), "float32"),  # several channels a set, in turns
    (Shape("instance_norm", (2, 400_001, 24), "NWC"), "float32"),  # slabs that stream, in turns
    (Shape("batch_norm", (2, 4, 1500, 1502), "NCHW"), "float32"),  # the same backward, along points of two dimensions
    (Shape("group_norm", (3, 40, 9, 9), "NCHW", 4, "strided"), "float16"),  # groups with gaps
    (Shape("group_norm", (9, 40, 128, 128), "NCHW", 4), "float16"),  # slabs of ten channels, backward
    (Shape("group_norm", (3, 60, 64, 64), "NCHW", 2), "float32"),  # of thirty, by clusters
    (Shape("group_norm", (3, 9, 9, 40), "NHWC", 4), "bfloat16"),
    (Shape("group_norm", (2, 64, 64, 512), "NHWC", 32), "float16"),  # slabs, by clusters
    (Shape("group_norm", (2, 64, 16, 16), "NCHW", 8), "float32"),
    (Shape("group_norm", (40, 512, 7, 7), "NCHW", 32), "float16"),  # channels that begin within vectors, ahead
    (Shape("group_norm", (3, 256, 14, 14), "NCHW", 32), "bfloat16"),  # directly
    (Shape("group_norm", (9, 512, 33, 33), "NCHW", 32), "float32"),  # by clusters
    (Shape("group_norm", (1, 520, 9), "NCW", 2), "float64"),
    (Shape("batch_norm", (6, 5, 8, 8), "NCHW"), "float16"),  # rows in segments, by blocks
    (Shape("batch_norm", (7, 3, 257, 257), "NCHW"), "float16"),  # chunks of runs that begin anywhere
    (Shape("batch_norm", (9, 2, 129, 131), "NCHW"), "float32"),
    (Shape("batch_norm", (7, 40, 65, 65), "NCHW"), "float16"),  # rows in such runs, in a pipeline
    (Shape("batch_norm", (3, 5, 129, 131), "NCHW"), "float32"),
    (Shape("group_norm", (5, 64, 35, 35), "NCHW", 8), "bfloat16"),
    (Shape("batch_norm", (16, 70, 7, 7), "NCHW"), "float16"),  # number by number
    (Shape("batch_norm", (12, 140, 28, 28), "NCHW"), "float32"),  # ahead
    (Shape("batch_norm", (6, 7, 7, 3), "NHWC"), "float32"),
    (Shape("instance_norm", (4, 64, 14, 14), "NCHW"), "float16"),  # few short rows, of one turn
    (Shape("batch_norm", (3, 14, 14, 64), "NHWC"), "float16"),  # vectors shorter than they could be
    (Shape("group_norm", (2, 8, 8, 640), "NHWC", 32), "bfloat16"),
    (Shape("batch_norm", (40, 2008, 7, 7), "NCHW"), "float16"),  # along planes, of which the last block has fewer
    (Shape("batch_norm", (64, 40, 56, 56), "NCHW"), "float16"),  # rows in segments, in a pipeline
    (Shape("batch_norm", (256, 24, 32, 32), "NCHW"), "float32"),
    (Shape("batch_norm", (64, 56, 56, 40), "NHWC"), "float16"),
    (Shape("batch_norm", (3, 4, 6, 8), "NCHW", layout="strided"), "float32"),  # points that do not merge
    (Shape("group_norm", (5, 250, 240, 64), "NHWC", 8), "bfloat16"),  # slabs in a pipeline, of whole samples
    (Shape("group_norm", (4, 200, 200, 192), "NHWC", 32), "float16"),  # of half of a sample's channels
    (Shape("group_norm", (2, 64, 128, 128), "NCHW", 4), "float16"),  # slabs of clusters, along the points
    (Shape("group_norm", (8, 16, 16, 1280), "NHWC", 32), "float16"),  # of one block, whose sets have several units
]


def run_channel_norm(shape: Shape, dtype: str, activation: str) -> None:
    """Forward and backward: plainly, with more and with less than that, and of evaluation."""
    runner = channel_cases.CupyRunner(pool=False)
    dy = shape.array(17, dtype, "contiguous")
    cases = [shape.case(dtype), shape.case(dtype, "weight", "float32", activation=activation)]
    if shape.name == "batch_norm":
        cases += [shape.case(dtype, running_dtype="float32", training=training) for training in (True, False)]
    for case in cases:
        runner.backward(case.backward(runner.forward(case), dy))
    for mask in ((True, False, False), (False, True, True)):
        runner.backward(cases[0].backward(runner.forward(cases[0]), dy, mask))
    runner.forward(cases[0], stats=False)
    bare = shape.case(dtype, "neither")
    runner.backward(bare.backward(runner.forward(bare), dy, (True, False, False)))


def run_rows(place: int, shape: tuple[int, ...], axis: tuple[int, ...], dtype: str) -> None:
    """Layer norm, RMS norm and GELU, forward and backward: plainly, with more and with less than that, and of views."""
    runner = CupyRunner(pool=False)
    x, dy, residual, dresidual_out = (data(seed, shape, dtype) for seed in (0, 1, 5, 6))
    weight, bias = (data(seed, columns_shape(shape, axis), dtype) for seed in (2, 3))
    for norm in (LAYER_NORM, RMS_NORM):
        case = Case(x, weight, bias, axis, norm)
        runner.backward(case.backward(runner.forward(case), dy))
    norm = ACTIVATED_NORMS[place % len(ACTIVATED_NORMS)]
    case = Case(x, weight, bias, axis, norm, residual)
    runner.backward(case.backward(runner.forward(case), dy, dresidual_out=dresidual_out))
    odd = data(4, (x.size + 1,), dtype)[1:].reshape(shape)
    case = Case(odd, None, bias, axis)
    gradients = case.backward(runner.forward(case), odd, mask=(True, False, True))
    runner.backward(replace(gradients, weight=weight))
    bare = Case(x, None, None, axis)
    runner.backward(bare.backward(runner.forward(bare), dy, mask=(True, False, False)))
    runner.forward(Case(x, weight, bias, axis, norm, odd))
    for array, vector in ((x, data(7, shape[-1:], dtype)), (odd, None)):
        approximate = ("none", "tanh")[place % 2]
        runner.run(cunorm.gelu, {"x": array, "bias": vector}, approximate=approximate)
        runner.run(cunorm.gelu_backward, {"dy": dy, "x": array, "bias": vector}, approximate=approximate)


def main() -> None:
    cupy.cuda.set_allocator(None)  # cudaMalloc each time: a pool would hide what lies between its blocks
    for place, problem in enumerate(PROBLEMS):
        run_rows(place, *problem)
    for shape, dtype in RUNS:
        run_runs(shape, dtype)
    with mock.patch.object(cache_hints, "_LEAST_BYTES", 0):
        for place, (shape, dtype) in enumerate(KEPT):
            run_rows(place, shape, (-1,), dtype)
        for channels, dtype in KEPT_CHANNELS:
            run_channel_norm(channels, dtype, "relu")
    for shape in WIDE:
        run_wide(shape)
    for shape, dtype in (*STAGGERED, *SHARED):
        run_few(shape, dtype)
    for shape, dtype in IN_BULK:
        run_in_bulk(shape, dtype)
    for shape, dtype in STREAMED:
        run_streamed(shape, dtype)
    for claimed in CLAIMED:
        run_claimed(*claimed)
    for sizes in HELD:
        for activation in (None, "silu"):
            run_rows_of_channels(norm_of(*sizes, activation))
    for sizes in ROWS_OF_CHANNELS:
        for activation in (None, "gelu"):
            run_rows_of_channels(norm_of(*sizes, activation))
    for place, (shape, dtype) in enumerate(CHANNEL_PROBLEMS):
        run_channel_norm(shape, dtype, ACTIVATIONS[place % len(ACTIVATIONS)])
    cupy.cuda.Device().synchronize()
    few = WIDE, STAGGERED, SHARED, IN_BULK, STREAMED, CLAIMED, HELD
    every = PROBLEMS, RUNS, KEPT, KEPT_CHANNELS, *few, ROWS_OF_CHANNELS, CHANNEL_PROBLEMS
    print(f"{sum(map(len, every))} problems done")


if __name__ == "__main__":
    main()
