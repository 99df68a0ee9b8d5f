"""The public functions: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm import adapters, execute, launch, reference
from cunorm.execute import Output, Prepared
from cunorm.plan import plan
from cunorm.problem import DTYPES, BackwardProblem, ForwardProblem, View, contiguous_strides

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
        immutable, and not where gradients are recorded. It may be ``x`` itself.

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
    y, mean, rstd = adapter.apply(LayerNorm.of(axis, eps), x, weight, bias, out, return_stats)
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
    return adapters.adapter_of(x).backward(op, dy, x, weight, mean, rstd, _check_mask(output_mask), None)


@dataclass(frozen=True)
class LayerNorm:
    """`layer_norm` with its attributes, as the adapters pass it around (see `cunorm.execute.Op`)."""

    axis: tuple[int, ...]
    eps: float

    @staticmethod
    def of(axis: int | Sequence[int], eps: float) -> LayerNorm:
        """The op of a user's arguments. Negative axes stay as they are until the number of dimensions is known."""
        # Most are floats, which this is quick to tell.
        if type(eps) is not float and not isinstance(eps, numbers.Real):
            raise TypeError(f"eps is a {type(eps).__qualname__}; it must be a number, finite and not negative")
        eps = float(eps)
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps must be finite and not negative; got {eps}")
        try:
            axes = tuple(map(operator.index, axis)) if isinstance(axis, Sequence) else (operator.index(axis),)
        except TypeError:
            raise TypeError(f"axis must be an int or a sequence of ints; got {axis!r}") from None
        return LayerNorm(axes, eps)

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


def _layout(view: View | None) -> Any:
    """A view less its address, of which only the alignment matters: what calls of one kind have in common."""
    return None if view is None else View(view[0] & 15, *view[1:])


@functools.lru_cache(maxsize=4096)
def _prepare_forward(
    op: LayerNorm, x: View, weight: View | None, bias: View | None, out: View | None, stats: bool
) -> Prepared:
    axis, columns_shape, stats_output = _check_x(x, op.axis)
    _check_vector(weight, "weight", columns_shape, x)
    _check_vector(bias, "bias", columns_shape, x)
    if out is not None:
        _check_like(out, "out", x.shape, x.dtype, x, contiguous=True)
    y = out or View(0, x.shape, contiguous_strides(x.shape), x.dtype, x.device)
    outputs = (Output(x.shape, x.dtype) if out is None else None, *((stats_output,) * 2 if stats else (None, None)))
    if x.device[0] == "cpu":
        inputs = [None if view is None else view[1:4] for view in (x, weight, bias, y)]

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            arrays = [layout and execute.as_numpy(pointer, *layout) for layout, pointer in zip(inputs, pointers)]
            statistics = [execute.as_contiguous_numpy(pointer, stats_output) for pointer in pointers[4:]]
            reference.layer_norm(
                *arrays[:3], axis=axis, eps=op.eps, out=arrays[3], mean_out=statistics[0], rstd_out=statistics[1]
            )

        return Prepared(outputs, 0, run)
    problem = ForwardProblem.of(x, weight, bias, y, axis=axis, eps=op.eps, stats=stats)
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
    axis, columns_shape, stats_output = _check_x(x, op.axis)
    _check_vector(weight, "weight", columns_shape, x)
    _check_like(dy, "dy", x.shape, x.dtype, x)
    _check_like(mean, "mean", stats_output.shape, stats_output.dtype, x, contiguous=True)
    _check_like(rstd, "rstd", stats_output.shape, stats_output.dtype, x, contiguous=True)
    weight_dtype = x.dtype if weight is None else weight.dtype
    dtypes = (x.dtype, weight_dtype, bias_dtype or weight_dtype)
    shapes = (x.shape, columns_shape, columns_shape)
    dx, dweight, dbias = (
        Output(shape, dtype) if wanted else None for shape, dtype, wanted in zip(shapes, dtypes, output_mask)
    )
    if x.device[0] == "cpu":
        inputs = [None if view is None else view[1:4] for view in (dy, x, weight, mean, rstd)]

        def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
            arrays = [layout and execute.as_numpy(pointer, *layout) for layout, pointer in zip(inputs, pointers)]
            results = [
                output and execute.as_contiguous_numpy(pointer, output)
                for output, pointer in zip((dx, dweight, dbias), pointers[5:])
            ]
            reference.layer_norm_backward(
                *arrays,
                axis=axis,
                output_mask=output_mask,
                dx_out=results[0],
                dweight_out=results[1],
                dbias_out=results[2],
            )

        return Prepared((dx, dweight, dbias), 0, run)
    dx_view = None if dx is None else View(0, x.shape, contiguous_strides(x.shape), x.dtype, x.device)
    problem = BackwardProblem.of(
        dy, x, weight, dx_view, axis=axis, dweight=dweight and dweight.dtype, dbias=dbias and dbias.dtype
    )
    return _prepare_launches(problem, _BACKWARD_OPERANDS, (dx, dweight, dbias), x.device[1])


