// The level that runs everywhere, and the yardstick of the others.
#include "level_headers.h"

#define NF4L_CPU_LEVEL portable
#include "convert.h"
#include "formats.h"
#include "tiling.h"
#include "isa_portable.h"
#include "f32_math.h"
#include "rows.h"
#include "batch.h"
#include "gemm.h"
#include "linear.h"
#include "dequantize.h"

namespace nf4l::cpu {

const Level PORTABLE_LEVEL = {"portable", [] { return true; }, portable::linear_f32<portable::Portable>,
                              portable::dequantize<portable::Portable>};

}  // namespace nf4l::cpu
