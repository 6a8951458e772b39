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
  const uint32_t buffers;  // S.out_buffers
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
    const OutTile out(args.cut, piece.tile);
    scale_rows(sums, out);
    if constexpr (Weight::TRANSPOSABLE) {
      if (args.transposed) return store<true>(sums, out);
    }
    store<false>(sums, out);
  }

  // Asks for what the rows of a piece will need at its end.
  __device__ __forceinline__ void prefetch(const GemmPieces& piece) const {
    if (piece.begin == 0) args.prefetch_rows(OutTile(args.cut, piece.tile).row_block * S.block_rows() + warpgroup * S.group_rows() + thread % S.group_rows());
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

  // First row of a row group, and a lane's in it: g of its warp's 16.
  __device__ __forceinline__ int group_row(OutTile out, int r) const {
    return out.row_block * S.block_rows() + warpgroup * S.group_rows() + r * WARPGROUP_ROWS;
  }
  __device__ __forceinline__ int lane_row() const { return thread / WARP * TILE_ROWS + thread % WARP / 4; }

  // The weight's scale of each row, where it has one, and the bias.
  __device__ __forceinline__ void scale_rows(Sums& sums, OutTile out) const {
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = group_row(out, r) + lane_row() + 8 * h;
        const float scale = args.row_scale(row), bias = bias_of(row);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
          sums[r][4 * i + 2 * h] = fmaf(sums[r][4 * i + 2 * h], scale, bias);
          sums[r][4 * i + 2 * h + 1] = fmaf(sums[r][4 * i + 2 * h + 1], scale, bias);
        }
      }
    }
  }

  // To y [m, n], or transposed to y [n, m]. Where there is a buffer for every piece, none is waited for and all pieces leave
  // together.
  template <bool TRANSPOSED>
  __device__ __forceinline__ void store(const Sums& sums, OutTile out) const {
    constexpr int STEPS = S.tokens / S.STORE_TOKENS;
    constexpr bool ALL = S.out_buffers == S.row_groups * STEPS;
    static_assert(ALL || (S.out_buffers == 2 && S.row_groups * STEPS % 2 == 0), "buffers take turns");
    if (ALL) begin_buffers<0>();
#pragma unroll
    for (int i = 0; i < S.row_groups * STEPS; ++i) {
      const int r = i / STEPS, step = i % STEPS;
      if (!ALL) begin_buffers<1>();
      write<TRANSPOSED>(sums[r] + step * (S.STORE_TOKENS / 8) * 4, buffer(i));
      if (!ALL) {
        end_buffers();
        send<TRANSPOSED>(buffer(i), out, r, step);
      }
    }
    if (ALL) {
      end_buffers();
#pragma unroll
      for (int i = 0; i < S.row_groups * STEPS; ++i) send<TRANSPOSED>(buffer(i), out, i / STEPS, i % STEPS);
    }
  }

  __device__ __forceinline__ uint32_t buffer(int i) const { return buffers + i % S.out_buffers * GemmShared::out_bytes(); }

  // Returns when all but the last `PENDING` pieces have left their buffers.
  template <int PENDING>
  __device__ __forceinline__ void begin_buffers() const {
    if (thread == 0) cp_async_bulk_wait_group_read<PENDING>();
    sync();
  }
  __device__ __forceinline__ void end_buffers() const {
    if (args.copy_out) fence_proxy_async();
    sync();
  }

  // 64 rows and STORE_TOKENS tokens into a buffer [STORE_TOKENS][64], or transposed [64][STORE_TOKENS], swizzled as the copy
  // engine does for rows of 128 and of 64 bytes. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each
  // eight.
  template <bool TRANSPOSED>
  __device__ __forceinline__ void write(const float* values, uint32_t buffer) const {
    const int lane = thread % WARP, warp = thread / WARP;
    static_assert(S.STORE_TOKENS == 32, "rows of 64 bytes");
#pragma unroll
    for (int j = 0; j < S.STORE_TOKENS / 8; j += 2) {
      const float* v = values + j * 4;
      const uint32_t a = round_pair<T>(v[0], v[1]), b = round_pair<T>(v[2], v[3]), c = round_pair<T>(v[4], v[5]),
                     d = round_pair<T>(v[6], v[7]);
      if constexpr (TRANSPOSED) {
        const int line = warp * TILE_ROWS + lane % 16, chunk = j + lane / 16;
        stmatrix_x4(buffer + line * 64 + ((chunk ^ line / 2 % 4) << 4), a, b, c, d);
      } else {
        const int line = (j + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        stmatrix_x4_trans(buffer + line * 128 + ((chunk ^ lane % 8) << 4), a, b, c, d);
      }
    }
  }

  template <bool TRANSPOSED>
  __device__ __forceinline__ void send(uint32_t buffer, OutTile out, int r, int step) const {
    const int token = out.token_tile * S.tokens + step * S.STORE_TOKENS, row = group_row(out, r);
    if (!args.copy_out) {
      put<TRANSPOSED>(buffer, token, row);
    } else if (thread == 0) {
      if (token < args.m && row < args.n) {
        cp_async_bulk_tensor_2d_store(&y, buffer, TRANSPOSED ? token : row, TRANSPOSED ? row : token);
      }
      cp_async_bulk_commit_group();
    }
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
  }

  // A buffer to y where the copy engine cannot: rows of y that do not start at multiples of 16 bytes.
  template <bool TRANSPOSED>
  __device__ __forceinline__ void put(uint32_t buffer, int token, int row) const {
    constexpr int LINE = TRANSPOSED ? S.STORE_TOKENS : WARPGROUP_ROWS;  // values
    uint16_t* const y16 = static_cast<uint16_t*>(args.y);
    for (int i = thread; i < S.STORE_TOKENS * WARPGROUP_ROWS; i += WARPGROUP) {
      const int line = i / LINE, column = i % LINE;
      const int t = token + (TRANSPOSED ? column : line), n = row + (TRANSPOSED ? line : column);
      if (t >= args.m || n >= args.n) continue;
      const int swizzle = TRANSPOSED ? line / 2 % 4 : line % 8;
      const uint32_t at = buffer + line * LINE * 2 + ((column / 8 ^ swizzle) << 4) + column % 8 * 2;
      y16[TRANSPOSED ? int64_t(n) * args.m + t : int64_t(t) * args.n + n] = ld_shared_u16(at);
    }
  }
};

}  // namespace nf4l
