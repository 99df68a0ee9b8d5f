"""The layers of ``cunorm.adapters.torch`` beside those of torch.nn that they are named after."""

from __future__ import annotations

import copy
import doctest
import inspect
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cunorm.adapters import torch as layers
from cunorm.adapters.torch import modules

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
# ||ours - torch.nn in float64|| / ||torch.nn in float64||: one rounding of the dtype, a few of float32.
TOLERANCE = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 5e-7, torch.float64: 1e-14}

# Name, arguments, keyword arguments, shape of the input.
Made = tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...]]
LAYERS: list[Made] = [
    ("LayerNorm", (16,), {}, (4, 5, 16)),
    ("LayerNorm", ((5, 16),), {"eps": 1e-3}, (4, 5, 16)),
    ("LayerNorm", (16,), {"elementwise_affine": False}, (4, 16)),
    ("LayerNorm", (16,), {"bias": False}, (16,)),
    ("RMSNorm", (16,), {}, (4, 5, 16)),
    ("RMSNorm", ((5, 16),), {"eps": 1e-3}, (4, 5, 16)),
    ("RMSNorm", (16,), {"elementwise_affine": False}, (4, 16)),
    ("GroupNorm", (4, 8), {}, (3, 8, 5)),
    ("GroupNorm", (2, 8, 1e-3, False), {}, (3, 8, 4, 5)),
    ("InstanceNorm1d", (6,), {}, (3, 6, 7)),
    ("InstanceNorm1d", (6,), {"affine": True}, (6, 7)),
    ("InstanceNorm2d", (6,), {"affine": True, "eps": 1e-3}, (3, 6, 4, 5)),
    ("InstanceNorm2d", (6,), {"track_running_stats": True}, (3, 6, 4, 5)),
    ("InstanceNorm2d", (6,), {"track_running_stats": True, "momentum": 0.3}, (6, 4, 5)),
    ("InstanceNorm2d", (6,), {"track_running_stats": True, "momentum": None}, (3, 6, 4, 5)),
    ("InstanceNorm3d", (6,), {"affine": True, "track_running_stats": True}, (2, 6, 3, 4, 5)),
    ("BatchNorm1d", (6,), {}, (8, 6)),
    ("BatchNorm1d", (6,), {"momentum": 0.3}, (3, 6, 7)),
    ("BatchNorm2d", (6,), {"momentum": None}, (3, 6, 4, 5)),
    ("BatchNorm2d", (6,), {"affine": False, "eps": 1e-3}, (3, 6, 4, 5)),
    ("BatchNorm2d", (6,), {"track_running_stats": False}, (3, 6, 4, 5)),
    ("BatchNorm3d", (6,), {}, (2, 6, 3, 4, 5)),
    ("GELU", (), {}, (4, 16)),
    ("GELU", ("tanh",), {}, (4, 16)),
]
made = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer[0]}{layer[1]}{layer[2] or ''}")
STEPS = (True, True, False, True, False)  # training or evaluation


def build(layer: Made, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """torch.nn's layer in float64 and ours in the dtype, with the same numbers, which are none that they begin with."""
    name, arguments, options, _ = layer
    placed = {} if name == "GELU" else {"device": device}
    ours = getattr(layers, name)(*arguments, **options, **placed).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1)
    theirs = getattr(nn, name)(*arguments, **options, **placed).double()
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def inputs(layer: Made, dtype: torch.dtype, device: str, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(layer[3], generator=generator, dtype=torch.float64) * 2 + 0.5).to(device, dtype)
        for _ in range(count)
    ]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm().clamp_min(1e-30))