def _prepare_launches(
    problem: ForwardProblem | BackwardProblem,
    operands: tuple[str, ...],
    outputs: tuple[Output | None, ...],
    device_index: int,
) -> Prepared:
    chosen = plan(problem, launch.device(device_index))
    return Prepared(outputs, chosen.workspace_bytes, launch.Call(chosen, operands, device_index))


# ---- Checks. Every message names the argument, what it was and what it must be.


def _check_mask(output_mask: Any) -> tuple[bool, bool, bool]:
    message = f"output_mask must be three bools, for dx, dweight and dbias; got {output_mask!r}"
    if not isinstance(output_mask, Sequence) or not all(isinstance(item, (bool, np.bool_)) for item in output_mask):
        raise TypeError(message)
    if len(output_mask) != 3:
        raise ValueError(message)
    return bool(output_mask[0]), bool(output_mask[1]), bool(output_mask[2])


def _check_x(x: View, axis: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Output]:
    """Check x and axis. Returns the axes, not negative and sorted; the shape over them; and what mean and rstd are."""
    _check_dtype(x, "x")
    dimensions = len(x.shape)
    normalized = []
    for item in axis:
        if not -dimensions <= item < dimensions:
            raise ValueError(f"axis {item} is out of range for x with {dimensions} dimensions (shape {x.shape})")
        normalized.append(item % dimensions)
    if not normalized or len(set(normalized)) < len(normalized):
        raise ValueError(f"axis must name at least one axis and none twice; got {axis} for x of shape {x.shape}")
    normalized.sort()
    kept_shape = tuple(size for i, size in enumerate(x.shape) if i not in normalized)
    stats = Output(kept_shape, DTYPES[x.dtype].compute)
    return tuple(normalized), tuple(x.shape[i] for i in normalized), stats


def _check_dtype(view: View, name: str) -> None:
    if view.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {view.dtype}; it must be one of {', '.join(DTYPES)}")
    itemsize = DTYPES[view.dtype].itemsize
    if view.device[0] == "cuda" and view.pointer % itemsize:
        raise ValueError(f"{name} lies at an address that is no multiple of its element size, {itemsize} bytes")


def _check_vector(view: View | None, name: str, shape: tuple[int, ...], x: View) -> None:
    if view is None:
        return
    _check_dtype(view, name)
    _check_like(view, name, shape, view.dtype, x, contiguous=True)


def _check_like(
    view: View, name: str, shape: tuple[int, ...], dtype: str, x: View, *, contiguous: bool = False
) -> None:
    if view.shape != shape:
        raise ValueError(f"{name} has shape {view.shape}; for x of shape {x.shape} it must be {shape}")
    if view.dtype != dtype:
        raise TypeError(f"{name} has dtype {view.dtype}; for x of dtype {x.dtype} it must be {dtype}")
    if view.device != x.device:
        raise RuntimeError(f"{name} is on {_device_name(view)} and x on {_device_name(x)}; they must be on one device")
    _check_dtype(view, name)
    if contiguous and not _is_contiguous(view):
        raise ValueError(f"{name} has strides {view.strides} (in elements) for shape {shape}; it must be C-contiguous")


def _device_name(view: View) -> str:
    return "the CPU" if view.device[0] == "cpu" else f"CUDA device {view.device[1]}"


def _is_contiguous(view: View) -> bool:
    expected = contiguous_strides(view.shape)
    return 0 in view.shape or all(
        size == 1 or ours == theirs for size, ours, theirs in zip(view.shape, view.strides, expected)
    )


# TensorFlow's AutoGraph would otherwise translate the source of these at their first call inside a tf.function.
for _function in (layer_norm, layer_norm_backward):
    setattr(_function, "autograph_info__", {})  # noqa: B010
