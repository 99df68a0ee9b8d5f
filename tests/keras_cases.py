"""The Keras layers on one backend, the one that KERAS_BACKEND names: test_keras.py runs this in a process for each.

Everything is compared with Keras's own layers.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import cunorm
from cunorm.adapters import keras as layers

Array = np.ndarray[Any, Any]

BACKEND = keras.backend.backend()
# Largest difference from Keras's own result, beside the largest value. Sixteen bits are rounded once, not always to the
# same side. Keras subtracts the mean after it has scaled, and takes some constants for float32 where data is float64.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5, "float64": 1e-6, "int32": 0}
NAMES = ["LayerNormalization", "RMSNormalization", "GroupNormalization", "BatchNormalization"]
# A layer of each name and kind: its arguments, and the shape of what it gets.
LAYERS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("LayerNormalization", {}, (4, 3, 8)),
    ("LayerNormalization", {"axis": [1, 2], "epsilon": 1e-5}, (4, 3, 8)),
    ("LayerNormalization", {"axis": [0, 2], "center": False}, (4, 3, 8)),
    ("LayerNormalization", {"axis": (1, 3), "scale": False}, (4, 3, 5, 8)),
    ("LayerNormalization", {"center": False, "scale": False}, (4, 8)),
    ("RMSNormalization", {}, (4, 3, 8)),
    ("RMSNormalization", {"axis": [1, 2], "epsilon": 1e-3}, (4, 3, 8)),
    ("GroupNormalization", {"groups": 4}, (4, 3, 8)),
    ("GroupNormalization", {"groups": 2, "axis": 1, "center": False}, (4, 8, 3, 5)),
    ("GroupNormalization", {"groups": -1, "scale": False}, (4, 3, 5, 6)),
    ("GroupNormalization", {"groups": 2}, (4, 6)),
    ("BatchNormalization", {}, (4, 3, 8)),
    ("BatchNormalization", {"axis": 1, "momentum": 0.5, "scale": False}, (4, 8, 3, 5)),
    ("BatchNormalization", {"epsilon": 1e-5, "center": False}, (6, 8)),
    ("BatchNormalization", {}, (1, 8)),
]
# What is left to Keras's own computation.
LEFT: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("LayerNormalization", {"axis": [1, -1]}, (4, 3, 5, 8)),
    ("RMSNormalization", {"axis": 1}, (4, 8, 8)),
    ("GroupNormalization", {"groups": 1, "axis": 2}, (4, 8, 3, 5)),
    ("BatchNormalization", {"axis": 2}, (4, 8, 3, 5)),
]
PAIRS = pytest.mark.parametrize(("name", "arguments", "shape"), LAYERS, ids=str)
# All of them in float32, and the first of each name in what else there is.
POLICIES = ["mixed_float16", "mixed_bfloat16", "float64"]
FIRST = [next(layer for layer in LAYERS if layer[0] == name) for name in NAMES]
VALUES = [(*layer, "float32") for layer in LAYERS] + [(*layer, policy) for layer in FIRST for policy in POLICIES]


def values(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Array:
    return (np.random.default_rng(seed).normal(size=shape) * 2 + 0.5).astype(dtype)


def array(tensor: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(tensor)).astype(np.float64)


def dtype_of(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))


def assert_same(ours: Any, theirs: Any) -> None:
    """Two tensors, or two lists of weights, are the same within rounding."""
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            assert one.shape == other.shape and one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        return
    assert tuple(ours.shape) == tuple(theirs.shape) and dtype_of(ours) == dtype_of(theirs)
    size = np.abs(array(theirs)).max(initial=1e-30)
    assert np.abs(array(ours) - array(theirs)).max(initial=0) <= TOLERANCE[dtype_of(theirs)] * size


def pair(name: str, arguments: dict[str, Any], shape: tuple[int, ...], /, **options: Any) -> tuple[Any, Any]:
    """Our layer and Keras's own, with the same weights, no two of them equal."""
    ours, theirs = getattr(layers, name)(**arguments, **options), getattr(keras.layers, name)(**arguments, **options)
    for layer in (ours, theirs):
        layer.build(shape)
    weights = [np.random.default_rng(i).uniform(0.5, 2, w.shape) for i, w in enumerate(theirs.get_weights())]
    for layer in (ours, theirs):
        layer.set_weights(weights)
    return ours, theirs


