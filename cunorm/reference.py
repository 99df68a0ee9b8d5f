"""The NumPy definition of each op and of its gradient: what the tests compare with, and what runs on the CPU.

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

Batch norm (Ioffe, Szegedy 2015, arXiv:1502.03167), instance norm (Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022)
and group norm (Wu, He 2018, arXiv:1803.08494) are the same with sets of channels for rows, and a weight and a bias for
each channel: a channel of all samples, a channel of one sample, some channels of one sample. Where the statistics are
given (a batch norm's, in evaluation), they are constants: dx = rstd * g.

An activation on its own, with a bias along the last axis, and its gradient::

    y     = activation(x + bias)
    dx    = dy * activation'(x + bias)
    dbias = sum of dx over the other axes

A tensor is seen as a matrix: the kept axes in C order are its rows, the reduced axes its columns. It is never copied
as a whole: `_Tiling` cuts it into tiles that fit the cache, and each is loaded into a scratch array (where any dtype,
stride or order of axes becomes contiguous float32), finished there, and stored once. Rows longer than a tile are read
twice, once for their statistics.

Elements are float32 (float64 for float64 tensors). What exists once a row or once a column, such as the sums
that are carried from tile to tile, is float64: it is few, and long sums stay accurate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import activations
from cunorm.problem import Norm

__all__ = [
    "channel_norm",
    "channel_norm_backward",
    "channel_statistics",
    "pointwise",
    "pointwise_backward",
    "row_norm",
    "row_norm_backward",
    "update_running",
]

Array = NDArray[Any]

_LAYER_NORM = Norm()

# Elements of a tile: 512 KB of float32. With 1 MB of second-level cache and a tensor of 4096 x 4096, a quarter of it
# takes 1.3 times as long, because of the interpreter's time per tile, and twice as much gains nothing.
_TILE = 1 << 17

# Rows of a tile at least, where neighbours in memory belong to different rows, even if a row then takes several tiles:
# short runs of memory defeat caches and prefetching. For axis 0 of 20000 x 1000, 16 rows take 2.4 times as long.
_MIN_ROWS_OF_TRANSPOSED_TILE = 256

# How many columns, or groups of rows, are summed in the compute dtype before their sums are summed. Short enough that
# one outlier hides few of its neighbours.
_RUN = 256
_GROUPS = 32


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
    tiling = _Tiling(x, axis)
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

    w, b = _scale(weight, norm, compute), _flat(bias, compute)
    activate = None if norm.activation is None else activations.FUNCTIONS[norm.activation].value
    x_rows, y_rows = tiling.view(x), tiling.view(y)
    d_scratch, squares_scratch, ones = tiling.scratch(), tiling.scratch(), tiling.ones()
    if residual is not None and residual_out is not None:
        residual_rows, sum_rows = tiling.view(residual), tiling.view(residual_out)

    def load_first(row: _Block, column: _Block) -> Array:
        """What is normalized, when it is met first: with a residual, its rounded sum is stored and read back."""
        d = _load(x_rows, row, column, d_scratch)
        if residual is None:
            return d
        d += _load(residual_rows, row, column, squares_scratch)
        _store(d, sum_rows, row, column)
        return _load(sum_rows, row, column, d_scratch)

    columns = list(tiling.columns())
    resident = len(columns) == 1
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            shift = offset = None
            if norm.centered:
                moments = _Moments()
                for column in columns:
                    d = load_first(row, column)
                    moments.subtract_mean(d, squares_scratch, ones)
                variance = moments.variance
                shift, offset = moments.shift.astype(compute)[:, None], moments.offset.astype(compute)[:, None]
                if mean is not None:
                    mean[_index(row)] = (moments.shift + moments.offset).reshape(row.shape)
            else:
                squares = np.zeros(row.size)
                for column in columns:
                    d = load_first(row, column)
                    squares += _row_sums(np.multiply(d, d, out=squares_scratch[: d.size].reshape(d.shape)), ones)
                variance = squares / tiling.column_count

            row_rstd = 1 / np.sqrt(variance + eps)
            rstd[_index(row)] = row_rstd.reshape(row.shape)
            r = row_rstd.astype(compute)[:, None]
            for column in columns:
                if not resident:
                    d = _load(x_rows if residual is None else sum_rows, row, column, d_scratch)
                    if shift is not None:
                        d -= shift
                if offset is not None:
                    d -= offset
                d *= r
                if w is not None:
                    d *= w[column.span]
                if b is not None:
                    d += b[column.span]
                _store(d if activate is None else activate(d), y_rows, row, column)
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
    tiling = _Tiling(x, axis)
    compute = tiling.compute
    want_dx, want_dweight, want_dbias = output_mask
    parameter_dtype = x.dtype if weight is None else weight.dtype
    dx = dweight = dbias = None
    if want_dx:
        dx = np.empty(x.shape, x.dtype) if dx_out is None else dx_out
    if want_dweight:
        dweight = np.empty(tiling.column_shape, parameter_dtype) if dweight_out is None else dweight_out
    if want_dbias:
        dbias = np.empty(tiling.column_shape, parameter_dtype) if dbias_out is None else dbias_out

    w, b = _scale(weight, norm, compute), _flat(bias, compute)
    slope = None if norm.activation is None else activations.FUNCTIONS[norm.activation].derivative
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    added_rows = None if dresidual_out is None else tiling.view(dresidual_out)
    dweight_sum = np.zeros(tiling.column_count if want_dweight else 0)
    dbias_sum = np.zeros(tiling.column_count if want_dbias else 0)
    xhat_scratch, dz_scratch, product_scratch = tiling.scratch(), tiling.scratch(), tiling.scratch()
    ones = tiling.ones()

    def load(row: _Block, column: _Block, m: Array | None, r: Array) -> tuple[Array, Array]:
        """xhat and dz."""
        xhat = _load(x_rows, row, column, xhat_scratch)
        if m is not None:
            xhat -= m
        xhat *= r
        dz = _load(dy_rows, row, column, dz_scratch)
        if slope is not None:
            dz *= _slope(slope, xhat, column, w, b, product_scratch)
        return xhat, dz

    columns = list(tiling.columns())
    resident = len(columns) == 1
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            m = mean[_index(row)].astype(compute).reshape(-1, 1) if norm.centered and mean is not None else None
            r = rstd[_index(row)].astype(compute).reshape(-1, 1)
            sum_g = np.zeros(row.size)
            sum_g_xhat = np.zeros(row.size)
            for column in columns:
                xhat, g = load(row, column, m, r)
                g_xhat = np.multiply(g, xhat, out=product_scratch[: g.size].reshape(g.shape))
                if want_dweight:
                    dweight_sum[column.span] += _column_sums(g_xhat, ones)
                if want_dbias:
                    dbias_sum[column.span] += _column_sums(g, ones)
                if want_dx:
                    if w is not None:
                        g *= w[column.span]
                        g_xhat *= w[column.span]
                    if norm.centered:
                        sum_g += _row_sums(g, ones)
                    sum_g_xhat += _row_sums(g_xhat, ones)
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
                    g += _load(added_rows, row, column, product_scratch)
                _store(g, dx_rows, row, column)

        # Through the compute dtype, because a float64 that is cast to bfloat16 must be rounded as its float32 is.
        if dweight is not None:
            dweight[...] = dweight_sum.astype(compute, copy=False).reshape(tiling.column_shape)
        if dbias is not None:
            dbias[...] = dbias_sum.astype(compute, copy=False).reshape(tiling.column_shape)
    return dx, dweight, dbias


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
    tiling = _Tiling(x, _last_axis(x))
    y = np.empty(x.shape, x.dtype) if out is None else out
    activate, b = activations.FUNCTIONS[activation].value, _flat(bias, tiling.compute)
    x_rows, y_rows, scratch = tiling.view(x), tiling.view(y), tiling.scratch()
    columns = list(tiling.columns())
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            for column in columns:
                _store(activate(_biased(x_rows, row, column, b, scratch)), y_rows, row, column)
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
    tiling = _Tiling(x, _last_axis(x))
    slope, b = activations.FUNCTIONS[activation].derivative, _flat(bias, tiling.compute)
    dx = dbias = None
    if output_mask[0]:
        dx = np.empty(x.shape, x.dtype) if dx_out is None else dx_out
    if output_mask[1] and bias is not None:
        dbias = np.empty(bias.shape, bias.dtype) if dbias_out is None else dbias_out
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    sums = np.zeros(0 if dbias is None else tiling.column_count)
    scratch, dy_scratch, ones = tiling.scratch(), tiling.scratch(), tiling.ones()
    columns = list(tiling.columns())
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            for column in columns:
                gradient = _load(dy_rows, row, column, dy_scratch)
                gradient *= slope(_biased(x_rows, row, column, b, scratch))
                if dbias is not None:
                    sums[column.span] += _column_sums(gradient, ones)
                if dx_rows is not None:
                    _store(gradient, dx_rows, row, column)
        if dbias is not None:
            dbias[...] = sums.astype(tiling.compute, copy=False)
    return dx, dbias


def channel_statistics(x: Array, *, channels_per_set: int = 1) -> tuple[Array, Array]:
    """Mean and biased variance of sets of channels.

    Parameters
    ----------
    x : array of float16, bfloat16, float32 or float64
        Samples by channels by points: of shape (samples, channels, ...), any strides.
    channels_per_set : int
        How many consecutive channels have their statistics in common; it divides the channels.

    Returns
    -------
    mean, variance : array of float64
        Of shape (samples, channels / channels_per_set). NaN where there are no points.

    Examples
    --------
    >>> mean, variance = channel_statistics(np.array([[[1.0, 3.0], [5.0, 5.0]]]))
    >>> mean.tolist(), variance.tolist()
    ([[2.0, 5.0]], [[1.0, 0.0]])
    """
    tiling = _ChannelTiling(x, channels_per_set)
    mean, variance = np.full(tiling.row_shape, np.nan), np.full(tiling.row_shape, np.nan)
    x_rows, d_scratch, squares_scratch, ones = tiling.view(x), tiling.scratch(), tiling.scratch(), tiling.ones()
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            moments = _Moments()
            for column in tiling.columns():
                moments.subtract_mean(_load(x_rows, row, column, d_scratch), squares_scratch, ones)
            if moments.count:
                mean[_index(row)] = (moments.shift + moments.offset).reshape(row.shape)
                variance[_index(row)] = moments.variance.reshape(row.shape)
    return mean, variance


def channel_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    channels_per_set: int = 1,
    eps: float,
    activation: str | None = None,
    given: tuple[Array, Array] | None = None,
    out: Array | None = None,
    mean_out: Array | None = None,
    rstd_out: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Normalize sets of channels, scale and shift each channel, activate: instance, group and batch norm.

    Parameters
    ----------
    x : array of float16, bfloat16, float32 or float64
        Samples by channels by points: of shape (samples, channels, ...), any strides. For batch norm the samples are
        points too, and there is one sample.
    weight, bias : array of any float dtype, optional
        Of shape (channels,).
    channels_per_set : int
        How many consecutive channels have their statistics in common; it divides the channels.
    eps : float
        Added to the variance.
    activation : str, optional
        One of `cunorm.problem.ACTIVATIONS`.
    given : (mean, variance), optional
        What to take for the statistics, of the shape that they would have; any float dtype.
    out, mean_out, rstd_out : array, optional
        Where to write the results; any strides. `out` may be `x` itself.

    Returns
    -------
    y : array
        Shape and dtype of `x`.
    mean, rstd : array of float32 (float64 for float64 `x`)
        Of shape (samples, channels / channels_per_set); ``rstd = 1 / sqrt(var + eps)`` with the biased variance, or the
        one that was given. Both are NaN where there are no points.

    Notes
    -----
    Ioffe, Szegedy 2015, arXiv:1502.03167, algorithm 1; Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022, equation 4;
    Wu, He 2018, arXiv:1803.08494, equation 7. Arguments are not checked.

    Examples
    --------
    >>> x = np.array([[[1.0, 3.0], [5.0, 7.0]]])
    >>> channel_norm(x, np.array([1.0, 2.0]), eps=0.0)[0].tolist()
    [[[-1.0, 1.0], [-2.0, 2.0]]]
    >>> y, mean, rstd = channel_norm(x, channels_per_set=2, eps=0.0)
    >>> y.round(3).tolist(), mean.tolist()
    ([[[-1.342, -0.447], [0.447, 1.342]]], [[4.0]])
    """
    tiling = _ChannelTiling(x, channels_per_set)
    compute = tiling.compute
    y = np.empty(x.shape, x.dtype) if out is None else out
    mean = np.empty(tiling.row_shape, compute) if mean_out is None else mean_out
    rstd = np.empty(tiling.row_shape, compute) if rstd_out is None else rstd_out
    statistics = channel_statistics(x, channels_per_set=channels_per_set) if given is None else given
    exact_mean, variance = (statistic.astype(np.float64) for statistic in statistics)

    w_rows, b_rows = tiling.by_channel(weight), tiling.by_channel(bias)
    activate = None if activation is None else activations.FUNCTIONS[activation].value
    x_rows, y_rows = tiling.view(x), tiling.view(y)
    d_scratch, parameter_scratch = tiling.scratch(), tiling.scratch()
    with np.errstate(all="ignore"):
        exact_rstd = 1 / np.sqrt(variance + eps)
        mean[...], rstd[...] = exact_mean, exact_rstd
        # The mean is more than the compute dtype can hold: its rounding is taken off apart.
        shift = exact_mean.astype(compute)
        offset, factor = (exact_mean - shift).astype(compute), exact_rstd.astype(compute)
        for row in tiling.rows():
            s, o, r = (statistic[_index(row)].reshape(-1, 1) for statistic in (shift, offset, factor))
            for column in tiling.columns():
                d = _load(x_rows, row, column, d_scratch)
                d -= s
                d -= o
                d *= r
                if w_rows is not None:
                    d *= _load(w_rows, row, column, parameter_scratch)
                if b_rows is not None:
                    d += _load(b_rows, row, column, parameter_scratch)
                _store(d if activate is None else activate(d), y_rows, row, column)
    return y, mean, rstd


