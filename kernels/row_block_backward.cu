// Gradients of layer norm and RMS norm for rows that fit in registers. With xhat = (x - mean) * rstd, dz = dy times the
// derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dresidual_out,
//   dweight = sum over rows of dz * xhat,  dbias = sum over rows of dz.
// RMS norm (not CENTERED) has no mean, neither of x nor of g.
//
// Moves x and dy (and dresidual_out) once in and dx once out. Blocks are persistent: each takes every
// (gridDim.x / BLOCKS_PER_ROW)-th group of ROWS_PER_BLOCK rows and keeps the sums of its columns in registers, so that
// dweight and dbias cost one row of partial sums a block, which column_sums adds up in a fixed order.
#include "types.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "row_stage.cuh"
#include "activation.cuh"
#include "affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [groups of blocks][columns]: partial sums, or finished ones where there is one group
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;            // a multiple of VECTOR
  long long columns_per_block;  // likewise; columns, where a row is one block's
  long long x_stride;           // elements from one row to the next
  long long dy_stride;
  long long dresidual_out_stride;
  long long dx_stride;
};

extern "C" __global__ void SHARES_ROWS __launch_bounds__(THREADS_PER_ROW * ROWS_PER_BLOCK, 1)
    row_block_backward(const Arguments arguments) {
  constexpr int SCRATCH = 2 * ((THREADS_PER_ROW + 31) / 32) * ROWS_PER_BLOCK;
  __shared__ Compute scratch[2][SCRATCH];
  __shared__ Compute everyones[2][BLOCKS_PER_ROW][2];
  extern __shared__ __align__(16) X_TYPE staged[];  // x, dy, dx, dresidual_out
  cluster_arrive();

  const Part part = part_of_block(arguments.rows, arguments.columns, arguments.columns_per_block);
  const Rows<const X_TYPE> x = {arguments.x, arguments.x_stride, staged};
  const Rows<const X_TYPE> dy = {arguments.dy, arguments.dy_stride, staged + STAGE_ELEMENTS};
  const Rows<X_TYPE> dx = {arguments.dx, arguments.dx_stride, staged + 2 * STAGE_ELEMENTS};
  const Rows<const X_TYPE> dresidual_out = {arguments.dresidual_out, arguments.dresidual_out_stride,
                                            staged + (stage == Stage::run ? 3 : 2) * STAGE_ELEMENTS};
  const auto weight_of = [&](int i, Compute(&weight)[VECTOR], Compute(&bias)[VECTOR]) {
    load_weight<VECTOR>(arguments.weight + part.first_column + column_of(i), weight);
    load_bias<VECTOR>(arguments.bias + part.first_column + column_of(i), bias);
  };
  Compute dweight_sums[VECTORS][VECTOR] = {}, dbias_sums[VECTORS][VECTOR] = {};

  const long long group = blockIdx.x / BLOCKS_PER_ROW;
  const long long step = static_cast<long long>(gridDim.x / BLOCKS_PER_ROW) * ROWS_PER_BLOCK;
  long long first_row = group * ROWS_PER_BLOCK;
  Compute mean = 0, rstd = 0, next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](long long first) {
    const long long row = first + threadIdx.y;
    if constexpr (CENTERED) next_mean = row < arguments.rows ? arguments.mean[row] : 0;
    next_rstd = row < arguments.rows ? arguments.rstd[row] : 0;
  };
  fetch(x, part, first_row);
  fetch(dy, part, first_row);
  if constexpr (HAS_DRESIDUAL) fetch(dresidual_out, part, first_row);
  fetch_statistics(first_row);
  cluster_wait();
  for (int turn = 0; first_row < arguments.rows; first_row += step, turn ^= 1) {
    const long long row = first_row + threadIdx.y;

    // Load. Threads past the last row or column go along with nothing to add: the sums need every lane.
    mean = next_mean;
    rstd = next_rstd;
    fetch_statistics(first_row + step);
    wait_for_rows();
    Vector<X_TYPE, VECTOR> x_values[VECTORS], dy_values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) {
        x_values[i] = vector_of(x, part, first_row, i);
        dy_values[i] = vector_of(dy, part, first_row, i);
      }
    }
    if constexpr (stage == Stage::run) {
      release_rows();
      fetch(x, part, first_row + step);
      fetch(dy, part, first_row + step);
    }

    // Reduce along the row, and add to the column sums on the way.
    Compute sums[2] = {0, 0};  // of g, and of g * xhat
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) {
        Compute weight[VECTOR], bias[VECTOR];
        weight_of(i, weight, bias);
        Compute vector_sum = 0, vector_product = 0;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(x_values[i].lane[j], dy_values[i].lane[j], mean, rstd, weight[j], bias[j]);
          if constexpr (WANTS_DWEIGHT) dweight_sums[i][j] += gradient.dz * gradient.xhat;
          if constexpr (WANTS_DBIAS) dbias_sums[i][j] += gradient.dz;
          if constexpr (CENTERED) vector_sum += gradient.g;
          vector_product += gradient.g * gradient.xhat;
        }
        sums[0] += vector_sum;
        sums[1] += vector_product;
      }
    }
    if constexpr (stage == Stage::ahead) {
      fetch(x, part, first_row + step);
      fetch(dy, part, first_row + step);
    }
    if constexpr (!WANTS_DX) continue;
    row_sum<THREADS_PER_ROW>(sums, scratch[turn]);
    if constexpr (BLOCKS_PER_ROW > 1) {
      exchange_in_row(sums, everyones[turn]);
      sums[0] = sums[1] = 0;
#pragma unroll
      for (int i = 0; i < BLOCKS_PER_ROW; ++i) {
        sums[0] += everyones[turn][i][0];
        sums[1] += everyones[turn][i][1];
      }
    }
    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), with what is the same along the row put together: but for the
    // rstd in xhat, whose square could leave the range of float.
    const Compute offset = -sums[0] / arguments.columns * rstd, slope = -sums[1] / arguments.columns * rstd;

    // Finish and store.
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      forget_widened(x_values[i]);
      forget_widened(dy_values[i]);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (part.has(row, i)) {
        Compute weight[VECTOR], bias[VECTOR];
        weight_of(i, weight, bias);
        Vector<X_TYPE, VECTOR> added, result;
        if constexpr (HAS_DRESIDUAL) added = vector_of(dresidual_out, part, first_row, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(x_values[i].lane[j], dy_values[i].lane[j], mean, rstd, weight[j], bias[j]);
          Compute value = gradient.g * rstd + (CENTERED ? gradient.xhat * slope + offset : gradient.xhat * slope);
          if constexpr (HAS_DRESIDUAL) value += widen(added.lane[j]);
          narrow(value, result.lane[j]);
        }
        put(dx, part, first_row, i, result);
      }
    }
    if constexpr (stage == Stage::run) {
      __syncthreads();
      flush(dx, part, first_row);
    }
    if constexpr (HAS_DRESIDUAL) fetch(dresidual_out, part, first_row + step);
  }

  // Add over threadIdx.y, and write the group's row of sums.
  if constexpr (WANTS_DWEIGHT || WANTS_DBIAS) {
    constexpr int BLOCK_COLUMNS = THREADS_PER_ROW * VECTOR;
    constexpr int ROW_SUMS = ROWS_PER_BLOCK > 1 ? ROWS_PER_BLOCK * BLOCK_COLUMNS : 1;
    __shared__ Compute row_sums[ROW_SUMS];
    const auto write_sums = [&](Compute(&values)[VECTORS][VECTOR], auto* sums) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if constexpr (ROWS_PER_BLOCK > 1) {
          __syncthreads();
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            row_sums[threadIdx.y * BLOCK_COLUMNS + j * THREADS_PER_ROW + threadIdx.x] = values[i][j];
          }
          __syncthreads();
          if (threadIdx.y == 0) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
              for (int other = 1; other < ROWS_PER_BLOCK; ++other) {
                values[i][j] += row_sums[other * BLOCK_COLUMNS + j * THREADS_PER_ROW + threadIdx.x];
              }
            }
          }
        }
        if (threadIdx.y == 0 && (FULL || column_of(i) < part.columns)) {
          const long long first = group * arguments.columns + part.first_column + column_of(i);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) narrow(values[i][j], sums[first + j]);
        }
      }
    };
    if constexpr (WANTS_DWEIGHT) write_sums(dweight_sums, arguments.dweight);
    if constexpr (WANTS_DBIAS) write_sums(dbias_sums, arguments.dbias);
  }
}
