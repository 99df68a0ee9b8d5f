// How channel_slab_* hold a slab: some channels of a sample with all their points, as many blocks as it takes a part of
// the points each (a cluster, where there are several; what cluster.cuh calls a row is a slab here).
//
// A thread's vectors lie in shared memory, in slots that no other thread looks at: a slot is filled by cp.async, read
// where it is summed, and read again where it is finished.

constexpr int TILE_SETS = TILE_CHANNELS / CHANNELS_PER_SET;

// A block's part of a slab.
__device__ __forceinline__ Chunk part_of_block(long long channels, long long points, long long points_per_block) {
  return chunk_at(blockIdx.x / BLOCKS_PER_ROW, rank_in_row(), channels, points, points_per_block);
}

// A tensor's slots.
struct Slots {
  X_TYPE* memory;

  __device__ __forceinline__ X_TYPE* at(int i) const { return memory + (i * THREADS + thread_in_block()) * VECTOR; }

  __device__ __forceinline__ void fill(int i, const X_TYPE* source) const {
    if constexpr (VECTOR * sizeof(X_TYPE) >= 4) {
      copy_async<VECTOR>(at(i), source);
    } else {
      store(at(i), load<X_TYPE, VECTOR>(source));
    }
  }

  __device__ __forceinline__ Vector<X_TYPE, VECTOR> get(int i) const { return load<X_TYPE, VECTOR>(at(i)); }
};

// Calls fill(i, walk) for each of the thread's vectors, every one a group of copies of its own.
template <typename Fill>
__device__ __forceinline__ void fill_slots(Walk walk, long long end, const long long (&sizes)[POINT_DIMS],
                                           const Fill& fill) {
#pragma unroll 4
  for (int i = 0; i < VECTORS; ++i) {
    if (walk.point < end) fill(i, walk);
    copy_async_commit();
    walk.advance(sizes);
  }
}

// Calls use(i) for those of the thread's vectors from FIRST to LAST that there are, each when it has arrived. An empty
// group of copies is added for each that was waited for, so that as many are under way as before.
template <int FIRST, int LAST, typename Use>
__device__ __forceinline__ void as_they_arrive(int count, const Use& use) {
#pragma unroll 4
  for (int i = FIRST; i < LAST; ++i) {
    copy_async_wait<VECTORS - 1>();
    if (i < count) use(i);
    copy_async_commit();
  }
}

// How many vectors a thread has.
__device__ __forceinline__ int own_vectors(const Walk& walk, long long end) {
  constexpr int STEP = POINT_LANES * POINT_VECTOR;
  return walk.point < end ? static_cast<int>((end - walk.point + STEP - 1) / STEP) : 0;
}
