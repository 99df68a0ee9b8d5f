"""The calls of NVIDIA's nv_norms, and TensorFlow at large: policies, data sets, inputs of other kinds, memory."""

from __future__ import annotations

import doctest
import importlib
import resource
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import NORM_TOLERANCE, Case, columns_shape, data, relative_error
from test_tensorflow import on_the_cpu  # noqa: F401

import cunorm
from cunorm.adapters.tensorflow import fused_instance_norm, fused_layer_norm
from cunorm.text import kind_of

DEVICES = [pytest.param("CPU", id="cpu"), pytest.param("GPU", id="cuda", marks=pytest.mark.gpu)]
MODES = [pytest.param(False, id="eager"), pytest.param(True, id="function")]


def tensor(array: Any, device: str = "CPU") -> Any:
    if not tf.config.list_physical_devices(device):
        pytest.skip("needs an NVIDIA GPU that TensorFlow sees")
    with tf.device(f"{device}:0"):
        return tf.identity(tf.constant(array))


def close(result: Any, expected: Any, dtype: str) -> bool:
    assert result.shape == expected.shape and result.dtype.name == dtype
    return relative_error(result.numpy(), expected) <= NORM_TOLERANCE[dtype]


def assert_near(result: Any, expected: Any) -> None:
    """TensorFlow computes on a GPU wherever there is one, and what is expected comes from the CPU."""
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_doctests() -> None:
    failed, tried = doctest.testmod(importlib.import_module("cunorm.adapters.tensorflow.fused"))
    assert tried and not failed


