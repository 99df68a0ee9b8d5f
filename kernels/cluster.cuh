// A row that several blocks share: they form a cluster (sm_90 and later), whose blocks run at the same time and can
// write each other's shared memory. With BLOCKS_PER_ROW = 1 nothing here does anything.
#if BLOCKS_PER_ROW > 1
#define CLUSTER_DIMS __cluster_dims__(BLOCKS_PER_ROW, 1, 1)
#else
#define CLUSTER_DIMS
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

// What the blocks of a row tell each other: COUNT numbers each; twice, so that a block may still read one exchange when
// another has gone on to the next, or once where there is but one. `arrived` are mbarriers, which count the bytes that
// came.
template <int COUNT, int TURNS = 2>
struct Exchange {
  Compute numbers[TURNS][BLOCKS_PER_ROW][COUNT];
  unsigned long long arrived[TURNS];
};

// All threads of the cluster call the first of these, and then the second, which waits for the first. Nothing that was
// stored before is sure to be seen after, but for mbarriers that were started. To arrive with release would be to wait
// for all that is on its way from memory: 4 us in group norm of 2 x 512 x 64^2 float16 numbers, on an H100.
__device__ __forceinline__ void cluster_arrive() {
#if BLOCKS_PER_ROW == 1
#elif defined(CUNORM_EMULATOR)
  cunorm_emulator::cluster_arrive(cunorm_emulator::Site::here());
#else
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
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

__device__ __forceinline__ unsigned shared_address(const void* shared) {
#ifdef CUNORM_EMULATOR
  return 0;
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
#endif
}

// To be called once; all threads arrive at the cluster's barrier after it, and wait there before the first exchange, as
// another block may not have started.
//
// At the start of a kernel ptxas sees that the address is the same for all threads. Later, as in channel_slab_forward
// once, it may hand it over to SYNCS.EXCH in a loop, where compute-sanitizer 2025.3.1 takes it for another: racecheck
// reports races with threads that start no mbarrier, and synccheck ends with CUDA_ERROR_ILLEGAL_ADDRESS.
template <int COUNT, int TURNS>
__device__ __forceinline__ void start_mbarriers(Exchange<COUNT, TURNS>& exchange) {
#if BLOCKS_PER_ROW > 1 && !defined(CUNORM_EMULATOR)
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    for (int i = 0; i < TURNS; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&exchange.arrived[i])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
}

// Writes a number to a place in the shared memory of another of the row's blocks, which learns of it by `arrived`.
__device__ __forceinline__ void send(Compute number, const Compute* place, const unsigned long long* arrived,
                                     unsigned other) {
#if BLOCKS_PER_ROW == 1
  (void)number, (void)place, (void)arrived, (void)other;
#elif defined(CUNORM_EMULATOR)
  (void)arrived;
  *static_cast<Compute*>(cunorm_emulator::cluster_map(const_cast<Compute*>(place), other,
                                                      cunorm_emulator::Site::here())) = number;
#else
  unsigned there, arrived_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(arrived_there) : "r"(shared_address(arrived)), "r"(other));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(other));
  if constexpr (sizeof(Compute) == 4) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
                 "r"(__float_as_uint(static_cast<float>(number))), "r"(arrived_there)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there),
                 "l"(__double_as_longlong(static_cast<double>(number))), "r"(arrived_there)
                 : "memory");
  }
#endif
}

// How many bytes are to come to this block in an exchange; one thread says so.
__device__ __forceinline__ void expect(const unsigned long long* arrived, int bytes) {
#if BLOCKS_PER_ROW == 1 || defined(CUNORM_EMULATOR)
  (void)arrived, (void)bytes;
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(bytes)
               : "memory");
#endif
}

// Waits for them. A barrier of the cluster would also wait for all that was stored before, and empty the cache. So
// would a wait that acquires at the cluster's scope, which what st.async brings does not need.
__device__ __forceinline__ void await(const unsigned long long* arrived, unsigned phase) {
#if BLOCKS_PER_ROW == 1 || defined(CUNORM_EMULATOR)
  (void)arrived, (void)phase;
  cluster_arrive();
  cluster_wait();
#else
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred complete;\n mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        " selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done)
        : "r"(shared_address(arrived)), "r"(phase)
        : "memory");
  }
#endif
}

// Every block of the row gives COUNT numbers, the same in all its threads, and gets those of all, by rank. `turn`
// counts the exchanges.
template <int COUNT>
__device__ __forceinline__ const Compute (&exchange_in_row(Exchange<COUNT>& exchange, int turn,
                                                           const Compute (&numbers)[COUNT]))[BLOCKS_PER_ROW][COUNT] {
  const int slot = turn % 2, rank = rank_in_row();
  const unsigned other = threadIdx.x;
  if (other == 0) expect(&exchange.arrived[slot], sizeof(Compute) * BLOCKS_PER_ROW * COUNT);
  if (other < BLOCKS_PER_ROW) {
    for (int i = 0; i < COUNT; ++i) {
      send(numbers[i], &exchange.numbers[slot][rank][i], &exchange.arrived[slot], other);
    }
  }
  await(&exchange.arrived[slot], turn / 2 % 2);
  return exchange.numbers[slot];
}

// The same for the one exchange there is, of numbers that the block has in shared memory, where all its threads have
// seen them: they share the work. `thread` counts them, up to THREADS_.
template <int THREADS_, int COUNT>
__device__ __forceinline__ const Compute (&exchange_shared(Exchange<COUNT, 1>& exchange, const Compute (&own)[COUNT],
                                                           int thread))[BLOCKS_PER_ROW][COUNT] {
  if constexpr (BLOCKS_PER_ROW == 1) return reinterpret_cast<const Compute(&)[BLOCKS_PER_ROW][COUNT]>(own);
  const int rank = rank_in_row();
  if (thread == 0) expect(exchange.arrived, sizeof(Compute) * BLOCKS_PER_ROW * COUNT);
  for (int i = thread; i < BLOCKS_PER_ROW * COUNT; i += THREADS_) {
    send(own[i % COUNT], &exchange.numbers[0][rank][i % COUNT], exchange.arrived, i / COUNT);
  }
  await(exchange.arrived, 0);
  return exchange.numbers[0];
}
