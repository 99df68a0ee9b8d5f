// Gives the CUDA names in a kernel's text their meaning on a CPU. Included before every kernel.
//
// It includes no standard header, because every specialization of every kernel pays for what stands here; NVRTC has
// none either. What differs from a GPU: subnormal floats are kept (CuPy compiles with -ftz=true), a*b+c is not
// contracted to a fused multiply-add, and the approximate intrinsics (rsqrtf, __expf, ...) are more exact here.
// __CUDA_ARCH__ is left to the kernel's own #defines.
#pragma once

#define CUNORM_EMULATOR 1

#include "runtime.h"

// ---- Qualifiers -----------------------------------------------------------------------------------------------------

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
// Declarations of shared memory are rewritten before the compiler sees them; this is what it says of one that was not.
#define __shared__ a_shared_declaration_must_be_on_one_line_and_declare_one_variable

// ---- Where a thread is ----------------------------------------------------------------------------------------------

#define threadIdx (static_cast<const uint3&>(cunorm_emulator::thread_index))
#define blockIdx (static_cast<const uint3&>(cunorm_emulator::block_index))
#define blockDim (static_cast<const dim3&>(cunorm_emulator::block_shape))
#define gridDim (static_cast<const dim3&>(cunorm_emulator::grid_shape))
constexpr int warpSize = 32;

// ---- Types ----------------------------------------------------------------------------------------------------------

using size_t = decltype(sizeof(0));

#define CUNORM_VECTORS(T, NAME, PAIR_ALIGNMENT, QUAD_ALIGNMENT)                                \
  struct NAME##1 { T x; };                                                                     \
  struct alignas(PAIR_ALIGNMENT) NAME##2 { T x, y; };                                          \
  struct NAME##3 { T x, y, z; };                                                               \
  struct alignas(QUAD_ALIGNMENT) NAME##4 { T x, y, z, w; };                                    \
  CUNORM_MAKE_VECTORS(T, NAME)
#define CUNORM_MAKE_VECTORS(T, NAME)                                                           \
  inline NAME##1 make_##NAME##1(T x) { return {x}; }                                           \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                   \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                           \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

CUNORM_VECTORS(signed char, char, 2, 4)
CUNORM_VECTORS(unsigned char, uchar, 2, 4)
CUNORM_VECTORS(short, short, 4, 8)
CUNORM_VECTORS(unsigned short, ushort, 4, 8)
CUNORM_VECTORS(int, int, 8, 16)
CUNORM_VECTORS(long long, longlong, 16, 16)
CUNORM_VECTORS(unsigned long long, ulonglong, 16, 16)
CUNORM_VECTORS(float, float, 8, 16)
CUNORM_VECTORS(double, double, 16, 16)
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };  // uint3 is in runtime.h
CUNORM_MAKE_VECTORS(unsigned, uint)

// ---- Bits -----------------------------------------------------------------------------------------------------------

