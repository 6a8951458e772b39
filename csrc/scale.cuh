// Block scales of 4-bit weights on the device: read, and where double quantization is used, decoded.
//
// The product and the sum are rounded one after the other, as bitsandbytes' two kernels round them; a fused
// multiply-add would differ in the last bit, and every weight of the block with it.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "nf4linear.h"

namespace nf4l {

__device__ __forceinline__ float nested_scale(float code_value, float nested_absmax, float offset) {
  return __fadd_rn(__fmul_rn(code_value, nested_absmax), offset);
}

// The scale tensors of one weight. Without double quantization the nested pointers are NULL.
struct BlockScales {
  const void* scales;          // uint8 codes (double quantization) or float32
  const float* nested_code;    // [256]
  const float* nested_absmax;  // one for every 256 blocks of the unsharded weight
  const float* nested_offset;  // one float

  // The float32 scale of block `index`, without double quantization.
  __device__ __forceinline__ float plain(int64_t index) const {
    return __ldg(static_cast<const float*>(scales) + index);
  }

  // The scale that the code at `index` stands for; its block belongs to second-level group `group`. The three reads
  // after the code's own depend on nothing else, so all are in flight together.
  __device__ __forceinline__ float nested(int64_t index, int64_t group) const {
    const uint8_t code = __ldg(static_cast<const uint8_t*>(scales) + index);
    return nested_scale(__ldg(nested_code + code), __ldg(nested_absmax + group), __ldg(nested_offset));
  }

  // Either, by what the weight has: the same for the whole grid.
  __device__ __forceinline__ float operator()(int64_t index, int64_t group) const {
    return nested_code == nullptr ? plain(index) : nested(index, group);
  }
};

inline BlockScales block_scales(const nf4l_weight& w) {
  return {w.scales, w.nested_code, w.nested_absmax, w.nested_offset};
}

}  // namespace nf4l
