// Gradients of instance, group and batch norm for slabs that fit into the shared memory of a block, or of the blocks of
// a cluster. With xhat = (x - mean) * rstd, dz = dy times the derivative of the activation and g = dz * weight:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), the means over what the statistics were taken over,
//   dweight = sum over samples and points of dz * xhat,  dbias = that of dz.
//
// Moves x and dy once in and dx once out. Every slab leaves what its sample has of dweight and dbias, which column_sums
// adds up in a fixed order.
#include "types.cuh"
#include "dependent_launch.cuh"
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
  DWEIGHT_TYPE* dweight;  // [samples][channels]: parts of them, or finished ones where there is one sample
  DBIAS_TYPE* dbias;
  long long channels;          // PLANE times it is a multiple of VECTOR, where ALONG_CHANNELS; of CHANNELS_PER_SET
  long long points;            // a multiple of POINT_VECTOR
  long long points_per_block;  // likewise; the last block of a slab may have fewer, but has some
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

// As in channel_slab_forward.cu.
constexpr bool FETCHES_CHANNELS_FIRST = BLOCKS_PER_ROW > 1 || VECTORS > 8;

extern "C" __global__ void SHARES_ROWS __launch_bounds__(THREADS, MIN_BLOCKS)
    channel_slab_backward(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Exchange<NUMBERS * TILE_CHANNELS, 1> exchange;
  __shared__ Compute totals[2 * TILE_CHANNELS];  // of all blocks, times the weight
  __shared__ SetMeans sets[TILE_SETS];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];
  start_mbarriers(exchange);
  cluster_arrive();

  const Chunk part = chunk_at(blockIdx.x / BLOCKS_PER_ROW, rank_in_row(), arguments.channels, arguments.points,
                              arguments.points_per_block);
  Fetched fetched = {};
  const auto fetch_channels = [&] {
    fetched.fetch(part, arguments.channels, arguments.weight, arguments.bias, arguments.mean, arguments.rstd);
  };
  if constexpr (FETCHES_CHANNELS_FIRST) fetch_channels();
  const Walk begin = walk_over(part, arguments.point_sizes);
  const int count = begin.left;
  const Slots dy_slots = {staged}, x_slots = {staged + SLOTS * HOLDERS * VECTOR};
  Path dy = path_of(begin, part, arguments.dy_sample_stride, arguments.dy_channel_stride, arguments.dy_point_strides);
  Path x = path_of(begin, part, arguments.x_sample_stride, arguments.x_channel_stride, arguments.x_point_strides);
#pragma unroll 2
  for (int i = 0; i < VECTORS; ++i) {
    if (i < count) {
      dy_slots.fill(i, arguments.dy + dy.offset(arguments.dy_point_strides));
      x_slots.fill(i, arguments.x + x.offset(arguments.x_point_strides));
    }
    copy_async_commit();
    dy.advance(arguments.point_sizes);
    x.advance(arguments.point_sizes);
  }
  if constexpr (!FETCHES_CHANNELS_FIRST) fetch_channels();
  Own thread = {};
  thread.set(fetched);
  Path dx = path_of(begin, part, arguments.dx_sample_stride, arguments.dx_channel_stride, arguments.dx_point_strides);
  pin(dx.place);  // before the numbers arrive

  const auto slot_of = [](int i) { return i; };
  const auto release = [](int) { copy_async_commit(); };
  const auto no_others = [](const auto&) {};
  Compute sums[NUMBERS * CHANNEL_VECTOR];
  sum_part(dy_slots, x_slots, thread, VECTORS, count, slot_of, release, no_others, scratch, sums);
  // Where a part is all of a set, every thread knows all of its own.
  constexpr bool ALONE = BLOCKS_PER_ROW * CHANNELS_PER_SET == 1;
  SetMeans own_means[ALONE ? CHANNEL_VECTOR : 1];
  if constexpr (ALONE) {
    const Compute share = static_cast<Compute>(arguments.set_share);
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const Compute factor = HAS_WEIGHT ? thread.weight[j] * share : share, product = sums[CHANNEL_VECTOR + j];
      own_means[j] = {sums[j] * factor, product * factor};
      const long long channel = part.first_channel + channel_in_tile(j);
      if (!tells_of(j) || channel >= arguments.channels) continue;
      const long long place = part.sample * arguments.channels + channel;
      if constexpr (WANTS_DBIAS) narrow(sums[j], arguments.dbias[place]);
      if constexpr (WANTS_DWEIGHT) narrow(product, arguments.dweight[place]);
    }
  } else {
    tell_sums(sums, own);
    cluster_wait();  // another block may not have started
    const Compute(&everyones)[BLOCKS_PER_ROW][NUMBERS * TILE_CHANNELS] =
        exchange_shared<THREADS>(exchange, own, thread_in_block());
    // The sums of each channel, which its sample adds to dweight and dbias; with its weight they are of g.
    for (int i = thread_in_block(); i < 2 * TILE_CHANNELS; i += THREADS) {
      const long long channel = part.first_channel + i % TILE_CHANNELS;
      totals[i] = 0;
      if (channel >= arguments.channels) continue;
      double sum = 0;
#pragma unroll
      for (int block = 0; block < BLOCKS_PER_ROW; ++block) sum += everyones[block][i];
      if (rank_in_row() == 0) {
        const long long place = part.sample * arguments.channels + channel;
        if (WANTS_DBIAS && i < TILE_CHANNELS) narrow(sum, arguments.dbias[place]);
        if (WANTS_DWEIGHT && i >= TILE_CHANNELS) narrow(sum, arguments.dweight[place]);
      }
      if constexpr (HAS_WEIGHT) sum *= widen(arguments.weight[channel]);
      totals[i] = static_cast<Compute>(sum);
    }
    __syncthreads();
    const int lane = thread_in_block() % SET_LANES;
#pragma unroll
    for (int first = 0; first < TILE_SETS; first += THREADS / SET_LANES) {
      const int set = first + thread_in_block() / SET_LANES;
      const bool there = set < TILE_SETS;
      double of_set[2] = {0, 0};
      for (int i = lane; there && i < CHANNELS_PER_SET; i += SET_LANES) {
        of_set[0] += totals[set * CHANNELS_PER_SET + i];
        of_set[1] += totals[TILE_CHANNELS + set * CHANNELS_PER_SET + i];
      }
      total_over<SET_LANES>(of_set, nullptr);
      if (there && lane == 0) {
        sets[set] = {static_cast<Compute>(of_set[0] * arguments.set_share),
                     static_cast<Compute>(of_set[1] * arguments.set_share)};
      }
    }
    __syncthreads();
  }

  // Finish and store.
  const Finish finish([&](int j) { return ALONE ? own_means[j] : sets[set_in_tile(j)]; }, thread);
#pragma unroll 2
  for (int i = 0; i < VECTORS; ++i) {
    if (i < count) {
      store_global(arguments.dx + dx.offset(arguments.dx_point_strides),
                   finish.of(dy_slots.get(i), x_slots.get(i), thread));
    }
    dx.advance(arguments.point_sizes);
  }
}