namespace cunorm_emulator {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace cunorm_emulator

inline int __float_as_int(float x) { return cunorm_emulator::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return cunorm_emulator::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return cunorm_emulator::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return cunorm_emulator::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return cunorm_emulator::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return cunorm_emulator::bits_as<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

#define CUNORM_MATH_1(NAME)                             \
  extern "C" double NAME(double) noexcept;              \
  extern "C" float NAME##f(float) noexcept;             \
  inline float NAME(float x) { return NAME##f(x); }
#define CUNORM_MATH_2(NAME)                             \
  extern "C" double NAME(double, double) noexcept;      \
  extern "C" float NAME##f(float, float) noexcept;      \
  inline float NAME(float x, float y) { return NAME##f(x, y); }
CUNORM_MATH_1(sqrt)
CUNORM_MATH_1(exp)
CUNORM_MATH_1(exp2)
CUNORM_MATH_1(expm1)
CUNORM_MATH_1(log)
CUNORM_MATH_1(log2)
CUNORM_MATH_1(log1p)
CUNORM_MATH_1(erf)
CUNORM_MATH_1(erfc)
CUNORM_MATH_1(tanh)
CUNORM_MATH_1(sin)
CUNORM_MATH_1(cos)
CUNORM_MATH_1(fabs)
CUNORM_MATH_1(floor)
CUNORM_MATH_1(ceil)
CUNORM_MATH_1(trunc)
CUNORM_MATH_1(round)
CUNORM_MATH_1(rint)
CUNORM_MATH_2(pow)
CUNORM_MATH_2(fmax)
CUNORM_MATH_2(fmin)
CUNORM_MATH_2(fmod)
CUNORM_MATH_2(copysign)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" int abs(int) noexcept;
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

#define CUNORM_MIN_MAX(T)                               \
  inline T min(T x, T y) { return y < x ? y : x; }      \
  inline T max(T x, T y) { return x < y ? y : x; }
CUNORM_MIN_MAX(int)
CUNORM_MIN_MAX(unsigned)
CUNORM_MIN_MAX(long)
CUNORM_MIN_MAX(unsigned long)
CUNORM_MIN_MAX(long long)
CUNORM_MIN_MAX(unsigned long long)
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }

inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// Rounding twice is harmless: of all floats, none has a reciprocal root so close to a midpoint of two floats that the
// double before it is off (counted over the two binades that decide).
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float rsqrt(float x) { return __frsqrt_rn(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }

// ---- Memory ---------------------------------------------------------------------------------------------------------

namespace cunorm_emulator {

// The type T, arrays included, spelled so that `Same<float[32]>*` is a pointer to an array.
template <class T>
struct Identity {
  using Type = T;
};
template <class T>
using Same = typename Identity<T>::Type;

// What `__shared__ T name;` is rewritten to. The key is a lambda that returns an address of its own.
template <class T, class Key>
inline T& shared_variable(const char* name, Key key) {
  return *static_cast<T*>(static_shared(name, sizeof(T), key()));
}

template <class T>
inline T cached_load(const T* address, Site site) {
  check_aligned(address, alignof(T), site);
  return *address;
}

template <class T>
inline void cached_store(T* address, const Same<T>& value, Site site) {
  check_aligned(address, alignof(T), site);
  *address = value;
}

// Every atomic lets other threads run, so that a loop around one ends and an order that nobody promised shows.
template <class T, class Change>
inline T atomic(T* address, Change change, Site site) {
  check_aligned(address, alignof(T), site);
  yield();
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace cunorm_emulator

#define CUNORM_LOAD(NAME)                                                                                  \
  template <class T>                                                                                       \
  inline T NAME(const T* address, cunorm_emulator::Site site = cunorm_emulator::Site::here()) {            \
    return cunorm_emulator::cached_load(address, site);                                                    \
  }
#define CUNORM_STORE(NAME)                                                                                 \
  template <class T>                                                                                       \
  inline void NAME(T* address, cunorm_emulator::Same<T> value,                                             \
                   cunorm_emulator::Site site = cunorm_emulator::Site::here()) {                           \
    cunorm_emulator::cached_store(address, value, site);                                                   \
  }
CUNORM_LOAD(__ldg)
CUNORM_LOAD(__ldca)
CUNORM_LOAD(__ldcs)
CUNORM_LOAD(__ldcg)
CUNORM_LOAD(__ldcv)
CUNORM_LOAD(__ldlu)
CUNORM_STORE(__stwb)
CUNORM_STORE(__stcg)
CUNORM_STORE(__stcs)
CUNORM_STORE(__stwt)

#define CUNORM_ATOMIC(NAME, T, RESULT)                                                                     \
  inline T NAME(T* address, T value, cunorm_emulator::Site site = cunorm_emulator::Site::here()) {         \
    return cunorm_emulator::atomic(address, [value](T old) -> T { return RESULT; }, site);                 \
  }
#define CUNORM_ATOMICS(T)                                                                                  \
  CUNORM_ATOMIC(atomicAdd, T, old + value)                                                                 \
  CUNORM_ATOMIC(atomicExch, T, (static_cast<void>(old), value))                                            \
  CUNORM_ATOMIC(atomicMax, T, old < value ? value : old)                                                   \
  CUNORM_ATOMIC(atomicMin, T, value < old ? value : old)                                                   \
  CUNORM_ATOMIC(atomicAnd, T, old & value)                                                                 \
  CUNORM_ATOMIC(atomicOr, T, old | value)                                                                  \
  inline T atomicCAS(T* address, T compare, T value,                                                       \
                     cunorm_emulator::Site site = cunorm_emulator::Site::here()) {                         \
    return cunorm_emulator::atomic(address, [=](T old) { return old == compare ? value : old; }, site);    \
  }
CUNORM_ATOMICS(int)
CUNORM_ATOMICS(unsigned)
CUNORM_ATOMICS(unsigned long long)
CUNORM_ATOMIC(atomicAdd, float, old + value)
CUNORM_ATOMIC(atomicAdd, double, old + value)
CUNORM_ATOMIC(atomicExch, float, (static_cast<void>(old), value))

// ---- Barriers and warp primitives -----------------------------------------------------------------------------------

inline void __syncthreads(cunorm_emulator::Site site = cunorm_emulator::Site::here()) {
  cunorm_emulator::block_barrier("__syncthreads()", cunorm_emulator::Combine::none, 0, site);
}
#define CUNORM_BARRIER(NAME, COMBINE)                                                                      \
  inline int NAME(int predicate, cunorm_emulator::Site site = cunorm_emulator::Site::here()) {             \
    return static_cast<int>(                                                                               \
        cunorm_emulator::block_barrier(#NAME "()", cunorm_emulator::Combine::COMBINE, predicate != 0, site)); \
  }
CUNORM_BARRIER(__syncthreads_and, all)
CUNORM_BARRIER(__syncthreads_or, any)
CUNORM_BARRIER(__syncthreads_count, count)

inline void __syncwarp(unsigned mask = 0xffffffffu, cunorm_emulator::Site site = cunorm_emulator::Site::here()) {
  cunorm_emulator::warp_collective("__syncwarp()", cunorm_emulator::Combine::none, mask, 0, 0, site);
}
// The lanes that have not exited. On a GPU it may be any of them, so a kernel that means "those who are here" by it
// will wait for the others, and be told so.
inline unsigned __activemask() { return cunorm_emulator::live_lanes(); }

#define CUNORM_VOTE(NAME, COMBINE, RESULT)                                                                 \
  inline RESULT NAME(unsigned mask, int predicate,                                                         \
                     cunorm_emulator::Site site = cunorm_emulator::Site::here()) {                         \
    return static_cast<RESULT>(cunorm_emulator::warp_collective(                                           \
        #NAME "()", cunorm_emulator::Combine::COMBINE, mask, predicate != 0, 0, site));                    \
  }
CUNORM_VOTE(__ballot_sync, ballot, unsigned)
CUNORM_VOTE(__any_sync, any, int)
CUNORM_VOTE(__all_sync, all, int)

#define CUNORM_REDUCE(NAME, COMBINE, T)                                                                    \
  inline T NAME(unsigned mask, T value, cunorm_emulator::Site site = cunorm_emulator::Site::here()) {      \
    return static_cast<T>(cunorm_emulator::warp_collective(                                                \
        #NAME "()", cunorm_emulator::Combine::COMBINE, mask,                                               \
        static_cast<unsigned long long>(static_cast<long long>(value)), 0, site));                         \
  }
CUNORM_REDUCE(__reduce_add_sync, add, int)
CUNORM_REDUCE(__reduce_add_sync, add, unsigned)
CUNORM_REDUCE(__reduce_min_sync, min, int)
CUNORM_REDUCE(__reduce_min_sync, min, unsigned)
CUNORM_REDUCE(__reduce_max_sync, max, int)
CUNORM_REDUCE(__reduce_max_sync, max, unsigned)
CUNORM_REDUCE(__reduce_and_sync, bit_and, unsigned)
CUNORM_REDUCE(__reduce_or_sync, bit_or, unsigned)
CUNORM_REDUCE(__reduce_xor_sync, bit_xor, unsigned)

namespace cunorm_emulator {

template <class T>
inline T shuffle(const char* name, unsigned mask, T value, int source, int width, Site site) {
  if (width < 1 || width > warpSize || (width & (width - 1)) != 0) fail(site, "%s: width %d", name, width);
  const int self = static_cast<int>(lane()), first = self & ~(width - 1);
  // A lane outside the segment means "keep your own value"; xor may also reach the segments below.
  const bool xors = name[7] == 'x';
  const bool outside = source >= first + width || (!xors && source < first);
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = warp_collective(name, Combine::shuffle, mask, bits, outside ? self : source, site);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// A shift past every lane is as good as one of a whole warp, and does not overflow.
inline int shift(unsigned delta) { return static_cast<int>(delta < 32 ? delta : 32); }
inline int own_lane() { return static_cast<int>(lane()); }

}  // namespace cunorm_emulator

#define CUNORM_SHUFFLE(NAME, T, PARAMETER, SOURCE)                                                         \
  inline T NAME(unsigned mask, T value, PARAMETER lane, int width = warpSize,                              \
                cunorm_emulator::Site site = cunorm_emulator::Site::here()) {                              \
    return cunorm_emulator::shuffle(#NAME "()", mask, value, SOURCE, width, site);                         \
  }
#define CUNORM_SHUFFLES(T)                                                                                 \
  CUNORM_SHUFFLE(__shfl_sync, T, int, (cunorm_emulator::own_lane() & ~(width - 1)) + (lane & (width - 1))) \
  CUNORM_SHUFFLE(__shfl_xor_sync, T, int, cunorm_emulator::own_lane() ^ (lane & 31))                            \
  CUNORM_SHUFFLE(__shfl_up_sync, T, unsigned, cunorm_emulator::own_lane() - cunorm_emulator::shift(lane))  \
  CUNORM_SHUFFLE(__shfl_down_sync, T, unsigned, cunorm_emulator::own_lane() + cunorm_emulator::shift(lane))
CUNORM_SHUFFLES(int)
CUNORM_SHUFFLES(unsigned)
CUNORM_SHUFFLES(long)
CUNORM_SHUFFLES(unsigned long)
CUNORM_SHUFFLES(long long)
CUNORM_SHUFFLES(unsigned long long)
CUNORM_SHUFFLES(float)
CUNORM_SHUFFLES(double)

// ---- Order and time -------------------------------------------------------------------------------------------------

// Fibers see each other's writes at once; what a fence can show here is only that others may run in between.
inline void __threadfence() { cunorm_emulator::yield(); }
inline void __threadfence_block() { cunorm_emulator::yield(); }
inline void __threadfence_system() { cunorm_emulator::yield(); }
inline void __nanosleep(unsigned) { cunorm_emulator::sleep(); }
inline long long clock64() { return static_cast<long long>(cunorm_emulator::clock()); }
inline void __trap(cunorm_emulator::Site site = cunorm_emulator::Site::here()) {
  cunorm_emulator::fail(site, "__trap()");
}
extern "C" int printf(const char* format, ...);
#define assert(condition)                                                                                  \
  ((condition) ? static_cast<void>(0)                                                                      \
               : cunorm_emulator::fail({__FILE__, __LINE__}, "assertion failed: %s", #condition))

// ---- What a GPU has only as PTX -------------------------------------------------------------------------------------
//
// A kernel wraps PTX in a function of its own; under `#ifdef CUNORM_EMULATOR` that function calls one of these, each of
// which is declared in runtime.h:
//
//   barrier.cluster.arrive, .wait    cunorm_emulator::cluster_arrive(site), cluster_wait(site)
//   %cluster_ctarank, _nctarank      cunorm_emulator::cluster_rank(), cluster_blocks()
//   mapa.shared::cluster             cunorm_emulator::cluster_map(address, rank, site)
//   a loop on ld.acquire             cunorm_emulator::yield() in its body
//   cp.async                         cunorm_emulator::copy_async(shared, global, bytes), copy_async_first(…, read)
//   cp.async.commit_group, wait_group cunorm_emulator::copy_async_commit(), copy_async_wait(pending)
//   cp.async.bulk to shared memory   cunorm_emulator::bulk_begin(barrier), bulk_expect(barrier, bytes),
//                                    bulk_fetch(barrier, shared, global, bytes), bulk_wait(barrier, phase)
//   cp.async.bulk from shared memory cunorm_emulator::bulk_send(global, shared, bytes), bulk_wait_sent(pending)
//
// New ones are declared in runtime.h, defined at the end of runtime.cpp, and listed here.
