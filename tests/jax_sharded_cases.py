"""Run by test_jax_sharding.py in a process of its own, whose devices are several: every `check_` function here.

``python jax_sharded_cases.py shardy check_vmap ...``; or ``gspmd``, the other that lays out what is not said to lie
anywhere.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import data
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_cases import OPERATIONS, Operation, assert_all_close

import cunorm

P = PartitionSpec
COUNT = min(8, len(jax.devices()) // 2 * 2)
AXES = ("data", "model")


def mesh_of(kind: AxisType = AxisType.Auto) -> Any:
    """Two devices along one axis, if there are four, and the rest along the other."""
    across = 2 if COUNT >= 4 else 1
    return jax.make_mesh((COUNT // across, across), AXES, axis_types=(kind, kind), devices=jax.devices()[:COUNT])


MESH = mesh_of()
PARTS = MESH.shape["data"]


def put(array: Any, *spec: Any, mesh: Any = MESH) -> Any:
    return jax.device_put(jnp.asarray(array), NamedSharding(mesh, P(*spec)))


def of_compiled(function: Any, *arrays: Any) -> tuple[Any, Counter[str], str]:
    """The result, and which collectives were needed, and the text of what was compiled."""
    compiled = jax.jit(function).lower(*arrays).compile()
    text = compiled.as_text()
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return compiled(*arrays), Counter(re.findall(rf"\b({names})(?:-start)?\(", text)), text


def loss_of(function: Any) -> Any:
    def loss(*arrays: Any) -> Any:
        y = function(*arrays)
        return (y * jnp.sin(1.0 + jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return loss


def wide(operation: Operation) -> list[Any]:
    """Arrays whose x divides by the devices along each axis, far from zero."""
    x, *vectors = operation.arrays()
    x = np.concatenate([x + 3] * COUNT, 0)
    if 0 in operation.columns:
        vectors = [np.concatenate([vector] * COUNT, 0) for vector in vectors]
    return [x * np.linspace(1, 2, x.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)), *vectors]


ROWS_FIRST = [operation for operation in OPERATIONS if 0 not in operation.columns]


def check_parts_of_a_batch_stay_where_they_are() -> None:
    for operation in ROWS_FIRST:
        x, *vectors = wide(operation)
        for spec in ("data", AXES):
            given = [put(x, spec), *map(put, vectors)]
            y, needed, _ = of_compiled(operation.function, *given)
            assert_all_close(y, operation.function(*map(jnp.asarray, (x, *vectors))))
            assert y.sharding.is_equivalent_to(given[0].sharding, x.ndim)
            assert set(needed) == ({"all-reduce"} if "batch" in operation.name else set()), (operation.name, needed)


def check_gradients_are_summed() -> None:
    for operation in ROWS_FIRST:
        x, *vectors = wide(operation)
        gradient = jax.grad(loss_of(operation.function), tuple(range(1 + len(vectors))))
        expected = gradient(*map(jnp.asarray, (x, *vectors)))
        for spec in ("data", AXES):
            given = [put(x, spec), *map(put, vectors)]
            results, needed, _ = of_compiled(gradient, *given)
            assert_all_close(results, expected, 2e-4)
            assert results[0].sharding.is_equivalent_to(given[0].sharding, x.ndim)
            assert set(needed) == {"all-reduce"}, (operation.name, needed)


def check_where_dtypes_are_not_promoted() -> None:
    """x in sixteen bits beside what is float32: as ``jax_numpy_dtype_promotion`` may forbid jax.numpy to mix them."""
    for operation in ROWS_FIRST:
        x, *vectors = map(jnp.asarray, wide(operation))
        gradient = jax.grad(loss_of(operation.function), tuple(range(1 + len(vectors))))
        expected = gradient(x.astype(jnp.bfloat16), *vectors)
        jax.config.update("jax_numpy_dtype_promotion", "strict")  # also in the thread in which XLA asks for parts
        try:
            results = jax.jit(gradient)(put(x.astype(jnp.bfloat16), "data"), *map(put, vectors))
        finally:
            jax.config.update("jax_numpy_dtype_promotion", "standard")
        assert_all_close(results, expected, 2.0**-6)


def check_float64_that_is_enabled_for_a_while() -> None:
    """In the thread that lowers: XLA asks for the parts in another."""
    with jax.enable_x64(True):
        for operation in ROWS_FIRST:
            x, *vectors = (jnp.asarray(array, jnp.float64) for array in wide(operation))
            for given in ((x, *vectors), (x.astype(jnp.float32), *vectors)):
                gradient = jax.grad(loss_of(operation.function), tuple(range(len(given))))
                results = jax.jit(gradient)(put(given[0], "data"), *map(put, vectors))
                assert_all_close(results, gradient(*given), 1e-10 if given[0] is x else 2e-4)


def check_other_axes() -> None:
    """An axis that is normalized over is gathered; all others may be split."""
    shape = (2 * PARTS, 4 * PARTS, 6)
    x, weight, bias = data(1, shape), data(2, shape[2:], outliers=False), data(3, shape[2:], outliers=False)
    channels = [data(4, shape[1:2], outliers=False), data(5, shape[1:2], outliers=False)]
    # The function, vectors, how x is split, and over which axis of the mesh it must not be.
    cases: list[tuple[Any, list[Any], tuple[Any, ...], str | None]] = [
        (cunorm.layer_norm, [weight, bias], ("data", "model"), None),
        (cunorm.layer_norm, [weight, bias], (None, "data", "model"), "model"),
        (functools.partial(cunorm.layer_norm, axis=1), channels, ("data", None, "model"), None),
        (cunorm.instance_norm, channels, ("data", "model"), None),
        (cunorm.instance_norm, channels, ("data", None, "model"), "model"),
        (lambda x, *vectors: cunorm.group_norm(x, 4, *vectors), channels, ("model", "data"), "data"),
        (functools.partial(cunorm.batch_norm, training=True), channels, ("model", "data"), None),
        (functools.partial(cunorm.batch_norm, training=True), channels, (None, "data", "model"), None),
        (lambda x, weight, bias: cunorm.gelu(x * weight, bias=bias), [weight, bias], (None, "data", "model"), None),
    ]
    for function, vectors, spec, gathered in cases:
        gradient = jax.value_and_grad(loss_of(function), (0, 1, 2))
        expected = gradient(*map(jnp.asarray, (x, *vectors)))
        results, needed, _ = of_compiled(gradient, put(x, *spec), *map(put, vectors))
        assert_all_close(results, expected, 2e-4)
        assert ("all-gather" in needed) == (gathered is not None and MESH.shape[gathered] > 1), (function, spec, needed)


def check_uneven_parts() -> None:
    """They are gathered: what fills the last part up would be counted."""
    x, weight = data(1, (PARTS + 1, 4, 8)) + 3, data(2, (8,), outliers=False)
    for function in (cunorm.rms_norm, functools.partial(cunorm.batch_norm, training=True, data_format="NWC")):

        def loss(x: Any, weight: Any, function: Any = function) -> Any:
            x = jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("data")))
            return loss_of(function)(x, weight)

        expected = jax.grad(loss_of(lambda x, weight, function=function: function(x * 2, weight)), (0, 1))(x, weight)
        assert_all_close(jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(x), jnp.asarray(weight)), expected, 2e-4)


def check_split_weights() -> None:
    """As where every device keeps a part of the parameters: the weight is gathered, x is not."""
    x, weight = data(1, (2 * PARTS, 3, 16)), data(2, (16,), outliers=False)
    gradient = jax.grad(lambda x, weight: (cunorm.layer_norm(x, weight) ** 3).sum(), (0, 1))
    results, _, text = of_compiled(gradient, put(x, "data"), put(weight, "model"))
    assert_all_close(results, gradient(jnp.asarray(x), jnp.asarray(weight)), 2e-4)
    assert set(re.findall(r"= \(?(f32\[[\d,]*\])\S* all-gather", text)) <= {"f32[16]", "f32[8]"}


def check_statistics() -> None:
    """Far from zero, where E[x^2] - E[x]^2 would have no digit right."""
    x = data(1, (4 * PARTS, 3, 5), outliers=False) + 1e4 * np.arange(4 * PARTS, dtype=np.float32)[:, None, None] / 100
    exact = np.asarray(x, np.float64)
    expected = exact.mean((0, 2)), exact.var((0, 2))
    (mean, var), needed, _ = of_compiled(cunorm.batch_norm_stats, put(x, "data"))
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(var, expected[1], rtol=1e-5)
    assert set(needed) == {"all-reduce"}
    norm = functools.partial(cunorm.batch_norm, training=True, return_stats=True)
    (_, mean, rstd), _, _ = of_compiled(norm, put(x, "data"))
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(expected[1] + 1e-5), rtol=1e-5)


def check_vmap() -> None:
    x = data(1, (2 * PARTS, 3, 4, 5))
    for function in (
        cunorm.layer_norm,
        functools.partial(cunorm.group_norm, num_groups=2),
        functools.partial(cunorm.batch_norm, training=True),
    ):
        y, needed, _ = of_compiled(jax.vmap(function), put(x, "data"))
        assert_all_close(y, jax.vmap(function)(jnp.asarray(x)))
        assert not needed, needed


def check_explicit_axes() -> None:
    """Where a type says how an array is split, that of the result does, too."""
    mesh = mesh_of(AxisType.Explicit)
    for operation in ROWS_FIRST:
        x, *vectors = wide(operation)
        given = [put(x, "data", mesh=mesh), *(put(vector, mesh=mesh) for vector in vectors)]
        gradient = jax.grad(loss_of(operation.function), tuple(range(1 + len(vectors))))
        expected = gradient(*map(jnp.asarray, (x, *vectors)))
        assert jax.typeof(operation.function(*given)).sharding.spec[0] == "data"
        results, needed, _ = of_compiled(gradient, *given)
        assert_all_close(results, expected, 2e-4)
        assert set(needed) == {"all-reduce"}, (operation.name, needed)
    try:
        cunorm.layer_norm(put(np.ones((4, 8), np.float32), None, "model", mesh=mesh))
    except ValueError as error:
        assert "x is sharded along axis 1" in str(error) and "jax.sharding.reshard" in str(error)
    else:
        raise AssertionError("an axis that is normalized over is sharded")


def check_gradients_on_explicit_axes() -> None:
    """Each is split as what it is the gradient of, whatever x is."""
    mesh = mesh_of(AxisType.Explicit)

    def with_residual(x: Any, residual: Any, bias: Any) -> Any:
        return sum(cunorm.rms_norm(x, None, bias, residual=residual))

    batch_norm = functools.partial(cunorm.batch_norm, training=True)
    group_norm = lambda x, *vectors: cunorm.group_norm(x, 4, *vectors)  # noqa: E731
    x, residual = (data(seed, (2 * PARTS, 4 * PARTS, 6), outliers=False) for seed in (1, 2))
    channels, columns = ([data(seed, (size,), outliers=False) + 2 for seed in (3, 4)] for size in (4 * PARTS, 6))
    # The function, its arrays, and how each is split.
    cases: list[tuple[Any, list[Any], list[tuple[Any, ...]]]] = [
        (cunorm.instance_norm, [x, *channels], [("data", "model"), (), ("data",)]),
        (group_norm, [x, *channels], [("data",), ("model",), ("data",)]),
        (batch_norm, [x, *channels], [("model", "data"), (), ("model",)]),
        (cunorm.layer_norm, [x, *columns], [("data",), ("model",), ()]),
        (lambda x, bias: cunorm.gelu(x, bias=bias), [x, columns[0]], [("data", None, "model"), ()]),
        (with_residual, [x, residual, columns[0]], [("data",), (None, "data"), ("model",)]),
    ]
    for function, arrays, specs in cases:
        gradient = jax.jit(jax.grad(loss_of(function), tuple(range(len(arrays)))))
        given = [put(array, *spec, mesh=mesh) for array, spec in zip(arrays, specs)]
        results = gradient(*given)
        assert_all_close(results, gradient(*map(jnp.asarray, arrays)), 2e-4)
        for result, array in zip(results, given):
            assert jax.typeof(result).sharding == jax.typeof(array).sharding, (function, specs)


def check_vmap_on_explicit_axes() -> None:
    """The batch, the samples or both are split, and stay where they are unless both are and become one axis."""
    mesh = mesh_of(AxisType.Explicit)
    x, weights = data(1, (2 * PARTS, 2 * PARTS, 4, 6)), data(2, (2 * PARTS, 4), outliers=False) + 2
    batch_norm = functools.partial(cunorm.batch_norm, training=True)
    group_norm = lambda x, *vectors: cunorm.group_norm(x, 2, *vectors)  # noqa: E731
    # The function, whether it has weights by example, and whether samples and the batch are one axis then.
    cases: list[tuple[Any, bool, bool]] = [
        (cunorm.layer_norm, False, False),
        (functools.partial(cunorm.layer_norm, axis=1), True, False),
        (cunorm.instance_norm, False, True),
        (cunorm.instance_norm, True, False),
        (group_norm, False, True),
        (group_norm, True, False),
        (batch_norm, True, False),
    ]
    for function, weighted, merged in cases:
        arrays = [x, weights] if weighted else [x]
        for spec in (("data",), (None, "data"), ("data", "model")):
            given = [put(array, *split, mesh=mesh) for array, split in zip(arrays, (spec, spec[:1]))]

            def loss(*arrays: Any, function: Any = function) -> Any:
                return function(*arrays).sum()

            for transformed in (function, jax.grad(loss), jax.grad(loss_of(function), tuple(range(len(arrays))))):
                results, needed, _ = of_compiled(jax.vmap(transformed), *given)
                assert_all_close(results, jax.vmap(transformed)(*map(jnp.asarray, arrays)), 2e-4)
                for result, array in zip(jax.tree.leaves(results), given):
                    assert jax.typeof(result).sharding == jax.typeof(array).sharding, (function, spec)
                moved = merged and spec == ("data", "model")
                # Whose channels must be whole, among which the batch is then.
                moved |= weighted and function is group_norm
                assert moved or set(needed) <= {"all-reduce"}, (function, spec, needed)


def check_vmap_of_split_weights_on_explicit_axes() -> None:
    """Of row norms, which jax.numpy computes: results are split as x is, and gradients as what they belong to."""
    mesh = mesh_of(AxisType.Explicit)

    def with_residual(x: Any, weight: Any, residual: Any) -> Any:
        return sum(cunorm.rms_norm(x, weight, residual=residual))

    x, residual = (data(seed, (2, 2 * PARTS, 8), outliers=False) for seed in (1, 2))
    weight, bias = (data(seed, (2, 8), outliers=False) for seed in (3, 4))
    # The function, its arrays, and how each is split.
    cases: list[tuple[Any, list[Any], list[tuple[Any, ...]]]] = [
        (cunorm.rms_norm, [x, weight], [(), (None, "model")]),
        (cunorm.layer_norm, [x, weight, bias], [(None, "data"), (None, "data"), ()]),
        (lambda x, bias: cunorm.gelu(x, bias=bias), [x, bias], [(None, None, "model"), (None, "data")]),
        (with_residual, [x, weight, residual], [(None, "data"), (None, "model"), (None, "model")]),
    ]
    for function, arrays, specs in cases:
        given = [put(array, *spec, mesh=mesh) for array, spec in zip(arrays, specs)]
        gradient = jax.grad(loss_of(function), tuple(range(len(arrays))))
        for transformed in (function, gradient):
            results = jax.jit(jax.vmap(transformed))(*given)
            assert_all_close(results, jax.vmap(transformed)(*map(jnp.asarray, arrays)), 2e-4)
            for result, array in zip(jax.tree.leaves(results), given):
                assert jax.typeof(result).sharding == jax.typeof(array).sharding, specs


def check_arrays_beside_those_of_a_mesh_with_explicit_axes() -> None:
    """Of one array alone the type may say how it is split; the other's is on no mesh."""
    mesh = mesh_of(AxisType.Explicit)

    def with_residual(x: Any, residual: Any) -> Any:
        return sum(cunorm.rms_norm(x, residual=residual))

    x, residual = (data(seed, (2, 2 * PARTS, 8), outliers=False) for seed in (1, 2))
    weight = data(3, (2, 8), outliers=False)
    gradient = jax.grad(loss_of(with_residual), (0, 1))
    results = jax.jit(gradient)(put(x[0], "data", mesh=mesh), residual[0])
    assert_all_close(results, gradient(*map(jnp.asarray, (x[0], residual[0]))), 2e-4)
    gradient = jax.vmap(jax.grad(loss_of(cunorm.rms_norm), (0, 1)))
    expected = gradient(*map(jnp.asarray, (x, weight)))
    for given in ((put(x, None, "data", mesh=mesh), weight), (x, put(weight, None, "model", mesh=mesh))):
        assert_all_close(jax.jit(gradient)(*given), expected, 2e-4)


