// Dequantize to f16: every byte order.
#include "dequant.cuh"

template int nf4l::launch_dequantize_as<__half>(const nf4l_weight&, void*, cudaStream_t);
