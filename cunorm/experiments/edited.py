"""An experiment: another text for one kernel, and what can be done with it."""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cunorm import compiling, cuda, execute, gpus, kernels
from cunorm.gpus import KNOWN_GPUS
from cunorm.plan import Device
from cunorm.problem import DTYPES
from cunorm.text import kind_of

if TYPE_CHECKING:
    from cunorm.experiments.bench import BenchReport
    from cunorm.experiments.check import CheckReport
    from cunorm.experiments.takes import ResourceReport

__all__ = ["Experiment"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"__global__\b[^;{}]*?\b(\w+)\s*\(\s*const\s+Arguments\b")
# How many calls `check` runs: on the emulator each is compiled twice, in about two seconds.
_MOST_EMULATED, _MOST_ON_GPU = 8, 12
_MOST_TYPICAL = 3

_lock = threading.Lock()
# The texts that are active, in the order in which they became so: each is a list of its own, [kernel, text].
_active: list[list[str]] = []


class Experiment:
    """Another text for a kernel. `cunorm.experiment` makes one.

    Attributes
    ----------
    kernel : str
        The kernel's name.
    source : str
        The text: as shipped at first, with the files that it includes in place, each under a ``#line`` directive. It
        can be set to an edited text or to a whole new one, which may include shipped files (``#include "reduce.cuh"``).
        It must have the same entry point, and ``struct Arguments`` the same fields.
    """

    def __init__(self, kernel: str) -> None:
        if not isinstance(kernel, str):
            raise TypeError(f"kernel is {kind_of(kernel)}; it must be a str, the name of a kernel")
        if kernel not in kernels.kernel_names():
            raise ValueError(f"kernel is {kernel!r}; it must be one of {', '.join(kernels.kernel_names())}")
        self.kernel = kernel
        self._shipped = self._source = kernels.kernel_text(kernel, {})

    @property
    def source(self) -> str:
        return self._source

    @source.setter
    def source(self, text: str) -> None:
        self._source = _checked(self.kernel, text)

    @property
    def changed(self) -> str:
        """The lines that differ from the shipped text, by file: - as shipped, + as edited. Empty if there are none."""
        before, after = _by_file(self._shipped), _by_file(self._source)
        parts = []
        for file in {**before, **after}:
            lines = difflib.unified_diff(before.get(file, []), after.get(file, []), n=0, lineterm="")
            differing = [line for line in list(lines)[2:] if not line.startswith("@@")]
            parts += [file, *differing] if differing else []
        return "\n".join(parts)

    def __repr__(self) -> str:
        changes = sum(line.startswith(("+", "-")) for line in self.changed.splitlines())
        return f"<experiment with {self.kernel}: {f'{changes} lines differ' if changes else 'as shipped'}>"

    def check(
        self,
        *,
        full: bool = False,
        shapes: Sequence[Sequence[int]] | None = None,
        dtypes: Sequence[str] | None = None,
        on: str | None = None,
        seeds: int = 3,
    ) -> CheckReport:
        """Compare calls that launch the kernel with float64: on the GPU, or on the emulator where there is none.

        A result that is wrong is not an error but in the report, with its first wrong element and the block and thread
        that wrote it. So are the findings of the emulator's sanitizers. The active text plays no role, only `source`.

        Parameters
        ----------
        full : bool
            All calls of the table that launch the kernel, not only the most various few.
        shapes : sequence of shapes, optional
            Check the ops on tensors of these shapes instead.
        dtypes : sequence of str, optional
            With these dtypes; float32 and bfloat16, where only shapes are given. Without shapes, those of the table.
        on : {None, "gpu", "emulator"}
            Where to run.
        seeds : int
            How often each call runs: on the emulator in as many orders of its threads. A race shows as a difference.

        Returns
        -------
        report : CheckReport
            False in a condition if anything is wrong. ``passed``, ``frame``, and shown as a table.

        Raises
        ------
        CompileError
            If the text does not compile (a RuntimeError): with the line of the file, and a caret.
        RuntimeError
            Where there is neither a GPU nor g++.
        ValueError
            If none of the shapes has a plan that launches the kernel.
        """
        from cunorm.experiments import check, examples

        if on not in (None, "gpu", "emulator"):
            raise ValueError(f"on is {on!r}; it must be 'gpu', 'emulator' or None")
        if seeds < 1:
            raise ValueError(f"seeds is {seeds}; it must be at least 1")
        index = _gpu() if on != "emulator" else None
        if on == "gpu" and index is None:
            raise RuntimeError("on is 'gpu', and there is no NVIDIA GPU that can be used here")
        if index is None and shutil.which("g++") is None:
            raise RuntimeError("to check a kernel takes an NVIDIA GPU, or Linux and g++ for the emulator")
        device = None if index is None else cuda.device(index)
        _check_dtypes("dtypes", dtypes or ())
        if shapes is not None:
            asked = examples.of_shapes(shapes, dtypes or ("float32", "bfloat16"))
            chosen = examples.launching(self.kernel, asked, device)
        else:
            most = 10**6 if full or dtypes else _MOST_EMULATED if index is None else _MOST_ON_GPU
            chosen = examples.of_kernel(self.kernel, device, most)
            chosen = [item for item in chosen if item.example.dtype in (dtypes or DTYPES)]
        if not chosen:
            raise ValueError(f"no call of these shapes and dtypes launches {self.kernel} here")
        notes = [] if self._source != self._shipped else ["the text is the shipped one"]
        if index is None:
            return check.check_on_emulator(self.kernel, self._source, chosen, seeds, notes)
        return check.check_on_gpu(self.kernel, self._source, chosen, index, seeds, notes)

    def resources(
        self, arch: str | None = None, *, shape: Sequence[int] | None = None, dtype: str = "bfloat16"
    ) -> ResourceReport:
        """Registers, spills, shared memory and occupancy of the shipped text and of this one, side by side.

        Parameters
        ----------
        arch : str, optional
            The architecture, for example "sm_90": any, whatever GPU is here. By default that of the GPU here, or sm_90.
        shape : sequence of int, optional
            For the calls of this shape that launch the kernel. By default a few that are typical.
        dtype : str
            The dtype of x.

        Returns
        -------
        report : ResourceReport
            ``frame``, and shown as a table.

        Raises
        ------
        CompileError
            If the text does not compile (a RuntimeError).
        RuntimeError
            Without CuPy, whose compiler needs no GPU.
        ValueError
            If no call of the shape launches the kernel on such a GPU, or for an arch that is none.
        """
        from cunorm.experiments import examples, takes

        _check_dtypes("dtype", [dtype])
        device = _device_of(arch)
        asked = examples.typical(dtype) if shape is None else examples.of_shapes([shape], [dtype])
        chosen = examples.launching(self.kernel, asked, device)[:_MOST_TYPICAL]
        if not chosen and shape is None:
            chosen = examples.of_kernel(self.kernel, device, _MOST_TYPICAL)
        if not chosen:
            raise ValueError(f"shape is {tuple(shape or ())}: no call of it launches {self.kernel} on {device.arch}")
        texts = {"shipped": self._shipped}
        if self._source != self._shipped:
            texts["edited"] = self._source
        return takes.take(self.kernel, texts, chosen, device)

    def bench(self, shapes: Sequence[Sequence[int]], dtype: str = "bfloat16", *, op: str | None = None) -> BenchReport:
        """Time a call of each shape on the GPU: with the shipped text, with this one, and a copy of the same bytes.

        They take turns, each beginning with a cold L2 cache. A call is timed as a whole, also where the kernel is one
        of several that it launches. Results are compared with the shipped text's before, and wrong ones are not timed.

        Parameters
        ----------
        shapes : sequence of shapes
            Of x. For each, the first op is timed that launches the kernel.
        dtype : str
            The dtype of x.
        op : str, optional
            The op, if it is to be another: "rms_norm", "group_norm", and so on.

        Returns
        -------
        report : BenchReport
            ``frame`` and ``plot()``, and shown as a table.

        Raises
        ------
        RuntimeError
            Without a GPU, or if the text does not compile (a CompileError), or tensors do not fit in its memory.
        ValueError
            For a shape of which no call launches the kernel.
        """
        from cunorm.experiments import bench, examples

        _check_dtypes("dtype", [dtype])
        index = gpus.current_index("bench")
        chosen = []
        for shape in shapes:
            asked = [item.without_statistics for item in examples.of_shapes([shape], [dtype]) if op in (None, item.op)]
            found = examples.launching(self.kernel, asked, cuda.device(index))
            if not found:
                of_op = f"no call of {op}" if op else "no call"
                raise ValueError(f"shapes has {tuple(shape)}: {of_op} on {dtype} launches {self.kernel} here")
            chosen.append(found[0])
        notes = [] if self._source != self._shipped else ["the edited text is the shipped one"]
        if any(len(item.plan.launches) > 1 for item in chosen):
            notes.append(f"{self.kernel} is one of several launches of a call, and all of the call is timed.")
        return bench.time_texts(self.kernel, self._source, chosen, index, notes)

    @contextlib.contextmanager
    def active(self) -> Iterator[Experiment]:
        """Let every call of the package run this text in place of the shipped one, until the block is left.

        It is so for the whole process: in all threads, since frameworks differentiate in threads of their own, and in
        all frameworks. Tensors on the CPU are not computed by kernels at all. The text is that of entering; what
        `source` is set to later counts when the experiment is entered again. Of two experiments with one kernel, the
        one entered last runs; each may be left in any order, in any thread, and removes only itself. A call that has
        begun runs all of its kernels as they were when it began.

        Calls are prepared anew after entering and leaving, and functions that ``jax.jit`` compiled are compiled again.
        What was captured keeps the text of that moment: CUDA graphs, and JAX functions compiled ahead of time.
        """
        entry = [self.kernel, self._source]
        try:
            with _lock:
                _active.append(entry)
                _put_in_place()
            execute.forget_compiled()
            yield self
        finally:
            with _lock:
                # By identity: another may have the same text.
                _active[:] = [other for other in _active if other is not entry]
                _put_in_place()
                in_use = entry in _active
            execute.forget_compiled()
            if not in_use and entry[1] != self._shipped:
                compiling.forget_text(entry[1])


