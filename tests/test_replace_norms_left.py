"""Layers that `replace_norms` leaves alone, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import activations as diffusers_activations
from diffusers.models import normalization as diffusers_norms
from torch import nn
from torch_cases import run
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.videoprism.modeling_videoprism import VideoPrismLayerNorm

from cunorm.adapters.torch import replace_norms

pytestmark = pytest.mark.usefixtures("tiny_models")


class UnbiasedLayerNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        std = input.std(-1, keepdim=True)
        return (input - input.mean(-1, keepdim=True)) / (std + self.eps) * self.weight + self.bias


class DroppingNorm(LlamaRMSNorm):
    """In evaluation it is what it seems to be."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden_states), 0.1, self.training)


class ModalNorm(LlamaRMSNorm):
    """In evaluation its results have another dtype than in training, or lie otherwise in memory."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__(channels)
        self.way = way

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(hidden_states)
        if self.training:
            return y
        return y.float() if self.way == "dtype" else y.contiguous()


@pytest.mark.parametrize("way", ["dtype", "memory"])
@pytest.mark.parametrize("training", [True, False])
def test_dtypes_and_orders_are_those_of_training_and_of_evaluation(way: str, training: bool) -> None:
    layer = ModalNorm(8, way).bfloat16().train(training)
    theirs = copy.deepcopy(layer)
    assert replace_norms(layer).replaced
    x = torch.randn(5, 8, 3).bfloat16()
    for module in (layer, theirs):
        module.train(not training)
    for given in (x.mT, x.mT.contiguous()):
        y, expected = layer(given), theirs(given)
        assert y.dtype == expected.dtype and y.stride() == expected.stride()


PARALLEL = """
import os, sys, time
from pathlib import Path
import torch
from torch.distributed.nn.functional import all_reduce
from cunorm.adapters.torch import replace_norms

class ParallelNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        variance = all_reduce(x.square().mean(-1, keepdim=True)) / torch.distributed.get_world_size()
        return x * torch.rsqrt(variance + 1e-6) * self.weight

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.fork() > 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
report = replace_norms(ParallelNorm())
(folder / str(rank)).write_text(str(report))
# Each goes when the other is done, and without an end of Python, where Gloo's threads may abort the process.
while not (folder / str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)
"""


def test_layers_that_sum_over_processes_are_left(tmp_path: Path) -> None:
    run(PARALLEL, tmp_path)
    for rank in range(2):
        assert "left: no function of cunorm computes the same" in (tmp_path / str(rank)).read_text()


class ClampingNorm(LlamaRMSNorm):
    """Another norm only where one number is much larger than the others."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, (64,), eps=1e-6).clamp(-5, 5) * self.weight


class NormForHalf(LlamaRMSNorm):
    """Another norm only where weights are so large that float16 has no such number."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(-65_504, 65_504)


class GeluForHalf(nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(max=65_504)


class MendingNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nan_to_num(hidden_states))


class ScaleNorm(nn.Module):
    """RMS norm, but for numbers that are nearly zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), 1e-12

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1, eps=self.eps) * x.shape[-1] ** 0.5 * self.weight


class BroadcastingNorm(LlamaRMSNorm):
    """Its weight has the shape of a sequence of one token, but goes along all."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight = nn.Parameter(torch.ones(1, 1, channels))


class RememberingNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.last = hidden_states
        return super().forward(hidden_states)


class CountingNorm(LlamaRMSNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.seen: list[Any] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden_states.shape)
        return super().forward(hidden_states)


class WritingNorm(LlamaRMSNorm):
    """It writes into what its attributes hold, in one of several ways."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__(channels)
        self.way, self.stats, self.counter = way, {"rms": None, "inner": [0]}, SimpleNamespace(calls=0)
        if way == "tensor":
            self.stats["rms"] = torch.zeros(())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rms = hidden_states.detach().square().mean().sqrt()
        if self.way == "item":
            self.stats["rms"] = rms
        elif self.way == "inner item":
            self.stats["inner"][0] += 1
        elif self.way == "object":
            self.counter.calls += 1
        elif self.way == "tensor":
            self.stats["rms"].copy_(rms)
        return super().forward(hidden_states)


class ActivatedLayerNorm(nn.LayerNorm):
    """Whose activation is for others to apply."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.activation = nn.ReLU()


class FinalNorm(nn.LayerNorm):
    def __init_subclass__(cls, *, why: str) -> None: ...


class ConditionalNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * condition


class BatchNormAct2d(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class NormedLinear(nn.Linear):
    """A head that classifies by the cosine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it would take memory by the gigabyte to try it")


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.running_mean[:, None, None]


def with_a_forward() -> nn.Module:
    layer = nn.LayerNorm(8)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.LayerNorm(8)
    layer.compile(backend="eager")
    return layer


