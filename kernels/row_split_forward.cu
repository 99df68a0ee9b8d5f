// Layer norm and RMS norm from finished statistics: y = activate((x - mean) * rstd * weight + bias), the last launch
// for rows that no block can hold. Reads x (or residual_out) a second time, from L2 where it is still there, and writes
// y. One block a chunk of columns.
//
// Where a row has few chunks, each block MERGES their statistics itself, as split_merge would: a launch less.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "strides.cuh"
#include "row_cut.cuh"
#include "row_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "set_statistics.cuh"
#include "channel_merge.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const double* chunk_means;       // [rows][splits], where MERGES
  const double* chunk_deviations;  // likewise
  Compute* mean;                   // where MERGES, null if it is not asked for; so is rstd
  const Compute* mean_remainder;   // what the rounding of the mean lost; not where MERGES
  Compute* rstd;
  X_TYPE* y;
  long long rows;
  long long columns;  // a multiple of VECTOR, or PEELED
  long long splits;
  long long columns_per_split;  // a multiple of TILE_COLUMNS
  long long row_sizes[ROW_DIMS];
  long long column_sizes[COLUMN_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long x_column_strides[COLUMN_DIMS];
  long long y_row_strides[ROW_DIMS];
  long long y_column_strides[COLUMN_DIMS];
  double eps;
};

// Whether the vectors of a tile are finished together: their weights are all on their way before the first is stored,
// which no load overtakes. 10 rows of 10,000,000 float32 numbers take 0.97 of the time so on an H200, 2 of 6,000,000
// with a residual 0.96; but rows that begin anywhere 1.03, and sixteen-bit ones 1.06 to 1.15, for want of registers. Of
// few rows, where blocks MERGE, all of these run at once, with as many as they have.
constexpr bool TOGETHER = sizeof(X_TYPE) == 4 && VECTOR == 4 && !PEELED && !MERGES;

// The statistics of a row from those of its chunks, in all threads of the block.
__device__ __forceinline__ SetStatistics merged_row(const Arguments& arguments, const Chunk& chunk) {
  static_assert(!MERGES || ROW_LANES == 1);
  __shared__ double scratch[2 * THREADS / 32];
  const long long first = chunk.row * arguments.splits;
  const double pivot = arguments.chunk_means[first];
  const auto for_each_chunk = [&](auto use) {
    for (int split = threadIdx.x; split < arguments.splits; split += THREADS) {
      const long long left = arguments.columns - split * arguments.columns_per_split;
      use(static_cast<double>(min(left, arguments.columns_per_split)), arguments.chunk_means[first + split],
          arguments.chunk_deviations[first + split]);
    }
  };
  const Moments moments = merged<THREADS>(1 / static_cast<double>(arguments.columns), pivot, scratch, for_each_chunk);
  const SetStatistics row = set_statistics_of(moments.mean, moments.variance, arguments.eps);
  if (threadIdx.x == 0 && chunk.split == 0) {
    if (arguments.mean != nullptr) arguments.mean[chunk.row] = row.mean;
    if (arguments.rstd != nullptr) arguments.rstd[chunk.row] = row.rstd;
  }
  return row;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_split_forward(const Arguments arguments) {
  const Chunk chunk =
      chunk_of_block(block_from_the_end(), arguments.splits, arguments.columns_per_split, arguments.columns);
  const bool in_rows = chunk.row < arguments.rows;
  const auto x_offset = [&](int column) {
    return offset_of(chunk.first_column + column, arguments.column_sizes, arguments.x_column_strides);
  };
  const auto y_offset = [&](int column) {
    return offset_of(chunk.first_column + column, arguments.column_sizes, arguments.y_column_strides);
  };
  const X_TYPE* x = arguments.x + offset_of(chunk.row, arguments.row_sizes, arguments.x_row_strides);
  X_TYPE* y = arguments.y + offset_of(chunk.row, arguments.row_sizes, arguments.y_row_strides);
  const Way way = way_over(chunk, x + x_offset(0), in_rows);

  Vector<X_TYPE, VECTOR> values[UNROLL];
  const auto load_tile = [&](int tile) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (way.has(tile, i)) values[i] = load<X_TYPE, VECTOR>(x + x_offset(way.column(tile, i)));
    }
  };
  // What no launch before this one writes may be on its way before they are done.
  if constexpr (!X_IS_WRITTEN) load_tile(0);
  Vector<X_TYPE, 1> edge = {};
  if (!X_IS_WRITTEN && way.has_edge()) edge = load<X_TYPE, 1>(x + x_offset(way.edge_column()));
  wait_for_earlier_launches();
  if (X_IS_WRITTEN && way.has_edge()) edge = load<X_TYPE, 1>(x + x_offset(way.edge_column()));

  SetStatistics row = {};
  if constexpr (MERGES) {
    row = merged_row(arguments, chunk);
  } else if (in_rows) {
    row = {arguments.mean[chunk.row], arguments.mean_remainder[chunk.row], arguments.rstd[chunk.row]};
  }
  const auto load_affine_at = [&](int column, auto& weight, auto& bias) {
    const long long at = chunk.first_column + column;
    load_affine_anywhere<PEELED>(arguments.weight + at, arguments.bias + at, weight, bias);
  };
  const auto finish_with = [&](const auto& weight, const auto& bias, const auto& numbers, int column) {
    store(y + y_offset(column), normalized(numbers, row.mean, row.mean_remainder, row.rstd, weight, bias));
  };
  const auto finish = [&](const auto& numbers, int column) {
    constexpr int COUNT = sizeof(numbers) / sizeof(X_TYPE);
    Compute weight[COUNT], bias[COUNT];
    load_affine_at(column, weight, bias);
    finish_with(weight, bias, numbers, column);
  };
  for (int tile = 0; tile < way.tiles(); ++tile) {
    if (X_IS_WRITTEN || tile > 0) load_tile(tile);
    if constexpr (TOGETHER) {
      Compute weight[UNROLL][VECTOR], bias[UNROLL][VECTOR];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (way.has(tile, i)) load_affine_at(way.column(tile, i), weight[i], bias[i]);
      }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (way.has(tile, i)) finish_with(weight[i], bias[i], values[i], way.column(tile, i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (way.has(tile, i)) finish(values[i], way.column(tile, i));
      }
    }
  }
  if (way.has_edge()) finish(edge, way.edge_column());
}
