// The statistics of a block's part of a slab, as it arrives, for channel_slab_forward and channel_grid_forward.
//
// The sums are taken of x - pivot, where the pivot is the mean of the first part of what a block has of a channel:
// `pivot` of `vectors` vectors a thread, no small share of them, so little cancels in the squared deviations whatever
// the data are. They are among the HELD ones.

// What the parts of a slab have of each channel: mean, its remainder, and the sum of squared deviations from it.
constexpr int NUMBERS = 3;

// Those of a set, with an rstd as the GPU has it at once.
__device__ __forceinline__ SetStatistics quick_statistics_of(const Moments& moments, double eps) {
  const Compute mean = static_cast<Compute>(moments.mean);
  return {mean, static_cast<Compute>(moments.mean - mean),
          reciprocal_sqrt(static_cast<Compute>(moments.variance + eps))};
}

// Calls tell(channel, pivot, shift, deviation) in one thread for each channel of the tile: the mean is pivot + shift,
// and the squared deviations add up to the last number. Then all threads see what it wrote. Of the thread's `vectors`
// in slots there are `count`, the i-th in slot_of(i); release(i) says that it was summed. for_the_others(use) calls
// use(vector) for those that are not in slots.
template <typename SlotOf, typename Release, typename ForTheOthers, typename Tell>
__device__ __forceinline__ void sum_part(const Chunk& part, const Slots& slots, int vectors, int pivot, int count,
                                         const SlotOf& slot_of, const Release& release,
                                         const ForTheOthers& for_the_others, Compute* scratch, const Tell& tell) {
  const long long pivot_points = min(part.points(), static_cast<long long>(pivot) * POINT_LANES * POINT_VECTOR);
  const Compute pivot_share = reciprocal_of(static_cast<Compute>(pivot_points));
  const Compute share = reciprocal_of(static_cast<Compute>(part.points()));
  Compute pivots[CHANNEL_VECTOR] = {};
  const auto add_to_pivots = [&](int i) {
    const Vector<X_TYPE, VECTOR> values = slots.get(slot_of(i));
    add_vector(pivots, [&](int j, Compute (&parts)[CHANNEL_VECTOR]) { parts[channel_of(j)] += widen(values, j); });
  };
  as_they_arrive<SLOTS>(0, pivot, count, add_to_pivots, [](int) { copy_async_commit(); });
  sum_over_points(pivots, scratch);
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) pivots[j] *= pivot_share;

  // The sums of the differences from the pivots, then those of their squares.
  Compute sums[2 * CHANNEL_VECTOR] = {};
  const auto add_values = [&](const Vector<X_TYPE, VECTOR>& values) {
    add_vector(sums, [&](int j, Compute (&parts)[2 * CHANNEL_VECTOR]) {
      const int channel = channel_of(j);
      const Compute difference = widen(values, j) - pivots[channel];
      parts[channel] += difference;
      parts[CHANNEL_VECTOR + channel] += difference * difference;
    });
  };
  const auto add = [&](int i) { add_values(slots.get(slot_of(i))); };
#pragma unroll 4
  for (int i = 0; i < pivot; ++i) {
    if (i < count) add(i);
  }
  take_part(pivot, vectors, count, add, release);
  for_the_others(add_values);
  __syncthreads();  // the scratch was read
  sum_over_points(sums, scratch);

#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) {
    if (!tells_of(j)) continue;
    const Compute shift = sums[j] * share;
    tell(channel_in_tile(j), pivots[j], shift, not_negative(sums[CHANNEL_VECTOR + j] - shift * sums[j]));
  }
  __syncthreads();
}

// Writes a channel's numbers to NUMBERS rows of TILE_CHANNELS.
__device__ __forceinline__ void write_numbers(Compute* rows, int channel, Compute pivot, Compute shift,
                                              Compute deviation) {
  rows[channel] = pivot;
  rows[TILE_CHANNELS + channel] = shift;
  rows[2 * TILE_CHANNELS + channel] = deviation;
}
