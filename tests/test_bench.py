"""Measuring, on the CPU with a clock that says what it is told: right results get a time, and others a note."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_cases import ROW, FakeMachine, OtherProvider, measure

import cunorm
from cunorm.bench import peers, timing
from cunorm.bench import run as runner
from cunorm.bench.inputs import Exact, Inputs
from cunorm.bench.results import best_peer, by_row, of
from cunorm.bench.suites import GELUS, SUITES, Row, suite


def small(row: Row) -> Row:
    """The same problem in a size that a CPU computes at once."""
    if row.is_channel_norm:
        samples, channels, *spatial = row.shape
        shape = (min(samples, 2), 2 * row.groups or min(channels, 5), *(min(size, 4) for size in spatial))
        return dataclasses.replace(row, shape=shape)
    return dataclasses.replace(row, shape=(*(min(size, 3) for size in row.shape[:-1]), min(row.columns, 33)))


@pytest.mark.parametrize("name", SUITES)
def test_a_whole_suite_runs(name: str) -> None:
    rows = list(dict.fromkeys(map(small, suite(name))))
    results = measure(*rows, providers=("cunorm", "torch"))
    assert not results.missing
    assert not results.stopped
    measured = by_row(results.measurements)
    assert list(measured) == rows
    for row, entries in measured.items():
        ours = of("cunorm", entries)
        assert ours
        if row.framework == "cupy":  # there is none on a CPU
            assert ours.seconds is None
            assert ours.note
            continue
        assert ours.seconds, ours
        assert ours.error is not None
        assert ours.error < 1e-2
        if row.clock == "device":
            assert ours.r == pytest.approx(1e-5 / (row.moved_bytes // 2 * 1e-9))
            assert ours.rate == pytest.approx(row.moved_bytes / 1e-5)


def test_torch_and_jax_compute_the_same() -> None:
    pytest.importorskip("jax")
    for op in ("layer_norm", "rms_norm"):
        for direction in ("forward", "forward_stats", "backward", "both"):
            for residual in (False, True):
                if residual and direction == "both":
                    continue
                row = dataclasses.replace(ROW, op=op, direction=direction, residual=residual)
                for entry in measure(row, providers=("torch", "jax.jit")).measurements:
                    if "'CPU' backend" not in entry.note:  # PyTorch has no fused RMS norm there
                        assert entry.seconds, entry


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_weights_of_another_dtype(op: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch converts x; every gradient has the dtype of what it is for."""
    pytest.importorskip("jax")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    row = dataclasses.replace(ROW, op=op, direction=direction, dtype="bfloat16", weights="float32", shape=(40, 32))
    assert row.label == f"{op} 40x32 bfloat16 {direction} (float32 weights)"
    inputs = Inputs(row, "cpu")
    assert (inputs.x.dtype, inputs.weight.dtype) == (torch.bfloat16, torch.float32)
    for name in ("cunorm", "torch", "torch.compile", "jax.jit"):
        (entry,) = measure(row, providers=(name,)).measurements
        assert entry.seconds, entry
        assert (entry.note == "x in float32") == (name == "torch")
        work = peers.PROVIDERS[name]("cpu", 0).work(row, inputs)
        assert work is not None
        dtypes = {result: tensor.dtype for result, tensor in work.results().items()}
        sums = dict.fromkeys(("dweight", "dbias"), torch.float32)
        assert dtypes == {result: sums.get(result, torch.bfloat16) for result in dtypes}


