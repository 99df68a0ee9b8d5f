"""Words by which blocks tell each other numbers, or count: scratch that is zero when the kernel begins that uses it."""

from __future__ import annotations

from cunorm.plan.launches import Builder

__all__ = ["reserve_words"]

_WORD_BYTES, _STORE_BYTES = 8, 16
_THREADS, _STORES_PER_THREAD = 256, 4


def reserve_words(builder: Builder, count: int) -> str:
    """Scratch for so many words, or one more, which a launch clears."""
    stores = -(-count * _WORD_BYTES // _STORE_BYTES)
    words = builder.reserve("words", stores, _STORE_BYTES)
    blocks = -(-stores // (_THREADS * _STORES_PER_THREAD))
    builder.launch("zeros", {"THREADS": _THREADS}, blocks, (_THREADS, 1), {"target": words, "count": stores})
    return words
