// The exported functions of libnf4linear_cuda: validate, ask the dispatch table, launch.
#include <cuda_runtime.h>

#include <cstring>

#include "dequant.cuh"
#include "device.cuh"
#include "dispatch.h"
#include "engines.h"
#include "nf4linear.h"
#include "validate.h"

// Compiled in inst_dequant_*.cu, one translation unit each.
extern template int nf4l::launch_dequantize_as<float>(const nf4l_weight&, void*, cudaStream_t);
extern template int nf4l::launch_dequantize_as<__half>(const nf4l_weight&, void*, cudaStream_t);
extern template int nf4l::launch_dequantize_as<__nv_bfloat16>(const nf4l_weight&, void*, cudaStream_t);

namespace nf4l {
namespace {

struct LinearCall {
  int device;
  DeviceInfo info;
  Launch launch;
};

// What to launch for these arguments on the current device; or a negative status.
int plan_linear(const nf4l_weight* weight, const nf4l_linear_args* args, LinearCall& call) {
  if (const int status = check_linear(weight, args)) return status;
  if (const int status = current_device(call.device, call.info)) return status;
  call.info.wgmma = call.info.arch == 90 && std::strstr(NF4L_ARCHITECTURES, "90a") != nullptr;
  call.launch = pick(call.info, *weight, *args);
  return NF4L_OK;
}

// T is the 16-bit type of x; engines for others do not exist, and are not picked.
template <class T>
int run_linear(const nf4l_weight& weight, const nf4l_linear_args& args, const LinearCall& call, void* stream) {
  const LaunchTarget target = {call.device, call.info.shared_bytes, static_cast<cudaStream_t>(stream)};
  switch (call.launch.engine) {
    case Engine::nothing: return NF4L_OK;
    case Engine::gemm: return NF4L_USE_GEMM;
    case Engine::small_batch: return run_small_batch<T>(call.launch.small_batch, weight, args, target);
    case Engine::small_w8: return run_small_w8<T>(call.launch.small_w8, weight, args, target);
    case Engine::small_wgmma: return run_small_wgmma<T>(call.launch.small_wgmma, weight, args, target);
    case Engine::small_wgmma_w8: return run_small_wgmma_w8<T>(call.launch.small_wgmma_w8, weight, args, target);
    case Engine::gemm_w8:
      return weight.format == NF4L_W8_S8
                 ? run_gemm_w8<W8S8, T>(call.launch.gemm_w8, weight, args, target)
                 : run_gemm_w8<W8U8, T>(call.launch.gemm_w8, weight, args, target);
    case Engine::gemm_wgmma: return run_gemm_four_bit<T>(call.launch.gemm_wgmma, weight, args, target);
    case Engine::gemm_mma: return run_gemm_mma<T>(call.launch.gemm_mma, weight, args, target);
  }
  return NF4L_USE_GEMM;
}

}  // namespace
}  // namespace nf4l

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

int64_t nf4l_cuda_workspace_bytes(const nf4l_weight* weight, const nf4l_linear_args* args) {
  nf4l::LinearCall call;
  const int status = nf4l::plan_linear(weight, args, call);
  if (status < 0) return status;
  switch (call.launch.engine) {
    case nf4l::Engine::small_batch: return call.launch.small_batch.workspace_bytes;
    case nf4l::Engine::small_w8: return call.launch.small_w8.workspace_bytes;
    case nf4l::Engine::small_wgmma: return call.launch.small_wgmma.workspace_bytes;
    case nf4l::Engine::small_wgmma_w8: return call.launch.small_wgmma_w8.workspace_bytes;
    case nf4l::Engine::gemm_w8: return call.launch.gemm_w8.workspace_bytes;
    case nf4l::Engine::gemm_wgmma: return call.launch.gemm_wgmma.workspace_bytes();
    case nf4l::Engine::gemm_mma: return call.launch.gemm_mma.workspace_bytes;
    default: return 0;
  }
}

int nf4l_cuda_linear(const nf4l_weight* weight, const nf4l_linear_args* args, void* stream) {
  nf4l::LinearCall call;
  if (const int status = nf4l::plan_linear(weight, args, call)) return status;
  return args->dtype == NF4L_F16 ? nf4l::run_linear<__half>(*weight, *args, call, stream)
                                 : nf4l::run_linear<__nv_bfloat16>(*weight, *args, call, stream);
}

}  // extern "C"
