"""What `cunorm.tune` found on this user's GPUs: a JSON file, which plans are looked up in before the built-in choice.

The file is ``tuning.json`` in the folder of `cunorm.cache.cache_folder`. It is read once, when the first call on a GPU
is prepared. Whatever is wrong with it costs a warning and the entries that cannot be used, never a call.

What was measured with other kernels says nothing of these: calls use entries of the same minor version of cunorm (of
0.1.3 in 0.1.0), and pass over the others without a word. Those stay in the file, for whoever has that version still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cunorm import __version__, cuda
from cunorm.cache import cache_folder
from cunorm.plan import RowBlock, Way
from cunorm.plan.channel_grid import Grid
from cunorm.plan.channel_pipeline import ChannelPipeline
from cunorm.plan.channel_slab import Slab
from cunorm.plan.channel_split import Split
from cunorm.plan.channel_tiles import Direction, Tiles, along_planes, direction
from cunorm.plan.row_bulk import RowBulk
from cunorm.plan.row_bulk_backward import RowBulkBackward
from cunorm.plan.row_memory import are_shifted, vector_width
from cunorm.problem import (
    BackwardProblem,
    ChannelBackward,
    ChannelForward,
    ChannelProblem,
    ForwardProblem,
    Problem,
)

__all__ = ["Entry", "TuningFile", "default_path", "entry_for", "forget", "key_of", "parsed_geometry"]

# Raised when an entry comes to mean something else, so that files of other versions are not misread.
_FORMAT = 1
_NAME = "tuning.json"
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Entry:
    """What is best for the problems of one key. ``geometry`` is None where that is the built-in choice.

    ``cunorm`` is the version that measured it. The rest is for people: on which shape, the seconds that a call takes,
    and how many plans were compared.
    """

    geometry: Way | None
    shape: tuple[int, ...]
    seconds: float
    built_in_seconds: float
    tried: int
    cunorm: str


Entries = dict[str, dict[str, Entry]]  # by the name of the GPU, then by the key of the problem


class _Content(NamedTuple):
    """What a file holds: entries that can be used, the JSON of other versions' entries, and what is wrong."""

    entries: Entries
    others: dict[str, dict[str, Any]]
    complaint: str = ""


