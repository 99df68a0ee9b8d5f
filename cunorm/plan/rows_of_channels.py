"""Instance, group and batch norm as norms of rows, where what each mean is of is one run of memory, or equal ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cunorm.plan import channel_row_whole, row_candidates, row_pipeline_geometry, row_segments, rows
from cunorm.plan.channel_row_geometry import with_channels
from cunorm.plan.device import Device
from cunorm.plan.launches import Plan
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_fit import fits
from cunorm.plan.row_memory import can_be_shared, has_several_channels
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.rows import RowWay
from cunorm.problem import (
    BackwardProblem,
    ChannelForward,
    ChannelProblem,
    Channels,
    ChannelTensor,
    ForwardProblem,
    Matrix,
    Norm,
    Problem,
)

__all__ = ["as_rows", "candidates", "have_whole_channels", "pipeline", "plan_with", "way_of"]

# Rows and columns, of which there must be fewer: kernels/row_channels.cuh counts them in 32 bits.
_TOO_MANY = 2**31


def way_of(problem: ChannelProblem, device: Device) -> RowWay | None:
    """The built-in way to move every number once, by the kernels of rows; None where they cannot."""
    as_row_problem = as_rows(problem)
    if as_row_problem is None:
        return None
    if _is_of_a_batch(as_row_problem):
        return row_segments.geometry(as_row_problem, device)
    return rows.way_of(as_row_problem, device)


def pipeline(problem: ChannelProblem, device: Device) -> tuple[float, RowPipeline] | None:
    """The pipeline of rows that is to be compared with other ways, and its expected microseconds.

    That is for batch norms, whose rows are in segments or move running statistics, and for groups of channels. None
    where they cannot be held so.
    """
    as_row_problem = as_rows(problem)
    if as_row_problem is None or not (_is_of_a_batch(as_row_problem) or has_several_channels(as_row_problem)):
        return None
    way = row_pipeline_geometry.geometry(as_row_problem, device)
    return None if way is None else (row_pipeline_geometry.cost(way, as_row_problem, device), way)


def have_whole_channels(way: RowWay, problem: ChannelProblem, device: Device) -> bool:
    """Whether a way is that of `channel_row_whole`, which is timed beside all others."""
    as_row_problem = as_rows(problem)
    return isinstance(as_row_problem, BackwardProblem) and way == channel_row_whole.geometry(as_row_problem, device)


def candidates(problem: ChannelProblem, device: Device) -> Iterator[RowBlock]:
    """Every geometry by which the kernels of rows can compute a problem, for whoever measures."""
    as_row_problem = as_rows(problem)
    if as_row_problem is None:
        return
    seen = set()
    whole_channels = isinstance(as_row_problem, BackwardProblem) and has_several_channels(as_row_problem)
    for geometry in row_candidates.in_blocks(replace(as_row_problem, weight=None, bias=None), device):
        # Where sums are by channel, no vector may reach from one into the next.
        reaches = whole_channels and geometry.peeled
        if reaches or not can_be_shared(as_row_problem, geometry.blocks_per_row, geometry.width):
            continue
        found = with_channels(geometry, as_row_problem, device)
        if found not in seen and fits(found, as_row_problem, device):
            seen.add(found)
            yield found


def plan_with(problem: ChannelProblem, device: Device, way: RowWay) -> Plan:
    """The plan with a way that is one of these."""
    as_row_problem = as_rows(problem)
    assert as_row_problem is not None
    return rows.plan_with(as_row_problem, device, way)


def _is_of_a_batch(problem: Problem) -> bool:
    return len(problem.column_sizes) > 1 or (isinstance(problem, ForwardProblem) and problem.running is not None)


def as_rows(problem: ChannelProblem) -> Problem | None:
    """The same as a problem of rows whose weights are by channel: set s is row s.

    The columns have two sizes where a set, of one channel, has its points in two dimensions: those of samples and of
    space, in a batch norm. None where the numbers of a set do not lie so in every tensor, or the sets not evenly
    spaced; where there are none; and where statistics are given, or all that is wanted.
    """
    channels, points, sets = problem.channels_per_set, problem.points, problem.sets
    columns = channels * points
    if not sets or not points or sets >= _TOO_MANY or columns >= _TOO_MANY:
        return None
    matrices = [matrix for matrix in (_matrix(problem, tensor) for tensor in problem.tensors) if matrix is not None]
    if len(matrices) < len(problem.tensors):
        return None
    sizes = (sets,), problem.point_sizes if channels == 1 else (columns,)
    norm = Norm(activation=problem.activation)
    vectors = problem.weight, problem.bias
    of_channels = Channels(problem.channels // channels, channels, points)
    if isinstance(problem, ChannelForward):
        if problem.y is None or problem.given:
            return None
        x, y = matrices
        eps, running = problem.eps, problem.running
        return ForwardProblem(*sizes, x, None, y, None, *vectors, problem.stats, eps, norm, of_channels, running)
    if problem.given or problem.wants_nothing:
        return None
    dy, x = matrices[:2]
    dx = matrices[2] if problem.dx else None
    return BackwardProblem(*sizes, x, dy, None, dx, *vectors, problem.dweight, problem.dbias, norm, of_channels)


def _matrix(problem: ChannelProblem, tensor: ChannelTensor) -> Matrix | None:
    """A tensor with a row for each set; None where the sets do not lie so."""
    channels, points = problem.channels_per_set, problem.points
    columns, sets_per_sample = channels * points, problem.channels // channels
    if len(tensor.point_strides) > (2 if channels == 1 else 1) or (points > 1 and tensor.point_strides[-1] != 1):
        return None
    if channels > 1 and tensor.channel_stride != points:
        return None
    # From one set to the next, within a sample and from its last one on.
    within, beyond = channels * tensor.channel_stride, tensor.sample_stride
    if sets_per_sample == 1:
        within = beyond
    elif problem.samples > 1 and beyond != sets_per_sample * within:
        return None
    row_stride = within if problem.sets > 1 else 0
    column_strides = *tensor.point_strides[:-1], 1 if columns > 1 else 0
    return Matrix(tensor.dtype, (row_stride,), column_strides, tensor.offset)
