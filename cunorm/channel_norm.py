"""`ChannelNorm`, the op behind the norms of channels: checks in the user's terms, then problem, plan, launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cunorm import execute, on_cpu, op_names, reference
from cunorm.checks import (
    check_activation,
    check_bool,
    check_channels,
    check_convention,
    check_data_format,
    check_eps,
    check_groups,
    check_like,
    check_momentum,
    check_num_groups,
    check_out,
    check_vector,
    memory_order,
)
from cunorm.prepare import gradient_outputs, prepare_launches, views_of
from cunorm.prepared import BACKWARD_OPERANDS, FORWARD_OPERANDS, RUNNING_OPERANDS, Output, Prepared
from cunorm.problem import DTYPES, ChannelBackward, ChannelForward, RunningStatistics, View

__all__ = ["CHANNEL_NORMS", "ChannelNorm"]

# The public norms of channels, by name.
CHANNEL_NORMS: tuple[str, ...] = ("instance_norm", "group_norm", "batch_norm")


@dataclass(frozen=True, eq=False)
class ChannelNorm:
    """One of the norms of channels with its attributes, as the adapters pass it around (see `cunorm.prepared.Op`).

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
        if op_names.is_compiling():
            num_groups, eps, momentum = map(op_names.as_constant, (num_groups, eps, momentum))
            arguments = (name, data_format, eps, activation, num_groups, training, momentum, convention)
            found = _name_of(*arguments)
            if found is None:
                return _make(*arguments)  # says what is wrong
            return getattr(op_names.OPS, found)  # type: ignore[no-any-return]
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
        sizes = _Sizes.of(self, x)
        check_vector(weight, "weight", (sizes.channels,), x)
        check_vector(bias, "bias", (sizes.channels,), x)
        for name, view in zip(("running_mean", "running_var"), running):
            check_vector(view, name, (sizes.channels,), x)
        least = 2 if self.unbiased else 1  # as PyTorch has it, and as Keras, where a last batch of one sample trains
        if self.name == "batch_norm" and self.training and sizes.values_per_channel < least:
            found = "one value" if sizes.values_per_channel else "no values"
            must = f"in training there must be {'more than' if self.unbiased else 'at least'} one"
            raise ValueError(f"x has {found} per channel (shape {x.shape}); {must}")
        if out is not None:
            check_out(out, sizes.like_x, x)
        y = None if self.statistics_alone else sizes.like_x
        statistic = sizes.statistic if stats else None
        outputs = (y if out is None else None, None, statistic, statistic)
        y_view = None if y is None else out or y.view(x.device)

        if x.device[0] == "cpu":
            views = (x, None, weight, bias, y_view, *running, *views_of(outputs[1:], x.device))
            return on_cpu.prepare_on_cpu(functools.partial(_run_forward, self, sizes), views, outputs)
        problem = ChannelForward.of(
            x,
            weight,
            bias,
            y_view,
            channel_axis=sizes.channel_axis,
            channels_per_set=sizes.channels_per_set,
            over_samples=self.over_samples,
            eps=self.eps,
            stats=stats,
            activation=self.activation,
            running=_running_statistics(self, *running) if running else None,
        )
        return prepare_launches(problem, RUNNING_OPERANDS if running else FORWARD_OPERANDS, outputs, x.device)

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
        sizes = _Sizes.of(self, x)
        check_vector(weight, "weight", (sizes.channels,), x)
        check_vector(bias, "bias", (sizes.channels,), x)
        check_like(dy, "dy", x.shape, x.dtype, x)
        for name, view in (("mean", mean), ("rstd", rstd)):
            if view is None:
                raise TypeError(f"{name} is None; it must be the {name} that {self.name} returned")
            check_like(view, name, sizes.statistic.shape, sizes.statistic.dtype, x, contiguous=True)
        outputs = gradient_outputs(sizes.like_x, (sizes.channels,), weight, bias, output_mask, bias_dtype)
        dx, dweight, dbias = outputs

        if x.device[0] == "cpu":
            views = (dy, None, x, weight, bias, mean, rstd, *views_of(outputs, x.device))
            return on_cpu.prepare_on_cpu(functools.partial(_run_backward, self, sizes, output_mask), views, outputs)
        problem = ChannelBackward.of(
            dy,
            x,
            weight,
            bias,
            None if dx is None else dx.view(x.device),
            channel_axis=sizes.channel_axis,
            channels_per_set=sizes.channels_per_set,
            over_samples=self.over_samples,
            dweight=None if dweight is None else dweight.dtype,
            dbias=None if dbias is None else dbias.dtype,
            activation=self.activation,
            given=not self.training,
        )
        return prepare_launches(problem, BACKWARD_OPERANDS, outputs, x.device)


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
        check_bool("training", training),
        1 - share if torch_convention else share,
        share if torch_convention else 1 - share,
        torch_convention,
    )


def _arguments_of(op: ChannelNorm) -> tuple[Any, ...]:
    share, convention = (op.taken, "torch") if op.unbiased else (op.kept, "keras")
    return op.name, op.data_format, op.eps, op.activation, op.num_groups, op.training, share, convention


_op_of, _name_of = op_names.interned(_make, "channel_norm", _arguments_of)


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
