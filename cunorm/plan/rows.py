"""Which way rows go: moved once, by blocks or clusters that hold them or by all blocks together, or read twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.plan import (
    row_bulk,
    row_bulk_backward,
    row_clusters,
    row_geometry,
    row_grid,
    row_held,
    row_pipeline_geometry,
    row_sharing,
    row_split,
    row_stream_choice,
    row_stream_geometry,
    row_weight_gradients,
)
from cunorm.plan.column_sums import column_sum_targets, launch_column_sums
from cunorm.plan.device import Device
from cunorm.plan.launches import Builder, Plan
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.row_grid import RowGrid
from cunorm.plan.row_held import RowHeld
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.plan.row_stream import RowStream
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["Apart", "RowWay", "plan_with", "way_of"]


@dataclass(frozen=True)
class Apart:
    """Gradients of few rows: dx, if it is wanted, and then dweight and dbias from what was read."""

    of_dx: RowBlock | None

    def plan(self, problem: Problem, device: Device, builder: Builder) -> str:
        """Write down the launches; the name of the strategy."""
        assert isinstance(problem, BackwardProblem)
        strategy = "row_weight_gradients"
        if problem.dx is not None:
            assert self.of_dx is not None, "without sums there are registers where there are with them"
            strategy = self.of_dx.plan(_without_sums(problem), device, builder)
        row_weight_gradients.launch(builder, problem, device)
        return strategy


RowWay = RowBlock | RowBulk | RowBulkBackward | RowStream | RowPipeline | RowHeld | RowGrid | Apart


def way_of(problem: Problem, device: Device) -> RowWay | None:
    """The built-in choice; None where rows are to be read twice."""
    if row_stream_choice.is_better(problem, device):
        stream = row_stream_geometry.geometry(problem, device)
        if stream is not None:
            return stream
    if row_split.is_better(problem, device):
        return None
    return _forward_way(problem, device) if isinstance(problem, ForwardProblem) else _backward_way(problem, device)


def _forward_way(problem: ForwardProblem, device: Device) -> RowWay | None:
    in_bulk = row_bulk.geometry(problem, device)
    if in_bulk is not None:
        return in_bulk
    geometry = row_geometry.forward_geometry(problem, device)
    return _pipeline(problem, device, geometry) or geometry or _of_long(problem, device)


def _of_long(problem: ForwardProblem, device: Device) -> RowWay | None:
    """How rows are shared by all blocks that neither clusters hold nor a pipeline."""
    return row_held.geometry(problem, device) or row_grid.forward_geometry(problem, device)


def _backward_way(problem: BackwardProblem, device: Device) -> RowWay | None:
    in_bulk = row_bulk_backward.geometry(problem, device)
    if in_bulk is not None:
        return in_bulk
    geometry = row_geometry.backward_geometry(problem, device)
    pipeline = _pipeline(problem, device, geometry)
    if pipeline is not None:
        return pipeline
    if geometry is None:
        return row_held.geometry(problem, device)
    if geometry == row_clusters.clusters_backward(problem, device, geometry.width):
        return geometry  # it is of clusters, which leave few partial sums
    if geometry.partial_sums(problem, device) > 1 and row_weight_gradients.are_better_apart(problem, device):
        alone = _without_sums(problem)
        return Apart(None if problem.dx is None else row_geometry.backward_geometry(alone, device))
    return geometry


def _pipeline(problem: Problem, device: Device, geometry: RowBlock | None) -> RowPipeline | None:
    """How rows are shared by all blocks, where that is faster than the built-in geometry, or there is none."""
    if geometry is None:
        return None if row_sharing.is_short_group(problem, device) else row_pipeline_geometry.geometry(problem, device)
    if geometry.blocks_per_row == 1 or not row_sharing.is_faster_than_clusters(problem, device, geometry):
        return None
    return row_pipeline_geometry.geometry(problem, device)


def _without_sums(problem: BackwardProblem) -> BackwardProblem:
    return replace(problem, dweight=None, dbias=None)


def plan_with(problem: Problem, device: Device, way: RowWay | None) -> Plan:
    """The plan with a way; None is for the built-in choice."""
    builder = Builder()
    if isinstance(problem, BackwardProblem) and _is_empty(problem):
        targets, _ = column_sum_targets(builder, problem, 0)
        launch_column_sums(builder, problem, targets, 0)
        return builder.finished("empty")
    chosen = way or way_of(problem, device)
    if chosen is None:
        return builder.finished(row_split.plan(problem, device, builder))
    return builder.finished(chosen.plan(problem, device, builder))


def _is_empty(problem: BackwardProblem) -> bool:
    """Whether there is nothing to read."""
    return problem.wants_nothing or problem.rows == 0 or problem.columns == 0
