"""Keras 3 layers: Keras's own, computed by cunorm, on the TensorFlow, JAX and PyTorch backends.

Each layer is a subclass of Keras's layer of that name which computes anew, and nothing else: arguments, configuration,
weights, their names and order, masks and dtype policies are Keras's. So the weights of one fit the other, and so do
files of weights. ``InstanceNormalization``, which Keras has not, is ``GroupNormalization`` with a group a channel.

What cunorm has no kernel for is left to Keras's own computation, as each layer says. The backend is the one that Keras
was told to use. With TensorFlow's, a model with one of these layers is not compiled by XLA (``supports_jit`` is false),
which the call into Python that they are cannot be.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from cunorm.channels import batch_norm, group_norm
from cunorm.problem import DTYPES
from cunorm.rows import layer_norm, rms_norm
from cunorm.text import kind_of

__all__ = [
    "BatchNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "from_keras",
    "to_keras",
]

# TensorFlow's tensors that Keras's own layers may take.
_NOT_DENSE = ("IndexedSlices", "RaggedTensor", "SparseTensor")
_serializable = keras.saving.register_keras_serializable(package="cunorm")


class _Computed:
    """What the layers have in common: they stand before Keras's own among the bases."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.supports_jit = keras.backend.backend() != "tensorflow"


@_serializable
class LayerNormalization(_Computed, keras.layers.LayerNormalization):  # type: ignore[misc]
    """Layer normalization, as `keras.layers.LayerNormalization`, by `cunorm.layer_norm`.

    ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(var + epsilon)`` over ``axis`` (Ba, Kiros, Hinton
    2016, arXiv:1607.06450). With the deprecated ``rms_scaling``, or axes of which some are negative and some not, it is
    Keras's own computation.

    Parameters
    ----------
    axis, epsilon, center, scale, ...
        Those of `keras.layers.LayerNormalization`.

    Raises
    ------
    ValueError, TypeError
        As Keras's layer; and as `cunorm.layer_norm`, when it is called.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.adapters.keras import LayerNormalization
    >>> y = LayerNormalization(epsilon=0.0)(np.array([[1.0, 3.0]], np.float32))
    >>> keras.ops.convert_to_numpy(y)
    array([[-1.,  1.]], dtype=float32)
    """

    def call(self, inputs: Any) -> Any:
        inputs = _tensor(inputs)
        # Keras sorts axes as they are written: counted from both ends, they are in another order than those of x.
        from_both_ends = min(self.axis) < 0 <= max(self.axis)
        if from_both_ends or self.rms_scaling or not _is_supported(inputs):
            return super().call(inputs)
        y = layer_norm(inputs, _tensor(self.gamma), _tensor(self.beta), axis=self.axis, eps=self.epsilon)
        return ops.cast(y, self.compute_dtype)


@_serializable
class RMSNormalization(_Computed, keras.layers.RMSNormalization):  # type: ignore[misc]
    """RMS normalization, as `keras.layers.RMSNormalization`, by `cunorm.rms_norm`.

    ``y = x * rstd * scale`` with ``rstd = 1 / sqrt(mean(x^2) + epsilon)`` over ``axis`` (Zhang, Sennrich 2019,
    arXiv:1910.07467). Over other axes than the last ones it is Keras's own computation, whose scale goes along the last
    ones all the same.

    Parameters
    ----------
    axis, epsilon
        Those of `keras.layers.RMSNormalization`.

    Raises
    ------
    ValueError, TypeError
        As Keras's layer; and as `cunorm.rms_norm`, when it is called.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.adapters.keras import RMSNormalization
    >>> y = RMSNormalization(epsilon=0.0)(np.array([[1.0, 2.0, 2.0]], np.float32))
    >>> keras.ops.convert_to_numpy(y).round(4)
    array([[0.5774, 1.1547, 1.1547]], dtype=float32)
    """

    def call(self, x: Any) -> Any:
        x = _tensor(x)
        dimensions, count = len(x.shape), len(self.axis)
        last = [axis % dimensions for axis in self.axis] == [*range(dimensions - count, dimensions)]
        if not last or not _is_supported(x):
            return super().call(x)
        return rms_norm(x, _tensor(self.scale), axis=self.axis, eps=self.epsilon)


