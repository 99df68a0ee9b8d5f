"""``python -m cunorm``: what each command prints, and what it says to arguments that cannot be used."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tuning_cases import GPU, FakeMachine, entry_of, favourite, other_geometries, problem_of

import cunorm
from cunorm import cli, cuda, gpus, resources, tuning_file
from cunorm.cli import demo, output
from cunorm.plan import Plan
from cunorm.tuning_file import Entry, TuningFile, key_of

ROOT = Path(__file__).parents[1]
OPS = ("layer_norm", "layer_norm_backward", "layer_norm + gradient")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command in this process. Returns what it prints."""
    assert cli.run(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command whose arguments cannot be used. Returns the message."""
    try:
        code = cli.run(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err
    return captured.err


def table_row(text: str, *words: str) -> list[str]:
    """The cells of the first line with all the words; cells are two spaces or more apart."""
    line = next(line for line in text.splitlines() if all(word in line for word in words))
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a CUDA device, whatever this one has."""
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([], "none for this test"))


def full(*_: Any) -> Any:
    """What CuPy raises where a GPU has no memory left."""
    raise MemoryError("Out of memory allocating 536,870,912 bytes")


def refusing() -> Any:
    """What it raises where another process has the GPU for itself."""
    raise RuntimeError("cudaErrorDevicesUnavailable")


GpusHere = Callable[..., SimpleNamespace]


@pytest.fixture
def gpus_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpusHere]:
    """Makes GPUs of given compute capabilities those of this machine: seen, but with no memory for anything."""

    def forget() -> None:
        for cached in (cuda.device, cuda.gpu_name):
            cached.cache_clear()

    def make(*capabilities: tuple[int, int]) -> SimpleNamespace:
        def properties(index: int) -> dict[str, Any]:
            major, minor = capabilities[index]
            counts = {"multiProcessorCount": 108, "maxThreadsPerMultiProcessor": 2048}
            return {"name": f"GPU {major}.{minor}".encode(), "major": major, "minor": minor, **counts}

        class Device:
            def __init__(self, index: int) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: Any) -> None:
                pass

            mem_info = property(lambda self: refusing())
            attributes = property(lambda self: {})

        runtime = SimpleNamespace(
            getDeviceCount=lambda: len(capabilities), getDeviceProperties=properties, CUDARuntimeError=RuntimeError
        )
        runtime.getDevice = lambda: 0
        runtime.driverGetVersion = runtime.runtimeGetVersion = lambda: 12090
        cupy = SimpleNamespace(__version__="14", uint8="uint8", zeros=full, asarray=full)
        cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device)
        monkeypatch.setattr(cuda, "cupy", lambda: cupy)
        monkeypatch.setattr(
            "cunorm.explanation.launches.compile_resources",
            lambda *_: SimpleNamespace(registers=1, spill_bytes=0, shared_bytes=0),
        )
        return cupy

    forget()
    yield make
    monkeypatch.undo()
    forget()


# ---- demo


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "tensorflow"])
def test_demo_shows_each_framework_right(framework: str, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    pytest.importorskip(framework)
    threads = torch.get_num_threads()
    text = run(capsys, "demo", "--framework", framework)
    torch.set_num_threads(threads)  # the demo, a process of its own as a rule, does not
    assert "no CUDA device (none for this test): the NumPy path" in text
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith("layer_norm") and "x" in line]
    assert len(rows) >= 4
    for op, shape, dtype, _, error, _, gigabytes_per_second, ratio in rows:
        assert op in OPS
        assert re.fullmatch(r"\d+x\d+", shape)
        assert float(error) < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
        assert float(gigabytes_per_second) > 0
        assert float(ratio) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_demo_on_the_gpu(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "demo", "--framework", framework)
    assert "on the GPU" in text
    assert "4096x4096" in text


def test_demo_leaves_out_what_would_not_fit_in_the_time(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert cli.run(["demo"], started=-1e9) == 0
    text = capsys.readouterr().out
    assert "Left out to end within 20 seconds: numpy" in text
    assert "--framework NAME" in text


def test_demo_from_a_shell_is_plain_when_piped() -> None:
    command = [sys.executable, "-m", "cunorm", "demo", "--framework", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "layer_norm_backward" in done.stdout
    assert "\x1b" not in done.stdout
    assert not re.search("[\u2500-\u257f]", done.stdout)  # no rules
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_demo_on_a_file(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))
    assert table_row(text, "layer_norm", "3x5x8")[3] == "NumPy"
    y = np.load(tmp_path / "y.npy")
    assert y.dtype == np.dtype(dtype).newbyteorder("=")
    exact = x.astype("float64")
    exact -= exact.mean(-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.astype("float64"), exact, atol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("axis", [["0"], ["1", "2"], ["0", "2"], ["0", "1", "2"], ["-2"]])
def test_demo_on_a_file_over_other_axes(
    axis: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((3, 5, 8)))
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--axis", *axis)
    assert float(table_row(text, "layer_norm", "3x5x8")[4]) < 1e-14


def test_demo_on_a_file_with_an_infinity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, no_gpu: None
) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, np.inf, 2], [1, 2, 3]], np.float32))
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"))
    assert table_row(text, "layer_norm")[4] == "nan"
    assert not recwarn.list, "NumPy warns of nothing, with lines of ours"