@pytest.fixture(scope="module", autouse=True)
def _float32_products() -> None:
    """A GPU multiplies matrices of float32 as such, so that models can be compared."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)
    elif BACKEND == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "float32")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the norms that cunorm computes."""
    names: list[str] = []

    def recording(name: str) -> Callable[..., Any]:
        function = getattr(layers, name)

        def record(*arguments: Any, **options: Any) -> Any:
            names.append(name)
            return function(*arguments, **options)

        return record

    for name in ("batch_norm", "group_norm", "layer_norm", "rms_norm"):
        monkeypatch.setattr(layers, name, recording(name))
    return names


def test_doctests() -> None:
    module = importlib.import_module("cunorm.adapters.keras")
    failed, tried = doctest.testmod(module)
    assert tried > 10 and not failed


def test_backend_is_the_one_that_was_asked_for() -> None:
    assert os.environ["KERAS_BACKEND"] == BACKEND


# ---- What a layer computes.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("axis", "shape"), [(-1, (0, 5, 4)), (1, (2, 3, 0))], ids=str)
def test_an_empty_batch_is_kerass(axis: int, shape: tuple[int, ...], training: bool) -> None:
    ours, theirs = pair("BatchNormalization", {"axis": axis}, shape)
    x = np.zeros(shape, "float32")
    assert_same(ours(x, training=training), theirs(x, training=training))


@pytest.mark.parametrize(("name", "arguments", "shape", "policy"), VALUES, ids=str)
def test_values(name: str, arguments: dict[str, Any], shape: tuple[int, ...], policy: str, computed: list[str]) -> None:
    ours, theirs = pair(name, arguments, shape, dtype=policy)
    # Batch norm twice in training, so that moving statistics move twice, and then with those.
    calls = [{"training": True}, {"training": True}, {}] if name == "BatchNormalization" else [{}]
    for step, options in enumerate(calls):
        x = values(shape, step, "float64" if policy == "float64" else "float32")
        assert_same(ours(x, **options), theirs(x, **options))
    assert len(computed) == len(calls)
    assert_same(ours.get_weights(), theirs.get_weights())


