// The prefill engine's ways in: what a block works on, its ring, and the warp that feeds it x. The engine itself, with
// the story of all its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "gemm_wgmma_plan.h"
#include "gemm_wgmma_shape.h"
#include "tma.cuh"

namespace nf4l {

// Weight is the format's description of a weight, with `n` and `code_map` (encode_codes, a row block's row tiles a
// box).
template <class Weight>
struct GemmArgs : Weight {
  const void* bias;  // [n] or NULL
  void* y;           // [m] rows of n, `y_stride` values apart
  int y_stride;
  GemmTokens tokens;
  GemmGrid grid;
  bool vectors;        // rows of y start at multiples of 16 bytes
  float4* sums;        // of meetings: [tiles][ranks][halves][steps / 4][consumers][STORE_TOKENS / 8][128]
  unsigned* meetings;  // [tiles][ranks][halves][consumers], zero before and after
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
  __device__ __forceinline__ uint32_t full(int stage) const {
    return smem + MAP.barriers + stage * GemmShared::BARRIERS;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // The other blocks' sums of a step of the tile that they share with this one.
  __device__ __forceinline__ uint32_t arrived(int step) const { return empty(S.stages - 1) + 8 + step * 8; }

  __device__ __forceinline__ uint32_t ticket(int warpgroup) const { return smem + MAP.tickets + warpgroup * 4; }

  // One thread, before anybody else uses the ring. A stage is empty when the consumers of all `blocks` of the cluster
  // have read theirs, because the copies of one may go to all.
  __device__ __forceinline__ void init(int blocks) const {
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(full(s), 1 + Format::weight_warps(S));
      mbarrier_init(empty(s), blocks * S.consumers * 4);
    }
    constexpr GemmShape shape = S;
    for (int step = 0; step < S.store_steps(); ++step) {
      mbarrier_init(arrived(step), 1);
      mbarrier_arrive_expect_tx(arrived(step), (blocks - 1) * shape.step_bytes(step));
    }
    fence_mbarrier_init();
  }
};

// One thread: x of every k tile, from the piece in hand on; of two blocks that share it each copies a half to both. A
// copy takes the engine 45 ns whatever its size, and longer where it goes beyond the last token (GemmTokens). Of two
// clusters with the same output tile the second has its halves the other way round (GemmMeeting).
template <class Format, int SHAPE>
__device__ __forceinline__ void feed(const CUtensorMap& x, const GemmTokens& tokens,
                                     const GemmRing<Format, SHAPE>& ring, GemmWork& work) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  RingPosition<S.stages> at(1);
  do {
    const int first = work.sliced ? 0 : work.rank, last = work.sliced ? 1 : work.rank;
    const uint16_t to = uint16_t(work.sliced ? 1 << work.rank : 3);
    const int token = tokens.first(S.tokens, work.token_tile);
    for (int k = work.begin; k < work.end; ++k) {
      const uint32_t full = ring.full(at.stage);
      mbarrier_wait(ring.empty(at.stage), at.phase);
      mbarrier_arrive_expect_tx(full, 2 * tokens.half * GEMM_K * 2);
      for (int half = first; half <= last; ++half) {
        const uint32_t place = ring.x(at.stage) + half * tokens.second * GEMM_K * 2;
        cp_async_bulk_tensor_3d_multicast(place, &x, 0, token + (half ^ work.part) * tokens.second, k, full, to);
      }
      at.step();
    }
  } while (work.next());
}

}  // namespace nf4l
