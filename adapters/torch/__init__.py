"""PyTorch: `adapter` is how its tensors meet cunorm."""

from cunorm.adapters.torch.adapter import ADAPTER

__all__ = ["ADAPTER"]
