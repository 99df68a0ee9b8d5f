"""The file of what tuning found: where it is, what it keeps and for whom, what a damaged one does, who uses it."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import SMALL_DEVICE
from tuning_cases import DEVICE, GPU, entry_of, other_geometries, prepare, problem_of

import cunorm
from cunorm import cuda, tuning, tuning_file
from cunorm.emulator.compiler import _executables_folder
from cunorm.plan import Device, Plan, fitted, plan, plan_with, row_bulk, row_candidates
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.problem import ForwardProblem, Matrix
from cunorm.tuning import checked_problems
from cunorm.tuning_file import TuningFile, default_path, key_of

pytestmark = pytest.mark.usefixtures("cache_folder")

# ---- Where the file is.


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def is_in(folder: Path) -> bool:
        return (default_path(), _executables_folder()) == (folder / "tuning.json", folder / "emulator")

    assert is_in(tmp_path / "cache")
    monkeypatch.delenv("CUNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert is_in(tmp_path / "cunorm")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert is_in(tmp_path / "home" / ".cache" / "cunorm")


def test_without_a_home_folder_plans_are_built_in(monkeypatch: pytest.MonkeyPatch, fake_gpu: list[Plan]) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUNORM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    prepare(4096, 8192)
    assert fake_gpu == [plan(problem_of(4096, 8192), DEVICE)]
    with pytest.raises(RuntimeError, match=r"there is no home folder .* set CUNORM_CACHE_DIR"):
        cunorm.tune("layer_norm", (4096, 8192))
    with pytest.raises(RuntimeError, match=r"there is no home folder .* set CUNORM_CACHE_DIR"):
        _executables_folder()


# ---- What is kept.


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_stored_comes_back(cache_folder: Path, direction: str) -> None:
    problem = problem_of(4096, 8192, direction=direction)
    file = TuningFile(cache_folder / "tuning.json")
    found = {key_of(problem): entry_of(other_geometries(problem)[0]), "another": entry_of(None, 3, 5)}
    file.store(GPU, found)
    assert file.read() == {GPU: found}
    more = {"another": entry_of(None, 7), "a third": entry_of(None)}
    file.store("another GPU", more)
    file.store(GPU, more)
    assert file.read() == {GPU: found | more, "another GPU": more}
    assert [path.name for path in cache_folder.iterdir()] == ["tuning.json"]


def test_a_file_from_elsewhere_in_the_interpreter_is_text(cache_folder: Path) -> None:
    TuningFile(cache_folder / "tuning.json").store(GPU, {"key": entry_of(None, 4096, 8192)})
    content = json.loads((cache_folder / "tuning.json").read_text())
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


def test_the_file_has_the_permissions_of_a_file_of_the_user(cache_folder: Path) -> None:
    file = TuningFile(cache_folder / "tuning.json")
    before = os.umask(0o027)
    try:
        file.store(GPU, {"key": entry_of(None)})
        assert file.path.stat().st_mode & 0o777 == 0o640
        file.path.chmod(0o664)
        file.store(GPU, {"another": entry_of(None)})
        assert file.path.stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def _store_from_a_process(path: Path, name: str) -> None:
    for i in range(20):
        TuningFile(path).store(GPU, {f"{name} {i}": entry_of(None)})


def test_processes_lose_nothing_to_each_other(cache_folder: Path) -> None:
    path = cache_folder / "tuning.json"
    context = multiprocessing.get_context("spawn")  # a fork may hang where a library has started threads
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
def test_a_foreign_file_is_ignored_with_one_warning(
    cache_folder: Path, fake_gpu: list[Plan], content: str | bytes
) -> None:
    cache_folder.mkdir()
    path = cache_folder / "tuning.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"tuning\.json is ignored, since it is no tuning file .*`python -m") as caught:
        prepare(4096, 8192)
        prepare(4096, 4096)
    assert len(caught) == 1
    assert fake_gpu == [plan(problem_of(4096, columns), DEVICE) for columns in (8192, 4096)]

    # What cannot be read is not lost when something is stored.
    TuningFile(path).store(GPU, {"key": entry_of(None)})
    assert TuningFile(path).read() == {GPU: {"key": entry_of(None)}}
    assert (cache_folder / "tuning.json.old").read_bytes() == (
        content if isinstance(content, bytes) else content.encode()
    )


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
def test_a_bad_entry_is_ignored_and_the_others_are_not(
    cache_folder: Path, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    cache_folder.mkdir()
    path = cache_folder / "tuning.json"
    path.write_text(file_of(spoil(good())))
    with pytest.warns(UserWarning, match=r"tuning\.json 1 of its entries are ignored.* \(one is 'bad'\)") as caught:
        assert set(TuningFile(path).read()[GPU]) == {"good"}
    assert len(caught) == 1
    # It is not lost when something is stored.
    before = path.read_text()
    TuningFile(path).store(GPU, {"key": entry_of(None)})
    assert set(TuningFile(path).read()[GPU]) == {"good", "key"}
    assert (cache_folder / "tuning.json.old").read_text() == before


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
def test_a_geometry_that_cannot_be_is_not_used(cache_folder: Path, fake_gpu: list[Plan], knobs: dict[str, Any]) -> None:
    problem = problem_of(4096, 8192)
    geometry = dataclasses.replace(other_geometries(problem)[0], **knobs)
    TuningFile(cache_folder / "tuning.json").store(GPU, {key_of(problem): entry_of(geometry)})
    prepare(4096, 8192)
    assert fake_gpu == [plan(problem, DEVICE)]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path)], ids=["folder", "endless link"])
def test_a_file_that_cannot_be_read(cache_folder: Path, fake_gpu: list[Plan], make: Callable[[Path], None]) -> None:
    cache_folder.mkdir()
    make(cache_folder / "tuning.json")
    with pytest.warns(UserWarning, match=r"tuning\.json cannot be read and is ignored"):
        prepare(4096, 8192)
    assert fake_gpu == [plan(problem_of(4096, 8192), DEVICE)]


def test_a_folder_that_cannot_be_written(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write_text("a file where the folder should be")
    monkeypatch.setattr(tuning, "current_gpu", lambda problem: pytest.fail("time was spent on what cannot be stored"))
    with pytest.raises(
        RuntimeError, match=r"tuning\.json cannot be written .*; set CUNORM_CACHE_DIR to another folder"
    ):
        cunorm.tune("layer_norm", (4096, 8192))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TuningFile(cache_folder / "tuning.json").read() == {}


def test_clear(cache_folder: Path) -> None:
    file = TuningFile(cache_folder / "tuning.json")
    assert not file.clear()
    file.store(GPU, {"key": entry_of(None)})
    assert file.clear() == "removed" and not file.path.exists()
    file.path.write_text("someone else's")
    old = cache_folder / "tuning.json.old"
    assert file.clear() == f"moved to {old}" and old.read_text() == "someone else's"


def test_what_is_no_file_is_left_where_it_is(cache_folder: Path) -> None:
    cache_folder.mkdir()
    folder, link, pipe = (cache_folder / name for name in ("folder", "link", "pipe"))
    folder.mkdir()
    link.symlink_to(folder)
    os.mkfifo(pipe)
    for path, kind, message in (
        (folder, IsADirectoryError, "is a folder"),
        (link, IsADirectoryError, "is a folder"),
        (pipe, OSError, "is no regular file"),
    ):
        file = TuningFile(path)
        for refuses in (file.clear, file.check_writable, functools.partial(file.store, GPU, {})):
            with pytest.raises(kind, match=message):
                refuses()
        with pytest.warns(UserWarning, match=f"{path.name} cannot be read and is ignored"):
            assert file.read() == {}
    assert {path.name for path in cache_folder.iterdir()} == {"folder", "link", "pipe"}


# ---- Who uses it.


def test_calls_use_what_was_found(cache_folder: Path, fake_gpu: list[Plan]) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[0]
    TuningFile(cache_folder / "tuning.json").store(GPU, {key_of(problem): entry_of(geometry)})
    prepare(4096, 8192)
    assert fake_gpu == [plan_with(problem, DEVICE, geometry)]
    assert fake_gpu != [plan(problem, DEVICE)]


def test_what_was_found_on_another_gpu_is_not_used(cache_folder: Path, fake_gpu: list[Plan]) -> None:
    problem = problem_of(4096, 8192)
    TuningFile(cache_folder / "tuning.json").store(
        "another GPU", {key_of(problem): entry_of(other_geometries(problem)[0])}
    )
    prepare(4096, 8192)
    assert fake_gpu == [plan(problem, DEVICE)]


def test_what_another_version_measured_is_not_used_and_stays(
    cache_folder: Path, fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(4096, 8192)
    geometry = other_geometries(problem)[0]
    file = TuningFile(cache_folder / "tuning.json")
    monkeypatch.setattr(tuning_file, "__version__", "0.3.1")
    file.store(GPU, {key_of(problem): dataclasses.replace(entry_of(geometry), cunorm="0.3.7")})
    prepare(4096, 8192)
    assert fake_gpu.pop() == plan_with(problem, DEVICE, geometry)

    # Nor need it make sense here.
    content = json.loads(file.path.read_text())
    old = {"cunorm": "0.2.9", "knobs": [1, 2], "seconds": float("nan")}
    content["gpus"][GPU] = {key_of(problem): content["gpus"][GPU][key_of(problem)] | {"cunorm": "1.3.1"}, "old": old}
    file.path.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning_file.forget()
        prepare(2048 + 1, 8192)  # of the same bucket, and not prepared yet
        assert fake_gpu.pop() == plan(problem_of(2048 + 1, 8192), DEVICE)
        assert (file.read(), file.count_others()) == ({}, 2)
        file.store(GPU, {"key": dataclasses.replace(entry_of(None), cunorm="0.3.1")})
        assert set(file.read()[GPU]) == {"key"}
    stored = json.loads(file.path.read_text())["gpus"][GPU]
    assert stored.keys() == {key_of(problem), "key", "old"} and stored["old"]["knobs"] == [1, 2]
    # It makes room for what is measured now.
    file.store(GPU, {key_of(problem): dataclasses.replace(entry_of(None), cunorm="0.3.1")})
    assert (set(file.read()[GPU]), file.count_others()) == ({key_of(problem), "key"}, 1)


def test_what_is_prepared_reads_no_file(
    cache_folder: Path, fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(4096, 8192)
    TuningFile(cache_folder / "tuning.json").store(GPU, {key_of(problem): entry_of(other_geometries(problem)[0])})
    prepared = prepare(4096, 8192)
    for name in ("read", "_read"):
        monkeypatch.setattr(TuningFile, name, lambda self: pytest.fail("the file was read again"))
    monkeypatch.setattr(tuning_file, "key_of", lambda problem: pytest.fail("it was looked up again"))
    assert prepare(4096, 8192) is prepared
    monkeypatch.setattr(tuning_file, "key_of", key_of)
    prepare(2048, 8192)  # another kind of call looks into what was read
    assert len(fake_gpu) == 2


def test_without_a_file_not_even_the_name_of_the_gpu_is_asked_for(
    fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "gpu_name", lambda index: pytest.fail("the driver was asked"))
    prepare(4096, 8192)
    assert fake_gpu == [plan(problem_of(4096, 8192), DEVICE)]


@pytest.mark.parametrize("device", [DEVICE, Device("sm_80", 108, 2048), SMALL_DEVICE], ids=["sm_90", "sm_80", "small"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "neighbours"),
    [
        ((4096, 8192), [(4096, 4104), (2049, 5120), (4000, 8184)]),
        ((4096, 1024), [(4096, 520), (4096, 768)]),
        ((100_000, 10), [(70_000, 10), (100_000, 14)]),
        ((512, 4095), [(512, 2049), (300, 3001)]),
        ((100_000, 129), [(70_000, 255), (131_072, 193)]),
    ],
    ids=str,
)
def test_a_geometry_is_fitted_to_the_sizes_of_its_bucket(
    device: Device, direction: str, shape: tuple[int, int], neighbours: list[tuple[int, int]]
) -> None:
    problem = problem_of(*shape, direction=direction)
    geometries = other_geometries(problem, device)[::23]  # neighbours are alike
    assert all(fitted(problem, device, geometry) == geometry for geometry in geometries)
    used = 0
    for size in neighbours:
        neighbour = problem_of(*size, direction=direction)
        assert key_of(neighbour) == key_of(problem)
        possible = set(row_candidates.candidates(neighbour, device))
        for geometry in geometries:
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


@pytest.mark.parametrize("direction, kind", [("forward", RowBulk), ("backward", RowBulkBackward)])
def test_runs_in_bulk_are_fitted_where_rows_lie_behind_each_other(direction: str, kind: type) -> None:
    """Vectors follow from the columns, and blocks that share a multiprocessor from what there is room for."""
    problem, shorter = (problem_of(rows, size, direction=direction) for rows, size in ((50_000, 257), (40_000, 385)))
    assert key_of(shorter) == key_of(problem)
    mine = list(row_candidates.in_bulk(problem, DEVICE))
    assert len(set(mine)) == len(mine) > 10
    for geometry in mine:
        assert tuning_file.parsed_geometry(dataclasses.asdict(geometry)) == geometry
        found = fitted(shorter, DEVICE, geometry)
        if found is None:  # too many of its numbers for each thread, or no room for so long runs
            assert geometry.vectors >= 17 or geometry.rows_per_block > 32
            continue
        assert isinstance(found, kind) and found.vectors == -(-385 // geometry.threads_per_row)
        assert dataclasses.replace(found, vectors=geometry.vectors, min_blocks=geometry.min_blocks) == geometry
        assert plan(shorter, DEVICE, geometry) == plan_with(shorter, DEVICE, found)
    apart = Matrix("bfloat16", (387,), (1,))
    others = [problem_of(40_000, size, direction=direction) for size in (386, 384)]
    others.append(dataclasses.replace(shorter, x=apart))
    assert {fitted(other, DEVICE, geometry) for other in others for geometry in mine} == {None}
    assert {fitted(problem, Device("sm_89", 128, 1536), geometry) for geometry in mine} == {None}


def test_the_built_in_runs_are_among_those_that_are_tried() -> None:
    problem = problem_of(50_000, 257)
    assert isinstance(problem, ForwardProblem)
    assert row_bulk.geometry(problem, DEVICE) in set(row_candidates.in_bulk(problem, DEVICE))
