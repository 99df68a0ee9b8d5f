"""What a compiler says of a kernel's text: at the lines of its files, each with a caret under the place.

NVRTC and g++ name files and lines by the ``#line`` directives of the complete text, which is not what anybody edits;
g++ reads it from a pipe and cannot show a line of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cunorm import kernels

__all__ = ["CompileError", "Finding", "excerpt"]

_MOST_FINDINGS = 5
_NVRTC = re.compile(
    r"^(?P<file>[^\s():]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<what>.*)$", re.MULTILINE
)
_GCC = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: (?P<what>.*)$", re.MULTILINE)
_NVRTC_INDENT = 2  # before the lines that it shows


class Finding(NamedTuple):
    """An error: its file and line, its column from 1 on (0 where that is not known), and what is wrong."""

    file: str
    line: int
    column: int
    what: str


class CompileError(RuntimeError):
    """A kernel does not compile. The message shows the first errors, each with its source line and a caret.

    Attributes
    ----------
    findings : list of Finding
        All errors that the compiler named a line for.
    log : str
        All that the compiler said.
    """

    def __init__(self, what: str, log: str, text: str, constants: Mapping[str, int | str]) -> None:
        self.log, self.findings = log, _findings(log)
        parts = [
            f"{found.file}:{found.line}: error: {found.what}\n{excerpt(text, found.file, found.line, found.column)}"
            for found in self.findings[:_MOST_FINDINGS]
        ]
        if len(self.findings) > _MOST_FINDINGS:
            parts.append(f"and {len(self.findings) - _MOST_FINDINGS} more")
        shown = " ".join(f"{name}={value}" for name, value in constants.items())
        super().__init__("\n".join([what + ":", *(parts or [log]), f"with {shown}"]))
        self._made_of = what, log, text, constants

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickles it, as processes do that hand it on: by default an error is made anew of its message alone."""
        return type(self), self._made_of


def _findings(log: str) -> list[Finding]:
    found = [
        Finding(match["file"], int(match["line"]), int(match["column"]), match["what"]) for match in _GCC.finditer(log)
    ]
    for match in _NVRTC.finditer(log):
        # Two lines are shown: the source, and the caret under it.
        caret = "".join(log[match.end() + 1 :].splitlines()[1:2])
        column = caret.index("^") - _NVRTC_INDENT + 1 if caret.strip() == "^" else 0
        found.append(Finding(match["file"], int(match["line"]), column, match["what"]))
    return list(dict.fromkeys(found))


def excerpt(text: str, file: str, line: int, column: int = 0) -> str:
    """A line of a file in a complete text, as messages show it, with a caret under the column if that is known."""
    source = kernels.lines_of(text).get((file, line))
    if source is None:
        return ""
    margin = f"{line:6} | "
    caret = f"\n{' ' * 6} | {' ' * (column - 1)}^" if 0 < column <= len(source) + 1 else ""
    return margin + source + caret
