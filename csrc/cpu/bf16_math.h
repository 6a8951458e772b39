// Products of bfloat16 pairs (AVX512-BF16), for bfloat16 x: twice the products an instruction, and x needs no rounding.
//
// Only the 16 centroids of a 4-bit format are rounded, scales stay float32. The centroids are multiplied by a factor
// first that makes them fall close to bfloat16 values, and the result is divided by it.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// Rounding error of the NF4 centroids, root mean square, relative: 1.06e-3 as they are, 6.3e-4 with this factor, the
// best of all float32 factors in [1, 2) (every other binade repeats it). The integers of W8 are exact.
template <class Format>
inline constexpr float BF16_FACTOR = 1.0f;
template <>
inline constexpr float BF16_FACTOR<Nf4> = 1.4370059967041016f;
template <>
inline constexpr float BF16_FACTOR<Fp4> = 3.0f;  // multiples of 1/192 become exact

// Bits of the bfloat16 nearest to a normal or zero value, at compile time.
constexpr uint16_t nearest_bf16(float value) {
  if (value == 0.0f) return 0;
  float magnitude = value < 0.0f ? -value : value;
  int exponent = 127 + 7;
  for (; magnitude < 128.0f; magnitude *= 2.0f) --exponent;
  for (; magnitude >= 256.0f; magnitude *= 0.5f) ++exponent;
  const int down = static_cast<int>(magnitude);
  const float rest = magnitude - static_cast<float>(down);
  const int mantissa = down + (rest > 0.5f || (rest == 0.5f && down % 2 == 1));
  // A carry out of the mantissa (256) moves into the exponent by itself.
  return static_cast<uint16_t>((value < 0.0f ? 0x8000 : 0) + exponent * 128 + (mantissa - 128));
}

// The centroids as bfloat16, twice: a 16-bit permute reads five bits of an index, of which a code fills four.
template <class Format>
struct Bf16Centroids {
  uint16_t bits[32];
  constexpr Bf16Centroids() : bits() {
    for (int c = 0; c < 32; ++c) bits[c] = nearest_bf16(Format::value(c % 16) * BF16_FACTOR<Format>);
  }
};
template <class Format>
alignas(64) inline constexpr Bf16Centroids<Format> BF16_CENTROIDS{};

struct Bf16Math {
  using Element = uint32_t;  // inputs k (low half) and k + 1
  using Operand = __m512i;
  static constexpr int K_STEP = 2;

  template <class Format>
  static void decode(const uint8_t* tile, uint32_t* panel, int stride) {
    if constexpr (IS_4BIT<Format>) {
      const __m512i table = _mm512_load_si512(BF16_CENTROIDS<Format>.bits);
      const __m512i high_nibble_first = _mm512_set1_epi32(4);
      __m512i column[8];
      Avx512::transpose_tile4(tile, column);
      for (int c = 0; c < 8; ++c)
        for (int t = 0; t < 4; ++t) {
          // Byte i of lane t twice, in both halves of 32-bit lane i; then the even input's nibble down to the low end.
          const __m512i twice = _mm512_permutexvar_epi8(_mm512_add_epi8(FIRST_BYTES(), _mm512_set1_epi8(16 * t)), column[c]);
          const __m512i pair = _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, high_nibble_first), table);
          _mm512_storeu_si512(panel + (4 * c + t) * stride, pair);
        }
    } else {
      // Integers of 8 bits are exact in bfloat16: the upper half of their float32.
      Avx512::for_each_pair8<Format>(tile, [&](int k, __m512 even, __m512 odd) {
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
        _mm512_storeu_si512(panel + k / 2 * stride, _mm512_or_si512(low, _mm512_castps_si512(odd)));
      });
    }
  }

  static uint32_t pack(const Bf16* x, int64_t valid) {
    const uint32_t low = valid > 0 ? x[0].bits : 0, high = valid > 1 ? x[1].bits : 0;
    return low | high << 16;
  }

  template <class Format>
  static constexpr float output_factor() {
    return 1.0f / BF16_FACTOR<Format>;
  }

  static Operand load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Operand broadcast(uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
  static __m512 multiply_add(__m512 acc, Operand w, Operand x) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }

 private:
  static __m512i FIRST_BYTES() {
    const __m128i bytes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i wide = _mm512_cvtepu8_epi32(bytes);
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  }
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
