// MetaX's runtime names on CUDA's, so that the port compiles with nvcc and, through ../host, with a host compiler. Not
// part of the port: on the platform itself its own <mc_runtime.h> is found instead.
#pragma once

#include <cuda_runtime.h>

#define mcDeviceSynchronize cudaDeviceSynchronize
#define mcError_t cudaError_t
#define mcEventCreate cudaEventCreate
#define mcEventDestroy cudaEventDestroy
#define mcEventElapsedTime cudaEventElapsedTime
#define mcEventRecord cudaEventRecord
#define mcEventSynchronize cudaEventSynchronize
#define mcEvent_t cudaEvent_t
#define mcFree cudaFree
#define mcGetErrorString cudaGetErrorString
#define mcGetLastError cudaGetLastError
#define mcMalloc cudaMalloc
#define mcMemcpy cudaMemcpy
#define mcMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define mcMemcpyHostToDevice cudaMemcpyHostToDevice
#define mcSuccess cudaSuccess
