// Dequantize to f32: every byte order.
#include "dequant.cuh"

template int nf4l::launch_dequantize_as<float>(const nf4l_weight&, void*, cudaStream_t);
