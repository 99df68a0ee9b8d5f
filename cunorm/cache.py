"""Where cunorm keeps what is worth having the next time: what tuning found, compiled calls, emulator executables."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["cache_folder", "digest"]


def cache_folder() -> Path | None:
    """``$CUNORM_CACHE_DIR``, else ``$XDG_CACHE_HOME/cunorm``, else ``~/.cache/cunorm``; None without a home folder."""
    folder = os.environ.get("CUNORM_CACHE_DIR")
    if folder:
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():  # others are to be ignored, by the specification of that variable
        return cache / "cunorm"
    try:
        return Path.home() / ".cache" / "cunorm"
    except RuntimeError:
        return None


def digest(*parts: object) -> str:
    """A part of the name of a file that was made of ``parts``, which differ in their ``repr`` where they differ."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
