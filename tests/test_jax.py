"""The JAX adapter: eager, traced and differentiated; on the CPU through the reference, on a GPU through the kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
from typing import Any

import channel_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from jax_cases import DEVICES, equations_in, to_jax

import cunorm
from cunorm.problem import Norm

jax_call: Any = importlib.import_module("cunorm.adapters.jax.call")

DTYPES = list(NORM_TOLERANCE)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _x64(request: pytest.FixtureRequest) -> Any:
    """JAX has float64 only on request, and is otherwise tested as it is by default."""
    parameters = getattr(request.node, "callspec", None)
    with jax.enable_x64(parameters is not None and parameters.params.get("dtype") == "float64"):
        yield


def problem(shape: tuple[int, ...], dtype: str, axis: tuple[int, ...], affine: str) -> tuple[Any, Any, Any]:
    x = data(1, shape, dtype)
    weight, bias = (data(seed, columns_shape(shape, axis), dtype, outliers=False) for seed in (2, 3))
    return x, weight if affine in ("weight", "both") else None, bias if affine in ("bias", "both") else None


def assert_close(result: Any, expected: Any, dtype: str, scale: Any = None) -> None:
    assert result.dtype.name == dtype and result.shape == expected.shape
    assert relative_error(np.asarray(result), expected, scale) <= NORM_TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
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
    device: str, jit: bool, dtype: str, shape: tuple[int, ...], axis: tuple[int, ...], affine: str
) -> None:
    arrays = problem(shape, dtype, axis, affine)
    dy = data(4, shape, dtype)
    case = Case(*arrays, axis)
    expected, exact = case.expected(), case.expected_gradients(dy)

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        return cunorm.layer_norm(x, weight, bias, axis=axis, eps=EPS, return_stats=True)

    def gradient(dy: Any, *inputs: Any) -> Any:
        return jax.vjp(lambda *inputs: forward(*inputs)[0], *inputs)[1](dy)

    given = [to_jax(array, device) for array in arrays]
    y, mean, rstd = (jax.jit(forward) if jit else forward)(*given)
    assert y.devices() == given[0].devices()
    assert_close(y, expected.y, dtype)
    statistics_dtype = "float64" if dtype == "float64" else "float32"
    assert_close(mean, expected.mean, statistics_dtype, scale=np.abs(expected.mean) + 1 / expected.rstd)
    assert_close(rstd, expected.rstd, statistics_dtype)
    gradients = (jax.jit(gradient) if jit else gradient)(to_jax(dy, device), *given)
    for result, array, value in zip(gradients, arrays, exact):
        if array is None:
            assert result is None
        else:
            assert_close(result, value, dtype)
    for array, original in zip(given, arrays):
        assert array is None or np.asarray(array).tobytes() == original.tobytes(), "an input was modified"


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("axis", [(-1,), (0, 2)], ids=str)
def test_gradients_equal_finite_differences(dtype: str, axis: tuple[int, ...]) -> None:
    columns = columns_shape((3, 4, 5), axis)
    shapes = [(3, 4, 5), columns, columns]
    arrays = [jnp.asarray(data(i, shape, dtype, outliers=False)) for i, shape in enumerate(shapes)]
    towards = [jnp.asarray(data(5 + i, a.shape, dtype, outliers=False)) for i, a in enumerate(arrays)]

    def loss(*arrays: Any) -> Any:
        return jnp.sin(cunorm.layer_norm(*arrays, axis=axis)).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for i, gradient in enumerate(gradients):
        ahead, behind = (loss(*arrays[:i], arrays[i] + step * towards[i], *arrays[i + 1 :]) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient * towards[i]).sum(), (ahead - behind) / 2e-6, rtol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("norm", [*NORMS, *ACTIVATED_NORMS], ids=str)
def test_values_and_gradients_with_residual(device: str, jit: bool, dtype: str, norm: Norm) -> None:
    shape = (4, 3, 96)
    x, residual, dy, added = (data(seed, shape, dtype, outliers=False) for seed in range(4))
    weight, bias = (data(seed, shape[-1:], dtype, outliers=False) for seed in (4, 5))
    case = Case(x, weight, bias, norm=norm, residual=residual)
    expected, exact = case.expected(), case.expected_gradients(dy, added)
    function = public_forward(norm)

    def forward(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        return function(x, weight, bias, residual=residual, eps=EPS)

    def gradient(cotangents: Any, *inputs: Any) -> Any:
        return jax.vjp(forward, *inputs)[1](cotangents)

    given = [to_jax(array, device) for array in (x, residual, weight, bias)]
    y, residual_out = (jax.jit(forward) if jit else forward)(*given)
    assert_close(y, expected.y, dtype, scale=expected.z)
    assert np.asarray(residual_out).tobytes() == case.normalized.tobytes()
    cotangents = (to_jax(dy, device), to_jax(added, device))
    dx, dresidual, dweight, dbias = (jax.jit(gradient) if jit else gradient)(cotangents, *given)
    np.testing.assert_array_equal(dx, dresidual)
    for result, value in zip((dx, dweight, dbias), exact):
        assert_close(result, value, dtype)


def test_gradients_of_one_of_the_results() -> None:
    x, residual = (jnp.asarray(data(seed, (4, 8))) for seed in (1, 2))
    weight, bias = (jnp.asarray(data(seed, (8,))) for seed in (3, 4))

    def of(place: int, *arrays: Any) -> Any:
        x, residual, weight, bias = arrays
        return (cunorm.rms_norm(x, weight, bias, residual=residual, activation="silu")[place] ** 2).sum()

    arrays = (x, residual, weight, bias)
    gradient = jax.grad(lambda *arrays: of(1, *arrays), (0, 1, 2, 3))
    dx, dresidual, dweight, dbias = gradient(*arrays)
    np.testing.assert_allclose(dx, 2 * (x + residual), rtol=1e-6)
    np.testing.assert_array_equal(dx, dresidual)
    assert not dweight.any() and not dbias.any()
    assert not backward_calls(jax.make_jaxpr(gradient)(*arrays)), "nothing is left to compute"

    def composed(*arrays: Any) -> Any:
        x, residual, weight, bias = arrays
        return (cunorm.rms_norm(x + residual, weight, bias, activation="silu") ** 2).sum()

    ours = jax.grad(lambda *arrays: of(0, *arrays), (0, 1, 2, 3))(*arrays)
    for result, value in zip(ours, jax.grad(composed, (0, 1, 2, 3))(*arrays)):
        np.testing.assert_array_equal(result, value)


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("norm", ACTIVATED_NORMS, ids=str)
def test_gradients_with_activation_equal_finite_differences(dtype: str, norm: Norm) -> None:
    arrays = [jnp.asarray(data(i, shape, dtype, outliers=False)) for i, shape in enumerate([(4, 5)] * 2 + [(5,)] * 2)]
    towards = [jnp.asarray(data(5 + i, a.shape, dtype, outliers=False)) for i, a in enumerate(arrays)]

    def loss(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        y, total = public_forward(norm)(x, weight, bias, residual=residual)
        return jnp.sin(y).sum() + jnp.cos(total).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
    for i, gradient in enumerate(gradients):
        ahead, behind = (loss(*arrays[:i], arrays[i] + step * towards[i], *arrays[i + 1 :]) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient * towards[i]).sum(), (ahead - behind) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_backward_without_autodiff(device: str) -> None:
    x, weight, _ = (to_jax(array, device) for array in problem((6, 32), "float32", (-1,), "weight"))
    dy, added = (to_jax(data(seed, (6, 32)), device) for seed in (4, 5))
    (_, total, rstd), gradients = jax.vjp(
        lambda x, r, w: cunorm.rms_norm(x, w, residual=r, activation="gelu", return_stats=True), x, x, weight
    )
    expected = gradients((dy, added, jnp.zeros_like(rstd)))
    results = cunorm.rms_norm_backward(dy, total, weight, rstd, activation="gelu", dresidual_out=added)
    np.testing.assert_array_equal(results[0], expected[0])
    np.testing.assert_array_equal(results[1], expected[2])
    assert results[2] is None


@pytest.mark.parametrize("device", DEVICES)
def test_transformations(device: str) -> None:
    """value_and_grad, nested jit, vmap, scan and checkpoint, all of the same function."""
    x, weight, bias = (to_jax(array, device) for array in problem((3, 4, 8), "float32", (-1,), "both"))

    def norm(x: Any) -> Any:
        return jax.jit(lambda x: cunorm.layer_norm(x, weight, bias))(x)

    expected = norm(x)
    np.testing.assert_allclose(jax.vmap(norm)(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(norm, 1, 1))(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.lax.map(norm, x), expected, rtol=1e-5, atol=1e-6)
    value, gradient = jax.value_and_grad(lambda x: (norm(x) ** 3).sum())(x)
    np.testing.assert_allclose(value, (expected**3).sum(), rtol=1e-6)
    again = jax.jit(jax.grad(lambda x: (jax.checkpoint(norm)(x) ** 3).sum()))(x)
    np.testing.assert_allclose(again, gradient, rtol=1e-5, atol=1e-5)
    per_row = jax.vmap(jax.grad(lambda w, x: (cunorm.layer_norm(x, w, bias) ** 3).sum()), (None, 0))(weight, x)
    together = jax.grad(lambda w: (cunorm.layer_norm(x, w, bias) ** 3).sum())(weight)
    np.testing.assert_allclose(per_row.sum(0), together, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_backward_without_autodiff(device: str) -> None:
    x, weight, _ = (to_jax(array, device) for array in problem((6, 32), "float32", (-1,), "weight"))
    dy = to_jax(data(4, (6, 32)), device)
    _, mean, rstd = cunorm.layer_norm(x, weight, return_stats=True)
    expected = jax.vjp(cunorm.layer_norm, x, weight)[1](dy)
    for backward in (cunorm.layer_norm_backward, jax.jit(cunorm.layer_norm_backward, static_argnames="output_mask")):
        dx, dweight, dbias = backward(dy, x, weight, mean, rstd, output_mask=(True, True, False))
        np.testing.assert_array_equal(dx, expected[0])
        np.testing.assert_array_equal(dweight, expected[1])
        assert dbias is None
    assert cunorm.layer_norm_backward(dy, x, None, mean, rstd, output_mask=(False,) * 3) == (None,) * 3


def test_only_gradients_asked_for_are_computed() -> None:
    x, weight, bias = (jnp.asarray(array) for array in problem((4, 8), "float32", (-1,), "both"))
    gradient = jax.grad(lambda w, x, b: cunorm.layer_norm(x, w, b).sum())
    results = [call.mask for call in backward_calls(jax.make_jaxpr(gradient)(weight, x, bias))]
    assert results == [(False, True, False)]


def backward_calls(jaxpr: Any) -> list[Any]:
    equations = equations_in(jaxpr.jaxpr)
    calls = [equation.params["call"] for equation in equations if equation.primitive.name == "cunorm"]
    return [call for call in calls if call.direction == "backward"]


def test_statistics_are_constants_to_differentiation() -> None:
    x = jnp.asarray(data(1, (4, 8)))
    gradient = jax.grad(lambda x: sum(s.sum() for s in cunorm.layer_norm(x, return_stats=True)[1:]))(x)
    assert not gradient.any()


def test_mixed_dtypes() -> None:
    x, weight, bias = jnp.ones((4, 8), jnp.bfloat16), jnp.ones(8, jnp.float32), jnp.ones(8, jnp.float16)
    gradients = jax.grad(lambda *arrays: cunorm.layer_norm(*arrays).sum().astype(float), (0, 1, 2))(x, weight, bias)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32, jnp.float16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (4, 0)], ids=str)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x, weight = to_jax(jnp.ones(shape), device), to_jax(jnp.ones(shape[-1:]), device)
    y, mean, _ = cunorm.layer_norm(x, weight, return_stats=True)
    assert y.shape == shape and mean.shape == shape[:-1]
    assert not jax.grad(lambda w: cunorm.layer_norm(x, w).sum())(weight).any()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """The pointers and the stream of every call that runs meanwhile."""
    seen: list[tuple[list[int], int]] = []
    prepare = jax_call._prepare

    def recording(*arguments: Any) -> Any:
        prepared = prepare(*arguments)

        def run(pointers: list[int], workspace: int, stream: int) -> None:
            seen.append((pointers, stream))
            prepared.run(pointers, workspace, stream)

        key = arguments[:-1]
        jax_call._prepared[key] = dataclasses.replace(prepared, run=run)
        return jax_call._prepared[key]

    monkeypatch.setattr(jax_call, "_prepare", recording)
    monkeypatch.setattr(jax_call, "_prepared", {})
    return seen


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied(device: str, runs: list[tuple[list[int], int]]) -> None:
    x, bias = to_jax(data(1, (64, 128)), device), to_jax(data(2, (128,)), device)
    y = jax.block_until_ready(cunorm.layer_norm(x, None, bias))
    x_at, bias_at, y_at = (array.unsafe_buffer_pointer() for array in (x, bias, y))
    assert [pointers for pointers, _ in runs] == [[x_at, 0, 0, bias_at, y_at, 0, 0, 0]]


@pytest.mark.gpu
def test_runs_on_the_stream_of_xla(runs: list[tuple[list[int], int]]) -> None:
    """Between products that take long: on another stream a norm would read what is not there yet."""

    def model(norm: Any, x: Any) -> Any:
        for _ in range(4):
            x = norm(jnp.matmul(x, x, precision="highest") / 32)
        return jnp.matmul(x, x, precision="highest")

    def plain(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + EPS)

    ours, theirs = (jax.jit(functools.partial(model, norm)) for norm in (cunorm.layer_norm, plain))
    for seed in range(4):
        x = to_jax(data(seed, (1024, 1024), outliers=False), "cuda")
        assert relative_error(np.asarray(ours(x)), np.asarray(theirs(x), np.float64)) < 1e-3
    assert runs and all(stream for _, stream in runs), "the null stream is not XLA's"


@pytest.mark.gpu
def test_several_gpus() -> None:
    """Each computes what lies on it, in turns and without waiting."""
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if len(devices) < 2:
        pytest.skip("needs an NVIDIA GPU beside another")
    arrays = [jax.device_put(data(seed, (256, 1024)), device) for seed, device in enumerate(devices)]
    results = list(arrays)
    for _ in range(10):
        results = [cunorm.layer_norm(result) + array for result, array in zip(results, arrays)]
    for result, array, device in zip(results, arrays, devices):
        assert result.devices() == {device}
        expected = to_jax(np.asarray(array), "cpu")
        given = expected
        for _ in range(10):
            expected = cunorm.layer_norm(expected) + given
        assert relative_error(np.asarray(result), np.asarray(expected, np.float64)) < 1e-5


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_errors(jit: bool) -> None:
    def norm(x: Any, *arguments: Any, **options: Any) -> Any:
        function = lambda x: cunorm.layer_norm(x, *arguments, **options)  # noqa: E731
        return (jax.jit(function) if jit else function)(x)

    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); for x of shape \(2, 8\) it must be \(8,\)"):
        norm(x, jnp.ones(7))
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        norm(x, axis=2)
    with pytest.raises(TypeError, match="x has dtype int32"):
        norm(jnp.ones((2, 8), jnp.int32))
    with pytest.raises(TypeError, match=r"^x is a ShapeDtypeStruct; it must be a JAX array$"):
        cunorm.layer_norm(jax.ShapeDtypeStruct((2, 8), jnp.float32))
    with pytest.raises(TypeError, match="bias has dtype bool"):
        norm(x, None, jnp.ones(8, bool))
    with pytest.raises(TypeError, match="weight is an ndarray; beside a JAX x it must be a JAX array"):
        norm(x, np.ones(8, np.float32))
    with pytest.raises(TypeError, match="beside a JAX x it must be a JAX array; layer_norm and rms_norm have no norm"):
        cunorm.layer_norm(x, (8,))
    with pytest.raises(TypeError, match="bias is a float"):
        norm(x, None, 1.0)
    with pytest.raises(TypeError, match="out cannot be given for JAX arrays"):
        norm(x, out=x)
    y, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    with pytest.raises(ValueError, match="dy has shape"):
        cunorm.layer_norm_backward(y[0], x, None, mean, rstd)


def test_derivatives_that_do_not_exist_are_refused() -> None:
    def loss(x: Any) -> Any:
        return (cunorm.layer_norm(x) ** 3).sum()

    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match="gradients of cunorm cannot be differentiated: there are no second"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))


def test_without_jax_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    with pytest.raises(RuntimeError, match="pip install jax-tvm-ffi"):
        jax_call._register.__wrapped__()


def test_an_executable_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a call is the same in every process, so it runs once the function has been traced again."""

    def function(x: Any) -> Any:
        return cunorm.layer_norm(x, eps=0.125)

    x = jnp.asarray(data(1, (3, 40)))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("cunorm")]
    stored = jax.export.export(jax.jit(function), disabled_checks=allowed)(x).serialize()
    monkeypatch.setattr(jax_call, "_calls", {})
    monkeypatch.setattr(jax_call, "_prepared", {})
    loaded = jax.export.deserialize(stored).call
    with pytest.raises(RuntimeError, match="traced by another process"):
        jax.block_until_ready(loaded(x))
    jax.jit(function).lower(x)
    np.testing.assert_array_equal(loaded(x), function(x))


