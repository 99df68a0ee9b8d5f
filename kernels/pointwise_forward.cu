// An activation of every number: y = activate(x + bias), the sum in Compute.
//
// Moves x once in and y once out. A thread reads all of a turn before it computes, so that STEPS vectors are in flight;
// where there is a bias it takes several turns, since the bias is read once.
#include "types.cuh"
#include "strides.cuh"
#include "activation.cuh"
#include "cache_hints.cuh"
#include "pointwise.cuh"

struct Arguments {
  const X_TYPE* x;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  long long rows;
  long long columns;  // a multiple of VECTOR
  long long rest;     // numbers behind the rows
  long long tiles;
  long long groups;
  long long row_sizes[ROW_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long y_row_strides[ROW_DIMS];
  long long x_column_stride;
  long long y_column_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) pointwise_forward(const Arguments arguments) {
  const Place place = place_of_thread(arguments.tiles);
  if (place.column >= arguments.columns) return;
  const X_TYPE* x = kept_in_l2<KEPT_IN_L2>(arguments.x) + column_offset(place.column, arguments.x_column_stride);
  X_TYPE* y = arguments.y + column_offset(place.column, arguments.y_column_stride);
  Compute bias[VECTOR];
  if constexpr (HAS_BIAS) widen_all(load_in_pieces<VECTOR, BIAS_ACCESS>(arguments.bias + place.column), bias);

  const auto take_turn = [&](long long first_row, auto whole) {
    Vector<X_TYPE, VECTOR> values[STEPS];
    int counts[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const long long row = first_row + i * ROW_LANES;
      counts[i] = whole.value ? VECTOR : count_at(row, place.column, arguments.rows, arguments.rest);
      load_some(x + offset_of(row, arguments.row_sizes, arguments.x_row_strides), counts[i], values[i]);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const long long row = first_row + i * ROW_LANES;
      Compute z[VECTOR];
      widen_all(values[i], z);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) z[j] = HAS_BIAS ? z[j] + bias[j] : z[j];
      activate_all(z);
      store_some(y + offset_of(row, arguments.row_sizes, arguments.y_row_strides), counts[i],
                 rounded<X_TYPE>(z));
    }
  };
  const long long distance = arguments.groups * TURN_ROWS;
  long long first_row = place.first_row;
  for (; is_whole(first_row, arguments.rows); first_row += distance) take_turn(first_row, Known<true>());
  if (first_row < arguments.rows + RUN) take_turn(first_row, Known<false>());
}
