"""Wrong use of instance, group and batch norm is answered before anything runs, as `test_errors` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from error_cases import MAKERS, Make, as_numpy_array, as_torch_tensor, assert_refused, forbid_computing, values

import cunorm
from cunorm import adapters, execute
from cunorm.problem import View
from cunorm.text import kind_of

SHAPE = (4, 6, 8)
NAN = float("nan")
# Each norm with what it must be given.
NORMS: dict[str, dict[str, Any]] = {
    "instance_norm": {},
    "group_norm": {"num_groups": 3},
    "batch_norm": {"training": True},
}
FORMATS = "'NC...', 'N...C', 'NCW', 'NWC', 'NCHW', 'NHWC', 'NCDHW', 'NDHWC'"


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture(params=list(NORMS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever would compute something fails the test."""
    forbid_computing(monkeypatch)
    yield


def refused(name: str, error: type[Exception], message: str, x: Any, **options: Any) -> None:
    """A norm raises ``error``, exactly, with the whole of ``message`` in its text, and changes no argument."""
    assert_refused(getattr(cunorm, name), error, message, (), {"x": x} | NORMS[name] | options)


def gradient_refused(name: str, error: type[Exception], message: str, x: Any, make: Make, **options: Any) -> None:
    """Likewise for the gradients of a norm, whose statistics and dy would fit."""
    shape = {"instance_norm": (4, 6), "group_norm": (4, 3), "batch_norm": (6,)}[name]
    arguments = {"dy": x, "x": x, "weight": None, "mean": make(np.ones(shape)), "rstd": make(np.ones(shape))}
    assert_refused(getattr(cunorm, f"{name}_backward"), error, message, (), arguments | NORMS[name] | options)


def running(make: Make, **changed: Any) -> dict[str, Any]:
    return {"running_mean": make(np.zeros(6)), "running_var": make(np.ones(6))} | changed


def test_nothing_runs_is_seen(make: Make, name: str) -> None:
    """The fixture above must notice a call that is not refused."""
    x = make(values(*SHAPE))
    with pytest.raises(pytest.fail.Exception, match="something was computed"):
        getattr(cunorm, name)(x, **NORMS[name])
    with pytest.raises(pytest.fail.Exception, match="something was computed"):
        gradient_refused(name, ValueError, "", x, make)


# ---- data_format, num_groups and dimensions.


@pytest.mark.parametrize("data_format", ["NCH", "nchw", "", "CN", "NHC", "N..C"])
def test_data_format_that_is_not_known(make: Make, name: str, data_format: str) -> None:
    message = f"data_format is {data_format!r}; it must be one of {FORMATS}"
    refused(name, ValueError, message, make(values(*SHAPE)), data_format=data_format)
    gradient_refused(name, ValueError, message, make(values(*SHAPE)), make, data_format=data_format)
    assert_refused(cunorm.batch_norm_stats, ValueError, message, (make(values(4, 6)),), {"data_format": data_format})


@pytest.mark.parametrize("data_format", [None, 1, b"NCHW", ["NCHW"]])
def test_data_format_of_another_type(make: Make, name: str, data_format: Any) -> None:
    message = f"data_format is {kind_of(data_format)}; it must be one of {FORMATS}"
    refused(name, TypeError, message, make(values(*SHAPE)), data_format=data_format)


@pytest.mark.parametrize(
    ("data_format", "shape", "dimensions"),
    [
        ("NCW", (4, 6), 3),
        ("NWC", (4, 6, 8, 2), 3),
        ("NCHW", (4, 6, 8), 4),
        ("NHWC", (4, 6, 8, 2, 2), 4),
        ("NCDHW", (4, 6, 8, 2), 5),
        ("NDHWC", (4, 6), 5),
        ("NC...", (4,), "2 or more"),
        ("N...C", (), "2 or more"),
    ],
)
def test_dimensions(make: Make, name: str, data_format: str, shape: Any, dimensions: Any) -> None:
    x = make(values(*shape))
    message = (
        f"x has {len(shape)} dimensions (shape {shape}); for data_format {data_format!r} it must have {dimensions}"
    )
    refused(name, ValueError, message, x, data_format=data_format)
    gradient_refused(name, ValueError, message, x, make, data_format=data_format)
    assert_refused(cunorm.batch_norm_stats, ValueError, message, (x,), {"data_format": data_format})


@pytest.mark.parametrize("num_groups", [0, -1, -6])
def test_num_groups_that_is_not_positive(make: Make, num_groups: int) -> None:
    message = f"num_groups is {num_groups}; it must be positive"
    refused("group_norm", ValueError, message, make(values(*SHAPE)), num_groups=num_groups)
    gradient_refused("group_norm", ValueError, message, make(values(*SHAPE)), make, num_groups=num_groups)


