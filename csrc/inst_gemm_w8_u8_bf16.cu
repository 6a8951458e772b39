// The Hopper engine for 8-bit weights: u8 codes, bf16 activations.
#include "gemm_w8_launch.cuh"

template int nf4l::run_gemm_w8<nf4l::W8U8, __nv_bfloat16>(const GemmW8Plan&, const nf4l_weight&,
                                                          const nf4l_linear_args&, const LaunchTarget&);
