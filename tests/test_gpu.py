"""What only a GPU can show: streams, graph capture, threads, great sizes, the same bits twice."""

from __future__ import annotations

import threading
from typing import Any

import channel_cases
import numpy as np
import pytest
from channel_cases import Shape

import cunorm

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 256), (512, 8192), (3, 300000), (100, 1030)]


def gpu_data(seed: int, *shape: int, dtype: str = "float32") -> Any:
    import cupy

    return cupy.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def everything(x: Any, weight: Any, dy: Any) -> tuple[Any, ...]:
    """Both norms with their gradients, the second with a residual and an activation."""
    y, mean, rstd = cunorm.layer_norm(x, weight, weight, return_stats=True)
    results = (y, mean, rstd, *cunorm.layer_norm_backward(dy, x, weight, mean, rstd))
    y, total, rstd = cunorm.rms_norm(x, weight, residual=dy, activation="silu", return_stats=True)
    dx, dweight, _ = cunorm.rms_norm_backward(dy, total, weight, rstd, activation="silu", dresidual_out=x)
    return (*results, y, total, rstd, dx, dweight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_runs_give_the_same_bits(shape: tuple[int, int]) -> None:
    x, weight, dy = gpu_data(0, *shape), gpu_data(1, shape[1]), gpu_data(2, *shape)
    first = [array.get().tobytes() for array in everything(x, weight, dy)]
    for _ in range(3):
        assert [array.get().tobytes() for array in everything(x, weight, dy)] == first


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cupy_graph_capture(shape: tuple[int, int]) -> None:
    import cupy

    x, weight, dy = gpu_data(0, *shape), gpu_data(1, shape[1]), gpu_data(2, *shape)
    everything(x, weight, dy)  # compiles, and fills the pool: neither is possible during capture
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        everything(x, weight, dy)
        stream.synchronize()
        stream.begin_capture()
        captured = everything(x, weight, dy)
        graph = stream.end_capture()
    x[...], dy[...] = gpu_data(3, *shape), gpu_data(4, *shape)
    cupy.cuda.Device().synchronize()
    others = [
        cupy.full(2**20, 7.0, dtype="float32") for _ in range(20)
    ]  # would take scratch memory that was given back
    graph.launch(stream)
    stream.synchronize()
    for result, expected in zip(captured, everything(x, weight, dy)):
        assert result.get().tobytes() == expected.get().tobytes()
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_graph_capture(shape: tuple[int, int]) -> None:
    import torch

    def step(x: Any, weight: Any, dy: Any) -> list[Any]:
        y = cunorm.layer_norm(x, weight)
        return [y, *torch.autograd.grad(y, (x, weight), dy)]

    x, dy = (torch.randn(shape, device="cuda") for _ in range(2))
    weight = torch.randn(shape[1], device="cuda", requires_grad=True)
    x.requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(x, weight, dy)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, weight, dy)
    with torch.no_grad():
        x.normal_(), dy.normal_()
    graph.replay()
    for result, expected in zip(captured, step(x, weight, dy)):
        assert torch.equal(result, expected)


def test_the_current_stream_is_used() -> None:
    """A long kernel ahead on the stream writes x: on any other stream the norm would read it too early."""
    import cupy
    import torch

    def after(previous: Any, stream: Any, slow: Any) -> Any:
        with stream:
            slow()
            return previous()

    big = cupy.ones((8192, 8192), dtype="float32")
    x = cupy.zeros((64, 4096), dtype="float32")
    values = gpu_data(0, 64, 4096)
    expected = cunorm.layer_norm(values)
    cupy.cuda.Device().synchronize()

    def slow_cupy() -> None:
        for _ in range(10):
            big.dot(big)
        x[...] = values

    stream = cupy.cuda.Stream(non_blocking=True)
    y = after(lambda: cunorm.layer_norm(x), stream, slow_cupy)
    stream.synchronize()
    assert bool((y == expected).all())

    t_big, t_values = torch.as_tensor(big, device="cuda"), torch.as_tensor(values, device="cuda")
    t_x = torch.zeros(64, 4096, device="cuda")
    torch.cuda.synchronize()

    def slow_torch() -> None:
        for _ in range(10):
            t_big @ t_big
        t_x.copy_(t_values)

    t_stream = torch.cuda.Stream()
    t_y = after(lambda: cunorm.layer_norm(t_x), torch.cuda.stream(t_stream), slow_torch)
    t_stream.synchronize()
    assert bool((cupy.asarray(t_y) == expected).all())


