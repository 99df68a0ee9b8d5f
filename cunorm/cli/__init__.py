"""The command line of ``python -m cunorm``: its arguments here, a module a command beside it."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cunorm import __version__
from cunorm.adapters import compiled
from cunorm.explanation import OPS
from cunorm.problem import ACTIVATIONS, DTYPES

__all__ = ["UsageError", "run"]

FRAMEWORKS = ("numpy", "cupy", "torch", "jax", "tensorflow")


class UsageError(Exception):
    """Arguments that cannot be used. The message is for the user; the exit code is 2, as argparse's own."""


def run(arguments: Sequence[str], *, started: float | None = None) -> int:
    """Run one command. ``started`` is when the process began (``time.monotonic``), for the demo's time limit."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what prints to a notebook, say, is none
        sys.stdout.reconfigure(errors="replace")  # ASCII has no µ
    options = vars(_parser(started).parse_args(arguments))
    command = options.pop("command")
    module = options.pop("module", command)
    try:
        # A command's module is imported when the command is asked for, since some need libraries that others do not.
        importlib.import_module(f"cunorm.cli.{module}").run(**options)
    except UsageError as error:
        print(f"python -m cunorm {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m cunorm {command}: interrupted", file=sys.stderr)
        return 130  # as shells have it
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
    except OSError as error:  # the disk of the output is full, say; of other files the commands say so themselves
        print(f"python -m cunorm {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(started: float | None) -> argparse.ArgumentParser:
    """Every command's options, by the names that its ``run`` takes them by."""
    parser = argparse.ArgumentParser(
        prog="python -m cunorm", description="Fused normalization and GELU kernels for NVIDIA GPUs.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="show that it works here: correctness and speed, in 20 seconds",
        description="Normalize activations with outlier channels, or an array of yours, and compare with float64 and "
        "with the same formula in plain operations of the same library.",
        allow_abbrev=False,
    )
    only = f"only these: {', '.join(FRAMEWORKS)}"
    demo.add_argument("--framework", dest="frameworks", type=_frameworks, metavar="NAME[,NAME]", help=only)
    run_on = "run on this array: float16, float32 or float64"
    demo.add_argument("--input", dest="source", type=Path, metavar="FILE.npy", help=run_on)
    write_to = "with --input: write the result there"
    demo.add_argument("--output", dest="target", type=Path, metavar="FILE.npy", help=write_to)
    demo.add_argument("--axis", type=int, nargs="+", help="with --input: normalized axes (default: last)")
    demo.add_argument("--eps", type=float, help="with --input: added to the variance (default: 1e-5)")
    demo.set_defaults(started=time.monotonic() if started is None else started)

    commands.add_parser(
        "info",
        help="versions, devices, cache folder, extras",
        description="Print versions, devices, the kernel cache folder and what is installed. Imports no framework.",
        allow_abbrev=False,
    )

    explain = commands.add_parser(
        "explain",
        help="how a shape would be computed",
        description="Print the plan for a problem: kernels, grids, blocks, registers, bytes that must move.",
        allow_abbrev=False,
    )
    explain.add_argument("--shape", type=_shape, required=True, metavar="4096x8192", help="the shape of x")
    _add_problem(explain, "the dtype of x, weight and bias (default: float16)", OPS)
    explain.add_argument("--axis", type=int, nargs="+", default=-1, help="axes to normalize (default: last)")
    by_running = "with --op batch_norm: by its running statistics"
    explain.add_argument("--evaluation", dest="training", action="store_false", help=by_running)
    with_bias = "with a bias: rms_norm and gelu have none otherwise"
    explain.add_argument("--bias", action="store_true", default=None, help=with_bias)
    explain.add_argument("--backward", action="store_true", help="the gradient instead")
    explain.add_argument("--arch", metavar="sm_90", help="an architecture (default: this machine's GPU, else sm_90)")
    explain.add_argument("--measure", action="store_true", help="also time it, on this machine's GPU")

    bench = commands.add_parser(
        "bench",
        help="time it beside other libraries on this GPU, and plot",
        description="Run suites of problems with every library that is installed, check the results against float64, "
        "and show times, r (time over that of a copy of the bytes that must move) and the best peer.",
        allow_abbrev=False,
    )
    bench.add_argument("suites", nargs="*", metavar="SUITE", help="which to run; without any, they are listed")
    bench.add_argument(
        "--only", default="", metavar="WORDS", help="only rows with all of these in their name; !word is for without"
    )
    bench.add_argument(
        "--providers", type=_words, default=(), metavar="NAME[,NAME]", help="only these: cunorm, torch, liger, ..."
    )
    bench.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every N-th shape, from the I-th on")
    bench.add_argument("--max-seconds", type=float, default=float("inf"), metavar="N", help="begin no row after that")
    bench.add_argument(
        "--warm",
        action="store_true",
        help="time nothing, only call everything once, so that a later run finds compiled what libraries keep on disk; "
        "several parts can do so side by side",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    bench.add_argument("--plots", type=Path, metavar="FOLDER", help="draw them there, as PNG and SVG")
    bench.add_argument(
        "--from", dest="sources", type=Path, nargs="+", default=(), metavar="FILE", help="show saved results instead"
    )

    for library, what, versions in (
        (compiled.CUPY, "what calls of CuPy arrays cost the host", "Python"),
        (compiled.TORCH, "what eager calls of PyTorch tensors cost the host", "PyTorch, Python"),
        (compiled.TENSORFLOW, "an op of TensorFlow that waits for nothing", "TensorFlow"),
    ):
        build = commands.add_parser(
            f"build-{library.package}",
            help=f"compile {what} (needs a C++ compiler)",
            description=f"Compile the way of a {library.framework} call from its tensors to the launch, once for each "
            f"version of {versions} and cunorm; later processes use it (see cunorm.adapters.{library.package}.build).",
            allow_abbrev=False,
        )
        build.add_argument("--remove", action="store_true", help="remove what was built, of all versions")
        build.set_defaults(module="build", library=library)

    tune = commands.add_parser(
        "tune",
        help="find the fastest plan for a shape on this GPU, and use it from now on",
        description="Time the plans that can compute a problem, and store which is the fastest: for this GPU model, "
        "and for layer norm and RMS norm of about the same size too (see cunorm.tune).",
        allow_abbrev=False,
    )
    of_x = "the shape of x; may be repeated"
    tune.add_argument(
        "--shape", dest="shapes", type=_shape, action="append", default=[], metavar="4096x8192", help=of_x
    )
    _add_problem(tune, "the dtype of x (default: float16)", OPS)
    tune.add_argument("--affine-dtype", choices=list(DTYPES), help="the dtype of weight and bias (default: that of x)")
    direction = tune.add_mutually_exclusive_group()
    for name, what in (("backward", "the gradient instead"), ("both", "the norm and the gradient")):
        direction.add_argument(f"--{name}", dest="direction", action="store_const", const=name, help=what)
    tune.set_defaults(direction="forward")
    tune.add_argument(
        "--max-seconds", type=float, default=30.0, metavar="N", help="about how long to take in all (default: 30)"
    )
    tune.add_argument("--file", type=Path, metavar="FILE", help="store there, not in the file that cunorm reads")
    tune.add_argument("--clear", action="store_true", help="forget what was found before, for every GPU and problem")
    return parser


def _add_problem(command: argparse.ArgumentParser, dtype_help: str, ops: Sequence[str]) -> None:
    """The options that say, beside the shape, what is computed."""
    command.add_argument("--dtype", choices=list(DTYPES), default="float16", help=dtype_help)
    command.add_argument(
        "--op",
        choices=ops,
        default="layer_norm",
        help="norms are with weight and bias, rms_norm with a weight; gelu has one plan (default: layer_norm)",
    )
    command.add_argument("--activation", choices=ACTIVATIONS, help="after the norm; for gelu: itself or gelu_tanh")
    command.add_argument("--residual", action="store_true", help="added before the norm")
    command.add_argument("--num-groups", type=int, metavar="N", help="with --op group_norm")
    command.add_argument("--data-format", default="NC...", metavar="NHWC", help="of a channel norm (default: NC...)")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/3 for the first of three")
    return int(index), int(count)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().replace(",", "x").split("x")
    if not all(size.strip().isascii() and size.strip().isdigit() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write sizes with x between them, like 4096x8192")
    return tuple(int(size) for size in sizes)


def _frameworks(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in FRAMEWORKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(FRAMEWORKS)}")
    return names
