// Gradients of layer norm and RMS norm from finished row sums, for rows that no block can hold: dx, and the sums for
// dweight and dbias (the formulas stand in row_block_backward.cu). Reads x and dy a second time, and dresidual_out, and
// writes dx.
//
// A block keeps one tile of columns and goes down the rows of its group, so the sums of its columns stay in registers;
// block b, counted from the end, takes tile b % tiles of group b / tiles.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "strides.cuh"
#include "row_tile.cuh"
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
  const Compute* sums;  // [2][rows]: of g, of g * xhat
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [groups][columns]: partial sums, or the finished ones where there is one group
  DBIAS_TYPE* dbias;
  long long rows;
  long long columns;  // a multiple of VECTOR
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_split_backward(const Arguments arguments) {
  let_next_launch_begin();
  const unsigned block = block_from_the_end();
  const long long group = block / arguments.tiles, first_column = block % arguments.tiles * TILE_COLUMNS;
  const long long first_row = group * arguments.rows_per_group, group_end = first_row + arguments.rows_per_group;
  const long long end_row = group_end < arguments.rows ? group_end : arguments.rows;
  const Compute scale = 1 / static_cast<Compute>(arguments.columns);
  wait_for_earlier_launches();

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

  for (long long row = first_row + row_lane(); row < end_row; row += ROW_LANES) {
    const X_TYPE* x = arguments.x + offset_of(row, arguments.row_sizes, arguments.x_row_strides);
    const X_TYPE* dy = arguments.dy + offset_of(row, arguments.row_sizes, arguments.dy_row_strides);
    const Compute mean = CENTERED ? arguments.mean[row] : 0, rstd = arguments.rstd[row];
    Vector<X_TYPE, VECTOR> x_values[UNROLL], dy_values[UNROLL], added[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (tile_column(first_column, i) < arguments.columns) {
        x_values[i] = load<X_TYPE, VECTOR>(x + x_offsets[i]);
        dy_values[i] = load<X_TYPE, VECTOR>(dy + dy_offsets[i]);
      }
    }
    if constexpr (HAS_DRESIDUAL) {
      const X_TYPE* dresidual_out =
          arguments.dresidual_out + offset_of(row, arguments.row_sizes, arguments.dresidual_out_row_strides);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (tile_column(first_column, i) < arguments.columns) {
          added[i] = load<X_TYPE, VECTOR>(dresidual_out + added_offsets[i]);
        }
      }
    }
    X_TYPE* dx = nullptr;
    Compute mean_g = 0, mean_gx = 0;
    if constexpr (WANTS_DX) {
      dx = arguments.dx + offset_of(row, arguments.row_sizes, arguments.dx_row_strides);
      if constexpr (CENTERED) mean_g = arguments.sums[row] * scale;
      mean_gx = arguments.sums[arguments.rows + row] * scale;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (tile_column(first_column, i) < arguments.columns) {
        Compute results[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const Gradient gradient =
              gradient_of(widen(x_values[i], j), widen(dy_values[i], j), mean, rstd, weight[i][j], bias[i][j]);
          if constexpr (WANTS_DWEIGHT) dweight_sums[i][j] += gradient.dz * gradient.xhat;
          if constexpr (WANTS_DBIAS) dbias_sums[i][j] += gradient.dz;
          results[j] = (gradient.g - mean_g - gradient.xhat * mean_gx) * rstd;
          if constexpr (HAS_DRESIDUAL) results[j] += widen(added[i], j);
        }
        if constexpr (WANTS_DX) store(dx + dx_offsets[i], rounded<X_TYPE>(results));
      }
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
