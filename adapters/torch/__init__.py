"""PyTorch: `adapter` is how its tensors meet cunorm, `modules` are layers, `replace` puts them into a model."""

from cunorm.adapters.torch.adapter import ADAPTER
from cunorm.adapters.torch.host import build
from cunorm.adapters.torch.modules import (
    GELU,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from cunorm.adapters.torch.replace import Report, replace_norms

__all__ = [
    "ADAPTER",
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
    "Report",
    "build",
    "replace_norms",
]
