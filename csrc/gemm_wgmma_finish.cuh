// The prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with the story
// of all its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "wgmma_sm90.cuh"

namespace nf4l {

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
  static constexpr int STEP_VECTORS = S.STORE_TOKENS / 8;  // float4 of a lane: rows g, g + 8, two tokens
  static constexpr int LAG = 2;                            // steps sent before the first is asked for
  using Sums = float[S.tokens / 2];
  const GemmArgs<typename Format::Weight>& args;
  const GemmRing<Format, SHAPE>& ring;  // [places][warpgroups][STEP_VECTORS][128] float4, where x has been
  const uint32_t buffers;               // two
  const int warpgroup, thread;

  // The sums of a piece of work.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmWork& work) const {
    bar_sync(2 + warpgroup, WARPGROUP);  // nobody reads the buffers any more
    const GemmRows rows = rows_of(work);
    if (!work.sliced) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) store(sums, rows, step, step % 2);
      return;
    }
    const GemmShares shares = {args.grid.blocks};
    int stored = 0;
    cluster_sync_threads();
#pragma unroll
    for (int step = 0; step < STEPS + LAG; ++step) {
      if (step < STEPS && shares.owner(step) != work.rank) send(sums, shares, step, work.rank);
      if (step >= LAG && shares.owner(step - LAG) == work.rank) {
        collect(sums, shares, step - LAG, work.rank);
        store(sums, rows, step - LAG, stored++ % 2);
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
    for (int i = 0; i < STEP_VECTORS; ++i) {
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
      for (int i = 0; i < STEP_VECTORS; ++i) {
        const float4 v = ld_shared_f32x4(at + i * (WARPGROUP * 16));
        float* sum = sums + 4 * (step * STEP_VECTORS + i);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
    }
  }

  // Where a thread's values of a tile belong.
  struct GemmRows {
    float2 bias;  // of rows g and g + 8 of its warp
    int column;   // the first of the eight rows that it stores
    int token;    // the first that it stores
  };

  __device__ __forceinline__ GemmRows rows_of(const GemmWork& work) const {
    const int lane = thread % WARP, warp = thread / WARP;
    const int first_row = work.row_block * S.block_rows() + warpgroup * WARPGROUP_ROWS;
    const int row = first_row + warp * TILE_ROWS + lane / 4;
    return {{bias_of(row), bias_of(row + 8)}, first_row + lane % CHUNKS * 8, work.token_tile * S.tokens + first_line()};
  }

  // A step. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight; y wants neighbouring
  // rows together, so 8x8 matrices are transposed on the way into a buffer of STORE_TOKENS lines of 64 rows, whose
  // chunks of eight rows are swizzled for the banks' sake. From there a warp stores whole lines, four at once: the
  // load-store unit takes a cycle for each line that an instruction touches.
  static constexpr int LINES = 4, CHUNKS = 8;
  __device__ __forceinline__ int first_line() const {
    return thread / WARP * (S.STORE_TOKENS / 4) + thread % WARP / CHUNKS;
  }

  __device__ __forceinline__ void store(const Sums& sums, const GemmRows& rows, int step, int which) const {
    const int lane = thread % WARP, warp = thread / WARP;
    const uint32_t buffer = buffers + which * (S.STORE_TOKENS * LINE_BYTES);
    const float2 bias = rows.bias;
#pragma unroll
    for (int j = 0; j < STEP_VECTORS; j += 2) {
      const float* v = sums + 4 * (step * STEP_VECTORS + j);
      const int line = (j + lane / 16) * 8 + lane % 8, own = warp * 2 + lane / 8 % 2;
      stmatrix_x4_trans(buffer + line * LINE_BYTES + ((own ^ lane % 8) << 4),
                        round_pair<T>(v[0] + bias.x, v[1] + bias.x), round_pair<T>(v[2] + bias.y, v[3] + bias.y),
                        round_pair<T>(v[4] + bias.x, v[5] + bias.x), round_pair<T>(v[6] + bias.y, v[7] + bias.y));
    }
    bar_sync(2 + warpgroup, WARPGROUP);
#pragma unroll
    for (int i = 0; i < S.STORE_TOKENS / 4; i += LINES) {
      const int line = first_line() + i, token = rows.token + step * S.STORE_TOKENS + i;
      if (token >= args.m) continue;
      uint16_t* to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.n + rows.column;
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
