// csrc/product_table.cuh: every code at every place of a word, both formats and types, scales of every size; prints
// what is wrong, and how many weights were right. Tables go through shared memory, as kernels send them.
#include <cstdio>
#include <random>

#include "codebook.h"
#include "product_table.cuh"

using namespace nf4l;

namespace {

long right = 0;
std::mt19937 draw(1);

// Everything but NaN: zeros, subnormals, infinity, and numbers whose products leave T's range at either end.
float random_scale() {
  switch (draw() % 8) {
    case 0: return 0.0f;
    case 1: return -0.0f;
    case 2: return __builtin_inff();
    default: break;
  }
  for (;;) {
    const uint32_t bits = draw() % 2 ? draw() : (draw() & 0x80ffffff) | (0x38 + draw() % 16) << 24;
    const float scale = __uint_as_float(bits);
    if (scale == scale) return scale;
  }
}

template <class T>
uint16_t bits_of(float value) {
  const T rounded = round_to<T>(value);
  return reinterpret_cast<const uint16_t&>(rounded);
}

template <class T, class Format>
void check(const char* name, const float (&scales)[TILE_ROWS], int g) {
  float centroids[16];
  for (int c = 0; c < 16; ++c) centroids[c] = Format::value(c);
  for (int row = 0; row < TILE_ROWS; ++row) {
    ProductTables::store(WINDOW, row % 8, row / 8, product_table<T>(centroids, scales[row]));
  }
  const ProductTable rows[2] = {ProductTables::load(WINDOW, g, 0), ProductTables::load(WINDOW, g, 1)};
  for (int place = 0; place < 8; ++place) {
    for (uint32_t code = 0; code < 16; ++code) {
      const uint32_t word = (draw() & ~(15u << 4 * place)) | code << 4 * place;
      const PickedProducts picked(word, rows);
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = picked.pair(i), byte = word >> 8 * i & 255;
        const float scale = scales[g + i % 2 * 8];
        const float even = __fmul_rn(centroids[byte >> 4], scale), odd = __fmul_rn(centroids[byte & 15], scale);
        // Zero times infinity is not a number, and which one it is does not matter.
        const bool first = even != even || uint16_t(pair) == bits_of<T>(even);
        const bool second = odd != odd || pair >> 16 == bits_of<T>(odd);
        if (first && second) right += 2;
        else std::printf("%s: word %08x byte %d scale %a: %08x\n", name, word, i, scale, pair);
      }
    }
  }
}

}  // namespace

int main() {
  for (int round = 0; round < 500; ++round) {
    float scales[TILE_ROWS];
    for (float& scale : scales) scale = random_scale();
    const int g = round % 8;
    check<__half, Nf4>("f16 nf4", scales, g);
    check<__half, Fp4>("f16 fp4", scales, g);
    check<__nv_bfloat16, Nf4>("bf16 nf4", scales, g);
    check<__nv_bfloat16, Fp4>("bf16 fp4", scales, g);
  }
  std::printf("%ld right\n", right);
}
