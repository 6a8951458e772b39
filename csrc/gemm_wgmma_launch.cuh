// Host side of the prefill engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "gemm_wgmma.cuh"
#include "gemm_wgmma_launch.h"
#include "launch.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

static_assert(MAX_BLOCKS == ARRIVALS, "every block of a launch has its own flag");

template <class Format, class T, int SHAPE>
int launch_gemm(const GemmPlan& plan, const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                bool dependent_launch, int device, int shared_limit, cudaStream_t stream) {
  static KernelState state;
  const auto kernel = gemm_wgmma_kernel<Format, T, SHAPE>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = plan.cut.blocks;
  config.blockDim = GEMM_SHAPES[SHAPE].threads();
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = dependent_launch ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, args, x));
}

template <class Weight>
using GemmLauncher = int (*)(const GemmPlan&, const GemmArgs<Weight>&, const CUtensorMap&, bool, int, int, cudaStream_t);

// The launcher of each compiled shape, in the order of GEMM_SHAPES.
template <class Format, class T, size_t... I>
GemmLauncher<typename Format::Weight> gemm_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmLauncher<typename Format::Weight> launchers[] = {launch_gemm<Format, T, int(I)>...};
  return launchers[shape];
}

// `weight`: the format's part of the arguments, but for the map of `codes`.
template <class Format, class T>
int run_gemm(const GemmPlan& plan, const typename Format::Weight& weight, const uint8_t* codes, const nf4l_linear_args& l,
             int device, const DeviceInfo& info, cudaStream_t stream) {
  const GemmShape shape = GEMM_SHAPES[plan.shape];
  GemmArgs<typename Format::Weight> a = {};
  static_cast<typename Format::Weight&>(a) = weight;
  const int row_tiles = int(ceil_div(a.n, TILE_ROWS));
  if (const int status = encode_codes(a.code_map, codes, row_tiles, plan.cut.k_tiles, Format::BYTES.codes, shape.row_tiles())) {
    return status;
  }
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.cut = plan.cut;
  a.vectors = a.n % 8 == 0 && aligned(l.y, 16);
  if (plan.workspace_bytes > 0) {
    if (!l.workspace || int64_t(l.workspace_bytes) < plan.workspace_bytes || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.slots = static_cast<float4*>(l.workspace);
    // The last flags of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.raised, device, stream, spare)) return status;
  }
  CUtensorMap x;
  const int64_t k = int64_t(plan.cut.k_tiles) * GEMM_K, row_bytes = l.m > 1 ? l.x_stride * 2 : k * 2;
  if (const int status = encode_activations(x, std::is_same_v<T, __half>, l.x, l.m, k, row_bytes, shape.tokens, 1)) {
    return status;
  }
  const auto launch = gemm_launcher<Format, T>(plan.shape, std::make_index_sequence<GEMM_SHAPE_COUNT>());
  return launch(plan, a, x, l.flags & NF4L_DEPENDENT_LAUNCH, device, info.shared_bytes, stream);
}

}  // namespace nf4l
