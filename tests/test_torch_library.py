"""cunorm's ops in torch.compile, torch.export, FakeTensor, torch.func, vmap, and under what wraps modules."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.utils._python_dispatch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import cunorm
import cunorm.adapters.torch
from cunorm import execute

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
ROOT = Path(__file__).parents[1]
Tensors = dict[str, torch.Tensor]


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Case:
    """A public function with options, and tensors for it: x first, then those that may have a gradient."""

    def __init__(self, function: Any, tensors: Tensors, constants: Tensors | None = None, **options: Any) -> None:
        self.function, self.tensors, self.constants, self.options = function, tensors, constants or {}, options

    def __call__(self, *tensors: torch.Tensor, **more: torch.Tensor) -> Any:
        """The function of all or some of the tensors, the others as they are here."""
        given = self.constants | self.tensors | dict(zip(self.tensors, tensors)) | more
        return self.function(**given, **self.options)

    def fresh(self, device: str = "cpu", grad: bool = False) -> list[torch.Tensor]:
        return [tensor.to(device, copy=True).detach().requires_grad_(grad) for tensor in self.tensors.values()]


ROW = {"x": data(3, 4, 8), "weight": data(8, seed=1), "bias": data(8, seed=2)}
IMAGE = {"x": data(2, 4, 3, 5), "weight": data(4, seed=1), "bias": data(4, seed=2)}
LAST = IMAGE | {"x": IMAGE["x"].to(memory_format=torch.channels_last)}
RUNNING = {"running_mean": data(4, seed=3), "running_var": data(4, seed=4).square() + 0.5}
MIXED = {"x": data(3, 8, dtype=torch.bfloat16), "weight": data(8, seed=1).float(), "bias": data(8, seed=2).half()}
CASES = {
    "layer_norm": Case(cunorm.layer_norm, ROW),
    "layer_norm, all": Case(
        cunorm.layer_norm,
        {"x": data(3, 4, 8), "residual": data(3, 4, 8, seed=3), "weight": data(3, 8), "bias": data(3, 8, seed=2)},
        axis=(0, -1),
        activation="gelu",
        return_stats=True,
    ),
    "layer_norm, mixed": Case(cunorm.layer_norm, MIXED, activation="silu"),
    "rms_norm": Case(cunorm.rms_norm, {"x": ROW["x"], "weight": ROW["weight"]}, weight_offset=1.0, return_stats=True),
    "rms_norm, residual": Case(cunorm.rms_norm, {"x": ROW["x"], "residual": data(3, 4, 8, seed=3)}),
    "instance_norm": Case(cunorm.instance_norm, IMAGE, activation="relu"),
    "instance_norm, last": Case(cunorm.instance_norm, LAST, data_format="NCHW", return_stats=True),
    "group_norm": Case(cunorm.group_norm, LAST, num_groups=2, activation="silu"),
    "group_norm, NWC": Case(cunorm.group_norm, {"x": data(2, 3, 4)}, num_groups=2, data_format="NWC"),
    "batch_norm": Case(cunorm.batch_norm, IMAGE, training=True, return_stats=True),
    "batch_norm, evaluation": Case(cunorm.batch_norm, LAST, RUNNING, training=False, activation="gelu_tanh"),
    "gelu": Case(cunorm.gelu, {"x": ROW["x"]}),
    "gelu, bias": Case(cunorm.gelu, {"x": ROW["x"], "bias": ROW["bias"]}, approximate="tanh"),
}
STATISTICS = Case(cunorm.batch_norm_stats, {"x": LAST["x"]})
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def tuple_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def objective(result: Any) -> torch.Tensor:
    """A number whose gradients differ from place to place."""
    return sum((item.double().square().sum() for item in tuple_of(result) if item.requires_grad), torch.zeros(()))


def gradients(function: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(objective(function(*tensors)), tensors)


def assert_same(results: Any, expected: Any) -> None:
    """Bit by bit, and alike in memory."""
    for result, tensor in zip(tuple_of(results), tuple_of(expected), strict=True):
        assert result.dtype == tensor.dtype and result.stride() == tensor.stride()
        assert torch.equal(result, tensor)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- torch.compile.


@EVERY
def test_compiled_forward_and_gradients_are_those_of_eager_calls(case: Case) -> None:
    compiled = torch.compile(case, backend="aot_eager", fullgraph=True)
    assert_same(compiled(*case.fresh()), case(*case.fresh()))
    tensors = case.fresh(grad=True)
    assert_same(compiled(*tensors), case(*tensors))
    assert_same(gradients(compiled, tensors), gradients(case, tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device: str) -> None:
    """Between operations that it fuses and lays out as it likes."""

    def block(x: torch.Tensor, image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = cunorm.layer_norm(x.sin() * 2, weight, residual=x, activation="silu")
        picture = cunorm.group_norm(image.cos(), 2) + 1
        return (y * total).exp().sum() + (picture * image).sum()

    tensors = [data(6, 32), LAST["x"], data(32, seed=1)]
    tensors = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), block(*tensors))
    torch.testing.assert_close(gradients(compiled, tensors), gradients(block, tensors))


@pytest.mark.parametrize("name", ["layer_norm, all", "rms_norm, residual", "group_norm", "batch_norm", "gelu, bias"])
def test_dynamic_shapes_are_compiled_once(name: str) -> None:
    case = CASES[name]
    compiled = torch.compile(case, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same(gradients(compiled, case.fresh(grad=True)), gradients(case, case.fresh(grad=True)))

    def larger(tensor: torch.Tensor, size: int) -> torch.Tensor:
        """More rows or samples, if it has any."""
        if tensor.shape != case.tensors["x"].shape:
            return tensor
        repeated = tensor.repeat_interleave(size, 1 if name == "layer_norm, all" else 0)
        return repeated.to(memory_format=torch.channels_last) if name == "group_norm" else repeated

    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 4, 5):
            tensors = [larger(tensor, size).detach().requires_grad_() for tensor in case.tensors.values()]
            results = [gradients(function, tensors) for function in (compiled, case)]
            for result, expected in zip(*results):
                torch.testing.assert_close(result, expected)


def test_a_marked_axis_is_dynamic() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: cunorm.rms_norm(x, activation="silu"), backend=counter, fullgraph=True)
    for rows in (3, 5, 9):
        x = data(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x), cunorm.rms_norm(x, activation="silu"))
    assert counter.frame_count == 1


def test_calls_of_other_kinds_do_not_compile_again() -> None:
    """What is looked up in Python while tracing must not be guarded as a whole."""
    compiled = torch.compile(lambda x: cunorm.layer_norm(x), backend="aot_eager", fullgraph=True)
    compiled(data(3, 8))
    with torch._dynamo.config.patch(error_on_recompile=True):
        cunorm.layer_norm(data(3, 8), eps=0.125)
        cunorm.layer_norm(data(3, 8).numpy())
        cunorm.group_norm(torch.nn.Parameter(data(3, 8)), 4, eps=0.125)
        compiled(data(3, 8))


def test_what_is_computed_can_be_read_in_a_graph() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch.compile(lambda x: cunorm.rms_norm(x, eps=0.5, weight_offset=0.0), backend=backend)(data(3, 8))
    assert "torch.ops.cunorm.rms_norm(l_x_, None, None, None, (-1,), 0.5, None, 0.0, False)" in graphs[0]


@pytest.mark.parametrize("recorded", [False, True])
def test_running_statistics_in_compiled_code(recorded: bool) -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"training": True, "momentum": 0.75, "convention": "keras"}
        y: torch.Tensor = cunorm.batch_norm(x, running_mean=mean, running_var=var, **options)
        return y

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for function in (step, compiled):
        x = IMAGE["x"].clone().requires_grad_(recorded)
        running = [tensor.clone() for tensor in RUNNING.values()]
        results.append((function(x, *running), *running))
        assert not torch.equal(running[0], RUNNING["running_mean"])
    assert_same(*results)


def test_a_module_with_running_statistics() -> None:
    class Norm(torch.nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            running = {"running_mean": self.running_mean, "running_var": self.running_var}
            y: torch.Tensor = cunorm.batch_norm(x, self.weight, self.bias, training=self.training, **running)
            return y

    norms = [Norm(4, dtype=torch.float64) for _ in range(2)]
    compiled = torch.compile(norms[0], backend="aot_eager", fullgraph=True)
    for training in (True, True, False):
        for norm in norms:
            norm.train(training)
        assert_same(compiled(IMAGE["x"]), norms[1](IMAGE["x"]))
    assert_same(tuple(norms[0].buffers())[:2], tuple(norms[1].buffers())[:2])


@torch.no_grad()
@pytest.mark.parametrize("name", ["layer_norm, all", "rms_norm", "group_norm", "batch_norm", "gelu, bias"])
def test_compiled_backward_functions(name: str) -> None:
    calls = {
        "layer_norm, all": lambda dy, x, w, *s: cunorm.layer_norm_backward(
            dy, x, w, *s, output_mask=(True, False, True)
        ),
        "rms_norm": lambda dy, x, w, _, rstd: cunorm.rms_norm_backward(dy, x, w, rstd),
        "group_norm": lambda dy, x, w, *s: cunorm.group_norm_backward(dy, x, 4, w, *s),
        "batch_norm": lambda dy, x, w, *s: cunorm.batch_norm_backward(dy, x, w, *s),
        "gelu, bias": lambda dy, x, w, *s: cunorm.gelu_backward(dy, x, bias=w),
    }
    x, dy = data(6, 4), data(6, 4, seed=1)
    over_rows = name in ("layer_norm, all", "rms_norm")
    _, mean, rstd = (
        cunorm.layer_norm(x, return_stats=True)
        if over_rows
        else (cunorm.batch_norm(x, training=True, return_stats=True) if name == "batch_norm" else (None, x, x.square()))
    )
    arguments = (dy, x, data(4), mean, rstd)
    compiled = torch.compile(calls[name], backend="aot_eager", fullgraph=True)
    for result, expected in zip(compiled(*arguments), calls[name](*arguments), strict=True):
        assert (result is None) == (expected is None)
        if result is not None:
            assert_same(result, expected)


def test_wrong_arguments_in_compiled_code() -> None:
    x = data(3, 8)
    with pytest.raises(Exception, match="out cannot be given inside torch"):
        torch.compile(lambda x: cunorm.layer_norm(x, out=torch.empty_like(x)), fullgraph=True)(x)
    with pytest.raises(ValueError, match="eps must be finite and not negative; got -1"):
        torch.compile(lambda x: cunorm.layer_norm(x, eps=-1.0), backend="aot_eager")(x)
    with pytest.raises(Exception, match=r"weight has shape \(7,\); for x of shape \(3, 8\) it must be \(8,\)"):
        torch.compile(lambda x: cunorm.layer_norm(x, x[0, :7]), backend="aot_eager", fullgraph=True)(x)


def test_autocast_leaves_dtypes_alone() -> None:
    def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = cunorm.layer_norm(x @ x.mT, weight)
        return y

    x, weight = data(8, 8).float(), data(8).float().requires_grad_()
    for function in (mixed, torch.compile(mixed, backend="aot_eager", fullgraph=True)):
        y = function(x, weight)
        assert y.dtype == torch.bfloat16
        assert torch.autograd.grad(y.float().sum(), weight)[0].dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert cunorm.layer_norm(x, weight).dtype == torch.float32


def test_compiled_without_gradients() -> None:
    compiled = torch.compile(CASES["layer_norm"], backend="aot_eager", fullgraph=True)
    tensors = CASES["layer_norm"].fresh(grad=True)
    with torch.no_grad():
        assert compiled(*tensors).grad_fn is None
    with torch.inference_mode():
        assert compiled(*tensors).is_inference()


FIRST_CALL = """
import cunorm, torch
x = torch.randn(3, 8)
compiled = torch.compile(lambda x: cunorm.layer_norm(x), backend="eager", fullgraph=True)
y = compiled(x)
with torch._dynamo.config.patch(error_on_recompile=True):
    assert torch.equal(compiled(x), cunorm.layer_norm(x)) and torch.equal(y, compiled(x))
