// Host side of the small-batch engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "four_bit.cuh"
#include "launch.cuh"
#include "small_batch.cuh"
#include "validate.h"

namespace nf4l {

template <class T, int R, int TOKENS, int WARPS>
int launch_small_batch(const SmallBatchPlan& plan, SmallBatchArgs args, const LaunchTarget& target) {
  constexpr auto KERNEL = small_batch_kernel<T, R, TOKENS, WARPS>;
  args.dependent = args.dependent && can_launch_early<KERNEL>(target);
  const LaunchGrid grid = {dim3(plan.parts, plan.slices), WARPS * WARP, plan.shared_bytes};
  return launch_kernel<KERNEL>(target, grid, args.dependent, args);
}

using SmallBatchLauncher = int (*)(const SmallBatchPlan&, SmallBatchArgs, const LaunchTarget&);

// The launcher of each compiled shape, in the order of SMALL_BATCH_SHAPES.
template <class T, size_t... I>
SmallBatchLauncher small_batch_launcher(int shape, std::index_sequence<I...>) {
  constexpr const SmallBatchShape(&S)[SMALL_BATCH_SHAPE_COUNT] = SMALL_BATCH_SHAPES;
  static constexpr SmallBatchLauncher launchers[] = {
      launch_small_batch<T, S[I].row_tiles, S[I].tokens, S[I].warps>...,
  };
  return launchers[shape];
}

template <class T>
int run_small_batch(const SmallBatchPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l,
                    const LaunchTarget& target) {
  SmallBatchArgs a = {};
  static_cast<FourBitWeight&>(a) = four_bit_weight<T>(w);
  a.x = static_cast<const char*>(l.x);
  a.x_row_bytes = l.x_stride * 2;
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.groups = plan.groups;
  a.base_groups = plan.base_groups;
  a.extra_groups = plan.extra_groups;
  a.slice_tiles = plan.slice_tiles;
  a.dependent = l.flags & NF4L_DEPENDENT_LAUNCH;
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.partials = static_cast<float*>(workspace.sums);
  a.arrivals = workspace.arrivals;
  const auto launch = small_batch_launcher<T>(plan.shape, std::make_index_sequence<SMALL_BATCH_SHAPE_COUNT>());
  return launch(plan, a, target);
}

}  // namespace nf4l
