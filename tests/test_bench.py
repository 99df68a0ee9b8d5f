"""``bench/``: suites, measuring (on the CPU, with a clock that says what it is told), plots, tables and the command."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cunorm
from cunorm import cli
from cunorm.bench import channel_peers, peers, report, timing
from cunorm.bench import run as runner
from cunorm.bench.channel_inputs import ChannelExact, ChannelInputs
from cunorm.bench.inputs import Exact, Inputs
from cunorm.bench.published import nv_norms_milliseconds
from cunorm.bench.results import Measurement, Results, best_peer, by_row, load, merge, of
from cunorm.bench.suites import (
    CHANNEL_NORMS,
    DIRECTIONS,
    GELUS,
    LAYOUTS,
    NV_INSTANCE_NORM,
    ODD_NEIGHBOURS,
    SUITES,
    TINY_SHAPES,
    Row,
    readable,
    suite,
)

ROOT = Path(__file__).parents[1]
ROW = Row("test", "layer_norm", (5, 33), "float32", "forward")
CHANNEL_ROWS = [
    Row("test", op, (3, 8, 5, 6), dtype, direction, layout=layout, groups=groups, activation=activation)
    for op, groups, activation in (
        ("instance_norm", 0, ""),
        ("group_norm", 4, ""),
        ("group_norm", 4, "silu"),
        ("batch_norm", 0, ""),
    )
    for dtype in ("float32", "float16")
    for layout in LAYOUTS
    for direction in ("forward", "backward", "both")
]
PEERS = tuple(name for name in peers.PROVIDERS if name != "cunorm")


class FakeMachine:
    """The CPU, where everything takes ten microseconds, and a copy a nanosecond a byte."""

    device = "cpu"
    cache_bytes = 0

    def __init__(self) -> None:
        self.calls = 0
        self.failure = ""

    def seconds(self, work: Callable[[], Any]) -> float:
        self.calls += 1
        result = work()
        if isinstance(result, torch.Tensor) and result.dtype == torch.uint8:
            return result.numel() * 1e-9
        return 1e-5

    def pipelined_seconds(self, work: Callable[[], Any], wait: Callable[[Any], None]) -> float:
        wait(work())
        return 2e-5

    def host_seconds(self, works: Sequence[Callable[[], Any]]) -> list[float]:
        for work in works:
            work()
        return [1e-6 * (position + 1) for position in range(len(works))]

    def release(self) -> None:
        pass

    def broken(self) -> str:
        return self.failure


class OtherProvider(peers.Provider):
    """Stands for a library; a test says how it computes."""

    name = "other"
    distribution = "no such distribution"
    answer: Callable[[Row, Inputs], peers.Work | None]

    def work(self, row: Row, inputs: Inputs) -> peers.Work | None:
        return type(self).answer(row, inputs)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> type[OtherProvider]:
    monkeypatch.setitem(peers.PROVIDERS, "other", OtherProvider)
    return OtherProvider


def measure(
    *rows: Row, providers: Sequence[str] = ("cunorm",), machine: FakeMachine | None = None, **options: Any
) -> Results:
    return runner.run(rows, providers, machine or FakeMachine(), **options)


def small(row: Row) -> Row:
    """The same problem in a size that a CPU computes at once."""
    if row.is_channel_norm:
        samples, channels, *spatial = row.shape
        shape = (min(samples, 2), 2 * row.groups or min(channels, 5), *(min(size, 4) for size in spatial))
        return dataclasses.replace(row, shape=shape)
    return dataclasses.replace(row, shape=(*(min(size, 3) for size in row.shape[:-1]), min(row.columns, 33)))


@functools.cache
def synthetic() -> Results:
    """Results of all suites, made up: cunorm in 1.1 times a copy's time, but 1.6 where the columns are 4097."""
    factors = {"cunorm": 1.1, "torch": 2.0, "quack": 1.5, "jax.jit": 7.0}
    results = Results("2026-01-02T03:04:05+00:00", {"device": "A GPU"}, {"torch": "1.2"}, {"liger": "not installed"})
    for name in SUITES:
        for row in suite(name):
            copy = row.moved_bytes / 4e12 if row.clock == "device" else None
            for provider, factor in factors.items():
                slow = 1.6 if provider == "cunorm" and row.columns == 4097 else factor
                seconds = None if provider == "quack" and row.columns > 65536 else (copy or 1e-5) * slow
                entry = Measurement.of(row, provider, copy)
                note = "too long" if seconds is None else ""
                results.measurements.append(dataclasses.replace(entry, seconds=seconds, error=1e-4, note=note))
    return results


