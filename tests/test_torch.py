"""The PyTorch adapter: CPU tensors through the reference path, CUDA tensors through the kernels."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import cunorm
from cunorm.adapters.torch import adapter
from cunorm.adapters.torch.adapter import ADAPTER
from cunorm.prepared import FORWARD_NAMES, Output
from cunorm.problem import ACTIVATIONS

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
# ||result - float64|| / ||float64||: a rounding of the dtype, a few for float32.
TOLERANCE = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 5e-7, torch.float64: 1e-14}


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def tensors(shape: tuple[int, ...], columns: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 0.5 for _ in range(2))
    weight, bias = (torch.randn(columns, generator=generator, dtype=torch.float64) + 1 for _ in range(2))
    return [t.to(device=device, dtype=dtype) for t in (x, weight, bias, dy)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(4, 33), (2, 3, 256), (3, 20000)], ids=str)
def test_forward_and_gradients_equal_pytorch_in_float64(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, weight, bias, dy = tensors(shape, shape[-1:], dtype, device)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.layer_norm(exact[0], shape[-1:], exact[1], exact[2])
    expected.backward(dy.double())

    ours = [t.requires_grad_() for t in (x, weight, bias)]
    y = cunorm.layer_norm(*ours)
    assert isinstance(y, torch.Tensor) and y.device == x.device and y.dtype == dtype and y.shape == x.shape
    y.backward(dy)
    assert relative_error(y.detach(), expected.detach()) <= TOLERANCE[dtype]
    for tensor, reference in zip(ours, exact):
        assert tensor.grad is not None and reference.grad is not None
        assert tensor.grad.dtype == dtype and tensor.grad.shape == tensor.shape
        assert relative_error(tensor.grad, reference.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axis", [-1, (1, 2), 0, (0, 2)], ids=str)
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
def test_gradcheck(device: str, axis: Any, affine: str) -> None:
    shape = (3, 4, 5)
    axes = (axis,) if isinstance(axis, int) else axis
    columns = tuple(shape[i] for i in sorted(i % 3 for i in axes))
    x, weight, bias, _ = (t.requires_grad_() for t in tensors(shape, columns, torch.float64, device))
    arguments = {"none": (x,), "weight": (x, weight), "bias": (x, None, bias), "both": (x, weight, bias)}[affine]
    assert torch.autograd.gradcheck(lambda *a: cunorm.layer_norm(*a, axis=axis), arguments)


TORCH_ACTIVATIONS: dict[str | None, Any] = {
    None: lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


def composed(
    centered: bool, activation: str | None, offset: float, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """A norm in PyTorch's own operations."""
    xhat = F.layer_norm(x, x.shape[-1:], eps=1e-5) if centered else F.rms_norm(x, x.shape[-1:], eps=1e-5)
    result: torch.Tensor = TORCH_ACTIVATIONS[activation](xhat * (offset + weight) + bias)
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("centered", "offset"), [(True, 0.0), (False, 0.0), (False, 1.0)])
def test_residual_and_activation_equal_pytorch_in_float64(
    device: str, dtype: torch.dtype, activation: str | None, centered: bool, offset: float
) -> None:
    x, weight, bias, dy = tensors((4, 3, 256), (256,), dtype, device)
    residual, added = (x.flip(-1) * 0.7).contiguous(), dy.flip(0).contiguous()
    exact = [t.double().requires_grad_() for t in (x, residual, weight, bias)]
    # The sum is rounded, which is a constant to differentiation.
    total = exact[0] + exact[1]
    total = total + ((x + residual).double() - total).detach()
    expected = composed(centered, activation, offset, total, exact[2], exact[3])
    torch.autograd.backward((expected, total), (dy.double(), added.double()))

    ours = [t.requires_grad_() for t in (x, residual, weight, bias)]
    options: dict[str, Any] = {"eps": 1e-5, "activation": activation, "residual": residual}
    if not centered:
        options["weight_offset"] = offset
    y, residual_out = (cunorm.layer_norm if centered else cunorm.rms_norm)(x, weight, bias, **options)
    assert torch.equal(residual_out, x + residual) and residual_out.is_contiguous()
    torch.autograd.backward((y, residual_out), (dy, added))
    assert relative_error(y.detach(), expected.detach()) <= TOLERANCE[dtype]
    for tensor, reference in zip(ours, exact):
        assert tensor.grad is not None and reference.grad is not None
        assert tensor.grad.dtype == dtype and tensor.grad.shape == tensor.shape
        assert relative_error(tensor.grad, reference.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("centered", [True, False])
def test_gradcheck_with_residual(device: str, centered: bool, activation: str | None) -> None:
    inputs = [t.requires_grad_() for t in tensors((3, 4, 5), (4, 5), torch.float64, device)]

    def norm(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        options = {"axis": (1, 2), "activation": activation, "residual": residual}
        return (cunorm.layer_norm if centered else cunorm.rms_norm)(x, weight, bias, **options)

    assert torch.autograd.gradcheck(norm, inputs)
    assert torch.autograd.gradcheck(lambda x, w, b, r: norm(x, w, b, r)[0], inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.t().contiguous().t()], ids=["contiguous", "transposed"])
def test_gradient_where_only_the_sum_is_used(device: str, layout: Any) -> None:
    x, weight, bias, dy = (t.requires_grad_() for t in tensors((4, 64), (64,), torch.float32, device))
    residual = torch.ones_like(x, requires_grad=True)
    _, residual_out = cunorm.rms_norm(x, weight, bias, residual=residual, activation="silu")
    residual_out.backward(layout(dy.detach()))
    assert x.grad is not None and residual.grad is not None
    assert torch.equal(x.grad, dy) and torch.equal(residual.grad, dy)
    assert weight.grad is None and bias.grad is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("needed", ["x", "residual", "weight", "bias"])
def test_only_what_requires_a_gradient_gets_one_with_residual(device: str, needed: str) -> None:
    x, weight, bias, dy = tensors((4, 64), (64,), torch.float64, device)
    given = {"x": x, "weight": weight, "bias": bias, "residual": x.flip(0)}
    given[needed].requires_grad_()
    y, residual_out = cunorm.layer_norm(**given, activation="gelu")
    assert y.requires_grad and residual_out.requires_grad == (needed in ("x", "residual"))
    (y * dy).sum().backward()
    total = (given["x"] + given["residual"]).detach().requires_grad_()
    leaves = {"x": total, "residual": total} | {name: given[name].detach() for name in ("weight", "bias")}
    leaves[needed].requires_grad_()
    (composed(True, "gelu", 0.0, total, leaves["weight"], leaves["bias"]) * dy).sum().backward()
    for name, tensor in given.items():
        if name == needed:
            assert tensor.grad is not None and leaves[name].grad is not None
            torch.testing.assert_close(tensor.grad, leaves[name].grad)
        else:
            assert tensor.grad is None


def test_the_bias_is_kept_only_for_an_activation() -> None:
    x, weight, bias = torch.randn(4, 8), torch.ones(8), torch.zeros(8)
    for activation, kept in ((None, 0), ("relu", 1)):
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            cunorm.layer_norm(x.clone().requires_grad_(), weight, bias, activation=activation)
        assert sum(t.data_ptr() == bias.data_ptr() for t in saved) == kept


UNPACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it was": lambda t: t,
    "a copy": lambda t: t.clone(),
    "rows apart": lambda t: torch.cat((t, t + 7), -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("unpack", list(UNPACKED))
@pytest.mark.parametrize("paired", [True, False])
def test_statistics_are_kept_in_one_tensor_or_two(
    device: str, shape: tuple[int, ...], unpack: str, paired: bool
) -> None:
    """In one where no hooks are to see them: these see what PyTorch's dispatcher would keep."""
    x, weight, bias, dy = tensors(shape, (64,), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    saved: list[Any] = []
    with contextlib.ExitStack() as hooks:
        if not paired:
            pack = lambda t: saved.append(t) or t  # noqa: E731
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, UNPACKED[unpack]))
        y = cunorm.layer_norm(*leaves)
    if paired:
        node: Any = y.grad_fn
        saved = [t for t in node.saved_tensors if t is not None]
        for i in range(len(saved)):
            place = i if i < 2 else 3  # there is no bias
            node._raw_saved_tensors[place].register_hooks(lambda t: t, UNPACKED[unpack])
    _, mean, rstd = cunorm.layer_norm(*(t.detach() for t in leaves), return_stats=True)
    statistics = [torch.stack((mean, rstd))] if paired else [mean, rstd]
    assert len(saved) == 2 + len(statistics) and all(map(torch.equal, saved[2:], statistics))
    expected = cunorm.layer_norm_backward(dy, x.detach(), weight.detach(), mean, rstd)
    for gradient, direct in zip(torch.autograd.grad(y, leaves, dy), expected):
        # An x that lies in another way has another plan, whose sums may be added in another order.
        difference = 1e-6 if unpack == "transposed" else 0
        torch.testing.assert_close(gradient, direct, rtol=difference, atol=difference)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_that_are_results_share_no_memory(device: str) -> None:
    x, weight, bias, _ = (t.requires_grad_() for t in tensors((4, 64), (64,), torch.float32, device))
    for statistic in cunorm.layer_norm(x, weight, bias, return_stats=True)[1:]:
        assert not statistic._is_view() and statistic.untyped_storage().nbytes() == 4 * 4


def test_nested_tensors_are_refused() -> None:
    """In a process of its own, which PyTorch's guards would end."""
    code = """
import torch, cunorm
nested, x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)]), torch.randn(5, 8)
cunorm.rms_norm(x)  # of as many numbers, and prepared
jagged = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
weight = torch.nested.nested_tensor([torch.randn(8)])
for given in ((nested,), (x, weight), (x.requires_grad_(), None, nested), (jagged,), (jagged.requires_grad_(),)):
    try:
        cunorm.layer_norm(*given)
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    what = "is nested; it must be a torch.strided tensor"
    assert done.stdout.splitlines() == [f"{name} {what}" for name in ("x", "weight", "bias", "x", "x")], done.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_of_rms_norm(device: str) -> None:
    x, weight, _, dy = tensors((4, 64), (64,), torch.float64, device)
    y, rstd = cunorm.rms_norm(x.requires_grad_(), weight, return_stats=True)
    assert y.requires_grad and not rstd.requires_grad
    torch.testing.assert_close(rstd, (x.detach().square().mean(-1) + 1e-6).rsqrt())
    y.backward(dy)
    dx, dweight, dbias = cunorm.rms_norm_backward(dy, x.detach(), weight, rstd)
    assert x.grad is not None and torch.equal(x.grad, dx) and dweight.shape == (64,) and dbias is None


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_requires_a_gradient_gets_one(device: str) -> None:
    x, weight, bias, dy = tensors((4, 64), (64,), torch.float32, device)
    bias.requires_grad_()
    cunorm.layer_norm(x, weight, bias).backward(dy)
    assert x.grad is None and weight.grad is None and bias.grad is not None
    assert relative_error(bias.grad, dy.double().sum(0)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_mixed_dtypes_keep_them(device: str) -> None:
    x, weight, bias, dy = tensors((8, 128), (128,), torch.bfloat16, device)
    x, weight, bias = x.requires_grad_(), weight.float().requires_grad_(), bias.double().requires_grad_()
    cunorm.layer_norm(x, weight, bias).backward(dy)
    assert [t.grad.dtype for t in (x, weight, bias) if t.grad is not None] == [
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_are_constants_to_autograd(device: str) -> None:
    x, *_ = tensors((4, 64), (64,), torch.float32, device)
    y, mean, rstd = cunorm.layer_norm(x.requires_grad_(), return_stats=True)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    torch.testing.assert_close(mean, x.detach().mean(-1))
    assert cunorm.layer_norm(x, return_stats=True)[1].shape == (4,)


@pytest.mark.parametrize("device", DEVICES)
def test_no_graph_is_built_without_need(device: str) -> None:
    x, weight, _, _ = tensors((4, 64), (64,), torch.float32, device)
    assert cunorm.layer_norm(x, weight).grad_fn is None
    with torch.no_grad():
        assert cunorm.layer_norm(x.requires_grad_(), weight).grad_fn is None
    with torch.inference_mode():
        assert cunorm.layer_norm(x, weight).is_inference()


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_views(device: str) -> None:
    x, weight, bias, _ = tensors((6, 70), (64,), torch.float32, device)
    view = x[:, 3:67]
    out = torch.full((6, 64), torch.nan, device=device)
    assert cunorm.layer_norm(view, weight, bias, out=out) is out
    torch.testing.assert_close(out, F.layer_norm(view, (64,), weight, bias), rtol=1e-5, atol=1e-5)
    same = view.contiguous()
    cunorm.layer_norm(same, weight, bias, out=same)
    torch.testing.assert_close(same, out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_not_contiguous(device: str) -> None:
    x, _, _, dy = tensors((5, 32), (32,), torch.float64, device)
    x.requires_grad_()
    cunorm.layer_norm(x).backward(dy.t().contiguous().t())
    strided, x.grad = x.grad, None
    cunorm.layer_norm(x).backward(dy)
    torch.testing.assert_close(strided, x.grad)
    x.grad = None
    cunorm.layer_norm(x).sum().backward()  # dy is broadcast from one number
    assert x.grad is not None and float(x.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_and_subclasses(device: str) -> None:
    layer = torch.nn.LayerNorm(64).to(device)
    x, *_ = tensors((4, 64), (64,), torch.float32, device)
    y = cunorm.layer_norm(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device: str) -> None:
    x = torch.empty(0, 64, device=device, requires_grad=True)
    weight = torch.ones(64, device=device, requires_grad=True)
    y = cunorm.layer_norm(x, weight)
    y.sum().backward()
    assert y.shape == (0, 64) and weight.grad is not None and not weight.grad.any()


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(cunorm.layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"layer_norm_backward\.default cannot be differentiated"):
        first.sum().backward()


def test_errors() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="out cannot be given"):
        cunorm.layer_norm(x.clone().requires_grad_(), out=torch.empty(2, 8))
    with pytest.raises(TypeError, match="weight is an ndarray"):
        cunorm.layer_norm(x, np.ones(8, np.float32))
    with pytest.raises(RuntimeError, match="weight is on device meta"):
        cunorm.layer_norm(x, torch.empty(8, device="meta"))
    with pytest.raises(TypeError, match="layout"):
        cunorm.layer_norm(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="x has dtype int64"):
        cunorm.layer_norm(torch.arange(4))


def test_tensors_whose_memory_is_not_their_value() -> None:
    """Numbers that are negated in memory, and zeros that have none: PyTorch's dispatcher makes tensors of them."""
    x, weight = torch.randn(2, 8, dtype=torch.complex64).conj().imag, torch.randn(8)
    assert x.is_neg()
    for _ in range(2):  # the second time the call without a view is prepared
        torch.testing.assert_close(cunorm.layer_norm(x, weight), cunorm.layer_norm(x.resolve_neg(), weight))
    assert not cunorm.layer_norm(torch._efficientzerotensor((2, 8))).any()
    with pytest.raises(ValueError, match=r"out cannot be given .* negated in memory"):
        cunorm.layer_norm(x, out=torch.empty(2, 8))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm", "batch_norm", "gelu"])
def test_gradients_whose_memory_is_not_their_value(op: str) -> None:
    """Complex numbers that were made of y and conjugated give such a gradient, which nobody sees."""
    options: dict[str, Any] = {"group_norm": {"num_groups": 2}, "batch_norm": {"training": True}}.get(op, {})
    x, other = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, dtype=torch.complex64)
    y = getattr(cunorm, op)(x, **options)
    dy = torch.autograd.grad((torch.complex(y * 2, y).conj() * other).real.sum(), y, retain_graph=True)[0]
    (dx,) = torch.autograd.grad((torch.complex(other.real, y).conj() * other).real.sum(), x, retain_graph=True)
    torch.testing.assert_close(dx, torch.autograd.grad(y, x, other.imag.clone(), retain_graph=True)[0])
    assert torch.autograd.grad(y, x, dy)[0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_writing_out_is_seen_by_autograd(device: str) -> None:
    weight, buffer = torch.randn(2, 8, device=device, requires_grad=True), torch.randn(2, 8, device=device)
    product = weight * buffer
    with torch.no_grad():
        cunorm.layer_norm(torch.randn(2, 8, device=device), out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(2, 8), torch.randn(2, 8))
        with pytest.raises(RuntimeError, match="forward mode AD"):
            cunorm.layer_norm(x)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm", "gelu"])
def test_forward_mode_through_a_gradient_is_refused(op: str) -> None:
    """Of a result from before, which knew nothing of forward mode."""
    x, dy = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    for _ in range(2):  # the second time the call is known, and so is its gradient
        y = getattr(cunorm, op)(x, **({"num_groups": 2} if op == "group_norm" else {}))
        (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="forward mode AD"):
            torch.autograd.grad(y, x, forward_ad.make_dual(dy, dy), retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], expected)


