// The prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with the story of all
// its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// A warpgroup's half of output tiles. The two halves have nothing to do with each other: each has its barrier, its part of
// the slots and its byte of the flags.
template <class T, class Weight, int SHAPE>
struct GemmFinish {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int RESULTS = S.tokens / 2, VECTORS = RESULTS / 4;  // of a lane and a row group
  using Sums = float[S.row_groups][RESULTS];
  const GemmArgs<Weight>& args;
  const CUtensorMap& y;
  const uint32_t buffers;  // two
  const int warpgroup, thread;

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(3 + warpgroup) : "memory"); }

  // The sums of a piece.
  //
  // An output tile that several blocks share belongs to the one that begins it: it has the tile last in its stretch, the
  // others have theirs first. They leave their sums in their slot and go on, waiting for nobody, and the owner adds them up
  // when it is done itself, in order: the same bits at every call. Of the blocks that run, only the last to have started can
  // wait for one that has not.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmPieces& piece) const {
    if (piece.begin > 0) {
      leave(sums);
      return;
    }
    if (piece.end < args.cut.k_tiles) collect(sums, (piece.tile - args.cut.whole_tiles + 1) * args.cut.k_tiles);
    store(sums, OutTile(args.cut, piece.tile));
  }

  __device__ __forceinline__ float4* slot(int block) const {
    return args.slots + (int64_t(block) * S.CONSUMERS + warpgroup) * (S.row_groups * VECTORS * WARPGROUP) + thread;
  }

  __device__ __forceinline__ void leave(const Sums& sums) const {
    float4* to = slot(blockIdx.x);
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const float* v = sums[r] + 4 * i;
        __stcg(to + (r * VECTORS + i) * WARPGROUP, make_float4(v[0], v[1], v[2], v[3]));
      }
    }
    __threadfence();
    sync();
    if (thread == 0) red_add_release_gpu(args.raised + blockIdx.x, flag());
  }

  __device__ __forceinline__ unsigned flag() const { return 1u << (8 * warpgroup); }

  // The slots of the blocks behind this one that begin before unit `end` of the line.
  __device__ __forceinline__ void collect(Sums& sums, int end) const {
    const int next = blockIdx.x + 1, stop = args.cut.deal.blocks_before(end);
    for (int block = next + thread; block < stop; block += WARPGROUP) {
      while ((ld_acquire_gpu(args.raised + block) & flag()) == 0) {
      }
      atomicSub(args.raised + block, flag());
    }
    sync();
    for (int block = next; block < stop; ++block) {
      const float4* from = slot(block);
#pragma unroll
      for (int r = 0; r < S.row_groups; ++r) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          const float4 v = __ldcg(from + (r * VECTORS + i) * WARPGROUP);
          float* sum = sums[r] + 4 * i;
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
    }
  }

  // A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight; y wants neighbouring rows together, so
  // 8x8 matrices are transposed on the way into a buffer [STORE_TOKENS][64], which is swizzled as the copy engine does.
  __device__ __forceinline__ void store(const Sums& sums, OutTile out) const {
    constexpr int STEPS = S.tokens / S.STORE_TOKENS;
    static_assert(S.row_groups * STEPS % 2 == 0, "buffers take turns");
    const int lane = thread % WARP, warp = thread / WARP;
    const int first_token = out.token_tile * S.tokens;
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
      const int first_row = out.row_block * S.block_rows() + warpgroup * S.group_rows() + r * WARPGROUP_ROWS;
      const float2 bias = {bias_of(first_row + warp * TILE_ROWS + lane / 4), bias_of(first_row + warp * TILE_ROWS + lane / 4 + 8)};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint32_t buffer = buffers + (r * STEPS + step) % 2 * GemmShared::out_bytes();
        const int token = first_token + step * S.STORE_TOKENS;
        if (thread == 0) cp_async_bulk_wait_group_read<1>();
        sync();
#pragma unroll
        for (int j = 0; j < S.STORE_TOKENS / 8; j += 2) {
          const float* v = sums[r] + (step * (S.STORE_TOKENS / 8) + j) * 4;
          const int line = (j + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
          stmatrix_x4_trans(buffer + line * 128 + ((chunk ^ lane % 8) << 4), round_pair<T>(v[0] + bias.x, v[1] + bias.x),
                            round_pair<T>(v[2] + bias.y, v[3] + bias.y), round_pair<T>(v[4] + bias.x, v[5] + bias.x),
                            round_pair<T>(v[6] + bias.y, v[7] + bias.y));
        }
        if (args.copy_out) fence_proxy_async();
        sync();
        if (!args.copy_out) {
          put(buffer, token, first_row);
        } else if (thread == 0) {
          if (token < args.m && first_row < args.n) cp_async_bulk_tensor_2d_store(&y, buffer, first_row, token);
          cp_async_bulk_commit_group();
        }
      }
    }
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
  }

  // A buffer to y where the copy engine cannot: rows of y that do not start at multiples of 16 bytes.
  __device__ __forceinline__ void put(uint32_t buffer, int token, int row) const {
    uint16_t* const y16 = static_cast<uint16_t*>(args.y);
    for (int i = thread; i < S.STORE_TOKENS * WARPGROUP_ROWS; i += WARPGROUP) {
      const int line = i / WARPGROUP_ROWS, column = i % WARPGROUP_ROWS;
      if (token + line >= args.m || row + column >= args.n) continue;
      const uint32_t at = buffer + line * 128 + ((column / 8 ^ line % 8) << 4) + column % 8 * 2;
      y16[int64_t(token + line) * args.n + row + column] = ld_shared_u16(at);
    }
  }
};

}  // namespace nf4l
