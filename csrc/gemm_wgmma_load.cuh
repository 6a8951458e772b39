// The prefill engine's ways in: what a block works on, its ring, and the warp that feeds it. The engine itself, with the
// story of all its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_plan.h"
#include "tma.cuh"

namespace nf4l {

// Weight is the format's description of a weight, with `codes`, `n`, `row_tiles` and `k_tiles` (of GEMM_K inputs).
template <class Weight>
struct GemmArgs : Weight {
  const void* bias;  // [n] or NULL
  void* y;           // [m, n]
  float4* slots;     // [blocks][warpgroups][lane_results / 4][128]
  unsigned* raised;  // [blocks], zero before and after
  int m;
  GemmCut cut;
  bool copy_out;     // y may be written by the copy engine
};

// Position in the ring. Stage s is filled when barrier `full` turns to `phase`, and free when `empty` does.
template <int STAGES>
struct GemmPosition {
  int stage = 0;
  uint32_t phase;

  __device__ __forceinline__ explicit GemmPosition(uint32_t first) : phase(first) {}
  __device__ __forceinline__ void step() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Format, int SHAPE>
struct GemmRing {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr GemmShared MAP = GemmShared(S, Format::BYTES);
  uint32_t smem;

  __device__ __forceinline__ uint32_t x(int stage) const { return smem + MAP.x + stage * S.x_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage, int row_tile) const {
    return smem + MAP.codes + (stage * S.row_tiles() + row_tile) * Format::BYTES.codes;
  }
  __device__ __forceinline__ uint32_t scales(int stage, int row_tile) const {
    return smem + MAP.scales + (stage * S.row_tiles() + row_tile) * Format::BYTES.scales;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem + MAP.barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }

  // One thread, before anybody else uses the ring.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(full(s), 1 + Format::SCALE_WARPS);
      mbarrier_init(empty(s), S.CONSUMERS * 4);
    }
    fence_mbarrier_init();
  }
};

// One warp: x and the codes of every k tile. What lies beyond the last token is zero; row tiles beyond the last keep what is
// there, which stands for numbers whatever it is.
template <class Format, int SHAPE>
__device__ __forceinline__ void feed(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                                     const GemmRing<Format, SHAPE>& ring, int lane) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const uint64_t policy = args.cut.token_tiles > 1 ? createpolicy_evict_normal() : createpolicy_evict_first();
  GemmPosition<S.stages> at(1);
  GemmPieces piece(args.cut, blockIdx.x);
  while (piece.next()) {
    const OutTile out(args.cut, piece.tile);
    const int row_tile = out.row_block * S.row_tiles(), row_tiles = min(S.row_tiles(), args.row_tiles - row_tile);
    const uint8_t* codes = args.codes + (int64_t(row_tile + lane) * args.k_tiles + piece.begin) * Format::BYTES.codes;
    for (int k = piece.begin; k < piece.end; ++k) {
      mbarrier_wait(ring.empty(at.stage), at.phase);
      if (lane == 0) {
        mbarrier_arrive_expect_tx(ring.full(at.stage), S.x_bytes() + row_tiles * Format::BYTES.codes);
        cp_async_bulk_tensor_2d(ring.x(at.stage), &x, k * GEMM_K, out.token_tile * S.tokens, ring.full(at.stage));
      }
      __syncwarp();
      if (lane < row_tiles) {
        cp_async_bulk(ring.codes(at.stage, lane), codes, Format::BYTES.codes, ring.full(at.stage), policy);
      }
      codes += Format::BYTES.codes;
      at.step();
    }
  }
}

}  // namespace nf4l
