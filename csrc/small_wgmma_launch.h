// The wgmma engine's host entry, compiled in inst_small_wgmma_*.cu.
#ifndef NF4LINEAR_SMALL_WGMMA_LAUNCH_H
#define NF4LINEAR_SMALL_WGMMA_LAUNCH_H

#include <cuda_runtime.h>

#include "dispatch.h"
#include "nf4linear.h"

namespace nf4l {

// Launches `plan` on the current device `device`; T is the 16-bit type of x, y and bias. Arguments are checked already.
template <class T>
int run_small_wgmma(const SmallWgmmaPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                    const DeviceInfo& info, cudaStream_t stream);

}  // namespace nf4l

#endif