def test_two_threads() -> None:
    """Each on a stream of its own, a hundred calls: no argument struct or result gets mixed up."""
    import cupy

    failures: list[BaseException | str] = []

    def work(seed: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True):
                x, weight = gpu_data(seed, 64, 1000 + seed), gpu_data(seed + 9, 1000 + seed)
                expected = [a.get() for a in everything(x, weight, x)]
                for _ in range(100):
                    results = [a.get() for a in everything(x, weight, x)]
                    if any(a.tobytes() != b.tobytes() for a, b in zip(results, expected)):
                        failures.append(f"thread {seed}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _check_rows(x: Any, y: Any, mean: Any, rows: list[int]) -> None:
    for row in rows:
        exact = x[row].get().astype(np.float64)
        expected = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-5)
        assert abs(float(mean[row]) - exact.mean()) < 1e-6
        error = np.linalg.norm(y[row].get().astype(np.float64) - expected) / np.linalg.norm(expected)
        assert error < 2.0**-8


def _free() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def test_blocks_that_wait_for_each_other_on_several_streams() -> None:
    """Kernels whose blocks all run together, and count each other at the start, beside long kernels.

    If those of two streams ever had a part of the device each, this would not end.
    """
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { for (long long t = clock64(); clock64() - t < n;) {} }', "spin"
    )
    rng = np.random.default_rng(1)
    rows, weight = [gpu_data(seed, 40, 700_000) for seed in (2, 3)], gpu_data(4, 700_000)
    planes, scale = [gpu_data(seed, 64, 256, 56, 56) for seed in (5, 6)], gpu_data(7, 256)

    def by_rows() -> tuple[Any, ...]:
        y, mean, rstd = cunorm.layer_norm(rows[0], weight, weight, return_stats=True)
        return (y, *cunorm.layer_norm_backward(rows[1], rows[0], weight, mean, rstd))

    def by_channels() -> tuple[Any, ...]:
        y, mean, rstd = cunorm.batch_norm(planes[0], scale, scale, training=True, return_stats=True)
        return (y, *cunorm.batch_norm_backward(planes[1], planes[0], scale, mean, rstd))

    works = by_rows, by_channels
    expected = [[array.get() for array in work()] for work in works]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for _ in range(20):
        last = []
        for stream in streams:
            with stream:
                threads, cycles = int(rng.choice([64, 512, 1024])), int(rng.integers(10_000, 400_000))
                spin((int(rng.integers(1, 140)),), (threads,), (cycles,))
                which = int(rng.integers(2))
                last.append((which, works[1 - which](), works[which]()))
        for stream in streams:
            stream.synchronize()
        for which, _, results in last:
            for array, right in zip(results, expected[which], strict=True):
                np.testing.assert_array_equal(array.get(), right)


