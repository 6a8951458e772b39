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

// A row block that several blocks share is the tail of the block that begins it, its owner, and the head of the others. They
// leave their sums in a slot of theirs and go on, and the owner adds the others' to its own when it is done itself; or, where
// all end together (Sharers::spread), each of them adds up some of the tokens: the same bits at every call. Nobody waits before it
// has left all that others wait for, so that only blocks which have not started can be waited for long: by the few that
// share a row block with them.
//
// Counters between blocks are a courier's business, a thread that does nothing else: no warp that multiplies waits until a
// sum has reached memory, or asks for one that is already there. The owner's counter counts the sums that were left; where
// several wait for it, then those that have seen it, and the last of them clears it.
struct Mailbox {
  enum Which { HEAD, TAIL };

  uint32_t barriers;

  // The sums of that row block are in this block's slot.
  __device__ __forceinline__ uint32_t left(Which which) const { return barriers + which * 8; }
  // All that this block adds up are.
  __device__ __forceinline__ uint32_t complete(Which which) const { return barriers + 16 + which * 8; }

  __device__ __forceinline__ void init(int leaving_warps) const {
    mbarrier_init(left(HEAD), leaving_warps);
    mbarrier_init(left(TAIL), leaving_warps);
    mbarrier_init(complete(HEAD), 1);
    mbarrier_init(complete(TAIL), 1);
  }

  // The courier.
  __device__ __forceinline__ void serve(const SmallWgmmaArgs& args, const Stretch& stretch) const {
    const int first = stretch.begin / args.bursts, last = (stretch.end - 1) / args.bursts;
    const bool head = first * args.bursts < stretch.begin;
    const bool tail = last * args.bursts >= stretch.begin && stretch.end < (last + 1) * args.bursts;
    const Sharers of_head(args.deal, first, args.bursts), of_tail(args.deal, last, args.bursts);
    if (head) report(args, of_head, HEAD);
    if (tail && of_tail.spread()) report(args, of_tail, TAIL);
    if (head && of_head.spread()) await_all(args, of_head, HEAD);
    if (tail && of_tail.spread()) await_all(args, of_tail, TAIL);
    if (tail && !of_tail.spread()) {
      unsigned* const arrived = args.arrived + of_tail.owner;
      while (ld_acquire_gpu(arrived) + 1 < of_tail.count()) {
      }
      *arrived = 0;
      mbarrier_arrive(complete(TAIL));
    }
  }

  __device__ __forceinline__ void report(const SmallWgmmaArgs& args, const Sharers& sharers, Which which) const {
    mbarrier_wait(left(which), 0);
    red_add_release_gpu(args.arrived + sharers.owner, 1);
  }

  __device__ __forceinline__ void await_all(const SmallWgmmaArgs& args, const Sharers& sharers, Which which) const {
    unsigned* const arrived = args.arrived + sharers.owner;
    while (ld_acquire_gpu(arrived) < sharers.count()) {
    }
    if (atomicAdd(arrived, 1) + 1 == 2 * sharers.count()) *arrived = 0;
    mbarrier_arrive(complete(which));
  }
};

// A thread's sums of one row block, and who adds what to them.
template <class T, int SHAPE>
struct Finish {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results(), COLUMN = S.row_groups * WARPGROUP, EIGHTS = RESULTS / 4;
  using Sum = float[RESULTS];
  const SmallWgmmaArgs& args;
  const Mailbox mailbox;
  const bool pairs;  // y takes two rows at a time

  __device__ __forceinline__ Finish(const SmallWgmmaArgs& a, Mailbox box)
      : args(a), mailbox(box), pairs(a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0) {}