# ---- The suites.


@pytest.mark.parametrize("name", SUITES)
def test_suite_is_sane(name: str) -> None:
    rows = suite(name)
    assert len(rows) == len(set(rows)) > 0
    for row in rows:
        assert row.suite == name
        assert row.op in ("layer_norm", "rms_norm", *GELUS, *CHANNEL_NORMS)
        assert row.dtype in ("float16", "bfloat16", "float32")
        assert row.direction in DIRECTIONS
        assert min(row.shape) > 0
        assert (row.layout in LAYOUTS) == row.is_channel_norm == (row.layout != "")
        assert bool(row.groups) == (row.op == "group_norm")
        assert row.shape[1] % (row.groups or 1) == 0
        # x, dy, dx, a residual and its gradient fit on the GPU that the suites were made for.
        assert 5 * math.prod(row.shape) * 4 < 141e9


def test_suites_reproduce_what_they_name() -> None:
    shapes = {name: {row.shape for row in suite(name)} for name in SUITES}
    assert {columns for _, columns in shapes["triton-tutorial"]} == set(range(1024, 16384, 512))
    assert len(shapes["nv-norms"]) == 9
    assert {"forward", "backward", "both"} == {row.direction for row in suite("nv-norms")}
    assert {(128, 64), (128, 2**20), (2**20, 128), (16, 1024, 256)} <= shapes["fast-layernorm-tf"]
    assert {(32768, 256), (32768, 65536), (16384, 131072), (8192, 262144)} <= shapes["quack"]
    assert len(shapes["small"]) == 20
    assert all(neighbour % 8 == 0 for neighbour in ODD_NEIGHBOURS.values())
    assert {(32768, size) for size in (*ODD_NEIGHBOURS, *ODD_NEIGHBOURS.values())} == shapes["odd"]
    assert {row.offset for row in suite("odd")} == {0, 1}
    large = [row for row in suite("rows") if row.sweep == "268 MB" and not row.residual]
    assert {256, 5120, 12288, 15872, 16384, 50257, 262144} <= {row.columns for row in large}
    assert all(row.moved_bytes > 256e6 for row in large)


def test_suites_of_channel_norms() -> None:
    rows = {op: suite(op.replace("_", "-")) for op in CHANNEL_NORMS}
    for op, of_op in rows.items():
        assert {row.op for row in of_op} == {op}
        assert {row.direction for row in of_op} >= {"forward", "backward"}
        assert any(row.sweep == TINY_SHAPES for row in of_op)
        # The same problems in both layouts.
        of_layouts = [
            [dataclasses.replace(row, layout="") for row in of_op if row.layout == layout] for layout in LAYOUTS
        ]
        assert of_layouts[0] == of_layouts[1] != []
    instance = [row for row in rows["instance_norm"] if row.shape in NV_INSTANCE_NORM]
    assert {row.shape for row in instance} == set(NV_INSTANCE_NORM)
    assert {(2, 64, 128, 128, 128), (8, 256, 32, 32, 32), (2, 32, 6, 6, 6)} <= {row.shape for row in instance}
    assert {row.dtype for row in instance} == {"float16", "float32"}
    group = [row for row in rows["group_norm"] if row.sweep != TINY_SHAPES]
    assert {row.groups for row in group} == {32}
    assert {row.activation for row in group} == {"", "silu"}
    assert {(8, 320, 64, 64), (8, 128, 256, 256)} <= {row.shape for row in group}
    assert {(64, 256, 56, 56), (64, 2048, 7, 7)} <= {row.shape for row in rows["batch_norm"]}


