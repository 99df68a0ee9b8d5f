// Gradients of layer norm and RMS norm from finished row sums, for rows that no block can hold: dx, and the sums for
// dweight and dbias (the formulas stand in row_block_backward.cu). Reads x and dy a second time, and dresidual_out, and
// writes dx.
//
// A block keeps one tile of columns and goes down the rows of its group, so the sums of its columns stay in registers;
// block b, counted from the end, takes tile b % tiles of group b / tiles. Where its rows are no more than MERGED_ROWS,
// of few chunks, it adds up the sums of these itself, as column_sums would: a launch less.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "strides.cuh"
#include "row_cut.cuh"
#include "row_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_merge.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const X_TYPE* dresidual_out;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  const Compute* sums;  // [splits][2][rows]: of g, of g * xhat; of one split, but where MERGED_ROWS > 0
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [groups][columns]: partial sums, or the finished ones where there is one group
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long splits;
  long long tiles;
  long long rows_per_group;  // a multiple of ROW_LANES
  long long row_sizes[ROW_DIMS];
  long long column_sizes[COLUMN_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long x_column_strides[COLUMN_DIMS];
  long long dy_row_strides[ROW_DIMS];
  long long dy_column_strides[COLUMN_DIMS];
  long long dresidual_out_row_strides[ROW_DIMS];
  long long dresidual_out_column_strides[COLUMN_DIMS];
  long long dx_row_strides[ROW_DIMS];
  long long dx_column_strides[COLUMN_DIMS];
};

