// float16 for a host compiler.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half h) {
  const int exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
  const float magnitude = exponent == 31  ? __builtin_inff()
                          : exponent == 0 ? __builtin_ldexpf(float(fraction), -24)
                                          : __builtin_ldexpf(float(fraction + 1024), exponent - 25);
  return h.bits & 0x8000 ? -magnitude : magnitude;
}

// Round to nearest, ties to even; values beyond the range become infinite.
inline __half __float2half_rn(float value) {
  const uint16_t sign = value < 0 || (value == 0 && 1 / value < 0) ? 0x8000 : 0;
  const float magnitude = value < 0 ? -value : value;
  if (!(magnitude < 65520.0f)) return {uint16_t(sign | 0x7c00)};
  if (magnitude == 0) return {sign};
  int exponent = 0;
  __builtin_frexpf(magnitude, &exponent);  // magnitude < 2^exponent
  const int step = exponent < -13 ? -24 : exponent - 11;
  const float scaled = __builtin_ldexpf(magnitude, -step);
  const int rounded = int(__builtin_rintf(scaled));
  if (exponent < -13) return {uint16_t(sign | rounded)};
  // `rounded` is 1024 .. 2048; 2048 carries into the exponent by itself.
  return {uint16_t(sign | (((exponent + 14) << 10) + (rounded - 1024)))};
}

inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
