// Engine for GPUs without wgmma: y[m, n] = x[m, k] * weight^T + bias for more tokens than small_batch.cuh takes.
//
// The weight is the 16-row operand of mma.m16n8k16 and the tokens are its 8 columns. Weights are exact, bit for bit
// those of dequantize: sixteen products a row and k tile, picked by PRMT (product_table.cuh). So the product differs
// from that of dequantize and GEMM by the order of its sums alone.
//
// A block multiplies 128 rows by 48 .. 128 tokens. Its two groups of four warps have nothing to do with each other
// until an output tile ends: they take turns with the k tiles, each through a ring of its own. So while the warp of one
// group decodes, the tensor cores have that of another, and the sums meet in shared memory.
//
//     a k tile     group barrier: its x has arrived | start the copies of a later one (cp.async: x, codes, scales)
//     k16 step 0   tokens by ldmatrix, mma | decode the A fragments of step 1
//              1   ... | wait for the own copies of the next k tile | make its tables, a lane a row | decode step 2
//              2   ... | decode step 3
//              3   ... | read tables and codes of the next k tile, decode its step 0
//
// Codes, scales and tables are a warp's own, so that nothing of a k tile's decoding waits for other warps. (The
// compiler spreads it among the mma: in front of them it would take a third of the time.)
//
// A warp has 32 rows and all tokens: a fragment is decoded once, in 22 instructions for the 8 weights of a lane, and
// used by tokens / 8 mma; a pair of token fragments comes by one ldmatrix and is used by four.
//
// Blocks are persistent. Full waves of output tiles are dealt whole; the k tiles of the last one or two are dealt in
// contiguous stretches (gemm_mma_plan.h, gemm_mma_finish.cuh).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_mma_finish.cuh"
#include "gemm_mma_load.cuh"
#include "gemm_mma_plan.h"
#include "mma_sm80.cuh"
#include "product_table.cuh"

namespace nf4l {

// One warp of a group.
template <class T, int SHAPE>
struct GemmMmaWarp {
  static constexpr GemmMmaShape S = GEMM_MMA_SHAPES[SHAPE];
  static constexpr int K_STEPS = GEMM_K / 16;
  const GemmMmaArgs& args;
  const uint32_t tables;  // the warp's
  const uint32_t nested;  // the group's nested_code and nested_offset
  const int lane;
  const int x_at;         // the lane's byte in a stage's x for ldmatrix, step 0
  ProductTable rows[S.ROW_TILES][2];
  uint4 codes[S.ROW_TILES];
  uint32_t a[2][S.ROW_TILES][4];  // fragments of this step and the next
  float sums[S.ROW_TILES][S.tokens / 8][4];

  __device__ __forceinline__ GemmMmaWarp(const GemmMmaArgs& a, uint32_t tables_, uint32_t nested_, int lane_)
      : args(a), tables(tables_), nested(nested_), lane(lane_),
        // Matrices of an ldmatrix: tokens 0 .. 7 and their k 0 .. 7, 8 .. 15, then tokens 8 .. 15.
        x_at((lane_ / 16 * 8 + lane_ % 8) * (GEMM_K * 2) + (lane_ / 8 % 2 ^ lane_ % 8) * 16) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4 * S.vectors(); ++i) (&sums[0][0][0])[i] = 0.0f;
  }

  // Products of k tile k, whose scales lie in the stage at byte `stage`: each lane those of its row.
  __device__ __forceinline__ void make_tables(const GemmMmaScales& scales, int k, int stage) const {
    const ProductTable table = product_table<T>(args.centroids, scales.scale(k, stage, nested));
    ProductTables::store(tables + lane / TILE_ROWS * ProductTables::BYTES, lane % 8, lane / 8 % 2, table);
  }

  // Of the k tile whose tables are made; `stage_codes`: the lane's.
  __device__ __forceinline__ void load(uint32_t stage_codes) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < S.ROW_TILES; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) rows[r][h] = ProductTables::load(tables + r * ProductTables::BYTES, lane / 4, h);
      codes[r] = ld_shared_u32x4(stage_codes + r * TILE_BYTES);
    }
  }

  __device__ __forceinline__ void decode(int step) {
#pragma unroll
    for (int r = 0; r < S.ROW_TILES; ++r) {
      const uint32_t words[4] = {codes[r].x, codes[r].y, codes[r].z, codes[r].w};
      const PickedProducts picked(words[step], rows[r]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step % 2][r][i] = picked.pair(i);
    }
  }

  __device__ __forceinline__ void multiply(int step, uint32_t x) {
    const uint32_t from = (x + x_at) ^ (step * 32);  // rows begin at multiples of 128
#pragma unroll
    for (int c = 0; c < S.tokens / 8; c += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, from + c * 8 * (GEMM_K * 2));
#pragma unroll
      for (int r = 0; r < S.ROW_TILES; ++r) {
        mma_m16n8k16<T>(sums[r][c], a[step % 2][r], b[0], b[1]);
        mma_m16n8k16<T>(sums[r][c + 1], a[step % 2][r], b[2], b[3]);
      }
    }
  }
};

