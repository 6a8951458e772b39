// The wgmma engine's ways out: sums of several warpgroups and blocks made one, and stored. The engine itself, with the story
// of all its files, is small_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "mma_sm80.cuh"
#include "small_wgmma_load.cuh"
#include "small_wgmma_plan.h"
#include "tma.cuh"

namespace nf4l {

// A row block that several blocks share belongs to the one that begins it: it has the block's bursts last in its stretch, the
// others have theirs first. They leave their sums in their slot and go on, and the owner adds them up when it is done itself,
// in order: the same bits at every call. Of the blocks that run, only the last to have started can wait for one that has not.
//
// Flags between blocks are a courier's business, a warp that does nothing else: no warp that multiplies waits until a sum has
// reached memory, or asks for one that is already there.
struct Mailbox {
  uint32_t barriers;

  // This block's sums are in its slot.
  __device__ __forceinline__ uint32_t left() const { return barriers; }
  // So are those of the blocks that it collects from.
  __device__ __forceinline__ uint32_t collectable() const { return barriers + 8; }

  __device__ __forceinline__ void init(int leaving_warps) const {
    mbarrier_init(left(), leaving_warps);
    mbarrier_init(collectable(), 1);
  }

  // The courier.
  __device__ __forceinline__ void serve(const SmallWgmmaArgs& args, const Stretch& stretch, int lane) const {
    if (stretch.leaves) {
      mbarrier_wait(left(), 0);
      if (lane == 0) st_release_gpu(args.raised + blockIdx.x, 1);
    }
    if (stretch.collects) {
      for (int block = blockIdx.x + 1 + lane; block < stretch.collects; block += WARP) {
        while (ld_acquire_gpu(args.raised + block) == 0) {
        }
        args.raised[block] = 0;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(collectable());
    }
  }
};

// A thread's sums of one row block, and who adds what to them. All warpgroups but the producer's come to each call together.
template <class T, int SHAPE>
struct Finish {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results(), COLUMN = S.row_groups * WARPGROUP, THREADS = S.consumers() * WARPGROUP;
  using Sum = float[RESULTS];
  const SmallWgmmaArgs& args;
  const Mailbox mailbox;
  float* const shared_sums;
  const int k_group, column;  // column: thread among those of its k group
  const bool pairs;           // y takes two rows at a time

  __device__ __forceinline__ Finish(const SmallWgmmaArgs& a, Mailbox box, float* sums, int group)
      : args(a), mailbox(box), shared_sums(sums), k_group(group), column(threadIdx.x % COLUMN),
        pairs(a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0) {}

  // The sums of row block `row_block`, whose units in the stretch begin with `first` and end before `last`.
  __device__ __forceinline__ void operator()(Sum& sum, int row_block, int first, int last) const {
    if (S.k_groups > 1) add_k_groups(sum);
    if (k_group > 0) return;
    if (first > row_block * args.bursts) {
      leave(sum);
    } else {
      if (last < (row_block + 1) * args.bursts) collect(sum, (row_block + 1) * args.bursts);
      store(sum, row_block);
    }
  }

  __device__ __forceinline__ static void sync() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

  __device__ __forceinline__ void add_k_groups(Sum& sum) const {
    sync();  // the sums of the row block before have been read
    if (k_group > 0) {
#pragma unroll
      for (int i = 0; i < RESULTS; ++i) shared_sums[((k_group - 1) * RESULTS + i) * COLUMN + column] = sum[i];
    }
    sync();
    if (k_group > 0) return;
#pragma unroll
    for (int g = 0; g < S.k_groups - 1; ++g) {
#pragma unroll
      for (int i = 0; i < RESULTS; ++i) sum[i] += shared_sums[(g * RESULTS + i) * COLUMN + column];
    }
  }

  __device__ __forceinline__ float4* slot(int block) const {
    return args.slots + int64_t(block) * (S.slot_floats() / 4) + column;
  }

  __device__ __forceinline__ void leave(const Sum& sum) const {
    float4* to = slot(blockIdx.x);
#pragma unroll
    for (int i = 0; i < RESULTS / 4; ++i) {
      __stcg(to + i * COLUMN, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    }
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(mailbox.left());
  }

  // The slots of the blocks behind this one that begin before unit `end`.
  __device__ __forceinline__ void collect(Sum& sum, int end) const {
    const int stop = args.deal.blocks_before(end);
    mbarrier_wait(mailbox.collectable(), 0);
#pragma unroll 2
    for (int block = blockIdx.x + 1; block < stop; ++block) {
      const float4* from = slot(block);
#pragma unroll
      for (int i = 0; i < RESULTS / 4; ++i) {
        const float4 v = __ldcg(from + i * COLUMN);
        sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
      }
    }
  }

  // Bias, rounding and output. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight; y wants
  // neighbouring rows together, so 8x8 matrices are transposed on the way.
  __device__ __forceinline__ void store(const Sum& sum, int row_block) const {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int row_group = column / WARPGROUP, warp = column % WARPGROUP / WARP;
    const int first_row = row_block * S.block_rows() + row_group * S.stack * WARPGROUP_ROWS + warp * TILE_ROWS;
    uint16_t* const y = static_cast<uint16_t*>(args.y);
#pragma unroll
    for (int half = 0; half < 2 * S.stack; ++half) {
      const int h = half % 2, stacked = half / 2;
      const int eight = first_row + stacked * WARPGROUP_ROWS + 8 * h, bias_row = eight + g, row = eight + 2 * t;
      const float bias = args.bias && bias_row < args.n ? to_float(static_cast<const T*>(args.bias)[bias_row]) : 0.0f;
#pragma unroll
      for (int i = 0; i < S.tokens / 8; ++i) {
        const float* const of = sum + stacked * (S.tokens / 2) + 4 * i + 2 * h;
        const uint32_t pair = movmatrix_trans(round_pair<T>(of[0] + bias, of[1] + bias));
        const int token = 8 * i + g;
        if (token < args.m) put(y + int64_t(token) * args.n + row, pair, args.n - row);
      }
    }
  }

  // As many of the pair as there are rows.
  __device__ __forceinline__ void put(uint16_t* to, uint32_t pair, int rows) const {
    if (pairs && rows > 0) {
      *reinterpret_cast<uint32_t*>(to) = pair;
    } else {
      if (rows > 0) to[0] = uint16_t(pair);
      if (rows > 1) to[1] = uint16_t(pair >> 16);
    }
  }
};

}  // namespace nf4l
