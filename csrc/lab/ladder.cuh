// The dequantize ladder: one kernel a stage, so that what each optimisation removes can be read and measured alone.
//
//     block = k / blocksize          scale  = code2[absmax_q[block]] * absmax2[block / 256] + offset
//     group = block / 256            out[k] = table[code of k] * scale
//
// Read a kernel beside the one before it; a line that changed is marked with the stage that changed it.
//
//   v0   one thread a packed byte, table in constant memory, integer division for block and group
//   v1   v0 with the table in shared memory
//   v2   v1 with four packed bytes a thread and 128-bit stores
//   v3   v2 with shifts for the divisions
//   v4   is the product's own engine, ../dequant.cuh
//
// v1 is also "shared table alone on v0"; the other two optimisations alone are `vectors_alone` and `shifts_alone`.
// Every stage gives the same bits. Elements are counted in 32 bits here: numel < 2^31 (v4 has no such limit).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../codebook.h"
#include "../dequant.cuh"
#include "../scale.cuh"

namespace nf4l::lab {

// Device pointers of one weight, and sizes.
struct LadderWeight {
  const uint8_t* codes;     // [ceil(numel / 2)], high nibble first; 4-byte aligned
  const uint8_t* absmax_q;  // [blocks]
  const float* absmax2;     // [ceil(blocks / s2_blocksize)]
  const float* code2;       // [256]
  const float* offset;      // [1]
  int numel;
  int blocksize, s2_blocksize;            // divisors of v0 to v2; not constants, so the compiler cannot shift for them
  int log2_blocksize, log2_s2_blocksize;  // computed on the host for v3
};

__constant__ float CONSTANT_TABLE[16] = {
    Nf4::value(0),  Nf4::value(1),  Nf4::value(2),  Nf4::value(3),  Nf4::value(4),  Nf4::value(5),
    Nf4::value(6),  Nf4::value(7),  Nf4::value(8),  Nf4::value(9),  Nf4::value(10), Nf4::value(11),
    Nf4::value(12), Nf4::value(13), Nf4::value(14), Nf4::value(15),
};

constexpr int LADDER_THREADS = 256;

__device__ __forceinline__ float ladder_scale(const LadderWeight& w, int block, int group) {
  return nested_scale(w.code2[w.absmax_q[block]], w.absmax2[group], *w.offset);
}

// Two neighbouring outputs as one store: 32 bits of a 16-bit type, 64 of float32.
__device__ __forceinline__ void store_pair(float* out, float a, float b) { *reinterpret_cast<float2*>(out) = {a, b}; }
template <class T>
__device__ __forceinline__ void store_pair(T* out, float a, float b) {
  *reinterpret_cast<uint32_t*>(out) = pack_pair(a, b, T());
}

// Eight neighbouring outputs as 128-bit stores: one of a 16-bit type, two of float32.
__device__ __forceinline__ void store_eight(float* out, const float* v) {
  reinterpret_cast<float4*>(out)[0] = {v[0], v[1], v[2], v[3]};
  reinterpret_cast<float4*>(out)[1] = {v[4], v[5], v[6], v[7]};
}
template <class T>
__device__ __forceinline__ void store_eight(T* out, const float* v) {
  const T type = T();
  *reinterpret_cast<uint4*>(out) = {pack_pair(v[0], v[1], type), pack_pair(v[2], v[3], type),
                                    pack_pair(v[4], v[5], type), pack_pair(v[6], v[7], type)};
}

// ---- v0 -------------------------------------------------------------------------------------------------------------
// Lanes of a warp look up different entries, and constant memory serves one address at a time.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) v0(LadderWeight w, T* __restrict__ out) {
  const int byte = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = 2 * byte;
  if (k >= w.numel) return;
  const int packed = w.codes[byte];

  const int block = k / w.blocksize;
  float scale = ladder_scale(w, block, block / w.s2_blocksize);
  const float even = __fmul_rn(CONSTANT_TABLE[packed >> 4], scale);
  if (k + 1 == w.numel) {
    out[k] = round_to<T>(even);
    return;
  }
  const int next = (k + 1) / w.blocksize;
  if (next != block) scale = ladder_scale(w, next, next / w.s2_blocksize);
  store_pair(out + k, even, __fmul_rn(CONSTANT_TABLE[packed & 15], scale));
}

// ---- v1: the table in shared memory ---------------------------------------------------------------------------------
// Sixteen floats lie in sixteen banks: lanes that want the same entry share the read, others use other banks.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) v1(LadderWeight w, T* __restrict__ out) {
  __shared__ float table[16];                                             // v1
  if (threadIdx.x < 16) table[threadIdx.x] = CONSTANT_TABLE[threadIdx.x];  // v1
  __syncthreads();                                                        // v1
  const int byte = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = 2 * byte;
  if (k >= w.numel) return;
  const int packed = w.codes[byte];

  const int block = k / w.blocksize;
  float scale = ladder_scale(w, block, block / w.s2_blocksize);
  const float even = __fmul_rn(table[packed >> 4], scale);  // v1
  if (k + 1 == w.numel) {
    out[k] = round_to<T>(even);
    return;
  }
  const int next = (k + 1) / w.blocksize;
  if (next != block) scale = ladder_scale(w, next, next / w.s2_blocksize);
  store_pair(out + k, even, __fmul_rn(table[packed & 15], scale));  // v1
}

