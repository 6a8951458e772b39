// The small-batch engine's ways in: what a block works on, and how weights, scales and activations reach it. The engine
// itself, with the story of both files, is small_batch.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "copy.cuh"
#include "four_bit.cuh"
#include "layout.h"
#include "mma_sm80.cuh"
#include "small_batch_plan.h"

namespace nf4l {

struct SmallBatchArgs : FourBitWeight {
  const char* x;                // [m] rows of k 16-bit values, 16-byte aligned
  int64_t x_row_bytes;
  const void* bias;             // [n] or NULL
  void* y;                      // [m, n]
  float* partials;              // [slices][groups][lane_results][32]
  unsigned* arrivals;           // [parts], zero before and after
  int m;
  int groups, base_groups, extra_groups, slice_tiles;
  bool dependent;               // launched before the previous kernel ended
  uint32_t zero;                // 0, and no compiler knows it
};

// What a block works on.
struct BlockWork {
  int first_group, groups;  // row groups
  int first_tile, tiles;    // of 64 inputs
  int bursts;               // of one row group
  int units;

  template <class Args>
  __device__ __forceinline__ explicit BlockWork(const Args& a) {
    const int part = blockIdx.x;
    first_group = part * a.base_groups + min(part, a.extra_groups);
    groups = a.base_groups + (part < a.extra_groups);
    first_tile = blockIdx.y * a.slice_tiles;
    tiles = min(a.k_tiles - first_tile, a.slice_tiles);
    bursts = (tiles + BURST - 1) / BURST;
    units = groups * bursts;
  }
};

// The weight of a warp's stretch, a burst ahead of its use.
template <int R>
struct WeightStream {
  uint4 codes[2][BURST][R] = {};
  uint2 scales[2][R] = {};  // eight codes, or two float32
  const uint8_t* next_codes;
  const uint8_t* next_scales;
  int64_t row_bytes, wrap_bytes;  // from one tile row to the next; from a group's last burst to the next group's first
  int scale_row_bytes, scale_wrap_bytes, scale_burst_bytes;
  int tile_row, burst, left;      // of the next burst; left: bursts to go

  __device__ __forceinline__ WeightStream(const SmallBatchArgs& a, const BlockWork& work, int begin, int end,
                                          int lane) {
    const int group = begin / work.bursts;
    const bool nested = a.nested_code != nullptr;
    tile_row = (work.first_group + group) * R;
    burst = begin - group * work.bursts;
    left = end - begin;
    row_bytes = int64_t(a.k_tiles) * TILE_BYTES;
    wrap_bytes = R * row_bytes - int64_t(work.bursts) * BURST * TILE_BYTES;
    const int tile = work.first_tile + burst * BURST;
    next_codes = a.codes + tile_row * row_bytes + int64_t(tile) * TILE_BYTES + lane * LANE_BYTES;
    // Both kinds of scales are 64 bytes for 16 rows; codes cover a burst, float32 scales one tile.
    scale_row_bytes = (nested ? (a.k_tiles + BURST - 1) / BURST : a.k_tiles) * 64;
    scale_burst_bytes = nested ? 64 : BURST * 64;
    scale_wrap_bytes = R * scale_row_bytes - work.bursts * scale_burst_bytes;
    next_scales = a.scales + int64_t(tile_row) * scale_row_bytes + (nested ? tile / BURST : tile) * 64 + lane / 4 * 8;
  }

  // Issues the next burst into codes[S]. `after` is 0 and comes out of the burst before: ptxas tracks all these loads
  // by one scoreboard, and a use of the old burst would wait for the new one too if that were issued first.
  template <int S>
  __device__ __forceinline__ void load(const SmallBatchArgs& a, const BlockWork& work, int lane, uint32_t after) {
    const uint8_t* from = next_codes + after;
    const int tiles = left > 0 ? work.tiles - burst * BURST : 0;
    const int scale_tile = a.nested_code ? 0 : min(lane % 4, tiles - 1) * 64;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int wanted = R == 1 || tile_row + r < a.row_tiles ? tiles : 0;
#pragma unroll
      for (int j = 0; j < BURST; ++j) ld_stream_if(codes[S][j][r], from + r * row_bytes + j * TILE_BYTES, j < wanted);
      ld_if(scales[S][r], next_scales + r * scale_row_bytes + scale_tile, wanted > 0);
    }
    --left;
    next_codes += BURST * TILE_BYTES;
    next_scales += scale_burst_bytes;
    if (++burst == work.bursts) {
      burst = 0;
      tile_row += R;
      next_codes += wrap_bytes;
      next_scales += scale_wrap_bytes;
    }
  }
};

