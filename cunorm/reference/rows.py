"""Layer norm and RMS norm, over rows.

Layer norm (Ba, Kiros, Hinton 2016, arXiv:1607.06450), for the columns of one row x, with n columns::

    mean = sum(x) / n
    var  = sum((x - mean)^2) / n
    rstd = 1 / sqrt(var + eps)
    xhat = (x - mean) * rstd
    z    = xhat * w + bias, with w = weight_offset + weight
    y    = activation(z)

and RMS norm (Zhang, Sennrich 2019, arXiv:1910.07467), which leaves out the mean::

    rstd = 1 / sqrt(sum(x^2) / n + eps)
    xhat = x * rstd

With a residual, x is residual_out = x + residual, rounded to the dtype of x. The gradient, with
dz = dy * activation'(z) and g = dz * w::

    dx      = rstd * (g - sum(g) / n - xhat * sum(g * xhat) / n) + dresidual_out      (no sum(g) for RMS norm)
    dweight = sum over rows of dz * xhat
    dbias   = sum over rows of dz
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.problem import Norm
from cunorm.reference import activations
from cunorm.reference.sums import Moments, column_sums, ones_of, row_sums
from cunorm.reference.tiles import Block, Tiling, flat, index_of, load_tile, result_array, store_tile

__all__ = ["row_norm", "row_norm_backward"]

Array = NDArray[Any]

_LAYER_NORM = Norm()


def row_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    axis: tuple[int, ...],
    eps: float,
    norm: Norm = _LAYER_NORM,
    residual: Array | None = None,
    out: Array | None = None,
    residual_out: Array | None = None,
    mean_out: Array | None = None,
    rstd_out: Array | None = None,
) -> tuple[Array, Array | None, Array | None, Array]:
    """Normalize over `axis`, scale and shift, activate: layer norm and RMS norm, as `norm` says.

    Parameters
    ----------
    x : array of float16, bfloat16, float32 or float64
        Any shape, any strides.
    weight, bias : array of any float dtype, optional
        Of the shape of the reduced axes.
    axis : tuple of int
        Axes to reduce: sorted, not negative, adjacent or not.
    eps : float
        Added to the variance, or to the mean square.
    norm : Norm
        The kind of norm, its weight_offset (which counts only where there is a weight) and its activation.
    residual : array, optional
        Added before; shape and dtype of `x`.
    out, residual_out, mean_out, rstd_out : array, optional
        Where to write the results; any strides. `out` may be `x` itself.

    Returns
    -------
    y : array
        Shape and dtype of `x`.
    residual_out : array or None
        ``x + residual``, in the dtype of `x`: what was normalized. None without a residual.
    mean, rstd : array of float32 (float64 for float64 `x`)
        Shape of `x` without the reduced axes; ``rstd = 1 / sqrt(var + eps)`` with the biased variance, or with the mean
        square for RMS norm, which has no mean (None). Both are NaN where the reduced axes are empty.

    Notes
    -----
    Ba, Kiros, Hinton 2016, arXiv:1607.06450, equations 3 and 4; Zhang, Sennrich 2019, arXiv:1910.07467, equation 4. The
    variance is that of the differences from the mean, corrected for the rounding of the mean, so rows with ``|mean|``
    far above their deviation come out right. Arguments are not checked.

    Examples
    --------
    >>> x = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 8.0]])
    >>> y, _, mean, rstd = row_norm(x, axis=(1,), eps=0.0)
    >>> y.round(3)
    array([[-1.225,  0.   ,  1.225],
           [-0.707, -0.707,  1.414]])
    >>> mean
    array([2., 4.])
    >>> row_norm(x, axis=(1,), eps=0.0, norm=Norm(centered=False))[0].round(3)
    array([[0.463, 0.926, 1.389],
           [0.408, 0.408, 1.633]])
    """
    tiling = Tiling(x, axis)
    compute = tiling.compute
    y = np.empty(x.shape, x.dtype) if out is None else out
    if residual is not None and residual_out is None:
        residual_out = np.empty(x.shape, x.dtype)
    mean = (np.empty(tiling.row_shape, compute) if mean_out is None else mean_out) if norm.centered else None
    rstd = np.empty(tiling.row_shape, compute) if rstd_out is None else rstd_out
    if not tiling.column_count:
        if mean is not None:
            mean.fill(np.nan)
        rstd.fill(np.nan)
        return y, residual_out, mean, rstd

    w, b = _scale(weight, norm, compute), flat(bias, compute)
    activate = None if norm.activation is None else activations.FUNCTIONS[norm.activation].value
    x_rows, y_rows = tiling.view(x), tiling.view(y)
    d_scratch, squares_scratch, ones = tiling.scratch(), tiling.scratch(), ones_of(compute)
    if residual is not None and residual_out is not None:
        residual_rows, sum_rows = tiling.view(residual), tiling.view(residual_out)

    def load_first(row: Block, column: Block) -> Array:
        """What is normalized, when it is met first: with a residual, its rounded sum is stored and read back."""
        d = load_tile(x_rows, row, column, d_scratch)
        if residual is None:
            return d
        d += load_tile(residual_rows, row, column, squares_scratch)
        store_tile(d, sum_rows, row, column)
        return load_tile(sum_rows, row, column, d_scratch)

    columns = list(tiling.columns())
    resident = len(columns) == 1
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            shift = offset = None
            if norm.centered:
                moments = Moments()
                for column in columns:
                    d = load_first(row, column)
                    moments.subtract_mean(d, squares_scratch, ones)
                variance = moments.variance
                shift, offset = moments.shift.astype(compute)[:, None], moments.offset.astype(compute)[:, None]
                if mean is not None:
                    mean[index_of(row)] = (moments.shift + moments.offset).reshape(row.shape)
            else:
                squares = np.zeros(row.size)
                for column in columns:
                    d = load_first(row, column)
                    squares += row_sums(np.multiply(d, d, out=squares_scratch[: d.size].reshape(d.shape)), ones)
                variance = squares / tiling.column_count

            row_rstd = 1 / np.sqrt(variance + eps)
            rstd[index_of(row)] = row_rstd.reshape(row.shape)
            r = row_rstd.astype(compute)[:, None]
            for column in columns:
                if not resident:
                    d = load_tile(x_rows if residual is None else sum_rows, row, column, d_scratch)
                    if shift is not None:
                        d -= shift
                if offset is not None:
                    d -= offset
                d *= r
                if w is not None:
                    d *= w[column.span]
                if b is not None:
                    d += b[column.span]
                store_tile(d if activate is None else activate(d), y_rows, row, column)
    return y, residual_out, mean, rstd


def row_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    axis: tuple[int, ...],
    norm: Norm = _LAYER_NORM,
    bias: Array | None = None,
    dresidual_out: Array | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    dx_out: Array | None = None,
    dweight_out: Array | None = None,
    dbias_out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `row_norm` with respect to `x`, `weight` and `bias`.

    Parameters
    ----------
    dy : array
        Gradient of the result; shape of `x`.
    x : array
        What was normalized: as given to `row_norm`, or its `residual_out`.
    weight, norm : array, Norm
        As given to `row_norm`; `weight` may be None.
    mean, rstd : array
        As returned by `row_norm`; `mean` is not used for RMS norm.
    axis : tuple of int
        Axes that were reduced: sorted, not negative.
    bias : array, optional
        As given to `row_norm`; it counts only under an activation.
    dresidual_out : array, optional
        Gradient of `residual_out`, which is added to `dx`; shape of `x`.
    output_mask : tuple of three bool
        Which of `dx`, `dweight`, `dbias` to compute.
    dx_out, dweight_out, dbias_out : array, optional
        Where to write the results; any strides. `dx_out` may be `dy`, `x` or `dresidual_out` itself.

    Returns
    -------
    dx : array or None
        Shape and dtype of `x`. With a residual, it is the gradient of both summands.
    dweight, dbias : array or None
        Of the shape of the reduced axes; dtype of the `*_out` array, else of `weight`, else of `x`.

    Notes
    -----
    The derivatives of Ba, Kiros, Hinton 2016, arXiv:1607.06450, and Zhang, Sennrich 2019, arXiv:1910.07467; without an
    activation the same as PyTorch's ``native_layer_norm_backward``. Arguments are not checked.

    Examples
    --------
    >>> x = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    >>> dy = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> y, _, mean, rstd = row_norm(x, axis=(1,), eps=0.0)
    >>> dx, dweight, dbias = row_norm_backward(dy, x, None, mean, rstd, axis=(1,))
    >>> dx.round(3)
    array([[ 0.204, -0.408,  0.204],
           [-0.204,  0.408, -0.204]])
    >>> dbias
    array([1., 1., 0.])
    """
    tiling = Tiling(x, axis)
    compute = tiling.compute
    want_dx, want_dweight, want_dbias = output_mask
    parameter_dtype = x.dtype if weight is None else weight.dtype
    dx = result_array(want_dx, dx_out, x.shape, x.dtype)
    dweight = result_array(want_dweight, dweight_out, tiling.column_shape, parameter_dtype)
    dbias = result_array(want_dbias, dbias_out, tiling.column_shape, parameter_dtype)

    w, b = _scale(weight, norm, compute), flat(bias, compute)
    activation = None if norm.activation is None else activations.FUNCTIONS[norm.activation]
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    added_rows = None if dresidual_out is None else tiling.view(dresidual_out)
    dweight_sum = np.zeros(tiling.column_count if want_dweight else 0)
    dbias_sum = np.zeros(tiling.column_count if want_dbias else 0)
    xhat_scratch, dz_scratch, product_scratch = tiling.scratch(), tiling.scratch(), tiling.scratch()
    ones = ones_of(compute)

    def load(row: Block, column: Block, m: Array | None, r: Array) -> tuple[Array, Array]:
        """xhat and dz."""
        xhat = load_tile(x_rows, row, column, xhat_scratch)
        if m is not None:
            xhat -= m
        xhat *= r
        dz = load_tile(dy_rows, row, column, dz_scratch)
        if activation is not None:
            activation.turn_into_gradient(dz, _activated(xhat, column, w, b, product_scratch))
        return xhat, dz

    columns = list(tiling.columns())
    resident = len(columns) == 1
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            m = mean[index_of(row)].astype(compute).reshape(-1, 1) if norm.centered and mean is not None else None
            r = rstd[index_of(row)].astype(compute).reshape(-1, 1)
            sum_g = np.zeros(row.size)
            sum_g_xhat = np.zeros(row.size)
            for column in columns:
                xhat, g = load(row, column, m, r)
                g_xhat = np.multiply(g, xhat, out=product_scratch[: g.size].reshape(g.shape))
                if want_dweight:
                    dweight_sum[column.span] += column_sums(g_xhat, ones)
                if want_dbias:
                    dbias_sum[column.span] += column_sums(g, ones)
                if want_dx:
                    if w is not None:
                        g *= w[column.span]
                        g_xhat *= w[column.span]
                    if norm.centered:
                        sum_g += row_sums(g, ones)
                    sum_g_xhat += row_sums(g_xhat, ones)
            if dx_rows is None:
                continue

            mean_g = (sum_g / tiling.column_count).astype(compute)[:, None]
            mean_g_xhat = (sum_g_xhat / tiling.column_count).astype(compute)[:, None]
            for column in columns:
                if not resident:
                    xhat, g = load(row, column, m, r)
                    if w is not None:
                        g *= w[column.span]
                if norm.centered:
                    g -= mean_g
                xhat *= mean_g_xhat
                g -= xhat
                g *= r
                if added_rows is not None:
                    g += load_tile(added_rows, row, column, product_scratch)
                store_tile(g, dx_rows, row, column)

        # Through the compute dtype, because a float64 that is cast to bfloat16 must be rounded as its float32 is.
        if dweight is not None:
            dweight[...] = dweight_sum.astype(compute, copy=False).reshape(tiling.column_shape)
        if dbias is not None:
            dbias[...] = dbias_sum.astype(compute, copy=False).reshape(tiling.column_shape)
    return dx, dweight, dbias


def _scale(weight: Array | None, norm: Norm, compute: np.dtype[Any]) -> Array | None:
    """What xhat is multiplied by, if by anything."""
    w = flat(weight, compute)
    return w + compute.type(norm.weight_offset) if w is not None and norm.weight_offset else w


def _activated(xhat: Array, column: Block, w: Array | None, b: Array | None, scratch: Array) -> Array:
    """The numbers that the activation was applied to."""
    z = scratch[: xhat.size].reshape(xhat.shape)
    np.copyto(z, xhat)
    if w is not None:
        z *= w[column.span]
    if b is not None:
        z += b[column.span]
    return z
