// The sums over one chunk of points of each channel that the gradients need: of dz, which is dy times the derivative of
// the activation, and of dz * xhat (the first of three launches: channel_split_gradient_sums,
// channel_split_gradient_merge, channel_split_backward). Reads x and dy once.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "channel_tile.cuh"
#include "channel_split_tile.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"

struct Arguments {
  const X_TYPE* dy;
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;  // [sets]
  const Compute* rstd;
  Compute* sums;  // [samples][splits][2][channels]: of dz, of dz * xhat
  long long channels;  // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS
  long long channels_per_set;
  long long points;  // a multiple of POINT_VECTOR
  long long run_points;  // where PEELED
  long long splits;
  long long points_per_split;  // a multiple of TILE_POINTS
  long long point_sizes[POINT_DIMS];
  long long dy_sample_stride;
  long long dy_channel_stride;
  long long dy_point_strides[POINT_DIMS];
  long long x_sample_stride;
  long long x_channel_stride;
  long long x_point_strides[POINT_DIMS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    channel_split_gradient_sums(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  const Chunk chunk =
      chunk_of_block(blockIdx.x, arguments.channels, arguments.points, arguments.splits, arguments.points_per_split);
  const X_TYPE* dy = arguments.dy + chunk.offset(arguments.dy_sample_stride, arguments.dy_channel_stride);
  const X_TYPE* x = arguments.x + chunk.offset(arguments.x_sample_stride, arguments.x_channel_stride);

  Compute weight[CHANNEL_VECTOR] = {}, bias[CHANNEL_VECTOR] = {}, mean[CHANNEL_VECTOR] = {}, rstd[CHANNEL_VECTOR] = {};
  if (chunk.there) {
    // The weight counts only for what the activation was given.
    if constexpr (activation != Activation::none) {
      load_own_affine(chunk, arguments.weight, arguments.bias, weight, bias);
    }
    const OwnSets sets(chunk, arguments.channels, arguments.channels_per_set);
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      mean[j] = arguments.mean[sets[j]];
      rstd[j] = arguments.rstd[sets[j]];
    }
  }

  const Runs runs = runs_of(x, arguments.run_points);
  const Edges edges = runs.edges_of(chunk, arguments.point_sizes, arguments.x_point_strides);
  const EdgeValues x_edges(edges, x), dy_edges(edges, dy);
  Walk walk = walk_over(chunk, arguments.point_sizes);
  Compute sums[2 * CHANNEL_VECTOR] = {};
  const auto add = [&](Compute x_value, Compute dy_value, int own, Compute (&parts)[2 * CHANNEL_VECTOR]) {
    const Gradient gradient = gradient_of(x_value, dy_value, mean[own], rstd[own], weight[own], bias[own]);
    parts[own] += gradient.dz;
    parts[CHANNEL_VECTOR + own] += gradient.dz * gradient.xhat;
  };
  take_tiles(walk, [&](auto whole) {
    Vector<X_TYPE, VECTOR> dy_values[UNROLL], x_values[UNROLL];
    bool there[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(walk, arguments.x_point_strides);
      there[i] = (whole.value || walk.left > 0) && spot.whole;
      if (there[i]) {
        dy_values[i] = load<X_TYPE, VECTOR>(dy + (PEELED ? spot.offset : walk.offset(arguments.dy_point_strides)));
        x_values[i] = load<X_TYPE, VECTOR>(x + spot.offset);
      }
      walk.advance(arguments.point_sizes);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (!there[i]) continue;
      add_vector<PER_CHANNEL>(sums, [&](int j, Compute (&parts)[2 * CHANNEL_VECTOR]) {
        add(widen(x_values[i], j), widen(dy_values[i], j), channel_of(j), parts);
      });
    }
  });
  edges.for_each([&](int i) { add(widen(x_edges[i], 0), widen(dy_edges[i], 0), 0, sums); });
  sum_over_points(sums, scratch);

  if (!chunk.there) return;
  Compute* target =
      arguments.sums + (chunk.sample * arguments.splits + chunk.split) * 2 * arguments.channels + chunk.first_channel;
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    if (!tells_of(j)) continue;
    target[channel_in_tile(j)] = sums[j];
    target[arguments.channels + channel_in_tile(j)] = sums[CHANNEL_VECTOR + j];
  }
}
