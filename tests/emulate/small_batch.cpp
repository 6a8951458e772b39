// The small-batch kernel itself (csrc/small_batch.cuh) on the CPU, against a float64 product made by layout.h's maps.
// One case a line on standard input:
//   n k blocksize nested n0 kb0 kb_full fp4 f16 m shape slices sms bias
// "ok" a line, or what is wrong.
#include <iostream>
#include <random>
#include <sstream>
#include <string>

#include "dispatch.h"
#include "small_batch.cuh"

using namespace nf4l;

namespace {

struct Case {
  int64_t n, k, blocksize;
  int nested;
  int64_t n0, kb0, kb_full;
  int fp4, f16, m, shape, slices, sms, bias;
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

template <class T, int I>
void run_shape(const SmallBatchPlan& plan, const SmallBatchArgs& args) {
  constexpr SmallBatchShape S = SMALL_BATCH_SHAPES[I];
  if (plan.shape != I) return;
  const Dim grid = {unsigned(plan.parts), unsigned(plan.slices), 1};
  std::vector<Dim> order;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, 0});
  }
  std::shuffle(order.begin(), order.end(), random_bits);  // blocks arrive in any order
  for (const Dim& index : order) {
    std::memset(smem, 0xff, sizeof smem);  // NaN wherever the block does not write
    simt::run_block(index, grid, S.warps * WARP, [&] { small_batch_kernel<T, S.row_tiles, S.tokens, S.warps>(args); });
  }
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
  const int64_t tiles = c.k / 64, row_tiles = ceil_div(c.n, 16);

  std::vector<uint8_t> codes(row_tiles * tiles * 512), absmax_q(row_tiles * ceil_div(tiles, 4) * 64);
  std::vector<float> absmax(row_tiles * tiles * 16), nested_code(256), offset = {0.3f};
  std::vector<float> nested_absmax(nested_group(c.n0 + c.n - 1, c.kb0 + tiles - 1, c.kb_full, c.blocksize) + 1);
  for (auto& v : codes) v = uint8_t(random_bits());
  for (auto& v : absmax_q) v = uint8_t(random_bits());
  for (auto* floats : {&absmax, &nested_code, &nested_absmax}) {
    for (auto& v : *floats) v = uniform();
  }
  std::vector<uint16_t> x(c.m * (c.k + 8)), bias(c.n), y(c.m * c.n + 16, 0x7fff);
  for (auto* values : {&x, &bias}) {
    for (auto& v : *values) v = bits_of<T>(uniform());
  }
  std::vector<float> partials(plan.workspace_bytes / 4, NAN);
  std::vector<unsigned> arrivals(MAX_PARTS, 0);

  nf4l_weight w = {c.fp4 ? NF4L_FP4 : NF4L_NF4, NF4L_TILE16X64, c.n, c.k, c.blocksize, codes.data(), nullptr, nullptr,
                   nullptr, nullptr, c.n0, c.kb0, c.kb_full};
  w.scales = c.nested ? static_cast<const void*>(absmax_q.data()) : absmax.data();
  if (c.nested) {
    w.nested_code = nested_code.data(), w.nested_absmax = nested_absmax.data(), w.nested_offset = offset.data();
  }
  SmallBatchArgs args = {};
  static_cast<FourBitWeight&>(args) = four_bit_weight<T>(w);
  args.x = reinterpret_cast<const char*>(x.data());
  args.x_row_bytes = (c.k + 8) * 2;
  args.bias = c.bias ? bias.data() : nullptr;
  args.y = y.data() + 8;
  args.partials = partials.data();
  args.arrivals = arrivals.data();
  args.m = c.m;
  args.groups = plan.groups;
  args.base_groups = plan.base_groups;
  args.extra_groups = plan.extra_groups;
  args.slice_tiles = plan.slice_tiles;

  simt::readable.clear();
  let_read(codes), let_read(absmax_q), let_read(absmax), let_read(nested_code), let_read(nested_absmax);
  let_read(offset), let_read(x), let_read(bias), let_read(partials), let_read(arrivals);
  run_any<T>(plan, args, std::make_integer_sequence<int, SMALL_BATCH_SHAPE_COUNT>());

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
        const int64_t kb = k / 64;
        const uint8_t byte = codes[tile16x64_byte(row, k, c.k)];
        const float centroid = value_of<T>(args.codebook.bits[k % 2 ? byte & 15 : byte >> 4]);
        float scale = absmax[row_scale_index(row, kb, tiles)];
        if (c.nested) {
          const int64_t group = nested_group(c.n0 + row, c.kb0 + kb, c.kb_full, c.blocksize);
          scale = nested_scale(nested_code[absmax_q[absmax_q_byte(row, kb, tiles)]], nested_absmax[group], offset[0]);
        }
        const double term = double(centroid) * scale * value_of<T>(x[m * (c.k + 8) + k]);
        sum += term;
        size += std::fabs(term);
      }
      const float got = value_of<T>(y[8 + m * c.n + row]);
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
    words >> c.n >> c.k >> c.blocksize >> c.nested >> c.n0 >> c.kb0 >> c.kb_full >> c.fp4 >> c.f16 >> c.m >> c.shape >>
        c.slices >> c.sms >> c.bias;
    if (!words) {
      std::cout << "cannot read: " << line << '\n';
      return 1;
    }
    std::cout << (c.f16 ? run<__half>(c) : run<__nv_bfloat16>(c)) << std::endl;
  }
}
