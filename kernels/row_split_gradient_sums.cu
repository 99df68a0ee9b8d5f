// The two sums along a row that dx needs, of g = dz * weight and of g * xhat, for one chunk of columns (for rows that
// no block can hold; column_sums then adds up the chunks, and row_split_backward finishes). Reads x and dy once.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "strides.cuh"
#include "row_cut.cuh"
#include "row_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* dy;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;
  const Compute* rstd;
  Compute* sums;  // [splits][2][rows]: of g, of g * xhat
  long long rows;
  long long columns;  // a multiple of VECTOR, or PEELED
  long long splits;
  long long columns_per_split;  // a multiple of TILE_COLUMNS
  long long row_sizes[ROW_DIMS];
  long long column_sizes[COLUMN_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long x_column_strides[COLUMN_DIMS];
  long long dy_row_strides[ROW_DIMS];
  long long dy_column_strides[COLUMN_DIMS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_split_gradient_sums(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[2 * THREADS / 32 * ROW_LANES];
  const Chunk chunk = chunk_of_block(blockIdx.x, arguments.splits, arguments.columns_per_split, arguments.columns);
  // Threads past the last row go along with nothing to add: the sums need every lane.
  const bool in_rows = chunk.row < arguments.rows;
  const auto x_offset = [&](int column) {
    return offset_of(chunk.first_column + column, arguments.column_sizes, arguments.x_column_strides);
  };
  const auto dy_offset = [&](int column) {
    return offset_of(chunk.first_column + column, arguments.column_sizes, arguments.dy_column_strides);
  };
  const X_TYPE* x = arguments.x + offset_of(chunk.row, arguments.row_sizes, arguments.x_row_strides);
  const X_TYPE* dy = arguments.dy + offset_of(chunk.row, arguments.row_sizes, arguments.dy_row_strides);
  const Way way = way_over(chunk, x + x_offset(0), in_rows);
  const Compute mean = CENTERED && in_rows ? arguments.mean[chunk.row] : 0;
  const Compute rstd = in_rows ? arguments.rstd[chunk.row] : 0;

  Compute sums[2] = {0, 0};
  const auto add = [&](const auto& x_values, const auto& dy_values, int column) {
    constexpr int COUNT = sizeof(x_values) / sizeof(X_TYPE);
    Compute weight[COUNT], bias[COUNT];
    const long long at = chunk.first_column + column;
    load_affine_anywhere<PEELED>(arguments.weight + at, arguments.bias + at, weight, bias);
    Compute part = 0, part_with_xhat = 0;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const Gradient gradient = gradient_of(widen(x_values, j), widen(dy_values, j), mean, rstd, weight[j], bias[j]);
      if constexpr (CENTERED) part += gradient.g;
      part_with_xhat += gradient.g * gradient.xhat;
    }
    sums[0] += part;
    sums[1] += part_with_xhat;
  };
  Vector<X_TYPE, 1> x_edge = {}, dy_edge = {};
  if (way.has_edge()) {
    x_edge = load<X_TYPE, 1>(x + x_offset(way.edge_column()));
    dy_edge = load<X_TYPE, 1>(dy + dy_offset(way.edge_column()));
  }
  for (int tile = 0; tile < way.tiles(); ++tile) {
    Vector<X_TYPE, VECTOR> x_values[UNROLL], dy_values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (way.has(tile, i)) {
        x_values[i] = load<X_TYPE, VECTOR>(x + x_offset(way.column(tile, i)));
        dy_values[i] = load<X_TYPE, VECTOR>(dy + dy_offset(way.column(tile, i)));
      }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (way.has(tile, i)) add(x_values[i], dy_values[i], way.column(tile, i));
    }
  }
  if (way.has_edge()) add(x_edge, dy_edge, way.edge_column());
  lane_sum<THREADS, ROW_LANES>(sums, scratch);

  if (threadIdx.x < ROW_LANES && in_rows) {
    arguments.sums[(chunk.split * 2 + 0) * arguments.rows + chunk.row] = sums[0];
    arguments.sums[(chunk.split * 2 + 1) * arguments.rows + chunk.row] = sums[1];
  }
}
