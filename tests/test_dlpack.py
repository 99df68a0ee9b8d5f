"""Arrays that are known by nothing but DLPack."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import channel_cases
import numpy as np
import pytest
from cases import NORM_TOLERANCE, Case, data, dtype_of, gelu_in_float64, relative_error

import cunorm
from cunorm import on_cpu, reference
from cunorm.problem import Norm

dlpack_adapter: Any = importlib.import_module("cunorm.adapters.dlpack")

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


class Bare:
    """The least an array can be. Bfloat16 is exported as NumPy and CuPy would if they could."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        bfloat16 = self.array.dtype.name == "bfloat16"
        return (dlpack_adapter._Bfloat16(self.array) if bfloat16 else self.array).__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Namespace:
    """An array library of the Python array API standard, of which one function matters."""

    @staticmethod
    def from_dlpack(array: Any) -> Standard:
        view = dlpack_adapter.DlpackAdapter(array).view(array, "array")
        assert view.device[0] == "cpu"
        copy = on_cpu.as_numpy(view.pointer, view.shape, view.strides, view.dtype).copy()
        return Standard(copy)


class Standard(Bare):
    def __array_namespace__(self) -> Any:
        return Namespace


def on(device: str, array: Any) -> Any:
    if device == "cpu" or array is None:
        return array
    import cupy

    return cupy.asarray(array)


def to_numpy(array: Any) -> Any:
    array = getattr(array, "array", array)
    return array if isinstance(array, np.ndarray) else array.get()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
def test_values_and_gradients(device: str, dtype: str, affine: str) -> None:
    x, dy = data(1, (4, 3, 32), dtype), data(4, (4, 3, 32), dtype)
    weight = data(2, (32,), dtype) if affine in ("weight", "both") else None
    bias = data(3, (32,), dtype) if affine in ("bias", "both") else None
    expected = Case(x, weight, bias, eps=1e-5).expected()
    given = [None if array is None else Bare(on(device, array)) for array in (x, weight, bias)]
    y, mean, rstd = cunorm.layer_norm(*given, return_stats=True)
    assert type(y) is type(on(device, x)) and y.dtype == dtype_of(dtype)
    assert relative_error(to_numpy(y), expected.y) <= NORM_TOLERANCE[dtype]
    np.testing.assert_allclose(to_numpy(mean), expected.mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_numpy(rstd), expected.rstd, rtol=1e-5)
    results = cunorm.layer_norm_backward(Bare(on(device, dy)), given[0], given[1], mean, rstd)
    arrays: Any = [None if a is None else a.astype(np.float64) for a in (dy, x, weight, to_numpy(mean), to_numpy(rstd))]
    for result, value in zip(results, reference.row_norm_backward(*arrays, axis=(2,))):
        assert result.dtype == dtype_of(dtype)
        assert relative_error(to_numpy(result), value) <= NORM_TOLERANCE[dtype]
    assert to_numpy(given[0]).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
def test_results_belong_to_the_arrays_namespace(dtype: str) -> None:
    x, weight = data(1, (4, 32), dtype), data(2, (32,), dtype)
    results = cunorm.layer_norm(Standard(x), Standard(weight), return_stats=True)
    for result, value in zip(results, cunorm.layer_norm(x, weight, return_stats=True)):
        assert type(result) is Standard
        np.testing.assert_array_equal(result.array, value)
    gradients = cunorm.layer_norm_backward(Standard(x), Standard(x), Standard(weight), *results[1:])
    assert [type(gradient) for gradient in gradients] == [Standard] * 3
    assert gradients[0].array.dtype == x.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_with_residual_and_activation(device: str) -> None:
    norm = Norm(False, 1.0, "silu")
    x, residual, dy, added = (data(seed, (4, 3, 32)) for seed in (1, 2, 3, 4))
    weight, bias = data(5, (32,)), data(6, (32,))
    case = Case(x, weight, bias, norm=norm, residual=residual, eps=1e-6)
    expected = case.expected()
    given = {name: Bare(on(device, a)) for name, a in (("x", x), ("weight", weight), ("bias", bias))}
    options: Any = {"weight_offset": 1.0, "activation": "silu"}
    y, residual_out, rstd = cunorm.rms_norm(**given, residual=Bare(on(device, residual)), return_stats=True, **options)
    np.testing.assert_array_equal(to_numpy(residual_out), x + residual)
    assert relative_error(to_numpy(y), expected.y, expected.z) <= NORM_TOLERANCE["float32"]
    results = cunorm.rms_norm_backward(
        Bare(on(device, dy)),
        Bare(residual_out),
        given["weight"],
        rstd,
        bias=given["bias"],
        dresidual_out=Bare(on(device, added)),
        output_mask=(True, True, True),
        **options,
    )
    for result, value in zip(results, case.expected_gradients(dy, added)):
        assert relative_error(to_numpy(result), value) <= 2 * NORM_TOLERANCE["float32"]