# ---- fused_layer_norm.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("shape", "axis", "flat"),
    [
        ((4, 33), -1, False),
        ((5, 4, 6), [-2, -1], False),
        ((5, 4, 6), (1, 2), True),
        ((3, 4, 5, 6), [3, 1, 2], True),
        ((3, 4, 5, 6), [1, 3], True),
        ((5, 4, 6), 0, False),
    ],
    ids=str,
)
def test_fused_layer_norm(
    device: str, function: bool, dtype: str, shape: tuple[int, ...], axis: Any, flat: bool
) -> None:
    """Values, statistics and gradients, also with a gamma and beta that are flat, as theirs may be."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    columns = columns_shape(shape, axes)
    x, dy = data(1, shape, dtype, outliers=False), data(4, shape, dtype)
    gamma, beta = data(2, columns), data(3, columns)
    case = Case(x, gamma, beta, axes)
    expected, exact = case.expected(), case.expected_gradients(dy)

    def run(x: Any, gamma: Any, beta: Any, dy: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, gamma, beta))
            results = fused_layer_norm(x, gamma, beta, axis=axis, epsilon=1e-5)
        return results, tape.gradient(results, (x, gamma, beta), output_gradients=(dy, *map(tf.ones_like, results[1:])))

    vectors = [tensor(array.reshape(-1) if flat else array, device) for array in (gamma, beta)]
    with tf.device(f"{device}:0"):
        (y, mean, inv_std), gradients = (tf.function(run) if function else run)(
            tensor(x, device), *vectors, tensor(dy, device)
        )
    assert close(y, expected.y, dtype)
    assert mean.shape == inv_std.shape == (expected.mean.size,) and mean.dtype == inv_std.dtype == tf.float32
    np.testing.assert_allclose(mean, expected.mean.reshape(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inv_std, expected.rstd.reshape(-1), rtol=1e-5)
    assert close(gradients[0], exact[0], dtype)
    for gradient, value, vector in zip(gradients[1:], exact[1:], vectors):
        assert gradient.shape == vector.shape
        assert close(tf.reshape(gradient, columns), value, "float32")


def test_defaults() -> None:
    x, gamma, beta = data(1, (4, 3, 8)), data(2, (8,)), data(3, (8,))
    y, mean, inv_std = fused_layer_norm(x, gamma, beta)
    expected, theirs, rstd = cunorm.layer_norm(x, gamma, beta, axis=-1, eps=1e-3, return_stats=True)
    assert_near(y, expected)
    assert_near(mean, theirs.reshape(-1))
    assert_near(inv_std, rstd.reshape(-1))
    y, mean, _ = fused_instance_norm(x, gamma, beta)
    expected, theirs, _ = cunorm.instance_norm(x, gamma, beta, data_format="N...C", eps=1e-3, return_stats=True)
    assert_near(y, expected)
    assert_near(mean, theirs)


def test_fused_layer_norm_of_shapes_that_are_not_known() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None, 4, None]), tf.TensorSpec([None]), tf.TensorSpec([None])])
    def run(x: Any, gamma: Any, beta: Any) -> Any:
        y, mean, inv_std = fused_layer_norm(x, gamma, beta, axis=[2, 3])
        assert y.shape.as_list() == [None, None, 4, None] and mean.shape.as_list() == [None]
        return y, mean, inv_std, tf.gradients(y**2, [x, gamma])

    for shape in ((2, 3, 4, 5), (1, 1, 4, 2)):
        x, gamma, beta = data(1, shape), data(2, (4 * shape[-1],)), data(3, (4 * shape[-1],))
        y, mean, _, (dx, dgamma) = run(x, gamma, beta)
        expected = cunorm.layer_norm(x, gamma.reshape(4, -1), beta.reshape(4, -1), axis=(2, 3), eps=1e-3)
        assert_near(y, expected)
        assert mean.shape == (shape[0] * shape[1],) and dx.shape == shape and dgamma.shape == gamma.shape


@pytest.mark.parametrize("device", DEVICES)
def test_fused_norms_of_nothing(device: str) -> None:
    """The shapes of the tests of nv_norms."""
    x, gamma = tensor(np.ones((0, 0), np.float32), device), tensor(np.ones(0, np.float32), device)
    with tf.GradientTape() as tape:
        tape.watch((x, gamma))
        y, mean, inv_std = fused_layer_norm(x, gamma, gamma)
    assert y.shape == (0, 0) and mean.shape == inv_std.shape == (0,)
    assert [gradient.shape.as_list() for gradient in tape.gradient(y, (x, gamma))] == [[0, 0], [0]]
    x = tensor(np.ones((0, 0, 0, 0, 0), np.float32), device)
    for data_format in ("NC...", "N...C"):
        with tf.GradientTape() as tape:
            tape.watch((x, gamma))
            y, mean, inv_std = fused_instance_norm(x, gamma, gamma, data_format=data_format)
        assert y.shape == (0,) * 5 and mean.shape == inv_std.shape == (0, 0)
        assert [gradient.shape.as_list() for gradient in tape.gradient(y, (x, gamma))] == [[0] * 5, [0]]


# ---- fused_instance_norm.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize(
    ("data_format", "last"),
    [*((name, False) for name in ("NC...", "NCHW", "NCDHW")), *((n, True) for n in ("N...C", "NHWC", "NDHWC", None))],
)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 5, 3, 4, 6)], ids=str)
def test_fused_instance_norm(
    device: str, function: bool, data_format: str | None, last: bool, shape: tuple[int, ...]
) -> None:
    """A format says where the channels are, and nothing of the number of dimensions."""
    channels = shape[-1 if last else 1]
    x, dy = (data(seed, shape, outliers=False) for seed in (1, 4))
    gamma, beta = data(2, (channels,)), data(3, (channels,))
    options: dict[str, Any] = {"data_format": "N...C" if last else "NC..."}
    expected, mean, rstd = cunorm.instance_norm(x, gamma, beta, **options, eps=1e-5, return_stats=True)
    exact = cunorm.instance_norm_backward(dy, x, gamma, mean, rstd, **options)

    def run(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = fused_instance_norm(*inputs, data_format=data_format, epsilon=1e-5)
        return results, tape.gradient(results[0], inputs, output_gradients=tensor(dy, device))

    with tf.device(f"{device}:0"):
        results, gradients = (tf.function(run) if function else run)(
            *(tensor(array, device) for array in (x, gamma, beta))
        )
    assert results[1].shape == (2, channels)
    for result, value in zip((*results, *gradients), (expected, mean, rstd, *exact)):
        np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-4)


def test_errors_of_the_fused_norms() -> None:
    x, ones = tf.ones((2, 3, 8)), tf.ones(8)
    must = r"for x of shape \(2, 3, 8\) it must be \(24,\) or \(3, 8\)"
    with pytest.raises(ValueError, match=rf"gamma has shape \(7,\); {must}$"):
        fused_layer_norm(x, tf.ones(7), ones, axis=[1, 2])
    with pytest.raises(ValueError, match=rf"gamma has shape \(8, 3\); {must}$"):  # as many values in another order
        fused_layer_norm(x, tf.ones((8, 3)), ones, axis=[1, 2])
    with pytest.raises(ValueError, match=rf"beta has shape \(1, 3, 8\); {must}$"):
        fused_layer_norm(x, None, tf.ones((1, 3, 8)), axis=[1, 2])
    with pytest.raises(ValueError, match=r"beta has shape \(9,\); for x of shape \(2, 3, 8\) it must be \(8,\)$"):
        fused_layer_norm(x, ones, tf.ones(9))
    for norm in (fused_layer_norm, fused_instance_norm):
        with pytest.raises(TypeError, match=r"x is a builtins\.NoneType; it must be a NumPy, CuPy, PyTorch, JAX or"):
            norm(None, ones, ones)
    with pytest.raises(ValueError, match="axis 3 is out of range"):
        fused_layer_norm(x, ones, ones, axis=3)
    with pytest.raises(TypeError, match="axis must be an int"):
        fused_layer_norm(x, ones, ones, 1e-3)  # the order of another library
    with pytest.raises(TypeError, match="gamma has dtype int32"):
        fused_layer_norm(x, tf.ones(8, tf.int32), ones)
    with pytest.raises(TypeError, match="x is a RaggedTensor; it must be dense"):
        fused_layer_norm(tf.ragged.constant([[1.0], [1.0, 2.0]]), ones, ones)
    with pytest.raises(TypeError, match="beta is an IndexedSlices; it must be dense"):
        fused_instance_norm(x, ones, tf.IndexedSlices(ones, tf.range(8), tf.constant([8])))
    with pytest.raises(ValueError, match="data_format is 'CNHW'"):
        fused_instance_norm(x, ones, ones, "CNHW")
    with pytest.raises(TypeError, match="data_format is an int"):
        fused_instance_norm(x, ones, ones, 1)


@pytest.mark.parametrize("function", MODES)
def test_inputs_that_become_tensors(function: bool) -> None:
    x, gamma, beta = data(1, (4, 8)), data(2, (8,)), data(3, (8,))
    expected = cunorm.layer_norm(x, gamma, beta, eps=1e-3)
    for kind in (np.asarray, tf.Variable, keras.Variable, np.ndarray.tolist):
        inputs = [kind(array) for array in (x, gamma, beta)]
        call = lambda inputs=inputs: fused_layer_norm(*inputs)[0]  # noqa: E731
        assert_near((tf.function(call) if function else call)(), expected)


# ---- The adapter, as programs use it.


@pytest.mark.parametrize("function", MODES)
@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_variables_of_every_kind(kind: Any, function: bool) -> None:
    """Also as x, which decides for the framework."""
    x, weight = kind(data(1, (4, 8))), kind(data(2, (8,)))
    expected = cunorm.layer_norm(np.asarray(x), np.asarray(weight))

    def run() -> Any:
        return cunorm.layer_norm(x, weight)

    assert_near((tf.function(run) if function else run)(), expected)


@pytest.mark.parametrize("function", MODES)
def test_tensors_that_are_not_dense_are_refused(function: bool) -> None:
    x = tf.ones((2, 8))
    for sparse in (
        tf.IndexedSlices(x, tf.range(2), tf.constant([4, 8])),
        tf.RaggedTensor.from_row_lengths(tf.ones(5), [2, 3]),
        tf.sparse.from_dense(x),
    ):
        kind = kind_of(sparse)
        with pytest.raises(TypeError, match=f"x is {kind}; it must be a dense TensorFlow tensor"):
            (tf.function(cunorm.layer_norm) if function else cunorm.layer_norm)(sparse)
        with pytest.raises(TypeError, match=f"weight is {kind}; beside a TensorFlow x it must be a dense"):
            cunorm.rms_norm(x, sparse)
    with pytest.raises(TypeError, match="weight is an ndarray; beside a TensorFlow x"):
        cunorm.layer_norm(x, np.ones(8, np.float32))


def test_gradients_asked_for_more_than_once() -> None:
    x, weight = tf.Variable(data(1, (4, 8))), tf.Variable(data(2, (8,)))
    with tf.GradientTape(persistent=True) as tape:
        y = cunorm.layer_norm(x, weight)
        loss, other = tf.reduce_sum(y**2), tf.reduce_sum(y**3)
    first, again = tape.gradient(loss, [x, weight]), tape.gradient(loss, [x, weight])
    for ours, theirs in zip(first, again):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.allclose(tape.gradient(other, weight), first[1])


def test_many_calls_as_one_are_many() -> None:
    """Where TensorFlow would vectorize, it loops."""
    x = tf.constant(data(1, (4, 8)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = cunorm.layer_norm(x)
    jacobian = np.asarray(tape.jacobian(y, x))
    assert jacobian.shape == (4, 8, 4, 8) and jacobian[0, :, 0].any() and not jacobian[0, :, 1].any()
    assert_near(tf.vectorized_map(cunorm.layer_norm, x), y)
    with tf.autodiff.ForwardAccumulator(x, x), pytest.raises(NotImplementedError):
        cunorm.layer_norm(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision(dtype: str) -> None:
    """What a layer of one's own computes under a policy: x in sixteen bits, variables in float32, a scaled loss."""
    policy = keras.DTypePolicy(f"mixed_{dtype}")
    weight = tf.Variable(tf.ones(8), trainable=True)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    x = tf.cast(data(1, (16, 8), outliers=False), policy.compute_dtype)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = cunorm.layer_norm(x, weight)
            loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
            scaled = optimizer.scale_loss(loss)
        (gradient,) = tape.gradient(scaled, [weight])
        assert y.dtype.name == dtype and gradient.dtype == tf.float32
        return loss, gradient

    losses = []
    for _ in range(5):
        loss, gradient = step(x)
        optimizer.apply([gradient], [weight])
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]