@pytest.mark.parametrize("op", GELUS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gelu_is_compared_with_what_it_is(op: str, direction: str, other_provider: type[OtherProvider]) -> None:
    """What cunorm and PyTorch compute is right, and the other gelu is wrong."""
    row = dataclasses.replace(ROW, op=op, direction=direction, shape=(40, 33))

    def answer(row: Row, inputs: Inputs) -> peers.Work | None:
        changed = {"none": "tanh", "tanh": "none"}[inputs.approximate]
        inputs.approximate, right = changed, inputs.approximate
        work = peers.PROVIDERS["torch"]("cpu", 0).work(row, inputs)
        assert work is not None
        results = work.results()
        inputs.approximate = right
        return peers.Work(lambda: tuple(results.values()), tuple(results))

    other_provider.answer = staticmethod(answer)
    ours, theirs, wrong = measure(row, providers=("cunorm", "torch", "other")).measurements
    assert ours.seconds and theirs.seconds
    assert ours.error is not None and ours.error < 1e-6
    assert wrong.seconds is None and wrong.note.startswith("wrong: ")
    assert measure(row, providers=("liger", "quack", "jax.jit")).measurements == []


def test_a_wrong_result_gets_no_time(other_provider: type[OtherProvider]) -> None:
    def answer(row: Row, inputs: Inputs) -> peers.Work:
        y = cunorm.layer_norm(inputs.x, inputs.weight, inputs.bias)
        y[-1, 7] += 0.01
        return peers.Work(lambda: y, ("y",))

    other_provider.answer = staticmethod(answer)
    machine = FakeMachine()
    (entry,) = measure(ROW, providers=["other"], machine=machine).measurements
    assert entry.seconds is None
    assert entry.r is None
    assert entry.error is not None
    assert entry.error > 1e-3
    assert entry.note.startswith("wrong: y is off by")
    assert machine.calls == 1  # the copy
    assert best_peer([entry]) is None


@pytest.mark.parametrize("name", ["y", "dx", "dweight", "dbias", "residual_out", "mean", "rstd"])
def test_what_is_not_written_is_wrong(name: str) -> None:
    inputs = Inputs(ROW, "cpu")
    rows, columns = ROW.shape
    shape = {"dweight": (columns,), "dbias": (columns,), "mean": (rows,), "rstd": (rows,)}.get(name, ROW.shape)
    exact = Exact(inputs)
    for result in (torch.full(shape, torch.nan), torch.zeros(0), torch.zeros(shape)[..., :-1]):
        assert not exact.errors({name: result}, residual=False)[name] <= exact.limit(name, torch.float32)


def test_nan_outside_of_the_sampled_rows_is_found() -> None:
    row = dataclasses.replace(ROW, shape=(1000, 8))
    inputs = Inputs(row, "cpu")
    exact = Exact(inputs)
    y = cunorm.layer_norm(inputs.x, inputs.weight, inputs.bias)
    assert exact.errors({"y": y}, False)["y"] < 1e-6
    untouched = next(index for index in range(1000) if index not in exact._sample.tolist())
    y[untouched, 3] = torch.nan
    assert exact.errors({"y": y}, False)["y"] == float("inf")


def test_exact_results_are_those_of_autograd() -> None:
    inputs = Inputs(dataclasses.replace(ROW, shape=(40, 33)), "cpu")
    leaves = [
        tensor.double().requires_grad_() for tensor in (inputs.x, inputs.weight, inputs.bias) if tensor is not None
    ]
    y = torch.nn.functional.layer_norm(leaves[0], (33,), *leaves[1:])
    gradients = torch.autograd.grad(y, leaves, inputs.dy.double())
    results = dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *gradients)))
    assert max(Exact(inputs).errors(results, residual=False).values()) < 1e-12


def test_a_provider_that_fails_is_a_note(other_provider: type[OtherProvider]) -> None:
    def answer(row: Row, inputs: Inputs) -> peers.Work:
        raise RuntimeError("no kernel for this\nand a long trace")

    other_provider.answer = staticmethod(answer)
    rows = [ROW, dataclasses.replace(ROW, direction="backward")]
    results = measure(*rows, providers=["other", "cunorm"])
    notes = [entry.note for entry in results.measurements if entry.provider == "other"]
    assert notes == ["RuntimeError: no kernel for this"] * 2
    assert all(entry.seconds for entry in results.measurements if entry.provider == "cunorm")


