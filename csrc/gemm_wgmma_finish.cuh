// The prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with the story
// of all its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "gemm_wgmma_shape.h"
#include "wgmma_sm90.cuh"

namespace nf4l {

// Two clusters of two blocks that have four slices of an output tile, and exchange their sums of it through memory: of
// each half of the tile's tokens, one brings a warpgroup's sums and the other adds its own and stores them. Who asks
// first brings, so nobody waits for a cluster that has not started; and as each begins with another half, each mostly
// brings one and adds one. Two numbers have the same sum in either order.
//
// Nobody waits in a circle. Who brings needs steps of that half from its neighbour in the cluster, which may wait
// before it has sent them only to add its own first half. That is brought by a block in its second half, whose
// neighbour sends the steps of that half before it waits, unless it waits to add its own first half too: for the one
// that needed the steps, which would then be in its second half. tests/test_gemm_meeting.py goes through all orders.
//
// A counter for each half, rank and warpgroup of a tile: 1 for each of the two that has asked, 2 when the sums are in
// memory; 0 again when that has been seen.
struct GemmMeeting {
  unsigned* counters;     // of halves, `stride` apart
  const int stride;
  const uint32_t ticket;  // where thread 0 tells the others what it got
  const int warpgroup, thread;
  unsigned got = 0;
  bool brings = false;

  // Asks who brings that half; enter() takes the answer.
  __device__ __forceinline__ void ask(int half) { got = atom_add_if(counters + half * stride, 1, thread == 0); }
  // From here on `brings` is known, and who does not may read the sums.
  __device__ __forceinline__ void enter(int half) {
    if (thread == 0) {
      st_shared_u32(ticket, got);
      if (got) {
        while (ld_acquire_gpu(counters + half * stride) < 4) {}
        counters[half * stride] = 0;
      }
    }
    bar_sync(2 + warpgroup, WARPGROUP);
    brings = ld_shared_u32(ticket) == 0;
  }
  // The sums of that half are brought.
  __device__ __forceinline__ void leave(int half) const {
    bar_sync(2 + warpgroup, WARPGROUP);
    if (thread == 0) red_add_release_gpu(counters + half * stride, 2);
  }
};

// A warpgroup's rows of output tiles.
//
// A tile's tokens are stored in steps of STORE_TOKENS. Where the blocks of a cluster have a slice of its k tiles each,
// they do it together (GemmShares): all wait until nobody's tensor cores read shared memory any more; then each sends
// the others their steps, in order, and stores its own two steps later, with what it was sent added in the order of the
// slices. Another block's shared memory takes about 16 bytes a cycle, in the meantime of which stores are done. Blocks
// of a cluster run at the same time, so that nobody waits for one that has not started.
template <class Format, class T, int SHAPE>
struct GemmFinish {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int LINE_BYTES = Format::BYTES.stride;
  static constexpr int STEPS = S.store_steps();
  static constexpr int STEP_VECTORS = S.STORE_TOKENS / 8;  // float4 of a lane: rows g, g + 8, two tokens; at most
  static constexpr int LAG = 2;                            // steps sent before the first is asked for
  using Sums = float[S.tokens / 2];
  // Tokens of a step, and float4 of a lane.
  __device__ __forceinline__ static constexpr int tokens_of(int step) {
    constexpr GemmShape shape = S;
    return shape.step_tokens(step);
  }
  __device__ __forceinline__ static constexpr int vectors_of(int step) { return tokens_of(step) / 8; }
  const GemmArgs<typename Format::Weight>& args;
  const GemmRing<Format, SHAPE>& ring;  // [places][warpgroups][STEP_VECTORS][128] float4, where x has been
  const uint32_t buffers;               // two
  const int warpgroup, thread;

  // Where a thread's values of a tile belong.
  struct GemmRows {
    float2 bias;  // of rows g and g + 8 of its warp
    int column;   // the first of the eight rows that it stores
    int token;    // the first that it stores, if that is not before
    int first;    // which is the tile's
  };

