// Formats as the CPU kernels see them: the tables of csrc/codebook.h in the shapes that decoding wants.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// Centroids of a 4-bit format by code.
template <class Format>
struct Centroids {
  float value[16];
  constexpr Centroids() : value() {
    for (int c = 0; c < 16; ++c) value[c] = Format::value(c);
  }
};
template <class Format>
alignas(64) inline constexpr Centroids<Format> CENTROIDS{};

// Bits of a normal or zero float32 at compile time (C++17 has no bit_cast).
constexpr uint32_t float_bits(float value) {
  if (value == 0.0f) return 0;
  float magnitude = value < 0.0f ? -value : value;
  uint32_t exponent = 127 + 23;
  for (; magnitude < 0x1p23f; magnitude *= 2.0f) --exponent;
  for (; magnitude >= 0x1p24f; magnitude *= 0.5f) ++exponent;
  const uint32_t mantissa = static_cast<uint32_t>(magnitude) - (1u << 23);
  return (value < 0.0f ? 0x80000000u : 0u) | exponent << 23 | mantissa;
}

// Both values of a byte of two codes, high nibble first.
template <class Format>
struct CentroidPairs {
  float value[256][2];
  constexpr CentroidPairs() : value() {
    for (int b = 0; b < 256; ++b) {
      value[b][0] = Format::value(b >> 4);
      value[b][1] = Format::value(b & 15);
    }
  }
};
template <class Format>
inline constexpr CentroidPairs<Format> CENTROID_PAIRS{};

template <class Format>
inline constexpr bool IS_4BIT = Format::FORMAT == NF4L_NF4 || Format::FORMAT == NF4L_FP4;

// Calls body(Format()) with the type of `format`.
template <class Body>
auto with_format(int32_t format, const Body& body) {
  switch (format) {
    case NF4L_NF4:
      return body(Nf4());
    case NF4L_FP4:
      return body(Fp4());
    case NF4L_W8_S8:
      return body(W8S8());
    default:
      return body(W8U8());
  }
}

// Calls body(T()) with the element type of `dtype`.
template <class Body>
auto with_dtype(int32_t dtype, const Body& body) {
  switch (dtype) {
    case NF4L_F32:
      return body(float());
    case NF4L_F16:
      return body(Half());
    default:
      return body(Bf16());
  }
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
