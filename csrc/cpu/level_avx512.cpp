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
#include "rows.h"
#include "batch.h"
#include "gemm.h"
#include "linear.h"
#include "gemv_avx512.h"
#include "linear_avx512.h"
#include "dequantize.h"

namespace nf4l::cpu {

static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
}

const Level AVX512_LEVEL = {"avx512", supported, avx512::linear, avx512::dequantize<avx512::Avx512>};

}  // namespace nf4l::cpu
