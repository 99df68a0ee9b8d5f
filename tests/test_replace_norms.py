"""`replace_norms`: which layers it recognizes, what it leaves alone, and what compilers see."""

from __future__ import annotations

import copy
import doctest
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import activations as diffusers_activations
from diffusers.models import normalization as diffusers_norms
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch_cases import DEVICES, graphs_of, run
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.videoprism.modeling_videoprism import VideoPrismLayerNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

from cunorm.adapters import torch as layers
from cunorm.adapters.torch import replace, replace_norms

pytestmark = pytest.mark.usefixtures("tiny_models")


# ---- Layers of torch.nn.


def every_layer() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "layer_norm": nn.LayerNorm(8),
            "rms_norm": nn.RMSNorm(8),
            "group_norm": nn.GroupNorm(2, 8),
            "instance_norm1d": nn.InstanceNorm1d(8),
            "instance_norm2d": nn.InstanceNorm2d(8, affine=True),
            "instance_norm3d": nn.InstanceNorm3d(8, track_running_stats=True),
            "batch_norm1d": nn.BatchNorm1d(8),
            "batch_norm2d": nn.BatchNorm2d(8),
            "batch_norm3d": nn.BatchNorm3d(8),
            "gelu": nn.GELU("tanh"),
        }
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_torch_nn_become_ours_and_stay_themselves(compiled: bool) -> None:
    model = every_layer().eval()
    model["layer_norm"].train()
    before = {name: (module, vars(module).copy(), type(module)) for name, module in model.items()}
    tensors = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    state = copy.deepcopy(model.state_dict())
    report = replace_norms(model, compiled=compiled)
    assert not report.left and report.counts == {kind.__name__: 1 for _, _, kind in before.values()}
    for name, (module, attributes, kind) in before.items():
        assert model[name] is module and vars(module) == attributes
        assert isinstance(module, getattr(layers, kind.__name__)) and isinstance(module, kind)
        assert type(module).__name__ == f"Cunorm{kind.__name__}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
    assert {module.training for module in model.values()} == {True, False}
    model.load_state_dict(state, strict=True)
    report.undo()
    for module, attributes, kind in before.values():
        assert type(module) is kind and vars(module) == attributes
    report.undo()  # a second time it finds nothing to do


def test_undo_of_what_is_something_else_by_now() -> None:
    model = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8))
    report = replace_norms(model)
    model[1].__class__ = Qwen3RMSNorm
    with pytest.raises(RuntimeError, match="1 is a Qwen3RMSNorm by now"):
        report.undo()
    assert isinstance(model[0], layers.LayerNorm)  # nothing is undone by half


def test_undo_of_what_was_wrapped() -> None:
    """As accelerate wraps layers: what it keeps is the forward that undoing takes away."""
    for layer in (nn.LayerNorm(8), LlamaRMSNorm(8)):
        report = replace_norms(layer)
        inner = layer.forward
        layer.forward = lambda x: inner(x)  # type: ignore[method-assign]  # noqa: B023
        assert layer(torch.randn(2, 8)).shape == (2, 8)
        with pytest.raises(RuntimeError, match="the model has got a forward of its own"):
            report.undo()
        del layer.forward
        report.undo()
        assert layer(torch.randn(2, 8)).shape == (2, 8)


def test_a_layer_on_its_own_and_a_layer_that_is_there_twice() -> None:
    layer = nn.LayerNorm(8)
    assert replace_norms(layer).counts == {"LayerNorm": 1}
    assert isinstance(layer, layers.LayerNorm)
    norm = nn.LayerNorm(8)
    model = nn.ModuleList([norm, nn.Sequential(norm)])
    assert replace_norms(model).counts == {"LayerNorm": 1}
    assert model[1][0] is norm


def test_ours_are_left() -> None:
    model = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8), layers.GELU())
    replace_norms(model)
    report = replace_norms(model)
    assert not report.replaced
    assert [entry.text for entry in report.left] == ["it is cunorm's already"] * 3


def test_optimizers_ties_and_hooks_go_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), LlamaRMSNorm(8))
    model[3].weight = model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[1].register_forward_hook(lambda module, args, y: y * 2)
    model[3].register_full_backward_hook(lambda module, dx, dy: seen.append("backward"))
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert len(replace_norms(model).replaced) == 2
    x = torch.randn(4, 8)
    for one, steps in ((model, optimizer), (other, other_optimizer)):
        one(x).square().sum().backward()
        steps.step()
    assert seen == ["before", "backward"] * 2
    assert model[3].weight is model[1].weight
    for parameter, expected in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(16), lambda: LlamaRMSNorm(16), lambda: InitializedLayerNorm()])
