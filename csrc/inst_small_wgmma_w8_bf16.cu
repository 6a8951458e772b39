// The wgmma engine for 8-bit weights and bf16 activations: every shape of SMALL_WGMMA_W8_SHAPES.
#include "small_wgmma_w8_launch.cuh"

template int nf4l::run_small_wgmma_w8<__nv_bfloat16>(const SmallWgmmaW8Plan&, const nf4l_weight&,
                                                     const nf4l_linear_args&, const LaunchTarget&);
