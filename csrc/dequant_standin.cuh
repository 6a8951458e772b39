// Correct and slow; deleted when dequant.cuh arrives.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include "codebook.h"
namespace nf4l {
template <class T> __device__ T round_to(float v);
template <> __device__ inline float round_to<float>(float v) { return v; }
template <> __device__ inline __half round_to<__half>(float v) { return __float2half_rn(v); }
template <> __device__ inline __nv_bfloat16 round_to<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <class F, class T> __global__ void dequantize_standin(nf4l_weight w, T* out) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < w.n * w.k; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / w.k, k = i % w.k;
    float v;
    if constexpr (F::FORMAT == NF4L_W8_S8 || F::FORMAT == NF4L_W8_U8) {
      v = F::value(w.qweight[tile16x32_byte(row, k, w.k)]);
      const float* s = static_cast<const float*>(w.scales);
      v = w.blocksize ? v * s[row_scale_index(row, k / w.blocksize, w.k / w.blocksize)] : __fmul_rn(__fmul_rn(v, s[row]), INV_127);
    } else {
      const bool tiled = w.layout == NF4L_TILE16X64;
      const int byte = w.qweight[tiled ? tile16x64_byte(row, k, w.k) : i / 2];
      const bool high = tiled ? k % 2 == 0 : i % 2 == 0;
      float scale;
      if (w.nested_code) {
        const int q = static_cast<const uint8_t*>(w.scales)[tiled ? absmax_q_byte(row, k / 64, w.k / 64) : i / w.blocksize];
        const int64_t group = tiled ? nested_group(row + w.n0, k / 64 + w.kb0, w.kb_full, w.blocksize) : i / w.blocksize / 256;
        scale = __fadd_rn(__fmul_rn(w.nested_code[q], w.nested_absmax[group]), *w.nested_offset);
      } else {
        scale = static_cast<const float*>(w.scales)[tiled ? row_scale_index(row, k / 64, w.k / 64) : i / w.blocksize];
      }
      v = F::value(high ? byte >> 4 : byte & 15) * scale;
    }
    out[i] = round_to<T>(v);
  }
}
template <class F> int launch_standin(const nf4l_weight& w, int dtype, void* out, cudaStream_t s) {
  const int grid = int(ceil_div(w.n * w.k, 256) < 4096 ? ceil_div(w.n * w.k, 256) : 4096);
  if (dtype == NF4L_F32) dequantize_standin<F><<<grid, 256, 0, s>>>(w, static_cast<float*>(out));
  if (dtype == NF4L_F16) dequantize_standin<F><<<grid, 256, 0, s>>>(w, static_cast<__half*>(out));
  if (dtype == NF4L_BF16) dequantize_standin<F><<<grid, 256, 0, s>>>(w, static_cast<__nv_bfloat16*>(out));
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? NF4L_OK : e == cudaErrorNoKernelImageForDevice ? NF4L_NO_KERNEL_IMAGE : NF4L_CUDA_ERROR - e;
}
inline int launch_dequantize(const nf4l_weight& w, int dtype, void* out, cudaStream_t s) {
  switch (w.format) {
    case NF4L_NF4: return launch_standin<Nf4>(w, dtype, out, s);
    case NF4L_FP4: return launch_standin<Fp4>(w, dtype, out, s);
    case NF4L_W8_S8: return launch_standin<W8S8>(w, dtype, out, s);
    default: return launch_standin<W8U8>(w, dtype, out, s);
  }
}
}
