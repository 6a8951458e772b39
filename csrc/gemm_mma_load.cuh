// The mma.sync prefill engine's ways in: copies of x and codes, block scales, product tables. The engine itself, with
// the story of all its files, is gemm_mma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "four_bit.cuh"
#include "four_bit.h"
#include "gemm_mma_plan.h"
#include "nf4linear.h"
#include "product_table.cuh"
#include "scale.cuh"
#include "validate.h"

namespace nf4l {

// Its first_block lies in the first second-level group of nested_absmax.
struct GemmMmaArgs : FourBitWeight {
  float centroids[16];
  const char* x;       // [m] rows of k 16-bit values, 16-byte aligned
  int64_t x_row_bytes;
  const void* bias;    // [n] or NULL
  void* y;             // [m, n]
  float4* slots;       // [blocks][2][vectors][GROUP_THREADS]
  unsigned* arrivals;  // [blocks], zero before and after
  int m;
  int stages;
  GemmCut cut;
  bool vectors;        // rows of y start at multiples of 16 bytes
};

// But for what blocks share. T is the 16-bit type of x, y and bias.
template <class T>
GemmMmaArgs gemm_mma_args(const GemmMmaPlan& plan, const nf4l_weight& w, const nf4l_linear_args& l) {
  GemmMmaArgs a = {};
  static_cast<FourBitWeight&>(a) = four_bit_weight<T>(w);
  if (a.nested_code) a.nested_absmax += a.first_block >> a.log2_group;
  a.first_block &= (int64_t(1) << a.log2_group) - 1;
  for (int c = 0; c < 16; ++c) a.centroids[c] = w.format == NF4L_NF4 ? Nf4::value(c) : Fp4::value(c);
  a.x = static_cast<const char*>(l.x);
  a.x_row_bytes = l.x_stride * 2;
  a.bias = l.bias;
  a.y = l.y;
  a.m = int(l.m);
  a.stages = plan.stages;
  a.cut = plan.cut;
  a.vectors = a.n % 8 == 0 && aligned(l.y, 16);
  return a;
}

// A thread's part of its group's copies for one output tile, k tile after k tile: the same 16-byte chunk of every
// sixteenth token, and the codes of its warp's row tiles. What lies beyond the last token or row tile is zero.
//
// Rows of x have 128 bytes in a stage, whose chunks are swizzled by the token for ldmatrix.
template <int SHAPE>
struct GemmMmaFeed {
  static constexpr GemmMmaShape S = GEMM_MMA_SHAPES[SHAPE];
  static constexpr int STEP = S.GROUP_THREADS / 8;  // tokens: eight threads copy a row
  const GemmMmaArgs& args;
  const char* x;         // of the thread's first token, and the next k tile
  const uint8_t* codes;  // the lane's, of the warp's first row tile and the next k tile
  int tokens, row_tiles; // from those first ones on, that exist
  uint32_t x_to, codes_to;

  // `ring`: the group's first stage; `thread` of the group; k: the group's first k tile.
  __device__ __forceinline__ GemmMmaFeed(const GemmMmaArgs& a, OutTile out, uint32_t ring, int thread, int k)
      : args(a) {
    const int lane = thread % WARP, warp = thread / WARP, token = thread / 8, chunk = thread % 8;
    const int first_token = out.token_tile * S.tokens + token;
    const int first_row_tile = (out.row_block * S.GROUP_WARPS + warp) * S.ROW_TILES;
    x = a.x + first_token * a.x_row_bytes + int64_t(k) * (GEMM_K * 2) + chunk * 16;
    codes = a.codes + (int64_t(first_row_tile) * a.k_tiles + k) * TILE_BYTES + lane * LANE_BYTES;
    tokens = a.m - first_token;
    row_tiles = a.row_tiles - first_row_tile;
    x_to = ring + token * (GEMM_K * 2) + (chunk ^ token % 8) * 16;
    codes_to = ring + S.x_bytes() + warp * (S.ROW_TILES * TILE_BYTES) + lane * LANE_BYTES;
  }

  // The next k tile into a stage `offset` bytes from the first.
  __device__ __forceinline__ void load(int offset) {
#pragma unroll
    for (int r = 0; r < S.ROW_TILES; ++r) {
      cp_async_16(codes_to + offset + r * TILE_BYTES, codes + int64_t(r) * args.k_tiles * TILE_BYTES, r < row_tiles);
    }
    const char* from = x;
#pragma unroll
    for (int i = 0; i < S.tokens / STEP; ++i) {
      cp_async_16(x_to + offset + i * STEP * (GEMM_K * 2), from, i * STEP < tokens);
      from += STEP * args.x_row_bytes;
    }
    x += S.GROUPS * (GEMM_K * 2);
    codes += S.GROUPS * TILE_BYTES;
  }
};

// One row of a warp's 32, a lane: its block scales. Rows beyond the last take that one's, and their results go nowhere.
struct GemmMmaScales {
  const GemmMmaArgs& args;
  const uint32_t to;  // of the lane, in the group's first stage: four codes, or a float32
  const unsigned row;

  __device__ __forceinline__ GemmMmaScales(const GemmMmaArgs& a, uint32_t to_, int row_)
      : args(a), to(to_), row(min(row_, a.n - 1)) {}

  // What k tile k needs, into a stage `offset` bytes from the first.
  __device__ __forceinline__ void load(unsigned k, int offset) const {
    const unsigned row_tile = row / TILE_ROWS, h = row % TILE_ROWS / 8, g = row % 8;
    const unsigned words = args.nested_code ? (row_tile * ((args.k_tiles + BURST - 1) / BURST) + k / BURST) * 16
                                       : (row_tile * args.k_tiles + k) * TILE_ROWS;
    cp_async_4(to + offset, reinterpret_cast<const uint32_t*>(args.scales) + (words + 2 * g + h), true);
  }

  // Of k tile k, or of the last one; `nested`: nested_code and nested_offset in shared memory. Both kinds take the same
  // way: a branch would keep the compiler from spreading it among the mma.
  __device__ __forceinline__ float scale(unsigned k, int offset, uint32_t nested) const {
    const uint32_t word = ld_shared_u32(to + offset);
    const bool twice = args.nested_code != nullptr;
    k = min(k, unsigned(args.k_tiles) - 1);
    const uint32_t code = word >> k % BURST * 8 & 255;
    const int group = (int(args.first_block) + row * args.blocks_per_row + k) >> args.log2_group;
    const float absmax = __ldg(twice ? args.nested_absmax + group : reinterpret_cast<const float*>(args.scales));
    const float scale = nested_scale(ld_shared_f32(nested + code * 4), absmax, ld_shared_f32(nested + 256 * 4));
    return twice ? scale : __uint_as_float(word);
  }
};

}  // namespace nf4l