@pytest.mark.parametrize("shape", ["b, 3, 16", "4, 3, c"])
def test_sizes_that_are_symbols_are_refused(shape: str) -> None:
    """What is prepared for the first size that runs would be kept for all."""
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    for function in (cunorm.layer_norm, cunorm.gelu, cunorm.instance_norm, jax.vmap(cunorm.layer_norm)):
        words = r"shape \(.*[bc].*\).* export the function with concrete sizes, .*\.DisabledSafetyCheck\.custom_call"
        with pytest.raises(ValueError, match=words):
            jax.export.export(jax.jit(function))(x)


def test_shapes_of_results_are_known_of_sizes_that_are_symbols() -> None:
    """As Keras asks for them, where the size of a batch is not known yet."""

    def shapes_of(function: Any, *shapes: str) -> list[str]:
        scope = jax.export.SymbolicScope()
        symbolic = [jax.export.symbolic_shape(shape, scope=scope) for shape in shapes]
        results = jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in symbolic))
        return [str(result.shape) for result in jax.tree.leaves(results)]

    norm = functools.partial(cunorm.group_norm, num_groups=8, return_stats=True)
    assert shapes_of(norm, "b, 32, h, 2*h") == ["(b, 32, h, 2*h)", "(b, 8)", "(b, 8)"]
    assert shapes_of(lambda x: norm(x, weight=None)[0], "b, c, 5") == ["(b, c, 5)"]
    assert shapes_of(cunorm.layer_norm, "b, c", "c") == ["(b, c)"]
    loss = jax.grad(lambda x, weight: cunorm.rms_norm(x, weight, activation="silu").sum(), (0, 1))
    assert shapes_of(loss, "b, 16", "16") == ["(b, 16)", "(16,)"]
    with pytest.raises(ValueError, match=r"weight has shape \(5,\); for x of shape \(b, 4, h\) it must be \(4,\)"):
        shapes_of(cunorm.instance_norm, "b, 4, h", "5")


