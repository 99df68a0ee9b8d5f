// The gradients of weight and bias, for layer norm and RMS norm of few rows: dweight = sum over rows of dz * xhat and
// dbias = sum over rows of dz, with xhat = (x - mean) * rstd and dz = dy times the derivative of the activation.
//
// Reads x and dy by itself, and shares nothing with the launch before it, which makes dx from them: the two overlap,
// and what comes second finds them in the cache. No block leaves partial sums, which of few rows are as much as the
// data.
//
// A block has COLUMN_LANES vectors of columns and goes down all rows: its ROW_LANES rows of threads each take every
// ROW_LANES-th, with STEPS of them under way at once.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "activation.cuh"
#include "affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  DWEIGHT_TYPE* dweight;  // [columns]
  DBIAS_TYPE* dbias;      // [columns]
  long long rows;
  long long columns;   // a multiple of VECTOR
  long long x_stride;  // elements from one row to the next
  long long dy_stride;
};

constexpr int BLOCK_COLUMNS = COLUMN_LANES * VECTOR;
constexpr int WARPS = COLUMN_LANES * ROW_LANES / 32;

extern "C" __global__ void __launch_bounds__(COLUMN_LANES * ROW_LANES, 1)
    row_weight_gradients(const Arguments arguments) {
  let_next_launch_begin();
  const long long first_column = static_cast<long long>(blockIdx.x) * BLOCK_COLUMNS;
  const long long column = first_column + threadIdx.x * VECTOR;
  const long long end = column < arguments.columns ? arguments.rows : 0;
  Compute weight[VECTOR], bias[VECTOR];
  if constexpr (activation != Activation::none) {
    if (end > 0) load_affine<VECTOR>(arguments.weight + column, arguments.bias + column, weight, bias);
  }

  Compute dweight[VECTOR] = {}, dbias[VECTOR] = {};
  for (long long first = threadIdx.y; first < end; first += STEPS * ROW_LANES) {
    Vector<X_TYPE, VECTOR> x_values[STEPS], dy_values[STEPS];
    Compute mean[STEPS], rstd[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const long long row = first + i * ROW_LANES;
      if (row < end) {
        x_values[i] = load<X_TYPE, VECTOR>(arguments.x + row * arguments.x_stride + column);
        dy_values[i] = load<X_TYPE, VECTOR>(arguments.dy + row * arguments.dy_stride + column);
        mean[i] = CENTERED ? arguments.mean[row] : 0;
        rstd[i] = arguments.rstd[row];
      }
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (first + i * ROW_LANES < end) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(widen(x_values[i], j), widen(dy_values[i], j), mean[i], rstd[i], weight[j], bias[j]);
          if constexpr (WANTS_DWEIGHT) dweight[j] += gradient.dz * gradient.xhat;
          if constexpr (WANTS_DBIAS) dbias[j] += gradient.dz;
        }
      }
    }
  }

  // Add over the row lanes of a warp, then over the warps: each sum in one thread, where lane_sum would give every
  // thread all of its column's.
  __shared__ Compute scratch[2][WARPS][BLOCK_COLUMNS];
  const int thread = threadIdx.y * COLUMN_LANES + threadIdx.x;
  const auto share = [&](Compute(&values)[VECTOR], Compute(&all)[WARPS][BLOCK_COLUMNS]) {
    warp_sum<32, COLUMN_LANES>(values);
    if (thread % 32 >= COLUMN_LANES) return;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) all[thread / 32][threadIdx.x * VECTOR + j] = values[j];
  };
  if constexpr (WANTS_DWEIGHT) share(dweight, scratch[0]);
  if constexpr (WANTS_DBIAS) share(dbias, scratch[1]);
  __syncthreads();
  // The launch before it, of the same plan, writes nothing of what was read.
  wait_for_earlier_launches();
  const auto write = [&](const Compute(&all)[WARPS][BLOCK_COLUMNS], int place, auto* sums) {
    if (first_column + place >= arguments.columns) return;
    Compute sum = all[0][place];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += all[warp][place];
    narrow(sum, sums[first_column + place]);
  };
  for (int i = thread; i < 2 * BLOCK_COLUMNS; i += COLUMN_LANES * ROW_LANES) {
    if (i < BLOCK_COLUMNS) {
      if constexpr (WANTS_DWEIGHT) write(scratch[0], i, arguments.dweight);
    } else {
      if constexpr (WANTS_DBIAS) write(scratch[1], i - BLOCK_COLUMNS, arguments.dbias);
    }
  }
}
