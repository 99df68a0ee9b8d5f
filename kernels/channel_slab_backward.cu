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

// Whether what a thread needs of its channels is fetched ahead of its numbers. Behind many of these it would come last,
// and all wait for it. But for few numbers, many loads before them are the longer way: instance norm of 4 x 64 x 14^2
// float16 numbers, whose threads load 8 means and 8 rstds, takes 9.1 us on an H100 so, else 8.6.
constexpr bool FETCHES_CHANNELS_FIRST = BLOCKS_PER_ROW > 1 || VECTORS > 8 || UNITS == 1;

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, MIN_BLOCKS)
    channel_slab_backward(const Arguments arguments) {
  let_next_launch_begin();
  __shared__ Compute scratch[2 * SUM_SCRATCH];
  __shared__ Compute own[NUMBERS * TILE_CHANNELS];
  __shared__ Compute weights[TILE_CHANNELS];
  __shared__ Exchange<NUMBERS * TILE_CHANNELS, 1> exchange;
  __shared__ Compute totals[NUMBERS * TILE_CHANNELS];  // of all blocks, times the weight
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
  const auto fill = [&](int i) {
    if (i < count) {
      dy_slots.fill(i, arguments.dy + dy.offset(arguments.dy_point_strides));
      x_slots.fill(i, arguments.x + x.offset(arguments.x_point_strides));
    }
    copy_async_commit();
    dy.advance(arguments.point_sizes);
    x.advance(arguments.point_sizes);
  };
#pragma unroll 2
  for (int i = 0; i < IN_FLIGHT; ++i) fill(i);
  if constexpr (!FETCHES_CHANNELS_FIRST) fetch_channels();
  Own thread = {};
  thread.set(fetched);
  Path dx = path_of(begin, part, arguments.dx_sample_stride, arguments.dx_channel_stride, arguments.dx_point_strides);
  pin(dx.place);  // before the numbers arrive

  const auto slot_of = [](int i) { return i; };
  const auto release = [&](int i) { fill(i + IN_FLIGHT); };
  const auto no_others = [](const auto&) {};
  Compute sums[NUMBERS * CHANNEL_VECTOR];
  sum_part(dy_slots, x_slots, thread, VECTORS, count, slot_of, release, no_others, sums);
  // What the sample adds to dweight and dbias: one of the numbers of a channel.
  const auto store_sum = [&](int number, double sum) {
    const long long channel = part.first_channel + number % TILE_CHANNELS;
    if (rank_in_row() > 0 || channel >= arguments.channels) return;
    const long long place = part.sample * arguments.channels + channel;
    if (WANTS_DBIAS && number < TILE_CHANNELS) narrow(sum, arguments.dbias[place]);
    if (WANTS_DWEIGHT && number >= TILE_CHANNELS) narrow(sum, arguments.dweight[place]);
  };
  // Where a part is all of a set, every thread knows all of its own.
  constexpr bool ALONE = BLOCKS_PER_ROW * CHANNELS_PER_SET == 1;
  SetMeans own_means[ALONE ? CHANNEL_VECTOR : 1];
  if constexpr (ALONE) {
    sum_over_points(sums, scratch);
    const Compute share = static_cast<Compute>(arguments.set_share);
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const Compute factor = HAS_WEIGHT ? thread.weight[j] * share : share, product = sums[CHANNEL_VECTOR + j];
      own_means[j] = {sums[j] * factor, product * factor};
      if (!tells_of(j)) continue;
      store_sum(channel_in_tile(j), sums[j]);
      store_sum(TILE_CHANNELS + channel_in_tile(j), product);
    }
  } else {
    // With the weight of its channel a sum is of g.
    tell_sums_over_points(sums, scratch, [&](int i, Compute dz, Compute product) {
      const int channel = channel_in_tile(i);
      const Compute weight = HAS_WEIGHT ? chosen(thread.weight, i) : 1;
      if constexpr (BLOCKS_PER_ROW == 1) {
        store_sum(channel, dz);
        store_sum(TILE_CHANNELS + channel, product);
        totals[channel] = dz * weight;
        totals[TILE_CHANNELS + channel] = product * weight;
      } else {
        own[channel] = dz;
        own[TILE_CHANNELS + channel] = product;
        weights[channel] = weight;
      }
    });
    __syncthreads();
    if constexpr (BLOCKS_PER_ROW > 1) {
      cluster_wait();  // another block may not have started
      const Compute(&everyones)[BLOCKS_PER_ROW][NUMBERS * TILE_CHANNELS] =
          exchange_shared<THREADS>(exchange, own, thread_in_block());
      for (int i = thread_in_block(); i < NUMBERS * TILE_CHANNELS; i += THREADS) {
        double sum = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS_PER_ROW; ++block) sum += everyones[block][i];
        store_sum(i, sum);
        totals[i] = static_cast<Compute>(sum * weights[i % TILE_CHANNELS]);
      }
      __syncthreads();
    }
    for_each_set_of_tile([&](int set, bool there, int lane) {
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
    });
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
