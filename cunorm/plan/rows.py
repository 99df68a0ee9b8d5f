"""Rows that are moved once: by blocks or clusters that hold them, or by all blocks of the device together."""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan import row_block, row_geometry, row_grid, row_pipeline, row_split, weight_gradients
from cunorm.plan.launches import Builder, Device
from cunorm.plan.row_block import RowBlock
from cunorm.plan.row_pipeline import RowPipeline
from cunorm.problem import BackwardProblem, ForwardProblem, Problem

__all__ = ["plan_backward", "plan_forward"]


def plan_forward(problem: ForwardProblem, device: Device, geometry: RowBlock | None, builder: Builder) -> str | None:
    """Which strategy was planned, with the geometry or the built-in choice; None where rows are to be read twice."""
    if geometry is None and row_split.is_better_forward(problem, device):
        return None
    if geometry is None:
        geometry = row_geometry.forward_geometry(problem, device)
        pipeline = _pipeline(problem, device, geometry)
        if pipeline is not None:
            return row_pipeline.plan_forward(problem, pipeline, builder)
    if geometry is not None:
        return row_block.plan_forward(problem, geometry, device, builder)
    grid = row_grid.forward_geometry(problem, device)
    return None if grid is None else row_grid.plan_forward(problem, grid, builder)


def plan_backward(problem: BackwardProblem, device: Device, geometry: RowBlock | None, builder: Builder) -> str | None:
    """As `plan_forward`."""
    if geometry is None and row_split.is_better_backward(problem, device):
        return None
    if geometry is None:
        geometry = row_geometry.backward_geometry(problem, device)
        pipeline = _pipeline(problem, device, geometry)
        if pipeline is not None:
            return row_pipeline.plan_backward(problem, pipeline, builder)
        several = geometry is not None and geometry.partial_sums(problem, device) > 1
        if several and weight_gradients.are_better_apart(problem, device):
            return _plan_apart(problem, device, builder)
    return None if geometry is None else row_block.plan_backward(problem, geometry, device, builder)


def _pipeline(problem: Problem, device: Device, geometry: RowBlock | None) -> RowPipeline | None:
    """How rows are shared by all blocks, where that is faster than the built-in geometry, or there is none."""
    blocks = 0 if geometry is None else geometry.blocks_per_row
    if blocks == 1 or (blocks > 1 and not row_pipeline.is_faster_than_clusters(problem, blocks)):
        return None
    return row_pipeline.geometry(problem, device)


def _plan_apart(problem: BackwardProblem, device: Device, builder: Builder) -> str:
    """dx, if it is wanted, and then dweight and dbias from what was read."""
    rows, strategy = replace(problem, dweight=None, dbias=None), "row_weight_gradients"
    if problem.dx is not None:
        geometry = row_geometry.backward_geometry(rows, device)
        assert geometry is not None, "without sums there are registers where there are with them"
        strategy = row_block.plan_backward(rows, geometry, device, builder)
    weight_gradients.launch_weight_gradients(builder, problem, device)
    return strategy
