// The gradient of an activation of every number: dx = dy * activate'(x + bias), and dbias = sum over rows of dx, before
// dx is rounded.
//
// Moves x and dy once in and dx once out. Where dbias is wanted there are only as many groups of blocks as run at once,
// and a block keeps the sums of its columns in registers: dbias costs one row of partial sums a group, which
// column_sums adds up in a fixed order.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "strides.cuh"
#include "activation.cuh"
#include "cache_hints.cuh"
#include "pointwise.cuh"

struct Arguments {
  const X_TYPE* dy;
  const X_TYPE* x;
  const BIAS_TYPE* bias;
  X_TYPE* dx;
  DBIAS_TYPE* dbias;  // [groups][columns]: partial sums, or the finished ones where there is one group
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long rest;     // numbers behind the rows
  long long tiles;
  long long groups;
  long long row_sizes[ROW_DIMS];
  long long dy_row_strides[ROW_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long dx_row_strides[ROW_DIMS];
  long long dy_column_stride;
  long long x_column_stride;
  long long dx_column_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) pointwise_backward(const Arguments arguments) {
  let_next_launch_begin();
  const Place place = place_of_thread(arguments.tiles);
  if (place.column >= arguments.columns) return;
  const X_TYPE* dy = kept_in_l2<KEPT_IN_L2>(arguments.dy) + column_offset(place.column, arguments.dy_column_stride);
  const X_TYPE* x = kept_in_l2<KEPT_IN_L2>(arguments.x) + column_offset(place.column, arguments.x_column_stride);
  X_TYPE* dx = nullptr;
  if constexpr (WANTS_DX) dx = arguments.dx + column_offset(place.column, arguments.dx_column_stride);
  Compute bias[VECTOR], dbias[VECTOR] = {};
  if constexpr (HAS_BIAS) widen_all(load_in_pieces<VECTOR, BIAS_ACCESS>(arguments.bias + place.column), bias);

  const auto take_turn = [&](long long first_row, auto whole) {
    Vector<X_TYPE, VECTOR> x_values[STEPS], dy_values[STEPS];
    int counts[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const long long row = first_row + i * ROW_LANES;
      counts[i] = whole.value ? VECTOR : count_at(row, place.column, arguments.rows, arguments.rest);
      load_some(x + offset_of(row, arguments.row_sizes, arguments.x_row_strides), counts[i], x_values[i]);
      load_some(dy + offset_of(row, arguments.row_sizes, arguments.dy_row_strides), counts[i], dy_values[i]);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const long long row = first_row + i * ROW_LANES;
      Compute z[VECTOR], gradient[VECTOR];
      widen_all(x_values[i], z);
      widen_all(dy_values[i], gradient);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        gradient[j] = activation_gradient(gradient[j], HAS_BIAS ? z[j] + bias[j] : z[j]);
        if constexpr (WANTS_DBIAS) dbias[j] += counts[i] > 0 ? gradient[j] : 0;
      }
      if constexpr (WANTS_DX) {
        store_some(dx + offset_of(row, arguments.row_sizes, arguments.dx_row_strides), counts[i],
                   rounded<X_TYPE>(gradient));
      }
    }
  };
  const long long distance = arguments.groups * TURN_ROWS;
  long long first_row = place.first_row;
  for (; is_whole(first_row, arguments.rows); first_row += distance) take_turn(first_row, Known<true>());
  if (first_row < arguments.rows + RUN) take_turn(first_row, Known<false>());

  if constexpr (WANTS_DBIAS) {
    if constexpr (ROW_LANES > 1) {
      // Add over the row lanes, one after the other.
      __shared__ Compute scratch[ROW_LANES][VECTOR][COLUMN_LANES];
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) scratch[threadIdx.y][j][threadIdx.x] = dbias[j];
      __syncthreads();
      if (threadIdx.y > 0) return;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
#pragma unroll 8
        for (int lane = 1; lane < ROW_LANES; ++lane) dbias[j] += scratch[lane][j][threadIdx.x];
      }
    }
    store_rounded(arguments.dbias + place.group * arguments.columns + place.column, dbias);
  }
}
