// How warps of a block hand numbers in shared memory to each other without a barrier of the block: by an mbarrier (from
// sm_80 on), whose phases end one after the other, each when as many warps have arrived as it expects. What a warp
// wrote before it arrived is seen by a warp that has waited for that phase.
struct alignas(8) Handover {
#ifdef CUNORM_EMULATOR
  int expected;
  int arrived;
  unsigned phases;  // that have ended
#else
  unsigned long long state;
#endif

  // By one thread; all others see it after a barrier of the block.
  __device__ __forceinline__ void expect(int warps) {
#if defined(CUNORM_EMULATOR)
    expected = warps;
    arrived = 0;
    phases = 0;
#elif __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(warps) : "memory");
#endif
  }

  // By all lanes of a warp.
  __device__ __forceinline__ void arrive() {
    __syncwarp();
    if (threadIdx.x % 32 > 0) return;
#if defined(CUNORM_EMULATOR)
    if (++arrived == expected) {
      arrived = 0;
      ++phases;
    }
#elif __CUDA_ARCH__ >= 800
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(address()) : "memory");
#endif
  }

  // Until the phase has ended, counted from 0; the one before it has, or is waited for no more.
  __device__ __forceinline__ void wait(int phase) {
#if defined(CUNORM_EMULATOR)
    while (phases <= static_cast<unsigned>(phase)) cunorm_emulator::yield();
#elif __CUDA_ARCH__ >= 800
    unsigned over;
    do {
      asm volatile(
#if __CUDA_ARCH__ >= 900
          // Lets other warps work meanwhile.
          "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
#else
          "{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
#endif
          : "=r"(over)
          : "r"(address()), "r"(phase & 1)
          : "memory");
    } while (over == 0);
#endif
  }

#ifndef CUNORM_EMULATOR
  __device__ __forceinline__ unsigned address() { return static_cast<unsigned>(__cvta_generic_to_shared(this)); }
#endif
};

// Two places that some warps fill in turns, and others empty again.
struct TwoPlaces {
  Handover full[2];
  Handover empty[2];

  __device__ __forceinline__ void expect(int filling, int emptying) {
    for (int i = 0; i < 2; ++i) {
      full[i].expect(filling);
      empty[i].expect(emptying);
    }
  }
  // Around filling the place of a turn.
  __device__ __forceinline__ void wait_empty(int turn) {
    if (turn >= 2) empty[turn % 2].wait(turn / 2 - 1);
  }
  __device__ __forceinline__ void filled(int turn) { full[turn % 2].arrive(); }
  // Around using it.
  __device__ __forceinline__ void wait_full(int turn) { full[turn % 2].wait(turn / 2); }
  __device__ __forceinline__ void emptied(int turn) { empty[turn % 2].arrive(); }
};