@_serializable
class GroupNormalization(_Computed, keras.layers.GroupNormalization):  # type: ignore[misc]
    """Group normalization, as `keras.layers.GroupNormalization`, by `cunorm.group_norm`.

    ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(var + epsilon)`` by sample and group of channels
    (Wu, He 2018, arXiv:1803.08494). With an ``axis`` that is neither the second nor the last it is Keras's own
    computation.

    Parameters
    ----------
    groups, axis, epsilon, center, scale, ...
        Those of `keras.layers.GroupNormalization`.

    Raises
    ------
    ValueError, TypeError
        As Keras's layer; and as `cunorm.group_norm`, when it is called.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.adapters.keras import GroupNormalization
    >>> y = GroupNormalization(groups=2, epsilon=0.0)(np.array([[1.0, 3.0, 5.0, 9.0]], np.float32))
    >>> keras.ops.convert_to_numpy(y)
    array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    def call(self, inputs: Any) -> Any:
        inputs = _tensor(inputs)
        data_format = _data_format(inputs, self.axis)
        if data_format is None or not _is_supported(inputs):
            return super().call(inputs)
        gamma, beta = _tensor(self.gamma), _tensor(self.beta)
        y = group_norm(inputs, self.groups, gamma, beta, data_format=data_format, eps=self.epsilon)
        return ops.cast(y, self.compute_dtype)


@_serializable
class InstanceNormalization(GroupNormalization):
    """Instance normalization: `GroupNormalization` with a group for each channel.

    ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(var + epsilon)`` by sample and channel (Ulyanov,
    Vedaldi, Lempitsky 2016, arXiv:1607.08022). The weights are gamma and beta, one number a channel.

    Parameters
    ----------
    axis, epsilon, center, scale, ...
        Those of `keras.layers.GroupNormalization`, all of them by name.

    Raises
    ------
    ValueError, TypeError
        As `GroupNormalization`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.adapters.keras import InstanceNormalization
    >>> y = InstanceNormalization(epsilon=0.0)(np.array([[[1.0, 5.0], [3.0, 9.0]]], np.float32))
    >>> keras.ops.convert_to_numpy(y)
    array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """

    def __init__(self, **options: Any) -> None:
        if "groups" in options:
            raise TypeError("InstanceNormalization has no groups; GroupNormalization has")
        super().__init__(groups=-1, **options)

    def get_config(self) -> dict[str, Any]:
        return {name: value for name, value in super().get_config().items() if name != "groups"}


@_serializable
class BatchNormalization(_Computed, keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization, as `keras.layers.BatchNormalization`, by `cunorm.batch_norm`.

    ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(var + epsilon)`` by channel (Ioffe, Szegedy 2015,
    arXiv:1502.03167): of the batch in training, and of the moving statistics in inference and where the layer is not
    trainable. Training moves them: ``moving = momentum * moving + (1 - momentum) * new``, with the biased variance.
    With a mask, ``synchronized``, ``renorm``, an ``axis`` that is neither the second nor the last, or an empty batch
    where its size is known, it is Keras's own computation. In a TensorFlow graph whose batch size is None an empty
    batch is an error in training; a data set that is batched with ``drop_remainder=True`` has a known size.

    Parameters
    ----------
    axis, momentum, epsilon, center, scale, ...
        Those of `keras.layers.BatchNormalization`.

    Raises
    ------
    ValueError, TypeError
        As Keras's layer; and as `cunorm.batch_norm`, when it is called.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.adapters.keras import BatchNormalization
    >>> layer = BatchNormalization(momentum=0.5, epsilon=0.0)
    >>> keras.ops.convert_to_numpy(layer(np.array([[1.0], [3.0]], np.float32), training=True))
    array([[-1.],
           [ 1.]], dtype=float32)
    >>> [float(weight[0]) for weight in (layer.moving_mean, layer.moving_variance)]
    [1.0, 1.0]
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        inputs = _tensor(inputs)
        data_format = _data_format(inputs, self.axis)
        # Older Keras has no renorm.
        others = mask is not None or self.synchronized or getattr(self, "renorm", False)
        if others or data_format is None or not _is_supported(inputs) or 0 in inputs.shape:
            return super().call(inputs, training=training, mask=mask)
        gamma, beta = _tensor(self.gamma), _tensor(self.beta)
        options: dict[str, Any] = {"data_format": data_format, "eps": self.epsilon, "convention": "keras"}
        if training and self.trainable:
            y, mean, rstd = batch_norm(inputs, gamma, beta, training=True, return_stats=True, **options)
            # Of a variance far below epsilon the difference keeps little, and what it loses does not matter beside it.
            self._move(self.moving_mean, mean)
            self._move(self.moving_variance, ops.relu(1 / ops.square(rstd) - self.epsilon))
        else:
            options |= {"running_mean": _tensor(self.moving_mean), "running_var": _tensor(self.moving_variance)}
            y = batch_norm(inputs, gamma, beta, training=False, **options)
        return ops.cast(y, self.compute_dtype)

    def _move(self, moving: Any, new: Any) -> None:
        """Assigned, not updated in place by the kernel: what is immutable cannot be, nor may what Keras only traces."""
        moving.assign(ops.cast(moving, new.dtype) * self.momentum + new * (1 - self.momentum))


_KERAS: dict[type, type] = {
    BatchNormalization: keras.layers.BatchNormalization,
    GroupNormalization: keras.layers.GroupNormalization,
    LayerNormalization: keras.layers.LayerNormalization,
    RMSNormalization: keras.layers.RMSNormalization,
}
_OURS = {theirs: ours for ours, theirs in _KERAS.items()}


def from_keras(layer: Any) -> Any:
    """A new layer of the same configuration: one of these for one of Keras's own, else of the same class.

    It is a ``clone_function`` of `keras.models.clone_model`, whose result takes the weights of the model.

    Parameters
    ----------
    layer : keras.layers.Layer
        Any layer. It is not modified. Subclasses of Keras's layers stay what they are, and so do the layers of a
        model: `keras.models.clone_model` is for those.

    Returns
    -------
    keras.layers.Layer
        With weights of its own, once it is built.

    Raises
    ------
    TypeError
        For what is no layer.
    NotImplementedError
        For a layer that has no configuration, by Keras.

    Examples
    --------
    >>> from cunorm.adapters.keras import from_keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.LayerNormalization()])
    >>> faster = keras.models.clone_model(model, clone_function=from_keras)
    >>> faster.set_weights(model.get_weights())
    >>> [type(layer).__module__ for layer in faster.layers][1]
    'cunorm.adapters.keras'
    """
    _check_layer(layer)
    return _OURS.get(type(layer), type(layer)).from_config(layer.get_config())  # type: ignore[attr-defined]


def to_keras(layer: Any) -> Any:
    """A new layer of the same configuration: one of Keras's own for one of these, else of the same class.

    The way back from `from_keras`, for what has to do without cunorm. An `InstanceNormalization` becomes a
    `keras.layers.GroupNormalization`.

    Parameters
    ----------
    layer : keras.layers.Layer
        Any layer. It is not modified.

    Returns
    -------
    keras.layers.Layer
        With weights of its own, once it is built.

    Raises
    ------
    TypeError
        For what is no layer.
    NotImplementedError
        For a layer that has no configuration, by Keras.

    Examples
    --------
    >>> from cunorm.adapters.keras import InstanceNormalization, to_keras
    >>> to_keras(InstanceNormalization(epsilon=1e-5)).groups
    -1
    """
    _check_layer(layer)
    if type(layer) is InstanceNormalization:
        return keras.layers.GroupNormalization.from_config(layer.get_config() | {"groups": -1})
    return _KERAS.get(type(layer), type(layer)).from_config(layer.get_config())  # type: ignore[attr-defined]


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, keras.Operation):  # clone_model gives a sum, too, which is no layer
        raise TypeError(f"layer is {kind_of(layer)}; it must be a keras.layers.Layer")


def _tensor(given: Any) -> Any:
    """A variable as the backend's tensor; or inputs, which are NumPy's where ``call`` is not called by the layer.

    A tensor stays as it is: with the NumPy backend Keras would make float32 of float64.
    """
    return given if given is None or ops.is_tensor(given) else ops.convert_to_tensor(given)


def _is_supported(inputs: Any) -> bool:
    """Whether cunorm has kernels for it: for its dtype, and for sizes that are numbers, or not known to TensorFlow.

    What is not dense gets Keras's own computation, which takes some of that.
    JAX's can be expressions, when Keras traces a model for its shapes or exports it. It gets Keras's own computation,
    which other programs can load.
    """
    sizes = all(size is None or isinstance(size, int) for size in inputs.shape)
    is_dense = type(inputs).__name__ not in _NOT_DENSE
    return is_dense and sizes and keras.backend.standardize_dtype(inputs.dtype) in DTYPES


def _data_format(inputs: Any, axis: int) -> str | None:
    """Where the channels are, if cunorm can be told."""
    dimensions = len(inputs.shape)
    if dimensions < 2:
        return None
    return {dimensions - 1: "N...C", 1: "NC..."}.get(axis % dimensions)
