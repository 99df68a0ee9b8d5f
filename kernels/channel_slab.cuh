// How channel_slab_* and channel_grid_* hold a slab: some channels of a sample with all their points, of which several
// blocks may have a part each.
//
// A thread's vectors lie in shared memory, in slots that no other thread looks at: a slot is filled by cp.async, read
// where it is summed, and read again where it is finished. Of channel_slab_* each of VECTORS vectors has its own, and
// IN_FLIGHT are on their way before the first is summed; channel_grid.cuh says which slots vectors have there, and
// which lie in registers.
struct Slots {
  X_TYPE* memory;

  __device__ __forceinline__ X_TYPE* at(int slot) const {
    return memory + (slot * HOLDERS + thread_in_block()) * VECTOR;
  }

  __device__ __forceinline__ void fill(int slot, const X_TYPE* source) const {
    if constexpr (VECTOR * sizeof(X_TYPE) >= 4) {
      copy_async<VECTOR>(at(slot), source);
    } else {
      store(at(slot), load<X_TYPE, VECTOR>(source));
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> get(int slot) const { return load<X_TYPE, VECTOR>(at(slot)); }
};

// Calls use(i) for those of the thread's `count` vectors from `first` to `last` that there are, when they have arrived:
// a few at a time, so that the reads of the next need not wait for the work on the last. Then release(i), which must
// commit a group of copies, be it an empty one: every slot was filled in a group of its own, and BEHIND - 1 groups are
// to be behind that of a vector when it is used.
constexpr int FEW = IN_FLIGHT < SLOTS || SLOTS < 4 ? 2 : 4;

template <int BEHIND, int AT_A_TIME = FEW, typename Use, typename Release>
__device__ __forceinline__ void take_as_they_arrive(int first, int last, int count, const Use& use,
                                                    const Release& release) {
#pragma unroll 1
  for (; first < last; first += AT_A_TIME) {
    copy_async_wait<(BEHIND > AT_A_TIME ? BEHIND - AT_A_TIME : 0)>();
#pragma unroll
    for (int i = first; i < first + AT_A_TIME; ++i) {
      if (i < min(count, last)) use(i);
    }
#pragma unroll
    for (int i = first; i < first + AT_A_TIME; ++i) {
      if (i < last) release(i);
    }
  }
}

// The same for all from `first` to `vectors`. Where there are more of these than slots, HELD slots keep theirs, and the
// rest pass through the others.
template <typename Use, typename Release>
__device__ __forceinline__ void take_part(int first, int vectors, int count, const Use& use, const Release& release) {
  take_as_they_arrive<IN_FLIGHT>(first, min(vectors, SLOTS), count, use, release);
  if constexpr (HELD < SLOTS) take_as_they_arrive<SLOTS - HELD>(SLOTS, vectors, count, use, release);
}

// Calls use(set, there, lane) for the tile's sets, SET_LANES threads for each; where a warp has more threads than there
// are sets left, for such that are not there too, so that its lanes stay together.
template <typename Use>
__device__ __forceinline__ void for_each_set_of_tile(const Use& use) {
#pragma unroll
  for (int first = 0; first < TILE_SETS; first += THREADS / SET_LANES) {
    const int set = first + thread_in_block() / SET_LANES;
    use(set, set < TILE_SETS, thread_in_block() % SET_LANES);
  }
}
