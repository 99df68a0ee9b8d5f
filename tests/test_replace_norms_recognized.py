"""Layers of model libraries that `replace_norms` recognizes by what they compute, and how they go on."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from replace_norms_cases import IMAGES, RECOGNIZED, ROWS, RmsNorm, randomize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_cases import DEVICES
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

from cunorm.adapters.torch import replace, replace_norms

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECOGNIZED)
def test_layers_are_recognized_by_what_they_compute(name: str, device: str) -> None:
    make, function, shape = RECOGNIZED[name]
    torch.manual_seed(0)
    theirs = randomize(make()).to(device)
    ours = copy.deepcopy(theirs)
    random = torch.get_rng_state()
    report = replace_norms(ours)
    assert [entry.text for entry in report.replaced] == [function] and not report.left
    # Trying leaves nothing behind.
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters()))
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert isinstance(ours, type(theirs)) and ours.state_dict().keys() == theirs.state_dict().keys()
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float64, 2e-6)):
        ours.to(dtype)
        theirs.to(dtype)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape, device=device, dtype=dtype)
            if shape == IMAGES:
                x = x.to(memory_format=memory_format)
            results = []
            for module in (ours, theirs):
                leaf = x.clone().requires_grad_()
                y = module(leaf)
                dy = torch.linspace(-1, 2, y.numel(), device=device, dtype=y.dtype).view_as(y)
                results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
            assert results[0][0].dtype == results[1][0].dtype
            # PyTorch's own group norm has contiguous results on a GPU, whatever it is given.
            if device == "cpu" or memory_format is torch.contiguous_format:
                assert results[0][0].stride() == results[1][0].stride()
            for one, other in zip(*results):
                error = (one.double() - other.double()).norm() / other.double().norm()
                assert error < (10 if one is not results[0][0] else 1) * tolerance


@pytest.mark.parametrize("name", RECOGNIZED)
def test_results_lie_in_memory_as_before(name: str) -> None:
    """Whatever the order of the axes in memory: what follows may call ``view``."""
    make, function, shape = RECOGNIZED[name]
    theirs = randomize(make())
    ours = copy.deepcopy(theirs)
    assert replace_norms(ours).replaced
    shape = IMAGES if shape == IMAGES else (2, 5, 3, 16)
    for order in itertools.permutations(range(4)):
        x = torch.randn([shape[axis] for axis in order]).movedim((0, 1, 2, 3), order)
        # With gaps, group and batch norm of PyTorch keep torch.channels_last, and ours do not.
        has_gaps = function not in ("cunorm.group_norm", "cunorm.batch_norm")
        others = (x[:, :, 1:], x[:1].expand(2, -1, -1, -1)) if has_gaps else ()
        for given in (x, *others):
            y, expected = ours(given), theirs(given)
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5", "GPT-OSS", "diffusers", "timm, RMS"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_dtype_of_the_result_is_the_layers_own(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Some round to that of the input, some to that of the weight, and some let PyTorch promote them."""
    theirs = randomize(RECOGNIZED[name][0]()).to(weight_dtype)
    ours = copy.deepcopy(theirs)
    assert replace_norms(ours).replaced
    x = torch.randn(4, 16, dtype=dtype)
    y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}
    allowed = max(tolerance[dtype], tolerance[weight_dtype], tolerance[y.dtype])
    assert (y.double() - expected.double()).norm() <= allowed * expected.double().norm()


def test_a_wide_result_is_not_rounded_to_a_narrow_input() -> None:
    layer = T5LayerNorm(16)
    replace_norms(layer)
    x = torch.randn(4, 16).bfloat16()
    assert torch.equal(layer(x), layer(x.float()))
    assert not torch.equal(layer(x), layer(x).bfloat16().float())


def test_what_was_not_tried_goes_to_the_layers_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LlamaRMSNorm(16)
    replace_norms(layer)
    calls: list[int] = []
    own = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: calls.append(x.dim()) or own(self, x))
    for dimensions in (1, 2, 3, 4, 5, 6):
        layer(torch.randn(*(2,) * (dimensions - 1), 16))
    layer(torch.randn(2, 16, dtype=torch.complex64).real)
    layer(hidden_states=torch.randn(2, 16))
    layer(torch.randn(2, 3, 5, 16).transpose(1, 2))
    layer(torch.randn(16).expand(2, 16))
    assert calls == [1, 6, 2]
    with pytest.raises(RuntimeError, match="size"):
        layer(torch.randn(16))  # its own error too
        layer(torch.randn(15))


