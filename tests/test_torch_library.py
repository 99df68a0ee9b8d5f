"""cunorm's ops as operators of PyTorch, under what wraps calls and modules, and on the streams of a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_cases import (
    CASES,
    DEVICES,
    EVERY,
    IMAGE,
    RUNNING,
    STATISTICS,
    Block,
    Case,
    Norm,
    Tensors,
    assert_same,
    data,
    gradients,
    objective,
    tuple_of,
)

import cunorm
import cunorm.adapters.torch
from cunorm import execute

pytestmark = pytest.mark.usefixtures("nothing_compiled")


# ---- The rules of operators and of gradients, and whatever wraps a call.


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


@pytest.mark.parametrize("counted", ["forward", "recomputation"])
@EVERY
def test_checkpoint_with_a_mode_in_one_of_forward_and_recomputation(case: Case, counted: str) -> None:
    """The call by the dispatcher and the eager one save as many tensors, which are alike."""
    modes = [FlopCounterMode(display=False), contextlib.nullcontext()]
    contexts = modes if counted == "forward" else modes[::-1]
    leaves = case.fresh(grad=True)
    expected = gradients(lambda *tensors: case(*tensors, **case.constants), leaves)
    for _ in range(2):  # a second call may be compiled
        call: Any = functools.partial(case, **case.constants)
        results = checkpoint(call, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        assert_same(torch.autograd.grad(objective(results), leaves), expected)


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


@pytest.mark.parametrize("needed", ["x", "residual", "weight"])
def test_the_sum_of_constants_is_a_constant(needed: str) -> None:
    given = {"x": torch.randn(3, 8), "residual": torch.randn(3, 8), "weight": torch.randn(8)}
    given[needed].requires_grad_()
    y, residual_out, _ = torch.ops.cunorm.rms_norm(*given.values(), None, [-1], 1e-5, None, 0.0, True)
    assert y.requires_grad and residual_out.requires_grad == (needed != "weight")
    y.sum().backward()
    assert given[needed].grad.any()


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
    real = execute.Ready.of

    def of(adapter: Any, prepared: Any, like: Any, mean: Any) -> Any:
        def run(pointers: Any, workspace: int, stream: int) -> None:
            seen.append(list(pointers))
            prepared.run(pointers, workspace, stream)

        return real(adapter, dataclasses.replace(prepared, run=run), like, mean)

    monkeypatch.setattr(execute, "_calls", {})
    monkeypatch.setattr(execute.Ready, "of", staticmethod(of))
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


def _parallel(rank: int, folder: str, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sharded = _model().to(device)
    fully_shard(sharded, mesh=init_device_mesh(device, (2,)))
    parallel = torch.nn.parallel.DistributedDataParallel(_model().to(device))
    for name, model in {"DDP": parallel, "FSDP": sharded}.items():
        model(data(4, 8)[2 * rank : 2 * rank + 2].to(device)).square().mean().backward()
        found: list[Any] = [parameter.grad for parameter in model.parameters()]
        found = [item.full_tensor() if name == "FSDP" else item for item in found]
        if rank == 0:
            torch.save([item.cpu() for item in found], Path(folder) / f"{name}.pt")
    # Each goes when the other is done, and without an end of Python: where a group is taken down, Gloo's threads now
    # and then end the process with an abort, after all that is tested here.
    Path(folder, f"done {rank}").touch()
    while not Path(folder, f"done {1 - rank}").exists():
        time.sleep(0.01)
    os._exit(0)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), Norm(8), torch.nn.Linear(8, 8)).double()


@pytest.mark.parametrize("device", DEVICES)
def test_data_parallel_training_has_the_gradients_of_one_process(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs an NVIDIA GPU beside another")
    model = _model()
    model(data(4, 8)).square().mean().backward()
    torch.multiprocessing.spawn(_parallel, (str(tmp_path), device), nprocs=2)
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
