"""The norms of channels, over positions: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cunorm import adapters, execute, reference
from cunorm.checks import (
    check_activation,
    check_channels,
    check_convention,
    check_data_format,
    check_eps,
    check_groups,
    check_like,
    check_mask,
    check_momentum,
    check_num_groups,
    check_out,
    check_running,
    check_training,
    check_vector,
    memory_order,
)
from cunorm.execute import Output, Prepared
from cunorm.ops import BACKWARD_OPERANDS, FORWARD_OPERANDS, layout_of, prepare_launches, views_of
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, RunningStatistics, View

__all__ = [
    "RUNNING_OPERANDS",
    "ChannelNorm",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_stats",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "merge_batch_norm_stats",
]

# What a forward call's pointers are those of, in order, where there are running statistics.
RUNNING_OPERANDS = (*FORWARD_OPERANDS[:5], "running_mean", "running_var", *FORWARD_OPERANDS[5:])


def instance_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    data_format: str = "NC...",
    eps: float = 1e-5,
    activation: str | None = None,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    """Instance normalization: ``y = (x - mean) * rstd * weight + bias``, with statistics by sample and channel.

    ``rstd = 1 / sqrt(var + eps)`` with the biased variance over the spatial dimensions (Ulyanov, Vedaldi, Lempitsky
    2016, arXiv:1607.08022; the same as ``torch.nn.functional.instance_norm``). Statistics and sums are float32 whatever
    the data, float64 for float64 data.

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions; float16, bfloat16, float32 or float64. A NumPy, CuPy,
        PyTorch, JAX or TensorFlow tensor, or anything with ``__dlpack__``. It may be a strided view; it is not copied
        and not modified.
    weight, bias : tensor, optional
        One number a channel, of shape (C,). Each on its own may be left out. C-contiguous; any of the four dtypes, also
        another than x's; on x's device.
    data_format : {"NC...", "N...C", "NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC"}
        Whether the channels are x's second axis or its last. A named format also says how many dimensions x has.
    eps : float
        Added to the variance. Finite and not negative.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        Applied to the result before it is rounded, as `layer_norm` says.
    return_stats : bool
        Also return mean and rstd.
    out : tensor, optional
        Where to write y: with x's shape, dtype and device, lying in memory as y would. Not for JAX and TensorFlow,
        whose tensors are immutable, and not where gradients are recorded. It may be ``x`` itself, but not overlap it
        otherwise.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device. It lies in memory as x does, where x is dense with its channels before or
        behind its spatial dimensions (PyTorch's ``channels_last``, say); else it is C-contiguous. In PyTorch, JAX and
        TensorFlow it is differentiable in x, weight and bias.
    mean, rstd : tensor
        Only with ``return_stats``: of shape (N, C); float32, float64 for float64 x. They are constants to
        differentiation.

    Raises
    ------
    ValueError
        For dimensions, shapes, strides, a data_format, eps or an activation that do not fit.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[[1.0, 3.0], [5.0, 9.0]]])
    >>> cunorm.instance_norm(x, eps=0.0)
    array([[[-1.,  1.],
            [-1.,  1.]]])
    >>> y, mean, rstd = cunorm.instance_norm(x, eps=0.0, data_format="NWC", return_stats=True)
    >>> mean, rstd
    (array([[3., 6.]]), array([[0.5       , 0.33333333]]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("instance_norm", data_format, eps, activation)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, bool(return_stats))
    return (y, mean, rstd) if return_stats else y


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    data_format: str = "NC...",
    eps: float = 1e-5,
    activation: str | None = None,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    """Group normalization: ``y = (x - mean) * rstd * weight + bias``, with statistics by sample and group of channels.

    ``rstd = 1 / sqrt(var + eps)`` with the biased variance over the channels of a group and the spatial dimensions (Wu,
    He 2018, arXiv:1803.08494; the same as ``torch.nn.functional.group_norm``). Statistics and sums are float32 whatever
    the data, float64 for float64 data.

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions, as `instance_norm` says.
    num_groups : int
        How many groups of consecutive channels there are: positive, and a divisor of the number of channels.
    weight, bias : tensor, optional
        One number a channel, of shape (C,), as `instance_norm` says.
    data_format, eps, activation, return_stats, out
        As for `instance_norm`.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device; in memory as `instance_norm` says. In PyTorch, JAX and TensorFlow it is
        differentiable in x, weight and bias.
    mean, rstd : tensor
        Only with ``return_stats``: of shape (N, num_groups); float32, float64 for float64 x. They are constants to
        differentiation.

    Raises
    ------
    ValueError
        For dimensions, shapes, strides, a number of groups, a data_format, eps or an activation that do not fit.
    TypeError
        For dtypes and tensor types that are not supported, and a num_groups that is no int.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[[1.0], [3.0], [5.0], [9.0]]])
    >>> y, mean, rstd = cunorm.group_norm(x, 2, eps=0.0, return_stats=True)
    >>> y.reshape(-1), mean
    (array([-1.,  1., -1.,  1.]), array([[2., 7.]]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("group_norm", data_format, eps, activation, num_groups)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, bool(return_stats))
    return (y, mean, rstd) if return_stats else y


def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    running_mean: Any = None,
    running_var: Any = None,
    training: bool,
    momentum: float = 0.1,
    convention: str = "torch",
    data_format: str = "NC...",
    eps: float = 1e-5,
    activation: str | None = None,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    """Batch normalization: ``y = (x - mean) * rstd * weight + bias``, with statistics by channel.

    In training ``rstd = 1 / sqrt(var + eps)`` with the biased variance over all samples and spatial dimensions (Ioffe,
    Szegedy 2015, arXiv:1502.03167; the same as ``torch.nn.functional.batch_norm``); in evaluation mean and variance are
    the running ones. Statistics and sums are float32 whatever the data, float64 for float64 data.

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions, as `instance_norm` says. In training there must be more
        than one value a channel, with Keras's convention at least one.
    weight, bias : tensor, optional
        One number a channel, of shape (C,), as `instance_norm` says.
    running_mean, running_var : tensor, optional
        Of shape (C,), C-contiguous, any of the four dtypes, on x's device; both or neither. In training they are
        updated in place, in evaluation they are required and read. They are constants to differentiation. JAX's and
        TensorFlow's tensors are immutable: there they are for evaluation alone, and in training updated by the caller,
        with the statistics that ``return_stats`` or `batch_norm_stats` give.
    training : bool
        Whether the statistics are those of x; else they are the running ones.
    momentum : float
        From 0 to 1: how much of the new statistics goes into the running ones, or of the old, as ``convention`` says.
    convention : {"torch", "keras"}
        ``"torch"``: ``running = (1 - momentum) * running + momentum * new``, the new variance with n - 1 for a divisor,
        as PyTorch has it. ``"keras"``: ``running = momentum * running + (1 - momentum) * new``, the new variance the
        biased one, as Keras has it, whose default momentum is 0.99.
    data_format, eps, activation, return_stats, out
        As for `instance_norm`.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device; in memory as `instance_norm` says. In PyTorch, JAX and TensorFlow it is
        differentiable in x, weight and bias.
    mean, rstd : tensor
        Only with ``return_stats``: of shape (C,); float32, float64 for float64 x. In evaluation they are running_mean
        and ``1 / sqrt(running_var + eps)``. They are constants to differentiation.

    Raises
    ------
    ValueError
        For dimensions, shapes, strides, a data_format, momentum, convention, eps or an activation that do not fit, one
        value a channel in training, no running statistics in evaluation, and one without the other.
    TypeError
        For dtypes and tensor types that are not supported, and running statistics that cannot be updated in place.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 4.0], [3.0, 8.0]])
    >>> running_mean, running_var = np.zeros(2), np.ones(2)
    >>> running = {"running_mean": running_mean, "running_var": running_var}
    >>> cunorm.batch_norm(x, training=True, eps=0.0, **running)
    array([[-1., -1.],
           [ 1.,  1.]])
    >>> running_mean, running_var
    (array([0.2, 0.6]), array([1.1, 1.7]))
    >>> cunorm.batch_norm(x, training=False, **running).round(3)
    array([[0.763, 2.608],
           [2.67 , 5.676]])
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of(
        "batch_norm", data_format, eps, activation, training=training, momentum=momentum, convention=convention
    )
    running = check_running(running_mean, running_var, op.training)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, bool(return_stats), running)
    return (y, mean, rstd) if return_stats else y