def test_forward_mode_through_a_backward_function_is_refused() -> None:
    x = torch.randn(3, 8)
    _, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.randn(3, 8), torch.randn(3, 8))
        with pytest.raises(RuntimeError, match="forward mode AD"):
            cunorm.layer_norm_backward(dy, x, None, mean, rstd)


@pytest.mark.gpu
def test_tensors_on_different_devices() -> None:
    with pytest.raises(RuntimeError, match="weight is on the CPU and x on CUDA device 0"):
        cunorm.layer_norm(torch.randn(2, 8, device="cuda"), torch.ones(8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_gelu_equals_pytorch_in_float64(device: str, dtype: torch.dtype, approximate: str, biased: bool) -> None:
    x, _, bias, dy = tensors((4, 3, 257), (257,), dtype, device)
    exact = [t.double().clone().requires_grad_() for t in (x, bias)]
    expected = F.gelu(exact[0] + exact[1] if biased else exact[0], approximate=approximate)
    expected.backward(dy.double())
    ours = [t.requires_grad_() for t in (x, bias)]
    y = cunorm.gelu(x, approximate=approximate, bias=bias if biased else None)
    assert y.device == x.device and y.dtype == dtype and y.shape == x.shape
    y.backward(dy)
    assert relative_error(y.detach(), expected.detach()) <= TOLERANCE[dtype]
    for tensor, reference in zip(ours, exact):
        assert (tensor.grad is None) == (reference.grad is None)
        if tensor.grad is not None and reference.grad is not None:
            assert tensor.grad.dtype == dtype and relative_error(tensor.grad, reference.grad) <= TOLERANCE[dtype]
    without_autograd = cunorm.gelu_backward(
        dy, x.detach(), approximate=approximate, bias=bias.detach() if biased else None
    )
    for gradient, tensor in zip(without_autograd if biased else (without_autograd,), ours):
        assert tensor.grad is not None and torch.equal(gradient, tensor.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradcheck_of_gelu(device: str, approximate: str) -> None:
    x, _, bias, _ = (t.requires_grad_() for t in tensors((3, 4, 5), (5,), torch.float64, device))
    assert torch.autograd.gradcheck(lambda x, bias: cunorm.gelu(x, approximate=approximate, bias=bias), (x, bias))
    assert torch.autograd.gradcheck(lambda x: cunorm.gelu(x.t(), approximate=approximate), (x[0],))


@pytest.mark.parametrize("device", DEVICES)
def test_gelu_of_what_needs_no_gradient(device: str) -> None:
    """Only the gradients that are wanted are computed, and nothing is recorded for none."""
    x, _, bias, dy = tensors((4, 64), (64,), torch.float32, device)
    assert not cunorm.gelu(x, bias=bias).requires_grad
    cunorm.gelu(x, bias=bias.requires_grad_()).backward(dy)
    assert x.grad is None and bias.grad is not None
    out = torch.full_like(x, torch.nan)
    assert cunorm.gelu(x, bias=bias.detach(), out=out) is out and bool(torch.isfinite(out).all())
    with pytest.raises(ValueError, match="out cannot be given where gradients are recorded"):
        cunorm.gelu(x, bias=bias, out=out)


# ---- Instance, group and batch norm, on the CPU.

CHANNEL_NORMS: dict[str, Any] = {
    "instance": cunorm.instance_norm,
    "group": functools.partial(cunorm.group_norm, num_groups=2),
    "batch": functools.partial(cunorm.batch_norm, training=True),
}


def channel_tensors(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    x, weight, bias, _ = tensors((3, 4, 5), (4,), dtype, "cpu")
    return {"x": x, "weight": weight, "bias": bias}


def running_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"running_mean": torch.full((4,), 0.25, dtype=dtype), "running_var": torch.full((4,), 2.0, dtype=dtype)}


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("needed", ["x", "weight", "bias", "x weight", "weight bias", "x weight bias"])
@pytest.mark.parametrize("name", [*CHANNEL_NORMS, "evaluation"])
def test_gradients_of_any_of_the_tensors_of_a_channel_norm(name: str, needed: str, activation: str | None) -> None:
    function = CHANNEL_NORMS.get(name) or functools.partial(cunorm.batch_norm, training=False, **running_tensors())
    given = channel_tensors()
    wanted = [given[place].requires_grad_() for place in needed.split()]

    def norm(*changed: torch.Tensor) -> Any:
        return function(**given | dict(zip(needed.split(), changed)), activation=activation)

    assert torch.autograd.gradcheck(norm, wanted)
    norm(*wanted).sum().backward()
    assert [place for place, tensor in given.items() if tensor.grad is not None] == needed.split()


@pytest.mark.parametrize("name", list(CHANNEL_NORMS))
def test_statistics_of_a_channel_norm_are_constants_to_autograd(name: str) -> None:
    given = channel_tensors()
    y, mean, rstd = CHANNEL_NORMS[name](**given | {"x": given["x"].requires_grad_()}, return_stats=True)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    if name == "batch":
        statistics = cunorm.batch_norm_stats(given["x"])
        assert not any(statistic.requires_grad for statistic in statistics)
        torch.testing.assert_close(statistics, (mean, rstd.pow(-2) - 1e-5))


@pytest.mark.parametrize("recorded", [False, True])
def test_autograd_sees_that_running_statistics_are_updated(recorded: bool) -> None:
    given, running = channel_tensors(torch.float32), running_tensors()
    given["x"].requires_grad_(recorded)
    versions = [tensor._version for tensor in running.values()]
    cunorm.batch_norm(**given, **running, training=False)
    assert [tensor._version for tensor in running.values()] == versions
    used = running["running_mean"] * torch.ones(4, requires_grad=True)
    with torch.no_grad():
        kept = running["running_mean"] + 0
    cunorm.batch_norm(**given, **running, training=True)
    assert [tensor._version for tensor in running.values()] == [version + 1 for version in versions]
    assert not torch.equal(kept, running["running_mean"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


def test_running_statistics_in_inference_mode() -> None:
    given, running, expected = channel_tensors(), running_tensors(), running_tensors()
    y = cunorm.batch_norm(**given, **expected, training=True)
    with torch.inference_mode():
        same = cunorm.batch_norm(**given, **running, training=True)
        made_here = running_tensors()
        cunorm.batch_norm(**given, **made_here, training=True)
    assert torch.equal(same, y)
    for place, tensor in expected.items():
        assert torch.equal(running[place], tensor) and torch.equal(made_here[place], tensor)


def test_running_statistics_may_change_before_the_gradient() -> None:
    given, running = channel_tensors(), running_tensors(torch.float64)
    x, dy = given["x"].requires_grad_(), torch.ones(3, 4, 5, dtype=torch.float64)
    y = cunorm.batch_norm(**given, **running, training=False)
    rstd = (running["running_var"] + 1e-5).rsqrt()
    running["running_var"].fill_(100.0)
    y.backward(dy)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (given["weight"] * rstd)[:, None].expand(3, 4, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batch_norm_in_place_of_a_layer(dtype: torch.dtype) -> None:
    """With the layer's own parameters and buffers, in training and in evaluation."""
    layer, expected = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, dtype=torch.float64)
    buffers = {"running_mean": layer.running_mean, "running_var": layer.running_var}
    for training in (True, True, False):
        x, dy = (t.to(dtype) for t in (channel_tensors()["x"], torch.randn(3, 4, 5, dtype=torch.float64)))
        exact = x.double().requires_grad_()
        expected.train(training)(exact).backward(dy.double())
        y = cunorm.batch_norm(x.requires_grad_(), layer.weight, layer.bias, **buffers, training=training)
        y.backward(dy)
        assert y.dtype == dtype and x.grad is not None and exact.grad is not None
        assert relative_error(x.grad, exact.grad) <= 2 * TOLERANCE[dtype]
        for ours, theirs in ((layer.running_mean, expected.running_mean), (layer.running_var, expected.running_var)):
            assert ours is not None and theirs is not None
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    for ours, theirs in ((layer.weight.grad, expected.weight.grad), (layer.bias.grad, expected.bias.grad)):
        assert ours is not None and theirs is not None and relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", list(CHANNEL_NORMS))
def test_channel_norms_do_not_build_a_graph_without_need(name: str) -> None:
    given = channel_tensors()
    assert CHANNEL_NORMS[name](**given).grad_fn is None
    with torch.no_grad():
        assert CHANNEL_NORMS[name](**given | {"x": given["x"].requires_grad_()}).grad_fn is None
    with pytest.raises(ValueError, match="out cannot be given where gradients are recorded"):
        CHANNEL_NORMS[name](**given, out=torch.empty(3, 4, 5, dtype=torch.float64))


def kind_of(*given: torch.Tensor | None) -> Any:
    return ADAPTER.describe((*given, *[None] * (5 - len(given))), FORWARD_NAMES)[0]


@pytest.fixture(params=["fast", "plain"])
def private_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what PyTorch has for its own use, and as if it had not."""
    monkeypatch.setattr(adapter, "_kinds", {})
    if request.param == "plain":
        for name in ("_TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"):
            assert getattr(adapter, name) is not None
            monkeypatch.setattr(adapter, name, None)


@pytest.mark.usefixtures("private_names")
@pytest.mark.parametrize("device", DEVICES)
def test_calls_are_told_apart_by_all_that_a_kernel_or_autograd_goes_by(device: str) -> None:
    memory = torch.zeros(4096, device=device)
    x, weight = memory[:512].view(8, 64), torch.nn.Parameter(memory[1024:1088], requires_grad=False)
    others = {
        "shape": (x.view(4, 128), None, weight),
        "number of axes": (x.view(8, 64, 1), None, weight),
        "strides": (memory[:1024].view(8, 128)[:, :64], None, weight),
        "alignment": (memory[1:513].view(8, 64), None, weight),
        "alignment of the weight": (x, None, memory[1025:1089]),
        "dtype": (x.half(), None, weight),
        "dtype of the weight": (x, None, weight.double()),
        "gradient of x": (x.detach().requires_grad_(), None, weight),
        "gradient of the weight": (x, None, torch.nn.Parameter(weight)),
        "no weight": (x,),
        "a bias instead": (x, None, None, weight),
        "a residual": (x, x.clone(), weight),
        "x twice": (x, x, weight),
        "negated": (torch._neg_view(x), None, weight),
    }
    for _ in range(2):
        kinds = {name: kind_of(*given) for name, given in others.items()} | {"itself": kind_of(x, None, weight)}
        assert len(set(kinds.values())) == len(kinds)
    for name, given in others.items():
        assert kind_of(*given) is kinds[name], name
    assert kind_of(memory[512:1024].view(8, 64), None, weight) is kinds["itself"], "only the address is another"
    with torch.no_grad():
        assert kind_of(*others["gradient of x"]) is not kinds["gradient of x"]


@pytest.mark.gpu
def test_calls_are_told_apart_by_the_device() -> None:
    x = torch.zeros(8, 64)
    assert kind_of(x) is not kind_of(x.cuda()) and kind_of(x) is kind_of(x.clone())


@pytest.mark.usefixtures("private_names")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("permutation", [None, (0, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 1, 5), (2, 0, 4, 5)], ids=str)
def test_both_ways_to_allocate_agree(device: str, shape: tuple[int, ...], permutation: Any) -> None:
    like = torch.empty(1, device=device)
    for output in (Output(shape, "bfloat16", permutation), Output((), "float64")):
        known, new = ADAPTER.allocator(output, like)(like), ADAPTER.empty(output, like)
        assert known.shape == new.shape and known.stride() == new.stride()
        assert known.dtype is new.dtype and known.device == new.device and not known.requires_grad
