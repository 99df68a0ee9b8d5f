"""CuPy's compiled calls: they do what Python does for the kinds of calls that they know, and leave it the rest.

Without a GPU CuPy's arrays lie in the host's memory here, where NumPy computes.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest
from host_cases import CallOnCpu, Driver, launch_by, step

import cunorm
from cunorm import cli, execute, on_cpu
from cunorm.adapters.cupy import adapter, host
from cunorm.adapters.cupy.adapter import CupyAdapter
from cunorm.execute import Ready
from cunorm.prepared import Output, Prepared

_VARIABLE = "CUNORM_COMPILED_CALLS"
STREAM = 0x5000
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def in_host_memory(array: np.ndarray[Any, Any]) -> Any:
    """A CuPy array over a NumPy array's memory."""
    memory = cupy.cuda.memory.UnownedMemory(array.ctypes.data, max(array.nbytes, 1), array, 0)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.memory.MemoryPointer(memory, 0), array.strides)


def allocated(size: int) -> Any:
    return in_host_memory(np.full(size, 255, "uint8")).data


def is_in_host_memory(array: Any) -> bool:
    return isinstance(array.data.mem, cupy.cuda.memory.UnownedMemory)


def to_numpy(array: Any) -> Any:
    if array is None or not is_in_host_memory(array):
        return None if array is None else cupy.asnumpy(array)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return on_cpu.as_numpy(array.data.ptr, array.shape, strides, array.dtype.name).copy()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "cpu"))


@pytest.fixture(autouse=True)
def driver(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """CuPy's calls are compiled; those of arrays in the host's memory are launched by the driver that this gives."""
    found = Driver()
    execute.forget_prepared()
    allocator = cupy.cuda.get_allocator()
    monkeypatch.setattr(host, "_has_driver", False)
    if device == "cpu":
        view, stream = CupyAdapter.view, SimpleNamespace(ptr=STREAM, is_capturing=lambda: False)
        monkeypatch.setattr(CupyAdapter, "view", lambda *given: view(*given)._replace(device=("cpu", 0)))
        monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda index: stream)
        monkeypatch.setattr(adapter, "_current_device", lambda: 0)
        launch_by(found, monkeypatch)
        cupy.cuda.set_allocator(allocated)
    monkeypatch.setenv(_VARIABLE, "1")
    host.native = None
    host.build()
    yield found
    monkeypatch.undo()
    cupy.cuda.set_allocator(allocator)
    execute.forget_prepared()
    host.native = None


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, nothing is computed by Python's way."""

    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("this call came to Python")

    def forbid() -> None:
        monkeypatch.setattr(execute, "forward", never)
        monkeypatch.setattr(execute, "backward", never)

    return forbid


def data(*shape: int, dtype: str = "float32", seed: int = 0, device: str = "cpu") -> Any:
    array = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(on_cpu.numpy_dtype(dtype))
    return in_host_memory(array) if device == "cpu" else cupy.asarray(array)


def rows(device: str) -> list[Any]:
    """Both norms and their gradients, with all that they take."""
    x, residual, dy = (data(6, 40, dtype="float16", seed=seed, device=device) for seed in range(3))
    weight, bias = data(40, device=device), data(40, dtype="float64", device=device)
    out = data(6, 40, dtype="float16", seed=9, device=device)
    y, mean, rstd = cunorm.layer_norm(x, weight, bias, return_stats=True)
    results = [y, mean, rstd, *cunorm.layer_norm_backward(dy, x, weight, mean, rstd, bias=bias)]
    results += cunorm.layer_norm_backward(dy, x, None, mean, rstd, output_mask=(True, False, True))
    y, total, rstd = cunorm.rms_norm(x, weight, residual=residual, activation="silu", return_stats=True)
    results += [y, total, rstd]
    results += cunorm.rms_norm_backward(dy, total, weight, rstd, activation="silu", dresidual_out=residual)
    assert cunorm.layer_norm(x, axis=(0, 1), out=out) is out
    return [*results, out, cunorm.gelu(x, bias=weight), *cunorm.gelu_backward(dy, x, bias=weight)]


