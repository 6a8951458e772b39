// Whole weights to rows of float32, float16 or bfloat16, bit-identical to bitsandbytes: scale, product, one rounding.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Isa, class Format, class T>
void dequantize_flat(const nf4l_weight& w, T* out, int threads) {
  const int64_t numel = w.n * w.k, blocks = ceil_div(numel, w.blocksize);
  const int64_t grain = ceil_div(16384, w.blocksize);
  parallel_for(blocks, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float scale;
      if (w.nested_code) {
        const float code = w.nested_code[static_cast<const uint8_t*>(w.scales)[b]];
        scale = code * w.nested_absmax[b / NESTED_BLOCKSIZE];
        scale = scale + *w.nested_offset;
      } else {
        scale = static_cast<const float*>(w.scales)[b];
      }
      const int64_t first = b * w.blocksize;
      const int64_t count = first + w.blocksize < numel ? w.blocksize : numel - first;
      Isa::template dequantize_run<Format>(w.qweight + first / 2, scale, out + first, count);
    }
  });
}

// The factors of a strip's 8-bit values, in lane order. The reference multiplies by the row maximum and then by 1/127,
// two roundings, or by the group's scale.
struct Factors8 {
  float first[LANES];
  float second;

  Factors8(const nf4l_weight& w, int64_t strip) : second(INV_127) {
    for (int i = 0; i < LANES; ++i) {
      const int64_t row = strip * TILE_ROWS + lane_row(i);
      first[i] = row < w.n ? static_cast<const float*>(w.scales)[row] : 0.0f;
    }
  }
  explicit Factors8(const float* group_scales) : second(1.0f) { memcpy(first, group_scales, sizeof(first)); }
};

template <class Isa, class Format, class T>
int dequantize_tiles(const nf4l_weight& w, T* out, int threads) {
  const Tiling tiling = tiling_of(w);
  const typename Isa::NestedCode code(w.nested_code);
  std::atomic<bool> short_of_memory{false};
  parallel_for(tiling.strips, 1, threads, [&](int64_t begin, int64_t end) {
    auto* room = static_cast<float*>(scratch(Scratch::WORKER, tiling.scale_vectors * LANES * sizeof(float)));
    if (!room) {
      short_of_memory = true;
      return;
    }
    for (int64_t strip = begin; strip < end; ++strip) {
      const float* scales = strip_scales<Isa>(w, code, strip, room);
      const int64_t row = strip * TILE_ROWS;
      const int rows = static_cast<int>(w.n - row < TILE_ROWS ? w.n - row : TILE_ROWS);
      for (int64_t kt = 0; kt < tiling.k_tiles; ++kt) {
        const uint8_t* tile = w.qweight + (strip * tiling.k_tiles + kt) * TILE_BYTES;
        const int64_t k = kt * tiling.tile_k;
        const int inputs = static_cast<int>(w.k - k < tiling.tile_k ? w.k - k : tiling.tile_k);
        const float* scale = scales + (kt >> tiling.scale_shift) * LANES;
        T* to = out + row * w.k + k;
        if constexpr (IS_4BIT<Format>) {
          Isa::template dequantize_tile4<Format>(tile, scale, to, w.k, rows);
        } else {
          const Factors8 factors = w.blocksize ? Factors8(scale) : Factors8(w, strip);
          Isa::template dequantize_tile8<Format>(tile, factors.first, factors.second, to, w.k, rows, inputs);
        }
      }
    }
  });
  return short_of_memory ? NF4L_USE_GEMM : NF4L_OK;
}

template <class Isa>
int dequantize(const nf4l_weight& w, int32_t dtype, void* out, int threads) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return with_format(w.format, [&](auto format) -> int {
      using Format = decltype(format);
      if constexpr (IS_4BIT<Format>) {
        if (w.layout == NF4L_FLAT) {
          dequantize_flat<Isa, Format>(w, static_cast<T*>(out), threads);
          return NF4L_OK;
        }
      }
      return dequantize_tiles<Isa, Format>(w, static_cast<T*>(out), threads);
    });
  });
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