// Activations of the slice, resident. One token: each 64-input tile is 128 bytes in fragment order, lane t's pairs side
// by side. More: rows of 128 bytes, whose 16-byte chunks are swizzled by the row for ldmatrix.
template <int TOKENS, int THREADS>
struct Activations {
  static constexpr int TILE = TOKENS * 128;
  static constexpr int COLUMN_TILES = TOKENS == 1 ? 1 : TOKENS / 8;
  uint32_t base;  // of this lane
  uint32_t chunk; // of this lane: byte of its swizzled 16-byte chunk

  __device__ __forceinline__ Activations(uint32_t smem, int lane) {
    base = smem + (TOKENS == 1 ? lane % 4 * 16 : lane % 8 * 128);
    chunk = (lane / 8 ^ lane % 8) * 16;
  }

  // Zeros beyond the slice's last tile and the last token. Each thread has its place in a tile and goes from tile to
  // tile: with dependent launches nothing else happens meanwhile, so the loop is three instructions a copy.
  template <class Args>
  __device__ __forceinline__ static void load_async(const Args& a, const BlockWork& work, uint32_t smem) {
    const char* from = a.x + int64_t(work.first_tile) * 128;
    const int tiles = work.bursts * BURST;
    if constexpr (TOKENS == 1) {
      constexpr int STEP = THREADS / WARP;  // tiles; lane l copies its word l, a pair of inputs of k16 step s
      const int first = threadIdx.x / WARP, l = threadIdx.x % WARP;
      const int s = l / 8, half = l / 4 % 2, t = l % 4;
      from += first * 128 + l * 4;
      uint32_t to = smem + first * 128 + s / 2 * 64 + t * 16 + s % 2 * 8 + half * 4;
      for (int tile = first; tile < tiles; tile += STEP, from += STEP * 128, to += STEP * 128) {
        cp_async_4(to, from, tile < work.tiles);
      }
    } else {
      constexpr int STEP = THREADS / 8 / TOKENS;  // tiles; eight threads copy a row of 128 bytes
      static_assert(STEP > 0 && THREADS / 8 % TOKENS == 0, "all rows of a tile at once");
      const int c = threadIdx.x % 8, token = threadIdx.x / 8 % TOKENS, first = threadIdx.x / 8 / TOKENS;
      const bool exists = token < a.m;
      from += (exists ? token * a.x_row_bytes : 0) + first * 128 + c * 16;
      uint32_t to = smem + first * TILE + token * 128 + (c ^ token % 8) * 16;
      for (int tile = first; tile < tiles; tile += STEP, from += STEP * 128, to += STEP * TILE) {
        cp_async_16(to, from, exists && tile < work.tiles);
      }
    }
  }

  // B fragments of one tile: b[c][2 s], b[c][2 s + 1] for token tile c and k16 step s. With one token only lanes of
  // column 0 (g = 0) hold it; the others' stay 0.
  __device__ __forceinline__ void fragments(uint32_t (&b)[COLUMN_TILES][8], int tile, int lane) const {
    const uint32_t at = base + tile * TILE;
    if constexpr (TOKENS == 1) {
      if (lane < 4) {
        const uint4 low = ld_shared_u32x4(at), high = ld_shared_u32x4(at + 64);
        b[0][0] = low.x, b[0][1] = low.y, b[0][2] = low.z, b[0][3] = low.w;
        b[0][4] = high.x, b[0][5] = high.y, b[0][6] = high.z, b[0][7] = high.w;
      }
    } else {
#pragma unroll
      for (int c = 0; c < COLUMN_TILES; ++c) {
        ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(b[c][0]), at + c * 1024 + chunk);
        ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(b[c][4]), at + c * 1024 + (chunk ^ 64));
      }
    }
  }
};

}  // namespace nf4l
