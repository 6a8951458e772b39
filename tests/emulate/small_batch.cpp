// The small-batch kernel itself (csrc/small_batch.cuh) on the CPU, against a float64 product made by layout.h's maps.
// One case a line on standard input:
//   n k blocksize nested n0 kb0 kb_full fp4 f16 m shape slices sms bias
// "ok" a line, or what is wrong.
#include "small_batch.cuh"

#include "dispatch.h"
#include "product.h"

using namespace nf4l;

namespace {

struct Case {
  int64_t n, k, blocksize;
  int nested;
  int64_t n0, kb0, kb_full;
  int fp4, f16, m, shape, slices, sms, bias;

  friend std::istream& operator>>(std::istream& words, Case& c) {
    return words >> c.n >> c.k >> c.blocksize >> c.nested >> c.n0 >> c.kb0 >> c.kb_full >> c.fp4 >> c.f16 >> c.m >>
           c.shape >> c.slices >> c.sms >> c.bias;
  }
};

template <class T, int I>
void run_shape(const SmallBatchPlan& plan, const SmallBatchArgs& args) {
  constexpr SmallBatchShape S = SMALL_BATCH_SHAPES[I];
  if (plan.shape != I) return;
  run_grid({unsigned(plan.parts), unsigned(plan.slices), 1}, S.warps * WARP,
           [&] { small_batch_kernel<T, S.row_tiles, S.tokens, S.warps>(args); });
}

template <class T, int... I>
void run_any(const SmallBatchPlan& plan, const SmallBatchArgs& args, std::integer_sequence<int, I...>) {
  (run_shape<T, I>(plan, args), ...);
}

template <class T>
std::string run(const Case& c) {
  const FourBitProblem problem = {c.n, c.k, c.kb_full, log2_of(c.blocksize * 4), c.nested != 0};
  SmallBatchPlan plan;
  if (!plan_small_batch(problem, c.shape, c.slices, c.sms, 232448, plan)) return "no plan";
  const RandomFourBit weight = {c.n, c.k, c.blocksize, c.nested != 0, c.fp4 != 0, c.n0, c.kb0, c.kb_full};
  RandomCall<T> call = {c.m, c.n, c.k, c.bias != 0, false, plan.workspace_bytes};
  const nf4l_linear_args l = call.args();

  SmallBatchArgs args = {};
  static_cast<FourBitWeight&>(args) = four_bit_weight<T>(weight.weight());
  args.x = static_cast<const char*>(l.x);
  args.x_row_bytes = l.x_stride * 2;
  args.bias = l.bias;
  args.y = l.y;
  args.partials = call.sums.data();
  args.arrivals = call.arrivals.data();
  args.m = c.m;
  args.groups = plan.groups;
  args.base_groups = plan.base_groups;
  args.extra_groups = plan.extra_groups;
  args.slice_tiles = plan.slice_tiles;

  weight.let_read();
  call.let_read();
  run_any<T>(plan, args, std::make_integer_sequence<int, SMALL_BATCH_SHAPE_COUNT>());
  const auto centroid = [&](int code) { return double(value_of<T>(args.codebook.bits[code])); };
  const auto product = [&](int64_t row, int64_t k) { return centroid(weight.code(row, k)) * weight.scale(row, k); };
  return call.check(product, 1e-5);
}

}  // namespace

int main() { return answer_lines<Case>(run<__half>, run<__nv_bfloat16>); }
