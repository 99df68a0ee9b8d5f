"""Fused normalization and GELU kernels for NVIDIA GPUs, for the tensors of any framework.

>>> import numpy as np
>>> y = cunorm.layer_norm(np.random.randn(4, 8).astype(np.float32))
>>> y.shape
(4, 8)
"""

__version__ = "0.1.0"  # first, since modules below write it down

import importlib
import os
from typing import TYPE_CHECKING, Any

# In a checkout, kernels/ and adapters/ stand beside this folder; installed, they are inside it. Python finds the
# checkout first when it is started there, whatever is installed, so the parent folder has to be searched too.
if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    __path__.append(os.path.dirname(__path__[0]))

from cunorm.batch_statistics import batch_norm_stats, merge_batch_norm_stats
from cunorm.channels import (
    batch_norm,
    batch_norm_backward,
    group_norm,
    group_norm_backward,
    instance_norm,
    instance_norm_backward,
)
from cunorm.experiments import experiment
from cunorm.explanation import explain
from cunorm.pointwise import gelu, gelu_backward
from cunorm.rows import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from cunorm.tuning import tune

__all__ = [
    "__version__",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_stats",
    "experiment",
    "explain",
    "gelu",
    "gelu_backward",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "merge_batch_norm_stats",
    "rms_norm",
    "rms_norm_backward",
    "tune",
]

# TensorFlow's AutoGraph would otherwise translate the source of these at their first call inside a tf.function.
for _name in __all__[1:]:
    globals()[_name].autograph_info__ = {}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "bench":  # which few calls need
            return importlib.import_module("cunorm.bench")
        raise AttributeError(f"module 'cunorm' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext cunorm`` in a notebook; ``%cunorm?`` then says what there is."""
    from cunorm.notebook import load

    load(shell)
