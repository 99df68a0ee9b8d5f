// Adds up the rows of one or two matrices of partial sums, in a fixed order: sums[c] = partials[0][c] + ...
//
// Every group of blocks of the kernel before has left one row in each. A block here takes COLUMN_THREADS columns; its
// ROW_THREADS rows of threads each take every ROW_THREADS-th partial row and are added up through shared memory. The
// sums are in double: there are few numbers to add here, and their rounding would be most of the result's. No rows at
// all give zeros.
#include "types.cuh"
#include "dependent_launch.cuh"

struct Arguments {
  const Compute* partials;         // [rows][columns]
  const Compute* second_partials;  // [rows][second_columns]
  SUM_TYPE* sums;                  // [columns]
  SECOND_SUM_TYPE* second_sums;    // [second_columns]
  long long rows;
  long long columns;
  long long second_columns;  // 0 where there is no second matrix
};

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS * ROW_THREADS, 1) column_sums(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ double scratch[ROW_THREADS][COLUMN_THREADS];
  const long long place = static_cast<long long>(blockIdx.x) * COLUMN_THREADS + threadIdx.x;
  const bool second = place >= arguments.columns;
  const long long columns = second ? arguments.second_columns : arguments.columns;
  const long long column = second ? place - arguments.columns : place;
  const Compute* partials = second ? arguments.second_partials : arguments.partials;
  wait_for_earlier_launches();
  double sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (long long row = threadIdx.y; row < arguments.rows; row += ROW_THREADS) sum += partials[row * columns + column];
  }
  if constexpr (ROW_THREADS > 1) {
    scratch[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int row = 1; row < ROW_THREADS; ++row) sum += scratch[row][threadIdx.x];
  }
  if (column >= columns) return;
  if (second) {
    narrow(sum, arguments.second_sums[column]);
  } else {
    narrow(sum, arguments.sums[column]);
  }
}
