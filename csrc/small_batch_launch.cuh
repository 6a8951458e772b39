// Host side of the small-batch engine: kernel arguments out of the C structs, and the launch.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <atomic>
#include <utility>

#include "arrivals.h"
#include "codebook.h"
#include "launch.cuh"
#include "small_batch.cuh"
#include "small_batch_launch.h"
#include "validate.h"

namespace nf4l {

static_assert(MAX_PARTS <= ARRIVALS, "every part of a launch has its own counter");

// What has been done for one kernel on each device; devices beyond the last are asked anew each time.
struct KernelState {
  static constexpr int DEVICES = 64;
  std::atomic<int> arch[DEVICES] = {};  // of the code in use; 0 before the first launch
};

// The architecture that a kernel's code was compiled for, after allowing it `shared_limit` bytes of shared memory; or a
// negative status. It is not always that of the device: PTX for sm_80 may run anywhere.
inline int prepare_kernel(KernelState& state, const void* kernel, int device, int shared_limit) {
  const bool remembered = device < KernelState::DEVICES;
  if (remembered) {
    if (const int arch = state.arch[device].load(std::memory_order_acquire)) return arch;
  }
  cudaFuncAttributes attributes;
  if (const int status = status_of(cudaFuncGetAttributes(&attributes, kernel))) return status;
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (const int status = status_of(cudaFuncSetAttribute(kernel, most, shared_limit))) return status;
  if (remembered) state.arch[device].store(attributes.ptxVersion, std::memory_order_release);
  return attributes.ptxVersion;
}

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
  static constexpr SmallBatchLauncher launchers[] = {
      launch_small_batch<T, SMALL_BATCH_SHAPES[I].row_tiles, SMALL_BATCH_SHAPES[I].tokens, SMALL_BATCH_SHAPES[I].warps>...};
  return launchers[shape];
}

template <class T>
int run_small_batch(const SmallBatchPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l, int device,
                    const DeviceInfo& info, cudaStream_t stream) {
  SmallBatchArgs a = {};
  a.codes = w.qweight;
  a.scales = static_cast<const uint8_t*>(w.scales);
  a.nested_code = w.nested_code;
  a.nested_absmax = w.nested_absmax;
  a.nested_offset = w.nested_offset;
  a.x = static_cast<const char*>(l.x);
  a.x_row_bytes = l.x_stride * 2;
  a.bias = l.bias;
  a.y = l.y;
  a.first_block = w.n0 * w.kb_full + w.kb0;
  a.blocks_per_row = int(w.kb_full);
  a.log2_group = log2_of(w.blocksize / TILE_K4 * NESTED_BLOCKSIZE);
  a.m = int(l.m);
  a.n = int(w.n);
  a.row_tiles = int(ceil_div(w.n, TILE_ROWS));
  a.k_tiles = int(w.k / TILE_K4);
  a.groups = plan.groups;
  a.base_groups = plan.base_groups;
  a.extra_groups = plan.extra_groups;
  a.slice_tiles = plan.slice_tiles;
  a.dependent = l.flags & NF4L_DEPENDENT_LAUNCH;
  a.codebook = w.format == NF4L_NF4 ? codebook16_of<Nf4, T>() : codebook16_of<Fp4, T>();
  if (plan.slices > 1) {
    if (!l.workspace || int64_t(l.workspace_bytes) < plan.workspace_bytes || !aligned(l.workspace, 16)) return NF4L_BAD_ARGUMENT;
    a.partials = static_cast<float*>(l.workspace);
    a.arrivals = arrival_set(device, stream);
    if (!a.arrivals) {  // none left: the workspace has room for one that is cleared each time
      a.arrivals = reinterpret_cast<unsigned*>(static_cast<char*>(l.workspace) + plan.workspace_bytes) - ARRIVALS;
      if (const int status = status_of(cudaMemsetAsync(a.arrivals, 0, ARRIVALS * sizeof(unsigned), stream))) return status;
    }
  }
  const auto launch = small_batch_launcher<T>(plan.shape, std::make_index_sequence<SMALL_BATCH_SHAPE_COUNT>());
  return launch(plan, a, device, info.shared_bytes, stream);
}

}  // namespace nf4l
