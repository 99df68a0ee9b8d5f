// Instance, group and batch norm of slabs along the channels, each of which several blocks share: y = activate((x -
// mean) * rstd * weight + bias), moving x once in and y once out. How blocks share slabs and tell each other what they
// have of them is in channel_pipeline.cuh.
//
// The statistics are taken in one pass, as the slab arrives, of the differences from a pivot: the mean of the thread's
// first vector, or of those of all threads of a warp that have the same channels. That is a share of one in RESIDENT of
// what they have, or more, so little cancels whatever the data are.
#include "types.cuh"
#include "grid_words.cuh"
#include "reduce.cuh"
#include "copy_async.cuh"
#include "channel_tile.cuh"
#include "channel_sets.cuh"
#include "activation.cuh"
#include "statistics.cuh"
#include "channel_running.cuh"
#include "set_statistics.cuh"
#include "channel_finish.cuh"
#include "group_part.cuh"
#include "handover.cuh"
#include "pipeline.cuh"
#include "collected.cuh"
#include "channel_pipeline.cuh"

struct Arguments {
  const X_TYPE* x;
  const WEIGHT_TYPE* weight;
  const BIAS_TYPE* bias;
  X_TYPE* y;
  Compute* mean;  // [sets]; null where the statistics are not asked for; so is rstd
  Compute* rstd;
  RUNNING_MEAN_TYPE* running_mean;
  RUNNING_VARIANCE_TYPE* running_var;
  long long* words;     // see SetParcels
  long long word_pairs;
  long long slabs;      // of all samples; fewer than 2^32
  long long channels;   // TILES * TILE_CHANNELS
  long long points;
  long long blocks_per_slab;   // divides gridDim.x; TILE_SETS or more, and at most 32 * PARTS_PER_LANE
  long long points_per_block;  // the last block of a slab may have fewer, but has some
  long long x_sample_stride;
  long long x_point_stride;
  long long y_sample_stride;
  long long y_point_stride;
  double eps;
  double kept;
  double taken;
  double taken_variance;
};

// Units of a set, over the threads that have the same points.
constexpr int SET_UNITS = CHANNELS_PER_SET / UNIT;
using Sums = PartialSums<3, UNITS>;

// The sums over the threads of a warp that have the same channels, for all of them.
template <int COUNT>
__device__ __forceinline__ void sum_alike(Compute (&values)[COUNT]) {
  if constexpr (SUMS_BY_WARPS) {
    warp_sum_apart<CHANNEL_LANES>(values);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = __shfl_sync(0xffffffffu, values[i], threadIdx.x % 32 % CHANNEL_LANES);
  }
}

// How many numbers a row of sums has of each unit, and one over that; zeros where it has none.
struct RowCount {
  Compute count;
  Compute reciprocal;
};

// What a thread has of a slab's units.
struct OfUnits {
  Compute pivots[UNITS];
  Compute sums[2 * UNITS];

  // Takes the pivots from the first vector.
  __device__ __forceinline__ void begin(const Vector<X_TYPE, VECTOR>& values, Compute pivot_share) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i) pivots[i] = sums[i] = sums[UNITS + i] = 0;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) pivots[j / UNIT] += widen(values, j);
    sum_alike(pivots);
#pragma unroll
    for (int i = 0; i < UNITS; ++i) pivots[i] *= pivot_share;
  }
  __device__ __forceinline__ void add(const Vector<X_TYPE, VECTOR>& values) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const Compute difference = widen(values, j) - pivots[j / UNIT];
      sums[j / UNIT] += difference;
      sums[UNITS + j / UNIT] += difference * difference;
    }
  }
};

// A part's statistics of a set, from the rows of sums, by the threads that see to it: a mean, its remainder, and the
// variance.
__device__ __forceinline__ Statistics merged_rows(const Sums& rows, const RowCount* row_counts, int set,
                                                  Compute part_share) {
  // From the mean of the set's first row, which is pivot + first_shift.
  const int first = set * SET_UNITS;
  const Compute pivot = rows.get(0, 0, first);
  const Compute first_shift = rows.get(0, 1, first) * row_counts[first / UNITS].reciprocal;
  Compute sums[2] = {0, 0};
#pragma unroll 4
  for (int i = set_lane(); i < SUM_ROWS * SET_UNITS; i += SET_LANES) {
    const int row = i / SET_UNITS, unit = first + i % SET_UNITS;
    const RowCount of = row_counts[row * CHANNEL_LANES + unit / UNITS];
    const Compute sum = rows.get(row, 1, unit), shift = sum * of.reciprocal;
    const Compute difference = rows.get(row, 0, unit) - pivot + shift - first_shift;
    sums[0] += of.count * difference;
    sums[1] += rows.get(row, 2, unit) - sum * shift + of.count * difference * difference;
  }
  warp_sum<SET_LANES, 1>(sums);
  const Compute shift = sums[0] * part_share;
  Statistics own = {0, 0, not_negative(sums[1] * part_share - shift * shift)};
  // A pivot is the mean of a few numbers, from which all others may lie far: so would the differences of blocks' means
  // from the first one's, which are rounded.
  add_apart(pivot, first_shift + shift, own.mean, own.remainder);
  return own;
}