def test_names_of_calls_are_stored_in_place() -> None:
    """jax-tvm-ffi 0.1.3 frees longer strings before they are read."""
    cunorm.layer_norm(jnp.ones((2, 8)))
    assert jax_call._calls and all(len(key.encode()) <= 7 for key in jax_call._calls)


def test_arrays_on_different_devices() -> None:
    program = """
import jax, jax.numpy as jnp, cunorm
first, second = jax.devices()
x, weight = jax.device_put(jnp.ones((2, 8)), first), jax.device_put(jnp.ones(8), second)
print(cunorm.layer_norm(jax.device_put(x, second), weight).devices() == {second})
sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.sharding.PartitionSpec("rows"))
norm = jax.shard_map(cunorm.layer_norm, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)
y = jax.jit(norm)(jax.device_put(jnp.arange(16.0).reshape(2, 8), sharding))
print(y.sharding.is_equivalent_to(sharding, 2), bool(abs(y).sum() > 1))
try:
    cunorm.layer_norm(jax.device_put(jnp.ones((2, 8)), sharding), jnp.ones(7))
except ValueError as error:
    print("weight has shape (7,)" in str(error))
cunorm.layer_norm(x, weight)
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["True"] * 4, result.stderr
    assert re.search("RuntimeError: weight is on .*1 and x on .*0; they must be on one device", result.stderr)


@pytest.mark.gpu
def test_calls_captured_into_a_cuda_graph() -> None:
    """XLA captures runs of several calls; later runs replay them. Backward of many rows has a workspace."""
    weight = to_jax(data(2, (4096,), outliers=False), "cuda")

    def model(x: Any, weight: Any) -> Any:
        for _ in range(8):
            x = cunorm.layer_norm(x, weight) + x
        return (x**2).sum()

    step = jax.jit(jax.grad(model, (0, 1)))
    expect = jax.jit(jax.grad(model, (0, 1)))
    for seed, rows in enumerate((512, 512, 512, 1200, 1200, 1200)):
        array = data(seed, (rows, 4096), outliers=False)
        results = step(to_jax(array, "cuda"), weight)
        expected = expect(to_jax(array, "cpu"), to_jax(np.asarray(weight), "cpu"))
        for result, value in zip(results, expected):
            assert relative_error(np.asarray(result), np.asarray(value, np.float64)) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("approximate", "biased"), [("none", False), ("none", True), ("tanh", True)])
def test_gelu(device: str, jit: bool, dtype: str, approximate: str, biased: bool) -> None:
    x, bias, dy = data(1, (4, 3, 257), dtype), data(2, (257,), dtype, outliers=False), data(3, (4, 3, 257), dtype)
    expected = gelu_in_float64(x, bias if biased else None, dy, approximate)

    def forward(x: Any, bias: Any = None) -> Any:
        return cunorm.gelu(x, approximate=approximate, bias=bias)

    def gradient(dy: Any, *inputs: Any) -> Any:
        return jax.vjp(forward, *inputs)[1](dy)

    given = [to_jax(array, device) for array in ((x, bias) if biased else (x,))]
    y = (jax.jit(forward) if jit else forward)(*given)
    assert_close(y, expected[0], dtype)
    gradients = (jax.jit(gradient) if jit else gradient)(to_jax(dy, device), *given)
    for result, value in zip(gradients, expected[1:]):
        assert_close(result, value, dtype)
    without = cunorm.gelu_backward(to_jax(dy, device), given[0], approximate=approximate, bias=(*given, None)[1])
    for result, other in zip(without if biased else (without,), gradients):
        assert np.asarray(result).tobytes() == np.asarray(other).tobytes()
    assert np.asarray(given[0]).tobytes() == x.tobytes()


def test_gelu_under_transformations() -> None:
    x, bias = jnp.asarray(data(1, (6, 8))), jnp.asarray(data(2, (8,)))
    batched = jax.vmap(lambda x: cunorm.gelu(x, bias=bias))(x)
    np.testing.assert_array_equal(batched, cunorm.gelu(x, bias=bias))
    gradient = jax.grad(lambda bias, x: cunorm.gelu(x, bias=bias).sum())
    masks = [call.mask for call in backward_calls(jax.make_jaxpr(gradient)(bias, x))]
    assert masks == [(False, False, True)]
    with pytest.raises(TypeError, match="out cannot be given for JAX arrays: they are immutable"):
        cunorm.gelu(x, out=x)


# ---- Instance, group and batch norm, on the CPU.


def channel_case(name: str, dtype: str, training: bool = True, activation: str | None = None) -> channel_cases.Case:
    shape = channel_cases.Shape(name, (3, 6, 4, 5), "NCHW", 2 if name == "group_norm" else None)
    return shape.case(dtype, running_dtype=None if training else dtype, training=training, activation=activation)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in channel_cases.NAMES), ("batch_norm", False)])
def test_channel_norms(name: str, training: bool, activation: str | None, dtype: str, jit: bool) -> None:
    case = channel_case(name, dtype, training, activation)
    dy = data(4, case.x.shape, dtype)
    given = [jnp.asarray(array) for array in case.tensors.values()]
    running = {}
    if case.running is not None:
        running = {"running_mean": jnp.asarray(case.running.mean), "running_var": jnp.asarray(case.running.var)}

    def forward(x: Any, weight: Any, bias: Any, running: Any) -> Any:
        return getattr(cunorm, name)(x, weight=weight, bias=bias, **case.options, **running, return_stats=True)

    def gradient(dy: Any, *inputs: Any) -> Any:
        return jax.vjp(lambda *inputs: forward(*inputs)[0], *inputs)[1](dy)

    y, mean, rstd = map(np.asarray, (jax.jit(forward) if jit else forward)(*given, running))
    statistics = () if case.running is None else case.running[:2]
    channel_cases.assert_forward(case, channel_cases.Results(y, mean, rstd, *statistics))
    *gradients, constant = (jax.jit(gradient) if jit else gradient)(jnp.asarray(dy), *given, running)
    assert not any(value.any() for value in constant.values())
    channel_cases.assert_gradients(case, tuple(map(np.asarray, gradients)), dy)
    backward = getattr(cunorm, f"{name}_backward")
    kept = case.backward(channel_cases.Results(y, mean, rstd), dy).tensors
    arrays = {place: None if array is None else jnp.asarray(array) for place, array in kept.items()}
    same = backward(**arrays, **case.options)
    for ours, value in zip(gradients, same):
        np.testing.assert_array_equal(ours, value)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_running_statistics_cannot_be_updated(jit: bool) -> None:
    x, mean, var = jnp.ones((3, 4, 5)), jnp.zeros(4), jnp.ones(4)

    def norm(x: Any, mean: Any, var: Any) -> Any:
        return cunorm.batch_norm(x, running_mean=mean, running_var=var, training=True)

    message = "running_mean and running_var cannot be updated in place for JAX arrays: they are immutable; leave them "
    with pytest.raises(TypeError, match=re.escape(message)):
        (jax.jit(norm) if jit else norm)(x, mean, var)
    with pytest.raises(TypeError, match="running_var is an ndarray; beside a JAX x it must be a JAX array"):
        cunorm.batch_norm(x, running_mean=mean, running_var=np.ones(4, np.float32), training=False)
    with pytest.raises(ValueError, match=r"running_var has shape \(5,\)"):
        cunorm.batch_norm(x, running_mean=mean, running_var=jnp.ones(5), training=False)


_ENDS_AT_ONCE = """
import atexit, jax, jax.numpy as jnp, cunorm

