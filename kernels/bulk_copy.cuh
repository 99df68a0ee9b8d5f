// Runs of memory that come to shared memory, or leave it, by one instruction of one thread (cp.async.bulk, from sm_90
// on). No thread has addresses to compute, or registers to keep what is on its way.
//
// Runs begin at multiples of 16 bytes, in both memories, and are multiples of 16 bytes long. They had better begin as
// far behind a multiple of BULK_ALIGNMENT in the one as in the other.
#define BULK_ALIGNMENT 128

// Where what is fetched arrives: an mbarrier.
struct BulkArrival {
  unsigned long long state;

  // By one thread, once. It may fetch at once; others may wait after a __syncthreads().
  __device__ __forceinline__ void begin() {
#if defined(CUNORM_EMULATOR)
    cunorm_emulator::bulk_begin(this);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(this)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // By that thread: the next phase ends when so many bytes have arrived.
  __device__ __forceinline__ void expect(unsigned bytes) {
#if defined(CUNORM_EMULATOR)
    cunorm_emulator::bulk_expect(this, bytes);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(this)), "r"(bytes)
                 : "memory");
#else
    (void)bytes;
#endif
  }

  template <typename T>
  __device__ __forceinline__ void fetch(T* shared, const T* global, unsigned bytes) {
#if defined(CUNORM_EMULATOR)
    cunorm_emulator::bulk_fetch(this, shared, global, bytes);
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_of(shared)),
                 "l"(global), "r"(bytes), "r"(address_of(this))
                 : "memory");
#endif
  }

  // By all who read it: until that phase has ended, of which only the parity is compared.
  __device__ __forceinline__ void wait(unsigned phase) {
#if defined(CUNORM_EMULATOR)
    cunorm_emulator::bulk_wait(this, phase);
#elif __CUDA_ARCH__ >= 900
    unsigned over;
    do {
      asm volatile(
          "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
          : "=r"(over)
          : "r"(address_of(this)), "r"(phase & 1)
          : "memory");
    } while (over == 0);
#endif
  }

  __device__ __forceinline__ static unsigned address_of(const void* shared) {
#ifdef CUNORM_EMULATOR
    return 0;
#else
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
#endif
  }
};

// By each thread that has written to shared memory what is to be sent, before the __syncthreads() in front of that, or
// before it arrives where who sends waits.
__device__ __forceinline__ void let_bulk_copies_see() {
#if !defined(CUNORM_EMULATOR) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Sends a run on its way.
template <typename T>
__device__ __forceinline__ void send_bulk(T* global, const T* shared, unsigned bytes) {
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::bulk_send(global, shared, bytes);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(global),
               "r"(BulkArrival::address_of(shared)), "r"(bytes)
               : "memory");
#endif
}

// By the thread that sent them: until shared memory has been read, but for the last PENDING runs. A block may not end
// before that.
template <int PENDING>
__device__ __forceinline__ void wait_for_sent() {
#if defined(CUNORM_EMULATOR)
  cunorm_emulator::bulk_wait_sent(PENDING);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#endif
}
