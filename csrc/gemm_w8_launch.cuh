// Host side of the Hopper engine for 8-bit weights: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "gemm_w8.cuh"
#include "gemm_w8_launch.h"
#include "launch.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

static_assert(MAX_BLOCKS == ARRIVALS, "every block of a launch has its own flag");

template <class Code, class T, int SHAPE>
int launch_gemm_w8(const GemmW8Plan& plan, const GemmW8Args& args, bool dependent_launch, int device, int shared_limit,
                   cudaStream_t stream) {
  static KernelState state;
  const auto kernel = gemm_w8_kernel<Code, T, SHAPE>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = plan.cut.blocks;
  config.blockDim = GEMM_W8_SHAPES[SHAPE].threads();
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = dependent_launch ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, args));
}

using GemmW8Launcher = int (*)(const GemmW8Plan&, const GemmW8Args&, bool, int, int, cudaStream_t);

// The launcher of each compiled shape, in the order of GEMM_W8_SHAPES.
template <class Code, class T, size_t... I>
GemmW8Launcher gemm_w8_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmW8Launcher launchers[] = {launch_gemm_w8<Code, T, int(I)>...};
  return launchers[shape];
}

template <class Code, class T>
int run_gemm_w8(const GemmW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l, int device,
                const DeviceInfo& info, cudaStream_t stream) {
  GemmW8Args a = {};
  a.row_maxima = static_cast<const float*>(w.scales);
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.n = int(w.n);
  a.block_row_tiles = plan.block_row_tiles;
  a.cut = plan.cut;
  a.transposed = l.flags & NF4L_TRANSPOSED_OUTPUT;
  a.vectors = (a.transposed ? a.m : a.n) % 8 == 0 && aligned(l.y, 16);
  if (plan.workspace_bytes > 0) {
    if (!l.workspace || int64_t(l.workspace_bytes) < plan.workspace_bytes || !aligned(l.workspace, 16))
      return NF4L_BAD_ARGUMENT;
    a.slots = static_cast<float4*>(l.workspace);
    // The last flags of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.raised, device, stream, spare)) return status;
  }
  constexpr bool HALF = std::is_same_v<T, __half>;
  const int64_t row_bytes = l.m > 1 ? l.x_stride * 2 : w.k * 2;
  if (const int status = encode_activations(a.x, HALF, l.x, l.m, w.k, row_bytes, GEMM_W8_SHAPES[plan.shape].tokens, 1))
    return status;
  const int row_tiles = int(ceil_div(w.n, TILE_ROWS));
  const int status =
      encode_codes(a.codes, w.qweight, row_tiles, plan.cut.k_tiles, GemmW8Shape::TILE_CODES, plan.block_row_tiles);
  if (status) return status;
  const auto launch = gemm_w8_launcher<Code, T>(plan.shape, std::make_index_sequence<GEMM_W8_SHAPE_COUNT>());
  return launch(plan, a, l.flags & NF4L_DEPENDENT_LAUNCH, device, info.shared_bytes, stream);
}

}  // namespace nf4l
