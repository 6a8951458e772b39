// Dequantize to bf16: every byte order.
#include "dequant.cuh"

template int nf4l::launch_dequantize_as<__nv_bfloat16>(const nf4l_weight&, void*, cudaStream_t);
