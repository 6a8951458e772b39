// What the launch tables hold against a fused kernel for many tokens: about how long dequantize and the framework's
// GEMM take. Plain C++.
#ifndef NF4LINEAR_DEQUANTIZE_COST_H
#define NF4LINEAR_DEQUANTIZE_COST_H

#include <stdint.h>

#include "layout.h"

namespace nf4l {

// In nanoseconds. `bytes` that dequantize reads and writes, at 4.2 TB/s; tiles of 64 tokens at 770 TFLOP/s; beside
// that, what a launch costs and what output tiles leave of the SMs, which grows with their inputs up to 9 us. On an
// H200, of 129 to 3072 tokens, it is off by 6 % in the mean from 4096 rows on, by 10 with fewer, mostly too long.
constexpr int64_t dequantize_gemm_ns(int64_t m, int64_t n, int64_t k, int64_t bytes) {
  const int64_t dequantize = bytes / 4200 + 1500, gemm = ceil_div(m, 64) * 64 * n / 385 * k / 1000;
  const int64_t more = 4000 + k * 4 / 5;
  return dequantize + gemm + (more < 9000 ? more : 9000);
}

}  // namespace nf4l

#endif
