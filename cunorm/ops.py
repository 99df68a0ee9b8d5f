"""The public functions: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cunorm import adapters, execute, launch, reference
from cunorm.checks import check_axis, check_eps, check_like, check_mask, check_vector, check_x
from cunorm.execute import Output, Prepared
from cunorm.plan import plan
from cunorm.problem import BackwardProblem, ForwardProblem, View

__all__ = ["LayerNorm", "layer_norm", "layer_norm_backward"]

_FORWARD_OPERANDS = ("x", "weight", "bias", "y", "mean", "rstd")
_BACKWARD_OPERANDS = ("dy", "x", "weight", "mean", "rstd", "dx", "dweight", "dbias")


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-5,
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
    return_stats : bool
        Also return mean and rstd.
    out : tensor, optional
        Where to write y: C-contiguous, with x's shape, dtype and device. Not for JAX and TensorFlow, whose tensors are
        immutable, and not where gradients are recorded. It may be ``x`` itself, but not overlap it otherwise.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device. In PyTorch, JAX and TensorFlow it is differentiable in x, weight and bias.
    mean, rstd : tensor
        Only with ``return_stats``: x's shape without the normalized axes; float32, float64 for float64 x. They are
        constants to differentiation.

    Raises
    ------
    ValueError
        For axes, shapes, strides or eps that do not fit.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> cunorm.layer_norm(np.array([[1.0, 2.0, 3.0]]), eps=0.0).round(4)
    array([[-1.2247,  0.    ,  1.2247]])
    """
    adapter = adapters.adapter_of(x)
    y, mean, rstd = adapter.apply(LayerNorm.of(axis, eps), x, weight, bias, out, bool(return_stats))
    return (y, mean, rstd) if return_stats else y


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    axis: int | Sequence[int] = -1,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:
    """The gradients of `layer_norm`, for libraries without automatic differentiation.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``
    over ``axis``, ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)`` over the other axes (as PyTorch's
    ``native_layer_norm_backward``).

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x, weight, axis
        As `layer_norm` was given them; weight may be None.
    mean, rstd : tensor
        As `layer_norm` returned them.
    output_mask : tuple of three bools
        Which of dx, dweight, dbias to compute.

    Returns
    -------
    dx, dweight, dbias : tensor or None
        None where not asked for. dx has x's shape and dtype; dweight and dbias have the shape of the normalized axes
        and the dtype of weight, or of x where there is no weight.

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
    op = LayerNorm.of(axis, 0.0)
    return adapters.adapter_of(x).backward(op, dy, x, weight, mean, rstd, check_mask(output_mask), None)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """`layer_norm` with its attributes, as the adapters pass it around (see `cunorm.execute.Op`).

    There is one object for the same attributes, made by `of`: as a part of keys it is compared by identity, in no time.
    """

    axis: tuple[int, ...]
    eps: float

    @staticmethod
    def of(axis: int | Sequence[int], eps: float) -> LayerNorm:
        """The op of a user's arguments."""
        if type(axis) is int and type(eps) is float:  # nearly always
            known = _interned.get((axis, eps))
            if known is not None:
                return known
        axes, value = check_axis(axis), check_eps(eps)
        op = _interned.setdefault((axes, value), LayerNorm(axes, value))
        return _interned.setdefault((axis, value), op) if type(axis) is int else op

    def prepare_forward(
        self, x: View, weight: View | None, bias: View | None, out: View | None, stats: bool
    ) -> Prepared:
        return _prepare_forward(self, _layout(x), _layout(weight), _layout(bias), _layout(out), stats)

    def prepare_backward(
        self,
        dy: View,
        x: View,
        weight: View | None,
        mean: View,
        rstd: View,
        output_mask: tuple[bool, bool, bool],
        bias_dtype: str | None,
    ) -> Prepared:
        layouts = (_layout(dy), _layout(x), _layout(weight), _layout(mean), _layout(rstd))
        return _prepare_backward(self, *layouts, output_mask, bias_dtype)


# By (axes, eps), and by (axis, eps) where an int was given.
_interned: dict[tuple[tuple[int, ...] | int, float], LayerNorm] = {}