def test_only_chooses_layouts_and_activations() -> None:
    chosen = suite("group-norm", "8x320x64x64 N...C silu backward")
    assert [row.label for row in chosen] == ["group_norm 8x320x64x64 float16 backward (N...C, silu)"]
    chosen = suite("group-norm", "8x320x64x64 NC... !silu")
    assert [row.label for row in chosen] == [
        f"group_norm 8x320x64x64 float16 {direction} (NC...)" for direction in ("forward", "backward")
    ]


def test_shapes_are_readable() -> None:
    assert readable((4096, 1024)) == "4,096 × 1,024"
    assert readable((16, 1024, 256)) == "16 × 1,024 × 256"
    assert readable((2, 32, 128, 128, 128)) == "2 × 32 × 128³"
    assert readable((8, 1280, 16, 16)) == "8 × 1,280 × 16²"
    assert readable((8, 1280, 16, 32)) == "8 × 1,280 × 16 × 32"


def test_parts_and_only_choose_rows() -> None:
    everything = suite("rows")
    parts = [suite("rows", part=(index, 3)) for index in (1, 2, 3)]
    assert sorted(map(hash, (row for part in parts for row in part))) == sorted(map(hash, everything))
    shapes = [{(row.shape, row.dtype) for row in part} for part in parts]
    assert not shapes[0] & shapes[1]
    chosen = suite("rows", "rms_norm bfloat16 !residual !backward")
    assert {(row.op, row.dtype, row.residual) for row in chosen} == {("rms_norm", "bfloat16", False)}
    assert {row.direction for row in chosen} == {"forward", "forward_stats"}
    assert suite("rows", "no such row") == []


@pytest.mark.parametrize(
    "direction, residual, numbers",
    [
        ("forward", False, 2),
        ("forward_stats", False, 2),
        ("forward", True, 4),
        ("backward", False, 3),
        ("backward", True, 4),
        ("both", False, 5),
    ],
)
def test_bytes_that_must_move(direction: str, residual: bool, numbers: int) -> None:
    row = dataclasses.replace(ROW, direction=direction, residual=residual)
    assert row.moved_bytes == numbers * 5 * 33 * 4
    assert dataclasses.replace(row, dtype="bfloat16").moved_bytes == numbers * 5 * 33 * 2


# ---- Measuring.


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


@pytest.mark.parametrize("op", GELUS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gelu_is_compared_with_what_it_is(op: str, direction: str, other: type[OtherProvider]) -> None:
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

    other.answer = staticmethod(answer)
    ours, theirs, wrong = measure(row, providers=("cunorm", "torch", "other")).measurements
    assert ours.seconds and theirs.seconds
    assert ours.error is not None and ours.error < 1e-6
    assert wrong.seconds is None and wrong.note.startswith("wrong: ")
    assert measure(row, providers=("liger", "quack", "jax.jit")).measurements == []


@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=lambda row: row.label.replace("/", "-"))
def test_norms_of_channels_are_right(row: Row) -> None:
    for entry in measure(row, providers=("cunorm", "torch")).measurements:
        assert entry.seconds, entry
        assert entry.error is not None
        assert entry.error < (1e-6 if row.dtype == "float32" else 2e-3)
        assert entry.r == pytest.approx(1e-5 / (row.moved_bytes // 2 * 1e-9))
    assert measure(row, providers=("quack", "jax.jit", "triton-tutorial")).measurements == []


def test_compiled_norms_of_channels_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch records all that it would compile, and compiles nothing, which takes seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for row in CHANNEL_ROWS:
        if row.layout == "N...C" and row.dtype == "float32":
            (entry,) = measure(row, providers=["torch.compile"]).measurements
            assert entry.seconds, entry


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_channels_lie_as_the_layout_says(layout: str) -> None:
    row = dataclasses.replace(CHANNEL_ROWS[0], layout=layout)
    inputs = ChannelInputs(row, "cpu")
    memory_format = {"NC...": torch.contiguous_format, "N...C": torch.channels_last}[layout]
    for tensor in (inputs.x, inputs.dy):
        assert tensor.shape == row.shape
        assert tensor.is_contiguous(memory_format=memory_format)
    assert inputs.by_set(inputs.x).data_ptr() == inputs.x.data_ptr()


@pytest.mark.parametrize("row", [row for row in CHANNEL_ROWS if row.direction == "both" and row.dtype == "float32"])
def test_exact_results_of_channels_are_those_of_autograd(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.bench.channel_inputs.CHUNK_ELEMENTS", 100)  # several parts
    inputs = ChannelInputs(row, "cpu")
    assert len(list(inputs.parts())) > 1
    leaves = [tensor.double().requires_grad_() for tensor in (inputs.x, inputs.weight, inputs.bias)]
    running = [tensor.double() for tensor in inputs.running()]
    y = channel_peers._torch_norm(row)(*leaves, *running)
    gradients = torch.autograd.grad(y, leaves, inputs.dy.double())
    results = dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *gradients)))
    results |= dict(zip(("running_mean", "running_var"), running))
    assert len(results) == (6 if row.op == "batch_norm" else 4)
    assert max(ChannelExact(inputs).errors(results, residual=False).values()) < 1e-12


