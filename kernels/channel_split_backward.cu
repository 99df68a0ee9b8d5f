// The gradient of x of instance, group and batch norm, from finished sums. With xhat = (x - mean) * rstd, dz = dy times
// the derivative of the activation and g = dz * weight: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), the means
// over what the statistics were taken over. Where the statistics were GIVEN, they are constants: dx = rstd * g.
//
// Reads x and dy, again where they were read for the sums (from L2, where they are still there), and writes dx.
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
  const Compute* means;  // [2][sets]: of g, of g * xhat
  X_TYPE* dx;
  long long sets;
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
  long long dx_sample_stride;
  long long dx_channel_stride;
  long long dx_point_strides[POINT_DIMS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_split_backward(const Arguments arguments) {
  const Chunk chunk = chunk_of_block(block_from_the_end(), arguments.channels, arguments.points, arguments.splits,
                                     arguments.points_per_split);
  const X_TYPE* dy = arguments.dy + chunk.offset(arguments.dy_sample_stride, arguments.dy_channel_stride);
  const X_TYPE* x = arguments.x + chunk.offset(arguments.x_sample_stride, arguments.x_channel_stride);
  X_TYPE* dx = arguments.dx + chunk.offset(arguments.dx_sample_stride, arguments.dx_channel_stride);

  const Runs runs = runs_of(x, arguments.run_points);
  const Edges edges = runs.edges_of(chunk, arguments.point_sizes, arguments.x_point_strides);
  Walk walk = walk_over(chunk, arguments.point_sizes), behind = walk;
  Vector<X_TYPE, VECTOR> dy_values[UNROLL], x_values[UNROLL];
  const auto load_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(walk, arguments.x_point_strides);
      if ((whole.value || walk.left > 0) && spot.whole) {
        dy_values[i] = load<X_TYPE, VECTOR>(dy + (PEELED ? spot.offset : walk.offset(arguments.dy_point_strides)));
        x_values[i] = load<X_TYPE, VECTOR>(x + spot.offset);
      }
      walk.advance(arguments.point_sizes);
    }
  };

  // What no launch before this one writes is on its way before they are done. But for the vectors of PEELED runs: the
  // code of a tile stands here once more then, and that would cost these 2 % of the time.
  const EdgeValues x_edges(edges, x), dy_edges(edges, dy);
  if constexpr (!PEELED) load_tile(Known<false>());
  Compute weight[CHANNEL_VECTOR], bias[CHANNEL_VECTOR];
  load_own_affine(chunk, arguments.weight, arguments.bias, weight, bias);
  const OwnSets sets(chunk, arguments.channels, arguments.channels_per_set);
  wait_for_earlier_launches();
  if (!chunk.there) return;

  // What is the same for all points is put together: but for the rstd in xhat, whose square could leave the range of
  // float.
  Compute mean[CHANNEL_VECTOR], rstd[CHANNEL_VECTOR], offsets[CHANNEL_VECTOR], slopes[CHANNEL_VECTOR];
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    const long long set = sets[j];
    mean[j] = arguments.mean[set];
    rstd[j] = arguments.rstd[set];
    offsets[j] = GIVEN ? 0 : -arguments.means[set] * rstd[j];
    slopes[j] = GIVEN ? 0 : -arguments.means[arguments.sets + set] * rstd[j];
  }
  const auto dx_of = [&](Compute x_value, Compute dy_value, int own) {
    const Gradient gradient = gradient_of(x_value, dy_value, mean[own], rstd[own], weight[own], bias[own]);
    return gradient.g * rstd[own] + (GIVEN ? 0 : gradient.xhat * slopes[own] + offsets[own]);
  };

  const auto finish_tile = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const Spot spot = runs.spot(behind, arguments.dx_point_strides);
      if ((whole.value || behind.left > 0) && spot.whole) {
        Compute results[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          results[j] = dx_of(widen(x_values[i], j), widen(dy_values[i], j), channel_of(j));
        }
        store_global(dx + spot.offset, rounded<X_TYPE>(results));
      }
      behind.advance(arguments.point_sizes);
    }
  };
  if constexpr (!PEELED) finish_tile(Known<false>());
  take_tiles(walk, [&](auto whole) {
    load_tile(whole);
    finish_tile(whole);
  });
  edges.for_each([&](int i) {
    const Compute result[1] = {dx_of(widen(x_edges[i], 0), widen(dy_edges[i], 0), 0)};
    store(dx + edges.offsets[i], rounded<X_TYPE>(result));
  });
}
