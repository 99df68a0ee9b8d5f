"""Instance, group and batch norm: values, statistics and gradients, on the CPU, against float64 and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import NORM_TOLERANCE, assert_relu_stops_gradients, data, float64, relative_error
from channel_cases import (
    LAYOUTS,
    NAMES,
    SHAPES,
    Case,
    NumpyRunner,
    Shape,
    assert_forward,
    check,
)

import cunorm
from cunorm import channel_norm, reference
from cunorm.prepared import BACKWARD_OPERANDS, FORWARD_OPERANDS, Output, Prepared
from cunorm.problem import ACTIVATIONS, ChannelBackward, ChannelForward, ChannelTensor, RunningStatistics, Vector, View

DTYPES = list(NORM_TOLERANCE)
RUNNER = NumpyRunner()
# One shape of each norm, in both orders.
SOME = [
    Shape("instance_norm", (3, 6, 4, 5), "NCHW"),
    Shape("instance_norm", (3, 4, 5, 6), "NHWC"),
    Shape("group_norm", (3, 6, 4, 5), "NCHW", 2),
    Shape("group_norm", (3, 4, 5, 6), "NHWC", 2),
    Shape("batch_norm", (3, 6, 4, 5), "NCHW"),
    Shape("batch_norm", (3, 4, 5, 6), "NHWC"),
]


def channels_second(shape: Shape, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of x's shape as PyTorch's functions want it."""
    return tensor.movedim(-1, 1) if shape.data_format.endswith("C") else tensor


def of_pytorch(case: Case, shape: Shape, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    """PyTorch's own function of a case, for x in its data format, without an activation."""
    seen = channels_second(shape, x)
    if weight is None and bias is not None:  # which PyTorch's gradient of group norm does not take
        weight = torch.ones_like(bias)
    if case.name == "group_norm":
        y = F.group_norm(seen, case.num_groups or 0, weight, bias, case.eps)
    elif case.name == "batch_norm":
        running: list[Any] = [None, None]
        if case.running is not None:
            running = [torch.from_numpy(float64(case.running.mean)), torch.from_numpy(float64(case.running.var))]
        y = F.batch_norm(seen, *running, weight, bias, case.training, 0.1, case.eps)
    elif seen.shape[2:].numel() > 1:
        y = F.instance_norm(seen, weight=weight, bias=bias, eps=case.eps)
    else:  # which PyTorch refuses for one position
        y = F.group_norm(seen, case.channels, weight, bias, case.eps)
    return y.movedim(1, -1) if shape.data_format.endswith("C") else y


# ---- The definition, against PyTorch.


@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_pytorch(shape: Shape, affine: str) -> None:
    case = shape.case("float64", affine)
    dy = shape.array(17, "float64", "contiguous")
    given = [None if a is None else torch.from_numpy(a.copy()).requires_grad_() for a in case.tensors.values()]
    expected = of_pytorch(case, shape, *given)
    expected.backward(torch.from_numpy(dy))
    results = RUNNER.forward(case)
    np.testing.assert_allclose(results.y, expected.detach(), rtol=1e-10, atol=1e-10)
    gradients = RUNNER.backward(case.backward(results, dy))
    for gradient, tensor in zip(gradients, given):
        if tensor is not None:
            assert tensor.grad is not None
            scale = float(tensor.grad.abs().max())
            np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-9, atol=1e-9 * max(scale, 1.0))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.name == "batch_norm"], ids=str)
