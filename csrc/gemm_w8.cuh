// Engine for Hopper and 8-bit weights: y[m, n] = x[m, k] * weight^T + bias where multiplying takes longer than reading, and
// from 17 tokens up where mma.sync has too little to do.
//
// Ring, cut, producer and epilogue are those of the 4-bit engine (gemm_wgmma.cuh). Converting 8-bit codes takes 16 to 20
// instructions for a wgmma, without look-ups or scales, so nothing needs taking turns: a warpgroup gives the tensor cores one
// k16 step after the other, two ahead of the one in hand, and converts the next but one behind it:
//
//     step s       fence | wgmma a[s] | commit | wait until two are under way | convert step s + 2 -> a[(s + 2) % 4]
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "convert8.cuh"
#include "copy.cuh"
#include "gemm_wgmma_finish.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "nf4linear.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

struct GemmW8Weight {
  static constexpr bool TRANSPOSABLE = true;
  CUtensorMap codes;        // [row_tiles][k_tiles][2][512], in boxes of a k tile of a whole row block
  const float* row_maxima;  // [n]
  int n, row_tiles, k_tiles;

  __device__ __forceinline__ float row_scale(int row) const { return row < n ? __ldg(row_maxima + row) * INV_127 : 0.0f; }
  __device__ __forceinline__ void prefetch_rows(int row) const {
    if (row < n) asm volatile("prefetch.global.L1 [%0];" ::"l"(row_maxima + row));
  }
};

struct GemmW8 {
  using Weight = GemmW8Weight;
  static constexpr GemmFormatBytes BYTES = GEMM_EIGHT_BIT;
  static constexpr int SCALE_WARPS = 0;
};

// One thread: x and the codes of every k tile, each by one copy, since every copy takes the copy engine 45 ns whatever its
// size. What lies beyond the last token or row tile is zero.
template <int SHAPE>
__device__ __forceinline__ void feed_w8(const GemmArgs<GemmW8Weight>& args, const CUtensorMap& x,
                                        const GemmRing<GemmW8, SHAPE>& ring) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  GemmPosition<S.stages> at(1);
  GemmPieces piece(args.cut, blockIdx.x);
  while (piece.next()) {
    const OutTile out(args.cut, piece.tile);
    for (int k = piece.begin; k < piece.end; ++k) {
      mbarrier_wait(ring.empty(at.stage), at.phase);
      mbarrier_arrive_expect_tx(ring.full(at.stage), S.x_bytes() + S.row_tiles() * GemmW8::BYTES.codes);
      cp_async_bulk_tensor_3d(ring.codes(at.stage, 0), &args.codes, 0, k, out.row_block * S.row_tiles(), ring.full(at.stage));
      cp_async_bulk_tensor_2d(ring.x(at.stage), &x, k * GEMM_K, out.token_tile * S.tokens, ring.full(at.stage));
      at.step();
    }
  }
}

// One warp of a consumer.
template <class Code, class T, int SHAPE>
struct GemmW8Consumer {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const GemmRing<GemmW8, SHAPE>& ring;
  const int row_tile, lane;  // row_tile: of the warp in the first row group
  GemmPosition<S.stages> at{0};
  int used = -1;             // stage whose last wgmma may still be under way
  uint32_t words[S.row_groups][8];  // of the k tile in hand, two a step
  uint32_t a[4][S.row_groups][4];
  float sums[S.row_groups][S.tokens / 2];

  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
      const uint32_t codes = ring.codes(stage, row_tile + 4 * r) + lane * LANE_BYTES;
      const uint4 u = ld_shared_u32x4(codes), v = ld_shared_u32x4(codes + TILE_BYTES);
      words[r][0] = u.x, words[r][1] = u.y, words[r][2] = u.z, words[r][3] = u.w;
      words[r][4] = v.x, words[r][5] = v.y, words[r][6] = v.z, words[r][7] = v.w;
    }
  }

  __device__ __forceinline__ void convert(int step) {
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][r][i] = Convert8<T, true>::template pair_of<Code>(words[r][2 * step + i / 2], i % 2);
    }
  }

  __device__ __forceinline__ void step(int s, uint64_t x, bool add) {
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) wgmma_m64k16<T>(sums[r], a[s][r], x + 2 * s, add);
    wgmma_commit_group();
    wgmma_wait_group<2>();
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (used >= 0 && lane == 0) mbarrier_arrive(ring.empty(used));
  }

  // Before the first k tile: its first two steps.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    load(0);
    convert(0);
    convert(1);
  }

  // One k tile, added to the sums or in their place, and the first steps of the next one converted if there are `more`.
  __device__ __forceinline__ void multiply(bool add, bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
    step(0, x, add);
    convert(2);
    step(1, x, true);
    convert(3);
    release();  // every wgmma of the k tile before is complete
    used = stage;
    if (more) {
      mbarrier_wait(ring.full(at.stage), at.phase);
      load(at.stage);
    }
    step(2, x, true);
    convert(0);
    step(3, x, true);
    convert(1);
  }

  // The sums may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait_group<0>();
    release();
    used = -1;
  }
};

