"""`RowNorm`, the op behind layer norm and RMS norm: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cunorm import execute, on_cpu, op_names, reference
from cunorm.checks import (
    check_activation,
    check_axis,
    check_eps,
    check_like,
    check_vector,
    check_weight_offset,
    check_x,
)
from cunorm.prepare import gradient_outputs, prepare_launches, views_of
from cunorm.prepared import BACKWARD_OPERANDS, FORWARD_OPERANDS, Output, Prepared
from cunorm.problem import BackwardProblem, ForwardProblem, Norm, View

__all__ = ["RowNorm"]


@dataclass(frozen=True, eq=False)
class RowNorm:
    """`layer_norm` or `rms_norm` with its attributes, as the adapters pass it around (see `cunorm.prepared.Op`).

    There is one object for the same attributes, made by `of`: as a part of keys it is compared by identity, in no time.
    """

    axis: tuple[int, ...]
    eps: float
    norm: Norm
    name_in_ops: str = field(default="", init=False, repr=False)

    updates_running = False

    @staticmethod
    def of(
        axis: int | Sequence[int],
        eps: float,
        activation: str | None = None,
        centered: bool = True,
        weight_offset: float = 0.0,
    ) -> RowNorm:
        """The op of a user's arguments."""
        if op_names.is_compiling():
            if isinstance(axis, (list, tuple)):  # the torch.compile of PyTorch 2.5 does not know list | tuple
                axis = [op_names.as_constant(item) for item in axis]
            else:
                axis = op_names.as_constant(axis)
            eps, weight_offset = op_names.as_constant(eps), op_names.as_constant(weight_offset)
            name = _name_of(axis, eps, activation, centered, weight_offset)
            if name is None:
                return _make(axis, eps, activation, centered, weight_offset)  # says what is wrong
            return getattr(op_names.OPS, name)  # type: ignore[no-any-return]
        if type(axis) is int:  # nearly always; what stands in a sequence may equal an int and be refused
            try:
                return _op_of(axis, eps, activation, centered, weight_offset)  # type: ignore[no-any-return]
            except TypeError:  # of something that cannot be hashed: what is wrong with it is said below
                pass
        return _op_of.__wrapped__(axis, eps, activation, centered, weight_offset)  # type: ignore[no-any-return]

    @functools.cached_property
    def keeps_bias(self) -> bool:
        return self.norm.activation is not None

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
        axis, columns_shape, statistic = check_x(x, self.axis)
        check_vector(weight, "weight", columns_shape, x, self.norm.weight_offset)
        check_vector(bias, "bias", columns_shape, x)
        if residual is not None:
            check_like(residual, "residual", x.shape, x.dtype, x)
        if out is not None:
            check_like(out, "out", x.shape, x.dtype, x, contiguous=True)
        y = Output(x.shape, x.dtype)
        residual_out = None if residual is None else y
        mean = statistic if stats and self.norm.centered else None
        rstd = statistic if stats else None
        outputs = (y if out is None else None, residual_out, mean, rstd)
        y_view = out or y.view(x.device)
        residual_out_view, *statistics = views_of((residual_out, mean, rstd), x.device)

        if x.device[0] == "cpu":

            def run(
                x: Any, residual: Any, weight: Any, bias: Any, y: Any, residual_out: Any, mean: Any, rstd: Any
            ) -> None:
                results = {"out": y, "residual_out": residual_out, "mean_out": mean, "rstd_out": rstd}
                options = {"axis": axis, "eps": self.eps, "norm": self.norm, "residual": residual}
                reference.row_norm(x, weight, bias, **options, **results)

            views = (x, residual, weight, bias, y_view, residual_out_view, *statistics)
            return on_cpu.prepare_on_cpu(run, views, outputs)
        problem = ForwardProblem.of(
            x,
            weight,
            bias,
            y_view,
            axis=axis,
            eps=self.eps,
            stats=stats,
            norm=self.norm,
            residual=residual,
            residual_out=residual_out_view,
        )
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
        axis, columns_shape, statistic = check_x(x, self.axis)
        check_vector(weight, "weight", columns_shape, x, self.norm.weight_offset)
        check_vector(bias, "bias", columns_shape, x)
        check_like(dy, "dy", x.shape, x.dtype, x)
        if dresidual_out is not None:
            check_like(dresidual_out, "dresidual_out", x.shape, x.dtype, x)
        if self.norm.centered:
            if mean is None:
                raise TypeError("mean is None; it must be the mean that layer_norm returned")
            check_like(mean, "mean", statistic.shape, statistic.dtype, x, contiguous=True)
        if rstd is None:
            op_name = "layer_norm" if self.norm.centered else "rms_norm"
            raise TypeError(f"rstd is None; it must be the rstd that {op_name} returned")
        check_like(rstd, "rstd", statistic.shape, statistic.dtype, x, contiguous=True)
        like_x = Output(x.shape, x.dtype)
        outputs = gradient_outputs(like_x, columns_shape, weight, bias, output_mask, bias_dtype)
        dx, dweight, dbias = outputs

        if x.device[0] == "cpu":

            def run(
                dy: Any, dresidual_out: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, *results: Any
            ) -> None:
                options = {"axis": axis, "norm": self.norm, "bias": bias, "dresidual_out": dresidual_out}
                outs = dict(zip(("dx_out", "dweight_out", "dbias_out"), results))
                reference.row_norm_backward(dy, x, weight, mean, rstd, output_mask=output_mask, **options, **outs)

            inputs = (dy, dresidual_out, x, weight, bias, mean, rstd)
            return on_cpu.prepare_on_cpu(run, (*inputs, *views_of(outputs, x.device)), outputs)
        problem = BackwardProblem.of(
            dy,
            x,
            weight,
            None if dx is None else dx.view(x.device),
            axis=axis,
            dweight=None if dweight is None else dweight.dtype,
            dbias=None if dbias is None else dbias.dtype,
            norm=self.norm,
            bias=bias,
            dresidual_out=dresidual_out,
        )
        return prepare_launches(problem, BACKWARD_OPERANDS, outputs, x.device)


def _make(axis: Any, eps: Any, activation: Any, centered: bool, weight_offset: Any) -> RowNorm:
    norm = Norm(centered, check_weight_offset(weight_offset), check_activation(activation))
    return RowNorm(check_axis(axis), check_eps(eps), norm)


def _arguments_of(op: RowNorm) -> tuple[Any, ...]:
    return op.axis, op.eps, op.norm.activation, op.norm.centered, op.norm.weight_offset


_op_of, _name_of = op_names.interned(_make, "row_norm", _arguments_of)
