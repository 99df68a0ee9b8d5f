"""``cunorm.experiment``: edited texts of kernels, what is found in them, and that nothing of them stays behind.

Most run on the emulator. What needs a GPU, frameworks above all, is marked so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import SMALL_DEVICE, data
from tuning_cases import prepare

import cunorm
from cunorm import execute, kernels, launch, resources
from cunorm.compile_error import CompileError
from cunorm.experiments import bench, check, examples
from cunorm.experiments.tables import Table
from cunorm.plan import Device, Plan, plan

needs_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or not sys.platform.startswith("linux"), reason="the emulator needs g++ and Linux"
)

ROWS, SUMS = "row_block_forward", "column_sums"
PUT = "normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias)"
SHIPPED = {kernel: kernels.kernel_text(kernel, {}) for kernel in kernels.kernel_names()}


def edited(kernel: str, *changes: tuple[str, str]) -> Any:
    """An experiment with its text changed: each old text for a new one, which must be there once."""
    experiment = cunorm.experiment(kernel)
    text = experiment.source
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    experiment.source = text
    return experiment


def found_in(experiment: Any, shape: tuple[int, ...], dtype: str = "float32", **options: Any) -> str:
    """What the report says of the first call of a shape, which must not be right."""
    report = experiment.check(shapes=[shape], dtypes=[dtype], on="emulator", **options)
    assert not report and not report.passed
    assert len(report.frame) == len(report.rows) >= 1
    return str(report.notes[0])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does with experiments, afterwards every text is the shipped one."""
    yield
    assert kernels.replaced == {}
    assert {kernel: kernels.kernel_text(kernel) for kernel in SHIPPED} == SHIPPED


# ---- The text.


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [("row_block", ValueError, "must be one of .*row_block_forward"), (3, TypeError, "kernel is a int; it must be a")],
)
def test_kernels_that_there_are_not(kernel: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cunorm.experiment(kernel)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", TypeError, "source is a bytes; it must be a str, the text of row_block_forward"),
        (" \n", ValueError, "source is empty"),
        ("// nothing but this\n", ValueError, "source is empty"),
        ("struct Arguments {\n};\n", ValueError, r"must have the entry point .* row_block_forward\(.*; it has none"),
        (SHIPPED[SUMS], ValueError, "must have the entry point .*; it has that of column_sums"),
        (
            SHIPPED[ROWS].replace("  double eps;\n", ""),
            ValueError,
            "must have the fields of the shipped .*: - double eps",
        ),
        (
            SHIPPED[ROWS].replace("double eps;", "double eps;\n  long long more[3];"),
            ValueError,
            r"fields of the shipped row_block_forward\.cu: \+ long long more\[3\]",
        ),
        (
            re.sub(r"(  const WEIGHT_TYPE\* weight;\n)(  const BIAS_TYPE\* bias;\n)", r"\2\1", SHIPPED[ROWS]),
            ValueError,
            "they are in another order",
        ),
        (SHIPPED[ROWS].replace("double eps;", "float eps;"), ValueError, "field eps is float; every field must be 8"),
    ],
    ids=range(9),
)
def test_texts_that_cannot_be_the_kernel_s(text: Any, error: type[Exception], message: str) -> None:
    experiment = cunorm.experiment(ROWS)
    with pytest.raises(error, match=message):
        experiment.source = text
    assert experiment.source == SHIPPED[ROWS]


@pytest.mark.parametrize("kernel", sorted(SHIPPED))
def test_a_complete_text_is_complete(kernel: str) -> None:
    assert kernels.complete(kernel, SHIPPED[kernel]) == SHIPPED[kernel]


def test_lines_are_counted_in_the_edited_files() -> None:
    """One line more at the top of every file, and one less in the middle of one."""
    marked = re.sub(r'(#line 1 "kernels/[\w.]+"\n)', r"\1// new\n", SHIPPED[ROWS])
    lost = "template <int FIRST, int LAST, int COUNT>\n"
    text = kernels.complete(ROWS, marked.replace(lost, ""))
    before, after = kernels.lines_of(SHIPPED[ROWS]), kernels.lines_of(text)
    assert {file for file, _ in before} == {file for file, _ in after}
    (place_lost,) = (number for (_, number), line in before.items() if f"{line}\n" == lost)
    for (file, number), line in before.items():
        here = file == "kernels/reduce.cuh" and number >= place_lost
        if not (here and number == place_lost):
            assert after[file, number + (0 if here else 1)] == line


