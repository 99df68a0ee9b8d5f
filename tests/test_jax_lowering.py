"""What the JAX adapter prepares while lowering: on GPUs that are none, so that nothing runs but what it asks for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tuning_cases import DEVICE, FakeMachine, favourite, other_geometries, problem_of

import cunorm
from cunorm import cuda, execute, launch
from cunorm.plan import Plan, plan, plan_with

jax_call: Any = importlib.import_module("cunorm.adapters.jax.call")


@dataclass
class Gpus:
    """Two GPUs of one model, on the second of which more clusters fit; and the custom calls lowered meanwhile."""

    made: list[tuple[int, Plan]] = field(default_factory=list)
    ran: list[tuple[int, Plan]] = field(default_factory=list)
    lowered: list[Lowered] = field(default_factory=list)

    @staticmethod
    def device(index: int) -> Any:
        return dataclasses.replace(DEVICE, clusters=(66, 32, 16, 8)) if index else DEVICE

    def call(self, chosen: Plan, operands: Any, index: int) -> Any:
        self.made.append((index, chosen))
        return lambda pointers, workspace, stream: self.ran.append((index, chosen))


@dataclass
class Lowered:
    """A custom call: its attributes, and its inputs and outputs, of which the last may be the workspace."""

    attributes: dict[str, Any]
    tensors: list[Any]

    @property
    def workspace(self) -> int:
        return self.tensors[-1].size if self.tensors[-1].dtype == jnp.uint8 else 0

    def run(self, index: int) -> None:
        """As XLA does on a CUDA device."""
        place = {"__dlpack_device__": lambda: (2, index), "data_ptr": lambda: 1 << 20}
        memory = [SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype, **place) for tensor in self.tensors]
        jax_call._run(*self.attributes.values(), *memory, 0)


@pytest.fixture
def gpus(fake_gpu: list[Plan], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    found, ffi_call = Gpus(), jax.ffi.ffi_call

    def recording(target: str, results: Any, **options: Any) -> Any:
        def bound(*given: Any, **attributes: Any) -> Any:
            found.lowered.append(Lowered(attributes, [*map(jax.typeof, given), *results]))
            return ffi_call(target, results, **options)(*given, **attributes)

        return bound

    devices = [SimpleNamespace(device_kind="the same", local_hardware_id=index) for index in (0, 1)]
    monkeypatch.setattr(jax.ffi, "ffi_call", recording)
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    monkeypatch.setattr(cuda, "device", found.device)
    monkeypatch.setattr(launch, "Call", found.call)
    jax_call._cuda_devices.cache_clear()
    yield found
    jax_call._cuda_devices.cache_clear()


def lower_backward(*shape: int) -> None:
    x, vector = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct(shape[-1:], jnp.bfloat16)
    row = jax.ShapeDtypeStruct(shape[:1], jnp.float32)

    def gradients(*arrays: Any) -> Any:
        *arrays, bias = arrays
        return cunorm.layer_norm_backward(*arrays, bias=bias)

    jax.jit(gradients).lower(x, x, vector, row, row, vector)


def test_a_call_is_prepared_for_every_gpu_even_of_one_model(gpus: Gpus) -> None:
    lower_backward(8192, 65536)
    (call,) = gpus.lowered
    problem = problem_of(8192, 65536, direction="backward")
    plans = [(index, plan(problem, gpus.device(index))) for index in (0, 1)]
    assert plans[0][1].workspace_bytes < plans[1][1].workspace_bytes == call.workspace
    assert gpus.made == plans
    call.run(1)
    call.run(0)
    assert gpus.ran == plans[::-1] and len(gpus.made) == 2, "nothing is compiled while XLA runs"


def test_a_gpu_that_cannot_be_used_is_no_hindrance_for_others(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(index: int) -> Any:
        if index == 0:
            raise RuntimeError("CUDA device 0 has compute capability 7.0")
        return gpus.device(index)

    monkeypatch.setattr(cuda, "device", device)
    lower_backward(8192, 65536)
    (call,) = gpus.lowered
    call.run(1)
    with pytest.raises(RuntimeError, match="device 0 has compute capability"):
        call.run(0)


def test_tuning_serves_what_is_traced_later(gpus: Gpus, fake_machine: FakeMachine) -> None:
    """What was compiled keeps its plan and the workspace of that, though the same call is now prepared otherwise."""
    problem = problem_of(4096, 8192, direction="backward")
    built_in = plan(problem, DEVICE)
    geometry, tuned = next(
        (geometry, chosen)
        for geometry in other_geometries(problem)
        if (chosen := plan_with(problem, DEVICE, geometry)).workspace_bytes > built_in.workspace_bytes
    )
    lower_backward(4096, 8192)
    fake_machine.seconds = favourite(problem, geometry, 1.25)
    cunorm.tune("layer_norm", (4096, 8192), "bfloat16", direction="backward")
    lower_backward(4096, 8192)
    before, after = gpus.lowered
    assert (before.workspace, after.workspace) == (built_in.workspace_bytes, tuned.workspace_bytes)
    before.run(0)
    after.run(0)
    before.run(0)
    assert gpus.ran == [(0, built_in), (0, tuned), (0, built_in)]


def test_an_executable_with_too_small_a_workspace(gpus: Gpus) -> None:
    """It may come from another process, which had other GPUs or other plans."""
    lower_backward(8192, 65536)
    (call,) = gpus.lowered
    with pytest.raises(RuntimeError, match=r"CUDA device 1 needs more workspace .*; compile it in this process"):
        small = jax.ShapeDtypeStruct((call.workspace - 1,), jnp.uint8)
        dataclasses.replace(call, tensors=[*call.tensors[:-1], small]).run(1)


def test_what_was_traced_is_not_forgotten_with_prepared_calls(gpus: Gpus) -> None:
    lower_backward(4096, 8192)
    made = list(gpus.made)
    execute.forget_prepared()
    gpus.lowered[0].run(1)
    assert gpus.made == made and gpus.ran == made[1:]
