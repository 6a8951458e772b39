// The mma.sync prefill engine for f16 activations: every shape of GEMM_MMA_SHAPES.
#include "gemm_mma_launch.cuh"

template int nf4l::run_gemm_mma<__half>(const GemmMmaPlan&, const nf4l_weight&, const nf4l_linear_args&,
                                   const LaunchTarget&);