@pytest.mark.parametrize("op", CHANNEL_NORMS)
def test_statistics_of_channels_are_those_that_backward_wants(op: str) -> None:
    row = next(row for row in CHANNEL_ROWS if row.op == op)
    inputs = ChannelInputs(row, "cpu")
    groups = [row.groups] if row.groups else []
    training = {"training": True} if op == "batch_norm" else {}
    _, mean, rstd = getattr(cunorm, op)(inputs.x, *groups, return_stats=True, **training)
    torch.testing.assert_close(inputs.mean, mean)
    torch.testing.assert_close(inputs.rstd, rstd)


def _nan_at_the_end(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[-1, -2, -1, -1] = torch.nan
    return y


@pytest.mark.parametrize(
    "op, wrong",
    [
        ("instance_norm", lambda x, weight, bias: F.instance_norm(x)),
        ("instance_norm", lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True)),
        ("group_norm", lambda x, weight, bias: F.group_norm(x, 2, weight, bias)),
        ("group_norm", lambda x, weight, bias: F.silu(F.group_norm(x, 4, weight, bias))),
        ("group_norm", lambda x, weight, bias: F.group_norm(x, 4, weight, bias).flatten(2)),
        ("group_norm", lambda x, weight, bias: _nan_at_the_end(F.group_norm(x, 4, weight, bias))),
        ("batch_norm", lambda x, weight, bias, *running: F.instance_norm(x, weight=weight, bias=bias)),
        # Running statistics that nobody updates, and ones that forget at another rate.
        ("batch_norm", lambda x, weight, bias, *running: F.batch_norm(x, None, None, weight, bias, True)),
        ("batch_norm", lambda x, weight, bias, *running: F.batch_norm(x, *running, weight, bias, True, 0.2)),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_norms_of_channels_get_no_time(
    op: str, wrong: Callable[..., torch.Tensor], layout: str, other: type[OtherProvider]
) -> None:
    row = next(row for row in CHANNEL_ROWS if row.op == op and row.layout == layout)
    other.answer = staticmethod(lambda row, inputs: channel_peers._work(row, inputs, wrong))
    (entry,) = measure(row, providers=["other"]).measurements
    assert entry.seconds is None
    assert entry.note.startswith("wrong: ")


@pytest.mark.parametrize("name", ["y", "dx", "dweight", "dbias", "running_mean", "running_var"])
def test_what_a_norm_of_channels_does_not_write_is_wrong(name: str) -> None:
    row = next(row for row in CHANNEL_ROWS if row.op == "batch_norm")
    shape = row.shape if name in ("y", "dx") else (row.shape[1],)
    exact = ChannelExact(ChannelInputs(row, "cpu"))
    for result in (torch.full(shape, torch.nan), torch.zeros(0), torch.zeros(shape)[..., :-1]):
        assert not exact.errors({name: result}, residual=False)[name] <= exact.limit(name, torch.float32)


def test_a_note_says_what_cudnn_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(CHANNEL_ROWS[-3], providers=["torch"]).measurements[0].note == ""
    monkeypatch.setattr(torch._C, "_select_batch_norm_backend", lambda *inputs: torch._C._BatchNormBackend.Cudnn)
    for row in CHANNEL_ROWS:
        if row.direction == "forward":
            (entry,) = measure(row, providers=["torch"]).measurements
            assert entry.note == ("cuDNN" if row.op == "batch_norm" else "")


class LigerFunction:
    """What Liger's autograd function of group norm computes."""

    @staticmethod
    def apply(x: torch.Tensor, weight: Any, bias: Any, channels: int, groups: int, eps: float) -> torch.Tensor:
        assert x.dim() == 3 and x.shape[1] == channels and x.is_contiguous()
        return F.group_norm(x, groups, weight, bias, eps)


def test_liger_has_group_norm_in_one_layout(other: type[OtherProvider]) -> None:
    other.answer = staticmethod(lambda row, inputs: channel_peers.liger_work(row, inputs, LigerFunction))
    for row in CHANNEL_ROWS:
        entries = measure(row, providers=["other"]).measurements
        if row.op != "group_norm" or row.activation:
            assert not entries
        elif row.layout == "NC...":
            assert entries[0].seconds, entries
        else:
            assert entries[0].seconds is None
            assert "not tried" in entries[0].note


def test_a_wrong_result_gets_no_time(other: type[OtherProvider]) -> None:
    def answer(row: Row, inputs: Inputs) -> peers.Work:
        y = cunorm.layer_norm(inputs.x, inputs.weight, inputs.bias)
        y[-1, 7] += 0.01
        return peers.Work(lambda: y, ("y",))

    other.answer = staticmethod(answer)
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


def test_a_provider_that_fails_is_a_note(other: type[OtherProvider]) -> None:
    def answer(row: Row, inputs: Inputs) -> peers.Work:
        raise RuntimeError("no kernel for this\nand a long trace")

    other.answer = staticmethod(answer)
    rows = [ROW, dataclasses.replace(ROW, direction="backward")]
    results = measure(*rows, providers=["other", "cunorm"])
    notes = [entry.note for entry in results.measurements if entry.provider == "other"]
    assert notes == ["RuntimeError: no kernel for this"] * 2
    assert all(entry.seconds for entry in results.measurements if entry.provider == "cunorm")


def test_what_a_provider_does_not_have_is_left_out(other: type[OtherProvider]) -> None:
    other.answer = staticmethod(lambda row, inputs: None)
    assert [entry.provider for entry in measure(ROW, providers=["other", "cunorm"]).measurements] == ["cunorm"]


def test_a_device_that_breaks_ends_the_run(other: type[OtherProvider]) -> None:
    machine = FakeMachine()

    def answer(row: Row, inputs: Inputs) -> peers.Work:
        machine.failure = "an illegal memory access was encountered"
        raise RuntimeError("launch failed")

    other.answer = staticmethod(answer)
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


def test_a_copy_is_measured_once_for_a_number_of_bytes() -> None:
    machine = FakeMachine()
    measure(ROW, dataclasses.replace(ROW, direction="forward_stats"), machine=machine)
    assert machine.calls == 1 + 2


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


@pytest.mark.parametrize("took", [3e-6, 2e-3, 0.3])
def test_time_on_the_gpu_is_that_between_events(took: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    gpu = object.__new__(timing.Gpu)
    gpu._torch, gpu._buffer, gpu._fill_seconds = fake, fake, 60e-6
    host = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: host)
    works = 0

    def work() -> None:
        nonlocal host, works
        host += 100e-6
        works += 1
        fake.now += took

    assert gpu.seconds(work) == pytest.approx(took)
    # The GPU is kept busy for longer than the host needs to queue the work: 100 microseconds in three fills or more.
    timed = works - 4
    assert 3 * timed <= fake.fills <= 5 * timed
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


# ---- Results, plots and tables.


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = synthetic()
    path = tmp_path / "results.json"
    results.save(path)
    assert load(path) == results
    assert json.loads(path.read_text())["machine"] == {"device": "A GPU"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": []}', '{"date": "", "rows": 3}'])
def test_a_file_that_has_no_results_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json has no results"):
        load(path)


@pytest.mark.parametrize("name", ["nv-norms", "rows", "host"])
def test_results_of_before_there_were_layouts_are_read(name: str) -> None:
    measurements = load(ROOT / "bench" / "results" / "h200" / f"{name}.json").measurements
    assert {entry.row for entry in measurements} <= set(suite(name))


def test_parts_merge() -> None:
    whole = synthetic()
    first, second = (
        dataclasses.replace(whole, measurements=part) for part in (whole.measurements[:9], whole.measurements[5:])
    )
    first.missing = [whole.measurements[-1].row.label, "a row of no part"]
    merged = merge([first, second])
    assert sorted(map(repr, merged.measurements)) == sorted(map(repr, whole.measurements))
    assert merged.missing == ["a row of no part"]


def test_a_frame() -> None:
    frame = synthetic().frame
    assert len(frame) == len(synthetic().measurements)
    expected = {"suite", "op", "shape", "rows", "columns", "dtype", "direction", "provider", "seconds", "GB/s", "r"}
    assert expected <= set(frame.columns)
    for line, entry in zip(frame.to_dict("records"), synthetic().measurements):
        assert (line["suite"], line["op"], line["shape"]) == (entry.suite, entry.op, entry.shape)
        assert line["rows"] * line["columns"] == math.prod(entry.shape)
        if entry.seconds and entry.copy_seconds:
            assert line["r"] == entry.seconds / entry.copy_seconds
            assert line["GB/s"] == pytest.approx(entry.moved_bytes / entry.seconds / 1e9)
            assert line["copy GB/s"] == pytest.approx(line["r"] * line["GB/s"])
    best = frame[frame.suite == "quack"].groupby(["op", "provider"]).r.min()
    assert best["layer_norm", "cunorm"] == pytest.approx(1.1)


def test_a_plot_of_results() -> None:
    """A figure with units on every axis, which a notebook shows by itself, and which leaves nothing open."""
    code = (
        "import sys, matplotlib; backend = matplotlib.rcParams._get_backend_or_none(); "
        "from cunorm import bench; figure = bench.load('h200/quack').plot('layer_norm !residual'); "
        "assert matplotlib.rcParams._get_backend_or_none() == backend; "
        "assert figure._repr_png_().startswith(b'\\x89PNG'); assert 'matplotlib.pyplot' not in sys.modules; "
        "assert len(figure.subfigs) == 2 and len(figure.axes) == 6; "
        "print(*{axis.get_ylabel() for axis in figure.axes}, *{axis.get_xlabel() for axis in figure.axes[1::2]})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout and "time / time of a copy" in done.stdout and "columns" in done.stdout
    with pytest.raises(ValueError, match="no rows that match 'conv'"):
        synthetic().plot("conv")


def test_results_show_themselves() -> None:
    results = dataclasses.replace(synthetic(), measurements=synthetic().measurements[:8])
    assert repr(results) == "<8 measurements of rows on A GPU, 2026-01-02>"
    assert str(results).splitlines()[1].split("  ")[0] == "problem" and "absent: liger (not installed)" in str(results)
    text = results._repr_html_()
    assert text.count("<tr>") == 1 + len(by_row(results.measurements)) and "layer_norm 524288x256 bfloat16" in text


def test_results_are_loaded_by_path_or_name() -> None:
    committed = load("h200/quack")
    assert committed == load(str(ROOT / "bench" / "results" / "h200" / "quack.json"))
    assert committed.machine["device"] == "NVIDIA H200"
    with pytest.raises(FileNotFoundError):
        load("h200/no-such-suite")


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
    monkeypatch.setitem(SUITES, "tiny", lambda: iter([ROW, dataclasses.replace(ROW, direction="backward")]))
    (entry,) = bench.measure("tiny", only="forward", providers=["torch"]).measurements
    assert entry.provider == "torch" and entry.seconds
    for what, options, message in (
        ("speed", {}, "what is 'speed'; the suites are rows"),
        ("tiny", {"only": "conv"}, "nothing is left to measure"),
        ("tiny", {"providers": ["nobody"]}, "'nobody'; it is none of cunorm"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.measure(what, **options)


def test_measuring_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        bench.measure([(5, 33)])


def test_plots(tmp_path: Path) -> None:
    from cunorm.bench.plots import draw

    chosen = [entry for entry in synthetic().measurements if entry.suite in ("nv-norms", "odd")]
    results = dataclasses.replace(synthetic(), measurements=chosen)
    names = {path.name for path in draw(results, tmp_path)}
    ops = ("nv-norms-layer-norm-float16", "nv-norms-layer-norm-float32", "odd-layer-norm-bfloat16")
    assert {f"{op}.{suffix}" for op in ops for suffix in ("png", "svg")} <= names
    assert (tmp_path / "odd-layer-norm-bfloat16.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "odd-layer-norm-bfloat16.svg").read_text()
    for words in ("cunorm", "GB/s", "copy of the same bytes", "time / time of a copy", "A GPU"):
        assert words in text


def test_plots_of_norms_of_channels(tmp_path: Path) -> None:
    from cunorm.bench.plots import _figures, draw

    suites = [op.replace("_", "-") for op in CHANNEL_NORMS]
    chosen = [entry for entry in synthetic().measurements if entry.suite in suites and entry.dtype == "float16"]
    figures = {name: (title, measurements) for name, title, measurements in _figures(chosen)}
    layouts = ("channels-first", "channels-last")
    assert set(figures) == {
        f"{figure}-float16-{layout}{rest}"
        for layout in layouts
        for figure, silu in (("instance-norm", [""]), ("group-norm", ["", "-silu"]), ("batch-norm", [""]))
        for activation in silu
        for rest in (activation, f"{activation}-tiny-shapes")
    }
    name = "group-norm-float16-channels-last-silu"
    draw(dataclasses.replace(synthetic(), measurements=figures[name][1]), tmp_path)
    text = (tmp_path / f"{name}.svg").read_text()
    for words in ("channels last, with silu", "samples × channels × positions", "8 × 320 × 64²"):
        assert words in text


def test_nv_norms_times_stand_beside_ours() -> None:
    published = [row for name in ("nv-norms", "instance-norm") for row in suite(name) if nv_norms_milliseconds(row)]
    assert {(row.dtype, row.direction) for row in published} == {("float16", "both")}
    assert len(published) == 9 + 2 * len(NV_INSTANCE_NORM)
    end = "<!-- bench end -->"
    text = f"<!-- bench: nv_norms instance-norm -->\n{end}\n<!-- bench: nv_norms nv-norms -->\n{end}\n"
    filled = report.fill(text, synthetic())
    assert "| samples × channels × positions | cunorm ms | nv_norms ms, H100 | nv_norms ms, A100 |" in filled
    # 268 MB of float16 five times over at 4 TB/s, and a tenth.
    assert "| 2 × 32 × 128³, NC... | 0.37 | 3.85 | 5.20 |" in filled
    assert "| 2 × 32 × 128³, N...C | 0.37 | 6.05 | 7.51 |" in filled
    assert "| 10,000,000 × 10 | 0.28 | 10.61 | 13.82 |" in filled
    assert filled.count("\n| ") == len(published) + 4


def test_tables_are_filled_in() -> None:
    end = "<!-- bench end -->"
    text = f"a\n<!-- bench: table triton-tutorial -->\nold\n{end}\nb\n<!-- bench: odd odd -->\n{end}\n"
    filled = report.fill(text, synthetic())
    assert "old" not in filled
    assert "| 4,096 × 1,024 | 1.10 | 1.50 quack | 1.10 | 1.50 quack |" in filled
    assert "| 4,097 beside 4,096 | bfloat16 | 1.45 | 1.45 |" in filled
    text = f"<!-- bench: table group-norm 8x320 -->\n{end}\n"
    assert "| 8 × 320 × 64², N...C, silu | 1.10 | 1.50 quack |" in report.fill(text, synthetic())
    assert report.fill(filled, synthetic()) == filled


@pytest.mark.parametrize("kind", [kind for kind in report.KINDS if kind != "models"])  # there are none among these
def test_every_kind_of_table_is_a_table(kind: str) -> None:
    name = kind if kind in SUITES else "nv-norms"
    chosen = [entry for entry in synthetic().measurements if entry.suite == name]
    lines = report.KINDS[kind](chosen).splitlines()
    assert len(lines) > 3
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("marker", ["chart rows", "table nothing", "table rows no such words"])
def test_markers_that_ask_for_what_is_not_there(marker: str) -> None:
    with pytest.raises(ValueError, match="bench:"):
        report.fill(f"<!-- bench: {marker} -->\n<!-- bench end -->", synthetic())


def test_where_it_is_not_first() -> None:
    texts = report.not_first(synthetic().measurements)
    assert texts
    assert all("4097" in text and "quack takes 0.94" in text for text in texts)


# ---- The command.


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.run(["bench", *arguments])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cunorm.gpus.cuda_devices", lambda: ([], "none for this test"))


def test_without_a_gpu(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = bench(capsys, "small")
    assert code != 0
    assert not out
    assert "needs an NVIDIA GPU: none for this test" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "name a suite"),
        (("speed",), "no suite 'speed'"),
        (("small", "--only", "no such row"), "no row of small"),
        (("small", "--part", "4/3"), "no part"),
        (("small", "--json", "/no/such/folder/x.json"), "does not exist"),
        (("small", "--from", "x.json"), "--from shows saved results, so it goes without a suite"),
        (("--from", "x.json", "--providers", "torch"), "goes without --providers"),
        (("--from", "x.json", "--part", "2/3"), "goes without --part"),
        (("--from", "x.json", "--warm"), "goes without --warm"),
        (("--from", "x.json", "--max-seconds", "9"), "goes without --max-seconds"),
        (("small", "--warm", "--json", "x.json"), "--warm times nothing, so it goes without --json"),
        (("small", "--warm", "--plots", "x"), "--warm times nothing, so it goes without"),
        (("--from", "/no/such/x.json"), "/no/such/x.json"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: tuple[str, ...], message: str, no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = bench(capsys, *arguments)
    assert code == 2
    assert message in err
    if message in ("name a suite", "no suite 'speed'"):
        assert all(name in err for name in SUITES)


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cunorm.cli.bench._machine", FakeMachine)
    monkeypatch.setitem(SUITES, "tiny", lambda: iter([ROW, dataclasses.replace(ROW, direction="backward")]))
    path = tmp_path / "tiny.json"
    code, out, _ = bench(capsys, "tiny", "--json", str(path), "--providers", "cunorm,torch")
    assert code == 0
    assert re.search(r"layer_norm 5x33 float32 \| forward \| 10 µs \| [\d.]+ \| 0 \| torch 10 µs", out)
    assert len(load(path).measurements) == 4
    code, _, err = bench(capsys, "tiny", "--providers", "cunorm,nobody")
    assert code == 2
    assert "'nobody' is none of cunorm" in err
    code, out, _ = bench(capsys, "tiny", "--max-seconds", "-1")
    assert code == 0
    assert "2 rows are missing: layer_norm 5x33 float32 forward; " in out


def test_saved_results_are_shown_without_pytorch(tmp_path: Path) -> None:
    results = dataclasses.replace(synthetic(), measurements=synthetic().measurements[:8])
    results.save(tmp_path / "results.json")
    code = (
        "import sys; sys.modules['torch'] = None; from cunorm import cli; "
        f"sys.exit(cli.run(['bench', '--from', {str(tmp_path / 'results.json')!r}, '--only', 'forward']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "layer_norm 524288x256 bfloat16" in done.stdout
    assert "absent: liger (not installed)" in done.stdout
