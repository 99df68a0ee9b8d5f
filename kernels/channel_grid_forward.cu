// Instance, group and batch norm of slabs that only several multiprocessors together can hold, without clusters: y =
// activate((x - mean) * rstd * weight + bias), moving x once in and y once out. How the blocks share slabs and tell
// each other the statistics of their parts is in channel_grid.cuh.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "grid_words.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_slab.cuh"
#include "channel_grid.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "channel_merge.cuh"
#include "channel_running.cuh"
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
  long long* words;     // zeros; see SetExchange
  long long slabs;      // of all samples
  long long channels;   // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;     // a multiple of POINT_VECTOR
  long long blocks_per_slab;
  long long points_per_block;  // a multiple of POINT_VECTOR; the last block of a slab may have fewer, but has some
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_grid_forward(const Arguments arguments) {
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Compute own_sets[NUMBERS * TILE_SETS];
  __shared__ SetStatistics sets[TILE_SETS];
  // slots; then the numbers that are collected
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  Compute* numbers = reinterpret_cast<Compute*>(staged + SLOTS * HOLDERS * VECTOR);

  const Group group = group_of_block(arguments.slabs, arguments.blocks_per_slab);
  const SetExchange<NUMBERS> exchange = set_exchange_of<NUMBERS>(arguments.words, group);
  const auto part_of = [&](long long slab) {
    return group.part(slab, arguments.channels, arguments.points, arguments.points_per_block);
  };

  // What comes in next.
  Ahead ahead = {group.first_slab, 0, 0};
  const X_TYPE* ahead_x = nullptr;
  const auto begin_ahead = [&] {
    ahead.part = part_of(ahead.slab);
    ahead.walk = walk_over(ahead.part, arguments.point_sizes);
    ahead.vector = 0;
    ahead_x = arguments.x + ahead.part.offset(arguments.x_sample_stride, arguments.x_channel_stride);
  };
  const auto fill_next = [&] {
    if (ahead.vector == VECTORS) {
      ahead.slab += group.step;
      begin_ahead();
    }
    if (ahead.walk.left > 0) {
      Slots{staged, 0}.fill(ahead.slot, ahead_x + ahead.walk.offset(arguments.x_point_strides));
    }
    copy_async_commit();
    ahead.walk.advance(arguments.point_sizes);
    ++ahead.vector;
    ahead.slot = ahead.slot + 1 < SLOTS ? ahead.slot + 1 : 0;
  };
  begin_ahead();
#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) fill_next();
  wait_for_earlier_launches();

  Slots slots = {staged, 0};
  const double set_count = static_cast<double>(arguments.points * CHANNELS_PER_SET);
  const int lane = thread_in_block() % SET_LANES;
  int turn = 0;
  for (long long slab = group.first_slab; slab < group.slabs; slab += group.step, ++turn) {
    const Chunk part = part_of(slab);
    Walk walk = walk_over(part, arguments.point_sizes);
    const int count = walk.left;
    Compute weight[CHANNEL_VECTOR] = {}, bias[CHANNEL_VECTOR] = {};
    if (part.there) {
      load_own_affine(part, arguments.weight, arguments.bias, weight, bias);
    }

    // Statistics of the part, by channels, then by sets.
    sum_part(part, slots, count, scratch, own);
    const Compute* of_part = own;
    if constexpr (CHANNELS_PER_SET > 1) {
#pragma unroll
      for (int first = 0; first < TILE_SETS; first += THREADS / SET_LANES) {
        const int set = first + thread_in_block() / SET_LANES;
        const bool there = set < TILE_SETS;
        const int channel = there ? set * CHANNELS_PER_SET : 0;
        const double part_count = static_cast<double>(part.points() * CHANNELS_PER_SET);
        const Moments moments = merged<SET_LANES>(part_count, own[channel], nullptr, [&](auto use) {
          for (int i = channel + lane; i < channel + CHANNELS_PER_SET; i += SET_LANES) {
            use(static_cast<double>(part.points()), static_cast<double>(own[i]) + own[TILE_CHANNELS + i],
                static_cast<double>(own[2 * TILE_CHANNELS + i]));
          }
        });
        if (!there || lane > 0) continue;
        own_sets[set] = static_cast<Compute>(moments.mean);
        own_sets[TILE_SETS + set] = static_cast<Compute>(moments.mean - own_sets[set]);
        own_sets[2 * TILE_SETS + set] = static_cast<Compute>(moments.variance * part_count);
      }
      __syncthreads();
      of_part = own_sets;
    }

    // Those of the slab.
    exchange.publish(of_part, turn);
    exchange.collect(numbers, turn);
    for (int first = 0; first < exchange.owned(); first += THREADS / SET_LANES) {
      const int owned = first + thread_in_block() / SET_LANES, set = exchange.owned_set(owned);
      const bool there = owned < exchange.owned();
      const Compute* of_blocks = numbers + (there ? owned : 0) * group.blocks * NUMBERS;
      const Moments moments = merged<SET_LANES>(set_count, of_blocks[0], nullptr, [&](auto use) {
        for (int block = lane; block < group.blocks; block += SET_LANES) {
          const long long left = arguments.points - block * arguments.points_per_block;
          const Compute* of_block = of_blocks + block * NUMBERS;
          use(static_cast<double>(min(left, arguments.points_per_block) * CHANNELS_PER_SET),
              static_cast<double>(of_block[0]) + of_block[1], static_cast<double>(of_block[2]));
        }
      });
      if (!there || lane > 0) continue;
      const SetStatistics statistics = set_statistics_of(moments, arguments.eps);
      exchange.answer(set, {statistics.mean, statistics.mean_remainder, statistics.rstd}, turn);
      const long long channel = part.first_channel + set * CHANNELS_PER_SET;
      if (channel >= arguments.channels) continue;
      const long long place = (part.sample * arguments.channels + channel) / CHANNELS_PER_SET;
      if (arguments.rstd != nullptr) {
        arguments.mean[place] = statistics.mean;
        arguments.rstd[place] = statistics.rstd;
      }
      if constexpr (UPDATES_RUNNING) {
        RunningUpdate{arguments.kept, arguments.taken}.apply(moments, set_count, arguments.running_mean[place],
                                                             arguments.running_var[place]);
      }
    }
    for (int i = thread_in_block(); i < NUMBERS * TILE_SETS; i += THREADS) {
      Compute* fields = reinterpret_cast<Compute*>(sets + i % TILE_SETS);
      fields[i / TILE_SETS] = exchange.await_answer(i, turn);
    }
    __syncthreads();

    // Finish and store; and fill again what was stored.
    const Finish finish(sets, weight, bias);
    X_TYPE* y = arguments.y + part.offset(arguments.y_sample_stride, arguments.y_channel_stride);
#pragma unroll 1
    for (int first = 0; first < VECTORS; first += 2) {
#pragma unroll
      for (int i = first; i < first + 2; ++i) {
        if (i < count) store_global(y + walk.offset(arguments.y_point_strides), finish.of(slots.get(i)));
        walk.advance(arguments.point_sizes);
      }
      fill_next();
      if (first + 1 < VECTORS) fill_next();
    }
    slots.first = (slots.first + VECTORS) % SLOTS;
  }
}
