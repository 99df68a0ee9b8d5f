"""JAX's transformations of every op: vmap without a loop, gradients under them all, control flow, donation."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import data
from jax.test_util import check_grads
from jax_cases import DEVICES, OPERATIONS, Operation, assert_all_close, calls_in, to_jax

import cunorm

EVERY = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
ROWS = [operation for operation in OPERATIONS if "_norm" not in operation.name or operation.name[0] in "lr"]


@pytest.fixture(autouse=True)
def _x64(request: pytest.FixtureRequest) -> Any:
    parameters = getattr(request.node, "callspec", None)
    with jax.enable_x64(parameters is not None and parameters.params.get("dtype") == "float64"):
        yield


def loss_of(operation: Operation) -> Any:
    """A number in which every value of the result counts."""

    def loss(*arrays: Any) -> Any:
        y = operation.function(*arrays)
        return (y * jnp.sin(1.0 + jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return loss


def one_by_one(function: Any, in_axes: tuple[int | None, ...], *arrays: Any) -> Any:
    """What vmap means."""
    size = next(array.shape[axis] for array, axis in zip(arrays, in_axes) if axis is not None)
    results = [
        function(*(array if axis is None else jnp.take(array, i, axis) for array, axis in zip(arrays, in_axes)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def batched_arrays(operation: Operation, in_axes: tuple[int | None, ...], device: str) -> list[Any]:
    arrays = operation.arrays(batch=tuple(None if axis is None else 3 for axis in in_axes))
    return [to_jax(array if not axis else np.moveaxis(array, 0, axis), device) for array, axis in zip(arrays, in_axes)]


BATCHES = [(0, None, None), (-1, None, None), (1, 0, 0), (None, 0, None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_axes", BATCHES, ids=str)
@EVERY
def test_vmap(operation: Operation, in_axes: tuple[int | None, ...], device: str) -> None:
    """Values, gradients by example, and the gradients of what is made of all examples."""
    axes = in_axes[: 1 + operation.vectors]
    arrays = batched_arrays(operation, axes, device)
    batched = jax.vmap(operation.function, axes)
    assert_all_close(batched(*arrays), one_by_one(operation.function, axes, *arrays))
    places = tuple(range(len(arrays)))
    gradient = jax.grad(loss_of(operation), places)
    assert_all_close(jax.jit(jax.vmap(gradient, axes))(*arrays), one_by_one(gradient, axes, *arrays), 1e-4)

    def total(loss: Any, *arrays: Any) -> Any:
        return loss(*arrays).sum()

    together = jax.grad(functools.partial(total, jax.vmap(loss_of(operation), axes)), places)
    each = jax.grad(functools.partial(total, functools.partial(one_by_one, loss_of(operation), axes)), places)
    assert_all_close(jax.jit(together)(*arrays), each(*arrays), 1e-4)


@EVERY
def test_vmap_of_x_is_one_call(operation: Operation) -> None:
    """And the gradients of all of it one more, which sums over all examples."""
    axes = (0, *[None] * operation.vectors)
    arrays = batched_arrays(operation, axes, "cpu")
    nested = [jnp.stack([arrays[0]] * 2), *arrays[1:]]
    twice = jax.vmap(jax.vmap(operation.function, axes), axes)
    assert len(calls_in(twice, *nested)) == 1
    assert_all_close(twice(*nested)[1], jax.vmap(operation.function, axes)(*arrays))
    places = tuple(range(len(arrays)))
    gradient = jax.grad(lambda *arrays: jax.vmap(loss_of(operation), axes)(*arrays).sum(), places)
    forward, backward = calls_in(gradient, *arrays)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert backward.mask == (True, operation.vectors == 2, True)


def test_vmap_joins_rows_samples_or_channels() -> None:
    x, weights = jnp.ones((2, 3, 4, 5)), jnp.ones((2, 4))

    def shape_of(function: Any, *arrays: Any) -> Any:
        jaxpr = str(jax.make_jaxpr(jax.vmap(function))(*arrays))
        (line,) = (line for line in jaxpr.splitlines() if "= cunorm[" in line)
        return line.split(":f32")[1].split("]")[0] + "]"

    assert shape_of(cunorm.layer_norm, x) == "[2,3,4,5]"
    assert shape_of(cunorm.instance_norm, x) == "[6,4,5]"
    assert shape_of(cunorm.instance_norm, x, weights) == "[3,8,5]"
    assert shape_of(functools.partial(cunorm.batch_norm, training=True), x) == "[3,8,5]"


@pytest.mark.parametrize("operation", ROWS, ids=lambda operation: operation.name)
def test_vmap_of_weights_of_row_norms_is_left_to_xla(operation: Operation) -> None:
    axes = (0,) * (1 + operation.vectors)
    arrays = operation.arrays(batch=(3,) * (1 + operation.vectors))
    assert calls_in(jax.vmap(operation.function, axes), *arrays) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_what_is_left_to_xla_is_rounded_once(dtype: str) -> None:
    """It has the kernels' dtypes and their accuracy: two ways to round differ by a unit in the last place."""
    x, weight, bias = (jnp.asarray(data(i, shape, dtype)) for i, shape in enumerate([(4, 33)] + [(3, 33)] * 2))

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return cunorm.layer_norm(x, weight, bias, activation="gelu_tanh", return_stats=True)

    in_axes = (None, 0, 0)
    results, expected = jax.vmap(norm, in_axes)(x, weight, bias), one_by_one(norm, in_axes, x, weight, bias)
    for result, value in zip(results, expected):
        assert result.dtype == value.dtype
        unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-20, "float64": 2.0**-48}[value.dtype.name]
        result, value = np.asarray(result, np.float64), np.asarray(value, np.float64)
        np.testing.assert_allclose(result, value, rtol=unit, atol=1e-3 * unit * np.abs(value).max())


