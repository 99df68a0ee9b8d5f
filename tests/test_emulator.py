"""The promises of ``cunorm.emulator``, one by one; what it finds wrong with a kernel is in test_emulator_finds.py.

Each kernel here is as short as the promise allows.
"""

from __future__ import annotations

import errno
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator_cases import NEEDS_COMPILER, launch, report, x_and_y

from cunorm.emulator import EmulatorError, HostCompileError, Pointer, Watch, Writer

pytestmark = NEEDS_COMPILER


# ---- Right results ---------------------------------------------------------------------------------------------------


def test_saxpy_with_a_ragged_tail() -> None:
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, dtype=np.float32)
    body = """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < arguments.n) arguments.y[i] += static_cast<float>(arguments.a) * arguments.x[i];"""
    launch(body, [x, y], [1000, 0.5], arguments="const float* x; float* y; long long n; double a;", grid=8, block=128)
    np.testing.assert_array_equal(y, 1 + 0.5 * x)


def test_libraries_that_are_loaded_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind them the address sanitizer would not start."""
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    test_saxpy_with_a_ragged_tail()


def test_indices_in_three_dimensions() -> None:
    grid, block = (2, 3, 4), (5, 2, 3)
    out = np.zeros((4, 3, 2, 3, 2, 5), dtype=np.int64)
    body = """
    const long long b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const long long t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    arguments.out[b * blockDim.x * blockDim.y * blockDim.z + t] += b * 1000 + t;"""
    launch(body, [out], arguments="long long* out;", grid=grid, block=block)
    np.testing.assert_array_equal(out.reshape(24, 30), np.arange(24)[:, None] * 1000 + np.arange(30))


def test_fields_are_pointers_with_offsets_numbers_nulls_and_arrays() -> None:
    x, out = np.arange(9, dtype=np.int16), np.zeros(6, dtype=np.float64)
    body = """
    arguments.out[0] = *arguments.x; arguments.out[1] = arguments.nothing == nullptr;
    arguments.out[2] = arguments.negative; arguments.out[3] = arguments.sizes[0]; arguments.out[4] = arguments.sizes[1];
    arguments.out[5] = arguments.eps;"""
    declared = "const short* x; double* out; char* nothing; long long negative; long long sizes[2]; double eps;"
    fields = [None, -7, 2**40, 3, 1e-5]
    launch(body, [x, out], fields, arguments=declared, pointers=[Pointer(0, 6), Pointer(1)], block=1)
    assert out.tolist() == [3, 1, -7, 2**40, 3, 1e-5]


@pytest.mark.parametrize("seed", range(4))
def test_warp_reduction(seed: int) -> None:
    x, y = np.arange(96, dtype=np.float32), np.zeros(96, dtype=np.float32)
    body = """
    float sum = arguments.x[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    arguments.y[threadIdx.x] = sum;"""
    launch(body, [x, y], [96], block=96, seed=seed)
    np.testing.assert_array_equal(y, np.repeat(x.reshape(3, 32).sum(axis=1), 32))


@pytest.mark.parametrize("seed", range(4))
def test_block_reduction_through_shared_memory(seed: int) -> None:
    x, y = np.arange(2 * 128, dtype=np.float64), np.zeros(2, dtype=np.float64)
    body = """
    __shared__ alignas(16) double partial[4];
    double sum = arguments.x[blockIdx.x * 128 + threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) arguments.y[blockIdx.x] = partial[0] + partial[1] + partial[2] + partial[3];"""
    launch(body, [x, y], [0], arguments="const double* x; double* y; long long n;", grid=2, block=128, seed=seed)
    np.testing.assert_array_equal(y, x.reshape(2, 128).sum(axis=1))


def test_shuffles_within_segments() -> None:
    """The reference is the description of shfl in the PTX manual, lane by lane."""
    out = np.zeros((4, 32), dtype=np.int32)
    body = """
    const int lane = threadIdx.x;
    arguments.out[lane] = __shfl_sync(0xffffffffu, lane, 11, 8);
    arguments.out[32 + lane] = __shfl_up_sync(0xffffffffu, lane, 3, 8);
    arguments.out[64 + lane] = __shfl_down_sync(0xffffffffu, lane, 3, 8);
    arguments.out[96 + lane] = __shfl_xor_sync(0xffffffffu, lane, 9, 8);"""
    launch(body, [out], arguments="int* out;")
    for lane in range(32):
        first, last = lane & ~7, lane | 7
        expected = [
            first + (11 & 7),
            lane - 3 if lane - 3 >= first else lane,
            lane + 3 if lane + 3 <= last else lane,
            lane ^ 9 if lane ^ 9 <= last else lane,
        ]
        assert out[:, lane].tolist() == expected


def test_votes_reductions_and_block_wide_predicates() -> None:
    out = np.zeros((10, 64), dtype=np.int64)
    body = """
    const int lane = threadIdx.x % 32, value = lane - 5;
    long long results[10] = {
        __ballot_sync(0xffffffffu, lane % 3 == 0), __any_sync(0xffffffffu, lane == 7),
        __all_sync(0xffffffffu, lane < 31),
        __reduce_add_sync(0xffffffffu, value), __reduce_min_sync(0xffffffffu, value),
        __reduce_max_sync(0xffffffffu, static_cast<unsigned>(value)), __activemask(),
        __syncthreads_count(threadIdx.x > 40), __syncthreads_or(threadIdx.x == 3), __syncthreads_and(threadIdx.x != 3)};
    for (int i = 0; i < 10; ++i) arguments.out[64 * i + threadIdx.x] = results[i];"""
    launch(body, [out], arguments="long long* out;", block=64)
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    expected = [ballot, 1, 0, sum(range(-5, 27)), -5, 2**32 - 1, 2**32 - 1, 23, 1, 0]
    np.testing.assert_array_equal(out, np.repeat(np.array(expected), 64).reshape(10, 64))


def test_a_part_of_a_warp_is_enough_for_its_own_mask() -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, dtype=np.float32)
    body = """
    const unsigned mask = threadIdx.x < 8 ? 0x000000ffu : 0xffffff00u;
    if (threadIdx.x < 8) arguments.y[threadIdx.x] = __shfl_xor_sync(mask, arguments.x[threadIdx.x], 1);
    __syncwarp();"""
    launch(body, [x, y], [0])
    assert y.tolist() == [1, 0, 3, 2, 5, 4, 7, 6] + [0] * 24


def test_atomics_of_blocks_and_threads_add_up() -> None:
    total, kept = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int32)
    body = "atomicAdd(arguments.total, 1.0f); atomicMax(arguments.kept, static_cast<int>(threadIdx.x));"
    launch(body, [total, kept], arguments="float* total; int* kept;", grid=3, block=40)
    assert (total[0], kept[0]) == (120, 39)


def test_vector_types_and_cached_access() -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    body = """
    const int i = threadIdx.x;
    const float4 v = __ldcs(reinterpret_cast<const float4*>(arguments.x) + i);
    __stcs(reinterpret_cast<float4*>(arguments.y) + i, make_float4(v.w, v.z, v.y, v.x));"""
    launch(body, [x, y], [0], block=16)
    np.testing.assert_array_equal(y, x.reshape(16, 4)[:, ::-1].ravel())


def test_reciprocal_square_root_is_correctly_rounded() -> None:
    random = np.random.default_rng(0)
    x = np.abs(random.integers(1, 0x7F800000, 20000, dtype=np.int32)).view(np.float32)
    y = np.zeros_like(x)
    body = "for (int i = threadIdx.x; i < arguments.n; i += 32) arguments.y[i] = __frsqrt_rn(arguments.x[i]);"
    launch(body, [x, y], [x.size])
    np.testing.assert_array_equal(y, (1 / np.sqrt(x.astype(np.longdouble))).astype(np.float32))


def test_launch_order_follows_the_seed() -> None:
    def order(seed: int) -> list[int]:
        out = np.zeros(13, dtype=np.int32)
        body = "if (threadIdx.x == 0) arguments.out[1 + atomicAdd(arguments.out, 1)] = blockIdx.x;"
        launch(body, [out], arguments="int* out;", grid=12, seed=seed)
        return [int(index) for index in out[1:]]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(12))


def test_a_cluster_reads_the_shared_memory_of_its_blocks() -> None:
    out = np.zeros(8, dtype=np.float32)
    body = """
    __shared__ float own;
    extern __shared__ float dynamic[];
    if (threadIdx.x == 0) { own = blockIdx.x; dynamic[1] = 10 * blockIdx.x; }
    cunorm_emulator::cluster_arrive({"", 1});
    cunorm_emulator::cluster_wait({"", 1});
    const unsigned other = (cunorm_emulator::cluster_rank() + 1) % cunorm_emulator::cluster_blocks();
    const float near = *static_cast<float*>(cunorm_emulator::cluster_map(&own, other, {"", 1}));
    const float far = *static_cast<float*>(cunorm_emulator::cluster_map(dynamic + 1, other, {"", 1}));
    if (threadIdx.x == 0) arguments.out[blockIdx.x] = near + far;
    cunorm_emulator::cluster_arrive({"", 1});
    cunorm_emulator::cluster_wait({"", 1});"""
    launch(body, [out], arguments="float* out;", grid=8, cluster=4, shared_bytes=8)
    assert out.tolist() == [11, 22, 33, 0, 55, 66, 77, 44]


def test_the_shared_memory_of_an_exited_block_is_gone() -> None:
    body = """
    __shared__ float own;
    own = 1;
    cunorm_emulator::cluster_arrive({"", 1});
    cunorm_emulator::cluster_wait({"", 1});
    const unsigned other = 1 - cunorm_emulator::cluster_rank();
    const float* address = static_cast<float*>(cunorm_emulator::cluster_map(&own, other, {"", 1}));
    __nanosleep(1);
    arguments.out[blockIdx.x] = *address;"""
    messages = []
    for seed in range(8):
        try:
            out = np.zeros(2, dtype=np.float32)
            launch(body, [out], arguments="float* out;", grid=2, block=1, cluster=2, seed=seed)
        except EmulatorError as error:
            messages.append(str(error))
    assert messages
    assert all("heap-use-after-free" in message or "has exited" in message for message in messages)


def test_a_cooperative_grid_can_wait_for_all_its_blocks() -> None:
    count, out = np.zeros(1, dtype=np.int32), np.zeros(4, dtype=np.int32)
    body = """
    if (threadIdx.x == 0) {
      atomicAdd(arguments.count, 1);
      while (atomicAdd(arguments.count, 0) < 4) __nanosleep(10);
      arguments.out[blockIdx.x] = *arguments.count;
    }"""
    launch(body, [count, out], arguments="int* count; int* out;", grid=4, cooperative=True)
    assert out.tolist() == [4, 4, 4, 4]


def test_blocks_wait_for_all_others_in_a_cooperative_launch_alone() -> None:
    body = """
    if (threadIdx.x == 0) {
      arguments.count[blockIdx.x] = 1;
      cunorm_emulator::arrive_at_grid();
    }
    cunorm_emulator::wait_for_grid();
    for (int i = 0; i < gridDim.x; ++i) arguments.out[blockIdx.x * blockDim.x + threadIdx.x] += arguments.count[i];"""
    for seed in range(3):
        count, out = np.zeros(4, np.int32), np.zeros(128, np.int32)
        launch(body, [count, out], arguments="int* count; int* out;", grid=4, seed=seed, cooperative=True)
        assert (out == 4).all()
        with pytest.raises(EmulatorError, match="blocks wait for each other in a launch that is not cooperative"):
            launch(body, [count, out], arguments="int* count; int* out;", grid=4, seed=seed)


def test_printf_reaches_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    launch('printf("block %d\\n", blockIdx.x);', [], arguments="long long n;", values=[0], block=1)
    assert capsys.readouterr().out == "block 0\n"


# ---- Sixteen-bit floats ----------------------------------------------------------------------------------------------

SMALL = [
    pytest.param(np.float16, "__half", "__half2float", "__float2half_rn", "__double2half", id="fp16"),
    pytest.param(
        ml_dtypes.bfloat16, "__nv_bfloat16", "__bfloat162float", "__float2bfloat16_rn", "__double2bfloat16", id="bf16"
    ),
]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):  # some platforms signal when a NaN is converted
        nan = np.isnan(expected.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(actual.astype(np.float64)), nan)
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize(("dtype", "name", "widen", "narrow", "narrow_double"), SMALL)
def test_widening_of_every_pattern(dtype: Any, name: str, widen: str, narrow: str, narrow_double: str) -> None:
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    y = np.zeros(65536, dtype=np.float32)
    back = np.zeros(65536, dtype=dtype)
    body = f"""
    for (int i = threadIdx.x; i < 65536; i += 32) {{
      arguments.y[i] = {widen}(arguments.x[i]);
      arguments.back[i] = {narrow}(arguments.y[i]);
    }}"""
    launch(body, [x, y, back], arguments=f"const {name}* x; float* y; {name}* back;")
    assert_same_bits(y, x.astype(np.float32))
    assert_same_bits(back, x)


@pytest.mark.parametrize(("dtype", "name", "widen", "narrow", "narrow_double"), SMALL)
def test_narrowing_of_floats(dtype: Any, name: str, widen: str, narrow: str, narrow_double: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    random = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        halfway = (every[:-1] + every[1:]) / 2  # of neighbours: ties, and one float to either side of each
    x = np.concatenate(
        [
            *(halfway, np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(-np.inf))),
            random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32),
            random.standard_normal(100_000).astype(np.float32) * np.float32(1e-6),
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.99, 65520, 3.4e38, 1e-45], dtype=np.float32),
        ]
    )
    y = np.zeros(x.size, dtype=dtype)
    body = f"for (int i = threadIdx.x; i < arguments.n; i += 32) arguments.y[i] = {narrow}(arguments.x[i]);"
    launch(body, [x, y], [x.size], arguments=f"const float* x; {name}* y; long long n;")
    with np.errstate(all="ignore"):
        assert_same_bits(y, x.astype(dtype))


@pytest.mark.parametrize(("dtype", "name", "widen", "narrow", "narrow_double"), SMALL)
def test_narrowing_of_doubles_rounds_once(dtype: Any, name: str, widen: str, narrow: str, narrow_double: str) -> None:
    every = np.arange(0x7F00 if dtype is not np.float16 else 0x7BFF, dtype=np.uint16).view(dtype).astype(np.float64)
    halfway = (every[:-1] + every[1:]) / 2
    above, below = halfway * (1 + 1e-15), halfway * (1 - 1e-15)  # through float they would look like ties
    x = np.concatenate([halfway, above, below])
    y = np.zeros(x.size, dtype=dtype)
    body = f"for (int i = threadIdx.x; i < arguments.n; i += 32) arguments.y[i] = {narrow_double}(arguments.x[i]);"
    launch(body, [x, y], [x.size], arguments=f"const double* x; {name}* y; long long n;")
    even = np.where(np.arange(every.size - 1) % 2 == 0, every[:-1], every[1:])
    assert_same_bits(y, np.concatenate([even, every[1:], every[:-1]]).astype(dtype))


@pytest.mark.parametrize(("dtype", "name", "widen", "narrow", "narrow_double"), SMALL)
def test_operators(dtype: Any, name: str, widen: str, narrow: str, narrow_double: str) -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 1000)).astype(np.float32).astype(dtype)
    y = np.zeros((5, 1000), dtype=dtype)
    body = f"""
    for (int i = threadIdx.x; i < 1000; i += 32) {{
      const {name} a = arguments.a[i], b = arguments.b[i];
      {name} sum = a;
      sum += b;
      const {name} results[5] = {{a * b, a / b, sum, -a, a < b ? a : b}};
      for (int j = 0; j < 5; ++j) arguments.y[1000 * j + i] = results[j];
    }}"""
    launch(body, [a, b, y], arguments=f"const {name}* a; const {name}* b; {name}* y;")
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    expected = [wide_a * wide_b, wide_a / wide_b, wide_a + wide_b, -wide_a, np.minimum(wide_a, wide_b)]
    assert_same_bits(y, np.array(expected).astype(dtype))


# ---- Who wrote it ----------------------------------------------------------------------------------------------------

STORE = "const int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < arguments.n) arguments.y[i] = i + 1;"


def writer(body: str, element: int, **options: Any) -> Writer | None:
    """Who wrote an element of y."""
    x, y = x_and_y(100)
    return launch(body, [x, y], [100], watch=Watch(1, 4 * element, 4), **options)


@pytest.mark.parametrize(("element", "block", "thread"), [(0, 0, 0), (31, 0, 31), (70, 2, 6)])
def test_the_writer_of_an_element(element: int, block: int, thread: int) -> None:
    found = writer(STORE, element, grid=4)
    assert found == Writer((block, 0, 0), (thread, 0, 0))
    assert str(found) == f"block ({block}, 0, 0), thread ({thread}, 0, 0)"


def test_an_element_that_nobody_wrote() -> None:
    assert writer("if (threadIdx.x != 5) arguments.y[threadIdx.x] = 1;", 5) is None
    assert launch(STORE, x_and_y(100), [100], grid=4) is None


@pytest.mark.parametrize("seed", range(4))
def test_the_last_of_several_writers(seed: int) -> None:
    """Between barriers, and as the last that the thread does."""
    body = "for (int t = 0; t < 40; ++t) { if (threadIdx.x == 40 - t) arguments.y[3] = t + 1; __syncthreads(); }"
    assert writer(body, 3, block=64, seed=seed) == Writer((0, 0, 0), (1, 0, 0))


@pytest.mark.parametrize("watch", [Watch(2, 0, 4), Watch(1, 400, 4), Watch(-1, 0, 4), Watch(0, -4, 4)])
def test_what_cannot_be_watched(watch: Watch) -> None:
    with pytest.raises(ValueError, match=r"watch is .*; it must lie in one of the 2 buffers"):
        launch(STORE, x_and_y(100), [100], watch=watch)


# ---- Everything else -------------------------------------------------------------------------------------------------


def test_undefined_arithmetic() -> None:
    body = "int i = 0x7fffffff;\ni += static_cast<int>(arguments.n);\narguments.y[0] = i;"
    message = report(body, x_and_y(1), [1])
    assert "signed integer overflow" in message
    assert "kernels/example.cu:2" in message
    message = report("\narguments.y[0] = 1 << arguments.n;", x_and_y(1), [32])
    assert "shift exponent 32" in message
    assert "block (0, 0, 0), thread (" in message
    assert "kernels/example.cu:2" in message


def test_assertions_and_traps() -> None:
    message = report("\nassert(threadIdx.x != 7);", [], [0], arguments="long long n;")
    assert "assertion failed: threadIdx.x != 7, block (0, 0, 0), thread (7, 0, 0), kernels/example.cu:2" in message
    assert "__trap()" in report("if (threadIdx.x == 1) __trap();", [], [0], arguments="long long n;")


@pytest.mark.parametrize("body", ["\nvolatile int i = 0; while (i == 0);", "\nwhile (true) __nanosleep(1);"])
def test_a_loop_without_end_is_stopped(body: str) -> None:
    message = report(body, [], [0], arguments="long long n;", block=1, timeout=0.5)
    assert "still running after 0.5 s, block (0, 0, 0), thread (0, 0, 0), kernels/example.cu:2" in message


def test_a_compile_error_names_the_line_of_the_kernel() -> None:
    with pytest.raises(HostCompileError, match=r"kernels/example\.cu:2:\d+: error: .*nonsense"):
        launch("\nnonsense();", [], [0], arguments="long long n;")


def test_a_shared_declaration_that_cannot_be_rewritten_does_not_compile() -> None:
    with pytest.raises(HostCompileError, match="a_shared_declaration_must_be_on_one_line_and_declare_one_variable"):
        launch("__shared__ float a[2], b;", [], [0], arguments="long long n;")


def test_the_number_of_fields_is_checked() -> None:
    with pytest.raises(EmulatorError, match="struct Arguments has 16 bytes, but 1 fields"):
        launch("", [], [0], arguments="long long n; double a;")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs Linux and g\+\+ .* for tests and for those who write kernels"):
        launch("", [], [0], arguments="long long n;")


@pytest.mark.parametrize("folder", ["file", "proc"])
def test_without_a_folder_to_write_to(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "file" if folder == "file" else "/proc/cunorm"))
    with pytest.raises(RuntimeError, match=r"cannot be kept in .*: .*; set CUNORM_CACHE_DIR to a folder"):
        launch("", [], [0], arguments="long long n;")


def test_a_folder_that_is_there_but_not_to_write_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(**options: Any) -> None:  # root may write anywhere
        raise PermissionError(errno.EACCES, "Permission denied", str(options["dir"]))

    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(RuntimeError, match=r"cannot be kept in .*: Permission denied; set CUNORM_CACHE_DIR"):
        launch("", [], [0], arguments="long long n;")


def test_an_executable_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    for constant in (1, 1, 2):
        launch(f"(void){constant};", [], [0], arguments="long long n;")
    folder = tmp_path / "emulator"
    assert len(list(folder.glob("runtime-*"))) == 1
    assert len(list(folder.glob("example-*"))) == 2
    assert len(list(folder.iterdir())) == 3


def test_what_another_user_has_kept_is_used_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: Any, **__: Any) -> None:  # root may do all that
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    launch("", [], [0], arguments="long long n;")
    for path in (tmp_path / "emulator").iterdir():
        os.utime(path, (0, 0))
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    for body in ("", "(void)1;"):
        launch(body, [], [0], arguments="long long n;")
    assert len(list((tmp_path / "emulator").iterdir())) == 3


def test_one_executable_may_be_built_by_many_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda seed: launch("", [], [0], arguments="long long n;", seed=seed), range(4)):
            pass
    assert len(list((tmp_path / "emulator").iterdir())) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": 0},
        {"block": 1025},
        {"block": (1, 1, 65)},
        {"shared_bytes": -1},
        {"grid": 3, "cluster": 2},
        {"timeout": 0},
    ],
)
def test_launches_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="it must"):
        launch("", [], [0], arguments="long long n;", **wrong)  # type: ignore[arg-type]


def test_buffers_must_be_contiguous_and_apart() -> None:
    x = np.zeros(64, dtype=np.float32)
    with pytest.raises(ValueError, match="must be C-contiguous"):
        launch("", [x[::2]], [0], arguments="float* x; long long n;")
    with pytest.raises(ValueError, match="buffer 1 overlaps"):
        launch("", [x, x[32:]], [0])


ASYNC = """
__shared__ float stage[32];
cunorm_emulator::copy_async(stage + threadIdx.x, arguments.x + threadIdx.x, 4);
{wait}
arguments.y[threadIdx.x] = stage[threadIdx.x];
{end}
"""


def test_asynchronous_copies_arrive_when_they_are_waited_for() -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    wait = "cunorm_emulator::copy_async_commit(); cunorm_emulator::copy_async_wait(0);"
    launch(ASYNC.format(wait=wait, end=""), [x, y], [32])
    np.testing.assert_array_equal(y, x)
    launch(ASYNC.format(wait="", end=wait), [x, y], [32])
    assert np.isnan(y).all(), "they were read before"


# Each thread reads its number, and copies another to where the thread behind it reads; both wait before, or only after.
OVER_OTHERS = """
__shared__ float stage[33];
stage[threadIdx.x] = arguments.x[threadIdx.x];
__syncthreads();
arguments.y[threadIdx.x] = stage[threadIdx.x];
{between}
cunorm_emulator::copy_async(stage + threadIdx.x + 1, arguments.x, 4);
cunorm_emulator::copy_async_commit();
cunorm_emulator::copy_async_wait(0);
"""


def test_asynchronous_copies_may_arrive_before_others_have_read() -> None:
    x = np.arange(1, 33, dtype=np.float32)
    for between, fine in (("__syncwarp();", True), ("", False)):
        y = np.zeros(32, np.float32)
        launch(OVER_OTHERS.format(between=between), [x, y], [32], seed=1)
        assert np.array_equal(y, x) == fine
        assert fine or (y[1:] == x[0]).any(), "none has arrived early"


def test_asynchronous_copies_that_nobody_waits_for() -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    with pytest.raises(EmulatorError, match="asynchronous copies that it did not wait for"):
        launch(ASYNC.format(wait="", end=""), [x, y], [32])


def test_an_asynchronous_copy_from_outside_a_buffer() -> None:
    x, y = np.arange(31, dtype=np.float32), np.zeros(32, np.float32)
    wait = "cunorm_emulator::copy_async_commit(); cunorm_emulator::copy_async_wait(0);"
    with pytest.raises(EmulatorError, match="buffer 0"):
        launch(ASYNC.format(wait=wait, end=""), [x, y], [32])


IN_BULK = """
__shared__ alignas(16) float run[36];
__shared__ int arrival;
if (threadIdx.x == 0) {{
  cunorm_emulator::bulk_begin(&arrival);
  cunorm_emulator::bulk_expect(&arrival, {expected});
  cunorm_emulator::bulk_fetch(&arrival, run + {place}, arguments.x, {bytes});
}}
__syncthreads();
{wait}
arguments.y[threadIdx.x] = run[threadIdx.x];
__syncthreads();
{end}
"""
ARRIVED = "cunorm_emulator::bulk_wait(&arrival, 0);"


def fetched(wait: str = ARRIVED, end: str = "", numbers: int = 32, **changed: int) -> Any:
    """What 32 threads find in shared memory, of numbers that come there in bulk."""
    x, y = np.arange(numbers, dtype=np.float32), np.zeros(32, np.float32)
    launch(IN_BULK.format(wait=wait, end=end, **({"place": 0, "bytes": 128, "expected": 128} | changed)), [x, y], [32])
    return y


def test_copies_in_bulk_arrive_when_they_are_waited_for() -> None:
    np.testing.assert_array_equal(fetched(), np.arange(32))
    np.testing.assert_array_equal(fetched("if (threadIdx.x == 9) " + ARRIVED + "__syncthreads();"), np.arange(32))
    assert np.isnan(fetched("", end=ARRIVED)).all(), "they were read before"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wait": ""}, "the block ends with copies in bulk that it did not wait for"),
        ({"place": 1}, "misaligned address: an access of this type needs a multiple of 16 bytes"),
        ({"bytes": 120}, "a copy in bulk of 120 bytes, no multiple of 16"),
        ({"numbers": 31}, "buffer 0"),
        ({"expected": 112}, "128 bytes come in bulk where 112 are expected"),
        ({"wait": "cunorm_emulator::bulk_wait(&run, 0);"}, "a barrier of copies in bulk was not begun"),
    ],
)
def test_copies_in_bulk_that_are_wrong(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        fetched(**wrong)


SENT = """
__shared__ alignas(16) float run[32];
run[threadIdx.x] = arguments.x[threadIdx.x];
__syncthreads();
if (threadIdx.x == 0) {{
  cunorm_emulator::bulk_send(arguments.y, run, 64);
  cunorm_emulator::bulk_send(arguments.y + 16, run + 16, 64);
  {body}
}}
"""


def test_what_is_sent_in_bulk_is_read_when_it_is_waited_for() -> None:
    """The first of two runs when there may be one on its way still; shared memory may have other numbers then."""
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    changed = "run[0] = run[16] = -1; cunorm_emulator::bulk_wait_sent(1); run[1] = run[17] = -1;"
    launch(SENT.format(body=changed + "cunorm_emulator::bulk_wait_sent(0);"), [x, y], [32])
    expected = x.copy()
    expected[[0, 16, 17]] = -1
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(EmulatorError, match="asynchronous copies that it did not wait for"):
        launch(SENT.format(body=changed), [x, y], [32])
