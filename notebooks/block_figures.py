"""Draws tensors as blocks of cubes, a cube an element, so that it can be seen which elements share a statistic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

__all__ = ["draw_blocks"]

# Okabe and Ito's orange and sky blue differ in lightness, too: in print, and for eyes that see colours differently.
_MARKED, _PLAIN = "#D55E00", "#9AD0F0"
_DEPTH = np.array([0.68, 0.55])  # where the axis that points away from the reader goes on paper
_GAP = 0.55
# The three faces of a cube that can be seen, as corners (right, up, away), and how much light each has.
_FACES = (
    (((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)), 1.0),
    (((0, 1, 0), (1, 1, 0), (1, 1, 1), (0, 1, 1)), 1.15),
    (((1, 0, 0), (1, 0, 1), (1, 1, 1), (1, 1, 0)), 0.8),
)


def draw_blocks(axes: Axes, marked: np.ndarray, block: Sequence[int], at: tuple[float, float]) -> None:
    """Draw an array of three axes as cubes, pulled apart into blocks of one size.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Where to draw.
    marked : numpy.ndarray
        Three axes, of bool: away from the reader, to the right, downward. True is drawn orange, False blue.
    block : sequence of int
        How many elements of each axis are in a block.
    at : tuple of float
        Where the upper left corner of the first element is. A cube is one unit wide and high.
    """
    faces, colors = [], []
    for index in sorted(np.ndindex(marked.shape), key=lambda index: (-index[0], index[1], -index[2])):
        away, right, down = (i + _GAP * (i // size) for i, size in zip(index, block))
        for corners, light in _FACES:
            corner = np.array([(right + x, -down - 1 + y, away + z) for x, y, z in corners])
            faces.append(corner[:, :2] + corner[:, 2:] * _DEPTH + at)
            colors.append(np.clip(np.array(to_rgb(_MARKED if marked[index] else _PLAIN)) * light, 0, 1))
    axes.add_collection(PolyCollection(faces, facecolors=colors, edgecolors="#27343C", linewidths=0.5))
