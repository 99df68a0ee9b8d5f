"""The CUDA C++ text of the kernels, and how a text becomes complete.

A kernel is the file of its name, ``<kernel>.cu``, with one entry point of the same name that takes one ``struct
Arguments`` by value. What varies at compile time stands in capitals and arrives as ``#define`` lines before the text.
Includes of ``.cuh`` files are expanded here, not by the compiler: CuPy's on-disk cache keys on the text it is given, so
an include that it cannot see would let an edited ``.cuh`` run the old binary.

Another text may stand in for a shipped one (`cunorm.experiments`): ``replaced`` holds those that do for every call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["argument_fields", "complete", "fields_of", "kernel_names", "kernel_source", "kernel_text", "lines_of"]

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([\w.]+)"\s*(?://.*)?$')
_DIRECTIVE = re.compile(r'^#line (\d+) "kernels/([\w.]+)"$')
_ARGUMENTS = re.compile(r"^struct Arguments \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^\s*(?:const )?(\w+(?: \w+)?)(\*?) (\w+)(?:\[(\w+)\])?;")
_CONDITION = re.compile(r"^#if (\w+) > 0$|^#endif$")


def kernel_names() -> list[str]:
    """The names of all kernels, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.cu"))


# Complete texts by kernel, that take the place of shipped ones in every call. Never changed but put in place as a
# whole, so that whoever reads it once for all launches of a plan gets one state of it.
replaced: Mapping[str, str] = {}


def complete(name: str, text: str) -> str:
    """A kernel's text with its includes expanded and its ``#line`` directives right.

    The text may be a plain one, or a complete one that was edited: the lines of each file in it are counted again.
    """
    lines: list[str] = []
    counts: dict[str, int] = {}  # of the lines that each file has had
    held = {match[2] for line in text.splitlines() if (match := _DIRECTIVE.match(line)) and match[1] == "1"}

    def go_on(file: str) -> None:
        lines.append(f'#line {counts[file] + 1} "kernels/{file}"')

    def add(file: str, text: str) -> None:
        counts[file] = 0
        if not text.startswith("#line"):
            go_on(file)
        for line in text.splitlines():
            directive, include = _DIRECTIVE.match(line), _INCLUDE.match(line)
            if directive:
                file = directive[2]
                # Where a file goes on, there was an include; it had a line.
                counts[file] = counts.get(file, int(directive[1]) - 2) + 1 if directive[1] != "1" else 0
                go_on(file)
            elif include and (_FOLDER / include[1]).exists():
                if include[1] not in counts and include[1] not in held:
                    add(include[1], _text(include[1]))
                counts[file] += 1
                go_on(file)
            else:
                counts[file] += 1
                lines.append(line)

    add(f"{name}.cu", text)
    return "\n".join(lines) + "\n"


def _text(file: str) -> str:
    return (_FOLDER / file).read_text(encoding="utf-8")


@functools.cache
def _expanded(name: str) -> str:
    return complete(name, _text(f"{name}.cu"))


def kernel_text(name: str, texts: Mapping[str, str] | None = None) -> str:
    """The complete text of a kernel without constants: the one among ``texts`` (by default `replaced`), or the shipped.

    ``#line`` directives keep the messages of compilers and sanitizers at the lines of the files.
    """
    return (replaced if texts is None else texts).get(name) or _expanded(name)


def kernel_source(name: str, constants: Mapping[str, int | str], texts: Mapping[str, str] | None = None) -> str:
    """What is compiled: a ``#define`` for each constant, then the `kernel_text`."""
    return "".join(f"#define {key} {value}\n" for key, value in constants.items()) + kernel_text(name, texts)


def lines_of(text: str) -> dict[tuple[str, int], str]:
    """The lines of a complete text, by the file and the number that its ``#line`` directives give them."""
    lines: dict[tuple[str, int], str] = {}
    file, number = "", 1
    for line in text.splitlines():
        if directive := _DIRECTIVE.match(line):
            file, number = f"kernels/{directive[2]}", int(directive[1])
        else:
            lines[file, number] = line
            number += 1
    return lines


@functools.cache
def argument_fields(name: str) -> tuple[tuple[str, str, str | None], ...]:
    """The fields of a kernel's ``struct Arguments``, read from its shipped text."""
    return fields_of(name, _text(f"{name}.cu"))


def fields_of(name: str, text: str) -> tuple[tuple[str, str, str | None], ...]:
    """The fields of ``struct Arguments`` in a kernel's text: (name, type, array length or None).

    The type is "pointer", "long long" or "double", each 8 bytes, so that the struct has no padding on any compiler. In
    place of a length a pointer has the constant that must be more than 0 for it to be there.
    """
    match = _ARGUMENTS.search(text)
    if match is None:
        raise ValueError(f"kernels/{name}.cu has no struct Arguments")
    fields, constant = [], None
    for line in match[1].splitlines():
        if condition := _CONDITION.match(line):
            constant = condition[1]
        elif line.lstrip().startswith("#"):
            raise ValueError(f"kernels/{name}.cu: struct Arguments has {line.strip()}, and may have #if NAME > 0 alone")
        elif found := _FIELD.match(line):
            kind, star, field, length = found.groups()
            if not star and kind not in ("long long", "double"):
                raise ValueError(f"kernels/{name}.cu: field {field} is {kind}; every field must be 8 bytes")
            if constant and not star and length != constant:
                raise ValueError(f"kernels/{name}.cu: field {field} may not depend on {constant}")
            fields.append((field, "pointer", constant) if star else (field, kind, length))
    return tuple(fields)
