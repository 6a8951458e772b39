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

// Weight is the format's description of a weight, with `n` and `code_map` (encode_codes, a row block's row tiles a box).
template <class Weight>
struct GemmArgs : Weight {
  const void* bias;  // [n] or NULL
  void* y;           // [m, n]
  float4* slots;     // [blocks][2][warpgroups][lane_results / 4][128]
  unsigned* raised;  // [blocks], zero before and after
  int m;
  GemmCut cut;
  bool vectors;      // rows of y start at multiples of 16 bytes
};

// Position in the ring. Stage s is filled when its `full` barriers turn to `phase`, and free when `empty` does.
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
  // x is needed later than codes and scales, and takes longer.
  __device__ __forceinline__ uint32_t full_codes(int stage) const { return smem + MAP.barriers + stage * GemmShared::BARRIERS; }
  __device__ __forceinline__ uint32_t full_x(int stage) const { return full_codes(stage) + 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full_codes(stage) + 16; }

  // One thread, before anybody else uses the ring.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(full_codes(s), 1 + Format::scale_warps(S));
      mbarrier_init(full_x(s), 1);
      mbarrier_init(empty(s), S.consumers * 4);
    }
    fence_mbarrier_init();
  }
};

// One thread: x and the codes of every k tile, each by one copy, because a copy takes the engine 45 ns whatever its size. What
// lies beyond the last token or row tile is zero.
template <class Format, int SHAPE>
__device__ __forceinline__ void feed(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                                     const GemmRing<Format, SHAPE>& ring) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  GemmPosition<S.stages> at(1);
  GemmPieces piece(args.cut, blockIdx.x);
  while (piece.next()) {
    const OutTile out(args.cut, piece.tile);
    for (int k = piece.begin; k < piece.end; ++k) {
      const uint32_t full_codes = ring.full_codes(at.stage), full_x = ring.full_x(at.stage);
      mbarrier_wait(ring.empty(at.stage), at.phase);
      mbarrier_arrive_expect_tx(full_codes, S.row_tiles() * Format::BYTES.codes);
      cp_async_bulk_tensor_3d(ring.codes(at.stage, 0), &args.code_map, 0, k, out.row_block * S.row_tiles(), full_codes);
      mbarrier_arrive_expect_tx(full_x, S.x_bytes());
      cp_async_bulk_tensor_3d(ring.x(at.stage), &x, 0, out.token_tile * S.tokens, k, full_x);
      at.step();
    }
  }
}

}  // namespace nf4l
