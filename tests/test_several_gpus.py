"""Two GPUs: arrays on one that is not current, calls in turns, captured graphs, compiled functions, other streams.

JAX's are in test_jax.py and test_jax_sharding.py, PyTorch's data parallel training in test_torch_library.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_gpu import everything

import cunorm

pytestmark = pytest.mark.gpu

# A block has rows, several blocks share one, all blocks of a GPU share one; and rows that are not contiguous.
SHAPES = [(4096, 256), (3, 300_000), (2, 600_000), (100, 1030)]
ELSEWHERE = 1  # 0 is current


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if pytest.importorskip("cupy").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs an NVIDIA GPU beside another")


def torch_data(index: int, *shape: int) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape[-1:], shape)
    return tuple(torch.randn(shape, generator=generator).to(f"cuda:{index}") for shape in shapes)


def cupy_data(index: int, *shape: int) -> tuple[Any, ...]:
    import cupy

    with cupy.cuda.Device(index):
        return tuple(cupy.asarray(tensor.cpu().numpy()) for tensor in torch_data(0, *shape))


def torch_step(x: Any, weight: Any, dy: Any) -> tuple[Any, ...]:
    import torch

    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    y = cunorm.layer_norm(*leaves)
    images = cunorm.group_norm(x.reshape(x.shape[0], 2, -1, 1), 2, data_format="NCHW")
    return (y.detach(), images, *torch.autograd.grad(y, leaves, dy))


def bytes_of(results: tuple[Any, ...]) -> list[bytes]:
    given = [item for item in results if item is not None]
    return [(item.get() if hasattr(item, "get") else item.cpu().numpy()).tobytes() for item in given]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cupy_arrays_on_a_gpu_that_is_not_current(shape: tuple[int, int]) -> None:
    import cupy

    expected = bytes_of(everything(*cupy_data(0, *shape)))
    results = everything(*cupy_data(ELSEWHERE, *shape))
    assert {item.device.id for item in results if item is not None} == {ELSEWHERE}
    assert cupy.cuda.runtime.getDevice() == 0, "the caller's device stays current"
    with cupy.cuda.Device(ELSEWHERE):
        assert bytes_of(results) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_tensors_on_a_gpu_that_is_not_current(shape: tuple[int, int]) -> None:
    import torch

    expected = bytes_of(torch_step(*torch_data(0, *shape)))
    results = torch_step(*torch_data(ELSEWHERE, *shape))
    assert {item.device.index for item in results} == {ELSEWHERE}
    assert torch.cuda.current_device() == 0, "the caller's device stays current"
    assert bytes_of(results) == expected


def test_both_in_turns_without_waiting() -> None:
    given = [torch_data(index, 512, 8192)[0] for index in (0, ELSEWHERE)]
    results = list(given)
    for _ in range(20):
        results = [cunorm.layer_norm(result) + x for result, x in zip(results, given)]
    alone = given[0]
    for _ in range(20):
        alone = cunorm.layer_norm(alone) + given[0]
    assert bytes_of((results[0],)) == bytes_of((results[1],)) == bytes_of((alone,))


def test_a_stream_of_the_other_gpu() -> None:
    """It computes after what is before it on its own stream, and not on that of the current GPU."""
    import torch

    x, weight, _ = torch_data(ELSEWHERE, 512, 8192)
    expected = cunorm.rms_norm(x, weight).cpu()
    stream = torch.cuda.Stream(torch.device("cuda", ELSEWHERE))
    torch.cuda.synchronize(ELSEWHERE)
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)  # some 10 ms
        late.copy_(x)
        with torch.cuda.device(0):
            y = cunorm.rms_norm(late, weight)
    stream.synchronize()
    assert torch.equal(y.cpu(), expected)


def test_a_graph_of_the_other_gpu() -> None:
    import torch

    x, weight, dy = torch_data(ELSEWHERE, 3, 300_000)
    expected = bytes_of(torch_step(x, weight, dy))
    with torch.cuda.device(ELSEWHERE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = torch_step(x, weight, dy)
        graph.replay()
    assert bytes_of(captured) == expected


def test_compiled_for_the_other_gpu() -> None:
    import torch

    x, weight, _ = torch_data(ELSEWHERE, 100, 1030)
    compiled = torch.compile(lambda x, weight: cunorm.layer_norm(x * 2, weight) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), cunorm.layer_norm(x * 2, weight) + 1)


def test_tensors_on_both_are_refused() -> None:
    x, here = torch_data(ELSEWHERE, 100, 1030)[0], torch_data(0, 100, 1030)[1]
    with pytest.raises(RuntimeError, match="weight is on CUDA device 0 and x on CUDA device 1"):
        cunorm.layer_norm(x, here)
