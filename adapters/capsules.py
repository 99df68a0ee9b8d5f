"""What a DLPack capsule holds."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["tensor_address"]

# A function object of our own: the argument types of ctypes.pythonapi's belong to the whole process.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def tensor_address(capsule: Any) -> int:
    """The address of the DLTensor in a capsule that nobody has taken it from."""
    return int(_capsule_pointer(capsule, b"dltensor"))
