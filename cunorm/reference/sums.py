"""Sums of tiles, and the mean and variance of rows: in levels, so that long sums stay accurate."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments", "column_sums", "ones_of", "row_sums"]

Array = NDArray[Any]

# How many columns, or groups of rows, are summed in the compute dtype before their sums are summed. Short enough that
# one outlier hides few of its neighbours.
_RUN = 256
_GROUPS = 32


def ones_of(dtype: np.dtype[Any]) -> Array:
    """Summands' weights: a product with ones is the fastest sum that NumPy has."""
    return np.ones(2 * max(_RUN, _GROUPS), dtype)


def row_sums(matrix: Array, ones: Array) -> Array:
    """Sums over columns, in two levels, the second of float64."""
    rows, columns = matrix.shape
    split = columns - columns % _RUN if columns >= 2 * _RUN else 0
    sums: Array = (matrix[:, split:] @ ones[: columns - split]).astype(np.float64)
    if split:
        runs = matrix[:, :split].reshape(rows, split // _RUN, _RUN)
        sums += np.add.reduce(runs @ ones[:_RUN], axis=1, dtype=np.float64)
    return sums


def column_sums(matrix: Array, ones: Array) -> Array:
    """Sums over rows, in two levels or more."""
    rows, columns = matrix.shape
    if rows < 2 * _GROUPS:
        return matrix[0] if rows == 1 else np.asarray(ones[:rows] @ matrix)
    grouped = rows // _GROUPS
    split = grouped * _GROUPS
    partial = ones[:_GROUPS] @ matrix[:split].reshape(_GROUPS, grouped * columns)
    return np.asarray(column_sums(partial.reshape(grouped, columns), ones) + ones[: rows - split] @ matrix[split:])


class Moments:
    """Mean and variance of rows, gathered block of columns by block of columns.

    The mean is the unevaluated sum ``shift + offset``: `shift` is what elements should be differenced from, and
    `offset`, the mean of those differences, corrects it for its rounding. Blocks are combined as in Chan, Golub,
    LeVeque 1983 (The American Statistician 37:242).
    """

    def __init__(self) -> None:
        self.count = 0
        self.shift: Array = np.zeros(())
        self.offset: Array = np.zeros(())
        self.squares: Array = np.zeros(())

    @property
    def variance(self) -> Array:
        return np.asarray(np.maximum(self.squares / self.count, 0.0))

    def subtract_mean(self, d: Array, scratch: Array, ones: Array) -> None:
        """Take in a block of columns, and leave in it the differences from its own `shift`."""
        n = d.shape[1]
        rounded_mean = (row_sums(d, ones) / n).astype(d.dtype)
        d -= rounded_mean[:, None]
        shift = rounded_mean.astype(np.float64)
        offset = row_sums(d, ones) / n
        squares = row_sums(np.multiply(d, d, out=scratch[: d.size].reshape(d.shape)), ones) - n * offset * offset
        if not self.count:
            self.count, self.shift, self.offset, self.squares = n, shift, offset, squares
            return
        total = self.count + n
        difference = (shift - self.shift) + (offset - self.offset)
        self.squares = self.squares + squares + difference * difference * (self.count * n / total)
        offset = self.offset + difference * (n / total)
        self.shift, old_shift = (self.shift + offset).astype(d.dtype).astype(np.float64), self.shift
        self.offset = offset + (old_shift - self.shift)
        self.count = total
