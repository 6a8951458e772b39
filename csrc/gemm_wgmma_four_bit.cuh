// NF4 and FP4 for the prefill engine: how their codes and scales become wgmma operands.
//
// A weight is round(centroid * scale) with both in float32 and one rounding to T, bit for bit what dequantize gives:
// then the product differs from that of dequantize and GEMM only by the order of its sums. Scaling the products of a k
// tile instead (small_wgmma.cuh) would need a second set of sums, for which a tile of 128 x 256 leaves no registers.
//
// A format gives the engine
//     Weight        its part of the kernel's arguments
//     BYTES         what it needs of shared memory
//     scale_warps() of the producer that make the scales of every stage, by produce_scales()
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
#include "tma.cuh"

namespace nf4l {

struct GemmFourBitWeight : FourBitWeight {
  CUtensorMap code_map;
  float centroids[16];
};

// nested_code in the gaps of the pair table: 32 values to each of its last lines.
struct NestedCodeTable {
  static constexpr int FIRST_LINE = 256 - 8;

  __device__ __forceinline__ static uint32_t address(uint32_t table, uint32_t code) {
    return table + GEMM_FOUR_BIT.gap + (FIRST_LINE + code / 32) * GEMM_FOUR_BIT.stride + code % 32 * 4;
  }

  template <int THREADS>
  __device__ __forceinline__ static void fill_async(uint32_t table, const float* nested_code, int thread) {
    for (int i = thread; i < 256; i += THREADS) cp_async_4(address(table, i), nested_code + i, true);
  }
};

struct GemmFourBit {
  using Weight = GemmFourBitWeight;
  static constexpr GemmFormatBytes BYTES = GEMM_FOUR_BIT;
  NF4L_HD static constexpr int scale_warps(GemmShape shape) { return shape.block_rows() / 2 / WARP; }

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

// Rows g and g + 8 of one row tile, for the thread that makes their scales: four k tiles at a time, which have come
// from memory while the four before them were made.
struct ScaleRows {
  const GemmFourBitWeight& weight;
  const uint8_t* at;  // the lane's own in the row tile's scales; NULL for rows that do not exist
  bool second;        // row g + 8 exists
  int group;          // second-level group in which the first block of row g lies
  int offset;         // of that block in its group
  // With second-level scales: those of the burst's first and last k tile, of both rows, then the codes of both rows.
  // Without: the scales, a pair for each k tile.
  uint32_t words[2 * BURST];

  __device__ __forceinline__ ScaleRows(const GemmFourBitWeight& w, int row_tile, int g) : weight(w) {
    const int row = row_tile * TILE_ROWS + g;
    const int tile_bytes = w.nested_code ? (w.k_tiles + BURST - 1) / BURST * 64 : w.k_tiles * 64;
    at = row < w.n ? w.scales + int64_t(row_tile) * tile_bytes + 8 * g : nullptr;
    second = row + 8 < w.n;
    const int64_t block = w.first_block + int64_t(row) * w.blocks_per_row;
    group = int(block >> w.log2_group);
    offset = int(block) & ((1 << w.log2_group) - 1);
  }

  // Where the scale of k tile `k` of row g + 8 h finds its second level.
  __device__ __forceinline__ int group_of(int k, int h) const {
    return group + ((offset + k + h * 8 * weight.blocks_per_row) >> weight.log2_group);
  }

  // Starts to fetch what k tiles k .. k + 3 need. What does not exist is not read, and is 0.
  __device__ __forceinline__ void fetch(int k) {
    const int last = min(k + BURST, weight.k_tiles) - 1;
#pragma unroll
    for (int i = 0; i < 2 * BURST; ++i) words[i] = 0;
    if (!at || k > last) return;
    if (weight.nested_code) {
      const uint32_t* absmax = reinterpret_cast<const uint32_t*>(weight.nested_absmax);
      const uint2 codes = __ldg(reinterpret_cast<const uint2*>(at + k * 16));
      words[4] = codes.x, words[5] = codes.y;
      words[0] = __ldg(absmax + group_of(k, 0));
      words[1] = __ldg(absmax + group_of(last, 0));
      if (second) {
        words[2] = __ldg(absmax + group_of(k, 1));
        words[3] = __ldg(absmax + group_of(last, 1));
      }
    } else {
#pragma unroll
      for (int j = 0; j < BURST; ++j) {
        if (k + j > last) break;
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(at + (k + j) * (TILE_ROWS * 4)));
        words[2 * j] = pair.x, words[2 * j + 1] = pair.y;
      }
    }
  }

  // Scales of rows g and g + 8 for k tile k + j. Padding rows have none: their second-level group may not exist.
  __device__ __forceinline__ float2 scales(uint32_t table, float nested_offset, int k, int j) const {
    if (!weight.nested_code) return {__uint_as_float(words[2 * j]), __uint_as_float(words[2 * j + 1])};
    if (!at) return {0.0f, 0.0f};
    return {nested(table, nested_offset, k, j, 0), second ? nested(table, nested_offset, k, j, 1) : 0.0f};
  }

  __device__ __forceinline__ float nested(uint32_t table, float nested_offset, int k, int j, int h) const {
    const uint32_t absmax = group_of(k + j, h) == group_of(k, h) ? words[2 * h] : words[2 * h + 1];
    const uint32_t code = words[4 + h] >> (8 * j) & 255;
    return nested_scale(ld_shared_f32(NestedCodeTable::address(table, code)), __uint_as_float(absmax), nested_offset);
  }
};

template <int SHAPE>
__device__ __forceinline__ void GemmFourBit::produce_scales(const GemmArgs<Weight>& args,
                                                            const GemmRing<GemmFourBit, SHAPE>& ring, int thread) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  constexpr int THREADS = scale_warps(S) * WARP;
  static_assert(THREADS == S.block_rows() / 2, "a pair of rows a thread");
  const int row_tile = thread / 8, g = thread % 8;
  float nested_offset = 0.0f;
  if (args.nested_code) {
    NestedCodeTable::fill_async<THREADS>(ring.smem, args.nested_code, thread);
    nested_offset = __ldg(args.nested_offset);
  }
  RingPosition<S.stages> at(1);
  GemmWork work(args.grid, blockIdx.x);
  bool table_filled = !args.nested_code;
  while (work.next()) {
    ScaleRows rows(args, work.row_block * S.row_tiles() + row_tile, g);
    const int first = work.begin / BURST * BURST;
    rows.fetch(first);
    if (!table_filled) {
      cp_async_wait_all();
      asm volatile("bar.sync 5, %0;" ::"n"(THREADS) : "memory");
      table_filled = true;
    }
    for (int k = first; k < work.end; k += BURST) {
      float2 scales[BURST];
#pragma unroll
      for (int j = 0; j < BURST; ++j) scales[j] = rows.scales(ring.smem, nested_offset, k, j);
      rows.fetch(k + BURST);
#pragma unroll
      for (int j = 0; j < BURST; ++j) {
        if (k + j < work.begin || k + j >= work.end) continue;
        mbarrier_wait(ring.empty(at.stage), at.phase);
        st_shared_f32x2(ring.scales(at.stage, row_tile) + g * 8, scales[j]);
        __syncwarp();
        if (thread % WARP == 0) mbarrier_arrive(ring.full_codes(at.stage));
        at.step();
      }
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