def test_data_set() -> None:
    """A pipeline of tf.data in float64 whose last batch is smaller: one trace serves all batches."""
    x = data(1, (10, 6, 4), "float64")
    traces = []

    def norm(batch: Any) -> Any:
        traces.append(batch.shape.as_list())
        return cunorm.instance_norm(batch, data_format="NWC")

    batches = list(tf.data.Dataset.from_tensor_slices(x).batch(4).map(norm))
    assert [batch.shape[0] for batch in batches] == [4, 4, 2] and traces == [[None, 6, 4]]
    np.testing.assert_allclose(np.concatenate(batches), cunorm.instance_norm(x, data_format="NWC"), rtol=1e-12)


def test_xla_says_that_it_cannot() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="EagerPyFunc"):
        tf.function(cunorm.layer_norm, jit_compile=True)(tf.ones((2, 8)))


class Model(tf.Module):  # type: ignore[misc]
    """Two norms of one kind, whose gradients are those of each; also by a function of its own."""

    def __init__(self) -> None:
        self.weight = tf.Variable(data(2, (8,)))

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return cunorm.layer_norm(tf.nn.relu(cunorm.layer_norm(x, self.weight)), self.weight)

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[untyped-decorator]
    def gradients(self, x: Any) -> Any:
        return gradients_of(self, x)


