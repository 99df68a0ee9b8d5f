// Stands in for CUDA's header of the same name: __half and __half2, the part of them that kernels use.
#pragma once

#include "small_float.h"

using __half = cunorm_emulator::SmallFloat<10, 15>;
using __half2 = cunorm_emulator::Pair<__half>;
using half = __half;
using half2 = __half2;
CUNORM_SMALL_FLOAT(__half, __half2)

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline short __half_as_short(__half x) { return static_cast<short>(x.bits); }
inline __half __ushort_as_half(unsigned short x) { return __half::from_bits(x); }
inline __half __short_as_half(short x) { return __half::from_bits(static_cast<unsigned short>(x)); }
inline __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
inline __half2 make_half2(__half x, __half y) { return __half2(x, y); }
inline __half2 __half2half2(__half x) { return __half2(x, x); }
inline __half2 __floats2half2_rn(float x, float y) { return __half2(x, y); }
inline __half2 __float2half2_rn(float x) { return __half2(x, x); }
inline __half2 __float22half2_rn(float2 x) { return __half2(x.x, x.y); }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
