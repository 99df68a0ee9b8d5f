"""The CUDA C++ text of the kernels, and how a text becomes complete.

A kernel is the file of its name, ``<kernel>.cu``, with one entry point of the same name that takes one ``struct
Arguments`` by value. What varies at compile time stands in capitals and arrives as ``#define`` lines before the text.
Includes of ``.cuh`` files are expanded here, not by the compiler: CuPy's on-disk cache keys on the text it is given, so
an include that it cannot see would let an edited ``.cuh`` run the old binary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["argument_fields", "kernel_names", "kernel_source"]

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([\w.]+)"$')
_ARGUMENTS = re.compile(r"^struct Arguments \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^\s*(?:const )?(\w+(?: \w+)?)(\*?) (\w+)(?:\[(\w+)\])?;", re.MULTILINE)


def kernel_names() -> list[str]:
    """The names of all kernels, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.cu"))


@functools.cache
def _expanded(name: str) -> str:
    included: set[str] = set()

    def expand(file: str) -> list[str]:
        lines = [f'#line 1 "kernels/{file}"']
        for number, line in enumerate((_FOLDER / file).read_text(encoding="utf-8").splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                lines.append(line)
                continue
            if match[1] not in included:
                included.add(match[1])
                lines += expand(match[1])
            lines.append(f'#line {number + 1} "kernels/{file}"')
        return lines

    return "\n".join(expand(f"{name}.cu")) + "\n"


def kernel_source(name: str, constants: Mapping[str, int | str]) -> str:
    """The complete text of a kernel: a ``#define`` for each constant, then the file with its includes expanded.

    ``#line`` directives keep the messages of compilers and sanitizers at the lines of the files.
    """
    defines = "".join(f"#define {key} {value}\n" for key, value in constants.items())
    return defines + _expanded(name)


@functools.cache
def argument_fields(name: str) -> tuple[tuple[str, str, str | None], ...]:
    """The fields of a kernel's ``struct Arguments``, read from its text: (name, type, array length or None).

    The type is "pointer", "long long" or "double", each 8 bytes, so that the struct has no padding on any compiler.
    """
    text = (_FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    match = _ARGUMENTS.search(text)
    if match is None:
        raise ValueError(f"kernels/{name}.cu has no struct Arguments")
    fields = []
    for kind, star, field, length in _FIELD.findall(match[1]):
        if not star and kind not in ("long long", "double"):
            raise ValueError(f"kernels/{name}.cu: field {field} is {kind}; every field must be 8 bytes")
        fields.append((field, "pointer" if star else kind, length or None))
    return tuple(fields)