def channels(device: str) -> list[Any]:
    x, dy = data(2, 6, 5, 3, device=device), data(2, 6, 5, 3, seed=1, device=device)
    weight, bias = data(6, device=device), data(6, seed=1, device=device)
    results = []
    for norm, gradient, options in (
        (cunorm.instance_norm, cunorm.instance_norm_backward, {"data_format": "NCHW"}),
        (cunorm.group_norm, cunorm.group_norm_backward, {"num_groups": 3, "activation": "silu"}),
        (cunorm.instance_norm, cunorm.instance_norm_backward, {"data_format": "N...C"}),
    ):
        affine = (data(3, device=device), None) if options.get("data_format") == "N...C" else (weight, bias)
        y, mean, rstd = norm(x, weight=affine[0], bias=affine[1], return_stats=True, **options)
        given = {"weight": affine[0], "mean": mean, "rstd": rstd, "bias": affine[1], **options}
        results += [y, mean, rstd, *gradient(dy, x, **given)]
    running = dict(zip(("running_mean", "running_var"), cunorm.batch_norm_stats(dy)))
    results += [cunorm.batch_norm(x, weight, bias, training=training, **running) for training in (True, False)]
    return [*results, *running.values(), *cunorm.batch_norm_stats(x)]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("calls", [rows, channels])
