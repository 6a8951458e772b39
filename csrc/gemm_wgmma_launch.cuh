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

static_assert(MAX_BLOCKS <= ARRIVALS, "every block of a launch has its own flag");

template <class Format, class T, int SHAPE>
int launch_gemm(const GemmPlan& plan, const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                const CUtensorMap& y, bool dependent_launch, int device, int shared_limit, cudaStream_t stream) {
  static KernelState state;
  const auto kernel = gemm_wgmma_kernel<Format, T, SHAPE>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = plan.cut.blocks;
  config.blockDim = GemmShape::threads();
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = dependent_launch ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, args, x, y));
}

template <class Weight>
using GemmLauncher = int (*)(const GemmPlan&, const GemmArgs<Weight>&, const CUtensorMap&, const CUtensorMap&, bool, int, int,
                             cudaStream_t);

// The launcher of each compiled shape, in the order of GEMM_SHAPES.
template <class Format, class T, size_t... I>
GemmLauncher<typename Format::Weight> gemm_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmLauncher<typename Format::Weight> launchers[] = {launch_gemm<Format, T, int(I)>...};
  return launchers[shape];
}

// `weight`: the format's part of the arguments.
template <class Format, class T>
int run_gemm(const GemmPlan& plan, const typename Format::Weight& weight, const nf4l_linear_args& l, int device,
             const DeviceInfo& info, cudaStream_t stream) {
  GemmArgs<typename Format::Weight> a = {};
  static_cast<typename Format::Weight&>(a) = weight;
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.cut = plan.cut;
  a.copy_out = a.n % 8 == 0 && aligned(l.y, 16);
  if (plan.workspace_bytes > 0) {
    if (!l.workspace || int64_t(l.workspace_bytes) < plan.workspace_bytes || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.slots = static_cast<float4*>(l.workspace);
    // The last flags of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.raised, device, stream, spare)) return status;
  }
  constexpr bool HALF = std::is_same_v<T, __half>;
  const GemmShape shape = GEMM_SHAPES[plan.shape];
  const int64_t k = int64_t(plan.cut.k_tiles) * GEMM_K, row_bytes = l.m > 1 ? l.x_stride * 2 : k * 2;
  CUtensorMap x, y = {};
  if (const int status = encode_matrix16(x, HALF, l.x, l.m, k, row_bytes, shape.tokens)) return status;
  if (a.copy_out) {
    if (const int status = encode_matrix16(y, HALF, l.y, l.m, a.n, int64_t(a.n) * 2, GemmShape::STORE_TOKENS)) return status;
  }
  const auto launch = gemm_launcher<Format, T>(plan.shape, std::make_index_sequence<GEMM_SHAPE_COUNT>());
  return launch(plan, a, x, y, l.flags & NF4L_DEPENDENT_LAUNCH, device, info.shared_bytes, stream);
}

}  // namespace nf4l
