// Two stored bytes to two 16-bit values, in packed registers and without integer-to-float instructions.
//
// A stored byte u stands for u - 128 (S8) or u (U8), see codebook.h. Each conversion takes bytes 2 p and 2 p + 1 of a
// word of tile16x32, which make one register of an A fragment, and every one of the 256 codes comes out exact.
//
//   fp16   a byte under the exponent of 1024 is 1024 + u: one PRMT makes both, one packed subtract takes 1024 (U8) or
//          1152 (S8) away.
//   bf16   has seven bits of mantissa. A byte under the exponent of 128 (PRMT) has bit 7 as the last bit of its exponent
//          and is v = 128 + low where that is 0, 256 + 2 low where it is 1. (v - 256) * m, with m = 1 or 1/2, is low - 128
//          and low: u - 128. m is bit 7 of v inverted, as the last bit of an exponent: one LOP3. U8 adds 128 by the
//          product's own fused addition.
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

// a - b of two pairs of float16, and a * b + c of two pairs of bfloat16, which sm_80 has no subtraction for.
//
// ORDERED: in order with the volatile instructions around it, for registers that a wgmma reads after a fence.
template <bool ORDERED>
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  if constexpr (ORDERED) asm volatile("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return each_of_pair<__half>([&](int i) { return of_pair<__half>(a, i) - of_pair<__half>(b, i); });
#endif
}
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

// (~a & b) | c: one LOP3, which ptxas does not find by itself.
__device__ __forceinline__ uint32_t not_and_or(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return (~a & b) | c;
#endif
}

template <class T, bool ORDERED = false>
struct Convert8 {
  // The pair of bytes 2 p and 2 p + 1 of `word`, the first one in the low half.
  template <class Code>
  __device__ __forceinline__ static uint32_t pair_of(uint32_t word, int p) {
    constexpr bool SIGNED = std::is_same_v<Code, W8S8>;
    constexpr bool HALF = std::is_same_v<T, __half>;
    const uint32_t v = __byte_perm(word, HALF ? 0x64646464 : 0x43434343, p ? 0x4342 : 0x4140);
    if constexpr (HALF) {
      return sub_f16x2<ORDERED>(v, SIGNED ? 0x64806480 : 0x64006400);
    } else {
      constexpr uint32_t ONE = 0x3f803f80, HALF_ONE = 0x3f003f00, LAST_OF_EXPONENT = 0x00800080;
      constexpr uint32_t MINUS_256 = 0xc380c380, MINUS_ZERO = 0x80008000, PLUS_128 = 0x43004300;
      const uint32_t less = fma_bf16x2<false>(v, ONE, MINUS_256), m = not_and_or(v, LAST_OF_EXPONENT, HALF_ONE);
      return fma_bf16x2<ORDERED>(less, m, SIGNED ? MINUS_ZERO : PLUS_128);
    }
  }
};

}  // namespace nf4l
