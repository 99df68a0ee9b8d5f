"""Rows that are moved once: by blocks or clusters that hold them, or forward by all blocks of the device."""

from __future__ import annotations

from cunorm.plan import row_block, row_geometry, row_grid
from cunorm.plan.launches import Builder, Device
from cunorm.plan.row_block import RowBlock
from cunorm.problem import BackwardProblem, ForwardProblem

__all__ = ["plan_backward", "plan_forward"]


def plan_forward(problem: ForwardProblem, device: Device, geometry: RowBlock | None, builder: Builder) -> str | None:
    """Which strategy was planned, with the geometry or the built-in choice; None where rows must be moved twice."""
    if geometry is None:
        geometry = row_geometry.forward_geometry(problem, device)
    if geometry is not None:
        return row_block.plan_forward(problem, geometry, device, builder)
    grid = row_grid.forward_geometry(problem, device)
    return None if grid is None else row_grid.plan_forward(problem, grid, builder)


def plan_backward(problem: BackwardProblem, device: Device, geometry: RowBlock | None, builder: Builder) -> str | None:
    """As `plan_forward`."""
    if geometry is None:
        geometry = row_geometry.backward_geometry(problem, device)
    return None if geometry is None else row_block.plan_backward(problem, geometry, device, builder)