// What the owning warp does: of every slab in turn it tells all blocks the statistics of the set whose number is the
// block's rank, if there is one, and stores them where they are asked for.
__device__ __forceinline__ void own_a_set(const Arguments& arguments, const Slabs& slabs,
                                          const SetParcels<3>& parcels) {
  const int lane = threadIdx.x % 32, set = parcels.rank, blocks = parcels.blocks;
  if (set >= TILE_SETS) return;
  const Shares of_blocks = shares_of_blocks(arguments.points, arguments.points_per_block, blocks);
  Compute shares[PARTS_PER_LANE];
  shares_of_lane(of_blocks, shares);
  for (int turn = 0; slabs[turn].there; ++turn) {
    const Slab slab = slabs[turn];
    Compute parts[PARTS_PER_LANE][3];
    parcels.await_told(parts, set, turn);
    const Statistics whole = merged_of_lanes(parts, shares);
    const Compute rstd = reciprocal_sqrt(whole.variance + static_cast<Compute>(arguments.eps));
    if (lane > 0) continue;
    parcels.answer(set, {whole.mean, whole.remainder, rstd}, turn);
    const long long first_channel = slab.sample * arguments.channels + slab.tile * TILE_CHANNELS;
    const long long place = first_channel / CHANNELS_PER_SET + set;
    if (arguments.rstd != nullptr) {
      arguments.mean[place] = whole.mean + whole.remainder;
      arguments.rstd[place] = rstd;
    }
    if constexpr (UPDATES_RUNNING) {
      const Running before = {arguments.running_mean[place], arguments.running_var[place]};
      update_running(arguments, before, static_cast<double>(whole.mean) + whole.remainder, whole.variance, place);
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS)
    channel_pipeline_forward(const Arguments arguments) {
  clear_words(arguments.words, arguments.word_pairs);
  __shared__ SetStatistics sets[2][TILE_SETS];
  __shared__ PlacesOfSums of_sums;
  __shared__ PlacesOfSets of_sets;
  __shared__ RowCount row_counts[SUM_ROWS * CHANNEL_LANES];
  extern __shared__ __align__(COPY_ALIGNMENT) X_TYPE staged[];  // then the rows of sums
  using Values = Vector<X_TYPE, VECTOR>;

  const SharedPart part = part_of_block(arguments.points, arguments.points_per_block, arguments.blocks_per_slab);
  const Slabs slabs = {arguments.slabs, part};
  const int own_vectors = own_vectors_of(part.count);
  const auto vectors_of = [&](const Slab& slab) { return slab.there ? own_vectors : 0; };
  const int warp = threadIdx.x / 32;
  const auto sums_of = [&](int turn) {
    return Sums{reinterpret_cast<Compute*>(staged + STAGED) + turn % 2 * SUM_ROWS * Sums::ROW};
  };

  const Place x_place(arguments.x_sample_stride, arguments.x_point_stride, part);
  const Place y_place(arguments.y_sample_stride, arguments.y_point_stride, part);
  const auto fill = [&](X_TYPE* slot, const X_TYPE* x, bool there) {
    if (there) copy_async<VECTOR>(slot, x);
    copy_async_commit();
  };
  // Weights and biases of the thread's channels of a tile, as they lie in memory.
  Vector<WEIGHT_TYPE, VECTOR> kept_weight;
  Vector<BIAS_TYPE, VECTOR> kept_bias;
  const auto keep_affine = [&](const Slab& slab) {
    const int channel = slab.tile * TILE_CHANNELS + channel_lane() * VECTOR;
    if constexpr (HAS_WEIGHT) kept_weight = load_in_pieces<VECTOR, WEIGHT_ACCESS>(arguments.weight + channel);
    if constexpr (HAS_BIAS) kept_bias = load_in_pieces<VECTOR, BIAS_ACCESS>(arguments.bias + channel);
  };
  Compute pivot_share = 0;
  if (warp < WARPS) {
    for (int ahead = 0; ahead < AHEAD - LAG; ++ahead) {
      const int vectors = vectors_of(slabs[ahead]);
      X_TYPE* const slots = slots_of(staged, ahead);
      const X_TYPE* x = x_place.of(arguments.x, slabs[ahead]);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i, x += x_place.step) fill(slots + i * STEP, x, i < vectors);
    }
    keep_affine(slabs[0]);
    Compute points[2] = {static_cast<Compute>(own_vectors), static_cast<Compute>(own_vectors > 0 ? 1 : 0)};
    sum_alike(points);
    pivot_share = points[1] > 0 ? 1 / (points[1] * UNIT) : 0;
    if (has_row_of_sums()) {
      const Compute count = points[0] * UNIT;
      row_counts[row_of_sums() * CHANNEL_LANES + channel_lane()] = {count, count > 0 ? 1 / count : 0};
    }
  }
  if (threadIdx.x == 0) {
    of_sums.begin();
    of_sets.begin();
  }
  __syncthreads();
  if (warp >= WARPS) wait_for_words();
  const SetParcels<3> parcels(arguments.words, part);

  if (warp == OWNING_WARP) {
    own_a_set(arguments, slabs, parcels);
  } else if (warp == READING_WARP) {
    for (int turn = 0; slabs[turn].there; ++turn) {
      const auto wait_empty = [&]() { of_sets.wait_empty(turn); };
      parcels.await_answers(turn, wait_empty, [&](int set, const Compute (&numbers)[3]) {
        sets[turn % 2][set] = {numbers[0], numbers[1], numbers[2]};
      });
      of_sets.filled(turn);
    }
  } else if (warp >= WARPS) {
    const Compute part_share = static_cast<Compute>(1) / (part.count * CHANNELS_PER_SET);
    const int set = min(told_set(), TILE_SETS - 1);
    for (int turn = 0; slabs[turn].there; ++turn) {
      of_sums.wait_full(turn);
      const Statistics own = merged_rows(sums_of(turn), row_counts, set, part_share);
      of_sums.emptied(turn);
      if (set_lane() == 0 && told_set() == set) parcels.tell(set, {own.mean, own.remainder, own.variance}, turn);
    }
  } else {
    for (int turn = 0; turn < LAG || slabs[turn - LAG].there; ++turn) {
      // Load and reduce.
      const int done_turn = turn - LAG;
      const Slab summed = slabs[turn], done = slabs[done_turn], next = slabs[done_turn + AHEAD];
      const X_TYPE* const arrived = slots_of(staged, turn);
      const int vectors = vectors_of(summed);
      OfUnits of_units;
      as_they_arrive<UNDER_WAY, 0, RESIDENT>([&](int i) {
        Values values = {};
        if (i < vectors) values = load<X_TYPE, VECTOR>(arrived + i * STEP);
        if (i == 0) of_units.begin(values, pivot_share);
        if (i < vectors) of_units.add(values);
      });
      if (summed.there) {
        if constexpr (SUMS_BY_WARPS) warp_sum_apart<CHANNEL_LANES>(of_units.sums);
        of_sums.wait_empty(turn);
        sums_of(turn).put<1>(0, of_units.pivots);
        sums_of(turn).put<2>(1, of_units.sums);
        if (has_row_of_sums()) of_sums.filled(turn);
      }

      // Finish and store; and fill again what was stored.
      Finish finish = {};
      if (done.there) {
        Compute weight[VECTOR] = {}, bias[VECTOR] = {};
        if constexpr (HAS_WEIGHT) widen_all(kept_weight, weight);
        if constexpr (HAS_BIAS) widen_all(kept_bias, bias);
        of_sets.wait_full(done_turn);
        finish = Finish([&](int j) { return sets[done_turn % 2][set_in_tile(j)]; }, weight, bias);
        if (slabs[done_turn + 2].there) of_sets.emptied(done_turn);
        if (TILES > 1) keep_affine(slabs[done_turn + 1]);
      }
      const int done_vectors = vectors_of(done), next_vectors = vectors_of(next);
      X_TYPE* const own = slots_of(staged, done_turn + AHEAD);  // those of the slab that is finished
      X_TYPE* y = y_place.of(arguments.y, done);
      const X_TYPE* x = x_place.of(arguments.x, next);
#pragma unroll
      for (int i = 0; i < RESIDENT; ++i, y += y_place.step, x += x_place.step) {
        X_TYPE* const slot = own + i * STEP;
        if (i < done_vectors) store_global(y, finish.of(load<X_TYPE, VECTOR>(slot)));
        fill(slot, x, i < next_vectors);
      }
    }
  }
}