def test_a_whole_new_text_includes_shipped_files() -> None:
    experiment = cunorm.experiment(SUMS)
    own = SHIPPED[SUMS][SHIPPED[SUMS].index("struct Arguments") :]
    experiment.source = f'#include "types.cuh"\n# include "dependent_launch.cuh"  // for nothing\n{own}'
    lines = kernels.lines_of(experiment.source)
    assert lines["kernels/column_sums.cu", 3] == "struct Arguments {"
    assert lines["kernels/types.cuh", 1].startswith("// How numbers are held")
    assert experiment.source.count('#line 1 "kernels/types.cuh"') == 1


def test_a_text_may_begin_at_another_line() -> None:
    """As the cell of a notebook does, whose first line is not the text's."""
    experiment = cunorm.experiment(SUMS)
    own = SHIPPED[SUMS][SHIPPED[SUMS].index("struct Arguments") :]
    experiment.source = f'#line 2 "kernels/column_sums.cu"\n#include "types.cuh"\n{own}'
    assert kernels.lines_of(experiment.source)["kernels/column_sums.cu", 3] == "struct Arguments {"


def test_what_changed() -> None:
    experiment = edited(
        ROWS, (PUT, PUT.replace("rstd", "2 * rstd")), ("#pragma unroll\n  for (int offset", "  for (int offset")
    )
    assert (
        experiment.changed.splitlines()
        == [
            "kernels/row_block_forward.cu",
            f"-        put(y, part, place, i, {PUT});",
            f"+        put(y, part, place, i, {PUT.replace('rstd', '2 * rstd')});",
            "kernels/reduce.cuh",
            "-#pragma unroll",
        ]
        or experiment.changed.splitlines()[0] == "kernels/reduce.cuh"
    )
    assert repr(experiment) == "<experiment with row_block_forward: 3 lines differ>"
    experiment.source = SHIPPED[ROWS]
    assert experiment.changed == "" and "as shipped" in repr(experiment)


# ---- The table of calls.


@pytest.mark.parametrize("device", [None, Device()], ids=["emulator", "H200"])
@pytest.mark.parametrize("kernel", sorted(SHIPPED))
def test_every_kernel_has_calls(kernel: str, device: Device | None) -> None:
    chosen = examples.of_kernel(kernel, device, 8)
    assert len(chosen) >= (4 if device is None else 2)
    assert all(item.launches(kernel) for item in chosen)
    assert len({item.example.dtype for item in chosen}) >= 2


def test_calls_are_various() -> None:
    chosen = [item.example for item in examples.of_kernel(ROWS, None, 8)]
    assert {item.dtype for item in chosen} >= {"float16", "bfloat16", "float32", "float64"}
    assert any(item.residual for item in chosen) and any(item.activation for item in chosen)
    assert any(item.weight is None for item in chosen) and any(item.layout == "odd" for item in chosen)


