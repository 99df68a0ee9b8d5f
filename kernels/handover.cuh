// How warps of a block hand numbers in shared memory to each other without a barrier of the whole block: in two places,
// or more, which some threads fill in turns and others empty again. What a thread wrote before it arrived somewhere is
// seen by one that has waited for that: for the phase, of those of a place, in which as many threads arrived as are to
// arrive.

#ifdef CUNORM_EMULATOR
template <int ARRIVING, int PLACES = 2>
struct Phases {
  int arrived[PLACES];
  unsigned ended[PLACES];

  void begin() { *this = {}; }
  void arrive(int place) {
    if (++arrived[place] < ARRIVING) return;
    arrived[place] = 0;
    ++ended[place];
  }
  void arrive_behind(int place, unsigned) { arrive(place); }
  void wait(int place, int phase) {
    while (ended[place] % 2 == static_cast<unsigned>(phase) % 2) cunorm_emulator::yield();
  }
  void arrive_in(int turn) { arrive(turn % PLACES); }
  void wait_for(int turn) { wait(turn % PLACES, turn / PLACES); }
};

template <int ARRIVING, int PLACES = 2>
using Mbarriers = Phases<ARRIVING, PLACES>;
template <int FIRST, int ARRIVING, int WAITING>
using WarpBarriers = Phases<ARRIVING>;
#else
// For threads that wait each at its own time: by mbarriers (from sm_80 on).
//
// One thread could arrive for its warp, after a __syncwarp. That takes as long, and compute-sanitizer's racecheck then
// reports what the other lanes wrote as races.
template <int ARRIVING, int PLACES = 2>
struct Mbarriers {
  unsigned long long states[PLACES];

  // By one thread; all others see it after a barrier of the block.
  __device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 800
    for (int i = 0; i < PLACES; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(i)), "n"(ARRIVING) : "memory");
    }
#endif
  }

  __device__ __forceinline__ void arrive(int place) { arrive_behind(place, 0); }

  // Arrives when a word has come to its register: an arrival does not wait for loads whose numbers nobody has used.
  // Part of the address is the word and blockIdx.y, which is 0, but not to the compiler.
  __device__ __forceinline__ void arrive_behind(int place, unsigned word) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = address(place) + (word & blockIdx.y);
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(at) : "memory");
#endif
  }

  // Waits until this phase of the place has ended; phases count from 0. Only a phase's parity is compared, so the phase
  // before it must have ended.
  __device__ __forceinline__ void wait(int place, int phase) {
#if __CUDA_ARCH__ >= 800
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
          : "r"(address(place)), "r"(phase & 1)
          : "memory");
    } while (over == 0);
#endif
  }

  // Where the places are used in turns.
  __device__ __forceinline__ void arrive_in(int turn) { arrive(turn % PLACES); }
  __device__ __forceinline__ void wait_for(int turn) { wait(turn % PLACES, turn / PLACES); }

  __device__ __forceinline__ unsigned address(int place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(states + place));
  }
};

// For WAITING threads that wait together: by the barriers FIRST and FIRST + 1 of those that a block has beside that of
// __syncthreads. To these a warp arrives by one instruction, and those that wait ask for nothing meanwhile.
template <int FIRST, int ARRIVING, int WAITING>
struct WarpBarriers {
  static_assert(FIRST > 0 && FIRST < 15 && ARRIVING % 32 == 0 && WAITING % 32 == 0);
  __device__ __forceinline__ void begin() {}

  // By all lanes of a warp, and only for a phase that will be waited for: it would be left open at the end else.
  __device__ __forceinline__ void arrive(int place) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(FIRST + place), "n"(ARRIVING + WAITING) : "memory");
  }
  __device__ __forceinline__ void wait(int place, int) {
    asm volatile("bar.sync %0, %1;" ::"r"(FIRST + place), "n"(ARRIVING + WAITING) : "memory");
  }
};
#endif

template <typename Full, typename Empty>
struct TwoPlaces {
  Full full;
  Empty empty;

  // By one thread; all others see it after a barrier of the block.
  __device__ __forceinline__ void begin() {
    full.begin();
    empty.begin();
  }
  // Around filling the place of a turn.
  __device__ __forceinline__ void wait_empty(int turn) {
    if (turn >= 2) empty.wait(turn % 2, turn / 2 - 1);
  }
  __device__ __forceinline__ void filled(int turn) { full.arrive(turn % 2); }
  // Around using it.
  __device__ __forceinline__ void wait_full(int turn) { full.wait(turn % 2, turn / 2); }
  __device__ __forceinline__ void emptied(int turn) { empty.arrive(turn % 2); }
};
