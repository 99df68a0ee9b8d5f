// The sums that the gradients need of a block's part of a slab, as it arrives: for channel_slab_backward and
// channel_grid_backward.

// What the thread has of its channels, NUMBERS rows of CHANNEL_VECTOR. Of its `vectors` in slots there are `count`, the
// i-th in slot_of(i); release(i) says that it was summed. for_the_others(use) calls use(dy, x) for those that are not
// in slots.
template <typename SlotOf, typename Release, typename ForTheOthers>
__device__ __forceinline__ void sum_part(const Slots& dy_slots, const Slots& x_slots, const Own& thread, int vectors,
                                         int count, const SlotOf& slot_of, const Release& release,
                                         const ForTheOthers& for_the_others,
                                         Compute (&sums)[NUMBERS * CHANNEL_VECTOR]) {
#pragma unroll
  for (int i = 0; i < NUMBERS * CHANNEL_VECTOR; ++i) sums[i] = 0;
  const auto add_values = [&](const Vector<X_TYPE, VECTOR>& dy, const Vector<X_TYPE, VECTOR>& x) {
    add_vector<PER_CHANNEL>(sums, [&](int j, Compute (&parts)[NUMBERS * CHANNEL_VECTOR]) {
      const int channel = channel_of(j);
      const Compute deviation = thread.deviation(widen(x, j), channel);
      const Compute dz = thread.dz(widen(dy, j), deviation * thread.slope[channel], channel);
      parts[channel] += dz;
      parts[CHANNEL_VECTOR + channel] += dz * deviation;
    });
  };
  const auto add = [&](int i) { add_values(dy_slots.get(slot_of(i)), x_slots.get(slot_of(i))); };
  take_part(0, vectors, count, add, release);
  for_the_others(add_values);
#pragma unroll
  for (int j = 0; j < CHANNEL_VECTOR; ++j) sums[CHANNEL_VECTOR + j] *= missing_scale(thread.rstd[j]);
}
