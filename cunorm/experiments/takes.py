"""What a kernel's text takes of a multiprocessor, the shipped one and an edited one side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cunorm.experiments.examples import Chosen, Example
from cunorm.experiments.tables import Table
from cunorm.occupancy import occupancy
from cunorm.plan import Device
from cunorm.resources import compile_resources

__all__ = ["ResourceReport", "take"]

_COLUMNS = (
    *(*Example.COLUMNS, "text", "registers", "spill bytes", "static shared", "dynamic shared"),
    *("threads", "blocks per multiprocessor", "limited by"),
)


class ResourceReport(Table):
    """What `Experiment.resources` found: for each launch a row a text."""


def take(kernel: str, texts: Mapping[str, str], chosen: Sequence[Chosen], device: Device) -> ResourceReport:
    """Compile the launches of the kernel with each of the ``texts``, by what they are called."""
    rows: list[tuple[Any, ...]] = []
    for example, plan in chosen:
        for launch in (launch for launch in plan.launches if launch.kernel == kernel):
            threads = math.prod(launch.block)
            for name, text in texts.items():
                taken = compile_resources(kernel, dict(launch.constants), device.arch, {kernel: text})
                shared = taken.shared_bytes + launch.shared_bytes
                fits = occupancy(device, threads, taken.registers, shared)
                of_text = name, taken.registers, taken.spill_bytes, taken.shared_bytes, launch.shared_bytes
                rows.append((*example.cells, *of_text, threads, fits.blocks, fits.limit))
    notes = ["Registers and spills are per thread, shared memory is in bytes per block."]
    if len(texts) == 1:
        notes.append("the text is the shipped one")
    return ResourceReport(f"{kernel} on {device.arch}", _COLUMNS, rows, notes)
