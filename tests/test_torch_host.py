"""PyTorch's compiled calls: they do what Python does for the kinds of calls that they know, and leave it the rest."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import os
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cases import CallOnCpu, Driver, compiled_calls, step
from test_torch import *  # noqa: F403  (all of its tests, once more with compiled calls)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_cases import CASES, DEVICES, EVERY, STATISTICS, Case, assert_same, data, gradients, objective

import cunorm
from cunorm import cli, execute
from cunorm.adapters import compiled
from cunorm.adapters.torch import adapter, host
from cunorm.adapters.torch.adapter import ADAPTER
from cunorm.execute import Ready
from cunorm.prepared import Output, Prepared


@pytest.fixture(autouse=True)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    device = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    with compiled_calls(device, monkeypatch) as found:
        yield found


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, nothing is computed by Python's way."""

    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("this call came to Python")

    def forbid() -> None:
        monkeypatch.setattr(execute, "forward", never)
        monkeypatch.setattr(execute, "backward", never)

    return forbid


def constants(case: Case, device: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, copy=True) for name, tensor in case.constants.items()}


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_like_one_before_does_not_come_to_python(
    case: Case, device: str, no_python: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the same results and gradients, bit for bit."""
    monkeypatch.setattr(host, "native", None)
    expected = case(*case.fresh(device), **constants(case, device))
    leaves = case.fresh(device, grad=True)
    expected_gradients = gradients(lambda *given: case(*given, **constants(case, device)), leaves)
    monkeypatch.undo()
    with compiled_calls(device, monkeypatch):
        for round_number in range(2):
            if round_number:
                no_python()
            assert_same(case(*case.fresh(device), **constants(case, device)), expected)
            found = gradients(lambda *given: case(*given, **constants(case, device)), case.fresh(device, grad=True))
            assert_same(found, expected_gradients)


def test_statistics_of_a_batch(no_python: Callable[[], None]) -> None:
    (x,) = STATISTICS.fresh()
    expected = STATISTICS(x)
    no_python()
    assert_same(STATISTICS(x), expected)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias"), ("residual", "weight")], ids=str)
def test_gradients_that_are_wanted(wanted: tuple[str, ...], no_python: Callable[[], None]) -> None:
    case = CASES["layer_norm, all"]
    tensors = dict(zip(case.tensors, case.fresh()))
    for name in wanted:
        tensors[name].requires_grad_()

    def found() -> list[torch.Tensor | None]:
        for tensor in tensors.values():
            tensor.grad = None
        results = case(*tensors.values())
        assert [item.requires_grad for item in results[:2]] == [True, not {"x", "residual"}.isdisjoint(wanted)]
        objective(results).backward()
        return [tensor.grad for tensor in tensors.values()]

    expected = found()
    assert [item is not None for item in expected] == [name in wanted for name in tensors]
    no_python()
    for result, tensor in zip(found(), expected):
        assert (result is None and tensor is None) or torch.equal(result, tensor)  # type: ignore[arg-type]


def test_the_node_is_one_of_autograds(no_python: Callable[[], None]) -> None:
    x, weight = data(3, 8).requires_grad_(), data(8).requires_grad_()
    cunorm.layer_norm(x, weight).sum().backward()
    no_python()
    y = cunorm.layer_norm(x, weight)
    assert y.grad_fn is not None and y.grad_fn.name() == "CunormBackward"
    seen: list[Any] = []
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append((inputs, outputs)))
    y.sum().backward(retain_graph=True)
    assert len(seen[0][0]) == 4 and seen[0][0][1] is None and torch.equal(seen[0][1][0], torch.ones_like(y))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = cunorm.layer_norm(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_saved_tensors_are_turned_into() -> None:
    """A hook may keep them elsewhere, and give back others, that lie otherwise in memory."""
    x, weight = data(4, 6).requires_grad_(), data(6).requires_grad_()
    expected = torch.autograd.grad(cunorm.layer_norm(x, weight).square().sum(), (x, weight))
    for _ in range(2):
        transpose = lambda t: t.mT.contiguous().mT if t.dim() > 1 else t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), transpose):
            y = cunorm.layer_norm(x, weight)
        assert_same(torch.autograd.grad(y.square().sum(), (x, weight)), expected)
    with torch.autograd.graph.save_on_cpu():
        y = cunorm.layer_norm(x, weight)
    assert_same(torch.autograd.grad(y.square().sum(), (x, weight)), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    x, weight = data(4, 6).requires_grad_(), data(6).requires_grad_()
    expected = torch.autograd.grad(cunorm.layer_norm(x, weight).square().sum(), (x, weight))
    from torch.utils.checkpoint import checkpoint

    for _ in range(2):
        y: Any = checkpoint(cunorm.layer_norm, x, weight, use_reentrant=use_reentrant)
        for leaf in (x, weight):
            leaf.grad = None
        y.square().sum().backward()
        assert_same((x.grad, weight.grad), expected)


@pytest.mark.parametrize("counted", ["forward", "recomputation"])
def test_checkpointing_with_a_mode_in_one_of_forward_and_recomputation(
    counted: str, no_python: Callable[[], None]
) -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = data(2, 4, 6).requires_grad_(), data(6).requires_grad_()
    expected = torch.autograd.grad(cunorm.layer_norm(x, weight).square().sum(), (x, weight))
    modes = [FlopCounterMode(display=False), contextlib.nullcontext()]
    contexts = modes if counted == "forward" else modes[::-1]
    for _ in range(3):
        y: Any = checkpoint(cunorm.layer_norm, x, weight, use_reentrant=False, context_fn=lambda: contexts)
        assert_same(torch.autograd.grad(y.square().sum(), (x, weight)), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        for _ in range(2):
            y = cunorm.layer_norm(x, weight)
            assert_same(torch.autograd.grad(y.square().sum(), (x, weight)), expected)
            no_python()


def test_modes_are_kinds_of_their_own(no_python: Callable[[], None]) -> None:
    x, weight = data(3, 8).float(), data(8).float().requires_grad_()
    calls = {
        "plain": lambda: cunorm.layer_norm(x, weight),
        "no grad": lambda: torch.no_grad()(cunorm.layer_norm)(x, weight),
        "inference": lambda: torch.inference_mode()(cunorm.layer_norm)(x, weight),
        "autocast": lambda: torch.autocast("cpu")(cunorm.layer_norm)(x, weight),
    }
    expected = {name: call() for name, call in calls.items()}
    no_python()
    for name, call in calls.items():
        y = call()
        assert torch.equal(y, expected[name]) and y.dtype == expected[name].dtype
        assert y.requires_grad == (name in ("plain", "autocast")) and y.is_inference() == (name == "inference")


def test_kinds_are_told_apart() -> None:
    """By all that a kernel or PyTorch goes by. Each is right, after all the others were met."""
    base = data(6, 32)
    memory = torch.zeros(200, dtype=torch.float32)
    kinds = [
        base,
        base.float(),
        base[:, :16],
        base[:, ::2],
        base[:, 1:17],
        base.mT.contiguous().mT,
        base[:1],
        base.reshape(2, 3, 32),
        torch.nn.Parameter(base),
        memory[1:161].view(5, 32).copy_(base[:5]),
        base[:0],
    ]
    for _ in range(2):
        for x in kinds:
            y = cunorm.rms_norm(x)
            exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-5)
            assert y.dtype == x.dtype and y.is_contiguous()


def test_tensors_that_are_not_just_memory_go_by_python(driver: Driver) -> None:
    x = data(4, 8)

    class Special(torch.Tensor):
        pass

    expected = [cunorm.layer_norm(x), torch.func.grad(lambda t: cunorm.layer_norm(t).square().sum())(x)]
    cunorm.layer_norm(x)
    launched = driver.launches
    assert launched
    assert torch.equal(torch.func.grad(lambda t: cunorm.layer_norm(t).square().sum())(x), expected[1])
    assert torch.equal(torch.func.vmap(cunorm.layer_norm)(x), expected[0])
    assert type(cunorm.layer_norm(x.as_subclass(Special))) is Special
    assert cunorm.layer_norm(x.to("meta")).is_meta
    assert torch.equal(cunorm.layer_norm(torch._neg_view(-x)), expected[0])
    with pytest.raises(TypeError, match="is nested"):
        cunorm.layer_norm(torch.nested.nested_tensor([x, x[:2]]))
    with pytest.raises(TypeError, match="sparse"):
        cunorm.layer_norm(x.to_sparse())
    traced = torch.jit.trace(cunorm.layer_norm, (x,), check_trace=False)
    assert "cunorm::layer_norm" in str(traced.graph)
    assert driver.launches == launched


def test_errors_are_those_of_python() -> None:
    x, weight = data(4, 8), data(8)
    cunorm.layer_norm(x, weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="weight has shape"):
            cunorm.layer_norm(x, weight[:7])
        with pytest.raises(TypeError, match="weight is a list"):
            cunorm.layer_norm(x, [1.0] * 8)
        with pytest.raises(ValueError, match="out cannot be given where gradients are recorded"):
            cunorm.layer_norm(x.requires_grad_(), out=torch.empty_like(x))
        x.requires_grad_(False)
        with pytest.raises(ValueError, match="running_var requires a gradient"):
            cunorm.batch_norm(x, running_mean=weight, running_var=data(8).requires_grad_(), training=True)


def test_a_launch_that_fails(driver: Driver) -> None:
    x = data(4, 8)
    cunorm.layer_norm(x)
    driver.status = 719
    with pytest.raises(RuntimeError, match="kernel on_cpu could not be launched: CUDA driver error 719"):
        cunorm.layer_norm(x)
    driver.status = 0
    cunorm.layer_norm(x)


def test_another_current_context_is_pythons_to_change(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x = data(4, 8)
    expected = cunorm.layer_norm(x)
    cunorm.layer_norm(x)
    assert driver.launches == 1
    driver.context = 78
    monkeypatch.setattr(ADAPTER, "_teach_forward", None, raising=False)  # nor is it taught once more
    assert torch.equal(cunorm.layer_norm(x), expected)
    assert driver.launches == 1


def test_kinds_that_launch_nothing_are_taught_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CPU tensors, which go by Python."""
    prepared: list[Any] = []
    monkeypatch.setattr(host, "_given", lambda *given: prepared.append(given))
    x = data(4, 8).requires_grad_()
    for _ in range(3):
        y = cunorm.layer_norm(x)
        torch.autograd.grad(y.sum(), x)
    assert len(prepared) == 2 and driver.launches == 0


def test_what_is_forgotten_is_prepared_anew(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x = data(4, 8)
    cunorm.layer_norm(x)
    cunorm.layer_norm(x)
    assert driver.launches == 1
    execute.forget_prepared()
    prepared: list[Any] = []
    real = Ready.of
    monkeypatch.setattr(Ready, "of", staticmethod(lambda *given: prepared.append(given) or real(*given)))
    cunorm.layer_norm(x)
    assert len(prepared) == 1 and driver.launches == 1
    cunorm.layer_norm(x)
    assert driver.launches == 2


@pytest.mark.parametrize("when", ["prepare", "teach"])
def test_a_call_that_is_forgotten_meanwhile_is_not_kept(
    when: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, prepare, see = data(4, 8), Ready.of, adapter._allocation

    def forget_and(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            execute.forget_prepared()
            return function(*given)

        return call

    if when == "prepare":
        monkeypatch.setattr(Ready, "of", staticmethod(forget_and(prepare)))
    else:
        monkeypatch.setattr(adapter, "_allocation", forget_and(see))
    cunorm.layer_norm(x)
    monkeypatch.setattr(Ready, "of", staticmethod(prepare))
    monkeypatch.setattr(adapter, "_allocation", see)
    cunorm.layer_norm(x)
    assert driver.launches == 0
    cunorm.layer_norm(x)
    assert driver.launches == 1


def test_kernels_stay_loaded_while_they_are_launched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread has had their call forgotten."""
    calls: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    real = Ready.of

    def of(adapter: Any, prepared: Prepared, *given: Any) -> Ready:
        calls.append(weakref.ref(prepared.run))
        return real(adapter, prepared, *given)

    monkeypatch.setattr(Ready, "of", staticmethod(of))
    x = data(4, 8)
    cunorm.layer_norm(x)
    count, function = driver.functions[-1]

    def launched(pointers: Any) -> None:
        execute.forget_compiled()
        gc.collect()
        alive.append(calls[0]() is not None)
        function(pointers)

    driver.functions[-1] = count, launched
    cunorm.layer_norm(x)
    gc.collect()
    assert alive == [True] and calls[0]() is None


def test_running_statistics_that_share_memory_until_they_are_written() -> None:
    x = data(6, 3)
    for _ in range(3):
        original = torch.zeros(3)
        mean, var = torch._lazy_clone(original), torch._lazy_clone(original)
        cunorm.batch_norm(x, running_mean=mean, running_var=var, training=True)
        assert original.count_nonzero() == 0 and mean.count_nonzero() == 3 and var.count_nonzero() == 3


def test_a_mode_may_differentiate_the_node_that_it_sees() -> None:
    x = data(4, 8).requires_grad_()
    for _ in range(2):
        y = cunorm.layer_norm(x)
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "layer_norm_backward" in str(function) and not seen:
                seen.append(function)
                torch.autograd.grad(y, x, dy, retain_graph=True)
            return function(*args, **(kwargs or {}))

    dy = torch.ones_like(y)
    with Mode():
        torch.autograd.grad(y, x, dy)
    assert len(seen) == 1


def test_threads_share_what_is_known(driver: Driver) -> None:
    x, weight = data(4, 8).requires_grad_(), data(8).requires_grad_()
    expected = torch.autograd.grad(cunorm.layer_norm(x, weight).square().sum(), (x, weight))
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(50):
            found = torch.autograd.grad(cunorm.layer_norm(x, weight).square().sum(), (x, weight))
            if not all(map(torch.equal, found, expected)):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and driver.launches == 400


def test_modules_can_be_copied_and_trained() -> None:
    layer = cunorm.adapters.torch.LayerNorm(8).double()
    for _ in range(3):
        layer(data(4, 8)).square().sum().backward()
    other = copy.deepcopy(layer)
    assert torch.equal(other(data(4, 8)), layer(data(4, 8)))


# ---- The launches of a call.


@pytest.mark.parametrize("nbytes", [128, 0])
def test_pointers_go_where_a_kernel_has_them(driver: Driver, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Those of the workspace too, also where it is empty, as of no rows; and a null pointer stays null."""
    seen: list[list[int]] = []
    numbers = [driver.add(count, seen.append) for count in (3, 2)]

    def prepare(op: Any, *arguments: Any) -> Prepared:
        call = CallOnCpu(lambda pointers: None, [step(numbers[0], (0, -1, 8)), step(numbers[1], (9, 4))])
        call.scratch_offsets = [16, 64]
        return Prepared((Output((4, 8), "float64"), None, None, None), ("cpu", 0), nbytes, call)

    x = data(4, 8)
    op = cunorm.row_norm.RowNorm.of(-1, 1e-5)
    monkeypatch.setattr(cunorm.row_norm.RowNorm, "prepare_forward", prepare)
    cunorm.layer_norm(x)
    assert not seen
    y = cunorm.layer_norm(x)
    (first, null, scratch), (other, last) = seen
    assert first == x.data_ptr() and null == 0 and last == y.data_ptr() and other - scratch == 48
    assert (scratch == 16) == (nbytes == 0)
    assert op.axis == (-1,)


def test_steps_are_what_python_launches() -> None:
    """The fields of a step, as the compiled code hands them to the driver."""
    watching = Driver()
    launched = step(watching.add(1, lambda pointers: None), (0,))
    launched = launched._replace(grid=7, block=(64, 2), shared_bytes=4096, attributes=((6, 1), (2, 1)))
    call = CallOnCpu(lambda pointers: None, [launched])
    prepared = Prepared((Output((4,), "float32"), None, None, None), ("cpu", 0), 0, call)
    ready = Ready(prepared, (), None, None, None, 0, None)
    x, op = data(4).float(), cunorm.row_norm.RowNorm.of(-1, 1e-5)
    functions = watching.addresses("cuLaunchKernelEx", "cuCtxGetCurrent")
    host.native.begin(*functions, None, None)
    given = (x, None, None, None, None, None, None)
    host._has_begun = True
    see = lambda output: (output.shape, (1,), torch.float32)  # noqa: E731
    host.teach_forward(op, host.Statistics.NONE, given, lambda: ready, see)
    y, *others = host.native.forward(op, False, False, *given)
    assert y.shape == (4,) and others == [None, None, None]
    assert watching.configs == [((7, 1, 1), (64, 2, 1), 4096, None, [(6, 1), (2, 1)])]


# ---- Building.

_VARIABLE = "CUNORM_COMPILED_CALLS"


def test_building_is_not_using_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "native", None)
    monkeypatch.setenv(_VARIABLE, "0")
    assert host.build() == host.library() and host.native is None
    monkeypatch.setenv(_VARIABLE, "1")
    host.build()
    assert host.native is not None


def test_what_was_built_may_lie_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", None)
    monkeypatch.setattr(fcntl, "flock", None)
    assert host.build().exists()


def test_without_a_home_there_is_nothing_to_load(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    host.load(host._backward)
    assert not recwarn.list


def test_what_was_built_and_does_not_load_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, used = tmp_path / "made" / "library.so", []
    target.parent.mkdir()
    target.write_text("another machine's")

    def make(self: compiled.Library, path: Path, *_: Any) -> None:
        path.write_text("mine")

    def use(path: Path) -> None:
        used.append(path.read_text())
        if used[-1] != "mine":
            raise ImportError("it does not load")

    monkeypatch.setattr(compiled.Library, "_compile", make)
    monkeypatch.setenv(_VARIABLE, "1")
    host.CODE.build(target, [], [], use)
    host.CODE.build(target, [], [], use)
    assert used == ["another machine's", "mine", "mine"]

    def refuse(path: Path) -> None:
        raise ImportError("it never loads")

    target.unlink()
    with pytest.raises(ImportError, match="never loads"):
        host.CODE.build(target, [], [], refuse)


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"install g\+\+, or set CXX"):
        host.build()
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    with pytest.raises(RuntimeError, match=r"do not compile:\n.*host.cpp.*\nno such header"):
        host.build()
    assert cli.run(["build-torch"]) == 2
    monkeypatch.setenv("CXX", "true")  # which makes nothing, and says that all is well
    with pytest.raises(RuntimeError, match="do not compile"):
        host.build()
    assert not list(tmp_path.glob("torch/*.so"))
    monkeypatch.delenv("CUNORM_CACHE_DIR")
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    with pytest.raises(RuntimeError, match="set CUNORM_CACHE_DIR"):
        host.build()


def test_what_was_built_is_found_by_the_next_process(tmp_path: Path) -> None:
    built = host.library()
    found = "import torch, cunorm.adapters.torch as t; assert (t.host.native is not None) == {}, t.host.native"
    environment = os.environ | {_VARIABLE: "1"}
    for code, variables in ((found.format(True), environment), (found.format(False), os.environ | {_VARIABLE: "0"})):
        subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    damaged = environment | {"CUNORM_CACHE_DIR": str(tmp_path)}
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / built.name).write_bytes(b"no library")
    command = [sys.executable, "-c", found.format(False)]
    done = subprocess.run(command, env=damaged, check=True, capture_output=True, text=True)
    assert "compiled calls of PyTorch are not used" in done.stderr


def test_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    built = host.library()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / built.name).write_bytes(built.read_bytes())
    assert cli.run(["build-torch"]) == 0
    assert built.name in capsys.readouterr().out
    assert cli.run(["info"]) == 0
    assert f"built for {torch.__version__}-{sysconfig.get_config_var('SOABI')}" in capsys.readouterr().out
    assert cli.run(["build-torch", "--remove"]) == 0
    assert capsys.readouterr().out.startswith("1 removed") and not list(tmp_path.glob("torch/*.so"))
