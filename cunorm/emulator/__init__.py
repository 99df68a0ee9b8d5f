"""Runs the very text of a CUDA kernel on a CPU, with AddressSanitizer and UndefinedBehaviorSanitizer on.

For tests and for those who write kernels on a machine without a GPU; the CPU path of a user's call is
``cunorm.reference``. It needs g++ and Linux. Threads are fibers that run one at a time, in an order drawn from a seed:
a kernel whose result depends on an order that CUDA does not promise gives different results for different seeds, not an
error.

What is found, as an :class:`EmulatorError` with block, thread and line:

- access outside a buffer or outside shared memory, static or dynamic, by as little as a byte; access to the shared
  memory of a block that has exited; misaligned access; signed overflow, bad shifts and the like;
- ``__syncthreads`` at different lines, deadlock, a warp primitive that a named lane does not reach, a shuffle from a
  lane that is not named, a loop without end;
- a write to an array that is marked read-only.

What shows as a wrong result: a missing barrier (for some seed), and a read of shared memory that nobody wrote (it is
filled with 0xff bytes before every block, so floats are NaN).

Where CUDA leaves room: a barrier and ``__syncwarp`` count exited threads as arrived, as GPUs since Volta do. The mask
of any other warp primitive must name living lanes only. Blocks run one after another, but those of a cluster, or with
`cooperative` all of them, run together.

What a kernel's text must obey: a declaration of shared memory stands inside a function, on one line, and declares one
variable; it becomes a reference (``extern``: a pointer) to memory of the block, so a lambda must capture it by
reference. PTX stands in functions of its own, with another body under ``#ifdef CUNORM_EMULATOR``; the end of
``include/cunorm_emulator.h`` lists what there is for it. A loop that waits for memory to change must let others run:
atomics, fences and ``__nanosleep`` do.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cunorm.emulator.compiler import EmulatorError, HostCompileError, executable

__all__ = ["EmulatorError", "HostCompileError", "Pointer", "Watch", "Writer", "run"]

_ENVIRONMENT = {
    # The wide redzones find an access that misses a buffer by up to two kilobytes, not only by one element.
    "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0:detect_stack_use_after_return=0:print_legend=0"
    ":redzone=2048:max_redzone=2048",
    "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
}
_WHAT = [
    re.compile(r"^cunorm-emulator: (?P<what>.*)$", re.MULTILINE),
    re.compile(r"ERROR: AddressSanitizer: (?P<what>[\w-]+)"),
    re.compile(r"runtime error: (?P<what>.*)$", re.MULTILINE),
]
_ACCESS = re.compile(r"^((?:READ|WRITE) of size \d+)", re.MULTILINE)
_MEMORY = re.compile(r"^cunorm-emulator-memory: (.*)$", re.MULTILINE)
_PLACE = re.compile(r"^cunorm-emulator-place: (.*)$", re.MULTILINE)
_LINE = re.compile(r"^cunorm-emulator-line: (.*)$", re.MULTILINE)
_WRITER = re.compile(r"^cunorm-emulator-writer: block \((\d+), (\d+), (\d+)\), thread \((\d+), (\d+), (\d+)\)$", re.M)
_FRAME = re.compile(r"^\s*#\d+ 0x[0-9a-f]+ in .*? (?P<file>[^\s:]+):(?P<line>\d+)", re.MULTILINE)
_NOT_THE_KERNEL = ("cunorm/emulator/", "libsanitizer/", "sysdeps/", "nptl/")


@dataclass(frozen=True)
class Pointer:
    """A pointer into one of the buffers of a run.

    Parameters
    ----------
    buffer : int
        Index into the buffers.
    offset : int
        Distance from the start of the buffer in bytes.
    """

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Watch:
    """Bytes of a buffer, whose writer is asked for."""

    buffer: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Writer:
    """The thread that changed watched bytes last: its block and its place in that, in x, y and z."""

    block: tuple[int, int, int]
    thread: tuple[int, int, int]

    def __str__(self) -> str:
        return f"block {self.block}, thread {self.thread}"


def run(
    source: str,
    kernel: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int = 0,
    fields: Sequence[Pointer | int | float | None],
    buffers: Sequence[np.ndarray],
    seed: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
    timeout: float = 120.0,
    watch: Watch | None = None,
) -> Writer | None:
    """Run one launch of a kernel on the CPU.

    Parameters
    ----------
    source : str
        Complete CUDA C++ text. ``#line`` directives in it are what reports name. ``cuda_fp16.h`` and ``cuda_bf16.h``
        can be included.
    kernel : str
        Name of the kernel, ``extern "C" __global__ void name(const Arguments arguments)``.
    grid, block : tuple of int
        Numbers of blocks and of threads in x, y and z.
    shared_bytes : int
        Size of the dynamic shared memory.
    fields : sequence
        Values of the fields of ``struct Arguments`` in order, each 8 bytes; None is a null pointer. An array takes as
        many fields as it has elements.
    buffers : sequence of numpy.ndarray
        C-contiguous arrays, of which the kernel sees copies that begin at multiples of 256 bytes. Afterwards they hold
        what the kernel left. One that is not writeable must come back as it was. They must not overlap, but several
        fields can point into the same one.
    seed : int
        Decides the order of blocks and threads.
    cluster : int
        Number of consecutive blocks in x that form a cluster.
    cooperative : bool
        Whether all blocks run together, as a kernel that waits for other blocks needs.
    timeout : float
        Seconds after which the run is stopped.
    watch : Watch, optional
        Bytes whose writer is to be found.

    Returns
    -------
    writer : Writer or None
        With `watch`: the last thread that changed those bytes; None where none did.

    Raises
    ------
    HostCompileError
        If the text does not compile.
    EmulatorError
        If the kernel does what a kernel must not do.
    RuntimeError
        If there is no g++.
    ValueError
        If a parameter makes no sense.

    Examples
    --------
    >>> source = '''
    ... struct Arguments { float* x; long long n; double factor; };
    ... extern "C" __global__ void scale(const Arguments arguments) {
    ...   const int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...   if (i < arguments.n) arguments.x[i] *= arguments.factor;
    ... }'''
    >>> x = np.arange(5, dtype=np.float32)
    >>> run(source, "scale", grid=(2, 1, 1), block=(4, 1, 1), fields=[Pointer(0), 5, 0.5], buffers=[x])
    >>> x.tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    _check(grid, block, shared_bytes, buffers, cluster, timeout, watch)
    program = executable(source, kernel)
    watched = (0, 0, 0) if watch is None else (watch.buffer, watch.offset, watch.bytes)
    head = [*grid, *block, shared_bytes, seed % 2**64, cluster, cooperative, round(timeout * 1000), *watched]
    with tempfile.TemporaryDirectory(prefix="cunorm-emulator-") as scratch:
        job, result = Path(scratch, "job"), Path(scratch, "result")
        with job.open("wb") as file:
            file.write(struct.pack("16Q", *head, len(fields), len(buffers)))
            file.writelines(_packed(field, buffers) for field in fields)
            file.writelines(struct.pack("Q", buffer.nbytes) for buffer in buffers)
            file.writelines(_bytes_of(buffer).data for buffer in buffers)
        try:
            done = subprocess.run(
                [program, job, result],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout + 30,  # the program stops itself and says where; this is for one that cannot
                env={**_without_preloads(os.environ), **_ENVIRONMENT},
            )
        except subprocess.TimeoutExpired as error:
            raise EmulatorError(f"kernel {kernel}: still running after {timeout} s") from error
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            raise EmulatorError(_report(kernel, done.returncode, done.stderr))
        left = result.read_bytes()
    start = 0
    for index, buffer in enumerate(buffers):
        end = start + buffer.nbytes
        if buffer.flags.writeable:
            _bytes_of(buffer)[:] = np.frombuffer(left, np.uint8)[start:end]
        elif _bytes_of(buffer).tobytes() != left[start:end]:
            raise EmulatorError(f"kernel {kernel}: wrote to buffer {index}, which is read-only")
        start = end
    found = _WRITER.search(done.stderr)
    if found is None:
        return None
    x, y, z, *block_of = map(int, found.groups())
    return Writer((x, y, z), (block_of[0], block_of[1], block_of[2]))


