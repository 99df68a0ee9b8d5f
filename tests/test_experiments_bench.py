"""The ``bench`` of an experiment: on a GPU that is the emulator, and on one."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import SMALL_DEVICE
from emulator_cases import NEEDS_COMPILER
from experiment_cases import PUT, ROWS, SUMS, edited, no_cupy

import cunorm
from cunorm import cuda, launch
from cunorm.experiments import bench
from cunorm.plan import Plan

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---- On a GPU that is the emulator: what runs there, but for the driver.


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
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    monkeypatch.setattr(launch, "Call", fake.call)
    monkeypatch.setattr(cuda, "device", lambda index: SMALL_DEVICE)
    monkeypatch.setattr(cuda, "gpu_name", lambda index: "a GPU of this test")
    return fake


@NEEDS_COMPILER
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


@NEEDS_COMPILER
def test_a_wrong_text_is_not_timed(emulated_gpu: EmulatedGpu) -> None:
    report = edited(ROWS, (PUT, PUT.replace("rstd", "rstd * 1.01f"))).bench([(16, 64)], "float32", op="rms_norm")
    assert not report and set(report.frame["call"]) == {"rms_norm"}
    row = report.frame.iloc[1]
    assert (
        row["verdict"] == "wrong" and math.isnan(row["microseconds"]) and row["error"] == pytest.approx(0.007, rel=0.5)
    )
    report.plot()


@NEEDS_COMPILER
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
    monkeypatch.setattr(cuda, "cupy", no_cupy)
    with pytest.raises(RuntimeError, match="no CuPy"):
        experiment.bench([(8, 8)])


@pytest.mark.usefixtures("no_driver")
def test_a_bench_without_a_driver() -> None:
    with pytest.raises(RuntimeError, match=r"^bench needs an NVIDIA GPU: no NVIDIA driver$"):
        cunorm.experiment(ROWS).bench([(8, 8)])


@NEEDS_COMPILER
def test_a_check_on_a_gpu(emulated_gpu: EmulatedGpu) -> None:
    experiment = edited(ROWS, (PUT, PUT.replace("rstd", "1 * rstd")))
    options: dict[str, Any] = {"shapes": [(33, 8)], "dtypes": ["float32"]}
    report = experiment.check(**options)
    assert report and report.headline == "row_block_forward: 2 of 2 calls right, on a GPU of this test"
    wrong = edited(ROWS, (PUT, PUT.replace("rstd", "rstd * (place.row == 5 ? 2 : 1)"))).check(**options)
    assert re.search(r"y\[5, 0\] is .*; written by block \(0, 0, 0\), thread \(0, 5, 0\) of row_block", wrong.notes[0])


# ---- On a GPU.


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