def update_running(running: Array, new: Array, *, kept: float, taken: float) -> None:
    """``running = kept * running + taken * new``, in place: `running` may have any float dtype, and is rounded once.

    Examples
    --------
    >>> running = np.array([0.0, 1.0])
    >>> update_running(running, np.array([1.0, 3.0]), kept=0.75, taken=0.25)
    >>> running.tolist()
    [0.25, 1.5]
    """
    with np.errstate(all="ignore"):
        updated = kept * running.astype(np.float64) + taken * new
        # Through float32, because a float64 that is cast to bfloat16 must be rounded as its float32 is.
        running[...] = updated if running.dtype == np.float64 else updated.astype(np.float32)


def channel_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    channels_per_set: int = 1,
    activation: str | None = None,
    bias: Array | None = None,
    given: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    dx_out: Array | None = None,
    dweight_out: Array | None = None,
    dbias_out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `channel_norm` with respect to `x`, `weight` and `bias`.

    Parameters
    ----------
    dy : array
        Gradient of the result; shape of `x`.
    x, weight, channels_per_set, activation
        As given to `channel_norm`; `weight` may be None.
    mean, rstd : array
        As returned by `channel_norm`.
    bias : array, optional
        As given to `channel_norm`; it counts only under an activation.
    given : bool
        Whether the statistics were given: then they are constants.
    output_mask : tuple of three bool
        Which of `dx`, `dweight`, `dbias` to compute.
    dx_out, dweight_out, dbias_out : array, optional
        Where to write the results; any strides. `dx_out` may be `dy` or `x` itself.

    Returns
    -------
    dx : array or None
        Shape and dtype of `x`.
    dweight, dbias : array or None
        Of shape (channels,); dtype of the `*_out` array, else of `weight`, else of `x`.

    Notes
    -----
    The derivatives of what `channel_norm` names; without an activation the same as PyTorch's
    ``native_batch_norm_backward`` and ``native_group_norm_backward``. Arguments are not checked.

    Examples
    --------
    >>> x, dy = np.array([[[1.0, 2.0, 4.0]]]), np.array([[[1.0, 0.0, 0.0]]])
    >>> y, mean, rstd = channel_norm(x, eps=0.0)
    >>> dx, dweight, dbias = channel_norm_backward(dy, x, None, mean, rstd)
    >>> bool(abs(dx.sum()) < 1e-12), dweight.round(3), dbias
    (True, array([-1.069]), array([1.]))
    """
    tiling = _ChannelTiling(x, channels_per_set)
    compute = tiling.compute
    want_dx, want_dweight, want_dbias = output_mask
    parameter_dtype = x.dtype if weight is None else weight.dtype
    dx = dweight = dbias = None
    if want_dx:
        dx = np.empty(x.shape, x.dtype) if dx_out is None else dx_out
    if want_dweight:
        dweight = np.empty(x.shape[1], parameter_dtype) if dweight_out is None else dweight_out
    if want_dbias:
        dbias = np.empty(x.shape[1], parameter_dtype) if dbias_out is None else dbias_out

    w_rows, b_rows = tiling.by_channel(weight), tiling.by_channel(bias)
    slope = None if activation is None else activations.FUNCTIONS[activation].derivative
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    dweight_sum, dbias_sum = np.zeros(tiling.channel_shape), np.zeros(tiling.channel_shape)
    xhat_scratch, dz_scratch, product_scratch = tiling.scratch(), tiling.scratch(), tiling.scratch()
    parameter_scratch, ones = tiling.scratch(), tiling.ones()

    def load(row: _Block, column: _Block, m: Array, r: Array) -> tuple[Array, Array]:
        """xhat and dz."""
        xhat = _load(x_rows, row, column, xhat_scratch)
        xhat -= m
        xhat *= r
        dz = _load(dy_rows, row, column, dz_scratch)
        if slope is not None:
            z = product_scratch[: xhat.size].reshape(xhat.shape)
            np.copyto(z, xhat)
            if w_rows is not None:
                z *= _load(w_rows, row, column, parameter_scratch)
            if b_rows is not None:
                z += _load(b_rows, row, column, parameter_scratch)
            dz *= slope(z)
        return xhat, dz

    with np.errstate(all="ignore"):
        for row in tiling.rows():
            m, r = (statistic[_index(row)].astype(compute).reshape(-1, 1) for statistic in (mean, rstd))
            sum_g, sum_g_xhat = np.zeros(row.size), np.zeros(row.size)
            for column in tiling.columns():
                xhat, g = load(row, column, m, r)
                g_xhat = np.multiply(g, xhat, out=product_scratch[: g.size].reshape(g.shape))
                if want_dweight:
                    tiling.add_by_channel(g_xhat, row, column, dweight_sum)
                if want_dbias:
                    tiling.add_by_channel(g, row, column, dbias_sum)
                if want_dx and not given:
                    if w_rows is not None:
                        w = _load(w_rows, row, column, parameter_scratch)
                        g *= w
                        g_xhat *= w
                    sum_g += _row_sums(g, ones)
                    sum_g_xhat += _row_sums(g_xhat, ones)
            if dx_rows is None:
                continue

            mean_g = (sum_g / tiling.column_count).astype(compute)[:, None]
            mean_g_xhat = (sum_g_xhat / tiling.column_count).astype(compute)[:, None]
            for column in tiling.columns():
                xhat, g = load(row, column, m, r)
                if w_rows is not None:
                    g *= _load(w_rows, row, column, parameter_scratch)
                if not given:
                    g -= mean_g
                    xhat *= mean_g_xhat
                    g -= xhat
                g *= r
                _store(g, dx_rows, row, column)

        # Through the compute dtype, because a float64 that is cast to bfloat16 must be rounded as its float32 is.
        if dweight is not None:
            dweight[...] = dweight_sum.astype(compute, copy=False).reshape(-1)
        if dbias is not None:
            dbias[...] = dbias_sum.astype(compute, copy=False).reshape(-1)
    return dx, dweight, dbias


def _last_axis(x: Array) -> tuple[int, ...]:
    return (x.ndim - 1,) if x.ndim else ()


def _biased(rows: Array, row: _Block, column: _Block, b: Array | None, scratch: Array) -> Array:
    """A tile of what an activation is taken of."""
    z = _load(rows, row, column, scratch)
    if b is not None:
        z += b[column.span]
    return z


def _scale(weight: Array | None, norm: Norm, compute: np.dtype[Any]) -> Array | None:
    """What xhat is multiplied by, if by anything."""
    w = _flat(weight, compute)
    return w + compute.type(norm.weight_offset) if w is not None and norm.weight_offset else w


def _slope(
    derivative: Callable[[Array], Array],
    xhat: Array,
    column: _Block,
    w: Array | None,
    b: Array | None,
    scratch: Array,
) -> Array:
    """The derivative of the activation, at the numbers that it was applied to."""
    z = scratch[: xhat.size].reshape(xhat.shape)
    np.copyto(z, xhat)
    if w is not None:
        z *= w[column.span]
    if b is not None:
        z += b[column.span]
    return derivative(z)


@dataclass(frozen=True)
class _Block:
    """A run of consecutive rows, or of consecutive columns."""

    slices: tuple[slice, ...]  # find the run among the axes it was cut from
    shape: tuple[int, ...]  # of what `slices` find
    span: slice  # finds the run in the flattened array

    @property
    def size(self) -> int:
        return int(self.span.stop - self.span.start)


class _Tiling:
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

    def rows(self) -> Iterator[_Block]:
        return _blocks(self.row_shape, self.tile_rows)

    def columns(self) -> Iterator[_Block]:
        return _blocks(self.column_shape, self.tile_columns)

    def scratch(self) -> Array:
        return np.empty(self.tile_rows * self.tile_columns, self.compute)

    def ones(self) -> Array:
        """Summands' weights: a product with ones is the fastest sum that NumPy has."""
        return np.ones(2 * max(_RUN, _GROUPS), self.compute)