def check_shard_map() -> None:
    for operation in (operation for operation in ROWS_FIRST if "batch" not in operation.name):
        x, *vectors = map(jnp.asarray, wide(operation))
        specs = (P("data"), *[P()] * len(vectors))
        places = tuple(range(1 + len(vectors)))
        gradient = jax.grad(loss_of(operation.function), places)
        expected = gradient(x, *vectors)
        for checked in (True, False):
            of_parts = jax.shard_map(
                operation.function, mesh=MESH, in_specs=specs, out_specs=P("data"), check_vma=checked
            )
            results, needed, _ = of_compiled(jax.grad(loss_of(of_parts), places), x, *vectors)
            assert_all_close(results, expected, 2e-4)
            assert "all-gather" not in needed


def check_shard_map_over_some_axes() -> None:
    x = jnp.asarray(data(1, (2 * PARTS, 8)))
    some = jax.shard_map(cunorm.layer_norm, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    if jax.config.jax_use_shardy_partitioner:
        assert_all_close(jax.jit(some)(x), cunorm.layer_norm(x))
        return
    try:
        jax.jit(some)(x)
    except RuntimeError as error:
        assert "the partitioner must be Shardy" in str(error)
    else:
        raise AssertionError("XLA can do it now")


def check_gradients_inside_shard_map() -> None:
    """The weight is the same everywhere, so JAX sums its gradient."""
    x, weight = jnp.asarray(data(1, (2 * PARTS, 8))), jnp.asarray(data(2, (8,), outliers=False))
    gradient = jax.grad(lambda x, weight: (cunorm.rms_norm(x, weight) ** 3).sum(), (0, 1))
    of_parts = jax.shard_map(gradient, mesh=MESH, in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    assert_all_close(jax.jit(of_parts)(x, weight), gradient(x, weight), 2e-4)


def check_flax_batch_norm_over_a_mesh() -> None:
    import flax.linen

    from cunorm.adapters.jax import linen

    x = jnp.asarray(data(1, (2 * PARTS, 3, 6), outliers=False)) * jnp.arange(1.0, 2 * PARTS + 1)[:, None, None]
    alone = flax.linen.BatchNorm(use_running_average=False)
    variables = alone.init(jax.random.key(0), x)

    def run(layer: Any, variables: Any, x: Any) -> Any:
        return layer.apply(variables, x, mutable=["batch_stats"])

    def loss(run: Any, variables: Any, x: Any) -> Any:
        y, updates = run(variables, x)
        return (y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), (y, updates)

    expected = jax.grad(functools.partial(loss, functools.partial(run, alone)), (0, 1), has_aux=True)(variables, x)
    layer = linen.BatchNorm(use_running_average=False, axis_name="data")
    for checked in (True, False):
        of_parts = jax.shard_map(
            functools.partial(run, layer),
            mesh=MESH,
            in_specs=(P(), P("data")),
            out_specs=(P("data"), P()),
            check_vma=checked,
        )
        gradient = jax.jit(jax.grad(functools.partial(loss, of_parts), (0, 1), has_aux=True))
        (dvariables, dx), results = gradient(variables, x)
        assert_all_close(results, expected[1], 1e-4)
        assert_all_close((dvariables["params"], dx), (expected[0][0]["params"], expected[0][1]), 1e-3)


def check_loops_and_checkpoints() -> None:
    x, weight = data(1, (2 * PARTS, 8)), data(2, (8,), outliers=False)

    def model(x: Any, weight: Any) -> Any:
        block = jax.checkpoint(lambda x: cunorm.layer_norm(x, weight, activation="gelu") + x)
        return jax.lax.scan(lambda x, _: (block(x), None), x, None, length=3)[0]

    gradient = jax.grad(loss_of(model), (0, 1))
    results, needed, _ = of_compiled(gradient, put(x, "data"), put(weight))
    assert_all_close(results, gradient(jnp.asarray(x), jnp.asarray(weight)), 2e-4)
    assert set(needed) == {"all-reduce"}


def main(partitioner: str, *names: str) -> int:
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    failed = 0
    for name in names:
        try:
            globals()[name]()
            print(name)
        except Exception:
            failed += 1
            print(f"{name} failed\n{traceback.format_exc()}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
