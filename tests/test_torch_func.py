"""cunorm's ops in torch.func: gradients, Jacobians and vmap."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch_cases import (
    CASES,
    EVERY,
    ROW,
    RUNNING,
    STATISTICS,
    Case,
    Norm,
    assert_same,
    data,
    gradients,
    objective,
    tuple_of,
)

import cunorm
from cunorm import execute

pytestmark = pytest.mark.usefixtures("nothing_compiled")


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


def cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = cunorm.layer_norm(x, weight, eps=1e-5)
    return y.pow(3).sum()


def torch_cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (8,), weight).pow(3).sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_a_transformation_returns_can_be_differentiated(compiled: bool) -> None:
    """By autograd around it, and by a transformation around it."""
    x, samples = data(2, 8), data(3, 2, 8)
    found = []
    for function in (cubed, torch_cubed):

        def value(weight: torch.Tensor, function: Any = function) -> torch.Tensor:
            return torch.func.grad_and_value(lambda x: function(x, weight))(x)[1]

        def values(weight: torch.Tensor, function: Any = function) -> torch.Tensor:
            return torch.func.vmap(torch.func.grad_and_value(lambda x: function(x, weight)))(samples)[1].sum()

        weight = data(8).requires_grad_()
        run = torch.compile(value, backend="aot_eager") if compiled else value
        (outside,) = torch.autograd.grad(run(weight) + weight.square().sum(), weight)
        found.append((outside, torch.func.grad(values)(weight.detach())))
    torch.testing.assert_close(*found)


def composed_cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `cubed`, of what can be differentiated again. Under vmap `torch_cubed` gives wrong second derivatives."""
    centered = x - x.mean(-1, keepdim=True)
    return (centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * weight).pow(3).sum()


def test_second_derivatives_of_what_vmap_composes() -> None:
    """Also where the forward is one kernel call, whose statistics are constants, and its gradients are composed."""
    samples, weights, tangent = data(3, 2, 8), data(3, 8, seed=1), data(3, 2, 8, seed=2)
    vmap, grad = torch.vmap, torch.func.grad

    def derivatives(function: Any) -> list[torch.Tensor]:
        def of_weights(x: torch.Tensor) -> torch.Tensor:
            return vmap(grad(function))(x, weights).square().sum()

        def of_one_weight(x: torch.Tensor) -> torch.Tensor:
            return vmap(grad(function, 1), (0, None))(x, weights[0]).square().sum()

        _, forward = torch.func.jvp(lambda x: vmap(function)(x, weights), (samples,), (tangent,))
        return [grad(of_weights)(samples), grad(of_one_weight)(samples), forward]

    torch.testing.assert_close(derivatives(cubed), derivatives(composed_cubed))


def test_nested_transformations_are_refused() -> None:
    x, weight, grad = data(2, 8), ROW["weight"].detach(), torch.func.grad
    twice = [
        lambda: grad(lambda x: grad(cubed)(x, weight).sum())(x),
        lambda: torch.func.hessian(cubed)(x, weight),
        lambda: torch.func.jvp(lambda x: grad(cubed)(x, weight), (x,), (x,)),
        lambda: grad(cubed)(x.clone().requires_grad_(), weight).square().sum().backward(),
    ]
    for differentiate in twice:
        with pytest.raises(RuntimeError, match=r"forward mode AD|cannot be differentiated"):
            differentiate()


def test_a_transformation_without_gradients_around_it() -> None:
    x, weight = data(2, 8), data(8).requires_grad_()
    with torch.no_grad():
        dx, value = torch.func.grad_and_value(cubed)(x, weight)
    assert not dx.requires_grad and not value.requires_grad
    torch.testing.assert_close(dx, torch.func.grad(torch_cubed)(x, weight.detach()))


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


@pytest.mark.parametrize("eps", [1e-5, 1.0])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "instance_norm", "group_norm", "batch_norm"])
def test_vmap_of_gradients_by_themselves(name: str, mask: tuple[bool, bool, bool], eps: float) -> None:
    """Which are not told the eps of the statistics that they are given."""
    x, dy, weight = data(3, 5, 4, 6) / 8, data(3, 5, 4, 6), data(6 if name in ("layer_norm", "rms_norm") else 4)
    options: dict[str, Any] = {"training": True} if name == "batch_norm" else {}
    more = (2,) if name == "group_norm" else ()
    forward = functools.partial(getattr(cunorm, name), eps=eps, return_stats=True, **options)
    statistics = [torch.stack(found) for found in zip(*(forward(item, *more, weight)[1:] for item in x), strict=True)]

    def backward(dy: torch.Tensor, x: torch.Tensor, *statistics: torch.Tensor) -> Any:
        results = getattr(cunorm, f"{name}_backward")(dy, x, *more, weight, *statistics, output_mask=mask)
        return tuple(result for result in tuple_of(results) if result is not None)

    tensors = dy, x, *statistics
    results = torch.vmap(backward)(*tensors)
    for result, tensor in zip(results, looped(backward, tensors, (0,) * len(tensors)), strict=True):
        torch.testing.assert_close(result, tensor)


