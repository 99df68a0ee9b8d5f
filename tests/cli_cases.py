"""What the tests of ``python -m cunorm`` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cunorm import cli, cuda

ROOT = Path(__file__).parents[1]
OPS = ("layer_norm", "layer_norm_backward", "layer_norm + gradient")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command in this process. Returns what it prints."""
    assert cli.run(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command whose arguments cannot be used. Returns the message."""
    try:
        code = cli.run(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err
    return captured.err


def table_row(text: str, *words: str) -> list[str]:
    """The cells of the first line with all the words; cells are two spaces or more apart."""
    line = next(line for line in text.splitlines() if all(word in line for word in words))
    return re.split(r"\s{2,}", line.strip())


def full(*_: Any) -> Any:
    """What CuPy raises where a GPU has no memory left."""
    raise MemoryError("Out of memory allocating 536,870,912 bytes")


def refusing() -> Any:
    """What it raises where another process has the GPU for itself."""
    raise RuntimeError("cudaErrorDevicesUnavailable")


GpusHere = Callable[..., SimpleNamespace]


def gpus_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpusHere]:
    """The fixture ``gpus_here``."""

    def forget() -> None:
        for cached in (cuda.device, cuda.gpu_name):
            cached.cache_clear()

    def make(*capabilities: tuple[int, int]) -> SimpleNamespace:
        def properties(index: int) -> dict[str, Any]:
            major, minor = capabilities[index]
            counts = {"multiProcessorCount": 108, "maxThreadsPerMultiProcessor": 2048}
            return {"name": f"GPU {major}.{minor}".encode(), "major": major, "minor": minor, **counts}

        class Device:
            def __init__(self, index: int) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: Any) -> None:
                pass

            mem_info = property(lambda self: refusing())
            attributes = property(lambda self: {})

        runtime = SimpleNamespace(
            getDeviceCount=lambda: len(capabilities), getDeviceProperties=properties, CUDARuntimeError=RuntimeError
        )
        runtime.getDevice = lambda: 0
        runtime.driverGetVersion = runtime.runtimeGetVersion = lambda: 12090
        cupy = SimpleNamespace(__version__="14", uint8="uint8", zeros=full, asarray=full)
        cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device)
        monkeypatch.setattr(cuda, "cupy", lambda: cupy)
        monkeypatch.setattr(
            "cunorm.explanation.launches.compile_resources",
            lambda *_: SimpleNamespace(registers=1, spill_bytes=0, shared_bytes=0),
        )
        return cupy

    forget()
    yield make
    monkeypatch.undo()
    forget()
