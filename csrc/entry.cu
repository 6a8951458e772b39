// The exported functions of libnf4linear_cuda: validate, ask the dispatch table, launch.
#include <cuda_runtime.h>

#include "dequant.cuh"
#include "nf4linear.h"
#include "validate.h"

// Compiled in inst_dequant_*.cu, one translation unit each.
extern template int nf4l::launch_dequantize_as<float>(const nf4l_weight&, void*, cudaStream_t);
extern template int nf4l::launch_dequantize_as<__half>(const nf4l_weight&, void*, cudaStream_t);
extern template int nf4l::launch_dequantize_as<__nv_bfloat16>(const nf4l_weight&, void*, cudaStream_t);

extern "C" {

int nf4l_cuda_abi_version(void) { return NF4L_ABI_VERSION; }

const char* nf4l_cuda_architectures(void) { return NF4L_ARCHITECTURES; }

const char* nf4l_cuda_status_text(int status) {
  if (const char* text = nf4l::shared_status_text(status)) return text;
  if (status == NF4L_NO_KERNEL_IMAGE) return "the library holds no code for this GPU";
  if (status <= NF4L_CUDA_ERROR) return cudaGetErrorString(static_cast<cudaError_t>(NF4L_CUDA_ERROR - status));
  return "unknown status";
}

int nf4l_cuda_dequantize(const nf4l_weight* weight, int32_t dtype, void* out, void* stream) {
  if (const int status = nf4l::check_dequantize(weight, dtype, out)) return status;
  return nf4l::launch_dequantize(*weight, dtype, out, static_cast<cudaStream_t>(stream));
}

size_t nf4l_cuda_workspace_bytes(void) { return 0; }

int nf4l_cuda_linear(const nf4l_weight* weight, const nf4l_linear_args* args, void*) {
  if (const int status = nf4l::check_linear(weight, args)) return status;
  return args->m == 0 ? NF4L_OK : NF4L_USE_GEMM;
}

}  // extern "C"