def test_copies_of_replaced_layers(make: Callable[[], nn.Module]) -> None:
    module = make()
    replace_norms(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(3, 16)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(other) is type(module)
        assert torch.equal(other(x), module(x))
        assert torch.equal(other.weight, module.weight) and other.weight is not module.weight


# ---- Layers of model libraries.


class LayerNorm2d(nn.LayerNorm):
    """As timm has it: channels behind the samples."""

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine)
        self._fast_norm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class RmsNorm(nn.Module):
    """As timm has it."""

    def __init__(self, channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.normalized_shape = (channels,)
        self.eps = eps
        self.elementwise_affine = affine
        if affine:
            self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return x if self.weight is None else x * self.weight


class GroupNorm(nn.GroupNorm):
    """As timm has it: the arguments in another order."""

    def __init__(self, num_channels: int, num_groups: int = 4, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_groups, num_channels, eps=eps, affine=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class GroupNorm1(GroupNorm):
    """As timm has it: one group, which is layer norm of all but the samples."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels, 1)


class InitializedLayerNorm(nn.LayerNorm):
    """Another constructor, the same forward."""

    def __init__(self) -> None:
        super().__init__(16, eps=1e-3)


class CheckedBatchNorm(nn.BatchNorm2d):
    """Another check, the same forward."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.shape[0] > 100:
            raise ValueError("more than 100 samples")


ROWS, IMAGES = (2, 3, 16), (2, 16, 5, 3)
RECOGNIZED: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "Llama": (lambda: LlamaRMSNorm(16), "cunorm.rms_norm", ROWS),
    "Mistral": (lambda: MistralRMSNorm(16, eps=1e-5), "cunorm.rms_norm", ROWS),
    "Qwen": (lambda: Qwen3RMSNorm(16), "cunorm.rms_norm", (2, 4, 3, 16)),
    "Phi": (lambda: Phi3RMSNorm(16), "cunorm.rms_norm", (6, 16)),
    "GPT-OSS": (lambda: GptOssRMSNorm(16), "cunorm.rms_norm", ROWS),
    "Gemma": (lambda: GemmaRMSNorm(16), "cunorm.rms_norm, weight_offset=1.0", ROWS),
    "T5": (lambda: T5LayerNorm(16), "cunorm.rms_norm", ROWS),
    "Cohere": (lambda: CohereLayerNorm(16), "cunorm.layer_norm", ROWS),
    "OLMo": (lambda: OlmoLayerNorm(16), "cunorm.layer_norm", ROWS),
    "ConvNeXt": (lambda: ConvNextLayerNorm(16, data_format="channels_first"), "cunorm.layer_norm, axis=1", IMAGES),
    "ConvNeXt, last": (lambda: ConvNextLayerNorm(16), "cunorm.layer_norm", ROWS),
    "ViTDet": (lambda: VitDetLayerNorm(16), "cunorm.layer_norm, axis=1", IMAGES),
    "diffusers": (lambda: diffusers_norms.RMSNorm(16, 1e-6), "cunorm.rms_norm", ROWS),
    "diffusers, bias": (lambda: diffusers_norms.RMSNorm(16, 1e-6, bias=True), "cunorm.rms_norm", ROWS),
    "diffusers, plain": (lambda: diffusers_norms.RMSNorm(16, 1e-6, False), "cunorm.rms_norm", ROWS),
    "diffusers, float32": (lambda: diffusers_norms.FP32LayerNorm(16), "cunorm.layer_norm", ROWS),
    "timm, 2d": (lambda: LayerNorm2d(16), "cunorm.layer_norm, axis=1", IMAGES),
    "timm, 2d, plain": (lambda: LayerNorm2d(16, affine=False), "cunorm.layer_norm, axis=1", IMAGES),
    "timm, RMS": (lambda: RmsNorm(16), "cunorm.rms_norm", ROWS),
    "timm, RMS, plain": (lambda: RmsNorm(16, affine=False), "cunorm.rms_norm", ROWS),
    "timm, groups": (lambda: GroupNorm(16), "cunorm.group_norm", IMAGES),
    "timm, one group": (lambda: GroupNorm1(16), "cunorm.group_norm", IMAGES),
    "a constructor": (InitializedLayerNorm, "cunorm.layer_norm", ROWS),
    "a check": (lambda: CheckedBatchNorm(16), "cunorm.batch_norm", IMAGES),
    "gelu": (lambda: ACT2FN["gelu"], "cunorm.gelu, approximate='none'", ROWS),
    "gelu_python": (lambda: ACT2FN["gelu_python"], "cunorm.gelu, approximate='none'", ROWS),
    "gelu_new": (lambda: ACT2FN["gelu_new"], "cunorm.gelu, approximate='tanh'", ROWS),
    "gelu_fast": (lambda: ACT2FN["gelu_fast"], "cunorm.gelu, approximate='tanh'", IMAGES),
    "gelu_pytorch_tanh": (lambda: ACT2FN["gelu_pytorch_tanh"], "cunorm.gelu, approximate='tanh'", ROWS),
    "gelu_accurate": (lambda: ACT2FN["gelu_accurate"], "cunorm.gelu, approximate='tanh'", (7,)),
}


def randomize(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) + 1)
    return module


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


