"""TensorFlow: `adapter` is how its tensors meet cunorm."""

from cunorm.adapters.tensorflow.adapter import ADAPTER

__all__ = ["ADAPTER"]
