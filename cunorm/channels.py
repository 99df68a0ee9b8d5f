"""The public functions of norms of channels, over positions: instance, group and batch norm, and their gradients."""

from __future__ import annotations

from typing import Any

from cunorm import adapters
from cunorm.channel_norm import ChannelNorm
from cunorm.checks import check_bool, check_mask, check_running

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
]


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
    2016, arXiv:1607.08022; the same as ``torch.nn.functional.instance_norm``, which refuses a single position, whose
    variance is 0). Statistics and sums are float32 whatever the data, float64 for float64 data.

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
    stats = check_bool("return_stats", return_stats)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, stats)
    return (y, mean, rstd) if stats else y


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
    stats = check_bool("return_stats", return_stats)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, stats)
    return (y, mean, rstd) if stats else y


def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    running_mean: Any = None,
    running_var: Any = None,
    training: bool,
    momentum: float | None = None,
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
    momentum : float, optional
        From 0 to 1: how much of the new statistics goes into the running ones, or of the old, as ``convention`` says.
        By default 0.1, with Keras's convention 0.99, as these have it. Each value costs a kilobyte for the life of the
        process, and its first call some time.
    convention : {"torch", "keras"}
        ``"torch"``: ``running = (1 - momentum) * running + momentum * new``, the new variance with n - 1 for a divisor,
        as PyTorch has it. ``"keras"``: ``running = momentum * running + (1 - momentum) * new``, the new variance the
        biased one, as Keras has it.
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
    if momentum is None:
        momentum = 0.99 if convention == "keras" else 0.1
    op = ChannelNorm.of(
        "batch_norm", data_format, eps, activation, training=training, momentum=momentum, convention=convention
    )
    running = check_running(running_mean, running_var, op.training)
    stats = check_bool("return_stats", return_stats)
    y, _, mean, rstd = adapter.apply(op, x, None, weight, bias, out, stats, running)
    return (y, mean, rstd) if stats else y


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