atexit.register(lambda: print(dx.is_ready()))  # handlers run from the last one on: after those of the first call
step = jax.jit(jax.grad(lambda x: (cunorm.layer_norm(x) ** 2).sum()))
dx = step(jnp.ones((2000, 4096)))
print(dx.is_ready())
"""


def test_a_program_that_ends_waits_for_its_calls() -> None:
    """A call that still ran would ask for the interpreter's lock, and sometimes abort the process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", _ENDS_AT_ONCE], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout.split()) == (0, ["False", "True"]), result.stderr


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_merged_statistics(jit: bool) -> None:
    x = jnp.asarray(data(1, (6, 4, 5)))
    expected = np.asarray(x, np.float64).mean((0, 2)), np.asarray(x, np.float64).var((0, 2))

    def merged(*parts: Any) -> Any:
        means, variances = zip(*map(cunorm.batch_norm_stats, parts))
        counts = [part.shape[0] * part.shape[2] for part in parts]
        stacked = jnp.stack(means), jnp.stack(variances), jnp.asarray(counts, jnp.float32)
        return cunorm.merge_batch_norm_stats(means, variances, counts), cunorm.merge_batch_norm_stats(*stacked)

    for results in (jax.jit(merged) if jit else merged)(x[:1], x[1:3], x[3:]):
        for result, value in zip(results, expected):
            assert result.dtype == jnp.float32
            np.testing.assert_allclose(result, value, rtol=1e-5)


def test_vmap_of_channel_norms() -> None:
    x, mean, var = jnp.asarray(data(1, (2, 3, 4, 5))), jnp.zeros(4), jnp.ones(4)
    for name, options in (("group_norm", {"num_groups": 2}), ("batch_norm", {"training": True})):
        norm = functools.partial(getattr(cunorm, name), **options)
        np.testing.assert_array_equal(jax.vmap(norm)(x), jnp.stack([norm(x[0]), norm(x[1])]))
    evaluated = jax.vmap(lambda x: cunorm.batch_norm(x, running_mean=mean, running_var=var, training=False))(x)
    np.testing.assert_allclose(evaluated, x / np.sqrt(np.float32(1 + 1e-5)), rtol=1e-6)
