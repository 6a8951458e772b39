// Host side of the mma.sync prefill engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "gemm_mma.cuh"
#include "launch.cuh"

namespace nf4l {

template <class T, int SHAPE>
int launch_gemm_mma(const GemmMmaPlan& plan, const GemmMmaArgs& args, bool dependent_launch,
                    const LaunchTarget& target) {
  constexpr auto KERNEL = gemm_mma_kernel<T, SHAPE>;
  const LaunchGrid grid = {plan.cut.blocks, GemmMmaShape::THREADS, plan.shared_bytes};
  return launch_kernel<KERNEL>(target, grid, dependent_launch && can_launch_early<KERNEL>(target), args);
}

using GemmMmaLauncher = int (*)(const GemmMmaPlan&, const GemmMmaArgs&, bool, const LaunchTarget&);

// The launcher of each compiled shape, in the order of GEMM_MMA_SHAPES.
template <class T, size_t... I>
GemmMmaLauncher gemm_mma_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmMmaLauncher launchers[] = {launch_gemm_mma<T, int(I)>...};
  return launchers[shape];
}

template <class T>
int run_gemm_mma(const GemmMmaPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l, const LaunchTarget& target) {
  GemmMmaArgs a = gemm_mma_args<T>(plan, w, l);
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.slots = static_cast<float4*>(workspace.sums);
  a.arrivals = workspace.arrivals;
  const auto launch = gemm_mma_launcher<T>(plan.shape, std::make_index_sequence<GEMM_MMA_SHAPE_COUNT>());
  return launch(plan, a, l.flags & NF4L_DEPENDENT_LAUNCH, target);
}

}  // namespace nf4l
