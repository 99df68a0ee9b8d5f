"""Times that others have published of rows that the suites have: of other GPUs and methods, to look at, not to rank.

nv_norms: from the README of NVIDIA's atex (https://github.com/NVIDIA/atex, ``atex/nv_norms/README.md`` at commit
3a5fd9d, of May 2023), which says how they were measured: a training step of TensorFlow in mixed float16, by the host's
clock, the mean of steps that follow each other without clearing the cache. A step is forward, the sum of y, and all
gradients; casts of x from float32 and of dx to it are in it. The row that is nearest is float16, both directions.
"""

from __future__ import annotations

from cunorm.bench.suites import LAYOUTS, NV_INSTANCE_NORM, NV_NORMS, Row

__all__ = ["NV_NORMS_GPUS", "nv_norms_milliseconds"]

NV_NORMS_GPUS = ("H100", "A100")

_LAYER_NORM = (
    (10.61, 13.82),
    (6.26, 6.33),
    (4.73, 4.32),
    (5.84, 4.50),
    (1.95, 2.81),
    (0.74, 0.59),
    (1.78, 2.78),
    (2.36, 3.36),
    (1.15, 1.69),
)
_INSTANCE_NORM = (  # in either of the layouts
    ((3.85, 5.20), (6.05, 7.51)),
    ((7.57, 10.53), (8.69, 12.53)),
    ((6.16, 9.27), (8.70, 12.35)),
    ((2.17, 2.98), (4.63, 5.36)),
    ((2.17, 3.01), (4.66, 5.35)),
    ((3.51, 5.32), (5.98, 7.65)),
    ((6.38, 10.37), (8.63, 12.33)),
    ((0.91, 1.18), (3.57, 3.76)),
    ((1.71, 2.57), (4.25, 5.01)),
    ((0.69, 0.77), (0.70, 0.78)),
)

_MILLISECONDS = {("layer_norm", "", shape): times for shape, times in zip(NV_NORMS, _LAYER_NORM, strict=True)} | {
    ("instance_norm", layout, shape): times
    for shape, of_layouts in zip(NV_INSTANCE_NORM, _INSTANCE_NORM, strict=True)
    for layout, times in zip(LAYOUTS, of_layouts, strict=True)
}


def nv_norms_milliseconds(row: Row) -> tuple[float, ...] | None:
    """What nv_norms takes for the problem on each of NV_NORMS_GPUS; None where nothing is published."""
    if (row.dtype, row.direction) != ("float16", "both"):
        return None
    return _MILLISECONDS.get((row.op, row.layout, row.shape))
