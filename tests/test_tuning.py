"""Tuning: what the file keeps and for whom, what a damaged one does, how a search decides, who uses the winner."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import SMALL_DEVICE, data, poisoned, relative_error

import cunorm
from cunorm import cli, execute, launch, ops, reference, tuning, tuning_file
from cunorm.plan import Device, Plan, RowBlock, fitted, plan, plan_with, row_geometry
from cunorm.problem import BackwardProblem, ForwardProblem, View, contiguous_strides
from cunorm.tuning import Found, checked_problems, search
from cunorm.tuning_file import Entry, TuningFile, default_path, key_of

Problem = ForwardProblem | BackwardProblem

GPU = "NVIDIA of this test"
DEVICE = Device()


def problem_of(*shape: int, op: str = "layer_norm", dtype: str = "bfloat16", **options: Any) -> Problem:
    (problem,) = checked_problems(op, shape, dtype, **options)
    return problem


def other_geometries(problem: Problem, device: Device = DEVICE) -> list[RowBlock]:
    """What may compute a problem, but for what comes down to the built-in plan."""
    built_in = plan(problem, device)
    return [item for item in row_geometry.candidates(problem, device) if plan_with(problem, device, item) != built_in]


def entry_of(geometry: RowBlock | None, *shape: int) -> Entry:
    return Entry(geometry, shape or (4096, 8192), 1e-5, 1.25e-5, 7, "0.1.0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder of this test; nothing that it prepares outlives it."""

    def forget() -> None:
        tuning_file.forget()
        ops._prepare_forward.cache_clear()
        ops._prepare_backward.cache_clear()
        execute._calls.clear()

    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """A GPU that can be asked for its name and compiles everything. Gives the plans that calls were made of."""
    made: list[Plan] = []

    def call(chosen: Plan, operands: Sequence[str], device_index: int) -> Callable[..., None]:
        made.append(chosen)
        return lambda pointers, workspace, stream: None

    monkeypatch.setattr(launch, "device", lambda index: DEVICE)
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(tuning_file, "gpu_name", lambda index: GPU)
    return made


def prepare(*shape: int, dtype: str = "bfloat16") -> Any:
    """Prepare a forward call with weight and bias, as an adapter does for tensors on a GPU."""
    place = ("cuda", 0)
    x = View(0, shape, contiguous_strides(shape), dtype, place)
    vector = View(0, shape[-1:], (1,), dtype, place)
    return ops.RowNorm.of(-1, 1e-5).prepare_forward(x, None, vector, vector, None, False)


