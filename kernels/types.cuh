// How numbers are held: X_TYPE in memory, Compute in registers, sixteen bytes at a time between the two.
//
// Compute is float, and double where the data is double. A tensor is read and written as Vector<T, COUNT>, whose
// alignment is its size, so that the compiler makes one access of it; who asks for a Vector promises that alignment.
//
// Every kernel's __launch_bounds__ names how many blocks are to share a multiprocessor, 1 where nothing else was
// measured: with no number there, ptxas spills registers to reach an occupancy of its own choosing.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Compute = COMPUTE_TYPE;

// A number that is known when the kernel is compiled, as an argument of a lambda.
template <int VALUE>
struct Known {
  static constexpr int value = VALUE;
};

// Which of a vector's numbers are there: all of them.
struct All {
  __device__ __forceinline__ constexpr bool operator()(int) const { return true; }
};

__device__ __forceinline__ Compute widen(__half value) { return __half2float(value); }
// The upper half of a float. As a shift it takes one instruction also from the middle of a word.
__device__ __forceinline__ Compute widen(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(__bfloat16_as_ushort(value)) << 16);
}
__device__ __forceinline__ Compute widen(float value) { return static_cast<Compute>(value); }
__device__ __forceinline__ Compute widen(double value) { return static_cast<Compute>(value); }

// Round to nearest even, once: from a double straight to sixteen bits too.
__device__ __forceinline__ void narrow(float value, __half& result) { result = __float2half_rn(value); }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& result) { result = __float2bfloat16_rn(value); }
__device__ __forceinline__ void narrow(double value, __half& result) { result = __double2half(value); }
__device__ __forceinline__ void narrow(double value, __nv_bfloat16& result) { result = __double2bfloat16(value); }
__device__ __forceinline__ void narrow(float value, float& result) { result = value; }
__device__ __forceinline__ void narrow(float value, double& result) { result = value; }
__device__ __forceinline__ void narrow(double value, float& result) { result = static_cast<float>(value); }
__device__ __forceinline__ void narrow(double value, double& result) { result = value; }

// The last argument only tells the type.
__device__ __forceinline__ __half2 round_pair(float x, float y, __half) { return __floats2half2_rn(x, y); }
__device__ __forceinline__ __nv_bfloat162 round_pair(float x, float y, __nv_bfloat16) {
  return __floats2bfloat162_rn(x, y);
}

template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
  T lane[COUNT];
};

// A vector's i-th number. The second of two bfloat16 in a word is the word's upper half where it lies: taken by itself,
// ptxas would move it down and up again.
template <typename T, int COUNT>
__device__ __forceinline__ Compute widen(const Vector<T, COUNT>& values, int i) {
  return widen(values.lane[i]);
}
template <int COUNT>
__device__ __forceinline__ Compute widen(const Vector<__nv_bfloat16, COUNT>& values, int i) {
  if constexpr (COUNT % 2 > 0) return widen(values.lane[i]);
  const unsigned word = reinterpret_cast<const unsigned*>(&values)[i / 2];
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000);
}

// Rounds COUNT numbers, sixteen-bit ones in pairs, for which there is one instruction.
template <typename T, int COUNT>
__device__ __forceinline__ Vector<T, COUNT> rounded(const Compute (&values)[COUNT]) {
  Vector<T, COUNT> result;
  if constexpr (sizeof(T) == 2 && sizeof(Compute) == 4 && COUNT % 2 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const auto pair = round_pair(values[i], values[i + 1], result.lane[i]);
      result.lane[i] = pair.x;
      result.lane[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) narrow(values[i], result.lane[i]);
  }
  return result;
}

template <typename T, int COUNT>
__device__ __forceinline__ Vector<T, COUNT> load(const T* source) {
  return *reinterpret_cast<const Vector<T, COUNT>*>(source);
}

template <typename T, int COUNT>
__device__ __forceinline__ void store(T* target, const Vector<T, COUNT>& values) {
  *reinterpret_cast<Vector<T, COUNT>*>(target) = values;
}

// The same to memory that is not shared. Sixteen bytes are sure to go at once: the compiler makes several stores of
// a plain one where the address comes from a remainder, as in a peeled row.
template <typename T, int COUNT>
__device__ __forceinline__ void store_global(T* target, const Vector<T, COUNT>& values) {
  if constexpr (sizeof(values) == 16) {
    __stwb(reinterpret_cast<uint4*>(target), *reinterpret_cast<const uint4*>(&values));
  } else {
    store(target, values);
  }
}