@made
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_results_gradients_and_buffers_are_those_of_torch_nn(layer: Made, dtype: torch.dtype, device: str) -> None:
    theirs, ours = build(layer, dtype, device)
    # Of running statistics in sixteen bits every step rounds anew, so there they stay float32.
    for buffer in ("running_mean", "running_var"):
        if dtype.itemsize == 2 and getattr(ours, buffer, None) is not None:
            setattr(ours, buffer, getattr(ours, buffer).float())
    if layer[0] == "RMSNorm" and theirs.eps is None:
        theirs.eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    for x, training in zip(inputs(layer, dtype, device, len(STEPS)), STEPS):
        exact_x, x = x.double().requires_grad_(), x.requires_grad_()
        expected, y = theirs.train(training)(exact_x), ours.train(training)(x)
        assert y.dtype == dtype and y.shape == expected.shape
        assert relative_error(y.detach(), expected.detach()) <= TOLERANCE[dtype]
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, [x, *ours.parameters()], dy)
        exact = torch.autograd.grad(expected, [exact_x, *theirs.parameters()], dy.double())
        for gradient, expected_gradient in zip(gradients, exact):
            assert relative_error(gradient, expected_gradient) <= 4 * TOLERANCE[dtype]
        for buffer, expected_buffer in zip(ours.buffers(), theirs.buffers()):
            torch.testing.assert_close(buffer.double(), expected_buffer.double(), rtol=2e-6, atol=2e-6)


@made
def test_symbolic_traces_have_layers_for_leaves_as_torch_nn_s(layer: Made) -> None:
    _, ours = build(layer)
    model = nn.Sequential(ours, nn.Identity())
    (x,) = inputs(layer, torch.float32, "cpu", 1)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert traced.get_submodule("0") is ours
    torch.testing.assert_close(copy.deepcopy(traced)(x), copy.deepcopy(model)(x))


@made
@pytest.mark.parametrize("given", [None, [1.0, 2.0], np.ones(3, np.float32)], ids=["None", "list", "array"])
def test_what_is_no_tensor_is_refused(layer: Made, given: Any) -> None:
    _, ours = build(layer)
    with pytest.raises(TypeError, match=r"^input is an? .*; it must be a PyTorch tensor$"):
        ours(given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["nested", "jagged", "mkldnn", "csr"])
@made
def test_what_is_not_strided_is_refused(layer: Made, layout: str) -> None:
    _, ours = build(layer, torch.float32)
    (x,) = inputs(layer, torch.float32, "cpu", 1)
    x = torch.atleast_2d(x)
    if layout in ("nested", "jagged"):
        given = torch.nested.nested_tensor(list(x), layout=torch.jagged if layout == "jagged" else torch.strided)
        found = "is nested"
    elif layout == "mkldnn":
        given, found = x.to_mkldnn(), "has layout torch._mkldnn"
    else:
        given, found = x.to_sparse_csr(), "has layout torch.sparse_csr"
    state = copy.deepcopy(ours.state_dict())
    with pytest.raises(TypeError, match=f"^x {found}; it must be a torch.strided tensor$"):
        ours(given)
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


@made
def test_the_state_is_that_of_torch_nn(layer: Made) -> None:
    theirs, ours = build(layer)
    assert isinstance(ours, getattr(nn, layer[0]))
    assert repr(ours) == repr(theirs)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    for one, other in ((ours, expected), (theirs, state)):
        assert str(one.load_state_dict(other, strict=True)) == "<All keys matched successfully>"
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


@made
@pytest.mark.parametrize("device", DEVICES)
def test_copies_compute_the_same(layer: Made, device: str) -> None:
    _, ours = build(layer, torch.float32, device)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    (x,) = inputs(layer, torch.float32, device, 1)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert type(other) is type(ours)
        assert torch.equal(other.eval()(x), ours.eval()(x))


@made
def test_the_constructor_takes_what_that_of_torch_nn_does(layer: Made) -> None:
    name, arguments, options, _ = layer
    kind = getattr(layers, name)
    ours, theirs = (dict(inspect.signature(item).parameters) for item in (kind, getattr(nn, name)))
    assert "activation" not in theirs and (ours.pop("activation", None) is None) == (name == "GELU")
    assert ours == theirs
    if name != "GELU":
        skipped = nn.utils.skip_init(kind, *arguments, **options, activation="relu")
        assert repr(skipped) == repr(kind(*arguments, **options, activation="relu"))


def test_a_constructor_of_its_own_is_seen() -> None:
    class Own(layers.LayerNorm):
        def __init__(self, width: int) -> None:
            super().__init__(width, activation="silu")

    assert list(inspect.signature(Own).parameters) == ["width"]


NORMS = [layer for layer in LAYERS if layer[0] != "GELU"]
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


