// Engine for Hopper: y[m, n] = x[m, k] * weight^T + bias from 129 tokens up, where multiplying takes longer than
// reading.
//
// The weight is the 64-row operand of wgmma m64nNk16, decoded into registers; the tokens are its N columns, read from
// shared memory by the tensor cores. A block is one warpgroup that copies and two or three that multiply, 64 rows of an
// output tile each. A k tile of 64 inputs travels through a ring in shared memory:
//
//     producer     wait empty | x: TMA [tokens][64] | codes: TMA, a tile a row tile | scales to float32 | -> full
//
//     a k16 step   fence | wgmma | commit | wait for those before the last two | scale and round a later step,
//                  into the registers that are free now | start the look-ups of the step behind it
//
// So the tensor cores always have the next wgmma of each warpgroup, and decoding has as long as they take for it;
// look-ups have longer, because the tensor cores' own reads of shared memory come first.
//
// Two blocks of a cluster have the same tokens and neighbouring rows: each copies half of x to both, which halves what
// comes from L2, 3 % of a long call's energy and so of its time. Or, where output tiles are few and in the last wave,
// the blocks of a cluster share out the k tiles of one (gemm_wgmma_plan.h, gemm_wgmma_finish.cuh). Blocks are
// persistent.
//
// What binds is shared memory, 128 bytes a cycle, and power. A wgmma reads its tokens at 64; the rest is for look-ups,
// 8 bytes for two weights however many tokens they meet, and for what the copy engine writes.
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

// Registers of a thread: the block starts with an equal share for all, and the producer gives most of its own away.
constexpr int GEMM_PRODUCER_REGISTERS = 56;
NF4L_HD constexpr int gemm_consumer_registers(GemmShape shape) {
  return (RegisterShare::all(shape.consumers) - GEMM_PRODUCER_REGISTERS) / shape.consumers / 8 * 8;
}

// One warp of a consumer.
template <class Format, class T, int SHAPE>
struct GemmConsumer {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int K_STEPS = GEMM_K / 16;
  // Steps of k16 that are decoded ahead of the tensor cores, in twice as many sets of registers.
  static constexpr int AHEAD = 2, SETS = 2 * AHEAD;
  using Decoder = typename Format::template Decoder<T>;
  const GemmRing<Format, SHAPE>& ring;
  const int row_tile, lane;
  const int to;  // rank in the cluster of the block that this lane tells of stages that are free, or -1
  const Decoder decoder;
  RingPosition<S.stages> at{0};
  int used = -1;                        // stage of the k tile before, which the tensor cores may still read
  typename Decoder::Codes now, next;    // to finish, and to look up
  typename Decoder::Looked looked;
  uint32_t a[SETS][4];
  float sums[S.tokens / 2];

  __device__ __forceinline__ void load(int stage) {
    next = decoder.load(ring.codes(stage, row_tile), ring.scales(stage, row_tile), lane);
  }

  // Steps count from the k tile in hand on; those of the next one are looked up in `next`.
  __device__ __forceinline__ void look_up(int step) { looked = decoder.look_up(next, step % K_STEPS); }

  __device__ __forceinline__ void finish(int step) {
    if (step == K_STEPS) now = next;
    decoder.finish(looked, now, a[step % SETS]);
  }

  // Before the first k tile of a piece.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full_codes(at.stage), at.phase);
    load(at.stage);
    now = next;
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) {
      look_up(step);
      finish(step);
    }
    look_up(AHEAD);
  }

  // One k tile, added to the sums or in their place, and the first steps of the next one decoded if there are `more`.
  __device__ __forceinline__ void multiply(bool add, bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    mbarrier_wait(ring.full_x(stage), at.phase);
    at.step();
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      if (step == K_STEPS - AHEAD - 1 && more) {
        mbarrier_wait(ring.full_codes(at.stage), at.phase);
        load(at.stage);
      }
      wgmma_fence();
      wgmma_m64k16<T>(sums, a[step % SETS], x + 2 * step, add || step > 0);
      wgmma_commit_group();
      wgmma_wait_group<AHEAD>();
      if (step == AHEAD - 1) release();
      finish(step + AHEAD);
      look_up(step + AHEAD + 1);
    }
    used = stage;
  }

  // To all blocks of the cluster.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (used >= 0 && to >= 0) mbarrier_arrive_cluster(cluster_address(ring.empty(used), to));
  }

  // After the last k tile of a piece: the sums may be read.
  __device__ __forceinline__ void drain() {
    wgmma_wait_group<0>();
    release();
    used = -1;
  }
};

template <class Format, int SHAPE>
__device__ __forceinline__ void gemm_produce(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                                             const GemmRing<Format, SHAPE>& ring, int warp, int lane) {
  if (warp == 0) {
    if (lane > 0) return;
    grid_wait();
    feed(args, x, ring);
  } else if (warp <= Format::scale_warps(GEMM_SHAPES[SHAPE])) {
    Format::produce_scales(args, ring, (warp - 1) * WARP + lane);
  }
}

template <class Format, class T, int SHAPE>
__device__ __forceinline__ void gemm_consume(const GemmArgs<typename Format::Weight>& args,
                                             const GemmRing<Format, SHAPE>& ring, char* smem, int warp, int lane) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const int warpgroup = warp / 4;
  Format::template fill_table<S.consumers * WARPGROUP>(smem, args, warp * WARP + lane);
  asm volatile("bar.sync 1, %0;" ::"n"(S.consumers * WARPGROUP) : "memory");
  grid_wait();  // y may be in use until then

  const int to = lane < args.grid.blocks ? lane : -1;
  GemmConsumer<Format, T, SHAPE> consumer = {ring, warp, lane, to, {ring.smem, lane}};
  const uint32_t buffers = ring.smem + Format::BYTES.gap + warpgroup * ring.MAP.OUT_LINES * Format::BYTES.stride;
  const GemmFinish<Format, T, SHAPE> finish = {args, ring.x(0), buffers, warpgroup, warp % 4 * WARP + lane};
  GemmWork work(args.grid, blockIdx.x);
  while (work.next()) {
    consumer.start();
    for (int k = work.begin; k < work.end; ++k) consumer.multiply(k > work.begin, k + 1 < work.end);
    consumer.drain();
    finish(consumer.sums, work);
  }
  cluster_sync_threads();  // nobody reaches into a block that has ended
}

template <class Format, class T, int SHAPE>
__global__ void __launch_bounds__(GEMM_SHAPES[SHAPE].threads(), 1)
    gemm_wgmma_kernel(const __grid_constant__ GemmArgs<typename Format::Weight> args,
                      const __grid_constant__ CUtensorMap x) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const GemmRing<Format, SHAPE> ring = {smem_address(smem)};
  if (threadIdx.x == 0) ring.init(args.grid.blocks);
  cluster_sync_threads();
  if (warp >= S.consumers * 4) {
    setmaxnreg_dec<GEMM_PRODUCER_REGISTERS>();
    gemm_produce<Format, SHAPE>(args, x, ring, warp - S.consumers * 4, lane);
  } else {
    setmaxnreg_inc<gemm_consumer_registers(S)>();
    gemm_consume<Format, T, SHAPE>(args, ring, smem, warp, lane);
  }
#endif
}

}  // namespace nf4l
