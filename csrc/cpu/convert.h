// 16-bit floating-point types as bits, and their conversions to and from float32 (round to nearest even).
#include <string.h>

namespace nf4l::cpu::NF4L_CPU_LEVEL {

struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float v) { return v; }

inline float to_float(Bf16 v) { return bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

#if defined(__F16C__)
inline float to_float(Half v) { return _cvtsh_ss(v.bits); }
#else
inline float to_float(Half v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, exponent = v.bits >> 10 & 31, mantissa = v.bits & 0x3ffu;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}
#endif

template <class T>
T from_float(float v);

template <>
inline float from_float<float>(float v) {
  return v;
}

template <>
inline Bf16 from_float<Bf16>(float v) {
  const uint32_t bits = bit_cast<uint32_t>(v);
  if (v != v) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

template <>
inline Half from_float<Half>(float v) {
#if defined(__F16C__)
  return {_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
  const uint32_t bits = bit_cast<uint32_t>(v), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 65536 and above, infinity, NaN
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
#endif
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
