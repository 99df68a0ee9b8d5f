"""PyTorch layers: those of ``torch.nn`` with cunorm's functions inside, and with an activation behind if one is wanted.

Each is a subclass of the layer of torch.nn that has its name and differs in ``forward`` alone: constructor, parameters,
buffers, state dict and whatever looks for a ``torch.nn.LayerNorm`` go on working.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

import cunorm
from cunorm.adapters.torch.adapter import not_strided
from cunorm.checks import check_activation, check_momentum, no_tensor

__all__ = [
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
]


_SINGLE_EPS, _DOUBLE_EPS = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
_STRIDED = torch.strided


class _Activated(nn.Module):
    """What the norms have besides torch.nn's: an activation in the same kernel."""

    activation: str | None = None  # of the class, for layers that were torch.nn's when they were made

    __signature__: Any  # of the constructor, which `torch.nn.utils.skip_init` looks into

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        theirs = cls.__mro__[cls.__mro__.index(_Activated) + 1]
        parameters = dict(inspect.signature(theirs).parameters)
        parameters["activation"] = inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None)
        signature = inspect.Signature(sorted(parameters.values(), key=lambda parameter: parameter.kind))
        cls.__signature__ = signature if cls.__init__ is _Activated.__init__ else None  # None: that of its own

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = check_activation(activation)
        make_numbers_plain(self)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"


def make_numbers_plain(module: nn.Module) -> None:
    """Make a layer's eps and momentum Python's numbers where they are NumPy's, which torch.compile takes for arrays."""
    for name in ("eps", "momentum"):
        value = getattr(module, name, None)
        if isinstance(value, np.generic):
            setattr(module, name, value.item())


def tensor_of(module: nn.Module, name: str) -> Any:
    """A parameter or buffer of a layer, in a quarter of the time that ``torch.nn.Module.__getattr__`` takes."""
    if name in module._parameters:
        return module._parameters[name]
    if name in module._buffers:
        return module._buffers[name]
    return getattr(module, name)  # a hook or a parametrization has put something else in its place


def parameter_of(module: nn.Module, name: str) -> Any:
    """A weight or bias of a layer, contiguous as the functions take it. torch.nn's layers take any."""
    return _contiguous(tensor_of(module, name))


def without_strided(module: nn.Module, given: Any) -> Tensor:
    """What a layer makes of an input that is no strided tensor: a leaf of the graph that torch.fx traces, or an error.

    The layers of torch.nn are such leaves. The error is that of the functions, to which not every input would come.
    """
    if isinstance(given, Tensor):
        raise not_strided("x", given)
    if not is_traced_leaf(module, given):
        raise no_tensor("input", given, "PyTorch", "a PyTorch tensor")
    path = given.tracer.path_of_module(module)
    leaf: Tensor = given.tracer.create_proxy("call_module", path, (given,), {})  # in the place of a tensor
    return leaf


def is_traced_leaf(module: nn.Module, given: Any) -> bool:
    """Whether a layer is called by torch.fx, which traces a model that the layer is in."""
    return isinstance(given, fx.Proxy) and module is not getattr(given.tracer, "root", None)


def _contiguous(tensor: Any) -> Any:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


class LayerNorm(_Activated, nn.LayerNorm):
    """``torch.nn.LayerNorm``, computed by `cunorm.layer_norm`: ``y = (x - mean) * rstd * weight + bias``.

    With statistics over the last axes, those of ``normalized_shape`` (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    Parameters
    ----------
    *args, **kwargs
        Those of ``torch.nn.LayerNorm``: normalized_shape, eps, elementwise_affine, bias, device, dtype.
    activation : {None, "relu", "silu", "gelu", "gelu_tanh"}
        Applied to the result in the same kernel, as `cunorm.layer_norm` says.

    Notes
    -----
    ``input`` may be float16, bfloat16, float32 or float64; weight and bias may have another of these dtypes. The result
    has the dtype of ``input``, also under ``torch.autocast``, where PyTorch's own is float32 on CUDA.

    Raises
    ------
    ValueError
        For another shape than ``(..., *normalized_shape)``, and an activation that there is not.
    TypeError, RuntimeError
        As `cunorm.layer_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import LayerNorm
    >>> layer = LayerNorm(3, eps=0.0, activation="relu")
    >>> layer
    LayerNorm((3,), eps=0.0, elementwise_affine=True, bias=True, activation='relu')
    >>> layer.load_state_dict(torch.nn.LayerNorm(3).state_dict())
    <All keys matched successfully>
    >>> layer(torch.tensor([[1.0, 2.0, 3.0]])).detach().round(decimals=4)
    tensor([[0.0000, 0.0000, 1.2247]])
    """

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) or input.is_nested:
            return without_strided(self, input)
        axis = _axis(input, self.normalized_shape)
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        y: Tensor = cunorm.layer_norm(input, weight, bias, axis=axis, eps=self.eps, activation=self.activation)
        return y