def test_what_a_provider_does_not_have_is_left_out(other_provider: type[OtherProvider]) -> None:
    other_provider.answer = staticmethod(lambda row, inputs: None)
    assert [entry.provider for entry in measure(ROW, providers=["other", "cunorm"]).measurements] == ["cunorm"]


def test_a_device_that_breaks_ends_the_run(other_provider: type[OtherProvider]) -> None:
    machine = FakeMachine()

    def answer(row: Row, inputs: Inputs) -> peers.Work:
        machine.failure = "an illegal memory access was encountered"
        raise RuntimeError("launch failed")

    other_provider.answer = staticmethod(answer)
    rows = [ROW, dataclasses.replace(ROW, direction="backward")]
    results = measure(*rows, providers=["other", "cunorm"], machine=machine)
    assert results.stopped == f"other left the device unusable at {ROW.label}: {machine.failure}"
    assert results.missing == [rows[1].label]


def test_a_row_that_does_not_fit_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(row: Row, device: str) -> Inputs:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "Inputs", full)
    (entry,) = measure(ROW).measurements
    assert entry.note == "OutOfMemoryError: CUDA out of memory"


def test_time_that_is_up_leaves_rows_missing() -> None:
    seen: list[Row] = []
    rows = [ROW, dataclasses.replace(ROW, direction="backward")]
    results = measure(*rows, max_seconds=-1, report=lambda results, row, measured: seen.append(row))
    assert results.missing == [row.label for row in rows]
    assert "as asked" in results.stopped
    assert not seen
    assert not results.measurements


def test_warming_calls_everything_once_and_times_nothing() -> None:
    machine = FakeMachine()
    rows = [ROW, dataclasses.replace(ROW, direction="backward")]
    results = measure(*rows, machine=machine, warm=True)
    assert [entry.note for entry in results.measurements] == ["not timed"] * 2
    assert machine.calls == 0


def test_absent_providers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel.ops.layer_norm", "quack.rmsnorm", "triton"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.delitem(sys.modules, "cunorm.bench.triton_tutorial", raising=False)
    results = measure(ROW, providers=("cunorm", "liger", "quack", "triton-tutorial"))
    assert set(results.absent) == {"liger", "quack", "triton-tutorial"}
    assert all("Error: " in reason for reason in results.absent.values())
    assert {entry.provider for entry in results.measurements} == {"cunorm"}


def test_a_copy_is_measured_once_beside_the_same_tensors() -> None:
    machine = FakeMachine()
    measure(ROW, dataclasses.replace(ROW, direction="forward_stats"), machine=machine)
    assert machine.calls == 1 + 2


def test_the_fastest_copy_of_a_run_counts_for_all_rows() -> None:
    class Machine(FakeMachine):
        def seconds(self, work: Callable[[], Any]) -> float:
            super().seconds(work)
            return {1: 5.0, 3: 3.0, 5: 4.0}.get(self.calls, 1.0)  # copies before each of three rows

    rows = [dataclasses.replace(ROW, shape=shape) for shape in ((8, 40), (40, 8), (16, 20))]
    results = measure(*rows, machine=Machine())
    assert [entry.copy_seconds for entry in results.measurements] == [3.0, 3.0, 3.0]


def test_host_times_are_medians_of_batches() -> None:
    calls = {"a": 0, "b": 0}

    def work(name: str) -> None:
        calls[name] += 1

    waits: list[None] = []
    works = [functools.partial(work, "a"), functools.partial(work, "b")]
    times = timing.host_seconds(works, lambda: waits.append(None), batches=3, calls=10)
    assert len(times) == 2
    assert all(0 < time < 1e-3 for time in times)
    assert calls == {"a": 35, "b": 35}
    assert len(waits) == 2 + 6


class FakeCuda:
    """PyTorch's ``torch.cuda``, with a clock of its own that only the work and the fills move on."""

    def __init__(self) -> None:
        self.now, self.fills = 0.0, 0
        self.cuda = self

    def Event(self, enable_timing: bool) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) * 1e3

        return Event()

    def synchronize(self) -> None:
        pass

    def zero_(self) -> None:
        self.now += 60e-6
        self.fills += 1


