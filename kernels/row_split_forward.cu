// Layer norm and RMS norm from finished statistics: y = activate((x - mean) * rstd * weight + bias), the last launch
// for rows that no block can hold. Reads x (or residual_out) a second time, from L2 where it is still there, and writes
// y. One block a chunk of columns.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "strides.cuh"
#include "row_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* mean_remainder;  // what the rounding of the mean lost
  const Compute* rstd;
  X_TYPE* y;
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long splits;
  long long columns_per_split;  // a multiple of TILE_COLUMNS
  long long row_sizes[ROW_DIMS];
  long long column_sizes[COLUMN_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long x_column_strides[COLUMN_DIMS];
  long long y_row_strides[ROW_DIMS];
  long long y_column_strides[COLUMN_DIMS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_split_forward(const Arguments arguments) {
  const Chunk chunk =
      chunk_of_block(block_from_the_end(), arguments.splits, arguments.columns_per_split, arguments.columns);
  wait_for_earlier_launches();
  if (chunk.row >= arguments.rows) return;
  const X_TYPE* x = arguments.x + offset_of(chunk.row, arguments.row_sizes, arguments.x_row_strides);
  X_TYPE* y = arguments.y + offset_of(chunk.row, arguments.row_sizes, arguments.y_row_strides);
  const Compute mean = arguments.mean[chunk.row], mean_remainder = arguments.mean_remainder[chunk.row];
  const Compute rstd = arguments.rstd[chunk.row];

  for (long long first = chunk.first_column; first < chunk.end_column; first += TILE_COLUMNS) {
    Vector<X_TYPE, VECTOR> values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const long long column = tile_column(first, i);
      if (column < chunk.end_column) {
        values[i] = load<X_TYPE, VECTOR>(x + offset_of(column, arguments.column_sizes, arguments.x_column_strides));
      }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const long long column = tile_column(first, i);
      if (column < chunk.end_column) {
        Compute weight[VECTOR], bias[VECTOR];
        load_affine<VECTOR>(arguments.weight + column, arguments.bias + column, weight, bias);
        store(y + offset_of(column, arguments.column_sizes, arguments.y_column_strides),
              normalized(values[i], mean, mean_remainder, rstd, weight, bias));
      }
    }
  }
}
