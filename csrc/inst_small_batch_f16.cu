// The small-batch engine for f16 activations: every shape of SMALL_BATCH_SHAPES.
#include "small_batch_launch.cuh"

template int nf4l::run_small_batch<__half>(const SmallBatchPlan&, const nf4l_weight&, const nf4l_linear_args&,
                                           const LaunchTarget&);