def _without_preloads(environment: Mapping[str, str]) -> dict[str, str]:
    """Behind which the sanitizers would not start."""
    return {name: value for name, value in environment.items() if name != "LD_PRELOAD"}


def _check(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    buffers: Sequence[np.ndarray],
    cluster: int,
    timeout: float,
    watch: Watch | None,
) -> None:
    if len(grid) != 3 or min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) >= 2**16:
        raise ValueError(f"grid is {grid}; it must be three numbers from 1 to 2**31 - 1, 65535, 65535")
    if len(block) != 3 or min(block) < 1 or block[2] > 64 or block[0] * block[1] * block[2] > 1024:
        raise ValueError(f"block is {block}; it must be three numbers from 1, z up to 64, of product up to 1024")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes is {shared_bytes}; it must not be negative")
    if cluster < 1 or grid[0] % cluster != 0:
        raise ValueError(f"cluster is {cluster}; it must divide grid[0], which is {grid[0]}")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}; it must be positive")
    if watch is not None and not (
        0 <= watch.buffer < len(buffers) and 0 <= watch.offset <= buffers[watch.buffer].nbytes - watch.bytes
    ):
        raise ValueError(f"watch is {watch}; it must lie in one of the {len(buffers)} buffers")
    for index, buffer in enumerate(buffers):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"buffer {index} has strides {buffer.strides}; it must be C-contiguous")
        if any(np.may_share_memory(buffer, other) for other in buffers[:index]):
            raise ValueError(f"buffer {index} overlaps an earlier one; it must not")


def _bytes_of(buffer: np.ndarray) -> np.ndarray:
    return buffer.reshape(-1).view(np.uint8)  # a view, because the buffer is C-contiguous


def _packed(field: Pointer | int | float | None, buffers: Sequence[np.ndarray]) -> bytes:
    """Whether it is a pointer, the index of its buffer, and its 8 bytes."""
    if field is None:
        return struct.pack("QQQ", 0, 0, 0)
    if isinstance(field, Pointer):
        if not 0 <= field.buffer < len(buffers):
            raise ValueError(f"{field} points to none of the {len(buffers)} buffers")
        return struct.pack("QQq", 1, field.buffer, field.offset)
    if isinstance(field, (float, np.floating)):
        return struct.pack("QQd", 0, 0, float(field))
    return struct.pack("QQq", 0, 0, int(field))


def _report(kernel: str, code: int, log: str) -> str:
    """One line with what happened and where, then the log."""
    what = next((match["what"] for pattern in _WHAT if (match := pattern.search(log))), f"ended with status {code}")
    parts = [what]
    parts += [match[1] for pattern in (_ACCESS, _MEMORY, _PLACE) if (match := pattern.search(log))]
    if match := _LINE.search(log):
        parts.append(match[1])
    else:
        frames = (f"{frame['file']}:{frame['line']}" for frame in _FRAME.finditer(log))
        parts += [frame for frame in frames if not any(part in frame for part in _NOT_THE_KERNEL)][:1]
    return f"kernel {kernel}: {', '.join(parts)}\n{log}"
