"""``python -m cunorm explain``: what it prints of a call, with a GPU and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_cases import GpusHere, refused, run, table_row
from tuning_cases import GPU, entry_of, other_geometries, problem_of

from cunorm import gpus, resources, tuning_file
from cunorm.plan import Plan
from cunorm.tuning_file import TuningFile, key_of


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
