// The statistics of a block's part of a slab, as it arrives, and the last step of a norm, for channel_slab_forward and
// channel_grid_forward.
//
// The sums are taken of x - pivot, where the pivot is the mean of the first part of what a block has of a channel:
// `pivot` of `vectors` vectors a thread, no small share of them, so little cancels in the squared deviations whatever
// the data are. They are among the HELD ones.

// What the parts of a slab have of each channel: mean, its remainder, and the sum of squared deviations from it.
constexpr int NUMBERS = 3;

// A set's mean is the sum of two numbers: its rounding alone would show in y where a set lies far from zero.
struct SetStatistics {
  Compute mean;
  Compute mean_remainder;
  Compute rstd;
};

__device__ __forceinline__ SetStatistics set_statistics_of(const Moments& moments, double eps) {
  const Compute mean = static_cast<Compute>(moments.mean);
  return {mean, static_cast<Compute>(moments.mean - mean),
          reciprocal_sqrt(static_cast<Compute>(moments.variance + eps))};
}

// Leaves a part's numbers in `own`, NUMBERS rows of TILE_CHANNELS, for all threads to see. Of the thread's `vectors`
// there are `count`, the i-th in slot_of(i); release(i) says that it was summed.
template <typename SlotOf, typename Release>
__device__ __forceinline__ void sum_part(const Chunk& part, const Slots& slots, int vectors, int pivot, int count,
                                         const SlotOf& slot_of, const Release& release, Compute* scratch,
                                         Compute* own) {
  Compute pivots[CHANNEL_VECTOR] = {};
  const auto add_to_pivots = [&](int i) {
    const Vector<X_TYPE, VECTOR> values = slots.get(slot_of(i));
    add_vector(pivots, [&](int j, Compute (&parts)[CHANNEL_VECTOR]) { parts[channel_of(j)] += widen(values, j); });
  };
  as_they_arrive<SLOTS>(0, pivot, count, add_to_pivots, [](int) { copy_async_commit(); });
  sum_over_points(pivots, scratch);
  const long long pivot_points = min(part.points(), static_cast<long long>(pivot) * POINT_LANES * POINT_VECTOR);
  const Compute pivot_share = 1 / static_cast<Compute>(pivot_points);
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) pivots[j] *= pivot_share;

  // The sums of the differences from the pivots, then those of their squares.
  Compute sums[2 * CHANNEL_VECTOR] = {};
  const auto add = [&](int i) {
    const Vector<X_TYPE, VECTOR> values = slots.get(slot_of(i));
    add_vector(sums, [&](int j, Compute (&parts)[2 * CHANNEL_VECTOR]) {
      const int channel = channel_of(j);
      const Compute difference = widen(values, j) - pivots[channel];
      parts[channel] += difference;
      parts[CHANNEL_VECTOR + channel] += difference * difference;
    });
  };
#pragma unroll 4
  for (int i = 0; i < pivot; ++i) {
    if (i < count) add(i);
  }
  take_part(pivot, vectors, count, add, release);
  __syncthreads();  // the scratch was read
  sum_over_points(sums, scratch);

  const Compute share = 1 / static_cast<Compute>(part.points());
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    if (!tells_of(j)) continue;
    Compute* numbers = own + channel_in_tile(j);
    const Compute shift = sums[j] * share;
    numbers[0] = pivots[j];
    numbers[TILE_CHANNELS] = shift;
    numbers[2 * TILE_CHANNELS] = sums[CHANNEL_VECTOR + j] - shift * sums[j];
  }
  __syncthreads();
}

// What y is made with: y = activate((x - mean) * scale + shift).
struct Finish {
  Compute means[CHANNEL_VECTOR];
  Compute scales[CHANNEL_VECTOR];
  Compute shifts[CHANNEL_VECTOR];

  __device__ __forceinline__ Finish(const SetStatistics* sets, const Compute (&weight)[CHANNEL_VECTOR],
                                    const Compute (&bias)[CHANNEL_VECTOR]) {
#pragma unroll
    for (int j = 0; j < CHANNEL_VECTOR; ++j) {
      const SetStatistics statistics = sets[channel_in_tile(j) / CHANNELS_PER_SET];
      means[j] = statistics.mean;
      scales[j] = HAS_WEIGHT ? statistics.rstd * weight[j] : statistics.rstd;
      shifts[j] = (HAS_BIAS ? bias[j] : 0) - statistics.mean_remainder * scales[j];
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> of(const Vector<X_TYPE, VECTOR>& values) const {
    Compute results[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const int channel = channel_of(j);
      results[j] = activate((widen(values, j) - means[channel]) * scales[channel] + shifts[channel]);
    }
    return rounded<X_TYPE>(results);
  }
};
