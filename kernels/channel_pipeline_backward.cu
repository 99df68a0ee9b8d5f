// Gradients of instance, group and batch norm of slabs along the channels, each of which several blocks share; what
// they are is in channel_slab_backward.cu. Moves x and dy once in and dx once out. How blocks share slabs and tell each
// other what they have of them is in channel_pipeline.cuh.
//
// What becomes of dweight and dbias, the sums of all channels that a block has had, are one row of partial sums a
// block, which column_sums adds up in a fixed order. Where slabs are whole samples, a thread always has the same
// channels and keeps their sums; else the warps that tell keep them, in shared memory.
#include "types.cuh"
#include "dependent_launch.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "activation.cuh"
#include "affine.cuh"
#include "channel_affine.cuh"
#include "channel_gradients.cuh"
#include "group_part.cuh"
#include "handover.cuh"
#include "pipeline.cuh"
#include "collected.cuh"
#include "channel_pipeline.cuh"

struct Arguments {
  const X_TYPE* dy;
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  const Compute* mean;  // [sets]
  const Compute* rstd;
  X_TYPE* dx;
  DWEIGHT_TYPE* dweight;  // [blocks][channels]: parts of them
  DBIAS_TYPE* dbias;
  long long* words;     // see SetParcels
  long long word_pairs;
  long long slabs;      // of all samples; fewer than 2^32
  long long channels;   // TILES * TILE_CHANNELS
  long long points;
  long long blocks_per_slab;   // divides gridDim.x; TILE_SETS or more, and at most 32 * PARTS_PER_LANE
  long long points_per_block;  // the last block of a slab may have fewer, but has some
  long long dy_sample_stride;
  long long dy_point_stride;
  long long x_sample_stride;
  long long x_point_stride;
  long long dx_sample_stride;
  long long dx_point_stride;
};

constexpr int CHANNELS = TILES * TILE_CHANNELS;
constexpr bool THREADS_KEEP_COLUMNS = TILES == 1;
// What rows of sums are of: units, of g and of g * xhat; or, for the warps that tell to keep, channels, of dz and of
// dz * xhat.
constexpr int ROW_NUMBERS = THREADS_KEEP_COLUMNS ? UNITS : VECTOR;
using Sums = PartialSums<2, ROW_NUMBERS>;
// The sums of the columns at the end, in the slots.
using ColumnSums = PartialSums<2, VECTOR>;
static_assert(!THREADS_KEEP_COLUMNS || SUM_ROWS * ColumnSums::ROW * sizeof(Compute) <= 2 * STAGED * sizeof(X_TYPE));

// The given statistics of a slab's sets: those of LAG slabs that wait, of those that are summed and finished, and of
// the next one.
struct Given {
  Compute mean;
  Compute rstd;
};
constexpr int GIVEN = LAG + 3;

// What a thread knows of its channels, from shared memory.
__device__ __forceinline__ Own own_of(const Compute* weights, const Compute* biases, const Given* given,
                                      const Slab& slab) {
  const int first = slab.tile * TILE_CHANNELS + channel_in_tile(0);
  Vector<Compute, VECTOR> weight, bias;
  if constexpr (HAS_WEIGHT) weight = load<Compute, VECTOR>(weights + first);
  if constexpr (HAS_BIAS) bias = load<Compute, VECTOR>(biases + first);
  Own own;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    own.weight[j] = HAS_WEIGHT ? weight.lane[j] : 1;
    own.bias[j] = HAS_BIAS ? bias.lane[j] : 0;
    const Given of_set = given[set_in_tile(j)];
    own.mean[j] = of_set.mean;
    own.rstd[j] = of_set.rstd;
    own.set_slope(j);
  }
  return own;
}

