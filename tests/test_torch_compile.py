"""cunorm's ops in torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_cases import (
    CASES,
    DEVICES,
    EVERY,
    IMAGE,
    LAST,
    ROW,
    RUNNING,
    Case,
    assert_same,
    data,
    gradients,
    objective,
    run,
)

import cunorm
from cunorm.text import kind_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")


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


@pytest.mark.parametrize("weight", [(8,), [8], np.ones(8, np.float32)], ids=["tuple", "list", "array"])
def test_a_weight_that_is_no_tensor(weight: Any) -> None:
    x, message = data(3, 8), f"weight is {kind_of(weight)}; beside a PyTorch x it must be a PyTorch tensor"
    with pytest.raises(TypeError, match=message):
        torch.compile(lambda x: cunorm.layer_norm(x, weight), backend="aot_eager")(x)
    with pytest.raises(TypeError, match=message):
        torch.vmap(lambda x: cunorm.layer_norm(x, weight))(x)
    with pytest.raises(TypeError, match=message):
        cunorm.layer_norm(x.to("meta"), weight)


@pytest.mark.parametrize("name", ["weight", "residual"])
@pytest.mark.parametrize("given", [(8,), [1.0] * 8, 1.0, "a"], ids=["tuple", "list", "float", "str"])
def test_the_error_of_the_compiler_has_the_message(given: Any, name: str) -> None:
    message = f"{name} is {kind_of(given)}; beside a PyTorch x it must be a PyTorch tensor"
    compiled = torch.compile(lambda x: cunorm.layer_norm(x, **{name: given}), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(data(3, 8))


NUMPY_FIRST = """
import numpy as np
import cunorm
x = np.random.default_rng(1).standard_normal((4, 8))
dy, weight = x[::-1], x[0]
def norms(x):
    running = {"running_mean": np.zeros(8), "running_var": np.ones(8)}
    y = cunorm.batch_norm(2 * x, weight, **running, training=True)
    y, total = cunorm.rms_norm(y + 1, residual=x, out=np.empty_like(y))
    return (*running.values(), total, y, cunorm.gelu_backward(dy, y - x)[0])
expected = norms(x)
import torch
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(norms, backend=backend)
    for call in range(3):
        torch.compiler.set_stance("fail_on_recompile" if call == 2 else "default")
        for result, item in zip(compiled(x), expected, strict=True):
            assert type(result) is np.ndarray and np.array_equal(result, item)
"""


def test_numpy_arrays_break_the_graph() -> None:
    """Also where NumPy's adapter was there before PyTorch."""
    run(NUMPY_FIRST)
    x = data(3, 8).numpy()
    with pytest.raises(ValueError, match=r"^eps must be finite and not negative; got -1\.0$"):
        torch.compile(lambda x: cunorm.layer_norm(x, eps=-1.0), backend="eager")(x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(lambda x: cunorm.layer_norm(x), backend="eager", fullgraph=True)(x)


def test_out_breaks_the_graph() -> None:
    def doubled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        y = cunorm.layer_norm(2 * x, out=out)
        assert y is out
        return cunorm.gelu(y + 1, out=torch.empty_like(y))

    x = data(3, 8)
    out, expected_out = torch.zeros_like(x), torch.zeros_like(x)
    y, expected = torch.compile(doubled, backend="aot_eager")(x, out), doubled(x, expected_out)
    assert_same(y, expected)
    assert_same(out, expected_out)


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


def test_numbers_that_vary_are_constants() -> None:
    """An eps that is an int now and then is a symbol to torch.compile, as a float is."""

    @torch.compile(backend="eager", fullgraph=True)
    def norms(x: torch.Tensor, eps: float, momentum: float) -> torch.Tensor:
        running = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
        y = cunorm.batch_norm(cunorm.layer_norm(x, eps=eps), **running, training=True, momentum=momentum)
        return y + running["running_mean"]

    x = torch.randn(3, 4)
    for eps, momentum in ((1, 0.5), (2, 1), (0.5, 0), (3, 1)):
        mean = F.layer_norm(x, (4,), eps=eps).mean(0)
        expected = F.batch_norm(F.layer_norm(x, (4,), eps=eps), None, None, training=True) + momentum * mean
        torch.testing.assert_close(norms(x, eps, momentum), expected)


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


def test_a_first_call_inside_torch_compile() -> None:
    """Where the adapter has not been imported yet."""
    run(FIRST_CALL)


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


UNCOUNTED: dict[str, Any] = {
    "rows": lambda x, mask: cunorm.layer_norm(x[mask], x.new_ones(5)),
    "rows of rows": lambda x, mask: cunorm.layer_norm(x[:, mask], residual=x[:, mask]),
    "samples": lambda x, mask: cunorm.group_norm(x[mask], 1),
    "positions": lambda x, mask: cunorm.instance_norm(x[:, :, mask]),
}


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_gradients_where_a_size_is_not_counted_yet(kind: str) -> None:
    function, mask = UNCOUNTED[kind], torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: function(x, mask), backend="aot_eager", fullgraph=True)
        found = gradients(compiled, [data(5, 5, 5).requires_grad_()])
    assert_same(found, gradients(lambda x: function(x, mask), [data(5, 5, 5).requires_grad_()]))


def test_compiled_autograd() -> None:
    tensors = CASES["layer_norm"].fresh(grad=True)
    expected = gradients(CASES["layer_norm"], tensors)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        objective(CASES["layer_norm"](*tensors)).backward()
    assert_same(tuple(tensor.grad for tensor in tensors), expected)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs() -> None:
    case = CASES["layer_norm, all"]
    compiled = torch.compile(case, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = case.fresh("cuda", grad=True)
        torch.testing.assert_close(gradients(compiled, tensors), gradients(case, tensors))