def test_evaluation_equals_pytorch(shape: Shape) -> None:
    case = shape.case("float64", running_dtype="float64", training=False)
    dy = shape.array(17, "float64", "contiguous")
    given = [torch.from_numpy(a.copy()).requires_grad_() for a in case.tensors.values() if a is not None]
    expected = of_pytorch(case, shape, *given)
    expected.backward(torch.from_numpy(dy))
    results = RUNNER.forward(case)
    np.testing.assert_allclose(results.y, expected.detach(), rtol=1e-11, atol=1e-11)
    for gradient, tensor in zip(RUNNER.backward(case.backward(results, dy)), given):
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in NAMES), ("batch_norm", False)])
def test_gradients_equal_finite_differences(name: str, training: bool, activation: str | None) -> None:
    shape = Shape(name, (3, 4, 5), "NCW", 2 if name == "group_norm" else None)
    running = None if training else "float64"
    case = shape.case("float64", running_dtype=running, training=training, activation=activation)
    dy = data(9, case.x.shape, "float64", outliers=False)

    def loss(**changed: Any) -> Any:
        arrays = {name: array.copy() for name, array in case.tensors.items() if array is not None} | changed
        return (RUNNER.forward(Case(name, **arrays, **others)).y * dy).sum()

    others: Any = {"data_format": "NCW", "num_groups": case.num_groups, "activation": activation}
    others |= {"running": case.running, "training": training}
    gradients = RUNNER.backward(case.backward(RUNNER.forward(case), dy))
    for (place, array), gradient in zip(case.tensors.items(), gradients):
        assert array is not None
        towards = data(5, array.shape, "float64", outliers=False)
        ahead, behind = (loss(**{place: array + step * towards}) for step in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient * towards).sum(), (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-7)


