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
#include "channel_split_tile.cuh"
#include "set_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  double* chunk_means;       // [samples][splits][channels]
  double* chunk_deviations;  // likewise, sums of squared differences from the chunk's mean
  Compute* mean;             // [samples][channels], where ONE_CHUNK; so are the next two
  Compute* mean_remainder;
  Compute* rstd;
  long long channels;  // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS
  long long points;    // a multiple of POINT_VECTOR
  long long splits;
  long long points_per_split;  // a multiple of TILE_POINTS
  long long point_sizes[POINT_DIMS];
  long long x_sample_stride;
  long long x_channel_stride;
  long long x_point_strides[POINT_DIMS];
  double eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_split_statistics(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[3 * SUM_SCRATCH];
  const Chunk chunk =
      chunk_of_block(blockIdx.x, arguments.channels, arguments.points, arguments.splits, arguments.points_per_split);
  const X_TYPE* x = arguments.x + chunk.offset(arguments.x_sample_stride, arguments.x_channel_stride);

  Walk walk = walk_over(chunk, arguments.point_sizes);
  Vector<X_TYPE, VECTOR> values[UNROLL];
  bool there[UNROLL];
  const auto load_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      there[i] = whole.value || walk.left > 0;
      if (there[i]) values[i] = load<X_TYPE, VECTOR>(x + walk.offset(arguments.x_point_strides));
      walk.advance(arguments.point_sizes);
    }
  };

  // The pivots: the means of the first tile.
  load_tile(Known<false>());
  Compute pivots[CHANNEL_VECTOR] = {};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) pivots[channel_of(j)] += there[i] ? widen(values[i], j) : 0;
  }
  sum_over_points(pivots, scratch);
  const long long tile_points = min(chunk.points(), static_cast<long long>(TILE_POINTS));
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) pivots[j] /= static_cast<Compute>(tile_points);

  // The sums of the differences from them, then those of their squares.
  Compute sums[2 * CHANNEL_VECTOR] = {};
  const auto add_tile = [&] {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      forget_widened(values[i]);
      if (!there[i]) continue;
      add_vector(sums, [&](int j, Compute (&parts)[2 * CHANNEL_VECTOR]) {
        const int own = channel_of(j);
        const Compute difference = widen(values[i], j) - pivots[own];
        parts[own] += difference;
        parts[CHANNEL_VECTOR + own] += difference * difference;
      });
    }
  };
  add_tile();
  take_tiles(walk, [&](auto whole) {
    load_tile(whole);
    add_tile();
  });
  sum_over_points(sums, scratch + SUM_SCRATCH);

  if (!chunk.there) return;
  const double count = static_cast<double>(chunk.points());
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    if (!tells_of(j)) continue;
    const double shift = sums[j] / count, mean = pivots[j] + shift;
    const double deviation = sums[CHANNEL_VECTOR + j] - shift * sums[j];
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
    }
  }
}