def test_symbolic_traces() -> None:
    model, x = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU(), nn.GroupNorm(2, 8)), torch.randn(3, 8)
    for compiled in (False, True):
        report = replace_norms(model, compiled=compiled)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
        report.undo()
    for layer in (nn.BatchNorm1d(8), nn.InstanceNorm1d(8)):
        replace_norms(layer)
        with pytest.raises(torch.fx.proxy.TraceError):
            torch.fx.symbolic_trace(layer)


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


class UnbiasedLayerNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        std = input.std(-1, keepdim=True)
        return (input - input.mean(-1, keepdim=True)) / (std + self.eps) * self.weight + self.bias


class DroppingNorm(LlamaRMSNorm):
    """In evaluation it is what it seems to be."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden_states), 0.1, self.training)


class ModalNorm(LlamaRMSNorm):
    """In evaluation its results have another dtype than in training, or lie otherwise in memory."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__(channels)
        self.way = way

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(hidden_states)
        if self.training:
            return y
        return y.float() if self.way == "dtype" else y.contiguous()


@pytest.mark.parametrize("way", ["dtype", "memory"])
@pytest.mark.parametrize("training", [True, False])
def test_dtypes_and_orders_are_those_of_training_and_of_evaluation(way: str, training: bool) -> None:
    layer = ModalNorm(8, way).bfloat16().train(training)
    theirs = copy.deepcopy(layer)
    assert replace_norms(layer).replaced
    x = torch.randn(5, 8, 3).bfloat16()
    for module in (layer, theirs):
        module.train(not training)
    for given in (x.mT, x.mT.contiguous()):
        y, expected = layer(given), theirs(given)
        assert y.dtype == expected.dtype and y.stride() == expected.stride()


PARALLEL = """
import os, sys, time
from pathlib import Path
import torch
from torch.distributed.nn.functional import all_reduce
from cunorm.adapters.torch import replace_norms

class ParallelNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        variance = all_reduce(x.square().mean(-1, keepdim=True)) / torch.distributed.get_world_size()
        return x * torch.rsqrt(variance + 1e-6) * self.weight

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.fork() > 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
report = replace_norms(ParallelNorm())
(folder / str(rank)).write_text(str(report))
# Each goes when the other is done, and without an end of Python, where Gloo's threads may abort the process.
while not (folder / str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)
"""


def test_layers_that_sum_over_processes_are_left(tmp_path: Path) -> None:
    run(PARALLEL, tmp_path)
    for rank in range(2):
        assert "left: no function of cunorm computes the same" in (tmp_path / str(rank)).read_text()


class ClampingNorm(LlamaRMSNorm):
    """Another norm only where one number is much larger than the others."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, (64,), eps=1e-6).clamp(-5, 5) * self.weight


class MendingNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nan_to_num(hidden_states))


class ScaleNorm(nn.Module):
    """RMS norm, but for numbers that are nearly zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), 1e-12

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1, eps=self.eps) * x.shape[-1] ** 0.5 * self.weight


class BroadcastingNorm(LlamaRMSNorm):
    """Its weight has the shape of a sequence of one token, but goes along all."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight = nn.Parameter(torch.ones(1, 1, channels))


class RememberingNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.last = hidden_states
        return super().forward(hidden_states)


class CountingNorm(LlamaRMSNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.seen: list[Any] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden_states.shape)
        return super().forward(hidden_states)


class WritingNorm(LlamaRMSNorm):
    """It writes into what its attributes hold, in one of several ways."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__(channels)
        self.way, self.stats, self.counter = way, {"rms": None, "inner": [0]}, SimpleNamespace(calls=0)
        if way == "tensor":
            self.stats["rms"] = torch.zeros(())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rms = hidden_states.detach().square().mean().sqrt()
        if self.way == "item":
            self.stats["rms"] = rms
        elif self.way == "inner item":
            self.stats["inner"][0] += 1
        elif self.way == "object":
            self.counter.calls += 1
        elif self.way == "tensor":
            self.stats["rms"].copy_(rms)
        return super().forward(hidden_states)


