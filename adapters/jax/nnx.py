"""Flax NNX's norm layers over cunorm: ``from cunorm.adapters.jax import nnx``.

Each is a subclass of the layer of its name in `flax.nnx`: the same constructor, parameters and state (``scale``,
``bias``, ``mean``, ``var``), so that the states of one are those of the other, and results that differ by rounding.
``use_fast_variance`` makes no difference: the variance is always the accurate one. ``mask`` and ``axis_index_groups``
are refused, and ``axis_name`` too but for BatchNorm, with a ValueError; other errors are those of the functions named.

>>> import jax.numpy as jnp
>>> from flax.nnx import Rngs
>>> from cunorm.adapters.jax import nnx
>>> layer = nnx.BatchNorm(1, momentum=0.5, rngs=Rngs(0))
>>> layer(jnp.array([[1.0], [3.0]])).round(3).tolist(), layer.mean[...]
([[-1.0], [1.0]], Array([1.], dtype=float32))
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

import cunorm
from cunorm.adapters.jax import flax_norms
from cunorm.adapters.jax.flax_norms import array_of, check_layer

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _promoted(layer: Any, x: Any, *variables: Any) -> tuple[Any, ...]:
    """x and the values of variables in the dtypes that Flax computes with, and the dtype of the result."""
    values = [None if variable is None else variable[...] for variable in variables]
    arrays = layer.promote_dtype((array_of(x), *values), dtype=layer.dtype)
    return *arrays, canonicalize_dtype(*arrays, dtype=layer.dtype)


class LayerNorm(nnx.LayerNorm):
    """`cunorm.layer_norm` (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    XLA applies scale and bias that do not go along ``reduction_axes``.
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.layer_norm, x, scale, bias, dtype, self.epsilon, *axes)


class RMSNorm(nnx.RMSNorm):
    """`cunorm.rms_norm` (Zhang, Sennrich 2019, arXiv:1910.07467).

    XLA applies a scale that does not go along ``reduction_axes``.
    """

    def __call__(self, x: Any, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, dtype = _promoted(self, x, self.scale)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.rms_norm, x, scale, None, dtype, self.epsilon, *axes)


class GroupNorm(nnx.GroupNorm):
    """`cunorm.group_norm` (Wu, He 2018, arXiv:1803.08494).

    ``reduction_axes`` must be the last axes of x.
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        return flax_norms.group_norm(x, scale, bias, dtype, self.epsilon, self.num_groups, self.reduction_axes)


class InstanceNorm(nnx.InstanceNorm):
    """`cunorm.instance_norm` (Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022).

    XLA moves ``feature_axes`` other than 1 or the last.
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        return flax_norms.instance_norm(x, scale, bias, dtype, self.epsilon, self.feature_axes)


class BatchNorm(nnx.BatchNorm):
    """`cunorm.batch_norm` (Ioffe, Szegedy 2015, arXiv:1502.03167). The statistics are constants to differentiation.

    With ``axis_name``, of `jax.shard_map` or `jax.vmap`, they are those of all parts, which must be of one size.
    """

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        check_layer(self, mask, axis_name=True)
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError("use_running_average is None here and in the constructor; it must be given in one of them")
        x, mean, var, scale, bias, _ = _promoted(self, x, self.mean, self.var, self.scale, self.bias)
        # Without mean and var, which a promote_dtype of the user's may leave in float32.
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        options = (dtype, self.epsilon, self.axis)
        if use_running_average:
            return flax_norms.batch_norm(x, scale, bias, (mean, var), *options)[0]
        y, mean, var = flax_norms.batch_norm(x, scale, bias, None, *options, self.axis_name)
        for running, new in ((self.mean, mean), (self.var, var)):
            running[...] = jax.lax.stop_gradient(flax_norms.moved(self, x, running[...], new))
        return y
