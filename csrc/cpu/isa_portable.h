// Portable C++: GCC and clang vector extensions of 16 bytes, which every target has or emulates.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class T>
void store_lanes(T* y, const float* lanes, float factor, const T* bias, int count) {
  for (int r = 0; r < count; ++r) {
    const float sum = lanes[2 * (r % 8) + r / 8] * factor;
    y[r] = from_float<T>(bias ? sum + to_float(bias[r]) : sum);
  }
}

struct Portable {
  static constexpr int GROUP = 2;  // inputs decoded together
  static constexpr int PANEL = 1;
  // Rows of x from which on dequantize + torch's GEMM is no slower: 4096 x 4096, 64 rows of bfloat16, 2 threads of Zen
  // 4: 32 ms here and 31 ms there; at 16 rows 10 and 28.
  static constexpr int64_t MOST_ROWS = 64;
  static constexpr int MAX_MR = 3;
  static constexpr int MAX_IN_REGISTERS = 2;

  typedef float Quarter __attribute__((vector_size(16), aligned(4), may_alias));
  struct Vec {
    Quarter q[4];
  };

  static Vec zero() { return broadcast(0.0f); }
  static Vec broadcast(float v) {
    const Quarter q = {v, v, v, v};
    return {{q, q, q, q}};
  }
  static Vec load(const float* p) {
    const auto* q = reinterpret_cast<const Quarter*>(p);
    return {{q[0], q[1], q[2], q[3]}};
  }
  static void store(float* p, Vec v) {
    auto* q = reinterpret_cast<Quarter*>(p);
    for (int i = 0; i < 4; ++i) q[i] = v.q[i];
  }
  static Vec mul(Vec a, Vec b) { return {{a.q[0] * b.q[0], a.q[1] * b.q[1], a.q[2] * b.q[2], a.q[3] * b.q[3]}}; }
  static Vec add(Vec a, Vec b) { return {{a.q[0] + b.q[0], a.q[1] + b.q[1], a.q[2] + b.q[2], a.q[3] + b.q[3]}}; }
  static Vec multiply_add(Vec acc, Vec a, Vec b) {
#if defined(__aarch64__)
    for (int i = 0; i < 4; ++i) acc.q[i] = vfmaq_f32(acc.q[i], a.q[i], b.q[i]);
    return acc;
#else
    return add(acc, mul(a, b));
#endif
  }

  // The nested scales of 16 rows at their block kb: scale[i] = groups[(first[i] + kb) >> shift]. Returns for how many
  // blocks they hold.
  static int nested_run(const int* first, int kb, int shift, const float* groups, float* scale) {
    int least = INT_MAX;
    for (int i = 0; i < LANES; ++i) {
      const int block = first[i] + kb, group = block >> shift;
      const int left = ((group + 1) << shift) - block;
      scale[i] = groups[group];
      least = left < least ? left : least;
    }
    return least;
  }

  struct NestedCode {
    const float* code;
    explicit NestedCode(const float* c) : code(c) {}
  };

  // 64 codes of absmax_q: byte 4 i + j is lane i of block j; out is [4][16].
  static void look_up_scale_codes(const NestedCode& nested, const uint8_t* codes, float* out) {
    for (int i = 0; i < LANES; ++i)
      for (int j = 0; j < 4; ++j) out[j * LANES + i] = nested.code[codes[4 * i + j]];
  }

  // Calls body(group, K(), values of input GROUP * group + K in 16 rows); K is an integral_constant: addresses fold.
  template <class Format, class Body>
  static void for_each_input4(const uint8_t* tile, const Body& body) {
    for (int k = 0; k < TILE_K4; k += 2) {
      float even[LANES], odd[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const float* pair = CENTROID_PAIRS<Format>.value[tile[tile16x64_byte(lane_row(lane), k, TILE_K4)]];
        even[lane] = pair[0];
        odd[lane] = pair[1];
      }
      body(k / 2, Constant<0>(), load(even));
      body(k / 2, Constant<1>(), load(odd));
    }
  }

  template <class Format, class Body>
  static void for_each_input8(const uint8_t* tile, const Body& body) {
    for (int k = 0; k < TILE_K8; k += 2) {
      float even[LANES], odd[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const uint8_t* pair = tile + tile16x32_byte(lane_row(lane), k, TILE_K8);
        even[lane] = static_cast<float>(pair[0] - Format::BIAS);
        odd[lane] = static_cast<float>(pair[1] - Format::BIAS);
      }
      body(k / 2, Constant<0>(), load(even));
      body(k / 2, Constant<1>(), load(odd));
    }
  }

  // The rows of a tile, `ld` elements apart, times their scales (lane order).
  template <class Format, class T>
  static void dequantize_tile4(const uint8_t* tile, const float* scales, T* out, int64_t ld, int rows) {
    for (int r = 0; r < rows; ++r) {
      const float scale = scales[2 * (r % 8) + r / 8];
      for (int k = 0; k < TILE_K4; k += 2) {
        const float* pair = CENTROID_PAIRS<Format>.value[tile[tile16x64_byte(r, k, TILE_K4)]];
        out[r * ld + k] = from_float<T>(pair[0] * scale);
        out[r * ld + k + 1] = from_float<T>(pair[1] * scale);
      }
    }
  }

  // The same for 8 bit: `inputs` values of each row, times first (lane order), times second.
  template <class Format, class T>
  static void dequantize_tile8(const uint8_t* tile, const float* first, float second, T* out, int64_t ld, int rows,
                               int inputs) {
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < inputs; ++k) {
        const float value = static_cast<float>(tile[tile16x32_byte(r, k, TILE_K8)] - Format::BIAS);
        out[r * ld + k] = from_float<T>(value * first[2 * (r % 8) + r / 8] * second);
      }
  }

  // `count` flat 4-bit values, from a high nibble on, times one scale.
  template <class Format, class T>
  static void dequantize_run(const uint8_t* codes, float scale, T* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      out[i] = from_float<T>(CENTROID_PAIRS<Format>.value[codes[i / 2]][i % 2] * scale);
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
