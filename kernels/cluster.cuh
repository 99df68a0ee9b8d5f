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

// What the blocks of a row tell each other: COUNT numbers each, twice, so that a block may still read one exchange when
// another has gone on to the next. `arrived` are mbarriers, which count the bytes that came.
template <int COUNT>
struct Exchange {
  Compute numbers[2][BLOCKS_PER_ROW][COUNT];
  unsigned long long arrived[2];
};

__device__ __forceinline__ void cluster_barrier() {
#if BLOCKS_PER_ROW == 1
#elif defined(CUNORM_EMULATOR)
  cunorm_emulator::cluster_arrive(cunorm_emulator::Site::here());
  cunorm_emulator::cluster_wait(cunorm_emulator::Site::here());
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
#ifdef CUNORM_EMULATOR
  return 0;
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
#endif
}

// To be called once, before the first exchange.
template <int COUNT>
__device__ __forceinline__ void begin_exchanges(Exchange<COUNT>& exchange) {
#if BLOCKS_PER_ROW > 1 && !defined(CUNORM_EMULATOR)
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&exchange.arrived[i])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
  cluster_barrier();  // before it another block may not have started
}

// Every block of the row gives COUNT numbers, the same in all its threads, and gets those of all, by rank. `turn`
// counts the exchanges. A barrier of the cluster would also wait for all that was stored before, and empty the cache.
// So would a wait that acquires at the cluster's scope, which what st.async brings does not need.
template <int COUNT>
__device__ __forceinline__ const Compute (&exchange_in_row(Exchange<COUNT>& exchange, int turn,
                                                           const Compute (&numbers)[COUNT]))[BLOCKS_PER_ROW][COUNT] {
  const int slot = turn % 2, rank = rank_in_row();
  const unsigned other = threadIdx.x;
#if BLOCKS_PER_ROW == 1
  (void)other, (void)rank, (void)numbers;
#elif defined(CUNORM_EMULATOR)
  for (int i = 0; other < BLOCKS_PER_ROW && i < COUNT; ++i) {
    void* there = cunorm_emulator::cluster_map(&exchange.numbers[slot][rank][i], other, cunorm_emulator::Site::here());
    *static_cast<Compute*>(there) = numbers[i];
  }
  cluster_barrier();
#else
  const unsigned arrived = shared_address(&exchange.arrived[slot]);
  if (other == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                 "n"(sizeof(Compute) * BLOCKS_PER_ROW * COUNT)
                 : "memory");
  }
  if (other < BLOCKS_PER_ROW) {
    unsigned arrived_there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(arrived_there) : "r"(arrived), "r"(other));
    for (int i = 0; i < COUNT; ++i) {
      unsigned there;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(there)
          : "r"(shared_address(&exchange.numbers[slot][rank][i])), "r"(other));
      if constexpr (sizeof(Compute) == 4) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
                     "r"(__float_as_uint(static_cast<float>(numbers[i]))), "r"(arrived_there)
                     : "memory");
      } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there),
                     "l"(__double_as_longlong(static_cast<double>(numbers[i]))), "r"(arrived_there)
                     : "memory");
      }
    }
  }
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred complete;\n mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        " selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done)
        : "r"(arrived), "r"(turn / 2 % 2)
        : "memory");
  }
#endif
  return exchange.numbers[slot];
}