def test_the_sum_belongs_to_the_arrays_namespace() -> None:
    x = data(1, (4, 32))
    _, residual_out = cunorm.layer_norm(Standard(x), residual=Standard(x))
    assert type(residual_out) is Standard
    np.testing.assert_array_equal(residual_out.array, x + x)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_out_and_read_only(device: str) -> None:
    array = data(1, (8, 6, 10))
    expected = cunorm.layer_norm(array.transpose(2, 0, 1)[::2, :, ::-1], axis=(0, 2))
    array.flags.writeable = False
    view = on(device, array).transpose(2, 0, 1)[::2, :, ::-1]
    out = Bare(on(device, np.zeros((5, 8, 6), np.float32)))
    assert cunorm.layer_norm(Versioned(view), axis=(0, 2), out=out) is out
    np.testing.assert_allclose(to_numpy(out), expected, rtol=1e-5, atol=1e-5)


class Versioned(Bare):
    """Speaks DLPack 1.0, which can say that memory is read-only."""

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__(stream=stream, max_version=max_version)


def test_nothing_is_copied_and_exports_live_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Temporary(Bare):
        """What it exports lives as long as the export."""

        def __dlpack__(self, *, stream: Any = None) -> Any:
            temporary = self.array.copy()
            pointers.append(temporary.ctypes.data)
            alive.append(weakref.ref(temporary))
            return temporary.__dlpack__()

    pointers: list[int] = []
    alive: list[Any] = []
    row_norm = reference.row_norm

    def checked(x: Any, weight: Any, *rest: Any, **options: Any) -> Any:
        gc.collect()
        assert all(reference() is not None for reference in alive)
        assert [x.ctypes.data, weight.ctypes.data] == pointers
        return row_norm(x, weight, *rest, **options)

    monkeypatch.setattr(reference, "row_norm", checked)
    x, weight = data(1, (4, 48)), data(2, (48,))
    y = cunorm.layer_norm(Temporary(x), Temporary(weight))
    assert len(alive) == 2
    gc.collect()
    assert all(reference() is None for reference in alive)
    monkeypatch.undo()
    np.testing.assert_array_equal(y, cunorm.layer_norm(x, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=str)
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    y, mean, _ = cunorm.layer_norm(Bare(on(device, np.ones(shape, np.float32))), return_stats=True)
    assert y.shape == shape and mean.shape == shape[:-1]


def test_errors() -> None:
    x, eight = Bare(np.ones((2, 8), np.float32)), np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\)"):
        cunorm.layer_norm(x, Bare(np.ones(7, np.float32)))
    with pytest.raises(TypeError, match="weight is an ndarray; beside a Bare x it must be an array of the same lib"):
        cunorm.layer_norm(x, eight)
    with pytest.raises(TypeError, match="of the same library; layer_norm and rms_norm have no normalized_shape: see "):
        cunorm.layer_norm(x, (8,))
    with pytest.raises(TypeError, match="bias is a float"):
        cunorm.layer_norm(x, None, 1.0)
    with pytest.raises(TypeError, match="x has dtype int64"):
        cunorm.layer_norm(Bare(np.ones((2, 8), np.int64)))
    eight.flags.writeable = False
    with pytest.raises(ValueError, match="out cannot be exported through DLPack"):
        cunorm.layer_norm(Bare(np.ones(8, np.float32)), out=Versioned(eight))

    class Elsewhere(Bare):
        def __dlpack_device__(self) -> Any:
            return (8, 0)  # Metal

    with pytest.raises(RuntimeError, match="x is on a device of DLPack's type 8"):
        cunorm.layer_norm(Elsewhere(eight))


@pytest.mark.gpu
def test_streams_and_lifetimes_on_a_gpu() -> None:
    """The producer is told CuPy's current stream, and its export outlives the kernels."""
    import cupy

    x = Bare(cupy.asarray(data(1, (4, 64))))
    expected = cunorm.layer_norm(x.array)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cunorm.layer_norm(x)
    stream.synchronize()
    assert x.streams == [stream.ptr]
    cupy.testing.assert_array_equal(y, expected)
    cunorm.layer_norm(x)
    assert x.streams[1] == 1, "the legacy default stream has the number 1 in DLPack"
    cupy.cuda.Device().synchronize()
    cunorm.layer_norm(x)
    cupy.cuda.Device().synchronize()
    assert len(dlpack_adapter._in_use) <= 1


