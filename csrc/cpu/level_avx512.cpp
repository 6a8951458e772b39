// AVX-512 with BF16 and VBMI: Zen 4, Sapphire Rapids and later.
#include <immintrin.h>

#include "level_headers.h"

#define NF4L_CPU_LEVEL avx512
#include "convert.h"
#include "formats.h"
#include "tiling.h"
#include "isa_avx512.h"
#include "f32_math.h"
#include "bf16_math.h"
#include "gemm.h"
#include "linear.h"
#include "dequantize.h"

namespace nf4l::cpu {

static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("fma");
}

namespace avx512 {

static int linear(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  if (a.dtype == NF4L_BF16) return run_gemm<Avx512, Bf16Math, Bf16>(w, a, threads);
  return linear_f32<Avx512>(w, a, threads);
}

}  // namespace avx512

const Level AVX512_LEVEL = {"avx512", supported, avx512::linear, avx512::dequantize<avx512::Avx512>};

}  // namespace nf4l::cpu
