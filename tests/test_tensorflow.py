"""The TensorFlow adapter: eager and in tf.function; on the CPU through the reference, on a GPU through the kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import channel_cases
import numpy as np
import pytest
import tensorflow as tf
from cases import (
    ACTIVATED_NORMS,
    NORM_TOLERANCE,
    NORMS,
    Case,
    columns_shape,
    data,
    gelu_in_float64,
    public_forward,
    relative_error,
)

import cunorm
from cunorm import cuda, launch, on_cpu
from cunorm.plan import Plan
from cunorm.problem import Norm

tensorflow_adapter: Any = importlib.import_module("cunorm.adapters.tensorflow.adapter")

DEVICES = [pytest.param("CPU", id="cpu"), pytest.param("GPU", id="cuda", marks=pytest.mark.gpu)]
MODES = [pytest.param(False, id="eager"), pytest.param(True, id="function")]
EPS = 1e-5
DEVICES_CASES = Path(__file__).with_name("tensorflow_devices_cases.py")


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is not a test of the GPU is one of the CPU, also where TensorFlow sees a GPU."""
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else tf.device("CPU:0"):
        yield


def tensor(array: Any, device: str = "CPU") -> Any:
    if array is None:
        return None
    if not tf.config.list_physical_devices(device):
        pytest.skip("needs an NVIDIA GPU that TensorFlow sees")
    with tf.device(f"{device}:0"):
        return tf.identity(tf.constant(array))


def norm_and_gradients(*inputs: Any, dy: Any = None, axis: Any = -1) -> Any:
    """y, mean, rstd, and the gradients of what is not None."""
    present = [value for value in inputs if value is not None]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(present)
        y, mean, rstd = cunorm.layer_norm(*inputs, axis=axis, eps=EPS, return_stats=True)
    return y, mean, rstd, tape.gradient(y, present, output_gradients=dy), tape.gradient(mean, present[:1])


def assert_close(result: Any, expected: Any, dtype: str, scale: Any = None) -> None:
    assert isinstance(result, tf.Tensor) and result.dtype.name == dtype and result.shape == expected.shape
    assert relative_error(result.numpy(), expected, scale) <= NORM_TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
@pytest.mark.parametrize(
    ("shape", "axis", "affine"),
    [
        ((4, 33), (-1,), "both"),
        ((2, 3, 256), (-1,), "none"),
        ((5, 4, 6), (1, 2), "weight"),
        ((5, 4, 6), (0,), "bias"),
        ((3, 4, 5), (0, 2), "both"),
        ((3, 20000), (-1,), "both"),
    ],
    ids=str,
)
def test_values_and_gradients(
    device: str, function: bool, dtype: str, shape: tuple[int, ...], axis: tuple[int, ...], affine: str
) -> None:
    x, dy = data(1, shape, dtype), data(4, shape, dtype)
    weight, bias = (data(seed, columns_shape(shape, axis), dtype, outliers=False) for seed in (2, 3))
    arrays = (x, weight if affine in ("weight", "both") else None, bias if affine in ("bias", "both") else None)
    case = Case(*arrays, axis)
    expected, exact = case.expected(), case.expected_gradients(dy)

    given = [tensor(array, device) for array in arrays]
    run = tf.function(norm_and_gradients) if function else norm_and_gradients
    with tf.device(f"{device}:0"):  # else tf.function computes on a GPU wherever there is one
        y, mean, rstd, gradients, constant = run(*given, dy=tensor(dy, device), axis=axis)
    assert y.device == given[0].device and constant == [None]
    assert_close(y, expected.y, dtype)
    statistics_dtype = "float64" if dtype == "float64" else "float32"
    assert_close(mean, expected.mean, statistics_dtype, scale=np.abs(expected.mean) + 1 / expected.rstd)
    assert_close(rstd, expected.rstd, statistics_dtype)
    wanted = [value for value, array in zip(exact, arrays) if array is not None]
    assert len(gradients) == len(wanted)
    for result, value in zip(gradients, wanted):
        assert_close(result, value, dtype)
    for value, array in zip(given, arrays):
        assert array is None or value.numpy().tobytes() == array.tobytes(), "an input was modified"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", [*NORMS, *ACTIVATED_NORMS], ids=str)