class ActivatedLayerNorm(nn.LayerNorm):
    """Whose activation is for others to apply."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.activation = nn.ReLU()


class FinalNorm(nn.LayerNorm):
    def __init_subclass__(cls, *, why: str) -> None: ...


class ConditionalNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * condition


class BatchNormAct2d(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class NormedLinear(nn.Linear):
    """A head that classifies by the cosine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it would take memory by the gigabyte to try it")


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.running_mean[:, None, None]


def with_a_forward() -> nn.Module:
    layer = nn.LayerNorm(8)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.LayerNorm(8)
    layer.compile(backend="eager")
    return layer


def subclassed() -> nn.Module:
    class Sharded(torch.Tensor):
        pass

    layer = nn.LayerNorm(8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Sharded))
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "QuickGELU": (lambda: ACT2FN["quick_gelu"], "no function of cunorm"),
    "ClippedGELU": (lambda: ACT2FN["gelu_10"], "no function of cunorm"),
    "diffusers GELU": (lambda: diffusers_activations.GELU(8, 8), "it holds other layers"),
    "GlobalResponseNorm": (lambda: diffusers_norms.GlobalResponseNorm(8), "no function of cunorm"),
    "LpNorm": (lambda: diffusers_norms.LpNorm(), "no function of cunorm"),
    "unbiased": (lambda: UnbiasedLayerNorm(8), "no function of cunorm"),
    "weight + 1": (lambda: VideoPrismLayerNorm(8), "no function of cunorm"),
    "dropout": (lambda: DroppingNorm(8), "no function of cunorm"),
    "clamping": (lambda: ClampingNorm(64), "no function of cunorm"),
    "mending": (lambda: MendingNorm(8), "no function of cunorm"),
    "ScaleNorm": (lambda: ScaleNorm(8), "no function of cunorm"),
    "broadcasting": (lambda: BroadcastingNorm(8), "no function of cunorm"),
    "remembering": (lambda: RememberingNorm(8), "its forward writes attributes"),
    "counting": (lambda: CountingNorm(8), "its forward writes attributes"),
    "an activation": (lambda: ActivatedLayerNorm(8), "it has an activation"),
    "no subclasses": (lambda: FinalNorm(8), "its class cannot have a subclass"),
    "two tensors": (lambda: ConditionalNorm(8), "its forward takes no floating-point tensor alone"),
    "batch norm and relu": (lambda: BatchNormAct2d(8), "its forward is its own, and it keeps statistics"),
    "frozen batch norm": (lambda: FrozenBatchNorm2d(8), "it has buffers"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(8), "it synchronizes its statistics"),
    "lazy": (lambda: nn.LazyBatchNorm2d(), "it is not initialized yet"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.LayerNorm((4, 8))), "its parameters are param"),
    "weight-normed": (lambda: nn.utils.weight_norm(nn.LayerNorm((4, 8))), "its weight is no parameter"),
    "quantized": (lambda: quantized_norm(), "it is quantized"),
    "a forward of the object": (with_a_forward, "something has set a forward"),
    "compiled": (compiled, "it is compiled on its own"),
    "tensor subclass": (subclassed, "its weight is a Sharded"),
    "float8": (lambda: nn.RMSNorm(8, dtype=torch.float8_e4m3fn), "its weight has dtype torch.float8_e4m3fn"),
    "momentum": (lambda: nn.BatchNorm1d(8, momentum=1.5), "its momentum is 1.5; it must be from 0 to 1"),
    "eps": (lambda: nn.LayerNorm(8, eps=torch.tensor(1e-5)), "its eps is a Tensor"),  # type: ignore[arg-type]
    "large": (lambda: NormedLinear(512, 512), "its weight has 262,144 numbers, and no more than 65,536 are tried"),
    "response norm": (lambda: nn.LocalResponseNorm(2), "no function of cunorm"),
}


def quantized_norm() -> nn.Module:
    return torch.ao.nn.quantized.LayerNorm((8,), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), 1.0, 0)


