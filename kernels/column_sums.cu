// Adds up the rows of one or two matrices of partial sums, in a fixed order: sums[c] = partials[0][c] + ...
//
// A row is what one block, group of blocks, sample or chunk of the kernel before has left. A block here takes
// COLUMN_THREADS columns; its ROW_THREADS rows of threads each take every ROW_THREADS-th partial row and are added up
// through shared memory. The sums are in double: there are few numbers to add here, and their rounding would be most of
// the result's. No rows at all give zeros.
//
// Next to all of the time is waiting: for the kernel before, for memory, and for one instruction after the other. So a
// thread asks for AT_ONCE rows, also where there are fewer, and counts them in 32 bits.
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
  const Compute* own = (second ? arguments.second_partials : arguments.partials) + threadIdx.y * columns + column;
  const long long step = ROW_THREADS * columns;
  int left = column < columns ? static_cast<int>(arguments.rows) - static_cast<int>(threadIdx.y) : 0;
  wait_for_earlier_launches();
  double sum = 0;
#pragma unroll 1
  for (; left > 0; left -= AT_ONCE * ROW_THREADS) {
    Compute values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      values[i] = left > i * ROW_THREADS ? *own : 0;
      own += step;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum += values[i];
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
