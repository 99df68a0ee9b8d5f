"""Activations on their own, of each element.

With a bias along the last axis, and with the gradient::

    y     = activation(x + bias)
    dx    = dy * activation'(x + bias)
    dbias = sum of dx over the other axes
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.reference import activations
from cunorm.reference.sums import column_sums, ones_of
from cunorm.reference.tiles import Block, Tiling, flat, load_tile, result_array, store_tile

__all__ = ["pointwise", "pointwise_backward"]

Array = NDArray[Any]


def pointwise(x: Array, bias: Array | None = None, *, activation: str, out: Array | None = None) -> Array:
    """An activation of ``x + bias``, the sum in float32 (float64 for float64 `x`).

    Parameters
    ----------
    x : array of float16, bfloat16, float32 or float64
        Any shape, any strides.
    bias : array of any float dtype, optional
        One number for each place along the last axis of `x`.
    activation : str
        One of `cunorm.problem.ACTIVATIONS`.
    out : array, optional
        Where to write the result; any strides. It may be `x` itself.

    Returns
    -------
    y : array
        Shape and dtype of `x`.

    Examples
    --------
    >>> pointwise(np.array([[-1.0, 0.0, 1.0]]), np.array([0.0, 0.0, 1.0]), activation="gelu").round(3)
    array([[-0.159,  0.   ,  1.954]])
    """
    tiling = Tiling(x, _last_axis(x))
    y = np.empty(x.shape, x.dtype) if out is None else out
    activate, b = activations.FUNCTIONS[activation].value, flat(bias, tiling.compute)
    x_rows, y_rows, scratch = tiling.view(x), tiling.view(y), tiling.scratch()
    columns = list(tiling.columns())
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            for column in columns:
                store_tile(activate(_biased(x_rows, row, column, b, scratch)), y_rows, row, column)
    return y


def pointwise_backward(
    dy: Array,
    x: Array,
    bias: Array | None = None,
    *,
    activation: str,
    output_mask: tuple[bool, bool] = (True, True),
    dx_out: Array | None = None,
    dbias_out: Array | None = None,
) -> tuple[Array | None, Array | None]:
    """Gradients of `pointwise` with respect to `x` and `bias`.

    Parameters
    ----------
    dy : array
        Gradient of the result; shape of `x`.
    x, bias, activation
        As given to `pointwise`.
    output_mask : tuple of two bool
        Which of `dx`, `dbias` to compute; there is no `dbias` without a bias.
    dx_out, dbias_out : array, optional
        Where to write the results; any strides. `dx_out` may be `dy` or `x` itself.

    Returns
    -------
    dx : array or None
        Shape and dtype of `x`.
    dbias : array or None
        Shape and dtype of `bias`: the sums of `dx` before it is rounded.

    Examples
    --------
    >>> dx, dbias = pointwise_backward(np.ones((2, 1)), np.zeros((2, 1)), np.zeros(1), activation="gelu")
    >>> dx.tolist(), dbias.tolist()
    ([[0.5], [0.5]], [1.0])
    """
    tiling = Tiling(x, _last_axis(x))
    activated, b = activations.FUNCTIONS[activation], flat(bias, tiling.compute)
    want_dx, want_dbias = output_mask
    dx = result_array(want_dx, dx_out, x.shape, x.dtype)
    dbias = None if bias is None else result_array(want_dbias, dbias_out, bias.shape, bias.dtype)
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    sums = np.zeros(0 if dbias is None else tiling.column_count)
    scratch, dy_scratch, ones = tiling.scratch(), tiling.scratch(), ones_of(tiling.compute)
    columns = list(tiling.columns())
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            for column in columns:
                gradient = load_tile(dy_rows, row, column, dy_scratch)
                activated.turn_into_gradient(gradient, _biased(x_rows, row, column, b, scratch))
                if dbias is not None:
                    sums[column.span] += column_sums(gradient, ones)
                if dx_rows is not None:
                    store_tile(gradient, dx_rows, row, column)
        if dbias is not None:
            dbias[...] = sums.astype(tiling.compute, copy=False)
    return dx, dbias


def _last_axis(x: Array) -> tuple[int, ...]:
    return (x.ndim - 1,) if x.ndim else ()


def _biased(rows: Array, row: Block, column: Block, b: Array | None, scratch: Array) -> Array:
    """A tile of what an activation is taken of."""
    z = load_tile(rows, row, column, scratch)
    if b is not None:
        z += b[column.span]
    return z