# ---- Where the file is.


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_path() == tmp_path / "cache" / "tuning.json"
    monkeypatch.delenv("CUNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "cunorm" / "tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path() == tmp_path / "home" / ".cache" / "cunorm" / "tuning.json"


def test_without_a_home_folder_plans_are_built_in(monkeypatch: pytest.MonkeyPatch, gpu: list[Plan]) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUNORM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    prepare(4096, 8192)
    assert gpu == [plan(problem_of(4096, 8192), DEVICE)]
    with pytest.raises(RuntimeError, match=r"there is no home folder .* set CUNORM_CACHE_DIR"):
        cunorm.tune("layer_norm", (4096, 8192))


# ---- What is kept.


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_stored_comes_back(cache: Path, direction: str) -> None:
    problem = problem_of(4096, 8192, direction=direction)
    file = TuningFile(cache / "tuning.json")
    found = {key_of(problem): entry_of(other_geometries(problem)[0]), "another": entry_of(None, 3, 5)}
    file.store(GPU, found)
    assert file.read() == {GPU: found}
    more = {"another": entry_of(None, 7), "a third": entry_of(None)}
    file.store("another GPU", more)
    file.store(GPU, more)
    assert file.read() == {GPU: found | more, "another GPU": more}
    assert [path.name for path in cache.iterdir()] == ["tuning.json"]


def test_a_file_from_elsewhere_in_the_interpreter_is_text(cache: Path) -> None:
    TuningFile(cache / "tuning.json").store(GPU, {"key": entry_of(None, 4096, 8192)})
    content = json.loads((cache / "tuning.json").read_text())
    assert content["format"] == 1
    assert content["gpus"][GPU]["key"]["shape"] == [4096, 8192]


def test_problems_of_one_bucket() -> None:
    def key(*shape: int, **options: Any) -> str:
        return key_of(problem_of(*shape, **options))

    assert key(4096, 8192) == key(2049, 8192) == key(2, 2048, 8192) == key(4000, 4104)
    alike = [
        key(4096, 8192),
        key(4097, 8192),
        key(4096, 8200),
        key(4096, 8191),
        key(4096, 8192, op="rms_norm"),
        key(4096, 8192, op="rms_norm", bias=True),
        key(4096, 8192, dtype="float16"),
        key(4096, 8192, weight="float32"),
        key(4096, 8192, bias=False),
        key(4096, 8192, residual=True),
        key(4096, 8192, activation="gelu"),
        key(4096, 8192, direction="backward"),
        key(4096, 8192, direction="backward", residual=True),
        key(4096, 8192, direction="backward", output_mask=(True, False, False)),
        key(1, 1),
    ]
    assert len(set(alike)) == len(alike)


def test_a_bucket_has_no_statistics_eps_or_offset() -> None:
    problem = problem_of(4096, 8192, op="rms_norm")
    assert isinstance(problem, ForwardProblem)
    norm = dataclasses.replace(problem.norm, weight_offset=1.0)
    assert key_of(problem) == key_of(dataclasses.replace(problem, stats=True, eps=0.5, norm=norm))


def _store_from_a_process(path: Path, name: str) -> None:
    for i in range(20):
        TuningFile(path).store(GPU, {f"{name} {i}": entry_of(None)})


def test_processes_lose_nothing_to_each_other(cache: Path) -> None:
    path = cache / "tuning.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_store_from_a_process, args=(path, name)) for name in "abcd"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(TuningFile(path).read()[GPU]) == 80


# ---- Files that are of no use.


def good() -> dict[str, Any]:
    geometry = dataclasses.asdict(other_geometries(problem_of(4096, 8192))[0])
    return {**dataclasses.asdict(entry_of(None)), "geometry": geometry}


def file_of(entry: Any) -> str:
    return json.dumps({"format": 1, "gpus": {GPU: {"bad": entry, "good": good()}}})


FOREIGN_FILES = {
    "empty": "",
    "cut off": file_of(good())[:-20],
    "no JSON": "tuning: yes",
    "binary": b"\x93NUMPY\x01\x00\xff\xfe",
    "a list": "[1, 2]",
    "a number": "1",
    "someone else's": '{"name": "package", "version": "1"}',
    "another version's": '{"format": 2, "gpus": {}}',
    "no GPUs": '{"format": 1}',
    "a list of GPUs": '{"format": 1, "gpus": []}',
    "nested deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN_FILES.values(), ids=FOREIGN_FILES.keys())
def test_a_foreign_file_is_ignored_with_one_warning(cache: Path, gpu: list[Plan], content: str | bytes) -> None:
    cache.mkdir()
    path = cache / "tuning.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"tuning\.json is ignored, since it is no tuning file .*`python -m") as caught:
        prepare(4096, 8192)
        prepare(4096, 4096)
    assert len(caught) == 1
    assert gpu == [plan(problem_of(4096, columns), DEVICE) for columns in (8192, 4096)]

    # What cannot be read is not lost when something is stored.
    TuningFile(path).store(GPU, {"key": entry_of(None)})
    assert TuningFile(path).read() == {GPU: {"key": entry_of(None)}}
    assert (cache / "tuning.json.old").read_bytes() == (content if isinstance(content, bytes) else content.encode())


BAD_ENTRIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda entry: 7,
    "unknown key": lambda entry: {**entry, "colour": "red"},
    "missing key": lambda entry: {name: value for name, value in entry.items() if name != "seconds"},
    "time in words": lambda entry: {**entry, "seconds": "fast"},
    "no time": lambda entry: {**entry, "seconds": 0},
    "negative time": lambda entry: {**entry, "built_in_seconds": -1e-6},
    "endless time": lambda entry: {**entry, "seconds": float("inf")},
    "NaN": lambda entry: {**entry, "seconds": float("nan")},
    "time as a bool": lambda entry: {**entry, "seconds": True},
    "shape in words": lambda entry: {**entry, "shape": "4096x8192"},
    "negative shape": lambda entry: {**entry, "shape": [-1, 8192]},
    "geometry in words": lambda entry: {**entry, "geometry": "row_block"},
    "unknown knob": lambda entry: {**entry, "geometry": {**entry["geometry"], "speed": 11}},
    "missing knob": lambda entry: {**entry, "geometry": {"width": 8}},
    "threads as a float": lambda entry: {**entry, "geometry": {**entry["geometry"], "threads_per_row": 128.0}},
    "threads as a bool": lambda entry: {**entry, "geometry": {**entry["geometry"], "threads_per_row": True}},
    "negative threads": lambda entry: {**entry, "geometry": {**entry["geometry"], "threads_per_row": -32}},
    "too great": lambda entry: {**entry, "geometry": {**entry["geometry"], "vectors": 10**30}},
    "peeled as a number": lambda entry: {**entry, "geometry": {**entry["geometry"], "peeled": 1}},
    "stage as a number": lambda entry: {**entry, "geometry": {**entry["geometry"], "stage": 1}},
}


@pytest.mark.parametrize("spoil", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_a_bad_entry_is_ignored_and_the_others_are_not(cache: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
    cache.mkdir()
    path = cache / "tuning.json"
    path.write_text(file_of(spoil(good())))
    with pytest.warns(UserWarning, match=r"tuning\.json 1 of its entries are ignored.* \(one is 'bad'\)") as caught:
        assert set(TuningFile(path).read()[GPU]) == {"good"}
    assert len(caught) == 1


IMPOSSIBLE = [
    {"threads_per_row": 0},
    {"width": 0, "vectors": 0},
    {"width": 7},
    {"threads_per_row": 4096},
    {"rows_per_block": 2**40},
    {"blocks_per_row": 3},
    {"stage": "sideways"},
    {"threads_per_row": 2},
]


@pytest.mark.parametrize("knobs", IMPOSSIBLE, ids=str)
def test_a_geometry_that_cannot_be_is_not_used(cache: Path, gpu: list[Plan], knobs: dict[str, Any]) -> None:
    problem = problem_of(4096, 8192)
    geometry = dataclasses.replace(other_geometries(problem)[0], **knobs)
    TuningFile(cache / "tuning.json").store(GPU, {key_of(problem): entry_of(geometry)})
    prepare(4096, 8192)
    assert gpu == [plan(problem, DEVICE)]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path)], ids=["folder", "endless link"])
def test_a_file_that_cannot_be_read(cache: Path, gpu: list[Plan], make: Callable[[Path], None]) -> None:
    cache.mkdir()
    make(cache / "tuning.json")
    with pytest.warns(UserWarning, match=r"tuning\.json cannot be read and is ignored"):
        prepare(4096, 8192)
    assert gpu == [plan(problem_of(4096, 8192), DEVICE)]


def test_a_folder_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(tuning, "_gpu", lambda problem: pytest.fail("time was spent on what cannot be stored"))
    with pytest.raises(
        RuntimeError, match=r"tuning\.json cannot be written .*; set CUNORM_CACHE_DIR to another folder"
    ):
        cunorm.tune("layer_norm", (4096, 8192))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TuningFile(cache / "tuning.json").read() == {}


def test_clear(cache: Path) -> None:
    file = TuningFile(cache / "tuning.json")
    assert not file.clear()
    file.store(GPU, {"key": entry_of(None)})
    assert file.clear() and not file.path.exists()
    file.path.write_text("someone else's")
    assert file.clear() and (cache / "tuning.json.old").read_text() == "someone else's"


# ---- Who uses it.


def test_calls_use_what_was_found(cache: Path, gpu: list[Plan]) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[0]
    TuningFile(cache / "tuning.json").store(GPU, {key_of(problem): entry_of(geometry)})
    prepare(4096, 8192)
    assert gpu == [plan_with(problem, DEVICE, geometry)]
    assert gpu != [plan(problem, DEVICE)]


def test_what_was_found_on_another_gpu_is_not_used(cache: Path, gpu: list[Plan]) -> None:
    problem = problem_of(4096, 8192)
    TuningFile(cache / "tuning.json").store("another GPU", {key_of(problem): entry_of(other_geometries(problem)[0])})
    prepare(4096, 8192)
    assert gpu == [plan(problem, DEVICE)]


def test_what_is_prepared_reads_no_file(cache: Path, gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(4096, 8192)
    TuningFile(cache / "tuning.json").store(GPU, {key_of(problem): entry_of(other_geometries(problem)[0])})
    prepared = prepare(4096, 8192)
    for name in ("read", "_read"):
        monkeypatch.setattr(TuningFile, name, lambda self: pytest.fail("the file was read again"))
    monkeypatch.setattr(tuning_file, "key_of", lambda problem: pytest.fail("it was looked up again"))
    assert prepare(4096, 8192) is prepared
    monkeypatch.setattr(tuning_file, "key_of", key_of)
    prepare(2048, 8192)  # another kind of call looks into what was read
    assert len(gpu) == 2


def test_without_a_file_not_even_the_name_of_the_gpu_is_asked_for(
    gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_file, "gpu_name", lambda index: pytest.fail("the driver was asked"))
    prepare(4096, 8192)
    assert gpu == [plan(problem_of(4096, 8192), DEVICE)]


@pytest.mark.parametrize("device", [DEVICE, Device("sm_80", 108, 2048), SMALL_DEVICE], ids=["sm_90", "sm_80", "small"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "neighbours"),
    [
        ((4096, 8192), [(4096, 4104), (2049, 5120), (4000, 8184)]),
        ((4096, 1024), [(4096, 520), (4096, 768)]),
        ((100_000, 10), [(70_000, 10), (100_000, 14)]),
        ((512, 4095), [(512, 2049), (300, 3001)]),
    ],
    ids=str,
)
def test_a_geometry_is_fitted_to_the_sizes_of_its_bucket(
    device: Device, direction: str, shape: tuple[int, int], neighbours: list[tuple[int, int]]
) -> None:
    problem = problem_of(*shape, direction=direction)
    geometries = other_geometries(problem, device)
    assert all(fitted(problem, device, geometry) == geometry for geometry in geometries)
    used = 0
    for size in neighbours:
        neighbour = problem_of(*size, direction=direction)
        assert key_of(neighbour) == key_of(problem)
        possible = set(row_geometry.candidates(neighbour, device))
        for geometry in geometries[::7]:
            mine = fitted(neighbour, device, geometry)
            used += mine is not None
            assert mine is None or (mine in possible and mine.threads_per_row == geometry.threads_per_row)
            expected = plan_with(neighbour, device, mine)
            assert plan(neighbour, device, geometry) == expected
    assert used or not geometries


def test_where_no_row_is_contiguous_a_geometry_is_not_used() -> None:
    geometry = other_geometries(problem_of(4096, 8192))[0]
    (across,) = checked_problems("layer_norm", (8192, 4096), "bfloat16", axis=0)
    assert fitted(across, DEVICE, geometry) is None
    assert plan(across, DEVICE, geometry) == plan(across, DEVICE)


# ---- The search.


class FakeMachine:
    """Compiles all, finds all right, and has a time for every plan."""

    gpu = GPU

    def __init__(self, seconds: Callable[[Plan], float], device: Device = DEVICE) -> None:
        self.device, self.seconds = device, seconds
        self.asked: list[Plan] = []
        self.released = False

    def compile(self, plans: Sequence[Plan], until: float, report: tuning.Report) -> list[Plan]:
        self.built_in = plans[0]
        return list(plans)

    def error(self, plan: Plan) -> float:
        return 0.0

    def samples(self, plan: Plan, count: int) -> list[float]:
        self.asked.append(plan)
        return [self.seconds(plan)] * count

    def release(self) -> None:
        self.released = True


def favourite(problem: Problem, geometry: RowBlock | None, ratio: float) -> Callable[[Plan], float]:
    """Times by which one geometry is faster than the built-in choice, and all others are slower."""
    built_in, best = plan(problem, DEVICE), plan_with(problem, DEVICE, geometry)
    return lambda chosen: 1e-5 if chosen == built_in else 1e-5 / ratio if chosen == best else 2e-5


@pytest.mark.parametrize("options", [{}, {"direction": "backward"}, {"op": "rms_norm", "residual": True}], ids=str)
def test_the_fastest_is_found(options: dict[str, Any]) -> None:
    problem = problem_of(4096, 8192, **options)
    for geometry in other_geometries(problem)[::10]:
        found = search(problem, FakeMachine(favourite(problem, geometry, 1.25)), 30.0)
        # Where rows are few, several geometries come down to one plan.
        assert found.geometry and plan_with(problem, DEVICE, found.geometry) == plan_with(problem, DEVICE, geometry)
        assert found.built_in_seconds / found.seconds == pytest.approx(1.25)
        assert found.tried == found.candidates > 10
        assert found.rejected == 0


@pytest.mark.parametrize(("ratio", "stored"), [(0.5, False), (1.0, False), (1.019, False), (1.021, True)])
def test_a_winner_is_two_percent_faster(ratio: float, stored: bool) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[3]
    found = search(problem, FakeMachine(favourite(problem, geometry, ratio)), 30.0)
    assert found.geometry == (geometry if stored else None)
    assert found.seconds == (pytest.approx(1e-5 / ratio) if stored else found.built_in_seconds)


@pytest.mark.parametrize("error", [0.01, float("nan"), float("inf")])
def test_what_is_wrong_is_not_timed(error: float) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[3]
    wrong = plan_with(problem, DEVICE, geometry)
    machine = FakeMachine(favourite(problem, geometry, 2.0))
    machine.error = lambda plan: error if plan == wrong else 0.0  # type: ignore[method-assign]
    found = search(problem, machine, 30.0)
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

    machine.error = error  # type: ignore[method-assign]
    machine.compile = lambda plans, until, report: [plan for plan in plans if plan != second]  # type: ignore[method-assign]
    found = search(problem, machine, 30.0)
    assert found.geometry == other_geometries(problem)[5]
    assert found.rejected == 1
    assert found.tried == found.candidates - 2


def test_a_broken_gpu_ends_the_search() -> None:
    problem = problem_of(4096, 8192)
    machine = FakeMachine(lambda plan: 1e-5)

    def error(plan: Plan) -> float:
        if plan != machine.built_in:
            raise tuning._Broken("the GPU is unusable")
        return 0.0

    machine.error = error  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the GPU is unusable"):
        search(problem, machine, 30.0)


def test_a_built_in_plan_that_does_not_run() -> None:
    machine = FakeMachine(lambda plan: 1e-5)
    machine.compile = lambda plans, until, report: list(plans[1:])  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the built-in plan does not compile or run"):
        search(problem_of(4096, 8192), machine, 30.0)


def test_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def seconds(plan: Plan) -> float:
        nonlocal now
        now += 0.5
        return 1e-5

    monkeypatch.setattr(tuning.time, "monotonic", lambda: now)
    found = search(problem_of(4096, 8192), FakeMachine(seconds), 10.0)
    assert 10 <= now <= 15  # what has begun is ended: one turn of those that are compared last
    assert 10 < found.tried < found.candidates


def test_steps_are_reported() -> None:
    steps: list[tuple[str, int, int]] = []
    search(problem_of(4096, 8192), FakeMachine(lambda plan: 1e-5), 30.0, lambda *step: steps.append(step))
    assert {name for name, *_ in steps} == {"trying", "comparing"}
    assert all(0 <= done <= total for _, done, total in steps)


def test_where_there_is_nothing_to_choose_from() -> None:
    (across,) = checked_problems("layer_norm", (8192, 4096), "bfloat16", axis=0)
    found = search(across, FakeMachine(lambda plan: 1e-5), 30.0)
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

    def error(self, plan: Plan) -> float:
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
    by_way = {(item.stage, item.peeled, item.weights_staged): item for item in other_geometries(problem, SMALL_DEVICE)}
    monkeypatch.setattr(row_geometry, "candidates", lambda problem, device: iter(by_way.values()))
    machine = EmulatedMachine(lambda plan: 1e-5, rows, columns)
    found = search(problem, machine, float("inf"))
    assert (found.rejected, found.tried) == (0, len(by_way) + 1)
    assert len(by_way) > 1
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
    """Stands in for the cupy module. Its clock is that of the calls, in milliseconds, as CUDA events have it."""

    def __init__(self) -> None:
        self.now, self.broken = 0.0, False
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


@pytest.fixture
def numpy_gpu(gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> CupyOnNumpy:
    """A GPU whose kernels are the reference, and take 10 µs each (`spoil` is called with the results)."""
    fake = CupyOnNumpy()
    fake.spoil = lambda plan, results: None  # type: ignore[attr-defined]
    fake.milliseconds = lambda plan: 0.01  # type: ignore[attr-defined]
    problems: list[Problem] = []

    def call(chosen: Plan, operands: Sequence[str], device_index: int) -> Callable[..., None]:
        problem = problems[-1]

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            given = dict(zip(operands, pointers))
            rows, columns = problem.rows, problem.columns
            dtypes = tuning._operand_dtypes(problem)
            shapes = dict.fromkeys(("weight", "bias", "dweight", "dbias"), (columns,))
            shapes |= dict.fromkeys(("mean", "rstd"), (rows,))
            arrays: dict[str, Any] = {}
            for name, pointer in given.items():
                assert bool(pointer) == (dtypes[name] is not None)
                shape = shapes.get(name, (rows, columns))
                dtype = dtypes[name]
                if dtype:
                    arrays[name] = execute.as_numpy(pointer, shape, contiguous_strides(shape), dtype)
            results = {name: arrays[name] for name in tuning._OUTPUTS if name in arrays}
            assert all(np.isnan(array.astype("float32")).all() for array in results.values()) or fake.now > 0
            x, get = arrays["x"].astype("float64"), arrays.get
            if isinstance(problem, ForwardProblem):
                outs = {"out": results["y"], "residual_out": results.get("residual_out")}
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
                    **outs,
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
                    output_mask=("dx" in results, "dweight" in results, "dbias" in results),
                    **{f"{name}_out": results.get(name) for name in ("dx", "dweight", "dbias")},
                )
            assert np.isfinite(x).all() and np.ptp(x) > 1
            fake.spoil(chosen, results)  # type: ignore[attr-defined]
            fake.now += fake.milliseconds(chosen)  # type: ignore[attr-defined]

        return run

    make = tuning._gpu

    def remembering(problem: Problem) -> Any:
        problems.append(problem)
        return make(problem)

    monkeypatch.setattr(tuning, "_gpu", remembering)
    monkeypatch.setattr(tuning, "gpu_name", lambda index: GPU)
    monkeypatch.setattr(tuning, "_LEAST_FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr(tuning, "_CHUNK", 1000)
    monkeypatch.setattr(tuning, "_BLOCK", 2**10 - 3)
    monkeypatch.setattr(launch, "cupy", lambda: fake)
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(launch, "_function", lambda *_: None)
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


@pytest.mark.parametrize("output", ["dx", "dweight", "dbias"])
@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_one_wrong_result_is_enough(numpy_gpu: CupyOnNumpy, output: str, value: float) -> None:
    problem = problem_of(6, 512, direction="backward")
    geometry = other_geometries(problem)[0]
    wrong = plan_with(problem, DEVICE, geometry)

    def spoil(chosen: Plan, results: dict[str, Any]) -> None:
        if chosen == wrong:
            results[output].reshape(-1)[100:200] += value

    numpy_gpu.spoil = spoil  # type: ignore[attr-defined]
    numpy_gpu.milliseconds = lambda plan: 0.005 if plan == wrong else 0.01  # type: ignore[attr-defined]
    (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", direction="backward", max_seconds=1e9)
    assert (result.rejected, result.geometry) == (1, None)


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_fails(numpy_gpu: CupyOnNumpy, cache: Path, broken: bool) -> None:
    problem = problem_of(6, 512)
    bad = plan_with(problem, DEVICE, other_geometries(problem)[0])

    def spoil(chosen: Plan, results: dict[str, Any]) -> None:
        if chosen == bad:
            numpy_gpu.broken = broken
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    numpy_gpu.spoil = spoil  # type: ignore[attr-defined]
    if broken:
        with pytest.raises(RuntimeError, match=r"leaves the GPU unusable .*ILLEGAL_ADDRESS.*; nothing was stored"):
            cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
        assert not (cache / "tuning.json").exists()
    else:
        (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
        assert result.rejected == 1


def test_kernels_that_do_not_compile(numpy_gpu: CupyOnNumpy, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(6, 512)
    (item,) = plan_with(problem, DEVICE, other_geometries(problem)[0]).launches

    def compiled(kernel: str, constants: Any, *_: Any) -> None:
        if constants == item.constants:
            raise RuntimeError("kernel row_block_forward does not compile")

    monkeypatch.setattr(launch, "_function", compiled)
    (result,) = cunorm.tune("layer_norm", (6, 512), "bfloat16", max_seconds=1e9)
    assert 1 < result.tried < result.candidates


# ---- cunorm.tune


@pytest.fixture
def machine(gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """What `cunorm.tune` runs on."""
    fake = FakeMachine(lambda plan: 1e-5)
    monkeypatch.setattr(tuning, "_gpu", lambda problem: fake)
    return fake


def test_tune_stores_the_winner_and_the_next_call_uses_it(
    cache: Path, gpu: list[Plan], machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[5]
    before = prepare(4096, 8192)
    execute._calls["a call of a user"] = before
    machine.seconds = favourite(problem, geometry, 1.25)
    (result,) = cunorm.tune("layer_norm", (4096, 8192), "bfloat16")
    assert machine.released
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
    assert gpu == [plan(problem, DEVICE), plan_with(problem, DEVICE, geometry)]

    # When the built-in choice is found to be the best, that is kept too.
    machine.seconds = lambda plan: 1e-5
    (result,) = cunorm.tune("layer_norm", (4096, 8192), "bfloat16")
    assert result.geometry is None
    prepare(4096, 8192)
    assert gpu[2:] == [plan(problem, DEVICE)]
    entry = TuningFile(cache / "tuning.json").read()[GPU][key_of(problem)]
    assert (entry.geometry, entry.cunorm, entry.tried) == (None, cunorm.__version__, result.tried)


def test_tune_both_directions_and_another_file(cache: Path, machine: FakeMachine, tmp_path: Path) -> None:
    results = cunorm.tune("rms_norm", [64, 1024], "float32", direction="both", file=str(tmp_path / "a" / "my.json"))
    assert [result.direction for result in results] == ["forward", "backward"]
    stored = TuningFile(tmp_path / "a" / "my.json").read()[GPU]
    assert set(stored) == {
        key_of(problem_of(64, 1024, op="rms_norm", dtype="float32", direction=direction))
        for direction in ("forward", "backward")
    }
    assert not cache.exists()


def test_the_time_is_shared_out(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def measured(problem: Problem, machine: Any, max_seconds: float, report: Any) -> Found:
        given.append(max_seconds)
        return Found(None, 1e-5, 1e-5, 1, 0, 1)

    monkeypatch.setattr(tuning, "search", measured)
    cunorm.tune("layer_norm", (64, 1024), direction="both", max_seconds=8)
    assert given == [pytest.approx(4, abs=0.5), pytest.approx(8, abs=0.5)]


def test_a_gpu_whose_memory_does_not_do(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Plan) -> float:
        raise MemoryError("Out of memory allocating 4096 bytes")

    machine.error = full  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"x of shape \(4096, 8192\) and dtype float16.* do not fit .*: Out of memory"
    ):
        cunorm.tune("layer_norm", (4096, 8192))
    assert machine.released


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "op is 'batch_norm'; it must be one of layer_norm, rms_norm", {"op": "batch_norm"}),
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
    machine: FakeMachine, kind: type[Exception], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        cunorm.tune(**({"op": "layer_norm", "shape": (64, 64)} | options))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("options", [{}, {"weight": False, "bias": False}, {"weight": "float32"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"activation": "gelu", "residual": True}], ids=str)
def test_a_tuned_problem_is_that_of_the_call(
    gpu: list[Plan], monkeypatch: pytest.MonkeyPatch, op: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """The look-up of a plain call, forward and backward, finds what `tune` stores for the same arguments."""
    looked_up: list[Problem] = []
    monkeypatch.setattr(ops, "entry_for", lambda problem, index: looked_up.append(problem))
    place, shape = ("cuda", 0), (64, 1024)
    x = View(0, shape, (1024, 1), "bfloat16", place)
    stats = View(0, (64,), (1,), "float32", place)

    def vector(given: Any) -> View | None:
        return View(0, (1024,), (1,), given if isinstance(given, str) else "bfloat16", place) if given else None

    weight, bias = vector(options.get("weight", True)), vector(options.get("bias", op == "layer_norm"))
    norm = ops.RowNorm.of(-1, 1e-5, more.get("activation"), op == "layer_norm")
    added = x if more else None
    norm.prepare_forward(x, added, weight, bias, None, True)
    mean = stats if op == "layer_norm" else None
    mask = (True, weight is not None, bias is not None)
    norm.prepare_backward(x, added, x, weight, bias, mean, stats, mask, None)
    tuned = checked_problems(op, shape, "bfloat16", "both", **options, **more)
    assert [key_of(problem) for problem in looked_up] == [key_of(problem) for problem in tuned]


# ---- The commands.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(arguments) == 2
    return capsys.readouterr().err


def test_the_command(
    capsys: pytest.CaptureFixture[str], cache: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cunorm.cli.tune.cuda_devices", lambda: ([GPU], ""))
    problem = problem_of(4096, 8192)
    machine.seconds = favourite(problem, other_geometries(problem)[5], 1.25)
    shapes = ("--shape", "4096x8192", "--shape", "64x1024", "--dtype", "bfloat16")
    text = run(capsys, "tune", *shapes, "--max-seconds", "30")
    first, second, last = text.splitlines()
    assert first.startswith("layer_norm 4096x8192 bfloat16 | forward | 10 µs | 8 µs | 25 % | ")
    assert "threads a row" in first
    assert second.startswith("layer_norm 64x1024 bfloat16 | forward | ")
    assert last == f"written: {cache / 'tuning.json'}"
    assert len(TuningFile(cache / "tuning.json").read()[GPU]) == 2

    options = ("--op", "rms_norm", "--affine-dtype", "float32", "--activation", "silu", "--residual", "--both")
    text = run(capsys, "tune", "--clear", *shapes, *options, "--file", str(cache / "other.json"))
    assert text.splitlines()[0] == f"nothing to remove: there is no {cache / 'other.json'}"
    assert text.splitlines()[-1].endswith("other.json, which is not the file that cunorm reads")
    wanted = {"op": "rms_norm", "weight": "float32", "activation": "silu", "residual": True}
    keys = {key_of(problem_of(64, 1024, direction=name, **wanted)) for name in ("forward", "backward")}
    stored = TuningFile(cache / "other.json").read()[GPU]
    assert keys < set(stored) and len(stored) == 4

    assert run(capsys, "tune", "--clear") == f"removed: {cache / 'tuning.json'}\n"
    assert not (cache / "tuning.json").exists()


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.cli.tune.cuda_devices", lambda: ([], "none for this test"))
    message = refused(capsys, "tune", "--shape", "4096x8192")
    assert message == "python -m cunorm tune: it needs an NVIDIA GPU: none for this test\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a shape, such as --shape 4096x8192"),
        (["--shape", "0x5"], "--shape 0x5: shape is (0, 5)"),
        (["--shape", "4x5", "--max-seconds", "0"], "--max-seconds 0.0 must be positive"),
        (["--shape", "4x5", "--max-seconds", "nan"], "--max-seconds nan must be positive"),
        (["--shape", "4x5", "--file", "/proc/nothing/tuning.json"], "/proc/nothing/tuning.json cannot be written"),
    ],
)
def test_commands_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("cunorm.cli.tune.cuda_devices", lambda: ([GPU], ""))
    assert message in refused(capsys, "tune", *arguments)


def test_explain_says_where_the_plan_is_from(
    capsys: pytest.CaptureFixture[str], cache: Path, gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cunorm.cli.explain.cuda_devices", lambda: ([GPU], ""))
    monkeypatch.setattr("cunorm.cli.explain.measured_copy_rate", lambda: 4e12)
    monkeypatch.setattr(
        "cunorm.cli.explain.compile_resources", lambda *_: SimpleNamespace(registers=1, spill_bytes=0, shared_bytes=0)
    )

    def chosen(shape: str, *more: str) -> str:
        tuning_file.forget()
        text = run(capsys, "explain", "--shape", shape, "--dtype", "bfloat16", *more)
        return next(line for line in text.splitlines() if line.startswith("chosen")).removeprefix("chosen").strip()

    assert chosen("4096x8192") == "built in"
    problem = problem_of(4096, 8192)
    geometry = next(item for item in other_geometries(problem) if item.vectors == 1)
    file = TuningFile(cache / "tuning.json")
    file.store(GPU, {key_of(problem): entry_of(geometry)})
    assert chosen("4096x8192") == "tuned: the best of 7 measured here on 4096x8192, 1.25x the built-in speed"
    assert chosen("4096x8192", "--arch", "sm_80") == "built in"
    assert chosen("4096x8192", "--op", "rms_norm") == "built in"
    # No geometry of one vector a thread and as many threads is for half the columns: half of them would be idle.
    assert chosen("4096x4104").startswith(("built in, since what is best of 7", "tuned"))
    file.store(GPU, {key_of(problem): entry_of(None)})
    assert chosen("4096x8192") == "built in, the best of 7 measured here on 4096x8192"


# ---- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_tuning_a_small_shape(cache: Path, op: str, dtype: str) -> None:
    import cupy

    shape = (64, 1024)
    results = cunorm.tune(op, shape, dtype, direction="both", residual=op == "rms_norm", max_seconds=60)
    assert [result.direction for result in results] == ["forward", "backward"]
    for result in results:
        assert 0 < result.seconds <= result.built_in_seconds < 1e-3
        assert result.tried > 5
        assert result.rejected == 0
    stored = TuningFile(cache / "tuning.json").read()
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