@pytest.mark.parametrize("num_groups", [2.0, None, True, "2", [2], 1.5])
def test_num_groups_of_another_type(make: Make, num_groups: Any) -> None:
    message = f"num_groups is {kind_of(num_groups)}; it must be a positive int"
    refused("group_norm", TypeError, message, make(values(*SHAPE)), num_groups=num_groups)
    gradient_refused("group_norm", TypeError, message, make(values(*SHAPE)), make, num_groups=num_groups)


@pytest.mark.parametrize(
    ("shape", "data_format", "num_groups", "channels"),
    [
        ((4, 6, 8), "NCW", 4, 6),
        ((4, 6, 8), "NWC", 3, 8),
        ((4, 6), "NC...", 12, 6),
        ((4, 6, 8), "NC...", 10**30, 6),
        ((4, 0, 8), "NCW", 2, 0),
    ],
)
def test_num_groups_that_does_not_divide_the_channels(
    make: Make, shape: Any, data_format: str, num_groups: int, channels: int
) -> None:
    found = f"num_groups is {num_groups} and x has {channels} channels (shape {shape})"
    options = {"data_format": data_format, "num_groups": num_groups}
    message = f"{found}; the number of channels must be a positive multiple of it"
    refused("group_norm", ValueError, message, make(values(*shape)), **options)
    gradient_refused("group_norm", ValueError, message, make(values(*shape)), make, **options)


# ---- eps, activation, output_mask.


def test_eps_and_activation(make: Make, name: str) -> None:
    x = make(values(*SHAPE))
    refused(name, ValueError, "eps must be finite and not negative; got -1.0", x, eps=-1)
    refused(name, TypeError, "eps is a str; it must be a number, finite and not negative", x, eps="1e-5")
    message = "activation is 'tanh'; it must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh'"
    refused(name, ValueError, message, x, activation="tanh")
    gradient_refused(name, ValueError, message, x, make, activation="tanh")
    refused(name, TypeError, "activation is a list; it must be None or one of 'relu'", x, activation=["relu"])


@pytest.mark.parametrize(("mask", "error"), [((True, True), ValueError), (None, TypeError), ((1, 1, 1), TypeError)])
def test_output_mask(make: Make, name: str, mask: Any, error: type[Exception]) -> None:
    message = f"output_mask must be three bools, for dx, dweight and dbias; got {mask!r}"
    gradient_refused(name, error, message, make(values(*SHAPE)), make, output_mask=mask)


# ---- Types, dtypes, shapes and strides.


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
def test_dtypes(make: Make, name: str, argument: str, dtype: str) -> None:
    message = f"{argument} has dtype {dtype}; it must be one of float16, bfloat16, float32, float64"
    wrong = make(np.ones(SHAPE if argument == "x" else 6), dtype)
    refused(name, TypeError, message, **({"x": make(values(*SHAPE))} | {argument: wrong}))
    if argument == "x":
        assert_refused(cunorm.batch_norm_stats, TypeError, message, (wrong,), {})


@pytest.mark.parametrize("argument", ["weight", "bias", "out", "running_mean"])
def test_tensors_of_another_framework(argument: str) -> None:
    shape = SHAPE if argument == "out" else (6,)
    for make, other, kind in (
        (as_numpy_array, as_torch_tensor, "a Tensor"),
        (as_torch_tensor, as_numpy_array, "an ndarray"),
    ):
        options = running(make) | {argument: other(np.ones(shape))}
        message = f"{argument} is {kind}; beside a "
        refused("batch_norm", TypeError, message, make(values(*SHAPE)), **options)


def test_x_that_is_no_tensor(name: str) -> None:
    refused(name, TypeError, "x is a builtins.list; it must be a NumPy, CuPy, PyTorch, JAX or TensorFlow", [[1.0]])
    assert_refused(cunorm.batch_norm_stats, TypeError, "x is a builtins.NoneType; it must be a ", (None,), {})


@pytest.mark.parametrize("argument", ["weight", "bias"])
@pytest.mark.parametrize(
    ("data_format", "shape", "channels"), [("NCW", (8,), 6), ("NWC", (6,), 8), ("NCW", (1, 6), 6), ("NCW", (), 6)]
)
def test_shapes_of_weight_and_bias(
    make: Make, name: str, argument: str, data_format: str, shape: Any, channels: int
) -> None:
    message = f"{argument} has shape {shape}; for x of shape (4, 6, 8) it must be ({channels},)"
    options: dict[str, Any] = {"data_format": data_format, argument: make(np.ones(shape))}
    if name == "group_norm":
        options["num_groups"] = 2
    refused(name, ValueError, message, make(values(*SHAPE)), **options)


