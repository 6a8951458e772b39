// Host side of the Hopper engine for 8-bit weights: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "gemm_w8.cuh"
#include "launch.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

template <class Code, class T, int SHAPE>
int launch_gemm_w8(const GemmW8Plan& plan, const GemmW8Args& args, bool dependent_launch, const LaunchTarget& target) {
  const LaunchGrid grid = {plan.cut.blocks, GEMM_W8_SHAPES[SHAPE].threads(), plan.shared_bytes};
  return launch_kernel<gemm_w8_kernel<Code, T, SHAPE>>(target, grid, dependent_launch, args);
}

using GemmW8Launcher = int (*)(const GemmW8Plan&, const GemmW8Args&, bool, const LaunchTarget&);

// The launcher of each compiled shape, in the order of GEMM_W8_SHAPES.
template <class Code, class T, size_t... I>
GemmW8Launcher gemm_w8_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmW8Launcher launchers[] = {launch_gemm_w8<Code, T, int(I)>...};
  return launchers[shape];
}

template <class Code, class T>
int run_gemm_w8(const GemmW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l, const LaunchTarget& target) {
  GemmW8Args a = {};
  a.row_maxima = static_cast<const float*>(w.scales);
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.n = int(w.n);
  a.cut = plan.cut;
  a.transposed = l.flags & NF4L_TRANSPOSED_OUTPUT;
  a.vectors = (a.transposed ? a.m : a.n) % 8 == 0 && aligned(l.y, 16);
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.slots = static_cast<float4*>(workspace.sums);
  a.raised = workspace.arrivals;
  constexpr bool HALF = std::is_same_v<T, __half>;
  const int64_t row_bytes = l.m > 1 ? l.x_stride * 2 : w.k * 2;
  const int tokens = GEMM_W8_SHAPES[plan.shape].tokens;
  a.last_tokens = int(ceil_div(l.m - int64_t(plan.cut.token_tiles - 1) * tokens, 8)) * 8;
  if (const int s = encode_activations(a.x, HALF, l.x, l.m, w.k, row_bytes, tokens, 1)) return s;
  if (const int s = encode_activations(a.last_x, HALF, l.x, l.m, w.k, row_bytes, a.last_tokens, 1)) return s;
  const int row_tiles = int(ceil_div(w.n, TILE_ROWS));
  const int status = encode_codes(a.codes, w.qweight, row_tiles, plan.cut.k_tiles, GemmW8Shape::TILE_CODES,
                                  GEMM_W8_SHAPES[plan.shape].row_tiles());
  if (status) return status;
  const auto launch = gemm_w8_launcher<Code, T>(plan.shape, std::make_index_sequence<GEMM_W8_SHAPE_COUNT>());
  return launch(plan, a, l.flags & NF4L_DEPENDENT_LAUNCH, target);
}

}  // namespace nf4l
