// Two stored bytes to two 16-bit values, in packed registers and without integer-to-float instructions.
//
// A stored byte u stands for u - 128 (S8) or u (U8), see codebook.h. Each conversion takes bytes 2 p and 2 p + 1 of a
// word of tile16x32, which make one register of an A fragment, and every one of the 256 codes comes out exact.
//
//   fp16   a byte under the exponent of 1024 is 1024 + u: one PRMT makes both, one packed subtract takes 1024 (U8) or
//          1152 (S8) away.
//   bf16   has seven bits of mantissa, so bit 7 goes its own way. Under the exponent of 128 the other seven are
//          128 + low; from that is taken
//              256 where bit 7 is 0, 128 where it is 1      (bit 7 inverted is the last bit of the exponent)
//          which leaves u - 128 in PRMT, two LOP3 and a packed subtract. U8 adds 128 again.
//
// The plain way (widen, I2F, F2F, pack) takes about ten instructions a pair on slower pipes; `nf4linear lab convert`
// counts and times both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "codebook.h"
#include "convert.cuh"

namespace nf4l {

// a - b of two pairs of T.
//
// ORDERED: in order with the volatile instructions around it, for registers that a wgmma reads after a fence.
template <class T, bool ORDERED>
__device__ __forceinline__ uint32_t sub_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
#if __CUDA_ARCH__ >= 900
  if constexpr (!std::is_same_v<T, __half>) {
    if constexpr (ORDERED) asm volatile("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else if constexpr (ORDERED) {
    asm volatile("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
#else  // no wgmma, and bf16 has no subtraction: -1 * b + a
  if constexpr (std::is_same_v<T, __half>) asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));
#endif
  return d;
#else
  uint32_t d = 0;
  for (int i = 0; i < 32; i += 16) {
    const uint16_t bits_a = uint16_t(a >> i), bits_b = uint16_t(b >> i);
    const T difference =
        round_to<T>(to_float(reinterpret_cast<const T&>(bits_a)) - to_float(reinterpret_cast<const T&>(bits_b)));
    d |= uint32_t(reinterpret_cast<const uint16_t&>(difference)) << i;
  }
  return d;
#endif
}

// (a & mask) | 128 in bfloat16 (TABLE 0xea), or (~a & mask) | it (0xae): one LOP3, which ptxas does not find by itself.
template <int TABLE>
__device__ __forceinline__ uint32_t select_or(uint32_t a, uint32_t mask) {
  constexpr uint32_t BF16_128 = 0x43004300;
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(mask), "r"(BF16_128), "n"(TABLE));
  return d;
#else
  return ((TABLE == 0xea ? a : ~a) & mask) | BF16_128;
#endif
}

template <class T, bool ORDERED = false>
struct Convert8 {
  static constexpr bool HALF = std::is_same_v<T, __half>;

  // The pair of bytes 2 p and 2 p + 1 of `word`, the first one in the low half.
  template <class Code>
  __device__ __forceinline__ static uint32_t pair_of(uint32_t word, int p) {
    constexpr bool SIGNED = std::is_same_v<Code, W8S8>;
    if constexpr (HALF) {
      return sub_pair<T, ORDERED>(__byte_perm(word, 0x64646464, p ? 0x4342 : 0x4140), SIGNED ? 0x64806480 : 0x64006400);
    } else {
      return SIGNED ? signed_bf16(word, p) : sub_pair<T, ORDERED>(signed_bf16(word, p), 0xc300c300);  // -128
    }
  }

 private:
  __device__ __forceinline__ static uint32_t signed_bf16(uint32_t word, int p) {
    const uint32_t bytes = __byte_perm(word, 0, p ? 0x4342 : 0x4140);
    return sub_pair<T, ORDERED>(select_or<0xea>(bytes, 0x007f007f), select_or<0xae>(bytes, 0x00800080));
  }
};

}  // namespace nf4l