def test_values_and_gradients_with_residual(device: str, function: bool, dtype: str, norm: Norm) -> None:
    x, residual, dy, added = (data(seed, (4, 3, 96), dtype, outliers=False) for seed in range(4))
    weight, bias = (data(seed, (96,), dtype, outliers=False) for seed in (4, 5))
    case = Case(x, weight, bias, norm=norm, residual=residual)
    expected, exact = case.expected(), case.expected_gradients(dy, added)

    def run(x: Any, residual: Any, weight: Any, bias: Any, dy: Any, added: Any) -> Any:
        inputs = (x, residual, weight, bias)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = public_forward(norm)(x, weight, bias, residual=residual, eps=EPS)
        return results, tape.gradient(results, inputs, output_gradients=(dy, added))

    with tf.device(f"{device}:0"):
        given = [tensor(array, device) for array in (x, residual, weight, bias, dy, added)]
        (y, residual_out), (dx, dresidual, *gradients) = (tf.function(run) if function else run)(*given)
    assert_close(y, expected.y, dtype, expected.z)
    assert residual_out.numpy().tobytes() == case.normalized.tobytes()
    np.testing.assert_array_equal(dx, dresidual)
    for result, value in zip((dx, *gradients), exact):
        assert_close(result, value, dtype)


@pytest.mark.parametrize("function", MODES)
def test_gradients_of_one_of_the_results(function: bool) -> None:
    arrays = [tensor(data(seed, (4, 8) if seed < 2 else (8,))) for seed in range(4)]

    def gradients(place: int) -> Any:
        x, residual, weight, bias = arrays
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            result = cunorm.rms_norm(x, weight, bias, residual=residual, activation="silu")[place]
        return tape.gradient(result, arrays)

    def composed() -> Any:
        x, residual, weight, bias = arrays
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            result = cunorm.rms_norm(x + residual, weight, bias, activation="silu")
        return tape.gradient(result, arrays)

    call = tf.function(gradients) if function else gradients
    for result, value in zip(call(0), composed()):
        np.testing.assert_array_equal(result, value)
    dx, dresidual, *vectors = call(1)
    np.testing.assert_array_equal(dx, np.ones((4, 8)))
    np.testing.assert_array_equal(dresidual, np.ones((4, 8)))
    assert not any(vector.numpy().any() for vector in vectors)


@pytest.mark.parametrize("function", MODES)
def test_statistics_of_rms_norm(function: bool) -> None:
    x = data(1, (4, 8))
    call = tf.function(cunorm.rms_norm) if function else cunorm.rms_norm
    _, rstd = call(tensor(x), return_stats=True)
    np.testing.assert_allclose(rstd, 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + 1e-6), rtol=1e-6)
    *_, rstd = call(tensor(x), residual=tensor(x), return_stats=True)
    assert rstd.shape == (4,)
    dx, dweight, dbias = cunorm.rms_norm_backward(tensor(x), tensor(x + x), None, rstd)
    assert dx.shape == (4, 8) and dweight.shape == (8,) and dbias is None


