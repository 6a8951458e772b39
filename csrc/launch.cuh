// What every launcher needs of the host side of CUDA.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <atomic>

#include "layout.h"
#include "nf4linear.h"

namespace nf4l {

inline int status_of(cudaError_t error) {
  if (error == cudaSuccess) return NF4L_OK;
  cudaGetLastError();  // the caller gets it as a status; nobody else must find it
  const bool no_image = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  return no_image ? NF4L_NO_KERNEL_IMAGE : NF4L_CUDA_ERROR - int(error);
}

inline int launch_status() { return status_of(cudaGetLastError()); }

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

}  // namespace nf4l