def _check_dtypes(name: str, dtypes: Sequence[str]) -> None:
    if isinstance(dtypes, str):
        raise TypeError(f"{name} is {dtypes!r}; it must be a sequence of dtypes, such as [{dtypes!r}]")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise TypeError(f"{name} has {dtype!r}; it must be of {', '.join(DTYPES)}")


def _device_of(arch: str | None) -> Device:
    """The GPU here, or one that stands for an architecture."""
    index = _gpu()
    if index is not None and arch in (None, cuda.device(index).arch):
        return cuda.device(index)
    known = KNOWN_GPUS.get(arch or "sm_90")
    if known is None:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(KNOWN_GPUS)}, or that of this machine's GPU")
    return known.device


def _put_in_place() -> None:
    kernels.replaced = {kernel: text for kernel, text in _active}


def _gpu() -> int | None:
    """The current CUDA device, if there is one that can be used."""
    try:
        return int(cuda.cupy().cuda.runtime.getDevice())
    except Exception:  # no CuPy, no driver, no device, or one that is too old
        return None


def _by_file(text: str) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for (file, _), line in kernels.lines_of(text).items():
        files.setdefault(file, []).append(line)
    return files


def _checked(kernel: str, text: Any) -> str:
    """A text made complete, if it can be that of the kernel."""
    if not isinstance(text, str):
        raise TypeError(f"source is {kind_of(text)}; it must be a str, the text of {kernel}")
    text = "\n".join(text.splitlines())  # those of Windows too
    code = _COMMENT.sub("", text)
    if not code.strip():
        raise ValueError(f"source is empty; it must be the text of {kernel}")
    entries = _ENTRY.findall(code)
    if kernel not in entries:
        found = f"that of {', '.join(entries)}" if entries else "none"
        entry = f'extern "C" __global__ void {kernel}(const Arguments arguments)'
        raise ValueError(f"source must have the entry point {entry}; it has {found}")
    fields, shipped = kernels.fields_of(kernel, text), kernels.argument_fields(kernel)
    if fields != shipped:
        differ = [f"- {_field(item)}" for item in shipped if item not in fields]
        differ += [f"+ {_field(item)}" for item in fields if item not in shipped]
        what = "; ".join(differ) or "they are in another order"
        raise ValueError(f"struct Arguments of source must have the fields of the shipped {kernel}.cu: {what}")
    return kernels.complete(kernel, text)


def _field(item: tuple[str, str, str | None]) -> str:
    name, kind, length = item
    if kind == "pointer":
        return f"pointer {name}{f' (if {length} > 0)' if length else ''}"
    return f"{kind} {name}{f'[{length}]' if length else ''}"
