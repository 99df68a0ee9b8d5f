"""Instance, group and batch norm, over sets of channels.

Batch norm (Ioffe, Szegedy 2015, arXiv:1502.03167), instance norm (Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022)
and group norm (Wu, He 2018, arXiv:1803.08494) are what `cunorm.reference.rows` says of layer norm with sets of channels
for rows, and a weight and a bias for each channel: a channel of all samples, a channel of one sample, some channels of
one sample. Where the statistics are given (a batch norm's, in evaluation), they are constants: dx = rstd * g.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.reference import activations
from cunorm.reference.sums import Moments, ones_of, row_sums
from cunorm.reference.tiles import Block, Tiling, index_of, load_tile, result_array, store_tile

__all__ = ["channel_norm", "channel_norm_backward", "channel_statistics", "update_running"]

Array = NDArray[Any]


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
    x_rows, ones = tiling.view(x), ones_of(tiling.compute)
    d_scratch, squares_scratch = tiling.scratch(), tiling.scratch()
    with np.errstate(all="ignore"):
        for row in tiling.rows():
            moments = Moments()
            for column in tiling.columns():
                moments.subtract_mean(load_tile(x_rows, row, column, d_scratch), squares_scratch, ones)
            if moments.count:
                mean[index_of(row)] = (moments.shift + moments.offset).reshape(row.shape)
                variance[index_of(row)] = moments.variance.reshape(row.shape)
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
            s, o, r = (statistic[index_of(row)].reshape(-1, 1) for statistic in (shift, offset, factor))
            for column in tiling.columns():
                d = load_tile(x_rows, row, column, d_scratch)
                d -= s
                d -= o
                d *= r
                if w_rows is not None:
                    d *= load_tile(w_rows, row, column, parameter_scratch)
                if b_rows is not None:
                    d += load_tile(b_rows, row, column, parameter_scratch)
                store_tile(d if activate is None else activate(d), y_rows, row, column)
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
    dx = result_array(want_dx, dx_out, x.shape, x.dtype)
    dweight = result_array(want_dweight, dweight_out, x.shape[1:2], parameter_dtype)
    dbias = result_array(want_dbias, dbias_out, x.shape[1:2], parameter_dtype)

    w_rows, b_rows = tiling.by_channel(weight), tiling.by_channel(bias)
    activated = None if activation is None else activations.FUNCTIONS[activation]
    x_rows, dy_rows, dx_rows = tiling.view(x), tiling.view(dy), None if dx is None else tiling.view(dx)
    dweight_sum, dbias_sum = np.zeros(tiling.channel_shape), np.zeros(tiling.channel_shape)
    xhat_scratch, dz_scratch, product_scratch = tiling.scratch(), tiling.scratch(), tiling.scratch()
    parameter_scratch, ones = tiling.scratch(), ones_of(compute)

    def load(row: Block, column: Block, m: Array, r: Array) -> tuple[Array, Array]:
        """xhat and dz."""
        xhat = load_tile(x_rows, row, column, xhat_scratch)
        xhat -= m
        xhat *= r
        dz = load_tile(dy_rows, row, column, dz_scratch)
        if activated is not None:
            z = product_scratch[: xhat.size].reshape(xhat.shape)
            np.copyto(z, xhat)
            if w_rows is not None:
                z *= load_tile(w_rows, row, column, parameter_scratch)
            if b_rows is not None:
                z += load_tile(b_rows, row, column, parameter_scratch)
            activated.turn_into_gradient(dz, z)
        return xhat, dz

    with np.errstate(all="ignore"):
        for row in tiling.rows():
            m, r = (statistic[index_of(row)].astype(compute).reshape(-1, 1) for statistic in (mean, rstd))
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
                        w = load_tile(w_rows, row, column, parameter_scratch)
                        g *= w
                        g_xhat *= w
                    sum_g += row_sums(g, ones)
                    sum_g_xhat += row_sums(g_xhat, ones)
            if dx_rows is None:
                continue

            mean_g = (sum_g / tiling.column_count).astype(compute)[:, None]
            mean_g_xhat = (sum_g_xhat / tiling.column_count).astype(compute)[:, None]
            for column in tiling.columns():
                xhat, g = load(row, column, m, r)
                if w_rows is not None:
                    g *= load_tile(w_rows, row, column, parameter_scratch)
                if not given:
                    g -= mean_g
                    xhat *= mean_g_xhat
                    g -= xhat
                g *= r
                store_tile(g, dx_rows, row, column)

        # Through the compute dtype, because a float64 that is cast to bfloat16 must be rounded as its float32 is.
        if dweight is not None:
            dweight[...] = dweight_sum.astype(compute, copy=False).reshape(-1)
        if dbias is not None:
            dbias[...] = dbias_sum.astype(compute, copy=False).reshape(-1)
    return dx, dweight, dbias


class _ChannelTiling(Tiling):
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

    def add_by_channel(self, matrix: Array, row: Block, column: Block, sums: Array) -> None:
        """Add up a tile for each channel."""
        tile = matrix.reshape(*row.shape, *column.shape)
        axes = (0, *range(3, tile.ndim))
        sums[row.slices[1], column.slices[0]] += np.add.reduce(tile, axis=axes, dtype=np.float64)
