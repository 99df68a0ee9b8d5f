// Sums over the threads that share a row. Every thread of the row gets the same bits, in an order fixed by the launch.
//
// Two ways to lay rows over a block are in use. row_sum: threadIdx.x runs along a row and threadIdx.y counts rows
// (row_block_*, row_bulk_*, row_grid_forward, and channel_* where vectors lie along the points). lane_sum: ROW_LANES
// neighbouring threads hold the same column of as many rows (row_split_*).
//
// `scratch` is shared memory for one call. It may be used again only after another __syncthreads() of the block; both
// functions hold one themselves where more than a warp shares a row, so two scratches used in turn are enough.

// The sum of two numbers: as much as fits into one, and the rest (Knuth, The Art of Computer Programming 2, 4.2.2).
__device__ __forceinline__ void add_apart(Compute a, Compute b, Compute& sum, Compute& rest) {
  sum = a + b;
  const Compute taken = sum - a;
  rest = a - (sum - taken) + (b - taken);
}

// A butterfly over the bits LAST, 2 * LAST, ..., FIRST / 2 of the lane's number: each lane gets the sum over the
// FIRST / LAST lanes that differ from it in these bits alone.
template <int FIRST, int LAST, int COUNT>
__device__ __forceinline__ void warp_sum(Compute (&values)[COUNT]) {
#pragma unroll
  for (int offset = FIRST / 2; offset >= LAST; offset /= 2) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
  }
}

// Of the block's row-th row. Scratch: COUNT * THREADS_PER_ROW / 32 values for each of its rows.
template <int THREADS_PER_ROW_, int COUNT>
__device__ __forceinline__ void row_sum(Compute (&values)[COUNT], Compute* scratch, unsigned row) {
  warp_sum<(THREADS_PER_ROW_ < 32 ? THREADS_PER_ROW_ : 32), 1>(values);
  if constexpr (THREADS_PER_ROW_ > 32) {
    constexpr int WARPS = THREADS_PER_ROW_ / 32;
    Compute* row_scratch = scratch + row * COUNT * WARPS;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) row_scratch[i * WARPS + threadIdx.x / 32] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      values[i] = row_scratch[i * WARPS];
#pragma unroll
      for (int warp = 1; warp < WARPS; ++warp) values[i] += row_scratch[i * WARPS + warp];
    }
  }
}

// Scratch: COUNT * THREADS / 32 * ROW_LANES values.
template <int THREADS_, int ROW_LANES_, int COUNT>
__device__ __forceinline__ void lane_sum(Compute (&values)[COUNT], Compute* scratch) {
  constexpr int WARPS = THREADS_ / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = threadIdx.x % ROW_LANES_;
  warp_sum<32, ROW_LANES_>(values);
  if (lane < ROW_LANES_) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) scratch[(i * WARPS + warp) * ROW_LANES_ + row] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    values[i] = scratch[i * WARPS * ROW_LANES_ + row];
#pragma unroll
    for (int other = 1; other < WARPS; ++other) values[i] += scratch[(i * WARPS + other) * ROW_LANES_ + row];
  }
}
