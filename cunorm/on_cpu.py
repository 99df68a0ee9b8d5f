"""Calls on the CPU: functions of NumPy arrays over the memory of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cunorm.prepared import Output, Prepared
from cunorm.problem import DTYPES, View

__all__ = ["as_numpy", "numpy_dtype", "prepare_on_cpu"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of cunorm's dtype names."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def as_numpy(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """A NumPy array over CPU memory, without a copy. Strides are in elements. The caller keeps the memory alive."""
    itemsize = DTYPES[dtype].itemsize
    if 0 in shape:
        return np.empty(shape, numpy_dtype(dtype))
    # A buffer from the lowest address to the highest, since strides may be negative.
    reach = [(size - 1) * stride * itemsize for size, stride in zip(shape, strides)]
    lowest = sum(step for step in reach if step < 0)
    size = sum(step for step in reach if step > 0) - lowest + itemsize
    memory: Any = (ctypes.c_char * size).from_address(pointer + lowest)
    return np.ndarray(shape, numpy_dtype(dtype), memory, -lowest, [stride * itemsize for stride in strides])


def prepare_on_cpu(
    function: Callable[..., None], views: Sequence[View | None], outputs: tuple[Output | None, ...]
) -> Prepared:
    """A call of ``function`` with NumPy arrays over the CPU memory that ``views`` describe: all inputs, all outputs."""
    layouts = [None if view is None else view[1:4] for view in views]

    def run(pointers: Sequence[int], workspace: int, stream: int) -> None:
        function(*(layout and as_numpy(pointer, *layout) for layout, pointer in zip(layouts, pointers)))

    return Prepared(outputs, ("cpu", 0), 0, run)
