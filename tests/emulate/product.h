// What the programs share that run a fused kernel on the CPU: random operands of one linear call, the launch, the check
// against a float64 product, and the loop over cases.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "convert.cuh"
#include "copy.cuh"
#include "deal.h"
#include "layout.h"
#include "nf4linear.h"
#include "scale.cuh"
#include "simt.h"

namespace nf4l {

inline std::mt19937 random_bits(1);

inline float uniform() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }

template <class T>
uint16_t bits_of(float value) {
  const T rounded = round_to<T>(value);
  return reinterpret_cast<const uint16_t&>(rounded);
}
template <class T>
float value_of(uint16_t bits) {
  return to_float(reinterpret_cast<const T&>(bits));
}

inline std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> bytes(count);
  for (auto& v : bytes) v = uint8_t(random_bits());
  return bytes;
}
inline std::vector<float> random_floats(int64_t count) {
  std::vector<float> floats(count);
  for (auto& v : floats) v = uniform();
  return floats;
}
template <class T>
std::vector<uint16_t> random_halves(int64_t count) {
  std::vector<uint16_t> halves(count);
  for (auto& v : halves) v = bits_of<T>(uniform());
  return halves;
}

// Kernels may read these vectors, and nothing else.
template <class... V>
void let_read(const V&... vectors) {
  (simt::readable.push_back({reinterpret_cast<const char*>(vectors.data()), vectors.size() * sizeof(vectors[0])}), ...);
}

// ---- a 4-bit weight -------------------------------------------------------------------------------------------------

struct RandomFourBit {
  int64_t n, k, blocksize;
  bool nested, fp4;
  int64_t n0, kb0, kb_full;
  int64_t tiles = k / TILE_K4, row_tiles = ceil_div(n, TILE_ROWS);
  std::vector<uint8_t> codes = random_bytes(row_tiles * tiles * TILE_BYTES);
  std::vector<uint8_t> absmax_q = random_bytes(row_tiles * ceil_div(tiles, 4) * 64);
  std::vector<float> absmax = random_floats(row_tiles * tiles * TILE_ROWS), nested_code = random_floats(256);
  std::vector<float> nested_absmax = random_floats(nested_group(n0 + n - 1, kb0 + tiles - 1, kb_full, blocksize) + 1);
  std::vector<float> offset = {0.3f};

  nf4l_weight weight() const {
    nf4l_weight w = {};
    w.format = fp4 ? NF4L_FP4 : NF4L_NF4;
    w.layout = NF4L_TILE16X64;
    w.n = n, w.k = k, w.blocksize = blocksize;
    w.qweight = codes.data();
    w.scales = nested ? static_cast<const void*>(absmax_q.data()) : absmax.data();
    w.nested_code = nested ? nested_code.data() : nullptr;
    w.nested_absmax = nested ? nested_absmax.data() : nullptr;
    w.nested_offset = nested ? offset.data() : nullptr;
    w.n0 = n0, w.kb0 = kb0, w.kb_full = kb_full;
    return w;
  }
  int code(int64_t row, int64_t column) const {
    const uint8_t byte = codes[tile16x64_byte(row, column, k)];
    return column % 2 ? byte & 15 : byte >> 4;
  }
  float scale(int64_t row, int64_t column) const {
    const int64_t kb = column / TILE_K4;
    if (!nested) return absmax[row_scale_index(row, kb, tiles)];
    const int64_t group = nested_group(n0 + row, kb0 + kb, kb_full, blocksize);
    return nested_scale(nested_code[absmax_q[absmax_q_byte(row, kb, tiles)]], nested_absmax[group], offset[0]);
  }
  void let_read() const { nf4l::let_read(codes, absmax_q, absmax, nested_code, nested_absmax, offset); }
};

// ---- the rest of a call ---------------------------------------------------------------------------------------------

template <class T>
struct RandomCall {
  static constexpr int GAP = 8;              // elements between rows of x
  static constexpr int GUARD = 8;            // elements before and behind y
  static constexpr uint16_t UNTOUCHED = 0x7fff;

  int64_t m, n, k;
  bool with_bias, transposed;
  int64_t workspace_bytes;
  std::vector<uint16_t> x = random_halves<T>(m * (k + GAP)), bias = random_halves<T>(n);
  std::vector<uint16_t> y = std::vector<uint16_t>(m * n + 2 * GUARD, UNTOUCHED);
  std::vector<float> sums = std::vector<float>(workspace_bytes / 4, NAN);
  std::vector<unsigned> arrivals = std::vector<unsigned>(MAX_BLOCKS, 0);

  nf4l_linear_args args() {
    nf4l_linear_args l = {};
    l.dtype = std::is_same_v<T, __half> ? NF4L_F16 : NF4L_BF16;
    l.flags = transposed ? NF4L_TRANSPOSED_OUTPUT : 0;
    l.m = m;
    l.x = x.data();
    l.x_stride = k + GAP;
    l.bias = with_bias ? bias.data() : nullptr;
    l.y = y.data() + GUARD;
    return l;
  }
  void let_read() const { nf4l::let_read(x, bias, sums, arrivals); }

  // weight(row, column): the weight as the kernel multiplies by it. Sums may be off by `tolerance` of all terms' size.
  template <class Weight>
  std::string check(const Weight& weight, double tolerance) const {
    if (std::any_of(arrivals.begin(), arrivals.end(), [](unsigned a) { return a; })) return "a counter is not zero";
    for (int i = 0; i < GUARD; ++i) {
      const bool touched = y[i] != UNTOUCHED || y[y.size() - 1 - i] != UNTOUCHED;
      if (touched) return "something is written beside the output";
    }
    const double unit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    std::vector<double> of_row(k);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) of_row[column] = weight(row, column);
      for (int64_t token = 0; token < m; ++token) {
        double sum = with_bias ? value_of<T>(bias[row]) : 0, size = 0;
        for (int64_t column = 0; column < k; ++column) {
          const double term = of_row[column] * value_of<T>(x[token * (k + GAP) + column]);
          sum += term;
          size += std::fabs(term);
        }
        const float got = value_of<T>(y[GUARD + (transposed ? row * m + token : token * n + row)]);
        if (std::fabs(got - sum) <= unit * std::fabs(sum) + tolerance * size) continue;
        std::ostringstream text;
        text << "row " << row << " token " << token << ": got " << got << ", want " << sum;
        return text.str();
      }
    }
    return "ok";
  }
};

// ---- running --------------------------------------------------------------------------------------------------------

// Blocks arrive in any order, and find NaN wherever they do not write.
template <class Kernel>
void run_grid(Dim grid, int threads, const Kernel& kernel) {
  std::vector<Dim> order;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, 0});
  }
  std::shuffle(order.begin(), order.end(), random_bits);
  for (const Dim& index : order) {
    std::memset(smem, 0xff, sizeof smem);
    simt::run_block(index, grid, threads, kernel);
  }
}

// A case a line on standard input; for each "ok", or what is wrong. The program's exit status.
template <class Case>
int answer_lines(std::string (*f16)(const Case&), std::string (*bf16)(const Case&)) {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Case c;
    if (!(words >> c)) {
      std::cout << "cannot read: " << line << '\n';
      return 1;
    }
    simt::readable.clear();
    std::cout << (c.f16 ? f16(c) : bf16(c)) << std::endl;
  }
  return 0;
}

}  // namespace nf4l