  // The sums of a piece of work.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmWork& work) const {
    bar_sync(2 + warpgroup, WARPGROUP);  // nobody reads the buffers any more
    const GemmRows rows = rows_of(work);
    if (!work.sliced) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) store(sums, rows, step, step, step % 2);
      return;
    }
    const GemmShares shares = {args.grid.blocks};
    GemmMeeting meeting = meeting_of(work);
    const bool meets = S.meets() && args.grid.parts > 1;
    int stored = 0;
    if (meets) meeting.ask(work.part);
    cluster_sync_threads();
#pragma unroll
    for (int step = 0; step < STEPS + LAG; ++step) {
      if (step < STEPS && shares.owner(step) != work.rank) send(sums, shares, step, work.rank);
      if (step >= LAG && shares.owner(step - LAG) == work.rank) {
        collect(sums, shares, step - LAG, work.rank);
        if (meets) meet(sums, rows, meeting, work, step - LAG, stored);
        else store(sums, rows, step - LAG, step - LAG, stored++ % 2);
      }
    }
  }

  __device__ __forceinline__ uint32_t place(const GemmShares& shares, int step, int from) const {
    constexpr int WARPGROUP_BYTES = STEP_VECTORS * WARPGROUP * 16;
    static_assert(S.step_bytes() == S.consumers * WARPGROUP_BYTES);
    return ring.x(0) + shares.place(step, from) * S.step_bytes() + warpgroup * WARPGROUP_BYTES + thread * 16;
  }

  __device__ __forceinline__ void send(const Sums& sums, const GemmShares& shares, int step, int slice) const {
    const int to = shares.owner(step);
    const uint32_t at = cluster_address(place(shares, step, slice), to);
    const uint32_t arrived = cluster_address(ring.arrived(step), to);
#pragma unroll
    for (int i = 0; i < vectors_of(step); ++i) {
      const float* v = sums + 4 * (step * STEP_VECTORS + i);
      st_async_f32x4(at + i * (WARPGROUP * 16), {v[0], v[1], v[2], v[3]}, arrived);
    }
  }

  __device__ __forceinline__ void collect(Sums& sums, const GemmShares& shares, int step, int slice) const {
    mbarrier_wait_cluster(ring.arrived(step), 0);
#pragma unroll 1
    for (int from = 0; from < shares.slices; ++from) {
      if (from == slice) continue;
      const uint32_t at = place(shares, step, from);
#pragma unroll
      for (int i = 0; i < vectors_of(step); ++i) {
        const float4 v = ld_shared_f32x4(at + i * (WARPGROUP * 16));
        float* sum = sums + 4 * (step * STEP_VECTORS + i);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
    }
  }

  static_assert(!S.meets() || 4 * S.consumers <= GEMM_MEETING_COUNTERS);
  __device__ __forceinline__ static GemmMeetingPlace place_of(const GemmWork& work) {
    return {work.sliced_tile(), work.rank, S};
  }
  __device__ __forceinline__ GemmMeeting meeting_of(const GemmWork& work) const {
    unsigned* counters = args.meetings + place_of(work).counter(0, warpgroup);
    return {counters, S.consumers, ring.ticket(warpgroup), warpgroup, thread};
  }

  // A step of a tile that two clusters share, with the sums of its own: brought, or added to and stored.
  __device__ __forceinline__ void meet(Sums& sums, const GemmRows& rows, GemmMeeting& meeting, const GemmWork& work,
                                       int step, int& stored) const {
    constexpr int HALF = STEPS / 2;
    const int half = step / HALF ^ work.part, in_half = step % HALF;
    const int slot = place_of(work).slot(half, in_half / 2, warpgroup);
    float4* at = args.sums + slot * (STEP_VECTORS * WARPGROUP) + thread;
    float* sum = sums + step * STEP_VECTORS * 4;
    if (in_half < 2) meeting.enter(half);
    if (meeting.brings) {
#pragma unroll
      for (int i = 0; i < STEP_VECTORS; ++i) {
        at[i * WARPGROUP] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
      }
      if (in_half >= HALF - 2) meeting.leave(half);
    } else {
#pragma unroll
      for (int i = 0; i < STEP_VECTORS; ++i) {
        const float4 v = ld_relaxed_gpu_f32x4(at + i * WARPGROUP);
        sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
      }
      store(sums, rows, step, half * HALF + in_half, stored++ % 2);
    }
    if (step < HALF && in_half >= HALF - 2) meeting.ask(half ^ 1);
  }

  __device__ __forceinline__ GemmRows rows_of(const GemmWork& work) const {
    const int lane = thread % WARP, warp = thread / WARP;
    const int first_row = work.row_block * S.block_rows() + warpgroup * WARPGROUP_ROWS;
    const int row = first_row + warp * TILE_ROWS + lane / 4;
    return {{bias_of(row), bias_of(row + 8)},
            first_row + lane % CHUNKS * 8,
            args.tokens.first(S.tokens, work.token_tile) + first_line(),
            work.token_tile * S.tokens};
  }

  // A step, to where the tile's step `token_step` belongs. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and
  // 2 t + 1 of each eight; y wants neighbouring rows together, so 8x8 matrices are transposed on the way into a buffer
  // of STORE_TOKENS lines of 64 rows, whose chunks of eight rows are swizzled for the banks' sake. From there a warp
  // stores whole lines, four at once: the load-store unit takes a cycle for each line that an instruction touches.
  static constexpr int LINES = 4, CHUNKS = 8;
  __device__ __forceinline__ int first_line() const {
    return thread / WARP * (S.STORE_TOKENS / 4) + thread % WARP / CHUNKS;
  }

  __device__ __forceinline__ void store(const Sums& sums, const GemmRows& rows, int step, int token_step,
                                        int which) const {
    const int lane = thread % WARP, warp = thread / WARP;
    const uint32_t buffer = buffers + which * (S.STORE_TOKENS * LINE_BYTES);
    const float2 bias = rows.bias;
#pragma unroll
    for (int j = 0; j < vectors_of(step); j += 2) {
      const float* v = sums + 4 * (step * STEP_VECTORS + j);
      const float* w = j + 1 < vectors_of(step) ? v + 4 : v;  // where there are no more, anything: it is not stored
      const int line = (j + lane / 16) * 8 + lane % 8, own = warp * 2 + lane / 8 % 2;
      stmatrix_x4_trans(buffer + line * LINE_BYTES + ((own ^ lane % 8) << 4),
                        round_pair<T>(v[0] + bias.x, v[1] + bias.x), round_pair<T>(v[2] + bias.y, v[3] + bias.y),
                        round_pair<T>(w[0] + bias.x, w[1] + bias.x), round_pair<T>(w[2] + bias.y, w[3] + bias.y));
    }
    bar_sync(2 + warpgroup, WARPGROUP);
#pragma unroll
    for (int i = 0; i < S.STORE_TOKENS / 4; i += LINES) {
      const int line = first_line() + i, token = rows.token + token_step * S.STORE_TOKENS + i;
      if (token < rows.first || token >= args.tokens.count || line >= tokens_of(step)) continue;
      uint16_t* to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.y_stride + rows.column;
      put(buffer + line * LINE_BYTES + ((lane % CHUNKS ^ line % 8) << 4), to, args.n - rows.column);
    }
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
  }

  // As many of a chunk's eight values as there are rows.
  __device__ __forceinline__ void put(uint32_t chunk, uint16_t* to, int rows) const {
    if (args.vectors) {
      if (rows > 0) st_global_u32x4(to, ld_shared_u32x4(chunk));
    } else {
#pragma unroll 1
      for (int e = 0; e < 8 && e < rows; ++e) to[e] = ld_shared_u16(chunk + 2 * e);
    }
  }
};

}  // namespace nf4l