@pytest.mark.parametrize("axis", [-1, (0, 2)], ids=str)
def test_gradients_equal_finite_differences(axis: Any) -> None:
    columns = columns_shape((3, 4, 5), (axis,) if isinstance(axis, int) else axis)
    values = [tensor(data(i, s, "float64", outliers=False)) for i, s in enumerate([(3, 4, 5), columns, columns])]
    theoretical, numerical = tf.test.compute_gradient(lambda *v: cunorm.layer_norm(*v, axis=axis), values, delta=1e-6)
    for ours, theirs in zip(theoretical, numerical):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_unknown_shapes(device: str) -> None:
    """What is known of a shape while tf.function traces is known of the results, and checked."""
    specs = [tf.TensorSpec([None, None, 8]), tf.TensorSpec([None])]

    @tf.function(input_signature=specs)
    def model(x: Any, weight: Any) -> Any:
        y, mean, _ = cunorm.layer_norm(x, weight, return_stats=True)
        assert y.shape.as_list() == [None, None, 8] and mean.shape.as_list() == [None, None]
        dx, dweight = tf.gradients(y**2, [x, weight])
        assert dx.shape.as_list() == [None, None, 8] and dweight.shape.as_list() == [8]
        return y, dx

    weight = data(2, (8,))
    for shape in [(2, 3, 8), (1, 1, 8), (0, 3, 8)]:
        x = data(1, shape)
        y, dx = model(tensor(x, device), tensor(weight, device))
        assert y.shape == dx.shape == shape
        np.testing.assert_allclose(y, Case(x, weight).expected().y, rtol=1e-5, atol=1e-5)

    with pytest.raises(ValueError, match=r"weight has shape \(7,\); for x of shape \(None, None, 8\) it must be"):
        tf.function(lambda x: cunorm.layer_norm(x, tf.ones(7)), input_signature=specs[:1])(tensor(x))
    with pytest.raises(ValueError, match="x has an unknown number of dimensions"):
        tf.function(cunorm.layer_norm, input_signature=[tf.TensorSpec(None)])(tensor(x))
    # What only the values can show is TensorFlow's own error, with the same words.
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"weight has shape \(3,\)"):
        model(tensor(data(1, (2, 3, 8)), device), tensor(data(2, (3,)), device))


@pytest.mark.parametrize("function", MODES)
def test_variables_and_sparse_gradients(function: bool) -> None:
    x, weight, bias = (tf.Variable(data(i, s)) for i, s in enumerate([(4, 8), (8,), (8,)]))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(cunorm.layer_norm(x, weight, bias), [1, 1, 3])
        return tape.gradient(rows, [x, weight, bias])

    dx, _, dbias = (tf.function(gradients) if function else gradients)()
    np.testing.assert_array_equal(dbias, np.full(8, 3.0))
    assert not dx.numpy()[[0, 2]].any() and dx.numpy()[[1, 3]].any()


@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("name", ["cond", "cond in a loop", "loop", "map", "nested"])
def test_gradients_through_control_flow(name: str, function: bool) -> None:
    """TensorFlow differentiates copies of the graphs of branches and bodies, when their tensors are gone."""
    x, weight = tensor(data(1, (4, 8))), tf.Variable(data(2, (8,)))
    dy = tensor(data(3, (4, 8)))

    def norm(rows: Any) -> Any:
        return cunorm.layer_norm(rows, weight)

    def loop(body: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, rows: (i + 1, body(i, rows)), (0, x))[1]

    @tf.function
    def flow(condition: Any) -> Any:
        if name == "cond":
            return tf.cond(condition, lambda: norm(x), lambda: x)
        if name == "cond in a loop":
            return loop(lambda i, rows: tf.cond(i < 1, lambda: norm(rows) + x, lambda: rows))
        if name == "loop":
            return loop(lambda _, rows: norm(rows) + x)
        if name == "map":
            return tf.map_fn(norm, x)
        return tf.cond(condition, lambda: norm(norm(x) * x), lambda: x)

    def expected() -> Any:
        if name == "cond in a loop":
            return norm(x) + x
        if name == "loop":
            return norm(norm(x) + x) + x
        return norm(norm(x) * x) if name == "nested" else norm(x)

    def gradients(forward: Any, *arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(forward(*arguments) ** 2 * dy)
        return tape.gradient(loss, [x, weight])

    found = (tf.function(gradients) if function else gradients)(flow, tf.constant(True))
    for gradient, wanted in zip(found, gradients(expected)):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
def test_backward_without_tape(device: str, function: bool) -> None:
    arrays = data(1, (6, 32)), data(2, (32,))
    x, weight = (tensor(array, device) for array in arrays)
    dy = tensor(data(4, (6, 32)), device)
    _, mean, rstd, expected, _ = norm_and_gradients(x, weight, dy=dy)
    backward = tf.function(cunorm.layer_norm_backward) if function else cunorm.layer_norm_backward
    dx, dweight, dbias = backward(dy, x, weight, mean, rstd, output_mask=(True, True, False))
    np.testing.assert_array_equal(dx, expected[0])
    np.testing.assert_array_equal(dweight, expected[1])
    assert dbias is None
    assert cunorm.layer_norm_backward(dy, x, None, mean, rstd, output_mask=(False,) * 3) == (None,) * 3


def test_mixed_dtypes() -> None:
    x, weight, bias = tf.ones((4, 8), tf.bfloat16), tf.ones(8), tf.ones(8, tf.float16)
    *_, gradients, _ = norm_and_gradients(x, weight, bias)
    assert [gradient.dtype for gradient in gradients] == [tf.bfloat16, tf.float32, tf.float16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (4, 0)], ids=str)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    y, mean, _, gradients, _ = norm_and_gradients(
        tensor(np.ones(shape, np.float32), device), tensor(np.ones(shape[-1:], np.float32), device)
    )
    assert y.shape == shape and mean.shape == shape[:-1] and not gradients[1].numpy().any()


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op works on TensorFlow's own memory; an EagerTensor on the CPU shows its address as a buffer."""
    seen: list[Any] = []
    prepare = on_cpu.prepare_on_cpu

    def recording(*arguments: Any) -> Any:
        prepared = prepare(*arguments)

        def run(pointers: list[int], workspace: int, stream: int) -> None:
            seen.extend(pointers)
            prepared.run(pointers, workspace, stream)

        return dataclasses.replace(prepared, run=run)

    def address(value: Any) -> Any:
        return np.asarray(memoryview(value)).__array_interface__["data"][0]

    monkeypatch.setattr(on_cpu, "prepare_on_cpu", recording)
    x, bias = tensor(data(1, (64, 128))), tensor(data(2, (128,)))
    y = cunorm.layer_norm(x, None, bias, eps=0.375)  # a call that was not prepared before
    assert seen[:6] == [address(x), 0, 0, address(bias), address(y), 0]
    assert address(y) % 64 == 0, "TensorFlow aborts the process when it meets a tensor that is not aligned"


