"""``python -m cunorm demo``: is it right, and how fast is it, on this machine; or on an array of the user's own."""

from __future__ import annotations

import functools
import importlib.util
import math
import platform
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cunorm
from cunorm import gpus
from cunorm.cli import FRAMEWORKS, UsageError, output
from cunorm.cli.libraries import EPS, LIBRARIES, Library
from cunorm.cli.options import check_target
from cunorm.on_cpu import numpy_dtype

__all__ = ["run"]

# The demo ends within 20 seconds, with some slack: a framework that would not fit is left out and named, unless it was
# asked for. The expected seconds, without and with a GPU, are mostly those of the import on a machine with two cores,
# and with a GPU those of the first compile; a machine that turns out slower scales them.
_LIMIT = 15.0
_EXPECTED_SECONDS = {
    "numpy": (1.5, 1.5),
    "cupy": (6.0, 6.0),
    "torch": (4.0, 6.0),
    "jax": (4.5, 8.0),
    "tensorflow": (7.0, 10.0),
}

_COLUMNS = ("op", "shape", "dtype", "framework", "error", "time", "GB/s", "unfused / fused")
_NUMBERS = _COLUMNS[4:]
_ERROR_ROWS = 64
# Several times the cache of the largest GPU: what is read in a sample has left the cache when its turn comes again.
_BYTES_PER_SAMPLE = 200e6
# How files begin that np.load reads: an array, and archives of them.
_MAGIC = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")


class _Case(NamedTuple):
    shape: tuple[int, int]
    dtype: str


_CPU_CASES = (_Case((512, 1024), "float32"), _Case((256, 4096), "bfloat16"))
_GPU_CASES = (
    _Case((4096, 4096), "bfloat16"),
    _Case((8192, 1024), "float16"),
    _Case((2048, 16384), "float32"),
)
# CuPy's own operations on bfloat16 are too few for the unfused formula.
_CUPY_CASES = (_Case((4096, 4096), "float16"), _Case((8192, 1024), "float16"), _Case((2048, 16384), "float32"))


class _Row(NamedTuple):
    """A line of the table. ``unfused`` and ``fused`` are seconds."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    framework: str
    error: float
    fused: float
    unfused: float
    nbytes: int

    def cells(self) -> tuple[str, ...]:
        return (
            self.op,
            "x".join(map(str, self.shape)),
            self.dtype,
            self.framework,
            f"{self.error:.1e}",
            output.duration(self.fused),
            f"{self.nbytes / self.fused / 1e9:.4g}",
            f"{self.unfused / self.fused:.2f}",
        )


def run(
    frameworks: list[str] | None,
    source: Path | None,
    target: Path | None,
    axis: list[int] | None,
    eps: float | None,
    started: float,
) -> None:
    """Run the demo's cases, or an array in a file. ``started`` is when the process began (``time.monotonic``)."""
    if source is not None:
        if frameworks is not None:
            raise UsageError("--framework goes without --input: that array is CuPy's on a GPU, and else NumPy's")
        _run_file(source, target, axis or [-1], EPS if eps is None else eps)
        return
    for name, given in {"output": target, "axis": axis, "eps": eps}.items():
        if given is not None:
            raise UsageError(f"--{name} needs --input: it is for the array in that file")
    _run_cases(frameworks, started)


def _run_cases(frameworks: list[str] | None, started: float) -> None:
    """Run the cases on the given frameworks, or on all that are found and fit in the time."""
    gpu = _print_device()
    names = frameworks or [name for name in FRAMEWORKS if _is_installed(name) and (gpu or name != "cupy")]
    rows: list[_Row] = []
    left_out: list[str] = []
    slowness = 1.0
    on_terminal = output.console().is_terminal
    with output.console().status("") if on_terminal else nullcontext() as progress:
        for name in names:
            begin = time.monotonic()
            expected = _EXPECTED_SECONDS[name][gpu]
            if frameworks is None and begin - started + expected * slowness > _LIMIT:
                left_out.append(name)
                continue
            if progress:
                progress.update(f"importing {name}")
            # What a framework needs may be missing or broken, or the GPU full, which each says by an exception of its
            # own; and the others are still to be shown.
            try:
                library = LIBRARIES[name]()
                output.line(f"{library.title} {library.version}, on {'the GPU' if library.on_gpu else 'the CPU'}")
                for case in _cases(name, library):
                    if frameworks is None and time.monotonic() - started > _LIMIT:
                        left_out.append(f"the rest of {name}")
                        break
                    if progress:
                        progress.update(f"{library.title}: {'x'.join(map(str, case.shape))} {case.dtype}")
                    rows += _measure(library, case)
            except Exception as error:
                kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "  # it says no more
                failure = f"it cannot be used: {kind}{error}"
                if frameworks is not None:
                    raise UsageError(f"--framework {name}: {failure}") from error
                output.line(f"{name} is left out, for {failure}")
            slowness = max(slowness, (time.monotonic() - begin) / expected)
    output.line()
    output.table(_COLUMNS, [row.cells() for row in rows], numbers=_NUMBERS)
    output.line()
    _print_legend(rows)
    if left_out:
        output.line(f"Left out to end within 20 seconds: {', '.join(left_out)}; ask for one with --framework NAME.")
    output.line("Next: `python -m cunorm demo --input FILE.npy` runs on an array of yours, `python -m cunorm explain")
    output.line(
        "--shape 4096x8192` shows a plan; in a program it is y = cunorm.layer_norm(x, weight, bias): README.md."
    )


