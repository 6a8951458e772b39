// 16-bit floating point as bare uint16_t: conversions without half or bfloat16 types or built-ins.
//
// Round to nearest, ties to even, subnormals kept; a NaN becomes 0x7fff, as CUDA's own conversions make it. Written
// once for every compiler; tests compare them with numpy and torch over all 65,536 values and every rounding tie.
#ifndef NF4L_PORTABLE_NUMERIC16_H
#define NF4L_PORTABLE_NUMERIC16_H

#include <stdint.h>
#include <string.h>

// How a function for host and device is declared; a file that holds kernels defines it before it includes this.
#ifndef NF4P_HD
#define NF4P_HD inline
#endif

namespace nf4l::portable {

NF4P_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

NF4P_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Adding half a unit of the last kept place, less one where that place is even, carries into it exactly when rounding
// up.
NF4P_HD uint32_t round_off(uint32_t bits, int dropped) {
  return (bits + ((1u << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped;
}

NF4P_HD uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t(round_off(bits, 16));
}

NF4P_HD uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // 2^16 and more: infinity
  // From 2^-14 on: 13 fraction bits are dropped and the exponent's bias falls from 127 to 15; 65520 carries to
  // infinity.
  if (magnitude >= 0x38800000u) return uint16_t(sign | (round_off(magnitude, 13) - (112u << 10)));
  // Below: a count of 2^-24, from the full significand. Under 2^-25 nothing is left.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return uint16_t(sign);
  return uint16_t(sign | round_off((magnitude & 0x7fffffu) | 0x800000u, int(126 - exponent)));
}

NF4P_HD float bfloat16_to_float(uint16_t value) { return bits_float(uint32_t(value) << 16); }

NF4P_HD float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * (1.0f / 16777216.0f);  // zero and subnormals: fraction * 2^-24, exact
  return bits_float(sign | float_bits(magnitude));
}

}  // namespace nf4l::portable

#endif
