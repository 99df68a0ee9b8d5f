"""The layers for Flax NNX and Linen beside Flax's own: parameters, results, gradients, statistics, and refusals."""

from __future__ import annotations

import doctest
import functools
import importlib
import subprocess
import sys
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import data
from jax_cases import assert_all_close, calls_in

import cunorm

nnx: Any = importlib.import_module("cunorm.adapters.jax.nnx")
linen: Any = importlib.import_module("cunorm.adapters.jax.linen")

# The layer, its options, the shape of x, how many features there are, and how many kernels run.
LAYERS: list[tuple[str, dict[str, Any], tuple[int, ...], int, int]] = [
    ("LayerNorm", {}, (3, 5, 8), 8, 1),
    ("LayerNorm", {"epsilon": 0.1, "use_scale": False}, (4, 8), 8, 1),
    ("LayerNorm", {"use_bias": False, "use_fast_variance": False}, (4, 8), 8, 1),
    ("LayerNorm", {"reduction_axes": (1, 2), "feature_axes": (1, 2)}, (3, 4, 6), 24, 1),
    ("LayerNorm", {"reduction_axes": (1, 2)}, (3, 4, 6), 6, 1),
    ("RMSNorm", {}, (3, 5, 8), 8, 1),
    ("RMSNorm", {"use_scale": False, "epsilon": 0.1}, (3, 8), 8, 1),
    ("RMSNorm", {"reduction_axes": 1, "feature_axes": 1}, (3, 8, 5), 8, 1),
    ("GroupNorm", {"num_groups": 4}, (3, 5, 5, 8), 8, 1),
    ("GroupNorm", {"num_groups": 2}, (3, 8), 8, 1),
    ("GroupNorm", {"num_groups": None, "group_size": 2, "use_bias": False}, (3, 5, 8), 8, 1),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": (-3, -2, -1)}, (6, 5, 4, 8), 8, 1),
    ("InstanceNorm", {}, (3, 5, 5, 8), 8, 1),
    ("InstanceNorm", {"use_scale": False, "use_bias": False}, (3, 5, 8), 8, 1),
    ("InstanceNorm", {"feature_axes": 1}, (3, 8, 5), 8, 1),
    ("InstanceNorm", {"feature_axes": 2}, (3, 5, 8, 4), 8, 1),
    ("BatchNorm", {"use_running_average": False}, (6, 5, 8), 8, 1),
    ("BatchNorm", {"use_running_average": False, "momentum": 0.5, "axis": 1}, (6, 8, 5), 8, 1),
    ("BatchNorm", {"use_running_average": False, "axis": 0, "use_scale": False}, (8, 6, 5), 8, 1),
    ("BatchNorm", {"use_running_average": False, "use_bias": False}, (1, 8), 8, 0),
    ("BatchNorm", {"use_running_average": False, "axis": 1}, (1, 8, 1), 8, 0),
    ("BatchNorm", {"use_running_average": True}, (6, 5, 8), 8, 1),
]
# Every layer in float32 and all in bfloat16; dtypes that differ, of one layer with statistics and one without.
WITH_DTYPES = [
    (*layer, *dtypes)
    for layer in LAYERS
    for dtypes in [(None, "float32", "float32"), ("bfloat16", "float32", "bfloat16")]
] + [
    (*layer, *dtypes)
    for layer in (LAYERS[0], LAYERS[16])
    for dtypes in [(None, "float32", "bfloat16"), ("bfloat16", "float32", "float32"), ("float16",) * 3]
]
EVERY = pytest.mark.parametrize(
    ("name", "options", "shape", "features", "kernels", "dtype", "param_dtype", "x_dtype"), WITH_DTYPES, ids=str
)
# Of one rounding to sixteen bits, or two. Flax NNX computes all of an evaluated batch norm in bfloat16.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-7, "float16": 2.0**-9, "bfloat16 throughout": 2.0**-4}


