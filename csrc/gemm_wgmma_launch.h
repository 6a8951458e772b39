// The prefill engine's host entry, compiled in inst_gemm_wgmma_*.cu.
#ifndef NF4LINEAR_GEMM_WGMMA_LAUNCH_H
#define NF4LINEAR_GEMM_WGMMA_LAUNCH_H

#include <cuda_runtime.h>

#include "dispatch.h"
#include "nf4linear.h"

namespace nf4l {

// Launches `plan` for a 4-bit weight on the current device `device`; T is the 16-bit type of x, y and bias. Arguments are
// checked already.
template <class T>
int run_gemm_four_bit(const GemmPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                      const DeviceInfo& info, cudaStream_t stream);

}  // namespace nf4l

#endif
