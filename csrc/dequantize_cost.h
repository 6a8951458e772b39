// What the launch tables hold against a fused kernel for many tokens: about how long dequantize and the framework's
// GEMM take. Plain C++.
#ifndef NF4LINEAR_DEQUANTIZE_COST_H
#define NF4LINEAR_DEQUANTIZE_COST_H

#include <stdint.h>

#include "layout.h"

namespace nf4l {

// In nanoseconds, and in double: a product of the three sizes can leave 64 bits. What dequantize reads and writes, in
// bytes for each weight, at 4.2 TB/s; tiles of 64 tokens at 770 TFLOP/s; beside that, what a launch costs and what
// output tiles leave of the SMs, which grows with their inputs up to 9 us. On an H200, of 129 to 3072 tokens, it is off
// by 6 % in the mean from 4096 rows on, by 10 with fewer, mostly too long.
constexpr double dequantize_gemm_ns(int64_t m, int64_t n, int64_t k, double weight_bytes) {
  const double weights = double(n) * double(k), tokens = 64.0 * double(ceil_div(m, 64));
  const double dequantize = weights * weight_bytes / 4200 + 1500, gemm = tokens * weights / 385'000;
  const double more = 4000 + double(k) * 0.8;
  return dequantize + gemm + (more < 9000 ? more : 9000);
}

}  // namespace nf4l

#endif
