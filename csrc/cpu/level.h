// An instruction-set level: one set of kernels compiled for it, behind two function pointers.
//
// Every level_*.cpp includes the same kernel headers in a namespace of its own (NF4L_CPU_LEVEL), compiled with the
// flags of that level. Nothing of those headers may leave that namespace: an inline function shared by two levels would
// be merged by the linker, and the portable level could end up running AVX-512 code.
#ifndef NF4LINEAR_CPU_LEVEL_H
#define NF4LINEAR_CPU_LEVEL_H

#include "../nf4linear.h"

namespace nf4l::cpu {

struct Level {
  const char* name;
  bool (*supported)();
  // Both take arguments that csrc/validate.h has accepted.
  int (*linear)(const nf4l_weight& w, const nf4l_linear_args& a, int threads);
  int (*dequantize)(const nf4l_weight& w, int32_t dtype, void* out, int threads);
};

extern const Level PORTABLE_LEVEL;
#if defined(__x86_64__) && !defined(NF4L_PORTABLE_ONLY)
extern const Level AVX2_LEVEL;         // AVX2, FMA, F16C
extern const Level AVX512_CORE_LEVEL;  // AVX-512 F, BW, DQ, VL (Skylake-X, Ice Lake)
extern const Level AVX512_LEVEL;       // the same and BF16, VBMI (Zen 4, Sapphire Rapids)
#endif

// The best level this machine has, or the one that NF4LINEAR_CPU_LEVEL names; chosen at the first call.
const Level& level();

}  // namespace nf4l::cpu

#endif
