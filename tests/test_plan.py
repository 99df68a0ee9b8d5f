"""Which plan is chosen for which problem and device: a pure function, of few kernels."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    DEVICES,
    GPUS,
    ROWS,
    Problem,
    devices,
    many,
    plain_backward,
    plain_channel_norm,
    plain_forward,
    problems,
)

from cunorm.plan import Device, Plan, plan, plan_with, row_geometry, row_split
from cunorm.plan.launches import Builder
from cunorm.plan.row_short import SHORT_BYTES
from cunorm.problem import DTYPES, BackwardProblem, ChannelForward, ForwardProblem, Matrix, Norm, Vector

# ---- A plan is a function, and kernels are few.


@many
@given(problems(), devices)
def test_plans_are_deterministic(problem: Problem, device: Device) -> None:
    again = pickle.loads(pickle.dumps(problem))  # equal, and nothing of it is the same object
    assert again == problem and hash(again) == hash(problem)
    assert plan.__wrapped__(problem, device) == plan.__wrapped__(again, device)
    assert plan(problem, device) is plan(again, device), "a plan is kept"
    hash(plan(problem, device))


def kernels_of(*plans: Plan) -> set[tuple[str, Any]]:
    return {(item.kernel, item.constants) for chosen in plans for item in chosen.launches}


def _costly(*chosen: Plan) -> set[tuple[str, Any]]:
    """But for column sums, which are cheap to compile (of few partial rows or many, of gradients or of chunks), and but
    for so few rows that one group of blocks writes the sums of all, in their own dtype."""
    types_of_sums = ("DWEIGHT_TYPE", "DBIAS_TYPE")
    return {
        (kernel, tuple(item for item in constants if item[0] not in types_of_sums))
        for kernel, constants in kernels_of(*chosen)
        if kernel != "column_sums"
    }


@settings(max_examples=300, deadline=None)
@given(ROWS, ROWS, st.integers(2, 100_000), st.sampled_from(list(DTYPES)), devices)
def test_no_batch_that_fills_a_gpu_compiles_a_kernel_of_its_own(
    rows: int, other_rows: int, columns: int, dtype: str, device: Device
) -> None:
    for make in (plain_forward, plain_backward):
        # So many rows that each thread of the GPU could have 17 vectors, and where they are short 4 of them: less is a
        # case of its own for these.
        itemsize, threads = DTYPES[dtype].itemsize, device.threads_per_multiprocessor
        enough = 64 + threads * 17 * (16 // itemsize) // columns
        if columns * itemsize < SHORT_BYTES:
            enough = max(enough, 4 * threads)
        enough *= device.multiprocessors
        some, others = (plan(make(count + enough, columns, dtype), device) for count in (rows, other_rows))
        assert _costly(some) == _costly(others)


@pytest.mark.parametrize("columns", [10, 100, 256, 768, 1024, 4096, 4097, 10_240, 16_384, 100_000, 300_000, 10**6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_batches_compile_few_kernels(columns: int, dtype: str) -> None:
    """Few rows are spread over more threads than many are: by powers of two, so there are few ways. Forward, weights of
    long rows come in a way of their own between few and many, and L2 is asked to keep what is more than it holds;
    backward, a single short row has a block for itself, and of 300,000 columns there is nothing but a pipeline."""
    counts = (*range(1, 300), *range(300, 3000, 7))
    for make in (plain_forward, plain_backward):
        more = {10_240: 2, 16_384: 2} if make is plain_forward else {100: 1, 256: 1, 10_240: 1, 100_000: 1, 300_000: 1}
        ways = 4 + more.get(columns, 0)
        every = _costly(*(plan(make(rows, columns, dtype), DEVICES["sm_90"]) for rows in counts))
        assert len({kernel for kernel, _ in every}) * ways >= len(every)


def test_eps_compiles_nothing() -> None:
    sizes = (64, 10**6, 3_000_001, 10**7)
    some, others = (
        kernels_of(*(plan(plain_forward(64, columns, eps=eps), DEVICES["sm_90"]) for columns in sizes))
        for eps in (0.0, 1.0)
    )
    # row_split is three, of which all rows share one.
    assert some == others and len(some) == 1 + 1 + 3 + 2


@pytest.mark.parametrize("sizes", [(64, 256, 3136), (256, 2048, 49), (2, 64, 196), (4, 3, 9), (16, 64, 66_049)])
@pytest.mark.parametrize("last", [False, True], ids=["NC...", "N...C"])
@pytest.mark.parametrize("device", ["sm_75", "sm_90"])
def test_another_momentum_is_planned_in_no_time(sizes: tuple[int, int, int], last: bool, device: str) -> None:
    """A training may have another one at every step: its plan is the same but for two numbers."""
    problem, _ = plain_channel_norm(sizes, channels_per_set=None, last=last)
    assert isinstance(problem, ChannelForward) and problem.running is not None
    found = plan.cache_info().hits
    for kept, taken, unbiased in ((0.9, 0.1, True), (0.75, 0.25, True), (0.99, 0.01, True)):
        other = replace(problem, running=replace(problem.running, kept=kept, taken=taken, unbiased=unbiased))
        assert plan(other, DEVICES[device]) == plan_with(other, DEVICES[device], None)
    assert plan.cache_info().hits >= found + 2, "they are made of one plan"


MODEL_SIZES = [
    64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120, 8192,
]  # fmt: skip


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_model_of_many_sizes_compiles_few_kernels(dtype: str) -> None:
    """Twenty sizes of layer norm, and four batch sizes of each: about a kernel a size and direction for batches that
    fill the GPU, which are all that a training has, and two more for less, or three backward."""
    rows = (1, 7, 4096, 65536)
    for make, kernels_a_size in ((plain_forward, 3), (plain_backward, 4)):
        plans = [[plan(make(n, columns, dtype), DEVICES["sm_90"]) for columns in MODEL_SIZES] for n in rows]
        assert len(kernels_of(*itertools.chain(*plans))) <= kernels_a_size * len(MODEL_SIZES) + 4
        assert len(_costly(*plans[-1])) <= len(MODEL_SIZES)
        assert len(kernels_of(*plans[-1])) <= len(MODEL_SIZES) + 5, "column sums"


# ---- Which strategy for which size.


# The ways on each GPU that differs: one without asynchronous copies or clusters, one with the most shared memory that
# is not shared among blocks, one with clusters and with bulk copies.
WAYS = ("sm_75", "sm_80", "sm_90")
BLOCK, CLUSTER, PIPELINE, GRID, SPLIT = "row_block", "row_cluster", "row_pipeline", "row_grid", "row_split"
BULK, STREAM = "row_bulk", "row_stream"
STRATEGIES = [
    # dtype, columns, forward, backward
    ("bfloat16", 1, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 64, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 4097, (BLOCK, BLOCK, BULK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 6144, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("bfloat16", 65_536, (SPLIT, BLOCK, CLUSTER), (SPLIT, PIPELINE, CLUSTER)),
    ("bfloat16", 140_001, (SPLIT, SPLIT, STREAM), (SPLIT, SPLIT, STREAM)),
    ("bfloat16", 120_000, (SPLIT, PIPELINE, CLUSTER), (SPLIT, PIPELINE, STREAM)),
    ("bfloat16", 1_000_000, (SPLIT, PIPELINE, PIPELINE), (SPLIT, PIPELINE, PIPELINE)),
    ("bfloat16", 5_000_000, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
    ("float32", 10, (BLOCK, BLOCK, BULK), (BLOCK, BLOCK, BLOCK)),
    ("float32", 4096, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("float32", 20_000, (BLOCK, BLOCK, CLUSTER), (SPLIT, PIPELINE, CLUSTER)),
    ("float32", 100_000, (SPLIT, PIPELINE, CLUSTER), (SPLIT, PIPELINE, STREAM)),
    ("float32", 100_001, (SPLIT, SPLIT, STREAM), (SPLIT, SPLIT, STREAM)),
    ("float32", 1_000_000, (SPLIT, SPLIT, PIPELINE), (SPLIT, SPLIT, PIPELINE)),
    ("float32", 2_000_001, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
    ("float32", 3_000_000, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
    ("float64", 4096, (BLOCK, BLOCK, BLOCK), (BLOCK, BLOCK, BLOCK)),
    ("float64", 50_257, (SPLIT, SPLIT, CLUSTER), (SPLIT, SPLIT, CLUSTER)),
    ("float64", 200_000, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
    ("float64", 10_000_000, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT, SPLIT)),
]


@pytest.mark.parametrize("rows", [300, 4096])
@pytest.mark.parametrize(("dtype", "columns", "forward", "backward"), STRATEGIES)
def test_strategies(rows: int, dtype: str, columns: int, forward: tuple[str, ...], backward: tuple[str, ...]) -> None:
    for name, one, other in zip(WAYS, forward, backward):
        assert plan(plain_forward(rows, columns, dtype), DEVICES[name]).strategy == one
        assert plan(plain_backward(rows, columns, dtype), DEVICES[name]).strategy == other


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_clusters_of_16_blocks_have_rows_with_much_to_read(dtype: str) -> None:
    """But for those with little else to read, that were not measured so."""
    h200, mebi = DEVICES["sm_90"], 2**20 // DTYPES[dtype].itemsize

    def clusters(columns: int, residual: bool = False, **changes: Any) -> bool:
        problem = replace(plain_forward(200, columns, dtype, residual=residual), **changes)
        return row_geometry.forward_geometry(problem, h200) is not None

    assert [clusters(mebi), clusters(mebi + 64), clusters(2 * mebi)] == [True, False, False]
    assert clusters(2 * mebi, weight=None, bias=None)
    assert [clusters(columns, residual=True) for columns in (mebi // 2, mebi)] == [True, False]


def test_rows_that_run_in_a_wave_or_two_have_eight_vectors() -> None:
    def vectors(problem: ForwardProblem) -> Any:
        return dict(plan(problem, GPUS["sm_90"]).launches[-1].constants)["VECTORS"]

    for dtype, columns, rows in itertools.product(("bfloat16", "float32"), (512, 1024), (4600, 8192, 12_000, 40_000)):
        layer_norm = plain_forward(rows, columns, dtype)
        rms_norm = replace(layer_norm, bias=None, norm=Norm(centered=False))
        waves = rows * columns * layer_norm.itemsize / 16 / (132 * 2048)
        assert (vectors(rms_norm) == 8) == (2.9 <= waves <= 7), (dtype, columns, rows)
        assert vectors(replace(rms_norm, norm=Norm(centered=False, activation="silu"))) < 8
        assert vectors(layer_norm) < 8 or waves <= 4


@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", 1023), ("float16", 2049), ("float32", 1023)])
def test_few_odd_rows_have_a_vector_a_thread(dtype: str, columns: int) -> None:
    for rows in (1, 8, 256, 512):
        way = row_geometry.forward_geometry(plain_forward(rows, columns, dtype), DEVICES["sm_90"])
        assert way is not None and way.peeled and way.vectors <= 2 < way.threads_per_row
    many = row_geometry.forward_geometry(plain_forward(1 << 15, columns, dtype), DEVICES["sm_90"])
    assert many is not None and many.vectors > 2


def test_long_rows_that_no_pipeline_has_are_read_twice() -> None:
    """Weights of double take more registers than there are; and of some rows nothing fits."""
    h200, double = DEVICES["sm_90"], Vector("float64")

    def strategy(columns: int, rows: int = 200, **changes: Any) -> str:
        return plan(replace(plain_forward(rows, columns, "bfloat16"), **changes), h200).strategy

    sizes = (2**17, 300_032, 2**20, 2**22)
    assert [strategy(columns) for columns in sizes] == [CLUSTER, PIPELINE, PIPELINE, SPLIT]
    assert [strategy(columns, weight=double, bias=double) for columns in sizes] == [CLUSTER, PIPELINE, SPLIT, SPLIT]
    assert [strategy(columns, weight=None, bias=None) for columns in sizes] == [CLUSTER, PIPELINE, PIPELINE, PIPELINE]
    assert [strategy(2**22, rows) for rows in (1, 4, 8)] == [GRID, GRID, SPLIT]
    assert {strategy(columns, rows) for columns in (2**20, 2**21) for rows in (1, 2, 4, 8)} == {PIPELINE}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 2**19), (128, 2**20), (64, 2**21), (16, 2**21), (200, 300_000)])
def test_groups_of_rows_are_no_more_than_run_at_once(rows: int, columns: int, dtype: str) -> None:
    """Each writes a row of partial sums, where rows are read twice."""
    builder = Builder()
    row_split.plan(plain_backward(rows, columns, dtype), DEVICES["sm_90"], builder)
    (main,) = (item for item in builder.launches if item.kernel == "row_split_backward")
    tiles = int(dict(main.arguments)["tiles"])  # type: ignore[call-overload]
    assert main.grid == tiles or main.grid <= 4 * DEVICES["sm_90"].multiprocessors


def test_long_rows_are_shared_where_they_are_few() -> None:
    h200 = DEVICES["sm_90"]
    assert [plan(plain_forward(rows, 16_384, "bfloat16"), h200).strategy for rows in (1, 16, 200, 4096)] == [
        CLUSTER, CLUSTER, CLUSTER, BLOCK,
    ]  # fmt: skip
    assert plan(plain_forward(16, 4096, "bfloat16"), h200).strategy == BLOCK


@pytest.mark.parametrize("device", list(DEVICES.values()), ids=list(DEVICES))
def test_older_gpus_get_neither_clusters_nor_rows_ahead(device: Device) -> None:
    for columns in (10, 64, 257, 4096, 4097, 16_384, 20_001, 65_536, 100_000, 10**6):
        for dtype in DTYPES:
            for problem in (plain_forward(1000, columns, dtype), plain_backward(1000, columns, dtype)):
                for item in plan(problem, device).launches:
                    assert item.cluster == 1 or device.groups(item.cluster)
                    assert device.capability >= 80 or dict(item.constants).get("STAGE") != "ahead"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("columns", [1024, 4097, 65536, 1_000_000])
@pytest.mark.parametrize("rows", [1, 2, 4096])
def test_tensors_move_16_bytes_at_a_time(rows: int, columns: int, dtype: str) -> None:
    """Odd rows too, but for the weights' gradients of few, and from shared memory where they come in bulk."""
    for problem in (plain_forward(rows, columns, dtype), plain_backward(rows, columns, dtype)):
        for item in plan(problem, DEVICES["sm_90"]).launches:
            width = dict(item.constants).get("VECTOR")
            odd = item.kernel.startswith(("row_weight_gradients", "row_bulk")) and columns % 2 > 0
            assert width is None or odd or width * DTYPES[dtype].itemsize == 16


