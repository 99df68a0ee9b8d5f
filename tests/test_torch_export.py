"""cunorm's ops in torch.export and make_fx, and of tensors without memory: FakeTensor and meta."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_cases import CASES, EVERY, Block, Case, assert_same, data, gradients, run, tuple_of

import cunorm

pytestmark = pytest.mark.usefixtures("nothing_compiled")


# ---- torch.export and make_fx.


LOAD = """
import sys
import torch
import cunorm.adapters.torch
x, expected = torch.load(sys.argv[2])
assert torch.equal(torch.export.load(sys.argv[1]).module()(x), expected)
"""


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_in_another_process(strict: bool, tmp_path: Path) -> None:
    block, x = Block(), data(3, 4, 8).float()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: rows}}, strict=strict)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"cunorm.rms_norm.default", "cunorm.gelu.default"} <= targets
    larger = data(3, 9, 8).float()
    assert_same(program.module()(larger), block(larger))
    decomposed = program.run_decompositions()
    assert_same(decomposed.module()(larger), block(larger))
    if strict:
        return
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((larger, block(larger).detach()), tmp_path / "tensors.pt")
    run(LOAD, tmp_path / "program.pt2", tmp_path / "tensors.pt")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    case = CASES["layer_norm, all"]
    tensors = case.fresh(grad=True)
    graph = make_fx(functools.partial(gradients, case), tracing_mode=mode)(tensors)
    names = [str(node.target) for node in graph.graph.nodes]
    assert "cunorm.layer_norm.default" in names and "cunorm.layer_norm_backward.default" in names
    assert_same(tuple(graph(tensors)), gradients(case, tensors))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm", "batch_norm, evaluation"])
def test_statistics_that_a_graph_left_out_are_computed_for_the_gradient(name: str) -> None:
    """As in a program that was exported without gradients and is trained then."""
    case = CASES[name]

    def without(*tensors: torch.Tensor) -> torch.Tensor:
        return tuple_of(case(*tensors))[0]

    with torch.no_grad():
        graph = make_fx(without)(*case.fresh())
    graph.graph.eliminate_dead_code()
    (node,) = [node for node in graph.graph.nodes if "cunorm" in str(node.target)]
    node.args = (*node.args[:-1], False)
    graph.recompile()
    tensors = case.fresh(grad=True)
    assert_same(gradients(graph, tensors), gradients(without, tensors))


# ---- Tensors without memory.


def described(result: Any) -> list[tuple[Any, ...]]:
    return [(item.shape, item.stride(), item.dtype) for item in tuple_of(result)]


@EVERY
def test_fake_and_meta_tensors_foretell_what_there_will_be(case: Case) -> None:
    expected = described(case(*case.fresh()))
    tensors = case.fresh(grad=True)
    expected_gradients = described(gradients(case, tensors))
    constants = {name: tensor.to("meta") for name, tensor in case.constants.items()}
    meta = [tensor.to("meta").requires_grad_() for tensor in tensors]
    results = case(*meta, **constants)
    assert described(results) == expected and tuple_of(results)[0].is_meta
    assert described(torch.autograd.grad(tuple_of(results)[0].sum(), meta[:1])) == expected_gradients[:1]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor).detach().requires_grad_() for tensor in tensors]
        constants = {name: mode.from_tensor(tensor) for name, tensor in case.constants.items()}
        results = case(*fakes, **constants)
        assert described(results) == expected and tuple_of(results)[0].device.type == "cpu"
        ones = [torch.ones_like(item) for item in tuple_of(results) if item.requires_grad]
        outputs = [item for item in tuple_of(results) if item.requires_grad]
        assert described(torch.autograd.grad(outputs, fakes, ones)) == expected_gradients
    fakes = [mode.from_tensor(tensor) for tensor in case.fresh()]
    assert described(case(*fakes, **constants)) == expected, "outside of the mode"


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.mT, lambda x: x[:, 1:]], ids=["dense", "mT", "slice"])
@pytest.mark.parametrize("name", ["layer_norm", "instance_norm", "group_norm, NWC", "gelu"])
def test_strides_of_results_of_strided_tensors(name: str, layout: Any) -> None:
    case, x = CASES[name], layout(data(2, 4, 4))
    function = functools.partial(case.function, **case.options)
    expected = described(function(x))
    assert described(function(x.to("meta"))) == expected
    fake = FakeTensorMode().from_tensor(x)
    assert fake.stride() == x.stride() and described(function(fake)) == expected


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "axis": (cunorm.layer_norm, {"axis": 3}),
    "weight": (cunorm.layer_norm, {"weight": data(7)}),
    "strides": (cunorm.layer_norm, {"weight": data(16)[::2]}),
    "dtype": (cunorm.rms_norm, {"x": torch.ones(3, 8, dtype=torch.int64)}),
    "residual": (cunorm.rms_norm, {"residual": data(3, 4)}),
    "offset": (cunorm.rms_norm, {"weight_offset": 1.0}),
    "groups": (cunorm.group_norm, {"num_groups": 3}),
    "format": (cunorm.instance_norm, {"data_format": "NCHW"}),
    "one value": (cunorm.batch_norm, {"x": data(1, 8), "training": True}),
    "running": (cunorm.batch_norm, {"training": True, "running_mean": data(7), "running_var": data(8)}),
    "bias": (cunorm.gelu, {"bias": data(3)}),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_wrong_arguments_get_the_errors_of_eager_calls(wrong: str) -> None:
    function, changed = WRONG[wrong]
    given = {"x": data(3, 8)} | changed
    with pytest.raises((ValueError, TypeError)) as expected:
        function(**given)
    for place in (lambda t: t.to("meta"), FakeTensorMode().from_tensor):
        moved = {name: place(item) if isinstance(item, torch.Tensor) else item for name, item in given.items()}
        if wrong == "strides":
            moved["weight"] = place(data(16))[::2]
        with pytest.raises(expected.type) as raised:
            function(**moved)
        assert str(raised.value) == str(expected.value)


def test_tensors_of_different_devices_without_memory() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="weight is on cpu and x on cuda:0; they must be on one"):
        cunorm.layer_norm(torch.empty(3, 8, device="cuda:0"), torch.empty(8))


def test_a_call_is_traced() -> None:
    """By torch.jit.trace, as an operator, also where the same kind of call is prepared."""
    weight = torch.randn(8)
    for rows in (3, 5):
        cunorm.layer_norm(torch.randn(3, 8), weight)
        traced = torch.jit.trace(lambda x: cunorm.layer_norm(x, weight) * 2, torch.randn(3, 8))
        x = torch.randn(rows, 8)
        torch.testing.assert_close(traced(x), cunorm.layer_norm(x, weight) * 2)
        assert "cunorm::layer_norm" in str(traced.graph)
