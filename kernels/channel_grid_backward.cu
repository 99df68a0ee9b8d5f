// Gradients of instance, group and batch norm for slabs that only several multiprocessors together can hold, without
// clusters; what they are is in channel_slab_backward.cu. Moves x and dy once in and dx once out. How the blocks share
// slabs is in channel_grid.cuh. Where a mean is of one channel, the owner of it has what the slab adds to dweight and
// dbias; else every part of a slab leaves its own. column_sums adds them up in a fixed order, if there are several.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "grid_words.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "channel_slab.cuh"
#include "channel_grid.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "channel_merge.cuh"
#include "channel_gradients.cuh"
#include "channel_slab_sums.cuh"

struct Arguments {
  const X_TYPE* dy;
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;  // [sets]
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [samples][channels], or of several channels a mean [samples][blocks_per_slab][channels]
  DBIAS_TYPE* dbias;
  long long* words;     // see SetExchange
  long long word_pairs;
  long long slabs;      // of all samples
  long long channels;   // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;     // a multiple of POINT_VECTOR
  long long blocks_per_slab;
  long long points_per_block;  // a multiple of POINT_VECTOR; the last block of a slab may have fewer, but has some
  long long vectors;           // of a thread, of a slab, in slots
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
  double set_share;  // one over how many numbers a set has
};

