"""Runs a whole plan on the emulator, with NumPy arrays for its operands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cunorm import kernels
from cunorm.emulator import EmulatorError, Pointer, Watch, Writer, run
from cunorm.launch import argument_values
from cunorm.plan import Plan

__all__ = ["owner_of", "run_plan"]


def owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _words_of_a_former_call(size: int) -> np.ndarray[Any, Any]:
    """Tags of the first two turns with NaNs beside them (kernels/grid_words.cuh), which have to be cleared."""
    return np.resize(np.array([1 << 32 | 0x7FC00000, 2 << 32 | 0x7FC00000], np.int64), size // 8).view(np.uint8)


def run_plan(
    plan: Plan,
    operands: Mapping[str, np.ndarray[Any, Any] | None],
    seed: int = 0,
    *,
    texts: Mapping[str, str] | None = None,
    watch: tuple[str, int] | None = None,
    timeout: float = 120.0,
) -> tuple[str, Writer] | None:
    """Run the launches of ``plan`` one after the other. Outputs among the ``operands`` are written in place.

    An operand may be a view: the kernel then gets the view's place in the array that owns the memory, and anything
    outside that array is out of bounds. Scratch buffers are arrays of their own, filled with NaNs.

    ``texts`` stand in for shipped ones, as `cunorm.kernels.kernel_text` takes them. ``watch`` is an operand and how far
    behind its pointer an element of it begins, in bytes: returned are the kernel and the thread that wrote it last. A
    launch that takes longer than ``timeout`` seconds is stopped.
    """
    buffers: dict[str, np.ndarray[Any, Any]] = {}
    pointers: dict[str, int | None] = {}
    for name, array in operands.items():
        if array is None:
            pointers[name] = None
            continue
        owner = buffers[name] = owner_of(array)
        pointers[name] = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    for scratch in plan.scratch:
        buffers[scratch.name] = (
            _words_of_a_former_call(scratch.bytes)
            if scratch.name == "words"
            else np.full(scratch.bytes, 0xFF, np.uint8)
        )
        pointers[scratch.name] = 0

    writer: tuple[str, Writer] | None = None
    for launch in plan.launches:
        used: dict[int, int] = {}  # id of the array -> place among the buffers, so that aliases stay aliases
        arrays: list[np.ndarray[Any, Any]] = []
        fields: list[Pointer | int | float | None] = []
        for code, value in argument_values(launch):
            if code != "P" or value is None:
                fields.append(value)
                continue
            offset = pointers[value]
            if offset is None:
                fields.append(None)
                continue
            array = buffers[value]
            if id(array) not in used:
                used[id(array)] = len(arrays)
                arrays.append(array)
            fields.append(Pointer(used[id(array)], offset))
        watched = None
        if watch is not None and id(buffers[watch[0]]) in used:
            name, offset = watch
            itemsize = operands[name].itemsize  # type: ignore[union-attr]
            watched = Watch(used[id(buffers[name])], (pointers[name] or 0) + offset, itemsize)
        try:
            found = run(
                kernels.kernel_source(launch.kernel, dict(launch.constants), texts),
                launch.kernel,
                grid=(launch.grid, 1, 1),
                block=(*launch.block, 1),
                shared_bytes=launch.shared_bytes,
                fields=fields,
                buffers=arrays,
                seed=seed,
                cluster=launch.cluster,
                cooperative=launch.cooperative,
                watch=watched,
                timeout=timeout,
            )
        except EmulatorError as error:
            named = {str(used[id(array)]): name for name, array in buffers.items() if id(array) in used}
            words = re.split(r"\bbuffer (\d+)\b", str(error))
            words[1::2] = [named.get(place, place) for place in words[1::2]]
            raise type(error)("".join(words)) from error
        if found is not None:
            writer = launch.kernel, found
    return writer
