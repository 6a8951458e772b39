// The way in of the Hopper engine for 8-bit weights: its arguments, its ring, and the thread that feeds it. The engine
// itself, with the story of all its files, is gemm_w8.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_w8_plan.h"
#include "tma.cuh"

namespace nf4l {

struct GemmW8Args {
  CUtensorMap codes;        // [row_tiles][k_tiles][2][512], in boxes of one k tile of a row block
  CUtensorMap x;            // [m][k], in boxes [tokens][64]
  CUtensorMap last_x;       // the same for the last tile of tokens, in boxes [last_tokens][64]
  const float* row_maxima;  // [n]
  const void* bias;         // [n] or NULL
  void* y;                  // [m, n], or transposed [n, m]
  float4* slots;            // [blocks][consumers][lane_results / 4][128]
  unsigned* raised;         // [blocks], zero before and after
  int m, n;
  int last_tokens;  // those that the last tile has, by eights
  GemmCut cut;
  bool transposed;
  bool vectors;  // y takes 16 bytes at once
};

template <int SHAPE>
struct GemmW8Ring {
  static constexpr GemmW8Shape S = GEMM_W8_SHAPES[SHAPE];
  static constexpr GemmW8Shared MAP = GemmW8Shared(S);
  uint32_t smem;

  __device__ __forceinline__ uint32_t x(int stage) const { return smem + MAP.x + stage * S.x_bytes(); }
  __device__ __forceinline__ uint32_t codes(int stage) const { return smem + MAP.codes + stage * S.codes_bytes(); }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem + MAP.barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t out(int consumer) const {
    return smem + MAP.out + consumer * S.out_buffers() * GemmW8Shared::out_bytes();
  }

  // One thread, before anybody else uses the ring.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < S.stages; ++s) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), S.consumers * 4);
    }
    fence_mbarrier_init();
  }
};

// The feeding thread. A copy takes the copy engine 45 ns whatever its size, so that x and the codes of a k tile are one
// each; but longer the more of it lies beyond the last token, so the last tile's are smaller, and what a stage holds
// beyond them is never stored. What lies beyond the last row tile is zero.
template <int SHAPE>
struct GemmW8Feeder {
  static constexpr GemmW8Shape S = GEMM_W8_SHAPES[SHAPE];
  const GemmW8Args& args;
  const GemmW8Ring<SHAPE>& ring;

  // Codes for as many k tiles as there are stages: nothing that the kernel before may have written.
  __device__ __forceinline__ void fill() const {
    RingPosition<S.stages> at(1);
    GemmPieces piece(args.cut, blockIdx.x);
    for (int filled = 0; filled < S.stages && piece.next();) {
      const OutTile out(args.cut, piece.tile);
      for (int k = piece.begin; k < piece.end && filled < S.stages; ++k, ++filled, at.step())
        copy_codes(at.stage, k, out);
    }
  }

  // x for what fill() began, then both.
  __device__ __forceinline__ void run() const {
    RingPosition<S.stages> at(1);
    GemmPieces piece(args.cut, blockIdx.x);
    for (int i = 0; piece.next();) {
      const OutTile out(args.cut, piece.tile);
      for (int k = piece.begin; k < piece.end; ++k, ++i, at.step()) {
        if (i >= S.stages) {
          mbarrier_wait(ring.empty(at.stage), at.phase);
          copy_codes(at.stage, k, out);
        }
        const CUtensorMap* x = is_last(out) ? &args.last_x : &args.x;
        cp_async_bulk_tensor_3d(ring.x(at.stage), x, 0, out.token_tile * S.tokens, k, ring.full(at.stage));
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_last(const OutTile& out) const {
    return out.token_tile == args.cut.token_tiles - 1;
  }

  // And the stage now waits for them and for x.
  __device__ __forceinline__ void copy_codes(int stage, int k, const OutTile& out) const {
    const int bytes = S.row_tiles() * GemmW8Shape::TILE_CODES, tokens = is_last(out) ? args.last_tokens : S.tokens;
    mbarrier_arrive_expect_tx(ring.full(stage), tokens * GEMM_K * 2 + bytes);
    cp_async_bulk_tensor_3d(ring.codes(stage), &args.codes, 0, k, out.row_block * S.row_tiles(), ring.full(stage));
  }
};

}  // namespace nf4l
