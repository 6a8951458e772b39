// Moore Threads' runtime names on CUDA's, so that the port compiles with nvcc and, through ../host, with a host
// compiler. Not part of the port: on the platform itself its own <musa_runtime.h> is found instead.
#pragma once

#include <cuda_runtime.h>

#define musaDeviceSynchronize cudaDeviceSynchronize
#define musaError_t cudaError_t
#define musaEventCreate cudaEventCreate
#define musaEventDestroy cudaEventDestroy
#define musaEventElapsedTime cudaEventElapsedTime
#define musaEventRecord cudaEventRecord
#define musaEventSynchronize cudaEventSynchronize
#define musaEvent_t cudaEvent_t
#define musaFree cudaFree
#define musaGetErrorString cudaGetErrorString
#define musaGetLastError cudaGetLastError
#define musaMalloc cudaMalloc
#define musaMemcpy cudaMemcpy
#define musaMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define musaMemcpyHostToDevice cudaMemcpyHostToDevice
#define musaSuccess cudaSuccess