  // The sums of row block `row_block`, whose units in the stretch begin with `first` and end before `last`.
  __device__ __forceinline__ void operator()(Sum& sum, int row_block, int first, int last) const {
    if (first > row_block * args.bursts) {
      leave(sum, Mailbox::HEAD);
      return;
    }
    if (last < (row_block + 1) * args.bursts) {
      const Sharers sharers(args.deal, row_block, args.bursts);
      if (sharers.spread()) {
        leave(sum, Mailbox::TAIL);
        return;
      }
      collect(sum, sharers);
    }
    const float2 bias = load_bias(row_block);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      store(make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]), i, row_block, bias);
    }
  }

  // What this block adds up at its end.
  __device__ __forceinline__ void end(const Stretch& stretch) const {
    const int first = stretch.begin / args.bursts, last = (stretch.end - 1) / args.bursts;
    if (first * args.bursts < stretch.begin) add_up(first, Mailbox::HEAD);
    if (last * args.bursts >= stretch.begin && stretch.end < (last + 1) * args.bursts) add_up(last, Mailbox::TAIL);
  }

  // This thread's column of a slot: element i * COLUMN has its results for tokens 8 i .. 8 i + 7.
  __device__ __forceinline__ float4* slot(int block, Mailbox::Which which) const {
    return args.slots + (int64_t(block) * 2 + which) * (S.slot_floats() / 4) + threadIdx.x;
  }

  __device__ __forceinline__ void leave(const Sum& sum, Mailbox::Which which) const {
    float4* to = slot(blockIdx.x, which);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      __stcg(to + i * COLUMN, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    }
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(mailbox.left(which));
  }

  // The owner alone.
  __device__ __forceinline__ void collect(Sum& sum, const Sharers& sharers) const {
    mbarrier_wait(mailbox.complete(Mailbox::TAIL), 0);
#pragma unroll 2
    for (int block = sharers.owner + 1; block < sharers.stop; ++block) {
      const float4* from = slot(block, Mailbox::HEAD);
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) {
        const float4 v = __ldcg(from + i * COLUMN);
        sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
      }
    }
  }

  // Each of the sharers: every count-th eight of the tokens, beginning with that of its rank. The loads of two are under way at
  // once.
  __device__ __forceinline__ void add_up(int row_block, Mailbox::Which which) const {
    const Sharers sharers(args.deal, row_block, args.bursts);
    const int count = sharers.count();
    int eight = blockIdx.x - sharers.owner;
    if (!sharers.spread() || eight >= EIGHTS) return;
    const float2 bias = load_bias(row_block);
    mbarrier_wait(mailbox.complete(which), 0);
    for (; eight < EIGHTS; eight += 2 * count) {
      float4 v[2][Sharers::MOST_SPREAD];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int s = 0; s < Sharers::MOST_SPREAD; ++s) {
          const float4* from = slot(sharers.owner + s, s == 0 ? Mailbox::TAIL : Mailbox::HEAD) + (eight + j * count) * COLUMN;
          v[j][s] = s < count && eight + j * count < EIGHTS ? __ldcg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float4 sum = v[j][0];
#pragma unroll
        for (int s = 1; s < Sharers::MOST_SPREAD; ++s) {
          sum.x += v[j][s].x, sum.y += v[j][s].y, sum.z += v[j][s].z, sum.w += v[j][s].w;
        }
        if (eight + j * count < EIGHTS) store(sum, eight + j * count, row_block, bias);
      }
    }
  }

  // A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight.
  __device__ __forceinline__ int first_row(int row_block) const {
    return row_block * S.block_rows() + threadIdx.x / WARP * TILE_ROWS;
  }

  __device__ __forceinline__ float2 load_bias(int row_block) const {
    const int row = first_row(row_block) + threadIdx.x % WARP / 4;
    const T* const bias = static_cast<const T*>(args.bias);
    return {bias && row < args.n ? to_float(bias[row]) : 0.0f, bias && row + 8 < args.n ? to_float(bias[row + 8]) : 0.0f};
  }

  // Bias, rounding and output of the results for eight tokens. y wants neighbouring rows together, so 8x8 matrices are
  // transposed on the way.
  __device__ __forceinline__ void store(const float4& v, int eight, int row_block, float2 bias) const {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int row = first_row(row_block) + 2 * t, token = 8 * eight + g;
    const uint32_t low = movmatrix_trans(round_pair<T>(v.x + bias.x, v.y + bias.x));
    const uint32_t high = movmatrix_trans(round_pair<T>(v.z + bias.y, v.w + bias.y));
    if (token >= args.m) return;
    uint16_t* const to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.n + row;
    put(to, low, args.n - row);
    put(to + 8, high, args.n - row - 8);
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
