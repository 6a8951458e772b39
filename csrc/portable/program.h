// The ports' common program: reads a weight file, dequantizes, times, writes the output. A platform's file defines
// GPU(name), which puts the prefix of its runtime before a CUDA name, and includes this.
//
//   usage: nf4_dequant FILE OUTPUT fp16|bf16 [WARMUP REPEATS]
//
// Files and protocol are those of ../lab; with REPEATS a line of JSON with the times is printed.
#ifndef NF4L_PORTABLE_PROGRAM_H
#define NF4L_PORTABLE_PROGRAM_H

#ifndef NF4P_HOST
#define NF4P_HD __host__ __device__ inline
#endif

#include <stdio.h>
#include <stdlib.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../codebook.h"
#include "../lab/timing.h"
#include "../lab/weight_file.h"
#include "nf4_dequant.h"

namespace nf4l::portable {

inline void check(GPU(Error_t) error, const char* call, int line) {
  if (error == GPU(Success)) return;
  throw std::runtime_error("program.h:" + std::to_string(line) + ": " + call + ": " + GPU(GetErrorString)(error));
}
#define NF4P_CHECK(call) ::nf4l::portable::check((call), #call, __LINE__)

// Device copy of a host array; freed at the end of its scope.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    void* data = nullptr;
    NF4P_CHECK(GPU(Malloc)(&data, size * sizeof(T)));
    data_ = static_cast<T*>(data);
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    NF4P_CHECK(GPU(Memcpy)(data_, host.data(), size_ * sizeof(T), GPU(MemcpyHostToDevice)));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { (void)GPU(Free)(data_); }

  T* get() const { return data_; }
  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    NF4P_CHECK(GPU(Memcpy)(host.data(), data_, size_ * sizeof(T), GPU(MemcpyDeviceToHost)));
    return host;
  }

 private:
  T* data_;
  size_t size_;
};

inline void launch(const DequantArgs& args, bool bfloat16) {
  if (bfloat16) launch_dequantize<true>(args);
  else launch_dequantize<false>(args);
  NF4P_CHECK(GPU(GetLastError)());
}

// Milliseconds of each launch, the device idle before it.
inline std::vector<float> time_launches(const DequantArgs& args, bool bfloat16, int warmup, int repeats) {
  GPU(Event_t) start, stop;
  NF4P_CHECK(GPU(EventCreate)(&start));
  NF4P_CHECK(GPU(EventCreate)(&stop));
  for (int i = 0; i < warmup; ++i) launch(args, bfloat16);
  std::vector<float> times(repeats);
  for (float& ms : times) {
    NF4P_CHECK(GPU(DeviceSynchronize)());
    NF4P_CHECK(GPU(EventRecord)(start, 0));
    launch(args, bfloat16);
    NF4P_CHECK(GPU(EventRecord)(stop, 0));
    NF4P_CHECK(GPU(EventSynchronize)(stop));
    NF4P_CHECK(GPU(EventElapsedTime)(&ms, start, stop));
  }
  NF4P_CHECK(GPU(EventDestroy)(start));
  NF4P_CHECK(GPU(EventDestroy)(stop));
  return times;
}

inline void write_values(const std::string& path, const std::vector<uint16_t>& values) {
  FILE* file = fopen(path.c_str(), "wb");
  const bool written = file && fwrite(values.data(), 2, values.size(), file) == values.size();
  const bool closed = file && fclose(file) == 0;
  if (!written || !closed) throw std::runtime_error(path + ": cannot be written");
}

inline int run(int argc, char** argv) {
  const std::string dtype = argc > 3 ? argv[3] : "";
  if ((argc != 4 && argc != 6) || (dtype != "fp16" && dtype != "bf16")) {
    throw std::runtime_error("usage: nf4_dequant FILE OUTPUT fp16|bf16 [WARMUP REPEATS]");
  }
  const bool bfloat16 = dtype == "bf16";
  const lab::WeightFile file = lab::read_weight_file(argv[1]);
  const DeviceArray<uint8_t> codes(file.codes), absmax_q(file.absmax_q);
  std::vector<float> centroids(16);
  for (int code = 0; code < 16; ++code) centroids[code] = Nf4::value(code);
  const DeviceArray<float> absmax2(file.absmax2), code2(file.code2), table(centroids);
  // NaN everywhere, so that an element that no thread writes shows up in the comparison.
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(file.numel(), 0xffff));

  DequantArgs args = {codes.get(), absmax_q.get(), absmax2.get(), code2.get(),   table.get(),
                      out.get(),   file.numel(),   file.offset,   0};
  while ((1u << args.log2_blocksize) < file.blocksize) ++args.log2_blocksize;
  launch(args, bfloat16);
  NF4P_CHECK(GPU(DeviceSynchronize)());
  write_values(argv[2], out.to_host());

  const int repeats = argc == 6 ? atoi(argv[5]) : 0;
  if (repeats > 0) {
    const size_t bytes = file.payload_bytes() + 2 * file.numel();
    const lab::Timing timing = lab::summarize(time_launches(args, bfloat16, atoi(argv[4]), repeats), bytes);
    printf("%s\n", lab::to_json("portable", dtype, "idle", repeats, bytes, timing).c_str());
  }
  return 0;
}

}  // namespace nf4l::portable

int main(int argc, char** argv) {
  try {
    return nf4l::portable::run(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "nf4_dequant: %s\n", error.what());
    return 1;
  }
}

#endif
