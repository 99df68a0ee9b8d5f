"""Problems, geometries and entries that the tests of tuning share, and what stands in for the GPU it measures on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cunorm import __version__
from cunorm.plan import Device, Plan, RowBlock, Way, plan, plan_with, row_candidates
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.problem import Problem, View, contiguous_strides
from cunorm.row_norm import RowNorm
from cunorm.tuning import checked_problems
from cunorm.tuning.search import Report
from cunorm.tuning_file import Entry

GPU = "NVIDIA of this test"
DEVICE = Device()


def problem_of(*shape: int, op: str = "layer_norm", dtype: str = "bfloat16", **options: Any) -> Problem:
    (problem,) = checked_problems(op, shape, dtype, **options)
    return problem


def other_geometries(problem: Problem, device: Device = DEVICE) -> list[RowBlock | RowBulk | RowBulkBackward]:
    """What may compute a problem, but for what comes down to the built-in plan."""
    built_in = plan(problem, device)
    return [item for item in row_candidates.candidates(problem, device) if plan_with(problem, device, item) != built_in]


def entry_of(geometry: Way | None, *shape: int) -> Entry:
    return Entry(geometry, shape or (4096, 8192), 1e-5, 1.25e-5, 7, __version__)


def prepare(*shape: int, dtype: str = "bfloat16") -> Any:
    """Prepare a forward call with weight and bias, as an adapter does for tensors on a GPU."""
    place = ("cuda", 0)
    x = View(0, shape, contiguous_strides(shape), dtype, place)
    vector = View(0, shape[-1:], (1,), dtype, place)
    return RowNorm.of(-1, 1e-5).prepare_forward(x, None, vector, vector, None, False)


class FakeMachine:
    """Compiles all, finds all right, and has a time for every plan."""

    gpu = GPU

    def __init__(self, seconds: Callable[[Plan], float], device: Device = DEVICE) -> None:
        self.device, self.seconds = device, seconds
        self.compile: Callable[[Sequence[Plan], float, Report], list[Plan]] = self._compile
        self.error: Callable[[Plan], float] = lambda plan: 0.0
        self.asked: list[Plan] = []
        self.released = False

    def _compile(self, plans: Sequence[Plan], until: float, report: Report) -> list[Plan]:
        self.built_in = plans[0]
        return list(plans)

    def samples(self, plan: Plan, count: int) -> list[float]:
        self.asked.append(plan)
        return [self.seconds(plan)] * count

    def release(self) -> None:
        self.released = True


def favourite(problem: Problem, geometry: Way | None, ratio: float) -> Callable[[Plan], float]:
    """Times by which one geometry is faster than the built-in choice, and all others are slower."""
    built_in, best = plan(problem, DEVICE), plan_with(problem, DEVICE, geometry)
    return lambda chosen: 1e-5 if chosen == built_in else 1e-5 / ratio if chosen == best else 2e-5
