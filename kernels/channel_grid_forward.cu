// Instance, group and batch norm of slabs that only several multiprocessors together can hold, without clusters: y =
// activate((x - mean) * rstd * weight + bias), moving x once in and y once out. How the blocks share slabs and tell
// each other the statistics of their parts is in channel_grid.cuh.
#include "types.cuh"
#include "reduce.cuh"
#include "grid_words.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "channel_slab.cuh"
#include "channel_grid.cuh"
#include "activation.cuh"
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
  long long* words;     // see SetExchange
  long long word_pairs;
  long long slabs;      // of all samples
  long long channels;   // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;     // a multiple of POINT_VECTOR
  long long blocks_per_slab;
  long long points_per_block;  // a multiple of POINT_VECTOR; the last block of a slab may have fewer, but has some
  long long vectors;           // of a thread, of a slab, in slots
  long long pivot;             // of them; not more than HELD, where there are more than SLOTS
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_grid_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ Compute scratch[2 * SUM_SCRATCH / SUMMED];
  __shared__ Compute own[NUMBERS * TILE_UNITS];
  __shared__ Compute own_sets[NUMBERS * TILE_SETS];
  __shared__ SetStatistics sets[TILE_SETS];
  __shared__ Compute affine[2 * TILE_CHANNELS];  // weight and bias
  // slots; then the numbers that are collected
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  Compute* numbers = reinterpret_cast<Compute*>(staged + SLOTS * HOLDERS * VECTOR);

  const Group group = group_of_block(arguments.slabs, arguments.blocks_per_slab, arguments.channels, arguments.points,
                                     arguments.points_per_block);
  const Slab first_slab = group.slab_at(group.first_slab), distance = group.slab_at(group.step);
  const SetExchange<NUMBERS> exchange = set_exchange_of<NUMBERS>(arguments.words, group);
  const auto affine_of = [&](const Slab& slab) {
    ChannelNumbers<2> numbers;
    numbers.load(group, slab, [&](int row, long long channel) {
      if (row == 0) return HAS_WEIGHT ? static_cast<Compute>(widen(arguments.weight[channel])) : 1;
      return HAS_BIAS ? static_cast<Compute>(widen(arguments.bias[channel])) : 0;
    });
    return numbers;
  };
  const ChannelNumbers<2> first_affine = affine_of(first_slab);

  const Slots slots = {staged};
  const Source sources[1] = {
      {arguments.x, arguments.x_sample_stride, arguments.x_channel_stride, arguments.x_point_strides, slots}};
  const int vectors = static_cast<int>(arguments.vectors), pivot = static_cast<int>(arguments.pivot);
  const Intake<1> intake(sources, arguments.point_sizes, group.first, vectors);
  const Walk last = walk_over(group.first, arguments.point_sizes, vectors - 1);
  Slab slab = first_slab, next_slab = group.behind(slab, distance);
  Arriving<1> arriving = intake.begin(group.part(slab), false, intake.first);
  intake.fill_first(arriving, min(vectors, SLOTS));
  Arriving<1> ahead = intake.begin(group.part(next_slab), true, intake.first);
  intake.fill_first(ahead, intake.free);
  first_affine.store_in(affine);
  Residents<1> residents(sources, arguments.point_sizes, group.first, vectors);
  residents.replace(group.part(slab), [](int) {});

  const int lane = thread_in_block() % SET_LANES;
  for (int turn = 0; group.has(slab); ++turn) {
    const Chunk part = group.part(slab);
    Compute weight[CHANNEL_VECTOR], bias[CHANNEL_VECTOR];
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      weight[j] = affine[channel_in_tile(j)];
      bias[j] = affine[TILE_CHANNELS + channel_in_tile(j)];
    }
    // Statistics of the part, by units, then by sets.
    const auto slot_of = [&](int i) { return slot_of_vector(i, arriving.mirrored); };
    const auto release = [&](int i) { intake.release(arriving, i); };
    const auto for_residents = [&](const auto& use) {
      residents.for_each([&](int i) { use(residents.values[0][i]); });
    };
    sum_part(part, slots, vectors, pivot, arriving.count, slot_of, release, for_residents, scratch,
             [&](auto... numbers) { write_numbers(own, numbers...); });
    const Compute* of_part = own;
    if constexpr (SET_UNITS > 1) {
      for_each_set_of_tile([&](int set, bool there, int lane) {
        const int first_unit = there ? set * SET_UNITS : 0;
        const double part_count = static_cast<double>(part.points() * CHANNELS_PER_SET);
        const Moments moments = merged<SET_LANES>(1 / part_count, own[first_unit], nullptr, [&](auto use) {
          for (int i = first_unit + lane; i < first_unit + SET_UNITS; i += SET_LANES) {
            use(static_cast<double>(part.points() * SUMMED), static_cast<double>(own[i]) + own[TILE_UNITS + i],
                static_cast<double>(own[2 * TILE_UNITS + i]));
          }
        });
        if (!there || lane > 0) return;
        own_sets[set] = static_cast<Compute>(moments.mean);
        own_sets[TILE_SETS + set] = static_cast<Compute>(moments.mean - own_sets[set]);
        own_sets[2 * TILE_SETS + set] = static_cast<Compute>(moments.variance * part_count);
      });
      __syncthreads();
      of_part = own_sets;
    }

    // Those of the slab.
    if (turn == 0) wait_for_words();
    exchange.publish(of_part, turn);
    exchange.collect(numbers, turn);
    for (int first = 0; first < exchange.owned(); first += THREADS / SET_LANES) {
      const int owned = first + thread_in_block() / SET_LANES, set = exchange.owned_set(owned);
      const bool there = owned < exchange.owned();
      const Compute* of_blocks = numbers + (there ? owned : 0) * group.blocks * NUMBERS;
      const Moments moments = merged<SET_LANES>(arguments.set_share, of_blocks[0], nullptr, [&](auto use) {
        for (int block = lane; block < group.blocks; block += SET_LANES) {
          const long long left = arguments.points - block * arguments.points_per_block;
          const Compute* of_block = of_blocks + block * NUMBERS;
          use(static_cast<double>(min(left, arguments.points_per_block) * CHANNELS_PER_SET),
              static_cast<double>(of_block[0]) + of_block[1], static_cast<double>(of_block[2]));
        }
      });
      if (!there || lane > 0) continue;
      const SetStatistics statistics = quick_statistics_of(moments, arguments.eps);
      exchange.answer(set, {statistics.mean, statistics.mean_remainder, statistics.rstd}, turn);
      const long long channel = part.first_channel + set * CHANNELS_PER_SET;
      if (channel >= arguments.channels) continue;
      const long long place = (part.sample * arguments.channels + channel) / CHANNELS_PER_SET;
      if (arguments.rstd != nullptr) {
        arguments.mean[place] = statistics.mean;
        arguments.rstd[place] = statistics.rstd;
      }
      if constexpr (UPDATES_RUNNING) {
        const Running before = {arguments.running_mean[place], arguments.running_var[place]};
        update_running(arguments, before, moments.mean, moments.variance, place);
      }
    }
    exchange.await_answers(sets, turn);

    // Finish and store.
    const ChannelNumbers<2> next_affine = affine_of(next_slab);
    const Finish finish([&](int j) { return sets[set_in_tile(j)]; }, weight, bias);
    Path path = path_of(last, part, arguments.y_sample_stride, arguments.y_channel_stride,
                        arguments.y_point_strides);
    const Slab slab_after = group.behind(next_slab, distance);
    const Arriving<1> after = intake.finish_part(part, arriving, ahead, group.part(slab_after), [&](int i) {
      if (i < arriving.count) {
        store_global(arguments.y + path.offset(arguments.y_point_strides), finish.of(slots.get(slot_of(i))));
      }
      path.retreat(arguments.point_sizes);
    });
    next_affine.store_in(affine);
    Path behind = path_of(residents.first, part, arguments.y_sample_stride, arguments.y_channel_stride,
                          arguments.y_point_strides);
    residents.replace(group.part(next_slab), [&](int i) {
      store_global(arguments.y + behind.offset(arguments.y_point_strides), finish.of(residents.values[0][i]));
      behind.advance(arguments.point_sizes);
    });
    slab = next_slab;
    next_slab = slab_after;
    arriving = ahead;
    ahead = after;
  }
}