// What the owning warp does: of every slab in turn it tells all blocks the means of the set whose number is the block's
// rank, if there is one.
__device__ __forceinline__ void own_a_set(const Arguments& arguments, const Slabs& slabs,
                                          const SetParcels<2>& parcels) {
  const Compute share = 1 / static_cast<Compute>(arguments.points * CHANNELS_PER_SET);
  for (int turn = 0; parcels.rank < TILE_SETS && slabs[turn].there; ++turn) {
    Compute parts[PARTS_PER_LANE][2], sums[2];
    parcels.await_told(parts, parcels.rank, turn);
    sum_parts(parts, sums);
    if (threadIdx.x % 32 == 0) parcels.answer(parcels.rank, {sums[0] * share, sums[1] * share}, turn);
  }
}

// A part's sums of g and of g * xhat of a set, from the rows of sums, by the threads that see to it. `columns` are the
// sums of dz and of dz * xhat, [2][CHANNELS], if it is for these threads to keep them.
__device__ __forceinline__ void sum_rows(const Sums& rows, int set, const Slab& slab, const Compute* weights,
                                         Compute* columns, Compute (&sums)[2]) {
  const bool there = told_set() == set;
  sums[0] = sums[1] = 0;
  if constexpr (THREADS_KEEP_COLUMNS) {
    constexpr int SET_UNITS = CHANNELS_PER_SET / UNIT;
#pragma unroll 4
    for (int i = set_lane(); there && i < SUM_ROWS * SET_UNITS; i += SET_LANES) {
      const int row = i / SET_UNITS, unit = set * SET_UNITS + i % SET_UNITS;
      sums[0] += rows.get(row, 0, unit);
      sums[1] += rows.get(row, 1, unit);
    }
  } else {
    for (int i = set_lane(); there && i < CHANNELS_PER_SET; i += SET_LANES) {
      const int channel = set * CHANNELS_PER_SET + i, column = slab.tile * TILE_CHANNELS + channel;
      Compute of_channel[2] = {0, 0};
#pragma unroll
      for (int row = 0; row < SUM_ROWS; ++row) {
        of_channel[0] += rows.get(row, 0, channel);
        of_channel[1] += rows.get(row, 1, channel);
      }
      columns[column] += of_channel[0];
      columns[CHANNELS + column] += of_channel[1];
      const Compute weight = HAS_WEIGHT ? weights[column] : 1;
      sums[0] += weight * of_channel[0];
      sums[1] += weight * of_channel[1];
    }
  }
  warp_sum<SET_LANES, 1>(sums);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS)
    channel_pipeline_backward(const Arguments arguments) {
  let_next_launch_begin();
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ SetMeans sets[2][TILE_SETS];
  __shared__ Given given[GIVEN][TILE_SETS];
  __shared__ PlacesOfSums of_sums;
  __shared__ PlacesOfSets of_sets;
  __shared__ __align__(sizeof(Compute) * VECTOR) Compute weights[CHANNELS];
  __shared__ __align__(sizeof(Compute) * VECTOR) Compute biases[CHANNELS];
  __shared__ Compute kept_columns[THREADS_KEEP_COLUMNS ? 1 : 2 * CHANNELS];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];  // dy, x; then the rows of sums
  using Values = Vector<X_TYPE, VECTOR>;

  const SharedPart part = part_of_block(arguments.points, arguments.points_per_block, arguments.blocks_per_slab);
  const Slabs slabs = {arguments.slabs, part};
  const int own_vectors = own_vectors_of(part.count);
  const auto vectors_of = [&](const Slab& slab) { return slab.there ? own_vectors : 0; };
  const int warp = threadIdx.x / 32;
  const auto sums_of = [&](int turn) {
    return Sums{reinterpret_cast<Compute*>(staged + 2 * STAGED) + turn % 2 * SUM_ROWS * Sums::ROW};
  };

  const Place dy_place(arguments.dy_sample_stride, arguments.dy_point_stride, part);
  const Place x_place(arguments.x_sample_stride, arguments.x_point_stride, part);
  const Place dx_place(arguments.dx_sample_stride, arguments.dx_point_stride, part);
  const auto fill = [&](X_TYPE* slot, const X_TYPE* dy, const X_TYPE* x, bool there) {
    if (there) {
      copy_async<VECTOR>(slot, dy);
      copy_async<VECTOR>(slot + STAGED, x);
    }
    copy_async_commit();
  };
  const auto load_given = [&](int turn, int set) -> Given {
    const Slab slab = slabs[turn];
    if (!slab.there || set >= TILE_SETS) return {};
    const long long first = (slab.sample * arguments.channels + slab.tile * TILE_CHANNELS) / CHANNELS_PER_SET;
    return {arguments.mean[first + set], arguments.rstd[first + set]};
  };
  if (warp < WARPS) {
    for (int ahead = 0; ahead < AHEAD - LAG; ++ahead) {
      const int vectors = vectors_of(slabs[ahead]);
      X_TYPE* const slots = slots_of(staged, ahead);
      const X_TYPE *dy = dy_place.of(arguments.dy, slabs[ahead]), *x = x_place.of(arguments.x, slabs[ahead]);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i, dy += dy_place.step, x += x_place.step) {
        fill(slots + i * STEP, dy, x, i < vectors);
      }
    }
    for (int channel = threadIdx.x; channel < CHANNELS; channel += THREADS) {
      if constexpr (HAS_WEIGHT) weights[channel] = static_cast<Compute>(widen(arguments.weight[channel]));
      if constexpr (HAS_BIAS) biases[channel] = static_cast<Compute>(widen(arguments.bias[channel]));
      if constexpr (!THREADS_KEEP_COLUMNS) kept_columns[channel] = kept_columns[CHANNELS + channel] = 0;
    }
  } else {
    // The statistics of the first turns: a set to a thread, so that all are on their way at the same time.
    for (int i = threadIdx.x - THREADS; i < (LAG + 1) * TILE_SETS; i += BLOCK_THREADS - THREADS) {
      given[i / TILE_SETS][i % TILE_SETS] = load_given(i / TILE_SETS, i % TILE_SETS);
    }
  }
  if (threadIdx.x == 0) {
    of_sums.begin();
    of_sets.begin();
  }
  __syncthreads();
  if (warp >= WARPS) wait_for_words();
  const SetParcels<2> parcels(arguments.words, part);
  Compute columns[2 * VECTOR] = {};  // of the thread's channels, if it keeps them

  if (warp == OWNING_WARP) {
    own_a_set(arguments, slabs, parcels);
  } else if (warp == READING_WARP) {
    const int lane = threadIdx.x % 32;
    for (int turn = 0; slabs[turn].there; ++turn) {
      const int given_turn = turn + LAG + 1;
      Given of_lane[SETS_PER_LANE];
#pragma unroll
      for (int i = 0; i < SETS_PER_LANE; ++i) of_lane[i] = load_given(given_turn, lane + 32 * i);
      const auto wait_empty = [&]() { of_sets.wait_empty(turn); };
      parcels.await_answers(turn, wait_empty, [&](int set, const Compute (&numbers)[2]) {
        sets[turn % 2][set] = {numbers[0], numbers[1]};
      });
#pragma unroll
      for (int i = 0; i < SETS_PER_LANE; ++i) {
        if (lane + 32 * i < TILE_SETS) given[given_turn % GIVEN][lane + 32 * i] = of_lane[i];
      }
      of_sets.filled(turn);
    }
  } else if (warp >= WARPS) {
    const int set = min(told_set(), TILE_SETS - 1);
    for (int turn = 0; slabs[turn].there; ++turn) {
      Compute sums[2];
      of_sums.wait_full(turn);
      sum_rows(sums_of(turn), set, slabs[turn], weights, kept_columns, sums);
      of_sums.emptied(turn);
      if (set_lane() == 0 && told_set() == set) parcels.tell(set, sums, turn);
    }
  } else {
    for (int turn = 0; turn < LAG || slabs[turn - LAG].there; ++turn) {
      // Load and reduce.
      const int done_turn = turn - LAG;
      const Slab summed = slabs[turn], done = slabs[done_turn], next = slabs[done_turn + AHEAD];
      const X_TYPE* const arrived = slots_of(staged, turn);
      const int vectors = vectors_of(summed);
      if (summed.there) {
        const Own own = own_of(weights, biases, given[turn % GIVEN], summed);
        Compute sums[2 * VECTOR] = {};
        as_they_arrive<UNDER_WAY, 0, RESIDENT>([&](int i) {
          if (i >= vectors) return;
          const Values dy = load<X_TYPE, VECTOR>(arrived + i * STEP);
          const Values x = load<X_TYPE, VECTOR>(arrived + STAGED + i * STEP);
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) {
            const Compute deviation = own.deviation(widen(x, j), j);
            const Compute dz = own.dz(widen(dy, j), deviation * own.slope[j], j);
            sums[j] += dz;
            sums[VECTOR + j] += dz * deviation;
          }
        });
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sums[VECTOR + j] *= missing_scale(own.rstd[j]);
        Compute told[2 * ROW_NUMBERS] = {};
#pragma unroll
        for (int i = 0; i < 2 * VECTOR; ++i) {
          if constexpr (THREADS_KEEP_COLUMNS) {
            columns[i] += sums[i];
            told[i / VECTOR * UNITS + i % VECTOR / UNIT] += own.weight[i % VECTOR] * sums[i];
          } else {
            told[i] = sums[i];
          }
        }
        if constexpr (SUMS_BY_WARPS) warp_sum_apart<CHANNEL_LANES>(told);
        of_sums.wait_empty(turn);
        sums_of(turn).template put<2>(0, told);
        if (has_row_of_sums()) of_sums.filled(turn);
      }

      // Finish and store; and fill again what was stored.
      Own own = {};
      Finish finish = {};
      if (done.there) {
        of_sets.wait_full(done_turn);
        own = own_of(weights, biases, given[done_turn % GIVEN], done);
        finish = Finish([&](int j) { return sets[done_turn % 2][set_in_tile(j)]; }, own);
        if (slabs[done_turn + 2].there) of_sets.emptied(done_turn);
      }
      const int done_vectors = vectors_of(done), next_vectors = vectors_of(next);
      X_TYPE* const slots = slots_of(staged, done_turn + AHEAD);  // those of the slab that is finished
      X_TYPE* dx = dx_place.of(arguments.dx, done);
      const X_TYPE *next_dy = dy_place.of(arguments.dy, next), *next_x = x_place.of(arguments.x, next);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i) {
        X_TYPE* const slot = slots + i * STEP;
        if (i < done_vectors) {
          store_global(dx, finish.of(load<X_TYPE, VECTOR>(slot), load<X_TYPE, VECTOR>(slot + STAGED), own));
        }
        fill(slot, next_dy, next_x, i < next_vectors);
        dx += dx_place.step;
        next_dy += dy_place.step;
        next_x += x_place.step;
      }
    }
  }

  // The block's row of sums.
  if constexpr (!WANTS_DWEIGHT && !WANTS_DBIAS) return;
  __syncthreads();
  if constexpr (THREADS_KEEP_COLUMNS) {
    if constexpr (SUMS_BY_WARPS) warp_sum_apart<CHANNEL_LANES>(columns);
    if (warp < WARPS) ColumnSums{reinterpret_cast<Compute*>(staged)}.template put<2>(0, columns);
    __syncthreads();
  }
  for (int channel = threadIdx.x; channel < CHANNELS; channel += BLOCK_THREADS) {
    Compute sums[2] = {0, 0};
#pragma unroll
    for (int number = 0; number < 2; ++number) {
      if constexpr (THREADS_KEEP_COLUMNS) {
        const ColumnSums rows = {reinterpret_cast<Compute*>(staged)};
#pragma unroll
        for (int row = 0; row < SUM_ROWS; ++row) sums[number] += rows.get(row, number, channel);
      } else {
        sums[number] = kept_columns[number * CHANNELS + channel];
      }
    }
    const long long target = blockIdx.x * arguments.channels + channel;
    if constexpr (WANTS_DBIAS) arguments.dbias[target] = sums[0];
    if constexpr (WANTS_DWEIGHT) arguments.dweight[target] = sums[1];
  }
}