@pytest.mark.parametrize("argument", ["weight", "bias", "running_mean", "running_var"])
def test_vectors_must_be_contiguous(make: Make, argument: str) -> None:
    message = f"{argument} has strides (2,) (in elements) for shape (6,); it must be C-contiguous"
    options = running(make) | {argument: make(np.ones(12))[::2]}
    refused("batch_norm", ValueError, message, make(values(*SHAPE)), **options)
    refused("batch_norm", ValueError, message, make(values(*SHAPE)), **options, training=False)


def test_out(make: Make, name: str) -> None:
    x = make(values(*SHAPE))
    message = "out has shape (4, 8, 6); for x of shape (4, 6, 8) it must be (4, 6, 8)"
    refused(name, ValueError, message, x, out=make(np.ones((4, 8, 6))))
    message = "out has dtype float64; for x of dtype float32 it must be float32"
    refused(name, TypeError, message, x, out=make(np.ones(SHAPE), "float64"))


def transposed(tensor: Any) -> Any:
    return tensor.transpose(1, 2) if isinstance(tensor, torch.Tensor) else tensor.transpose(0, 2, 1)


def test_out_must_lie_as_x_does(make: Make, name: str) -> None:
    x, other = make(values(*SHAPE)), transposed(make(values(4, 8, 6)))
    message = "out has strides (48, 1, 6) (in elements) for shape (4, 6, 8); it must be C-contiguous"
    refused(name, ValueError, message, x, out=transposed(make(np.ones((4, 8, 6)))))
    found = "out has strides (48, 8, 1) (in elements) for shape (4, 6, 8)"
    message = f"{found}; it must lie in memory as x does, with strides (48, 1, 6)"
    refused(name, ValueError, message, other, out=make(np.ones(SHAPE)))
    message = "out has strides (96, 16, 2) (in elements) for shape (4, 6, 8); it must be C-contiguous"
    strided = make(values(4, 6, 16))[..., ::2]
    refused(name, ValueError, message, strided, out=make(np.ones((4, 6, 16)))[..., ::2])


def test_what_is_read_only(name: str) -> None:
    x, out = as_numpy_array(values(*SHAPE)), np.ones(SHAPE, np.float32)
    out.flags.writeable = False
    refused(name, ValueError, "out is read-only", x, out=out)
    for argument in ("running_mean", "running_var"):
        options = running(as_numpy_array)
        options[argument].flags.writeable = False
        message = f"{argument} is read-only; in training it is updated in place"
        refused("batch_norm", ValueError, message, x, **options)


# ---- Batch norm: training and running statistics.


@pytest.mark.parametrize("training", [None, 1, "True", np.array([True])])
def test_training_of_another_type(make: Make, training: Any) -> None:
    message = f"training is {kind_of(training)}; it must be a bool"
    refused("batch_norm", TypeError, message, make(values(*SHAPE)), training=training)
    gradient_refused("batch_norm", TypeError, message, make(values(*SHAPE)), make, training=training)


def test_training_must_be_said() -> None:
    with pytest.raises(TypeError, match="training"):
        cunorm.batch_norm(as_numpy_array(values(*SHAPE)))  # type: ignore[call-arg]


@pytest.mark.parametrize("momentum", [-0.1, 1.5, NAN, float("inf")])
def test_momentum_out_of_range(make: Make, momentum: float) -> None:
    message = f"momentum is {momentum}; it must be from 0 to 1"
    refused("batch_norm", ValueError, message, make(values(*SHAPE)), momentum=momentum)


@pytest.mark.parametrize("momentum", [True, "0.1", [0.1], torch.tensor(0.1)])
def test_momentum_of_another_type(make: Make, momentum: Any) -> None:
    message = f"momentum is {kind_of(momentum)}; it must be a number from 0 to 1"
    refused("batch_norm", TypeError, message, make(values(*SHAPE)), momentum=momentum)


def test_convention(make: Make) -> None:
    x = make(values(*SHAPE))
    refused("batch_norm", ValueError, "convention is 'tf'; it must be 'torch' or 'keras'", x, convention="tf")
    refused("batch_norm", TypeError, "convention is a NoneType; it must be 'torch' or 'keras'", x, convention=None)


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 1), (1, 6, 1, 1)])
def test_one_value_per_channel_in_training(make: Make, shape: Any) -> None:
    message = f"x has one value per channel (shape {shape}); in training there must be more than one"
    refused("batch_norm", ValueError, message, make(values(*shape)), **running(make))


