"""What a call gives the driver, seen by a driver that only writes it down. Needs no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cunorm import compiling, cuda, kernels, launch
from cunorm.plan import Device, Launch, Plan, plan
from cunorm.plan.device import NO_UNEVEN_CLUSTERS
from cunorm.problem import BackwardProblem, ForwardProblem, Matrix, Norm, Vector

FORWARD = ("x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd")
BACKWARD = ("dy", "dresidual_out", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias")
WORKSPACE, STREAM = 0x5000_0000, 0x7A00_0000_0077
FUNCTIONS = {kernel: 0x7B00_0000_0010 + place for place, kernel in enumerate(kernels.kernel_names())}
# Of CUlaunchAttributeID in cuda.h.
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6


class CompileException(Exception):
    """CuPy's exception of that name: not a RuntimeError."""


class CUDADriverError(RuntimeError):
    """CuPy's exception of that name, with what the driver says of any status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: what the driver says")


class Driver:
    """Stands in for the cupy module and for the driver, and keeps the bytes of every argument struct."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.context = {threading.get_ident(): 1}
        self.entered: list[int] = []
        self.called: list[str] = []  # the functions that launched
        self.attributes: list[dict[int, int]] = []
        self.given: list[tuple[int, ...]] = []  # the addresses that each launch was given
        self.status = 0
        self.gpu, self.version = Device("sm_90"), 12030
        driver = SimpleNamespace(
            CUDADriverError=CUDADriverError,
            ctxGetCurrent=self._current,
            launchKernel=functools.partial(self._launch, "launchKernel", {}),
            launchCooperativeKernel=lambda *arguments: self._launch(
                "launchCooperativeKernel", {COOPERATIVE: 1}, *arguments, 0
            ),
        )
        runtime = SimpleNamespace(free=self._make_context, driverGetVersion=lambda: self.version)
        compiler = SimpleNamespace(CompileException=CompileException)
        self.cuda = SimpleNamespace(driver=driver, runtime=runtime, compiler=compiler, Device=self._device)
        self.sizes: dict[str, int] = {}
        # As libcuda has it: a function of C, of which ctypes knows no types of arguments.
        self._called_from_c = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launch_ex)
        address = ctypes.cast(self._called_from_c, ctypes.c_void_p).value
        assert address
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def _current(self) -> int:
        return self.context.get(threading.get_ident(), 0)

    def _make_context(self, _: int) -> None:
        self.context[threading.get_ident()] = 1

    @contextlib.contextmanager
    def _device(self, index: int) -> Any:
        self.entered.append(index)
        yield

    def _launch(self, called: str, attributes: dict[int, int], function: int, *arguments: Any) -> None:
        *dimensions, stream, parameters, extra = arguments
        assert not extra
        self.called.append(called)
        self.attributes.append(attributes)
        address = ctypes.c_void_p.from_address(parameters).value
        assert address
        kernel = next(name for name, number in FUNCTIONS.items() if number == function)
        self.launched.append((kernel, dimensions, stream, ctypes.string_at(address, self.sizes[kernel])))
        self.given.append((parameters, address))

    def _launch_ex(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        """Reads CUlaunchConfig and CUlaunchAttribute where cuda.h has their fields."""
        *dimensions, stream, first, count = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        attributes = dict(struct.unpack("<i4xi60x", ctypes.string_at(first + 72 * i, 72)) for i in range(count))
        self._launch("cuLaunchKernelEx", attributes, function, *dimensions, stream, parameters, extra)
        self.given[-1] += (config, first)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    monkeypatch.setattr(cuda, "device", lambda index: fake.gpu)
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    monkeypatch.setattr(compiling, "compiled_function", lambda kernel, *_: SimpleNamespace(ptr=FUNCTIONS[kernel]))
    return fake


def matrix(rows: int, columns: int, dtype: str = "float32") -> Matrix:
    return Matrix(dtype, (columns if rows > 1 else 0,), (1,))


def forward(rows: int, columns: int, stats: bool) -> Plan:
    """Layer norm without statistics; or with them RMS norm of a sum."""
    x, vector = matrix(rows, columns), Vector("float32")
    residual, norm = (x, Norm(False, 1.0, "silu")) if stats else (None, Norm())
    matrices = (x, residual, x, residual)
    return plan(ForwardProblem((rows,), (columns,), *matrices, vector, None, stats, 1e-5, norm), Device())


def backward(rows: int, columns: int, wants: bool) -> Plan:
    x, vector = matrix(rows, columns), Vector("float32")
    dbias, norm = ("float32", Norm(False, 1.0, "silu")) if wants else (None, Norm())
    matrices = (x, x, x if wants else None, x)
    vectors = (vector, vector if wants else None)
    return plan(BackwardProblem((rows,), (columns,), *matrices, *vectors, "float32", dbias, norm), Device())


def decoded(item: Launch, packed: bytes) -> dict[str, Any]:
    """The struct's fields by name, as numbers; a pointer that the plan wants null must be so."""
    values = launch.argument_values(item)
    numbers = struct.unpack("<" + "".join("Q" if code == "P" else code for code, _ in values), packed)
    return {f"{place} {code}": (value, number) for place, ((code, value), number) in enumerate(zip(values, numbers))}


SHAPES = [(1000, 8), (1000, 4096), (8, 200_000), (4096, 70_000), (10, 3_000_000), (10, 10_000_000)]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_field_gets_what_the_plan_says(driver: Driver, shape: tuple[int, int], make: Any, flag: bool) -> None:
    chosen: Plan = make(*shape, flag)
    operands = FORWARD if make is forward else BACKWARD
    pointers = {name: 0x1000 * (place + 1) for place, name in enumerate(operands)}
    scratch = {item.name: WORKSPACE + item.offset for item in chosen.scratch}
    assert not set(scratch) & set(operands), "a name must mean one buffer"
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item)) for item in chosen.launches}
    call = launch.Call(chosen, operands, 0)
    for _ in range(2):
        call(list(pointers.values()), WORKSPACE, STREAM)

    assert len(driver.launched) == 2 * len(chosen.launches)
    for item, (function, dimensions, stream, packed) in zip(chosen.launches * 2, driver.launched):
        assert (function, dimensions, stream) == (
            item.kernel,
            [item.grid, 1, 1, *item.block, 1, item.shared_bytes],
            STREAM,
        )
        for value, number in decoded(item, packed).values():
            if value is None:
                assert number == 0
            elif isinstance(value, str):
                assert number == (pointers | scratch)[value]
            else:
                assert number == value


