"""What kernels are told of the running statistics of a batch norm: their types, where they are, and the update."""

from __future__ import annotations

from dataclasses import replace

from cunorm.plan.launches import Constants, Plan, Value
from cunorm.problem import DTYPES, RunningStatistics

__all__ = [
    "running_arguments",
    "running_constants",
    "running_numbers",
    "running_pointers",
    "running_types",
    "with_numbers_of",
]

_NUMBERS = ("kept", "taken", "taken_variance")


def running_types(running: RunningStatistics | None) -> Constants:
    return {
        "RUNNING_MEAN_TYPE": DTYPES[running.mean.dtype].cuda if running else "float",
        "RUNNING_VARIANCE_TYPE": DTYPES[running.variance.dtype].cuda if running else "float",
    }


def running_constants(running: RunningStatistics | None) -> Constants:
    """Of a kernel that updates them."""
    return {"UPDATES_RUNNING": int(running is not None and not running.given)} | running_types(running)


def running_pointers(running: RunningStatistics | None) -> dict[str, Value]:
    return {name: name if running else 0 for name in ("running_mean", "running_var")}


def running_arguments(running: RunningStatistics | None, count: int) -> dict[str, Value]:
    """Of a kernel that updates them with a mean and a variance of so many numbers."""
    numbers = running_numbers(running, count) or (0.0, 0.0, 0.0)
    return running_pointers(running) | dict(zip(_NUMBERS, numbers))


def running_numbers(running: RunningStatistics | None, count: int) -> tuple[float, ...]:
    """How much is kept of them, and how much is taken of a mean and a variance of so many numbers; or nothing."""
    if running is None:
        return ()
    unbiased = count / (count - 1) if running.unbiased and count > 1 else 1
    return running.kept, running.taken, running.taken * unbiased


def with_numbers_of(running: RunningStatistics, count: int, planned: Plan) -> Plan:
    """The plan of a problem that differs in nothing but how much is kept and taken."""
    numbers = running_numbers(running, count)
    launches = []
    for launch in planned.launches:
        constants, arguments = dict(launch.constants), dict(launch.arguments)
        if constants.get("UPDATES_RUNNING"):
            arguments |= zip(_NUMBERS, numbers)
        if constants.get("RUNNING_NUMBERS"):
            arguments["running"] = numbers
        launches.append(replace(launch, arguments=tuple(arguments.items())))
    return replace(planned, launches=tuple(launches))
