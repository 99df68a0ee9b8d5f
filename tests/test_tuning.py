"""Tuning: how a search decides, what it compares on a GPU, what `cunorm.tune` stores and says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import SMALL_DEVICE, data, poisoned, relative_error
from tuning_cases import (
    DEVICE,
    GPU,
    FakeMachine,
    Problem,
    favourite,
    other_geometries,
    prepare,
    problem_of,
)

import cunorm
from cunorm import compiling, cuda, execute, explanation, launch, on_cpu, reference, tuning
from cunorm.plan import Plan, RowBlock, plan, plan_with, row_candidates
from cunorm.problem import ForwardProblem, View, contiguous_strides
from cunorm.row_norm import RowNorm
from cunorm.tuning import checked_problems
from cunorm.tuning import gpu as tuning_gpu
from cunorm.tuning.search import Broken, Found, find_fastest
from cunorm.tuning_file import TuningFile, key_of

pytestmark = pytest.mark.usefixtures("cache_folder")

# ---- The search.


@pytest.mark.parametrize("options", [{}, {"direction": "backward"}, {"op": "rms_norm", "residual": True}], ids=str)
def test_the_fastest_is_found(options: dict[str, Any]) -> None:
    problem = problem_of(4096, 8192, **options)
    for geometry in other_geometries(problem)[::10]:
        found = find_fastest(problem, FakeMachine(favourite(problem, geometry, 1.25)), 30.0)
        # Where rows are few, several geometries come down to one plan.
        assert found.geometry and plan_with(problem, DEVICE, found.geometry) == plan_with(problem, DEVICE, geometry)
        assert found.built_in_seconds / found.seconds == pytest.approx(1.25)
        assert found.tried == found.candidates > 10
        assert found.rejected == 0


@pytest.mark.parametrize(("ratio", "stored"), [(0.5, False), (1.0, False), (1.019, False), (1.021, True)])
def test_a_winner_is_two_percent_faster(ratio: float, stored: bool) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[3]
    found = find_fastest(problem, FakeMachine(favourite(problem, geometry, ratio)), 30.0)
    assert found.geometry == (geometry if stored else None)
    assert found.seconds == (pytest.approx(1e-5 / ratio) if stored else found.built_in_seconds)


@pytest.mark.parametrize("error", [0.01, float("nan"), float("inf")])
def test_what_is_wrong_is_not_timed(error: float) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[3]
    wrong = plan_with(problem, DEVICE, geometry)
    machine = FakeMachine(favourite(problem, geometry, 2.0))
    machine.error = lambda plan: error if plan == wrong else 0.0
    found = find_fastest(problem, machine, 30.0)
    assert (found.geometry, found.rejected) == (None, 1)
    assert wrong not in machine.asked


def test_what_does_not_run_is_passed_over() -> None:
    problem = problem_of(4096, 8192)
    first, second = (plan_with(problem, DEVICE, geometry) for geometry in other_geometries(problem)[3:5])
    machine = FakeMachine(favourite(problem, other_geometries(problem)[5], 1.5))

    def error(plan: Plan) -> float:
        if plan == first:
            raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        return 0.0

    machine.error = error
    machine.compile = lambda plans, until, report: [plan for plan in plans if plan != second]
    found = find_fastest(problem, machine, 30.0)
    assert found.geometry == other_geometries(problem)[5]
    assert found.rejected == 1
    assert found.tried == found.candidates - 2


def test_a_broken_gpu_ends_the_search() -> None:
    problem = problem_of(4096, 8192)
    machine = FakeMachine(lambda plan: 1e-5)

    def error(plan: Plan) -> float:
        if plan != machine.built_in:
            raise Broken("the GPU is unusable")
        return 0.0

    machine.error = error
    with pytest.raises(RuntimeError, match="the GPU is unusable"):
        find_fastest(problem, machine, 30.0)


def test_a_built_in_plan_that_does_not_run() -> None:
    machine = FakeMachine(lambda plan: 1e-5)
    machine.compile = lambda plans, until, report: list(plans[1:])
    with pytest.raises(RuntimeError, match="the built-in plan does not compile or run"):
        find_fastest(problem_of(4096, 8192), machine, 30.0)


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def seconds(plan: Plan) -> float:
        nonlocal now
        now += 0.5
        return 1e-5

    monkeypatch.setattr("time.monotonic", lambda: now)
    found = find_fastest(problem_of(4096, 8192), FakeMachine(seconds), 10.0)
    assert 10 <= now <= 15  # what has begun is ended: one turn of those that are compared last
    assert 10 < found.tried < found.candidates


def test_steps_are_reported() -> None:
    steps: list[tuple[str, int, int]] = []
    find_fastest(problem_of(4096, 8192), FakeMachine(lambda plan: 1e-5), 30.0, lambda *step: steps.append(step))
    assert {name for name, *_ in steps} == {"trying", "comparing"}
    assert all(0 <= done <= total for _, done, total in steps)


def test_where_there_is_nothing_to_choose_from() -> None:
    (across,) = checked_problems("layer_norm", (8192, 4096), "bfloat16", axis=0)
    found = find_fastest(across, FakeMachine(lambda plan: 1e-5), 30.0)
    assert found == Found(None, 1e-5, 1e-5, 1, 0, 1)


class EmulatedMachine(FakeMachine):
    """Runs the text of the kernels on the CPU, as tests/test_emulator.py does, to tell right from wrong."""

    def __init__(self, seconds: Callable[[Plan], float], rows: int, columns: int) -> None:
        super().__init__(seconds, SMALL_DEVICE)
        vectors = {"weight": data(1, (columns,)), "bias": data(2, (columns,))}
        self.operands: dict[str, Any] = dict.fromkeys(("residual", "residual_out", "mean", "rstd"))
        self.operands |= {"x": data(0, (rows, columns)), **vectors, "y": None}
        self.expected: Any = None
        self.errors: list[float] = []
        self.error = self._error

    def _error(self, plan: Plan) -> float:
        from cunorm.emulator.plans import run_plan

        y = self.operands["y"] = poisoned(self.operands["x"].shape, "float32")
        run_plan(plan, self.operands)
        self.expected = y if self.expected is None else self.expected
        self.errors.append(relative_error(y, self.expected.astype(np.float64)))
        return self.errors[-1]


@pytest.mark.parametrize("columns", [1024, 1001])
def test_every_way_gives_the_result_of_the_built_in_choice(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 5
    problem = problem_of(rows, columns, dtype="float32")
    by_way = {
        (item.stage, item.peeled, item.weights) if isinstance(item, RowBlock) else "in bulk": item
        for item in other_geometries(problem, SMALL_DEVICE)
    }
    monkeypatch.setattr(row_candidates, "candidates", lambda problem, device: iter(by_way.values()))
    monkeypatch.delenv("CUNORM_CACHE_DIR")  # executables are kept for the next time
    machine = EmulatedMachine(lambda plan: 1e-5, rows, columns)
    found = find_fastest(problem, machine, float("inf"))
    assert (found.rejected, found.tried) == (0, len(by_way) + 1)
    assert len(by_way) > 1 and ("in bulk" in by_way) == (columns == 1001)
    assert machine.errors[0] == 0 and max(machine.errors) < 1e-6


# ---- The GPU's side, on NumPy arrays.


class Memory(np.ndarray[Any, Any]):
    """A NumPy array with what is used of a CuPy array's memory."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        def fill(value: int, size: int) -> None:
            self.view(np.ndarray).view(np.uint8)[:size] = value

        return SimpleNamespace(ptr=self.__array_interface__["data"][0], memset_async=fill)


