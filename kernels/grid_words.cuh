// How blocks that all run at the same time tell each other numbers, without a fence or a barrier: a word of 64 bits
// carries four bytes of a number and a tag, the number of the turn, so whoever sees the tag sees the bytes. All words
// are zero at the start.
constexpr int WORDS = sizeof(Compute) / 4;  // of a number

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