@pytest.mark.parametrize("operation", ROWS, ids=lambda operation: operation.name)
def test_what_is_left_to_xla_where_dtypes_are_not_promoted(operation: Operation) -> None:
    """In sixteen bits beside what is float32: as ``jax_numpy_dtype_promotion`` may forbid jax.numpy to mix them."""
    arrays = [jnp.asarray(array) for array in operation.arrays("bfloat16", (2,) * (1 + operation.vectors))]
    gradient = jax.vmap(jax.grad(loss_of(operation), tuple(range(len(arrays)))))
    with jax.numpy_dtype_promotion("strict"):
        results = gradient(*arrays)
    assert_all_close(results, gradient(*arrays))


def test_what_is_left_to_xla_is_accurate() -> None:
    """Far from zero, and in the tails and at the limits of gelu, as the kernels are."""
    x, ones = data(1, (4, 4096), outliers=False) + np.float32(1e4), jnp.ones((4, 4096))
    norm = functools.partial(cunorm.layer_norm, return_stats=True)
    y, mean, _ = jax.vmap(norm)(jnp.asarray(x), ones)
    exact = x.astype(np.float64)
    centered = exact - exact.mean(1, keepdims=True)
    np.testing.assert_allclose(y, centered / np.sqrt(exact.var(1, keepdims=True) + 1e-5), rtol=0, atol=2e-6)
    np.testing.assert_allclose(mean, exact.mean(1), rtol=1e-7)
    x = np.array([-np.inf, -1e20, -50, -7, -5, -1, 0, 3, 40, 1e20, np.inf], np.float32)
    for approximate in ("none", "tanh"):

        def gelu(x: Any, bias: Any, approximate: str = approximate) -> Any:
            return cunorm.gelu(x, approximate=approximate, bias=bias)

        def gradient(x: Any, bias: Any, gelu: Any = gelu) -> Any:
            return jax.grad(lambda x: gelu(x, bias).sum())(x)

        for function in (gelu, gradient):
            result = jax.vmap(function)(jnp.asarray(x)[None], jnp.zeros((1, x.size)))[0]
            np.testing.assert_allclose(result, function(jnp.asarray(x), jnp.zeros(x.size)), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("weighted", [False, True], ids=["x", "x and weights"])
@EVERY
def test_vmap_of_no_examples(operation: Operation, weighted: bool) -> None:
    sizes = (0, *[0 if weighted else None] * operation.vectors)
    arrays = [jnp.asarray(array) for array in operation.arrays(batch=sizes)]
    axes = tuple(None if size is None else 0 for size in sizes)
    batched = jax.vmap(operation.function, axes)
    assert batched(*arrays).shape == (0, *operation.shape)
    places = tuple(range(len(arrays)))
    by_example = jax.jit(jax.vmap(jax.grad(loss_of(operation), places), axes))(*arrays)
    assert [array.shape for array in by_example] == [(0, *array.shape) for array in operation.arrays()]
    together = jax.grad(lambda *arrays: batched(*arrays).sum(), places)(*arrays)
    assert_all_close(together, tuple(map(jnp.zeros_like, arrays)))


def test_vmap_of_nothing_that_is_batched() -> None:
    x = jnp.asarray(data(1, (4, 8)))
    y = jax.vmap(lambda _: cunorm.layer_norm(x))(jnp.arange(3))
    assert_all_close(y, jnp.stack([cunorm.layer_norm(x)] * 3))


@EVERY
def test_jacobian(operation: Operation) -> None:
    """jax.jacrev is vmap of the backward pass, where x is not batched and dy is."""
    arrays = [jnp.asarray(array) for array in operation.arrays()]
    first = lambda *arrays: operation.function(*arrays).reshape(-1)[:4]  # noqa: E731
    rows = [jax.grad(lambda *arrays, i=i: first(*arrays)[i], 0)(*arrays) for i in range(4)]
    assert_all_close(jax.jacrev(first)(*arrays), jnp.stack(rows))


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("transform", ["none", "vmap", "weights", "checkpoint", "scan", "cond", "while"])
@EVERY
def test_check_grads(operation: Operation, transform: str, dtype: str) -> None:
    batch = {"vmap": (2, *[None] * operation.vectors), "weights": (2,) * (1 + operation.vectors)}.get(transform, ())
    arrays = [jnp.asarray(array) for array in operation.arrays(dtype, batch)]
    function = operation.function
    if batch:
        function = jax.vmap(function, tuple(None if size is None else 0 for size in batch))
    elif transform == "checkpoint":
        function = jax.checkpoint(function)
    elif transform == "scan":
        function = lambda x, *rest: jax.lax.scan(  # noqa: E731
            lambda carry, _: (operation.function(carry, *rest), None), x, None, length=2
        )[0]
    elif transform == "cond":
        function = lambda *arrays: jax.lax.cond(  # noqa: E731
            arrays[0].sum() < 1e9, operation.function, lambda x, *_: x, *arrays
        )
    elif transform == "while":
        function = lambda x, *rest: jax.lax.fori_loop(  # noqa: E731
            0, 2, lambda _, carry: operation.function(carry, *rest), x
        )
    check_grads(jax.jit(function), arrays, order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("operation", ROWS, ids=lambda operation: operation.name)
def test_what_is_left_to_xla_has_every_derivative(operation: Operation, dtype: str) -> None:
    arrays = [jnp.asarray(array) for array in operation.arrays(dtype, (2,) * (1 + operation.vectors))]
    batched = jax.vmap(operation.function)
    check_grads(jax.jit(batched), arrays, order=2, modes=["fwd", "rev"])
    gradients = jax.vmap(jax.grad(loss_of(operation), tuple(range(len(arrays)))))
    check_grads(jax.jit(gradients), arrays, order=1, modes=["fwd", "rev"])


def test_while_with_a_condition() -> None:
    x = jnp.asarray(data(1, (4, 8)))
    y = jax.lax.while_loop(lambda x: jnp.abs(x).max() > 3, lambda x: 0.5 * cunorm.layer_norm(x), x * 10)
    np.testing.assert_allclose(y, 0.5 * cunorm.layer_norm(x * 10), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0), (None, 0)], ids=str)
