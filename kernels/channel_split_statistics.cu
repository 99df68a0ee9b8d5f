// Mean and squared deviation of one chunk of points of each channel (the first of three launches:
// channel_split_statistics, split_merge, channel_split_forward); where a chunk is all that a mean is taken over
// (ONE_CHUNK), mean and rstd, and nothing is to be merged. Reads x once.
//
// The chunk's sums are taken of x - pivot, where the pivot is the mean of the chunk's first tile. A chunk has no more
// tiles than the plan allows, so that the first is no small part of it, and what cancels in the squared deviation is
// bounded: this is safe for channels far from zero, which plain sums of squares are not.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "channel_tile.cuh"
#include "cache_hints.cuh"
#include "channel_split_tile.cuh"
#include "set_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  double* chunk_means;       // [samples][splits][channels]
  double* chunk_deviations;  // likewise, sums of squared differences from the chunk's mean
  double* chunk_counts;      // likewise, of points, where PEELED: of places there are more
  Compute* mean;             // [samples][channels], where ONE_CHUNK; so are the next two
  Compute* mean_remainder;
  Compute* rstd;
  long long channels;  // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS
  long long points;    // a multiple of POINT_VECTOR
  long long run_points;  // where PEELED
  long long splits;
  long long points_per_split;  // a multiple of TILE_POINTS
  long long point_sizes[POINT_DIMS];
  long long x_sample_stride;
  long long x_channel_stride;
  long long x_point_strides[POINT_DIMS];
  double eps;
};

// What is summed of the numbers besides them and their squares: where PEELED, how many they are.
constexpr int COUNTS = PEELED;
constexpr int PIVOTS = CHANNEL_VECTOR + COUNTS, SUMS = 2 * CHANNEL_VECTOR + COUNTS;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_split_statistics(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[(3 + 2 * COUNTS) * SUM_SCRATCH];
  const Chunk chunk =
      chunk_of_block(blockIdx.x, arguments.channels, arguments.points, arguments.splits, arguments.points_per_split);
  const X_TYPE* x =
      kept_in_l2<KEPT_IN_L2>(arguments.x) + chunk.offset(arguments.x_sample_stride, arguments.x_channel_stride);

  const Runs runs = runs_of(x, arguments.run_points);
  const Edges edges = runs.edges_of(chunk, arguments.point_sizes, arguments.x_point_strides);
  const EdgeValues edge_values(edges, x);
  Walk walk = walk_over(chunk, arguments.point_sizes);
  Vector<X_TYPE, VECTOR> values[UNROLL];
  bool there[UNROLL];
  const auto load_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(walk, arguments.x_point_strides);
      there[i] = (whole.value || walk.left > 0) && spot.whole;
      if (there[i]) values[i] = load<X_TYPE, VECTOR>(x + spot.offset);
      walk.advance(arguments.point_sizes);
    }
  };

  // The pivots: the means of the first tile, and of all edges.
  load_tile(Known<false>());
  Compute pivots[PIVOTS] = {};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) pivots[channel_of(j)] += there[i] ? widen(values[i], j) : 0;
    if constexpr (PEELED) pivots[CHANNEL_VECTOR] += there[i] ? VECTOR : 0;
  }
  edges.for_each([&](int i) {
    pivots[0] += widen(edge_values[i], 0);
    pivots[CHANNEL_VECTOR] += 1;
  });
  sum_over_points(pivots, scratch);
  Compute tile_points = static_cast<Compute>(min(chunk.points(), static_cast<long long>(TILE_POINTS)));
  if constexpr (PEELED) tile_points = pivots[CHANNEL_VECTOR] > 0 ? pivots[CHANNEL_VECTOR] : 1;
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) pivots[j] /= tile_points;

  // The sums of the differences from them, then those of their squares.
  Compute sums[SUMS] = {};
  const auto add = [&](Compute value, int own, Compute (&parts)[SUMS]) {
    const Compute difference = value - pivots[own];
    parts[own] += difference;
    parts[CHANNEL_VECTOR + own] += difference * difference;
    if constexpr (PEELED) parts[2 * CHANNEL_VECTOR] += 1;
  };
  const auto add_tile = [&] {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      forget_widened(values[i]);
      if (!there[i]) continue;
      add_vector<PER_CHANNEL>(sums, [&](int j, Compute (&parts)[SUMS]) {
        add(widen(values[i], j), channel_of(j), parts);
      });
    }
  };
  add_tile();
  take_tiles(walk, [&](auto whole) {
    load_tile(whole);
    add_tile();
  });
  edges.for_each([&](int i) { add(widen(edge_values[i], 0), 0, sums); });
  sum_over_points(sums, scratch + (1 + COUNTS) * SUM_SCRATCH);

  if (!chunk.there) return;
  double count = static_cast<double>(chunk.points());
  // Places of a run's last vector may be all that a chunk has.
  if constexpr (PEELED) count = sums[2 * CHANNEL_VECTOR] > 0 ? sums[2 * CHANNEL_VECTOR] : 1;
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    if (!tells_of(j)) continue;
    const double shift = sums[j] / count, mean = pivots[j] + shift;
    const double deviation = not_negative(sums[CHANNEL_VECTOR + j] - shift * sums[j]);
    const long long channel = chunk.first_channel + channel_in_tile(j);
    if constexpr (ONE_CHUNK) {
      const long long place = chunk.sample * arguments.channels + channel;
      const SetStatistics statistics = set_statistics_of(mean, deviation / count, arguments.eps);
      arguments.mean[place] = statistics.mean;
      arguments.mean_remainder[place] = statistics.mean_remainder;
      arguments.rstd[place] = statistics.rstd;
    } else {
      const long long place = (chunk.sample * arguments.splits + chunk.split) * arguments.channels + channel;
      arguments.chunk_means[place] = mean;
      arguments.chunk_deviations[place] = deviation;
      if constexpr (PEELED) arguments.chunk_counts[place] = sums[2 * CHANNEL_VECTOR];
    }
  }
}
