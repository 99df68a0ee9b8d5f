"""Code that makes a framework's calls without Python: compiled on the user's machine, kept, and found again.

Each framework's ``host.cpp`` says what it does, and its ``host.py`` how it is compiled. Nothing is compiled unasked.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from cunorm.cache import cache_folder, digest

__all__ = ["CUPY", "LIBRARIES", "TENSORFLOW", "TORCH", "Library", "is_wanted"]

_FLAGS = ("-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-fvisibility=hidden")
_HEADER = Path(__file__).with_name("launches.h")


def is_wanted() -> bool:
    """Whether this process is to use what was built."""
    return os.environ.get("CUNORM_COMPILED_CALLS") != "0"


class Library(NamedTuple):
    """The compiled code of a framework's calls: ``framework`` as users write it, and as it is imported."""

    framework: str
    package: str

    @property
    def source(self) -> Path:
        return Path(__file__).parent / self.package / "host.cpp"

    @property
    def module(self) -> str:
        return f"cunorm_{self.package}_host"

    def text(self) -> str:
        """What stands for the source in the names of files that were made of it."""
        return digest(self.source.read_text("utf-8"), _HEADER.read_text("utf-8"))

    def folder(self) -> Path:
        """Where files are kept. A RuntimeError where there is no place for that."""
        cache = cache_folder()
        if cache is None:
            raise RuntimeError("there is no home folder to keep compiled code in; set CUNORM_CACHE_DIR")
        return cache.absolute() / self.package

    def path(self, version: str, *keys: object) -> Path:
        """Where the library is, if it was built: of this text, for a ``version`` and what else it depends on."""
        return self.folder() / f"{self.module}-{version}-{self.text()}-{digest(_FLAGS, *keys)}.so"

    def versions(self) -> list[str]:
        """Those that it was built for, of this text."""
        names = [path.stem.split("-", 1)[1] for path in self.folder().glob(f"{self.module}-*-{self.text()}-*.so")]
        return sorted({name.rsplit("-", 2)[0] for name in names})

    def build(self, target: Path, flags: Sequence[str], libraries: Sequence[str], use: Callable[[Path], None]) -> None:
        """Compile ``target``, unless it is there, and let ``use`` load it, if it is wanted.

        What was there and does not load, since another machine made it say, is compiled again. A RuntimeError with the
        compiler's log where that fails.
        """
        was_there = target.exists()
        self._compile_once(target, flags, libraries)
        if not is_wanted():
            return
        try:
            use(target)
        except (ImportError, OSError):
            if not was_there:
                raise
            target.unlink(missing_ok=True)
            self._compile_once(target, flags, libraries)
            use(target)

    def _compile_once(self, target: Path, flags: Sequence[str], libraries: Sequence[str]) -> None:
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with Path(target.parent, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes, as training has them, one compiles
            if not target.exists():
                self._compile(target, flags, libraries)

    def _compile(self, target: Path, flags: Sequence[str], libraries: Sequence[str]) -> None:
        given = os.environ.get("CXX", "")
        try:
            compiler = shlex.split(given) or ["c++"]
        except ValueError as error:
            raise RuntimeError(f"CXX is {given!r}; it must be as a shell takes it: {error}") from error
        calls = f"{self.framework}'s calls"
        if shutil.which(compiler[0]) is None:
            found = f"{calls} can only be compiled with a C++ compiler, and there is no {compiler[0]}"
            raise RuntimeError(f"{found}: install g++, or set CXX to another")
        # The finished file appears under its name at once: who loads it does not ask for the lock.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            output = Path(scratch, target.name)
            command = [*compiler, *_FLAGS, *flags, str(self.source), "-o", str(output), *libraries]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0 or not output.exists():
                raise RuntimeError(f"{calls} do not compile:\n{' '.join(command)}\n{done.stderr}")
            output.replace(target)

    def load(self, path: Callable[[], Path], use: Callable[[Path], None]) -> None:
        """Let ``use`` load what is at ``path()``, if it was built and is wanted. A warning where it cannot."""
        try:
            target = path()
            if not is_wanted() or not target.exists():
                return
        except (OSError, RuntimeError):  # a folder that is none or cannot be read has nothing for us
            return
        try:
            use(target)
        except (ImportError, OSError) as error:
            message = f"cunorm's compiled calls of {self.framework} are not used: {error}; remove and build them again"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def extension(self, path: Path) -> ModuleType:
        """What is at ``path``, imported as a module of Python."""
        loader = importlib.machinery.ExtensionFileLoader(self.module, str(path))
        spec = importlib.util.spec_from_file_location(self.module, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def remove(self) -> int:
        """Remove what was built, and say how many files that were. This process goes on with what it has loaded."""
        found = list(self.folder().glob(f"{self.module}-*.so"))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)


CUPY, TORCH, TENSORFLOW = Library("CuPy", "cupy"), Library("PyTorch", "torch"), Library("TensorFlow", "tensorflow")
LIBRARIES = (CUPY, TORCH, TENSORFLOW)