// The sums of the rows from first_row on, from those of their chunks: a warp for each. For all threads of the block.
__device__ __forceinline__ void merge_sums(const Arguments& arguments, long long first_row, long long end_row,
                                           Compute* merged) {
  static_assert(MERGED_ROWS == 0 || ROW_LANES == 1);
  const int rows = static_cast<int>(end_row - first_row);
  for (int i = threadIdx.x / 32; i < 2 * rows; i += THREADS / 32) {
    const int which = i / rows, row = i % rows;
    double sum[1] = {0};
#pragma unroll 4
    for (long long split = threadIdx.x % 32; split < arguments.splits; split += 32) {
      sum[0] += arguments.sums[(split * 2 + which) * arguments.rows + first_row + row];
    }
    total_over<32>(sum, nullptr);
    if (threadIdx.x % 32 == 0) merged[which * MERGED_ROWS + row] = static_cast<Compute>(sum[0]);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) row_split_backward(const Arguments arguments) {
  let_next_launch_begin();
  constexpr int MERGED = MERGED_ROWS > 0 ? 2 * MERGED_ROWS : 1;
  __shared__ Compute merged_sums[MERGED];
  const unsigned block = block_from_the_end();
  const long long group = block / arguments.tiles, first_column = block % arguments.tiles * TILE_COLUMNS;
  const long long first_row = group * arguments.rows_per_group, group_end = first_row + arguments.rows_per_group;
  const long long end_row = group_end < arguments.rows ? group_end : arguments.rows;
  const Compute scale = 1 / static_cast<Compute>(arguments.columns);

  long long x_offsets[UNROLL], dy_offsets[UNROLL], dx_offsets[UNROLL], added_offsets[UNROLL];
  Compute weight[UNROLL][VECTOR], bias[UNROLL][VECTOR];
  Compute dweight_sums[UNROLL][VECTOR] = {}, dbias_sums[UNROLL][VECTOR] = {};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const long long column = tile_column(first_column, i);
    if (column < arguments.columns) {
      x_offsets[i] = offset_of(column, arguments.column_sizes, arguments.x_column_strides);
      dy_offsets[i] = offset_of(column, arguments.column_sizes, arguments.dy_column_strides);
      if constexpr (WANTS_DX) dx_offsets[i] = offset_of(column, arguments.column_sizes, arguments.dx_column_strides);
      if constexpr (HAS_DRESIDUAL) {
        added_offsets[i] = offset_of(column, arguments.column_sizes, arguments.dresidual_out_column_strides);
      }
      load_affine<VECTOR>(arguments.weight + column, arguments.bias + column, weight[i], bias[i]);
    }
  }

  struct Values {
    Vector<X_TYPE, VECTOR> x[UNROLL], dy[UNROLL], added[HAS_DRESIDUAL ? UNROLL : 1];
  };
  const auto load_row = [&](long long row, Values& values) {
    if (row >= end_row) return;
    const X_TYPE* x = arguments.x + offset_of(row, arguments.row_sizes, arguments.x_row_strides);
    const X_TYPE* dy = arguments.dy + offset_of(row, arguments.row_sizes, arguments.dy_row_strides);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (tile_column(first_column, i) < arguments.columns) {
        values.x[i] = load<X_TYPE, VECTOR>(x + x_offsets[i]);
        values.dy[i] = load<X_TYPE, VECTOR>(dy + dy_offsets[i]);
      }
    }
    if constexpr (HAS_DRESIDUAL) {
      const X_TYPE* dresidual_out =
          arguments.dresidual_out + offset_of(row, arguments.row_sizes, arguments.dresidual_out_row_strides);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (tile_column(first_column, i) < arguments.columns) {
          values.added[i] = load<X_TYPE, VECTOR>(dresidual_out + added_offsets[i]);
        }
      }
    }
  };
  const auto sum_of_row = [&](int which, long long row) {
    if constexpr (MERGED_ROWS > 0) return merged_sums[which * MERGED_ROWS + static_cast<int>(row - first_row)];
    return arguments.sums[which * arguments.rows + row];
  };
  const auto finish_row = [&](long long row, const Values& values) {
    const Compute mean = CENTERED ? arguments.mean[row] : 0, rstd = arguments.rstd[row];
    X_TYPE* dx = nullptr;
    Compute mean_g = 0, mean_gx = 0;
    if constexpr (WANTS_DX) {
      dx = arguments.dx + offset_of(row, arguments.row_sizes, arguments.dx_row_strides);
      if constexpr (CENTERED) mean_g = sum_of_row(0, row) * scale;
      mean_gx = sum_of_row(1, row) * scale;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (tile_column(first_column, i) < arguments.columns) {
        Compute results[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(widen(values.x[i], j), widen(values.dy[i], j), mean, rstd, weight[i][j], bias[i][j]);
          if constexpr (WANTS_DWEIGHT) dweight_sums[i][j] += gradient.dz * gradient.xhat;
          if constexpr (WANTS_DBIAS) dbias_sums[i][j] += gradient.dz;
          results[j] = (gradient.g - mean_g - gradient.xhat * mean_gx) * rstd;
          if constexpr (HAS_DRESIDUAL) results[j] += widen(values.added[i], j);
        }
        if constexpr (WANTS_DX) store(dx + dx_offsets[i], rounded<X_TYPE>(results));
      }
    }
  };

  // What no launch before this one writes may be on its way before they are done.
  long long row = first_row + row_lane();
  Values values, next;
  load_row(row, values);
  wait_for_earlier_launches();
  if constexpr (MERGED_ROWS > 0) {
    // Of few rows the next one is on its way while one is finished.
    if constexpr (WANTS_DX) merge_sums(arguments, first_row, end_row, merged_sums);
    while (row < end_row) {
      load_row(row + 1, next);
      finish_row(row, values);
      if (++row >= end_row) break;
      load_row(row + 1, values);
      finish_row(row, next);
      ++row;
    }
  } else {
    for (; row < end_row; row += ROW_LANES) {
      if (row >= first_row + ROW_LANES) load_row(row, values);
      finish_row(row, values);
    }
  }

  // Add over the row lanes, which are neighbours in a warp, and write the group's row of sums.
  const auto write_sums = [&](Compute(&values)[UNROLL][VECTOR], auto* sums) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      warp_sum<ROW_LANES, 1>(values[i]);
      const long long column = tile_column(first_column, i);
      if (row_lane() == 0 && column < arguments.columns) {
        store_rounded(sums + group * arguments.columns + column, values[i]);
      }
    }
  };
  if constexpr (WANTS_DWEIGHT) write_sums(dweight_sums, arguments.dweight);
  if constexpr (WANTS_DBIAS) write_sums(dbias_sums, arguments.dbias);
}