"""


def run(code: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_first_call_inside_torch_compile() -> None:
    """Where the adapter has not been imported yet."""
    run(FIRST_CALL)


# ---- torch.export and make_fx.


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(data(8).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, total = cunorm.rms_norm(x, self.weight, residual=x.sin(), activation="silu")
        return cunorm.gelu(y + total, approximate="tanh")  # type: ignore[no-any-return]


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


# ---- torch.func.


@EVERY
def test_functional_gradients(case: Case) -> None:
    tensors = case.fresh()
    expected = gradients(case, case.fresh(grad=True))
    places = tuple(range(len(tensors)))

    def number(*tensors: torch.Tensor) -> torch.Tensor:
        return objective(case(*tensors))

    assert_same(torch.func.grad(number, places)(*tensors), expected)
    _, pull = torch.func.vjp(number, *tensors)
    assert_same(pull(torch.ones((), dtype=torch.float64)), expected)


def test_jacobian() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = cunorm.layer_norm(x, ROW["weight"], activation="gelu")
        return y

    x = data(2, 8)
    expected = torch.autograd.functional.jacobian(norm, x)
    torch.testing.assert_close(torch.func.jacrev(norm)(x), expected)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for cunorm::layer_norm_backward"):
        torch.autograd.functional.jacobian(norm, x, vectorize=True)  # by the vmap of before torch.func


@pytest.mark.parametrize("function", [torch.func.jvp, torch.autograd.functional.jvp], ids=["forward mode", "twice"])
def test_forward_mode_and_second_derivatives_are_refused(function: Any) -> None:
    for case in (*CASES.values(), STATISTICS):
        if case.tensors["x"].dtype != torch.float64 or (case is STATISTICS and function is not torch.func.jvp):
            continue
        x = case.tensors["x"]
        with pytest.raises(RuntimeError, match=r"forward mode AD|cannot be differentiated"):
            function(lambda x, case=case: tuple_of(case(x))[0], (x,), (x,))


def mapped(case: Case, batched: tuple[str, ...]) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
    """The tensors of a case, of which some are stacks of three others, each along another axis."""
    tensors, places = [], []
    for index, (name, tensor) in enumerate(case.tensors.items()):
        place = index % tensor.ndim if name in batched else None
        shifted = [tensor * (1 + shift) + shift for shift in (0.0, 0.25, 0.5)]
        tensors.append(tensor if place is None else torch.stack(shifted, place))
        places.append(place)
    return tensors, tuple(places)


def looped(function: Any, tensors: list[torch.Tensor], places: tuple[int | None, ...]) -> tuple[torch.Tensor, ...]:
    calls = [
        tuple_of(
            function(*[t if place is None else t.select(place, i).contiguous() for t, place in zip(tensors, places)])
        )
        for i in range(3)
    ]
    return tuple(torch.stack(results) for results in zip(*calls))


@EVERY
@pytest.mark.parametrize(
    "batched", [("x",), ("x", "residual"), ("weight", "bias"), ("x", "weight", "bias"), ("residual",)]
)
def test_vmap_equals_a_loop(case: Case, batched: tuple[str, ...]) -> None:
    batched = tuple(name for name in batched if name in case.tensors) or ("x",)
    tensors, places = mapped(case, batched)

    def every_gradient(*tensors: torch.Tensor) -> Any:
        return torch.func.grad(lambda *given: objective(case(*given)), tuple(range(len(tensors))))(*tensors)

    def gradient_of_x(*tensors: torch.Tensor) -> Any:
        return torch.func.grad(lambda x: objective(case(x, *tensors[1:])))(tensors[0])

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if case.tensors["x"].dtype == torch.bfloat16 else {}
    for function in (case, every_gradient, gradient_of_x):
        results = tuple_of(torch.vmap(function, places)(*tensors))
        expected = looped(function, tensors, places)
        for result, tensor in zip(results, expected, strict=True):
            assert result.dtype == tensor.dtype
            torch.testing.assert_close(result, tensor, **tolerance)


def test_rows_and_samples_are_mapped_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = execute.forward
    monkeypatch.setattr(execute, "forward", lambda *arguments: calls.append(arguments[2].shape) or real(*arguments))
    torch.vmap(cunorm.layer_norm, (0, None))(data(3, 4, 8), data(8))
    torch.vmap(functools.partial(cunorm.group_norm, num_groups=2))(data(3, 2, 4, 5))
    torch.vmap(torch.vmap(cunorm.gelu))(data(3, 2, 4))
    assert calls == [(3, 4, 8), (6, 4, 5), (3, 2, 4)]


def test_wrong_arguments_under_vmap() -> None:
    """The mapped axis is none that a call could name, and what no kernel checks is checked too."""
    with pytest.raises(ValueError, match="axis -3 is out of range for x with 2 dimensions"):
        torch.vmap(functools.partial(cunorm.layer_norm, axis=-3))(data(3, 4, 8))
    with pytest.raises(ValueError, match=r"weight has shape \(8, 1\); for x of shape \(4, 8\) it must be \(8,\)"):
        torch.vmap(cunorm.rms_norm)(data(3, 4, 8), data(3, 8, 1))
    with pytest.raises(ValueError, match="x has one value per channel"):
        torch.vmap(functools.partial(cunorm.batch_norm, training=True))(data(3, 1, 8))


def test_vmap_of_running_statistics() -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = cunorm.batch_norm(x, running_mean=mean, running_var=var, training=True)
        return y, mean, var

    x, mean, var = data(3, 2, 4, 5), data(3, 4), data(3, 4).square()
    expected = [step(x[i], mean[i].clone(), var[i].clone()) for i in range(3)]
    for result, items in zip(torch.vmap(step)(x, mean.clone(), var.clone()), zip(*expected)):
        torch.testing.assert_close(result, torch.stack(items))
    with pytest.raises(RuntimeError, match="vmap: inplace arithmetic"):
        torch.vmap(step, (0, None, None))(x, mean[0].clone(), var[0].clone())


def test_an_ensemble_of_modules() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), Norm(8)).double() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x = data(4, 8)

    def call(parameters: Any, buffers: Any) -> Any:
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(torch.vmap(call)(parameters, buffers), expected)
    compiled = torch.compile(torch.vmap(call), backend="aot_eager")
    torch.testing.assert_close(compiled(parameters, buffers), expected)


def test_compiled_functions_of_functions() -> None:
    weight, x = ROW["weight"], data(5, 8)

    def number(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cunorm.rms_norm(x, weight).pow(3).sum()  # type: ignore[no-any-return]

    for function in (
        lambda: torch.func.grad(number)(weight, x),
        lambda: torch.vmap(torch.func.grad(number), (None, 0))(weight, x),
        lambda: checkpoint(cunorm.rms_norm, x, weight, use_reentrant=False),
    ):
        assert_same(torch.compile(function, backend="aot_eager", fullgraph=True)(), function())


def test_rows_that_are_not_counted_yet() -> None:
    """As many as a mask has ones, which is known when the compiled code runs."""

    def some(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return cunorm.layer_norm(x[mask], ROW["weight"], residual=x[mask])

    x, mask = data(5, 8), torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same(torch.compile(some, backend="aot_eager", fullgraph=True)(x, mask), some(x, mask))


def test_compiled_autograd() -> None:
    tensors = CASES["layer_norm"].fresh(grad=True)
    expected = gradients(CASES["layer_norm"], tensors)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        objective(CASES["layer_norm"](*tensors)).backward()
    assert_same(tuple(tensor.grad for tensor in tensors), expected)


def test_a_tensor_that_outlived_its_transformation() -> None:
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(data(3, 8))
    weight = data(8).requires_grad_()
    y = cunorm.layer_norm(kept[0], weight)
    assert_same(y, cunorm.layer_norm(data(3, 8), weight))
    assert torch.autograd.grad(y.sum(), weight)[0].shape == (8,)


class Norm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = cunorm.layer_norm(x, self.weight, self.bias, activation="silu")
        return y


# ---- The rules of operators, of gradients and of whatever wraps a call.


OPERATORS = [*CASES.values(), STATISTICS, Case(cunorm.batch_norm, IMAGE, RUNNING, training=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", OPERATORS, ids=[*CASES, "batch_norm_stats", "batch_norm, running"])
def test_opcheck(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own tests of an operator, for the calls that a case comes to."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "cunorm":
                assert not kwargs
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    constants = {name: tensor.to(device) for name, tensor in case.constants.items()}
    tensors = case.fresh(device, grad=case is not STATISTICS)
    with Recorder():
        results = tuple_of(case(*tensors, **constants))
        if case is not STATISTICS:
            torch.autograd.grad(objective(results), tensors)
    assert len(calls) == (1 if case is STATISTICS else 2)
    for function, arguments in calls:
        detached = [item.detach() if isinstance(item, torch.Tensor) else item for item in arguments]
        torch.library.opcheck(function, tuple(detached))
    if case is not STATISTICS:
        forward, (first, *others) = calls[0]
        torch.library.opcheck(forward, (first.detach().requires_grad_(), *others))


def subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


@EVERY
def test_gradients_of_every_subset(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are right, and no others are computed, whether recorded eagerly or compiled."""
    masks: list[Any] = []
    real = execute.backward

    def backward(*arguments: Any) -> Any:
        masks.append(arguments[9])
        gradients = real(*arguments)
        assert tuple(item is not None for item in gradients) == arguments[9]
        return gradients

    monkeypatch.setattr(execute, "backward", backward)
    compiled = torch.compile(case, backend="aot_eager", fullgraph=True)
    for wanted in subsets(list(case.tensors)):
        tensors = dict(zip(case.tensors, case.fresh()))
        leaves = [tensors[name].requires_grad_() for name in wanted]
        expected = ("x" in wanted or "residual" in wanted, "weight" in wanted, "bias" in wanted)
        for function in (case, compiled) if len(wanted) == 1 else (case,):
            masks.clear()
            objective(function(*tensors.values())).backward()
            assert masks == [expected]
            assert [tensor.grad is not None for tensor in tensors.values()] == [name in wanted for name in tensors]
        if case.tensors["x"].dtype == torch.float64:
            changed = functools.partial(_changed, case, tensors, wanted)
            assert torch.autograd.gradcheck(changed, leaves, fast_mode=True)


