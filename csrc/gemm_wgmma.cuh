// Engine for Hopper: y[m, n] = x[m, k] * weight^T + bias from 129 tokens up, where multiplying takes longer than
// reading.
//
// The weight is the 64-row operand of wgmma m64nNk16, decoded into registers; the tokens are its N columns, read from
// shared memory by the tensor cores. A block is one warpgroup that copies and two or three that multiply, 64 rows of an
// output tile each. A k tile of 64 inputs travels through a ring in shared memory:
//
//     producers    wait empty | x: TMA [tokens][64]                                   -> full
//                  wait empty | codes: TMA, a tile a row tile | scales to float32     -> full
//
//     a k16 step   fence | wgmma | commit | wait for the step before | scale and round the next one, into the
//                  registers that are free now | start the look-ups of the one behind it
//
// So the tensor cores have the next wgmma of each warpgroup, and one decodes behind the other's.
//
// Two blocks of a cluster have the same tokens and neighbouring rows: each copies half of x to both, which halves what
// comes from L2, 3 % of a long call's energy and so of its time. Or, where output tiles are few and in the last wave,
// the blocks of a cluster, or of two, share out the k tiles of one (gemm_wgmma_plan.h, gemm_wgmma_finish.cuh). Blocks
// are persistent.
//
// What binds is power, and up to 256 tokens shared memory, 128 bytes a cycle. A wgmma reads its tokens at 64; the rest
// is for look-ups, 8 bytes for two weights however many tokens they meet, and for what the copy engine writes: 139 KB a
// k tile of 256 tokens, 1088 cycles, of which tensor cores need 1024. Of 344 tokens, two wgmma a step, they need 1376,
// and shared memory 1352.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_finish.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "gemm_wgmma_shape.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

NF4L_HD constexpr RegisterShare gemm_registers(GemmShape shape) { return RegisterShare(shape.consumers, 56); }

// One warp of a consumer. ptxas moves an FMUL up to the look-up that feeds it, and waits there, if it can, before the
// wgmma that should go first; it waits for look-ups at branches too. So they are asked for where a wgmma comes next,
// and none is under way at the back edge or where the next stage is waited for.
template <class Format, class T, int SHAPE>
struct GemmConsumer {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int K_STEPS = GEMM_K / 16;
  using Ring = GemmRing<Format, SHAPE>;
  using Decoder = typename Format::template Decoder<T>;
  const Ring& ring;
  const Decoder decoder;
  const uint32_t codes, scales;  // the lane's own of stage 0
  const uint32_t empty;          // barrier of stage 0, in the block of the cluster that this lane tells of free stages
  const bool tells;
  const uint64_t x;  // descriptor of stage 0
  RingPosition<S.stages> ahead{0};
  // Codes of the k tile that is decoded, a step each, and its scales; and of the next one, loaded behind LOAD_STEP and
  // taken over behind ADVANCE_STEP: the same with more than 256 tokens, whose stages are few and steps long.
  uint32_t words[K_STEPS], next_words[K_STEPS];
  float2 scale, next_scale;
  static constexpr int ADVANCE_STEP = K_STEPS - 2, LOAD_STEP = ADVANCE_STEP - (S.tokens <= 256);
  uint32_t a[2][4];  // of the step that multiplies, and of the one behind it
  float sums[S.tokens / 2];

  __device__ __forceinline__ GemmConsumer(const Ring& r, int row_tile, int lane, int blocks)
      : ring(r),
        decoder(r.smem, lane),
        codes(mov_in_order(r.codes(0, row_tile) + lane * LANE_BYTES)),
        scales(mov_in_order(r.scales(0, row_tile) + lane / 4 * 8)),
        empty(mov_in_order(cluster_address(r.empty(0), lane < blocks ? lane : 0))),
        tells(lane < blocks),
        x(wgmma_descriptor(r.x(0))) {}

