"""The public functions of activations on their own: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cunorm import adapters, execute, on_cpu, op_names, reference
from cunorm.checks import check_like, check_one_of, check_pointwise, check_pointwise_mask
from cunorm.prepare import prepare_launches, views_of
from cunorm.prepared import BACKWARD_OPERANDS, FORWARD_OPERANDS, Output, Prepared
from cunorm.problem import PointwiseBackward, PointwiseForward, View

__all__ = ["Pointwise", "gelu", "gelu_backward"]


def gelu(x: Any, *, approximate: str = "none", bias: Any = None, out: Any = None) -> Any:
    """The Gaussian error linear unit, ``y = x * Phi(x)``; with a bias ``z * Phi(z)`` of ``z = x + bias``, in one pass.

    Phi is the distribution function of the standard normal (Hendrycks, Gimpel 2016, arXiv:1606.08415; the same as
    ``torch.nn.functional.gelu``). The sum and the function are float32 whatever the data, float64 for float64 data, and
    are rounded once.

    Parameters
    ----------
    x : tensor
        Any shape; float16, bfloat16, float32 or float64. A NumPy, CuPy, PyTorch, JAX or TensorFlow tensor, or anything
        with ``__dlpack__``. It may be a strided view; it is not copied and not modified.
    approximate : {"none", "tanh"}
        ``"none"`` is the exact function. ``"tanh"`` is ``z * (1 + tanh(u)) / 2``, ``u = sqrt(2 / pi) * (z + 0.044715
        z^3)``, of the same paper.
    bias : tensor, optional
        Added to x before: one number for each place along x's last axis, of shape ``x.shape[-1:]``; C-contiguous; any
        of the four dtypes, also another than x's; on x's device.
    out : tensor, optional
        Where to write y: C-contiguous, with x's shape, dtype and device. Not for JAX and TensorFlow, whose tensors are
        immutable, and not where gradients are recorded. It may be ``x`` itself, but not overlap it otherwise.

    Returns
    -------
    y : tensor
        Of x's type, shape, dtype and device, C-contiguous. In PyTorch, JAX and TensorFlow it is differentiable in x and
        bias.

    Raises
    ------
    ValueError
        For shapes, strides or an approximate that do not fit.
    TypeError
        For dtypes and tensor types that are not supported.
    RuntimeError
        For tensors on different devices, or a device, driver or compiler that cannot be used.

    Notes
    -----
    At minus infinity y is the limit, 0, where PyTorch has NaN.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[-1.0, 0.0, 1.0]])
    >>> cunorm.gelu(x).round(4)
    array([[-0.1587,  0.    ,  0.8413]])
    >>> cunorm.gelu(x, approximate="tanh", bias=np.array([0.0, 1.0, 0.0])).round(4)
    array([[-0.1588,  0.8412,  0.8412]])
    """
    op = Pointwise.of(approximate)
    y, _, _, _ = adapters.adapter_of(x).apply(op, x, None, None, bias, out, False)
    return y


def gelu_backward(
    dy: Any,
    x: Any,
    *,
    approximate: str = "none",
    bias: Any = None,
    output_mask: tuple[bool, bool] = (True, True),
) -> Any:
    """The gradients of `gelu`, for libraries without automatic differentiation.

    With ``z = x + bias``: ``dx = dy * (Phi(z) + z * phi(z))``, where phi is the density of the standard normal, or the
    derivative of the approximation; and ``dbias = sum(dx)`` over all axes but the last, in the same pass over memory.

    Parameters
    ----------
    dy : tensor
        The gradient of y, with x's shape, dtype and device; it may be strided.
    x, approximate, bias
        As `gelu` was given them.
    output_mask : tuple of two bools
        Which of dx and dbias to compute. Without a bias there is no dbias, whatever it says.

    Returns
    -------
    dx : tensor or None
        Of x's shape and dtype; None where not asked for.
    dbias : tensor or None
        Only with ``bias``: of its shape and dtype; None where not asked for. The numbers of dx are summed before they
        are rounded, in an order that is always the same.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `gelu`.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[-1.0, 0.0], [1.0, 0.0]])
    >>> dy = np.ones_like(x)
    >>> cunorm.gelu_backward(dy, x).round(4)
    array([[-0.0833,  0.5   ],
           [ 1.0833,  0.5   ]])
    >>> dx, dbias = cunorm.gelu_backward(dy, x, bias=np.zeros(2))
    >>> dbias
    array([1., 1.])
    """
    op, mask = Pointwise.of(approximate), check_pointwise_mask(output_mask, bias is not None)
    dx, _, dbias = adapters.adapter_of(x).backward(op, dy, None, x, None, bias, None, None, mask, None)
    return dx if bias is None else (dx, dbias)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An activation as the adapters pass it around (see `cunorm.prepared.Op`): of its operands it has x, bias and y.

    There is one object for each activation: as a part of keys it is compared by identity, in no time.
    """

    activation: str
    name_in_ops: str = field(default="", init=False, repr=False)

    updates_running = False

    @staticmethod
    def of(approximate: Any) -> Pointwise:
        """The op of a user's argument."""
        return _OPS[check_one_of("approximate", approximate, _OPS, "'none' or 'tanh'")]

    @property
    def keeps_bias(self) -> bool:
        return True

    @execute.prepared_once
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
        check_pointwise(x, bias)
        if out is not None:
            check_like(out, "out", x.shape, x.dtype, x, contiguous=True)
        y = Output(x.shape, x.dtype)
        outputs = (y if out is None else None, None, None, None)
        y_view = out or y.view(x.device)

        if x.device[0] == "cpu":

            def run(x: Any, residual: Any, weight: Any, bias: Any, y: Any) -> None:
                reference.pointwise(x, bias, activation=self.activation, out=y)

            return on_cpu.prepare_on_cpu(run, (x, None, None, bias, y_view), outputs)
        problem = PointwiseForward.of(x, bias, y_view, activation=self.activation)
        return prepare_launches(problem, FORWARD_OPERANDS, outputs, x.device)

    @execute.prepared_once
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
        check_pointwise(x, bias)
        check_like(dy, "dy", x.shape, x.dtype, x)
        dx = Output(x.shape, x.dtype) if output_mask[0] else None
        dbias = Output(bias.shape, bias.dtype) if bias is not None and output_mask[2] else None
        outputs = (dx, None, dbias)

        if x.device[0] == "cpu":

            def run(
                dy: Any, added: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, dx: Any, _: Any, dbias: Any
            ) -> None:
                mask = output_mask[0], output_mask[2]
                results = {"dx_out": dx, "dbias_out": dbias}
                reference.pointwise_backward(dy, x, bias, activation=self.activation, output_mask=mask, **results)

            inputs = (dy, None, x, None, bias, None, None)
            return on_cpu.prepare_on_cpu(run, (*inputs, *views_of(outputs, x.device)), outputs)
        problem = PointwiseBackward.of(
            dy,
            x,
            bias,
            None if dx is None else dx.view(x.device),
            dbias=None if dbias is None else dbias.dtype,
            activation=self.activation,
        )
        return prepare_launches(problem, BACKWARD_OPERANDS, outputs, x.device)


_OPS = {"none": Pointwise("gelu"), "tanh": Pointwise("gelu_tanh")}
for _op in _OPS.values():
    op_names.name_op(_op, _op.activation)
