// AVX2, FMA, F16C: x86 processors since Haswell and Zen.
#include <immintrin.h>

#include "level_headers.h"

#define NF4L_CPU_LEVEL avx2
#include "convert.h"
#include "formats.h"
#include "tiling.h"
#include "isa_portable.h"
#include "isa_avx2.h"
#include "f32_math.h"
#include "rows.h"
#include "batch.h"
#include "gemm.h"
#include "linear.h"
#include "dequantize.h"

namespace nf4l::cpu {

static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const Level AVX2_LEVEL = {"avx2", supported, avx2::linear_f32<avx2::Avx2>, avx2::dequantize<avx2::Avx2>};

}  // namespace nf4l::cpu
