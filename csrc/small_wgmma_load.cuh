// The wgmma engine's ways in: what a block works on, and the warps that feed its rings. The engine itself, with the
// story of all its files, is small_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <limits.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "four_bit.cuh"
#include "small_wgmma_plan.h"
#include "tma.cuh"

namespace nf4l {

struct SmallWgmmaArgs : FourBitWeight {
  const void* bias;   // [n] or NULL
  void* y;            // [m, n]
  float4* slots;      // [blocks][head, tail][lane_results / 4][row_groups * 128]
  unsigned* arrived;  // [blocks], zero before and after
  int m;
  int x_rows;     // of x in a copy: m, by eights
  Bursts bursts;  // of one row block
  Deal deal;
  bool dependent;  // launched before the previous kernel ended
};

// What a block works on: units begin .. end - 1.
struct Stretch {
  int begin, end;

  template <class Args>
  __device__ __forceinline__ explicit Stretch(const Args& a)
      : begin(a.deal.first_unit(blockIdx.x)), end(a.deal.first_unit(blockIdx.x + 1)) {}

  // Second-level scales of the row blocks that it meets.
  template <int SHAPE>
  __device__ __forceinline__ NestedGroups nested_groups(const SmallWgmmaArgs& a) const {
    constexpr int ROWS = SMALL_WGMMA_SHAPES[SHAPE].block_rows();
    const int first = begin / a.bursts, last = (end - 1) / a.bursts;
    return NestedGroups(a, first * ROWS, (last - first + 1) * ROWS);
  }
};

// A unit of the stretch.
struct Unit {
  int row_block, burst;

  template <class Args>
  __device__ __forceinline__ Unit(const Args& a, int unit) : row_block(unit / a.bursts) {
    burst = unit - row_block * a.bursts;
  }
  template <class Args>
  __device__ __forceinline__ void step(const Args& a) {
    if (++burst == a.bursts) {
      burst = 0;
      ++row_block;
    }
  }
};

// Shared-memory addresses of the ring.
template <int SHAPE>
struct Ring {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  uint32_t stages, scale_codes, barriers;
  int scale_bytes;  // of one row tile in a stage

  __device__ __forceinline__ Ring(uint32_t smem, const SmallWgmmaShared& map, bool nested) {
    scale_bytes = SmallWgmmaShared::scale_bytes(S.burst, nested);
    stages = smem + map.ring;
    scale_codes = smem + map.scale_codes;
    barriers = smem + map.barriers;
  }

  __device__ __forceinline__ uint32_t x(int stage) const { return stages + stage * S.stage_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage, int row_tile) const {
    return x(stage) + S.x_bytes() + row_tile * S.burst * TILE_BYTES;
  }
  __device__ __forceinline__ uint32_t scales(int stage, int row_tile) const {
    return scale_codes + (stage * S.row_tiles() + row_tile) * scale_bytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

// What the copy engine knows of a call: x, and the weight's codes and block scales, in boxes of a unit.
struct SmallWgmmaMaps {
  CUtensorMap x, codes, scales;
};

// The warp that feeds the ring. Each copy costs the copy engine about 45 ns whatever its size, so a unit is three
// boxes: those of all row tiles together. Outside of the tensors they read zeros.
template <int SHAPE>
struct Producer {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const SmallWgmmaArgs& args;
  const SmallWgmmaMaps& maps;
  const Stretch& stretch;
  const Ring<SHAPE>& ring;
  const uint64_t policy = createpolicy_evict_first();

  __device__ __forceinline__ void init() const {
    if (elect_one()) {
      prefetch_tensormap(&maps.codes);
      prefetch_tensormap(&maps.scales);
      prefetch_tensormap(&maps.x);
      for (int s = 0; s < S.stages; ++s) {
        mbarrier_init(ring.full(s), 1);
        mbarrier_init(ring.empty(s), S.row_groups * 4);  // one arrival a warp
      }
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // As many units as there are stages. Behind a kernel that may still write the activations, weights come first;
  // otherwise the first unit is complete before the second is asked for.
  __device__ __forceinline__ void fill() const {
    each(0, S.stages, [&](Unit unit, int stage) {
      load_weight(unit, stage);
      if (!args.dependent) load_x(unit, stage);
    });
    grid_wait();
    if (args.dependent) each(0, S.stages, [&](Unit unit, int stage) { load_x(unit, stage); });
  }

  // The rest of the stretch.
  __device__ __forceinline__ void run() const {
    uint32_t phase = 0;
    each(S.stages, INT_MAX, [&](Unit unit, int stage) {
      mbarrier_wait(ring.empty(stage), phase);
      load_weight(unit, stage);
      load_x(unit, stage);
      if (stage == S.stages - 1) phase ^= 1;
    });
  }

  // f(unit, stage) for the units first .. last - 1 of the stretch, as far as they exist.
  template <class F>
  __device__ __forceinline__ void each(int first, int last, F f) const {
    const int count = min(stretch.end - stretch.begin, last);
    if (first >= count) return;
    Unit unit(args, stretch.begin + first);
    int stage = 0;
#pragma unroll 1  // short code starts sooner
    for (int i = first; i < count; ++i) {
      f(unit, stage);
      unit.step(args);
      stage = stage + 1 == S.stages ? 0 : stage + 1;
    }
  }

  __device__ __forceinline__ void load_x(Unit unit, int stage) const {
    if (elect_one()) cp_async_bulk_tensor_3d(ring.x(stage), &maps.x, 0, 0, unit.burst * S.burst, ring.full(stage));
  }

  __device__ __forceinline__ void load_weight(Unit unit, int stage) const {
    const int row_tile = unit.row_block * S.row_tiles(), tile = unit.burst * S.burst;
    const bool nested = args.nested_code != nullptr;
    const int scale_bytes = SmallWgmmaShared::scale_bytes(S.burst, nested);
    // Both kinds of scales take 64 bytes for 16 rows; codes cover four tiles, float32 scales one.
    const int code_column = tile * (TILE_BYTES / 8), scale_column = (nested ? tile / BURST : tile) * 8;
    if (elect_one()) {
      const int x_bytes = S.burst * args.x_rows * TILE_K4 * 2, code_bytes = S.row_tiles() * S.burst * TILE_BYTES;
      mbarrier_arrive_expect_tx(ring.full(stage), x_bytes + code_bytes + S.row_tiles() * scale_bytes);
      cp_async_bulk_tensor_2d(ring.codes(stage, 0), &maps.codes, code_column, row_tile, ring.full(stage), policy);
      cp_async_bulk_tensor_2d(ring.scales(stage, 0), &maps.scales, scale_column, row_tile, ring.full(stage), policy);
    }
  }
};

}  // namespace nf4l
