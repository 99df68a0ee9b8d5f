"""TensorFlow's calls as an op of its own: they do what those by Python do, and launch without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from host_cases import CallOnCpu, Driver, launch_by, step
from test_tensorflow import *  # noqa: F403  (all of its tests, once more with compiled calls)

import cunorm
from cunorm import cli, execute
from cunorm.adapters.tensorflow import host, work
from cunorm.adapters.tensorflow.work import Backward, Forward
from cunorm.prepared import Output, Prepared, placed

del test_memory_is_kept_until_the_kernels_are_done  # noqa: F821  (by Python, on a stream that TensorFlow does not know)

_VARIABLE = "CUNORM_COMPILED_CALLS"


@pytest.fixture(autouse=True)
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(_VARIABLE, "1")
    host.build()
    yield
    host.native = None
    execute.forget_prepared()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """What launches instead of the CUDA driver, for tensors of the CPU."""
    found, had_driver = Driver(), host._has_driver
    execute.forget_prepared()
    launch_by(found, monkeypatch)
    monkeypatch.setattr(host, "_has_driver", False)
    yield found
    monkeypatch.undo()
    execute.forget_prepared()
    if had_driver:
        host._code.cunorm_use_driver(*host._driver_functions())


def random(*shape: int, dtype: str = "float32") -> Any:
    return tf.constant(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


def normalized(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    """Results, gradients of everything, and a batch norm by given statistics."""
    with tf.GradientTape() as tape:
        tape.watch([x, residual, weight, bias])
        y, total = cunorm.layer_norm(x, weight, bias, residual=residual, activation="silu")
        z = cunorm.rms_norm(y, activation="relu") + cunorm.gelu(total, bias=bias)
        running = {"running_mean": bias, "running_var": weight**2}
        z += cunorm.batch_norm(x, weight, training=False, **running)
        loss = tf.reduce_sum(z**3)
    return z, tape.gradient(loss, [x, residual, weight, bias])


def flat(results: Any) -> list[Any]:
    return [result.numpy() for result in tf.nest.flatten(results)]


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_launches_are_those_of_python(driver: Driver, function: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random(5, 12), random(5, 12) + 3, random(12), random(12) - 1

    def make() -> Callable[..., Any]:
        return tf.function(normalized) if function else normalized

    run = make()
    found = [flat(run(*inputs)) for _ in range(2)]
    launches, kinds = driver.launches, len(driver.functions)
    assert launches == 2 * kinds > 10 and not driver.pushed
    monkeypatch.setattr(host, "native", None)
    expected = flat(make()(*inputs))
    assert driver.launches == launches
    for results in found:
        assert all(np.array_equal(result, value) for result, value in zip(results, expected, strict=True))


def test_a_kind_is_prepared_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []

    def prepare(self: Forward, views: Sequence[Any]) -> Prepared:
        prepared.append([None if view is None else view.pointer & 15 for view in views])
        return original(self, views)

    original = Forward.prepare
    monkeypatch.setattr(Forward, "prepare", prepare)
    calls = tf.function(lambda x: cunorm.rms_norm(x), input_signature=[tf.TensorSpec([None, 4])])
    calls(random(3, 4))
    before = len(prepared)
    calls(random(3, 4) + 1)
    assert len(prepared) == before
    calls(random(5, 4))  # other sizes
    assert len(prepared) == before + 1
    kept = len(host._prepared)
    execute.forget_prepared()
    assert len(host._prepared) < kept - 1, "what was prepared is let go of"
    calls(random(3, 4))
    assert len(prepared) == before + 2


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 700
    with pytest.raises(tf.errors.InternalError, match="kernel on_cpu could not be launched: CUDA driver error 700"):
        cunorm.layer_norm(random(2, 8))
    assert not driver.pushed
    driver.status, driver.status_of_push = 0, 201
    with pytest.raises(
        tf.errors.InternalError, match=r"the kernels' context could not be launched: CUDA driver .* 201"
    ):
        cunorm.layer_norm(random(2, 8))


@pytest.mark.parametrize("nbytes", [64, 0])
def test_steps_are_what_python_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """What the driver is given: the config, and the addresses of inputs, of results and of scratch memory."""
    seen: list[list[int]] = []
    launched = step(driver.add(6, lambda pointers: seen.append(list(pointers))), (0, 1, 4, 8, 9, -1))
    launched = launched._replace(grid=7, block=(64, 2), shared_bytes=4096, attributes=((6, 1), (2, 1)))
    call = CallOnCpu(lambda pointers: None, [launched])
    call.scratch_offsets = [0, 48]
    outputs = (Output((4,), "float32"), None, None, None)
    monkeypatch.setattr(Forward, "prepare", lambda self, views: Prepared(outputs, ("cpu", 0), nbytes, call))
    x = random(4)
    cunorm.rms_norm(x)
    ((first, null, y, scratch, other, last),) = seen
    assert driver.configs == [((7, 1, 1), (64, 2, 1), 4096, None, [(6, 1), (2, 1)])]
    assert first == tensorflow_adapter._memory(x)[0] and null == last == 0  # noqa: F405
    assert y not in (0, first) and other == scratch + 48
    assert (scratch == 0) == (nbytes == 0)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    y = tf.function(cunorm.gelu)(tf.zeros(shape))
    assert y.shape == shape


def test_what_is_wrong_when_it_runs_is_an_error_of_tensorflow() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None])])
    def norm(x: Any, weight: Any) -> Any:
        return cunorm.layer_norm(x, weight)

    assert norm(tf.ones((2, 3)), tf.ones(3)).shape == (2, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ValueError: weight has shape \(4,\)"):
        norm(tf.ones((2, 3)), tf.ones(4))
    assert norm(tf.ones((2, 3)), tf.ones(3)).shape == (2, 3)


def test_what_is_wrong_when_it_is_called_is_python_s_error() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        cunorm.layer_norm(tf.ones((2, 3)), tf.ones(4))
    with pytest.raises(TypeError, match="int32"):
        cunorm.layer_norm(tf.ones((2, 3), tf.int32))


def test_from_many_threads() -> None:
    data = tf.data.Dataset.from_tensor_slices(random(64, 5, 6)).map(cunorm.layer_norm, num_parallel_calls=8)
    found = np.stack([y.numpy() for y in data])
    assert np.array_equal(found, np.stack([cunorm.layer_norm(x).numpy() for x in random(64, 5, 6)]))


def test_what_is_not_used_is_not_computed(driver: Driver) -> None:
    """The op has no effects, so TensorFlow leaves out what nobody needs, and computes what is the same once."""

    @tf.function
    def twice(x: Any) -> Any:
        cunorm.gelu(x)
        return cunorm.rms_norm(x) + cunorm.rms_norm(x)

    twice(random(3, 8))
    assert driver.launches == 1


# ---- As text, which other processes read.


@pytest.mark.parametrize(
    "call",
    [
        lambda x: cunorm.layer_norm(x, axis=(0, 1), eps=np.float32(1e-3)),
        lambda x: cunorm.rms_norm(x, axis=-2, activation="gelu_tanh"),
        lambda x: cunorm.group_norm(x, 3, data_format="NWC", return_stats=True),
        lambda x: cunorm.batch_norm(x, data_format="NWC", momentum=0.99, convention="keras", training=True),
        lambda x: cunorm.gelu(x, approximate="tanh"),
    ],
    ids=["axes", "activation", "groups", "batch", "gelu"],
)
def test_a_saved_model_computes_in_another_process(call: Callable[[Any], Any], tmp_path: Path) -> None:
    def gradient_of(y: Callable[[Any], Any], x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = y(x)
        return tape.gradient(result, x, output_gradients=x)

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4, 6])])
        def __call__(self, x: Any) -> Any:
            return tf.nest.flatten(call(x))[0]

        @tf.function(input_signature=[tf.TensorSpec([None, 4, 6])])
        def gradient(self, x: Any) -> Any:
            return gradient_of(self, x)

    x = random(5, 4, 6)
    tf.saved_model.save(Model(), str(tmp_path / "model"))
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import numpy, tensorflow as tf, cunorm.adapters.tensorflow\n"
        "tf.config.set_visible_devices([], 'GPU')\n"
        "model, x = tf.saved_model.load('model'), tf.constant(numpy.load('x.npy'))\n"
        "with tf.GradientTape() as tape:\n"
        "    tape.watch(x)\n"
        "    y = model(x)\n"
        "numpy.savez('found.npz', y, model.gradient(x), tape.gradient(y, x, output_gradients=x))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    y, dx, also_dx = np.load(tmp_path / "found.npz").values()
    assert np.array_equal(y, Model()(x))
    assert np.array_equal(dx, Model().gradient(x)) and np.array_equal(also_dx, dx)


def test_work_is_the_same_from_its_text() -> None:
    ops: list[Any] = [
        cunorm.row_norm.RowNorm.of((0, -1), 1e-7, "relu", False, 0.1),
        cunorm.channel_norm.ChannelNorm.of("group_norm", "NC...", 1e-5, None, 4),
        cunorm.pointwise.Pointwise.of("none"),
    ]
    for op in ops:
        for task in (Forward(op), Backward(op, (True, False, True), "bfloat16")):
            inputs, outputs = [None if place % 2 else 1 for place in range(len(task.names))], [None, 1, None, 1]
            found, given, computed = work.from_text(work.to_text(task, inputs, outputs))
            assert found == task and found.op is op and type(found) is type(task)
            assert placed([1] * 9, given) == inputs and computed == [False, True, False, True]


def test_numbers_may_be_of_any_type() -> None:
    """Calls that mean the same share an op, and it is stored with the numbers of the first."""
    x, eps = random(2, 4, 6), Fraction(3, 1024)
    axes: list[Any] = [range(1, 3), [np.int64(1), tf.constant(2)], (1, 2)]
    expected = cunorm.layer_norm(x.numpy(), axis=(1, 2), eps=0.0029296875, activation="relu")
    for axis in axes:
        assert np.array_equal(cunorm.layer_norm(x, axis=axis, eps=eps, activation="relu"), expected)
    for groups in (tf.constant(2), np.int8(2), 2):
        y = cunorm.group_norm(x, groups, eps=np.float32(eps))
        assert np.array_equal(y, cunorm.group_norm(x.numpy(), 2, eps=float(eps)))


# ---- What comes between.


@pytest.mark.parametrize("during", ["prepare", "run"])
def test_an_interrupted_call_is_interrupted_and_the_next_is_not(
    during: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x = random(3, 17)
    if during == "run":
        cunorm.layer_norm(x)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    with monkeypatch.context() as patched:

        def interrupted(*_: Any) -> Any:
            signal.raise_signal(signal.SIGINT)

        if during == "run":
            number, (prepared, places) = max(host._prepared.items())
            patched.setitem(host._prepared, number, (replace(prepared, run=interrupted), places))
        else:
            patched.setattr(Forward, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cunorm.layer_norm(x)
        assert not host._interrupts
    assert np.array_equal(cunorm.layer_norm(x), cunorm.layer_norm(x.numpy()))


def test_a_process_ends_while_a_pipeline_computes() -> None:
    code = """if True:
        import tensorflow as tf, cunorm
        x = tf.data.Dataset.from_tensors(tf.random.normal((256, 512))).repeat()
        pipeline = iter(x.map(cunorm.layer_norm, num_parallel_calls=2).prefetch(4))
        for _ in range(5):
            next(pipeline)"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | {_VARIABLE: "1"}, check=True, timeout=60)