def subclassed() -> nn.Module:
    class Sharded(torch.Tensor):
        pass

    layer = nn.LayerNorm(8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Sharded))
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "QuickGELU": (lambda: ACT2FN["quick_gelu"], "no function of cunorm"),
    "ClippedGELU": (lambda: ACT2FN["gelu_10"], "no function of cunorm"),
    "diffusers GELU": (lambda: diffusers_activations.GELU(8, 8), "it holds other layers"),
    "GlobalResponseNorm": (lambda: diffusers_norms.GlobalResponseNorm(8), "no function of cunorm"),
    "LpNorm": (lambda: diffusers_norms.LpNorm(), "no function of cunorm"),
    "unbiased": (lambda: UnbiasedLayerNorm(8), "no function of cunorm"),
    "weight + 1": (lambda: VideoPrismLayerNorm(8), "no function of cunorm"),
    "dropout": (lambda: DroppingNorm(8), "no function of cunorm"),
    "clamping": (lambda: ClampingNorm(64), "no function of cunorm"),
    "clamping for float16": (lambda: NormForHalf(8), "no function of cunorm"),
    "GELU that clamps for float16": (lambda: GeluForHalf(), "no function of cunorm"),
    "mending": (lambda: MendingNorm(8), "no function of cunorm"),
    "ScaleNorm": (lambda: ScaleNorm(8), "no function of cunorm"),
    "broadcasting": (lambda: BroadcastingNorm(8), "no function of cunorm"),
    "remembering": (lambda: RememberingNorm(8), "its forward writes attributes"),
    "counting": (lambda: CountingNorm(8), "its forward writes attributes"),
    "an activation": (lambda: ActivatedLayerNorm(8), "it has an activation"),
    "no subclasses": (lambda: FinalNorm(8), "its class cannot have a subclass"),
    "two tensors": (lambda: ConditionalNorm(8), "its forward takes no floating-point tensor alone"),
    "batch norm and relu": (lambda: BatchNormAct2d(8), "its forward is its own, and it keeps statistics"),
    "frozen batch norm": (lambda: FrozenBatchNorm2d(8), "it has buffers"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(8), "it synchronizes its statistics"),
    "lazy": (lambda: nn.LazyBatchNorm2d(), "it is not initialized yet"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.LayerNorm((4, 8))), "its parameters are param"),
    "weight-normed": (lambda: nn.utils.weight_norm(nn.LayerNorm((4, 8))), "its weight is no parameter"),
    "quantized": (lambda: quantized_norm(), "it is quantized"),
    "a forward of the object": (with_a_forward, "something has set a forward"),
    "compiled": (compiled, "it is compiled on its own"),
    "tensor subclass": (subclassed, "its weight is a Sharded"),
    "float8": (lambda: nn.RMSNorm(8, dtype=torch.float8_e4m3fn), "its weight has dtype torch.float8_e4m3fn"),
    "momentum": (lambda: nn.BatchNorm1d(8, momentum=1.5), "its momentum is 1.5; it must be from 0 to 1"),
    "eps": (lambda: nn.LayerNorm(8, eps=torch.tensor(1e-5)), "its eps is a Tensor"),  # type: ignore[arg-type]
    "large": (lambda: NormedLinear(512, 512), "its weight has 262,144 numbers, and no more than 65,536 are tried"),
    "response norm": (lambda: nn.LocalResponseNorm(2), "no function of cunorm"),
}


def quantized_norm() -> nn.Module:
    return torch.ao.nn.quantized.LayerNorm((8,), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), 1.0, 0)


@pytest.mark.parametrize("way", ["item", "inner item", "object", "tensor"])
def test_layers_that_write_into_what_they_hold_are_left(way: str) -> None:
    layer = WritingNorm(8, way)
    report = replace_norms(layer)
    words = "it holds tensors" if way == "tensor" else "its forward writes attributes of the layer, or into what"
    assert [entry.text.startswith(words) for entry in report.left] == [True]
    # Trying has not written either.
    assert layer.stats == {"rms": 0 if way == "tensor" else None, "inner": [0]} and layer.counter.calls == 0


def test_layers_that_hold_other_things_are_replaced() -> None:
    layer = WritingNorm(8, "none")
    layer.stats |= {"size": torch.Size([8]), "dtype": torch.float32, "op": F.gelu, "module": nn.Linear(2, 2)}
    layer.counter.self, layer.counter.op = layer.counter, torch.ops.aten.mul
    held = copy.copy(layer.stats)
    assert replace_norms(layer).counts == {"WritingNorm": 1}
    assert layer.stats == held and layer.stats["module"] is held["module"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left(name: str) -> None:
    make, reason = LEFT[name]
    layer = make()
    attributes, kind = vars(layer).copy(), type(layer)
    model = nn.Sequential(layer)
    report = replace_norms(model)
    assert not [entry for entry in report.replaced if entry.module is layer]
    (entry,) = [entry for entry in report.left if entry.module is layer]
    assert entry.text.startswith(reason)
    assert type(layer) is kind and vars(layer) == attributes
    assert f"1 {kind.__name__} left: {entry.text} (0)" in str(report)


def test_the_norm_in_a_norm_that_is_left_is_replaced() -> None:
    model = diffusers_norms.AdaLayerNorm(8, 10)
    expected = model(torch.ones(4, 8), torch.tensor(3))
    report = replace_norms(model)
    assert [entry.name for entry in report.replaced] == ["norm"]
    assert [entry.kind.__name__ for entry in report.left] == ["AdaLayerNorm"]
    torch.testing.assert_close(model(torch.ones(4, 8), torch.tensor(3)), expected)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(16), LlamaRMSNorm(16))
    assert len(replace_norms(model).replaced) == 2
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter is not model[0].bias else nn.init.zeros_(parameter)
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), F.rms_norm(F.layer_norm(x, (16,)), (16,), eps=1e-6))
