// What every engine needs of the arithmetic types and of a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

namespace nf4l {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

template <class T>
__host__ __device__ __forceinline__ T round_to(float value) {
  if constexpr (std::is_same_v<T, float>) return value;
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  else return __float2bfloat16_rn(value);
}

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Two values of T, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// The same, in order with the volatile instructions around it.
template <class T>
__device__ __forceinline__ uint32_t round_pair_in_order(float low, float high) {
  uint32_t pair;
  constexpr bool HALF = std::is_same_v<T, __half>;
  if constexpr (HALF) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  else asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

}  // namespace nf4l