  // The next k tile's codes and scales, if there is `another`.
  __device__ __forceinline__ void load(bool another) {
    if (another) mbarrier_wait(ring.full(ahead.stage), ahead.phase);
    const uint4 v = ld_shared_u32x4(codes + ahead.stage * (S.row_tiles() * Format::BYTES.codes));
    next_scale = ld_shared_f32x2(scales + ahead.stage * (S.row_tiles() * Format::BYTES.scales));
    next_words[0] = v.x, next_words[1] = v.y, next_words[2] = v.z, next_words[3] = v.w;
    ahead.step();
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) words[step] = next_words[step];
    scale = next_scale;
  }

  // Before the first k tile of the block.
  __device__ __forceinline__ void start() {
    load(true);
    advance();
    decoder.finish(decoder.look_up(words[0]), scale, a[0]);
  }

  // One k tile, added to the sums or in their place, and the first step of the next one decoded.
  __device__ __forceinline__ void multiply(bool add, bool another) {
    const uint64_t tokens = x + uint32_t(behind(1) * (S.x_bytes() / 16));
    auto looked = decoder.look_up(words[1]);
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      wgmma_fence();
      multiply_step(a[step % 2], tokens + 2 * step, add || step > 0);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (step == 0 && add) release(behind(2));
      decoder.finish(looked, scale, a[(step + 1) % 2]);
      if (step == LOAD_STEP) load(another);
      if (step == ADVANCE_STEP) advance();
      if (step + 1 < K_STEPS) looked = decoder.look_up(words[(step + 2) % K_STEPS]);
    }
  }

  // A k16 step of all tokens.
  __device__ __forceinline__ void multiply_step(const uint32_t (&weights)[4], uint64_t tokens, bool add) {
    constexpr int FIRST = S.first_tokens(), SECOND = S.tokens - FIRST;
    wgmma_m64k16<T>(reinterpret_cast<float(&)[FIRST / 2]>(sums), weights, tokens, add);
    if constexpr (SECOND > 0) {
      auto& others = reinterpret_cast<float(&)[SECOND / 2]>(sums[FIRST / 2]);
      wgmma_m64k16<T>(others, weights, tokens + FIRST * GEMM_K * 2 / 16, add);
    }
  }

  // The stage so many k tiles before the one ahead.
  __device__ __forceinline__ int behind(int tiles) const {
    const int stage = ahead.stage - tiles;
    return stage < 0 ? stage + S.stages : stage;
  }

  // Nobody in this warp reads the stage any more.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (tells) mbarrier_arrive_cluster(empty + stage * GemmShared::BARRIERS);
  }

  // After the last k tile of a piece: the sums may be read.
  __device__ __forceinline__ void drain() {
    wgmma_wait_group<0>();
    release(behind(2));
  }
};

// What needs neither the other blocks of the cluster nor the kernel before this one comes before the first wait.
template <class Format, int SHAPE>
__device__ __forceinline__ void gemm_produce(const GemmArgs<typename Format::Weight>& args, const CUtensorMap& x,
                                             const GemmRing<Format, SHAPE>& ring, GemmWork work, int warp, int lane) {
  if (warp == 0) {
    prefetch_tensormap(&x);
    const bool any = work.next();
    cluster_wait();
    grid_wait();
    if (lane == 0 && any) feed(x, args.tokens, ring, work);
  } else if (warp <= Format::weight_warps(GEMM_SHAPES[SHAPE])) {
    Format::produce(args, ring, work, (warp - 1) * WARP + lane);
  } else {
    cluster_wait();
  }
}

template <class Format, class T, int SHAPE>
__device__ __forceinline__ void gemm_consume(const GemmArgs<typename Format::Weight>& args,
                                             const GemmRing<Format, SHAPE>& ring, GemmWork work, int warp, int lane) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  const int warpgroup = warp / 4;
  static_assert(S.consumers >= 2, "enough threads for the table");
  Format::fill_table(ring.smem, args, warp * WARP + lane);
  cluster_wait();
  bar_sync(1, S.consumers * WARPGROUP);
  grid_wait();  // y may be in use until then

  GemmConsumer<Format, T, SHAPE> consumer(ring, warp, lane, args.grid.blocks);
  const uint32_t buffers = ring.smem + Format::BYTES.gap + warpgroup * ring.MAP.OUT_LINES * Format::BYTES.stride;
  GemmWork later = work;
  bool another = later.next();
  if (another) consumer.start();
  while (another) {
    work.next();
    another = later.next();
    for (int k = work.begin; k < work.end; ++k) consumer.multiply(k > work.begin, k + 1 < work.end || another);
    consumer.drain();
    // Computed here, or ptxas keeps all that follows from it in registers during the loop.
    const int thread = mov_in_order(warp % 4 * WARP + lane);
    GemmFinish<Format, T, SHAPE>{args, ring, buffers, warpgroup, thread}(consumer.sums, work);
  }
  cluster_sync_memory();  // nobody reaches into a block that has ended
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
  const int producer_warp = warp - S.consumers * 4;
  if (producer_warp == 0 && lane == 0) ring.init(args.grid.blocks);
  __syncwarp();
  cluster_arrive();
  const GemmWork work(args.grid, cluster_index(), cluster_rank());
  if (producer_warp >= 0) {
    setmaxnreg_dec<gemm_registers(S).producer>();
    gemm_produce<Format, SHAPE>(args, x, ring, work, producer_warp, lane);
  } else {
    setmaxnreg_inc<gemm_registers(S).consumer>();
    gemm_consume<Format, T, SHAPE>(args, ring, work, warp, lane);
  }
#endif
}

}  // namespace nf4l
