"""``python -m cunorm info``: what a bug report needs.

Versions come from package metadata, so no framework is imported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import warnings
from importlib import metadata
from pathlib import Path

import cunorm
from cunorm import cuda, gpus
from cunorm.adapters import compiled
from cunorm.cli import output
from cunorm.tuning_file import TuningFile, default_path

__all__ = ["run"]

_PACKAGES = ("numpy", "ml_dtypes", "apache-tvm-ffi", "rich")
# An extra -> the distributions of which one must be there for each entry.
_EXTRAS: dict[str, tuple[tuple[str, ...], ...]] = {
    "cuda12x": (("cupy-cuda12x",), ("nvidia-cuda-nvrtc-cu12",), ("nvidia-cuda-runtime-cu12",)),
    "cuda13x": (("cupy-cuda13x",), ("nvidia-cuda-nvrtc",), ("nvidia-cuda-runtime",)),
    "torch": (("torch",),),
    "jax": (("jax",), ("jax-tvm-ffi",)),
    "tensorflow": (("tensorflow", "tensorflow-cpu"),),
    "keras": (("keras",),),
    "bench": (("matplotlib",), ("pandas",)),
    "notebook": (("jupyterlab",), ("nbclient",), ("matplotlib",), ("pandas",)),
    "test": (("pytest",), ("pytest-xdist",), ("hypothesis",)),
}


def run() -> None:
    """Print everything."""
    rows = [
        ("cunorm", f"{cunorm.__version__}, in {Path(cunorm.__file__).parent}"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        *((name, _version(name) or "not installed") for name in _PACKAGES),
        *_cuda(),
        ("tuned plans", _tuned()),
        *((f"extra {name}", _extra(distributions)) for name, distributions in _EXTRAS.items()),
        *((f"compiled calls of {library.framework}", _compiled_calls(library)) for library in compiled.LIBRARIES),
        ("emulator of kernels", _compiler()),
    ]
    output.table(("what", "found"), rows)


def _compiled_calls(library: compiled.Library) -> str:
    try:
        versions = library.versions()
    except (OSError, RuntimeError):  # a folder that cannot be read, or none
        versions = []
    if not versions:
        return f"not built (python -m cunorm build-{library.package})"
    return f"built for {', '.join(versions)}{'' if compiled.is_wanted() else '; switched off by CUNORM_COMPILED_CALLS'}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra(groups: tuple[tuple[str, ...], ...]) -> str:
    found, missing = [], []
    for names in groups:
        versions = [(name, version) for name in names if (version := _version(name))]
        found += [f"{name} {version}" for name, version in versions]
        if not versions:
            missing.append(names[0])
    if not found:
        return "not installed"
    return ", ".join(found) + (f"; missing: {', '.join(missing)}" if missing else "")


def _cuda() -> list[tuple[str, str]]:
    devices, reason = gpus.cuda_devices()
    rows = []
    # As CuPy does it, which needs no home folder.
    cache = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")  # noqa: PTH111
    try:
        cupy = cuda.cupy()
        runtime = cupy.cuda.runtime
        from cupy_backends.cuda.libs import nvrtc

        rows += [
            ("CuPy", f"{cupy.__version__}, for CUDA {_cuda_version(runtime.runtimeGetVersion())}"),
            ("NVIDIA driver", _driver(runtime.driverGetVersion())),
            ("NVRTC", ".".join(map(str, nvrtc.getVersion()))),
        ]
    except Exception as error:  # whatever a broken installation raises is what this command is asked for
        rows.append(("CuPy", cuda.no_cupy(error).removeprefix("is ")))
    if not devices:
        rows.append(("CUDA devices", f"none ({reason}); arrays on the CPU are computed by NumPy"))
    for index, name in enumerate(devices):
        rows.append((f"CUDA device {index}", f"{name}, {_described(index)}"))
    rows.append(("kernel cache", cache + _note_on(Path(cache))))
    return rows


def _note_on(folder: Path) -> str:
    try:
        return "" if folder.is_dir() else " (not there yet)"
    except OSError as error:  # the home folder may be another user's
        return f" ({error.strerror})"


def _described(index: int) -> str:
    try:
        device = cuda.device(index)
        memory = cuda.cupy().cuda.Device(index).mem_info[1]
    except Exception as error:  # too old, full, or another process's alone: what this command is asked for
        return str(error)
    return f"{device.arch}, {device.multiprocessors} multiprocessors, {output.byte_count(memory)}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver(number: int) -> str:
    if not number:
        return "none"
    # The driver's own number, which users know from nvidia-smi, is in no CUDA call.
    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", file.read_text()) if file.is_file() else None
    return f"{match[1] + ', ' if match else ''}supports CUDA {_cuda_version(number)}"


def _tuned() -> str:
    path = default_path()
    if path is None:
        return "none: there is no home folder"
    file = TuningFile(path)
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        found = [f"{len(entries)} for {gpu}" for gpu, entries in file.read().items()]
        others = file.count_others()
    notes = [f"{others} of other versions, not used"] * bool(others) + [str(item.message) for item in complaints]
    return "; ".join([f"{path}: {', '.join(found) or 'none'}", *notes])


def _compiler() -> str:
    path = shutil.which("g++")
    return f"g++ at {path}" if path else "needs g++, which is not on the PATH"