// The end of a weight whose size is not a multiple of eight, one element at a time.
template <class T>
__device__ void scalar_tail(const LadderWeight& w, const float* table, int k, T* out) {
  for (; k < w.numel; ++k) {
    const int block = k / w.blocksize;
    const int code = k % 2 == 0 ? w.codes[k / 2] >> 4 : w.codes[k / 2] & 15;
    out[k] = round_to<T>(__fmul_rn(table[code], ladder_scale(w, block, block / w.s2_blocksize)));
  }
}

// ---- v2: four packed bytes a thread, 128-bit stores -----------------------------------------------------------------
// A quarter of the threads, reads and stores; the block is still found by division for every element.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) v2(LadderWeight w, T* __restrict__ out) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = CONSTANT_TABLE[threadIdx.x];
  __syncthreads();
  const int word = blockIdx.x * blockDim.x + threadIdx.x;                // v2
  const int k = 8 * word;                                                // v2
  if (k >= w.numel) return;                                              // v2
  if (k + 8 > w.numel) return scalar_tail(w, table, k, out);             // v2
  const uint32_t packed = reinterpret_cast<const uint32_t*>(w.codes)[word];  // v2

  int block = k / w.blocksize;
  float scale = ladder_scale(w, block, block / w.s2_blocksize);
  float value[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // v2
    const int next = (k + j) / w.blocksize;
    if (next != block) scale = ladder_scale(w, block = next, next / w.s2_blocksize);
    const int shift = 8 * (j / 2) + (j % 2 == 0 ? 4 : 0);
    value[j] = __fmul_rn(table[packed >> shift & 15], scale);
  }
  store_eight(out + k, value);  // v2
}

// ---- v3: shifts for the divisions -----------------------------------------------------------------------------------
// Both block sizes are powers of two that only the host knows; a division by a variable costs some twenty instructions.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) v3(LadderWeight w, T* __restrict__ out) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = CONSTANT_TABLE[threadIdx.x];
  __syncthreads();
  const int word = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = 8 * word;
  if (k >= w.numel) return;
  if (k + 8 > w.numel) return scalar_tail(w, table, k, out);
  const uint32_t packed = reinterpret_cast<const uint32_t*>(w.codes)[word];

  int block = k >> w.log2_blocksize;                                       // v3
  float scale = ladder_scale(w, block, block >> w.log2_s2_blocksize);      // v3
  float value[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int next = (k + j) >> w.log2_blocksize;                                              // v3
    if (next != block) scale = ladder_scale(w, block = next, next >> w.log2_s2_blocksize);     // v3
    const int shift = 8 * (j / 2) + (j % 2 == 0 ? 4 : 0);
    value[j] = __fmul_rn(table[packed >> shift & 15], scale);
  }
  store_eight(out + k, value);
}

// ---- one optimisation alone on v0 -----------------------------------------------------------------------------------

// v2's change without v1's: vector reads and stores, constant table, divisions.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) vectors_alone(LadderWeight w, T* __restrict__ out) {
  const int word = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = 8 * word;
  if (k >= w.numel) return;
  if (k + 8 > w.numel) return scalar_tail(w, CONSTANT_TABLE, k, out);
  const uint32_t packed = reinterpret_cast<const uint32_t*>(w.codes)[word];

  int block = k / w.blocksize;
  float scale = ladder_scale(w, block, block / w.s2_blocksize);
  float value[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int next = (k + j) / w.blocksize;
    if (next != block) scale = ladder_scale(w, block = next, next / w.s2_blocksize);
    const int shift = 8 * (j / 2) + (j % 2 == 0 ? 4 : 0);
    value[j] = __fmul_rn(CONSTANT_TABLE[packed >> shift & 15], scale);
  }
  store_eight(out + k, value);
}

// v3's change without v1's and v2's: shifts, constant table, one byte a thread.
template <class T>
__global__ void __launch_bounds__(LADDER_THREADS) shifts_alone(LadderWeight w, T* __restrict__ out) {
  const int byte = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = 2 * byte;
  if (k >= w.numel) return;
  const int packed = w.codes[byte];

  const int block = k >> w.log2_blocksize;
  float scale = ladder_scale(w, block, block >> w.log2_s2_blocksize);
  const float even = __fmul_rn(CONSTANT_TABLE[packed >> 4], scale);
  if (k + 1 == w.numel) {
    out[k] = round_to<T>(even);
    return;
  }
  const int next = (k + 1) >> w.log2_blocksize;
  if (next != block) scale = ladder_scale(w, next, next >> w.log2_s2_blocksize);
  store_pair(out + k, even, __fmul_rn(CONSTANT_TABLE[packed & 15], scale));
}

}  // namespace nf4l::lab