// Makes the compiler take an address or a number as it is: it would make it again wherever it is used. To finish a
// vector of float16 and fill its slot again takes channel_pipeline_forward 44 instructions so, and 69 otherwise.
template <typename T>
__device__ __forceinline__ void pin(T& value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

// The same of a pointer to shared memory, which stays one.
template <typename T>
__device__ __forceinline__ T* pinned_shared(T* pointer) {
#ifdef CUNORM_EMULATOR
  return pointer;
#else
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(pointer));
  pin(address);
  return static_cast<T*>(__cvta_shared_to_generic(address));
#endif
}

// Ends a basic block, out of which ptxas moves no load: by a branch that is never taken, since there are columns. Else
// it may use what has come before it asks for the next, and nothing else keeps it from that.
__device__ __forceinline__ void end_basic_block(long long columns) {
  if (columns == 0) __trap();
}

// Makes the compiler forget what it has widened, so that the next pass widens the same registers again: it would keep
// both, and spill.
template <typename T, int COUNT>
__device__ __forceinline__ void forget_widened(Vector<T, COUNT>& values) {
  if constexpr (sizeof(T) * COUNT >= 4) {
    unsigned* words = reinterpret_cast<unsigned*>(&values);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * COUNT / 4; ++i) asm volatile("" : "+r"(words[i]));
  }
}

// Rounds COUNT numbers and writes them, up to 16 bytes at a time. As many numbers from one thread to the next cost
// eight times the traffic if each went alone. The target is aligned to what is written at once.
template <int COUNT, typename T>
__device__ __forceinline__ void store_rounded(T* target, const Compute (&values)[COUNT]) {
  constexpr int STEP = 16 / sizeof(T) < COUNT ? 16 / sizeof(T) : COUNT;
#pragma unroll
  for (int first = 0; first < COUNT; first += STEP) {
    Compute piece[STEP];
#pragma unroll
    for (int i = 0; i < STEP; ++i) piece[i] = values[first + i];
    store_global(target + first, rounded<T>(piece));
  }
}

// COUNT elements from anywhere, together 16 bytes, as the two aligned pieces of 16 bytes that they lie in. The second
// is read even where the first holds them all; what the two have beside the elements must be memory too.
template <typename T, int COUNT>
struct Straddling {
  unsigned words[8];

  __device__ __forceinline__ void load_aligned(const T* aligned) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const Vector<unsigned, 4> piece = load<unsigned, 4>(reinterpret_cast<const unsigned*>(aligned) + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = piece.lane[j];
    }
  }

  // The elements, which begin `shift` bytes into the first piece.
  __device__ __forceinline__ Vector<T, COUNT> at(unsigned shift) const {
    unsigned moved[8], result[4];
#pragma unroll
    for (int i = 0; i < 6; ++i) moved[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) moved[i] = shift & 4 ? moved[i + 1] : moved[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned long long both = static_cast<unsigned long long>(moved[i + 1]) << 32 | moved[i];
      result[i] = sizeof(T) == 2 ? static_cast<unsigned>(both >> (shift & 2) * 8) : moved[i];
    }
    return *reinterpret_cast<const Vector<T, COUNT>*>(result);
  }
};

// The first LENGTH of some elements from where 16 bytes begin, in as few accesses as there are powers of two in it.
template <int LENGTH, int FIRST, int STEP, typename T, int COUNT>
__device__ __forceinline__ void load_first(const T* source, Vector<T, COUNT>& values) {
  if constexpr (STEP > 0) {
    constexpr bool TAKEN = (LENGTH & STEP) > 0;
    if constexpr (TAKEN) {
      const Vector<T, STEP> piece = load<T, STEP>(source + FIRST);
#pragma unroll
      for (int i = 0; i < STEP; ++i) values.lane[FIRST + i] = piece.lane[i];
    }
    load_first<LENGTH, FIRST + (TAKEN ? STEP : 0), STEP / 2>(source, values);
  }
}

// COUNT elements, together 16 bytes or a multiple of that, that begin SHIFT elements behind a multiple of 16 bytes: the
// piece that they begin in, those that follow, and of the last those elements that lie there.
template <int SHIFT, int COUNT, typename T>
__device__ __forceinline__ Vector<T, COUNT> load_shifted(const T* source) {
  if constexpr (SHIFT == 0) return load<T, COUNT>(source);
  constexpr int PIECE_ELEMENTS = 16 / sizeof(T), PIECES = COUNT / PIECE_ELEMENTS;
  Vector<T, PIECE_ELEMENTS> pieces[PIECES + 1];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) pieces[i] = load<T, PIECE_ELEMENTS>(source - SHIFT + i * PIECE_ELEMENTS);
  load_first<SHIFT, 0, PIECE_ELEMENTS / 2>(source - SHIFT + COUNT, pieces[PIECES]);
  Vector<T, COUNT> result;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    result.lane[i] = pieces[(i + SHIFT) / PIECE_ELEMENTS].lane[(i + SHIFT) % PIECE_ELEMENTS];
  }
  return result;
}

