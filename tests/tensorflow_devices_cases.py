"""Run by test_tensorflow.py in a process of its own, in which TensorFlow has several devices: the `check_` functions.

``python tensorflow_devices_cases.py CPU:1 check_functions ...`` of tensors on the second of two CPU devices; or on
another device that is not TensorFlow's default one.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf
from cases import data

import cunorm
from cunorm.adapters.tensorflow import fused_instance_norm, fused_layer_norm

DEVICE = sys.argv[1]


def given(place: str) -> Any:
    """x, residual, weight and a variable, on this device."""
    shapes = (3, 4, 8), (3, 4, 8), (8,)
    with tf.device(place):
        x, residual, weight = (tf.constant(data(i, shape, outliers=False) ** 2 + 0.1) for i, shape in enumerate(shapes))
        return x, residual, weight, tf.Variable(weight)


def with_gradients(x: Any, residual: Any, weight: Any, bias: Any) -> list[Any]:
    """Those of a loss that is computed on the default device."""
    inputs = (x, residual, weight, bias)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y, residual_out, mean, rstd = cunorm.layer_norm(x, weight, bias, residual=residual, return_stats=True)
        loss = tf.reduce_sum(y**3) + tf.reduce_sum(residual_out**2)
    return [y, residual_out, mean, rstd, *tape.gradient(loss, inputs)]


def of_some_rows(x: Any, residual: Any, weight: Any, bias: Any) -> list[Any]:
    """Whose cotangents are tf.IndexedSlices."""
    with tf.GradientTape() as tape:
        tape.watch((x, bias))
        rows = tf.gather(cunorm.gelu(x, bias=bias), [1, 1, 2])
    return list(tape.gradient(rows, (x, bias)))


def without_gradients(x: Any, residual: Any, weight: Any, bias: Any) -> list[Any]:
    running = {"running_mean": weight, "running_var": bias}
    y, rstd = cunorm.rms_norm(x, weight, return_stats=True)
    return [
        *(y, rstd, *cunorm.rms_norm_backward(residual, x, weight, rstd)[:2]),
        *cunorm.batch_norm(x, weight, data_format="NWC", **running, training=False, return_stats=True),
        *cunorm.batch_norm_stats(x),
        *fused_layer_norm(x, np.ones(8, np.float32), bias),
        *fused_layer_norm(x, np.ones(32, np.float32), None, axis=[1, 2]),
        *fused_instance_norm(x, np.ones(8, np.float32), bias),
    ]


EVERY = [with_gradients, of_some_rows, without_gradients]


def assert_near(found: list[Any], expected: list[Any]) -> None:
    for result, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)


def check_that_results_stay_on_the_device() -> None:
    assert not tf.constant(1.0).backing_device.endswith(DEVICE), "the default device is another"
    for function in EVERY:
        inputs = given(DEVICE)
        found = function(*inputs)
        assert [result.backing_device for result in found] == [inputs[0].backing_device] * len(found)
        with tf.device(DEVICE):
            assert_near(found, function(*inputs))


def check_functions() -> None:
    for function in EVERY:
        inputs = given(DEVICE)
        with tf.device(DEVICE):
            assert_near(tf.function(function)(*inputs), function(*inputs))


def check_memory_that_devices_share() -> None:
    """That of the CPU: nothing has to be copied, so nothing is refused, and all is differentiated."""
    (x, residual, _, _), (*_, weight, bias) = given("CPU:1"), given("CPU:0")
    found = with_gradients(x, residual, weight, bias)
    assert {result.backing_device for result in found} == {x.backing_device}
    assert_near(found, with_gradients(*given("CPU:1")))


def check_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = given("CPU:0")[0]
    with strategy.scope():
        weight = tf.Variable(tf.ones(8))

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = cunorm.layer_norm(tf.identity(x), weight)
            loss = tf.reduce_sum(y**3)
        (gradient,) = tape.gradient(loss, [weight])
        return y, tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)

    y = cunorm.layer_norm(x)
    dweight = 2 * tf.reduce_sum(3 * y**3, (0, 1))
    for run in (strategy.run, tf.function(strategy.run)):
        found, gradients = map(strategy.experimental_local_results, run(step))
        assert [result.backing_device[-5:] for result in (*found, *gradients)] == ["CPU:0", "CPU:1"] * 2
        for result, gradient in zip(found, gradients):
            assert_near([result], [y])
            np.testing.assert_allclose(gradient, dweight, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    if DEVICE == "CPU:1":
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for name in sys.argv[2:]:
        globals()[name]()
        print(name)
