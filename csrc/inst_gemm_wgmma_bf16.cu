// The prefill engine for 4-bit weights and bf16 activations: every shape of GEMM_SHAPES.
#include "gemm_wgmma_launch.cuh"

template int nf4l::run_gemm_four_bit<__nv_bfloat16>(const GemmLaunches&, const nf4l_weight&, const nf4l_linear_args&,
                                                    const LaunchTarget&);
