// Two stored bytes to two 16-bit values, in packed registers and without integer-to-float instructions.
//
// A stored byte u stands for u - 128 (S8) or u (U8), see codebook.h. Each conversion takes bytes 2 p and 2 p + 1 of a
// word of tile16x32, which make one register of an A fragment, and every one of the 256 codes comes out exact.
//
//   fp16   a byte under the exponent of 1024 is 1024 + u: one PRMT makes both, one packed subtract takes 1024 (U8) or
//          1152 (S8) away.
//   bf16   has seven bits of mantissa, so bit 7 goes its own way. Under the exponent of 128 the other seven are
//          128 + low.
//          S8  takes from that 256 where bit 7 is 0, 128 where it is 1: inverted, it is the last bit of the exponent.
//          U8  takes 128 where bit 7 is 0: PRMT makes 0xff00 of an inverted byte's bit 7, which is -2^127 as a number,
//              and one fused multiply-add brings that to -128.
//
// Instructions of the tensor cores' neighbours, the 16-bit adders, weigh more than those of the integer pipe: beside
// wgmma, a second one for each pair costs 4 % of a whole product, two LOP3 nothing. So there is one in each.
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

#if !defined(__CUDA_ARCH__)
// On the host, where tests check every code: value i of a pair of T, and a pair of rounded f(0) and f(1).
template <class T>
__device__ __forceinline__ float of_pair(uint32_t pair, int i) {
  const uint16_t bits = uint16_t(pair >> 16 * i);
  return to_float(reinterpret_cast<const T&>(bits));
}
template <class T, class F>
__device__ __forceinline__ uint32_t each_of_pair(F f) {
  return round_pair<T>(f(0), f(1));
}
#endif

// a - b of two pairs of T, and a * b + c of two pairs of bfloat16.
//
// ORDERED: in order with the volatile instructions around it, for registers that a wgmma reads after a fence.
template <bool ORDERED>
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  if constexpr (ORDERED) asm volatile("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  using T = __nv_bfloat16;
  return each_of_pair<T>([&](int i) { return of_pair<T>(a, i) * of_pair<T>(b, i) + of_pair<T>(c, i); });
#endif
}

template <class T, bool ORDERED>
__device__ __forceinline__ uint32_t sub_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t d;
    if constexpr (ORDERED) asm volatile("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  } else {
#if __CUDA_ARCH__ >= 900
    uint32_t d;
    if constexpr (ORDERED) asm volatile("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else  // bf16 has no subtraction
    return fma_bf16x2<ORDERED>(b, 0xbf80bf80, a);
#endif
  }
#else
  return each_of_pair<T>([&](int i) { return of_pair<T>(a, i) - of_pair<T>(b, i); });
#endif
}

// (a & b) | c (TABLE 0xea), or (~a & b) | c (0xae): one LOP3, which ptxas does not find by itself.
template <int TABLE>
__device__ __forceinline__ uint32_t select_or(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
#else
  return ((TABLE == 0xea ? a : ~a) & b) | c;
#endif
}

template <class T, bool ORDERED = false>
struct Convert8 {
  // The pair of bytes 2 p and 2 p + 1 of `word`, the first one in the low half.
  template <class Code>
  __device__ __forceinline__ static uint32_t pair_of(uint32_t word, int p) {
    constexpr bool SIGNED = std::is_same_v<Code, W8S8>;
    if constexpr (std::is_same_v<T, __half>) {
      const uint32_t v = __byte_perm(word, 0x64646464, p ? 0x4342 : 0x4140);
      return sub_pair<T, ORDERED>(v, SIGNED ? 0x64806480 : 0x64006400);
    } else {
      return SIGNED ? signed_bf16(word, p) : unsigned_bf16(word, p);
    }
  }

 private:
  static constexpr uint32_t BF16_128 = 0x43004300;

  __device__ __forceinline__ static uint32_t signed_bf16(uint32_t word, int p) {
    const uint32_t bytes = __byte_perm(word, 0, p ? 0x4342 : 0x4140);
    const uint32_t low = select_or<0xea>(bytes, 0x007f007f, BF16_128);
    return sub_pair<T, ORDERED>(low, select_or<0xae>(bytes, 0x00800080, BF16_128));
  }

  // Both pairs of a word share what is done to all four bytes.
  __device__ __forceinline__ static uint32_t unsigned_bf16(uint32_t word, int p) {
    constexpr uint32_t SMALL = 0x03800380;  // 2^-120
    const uint32_t low = __byte_perm(word & 0x7f7f7f7f, BF16_128, p ? 0x7352 : 0x7150);
    const uint32_t clear = sign_masks(~word, p);
    return fma_bf16x2<ORDERED>(clear, SMALL, low);
  }

  // 0xff00 for bytes 2 p and 2 p + 1 whose bit 7 is set, else 0.
  __device__ __forceinline__ static uint32_t sign_masks(uint32_t word, int p) {
#if defined(__CUDA_ARCH__)
    uint32_t d;  // __byte_perm is not promised to know selectors that copy a sign
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(word), "r"(p ? 0xb4a4 : 0x9484));
    return d;
#else
    const uint32_t bits = word >> (16 * p);
    return (bits & 0x80 ? 0xff00 : 0) | (bits & 0x8000 ? 0xff000000 : 0);
#endif
  }
};

}  // namespace nf4l
