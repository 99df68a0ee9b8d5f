// The sixteen-bit floats behind __half and __nv_bfloat16: one template, two widths.
//
// Conversion goes through double, which holds every float exactly, so that a float and a double are each rounded once.
#pragma once

#include "cunorm_emulator.h"

namespace cunorm_emulator {

// The nearest value with FRACTION bits after the leading one, ties to even. NaNs lose their payload, as on a GPU.
template <int FRACTION, int BIAS>
inline unsigned short rounded(double x) {
  constexpr unsigned INFINITE = (2u * BIAS + 1) << FRACTION;
  const unsigned long long bits = bits_as<unsigned long long>(x);
  const unsigned sign = static_cast<unsigned>(bits >> 63) << 15;
  if (x != x) return 0x7fff;
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  if (exponent > BIAS) return static_cast<unsigned short>(sign | INFINITE);
  const int scale = exponent < 1 - BIAS ? 1 - BIAS : exponent;
  // |x| in units of the last place, 2^(scale - FRACTION). Adding 2^52 leaves no bits for a fraction.
  const double unit = bits_as<double>(static_cast<unsigned long long>(1023 - scale + FRACTION) << 52);
  const double units = (x < 0 ? -x : x) * unit + 0x1p52 - 0x1p52;
  // The leading one of `units` carries into the exponent; so does rounding up to the next power of two, or to infinity.
  return static_cast<unsigned short>(sign | ((static_cast<unsigned>(scale + BIAS - 1) << FRACTION) +
                                             static_cast<unsigned>(units)));
}

template <int FRACTION, int BIAS>
inline float widened(unsigned short bits) {
  constexpr unsigned MASK = (1u << FRACTION) - 1, LARGEST = 2u * BIAS + 1;
  const unsigned sign = static_cast<unsigned>(bits >> 15) << 31, fraction = bits & MASK;
  const unsigned exponent = (bits & 0x7fffu) >> FRACTION;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) / (1 << FRACTION) * bits_as<float>((128u - BIAS) << 23);
    return sign ? -magnitude : magnitude;
  }
  const unsigned wide = exponent == LARGEST ? 255u : exponent + 127 - BIAS;
  return bits_as<float>(sign | wide << 23 | fraction << (23 - FRACTION));
}

template <int FRACTION, int BIAS>
struct SmallFloat {
  unsigned short bits;

  SmallFloat() = default;
  SmallFloat(float x) : bits(rounded<FRACTION, BIAS>(x)) {}
  SmallFloat(double x) : bits(rounded<FRACTION, BIAS>(x)) {}
  SmallFloat(int x) : bits(rounded<FRACTION, BIAS>(x)) {}
  SmallFloat(unsigned x) : bits(rounded<FRACTION, BIAS>(x)) {}
  operator float() const { return widened<FRACTION, BIAS>(bits); }
  static SmallFloat from_bits(unsigned short bits) {
    SmallFloat value;
    value.bits = bits;
    return value;
  }

  friend SmallFloat operator+(SmallFloat a, SmallFloat b) { return float(a) + float(b); }
  friend SmallFloat operator-(SmallFloat a, SmallFloat b) { return float(a) - float(b); }
  friend SmallFloat operator*(SmallFloat a, SmallFloat b) { return float(a) * float(b); }
  friend SmallFloat operator/(SmallFloat a, SmallFloat b) { return float(a) / float(b); }
  friend SmallFloat operator-(SmallFloat a) { return from_bits(a.bits ^ 0x8000); }
  SmallFloat& operator+=(SmallFloat b) { return *this = *this + b; }
  SmallFloat& operator-=(SmallFloat b) { return *this = *this - b; }
  SmallFloat& operator*=(SmallFloat b) { return *this = *this * b; }
  SmallFloat& operator/=(SmallFloat b) { return *this = *this / b; }
  friend bool operator==(SmallFloat a, SmallFloat b) { return float(a) == float(b); }
  friend bool operator!=(SmallFloat a, SmallFloat b) { return float(a) != float(b); }
  friend bool operator<(SmallFloat a, SmallFloat b) { return float(a) < float(b); }
  friend bool operator>(SmallFloat a, SmallFloat b) { return float(a) > float(b); }
  friend bool operator<=(SmallFloat a, SmallFloat b) { return float(a) <= float(b); }
  friend bool operator>=(SmallFloat a, SmallFloat b) { return float(a) >= float(b); }
};

template <class T>
struct alignas(4) Pair {
  T x, y;
  Pair() = default;
  Pair(T x_, T y_) : x(x_), y(y_) {}
};

}  // namespace cunorm_emulator

// The functions that the two types share, by the names CUDA gives them.
#define CUNORM_SMALL_FLOAT(T, PAIR)                                                                        \
  inline T __hadd(T a, T b) { return a + b; }                                                              \
  inline T __hsub(T a, T b) { return a - b; }                                                              \
  inline T __hmul(T a, T b) { return a * b; }                                                              \
  inline T __hdiv(T a, T b) { return a / b; }                                                              \
  inline T __hneg(T a) { return -a; }                                                                      \
  inline bool __hisnan(T a) { return isnan(float(a)); }                                                    \
  inline PAIR __hadd2(PAIR a, PAIR b) { return PAIR(a.x + b.x, a.y + b.y); }                               \
  inline PAIR __hsub2(PAIR a, PAIR b) { return PAIR(a.x - b.x, a.y - b.y); }                               \
  inline PAIR __hmul2(PAIR a, PAIR b) { return PAIR(a.x * b.x, a.y * b.y); }                               \
  inline float __low2float(PAIR a) { return a.x; }                                                         \
  inline float __high2float(PAIR a) { return a.y; }                                                        \
  CUNORM_SHUFFLES(T)                                                                                       \
  CUNORM_SHUFFLES(PAIR)