@pytest.mark.parametrize(("name", "arguments", "shape"), [*FIRST, LEFT[0]], ids=str)
def test_arrays_of_numpy(name: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    """`call` and `stateless_call` get them as they are, and not as tensors, as a layer that is called makes of them."""
    ours, theirs = pair(name, arguments, shape)
    x, options = values(shape), {"training": True} if name == "BatchNormalization" else {}
    y, moved = ours.stateless_call(ours.trainable_variables, ours.non_trainable_variables, x, **options)
    assert_same(ours.call(x, **options), theirs(x, **options))
    assert_same(y, theirs(x, **options))
    assert_same([*map(array, moved)], [array(weight) for weight in ours.non_trainable_variables])


def test_layer_normalization_of_one_axis_in_the_middle() -> None:
    """Which Keras's own layer cannot on PyTorch."""
    layer = layers.LayerNormalization(axis=1)
    x = values((4, 3, 8))
    np.testing.assert_allclose(array(layer(x)), cunorm.layer_norm(x, axis=1, eps=1e-3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "arguments", "shape"), LEFT, ids=str)
def test_what_is_left_to_keras(
    name: str, arguments: dict[str, Any], shape: tuple[int, ...], computed: list[str]
) -> None:
    ours, theirs = pair(name, arguments, shape)
    options = {"training": True} if name == "BatchNormalization" else {}
    assert_same(ours(values(shape), **options), theirs(values(shape), **options))
    assert not computed


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_rms_scaling(computed: list[str]) -> None:
    """It divides by the deviation of what it does not center: no norm of cunorm's."""
    ours, theirs = pair("LayerNormalization", {"rms_scaling": True}, (4, 8))
    assert ours.beta is None
    assert_same(ours(values((4, 8))), theirs(values((4, 8))))
    assert not computed


@pytest.mark.parametrize("name", NAMES)
def test_integers_are_left_to_keras(name: str, computed: list[str]) -> None:
    arguments = {"groups": 2} if name == "GroupNormalization" else {}
    ours, theirs = pair(name, arguments, (4, 8), autocast=False)
    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    assert_same(ours(x), theirs(x))
    assert not computed


@pytest.mark.parametrize("axis", [-1, 1])
def test_instance_normalization(axis: int, computed: list[str]) -> None:
    shape = (3, 4, 5, 6)
    ours, theirs = layers.InstanceNormalization(axis=axis), keras.layers.GroupNormalization(groups=-1, axis=axis)
    for layer in (ours, theirs):
        layer.build(shape)
        layer.set_weights([values((shape[axis],), i) for i in range(2)])
    assert [weight.name for weight in ours.weights] == ["gamma", "beta"]
    assert_same(ours(values(shape)), theirs(values(shape)))
    assert computed == ["group_norm"]
    config = ours.get_config()
    assert "groups" not in config
    assert layers.InstanceNormalization.from_config(config).get_config() == config


def test_batch_normalization_that_is_not_trainable() -> None:
    ours, theirs = pair("BatchNormalization", {}, (4, 8))
    before = ours.get_weights()
    for layer in (ours, theirs):
        layer.trainable = False
    assert_same(ours(values((4, 8)), training=True), theirs(values((4, 8)), training=True))
    assert_same(ours.get_weights(), before)
    assert len(ours.non_trainable_weights) == 4


def test_moving_variance_is_never_negative() -> None:
    layer = layers.BatchNormalization(momentum=0.0, epsilon=1.0)
    for scale in (0.0, 1e-6, 1e-4):
        layer(1 + scale * values((64, 33)), training=True)
        assert array(layer.moving_variance).min() >= 0


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_with_a_mask(training: bool, computed: list[str]) -> None:
    """Masked values do not count: Keras computes that."""
    ours, theirs = pair("BatchNormalization", {}, (4, 5, 8))
    mask = keras.ops.convert_to_tensor(np.arange(20).reshape(4, 5) % 3 > 0)
    x = values((4, 5, 8))
    options = {"training": training, "mask": mask}
    assert_same(ours(x, **options), theirs(x, **options))
    assert_same(ours.get_weights(), theirs.get_weights())
    assert not computed


@pytest.mark.parametrize("name", ["LayerNormalization", "GroupNormalization"])
def test_masks_are_handed_on(name: str) -> None:
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    embedded = keras.layers.Embedding(4, 8, mask_zero=True)(tokens)
    y = getattr(layers, name)(**({"groups": 2} if name == "GroupNormalization" else {}))(embedded)
    np.testing.assert_array_equal(array(keras.src.backend.get_keras_mask(y)), tokens != 0)


def test_renorm_and_synchronized(computed: list[str]) -> None:
    kinds: list[dict[str, Any]] = [{"synchronized": True}] if BACKEND == "tensorflow" else []
    if "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters:  # not in older Keras
        kinds.append({"renorm": True, "renorm_clipping": {"rmax": 2.0}})
    for arguments in kinds:
        ours, theirs = pair("BatchNormalization", arguments, (4, 8))
        assert_same(ours(values((4, 8)), training=True), theirs(values((4, 8)), training=True))
        assert_same(ours.get_weights(), theirs.get_weights())
    assert not computed


# ---- What a layer is, to Keras.


@PAIRS
def test_configuration_and_weights(name: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    ours, theirs = pair(name, arguments, shape, name="norm", dtype="mixed_bfloat16")
    assert ours.get_config() == theirs.get_config()
    for one, other in ((ours, theirs), (ours.trainable_weights, theirs.trainable_weights)):
        described = [
            [(weight.name, weight.shape, weight.dtype, weight.trainable) for weight in getattr(group, "weights", group)]
            for group in (one, other)
        ]
        assert described[0] == described[1]
    again = type(ours).from_config(ours.get_config())
    assert type(again) is type(ours) and again.get_config() == ours.get_config()
    assert re.fullmatch(r"[a-z]+_normalization(_\d+)?", getattr(layers, name)(**arguments).name)


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_inputs(name: str) -> None:
    for dtype in ("float32", "mixed_float16"):
        arguments: dict[str, Any] = {"dtype": dtype} | ({"groups": 2} if name == "GroupNormalization" else {})
        symbolic = keras.Input((None, 8))
        ours, theirs = getattr(layers, name)(**arguments)(symbolic), getattr(keras.layers, name)(**arguments)(symbolic)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) == ((None, None, 8), ours.dtype)


def test_inputs_that_are_not_dense(computed: list[str]) -> None:
    """TensorFlow's, of which Keras takes the ragged ones in most layers."""
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    ragged = tf.RaggedTensor.from_row_lengths(values((5, 8)), [2, 3])
    for name in ("LayerNormalization", "RMSNormalization", "BatchNormalization"):
        ours, theirs = (layer(ragged) for layer in pair(name, {}, (2, None, 8)))
        assert isinstance(ours, tf.RaggedTensor) and ours.row_lengths().numpy().tolist() == [2, 3]
        np.testing.assert_array_equal(ours.flat_values, theirs.flat_values)
    for layer in pair("LayerNormalization", {}, (5, 8)):
        with pytest.raises(ValueError, match="SparseTensor"):
            layer(tf.sparse.from_dense(values((5, 8))))
    assert not computed


def test_instance_normalization_has_no_groups() -> None:
    with pytest.raises(TypeError, match="InstanceNormalization has no groups; GroupNormalization has"):
        layers.InstanceNormalization(groups=2)


def test_wrong_arguments_are_keras_own_errors() -> None:
    with pytest.raises(ValueError, match="cannot be more than"):
        layers.GroupNormalization(groups=16)(values((2, 8)))
    with pytest.raises(TypeError, match="axis"):
        layers.LayerNormalization(axis="last")
    layer = layers.LayerNormalization()
    layer.build((4, 8))
    with pytest.raises(ValueError, match="weight has shape"):
        layer(values((4, 7)))


# ---- Models.


def model(own: bool, seed: int = 3) -> Any:
    """A model with each of the norms, of batches and lengths that it is not told. ``own``: Keras's layers."""
    source = keras.layers if own else layers
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((None, 4))
    y = keras.layers.Dense(8)(inputs)
    y = source.BatchNormalization(momentum=0.8, name="batch")(y)
    y = y + keras.layers.Dense(8, activation="gelu")(source.LayerNormalization(name="layer")(y))
    y = source.GroupNormalization(groups=4, name="group")(y)
    y = y + keras.layers.Dense(8, activation="relu")(source.RMSNormalization(name="rms")(y))
    y = source.GroupNormalization(groups=-1, name="instance")(y)
    y = keras.layers.GlobalMaxPooling1D()(y)
    return keras.Model(inputs, keras.layers.Dense(1)(source.BatchNormalization(name="last")(y)))


def trained(given: Any, batch_size: int = 17, loss_scale: float | None = None, **options: Any) -> list[float]:
    """The losses of three epochs of 17 samples."""
    optimizer = keras.optimizers.SGD(0.02)
    if loss_scale is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=loss_scale)
    given.compile(optimizer, "mse", **options)
    x, y = values((17, 5, 4)), values((17, 1), 1)
    history = given.fit(x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0)
    return [float(loss) for loss in history.history["loss"]]


