// The 8-bit small-batch engine's host entry, compiled in inst_small_w8_*.cu.
#ifndef NF4LINEAR_SMALL_W8_LAUNCH_H
#define NF4LINEAR_SMALL_W8_LAUNCH_H

#include <cuda_runtime.h>

#include "dispatch.h"
#include "nf4linear.h"

namespace nf4l {

// Launches `plan` on the current device `device`; T is the 16-bit type of x, y and bias. Arguments are checked already.
template <class T>
int run_small_w8(const SmallW8Plan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                 const DeviceInfo& info, cudaStream_t stream);

}  // namespace nf4l

#endif
