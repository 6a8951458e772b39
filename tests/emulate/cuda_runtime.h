// The words of CUDA C++ that the fused kernels use, for a host compiler; see simt.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simt.h"

#define __host__
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (simt::block.running->thread)
#define blockIdx (simt::block.index)
#define gridDim (simt::block.grid)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline void __syncthreads() { simt::wait(simt::block.barrier); }
inline int __syncthreads_or(int vote) { return simt::wait_any(vote != 0); }
inline void __syncwarp() { simt::wait(simt::block.running->warp->barrier); }
inline void __threadfence() {}

inline uint32_t __shfl_sync(unsigned, uint32_t v, int from) {
  const uint64_t mine = v;
  return uint32_t(simt::exchange(&mine, 1)[from % simt::LANES][0]);
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return out;
}

inline unsigned atomicAdd(unsigned* p, unsigned v) {
  simt::check_read(p, sizeof *p);
  const unsigned before = *p;
  *p += v;
  return before;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __uint_as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

template <class T>
T __ldg(const T* p) {
  simt::check_read(p, sizeof(T));
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  simt::check_read(p, sizeof(T));
  return *p;
}
template <class T>
void __stcg(T* p, T v) {
  simt::check_read(p, sizeof(T));
  *p = v;
}
