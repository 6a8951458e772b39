// The portable dequantize kernel: NF4 with double quantization to half or bfloat16, for any CUDA-like compiler.
//
// It is stage V3 of the ladder (../lab/ladder.cuh) with the scale read once a thread: table in shared memory, four
// packed bytes and one 16-byte store a thread, shifts for divisions. It uses no vendor type, built-in or warp size:
// 16-bit values are uint16_t and the output type is a bool template parameter.
//
// The scale is a product and a sum rounded separately: compile with -ffp-contract=off (nvcc: -fmad=false).
#ifndef NF4L_PORTABLE_NF4_DEQUANT_H
#define NF4L_PORTABLE_NF4_DEQUANT_H

#include <stdint.h>

#include "numeric16.h"

#if defined(NF4P_HOST)
#define NF4P_DEVICE inline
#else
#define NF4P_DEVICE __device__ inline
#endif

namespace nf4l::portable {

constexpr int THREADS = 256;
constexpr int THREAD_WEIGHTS = 8;
constexpr int LOG2_NESTED_BLOCKSIZE = 8;

// Device pointers of one weight; out is 16-byte aligned, codes 4-byte aligned.
struct DequantArgs {
  const uint8_t* codes;     // [ceil(numel / 2)], high nibble first
  const uint8_t* absmax_q;  // [blocks]
  const float* absmax2;     // [ceil(blocks / 256)]
  const float* code2;       // [256]
  const float* table;       // [16]; in the arguments themselves it would be copied to every thread's own memory
  uint16_t* out;            // [numel]
  uint64_t numel;
  float offset;
  int log2_blocksize;  // blocks hold 32 weights or more, so a thread's eight lie in one
};

struct alignas(16) EightValues {
  uint32_t pair[4];
};

template <bool BFLOAT16>
NF4P_DEVICE uint16_t round_value(float value) {
  return BFLOAT16 ? float_to_bfloat16(value) : float_to_half(value);
}

// First half of a block's work, before the barrier: thread `thread` fills its entry of the table.
NF4P_DEVICE void fill_table(const DequantArgs& a, float* table, int thread) {
  if (thread < 16) table[thread] = a.table[thread];
}

// Second half, after the barrier: weights 8 * index to 8 * index + 7.
template <bool BFLOAT16>
NF4P_DEVICE void dequantize_eight(const DequantArgs& a, const float* table, uint64_t index) {
  const uint64_t first = THREAD_WEIGHTS * index;
  if (first >= a.numel) return;
  const uint64_t block = first >> a.log2_blocksize;
  const float product = a.code2[a.absmax_q[block]] * a.absmax2[block >> LOG2_NESTED_BLOCKSIZE];
  const float scale = product + a.offset;

  if (first + THREAD_WEIGHTS > a.numel) {  // the end of a weight whose size is not a multiple of eight
    for (uint64_t k = first; k < a.numel; ++k) {
      const int byte = a.codes[k / 2], code = k % 2 == 0 ? byte >> 4 : byte & 15;
      a.out[k] = round_value<BFLOAT16>(table[code] * scale);
    }
    return;
  }
  const uint32_t packed = reinterpret_cast<const uint32_t*>(a.codes)[index];
  EightValues values;
  for (int b = 0; b < 4; ++b) {
    const uint32_t byte = packed >> (8 * b) & 255;
    const uint32_t even = round_value<BFLOAT16>(table[byte >> 4] * scale);
    const uint32_t odd = round_value<BFLOAT16>(table[byte & 15] * scale);
    values.pair[b] = even | odd << 16;
  }
  reinterpret_cast<EightValues*>(a.out)[index] = values;
}

inline unsigned grid_of(uint64_t numel) {
  constexpr uint64_t block_weights = uint64_t(THREADS) * THREAD_WEIGHTS;
  return unsigned((numel + block_weights - 1) / block_weights);
}

#if defined(NF4P_HOST)

// The grid as loops: all threads of a block up to the barrier, then all of them after it.
template <bool BFLOAT16>
void launch_dequantize(const DequantArgs& a) {
  for (unsigned block = 0; block < grid_of(a.numel); ++block) {
    float table[16];
    for (int thread = 0; thread < THREADS; ++thread) fill_table(a, table, thread);
    for (int thread = 0; thread < THREADS; ++thread) {
      dequantize_eight<BFLOAT16>(a, table, uint64_t(block) * THREADS + thread);
    }
  }
}

#else

template <bool BFLOAT16>
__global__ void dequantize_kernel(DequantArgs a) {
  __shared__ float table[16];
  fill_table(a, table, int(threadIdx.x));
  __syncthreads();
  dequantize_eight<BFLOAT16>(a, table, uint64_t(blockIdx.x) * THREADS + threadIdx.x);
}

template <bool BFLOAT16>
void launch_dequantize(const DequantArgs& a) {
  dequantize_kernel<BFLOAT16><<<grid_of(a.numel), THREADS>>>(a);
}

#endif

}  // namespace nf4l::portable

#endif
