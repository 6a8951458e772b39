// The 8-bit small-batch engine for bf16 activations: every shape of SMALL_W8_SHAPES.
#include "small_w8_launch.cuh"

template int nf4l::run_small_w8<__nv_bfloat16>(const SmallW8Plan&, const nf4l_weight&, const nf4l_linear_args&,
                                               const LaunchTarget&);
