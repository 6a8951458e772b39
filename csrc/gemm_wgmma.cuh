// Engine for Hopper: y[m, n] = x[m, k] * weight^T + bias from 65 tokens up, where multiplying takes longer than reading.
//
// The weight is the 64-row operand of wgmma m64nNk16, decoded into registers; the tokens are its N columns, read from shared
// memory by the tensor cores. A block is one warpgroup that copies and two that multiply, a half of the rows of an output
// tile each. A k tile of 64 inputs travels through a ring in shared memory:
//
//     producer     wait empty | x: TMA [tokens][64] | codes: a bulk copy a row tile | scales to float32 | -> full
//
//     consumer 0   | four wgmma, look-ups between | scale, round | wait full | .......... | four wgmma ...
//     consumer 1   | ........... scale, round | wait full | four wgmma, look-ups between | scale, round ...
//
// A warp that gives the tensor cores a wgmma with operands in registers stands still until they take it, and they serve two
// warpgroups in turns. So the turns are made long and explicit: one warpgroup multiplies a burst of four wgmma while the
// other one finishes what it has looked up meanwhile; a barrier passes the turn on before the last wgmma of a burst, so that
// the tensor cores always have the next one. What is decoded is the burst after the one in hand, and it goes on over the
// ends of output tiles.
//
// Blocks are persistent. Full waves of output tiles are dealt whole; the k tiles of the last one or two are dealt in
// contiguous stretches (gemm_wgmma_plan.h, gemm_wgmma_finish.cuh).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_finish.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// Registers of a thread; all begin with 65536 / 384 / 8 * 8.
constexpr int GEMM_PRODUCER_REGISTERS = 40, GEMM_CONSUMER_REGISTERS = 232;

// Two warpgroups that take turns.
struct Turns {
  int warpgroup;

  __device__ __forceinline__ void wait() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory"); }
  __device__ __forceinline__ void pass() const { asm volatile("bar.arrive %0, 256;" ::"r"(2 - warpgroup) : "memory"); }
};

// One warp of a consumer.
template <class Format, class T, int SHAPE>
struct GemmConsumer {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int BURST_WGMMA = 4, BURSTS = S.row_groups;  // of a k tile: each burst has all its row groups
  using Decoder = typename Format::template Decoder<T>;
  const GemmRing<Format, SHAPE>& ring;
  const Turns turns;
  const int row_tile, lane;  // row_tile: of the warp in the first row group
  const Decoder decoder;
  typename Decoder::Codes codes[S.row_groups];
  GemmPosition<S.stages> at{0};
  uint32_t a[BURST_WGMMA][4];
  float sums[S.row_groups][S.tokens / 2];

  // The i-th wgmma of burst b: which k16 step, and of which row group.
  NF4L_HD static constexpr int step_of(int b, int i) { return (b * BURST_WGMMA + i) / S.row_groups; }
  NF4L_HD static constexpr int group_of(int i) { return i % S.row_groups; }

  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int r = 0; r < S.row_groups; ++r) {
      codes[r] = decoder.load(ring.codes(stage, row_tile + 4 * r), ring.scales(stage, row_tile + 4 * r), lane);
    }
  }

  // Before the first k tile: its first burst.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    load(0);
#pragma unroll
    for (int i = 0; i < BURST_WGMMA; ++i) {
      decoder.finish(decoder.look_up(codes[group_of(i)], step_of(0, i)), codes[group_of(i)], a[i]);
    }
  }

  // One k tile, added to the sums or in their place, and the first burst of the next one decoded if there are `more`.
  __device__ __forceinline__ void multiply(bool add, bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
#pragma unroll
    for (int b = 0; b < BURSTS; ++b) {
      const bool last = b == BURSTS - 1;
      if (last && more) {
        mbarrier_wait(ring.full(at.stage), at.phase);
        load(at.stage);
      }
      typename Decoder::Looked looked[BURST_WGMMA];
      turns.wait();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BURST_WGMMA; ++i) {
        wgmma_m64k16<T>(sums[group_of(i)], a[i], x + 2 * step_of(b, i), add || step_of(b, i) > 0);
        if (i == BURST_WGMMA - 2 && (!last || more || turns.warpgroup == 0)) turns.pass();
        looked[i] = decoder.look_up(codes[group_of(i)], step_of(last ? 0 : b + 1, i));
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      if (last) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.empty(stage));
      }
#pragma unroll
      for (int i = 0; i < BURST_WGMMA; ++i) decoder.finish(looked[i], codes[group_of(i)], a[i]);
    }
  }
};

template <class Format, int SHAPE>
__device__ __forceinline__ void gemm_produce(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                                             const GemmRing<Format, SHAPE>& ring, int warp, int lane) {
  if (warp == 0 && lane == 0) ring.init();
  __syncthreads();
  if (warp == 0) {
    grid_wait();
    feed(args, x, ring, lane);
  } else if (warp <= Format::SCALE_WARPS) {
    Format::produce_scales(args, ring, (warp - 1) * WARP + lane);
  }
}

template <class Format, class T, int SHAPE>
__device__ __forceinline__ void gemm_consume(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& y,
                                             const GemmRing<Format, SHAPE>& ring, char* smem, int warp, int lane) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const int warpgroup = warp / 4;
  Format::template fill_table<S.CONSUMERS * WARPGROUP>(smem, args, warp * WARP + lane);
  __syncthreads();
  grid_wait();  // slots, flags and y may be in use until then

  const int row_tile = warpgroup * S.group_rows() / TILE_ROWS + warp % 4;
  GemmConsumer<Format, T, SHAPE> consumer = {ring, {warpgroup}, row_tile, lane, {ring.smem, lane}};
  const uint32_t buffers = ring.smem + ring.MAP.out + warpgroup * 2 * GemmShared::out_bytes();
  const GemmFinish<T, typename Format::Weight, SHAPE> finish = {args, y, buffers, warpgroup, warp % 4 * WARP + lane};

  GemmPieces piece(args.cut, blockIdx.x);
  int left = piece.k_tiles_left();
  if (left > 0) consumer.start();
  if (left > 0 && warpgroup == 1) consumer.turns.pass();  // the other one is first
  while (piece.next()) {
    for (int k = piece.begin; k < piece.end; ++k) consumer.multiply(k > piece.begin, --left > 0);
    finish(consumer.sums, piece);
  }
  if (finish.thread == 0) cp_async_bulk_wait_group_read<0>();
}

template <class Format, class T, int SHAPE>
__global__ void __launch_bounds__(GemmShape::threads(), 1)
    gemm_wgmma_kernel(const __grid_constant__ GemmArgs<typename Format::Weight> args, const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ CUtensorMap y) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const GemmRing<Format, SHAPE> ring = {smem_address(smem)};
  if (warp >= GemmShape::CONSUMERS * 4) {
    setmaxnreg_dec<GEMM_PRODUCER_REGISTERS>();
    gemm_produce<Format, SHAPE>(args, x, ring, warp - GemmShape::CONSUMERS * 4, lane);
  } else {
    setmaxnreg_inc<GEMM_CONSUMER_REGISTERS>();
    gemm_consume<Format, T, SHAPE>(args, y, ring, smem, warp, lane);
  }
#endif
}

}  // namespace nf4l