// COUNT values of a weight or bias, in pieces of ACCESS_BYTES: its type may be wider than x's, its alignment smaller.
template <int COUNT, int ACCESS_BYTES, typename T>
__device__ __forceinline__ Vector<T, COUNT> load_in_pieces(const T* source) {
  constexpr int STEP = ACCESS_BYTES / sizeof(T) < COUNT ? ACCESS_BYTES / sizeof(T) : COUNT;
  Vector<T, COUNT> result;
#pragma unroll
  for (int first = 0; first < COUNT; first += STEP) {
    const Vector<T, STEP> piece = load<T, STEP>(source + first);
#pragma unroll
    for (int i = 0; i < STEP; ++i) result.lane[first + i] = piece.lane[i];
  }
  return result;
}

// The same from anywhere: in pieces of 16 bytes, as Straddling reads, or number by number where that is too much. What
// takes as many of them, multiples of 16 bytes apart, needs to find out only once where they lie.
template <typename T, int COUNT>
struct Anywhere {
  static constexpr int STEP = 16 / sizeof(T);
  static constexpr bool IN_PIECES = STEP <= COUNT;

  const T* first;  // the piece that they begin in, or where they begin
  unsigned shift;  // how far behind that, in bytes

  __device__ __forceinline__ explicit Anywhere(const T* source) : first(source), shift(0) {
    if constexpr (IN_PIECES) {
      shift = static_cast<unsigned>(reinterpret_cast<size_t>(source) % 16);
      first = source - shift / sizeof(T);
    }
  }

  __device__ __forceinline__ Vector<T, COUNT> load_from(int distance) const {
    if constexpr (!IN_PIECES) return load_in_pieces<COUNT, sizeof(T)>(first + distance);
    Vector<T, COUNT> result;
#pragma unroll
    for (int i = 0; i < COUNT; i += STEP) {
      Straddling<T, STEP> pieces;
      pieces.load_aligned(first + distance + i);
      const Vector<T, STEP> piece = pieces.at(shift);
#pragma unroll
      for (int j = 0; j < STEP; ++j) result.lane[i + j] = piece.lane[j];
    }
    return result;
  }
};

// Those in pieces in Compute, each widened as it comes: for a tiny row ptxas needs 63 registers so, and 71 where it has
// them all first.
template <int COUNT, int ACCESS_BYTES, typename T>
__device__ __forceinline__ void load_widened(const T* source, Compute (&widened)[COUNT]) {
  constexpr int STEP = ACCESS_BYTES / sizeof(T) < COUNT ? ACCESS_BYTES / sizeof(T) : COUNT;
#pragma unroll
  for (int first = 0; first < COUNT; first += STEP) {
    const Vector<T, STEP> piece = load<T, STEP>(source + first);
#pragma unroll
    for (int i = 0; i < STEP; ++i) widened[first + i] = widen(piece, i);
  }
}

template <typename T, int COUNT>
__device__ __forceinline__ void widen_all(const Vector<T, COUNT>& values, Compute (&widened)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) widened[i] = widen(values, i);
}

// What is normalized where there is a residual: the sum as it is rounded.
template <typename T, int COUNT>
__device__ __forceinline__ Vector<T, COUNT> sum_of(const Vector<T, COUNT>& x, const Vector<T, COUNT>& residual) {
  Compute sum[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum[i] = widen(x, i) + widen(residual, i);
  return rounded<T>(sum);
}

// The hardware's guess and a step of Newton's: without a branch. One time in seven the last bit is not that of
// __frsqrt_rn. Of zero and of infinity the guess stands.
__device__ __forceinline__ float reciprocal_sqrt(float value) {
  const float guess = rsqrtf(value), error = fmaf(-value * guess, guess, 1.0f);
  return error == error ? fmaf(0.5f * guess, error, guess) : guess;
}
__device__ __forceinline__ double reciprocal_sqrt(double value) { return 1.0 / sqrt(value); }

// A mean of squares less the square of a mean. Of equal numbers far from zero, rounding may leave less than nothing,
// whose root is NaN. What is NaN stays so.
template <typename Number>
__device__ __forceinline__ Number not_negative(Number variance) {
  return variance < 0 ? 0 : variance;
}

// Of a count: not zero, and so small that a division would take none of its branches.
__device__ __forceinline__ float reciprocal_of(float count) {
  const float guess = __fdividef(1.0f, count);
  return fmaf(fmaf(-count, guess, 1.0f), guess, guess);
}
__device__ __forceinline__ double reciprocal_of(double count) { return 1.0 / count; }
