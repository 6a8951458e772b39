// AVX-512 without BF16 and VBMI: Skylake-X, Cascade Lake, Ice Lake.
#include <immintrin.h>

#include "level_headers.h"

#define NF4L_CPU_LEVEL avx512_core
#include "convert.h"
#include "formats.h"
#include "tiling.h"
#include "isa_avx512.h"
#include "f32_math.h"
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
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

const Level AVX512_CORE_LEVEL = {"avx512_core", supported, avx512_core::linear,
                                 avx512_core::dequantize<avx512_core::Avx512>};

}  // namespace nf4l::cpu
