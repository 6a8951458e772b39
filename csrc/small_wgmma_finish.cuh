// The wgmma engine's ways out: sums of several warpgroups and blocks made one, and stored. The engine itself, with the
// story of all its files, is small_wgmma.cuh.
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

// A row block that several blocks share is the tail of the block that begins it, its owner, and the head of the others.
// They leave their sums in a slot of theirs and go on, and the owner adds the others' to its own when it is done
// itself; or, where all end together (Sharers::spread), each of them adds up some of the tokens: the same bits at every
// call. Nobody waits before it has left all that others wait for, so that only blocks which have not started can be
// waited for long: by the few that share a row block with them. That they will start is what the hardware does, no
// promise of CUDA's: blocks start in order, those of a launch before those of the next.
//
// Counters between blocks are a courier's business, a thread that does nothing else: no warp that multiplies waits
// until a sum has reached memory, or asks for one that is already there. The owner's counter counts the sums that were
// left; where several wait for it, then those that have seen it, and the last of them clears it.
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
  template <class Args>
  __device__ __forceinline__ void serve(const Args& args, const Stretch& stretch) const {
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

  template <class Args>
  __device__ __forceinline__ void report(const Args& args, const Sharers& sharers, Which which) const {
    mbarrier_wait(left(which), 0);
    red_add_release_gpu(args.arrived + sharers.owner, 1);
  }

  template <class Args>
  __device__ __forceinline__ void await_all(const Args& args, const Sharers& sharers, Which which) const {
    unsigned* const arrived = args.arrived + sharers.owner;
    while (ld_acquire_gpu(arrived) < sharers.count()) {
    }
    mbarrier_arrive(complete(which));  // first: the counter's answer takes as long as reading a sum
    if (atomicAdd(arrived, 1) + 1 == 2 * sharers.count()) *arrived = 0;
  }
};

// A thread's sums of one row block, and who adds what to them. Engine: the type of y, the shape, and what a call
// consists of.
template <class Engine>
struct Finish {
  using T = typename Engine::Type;
  using Args = typename Engine::Args;
  static constexpr auto S = Engine::S;
  static constexpr int RESULTS = S.lane_results(), COLUMN = S.row_groups * WARPGROUP, EIGHTS = RESULTS / 4;
  using Sum = float[RESULTS];
  const Args& args;
  const Mailbox mailbox;
  const bool pairs;  // y takes two neighbours at a time

  __device__ __forceinline__ Finish(const Args& a, Mailbox box)
      : args(a), mailbox(box), pairs(row_length(a) % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0) {}

  // Of y.
  __device__ __forceinline__ static int row_length(const Args& a) {
    if constexpr (Engine::TRANSPOSES) return a.transposed ? a.m : a.n;
    else return a.n;
  }

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
    const Rows rows(args, first_row(row_block));
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      store(make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]), i, row_block, rows);
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

  // Each of the sharers: every count-th eight of the tokens, beginning with that of its rank. The loads of two are
  // under way at once.
  __device__ __forceinline__ void add_up(int row_block, Mailbox::Which which) const {
    const Sharers sharers(args.deal, row_block, args.bursts);
    const int count = sharers.count();
    int eight = blockIdx.x - sharers.owner;
    if (!sharers.spread() || eight >= EIGHTS) return;
    const Rows rows(args, first_row(row_block));
    mbarrier_wait(mailbox.complete(which), 0);
    for (; eight < EIGHTS; eight += 2 * count) {
      float4 v[2][Sharers::MOST_SPREAD];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int s = 0; s < Sharers::MOST_SPREAD; ++s) {
          const auto which = s == 0 ? Mailbox::TAIL : Mailbox::HEAD;
          const float4* from = slot(sharers.owner + s, which) + (eight + j * count) * COLUMN;
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
        if (eight + j * count < EIGHTS) store(sum, eight + j * count, row_block, rows);
      }
    }
  }

  // A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight.
  __device__ __forceinline__ int first_row(int row_block) const {
    return row_block * S.block_rows() + threadIdx.x / WARP * TILE_ROWS;
  }

  // What makes results of the sums of a lane's two rows.
  struct Rows {
    float2 bias, scale = {1.0f, 1.0f};

    __device__ __forceinline__ Rows(const Args& args, int first_row) {
      const int row = first_row + threadIdx.x % WARP / 4;
      const bool low = row < args.n, high = row + 8 < args.n;
      const T* const b = static_cast<const T*>(args.bias);
      bias = {b && low ? to_float(b[row]) : 0.0f, b && high ? to_float(b[row + 8]) : 0.0f};
      if constexpr (Engine::ROW_SCALES) {
        scale = {low ? args.row_scale(row) : 0.0f, high ? args.row_scale(row + 8) : 0.0f};
      }
    }

    __device__ __forceinline__ float4 result(const float4& v) const {
      if constexpr (Engine::ROW_SCALES) {
        return {fmaf(v.x, scale.x, bias.x), fmaf(v.y, scale.x, bias.x), fmaf(v.z, scale.y, bias.y),
                fmaf(v.w, scale.y, bias.y)};
      } else {
        return {v.x + bias.x, v.y + bias.x, v.z + bias.y, v.w + bias.y};
      }
    }
  };

  // Rounding and output of the results for eight tokens. y wants neighbouring rows together, so 8x8 matrices are
  // transposed on the way; not so y transposed.
  __device__ __forceinline__ void store(const float4& sums, int eight, int row_block, const Rows& rows) const {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, row = first_row(row_block);
    const float4 v = rows.result(sums);
    if constexpr (Engine::TRANSPOSES) {
      if (args.transposed) {
        store_transposed(round_pair<T>(v.x, v.y), round_pair<T>(v.z, v.w), row + g, 8 * eight + 2 * t);
        return;
      }
    }
    const uint32_t low = movmatrix_trans(round_pair<T>(v.x, v.y)), high = movmatrix_trans(round_pair<T>(v.z, v.w));
    const int token = 8 * eight + g;
    if (token >= args.m) return;
    uint16_t* const to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.n + row + 2 * t;
    put(to, low, args.n - row - 2 * t);
    put(to + 8, high, args.n - row - 2 * t - 8);
  }

  // Of tokens `token` and the next, for rows `row` and eight further.
  __device__ __forceinline__ void store_transposed(uint32_t low, uint32_t high, int row, int token) const {
    uint16_t* const to = static_cast<uint16_t*>(args.y) + int64_t(row) * args.m + token;
    if (row < args.n) put(to, low, args.m - token);
    if (row + 8 < args.n) put(to + int64_t(8) * args.m, high, args.m - token);
  }

  // As many of the pair as are `left`.
  __device__ __forceinline__ void put(uint16_t* to, uint32_t pair, int left) const {
    if (pairs && left > 0) {
      *reinterpret_cast<uint32_t*>(to) = pair;
    } else {
      if (left > 0) to[0] = uint16_t(pair);
      if (left > 1) to[1] = uint16_t(pair >> 16);
    }
  }
};

}  // namespace nf4l
