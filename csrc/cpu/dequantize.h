// Whole weights to rows of float32, float16 or bfloat16, bit-identical to bitsandbytes: scale, product, one rounding.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// One block of a flat weight: `count` values from element `first`, which may start on either nibble of a byte.
template <class Isa, class Format, class T>
void dequantize_block(const uint8_t* codes, int64_t first, int64_t count, float scale, T* out) {
  const auto& pairs = CENTROID_PAIRS<Format>.value;
  for (int64_t e = first; e < first + count; ++e) out[e] = from_float<T>(pairs[codes[e / 2]][e % 2] * scale);
}

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
      dequantize_block<Isa, Format>(w.qweight, first, count, scale, out);
    }
  });
}

// Rows of an 8-bit tile. With one scale a row the reference multiplies by the row maximum, then by 1/127.
template <class Format, class T>
void dequantize_tile8(const nf4l_weight& w, const uint8_t* tile, const float* scale, int64_t row, int rows, int inputs, T* out) {
  for (int r = 0; r < rows; ++r) {
    const float first = w.blocksize ? scale[2 * (r % 8) + r / 8] : static_cast<const float*>(w.scales)[row + r];
    const float second = w.blocksize ? 1.0f : INV_127;
    for (int k = 0; k < inputs; ++k) {
      const float value = static_cast<float>(tile[tile16x32_byte(r, k, TILE_K8)] - Format::BIAS);
      out[r * w.k + k] = from_float<T>(value * first * second);
    }
  }
}

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
        if constexpr (IS_4BIT<Format>) {
          Isa::template dequantize_tile4<Format>(tile, scale, out + row * w.k + k, w.k, rows);
        } else {
          dequantize_tile8<Format>(w, tile, scale, row, rows, inputs, out + row * w.k + k);
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
