// Layer norm and RMS norm of rows that fit in registers: y = activate((x - mean) * rstd * weight + bias); RMS norm (not
// CENTERED) has no mean. With a residual, what is normalized is residual_out = x + residual, as it was rounded.
//
// Moves x (and the residual) once in, and y (and residual_out) once out. The row stays in the registers as it came from
// memory, in X_TYPE: that halves their number for sixteen-bit data, and widening again is cheaper than occupancy.
//
// The mean comes first, then the variance of the differences. The rounding of the mean is itself measured (the mean of
// the differences, zero in exact arithmetic) and taken out again, so that rows far from zero come out right. A block
// takes every (gridDim.x / BLOCKS_PER_ROW)-th group of ROWS_PER_BLOCK rows.
#include "types.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "row_stage.cuh"
#include "activation.cuh"
#include "affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  X_TYPE* residual_out;
  Compute* mean;  // null where the statistics are not asked for; so is rstd
  Compute* rstd;
  long long rows;
  long long columns;            // a multiple of VECTOR
  long long columns_per_block;  // likewise; columns, where a row is one block's
  long long x_stride;           // elements from one row to the next
  long long residual_stride;
  long long y_stride;
  long long residual_out_stride;
  double eps;
};

// The statistics of a row. The mean is the sum of two numbers.
struct Statistics {
  Compute mean;
  Compute remainder;
  Compute variance;  // the mean square, where not CENTERED
};

// The statistics of a row from those of its blocks' parts, in the same order in every block. Chan, Golub and LeVeque's
// rule: the squared deviation of the whole is that of the parts, plus that of their means.
__device__ __forceinline__ Statistics merge_over_blocks(const Statistics& own, const Part& part,
                                                        long long columns_per_block,
                                                        Compute (&everyones)[BLOCKS_PER_ROW][3]) {
  const Compute numbers[3] = {own.mean, own.remainder, own.variance};
  exchange_in_row(numbers, everyones);
  const auto weight_of = [&](int block) {
    const long long left = part.row_columns - block * columns_per_block;
    return static_cast<Compute>(left < columns_per_block ? left : columns_per_block) / part.row_columns;
  };
  Statistics row = {everyones[0][0], 0, 0};
#pragma unroll
  for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
    if constexpr (CENTERED) row.remainder += weight_of(i) * (everyones[i][0] - row.mean + everyones[i][1]);
  }
#pragma unroll
  for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
    const Compute difference = CENTERED ? everyones[i][0] - row.mean + everyones[i][1] - row.remainder : 0;
    row.variance += weight_of(i) * (everyones[i][2] + difference * difference);
  }
  return row;
}

extern "C" __global__ void SHARES_ROWS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, 1)
    row_block_forward(const Arguments arguments) {
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_PER_BLOCK;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Compute everyones[2][BLOCKS_PER_ROW][3];
  extern __shared__ __align__(16) X_TYPE staged[];  // x, y, residual, residual_out
  cluster_arrive();

  const Part part = part_of_block(arguments.rows, arguments.columns, arguments.columns_per_block);
  const Rows<const X_TYPE> x = {arguments.x, arguments.x_stride, staged};
  const Rows<X_TYPE> y = {arguments.y, arguments.y_stride, staged + STAGE_ELEMENTS};
  const int residuals = stage == Stage::run ? 2 * STAGE_ELEMENTS : STAGE_ELEMENTS;
  const Rows<const X_TYPE> residual = {arguments.residual, arguments.residual_stride, staged + residuals};
  const Rows<X_TYPE> residual_out = {arguments.residual_out, arguments.residual_out_stride,
                                     staged + residuals + STAGE_ELEMENTS};
  const WEIGHT_TYPE* weight = arguments.weight + part.first_column;
  const BIAS_TYPE* bias = arguments.bias + part.first_column;

  const long long step = static_cast<long long>(gridDim.x / BLOCKS_PER_ROW) * ROWS_PER_BLOCK;
  long long first_row = static_cast<long long>(blockIdx.x / BLOCKS_PER_ROW) * ROWS_PER_BLOCK;
  fetch(x, part, first_row);
  if constexpr (HAS_RESIDUAL) fetch(residual, part, first_row);
  cluster_wait();
  for (int turn = 0; first_row < arguments.rows; first_row += step, turn ^= 1) {
    const long long row = first_row + threadIdx.y;

    // Load. Threads past the last row or column go along with nothing to add: the sums need every lane.
    wait_for_rows();
    Vector<X_TYPE, VECTOR> values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) values[i] = vector_of(x, part, first_row, i);
    }
    if constexpr (HAS_RESIDUAL) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (part.has(row, i)) {
          const Vector<X_TYPE, VECTOR> added = vector_of(residual, part, first_row, i);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) narrow(widen(values[i].lane[j]) + widen(added.lane[j]), values[i].lane[j]);
          put(residual_out, part, first_row, i, values[i]);
        }
      }
    }
    release_rows();
    fetch(x, part, first_row + step);
    if constexpr (HAS_RESIDUAL) fetch(residual, part, first_row + step);

    // Reduce: the mean, then the differences from it. Each vector is summed by itself first: less rounding, shorter
    // chains.
    Statistics statistics = {0, 0, 0};
    if constexpr (CENTERED) {
      Compute sum[1] = {0};
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (part.has(row, i)) {
          Compute vector_sum = 0;
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) vector_sum += widen(values[i].lane[j]);
          sum[0] += vector_sum;
        }
      }
      row_sum<THREADS_PER_ROW>(sum, scratch[0]);
      statistics.mean = sum[0] / part.columns;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
    }
    Compute sums[2] = {0, 0};  // of the differences, and of their squares
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) {
        Compute vector_sum = 0, vector_squares = 0;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Compute difference = CENTERED ? widen(values[i].lane[j]) - statistics.mean : widen(values[i].lane[j]);
          if constexpr (CENTERED) vector_sum += difference;
          vector_squares += difference * difference;
        }
        sums[0] += vector_sum;
        sums[1] += vector_squares;
      }
    }
    row_sum<THREADS_PER_ROW>(sums, scratch[CENTERED ? 1 : turn]);
    statistics.remainder = sums[0] / part.columns;
    statistics.variance = sums[1] / part.columns - statistics.remainder * statistics.remainder;
    if constexpr (BLOCKS_PER_ROW > 1) {
      statistics = merge_over_blocks(statistics, part, arguments.columns_per_block, everyones[turn]);
    }

    // Finish and store.
    const Compute rstd = reciprocal_sqrt(statistics.variance + static_cast<Compute>(arguments.eps));
    if (threadIdx.x == 0 && part.first_column == 0 && row < arguments.rows && arguments.rstd != nullptr) {
      if constexpr (CENTERED) arguments.mean[row] = statistics.mean + statistics.remainder;
      arguments.rstd[row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) forget_widened(values[i]);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) {
        put(y, part, first_row, i,
            normalized(values[i], statistics.mean, statistics.remainder, rstd, weight, bias, column_of(i)));
      }
    }
    if constexpr (stage == Stage::run) {
      __syncthreads();
      flush(y, part, first_row);
      if constexpr (HAS_RESIDUAL) flush(residual_out, part, first_row);
    }
  }
}
