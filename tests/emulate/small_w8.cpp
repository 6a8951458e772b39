// The 8-bit small-batch kernel itself (csrc/small_w8.cuh) on the CPU, against a float64 product made by layout.h's
// maps. One case a line on standard input:
//   n k group u8 f16 m shape slices sms bias transposed
// "ok" a line, or what is wrong.
#include "small_w8.cuh"

#include "dispatch.h"
#include "product.h"

using namespace nf4l;

namespace {

struct Case {
  int64_t n, k, group;
  int u8, f16, m, shape, slices, sms, bias, transposed;

  friend std::istream& operator>>(std::istream& words, Case& c) {
    return words >> c.n >> c.k >> c.group >> c.u8 >> c.f16 >> c.m >> c.shape >> c.slices >> c.sms >> c.bias >>
           c.transposed;
  }
};

template <class Code, class T, bool GROUPED, int I>
void run_shape(const SmallW8Plan& plan, const SmallW8Args& args) {
  constexpr SmallBatchShape S = SMALL_W8_SHAPES[I];
  if (plan.shape != I) return;
  run_grid({unsigned(plan.parts), unsigned(plan.slices), 1}, S.warps * WARP,
           [&] { small_w8_kernel<Code, T, S.row_tiles, S.tokens, S.warps, GROUPED>(args); });
}

template <class Code, class T, bool GROUPED, int... I>
void run_any(const SmallW8Plan& plan, const SmallW8Args& args, std::integer_sequence<int, I...>) {
  (run_shape<Code, T, GROUPED, I>(plan, args), ...);
}

template <class T>
std::string run(const Case& c) {
  SmallW8Plan plan;
  if (!plan_small_w8({c.n, c.k, int(c.group / 64)}, c.shape, c.slices, c.sms, 232448, plan)) return "no plan";
  const int64_t row_tiles = ceil_div(c.n, TILE_ROWS), groups = c.group ? c.k / c.group : 0;
  const std::vector<uint8_t> codes = random_bytes(row_tiles * (c.k / TILE_K8) * TILE_BYTES);
  const std::vector<float> scales = random_floats(c.group ? row_tiles * groups * TILE_ROWS : c.n);
  RandomCall<T> call = {c.m, c.n, c.k, c.bias != 0, c.transposed != 0, plan.workspace_bytes};

  const nf4l_weight w = {c.u8 ? NF4L_W8_U8 : NF4L_W8_S8, NF4L_TILE16X32, c.n, c.k, c.group, codes.data(), scales.data(),
                         nullptr, nullptr, nullptr, 0, 0, c.k / TILE_K4};
  SmallW8Args args = small_w8_args(plan, w, call.args());
  args.partials = call.sums.data();
  args.arrivals = call.arrivals.data();

  let_read(codes, scales);
  call.let_read();
  const auto all = std::make_integer_sequence<int, SMALL_W8_SHAPE_COUNT>();
  if (c.u8 && c.group) run_any<W8U8, T, true>(plan, args, all);
  else if (c.u8) run_any<W8U8, T, false>(plan, args, all);
  else if (c.group) run_any<W8S8, T, true>(plan, args, all);
  else run_any<W8S8, T, false>(plan, args, all);
  const auto product = [&](int64_t row, int64_t k) {
    const int byte = codes[tile16x32_byte(row, k, c.k)];
    const double scale = c.group ? scales[row_scale_index(row, k / c.group, groups)] : double(scales[row]) * INV_127;
    return (c.u8 ? W8U8::value(byte) : W8S8::value(byte)) * scale;
  };
  return call.check(product, 1e-5);
}

}  // namespace

int main() { return answer_lines<Case>(run<__half>, run<__nv_bfloat16>); }
