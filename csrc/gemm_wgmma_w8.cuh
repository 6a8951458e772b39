// 8-bit weights for the prefill engine: converted in registers (convert8.cuh), without tables and without scales in the loop.
// The scale of a row multiplies the finished sums. Weights with group scales do not come here.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "codebook.h"
#include "convert.cuh"
#include "convert8.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "nf4linear.h"

namespace nf4l {

struct GemmW8Weight {
  static constexpr bool TRANSPOSABLE = true;
  const uint8_t* codes;     // [row_tiles][k_tiles][2][512]
  const float* row_maxima;  // [n]
  int n, row_tiles, k_tiles;

  __device__ __forceinline__ float row_scale(int row) const { return row < n ? __ldg(row_maxima + row) * INV_127 : 0.0f; }
};

template <class Code>
struct GemmW8 {
  using Weight = GemmW8Weight;
  static constexpr GemmFormatBytes BYTES = GEMM_EIGHT_BIT;
  static constexpr int SCALE_WARPS = 0;

  template <int THREADS>
  __device__ __forceinline__ static void fill_table(char*, const Weight&, int) {}
  template <int SHAPE>
  __device__ __forceinline__ static void produce_scales(const GemmArgs<Weight>&, const GemmRing<GemmW8, SHAPE>&, int) {}

  template <class T>
  struct Decoder {
    struct Codes {        // a lane's of one row tile and k tile
      uint32_t words[8];  // two for each k16 step
    };
    struct Looked {
      uint32_t words[2];
    };

    __device__ __forceinline__ Decoder(uint32_t, int) {}

    __device__ __forceinline__ static Codes load(uint32_t codes, uint32_t, int lane) {
      const uint4 u = ld_shared_u32x4(codes + lane * LANE_BYTES);
      const uint4 v = ld_shared_u32x4(codes + TILE_BYTES + lane * LANE_BYTES);
      return {{u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w}};
    }

    __device__ __forceinline__ static Looked look_up(const Codes& codes, int step) {
      return {{codes.words[2 * step], codes.words[2 * step + 1]}};
    }

    __device__ __forceinline__ static void finish(const Looked& looked, const Codes&, uint32_t (&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = Convert8<T>::template pair_of<Code>(looked.words[i / 2], i % 2);
    }
  };
};

inline GemmW8Weight gemm_w8_weight(const nf4l_weight& w) {
  return {w.qweight, static_cast<const float*>(w.scales), int(w.n), int(ceil_div(w.n, TILE_ROWS)), int(w.k / GEMM_K)};
}

}  // namespace nf4l
