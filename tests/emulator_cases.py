"""Short kernels for tests of ``cunorm.emulator``.

:func:`launch` wraps a kernel's body and calls the body's first line line 1 of ``kernels/example.cu``, so that reports
can be checked down to the line.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from cunorm.emulator import EmulatorError, Pointer, Watch, Writer, run

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None or not sys.platform.startswith("linux"), reason="the emulator needs g++ and Linux"
)

FLOAT_IN_OUT = "const float* x; float* y; long long n;"


def launch(
    body: str,
    buffers: Sequence[np.ndarray],
    values: Sequence[Pointer | int | float | None] = (),
    *,
    arguments: str = FLOAT_IN_OUT,
    before: str = "",
    pointers: Sequence[Pointer | None] | None = None,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 32,
    shared_bytes: int = 0,
    seed: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
    timeout: float = 60.0,
    watch: Watch | None = None,
) -> Writer | None:
    """Run a kernel of which only the body is given; its fields are a pointer to each buffer, then `values`."""
    source = (
        f"#define BIAS 1\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{before}\n"
        f"struct Arguments {{ {arguments} }};\n"
        f'extern "C" __global__ void __launch_bounds__(1024) example(const Arguments arguments) {{\n'
        f'#line 1 "kernels/example.cu"\n{body}\n}}\n'
    )
    return run(
        source,
        "example",
        grid=(grid, 1, 1) if isinstance(grid, int) else grid,
        block=(block, 1, 1) if isinstance(block, int) else block,
        shared_bytes=shared_bytes,
        fields=[*(pointers if pointers is not None else map(Pointer, range(len(buffers)))), *values],
        buffers=buffers,
        seed=seed,
        cluster=cluster,
        cooperative=cooperative,
        timeout=timeout,
        watch=watch,
    )


def x_and_y(size: int) -> list[np.ndarray]:
    return [np.zeros(size, dtype=np.float32) for _ in range(2)]


def report(body: str, buffers: Sequence[np.ndarray], *args: object, **kwargs: object) -> str:
    """First line of the error that a kernel must raise."""
    with pytest.raises(EmulatorError) as caught:
        launch(body, buffers, *args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value).splitlines()[0]
