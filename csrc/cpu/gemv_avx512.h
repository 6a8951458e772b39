// y = x W^T + bias for one row of x: weights are decoded in registers, in the order in which they are stored.
//
// 64 bytes of a tile hold rows g and g + 8 for all of its inputs. batch.h turns tiles so that rows lie in lanes, which
// pays from the second row of x on; here x is put into the order of the weights instead, once a call, and each output
// row has a register of partial sums that is added up across lanes at the end of a strip.
//
// A Decoder says how 64 bytes meet x:
//   Element                what x is held as
//   input(p)               which input of a tile lies at place p among the tile's elements of x
//   dot(bytes, x, sum)     sum[0] and sum[1] += products of row g and row g + 8

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// 4 bit with float32 x. The eight nibbles of 32-bit word 4 t + s belong to inputs 16 s + 8 u + 2 t + e: x is four
// planes (u, e) of 16.
template <class Format>
struct Decoder4F32 {
  using Element = float;
  static constexpr int TILE_INPUTS = TILE_K4;

  static constexpr int input(int p) {
    const int u = p / 32, e = p / 16 % 2, t = p / 4 % 4, s = p % 4;
    return 16 * s + 8 * u + 2 * t + e;
  }

  static void dot(__m512i codes, const float* x, __m512 sum[2]) {
    const __m512 table = _mm512_loadu_ps(CENTROIDS<Format>.value);
    const auto value = [&](__m512i index) { return _mm512_permutexvar_ps(index, table); };
    const __m512 x00 = _mm512_loadu_ps(x), x01 = _mm512_loadu_ps(x + 16);
    const __m512 x10 = _mm512_loadu_ps(x + 32), x11 = _mm512_loadu_ps(x + 48);
    sum[0] = _mm512_fmadd_ps(value(codes), x01, sum[0]);
    sum[0] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 4)), x00, sum[0]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 8)), x01, sum[1]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 12)), x00, sum[1]);
    sum[0] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 16)), x11, sum[0]);
    sum[0] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 20)), x10, sum[0]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 24)), x11, sum[1]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 28)), x10, sum[1]);
  }

  static constexpr float OUTPUT_FACTOR = 1.0f;
};

// 8 bit, every dtype of x in float32. The bytes of 32-bit word 4 t + 2 s + u belong to row g (e = 0, 1) and row g + 8:
// x is two planes (e) of 16.
template <class Format>
struct Decoder8F32 {
  using Element = float;
  static constexpr int TILE_INPUTS = TILE_K8;

  static constexpr int input(int p) {
    const int e = p / 16, t = p / 4 % 4, s = p / 2 % 2, u = p % 2;
    return 16 * s + 8 * u + 2 * t + e;
  }

  static void dot(__m512i codes, const float* x, __m512 sum[2]) {
    // 2^23 + byte, as the bits of a float32.
    const __m512i magic = _mm512_set1_epi32(0x4b000000), byte = _mm512_set1_epi32(255);
    const __m512 bias = _mm512_set1_ps(8388608.0f + Format::BIAS);
    const auto value = [&](__m512i v) {
      const __m512i bits = _mm512_ternarylogic_epi32(v, byte, magic, 0xea);  // v & byte | magic
      return _mm512_sub_ps(_mm512_castsi512_ps(bits), bias);
    };
    const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
    sum[0] = _mm512_fmadd_ps(value(codes), x0, sum[0]);
    sum[0] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 8)), x1, sum[0]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 16)), x0, sum[1]);
    sum[1] = _mm512_fmadd_ps(value(_mm512_srli_epi32(codes, 24)), x1, sum[1]);
  }

  static constexpr float OUTPUT_FACTOR = 1.0f;
};

#if defined(__AVX512BF16__)
// 4 bit with x in bfloat16, in pairs (see bf16_math.h). The four nibbles of 16-bit word 8 t + 2 s + u belong to
// row g and row g + 8, inputs 16 s + 8 u + 2 t + e: x is two planes (e) of 32.
template <class Format>
struct Decoder4Bf16 {
  using Element = Bf16;
  static constexpr int TILE_INPUTS = TILE_K4;

  static constexpr int input(int p) {
    const int e = p / 32, t = p / 8 % 4, s = p / 2 % 4, u = p % 2;
    return 16 * s + 8 * u + 2 * t + e;
  }

  static void dot(__m512i codes, const Bf16* x, __m512 sum[2]) {
    const __m512i table = _mm512_load_si512(BF16_CENTROIDS<Format>.bits);
    const __m512i even = _mm512_loadu_si512(x), odd = _mm512_loadu_si512(x + 32);
    const auto add = [&](__m512& to, __m512i index, __m512i xv) {
      to = Bf16Math::multiply_add(to, _mm512_permutexvar_epi16(index, table), xv);
    };
    add(sum[0], codes, odd);
    add(sum[1], _mm512_srli_epi16(codes, 8), odd);
    add(sum[0], _mm512_srli_epi16(codes, 4), even);
    add(sum[1], _mm512_srli_epi16(codes, 12), even);
  }

  static constexpr float OUTPUT_FACTOR = 1.0f / BF16_FACTOR<Format>;
};
#endif

// Inputs of a tile in the order of their places, as indices for permutes.
template <class Decoder, class Index>
struct InputOrder {
  Index input[Decoder::TILE_INPUTS];
  constexpr InputOrder() : input() {
    for (int p = 0; p < Decoder::TILE_INPUTS; ++p) input[p] = static_cast<Index>(Decoder::input(p));
  }
};
template <class Decoder, class Index>
alignas(64) inline constexpr InputOrder<Decoder, Index> INPUT_ORDER{};

