"""What holds for all tests: those marked gpu are skipped where there is no GPU, and frameworks stay quiet.

The fixtures are those that several files use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench_cases import OtherProvider
    from cli_cases import GpusHere
    from tuning_cases import FakeMachine

    from cunorm.plan import Plan

# Before any framework is imported. The workers of pytest-xdist share a GPU, so none may take it for itself.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Whether or not they were built here, PyTorch's calls are compiled in the tests that are about this.
os.environ.setdefault("CUNORM_COMPILED_CALLS", "0")

# What asserts for tests says what it found, as they do.
pytest.register_assert_rewrite(
    *(file.stem for pattern in ("*cases.py", "[!t]*rules.py") for file in Path(__file__).parent.glob(pattern))
)

NO_GPU = "needs an NVIDIA GPU"


@functools.cache
def _has_gpu() -> bool:
    """Whether CuPy sees a CUDA device. CuPy is asked since it is imported in a fraction of PyTorch's time."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # not installed, or no driver, or one that is too old
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder of this test; nothing that it prepares outlives it."""
    from cunorm import execute, tuning_file

    def forget() -> None:
        tuning_file.forget()
        execute.forget_prepared()

    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def fake_gpu(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """A GPU that can be asked for its name and compiles everything. Gives the plans that calls were made of."""
    from tuning_cases import DEVICE, GPU

    from cunorm import cuda, launch

    made: list[Plan] = []

    def call(chosen: Plan, operands: Sequence[str], device_index: int) -> Callable[..., None]:
        made.append(chosen)
        return lambda pointers, workspace, stream: None

    monkeypatch.setattr(cuda, "device", lambda index: DEVICE)
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(cuda, "gpu_name", lambda index: GPU)
    return made


@pytest.fixture
def fake_machine(fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """What `cunorm.tune` runs on: every plan takes 10 µs."""
    from tuning_cases import FakeMachine

    from cunorm import tuning

    machine = FakeMachine(lambda plan: 1e-5)
    monkeypatch.setattr(tuning, "current_gpu", lambda problem: machine)
    return machine


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy as it is where there is no NVIDIA driver: every question for a device fails."""
    from cunorm import cuda

    def fail() -> None:
        raise OSError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    runtime = SimpleNamespace(getDevice=fail, getDeviceCount=fail, driverGetVersion=lambda: 0, CUDARuntimeError=OSError)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Whatever torch.compile keeps is of this test alone."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def other_provider(monkeypatch: pytest.MonkeyPatch) -> type[OtherProvider]:
    """A library among those that ``bench/`` compares; a test says how it computes."""
    from bench_cases import OtherProvider

    from cunorm.bench import peers

    monkeypatch.setitem(peers.PROVIDERS, "other", OtherProvider)
    return OtherProvider


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does with experiments, afterwards every text is the shipped one."""
    from experiment_cases import SHIPPED

    from cunorm import kernels

    yield
    assert kernels.replaced == {}
    assert {kernel: kernels.kernel_text(kernel) for kernel in SHIPPED} == SHIPPED


@pytest.fixture(scope="module")
def tiny_models() -> Iterator[None]:
    """PyTorch with one thread, since tensors are tiny; and on a GPU convolutions of float32, not of TF32's ten bits."""
    import torch

    threads, allowed = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a CUDA device, whatever this one has."""
    from cunorm import gpus

    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([], "none for this test"))


@pytest.fixture
def gpus_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpusHere]:
    """Makes GPUs of given compute capabilities those of this machine: seen, but with no memory for anything."""
    from cli_cases import gpus_made

    yield from gpus_made(monkeypatch)