def test_fit_and_predict(computed: list[str]) -> None:
    """In batches of eight, of which the last is one sample."""
    ours, theirs = model(False), model(True)
    assert_same(ours.get_weights(), theirs.get_weights())
    losses = trained(ours, 8)
    assert len(set(computed)) == 4
    np.testing.assert_allclose(losses, trained(theirs, 8), rtol=2e-4)
    assert losses[-1] < losses[0]
    for one, other in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    x = values((6, 7, 4), 5)  # another batch and length
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), rtol=1e-3, atol=1e-4)


def test_fit_with_mixed_precision() -> None:
    """Sixteen bits train too, with a scaled loss.

    Not by 2^15, with which Keras begins: gradients reach 65,000 then, and rounding decides whether a step is left out.
    """
    keras.config.set_dtype_policy("mixed_float16")
    try:
        losses = [trained(model(own), loss_scale=2.0**10) for own in (False, True)]
        np.testing.assert_allclose(*losses, rtol=0.05)
        assert losses[0][2] < losses[0][1] < losses[0][0]
    finally:
        keras.config.set_dtype_policy("float32")


def test_norms_that_are_not_trainable_stay() -> None:
    ours = model(False)
    for name in ("batch", "last", "layer"):
        ours.get_layer(name).trainable = False
    before = [ours.get_layer(name).get_weights() for name in ("batch", "last", "layer")]
    trained(ours)
    for name, weights in zip(("batch", "last", "layer"), before):
        assert_same(ours.get_layer(name).get_weights(), weights)