@pytest.mark.parametrize("way", ["item", "inner item", "object", "tensor"])
def test_layers_that_write_into_what_they_hold_are_left(way: str) -> None:
    layer = WritingNorm(8, way)
    report = replace_norms(layer)
    words = "it holds tensors" if way == "tensor" else "its forward writes attributes of the layer, or into what"
    assert [entry.text.startswith(words) for entry in report.left] == [True]
    # Trying has not written either.
    assert layer.stats == {"rms": 0 if way == "tensor" else None, "inner": [0]} and layer.counter.calls == 0


def test_layers_that_hold_other_things_are_replaced() -> None:
    layer = WritingNorm(8, "none")
    layer.stats |= {"size": torch.Size([8]), "dtype": torch.float32, "op": F.gelu, "module": nn.Linear(2, 2)}
    layer.counter.self, layer.counter.op = layer.counter, torch.ops.aten.mul
    held = copy.copy(layer.stats)
    assert replace_norms(layer).counts == {"WritingNorm": 1}
    assert layer.stats == held and layer.stats["module"] is held["module"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left(name: str) -> None:
    make, reason = LEFT[name]
    layer = make()
    attributes, kind = vars(layer).copy(), type(layer)
    model = nn.Sequential(layer)
    report = replace_norms(model)
    assert not [entry for entry in report.replaced if entry.module is layer]
    (entry,) = [entry for entry in report.left if entry.module is layer]
    assert entry.text.startswith(reason)
    assert type(layer) is kind and vars(layer) == attributes
    assert f"1 {kind.__name__} left: {entry.text} (0)" in str(report)


def test_the_norm_in_a_norm_that_is_left_is_replaced() -> None:
    model = diffusers_norms.AdaLayerNorm(8, 10)
    expected = model(torch.ones(4, 8), torch.tensor(3))
    report = replace_norms(model)
    assert [entry.name for entry in report.replaced] == ["norm"]
    assert [entry.kind.__name__ for entry in report.left] == ["AdaLayerNorm"]
    torch.testing.assert_close(model(torch.ones(4, 8), torch.tensor(3)), expected)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(16), LlamaRMSNorm(16))
    assert len(replace_norms(model).replaced) == 2
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter is not model[0].bias else nn.init.zeros_(parameter)
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), F.rms_norm(F.layer_norm(x, (16,)), (16,), eps=1e-6))


# ---- What is asked for.


def several() -> nn.Module:
    encoder = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Sequential(nn.LayerNorm(8)))
    return nn.ModuleDict({"encoder": encoder, "head": nn.Sequential(InitializedLayerNorm(), LlamaRMSNorm(8))})


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"kinds": ["gelus"]}, ["encoder.1"]),
        ({"kinds": "gelus"}, ["encoder.1"]),
        ({"kinds": iter(["gelus"])}, ["encoder.1"]),
        ({"kinds": ["norms"]}, ["encoder.0", "encoder.2.0", "head.0", "head.1"]),
        ({"kinds": []}, []),
        ({"include": "encoder.*"}, ["encoder.0", "encoder.1", "encoder.2.0"]),
        ({"include": ["encoder.[01]", "head.1"]}, ["encoder.0", "encoder.1", "head.1"]),
        ({"include": "encoder"}, ["encoder.0", "encoder.1", "encoder.2.0"]),
        ({"include": ["encoder.?"]}, ["encoder.0", "encoder.1", "encoder.2.0"]),
        ({"exclude": ["encoder.2", "hea?"]}, ["encoder.0", "encoder.1"]),
        ({"include": nn.LayerNorm}, ["encoder.0", "encoder.2.0", "head.0"]),
        ({"include": "*LayerNorm", "exclude": InitializedLayerNorm}, ["encoder.0", "encoder.2.0"]),
        ({"exclude": ["LayerNorm", nn.GELU]}, ["head.0", "head.1"]),
        ({"exclude": "*"}, []),
    ],
)
def test_choices(options: dict[str, Any], expected: list[str]) -> None:
    model = several()
    report = replace_norms(model, **options)
    assert [entry.name for entry in report.replaced] == expected
    changed = {name for name, module in model.named_modules() if type(module).__module__.startswith("cunorm")}
    assert changed == set(expected)
    assert {entry.text for entry in report.left} <= {"excluded"}
    assert len(report.left) + len(expected) == (5 if "kinds" not in options else len(expected))