// The first `count` inputs of a tile of x go to their places; those from there on do not exist and count as 0.
template <class Decoder, class T>
void place_tile(const T* x, int64_t count, float* to) {
  constexpr int VECTORS = Decoder::TILE_INPUTS / 16;  // 2 or 4
  __m512 v[VECTORS];
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t left = count - 16 * i;
    v[i] = Avx512::load_16(x + 16 * i, left > 0 ? Avx512::first_lanes(left) : __mmask16{0});
  }
  for (int i = 0; i < VECTORS; ++i) {
    const __m512i input = _mm512_load_si512(INPUT_ORDER<Decoder, int32_t>.input + 16 * i);
    __m512 placed = _mm512_permutex2var_ps(v[0], input, v[1]);
    if constexpr (VECTORS == 4)
      placed = _mm512_mask_mov_ps(placed, _mm512_test_epi32_mask(input, _mm512_set1_epi32(32)),
                                  _mm512_permutex2var_ps(v[2], input, v[3]));
    Avx512::store(to + 16 * i, placed);
  }
}

#if defined(__AVX512BF16__)
inline __m512i load_32(const Bf16* x) { return _mm512_loadu_si512(x); }
inline __m512i load_32(const float* x) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
}

template <class Decoder, class T>
void place_tile(const T* x, int64_t, Bf16* to) {
  static_assert(Decoder::TILE_INPUTS == 64, "4-bit tiles are never cut short");
  const __m512i low = load_32(x), high = load_32(x + 32);
  for (int i = 0; i < 64; i += 32) {
    const __m512i input = _mm512_load_si512(INPUT_ORDER<Decoder, int16_t>.input + i);
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(low, input, high));
  }
}
#endif

// Lane i = the sum over the lanes of v[i].
inline __m512 sum_lanes(const __m512 v[16]) {
  __m512 quad[4];  // 128-bit lane j: partial sums of v[4 q] .. v[4 q + 3]
  for (int q = 0; q < 4; ++q) {
    const __m512 *a = v + 4 * q, *c = a + 2;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
    quad[q] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  const auto halve = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halve(halve(quad[0], quad[1]), halve(quad[2], quad[3]));
}

template <class Decoder, class T>
class Gemv {
 public:
  Gemv(const nf4l_weight& w, const nf4l_linear_args& a, int threads)
      : w_(w), a_(a), threads_(threads), tiling_(tiling_of(w)), code_(w.nested_code) {}

  int run() {
    x_ = static_cast<Element*>(scratch(Scratch::PACKED_X, tiling_.k_tiles * Decoder::TILE_INPUTS * sizeof(Element)));
    if (!x_) return NF4L_USE_GEMM;
    place_x();
    const int64_t grain = pieces(tiling_.strips, w_.n * w_.k, threads_);
    parallel_for(tiling_.strips, grain, threads_, [this](int64_t begin, int64_t end) { run_strips(begin, end); });
    return short_of_memory_ ? NF4L_USE_GEMM : NF4L_OK;
  }

 private:
  using Element = typename Decoder::Element;

  void place_x() {
    const T* x = static_cast<const T*>(a_.x);
    for (int64_t kt = 0; kt < tiling_.k_tiles; ++kt) {
      const int64_t first = kt * Decoder::TILE_INPUTS;
      place_tile<Decoder>(x + first, w_.k - first, x_ + first);
    }
  }

  void run_strips(int64_t begin, int64_t end) {
    auto* room = static_cast<float*>(scratch(Scratch::WORKER, tiling_.scale_vectors * LANES * sizeof(float)));
    if (!room) {
      short_of_memory_ = true;
      return;
    }
    for (int64_t strip = begin; strip < end; ++strip) {
      const float* scales = strip_scales<Avx512>(w_, code_, strip, room);
      alignas(64) float result[LANES];
      Avx512::store(result, sum_strip(w_.qweight + strip * tiling_.k_tiles * TILE_BYTES, scales));
      store_strip<Avx512, T>(w_, a_, strip, 0, 1, result, LANES, Decoder::OUTPUT_FACTOR);
    }
  }

  __m512 sum_strip(const uint8_t* tiles, const float* scales) const {
    __m512 total[LANES];
    for (auto& t : total) t = _mm512_setzero_ps();
    for (int64_t kt = 0; kt < tiling_.k_tiles; ++kt) {
      const uint8_t* tile = tiles + kt * TILE_BYTES;
      const float* scale = scales + (kt >> tiling_.scale_shift) * LANES;
      const Element* x = x_ + kt * Decoder::TILE_INPUTS;
#pragma GCC unroll 8  // else `total` would live in memory
      for (int g = 0; g < 8; ++g) {
        __builtin_prefetch(tile + 64 * g + PREFETCH_BYTES);
        __m512i codes = _mm512_loadu_si512(tile + 64 * g);
        asm("" : "+v"(codes));  // one load: g++ would read the memory again for every shift
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        Decoder::dot(codes, x, sum);
        for (int h = 0; h < 2; ++h)
          total[2 * g + h] = _mm512_fmadd_ps(sum[h], _mm512_set1_ps(scale[2 * g + h]), total[2 * g + h]);
      }
    }
    return sum_lanes(total);
  }

  const nf4l_weight& w_;
  const nf4l_linear_args& a_;
  const int threads_;
  const Tiling tiling_;
  const Avx512::NestedCode code_;
  Element* x_ = nullptr;
  std::atomic<bool> short_of_memory_{false};
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
