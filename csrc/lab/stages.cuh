// The stages of the ladder by name, each a launch on a stream.
#pragma once

#include <string>
#include <vector>

#include "device.cuh"
#include "ladder.cuh"
#include "weight_file.h"

namespace nf4l::lab {

inline const std::vector<std::string>& stage_names() {
  static const std::vector<std::string> names = {"v0", "v1", "v2", "v3", "v4", "vectors_alone", "shifts_alone"};
  return names;
}

// One weight on the device.
class DeviceWeight {
 public:
  explicit DeviceWeight(const WeightFile& file)
      : rows_(int64_t(file.rows)), columns_(int64_t(file.columns)), blocksize_(file.blocksize),
        s2_blocksize_(file.nested_blocksize), codes_(file.codes), absmax_q_(file.absmax_q), absmax2_(file.absmax2),
        code2_(file.code2), offset_(std::vector<float>{file.offset}) {}

  int64_t numel() const { return rows_ * columns_; }
  size_t input_bytes() const {
    return codes_.bytes() + absmax_q_.bytes() + absmax2_.bytes() + code2_.bytes() + offset_.bytes();
  }

  // v0 to v3 and the single optimisations.
  LadderWeight ladder() const {
    if (numel() > INT32_MAX - 8) {
      throw std::runtime_error("v0 to v3 count in 32 bits: only v4 takes 2^31 weights or more");
    }
    return {codes_.as<uint8_t>(), absmax_q_.as<uint8_t>(), absmax2_.as<float>(), code2_.as<float>(),
            offset_.as<float>(),  int(numel()),             int(blocksize_),      int(s2_blocksize_),
            log2_of(blocksize_),  log2_of(s2_blocksize_)};
  }

  // v4.
  nf4l_weight product() const {
    return {NF4L_NF4, NF4L_FLAT, rows_, columns_, blocksize_, codes_.as<uint8_t>(), absmax_q_.as<void>(),
            code2_.as<float>(), absmax2_.as<float>(), offset_.as<float>(), 0, 0, columns_ / TILE_K4};
  }

 private:
  int64_t rows_, columns_, blocksize_, s2_blocksize_;
  DeviceBuffer codes_, absmax_q_, absmax2_, code2_, offset_;
};

template <class T>
void launch_ladder(const std::string& stage, const LadderWeight& w, T* out, cudaStream_t stream) {
  using Kernel = void (*)(LadderWeight, T*);
  const bool one_byte = stage == "v0" || stage == "v1" || stage == "shifts_alone";
  Kernel kernel = stage == "v0"              ? v0<T>
                  : stage == "v1"            ? v1<T>
                  : stage == "v2"            ? v2<T>
                  : stage == "v3"            ? v3<T>
                  : stage == "vectors_alone" ? vectors_alone<T>
                  : stage == "shifts_alone"  ? shifts_alone<T>
                                             : nullptr;
  if (!kernel) throw std::runtime_error("unknown stage '" + stage + "'");
  const int64_t threads = ceil_div(w.numel, one_byte ? 2 : 8);
  kernel<<<unsigned(ceil_div(threads, LADDER_THREADS)), LADDER_THREADS, 0, stream>>>(w, out);
  NF4L_CUDA(cudaGetLastError());
}

// Launches `stage`; out holds numel elements of `dtype` (nf4l_dtype), 16-byte aligned.
inline void launch_stage(const std::string& stage, const DeviceWeight& w, int dtype, void* out, cudaStream_t stream) {
  if (stage == "v4") {
    const int status = launch_dequantize(w.product(), dtype, out, stream);
    if (status != NF4L_OK) throw std::runtime_error("v4 did not launch: status " + std::to_string(status));
  } else if (dtype == NF4L_F32) {
    launch_ladder(stage, w.ladder(), static_cast<float*>(out), stream);
  } else if (dtype == NF4L_F16) {
    launch_ladder(stage, w.ladder(), static_cast<__half*>(out), stream);
  } else {
    launch_ladder(stage, w.ladder(), static_cast<__nv_bfloat16*>(out), stream);
  }
}

}  // namespace nf4l::lab