def test_saved_and_loaded(tmp_path: Path) -> None:
    inner, x = model(False), values((6, 7, 4), 5)
    ours = keras.Sequential([layers.InstanceNormalization(center=False, name="first"), inner])
    trained(ours)
    ours.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for one, other in ((again, ours), (again.layers[1], inner)):
        assert [type(layer) for layer in one.layers] == [type(layer) for layer in other.layers]
    assert again.get_layer("first").get_config() == ours.get_layer("first").get_config()
    assert_same(again.get_weights(), ours.get_weights())
    np.testing.assert_array_equal(again.predict(x, verbose=0), ours.predict(x, verbose=0))
    # Training goes on where it was.
    assert trained(again) == pytest.approx(trained(ours), rel=2e-4)


def test_exported(tmp_path: Path) -> None:
    """As a SavedModel of TensorFlow's, which computes in this process."""
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    ours, x = model(False), values((6, 7, 4), 5)
    trained(ours)
    ours.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.serve(x), ours.predict(x, verbose=0))


def test_weights_of_keras_own_layers(tmp_path: Path) -> None:
    """Either way, as a list and as a file. In files a layer goes by the name of its class."""
    ours, theirs, x = model(False, 1), model(True, 2), values((6, 7, 4), 5)
    expected = theirs.predict(x, verbose=0)
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    ours.load_weights(tmp_path / "theirs.weights.h5")
    np.testing.assert_allclose(ours.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-4)
    other = model(False, 4)
    other.save_weights(tmp_path / "ours.weights.h5")
    theirs.load_weights(tmp_path / "ours.weights.h5")
    assert_same(theirs.get_weights(), other.get_weights())
    theirs.set_weights(ours.get_weights())
    np.testing.assert_allclose(theirs.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-4)


def test_models_with_other_layers_in_place() -> None:
    """There and back, in a model inside of a model too."""
    theirs = keras.Sequential([keras.Input((5, 4)), keras.layers.BatchNormalization(trainable=False), model(True)])
    ours = keras.models.clone_model(theirs, clone_function=layers.from_keras, recursive=True)
    ours.set_weights(theirs.get_weights())
    norms = {"BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"}
    inner = [layer for layer in ours.layers[-1].layers if type(layer).__name__ in norms]
    assert len(inner) == 6 and all(type(layer).__module__ == layers.__name__ for layer in (ours.layers[0], *inner))
    assert ours.layers[0].trainable is False
    x = values((3, 5, 4))
    np.testing.assert_allclose(array(ours(x)), array(theirs(x)), rtol=1e-3, atol=1e-4)
    back = keras.models.clone_model(ours, clone_function=layers.to_keras, recursive=True)
    assert [type(layer) for layer in back.layers[-1].layers] == [type(layer) for layer in theirs.layers[-1].layers]
    instance = layers.InstanceNormalization(axis=1, name="instance")
    instance.build((2, 6, 5))
    assert (
        layers.to_keras(instance).get_config()
        == keras.layers.GroupNormalization(-1, axis=1, name="instance").get_config()
    )

    class Own(keras.layers.LayerNormalization):  # type: ignore[misc]
        pass

    assert type(layers.from_keras(Own())) is Own


