// Instance, group and batch norm from finished statistics: y = activate((x - mean) * rstd * weight + bias). Reads x,
// again where it was read for the statistics (from L2, where it is still there), and writes y.
//
// Where the statistics are GIVEN (evaluation of a batch norm), they are running_mean and running_var, and this is the
// only launch.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "channel_tile.cuh"
#include "cache_hints.cuh"
#include "channel_split_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "set_statistics.cuh"
#include "channel_finish.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const RUNNING_MEAN_TYPE* running_mean;
  const RUNNING_VARIANCE_TYPE* running_var;
  X_TYPE* y;
  Compute* mean;  // [sets]; results where the statistics are GIVEN, null where they are not asked for
  const Compute* mean_remainder;  // what the rounding of the mean lost
  Compute* rstd;
  long long channels;  // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS
  long long channels_per_set;
  long long points;  // a multiple of POINT_VECTOR
  long long run_points;  // where PEELED
  long long splits;
  long long points_per_split;  // a multiple of TILE_POINTS
  long long point_sizes[POINT_DIMS];
  long long x_sample_stride;
  long long x_channel_stride;
  long long x_point_strides[POINT_DIMS];
  long long y_sample_stride;
  long long y_channel_stride;
  long long y_point_strides[POINT_DIMS];
  double eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_split_forward(const Arguments arguments) {
  const Chunk chunk = chunk_of_block(block_from_the_end(), arguments.channels, arguments.points, arguments.splits,
                                     arguments.points_per_split);
  const X_TYPE* x =
      kept_in_l2<KEPT_IN_L2>(arguments.x) + chunk.offset(arguments.x_sample_stride, arguments.x_channel_stride);
  X_TYPE* y = arguments.y + chunk.offset(arguments.y_sample_stride, arguments.y_channel_stride);

  const Runs runs = runs_of(x, arguments.run_points);
  const Edges edges = runs.edges_of(chunk, arguments.point_sizes, arguments.x_point_strides);
  Walk walk = walk_over(chunk, arguments.point_sizes), behind = walk;
  Vector<X_TYPE, VECTOR> values[UNROLL];
  const auto load_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(walk, arguments.x_point_strides);
      if ((whole.value || walk.left > 0) && spot.whole) values[i] = load<X_TYPE, VECTOR>(x + spot.offset);
      walk.advance(arguments.point_sizes);
    }
  };

  // What no launch before this one writes is on its way before they are done. But for the vectors of PEELED runs: the
  // code of a tile stands here once more then, and that would cost these 2 % of the time.
  const EdgeValues edge_values(edges, x);
  if constexpr (!PEELED) load_tile(Known<false>());
  Compute weight[CHANNEL_VECTOR], bias[CHANNEL_VECTOR];
  load_own_affine(chunk, arguments.weight, arguments.bias, weight, bias);
  const OwnSets sets(chunk, arguments.channels, arguments.channels_per_set);
  wait_for_earlier_launches();
  if (!chunk.there) return;

  const auto statistics_of = [&](int j) -> SetStatistics {
    if constexpr (GIVEN) {
      const long long channel = chunk.first_channel + channel_in_tile(j);
      const Compute mean = widen(arguments.running_mean[channel]);
      const Compute rstd = reciprocal_sqrt(widen(arguments.running_var[channel]) + static_cast<Compute>(arguments.eps));
      if (arguments.rstd != nullptr && chunk.split == 0 && tells_of(j)) {
        arguments.mean[channel] = mean;
        arguments.rstd[channel] = rstd;
      }
      return {mean, 0, rstd};
    } else {
      const long long set = sets[j];
      return {arguments.mean[set], arguments.mean_remainder[set], arguments.rstd[set]};
    }
  };
  const Finish finish(statistics_of, weight, bias);

  const auto finish_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(behind, arguments.y_point_strides);
      if ((whole.value || behind.left > 0) && spot.whole) store_global(y + spot.offset, finish.of(values[i]));
      behind.advance(arguments.point_sizes);
    }
  };
  if constexpr (!PEELED) finish_tile(Known<false>());
  take_tiles(walk, [&](auto whole) {
    load_tile(whole);
    finish_tile(whole);
  });
  edges.for_each([&](int i) { store(y + edges.offsets[i], finish.of(edge_values[i])); });
}