@pytest.mark.gpu
def test_arrays_on_different_devices() -> None:
    import cupy

    with pytest.raises(RuntimeError, match="weight is on the CPU and x on CUDA device 0"):
        cunorm.layer_norm(Bare(cupy.ones((2, 8), np.float32)), Bare(np.ones(8, np.float32)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(device: str, dtype: str, approximate: str) -> None:
    x, bias, dy = data(1, (4, 3, 32), dtype), data(2, (32,), dtype, outliers=False), data(3, (4, 3, 32), dtype)
    expected = gelu_in_float64(x, bias, dy, approximate)
    given = [Bare(on(device, array)) for array in (x, bias, dy)]
    y = cunorm.gelu(given[0], approximate=approximate, bias=given[1])
    gradients = cunorm.gelu_backward(given[2], given[0], approximate=approximate, bias=given[1])
    for result, value in zip((y, *gradients), expected):
        assert result.dtype == dtype_of(dtype)
        assert relative_error(to_numpy(result), value) <= NORM_TOLERANCE[dtype]
    plain = cunorm.gelu_backward(given[2], given[0])
    assert to_numpy(plain).shape == x.shape and to_numpy(given[0]).tobytes() == x.tobytes()
    standard = [Standard(array) for array in (x, bias)]
    assert type(cunorm.gelu(standard[0], bias=standard[1])) is Standard


# ---- Instance, group and batch norm, on the CPU.


@pytest.mark.parametrize("dtype", list(NORM_TOLERANCE))
@pytest.mark.parametrize("layout", ["contiguous", "other order"])
@pytest.mark.parametrize("name", channel_cases.NAMES)
def test_channel_norms(name: str, layout: str, dtype: str) -> None:
    shape = channel_cases.Shape(name, (3, 6, 4, 5), "NCHW", 2 if name == "group_norm" else None, layout)
    case = shape.case(dtype, activation="silu")
    given: Any = {place: Bare(array) for place, array in case.tensors.items()}
    y, mean, rstd = getattr(cunorm, name)(**given, **case.options, return_stats=True)
    assert y.strides == case.x.strides
    channel_cases.assert_forward(case, channel_cases.Results(y, mean, rstd))
    dy = data(4, case.x.shape, dtype)
    backward = getattr(cunorm, f"{name}_backward")
    gradients = backward(Bare(dy), **given, mean=mean, rstd=rstd, **case.options)
    channel_cases.assert_gradients(case, gradients, dy)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(training: bool) -> None:
    shape = channel_cases.Shape("batch_norm", (3, 6, 4, 5))
    case = shape.case("float32", running_dtype="float32", training=training)
    assert case.running is not None
    running = [Bare(case.running.mean.copy()), Bare(case.running.var.copy())]
    statistics = {"running_mean": running[0], "running_var": running[1]}
    given: Any = {place: Bare(array) for place, array in case.tensors.items()}
    results = cunorm.batch_norm(**given, **statistics, training=training, return_stats=True)
    channel_cases.assert_forward(case, channel_cases.Results(*results, *(item.array for item in running)))


def test_running_statistics_that_are_read_only() -> None:
    """They may be, in evaluation."""
    x, mean, var = data(1, (3, 6, 4)), np.zeros(6, np.float32), np.ones(6, np.float32)
    expected = cunorm.batch_norm(x, running_mean=mean, running_var=var, training=False)
    mean.flags.writeable = False
    given: Any = {"running_mean": Versioned(mean), "running_var": Versioned(var)}
    np.testing.assert_array_equal(cunorm.batch_norm(Versioned(x), **given, training=False), expected)
    with pytest.raises(ValueError, match="running_mean cannot be exported through DLPack"):
        cunorm.batch_norm(Versioned(x), **given, training=True)
    assert not mean.any() and (var == 1).all()


def test_batch_norm_stats() -> None:
    x = data(1, (3, 6, 4))
    expected = cunorm.batch_norm_stats(x)
    for result, value in zip(cunorm.batch_norm_stats(Bare(x)), expected):
        np.testing.assert_array_equal(result, value)
    assert [type(result) for result in cunorm.batch_norm_stats(Standard(x))] == [Standard] * 2
