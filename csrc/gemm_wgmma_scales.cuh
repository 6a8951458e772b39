// Scales of 4-bit weights for the prefill engine of Hopper, made by warps of its producer.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "copy.cuh"
#include "four_bit.cuh"
#include "four_bit.h"
#include "scale.cuh"

namespace nf4l {

// Scales of rows g and g + 8 of one row tile, for the thread that makes them: four k tiles at a time, asked for one
// burst ahead. Rows that do not exist are given scales of rows that do, or whatever fills the last row tile: their
// products are never stored.
//
// One thread's instructions take 4 to 6 cycles each here, and the first of all wgmma waits for the first scales.
struct NestedScales {
  struct Burst {
    uint2 codes;                // of both rows, a byte for each k tile
    float absmax[2], after[2];  // of both rows: that of the first k tile, and of those behind the next group's start
    int inside[2];              // k tiles before that
  };
  const FourBitWeight& weight;
  const uint8_t* at;       // the two rows' codes of k tile 0
  int group[2], place[2];  // of the two rows' first block: its group, and where it is in it

  // Brings the table of second-level codes, float [256], asynchronously (cp_async_wait_all).
  template <int THREADS>
  __device__ __forceinline__ static void begin(const FourBitWeight& weight, uint32_t table, int thread) {
    for (int i = thread; i < 256; i += THREADS) cp_async_4(table + i * 4, weight.nested_code + i, true);
  }

  __device__ __forceinline__ NestedScales(const FourBitWeight& w, int row_tile, int g) : weight(w) {
    row_tile = min(row_tile, w.row_tiles - 1);
    at = w.scales + int64_t(row_tile) * ((w.k_tiles + BURST - 1) / BURST * 64) + 8 * g;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t block = w.first_block + int64_t(min(row_tile * TILE_ROWS + g + 8 * h, w.n - 1)) * w.blocks_per_row;
      group[h] = int(block >> w.log2_group);
      place[h] = int(block) & ((1 << w.log2_group) - 1);
    }
  }

  // What scales() takes beside the table.
  __device__ __forceinline__ static float offset_of(const FourBitWeight& w) { return __ldg(w.nested_offset); }

  // Of k tiles k .. k + 3, as many as there are.
  __device__ __forceinline__ Burst fetch(int k) const {
    Burst burst;
    burst.codes = __ldg(reinterpret_cast<const uint2*>(at + k * 16));
    const int last = min(k + BURST, weight.k_tiles) - 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* absmax = weight.nested_absmax + group[h];
      burst.absmax[h] = __ldg(absmax + ((place[h] + k) >> weight.log2_group));
      burst.after[h] = __ldg(absmax + ((place[h] + last) >> weight.log2_group));
      burst.inside[h] = -(place[h] + k) & ((1 << weight.log2_group) - 1);
    }
    return burst;
  }

  // Of the burst's k tile j.
  __device__ __forceinline__ static float2 scales(const Burst& burst, uint32_t table, float offset, int j) {
    return {scale(burst, table, offset, j, 0), scale(burst, table, offset, j, 1)};
  }
  __device__ __forceinline__ static float scale(const Burst& burst, uint32_t table, float offset, int j, int h) {
    const uint32_t code = (h ? burst.codes.y : burst.codes.x) >> (8 * j) & 255;
    // `inside` is 0 where the burst begins with a group: then it is in it whole.
    const bool crossed = burst.inside[h] != 0 && j >= burst.inside[h];
    return nested_scale(ld_shared_f32(table + code * 4), crossed ? burst.after[h] : burst.absmax[h], offset);
  }
};

// The same without double quantization.
struct PlainScales {
  struct Burst {
    float2 scales[BURST];
  };
  const int k_tiles;
  const float2* at;  // the two rows' of k tile 0

  template <int THREADS>
  __device__ __forceinline__ static void begin(const FourBitWeight&, uint32_t, int) {}
  __device__ __forceinline__ static float offset_of(const FourBitWeight&) { return 0.0f; }

  __device__ __forceinline__ PlainScales(const FourBitWeight& w, int row_tile, int g)
      : k_tiles(w.k_tiles),
        at(reinterpret_cast<const float2*>(w.scales) + int64_t(min(row_tile, w.row_tiles - 1)) * w.k_tiles * 8 + g) {}

  __device__ __forceinline__ Burst fetch(int k) const {
    Burst burst;
#pragma unroll
    for (int j = 0; j < BURST; ++j) burst.scales[j] = __ldg(at + min(k + j, k_tiles - 1) * 8);
    return burst;
  }
  __device__ __forceinline__ static float2 scales(const Burst& burst, uint32_t, float, int j) {
    return burst.scales[j];
  }
};

}  // namespace nf4l
