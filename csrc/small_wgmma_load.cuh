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

  __device__ __forceinline__ explicit Stretch(const SmallWgmmaArgs& a) {
    begin = a.deal.first_unit(blockIdx.x);
    end = a.deal.first_unit(blockIdx.x + 1);
    first_row_block = begin / a.bursts;
    row_blocks = (end - 1) / a.bursts - first_row_block + 1;
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
    scale_bytes = SmallWgmmaShared::scale_bytes(nested);
    stages = smem + map.ring + k_group * S.stages * S.stage_bytes();
    scale_codes = smem + map.scale_codes + k_group * S.stages * S.row_tiles() * scale_bytes;
    barriers = smem + map.barriers + k_group * S.stages * 16;
  }

  __device__ __forceinline__ uint32_t x(int stage) const { return stages + stage * S.stage_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage, int row_tile) const {
    return x(stage) + S.x_bytes() + row_tile * BURST * TILE_BYTES;
  }
  __device__ __forceinline__ uint32_t scales(int stage, int row_tile) const {
    return scale_codes + (stage * S.row_tiles() + row_tile) * scale_bytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

// The warp that feeds one k group.
template <int SHAPE>
struct Producer {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const SmallWgmmaArgs& args;
  const Stretch& stretch;
  const Ring<SHAPE>& ring;
  const int k_group, lane;
  const uint64_t policy = createpolicy_evict_first();

  __device__ __forceinline__ void init_barriers() const {
    if (lane == 0) {
      for (int s = 0; s < S.stages; ++s) {
        mbarrier_init(ring.full(s), 1);
        mbarrier_init(ring.empty(s), S.row_groups * 4);  // one arrival a warp
      }
      fence_mbarrier_init();
    }
    __syncwarp();
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
  __device__ __forceinline__ void run(const CUtensorMap& x) const {
    RingPosition<S.stages> at(1);
    Unit unit(args, stretch.begin + k_group);
    for (int i = 0, u = stretch.begin + k_group; u < stretch.end; ++i, u += S.k_groups) {
      if (i >= S.stages) {
        mbarrier_wait(ring.empty(at.stage), at.phase);
        load_weight(unit, at.stage);
      }
      if (lane == 0) {
#pragma unroll
        for (int j = 0; j < BURST; ++j) {  // a tile beyond the last becomes zeros
          cp_async_bulk_tensor_2d(ring.x(at.stage) + j * S.tokens * 128, &x, (unit.burst * BURST + j) * TILE_K4, 0,
                                  ring.full(at.stage));
        }
      }
      unit.step(args, S.k_groups);
      at.step();
    }
  }

  // Lane r copies the codes and scales of row tile r. Row tiles and k tiles that do not exist keep what is there: codes
  // stand for numbers whatever they are, and scales of such k tiles are not looked at.
  __device__ __forceinline__ void load_weight(Unit unit, int stage) const {
    const int row_tile = unit.row_block * S.row_tiles() + lane, tile = unit.burst * BURST;
    const int tiles = min(BURST, args.k_tiles - tile);
    const int row_tiles = min(S.row_tiles(), args.row_tiles - unit.row_block * S.row_tiles());
    const bool nested = args.nested_code != nullptr;
    const int scale_bytes = nested ? 64 : tiles * 64;  // both kinds take 64 bytes for 16 rows; codes cover the burst
    if (lane == 0) {
      mbarrier_arrive_expect_tx(ring.full(stage), S.x_bytes() + row_tiles * (tiles * TILE_BYTES + scale_bytes));
    }
    __syncwarp();
    if (lane >= row_tiles) return;
    const int scale_columns = nested ? (args.k_tiles + BURST - 1) / BURST : args.k_tiles;
    const int64_t scale_at = int64_t(row_tile) * scale_columns + (nested ? unit.burst : tile);
    cp_async_bulk(ring.codes(stage, lane), args.codes + (int64_t(row_tile) * args.k_tiles + tile) * TILE_BYTES,
                  tiles * TILE_BYTES, ring.full(stage), policy);
    cp_async_bulk(ring.scales(stage, lane), args.scales + scale_at * 64, scale_bytes, ring.full(stage), policy);
  }
};

}  // namespace nf4l