class RMSNorm(_Activated, nn.RMSNorm):
    """``torch.nn.RMSNorm``, computed by `cunorm.rms_norm`: ``y = x * rstd * weight``.

    With statistics over the last axes, those of ``normalized_shape`` (Zhang, Sennrich 2019, arXiv:1910.07467).

    The arguments are those of ``torch.nn.RMSNorm``, and activation; an eps of None is the machine epsilon of float32,
    for float64 input that of float64. Activations, dtypes and errors are as `LayerNorm` has them.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import RMSNorm
    >>> RMSNorm(3, eps=0.0)(torch.tensor([[1.0, 2.0, 3.0]])).detach().round(decimals=4)
    tensor([[0.4629, 0.9258, 1.3887]])
    """

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.is_nested:
            return without_strided(self, x)
        eps = self.eps
        if eps is None:
            eps = _DOUBLE_EPS if x.dtype is torch.float64 else _SINGLE_EPS
        axis, weight = _axis(x, self.normalized_shape), parameter_of(self, "weight")
        y: Tensor = cunorm.rms_norm(x, weight, axis=axis, eps=eps, activation=self.activation)
        return y


def _axis(x: Tensor, shape: tuple[int, ...]) -> int | tuple[int, ...]:
    """The last axes, which must have this shape."""
    # Without weight and bias nothing else would notice.
    if x.shape[-len(shape) :] != tuple(shape) or not shape:
        if not shape:  # in which every shape ends
            raise ValueError("normalized_shape is (); it must name one size at least")
        raise ValueError(f"the input has shape {tuple(x.shape)}; it must end in normalized_shape, {shape}")
    return -1 if len(shape) == 1 else tuple(range(-len(shape), 0))


