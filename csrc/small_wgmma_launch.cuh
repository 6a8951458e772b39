// Host side of the wgmma engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "arrivals.h"
#include "four_bit.cuh"
#include "launch.cuh"
#include "small_wgmma.cuh"
#include "small_wgmma_launch.h"
#include "tma.cuh"
#include "validate.h"

namespace nf4l {

static_assert(MAX_BLOCKS == ARRIVALS, "every block of a launch has its own counter");

template <class T, int SHAPE>
int launch_small_wgmma(const SmallWgmmaPlan& plan, const SmallWgmmaArgs& args, const SmallWgmmaMaps& maps, bool dependent_launch,
                       int device, int shared_limit, cudaStream_t stream) {
  static KernelState state;
  const auto kernel = small_wgmma_kernel<T, SHAPE>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = plan.blocks;
  config.blockDim = SMALL_WGMMA_SHAPES[SHAPE].threads();
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = dependent_launch ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, args, maps));
}

using SmallWgmmaLauncher = int (*)(const SmallWgmmaPlan&, const SmallWgmmaArgs&, const SmallWgmmaMaps&, bool, int, int,
                                   cudaStream_t);

// The launcher of each compiled shape, in the order of SMALL_WGMMA_SHAPES.
template <class T, size_t... I>
SmallWgmmaLauncher small_wgmma_launcher(int shape, std::index_sequence<I...>) {
  static constexpr SmallWgmmaLauncher launchers[] = {launch_small_wgmma<T, int(I)>...};
  return launchers[shape];
}

inline int encode_maps(SmallWgmmaMaps& maps, SmallWgmmaShape shape, const nf4l_weight& w, const nf4l_linear_args& l,
                       bool half) {
  const int64_t row_tiles = ceil_div(w.n, TILE_ROWS), k_tiles = w.k / TILE_K4;
  const bool nested = w.nested_code != nullptr;
  const int64_t scale_row_bytes = (nested ? ceil_div(k_tiles, BURST) : k_tiles) * 64, x_row_bytes = l.m > 1 ? l.x_stride * 2 : w.k * 2;
  const int rows = shape.row_tiles(), scale_bytes = SmallWgmmaShared::scale_bytes(shape.burst, nested);
  if (const int s = encode_activations(maps.x, half, l.x, l.m, w.k, x_row_bytes, shape.tokens, shape.burst)) return s;
  if (const int s = encode_bytes(maps.codes, w.qweight, row_tiles, k_tiles * TILE_BYTES, rows, shape.burst * TILE_BYTES)) return s;
  return encode_bytes(maps.scales, w.scales, row_tiles, scale_row_bytes, rows, scale_bytes);
}

template <class T>
int run_small_wgmma(const SmallWgmmaPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l, int device,
                    const DeviceInfo& info, cudaStream_t stream) {
  SmallWgmmaArgs a = {};
  static_cast<FourBitWeight&>(a) = four_bit_weight<T>(w);
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.bursts = plan.bursts;
  a.deal = plan.deal;
  if (plan.workspace_bytes > 0) {
    if (!l.workspace || int64_t(l.workspace_bytes) < plan.workspace_bytes || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.slots = static_cast<float4*>(l.workspace);
    // The last counters of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.arrived, device, stream, spare)) return status;
  }
  SmallWgmmaMaps maps;
  if (const int status = encode_maps(maps, SMALL_WGMMA_SHAPES[plan.shape], w, l, std::is_same_v<T, __half>)) return status;
  const auto launch = small_wgmma_launcher<T>(plan.shape, std::make_index_sequence<SMALL_WGMMA_SHAPE_COUNT>());
  return launch(plan, a, maps, l.flags & NF4L_DEPENDENT_LAUNCH, device, info.shared_bytes, stream);
}

}  // namespace nf4l