ALONE, IN_TURNS, AHEAD = ("direct", 0), ("direct", 1), ("ahead", 1)


@pytest.mark.parametrize(
    ("dtype", "columns", "way"),
    [
        ("float32", 65, ALONE),
        ("float32", 4097, ALONE),
        ("float32", 17_001, AHEAD),
        ("bfloat16", 257, IN_TURNS),
        ("bfloat16", 1025, ALONE),
        ("bfloat16", 4097, ALONE),
        ("bfloat16", 15_873, IN_TURNS),
        ("bfloat16", 24_001, AHEAD),
        ("float64", 1025, AHEAD),
    ],
)
def test_rows_that_begin_anywhere(dtype: str, columns: int, way: tuple[str, int]) -> None:
    """A block for every group of rows where it can afford to shift weights: those of one alone, always.

    There is space between them, for else most would come in bulk.
    """

    def way_of(problem: ForwardProblem) -> tuple[Any, Any]:
        apart = Matrix(dtype, (columns + 2,), (1,))
        added = problem.residual and apart
        problem = replace(problem, x=apart, residual=added, y=apart, residual_out=added)
        *_, item = plan(problem, DEVICES["sm_90"]).launches
        constants = dict(item.constants)
        assert constants["PEELED"] and constants["ALIKE"] and constants["MARGIN"] == 0
        return constants["STAGE"], constants["TAKES_TURNS"]

    layer_norm = plain_forward(4096, columns, dtype)
    assert way_of(layer_norm) == way
    if way != AHEAD:
        others = replace(layer_norm, bias=None), replace(layer_norm, weight=None, bias=None)
        assert {way_of(problem) for problem in (*others, plain_forward(4096, columns, dtype, residual=True))} == {ALONE}