def test_demo_on_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 4)))
    assert "the array is empty" in run(capsys, "demo", "--input", str(tmp_path / "x.npy"))


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


def test_demo_on_a_gpu_that_is_too_old(capsys: pytest.CaptureFixture[str], gpus_here: GpusHere) -> None:
    gpus_here((7, 0))
    text = run(capsys, "demo", "--framework", "numpy")
    assert "GPU 7.0 cannot be used (CUDA device 0 has compute capability 7.0; it must be 7.5 (Turing) or later)" in text
    assert "layer_norm_backward" in text


def test_demo_on_a_full_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus_here: GpusHere, tmp_path: Path
) -> None:
    gpus_here((8, 0))
    monkeypatch.setattr(demo, "FRAMEWORKS", ("cupy", "numpy"))
    text = run(capsys, "demo")
    assert "GPU 8.0 (sm_80), a plain copy cannot be timed: Out of memory allocating" in text
    assert "cupy is left out, for it cannot be used: MemoryError: Out of memory allocating" in text
    assert "NumPy" in table_row(text, "layer_norm_backward", "512x1024")
    assert "--framework cupy: it cannot be used: MemoryError: Out" in refused(capsys, "demo", "--framework", "cupy")
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    assert "x.npy: Out of memory" in refused(capsys, "demo", "--input", str(tmp_path / "x.npy"))


def test_demo_on_a_file_that_cannot_be_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    monkeypatch.setattr("cunorm.cli.libraries.Library.formula", full)
    text = run(capsys, "demo", "--input", str(tmp_path / "x.npy"), "--output", str(tmp_path / "y.npy"))
    assert "it cannot be compared and timed: Out of memory" in text
    assert (np.load(tmp_path / "y.npy") == 0).all()


