"""`replace_norms` in whole models: they compute the same, and learn the same."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import nn
from torch_cases import DEVICES, graphs_of

from cunorm.adapters.torch import replace_norms
from cunorm.bench import models
from cunorm.bench.suites import MODELS

pytestmark = pytest.mark.usefixtures("tiny_models")


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 96}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def gemma() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=96)
    return transformers.GemmaForCausalLM(config)


class Denoiser(nn.Module):
    """A diffusion model with a loss of its own: it learns to take noise away."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_labels=10)
        self.unet = UNet2DModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            attention_head_dim=8,
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        noisy = pixel_values + 0.1 * pixel_values.flip(0)
        denoised = self.unet(noisy, labels.to(pixel_values.dtype)).sample
        return types.SimpleNamespace(loss=F.mse_loss(denoised, pixel_values))


# Model -> how it is made, the shape of its input, and the classes and numbers of the layers that are replaced.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]] = {
    name: (lambda name=name: models.build(name, small=True), MODELS[name][1], counts)  # type: ignore[misc]
    for name, counts in {
        "ResNet-50": {"BatchNorm2d": 9},
        "Swin-B": {"LayerNorm": 7, "GELUActivation": 2},
        "ConvNeXt-B": {"ConvNextLayerNorm": 4, "LayerNorm": 1, "GELUActivation": 2},
        "ViT-L": {"LayerNorm": 5, "GELUActivation": 2},
        "BERT-large": {"LayerNorm": 6, "GELUActivation": 3},
        "GPT-2 medium": {"LayerNorm": 5, "NewGELUActivation": 2},
        "Llama-like 1B": {"LlamaRMSNorm": 5},
    }.items()
}
SMALL |= {
    "T5": (t5, (2, 8), {"T5LayerNorm": 7, "NewGELUActivation": 2}),
    "Gemma": (gemma, (2, 8), {"GemmaRMSNorm": 5, "GELUTanh": 2}),
    "U-Net": (Denoiser, (2, 3, 8, 8), {"GroupNorm": 21}),
}


def pair(name: str, device: str, dtype: torch.dtype, compiled: bool = False) -> list[nn.Module]:
    """A model as it is, and the same one after replace_norms."""
    make, _, counts = SMALL[name]
    torch.manual_seed(0)
    theirs = make().train().to(device, dtype)
    ours = copy.deepcopy(theirs)
    report = replace_norms(ours, compiled=compiled)
    assert report.counts == counts, report
    assert not report.left, report
    return [theirs, ours]


def first_step(model: nn.Module, shape: tuple[int, ...]) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients one after the other."""
    step = models.step(model, shape)
    torch.manual_seed(1)  # dropout
    loss = float(step())
    return loss, torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SMALL)
def test_models_compute_the_same(name: str, device: str) -> None:
    shape = SMALL[name][1]
    (loss, gradients), (our_loss, ours) = (first_step(model, shape) for model in pair(name, device, torch.float32))
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert distance(ours, gradients) < 1e-4
    # Sixteen bits are rounded at every operation of the model: what counts is how far from float32 that leads.
    (low_loss, low), (our_low_loss, our_low) = (
        first_step(model, shape) for model in pair(name, device, torch.bfloat16)
    )
    assert our_low_loss == pytest.approx(low_loss, rel=0.01)
    assert distance(our_low, gradients) < 1.5 * distance(low, gradients) + 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SMALL)
def test_training_goes_the_same_way(name: str, device: str) -> None:
    losses: list[list[float]] = []
    for model in pair(name, device, torch.float32):
        step = models.step(model, SMALL[name][1])
        torch.manual_seed(1)
        losses.append([float(step()) for _ in range(50)])
    theirs, ours = losses
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_a_compiled_model_trains_as_the_eager_one() -> None:
    theirs, ours = pair("Llama-like 1B", "cpu", torch.float32, compiled=True)
    compiled, graphs = graphs_of(ours)
    shape = SMALL["Llama-like 1B"][1]
    steps = models.step(theirs, shape), models.step(ours, shape, compiled)
    losses = [[float(step()) for _ in range(3)] for step in steps]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert any("cunorm.rms_norm" in graph for graph in graphs)