class CupyOnNumpy:
    """Stands in for the cupy module. Its clock is that of the calls, in milliseconds, as CUDA events have it.

    A call of a plan takes ``milliseconds`` of it, and ``spoil`` gets what it computed.
    """

    def __init__(self) -> None:
        self.now, self.broken = 0.0, False
        self.milliseconds: Callable[[Plan], float] = lambda plan: 0.01
        self.spoil: Callable[[Plan, dict[str, Any]], None] = lambda plan, results: None
        event = type("Event", (), {"record": lambda event: setattr(event, "time", self.now)})
        stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
        runtime = SimpleNamespace(getDevice=lambda: 0, deviceSynchronize=self._synchronize, CUDARuntimeError=OSError)
        self.cuda = SimpleNamespace(
            Device=lambda index: SimpleNamespace(attributes={"L2CacheSize": 1000}),
            Event=event,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda begin, end: end.time - begin.time,
            runtime=runtime,
        )

    def _synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("cudaErrorIllegalAddress")

    def empty(self, count: int, dtype: str) -> Memory:
        return np.empty(count, dtype).view(Memory)

    def asarray(self, values: Any) -> Memory:
        return np.array(values).view(Memory)

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)


def compute(problem: Problem, arrays: dict[str, Any]) -> None:
    """What the kernels of a problem compute, by the reference, into the outputs among ``arrays``."""
    get = arrays.get
    if isinstance(problem, ForwardProblem):
        reference.row_norm(
            arrays["x"],
            get("weight"),
            get("bias"),
            axis=(1,),
            eps=1e-5,
            norm=problem.norm,
            residual=get("residual"),
            mean_out=None,
            rstd_out=None,
            out=arrays["y"],
            residual_out=get("residual_out"),
        )
    else:
        reference.row_norm_backward(
            arrays["dy"],
            arrays["x"],
            get("weight"),
            get("mean"),
            arrays["rstd"],
            axis=(1,),
            norm=problem.norm,
            bias=get("bias"),
            dresidual_out=get("dresidual_out"),
            output_mask=("dx" in arrays, "dweight" in arrays, "dbias" in arrays),
            **{f"{name}_out": get(name) for name in ("dx", "dweight", "dbias")},
        )


