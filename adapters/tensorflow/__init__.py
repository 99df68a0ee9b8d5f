"""TensorFlow: `adapter` is how its tensors meet cunorm, and `fused` what NVIDIA's ``nv_norms`` offered."""

from cunorm.adapters.tensorflow.adapter import ADAPTER
from cunorm.adapters.tensorflow.fused import fused_instance_norm, fused_layer_norm

__all__ = ["ADAPTER", "fused_instance_norm", "fused_layer_norm"]