@pytest.mark.parametrize("function", MODES)
def test_errors(function: bool) -> None:
    def norm(x: Any, *arguments: Any, **options: Any) -> Any:
        call = lambda x: cunorm.layer_norm(x, *arguments, **options)  # noqa: E731
        return (tf.function(call) if function else call)(x)

    x = tf.ones((2, 8))
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); for x of shape \(2, 8\) it must be \(8,\)"):
        norm(x, tf.ones(7))
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        norm(x, axis=2)
    with pytest.raises(TypeError, match="x has dtype int32"):
        norm(tf.ones((2, 8), tf.int32))
    with pytest.raises(TypeError, match="x has dtype string"):
        norm(tf.constant(["a", "b"]))
    with pytest.raises(TypeError, match="bias has dtype bool"):
        norm(x, None, tf.ones(8, tf.bool))
    with pytest.raises(TypeError, match="weight is an ndarray; beside a TensorFlow x it must be a dense"):
        norm(x, np.ones(8, np.float32))
    with pytest.raises(TypeError, match="it must be a dense TensorFlow tensor; layer_norm and rms_norm have no norm"):
        cunorm.layer_norm(x, (8,))
    with pytest.raises(TypeError, match="bias is a float"):
        norm(x, None, 1.0)
    with pytest.raises(TypeError, match="out cannot be given for TensorFlow tensors"):
        norm(x, out=x)
    y, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    with pytest.raises(ValueError, match="dy has shape"):
        cunorm.layer_norm_backward(y[0], x, None, mean, rstd)


