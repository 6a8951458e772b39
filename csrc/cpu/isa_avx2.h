// AVX2 with FMA and F16C. What is not spelled out here is the portable code, compiled for this level.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

struct Avx2 : Portable {
  static constexpr int GROUP = 4;  // inputs decoded together
  static constexpr int PANEL = 1;
  static constexpr int64_t MOST_ROWS =
      INT64_MAX;                    // 256 rows, torch held to AVX2: float32 44 ms here, 95 there; bfloat16 43, 209
  static constexpr int MAX_MR = 6;  // 12 sums, one panel vector of two registers
  static constexpr int MAX_IN_REGISTERS = 4;

  struct Vec {
    __m256 low, high;
  };

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
  static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static Vec multiply_add(Vec acc, Vec a, Vec b) {
    return {_mm256_fmadd_ps(a.low, b.low, acc.low), _mm256_fmadd_ps(a.high, b.high, acc.high)};
  }

  // The bytes of 16 float32 centroids: a byte shuffle looks up one byte of 32 codes at once.
  template <class Format>
  struct BytePlanes {
    uint8_t plane[4][16];
    constexpr BytePlanes() : plane() {
      for (int c = 0; c < 16; ++c) {
        const uint32_t bits = float_bits(Format::value(c));
        for (int b = 0; b < 4; ++b) plane[b][c] = static_cast<uint8_t>(bits >> 8 * b);
      }
    }
  };

  // Values of 16 rows from 16 codes in each half of `codes`, for inputs K and K + 2 of a group.
  template <class Format, int K, class Body>
  static void look_up(__m256i codes, int group, const Body& body) {
    static constexpr BytePlanes<Format> planes{};
    const auto plane = [&](int b) ALWAYS_INLINE {
      const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes.plane[b]));
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
    };
    const __m256i p0 = plane(0), p1 = plane(1), p2 = plane(2), p3 = plane(3);
    const __m256i low_01 = _mm256_unpacklo_epi8(p0, p1), low_23 = _mm256_unpacklo_epi8(p2, p3);
    const __m256i high_01 = _mm256_unpackhi_epi8(p0, p1), high_23 = _mm256_unpackhi_epi8(p2, p3);
    // Four rows of either input in each register.
    const __m256i a = _mm256_unpacklo_epi16(low_01, low_23), b = _mm256_unpackhi_epi16(low_01, low_23);
    const __m256i c = _mm256_unpacklo_epi16(high_01, high_23), d = _mm256_unpackhi_epi16(high_01, high_23);
    body(group, Constant<K>(),
         Vec{_mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x20)),
             _mm256_castsi256_ps(_mm256_permute2x128_si256(c, d, 0x20))});
    body(group, Constant<K + 2>(),
         Vec{_mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x31)),
             _mm256_castsi256_ps(_mm256_permute2x128_si256(c, d, 0x31))});
  }

  // Calls body(group, K(), values of input GROUP * group + K in 16 rows).
  template <class Format, class Body>
  static void for_each_input4(const uint8_t* tile, const Body& body) {
    const __m256i low_nibble = _mm256_set1_epi8(15);
    // Two quarters t of the tile's lanes at a time: byte i of half j of column c is row i, inputs 8 c + 2 t + 2 j, + 1.
    for (int t = 0; t < 4; t += 2) {
      __m256i column[8];
      transpose_half(tile + t * LANE_BYTES, column);
#pragma GCC unroll 1
      for (int c = 0; c < 8; ++c) {
        const __m256i codes = column[c];
        look_up<Format, 0>(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low_nibble), 2 * c + t / 2, body);
        look_up<Format, 1>(_mm256_and_si256(codes, low_nibble), 2 * c + t / 2, body);
      }
    }
  }

  // Columns of 16-bit words of eight rows of 32 bytes, 64 bytes apart, within 128-bit halves.
  static void transpose_half(const uint8_t* rows, __m256i column[8]) {
    __m256i v[8], a[8], b[4];
    for (int g = 0; g < 8; ++g) v[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + 64 * g));
    for (int g = 0; g < 4; ++g) {
      a[g] = _mm256_unpacklo_epi16(v[2 * g], v[2 * g + 1]);
      a[g + 4] = _mm256_unpackhi_epi16(v[2 * g], v[2 * g + 1]);
    }
    for (int half = 0; half < 8; half += 4) {
      for (int g = 0; g < 2; ++g) {
        b[2 * g] = _mm256_unpacklo_epi32(a[half + 2 * g], a[half + 2 * g + 1]);
        b[2 * g + 1] = _mm256_unpackhi_epi32(a[half + 2 * g], a[half + 2 * g + 1]);
      }
      for (int g = 0; g < 2; ++g) {
        column[half + 2 * g] = _mm256_unpacklo_epi64(b[g], b[g + 2]);
        column[half + 2 * g + 1] = _mm256_unpackhi_epi64(b[g], b[g + 2]);
      }
    }
  }

  template <class Format, class Body>
  static void for_each_input8(const uint8_t* tile, const Body& body) {
    const auto value = [](__m128i c) ALWAYS_INLINE {
      return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(c), _mm256_set1_epi32(Format::BIAS)));
    };
    const auto values = [&](__m128i c) ALWAYS_INLINE { return Vec{value(c), value(_mm_unpackhi_epi64(c, c))}; };
    for (int t = 0; t < 4; t += 2) {
      __m256i column[4][2];
      transpose_half8(tile + t * LANE_BYTES, column);
#pragma GCC unroll 1
      for (int c = 0; c < 4; ++c) {
        const int group = 2 * c + t / 2;
        body(group, Constant<0>(), values(_mm256_castsi256_si128(column[c][0])));
        body(group, Constant<1>(), values(_mm256_castsi256_si128(column[c][1])));
        body(group, Constant<2>(), values(_mm256_extracti128_si256(column[c][0], 1)));
        body(group, Constant<3>(), values(_mm256_extracti128_si256(column[c][1], 1)));
      }
    }
  }

  // The same for 8 bit: byte i of half j of column[c][e] is row i, input 8 c + 2 t + 2 j + e.
  static void transpose_half8(const uint8_t* rows, __m256i column[4][2]) {
    const __m128i evens = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i even_then_odd = _mm256_broadcastsi128_si256(evens);
    __m256i quad[2][4];
    for (int i = 0; i < 2; ++i) {
      __m256i v[4];
      for (int g = 0; g < 4; ++g) v[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + 64 * (4 * i + g)));
      const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
      const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
      quad[i][0] = _mm256_unpacklo_epi64(a, c);
      quad[i][1] = _mm256_unpackhi_epi64(a, c);
      quad[i][2] = _mm256_unpacklo_epi64(b, d);
      quad[i][3] = _mm256_unpackhi_epi64(b, d);
    }
    for (int c = 0; c < 4; ++c) {
      const __m256i first = _mm256_shuffle_epi8(quad[0][c], even_then_odd);
      const __m256i second = _mm256_shuffle_epi8(quad[1][c], even_then_odd);
      column[c][0] = _mm256_unpacklo_epi64(first, second);
      column[c][1] = _mm256_unpackhi_epi64(first, second);
    }
  }

  // y[row] = sums * factor + bias for the first `count` rows of a strip.
  template <class T>
  static void store_rows(T* y, Vec sums, float factor, const T* bias, int count) {
    float lanes[LANES];
    store(lanes, sums);
    store_lanes(y, lanes, factor, bias, count);
  }
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
