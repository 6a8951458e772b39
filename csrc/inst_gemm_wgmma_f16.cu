// The prefill engine for 4-bit weights and f16 activations: every shape of GEMM_SHAPES.
#include <utility>

#include "gemm_wgmma.cuh"
#include "gemm_wgmma_four_bit.cuh"
#include "gemm_wgmma_launch.cuh"

namespace nf4l {

template <class T, size_t... I>
GemmLauncher<GemmFourBitWeight> gemm_launcher(int shape, std::index_sequence<I...>) {
  static constexpr GemmLauncher<GemmFourBitWeight> launchers[] = {
      launch_gemm<GemmFourBitWeight, gemm_wgmma_kernel<GemmFourBit, T, int(I)>>...,
  };
  return launchers[shape];
}

template <class T>
int run_gemm_four_bit(const GemmPlan& plan, const nf4l_weight& weight, const nf4l_linear_args& args, int device,
                      const DeviceInfo& info, cudaStream_t stream) {
  const auto launch = gemm_launcher<T>(plan.shape, std::make_index_sequence<GEMM_SHAPE_COUNT>());
  return run_gemm<T>(plan, gemm_four_bit_weight<T>(weight), launch, args, device, info, stream);
}

template int run_gemm_four_bit<__half>(const GemmPlan&, const nf4l_weight&, const nf4l_linear_args&, int, const DeviceInfo&,
                                   cudaStream_t);

}  // namespace nf4l
