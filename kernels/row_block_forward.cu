// Layer norm of rows that fit in a block's registers: y = (x - mean) * rstd * weight + bias.
//
// Moves x once in and y once out. THREADS_PER_ROW threads (part of a warp, or several warps) hold one row as VECTORS
// vectors each; a block holds ROWS_PER_BLOCK rows. The row stays in the registers as it came from memory, in X_TYPE:
// that halves their number for sixteen-bit data, and widening again is cheaper than occupancy.
//
// The mean comes first, then the variance of the differences. The rounding of the mean is itself measured (the mean of
// the differences, zero in exact arithmetic) and taken out again, so that rows far from zero come out right.
#include "types.cuh"
#include "reduce.cuh"
#include "epilogue.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  Compute* mean;  // null where the statistics are not asked for
  Compute* rstd;
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long x_stride;  // elements from one row to the next
  long long y_stride;
  double eps;
};

extern "C" __global__ void __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, 1)
    row_block_forward(const Arguments arguments) {
  constexpr int WARPS_PER_ROW = (THREADS_PER_ROW + 31) / 32;
  __shared__ Compute scratch[3 * WARPS_PER_ROW * ROWS_PER_BLOCK];

  const long long row = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.y;
  const int columns = static_cast<int>(arguments.columns);
  // Threads past the last row or column go along with nothing to add: the sums need every lane.
  const int end = row < arguments.rows ? columns : 0;
  const auto column_of = [](int i) { return (i * THREADS_PER_ROW + static_cast<int>(threadIdx.x)) * VECTOR; };

  // Load.
  const X_TYPE* x = arguments.x + row * arguments.x_stride;
  Vector<X_TYPE, VECTOR> values[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (column_of(i) < end) values[i] = load<X_TYPE, VECTOR>(x + column_of(i));
  }

  // Reduce: the mean, then the differences from it. Each vector is summed by itself first: less rounding, shorter
  // chains.
  Compute sum[1] = {0};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (column_of(i) < end) {
      Compute part = 0;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) part += widen(values[i].lane[j]);
      sum[0] += part;
    }
  }
  row_sum<THREADS_PER_ROW>(sum, scratch);
  const Compute rough_mean = sum[0] / columns;

#pragma unroll
  for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
  Compute sums[2] = {0, 0};  // of the differences, and of their squares
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (column_of(i) < end) {
      Compute part = 0, part_of_squares = 0;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const Compute difference = widen(values[i].lane[j]) - rough_mean;
        part += difference;
        part_of_squares += difference * difference;
      }
      sums[0] += part;
      sums[1] += part_of_squares;
    }
  }
  row_sum<THREADS_PER_ROW>(sums, scratch + WARPS_PER_ROW * ROWS_PER_BLOCK);
  const Compute correction = sums[0] / columns;
  const Compute variance = sums[1] / columns - correction * correction;

  // Finish and store.
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
  const Compute rstd = reciprocal_sqrt(variance + static_cast<Compute>(arguments.eps));
  if (threadIdx.x == 0 && end > 0 && arguments.mean != nullptr) {
    arguments.mean[row] = rough_mean + correction;
    arguments.rstd[row] = rstd;
  }
  X_TYPE* y = arguments.y + row * arguments.y_stride;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = column_of(i);
    if (column < end) {
      store(y + column, normalized(values[i], rough_mean, correction, rstd, arguments.weight, arguments.bias, column));
    }
  }
}