@pytest.mark.parametrize("name", ["y", "residual_out", "mean", "rstd", "running_mean", "dx", "dweight", "dbias"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limits_let_roundings_pass_and_nothing_else(name: str, dtype: str) -> None:
    """The reference itself, in the dtype of the call, is within them; with one number off by a little it is not."""
    backward, running = name.startswith("d"), name.startswith("running")
    example = examples.Example("layer_norm", (7, 300), dtype, backward, residual=True)
    if running:
        example = examples.Example("batch_norm", (5, 4, 9), dtype, running=True)
    given = example.draw()
    expected = example.expected(given)[name]
    stored = example.tensors(given).results[name]
    limit = np.broadcast_to(example.limits(name, given, expected, stored.dtype.name), expected.shape)
    rounded = expected.astype(stored.dtype)
    assert (np.abs(rounded.astype(np.float64) - expected) <= limit).all()
    assert limit.max() <= (0.02 if dtype == "bfloat16" else 1e-4) * np.abs(expected).max()


# ---- What check finds.


@needs_emulator
def test_a_good_edit() -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd")))
    report = experiment.check(shapes=[(33, 8)], dtypes=["float32"], on="emulator")
    assert report and report.passed and report.notes == []
    assert list(report.frame["verdict"]) == ["right", "right"]
    assert (report.frame["largest error"] <= report.frame["limit"]).all()
    assert str(report).startswith("row_block_forward: 2 of 2 calls right, on the emulator")


@needs_emulator
def test_the_shipped_text_is_named() -> None:
    report = cunorm.experiment(SUMS).check(shapes=[(33, 8)], dtypes=["float32"], on="emulator", seeds=1)
    assert report and report.notes == ["the text is the shipped one"]


@needs_emulator
def test_a_wrong_result_names_element_block_and_thread() -> None:
    wrong = PUT.replace("rstd", "rstd * (place.row == 70 ? 2 : 1)")
    experiment = edited(ROWS, (PUT, wrong))
    finding = found_in(experiment, (100, 8))
    # Two threads a row, 64 rows a block; and where they go on, the next of them.
    match = re.search(
        r"y\[70, 0\] is (\S+), must be (\S+); written by block (\(.*?\)), thread (\(.*?\)) of row_b", finding
    )
    assert match and float(match[1]) != float(match[2])
    (item, *_) = examples.launching(ROWS, examples.of_shapes([(100, 8)], ["float32"]), None)
    (launched,) = item.launches(ROWS)
    rows_per_block = launched.block[1]
    block, row = 70 // rows_per_block % launched.grid, 70 % rows_per_block
    assert (match[3], match[4]) == (f"({block}, 0, 0)", f"(0, {row}, 0)")


@needs_emulator
def test_an_element_that_nobody_wrote() -> None:
    store = "      arguments.rstd[place.row] = rstd;"
    finding = found_in(edited(ROWS, (store, f"      if (place.row != 3)\n{store}")), (33, 8))
    assert "rstd[3] is nan, must be" in finding and finding.endswith("; nobody wrote it")


@needs_emulator
def test_a_missing_barrier_is_a_race() -> None:
    """In a header: the warps of a block add up what others have not left yet."""
    old = (
        "= values[i];\n    }\n    __syncthreads();\n#pragma unroll\n    for (int i = 0; i < COUNT; ++i) {\n      values"
    )
    experiment = edited(ROWS, (old, old.replace("__syncthreads();", "")))
    report = experiment.check(shapes=[(3, 4096)], dtypes=["float32"], on="emulator")
    assert "race" in set(report.frame["verdict"]), report
    assert any("the result depends on the order of the threads" in note for note in report.notes), report
    assert any("shared memory and scratch hold NaNs where nobody has written yet" in note for note in report.notes)


@needs_emulator
def test_results_that_are_right_but_not_always_the_same() -> None:
    experiment = edited(
        ROWS,
        ("struct Arguments {", "static int turns = 0;\n\nstruct Arguments {"),
        ("= statistics.mean + statistics.remainder;", "= statistics.mean + 1e-7f * (turns++ % 2);"),
    )
    report = experiment.check(shapes=[(33, 8)], dtypes=["float32"], on="emulator")
    assert "race" in set(report.frame["verdict"])
    assert re.search(r"mean\[\d+\] differs between two orders of the threads; written by block", str(report))


@needs_emulator
def test_an_access_out_of_bounds_is_shown_at_its_line() -> None:
    experiment = edited(
        ROWS,
        ("struct Arguments {", "// one line more\n\nstruct Arguments {"),
        ("arguments.rstd[place.row] = rstd;", "arguments.rstd[place.row + 1] = rstd;"),
    )
    lines = SHIPPED[ROWS].split("arguments.rstd[place.row] = rstd;")[0]
    number = list(kernels.lines_of(lines))[-1][1] + 2
    finding = found_in(experiment, (33, 8))
    assert (
        "heap-buffer-overflow, WRITE of size 4, byte 132 of rstd (132 bytes), block (0, 0, 0), thread (0, 32" in finding
    )
    assert finding.endswith(
        f"kernels/row_block_forward.cu:{number}\n{number:6} |       arguments.rstd[place.row + 1] = rstd;"
    )


@needs_emulator
def test_an_access_out_of_bounds_in_a_header() -> None:
    old = "row_scratch[i * WARPS + threadIdx.x / 32] = values[i];"
    experiment = edited(ROWS, (old, old.replace("/ 32]", "/ 32 + 64]")))
    finding = found_in(experiment, (2, 4096))
    assert "scratch' __shared__ memory" in finding
    assert re.search(r"kernels/reduce\.cuh:(\d+)\n +\1 \|       .*/ 32 \+ 64\] = values\[i\];$", finding)


@needs_emulator
def test_a_loop_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_TIMEOUT", 0.5)
    begin = "extern __shared__ __align__(16) X_TYPE staged[];"
    finding = found_in(edited(ROWS, (begin, f"while (true) __nanosleep(1);\n  {begin}")), (33, 8))
    assert "still running after 0.5 s, block (0, 0, 0), thread (" in finding


@needs_emulator
def test_inputs_that_are_written_are_found() -> None:
    experiment = edited(
        ROWS,
        (
            "long long first_row = static_cast",
            "const_cast<X_TYPE*>(arguments.x)[0] = 1;\n  long long first_row = static_cast",
        ),
    )
    assert "wrote to x, which is read-only" in found_in(experiment, (33, 8))


@needs_emulator
@pytest.mark.parametrize("compiler", ["NVRTC", "g++"])
def test_a_compile_error_is_shown_at_the_line_of_the_edited_file(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "g++":
        monkeypatch.setattr(launch, "cupy", no_cupy)
    elif importlib.util.find_spec("cupy") is None:
        pytest.fail("needs CuPy")
    sums = "    constexpr int WARPS = THREADS_PER_ROW_ / 32;\n"
    experiment = edited(
        ROWS,
        ("// Adds over the lanes of a warp", "// Three\n// lines\n// more.\n// Adds over the lanes of a warp"),
        (sums, f"{sums}    nonsense(WARPS);\n"),
    )
    number = 1 + next(n for (file, n), line in kernels.lines_of(SHIPPED[ROWS]).items() if f"{line}\n" == sums) + 3
    with pytest.raises(CompileError) as raised:
        experiment.check(shapes=[(33, 8)], dtypes=["float32"], on="emulator")
    error = raised.value
    assert isinstance(error, RuntimeError)
    shown = f"kernels/reduce.cuh:{number}: error: "
    excerpt = f"{number:6} |     nonsense(WARPS);\n       |     ^"
    assert shown in str(error) and excerpt in str(error), str(error)
    assert (error.findings[0].file, error.findings[0].line, error.findings[0].column) == (
        "kernels/reduce.cuh",
        number,
        5,
    )
    assert "X_TYPE=float" in str(error) and "nonsense" in error.log


def no_cupy() -> Any:
    raise RuntimeError("no CuPy here")


def test_compile_errors_are_shown_in_part() -> None:
    log = "".join(f"kernels/a.cu({number}): error: wrong\n  line {number}\n    ^\n\n" for number in range(1, 9))
    text = '#line 1 "kernels/a.cu"\n' + "".join(f"line {number}\n" for number in range(1, 9))
    error = CompileError("a does not compile", log, text, {"N": 3})
    assert len(error.findings) == 8
    assert str(error).splitlines()[:4] == [
        "a does not compile:",
        "kernels/a.cu:1: error: wrong",
        "     1 | line 1",
        "       |   ^",
    ]
    assert str(error).splitlines()[-2:] == ["and 3 more", "with N=3"]
    assert str(CompileError("a fails", "no lines", text, {})) == "a fails:\nno lines\nwith "


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on": "tpu"}, ValueError, "on is 'tpu'; it must be"),
        ({"seeds": 0}, ValueError, "seeds is 0; it must be at least 1"),
        ({"shapes": (4, 8), "on": "emulator"}, TypeError, r"shapes is \(4, 8\); it must be a sequence of shapes"),
        ({"dtypes": ["int8"]}, TypeError, "dtypes has 'int8'; it must be of float16"),
        ({"shapes": [(0,)], "on": "emulator"}, ValueError, "no call of these shapes and dtypes launches row_block"),
    ],
)
def test_checks_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cunorm.experiment(ROWS).check(**options)


def test_a_check_where_there_is_nothing_to_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cupy", no_cupy)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"takes an NVIDIA GPU, or Linux and g\+\+"):
        cunorm.experiment(ROWS).check()
    with pytest.raises(RuntimeError, match="on is 'gpu', and there is no"):
        cunorm.experiment(ROWS).check(on="gpu")


# ---- Tables.


def test_tables() -> None:
    table = Table("a <b>", ("name", "number"), [("x", 1.23456), ("<y>", None)], ["note"], bad=[1])
    assert not table and str(table).splitlines() == ["a <b>", "name  number", "x       1.23", "<y>", "note"]
    shown = table._repr_html_()
    assert "a &lt;b&gt;" in shown and "&lt;y&gt;" in shown and "<pre" in shown
    assert table.frame.shape == (2, 2) and list(table.frame.columns) == ["name", "number"]
    assert Table("fine", ("a",), [("b",)])


# ---- What a text takes.


def test_resources_side_by_side() -> None:
    experiment = edited(
        ROWS,
        (
            "__shared__ Exchange<3> exchange;",
            "__shared__ Exchange<3> exchange;\n  __shared__ volatile int more[999];\n  more[threadIdx.x] = clock();",
        ),
    )
    frame = experiment.resources("sm_80", shape=(64, 4096), dtype="float32").frame
    assert list(frame["text"]) == ["shipped", "edited"] * (len(frame) // 2)
    shipped, text = (frame[frame["text"] == name] for name in ("shipped", "edited"))
    assert (text["static shared"].to_numpy() >= shipped["static shared"].to_numpy() + 3996).all()
    assert (frame["registers"] > 0).all() and (frame["blocks per multiprocessor"] >= 1).all()


def test_resources_of_the_shipped_text() -> None:
    report = cunorm.experiment("row_split_merge").resources()
    assert set(report.frame["text"]) == {"shipped"} and "on sm_90" in report.headline
    with pytest.raises(ValueError, match="arch is 'hopper'"):
        cunorm.experiment(ROWS).resources("hopper")
    with pytest.raises(ValueError, match=r"shape is \(4, 8\): no call of it launches row_grid_forward on sm_90"):
        cunorm.experiment("row_grid_forward").resources(shape=(4, 8))


def test_resources_of_an_edited_text_are_not_those_of_the_shipped() -> None:
    (item,) = plan_of(64, 4096).launches
    experiment = edited(ROWS, ("double eps;", "double eps;  // another text"), (PUT, PUT.replace("rstd", "rstd / 3")))
    before = resources.compile_resources(ROWS, dict(item.constants), "sm_90")
    with experiment.active():
        resources.compile_resources(ROWS, dict(item.constants), "sm_90")
    assert resources.compile_resources(ROWS, dict(item.constants), "sm_90") == before
    assert resources.compile_resources(ROWS, dict(item.constants), "sm_90", {ROWS: experiment.source})


def plan_of(*shape: int) -> Plan:
    example = examples.Example("layer_norm", shape)
    return plan(example.described(example.draw(blank=True)).problem, Device())


# ---- While an experiment is active.


def test_every_text_that_is_asked_for_is_the_active_one() -> None:
    experiment = edited(SUMS, ("double sum = 0;", "double sum = 1;"))
    assert "double sum = 1;" not in kernels.kernel_source(SUMS, {})
    with experiment.active() as same:
        assert same is experiment
        assert kernels.kernel_source(SUMS, {"A": 1}) == "#define A 1\n" + experiment.source
        assert kernels.kernel_text(ROWS) == SHIPPED[ROWS]
        assert kernels.kernel_text(SUMS, {}) == SHIPPED[SUMS]
    assert kernels.kernel_text(SUMS) == SHIPPED[SUMS]


def test_an_exception_leaves_it() -> None:
    with pytest.raises(KeyError), edited(SUMS, ("double sum = 0;", "double sum = 1;")).active():
        raise KeyError
    assert kernels.replaced == {}


def test_it_is_left_in_another_thread() -> None:
    active = edited(SUMS, ("double sum = 0;", "double sum = 1;")).active()
    active.__enter__()
    seen = []
    thread = threading.Thread(
        target=lambda: (seen.append(kernels.kernel_text(SUMS)), active.__exit__(None, None, None))
    )
    thread.start()
    thread.join()
    assert "double sum = 1;" in seen[0] and kernels.replaced == {}


def test_two_experiments_with_two_kernels() -> None:
    sums, rows = edited(SUMS, ("double sum = 0;", "double sum = 1;")), edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    with sums.active():
        with rows.active():
            assert kernels.replaced == {SUMS: sums.source, ROWS: rows.source}
        assert kernels.replaced == {SUMS: sums.source}


@pytest.mark.parametrize("first_left", [0, 1])
def test_two_experiments_with_one_kernel(first_left: int) -> None:
    """The one entered last runs; each removes only itself, even where their texts are equal."""
    experiments = [edited(SUMS, ("double sum = 0;", f"double sum = {value};")) for value in (1, 2)]
    entered = [experiment.active() for experiment in experiments]
    for active in entered:
        active.__enter__()
    assert kernels.replaced == {SUMS: experiments[1].source}
    entered[first_left].__exit__(None, None, None)
    assert kernels.replaced == {SUMS: experiments[1 - first_left].source}
    entered[1 - first_left].__exit__(None, None, None)
    assert kernels.replaced == {}
    with experiments[0].active():
        with experiments[0].active():
            pass
        assert kernels.replaced == {SUMS: experiments[0].source}


def test_the_text_of_entering_counts() -> None:
    experiment = edited(SUMS, ("double sum = 0;", "double sum = 1;"))
    with experiment.active():
        experiment.source = experiment.source.replace("sum = 1;", "sum = 2;")
        assert "double sum = 1;" in kernels.kernel_text(SUMS)
    with experiment.active():
        assert "double sum = 2;" in kernels.kernel_text(SUMS)


class FakeCupy:
    """Compiles everything, and writes down the texts; a function is what it was compiled of."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        device = lambda index: contextlib.nullcontext()  # noqa: E731
        driver = SimpleNamespace(ctxGetCurrent=lambda: 1, launchKernel=None, launchCooperativeKernel=None)
        runtime = SimpleNamespace(driverGetVersion=lambda: 12030)
        compiler = SimpleNamespace(CompileException=ArithmeticError)
        self.cuda = SimpleNamespace(Device=device, driver=driver, runtime=runtime, compiler=compiler)

    def RawModule(self, code: str, options: Any) -> Any:
        self.compiled.append(code)
        kernel = SimpleNamespace(code=code, ptr=1)
        function = SimpleNamespace(shared_size_bytes=0, max_dynamic_shared_size_bytes=0, kernel=kernel)
        return SimpleNamespace(get_function=lambda name: function)


@pytest.fixture
def fake_cupy(cache_folder: Any, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(launch, "cupy", lambda: fake)
    monkeypatch.setattr(launch, "device", lambda index: Device())
    monkeypatch.setattr(launch, "gpu_name", lambda index: "a GPU of this test")
    monkeypatch.setattr(launch, "_functions", {})
    return fake


def texts_of(call: launch.Call) -> list[str]:
    return [function.code for _, _, function, *_ in call._launches]


def test_calls_are_compiled_of_the_text_of_the_moment(fake_cupy: FakeCupy) -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    before = prepare(64, 4096)
    assert prepare(64, 4096) is before
    with experiment.active():
        during = prepare(64, 4096)
        assert prepare(64, 4096) is during
    after = prepare(64, 4096)
    assert len(fake_cupy.compiled) == 2, "the shipped function is the one from before"
    assert [experiment.source in text for call in (before, during, after) for text in texts_of(call.run)] == [
        False,
        True,
        False,
    ]
    assert not any(experiment.source in str(key) for key in launch._functions)


def test_a_call_that_is_being_prepared_meanwhile_is_not_kept(
    fake_cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with the shipped text, and is done while another is active: it may run, but not come again."""
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    compiling, entered = threading.Event(), threading.Event()
    made = fake_cupy.RawModule

    def slowly(code: str, options: Any) -> Any:
        if experiment.source not in code:
            compiling.set()
            assert entered.wait(10)
        return made(code, options)

    monkeypatch.setattr(fake_cupy, "RawModule", slowly)
    begun: list[Any] = []
    thread = threading.Thread(target=lambda: begun.append(prepare(32, 4096)))
    thread.start()
    assert compiling.wait(10)
    with experiment.active():
        entered.set()
        thread.join()
        assert experiment.source not in texts_of(begun[0].run)[0]
        assert experiment.source in texts_of(prepare(32, 4096).run)[0]


def test_all_launches_of_a_call_have_the_texts_of_one_moment(
    fake_cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others become active after the first of several launches is compiled."""
    chosen = examples.of_kernel("row_split_merge", Device(), 1)[0].plan
    names = [item.kernel for item in chosen.launches]
    assert len(set(names)) == len(names) > 2
    experiment = edited(names[-1], ("struct Arguments {", "// edited\nstruct Arguments {"))
    made = fake_cupy.RawModule

    with contextlib.ExitStack() as stack:

        def entering(code: str, options: Any) -> Any:
            if not kernels.replaced:
                stack.enter_context(experiment.active())
            return made(code, options)

        monkeypatch.setattr(fake_cupy, "RawModule", entering)
        operands = ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")
        call = launch.Call(chosen, operands, 0)
        assert kernels.replaced
    assert not any("// edited" in text for text in texts_of(call))


def test_remembered_calls_are_those_of_their_generation() -> None:
    generation = execute.generation
    execute.forget_prepared()
    execute._remember("of another test", None, generation)  # type: ignore[arg-type]
    assert "of another test" not in execute._calls


def test_tuning_waits_for_experiments_to_end() -> None:
    with (
        edited(ROWS, (PUT, PUT.replace("rstd", "0"))).active(),
        pytest.raises(RuntimeError, match="an experiment with row_block_forward is active"),
    ):
        cunorm.tune("layer_norm", (8, 64))


def test_jax_compiles_again() -> None:
    import jax
    import jax.numpy as jnp

    traced = []

    @jax.jit
    def norm(x: Any) -> Any:
        traced.append(kernels.kernel_text(ROWS))
        return cunorm.layer_norm(x)

    x = jnp.ones((2, 8))
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "0")))
    norm(x)
    norm(x)
    with experiment.active():
        norm(x)
    norm(x)
    assert [text == experiment.source for text in traced] == [False, True, False]


# ---- A GPU that is the emulator: what runs there, but for the driver.


class Memory(np.ndarray[Any, Any]):
    """NumPy's memory, with what is asked of CuPy's."""

    @property
    def data(self) -> Any:
        def fill(value: int, nbytes: int) -> None:
            self.reshape(-1).view(np.uint8)[:nbytes] = value

        pointer = self.__array_interface__["data"][0]
        return SimpleNamespace(ptr=pointer, memset_async=fill, copy_from_device_async=lambda source, nbytes: None)

    def get(self) -> Any:
        return np.asarray(self)


class EmulatedGpu:
    """Stands in for the cupy module and the launches: a call runs on the emulator, and takes 10 µs, or 20 if edited."""

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self.now = 0.0
        event = type("Event", (), {"record": lambda event: setattr(event, "time", self.now)})
        stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            Device=lambda index: EmulatedDevice(),
            Event=event,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda begin, end: end.time - begin.time + 0.005,
            runtime=SimpleNamespace(getDevice=lambda: 0, deviceSynchronize=lambda: None, CUDARuntimeError=OSError),
        )

    def empty(self, shape: Any, dtype: str) -> Any:
        return self.asarray(np.empty(shape, dtype))

    def asarray(self, values: Any) -> Any:
        kept = np.array(values).view(Memory)
        self.arrays[kept.data.ptr] = np.asarray(kept)
        return kept

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)

    def call(self, chosen: Plan, operands: Sequence[str], device_index: int, texts: Any = None) -> Callable[..., None]:
        from cunorm.emulator.plans import run_plan

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            given = {name: self.arrays.get(pointer) for name, pointer in zip(operands, pointers)}
            run_plan(chosen, given, texts=texts)
            self.now += 0.02 if texts else 0.01

        return run


class EmulatedDevice(contextlib.nullcontext[None]):
    attributes = {"L2CacheSize": 1000}  # noqa: RUF012


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    fake = EmulatedGpu()
    monkeypatch.setattr("cunorm.gpus._LEAST_FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr(bench, "_WARM", 1)
    monkeypatch.setattr(bench, "_ROUNDS", 2)
    monkeypatch.setattr(bench, "_SAMPLES", 1)
    monkeypatch.setattr(launch, "cupy", lambda: fake)
    monkeypatch.setattr(launch, "Call", fake.call)
    monkeypatch.setattr(launch, "device", lambda index: SMALL_DEVICE)
    monkeypatch.setattr(launch, "gpu_name", lambda index: "a GPU of this test")
    return fake


@needs_emulator
def test_a_bench(emulated_gpu: EmulatedGpu) -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd")))
    report = experiment.bench([(16, 64), (33, 8)], "float32")
    frame = report.frame
    assert (
        list(frame["text"]) == ["shipped", "edited", "copy"] * 2
        and list(frame["shape"]) == ["16x64"] * 3 + ["33x8"] * 3
    )
    assert set(frame["call"]) == {"layer_norm"}
    assert list(frame["microseconds"][:3]) == pytest.approx([15, 25, 5]) and list(frame["r"][:3]) == pytest.approx(
        [3, 5, 1]
    )
    assert frame["GB/s"][0] == pytest.approx(2 * 16 * 64 * 4 / 15e-6 * 1e-9)
    assert frame["error"][1] < 1e-6 and report.passed
    figure = report.plot()
    rate, ratio = figure.axes
    assert "GB/s" in rate.get_ylabel() and "time of a copy" in ratio.get_ylabel() and ratio.get_xlabel()
    assert [line.get_label() for line in rate.lines] == ["edited", "shipped", "copy"]
    assert [tick.get_text() for tick in ratio.get_xticklabels()] == ["16×64", "33×8"]


@needs_emulator
def test_a_wrong_text_is_not_timed(emulated_gpu: EmulatedGpu) -> None:
    report = edited(ROWS, (PUT, PUT.replace("rstd", "rstd * 1.01f"))).bench([(16, 64)], "float32", op="rms_norm")
    assert not report and set(report.frame["call"]) == {"rms_norm"}
    row = report.frame.iloc[1]
    assert (
        row["verdict"] == "wrong" and math.isnan(row["microseconds"]) and row["error"] == pytest.approx(0.007, rel=0.5)
    )
    report.plot()


@needs_emulator
def test_a_bench_of_one_of_several_launches(emulated_gpu: EmulatedGpu) -> None:
    report = cunorm.experiment(SUMS).bench([(100, 64)], "float32")
    assert set(report.frame["call"]) == {"layer_norm_backward"}
    assert report.notes == [
        "the edited text is the shipped one",
        "column_sums is one of several launches of a call, and all of the call is timed.",
    ]


def test_benches_that_cannot_be(emulated_gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = cunorm.experiment(ROWS)
    with pytest.raises(
        ValueError, match=r"shapes has \(8, 8\): no call of gelu on bfloat16 launches row_block_forward"
    ):
        experiment.bench([(8, 8)], op="gelu")
    with pytest.raises(TypeError, match="dtype has 'int8'"):
        experiment.bench([(8, 8)], "int8")
    monkeypatch.setattr(launch, "cupy", no_cupy)
    with pytest.raises(RuntimeError, match="no CuPy"):
        experiment.bench([(8, 8)])


@needs_emulator
def test_a_check_on_a_gpu(emulated_gpu: EmulatedGpu) -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd")))
    options: dict[str, Any] = {"shapes": [(33, 8)], "dtypes": ["float32"]}
    report = experiment.check(**options)
    assert report and report.headline == "row_block_forward: 2 of 2 calls right, on a GPU of this test"
    wrong = edited(ROWS, (PUT, PUT.replace("rstd", "rstd * (place.row == 5 ? 2 : 1)"))).check(**options)
    assert re.search(r"y\[5, 0\] is .*; written by block \(0, 0, 0\), thread \(0, 5, 0\) of row_block", wrong.notes[0])


# ---- On a GPU.


WRONG = (PUT, PUT.replace("rstd", "3 * rstd"))


@pytest.mark.gpu
def test_check_on_the_gpu() -> None:
    assert cunorm.experiment(ROWS).check()
    report = edited(ROWS, WRONG).check(shapes=[(33, 8), (1000, 4096)])
    assert not report and set(report.frame["verdict"]) == {"wrong"}
    assert "must be" in report.notes[0] and "written by block (0, 0, 0), thread (0, 0, 0)" in report.notes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", sorted(SHIPPED))
def test_every_kernel_on_the_gpu(kernel: str) -> None:
    report = cunorm.experiment(kernel).check()
    assert report, report


@pytest.mark.gpu
def test_bench_on_the_gpu() -> None:
    frame = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd"))).bench([(4096, 4096), (8192, 8192)]).frame
    assert (frame["microseconds"] > 0).all() and (frame["GB/s"] > 100).all()
    assert frame["error"][1] == 0.0 or frame["error"][1] < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"),
    [
        ("channel_slab_forward", (8, 64, 64, 64), "bfloat16"),
        ("channel_grid_backward", (8, 64, 64, 512), "float16"),
        ("pointwise_backward", (4096, 4096), "float16"),
        (SUMS, (4096, 4096), "bfloat16"),
    ],
)
def test_bench_of_other_families_on_the_gpu(kernel: str, shape: tuple[int, ...], dtype: str) -> None:
    assert cunorm.experiment(kernel).bench([shape], dtype)


@pytest.mark.gpu
def test_cupy_runs_the_active_text() -> None:
    import cupy

    x = cupy.asarray(data(0, (64, 256)))
    before = cupy.asnumpy(cunorm.layer_norm(x))
    with edited(ROWS, WRONG).active():
        during = cupy.asnumpy(cunorm.layer_norm(x))
    after = cupy.asnumpy(cunorm.layer_norm(x))
    assert before.tobytes() == after.tobytes()
    np.testing.assert_allclose(during, 3 * before, rtol=1e-5)


@pytest.mark.gpu
def test_torch_runs_the_active_text_in_both_directions() -> None:
    """Backward in the thread of PyTorch's own."""
    import torch

    def run() -> tuple[Any, Any]:
        x = torch.from_numpy(data(0, (64, 256))).cuda().requires_grad_()
        y = cunorm.layer_norm(x)
        y.backward(torch.ones_like(y) * torch.arange(256, device="cuda"))
        return y.detach().cpu().numpy(), x.grad.cpu().numpy()

    dx = "results[j] = dx_of("
    experiment = edited("row_block_backward", (dx, dx.replace("= ", "= 3 * ")))
    before = run()
    with edited(ROWS, WRONG).active(), experiment.active():
        during = run()
    after = run()
    assert [array.tobytes() for array in before] == [array.tobytes() for array in after]
    for first, second in zip(before, during):
        np.testing.assert_allclose(second, 3 * first, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_jax_runs_the_active_text() -> None:
    """Also a function that was compiled before, and after that the shipped text again."""
    import jax
    import jax.numpy as jnp

    norm = jax.jit(lambda x: cunorm.layer_norm(x))
    x = jnp.asarray(data(0, (64, 256)))
    before = np.asarray(norm(x))
    with edited(ROWS, WRONG).active():
        during = np.asarray(norm(x))
    after = np.asarray(norm(x))
    assert before.tobytes() == after.tobytes()
    np.testing.assert_allclose(during, 3 * before, rtol=1e-5)


@pytest.mark.gpu
def test_a_text_that_does_not_compile_says_so_at_the_call() -> None:
    import cupy

    x = cupy.asarray(data(0, (64, 256)))
    experiment = edited(ROWS, (PUT, f"nonsense({PUT})"))
    with (
        experiment.active(),
        pytest.raises(CompileError, match=r"kernels/row_block_forward\.cu:\d+: error: .*nonsense"),
    ):
        cunorm.layer_norm(x)
    assert np.isfinite(cupy.asnumpy(cunorm.layer_norm(x))).all()
