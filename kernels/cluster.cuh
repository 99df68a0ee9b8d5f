// A row that several blocks share: they form a cluster (sm_90 and later), whose blocks run at the same time and can
// write each other's shared memory. With BLOCKS_PER_ROW = 1 nothing here is used.
#if BLOCKS_PER_ROW > 1
#define SHARES_ROWS __cluster_dims__(BLOCKS_PER_ROW, 1, 1)
#else
#define SHARES_ROWS
#endif

// Which of the row's blocks this is.
__device__ __forceinline__ int rank_in_row() {
#if BLOCKS_PER_ROW == 1
  return 0;
#elif defined(CUNORM_EMULATOR)
  return static_cast<int>(cunorm_emulator::cluster_rank());
#else
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#endif
}

__device__ __forceinline__ void cluster_arrive() {
#if BLOCKS_PER_ROW == 1
#elif defined(CUNORM_EMULATOR)
  cunorm_emulator::cluster_arrive(cunorm_emulator::Site::here());
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if BLOCKS_PER_ROW == 1
#elif defined(CUNORM_EMULATOR)
  cunorm_emulator::cluster_wait(cunorm_emulator::Site::here());
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes into the shared memory of another block of the row, where `shared` is in this one's.
__device__ __forceinline__ void store_to_rank(Compute* shared, int rank, Compute value) {
#if BLOCKS_PER_ROW == 1
#elif defined(CUNORM_EMULATOR)
  *static_cast<Compute*>(cunorm_emulator::cluster_map(shared, rank, cunorm_emulator::Site::here())) = value;
#else
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  if constexpr (sizeof(Compute) == 4) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(static_cast<float>(value)) : "memory");
  } else {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(static_cast<double>(value)) : "memory");
  }
#endif
}

// Every block of the row gives COUNT numbers, the same in all its threads; afterwards `everyones` of each block holds
// those of all. Begin a kernel with cluster_arrive, and wait before the first exchange: until then a block may not have
// started. Use two `everyones` in turn: a block may still read one when another has gone on to the next exchange.
template <int COUNT>
__device__ __forceinline__ void exchange_in_row(const Compute (&values)[COUNT],
                                                Compute (&everyones)[BLOCKS_PER_ROW][COUNT]) {
  const int rank = rank_in_row();
  if (threadIdx.x < BLOCKS_PER_ROW) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) store_to_rank(&everyones[rank][i], threadIdx.x, values[i]);
  }
  cluster_arrive();
  cluster_wait();
}
