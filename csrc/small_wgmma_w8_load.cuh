// The way in of the wgmma engine for 8-bit weights: its arguments, its ring, and the thread that feeds it. The engine
// itself, with the story of all its files, is small_wgmma_w8.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "codebook.h"
#include "copy.cuh"
#include "small_wgmma_load.cuh"
#include "small_wgmma_w8_plan.h"
#include "tma.cuh"

namespace nf4l {

struct SmallWgmmaW8Args {
  CUtensorMap x;            // [m][k], in boxes [burst][x_rows][64]
  const uint8_t* codes;     // [row_tiles][k_tiles][2][512]
  CUtensorMap scales;       // group scales [row_tiles][k_tiles >> group_shift][16], in boxes of a unit
  const float* row_maxima;  // [n], where there are no group scales
  const void* bias;         // [n] or NULL
  void* y;                  // [m, n], or transposed [n, m]
  float4* slots;            // [blocks][head, tail][lane_results / 4][row_groups * 128]
  unsigned* arrived;        // [blocks], zero before and after
  int m, n;
  int x_rows;  // m, by eights
  int row_tiles, k_tiles;
  int group_shift;  // log2 of the k tiles under one group scale
  int bursts;       // of one row block
  Deal deal;
  bool transposed;
  bool dependent;  // launched before the previous kernel ended

  __device__ __forceinline__ float row_scale(int row) const { return __ldg(row_maxima + row) * INV_127; }
};

template <int SHAPE, bool GROUPED>
struct W8Ring {
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  static constexpr SmallWgmmaW8Shared MAP = SmallWgmmaW8Shared(S);
  uint32_t smem;

  __device__ __forceinline__ uint32_t x(int stage) const { return smem + MAP.ring + stage * S.stage_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage, int row_tile) const {
    return x(stage) + S.x_bytes() + row_tile * (S.burst * W8_TILE_BYTES);
  }
  __device__ __forceinline__ uint32_t scales(int stage) const { return smem + MAP.scales + stage * S.scale_bytes(); }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem + MAP.barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t mailbox() const { return smem + MAP.barriers + S.stages * 16; }
};

// The warp that feeds the ring. A unit is a box of x, one of group scales, and for each row tile a copy of its codes,
// which lie together: read so, the weight comes 7 % faster than in one box, as long as copies (45 ns each for the copy
// engine) keep up. Outside of the tensors boxes read zeros. Codes that do not exist keep what is there: every byte
// stands for a number, and its activations are zero or its row is not stored.
template <int SHAPE, bool GROUPED>
struct W8Producer {
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  static_assert(S.row_tiles() <= WARP, "a lane for each row tile");
  const SmallWgmmaW8Args& args;
  const Stretch& stretch;
  const W8Ring<SHAPE, GROUPED>& ring;
  const int lane;
  const uint64_t policy = createpolicy_evict_first();

  __device__ __forceinline__ void init() const {
    if (lane == 0) {
      prefetch_tensormap(&args.x);
      for (int s = 0; s < S.stages; ++s) {
        mbarrier_init(ring.full(s), 1);
        mbarrier_init(ring.empty(s), S.row_groups * 4);  // one arrival a warp
      }
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Before the kernel in front has ended: weights, which it cannot have written. Not for all stages, because x would
  // have to wait behind them.
  __device__ __forceinline__ void start() const {
    Unit unit(args, stretch.begin);
    for (int s = 0; s < EARLY && stretch.begin + s < stretch.end; ++s, unit.step(args)) load_weight(unit, s);
  }

  // Activations for them, and the rest of the stretch.
  __device__ __forceinline__ void run() const {
    const int early = args.dependent ? EARLY : 0;
    RingPosition<S.stages> at(1);
    Unit unit(args, stretch.begin);
    for (int i = stretch.begin; i < stretch.end; ++i, at.step(), unit.step(args)) {
      mbarrier_wait(ring.empty(at.stage), at.phase);
      if (i - stretch.begin >= early) load_weight(unit, at.stage);
      if (lane == 0)
        cp_async_bulk_tensor_3d(ring.x(at.stage), &args.x, 0, 0, unit.burst * S.burst, ring.full(at.stage));
    }
  }

 private:
  static constexpr int EARLY = S.stages < 3 ? S.stages : 3;

  __device__ __forceinline__ void load_weight(Unit unit, int stage) const {
    const int tile = unit.burst * S.burst, row_tile = unit.row_block * S.row_tiles();
    const int code_bytes = min(S.burst, args.k_tiles - tile) * W8_TILE_BYTES;
    const int rows = min(S.row_tiles(), args.row_tiles - row_tile);
    if (lane == 0) {
      const int scale_bytes = GROUPED ? S.scale_bytes() >> args.group_shift : 0;
      const int x_bytes = S.burst * args.x_rows * TILE_K4 * 2;
      mbarrier_arrive_expect_tx(ring.full(stage), x_bytes + rows * code_bytes + scale_bytes);
      if (GROUPED) {
        const int column = (tile >> args.group_shift) * (TILE_ROWS * 4 / 8);  // in words of eight bytes
        cp_async_bulk_tensor_2d(ring.scales(stage), &args.scales, column, row_tile, ring.full(stage), policy);
      }
    }
    __syncwarp();
    if (lane < rows) {
      const uint8_t* from = args.codes + (int64_t(row_tile + lane) * args.k_tiles + tile) * W8_TILE_BYTES;
      cp_async_bulk(ring.codes(stage, lane), from, code_bytes, ring.full(stage), policy);
    }
  }
};

}  // namespace nf4l
