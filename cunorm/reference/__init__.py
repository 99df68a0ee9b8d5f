"""The NumPy definition of each op and of its gradient: what the tests compare with, and what runs on the CPU.

``rows`` has layer norm and RMS norm, ``channels`` instance, group and batch norm with their statistics, ``elementwise``
an activation on its own; each opens with its formulas. ``activations`` has the functions and derivatives that all of
them apply. ``tiles`` and ``sums`` are how they go through a tensor, and add it up.

Elements are float32 (float64 for float64 tensors). What exists once a row or once a column, such as the sums
that are carried from tile to tile, is float64: it is few, and long sums stay accurate.
"""

from cunorm.reference.channels import channel_norm, channel_norm_backward, channel_statistics, update_running
from cunorm.reference.elementwise import pointwise, pointwise_backward
from cunorm.reference.rows import row_norm, row_norm_backward

__all__ = [
    "channel_norm",
    "channel_norm_backward",
    "channel_statistics",
    "pointwise",
    "pointwise_backward",
    "row_norm",
    "row_norm_backward",
    "update_running",
]
