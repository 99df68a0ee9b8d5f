"""The public functions of norms of rows, over any axes: layer norm and RMS norm, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm import adapters
from cunorm.checks import check_bool, check_mask
from cunorm.row_norm import RowNorm

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Any = None,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    """Layer normalization: ``y = (x - mean) * rstd * weight + bias``, with statistics over ``axis``.

    ``rstd = 1 / sqrt(var + eps)`` with the biased variance (Ba, Kiros, Hinton 2016, arXiv:1607.06450; the same as
    ``torch.nn.functional.layer_norm``). Statistics and sums are float32 whatever the data, float64 for float64 data.

    Parameters
    ----------
    x : tensor
        Any shape; float16, bfloat16, float32 or float64. A NumPy, CuPy, PyTorch, JAX or TensorFlow tensor, or anything
        with ``__dlpack__``. It may be a strided view; it is not copied and not modified.
    weight, bias : tensor, optional
        Each on its own may be left out. Their shape is that of x's normalized axes, in x's order; C-contiguous; any of
        the four dtypes, also another than x's; on x's device.
    axis : int or sequence of int
        The axes to normalize over: last, first, middle, several, not adjacent, negative.
    eps : float
        Added to the variance. Finite and not negative.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        Applied to the result before it is rounded. ``gelu`` is the exact one, ``z * Phi(z)``, ``gelu_tanh`` its
        approximation (Hendrycks, Gimpel 2016, arXiv:1606.08415), ``silu`` is ``z / (1 + exp(-z))``.
    residual : tensor, optional
        Added to x before: with x's shape, dtype and device, and strides of its own. What is normalized is
        ``residual_out = x + residual``, rounded to x's dtype, so y is that of ``layer_norm(x + residual)``.
    return_stats : bool
        Also return mean and rstd.
    out : tensor, optional
        Where to write y: C-contiguous, with x's shape, dtype and device. Not for JAX and TensorFlow, whose tensors are
        immutable, and not where gradients are recorded. It may be ``x`` itself, but not overlap it otherwise, nor the
        residual.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device, C-contiguous; beside another array with ``__dlpack__`` it is what
        ``from_dlpack`` of that array's namespace makes, or a NumPy or CuPy array. In PyTorch, JAX and TensorFlow it is
        differentiable in x, residual, weight and bias.
    residual_out : tensor
        Only with ``residual``: the sum, C-contiguous, differentiable in x and residual.
    mean, rstd : tensor
        Only with ``return_stats``: x's shape without the normalized axes; float32, float64 for float64 x. They are
        constants to differentiation.

    Raises
    ------
    ValueError
        For axes, shapes, strides, eps or an activation that do not fit.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> cunorm.layer_norm(x, eps=0.0).round(4)
    array([[-1.2247,  0.    ,  1.2247]])
    >>> y, residual_out = cunorm.layer_norm(x, eps=0.0, activation="relu", residual=np.array([[0.0, 0.0, 3.0]]))
    >>> y.round(4), residual_out
    (array([[0.    , 0.    , 1.3887]]), array([[1., 2., 6.]]))
    """
    adapter = adapters.adapter_of(x)
    op = RowNorm.of(axis, eps, activation)
    stats = check_bool("return_stats", return_stats)
    y, residual_out, mean, rstd = adapter.apply(op, x, residual, weight, bias, out, stats)
    if residual is None:
        return (y, mean, rstd) if stats else y
    return (y, residual_out, mean, rstd) if stats else (y, residual_out)


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    activation: str | None = None,
    residual: Any = None,
    return_stats: bool = False,
    out: Any = None,
) -> Any:
    """RMS normalization: ``y = x * rstd * (weight_offset + weight) + bias``, with statistics over ``axis``.

    ``rstd = 1 / sqrt(mean(x^2) + eps)`` (Zhang, Sennrich 2019, arXiv:1910.07467; the same as
    ``torch.nn.functional.rms_norm``, whose default eps is another). Statistics and sums are float32 whatever the data,
    float64 for float64 data.

    Parameters
    ----------
    x : tensor
        Any shape; float16, bfloat16, float32 or float64. A NumPy, CuPy, PyTorch, JAX or TensorFlow tensor, or anything
        with ``__dlpack__``. It may be a strided view; it is not copied and not modified.
    weight, bias : tensor, optional
        Each on its own may be left out. Their shape is that of x's normalized axes, in x's order; C-contiguous; any of
        the four dtypes, also another than x's; on x's device.
    axis : int or sequence of int
        The axes to normalize over: last, first, middle, several, not adjacent, negative.
    eps : float
        Added to the mean square. Finite and not negative. See the notes for other libraries' defaults.
    weight_offset : float
        Added to the weight: 1 where a model stores how much its weight differs from one, as Gemma does. Finite; 0
        where there is no weight.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        Applied to the result before it is rounded, as `layer_norm` says.
    residual : tensor, optional
        Added to x before: with x's shape, dtype and device, and strides of its own. What is normalized is
        ``residual_out = x + residual``, rounded to x's dtype, so y is that of ``rms_norm(x + residual)``.
    return_stats : bool
        Also return rstd.
    out : tensor, optional
        Where to write y: C-contiguous, with x's shape, dtype and device. Not for JAX and TensorFlow, whose tensors are
        immutable, and not where gradients are recorded. It may be ``x`` itself, but not overlap it otherwise, nor the
        residual.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device, C-contiguous; beside another array with ``__dlpack__`` it is what
        ``from_dlpack`` of that array's namespace makes, or a NumPy or CuPy array. In PyTorch, JAX and TensorFlow it is
        differentiable in x, residual, weight and bias.
    residual_out : tensor
        Only with ``residual``: the sum, C-contiguous, differentiable in x and residual.
    rstd : tensor
        Only with ``return_stats``: x's shape without the normalized axes; float32, float64 for float64 x. It is a
        constant to differentiation.

    Raises
    ------
    ValueError
        For axes, shapes, strides, eps, an activation or a weight_offset that do not fit.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Notes
    -----
    The default eps is that of ``flax.nnx.RMSNorm``, ``keras.layers.RMSNormalization`` and the Llama and Gemma layers of
    ``transformers``; what a model was trained with is in its configuration (Llama 2 and 3: 1e-5).
    ``torch.nn.functional.rms_norm`` takes the machine epsilon of the dtype that it computes in: 1.2e-7 for float32 and
    narrower, 2.2e-16 for float64.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> cunorm.rms_norm(x, eps=0.0).round(4)
    array([[0.4629, 0.9258, 1.3887]])
    >>> cunorm.rms_norm(x, np.zeros(3), eps=0.0, weight_offset=1.0).round(4)
    array([[0.4629, 0.9258, 1.3887]])
    """
    adapter = adapters.adapter_of(x)
    op = RowNorm.of(axis, eps, activation, False, weight_offset)
    stats = check_bool("return_stats", return_stats)
    y, residual_out, _, rstd = adapter.apply(op, x, residual, weight, bias, out, stats)
    if residual is None:
        return (y, rstd) if stats else y
    return (y, residual_out, rstd) if stats else (y, residual_out)


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    axis: int | Sequence[int] = -1,
    bias: Any = None,
    activation: str | None = None,
    dresidual_out: Any = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:
    """The gradients of `layer_norm`, for libraries without automatic differentiation.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``
    over ``axis``, ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)`` over the other axes (as PyTorch's
    ``native_layer_norm_backward``). With an activation, ``dy * activation'(xhat * weight + bias)`` takes dy's place.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x : tensor
        What was normalized: as `layer_norm` was given it, or the residual_out that it returned.
    weight, axis, activation
        As `layer_norm` was given them; weight may be None.
    mean, rstd : tensor
        As `layer_norm` returned them.
    bias : tensor, optional
        As `layer_norm` was given it. dx and dweight depend on it only where there is an activation.
    dresidual_out : tensor, optional
        The gradient of residual_out, where it was used: added to dx. It has x's shape, dtype and device, and may be
        strided.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        None where not asked for. dx has x's shape and dtype; with a residual it is the gradient of x and of residual
        alike. dweight and dbias have the shape of the normalized axes; dweight has the dtype of weight, or of x where
        there is no weight; dbias has that of bias where it is given, else dweight's.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 0.0, 0.0]])
    >>> y, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    >>> dx, dweight, dbias = cunorm.layer_norm_backward(dy, x, None, mean, rstd)
    >>> bool(abs(dx.sum()) < 1e-12), dbias
    (True, array([1., 0., 0.]))
    """
    adapter = adapters.adapter_of(x)
    op = RowNorm.of(axis, 0.0, activation)
    return adapter.backward(op, dy, dresidual_out, x, weight, bias, mean, rstd, check_mask(output_mask), None)


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    *,
    axis: int | Sequence[int] = -1,
    bias: Any = None,
    weight_offset: float = 0.0,
    activation: str | None = None,
    dresidual_out: Any = None,
    output_mask: tuple[bool, bool, bool] = (True, True, False),
) -> tuple[Any, Any, Any]:
    """The gradients of `rms_norm`, for libraries without automatic differentiation.

    With ``xhat = x * rstd`` and ``g = dy * (weight_offset + weight)``: ``dx = rstd * (g - xhat * mean(g * xhat))`` over
    ``axis``, ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)`` over the other axes: the derivative of Zhang,
    Sennrich 2019, arXiv:1910.07467. With an activation, ``dy * activation'(xhat * (weight_offset + weight) + bias)``
    takes dy's place.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x : tensor
        What was normalized: as `rms_norm` was given it, or the residual_out that it returned.
    weight, axis, weight_offset, activation
        As `rms_norm` was given them; weight may be None.
    rstd : tensor
        As `rms_norm` returned it.
    bias : tensor, optional
        As `rms_norm` was given it. dx and dweight depend on it only where there is an activation.
    dresidual_out : tensor, optional
        The gradient of residual_out, where it was used: added to dx. It has x's shape, dtype and device, and may be
        strided.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute. By default not dbias, since few RMS norms have a bias.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        None where not asked for. dx has x's shape and dtype; with a residual it is the gradient of x and of residual
        alike. dweight and dbias have the shape of the normalized axes; dweight has the dtype of weight, or of x where
        there is no weight; dbias has that of bias where it is given, else dweight's.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[3.0, 4.0]]), np.array([[1.0, 0.0]])
    >>> y, rstd = cunorm.rms_norm(x, eps=0.0, return_stats=True)
    >>> dx, dweight, dbias = cunorm.rms_norm_backward(dy, x, None, rstd)
    >>> bool(abs((dx * x).sum()) < 1e-12), dweight.round(4), dbias
    (True, array([0.8485, 0.    ]), None)
    """
    adapter = adapters.adapter_of(x)
    op = RowNorm.of(axis, 0.0, activation, False, weight_offset)
    return adapter.backward(op, dy, dresidual_out, x, weight, bias, None, rstd, check_mask(output_mask), None)