@pytest.mark.parametrize(("call", "fills"), [(100e-6, 6), (1e-3, 26), (0.1, 30)])
@pytest.mark.parametrize("took", [3e-6, 2e-3, 0.3])
def test_time_on_the_gpu_is_that_between_events(
    took: float, call: float, fills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda()
    gpu = object.__new__(timing.Gpu)
    gpu._torch, gpu._buffer, gpu._fill_seconds = fake, fake, 60e-6
    host = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: host)
    works = 0

    def work() -> None:
        nonlocal host, works
        host += call
        works += 1
        fake.now += took

    assert gpu.seconds(work) == pytest.approx(took)
    # Fills of 60 microseconds keep the GPU busy for longer than the host needs to queue the work, and empty L2.
    timed = works - 4
    assert fake.fills == fills * timed
    assert 7 <= timed <= 102
    assert timed == 7 if took > 0.1 else timed > 7


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    gpu = timing.Gpu()
    rows = [
        dataclasses.replace(ROW, shape=(4096, 4096), dtype="bfloat16", direction=direction, residual=residual)
        for direction, residual in (("forward", False), ("backward", False), ("forward", True))
    ]
    results = runner.run(rows, ["cunorm", "torch"], gpu)
    for entry in results.measurements:
        assert entry.r, entry
        assert 0.5 < entry.r < 20


# ---- From a notebook.


def test_measuring_from_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm import bench

    monkeypatch.setattr("cunorm.bench.timing.Gpu", FakeMachine)
    results = bench.measure([(5, 33), dataclasses.replace(ROW, direction="backward")], dtype="float32")
    rows = list(by_row(results.measurements))
    assert [(row.suite, row.direction) for row in rows] == [
        ("shapes", "forward"),
        ("shapes", "backward"),
        ("test", "backward"),
    ]
    assert all(of("cunorm", measured) for measured in by_row(results.measurements).values())
    for op in ("group_norm", "instance_norm"):
        found = bench.measure([(2, 24, 5)], op=op, dtype="float32", directions=["both"], providers=["cunorm", "torch"])
        assert [entry.note for entry in found.measurements if not entry.seconds] == []
    monkeypatch.setitem(SUITES, "tiny", lambda: iter([ROW, dataclasses.replace(ROW, direction="backward")]))
    (entry,) = bench.measure("tiny", only="forward", providers=["torch"]).measurements
    assert entry.provider == "torch" and entry.seconds
    for what, options, message in (
        ("speed", {}, "what is 'speed'; the suites are rows"),
        ("tiny", {"only": "conv"}, "nothing is left to measure"),
        ("tiny", {"providers": ["nobody"]}, "'nobody'; it is none of cunorm"),
        ([(5, 33)], {"op": "conv"}, "op has 'conv'; it must be of layer_norm"),
        ([(5, 33)], {"dtype": "float64"}, "dtype has 'float64'; it must be of float16, bfloat16, float32"),
        ([(5, 33)], {"directions": "forward"}, "directions has 'f'; it must be of forward"),
        (
            [(5, 33)],
            {"op": "gelu", "directions": ["both"]},
            "gelu are forward, backward$",
        ),
        ([(5, 8)], {"op": "group_norm", "directions": ["forward_stats"]}, "group_norm are forward, backward, both$"),
        (
            [(16,)],
            {"op": "instance_norm"},
            r"what has \(16,\); for instance_norm a shape must have samples",
        ),
        ([(5, 0)], {}, r"what has \(5, 0\); a shape must have a dimension, and none may be empty"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.measure(what, **options)
    with pytest.raises(TypeError, match=r"what is \(5, 33\); it must be .* a sequence of shapes"):
        bench.measure((5, 33))  # type: ignore[arg-type]


def test_measuring_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        bench.measure([(5, 33)])
