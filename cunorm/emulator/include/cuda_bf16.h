// Stands in for CUDA's header of the same name: __nv_bfloat16 and __nv_bfloat162, the part of them that kernels use.
#pragma once

#include "small_float.h"

using __nv_bfloat16 = cunorm_emulator::SmallFloat<7, 127>;
using __nv_bfloat162 = cunorm_emulator::Pair<__nv_bfloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
CUNORM_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162)

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __double2bfloat16(double x) { return x; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline short __bfloat16_as_short(__nv_bfloat16 x) { return static_cast<short>(x.bits); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16::from_bits(x); }
inline __nv_bfloat16 __short_as_bfloat16(short x) { return __nv_bfloat16::from_bits(static_cast<unsigned short>(x)); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return __nv_bfloat162(x, x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return __nv_bfloat162(x, y); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __nv_bfloat162(x, x); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return __nv_bfloat162(x.x, x.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