@pytest.mark.parametrize("function", MODES)
def test_second_derivatives_are_refused(function: bool) -> None:
    def second(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(cunorm.layer_norm(x) ** 3)
            first = tf.reduce_sum(inner.gradient(loss, x))
        return outer.gradient(first, x)

    with pytest.raises(NotImplementedError, match="second derivatives"):
        (tf.function(second) if function else second)(tf.ones((2, 8)))


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
def test_memory_is_kept_until_the_kernels_are_done(
    fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """On a GPU that is none: what was allocated for a call must be there when its stream is waited for."""
    allocated: dict[str, list[Any]] = {"uint8": [], "float32": []}
    kept: list[bool] = []
    empty = tf.raw_ops.Empty

    def recording(*, shape: Any, dtype: Any) -> Any:
        result = empty(shape=shape, dtype=dtype)
        allocated[dtype.name].append(weakref.ref(result))
        return result

    def call(*_: Any) -> Any:
        def run(pointers: list[int], workspace: int, stream: int) -> None:
            if fails:
                raise RuntimeError("the second launch failed")

        return run

    def synchronize(stream: int) -> None:
        assert stream == 7
        kept.extend(tensor() is not None for tensors in allocated.values() for tensor in tensors)

    of_cupy = SimpleNamespace(
        Device=contextlib.nullcontext,
        get_current_stream=lambda device: SimpleNamespace(ptr=7),
        runtime=SimpleNamespace(streamSynchronize=synchronize),
    )
    monkeypatch.setattr(tf.raw_ops, "Empty", recording)
    monkeypatch.setattr(launch, "Call", call)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=of_cupy))
    monkeypatch.setattr(tensorflow_adapter, "_memory", lambda tensor: (1 << 20, ("cuda", 0)))
    # So many rows that blocks leave partial sums in a workspace.
    x, weight, rows = tf.ones((2048, 1024)), tf.ones(1024), tf.ones(2048)
    with pytest.raises(RuntimeError, match="second launch") if fails else contextlib.nullcontext():
        cunorm.layer_norm_backward(x, x, weight, rows, rows)
    assert len(allocated["float32"]) == 3 and len(allocated["uint8"]) == 1
    assert kept == [True] * 4


@pytest.mark.gpu
def test_tensors_on_different_devices() -> None:
    with pytest.raises(RuntimeError, match="weight is on the CPU and x on CUDA device 0"):
        cunorm.layer_norm(tensor(data(1, (2, 8)), "GPU"), tensor(data(2, (8,))))


