// The statistics of a block's part of a slab, as it arrives, for channel_slab_forward and channel_grid_forward.
//
// The sums are taken of x - pivot, where the pivot is the mean of the first part of what a block has of a channel:
// `pivot` of `vectors` vectors a thread, at least one of 64, which bounds what cancels in the squared deviations
// whatever the data are; and few, so that it is there before the others have come. They are among the HELD ones.

// Statistics are of sets, so those of a unit (see channel_sets.cuh) are taken together, where its numbers are channels
// of one point. Units of several channels spare most of the work on sums.
constexpr int SUMMED = PLANE == 1 ? UNIT : 1;  // channels of a unit
constexpr int SUMS = CHANNEL_VECTOR / SUMMED;  // units of a thread
constexpr int TILE_UNITS = TILE_CHANNELS / SUMMED;
constexpr int SET_UNITS = CHANNELS_PER_SET / SUMMED;

// What the parts of a slab have of each unit: mean, its remainder, and the sum of squared deviations from it.
constexpr int NUMBERS = 3;

// Those of a set, with an rstd as the GPU has it at once.
__device__ __forceinline__ SetStatistics quick_statistics_of(const Moments& moments, double eps) {
  const Compute mean = static_cast<Compute>(moments.mean);
  return {mean, static_cast<Compute>(moments.mean - mean),
          reciprocal_sqrt(static_cast<Compute>(moments.variance + eps))};
}

// Calls tell(unit, pivot, shift, deviation) in one thread for each unit of the tile: the mean is pivot + shift, and the
// squared deviations add up to the last number. Then all threads see what it wrote. Of the thread's `vectors`
// in slots there are `count`, the i-th in slot_of(i); release(i) says that it was summed. for_the_others(use) calls
// use(vector) for those that are not in slots.
template <typename SlotOf, typename Release, typename ForTheOthers, typename Tell>
__device__ __forceinline__ void sum_part(const Chunk& part, const Slots& slots, int vectors, int pivot, int count,
                                         const SlotOf& slot_of, const Release& release,
                                         const ForTheOthers& for_the_others, Compute* scratch, const Tell& tell) {
  const long long pivot_points = min(part.points(), static_cast<long long>(pivot) * POINT_LANES * POINT_VECTOR);
  const Compute pivot_share = reciprocal_of(static_cast<Compute>(pivot_points * SUMMED));
  const Compute share = reciprocal_of(static_cast<Compute>(part.points() * SUMMED));
  const auto unit_of = [](int j) { return channel_of(j) / SUMMED; };
  Compute pivots[SUMS] = {};
  const auto add_to_pivots = [&](int i) {
    const Vector<X_TYPE, VECTOR> values = slots.get(slot_of(i));
    add_vector<VECTOR / SUMS>(pivots, [&](int j, Compute (&parts)[SUMS]) { parts[unit_of(j)] += widen(values, j); });
  };
  take_as_they_arrive<IN_FLIGHT, 1>(0, pivot, count, add_to_pivots, release);
  sum_over_points(pivots, scratch);
#pragma unroll
  for (int i = 0; i < SUMS; ++i) pivots[i] *= pivot_share;

  // The sums of the differences from the pivots, then those of their squares.
  Compute sums[2 * SUMS] = {};
  const auto add_values = [&](const Vector<X_TYPE, VECTOR>& values) {
    add_vector<VECTOR / SUMS>(sums, [&](int j, Compute (&parts)[2 * SUMS]) {
      const int unit = unit_of(j);
      const Compute difference = widen(values, j) - pivots[unit];
      parts[unit] += difference;
      parts[SUMS + unit] += difference * difference;
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
  tell_sums_over_points(sums, scratch, [&](int i, Compute sum, Compute squares) {
    const Compute shift = sum * share;
    tell(channel_in_tile(i * SUMMED) / SUMMED, chosen(pivots, i), shift, not_negative(squares - shift * sum));
  });
  __syncthreads();
}

// Writes a unit's numbers to NUMBERS rows of TILE_UNITS.
__device__ __forceinline__ void write_numbers(Compute* rows, int unit, Compute pivot, Compute shift,
                                              Compute deviation) {
  rows[unit] = pivot;
  rows[TILE_UNITS + unit] = shift;
  rows[2 * TILE_UNITS + unit] = deviation;
}
