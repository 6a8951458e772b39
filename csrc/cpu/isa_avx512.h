// AVX-512: F, BW, DQ and VL; VBMI's byte permutes where the level has them.
//
// Tables of 16 floats and 32 words fill exactly one register, and the permutes that look them up use only the low bits
// of an index. So a nibble needs a shift to get to the low end, never a mask.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

struct Avx512 {
  static constexpr int GROUP = 8;  // inputs decoded together
  static constexpr int PANEL = 2;
  static constexpr int64_t MOST_ROWS = INT64_MAX;  // float32 x; 2048 rows: 373 ms here, 432 ms dequantize + torch
  static constexpr int MAX_MR = 12;                // 24 sums, two panel vectors
  static constexpr int MAX_IN_REGISTERS = 16;      // rows of x for which batch.h decodes without a panel

  using Vec = __m512;
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec broadcast(float v) { return _mm512_set1_ps(v); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, acc); }

  // Within 128-bit lanes, byte 4 i + j becomes byte 4 j + i.
  static __m512i turn_bytes(__m512i v) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
  }

#if defined(__AVX512VBMI__)
  // nested_code as four planes of bytes, each 256 entries in four registers.
  struct NestedCode {
    alignas(64) uint8_t plane[4][256];
    explicit NestedCode(const float* code) {
      if (!code) return;
      for (int i = 0; i < 256; i += 16) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(code + i));
        _mm_store_si128(reinterpret_cast<__m128i*>(plane[0] + i), _mm512_cvtepi32_epi8(bits));
        _mm_store_si128(reinterpret_cast<__m128i*>(plane[1] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(plane[2] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16)));
        _mm_store_si128(reinterpret_cast<__m128i*>(plane[3] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)));
      }
    }
  };

  static __m512i look_up_plane(const uint8_t* plane, __m512i codes, __mmask64 upper) {
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(plane), codes, _mm512_load_si512(plane + 64));
    const __m512i high =
        _mm512_permutex2var_epi8(_mm512_load_si512(plane + 128), codes, _mm512_load_si512(plane + 192));
    return _mm512_mask_mov_epi8(low, upper, high);
  }

  // 64 codes of absmax_q: byte 4 i + j is lane i of block j; out is [4][16].
  static void look_up_scale_codes(const NestedCode& nested, const uint8_t* codes, float* out) {
    // Four lanes of one block become neighbours: the order that interleaving the planes keeps.
    const __m512i c = turn_bytes(_mm512_loadu_si512(codes));
    const __mmask64 upper = _mm512_movepi8_mask(c);
    const __m512i p0 = look_up_plane(nested.plane[0], c, upper), p1 = look_up_plane(nested.plane[1], c, upper);
    const __m512i p2 = look_up_plane(nested.plane[2], c, upper), p3 = look_up_plane(nested.plane[3], c, upper);
    const __m512i low01 = _mm512_unpacklo_epi8(p0, p1), low23 = _mm512_unpackhi_epi8(p0, p1);
    const __m512i high01 = _mm512_unpacklo_epi8(p2, p3), high23 = _mm512_unpackhi_epi8(p2, p3);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low01, high01));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(low01, high01));
    _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi16(low23, high23));
    _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi16(low23, high23));
  }
#else
  struct NestedCode {
    const float* code;
    explicit NestedCode(const float* c) : code(c) {}
  };

  static void look_up_scale_codes(const NestedCode& nested, const uint8_t* codes, float* out) {
    const __m512i c = _mm512_loadu_si512(codes), byte = _mm512_set1_epi32(255);
    for (int j = 0; j < 4; ++j) {
      const __m512i index = _mm512_and_si512(_mm512_srl_epi32(c, _mm_cvtsi32_si128(8 * j)), byte);
      store(out + j * LANES, _mm512_i32gather_ps(index, nested.code, 4));
    }
  }
#endif

  // See isa_portable.h.
  static int nested_run(const int* first, int kb, int shift, const float* groups, float* scale) {
    const __m128i by = _mm_cvtsi32_si128(shift);
    const __m512i block = _mm512_add_epi32(_mm512_loadu_si512(first), _mm512_set1_epi32(kb));
    const __m512i group = _mm512_srl_epi32(block, by);
    const __m512i next = _mm512_sll_epi32(_mm512_add_epi32(group, _mm512_set1_epi32(1)), by);
    store(scale, _mm512_i32gather_ps(group, groups, 4));
    return _mm512_reduce_min_epi32(_mm512_sub_epi32(next, block));
  }

  // Bytes 16 T .. 16 T + 15 of `column`, one in the low end of each 32-bit lane.
  template <int T>
  static __m512i widen(__m512i column) {
    return _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(column, T));
  }

  // Lane i gets bytes i, 16 + i, 32 + i and 48 + i of `column`, from its low end on.
  static __m512i gather_bytes(__m512i column) {
#if defined(__AVX512VBMI__)
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index =
        _mm512_add_epi8(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)), _mm512_set1_epi32(0x30201000));
    return _mm512_permutexvar_epi8(index, column);
