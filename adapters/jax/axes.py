"""Which axes of x the operands of an op have: what decides where a batch axis may go, and what may be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cunorm.channel_norm import ChannelNorm
from cunorm.checks import check_channels, check_x
from cunorm.prepared import Op
from cunorm.problem import View, contiguous_strides
from cunorm.row_norm import RowNorm

__all__ = ["BACKWARD_ROLES", "FORWARD_ROLES", "Axes", "axes_of", "names_of", "view_of"]

# What each operand is, as `Op.prepare_forward` and `prepare_backward` take and return them; running statistics follow.
FORWARD_ROLES = ("x", "x", "vector", "vector", "vector", "vector"), ("x", "x", "statistic", "statistic")
BACKWARD_ROLES = ("x", "x", "x", "vector", "vector", "statistic", "statistic"), ("x", "vector", "vector")


class Axes(NamedTuple):
    """Of each role, which axes of x it has, in order; None is an axis that x has not: groups of channels.

    ``whole`` are the axes that a statistic is taken along, of which no device can do with a part.
    """

    x: tuple[int, ...]
    vector: tuple[int, ...]
    statistic: tuple[int | None, ...]
    whole: frozenset[int]

    def of(self, role: str) -> tuple[int | None, ...]:
        return {"x": self.x, "vector": self.vector, "statistic": self.statistic}[role]

    def split(self, role: str, of_x: Sequence[Any]) -> list[Any]:
        """How the axes of a role are split over a mesh, where this is how those of x are."""
        return [None if axis is None else of_x[axis] for axis in self.of(role)]


def view_of(shape: tuple[int, ...], dtype: str, device: tuple[str, int] = ("cpu", 0), alignment: int = 0) -> View:
    """An array in C order, as XLA lays out what a custom call takes; its address is known only when it runs."""
    return View(alignment, shape, contiguous_strides(shape), dtype, device)


def names_of(*splits: Any) -> tuple[str, ...]:
    """All names of a mesh's axes among these: what axes are split over."""
    found: list[str] = []
    for names in splits:
        found += () if names is None else (names,) if isinstance(names, str) else names
    return tuple(found)


def axes_of(op: Op, shape: tuple[int, ...]) -> Axes:
    """Those of an op of an x of this shape."""
    view = view_of(shape, "float32")
    x = tuple(range(len(shape)))
    if isinstance(op, RowNorm):
        normalized, _, _ = check_x(view, op.axis)
        return Axes(x, normalized, tuple(i for i in x if i not in normalized), frozenset(normalized))
    if isinstance(op, ChannelNorm):
        channel = check_channels(view, op.data_format)
        if op.over_samples:  # whose statistics are those of all parts
            return Axes(x, (channel,), (channel,), frozenset())
        spatial = frozenset(x[1:]) - {channel}
        if op.num_groups is None:
            return Axes(x, (channel,), (0, channel), spatial)
        return Axes(x, (channel,), (0, None), spatial | {channel})
    return Axes(x, x[-1:], (), frozenset())
