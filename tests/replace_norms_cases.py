"""Layers as model libraries write them, and what each of them computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.models import normalization as diffusers_norms
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm


class LayerNorm2d(nn.LayerNorm):
    """As timm has it: channels behind the samples."""

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine)
        self._fast_norm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class RmsNorm(nn.Module):
    """As timm has it."""

    def __init__(self, channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.normalized_shape = (channels,)
        self.eps = eps
        self.elementwise_affine = affine
        if affine:
            self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return x if self.weight is None else x * self.weight


class GroupNorm(nn.GroupNorm):
    """As timm has it: the arguments in another order."""

    def __init__(self, num_channels: int, num_groups: int = 4, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_groups, num_channels, eps=eps, affine=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class GroupNorm1(GroupNorm):
    """As timm has it: one group, which is layer norm of all but the samples."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels, 1)


class InitializedLayerNorm(nn.LayerNorm):
    """Another constructor, the same forward."""

    def __init__(self) -> None:
        super().__init__(16, eps=1e-3)


class CheckedBatchNorm(nn.BatchNorm2d):
    """Another check, the same forward."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.shape[0] > 100:
            raise ValueError("more than 100 samples")


ROWS, IMAGES = (2, 3, 16), (2, 16, 5, 3)
RECOGNIZED: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "Llama": (lambda: LlamaRMSNorm(16), "cunorm.rms_norm", ROWS),
    "Mistral": (lambda: MistralRMSNorm(16, eps=1e-5), "cunorm.rms_norm", ROWS),
    "Qwen": (lambda: Qwen3RMSNorm(16), "cunorm.rms_norm", (2, 4, 3, 16)),
    "Phi": (lambda: Phi3RMSNorm(16), "cunorm.rms_norm", (6, 16)),
    "GPT-OSS": (lambda: GptOssRMSNorm(16), "cunorm.rms_norm", ROWS),
    "Gemma": (lambda: GemmaRMSNorm(16), "cunorm.rms_norm, weight_offset=1.0", ROWS),
    "T5": (lambda: T5LayerNorm(16), "cunorm.rms_norm", ROWS),
    "Cohere": (lambda: CohereLayerNorm(16), "cunorm.layer_norm", ROWS),
    "OLMo": (lambda: OlmoLayerNorm(16), "cunorm.layer_norm", ROWS),
    "ConvNeXt": (lambda: ConvNextLayerNorm(16, data_format="channels_first"), "cunorm.layer_norm, axis=1", IMAGES),
    "ConvNeXt, last": (lambda: ConvNextLayerNorm(16), "cunorm.layer_norm", ROWS),
    "ViTDet": (lambda: VitDetLayerNorm(16), "cunorm.layer_norm, axis=1", IMAGES),
    "diffusers": (lambda: diffusers_norms.RMSNorm(16, 1e-6), "cunorm.rms_norm", ROWS),
    "diffusers, bias": (lambda: diffusers_norms.RMSNorm(16, 1e-6, bias=True), "cunorm.rms_norm", ROWS),
    "diffusers, plain": (lambda: diffusers_norms.RMSNorm(16, 1e-6, False), "cunorm.rms_norm", ROWS),
    "diffusers, float32": (lambda: diffusers_norms.FP32LayerNorm(16), "cunorm.layer_norm", ROWS),
    "timm, 2d": (lambda: LayerNorm2d(16), "cunorm.layer_norm, axis=1", IMAGES),
    "timm, 2d, plain": (lambda: LayerNorm2d(16, affine=False), "cunorm.layer_norm, axis=1", IMAGES),
    "timm, RMS": (lambda: RmsNorm(16), "cunorm.rms_norm", ROWS),
    "timm, RMS, plain": (lambda: RmsNorm(16, affine=False), "cunorm.rms_norm", ROWS),
    "timm, groups": (lambda: GroupNorm(16), "cunorm.group_norm", IMAGES),
    "timm, one group": (lambda: GroupNorm1(16), "cunorm.group_norm", IMAGES),
    "a constructor": (InitializedLayerNorm, "cunorm.layer_norm", ROWS),
    "a check": (lambda: CheckedBatchNorm(16), "cunorm.batch_norm", IMAGES),
    "gelu": (lambda: ACT2FN["gelu"], "cunorm.gelu, approximate='none'", ROWS),
    "gelu_python": (lambda: ACT2FN["gelu_python"], "cunorm.gelu, approximate='none'", ROWS),
    "gelu_new": (lambda: ACT2FN["gelu_new"], "cunorm.gelu, approximate='tanh'", ROWS),
    "gelu_fast": (lambda: ACT2FN["gelu_fast"], "cunorm.gelu, approximate='tanh'", IMAGES),
    "gelu_pytorch_tanh": (lambda: ACT2FN["gelu_pytorch_tanh"], "cunorm.gelu, approximate='tanh'", ROWS),
    "gelu_accurate": (lambda: ACT2FN["gelu_accurate"], "cunorm.gelu, approximate='tanh'", (7,)),
}


def randomize(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) + 1)
    return module
