// Instance, group and batch norm of slabs that fit into the shared memory of a block, or of the blocks of a cluster
// (what cluster.cuh calls a row is a slab here): y = activate((x - mean) * rstd * weight + bias), moving x once in and
// y once out. The blocks of a slab tell each other the statistics of their parts, and each merges all into those of the
// slab's sets of channels.
#include "types.cuh"
#include "reduce.cuh"
#include "cluster.cuh"
#include "copy_async.cuh"
#include "cache_hints.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "channel_slab.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "channel_merge.cuh"
#include "channel_running.cuh"
#include "set_statistics.cuh"
#include "channel_finish.cuh"
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
  double set_share;  // one over how many numbers a set has
  double eps;
  double kept;
  double taken;
  double taken_variance;
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, MIN_BLOCKS)
    channel_slab_forward(const Arguments arguments) {
  __shared__ Compute scratch[2 * SUM_SCRATCH / SUMMED];
  __shared__ Compute own[NUMBERS * TILE_UNITS];
  __shared__ Exchange<NUMBERS * TILE_UNITS, 1> exchange;
  __shared__ SetStatistics sets[TILE_SETS];
  __shared__ Compute variances[UPDATES_RUNNING ? TILE_SETS : 1];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  start_mbarriers(exchange);
  cluster_arrive();

  const Chunk part = chunk_at(blockIdx.x / BLOCKS_PER_ROW, rank_in_row(), arguments.channels, arguments.points,
                              arguments.points_per_block);
  // Ahead of the numbers: behind them it would come last, and all wait for it.
  OwnAffine affine = {};
  affine.fetch(part, arguments.weight, arguments.bias);
  const Walk begin = walk_over(part, arguments.point_sizes);
  const int count = begin.left;
  const Slots slots = {staged};
  Path x = path_of(begin, part, arguments.x_sample_stride, arguments.x_channel_stride, arguments.x_point_strides);
  const auto fill = [&](int i) {
    if (i < count) {
      const X_TYPE* source = arguments.x + x.offset(arguments.x_point_strides);
      slots.fill(i, source);
      keep_in_l2<KEPT_IN_L2>(source);
    }
    copy_async_commit();
    x.advance(arguments.point_sizes);
  };
#pragma unroll 4
  for (int i = 0; i < IN_FLIGHT; ++i) fill(i);
  // The sets whose statistics this thread stores; running ones are on their way early.
  constexpr int OWNED_SETS = (TILE_SETS + THREADS - 1) / THREADS;
  const auto owns = [&](int set) {
    const long long channel = part.first_channel + set * CHANNELS_PER_SET;
    return rank_in_row() == 0 && set < TILE_SETS && channel < arguments.channels;
  };
  const auto place_of = [&](int set) {
    return (part.sample * arguments.channels + part.first_channel) / CHANNELS_PER_SET + set;
  };
  Running running[UPDATES_RUNNING ? OWNED_SETS : 1];
  if constexpr (UPDATES_RUNNING) {
#pragma unroll
    for (int i = 0; i < OWNED_SETS; ++i) {
      const int set = thread_in_block() + i * THREADS;
      if (!owns(set)) continue;
      const long long place = place_of(set);
      running[i] = {arguments.running_mean[place], arguments.running_var[place]};
    }
  }

  Path y = path_of(begin, part, arguments.y_sample_stride, arguments.y_channel_stride, arguments.y_point_strides);
  pin(y.place);  // before the numbers arrive

  // Statistics of the part, then of the sets: they are the same where a part is all of a set.
  constexpr bool ALONE = BLOCKS_PER_ROW * SET_UNITS == 1;
  const auto tell = [&](int unit, Compute pivot, Compute shift, Compute deviation) {
    if constexpr (ALONE) {  // so every unit is a set
      const Compute variance = deviation * static_cast<Compute>(arguments.set_share);
      Compute mean, remainder;
      add_apart(pivot, shift, mean, remainder);
      sets[unit] = {mean, remainder, reciprocal_sqrt(variance + static_cast<Compute>(arguments.eps))};
      if constexpr (UPDATES_RUNNING) variances[unit] = variance;
    } else {
      write_numbers(own, unit, pivot, shift, deviation);
    }
  };
  const auto slot_of = [](int i) { return i; };
  const auto release = [&](int i) { fill(i + IN_FLIGHT); };
  const auto no_others = [](const auto&) {};
  sum_part(part, slots, VECTORS, 1, count, slot_of, release, no_others, scratch, tell);
  if constexpr (!ALONE) {
    cluster_wait();  // another block may not have started
    const Compute(&everyones)[BLOCKS_PER_ROW][NUMBERS * TILE_UNITS] =
        exchange_shared<THREADS>(exchange, own, thread_in_block());
    for_each_set_of_tile([&](int set, bool there, int lane) {
      const int first_unit = there ? set * SET_UNITS : 0;
      const Moments of_set =
          merged<SET_LANES>(arguments.set_share, everyones[0][first_unit], nullptr, [&](auto use) {
            for (int i = lane; i < BLOCKS_PER_ROW * SET_UNITS; i += SET_LANES) {
              const int block = i / SET_UNITS;
              const long long left = arguments.points - block * arguments.points_per_block;
              const Compute* numbers = everyones[block] + first_unit + i % SET_UNITS;
              use(static_cast<double>(min(left, arguments.points_per_block) * SUMMED),
                  static_cast<double>(numbers[0]) + numbers[TILE_UNITS], static_cast<double>(numbers[2 * TILE_UNITS]));
            }
          });
      if (!there || lane > 0) return;
      sets[set] = quick_statistics_of(of_set, arguments.eps);
      if constexpr (UPDATES_RUNNING) variances[set] = static_cast<Compute>(of_set.variance);
    });
    __syncthreads();
  }

  // Finish and store.
  Compute weight[CHANNEL_VECTOR], bias[CHANNEL_VECTOR];
  affine.get(weight, bias);
  const Finish finish([&](int j) { return sets[set_in_tile(j)]; }, weight, bias);
#pragma unroll 4
  for (int i = 0; i < VECTORS; ++i) {
    if (i < count) store_global(arguments.y + y.offset(arguments.y_point_strides), finish.of(slots.get(i)));
    y.advance(arguments.point_sizes);
  }

  // What else is wanted of the statistics, when all else is on its way.
#pragma unroll
  for (int i = 0; i < OWNED_SETS; ++i) {
    const int set = thread_in_block() + i * THREADS;
    if (!owns(set)) break;
    const long long place = place_of(set);
    const SetStatistics statistics = sets[set];
    if (arguments.rstd != nullptr) {
      arguments.mean[place] = statistics.mean;
      arguments.rstd[place] = statistics.rstd;
    }
    if constexpr (UPDATES_RUNNING) {
      const double mean = static_cast<double>(statistics.mean) + statistics.mean_remainder;
      update_running(arguments, running[i], mean, variances[set], place);
    }
  }
}
