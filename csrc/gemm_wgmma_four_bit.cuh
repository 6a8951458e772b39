// NF4 and FP4 for the prefill engine: how their codes and scales become wgmma operands.
//
// A weight is round(centroid * scale) with both in float32 and one rounding to T, bit for bit what dequantize gives: then the
// product differs from that of dequantize and GEMM only by the order of its sums. Scaling the products of a k tile instead
// (small_wgmma.cuh) would need a second set of sums, for which a tile of 128 x 256 leaves no registers.
//
// A format gives the engine
//     Weight        its part of the kernel's arguments
//     BYTES         what it needs of shared memory
//     SCALE_WARPS   warps of the producer that make the scales of every stage, by produce_scales()
//     Decoder<T>    a consumer thread's way from codes to fragments of T: load() a k tile, then for each k16 step
//                   look_up(), which only starts, and finish()
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "decode.cuh"
#include "four_bit.cuh"
#include "four_bit.h"
#include "gemm_wgmma_load.cuh"
#include "scale.cuh"

namespace nf4l {

struct GemmFourBitWeight : FourBitWeight {
  float centroids[16];
};

struct GemmFourBit {
  using Weight = GemmFourBitWeight;
  static constexpr GemmFormatBytes BYTES = GEMM_FOUR_BIT;
  static constexpr int SCALE_WARPS = 2;

  template <int THREADS>
  __device__ __forceinline__ static void fill_table(char* smem, const Weight& weight, int thread) {
    FloatPairTable::fill<THREADS>(smem, weight.centroids, thread);
  }

  // The scales of rows g and g + 8 of a row tile, two neighbours of the stage's [row_tiles][16].
  template <int SHAPE>
  __device__ __forceinline__ static void produce_scales(const GemmArgs<Weight>& args,
                                                        const GemmRing<GemmFourBit, SHAPE>& ring, int thread);

  template <class T>
  struct Decoder;
};

// Rows g and g + 8 of one row tile, for the thread that makes their scales: one k tile after the other.
struct ScaleRows {
  const uint8_t* at;  // the lane's own in the row tile's scales; NULL for rows that do not exist
  bool second;        // row g + 8 exists
  int group;          // second-level group in which the first block of row g lies
  int offset;         // of that block in its group
  uint2 codes;        // of both rows, for a burst of k tiles

  // Row g of a row tile, from k tile `k` on.
  __device__ __forceinline__ void begin(const FourBitWeight& w, int row_tile, int g, int k) {
    const int row = row_tile * TILE_ROWS + g;
    const int tile_bytes = w.nested_code ? (w.k_tiles + BURST - 1) / BURST * 64 : w.k_tiles * 64;
    at = row < w.n ? w.scales + int64_t(row_tile) * tile_bytes + 8 * g : nullptr;
    second = row + 8 < w.n;
    const int64_t block = w.first_block + int64_t(row) * w.blocks_per_row;
    group = int(block >> w.log2_group);
    offset = int(block) & ((1 << w.log2_group) - 1);
    load(w, k);
  }

  __device__ __forceinline__ void load(const FourBitWeight& w, int k) {
    if (w.nested_code && at) codes = __ldg(reinterpret_cast<const uint2*>(at + k / BURST * 64));
  }

  // The scales of k tile `k`, which must be the first or follow on the one before. Padding rows have none: their second-level
  // group may not exist.
  __device__ __forceinline__ float2 scales(const FourBitWeight& w, int k) {
    if (!at) return {0.0f, 0.0f};
    if (!w.nested_code) return __ldg(reinterpret_cast<const float2*>(at + k * (TILE_ROWS * 4)));
    if (k % BURST == 0) load(w, k);
    const float2 scales = {nested(w, codes.x, k, offset), second ? nested(w, codes.y, k, offset + 8 * w.blocks_per_row) : 0.0f};
    return scales;
  }

  __device__ __forceinline__ float nested(const FourBitWeight& w, uint32_t four, int k, int row_offset) const {
    const float absmax = __ldg(w.nested_absmax + group + ((row_offset + k) >> w.log2_group));
    return nested_scale(__ldg(w.nested_code + (four >> k % BURST * 8 & 255)), absmax, __ldg(w.nested_offset));
  }
};

template <int SHAPE>
__device__ __forceinline__ void GemmFourBit::produce_scales(const GemmArgs<Weight>& args,
                                                            const GemmRing<GemmFourBit, SHAPE>& ring, int thread) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  constexpr int TILES = SCALE_WARPS * WARP / 8, TURNS = S.row_tiles() / TILES;  // row tiles of all threads, and how often
  const int row_tile = thread / 8, g = thread % 8;
  GemmPosition<S.stages> at(1);
  GemmPieces piece(args.cut, blockIdx.x);
  while (piece.next()) {
    const int first = OutTile(args.cut, piece.tile).row_block * S.row_tiles() + row_tile;
    ScaleRows rows[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) rows[i].begin(args, first + i * TILES, g, piece.begin);
    for (int k = piece.begin; k < piece.end; ++k) {
      float2 scales[TURNS];
#pragma unroll
      for (int i = 0; i < TURNS; ++i) scales[i] = rows[i].scales(args, k);
      mbarrier_wait(ring.empty(at.stage), at.phase);
#pragma unroll
      for (int i = 0; i < TURNS; ++i) st_shared_f32x2(ring.scales(at.stage, row_tile + i * TILES) + g * 8, scales[i]);
      __syncwarp();
      if (thread % WARP == 0) mbarrier_arrive(ring.full(at.stage));
      at.step();
    }
  }
}

template <class T>
struct GemmFourBit::Decoder {
  struct Codes {        // a lane's of one row tile and k tile
    uint32_t words[4];  // one for each k16 step
    float2 scale;       // of rows g and g + 8
  };
  struct Looked {
    float2 pair[4];
  };
  const uint32_t table, lane_address;

  __device__ __forceinline__ Decoder(uint32_t smem, int lane)
      : table(smem), lane_address(FloatPairTable::lane_address(lane)) {}

  __device__ __forceinline__ static Codes load(uint32_t codes, uint32_t scales, int lane) {
    const uint4 v = ld_shared_u32x4(codes + lane * LANE_BYTES);
    return {{v.x, v.y, v.z, v.w}, ld_shared_f32x2(scales + lane / 4 * 8)};
  }

  __device__ __forceinline__ Looked look_up(const Codes& codes, int step) const {
    Looked looked;
#pragma unroll
    for (int i = 0; i < 4; ++i) looked.pair[i] = FloatPairTable::look_up(table, codes.words[step], lane_address, i);
    return looked;
  }

  // In order with the volatile instructions around it: a wgmma reads these registers after a fence.
  __device__ __forceinline__ static void finish(const Looked& looked, const Codes& codes, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float s = i % 2 ? codes.scale.y : codes.scale.x;
      a[i] = round_pair_in_order<T>(__fmul_rn(looked.pair[i].x, s), __fmul_rn(looked.pair[i].y, s));
    }
  }
};

template <class T>
GemmFourBitWeight gemm_four_bit_weight(const nf4l_weight& w) {
  GemmFourBitWeight weight = {};
  static_cast<FourBitWeight&>(weight) = four_bit_weight<T>(w);
  for (int c = 0; c < 16; ++c) weight.centroids[c] = w.format == NF4L_NF4 ? Nf4::value(c) : Fp4::value(c);
  return weight;
}

}  // namespace nf4l