def gradients_of(model: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    return tape.gradient(y, [x, model.weight], output_gradients=x)


@pytest.mark.parametrize("custom", [True, False], ids=["traced", "left out"])
def test_a_saved_model_computes_in_its_process(custom: bool, tmp_path: Path) -> None:
    model, x = Model(), tensor(data(1, (4, 8)))
    tf.saved_model.save(model, str(tmp_path), options=tf.saved_model.SaveOptions(experimental_custom_gradients=custom))
    loaded, expected = tf.saved_model.load(str(tmp_path)), gradients_of(model, x)
    np.testing.assert_array_equal(loaded(x), model(x))
    for found in (loaded.gradients(x), gradients_of(loaded, x)):
        for gradient, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(gradient, wanted)


def test_second_derivatives_of_a_saved_model_are_refused(tmp_path: Path) -> None:
    class Backward(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            _, mean, rstd = cunorm.layer_norm(x, return_stats=True)
            return cunorm.layer_norm_backward(x, x, None, mean=mean, rstd=rstd)[0]

    x = tensor(data(1, (4, 8)))
    tf.saved_model.save(Backward(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    with tf.GradientTape() as tape:
        tape.watch(x)
        dx = loaded(x)
    np.testing.assert_array_equal(dx, Backward()(x))
    with pytest.raises(tf.errors.InvalidArgumentError, match="cunorm has no second derivatives"):
        tape.gradient(dx, x)


@pytest.mark.parametrize("function", MODES)
def test_calls_without_end(function: bool) -> None:
    """Nothing that a call allocates outlives it. A megabyte kept of each would be 200 MB."""
    x, weight = tf.ones((512, 512)), tf.Variable(tf.ones(512))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = cunorm.layer_norm(x, weight)
        return tape.gradient(y, [x, weight])

    call = tf.function(step) if function else step

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(20):
        call(x)
    before = resident()
    for _ in range(200):
        call(x)
    assert resident() - before < 50 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("function", MODES)
def test_calls_without_end_on_a_gpu(function: bool) -> None:
    """TensorFlow's own count of its memory on the GPU, after 10,000 calls with gradients, is what it was."""
    x, weight = tensor(data(1, (64, 256)), "GPU"), tensor(data(2, (256,)), "GPU")

    def step(x: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, weight))
            y = cunorm.layer_norm(x, weight)
        return tape.gradient(y, (x, weight))

    call = tf.function(step) if function else step
    with tf.device("GPU:0"):
        for _ in range(10):
            call(x, weight)
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        for _ in range(10_000):
            call(x, weight)
        assert tf.config.experimental.get_memory_info("GPU:0")["current"] <= before + (1 << 16)


@pytest.mark.gpu
def test_nothing_is_copied_on_a_gpu() -> None:
    """A call takes the memory of its results and no more, from TensorFlow's allocator, and none of CuPy's."""
    import cupy

    x = tensor(data(1, (4096, 4096), outliers=False), "GPU")
    cunorm.layer_norm(x)
    pool, before = cupy.get_default_memory_pool().total_bytes(), tf.config.experimental.get_memory_info("GPU:0")
    tf.config.experimental.reset_memory_stats("GPU:0")
    y = cunorm.layer_norm(x)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    assert y.shape == x.shape and peak - before["current"] < 1.25 * (64 << 20)
    assert cupy.get_default_memory_pool().total_bytes() == pool


@pytest.mark.gpu
def test_kernels_run_on_cupys_current_stream() -> None:
    """Where CuPy has another stream for current, they wait for what is queued there, and TensorFlow for them."""
    import cupy

    x = tensor(data(1, (512, 4096), outliers=False), "GPU")
    expected = cunorm.layer_norm(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(200):
            busy *= 1.001
        y = cunorm.layer_norm(x)
        assert stream.done, "the result was handed over before the kernels were done"
        np.testing.assert_array_equal(y, expected)