@pytest.mark.parametrize("shape", [(0, 6), (4, 6, 0), (0, 6, 3)])
def test_no_values_in_training(make: Make, shape: Any) -> None:
    message = f"x has no values per channel (shape {shape}); in training there must be more than one"
    refused("batch_norm", ValueError, message, make(np.ones(shape)), **running(make))
    message = f"x has no values per channel (shape {shape}); in training there must be at least one"
    refused("batch_norm", ValueError, message, make(np.ones(shape)), convention="keras")


def test_evaluation_without_running_statistics(make: Make) -> None:
    message = "running_mean and running_var are None; with training=False they must be given"
    refused("batch_norm", ValueError, message, make(values(*SHAPE)), training=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("missing", "other"), [("running_mean", "running_var"), ("running_var", "running_mean")])
def test_one_of_the_running_statistics(make: Make, training: bool, missing: str, other: str) -> None:
    message = f"{missing} is None and {other} is given; they must be given both, or neither"
    options = running(make, **{missing: None})
    refused("batch_norm", ValueError, message, make(values(*SHAPE)), training=training, **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("argument", ["running_mean", "running_var"])
def test_shape_and_dtype_of_running_statistics(make: Make, training: bool, argument: str) -> None:
    x = make(values(*SHAPE))
    for shape in ((8,), (1, 6), ()):
        message = f"{argument} has shape {shape}; for x of shape (4, 6, 8) it must be (6,)"
        options = running(make, **{argument: make(np.ones(shape))})
        refused("batch_norm", ValueError, message, x, training=training, **options)
    message = f"{argument} has dtype int64; it must be one of float16, bfloat16, float32, float64"
    options = running(make, **{argument: make(np.ones(6), "int64")})
    refused("batch_norm", TypeError, message, x, training=training, **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("argument", ["running_mean", "running_var"])
def test_running_statistics_that_require_gradients(training: bool, argument: str) -> None:
    x, must = torch.ones(SHAPE), "running statistics are constants to differentiation"
    message = f"{argument} requires a gradient; {must}: give {argument}.detach()"
    for given in (x, x.clone().requires_grad_()):
        options = running(as_torch_tensor)
        options[argument].requires_grad_()
        with pytest.raises(ValueError) as raised:
            cunorm.batch_norm(given, training=training, **options)
        assert str(raised.value) == message


# ---- Gradients.


@pytest.mark.parametrize("argument", ["mean", "rstd"])
def test_gradients_need_statistics(make: Make, name: str, argument: str) -> None:
    message = f"{argument} is None; it must be the {argument} that {name} returned"
    gradient_refused(name, TypeError, message, make(values(*SHAPE)), make, **{argument: None})


@pytest.mark.parametrize("argument", ["mean", "rstd"])
def test_statistics_of_the_gradient(make: Make, name: str, argument: str) -> None:
    x, expected = make(values(*SHAPE)), {"instance_norm": (4, 6), "group_norm": (4, 3), "batch_norm": (6,)}[name]
    for shape in ((4, 6, 1), (4,), (24,)):
        message = f"{argument} has shape {shape}; for x of shape (4, 6, 8) it must be {expected}"
        gradient_refused(name, ValueError, message, x, make, **{argument: make(np.ones(shape))})
    message = f"{argument} has dtype float64; for x of dtype float32 it must be float32"
    gradient_refused(name, TypeError, message, x, make, **{argument: make(np.ones(expected), "float64")})


def test_dy_of_the_gradient(make: Make, name: str) -> None:
    x = make(values(*SHAPE))
    message = "dy has shape (4, 8, 6); for x of shape (4, 6, 8) it must be (4, 6, 8)"
    gradient_refused(name, ValueError, message, x, make, dy=make(values(4, 8, 6)))
    message = "dy has dtype float16; for x of dtype float32 it must be float32"
    gradient_refused(name, TypeError, message, x, make, dy=make(values(*SHAPE), "float16"))
    message = "weight has shape (8,); for x of shape (4, 6, 8) it must be (6,)"
    gradient_refused(name, ValueError, message, x, make, weight=make(np.ones(8)))


# ---- Devices.


@pytest.mark.parametrize("argument", ["weight", "bias", "out", "running_mean", "running_var"])
def test_tensors_on_different_devices(monkeypatch: pytest.MonkeyPatch, make: Make, argument: str) -> None:
    x, options = make(values(*SHAPE)), running(make)
    options[argument] = make(np.ones(SHAPE if argument == "out" else 6))
    adapter = adapters.adapter_of(x)
    view = adapter.view

    def faked(tensor: Any, name: str) -> View:
        return view(tensor, name)._replace(device=("cuda", 1 if name == "x" else 0), pointer=4096)

    monkeypatch.setattr(adapter, "view", faked)
    monkeypatch.setattr(execute, "_calls", {})  # a kind of call that was prepared is not looked at again
    everything = {name: value for name, value in options.items() if name == argument}
    if argument.startswith("running"):
        everything = options
        argument = "running_mean"  # which is looked at first
    message = f"{argument} is on CUDA device 0 and x on CUDA device 1; they must be on one device"
    refused("batch_norm", RuntimeError, message, x, **everything)


# ---- Merging.


def test_merging() -> None:
    one = np.ones(3)
    merge = cunorm.merge_batch_norm_stats
    message = "there are 2 means, 1 variances and 2 counts; they must be of one number"
    assert_refused(merge, ValueError, message, ([one, one], [one], [1, 2]), {})
    message = "there are 2 means, 2 variances and 3 counts; they must be of one number"
    assert_refused(merge, ValueError, message, (np.ones((2, 3)), np.ones((2, 3)), np.ones(3)), {})
    for count, shown in ((-2, "-2"), (10**400, "inf"), (float("nan"), "nan")):
        message = f"counts has {shown}; they must be finite and not negative"
        assert_refused(merge, ValueError, message, ([one, one], [one, one], [1, count]), {})
    for counts in ([0, 0.0], np.zeros(2, int)):
        message = "counts are all 0; one at least must be positive"
        assert_refused(merge, ValueError, message, ([one, one], [one, one], counts), {})
    assert_refused(merge, ValueError, "there must be one part at least", ([], [], []), {})


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("counts", 3, TypeError, "counts is an int; it must be a sequence of whole numbers, or a tensor of shape (K,)"),
        ("counts", np.ones((1, 1)), ValueError, "counts has shape (1, 1); it must have shape (K,)"),
        ("counts", np.array(1), ValueError, "counts has shape (); it must have shape (K,)"),
        ("counts", ["a"], TypeError, "counts has a str; they must be whole numbers"),
        ("counts", np.array(["a"]), TypeError, "counts has a str_; they must be whole numbers"),
        ("counts", [None], TypeError, "counts has a NoneType; they must be whole numbers"),
        ("counts", [1j], TypeError, "counts has a complex; they must be whole numbers"),
        ("counts", [1.5], ValueError, "counts has 1.5; they must be whole numbers"),
        ("means", 3, TypeError, "means is an int; it must be a tensor of shape (K, C), or a sequence of K tensors of "),
        ("means", zip(), TypeError, "means is a zip; it must be a tensor of shape (K, C), or a sequence of K tensors"),
        ("means", [[1.0]], TypeError, "means has a list; they must be tensors of shape (C,)"),
        ("variances", np.float32(1), ValueError, "variances has shape (); it must have shape (K, C)"),
        ("variances", np.ones((1, 4)), ValueError, "variances[0] has shape (4,); as means[0] it must have shape (3,)"),
    ],
)
def test_merging_what_is_none(name: str, given: Any, error: type[Exception], message: str) -> None:
    arguments = {"means": [np.ones(3)], "variances": [np.ones(3)], "counts": [1]}
    assert_refused(cunorm.merge_batch_norm_stats, error, message, (), arguments | {name: given})


def test_merging_statistics_of_other_channels() -> None:
    three, four = np.ones(3), np.ones(4)
    message = "means[1] has shape (4,); as means[0] it must have shape (3,)"
    assert_refused(cunorm.merge_batch_norm_stats, ValueError, message, ([three, four], [three, four], [1, 1]), {})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("variances", [torch.ones(3)], "variances[0] is a Tensor (torch) and means[0] an ndarray (numpy)"),
        ("variances", torch.ones(1, 3), "variances is a Tensor (torch) and means[0] an ndarray (numpy)"),
        ("counts", torch.ones(1), "counts is a Tensor (torch) and means[0] an ndarray (numpy)"),
        ("counts", [torch.tensor(1)], "counts is a Tensor (torch) and means[0] an ndarray (numpy)"),
    ],
)
def test_merging_statistics_of_two_libraries(name: str, given: Any, message: str) -> None:
    arguments = {"means": [np.ones(3)], "variances": [np.ones(3)], "counts": [1]}
    message += "; they must be of one library"
    assert_refused(cunorm.merge_batch_norm_stats, TypeError, message, (), arguments | {name: given})
