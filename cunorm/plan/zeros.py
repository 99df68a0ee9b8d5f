"""Scratch by which blocks tell each other numbers, or count: zero when it is used."""

from __future__ import annotations

from cunorm.plan.launches import Builder, Value

__all__ = ["reserve_counters", "reserve_parcels", "reserve_words"]

_WORD_BYTES, _STORE_BYTES = 8, 16
_THREADS, _STORES_PER_THREAD = 256, 4


def reserve_words(builder: Builder, count: int) -> dict[str, Value]:
    """Scratch for so many words, or one more, as a kernel is told of them that clears them itself."""
    pairs = -(-count * _WORD_BYTES // _STORE_BYTES)
    return {"words": builder.reserve("words", pairs, _STORE_BYTES), "word_pairs": pairs}


def reserve_counters(builder: Builder, count: int) -> str:
    """Scratch for so many counters of four bytes, or a few more, which a launch clears."""
    stores = -(-count * 4 // _STORE_BYTES)
    counters = builder.reserve("counters", stores, _STORE_BYTES)
    blocks = -(-stores // (_THREADS * _STORES_PER_THREAD))
    builder.launch("zeros", {"THREADS": _THREADS}, blocks, (_THREADS, 1), {"target": counters, "count": stores})
    return counters


def reserve_parcels(builder: Builder, turns: int, groups: int, parts_per_lane: int, numbers: int) -> dict[str, Value]:
    """The same for parcels of three numbers, two words each (see kernels/row_exchange.cuh).

    So many numbers of every block are kept, for so many turns; there are places for as many blocks as the lanes of a
    warp can collect.
    """
    return reserve_words(builder, turns * groups * 32 * parts_per_lane * -(-numbers // 3) * 2)
