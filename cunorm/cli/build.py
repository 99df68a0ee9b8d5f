"""``build-cupy``, ``build-torch`` and ``build-tensorflow``: a framework's calls compiled, for all processes to come."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from cunorm.adapters import compiled
from cunorm.cli import UsageError, output

__all__ = ["run"]


def run(*, library: compiled.Library, remove: bool) -> None:
    """Build, or remove what was built, and say where it is."""
    try:
        if remove:
            output.line(f"{library.remove()} removed from {library.folder()}")
            return
        try:
            host = importlib.import_module(f"cunorm.adapters.{library.package}.host")
        except ImportError as error:
            raise UsageError(f"{library.framework} cannot be imported: {error}") from error
        before = _made(host.library())
        if before is None:
            print("compiling, which takes up to half a minute", file=sys.stderr)
        begin = time.monotonic()
        path = host.build()
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(str(error)) from error
    is_new = _made(path) != before  # what was there and did not load is made again
    output.line(f"{path}, in {time.monotonic() - begin:.0f} seconds" if is_new else f"built before: {path}")


def _made(path: Path) -> int | None:
    """When the file was made, in nanoseconds; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None
