// Instance, group and batch norm of slabs that fit into the shared memory of a block, or of the blocks of a cluster
// (what cluster.cuh calls a row is a slab here): y = activate((x - mean) * rstd * weight + bias), moving x once in and
// y once out. The blocks of a slab tell each other the statistics of their parts, and each merges all into those of the
// slab's sets of channels.
#include "types.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "channel_slab.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "channel_merge.cuh"
#include "channel_running.cuh"
#include "channel_statistics.cuh"
#include "channel_slab_statistics.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  Compute* mean;  // [sets]; null where the statistics are not asked for; so is rstd
  Compute* rstd;
  RUNNING_MEAN_TYPE* running_mean;
  RUNNING_VARIANCE_TYPE* running_var;
  long long channels;          // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;            // a multiple of POINT_VECTOR
  long long points_per_block;  // likewise; the last block of a slab may have fewer, but has some
  long long point_sizes[POINT_DIMS];
  long long x_sample_stride;
  long long x_channel_stride;
  long long x_point_strides[POINT_DIMS];
  long long y_sample_stride;
  long long y_channel_stride;
  long long y_point_strides[POINT_DIMS];
  double eps;
  double kept;
  double taken;
};

extern "C" __global__ void SHARES_ROWS __launch_bounds__(THREADS, MIN_BLOCKS)
    channel_slab_forward(const Arguments arguments) {
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Exchange<NUMBERS * TILE_CHANNELS, 1> exchange;
  __shared__ SetStatistics sets[TILE_SETS];
  __shared__ Moments moments[UPDATES_RUNNING ? TILE_SETS : 1];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];

  const Chunk part = chunk_at(blockIdx.x / BLOCKS_PER_ROW, rank_in_row(), arguments.channels, arguments.points,
                              arguments.points_per_block);
  const X_TYPE* x = arguments.x + part.offset(arguments.x_sample_stride, arguments.x_channel_stride);
  const Walk begin = walk_over(part, arguments.point_sizes);
  const int count = begin.left;
  const Slots slots = {staged};
  Walk walk = begin;
#pragma unroll 4
  for (int i = 0; i < VECTORS; ++i) {
    if (i < count) slots.fill(i, x + walk.offset(arguments.x_point_strides));
    copy_async_commit();
    walk.advance(arguments.point_sizes);
  }
  begin_exchanges(exchange);
  Compute weight[CHANNEL_VECTOR] = {}, bias[CHANNEL_VECTOR] = {};
  if (part.there) {
    load_own_affine(part, arguments.weight, arguments.bias, weight, bias);
  }

  // Statistics of the part, then of the sets.
  constexpr int PIVOT = (VECTORS + 3) / 4;
  sum_part(part, slots, VECTORS, PIVOT, count, [](int i) { return i; }, [](int) { copy_async_commit(); }, scratch, own);
  const Compute(&everyones)[BLOCKS_PER_ROW][NUMBERS * TILE_CHANNELS] =
      exchange_shared<THREADS>(exchange, own, thread_in_block());
  const double set_count = static_cast<double>(arguments.points * CHANNELS_PER_SET);
  const int lane = thread_in_block() % SET_LANES;
#pragma unroll
  for (int first = 0; first < TILE_SETS; first += THREADS / SET_LANES) {
    const int set = first + thread_in_block() / SET_LANES;
    const bool there = set < TILE_SETS;
    const int first_channel = there ? set * CHANNELS_PER_SET : 0;
    const Moments of_set = merged<SET_LANES>(set_count, everyones[0][first_channel], nullptr, [&](auto use) {
      for (int i = lane; i < BLOCKS_PER_ROW * CHANNELS_PER_SET; i += SET_LANES) {
        const int block = i / CHANNELS_PER_SET;
        const long long left = arguments.points - block * arguments.points_per_block;
        const Compute* numbers = everyones[block] + first_channel + i % CHANNELS_PER_SET;
        use(static_cast<double>(min(left, arguments.points_per_block)),
            static_cast<double>(numbers[0]) + numbers[TILE_CHANNELS], static_cast<double>(numbers[2 * TILE_CHANNELS]));
      }
    });
    if (!there || lane > 0) continue;
    sets[set] = set_statistics_of(of_set, arguments.eps);
    if constexpr (UPDATES_RUNNING) moments[set] = of_set;
  }
  __syncthreads();

  // Finish and store.
  const Finish finish(sets, weight, bias);
  X_TYPE* y = arguments.y + part.offset(arguments.y_sample_stride, arguments.y_channel_stride);
  walk = begin;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    store_global(y + walk.offset(arguments.y_point_strides), finish.of(slots.get(i)));
    walk.advance(arguments.point_sizes);
  }

  // What else is wanted of the statistics, when all else is on its way.
  if (rank_in_row() > 0) return;
  for (int set = thread_in_block(); set < TILE_SETS; set += THREADS) {
    const long long channel = part.first_channel + set * CHANNELS_PER_SET;
    if (channel >= arguments.channels) return;
    const long long place = (part.sample * arguments.channels + channel) / CHANNELS_PER_SET;
    if (arguments.rstd != nullptr) {
      arguments.mean[place] = sets[set].mean;
      arguments.rstd[place] = sets[set].rstd;
    }
    if constexpr (UPDATES_RUNNING) {
      RunningUpdate{arguments.kept, arguments.taken}.apply(moments[set], set_count, arguments.running_mean[place],
                                                           arguments.running_var[place]);
    }
  }
}