def test_registered_names() -> None:
    for name in layers.__all__[:-2]:
        assert keras.saving.get_registered_object(f"cunorm>{name}") is getattr(layers, name)


def test_what_is_no_layer_is_refused() -> None:
    for convert in (layers.from_keras, layers.to_keras):
        for given, kind in ((None, "a NoneType"), (keras.layers.LayerNormalization, "a type")):
            with pytest.raises(TypeError, match=rf"layer is {kind}; it must be a keras\.layers\.Layer"):
                convert(given)


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    model(False).summary()
    printed = capsys.readouterr().out
    assert "GroupNormali" in printed and "LayerNormali" in printed


def test_functions_in_a_layer() -> None:
    """Of a model that knows nothing of how many samples there will be."""

    class Block(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

        def call(self, x: Any) -> Any:
            return cunorm.layer_norm(x, self.scale.value, residual=x, activation="silu")[0]

    model = keras.Sequential([keras.Input((8,)), Block(), keras.layers.Dense(1)])
    assert model.output_shape == (None, 1)
    assert model(values((3, 8))).shape == (3, 1)


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"x is a KerasTensor, .* in the call of a layer"):
        cunorm.layer_norm(keras.Input((8,)))
    variable, x = keras.Variable(np.ones(8, "float32")), keras.ops.ones((2, 8))
    assert_same(cunorm.rms_norm(x, variable.value), cunorm.rms_norm(x))
    if BACKEND in ("torch", "numpy"):
        with pytest.raises(TypeError, match=r"x is a .*Variable; .*such as its \.value"):
            cunorm.layer_norm(variable)
        with pytest.raises(TypeError, match=r"weight is a Variable; .*such as its \.value"):
            cunorm.rms_norm(x, variable)


def test_a_model_that_is_a_class() -> None:
    """Keras finds the shapes of such a model by calling it with tensors that are none."""

    class Block(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = [layers.LayerNormalization(), layers.BatchNormalization(), layers.GroupNormalization(groups=2)]

        def call(self, x: Any, training: bool = False) -> Any:
            for layer in self.inner:
                x = layer(x, training=training) if isinstance(layer, layers.BatchNormalization) else layer(x)
            return x

    block = Block()
    assert block(keras.Input((6, 8))).shape == (None, 6, 8)
    before = block.get_weights()
    block.compute_output_spec(keras.KerasTensor((None, 6, 8)), training=True)
    assert_same(block.get_weights(), before)
    assert block(values((2, 6, 8))).shape == (2, 6, 8)


def test_xla() -> None:
    """TensorFlow cannot compile a call into Python: Keras asks the layers, warns who wants it, and goes on without."""
    given = model(False)
    assert {given.get_layer(name).supports_jit for name in ("batch", "group", "layer")} == {BACKEND != "tensorflow"}
    if BACKEND == "tensorflow":
        with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
            losses = trained(given, jit_compile=True)
        np.testing.assert_allclose(losses, trained(model(True)), rtol=2e-4)
    elif BACKEND == "jax":
        given.compile("sgd", "mse")
        assert given.jit_compile is True


@pytest.mark.gpu
def test_results_are_on_the_gpu() -> None:
    """Where Keras put what it was given."""
    y = layers.LayerNormalization()(keras.ops.convert_to_tensor(values((64, 256))))
    place = str(y.devices() if BACKEND == "jax" else y.device).lower()
    if "cpu" in place:
        pytest.skip(f"needs an NVIDIA GPU that Keras's {BACKEND} backend sees")
    assert "gpu" in place or "cuda" in place