@pytest.mark.parametrize("name", ["layer_norm, all", "rms_norm", "group_norm", "batch_norm, evaluation", "gelu, bias"])
def test_nested_vmap_equals_a_loop(name: str) -> None:
    """Where all but x are mapped further out, along an axis that leaves no contiguous parts."""
    case = CASES[name]
    x, *others = (case.tensors | case.constants).values()
    stacks = [torch.stack([tensor, 2 * tensor, 3 * tensor], -1) for tensor in others]
    case = Case(case.function, case.tensors | case.constants, **case.options)

    def of_samples(*others: torch.Tensor) -> Any:
        return torch.vmap(lambda x: case(x, *others))(torch.stack([x, 2 * x]))

    def jacobian(*others: torch.Tensor) -> Any:
        return torch.func.jacrev(lambda x: tuple_of(case(x, *others))[0].flatten()[:3])(x)

    for function in (of_samples, jacobian):
        results = tuple_of(torch.vmap(function, -1)(*stacks))
        torch.testing.assert_close(results, looped(function, stacks, (-1,) * len(stacks)))


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


def test_running_statistics_from_outside_a_transformation() -> None:
    mean, var = torch.zeros(4), torch.ones(4)

    def loss(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = cunorm.batch_norm(x, running_mean=mean, running_var=var, training=True)
        return y.pow(3).sum(), (mean, var)

    x = data(8, 4)
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        torch.func.grad(lambda x: loss(x, mean, var)[0])(x)
    assert not mean.any()
    _, updated = torch.func.grad(loss, has_aux=True)(x, mean, var)
    expected = torch.zeros(4), torch.ones(4)
    loss(x, *expected)
    torch.testing.assert_close(updated, expected)


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


@pytest.mark.parametrize("batched", [("running_mean", "running_var"), ("x", "running_var"), ("x", "weight")])
def test_vmap_of_gradients_with_given_statistics(batched: tuple[str, ...]) -> None:
    case = Case(cunorm.batch_norm, {**CASES["batch_norm"].tensors, **RUNNING}, training=False)
    tensors, places = mapped(case, batched)
    for wanted in ((0,), (0, 1, 2)):
        gradient = torch.func.grad(lambda *given: case(*given).pow(2).sum(), wanted)
        torch.testing.assert_close(torch.vmap(gradient, places)(*tensors), looped(gradient, tensors, places))


@pytest.mark.parametrize("name", ["layer_norm, all", "rms_norm", "instance_norm, last", "batch_norm"])
def test_statistics_of_weights_of_their_own_are_constants(name: str) -> None:
    """Though vmap composes the op of operators that autograd knows."""
    case = CASES[name]
    tensors, places = mapped(case, ("weight", "bias"))

    def statistics(*tensors: torch.Tensor) -> torch.Tensor:
        _, *others = case(*tensors)
        used = sum(item.sum() for item in tensors) * 0  # else there would be nothing to differentiate
        return sum((item.square().sum() for item in others[-2:]), used)

    every = tuple(range(len(tensors)))
    outside = torch.func.grad(lambda *given: torch.vmap(statistics, places)(*given).sum(), every)(*tensors)
    inside = torch.vmap(torch.func.grad(statistics, every), places)(*tensors)
    assert not any(item.any() for item in (*outside, *inside))


def test_running_statistics_take_no_part_in_gradients() -> None:
    scale, mean, var = data(4).requires_grad_(), torch.zeros(3, 4), torch.ones(3, 4)
    norm = torch.vmap(lambda x, m, v: cunorm.batch_norm(x, running_mean=m, running_var=v, training=True))
    for _ in range(2):  # in the second step they would take part in the first
        norm(data(3, 5, 4).float() * scale.float(), mean, var).pow(3).sum().backward()
    assert mean.any() and not mean.requires_grad and not var.requires_grad


@pytest.mark.parametrize(
    "norm",
    [
        cunorm.instance_norm,
        functools.partial(cunorm.group_norm, num_groups=2),
        functools.partial(cunorm.batch_norm, running_mean=data(4), running_var=data(4).square(), training=False),
        functools.partial(cunorm.batch_norm, training=True),
        cunorm.layer_norm,
        cunorm.gelu,
    ],
)
def test_vmap_over_nothing(norm: Any) -> None:
    assert torch.vmap(norm)(data(0, 3, 4, 5)).shape == (0, 3, 4, 5)


def test_what_is_composed_of_operators_is_exact() -> None:
    """Rows whose mean is far larger than their deviation, and the limits of GELU."""
    x = (data(3, 4, 512) + 1e4).float()
    weight = torch.ones(3, 512)
    expected = cunorm.layer_norm(x.double())
    assert (torch.vmap(cunorm.layer_norm)(x, weight) - expected).norm() < 1e-6 * expected.norm()
    x = (data(3, 64, 5) + 1e4).float()
    expected = torch.stack([cunorm.batch_norm(part, training=True) for part in x.double()])
    result = torch.vmap(functools.partial(cunorm.batch_norm, training=True))(x)
    assert (result - expected).norm() < 1e-6 * expected.norm()

    z = torch.tensor([-torch.inf, -50.0, 50.0, torch.inf])
    for approximate in ("none", "tanh"):
        gelu = functools.partial(cunorm.gelu, approximate=approximate)
        mapped_gelu = torch.vmap(lambda z, bias, gelu=gelu: gelu(z, bias=bias))
        given = z[:, None], torch.zeros(4, 1)
        torch.testing.assert_close(mapped_gelu(*given)[:, 0], gelu(z))
        slope = torch.func.grad(lambda z, bias, of=mapped_gelu: of(z, bias).nan_to_num(posinf=0).sum())(*given)
        torch.testing.assert_close(slope[:3, 0], torch.tensor([0.0, 0.0, 1.0]))


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


def test_a_tensor_that_outlived_its_transformation() -> None:
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(data(3, 8))
    weight = data(8).requires_grad_()
    y = cunorm.layer_norm(kept[0], weight)
    assert_same(y, cunorm.layer_norm(data(3, 8), weight))
    assert torch.autograd.grad(y.sum(), weight)[0].shape == (8,)
