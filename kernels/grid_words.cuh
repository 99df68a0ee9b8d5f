// How blocks that all run at the same time tell each other numbers, without a fence or a barrier: a word of 64 bits
// carries four bytes of a number and a tag, the number of the turn, so whoever sees the tag sees the bytes. All words
// are zero at the start: the blocks clear them, and whoever uses them waits until all have, once, while the first
// numbers are on their way. A launch before this one that clears them would cost 3 us.
constexpr int WORDS = sizeof(Compute) / 4;  // of a number

// How many blocks have cleared their words, as the driver counts blocks of cooperative launches for this_grid().sync()
// of cooperative_groups.h: that adds as much, and waits as long. It is not included, since it asks for a header that
// the wheels of CUDA's runtime do not bring.
struct BlockCounter {
#ifdef CUNORM_EMULATOR
  __device__ __forceinline__ static unsigned arrive() {
    cunorm_emulator::arrive_at_grid();
    return 0;
  }
  __device__ __forceinline__ static void wait(unsigned) { cunorm_emulator::wait_for_grid(); }
#else
  __device__ __forceinline__ static unsigned* counter() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    return reinterpret_cast<unsigned*>(static_cast<unsigned long long>(high) << 32 | low) + 1;
  }
  // Returns what was counted before.
  __device__ __forceinline__ static unsigned arrive() {
    // The first block adds what makes the highest bit another when all have come.
    const unsigned own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    unsigned before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter()), "r"(own)
                 : "memory");
    return before;
  }
  __device__ __forceinline__ static void wait(unsigned before) {
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter()) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
#endif
};

// What a block found counted when it came.
__device__ __forceinline__ unsigned& counted_before() {
  __shared__ unsigned before;
  return before;
}

// Clears this block's share of so many pairs of words, fewer than 2^31. For all threads, before they ask for anything
// else: that the block has come is told by the last of them, when all that is on its way to it has come.
__device__ __forceinline__ void clear_words(long long* words, long long pairs) {
  const unsigned threads = blockDim.x * blockDim.y, first = blockIdx.x * threads + threadIdx.y * blockDim.x;
  for (unsigned i = first + threadIdx.x; i < pairs; i += gridDim.x * threads) {
    reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1) counted_before() = BlockCounter::arrive();
}

// Waits until all blocks have cleared their words. For whoever uses them, before the first use, and behind a barrier
// that follows clear_words, whose last thread leaves in shared memory what it counted. Not sooner: this asks the
// memory, behind all that a multiprocessor has asked for.
__device__ __forceinline__ void wait_for_words() { BlockCounter::wait(counted_before()); }

__device__ __forceinline__ unsigned bits_of(float number, int) { return __float_as_uint(number); }
__device__ __forceinline__ unsigned bits_of(double number, int word) {
  return static_cast<unsigned>(static_cast<unsigned long long>(__double_as_longlong(number)) >> 32 * word);
}
__device__ __forceinline__ float number_of(const unsigned (&bits)[1]) { return __uint_as_float(bits[0]); }
__device__ __forceinline__ double number_of(const unsigned (&bits)[2]) {
  return __longlong_as_double(static_cast<long long>(static_cast<unsigned long long>(bits[1]) << 32 | bits[0]));
}

// 64 bits that all blocks see, whole: old or new.
__device__ __forceinline__ void store_word(long long* word, unsigned tag, unsigned bits) {
  const unsigned long long value = static_cast<unsigned long long>(tag) << 32 | bits;
#ifdef CUNORM_EMULATOR
  cunorm_emulator::yield();
  *word = static_cast<long long>(value);
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
}

// A word as it is now.
__device__ __forceinline__ long long load_word(const long long* word) {
#ifdef CUNORM_EMULATOR
  cunorm_emulator::yield();
  return *word;
#else
  long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#endif
}

__device__ __forceinline__ bool has_tag(long long word, unsigned tag) {
  return static_cast<unsigned>(static_cast<unsigned long long>(word) >> 32) == tag;
}
__device__ __forceinline__ unsigned bits_of_word(long long word) { return static_cast<unsigned>(word); }

// The bits of a word, when its tag has come.
__device__ __forceinline__ unsigned await_word(const long long* word, unsigned tag) {
  long long value;
  do {
    value = load_word(word);
  } while (!has_tag(value, tag));
  return bits_of_word(value);
}

// The number in the words from one on, when their tags have come.
__device__ __forceinline__ Compute await_number(const long long* words, unsigned tag) {
  unsigned bits[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) bits[i] = await_word(words + i, tag);
  return number_of(bits);
}

// Two or three floats on their way between blocks, in 16 bytes that one instruction moves. Others may see one half of
// these before the other, but each of them whole: so each has a tag of 16 bits, beside a number and half of the third.
// With that in place of a word for each number, and asked for before there is a place for them in shared memory,
// channel_pipeline_forward takes 0.90 to 0.98 of the time.
struct Parcel {
  unsigned long long halves[2];

  __device__ __forceinline__ unsigned bits(int half) const { return static_cast<unsigned>(halves[half]); }
  __device__ __forceinline__ unsigned above(int half) const { return static_cast<unsigned>(halves[half] >> 32); }

  template <int COUNT>
  __device__ __forceinline__ void get(float (&numbers)[COUNT]) const {
    static_assert(COUNT == 2 || COUNT == 3);
    numbers[0] = __uint_as_float(bits(0));
    numbers[1] = __uint_as_float(bits(1));
    if constexpr (COUNT > 2) numbers[2] = __uint_as_float((above(0) & 0xffffu) | above(1) << 16);
  }
};

__device__ __forceinline__ bool has_tag(const Parcel& parcel, unsigned tag) {
  return (parcel.above(0) >> 16 | (parcel.above(1) & 0xffff0000u)) == tag * 0x10001u;
}

// Of a turn: never 0, and another than that of each of the 65,534 turns before.
__device__ __forceinline__ unsigned parcel_tag(int turn) { return static_cast<unsigned>(turn) % 0xffffu + 1; }

template <int COUNT>
__device__ __forceinline__ Parcel parcel_of(const float (&numbers)[COUNT], unsigned tag) {
  static_assert(COUNT == 2 || COUNT == 3);
  unsigned third = 0;
  if constexpr (COUNT > 2) third = __float_as_uint(numbers[2]);
  const unsigned above[2] = {tag << 16 | (third & 0xffffu), tag << 16 | third >> 16};
  Parcel parcel;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    parcel.halves[i] = static_cast<unsigned long long>(above[i]) << 32 | __float_as_uint(numbers[i]);
  }
  return parcel;
}

__device__ __forceinline__ void store_word(Parcel* place, const Parcel& parcel) {
#ifdef CUNORM_EMULATOR
  for (int i = 0; i < 2; ++i) {
    cunorm_emulator::yield();
    place->halves[i] = parcel.halves[i];
  }
#else
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(parcel.halves[0]),
               "l"(parcel.halves[1])
               : "memory");
#endif
}

__device__ __forceinline__ Parcel load_word(const Parcel* place) {
  Parcel parcel;
#ifdef CUNORM_EMULATOR
  for (int i = 0; i < 2; ++i) {
    cunorm_emulator::yield();
    parcel.halves[i] = place->halves[i];
  }
#else
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(parcel.halves[0]), "=l"(parcel.halves[1])
               : "l"(place)
               : "memory");
#endif
  return parcel;
}
