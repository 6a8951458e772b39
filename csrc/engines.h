// The fused engines' host entries, compiled in inst_*.cu. Each launches its plan; T is the 16-bit type of x, y and
// bias. Arguments are checked already.
#ifndef NF4LINEAR_ENGINES_H
#define NF4LINEAR_ENGINES_H

#include <cuda_runtime.h>

#include "dispatch.h"
#include "nf4linear.h"

namespace nf4l {

// Where a launch goes.
struct LaunchTarget {
  int device;        // the calling thread's current one
  int shared_limit;  // most bytes of shared memory that a block may use there
  cudaStream_t stream;
};

template <class T>
int run_small_batch(const SmallBatchPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                    const LaunchTarget& target);

template <class T>
int run_small_wgmma(const SmallWgmmaPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                    const LaunchTarget& target);

template <class T>
int run_gemm_four_bit(const GemmLaunches& launches, const nf4l_weight& weight, const nf4l_linear_args& args,
                      const LaunchTarget& target);

template <class T>
int run_gemm_mma(const GemmMmaPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                 const LaunchTarget& target);

template <class T>
int run_small_w8(const SmallW8Plan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                 const LaunchTarget& target);

template <class T>
int run_small_wgmma_w8(const SmallWgmmaW8Plan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                       const LaunchTarget& target);

// Code (codebook.h) is the kind of codes.
template <class Code, class T>
int run_gemm_w8(const GemmW8Plan& plan, const nf4l_weight& weight, const nf4l_linear_args& args,
                const LaunchTarget& target);

}  // namespace nf4l

#endif
