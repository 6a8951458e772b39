// Every conversion of csrc/convert8.cuh, every pair of the 256 codes: prints what is wrong, and how many were right.
#include <cstdio>

#include "convert8.cuh"

using namespace nf4l;

namespace {

int right = 0;

template <class T>
float value_of(uint32_t pair, int high) {
  const uint16_t bits = uint16_t(pair >> 16 * high);
  return to_float(reinterpret_cast<const T&>(bits));
}

template <class T>
void expect(const char* name, uint32_t got, float low, float high) {
  if (value_of<T>(got, 0) == low && value_of<T>(got, 1) == high) ++right;
  else std::printf("%s: %08x, want %g and %g\n", name, got, low, high);
}

template <class T, class Code>
void check(const char* name) {
  for (int u = 0; u < 256; ++u) {
    for (int v = 0; v < 256; ++v) {
      const uint32_t word = u | v << 8 | uint32_t(v) << 16 | uint32_t(u) << 24;
      const float low = Code::value(u), high = Code::value(v);
      expect<T>(name, Convert8<T>::template pair_of<Code>(word, 0), low, high);
      expect<T>(name, Convert8<T>::template pair_of<Code>(word, 1), high, low);
    }
  }
}

}  // namespace

int main() {
  check<__half, W8S8>("f16 s8");
  check<__half, W8U8>("f16 u8");
  check<__nv_bfloat16, W8S8>("bf16 s8");
  check<__nv_bfloat16, W8U8>("bf16 u8");
  std::printf("%d right\n", right);
}
