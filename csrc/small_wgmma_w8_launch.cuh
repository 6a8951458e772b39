// Host side of the wgmma engine for 8-bit weights: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "launch.cuh"
#include "small_wgmma_w8.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

template <class Code, class T, int SHAPE, bool GROUPED>
int launch_small_wgmma_w8(const SmallWgmmaW8Plan& plan, const SmallWgmmaW8Args& args, const LaunchTarget& target) {
  const LaunchGrid grid = {plan.blocks, SMALL_WGMMA_W8_SHAPES[SHAPE].threads(), plan.shared_bytes};
  return launch_kernel<small_wgmma_w8_kernel<Code, T, SHAPE, GROUPED>>(target, grid, args.dependent, args);
}

using SmallWgmmaW8Launcher = int (*)(const SmallWgmmaW8Plan&, const SmallWgmmaW8Args&, const LaunchTarget&);

// The launcher of each compiled shape, in the order of SMALL_WGMMA_W8_SHAPES.
template <class Code, class T, size_t... I>
SmallWgmmaW8Launcher small_wgmma_w8_launcher(int shape, bool grouped, std::index_sequence<I...>) {
  static constexpr SmallWgmmaW8Launcher launchers[2][SMALL_WGMMA_W8_SHAPE_COUNT] = {
      {launch_small_wgmma_w8<Code, T, int(I), false>...},
      {launch_small_wgmma_w8<Code, T, int(I), true>...},
  };
  return launchers[grouped][shape];
}

inline int encode_maps(SmallWgmmaW8Args& a, SmallWgmmaW8Shape shape, const nf4l_weight& w, const nf4l_linear_args& l,
                       bool half) {
  const int64_t x_row_bytes = l.m > 1 ? l.x_stride * 2 : w.k * 2;
  if (const int s = encode_activations(a.x, half, l.x, l.m, w.k, x_row_bytes, a.x_rows, shape.burst)) return s;
  if (w.blocksize == 0) return NF4L_OK;
  const int group_bytes = TILE_ROWS * 4, groups = a.k_tiles >> a.group_shift, box_groups = shape.burst >> a.group_shift;
  return encode_bytes(a.scales, w.scales, a.row_tiles, groups * group_bytes, shape.row_tiles(),
                      box_groups * group_bytes);
}

template <class T>
int run_small_wgmma_w8(const SmallWgmmaW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l,
                       const LaunchTarget& target) {
  SmallWgmmaW8Args a = {};
  a.row_maxima = static_cast<const float*>(w.scales);
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.n = int(w.n);
  a.x_rows = int(ceil_div(l.m, 8)) * 8;
  a.codes = w.qweight;
  a.row_tiles = int(ceil_div(w.n, TILE_ROWS));
  a.k_tiles = int(w.k / TILE_K4);
  a.group_shift = w.blocksize == 128;
  a.bursts = plan.bursts;
  a.deal = plan.deal;
  a.transposed = l.flags & NF4L_TRANSPOSED_OUTPUT;
  a.dependent = l.flags & NF4L_DEPENDENT_LAUNCH;
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.slots = static_cast<float4*>(workspace.sums);
  a.arrived = workspace.arrivals;
  const bool grouped = w.blocksize > 0;
  if (const int status = encode_maps(a, SMALL_WGMMA_W8_SHAPES[plan.shape], w, l, std::is_same_v<T, __half>))
    return status;
  const auto all = std::make_index_sequence<SMALL_WGMMA_W8_SHAPE_COUNT>();
  const auto launch = w.format == NF4L_W8_S8 ? small_wgmma_w8_launcher<W8S8, T>(plan.shape, grouped, all)
                                             : small_wgmma_w8_launcher<W8U8, T>(plan.shape, grouped, all);
  return launch(plan, a, target);
}

}  // namespace nf4l
