"""``python -m cunorm``: tune, how output looks, and what commands say to arguments that cannot be used."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_cases import ROOT, refused, run
from rich.console import Console
from tuning_cases import GPU, FakeMachine, favourite, other_geometries, problem_of

from cunorm import cli, gpus
from cunorm.cli import output, tune
from cunorm.plan.row_bulk import RowBulk
from cunorm.tuning_file import TuningFile, key_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--bogus"], "unrecognized arguments: --bogus"),
        (["demo", "--framework", "mxnet"], "'mxnet' is none of numpy, cupy, torch, jax, tensorflow"),
        (["demo", "--output", "y.npy"], "--output needs --input"),
        (["demo", "--axis", "0"], "--axis needs --input"),
        (["demo", "--eps", "0"], "--eps needs --input"),
        (["demo", "--input", "x.npy", "--framework", "numpy"], "--framework goes without --input"),
        (["demo", "--input", "absent.npy"], "there is no such file"),
        (["demo", "--input", "int.npy"], "its dtype is int64; it must be float16, float32 or float64"),
        (["demo", "--input", "text.npy"], "demo: --input text.npy: it is no .npy file\n"),
        (["demo", "--input", "empty.npy"], "demo: --input empty.npy: it is no .npy file\n"),
        (["demo", "--input", "short.npy"], "no .npy file that can be read"),
        (["demo", "--input", "."], "no .npy file that can be read: [Errno 21] Is a directory"),
        (["demo", "--input", "objects.npy"], "it is an array of Python objects; it must be one of numbers\n"),
        (["demo", "--input", "archive.npz"], "an archive of arrays"),
        (["demo", "--input", "damaged.npz"], "no .npy file that can be read: File is not a zip file"),
        (["demo", "--input", "huge.npy"], "no .npy file that can be read"),
        (["demo", "--input", "scalar.npy"], "axis -1 is out of range"),
        (["demo", "--input", "x.npy", "--axis", "2"], "axis 2 is out of range"),
        (["demo", "--input", "x.npy", "--eps", "-1"], "eps must be finite and not negative"),
        (["demo", "--input", "x.npy", "--output", "absent/y.npy"], "does not exist"),
        (["demo", "--input", "x.npy", "--output", "."], "--output .: it is a folder"),
        (["demo", "--input", "x.npy", "--output", "x.npy"], "--output x.npy: it is the input, which would be lost"),
        (["explain"], "required: --shape"),
        (["explain", "--shape", "4096by8192"], "'4096by8192' is no shape"),
        (["explain", "--shape", "4x-1"], "'4x-1' is no shape"),
        (["explain", "--shape", ""], "'' is no shape"),
        (["explain", "--shape", "4x4", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["explain", "--shape", "4x4", "--op", "conv"], "invalid choice: 'conv'"),
        (["explain", "--shape", "4x4", "--op", "gelu", "--axis", "0"], "--axis is for layer_norm, rms_norm, not"),
        (["explain", "--shape", "4x4", "--op", "gelu", "--residual"], "--residual is for layer_norm, rms_norm"),
        (["explain", "--shape", "4x4", "--evaluation"], "--evaluation is for batch_norm, not for layer_norm"),
        (["tune", "--shape", "2x8x4", "--op", "group_norm"], "--op group_norm needs --num-groups"),
        (["tune", "--shape", "4x8", "--data-format", "NHWC"], "--data-format is for instance_norm, group_norm, batch"),
        (["explain", "--shape", "4x4", "--num-groups", "2"], "--num-groups is for group_norm, not for layer_norm"),
        (["explain", "--shape", "4x4", "--op", "group_norm"], "explain: --op group_norm needs --num-groups\n"),
        (["explain", "--shape", "4x4", "--op", "batch_norm", "--axis", "1"], "--axis is for layer_norm, rms_norm, not"),
        (["explain", "--shape", "4x4", "--measure"], "explain: --measure needs an NVIDIA GPU: none for this test\n"),
        (
            ["explain", "--shape", "4x4", "--op", "gelu", "--activation", "silu"],
            "--activation silu is not for gelu; it must be gelu or gelu_tanh",
        ),
        (["explain", "--shape", "4x4", "--arch", "sm_70"], "arch is 'sm_70'; it must be one of sm_75"),
        (["explain", "--shape", "4x4", "--axis", "2"], "axis 2 is out of range for x with 2 dimensions"),
        (
            ["explain", "--shape", "4x4", "--axis", "1", "-1"],
            "axis must name at least one axis and none twice",
        ),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_gpu: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # argparse breaks lines
    np.save("x.npy", np.zeros((2, 3), np.float32))
    np.save("int.npy", np.arange(3))
    np.save("scalar.npy", np.float32(3))
    np.savez("archive.npz", x=np.zeros(3))
    Path("damaged.npz").write_bytes(b"PK\x03\x04 and no more")
    with Path("huge.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (99_999_999_999, 9999)}
        )
    np.save("objects.npy", np.array([None]))
    Path("text.npy").write_text("no array")
    Path("empty.npy").touch()
    Path("short.npy").write_bytes(Path("x.npy").read_bytes()[:-1])
    assert message in refused(capsys, *arguments)


@pytest.mark.usefixtures("no_driver")
def test_commands_without_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "needs an NVIDIA GPU: no NVIDIA driver\n"
    assert refused(capsys, "demo", "--framework", "cupy").endswith(f"cupy: it cannot be used: CuPy {missing}")
    assert refused(capsys, "explain", "--shape", "4x8", "--measure").endswith(f"explain: --measure {missing}")
    assert refused(capsys, "tune", "--shape", "4x8").endswith(f"tune: it {missing}")


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cunorm.cli.info.run", interrupted)
    assert cli.run(["info"]) == 130
    assert capsys.readouterr().err == "python -m cunorm info: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "cunorm", "info"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "python -m cunorm info: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_tune(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([GPU], ""))
    problem = problem_of(4096, 8192)
    fake_machine.seconds = favourite(problem, other_geometries(problem)[5], 1.25)
    shapes = ("--shape", "4096x8192", "--shape", "64x1024", "--dtype", "bfloat16")
    text = run(capsys, "tune", *shapes, "--max-seconds", "30")
    first, second, last = text.splitlines()
    assert first.startswith("layer_norm 4096x8192 bfloat16 | forward | 10 µs | 8 µs | 25 % | ")
    assert "threads a row" in first
    assert second.startswith("layer_norm 64x1024 bfloat16 | forward | ")
    assert last == f"written: {cache_folder / 'tuning.json'}"
    assert len(TuningFile(cache_folder / "tuning.json").read()[GPU]) == 2

    options = ("--op", "rms_norm", "--affine-dtype", "float32", "--activation", "silu", "--residual", "--both")
    text = run(capsys, "tune", "--clear", *shapes, *options, "--file", str(cache_folder / "other.json"))
    assert text.splitlines()[0] == f"nothing to remove: there is no {cache_folder / 'other.json'}"
    assert text.splitlines()[-1].endswith("other.json, which is not the file that cunorm reads")
    wanted = {"op": "rms_norm", "weight": "float32", "activation": "silu", "residual": True}
    keys = {key_of(problem_of(64, 1024, direction=name, **wanted)) for name in ("forward", "backward")}
    stored = TuningFile(cache_folder / "other.json").read()[GPU]
    assert keys < set(stored) and len(stored) == 4

    path = cache_folder / "tuning.json"
    assert run(capsys, "tune", "--clear") == f"removed: {path}\n"
    assert not path.exists()
    path.write_text("someone else's")
    assert run(capsys, "tune", "--clear") == f"moved to {path}.old: {path}\n"


def test_rows_in_bulk_in_words() -> None:
    words = "32 threads a row, 9 vectors of 1 each, runs of 16 rows in bulk, 4 at once"
    assert tune.described(RowBulk(1, 9, 32, 4, 16, 12)) == words


def test_a_folder_is_not_cleared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    message = refused(capsys, "tune", "--clear", "--file", str(tmp_path / "results"))
    assert message.endswith(f"{tmp_path / 'results'} cannot be removed: it is a folder\n")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.usefixtures("cache_folder")
def test_tune_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([], "none for this test"))
    message = refused(capsys, "tune", "--shape", "4096x8192")
    assert message == "python -m cunorm tune: it needs an NVIDIA GPU: none for this test\n"


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a shape, such as --shape 4096x8192"),
        (["--shape", "0x5"], "--shape 0x5: shape is (0, 5)"),
        (["--shape", "4x5", "--max-seconds", "0"], "--max-seconds 0.0 must be positive"),
        (["--shape", "4x5", "--op", "gelu"], "op is 'gelu', for which there is one plan: there is nothing to tune"),
        (["--shape", "4x5", "--max-seconds", "nan"], "--max-seconds nan must be positive"),
        (["--shape", "4x5", "--file", "/proc/nothing/tuning.json"], "/proc/nothing/tuning.json cannot be written"),
    ],
)
def test_tune_with_arguments_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([GPU], ""))
    assert message in refused(capsys, "tune", *arguments)


def test_a_terminal_gets_rules_and_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(output, "console", lambda: Console(file=screen, force_terminal=True, width=60))
    output.line("title", "bold")
    output.table(("name", "count"), [("a", "1"), ("b", "22")], numbers=("count",))
    assert "\x1b[1mtitle" in screen.getvalue()
    assert "──" in screen.getvalue()


def test_progress_is_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with output.progress() as show:
        assert show is None
    screen = io.StringIO()
    monkeypatch.setattr(output, "console", lambda: Console(file=screen, force_terminal=True, width=80))
    with output.progress() as show:
        assert show
        show("trying", 3, 7)
    assert "3/7" in screen.getvalue() and "trying" in screen.getvalue()


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name", "count"), [("long name", "1"), ("b", "22")], numbers=("count",))
    assert capsys.readouterr().out == "name       count\nlong name      1\nb             22\n"


@pytest.mark.parametrize(
    "settings",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
    ids=["C", "ascii"],
)
@pytest.mark.parametrize("command", ["demo", "explain"])
def test_an_output_without_the_micro_sign(command: str, settings: dict[str, str], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    arguments = {"demo": ("--input", str(tmp_path / "x.npy")), "explain": ("--shape", "4096x8192")}[command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"} | settings
    full_command = [sys.executable, "-m", "cunorm", command, *arguments]
    done = subprocess.run(full_command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d \?s\b", done.stdout)


def test_an_output_that_fails_is_not_blamed_on_the_arguments(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    screen = io.StringIO()
    screen.close()
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(ValueError, match="closed file"):
        cli.run(["explain", "--shape", "4096x8192"])


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "cunorm", "info"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert b"Traceback" not in done.stderr