@pytest.mark.parametrize(
    ("matrix", "strategy"),
    [
        pytest.param(Matrix("float32", (1000,), (1,)), "row_block", id="rows with space between"),
        pytest.param(Matrix("float32", (-768,), (1,)), "row_block", id="rows last to first"),
        pytest.param(Matrix("float32", (0,), (1,)), "row_block", id="one row many times"),
        pytest.param(Matrix("float32", (768,), (1,), 4), "row_block", id="not aligned"),
        pytest.param(Matrix("float32", (1,), (64,)), "row_split", id="first axis"),
        pytest.param(Matrix("float32", (1536,), (2,)), "row_split", id="every second column"),
        pytest.param(Matrix("float32", (768,), (-1,)), "row_split", id="columns last to first"),
        pytest.param(Matrix("float32", (768,), (0,)), "row_split", id="one column many times"),
    ],
)
def test_strategies_for_views(matrix: Matrix, strategy: str) -> None:
    plain = Matrix("float32", (768,), (1,))
    for x, y in ((matrix, plain), (plain, matrix)):
        problem = ForwardProblem((64,), (768,), x, None, y, None, None, None, True, 1e-5)
        assert plan(problem, DEVICES["sm_90"]).strategy == strategy


def test_neighbouring_threads_take_neighbouring_numbers() -> None:
    """Along rows where columns are contiguous, across them where rows are: either way whole 32-byte sectors."""

    def row_lanes(problem: Problem) -> set[Any]:
        return {lanes for item in plan(problem, DEVICES["sm_90"]).launches
                if (lanes := dict(item.constants).get("ROW_LANES")) is not None}  # fmt: skip

    first_axis = Matrix("float32", (1,), (512,))
    forward = ForwardProblem((512,), (64,), first_axis, None, first_axis, None, None, None, True, 0.0)
    backward = BackwardProblem((512,), (64,), first_axis, first_axis, None, None, None, None, None, "float32")
    assert row_lanes(forward) == row_lanes(backward) == {32}
    assert row_lanes(plain_forward(64, 100_000_000)) == row_lanes(plain_backward(64, 3_000_000)) == {1}


def test_what_is_empty_launches_nothing_but_zeros() -> None:
    for make in (plain_forward, plain_backward):
        nothing = plan(make(0, 0), DEVICES["sm_90"])
        assert nothing.launches == () and nothing.workspace_bytes == 0
    for columns in (8, 1_000_000):
        assert plan(plain_forward(0, columns), DEVICES["sm_90"]).launches == ()
        sums = plan(plain_backward(0, columns), DEVICES["sm_90"]).launches
        assert [(item.kernel, dict(item.arguments)["rows"]) for item in sums] == [("column_sums", 0)]
    # The statistics of rows without columns are NaN, which somebody must write.
    assert [item.kernel for item in plan(plain_forward(5, 0), DEVICES["sm_90"]).launches] == ["split_merge"]
    assert plan(plain_backward(5, 0), DEVICES["sm_90"]).launches == ()
