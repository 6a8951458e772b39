// Prints what csrc/layout.h, csrc/codebook.h and csrc/nf4linear.h say, for tests/test_host_harness.py to compare with
// the Python side. One question a line on standard input, one line of numbers a question on standard output.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>

#include "codebook.h"
#include "four_bit.h"
#include "layout.h"
#include "nf4linear.h"

namespace {

uint32_t bits(float v) {
  uint32_t u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}

template <class Format>
void print_values(int count) {
  for (int code = 0; code < count; ++code) std::cout << bits(Format::value(code)) << ' ';
}

template <class Map>
void print_map(int64_t rows, int64_t columns, Map map) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) std::cout << map(row, column) << ' ';
  }
}

// `rows` rows of a weight from `first` on: bytes into qweight, into scale codes, into float scales, n and n0.
void print_rows(int64_t k, int64_t first, int64_t rows) {
  static uint8_t memory[1];
  static float table[1];
  nf4l_weight w = {};
  w.n0 = 16;
  w.n = first + rows;
  w.k = k;
  w.qweight = memory;
  w.scales = memory;
  const nf4l_weight plain = nf4l::four_bit_rows(w, first, rows);
  w.nested_code = table;
  const nf4l_weight nested = nf4l::four_bit_rows(w, first, rows);
  std::cout << nested.qweight - memory << ' ' << static_cast<const uint8_t*>(nested.scales) - memory << ' '
            << static_cast<const uint8_t*>(plain.scales) - memory << ' ' << nested.n << ' ' << nested.n0;
}

// The tables must be usable at compile time, on both sides.
static_assert(nf4l::Nf4::value(nf4l::Nf4::ZERO_CODE) == 0.0f && nf4l::Fp4::value(nf4l::Fp4::ZERO_CODE) == 0.0f);
static_assert(nf4l::W8S8::value(nf4l::W8S8::BIAS) == 0.0f && nf4l::W8U8::value(nf4l::W8U8::BIAS) == 0.0f);

bool answer(const std::string& question, int64_t n, int64_t k, int64_t b) {
  if (question == "nf4") print_values<nf4l::Nf4>(16);
  else if (question == "fp4") print_values<nf4l::Fp4>(16);
  else if (question == "w8_s8") print_values<nf4l::W8S8>(256);
  else if (question == "w8_u8") print_values<nf4l::W8U8>(256);
  else if (question == "inv127") std::cout << bits(nf4l::INV_127);
  else if (question == "tile16x64") print_map(n, k, [=](auto r, auto c) { return nf4l::tile16x64_byte(r, c, k); });
  else if (question == "tile16x32") print_map(n, k, [=](auto r, auto c) { return nf4l::tile16x32_byte(r, c, k); });
  else if (question == "absmax_q") print_map(n, k, [=](auto r, auto c) { return nf4l::absmax_q_byte(r, c, k); });
  else if (question == "row_scale") print_map(n, k, [=](auto r, auto c) { return nf4l::row_scale_index(r, c, k); });
  else if (question == "nested") print_map(n, k, [=](auto r, auto c) { return nf4l::nested_group(r, c, k, b); });
  else if (question == "rows") print_rows(n, k, b);
  else if (question == "weight") {
    std::cout << sizeof(nf4l_weight) << ' ' << offsetof(nf4l_weight, format) << ' ' << offsetof(nf4l_weight, layout)
              << ' ' << offsetof(nf4l_weight, n) << ' ' << offsetof(nf4l_weight, k) << ' '
              << offsetof(nf4l_weight, blocksize) << ' ' << offsetof(nf4l_weight, qweight) << ' '
              << offsetof(nf4l_weight, scales) << ' '
              << offsetof(nf4l_weight, nested_code) << ' ' << offsetof(nf4l_weight, nested_absmax) << ' '
              << offsetof(nf4l_weight, nested_offset) << ' ' << offsetof(nf4l_weight, n0) << ' '
              << offsetof(nf4l_weight, kb0) << ' ' << offsetof(nf4l_weight, kb_full);
  } else if (question == "linear_args") {
    std::cout << sizeof(nf4l_linear_args) << ' ' << offsetof(nf4l_linear_args, dtype) << ' '
              << offsetof(nf4l_linear_args, flags) << ' ' << offsetof(nf4l_linear_args, m) << ' '
              << offsetof(nf4l_linear_args, x) << ' ' << offsetof(nf4l_linear_args, x_stride) << ' '
              << offsetof(nf4l_linear_args, bias) << ' ' << offsetof(nf4l_linear_args, y) << ' '
              << offsetof(nf4l_linear_args, workspace) << ' ' << offsetof(nf4l_linear_args, workspace_bytes);
  } else if (question == "constants") {
    std::cout << NF4L_ABI_VERSION << ' ' << NF4L_OK << ' ' << NF4L_USE_GEMM << ' ' << NF4L_NO_KERNEL_IMAGE << ' '
              << NF4L_NF4 << ' ' << NF4L_FP4 << ' ' << NF4L_W8_S8 << ' ' << NF4L_W8_U8 << ' ' << NF4L_FLAT << ' '
              << NF4L_TILE16X64 << ' ' << NF4L_TILE16X32 << ' ' << NF4L_F32 << ' ' << NF4L_F16 << ' ' << NF4L_BF16;
  } else {
    return false;
  }
  std::cout << '\n';
  return true;
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string question;
    int64_t n = 0, k = 0, b = 0;
    words >> question >> n >> k >> b;
    if (!answer(question, n, k, b)) {
      std::cerr << "unknown question: " << line << '\n';
      return 1;
    }
  }
}
