// How the engines' kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "engines.h"
#include "status.cuh"

namespace nf4l {

struct LaunchGrid {
  dim3 blocks;
  int threads;       // of a block
  int shared_bytes;  // of a block
  int cluster = 1;   // blocks that run at the same time, near each other
};

// The architecture that the code of KERNEL was compiled for, after allowing it all the shared memory there is; or a
// negative status. It is not always that of the device: PTX for sm_80 may run anywhere. It is asked once a device.
template <auto KERNEL>
int prepare_kernel(const LaunchTarget& target) {
  constexpr int DEVICES = 64;  // those beyond are asked anew each time
  static std::atomic<int> known[DEVICES] = {};
  const bool remembered = target.device < DEVICES;
  if (remembered) {
    if (const int arch = known[target.device].load(std::memory_order_acquire)) return arch;
  }
  cudaFuncAttributes attributes;
  if (const int status = status_of(cudaFuncGetAttributes(&attributes, KERNEL))) return status;
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (const int status = status_of(cudaFuncSetAttribute(KERNEL, most, target.shared_limit))) return status;
  if (remembered) known[target.device].store(attributes.ptxVersion, std::memory_order_release);
  return attributes.ptxVersion;
}

// Whether KERNEL may be launched before the previous kernel of its stream ends: older code has no way to wait for it.
template <auto KERNEL>
bool can_launch_early(const LaunchTarget& target) {
  return prepare_kernel<KERNEL>(target) >= 90;
}

// `dependent`: a programmatic dependent launch, of a kernel that can_launch_early(). A status.
template <auto KERNEL, class... Args>
int launch_kernel(const LaunchTarget& target, const LaunchGrid& grid, bool dependent, const Args&... args) {
  if (const int arch = prepare_kernel<KERNEL>(target); arch < 0) return arch;
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = target.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return status_of(cudaLaunchKernelEx(&config, KERNEL, args...));
}

}  // namespace nf4l
