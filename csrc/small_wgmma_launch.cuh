// Host side of the wgmma engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "four_bit.cuh"
#include "launch.cuh"
#include "small_wgmma.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

template <class T, int SHAPE>
int launch_small_wgmma(const SmallWgmmaPlan& plan, const SmallWgmmaArgs& args, const SmallWgmmaMaps& maps,
                       const LaunchTarget& target) {
  const LaunchGrid grid = {plan.blocks, SMALL_WGMMA_SHAPES[SHAPE].threads(), plan.shared_bytes};
  return launch_kernel<small_wgmma_kernel<T, SHAPE>>(target, grid, args.dependent, args, maps);
}

using SmallWgmmaLauncher = int (*)(const SmallWgmmaPlan&, const SmallWgmmaArgs&, const SmallWgmmaMaps&,
                                   const LaunchTarget&);

// The launcher of each compiled shape, in the order of SMALL_WGMMA_SHAPES.
template <class T, size_t... I>
SmallWgmmaLauncher small_wgmma_launcher(int shape, std::index_sequence<I...>) {
  static constexpr SmallWgmmaLauncher launchers[] = {launch_small_wgmma<T, int(I)>...};
  return launchers[shape];
}

inline int encode_maps(SmallWgmmaMaps& maps, SmallWgmmaShape shape, int box_tokens, const nf4l_weight& w,
                       const nf4l_linear_args& l, bool half) {
  const int64_t row_tiles = ceil_div(w.n, TILE_ROWS), k_tiles = w.k / TILE_K4;
  const bool nested = w.nested_code != nullptr;
  const int64_t scale_row_bytes = (nested ? ceil_div(k_tiles, BURST) : k_tiles) * 64;
  const int64_t x_row_bytes = l.m > 1 ? l.x_stride * 2 : w.k * 2;
  const int rows = shape.row_tiles(), scale_bytes = SmallWgmmaShared::scale_bytes(shape.burst, nested);
  if (const int s = encode_activations(maps.x, half, l.x, l.m, w.k, x_row_bytes, box_tokens, shape.burst)) return s;
  const int burst_bytes = shape.burst * TILE_BYTES;
  if (const int s = encode_bytes(maps.codes, w.qweight, row_tiles, k_tiles * TILE_BYTES, rows, burst_bytes)) return s;
  return encode_bytes(maps.scales, w.scales, row_tiles, scale_row_bytes, rows, scale_bytes);
}

template <class T>
int run_small_wgmma(const SmallWgmmaPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l,
                    const LaunchTarget& target) {
  SmallWgmmaArgs a = {};
  static_cast<FourBitWeight&>(a) = four_bit_weight<T>(w);
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.x_rows = int(ceil_div(l.m, 8)) * 8;
  a.bursts = plan.bursts;
  a.deal = plan.deal;
  a.dependent = l.flags & NF4L_DEPENDENT_LAUNCH;
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.slots = static_cast<float4*>(workspace.sums);
  a.arrived = workspace.arrivals;
  SmallWgmmaMaps maps;
  constexpr bool HALF = std::is_same_v<T, __half>;
  if (const int status = encode_maps(maps, SMALL_WGMMA_SHAPES[plan.shape], a.x_rows, w, l, HALF)) return status;
  const auto launch = small_wgmma_launcher<T>(plan.shape, std::make_index_sequence<SMALL_WGMMA_SHAPE_COUNT>());
  return launch(plan, a, maps, target);
}

}  // namespace nf4l
