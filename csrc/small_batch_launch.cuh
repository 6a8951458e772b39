// Host side of the small-batch engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

#include "arrivals.h"
#include "four_bit.cuh"
#include "launch.cuh"
#include "small_batch.cuh"
#include "small_batch_launch.h"
#include "validate.h"

namespace nf4l {

static_assert(MAX_PARTS == ARRIVALS, "every part of a launch has its own counter");

template <class T, int R, int TOKENS, int WARPS>
int launch_small_batch(const SmallBatchPlan& plan, SmallBatchArgs args, int device, int shared_limit,
                       cudaStream_t stream) {
  static KernelState state;
  const auto kernel = small_batch_kernel<T, R, TOKENS, WARPS>;
  const int arch = prepare_kernel(state, reinterpret_cast<const void*>(kernel), device, shared_limit);
  if (arch < 0) return arch;
  args.dependent = args.dependent && arch >= 90;  // older code has no way to wait
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.parts, plan.slices);
  config.blockDim = WARPS * WARP;
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = args.dependent ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<const SmallBatchArgs>(args)));
}

using SmallBatchLauncher = int (*)(const SmallBatchPlan&, SmallBatchArgs, int, int, cudaStream_t);

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
int run_small_batch(const SmallBatchPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l, int device,
                    const DeviceInfo& info, cudaStream_t stream) {
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
  if (plan.slices > 1) {
    const bool large_enough = l.workspace && int64_t(l.workspace_bytes) >= plan.workspace_bytes;
    if (!large_enough || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.partials = static_cast<float*>(l.workspace);
    // The last counters of the workspace are there for when the library has no set left.
    void* spare = static_cast<char*>(l.workspace) + plan.workspace_bytes - ARRIVALS * sizeof(unsigned);
    if (const int status = claim_arrivals(a.arrivals, device, stream, spare)) return status;
  }
  const auto launch = small_batch_launcher<T>(plan.shape, std::make_index_sequence<SMALL_BATCH_SHAPE_COUNT>());
  return launch(plan, a, device, info.shared_bytes, stream);
}

}  // namespace nf4l