@pytest.mark.parametrize("function", [cunorm.layer_norm, cunorm.rms_norm, cunorm.instance_norm])
def test_statistics_are_constants(function: Any, in_axes: tuple[int | None, ...]) -> None:
    """Also where jax.numpy computes them, beside weights by example."""
    arrays = [jnp.asarray(data(i, shape)) for i, shape in enumerate([(3, 4, 4, 4), (3, 4)])]

    def loss(x: Any, weight: Any, counts: bool = True) -> Any:
        y, *statistics = function(x, weight, return_stats=True)
        return (y**2).sum() + counts * sum((statistic**2).sum() for statistic in statistics)

    def gradients(counts: bool) -> Any:
        batched = jax.vmap(functools.partial(loss, counts=counts), in_axes)
        return jax.grad(lambda *arrays: batched(*arrays).sum(), (0, 1))(x, weight)

    x, weight = (array if axis == 0 else array[0] for array, axis in zip(arrays, in_axes))
    assert_all_close(gradients(True), gradients(False))


@EVERY
def test_derivatives_that_do_not_exist_are_refused(operation: Operation) -> None:
    arrays = [jnp.asarray(array) for array in operation.arrays()]
    loss = loss_of(operation)
    for function in (operation.function, jax.vmap(operation.function, (0, *[None] * operation.vectors))):
        given = arrays if function is operation.function else [arrays[0][None], *arrays[1:]]
        with pytest.raises(TypeError, match="can't apply forward-mode"):
            jax.jvp(lambda x: function(x, *given[1:]), (given[0],), (given[0],))  # noqa: B023
    with pytest.raises(ValueError, match="the gradients of cunorm cannot be differentiated: there are no second"):
        jax.grad(lambda x: jax.grad(loss)(x, *arrays[1:]).sum())(arrays[0])
    if operation.vectors == 2:  # the gradient of a weight by example, which may be computed from a kernel's statistics
        by_example = jax.vmap(jax.grad(loss, 1), (0, None, None))
        with pytest.raises(ValueError, match="there are no second derivatives"):
            jax.grad(lambda x: (by_example(x, *arrays[1:]) ** 2).sum())(arrays[0][None])
    with pytest.raises((TypeError, ValueError), match=r"no second derivatives|forward-mode"):
        jax.hessian(loss)(*arrays)