#else
    const __m512i by_quarter = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return turn_bytes(_mm512_permutexvar_epi32(by_quarter, column));
#endif
  }

  // A 4-bit tile with its rows in lanes: byte 16 t + i of column c belongs to lane i, inputs 8 c + 2 t and the next.
  static void transpose_tile4(const uint8_t* tile, __m512i column[8]) {
    __m512i v[8], a[8], b[8];
    for (int g = 0; g < 8; ++g) v[g] = _mm512_loadu_si512(tile + 64 * g);
    for (int g = 0; g < 4; ++g) {
      a[g] = _mm512_unpacklo_epi16(v[2 * g], v[2 * g + 1]);
      a[g + 4] = _mm512_unpackhi_epi16(v[2 * g], v[2 * g + 1]);
    }
    for (int half = 0; half < 8; half += 4) {
      for (int g = 0; g < 2; ++g) {
        b[2 * g] = _mm512_unpacklo_epi32(a[half + 2 * g], a[half + 2 * g + 1]);
        b[2 * g + 1] = _mm512_unpackhi_epi32(a[half + 2 * g], a[half + 2 * g + 1]);
      }
      for (int g = 0; g < 2; ++g) {
        column[half + 2 * g] = _mm512_unpacklo_epi64(b[g], b[g + 2]);
        column[half + 2 * g + 1] = _mm512_unpackhi_epi64(b[g], b[g + 2]);
      }
    }
  }

  // An 8-bit tile with its rows in lanes: byte 16 t + i of column[c][e] belongs to lane i, input 8 c + 2 t + e.
  static void transpose_tile8(const uint8_t* tile, __m512i column[4][2]) {
    const __m512i even_then_odd =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    __m512i half[2][4];
    for (int i = 0; i < 2; ++i) {
      __m512i v[4];
      for (int g = 0; g < 4; ++g) v[g] = _mm512_loadu_si512(tile + 64 * (4 * i + g));
      const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
      const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
      half[i][0] = _mm512_unpacklo_epi64(a, c);
      half[i][1] = _mm512_unpackhi_epi64(a, c);
      half[i][2] = _mm512_unpacklo_epi64(b, d);
      half[i][3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int c = 0; c < 4; ++c) {
      const __m512i first = _mm512_shuffle_epi8(half[0][c], even_then_odd);
      const __m512i second = _mm512_shuffle_epi8(half[1][c], even_then_odd);
      column[c][0] = _mm512_unpacklo_epi64(first, second);
      column[c][1] = _mm512_unpackhi_epi64(first, second);
    }
  }

  // Calls body(group, codes): byte t of a lane holds input 8 * group + 2 t of a row in its high nibble and the next in
  // its low one.
  template <class Body>
  static void for_each_group4(const uint8_t* tile, const Body& body) {
    __m512i column[8];
    transpose_tile4(tile, column);
#pragma GCC unroll 1  // keeps the registers for the sums of `body`
    for (int c = 0; c < 8; ++c) body(c, gather_bytes(column[c]));
  }

  // Calls body(group, K(), values of input 8 * group + K in 16 rows); K is an integral_constant, so that addresses
  // fold.
  template <class Format, class Body>
  static void for_each_input4(const uint8_t* tile, const Body& body) {
    const Vec table = load(CENTROIDS<Format>.value);
    for_each_group4(tile, [&](int group, __m512i codes) ALWAYS_INLINE {
      body(group, Constant<1>(), _mm512_permutexvar_ps(codes, table));
      body(group, Constant<0>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table));
      body(group, Constant<3>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), table));
      body(group, Constant<2>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), table));
      body(group, Constant<5>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), table));
      body(group, Constant<4>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 20), table));
      body(group, Constant<7>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 24), table));
      body(group, Constant<6>(), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 28), table));
    });
  }

  // Calls body(group, E(), values of inputs 8 * group + E, E + 2, E + 4 and E + 6) for E = 0, 1.
  template <class Format, class Body>
  static void for_each_half8(const uint8_t* tile, const Body& body) {
    const auto value = [](__m512i code) ALWAYS_INLINE {
      return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(Format::BIAS)));
    };
    __m512i column[4][2];
    transpose_tile8(tile, column);