def test_a_layer_that_was_changed_computes_what_it_says() -> None:
    x = torch.randn(4, 16)
    layer, theirs = LlamaRMSNorm(16), LlamaRMSNorm(16)
    replace_norms(layer)
    for name, value in (("variance_epsilon", 1.0), ("weight", nn.Parameter(torch.randn(16)))):
        setattr(layer, name, value)
        setattr(theirs, name, value)
        torch.testing.assert_close(layer(x), theirs(x))


class OpenNorm(LlamaRMSNorm):
    """Asks for what others may have set, registered or added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(super().forward(x))
        return sum((module(y) for module in self.children()), y) + sum(self.buffers())

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "scale", 1.0) if not hasattr(self, "power") else x**self.power


@pytest.mark.parametrize("name", ["scale", "power", "buffer", "module"])
def test_what_comes_later_and_is_asked_for_counts(name: str) -> None:
    layer = OpenNorm(16)
    theirs = copy.deepcopy(layer)
    assert replace_norms(layer).replaced
    x = torch.randn(4, 16)
    before = layer(x)
    for module in (layer, theirs):
        module.bookkeeping = 3.0
        if name == "buffer":
            module.register_buffer("shift", torch.ones(16))
        elif name == "module":
            module.add_module("behind", nn.ReLU())
        else:
            setattr(module, name, 3.0)
    torch.testing.assert_close(layer(x), theirs(x))
    assert not torch.allclose(layer(x), before)


@pytest.mark.parametrize("place", ["last", "first"])
def test_what_a_layer_broadcasts_it_broadcasts(place: str) -> None:
    layer = RmsNorm(8) if place == "last" else VitDetLayerNorm(8)
    theirs = copy.deepcopy(layer)
    assert replace_norms(layer).replaced
    x = torch.randn((4, 1) if place == "last" else (2, 1, 4, 4))
    assert layer(x).shape == theirs(x).shape
    torch.testing.assert_close(layer(x), theirs(x))
    with pytest.raises(RuntimeError, match="must match the size"):
        layer(x.repeat_interleave(3, 1))
    layer.weight = theirs.weight = nn.Parameter(torch.randn(1))
    x = torch.randn((4, 8) if place == "last" else (2, 8, 4, 4))
    torch.testing.assert_close(layer(x), theirs(x))


class OptionalNorm(nn.Module):
    """Layer norm with what it has of a weight and a bias."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.shape = (16,)
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.ones(16)) if name in names else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias)


