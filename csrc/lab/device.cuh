// CUDA calls of the laboratory program, each checked: a failure throws with the call, the place and CUDA's own text.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nf4l::lab {

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  const std::string place = std::string(file) + ":" + std::to_string(line);
  throw std::runtime_error(place + ": " + call + ": " + cudaGetErrorString(error));
}
#define NF4L_CUDA(call) ::nf4l::lab::check_cuda((call), #call, __FILE__, __LINE__)

// Device memory with an owner.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) { NF4L_CUDA(cudaMalloc(&data_, bytes)); }
  template <class T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
    NF4L_CUDA(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }

  template <class T>
  T* as() const { return static_cast<T*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

class Event {
 public:
  Event() { NF4L_CUDA(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { NF4L_CUDA(cudaEventRecord(event_, stream)); }
  float milliseconds_since(const Event& start) const {
    NF4L_CUDA(cudaEventSynchronize(event_));
    float ms = 0;
    NF4L_CUDA(cudaEventElapsedTime(&ms, start.event_, event_));
    return ms;
  }

 private:
  cudaEvent_t event_;
};

class Stream {
 public:
  Stream() { NF4L_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_;
};

}  // namespace nf4l::lab