class GroupNorm(_Activated, nn.GroupNorm):
    """``torch.nn.GroupNorm``, computed by `cunorm.group_norm` (Wu, He 2018, arXiv:1803.08494).

    The arguments are those of ``torch.nn.GroupNorm``, and activation. ``input`` is (N, C, ...); the result lies in
    memory as it does, ``torch.channels_last`` say, without a copy. Activations, dtypes and errors are as `LayerNorm`
    has them; one value a group, whose variance would be 0, is a ValueError.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import GroupNorm
    >>> GroupNorm(2, 4, eps=0.0)(torch.tensor([[1.0, 3.0, 5.0, 9.0]])).detach()
    tensor([[-1.,  1., -1.,  1.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            return without_strided(self, input)
        if input.numel() == self.num_groups:
            must = "it must have more than one value a group"
            raise ValueError(f"the input has shape {tuple(input.shape)} and num_groups is {self.num_groups}; {must}")
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        y: Tensor = cunorm.group_norm(input, self.num_groups, weight, bias, eps=self.eps, activation=self.activation)
        return y


class _InstanceNormForward(_Activated, _InstanceNorm):
    # torch.nn's calls a method of self for the rest, which must stay torch.nn's: `replace_norms` calls a layer's own
    # forward too, where self is ours.
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) or input.is_nested:
            return without_strided(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        dimensions: int = self._get_no_batch_dim()  # type: ignore[no-untyped-call]
        channels = input.shape[-dimensions]
        if channels != self.num_features and not self.affine:  # else the weight does not fit, which is an error
            found = f"input's size in channels is {channels} and num_features is {self.num_features}"
            warnings.warn(f"{found}, which is not used because affine=False", stacklevel=2)
        if input.dim() == dimensions:
            if input.layout is not _STRIDED:
                return without_strided(self, input)
            return self._compute(input.unsqueeze(0)).squeeze(0)
        return self._compute(input)

    def _compute(self, input: Tensor) -> Tensor:
        weight, bias, eps = parameter_of(self, "weight"), parameter_of(self, "bias"), self.eps
        mean, var = tensor_of(self, "running_mean"), tensor_of(self, "running_var")
        y: Tensor
        momentum = 0.0
        if mean is not None:
            _check_channels(input, mean)
            if self.momentum is not None:
                momentum = check_momentum(self.momentum)
        if not self.training and self.track_running_stats:
            y = cunorm.batch_norm(
                input,
                weight,
                bias,
                running_mean=_contiguous(mean),
                running_var=_contiguous(var),
                training=False,
                eps=eps,
                activation=self.activation,
            )
            return y
        positions = math.prod(input.shape[2:])
        if positions == 1:
            raise ValueError(f"the input has shape {tuple(input.shape)}; it must have more than one value a channel")
        options: dict[str, Any] = {"eps": eps, "activation": self.activation}
        if mean is None or var is None or not input.numel():  # of nothing there are no statistics
            y = cunorm.instance_norm(input, weight, bias, **options)
            return y
        y, new_mean, rstd = cunorm.instance_norm(input, weight, bias, return_stats=True, **options)
        # The unbiased variance, averaged over the samples, as F.instance_norm has it.
        new_var = _unbiased(rstd, eps, positions).mean(0)
        with torch.no_grad():
            mean.lerp_(new_mean.mean(0).to(mean.dtype), momentum)
            var.lerp_(new_var.to(var.dtype), momentum)
        return y


def _check_channels(input: Tensor, mean: Tensor) -> None:
    """Refuse an input of other channels than the running statistics, which would be broadcast."""
    if input.shape[1] != mean.shape[0]:
        raise ValueError(
            f"the input has {input.shape[1]} channels (shape {tuple(input.shape)}); "
            f"it must have {mean.shape[0]}, as running_mean has"
        )


def _unbiased(rstd: Tensor, eps: float, count: int) -> Tensor:
    """The variance with the divisor ``count - 1``, of which rstd was made with the divisor ``count``."""
    return (rstd.pow(-2) - eps).clamp_min(0) * (count / (count - 1))


class InstanceNorm1d(_InstanceNormForward, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d``, computed by `cunorm.instance_norm` (Ulyanov et al. 2016, arXiv:1607.08022).

    The arguments are those of ``torch.nn.InstanceNorm1d``, and activation. ``input`` is (N, C, L) or (C, L). The rest
    is as `GroupNorm` has it.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import InstanceNorm1d
    >>> InstanceNorm1d(2, eps=0.0)(torch.tensor([[1.0, 3.0], [5.0, 9.0]]))
    tensor([[-1.,  1.],
            [-1.,  1.]])
    """