def run_on(device: str, *names: str) -> None:
    """Checks in a process of its own, with this process's environment: with compiled calls where this one has them."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(DEVICES_CASES), device, *names]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert tuple(done.stdout.split()) == names


def test_a_device_beside_another() -> None:
    names = re.findall(r"^def (check_\w+)", DEVICES_CASES.read_text(), re.MULTILINE)
    assert names
    run_on("CPU:1", *names)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["CPU:0", "GPU:1"])
def test_a_device_beside_a_gpu(device: str) -> None:
    if len(tf.config.list_physical_devices("GPU")) <= int(device == "GPU:1"):
        pytest.skip("needs as many NVIDIA GPUs that TensorFlow sees")
    run_on(device, "check_that_results_stay_on_the_device", "check_functions")


@pytest.mark.parametrize("function", MODES)
def test_tensors_that_a_function_captures(function: bool) -> None:
    """What is computed of them alone has a shape too."""
    x = tensor(data(1, (4, 8)))

    def norm() -> Any:
        y, mean, _ = cunorm.layer_norm(x, return_stats=True)
        assert y.shape == (4, 8) and mean.shape == (4,)
        return y

    np.testing.assert_array_equal((tf.function(norm) if function else norm)(), cunorm.layer_norm(x))


@pytest.mark.gpu
def test_order_with_tensorflows_stream() -> None:
    """The input is ready when the kernels read it, and the result when TensorFlow does, however much is queued."""
    x = tensor(data(1, (4096, 4096), outliers=False), "GPU")
    expected = cunorm.layer_norm(x)
    for _ in range(5):
        queued = x
        for _ in range(40):
            queued = queued * 1.0
        y = cunorm.layer_norm(queued) * 2.0
        np.testing.assert_array_equal(y, expected * 2.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
@pytest.mark.parametrize(("approximate", "biased"), [("none", False), ("none", True), ("tanh", True)])
def test_gelu(device: str, function: bool, dtype: str, approximate: str, biased: bool) -> None:
    x, bias, dy = data(1, (4, 3, 257), dtype), data(2, (257,), dtype, outliers=False), data(3, (4, 3, 257), dtype)
    expected = gelu_in_float64(x, bias if biased else None, dy, approximate)

    def gelu_and_gradients(x: Any, bias: Any, dy: Any) -> Any:
        inputs = [x] if bias is None else [x, bias]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = cunorm.gelu(x, approximate=approximate, bias=bias)
        without = cunorm.gelu_backward(dy, x, approximate=approximate, bias=bias)
        return y, tape.gradient(y, inputs, output_gradients=dy), without

    given = [tensor(array, device) for array in (x, bias if biased else None, dy)]
    run = tf.function(gelu_and_gradients) if function else gelu_and_gradients
    with tf.device(f"{device}:0"):
        y, gradients, without = run(*given)
    assert_close(y, expected[0], dtype)
    for result, other, value in zip(gradients, without if biased else (without,), expected[1:]):
        assert_close(result, value, dtype)
        assert result.numpy().tobytes() == other.numpy().tobytes()
    assert given[0].numpy().tobytes() == x.tobytes()
    with pytest.raises(TypeError, match="out cannot be given for TensorFlow tensors: they are immutable"):
        cunorm.gelu(given[0], out=given[0])


# ---- Instance, group and batch norm, on the CPU.


@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in channel_cases.NAMES), ("batch_norm", False)])
def test_channel_norms(name: str, training: bool, activation: str | None, dtype: str, function: bool) -> None:
    shape = channel_cases.Shape(name, (3, 4, 5, 6), "NHWC", 2 if name == "group_norm" else None)
    running_dtype = None if training else dtype
    case = shape.case(dtype, running_dtype=running_dtype, training=training, activation=activation)
    dy = data(4, case.x.shape, dtype)
    running = {}
    if case.running is not None:
        running = {"running_mean": tensor(case.running.mean), "running_var": tf.Variable(case.running.var)}

    def norm_and_gradients(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, weight, bias))
            results = getattr(cunorm, name)(x, weight=weight, bias=bias, **case.options, **running, return_stats=True)
        return results, tape.gradient(results[0], (x, weight, bias), output_gradients=dy)

    run = tf.function(norm_and_gradients) if function else norm_and_gradients
    results, gradients = run(*map(tensor, case.tensors.values()), tensor(dy))
    y, mean, rstd = (result.numpy() for result in results)
    statistics = () if case.running is None else case.running[:2]
    channel_cases.assert_forward(case, channel_cases.Results(y, mean, rstd, *statistics))
    channel_cases.assert_gradients(case, tuple(gradient.numpy() for gradient in gradients), dy)
    backward = getattr(cunorm, f"{name}_backward")
    kept = case.backward(channel_cases.Results(y, mean, rstd), dy).tensors
    same = backward(**{place: tensor(array) for place, array in kept.items()}, **case.options)
    for ours, value in zip(gradients, same):
        # TensorFlow's threads treat subnormals as zero.
        np.testing.assert_allclose(ours.numpy().astype(float), value.numpy().astype(float), rtol=0, atol=1e-37)


@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("kind", [tf.constant, tf.Variable])
def test_running_statistics_cannot_be_updated(kind: Any, function: bool) -> None:
    x, running = tf.ones((3, 4, 5)), {"running_mean": kind(tf.zeros(4)), "running_var": kind(tf.ones(4))}

    def norm(x: Any) -> Any:
        return cunorm.batch_norm(x, **running, training=True)

    message = (
        "running_mean and running_var cannot be updated in place for TensorFlow tensors: they are immutable; leave "
        "them out, and update them with the mean and variance (max(1 / rstd**2 - eps, 0)) of return_stats=True"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        (tf.function(norm) if function else norm)(x)
    with pytest.raises(TypeError, match="running_var is an ndarray; beside a TensorFlow x it must be a dense"):
        cunorm.batch_norm(x, running_mean=tf.zeros(4), running_var=np.ones(4, np.float32), training=False)


def test_channel_norms_of_a_batch_that_is_not_known() -> None:
    x = data(1, (3, 5, 6))
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, None, 6))])
    def norms(x: Any) -> Any:
        results = [
            cunorm.instance_norm(x, data_format="NWC", return_stats=True),
            cunorm.group_norm(x, 3, data_format="NWC", return_stats=True),
            cunorm.batch_norm(x, data_format="NWC", training=True, return_stats=True),
        ]
        shapes.extend([[tuple(result.shape) for result in every] for every in results])
        return results

    instance, group, batch = norms(tensor(x))
    statistics = [(None, 6), (None, 3), (6,)]
    assert shapes == [[(None, None, 6), statistic, statistic] for statistic in statistics]
    for results, expected in (
        (instance, cunorm.instance_norm(x, data_format="NWC", return_stats=True)),
        (group, cunorm.group_norm(x, 3, data_format="NWC", return_stats=True)),
        (batch, cunorm.batch_norm(x, data_format="NWC", training=True, return_stats=True)),
    ):
        for result, value in zip(results, expected):
            np.testing.assert_array_equal(result, value)
    with pytest.raises(tf.errors.InvalidArgumentError, match="in training there must be more than one"):
        norms(tensor(x[:1, :1]))


@pytest.mark.parametrize("num_groups", [1, 11, 49])
def test_groups_of_channels_that_are_not_known(num_groups: int) -> None:
    x = data(1, (2, 3, 2 * num_groups))
    norm = tf.function(
        lambda x: cunorm.group_norm(x, num_groups, data_format="N...C", return_stats=True),
        input_signature=[tf.TensorSpec([None, None, None])],
    )
    results = norm(tensor(x))
    for result, value in zip(results, cunorm.group_norm(x, num_groups, data_format="N...C", return_stats=True)):
        np.testing.assert_array_equal(result, value)
    if num_groups > 1:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"num_groups is {num_groups} and x has 3 channels"):
            norm(tensor(data(1, (2, 3, 3))))


@pytest.mark.parametrize("function", MODES)
def test_merged_statistics(function: bool) -> None:
    x = data(1, (6, 4, 5))
    expected = x.astype(np.float64).mean((0, 2)), x.astype(np.float64).var((0, 2))

    def merged(*parts: Any) -> Any:
        means, variances = zip(*map(cunorm.batch_norm_stats, parts))
        counts = [part.shape[0] * part.shape[2] for part in parts]
        stacked = tf.stack(means), tf.stack(variances), tf.constant(counts, tf.float32)
        return cunorm.merge_batch_norm_stats(means, variances, counts), cunorm.merge_batch_norm_stats(*stacked)

    for results in (tf.function(merged) if function else merged)(*map(tensor, (x[:1], x[1:3], x[3:]))):
        for result, value in zip(results, expected):
            assert result.dtype == tf.float32
            np.testing.assert_allclose(result, value, rtol=1e-5)


@pytest.mark.parametrize("function", MODES)
def test_merging_of_dtypes_that_differ(function: bool) -> None:
    """TensorFlow's operators convert nothing."""
    merge = tf.function(cunorm.merge_batch_norm_stats) if function else cunorm.merge_batch_norm_stats
    ones = tf.ones((2, 4))
    for counts in (tf.constant([1, 3]), tf.Variable([1, 3])):
        with pytest.raises(TypeError, match="counts has dtype int32; as means it must have dtype float32"):
            merge(ones, ones, counts)
    with pytest.raises(TypeError, match=r"counts has dtype int64; as means\[0\] it must have dtype float32"):
        merge([*ones], [*ones], [*tf.constant([1, 3], tf.int64)])
    with pytest.raises(TypeError, match="variances has dtype float64; as means it must have dtype float32"):
        merge(ones, tf.cast(ones, tf.float64), [1, 3])


def test_merging_where_sizes_are_unknown() -> None:
    def merged(first: Any, second: Any) -> Any:
        return cunorm.merge_batch_norm_stats([first, second], [second, first], [1, 3])

    ones, threes = tf.fill((4,), 1.0), tf.fill((4,), 3.0)
    for shape in (None, (None,)):
        spec = tf.TensorSpec(shape, tf.float32)
        mean, var = tf.function(merged, input_signature=[spec, spec])(ones, threes)
        assert mean.numpy().tolist() == [2.5] * 4 and var.numpy().tolist() == [2.25] * 4
    spec = tf.TensorSpec((None, 4), tf.float32)
    with pytest.raises(ValueError, match=r"means has shape \(None, 4\); it must have shape \(K, C\), with a K that is"):
        tf.function(cunorm.merge_batch_norm_stats).get_concrete_function(spec, spec, [1, 3])
