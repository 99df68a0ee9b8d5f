"""What ``cunorm.emulator`` finds wrong with memory, barriers and warps, and where."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_cases import NEEDS_COMPILER, launch, report, x_and_y

from cunorm.emulator import Pointer

pytestmark = NEEDS_COMPILER


# ---- Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 25])
@pytest.mark.parametrize("access", ["arguments.y[0] = arguments.x[i]", "arguments.y[i] = 1.0f"], ids=["read", "write"])
def test_one_element_outside_a_buffer(index: int, access: str) -> None:
    x, y = np.zeros(25, dtype=np.float32), np.zeros(25, dtype=np.float32)
    body = f"\nconst long long i = arguments.n;\nif (blockIdx.x == 1 && threadIdx.x == 2) {access};"
    message = report(body, [x, y], [index], grid=2, block=4)
    kind, buffer = ("READ", 0) if "x[i]" in access else ("WRITE", 1)
    assert f"heap-buffer-overflow, {kind} of size 4, byte {4 * index} of buffer {buffer} (100 bytes)" in message
    assert "block (1, 0, 0), thread (2, 0, 0), kernels/example.cu:3" in message


def test_one_byte_past_the_end_of_a_vector_load() -> None:
    x, y = np.zeros(31, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    body = """
    const uint4* x = reinterpret_cast<const uint4*>(arguments.x);
    reinterpret_cast<uint4*>(arguments.y)[threadIdx.x] = x[threadIdx.x];"""
    message = report(body, [x, y], [0], block=2)
    assert "heap-buffer-overflow" in message
    assert "buffer 0" in message


@pytest.mark.parametrize("index", [-1, 32])
@pytest.mark.parametrize("access", ["arguments.y[0] = at[i]", "at[i] = 1.0f"], ids=["read", "write"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_element_outside_shared_memory(index: int, access: str, dynamic: bool) -> None:
    declaration = "extern __shared__ float tile[];" if dynamic else "__shared__ float tile[32];"
    body = f"{declaration}\nfloat* at = tile;\nat[threadIdx.x] = 0;\nconst long long i = arguments.n;\n{access};"
    message = report(body, x_and_y(1), [index], shared_bytes=128 if dynamic else 0)
    assert "heap-buffer-overflow" in message
    assert f"byte {4 * index} of {'dynamic' if dynamic else repr('tile')} __shared__ memory (128 bytes)" in message
    assert "kernels/example.cu:5" in message


def test_index_outside_a_local_array() -> None:
    body = "float values[4] = {};\narguments.y[0] = values[arguments.n];"
    message = report(body, x_and_y(4), [4])
    assert "index 4 out of bounds" in message
    assert "kernels/example.cu:2" in message


def test_pointer_outside_a_local_array() -> None:
    body = "float values[4] = {}; float* volatile at = values;\narguments.y[0] = at[arguments.n];"
    message = report(body, x_and_y(4), [4])
    assert "stack-buffer-overflow, READ of size 4" in message
    assert "kernels/example.cu:2" in message


VECTOR = "struct alignas(16) Vector { float lane[4]; };"


@pytest.mark.parametrize(
    "access",
    [
        "const Vector v = *reinterpret_cast<const Vector*>(arguments.x); arguments.y[0] = v.lane[0];",
        "Vector v{}; *reinterpret_cast<Vector*>(arguments.y) = v;",
        "arguments.y[0] = reinterpret_cast<const float4*>(arguments.x)->x;",
        "arguments.y[0] = __ldcs(reinterpret_cast<const float4*>(arguments.x)).w;",
        "__stcs(reinterpret_cast<float4*>(arguments.y), float4{});",
    ],
    ids=["struct load", "struct store", "member", "__ldcs", "__stcs"],
)
def test_misaligned_vector_access(access: str) -> None:
    buffers = x_and_y(9)
    good = [Pointer(0, 16), Pointer(1, 16)]
    launch(f"\n{access}", buffers, [0], before=VECTOR, pointers=good)
    odd = [Pointer(0, 4), Pointer(1, 4)]
    message = report(f"\n{access}", buffers, [0], before=VECTOR, pointers=odd)
    assert "misaligned address" in message
    assert "16 byte" in message or "multiple of 16 bytes" in message
    assert "kernels/example.cu:2" in message


def test_odd_offsets_work_where_the_access_is_narrow() -> None:
    x, y = np.arange(8, dtype=np.float16), np.zeros(8, dtype=np.float16)
    body = "arguments.y[threadIdx.x] = arguments.x[threadIdx.x];"
    launch(
        body,
        [x, y],
        arguments="const __half* x; __half* y;",
        pointers=[Pointer(0, 2), Pointer(1, 6)],
        block=5,
    )
    assert y.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]


def test_shared_memory_that_nobody_wrote_is_nan_in_every_block() -> None:
    y = np.zeros((3, 2), dtype=np.float32)
    body = """
    __shared__ float tile[2];
    extern __shared__ float dynamic[];
    arguments.y[2 * blockIdx.x] = tile[1];
    arguments.y[2 * blockIdx.x + 1] = dynamic[1];
    tile[1] = dynamic[1] = 0;"""
    launch(body, [y], arguments="float* y;", grid=3, block=1, shared_bytes=8)
    assert np.isnan(y).all()


def test_shared_memory_of_every_shape() -> None:
    out = np.zeros(6, dtype=np.float64)
    before = """
    template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Pack { T lane[COUNT]; };
    template <typename T, int N> __device__ __forceinline__ int size(T (&)[N]) { return N; }
    template <typename T> __device__ __forceinline__ T next() {
      __shared__ T counter;  // one for each T, not a __shared__
      if (threadIdx.x == 0) counter = sizeof(T);
      __syncthreads();
      return counter;
    }"""
    body = """
    __shared__ alignas(sizeof(Pack<float, 4>)) Pack<float, 4> packs[2][3];
    alignas(16) __shared__ volatile int number;
    extern __shared__ __align__(16) float table[][5];
    packs[1][2].lane[3] = 7;
    number = 8;
    table[1][4] = 9;
    const float first = next<float>(), second = next<double>();
    const double results[6] = {packs[1][2].lane[3], double(number), table[1][4], size(packs), first, second};
    for (int i = 0; i < 6; ++i) arguments.out[i] = results[i];"""
    launch(body, [out], arguments="double* out;", before=before, shared_bytes=40)
    assert out.tolist() == [7, 8, 9, 2, 4, 8]


def test_local_variables_that_nobody_wrote_are_absurd() -> None:
    y = np.zeros(2, dtype=np.float32)
    launch("float values[2]; arguments.y[threadIdx.x] = values[threadIdx.x];", [y], arguments="float* y;", block=2)
    assert (y < -1e38).all()


def test_read_only_buffers_come_back_as_they_were() -> None:
    x, y = np.zeros(32, dtype=np.float32), np.zeros(32, dtype=np.float32)
    x.flags.writeable = False
    launch("arguments.y[threadIdx.x] = arguments.x[threadIdx.x] + 1;", [x, y], [0])
    assert (y == 1).all()
    message = report("const_cast<float*>(arguments.x)[0] = 1;", [x, y], [0])
    assert "wrote to buffer 0, which is read-only" in message


# ---- Barriers --------------------------------------------------------------------------------------------------------


def reversed_through_shared_memory(barrier: str, seed: int) -> bool:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, dtype=np.float32)
    body = f"""
    __shared__ float tile[64];
    tile[threadIdx.x] = arguments.x[threadIdx.x];
    {barrier}
    arguments.y[threadIdx.x] = tile[63 - threadIdx.x];"""
    launch(body, [x, y], [0], block=64, seed=seed)
    return np.array_equal(y, x[::-1])


def test_a_missing_barrier_shows() -> None:
    assert all(reversed_through_shared_memory("__syncthreads();", seed) for seed in range(4))
    assert not any(reversed_through_shared_memory("", seed) for seed in range(4))


def test_a_missing_barrier_before_memory_is_used_again_shows() -> None:
    def right(barrier: str, seed: int) -> bool:
        y = np.zeros(64, dtype=np.float32)
        body = f"""
        __shared__ float total;
        for (int round = 0; round < 3; ++round) {{
          if (threadIdx.x == 0) total = round;
          __syncthreads();
          arguments.y[threadIdx.x] += total;
          {barrier}
        }}"""
        launch(body, [y], arguments="float* y;", block=64, seed=seed)
        return bool((y == 3).all())

    assert all(right("__syncthreads();", seed) for seed in range(4))
    assert not all(right("", seed) for seed in range(4))


def test_barriers_at_two_places() -> None:
    body = "if (threadIdx.x < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}"
    message = report(body, [], [0], arguments="long long n;", block=64)
    assert "divergent barrier" in message
    assert "kernels/example.cu:2" in message
    assert "kernels/example.cu:4" in message


def test_exited_threads_count_as_arrived_at_a_barrier() -> None:
    y = np.zeros(64, dtype=np.float32)
    body = """
    if (threadIdx.x >= 50) return;
    __syncthreads();
    __syncwarp();
    arguments.y[threadIdx.x] = 1;"""
    for seed in range(4):
        launch(body, [y], arguments="float* y;", block=64, seed=seed)
    assert y.sum() == 50


def test_deadlock_of_a_barrier_and_a_warp() -> None:
    body = "if (threadIdx.x == 3)\n__syncthreads();\nelse\n__syncwarp();"
    message = report(body, [], [0], arguments="long long n;")
    assert "deadlock: __syncwarp() with mask 0xffffffff in warp 0 of the block waits for lane 3" in message
    assert "thread (3, 0, 0) waits at __syncthreads(), kernels/example.cu:2" in message
    assert message.endswith("kernels/example.cu:4")


# ---- Warp primitives -------------------------------------------------------------------------------------------------


def test_a_shuffle_that_a_named_lane_does_not_reach() -> None:
    body = "float v = 1;\nif (threadIdx.x != 37)\nv = __shfl_xor_sync(0xffffffffu, v, 1);\n__syncwarp();"
    message = report(body, [], [0], arguments="long long n;", block=64)
    assert "in warp 1 of the block waits for lane" in message
    assert "thread (37, 0, 0) waits at __syncwarp(), kernels/example.cu:4" in message


@pytest.mark.parametrize("seed", range(4))
def test_a_shuffle_that_names_an_exited_lane(seed: int) -> None:
    body = "if (threadIdx.x == 5) return;\n__shfl_down_sync(0xffffffffu, 1.0f, 1);"
    message = report(body, [], [0], arguments="long long n;", seed=seed)
    assert "0xffffffff" in message
    assert "lane 5" in message or "thread (5, 0, 0) has exited" in message
    assert "kernels/example.cu:2" in message


def test_a_shuffle_that_names_lanes_past_the_block() -> None:
    message = report("__shfl_xor_sync(0xffffffffu, 1.0f, 1);", [], [0], arguments="long long n;", block=16)
    assert "lanes 16-31, which exited or never existed" in message


def test_a_mask_without_its_caller() -> None:
    message = report("__ballot_sync(0x0000000fu, 1);", [], [0], arguments="long long n;", block=5)
    assert "mask 0x0000000f does not name its caller, lane 4" in message


def test_a_shuffle_from_a_lane_that_is_not_named() -> None:
    body = "if (threadIdx.x < 4) __shfl_xor_sync(0x0000000fu, 1.0f, 4);"
    message = report(body, [], [0], arguments="long long n;")
    assert "which mask 0x0000000f does not name" in message
    assert "kernels/example.cu:1" in message