# ---- Values and gradients against float64.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: Shape, dtype: str) -> None:
    check(RUNNER, shape.case(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_activations(shape: Shape, activation: str, dtype: str) -> None:
    check(RUNNER, shape.case(dtype, activation=activation))


@pytest.mark.parametrize("shape", SOME, ids=str)
def test_relu_stops_gradients(shape: Shape) -> None:
    assert_relu_stops_gradients(RUNNER, shape.case("float32", activation="relu"))


@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_weight_and_bias_are_optional(shape: Shape, activation: str | None, affine: str) -> None:
    check(RUNNER, shape.case("float32", affine, activation=activation))


@pytest.mark.parametrize(
    ("dtype", "parameters"), [("float16", "float32"), ("bfloat16", "float64"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_mixed_dtypes(shape: Shape, dtype: str, parameters: str) -> None:
    check(RUNNER, shape.case(dtype, parameter_dtype=parameters, activation="gelu"))


@pytest.mark.parametrize("running_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_running_statistics(data_format: str, training: bool, dtype: str, running_dtype: str) -> None:
    for convention in ("torch", "keras"):
        update = {"momentum": 0.3, "convention": convention}
        shape = Shape("batch_norm", (3, 6, 4, 5), data_format)
        check(RUNNER, shape.case(dtype, running_dtype=running_dtype, training=training, update=update))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_gradients_that_lie_in_any_way(shape: Shape, layout: str) -> None:
    case = shape.case("float32")
    check(RUNNER, case, shape.array(17, "float32", layout, shift=0.1))
    check(RUNNER, case, np.broadcast_to(np.float32(0.5), case.x.shape))


@pytest.mark.parametrize(
    "mask", [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_output_mask(shape: Shape, mask: tuple[bool, bool, bool]) -> None:
    case = shape.case("float32")
    dy = shape.array(17, "float32")
    results = RUNNER.forward(case)
    every = RUNNER.backward(case.backward(results, dy))
    for wanted, gradient, one in zip(mask, every, RUNNER.backward(case.backward(results, dy, mask))):
        assert (one is not None) == wanted
        if wanted:
            np.testing.assert_array_equal(one, gradient)


@pytest.mark.parametrize("shape", SOME, ids=str)
def test_a_mean_far_above_the_deviation(shape: Shape) -> None:
    """E[x^2] - E[x]^2 would have no digits left."""
    case = shape.case("float32")
    x = (float64(case.x) * 1e-3 + 1000).astype(np.float32)
    shifted = Case(shape.name, x, data_format=shape.data_format, num_groups=shape.num_groups, eps=1e-12)
    assert_forward(shifted, RUNNER.forward(shifted), float32_statistics=1e-6)


def test_statistics_of_many_values() -> None:
    """Float32 sums of a million values that are not accurate by luck."""
    x = data(1, (2, 2, 1000, 500), "float32", shift=3.0)
    for name in NAMES:
        case = Case(name, x, num_groups=1 if name == "group_norm" else None)
        assert_forward(case, RUNNER.forward(case))


def test_statistics_are_float32_of_sixteen_bit_data() -> None:
    """Of numbers whose sum float16 does not hold."""
    x = np.full((4, 2, 300, 300), 200, np.float16)
    x[::2] = 202
    _, mean, rstd = cunorm.batch_norm(x, training=True, return_stats=True)
    assert mean.dtype == rstd.dtype == np.float32
    np.testing.assert_allclose(mean, 201, rtol=1e-7)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(1 + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_set(special: float) -> None:
    x = data(1, (2, 6, 5))
    x[1, 3, 2] = special
    groups = cunorm.group_norm(x, 3)
    assert (
        np.isnan(groups[1, 2:4]).any() and np.isfinite(groups[0]).all() and np.isfinite(groups[1, [0, 1, 4, 5]]).all()
    )
    instances = cunorm.instance_norm(x)
    assert np.isnan(instances[1, 3]).any() and np.isfinite(np.delete(instances.reshape(12, 5), 9, 0)).all()
    batch = cunorm.batch_norm(x, training=True)
    assert np.isnan(batch[:, 3]).any() and np.isfinite(np.delete(batch, 3, 1)).all()


def test_a_set_without_variance() -> None:
    """One position, or equal numbers: what is left is the bias."""
    bias = data(2, (4,))
    np.testing.assert_array_equal(
        cunorm.instance_norm(data(1, (3, 4, 1)), None, bias), np.tile(bias, (3, 1))[..., None]
    )
    np.testing.assert_array_equal(cunorm.instance_norm(data(1, (3, 4)), None, bias), np.tile(bias, (3, 1)))
    assert not cunorm.group_norm(np.full((2, 4, 5), 7, np.float32), 2).any()
    assert not cunorm.batch_norm(np.full((2, 4, 5), 7, np.float32), training=True).any()


# ---- Empty tensors.


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize(
    ("shape", "data_format"), [((0, 4, 3), "NCW"), ((2, 4, 0), "NCW"), ((2, 0, 4), "NWC"), ((0, 4), "NC...")], ids=str
)
def test_empty(shape: tuple[int, ...], data_format: str, dtype: str) -> None:
    x, weight = np.ones(shape, dtype), np.ones(4, "float32")
    for name, groups in (("instance_norm", 4), ("group_norm", 2)):
        options: Any = {"data_format": data_format}
        if name == "group_norm":
            options["num_groups"] = groups
        y, mean, rstd = getattr(cunorm, name)(x, weight=weight, return_stats=True, **options)
        assert y.shape == shape and y.dtype == dtype
        assert mean.shape == rstd.shape == (shape[0], groups)
        assert np.isnan(mean).all() and np.isnan(rstd).all()
        backward = getattr(cunorm, f"{name}_backward")
        dx, dweight, dbias = backward(x, x, weight=weight, mean=mean, rstd=rstd, **options)
        assert dx.shape == shape and dx.dtype == dtype
        assert not dweight.any() and not dbias.any() and dweight.shape == dbias.shape == (4,)


def test_empty_batches() -> None:
    x = np.ones((0, 4, 3), np.float32)
    running = {"running_mean": np.zeros(4), "running_var": np.ones(4)}
    y, mean, rstd = cunorm.batch_norm(x, training=False, return_stats=True, **running)
    assert y.shape == x.shape and not mean.any() and rstd.dtype == np.float32
    dx, dweight, dbias = cunorm.batch_norm_backward(x, x, None, mean, rstd)
    assert dx.shape == x.shape and not dweight.any() and not dbias.any()
    assert all(np.isnan(statistic).all() for statistic in cunorm.batch_norm_stats(x))


def test_no_channels() -> None:
    x = np.ones((2, 0, 3), np.float32)
    y, mean, rstd = cunorm.instance_norm(x, return_stats=True)
    assert y.shape == x.shape and mean.shape == rstd.shape == (2, 0)
    y, mean, _ = cunorm.batch_norm(x, training=True, return_stats=True)
    assert y.shape == x.shape and mean.shape == (0,)


# ---- Running statistics.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_running_statistics_over_many_steps(data_format: str, dtype: torch.dtype) -> None:
    layer = torch.nn.BatchNorm2d(6, momentum=0.2, dtype=dtype)
    running = {"running_mean": torch.zeros(6, dtype=dtype), "running_var": torch.ones(6, dtype=dtype)}
    generator = torch.Generator().manual_seed(0)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-6, "atol": 2e-6}
    for step in range(30):
        x = torch.randn(4, 6, 3, 5, generator=generator, dtype=dtype) * (1 + step % 3) + step % 5
        ours = x if data_format == "NCHW" else x.movedim(1, -1)
        y = cunorm.batch_norm(ours, training=True, momentum=0.2, data_format=data_format, **running)
        torch.testing.assert_close(y if data_format == "NCHW" else y.movedim(-1, 1), layer(x).detach(), **tolerance)
        torch.testing.assert_close(running["running_mean"], layer.running_mean, **tolerance)
        torch.testing.assert_close(running["running_var"], layer.running_var, **tolerance)
    layer.eval()
    y = cunorm.batch_norm(x, training=False, **running)
    torch.testing.assert_close(y, layer(x).detach(), **tolerance)


@pytest.mark.parametrize("axis", [-1, 1])
def test_the_convention_of_keras(axis: int) -> None:
    keras = pytest.importorskip("keras")
    layer = keras.layers.BatchNormalization(axis=axis, momentum=0.9, epsilon=1e-3)
    data_format = "NWC" if axis == -1 else "NCW"
    running = {"running_mean": np.zeros(6, np.float32), "running_var": np.ones(6, np.float32)}
    options: Any = {"data_format": data_format, "momentum": 0.9, "convention": "keras", "eps": 1e-3, **running}
    for step in range(12):
        x = data(step, (4, 6, 6), shift=step, outliers=False)
        y = cunorm.batch_norm(x, training=True, **options)
        np.testing.assert_allclose(y, np.asarray(layer(x, training=True)), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(running["running_mean"], np.asarray(layer.moving_mean), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(running["running_var"], np.asarray(layer.moving_variance), rtol=1e-4)
    y = cunorm.batch_norm(x, training=False, **options)
    np.testing.assert_allclose(y, np.asarray(layer(x, training=False)), rtol=1e-4, atol=1e-4)


def test_the_conventions_differ_in_momentum_and_divisor() -> None:
    x = np.array([[1.0], [3.0], [8.0]])  # of mean 4 and variance 26 / 3 or 13
    for convention, mean, var in (("torch", 0.25 * 4, 0.75 + 0.25 * 13), ("keras", 0.75 * 4, 0.25 + 0.75 * 26 / 3)):
        running = {"running_mean": np.zeros(1), "running_var": np.ones(1)}
        cunorm.batch_norm(x, training=True, momentum=0.25, convention=convention, **running)
        np.testing.assert_allclose([running["running_mean"][0], running["running_var"][0]], [mean, var], rtol=1e-14)


@pytest.mark.parametrize(("convention", "default"), [("torch", 0.1), ("keras", 0.99)])
def test_each_convention_has_its_own_default_momentum(convention: str, default: float) -> None:
    x, results = data(1, (5, 3)), []
    for momentum in ({}, {"momentum": None}, {"momentum": default}):
        running = {"running_mean": np.zeros(3), "running_var": np.ones(3)}
        cunorm.batch_norm(x, training=True, convention=convention, **momentum, **running)
        results.append((running["running_mean"].tolist(), running["running_var"].tolist()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 1, 1)])
def test_one_value_per_channel_in_the_convention_of_keras(shape: tuple[int, ...]) -> None:
    """The biased variance is 0 there and not undefined; the last batch of an epoch may be one sample."""
    x, weight, bias = data(1, shape), data(2, (6,)), data(3, (6,))
    running = {"running_mean": np.zeros(6, np.float32), "running_var": np.ones(6, np.float32)}
    options: Any = {"training": True, "convention": "keras"}
    y, mean, rstd = cunorm.batch_norm(x, weight, bias, **options, momentum=0.75, return_stats=True, **running)
    np.testing.assert_array_equal(y.reshape(6), bias)
    np.testing.assert_array_equal(running["running_mean"], 0.25 * x.reshape(6))
    np.testing.assert_array_equal(running["running_var"], np.full(6, 0.75, np.float32))
    dx, dweight, dbias = cunorm.batch_norm_backward(x, x, weight, mean, rstd)
    assert not dx.any() and not dweight.any()
    np.testing.assert_array_equal(dbias, x.reshape(6))


def test_evaluation_of_half_precision_with_float32_statistics() -> None:
    shape = Shape("batch_norm", (4, 8, 5, 3), "NCHW")
    case = shape.case("float16", running_dtype="float32", parameter_dtype="float32", training=False)
    check(RUNNER, case)
    assert case.running is not None
    given = [torch.from_numpy(float64(array)) for array in (case.x, case.running.mean, case.running.var)]
    expected = F.batch_norm(*given, torch.from_numpy(float64(case.weight)), torch.from_numpy(float64(case.bias)), False)
    assert relative_error(RUNNER.forward(case).y, expected.numpy()) <= NORM_TOLERANCE["float16"]


def test_evaluation_returns_the_running_statistics() -> None:
    case = Shape("batch_norm", (4, 8, 5), "NCW").case("float32", running_dtype="float16", training=False)
    assert case.running is not None
    results = RUNNER.forward(case)
    np.testing.assert_array_equal(results.mean, case.running.mean.astype(np.float32))
    np.testing.assert_allclose(results.rstd, 1 / np.sqrt(float64(case.running.var) + case.eps), rtol=2e-7)


def test_momentum_of_nothing_and_of_all() -> None:
    x = data(1, (4, 3, 5), "float64")
    for momentum, mean in ((0, np.zeros(3)), (1, x.mean((0, 2)))):
        running = {"running_mean": np.zeros(3), "running_var": np.ones(3)}
        cunorm.batch_norm(x, training=True, momentum=momentum, **running)
        np.testing.assert_allclose(running["running_mean"], mean, rtol=1e-12)


# ---- Statistics on their own, and their merging.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.name == "batch_norm"], ids=str)
def test_batch_norm_stats(shape: Shape, dtype: str) -> None:
    case = shape.case(dtype)
    mean, var = cunorm.batch_norm_stats(case.x, data_format=shape.data_format)
    expected_mean, expected_var = reference.channel_statistics(case.seen(float64(case.x)))
    assert mean.shape == var.shape == (case.channels,) and mean.dtype == var.dtype == case.statistic_dtype
    tolerance = 1e-14 if dtype == "float64" else 3e-7
    assert np.all(np.abs(mean - expected_mean[0]) <= tolerance * (np.abs(expected_mean[0]) + np.sqrt(expected_var[0])))
    np.testing.assert_allclose(var, expected_var[0], rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5), (2, 0, 5), (0, 3, 4), (1,) * 7], ids=str)
def test_merged_statistics_are_those_of_the_whole(sizes: tuple[int, ...], dtype: str) -> None:
    x = data(1, (7, 4, 6), dtype, shift=10.0)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    means, variances = zip(*map(cunorm.batch_norm_stats, parts))
    counts = [part.shape[0] * 6 for part in parts]
    expected = x.astype(np.float64).mean((0, 2)), x.astype(np.float64).var((0, 2))
    every = [(means, variances, counts), (np.stack(means), np.stack(variances), np.array(counts))]
    for given in every:
        for result, value in zip(cunorm.merge_batch_norm_stats(*given), expected):
            assert result.dtype == dtype
            np.testing.assert_allclose(result, value, rtol=1e-13 if dtype == "float64" else 1e-6)


def test_a_batch_in_parts_is_normalized_as_the_whole() -> None:
    """As the README says: each part with the merged statistics, as if they were running ones."""
    x, weight, bias = data(1, (7, 4, 6), "float64"), data(2, (4,)), data(3, (4,))
    parts = np.split(x, [3])
    means, variances = zip(*map(cunorm.batch_norm_stats, parts))
    mean, var = cunorm.merge_batch_norm_stats(means, variances, [18, 24])
    options = {"running_mean": mean, "running_var": var, "training": False}
    y = np.concatenate([cunorm.batch_norm(part, weight, bias, **options) for part in parts])
    np.testing.assert_allclose(y, cunorm.batch_norm(x, weight, bias, training=True), rtol=1e-12, atol=1e-12)


def test_running_statistics_that_are_parameters() -> None:
    x, mean, var = torch.randn(3, 4), torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        y = cunorm.batch_norm(x, running_mean=mean, running_var=var, training=False, eps=0.0)
        torch.testing.assert_close(y, x)


def test_what_was_merged_has_memory_of_its_own() -> None:
    means, variances = np.ones((2, 4)), np.ones((2, 4))
    mean, var = cunorm.merge_batch_norm_stats(means, variances, [0, 3])
    mean += 1
    var += 1
    assert (means == 1).all() and (variances == 1).all()


def test_merging_keeps_small_variances_beside_large_means() -> None:
    x = (data(1, (8, 3, 50), "float64", outliers=False) * 1e-3 + 100).astype(np.float32)
    means, variances = zip(*(cunorm.batch_norm_stats(part) for part in np.split(x, 4)))
    _, var = cunorm.merge_batch_norm_stats(means, variances, [100] * 4)
    np.testing.assert_allclose(var, x.astype(np.float64).var((0, 2)), rtol=1e-2)


def test_merged_statistics_in_pytorch() -> None:
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
    means, variances = zip(*map(cunorm.batch_norm_stats, x.split([1, 2, 3])))
    for counts in ([5, 10, 15], torch.tensor([5.0, 10.0, 15.0])):
        for given in ((means, variances), (torch.stack(means), torch.stack(variances))):
            mean, var = cunorm.merge_batch_norm_stats(*given, counts)
            torch.testing.assert_close(mean, x.mean((0, 2)))
            torch.testing.assert_close(var, x.var((0, 2), correction=0))


def test_pytorch_compiles_the_merging_of_statistics_as_one_graph() -> None:
    means, variances = torch.randn(2, 3), torch.rand(2, 3)
    merge = torch.compile(cunorm.merge_batch_norm_stats, backend="eager", fullgraph=True)
    for given in ((means, variances), (list(means), tuple(variances))):
        torch.testing.assert_close(merge(*given, [5, 10]), cunorm.merge_batch_norm_stats(*given, [5, 10]))


# ---- Where results lie.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_results_lie_as_x_does(shape: Shape, layout: str) -> None:
    x = shape.array(1, "float32", layout)
    expected = x.strides if layout != "strided" else np.empty(x.shape, np.float32).strides
    case = Shape(shape.name, shape.shape, shape.data_format, shape.num_groups, layout).case()
    y, mean, rstd = getattr(cunorm, shape.name)(case.x, **case.options, return_stats=True)
    assert y.strides == expected
    backward = getattr(cunorm, f"{shape.name}_backward")
    for dy in (x, np.ones(x.shape, np.float32)):
        dx, _, _ = backward(dy, case.x, weight=None, mean=mean, rstd=rstd, **case.options)
        assert dx.strides == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((3, 6, 4, 5), torch.channels_last), ((2, 6, 2, 3, 4), torch.channels_last_3d)],
    ids=["2d", "3d"],
)
def test_channels_last_stays_so(name: str, shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).contiguous(memory_format=memory_format).requires_grad_()
    options: Any = {"training": True} if name == "batch_norm" else {"num_groups": 3} if name == "group_norm" else {}
    y = getattr(cunorm, name)(x, **options)
    assert y.is_contiguous(memory_format=memory_format) and not y.is_contiguous()
    y.backward(torch.ones_like(y, memory_format=torch.contiguous_format) * x.detach() ** 2)
    assert x.grad is not None and x.grad.is_contiguous(memory_format=memory_format) and not x.grad.is_contiguous()
    plain = x.detach().contiguous().requires_grad_()
    same = getattr(cunorm, name)(plain, **options)
    assert same.is_contiguous()
    same.backward(plain.detach() ** 2)
    torch.testing.assert_close(y, same)
    torch.testing.assert_close(x.grad, plain.grad)
    out = torch.full_like(x.detach(), torch.nan)
    with torch.no_grad():
        assert getattr(cunorm, name)(x, **options, out=out) is out
    torch.testing.assert_close(out, y.detach())


@pytest.mark.parametrize("layout", ["contiguous", "other order"])
@pytest.mark.parametrize("shape", SOME, ids=str)
def test_out_may_be_x(shape: Shape, layout: str) -> None:
    case = Shape(shape.name, shape.shape, shape.data_format, shape.num_groups, layout).case()
    x = case.x.copy(order="K")
    assert x.strides == case.x.strides
    results = RUNNER.forward(case)
    function = getattr(cunorm, shape.name)
    assert function(x, weight=case.weight, bias=case.bias, **case.options, out=x) is x
    np.testing.assert_array_equal(x, results.y)


# ---- What a GPU is asked for.


Asked = tuple[Any, tuple[str, ...], tuple[Output | None, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The problems, operands and outputs that launches are prepared for."""
    made: list[Asked] = []

    def prepare(problem: Any, operands: Any, outputs: Any, device: tuple[str, int]) -> Prepared:
        made.append((problem, operands, outputs))
        return Prepared(outputs, device, 0, lambda pointers, workspace, stream: None)

    monkeypatch.setattr(channel_norm, "prepare_launches", prepare)
    return made


def on_gpu(shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> View:
    return Output(shape, dtype, order).view(("cuda", 0))._replace(pointer=256)


CHANNELS_LAST = (0, 2, 3, 1)


def test_the_problem_of_a_group_norm(asked: list[Asked]) -> None:
    op = channel_norm.ChannelNorm.of("group_norm", "NCHW", 1e-3, "silu", 4)
    x, weight, bias = on_gpu((3, 8, 4, 5), "float16", CHANNELS_LAST), on_gpu((8,), "float32"), on_gpu((8,), "float16")
    op.prepare_forward(x, None, weight, bias, None, True)
    like_x, statistic = Output((3, 8, 4, 5), "float16", CHANNELS_LAST), Output((3, 4), "float32")
    tensor = ChannelTensor("float16", 160, 1, (8,))
    vectors = Vector("float32"), Vector("float16")
    problem: Any = ChannelForward(3, 8, (20,), 2, tensor, tensor, *vectors, True, 1e-3, "silu")
    assert asked.pop() == (problem, FORWARD_OPERANDS, (like_x, None, statistic, statistic))

    dy, rstd = on_gpu((3, 8, 4, 5), "float16"), on_gpu((3, 4), "float32")
    op.prepare_backward(dy, None, x, weight, bias, rstd, rstd, (True, True, False), None)
    of_dy = ChannelTensor("float16", 160, 20, (1,))
    problem = ChannelBackward(3, 8, (20,), 2, of_dy, tensor, tensor, *vectors, "float32", None, "silu")
    assert asked.pop() == (problem, BACKWARD_OPERANDS, (like_x, Output((8,), "float32"), None))


@pytest.mark.parametrize("training", [True, False])
def test_the_problem_of_a_batch_norm(asked: list[Asked], training: bool) -> None:
    op = channel_norm.ChannelNorm.of("batch_norm", "NC...", 1e-3, training=training, momentum=0.25, convention="keras")
    x, mean, var = on_gpu((3, 8, 5), "float32"), on_gpu((8,), "float32"), on_gpu((8,), "float64")
    op.prepare_forward(x, None, None, None, None, False, (mean, var))
    statistics = Vector("float32"), Vector("float64")
    running = (
        RunningStatistics(*statistics, False, 0.25, 0.75, False) if training else RunningStatistics(*statistics, True)
    )
    tensor = ChannelTensor("float32", 0, 5, (40, 1))
    problem = ChannelForward(1, 8, (3, 5), 1, tensor, tensor, None, None, False, 1e-3, None, running)
    problem_asked, operands, outputs = asked.pop()
    assert problem_asked == problem and outputs == (Output((3, 8, 5), "float32"), None, None, None)
    names = ("x", "residual", "weight", "bias", "y", "running_mean", "running_var", "residual_out", "mean", "rstd")
    assert operands == names

    rstd = on_gpu((8,), "float32")
    op.prepare_backward(x, None, x, None, None, rstd, rstd, (True, False, False), None)
    assert asked.pop()[0] == ChannelBackward(
        1, 8, (3, 5), 1, tensor, tensor, tensor, None, None, None, None, given=not training
    )


def test_the_problem_of_statistics_alone(asked: list[Asked]) -> None:
    x, statistic = on_gpu((3, 4, 5, 8), "bfloat16"), Output((8,), "float32")
    channel_norm.ChannelNorm.of("batch_norm_stats", "N...C").prepare_forward(x, None, None, None, None, True)
    problem = ChannelForward(1, 8, (60,), 1, ChannelTensor("bfloat16", 0, 1, (8,)), None, None, None, True, 0.0)
    assert asked.pop() == (problem, FORWARD_OPERANDS, (None, None, statistic, statistic))
