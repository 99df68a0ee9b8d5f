"""The statistics of batch norm on their own: of one part of a batch, and of all of it from those of its parts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from cunorm import adapters
from cunorm.channel_norm import ChannelNorm
from cunorm.checks import as_float
from cunorm.text import kind_of

__all__ = ["batch_norm_stats", "merge_batch_norm_stats"]


def batch_norm_stats(x: Any, *, data_format: str = "NC...") -> tuple[Any, Any]:
    """The statistics of `batch_norm`: mean and biased variance of each channel, over samples and spatial dimensions.

    With `merge_batch_norm_stats` they become those of a batch that several devices hold
    (Ioffe, Szegedy 2015, arXiv:1502.03167; the synchronized batch norm of the frameworks), or of one that comes in
    parts.

    Parameters
    ----------
    x : tensor
        Samples, channels, and any number of spatial dimensions, as `instance_norm` says.
    data_format : str
        As for `instance_norm`.

    Returns
    -------
    mean, var : tensor
        Of shape (C,); float32, float64 for float64 x; NaN where x is empty. They are constants to differentiation.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `batch_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> cunorm.batch_norm_stats(np.array([[1.0, 4.0], [3.0, 8.0]]))
    (array([2., 6.]), array([1., 4.]))
    """
    adapter = adapters.adapter_of(x)
    op = ChannelNorm.of("batch_norm_stats", data_format)
    _, _, mean, var = adapter.apply(op, x, None, None, None, None, True)
    return mean, var


def merge_batch_norm_stats(means: Any, variances: Any, counts: Any) -> tuple[Any, Any]:
    """Mean and biased variance of a whole, from those of its parts: what devices that share a batch exchange.

    Two parts of ``n`` and ``m`` values have ``mean + (mean' - mean) * m / (n + m)`` for a mean, and for a variance
    ``(n * var + m * var') / (n + m) + (mean' - mean)^2 * n * m / (n + m)^2`` (Chan, Golub, LeVeque 1983, The American
    Statistician 37:242); the parts are taken one after the other. It is written in operators of tensors, so it works
    for those of every framework, on their devices, and inside their compilers.

    Parameters
    ----------
    means, variances : tensor, or sequence of tensors
        Of K parts: of shape (K, C), or K of shape (C,), as `batch_norm_stats` gives them.
    counts : sequence of int, or tensor
        How many values a channel has in each part: K numbers, of which a 0 leaves its part out; or a framework's tensor
        of shape (K,), of means' dtype and without zeros.

    Returns
    -------
    mean, var : tensor
        Of shape (C,).

    Raises
    ------
    ValueError
        For another number of means, variances and counts, for shapes that differ, for counts that are negative or no
        whole numbers, or where all are zero.
    TypeError
        For what is no tensor, number or sequence of these, for tensors of two libraries, and for TensorFlow's of two
        dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.array([[1.0], [3.0]]), np.array([[8.0]])
    >>> means, variances = zip(*map(cunorm.batch_norm_stats, parts))
    >>> mean, var = cunorm.merge_batch_norm_stats(means, variances, [2, 1])
    >>> mean, var.round(4), np.var([1, 3, 8]).round(4)
    (array([4.]), array([8.6667]), np.float64(8.6667))
    """
    shapes = [_shapes(means, "means"), _shapes(variances, "variances")]
    parts = [*map(len, shapes), _count_of(counts)]
    if len(set(parts)) > 1:
        found = "there are {} means, {} variances and {} counts".format(*parts)
        raise ValueError(f"{found}; they must be of one number")
    if not parts[0]:
        raise ValueError("there are no means, variances and counts; there must be one part at least")
    for name, found_shapes in zip(("means", "variances"), shapes):
        for i, shape in enumerate(found_shapes):
            if not _alike(shape, shapes[0][0]):
                raise ValueError(f"{name}[{i}] has shape {shape}; as means[0] it must have shape {shapes[0][0]}")
    tensors = [*_named(means, "means"), *_named(variances, "variances")]
    for named in tensors[1:]:
        _check_library(named, tensors[0])
    mean = var = total = None
    for i in range(parts[0]):
        count = counts[i]
        if isinstance(count, numbers.Real):  # a tensor's numbers may not be known yet, or are on a device
            count = as_float(count)
            if not 0 <= count < math.inf:
                raise ValueError(f"counts has {count:g}; they must be finite and not negative")
            if count % 1:
                raise ValueError(f"counts has {count:g}; they must be whole numbers")
            if not count:
                continue
        elif isinstance(count, (str, bytes, numbers.Number)) or not hasattr(count, "__truediv__"):
            raise TypeError(f"counts has a {type(count).__qualname__}; they must be whole numbers")
        else:
            _check_library(("counts", count), tensors[0])
        if total is None:
            mean, var, total = means[i] * 1, variances[i] * 1, count  # never the caller's own memory
            continue
        total = total + count
        fraction, difference = count / total, means[i] - mean
        var = var * (1 - fraction) + variances[i] * fraction + difference * difference * (fraction * (1 - fraction))
        mean = mean + difference * fraction
    if total is None:
        raise ValueError("counts are all 0; one at least must be positive")
    return mean, var


def _named(given: Any, name: str) -> list[tuple[str, Any]]:
    """The tensors of means or variances, each with what a message calls it."""
    return [(f"{name}[{i}]", item) for i, item in enumerate(given)] if isinstance(given, Sequence) else [(name, given)]


def _check_library(named: tuple[str, Any], first: tuple[str, Any]) -> None:
    """Refuse a tensor of another library than the first. What no adapter is for may be anything's.

    Of TensorFlow's, whose operators convert nothing, also one of another dtype.
    """
    libraries = [adapters.library_of(type(tensor)) for _, tensor in (named, first)]
    if None not in libraries and libraries[0] != libraries[1]:
        (name, tensor), (first_name, other) = named, first
        found = f"{name} is {kind_of(tensor)} ({libraries[0]}) and {first_name} {kind_of(other)} ({libraries[1]})"
        raise TypeError(f"{found}; they must be of one library")
    if libraries == ["tensorflow", "tensorflow"]:
        found, must = (tensor.dtype.name for _, tensor in (named, first))
        if found != must:
            raise TypeError(f"{named[0]} has dtype {found}; as {first[0]} it must have dtype {must}")


def _shapes(given: Any, name: str) -> list[tuple[Any, ...]]:
    """The shape of each part of means or variances, of which a compiler may not know every size."""
    if not isinstance(given, Sequence):
        shape = _shape_of(given)
        if shape is None:
            must = "it must be a tensor of shape (K, C), or a sequence of K tensors of shape (C,)"
            raise TypeError(f"{name} is {kind_of(given)}; {must}")
        return [shape[1:]] * _first(shape, name, "(K, C)")
    shapes = []
    for item in given:
        shape = _shape_of(item)
        if shape is None:
            raise TypeError(f"{name} has a {type(item).__qualname__}; they must be tensors of shape (C,)")
        shapes.append(shape)
    return shapes


def _count_of(counts: Any) -> int:
    """How many counts there are."""
    if isinstance(counts, Sequence):
        return len(counts)
    shape = _shape_of(counts)
    if shape is None:
        must = "it must be a sequence of whole numbers, or a tensor of shape (K,)"
        raise TypeError(f"counts is {kind_of(counts)}; {must}")
    if len(shape) > 1:
        raise ValueError(f"counts has shape {shape}; it must have shape (K,)")
    return _first(shape, "counts", "(K,)")


def _shape_of(given: Any) -> tuple[Any, ...] | None:
    """A tensor's shape, else None. In a tf.function, a size may be None, and the whole of it ``(...,)``."""
    shape = getattr(given, "shape", None)
    if shape is None:
        return None
    return (...,) if getattr(shape, "rank", 0) is None else tuple(shape)


def _first(shape: tuple[Any, ...], name: str, must: str) -> int:
    if not shape:
        raise ValueError(f"{name} has shape {shape}; it must have shape {must}")
    if shape[0] in (None, ...):
        raise ValueError(f"{name} has shape {shape}; it must have shape {must}, with a K that is known")
    return int(shape[0])


def _alike(shape: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether shapes are the same, as far as they are known."""
    if ... in (*shape[:1], *other[:1]):
        return True
    return len(shape) == len(other) and all(a is None or b is None or a == b for a, b in zip(shape, other))
