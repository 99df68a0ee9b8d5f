"""Measure rows with every provider. A result is compared with the exact one before its time counts."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cunorm import cuda
from cunorm.bench import models
from cunorm.bench.channel_inputs import ChannelExact, ChannelInputs
from cunorm.bench.inputs import SUMS, Comparison, Exact, Inputs, Tensors
from cunorm.bench.peers import Provider, find
from cunorm.bench.results import COMPILED, Measurement, Results, first_line
from cunorm.bench.suites import Row
from cunorm.bench.timing import Machine
from cunorm.bench.work import Work

__all__ = ["Measurement", "Results", "describe_machine", "run"]

# What is called with every row that is done: the results so far, the row, its measurements.
Report = Callable[[Results, Row, Sequence[Measurement]], None]


def run(
    rows: Sequence[Row],
    provider_names: Sequence[str],
    machine: Machine,
    *,
    max_seconds: float = float("inf"),
    warm: bool = False,
    report: Report = lambda results, row, measurements: None,
) -> Results:
    """Measure all rows; those that ``max_seconds`` leaves no time for are named in ``Results.missing``.

    With ``warm`` everything is called once and nothing is checked or timed: libraries compile what a later run needs.
    """
    begin = time.monotonic()
    if all(row.is_model for row in rows):  # the others would take memory that models need
        provider_names = [name for name in provider_names if name in models.PROVIDERS]
    if all(row.clock == "device" for row in rows):  # where it is no other library
        provider_names = [name for name in provider_names if name != COMPILED]
    providers, absent = find(provider_names, machine.device, machine.cache_bytes)
    results = Results(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine(machine),
        versions={"Python": platform.python_version(), "torch": str(torch.__version__)}
        | {provider.name: provider.version for provider in providers}
        | (models.versions() if any(row.is_model for row in rows) else {}),
        absent=absent,
    )
    results.missing = [row.label for row in rows]
    copies = _Copies(machine)
    inputs = exact = None
    key: object = None
    for row in rows:
        if time.monotonic() - begin > max_seconds:
            results.stopped = f"after {max_seconds:g} seconds, as asked"
        if results.stopped:
            break
        try:
            if row.is_model:
                inputs = exact = key = None
                machine.release()
            elif row.inputs_key != key:
                inputs = exact = None  # before the next ones are made, which may be large
                machine.release()
                inputs, exact = _prepare(row, machine.device)
                key = row.inputs_key
                copies.timed.clear()
            if not warm and row.clock == "device":
                copies.time(row.moved_bytes)
        except RuntimeError as error:  # too large for this device, say
            key = None
            note = first_line(error)
            measured = [dataclasses.replace(Measurement.of(row, each.name, None), note=note) for each in providers]
            results.stopped = _broken(machine, "a tensor", row)
        else:
            if inputs is None or exact is None:
                measured = models.measure(row, provider_names, machine, warm)
                results.stopped = _broken(machine, "a model", row)
            elif warm:
                measured = [_warm(row, inputs, provider) for provider in providers]
                results.stopped = _broken(machine, "a provider", row)
            elif row.clock == "host":
                measured = _measure_host(row, inputs, exact, providers, machine)
            else:
                measured = []
                for provider in providers:
                    measurement = _measure(row, inputs, exact, provider, machine, copies.seconds[row.moved_bytes])
                    if measurement is None:
                        continue
                    measured.append(measurement)
                    if measurement.seconds is None and (stopped := _broken(machine, provider.name, row)):
                        results.stopped = stopped
                        break
        results.measurements += measured
        results.missing.pop(0)
        results.seconds = time.monotonic() - begin
        report(results, row, measured)
    results.measurements = [copies.beside(measurement) for measurement in results.measurements]
    results.machine |= {f"{name} at the end": value for name, value in _clocks(machine).items()}
    return results


def _prepare(row: Row, device: str) -> tuple[Tensors, Comparison]:
    if row.is_channel_norm:
        channel_inputs = ChannelInputs(row, device)
        return channel_inputs, ChannelExact(channel_inputs)
    inputs = Inputs(row, device)
    return inputs, Exact(inputs)


def _broken(machine: Machine, what: str, row: Row) -> str:
    reason = machine.broken()
    return f"{what} left the device unusable at {row.label}: {reason}" if reason else ""


class _Copies:
    """The times of copies, of which the least of a run counts for each number of bytes.

    It is taken again beside each size of tensors: on an H200 400 MB took 100 microseconds in one run, and 113 in
    another, which probably depends on where the tensors lie.
    """

    def __init__(self, machine: Machine) -> None:
        self.seconds: dict[int, float] = {}
        self._machine = machine
        self.timed: set[int] = set()  # beside the tensors that there are now

    def time(self, moved_bytes: int) -> None:
        """Time a copy that reads and writes this many bytes together."""
        if moved_bytes in self.timed:
            return
        source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device=self._machine.device)
        target = torch.empty_like(source)
        seconds = self._machine.seconds(lambda: target.copy_(source))
        self.seconds[moved_bytes] = min(seconds, self.seconds.get(moved_bytes, seconds))
        self.timed.add(moved_bytes)

    def beside(self, measurement: Measurement) -> Measurement:
        if measurement.copy_seconds is None:
            return measurement
        return dataclasses.replace(measurement, copy_seconds=self.seconds[measurement.moved_bytes])


def _measure(
    row: Row, inputs: Tensors, exact: Comparison, provider: Provider, machine: Machine, copy_seconds: float
) -> Measurement | None:
    """None where the provider has no such function. What goes wrong in a provider becomes a note."""
    measured = Measurement.of(row, provider.name, copy_seconds=copy_seconds)
    try:
        work = provider.work(row, inputs)
        if work is None:
            return None
        error, wrong = _check(row, inputs, exact, work)
        if wrong:
            return dataclasses.replace(measured, error=error, note=wrong)
        seconds = machine.pipelined_seconds(work.call, work.wait) if work.wait else machine.seconds(work.call)
        return dataclasses.replace(measured, seconds=seconds, error=error, note=work.note)
    except Exception as error:
        return dataclasses.replace(measured, note=first_line(error))


def _warm(row: Row, inputs: Tensors, provider: Provider) -> Measurement:
    measured = Measurement.of(row, provider.name, copy_seconds=None)
    try:
        work = provider.work(row, inputs)
        if work is not None:
            work.results()
    except Exception as error:
        return dataclasses.replace(measured, note=first_line(error))
    return dataclasses.replace(measured, note="not timed")


def _measure_host(
    row: Row, inputs: Tensors, exact: Comparison, providers: Iterable[Provider], machine: Machine
) -> list[Measurement]:
    """All providers of a row together, so that their calls take turns."""
    measured, calls = [], []
    for provider in providers:
        measurement = Measurement.of(row, provider.name, copy_seconds=None)
        try:
            work = provider.work(row, inputs)
            if work is None:
                continue
            error, wrong = _check(row, inputs, exact, work)
            measured.append(dataclasses.replace(measurement, error=error, note=wrong))
            if not wrong:
                calls.append((len(measured) - 1, work.call))
        except Exception as error:
            measured.append(dataclasses.replace(measurement, note=first_line(error)))
    for (position, _), seconds in zip(calls, machine.host_seconds([call for _, call in calls])):
        measured[position] = dataclasses.replace(measured[position], seconds=seconds)
    return measured


def _check(row: Row, inputs: Tensors, exact: Comparison, work: Work) -> tuple[float, str]:
    """The largest error of the results; and what is wrong with them, if something is."""
    inputs.poison()
    errors = exact.errors(work.results(), row.residual)
    wrong = []
    for name, error in errors.items():
        limit = exact.limit(name, inputs.dtype) * work.slack * (work.sum_slack if name in SUMS else 1)
        if not error <= limit:
            wrong.append(f"{name} is off by {error:.1e}, allowed are {limit:.1e}")
    return max(errors.values()), f"wrong: {'; '.join(wrong)}" if wrong else ""


def describe_machine(machine: Machine) -> dict[str, str]:
    """The device, its driver and its clocks."""
    if machine.device != "cuda":
        return {"device": machine.device}
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "CUDA of PyTorch": str(torch.version.cuda),
        "CuPy": str(cuda.cupy().__version__),
        **_clocks(machine, "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit"),
    }


def _clocks(machine: Machine, *more: str) -> dict[str, str]:
    """Clocks now, and ``more`` of nvidia-smi's queries; nothing where there is no nvidia-smi."""
    if machine.device != "cuda" or not shutil.which("nvidia-smi"):
        return {}
    names = (*more, "clocks.sm", "clocks.mem", "temperature.gpu")
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    # Its numbers are not CUDA's where some GPUs are hidden from the process.
    for chosen in ([f"--id=GPU-{getattr(properties, 'uuid', '')}"], []):
        try:
            done = subprocess.run(command + chosen, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return dict(zip(names, (value.strip() for value in done.stdout.splitlines()[0].split(","))))
    return {}