def _changed(case: Case, tensors: Tensors, wanted: tuple[str, ...], *leaves: torch.Tensor) -> Any:
    results = tuple_of(case(*(tensors | dict(zip(wanted, leaves))).values()))
    return tuple(item for item in results if item.requires_grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
@EVERY
def test_checkpoint(case: Case, reentrant: bool, device: str) -> None:
    constants = {name: tensor.to(device) for name, tensor in case.constants.items()}

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        return objective(case(*[tensor * 1 for tensor in tensors], **constants))

    leaves = case.fresh(device, grad=True)
    block(*leaves).backward()
    again = case.fresh(device, grad=True)
    checkpoint(block, *again, use_reentrant=reentrant).backward()
    for tensor, leaf in zip(again, leaves):
        assert tensor.grad is not None and leaf.grad is not None and torch.equal(tensor.grad, leaf.grad)


class Labelled(torch.Tensor):
    """A subclass like those of users: memory of its own, and PyTorch's ordinary way with subclasses."""


def test_a_subclass_stays_one() -> None:
    x = data(3, 8).as_subclass(Labelled)
    y, total = cunorm.rms_norm(x, residual=data(3, 8))
    assert type(y) is Labelled and type(total) is Labelled
    plain = cunorm.rms_norm(data(3, 8), residual=data(3, 8))
    assert_same((y.as_subclass(torch.Tensor), total.as_subclass(torch.Tensor)), plain)
    assert type(cunorm.layer_norm(torch.nn.Parameter(data(3, 8)))) is torch.Tensor
    weight = data(8).as_subclass(Labelled).requires_grad_()
    cunorm.layer_norm(data(3, 8), weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (8,)


def test_a_mode_sees_the_ops() -> None:
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = data(3, 8)
    with Mode():
        cunorm.gelu(x)
    assert seen == ["cunorm.gelu.default"]


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


def test_errors_are_raised_by_the_call() -> None:
    x, weight = data(3, 8).requires_grad_(), data(7).requires_grad_()
    for tensor in (x, x.detach()):
        with pytest.raises(ValueError, match="weight has shape"):
            cunorm.layer_norm(tensor, weight)


def test_what_was_saved_must_not_change() -> None:
    for name in ("x", "weight"):
        tensors = {"x": data(3, 8).requires_grad_(), "weight": data(8).requires_grad_()}
        y = cunorm.layer_norm(**tensors)
        with torch.no_grad():
            tensors[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_ten_thousand_calls_leave_nothing_behind(device: str) -> None:
    x, weight = data(2, 8).to(device).requires_grad_(), data(8).to(device).requires_grad_()

    def calls(count: int) -> int:
        """Half of them forward, half of them backward."""
        for _ in range(count // 2):
            y, rstd = cunorm.rms_norm(x, weight, return_stats=True)
            torch.autograd.grad(y, (x, weight), y)
        del y, rstd
        gc.collect()
        return len(gc.get_objects())

    calls(100)
    if device == "cuda":
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
    before = calls(10)
    assert calls(10_000) - before < 100
    if device == "cuda":
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is given the addresses of the tensors of the call and of its results, strided ones too."""
    seen: list[list[int]] = []
    real = execute._Ready.of

    def of(adapter: Any, prepared: Any, like: Any, mean: Any) -> Any:
        def run(pointers: Any, workspace: int, stream: int) -> None:
            seen.append(list(pointers))
            prepared.run(pointers, workspace, stream)

        return real(adapter, dataclasses.replace(prepared, run=run), like, mean)

    monkeypatch.setattr(execute, "_calls", {})
    monkeypatch.setattr(execute._Ready, "of", staticmethod(of))
    x, weight = data(6, 16).to(device)[:, 3:11].requires_grad_(), data(8).to(device).requires_grad_()
    for function in (cunorm.rms_norm, torch.ops.cunorm.rms_norm):
        seen.clear()
        if function is cunorm.rms_norm:
            y, rstd = function(x, weight, return_stats=True)
        else:
            y, rstd = function(x, None, weight, None, [-1], 1e-6, None, 0.0, True)
        dx, dweight = torch.autograd.grad(y, (x, weight), dy := torch.ones_like(y))
        assert seen[0] == [x.data_ptr(), 0, weight.data_ptr(), 0, y.data_ptr(), 0, 0, rstd.data_ptr()]
        pointers = [dy, None, x, weight, None, None, rstd, dx, dweight, None]
        assert seen[1] == [0 if item is None else item.data_ptr() for item in pointers]


# ---- Several processes.


def _parallel(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sharded = _model()
    fully_shard(sharded)
    for name, model in {"DDP": torch.nn.parallel.DistributedDataParallel(_model()), "FSDP": sharded}.items():
        model(data(4, 8)[2 * rank : 2 * rank + 2]).square().mean().backward()
        found: list[Any] = [parameter.grad for parameter in model.parameters()]
        found = [item.full_tensor() if name == "FSDP" else item for item in found]
        if rank == 0:
            torch.save(found, Path(folder) / f"{name}.pt")
    torch.distributed.destroy_process_group()


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), Norm(8), torch.nn.Linear(8, 8)).double()


def test_data_parallel_training_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    model = _model()
    model(data(4, 8)).square().mean().backward()
    torch.multiprocessing.spawn(_parallel, (str(tmp_path),), nprocs=2)
    for name in ("DDP", "FSDP"):
        for found, parameter in zip(torch.load(tmp_path / f"{name}.pt"), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


# ---- What only a GPU can show.


@pytest.mark.gpu
def test_cuda_graph_of_every_op() -> None:
    cases = [case for case in CASES.values() if not case.constants]

    def step() -> list[torch.Tensor]:
        results = []
        for case, tensors in zip(cases, given):
            outputs = tuple_of(case(*tensors))
            results += [*outputs, *torch.autograd.grad(objective(outputs), tensors)]
        return results

    given = [case.fresh("cuda", grad=True) for case in cases]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensors in given:
            for tensor in tensors:
                tensor.mul_(1.5).add_(0.25)
    graph.replay()
    for result, expected in zip(captured, step()):
        assert torch.equal(result, expected)


@pytest.mark.gpu
def test_make_graphed_callables() -> None:
    model, x = Block().cuda(), data(3, 4, 8).float().cuda()
    graphed = torch.cuda.make_graphed_callables(Block().cuda(), (x.clone().requires_grad_(),))
    for shift in (0.0, 1.0):
        inputs = [(x + shift).requires_grad_() for _ in range(2)]
        results = [function(tensor) for function, tensor in zip((model, graphed), inputs)]
        torch.testing.assert_close(results[1], results[0])
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs() -> None:
    case = CASES["layer_norm, all"]
    compiled = torch.compile(case, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = case.fresh("cuda", grad=True)
        torch.testing.assert_close(gradients(compiled, tensors), gradients(case, tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_current_stream_is_used(compiled: bool) -> None:
    """A long wait ahead of what writes x and dy: on any other stream they would be read before."""
    case = CASES["layer_norm"]
    function: Any = torch.compile(case, backend="aot_eager") if compiled else case
    tensors = case.fresh("cuda", grad=True)
    dy = torch.rand_like(tensors[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # where what there is to prepare is prepared
        y = function(*tensors)
        expected = [y.detach(), *torch.autograd.grad(y, tensors, dy)]
    late, late_dy = torch.zeros_like(tensors[0]), torch.zeros_like(dy)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(tensors[0].detach())
        given = [late.requires_grad_(), *tensors[1:]]
        y = function(*given)
        torch.cuda._sleep(200_000_000)
        late_dy.copy_(dy)
        results = [y.detach(), *torch.autograd.grad(y, given, late_dy)]
        assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert_same(tuple(results), tuple(expected))


@pytest.mark.gpu
def test_peak_memory() -> None:
    """No more than the results, the statistics, and partial sums that do not grow with the rows."""
    x = torch.randn(32768, 1024, device="cuda", requires_grad=True)
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    size, few = x.numel() * 4, 16 * 2**20

    def peak(function: Callable[[], Any]) -> tuple[int, Any]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result

    forward, y = peak(lambda: cunorm.layer_norm(x, weight))
    assert size <= forward <= size + few
    backward, _ = peak(lambda: torch.autograd.grad(y, (x, weight), x.detach()))
    assert size <= backward <= size + few
