// How channel_slab_* and channel_grid_* hold a slab: some channels of a sample with all their points, of which several
// blocks may have a part each.
//
// A thread's vectors lie in shared memory, in slots that no other thread looks at: a slot is filled by cp.async, read
// where it is summed, and read again where it is finished. Its VECTORS vectors of one part begin at slot `first` of
// SLOTS; where there are more slots than vectors, those of its next part are on their way.
constexpr int TILE_SETS = TILE_CHANNELS / CHANNELS_PER_SET;
// Vectors of a thread that give the pivot.
constexpr int PIVOT = (VECTORS + 3) / 4;

struct Slots {
  X_TYPE* memory;
  int first;

  // That of the thread's i-th vector.
  __device__ __forceinline__ X_TYPE* at(int i) const {
    int slot = first + i;
    if (SLOTS > VECTORS && slot >= SLOTS) slot -= SLOTS;
    return memory + (slot * HOLDERS + thread_in_block()) * VECTOR;
  }

  __device__ __forceinline__ void fill(int i, const X_TYPE* source) const {
    if constexpr (VECTOR * sizeof(X_TYPE) >= 4) {
      copy_async<VECTOR>(at(i), source);
    } else {
      store(at(i), load<X_TYPE, VECTOR>(source));
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> get(int i) const { return load<X_TYPE, VECTOR>(at(i)); }
};

// Calls use(i) for those of the thread's `count` vectors from FIRST to LAST that there are, when they have arrived: a
// few at a time, so that the reads of the next need not wait for the work on the last. Every slot is filled in a group
// of copies of its own. An empty group is added for each that was waited for, so that there are always as many behind
// it.
constexpr int AT_A_TIME = 4;

template <int FIRST, int LAST, typename Use>
__device__ __forceinline__ void as_they_arrive(int count, const Use& use) {
  constexpr int WHOLE = (LAST - FIRST) / AT_A_TIME * AT_A_TIME, REST = LAST - FIRST - WHOLE;
  const auto take = [&](int first, auto size) {
    copy_async_wait<(SLOTS > size.value ? SLOTS - size.value : 0)>();
#pragma unroll
    for (int i = first; i < first + size.value; ++i) {
      if (i < count) use(i);
    }
#pragma unroll
    for (int i = 0; i < size.value; ++i) copy_async_commit();
  };
#pragma unroll 1
  for (int first = FIRST; first < FIRST + WHOLE; first += AT_A_TIME) take(first, Known<AT_A_TIME>());
  if constexpr (REST > 0) take(FIRST + WHOLE, Known<REST>());
}
