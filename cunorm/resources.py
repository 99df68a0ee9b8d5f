"""What a kernel takes of a multiprocessor: registers, spills and shared memory, from NVRTC's compiler log.

NVRTC needs no GPU, so this works for any architecture on any machine where CuPy is installed. The options are those of
CuPy's ``RawModule``, so that the numbers are those of the kernel that runs.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cunorm import compiling, cuda, kernels
from cunorm.compile_error import CompileError

__all__ = ["Resources", "compile_resources"]

# What CuPy adds to the options of a RawModule.
_CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")

_FIRST_WITH_CACHE = (12, 9)

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, for one architecture.

    Attributes
    ----------
    registers : int
        32-bit registers a thread.
    spill_bytes : int
        Bytes a thread that are stored to or loaded from local memory for want of registers.
    stack_bytes : int
        Bytes a thread of local memory: spills, and arrays that are not indexed by constants.
    shared_bytes : int
        Bytes a block of static shared memory.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def compile_resources(
    kernel: str, constants: Mapping[str, int | str], arch: str, texts: Mapping[str, str] | None = None
) -> Resources:
    """Compile a kernel for an architecture and read what it takes.

    Parameters
    ----------
    kernel : str
        One of ``cunorm.kernels.kernel_names()``.
    constants : mapping
        Its compile-time constants, as ``Launch.constants`` of a plan has them.
    arch : str
        For example "sm_90".
    texts : mapping, optional
        Texts that stand in for shipped ones, as `cunorm.kernels.kernel_text` takes them.

    Raises
    ------
    RuntimeError
        If there is no CuPy that loads, or the text does not compile (a `cunorm.compile_error.CompileError`).
    """
    return _compile(kernel, tuple(constants.items()), arch, kernels.kernel_text(kernel, texts))


@functools.lru_cache(maxsize=1024)
def _compile(kernel: str, constants: tuple[tuple[str, int | str], ...], arch: str, text: str) -> Resources:
    cuda.cupy()  # finds NVRTC and loads it
    from cupy_backends.cuda.libs import nvrtc

    options = [*compiling.COMPILE_OPTIONS, *_CUPY_OPTIONS, f"-arch={arch}", "--ptxas-options=-v", *_include_options()]
    if nvrtc.getVersion() >= _FIRST_WITH_CACHE:
        options.append("--no-cache")  # what comes from the driver's cache was not compiled, and has no log
    source = kernels.kernel_source(kernel, dict(constants), {kernel: text})
    program = nvrtc.createProgram(source, f"{kernel}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            what = f"{kernel} does not compile for {arch}"
            raise CompileError(what, nvrtc.getProgramLog(program), text, dict(constants)) from error
        return _read(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _include_options() -> tuple[str, ...]:
    """Where cuda_fp16.h is: in the CUDA wheels of either version, in conda, or in an installed toolkit."""
    folder: str | None
    try:
        # The same search as CuPy's, which depends on this package.
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
    except ImportError:
        folder = None
    if folder is None:
        root = cuda.cupy().cuda.get_cuda_path()
        if root is None:
            raise RuntimeError(
                "the headers of the CUDA runtime were not found: "
                'install cunorm with the extra "cuda12x" (or "cuda13x", by the CUDA version of the driver)'
            )
        folder = os.path.join(root, "include")
    return (f"-I{folder}",)


def _read(log: str) -> Resources:
    used = _USED.search(log)
    if used is None:
        raise RuntimeError(f"the compiler's log does not tell what the kernel takes:\n{log}")
    # A device function that was not inlined has a frame of its own, so all of the log counts.
    frames = [[int(number) for number in frame] for frame in _FRAME.findall(log)]
    return Resources(
        registers=int(used[1]),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        stack_bytes=sum(stack for stack, _, _ in frames),
        shared_bytes=sum(map(int, _SHARED.findall(used[2]))),
    )