// Numbers of sets that are not those of their only channel.
constexpr int OWN_SETS = CHANNELS_PER_SET > 1 ? NUMBERS * TILE_SETS : 1;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_grid_backward(const Arguments arguments) {
  let_next_launch_begin();
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Compute own_sets[OWN_SETS];  // times the weight
  __shared__ SetMeans sets[TILE_SETS];
  __shared__ Compute own_numbers[4 * TILE_CHANNELS];  // weight, bias, mean and rstd
  // slots of dy, of x; then the numbers that are collected
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  Compute* numbers = reinterpret_cast<Compute*>(staged + 2 * SLOTS * HOLDERS * VECTOR);

  const Group group = group_of_block(arguments.slabs, arguments.blocks_per_slab, arguments.channels, arguments.points,
                                     arguments.points_per_block);
  const Slab first_slab = group.slab_at(group.first_slab), distance = group.slab_at(group.step);
  const SetExchange<NUMBERS> exchange = set_exchange_of<NUMBERS>(arguments.words, group);
  const auto numbers_of = [&](const Slab& slab) {
    ChannelNumbers<4> numbers;
    numbers.load(group, slab, [&](int row, long long channel) {
      if (row == 0) return HAS_WEIGHT ? static_cast<Compute>(widen(arguments.weight[channel])) : 1;
      if (row == 1) return HAS_BIAS ? static_cast<Compute>(widen(arguments.bias[channel])) : 0;
      const long long set = (slab.sample * arguments.channels + channel) / CHANNELS_PER_SET;
      return row == 2 ? arguments.mean[set] : arguments.rstd[set];
    });
    return numbers;
  };
  const ChannelNumbers<4> first_numbers = numbers_of(first_slab);

  const Slots dy_slots = {staged}, x_slots = {staged + SLOTS * HOLDERS * VECTOR};
  const Source sources[2] = {{arguments.dy, arguments.dy_sample_stride, arguments.dy_channel_stride,
                              arguments.dy_point_strides, dy_slots},
                             {arguments.x, arguments.x_sample_stride, arguments.x_channel_stride,
                              arguments.x_point_strides, x_slots}};
  const int vectors = static_cast<int>(arguments.vectors);
  const Intake<2> intake(sources, arguments.point_sizes, group.first, vectors);
  const Walk last = walk_over(group.first, arguments.point_sizes, vectors - 1);
  Slab slab = first_slab, next_slab = group.behind(slab, distance);
  Arriving<2> arriving = intake.begin(group.part(slab), false, intake.first);
  intake.fill_first(arriving, min(vectors, SLOTS));
  Arriving<2> ahead = intake.begin(group.part(next_slab), true, intake.first);
  intake.fill_first(ahead, intake.free);
  first_numbers.store_in(own_numbers);
  Residents<2> residents(sources, arguments.point_sizes, group.first, vectors);
  residents.replace(group.part(slab), [](int) {});

  const int lane = thread_in_block() % SET_LANES;
  for (int turn = 0; group.has(slab); ++turn) {
    const Chunk part = group.part(slab);
    Own thread;
    thread.load_rows(own_numbers);

    // The sums of the part, by channels, then by sets.
    const auto slot_of = [&](int i) { return slot_of_vector(i, arriving.mirrored); };
    const auto release = [&](int i) { intake.release(arriving, i); };
    const auto for_residents = [&](const auto& use) {
      residents.for_each([&](int i) { use(residents.values[0][i], residents.values[1][i]); });
    };
    Compute sums[NUMBERS * CHANNEL_VECTOR];
    sum_part(dy_slots, x_slots, thread, vectors, arriving.count, slot_of, release, for_residents, sums);
    tell_sums_over_points(sums, scratch, [&](int i, Compute dz, Compute product) {
      own[channel_in_tile(i)] = dz;
      own[TILE_CHANNELS + channel_in_tile(i)] = product;
    });
    __syncthreads();
    if constexpr (CHANNELS_PER_SET > 1) {
      for (int i = thread_in_block(); i < NUMBERS * TILE_CHANNELS; i += THREADS) {
        const long long channel = part.first_channel + i % TILE_CHANNELS;
        if (channel >= arguments.channels) continue;
        const long long place = (part.sample * group.blocks + group.rank) * arguments.channels + channel;
        if (WANTS_DBIAS && i < TILE_CHANNELS) arguments.dbias[place] = own[i];
        if (WANTS_DWEIGHT && i >= TILE_CHANNELS) arguments.dweight[place] = own[i];
      }
      for_each_set_of_tile([&](int set, bool there, int lane) {
        double of_set[2] = {0, 0};
        for (int i = lane; there && i < CHANNELS_PER_SET; i += SET_LANES) {
          const int channel = set * CHANNELS_PER_SET + i;
          if (part.first_channel + channel >= arguments.channels) continue;
          const double weight = HAS_WEIGHT ? widen(arguments.weight[part.first_channel + channel]) : 1;
          of_set[0] += weight * own[channel];
          of_set[1] += weight * own[TILE_CHANNELS + channel];
        }
        total_over<SET_LANES>(of_set, nullptr);
        if (!there || lane > 0) return;
        own_sets[set] = static_cast<Compute>(of_set[0]);
        own_sets[TILE_SETS + set] = static_cast<Compute>(of_set[1]);
      });
      __syncthreads();
    }

    // Those of the slab.
    if (turn == 0) wait_for_words();
    exchange.publish(CHANNELS_PER_SET > 1 ? own_sets : own, turn);
    exchange.collect(numbers, turn);
    for (int first = 0; first < exchange.owned(); first += THREADS / SET_LANES) {
      const int owned = first + thread_in_block() / SET_LANES, set = exchange.owned_set(owned);
      const bool there = owned < exchange.owned();
      double of_set[2] = {0, 0};
      for (int block = lane; there && block < group.blocks; block += SET_LANES) {
        of_set[0] += numbers[(owned * group.blocks + block) * NUMBERS];
        of_set[1] += numbers[(owned * group.blocks + block) * NUMBERS + 1];
      }
      total_over<SET_LANES>(of_set, nullptr);
      if (!there || lane > 0) continue;
      const long long channel = part.first_channel + set;
      if (CHANNELS_PER_SET == 1 && channel < arguments.channels) {
        const long long place = part.sample * arguments.channels + channel;
        if constexpr (WANTS_DBIAS) narrow(of_set[0], arguments.dbias[place]);
        if constexpr (WANTS_DWEIGHT) narrow(of_set[1], arguments.dweight[place]);
        if constexpr (HAS_WEIGHT) {
          const double weight = widen(arguments.weight[channel]);
          of_set[0] *= weight;
          of_set[1] *= weight;
        }
      }
      exchange.answer(set, {static_cast<Compute>(of_set[0] * arguments.set_share),
                            static_cast<Compute>(of_set[1] * arguments.set_share)},
                      turn);
    }
    exchange.await_answers(sets, turn);

    // Finish and store.
    const ChannelNumbers<4> next_numbers = numbers_of(next_slab);
    const Finish finish([&](int j) { return sets[set_in_tile(j)]; }, thread);
    Path path = path_of(last, part, arguments.dx_sample_stride, arguments.dx_channel_stride,
                        arguments.dx_point_strides);
    const Slab slab_after = group.behind(next_slab, distance);
    const Arriving<2> after = intake.finish_part(part, arriving, ahead, group.part(slab_after), [&](int i) {
      if (i < arriving.count) {
        const int slot = slot_of(i);
        store_global(arguments.dx + path.offset(arguments.dx_point_strides),
                     finish.of(dy_slots.get(slot), x_slots.get(slot), thread));
      }
      path.retreat(arguments.point_sizes);
    });
    next_numbers.store_in(own_numbers);
    Path behind = path_of(residents.first, part, arguments.dx_sample_stride, arguments.dx_channel_stride,
                          arguments.dx_point_strides);
    residents.replace(group.part(next_slab), [&](int i) {
      store_global(arguments.dx + behind.offset(arguments.dx_point_strides),
                   finish.of(residents.values[0][i], residents.values[1][i], thread));
      behind.advance(arguments.point_sizes);
    });
    slab = next_slab;
    next_slab = slab_after;
    arriving = ahead;
    ahead = after;
  }
}