def batch_norm_stats(x: Any, *, data_format: str = "NC...") -> tuple[Any, Any]:
    """The statistics of `batch_norm`: mean and biased variance of each channel, over samples and spatial dimensions.

    With `merge_batch_norm_stats` they become those of a batch that several devices hold
    (Ioffe, Szegedy 2015, arXiv:1502.03167; the synchronized batch norm of the frameworks), or of one that comes in
    parts.

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions, as `instance_norm` says.
    data_format : str
        As for `instance_norm`.

    Returns
    -------
    mean, var : tensor
        Of shape (C,); float32, float64 for float64 x; NaN where x is empty. They are constants to differentiation.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `batch_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> cunorm.batch_norm_stats(np.array([[1.0, 4.0], [3.0, 8.0]]))
    (array([2., 6.]), array([1., 4.]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("batch_norm_stats", data_format)
    _, _, mean, var = adapter.apply(op, x, None, None, None, None, True)
    return mean, var


def merge_batch_norm_stats(means: Any, variances: Any, counts: Any) -> tuple[Any, Any]:
    """Mean and biased variance of a whole, from those of its parts: what devices that share a batch exchange.

    Two parts of ``n`` and ``m`` values have ``mean + (mean' - mean) * m / (n + m)`` for a mean, and for a variance
    ``(n * var + m * var') / (n + m) + (mean' - mean)^2 * n * m / (n + m)^2`` (Chan, Golub, LeVeque 1983, The American
    Statistician 37:242); the parts are taken one after the other. It is written in operators of tensors, so it works
    for those of every framework, on their devices, and inside their compilers.

    Parameters
    ----------
    means, variances : tensor, or sequence of tensors
        Of K parts: of shape (K, C), or K of shape (C,), as `batch_norm_stats` gives them.
    counts : sequence of int, or tensor
        How many values a channel has in each part: K numbers, of which a 0 leaves its part out; or a framework's tensor
        of shape (K,), of means' dtype and without zeros.

    Returns
    -------
    mean, var : tensor
        Of shape (C,).

    Raises
    ------
    ValueError
        For another number of means, variances and counts, for negative counts, or where all are zero.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.array([[1.0], [3.0]]), np.array([[8.0]])
    >>> means, variances = zip(*map(cunorm.batch_norm_stats, parts))
    >>> mean, var = cunorm.merge_batch_norm_stats(means, variances, [2, 1])
    >>> mean, var.round(4), np.var([1, 3, 8]).round(4)
    (array([4.]), array([8.6667]), np.float64(8.6667))
    """
    parts = [_length(given) for given in (means, variances, counts)]
    if len(set(parts)) > 1:
        found = "there are {} means, {} variances and {} counts".format(*parts)
        raise ValueError(f"{found}; they must be of one number")
    mean = var = total = None
    for i in range(parts[0]):
        count = counts[i]
        if isinstance(count, numbers.Real):  # a tensor's numbers may not be known yet, or are on a device
            count = float(count)
            if count < 0:
                raise ValueError(f"counts has {count:g}; they must not be negative")
            if not count:
                continue
        if total is None:
            mean, var, total = means[i], variances[i], count
            continue
        total = total + count
        fraction, difference = count / total, means[i] - mean
        var = var * (1 - fraction) + variances[i] * fraction + difference * difference * (fraction * (1 - fraction))
        mean = mean + difference * fraction
    if total is None:
        raise ValueError("counts has no values; one at least must be positive")
    return mean, var


def _length(given: Any) -> int:
    return len(given) if isinstance(given, Sequence) else int(given.shape[0])


def instance_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any = None,
    data_format: str = "NC...",
    activation: str | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:
    """The gradients of `instance_norm`, for libraries without automatic differentiation.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``
    over the spatial dimensions, ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)`` over those and the samples: the
    derivative of Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022. With an activation, ``dy * activation'(xhat *
    weight + bias)`` takes dy's place.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x, weight, data_format, activation
        As `instance_norm` was given them; weight may be None.
    mean, rstd : tensor
        As `instance_norm` returned them.
    bias : tensor, optional
        As `instance_norm` was given it. dx and dweight depend on it only where there is an activation.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        None where not asked for. dx has x's shape and dtype, and lies in memory as y does. dweight and dbias have shape
        (C,); dweight has the dtype of weight, or of x where there is no weight; dbias has that of bias where it is
        given, else dweight's.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `instance_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[[1.0, 2.0, 4.0]]]), np.array([[[1.0, 0.0, 0.0]]])
    >>> y, mean, rstd = cunorm.instance_norm(x, return_stats=True)
    >>> dx, dweight, dbias = cunorm.instance_norm_backward(dy, x, None, mean, rstd)
    >>> bool(abs(dx.sum()) < 1e-12), dbias
    (True, array([1.]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("instance_norm", data_format, activation=activation)
    return adapter.backward(op, dy, None, x, weight, bias, mean, rstd, check_mask(output_mask), None)


def group_norm_backward(
    dy: Any,
    x: Any,
    num_groups: int,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any = None,
    data_format: str = "NC...",
    activation: str | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:
    """The gradients of `group_norm`, for libraries without automatic differentiation.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``
    over the channels of a group and the spatial dimensions, ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)`` over
    the samples and the spatial dimensions: the derivative of Wu, He 2018, arXiv:1803.08494. With an activation, ``dy *
    activation'(xhat * weight + bias)`` takes dy's place.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x, num_groups, weight, data_format, activation
        As `group_norm` was given them; weight may be None.
    mean, rstd : tensor
        As `group_norm` returned them.
    bias : tensor, optional
        As `group_norm` was given it. dx and dweight depend on it only where there is an activation.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        As `instance_norm_backward` returns them.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `group_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[[1.0], [2.0], [4.0], [5.0]]]), np.array([[[1.0], [0.0], [0.0], [0.0]]])
    >>> y, mean, rstd = cunorm.group_norm(x, 1, return_stats=True)
    >>> dx, dweight, dbias = cunorm.group_norm_backward(dy, x, 1, None, mean, rstd)
    >>> bool(abs(dx.sum()) < 1e-12), dbias
    (True, array([1., 0., 0., 0.]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("group_norm", data_format, activation=activation, num_groups=num_groups)
    return adapter.backward(op, dy, None, x, weight, bias, mean, rstd, check_mask(output_mask), None)


def batch_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any = None,
    training: bool = True,
    data_format: str = "NC...",
    activation: str | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:
    """The gradients of `batch_norm`, for libraries without automatic differentiation.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` in
    training, ``dx = rstd * g`` in evaluation, where the statistics are constants; ``dweight = sum(dy * xhat)`` and
    ``dbias = sum(dy)``; all over the samples and the spatial dimensions (Ioffe, Szegedy 2015, arXiv:1502.03167; as
    PyTorch's ``native_batch_norm_backward``). With an activation, ``dy * activation'(xhat * weight + bias)`` takes dy's
    place.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x, weight, training, data_format, activation
        As `batch_norm` was given them; weight may be None.
    mean, rstd : tensor
        As `batch_norm` returned them.
    bias : tensor, optional
        As `batch_norm` was given it. dx and dweight depend on it only where there is an activation.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        As `instance_norm_backward` returns them.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `batch_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[1.0], [2.0], [4.0]]), np.array([[1.0], [0.0], [0.0]])
    >>> y, mean, rstd = cunorm.batch_norm(x, training=True, return_stats=True)
    >>> dx, dweight, dbias = cunorm.batch_norm_backward(dy, x, None, mean, rstd)
    >>> bool(abs(dx.sum()) < 1e-12), dbias
    (True, array([1.]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("batch_norm", data_format, activation=activation, training=training)
    return adapter.backward(op, dy, None, x, weight, bias, mean, rstd, check_mask(output_mask), None)


@dataclass(frozen=True, eq=False)
class ChannelNorm:
    """One of the norms here with its attributes, as the adapters pass it around (see `cunorm.execute.Op`).

    There is one object for the same attributes, made by `of`: as a part of keys it is compared by identity, in no time.
    ``training`` is False where the statistics are given; an update is ``running = kept * running + taken * new``, the
    new variance ``unbiased`` or not.
    """

    name: str
    data_format: str
    eps: float
    activation: str | None
    num_groups: int | None
    training: bool
    kept: float
    taken: float
    unbiased: bool
    name_in_ops: str = field(default="", init=False, repr=False)

    @staticmethod
    def of(
        name: str,
        data_format: str,
        eps: float = 0.0,
        activation: str | None = None,
        num_groups: int | None = None,
        training: bool = True,
        momentum: float = 0.1,
        convention: str = "torch",
    ) -> ChannelNorm:
        """The op of a user's arguments."""
        if execute.is_compiling():
            # Where a number may be a symbol: an index or what a set holds is none.
            if type(num_groups) is int:
                num_groups = operator.index(num_groups)
            if type(eps) is float:
                (eps,) = {eps}
            if type(momentum) is float:
                (momentum,) = {momentum}
            arguments = (name, data_format, eps, activation, num_groups, training, momentum, convention)
            found = _name_of(*arguments)
            if found is None:
                return _make(*arguments)  # says what is wrong
            return getattr(execute.OPS, found)  # type: ignore[no-any-return]
        arguments = (name, data_format, eps, activation, num_groups, training, momentum, convention)
        try:
            return _op_of(*arguments)  # type: ignore[no-any-return]
        except TypeError:  # of something that cannot be hashed: what is wrong with it is said below
            pass
        return _op_of.__wrapped__(*arguments)  # type: ignore[no-any-return]

    @functools.cached_property
    def keeps_bias(self) -> bool:
        return self.activation is not None

    @functools.cached_property
    def updates_running(self) -> bool:
        return self.training

    @functools.cached_property
    def over_samples(self) -> bool:
        """Whether statistics are over the samples too."""
        return self.name in ("batch_norm", "batch_norm_stats")

    @functools.cached_property
    def statistics_alone(self) -> bool:
        return self.name == "batch_norm_stats"

    def prepare_forward(
        self,
        x: View,
        residual: View | None,
        weight: View | None,
        bias: View | None,
        out: View | None,
        stats: bool,
        running: tuple[View, ...] = (),
    ) -> Prepared:
        layouts = (layout_of(x), layout_of(weight), layout_of(bias), layout_of(out))
        return _prepare_forward(self, *layouts, stats, tuple(map(layout_of, running)))

    def prepare_backward(
        self,
        dy: View,
        dresidual_out: View | None,
        x: View,
        weight: View | None,
        bias: View | None,
        mean: View | None,
        rstd: View | None,
        output_mask: tuple[bool, bool, bool],
        bias_dtype: str | None,
    ) -> Prepared:
        layouts = (layout_of(view) for view in (dy, x, weight, bias, mean, rstd))
        return _prepare_backward(self, *layouts, output_mask, bias_dtype)


def _make(
    name: str,
    data_format: Any,
    eps: Any,
    activation: Any,
    num_groups: Any,
    training: Any,
    momentum: Any,
    convention: Any,
) -> ChannelNorm:
    torch_convention, share = check_convention(convention) == "torch", check_momentum(momentum)
    return ChannelNorm(
        name,
        check_data_format(data_format),
        check_eps(eps),
        check_activation(activation),
        check_num_groups(num_groups) if name == "group_norm" else None,
        check_training(training),
        1 - share if torch_convention else share,
        share if torch_convention else 1 - share,
        torch_convention,
    )


_op_of, _name_of = execute.interned(_make)


@dataclass(frozen=True)
class _Sizes:
    """What there is of x: for which sets statistics are, and what an op's tensors look like."""

    channel_axis: int
    channels: int
    channels_per_set: int
    values_per_channel: int  # in all samples
    like_x: Output
    statistic: Output

    @staticmethod
    def of(op: ChannelNorm, x: View) -> _Sizes:
        channel_axis = check_channels(x, op.data_format)
        channels = x.shape[channel_axis]
        channels_per_set = 1 if op.num_groups is None else check_groups(x, channels, op.num_groups)
        shape = (channels,) if op.over_samples else (x.shape[0], op.num_groups or channels)
        values = math.prod(size for axis, size in enumerate(x.shape) if axis != channel_axis)
        like_x = Output(x.shape, x.dtype, memory_order(x, channel_axis))
        return _Sizes(channel_axis, channels, channels_per_set, values, like_x, Output(shape, DTYPES[x.dtype].compute))


@execute.prepared_once
def _prepare_forward(
    op: ChannelNorm,
    x: View,
    weight: View | None,
    bias: View | None,
    out: View | None,
    stats: bool,
    running: tuple[View, ...],
) -> Prepared:
    sizes = _Sizes.of(op, x)
    check_vector(weight, "weight", (sizes.channels,), x)
    check_vector(bias, "bias", (sizes.channels,), x)
    for name, view in zip(("running_mean", "running_var"), running):
        check_vector(view, name, (sizes.channels,), x)
    least = 2 if op.unbiased else 1  # as PyTorch has it, and as Keras, where a last batch of one sample trains
    if op.name == "batch_norm" and op.training and sizes.values_per_channel < least:
        found = "one value" if sizes.values_per_channel else "no values"
        must = f"in training there must be {'more than' if op.unbiased else 'at least'} one"
        raise ValueError(f"x has {found} per channel (shape {x.shape}); {must}")
    if out is not None:
        check_out(out, sizes.like_x, x)
    y = None if op.statistics_alone else sizes.like_x
    statistic = sizes.statistic if stats else None
    outputs = (y if out is None else None, None, statistic, statistic)
    y_view = None if y is None else out or y.view(x.device)

    if x.device[0] == "cpu":
        views = (x, None, weight, bias, y_view, *running, *views_of(outputs[1:], x.device))
        return execute.prepare_on_cpu(functools.partial(_run_forward, op, sizes), views, outputs)
    problem = ChannelForward.of(
        x,
        weight,
        bias,
        y_view,
        channel_axis=sizes.channel_axis,
        channels_per_set=sizes.channels_per_set,
        over_samples=op.over_samples,
        eps=op.eps,
        stats=stats,
        activation=op.activation,
        running=_running_statistics(op, *running) if running else None,
    )
    return prepare_launches(problem, RUNNING_OPERANDS if running else FORWARD_OPERANDS, outputs, x.device)


def _running_statistics(op: ChannelNorm, mean: View, variance: View) -> RunningStatistics:
    if not op.training:
        return RunningStatistics.of(mean, variance, given=True)
    return RunningStatistics.of(mean, variance, given=False, kept=op.kept, taken=op.taken, unbiased=op.unbiased)


def _run_forward(op: ChannelNorm, sizes: _Sizes, x: Any, _: Any, weight: Any, bias: Any, y: Any, *others: Any) -> None:
    """The CPU path: NumPy arrays of all inputs and outputs."""
    *running, _, mean, rstd = others
    x, y = (_seen(op, sizes, array) for array in (x, y))
    mean, rstd = (_by_set(op, array) for array in (mean, rstd))
    if op.training:
        new_mean, new_var = reference.channel_statistics(x, channels_per_set=sizes.channels_per_set)
        statistics = new_mean, new_var
        if running:
            values = sizes.values_per_channel
            bessel = values / (values - 1) if op.unbiased else 1.0
            for array, new in zip(running, (new_mean[0], new_var[0] * bessel)):
                reference.update_running(array, new, kept=op.kept, taken=op.taken)
    else:
        running_mean, running_var = running
        statistics = _by_set(op, running_mean), _by_set(op, running_var)
    if op.statistics_alone:
        mean[...], rstd[...] = statistics
        return
    reference.channel_norm(
        x,
        weight,
        bias,
        channels_per_set=sizes.channels_per_set,
        eps=op.eps,
        activation=op.activation,
        given=statistics,
        out=y,
        mean_out=mean,
        rstd_out=rstd,
    )


def _seen(op: ChannelNorm, sizes: _Sizes, array: Any) -> Any:
    """A view of an array of x's shape as samples by channels by points, the samples of a batch being points."""
    if array is None:
        return None
    if op.over_samples:
        return np.moveaxis(array, sizes.channel_axis, 0)[None]
    return np.moveaxis(array, sizes.channel_axis, 1)


def _by_set(op: ChannelNorm, statistic: Any) -> Any:
    """A view of an array of statistics as samples by sets."""
    return statistic[None] if op.over_samples and statistic is not None else statistic


@execute.prepared_once
def _prepare_backward(
    op: ChannelNorm,
    dy: View,
    x: View,
    weight: View | None,
    bias: View | None,
    mean: View | None,
    rstd: View | None,
    output_mask: tuple[bool, bool, bool],
    bias_dtype: str | None,
) -> Prepared:
    sizes = _Sizes.of(op, x)
    check_vector(weight, "weight", (sizes.channels,), x)
    check_vector(bias, "bias", (sizes.channels,), x)
    check_like(dy, "dy", x.shape, x.dtype, x)
    for name, view in (("mean", mean), ("rstd", rstd)):
        if view is None:
            raise TypeError(f"{name} is None; it must be the {name} that {op.name} returned")
        check_like(view, name, sizes.statistic.shape, sizes.statistic.dtype, x, contiguous=True)
    weight_dtype = x.dtype if weight is None else weight.dtype
    if bias_dtype is None:
        bias_dtype = weight_dtype if bias is None else bias.dtype
    dx = sizes.like_x if output_mask[0] else None
    dweight = Output((sizes.channels,), weight_dtype) if output_mask[1] else None
    dbias = Output((sizes.channels,), bias_dtype) if output_mask[2] else None
    outputs = (dx, dweight, dbias)

    if x.device[0] == "cpu":
        views = (dy, None, x, weight, bias, mean, rstd, *views_of(outputs, x.device))
        return execute.prepare_on_cpu(functools.partial(_run_backward, op, sizes, output_mask), views, outputs)
    problem = ChannelBackward.of(
        dy,
        x,
        weight,
        bias,
        None if dx is None else dx.view(x.device),
        channel_axis=sizes.channel_axis,
        channels_per_set=sizes.channels_per_set,
        over_samples=op.over_samples,
        dweight=None if dweight is None else dweight.dtype,
        dbias=None if dbias is None else dbias.dtype,
        activation=op.activation,
        given=not op.training,
    )
    return prepare_launches(problem, BACKWARD_OPERANDS, outputs, x.device)


def _run_backward(
    op: ChannelNorm,
    sizes: _Sizes,
    output_mask: tuple[bool, bool, bool],
    dy: Any,
    _: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    *outs: Any,
) -> None:
    """The CPU path: NumPy arrays of all inputs and outputs."""
    dx, dweight, dbias = outs
    dy, x, dx = (_seen(op, sizes, array) for array in (dy, x, dx))
    reference.channel_norm_backward(
        dy,
        x,
        weight,
        _by_set(op, mean),
        _by_set(op, rstd),
        channels_per_set=sizes.channels_per_set,
        activation=op.activation,
        bias=bias,
        given=not op.training,
        output_mask=output_mask,
        dx_out=dx,
        dweight_out=dweight,
        dbias_out=dbias,
    )


# TensorFlow's AutoGraph would otherwise translate the source of these at their first call inside a tf.function.
for _function in (
    instance_norm,
    instance_norm_backward,
    group_norm,
    group_norm_backward,
    batch_norm,
    batch_norm_backward,
    batch_norm_stats,
    merge_batch_norm_stats,
):
    setattr(_function, "autograph_info__", {})  # noqa: B010
