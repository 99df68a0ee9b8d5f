// Mean and squared deviation of one chunk of columns of a row, for rows that no block can hold (the first of three
// launches: row_split_statistics, split_merge, row_split_forward); where a row is ONE_CHUNK, its mean and rstd, and
// nothing is to be merged. Reads x once; with a residual, reads that too and writes residual_out = x + residual, which
// the rest works on. RMS norm (not CENTERED) has 0 for the mean.
//
// The chunk's sums are taken of x - pivot, where the pivot is the mean of the chunk's first tile. The plan gives a
// chunk so few tiles (_TILES_PER_CHUNK in cunorm/plan/row_split.py) that the first is no small part of it, and what
// cancels in the squared deviation is bounded: this is safe for rows far from zero, which plain sums of squares are
// not.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "strides.cuh"
#include "row_cut.cuh"
#include "row_tile.cuh"
#include "statistics.cuh"
#include "set_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  const X_TYPE* residual;
  X_TYPE* residual_out;
  double* chunk_means;       // [rows][splits]
  double* chunk_deviations;  // [rows][splits], sums of squared differences from the chunk's mean
  Compute* mean;             // [rows], where ONE_CHUNK; so are the next two
  Compute* mean_remainder;
  Compute* rstd;
  long long rows;
  long long columns;  // a multiple of VECTOR, or PEELED
  long long splits;
  long long columns_per_split;  // a multiple of TILE_COLUMNS
  long long row_sizes[ROW_DIMS];
  long long column_sizes[COLUMN_DIMS];
  long long x_row_strides[ROW_DIMS];
  long long x_column_strides[COLUMN_DIMS];
  long long residual_row_strides[ROW_DIMS];
  long long residual_column_strides[COLUMN_DIMS];
  long long residual_out_row_strides[ROW_DIMS];
  long long residual_out_column_strides[COLUMN_DIMS];
  double eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_split_statistics(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[3 * THREADS / 32 * ROW_LANES];
  const Chunk chunk = chunk_of_block(blockIdx.x, arguments.splits, arguments.columns_per_split, arguments.columns);
  const auto x_offset = [&](int column) {
    return offset_of(chunk.first_column + column, arguments.column_sizes, arguments.x_column_strides);
  };
  const X_TYPE* x = arguments.x + offset_of(chunk.row, arguments.row_sizes, arguments.x_row_strides);
  // Threads past the last row go along with nothing to add: the sums need every lane.
  const Way way = way_over(chunk, x + x_offset(0), chunk.row < arguments.rows);

  const X_TYPE* residual = nullptr;
  X_TYPE* residual_out = nullptr;
  if constexpr (HAS_RESIDUAL) {
    residual = arguments.residual + offset_of(chunk.row, arguments.row_sizes, arguments.residual_row_strides);
    residual_out =
        arguments.residual_out + offset_of(chunk.row, arguments.row_sizes, arguments.residual_out_row_strides);
  }
  // Those of the residual that are added to numbers of x which begin at a column.
  const auto load_residual = [&](auto& values, int column) {
    constexpr int COUNT = sizeof(values) / sizeof(X_TYPE);
    const long long at = chunk.first_column + column;
    values = load<X_TYPE, COUNT>(residual + offset_of(at, arguments.column_sizes, arguments.residual_column_strides));
  };
  // Makes what is normalized of numbers of x.
  const auto add_residual = [&](auto& values, const auto& residual_values, int column) {
    const long long at = chunk.first_column + column;
    values = sum_of(values, residual_values);
    store(residual_out + offset_of(at, arguments.column_sizes, arguments.residual_out_column_strides), values);
  };

  // All of a tile is on its way before the first of it is added and stored: loads do not overtake stores.
  Vector<X_TYPE, VECTOR> values[UNROLL], added[HAS_RESIDUAL ? UNROLL : 1];
  const auto load_tile = [&](int tile) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (!way.has(tile, i)) continue;
      values[i] = load<X_TYPE, VECTOR>(x + x_offset(way.column(tile, i)));
      if constexpr (HAS_RESIDUAL) load_residual(added[i], way.column(tile, i));
    }
    if constexpr (HAS_RESIDUAL) {
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (way.has(tile, i)) add_residual(values[i], added[i], way.column(tile, i));
      }
    }
  };

  // The pivot: the mean of the first tile and of the edges, or 0.
  Vector<X_TYPE, 1> edge = {}, added_edge;
  if (way.has_edge()) {
    edge = load<X_TYPE, 1>(x + x_offset(way.edge_column()));
    if constexpr (HAS_RESIDUAL) load_residual(added_edge, way.edge_column());
  }
  load_tile(0);
  if constexpr (HAS_RESIDUAL) {
    if (way.has_edge()) add_residual(edge, added_edge, way.edge_column());
  }
  Compute pivot = 0;
  if constexpr (CENTERED) {
    Compute sum[1] = {0};
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (way.has(0, i)) add_values(values[i], sum);
    }
    if (way.has_edge()) add_values(edge, sum);
    lane_sum<THREADS, ROW_LANES>(sum, scratch);
    const int vectors = min(way.cut.vectors, COLUMN_LANES * UNROLL);
    pivot = sum[0] / static_cast<Compute>(max(1, vectors * VECTOR + way.cut.edges()));
  }

  // The sums of the differences from the pivot, and of their squares.
  Compute sums[2] = {0, 0};
  if (way.has_edge()) add_differences(edge, pivot, sums);
  for (int tile = 0; tile < way.tiles(); ++tile) {
    if (tile > 0) load_tile(tile);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (way.has(tile, i)) add_differences(values[i], pivot, sums);
    }
  }
  lane_sum<THREADS, ROW_LANES>(sums, scratch + THREADS / 32 * ROW_LANES);

  if (threadIdx.x < ROW_LANES && chunk.row < arguments.rows) {
    const double count = static_cast<double>(chunk.columns), shift = sums[0] / count;
    const double mean = pivot + shift, deviation = not_negative(sums[1] - shift * sums[0]);
    if constexpr (ONE_CHUNK) {
      const SetStatistics row = set_statistics_of(mean, deviation / count, arguments.eps);
      arguments.mean[chunk.row] = row.mean;
      arguments.mean_remainder[chunk.row] = row.mean_remainder;
      arguments.rstd[chunk.row] = row.rstd;
    } else {
      arguments.chunk_means[chunk.row * arguments.splits + chunk.split] = mean;
      arguments.chunk_deviations[chunk.row * arguments.splits + chunk.split] = deviation;
    }
  }
}