@pytest.mark.parametrize("shape", [(2**20 + 3, 2056), (34, 2**26 + 8)], ids=str)
def test_more_than_two_to_the_31_elements(shape: tuple[int, int]) -> None:
    import cupy

    x = cupy.empty(shape, dtype="float16")
    generator = cupy.random.default_rng(0)
    step = max(1, 2**27 // shape[1])
    for first in range(0, shape[0], step):
        part = x[first : first + step]
        part[...] = generator.standard_normal(part.shape, dtype="float32").astype("float16")
    y, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    _check_rows(x, y, mean, [0, 1, shape[0] // 2, shape[0] - 2, shape[0] - 1])
    dy = y  # the gradient along xhat is nothing but the eps in it
    dx, _, dbias = cunorm.layer_norm_backward(dy, x, None, mean, rstd)
    for row in (0, shape[0] // 2, shape[0] - 1):
        assert float(cupy.abs(dx[row].astype("float32")).max()) < 5e-3
    columns = [0, shape[1] // 2, shape[1] - 1]
    expected = [float(dy[:, column].astype("float64").sum()) for column in columns]
    np.testing.assert_allclose([float(dbias[column]) for column in columns], expected, rtol=2e-3, atol=0.1)
    del x, y, dx, dy
    _free()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-7), ("float16", 5e-4)])
@pytest.mark.parametrize("shape", [(10, 10_000_000), (6, 1_000_000), (37, 400_001), (100, 140_001)], ids=str)
def test_long_rows(shape: tuple[int, int], dtype: str, tolerance: float) -> None:
    """Held by all blocks together or read twice, and those of an odd number of columns, which begin anywhere."""
    import cupy

    x, weight, dy = (
        gpu_data(0, *shape, dtype=dtype),
        gpu_data(1, shape[1], dtype=dtype),
        gpu_data(2, *shape, dtype=dtype),
    )
    y, mean, rstd = cunorm.layer_norm(x, weight, weight, return_stats=True)
    dx, dweight, dbias = cunorm.layer_norm_backward(dy, x, weight, mean, rstd)

    def assert_near(array: Any, expected: Any) -> None:
        assert float(cupy.linalg.norm(array - expected) / cupy.linalg.norm(expected)) < tolerance

    xhat, dz = (
        (x.astype("float64") - x.mean(axis=1, dtype="float64", keepdims=True)) * rstd[:, None],
        dy.astype("float64"),
    )
    assert_near(y, xhat * weight + weight)
    assert_near(dweight, (dz * xhat).sum(0))
    assert_near(dbias, dz.sum(0))
    g = dz * weight
    assert_near(dx, rstd[:, None] * (g - g.mean(1, keepdims=True) - xhat * (g * xhat).mean(1, keepdims=True)))
    del x, y, dy, dx, xhat, dz, g
    _free()


def test_tens_of_millions_of_rows() -> None:
    x = gpu_data(0, 30_000_000, 10)
    y, mean, rstd = cunorm.layer_norm(x, return_stats=True)
    expected = (x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + 1e-5) ** 0.5
    assert float(abs(y - expected).max()) < 1e-4
    _, dweight, dbias = cunorm.layer_norm_backward(y, x, None, mean, rstd)
    np.testing.assert_allclose(dbias.get(), y.sum(0, dtype="float64").get(), rtol=1e-3, atol=2)
    np.testing.assert_allclose(dweight.get(), (y.astype("float64") ** 2).sum(0).get(), rtol=1e-4)
    del x, y, expected
    _free()


def test_subnormal_float32_are_zeros() -> None:
    """CuPy compiles with -ftz=true. What that means for a user is written in the README."""
    import cupy

    tiny = cupy.full((1, 64), 1e-40, dtype="float32")
    tiny[0, ::2] = 0
    y, mean, _ = cunorm.layer_norm(tiny, eps=1e-5, return_stats=True)
    assert not y.any() and not mean.any()
    # Sixteen-bit subnormals are ordinary float32 numbers and count.
    half = cupy.zeros((1, 64), dtype="float16")
    half[0, ::2] = 6e-8
    y = cunorm.layer_norm(half, eps=0.0)
    assert bool((abs(abs(y.astype("float32")) - 1) < 1e-2).all())


def test_nothing_is_synchronized_and_nothing_new_allocated() -> None:
    import cupy

    x, weight, dy = gpu_data(0, 512, 1000), gpu_data(1, 1000), gpu_data(2, 512, 1000)
    pool = cupy.get_default_memory_pool()
    for _ in range(3):
        everything(x, weight, dy)
    before = pool.total_bytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        everything(x, weight, dy)
        stream.synchronize()
        big = cupy.ones((8192, 8192), dtype="float32")
        allocated = pool.total_bytes()
        for _ in range(10):
            big.dot(big)
        for _ in range(20):
            everything(x, weight, dy)
        assert not stream.done, "the calls waited for the work ahead of them"
        assert pool.total_bytes() >= allocated >= before
    stream.synchronize()


# ---- Instance, group and batch norm.


CHANNEL_SHAPES = [(8, 64, 16, 16), (2, 32, 300, 301), (64, 96, 7, 7), (2, 6, 1000, 2000), (9, 96, 150, 200)]
# For plans with clusters, with many chunks, with slabs for all blocks, with those that stream, with more channels than
# a block takes, with slabs in a pipeline, and with channels that begin within vectors.
LARGER = [
    Shape("instance_norm", (2, 32, 24, 24, 24), "NCDHW"),
    Shape("instance_norm", (2, 24, 24, 24, 32), "NDHWC"),
    Shape("instance_norm", (2, 3, 1000, 301), "NCHW"),
    Shape("instance_norm", (2, 1000, 301, 3), "NHWC"),
    Shape("group_norm", (4, 320, 32, 32), "NCHW", 32),
    Shape("group_norm", (4, 32, 32, 320), "NHWC", 32),
    Shape("group_norm", (4, 64, 32, 32), "NCHW", 4),
    Shape("group_norm", (2, 320, 32, 32), "NCHW", 32, "other order"),
    Shape("group_norm", (40, 512, 7, 7), "NCHW", 32),
    Shape("group_norm", (9, 256, 14, 14), "NCHW", 32),
    Shape("group_norm", (3, 512, 33, 33), "NCHW", 32),
    Shape("instance_norm", (2, 3, 1000, 1001), "NCHW"),
    Shape("group_norm", (4, 64, 64, 320), "NHWC", 32),
    Shape("instance_norm", (2, 3, 99, 99, 99), "NCDHW"),
    Shape("batch_norm", (2, 32, 257, 257), "NCHW"),
    Shape("batch_norm", (16, 40, 112, 112), "NCHW"),
    Shape("batch_norm", (16, 40, 28, 28), "NCHW"),
    Shape("batch_norm", (16, 28, 28, 40), "NHWC"),
    Shape("batch_norm", (4, 2048, 7, 7), "NCHW"),
    Shape("batch_norm", (4, 7, 7, 2048), "NHWC"),
    Shape("batch_norm", (300, 72, 7, 7), "NCHW"),
    Shape("batch_norm", (700, 24, 13, 13), "NCHW"),
    Shape("batch_norm", (2, 600, 500, 24), "NHWC"),
    Shape("instance_norm", (3, 500, 700, 24), "NHWC"),
    Shape("instance_norm", (2, 3, 2000, 2000), "NCHW"),
    Shape("group_norm", (5, 250, 240, 64), "NHWC", 8),
    Shape("instance_norm", (9, 150, 200, 96), "NHWC"),
    Shape("group_norm", (4, 200, 200, 192), "NHWC", 32),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [*channel_cases.SHAPES, *LARGER], ids=str)
def test_channel_norms_equal_float64(shape: Shape, dtype: str) -> None:
    runner = channel_cases.CupyRunner()
    # Float16 does not hold the sums of so many outliers.
    channel_cases.check(runner, shape.case(dtype, parameter_dtype="float32" if shape in LARGER else None))
    channel_cases.check(runner, shape.case(dtype, parameter_dtype="float32", activation="silu"))
    if shape.name == "batch_norm":
        for training in (True, False):
            options: Any = {"running_dtype": "float32", "training": training}
            channel_cases.check(runner, shape.case(dtype, parameter_dtype="float32", **options))


def every_channel_norm(x: Any, weight: Any, dy: Any, data_format: str) -> tuple[Any, ...]:
    """The three norms with their gradients, of which the second has an activation, the third running statistics."""
    layout: Any = {"data_format": data_format}
    y, mean, rstd = cunorm.instance_norm(x, weight, weight, return_stats=True, **layout)
    results = [y, mean, rstd, *cunorm.instance_norm_backward(dy, x, weight, mean, rstd, **layout)]
    layout["activation"] = "silu"
    y, mean, rstd = cunorm.group_norm(x, 2, weight, weight, return_stats=True, **layout)
    results += [y, *cunorm.group_norm_backward(dy, x, 2, weight, mean, rstd, bias=weight, **layout)]
    running: Any = {"running_mean": 0 * weight, "running_var": 0 * weight + 1}
    y, mean, rstd = cunorm.batch_norm(x, weight, training=True, return_stats=True, **running, **layout)
    results += [y, *running.values()]
    results += cunorm.batch_norm_backward(dy, x, weight, mean, rstd, training=True, **layout)
    return tuple(results)


def in_format(shape: tuple[int, ...], data_format: str) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if data_format == "N...C" else shape


@pytest.mark.parametrize("data_format", ["NC...", "N...C"])
@pytest.mark.parametrize("shape", CHANNEL_SHAPES, ids=str)
def test_two_hundred_runs_of_channel_norms_give_the_same_bits(shape: tuple[int, ...], data_format: str) -> None:
    x, dy = (gpu_data(seed, *in_format(shape, data_format)) for seed in (0, 2))
    weight = gpu_data(1, shape[1])
    first = every_channel_norm(x, weight, dy, data_format)
    for _ in range(199):
        for result, expected in zip(every_channel_norm(x, weight, dy, data_format), first):
            assert bool((result == expected).all())


@pytest.mark.parametrize("data_format", ["NC...", "N...C"])
@pytest.mark.parametrize("shape", CHANNEL_SHAPES, ids=str)
def test_cupy_graph_capture_of_channel_norms(shape: tuple[int, ...], data_format: str) -> None:
    import cupy

    x, dy = (gpu_data(seed, *in_format(shape, data_format)) for seed in (0, 2))
    weight = gpu_data(1, shape[1])
    every_channel_norm(x, weight, dy, data_format)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        every_channel_norm(x, weight, dy, data_format)
        stream.synchronize()
        stream.begin_capture()
        captured = every_channel_norm(x, weight, dy, data_format)
        graph = stream.end_capture()
    x[...], dy[...] = (gpu_data(seed, *x.shape) for seed in (3, 4))
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for result, expected in zip(captured, every_channel_norm(x, weight, dy, data_format)):
        assert result.get().tobytes() == expected.get().tobytes()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", channel_cases.NAMES)
def test_torch_autograd_of_channel_norms(name: str, channels_last: bool) -> None:
    """Tensors of either memory format, as they are, with a gradient that comes in the other one."""
    import torch
    import torch.nn.functional as F

    formats = [torch.contiguous_format, torch.channels_last]
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(8, 64, 28, 30, device="cuda", generator=generator) for _ in range(2))
    x = x.contiguous(memory_format=formats[channels_last]).requires_grad_()
    dy = dy.contiguous(memory_format=formats[not channels_last])
    weight, bias = (torch.randn(64, device="cuda", generator=generator, requires_grad=True) for _ in range(2))
    options: Any = {"training": True} if name == "batch_norm" else {"num_groups": 8} if name == "group_norm" else {}
    y = getattr(cunorm, name)(x, weight=weight, bias=bias, **options)
    assert y.is_contiguous(memory_format=formats[channels_last])
    gradients = torch.autograd.grad(y, (x, weight, bias), dy)
    assert gradients[0].is_contiguous(memory_format=formats[channels_last])

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    if name == "group_norm":
        expected = F.group_norm(exact[0], 8, *exact[1:])
    elif name == "batch_norm":
        expected = F.batch_norm(exact[0], None, None, *exact[1:], training=True)
    else:
        expected = F.instance_norm(exact[0], weight=exact[1], bias=exact[2])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, exact, dy.double())):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("data_format", ["NC...", "N...C"])