# ---- Building.


def test_building_is_not_using_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "native", None)
    monkeypatch.setenv(_VARIABLE, "0")
    assert host.build() == host.library() and host.native is None
    monkeypatch.setenv(_VARIABLE, "1")
    host.load()
    assert host.native is not None


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"TensorFlow's calls can only .* install g\+\+, or set CXX"):
        host.build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"TensorFlow's calls do not compile:\n.*host.cpp"):
        host.build()
    assert cli.run(["build-tensorflow"]) == 2
    assert not list(tmp_path.glob("tensorflow/*.so"))


def test_what_was_built_is_found_by_the_next_process(tmp_path: Path) -> None:
    built = host.library()
    found = "import cunorm.adapters.tensorflow as t; assert (t.host.native is not None) == {}, t.host.native"
    environment = os.environ | {_VARIABLE: "1"}
    for code, variables in ((found.format(True), environment), (found.format(False), os.environ | {_VARIABLE: "0"})):
        subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / built.name).write_bytes(b"no library")
    command = [sys.executable, "-c", found.format(False)]
    damaged = environment | {"CUNORM_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=damaged, check=True, capture_output=True, text=True)
    assert "compiled calls of TensorFlow are not used" in done.stderr


def test_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    built = host.library()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / built.name).write_bytes(built.read_bytes())
    assert cli.run(["build-tensorflow"]) == 0
    assert built.name in capsys.readouterr().out
    assert cli.run(["info"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"compiled calls of TensorFlow\W+built for {re.escape(tf.__version__)}", printed)
    assert cli.run(["build-tensorflow", "--remove"]) == 0
    assert capsys.readouterr().out.startswith("1 removed") and not list(tmp_path.glob("tensorflow/*.so"))
