// The host entry of the Hopper engine for 8-bit weights, compiled in inst_gemm_w8_*.cu.
#ifndef NF4LINEAR_GEMM_W8_LAUNCH_H
#define NF4LINEAR_GEMM_W8_LAUNCH_H

#include <cuda_runtime.h>

#include "dispatch.h"
#include "nf4linear.h"

namespace nf4l {

// Launches `plan` on the current device `device`; Code (codebook.h) is the kind of codes, T the 16-bit type of x, y and bias.
// Arguments are checked already.
template <class Code, class T>
int run_gemm_w8(const GemmW8Plan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                const DeviceInfo& info, cudaStream_t stream);

}  // namespace nf4l

#endif