def _layout(view: View | None) -> Any:
    """A view less its address, of which only the alignment matters: what calls of one kind have in common."""
    return None if view is None else View(view[0] & 15, *view[1:])


@functools.lru_cache(maxsize=4096)
def _prepare_forward(
    op: LayerNorm, x: View, weight: View | None, bias: View | None, out: View | None, stats: bool
) -> Prepared:
    axis, columns_shape, statistic = check_x(x, op.axis)
    check_vector(weight, "weight", columns_shape, x)
    check_vector(bias, "bias", columns_shape, x)
    if out is not None:
        check_like(out, "out", x.shape, x.dtype, x, contiguous=True)
    y = Output(x.shape, x.dtype)
    mean, rstd = (statistic, statistic) if stats else (None, None)
    outputs = (y if out is None else None, mean, rstd)
    y_view = out or y.view(x.device)

    if x.device[0] == "cpu":

        def run(x: Any, weight: Any, bias: Any, y: Any, mean: Any, rstd: Any) -> None:
            reference.layer_norm(x, weight, bias, axis=axis, eps=op.eps, out=y, mean_out=mean, rstd_out=rstd)

        return execute.prepare_on_cpu(run, (x, weight, bias, y_view, *_views((mean, rstd), x.device)), outputs)
    problem = ForwardProblem.of(x, weight, bias, y_view, axis=axis, eps=op.eps, stats=stats)
    return _prepare_launches(problem, _FORWARD_OPERANDS, outputs, x.device[1])


@functools.lru_cache(maxsize=4096)
def _prepare_backward(
    op: LayerNorm,
    dy: View,
    x: View,
    weight: View | None,
    mean: View,
    rstd: View,
    output_mask: tuple[bool, bool, bool],
    bias_dtype: str | None,
) -> Prepared:
    axis, columns_shape, statistic = check_x(x, op.axis)
    check_vector(weight, "weight", columns_shape, x)
    check_like(dy, "dy", x.shape, x.dtype, x)
    check_like(mean, "mean", statistic.shape, statistic.dtype, x, contiguous=True)
    check_like(rstd, "rstd", statistic.shape, statistic.dtype, x, contiguous=True)
    weight_dtype = x.dtype if weight is None else weight.dtype
    dx = Output(x.shape, x.dtype) if output_mask[0] else None
    dweight = Output(columns_shape, weight_dtype) if output_mask[1] else None
    dbias = Output(columns_shape, bias_dtype or weight_dtype) if output_mask[2] else None
    outputs = (dx, dweight, dbias)

    if x.device[0] == "cpu":

        def run(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, dweight: Any, dbias: Any) -> None:
            results = {"dx_out": dx, "dweight_out": dweight, "dbias_out": dbias}
            reference.layer_norm_backward(dy, x, weight, mean, rstd, axis=axis, output_mask=output_mask, **results)

        return execute.prepare_on_cpu(run, (dy, x, weight, mean, rstd, *_views(outputs, x.device)), outputs)
    problem = BackwardProblem.of(
        dy,
        x,
        weight,
        None if dx is None else dx.view(x.device),
        axis=axis,
        dweight=None if dweight is None else dweight.dtype,
        dbias=None if dbias is None else dbias.dtype,
    )
    return _prepare_launches(problem, _BACKWARD_OPERANDS, outputs, x.device[1])


def _views(outputs: Sequence[Output | None], device: tuple[str, int]) -> list[View | None]:
    return [None if output is None else output.view(device) for output in outputs]


def _prepare_launches(
    problem: ForwardProblem | BackwardProblem,
    operands: tuple[str, ...],
    outputs: tuple[Output | None, ...],
    device_index: int,
) -> Prepared:
    chosen = plan(problem, launch.device(device_index))
    call = launch.Call(chosen, operands, device_index)
    return Prepared(outputs, ("cuda", device_index), chosen.workspace_bytes, call)


# TensorFlow's AutoGraph would otherwise translate the source of these at their first call inside a tf.function.
for _function in (layer_norm, layer_norm_backward):
    setattr(_function, "autograph_info__", {})  # noqa: B010
