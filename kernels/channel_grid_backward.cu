// Gradients of instance, group and batch norm for slabs that only several multiprocessors together can hold, without
// clusters; what they are is in channel_slab_backward.cu. Moves x and dy once in and dx once out. How the blocks share
// slabs is in channel_grid.cuh. Every part of a slab leaves what it has of dweight and dbias, which column_sums adds up
// in a fixed order.
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
#include "channel_slab_sums.cuh"

struct Arguments {
  const X_TYPE* dy;
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;  // [sets]
  const Compute* rstd;
  X_TYPE* dx;
  Compute* dweight;  // [samples][blocks_per_slab][channels]: parts of them
  Compute* dbias;
  long long* words;     // zeros; see SetExchange
  long long slabs;      // of all samples
  long long channels;   // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;     // a multiple of POINT_VECTOR
  long long blocks_per_slab;
  long long points_per_block;  // a multiple of POINT_VECTOR; the last block of a slab may have fewer, but has some
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channel_grid_backward(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Compute own_sets[NUMBERS * TILE_SETS];  // times the weight
  __shared__ SetMeans sets[TILE_SETS];
  // slots of dy, of x; then the numbers that are collected
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  Compute* numbers = reinterpret_cast<Compute*>(staged + 2 * SLOTS * HOLDERS * VECTOR);

  const Group group = group_of_block(arguments.slabs, arguments.blocks_per_slab);
  const SetExchange<NUMBERS> exchange = set_exchange_of<NUMBERS>(arguments.words, group);
  const auto part_of = [&](long long slab) {
    return group.part(slab, arguments.channels, arguments.points, arguments.points_per_block);
  };
  Slots dy_slots = {staged, 0}, x_slots = {staged + SLOTS * HOLDERS * VECTOR, 0};

  // What comes in next.
  Ahead ahead = {group.first_slab, 0, 0};
  const X_TYPE *ahead_dy = nullptr, *ahead_x = nullptr;
  const auto begin_ahead = [&] {
    ahead.part = part_of(ahead.slab);
    ahead.walk = walk_over(ahead.part, arguments.point_sizes);
    ahead.vector = 0;
    ahead_dy = arguments.dy + ahead.part.offset(arguments.dy_sample_stride, arguments.dy_channel_stride);
    ahead_x = arguments.x + ahead.part.offset(arguments.x_sample_stride, arguments.x_channel_stride);
  };
  const auto fill_next = [&] {
    if (ahead.vector == VECTORS) {
      ahead.slab += group.step;
      begin_ahead();
    }
    if (ahead.walk.left > 0) {
      Slots{dy_slots.memory, 0}.fill(ahead.slot, ahead_dy + ahead.walk.offset(arguments.dy_point_strides));
      Slots{x_slots.memory, 0}.fill(ahead.slot, ahead_x + ahead.walk.offset(arguments.x_point_strides));
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

  const double set_count = static_cast<double>(arguments.points * CHANNELS_PER_SET);
  const int lane = thread_in_block() % SET_LANES;
  int turn = 0;
  for (long long slab = group.first_slab; slab < group.slabs; slab += group.step, ++turn) {
    const Chunk part = part_of(slab);
    Walk walk = walk_over(part, arguments.point_sizes);
    const int count = walk.left;
    Own thread = {};
    thread.load(part, arguments.channels, arguments.weight, arguments.bias, arguments.mean, arguments.rstd);

    // The sums of the part, by channels, then by sets.
    sum_part(dy_slots, x_slots, thread, count, scratch, own);
    for (int i = thread_in_block(); i < NUMBERS * TILE_CHANNELS; i += THREADS) {
      const long long channel = part.first_channel + i % TILE_CHANNELS;
      if (channel >= arguments.channels) continue;
      const long long place = (part.sample * group.blocks + group.rank) * arguments.channels + channel;
      if (WANTS_DBIAS && i < TILE_CHANNELS) arguments.dbias[place] = own[i];
      if (WANTS_DWEIGHT && i >= TILE_CHANNELS) arguments.dweight[place] = own[i];
    }
#pragma unroll
    for (int first = 0; first < TILE_SETS; first += THREADS / SET_LANES) {
      const int set = first + thread_in_block() / SET_LANES;
      const bool there = set < TILE_SETS;
      double of_set[2] = {0, 0};
      for (int i = lane; there && i < CHANNELS_PER_SET; i += SET_LANES) {
        const int channel = set * CHANNELS_PER_SET + i;
        if (part.first_channel + channel >= arguments.channels) continue;
        const double weight = HAS_WEIGHT ? widen(arguments.weight[part.first_channel + channel]) : 1;
        of_set[0] += weight * own[channel];
        of_set[1] += weight * own[TILE_CHANNELS + channel];
      }
      total_over<SET_LANES>(of_set, nullptr);
      if (!there || lane > 0) continue;
      own_sets[set] = static_cast<Compute>(of_set[0]);
      own_sets[TILE_SETS + set] = static_cast<Compute>(of_set[1]);
    }
    __syncthreads();

    // Those of the slab.
    exchange.publish(own_sets, turn);
    exchange.collect(numbers, turn);
    for (int first = 0; first < exchange.owned(); first += THREADS / SET_LANES) {
      const int owned = first + thread_in_block() / SET_LANES;
      const bool there = owned < exchange.owned();
      double of_set[2] = {0, 0};
      for (int block = lane; there && block < group.blocks; block += SET_LANES) {
        of_set[0] += numbers[(owned * group.blocks + block) * NUMBERS];
        of_set[1] += numbers[(owned * group.blocks + block) * NUMBERS + 1];
      }
      total_over<SET_LANES>(of_set, nullptr);
      if (!there || lane > 0) continue;
      exchange.answer(exchange.owned_set(owned),
                      {static_cast<Compute>(of_set[0] / set_count), static_cast<Compute>(of_set[1] / set_count)}, turn);
    }
    for (int i = thread_in_block(); i < NUMBERS * TILE_SETS; i += THREADS) {
      Compute* fields = reinterpret_cast<Compute*>(sets + i % TILE_SETS);
      fields[i / TILE_SETS] = exchange.await_answer(i, turn);
    }
    __syncthreads();

    // Finish and store; and fill again what was stored.
    const Finish finish(sets, thread);
    X_TYPE* dx = arguments.dx + part.offset(arguments.dx_sample_stride, arguments.dx_channel_stride);
#pragma unroll 1
    for (int first = 0; first < VECTORS; first += 2) {
#pragma unroll
      for (int i = first; i < first + 2; ++i) {
        if (i < count) {
          store_global(dx + walk.offset(arguments.dx_point_strides),
                       finish.of(dy_slots.get(i), x_slots.get(i), thread));
        }
        walk.advance(arguments.point_sizes);
      }
      fill_next();
      if (first + 1 < VECTORS) fill_next();
    }
    dy_slots.first = x_slots.first = (dy_slots.first + VECTORS) % SLOTS;
  }
}