def _run_file(source: Path, target: Path | None, axis: list[int], eps: float) -> None:
    """Normalize the array in a ``.npy`` file, compare, and write the result if ``target`` says where."""
    values = _load(source)
    check_target("--output", target)
    if target is not None and target.exists() and target.samefile(source):
        raise UsageError(f"--output {target}: it is the input, which would be lost")
    library = LIBRARIES["cupy" if _print_device() else "numpy"]()
    try:
        x = library.tensor(values)
        y = cunorm.layer_norm(x, axis=axis, eps=eps)
        result = y.get() if library.on_gpu else y
    except (MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"--input {source}: {error}") from error
    if values.size:
        try:
            with np.errstate(all="ignore"):  # the numbers may be infinite or NaN, and then so is the error
                row = _compared(library, values, x, result, axis, eps)
        except (MemoryError, RuntimeError) as error:  # the plain formula needs more memory
            output.line(f"it cannot be compared and timed: {error}")
        else:
            output.line()
            output.table(_COLUMNS, [row.cells()], numbers=_NUMBERS)
            output.line()
            _print_legend([row])
    else:
        output.line("the array is empty, and so is the result")
    if target is not None:
        try:
            with target.open("wb") as file:
                np.save(file, result)
        except OSError as error:
            raise UsageError(f"--output {target}: {error.strerror}") from error
        output.line(f"written: {target}")


