// The wgmma engine for bf16 activations: every shape of SMALL_WGMMA_SHAPES.
#include "small_wgmma_launch.cuh"

template int nf4l::run_small_wgmma<__nv_bfloat16>(const SmallWgmmaPlan&, const nf4l_weight&, const nf4l_linear_args&,
                                                  const LaunchTarget&);
