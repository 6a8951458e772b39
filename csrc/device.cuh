// The GPU a call runs on, as the dispatch table sees it.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "dispatch.h"
#include "status.cuh"

namespace nf4l {

inline cudaError_t query_device(int device, DeviceInfo& info) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error) error = cudaDeviceGetAttribute(&info.sms, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = cudaDeviceGetAttribute(&info.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  info.arch = 10 * major + minor;
  return error;
}

// The calling thread's current device. It is asked once: the answers never change.
inline int current_device(int& device, DeviceInfo& info) {
  constexpr int DEVICES = 64;
  static std::mutex mutex;
  static DeviceInfo known[DEVICES];  // arch 0: not asked yet
  if (const int status = status_of(cudaGetDevice(&device))) return status;
  if (device >= DEVICES) return status_of(query_device(device, info));
  const std::lock_guard<std::mutex> lock(mutex);
  if (known[device].arch == 0) {
    DeviceInfo fresh;
    if (const int status = status_of(query_device(device, fresh))) return status;
    known[device] = fresh;
  }
  info = known[device];
  return NF4L_OK;
}

}  // namespace nf4l
