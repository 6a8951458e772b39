// Host side of the Hopper engine for 8-bit weights: the launcher of each compiled shape.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "gemm_w8.cuh"
#include "gemm_w8_launch.h"
#include "gemm_wgmma_launch.cuh"

namespace nf4l {

// The weight as the kernel of a shape with `box_tiles` row tiles takes it. A status.
inline int gemm_w8_weight(GemmW8Weight& weight, const nf4l_weight& w, int box_tiles) {
  weight.row_maxima = static_cast<const float*>(w.scales);
  weight.n = int(w.n);
  weight.row_tiles = int(ceil_div(w.n, TILE_ROWS));
  weight.k_tiles = int(w.k / GEMM_K);
  return encode_codes(weight.codes, w.qweight, weight.row_tiles, weight.k_tiles, GEMM_EIGHT_BIT.codes, box_tiles);
}

// In the order of GEMM_SHAPES, from that of index GEMM_SHAPE_COUNT on.
template <class Code, class T, size_t... I>
GemmLauncher<GemmW8Weight> gemm_w8_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmLauncher<GemmW8Weight> launchers[] = {
      launch_gemm<GemmW8Weight, gemm_w8_kernel<Code, T, GEMM_SHAPE_COUNT + int(I)>>...,
  };
  return launchers[shape - GEMM_SHAPE_COUNT];
}

template <class Code, class T>
int run_gemm_w8(const GemmPlan& plan, const nf4l_weight& w, const nf4l_linear_args& args, int device,
                const DeviceInfo& info, cudaStream_t stream) {
  const auto launch = gemm_w8_launcher<Code, T>(plan.shape, std::make_index_sequence<GEMM_W8_SHAPE_COUNT>());
  GemmW8Weight weight = {};
  if (const int status = gemm_w8_weight(weight, w, GEMM_SHAPES[plan.shape].row_tiles())) return status;
  return run_gemm<T>(plan, weight, launch, args, device, info, stream);
}

}  // namespace nf4l
