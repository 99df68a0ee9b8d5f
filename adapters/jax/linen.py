"""Flax Linen's norm layers over cunorm: ``from cunorm.adapters.jax import linen``.

Each is a subclass of the layer of its name in `flax.linen`: the same attributes, names and collections (``params`` with
``scale`` and ``bias``, ``batch_stats`` with ``mean`` and ``var``), so that the variables of one are those of the other,
and results that differ by rounding. ``use_fast_variance`` makes no difference: the variance is always the accurate one.
``mask``, ``axis_index_groups`` and ``force_float32_reductions=False`` are refused, and ``axis_name`` too but for
BatchNorm, with a ValueError; other errors are those of the functions named.

>>> import jax, jax.numpy as jnp
>>> from cunorm.adapters.jax import linen
>>> x, layer = jnp.array([[1.0], [3.0]]), linen.BatchNorm(use_running_average=False, momentum=0.5)
>>> y, updates = layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"])
>>> y.round(3).tolist(), updates["batch_stats"]["mean"]
([[-1.0], [1.0]], Array([1.], dtype=float32))
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype
from flax.linen.module import merge_param

import cunorm
from cunorm.adapters.jax import flax_norms
from cunorm.adapters.jax.flax_norms import array_of, check_axes, check_layer

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _vectors(layer: Any, x: Any, axes: Any = -1, name: str = "feature_axes") -> tuple[Any, Any, Any]:
    """The layer's scale and bias, created at the first call, and the dtype of the result."""
    shape = tuple(x.shape[axis] for axis in check_axes(x, axes, name))
    scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
    use_bias = getattr(layer, "use_bias", False)
    bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if use_bias else None
    return scale, bias, canonicalize_dtype(x, scale, bias, dtype=layer.dtype)


class LayerNorm(linen.LayerNorm):
    """`cunorm.layer_norm` (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    XLA applies scale and bias that do not go along ``reduction_axes``.
    """

    @linen.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x = array_of(x)
        vectors = _vectors(self, x, self.feature_axes)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.layer_norm, x, *vectors, self.epsilon, *axes)


class RMSNorm(linen.RMSNorm):
    """`cunorm.rms_norm` (Zhang, Sennrich 2019, arXiv:1910.07467).

    XLA applies a scale that does not go along ``reduction_axes``.
    """

    @linen.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x = array_of(x)
        vectors = _vectors(self, x, self.feature_axes)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.rms_norm, x, *vectors, self.epsilon, *axes)


class GroupNorm(linen.GroupNorm):
    """`cunorm.group_norm` (Wu, He 2018, arXiv:1803.08494).

    ``reduction_axes`` must be the last axes of x.
    """

    @linen.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x = array_of(x)
        num_groups: Any = self.num_groups
        if (num_groups is None) == (self.group_size is None):
            found = f"num_groups is {num_groups} and group_size {self.group_size}"
            raise ValueError(f"{found}; one of them must be None, and the other not")
        if self.group_size is not None:
            if x.shape[-1] % self.group_size:
                raise ValueError(f"group_size is {self.group_size}; it must divide the {x.shape[-1]} channels of x")
            num_groups = x.shape[-1] // self.group_size
        vectors = _vectors(self, x)
        return flax_norms.group_norm(x, *vectors, self.epsilon, num_groups, self.reduction_axes)


class InstanceNorm(linen.InstanceNorm):
    """`cunorm.instance_norm` (Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022).

    XLA moves ``feature_axes`` other than 1 or the last.
    """

    @linen.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x = array_of(x)
        scale, bias, dtype = _vectors(self, x, self.feature_axes)
        scale, bias = (None if vector is None else vector.reshape(-1) for vector in (scale, bias))
        return flax_norms.instance_norm(x, scale, bias, dtype, self.epsilon, self.feature_axes)


class BatchNorm(linen.BatchNorm):
    """`cunorm.batch_norm` (Ioffe, Szegedy 2015, arXiv:1502.03167). The statistics are constants to differentiation.

    With ``axis_name``, of `jax.shard_map` or `jax.vmap`, they are those of all parts, which must be of one size.
    """

    @linen.compact
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        check_layer(self, mask, axis_name=True)
        x = array_of(x)
        average = merge_param("use_running_average", self.use_running_average, use_running_average)
        scale, bias, dtype = _vectors(self, x, self.axis, "axis")
        shape = tuple(x.shape[axis] for axis in check_axes(x, self.axis, "axis"))
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        options = (dtype, self.epsilon, self.axis)
        if average:
            return flax_norms.batch_norm(x, scale, bias, (mean.value, var.value), *options)[0]
        axis_name = None if self.is_initializing() else self.axis_name  # which does not exist yet
        y, new_mean, new_var = flax_norms.batch_norm(x, scale, bias, None, *options, axis_name)
        if not self.is_initializing():
            for running, new in ((mean, new_mean), (var, new_var)):
                running.value = flax_norms.moved(self, x, running.value, new)
        return y