def test_a_call_like_one_before_does_not_come_to_python(
    calls: Callable[[str], list[Any]], device: str, no_python: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the same results, bit for bit."""
    native = host.native
    host.native = None
    expected = [*map(to_numpy, calls(device))]
    host.native = native
    for round_number in range(2):
        if round_number:
            no_python()
        for result, other in zip(map(to_numpy, calls(device)), expected, strict=True):
            assert (result is None) == (other is None)
            assert result is None or (result.dtype == other.dtype and result.tobytes() == other.tobytes())


def test_kinds_are_told_apart(driver: Driver) -> None:
    x, weight = data(4, 8), data(8)
    square = data(4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: cunorm.layer_norm(x),
        lambda: cunorm.layer_norm(x, weight),
        lambda: cunorm.layer_norm(x, None, weight),
        lambda: cunorm.layer_norm(x, weight, eps=1.0),
        lambda: cunorm.layer_norm(x, data(8, dtype="float64")),
        lambda: cunorm.layer_norm(x, weight, return_stats=True)[2],
        lambda: cunorm.rms_norm(x, weight),
        lambda: cunorm.layer_norm(x[:, :4]),
        lambda: cunorm.layer_norm(x[:, 1:5]),
        lambda: cunorm.layer_norm(x[:, ::2]),
        lambda: cunorm.layer_norm(x[::-1]),
        lambda: cunorm.layer_norm(x[:2]),
        lambda: cunorm.layer_norm(square),
        lambda: cunorm.layer_norm(square.T),
        lambda: cunorm.layer_norm(square, axis=0),
        lambda: cunorm.layer_norm(square, out=data(4, 4)),
        lambda: cunorm.layer_norm(square, residual=data(4, 4))[1],
        lambda: cunorm.layer_norm(data(4, 8, dtype="bfloat16")),
        lambda: cunorm.layer_norm(x.reshape(2, 2, 8)),
    ]
    expected = [to_numpy(call()).tobytes() for call in calls]
    assert driver.launches == 0
    for _ in range(2):
        assert [to_numpy(call()).tobytes() for call in calls] == expected
    assert driver.launches == 2 * len(calls)


def test_which_gradients_are_asked_for() -> None:
    x, dy = data(4, 8), data(4, 8, seed=1)
    _, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    for _ in range(2):
        for number in range(1, 8):
            mask = tuple(bool(number >> i & 1) for i in range(3))
            found = cunorm.layer_norm_backward(dy, x, None, mean, rstd, output_mask=mask)  # type: ignore[arg-type]
            assert tuple(result is not None for result in found) == mask


def test_results_whose_axes_lie_otherwise_are_pythons(driver: Driver) -> None:
    x = in_host_memory(np.random.default_rng(0).standard_normal((2, 5, 3, 6), dtype="float32")).transpose(0, 3, 1, 2)
    expected = cunorm.group_norm(x, 2)
    assert expected.strides == x.strides
    found = cunorm.group_norm(x, 2)
    assert found.strides == x.strides and to_numpy(found).tobytes() == to_numpy(expected).tobytes()
    assert driver.launches == 0


def test_errors_are_those_of_python(driver: Driver) -> None:
    class Special(cupy.ndarray):
        pass

    x, weight = data(4, 8), data(8)
    cunorm.layer_norm(x, weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="weight has shape"):
            cunorm.layer_norm(x, weight[:7])
        with pytest.raises(TypeError, match="weight is a list"):
            cunorm.layer_norm(x, [1.0] * 8)
        with pytest.raises(TypeError, match="x has dtype int32"):
            cunorm.layer_norm(in_host_memory(np.ones((4, 8), "int32")))
        cunorm.layer_norm(x.view(Special))
    assert driver.launches == 0


def test_a_launch_that_fails(driver: Driver) -> None:
    x = data(4, 8)
    cunorm.layer_norm(x)
    driver.status = 719
    with pytest.raises(RuntimeError, match="kernel on_cpu could not be launched: CUDA driver error 719"):
        cunorm.layer_norm(x)
    driver.status = 0
    cunorm.layer_norm(x)
    assert driver.launches == 1


def test_what_cannot_be_allocated(driver: Driver) -> None:
    x = data(4, 8)
    cunorm.layer_norm(x)

    def full(size: int) -> Any:
        raise MemoryError("no room")

    cupy.cuda.set_allocator(full)
    with pytest.raises(MemoryError, match="no room"):
        cunorm.layer_norm(x)
    assert driver.launches == 0


def test_another_current_context_is_pythons_to_change(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x = data(4, 8)
    cunorm.layer_norm(x)
    driver.context = 78
    monkeypatch.setattr(host, "teach_forward", None)  # nor is it taught once more
    cunorm.layer_norm(x)
    assert driver.launches == 0


def test_kinds_that_launch_nothing_are_taught_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[Any] = []
    monkeypatch.setattr(host, "_given", lambda *given: taught.append(given))
    x = data(4, 8)
    for _ in range(3):
        cunorm.layer_norm(x)
    assert len(taught) == 1 and driver.launches == 0
    for shape in ((0, 8), (4, 0)):
        for _ in range(2):
            assert cunorm.layer_norm(data(*shape)).shape == shape


def test_what_is_forgotten_is_prepared_anew(driver: Driver) -> None:
    x = data(4, 8)
    for _ in range(2):
        cunorm.layer_norm(x)
    assert driver.launches == 1
    execute.forget_prepared()
    cunorm.layer_norm(x)
    assert driver.launches == 1
    cunorm.layer_norm(x)
    assert driver.launches == 2


def test_a_call_that_is_forgotten_meanwhile_is_not_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x, given = data(4, 8), host._given

    def forget_and(ready: Ready) -> Any:
        execute.forget_prepared()
        return given(ready)

    monkeypatch.setattr(host, "_given", forget_and)
    cunorm.layer_norm(x)
    monkeypatch.setattr(host, "_given", given)
    cunorm.layer_norm(x)
    assert driver.launches == 0
    cunorm.layer_norm(x)
    assert driver.launches == 1


def test_kernels_stay_loaded_while_they_are_launched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread has had their call forgotten."""
    calls: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    real = Ready.of

    def of(adapter: Any, prepared: Prepared, *given: Any) -> Ready:
        calls.append(weakref.ref(prepared.run))
        return real(adapter, prepared, *given)

    monkeypatch.setattr(Ready, "of", staticmethod(of))
    x = data(4, 8)
    cunorm.layer_norm(x)
    count, function = driver.functions[-1]

    def launched(pointers: Any) -> None:
        execute.forget_compiled()
        gc.collect()
        alive.append(calls[0]() is not None)
        function(pointers)

    driver.functions[-1] = count, launched
    cunorm.layer_norm(x)
    gc.collect()
    assert alive == [True] and calls[0]() is None


def test_nothing_is_lost_or_kept(driver: Driver) -> None:
    """Each call gives back every reference but those of its results."""
    x, weight, out = data(4, 8), data(8), data(4, 8)
    known = [x, weight, out, x.dtype, None]
    for _ in range(2):
        cunorm.layer_norm(x, weight, out=out, return_stats=True)
    before = [sys.getrefcount(item) for item in known]
    for _ in range(50):
        y, mean, rstd = cunorm.layer_norm(x, weight, out=out, return_stats=True)
        del y, mean, rstd
    assert driver.launches == 51
    after = [sys.getrefcount(item) for item in known]
    assert all(abs(there - here) < 10 for there, here in zip(after, before))
    results = weakref.ref(cunorm.layer_norm(x, weight))
    assert results() is None


def test_threads_share_what_is_known(driver: Driver) -> None:
    x = data(4, 8)
    expected = to_numpy(cunorm.layer_norm(x)).tobytes()
    cunorm.layer_norm(x)
    wrong: list[bytes] = []

    def work() -> None:
        for number in range(200):
            if number % 50 == 49:
                execute.forget_prepared()
            if (found := to_numpy(cunorm.layer_norm(x)).tobytes()) != expected:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and driver.launches > 400


@pytest.mark.parametrize("nbytes", [128, 0])
def test_pointers_go_where_a_kernel_has_them(driver: Driver, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Those of the call, null ones, and of scratch memory, which is allocated beside x; with all else of a step."""
    seen: list[list[int]] = []
    numbers = [driver.add(count, seen.append) for count in (3, 2)]
    second = step(numbers[1], (9, 4))._replace(grid=7, block=(64, 2), shared_bytes=4096, attributes=((6, 1), (2, 1)))

    def prepare(op: Any, *arguments: Any) -> Prepared:
        call = CallOnCpu(lambda pointers: None, [step(numbers[0], (0, -1, 8)), second])
        call.scratch_offsets = [16, 64]
        return Prepared((Output((4, 8), "float64"), None, None, None), ("cpu", 0), nbytes, call)

    monkeypatch.setattr(cunorm.row_norm.RowNorm, "prepare_forward", prepare)
    x = data(4, 8)
    cunorm.layer_norm(x)
    assert not seen
    y = cunorm.layer_norm(x)
    (first, null, scratch), (other, last) = seen
    assert first == x.data.ptr and null == 0 and last == y.data.ptr and other - scratch == 48
    assert (scratch == 16) == (nbytes == 0)
    assert y.dtype == "float64" and y.shape == (4, 8)
    assert driver.configs[1] == ((7, 1, 1), (64, 2, 1), 4096, STREAM, [(6, 1), (2, 1)])


# ---- Building.


def test_what_was_built_is_found_by_the_next_process(tmp_path: Path) -> None:
    built = host.library()
    found = "import cunorm.adapters.cupy as c; assert (c.host.native is not None) == {}, c.host.native"
    environment = os.environ | {_VARIABLE: "1"}
    for code, variables in ((found.format(True), environment), (found.format(False), os.environ | {_VARIABLE: "0"})):
        subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    damaged = environment | {"CUNORM_CACHE_DIR": str(tmp_path)}
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / built.name).write_bytes(b"no library")
    command = [sys.executable, "-c", found.format(False)]
    done = subprocess.run(command, env=damaged, check=True, capture_output=True, text=True)
    assert "compiled calls of CuPy are not used" in done.stderr
    for said in (rf"{built.name}, in \d+ seconds", rf"built before: .*{built.name}"):
        command = [sys.executable, "-m", "cunorm", "build-cupy"]
        done = subprocess.run(command, env=damaged, check=True, capture_output=True, text=True)
        assert re.search(said, done.stdout)


def test_compilers_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/home/o'brien/g++")
    assert cli.run(["build-cupy"]) == 2
    assert """CXX is "/home/o'brien/g++"; it must be as a shell takes it: No closing""" in capsys.readouterr().err
    monkeypatch.setenv("CXX", " ")  # as good as none
    assert cli.run(["build-cupy"]) == 0


def test_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    assert cli.run(["build-cupy"]) == 0
    assert host.library().name in capsys.readouterr().out and host.library().exists()
    assert cli.run(["build-cupy"]) == 0
    assert capsys.readouterr().out.startswith("built before: ")
    assert cli.run(["info"]) == 0
    assert f"built for {sysconfig.get_config_var('SOABI')}" in capsys.readouterr().out
    assert cli.run(["build-cupy", "--remove"]) == 0
    assert capsys.readouterr().out.startswith("1 removed") and not list(tmp_path.glob("cupy/*.so"))
