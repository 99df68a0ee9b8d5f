"""``python -m cunorm build-torch``: PyTorch's calls compiled, for all processes to come."""

from __future__ import annotations

import sys
import time

from cunorm.cli import UsageError, output

__all__ = ["run"]


def run(*, remove: bool) -> None:
    """Build, or remove what was built, and say where it is."""
    try:
        from cunorm.adapters.torch import host
    except ImportError as error:
        raise UsageError(f"PyTorch cannot be imported: {error}") from error
    try:
        if remove:
            folder, count = host.library().parent, host.remove()
            output.line(f"{count} removed from {folder}")
            return
        is_there = host.library().exists()
        if not is_there:
            print("compiling, which takes about half a minute", file=sys.stderr)
        begin = time.monotonic()
        path = host.build()
    except (RuntimeError, OSError) as error:
        raise UsageError(str(error)) from error
    output.line(f"built before: {path}" if is_there else f"{path}, in {time.monotonic() - begin:.0f} seconds")
