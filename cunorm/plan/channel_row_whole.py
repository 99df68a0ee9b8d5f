"""Rows of several channels, backward, by clusters whose blocks have as many whole channels each.

The part of a block that has one channel has one weight, and one pair of sums. Powers of two seldom divide the channels
of a group, which are 10, 20, 30, 40 or 60 in diffusion models, and leave a block with a channel more than others; but a
cluster may have any number of blocks. Small blocks are best, of which several on a multiprocessor are at different
points: how many was timed with each layout.

The numbers are of an H200, as the time over that of a copy of the same bytes, of float16 under silu where nothing else
is said, and in brackets that of other rows and of slabs.
"""

from __future__ import annotations

from typing import NamedTuple

from cunorm.plan.channel_row_geometry import ahead, sixteen_byte_width
from cunorm.plan.device import Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_memory import can_be_shared, columns_per_block
from cunorm.problem import BackwardProblem

__all__ = ["geometry"]


class _Layout(NamedTuple):
    """Of a block: its threads, and the vectors of each; and how many such blocks a multiprocessor has."""

    threads: int
    vectors: int
    crowd: int

    def holds(self, vectors: int, most_idle: float) -> bool:
        """Whether it has room for so many vectors, and no more than that share of them beside."""
        return vectors <= self.threads * self.vectors <= (1 + most_idle) * vectors


# Of a block with one channel: the first that holds it. Of sixteen-bit numbers the one of floats would spill 16 to 64
# bytes; and of bfloat16 the packed one 8, under the exact gelu.
_OF_FEW, _OF_FLOATS, _PACKED = _Layout(128, 4, 4), _Layout(256, 4, 3), _Layout(192, 6, 3)
_OF_ONE = [
    _Layout(128, 2, 8), _Layout(96, 3, 8), _Layout(128, 3, 6), _Layout(224, 2, 4), _OF_FEW, _Layout(128, 4, 5),
    _Layout(192, 3, 4), _Layout(128, 5, 4), _Layout(224, 3, 4), _Layout(192, 4, 3), _Layout(160, 5, 3),
    _OF_FLOATS, _Layout(224, 5, 2), _PACKED, _Layout(256, 5, 2),
]  # fmt: skip
_LEAST_BLOCKS, _MOST_BLOCKS = 3, 16
_MOST_IDLE_OF_ONE = {2: 0.16, 4: 0.0}  # by the bytes of a number: of float32 no others were timed
# Of half a channel, under the exact gelu.
_OF_HALF = [_Layout(256, vectors, 2) for vectors in (3, 4, 5)]
_MOST_IDLE_OF_HALF = 0.33
# Clusters of which many find no place where two large blocks of each share a multiprocessor.
_AWKWARD_BLOCKS = range(9, 16)
# Of a block with several: the first that holds the part that one of a cluster has.
_SHORT = _Layout(128, 5, 4), _Layout(64, 4, 8), _Layout(128, 4, 4)
_BY_SIX, _LONGEST, _LONG, _LONGER = _Layout(96, 6, 5), _Layout(256, 6, 2), _Layout(256, 4, 2), _Layout(192, 6, 2)
_OF_SEVERAL = [_SHORT[0], _Layout(160, 5, 3), _BY_SIX, *_SHORT[1:], _LONGEST, _LONG, _LONGER]
_LEAST_BLOCKS_OF_TWO, _LEAST_BLOCKS_OF_SEVERAL, _MOST_IDLE_OF_SEVERAL = 9, 5, 0.03
_MOST_BLOCKS_OF_LONGEST = 8
# Of the turns that short parts take, the last included, so much is to be filled on average.
_LEAST_FILLED = 0.75
# Other ways are slowest for groups of a multiple of so many channels.
_AWKWARD_CHANNELS = 15


def geometry(problem: BackwardProblem, device: Device) -> RowBlock | None:
    """How such rows lie over threads, where that was timed to be faster; else None."""
    if not sixteen_byte_width(problem, device) or not device.has_fast_memory or problem.channels is None:
        return None
    channels, activated = problem.channels.channels_per_row, problem.norm.activation is not None
    found = _of_one(problem, device, channels)
    if found is None and activated and problem.itemsize == 2:
        found = _of_several(problem, device, channels)
    return found