def values_like(tree: Any) -> Any:
    """Other numbers, from 0.1 on, for the leaves of parameters and statistics."""
    leaves, structure = jax.tree.flatten(tree)
    drawn = [jnp.asarray(np.abs(data(5 + i, leaf.shape)) + 0.1, leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def assert_same(ours: Any, theirs: Any, name: str) -> None:
    assert_all_close(ours, theirs, TOLERANCE[name])


def narrowest_of(y: Any, x: Any, dtype: Any) -> str:
    return str(min((y.dtype, x.dtype, jnp.dtype(dtype or x.dtype)), key=lambda item: (item.itemsize, item.name)))


def loss_of(y: Any) -> Any:
    return (y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


@EVERY
def test_nnx(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    features: int,
    kernels: int,
    dtype: Any,
    param_dtype: Any,
    x_dtype: Any,
) -> None:
    x = jnp.asarray(data(1, shape, outliers=False), x_dtype)
    options = options | {"dtype": dtype, "param_dtype": param_dtype}
    ours, theirs = (getattr(of, name)(features, **options, rngs=flax.nnx.Rngs(0)) for of in (nnx, flax.nnx))
    graphdef, state = flax.nnx.split(ours)
    if jax.tree.leaves(state):
        assert_same(state, flax.nnx.state(theirs), "float32")
    state = values_like(state)
    their_graphdef, their_state = flax.nnx.split(theirs)
    assert jax.tree.structure(flax.nnx.to_pure_dict(state)) == jax.tree.structure(flax.nnx.to_pure_dict(their_state))
    flax.nnx.update(theirs, state)
    their_state = flax.nnx.state(theirs)
    flax.nnx.update(ours, their_state)  # and the other way

    def run(graphdef: Any, state: Any, x: Any) -> Any:
        layer = flax.nnx.merge(graphdef, state)
        y = layer(x)
        return loss_of(y), (y, flax.nnx.state(layer))

    gradient = jax.grad(run, (1, 2), has_aux=True, allow_int=True)
    (dstate, dx), (y, new) = jax.jit(gradient, static_argnums=0)(graphdef, flax.nnx.state(ours), x)
    (their_dstate, their_dx), (their_y, their_new) = jax.jit(gradient, static_argnums=0)(their_graphdef, their_state, x)
    narrowest = narrowest_of(y, x, dtype)
    if options.get("use_running_average") and narrowest == "bfloat16":
        narrowest = "bfloat16 throughout"
    assert_same(y, their_y, narrowest)
    assert_same(dx, their_dx, narrowest)
    if jax.tree.leaves(state.filter(flax.nnx.Param)):
        assert_same(*(tree.filter(flax.nnx.Param) for tree in (dstate, their_dstate)), narrowest)
    assert_same((new, y), (their_new, their_y), narrowest)


@EVERY
def test_linen(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    features: int,
    kernels: int,
    dtype: Any,
    param_dtype: Any,
    x_dtype: Any,
) -> None:
    x = jnp.asarray(data(1, shape, outliers=False), x_dtype)
    options = options | {"dtype": dtype, "param_dtype": param_dtype}
    ours, theirs = (getattr(of, name)(**options) for of in (linen, flax.linen))
    key = jax.random.key(0)
    variables = theirs.init(key, x)
    if variables:
        assert_same(ours.init(key, x), variables, "float32")
    variables = values_like(variables)

    def run(layer: Any, variables: Any, x: Any) -> Any:
        y, new = layer.apply(variables, x, mutable=["batch_stats"])
        return loss_of(y), (y, new)

    gradient = jax.grad(run, (1, 2), has_aux=True)
    (dvariables, dx), (y, new) = jax.jit(gradient, static_argnums=0)(ours, variables, x)
    (their_dvariables, their_dx), (their_y, their_new) = gradient(theirs, variables, x)
    narrowest = narrowest_of(y, x, dtype)
    assert_same(y, their_y, narrowest)
    assert_same(dx, their_dx, narrowest)
    if "params" in variables:
        assert_same(dvariables["params"], their_dvariables["params"], narrowest)
    assert_same((new, y), (their_new, their_y), narrowest)
    assert len(calls_in(lambda x: ours.apply(variables, x, mutable=["batch_stats"]), x)) == kernels


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_where_ranks_are_not_promoted(layer: Any) -> None:
    name, options, shape, features, _ = layer
    x = jnp.ones(shape)
    with jax.numpy_rank_promotion("raise"):
        getattr(nnx, name)(features, **options, rngs=flax.nnx.Rngs(0))(x)
        getattr(linen, name)(**options).init_with_output(jax.random.key(0), x)


@pytest.mark.parametrize("of", [linen, flax.linen], ids=["ours", "theirs"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_one_value_a_channel_that_is_not_finite(jit: bool, of: Any) -> None:
    """Both libraries go through the same test."""
    layer, x = of.BatchNorm(use_running_average=False, momentum=0.5), jnp.array([[jnp.nan, jnp.inf, 1.0]])
    apply = functools.partial(layer.apply, mutable=["batch_stats"])
    y, new = (jax.jit(apply) if jit else apply)(layer.init(jax.random.key(0), x), x)
    np.testing.assert_array_equal(y, [[np.nan, np.nan, 0]])
    np.testing.assert_array_equal(new["batch_stats"]["mean"], [np.nan, np.inf, 0.5])
    np.testing.assert_array_equal(new["batch_stats"]["var"], [np.nan, np.nan, 0.5])


@pytest.mark.parametrize("rows", [1, 2])
def test_running_statistics_are_constants(rows: int) -> None:
    layer, x = linen.BatchNorm(use_running_average=False), jnp.asarray(data(1, (rows, 8)))
    variables = layer.init(jax.random.key(0), x)

    def moved(x: Any) -> Any:
        _, new = layer.apply(variables, x, mutable=["batch_stats"])
        return sum(leaf.sum() for leaf in jax.tree.leaves(new))

    np.testing.assert_array_equal(jax.grad(moved)(x), jnp.zeros_like(x))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype"),
    [
        (None, "float32", "float64"),
        ("float32", "float32", "float64"),
        ("bfloat16", "float32", "float64"),
        (None, "float64", "float16"),
        (None, "float64", "float32"),
        (None, "float64", "int32"),
        ("float64", "float32", "float32"),
    ],
)
def test_dtypes_of_running_statistics(dtype: Any, param_dtype: str, x_dtype: str, rows: int) -> None:
    """Where there is float64, those of Flax, so that a step has the type that `jax.lax.scan` wants."""
    with jax.enable_x64(True):
        x = jnp.asarray(10 * data(1, (rows, 8), outliers=False), x_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "use_fast_variance": False}
        ours, theirs = (of.BatchNorm(use_running_average=False, **options) for of in (linen, flax.linen))
        variables = values_like(theirs.init(jax.random.key(0), x))
        y, new = ours.apply(variables, x, mutable=["batch_stats"])
        their_y, their_new = theirs.apply(variables, x, mutable=["batch_stats"])
        narrowest = str(min((their_y.dtype, jnp.dtype("float32")), key=lambda item: item.itemsize))
        assert_same(new, their_new, "float32")
        assert_same(y, their_y, narrowest)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "x_dtype"),
    [(None, "bfloat16", "bfloat16"), (None, "float64", "float32"), ("float32", "float32", "float64")],
)
def test_batch_norm_with_another_promote_dtype(dtype: Any, param_dtype: str, x_dtype: str, average: bool) -> None:
    """Such as one that leaves all as it is, mean and var in float32: Flax's result has the dtype of the others."""
    with jax.enable_x64(True):
        x = jnp.asarray(data(1, (6, 8), outliers=False), x_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": lambda arrays, dtype: arrays}
        ours, theirs = (
            of.BatchNorm(8, use_running_average=average, **options, rngs=flax.nnx.Rngs(0)) for of in (nnx, flax.nnx)
        )
        y, their_y = ours(x), theirs(x)
        assert_same(y, their_y, narrowest_of(y, x, "float32"))
        assert_same(flax.nnx.state(ours), flax.nnx.state(theirs), "float32")


def test_variables_stand_for_their_arrays() -> None:
    x, weight = jnp.arange(24.0).reshape(3, 8) ** 2, jnp.arange(8.0)
    of_x, of_weight = flax.nnx.Param(x), flax.nnx.Param(weight)
    expected = cunorm.rms_norm(x, weight)
    for given in ((x, of_weight), (of_x, weight), (of_x, of_weight)):
        np.testing.assert_array_equal(cunorm.rms_norm(*given), expected)
    gradient = flax.nnx.jit(flax.nnx.grad(lambda weight: cunorm.rms_norm(x, weight).sum()))(of_weight)
    np.testing.assert_allclose(gradient[...], jax.grad(lambda weight: cunorm.rms_norm(x, weight).sum())(weight))


@pytest.mark.parametrize("of", [nnx, linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm"])
def test_what_is_refused(of: Any, name: str) -> None:
    x: Any = jnp.ones((4, 3, 8))
    always = {"num_groups": 2} if name == "GroupNorm" else {}
    always |= {"use_running_average": False} if name == "BatchNorm" else {}

    def run(mask: Any = None, **options: Any) -> Any:
        if of is nnx:
            return getattr(of, name)(8, **always, **options, rngs=flax.nnx.Rngs(0))(x, mask=mask)
        return getattr(of, name)(**always, **options).init_with_output(jax.random.key(0), x, mask=mask)[0]

    assert run().shape == x.shape
    with pytest.raises(ValueError, match=f"mask is given to cunorm's {name}; it must be None"):
        run(jnp.ones((4, 3, 8), bool))
    with pytest.raises(ValueError, match=f"axis_index_groups of {name} is .*0.*; it must be None"):
        run(axis_index_groups=[[0]])
    if name != "BatchNorm":
        with pytest.raises(ValueError, match=f"axis_name of {name} is 'rows'; it must be None"):
            run(axis_name="rows")
    if of is linen:
        with pytest.raises(ValueError, match=f"force_float32_reductions of {name} is False; it must be True"):
            run(force_float32_reductions=False)
    x = jnp.ones(())
    with pytest.raises(ValueError, match=r"x has shape \(\); it must have an axis of channels"):
        run()
    x = None
    with pytest.raises(TypeError, match="x is a NoneType; it must be an array"):
        run()


def test_groups_of_few_axes_are_those_of_linen() -> None:
    """Flax's own layer of NNX repeats statistics along the second axis, whatever is reduced."""
    x, axes = jax.random.normal(jax.random.key(0), (2, 4, 4, 8)), (-1,)
    ours = nnx.GroupNorm(8, 2, reduction_axes=axes, rngs=flax.nnx.Rngs(0))(x)
    theirs = flax.linen.GroupNorm(2, reduction_axes=axes).init_with_output(jax.random.key(0), x)[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(ours - flax.nnx.GroupNorm(8, 2, reduction_axes=axes, rngs=flax.nnx.Rngs(0))(x)).max() > 1


def test_complex_numbers_are_refused() -> None:
    """Also where there is one value a channel, and nothing to call."""
    for rows in (1, 4):
        x = jnp.ones((rows, 8), jnp.complex64)
        for layer in (linen.LayerNorm(), linen.BatchNorm(use_running_average=False)):
            with pytest.raises(TypeError, match="x has dtype complex64; it must be one of float16"):
                layer.init(jax.random.key(0), x)


def test_axes_that_are_refused() -> None:
    x, rngs = jnp.ones((4, 3, 8)), flax.nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"reduction_axes is \(0, -1\) for x of shape .*; it must be the last axes"):
        nnx.GroupNorm(8, 2, reduction_axes=(0, -1), rngs=rngs)(x)
    with pytest.raises(ValueError, match=r"feature_axes is 0 for x of shape .*; the first axis must be the batch's"):
        nnx.InstanceNorm(4, feature_axes=0, rngs=rngs)(x)
    with pytest.raises(ValueError, match="num_groups is 32 and group_size 2; one of them must be None"):
        linen.GroupNorm(group_size=2).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="group_size is 3; it must divide the 8 channels of x"):
        linen.GroupNorm(num_groups=None, group_size=3).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="use_running_average is None here and in the constructor"):
        nnx.BatchNorm(8, use_running_average=None, rngs=rngs)(x)


@pytest.mark.parametrize("of", [nnx, linen], ids=["nnx", "linen"])
@pytest.mark.parametrize(
    ("name", "options", "axes"),
    [
        ("LayerNorm", {"reduction_axes": (1, 2)}, r"reduction_axes is \(1, 2\)"),
        ("LayerNorm", {"feature_axes": 2}, "feature_axes is 2"),
        ("RMSNorm", {"reduction_axes": -3}, "reduction_axes is -3"),
        ("GroupNorm", {"num_groups": 2, "reduction_axes": (1, 2, 3)}, r"reduction_axes is \(1, 2, 3\)"),
        ("InstanceNorm", {"feature_axes": (1, 3)}, r"feature_axes is \(1, 3\)"),
        ("BatchNorm", {"use_running_average": False, "axis": 3}, "axis is 3"),
    ],
)
def test_axes_that_x_has_not_are_refused(of: Any, name: str, options: dict[str, Any], axes: str) -> None:
    """Of images that lost an axis on the way: counted anew from the first axis, they would be those of the batch."""
    x = jnp.ones((4, 8))

    def run() -> None:
        if of is nnx:
            getattr(of, name)(8, **options, rngs=flax.nnx.Rngs(0))(x)
        else:
            getattr(of, name)(**options).init(jax.random.key(0), x)

    with pytest.raises(ValueError, match=f"{axes} for x of shape .*; it must name axes that x has"):
        run()


@pytest.mark.parametrize("of", [nnx, flax.nnx], ids=["ours", "theirs"])
def test_modes_of_nnx(of: Any) -> None:
    """train() and eval() are Flax's; both libraries go through the same test."""
    layer, x = of.BatchNorm(8, rngs=flax.nnx.Rngs(0)), jnp.asarray(data(1, (16, 8)))
    layer.eval()
    np.testing.assert_allclose(layer(x), x / np.sqrt(np.float32(1 + 1e-5)), rtol=1e-6)
    layer.train()
    np.testing.assert_allclose(layer(x).mean(0), np.zeros(8), atol=1e-5)
    np.testing.assert_allclose(layer.mean[...], 0.01 * x.mean(0), rtol=1e-4, atol=1e-6)


def test_batch_norm_over_an_axis_of_vmap() -> None:
    """As over the devices of a mesh, which tests of sharding show: values, statistics, and all gradients are Flax's."""
    x = jnp.asarray(data(1, (4, 6, 8), outliers=False)) * jnp.arange(1.0, 5)[:, None, None] + 3
    variables = values_like(flax.linen.BatchNorm().init(jax.random.key(0), x[0], use_running_average=False))

    def run(of: Any, variables: Any, x: Any) -> Any:
        layer = of.BatchNorm(use_running_average=False, axis_name="parts", use_fast_variance=False)
        apply = lambda x: layer.apply(variables, x, mutable=["batch_stats"])  # noqa: E731
        y, new = jax.vmap(apply, axis_name="parts")(x)
        return loss_of(y), (y, new)

    gradients, results = zip(*(jax.grad(run, (1, 2), has_aux=True)(of, variables, x) for of in (linen, flax.linen)))
    assert_same(results[0], results[1], "float32")
    assert_same(gradients[0][0]["params"], gradients[1][0]["params"], "float32")
    assert_same(gradients[0][1], gradients[1][1], "float32")


def test_a_model_of_linen_takes_the_layers_in_place() -> None:
    """Its parameters have the same names, so that those that were trained with Flax's layers serve."""

    def model(of: Any) -> Any:
        return flax.linen.Sequential([flax.linen.Dense(8), of.LayerNorm(), flax.linen.relu, of.GroupNorm(num_groups=2)])

    x = jnp.asarray(data(1, (4, 6)))
    variables = model(flax.linen).init(jax.random.key(0), x)
    assert_same(model(linen).apply(variables, x), model(flax.linen).apply(variables, x), "float32")
    names = {name for name in variables["params"] if "Norm" in name or "layers" in name}
    assert names == set(model(linen).init(jax.random.key(0), x)["params"])


@pytest.mark.parametrize("module", [nnx, linen], ids=["nnx", "linen"])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_flax_is_not_imported_for_jax() -> None:
    code = "import sys, cunorm.adapters.jax; print('flax' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