LAUNCHES = {
    "row_grid forward": (forward, (7, 3_000_000), ["row_grid_forward"]),
    "row_pipeline forward": (forward, (100, 1_000_000), ["row_pipeline_forward"]),
    "row_split forward": (forward, (100, 3_000_000), ["row_split_statistics", "split_merge", "row_split_forward"]),
    "row_block backward": (backward, (4096, 1024), ["row_block_backward", "column_sums"]),
    "row_pipeline backward": (backward, (100, 1_000_000), ["row_pipeline_backward"]),
    "row_stream backward": (backward, (1000, 300_001), ["row_stream_backward", "column_sums"]),
    "row_split backward": (
        backward,
        (1000, 2_000_001),
        ["row_split_gradient_sums", "column_sums", "row_split_backward", "column_sums"],
    ),
}


@pytest.mark.parametrize(
    ("arch", "version", "overlap"),
    [("sm_80", 13000, False), ("sm_90", 12020, False), ("sm_90", 12030, True), ("sm_120", 13000, True)],
)
@pytest.mark.parametrize("name", list(LAUNCHES))
def test_all_launches_but_the_first_overlap_where_they_can(
    driver: Driver, name: str, arch: str, version: int, overlap: bool
) -> None:
    make, shape, names = LAUNCHES[name]
    driver.gpu, driver.version = Device(arch), version
    chosen: Plan = make(*shape, False)
    assert [item.kernel for item in chosen.launches] == names
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item)) for item in chosen.launches}
    operands = FORWARD if make is forward else BACKWARD
    launch.Call(chosen, operands, 0)(range(1, len(operands) + 1), WORKSPACE, STREAM)

    assert [kernel for kernel, *_ in driver.launched] == names
    for place, item in enumerate(chosen.launches):
        together = {COOPERATIVE: 1} if item.cooperative else {}
        if overlap and place > 0:
            assert driver.called[place] == "cuLaunchKernelEx"
            assert driver.attributes[place] == {PROGRAMMATIC_STREAM_SERIALIZATION: 1} | together
        else:
            assert driver.called[place] == ("launchCooperativeKernel" if item.cooperative else "launchKernel")
            assert driver.attributes[place] == together