class _ChannelTiling(_Tiling):
    """Sees tensors of samples by channels by points as a matrix, a row for each set of channels."""

    def __init__(self, x: Array, channels_per_set: int) -> None:
        samples, channels, *points = x.shape
        self.channel_shape = (channels // channels_per_set, channels_per_set)
        self.shape = (samples, *self.channel_shape, *points)
        super().__init__(self.view(x), tuple(range(2, len(self.shape))))

    def view(self, array: Array) -> Array:
        """The tensor with its channels as sets of channels: an axis that is split takes no copy."""
        return array.reshape(self.shape)

    def by_channel(self, parameter: Array | None) -> Array | None:
        """A weight or bias as a tensor to take tiles of."""
        if parameter is None:
            return None
        beside = parameter.astype(self.compute, copy=False).reshape(*self.channel_shape, *(1,) * (len(self.shape) - 3))
        return np.broadcast_to(beside, self.shape)

    def add_by_channel(self, matrix: Array, row: _Block, column: _Block, sums: Array) -> None:
        """Add up a tile for each channel."""
        tile = matrix.reshape(*row.shape, *column.shape)
        axes = (0, *range(3, tile.ndim))
        sums[row.slices[1], column.slices[0]] += np.add.reduce(tile, axis=axes, dtype=np.float64)


def _blocks(shape: tuple[int, ...], limit: int) -> Iterator[_Block]:
    """Cut an index space, in C order, into consecutive blocks of at most `limit` elements."""
    if 0 in shape:
        return
    # The trailing axes that fit are whole in each block, the one before them is cut, the rest are walked.
    cut, inner = len(shape), 1
    while cut > 0 and inner * shape[cut - 1] <= limit:
        cut -= 1
        inner *= shape[cut]
    if cut == 0:
        yield _Block((slice(None),) * len(shape), shape, slice(0, inner))
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
            yield _Block(index, block_shape, slice(start, start + count * inner))
            start += count * inner


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _index(*blocks: _Block) -> tuple[Any, ...]:
    """Where blocks of successive axes meet. The ellipsis makes it a view, even of a 0-d array."""
    return (*(s for block in blocks for s in block.slices), ...)


def _load(rows: Array, row: _Block, column: _Block, scratch: Array) -> Array:
    """Copy a tile into scratch, as a contiguous matrix of the compute dtype."""
    tile = rows[_index(row, column)]
    matrix = scratch[: row.size * column.size]
    np.copyto(matrix.reshape(tile.shape), tile, casting="unsafe")
    return matrix.reshape(row.size, column.size)


def _store(matrix: Array, rows: Array, row: _Block, column: _Block) -> None:
    """Copy a finished tile out, rounding once."""
    tile = rows[_index(row, column)]
    np.copyto(tile, matrix.reshape(tile.shape), casting="unsafe")


def _flat(parameter: Array | None, dtype: np.dtype[Any]) -> Array | None:
    return None if parameter is None else parameter.astype(dtype, copy=False).reshape(-1)


def _row_sums(matrix: Array, ones: Array) -> Array:
    """Sums over columns, in two levels, the second of float64."""
    rows, columns = matrix.shape
    split = columns - columns % _RUN if columns >= 2 * _RUN else 0
    sums: Array = (matrix[:, split:] @ ones[: columns - split]).astype(np.float64)
    if split:
        runs = matrix[:, :split].reshape(rows, split // _RUN, _RUN)
        sums += np.add.reduce(runs @ ones[:_RUN], axis=1, dtype=np.float64)
    return sums


def _column_sums(matrix: Array, ones: Array) -> Array:
    """Sums over rows, in two levels or more."""
    rows, columns = matrix.shape
    if rows < 2 * _GROUPS:
        return matrix[0] if rows == 1 else np.asarray(ones[:rows] @ matrix)
    grouped = rows // _GROUPS
    split = grouped * _GROUPS
    partial = ones[:_GROUPS] @ matrix[:split].reshape(_GROUPS, grouped * columns)
    return np.asarray(_column_sums(partial.reshape(grouped, columns), ones) + ones[: rows - split] @ matrix[split:])


class _Moments:
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
        rounded_mean = (_row_sums(d, ones) / n).astype(d.dtype)
        d -= rounded_mean[:, None]
        shift = rounded_mean.astype(np.float64)
        offset = _row_sums(d, ones) / n
        squares = _row_sums(np.multiply(d, d, out=scratch[: d.size].reshape(d.shape)), ones) - n * offset * offset
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