def arrays_at(pointers: dict[str, int], problem: Problem) -> dict[str, Any]:
    """The operands of a call, which are exactly those that the problem has."""
    vectors, statistics = ("weight", "bias", "dweight", "dbias"), ("mean", "rstd")
    shapes = dict.fromkeys(vectors, (problem.columns,)) | dict.fromkeys(statistics, (problem.rows,))
    arrays = {}
    dtypes = {name: item and item[1] for name, item in tuning_gpu._tensors(problem).items()}
    for name, pointer in pointers.items():
        dtype, shape = dtypes[name], shapes.get(name, (problem.rows, problem.columns))
        assert bool(pointer) == (dtype is not None)
        if dtype:
            arrays[name] = on_cpu.as_numpy(pointer, shape, contiguous_strides(shape), dtype)
    return arrays


@pytest.fixture
def numpy_gpu(fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> CupyOnNumpy:
    """A GPU whose kernels are the reference, and take 10 µs each."""
    fake = CupyOnNumpy()
    problems: list[Problem] = []

    def call(chosen: Plan, operands: Sequence[str], device_index: int) -> Callable[..., None]:
        problem = problems[-1]

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            arrays = arrays_at(dict(zip(operands, pointers)), problem)
            results = {name: arrays[name] for name in tuning_gpu._OUTPUTS if name in arrays}
            assert all(np.isnan(array.astype("float32")).all() for array in results.values()) or fake.now > 0
            x = arrays["x"].astype("float64")
            compute(problem, arrays)
            assert np.isfinite(x).all() and np.ptp(x) > 1
            fake.spoil(chosen, results)
            fake.now += fake.milliseconds(chosen)

        return run

    make = tuning.current_gpu

    def remembering(problem: Problem) -> Any:
        problems.append(problem)
        return make(problem)

    monkeypatch.setattr(tuning, "current_gpu", remembering)
    monkeypatch.setattr("cunorm.gpus._LEAST_FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr(tuning_gpu, "_CHUNK", 1000)
    monkeypatch.setattr(tuning_gpu, "_BLOCK", 2**10 - 3)
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(compiling, "compiled_function", lambda *_: None)
    return fake


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {"op": "layer_norm"},
        {"op": "rms_norm", "residual": True},
        {"op": "layer_norm", "weight": "float32", "bias": False, "activation": "silu"},
        {"op": "rms_norm", "weight": False, "output_mask": (False, True, True)},
    ],
    ids=str,
)
def test_every_operand_is_there_and_every_plan_is_compared(
    numpy_gpu: CupyOnNumpy, options: dict[str, Any], dtype: str
) -> None:
    for result in cunorm.tune(shape=(6, 512), dtype=dtype, direction="both", max_seconds=1e9, **options):
        assert (result.rejected, result.geometry) == (0, None)
        assert result.tried == result.candidates > 3
        assert result.seconds == pytest.approx(1e-5)


