"""``cunorm.explain``: what it says is what is executed, its numbers fit together, and its diagram can be read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import cunorm
from cunorm import cuda, execute, gpus, launch
from cunorm.adapters.numpy import NumpyAdapter
from cunorm.explanation import OPS, Explanation
from cunorm.occupancy import occupancy
from cunorm.plan import Device, Plan, plan
from cunorm.prepared import NOWHERE
from cunorm.problem import View

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
# Problems of every strategy: op, shape, dtype, options.
CASES: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
    ("layer_norm", (4096, 8192), "float16", {}),
    ("layer_norm", (3, 5), "float32", {}),
    ("layer_norm", (1, 1), "float64", {}),
    ("layer_norm", (300_000, 10), "float16", {"residual": True}),
    ("layer_norm", (32768, 4097), "bfloat16", {"activation": "silu"}),
    ("layer_norm", (4096, 65536), "bfloat16", {"return_stats": True}),
    ("layer_norm", (1, 10_000_000), "float32", {}),
    ("layer_norm", (100, 1_000_000), "float16", {"activation": "gelu"}),
    ("rms_norm", (6, 700_000), "float32", {"residual": True}),
    ("layer_norm", (8, 30_000_000), "bfloat16", {}),
    ("layer_norm", (4, 40_000_000), "float32", {"bias": False}),
    ("layer_norm", (1024, 64, 512), "float32", {"axis": 0}),
    ("layer_norm", (0, 7), "float32", {}),
    ("layer_norm", (7, 0), "float32", {}),
    ("rms_norm", (524_288, 128), "bfloat16", {"weight": "float32", "residual": True}),
    ("rms_norm", (6, 50, 40), "float64", {"axis": (0, 2), "bias": True}),
    ("instance_norm", (2, 32, 64, 64), "float16", {}),
    ("instance_norm", (8, 32, 64, 128, 128), "float32", {"data_format": "NCDHW", "activation": "relu"}),
    ("instance_norm", (4, 8, 100, 100, 100), "float16", {}),
    ("instance_norm", (8, 200, 64, 64, 32), "float32", {"data_format": "N...C"}),
    ("group_norm", (8, 64, 64, 320), "float16", {"num_groups": 32, "data_format": "NHWC"}),
    ("group_norm", (8, 128, 256, 256), "float16", {"num_groups": 32, "activation": "silu"}),
    ("batch_norm", (64, 256, 56, 56), "float16", {"weight": "float32"}),
    ("batch_norm", (64, 256, 56, 56), "float32", {"training": False}),
    ("batch_norm", (64, 2048, 7, 7), "float16", {}),
    ("batch_norm", (64, 2048, 7, 7), "float16", {"training": False}),
    ("batch_norm", (16, 7, 7, 128), "float32", {"data_format": "N...C", "running": False}),
    ("gelu", (8192, 4096), "bfloat16", {}),
    ("gelu", (1000, 1001), "float16", {"bias": "float32", "approximate": "tanh"}),
]
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_120")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cuda_devices", lambda: ([], "none for this test"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    """Kernels that take 64 registers and 100 bytes of shared memory, known at once."""
    taken = SimpleNamespace(registers=64, spill_bytes=0, shared_bytes=100)
    monkeypatch.setattr("cunorm.explanation.launches.compile_resources", lambda *_: taken)


def like(shape: tuple[int, ...], dtype: str = "float16") -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype)


def every() -> list[Any]:
    return [
        pytest.param(op, shape, dtype, options, backward, id=f"{op}-{shape}-{dtype}-{options}-{backward}")
        for (op, shape, dtype, options), backward in itertools.product(CASES, (False, True))
    ]


# ---- The plan is the one that is executed.


def gradient_arguments(op: str, x: Any, results: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``op``_backward, from those of ``op`` and what it returned."""
    elsewhere = ("return_stats", "residual", "running_mean", "running_var")
    arguments = {name: value for name, value in given.items() if name not in elsewhere} | {"x": x}
    if op == "gelu":
        return arguments | {"dy": results}
    y, *others, rstd = results
    if op != "rms_norm":
        arguments["mean"] = others.pop()
    if "residual" in given:
        arguments["x"] = arguments["dresidual_out"] = others.pop()
    return {"weight": None, **arguments, "dy": y, "rstd": rstd}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("op", "x", "vector", "options"),
    [
        ("layer_norm", np.ones((40, 1024), np.float16), 1024, {}),
        ("layer_norm", np.ones((40, 1025), np.float32)[:, 1:], 1024, {"activation": "gelu"}),
        ("layer_norm", np.ones((12, 5, 64), np.float32).transpose(1, 0, 2), 64, {"residual": True}),
        ("layer_norm", np.ones((12, 40), np.float64), 12, {"axis": 0}),
        ("rms_norm", np.ones((7, 4096), np.float32), 4096, {"activation": "silu", "residual": True}),
        ("instance_norm", np.ones((2, 8, 9, 9), np.float32), 8, {}),
        ("group_norm", np.ones((2, 6, 6, 32), np.float16), 32, {"num_groups": 4, "data_format": "NHWC"}),
        ("group_norm", np.ones((2, 6, 6, 32), np.float16).transpose(0, 3, 1, 2), 32, {"num_groups": 8}),
        ("batch_norm", np.ones((4, 16, 5, 5), np.float32), 16, {"training": True}),
        ("batch_norm", np.ones((4, 16, 5, 5), np.float32), 16, {"training": False}),
        ("gelu", np.ones((33, 65), np.float16), 65, {}),
        ("gelu", np.ones((33, 65), np.float16), 65, {"bias": True, "approximate": "tanh"}),
    ],
)
def test_the_plan_is_the_one_of_a_call(
    op: str,
    x: Any,
    vector: int,
    options: dict[str, Any],
    backward: bool,
    fake_gpu: list[Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NumPy arrays are said to be on a GPU, which prepares everything and runs nothing."""
    view = NumpyAdapter.view

    def on_gpu(self: NumpyAdapter, tensor: Any, name: str) -> View:
        return view(self, tensor, name)._replace(device=("cuda", 0))

    monkeypatch.setattr(NumpyAdapter, "view", on_gpu)
    monkeypatch.setattr(gpus, "cuda_devices", lambda: (["this"], ""))
    monkeypatch.setattr(gpus, "measured_copy_rate", lambda *_: 1e12)
    given, explained = dict(options), dict(options)
    norm = op != "gelu"
    for name, usual in (("weight", norm), ("bias", norm and op != "rms_norm")):
        if options.get(name, usual):
            given[name] = explained[name] = np.ones(vector, np.float32)
    if "residual" in options:
        given["residual"] = explained["residual"] = np.ones(x.shape, x.dtype)
    if op == "batch_norm":
        given |= {"running_mean": np.zeros(vector, np.float32), "running_var": np.ones(vector, np.float32)}
    if norm:
        given["return_stats"] = explained["return_stats"] = True
    explanation = cunorm.explain(x, op, backward=backward, measure=False, **explained)
    assert not fake_gpu, "nothing is prepared to run"
    results = getattr(cunorm, op)(x, **given)
    if backward:
        fake_gpu.clear()
        getattr(cunorm, f"{op}_backward")(**gradient_arguments(op, x, results, given))
    assert fake_gpu == [explanation.plan]
    assert explanation.title == "this (sm_90)" and explanation.copy_rate == 1e12


# ---- Its numbers fit together.


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("op", "shape", "dtype", "options", "backward"), every())
def test_numbers(
    op: str,
    shape: tuple[int, ...],
    dtype: str,
    options: dict[str, Any],
    backward: bool,
    arch: str,
    no_compiler: None,
) -> None:
    found = cunorm.explain(like(shape, dtype), op, backward=backward, arch=arch, **options)
    assert found.op == (f"{op}_backward" if backward else op)
    assert found.plan == plan(found.problem, found.device) and found.arch == arch
    assert found.bytes_moved == found.problem.bytes_moved
    assert math.prod(found.area) == math.prod(shape)
    assert found.floor_seconds is not None and found.copy_rate is not None
    assert found.floor_seconds * found.copy_rate == pytest.approx(found.bytes_moved)
    assert found.seconds is None and found.r is None
    for item, planned in zip(found.launches, found.plan.launches, strict=True):
        assert (item.kernel, item.grid, item.block) == (planned.kernel, planned.grid, planned.block)
        assert item.constants == dict(planned.constants) and item.dynamic_shared_bytes == planned.shared_bytes
        assert item.threads <= 32 * item.warps < item.threads + 32
        assert item.blocks_at_once and item.blocks_at_once <= item.grid and item.waves and item.waves >= 1
        assert item.occupancy and 0 < item.occupancy <= 1
        if item.share is None:
            assert not item.bytes_read + item.bytes_written
        else:
            check_shares(item, found)
    if not found.bytes_moved:
        return
    moved = sum(item.bytes_read + item.bytes_written for item in found.launches)
    assert moved == found.bytes_moved + found.bytes_read_again, "all that must move is moved by some launch"
    again = "read again" in found.lives_in
    assert (found.bytes_read_again > 0) == again
    assert (found.bytes_through_shared > 0) >= ("shared memory" in found.lives_in)
    assert found.strategy.startswith(("row_split", "channel_split")) >= ("nowhere on chip" in found.lives_in)


def check_shares(item: Any, found: Explanation) -> None:
    """The shares of all blocks and turns are the whole area, and no turn is for nothing."""
    rows, columns = (-(-whole // part) for whole, part in zip(found.area, item.share))
    # A block's channels are those of one sample, so the last ones of each sample may be fewer than a share.
    samples = getattr(found.problem, "samples", 1) if found.area_of[0] == "channels" else 1
    assert item.grid * item.turns >= rows * columns
    assert item.grid * (item.turns - 1) < rows * columns * samples
    assert item.blocks_per_row <= columns
    assert (item.threads_per_row - 1) * item.thread_stride < item.threads
    assert item.vector_bytes in (2, 4, 8, 16)
    if "pipeline" in item.kernel or item.kernel.startswith(("row_block", "row_grid", "channel_slab", "channel_grid")):
        numbers = (
            item.vectors * item.vector_bytes // np.dtype("f2" if found.dtype == "bfloat16" else found.dtype).itemsize
        )
        threads = item.threads
        if "pipeline" in item.kernel:
            threads = int(item.constants["THREADS"])  # others are for what the blocks tell each other
            assert item.threads_per_row == threads // int(item.constants.get("CHANNEL_LANES", 1))
        assert numbers * threads + 64 >= math.prod(item.share), "threads hold their share"


def test_a_tensor_of_any_framework(no_compiler: None) -> None:
    """Strides and alignment are those of the tensor; what has no memory is taken as it would be."""
    tensor = torch.zeros(8, 64, 16, 16, dtype=torch.bfloat16)
    last = tensor.to(memory_format=torch.channels_last)
    of = {"op": "group_norm", "num_groups": 8, "arch": "sm_90"}
    assert cunorm.explain(tensor, **of).strategy == "row_block"
    assert cunorm.explain(last, **of).strategy != "row_block"
    assert cunorm.explain(last.to("meta"), **of).plan == cunorm.explain(last, **of).plan
    assert cunorm.explain(like(tensor.shape, torch.bfloat16), **of).plan == cunorm.explain(tensor, **of).plan
    memory = torch.zeros(64 * 1024 + 1)
    whole, late = (cunorm.explain(memory[i : i + 64 * 1024].view(64, 1024), arch="sm_90") for i in (0, 1))
    assert (whole.launches[0].constants["X_SHIFT"], late.launches[0].constants["X_SHIFT"]) == (0, 1)


def test_jax_arrays_and_their_shapes(no_compiler: None) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((16, 256), "bfloat16")
    expected = cunorm.explain(like((16, 256), "bfloat16"), arch="sm_90").plan
    assert cunorm.explain(x, arch="sm_90").plan == expected
    assert cunorm.explain(jax.ShapeDtypeStruct((16, 256), "bfloat16"), arch="sm_90").plan == expected
    seen = []
    jax.make_jaxpr(lambda x: seen.append(cunorm.explain(x, arch="sm_90").plan))(x)
    assert seen == [expected]


def test_tensorflow_tensors_and_what_stands_for_them(no_compiler: None) -> None:
    tf = pytest.importorskip("tensorflow")
    expected = cunorm.explain(like((16, 256), "bfloat16"), arch="sm_90").plan
    assert cunorm.explain(tf.zeros((16, 256), tf.bfloat16), arch="sm_90").plan == expected
    assert cunorm.explain(tf.TensorSpec((16, 256), tf.bfloat16), arch="sm_90").plan == expected
    seen = []
    tf.function(lambda x: seen.append(cunorm.explain(x, arch="sm_90").plan)).get_concrete_function(
        tf.TensorSpec((16, 256), tf.bfloat16)
    )
    assert seen == [expected]


def test_nothing_is_copied_or_written(no_compiler: None) -> None:
    x = np.full((4, 8), 3.0, np.float32)
    x.flags.writeable = False
    cunorm.explain(x)
    assert (x == 3).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((like((2, 3)), "conv"), {}, ValueError, "op is 'conv'; it must be one of layer_norm"),
        ((like((2, 3)),), {"arch": "sm_70"}, ValueError, "arch is 'sm_70'; it must be one of sm_75"),
        ((like((2, 3)),), {"axis": 2}, ValueError, "axis 2 is out of range"),
        ((like((2, 3)),), {"num_groups": 2}, ValueError, "num_groups is 2; it is for group_norm, not for layer_norm"),
        ((like((2, 3)), "gelu"), {"residual": True}, ValueError, "residual is True; it is for layer_norm, rms_norm"),
        ((like((2, 3)), "gelu"), {"weight": True}, ValueError, "weight is True; it is for"),
        ((like((2, 3)), "instance_norm"), {"training": False}, ValueError, "training is False; it is for batch_norm"),
        ((like((2, 4, 3)), "group_norm"), {"num_groups": 3}, ValueError, "num_groups"),
        ((like((2, 4, 3)), "batch_norm"), {"training": False, "running": False}, ValueError, "running_mean and"),
        ((like((2, 3), "int32"),), {}, TypeError, "int32"),
        ((like((2, 3)),), {"weight": "int8"}, TypeError, "int8"),
        ((like((None, 3)),), {}, ValueError, "every size must be known"),
        ((like((-1, 3)),), {}, ValueError, "every size must be known"),
        ((like(3),), {}, TypeError, "x is a types.SimpleNamespace; it must be"),
        ((np.zeros(4, ">f4"),), {}, TypeError, "x has dtype >f4, which is not in this machine's byte order"),
        ((np.ma.zeros(4, "f4"),), {}, TypeError, "x is a MaskedArray, whose mask would be ignored"),
        ((like((2, 3)),), {"weight": 1}, TypeError, "weight is an int; it must be a tensor, a bool or the name of"),
        ((like((2, 3)),), {"bias": np.float32}, TypeError, "bias is a type; it must be a tensor, a bool or the name"),
        (([1.0, 2.0],), {}, TypeError, "x is a builtins.list; it must be"),
        ((like((2, 4, 3)), "group_norm"), {}, TypeError, "^group_norm needs num_groups$"),
        ((like((2, 3)),), {"measure": True}, RuntimeError, "^measure=True needs an NVIDIA GPU: none for this test$"),
        ((like((2, 3)),), {"weight": np.ones(4, np.float32)}, ValueError, "weight has shape"),
    ],
)
def test_what_it_refuses(
    arguments: Any, options: dict[str, Any], error: type[Exception], message: str, no_compiler: None
) -> None:
    with pytest.raises(error, match=message.replace("[", r"\[")):
        cunorm.explain(*arguments, **options)


# ---- Times, by a CuPy that has no GPU.


class FakeMemory:
    """Memory of so many bytes, at a multiple of 512."""

    def __init__(self, count: int, *_: Any) -> None:
        self.array = np.zeros(count + 512, "uint8")
        address = self.array.__array_interface__["data"][0]
        self.nbytes, self.begin = count, address + -address % 512
        self.data = SimpleNamespace(ptr=self.begin, memset_async=lambda *_: None)

    def __getitem__(self, part: slice) -> int:
        return len(range(self.nbytes)[part])

    def __setitem__(self, part: slice, count: int) -> None:
        assert self[part] == count, "as many bytes are drawn as there is room for"


class FakeDevice:
    def __init__(self, index: int) -> None:
        assert index == 0
        self.attributes = {"L2CacheSize": 4096}

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        ("layer_norm", (6, 40), {}),
        ("layer_norm", (6, 40), {"residual": True, "return_stats": True}),
        ("rms_norm", (6, 40), {"weight": False}),
        ("group_norm", (2, 8, 3, 5), {"num_groups": 2}),
        ("batch_norm", (4, 8, 3, 5), {}),
        ("batch_norm", (4, 8, 3, 5), {"training": False}),
        ("gelu", (6, 40), {"bias": True}),
    ],
)
def test_times_are_taken(
    op: str,
    shape: tuple[int, ...],
    options: dict[str, Any],
    backward: bool,
    fake_gpu: list[Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call is timed with memory for every operand, x being the user's, and then the copy."""
    made: list[FakeMemory] = []
    called: list[dict[str, int]] = []

    def memory(*arguments: Any) -> FakeMemory:
        made.append(FakeMemory(*arguments))
        return made[-1]

    def call(chosen: Plan, operands: Any, index: int) -> Any:
        def run(pointers: Any, workspace: int, stream: int) -> None:
            assert len(pointers) == len(operands) and stream == 7
            called.append(dict(zip(operands, pointers)))

        return run

    now = itertools.count()
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(
        cuda,
        "cupy",
        lambda: SimpleNamespace(
            empty=memory,
            zeros=memory,
            asarray=lambda array: FakeMemory(array.size),
            empty_like=lambda other: memory(other.nbytes),
            copyto=lambda target, source: called.append({}),
            get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=made.clear),
            cuda=SimpleNamespace(
                Device=FakeDevice,
                Event=lambda: SimpleNamespace(record=lambda: None),
                get_current_stream=lambda: SimpleNamespace(ptr=7, synchronize=lambda: None),
                get_elapsed_time=lambda begin, end: 0.5 if next(now) < 15 else 0.25,
            ),
        ),
    )
    monkeypatch.setattr(gpus, "cuda_devices", lambda: (["this"], ""))
    monkeypatch.setattr(gpus, "measured_copy_rate", lambda *_: 1e12)
    monkeypatch.setattr("cunorm.explanation.seen", seen_on_gpu)
    monkeypatch.setattr("cunorm.gpus._LEAST_FLUSHED_BYTES", 0)
    execute.forget_prepared()
    x = np.zeros(math.prod(shape) + 1, np.float32)[1:].reshape(shape)
    found = cunorm.explain(x, op, backward=backward, **options)
    assert (found.seconds, found.copy_seconds, found.r) == (0.5e-3, 0.25e-3, 2.0)
    assert not made, "the memory is given back"
    calls, copies = called[:20], called[20:]
    assert all(calls) and not any(copies) and len(copies) == 20
    address = x.__array_interface__["data"][0]
    users = set() if backward and options.get("residual") else {"x"}
    assert all({name for name, pointer in given.items() if pointer == address} == users for given in calls)
    fields = {name for item in found.plan.launches for _, name in item.arguments if isinstance(name, str)}
    scratch = {item.name for item in found.plan.scratch}
    wanted = {"bias"} if backward else set()  # which counts only under an activation
    for name in fields - scratch - wanted:
        missing = not calls[0][name]
        assert missing == (name in absent(op, backward, options)), name
    assert all(pointer % 16 == 0 for name, pointer in calls[0].items() if name not in ("x", "dx", "y", "dy"))


def seen_on_gpu(tensor: Any, name: str) -> tuple[View, int | None]:
    return NumpyAdapter().view(tensor, name)._replace(device=NOWHERE), 0


def absent(op: str, backward: bool, options: dict[str, Any]) -> set[str]:
    """The operands that these calls have not."""
    names = set() if options.get("residual") else {"residual", "residual_out", "dresidual_out"}
    names |= {"weight", "dweight"} if options.get("weight") is False else set()
    names |= {"bias", "dbias"} if op == "rms_norm" else set()
    names |= {"mean", "rstd"} if not backward and not options.get("return_stats") else set()
    return names | ({"mean"} if op == "rms_norm" else set())


# ---- What a multiprocessor has room for.


@pytest.mark.parametrize(
    ("device", "threads", "registers", "shared", "expected"),
    [
        (Device(), 256, 32, 0, (8, 1.0, "threads")),
        (Device(), 256, 33, 0, (6, 0.75, "registers")),  # 40 are taken for each: 6.4 blocks
        (Device(), 512, 128, 0, (1, 0.25, "registers")),
        (Device(), 64, 16, 0, (32, 1.0, "threads")),
        (Device(), 32, 16, 0, (32, 0.5, "blocks")),
        (Device(), 128, 32, 113 * 1024, (2, 0.125, "shared memory")),
        (Device(), 128, 32, 227 * 1024, (1, 0.0625, "shared memory")),
        (Device("sm_75", 40, 1024), 128, 32, 32 * 1024, (2, 0.25, "shared memory")),
        (Device("sm_86", 84, 1536), 512, 32, 50 * 1024, (1, 1 / 3, "shared memory")),
    ],
)
def test_occupancy(device: Device, threads: int, registers: int, shared: int, expected: tuple[int, float, str]) -> None:
    blocks, share, limit = occupancy(device, threads, registers, shared)
    assert (blocks, limit) == (expected[0], expected[2]) and share == pytest.approx(expected[1])


# ---- How it shows itself.


def texts_of(root: Any) -> list[tuple[str, float, float, float, float]]:
    """The texts of an SVG, and about where each is: left, top, right, bottom."""
    found = []
    for item in root.iter(f"{SVG}text"):
        x, y, size = (float(item.get(name)) for name in ("x", "y", "font-size"))
        bold = 1.1 if item.get("font-weight") else 1.0
        found.append((item.text, x, y - 0.75 * size, x + 0.55 * bold * size * len(item.text), y + 0.2 * size))
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize(("op", "shape", "dtype", "options", "backward"), every())
def test_the_diagram(
    op: str,
    shape: tuple[int, ...],
    dtype: str,
    options: dict[str, Any],
    backward: bool,
    arch: str,
    no_compiler: None,
) -> None:
    """It is XML that refers to nothing outside; no text leaves it, lies over another, or over a box that is filled."""
    found = cunorm.explain(like(shape, dtype), op, backward=backward, arch=arch, **options)
    found = dataclasses.replace(found, seconds=5e-5, copy_seconds=4e-5)
    svg = found.svg()
    root = ElementTree.fromstring(svg)
    assert {item.tag.removeprefix(SVG) for item in root.iter()} <= {"svg", "title", "text", "rect", "polygon"}
    assert "href" not in svg and "url(" not in svg and svg.count("http") == 1
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    texts = texts_of(root)
    for text, left, top, right, bottom in texts:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, text
    for (text, left, top, right, bottom), (other, *there) in itertools.combinations(texts, 2):
        apart = right <= there[0] or there[2] <= left or bottom <= there[1] or there[3] <= top
        assert apart, (text, other)
    for box in root.iter(f"{SVG}rect"):
        if box.get("x") is None or float(box.get("height")) > 20:  # the paper, and the boxes of launches
            continue
        x, y, wide, high = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert x + wide <= width and y + high <= height
        for text, left, top, right, bottom in texts:
            assert right <= x or x + wide <= left or bottom <= y + 1 or y + high <= top + 1, text
    words = " ".join(text for text, *_ in texts)
    assert found.strategy in words and dtype in words and "r = 1.250" in words
    for item in found.launches:
        assert item.kernel in words


@pytest.mark.parametrize("rows", [1, 16])
def test_gradients_of_rows_that_are_read_twice(rows: int, no_compiler: None) -> None:
    """A block has one tile of the columns, whatever the chunks are that it merges."""
    found = cunorm.explain(like((rows, 100_001), "float64"), backward=True, arch="sm_90")
    main = next(item for item in found.launches if item.kernel == "row_split_backward")
    assert main.blocks_per_row == 98 and main.block_stride == 1
    assert ElementTree.fromstring(found.svg()) is not None


def test_what_a_notebook_shows(no_compiler: None) -> None:
    found = cunorm.explain(like((64, 64)))
    html = found._repr_html_()
    assert html.startswith("<svg") and 'fill="white"' not in html and 'color="black"' not in html
    assert "H200 (sm_90), for want of a GPU here: no CUDA device (none for this test)" in html
    assert "<script" not in html
    assert 'fill="white"' in found.svg()


def test_what_a_terminal_shows(no_compiler: None) -> None:
    found = cunorm.explain(like((8, 64, 32, 32)), "group_norm", num_groups=8, backward=True, arch="sm_80")
    text = str(found)
    assert text.startswith("group_norm_backward of 8x64x32x32 float16 on A100 80 GB (sm_80)\n")
    assert "64 rows of 8192 columns; 8 samples of 64 channels of 1024 points, 8 channels a mean" in text
    assert "row_block_backward" in text and "column_sums" in text and "VECTORS=" in text
    assert "measured" not in text
    measured = dataclasses.replace(found, seconds=3e-6, copy_seconds=2e-6)
    assert "3 µs; a copy takes 2 µs: r = 1.500" in str(measured)
    assert "no: there is no room" in str(dataclasses.replace(found, failure="there is no room"))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    def absent(*_: Any) -> Any:
        raise RuntimeError("CuPy is not installed")

    monkeypatch.setattr("cunorm.explanation.launches.compile_resources", absent)
    found = cunorm.explain(like((4, 4096)))
    assert found.launches[0].registers is None and found.launches[0].waves is None
    assert found.compiler == "CuPy is not installed" and "unknown (needs CuPy's NVRTC)" in str(found)
    ElementTree.fromstring(found.svg())


def test_what_the_compiler_says(no_gpu: None) -> None:
    (item,) = cunorm.explain(like((4096, 8192)), arch="sm_90").launches
    assert item.registers and 16 <= item.registers <= 64 and item.spill_bytes == 0
    assert item.blocks_per_multiprocessor == 4 and item.blocks_at_once == 132 * 4


def test_clusters_of_ten_that_run_at_once(no_gpu: None) -> None:
    """Where ten blocks are a cluster, a GPU has room for fewer blocks than its multiprocessors would have alone."""
    x = like((8, 320, 80, 80))
    seen = cunorm.explain(x, "group_norm", num_groups=32, activation="silu", backward=True, arch="sm_90")
    first = seen.launches[0]
    assert first.cluster == 10
    assert first.blocks_per_multiprocessor == 3
    assert first.blocks_at_once == 300 < 3 * 132


def test_import_takes_nothing_more() -> None:
    code = "import sys, cunorm; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    taken = {"matplotlib", "pandas", "rich", "html", "cunorm.figure", "cunorm.bench", "cunorm.cli"}
    assert not taken & set(done.stdout.split())


def test_every_op_has_an_explanation() -> None:
    assert set(OPS) == {name.removesuffix("_backward") for name in cunorm.__all__ if name.endswith("_backward")}


# ---- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        ("layer_norm", (4096, 4096), {"residual": True}),
        ("rms_norm", (4096, 4097), {}),
        ("instance_norm", (2, 32, 64, 64), {}),
        ("group_norm", (2, 64, 64, 32), {"num_groups": 8, "data_format": "NHWC"}),
        ("batch_norm", (8, 64, 32, 32), {}),
        ("batch_norm", (8, 64, 32, 32), {"training": False}),
        ("gelu", (4096, 4096), {"bias": True}),
    ],
)
def test_times(op: str, shape: tuple[int, ...], options: dict[str, Any], backward: bool) -> None:
    import cupy

    x = cupy.random.default_rng(0).standard_normal(shape, "float32")
    before = x.copy()
    found = cunorm.explain(x, op, backward=backward, **options)
    assert found.copy_rate_is == "a copy's rate, just measured" and not found.failure
    assert found.seconds and found.copy_seconds and found.r and found.floor_seconds
    assert 0.3 < found.r < 100 and found.seconds > found.floor_seconds / 2
    assert cupy.array_equal(x, before)
    assert cunorm.explain(x, op, backward=backward, measure=False, **options).seconds is None
    assert cunorm.explain(like(shape, "float32"), op, backward=backward, measure=True, **options).r


@pytest.mark.gpu
def test_a_torch_tensor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a strided one is executed, and explained."""
    made: list[Plan] = []
    real = launch.Call

    def spy(chosen: Plan, *arguments: Any) -> Any:
        made.append(chosen)
        return real(chosen, *arguments)

    monkeypatch.setattr(launch, "Call", spy)
    x = torch.randn(8, 64, 16, 16, device="cuda").to(memory_format=torch.channels_last)[1:]
    found = cunorm.explain(x, "group_norm", num_groups=8, weight=False, bias=False, measure=False)
    execute.forget_prepared()
    cunorm.group_norm(x, 8)
    assert made == [found.plan]
