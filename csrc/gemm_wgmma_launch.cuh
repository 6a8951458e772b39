// Host side of the prefill engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "engines.h"
#include "gemm_wgmma.cuh"
#include "gemm_wgmma_choice.h"
#include "gemm_wgmma_four_bit.cuh"
#include "gemm_wgmma_shape.h"
#include "launch.cuh"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

template <class Format, class T, int SHAPE>
int launch_gemm(const GemmPlan& plan, const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                bool dependent_launch, const LaunchTarget& target) {
  const int blocks = plan.grid.clusters * plan.grid.blocks;
  const LaunchGrid grid = {blocks, GEMM_SHAPES[SHAPE].threads(), plan.shared_bytes, plan.grid.blocks};
  return launch_kernel<gemm_wgmma_kernel<Format, T, SHAPE>>(target, grid, dependent_launch, args, x);
}

template <class Weight>
using GemmLauncher = int (*)(const GemmPlan&, const GemmArgs<Weight>&, const CUtensorMap&, bool, const LaunchTarget&);

// The launcher of each compiled shape, in the order of GEMM_SHAPES.
template <class Format, class T, size_t... I>
GemmLauncher<typename Format::Weight> gemm_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmLauncher<typename Format::Weight> launchers[] = {launch_gemm<Format, T, int(I)>...};
  return launchers[shape];
}

// `weight`: the format's part of the arguments, but for the map of `codes`. Rows of y are `y_stride` values apart.
template <class Format, class T>
int run_gemm(const GemmPlan& plan, const typename Format::Weight& weight, const uint8_t* codes,
             const nf4l_linear_args& l, int y_stride, const LaunchTarget& target) {
  const GemmShape shape = GEMM_SHAPES[plan.shape];
  GemmArgs<typename Format::Weight> a = {};
  static_cast<typename Format::Weight&>(a) = weight;
  const int row_tiles = int(ceil_div(a.n, TILE_ROWS));
  const int encoded =
      encode_codes(a.code_map, codes, row_tiles, plan.grid.k_tiles, Format::BYTES.codes, shape.row_tiles());
  if (encoded) return encoded;
  a.bias = l.bias;
  a.y = l.y;
  a.y_stride = y_stride;
  a.tokens = GemmTokens(shape, int(l.m), plan.grid.parts);
  a.grid = plan.grid;
  a.vectors = a.n % 8 == 0 && y_stride % 8 == 0 && aligned(l.y, 16);
  Workspace workspace;
  if (const int status = claim_workspace(workspace, l, plan.workspace_bytes, target)) return status;
  a.sums = static_cast<float4*>(workspace.sums);
  a.meetings = workspace.arrivals;
  CUtensorMap x;
  const int64_t k = int64_t(plan.grid.k_tiles) * GEMM_K, row_bytes = l.m > 1 ? l.x_stride * 2 : k * 2;
  const int mapped = encode_activations(x, std::is_same_v<T, __half>, l.x, l.m, k, row_bytes, a.tokens.half, 1);
  if (mapped) return mapped;
  const auto launch = gemm_launcher<Format, T>(plan.shape, std::make_index_sequence<GEMM_SHAPE_COUNT>());
  return launch(plan, a, x, l.flags & NF4L_DEPENDENT_LAUNCH, target);
}

// `rows` rows of the weight from `first` on.
template <class T>
int run_gemm_rows(const GemmPlan& plan, const nf4l_weight& weight, int64_t first, int64_t rows,
                  const nf4l_linear_args& args, const LaunchTarget& target) {
  const nf4l_weight part = four_bit_rows(weight, first, rows);
  nf4l_linear_args l = args;
  l.y = static_cast<T*>(args.y) + first;
  if (args.bias) l.bias = static_cast<const T*>(args.bias) + first;
  // It may start before the launch in front, which is ours and does not write the weight.
  if (first > 0) l.flags |= NF4L_DEPENDENT_LAUNCH;
  return run_gemm<GemmFourBit, T>(plan, gemm_four_bit_weight<T>(part), part.qweight, l, int(weight.n), target);
}

template <class T>
int run_gemm_four_bit(const GemmLaunches& launches, const nf4l_weight& weight, const nf4l_linear_args& args,
                      const LaunchTarget& target) {
  const int64_t front = launches.front_rows;
  if (front > 0) {
    if (const int status = run_gemm_rows<T>(launches.front, weight, 0, front, args, target)) return status;
  }
  return run_gemm_rows<T>(launches.last, weight, front, weight.n - front, args, target);
}

}  // namespace nf4l
