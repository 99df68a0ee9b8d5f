"""``%load_ext cunorm``: kernels in the cells of a notebook.

``%cunorm KERNEL`` puts the text of a shipped kernel into the next cell, under the line ``%%cunorm KERNEL``. Such a
cell makes an experiment of its text when it is run (see `cunorm.experiment`). IPython is imported for them alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cunorm
from cunorm import kernels
from cunorm.problem import DTYPES

__all__ = ["load"]


class _Refusal(Exception):
    """What is wrong with a cell's text or options; IPython shows it without a traceback, which would name our lines."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def load(shell: Any) -> None:
    """Give an IPython shell the magics ``%cunorm`` and ``%%cunorm``."""

    def magic(line: str, cell: str | None = None) -> None:
        try:
            if cell is None:
                _start(shell, line)
            else:
                _experiment(shell, line, cell)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _Refusal(str(error)) from None

    magic.__doc__ = f"{_start_parser().format_help()}\n{_experiment_parser().format_help()}"
    shell.register_magic_function(magic, magic_kind="line_cell", magic_name="cunorm")
    if hasattr(shell, "kernel"):  # a notebook's, not a terminal's
        script = (Path(__file__).parent / "highlight.js").read_text(encoding="utf-8")
        shell.display_pub.publish({"application/javascript": script})


def _start(shell: Any, line: str) -> None:
    options = _start_parser().parse_args(line.split())
    if options.kernel is None:
        print(*kernels.kernel_names(), sep="\n")
        return
    text = cunorm.experiment(options.kernel).source
    if not options.whole:
        text = (Path(kernels.__file__).parent / f"{options.kernel}.cu").read_text(encoding="utf-8")
    if options.show:
        shell.display_pub.publish({"text/markdown": f"```cpp\n{text}```", "text/plain": text})
    else:
        shell.set_next_input(f"%%cunorm {options.kernel} --check\n{text}")


def _experiment(shell: Any, line: str, cell: str) -> None:
    options = _experiment_parser().parse_args(line.split())
    experiment = cunorm.experiment(options.kernel)
    # The first line is the magic's, so the text begins with the second: errors name the lines of the cell.
    experiment.source = f'#line 2 "kernels/{options.kernel}.cu"\n{cell}'
    shell.user_ns[options.name] = experiment
    if options.check is None and options.bench is None:
        _display(shell, experiment)
    report: Any = True
    if options.check is not None:
        dtypes = [options.dtype] if options.dtype else None
        report = experiment.check(shapes=options.check or None, dtypes=dtypes)
        _display(shell, report)
    if options.bench is not None and not report:
        print("It is not timed, since its results are wrong.")
    elif options.bench is not None:
        _display(shell, experiment.bench(options.bench, dtype=options.dtype or "bfloat16"))


def _display(shell: Any, value: Any) -> None:
    shell.display_pub.publish(*shell.display_formatter.format(value))


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(size) for size in shape.split("x")) for shape in text.split(",")]


@functools.cache
def _start_parser() -> Any:
    parser = _parser("%cunorm", "Put the text of a shipped kernel into the next cell. Without one, list the kernels.")
    parser.add_argument("kernel", nargs="?", metavar="KERNEL")
    parser.add_argument("--whole", action="store_true", help="the text of the headers too, to edit that")
    parser.add_argument("--show", action="store_true", help="show it highlighted instead")
    return parser


@functools.cache
def _experiment_parser() -> Any:
    parser = _parser("%%cunorm", "Make an experiment of the cell, which is the text of a kernel.")
    parser.add_argument("kernel", metavar="KERNEL", help="the shipped kernel that it takes the place of")
    shapes: dict[str, Any] = {"type": _shapes, "metavar": "SHAPES"}
    parser.add_argument("--check", **shapes, nargs="?", const=[], help="compare with float64; SHAPES: 4x64,3x1000")
    parser.add_argument("--bench", **shapes, help="time it beside the shipped text and a copy; needs a GPU")
    parser.add_argument("--dtype", choices=list(DTYPES), help="for both (default: several, and bfloat16 for --bench)")
    parser.add_argument("--name", default="experiment", help="the variable that holds it (default: experiment)")
    return parser


def _parser(name: str, description: str) -> Any:
    from IPython.core import magic_arguments

    parser: Any = magic_arguments.MagicArgumentParser  # it has no types
    return parser(prog=name, description=description, add_help=False)
