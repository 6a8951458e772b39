// Host side of the 8-bit small-batch engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

#include "arrivals.h"
#include "launch.cuh"
#include "small_w8.cuh"
#include "small_w8_launch.h"
#include "validate.h"

namespace nf4l {

static_assert(MAX_PARTS == ARRIVALS, "every part of a launch has its own counter");

template <class Code, class T, int SHAPE, bool GROUPED>
int launch_small_w8(const SmallW8Plan& plan, SmallW8Args args, int device, int shared_limit, cudaStream_t stream) {
  static KernelState state;
  constexpr SmallBatchShape S = SMALL_W8_SHAPES[SHAPE];
  const auto kernel = small_w8_kernel<Code, T, S.row_tiles, S.tokens, S.warps, GROUPED>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  args.dependent = args.dependent && arch >= 90;  // older code has no way to wait
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.parts, plan.slices);
  config.blockDim = S.warps * WARP;
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = args.dependent ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<const SmallW8Args>(args)));
}

using SmallW8Launcher = int (*)(const SmallW8Plan&, SmallW8Args, int, int, cudaStream_t);

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
int run_small_w8(const SmallW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l, int device,
                 const DeviceInfo& info, cudaStream_t stream) {
  SmallW8Args a = small_w8_args(plan, w, l);
  if (plan.slices > 1) {
    const bool large_enough = l.workspace && int64_t(l.workspace_bytes) >= plan.workspace_bytes;
    if (!large_enough || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.partials = static_cast<float*>(l.workspace);
    // The last counters of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.arrivals, device, stream, spare)) return status;
  }
  const auto all = std::make_index_sequence<SMALL_W8_SHAPE_COUNT>();
  const auto launch = w.format == NF4L_W8_S8 ? small_w8_launcher<W8S8, T>(plan.shape, w.blocksize > 0, all)
                                             : small_w8_launcher<W8U8, T>(plan.shape, w.blocksize > 0, all);
  return launch(plan, a, device, info.shared_bytes, stream);
}

}  // namespace nf4l