def _of_one(problem: BackwardProblem, device: Device, channels: int) -> RowBlock | None:
    """A block for each channel: under an activation, and of few rows of sixteen bits without one.

    256 rows of 12 channels of 48^2, 64^2, 80^2 and 96^2 take 1.23, 1.21, 1.18 and 1.25 (1.60, 1.49, 1.54, 1.36), of 10
    channels 1.25, 1.23, 1.23 and 1.27 (1.73, 1.53, 1.57, 1.41), of 16 1.25, 1.22, 1.18 and 1.22 (1.69, 1.32, 1.57,
    1.35), of 6 1.28, 1.24, 1.18 and 1.23 (1.58, 1.50, 1.62, 1.46); 64 rows of 12 1.39, 1.33, 1.33 and 1.38 (1.60, 1.43,
    1.73, 1.65). Under the exact gelu 0.68 to 1.00 of the time, under relu 0.76 to 1.03; of float32 10 channels of 32^2,
    48^2 and 64^2 1.25, 1.24 and 1.23 (1.55, 1.49, 1.31). Without an activation 64 rows of 12 channels of 48^2 and 80^2
    1.29 and 1.23 (1.48, 1.47), 128 of 10 of 48^2 1.25 (1.48); but 256 rows take 0.98 to 1.09 of the time so.

    Where all of 128 threads have 4 vectors, 64 rows of 10 channels of 64^2 take 1.40 with registers for four such
    blocks, for five 1.43, 256 rows of 8 1.24 and 1.20; where some lack one, 256 rows of 16 of 45 x 80 1.63 and 1.29. By
    192 threads with 6 vectors each, 256 rows of 12 channels of 96^2 take 1.25, by 256 with up to 5 1.37; but 256 of 8
    channels 1.23 and 1.21, 32 of 12 1.45 and 1.37. Without an activation 64 of 12 channels take 1.28 and 1.33.
    """
    activation = problem.norm.activation
    if activation is None and (problem.rows > device.multiprocessors or problem.itemsize != 2):
        return None
    part = _part(problem, device, channels) if _LEAST_BLOCKS <= channels <= _MOST_BLOCKS else 0
    for layout in _OF_ONE:
        held = layout.holds(part, _MOST_IDLE_OF_ONE[problem.itemsize])
        if held and _is_faster_of_one(layout, channels, part, problem, device):
            return _laid(problem, device, channels, layout)
    # Longer channels, by two blocks each, were timed of eight under the exact gelu alone.
    if channels == 8 and activation == "gelu" and problem.itemsize == 2:
        half = _part(problem, device, 2 * channels)
        for layout in _OF_HALF:
            if layout.holds(half, _MOST_IDLE_OF_HALF):
                return _laid(problem, device, 2 * channels, layout)
    return None


def _is_faster_of_one(layout: _Layout, blocks: int, part: int, problem: BackwardProblem, device: Device) -> bool:
    """Whether a row of a channel a block is faster by that layout than by those that hold more."""
    few, activation = problem.rows <= device.multiprocessors, problem.norm.activation
    if layout == _OF_FEW:
        return few and layout.holds(part, 0)
    if layout == _OF_FLOATS:
        return problem.itemsize == 4
    if layout == _PACKED:
        return activation is None or (not few and blocks in _AWKWARD_BLOCKS and activation != "gelu")
    return True


def _of_several(problem: BackwardProblem, device: Device, channels: int) -> RowBlock | None:
    """Two channels or more to a block, under an activation.

    256 rows of 18, 20, 24 and 28 channels of 48^2, by half as many blocks, take 1.40, 1.40, 1.40 and 1.39 (1.86, 1.77,
    1.49, 1.53), of 32^2 1.43, 1.44, 1.39 and 1.39 (1.61, 1.48, 1.59, 1.56); of 40 and 60 of 32^2 by 8 and 12 blocks
    1.36 (1.39, 1.62); of 24 of 64^2 by 8 1.32 (1.62). Of 30 channels of 32^2, 40^2 and 64^2 1.36, 1.58 and 1.46
    (1.59, 1.73, 1.67), of 60 of 40^2 and 48^2 1.45 and 1.62 (1.79, 1.84). 256 rows of two long channels a block take
    0.99 to 1.12 of the time, but for 30 channels; fewer 0.72 to 1.05. Short parts whose last turn is half empty take up
    to 1.1, and two channels of 48^2 under the exact gelu 0.98 to 1.12.
    """
    blocks_of = [n for n in range(_LEAST_BLOCKS_OF_SEVERAL, _MOST_BLOCKS + 1) if channels % n == 0]
    parts = {blocks: _part(problem, device, blocks) for blocks in blocks_of}
    for layout in _OF_SEVERAL:
        for blocks, part in parts.items():
            if layout.holds(part, _MOST_IDLE_OF_SEVERAL) and _is_faster(layout, blocks, channels, problem, device):
                return _laid(problem, device, blocks, layout)
    return None


def _is_faster(layout: _Layout, blocks: int, channels: int, problem: BackwardProblem, device: Device) -> bool:
    """Whether a row of several channels a block is faster by so many blocks of that layout."""
    awkward = channels % _AWKWARD_CHANNELS == 0
    if channels == 2 * blocks and blocks < _LEAST_BLOCKS_OF_TWO:
        return False
    if layout in _SHORT:
        groups = device.groups(blocks, layout.crowd)
        turns = -(-problem.rows // groups)
        return 2 * problem.rows <= groups or problem.rows >= _LEAST_FILLED * turns * groups
    if layout == _BY_SIX:
        return problem.norm.activation != "gelu"
    if layout == _LONGEST:
        return blocks <= _MOST_BLOCKS_OF_LONGEST
    if layout == _LONG:
        return awkward or (channels == 2 * blocks and problem.rows <= device.multiprocessors)
    return awkward or layout != _LONGER


def _part(problem: BackwardProblem, device: Device, blocks: int) -> int:
    """How many vectors each of so many blocks has, if all have as many; else 0."""
    width = sixteen_byte_width(problem, device)
    if not device.groups(blocks) or not can_be_shared(problem, blocks, width):
        return 0
    columns = columns_per_block(problem, blocks, width)
    return columns // width if columns * blocks == problem.columns else 0


def _laid(problem: BackwardProblem, device: Device, blocks: int, layout: _Layout) -> RowBlock | None:
    width = sixteen_byte_width(problem, device)
    return ahead(RowBlock(width, layout.vectors, layout.threads, blocks_per_row=blocks), layout.crowd, problem, device)
