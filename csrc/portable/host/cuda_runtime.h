// The few CUDA runtime calls of ../program.h on the host, for machines without a GPU: memory is host memory, a launch
// is a loop over the grid (../nf4_dequant.h), events read a clock. Found instead of CUDA's header by the include path.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <chrono>

#define NF4P_HOST 1

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
using cudaEvent_t = std::chrono::steady_clock::time_point*;

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "out of memory"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = aligned_alloc(16, (bytes + 15) / 16 * 16);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* data) {
  free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new std::chrono::steady_clock::time_point;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, int) {
  *event = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t stop) {
  *ms = std::chrono::duration<float, std::milli>(*stop - *start).count();
  return cudaSuccess;
}
