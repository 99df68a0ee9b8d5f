"""Flax NNX's norm layers over cunorm: ``from cunorm.adapters.jax import nnx``.

Each is a subclass of the layer of its name in `flax.nnx`: the same constructor, parameters and state (``scale``,
``bias``, ``mean``, ``var``), so that the states of one are those of the other, and results that differ by rounding.
``use_fast_variance`` makes no difference: the variance is always the accurate one. ``mask`` and ``axis_index_groups``
are refused, and ``axis_name`` too but for BatchNorm, with a ValueError; other errors are those of the functions named.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

import cunorm
from cunorm.adapters.jax import flax_norms
from cunorm.adapters.jax.flax_norms import check_layer

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _promoted(layer: Any, x: Any, *variables: Any) -> tuple[Any, ...]:
    """x and the values of variables in the dtypes that Flax computes with, and the dtype of the result."""
    values = [None if variable is None else variable[...] for variable in variables]
    arrays = layer.promote_dtype((jnp.asarray(x), *values), dtype=layer.dtype)
    return *arrays, canonicalize_dtype(*arrays, dtype=layer.dtype)


class LayerNorm(nnx.LayerNorm):
    """`cunorm.layer_norm` as `flax.nnx.LayerNorm` (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    x has any shape and any float dtype; ``scale`` and ``bias`` have shape (num_features,). Where ``feature_axes`` are
    not ``reduction_axes``, scale and bias are applied by XLA, in float32.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from cunorm.adapters.jax.nnx import LayerNorm
    >>> LayerNorm(3, rngs=nnx.Rngs(0))(jnp.array([[1.0, 2.0, 3.0]])).round(3)
    Array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.layer_norm, x, scale, bias, dtype, self.epsilon, *axes)


class RMSNorm(nnx.RMSNorm):
    """`cunorm.rms_norm` as `flax.nnx.RMSNorm` (Zhang, Sennrich 2019, arXiv:1910.07467); otherwise as `LayerNorm`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from cunorm.adapters.jax.nnx import RMSNorm
    >>> RMSNorm(3, rngs=nnx.Rngs(0))(jnp.array([[1.0, -1.0, 1.0]])).round(3)
    Array([[ 1., -1.,  1.]], dtype=float32)
    """

    def __call__(self, x: Any, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, dtype = _promoted(self, x, self.scale)
        axes = self.reduction_axes, self.feature_axes
        return flax_norms.row_norm(cunorm.rms_norm, x, scale, None, dtype, self.epsilon, *axes)


class GroupNorm(nnx.GroupNorm):
    """`cunorm.group_norm` as `flax.nnx.GroupNorm` (Wu, He 2018, arXiv:1803.08494).

    x has its channels last. ``reduction_axes`` must be the last axes; by default they are all but the first.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from cunorm.adapters.jax.nnx import GroupNorm
    >>> GroupNorm(4, 2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(3)
    Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        return flax_norms.group_norm(x, scale, bias, dtype, self.epsilon, self.num_groups, self.reduction_axes)


class InstanceNorm(nnx.InstanceNorm):
    """`cunorm.instance_norm` as `flax.nnx.InstanceNorm` (Ulyanov, Vedaldi, Lempitsky 2016, arXiv:1607.08022).

    x has its samples first. ``feature_axes`` other than the last ones, or 1, are moved to the end first, by XLA.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from cunorm.adapters.jax.nnx import InstanceNorm
    >>> InstanceNorm(2, rngs=nnx.Rngs(0))(jnp.array([[[1.0, 5.0], [3.0, 9.0]]])).round(3)
    Array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        check_layer(self, mask)
        x, scale, bias, dtype = _promoted(self, x, self.scale, self.bias)
        return flax_norms.instance_norm(x, scale, bias, dtype, self.epsilon, self.feature_axes)


class BatchNorm(nnx.BatchNorm):
    """`cunorm.batch_norm` as `flax.nnx.BatchNorm` (Ioffe, Szegedy 2015, arXiv:1502.03167).

    ``mean`` and ``var`` are updated as Flax does, ``momentum * old + (1 - momentum) * new`` with the biased variance;
    they are constants to differentiation. With ``axis_name``, of `jax.shard_map` or `jax.vmap`, the statistics are
    those of all parts, which must be of one size.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from cunorm.adapters.jax.nnx import BatchNorm
    >>> layer = BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0], [3.0]])).round(3), layer.mean[...]
    (Array([[-1.],
           [ 1.]], dtype=float32), Array([1.], dtype=float32))
    """

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        check_layer(self, mask, axis_name=True)
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError("use_running_average is None here and in the constructor; it must be given in one of them")
        x, mean, var, scale, bias, dtype = _promoted(self, x, self.mean, self.var, self.scale, self.bias)
        options = (dtype, self.epsilon, self.axis)
        if use_running_average:
            return flax_norms.batch_norm(x, scale, bias, (mean, var), *options)[0]
        y, mean, var = flax_norms.batch_norm(x, scale, bias, None, *options, self.axis_name)
        for running, new in ((self.mean, mean), (self.var, var)):
            running[...] = jax.lax.stop_gradient(self.momentum * running[...] + (1 - self.momentum) * new)
        return y
