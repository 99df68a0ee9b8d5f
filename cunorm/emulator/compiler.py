"""Turns the text of a kernel into an executable, and keeps it on disk: in ``emulator`` of `cunorm.cache.cache_folder`.

The key of a kept executable covers everything that made it: the text, the emulator's own files, the flags and the
compiler. So nothing is ever stale, and what has not been used for a month is removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cunorm.cache import cache_folder, digest

__all__ = ["EmulatorError", "HostCompileError", "executable"]

_FOLDER = Path(__file__).parent
_KEEP_SECONDS = 30 * 24 * 3600
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
# Compiling takes most of a test's time: channel_pipeline_backward half a second with -Og, one with -O1, and two suites
# 177 s of a CPU in place of 270. -g1 has the lines and the inlined functions, which reports name; local variables,
# which they do not, would take as long again. No contraction: the same result on every machine. The pattern makes a
# read of a local variable that nobody wrote come out absurd, not zero. Addresses are checked by calls, which compile in
# an eighth less than checks in line, and run as long but for a twentieth.
_KERNEL_FLAGS = [
    *("-std=c++17", "-Og", "-g1", "-w", "-fno-exceptions", "-fno-rtti", "-fno-omit-frame-pointer"),
    *("-ffp-contract=off", "-ftrivial-auto-var-init=pattern", *_SANITIZERS),
    *("--param", "asan-instrumentation-with-call-threshold=0"),
]
_RUNTIME_FLAGS = ["-std=c++17", "-O2", "-w", "-fno-omit-frame-pointer"]

# Within a line: a comment that ends in __shared__ must not reach for the line after it.
_ALIGNMENT = r"(?:(?:alignas|__align__)[ \t]*\((?:[^()\n]|\([^()\n]*\))*\)[ \t]*)?"
_SHARED = re.compile(
    rf"{_ALIGNMENT}\b(?P<extern>extern[ \t]+)?{_ALIGNMENT}__shared__[ \t]+{_ALIGNMENT}"
    r"(?P<type>[^;=\n\[\]]*?)\b(?P<name>\w+)[ \t]*(?P<sizes>(?:\[[^\]\n]*\][ \t]*)*);"
)
_LAMBDA = "[] { static char key; return static_cast<const void*>(&key); }"


class EmulatorError(RuntimeError):
    """A kernel did what a kernel must not do.

    The message says what, in which block and thread, and at which line of the kernel's text, as far as they are known;
    the whole report of the sanitizer follows.
    """


class HostCompileError(EmulatorError):
    """The text of a kernel does not compile; the message holds the compiler's log."""


def _declare_shared(source: str) -> str:
    """Replace declarations of shared memory, the one thing in CUDA C++ that no macro can express.

    A ``__shared__`` array belongs to a block, so it becomes a reference to memory of the block, of exactly its size.
    Lines stay where they are.
    """

    def declare(match: re.Match[str]) -> str:
        kind, name, sizes = match["type"].strip(), match["name"], match["sizes"].strip()
        if not kind or "," in re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", kind)):
            return match[0]  # several variables; the compiler says so, with the line
        if match["extern"]:
            same = f"cunorm_emulator::Same<{kind} {sizes[sizes.index(']') + 1 :]}>" if sizes else kind
            return f"{same}* const {name} = static_cast<{same}*>(cunorm_emulator::dynamic_shared());"
        return f'auto& {name} = cunorm_emulator::shared_variable<{kind} {sizes}>("{name}", {_LAMBDA});'

    return _SHARED.sub(declare, source)


@functools.cache
def _compiler_version(compiler: str) -> str:
    command = [compiler, "-dumpfullversion", "-dumpmachine"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _linker_flags() -> list[str]:
    """Where there is GNU gold, it links: in 0.02 s in place of 0.06, of the 0.3 that an executable takes."""
    return [] if shutil.which("ld.gold") is None else ["-fuse-ld=gold"]


@functools.cache
def _own_text() -> bytes:
    files = sorted([*_FOLDER.glob("include/*"), _FOLDER / "runtime.cpp"])
    return b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        raise RuntimeError(
            "cunorm.emulator needs Linux and g++ (version 12 or later, with its sanitizer libraries) on PATH. "
            "It runs kernels on a CPU for tests and for those who write kernels; calls of cunorm never need it."
        )
    return compiler


def _executables_folder() -> Path:
    cache = cache_folder()
    if cache is None:
        raise RuntimeError("there is no home folder to keep executables in; set CUNORM_CACHE_DIR")
    folder = cache.absolute() / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        found = f"executables cannot be kept in {folder}: {error.strerror or error}"
        raise RuntimeError(f"{found}; set CUNORM_CACHE_DIR to a folder that can be written to") from error
    return folder


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another process was faster, or it is not ours
            if path.is_file() and path.stat().st_mtime < time.time() - _KEEP_SECONDS:
                path.unlink()


def _built(folder: Path, name: str, text: str | None, command: list[str]) -> Path:
    """The file `name` in `folder`, made by `command` unless it is there; `text` is what the command reads.

    A finished file appears under its name at once, so processes may build the same one at the same time.
    """
    target = folder / name
    if target.exists():
        with contextlib.suppress(PermissionError):  # another user's, where several share the folder
            os.utime(target)
        return target
    _remove_unused(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch, "output")
        done = subprocess.run([*command, "-o", str(output)], input=text, capture_output=True, text=True, cwd=scratch)
        if done.returncode != 0:
            raise HostCompileError(f"the kernel does not compile:\n{done.stderr}")
        output.replace(target)
    return target


def executable(source: str, kernel: str) -> Path:
    """Path of the executable that runs `kernel` of `source`, compiled unless it is kept from before.

    Raises
    ------
    HostCompileError
        If the text does not compile.
    RuntimeError
        If there is no g++, or no folder to write to.
    """
    compiler = _compiler()
    folder = _executables_folder()
    # All headers first, so that no #define of the kernel's text reaches into them.
    text = (
        '#include "cunorm_emulator.h"\n#include "cuda_fp16.h"\n#include "cuda_bf16.h"\n'
        f'#line 1 "{kernel}.cu"\n{_declare_shared(source)}\n#line 1 "cunorm/emulator/entry"\n'
        'extern "C" void cunorm_emulator_kernel(const void* arguments) '
        f"{{ {kernel}(*static_cast<const Arguments*>(arguments)); }}\n"
        'extern "C" const unsigned long cunorm_emulator_arguments_bytes = sizeof(Arguments);\n'
    )
    include = f"-I{_FOLDER / 'include'}"
    # Reports name the emulator's files the same wherever it is installed.
    prefix = f"-ffile-prefix-map={_FOLDER}=cunorm/emulator"
    kernel_flags = [*_KERNEL_FLAGS, *_linker_flags()]
    base = digest(compiler, _compiler_version(compiler), _RUNTIME_FLAGS, kernel_flags, _own_text())
    runtime_command = [compiler, *_RUNTIME_FLAGS, include, prefix, "-c", str(_FOLDER / "runtime.cpp")]
    runtime = _built(folder, f"runtime-{base}.o", None, runtime_command)
    kernel_command = [compiler, *kernel_flags, include, prefix, "-x", "c++", "-", "-x", "none", str(runtime)]
    return _built(folder, f"{kernel}-{digest(base, text)}", text, kernel_command)