def test_without_jit() -> None:
    x = jnp.asarray(data(1, (4, 8)))
    with jax.disable_jit():
        y, gradient = jax.value_and_grad(lambda x: (cunorm.layer_norm(x) ** 3).sum())(x)
    assert_all_close((y, gradient), jax.value_and_grad(lambda x: (cunorm.layer_norm(x) ** 3).sum())(x))


@pytest.mark.parametrize("device", DEVICES)
@EVERY
def test_donated_arrays(operation: Operation, device: str) -> None:
    """They are given up, and the result is right though it may lie where they did."""
    arrays = [to_jax(array, device) for array in operation.arrays()]
    expected = operation.function(*arrays)
    donated = jnp.array(arrays[0], copy=True)
    y = jax.jit(operation.function, donate_argnums=0)(donated, *arrays[1:])
    assert donated.is_deleted()
    assert_all_close(y, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_no_growth(device: str) -> None:
    """Ten thousand calls, eager and compiled, forward and backward, keep neither arrays nor memory."""
    x, weight = to_jax(data(1, (16, 64)), device), to_jax(data(2, (64,)), device)
    step = jax.jit(jax.value_and_grad(lambda x, weight: cunorm.layer_norm(x, weight).sum()))

    def calls(count: int) -> None:
        for _ in range(count):
            cunorm.rms_norm(x, weight)
            step(x, weight)
        jax.block_until_ready(step(x, weight))
        gc.collect()

    def in_use() -> tuple[int, int]:
        statistics = x.devices().pop().memory_stats() or {}
        return len(jax.live_arrays()), statistics.get("bytes_in_use", 0)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    calls(300)
    before, resident = in_use(), resident_bytes()
    calls(3500)
    assert in_use() == before
    assert resident_bytes() - resident < 3500 * x.nbytes // 2, "less than any array of such a call"
