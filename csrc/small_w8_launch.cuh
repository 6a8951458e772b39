// Host side of the 8-bit small-batch engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "launch.cuh"
#include "small_w8.cuh"
#include "validate.h"

namespace nf4l {

template <class Code, class T, int SHAPE, bool GROUPED>
int launch_small_w8(const SmallW8Plan& plan, SmallW8Args args, const LaunchTarget& target) {
  constexpr SmallBatchShape S = SMALL_W8_SHAPES[SHAPE];
  constexpr auto KERNEL = small_w8_kernel<Code, T, S.row_tiles, S.tokens, S.warps, GROUPED>;
  args.dependent = args.dependent && can_launch_early<KERNEL>(target);
  const LaunchGrid grid = {dim3(plan.parts, plan.slices), S.warps * WARP, plan.shared_bytes};
  return launch_kernel<KERNEL>(target, grid, args.dependent, args);
}

using SmallW8Launcher = int (*)(const SmallW8Plan&, SmallW8Args, const LaunchTarget&);

// The launcher of each compiled shape, in the order of SMALL_W8_SHAPES.
template <class Code, class T, size_t... I>
SmallW8Launcher small_w8_launcher(int shape, bool grouped, std::index_sequence<I...>) {
  static constexpr SmallW8Launcher launchers[2][SMALL_W8_SHAPE_COUNT] = {
      {launch_small_w8<Code, T, int(I), false>...},
      {launch_small_w8<Code, T, int(I), true>...},
  };
  return launchers[grouped][shape];
}

template <class T>
int run_small_w8(const SmallW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l, const LaunchTarget& target) {
  SmallW8Args a = small_w8_args(plan, w, l);
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.partials = static_cast<float*>(workspace.sums);
  a.arrivals = workspace.arrivals;
  const auto all = std::make_index_sequence<SMALL_W8_SHAPE_COUNT>();
  const auto launch = w.format == NF4L_W8_S8 ? small_w8_launcher<W8S8, T>(plan.shape, w.blocksize > 0, all)
                                             : small_w8_launcher<W8U8, T>(plan.shape, w.blocksize > 0, all);
  return launch(plan, a, target);
}

}  // namespace nf4l
