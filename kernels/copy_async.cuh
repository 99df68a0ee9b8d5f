// Copies to shared memory that a thread starts and does not wait for: cp.async, from sm_80 on; on sm_75 they are loads
// and stores, which wait. Another thread may read what arrived when both the copier's wait and a barrier have passed.

// What they go to begins at a multiple of so many bytes. Where a warp's copies of 16 bytes begin at an odd multiple of
// 16 bytes, each is two writes: forward 262,144 columns of bfloat16 take 1.37 so, else 1.14.
#define COPY_ALIGNMENT 128

// COUNT elements, together 4, 8 or 16 bytes, aligned to their size. What was in `shared` must have been read already.
// What other blocks copy too goes through the cache of the multiprocessor, if it is SHARED_BY_BLOCKS: with its weights
// so, layer norm of 4096 rows of 4096 bfloat16 numbers takes 1.04, else 1.13.
template <int COUNT, bool SHARED_BY_BLOCKS = false, typename T>
__device__ __forceinline__ void copy_async(T* shared, const T* global) {
  constexpr int BYTES = sizeof(T) * COUNT;
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::copy_async(shared, global, BYTES);
#elif __CUDA_ARCH__ < 800
  store(shared, load<T, COUNT>(global));
#else
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16 && !SHARED_BY_BLOCKS) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(global), "n"(BYTES) : "memory");
  }
#endif
}

// Where a copy comes from and goes to lies equally far behind a multiple of so many bytes: the emulator sees to it,
// since results do not tell.
template <int BYTES>
__device__ __forceinline__ void lie_alike(const void* shared, const void* global) {
#if defined(CUNORM_EMULATOR)
  const size_t apart = reinterpret_cast<size_t>(shared) - reinterpret_cast<size_t>(global);
  cunorm_emulator::check_aligned(reinterpret_cast<const void*>(apart), BYTES, cunorm_emulator::Site::here());
#endif
}

// copy_async of the first `count` of COUNT elements, together 16 bytes; zeros in place of the others, which it does not
// read.
template <int COUNT, typename T>
__device__ __forceinline__ void copy_async_first(T* shared, const T* global, int count) {
  static_assert(sizeof(T) * COUNT == 16);
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::copy_async_first(shared, global, 16, sizeof(T) * count);
#elif __CUDA_ARCH__ < 800
  Vector<T, COUNT> values = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (i < count) values.lane[i] = global[i];
  }
  store(shared, values);
#else
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned bytes = sizeof(T) * count;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(bytes) : "memory");
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void copy_async_commit() {
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::copy_async_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for the copies that this thread has started, but for the last PENDING groups. Until the next __syncthreads() it
// alone may read what arrived.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::copy_async_wait(PENDING);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Calls visit(FIRST), ..., visit(END - 1), each when what was copied in that group has arrived: of the UNDER_WAY groups
// that this thread has ended last, counted from zero.
template <int UNDER_WAY, int FIRST, int END, typename Visit>
__device__ __forceinline__ void as_they_arrive(const Visit& visit) {
  if constexpr (FIRST < END) {
    copy_async_wait<UNDER_WAY - 1 - FIRST>();
    visit(FIRST);
    as_they_arrive<UNDER_WAY, FIRST + 1, END>(visit);
  }
}
