"""`replace_norms`: layers of torch.nn, what can be asked for, and what compilers see."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replace_norms_cases import IMAGES, GroupNorm, InitializedLayerNorm
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch_cases import graphs_of
from transformers.activations import ACT2FN
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

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


def test_copies_of_what_was_made_over_a_replaced_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.LayerNorm(16)
    replace_norms(module)
    kind = type("Doubled", (type(module),), {"forward": lambda self, x: 2 * kind.__base__.forward(self, x)})
    monkeypatch.setattr(sys.modules[__name__], kind.__name__, kind, raising=False)
    kind.__module__ = __name__
    x = torch.randn(3, 16)
    y = module(x)
    module.__class__ = kind
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is kind and torch.equal(other(x), 2 * y)


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
        ({"kinds": [["norms"]]}, ValueError, "kinds is [['norms']]; it must be"),
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