def default_path() -> Path | None:
    """The file that calls are looked up in; None where the user has no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / _NAME


def key_of(problem: Problem | ChannelProblem) -> str:
    """The problems that share an entry: those for which the same is probably the best.

    The same op, direction, dtypes, residual and activation, the same results; rows and columns up to the same powers
    of two; and as many bytes in which the columns can be moved at once, since odd rows take other ways than even ones.
    Of norms of channels the same sizes, since what is found for them is for these alone, lying in memory likewise.
    """
    if isinstance(problem, (ChannelForward, ChannelBackward)):
        return " ".join(["channel_norm", *_wanted(problem), *_sizes_of_channels(problem)])
    itemsize = problem.itemsize
    residual = problem.residual if isinstance(problem, ForwardProblem) else problem.dresidual_out
    parts = ["layer_norm" if problem.norm.centered else "rms_norm", *_wanted(problem)]
    parts += ["residual"] if residual else []
    parts += [problem.norm.activation] if problem.norm.activation else []
    parts += ["shifted"] if are_shifted(problem) else [f"vector={vector_width(problem) * itemsize}"]
    parts += [f"rows<={_bucket(problem.rows)}", f"columns<={_bucket(problem.columns)}"]
    return " ".join(parts)


def _wanted(problem: Problem | ChannelProblem) -> list[str]:
    """The direction, and the dtypes of what is given and wanted."""
    if isinstance(problem, (ForwardProblem, ChannelForward)):
        parts = ["forward", problem.x.dtype]
    else:
        parts = ["backward", problem.x.dtype]
        parts += ["dx"] if problem.dx else []
        parts += [f"{name}={dtype}" for name in ("dweight", "dbias") if (dtype := getattr(problem, name))]
    return parts + [f"{name}={vector.dtype}" for name in ("weight", "bias") if (vector := getattr(problem, name))]


def _sizes_of_channels(problem: ChannelProblem) -> list[str]:
    way, planes = direction(problem), along_planes(problem)
    parts = [problem.activation] if problem.activation else []
    parts += [f"{'channels' if way.along_channels else 'points'}={way.width}"]
    parts += [f"planes={planes.width}"] if planes else []
    parts += [f"{name}={getattr(problem, name)}" for name in ("samples", "channels", "channels_per_set")]
    return [*parts, f"points={'x'.join(map(str, problem.point_sizes))}"]


def _bucket(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, size - 1).bit_length()


class TuningFile:
    """A file of entries. Reading never raises; what cannot be used is left out, with one warning for the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Entries:
        """What is in the file for this version of cunorm; nothing where there is none."""
        content = self._read()
        if content.complaint:
            warnings.warn(f"{self.path} {content.complaint}; `python -m cunorm tune` writes it again", stacklevel=2)
        return content.entries

    def count_others(self) -> int:
        """How many entries are of other versions, and so not used."""
        return sum(map(len, self._read().others.values()))

    def _read(self) -> _Content:
        try:
            self._check_kind()
            if self.path.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            entries, others, bad = _parse(json.loads(self.path.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return _Content({}, {})
        except OSError as error:
            return _Content({}, {}, f"cannot be read and is ignored ({error.strerror or error})")
        except (ValueError, RecursionError) as error:
            return _Content({}, {}, f"is ignored, since it is no tuning file of this version of cunorm ({error})")
        if not bad:
            return _Content(entries, others)
        complaint = f"{len(bad)} of its entries are ignored, since they make no sense here (one is {bad[0]!r})"
        return _Content(entries, others, complaint)

    def store(self, gpu: str, found: Mapping[str, Entry]) -> None:
        """Add entries, or replace those of the same key.

        The file is replaced as a whole, so that a reader sees the old or the new one; it keeps its permissions. If any
        of what was there could not be read, the old file is kept beside it, with ``.old`` at the end of its name.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.parent):
            entries, gpus, complaint = self._read()
            if complaint and (entries or gpus):  # of use to a reader until it is replaced
                shutil.copy2(self.path, self._old)
            elif complaint:
                self._put_aside()
            entries.setdefault(gpu, {}).update(found)
            for name, of_gpu in entries.items():
                gpus.setdefault(name, {}).update((key, dataclasses.asdict(entry)) for key, entry in of_gpu.items())
            content = {"format": _FORMAT, "gpus": {name: dict(sorted(of_gpu.items())) for name, of_gpu in gpus.items()}}
            self._write(json.dumps(content, indent=1) + "\n")

    def clear(self) -> str:
        """Remove the file, or put it aside where it is not one of ours. Returns which, in words; "" if there was none.

        Raises
        ------
        OSError
            If it cannot be removed, or is no regular file: a folder, say.
        """
        entries, others, complaint = self._read()
        if complaint and not (entries or others):
            return f"moved to {self._old}" if self._put_aside() else ""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.path.unlink()
            return "removed"
        return ""

    def check_writable(self) -> None:
        """Raise the OSError that `store` would raise."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path.parent):
            pass
        self._check_kind()

    @property
    def _old(self) -> Path:
        return self.path.with_name(self.path.name + ".old")

    def _check_kind(self) -> None:
        """Raise an OSError for a folder, a pipe or a device: reading may never end, and it is not ours to move."""
        if self.path.is_dir():
            raise IsADirectoryError("it is a folder")
        if self.path.exists() and not self.path.is_file():
            raise OSError("it is no regular file")

    def _put_aside(self) -> bool:
        self._check_kind()
        try:
            self.path.replace(self._old)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _write(self, text: str) -> None:
        part = self.path.with_name(f"{self.path.name}.{os.urandom(8).hex()}.part")
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
            with contextlib.suppress(FileNotFoundError):
                part.chmod(stat.S_IMODE(self.path.stat().st_mode))
            part.replace(self.path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from adding entries meanwhile, so that none is lost; where the file system has locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---- Entries as JSON.


def _parse(content: Any) -> tuple[Entries, dict[str, dict[str, Any]], list[str]]:
    """The entries that make sense, what other versions wrote, and the keys of the rest."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("gpus"), dict):
        raise ValueError(f'it must be an object with "format": {_FORMAT} and "gpus"')
    entries: Entries = {}
    others: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for gpu, of_gpu in content["gpus"].items():
        if not isinstance(of_gpu, dict):
            bad.append(gpu)
            continue
        for key, value in of_gpu.items():
            if _is_of_another_version(value):
                others.setdefault(gpu, {})[key] = value
                continue
            try:
                entries.setdefault(gpu, {})[key] = _entry(value)
            except ValueError:
                bad.append(key)
    return entries, others, bad


def _is_of_another_version(value: Any) -> bool:
    version = value.get("cunorm") if isinstance(value, dict) else None
    return isinstance(version, str) and _minor(version) != _minor(__version__)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _entry(value: Any) -> Entry:
    fields = _fields(value, Entry)
    shape = fields["shape"]
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise ValueError
    for name in ("seconds", "built_in_seconds"):
        number = fields[name]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise ValueError
    if not _is_count(fields["tried"]) or not isinstance(fields["cunorm"], str):
        raise ValueError
    geometry = None if fields["geometry"] is None else parsed_geometry(fields["geometry"])
    return Entry(**(fields | {"geometry": geometry, "shape": tuple(shape)}))


def parsed_geometry(value: Any) -> Way:
    """A geometry that some problem may have. Whether it is one for the problem at hand is for the plan to say."""
    for kind in (RowBlock, RowBulk, RowBulkBackward, Slab, Grid, ChannelPipeline, Split):
        if isinstance(value, dict) and set(value) == {field.name for field in dataclasses.fields(kind)}:
            return _made(kind, value)  # type: ignore[no-any-return]
    raise ValueError


def _made(kind: Any, value: Any) -> Any:
    """A dataclass of counts, texts, booleans, and others like it."""
    if kind is Direction:
        if not isinstance(value, list) or [type(item) for item in value] != [bool, int, int]:
            raise ValueError
        return Direction(*value)
    fields = _fields(value, kind)
    for field in dataclasses.fields(kind):
        given, others = fields[field.name], {"Tiles": Tiles, "Direction": Direction}
        if field.type in others:
            fields = fields | {field.name: _made(others[str(field.type)], given)}
        elif not (_is_count(given) if field.type == "int" else type(given).__name__ == field.type):
            raise ValueError
    return kind(**fields)


def _fields(value: Any, kind: type) -> dict[str, Any]:
    """An object with exactly the fields of a dataclass."""
    if not isinstance(value, dict) or set(value) != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


# ---- What a call sees.


def entry_for(problem: Problem | ChannelProblem, device_index: int) -> Entry | None:
    """What the user's file has for a problem on a CUDA device: nothing for rows whose weights are by channel."""
    entries = _entries()
    by_channel = isinstance(problem, (ForwardProblem, BackwardProblem)) and problem.channels is not None
    if not entries or by_channel:
        return None
    return entries.get(cuda.gpu_name(device_index), {}).get(key_of(problem))


@functools.cache
def _entries() -> Entries:
    path = default_path()
    return {} if path is None else TuningFile(path).read()


def forget() -> None:
    """Let the next look-up read the file again."""
    _entries.cache_clear()
