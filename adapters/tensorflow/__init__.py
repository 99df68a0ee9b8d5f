"""TensorFlow: `adapter` is how its tensors meet cunorm, and `fused` what NVIDIA's ``nv_norms`` offered.

`build` compiles an op for both, which waits for nothing.
"""

from cunorm.adapters.tensorflow.adapter import ADAPTER
from cunorm.adapters.tensorflow.fused import fused_instance_norm, fused_layer_norm
from cunorm.adapters.tensorflow.host import build

__all__ = ["ADAPTER", "build", "fused_instance_norm", "fused_layer_norm"]
