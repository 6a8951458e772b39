// Products of bfloat16 pairs (AVX512-BF16): twice the products an instruction. For bfloat16 x, which needs no rounding,
// and for float32 x where the caller allows that (NF4L_ALLOW_BF16).
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

constexpr uint16_t nearest_bf16(float value) {
  const uint32_t bits = float_bits(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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
  using Element = uint32_t;  // two inputs
  using Operand = __m512i;
  static constexpr int K_STEP = 2;
  static constexpr int GROUP = 4;  // steps
  // Rows of x from which on dequantize + torch's GEMM is no slower. 4096 x 4096, 2048 rows, 2 threads of Zen 4: NF4 194
  // ms here and 198 ms there, W8 203 and 196; at 512 rows 45 and 59, 46 and 60. For float32 x there is none.
  template <class T>
  static constexpr int64_t most_rows() {
    return std::is_same_v<T, Bf16> ? 2048 : INT64_MAX;
  }

  // Calls body(group, STEP(), weights of 16 rows) for every two inputs of a tile, steps GROUP * group + STEP. A step's
  // two inputs lie four apart: they come from the same nibble of both halves of a lane.
  template <class Format, class Body>
  static void for_each_step(const uint8_t* tile, const Body& body) {
    if constexpr (IS_4BIT<Format>) {
      const __m512i table = _mm512_load_si512(BF16_CENTROIDS<Format>.bits);
      Avx512::for_each_group4(tile, [&](int group, __m512i codes) ALWAYS_INLINE {
        body(group, Constant<1>(), _mm512_permutexvar_epi16(codes, table));
        body(group, Constant<0>(), _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
        body(group, Constant<3>(), _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
        body(group, Constant<2>(), _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
      });
    } else {
      // Integers of 8 bits are exact in bfloat16: the upper half of their float32.
      const auto both = [](__m512 low, __m512 high) ALWAYS_INLINE {
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
      };
      const auto steps = [&](int group, auto e, __m512 v0, __m512 v1, __m512 v2, __m512 v3) ALWAYS_INLINE {
        body(group, Constant<e>(), both(v0, v2));
        body(group, Constant<e + 2>(), both(v1, v3));
      };
      Avx512::for_each_half8<Format>(tile, steps);
    }
  }

  // What meets the weights of `step`, from a slab of x of which `inputs` exist.
  template <class T>
  static uint32_t pack(const T* slab, int step, int64_t inputs) {
    const int low = step / GROUP * 2 * GROUP + step % GROUP, high = low + GROUP;
    const uint32_t low_bits = low < inputs ? bf16_bits(slab[low]) : 0;
    return low_bits | (high < inputs ? bf16_bits(slab[high]) : 0) << 16;
  }
  static uint32_t bf16_bits(Bf16 x) { return x.bits; }
  static uint32_t bf16_bits(float x) {
    return _mm_cvtsi128_si32(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(x)))) & 0xffff;
  }

  template <class Format>
  static constexpr float output_factor() {
    return 1.0f / BF16_FACTOR<Format>;
  }

  static Operand load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store(uint32_t* p, Operand v) { _mm512_storeu_si512(p, v); }
  static Operand broadcast(uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
  static __m512 multiply_add(__m512 acc, Operand w, Operand x) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