def test_channel_norms_of_more_than_two_to_the_31_elements(data_format: str) -> None:
    import cupy

    shape = in_format((9, 32, 2**23 + 8), data_format)
    _free()
    if cupy.cuda.runtime.memGetInfo()[0] < 20e9:
        pytest.skip("needs an NVIDIA GPU with 20 GB to spare")
    x = cupy.empty(shape, dtype="float16")
    generator = cupy.random.default_rng(0)
    for sample in x:
        sample[...] = generator.standard_normal(sample.shape, dtype="float32").astype("float16")

    def part(array: Any, sample: int, group: int) -> Any:
        """Two channels of a sample in float64: those of one of sixteen groups."""
        channels = slice(2 * group, 2 * group + 2)
        return (array[sample, channels] if data_format == "NC..." else array[sample, :, channels].T).astype("float64")

    y, mean, rstd = cunorm.group_norm(x, 16, data_format=data_format, return_stats=True)
    dx, _, dbias = cunorm.group_norm_backward(y, x, 16, None, mean, rstd, data_format=data_format)
    for sample, group in ((0, 0), (0, 15), (4, 7), (8, 0), (8, 15)):
        exact = part(x, sample, group)
        assert abs(float(mean[sample, group]) - float(exact.mean())) < 1e-6
        expected = (exact - exact.mean()) / (exact.var() + 1e-5) ** 0.5
        error = cupy.linalg.norm(part(y, sample, group) - expected) / cupy.linalg.norm(expected)
        assert float(error) < 2.0**-11
        # The gradient along xhat is nothing but the eps in it.
        assert float(abs(part(dx, sample, group)).max()) < 5e-3
    sums = sum(part(y, sample, 15).sum(1) for sample in range(9))
    np.testing.assert_allclose(dbias[30:].get(), sums.get(), rtol=2e-3, atol=0.1)
    del y, dx

    running: Any = {"running_mean": gpu_data(1, 32), "running_var": abs(gpu_data(2, 32)) + 0.5}
    y = cunorm.batch_norm(x, training=False, data_format=data_format, **running)
    for sample, group in ((0, 0), (4, 7), (8, 15)):
        mean, var = (array[2 * group : 2 * group + 2, None].astype("float64") for array in running.values())
        expected = (part(x, sample, group) - mean) / (var + 1e-5) ** 0.5
        error = cupy.linalg.norm(part(y, sample, group) - expected) / cupy.linalg.norm(expected)
        assert float(error) < 2.0**-11
    del x, y
    _free()
