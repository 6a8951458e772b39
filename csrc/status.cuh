// What a CUDA call answered, as a status of the C ABI.
#pragma once

#include <cuda_runtime.h>

#include "nf4linear.h"

namespace nf4l {

inline int status_of(cudaError_t error) {
  if (error == cudaSuccess) return NF4L_OK;
  cudaGetLastError();  // the caller gets it as a status; nobody else must find it
  const bool no_image = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  return no_image ? NF4L_NO_KERNEL_IMAGE : NF4L_CUDA_ERROR - int(error);
}

inline int launch_status() { return status_of(cudaGetLastError()); }

}  // namespace nf4l