@pytest.mark.parametrize("layer", NORMS, ids=lambda layer: f"{layer[0]}{layer[1]}{layer[2] or ''}")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_follows(layer: Made, activation: str) -> None:
    theirs, plain = build(layer)
    name, arguments, options, _ = layer
    ours = getattr(layers, name)(*arguments, **options, activation=activation).double()
    ours.load_state_dict(plain.state_dict())
    assert repr(ours) == repr(theirs)[:-1] + f", activation={activation!r})"
    for x, training in zip(inputs(layer, torch.float64, "cpu", 2), (True, False)):
        expected = ACTIVATIONS[activation](theirs.train(training)(x))
        y = ours.train(training)(x)
        assert relative_error(y.detach(), expected.detach()) <= 1e-14
        assert torch.equal(copy.deepcopy(ours).eval()(x), ours.eval()(x))


@pytest.mark.parametrize("activation", ["elu", 3])
def test_another_activation_is_refused(activation: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="activation is"):
        layers.LayerNorm(4, activation=activation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "layer", [*(layer for layer in NORMS if len(layer[3]) in (4, 5)), ("GELU", (), {}, (2, 8, 3, 5))], ids=str
)
def test_channels_last_stays(layer: Made, device: str) -> None:
    theirs, ours = build(layer, torch.float32, device)
    (x,) = inputs(layer, torch.float32, device, 1)
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x = x.to(memory_format=memory_format).requires_grad_()
    y = ours(x)
    assert y.is_contiguous(memory_format=memory_format)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.is_contiguous(memory_format=memory_format)
    expected = theirs(x.detach().double())
    assert relative_error(y.detach(), expected.detach()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gelu_lies_in_memory_as_its_input(order: tuple[int, ...], device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(layers.GELU(), backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(2, 3, 5, device=device).permute(order)
    for given in (x, x[1:]):
        expected = F.gelu(given)
        for y in (layers.GELU()(given), compiled(given)):
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected)


@made
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_layers(layer: Made, device: str) -> None:
    """Without a graph break; recorded as for the compiler, which itself takes seconds."""
    torch.compiler.reset()
    _, ours = build(layer, torch.float32, device)
    compiled = torch.compile(copy.deepcopy(ours), backend="aot_eager", fullgraph=True)
    for x, training in zip(inputs(layer, torch.float32, device, 3), STEPS[1:]):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for module, leaf in zip((compiled, ours), leaves):
            module.train(training)(leaf).square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        torch.testing.assert_close(compiled.state_dict(), {f"_orig_mod.{n}": t for n, t in ours.state_dict().items()})


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_compiled_layers_take_the_numbers_of_numpy(number: Any) -> None:
    torch.compiler.reset()
    made = [layers.LayerNorm(8, eps=number(1e-5)), layers.BatchNorm1d(8, eps=number(1e-5), momentum=number(0.3))]
    replaced = [nn.LayerNorm(8, eps=number(1e-5)), nn.BatchNorm1d(8, eps=number(1e-5), momentum=number(0.3))]
    layers.replace_norms(nn.Sequential(*replaced), compiled=True)
    x = torch.randn(4, 8)
    for layer in (*made, *replaced):
        plain = nn.LayerNorm(8) if isinstance(layer, nn.LayerNorm) else nn.BatchNorm1d(8, momentum=0.3)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(dict(layer.named_buffers()), dict(plain.named_buffers()))
    assert layers.BatchNorm1d(8, momentum=None).momentum is None


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of the sizes that become constants
@made
def test_traced_layers(layer: Made) -> None:
    _, ours = build(layer)
    ours.eval()
    (x,) = inputs(layer, torch.float64, "cpu", 1)
    traced = torch.jit.trace(copy.deepcopy(ours), x)
    assert "cunorm::" in str(traced.graph)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((traced, ours), leaves):
        module(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    for parameter, expected in zip(traced.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("layer", [layer for layer in NORMS if layer[2].get("affine")], ids=str)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(layer: Made, frozen: str) -> None:
    theirs, ours = build(layer)
    (x,) = inputs(layer, torch.float64, "cpu", 1)
    for module in (theirs, ours):
        module.get_parameter(frozen).requires_grad_(False)
        y = module(x)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    assert ours.get_parameter(frozen).grad is None
    other = {"weight": "bias", "bias": "weight"}[frozen]
    torch.testing.assert_close(ours.get_parameter(other).grad, theirs.get_parameter(other).grad)


@pytest.mark.parametrize(
    "layer", [("LayerNorm", (16,), (4, 16)), ("GroupNorm", (4, 8), (3, 8, 5)), ("BatchNorm1d", (6,), (8, 6))], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_leaves_the_dtype(layer: tuple[str, tuple[int, ...], tuple[int, ...]], device: str) -> None:
    """Of the input, whatever the weights are: what follows in autocast would cast a float32 result down again."""
    name, arguments, shape = layer
    ours = getattr(layers, name)(*arguments, device=device)
    with torch.autocast(device, torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            y = ours(x)
            assert y.dtype == dtype
            y.sum().backward()
            assert x.grad is not None and x.grad.dtype == dtype
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


def test_what_does_not_fit_is_refused_as_by_torch_nn() -> None:
    wrong: list[tuple[str, tuple[Any, ...], tuple[int, ...]]] = [
        ("LayerNorm", (16, 1e-5, False), (4, 15)),
        ("LayerNorm", ((5, 16),), (16,)),
        ("RMSNorm", (16, 1e-5, False), (4, 15)),
        ("RMSNorm", ((5, 16),), (16, 5)),
        ("GroupNorm", (4, 8), (3, 6, 5)),
        ("GroupNorm", (4, 8), (8,)),
        ("GroupNorm", (8, 8), (1, 8)),
        ("InstanceNorm1d", (6,), (3, 6, 1)),
        ("InstanceNorm1d", (6, 1e-5, 0.1, True), (3, 5, 4)),
        ("InstanceNorm2d", (6,), (3, 6)),
        ("BatchNorm1d", (6,), (1, 6)),
        ("BatchNorm1d", (6,), (2, 5)),
        ("BatchNorm2d", (6,), (2, 6, 3)),
        ("BatchNorm3d", (6,), (2, 6, 3, 3)),
    ]
    for name, arguments, shape in wrong:
        x = torch.ones(shape)
        with pytest.raises((ValueError, RuntimeError)):
            getattr(nn, name)(*arguments)(x)
        with pytest.raises(ValueError):
            getattr(layers, name)(*arguments)(x)
    with pytest.raises(TypeError, match="dtype int64"):
        layers.LayerNorm(4)(torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("place", ["strided", "expanded", "channels_last"])
def test_parameters_need_not_be_contiguous(place: str) -> None:
    """Those that were loaded with assign=True, say, or went to torch.channels_last with the model."""
    ours, theirs = layers.LayerNorm((2, 3, 4, 5)), nn.LayerNorm((2, 3, 4, 5))
    weight = torch.randn(2, 3, 4, 5, 2)[..., 0]
    if place == "expanded":
        weight = torch.randn(5).expand(2, 3, 4, 5)
    elif place == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    x = torch.randn(3, 2, 3, 4, 5)
    for layer in (ours, theirs):
        layer.load_state_dict({"weight": weight, "bias": -weight}, assign=True)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("strided", [("running_mean",), ("running_var",), ("running_mean", "running_var")], ids=str)
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("layer", ["BatchNorm2d", "InstanceNorm2d"])
def test_running_statistics_need_not_be_contiguous(
    layer: str, momentum: float | None, strided: tuple[str, ...]
) -> None:
    ours, theirs = (getattr(kind, layer)(6, momentum=momentum, track_running_stats=True) for kind in (layers, nn))
    x = torch.randn(3, 6, 4, 5)
    held = {}
    for module in (ours, theirs):
        for name in strided:
            setattr(module, name, torch.ones(6, 2)[:, 0])
            held[name] = module.get_buffer(name)
        for training in (True, False):
            y = module.train(training)(x)
        module.expected = y
        assert all(module.get_buffer(name) is tensor for name, tensor in held.items())
    torch.testing.assert_close(ours.expected, theirs.expected)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    if "running_mean" in strided:
        for module in (ours, theirs):
            module.running_mean = torch.zeros(1).expand(6)
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("layer", ["BatchNorm2d", "InstanceNorm2d"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
def test_nothing_leaves_running_statistics_alone(layer: str, shape: tuple[int, ...]) -> None:
    ours = getattr(layers, layer)(3, affine=True, track_running_stats=True)
    x = torch.randn(shape, requires_grad=True)
    y = ours(x)
    assert y.shape == shape and not ours.running_mean.any() and bool((ours.running_var == 1).all())
    y.sum().backward()
    assert not ours.weight.grad.any() and x.grad is not None


@pytest.mark.parametrize("training", [True, False])
def test_nothing_without_running_statistics(training: bool) -> None:
    ours = layers.BatchNorm1d(3, track_running_stats=False, activation="relu").train(training)
    x = torch.randn(0, 3, 4, requires_grad=True)
    y = ours(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:input's size")
@pytest.mark.parametrize("channels", [1, 3])
def test_running_statistics_of_other_channels_are_not_touched(channels: int) -> None:
    layer = layers.InstanceNorm2d(5, track_running_stats=True)
    with pytest.raises(ValueError, match=f"the input has {channels} channels .* it must have 5, as running_mean has"):
        layer(torch.randn(2, channels, 4, 4))
    assert not layer.running_mean.any() and bool((layer.running_var == 1).all())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_that_is_refused_is_not_counted(momentum: float | None, affine: bool) -> None:
    layer = layers.BatchNorm1d(6, momentum=momentum, affine=affine)
    layer(torch.randn(8, 6))
    state = copy.deepcopy(layer.state_dict())
    wrong = (torch.ones(8, 6, dtype=torch.int64), torch.ones(1, 6), torch.ones(8, 5), torch.ones(8, 1))
    for x in wrong:
        with pytest.raises((TypeError, ValueError)):
            layer(x)
        assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    assert layer.num_batches_tracked.item() == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("momentum", "error", "message"),
    [
        (float("nan"), ValueError, "momentum is nan; it must be from 0 to 1"),
        (1.5, ValueError, "momentum is 1.5; it must be from 0 to 1"),
        ("a", TypeError, "momentum is a str; it must be a number from 0 to 1"),
    ],
)
@pytest.mark.parametrize("layer", ["BatchNorm2d", "InstanceNorm2d"])
def test_a_wrong_momentum_is_refused(
    layer: str, momentum: Any, error: type[Exception], message: str, training: bool
) -> None:
    ours = getattr(layers, layer)(3, momentum=momentum, track_running_stats=True).train(training)
    with pytest.raises(error, match=f"^{message}$"):
        ours(torch.randn(2, 3, 4, 4))
    assert not ours.running_mean.any() and bool((ours.running_var == 1).all()) and not ours.num_batches_tracked.any()


def test_without_parameters_other_channels_are_normalized_with_a_warning() -> None:
    x = torch.randn(5, 7)
    for module in (layers.InstanceNorm1d(6), nn.InstanceNorm1d(6)):
        with pytest.warns(UserWarning, match="num_features"):
            torch.testing.assert_close(module(x), F.instance_norm(x[None])[0])


def test_a_normalized_shape_may_be_a_list() -> None:
    layer = layers.LayerNorm(8)
    layer.normalized_shape = [8]  # type: ignore[assignment]
    assert layer(torch.randn(2, 8)).shape == (2, 8)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
def test_a_normalized_shape_names_a_size(layer: str, affine: bool, shape: tuple[int, ...]) -> None:
    ours = getattr(layers, layer)([], elementwise_affine=affine)
    with pytest.raises(ValueError, match=r"^normalized_shape is \(\); it must name one size at least$"):
        ours(torch.ones(shape))


def test_an_activation_in_a_transformer_without_its_fast_path() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    plain = copy.deepcopy(block)
    block.norm2 = layers.LayerNorm(8, activation="relu")
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(block(x), plain(x).relu())
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_batch_norms_can_be_synchronized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), layers.BatchNorm2d(6, momentum=0.3))
    state = model.state_dict()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[1]) is nn.SyncBatchNorm and converted[1].momentum == 0.3
    converted.load_state_dict(state)


def test_what_follows_may_write_over_the_result() -> None:
    theirs, ours = build(("BatchNorm2d", (6,), {}, (3, 6, 4, 5)))
    gradients = []
    for module in (theirs, ours):
        x = torch.randn(3, 6, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        nn.Sequential(module, nn.ReLU(inplace=True))(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_examples() -> None:
    assert doctest.testmod(modules).failed == 0