#pragma GCC unroll 1
    for (int c = 0; c < 4; ++c) {
      const __m512i even = column[c][0], odd = column[c][1];
      body(c, Constant<0>(), value(widen<0>(even)), value(widen<1>(even)), value(widen<2>(even)),
           value(widen<3>(even)));
      body(c, Constant<1>(), value(widen<0>(odd)), value(widen<1>(odd)), value(widen<2>(odd)), value(widen<3>(odd)));
    }
  }

  template <class Format, class Body>
  static void for_each_input8(const uint8_t* tile, const Body& body) {
    for_each_half8<Format>(tile, [&](int group, auto e, Vec v0, Vec v1, Vec v2, Vec v3) ALWAYS_INLINE {
      body(group, Constant<e>(), v0);
      body(group, Constant<e + 2>(), v1);
      body(group, Constant<e + 4>(), v2);
      body(group, Constant<e + 6>(), v3);
    });
  }

  static __mmask16 first_lanes(int64_t count) {
    return count < 16 ? static_cast<__mmask16>((1u << count) - 1) : 0xffff;
  }

  static void store_16(float* out, Vec v, __mmask16 lanes) { _mm512_mask_storeu_ps(out, lanes, v); }
  static void store_16(Half* out, Vec v, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(out, lanes, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Not the BF16 instruction: that one flushes subnormal values.
  static void store_16(Bf16* out, Vec v, __mmask16 lanes) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i shifted = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(out, lanes, _mm512_cvtepi32_epi16(shifted));
  }

  static Vec load_16(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
  static Vec load_16(const Half* p, __mmask16 lanes) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }
  static Vec load_16(const Bf16* p, __mmask16 lanes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
  }

  template <class Format, class T>
  static void dequantize_tile4(const uint8_t* tile, const float* scales, T* out, int64_t ld, int rows) {
    const Vec table = load(CENTROIDS<Format>.value);
    // Lane i gets input 16 s + i of a row: from 32-bit word 4 t + s, byte 2 u + h, high nibble for even i.
    const __m512i word = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12);
    const __m512i shift = _mm512_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0, 20, 16, 20, 16, 20, 16, 20, 16);
    for (int g = 0; g < 8; ++g) {
      const __m512i codes = _mm512_loadu_si512(tile + 64 * g);
      for (int h = 0; h < 2; ++h) {
        const int row = g + 8 * h;
        if (row >= rows) break;
        const Vec scale = broadcast(scales[2 * g + h]);
        for (int s = 0; s < 4; ++s) {
          const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(s)), codes);
          const __m512i code = _mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(8 * h)));
          store_16(out + row * ld + 16 * s, mul(_mm512_permutexvar_ps(code, table), scale), 0xffff);
        }
      }
    }
  }

  template <class Format, class T>
  static void dequantize_tile8(const uint8_t* tile, const float* first, float second, T* out, int64_t ld, int rows,
                               int inputs) {
    // Lane i gets input 16 s + i of a row: from 32-bit word 4 t + 2 s + u, byte 2 h + e.
    const __m512i word = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 1, 1, 5, 5, 9, 9, 13, 13);
    const __m512i shift = _mm512_setr_epi32(0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8);
    for (int g = 0; g < 8; ++g) {
      const __m512i codes = _mm512_loadu_si512(tile + 64 * g);
      for (int row = g; row < rows; row += 8) {
        const int h = row / 8;
        for (int s = 0; 16 * s < inputs; ++s) {
          const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(2 * s)), codes);
          const __m512i bytes = _mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(16 * h)));
          const __m512i code = _mm512_and_si512(bytes, _mm512_set1_epi32(255));
          const Vec value = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(Format::BIAS)));
          const Vec scaled = mul(mul(value, broadcast(first[2 * g + h])), broadcast(second));
          store_16(out + row * ld + 16 * s, scaled, first_lanes(inputs - 16 * s));
        }
      }
    }
  }

  template <class Format, class T>
  static void dequantize_run(const uint8_t* codes, float scale, T* out, int64_t count) {
    const Vec table = load(CENTROIDS<Format>.value);
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = first_lanes(count - i);
      const auto byte_lanes = static_cast<__mmask16>((1u << (__builtin_popcount(lanes) + 1) / 2) - 1);
      // Each byte in a 64-bit lane, then its high nibble low and its low nibble in the upper half.
      const __m512i pairs = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(byte_lanes, codes + i / 2));
      const __m512i code = _mm512_or_si512(_mm512_slli_epi64(pairs, 32), _mm512_srli_epi64(pairs, 4));
      store_16(out + i, mul(_mm512_permutexvar_ps(code, table), broadcast(scale)), lanes);
    }
  }

  // y[row] = sums * factor + bias for the first `count` rows of a strip.
  template <class T>
  static void store_rows(T* y, Vec sums, float factor, const T* bias, int count) {
    const __m512i lane_of_row = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __mmask16 rows = first_lanes(count);
    Vec v = mul(_mm512_permutexvar_ps(lane_of_row, sums), broadcast(factor));
    if (bias) v = add(v, load_16(bias, rows));
    store_16(y, v, rows);
  }
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