@pytest.mark.parametrize("options", [{"exclude": "b"}, {"exclude": "a"}, {"include": "c.*"}, {"exclude": ["c", "b"]}])
def test_a_shared_layer_goes_by_any_of_its_names(options: dict[str, Any]) -> None:
    norm = nn.LayerNorm(8)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Sequential(norm)})
    report = replace_norms(model, **options)
    assert [entry.name for entry in (*report.replaced, *report.left)] == ["a"]
    assert bool(report.replaced) == ("include" in options)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"include": "decoder.*"}, ValueError, "include has 'decoder.*', which is the name of no layer"),
        ({"exclude": ["LayerNrom"]}, ValueError, "exclude has 'LayerNrom'"),
        ({"exclude": [3]}, TypeError, "exclude has 3; it must have names"),
        ({"include": [int]}, TypeError, "include has <class 'int'>"),
        ({"kinds": ["softmaxes"]}, ValueError, "kinds is ['softmaxes']; it must be 'norms' or 'gelus', or a sequence"),
        ({"kinds": "norm"}, ValueError, "kinds is ['norm']"),
        ({"kinds": None}, ValueError, "kinds is None; it must be"),
        ({"exclude": None}, TypeError, "exclude is None; it must be names of layers, or classes"),
        ({"exclude": nn.LayerNorm(8)}, TypeError, "exclude is LayerNorm((8,), eps=1e-05, elementwise_affine=True"),
        ({"include": nn.Sequential()}, TypeError, "include is Sequential(); it must be names of layers, or classes"),
    ],
)
def test_wrong_choices_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = several()
    with pytest.raises(error) as raised:
        replace_norms(model, **options)
    assert words in str(raised.value)
    assert not [module for module in model.modules() if type(module).__module__.startswith("cunorm")]


def test_examples() -> None:
    assert doctest.testmod(replace).failed == 0


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match="model is a function; it must be"):
        replace_norms(several)  # type: ignore[arg-type]


def test_the_report_is_a_table() -> None:
    report = replace_norms(several(), exclude="head.0")
    lines = [
        "replaced 4 layers, left 1",
        "    2 LayerNorm -> cunorm.layer_norm (encoder.0 and 1 more)",
        "    1 GELU -> cunorm.gelu (encoder.1)",
        "    1 LlamaRMSNorm -> cunorm.rms_norm (head.1)",
        "    1 InitializedLayerNorm left: excluded (head.0)",
    ]
    assert str(report) == repr(report) == "\n".join(lines)


# ---- Compiled models.


def test_layers_are_compiled_without_a_graph_break() -> None:
    model = nn.Sequential(ConvNextLayerNorm(16, data_format="channels_first"), GroupNorm(16), nn.Flatten(2))
    model.extend([nn.LayerNorm(15), ACT2FN["gelu_new"], LlamaRMSNorm(15), GemmaRMSNorm(15), T5LayerNorm(15)])
    assert len(replace_norms(model, compiled=True).replaced) == 7
    compiled, graphs = graphs_of(model, fullgraph=True)
    x = torch.randn(IMAGES)
    torch.testing.assert_close(compiled(x), model(x))
    (graph,) = graphs
    assert {f"cunorm.{op}" for op in ("layer_norm", "group_norm", "gelu", "rms_norm")} <= graph


def test_a_model_that_was_compiled_before_is_compiled_again() -> None:
    model = nn.Sequential(nn.LayerNorm(16), LlamaRMSNorm(16))
    compiled, graphs = graphs_of(model)
    x = torch.randn(4, 16)
    expected = compiled(x)
    report = replace_norms(compiled, compiled=True)
    assert len(report.replaced) == 2
    torch.testing.assert_close(compiled(x), expected)
    assert [{"cunorm.layer_norm", "cunorm.rms_norm"} <= graph for graph in graphs] == [False, True]
    report.undo()
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    assert len(graphs) == 2  # the first one is there still


def test_what_is_traced_stays_what_it_was() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), LlamaRMSNorm(16), nn.BatchNorm1d(16))
    model.append(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))  # of what has no batch axis
    original = copy.deepcopy(model)
    replace_norms(model)
    compiled, graphs = graphs_of(model, fullgraph=True)
    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(x), original(x))
    graphs.append({str(node.target) for node in torch.export.export(model, (x,)).graph.nodes})
    assert len(graphs) == 2 and not any("cunorm" in target for graph in graphs for target in graph)
    for name, buffer in original.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:  # where nothing traces it is cunorm again
        torch.testing.assert_close(model(x), original(x))
    assert sum("native_layer_norm" in event.name for event in profiler.events()) == 1