def test_each_call_launches_on_the_stream_it_is_given(driver: Driver) -> None:
    chosen = backward(4096, 1024, True)
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item)) for item in chosen.launches}
    call = launch.Call(chosen, BACKWARD, 0)
    for stream in (STREAM, 0, STREAM + 1):
        call(range(1, 11), WORKSPACE, stream)
    assert [stream for _, _, stream, _ in driver.launched] == [STREAM] * 2 + [0] * 2 + [STREAM + 1] * 2


def test_no_two_threads_share_what_a_launch_reads(driver: Driver) -> None:
    chosen = backward(4096, 1024, True)
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item)) for item in chosen.launches}
    call = launch.Call(chosen, BACKWARD, 0)
    call(range(1, 11), WORKSPACE, STREAM)
    thread = threading.Thread(target=call, args=(range(1, 11), WORKSPACE, STREAM))
    thread.start()
    thread.join()
    addresses = [address for given in driver.given for address in given]
    assert len(addresses) == len(set(addresses)) == 2 * (2 + 4) and 0 not in addresses


def test_a_launch_that_the_driver_refuses(driver: Driver) -> None:
    chosen = backward(4096, 1024, True)
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item)) for item in chosen.launches}
    driver.status = 719
    with pytest.raises(RuntimeError) as raised:
        launch.Call(chosen, BACKWARD, 0)(range(1, 11), WORKSPACE, STREAM)
    assert str(raised.value) == "kernel column_sums could not be launched: CUDA_ERROR_719: what the driver says"


def test_null_operands_stay_null(driver: Driver) -> None:
    chosen = forward(1000, 4096, False)
    (item,) = chosen.launches
    driver.sizes = {item.kernel: 8 * len(launch.argument_values(item))}
    given = {"x": 0x1000, "weight": 0x2000, "y": 0x4000}
    launch.Call(chosen, FORWARD, 0)([given.get(name, 0) for name in FORWARD], 0, STREAM)
    pointers = [number for code, (_, number) in decoded(item, driver.launched[0][3]).items() if code.endswith("P")]
    assert sorted(pointers, reverse=True) == [0x4000, 0x2000, 0x1000, *[0] * (len(pointers) - 3)]


def test_another_device_is_made_current_for_the_launch(driver: Driver) -> None:
    chosen = forward(1000, 4096, False)
    driver.sizes = {chosen.launches[0].kernel: 8 * len(launch.argument_values(chosen.launches[0]))}
    call = launch.Call(chosen, FORWARD, 3)
    driver.entered.clear()
    call([*range(1, 9)], 0, STREAM)
    assert driver.entered == []
    driver.context[threading.get_ident()] = 2  # that of another device
    call([*range(1, 9)], 0, STREAM)
    assert driver.entered == [3] and len(driver.launched) == 2


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    chosen = forward(1000, 4096, False)
    driver.sizes = {chosen.launches[0].kernel: 8 * len(launch.argument_values(chosen.launches[0]))}
    call = launch.Call(chosen, FORWARD, 0)
    thread = threading.Thread(target=call, args=([*range(1, 9)], 0, STREAM))
    thread.start()
    thread.join()
    assert len(driver.launched) == 1 and len(driver.context) == 2


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver()

    def refuse(**_: Any) -> None:
        raise CompileException("no cuda_fp16.h here")

    fake.RawModule = refuse  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "cupy", lambda: fake)
    monkeypatch.setattr(cuda, "device", lambda index: fake.gpu)
    chosen = forward(1000, 4096, False)
    message = "kernel row_block_forward does not compile for CUDA device 0:\nno cuda_fp16.h here\n"
    with pytest.raises(RuntimeError, match=message):
        launch.Call(chosen, FORWARD, 0)