@pytest.mark.parametrize("before", [(), ("weight",), ("weight", "bias")])
@pytest.mark.parametrize("after", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_parameters_that_come_and_go(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    layer, theirs = OptionalNorm(*before), OptionalNorm()
    assert replace_norms(layer).replaced
    for name in ("weight", "bias"):
        parameter = nn.Parameter(torch.randn(16)) if name in after else None
        for module in (layer, theirs):
            module.register_parameter(name, parameter)
    x = torch.randn(4, 16)
    torch.testing.assert_close(layer(x), theirs(x))


def test_what_frameworks_set_leaves_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LlamaRMSNorm(16)
    replace_norms(layer)
    monkeypatch.delattr(LlamaRMSNorm, "forward")
    layer.eval().requires_grad_(False).double().register_full_backward_hook(lambda *_: None)
    layer.weight = nn.Parameter(torch.randn(16))
    layer._hf_hook = None
    layer.load_state_dict({"weight": torch.randn(32)[::2]}, assign=True)
    x = torch.randn(4, 16)
    torch.testing.assert_close(layer(x), F.rms_norm(x, (16,), layer.weight, 1e-6))


def test_tensors_in_the_place_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FullyShardedDataParallel(use_orig_params=True) sets and deletes them, anew for every call."""
    layer, x = LlamaRMSNorm(16), torch.randn(4, 16)
    replace_norms(layer)
    with monkeypatch.context() as patched:
        patched.delattr(LlamaRMSNorm, "forward")
        for _ in range(2):
            del layer.weight
            for weight in (torch.randn(16), torch.randn(16)):
                layer.weight = weight
                torch.testing.assert_close(layer(x), F.rms_norm(x, (16,), weight, 1e-6))
    layer.weight = 2.0  # type: ignore[assignment]
    torch.testing.assert_close(layer(x), 2 * F.rms_norm(x, (16,), eps=1e-6))
    del layer.weight
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        layer(x)


def test_a_width_that_a_layer_refuses_is_refused() -> None:
    layer = OlmoLayerNorm(32)
    assert replace_norms(layer).replaced
    assert layer(torch.randn(2, 32)).shape == (2, 32)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layer(torch.randn(2, 16))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_that_are_more_than_memory_go_to_the_layers_own_forward(compiled: bool) -> None:
    model, rows = nn.Sequential(nn.LayerNorm(8), nn.GELU()), [torch.randn(3, 8), torch.randn(5, 8)]
    jagged, strided = (torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.jagged, torch.strided))
    expected = model(torch.cat(rows))
    replace_norms(model, compiled=compiled)
    for nested in (jagged, strided):
        torch.testing.assert_close(torch.cat(list(model(nested).unbind())), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_dtypes_and_layouts_that_ours_refuse_go_to_the_layers_own_forward(compiled: bool) -> None:
    norm, gelu, x = nn.RMSNorm(8), nn.GELU(), torch.randn(3, 8)
    expected = norm(x + 0j)
    replace_norms(nn.Sequential(norm, gelu), compiled=compiled)
    assert torch.equal(norm(x + 0j), expected)
    torch.testing.assert_close(gelu(x.to_mkldnn()).to_dense(), F.gelu(x))


@pytest.mark.filterwarnings("ignore")
def test_replaced_layers_are_traced_as_they_were() -> None:
    model, x = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8), nn.InstanceNorm1d(3)), torch.randn(2, 3, 8)
    replace_norms(model)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(torch.cat([x, x])), model(torch.cat([x, x])))
    assert "cunorm::" not in str(traced.inlined_graph)


@pytest.mark.parametrize("compiled", [False, True])
def test_leaves_of_symbolic_traces_stay_leaves(compiled: bool) -> None:
    layers = nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.InstanceNorm1d(8), nn.GroupNorm(2, 8)
    model, x = nn.Sequential(*layers), torch.randn(3, 8, 8)
    replace_norms(model, compiled=compiled)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == list("012345")
    assert [type(layer) for layer in traced.children()] == [type(layer) for layer in model]
    assert torch.equal(traced(x), model(x))


def test_others_are_looked_into_by_symbolic_traces() -> None:
    model, x = nn.Sequential(LlamaRMSNorm(8)), torch.randn(3, 8)
    expected = model(x)
    replace_norms(model)
    traced = torch.fx.symbolic_trace(model)
    assert not any(node.op == "call_module" for node in traced.graph.nodes)
    torch.testing.assert_close(traced(x), expected)


def test_what_cannot_be_tried_is_left() -> None:
    with FakeTensorMode():
        report = replace_norms(nn.Sequential(LlamaRMSNorm(8)))
    assert [entry.text.partition(":")[0] for entry in report.left] in (
        ["trying it failed"],
        ["its weight is a FakeTensor"],
    )


def test_a_model_that_holds_its_report_is_pickled() -> None:
    model = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8), nn.SyncBatchNorm(8))
    model.report = replace_norms(model)  # type: ignore[assignment]
    again = pickle.loads(pickle.dumps(model))
    assert str(again.report) == str(model.report) and type(again[1]) is type(model[1])
    again.report.undo()
    assert [type(layer) for layer in again] == [nn.LayerNorm, LlamaRMSNorm, nn.SyncBatchNorm]
    assert type(model[0]) is not nn.LayerNorm


def test_equal_layers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    prove = replace.prove
    monkeypatch.setattr(replace, "prove", lambda module: tried.append(module) or prove(module))
    model = nn.ModuleList([*(LlamaRMSNorm(16) for _ in range(5)), LlamaRMSNorm(16, eps=1e-5), LlamaRMSNorm(8)])
    assert replace_norms(model).counts == {"LlamaRMSNorm": 7}
    assert tried == [model[0], model[5], model[6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    names = ("Llama", "Gemma", "OLMo", "ConvNeXt", "timm, groups", "timm, RMS, plain", "gelu_new")
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = nn.ModuleDict({name: RECOGNIZED[name][0]() for name in names})
        report = replace_norms(model)
    finally:
        torch.set_default_dtype(default)
    assert not report.left
    assert [entry.text for entry in report.replaced] == [RECOGNIZED[name][1] for name in names]
    rows = torch.randn(ROWS, dtype=dtype)
    torch.testing.assert_close(model["OLMo"](rows), F.layer_norm(rows, (16,), eps=1e-5))
