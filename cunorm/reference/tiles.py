"""How a tensor is gone through: tile by tile, none of it copied as a whole.

A tensor is seen as a matrix: the kept axes in C order are its rows, the reduced axes its columns. `Tiling` cuts it into
tiles that fit the cache, and each is loaded into a scratch array (where any dtype, stride or order of axes becomes
contiguous float32), finished there, and stored once. Rows longer than a tile are read twice, once for their statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Tiling", "blocks_of", "flat", "index_of", "load_tile", "result_array", "store_tile"]

Array = NDArray[Any]

# Elements of a tile: 512 KB of float32. With 1 MB of second-level cache and a tensor of 4096 x 4096, a quarter of it
# takes 1.3 times as long, because of the interpreter's time per tile, and twice as much gains nothing.
_TILE = 1 << 17

# Rows of a tile at least, where neighbours in memory belong to different rows, even if a row then takes several tiles:
# short runs of memory defeat caches and prefetching. For axis 0 of 20000 x 1000, 16 rows take 2.4 times as long.
_MIN_ROWS_OF_TRANSPOSED_TILE = 256


@dataclass(frozen=True)
class Block:
    """A run of consecutive rows, or of consecutive columns."""

    slices: tuple[slice, ...]  # find the run among the axes it was cut from
    shape: tuple[int, ...]  # of what `slices` find
    span: slice  # finds the run in the flattened array

    @property
    def size(self) -> int:
        return int(self.span.stop - self.span.start)


class Tiling:
    """Sees tensors of one shape as a matrix, and cuts it into tiles of at most `_TILE` elements.

    A tile is a block of rows times a block of columns. It holds whole rows wherever they fit.
    """

    def __init__(self, x: Array, axis: tuple[int, ...]) -> None:
        kept = tuple(a for a in range(x.ndim) if a not in axis)
        self.compute: np.dtype[Any] = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        self.order = kept + axis
        self.row_shape = tuple(x.shape[a] for a in kept)
        self.column_shape = tuple(x.shape[a] for a in axis)
        self.row_count = math.prod(self.row_shape)
        self.column_count = math.prod(self.column_shape)
        # The axis whose neighbours are nearest in memory.
        moving = [a for a in reversed(range(x.ndim)) if x.shape[a] > 1 and x.strides[a]]
        transposed = bool(moving) and min(moving, key=lambda a: abs(x.strides[a])) not in axis
        min_rows = _MIN_ROWS_OF_TRANSPOSED_TILE if transposed else 1
        self.tile_rows = max(1, min(self.row_count, max(_TILE // max(1, self.column_count), min_rows)))
        self.tile_columns = max(1, min(self.column_count, _TILE // self.tile_rows))

    def view(self, array: Array) -> Array:
        """The tensor with its kept axes first."""
        return array.transpose(self.order)

    def rows(self) -> Iterator[Block]:
        return blocks_of(self.row_shape, self.tile_rows)

    def columns(self) -> Iterator[Block]:
        return blocks_of(self.column_shape, self.tile_columns)

    def scratch(self) -> Array:
        return np.empty(self.tile_rows * self.tile_columns, self.compute)


def blocks_of(shape: tuple[int, ...], limit: int) -> Iterator[Block]:
    """Cut an index space, in C order, into consecutive blocks of at most `limit` elements."""
    if 0 in shape:
        return
    # The trailing axes that fit are whole in each block, the one before them is cut, the rest are walked.
    cut, inner = len(shape), 1
    while cut > 0 and inner * shape[cut - 1] <= limit:
        cut -= 1
        inner *= shape[cut]
    if cut == 0:
        yield Block((slice(None),) * len(shape), shape, slice(0, inner))
        return
    length = shape[cut - 1]
    pieces = _ceil_div(length, limit // inner)
    step = _ceil_div(length, pieces)
    start = 0
    for outer in np.ndindex(shape[: cut - 1]):
        for first in range(0, length, step):
            count = min(step, length - first)
            walked = tuple(slice(i, i + 1) for i in outer)
            index = (*walked, slice(first, first + count)) + (slice(None),) * (len(shape) - cut)
            block_shape = (1,) * len(outer) + (count,) + shape[cut:]
            yield Block(index, block_shape, slice(start, start + count * inner))
            start += count * inner


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def index_of(*blocks: Block) -> tuple[Any, ...]:
    """Where blocks of successive axes meet. The ellipsis makes it a view, even of a 0-d array."""
    return (*(s for block in blocks for s in block.slices), ...)


def load_tile(rows: Array, row: Block, column: Block, scratch: Array) -> Array:
    """Copy a tile into scratch, as a contiguous matrix of the compute dtype."""
    tile = rows[index_of(row, column)]
    matrix = scratch[: row.size * column.size]
    np.copyto(matrix.reshape(tile.shape), tile, casting="unsafe")
    return matrix.reshape(row.size, column.size)


def store_tile(matrix: Array, rows: Array, row: Block, column: Block) -> None:
    """Copy a finished tile out, rounding once."""
    tile = rows[index_of(row, column)]
    np.copyto(tile, matrix.reshape(tile.shape), casting="unsafe")


def result_array(wanted: bool, out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """Where to write a result: the array that is given for it, or a new one; None where it is not wanted."""
    if not wanted:
        return None
    return np.empty(shape, dtype) if out is None else out


def flat(parameter: Array | None, dtype: np.dtype[Any]) -> Array | None:
    return None if parameter is None else parameter.astype(dtype, copy=False).reshape(-1)
