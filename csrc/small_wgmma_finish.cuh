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

namespace nf4l {

// A thread's sums of one row block, and who adds what to them. All warpgroups but the producer's come to each call together.
template <class T, int SHAPE>
struct Finish {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results(), COLUMN = S.row_groups * WARPGROUP, THREADS = S.consumers() * WARPGROUP;
  using Sum = float[RESULTS];
  const SmallWgmmaArgs& args;
  float* const shared_sums;
  const int k_group, column;  // column: thread among those of its k group
  const bool pairs;           // y takes two rows at a time

  __device__ __forceinline__ Finish(const SmallWgmmaArgs& a, float* sums, int group)
      : args(a), shared_sums(sums), k_group(group), column(threadIdx.x % COLUMN),
        pairs(a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0) {}

  // The sums of row block `row_block` for units first .. last - 1.
  //
  // A row block that several blocks share belongs to the one that begins it: it has the block's bursts last in its stretch,
  // the others have theirs first. They leave their sums in their slot and go on, waiting for nobody, and the owner adds
  // them up when it is done itself, in order: the same bits at every call. Of the blocks that run, only the last to have
  // started can wait for one that has not.
  __device__ __forceinline__ void operator()(Sum& sum, int row_block, int first, int last) const {
    const int begin = row_block * args.bursts, end = begin + args.bursts;
    if (S.k_groups > 1) add_k_groups(sum);
    if (first > begin) {
      leave(sum);
    } else {
      if (last < end) collect(sum, end);
      if (k_group == 0) store(sum, row_block);
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
    if (k_group == 0) {
      float4* to = slot(blockIdx.x);
#pragma unroll
      for (int i = 0; i < RESULTS / 4; ++i) {
        __stcg(to + i * COLUMN, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
      }
      __threadfence();
    }
    sync();
    if (threadIdx.x == 0) st_release_gpu(args.raised + blockIdx.x, 1);
  }

  // The slots of the blocks behind this one that begin before unit `end`.
  __device__ __forceinline__ void collect(Sum& sum, int end) const {
    const int next = blockIdx.x + 1, stop = args.deal.blocks_before(end);
    for (int block = next + threadIdx.x; block < stop; block += THREADS) {
      while (ld_acquire_gpu(args.raised + block) == 0) {
      }
      args.raised[block] = 0;
    }
    sync();
    if (k_group > 0) return;
#pragma unroll 2
    for (int block = next; block < stop; ++block) {
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
    const int first_row = row_block * S.block_rows() + column / WARP * TILE_ROWS;
    uint16_t* const y = static_cast<uint16_t*>(args.y);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int bias_row = first_row + 8 * h + g, row = first_row + 8 * h + 2 * t;
      const float bias = args.bias && bias_row < args.n ? to_float(static_cast<const T*>(args.bias)[bias_row]) : 0.0f;
#pragma unroll
      for (int i = 0; i < RESULTS / 4; ++i) {
        const uint32_t pair = movmatrix_trans(round_pair<T>(sum[4 * i + 2 * h] + bias, sum[4 * i + 2 * h + 1] + bias));
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
