"""CuPy: `adapter` is how its arrays meet cunorm, and `build` compiles what a call costs the host."""

from cunorm.adapters.cupy.adapter import ADAPTER
from cunorm.adapters.cupy.host import build

__all__ = ["ADAPTER", "build"]
