"""Measuring norms of channels: in both layouts, against exact results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench_cases import OtherProvider, measure

import cunorm
from cunorm.bench import channel_peers
from cunorm.bench.channel_inputs import ChannelExact, ChannelInputs
from cunorm.bench.suites import LAYOUTS, Row
from cunorm.channel_norm import CHANNEL_NORMS

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
    op: str, wrong: Callable[..., torch.Tensor], layout: str, other_provider: type[OtherProvider]
) -> None:
    row = next(row for row in CHANNEL_ROWS if row.op == op and row.layout == layout)
    other_provider.answer = staticmethod(lambda row, inputs: channel_peers._work(row, inputs, wrong))
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


def test_liger_has_group_norm_in_one_layout(other_provider: type[OtherProvider]) -> None:
    other_provider.answer = staticmethod(lambda row, inputs: channel_peers.liger_work(row, inputs, LigerFunction))
    for row in CHANNEL_ROWS:
        entries = measure(row, providers=["other"]).measurements
        if row.op != "group_norm" or row.activation:
            assert not entries
        elif row.layout == "NC...":
            assert entries[0].seconds, entries
        else:
            assert entries[0].seconds is None
            assert "not tried" in entries[0].note