# ---- info


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    text = run(capsys, "info")
    assert table_row(text, "Python")[1].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert table_row(text, "numpy")[1] == np.__version__
    assert str(tmp_path / "cache") in table_row(text, "kernel cache")[1]
    assert table_row(text, "extra torch")[1].startswith("torch 2.")
    extras = ("cuda12x", "cuda13x", "jax", "tensorflow", "keras", "bench", "notebook", "test")
    for name in ("CuPy", "CUDA device", "g++", *(f"extra {extra}" for extra in extras)):
        assert name in text


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "not installed"),
        (ImportError("libcudart.so.12: cannot open"), "does not load: libcudart.so.12: cannot open"),
    ],
)
def test_info_without_cupy(
    error: ImportError, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise RuntimeError("a tensor on a CUDA device needs CuPy") from error

    monkeypatch.setattr(cuda, "cupy", absent)
    assert table_row(run(capsys, "info"), "CuPy ") == ["CuPy", found]


def test_info_on_folders_that_cannot_be_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr(Path, "is_dir", denied)
    monkeypatch.setattr(Path, "glob", denied)
    text = run(capsys, "info")
    assert table_row(text, "kernel cache")[1].endswith("(Permission denied)")
    assert "cannot be read and is ignored (Permission denied)" in table_row(text, "tuned plans")[1]
    assert table_row(text, "compiled calls of CuPy")[1].startswith("not built")


def test_info_counts_tuned_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    path = tmp_path / "tuning.json"
    assert table_row(run(capsys, "info"), "tuned plans")[1] == f"{path}: none"
    entry = Entry(None, (4, 8), 1e-6, 1e-6, 3, cunorm.__version__)
    TuningFile(path).store("NVIDIA H200", {"one": entry, "another": entry})
    assert table_row(run(capsys, "info"), "tuned plans")[1] == f"{path}: 2 for NVIDIA H200"
    TuningFile(path).store("NVIDIA H200", {"another": Entry(None, (4, 8), 1e-6, 1e-6, 3, "0.0.9")})
    found = table_row(run(capsys, "info"), "tuned plans")[1]
    assert found == f"{path}: 1 for NVIDIA H200; 1 of other versions, not used"


def test_info_imports_no_framework() -> None:
    code = (
        "import sys; from cunorm import cli; cli.run(['info']); "
        "print({'torch', 'jax', 'tensorflow', 'tvm_ffi'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_info_on_gpus_that_cannot_be_used(capsys: pytest.CaptureFixture[str], gpus_here: GpusHere) -> None:
    cupy = gpus_here((7, 0), (8, 0), (8, 6))
    busy = cupy.cuda.Device
    cupy.cuda.Device = lambda index: SimpleNamespace(mem_info=(0, 48e9), attributes={}) if index == 2 else busy(index)
    text = run(capsys, "info")
    assert table_row(text, "CUDA device 0")[1].startswith("GPU 7.0, CUDA device 0 has compute capability 7.0")
    assert table_row(text, "CUDA device 1")[1] == "GPU 8.0, cudaErrorDevicesUnavailable"
    assert table_row(text, "CUDA device 2")[1] == "GPU 8.6, sm_86, 108 multiprocessors, 48 GB"


# ---- explain


@pytest.mark.parametrize("arch", list(gpus.KNOWN_GPUS))
@pytest.mark.parametrize("backward", [False, True])
def test_explain(arch: str, backward: bool, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    arguments = ["--backward"] if backward else []
    text = run(capsys, "explain", "--shape", "4096x8192", "--dtype", "float16", "--arch", arch, *arguments)
    assert table_row(text, "bytes that must move")[1].startswith("201.3 MB" if backward else "134.2 MB")
    assert arch in text
    assert "4096 rows of 8192 columns" in text
    _, grid, block, registers, spills, *_ = table_row(text, "row_", " = ")  # the first kernel
    assert int(grid) > 0
    assert int(block.rpartition("= ")[2]) <= 1024
    assert 16 <= int(registers) <= 255
    assert spills == "0 bytes"


@pytest.mark.parametrize(
    ("arguments", "seen_as"),
    [
        (["--shape", "7"], "1 row of 7 columns"),
        (["--shape", "2x3x5", "--axis", "0", "2"], "3 rows of 10 columns"),
        (["--shape", "2X3,5", "--axis", "-2", "-1"], "2 rows of 15 columns"),
        (["--shape", "2x0"], "2 rows of 0 columns"),
        (["--shape", "3x9", "--dtype", "float64"], "3 rows of 9 columns"),
        (["--shape", "3x9", "--dtype", "bfloat16", "--backward"], "3 rows of 9 columns"),
        (["--shape", "1x10000000", "--dtype", "float32"], "1 row of 10000000 columns"),
    ],
)
def test_explain_other_problems(
    arguments: list[str], seen_as: str, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    assert seen_as in run(capsys, "explain", *arguments)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_explain_gelu(backward: bool, bias: bool, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    arguments = ["--backward"] * backward + ["--bias"] * bias
    text = run(capsys, "explain", "--op", "gelu", "--shape", "4096x8192", "--arch", "sm_90", *arguments)
    assert text.startswith("gelu_backward of" if backward else "gelu of")
    assert ("4096 rows of 8192 columns" if bias else "1 row of 33554432 columns") in text
    moved = "201.3 MB (x and dy read, dx written)" if backward else "134.2 MB (x read, y written)"
    assert moved in text
    assert table_row(text, "chosen")[1] == "built in"
    assert table_row(text, "pointwise_", " = ")[4] == "0 bytes"
    assert ("column_sums" in text) == (backward and bias)


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [
        (["--op", "rms_norm"], "134.2 MB (x read, y written)"),
        (["--op", "rms_norm", "--residual"], "268.4 MB (x and residual read, y and residual_out written)"),
        (["--residual", "--backward"], "268.4 MB (x, dy and dresidual_out read, dx written)"),
        (["--op", "rms_norm", "--backward", "--activation", "gelu"], "201.3 MB (x and dy read, dx written)"),
    ],
)
def test_explain_rms_norm_residual_and_activation(
    arguments: list[str], moved: str, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    text = run(capsys, "explain", "--shape", "4096x8192", "--dtype", "float16", *arguments)
    assert " ".join(table_row(text, "bytes that must move")[1:]).startswith(moved)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--op", "group_norm", "--num-groups", "8", "--data-format", "NHWC"],
            ["8 samples of 32 channels of 2048 poi"],
        ),
        (["--op", "instance_norm", "--activation", "relu"], ["512 rows of 1024 columns", "ACTIVATION=relu"]),
        (["--op", "batch_norm", "--evaluation", "--backward"], ["batch_norm_backward of 8x64x32x32", "x and dy read"]),
        (["--op", "rms_norm", "--bias"], ["HAS_BIAS=1"]),
    ],
)
def test_explain_other_ops(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    text = run(capsys, "explain", "--shape", "8x64x32x32", "--arch", "sm_90", *arguments)
    assert all(word in text for word in words)


def test_explain_without_cupy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    def absent() -> None:
        raise RuntimeError("CuPy is not installed")

    monkeypatch.setattr("cunorm.cuda.cupy", absent)
    resources._compile.cache_clear()
    text = run(capsys, "explain", "--shape", "4096x8192")
    assert table_row(text, "row_", " = ")[3] == "unknown"
    assert "unknown (needs CuPy's NVRTC)" in text


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cunorm.cli.info.run", interrupted)
    assert cli.run(["info"]) == 130
    assert capsys.readouterr().err == "python -m cunorm info: interrupted\n"


@pytest.mark.gpu
def test_explain_uses_the_gpu_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "just measured" in run(capsys, "explain", "--shape", "4096x8192")


def test_explain_on_a_gpu_that_is_too_old(capsys: pytest.CaptureFixture[str], gpus_here: GpusHere) -> None:
    gpus_here((7, 0))
    text = run(capsys, "explain", "--shape", "4096x8192")
    assert "on H200 (sm_90), for want of a GPU here: GPU 7.0 cannot be used (CUDA device 0 has compute" in text
    assert "on A40 (sm_86)\n" in run(capsys, "explain", "--shape", "4096x8192", "--arch", "sm_86")
    message = refused(capsys, "explain", "--shape", "4096x8192", "--measure")
    assert "--measure needs an NVIDIA GPU: GPU 7.0 cannot be used (CUDA device 0 has compute" in message


@pytest.mark.parametrize(
    ("capability", "floor"),
    [
        ((8, 6), "at 696 GB/s, the datasheet's memory rate of A40, since no copy can be timed here (Out of memory"),
        ((8, 7), "unknown: no copy can be timed here (Out of memory"),
    ],
)
def test_explain_on_a_full_gpu(
    capsys: pytest.CaptureFixture[str], gpus_here: GpusHere, capability: tuple[int, int], floor: str
) -> None:
    gpus_here(capability)
    message = refused(capsys, "explain", "--shape", "4096x8192", "--measure", "--arch", "sm_90")
    assert message.endswith("explain: the call cannot be timed: H200 (sm_90) is not a GPU of this machine\n")
    for more in ([], ["--arch", "sm_{}{}".format(*capability)]):
        text = run(capsys, "explain", "--shape", "4096x8192", *more)
        assert floor in table_row(text, "floor")[1]
        assert "GPU {}.{} (sm_{}{})".format(*capability, *capability) in text
    assert "at 2.039 TB/s, the datasheet's memory rate" in run(
        capsys, "explain", "--shape", "4096x8192", "--arch", "sm_80"
    )


def test_explain_says_where_the_plan_is_from(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([GPU], ""))
    monkeypatch.setattr(gpus, "measured_copy_rate", lambda *_: 4e12)
    taken = SimpleNamespace(registers=1, spill_bytes=0, shared_bytes=0)
    monkeypatch.setattr("cunorm.explanation.launches.compile_resources", lambda *_: taken)

    def chosen(shape: str, *more: str) -> str:
        tuning_file.forget()
        text = run(capsys, "explain", "--shape", shape, "--dtype", "bfloat16", *more)
        return next(line for line in text.splitlines() if line.startswith("chosen")).removeprefix("chosen").strip()

    assert chosen("4096x8192") == "built in"
    problem = problem_of(4096, 8192)
    geometry = next(item for item in other_geometries(problem) if item.vectors == 1)
    file = TuningFile(cache_folder / "tuning.json")
    file.store(GPU, {key_of(problem): entry_of(geometry)})
    assert chosen("4096x8192") == "tuned: the best of 7 measured here on 4096x8192, 1.25x the built-in speed"
    assert chosen("4096x8192", "--arch", "sm_80") == "built in"
    assert chosen("4096x8192", "--op", "rms_norm") == "built in"
    # No geometry of one vector a thread and as many threads is for half the columns: half of them would be idle.
    assert chosen("4096x4104").startswith(("built in, since what is best of 7", "tuned"))
    file.store(GPU, {key_of(problem): entry_of(None)})
    assert chosen("4096x8192") == "built in, the best of 7 measured here on 4096x8192"


def test_a_compiler_error_is_shown_with_its_log() -> None:
    with pytest.raises(RuntimeError, match=r"column_sums does not compile for sm_90(.|\n)*kernels/.*error"):
        resources.compile_resources("column_sums", {}, "sm_90")


# ---- tune


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


# ---- output


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