// The same for few tokens, whose wgmma are short: all of a k tile at once, and the next k tile converted meanwhile.
template <class Code, class T, int SHAPE>
struct GemmW8Batch {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const GemmRing<GemmW8, SHAPE>& ring;
  const int row_tile, lane;
  GemmPosition<S.stages> at{0};
  int used = -1;             // stage whose wgmma may still be under way
  bool odd = false;          // which half of `a` is next
  uint32_t a[2][4][S.row_groups][4];
  float sums[S.row_groups][S.tokens / 2];

  template <int HALF>
  __device__ __forceinline__ void convert(int stage) {
    uint4 codes[S.row_groups][2];
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
      const uint32_t from = ring.codes(stage, row_tile + 4 * r) + lane * LANE_BYTES;
      codes[r][0] = ld_shared_u32x4(from), codes[r][1] = ld_shared_u32x4(from + TILE_BYTES);
    }
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = codes[r][half];
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          a[HALF][2 * half + i / 4][r][i % 4] = Convert8<T, true>::template pair_of<Code>(word[i / 2], i % 2);
        }
      }
    }
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (used >= 0 && lane == 0) mbarrier_arrive(ring.empty(used));
  }

  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    convert<0>(0);
  }

  template <int HALF>
  __device__ __forceinline__ void tile(bool add, bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int r = 0; r < S.row_groups; ++r) wgmma_m64k16<T>(sums[r], a[HALF][s][r], x + 2 * s, add || s > 0);
    }
    wgmma_commit_group();
    if (more) mbarrier_wait(ring.full(at.stage), at.phase);
    wgmma_wait_group<1>();
    release();
    used = stage;
    if (more) convert<HALF ^ 1>(at.stage);
  }

  __device__ __forceinline__ void multiply(bool add, bool more) {
    if (odd) tile<1>(add, more);
    else tile<0>(add, more);
    odd = !odd;
  }

  __device__ __forceinline__ void finish() {
    wgmma_wait_group<0>();
    release();
    used = -1;
  }
};

template <class Code, class T, int SHAPE>
__global__ void __launch_bounds__(GemmShape::threads(), 1)
    gemm_w8_kernel(const __grid_constant__ GemmArgs<GemmW8Weight> args, const __grid_constant__ CUtensorMap x,
                   const __grid_constant__ CUtensorMap y) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const GemmRing<GemmW8, SHAPE> ring = {smem_address(smem)};
  if (warp >= S.CONSUMERS * 4) {
    setmaxnreg_dec<40>();
    if (warp == S.CONSUMERS * 4 && lane == 0) ring.init();
    __syncthreads();
    if (warp == S.CONSUMERS * 4 && lane == 0) {
      grid_wait();
      feed_w8<SHAPE>(args, x, ring);
    }
  } else {
    setmaxnreg_inc<232>();
    __syncthreads();
    grid_wait();  // slots, flags and y may be in use until then
    const int warpgroup = warp / 4;
    using Consumer = std::conditional_t<S.tokens <= 128, GemmW8Batch<Code, T, SHAPE>, GemmW8Consumer<Code, T, SHAPE>>;
    Consumer consumer = {ring, warpgroup * S.group_rows() / TILE_ROWS + warp % 4, lane};
    const uint32_t buffers = ring.smem + ring.MAP.out + warpgroup * S.out_buffers * GemmShared::out_bytes();
    const GemmFinish<T, GemmW8Weight, SHAPE> finish = {args, y, buffers, warpgroup, warp % 4 * WARP + lane};
    GemmPieces piece(args.cut, blockIdx.x);
    int left = piece.k_tiles_left();
    if (left > 0) consumer.start();
    while (piece.next()) {
      finish.prefetch(piece);
      for (int k = piece.begin; k < piece.end; ++k) consumer.multiply(k > piece.begin, --left > 0);
      consumer.finish();
      finish(consumer.sums, piece);
    }
    if (finish.thread == 0) cp_async_bulk_wait_group_read<0>();
  }
#endif
}

}  // namespace nf4l