def test_float16_sums_of_many_rows_are_numbers(numpy_gpu: CupyOnNumpy) -> None:
    """Else two layouts would differ by inf - inf, and none could be told right."""
    machine: Any = tuning_gpu.current_gpu(problem_of(400_000, 8, dtype="float16", direction="backward"))
    dy = machine._arrays["dy"].reshape(-1, 8)
    assert 1000 < abs(dy.sum(axis=0, dtype="float64")).max() < 30_000
    few: Any = tuning_gpu.current_gpu(problem_of(4000, 8, dtype="float16", direction="backward"))
    assert few._arrays["dy"].std() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("output", ["dx", "dweight", "dbias"])
@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_one_wrong_result_is_enough(numpy_gpu: CupyOnNumpy, output: str, value: float) -> None:
    problem = problem_of(6, 512, direction="backward")
    geometry = other_geometries(problem)[0]
    wrong = plan_with(problem, DEVICE, geometry)

    def spoil(chosen: Plan, results: dict[str, Any]) -> None:
        if chosen == wrong:
            results[output].reshape(-1)[100:200] += value

    numpy_gpu.spoil = spoil
    numpy_gpu.milliseconds = lambda plan: 0.005 if plan == wrong else 0.01
    (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", direction="backward", max_seconds=1e9)
    assert (result.rejected, result.geometry) == (1, None)


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_fails(numpy_gpu: CupyOnNumpy, cache_folder: Path, broken: bool) -> None:
    problem = problem_of(6, 512)
    bad = plan_with(problem, DEVICE, other_geometries(problem)[0])

    def spoil(chosen: Plan, results: dict[str, Any]) -> None:
        if chosen == bad:
            numpy_gpu.broken = broken
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    numpy_gpu.spoil = spoil
    if broken:
        with pytest.raises(RuntimeError, match=r"leaves the GPU unusable .*ILLEGAL_ADDRESS.*; nothing was stored"):
            cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
        assert not (cache_folder / "tuning.json").exists()
    else:
        (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
        assert result.rejected == 1


def test_kernels_that_do_not_compile(numpy_gpu: CupyOnNumpy, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(6, 512)
    (item,) = plan_with(problem, DEVICE, other_geometries(problem)[0]).launches

    def compiled(kernel: str, constants: Any, *_: Any) -> None:
        if constants == item.constants:
            raise RuntimeError("kernel row_block_forward does not compile")

    monkeypatch.setattr(compiling, "compiled_function", compiled)
    (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
    assert 1 < result.tried < result.candidates


# ---- cunorm.tune


def test_tune_stores_the_winner_and_the_next_call_uses_it(
    cache_folder: Path, fake_gpu: list[Plan], fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[5]
    before = prepare(4096, 8192)
    execute._calls["a call of a user"] = before
    fake_machine.seconds = favourite(problem, geometry, 1.25)
    (result,) = cunorm.tune("layer_norm", (4096, 8192), "bfloat16")
    assert fake_machine.released
    assert (result.op, result.direction, result.shape, result.dtype) == (
        "layer_norm",
        "forward",
        (4096, 8192),
        "bfloat16",
    )
    assert (result.geometry, result.gpu) == (geometry, GPU)
    assert result.built_in_seconds / result.seconds == pytest.approx(1.25)

    assert not execute._calls
    assert prepare(4096, 8192) is not before
    assert fake_gpu == [plan(problem, DEVICE), plan_with(problem, DEVICE, geometry)]

    # When the built-in choice is found to be the best, that is kept too.
    fake_machine.seconds = lambda plan: 1e-5
    (result,) = cunorm.tune("layer_norm", (4096, 8192), "bfloat16")
    assert result.geometry is None
    prepare(4096, 8192)
    assert fake_gpu[2:] == [plan(problem, DEVICE)]
    entry = TuningFile(cache_folder / "tuning.json").read()[GPU][key_of(problem)]
    assert (entry.geometry, entry.cunorm, entry.tried) == (None, cunorm.__version__, result.tried)


def test_tune_both_directions_and_another_file(cache_folder: Path, fake_machine: FakeMachine, tmp_path: Path) -> None:
    results = cunorm.tune("rms_norm", [64, 1024], "float32", direction="both", file=str(tmp_path / "a" / "my.json"))
    assert [result.direction for result in results] == ["forward", "backward"]
    stored = TuningFile(tmp_path / "a" / "my.json").read()[GPU]
    assert set(stored) == {
        key_of(problem_of(64, 1024, op="rms_norm", dtype="float32", direction=direction))
        for direction in ("forward", "backward")
    }
    assert not cache_folder.exists()


def test_the_time_is_shared_out(fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def measured(problem: Problem, machine: Any, max_seconds: float, report: Any) -> Found:
        given.append(max_seconds)
        return Found(None, 1e-5, 1e-5, 1, 0, 1)

    monkeypatch.setattr(tuning, "find_fastest", measured)
    cunorm.tune("layer_norm", (64, 1024), direction="both", max_seconds=8)
    assert given == [pytest.approx(4, abs=0.5), pytest.approx(8, abs=0.5)]


@pytest.mark.usefixtures("cache_folder", "no_driver")
def test_tuning_without_a_driver() -> None:
    with pytest.raises(RuntimeError, match=r"^tuning needs an NVIDIA GPU: no NVIDIA driver$"):
        cunorm.tune("layer_norm", (4, 8))


def test_a_gpu_whose_memory_does_not_do(fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Plan) -> float:
        raise MemoryError("Out of memory allocating 4096 bytes")

    fake_machine.error = full
    with pytest.raises(
        RuntimeError, match=r"x of shape \(4096, 8192\) and dtype float16.* do not fit .*: Out of memory"
    ):
        cunorm.tune("layer_norm", (4096, 8192))
    assert fake_machine.released


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "op is 'conv'; it must be one of layer_norm, rms_norm", {"op": "conv"}),
        (ValueError, r"op is \['gelu'\]; it must be one of", {"op": ["gelu"]}),
        (ValueError, "op is None; it must be one of", {"op": None}),
        (ValueError, "direction is 'up'; it must be one of forward, backward, both", {"direction": "up"}),
        (TypeError, "shape must be a sequence of ints; got 7", {"shape": 7}),
        (TypeError, "shape must be a sequence of ints; got '64x64'", {"shape": "64x64"}),
        (TypeError, r"shape must be a sequence of ints; got \(2.5, 3\)", {"shape": (2.5, 3)}),
        (ValueError, r"shape is \(\); it must have a dimension", {"shape": ()}),
        (ValueError, r"shape is \(0, 3\); .* none may be empty", {"shape": (0, 3)}),
        (TypeError, "dtype is 'int8'; it must be one of float16, bfloat16, float32, float64", {"dtype": "int8"}),
        (TypeError, "dtype is True; it must be one of", {"dtype": True}),
        (TypeError, "dtype is <class 'float'>; it must be one of", {"dtype": float}),
        (TypeError, "weight is 'int8'; it must be one of .*, or a bool", {"weight": "int8"}),
        (TypeError, "bias is 3; it must be one of .*, or a bool", {"bias": 3}),
        (ValueError, "axis 2 is out of range", {"axis": 2}),
        (TypeError, "axis must be an int", {"axis": "last"}),
        (ValueError, "activation is 'tanh'", {"activation": "tanh"}),
        (ValueError, "output_mask asks for nothing", {"direction": "backward", "output_mask": (False, False, False)}),
        (TypeError, "output_mask must be three bools", {"direction": "backward", "output_mask": 1}),
        (ValueError, "max_seconds must be a positive number; got 0", {"max_seconds": 0}),
        (ValueError, "max_seconds must be a positive number; got nan", {"max_seconds": float("nan")}),
        (ValueError, "max_seconds must be a positive number; got '30'", {"max_seconds": "30"}),
    ],
)
def test_arguments_that_make_no_sense(
    fake_machine: FakeMachine, kind: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        cunorm.tune(**({"op": "layer_norm", "shape": (64, 64)} | options))


def test_every_op_that_has_several_plans_can_be_tuned() -> None:
    assert {*explanation.OPS} - {*tuning.OPS} == {"gelu"}


def test_the_time_may_be_as_good_as_endless(fake_machine: FakeMachine) -> None:
    (result,) = cunorm.tune("layer_norm", (64, 64), max_seconds=10**400)
    assert result.tried == result.candidates


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("options", [{}, {"weight": False, "bias": False}, {"weight": "float32"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"activation": "gelu", "residual": True}], ids=str)
def test_a_tuned_problem_is_that_of_the_call(
    fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch, op: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """The look-up of a plain call, forward and backward, finds what `tune` stores for the same arguments."""
    looked_up: list[Problem] = []
    monkeypatch.setattr("cunorm.prepare.entry_for", lambda problem, index: looked_up.append(problem))
    place, shape = ("cuda", 0), (64, 1024)
    x = View(0, shape, (1024, 1), "bfloat16", place)
    stats = View(0, (64,), (1,), "float32", place)

    def vector(given: Any) -> View | None:
        return View(0, (1024,), (1,), given if isinstance(given, str) else "bfloat16", place) if given else None

    weight, bias = vector(options.get("weight", True)), vector(options.get("bias", op == "layer_norm"))
    norm = RowNorm.of(-1, 1e-5, more.get("activation"), op == "layer_norm")
    added = x if more else None
    norm.prepare_forward(x, added, weight, bias, None, True)
    mean = stats if op == "layer_norm" else None
    mask = (True, weight is not None, bias is not None)
    norm.prepare_backward(x, added, x, weight, bias, mean, stats, mask, None)
    tuned = checked_problems(op, shape, "bfloat16", "both", **options, **more)
    assert [key_of(problem) for problem in looked_up] == [key_of(problem) for problem in tuned]


# ---- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_tuning_a_small_shape(cache_folder: Path, op: str, dtype: str) -> None:
    import cupy

    shape = (64, 1024)
    results = cunorm.tune(op, shape, dtype, direction="both", residual=op == "rms_norm", max_seconds=60)
    assert [result.direction for result in results] == ["forward", "backward"]
    for result in results:
        assert 0 < result.seconds <= result.built_in_seconds < 1e-3
        assert result.tried > 5
        assert result.rejected == 0
    stored = TuningFile(cache_folder / "tuning.json").read()
    assert set(stored) == {results[0].gpu} and len(stored[results[0].gpu]) == 2

    # Whatever won is what runs now, and it is right.
    x, weight = data(0, shape), data(1, shape[1:])
    function = getattr(cunorm, op)
    y = function(cupy.asarray(x), cupy.asarray(weight))
    assert relative_error(y.get(), function(x.astype(np.float64), weight.astype(np.float64))) < 1e-6


@pytest.mark.gpu
def test_every_candidate_is_right_on_this_gpu() -> None:
    for shape, dtype in (((1000, 1024), "bfloat16"), ((300, 1023), "float16"), ((5000, 10), "float32")):
        for result in cunorm.tune("layer_norm", shape, dtype, direction="both", max_seconds=300):
            assert result.rejected == 0
            assert result.tried == result.candidates
