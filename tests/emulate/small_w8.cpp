// The 8-bit small-batch kernel itself (csrc/small_w8.cuh) on the CPU, against a float64 product made by layout.h's maps.
// One case a line on standard input:
//   n k group u8 f16 m shape slices sms bias transposed
// "ok" a line, or what is wrong.
#include <iostream>
#include <random>
#include <sstream>
#include <string>

#include "dispatch.h"
#include "small_w8.cuh"

using namespace nf4l;

namespace {

struct Case {
  int64_t n, k, group;
  int u8, f16, m, shape, slices, sms, bias, transposed;
};

std::mt19937 random_bits(1);

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }

template <class T>
uint16_t bits_of(float value) {
  const T rounded = round_to<T>(value);
  return reinterpret_cast<const uint16_t&>(rounded);
}
template <class T>
float value_of(uint16_t bits) {
  return to_float(reinterpret_cast<const T&>(bits));
}

template <class V>
void let_read(const std::vector<V>& v) {
  simt::readable.push_back({reinterpret_cast<const char*>(v.data()), v.size() * sizeof(V)});
}

template <class Code, class T, bool GROUPED, int I>
void run_shape(const SmallW8Plan& plan, const SmallW8Args& args) {
  constexpr SmallBatchShape S = SMALL_W8_SHAPES[I];
  if (plan.shape != I) return;
  const Dim grid = {unsigned(plan.parts), unsigned(plan.slices), 1};
  std::vector<Dim> order;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, 0});
  }
  std::shuffle(order.begin(), order.end(), random_bits);  // blocks arrive in any order
  for (const Dim& index : order) {
    std::memset(smem, 0xff, sizeof smem);  // NaN wherever the block does not write
    simt::run_block(index, grid, S.warps * WARP,
                    [&] { small_w8_kernel<Code, T, S.row_tiles, S.tokens, S.warps, GROUPED>(args); });
  }
}

template <class Code, class T, bool GROUPED, int... I>
void run_any(const SmallW8Plan& plan, const SmallW8Args& args, std::integer_sequence<int, I...>) {
  (run_shape<Code, T, GROUPED, I>(plan, args), ...);
}

template <class T>
std::string run(const Case& c) {
  SmallW8Plan plan;
  if (!plan_small_w8({c.n, c.k, int(c.group / 64)}, c.shape, c.slices, c.sms, 232448, plan)) return "no plan";
  const int64_t row_tiles = ceil_div(c.n, 16), groups = c.group ? c.k / c.group : 0;
  std::vector<uint8_t> codes(row_tiles * (c.k / 32) * 512);
  std::vector<float> scales(c.group ? row_tiles * groups * 16 : c.n);
  for (auto& v : codes) v = uint8_t(random_bits());
  for (auto& v : scales) v = uniform();
  std::vector<uint16_t> x(c.m * (c.k + 8)), bias(c.n), y(c.m * c.n + 16, 0x7fff);
  for (auto* values : {&x, &bias}) {
    for (auto& v : *values) v = bits_of<T>(uniform());
  }
  std::vector<float> partials(plan.workspace_bytes / 4, NAN);
  std::vector<unsigned> arrivals(MAX_PARTS, 0);

  const nf4l_weight w = {c.u8 ? NF4L_W8_U8 : NF4L_W8_S8, NF4L_TILE16X32, c.n, c.k, c.group, codes.data(), scales.data(),
                         nullptr, nullptr, nullptr, 0, 0, c.k / 64};
  const nf4l_linear_args l = {c.f16 ? NF4L_F16 : NF4L_BF16, c.transposed ? NF4L_TRANSPOSED_OUTPUT : 0, c.m, x.data(), c.k + 8, c.bias ? bias.data() : nullptr,
                              y.data() + 8, nullptr, 0};
  SmallW8Args args = small_w8_args(plan, w, l);
  args.partials = partials.data();
  args.arrivals = arrivals.data();

  simt::readable.clear();
  let_read(codes), let_read(scales), let_read(x), let_read(bias), let_read(partials), let_read(arrivals);
  const auto all = std::make_integer_sequence<int, SMALL_W8_SHAPE_COUNT>();
  if (c.u8 && c.group) run_any<W8U8, T, true>(plan, args, all);
  else if (c.u8) run_any<W8U8, T, false>(plan, args, all);
  else if (c.group) run_any<W8S8, T, true>(plan, args, all);
  else run_any<W8S8, T, false>(plan, args, all);

  for (unsigned a : arrivals) {
    if (a) return "a counter is not zero";
  }
  for (int i = 0; i < 8; ++i) {
    if (y[i] != 0x7fff || y[y.size() - 1 - i] != 0x7fff) return "something is written beside the output";
  }
  for (int64_t row = 0; row < c.n; ++row) {
    for (int64_t m = 0; m < c.m; ++m) {
      double sum = c.bias ? value_of<T>(bias[row]) : 0, size = 0;
      for (int64_t k = 0; k < c.k; ++k) {
        const int byte = codes[tile16x32_byte(row, k, c.k)];
        const float value = c.u8 ? W8U8::value(byte) : W8S8::value(byte);
        const double scale = c.group ? scales[row_scale_index(row, k / c.group, groups)] : double(scales[row]) * INV_127;
        const double term = value * scale * value_of<T>(x[m * (c.k + 8) + k]);
        sum += term;
        size += std::fabs(term);
      }
      const float got = value_of<T>(y[8 + (c.transposed ? row * c.m + m : m * c.n + row)]);
      const double unit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
      if (!(std::fabs(got - sum) <= unit * std::fabs(sum) + 1e-5 * size)) {
        std::ostringstream text;
        text << "row " << row << " token " << m << ": got " << got << ", want " << sum;
        return text.str();
      }
    }
  }
  return "ok";
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Case c;
    words >> c.n >> c.k >> c.group >> c.u8 >> c.f16 >> c.m >> c.shape >> c.slices >> c.sms >> c.bias >> c.transposed;
    if (!words) {
      std::cout << "cannot read: " << line << '\n';
      return 1;
    }
    std::cout << (c.f16 ? run<__half>(c) : run<__nv_bfloat16>(c)) << std::endl;
  }
}