// The k tiles of one piece that are the group's, added up in warp.sums.
template <class T, int SHAPE>
__device__ __forceinline__ void gemm_mma_piece(GemmMmaWarp<T, SHAPE>& warp, const GemmMmaArgs& args,
                                               const GemmPieces& piece, uint32_t ring, int group, int thread) {
  constexpr GemmMmaShape S = GEMM_MMA_SHAPES[SHAPE];
  const OutTile out(args.cut, piece.tile);
  GemmMmaFeed<SHAPE> feed(args, out, ring, thread, piece.begin + group);
  const uint32_t words = ring + S.x_bytes() + S.codes_bytes() + thread * 4;
  const GemmMmaScales scales(args, words, out.row_block * S.BLOCK_ROWS + thread);
  static_assert(GEMM_MMA_LEAST_STAGES == 2 && GEMM_MMA_MOST_STAGES == 3);
  const int stages = args.stages, first = piece.begin + group, ring_bytes = stages * S.stage_bytes();
  // A group of copies for each k tile, and with two stages an empty one behind it: then those of the next k tile have
  // arrived when no more than one is under way.
  const auto load = [&](int k, int stage) {
    if (k < piece.end) {
      feed.load(stage);
      scales.load(k, stage);
    }
    cp_async_commit_group();
    cp_async_commit_group_if(stages == 2);
  };
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) load(first + i * S.GROUPS, i * S.stage_bytes());
  cp_async_wait_group<1>();
  bar_sync(1 + group, S.GROUP_THREADS);  // `nested` has arrived
  warp.make_tables(scales, first, 0);
  warp.load(feed.codes_to);
  warp.decode(0);
  warp.clear();
  const auto after = [&](int stage) { return stage + S.stage_bytes() == ring_bytes ? 0 : stage + S.stage_bytes(); };
  int now = 0;  // the stage that is read, in bytes
#pragma unroll 1
  for (int k = first; k < piece.end; k += S.GROUPS) {
    const int next = after(now);
    bar_sync(1 + group, S.GROUP_THREADS);  // all have their copies, and have read the stage before
    load(k + (stages - 1) * S.GROUPS, stages == 2 ? next : after(next));
    warp.multiply(0, ring + now);
    warp.decode(1);
    warp.multiply(1, ring + now);
    cp_async_wait_group<1>();
    warp.make_tables(scales, k + S.GROUPS, next);  // of nothing behind the last k tile
    warp.decode(2);
    warp.multiply(2, ring + now);
    warp.decode(3);
    warp.load(feed.codes_to + next);
    warp.decode(0);
    warp.multiply(3, ring + now);
    now = next;
  }
}

template <class T, int SHAPE>
__global__ void __launch_bounds__(GemmMmaShape::THREADS, 1)
    gemm_mma_kernel(const __grid_constant__ GemmMmaArgs args) {
  extern __shared__ __align__(1024) char smem[];
  constexpr GemmMmaShape S = GEMM_MMA_SHAPES[SHAPE];
  grid_launch_dependents();
  const int group = threadIdx.x / S.GROUP_THREADS, thread = threadIdx.x % S.GROUP_THREADS;
  const uint32_t shared = smem_address(smem), ring = shared + GemmMmaShared::RING;
  const uint32_t nested = shared + GemmMmaShared::NESTED + group * (GemmMmaShared::NESTED_FLOATS * 4);
  if (args.nested_code) {
    for (int i = thread; i < 256; i += S.GROUP_THREADS) cp_async_4(nested + 4 * i, args.nested_code + i, true);
    if (thread == 0) cp_async_4(nested + 256 * 4, args.nested_offset, true);
  }
  grid_wait();

  const uint32_t tables = shared + GemmMmaShared::TABLES + threadIdx.x / WARP * (S.ROW_TILES * ProductTables::BYTES);
  GemmMmaWarp<T, SHAPE> warp(args, tables, nested, thread % WARP);
  GemmPieces piece(args.cut, blockIdx.x);
  while (piece.next()) {
    gemm_mma_piece(warp, args, piece, ring + group * args.stages * S.stage_bytes(), group, thread);
    GemmMmaFinish<T, SHAPE>(args, ring)(warp.sums, piece);
  }
}

}  // namespace nf4l
