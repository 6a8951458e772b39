// Engine for Hopper and 8-bit weights: y[m, n] = x[m, k] * weight^T + bias where multiplying takes longer than reading,
// and from a few tokens up where mma.sync has too little to do.
//
// The weight is the 64-row operand of wgmma m64nNk16, converted in registers (convert8.cuh); the tokens are its N
// columns, read from shared memory by the tensor cores. A block is one thread that feeds and two or four warpgroups
// that multiply, 64 rows of an output tile each. A k tile of 64 inputs travels through a ring in shared memory: two
// copies fill a stage, x [tokens][64] and the codes of all row tiles.
//
// There is no scale in the loop: that of a row multiplies the finished sums. So the instructions between two wgmma are
// few, and each warpgroup goes its own way, converting behind what it has given to the tensor cores (w8_operand.cuh).
//
// Blocks are persistent and take output tiles one after the other. Where these do not fill a wave of blocks, either row
// blocks are made to fit, or the k tiles of the last wave are dealt in contiguous stretches (gemm_w8_plan.h,
// gemm_w8_finish.cuh).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "copy.cuh"
#include "gemm_w8_finish.cuh"
#include "gemm_w8_load.cuh"
#include "gemm_w8_plan.h"
#include "tma.cuh"
#include "w8_operand.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// One warp of a consumer, k tile after k tile.
template <class Code, class T, int SHAPE>
struct GemmW8Hand : W8Operand<Code, T, GemmW8Ring<SHAPE>> {
  using Operand = W8Operand<Code, T, GemmW8Ring<SHAPE>>;
  using Operand::at, Operand::lane, Operand::ring, Operand::row_tile, Operand::sums, Operand::used, Operand::words;
  using Operand::convert, Operand::release, Operand::step;

  __device__ __forceinline__ void load() {
    mbarrier_wait(ring.full(at.stage), at.phase);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = ld_shared_u32x4(ring.codes(at.stage) + (row_tile * 2 + half) * TILE_BYTES + lane * LANE_BYTES);
    }
  }

  // Before the first k tile.
  __device__ __forceinline__ void start() {
    load();
    convert(0);
    convert(1);
  }

  // One k tile, added to the sums or in their place, and the first steps of the next one converted if there are `more`.
  __device__ __forceinline__ void multiply(bool add, bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
    step(sums, 0, x, add);
    convert(2);
    step(sums, 1, x, true);
    convert(3);
    release();  // every wgmma of the k tile before is complete
    used = stage;
    if (more) load();
    step(sums, 2, x, true);
    convert(0);
    step(sums, 3, x, true);
    convert(1);
  }
};

template <class Code, class T, int SHAPE>
__device__ __forceinline__ void gemm_w8_consume(const GemmW8Args& args, const GemmW8Ring<SHAPE>& ring, int warp,
                                                int lane) {
  GemmW8Hand<Code, T, SHAPE> hand = {{ring, warp, lane}};
  const GemmW8Finish<T, SHAPE> finish = {args, ring.out(warp / 4), warp / 4, warp % 4 * WARP + lane};
  GemmPieces piece(args.cut, blockIdx.x);
  int left = piece.k_tiles_left();
  if (left > 0) hand.start();
  while (piece.next()) {
    finish.prefetch(piece);
    for (int k = piece.begin; k < piece.end; ++k) hand.multiply(k > piece.begin, --left > 0);
    hand.finish();
    finish(hand.sums, piece);
  }
}

template <class Code, class T, int SHAPE>
__global__ void __launch_bounds__(GEMM_W8_SHAPES[SHAPE].threads(), 1)
    gemm_w8_kernel(const __grid_constant__ GemmW8Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr GemmW8Shape S = GEMM_W8_SHAPES[SHAPE];
  constexpr RegisterShare REGISTERS(S.consumers);
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const GemmW8Ring<SHAPE> ring = {smem_address(smem)};
  if (warp >= S.consumers * 4) {
    setmaxnreg_dec<REGISTERS.producer>();
    const bool feeds = warp == S.consumers * 4 && lane == 0;
    const GemmW8Feeder<SHAPE> feeder = {args, ring};
    if (feeds) {
      ring.init();
      feeder.fill();
    }
    __syncthreads();
    if (feeds) {
      grid_wait();
      feeder.run();
    }
  } else {
    setmaxnreg_inc<REGISTERS.consumer>();
    __syncthreads();
    grid_wait();  // slots, flags and y may be in use until then
    gemm_w8_consume<Code, T, SHAPE>(args, ring, warp, lane);
  }
#endif
}

}  // namespace nf4l