class InstanceNorm2d(_InstanceNormForward, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d``: as `InstanceNorm1d`, of (N, C, H, W) or (C, H, W)."""


class InstanceNorm3d(_InstanceNormForward, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d``: as `InstanceNorm1d`, of (N, C, D, H, W) or (C, D, H, W)."""


class _BatchNormForward(_Activated, _BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            return without_strided(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        training, tracks, eps, activation = self.training, self.track_running_stats, self.eps, self.activation
        weight, bias = parameter_of(self, "weight"), parameter_of(self, "bias")
        mean: Any = None
        var: Any = None
        if tracks or not training:
            mean, var = tensor_of(self, "running_mean"), tensor_of(self, "running_var")
        y: Tensor
        of_batch = training or (mean is None and var is None)
        if of_batch and not input.numel():  # which cunorm.batch_norm refuses, and torch.nn's layer does not
            y = super().forward(input)
            return y
        # Counted once cunorm has taken the batch.
        batches = tensor_of(self, "num_batches_tracked") if training and tracks else None
        if batches is not None and self.momentum is None and mean is not None and var is not None:
            # The average of all batches. How many they were is not read, which would wait for the device.
            y, new_mean, rstd = cunorm.batch_norm(
                input, weight, bias, training=True, eps=eps, activation=activation, return_stats=True
            )
            _check_channels(input, mean)
            new_var = _unbiased(rstd, eps, input.numel() // input.shape[1])
            share = batches.add_(1).double().reciprocal()
            with torch.no_grad():
                mean.lerp_(new_mean.to(mean.dtype), share.to(mean.dtype))
                var.lerp_(new_var.to(var.dtype), share.to(var.dtype))
            return y
        given_mean, given_var = _contiguous(mean), _contiguous(var)
        y = cunorm.batch_norm(
            input,
            weight,
            bias,
            running_mean=given_mean,
            running_var=given_var,
            training=of_batch,
            momentum=0.0 if self.momentum is None else self.momentum,
            eps=eps,
            activation=activation,
        )
        if of_batch and not (given_mean is mean and given_var is var):  # what was updated are copies
            with torch.no_grad():
                mean.copy_(given_mean)
                var.copy_(given_var)
        if batches is not None:
            batches.add_(1)
        return y


class BatchNorm1d(_BatchNormForward, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, computed by `cunorm.batch_norm` (Ioffe, Szegedy 2015, arXiv:1502.03167).

    The arguments are those of ``torch.nn.BatchNorm1d``, and activation, of which
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` knows nothing. ``input`` is (N, C) or (N, C, L); running
    statistics may have another dtype. The rest is as `GroupNorm` has it.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import BatchNorm1d
    >>> layer = BatchNorm1d(2, eps=0.0)
    >>> layer(torch.tensor([[1.0, 4.0], [3.0, 8.0]])).detach()
    tensor([[-1., -1.],
            [ 1.,  1.]])
    >>> layer.running_mean
    tensor([0.2000, 0.6000])
    """


class BatchNorm2d(_BatchNormForward, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``: as `BatchNorm1d`, of (N, C, H, W)."""


class BatchNorm3d(_BatchNormForward, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``: as `BatchNorm1d`, of (N, C, D, H, W)."""


def memory_order(x: Tensor) -> tuple[int, ...]:
    """Where each of x's axes comes in memory, the first the outermost; () if numbers are repeated along one."""
    if x.is_contiguous():
        return tuple(range(x.dim()))
    strides = x.stride()
    if 0 in strides:
        return ()
    # Counted, since torch.compile sorts no sizes that it does not know.
    places = []
    for axis, stride in enumerate(strides):
        outer = [i for i, other in enumerate(strides) if other > stride or (other == stride and i < axis)]
        places.append(len(outer))
    return tuple(places)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """`cunorm.gelu`, whose result lies in memory as x does."""
    y: Tensor
    order = () if x.is_contiguous() else memory_order(x)
    if not order:
        y = cunorm.gelu(x, approximate=approximate)
        return y
    own = tuple(range(x.dim()))
    y = cunorm.gelu(x.movedim(own, order), approximate=approximate)
    return y.movedim(order, own)


class GELU(nn.GELU):
    """``torch.nn.GELU``, computed by `cunorm.gelu`: ``x * Phi(x)``, or its approximation (arXiv:1606.08415).

    ``approximate`` is "none" or "tanh". ``input`` has any shape; float16, bfloat16, float32 or float64. The result has
    its shape and dtype, and its axes lie in memory in the same order; but where the input has one number in several
    places (``expand``) it is contiguous. Errors are those of `cunorm.gelu`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.adapters.torch import GELU
    >>> GELU()(torch.tensor([-1.0, 0.0, 1.0])).round(decimals=4)
    tensor([-0.1587,  0.0000,  0.8413])
    """

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) or input.layout is not _STRIDED:
            return without_strided(self, input)
        return gelu(input, self.approximate)
