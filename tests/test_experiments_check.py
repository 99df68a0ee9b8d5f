"""What the ``check`` of an experiment finds in an edited text, on the emulator and on a GPU."""

from __future__ import annotations

import importlib.util
import pickle
import re
import shutil
import time
from typing import Any

import numpy as np
import pytest
from emulator_cases import NEEDS_COMPILER
from experiment_cases import PUT, ROWS, SHIPPED, SUMS, WRONG, edited, no_cupy

import cunorm
from cunorm import cuda, kernels
from cunorm.compile_error import CompileError
from cunorm.experiments import check, examples
from cunorm.plan import Device

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def found_in(experiment: Any, shape: tuple[int, ...]) -> str:
    """What the report says of the first call of a shape, which must not be right."""
    report = experiment.check(shapes=[shape], dtypes=["float32"], on="emulator")
    assert not report and not report.passed
    assert len(report.frame) == len(report.rows) >= 1
    return str(report.notes[0])


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


@NEEDS_COMPILER
def test_a_good_edit() -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd")))
    report = experiment.check(shapes=[(33, 8)], dtypes=["float32"], on="emulator")
    assert report and report.passed and report.notes == []
    assert list(report.frame["verdict"]) == ["right", "right"]
    assert (report.frame["largest error"] <= report.frame["limit"]).all()
    assert str(report).startswith("row_block_forward: 2 of 2 calls right, on the emulator")


@NEEDS_COMPILER
def test_the_shipped_text_is_named() -> None:
    report = cunorm.experiment(SUMS).check(shapes=[(33, 8)], dtypes=["float32"], on="emulator", seeds=1)
    assert report and report.notes == ["the text is the shipped one"]


@NEEDS_COMPILER
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


@NEEDS_COMPILER
def test_an_element_that_nobody_wrote() -> None:
    store = "      arguments.rstd[place.row] = rstd;"
    finding = found_in(edited(ROWS, (store, f"      if (place.row != 3)\n{store}")), (33, 8))
    assert "rstd[3] is nan, must be" in finding and finding.endswith("; nobody wrote it")


@NEEDS_COMPILER
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


@NEEDS_COMPILER
def test_results_that_are_right_but_not_always_the_same() -> None:
    experiment = edited(
        ROWS,
        ("struct Arguments {", "static int turns = 0;\n\nstruct Arguments {"),
        ("= statistics.mean + statistics.remainder;", "= statistics.mean + 1e-7f * (turns++ % 2);"),
    )
    report = experiment.check(shapes=[(33, 8)], dtypes=["float32"], on="emulator")
    assert "race" in set(report.frame["verdict"])
    assert re.search(r"mean\[\d+\] differs between two orders of the threads; written by block", str(report))


@NEEDS_COMPILER
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
        "heap-buffer-overflow, WRITE of size 4, byte 132 of rstd (132 bytes), block (1, 0, 0), thread (0, 0" in finding
    )
    assert finding.endswith(
        f"kernels/row_block_forward.cu:{number}\n{number:6} |       arguments.rstd[place.row + 1] = rstd;"
    )


@NEEDS_COMPILER
def test_an_access_out_of_bounds_in_a_header() -> None:
    old = "row_scratch[i * WARPS + threadIdx.x / 32] = values[i];"
    experiment = edited(ROWS, (old, old.replace("/ 32]", "/ 32 + 64]")))
    finding = found_in(experiment, (2, 4096))
    assert "scratch' __shared__ memory" in finding
    assert re.search(r"kernels/reduce\.cuh:(\d+)\n +\1 \|       .*/ 32 \+ 64\] = values\[i\];$", finding)


@NEEDS_COMPILER
def test_a_loop_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_TIMEOUT", 0.5)
    begin = "extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];"
    finding = found_in(edited(ROWS, (begin, f"while (true) __nanosleep(1);\n  {begin}")), (3, 8))
    assert "still running after 0.5 s, block (0, 0, 0), thread (" in finding


@NEEDS_COMPILER
def test_inputs_that_are_written_are_found() -> None:
    experiment = edited(
        ROWS,
        (
            "long long first_row = static_cast",
            "const_cast<X_TYPE*>(arguments.x)[0] = 1;\n  long long first_row = static_cast",
        ),
    )
    assert "wrote to x, which is read-only" in found_in(experiment, (33, 8))


@NEEDS_COMPILER
@pytest.mark.parametrize("compiler", ["NVRTC", "g++"])
def test_a_compile_error_is_shown_at_the_line_of_the_edited_file(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "g++":
        monkeypatch.setattr(cuda, "cupy", no_cupy)
    elif importlib.util.find_spec("cupy") is None:
        pytest.fail("needs CuPy")
    sums = "    constexpr int WARPS = THREADS_PER_ROW_ / 32;\n"
    experiment = edited(
        ROWS,
        ("// A butterfly over the bits", "// Three\n// lines\n// more.\n// A butterfly over the bits"),
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
    again = pickle.loads(pickle.dumps(error))  # as a pool of processes does
    assert str(again) == str(error) and again.findings == error.findings and again.log == log


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on": "tpu"}, ValueError, "on is 'tpu'; it must be"),
        ({"seeds": 0}, ValueError, "seeds is 0; it must be at least 1"),
        ({"shapes": (4, 8), "on": "emulator"}, TypeError, r"shapes is \(4, 8\); it must be a sequence of shapes"),
        ({"shapes": [()], "on": "emulator"}, ValueError, r"shapes has \(\); a shape must have a dimension"),
        ({"shapes": [(4, -8)], "on": "emulator"}, ValueError, r"shapes has \(4, -8\); .* none may be negative"),
        ({"dtypes": ["int8"]}, TypeError, "dtypes has 'int8'; it must be of float16"),
        ({"dtypes": "float32"}, TypeError, r"dtypes is 'float32'; it must be a sequence .* such as \['float32'\]"),
        ({"shapes": [(0,)], "on": "emulator"}, ValueError, "no call of these shapes and dtypes launches row_block"),
    ],
)
def test_checks_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cunorm.experiment(ROWS).check(**options)


def test_shapes_that_not_every_op_has() -> None:
    """A batch norm of one value a channel is refused, a norm of its rows is not."""
    assert cunorm.experiment(ROWS).check(shapes=[(1, 1, 70)], dtypes=["float32"], on="emulator", seeds=1).passed
    with pytest.raises(ValueError, match="no call of these shapes and dtypes launches row_split_forward"):
        cunorm.experiment("row_split_forward").check(shapes=[(0, 5)], on="emulator")


def test_an_interrupted_check_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def interrupted(*call: Any) -> Any:
        begun.append(call)
        if len(begun) > 1:
            time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "_emulated", interrupted)
    chosen: Any = [None] * 50
    with pytest.raises(KeyboardInterrupt):
        check.check_on_emulator(ROWS, "", chosen, 1, [])
    assert len(begun) < 50


def test_a_check_where_there_is_nothing_to_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cupy", no_cupy)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"takes an NVIDIA GPU, or Linux and g\+\+"):
        cunorm.experiment(ROWS).check()
    with pytest.raises(RuntimeError, match="on is 'gpu', and there is no"):
        cunorm.experiment(ROWS).check(on="gpu")


# ---- On a GPU.


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