def _compared(
    library: Library, values: NDArray[Any], x: Any, result: NDArray[Any], axis: list[int], eps: float
) -> _Row:
    """The table's line for an array of the user's own: as a tensor ``x``, and with the ``result`` for it."""
    last = sorted(item % values.ndim for item in axis)
    order = [i for i in range(values.ndim) if i not in last] + last
    rows = values.size // math.prod(values.shape[i] for i in last)
    matrix = (rows, values.size // rows)

    def unfused(_: Any) -> tuple[Any, ...]:
        return (library.formula(x.transpose(order).reshape(matrix), None, None),)

    def fused(_: Any) -> tuple[Any, ...]:
        return (cunorm.layer_norm(x, axis=axis, eps=eps),)

    step = max(1, rows // _ERROR_ROWS)
    kept = [values.shape[i] for i in order[: -len(last)]]
    sample = np.unravel_index(np.arange(0, rows, step), kept) if kept else ()
    ours = result.transpose(order)[sample].reshape(-1, matrix[1]).astype(np.float64)
    exact = _normalized(values.transpose(order)[sample].reshape(-1, matrix[1]).astype(np.float64), eps)
    return _Row(
        "layer_norm",
        values.shape,
        values.dtype.name,
        library.title,
        _error(ours, exact),
        library.seconds(fused, [()], 1.0),
        library.seconds(unfused, [()], 1.0),
        2 * values.nbytes,
    )


def _load(source: Path) -> NDArray[Any]:
    try:
        with source.open("rb") as file:
            if not file.read(6).startswith(_MAGIC):  # np.load would advise to take it for pickled objects
                raise UsageError(f"--input {source}: it is no .npy file")
        values = np.load(source, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"--input {source}: there is no such file") from None
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        if isinstance(error, ValueError) and "pickle" in str(error):
            raise UsageError(f"--input {source}: it is an array of Python objects; it must be one of numbers") from None
        raise UsageError(f"--input {source}: it is no .npy file that can be read: {error}") from error
    if not isinstance(values, np.ndarray):
        values.close()
        raise UsageError(f"--input {source}: it is an archive of arrays; it must be a .npy file of one array")
    if values.dtype.name not in ("float16", "float32", "float64"):
        raise UsageError(
            f"--input {source}: its dtype is {values.dtype}; it must be float16, float32 or float64 "
            "(.npy files have no bfloat16)"
        )
    # The other byte order is a property of the file, not of the numbers.
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _print_device() -> bool:
    """Say what was found; True if there is a GPU that can be used."""
    gpu, reason = gpus.local_gpu()
    output.line(f"cunorm {cunorm.__version__}, Python {platform.python_version()}", "bold")
    if gpu is None:
        output.line(f"{reason}: the NumPy path")
        return False
    try:
        copy = f"a plain copy runs at {output.rate(gpus.measured_copy_rate())}"
    except (MemoryError, RuntimeError) as error:  # the GPU is full, say
        copy = f"a plain copy cannot be timed: {error}"
    output.line(f"{gpu.name} ({gpu.device.arch}), {copy}")
    return True


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _cases(name: str, library: Library) -> tuple[_Case, ...]:
    if not library.on_gpu:
        return _CPU_CASES
    return _CUPY_CASES if name == "cupy" else _GPU_CASES


@functools.lru_cache(maxsize=4)
def _data(shape: tuple[int, int], dtype: str) -> tuple[NDArray[Any], ...]:
    """x with outlier channels, as transformers have them; weight, bias and dy."""
    random = np.random.default_rng(0)
    x = random.standard_normal(shape, dtype=np.float32)
    x[:, random.choice(shape[1], max(1, shape[1] // 256), replace=False)] *= 50
    weight = 1 + 0.1 * random.standard_normal(shape[1], dtype=np.float32)
    bias = 0.1 * random.standard_normal(shape[1], dtype=np.float32)
    dy = random.standard_normal(shape, dtype=np.float32)
    return tuple(array.astype(numpy_dtype(dtype)) for array in (x, weight, bias, dy))


def _measure(library: Library, case: _Case) -> list[_Row]:
    values = _data(*case)
    nbytes = values[0].nbytes
    sets = math.ceil(_BYTES_PER_SAMPLE / nbytes) if library.on_gpu else 1
    inputs = []
    for _ in range(sets):
        tensors = tuple(map(library.tensor, values))
        statistics: tuple[Any, ...] = ()
        if not library.differentiates:
            _, *statistics_list = cunorm.layer_norm(*tensors[:3], eps=EPS, return_stats=True)
            statistics = tuple(statistics_list)
        inputs.append((*tensors, *statistics))

    step = max(1, case.shape[0] // _ERROR_ROWS)
    x, weight, bias, dy = (array.astype(np.float64) for array in (values[0][::step], *values[1:3], values[3][::step]))
    exact_y = _normalized(x, EPS) * weight + bias
    exact_dx = _gradient(x, weight, dy, EPS)

    gradient_name = "layer_norm + gradient" if library.differentiates else "layer_norm_backward"
    gradient_exact = [exact_y, exact_dx] if library.differentiates else [exact_dx]
    ops = (("layer_norm", [exact_y], 2), (gradient_name, gradient_exact, 5 if library.differentiates else 3))
    limit = 0.1 if library.on_gpu else 0.15
    rows = []
    for (name, exact, passes), fused, unfused in zip(ops, library.fused(), library.unfused()):
        results = fused(inputs[0])
        error = max(_error(library.numpy(ours[::step]), right) for ours, right in zip(results, exact))
        fused_time, unfused_time = (library.seconds(op, inputs, limit) for op in (fused, unfused))
        rows.append(_Row(name, case.shape, case.dtype, library.title, error, fused_time, unfused_time, passes * nbytes))
    return rows


def _normalized(x: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    difference = x - x.mean(-1, keepdims=True)
    result: NDArray[np.float64] = difference / np.sqrt((difference**2).mean(-1, keepdims=True) + eps)
    return result


def _gradient(
    x: NDArray[np.float64], weight: NDArray[np.float64], dy: NDArray[np.float64], eps: float
) -> NDArray[np.float64]:
    xhat = _normalized(x, eps)
    g = dy * weight
    centered = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)
    result: NDArray[np.float64] = centered / np.sqrt(x.var(-1, keepdims=True) + eps)
    return result


def _error(ours: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(ours - exact)) / norm if norm else float(np.linalg.norm(ours))


def _print_legend(rows: list[_Row]) -> None:
    legend = [
        "error: norm of the difference from float64 by norm of the result (y, dx), on some 64 rows; rounding the",
        "       result alone gives about 2e-4 (float16), 2e-3 (bfloat16), 3e-8 (float32)",
        "GB/s: the bytes that must move (forward: x read, y written; backward: x and dy read, dx written; with the",
        "      gradient: both) by the time",
        "time: median of several calls",
        "unfused / fused: how many times as long the formula takes in plain operations of the same library",
    ]
    if any(row.framework == "JAX" for row in rows):
        legend.append("       (JAX: both under jax.jit, where XLA fuses plain operations too)")
    if any(row.framework == "PyTorch" for row in rows) and not gpus.cuda_devices()[0]:
        legend.append("       (PyTorch on the CPU: both with one thread)")
    for text in legend:
        output.line(text, "dim")
