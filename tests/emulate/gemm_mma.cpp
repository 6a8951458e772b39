// The mma.sync prefill kernel itself (csrc/gemm_mma.cuh) on the CPU, against a float64 product made by layout.h's maps.
// One case a line on standard input:
//   n k blocksize nested n0 kb0 kb_full fp4 f16 m shape cut sms shared_limit bias
// "ok" a line, or what is wrong.
#include "gemm_mma.cuh"

#include "dispatch.h"
#include "product.h"

using namespace nf4l;

namespace {

struct Case {
  int64_t n, k, blocksize;
  int nested;
  int64_t n0, kb0, kb_full;
  int fp4, f16, m, shape, cut, sms, shared_limit, bias;

  friend std::istream& operator>>(std::istream& words, Case& c) {
    return words >> c.n >> c.k >> c.blocksize >> c.nested >> c.n0 >> c.kb0 >> c.kb_full >> c.fp4 >> c.f16 >> c.m >>
           c.shape >> c.cut >> c.sms >> c.shared_limit >> c.bias;
  }
};

template <class T, int... I>
void run_shape(const GemmMmaPlan& plan, const GemmMmaArgs& args, std::integer_sequence<int, I...>) {
  const Dim grid = {unsigned(plan.cut.blocks), 1, 1};
  const auto run = [&](auto kernel) { run_grid(grid, GemmMmaShape::THREADS, [&] { kernel(args); }); };
  ((plan.shape == I ? run(gemm_mma_kernel<T, I>) : void()), ...);
}

template <class T>
std::string run(const Case& c) {
  const FourBitProblem problem = {c.n, c.k, c.kb_full, log2_of(c.blocksize * 4), c.nested != 0};
  GemmMmaPlan plan;
  if (!plan_gemm_mma(problem, c.m, c.shape, c.cut != 0, c.sms, c.shared_limit, plan)) return "no plan";
  const RandomFourBit weight = {c.n, c.k, c.blocksize, c.nested != 0, c.fp4 != 0, c.n0, c.kb0, c.kb_full};
  RandomCall<T> call = {c.m, c.n, c.k, c.bias != 0, false, plan.workspace_bytes};

  GemmMmaArgs args = gemm_mma_args<T>(plan, weight.weight(), call.args());
  args.slots = reinterpret_cast<float4*>(call.sums.data());
  args.arrivals = call.arrivals.data();

  weight.let_read();
  call.let_read();
  run_shape<T>(plan, args, std::make_integer_sequence<int, GEMM_MMA_SHAPE_COUNT>());
  const auto exact = [&](int64_t row, int64_t k) {
    return double(to_float(round_to<T>(args.centroids[weight.code(row, k)] * weight.scale(row, k))));
  };
  return call.check(exact, 1e-6);
}

}  // namespace

int main() { return answer_lines<Case>(run<__half>, run<__nv_bfloat16>); }
