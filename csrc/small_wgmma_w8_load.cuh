// The way in of the wgmma engine for 8-bit weights: its arguments, its ring, and the thread that feeds it. The engine itself,
// with the story of all its files, is small_wgmma_w8.cuh.
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
  CUtensorMap x;            // [m][k], in boxes [burst][tokens][64]
  CUtensorMap codes;        // [row_tiles][k_tiles][1024], in boxes [row_tiles of a block][burst]
  const float* row_maxima;  // [n]
  const void* bias;         // [n] or NULL
  void* y;                  // [m, n], or transposed [n, m]
  float4* slots;            // [blocks][head, tail][lane_results / 4][row_groups * 128]
  unsigned* arrived;        // [blocks], zero before and after
  int m, n;
  int bursts;  // of one row block
  Deal deal;
  bool transposed;
  bool dependent;  // launched before the previous kernel ended

  __device__ __forceinline__ float row_scale(int row) const { return __ldg(row_maxima + row) * INV_127; }
};

template <int SHAPE>
struct W8Ring {
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  static constexpr SmallWgmmaW8Shared MAP = SmallWgmmaW8Shared(S);
  uint32_t smem;

  __device__ __forceinline__ uint32_t x(int stage) const { return smem + MAP.ring + stage * S.stage_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage, int row_tile) const {
    return x(stage) + S.x_bytes() + row_tile * (S.burst * W8_TILE_BYTES);
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem + MAP.barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t mailbox() const { return smem + MAP.barriers + S.stages * 16; }
};

// The thread that feeds the ring: a unit is two boxes. Outside of the tensors they read zeros.
template <int SHAPE>
struct W8Producer {
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  const SmallWgmmaW8Args& args;
  const Stretch& stretch;
  const W8Ring<SHAPE>& ring;

  __device__ __forceinline__ void init() const {
    prefetch_tensormap(&args.codes);
    prefetch_tensormap(&args.x);
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(ring.full(s), 1);
      mbarrier_init(ring.empty(s), S.row_groups * 4);  // one arrival a warp
    }
    fence_mbarrier_init();
  }

  // Before the kernel in front has ended: weights, which it cannot have written. Not for all stages, because x would have to
  // wait behind them.
  __device__ __forceinline__ void start() const {
    Unit unit(args, stretch.begin);
    for (int s = 0; s < EARLY && stretch.begin + s < stretch.end; ++s, unit.step(args)) load_codes(unit, s);
  }

  // Activations for them, and the rest of the stretch.
  __device__ __forceinline__ void run() const {
    const int early = args.dependent ? EARLY : 0;
    RingPosition<S.stages> at(1);
    Unit unit(args, stretch.begin);
    for (int i = stretch.begin; i < stretch.end; ++i, at.step(), unit.step(args)) {
      mbarrier_wait(ring.empty(at.stage), at.phase);
      if (i - stretch.begin >= early) load_codes(unit, at.stage);
      cp_async_bulk_tensor_3d(ring.x(at.stage), &args.x, 0, 0, unit.burst * S.burst, ring.full(at.stage));
    }
  }

 private:
  static constexpr int EARLY = S.stages < 3 ? S.stages : 3;

  __device__ __forceinline__ void load_codes(Unit unit, int stage) const {
    mbarrier_arrive_expect_tx(ring.full(stage), S.stage_bytes());
    cp_async_bulk_tensor_3d(ring.codes(stage, 0), &args.codes, 0, unit.burst * S.burst, unit.row_block * S.row_tiles(),
                            ring.full(stage));
  }
};

}  // namespace nf4l
