"""`fused_layer_norm` and `fused_instance_norm`: NVIDIA's ``nv_norms`` ops for TensorFlow, as they are called.

Those were compiled for a TensorFlow of their time (github.com/NVIDIA/atex, last changed in 2023). These are
`cunorm.layer_norm` and `cunorm.instance_norm` with the names, defaults and results that calls of them expect. Beyond
theirs, any axes can be normalized, x has any number of dimensions, and all may be of any of the four dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cunorm.adapters.tensorflow.adapter import device_of
from cunorm.channels import instance_norm
from cunorm.checks import check_axis
from cunorm.problem import DTYPES
from cunorm.rows import layer_norm
from cunorm.text import kind_of

__all__ = ["fused_instance_norm", "fused_layer_norm"]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fused_layer_norm(
    x: Any, gamma: Any, beta: Any, axis: int | Sequence[int] = -1, epsilon: float = 0.001
) -> tuple[Any, Any, Any]:
    """Layer normalization: ``y = (x - mean) * inv_std * gamma + beta``, with statistics over ``axis``.

    ``inv_std = 1 / sqrt(var + epsilon)`` with the biased variance (Ba, Kiros, Hinton 2016, arXiv:1607.06450; the same
    as ``nv_norms.fused_layer_norm``, later named ``fused_layer_norm_op``).

    Parameters
    ----------
    x : tensor
        Any shape; float16, bfloat16, float32 or float64. A TensorFlow tensor or variable, or what becomes one.
    gamma, beta : tensor or None
        As many values as there are over ``axis``, in x's order: of the shape of those axes, or flat. Any of the four
        dtypes.
    axis : int or sequence of int
        The axes to normalize over; they need not be the last.
    epsilon : float
        Added to the variance.

    Returns
    -------
    y : tensor
        Of x's shape and dtype; differentiable in x, gamma and beta.
    mean, inv_std : tensor
        One value for each thing that is normalized, in x's order and flat; float32, float64 for float64 x. They are
        constants to differentiation.

    Raises
    ------
    ValueError
        For axes, shapes or an epsilon that do not fit.
    TypeError
        For dtypes that are not supported, and for tensors that are not dense.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from cunorm.adapters.tensorflow import fused_layer_norm
    >>> y, mean, inv_std = fused_layer_norm(tf.constant([[1.0, 3.0], [5.0, 5.0]]), tf.ones(2), tf.zeros(2), epsilon=1.0)
    >>> y.numpy().round(3), mean.numpy(), inv_std.numpy().round(3)
    (array([[-0.707,  0.707],
           [ 0.   ,  0.   ]], dtype=float32), array([2., 5.], dtype=float32), array([0.707, 1.   ], dtype=float32))
    """
    (x,) = _dense(x=x)
    with device_of(x):
        gamma, beta = _columns(x, axis, *_dense(gamma=gamma, beta=beta))
        y, mean, inv_std = layer_norm(x, gamma, beta, axis=axis, eps=epsilon, return_stats=True)
        return y, _flat(mean), _flat(inv_std)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fused_instance_norm(
    x: Any, gamma: Any, beta: Any, data_format: str | None = "N...C", epsilon: float = 0.001
) -> tuple[Any, Any, Any]:
    """Instance normalization: ``y = (x - mean) * inv_std * gamma + beta``, with statistics by sample and channel.

    ``inv_std = 1 / sqrt(var + epsilon)`` with the biased variance over the spatial dimensions (Ulyanov, Vedaldi,
    Lempitsky 2016, arXiv:1607.08022; the same as ``nv_norms.fused_instance_norm``, later named
    ``fused_instance_norm_op``).

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions; float16, bfloat16, float32 or float64. A TensorFlow
        tensor or variable, or what becomes one.
    gamma, beta : tensor or None
        One number a channel, of shape (C,). Any of the four dtypes.
    data_format : str, optional
        Where the channels are: ``"NC..."`` and whatever else begins with NC (``"NCHW"``, ``"NCDHW"``) means x's second
        axis; ``"N...C"``, whatever else begins with N and ends with C (``"NHWC"``, ``"NDHWC"``), and None its last.
        A format names no number of dimensions: x of ``"NHWC"`` may have five.
    epsilon : float
        Added to the variance.

    Returns
    -------
    y : tensor
        Of x's shape and dtype; differentiable in x, gamma and beta.
    mean, inv_std : tensor
        Of shape (N, C); float32, float64 for float64 x. They are constants to differentiation.

    Raises
    ------
    ValueError
        For dimensions, shapes, a data_format or an epsilon that do not fit.
    TypeError
        For dtypes that are not supported, and for tensors that are not dense.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from cunorm.adapters.tensorflow import fused_instance_norm
    >>> x = tf.constant([[[[1.0, 4.0], [3.0, 4.0]]]])
    >>> y, mean, inv_std = fused_instance_norm(x, tf.ones(2), tf.zeros(2), data_format="NHWC", epsilon=1.0)
    >>> y.shape.as_list(), mean.numpy(), inv_std.numpy().round(3)
    ([1, 1, 2, 2], array([[2., 4.]], dtype=float32), array([[0.707, 1.   ]], dtype=float32))
    """
    (x,) = _dense(x=x)
    with device_of(x):
        gamma, beta = _dense(gamma=gamma, beta=beta)
    channels = _channels_place(data_format)
    y, mean, inv_std = instance_norm(x, gamma, beta, data_format=channels, eps=epsilon, return_stats=True)
    return y, mean, inv_std


def _dense(**arguments: Any) -> list[Any]:
    """The arguments as TensorFlow's own ops take them: what is no tensor becomes one, but nothing is made dense."""
    tensors = []
    for name, value in arguments.items():
        if isinstance(value, tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor):
            raise TypeError(f"{name} is {kind_of(value)}; it must be dense")
        if value is not None and not isinstance(value, tf.Tensor):
            value = tf.convert_to_tensor(value)
        if value is not None and value.dtype.name not in DTYPES:
            raise TypeError(f"{name} has dtype {value.dtype.name}; it must be one of {', '.join(DTYPES)}")
        tensors.append(value)
    return tensors


def _columns(x: Any, axis: int | Sequence[int], gamma: Any, beta: Any) -> list[Any]:
    """gamma and beta with the shape of x's normalized axes, which `layer_norm` takes."""
    rank, axes = None if x is None else x.shape.rank, check_axis(axis)
    if rank is None or not all(-rank <= item < rank for item in axes):  # `layer_norm` says what is wrong
        return [gamma, beta]
    places = sorted(item % rank for item in axes)
    columns = tf.TensorShape([x.shape[place] for place in places])
    result = []
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None and not vector.shape.is_compatible_with(columns):
            flat = (columns.num_elements(),)
            if not vector.shape.is_compatible_with(flat):
                shapes = " or ".join(map(str, dict.fromkeys((flat, tuple(columns)))))
                must = f"for x of shape {tuple(x.shape)} it must be {shapes}"
                raise ValueError(f"{name} has shape {tuple(vector.shape)}; {must}")
            vector = tf.reshape(vector, columns if columns.is_fully_defined() else tf.gather(tf.shape(x), places))
        result.append(vector)
    return result


def _flat(statistic: Any) -> Any:
    return statistic if statistic.shape.rank == 1 else tf.reshape(statistic, [-1])


def _channels_place(data_format: str | None) -> str:
    """One of `instance_norm`'s data formats, or what it refuses."""
    if data_format is None:
        return "N...C"
    if isinstance(data_format, str) and data_format.startswith("N"):
        if data_format.startswith("NC"):
            return "NC..."
        if data_format.endswith("C"):
            return "N...C"
    return data_format
