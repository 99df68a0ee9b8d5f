"""What the tests of errors share: tensors of two frameworks, and how a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cunorm import launch, on_cpu, reference


def as_numpy_array(values: Any, dtype: str = "float32") -> Any:
    return np.asarray(values).astype(on_cpu.numpy_dtype(dtype) if dtype == "bfloat16" else dtype)


def as_torch_tensor(values: Any, dtype: str = "float32") -> Any:
    return torch.asarray(np.asarray(values)).to(getattr(torch, dtype))


MAKERS = {"numpy": as_numpy_array, "torch": as_torch_tensor}
Make = Callable[..., Any]


def values(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape)


def bytes_of(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        if not tensor.numel():
            return b""
        tensor = tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else np.array(tensor.item())
    return bytes(np.ascontiguousarray(tensor).tobytes())


def forbid_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whatever would compute something fail the test."""

    def ran(*_: Any, **__: Any) -> None:
        pytest.fail("something was computed")

    for name in reference.__all__:
        monkeypatch.setattr(reference, name, ran)
    monkeypatch.setattr(launch.Call, "__call__", ran)


def assert_refused(function: Any, error: type[Exception], message: str, arguments: Any, options: Any) -> None:
    """``function`` raises ``error``, exactly, with the whole of ``message`` in its text, and changes no argument."""
    tensors = [item for item in (*arguments, *options.values()) if isinstance(item, np.ndarray | torch.Tensor)]
    tensors = [item for item in tensors if not (isinstance(item, torch.Tensor) and item.is_meta)]
    before = [bytes_of(tensor) for tensor in tensors]
    with pytest.raises(error) as raised:
        function(*arguments, **options)
    assert type(raised.value) is error
    assert message in str(raised.value)
    assert [bytes_of(tensor) for tensor in tensors] == before