@pytest.mark.parametrize(("major", "minor", "fine"), [(7, 0, False), (6, 1, False), (7, 5, True), (12, 0, True)])
def test_gpus_before_turing_are_refused(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, fine: bool) -> None:
    properties = {"major": major, "minor": minor, "multiProcessorCount": 10, "maxThreadsPerMultiProcessor": 1024}
    look_like(monkeypatch, properties)
    if fine:
        clusters = (5, 2, 1, 0) if major >= 9 else (0, 0, 0, 0)  # older ones have none, and are not asked
        assert cuda.device(0) == Device(f"sm_{major}{minor}", 10, 1024, clusters, NO_UNEVEN_CLUSTERS)
    else:
        message = rf"CUDA device 0 has compute capability {major}\.{minor}; it must be 7\.5"
        with pytest.raises(RuntimeError, match=message):
            cuda.device(0)


def look_like(monkeypatch: pytest.MonkeyPatch, properties: dict[str, int], **attributes: int) -> None:
    """Makes CUDA device 0 one of which the driver says this."""
    runtime = SimpleNamespace(getDeviceProperties=lambda index: properties, CUDARuntimeError=RuntimeError)
    device = SimpleNamespace(attributes=attributes)
    of_cupy = SimpleNamespace(runtime=runtime, Device=lambda index: device)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=of_cupy))
    monkeypatch.setattr(cuda, "_with_clusters", lambda device, index: replace(device, clusters=(5, 2, 1, 0)))
    monkeypatch.setattr(cuda, "device", functools.cache(cuda.device.__wrapped__))


@pytest.mark.parametrize(
    ("kilohertz", "bits", "rate"),
    [(3_201_000, 6144, 32.0e3), (2_619_000, 5120, 21.8e3), (0, 5120, Device.memory_rate)],
    ids=["H200", "H100", "not told"],
)
def test_how_fast_the_memory_is(monkeypatch: pytest.MonkeyPatch, kilohertz: int, bits: int, rate: float) -> None:
    properties = {"major": 9, "minor": 0, "multiProcessorCount": 132, "maxThreadsPerMultiProcessor": 2048}
    look_like(monkeypatch, properties, MemoryClockRate=kilohertz, GlobalMemoryBusWidth=bits)
    assert cuda.device(0).memory_rate == pytest.approx(rate, rel=0.005)


def test_no_launch_takes_shared_memory_from_another_of_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy has one function for one text, whose limit is that of the launch that needs most."""
    function = SimpleNamespace(max_dynamic_shared_size_bytes=48 * 1024, shared_size_bytes=1024, kernel=None)
    module = SimpleNamespace(get_function=lambda name: function)
    of_cupy = SimpleNamespace(
        Device=lambda index: contextlib.nullcontext(), compiler=SimpleNamespace(CompileException=CompileException)
    )
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(RawModule=lambda **_: module, cuda=of_cupy))
    (item,) = forward(1000, 4096, False).launches
    limits = []
    for shared_bytes in (100_000, 60_000, 150_000, 0):
        compiling._compile("", item.kernel, item.constants, shared_bytes, 1, 0)
        limits.append(function.max_dynamic_shared_size_bytes)
    assert limits == [100_000, 100_000, 150_000, 150_000]
