// The wgmma engine's ways in: what a block works on, and the warps that feed its rings. The engine itself, with the story of
// all its files, is small_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "four_bit.cuh"
#include "small_wgmma_plan.h"
#include "tma.cuh"

namespace nf4l {

struct SmallWgmmaArgs : FourBitWeight {
  const void* bias;             // [n] or NULL
  void* y;                      // [m, n]
  float4* slots;                // [blocks][lane_results / 4][row_groups * 128]
  unsigned* raised;             // [blocks], zero before and after
  int m;
  int bursts;                   // of one row block
  Deal deal;
};

// What a block works on.
struct Stretch {
  int begin, end;           // units
  int first_row_block;
  int row_blocks;           // that it meets
  bool leaves;              // the first row block began before: another block owns it
  int collects;             // the last one is this block's, and later blocks up to this number have parts of it; or 0

  __device__ __forceinline__ explicit Stretch(const SmallWgmmaArgs& a) {
    begin = a.deal.first_unit(blockIdx.x);
    end = a.deal.first_unit(blockIdx.x + 1);
    first_row_block = begin / a.bursts;
    const int last_row_block = (end - 1) / a.bursts, last_begin = last_row_block * a.bursts;
    row_blocks = last_row_block - first_row_block + 1;
    leaves = first_row_block * a.bursts < begin;
    const bool cut = begin <= last_begin && end < last_begin + a.bursts;
    collects = cut ? a.deal.blocks_before(last_begin + a.bursts) : 0;
  }
};

// A unit of a k group's share of the stretch.
struct Unit {
  int row_block, burst;

  __device__ __forceinline__ Unit(const SmallWgmmaArgs& a, int unit) : row_block(unit / a.bursts) {
    burst = unit - row_block * a.bursts;
  }
  __device__ __forceinline__ void step(const SmallWgmmaArgs& a, int units) {
    burst += units;
    if (burst >= a.bursts) {
      burst -= a.bursts;
      ++row_block;
    }
  }
};

// Position in a k group's ring. Stage s fills when barrier `full` turns to `phase`, and is free when `empty` does.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t phase;

  __device__ __forceinline__ explicit RingPosition(uint32_t first_phase) : phase(first_phase) {}
  __device__ __forceinline__ void step() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Shared-memory addresses of one k group's ring.
template <int SHAPE>
struct Ring {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  uint32_t stages, scale_codes, barriers;
  int scale_bytes;  // of one row tile in a stage

  __device__ __forceinline__ Ring(uint32_t smem, const SmallWgmmaShared& map, bool nested, int k_group) {
    scale_bytes = SmallWgmmaShared::scale_bytes(S.burst, nested);
    stages = smem + map.ring + k_group * S.stages * S.stage_bytes();
    scale_codes = smem + map.scale_codes + k_group * S.stages * S.row_tiles() * scale_bytes;
    barriers = smem + map.barriers + k_group * S.stages * 16;
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

// The thread that feeds one k group. Each copy costs the copy engine about 45 ns whatever its size, so a unit is three boxes:
// those of all row tiles together. Outside of the tensors they read zeros.
template <int SHAPE>
struct Producer {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const SmallWgmmaArgs& args;
  const SmallWgmmaMaps& maps;
  const Stretch& stretch;
  const Ring<SHAPE>& ring;
  const int k_group;
  const uint64_t policy = createpolicy_evict_first();

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(ring.full(s), 1);
      mbarrier_init(ring.empty(s), S.row_groups * 4);  // one arrival a warp
    }
    fence_mbarrier_init();
  }

  // The weights of as many units as there are stages; nothing that the kernel before may have written.
  __device__ __forceinline__ void fill() const {
    Unit unit(args, stretch.begin + k_group);
    for (int s = 0, u = stretch.begin + k_group; s < S.stages && u < stretch.end; ++s, u += S.k_groups) {
      load_weight(unit, s);
      unit.step(args, S.k_groups);
    }
  }

  // Activations for the stages that fill() began, then both for the rest of the stretch.
  __device__ __forceinline__ void run() const {
    RingPosition<S.stages> at(1);
    Unit unit(args, stretch.begin + k_group);
    for (int i = 0, u = stretch.begin + k_group; u < stretch.end; ++i, u += S.k_groups) {
      if (i >= S.stages) {
        mbarrier_wait(ring.empty(at.stage), at.phase);
        load_weight(unit, at.stage);
      }
      cp_async_bulk_tensor_3d(ring.x(at.stage), &maps.x, 0, 0, unit.burst * S.burst, ring.full(at.stage));
      unit.step(args, S.k_groups);
      at.step();
    }
  }

  __device__ __forceinline__ void load_weight(Unit unit, int stage) const {
    const int row_tile = unit.row_block * S.row_tiles(), tile = unit.burst * S.burst;
    const bool nested = args.nested_code != nullptr;
    const int scale_bytes = SmallWgmmaShared::scale_bytes(S.burst, nested);
    mbarrier_arrive_expect_tx(ring.full(stage), S.stage_bytes() + S.row_tiles() * scale_bytes);
    cp_async_bulk_tensor_2d(ring.codes(stage, 0), &maps.codes, tile * (TILE_BYTES / 8), row_tile, ring.full(stage), policy);
    // Both kinds of scales take 64 bytes for 16 rows; codes cover four tiles, float32 scales one.
    cp_async_bulk_tensor_2d(ring.scales(stage, 0), &maps.scales, (nested ? tile / BURST : tile) * 8, row_tile,
                            ring.full(stage), policy);
  }
};

}  // namespace nf4l
