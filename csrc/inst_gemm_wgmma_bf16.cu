// The prefill engine for 4-bit weights and bf16 activations: every shape of GEMM_SHAPES.
#include "gemm_wgmma_four_bit.cuh"
#include "gemm_wgmma_launch.cuh"

namespace nf4l {

template <class T>
int run_gemm_four_bit(const GemmPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                      const DeviceInfo& info, cudaStream_t stream) {
  return run_gemm<GemmFourBit, T>(plan, gemm_four_bit_weight<T>(weight), weight.qweight, args, device, info, stream);
}

template int run_gemm_four_bit<__nv_bfloat16>(const GemmPlan&, const nf4l_weight&, const nf4l_linear_args&, int, const DeviceInfo&,
                                   cudaStream_t);

}  // namespace nf4l
