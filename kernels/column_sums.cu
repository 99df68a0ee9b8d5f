// Adds up the rows of a matrix of partial sums, in a fixed order: sums[c] = partials[0][c] + partials[1][c] + ...
//
// Every block of the kernel before has left one row. A block here takes COLUMN_THREADS columns; its ROW_THREADS rows of
// threads each take every ROW_THREADS-th partial row and are added up through shared memory. The sums are in double:
// there are few numbers to add here, and their rounding would be most of the result's. No rows at all give zeros.
#include "types.cuh"

struct Arguments {
  const Compute* partials;  // [rows][columns]
  SUM_TYPE* sums;           // [columns]
  long long rows;
  long long columns;
};

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS * ROW_THREADS, 1) column_sums(const Arguments arguments) {
  __shared__ double scratch[ROW_THREADS][COLUMN_THREADS];
  const long long column = static_cast<long long>(blockIdx.x) * COLUMN_THREADS + threadIdx.x;
  double sum = 0;
  if (column < arguments.columns) {
#pragma unroll 4
    for (long long row = threadIdx.y; row < arguments.rows; row += ROW_THREADS) {
      sum += arguments.partials[row * arguments.columns + column];
    }
  }
  if constexpr (ROW_THREADS > 1) {
    scratch[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int row = 1; row < ROW_THREADS; ++row) sum += scratch[row][threadIdx.x];
  }
  if (column < arguments.columns) narrow(sum, arguments.sums[column]);
}
